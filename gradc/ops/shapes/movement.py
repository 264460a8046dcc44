"""Data movement ops: each gives the operand index that a result element is read from, so that kernels read through it
and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidProblem, TypeRuleError
from ...ir.dims import Assumption, Dim, Size, SizeLike, ceildiv, floordiv, known_nonnegative, maximum, product, same
from ...ir.node import Node, call
from ...ir.op import Alias, BadSample, Movement, Primitive, Sample
from ...ir.operands import adopt
from ...ir.properties import Broadcasts, Concats, Pads, Reshapes, Slices, Transposes
from ...ir.ranges import Range, inside
from ...ir.ranges import constant as of_constant
from ...ir.statement import Index
from ...ir.types import I64, DType, Type
from ...process.ieee import plain
from ..indexing.positions import along_axes, as_index, is_array, without_masks
from ..rules import canonical_axes, canonical_axis, reshaped
from .axes import (
    axis_groups,
    replace_axis_of_broadcast,
    replace_axis_of_pad,
    replace_axis_of_reshape,
    replace_axis_of_slice,
    replace_axis_of_transpose,
    reshape_axes,
)

_range: Any = slice  # Python's built-in; in this module ``slice`` is an op

# -- values without operands -------------------------------------------------------------------------------------------


def _input(*, name: str) -> Type:
    raise TypeRuleError("inputs are made by gradc.trace or a graph's header")


input = Primitive(
    "input", infer=_input, reference=None, lower=None, in_place_of_dtype=True, doc="an argument of the graph"
)


@plain()
def _constant(*, value: tuple[int | float | bool, ...], dtype: DType, shape: tuple[int, ...] = ()) -> Any:
    if len(value) > 64:
        raise TypeRuleError(f"a constant of {len(value)} elements: 64 at most")
    if int(np.prod(shape, dtype=object)) != len(value):
        raise TypeRuleError(f"{len(value)} values for the shape {shape}")
    exact = [int(v) if dtype.kind == "b" else v for v in map(dtype.literal, value)]
    if dtype.is_float:  # rounded to the dtype once, here
        with np.errstate(over="ignore"):
            exact = [dtype.literal(float(np.asarray(v, np.float64).astype(dtype.np))) for v in exact]
    return Type(dtype, tuple(shape)), {"value": tuple(exact), "dtype": dtype, "shape": tuple(shape)}


constant = Primitive(
    "constant",
    infer=_constant,
    lower=Movement(lambda index, node, kernel: kernel.constant(node, index)),
    in_place_of_dtype=True,
    within=lambda node: of_constant(tuple(node.attrs["value"]), node.dtype),
    reference=lambda *, value, dtype, shape: (
        np.asarray(value, dtype=np.float64 if dtype.is_float else None).astype(dtype.np).reshape(shape)
    ),
    vjp=lambda g, y, **attrs: (),
    samples=(
        Sample((), {"value": (2.5,), "dtype": "f32", "shape": ()}),
        Sample((), {"value": (1, -2), "dtype": "i8", "shape": (2,)}),
    ),
    bad=(BadSample((), {"value": (1, 2), "dtype": "f32", "shape": (3,)}, match="2 values"),),
    doc="a constant of up to 64 elements, rounded to dtype once and printed exactly",
)


def _dim(*, size: SizeLike) -> Type:
    return Type(I64)


dim = Primitive(
    "dim",
    infer=_dim,
    reference=lambda *, size: np.asarray(size, np.int64),
    lower=Movement(lambda index, node, kernel: kernel.size(node.attrs["size"])),
    within=lambda node: Range.of(node.attrs["size"], node.attrs["size"]),
    vjp=lambda g, y, **attrs: (),
    samples=(Sample((), {"size": 3}),),
    doc="a size as a value: i64[]",
)


def _iota(*, shape: tuple[SizeLike, ...], axis: int = 0, dtype: DType = I64) -> Any:
    axis = canonical_axis(axis, len(shape))
    return Type(dtype, shape), {"shape": shape, "axis": axis, "dtype": dtype}


def _reference_iota(*, shape: Any, axis: int, dtype: DType) -> Any:
    from ..elementwise.pointwise import convert

    line = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(convert(line, dtype), shape)


iota = Primitive(
    "iota",
    infer=_iota,
    reference=_reference_iota,
    lower=Movement(lambda index, node, kernel: kernel.position(index[node.attrs["axis"]], node.dtype)),
    within=lambda node: inside(node.shape[node.attrs["axis"]]),
    vjp=lambda g, y, **attrs: (),
    samples=(Sample((), {"shape": (3, 4), "axis": 1}), Sample((), {"shape": (5,), "dtype": "f32"})),
    bad=(BadSample((), {"shape": (3,), "axis": 1}, match="axis=1"),),
    doc="0, 1, 2... along an axis",
)

# -- reshape -----------------------------------------------------------------------------------------------------------


def _reshape(x: Type, *, shape: tuple[SizeLike, ...]) -> Type:
    if not same(product(shape), x.count):
        raise TypeRuleError(
            f"{x.count} elements do not fill {'x'.join(map(str, shape)) or 'a scalar'}, which has {product(shape)}"
        )
    return x.with_shape(*shape)


def _reshape_call(x: Node, shape: Any) -> Node:
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if sum(isinstance(s, int) and s == -1 for s in sizes) == 1:
        rest = product(s for s in sizes if not (isinstance(s, int) and s == -1))
        if isinstance(rest, int) and rest == 0:
            raise TypeRuleError(f"reshape({x.type}): -1 stands for no size beside a 0")
        sizes = tuple(floordiv(x.type.count, rest) if isinstance(s, int) and s == -1 else s for s in sizes)
    node: Node = reshape.plain(x, shape=sizes)
    while node.op is reshape and node.operands[0].op is reshape:
        node = reshape.plain(node.operands[0].operands[0], shape=sizes)
    return node.operands[0] if node.operands[0].shape == node.shape else node


def _reshape_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    before, after = node.operands[0].shape, node.shape
    where = [Index()] * len(before)
    for old, new in axis_groups(before, after):
        if len(old) == 0:
            continue
        kept = [a for a in old if before[a] != 1]
        flat = Index()
        for a in new:
            flat = flat * after[a] + index[a]
        parts = [flat] if len(kept) < 2 else kernel.parted(flat, [before[a] for a in kept])
        if parts is None:
            return None  # would need an integer division: the kernel reads an alias of the buffer instead
        for a, part in zip(kept, parts, strict=False):
            where[a] = part
    return kernel.read(node.operands[0], where)


reshape = Primitive(
    "reshape",
    infer=_reshape,
    reference=lambda x, *, shape: np.reshape(x, shape),
    lower=Alias(_reshape_at),
    sugar=_reshape_call,
    in_place_of_dtype=True,
    vjp=lambda g, y, x, *, shape: (reshaped(g, x.shape),),
    access=lambda node: Reshapes(),
    multilinear=lambda node: {0: reshape_axes(node)},
    replace_axis=replace_axis_of_reshape,
    samples=(
        Sample(("F[6]",), {"shape": (2, 3)}),
        Sample(("F[N,4]",), {"shape": (-1,)}),
        Sample(("F[2,3,N]",), {"shape": (6, -1)}),
        Sample(("F[N]",), {"shape": (1, -1, 1)}),
        Sample(("F[]",), {"shape": (1, 1)}),
    ),
    bad=(
        BadSample(("f32[6]",), {"shape": (4,)}, match="6 elements"),
        BadSample(("f32[N]",), {"shape": (4, 2)}, match="N elements"),
    ),
    doc="the same elements in row-major order with another shape; one size may be -1, which is inferred",
)


# -- transpose, broadcast ----------------------------------------------------------------------------------------------


def _transpose(x: Type, *, axes: tuple[int, ...]) -> Any:
    order = tuple(canonical_axis(a, x.rank, "axes") for a in axes)
    if sorted(order) != list(range(x.rank)):
        raise TypeRuleError(f"axes {axes} are no permutation of {x.rank} axes")
    return x.with_shape(*(x.shape[a] for a in order)), {"axes": order}


def _transpose_call(x: Node, axes: Any = None) -> Node:
    order = tuple(reversed(range(x.rank))) if axes is None else tuple(axes)
    node: Node = transpose.plain(x, axes=order)
    order = node.attrs["axes"]
    if x.op is transpose:  # compose two transposes
        node = transpose.plain(x.operands[0], axes=tuple(x.attrs["axes"][a] for a in order))
    return node.operands[0] if node.attrs["axes"] == tuple(range(x.rank)) else node


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes))


transpose: Primitive = Primitive(
    "transpose",
    infer=_transpose,
    reference=lambda x, *, axes: np.transpose(x, axes),
    sugar=_transpose_call,
    in_place_of_dtype=True,
    lower=Movement(
        lambda index, node, kernel: kernel.read(node.operands[0], [index[a] for a in _inverse(node.attrs["axes"])])
    ),
    vjp=lambda g, y, x, *, axes: (transpose(g, _inverse(axes)),),
    access=lambda node: Transposes(**node.attrs),
    multilinear=lambda node: {0: _inverse(node.attrs["axes"])},
    replace_axis=replace_axis_of_transpose,
    samples=(
        Sample(("F[2,N]",), {"axes": (1, 0)}),
        Sample(("F[2,3,N]",), {"axes": (2, 0, 1)}),
        Sample(("F[2,3,N,2]",)),
        Sample(("F[]",)),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"axes": (0, 0)}, match="no permutation"),
        BadSample(("f32[2,3]",), {"axes": (0, 2)}, match="axes=2"),
    ),
    doc="axes permuted; without axes, reversed",
)


def _broadcast_to(x: Type, *, shape: tuple[SizeLike, ...]) -> Type:
    if len(shape) < x.rank:
        raise TypeRuleError(f"rank {x.rank} is not broadcast down to rank {len(shape)}")
    for size, target in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
        if size != 1 and not same(size, target):
            raise TypeRuleError(f"a size of {size} does not broadcast to {target}")
    return x.with_shape(*shape)


def broadcast_axes(before: Sequence[Size], after: Sequence[Size]) -> tuple[int, ...]:
    """The result axes along which a broadcast repeats its operand."""
    lead = len(after) - len(before)
    return tuple(a for a in range(len(after)) if a < lead or (before[a - lead] == 1 and after[a] != 1))


def _broadcast_vjp(g: Node, y: Node, x: Node, *, shape: Any) -> tuple[Node]:
    # dx = the sum of g over the axes along which x was repeated
    axes = broadcast_axes(x.shape, y.shape)
    kept = tuple(1 if axis in axes else y.shape[axis] for axis in range(y.rank - x.rank, y.rank))
    return (reshaped(call("sum", g, axis=axes), kept) if axes else g,)


def _broadcast_map(node: Node) -> dict[int, tuple[int | None, ...]]:
    lead = node.rank - node.operands[0].rank
    return {0: tuple(a + lead for a in range(node.operands[0].rank))}


def _broadcast_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    before = node.operands[0].shape
    lead = node.rank - len(before)
    return kernel.read(node.operands[0], [Index() if size == 1 else index[a + lead] for a, size in enumerate(before)])


def _broadcast_call(x: Any, shape: Any) -> Node:
    (node,) = adopt("broadcast_to", [x], broadcasting=False)
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    return broadcast_to.plain(node, shape=shape) if node.shape != shape else node


broadcast_to = Primitive(
    "broadcast_to",
    infer=_broadcast_to,
    reference=lambda x, *, shape: np.broadcast_to(x, shape),
    lower=Movement(_broadcast_at),
    sugar=_broadcast_call,
    in_place_of_dtype=True,
    vjp=_broadcast_vjp,
    access=lambda node: Broadcasts(),
    multilinear=_broadcast_map,
    replace_axis=replace_axis_of_broadcast,
    samples=(
        Sample(("F[]",), {"shape": (3,)}),
        Sample(("F[1,N]",), {"shape": (4, "N")}, dims={"N": 5}),
        Sample(("F[3,1]",), {"shape": (2, 3, 4)}),
        Sample(("F[2]",), {"shape": (2,)}),
    ),
    bad=(
        BadSample(("f32[3]",), {"shape": (4,)}, match="3 does not broadcast to 4"),
        BadSample(("f32[2,3]",), {"shape": (3,)}, match="rank 2"),
    ),
    doc="x repeated along new leading axes and along its axes of size 1",
)


# -- slice, pad, flip, concat ------------------------------------------------------------------------------------------


def _slice(x: Type, *, start: tuple[SizeLike, ...], limit: tuple[SizeLike, ...], step: tuple[int, ...]) -> Type:
    if not len(start) == len(limit) == len(step) == x.rank:
        raise TypeRuleError(f"{len(start)} starts, {len(limit)} limits, {len(step)} steps for rank {x.rank}")
    shape: list[Size] = []
    for size, low, high, stride in zip(x.shape, start, limit, step, strict=True):
        if stride < 1:
            raise TypeRuleError(f"a step of {stride}: 1 at least (flip reverses)")
        if isinstance(low, int) and low < 0:
            raise TypeRuleError(f"a start of {low}: 0 at least")
        over = high - size
        if isinstance(over, int) and over > 0:
            raise TypeRuleError(f"a limit of {high} of a size of {size}")
        shape.append(maximum(ceildiv(high - low, stride), 0))
    return x.with_shape(*shape)


def _slice_reference(x: Any, *, start: Sequence[int], limit: Sequence[int], step: Sequence[int]) -> Any:
    for size, low, high in zip(x.shape, start, limit, strict=True):
        if low < 0 or high > size:  # of sizes that vary, which the type rule does not know
            raise InvalidProblem(f"a slice from {low} to {high} of a size of {size}")
    return x[tuple(_range(a, max(a, b), c) for a, b, c in zip(start, limit, step, strict=True))]


def _slice_vjp(g: Node, y: Node, x: Node, *, start: Any, limit: Any, step: Any) -> tuple[Node]:
    # dx = g at the elements that were read, 0 elsewhere
    if any(s != 1 for s in step):
        return (_strided_back(g, x, start, step),)
    return (pad(g, tuple((low, size - low - n) for size, low, n in zip(x.shape, start, y.shape, strict=True)), 0),)


def _strided_back(g: Node, x: Node, start: Any, step: Any) -> Node:
    """The adjoint of a strided slice: each axis of g dilated by its step with zeros, then padded."""
    for axis, stride in enumerate(step):
        if stride == 1:
            continue
        n = g.shape[axis]
        wide = reshaped(g, (*g.shape[: axis + 1], 1, *g.shape[axis + 1 :]))
        wide = pad(wide, tuple((0, stride - 1 if a == axis + 1 else 0) for a in range(wide.rank)), 0)
        g = reshaped(wide, (*g.shape[:axis], n * stride, *g.shape[axis + 1 :]))
    # the dilated g may extend beyond the end of x, by less than a step
    kept = tuple(
        n if known_nonnegative(size - low - n) else size - low
        for size, low, n in zip(x.shape, start, g.shape, strict=True)
    )
    cut = tuple(k if known_nonnegative(n - k) else n - maximum(n - k, 0) for k, n in zip(kept, g.shape, strict=True))
    if cut != g.shape:
        g = slice.plain(g, start=(0,) * g.rank, limit=cut, step=(1,) * g.rank)
    return pad(g, tuple((low, size - low - n) for size, low, n in zip(x.shape, start, g.shape, strict=True)), 0)


slice: Primitive = Primitive(
    "slice",
    infer=_slice,
    in_place_of_dtype=True,
    reference=_slice_reference,
    lower=Movement(
        lambda index, node, kernel: kernel.read(
            node.operands[0],
            [i * s + a for i, a, s in zip(index, node.attrs["start"], node.attrs["step"], strict=True)],
        )
    ),
    vjp=_slice_vjp,
    access=lambda node: Slices(**node.attrs),
    replace_axis=replace_axis_of_slice,
    multilinear=lambda node: {
        0: tuple(a if node.shape[a] == node.operands[0].shape[a] else None for a in range(node.rank))
    },
    samples=(
        Sample(("F[5]",), {"start": (1,), "limit": (3,), "step": (1,)}),
        Sample(("F[5,4]",), {"start": (0, 1), "limit": (5, 3), "step": (1, 1)}),
        Sample(("F[7,3]",), {"start": (1, 0), "limit": (7, 2), "step": (2, 1)}),
        Sample(("F[7,8]",), {"start": (0, 1), "limit": (7, 8), "step": (3, 2)}),
    ),
    bad=(
        BadSample(("f32[5]",), {"start": (0,), "limit": (6,), "step": (1,)}, match="limit of 6 of a size of 5"),
        BadSample(("f32[5]",), {"start": (0,), "limit": (5,), "step": (0,)}, match="step of 0"),
    ),
    doc="x[start:limit:step] on every axis",
)


def _pad(x: Type, *, pad_width: tuple[tuple[SizeLike, ...], ...], value: int | float | bool = 0) -> Any:
    if len(pad_width) != x.rank or any(len(p) != 2 for p in pad_width):
        raise TypeRuleError(f"pad_width {pad_width} is not {x.rank} pairs")
    for low, high in pad_width:
        if any(isinstance(p, int) and p < 0 for p in (low, high)):
            raise TypeRuleError(f"a negative pad ({low}, {high}); slice cuts")
    return x.with_shape(*(n + a + b for n, (a, b) in zip(x.shape, pad_width, strict=True))), {
        "pad_width": pad_width,
        "value": x.dtype.literal(value),
    }


def _pad_call(x: Node, pad_width: Any, value: Any = 0, mode: str = "constant") -> Node:
    if isinstance(pad_width, int):
        pad_width = ((pad_width, pad_width),) * x.rank
    widths: tuple[Any, ...] = tuple(tuple(p) if isinstance(p, tuple | list) else p for p in pad_width)
    if mode not in ("constant", *_BORDERS):
        raise TypeRuleError(f"mode={mode!r} is not one of 'constant', {', '.join(map(repr, _BORDERS))}")
    if mode != "constant" and value != 0:
        raise TypeRuleError(f"value={value} with mode={mode!r}: only a constant border has one")
    if len(widths) == x.rank and all(isinstance(p, tuple) and len(p) == 2 for p in widths):
        last: tuple[Any, ...] = ((0, 0),) * x.rank
        if mode in _BORDERS and not _BORDERS[mode].of_what_is_left:
            last, widths = _signed(widths)
        x, widths = _cropped(x, widths)
        if mode in _BORDERS:
            for axis, (low, high) in enumerate(widths):
                x = _bordered(x, axis, low, high, mode)
            return _cropped(x, last)[0]
    node: Node = pad.plain(x, pad_width=widths, value=value)  # the sizes are the same after a shift, too
    return x if all(n == 0 for pair in widths for n in pair) else node


def _signed(widths: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The negative widths, and the others; 0 in the place of each."""
    below = tuple(tuple(n if isinstance(n, int) and n < 0 else 0 for n in pair) for pair in widths)
    return below, tuple(tuple(n - m for n, m in zip(*pairs, strict=True)) for pairs in zip(widths, below, strict=True))


def _cropped(x: Node, widths: tuple[Any, ...]) -> tuple[Node, tuple[Any, ...]]:
    """Negative widths cut: x without what they take, and the widths that are left."""
    below, kept = _signed(widths)
    low, high = tuple(-a for a, _ in below), tuple(-b for _, b in below)
    if not any((*low, *high)):
        return x, widths
    limit = tuple(n - b for n, b in zip(x.shape, high, strict=True))
    for axis, (a, b) in enumerate(zip(low, limit, strict=True)):
        if isinstance(b, int) and b < a:
            raise TypeRuleError(f"pad_width {widths[axis]} takes more than the {x.shape[axis]} of axis {axis}")
    return slice.plain(x, start=low, limit=limit, step=(1,) * x.rank), kept


def _bordered(x: Node, axis: int, low: Size, high: Size, mode: str) -> Node:
    """x with elements of its own before and after an axis."""
    size, border = x.shape[axis], _BORDERS[mode]
    if low == 0 and high == 0:
        return x
    for width in (low, high):
        short = border.most(size) - width if border.most is not None else size - 1
        if isinstance(short, int) and short < 0:
            raise TypeRuleError(f"a border of {width} by mode={mode!r} for a size of {size}")

    def part(start: Size, limit: Size) -> Node:
        cut = tuple(zip(*((start, limit) if a == axis else (0, n) for a, n in enumerate(x.shape)), strict=True))
        return slice.plain(x, start=cut[0], limit=cut[1], step=(1,) * x.rank)

    parts = [*(() if low == 0 else (border.before(part, size, low, axis),)), x]
    parts += () if high == 0 else (border.after(part, size, high, axis),)
    return concat(*parts, axis=axis)


def _repeated(x: Node, axis: int, width: Size) -> Node:
    return broadcast_to(x, tuple(width if a == axis else n for a, n in enumerate(x.shape)))


@dataclass(frozen=True)
class _Border:
    """How a border is made of the array: ``(part, size, width, axis)`` -> what stands before or after it.

    :param most: the widest border of a size; None where there is no bound.
    :param of_what_is_left: negative widths cut before; else elements that they cut may stand in the border.
    """

    before: Callable[..., Node]
    after: Callable[..., Node]
    most: Callable[[Size], Size] | None = None
    of_what_is_left: bool = False


_BORDERS = {
    "reflect": _Border(
        before=lambda part, size, width, axis: flip.plain(part(1, width + 1), axis=(axis,)),
        after=lambda part, size, width, axis: flip.plain(part(size - 1 - width, size - 1), axis=(axis,)),
        most=lambda size: size - 1,
    ),
    "replicate": _Border(
        before=lambda part, size, width, axis: _repeated(part(0, 1), axis, width),
        after=lambda part, size, width, axis: _repeated(part(size - 1, size), axis, width),
    ),
    "circular": _Border(
        before=lambda part, size, width, axis: part(size - width, size),
        after=lambda part, size, width, axis: part(0, width),
        most=lambda size: size,
        of_what_is_left=True,
    ),
}


def _pad_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    (x,) = node.operands
    where, moved = None, []
    for i, size, (low, high) in zip(index, x.shape, node.attrs["pad_width"], strict=True):
        i = i + -low
        if low != 0 or high != 0:
            where = kernel.both(where, kernel.in_bounds(i, 0, size))
        moved.append(i)
    return kernel.read(x, moved, where=where, other=node.attrs["value"])


def _pad_reference(x: Any, *, pad_width: Any, value: Any) -> Any:
    # a symbolic pad width may evaluate to a negative number, which crops
    wide = (
        np.pad(x, [(max(a, 0), max(b, 0)) for a, b in pad_width], constant_values=np.asarray(value).astype(x.dtype))
        if x.ndim
        else x
    )
    return wide[
        tuple(_range(max(-a, 0), max(n + min(b, 0), 0)) for n, (a, b) in zip(wide.shape, pad_width, strict=True))
    ]


def _pad_vjp(g: Node, y: Node, x: Node, *, pad_width: Any, value: Any) -> tuple[Node]:
    # dx[j] = g[j + low], 0 where g has no such element: what a negative width cut comes back as 0
    border = tuple(  # what a slice takes off, whose type has no size below 0
        tuple(n if known_nonnegative(n) and known_nonnegative(size) else 0 for n in pair)
        for size, pair in zip(x.shape, pad_width, strict=True)
    )
    rest = tuple(tuple(m - n for n, m in zip(*pairs, strict=True)) for pairs in zip(pad_width, border, strict=True))
    if any(n != 0 for pair in rest for n in pair):
        g = pad.plain(g, pad_width=rest, value=0)
    start = tuple(low for low, _ in border)
    limit = tuple(n + low for n, low in zip(x.shape, start, strict=True))
    return (slice.plain(g, start=start, limit=limit, step=(1,) * x.rank) if g.shape != x.shape else g,)


pad: Primitive = Primitive(
    "pad",
    infer=_pad,
    lower=Movement(_pad_at),
    sugar=_pad_call,
    in_place_of_dtype=True,
    reference=_pad_reference,
    vjp=_pad_vjp,
    implies=lambda node: [Assumption(n, ">=", 0) for n in node.shape if isinstance(n, Dim)],  # what is cut is there
    access=lambda node: Pads(**node.attrs),
    multilinear=lambda node: (
        {0: tuple(None if any(n != 0 for n in pair) else a for a, pair in enumerate(node.attrs["pad_width"]))}
        if node.attrs["value"] == 0
        else {}
    ),
    replace_axis=replace_axis_of_pad,
    fills=True,
    samples=(
        Sample(("F[N]",), {"pad_width": ((1, 2),)}),
        Sample(("F[4,3]",), {"pad_width": ((0, 0), (1, 2))}),
        Sample(("F[2,3]",), {"pad_width": ((0, 1), (2, 0)), "value": 1.5}),
        Sample(("F[4,3]",), {"pad_width": ((-1, 2), (1, -2))}),
        Sample(("F[N,5]",), {"pad_width": ((2, 0), (1, 3)), "mode": "reflect"}, dims={"N": 3}),
        Sample(("F[N,3]",), {"pad_width": ((2, 1), (0, 4)), "mode": "replicate"}, dims={"N": 2}),
        Sample(("F[2,5]",), {"pad_width": ((0, 2), (5, 1)), "mode": "circular"}),
    ),
    bad=(
        BadSample(("f32[3]",), {"pad_width": ((-2, -2),)}, match="takes more than the 3 of axis 0"),
        BadSample(("f32[3]",), {"pad_width": ((1, 0), (0, 0))}, match="not 1 pairs"),
        BadSample(("f32[3]",), {"pad_width": ((3, 0),), "mode": "reflect"}, match="a border of 3 by mode='reflect'"),
        BadSample(("f32[3]",), {"pad_width": ((3, 0),), "mode": "edge"}, match="mode='edge' is not one of"),
    ),
    doc=(
        "a border around x, a pair of widths per axis; constant, or elements of x: reflect, replicate, circular;"
        " negative widths cut"
    ),
)


def _flip(x: Type, *, axis: tuple[int, ...]) -> Any:
    return x, {"axis": canonical_axes(axis, x.rank)}


def _flip_call(x: Node, axis: Any = None) -> Node:
    return flip.plain(x, axis=canonical_axes(axis, x.rank))


flip: Primitive = Primitive(
    "flip",
    infer=_flip,
    reference=lambda x, *, axis: np.flip(x, axis),
    sugar=_flip_call,
    in_place_of_dtype=True,
    lower=Movement(
        lambda index, node, kernel: kernel.read(
            node.operands[0],
            [
                i * -1 + (n - 1) if a in node.attrs["axis"] else i
                for a, (i, n) in enumerate(zip(index, node.shape, strict=True))
            ],
        )
    ),
    vjp=lambda g, y, x, *, axis: (flip.plain(g, axis=axis),),
    multilinear=lambda node: {0: tuple(None if a in node.attrs["axis"] else a for a in range(node.rank))},
    samples=(Sample(("F[N]",)), Sample(("F[2,3,N]",), {"axis": (0, 2)})),
    bad=(BadSample(("f32[3]",), {"axis": 1}, match="axis=1"),),
    doc="x reversed along axes",
)


def _concat(*xs: Type, axis: int = 0) -> Any:
    if not xs:
        raise TypeRuleError("nothing to join")
    axis = canonical_axis(axis, xs[0].rank)
    total: Size = 0
    for x in xs:
        if x.dtype is not xs[0].dtype or x.rank != xs[0].rank:
            raise TypeRuleError(f"{x} does not join {xs[0]}")
        for a, (n, m) in enumerate(zip(x.shape, xs[0].shape, strict=True)):
            if a != axis and not same(n, m):
                raise TypeRuleError(f"sizes {m} and {n} differ on axis {a}")
        total = total + x.shape[axis]
    return xs[0].with_shape(*(total if a == axis else n for a, n in enumerate(xs[0].shape))), {"axis": axis}


def _concat_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    axis, value, start = node.attrs["axis"], None, 0
    for x in node.operands:
        i = index[axis] + -1 * start
        where = kernel.in_bounds(i, 0, x.shape[axis])
        part = kernel.read(x, [i if a == axis else other for a, other in enumerate(index)], where=where, other=0)
        value = part if value is None else kernel.select(where, part, value)
        start = start + x.shape[axis]
    return value


def _concat_vjp(g: Node, y: Node, *xs: Node, axis: int) -> tuple[Node, ...]:
    # each operand gets its slice of g
    parts: list[Node] = []
    start: Size = 0
    for x in xs:
        low = tuple(start if a == axis else 0 for a in range(x.rank))
        parts.append(
            slice.plain(g, start=low, limit=tuple(a + n for a, n in zip(low, x.shape, strict=True)), step=(1,) * x.rank)
        )
        start = start + x.shape[axis]
    return tuple(parts)


concat = Primitive(
    "concat",
    infer=_concat,
    reference=lambda *xs, axis: np.concatenate(xs, axis),
    lower=Movement(_concat_at),
    vjp=_concat_vjp,
    access=lambda node: Concats(**node.attrs),
    in_place_of_dtype=True,
    multilinear=lambda node: {
        k: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank)) for k in range(len(node.operands))
    },
    linear=True,
    fills=True,
    samples=(
        Sample(("F[N]", "F[3]")),
        Sample(("F[2,N]", "F[2,3]", "F[2,1]"), {"axis": -1}),
        Sample(("F[2,N]",), {"axis": 1}),
    ),
    bad=(
        BadSample(("f32[2,3]", "f32[3,3]"), {"axis": 1}, match="sizes 2 and 3 differ"),
        BadSample(("f32[2]", "f64[2]"), match="does not join"),
    ),
    doc="operands, one by one or in a list, concatenated along an axis",
)

# -- x[...] ------------------------------------------------------------------------------------------------------------


def _getitem(x: Node, key: Any) -> Node:
    """NumPy's indexing with ints, slices, None, Ellipsis, and index arrays: nodes, arrays and lists of integers, NumPy
    arrays of bools.
    """
    keys = without_masks(list(key) if isinstance(key, tuple) else [key], x.shape)
    if isinstance(key, Node):
        return call("gather", x, key, axis=0)
    gathered: dict[int, Node] = {}  # axis before the arrays are read -> index array
    if sum(k is Ellipsis for k in keys) > 1:
        raise TypeRuleError("getitem: two ellipses")
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > x.rank:
        raise TypeRuleError(f"getitem: {used} indices for {x.type}")
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [_range(None)] * (x.rank - used)
    start: list[Size] = []
    limit: list[Size] = []
    shape: list[Size] = []
    step: list[int] = []
    flips: list[int] = []
    axis = 0
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if isinstance(k, Node | np.ndarray | list):
            gathered[len(shape)] = as_index(k, size, "getitem")
            k = _range(None)
        if isinstance(k, _range):
            stride = 1 if k.step is None else int(k.step)
            if stride == 0:
                raise TypeRuleError("getitem: a step of 0")
            if stride < 0:
                flips.append(len(start))
            low, high = (
                _reversed(k, size, -stride) if stride < 0 else (_bound(k.start, 0, size), _bound(k.stop, size, size))
            )
            stride = abs(stride)
            shape.append(maximum(ceildiv(high - low, stride), 0))
        elif isinstance(k, int | np.integer | Dim) and not isinstance(k, bool):
            low = _bound(k, 0, size, clip=False)
            if isinstance(low, int) and isinstance(size, int) and not 0 <= low < size:
                raise TypeRuleError(f"getitem: index {k} of a size of {size}")
            high, stride = low + 1, 1
        else:
            raise TypeRuleError(f"getitem: {k!r} is no index gradc knows (ints, slices, None, ..., integer arrays)")
        start.append(low)
        limit.append(high)
        step.append(stride)
        axis += 1
    if tuple(limit) != x.shape or any(s != 0 for s in start) or any(s != 1 for s in step):
        x = slice.plain(x, start=tuple(start), limit=tuple(limit), step=tuple(step))
    if flips:
        x = flip.plain(x, axis=tuple(flips))
    x = reshaped(x, tuple(shape))
    if not gathered:
        return x
    _refuse_ambiguous(keys, gathered)
    merged, place, at, _ = along_axes(x, gathered, "getitem")
    return call("gather", merged, place, axis=at)


def _refuse_ambiguous(keys: Sequence[Any], gathered: Mapping[int, Node]) -> None:
    """Where NumPy puts the axes of index arrays first because a number counts as an array, and torch does not."""
    advanced = [k for k, key in enumerate(keys) if is_array(key) or isinstance(key, int | np.integer | Dim)]
    theirs = advanced == list(range(advanced[0], advanced[-1] + 1))
    axes = sorted(gathered)
    ours = axes == list(range(axes[0], axes[-1] + 1))
    if ours and not theirs and axes[0] > 0:
        raise TypeRuleError(
            "getitem: with a number and an index array on both sides of a slice, NumPy and torch order the axes"
            " differently; index twice: x[0][:, i]"
        )


def _reversed(k: Any, size: Size, stride: int) -> tuple[Size, Size]:
    """(low, high) of the forward slice whose reversal is the slice ``k``, which has the step -stride."""
    if k.start is None and k.stop is None and stride == 1:
        return 0, size
    if not isinstance(size, int):
        raise TypeRuleError(
            f"getitem: a slice backwards over a symbolic {size} takes the whole axis by -1; slice forwards, then [::-1]"
        )
    taken = range(size)[k]
    return (taken[-1], taken[0] + 1) if taken else (0, 0)


def _bound(bound: Any, default: Size, size: Size, clip: bool = True) -> Size:
    if bound is None:
        return default
    if not isinstance(bound, int | np.integer | Dim):
        raise TypeRuleError(f"getitem: {bound!r} is no size")
    value: Size = int(bound) if isinstance(bound, np.integer) else bound
    if isinstance(value, int) and value < 0:
        value = size + value
    if not clip:
        return value
    if isinstance(value, int) and isinstance(size, int):
        return min(max(value, 0), size)
    return value if known_nonnegative(size - value) else size - maximum(size - value, 0)


getitem = Primitive(
    "getitem",
    infer=lambda x: x,
    reference=None,
    lower=None,
    sugar=_getitem,
    doc=(
        "x[...], expressed as slice, flip, reshape and gather; a negative index that is known when tracing counts from"
        " the end, one of the call is out of range"
    ),
)
