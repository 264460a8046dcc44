"""Arrays of which some elements are others: index_put, index_copy, index_fill, index_reduce, scatter, put,
masked_fill, masked_scatter, slice_scatter, select_scatter, diagonal_scatter, as_strided and as_strided_scatter; take.

Where several values go to one place, the last one in row-major order stays, and it alone has a gradient.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, known_nonnegative, product, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ...ir.operands import adopt, broadcast_shapes
from ...ir.types import I64
from ..elementwise.pointwise import bitwise_and, eq, ge, lt, where
from ..reductions.scans import cumsum
from ..rules import along, canonical_axis, converted, full, reshaped, spread, zeros_like
from ..shapes.movement import concat, iota, pad, slice, transpose
from .gathers import gather, index_add, take_along_axis
from .positions import along_axes, arrays_of, checked, constant_array, counted_from_end
from .scatters import Reduce, scatter_amax, scatter_reduce

Value = Node | int | float | bool


def _line(x: Node) -> Node:
    """x in row-major order."""
    return reshaped(x, (product(x.shape),))


def _alike(op: str, x: Node, value: Any, name: str) -> Node:
    """A value that is written into x as a node: a number takes x's dtype, an array of any shape must have it.

    :raises TypeRuleError: the dtypes differ; ``name`` is the argument of ``op`` that it speaks of.
    """
    node = adopt(op, [x, value], broadcasting=False)[1]
    if node.dtype is not x.dtype:
        raise TypeRuleError(f"{name} is {node.type} and input {x.type}; write a cast")
    return node


def written(x: Node, axis: int, index: Node, source: Node) -> Node:
    """x with slices of an axis replaced by those of source; ``index`` is i64 [K], ``source`` has K along the axis."""
    if same(source.shape[axis], 0):
        return x
    winner = scatter_amax.plain(index, iota.plain(shape=index.shape), axis=0, size=x.shape[axis])
    hit = ge(winner, zeros_like(winner))
    rows = gather.plain(source, winner, axis=axis, oob="clamp")  # read where nothing is written, too
    return where(along(hit, x.shape, [a for a in range(x.rank) if a != axis]), converted(rows, x.dtype), x)


def _dim(x: Node, dim: int) -> tuple[Node, int]:
    """x with an axis at least, and the axis."""
    line = x if x.rank else reshaped(x, (1,))
    return line, canonical_axis(dim, line.rank, "dim")


def _positions(op: str, index: Node, size: Size) -> Node:
    """The positions of slices, i64 [K]; of a scalar index one.

    :raises TypeRuleError: the index has more than one axis.
    """
    if index.rank > 1:
        raise TypeRuleError(f"the index {index.type} has rank {index.rank}: 0 or 1")
    return counted_from_end(_line(index), size, op)


# -- along one axis ----------------------------------------------------------------------------------------------------


def _of_slices(source: Node, shape: tuple[Size, ...], input: Node) -> None:
    """TypeRuleError where a source has not the dtype and shape of the slices that it is written to; a scalar stands for
    [1].
    """
    alike = (
        source.dtype is input.dtype
        and source.rank == len(shape)
        and all(same(n, m) for n, m in zip(source.shape, shape, strict=True))
    )
    if not alike and not (source.rank == 0 and shape == (1,)):
        raise TypeRuleError(f"source is {source.type}; {input.type.dtype}{[*shape]} is needed")


def _index_copy(input: Node, dim: int, index: Node, source: Node) -> Node:
    x, axis = _dim(input, dim)
    place = _positions("index_copy", index, x.shape[axis])
    shape = (*x.shape[:axis], place.shape[0], *x.shape[axis + 1 :])
    _of_slices(source, shape, input)
    return reshaped(written(x, axis, place, reshaped(source, shape)), input.shape)


index_copy = Function(
    "index_copy",
    write=_index_copy,
    samples=(
        Sample(("F[5,3]", np.array([3, 0]), "F[2,3]"), {"dim": 0}),
        Sample(("F[2,5]", np.array([4, 2, 1]), "F[2,3]"), {"dim": -1}),
    ),
    bad=(
        BadSample(("f32[5,3]", "i64[2]", "f32[3,3]"), {"dim": 0}, match="source is f32[3,3]"),
        BadSample(("f32[5,3]", "i64[2]", "f32[3,2]"), {"dim": 0}, match="source is f32[3,2]"),
        BadSample(("f32[5]", "i64[2]", "f64[2]"), {"dim": 0}, match="source is f64[2]; f32[2] is needed"),
        BadSample(("f32[5]", "i64[2,1]", "f32[2]"), {"dim": 0}, match="the index i64[2,1] has rank 2: 0 or 1"),
    ),
    doc="input with the slices at index along dim replaced by source's; of several for one place the last",
    source="torch.index_copy",
)


def _index_fill(input: Node, dim: int, index: Node, value: Any) -> Node:
    x, axis = _dim(input, dim)
    place = _positions("index_fill", index, x.shape[axis])
    written_to = call("scatter_add", place, full(1, place), axis=0, size=x.shape[axis])
    hit = ge(written_to, full(1, written_to))
    other = _alike("index_fill", x, value, "value")
    if other.rank:
        raise TypeRuleError(f"value is {other.type}; a scalar is needed")
    mask = along(hit, x.shape, [a for a in range(x.rank) if a != axis])
    return reshaped(where(mask, spread(other, x.shape), x), input.shape)


index_fill = Function(
    "index_fill",
    write=_index_fill,
    samples=(Sample(("F[5,3]", "i64[3]"), {"dim": 0, "value": 2.5}, draw=("normal", "index:5")),),
    bad=(
        BadSample(("f32[5]", "f32[2]"), {"dim": 0, "value": 1.0}, match="indices are f32"),
        BadSample(("i32[5]", "i64[2]"), {"dim": 0, "value": 1.5}, match="the scalar 1.5 meets a i32 operand"),
    ),
    doc="input with the slices at index along dim filled with a number or a scalar",
    source="torch.index_fill",
)


def _index_reduce(input: Node, dim: int, index: Node, source: Node, reduce: Reduce, include_self: bool = True) -> Node:
    x, axis = _dim(input, dim)
    place = _positions("index_reduce", index, x.shape[axis])
    shape = (*x.shape[:axis], place.shape[0], *x.shape[axis + 1 :])
    _of_slices(source, shape, input)
    full_index = along(place, shape, [a for a in range(x.rank) if a != axis])
    y = scatter_reduce(x, axis, full_index, reshaped(source, shape), reduce, include_self)
    return reshaped(y, input.shape)


index_reduce = Function(
    "index_reduce",
    write=_index_reduce,
    samples=(
        Sample(("F[5,3]", "i64[4]", "F[4,3]"), {"dim": 0, "reduce": "mean"}, draw=("nonzero", "index:5", "nonzero")),
        Sample(
            ("F[5,3]", "i64[4]", "F[4,3]"),
            {"dim": 0, "reduce": "prod", "include_self": False},
            draw=("nonzero", "index:5", "nonzero"),
        ),
    ),
    bad=(BadSample(("f32[5]", "i64[2]", "f32[3]"), {"dim": 0, "reduce": "prod"}, match="source is f32[3]"),),
    doc="input with slices of source combined into it at index along dim: scatter_reduce with one index per slice",
    source="torch.index_reduce",
)


def _scatter(input: Node, dim: int, index: Node, src: Any, reduce: Literal["add", "multiply"] | None = None) -> Node:
    x, axis = _dim(input, dim)
    place = index if index.rank else reshaped(index, (1,))
    place = checked(place, x.shape[axis], "scatter")
    if any(same(n, 0) for n in place.shape):
        return input
    if place.rank != x.rank:
        raise TypeRuleError(f"index is {index.type} and input {input.type}: their ranks must be equal")
    for a, (n, m) in enumerate(zip(x.shape, place.shape, strict=True)):
        if a != axis and isinstance(n, int) and isinstance(m, int) and m > n:
            raise TypeRuleError(f"index is {index.type} and input {input.type}: on axis {a} the index is longer")
    other = _alike("scatter", x, src, "src")
    if other.rank not in (0, x.rank):
        raise TypeRuleError(f"src is {other.type}: a number, or an array of the index's rank {x.rank}")
    other = other if other.rank == x.rank else spread(other, place.shape)
    if reduce is not None:
        combine: Reduce = "sum" if reduce == "add" else "prod"
        return reshaped(scatter_reduce(x, axis, place, other, combine), input.shape)
    none = (0,) * x.rank
    other = slice(other, none, place.shape, (1,) * x.rank) if other.shape != place.shape else other
    size, number = x.shape[axis], iota.plain(shape=place.shape, axis=axis)
    winner = scatter_amax.plain(place, number, axis=axis, size=size)
    hit = ge(winner, zeros_like(winner))
    put = take_along_axis.plain(other, winner, axis=axis, oob="clamp")
    borders = tuple((0, 0 if a == axis else n - m) for a, (n, m) in enumerate(zip(x.shape, place.shape, strict=True)))
    if any(not same(high, 0) for _, high in borders):
        hit, put = pad(hit, borders, False), pad(put, borders)
    return reshaped(where(hit, put, x), input.shape)


scatter = Function(
    "scatter",
    write=_scatter,
    samples=(
        Sample(("F[5]", np.array([3, 0])), {"dim": 0, "src": 2.5}),
        Sample(("F[5,3]", "i64[2,2]"), {"dim": 0, "src": 0.5, "reduce": "multiply"}, draw=("nonzero", "index:5")),
    ),
    bad=(
        BadSample(("f32[5]", "i64[2,1]"), {"dim": 0, "src": 1.0}, match="their ranks must be equal"),
        BadSample(("f32[5,3]", "i64[2,5]"), {"dim": 0, "src": 1.0}, match="on axis 1 the index is longer"),
    ),
    doc=(
        "input with elements of src, an array or a number, at index along dim; of several for one place the last, or"
        " with reduce all of them added or multiplied to what is there"
    ),
    source="torch.scatter",
)

# -- places in the flattened array -------------------------------------------------------------------------------------


def _take(input: Node, index: Node) -> Node:
    line = _line(input)
    return gather.plain(line, counted_from_end(index, line.shape[0], "take"), axis=0)


take = Function(
    "take",
    write=_take,
    samples=(Sample(("F[2,3]", "i64[2,2]"), draw=("normal", "index:6")),),
    bad=(BadSample(("f32[3]", "f32[2]"), match="indices are f32"),),
    doc="elements of the flattened input; a negative index counts from the end",
    source="torch.take",
)


def _put(input: Node, index: Node, source: Node, accumulate: bool = False) -> Node:
    if index.type.count != source.type.count:
        raise TypeRuleError(f"index is {index.type} and source {source.type}: they must have equally many elements")
    line = _line(input)
    place, values = counted_from_end(_line(index), line.shape[0], "put"), _line(_alike("put", input, source, "source"))
    y = index_add(line, 0, place, values) if accumulate else written(line, 0, place, values)
    return reshaped(y, input.shape)


put = Function(
    "put",
    write=_put,
    samples=(
        Sample(("F[2,3]", np.array([4, -6, 1]), "F[3]")),
        Sample(("F[2,3]", "i64[4]", "F[4]"), {"accumulate": True}, draw=("normal", "index:6", "normal")),
    ),
    bad=(
        BadSample(("f32[3]", "i64[2]", "f32[3]"), match="equally many elements"),
        BadSample(("i32[3]", "i64[2]", "f32[2]"), match="source is f32[2] and input i32[3]; write a cast"),
    ),
    doc="input with elements of the flattened one replaced, or with accumulate added to; a negative index counts from"
    " the end",
    source="torch.Tensor.put",
)

# -- places as x[indices] names them -----------------------------------------------------------------------------------


def _index_put(input: Node, indices: Any, values: Any, accumulate: bool = False) -> Node:
    keys = indices if isinstance(indices, tuple) else (indices,)
    if len(keys) == 1 and isinstance(keys[0], Node) and keys[0].dtype.kind == "b":
        if accumulate or (isinstance(values, Node) and values.rank):
            raise TypeRuleError("a traced mask takes one number and no accumulate; ops.where adds at a mask")
        mask = reshaped(keys[0], (*keys[0].shape, *(1,) * (input.rank - keys[0].rank)))
        return where(
            spread(mask, input.shape), spread(_alike("index_put", input, values, "values"), input.shape), input
        )
    arrays = arrays_of(keys, input, "index_put")
    if arrays is None:  # slices and numbers among them: each element by its place in the flattened array
        line = _line(input)
        places = reshaped(iota.plain(shape=line.shape), input.shape)[indices]
        source = _line(spread(_alike("index_put", input, values, "values"), places.shape))
        return reshaped(_put_rows(line, 0, _line(places), source, accumulate), input.shape)
    x, place, axis, order = along_axes(input, arrays, "index_put")
    place = checked(place, x.shape[axis], "index_put")
    source = spread(_alike("index_put", input, values, "values"), (*x.shape[:axis], *place.shape, *x.shape[axis + 1 :]))
    rows = reshaped(source, (*x.shape[:axis], product(place.shape), *x.shape[axis + 1 :]))
    y = reshaped(_put_rows(x, axis, _line(place), rows, accumulate), tuple(input.shape[a] for a in order))
    return y if order == tuple(range(input.rank)) else transpose(y, tuple(order.index(a) for a in range(input.rank)))


def _put_rows(x: Node, axis: int, place: Node, rows: Node, accumulate: bool) -> Node:
    return index_add(x, axis, place, rows) if accumulate else written(x, axis, converted(place, I64), rows)


index_put = Function(
    "index_put",
    write=_index_put,
    samples=(
        Sample(("F[4,3]",), {"indices": (np.array([2, 0]),), "values": 2.5}),
        Sample(("F[4,2,3]",), {"indices": (np.array([2, -1]), np.array([[0], [1]])), "values": 0.5}),
        Sample(("F[4,2,3]",), {"indices": (np.array([2, 2]), 1), "values": 0.5, "accumulate": True}),
    ),
    bad=(BadSample(("f32[4]",), {"indices": (np.array([4]),), "values": 1.0}, match="index 4"),),
    doc=(
        "input with values, an array or a number, at the places that input[indices] reads; with accumulate they are"
        " added, and each of several for one place counts"
    ),
    source="torch.index_put",
)

# -- where a mask says so ----------------------------------------------------------------------------------------------


def _masked_fill(input: Node, mask: Node, value: Any) -> Node:
    shape = broadcast_shapes([input.shape, mask.shape])
    return where(spread(mask, shape), spread(_alike("masked_fill", input, value, "value"), shape), spread(input, shape))


masked_fill = Function(
    "masked_fill",
    write=_masked_fill,
    samples=(Sample(("F[2,3]", "bool[3]"), {"value": 2.5}, draw=("normal", "bool")),),
    bad=(BadSample(("f32[2]", "f32[2]"), {"value": 1.0}, match="bool"),),
    doc="input with a number or a scalar where mask is True",
    source="torch.Tensor.masked_fill",
)


def _masked_scatter(input: Node, mask: Node, source: Node) -> Node:
    if mask.dtype.kind != "b":
        raise TypeRuleError(f"mask is {mask.type}; bool is needed")
    if source.dtype is not input.dtype:
        raise TypeRuleError(f"source is {source.type} and input {input.type}; write a cast")
    shape = broadcast_shapes([input.shape, mask.shape])
    x, line = spread(input, shape), _line(source)
    count, size = line.shape[0], product(shape)
    sizes = tuple(n for n in shape if isinstance(n, int))
    if mask.op.name == "constant" and len(sizes) == len(shape):
        known = np.broadcast_to(np.reshape(mask.attrs["value"], mask.shape), sizes)
        places = np.flatnonzero(known)
        if isinstance(count, int) and count < places.size:
            raise TypeRuleError(f"source {source.type} has fewer elements than the {places.size} of mask")
        if not places.size:
            return x
        taken = slice(line, (0,), (places.size,), (1,))
        return reshaped(written(_line(x), 0, constant_array(places), taken), shape)
    hit = _line(spread(mask, shape))
    if same(size, 0):
        return x
    number, enough = cumsum(converted(hit, I64), 0), known_nonnegative(count - size)
    if enough or known_nonnegative(count - 1):
        number = number - 1
    else:  # a source that may be empty has no element 0 for the places that take none: a zero stands before it
        line = concat(full(0, line.type.with_shape(1)), line, axis=0)
    number = where(hit, number, zeros_like(number))
    if not enough:
        number = checked(number, line.shape[0], "masked_scatter")
    taken = gather.plain(line, number, axis=0, oob="clamp")
    return where(reshaped(hit, shape), reshaped(taken, shape), x)


_MASK = np.array([[True, False, True], [False, True, False]])
masked_scatter = Function(
    "masked_scatter",
    write=_masked_scatter,
    samples=(
        Sample(("F[2,3]", _MASK, "F[4]")),
        Sample(("F[2,3]", "bool[2,3]", "F[2,3]"), draw=("normal", "bool", "normal")),
        Sample(("F[3]", "bool[N,3]", "F[6,N]"), draw=("normal", "bool", "normal")),
        Sample(("F[2,3]", np.zeros((2, 3), bool), "F[0]")),
    ),
    bad=(
        BadSample(("f32[2]", "bool[2]", "f64[2]"), match="source is f64[2] and input f32[2]; write a cast"),
        BadSample(("f32[2]", "f32[2]", "f32[2]"), match="mask is f32[2]; bool is needed"),
    ),
    doc=(
        "input with the elements where mask is True replaced by those of source, in row-major order; of a mask that is"
        " known when tracing, the number is checked then, otherwise a source that is too short is an error of the call"
    ),
    source="torch.Tensor.masked_scatter",
)

# -- parts of an array -------------------------------------------------------------------------------------------------


def _slice_scatter(
    input: Node,
    src: Node,
    dim: int = 0,
    start: int | Dim | None = None,
    end: int | Dim | None = None,
    step: int = 1,
) -> Node:
    axis = canonical_axis(dim, input.rank, "dim")
    if step < 1:
        raise TypeRuleError(f"step={step}: 1 at least")
    part = input[(*[builtins.slice(None)] * axis, builtins.slice(start, end, step))]
    if len(part.shape) != src.rank or not all(same(n, m) for n, m in zip(part.shape, src.shape, strict=True)):
        raise TypeRuleError(f"src is {src.type} and the part of input {part.type}")
    size = input.shape[axis]
    if any(same(n, 0) for n in part.shape):
        return input
    low = 0 if start is None else start + size if isinstance(start, int) and start < 0 else start
    low = max(low, 0) if isinstance(low, int) else low
    along_it = iota.plain(shape=(size,)) - low
    number = call("floordiv", along_it, step) if step > 1 else along_it
    hit = bitwise_and(ge(number, zeros_like(number)), lt(number, spread(call("dim", size=part.shape[axis]), (size,))))
    if step > 1:
        hit = bitwise_and(hit, eq(number * step, along_it))
    rows = gather.plain(src, number, axis=axis, oob="clamp")
    others = [a for a in range(input.rank) if a != axis]
    return where(along(hit, input.shape, others), converted(rows, input.dtype), input)


slice_scatter = Function(
    "slice_scatter",
    write=_slice_scatter,
    samples=(
        Sample(("F[5,3]", "F[2,3]"), {"dim": 0, "start": 1, "end": -1, "step": 2}),
        Sample(("F[2,5]", "F[2,3]"), {"dim": 1, "start": -3}),
    ),
    bad=(BadSample(("f32[5]", "f32[2]"), {"start": 1}, match="the part of input f32[4]"),),
    doc="input with the slice start:end:step of dim replaced by src",
    source="torch.slice_scatter",
)


def _select_scatter(input: Node, src: Node, dim: int, index: int) -> Node:
    axis = canonical_axis(dim, input.rank, "dim")
    size = input.shape[axis]
    if isinstance(size, int) and not -size <= index < size:
        raise TypeRuleError(f"index={index} of a size of {size}")
    wide = reshaped(src, (*src.shape[:axis], 1, *src.shape[axis:]))
    return _slice_scatter(input, wide, axis, index, index + 1 if index != -1 else None)


select_scatter = Function(
    "select_scatter",
    write=_select_scatter,
    samples=(Sample(("F[5,3]", "F[5]"), {"dim": 1, "index": -1}), Sample(("F[3]", "F[]"), {"dim": 0, "index": 1})),
    bad=(BadSample(("f32[5]", "f32[]"), {"dim": 0, "index": 5}, match="index=5 of a size of 5"),),
    doc="input with its slice number index of dim replaced by src",
    source="torch.select_scatter",
)


def _diagonal_scatter(input: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    part = call("diagonal", input, offset, dim1, dim2)
    if part.shape != src.shape:
        raise TypeRuleError(f"src is {src.type} and the diagonal {part.type}")
    if any(same(n, 0) for n in part.shape):
        return input
    first, second = canonical_axis(dim1, input.rank, "dim1"), canonical_axis(dim2, input.rank, "dim2")
    row = iota.plain(shape=input.shape, axis=first)
    hit = eq(iota.plain(shape=input.shape, axis=second) - row, full(offset, row))
    number = iota.plain(shape=(input.shape[first],)) - max(-offset, 0)
    spread_out = gather.plain(src, number, axis=src.rank - 1, oob="clamp")  # [..., rows]
    rest = [a for a in range(input.rank) if a not in (first, second)]
    order = tuple([*rest, first].index(a) for a in sorted([*rest, first]))
    rows = transpose(spread_out, order) if src.rank > 1 else spread_out
    return where(hit, converted(along(rows, input.shape, (second,)), input.dtype), input)


diagonal_scatter = Function(
    "diagonal_scatter",
    write=_diagonal_scatter,
    samples=(
        Sample(("F[3,4]", "F[3]"), {"offset": 1}),
        Sample(("F[4,2,3]", "F[2,3]"), {"offset": -1, "dim1": 0, "dim2": 2}),
    ),
    bad=(BadSample(("f32[3,3]", "f32[2]"), match="src is f32[2] and the diagonal f32[3]"),),
    doc="input with a diagonal replaced by src",
    source="torch.diagonal_scatter",
)

# -- strides -----------------------------------------------------------------------------------------------------------


def _strided(count: Size, size: Sequence[int], stride: Sequence[int], offset: int) -> Node:
    """The places in row-major order that strides name, [*size]."""
    if len(size) != len(stride):
        raise TypeRuleError(f"size {list(size)} and stride {list(stride)} have different lengths")
    if any(n < 0 for n in (*size, *stride)) or offset < 0:
        raise TypeRuleError(f"size {list(size)}, stride {list(stride)}, storage_offset {offset}: 0 at least")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and not (isinstance(count, int) and last < count):
        raise TypeRuleError(f"the last place is {last} of {count} elements")
    place = spread(call("constant", value=(offset,), dtype=I64), tuple(size))
    for axis, s in enumerate(stride):
        place = place + iota.plain(shape=tuple(size), axis=axis) * s if size[axis] > 1 else place
    return place


def _as_strided(input: Node, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int | None = None) -> Node:
    line = _line(input)
    return gather.plain(line, _strided(line.shape[0], size, stride, storage_offset or 0), axis=0, oob="clamp")


as_strided = Function(
    "as_strided",
    write=_as_strided,
    samples=(Sample(("F[3,4]",), {"size": (2, 3), "stride": (4, 1), "storage_offset": 1}),),
    bad=(BadSample(("f32[3]",), {"size": (2, 2), "stride": (2, 1)}, match="the last place is 3 of 3 elements"),),
    doc="elements of the row-major input at storage_offset + the sum of index * stride; every place must exist",
    source="torch.as_strided",
)


def _as_strided_scatter(
    input: Node, src: Node, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int | None = None
) -> Node:
    if src.shape != size:
        raise TypeRuleError(f"src is {src.type} and size {list(size)}")
    line = _line(input)
    place = _strided(line.shape[0], size, stride, storage_offset or 0)
    return reshaped(written(line, 0, _line(place), _line(src)), input.shape)


as_strided_scatter = Function(
    "as_strided_scatter",
    write=_as_strided_scatter,
    samples=(Sample(("F[3,4]", "F[2,3]"), {"size": (2, 3), "stride": (4, 1), "storage_offset": 1}),),
    bad=(BadSample(("f32[3]", "f32[1]"), {"size": (2,), "stride": (1,)}, match="src is f32[1] and size [2]"),),
    doc="input with the elements that as_strided reads replaced by src's",
    source="torch.as_strided_scatter",
)
