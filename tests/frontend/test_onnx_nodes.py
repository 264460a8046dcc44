"""ONNX's own node tests (values that nobody here wrote), their gradients against differences, and models with stored
outputs that its package carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

import onnx_table as table  # noqa: E402
from onnx import numpy_helper  # noqa: E402

import gradc  # noqa: E402
from benchmarks import onnx_nodes as nodes  # noqa: E402
from benchmarks.onnx_nodes import cases, name_of  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.errors import GradcError  # noqa: E402

DATA = Path(onnx.__file__).parent / "backend/test/data"


@pytest.mark.parametrize("operator", table.OPERATORS)
def test_node_tests(operator: str) -> None:
    """Every case of an operator: right, or on the list of those that are not, with the reason."""
    refused = {name_of(case): reason for case in cases()[operator] if (reason := nodes.differs(case))}
    names = set(map(name_of, cases()[operator]))
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
