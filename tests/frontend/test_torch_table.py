"""The table of ATen overloads: every line on samples of torch, values and gradients in f64; what lines name exists."""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402
from torch_samples import TAKEN  # noqa: E402

import gradc  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.torch import normal_form, table  # noqa: E402
from gradc.torch.importer import graph_of  # noqa: E402

ATEN = Path(table.__file__).parent / "aten"


def test_lines_name_what_exists() -> None:
    """Each line's overload is one of torch's, each op that a line calls one of gradc's."""
    missing = [key for key, line in table.lines().items() if key.startswith("aten.") and line.overload is None]
    for path in ATEN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops":
                missing += [f"{path.name}: ops.{node.attr}"] if node.attr not in ops.REGISTRY else []
    assert not missing


def test_private_names_of_torch_stand_in_one_file() -> None:
    """A release of torch that moves one is seen here, by name."""
    private = {}
    for path in ATEN.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch") and not node.level:
                for name in node.names:
                    if name.name.startswith("_") or any(word.startswith("_") for word in node.module.split(".")):
                        private[f"{node.module}.{name.name}"] = path.name
                    getattr(importlib.import_module(node.module), name.name)
    assert set(private.values()) <= {"normal_form.py"}, private
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


# -- torch's samples ---------------------------------------------------------------------------------------------------


def op_db() -> list[Any]:
    if "expecttest" not in sys.modules:  # torch's test package imports it, for what is not used here
        stub = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def title(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


class Case:
    """One sample of an op: a function of its tensors."""

    def __init__(self, op: Any, sample: Any):
        self.op, self.name = op, title(op)
        flat, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        self.flat = [None if isinstance(x, torch.Tensor) else x for x in flat]
        self.tensors = [flat[i].detach().requires_grad_(flat[i].requires_grad) for i in self.places]

    def __call__(self, *tensors: Any) -> list[Any]:
        flat = list(self.flat)
        for i, x in zip(self.places, tensors, strict=True):
            flat[i] = x
        args, kwargs = tree_unflatten(flat, self.spec)
        return [y for y in tree_flatten(self.op(*args, **kwargs))[0] if isinstance(y, torch.Tensor)]


def program(cases: Sequence[Case]) -> tuple[torch.nn.Module, list[Any]]:
    """All cases as one graph, which is traced once."""
    graph, arguments, results = torch.fx.Graph(), [], []
    for i, case in enumerate(cases):
        given = [graph.placeholder(f"x{i}_{j}") for j in range(len(case.tensors))]
        arguments += case.tensors
        case.__name__, case.__module__ = f"case{i}", __name__  # type: ignore[attr-defined]
        called = graph.call_function(case, tuple(given))
        results += [graph.call_function(lambda all, at: all[at], (called, j)) for j in range(len(case(*case.tensors)))]
    graph.output(tuple(results))
    return _Bare(graph), arguments


class _Bare(torch.nn.Module):
    """A graph to be interpreted; generated code could not name the cases."""

    def __init__(self, graph: Any):
        super().__init__()
        self.graph = graph


def imported(cases: Sequence[Case]) -> tuple[gradc.Graph, dict[str, Any], list[str]]:
    """The cases as one graph, its inputs' values, and the names of their outputs."""
    module, arguments = program(cases)
    form = normal_form.normal_form(module, arguments, table.is_kept)
    graph = form.module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = {n: f"x{i}" for i, n in enumerate(placeholders)}
    given = {f"x{i}": x for i, x in enumerate(arguments)}
    for node in graph.nodes:
        if node.op == "get_attr":
            inputs[node] = f"c{len(inputs)}"
            given[inputs[node]] = getattr(form.module, node.target)
    results = list(graph.output_node().args[0])[len(form.mutated) :]
    names = [f"y{i}" for i in range(len(results))]
    made, refused = graph_of(
        [n for n in graph.nodes if n.op == "call_function"], inputs, list(zip(names, results, strict=True)), "samples"
    )
    assert not refused, "\n".join(map(str, refused))
    return made, {n: x.detach().numpy() for n, x in given.items()}, names


def batches() -> Iterator[list[str]]:
    names = iter(TAKEN.split())
    while batch := list(itertools.islice(names, 24)):
        yield batch


@pytest.mark.parametrize("names", list(batches()), ids=lambda names: names[0])
def test_torchs_samples(names: list[str]) -> None:
    """The first samples of each op: values and gradients in f64, all in one traced graph that the interpreter runs."""
    cases = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db():
            if title(op) in names:
                torch.manual_seed(0)
                samples = op.sample_inputs("cpu", torch.float64, requires_grad=True)
                cases += [Case(op, sample) for sample in itertools.islice(samples, 2)]
        assert {case.name for case in cases} == set(names)
        graph, given, outputs = imported(cases)
        wanted = [case(*case.tensors) for case in cases]
    owners = [case.name for case, each in zip(cases, wanted, strict=True) for _ in each]
    flat = [y for each in wanted for y in each]
    sources = [name for case in cases for name in [case.name] * len(case.tensors)]
    leaves = [x for case in cases for x in case.tensors]
    wrt = [f"x{i}" for i, x in enumerate(leaves) if x.requires_grad]
    recorded = [(n, y) for n, y in zip(outputs, flat, strict=True) if y.requires_grad]
    cotangents = {f"d.{n}": np.random.default_rng(i).standard_normal(y.shape) for i, (n, y) in enumerate(recorded)}
    joint = gradc.differentiate(graph, wrt, unused="zeros")
    zeros = {n: np.zeros(joint.input(n).shape) for n in joint.input_names if n.startswith("d.")}
    found = interp.run(joint, {**given, **zeros, **cotangents})
    theirs = torch.autograd.grad(
        [y for _, y in recorded],
        [leaves[int(n[1:])] for n in wrt],
        [torch.from_numpy(cotangents[f"d.{n}"]) for n, _ in recorded],
        allow_unused=True,
    )
    wrong = {}
    for owner, name, want in zip(owners, outputs, flat, strict=True):
        wrong |= differing(f"{owner}: value", found[name], want.detach())
    for name, grad in zip(wrt, theirs, strict=True):
        want = torch.zeros_like(leaves[int(name[1:])]) if grad is None else grad
        wrong |= differing(f"{sources[int(name[1:])]}: gradient", found[f"d.{name}"], want)
    assert not wrong


def differing(what: str, got: Any, want: Any) -> dict[str, str]:
    try:
        torch.testing.assert_close(torch.as_tensor(np.array(got)), want, rtol=1e-10, atol=1e-10, equal_nan=True)
    except AssertionError as error:
        return {what: str(error)}
    return {}
