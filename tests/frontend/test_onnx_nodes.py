"""ONNX's own node tests (values that nobody here wrote), and models with stored outputs that its package carries."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

import onnx_table as table  # noqa: E402
from onnx import numpy_helper  # noqa: E402

import gradc  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.errors import GradcError, InvalidProblem, Unsupported  # noqa: E402

STRINGS_AND_COMPLEX = (onnx.TensorProto.STRING, onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
DATA = Path(onnx.__file__).parent / "backend/test/data"


@functools.cache
def cases() -> dict[str, list[Any]]:
    """The node tests on dense tensors of numbers, by operator; those with bodies written out are left out."""
    import onnx.backend.test.case.node as node

    before, node.function_testcase_helper = node.function_testcase_helper, lambda *_, **__: ([], 0)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = node.collect_testcases(None)
    finally:
        node.function_testcase_helper = before
    by_operator: dict[str, list[Any]] = {}
    for case in found:
        infos = [*case.model.graph.input, *case.model.graph.output]
        dense = all(
            i.type.HasField("tensor_type") and i.type.tensor_type.elem_type not in STRINGS_AND_COMPLEX for i in infos
        )
        if dense and case.model.graph.node[0].domain in ("", "ai.onnx"):
            by_operator.setdefault(case.model.graph.node[0].op_type, []).append(case)
    return by_operator


def array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def graph_of(model: Any, values: Mapping[str, np.ndarray]) -> tuple[gradc.Graph, list[np.ndarray]]:
    """The graph, and its inputs' values in order; inputs that shapes depend on are constants."""
    known = {name: values[name] for name in table.CONSTANTS.get(model.graph.node[0].op_type, ()) if name in values}
    graph = gradc.from_onnx(model, constants=known)
    return graph, [value for name, value in values.items() if name not in known]


def differs(case: Any) -> str:
    """What is wrong with a case's results, "" if nothing is."""
    inputs, wanted = case.data_sets[0]
    values = dict(zip((i.name for i in case.model.graph.input), map(array, inputs), strict=False))
    try:
        graph, given = graph_of(case.model, values)
    except (Unsupported, InvalidProblem) as error:
        return str(error)
    names = [n for n in graph.input_names if n not in graph.defaults]
    found = interp.run(graph, dict(zip(names, given, strict=True)))
    results = list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, tuple) else [found]
    assert len(results) == len(wanted)
    for got, want in zip(map(np.asarray, results), map(array, wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), case.name
        if got.dtype.kind in "biu":
            if not np.array_equal(got, want):
                return "other integers"
            continue
        short = got.dtype.itemsize < 4
        got, want = got.astype(np.float64), want.astype(np.float64)
        if not np.allclose(got, want, rtol=2e-2 if short else 1e-3, atol=1e-3 if short else 1e-5, equal_nan=True):
            return "other numbers"
    return ""


@pytest.mark.parametrize("operator", table.OPERATORS)
def test_node_tests(operator: str) -> None:
    """Every case of an operator: right, or on the list of those that are not, with the reason."""
    refused = {case.name.removeprefix("test_"): reason for case in cases()[operator] if (reason := differs(case))}
    names = {case.name.removeprefix("test_") for case in cases()[operator]}
    listed = {name: reason for name, reason in table.REFUSED.items() if name in names}
    assert refused.keys() == listed.keys(), refused
    for name, reason in refused.items():
        assert listed[name] in reason, (name, reason)


def test_the_list_is_whole() -> None:
    """Operators of this release of onnx, and how many of the cases are right."""
    assert set(table.OPERATORS) == cases().keys()
    total = sum(map(len, cases().values()))
    assert (total - len(table.REFUSED), total) == table.COUNTS


# -- models with stored outputs ----------------------------------------------------------------------------------------


def stored(kind: str) -> Iterator[Path]:
    yield from sorted((DATA / kind).glob("*/model.onnx"))


def tensors(folder: Path, what: str) -> list[np.ndarray]:
    found = []
    for path in sorted(folder.glob(f"{what}_*.pb"), key=lambda p: int(p.stem.rpartition("_")[2])):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(path.read_bytes())
        found.append(numpy_helper.to_array(tensor))
    return found


@pytest.mark.parametrize("kind", table.STORED)
def test_models_with_stored_outputs(kind: str) -> None:
    """What PyTorch exported once, of old opsets."""
    wrong: dict[str, str] = {}
    count = 0
    for path in stored(kind):
        model = onnx.load(path)
        if any(not i.type.HasField("tensor_type") for i in (*model.graph.input, *model.graph.output)):
            continue
        count += 1
        name = path.parent.name.removeprefix("test_")
        try:
            graph = gradc.from_onnx(path)
        except GradcError as error:
            wrong[name] = str(error)
            continue
        for data in sorted(path.parent.glob("test_data_set_*")):
            names = [n for n in graph.input_names if n not in graph.defaults]
            given = dict(zip(names, tensors(data, "input"), strict=False))
            found = interp.run(graph, given)
            results = list(found.values()) if isinstance(found, dict) else [found]
            for got, want in zip(results, tensors(data, "output"), strict=True):
                got, want = np.asarray(got, np.float64), want.astype(np.float64)
                if not np.allclose(got, want, rtol=1e-3, atol=1e-5, equal_nan=True):
                    wrong[name] = "other numbers"
    assert wrong.keys() == table.STORED[kind].keys(), wrong
    assert all(table.STORED[kind][name] in reason for name, reason in wrong.items()), wrong
    assert count == table.STORED_COUNTS[kind]
