"""Every op of the registry: its type rule, its meaning, its gradient, its text, its errors.

The cases are the op's own samples (tests/registry.py); the oracles are NumPy and finite differences, and torch in f64
in test_ops_torch.py, never another part of gradc.  The gradient of a vjp is asked with random cotangents, never
ones. A target is tested by the same code through ``RUNNERS``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import registry
from oracles import NUMPY
from registry import Case, cases, for_cases, tested_ops

from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import IndexOutOfRange, InvalidProblem, NotDifferentiable, TypeRuleError
from gradc.ir.dims import Dim, evaluate
from gradc.ir.graph import Graph, again, input_node, open_composites
from gradc.ir.node import REGISTRY
from gradc.ir.op import Composite, Op
from gradc.ir.text import parse
from gradc.ir.types import DTYPES, parse_type
from gradc.ops.elementwise.pointwise import convert
from gradc.trace import trace

Arrays = Mapping[str, np.ndarray]
Runner = Callable[[Graph], Callable[[Arrays, Mapping[str, int]], dict[str, np.ndarray]]]

RUNNERS: dict[str, Runner] = {
    "numpy": lambda graph: lambda arrays, dims: interp.run(graph, arrays, dims=dims),
}
"""target -> (graph -> (arrays, dims) -> outputs); a compiled target prepares once and runs every binding."""

ALL = list(cases())
F64 = list(cases(["f64"]))
DIFFERENTIABLE = [c for c in F64 if c.differentiable and c.op.name != "cast"]
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


# -- pieces ------------------------------------------------------------------------------------------------------------


def attrs_of(case: Case, dims: Mapping[str, int]) -> dict[str, Any]:
    """The attributes as the user wrote them, sizes in numbers."""

    def number(value: Any) -> Any:
        return (
            tuple(number(v) for v in value)
            if isinstance(value, tuple)
            else evaluate(value, dims)
            if isinstance(value, Dim)
            else value
        )

    return {name: number(value) for name, value in case.attrs.items()}


def tolerance(case: Case, rtol: float) -> float:
    """``rtol``, where no float narrower than f64 takes part."""
    return rtol if case.coarsest == "f64" else 8 * UNIT[case.coarsest]


def random_like(array: np.ndarray, seed: int) -> np.ndarray:
    return convert(
        np.asarray(np.random.default_rng(seed).standard_normal(array.shape)), DTYPES[str(registry.typeof(array).dtype)]
    )


def joint(graph: Graph, wrt: list[str]) -> Graph:
    """The gradients alone."""
    both = differentiate(graph, wrt, unused="zeros")
    return both.with_outputs(both.outputs[len(graph.outputs) :])


def close(got: np.ndarray, want: np.ndarray, rtol: float, what: str, floor: float = 0.0) -> None:
    """Relative to the largest element: an element that is the difference of larger ones is judged by those."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    if got.dtype.kind in "biu" and want.dtype.kind in "biu":
        assert np.array_equal(got, want), f"{what}: {got} is not {want}"
        return
    worst = error_of(got, want, floor)
    assert worst <= rtol, f"{what}: off by {worst:.2e} (limit {rtol:.1e})\n got {got}\nwant {want}"


def error_of(got: np.ndarray, want: np.ndarray, floor: float = 0.0) -> float:
    """max |got - want| / max(max |want|, floor); inf where they are not finite in the same places."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if not want.size:
        return 0.0
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    scale = max(float(np.max(np.abs(want[finite]))), floor)
    difference = float(np.max(np.abs(got[finite] - want[finite])))
    return difference / scale if scale else 0.0 if difference == 0 else np.inf


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", tested_ops(), ids=lambda op: op.name)
def test_record_is_complete(op: Op) -> None:
    assert op.samples, f"{op.name} has no samples: an op brings its own tests"
    assert op.doc, f"{op.name} has no doc"
    assert len(op.parameters) or not op.bad or all(not b.attrs for b in op.bad)


@for_cases(ALL)
def test_type_rule_agrees_with_the_reference(case: Case) -> None:
    """Shapes and dtypes as inferred, also straight out of the reference, before anything is rounded."""
    for dims in case.bindings():
        arrays = case.arrays(dims)
        values = interp.evaluate_graph(case.graph, arrays, dims)
        for node, value in values.items():
            assert value.shape == node.type.concrete(dims), f"{node!r} with {dims}: {value.shape}"
            assert value.dtype == node.dtype.np, f"{node!r}: {value.dtype}"
            if node.op.name in ("input",) or isinstance(node.op, Composite) or node.dtype.compute is not node.dtype:
                continue
            attrs = {name: interp.concrete(v, dims) for name, v in node.attrs.items()}
            with np.errstate(all="ignore"):
                raw = np.asarray(node.op.reference(*(values[o] for o in node.operands), **attrs))
            if all(o.dtype.compute is o.dtype for o in node.operands):
                assert raw.dtype == node.dtype.np and raw.shape == value.shape, (
                    f"the reference of {node!r} gives {raw.dtype}{raw.shape}"
                )


@for_cases([c for c in F64 if c.op.name in NUMPY])
def test_meaning_is_numpys(case: Case, runner: Runner) -> None:
    run = runner(case.graph)
    for dims in case.bindings():
        arrays = case.arrays(dims)
        want = NUMPY[case.op.name](*arrays.values(), **attrs_of(case, dims))
        close(run(arrays, dims)["y"].astype(want.dtype), want, tolerance(case, 1e-12), f"{case} {dims}")


@for_cases(ALL)
def test_text_round_trip(case: Case) -> None:
    assert parse(str(case.graph)) == case.graph
    if case.differentiable and (case.op.vjp or isinstance(case.op, Composite)):
        both = differentiate(case.smooth, case.floats, unused="zeros")
        assert parse(str(both)) == both


BAD = [(op, k, bad) for op in tested_ops() for k, bad in enumerate(op.bad)]


@pytest.mark.parametrize(("op", "bad"), [(op, bad) for op, _, bad in BAD], ids=[f"{op.name}{k}" for op, k, _ in BAD])
def test_bad_sample_is_refused(op: Op, bad: Any) -> None:
    operands = [input_node(f"x{k}", parse_type(o)) if isinstance(o, str) else o for k, o in enumerate(bad.operands)]
    with pytest.raises(bad.error, match=re.escape(bad.match)) as caught:
        registry.call(op, operands, bad.attrs)
    assert re.match(r"\w+\(.*\): |\w+", str(caught.value))[0].split("(")[0] in REGISTRY, (
        f"no op is named: {caught.value}"
    )


# -- gradients ---------------------------------------------------------------------------------------------------------


NOT_ITS_DERIVATIVE = {
    "embedding": {"max_norm", "scale_grad_by_freq", "padding_idx"},
    "embedding_bag": {"max_norm", "scale_grad_by_freq"},
}
"""Attributes with which a gradient is another one by definition; tests/ops/test_ops_torch.py knows them."""


def check_vjp(
    case: Case, runner: Runner = RUNNERS["numpy"], op: Op | None = None, sizes: tuple[int, ...] = (7, 0, 1)
) -> None:
    """The gradients of a case against finite differences; ``op`` stands for the case's op (the mutation test)."""
    run, names = gradients_of(case, runner, op)
    for dims in case.bindings(sizes):
        arrays, cotangent = with_cotangent(case, dims)
        given = {name: a for name, a in {**arrays, "d.y": cotangent}.items() if name in names}
        check_differences(case, arrays, dims, cotangent, list(run(given, dims).values()))


def gradients_of(case: Case, runner: Runner, op: Op | None = None) -> tuple[Any, tuple[str, ...]]:
    """(arrays, dims) -> the gradients, and the names of the arrays that they are made from."""
    gradients = joint(case.smooth if op is None else registry.with_op(case.smooth, case.op, op), case.floats)
    return runner(gradients), gradients.input_names


def with_cotangent(case: Case, dims: Mapping[str, int]) -> tuple[Arrays, np.ndarray]:
    arrays = case.arrays(dims)
    return arrays, random_like(interp.run(case.smooth, arrays, dims=dims)["y"], 11)


def check_differences(
    case: Case,
    arrays: Arrays,
    dims: Mapping[str, int],
    cotangent: np.ndarray,
    got: list[np.ndarray],
) -> None:
    """Along random directions, d<g, f(x + t v)>/dt at 0 by Richardson's extrapolation of central differences."""
    graph, frozen = surrogate(case, arrays, dims)
    step = 2e-3 if case.op.surrogate or case.coarsest != "f64" else 2e-4  # the smaller, the fewer kinks between
    if not cotangent.size:
        assert not any(g.any() for g in got)
        return
    for direction in range(3):
        tangents = {name: random_like(arrays[name], 31 * direction + k) for k, name in enumerate(case.floats)}

        def along(t: float, tangents: Arrays = tangents) -> float:
            moved = {name: a + t * tangents[name] if name in tangents else a for name, a in wide(arrays).items()}
            y = interp.run(graph, {**moved, **frozen}, dims=dims)["y"]
            return float(
                np.sum(np.where(np.isfinite(y), cotangent.astype(np.float64) * y, 0))
            )  # an extremum of nothing

        rows = [[(along(step / 2**k) - along(-step / 2**k)) / (step / 2 ** (k - 1))] for k in range(4)]
        for k in range(1, 4):
            for order in range(1, k + 1):
                rows[k].append(rows[k][-1] + (rows[k][-1] - rows[k - 1][order - 1]) / (4**order - 1))
        want = rows[3][3]
        parts = [g * tangents[name] for g, name in zip(got, case.floats, strict=True)]
        size = max(sum(float(np.abs(p).sum()) for p in parts), abs(want), 1e-3)
        have = sum(float(p.sum()) for p in parts)
        assert abs(want - have) <= tolerance(case, 1e-7) * size, (
            f"{case} {dims}: differences say {want}, the vjp {have}"
        )


def wide(arrays: Arrays) -> dict[str, np.ndarray]:
    """Every float in f64."""
    return {n: a.astype(np.float64) if registry.typeof(a).dtype.name in UNIT else a for n, a in arrays.items()}


def surrogate(case: Case, arrays: Arrays, dims: Mapping[str, int]) -> tuple[Graph, dict[str, np.ndarray]]:
    """The function whose derivative the vjp is, in f64, and the values at which ``stop_gradient`` is frozen."""
    types = [t.with_dtype(DTYPES["f64"]) if t.dtype.name in UNIT else t for t in case.types]
    inputs = tuple(input_node(f"x{k}", t) for k, t in enumerate(types))
    attrs = case.graph.output("y").attrs
    if case.op.surrogate is None and case.coarsest == "f64":
        return frozen_at(case.smooth, arrays, dims)
    y = (
        case.op.apply(inputs, {**attrs, **({"out_dtype": "f64"} if "out_dtype" in attrs else {})})
        if case.op.surrogate is None
        else case.op.surrogate(*inputs, **attrs)
    )
    return frozen_at(Graph(case.op.name, inputs, (("y", y),)), wide(arrays), dims)


def frozen_at(graph: Graph, arrays: Arrays, dims: Mapping[str, int]) -> tuple[Graph, dict[str, np.ndarray]]:
    """The graph with inputs in the place of what ``stop_gradient`` holds, and the values of those."""
    graph = open_composites(graph, lambda op: op.vjp is None)
    values = interp.evaluate_graph(graph, arrays, dims)
    frozen: dict[Any, Any] = {}
    new: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op.name == "stop_gradient":
            new[node] = frozen[node] = input_node(f"frozen{len(frozen)}", node.type)
        else:
            new[node] = again(node, tuple(new[o] for o in node.operands))
    held = Graph(graph.name, (*graph.inputs, *frozen.values()), (("y", new[graph.output("y")]),))
    return held, {input.attrs["name"]: values[node] for node, input in frozen.items()}


@for_cases(DIFFERENTIABLE)
def test_vjp(case: Case, runner: Runner) -> None:
    if case.op.vjp is None and not isinstance(case.op, Composite):
        with pytest.raises(NotDifferentiable, match=f"'{case.op.name}'"):
            differentiate(case.smooth, case.floats)
        return
    if not NOT_ITS_DERIVATIVE.get(case.op.name, set()) & case.attrs.keys():
        check_vjp(case, runner, sizes=(7, 0, 1) if case.op.name in NUMPY else (7,))  # torch's op has the others too


def test_joint_graph_can_be_differentiated_again() -> None:
    """Whole joint graphs too: names that are taken get another 'd.'."""
    graph = trace(lambda x: ops.sum(ops.tanh(x)), x="f64[N]")
    twice = differentiate(differentiate(graph, ["x"]), ["x"])
    assert len(set(twice.output_names)) == len(twice.output_names) == 3
    assert len(set(twice.input_names)) == len(twice.input_names) == 4
    x = np.linspace(-2, 2, 7)
    t = np.tanh(x)
    got = interp.run(
        twice, dict(zip(twice.input_names, (x, np.float64(1.5), np.float64(0.5), np.linspace(1, 2, 7)), strict=True))
    )
    want = 0.5 * (1 - t * t) + np.linspace(1, 2, 7) * 1.5 * -2 * t * (1 - t * t)
    close(got[twice.output_names[-1]], want, 1e-12, "d.x of the joint graph")


ROUNDED_GRADIENTS = {"cast", "to_float8"}
"""Ops whose gradients are rounded, as no difference quotient is; test_to_float8.py has those of to_float8."""


def entries(op: Op) -> list[int]:
    """The operands for which the vjp gives a node in the op's f64 samples."""
    found = set()
    for case in cases(["f64"], [op.name]):
        node = next((n for n in case.graph.nodes if n.op is op), None)
        if node is None or not node.dtype.is_float or op.name in ROUNDED_GRADIENTS:
            continue
        answer = op.vjp(input_node("g", node.type), node, *node.operands, **node.attrs)
        found |= {k for k, e in enumerate(answer) if isinstance(e, ops.Node) and node.operands[k].dtype.name in UNIT}
    return sorted(found)


@pytest.mark.parametrize("op", [op for op in tested_ops() if op.vjp], ids=lambda op: op.name)
def test_a_wrong_vjp_is_caught(op: Op) -> None:
    for k in entries(op):

        def wrong(g: Any, y: Any, *operands: Any, k: int = k, **attrs: Any) -> tuple[Any, ...]:
            return tuple(
                e * 1.01 + 0.01 if i == k and isinstance(e, ops.Node) else e
                for i, e in enumerate(op.vjp(g, y, *operands, **attrs))
            )

        mutant = registry.unregistered(op, vjp=wrong)
        caught = False
        for case in cases(["f64"], [op.name]):
            if not case.differentiable:
                continue
            try:
                check_vjp(case, op=mutant, sizes=(7,))
            except AssertionError:
                caught = True
                break
        assert caught, f"1.01 times entry {k} of the vjp of {op.name} passes"
    assert REGISTRY[op.name] is op


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradients_of_narrow_floats_accumulate_in_f32(dtype: str) -> None:
    """A thousand ones add up to 1000 and not to 256 (bf16), whichever way they meet."""
    kind = DTYPES[dtype]
    ones = np.ones(1000, kind.np)
    one = ops.constant(value=(1.0,), dtype=dtype, shape=())
    ways: dict[str, Graph] = {
        "broadcast": trace(lambda x: ops.broadcast_to(x, (1000,)), x=f"{dtype}[]"),
        "gather": trace(lambda x: ops.gather(ops.reshape(x, (1,)), ops.iota(shape=(1000,)) * 0), x=f"{dtype}[]"),
        "take": trace(
            lambda x: ops.take_along_axis(ops.reshape(x, (1,)), ops.iota(shape=(1000,)) * 0, axis=0), x=f"{dtype}[]"
        ),
        "matmul": trace(
            lambda x: ops.reshape(ops.broadcast_to(one, (1000, 1)) @ ops.reshape(x, (1, 1)), (1000,)), x=f"{dtype}[]"
        ),
        "bias": trace(
            lambda x: ops.reshape(
                ops.linear(ops.broadcast_to(one, (1000, 1)), ops.reshape(one, (1, 1)), ops.reshape(x, (1,))), (1000,)
            ),
            x=f"{dtype}[]",
        ),
        "users": trace(
            lambda x: ops.concat(*[ops.pad(ops.reshape(x, (1,)), ((k, 999 - k),))[k : k + 1] for k in range(1000)]),
            x=f"{dtype}[]",
        ),
    }
    for way, graph in ways.items():
        got = interp.run(joint(graph, ["x"]), {"x": np.asarray(1, kind.np), "d.y": ones})
        assert float(got["d.x"]) == 1000, f"{way}: {got['d.x']}"


# -- ties and kinks, one by one (semantics 0) --------------------------------------------------------------------------

inf, nan = np.inf, np.nan


def calling(fn: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """``fn`` under a signature with these names, as trace wants it."""

    def function(**operands: Any) -> Any:
        return fn(*operands.values())

    kind = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    return function


def gradient_at(fn: Callable[..., Any], *points: Any, g: Any = None, dtype: str = "f64") -> list[np.ndarray]:
    arrays = {f"x{k}": np.asarray(p, DTYPES[dtype].np) for k, p in enumerate(points)}
    types = {name: f"{dtype}[{','.join(map(str, a.shape))}]" for name, a in arrays.items()}
    graph = trace(calling(fn, list(arrays)), **types)
    gradients = joint(graph, list(arrays))
    y = interp.run(graph, arrays)["y"]
    cotangent = np.asarray(np.full(y.shape, 3.0) if g is None else g, y.dtype)
    given = {n: a for n, a in {**arrays, "d.y": cotangent}.items() if n in gradients.input_names}
    return list(interp.run(gradients, given).values())


@pytest.mark.parametrize(
    ("fn", "points", "want"),
    [
        (ops.maximum, ([1, 2, 2], [1, 1, 3]), ([1.5, 3, 0], [1.5, 0, 3])),
        (ops.minimum, ([1, 2, 2], [1, 1, 3]), ([1.5, 0, 3], [1.5, 3, 0])),
        (lambda x: ops.amax(x, 0), ([1, 4, 4, 4],), ([0, 1, 1, 1],)),
        (lambda x: ops.amin(x, 0), ([1, 4, 1, 4],), ([1.5, 0, 1.5, 0],)),
        (lambda x: ops.amax(x), ([[2, 2], [2, 1]],), ([[1, 1], [1, 0]],)),
        (lambda x: ops.max(x, 0), ([1, 4, 4, 4],), ([0, 3, 0, 0],)),
        (lambda x: ops.min(x, axis=0), ([1, 4, 1, 4],), ([3, 0, 0, 0],)),
        (lambda x: ops.max(x), ([4, 1, 4],), ([1.5, 0, 1.5],)),
        (ops.relu, ([-1, 0, -0.0, 2],), ([0, 0, 0, 3],)),
        (ops.abs, ([-1, 0, 2],), ([-3, 0, 3],)),
        (lambda x: ops.clamp(x, -1, 1), ([-2, -1, 0, 1, 2],), ([0, 3, 3, 3, 0],)),
        (lambda x: ops.clamp(x, max=1.0), ([-2, 1, 2],), ([3, 3, 0],)),
        (ops.sqrt, ([0, 4],), ([inf, 0.75],)),
        (ops.pow, ([0, 0, 2], [0, 2, 0]), ([0, 0, 0], [0, 0, 3 * np.log(2)])),
        (ops.pow, ([0.0], [1.0]), ([3], [0])),
        (ops.pow, ([-2.0], [3.0]), ([36], [nan])),
        (ops.prod, ([2, 3, 4],), ([36, 24, 18],)),
        (ops.prod, ([2, 0, 4],), ([0, 24, 0],)),
        (ops.prod, ([0, 3, 0],), ([0, 0, 0],)),
        (lambda x: ops.prod(x, 1), ([[2, 0], [3, 5]],), ([[0, 6], [15, 9]],)),
        (ops.sign, ([-1, 0, 2],), ([0, 0, 0],)),
        (ops.floor, ([0.5, 1],), ([0, 0],)),
        (ops.round, ([0.5, 1],), ([0, 0],)),
        (ops.stop_gradient, ([0.5, 1],), ([0, 0],)),
        (lambda x: ops.where(ops.gt(x, 0), x / x, 0.0), ([0.0, 2.0],), ([nan, 0],)),
        (lambda x: ops.where(ops.gt(x, 0), ops.log(x), x), ([-1.0, 2.0],), ([3, 1.5],)),
        (lambda x: ops.mod(x, 2.0), ([0.5, 3.0, -1.0],), ([3, 3, 3],)),
    ],
)
def test_gradient_at_ties_and_kinks(fn: Any, points: Any, want: Any) -> None:
    for got, expected in zip(gradient_at(fn, *points), want, strict=True):
        np.testing.assert_allclose(got, np.asarray(expected, float), rtol=1e-15)


def test_a_mask_selects() -> None:
    """where(x > 0, log x, 0) has the gradient 0 at 0: the mask is never multiplied by the infinite derivative."""
    (got,) = gradient_at(lambda x: ops.where(ops.gt(x, 0), ops.exp(x), 0.0), [1e9, -1.0], g=[0.0, 3.0])
    assert np.isnan(got[0]) and got[1] == 0  # 0 * inf of exp itself; nothing from the branch that was not taken
    (got,) = gradient_at(lambda x: ops.clamp(x, -1, 1), [0.0, 5.0], g=[1.0, inf])
    assert got.tolist() == [1, 0]


def value_at(fn: Callable[..., Any], *arrays: Any) -> np.ndarray:
    arrays = tuple(map(np.asarray, arrays))
    names = [f"x{k}" for k in range(len(arrays))]
    graph = trace(calling(fn, names), **dict(zip(names, arrays, strict=True)))
    return interp.run(graph, dict(zip(names, arrays, strict=True)))["y"]


def test_nan_propagates_through_extrema() -> None:
    a, b = np.array([nan, 1.0, nan]), np.array([1.0, nan, nan])
    assert np.isnan(value_at(ops.maximum, a, b)).all() and np.isnan(value_at(ops.minimum, a, b)).all()
    assert np.isnan(value_at(ops.relu, np.array([nan]))).all()
    assert np.isnan(value_at(lambda x: ops.clamp(x, -1, 1), np.array([nan]))).all()
    x = np.array([1.0, nan, 3.0, nan])
    for name in ("amax", "amin", "max", "min"):
        assert np.isnan(value_at(getattr(ops, name), x)) and np.isnan(
            value_at(lambda v, name=name: getattr(ops, name)(v, axis=0), x)
        )
    assert (
        value_at(lambda v: ops.argmax(v, 0), x) == 1 and value_at(lambda v: ops.argmin(v, 0), x) == 1
    )  # the first NaN
    assert value_at(lambda v: ops.argmax(v, 0), np.array([2.0, 5.0, 5.0])) == 1
    assert np.isnan(value_at(ops.sign, np.array([nan]))).all()


def test_empty_reductions() -> None:
    empty = np.zeros((3, 0))
    assert value_at(lambda x: ops.sum(x, 1), empty).tolist() == [0, 0, 0]
    assert value_at(lambda x: ops.prod(x, 1), empty).tolist() == [1, 1, 1]
    assert np.isnan(value_at(lambda x: ops.mean(x, 1), empty)).all()
    for name in ("amax", "amin", "max", "min", "argmax", "argmin"):
        with pytest.raises(TypeRuleError, match="no elements"):
            trace(lambda x, name=name: getattr(ops, name)(x, 1), x="f32[3,0]")
    for name in ("amax", "argmax"):  # a symbol that turns out 0
        with pytest.raises((InvalidProblem, ValueError)):
            interp.run(
                trace(lambda x, name=name: getattr(ops, name)(x, 1), x="f32[3,N]"), x=np.zeros((3, 0), np.float32)
            )


def test_casts_saturate() -> None:
    x = np.array([nan, inf, -inf, 1e30, -1e30, 300.7, -300.7, 0.99, -0.99])
    for name in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "i4", "u4", "i2", "u2"):
        low, high = DTYPES[name].range
        for source in (np.float64, np.float32):
            got = value_at(lambda v, name=name: ops.cast(v, name), x.astype(source)).astype(np.int64)
            want = [0, high, low, high, low, min(300, high), max(-300, low), 0, 0]
            assert got.tolist() == want, f"{source.__name__} -> {name}: {got.tolist()}"
    edge = np.array([2.0**31, 2.0**31 - 1, -(2.0**31), 2.0**63, -(2.0**63), 2.0**32])
    assert value_at(lambda v: ops.cast(v, "i32"), edge).tolist() == [
        2**31 - 1,
        2**31 - 1,
        -(2**31),
        2**31 - 1,
        -(2**31),
        2**31 - 1,
    ]
    assert value_at(lambda v: ops.cast(v, "i64"), edge).tolist() == [
        2**31,
        2**31 - 1,
        -(2**31),
        2**63 - 1,
        -(2**63),
        2**32,
    ]
    f8 = value_at(lambda v: ops.cast(v, "f8e4m3"), np.array([500.0, -1e9, inf, nan], np.float32)).astype(np.float32)
    assert f8[:2].tolist() == [448, -448] and np.isnan(f8[2:]).all()
    f8 = value_at(lambda v: ops.cast(v, "f8e5m2"), np.array([1e9, -1e9, inf, nan], np.float32)).astype(np.float32)
    assert f8[:3].tolist() == [57344, -57344, inf] and np.isnan(f8[3])
    assert value_at(lambda v: ops.cast(v, "bool"), np.array([0.0, -0.0, nan, 0.1])).tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_integers_wrap() -> None:
    x = np.array([127, -128, 100], np.int8)
    assert value_at(ops.add, x, np.array([1, -1, 100], np.int8)).tolist() == [-128, 127, -56]
    assert value_at(ops.mul, x, x).tolist() == [1, 0, 16]
    assert value_at(ops.neg, x).tolist() == [-127, -128, -100]
    assert value_at(ops.abs, x).tolist() == [127, -128, 100]
    assert value_at(lambda v: ops.cast(v, "i8"), np.array([128, 255, -129], np.int32)).tolist() == [-128, -1, 127]
    assert value_at(lambda v: ops.cast(v, "u4"), np.array([16, -1, 9], np.int32)).astype(int).tolist() == [0, 15, 9]
    assert value_at(lambda v: ops.sum(v), np.full(3, 2**31 - 1, np.int32)) == 3 * (2**31 - 1)
    assert value_at(
        lambda a, b: ops.floordiv(a, b), np.array([7, -7, 5], np.int32), np.array([2, 2, 0], np.int32)
    ).tolist() == [3, -4, 0]
    assert value_at(
        lambda a, b: ops.mod(a, b), np.array([7, -7, 5], np.int32), np.array([-2, 2, 0], np.int32)
    ).tolist() == [-1, 1, 0]
    assert value_at(
        lambda a, b: ops.pow(a, b), np.array([2, -1, 3, 1], np.int32), np.array([5, -3, -1, -2], np.int32)
    ).tolist() == [32, -1, 0, 1]


@pytest.mark.parametrize("name", ["floordiv", "mod"])
def test_integer_division_by_constant_zero(name: str) -> None:
    for zero in (0, np.zeros((), np.int32), ops.constant(value=(0,), dtype="i32", shape=())):
        with pytest.raises(InvalidProblem, match="constant 0"):
            trace(lambda x, zero=zero: getattr(ops, name)(x, zero), x="i32[3]")
    with pytest.raises(InvalidProblem, match="constant 0"):
        trace(lambda x: getattr(ops, name)(x, np.zeros(3, np.int32)), x="i32[3]")
    assert trace(lambda x: getattr(ops, name)(x, 0.0), x="f32[3]")


def test_index_out_of_range_names_the_place() -> None:
    graph = trace(lambda t, i: ops.gather(t, i), t="f32[V,2]", i="i64[N]")
    with pytest.raises(IndexOutOfRange) as caught:
        interp.run(graph, t=np.zeros((3, 2), np.float32), i=np.array([0, 2, -1, 5]))
    assert (caught.value.position, caught.value.value, caught.value.bound) == (2, -1, 3)


# -- differentiate's own errors ----------------------------------------------------------------------------------------


def test_wrt_is_checked() -> None:
    graph = trace(lambda x, y: x * y, x="f32[3]", y="f32[3]")
    with pytest.raises(InvalidProblem, match=r"'z'.*x, y"):
        differentiate(graph, ["z"])
    with pytest.raises(InvalidProblem, match="twice"):
        differentiate(graph, ["x", "x"])


def test_not_differentiable_names_the_op() -> None:
    with pytest.raises(NotDifferentiable, match="argmax"):
        differentiate(trace(lambda x: ops.cast(ops.argmax(x, 1), "f32"), x="f32[3,4]"), ["x"])
    with pytest.raises(NotDifferentiable, match="argmax"):  # even though another path exists
        differentiate(trace(lambda x: ops.cast(ops.argmax(x, 1), "f32") + ops.sum(x, 1), x="f32[3,4]"), ["x"])
    with pytest.raises(NotDifferentiable, match=r"'floor'.*'x'"):
        differentiate(trace(lambda x: ops.floor(x) * 2.0, x="f32[3]"), ["x"])
    with pytest.raises(NotDifferentiable, match=r"'cast'"):
        differentiate(trace(lambda x: ops.cast(ops.cast(x, "i32"), "f32"), x="f32[3]"), ["x"])
    with pytest.raises(NotDifferentiable, match=r"'gather'.*'i'"):
        differentiate(trace(lambda t, i: ops.gather(t, i), t="f32[5]", i="i64[3]"), ["i"])
    with pytest.raises(NotDifferentiable, match="'stop_gradient'"):
        differentiate(trace(lambda x: ops.stop_gradient(x) * 2.0, x="f32[3]"), ["x"])
    with pytest.raises(NotDifferentiable, match="no float output"):
        differentiate(trace(lambda x: ops.gt(x, 0.0), x="f32[3]"), ["x"])
    with pytest.raises(NotDifferentiable, match=r"depends on 'y'"):
        differentiate(trace(lambda x, y: x * 2.0, x="f32[3]", y="f32[3]"), ["y"])
    assert differentiate(
        trace(lambda x, y: ops.cast(ops.argmax(y, 1), "f32") * x, x="f32[3]", y="f32[3,4]"), ["x"]
    )  # argmax is on no wanted path


def test_unused_gives_zeros() -> None:
    graph = trace(lambda x, y, i: {"y": ops.floor(x) * 2.0 + ops.stop_gradient(x)}, x="f32[3]", y="f64[2]", i="i32[4]")
    both = differentiate(graph, ["x", "y", "i"], unused="zeros")
    types = {name: str(node.type) for name, node in both.outputs}
    assert types == {"y": "f32[3]", "d.x": "f32[3]", "d.y": "f64[2]", "d.i": "f32[4]"}
    given = {"x": np.ones(3, np.float32), "y": np.ones(2), "i": np.ones(4, np.int32), "d.y": np.ones(3, np.float32)}
    got = interp.run(both, {n: given[n] for n in both.input_names})
    assert all(not got[f"d.{n}"].any() for n in "xyi")


@pytest.mark.parametrize(("compute", "tangent"), [("f32", "f32"), ("f64", "f64"), ("bf16", "f32"), ("f16", "f32")])
def test_integer_values_pass_the_gradient_straight_through(compute: str, tangent: str) -> None:
    """q: i8 -> gather -> where -> cast: movement and casts of ints pass it on, in f32 or f64 (contracts 4)."""

    def fn(q: Any, i: Any, m: Any, s: Any) -> Any:
        rows = ops.where(m, ops.reshape(ops.transpose(ops.gather(q, i), (1, 0)), (3, 4)), 0)
        return ops.cast(rows, compute) * s

    graph = trace(fn, q="i8[5,3]", i="i64[4]", m="bool[3,4]", s=f"{compute}[]")
    both = differentiate(graph, ["q", "s"])
    assert str(both.output("d.q").type) == f"{tangent}[5,3]"
    rng = np.random.default_rng(0)
    kind = DTYPES[compute].np
    q, i, m = rng.integers(-9, 9, (5, 3)).astype(np.int8), np.array([4, 0, 4, 2]), rng.random((3, 4)) < 0.6
    g, s = rng.integers(-4, 5, (3, 4)).astype(kind), np.asarray(0.5, kind)
    got = interp.run(both, {"q": q, "i": i, "m": m, "s": s, "d.y": g})
    want = np.zeros((5, 3))
    np.add.at(want, i, np.where(m, g.astype(float) * 0.5, 0).T)
    assert got["d.q"].tolist() == want.tolist()
    assert float(got["d.s"]) == float((np.where(m, q[i].T, 0) * g.astype(float)).sum())


def test_bool_input_has_a_tangent_of_the_float_it_feeds() -> None:
    both = differentiate(trace(lambda b, x: ops.cast(b, "f64") * x, b="bool[3]", x="f64[3]"), ["b"])
    assert str(both.output("d.b").type) == "f64[3]"


def test_integer_arithmetic_passes_nothing_or_says_so() -> None:
    graph = trace(lambda q, x: ops.cast(q * q, "f32") * x, q="i32[3]", x="f32[3]")
    with pytest.raises(NotDifferentiable, match="'mul'"):
        differentiate(graph, ["q"])
    assert differentiate(graph, ["x"])


def test_cast_passes_the_gradient_in_the_operands_dtype() -> None:
    for source in registry.FLOATS:
        for target in registry.FLOATS:
            if source == target:
                continue
            both = differentiate(trace(lambda x, target=target: ops.cast(x, target), x=f"{source}[3]"), ["x"])
            got = interp.run(
                both,
                (
                    {"x": np.ones(3, DTYPES[source].np), "d.y": np.array([1, 2, -3], DTYPES[target].np)}
                    if "x" in both.input_names
                    else {}
                ),
            )
            assert got["d.x"].dtype == DTYPES[source].np and got["d.x"].astype(float).tolist() == [1, 2, -3]
