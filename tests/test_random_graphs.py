"""Random graphs of 3 to 15 nodes: every stage of the compiler means what the first one means.

A graph is drawn op by op: each op of the registry is offered values that stand already, and joins where its type rule accepts them.  Inputs
are small dyadic numbers, so that where a value is computed without rounding (found by running in f64 beside) equality is demanded to
the last bit; other values are compared within the rounding of the types that take part.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry import call, cases, draw

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import IndexOutOfRange, InvalidProblem, NotDifferentiable, TypeRuleError
from gradc.exact import equal
from gradc.exact.evaluate import opened
from gradc.ir.dims import Size, evaluate, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.kernel import Program
from gradc.ir.node import REGISTRY, Node
from gradc.ir.op import Expr, Primitive
from gradc.ir.program_text import parse_program
from gradc.ir.size_text import parse_size
from gradc.ir.text import parse
from gradc.ir.types import DTYPES, Type
from gradc.ir.verify import verify, verify_program
from gradc.passes.choose_reduction import choose_reduction
from gradc.passes.plan_buffers import plan_buffers
from gradc.passes.schedule import schedule

SLOW = bool(os.environ.get("GRADC_SLOW_TESTS"))
N, M = symbol("N"), symbol("M")
BINDINGS = ({"N": 7, "M": 5}, {"N": 0, "M": 7}, {"N": 1, "M": 1}, {"N": 64, "M": 3}, {"N": 7, "M": 0}, {"N": 3, "M": 64})
FLOATS = ("f32", "f64", "bf16")
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
MANTISSA = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}

# -- drawing a graph ---------------------------------------------------------------------------------------------------

Choose = Callable[[Sequence[Any]], Any]
POINTWISE = sorted(
    name for name, op in REGISTRY.items() if isinstance(op, Primitive) and isinstance(op.lower, Expr) and name not in ("cast", "pow", "stop_gradient", "tan")
)
SHAPES: tuple[tuple[Size, ...], ...] = ((), (N,), (4,), (N, 4), (N, M), (3, N), (2, N, 3), (M, 4), (1, N), (N, 1), (2, 3, M))


SAMPLES = [case for case in cases(FLOATS) if not case.sample.dims and not case.fixed and case.op.name not in POINTWISE]


class Drawing:
    """A graph in the making.

    :param choose: picks one of a sequence: hypothesis, or a random generator.
    """

    def __init__(self, choose: Choose):
        self.choose = choose
        self.inputs: list[Node] = []
        self.words: dict[str, Any] = {}  # input -> how its values are drawn: a word, or the size that it indexes
        self.values: list[Node] = []

    def graph(self) -> Graph:
        for _ in range(self.choose((1, 2, 3))):
            self.values.append(self.input(Type(DTYPES[self.choose(FLOATS)], self.choose(SHAPES)), "float"))
        count, tries = self.choose(range(3, 13)), 0
        while count and tries < 80:
            tries += 1
            try:
                node = getattr(self, self.choose(STEPS))()
            except TypeRuleError:
                continue
            if node is not None and node not in self.values and node.rank <= 4:
                self.values.append(node)
                count -= 1
        read = {o for v in self.values for o in v.operands}
        results = [v for v in self.values if v not in read and v.op.name != "input"] or self.values[-1:]
        kept = [v for v in self.values if v in read and v.op.name != "input"]
        if kept and self.choose((False, False, True)):
            results.append(self.choose(kept))
        outputs = tuple((f"y{k}", v) for k, v in enumerate(results))
        reached = Graph("g", tuple(self.inputs), outputs)
        used = {o for n in reached.nodes for o in n.operands} | {n for _, n in outputs}
        return Graph("g", tuple(n for n in self.inputs if n in used), outputs)

    # -- picking -------------------------------------------------------------------------------------------------------

    def input(self, type_: Type, word: Any) -> Node:
        node = input_node(f"x{len(self.inputs)}", type_)
        self.inputs.append(node)
        self.words[f"x{len(self.inputs) - 1}"] = word
        return node

    def value(self, accept: Callable[[Node], bool] = lambda v: True) -> Node:
        found = [v for v in self.values[-8:] if accept(v)]
        if not found:
            raise TypeRuleError("no such value")
        return self.choose(found)  # type: ignore[no-any-return]

    def real(self, rank: int = 0) -> Node:
        return self.value(lambda v: v.dtype.is_float and v.rank >= rank)

    def axis(self, x: Node) -> int:
        return int(self.choose(range(x.rank)))

    def axes(self, x: Node) -> tuple[int, ...]:
        return tuple(a for a in range(x.rank) if self.choose((True, False)))

    def operand(self, like: Node) -> Node:
        """Something that ``like`` may be combined with."""
        same = [v for v in self.values[-8:] if v.dtype is like.dtype] or [like]
        if self.choose((True, True, False)):
            return self.choose(same)  # type: ignore[no-any-return]
        lead = self.choose(range(like.rank + 1))
        shape = tuple(1 if self.choose((False, False, False, True)) else s for s in like.shape[lead:])
        if not like.dtype.is_float:
            return self.choose(same)  # type: ignore[no-any-return]
        return self.input(like.type.with_shape(*shape), "float")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pointwise(self) -> Node | None:
        op = REGISTRY[self.choose(POINTWISE)]
        names = op.operand_names
        if op.name == "where":
            condition = self.value(lambda v: v.dtype.kind == "b")
            first = self.value()
            return op(condition, first, self.operand(first))  # type: ignore[no-any-return]
        first = self.value()
        rest = [self.operand(first) for _ in names[1:]]
        return op(first, *rest)  # type: ignore[no-any-return]

    def arithmetic(self) -> Node:
        first = self.value()
        return getattr(ops, self.choose(("add", "sub", "mul", "maximum", "minimum")))(first, self.operand(first))  # type: ignore[no-any-return]

    def compare(self) -> Node:
        first = self.value()
        return getattr(ops, self.choose(("eq", "ne", "lt", "le", "gt", "ge")))(first, self.choose((0, 1)) if first.dtype.kind != "b" else first)  # type: ignore[no-any-return]

    def scalar(self) -> Node:
        first = self.value(lambda v: v.dtype.kind != "b")
        number = self.choose((2, 3, -1, 1)) if not first.dtype.is_float else self.choose((0.5, 2.0, -1.5, 0.0, 1.0, 0.1))
        return self.choose((ops.mul, ops.add, ops.sub))(first, number)  # type: ignore[no-any-return]

    def neural(self) -> Node:
        return getattr(ops, self.choose(("gelu", "silu", "softplus", "relu", "tanh", "sigmoid")))(self.real())  # type: ignore[no-any-return]

    def cast(self) -> Node:
        return ops.cast(self.value(), self.choose((*FLOATS, "f32", "i32", "i8", "f16")))

    def stop(self) -> Node:
        return ops.stop_gradient(self.value())

    def reshape(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        at = self.choose(range(x.rank))
        kind = self.choose(("flat", "merge", "unit", "split"))
        if kind == "flat":
            return ops.reshape(x, (-1,))
        if kind == "merge" and at + 1 < x.rank:
            return ops.reshape(x, (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))
        if kind == "split" and x.shape[at] == 4:
            return ops.reshape(x, (*x.shape[:at], 2, 2, *x.shape[at + 1 :]))
        return ops.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))

    def transpose(self) -> Node:
        x = self.value(lambda v: v.rank >= 2)
        return ops.transpose(x, self.choose(tuple(itertools.permutations(range(x.rank)))))

    def broadcast(self) -> Node:
        x = self.value(lambda v: v.rank <= 2)
        wide = tuple(self.choose((N, 3, 4)) if s == 1 else s for s in x.shape)
        return ops.broadcast_to(x, (*self.choose(((), (2,), (M,))), *wide))

    def slice(self) -> Node:
        x = self.value(lambda v: any(isinstance(s, int) and s > 1 for s in v.shape))
        key: list[Any] = []
        for s in x.shape:
            if isinstance(s, int):
                start = self.choose(range(s + 1))
                key.append(slice(start, self.choose(range(start, s + 1)), self.choose((1, 2))))
            else:
                key.append(self.choose((slice(None), slice(1, None), slice(None, None, 2), slice(None, -1))))
        return x[tuple(key)]

    def pad(self) -> Node:
        x = self.value(lambda v: v.rank >= 1 and v.dtype.kind != "b")
        return ops.pad(x, tuple((self.choose((0, 1, 2)), self.choose((0, 0, 1))) for _ in x.shape), self.choose((0, 1)))

    def flip(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        return ops.flip(x, self.axis(x))

    def concat(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        return ops.concat([x, self.operand(x), *self.choose(((), (x,)))], axis=self.axis(x))

    def reduce(self) -> Node:
        x = self.value(lambda v: v.dtype.kind != "b")
        name = self.choose(("sum", "sum", "sum", "mean", "amax", "amin", "max", "var", "logsumexp", "prod"))
        axis = self.axes(x)
        if name in ("amax", "amin", "max", "logsumexp"):
            axis = tuple(a for a in axis if isinstance(x.shape[a], int))  # over no elements it is an error
            if not axis:
                raise TypeRuleError("nothing to reduce")
        return getattr(ops, name)(x, axis=axis, keepdims=self.choose((False, True)))  # type: ignore[no-any-return]

    def arg(self) -> Node:
        x = self.value(lambda v: v.dtype.kind != "b" and any(isinstance(s, int) for s in v.shape))
        return self.choose((ops.argmax, ops.argmin))(x, self.choose([a for a, s in enumerate(x.shape) if isinstance(s, int)]))  # type: ignore[no-any-return]

    def softmax(self) -> Node:
        x = self.real(1)
        return self.choose((ops.softmax, ops.log_softmax))(x, self.axis(x))  # type: ignore[no-any-return]

    def norm(self) -> Node:
        x = self.real(1)
        shape = x.shape[self.choose(range(x.rank)) :]
        weight = self.input(x.type.with_shape(*shape), "float")
        if self.choose((True, False)):
            return ops.rms_norm(x, shape, weight)
        return ops.layer_norm(x, shape, weight, self.input(x.type.with_shape(*shape), "float") if self.choose((True, False)) else None)

    def indices(self, shape: tuple[Size, ...], size: Size) -> Node:
        ready = [v for v in self.values if v.dtype.name == "i64" and v.shape == shape and v.op.name in ("argmax", "argmin") and v.operands[0].shape[v.attrs["axis"]] == size]
        if ready and self.choose((True, False)):
            return self.choose(ready)  # type: ignore[no-any-return]
        return self.input(Type(DTYPES[self.choose(("i64", "i32", "i64"))], shape), size)

    def gather(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        axis = self.axis(x)
        indices = self.indices(self.choose(((N,), (), (2, N), (5,))), x.shape[axis])
        options: dict[str, Any] = {"oob": self.choose(("error", "error", "skip", "clamp", "wrap"))}
        if x.dtype.is_float and isinstance(x.shape[axis], int):
            options |= {"padding_idx": self.choose((None, 0)), "scale_grad_by_freq": self.choose((False, True))}
        return ops.gather(x, indices, axis=axis, **options)

    def take(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        axis = self.axis(x)
        shape = tuple(self.choose((3, s)) if a == axis else s for a, s in enumerate(x.shape))
        return ops.take_along_axis(x, self.indices(shape, x.shape[axis]), axis=axis)

    def scatter(self) -> Node:
        x = self.value(lambda v: v.rank >= 1 and v.dtype.kind != "b" and v.dtype.name != "i8")
        axis, size = self.axis(x), self.choose((3, N, 6, M))
        if self.choose((True, False)):
            return ops.scatter_add_along_axis(self.indices(x.shape, size), x, axis=axis, size=size)
        options = {"oob": self.choose(("error", "skip", "clamp", "wrap")), "padding_idx": self.choose((None, 0)) if isinstance(size, int) else None}
        count = self.choose(range(1, x.rank - axis + 1))
        return ops.scatter_add(self.indices(x.shape[axis : axis + count], size), x, axis=axis, size=size, **options)

    def matmul(self) -> Node:
        x = self.real(2)
        inner = x.shape[-1]
        batch = self.choose(((), x.shape[:-2]))
        fitting = [v for v in self.values if v.dtype is x.dtype and v.rank >= 2 and v.shape[-2] == inner]
        if fitting and self.choose((True, False)):
            return x @ self.choose(fitting)  # type: ignore[no-any-return]
        if self.choose((True, False)):
            return x @ self.input(x.type.with_shape(*batch, inner, self.choose((3, M, 4, N))), "float")
        return ops.linear(x, self.input(x.type.with_shape(self.choose((3, M, 4)), inner), "float"))

    def loss(self) -> Node:
        x = self.real(2)
        if self.choose((True, False)):
            return ops.mse_loss(x, self.operand(x), reduction=self.choose(("none", "mean", "sum")))
        target = self.indices((x.shape[0], *x.shape[2:]), x.shape[1])
        return ops.cross_entropy(x, target, reduction=self.choose(("none", "mean", "sum")), label_smoothing=self.choose((0.0, 0.1)))

    def dequantize(self) -> Node:
        shape = self.choose(((N, 4), (M, 4), (N, M), (4,)))
        q = self.input(Type(DTYPES["i8"], shape), "int")
        scale = self.input(Type(DTYPES[self.choose(("f32", "f64"))], self.choose(((), shape[:1], (*shape[:1], 1))) if len(shape) > 1 else ()), "positive")
        block = None if scale.rank == 0 else (1, *shape[1:])
        if scale.rank == 1:
            scale = ops.reshape(scale, (*scale.shape, 1))
        return ops.dequantize(q, scale, block=block, out_dtype=scale.dtype.name)

    def sampled(self) -> Node:
        """An op of the registry as one of its own samples calls it, on values of those types where there are any."""
        case = self.choose(SAMPLES)
        operands = []
        for type_, word in zip(case.types, case.words, strict=True):
            fitting = [v for v in self.values if v.type == type_ and not word.startswith("index")]
            operands.append(self.choose(fitting) if fitting and self.choose((True, True, False)) else self.input(type_, parse_size(word[6:]) if word.startswith("index:") else word))
        return call(case.op, operands, case.attrs)

    def iota(self) -> Node:
        return ops.iota(self.choose(((N,), (N, 4), (4,))), axis=0, dtype=self.choose(("i64", "f32", "f64")))


STEPS = (*("pointwise",) * 5, *("arithmetic",) * 4, "compare", *("scalar",) * 2, "neural", *("cast",) * 2, "stop", *("reshape",) * 3, *("transpose",) * 3,
         *("broadcast",) * 2, *("slice",) * 2, *("pad",) * 2, "flip", *("concat",) * 2, *("reduce",) * 5, "arg", *("softmax",) * 2, *("norm",) * 2,
         *("gather",) * 3, "take", *("scatter",) * 2, *("matmul",) * 3, "loss", *("dequantize",) * 2, "iota", *("sampled",) * 4)  # fmt: skip


def arrays_for(graph: Graph, words: Mapping[str, Any], dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Inputs: dyadic numbers of few bits, indices in range (any number where the table is empty)."""
    rng = np.random.default_rng([seed, *dims.values()])
    out: dict[str, np.ndarray] = {}
    for node in graph.inputs:
        name, shape = graph.input_name(node), node.type.concrete(dims)
        word = words.get(name, "float")
        if word == "float":
            array = rng.integers(-8, 9, shape) / 4.0
        elif word == "positive":
            array = 2.0 ** rng.integers(-3, 2, shape)
        elif word == "int":
            array = rng.integers(-8 if node.dtype.kind != "u" else 0, 8, shape)
        elif isinstance(word, str):
            array = draw(rng, word, node.dtype, shape, dims)
        else:
            array = rng.integers(0, max(evaluate(word, dims), 1), shape)
        out[name] = np.asarray(array).astype(node.dtype.np)
    return out


# -- comparing ---------------------------------------------------------------------------------------------------------

STEPWISE = frozenset("floor round sign eq ne lt le gt ge argmax argmin floordiv mod cast quantize fake_quantize abs maximum minimum amax amin relu where".split())
"""Ops (or their derivatives) that jump: on a value that is not known to the last bit their results are not compared."""
SUMS = frozenset("sum matmul scatter_add scatter_add_along_axis".split())
NOT_EXACT = frozenset("exp expm1 log log1p sin cos tanh erf sigmoid rsqrt sqrt pow prod div reciprocal".split())


class Expected:
    """A graph's meaning on some inputs, and how well each output can be known."""

    def __init__(self, graph: Graph, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int]):
        plain = opened(graph)
        own = interp.evaluate_graph(plain, arrays, dims)
        wide = interp.evaluate_graph(plain, arrays, dims, "f64")
        exact: dict[Node, bool] = {}
        steady: dict[Node, bool] = {}
        scale: dict[Node, float] = {}
        unit: dict[Node, float] = {}
        for node in plain.nodes:
            before = node.operands
            value = np.abs(np.asarray(own[node], np.float64))
            finite = value[np.isfinite(value)]
            scale[node] = max([float(finite.max(initial=0.0)), *(scale[o] for o in before)])
            unit[node] = max([UNIT.get(node.dtype.name, 0.0), *(unit[o] for o in before)])
            exact[node] = all(exact[o] for o in before) and node.op.name not in NOT_EXACT and np.array_equal(np.asarray(own[node], np.float64), np.asarray(wide[node], np.float64), equal_nan=True)
            exact[node] = exact[node] and (not node.dtype.is_float or self.grain(wide[node]) * 2.0**50 > scale[node])
            if exact[node] and node.op.name in SUMS and node.dtype.is_float:
                exact[node] = self.short(node, wide)
            jumps = node.op.name in STEPWISE and not all(exact[o] for o in before)
            # what comes of a division by a size of 0 is no real number: the REAL rules need not keep it
            divided = node.op.name in ("div", "reciprocal", "rsqrt", "log") and not np.asarray(wide[before[-1]]).all()
            steady[node] = all(steady[o] for o in before) and not jumps and not divided and bool(np.isfinite(np.asarray(wide[node], np.float64)).all())
        self.arrays = arrays
        self.dims = dims
        self.values = {name: own[n] for name, n in plain.outputs}
        self.wide = {name: wide[n] for name, n in plain.outputs}
        self.exact = {name: exact[n] for name, n in plain.outputs}
        self.steady = {name: steady[n] for name, n in plain.outputs}
        self.scale = {name: scale[n] for name, n in plain.outputs}
        self.unit = {name: unit[n] for name, n in plain.outputs}

    @staticmethod
    def grain(values: np.ndarray) -> float:
        """The largest power of two from 1 to 2^-24 of which all are multiples, else 0."""
        array = np.abs(np.asarray(values, np.float64))
        array = array[np.isfinite(array)]
        return next((2.0**-k for k in range(25) if np.array_equal(np.rint(array * 2.0**k), array * 2.0**k)), 0.0)

    @staticmethod
    def short(node: Node, values: Mapping[Node, np.ndarray]) -> bool:
        """Whether a sum has no rounding in any order."""
        step, total = 1.0, 1.0
        for operand in node.operands:
            if operand.dtype.is_float:
                array = np.abs(values[operand])
                step *= Expected.grain(array)
                total *= float(array.sum()) if node.op.name != "matmul" else float(array.max(initial=0.0) * max(array.shape[-2:]))
        return step > 0 and total / step < 2.0 ** MANTISSA[node.dtype.name]

    def compare(self, got: Mapping[str, np.ndarray], what: str, precise: bool = False) -> None:
        want = self.wide if precise else self.values
        for name, expected in want.items():
            value = np.asarray(got[name])
            place = f"{what}: {name} with {dict(self.dims)}"
            assert value.shape == expected.shape and value.dtype == expected.dtype, f"{place}: {value.dtype}{value.shape}, not {expected.dtype}{expected.shape}"
            a, b = value.astype(np.float64), expected.astype(np.float64)
            if self.exact[name]:
                np.testing.assert_array_equal(a, b, err_msg=place)
            elif self.steady[name]:
                finite = np.isfinite(b)
                if not finite.all() or not np.isfinite(a).all():
                    if self.scale[name] > 1e30 or not np.isfinite(self.wide[name]).all():
                        continue  # overflow at another step of the way
                spread = np.abs(self.values[name].astype(np.float64) - self.wide[name])
                unit = UNIT["f64"] if precise and not self.unit[name] else self.unit[name]
                if precise:
                    unit = UNIT["f64"] * 1e4
                allowed = (0.0 if precise else 16 * float(spread[np.isfinite(spread)].max(initial=0.0))) + 128 * unit * max(self.scale[name], 1e-3)
                np.testing.assert_allclose(a, b, rtol=0, atol=allowed, err_msg=place)


def gradients(graph: Graph, words: Mapping[str, Any]) -> Graph | None:
    """The joint graph with respect to every float input, or None where there is no gradient."""
    wrt = [graph.input_name(n) for n in graph.inputs if n.dtype.name in MANTISSA]
    try:
        return differentiate(graph, wrt, unused="zeros") if wrt else None
    except NotDifferentiable:
        return None


# -- the invariants ----------------------------------------------------------------------------------------------------


def programs(graph: Graph) -> dict[str, Program]:
    """Scheduled with fusion on and off."""
    return {how: plan_buffers(choose_reduction(schedule(graph, fuse=how == "fused"))) for how in ("fused", "apart")}


def check_text(graph: Graph | Program) -> None:
    if isinstance(graph, Graph):
        verify(graph)
        assert parse(str(graph)) == graph
    else:
        verify_program(graph)
        assert parse_program(str(graph)) == graph


def check_stages(graph: Graph, words: Mapping[str, Any], seed: int) -> list[tuple[str, Graph]]:
    """Every pass leaves a graph that verifies, round-trips and means the same; gives the forward and the joint graph before and after them."""
    from gradc.api import DEFAULTS
    from gradc.passes.manager import Pipeline
    from gradc.pipeline import optimise

    results = [("forward", graph)]
    joint = gradients(graph, words)
    for what, start in (("forward", graph), *((("joint", joint),) if joint is not None else ())):
        pipeline = Pipeline()
        pipeline.start(what, start)
        optimise(start, DEFAULTS, pipeline)
        cases = [Expected(start, arrays_for(start, words, dims, seed), dims) for dims in usable(start, words, seed)]
        last = start
        for stage in pipeline:
            after = stage.result
            assert isinstance(after, Graph)
            if after == last and stage.name != what:
                continue
            check_text(after)
            equal(last, after, licence="REAL", seed=seed)
            for case in cases:
                case.compare(interp.run(after, case.arrays, dims=case.dims, precision="f64"), f"{what} after {stage.name}", precise=True)
            last = after
        results.append((f"{what} optimised", last))
    return results


def usable(graph: Graph, words: Mapping[str, Any], seed: int) -> list[dict[str, int]]:
    """The bindings under which the interpreter runs: not those where an index has no row to point at."""
    found = []
    for dims in BINDINGS:
        own = {d: dims[d] for d in graph.dims}
        if own in found:
            continue
        try:
            interp.run(graph, arrays_for(graph, words, own, seed), dims=own)
        except (IndexOutOfRange, InvalidProblem):
            continue
        found.append(own)
    return found


def check_programs(graph: Graph, words: Mapping[str, Any], seed: int, compiled: bool = True, numerics: str = "real") -> None:
    """Fusion on and off, in the interpreter of programs and on the CPU, agree with the graph."""
    cases = [Expected(graph, arrays_for(graph, words, dims, seed), dims) for dims in usable(graph, words, seed)]
    from gradc.api import DEFAULTS
    from gradc.passes.manager import Pipeline
    from gradc.pipeline import optimise
    from gradc.runtime.executable import Executable

    ready = optimise(graph, {**DEFAULTS, "numerics": numerics}, Pipeline())
    for how, program in programs(ready).items():
        check_text(program)
        native = Executable(program) if compiled else None
        for case in cases:
            case.compare(interp.run(program, case.arrays, dims=case.dims), f"the {how} program in NumPy")
            if native is not None:
                case.compare(native.run(dims=case.dims, **case.arrays), f"the {how} program on the CPU")


def check_module(graph: Graph, words: Mapping[str, Any], seed: int) -> None:
    """forward and backward of a module give what the joint graph gives, and leave inputs alone."""
    joint = gradients(graph, words)
    if joint is None:
        return
    wrt = [graph.input_name(n) for n in graph.inputs if n.dtype.name in MANTISSA]
    module = gradc.compile(graph, wrt=wrt, unused="zeros")
    for dims in usable(joint, words, seed):
        arrays = arrays_for(joint, words, dims, seed)
        case = Expected(joint, arrays, dims)
        before = {n: a.copy() for n, a in arrays.items()}
        values, residuals = module.forward(dims=dims, **{n: arrays[n] for n in graph.input_names})
        values = values if isinstance(values, dict) else {graph.output_names[0]: values}
        found = module.backward(residuals, **{name: arrays[f"d.{name}"] for name, node in graph.outputs if node.dtype.is_float}, dims=dims)
        case.compare(values | {f"d.{name}": found[name] for name in wrt}, "the module")
        for name, array in arrays.items():
            assert array.tobytes() == before[name].tobytes(), f"the input {name} was changed"  # NaNs of every dtype are equal to themselves


def drawn(data: st.DataObject) -> tuple[Graph, dict[str, Any]]:
    drawing = Drawing(lambda options: data.draw(st.sampled_from(list(options))))
    return drawing.graph(), drawing.words


@settings(max_examples=400 if SLOW else 25)
@given(st.data())
def test_passes_keep_the_meaning(data: st.DataObject) -> None:
    graph, words = drawn(data)
    check_stages(graph, words, 0)


@settings(max_examples=400 if SLOW else 25)
@given(st.data())
def test_programs_mean_their_graph(data: st.DataObject) -> None:
    graph, words = drawn(data)
    joint = gradients(graph, words)
    check_programs(graph if joint is None else joint, words, 0, compiled=False)


@settings(max_examples=300 if SLOW else 12)
@given(st.data())
def test_cpu_is_numpy_fused_and_apart(data: st.DataObject) -> None:
    graph, words = drawn(data)
    check_programs(graph, words, 0)


@settings(max_examples=300 if SLOW else 12)
@given(st.data())
def test_modules_give_the_gradients(data: st.DataObject) -> None:
    graph, words = drawn(data)
    check_module(graph, words, 0)


# -- what random graphs have found -------------------------------------------------------------------------------------

FOUND: dict[str, tuple[Callable[..., Any], dict[str, str], dict[str, Any]]] = {
    "a scatter of constants counts every column": (lambda x, i: ops.gather(x, i, scale_grad_by_freq=True), {"x": "f64[1,N]", "i": "i32[2,N]"}, {"i": 1}),
    "a matrix product reads no strides out of positions": (
        lambda x, w, i: ops.take_along_axis(x, i, axis=1) @ ops.gather(w, ops.reshape(i[:1], (-1,))),
        {"x": "f32[3,N]", "w": "f32[N,4]", "i": "i64[3,2]"},
        {"i": N},
    ),
    "a border around nothing has its value": (lambda x: ops.pad(x, ((1, 2), (0, 1)), 1.5) * 2.0, {"x": "f32[N,M]"}, {}),
    "the gradient of a slice has the operand's shape": (lambda x: x[:-1] * x[1:], {"x": "bf16[N]"}, {}),
    "the gradient of a slice that starts behind the end": (lambda x: ops.sum(x[3:]) + ops.sum(x[::3]), {"x": "f32[N]"}, {}),
    "sizes of 0 in a reshape": (lambda x, y: ops.pad(ops.reshape(x, (1, 0)), ((0, 0), (1, 1)), 1.0) + y, {"x": "f32[1,0,2]", "y": "f32[1,2]"}, {}),
    "rows of a softmax without columns": (lambda x: ops.softmax(x) + ops.reshape(ops.logsumexp(x, axis=1), (-1, 1)), {"x": "f32[N,M]"}, {}),
    "an empty table": (lambda x, i: ops.gather(x, i, oob="clamp") + ops.gather(x, i, oob="wrap") + ops.gather(x, i, oob="skip"), {"x": "f32[N,3]", "i": "i64[M]"}, {"i": 9}),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_found_before(name: str) -> None:
    function, types, bounds = FOUND[name]
    graph = gradc.trace(function, **types)
    check_stages(graph, bounds, 0)
    check_programs(graph, bounds, 0)
    joint = gradients(graph, bounds)
    assert joint is not None
    check_programs(joint, bounds, 0)
    check_module(graph, bounds, 0)
