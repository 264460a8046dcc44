"""Bit-level ops: right_shift, bitcast, and unpack of sub-byte values stored several to a byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InvalidProblem, TypeRuleError
from ...ir.node import Node
from ...ir.op import DISCRETE, ZERO, BadSample, Composite, Expr, Lookup, Primitive, Sample
from ...ir.statement import Index
from ...ir.types import DTYPES, DType, Type
from ...ir.types import dtype as dtype_of
from ..rules import alike, canonical_axis, cases, full
from ..shapes.axes import replace_axis_beside, replaced
from .pointwise import bitwise_and, convert, ge, lt, pow, where

Array = np.ndarray[Any, Any]
U8 = DTYPES["u8"]
PACKED = ("i2", "i4", "u2", "u4", "f4e2m1")
"""The sub-byte dtypes, of which a byte holds several."""

# -- shifts ------------------------------------------------------------------------------------------------------------


def _shift(x: Type, y: Type) -> Type:
    if not alike(x, y).dtype.is_integer:
        raise TypeRuleError(f"{x.dtype} is no integer")
    return x


_NO_SHIFT = (
    BadSample(("f32[3]", "f32[3]"), match="f32 is no integer"),
    BadSample(("i32[3]", "u8[3]"), match="dtypes differ"),
)

right_shift = Primitive(
    "right_shift",
    infer=_shift,
    reference=lambda a, b: np.right_shift(a, b).astype(a.dtype),
    lower=Expr("right_shift({0}, {1})"),
    broadcast=True,
    in_place_of_dtype=True,
    vjp=lambda g, y, a, b: (ZERO, ZERO),
    samples=(
        *(s for d in ("i32", "u8", "i64", "i4") for s in cases("N", "2,3", arity=2, dtype=d, draw="int")),
        Sample(("u8[N]", "u8[]"), draw=("int", "int")),
    ),
    bad=_NO_SHIFT,
    doc=(
        "arithmetic shift: a / 2**b rounded down; a shift by a negative number or by at least the width gives -1 for a"
        " negative a, else 0"
    ),
    source="numpy.right_shift",
)


def _left_shift_value(x: Node, y: Node) -> Node:
    # x 2^y, and 2^y by squares; all bits are shifted out by the width or a negative number
    inside = bitwise_and(ge(y, full(0, y)), lt(y, full(x.dtype.bits, y)))
    return where(inside, x * pow(full(2, y), where(inside, y, full(0, y))), full(0, x))


left_shift = Composite(
    "left_shift",
    infer=_shift,
    decompose=_left_shift_value,
    broadcast=True,
    vjp=lambda g, y, a, b: (ZERO, ZERO),
    samples=(
        *(s for d in ("i32", "u8", "i64") for s in cases("N", "2,3", arity=2, dtype=d, draw="int")),
        Sample(("u8[N]", "u8[]"), draw=("int", "int")),
    ),
    bad=_NO_SHIFT,
    doc=(
        "a * 2**b without the bits that the dtype does not hold; a shift by a negative number or by at least the width"
        " gives 0"
    ),
    source="numpy.left_shift",
)

# -- the same bits -----------------------------------------------------------------------------------------------------


def _bitcast(x: Type, *, to: DType) -> Any:
    if x.dtype.kind != "u":
        raise TypeRuleError(f"{x.dtype} is no unsigned integer")
    if to.kind == "b" or to.itemsize != x.dtype.itemsize or x.dtype.bits < 8:
        raise TypeRuleError(f"{x.dtype} holds no bits of {to}")
    return x.with_dtype(to), {"to": to}


def with_bits(x: Array, to: DType) -> Array:
    """NumPy's bitcast: unsigned integers reinterpreted as ``to``; a sub-byte dtype takes the low bits of each byte."""
    x = np.asarray(x)
    if to.bits >= 8:
        return np.ascontiguousarray(x).view(to.np).reshape(x.shape)
    low = np.ascontiguousarray(x & np.uint8(2**to.bits - 1))
    return convert(low, to) if to.is_integer else low.view(to.np).reshape(x.shape)


bitcast = Primitive(
    "bitcast",
    infer=_bitcast,
    reference=with_bits,
    lower=Expr("bitcast"),
    in_place_of_dtype=True,
    vjp=lambda g, y, x, *, to: (DISCRETE,),
    samples=tuple(
        Sample((f"u{DTYPES[t].itemsize * 8}[2,N]",), {"to": t}, draw=("int",))
        for t in ("f4e2m1", "e8m0", "f8e4m3", "f8e5m2", "i4", "u2", "i8", "bf16", "f16", "i16", "f32", "i32")
    ),
    bad=(
        BadSample(("i8[3]",), {"to": "f4e2m1"}, match="no unsigned"),
        BadSample(("u8[3]",), {"to": "f32"}, match="u8 holds no bits of f32"),
    ),
    doc="the bits of unsigned integers as values of another dtype; a sub-byte dtype takes the low bits of each byte",
    source="jax.lax.bitcast_convert_type",
)

# -- unpack ------------------------------------------------------------------------------------------------------------


def infer_unpacked(packed: Type, *, dtype: DType, axis: int = -1, low_nibble_first: bool = True) -> Any:
    if packed.dtype is not U8:
        raise TypeRuleError(f"packed data is u8, not {packed.dtype}")
    if dtype.name not in PACKED:
        raise TypeRuleError(f"dtype={dtype}; a byte holds several of {' '.join(PACKED)}")
    axis = canonical_axis(axis, packed.rank)
    shape = replaced(packed.shape, axis, (packed.shape[axis] * (8 // dtype.bits),))
    return Type(dtype, shape), {"dtype": dtype, "axis": axis, "low_nibble_first": low_nibble_first}


def _shifts(bits: int, low_nibble_first: bool) -> Array:
    """The right shift that moves each value of a byte to the low bits, in the order of the values; u8[8/bits]."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    return places if low_nibble_first else places[::-1]


def _unpack_reference(packed: Array, *, dtype: DType, axis: int, low_nibble_first: bool) -> Array:
    codes = np.right_shift(np.expand_dims(packed, -1), _shifts(dtype.bits, low_nibble_first))
    codes = np.moveaxis(codes, -1, axis + 1).reshape(
        replaced(packed.shape, axis, (packed.shape[axis] * codes.shape[-1],))
    )
    return with_bits(codes, dtype)


def _unpack_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    """Kernel statements: the byte at position // (8/bits), shifted by the value's offset in it."""
    axis, to = node.attrs["axis"], node.dtype
    place, part = kernel.divided(index[axis], 8 // to.bits)
    byte = kernel.read(node.operands[0], replaced(index, axis, (place,)))
    shifts = _shifts(to.bits, node.attrs["low_nibble_first"])
    if isinstance(part, int):
        shift = kernel.number(int(shifts[part]), U8)
    else:
        step = kernel.emit("mul", kernel.cast(part, U8), kernel.number(to.bits, U8), dtype=U8)
        shift = step if shifts[0] == 0 else kernel.emit("sub", kernel.number(int(shifts[0]), U8), step, dtype=U8)
    return kernel.emit("bitcast", kernel.emit("right_shift", byte, shift, dtype=U8), dtype=to, to=to)


unpack = Primitive(
    "unpack",
    infer=infer_unpacked,
    reference=_unpack_reference,
    lower=Lookup(_unpack_at),
    in_place_of_dtype=True,
    vjp=lambda g, y, packed, **_: (DISCRETE,),
    replace_axis=replace_axis_beside,
    samples=(
        *(Sample(("u8[N,3]",), {"dtype": d}, draw=("int",)) for d in PACKED),
        *(Sample(("u8[3,N]",), {"dtype": d, "low_nibble_first": False}, draw=("int",)) for d in ("u4", "i2", "f4e2m1")),
        Sample(("u8[N,3]",), {"dtype": "i4", "axis": 0}, draw=("int",)),
        Sample(("u8[2,N,3]",), {"dtype": "u2", "axis": -2}, draw=("int",)),
        Sample(("u8[5]",), {"dtype": "i4"}, draw=("int",)),
    ),
    bad=(
        BadSample(("i8[4]",), {"dtype": "i4"}, match="u8, not i8"),
        BadSample(("u8[4]",), {"dtype": "i8"}, match="dtype=i8; a byte holds several of"),
        BadSample(("u8[]",), {"dtype": "i4"}, match="axis=-1"),
        BadSample(("u8[4,2]",), {"dtype": "i4", "axis": 2}, match="axis=2"),
    ),
    doc=(
        "the sub-byte values that u8 bytes hold, 8/bits times as many along an axis, low bits first unless"
        " low_nibble_first=False; unpacked where they are used, never stored; no gradient. gradc.pack is the inverse,"
        " in NumPy"
    ),
)


def pack(values: Any, dtype: Any = None, axis: int = -1, low_nibble_first: bool = True) -> Array:
    """Packs sub-byte values into the bytes that ``ops.unpack`` reads, in NumPy: u8, the size along ``axis`` divided by
    8/bits.

    :param values: of the sub-byte dtype, or integers in its range, or (for f4e2m1) floats, which are rounded.
    :param dtype: ``i2 i4 u2 u4 f4e2m1``; needed only if ``values`` have none of these dtypes.
    :raises InvalidProblem: an integer is out of range, or the size along ``axis`` is no multiple of 8/bits.
    """
    array = np.asarray(values)
    to = dtype_of(array.dtype if dtype is None else dtype)
    if to.name not in PACKED or array.ndim == 0:
        raise InvalidProblem(
            f"pack: {to}{list(array.shape)}; a byte holds several of {' '.join(PACKED)}, along an axis"
        )
    axis, per = canonical_axis(axis, array.ndim), 8 // to.bits
    if array.shape[axis] % per:
        raise InvalidProblem(f"pack: axis {axis} has {array.shape[axis]} values of {to}; {per} fill a byte")
    if to.is_integer and array.dtype != to.np:
        low, high = to.range
        if array.dtype.kind not in "iu" or (array.size and not (low <= int(array.min()) and int(array.max()) <= high)):
            raise InvalidProblem(
                f"pack: {to} holds integers of {low} to {high}, and values is {array.dtype}"
                + (f" up to {array.max()}" if array.size else "")
            )
    narrow = convert(array, to)
    codes = (narrow.astype(np.int8) if to.is_integer else narrow).view(np.uint8) & np.uint8(2**to.bits - 1)
    groups = codes.reshape(replaced(codes.shape, axis, (codes.shape[axis] // per, per)))
    shifts = _shifts(to.bits, low_nibble_first).reshape((per, *(1,) * (array.ndim - axis - 1)))
    return np.asarray(np.bitwise_or.reduce(np.left_shift(groups, shifts), axis=axis + 1), np.uint8)
