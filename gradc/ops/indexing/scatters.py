"""Scatters that combine by max, min or product, and torch's scatter_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, known_nonnegative, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Primitive, Sample, Scatter
from ...ir.properties import Bounds
from ...ir.statement import neutral
from ...ir.types import BOOL, I32, Type
from ..elementwise.pointwise import eq, gt, invert, logical_and, maximum, minimum, where
from ..rules import (
    UFUNCS,
    alike,
    canonical_axis,
    converted,
    full,
    leading,
    neutral_of,
    number,
    reshaped,
    summing,
    zeros_like,
)
from .gathers import _put, _put_at, index_type, resolve, scatter_add_along_axis, take_along_axis

# -- amax, amin and prod along an axis, over nothing but the updates ---------------------------------------------------


def _combined_reference(name: str, combine: str) -> Callable[..., Any]:
    def reference(indices: Any, updates: Any, *, axis: int, size: int, oob: str) -> Any:
        where_, counts = resolve(indices, size, oob, name)
        shape = [size if a == axis else n for a, n in enumerate(updates.shape)]
        out = np.full(shape, neutral_of(combine, updates), summing(updates.dtype))
        places = list(np.indices(updates.shape))
        places[axis] = where_
        UFUNCS[combine].at(out, tuple(p[counts] for p in places), updates[counts])
        return out.astype(updates.dtype)

    return reference


def _extremum_vjp(
    g: Node, y: Node, indices: Node, updates: Node, *, axis: int, size: Size, oob: str
) -> tuple[Any, Node]:
    winner = eq(updates, take_along_axis.plain(y, indices, axis=axis, oob=oob))  # ties share the gradient evenly
    wide = g.dtype.compute
    count = scatter_add_along_axis.plain(indices, converted(winner, wide), axis=axis, size=size, oob=oob)
    share = take_along_axis.plain(converted(g, wide) / maximum(count, full(1, count)), indices, axis=axis, oob=oob)
    return DISCRETE, converted(where(winner, share, zeros_like(share)), g.dtype)


def _others(zero: Node, zeros: Node, rest: Node, x: Node) -> Node:
    """The product of all factors but x, from ``rest``, the product of the nonzero factors, and ``zeros``, the number
    of zero factors; ``zero`` is x == 0.
    """
    none = where(eq(zeros, full(0, zeros)), rest / where(zero, full(1, x), x), zeros_like(x))
    return where(zero, where(eq(zeros, full(1, zeros)), rest, zeros_like(x)), none)


def _prod_vjp(g: Node, y: Node, indices: Node, updates: Node, *, axis: int, size: Size, oob: str) -> tuple[Any, Node]:
    # du_j = g[index_j] times the product of the other updates with that index: y/u_j without zeros; with one zero, the
    # product of the rest for it and 0 for the others; with more, 0
    attrs: dict[str, Any] = {"axis": axis, "size": size, "oob": oob}
    x, g = converted(updates, g.dtype.compute), converted(g, g.dtype.compute)
    zero = eq(x, zeros_like(x))
    rest = scatter_prod.plain(indices, where(zero, full(1, x), x), **attrs)
    zeros = scatter_add_along_axis.plain(indices, converted(zero, I32), **attrs)
    back, left, missing = (take_along_axis.plain(v, indices, axis=axis, oob=oob) for v in (g, rest, zeros))
    return DISCRETE, converted(back * _others(zero, missing, left, x), updates.dtype)


def _scatter(name: str, combine: str, vjp: Any, result: str) -> Primitive:
    return Primitive(
        name,
        infer=_put,
        reference=_combined_reference(name, combine),
        lower=Scatter(_put_at, updates=1, combine=combine),
        vjp=vjp,
        indices={0: lambda node: node.attrs["size"]},
        samples=(
            Sample(("i64[N,3]", "F[N,3]"), {"axis": 0, "size": 5}, draw=("index:5", "nonzero")),
            Sample(("i32[N,2]", "F[N,2]"), {"axis": 1, "size": 5}, draw=("index:5", "nonzero")),
            Sample(("u8[2,N,3]", "F[2,N,3]"), {"axis": 1, "size": 5}, draw=("index:5", "nonzero")),
            Sample(("i64[N]", "F[N]"), {"axis": 0, "size": 3, "oob": "skip"}, draw=("index:5", "nonzero")),
            Sample(("i64[N]", "i32[N]"), {"axis": 0, "size": 5}, draw=("index:5", "int")),
            Sample(("i8[N,2]", "i8[N,2]"), {"axis": 0, "size": 3, "oob": "wrap"}, draw=("int", "int")),
        ),
        bad=(
            BadSample(("i64[4,3]", "f32[3,3]"), {"axis": 0, "size": 5}, match="different shapes"),
            BadSample(("i64[4]", "bool[4]"), {"axis": 0, "size": 5}, match="no arithmetic"),
        ),
        doc=(
            f"{result} of the updates with each index, along an axis of the given size; {neutral_text(combine)} at"
            " positions without an update"
        ),
    )


def neutral_text(combine: str) -> str:
    return {"max": "-inf (or the least int)", "min": "inf (or the greatest int)", "prod": "1"}[combine]


scatter_amax = _scatter("scatter_amax", "max", _extremum_vjp, "the maximum (propagating NaN)")
scatter_amin = _scatter("scatter_amin", "min", _extremum_vjp, "the minimum (propagating NaN)")
scatter_prod: Primitive = _scatter("scatter_prod", "prod", _prod_vjp, "the product")

# -- scatter_reduce ----------------------------------------------------------------------------------------------------

Reduce = Literal["sum", "mean", "amax", "amin", "prod"]


def _scatter_reduce(
    input: Type, index: Type, src: Type, *, dim: int, reduce: Reduce, include_self: bool = True, oob: Bounds = "error"
) -> Any:
    dim = canonical_axis(dim, max(input.rank, 1), "dim")
    alike(number(input).with_shape(), src.with_shape())
    if reduce == "mean" and input.dtype.is_integer:
        raise TypeRuleError(f"the mean of {input.dtype} is no {input.dtype}; write a cast to a float")
    if not input.rank == index_type(index).rank == src.rank:
        raise TypeRuleError(f"input, index and src have ranks {input.rank}, {index.rank} and {src.rank}")
    for a, (n, m, s) in enumerate(zip(index.shape, input.shape, src.shape, strict=True)):
        for operand, size in (("src", s), ("input", m)):
            if not (same(n, size) or known_nonnegative(size - n) or (operand == "input" and a == dim)):
                raise TypeRuleError(
                    f"the index has {n} on axis {a} and {operand} {size}: it must not have more; assume(...) can"
                    " state it of symbols"
                )
    return input, {"dim": dim, "reduce": reduce, "include_self": include_self, "oob": oob}


class _Reduction:
    """The intermediate values of one scatter_reduce in its compute dtype, shared by value and vjp."""

    def __init__(self, input: Node, index: Node, src: Node, dim: int, reduce: str, include_self: bool, oob: str):
        line = (lambda x: x) if input.rank else (lambda x: reshaped(x, (1,)))
        wide = input.dtype.compute
        self.dim, self.reduce, self.include_self, self.oob = dim, reduce, include_self, oob
        self.index, self.input = line(index), converted(line(input), wide)
        self.whole = line(src)
        self.src = converted(self.cut(self.whole), wide)
        self.size = self.input.shape[dim]

    def cut(self, x: Node, along: bool = True) -> Node:
        """x sliced to the index's shape; ``along=False`` keeps the whole axis ``dim``."""
        limit = tuple(
            n if along or a != self.dim else m for a, (n, m) in enumerate(zip(self.index.shape, x.shape, strict=True))
        )
        return leading(x, limit)

    @staticmethod
    def grow(x: Node, shape: Any, value: int | float = 0) -> Node:
        """x padded with ``value`` at the end of each axis, to ``shape``."""
        return (
            x
            if x.shape == tuple(shape)
            else call("pad", x, tuple((0, n - m) for n, m in zip(shape, x.shape, strict=True)), value)
        )

    def scatter(self, op: Primitive, updates: Node) -> Node:
        combine = op.lower.combine
        scattered = op.plain(self.index, updates, axis=self.dim, size=self.size, oob=self.oob)
        return self.grow(scattered, self.input.shape, neutral(combine, updates.dtype))

    def take(self, x: Node) -> Node:
        """The element of x that each index names."""
        return take_along_axis.plain(self.cut(x, along=False), self.index, axis=self.dim, oob=self.oob)

    @property
    def count(self) -> Node:
        """The number of updates of each element of input."""
        return self.scatter(scatter_add_along_axis, full(1, self.index, I32))

    @property
    def hit(self) -> Node:
        return gt(self.count, full(0, self.input, I32))

    @property
    def own(self) -> Node:
        """Mask of the elements of input that are combined in themselves."""
        return full(True, self.input, BOOL) if self.include_self else invert(self.hit)

    @property
    def terms(self) -> Node:
        """The divisor of a mean: the number of terms, at least 1."""
        return converted(
            self.count + 1 if self.include_self else maximum(self.count, full(1, self.count)), self.input.dtype
        )

    def value(self) -> Node:
        op: Primitive = {"amax": scatter_amax, "amin": scatter_amin, "prod": scatter_prod}.get(
            self.reduce, scatter_add_along_axis
        )
        reduced = self.scatter(op, self.src)
        if self.include_self:
            join: Any = {"amax": maximum, "amin": minimum, "prod": lambda a, b: a * b}.get(
                self.reduce, lambda a, b: a + b
            )
            reduced = join(self.input, reduced)
        if self.reduce == "mean":
            reduced = reduced / self.terms
        return reduced if self.include_self else where(self.hit, reduced, self.input)

    def gradients(self, g: Node) -> tuple[Node, Node]:
        """(gradient of input, gradient of src)."""
        zero = zeros_like(g)
        if self.reduce in ("sum", "mean"):
            share = g if self.reduce == "sum" else g / self.terms
            return (share if self.include_self else where(self.hit, zero, g)), self.take(share)
        if self.reduce == "prod":
            x, s, own = self.input, self.src, self.own
            input_zero, src_zero = logical_and(eq(x, zeros_like(x)), own), eq(s, zeros_like(s))
            zeros = converted(input_zero, I32) + self.scatter(scatter_add_along_axis, converted(src_zero, I32))
            rest = where(logical_and(own, invert(input_zero)), x, full(1, x)) * self.scatter(
                scatter_prod, where(src_zero, full(1, s), s)
            )
            of_src = self.take(g) * _others(src_zero, self.take(zeros), self.take(rest), s)
            return where(own, g * _others(input_zero, zeros, rest, where(own, x, full(1, x))), zero), of_src
        y = self.value()
        winner, own = eq(self.src, self.take(y)), logical_and(eq(self.input, y), self.own)
        count = converted(own, g.dtype) + self.scatter(scatter_add_along_axis, converted(winner, g.dtype))
        share = g / maximum(count, full(1, count))  # a NaN has no winner
        back = self.take(share)
        return where(own, share, zero), where(winner, back, zeros_like(back))


def _scatter_reduce_value(
    input: Node, index: Node, src: Node, *, dim: int, reduce: str, include_self: bool, oob: str
) -> Node:
    reduced = _Reduction(input, index, src, dim, reduce, include_self, oob).value()
    return reshaped(converted(reduced, input.dtype), input.shape)


def _scatter_reduce_vjp(
    g: Node, y: Node, input: Node, index: Node, src: Node, *, dim: int, reduce: str, include_self: bool, oob: str
) -> tuple[Any, ...]:
    # sum: g at the index; mean: g / count; amax and amin: g shared evenly among ties; prod: g times the product of the
    # other factors, exact with any number of zeros; with include_self=False, input gets g only where there is no update
    r = _Reduction(input, index, src, dim, reduce, include_self, oob)
    of_input, of_src = r.gradients(converted(reshaped(g, r.input.shape), r.input.dtype))
    return (
        reshaped(converted(of_input, g.dtype), input.shape),
        DISCRETE,
        reshaped(r.grow(converted(of_src, g.dtype), r.whole.shape), src.shape),
    )


_WAYS: tuple[Reduce, ...] = ("sum", "mean", "amax", "amin", "prod")
_DRAW = ("nonzero", "index:5", "nonzero")
scatter_reduce = Composite(
    "scatter_reduce",
    infer=_scatter_reduce,
    decompose=_scatter_reduce_value,
    vjp=_scatter_reduce_vjp,
    order=("input", "dim", "index", "src", "reduce", "include_self", "oob"),
    indices={1: lambda node: node.operands[0].shape[node.attrs["dim"]] if node.operands[0].rank else 1},
    samples=(
        *(Sample(("F[5,3]", "i64[N,3]", "F[N,3]"), {"dim": 0, "reduce": way}, draw=_DRAW) for way in _WAYS),
        *(
            Sample(("F[2,5]", "i32[2,N]", "F[2,N]"), {"dim": -1, "reduce": way, "include_self": False}, draw=_DRAW)
            for way in _WAYS
        ),
        *(
            Sample(("F[5,4]", "i64[3,2]", "F[4,3]"), {"dim": 0, "reduce": way, "include_self": flag}, draw=_DRAW)
            for way, flag in (("sum", False), ("amax", True), ("prod", True), ("mean", False))
        ),
        Sample(("F[]", "i64[]", "F[]"), {"dim": 0, "reduce": "prod"}, draw=("nonzero", "index:1", "nonzero")),
        Sample(("i32[5]", "i64[N]", "i32[N]"), {"dim": 0, "reduce": "amax"}, draw=("int", "index:5", "int")),
    ),
    bad=(
        BadSample(
            ("f32[5]", "i64[4]", "f32[3]"), {"dim": 0, "reduce": "sum"}, match="the index has 4 on axis 0 and src 3"
        ),
        BadSample(
            ("f32[5,2]", "i64[4,3]", "f32[4,3]"),
            {"dim": 0, "reduce": "sum"},
            match="the index has 3 on axis 1 and input 2",
        ),
        BadSample(("f32[5]", "i64[4]", "f64[4]"), {"dim": 0, "reduce": "sum"}, match="dtypes differ"),
        BadSample(("i32[5]", "i64[4]", "i32[4]"), {"dim": 0, "reduce": "mean"}, match="write a cast"),
        BadSample(("f32[5]", "i64[4]", "f32[4]"), {"dim": 0, "reduce": "max"}, match="one of 'sum'"),
        BadSample(("f32[5]", "i64[4,1]", "f32[4]"), {"dim": 0, "reduce": "sum"}, match="ranks 1, 2 and 1"),
    ),
    doc=(
        "input with src combined into it at index along dim by sum, mean, amax, amin or prod, with or without input's"
        " own element (include_self); ties share the gradient, prod's is exact with any number of zeros"
    ),
    source="torch.scatter_reduce",
)
