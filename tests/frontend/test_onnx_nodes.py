"""ONNX's own node tests (values that nobody here wrote), their gradients against differences, and models with stored
outputs that its package carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

import onnx_table as table  # noqa: E402
from onnx import numpy_helper  # noqa: E402
from onnx_node_cases import cases  # noqa: E402

import gradc  # noqa: E402
from benchmarks import onnx_nodes as nodes  # noqa: E402
from benchmarks.onnx_nodes import name_of  # noqa: E402
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


# -- gradients ---------------------------------------------------------------------------------------------------------

FOUND = json.loads(nodes.RESULTS.read_text())["operators"]
OF_EACH = 2
"""Cases of an operator whose gradients are compared here; ``python -m benchmarks.onnx_nodes`` compares all."""


@pytest.mark.parametrize("operator", table.OPERATORS)
def test_gradients_of_node_tests(operator: str) -> None:
    """The first and the last case with a gradient: as the file says that all of them were found to be."""
    known = FOUND[operator]
    held = [case for case in cases()[operator] if known[name_of(case)].get("gradients") == nodes.HELD]
    for case in [held[k * (len(held) - 1) // max(1, OF_EACH - 1)] for k in range(min(OF_EACH, len(held)))]:
        assert nodes.verdict(case) == nodes.HELD, case.name


def test_the_file_of_gradients_is_whole() -> None:
    """Every case that is right has a gradient that is, too, or a reason; none is wrong; the page has the table."""
    names = {operator: set(map(name_of, found)) for operator, found in cases().items()}
    assert {operator: set(entries) for operator, entries in FOUND.items()} == names
    every = {name: entry for entries in FOUND.values() for name, entry in entries.items()}
    assert {name for name, entry in every.items() if entry["values"] != nodes.HELD} == table.REFUSED.keys()
    assert not [n for n, e in every.items() if n not in table.REFUSED and e.get("gradients", "FAILED") == "FAILED"]
    assert sum(entry.get("gradients") == nodes.HELD for entry in every.values()) == table.GRADIENTS


def test_the_page_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "onnx.md"
    page.write_text(nodes.PAGE.read_text())
    monkeypatch.setattr(nodes, "PAGE", page)
    nodes.write(nodes.RESULTS)
    assert page.read_text() == (Path(nodes.ROOT) / "docs/onnx.md").read_text()


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
