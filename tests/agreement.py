"""An op's samples, compiled, held against the interpreter.

All samples of an op are merged into one graph, so that one compilation serves them; the gradients are asked for with
random upstream values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import long_tests
import numpy as np
from registry import Case, cases, tested_ops

import gradc
from gradc import interp
from gradc.autodiff import differentiate
from gradc.codegen.cuda.cached_text import anonymous
from gradc.ir.graph import Graph, again, input_node, open_composites
from gradc.ir.node import Node
from gradc.ir.op import Composite, Expr, Function, Op

NAMES = [op.name for op in tested_ops()]
COMPOSITES = [op.name for op in tested_ops() if isinstance(op, Composite)]
POINTWISE = [op.name for op in tested_ops() if isinstance(getattr(op, "lower", None), Expr)]
"""Ops that are one expression of a kernel: what surrounds it is the same text for all of them."""
OTHERS = [name for name in NAMES if name not in POINTWISE]
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance from 1 to the next number."""

EVERYWHERE = frozenset(
    "clamp dequantize dequantize_nf4 fake_quantize gelu insensitive layer_norm mean mse_loss nf4_codebook quantize"
    " rms_norm scale_gradient silu softplus var".split()
)
"""Composites that every test compiles, whatever they are made of."""


def _plain(op: Op) -> bool:
    """Whether an op is made of nothing but pointwise ops, broadcasts and sums."""
    graph = open_composites(next(cases(["f32"], [op.name])).graph, lambda _: True)
    return all(
        isinstance(getattr(n.op, "lower", None), Expr)
        or n.op.name in ("input", "constant", "dim", "broadcast_to", "reshape", "sum")
        for n in graph.nodes
        if n.op.name != "input"
    )


TAKING_TURNS = tuple(
    op.name for op in tested_ops() if isinstance(op, Composite) and op.name not in EVERYWHERE and _plain(op)
)
"""Composites whose parts are compiled by samples of their own on every target."""


def compiled(names: Iterable[str], turn: int, turns: int = 4) -> list[str]:
    """The ops that a test compiles: all, but of those that take turns every fourth, of which tests with other ``turn``
    compile the others.
    """
    return [n for n in names if n not in TAKING_TURNS or (TAKING_TURNS.index(n) + turn) % turns == 0]


TURNS = ("f32", "bf16", "f64", "f16")
"""The order in which an op's samples take the float dtypes in turns."""


def in_turns(name: str, first: int, dtypes: Sequence[str] = TURNS) -> list[Case]:
    """Each sample of an op at one float dtype, the next sample at the next one, and one of them at f32 in any case.

    Tests that differ in ``first`` (one per target) compile a sample at different dtypes: every sample at every dtype
    for every target would be most of the suite's time.

    :param first: the turn of the first sample.
    """
    turn = NAMES.index(name) + first
    every = list(cases(dtypes, names=[name]))
    chosen = [case for case in every if case.dtype in ("", dtypes[(turn + case.number) % len(dtypes)])]
    if not any(case.dtype == "f32" for case in chosen):
        chosen += [case for case in every if case.dtype == "f32"][:1]
    return chosen


def groups(cases: Iterable[Case]) -> dict[tuple[tuple[str, int], ...], list[Case]]:
    """The cases by their samples' dims: those that can be compiled as one graph."""
    found: dict[tuple[tuple[str, int], ...], list[Case]] = {}
    for case in cases:
        found.setdefault(tuple(sorted(case.sample.dims.items())), []).append(case)
    return found


def joint(case: Case) -> Graph:
    """The case's graph, with gradients where it has any."""
    if not case.differentiable or not (case.op.vjp or isinstance(case.op, Composite | Function)):
        return case.graph
    return differentiate(case.smooth, case.floats, unused="zeros")


def merged(name: str, parts: Iterable[tuple[str, Graph]]) -> Graph:
    """Several graphs as one; the names of each get its prefix."""
    inputs: list[Node] = []
    outputs: list[tuple[str, Node]] = []
    for prefix, graph in parts:
        new: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.op.name == "input":
                new[node] = input_node(f"{prefix}.{graph.input_name(node)}", node.type)
                inputs.append(new[node])
            else:
                operands = tuple(new[o] for o in node.operands)
                new[node] = again(node, operands)
        outputs += [(f"{prefix}.{key}", new[node]) for key, node in graph.outputs]
    return Graph(name, tuple(inputs), tuple(outputs))


def upstream(graph: Graph, arrays: dict[str, np.ndarray], bound: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    cotangents = {}
    for node in graph.inputs:
        key = graph.input_name(node)
        if key.startswith("d."):
            cotangents[key] = rng.standard_normal(node.type.concrete(bound)).astype(node.dtype.np)
    return {**arrays, **cotangents}


def error(value: np.ndarray, exact: np.ndarray, least: float) -> float:
    """The largest difference, relative to the largest exact element (or ``least``, the size of what was summed)."""
    finite = np.isfinite(exact)
    scale = max(np.abs(exact[finite]).max(initial=0.0), least) or 1.0
    return float(np.abs(value[finite] - exact[finite]).max(initial=0.0) / scale)


def exactly(graph: Graph, arrays: dict[str, np.ndarray], dims: dict[str, int]) -> dict[str, np.ndarray]:
    """The outputs of a graph in long double: NumPy's own f64 result (a product by BLAS, say) may be less exact than the
    one that is judged by it.
    """
    return interp.run(graph, arrays, dims=dims, precision="longdouble")


def close(got: np.ndarray, want: np.ndarray, exact: np.ndarray, coarsest: str, least: float, what: str) -> None:
    """Integers are equal; floats are as near to the exact value as the interpreter is, up to the rounding of the
    coarsest type that takes part.

    :param exact: of more digits than ``got`` and ``want`` (:func:`exactly`).
    """
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{what}: {got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    )
    own = gradc.typeof(want).dtype
    if not own.is_float:
        np.testing.assert_array_equal(got.astype(np.int64), want.astype(np.int64), err_msg=what)
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=what)
    np.testing.assert_array_equal(np.where(np.isinf(b), a, 0), np.where(np.isinf(b), b, 0), err_msg=what)
    unit = max(UNIT.get(coarsest, 0.0), UNIT.get(own.name, 0.0)) or UNIT["f32"]
    apart = error(a, np.where(np.isfinite(b), b, np.nan), least)
    ours, theirs = (error(x, np.where(np.isfinite(b), exact, np.nan), least) for x in (a, b))
    assert apart <= 8 * unit or ours <= max(4 * unit, 2 * theirs), (
        f"{what}: {apart:.3g} from the interpreter; error {ours:.3g}, its {theirs:.3g}"
    )


def added_up(got: np.ndarray, want: np.ndarray, exact: np.ndarray, sums: np.ndarray, what: str) -> None:
    """Of a library that adds up products one after another: each element is within 8 roundings of the sum of its
    products' magnitudes, and one of its own.
    """
    assert got.shape == want.shape and got.dtype == want.dtype, what
    own = UNIT[gradc.typeof(want).dtype.name]
    allowed = own * np.abs(exact) + 8 * min(own, UNIT["f32"]) * sums
    off = np.abs(got.astype(np.float64) - exact)
    assert (off <= allowed).all(), f"{what}: off by up to {(off / np.where(allowed > 0, allowed, 1)).max():.3g} of it"


def simulated(module: gradc.Module, *sizes: Mapping[str, int]) -> Iterator[str]:
    """What decides the values of a module on the simulator at these sizes: the texts that a GPU gets, the launches, and
    the ops' references that judge them.
    """
    for executable in module.executables.values():
        yield anonymous(executable.source)
        yield from (repr(executable.native.bind(dims).actions) for dims in sizes)
    yield long_tests.digest(("gradc/ops",))


def agree_with_numpy(
    cases: Iterable[Case],
    sizes: Iterable[int],
    place: Any = None,
    judged: Callable[..., None] | None = None,
    **options: Any,
) -> None:
    """Cases and their gradients, compiled as one module per set of dims, are what the interpreter says.

    :param sizes: what the symbolic dims are bound to, one after another, where the samples leave them open.
    :param place: puts arrays where the target runs (``put``, ``get``, ``takes``); None: they stay NumPy's.
    :param judged: the fixture of a long test, which ends where it passed with these programs and texts.
    :param options: of :func:`gradc.compile`.
    """
    compiled = []
    for dims, together in groups(cases).items():
        together = [case for case in together if place is None or all(place.takes(t.dtype.name) for t in case.types)]
        if together:
            graphs = [joint(case) for case in together]
            whole = merged(together[0].op.name, [(f"s{k}", g) for k, g in enumerate(graphs)])
            every = [{d: dict(dims).get(d, n) for d in whole.dims} for n in ([0] if not whole.dims or dims else sizes)]
            compiled.append((together, graphs, gradc.compile(whole, **options), every))
    if judged is not None:
        judged(*(text for *_, module, every in compiled for text in simulated(module, *every)))
    for together, graphs, module, every in compiled:
        for bound in every:
            given, wanted = {}, {}
            for k, (case, graph) in enumerate(zip(together, graphs, strict=True)):
                own = {d: v for d, v in bound.items() if d in graph.dims}
                arrays = upstream(graph, case.arrays(own), own)
                given |= {f"s{k}.{key}": a for key, a in arrays.items()}
                exact = exactly(graph, arrays, own)
                least = max(
                    (
                        float(np.nanmax(np.abs(a.astype(np.float64)), initial=0.0))
                        for a in arrays.values()
                        if a.dtype != bool
                    ),
                    default=0.0,
                )
                sums: dict[str, np.ndarray] = {}
                if place is not None and place.on_gpu and getattr(case.op, "contraction", False):
                    sums = interp.run(graph, {n: np.abs(a) for n, a in arrays.items()}, dims=own, precision="f64")
                wanted |= {
                    f"s{k}.{key}": (a, exact[key], case, least, sums.get(key))
                    for key, a in interp.run(graph, arrays, dims=own).items()
                }
            got = module.forward.run({n: a if place is None else place.put(a) for n, a in given.items()}, dims=bound)
            if place is not None:
                got = {key: place.get(got[key], want.dtype) for key, (want, *_) in wanted.items()}
            for key, (want, exact, case, least, sums_of) in wanted.items():
                what = f"{case} {key} {options} {bound}"
                if sums_of is None:
                    close(got[key], want, exact, case.coarsest if case.dtype else "", least, what)
                else:
                    added_up(got[key], want, exact, sums_of, what)


def agree_with_torch(module: Any, reference: Any, given: dict[str, np.ndarray]) -> None:
    """The value and the gradients of a module in f32 are those of ``reference(**tensors)`` in f64."""
    import torch

    exact = {name: torch.from_numpy(a.astype("f8")).requires_grad_() for name, a in given.items()}
    wanted = reference(**exact)
    cotangent = np.random.default_rng(1).standard_normal(tuple(wanted.shape)).astype("f4")
    wanted.backward(torch.from_numpy(cotangent.astype("f8")))
    value, residuals = module.forward(**given)
    np.testing.assert_allclose(value, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)
    for name, gradient in module.backward(residuals, cotangent).items():
        known = exact[name].grad.numpy()
        np.testing.assert_allclose(gradient, known, rtol=1e-5, atol=1e-5 * np.abs(known).max(), err_msg=name)
