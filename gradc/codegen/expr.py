"""Statements as C: the scalar vocabulary of ``templates/*/math.h``.

A value in a register has a *carrier*: f32 for the storage floats (already rounded), f64 for f64, 32 bits for bool, the
integer itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..errors import InternalError
from ..ir.dims import Size
from ..ir.node import REGISTRY
from ..ir.op import Expr
from ..ir.statement import Index, Stmt
from ..ir.types import BOOL, I64, DType, Type
from .exponentials import is_exp_below_one, is_exp_of_magnitude
from .index import flatten, index, literal, size

_NARROW_INT = {"i2": "i8", "i4": "i8", "u2": "u8", "u4": "u8"}
STORED = {
    "bool": "u8",
    "f16": "u16",
    "bf16": "u16",
    "f8e4m3": "u8",
    "f8e5m2": "u8",
    "f4e2m1": "u8",
    "e8m0": "u8",
    **_NARROW_INT,
}
ROUNDED = ("f16", "bf16", "f8e4m3", "f8e5m2", "f4e2m1", "e8m0")
_MAY_OVERFLOW = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "-{0}")


def stored(dtype: DType) -> str:
    """The C type of an element in memory."""
    return STORED.get(dtype.name, dtype.name)


def carrier(dtype: DType) -> str:
    """The C type of a value in a register."""
    if dtype is BOOL:
        return "i32"
    return "f32" if dtype.name in ROUNDED else _NARROW_INT.get(dtype.name, dtype.name)


def variable(name: str) -> str:
    return f"v{name[1:]}"


def loaded(dtype: DType, element: str) -> str:
    if dtype.name in ROUNDED:
        return f"{dtype.name}_load({element})"
    if dtype.name in _NARROW_INT:  # only the low bits of the byte are the value
        return wrapped(element, dtype)
    return f"(i32)({element} != 0)" if dtype is BOOL else element  # any byte but 0 is true, as in NumPy


def to_memory(dtype: DType, value: str) -> str:
    if dtype.name in ROUNDED:
        return f"{dtype.name}_store({value})"
    if dtype.name in _NARROW_INT and dtype.kind == "i":  # the bits above a value's own are 0, as ml_dtypes stores it
        return f"({value}) & {2**dtype.bits - 1}"
    return f"(u8)({value})" if dtype is BOOL else value


def literal_in_memory(dtype: DType, value: float | bool) -> str:
    """A number as it lies in memory, as C: of a storage float the bits."""
    if dtype.name in ROUNDED:
        bits = np.array(value).astype(dtype.np).view(f"u{dtype.itemsize}")
        return f"({stored(dtype)}){int(bits)}"
    return to_memory(dtype, literal(value, dtype))


def unrounded(value: str, source: DType) -> str:
    """The f32 that a storage float is rounded from; f64 is rounded to odd, so that rounding again is exact."""
    return f"odd_f64({value})" if source.name == "f64" else f"(f32){value}"


def converted(value: str, source: DType, target: DType) -> str:
    """A cast (contracts 3): float to int saturates, int to int wraps, to a storage float rounds."""
    if source is target:
        return value
    if target is BOOL:
        return f"({value} != 0)"
    if target.is_float:
        if target.name in ROUNDED:
            return f"{target.name}_round({unrounded(value, source)})"
        return f"({target.name}){value}"
    if source.is_float:
        return f"sat_{target.name}_{carrier(source)}({value})"
    return wrapped(value, target)


def with_bits(value: str, target: DType) -> str:
    """An unsigned integer as the value that has these bits."""
    return (
        f"{target.name}_of_bits({value})"
        if target.name in ("f32", "f64")
        else loaded(target, f"({stored(target)})({value})")
    )


def wrapped(value: str, dtype: DType) -> str:
    """An integer expression brought into its type's range by wrapping."""
    if dtype.name in _NARROW_INT:
        mask = 2**dtype.bits - 1
        if dtype.kind == "u":
            return f"(u8)(({value}) & {mask})"
        half = 2 ** (dtype.bits - 1)
        return f"(i8)(((({value}) + {half}) & {mask}) - {half})"
    return f"({dtype.name})({value})"


class Scribe:
    """Writes the statements of one kernel.

    :param types: the type of each buffer, over the kernel's own dim names.
    :param wraps: whether the compiler lets signed arithmetic wrap; else it is done on unsigned numbers.
    :param offsets: the C type of axes, dims and elements' places; where that is not i64, what has 64 bits for its
        value's sake is cast.
    :param columns: the axes that vectors run over: places that values decide within them are 32 bits wide where the
        buffer is that small.
    :param guarded: whether an element outside its array is reported, and a place of the thread's own taken for it.
    :param narrow: the values of 64 bits that are known to fit i32, from which floats are made by way of it: not all
        processors have vectors of the direct conversion.
    :param hidden: the tests of bounds by numbers that a C compiler is not to know (``gradc_unknown_zero``).
    :param below_one: the function of f32 that takes the place of exp where the argument is known not to be above 0.
    :ivar values: the dtype of each value.
    """

    def __init__(
        self,
        types: Mapping[str, Type],
        statements: Sequence[Stmt],
        wraps: bool = True,
        offsets: str = "i64",
        columns: Collection[str] = (),
        guarded: bool = False,
        narrow: Collection[str] = (),
        hidden: Collection[str] = (),
        below_one: str = "",
    ):
        self.below_one, self.statements = below_one, {s.name: s for s in statements if s.name}
        self.guarded, self.narrow, self.hidden = guarded, narrow, hidden
        self.types, self.wraps, self.offsets, self.columns = types, wraps, offsets, columns
        self.values = {s.name: s.dtype for s in statements if s.name and s.dtype is not None}

    def element(self, buffer: str, place: Sequence[Index]) -> str:
        flat, count = flatten(place, self.types[buffer].shape), self.types[buffer].count
        gathered = [t for t in flat.terms if t[0].startswith("%")]
        if self.guarded:
            return self.guard(buffer, index(flat), count, stored(self.types[buffer].dtype))
        in_32_bits = (
            isinstance(count, int) and isinstance(flat.const, int) and count + abs(flat.const) < 2**31
        )  # what the values add up to, less a border before the buffer
        if self.columns and gathered and in_32_bits and not any(v in self.columns for v, _ in flat.terms):
            rest = Index(flat.const, tuple(t for t in flat.terms if t not in gathered))
            return f"{buffer}[{index(rest)} + ({index(Index(0, tuple(gathered)), 'i32')})]"
        text = index(flat, self.offsets)
        return (
            f"{buffer}[{text[1:-1] if text.startswith('(') and text.endswith(')') and text.count('(') == 1 else text}]"
        )

    def guard(self, array: str, place: str, count: Size, ctype: str) -> str:
        """An element of an array of so many, looked at before it is touched."""
        if not self.guarded:
            return f"{array}[{place}]"
        return f"(*({ctype} *)gradc_guarded(A->ctx, A->site, {array}, {place}, {size(count)}, sizeof({ctype})))"

    def size(self, value: Size) -> str:
        """A size as a value of 64 bits."""
        return size(value, "" if self.offsets == "i64" else "i64")

    def value(self, s: Stmt, seek: str = "") -> str:
        """``const f32 v3 = v1 * v2;``

        :param seek: what a search goes on from, and leaves for the next one.
        """
        return self.declaration(s, self.expression(s, seek))

    def declaration(self, s: Stmt, value: str) -> str:
        """The same of a value that is something else in C."""
        return f"const {carrier(self.values[s.name])} {variable(s.name)} = {value};"

    def place_compared(self, s: Stmt) -> tuple[str, str] | None:
        """An axis and the value that it is compared with for equality, where axes may have fewer bits than values."""
        if s.op != "eq" or self.offsets == "i64":
            return None
        for axis, value in (s.args, s.args[::-1]):
            at = self.statements.get(axis)
            name = at.index[0].variable if at is not None and at.op == "index" else None
            if name is not None and not name.startswith("%") and self.values[value] is I64:
                return name, variable(value)
        return None

    def in_bounds(self, s: Stmt) -> str:
        at, value = index(s.index[0]), s.index[0].variable
        lo, hi = s.attr("lo"), s.attr("hi")
        if lo == 0 and isinstance(hi, int) and hi < 2**31 and value in self.values and self.values[value].bits <= 32:
            return f"(u32){variable(value)} < {hi}u"
        high = f"({hi} + unknown_zero)" if s.name in self.hidden else self.size(hi)
        return f"(u64){at} < (u64){high}" if lo == 0 else f"{at} >= {self.size(lo)} && {at} < {high}"

    def expression(self, s: Stmt, seek: str = "") -> str:
        assert s.dtype is not None
        args = [variable(a) for a in s.args]
        if s.op == "load":
            read = loaded(s.dtype, self.element(s.buffer, s.index))
            if not s.where:
                return read
            return f"{variable(s.where)} ? {read} : {literal(dict(s.attrs).get('other', 0), s.dtype)}"
        if s.op == "search":
            row = self.types[s.buffer]
            function, known = ("gradc_found", f"&{seek}, ") if seek else ("search", "")
            return f"{function}_{stored(row.dtype)}({known}{s.buffer}, {self.size(row.shape[-1])}, {args[0]})"
        if s.op == "const":
            return literal(s.attr("value"), s.dtype)
        if s.op == "size":
            return self.size(s.attr("size"))
        if s.op == "index":
            return index(s.index[0])
        if s.op == "in_bounds":
            return self.in_bounds(s)
        if s.op == "clamp_index":
            high = self.size(s.attr("size"))
            if s.attr("oob") == "wrap":
                return f"floormod_i64({args[0]}, maximum_i64({high}, 1))"
            return f"maximum_i64(minimum_i64({args[0]}, {high} - 1), 0)"
        if s.op == "cast":
            narrowed = s.dtype.is_float and s.args[0] in self.narrow
            return converted(f"(i32){args[0]}" if narrowed else args[0], self.values[s.args[0]], s.dtype)
        if s.op == "bitcast":
            return with_bits(args[0], s.dtype)
        if self.below_one and any(known(self.statements, s) for known in (is_exp_below_one, is_exp_of_magnitude)):
            return f"{self.below_one}({args[0]})"
        if (place := self.place_compared(s)) is not None:
            return f"gradc_is_at({', '.join(place)})"
        lower = getattr(REGISTRY[s.op], "lower", None)
        if not isinstance(lower, Expr):
            raise InternalError(f"the statement {s.op} has no C expression")
        first = self.values[s.args[0]]
        text = lower.by_kind.get(first.kind, lower.text)
        operand = self.values[s.args[-1]]
        suffix = carrier(operand)
        text = re.sub(r"\b([a-z]\w*)\(", rf"\1_{suffix}(", text)
        for name, value in s.attrs:  # attributes that an expression names: {alpha}
            text = text.replace(
                "{" + name + "}", literal(value, s.dtype) if isinstance(value, int | float) else str(value)
            )
        if not self.wraps and s.dtype.is_integer and s.dtype.bits >= 16 and lower.text in _MAY_OVERFLOW:
            args = [f"(u{max(32, s.dtype.bits)}){a}" for a in args]
        text = text.format(*args)
        return wrapped(text, s.dtype) if s.dtype.is_integer else text
