"""Random graphs, drawn op by op: each op is offered values that stand already, and joins where its type rule accepts
them.

Shapes are made to be awkward where code generators are weak: several symbols in one shape in any order, one symbol
twice, last axes of 1 to 8 elements (far below a vector or a task) over rows whose number is a symbol, broadcasts from
any of them to any other, sizes that come out of pads, slices and concats.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from registry import Case, call, cases

from gradc import ops
from gradc.errors import GradcError
from gradc.ir.dims import Dim, Size, substitute, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.node import REGISTRY, Node
from gradc.ir.op import Expr, Primitive
from gradc.ir.types import DTYPES, Type

N, M, K = symbol("N"), symbol("M"), symbol("K")
POINTWISE = sorted(
    name
    for name, op in REGISTRY.items()
    if isinstance(op, Primitive)
    and isinstance(op.lower, Expr)
    and name
    not in (
        "cast",
        "stop_gradient",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "div",
        "pow",
        "floordiv",
        "mod",
        "right_shift",
    )
)
GUARDED = {"log": 0.3, "log1p": 0.0, "sqrt": 0.2, "rsqrt": 0.3, "reciprocal": 0.4}
"""Ops of positive numbers, and what is added to the absolute value of their operand."""
OOB = ("error", "error", "error", "skip", "clamp", "wrap")


@functools.cache
def samples() -> tuple[Case, ...]:
    """The registry's own calls at every dtype: through them every op takes part."""
    return tuple(case for case in cases(("f64", "f32", "bf16", "f16")) if case.op.name not in POINTWISE)


@functools.cache
def samples_of(name: str, dtype: str) -> tuple[Case, ...]:
    return tuple(c for c in samples() if c.op.name == name and c.dtype in ("", dtype))


@functools.cache
def sampled_names() -> tuple[str, ...]:
    return tuple(sorted({c.op.name for c in samples()}))


class Drawing:
    """A graph in the making.

    :param choose: the only source of chance.
    """

    def __init__(self, choose: random.Random):
        self.random = choose
        self.inputs: list[Node] = []
        self.values: list[Node] = []
        self.float = self.choose(("f64",) * 7 + ("f32", "f32", "bf16", "f16"))
        self.floats = (self.float,) * 6 + ("f64", "f32")

    def choose(self, options: Sequence[Any]) -> Any:
        if not options:
            raise IndexError("no such value")
        return options[self.random.randrange(len(options))]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def graph(self) -> Graph:
        for _ in range(self.choose((1, 2, 3))):
            self.values.append(self.input(Type(DTYPES[self.float], self.shape())))
        count, tries = self.choose((1, 2, 2, 3, 3, 4, 5, 6, 8, 11)), 0
        while count and tries < 60:
            tries += 1
            before = len(self.inputs)
            try:
                node = getattr(self, self.choose(STEPS))()
            except (GradcError, IndexError):  # not for these operands
                del self.inputs[before:]
                continue
            if node is not None and node not in {*self.values} and node.rank <= 5:
                self.values.append(node)
                count -= 1
        return self.finished()

    def finished(self) -> Graph:
        read = {o for v in self.values for o in v.operands}
        results = [v for v in self.values if v not in read and v.op.name != "input"] or self.values[-1:]
        kept = [v for v in self.values if v in read and v.op.name != "input"]
        if kept and self.chance(0.3):
            results.append(self.choose(kept))
        outputs = tuple((f"y{k}", v) for k, v in enumerate(results[:5]))
        return pruned(Graph("fuzz", tuple(self.inputs), outputs))

    # -- picking -------------------------------------------------------------------------------------------------------

    def size(self) -> Size:
        return self.choose((N, N, M, M, K, 1, 2, 3, 4, 4, 5, 7, 8))  # type: ignore[no-any-return]

    def shape(self) -> tuple[Size, ...]:
        rank = self.choose((0, 1, 1, 2, 2, 2, 3, 3, 3, 4))
        shape = [self.size() for _ in range(rank)]
        if rank and self.chance(0.5):
            shape[-1] = self.choose((2, 3, 4, 5, 8))  # short columns
        if rank > 1 and self.chance(0.5):
            shape[self.choose(range(rank - 1))] = self.choose((N, M, K))
        return tuple(shape)

    def input(self, type_: Type) -> Node:
        node = input_node(f"x{len(self.inputs)}", type_)
        self.inputs.append(node)
        return node

    def value(self, accept: Callable[[Node], bool] = lambda v: True) -> Node:
        return self.choose([v for v in self.values[-8:] if accept(v)])  # type: ignore[no-any-return]

    def real(self, rank: int = 0) -> Node:
        return self.value(lambda v: v.dtype.has_tangent and v.rank >= rank)

    def axis(self, x: Node) -> int:
        return int(self.choose(range(x.rank)))

    def axes(self, x: Node) -> tuple[int, ...]:
        return tuple(a for a in range(x.rank) if self.chance(0.5))

    def operand(self, like: Node) -> Node:
        """Something that ``like`` may be combined with."""
        same = [v for v in self.values[-8:] if v.dtype is like.dtype] or [like]
        if self.chance(0.6) or not like.dtype.has_tangent:
            return self.choose(same)  # type: ignore[no-any-return]
        shape = tuple(1 if self.chance(0.25) else s for s in like.shape[self.choose(range(like.rank + 1)) :])
        return self.input(like.type.with_shape(*shape))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def pointwise(self) -> Node:
        op = REGISTRY[self.choose(POINTWISE)]
        if op.name == "where":
            first = self.value()
            return op(self.value(lambda v: v.dtype.kind == "b"), first, self.operand(first))  # type: ignore[no-any-return]
        first = self.value()
        return op(first, *(self.operand(first) for _ in op.operand_names[1:]))  # type: ignore[no-any-return]

    def guarded(self) -> Node:
        name, x = self.choose(tuple(GUARDED)), self.real()
        return getattr(ops, name)(ops.abs(x) + GUARDED[name])  # type: ignore[no-any-return]

    def division(self) -> Node:
        x = self.value(lambda v: v.dtype.kind != "b")
        if not x.dtype.is_float:
            return self.choose((ops.floordiv, ops.mod))(x, self.choose((2, 3, -3)))  # type: ignore[no-any-return]
        return (
            x / (ops.abs(self.operand(x)) + 0.4)
            if self.chance(0.7)
            else ops.pow(ops.abs(x) + 0.3, self.choose((0.5, 2.0, -1.0, 3.0)))
        )

    def arithmetic(self) -> Node:
        first = self.value()
        return getattr(ops, self.choose(("add", "sub", "mul", "maximum", "minimum")))(first, self.operand(first))  # type: ignore[no-any-return]

    def compare(self) -> Node:
        first = self.value()
        return getattr(ops, self.choose(("eq", "ne", "lt", "le", "gt", "ge")))(
            first, self.choose((0, 1)) if first.dtype.kind != "b" else first
        )  # type: ignore[no-any-return]

    def choice(self) -> Node:
        first = self.value()
        other = self.operand(first)
        condition = (
            ops.gt(self.real(), self.choose((0.0, 0.25)))
            if self.chance(0.5)
            else self.value(lambda v: v.dtype.kind == "b")
        )
        if self.chance(0.3):
            condition = self.choose(
                (ops.invert(condition), ops.bitwise_or(condition, self.value(lambda v: v.dtype.kind == "b")))
            )
        return ops.where(condition, first, other)

    def scalar(self) -> Node:
        first = self.value(lambda v: v.dtype.kind != "b")
        number = (
            self.choose((2, 3, -1, 1)) if not first.dtype.is_float else self.choose((0.5, 2.0, -1.5, 0.0, 1.0, 0.1))
        )
        return self.choose((ops.mul, ops.add, ops.sub))(first, number)  # type: ignore[no-any-return]

    def neural(self) -> Node:
        return getattr(ops, self.choose(("gelu", "silu", "softplus", "relu", "tanh", "sigmoid", "sin", "erf", "exp")))(
            self.real()
        )  # type: ignore[no-any-return]

    def cast(self) -> Node:
        return ops.cast(self.value(), self.choose((*self.floats, "i32", "i8", "i64")))

    def stop(self) -> Node:
        return ops.stop_gradient(self.value())

    def reshape(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        at = self.axis(x)
        kind = self.choose(("flat", "merge", "unit", "split"))
        if kind == "flat":
            return ops.reshape(x, (-1,))
        if kind == "merge" and at + 1 < x.rank:
            return ops.reshape(x, (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))
        if kind == "split" and x.shape[at] in (4, 8):
            return ops.reshape(x, (*x.shape[:at], 2, x.shape[at] // 2, *x.shape[at + 1 :]))
        return ops.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))

    def transpose(self) -> Node:
        x = self.value(lambda v: v.rank >= 2)
        return ops.transpose(x, self.choose(tuple(itertools.permutations(range(x.rank)))))

    def broadcast(self) -> Node:
        x = self.value(lambda v: v.rank <= 3)
        wide = tuple(self.size() if s == 1 else s for s in x.shape)
        return ops.broadcast_to(x, (*(self.size() for _ in range(self.choose((0, 1, 1, 2)))), *wide))

    def slice(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        key: list[Any] = []
        for s in x.shape:
            if self.chance(0.4):
                key.append(slice(None))
            elif isinstance(s, int):
                start = self.choose(range(s + 1))
                key.append(slice(start, self.choose(range(start, s + 1)), self.choose((1, 2))))
            else:
                key.append(self.choose((slice(1, None), slice(None, None, 2), slice(None, -1), slice(2, None, 3))))
        return x[tuple(key)]

    def pad(self) -> Node:
        x = self.value(lambda v: v.rank >= 1 and v.dtype.kind != "b")
        return ops.pad(x, tuple((self.choose((0, 1, 2)), self.choose((0, 0, 1))) for _ in x.shape), self.choose((0, 1)))

    def flip(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        return ops.flip(x, self.axis(x))

    def concat(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        axis, others = self.axis(x), []
        for _ in range(self.choose((1, 1, 2))):
            if self.chance(0.5):
                others.append(self.operand(x))
            else:
                others.append(self.input(x.type.with_shape(*x.shape[:axis], self.size(), *x.shape[axis + 1 :])))
        return ops.concat([x, *others], axis=axis)

    def reduce(self) -> Node:
        x = self.value(lambda v: v.dtype.kind != "b")
        name = self.choose(("sum", "sum", "sum", "mean", "amax", "amin", "max", "min", "var", "logsumexp", "prod"))
        return getattr(ops, name)(x, axis=self.axes(x), keepdims=self.chance(0.4))  # type: ignore[no-any-return]

    def arg(self) -> Node:
        x = self.value(lambda v: v.dtype.kind != "b" and v.rank >= 1)
        return self.choose((ops.argmax, ops.argmin))(x, self.axis(x))  # type: ignore[no-any-return]

    def softmax(self) -> Node:
        x = self.real(1)
        return self.choose((ops.softmax, ops.log_softmax))(x, self.axis(x))  # type: ignore[no-any-return]

    def norm(self) -> Node:
        x = self.real(1)
        shape = x.shape[self.axis(x) :]
        weight = self.input(x.type.with_shape(*shape))
        if self.chance(0.5):
            return ops.rms_norm(x, shape, weight, **self.choose(({}, {"eps": 0.01})))
        return ops.layer_norm(x, shape, weight, self.input(x.type.with_shape(*shape)) if self.chance(0.5) else None)

    def indices(self, shape: tuple[Size, ...], size: Size) -> Node:
        ready = [
            v
            for v in self.values
            if v.dtype.name == "i64"
            and v.shape == shape
            and v.op.name in ("argmax", "argmin")
            and v.operands[0].shape[v.attrs["axis"]] == size
        ]
        if ready and self.chance(0.5):
            return self.choose(ready)  # type: ignore[no-any-return]
        node = self.input(Type(DTYPES[self.choose(("i64", "i64", "i32", "i16"))], shape))
        return self.choose(
            (
                node,
                node,
                node,
                ops.reshape(node, (-1,)) if node.rank == 1 else node,
                ops.flip(node, 0) if node.rank else node,
            )
        )  # type: ignore[no-any-return]

    def gather(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        axis = self.axis(x)
        indices = self.indices(self.choose(((N,), (M,), (), (2, N), (5,), (K, 3))), x.shape[axis])
        options: dict[str, Any] = {"oob": self.choose(OOB)}
        if x.dtype.has_tangent and isinstance(x.shape[axis], int):
            options |= {"padding_idx": self.choose((None, 0)), "scale_grad_by_freq": self.chance(0.3)}
        return ops.gather(x, indices, axis=axis, **options)

    def take(self) -> Node:
        x = self.value(lambda v: v.rank >= 1)
        axis = self.axis(x)
        shape = tuple(self.choose((3, s, M)) if a == axis else s for a, s in enumerate(x.shape))
        return ops.take_along_axis(x, self.indices(shape, x.shape[axis]), axis=axis)

    def scatter(self) -> Node:
        x = self.value(lambda v: v.rank >= 1 and v.dtype.kind != "b" and v.dtype.name != "i8")
        axis, size = self.axis(x), self.choose((3, N, 6, M))
        if self.chance(0.5):
            along = self.choose(
                (
                    ops.scatter_add_along_axis,
                    ops.scatter_add_along_axis,
                    ops.scatter_amax,
                    ops.scatter_amin,
                    ops.scatter_prod,
                )
            )
            return along(self.indices(x.shape, size), x, axis=axis, size=size)  # type: ignore[no-any-return]
        options = {"oob": self.choose(OOB), "padding_idx": self.choose((None, 0)) if isinstance(size, int) else None}
        count = self.choose(range(1, x.rank - axis + 1))
        return ops.scatter_add(self.indices(x.shape[axis : axis + count], size), x, axis=axis, size=size, **options)

    def matmul(self) -> Node:
        x = self.real(2)
        inner = x.shape[-1]
        batch = self.choose(((), x.shape[:-2]))
        fitting = [v for v in self.values if v.dtype is x.dtype and v.rank >= 2 and v.shape[-2] == inner]
        if fitting and self.chance(0.5):
            return x @ self.choose(fitting)  # type: ignore[no-any-return]
        if self.chance(0.5):
            return x @ self.input(x.type.with_shape(*batch, inner, self.choose((3, M, 4, N))))
        return ops.linear(x, self.input(x.type.with_shape(self.choose((3, M, 4)), inner)))

    def loss(self) -> Node:
        x = self.real(2)
        if self.chance(0.5):
            return ops.mse_loss(x, self.operand(x), reduction=self.choose(("none", "mean", "sum")))
        target = self.indices((x.shape[0], *x.shape[2:]), x.shape[1])
        return ops.cross_entropy(
            x, target, reduction=self.choose(("none", "mean", "sum")), label_smoothing=self.choose((0.0, 0.1))
        )

    def quantized(self) -> Node:
        x = self.real(2)
        block = (1, *(1,) * (x.rank - 2), x.shape[-1])
        shape = (*x.shape[:-1], 1) if self.chance(0.5) else (1,) * x.rank
        scale = ops.abs(self.input(Type(x.dtype, shape))) * 0.1 + 0.02
        block = block if shape[:-1] == x.shape[:-1] else tuple(x.shape)
        bits = {"dtype": self.choose(("i8", "i4", "u8"))}
        if self.chance(0.5):
            return ops.fake_quantize(x, scale, block=block, grad_factor=self.choose((1.0, 0.5)), **bits)
        return ops.dequantize(ops.quantize(x, scale, block=block, **bits), scale, block=block, out_dtype=x.dtype.name)

    def dequantize(self) -> Node:
        shape = self.choose(((N, 4), (M, 4), (N, M), (4,), (K, N, 3)))
        scales = self.choose(((), (*shape[:-1], 1))) if len(shape) > 1 else ()
        scale = self.input(Type(DTYPES[self.choose(("f32", "f64"))], scales))
        block = None if scale.rank == 0 else (*(1,) * (len(shape) - 1), shape[-1])
        return ops.dequantize(self.input(Type(DTYPES["i8"], shape)), scale, block=block, out_dtype=scale.dtype.name)

    def sampled(self) -> Node:
        """An op of the registry as one of its samples calls it: its symbols renamed, on values of those types where
        there are any, or on an input that a value of the graph is added to.
        """
        case = self.choose(samples_of(self.choose(sampled_names()), self.float))
        names = frozenset().union(*(t.symbols for t in case.types), *(_symbols(v) for v in case.attrs.values()))
        rename: dict[str, Size] = {n: case.sample.dims.get(n, self.choose((N, M, K))) for n in sorted(names)}
        operands = []
        for k, (type_, word) in enumerate(zip(case.types, case.words, strict=True)):
            if k in case.fixed:
                fixed = case.fixed[k]
                operands.append(
                    ops.reshape(
                        ops.constant(
                            value=tuple(fixed.reshape(-1).tolist()), dtype=type_.dtype.name, shape=tuple(fixed.shape)
                        ),
                        fixed.shape,
                    )
                )
                continue
            type_ = type_.with_shape(*(substitute(s, rename) for s in type_.shape))
            plain = type_.dtype.has_tangent and word == "normal"
            fitting = [
                v for v in self.values if v.type == type_ and not word.startswith("index") and v.dtype.has_tangent
            ]
            if fitting and self.chance(0.7):
                operands.append(self.choose(fitting))
                continue
            node = self.input(type_)
            if plain and self.chance(0.5):
                node = node + ops.cast(ops.sum(ops.tanh(self.real())), type_.dtype.name)
            operands.append(node)
        return call(case.op, operands, {n: _renamed(v, rename) for n, v in case.attrs.items()})

    def iota(self) -> Node:
        return ops.iota(self.choose(((N,), (N, 4), (4,))), axis=0, dtype=self.choose(("i64", "f32", "f64")))


def _symbols(value: Any) -> frozenset[str]:
    from gradc.ir.dims import symbols

    if isinstance(value, tuple):
        return frozenset().union(*map(_symbols, value))
    return frozenset(symbols(value)) if isinstance(value, Dim) else frozenset()


def _renamed(value: Any, rename: dict[str, Size]) -> Any:
    if isinstance(value, tuple):
        return tuple(_renamed(v, rename) for v in value)
    return substitute(value, rename) if isinstance(value, Dim) else value


def pruned(graph: Graph) -> Graph:
    """The graph without inputs that nothing reads."""
    used = {o for n in graph.nodes for o in n.operands} | {n for _, n in graph.outputs}
    return Graph(graph.name, tuple(n for n in graph.inputs if n in used), graph.outputs, graph.assumptions)


STEPS = (
    *("pointwise",) * 4,
    *("arithmetic",) * 4,
    *("guarded",) * 2,
    "division",
    *("compare",) * 2,
    *("choice",) * 2,
    *("scalar",) * 2,
    *("neural",) * 2,
    *("cast",) * 2,
    "stop",
    *("reshape",) * 3,
    *("transpose",) * 3,
    *("broadcast",) * 5,
    *("slice",) * 2,
    *("pad",) * 3,
    "flip",
    *("concat",) * 3,
    *("reduce",) * 5,
    "arg",
    *("softmax",) * 2,
    *("norm",) * 3,
    *("gather",) * 3,
    "take",
    *("scatter",) * 3,
    *("matmul",) * 3,
    "loss",
    "quantized",
    "dequantize",
    "iota",
    *("sampled",) * 14,
)
