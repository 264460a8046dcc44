"""Every op of the registry against torch in f64: its meaning, its gradient, its second order, its error in f32, f16 and
bf16.

What needs no torch is in tests/ops/test_ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_oracles  # noqa: E402
from oracles import KINKED, NUMPY  # noqa: E402
from registry import Case, for_cases, tested_ops  # noqa: E402
from test_ops import (  # noqa: E402, F401
    ALL,
    DIFFERENTIABLE,
    F64,
    UNIT,
    Arrays,
    Runner,
    attrs_of,
    close,
    error_of,
    gradients_of,
    joint,
    random_like,
    runner,
    tolerance,
    with_cotangent,
)
from torch_oracles import TORCH, to_numpy, to_torch  # noqa: E402

from gradc import interp  # noqa: E402
from gradc.ir.graph import Graph  # noqa: E402
from gradc.ir.op import Composite, Op  # noqa: E402
from gradc.ops.elementwise.pointwise import convert  # noqa: E402
from gradc.passes.graph.decompose import decompose  # noqa: E402
from gradc.passes.graph.simplify import simplify  # noqa: E402
from gradc.passes.graph.upcast import upcast  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.parametrize("op", tested_ops(), ids=lambda op: op.name)
def test_every_op_has_an_oracle(op: Op) -> None:
    assert op.name in TORCH or op.name in NUMPY, f"{op.name} has none in tests/torch_oracles.py nor tests/oracles.py"


@for_cases([c for c in DIFFERENTIABLE if c.op.name in TORCH and (c.op.vjp or isinstance(c.op, Composite))])
def test_vjp_is_torchs(case: Case, runner: Runner) -> None:  # noqa: F811
    run, names = gradients_of(case, runner)
    for dims in case.bindings((7, 0, 1)):
        arrays, cotangent = with_cotangent(case, dims)
        got = list(run({name: a for name, a in {**arrays, "d.y": cotangent}.items() if name in names}, dims).values())
        for name, g, w in zip(case.floats, got, torch_gradients(case, arrays, dims, cotangent), strict=True):
            close(g, w, tolerance(case, 1e-10), f"d {case}/d {name} {dims}")
        if case.coarsest == "f64":
            check_adjoint(case, arrays, dims, cotangent, got)


@for_cases([c for c in F64 if c.op.name == "cross_entropy"])
def test_the_oracle_of_cross_entropy_is_torchs(case: Case) -> None:
    for dims in case.bindings((7, 1)):
        arrays = list(map(to_torch, case.arrays(dims).values()))
        target = arrays[1] if arrays[1].dtype.is_floating_point else arrays[1].long()
        want = torch.nn.functional.cross_entropy(arrays[0], target, *arrays[2:], **attrs_of(case, dims))
        close(to_numpy(torch_value(case, case.arrays(dims), dims)), to_numpy(want), 1e-12, f"{case} {dims}")


def torch_value(case: Case, arrays: Arrays, dims: Mapping[str, int]) -> Any:
    return TORCH[case.op.name](*map(to_torch, arrays.values()), **attrs_of(case, dims))


def torch_function(case: Case, arrays: Arrays, dims: Mapping[str, int]) -> tuple[Any, tuple[Any, ...]]:
    """The op as a torch function of its float operands, and those operands."""
    tensors = {name: to_torch(a) for name, a in arrays.items()}
    floats = tuple(tensors[name] for name in case.floats)
    attrs = attrs_of(case, dims)

    def function(*given: Any) -> Any:
        full = {**tensors, **dict(zip(case.floats, given, strict=True))}
        return TORCH[case.op.name](*full.values(), **attrs)

    return function, floats


def torch_gradients(case: Case, arrays: Arrays, dims: Mapping[str, int], cotangent: np.ndarray) -> list[np.ndarray]:
    function, floats = torch_function(case, arrays, dims)
    leaves = [t.detach().requires_grad_() for t in floats]
    y = function(*leaves)
    if not y.requires_grad:
        return [np.zeros(t.shape, to_numpy(t).dtype) for t in floats]
    found = torch.autograd.grad(y, leaves, to_torch(cotangent), allow_unused=True)
    return [to_numpy(torch.zeros_like(t) if g is None else g) for g, t in zip(found, leaves, strict=True)]


@for_cases([c for c in F64 if c.op.name in TORCH])
def test_meaning_is_torchs(case: Case, runner: Runner) -> None:  # noqa: F811
    run = runner(case.graph)
    for dims in case.bindings():
        arrays = case.arrays(dims)
        close(
            run(arrays, dims)["y"], to_numpy(torch_value(case, arrays, dims)), tolerance(case, 1e-12), f"{case} {dims}"
        )


def check_adjoint(
    case: Case, arrays: Arrays, dims: Mapping[str, int], cotangent: np.ndarray, got: list[np.ndarray]
) -> None:
    """<g, J v> = <J^T g, v> with J v by torch's forward mode."""
    function, floats = torch_function(case, arrays, dims)
    tangents = tuple(to_torch(random_like(arrays[name], 23 + k)) for k, name in enumerate(case.floats))
    _, jv = torch.func.jvp(function, floats, tangents)
    left = cotangent * to_numpy(jv)
    right = [g * to_numpy(t) for g, t in zip(got, tangents, strict=True)]
    if not np.isfinite(left).all():  # a mean over nothing
        return
    size = np.abs(left).sum() + sum(np.abs(r).sum() for r in right)
    assert abs(left.sum() - sum(r.sum() for r in right)) <= 1e-12 * size, f"{case} {dims}: the adjoint identity fails"


SMOOTH = [
    c
    for c in DIFFERENTIABLE
    if c.coarsest == "f64"
    and c.op.name in TORCH
    and c.op.name not in KINKED
    and (c.op.vjp or isinstance(c.op, Composite))
]


@for_cases(SMOOTH)
def test_second_order(case: Case) -> None:
    """differentiate(differentiate(graph)) against torch's double backward."""
    first = joint(case.smooth, case.floats)
    wrt = [*case.floats, "d.y"] if "d.y" in first.input_names else case.floats
    second = joint(first, wrt)
    for dims in case.bindings((5, 1)):
        arrays = case.arrays(dims)
        function, floats = torch_function(case, arrays, dims)
        leaves = [t.detach().requires_grad_() for t in floats]
        y = function(*leaves)
        if not y.requires_grad:
            continue
        cotangent = random_like(to_numpy(y), 11)
        g = to_torch(cotangent).requires_grad_()
        once = torch.autograd.grad(y, leaves, g, create_graph=True, allow_unused=True)
        seeds = [random_like(arrays[name], 5 + k) for k, name in enumerate(case.floats)]
        total = sum((o * to_torch(s)).sum() for o, s in zip(once, seeds, strict=True) if o is not None)
        twice = torch.autograd.grad(total, [*leaves, g], allow_unused=True, materialize_grads=True)
        given = {**arrays, "d.y": cotangent, **{f"d.d.{name}": s for name, s in zip(case.floats, seeds, strict=True)}}
        got = interp.run(second, {n: given[n] for n in second.input_names}, dims=dims)
        for (name, value), want in zip(got.items(), twice, strict=False):
            close(value, to_numpy(want), 1e-10, f"{case} {dims} {name} of the gradients", floor=1e-3)


# -- precision ---------------------------------------------------------------------------------------------------------


@for_cases([c for c in ALL if c.dtype in ("f32", "f16", "bf16") and c.graph.outputs[0][1].dtype.has_tangent])
def test_error_is_torchs_at_most(case: Case, runner: Runner) -> None:  # noqa: F811
    """Against f64 on the same inputs: at most 4 units in the last place of the largest element, or torch's own error.

    Where more than 4 units are lost (cancellation), the loss is a matter of luck: then the largest of sixteen draws is
    compared with torch's largest, and half as much again is allowed.  Gradients of 16-bit floats are taken as they are
    compiled: computed in f32, rounded once.
    """
    graphs = {"value": case.graph}
    if case.differentiable and case.op.name in TORCH and (case.op.vjp or isinstance(case.op, Composite)):
        gradient = joint(case.graph, case.floats)
        graphs["gradient"] = gradient if case.dtype == "f32" else simplify(upcast(decompose(gradient)))
    runs = {kind: runner(graph) for kind, graph in graphs.items()}
    for dims in case.bindings((7, 64)):
        for kind, graph in graphs.items():
            ours, _ = _errors(case, graph, runs[kind], kind, dims, 0, torchs=False)
            if any(o > 4 for o in ours):
                draws = [_errors(case, graph, runs[kind], kind, dims, seed, torchs=True) for seed in range(16)]
                for k, name in enumerate(graph.output_names):
                    worst, theirs = max(o[k] for o, _ in draws), max((t[k] for _, t in draws if t), default=0.0)
                    assert worst <= max(4, 1.5 * theirs), (
                        f"{case} {dims} {name}: error {worst:.1f} u, torch {theirs:.1f} u"
                    )


def _errors(
    case: Case, graph: Graph, run: Any, kind: str, dims: Mapping[str, int], seed: int, torchs: bool
) -> tuple[list[float], list[float] | None]:
    """The errors of ours and torch's outputs, in units of the output's dtype."""
    arrays = case.arrays(dims, seed)
    scale = max((float(np.max(np.abs(arrays[n].astype(np.float64)), initial=0)) for n in case.floats), default=1.0)
    y = interp.run(case.graph, arrays, dims=dims, precision="f64")["y"]
    cotangent = random_like(convert(y, case.graph.output("y").dtype), 11 + seed)
    given = {n: a for n, a in {**arrays, "d.y": cotangent}.items() if n in graph.input_names}
    exact = interp.run(graph, given, dims=dims, precision="f64")

    def errors(values: list[np.ndarray]) -> list[float]:
        out = []
        for (name, node), value in zip(graph.outputs, values, strict=True):
            out.append(
                error_of(value, _rounding_overflow(exact[name], str(node.dtype)), 1e-3 * scale) / UNIT[str(node.dtype)]
            )
        return out

    theirs = _torch_or_none(case, arrays, dims, cotangent if kind == "gradient" else None) if torchs else None
    return errors(list(run(given, dims).values())), None if theirs is None else errors(theirs)


def _rounding_overflow(exact: np.ndarray, dtype: str) -> np.ndarray:
    """f64 values beyond the narrower type are its infinities."""
    return np.where(np.abs(exact) > torch.finfo(torch_oracles.DTYPE[dtype]).max, np.copysign(np.inf, exact), exact)


def _torch_or_none(
    case: Case, arrays: Arrays, dims: Mapping[str, int], cotangent: np.ndarray | None
) -> list[np.ndarray] | None:
    if case.op.name not in TORCH:
        return None
    try:
        return (
            [to_numpy(torch_value(case, arrays, dims))]
            if cotangent is None
            else torch_gradients(case, arrays, dims, cotangent)
        )
    except (RuntimeError, NotImplementedError):  # torch has no kernel for the dtype
        return None
