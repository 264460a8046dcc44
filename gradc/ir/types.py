"""Element types and tensor types: ``f32[N,4]`` is a dtype and a shape.

Sub-byte values (i2 i4 u2 u4 f4e2m1) and e8m0 are stored one per byte; f8e4m3 is OCP E4M3FN (max 448, no inf).  Reading
a sub-byte value ignores the byte's high bits, and any nonzero byte is true; writing sets the high bits to 0, and true
to 1.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import IRFormatError, TypeRuleError
from ..process.forks import cached_property
from .dims import Dim, Size, check_count, evaluate, product, substitute, symbols
from .size_text import parse_size

_NAN = struct.pack("d", math.nan)


@dataclass(frozen=True, eq=False)
class DType:
    """An element type.

    :param kind: ``b`` bool, ``i`` signed, ``u`` unsigned, ``f`` float.
    :param bits: of information; the storage size is ``itemsize``.
    """

    name: str
    kind: str
    bits: int
    np: np.dtype[Any]

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"

    @property
    def has_tangent(self) -> bool:
        """Whether a cotangent has the value's own dtype; dtypes of quantized values (integers, floats of at most 8
        bits) have a wider one.
        """
        return self.is_float and self.bits > 8

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return int(self.np.itemsize)

    @property
    def range(self) -> tuple[int, int]:
        """(smallest, largest) value of an integer type."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.kind == "i" else (0, 2**self.bits - 1)

    def literal(self, value: float) -> bool | int | float:
        """A Python number as a literal of this type.

        An integer type accepts integral numbers in its range (2.0, but not 1.5, inf or nan), bool accepts 0 and 1; a
        float type accepts any number, rounding ints to the nearest f64 (which changes them beyond 2^53, as in NumPy).
        The NaN without a payload is :data:`math.nan`, as NaNs of Python's are equal only where they are one object.

        :raises TypeRuleError: the number is not accepted; the message has the number and the range.
        """
        if self.is_float:
            try:
                number = float(value)
            except OverflowError:
                raise TypeRuleError(f"{shown(value)} does not fit {self}, nor any float") from None
            return math.nan if math.isnan(number) and struct.pack("d", number) == _NAN else number
        low, high = self.range if self.is_integer else (0, 1)
        if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
            raise TypeRuleError(f"{shown(value)} is no integer, and {self} holds {low} to {high}")
        if not low <= value <= high:
            raise TypeRuleError(f"{shown(value)} does not fit {self}, which holds {low} to {high}")
        return int(value) if self.is_integer else bool(value)

    def holds(self, other: DType) -> bool:
        """Whether this dtype, f32 or f64, represents every value of ``other`` exactly."""
        if other.is_float:
            return self is other or (self.name == "f64" or (self.name == "f32" and other.bits < 32))
        return {"f32": 24, "f64": 53}.get(self.name, 0) >= other.bits - (other.kind == "i")

    @property
    def compute(self) -> DType:
        """The dtype of arithmetic: f32 for floats of at most 16 bits, itself otherwise."""
        return DTYPES["f32"] if self.is_float and self.bits < 32 else self

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return (dtype, (self.name,))


def shown(value: Any) -> str:
    """A number as text for an error message; handles the long integers that Python refuses to print."""
    return (
        f"an integer of {value.bit_length()} bits"
        if isinstance(value, int) and value.bit_length() > 128
        else str(value)
    )


_NUMPY: dict[str, tuple[str, int, Any]] = {
    "bool": ("b", 1, np.bool_),
    **{f"i{n}": ("i", n, np.dtype(f"int{n}")) for n in (8, 16, 32, 64)},
    **{f"u{n}": ("u", n, np.dtype(f"uint{n}")) for n in (8, 16, 32)},
    "f16": ("f", 16, np.float16),
    "bf16": ("f", 16, ml_dtypes.bfloat16),
    "f32": ("f", 32, np.float32),
    "f64": ("f", 64, np.float64),
    "f8e4m3": ("f", 8, ml_dtypes.float8_e4m3fn),
    "f8e5m2": ("f", 8, ml_dtypes.float8_e5m2),
    "i2": ("i", 2, ml_dtypes.int2),
    "i4": ("i", 4, ml_dtypes.int4),
    "u2": ("u", 2, ml_dtypes.uint2),
    "u4": ("u", 4, ml_dtypes.uint4),
    "f4e2m1": ("f", 4, ml_dtypes.float4_e2m1fn),
    "e8m0": ("f", 8, ml_dtypes.float8_e8m0fnu),
}
DTYPES: dict[str, DType] = {name: DType(name, kind, bits, np.dtype(np_)) for name, (kind, bits, np_) in _NUMPY.items()}
_BY_NUMPY = {d.np: d for d in DTYPES.values()}
BOOL, I32, I64, F16, BF16, F32, F64 = (DTYPES[name] for name in ("bool", "i32", "i64", "f16", "bf16", "f32", "f64"))


def dtype(given: Any) -> DType:
    """The element type given by a name (``"f32"``), a NumPy dtype or a DType; TypeRuleError if there is none."""
    if isinstance(given, DType):
        return given
    if isinstance(given, str) and given in DTYPES:
        return DTYPES[given]
    try:
        return _BY_NUMPY[np.dtype(given)]
    except (KeyError, TypeError, ValueError):  # NumPy raises ValueError for a string with a lone surrogate
        raise TypeRuleError(f"{str(given)[:60]!r} is not a dtype; there are {' '.join(DTYPES)}") from None


def read(array: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """An array as kernels read it: the unused high bits of sub-byte values and bools, which a view may have set, are
    cleared.
    """
    given: np.ndarray[Any, Any] = np.asarray(array)
    if dtype.bits >= 8 or given.dtype != dtype.np:
        return given
    raw = given.view(np.uint8)
    if not raw.size or int(raw.max()) < 2**dtype.bits:
        return given
    return np.asarray(raw != 0 if dtype is BOOL else (raw & (2**dtype.bits - 1)).view(dtype.np))


@dataclass(frozen=True)
class Type:
    """A tensor type: a dtype and a shape of sizes; ``f32[]`` is a scalar."""

    dtype: DType
    shape: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.shape, self)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def count(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @cached_property
    def nbytes(self) -> Size:
        return self.count * self.dtype.itemsize

    def with_dtype(self, new: DType) -> Type:
        return Type(new, self.shape)

    def with_shape(self, *shape: Size) -> Type:
        return Type(self.dtype, tuple(shape))

    def substitute(self, values: Mapping[str, Size]) -> Type:
        return Type(self.dtype, tuple(substitute(s, values) for s in self.shape))

    def concrete(self, bindings: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with all symbols evaluated."""
        return tuple(evaluate(s, bindings) for s in self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset().union(*(symbols(s) for s in self.shape if isinstance(s, Dim)))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    __repr__ = __str__


def parse_type(text: str, line: int = 0, column: int = 1) -> Type:
    """Parses ``f32[N,4]``; ``f32`` alone is a scalar."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\[(.*)\])?\s*", text, re.ASCII | re.DOTALL)
    if not match or match[1] not in DTYPES:
        raise IRFormatError(f"{text[:60]!r} is not a type such as f32[N,4]", line, column)
    shape: list[Size] = []
    start = match.start(2)
    for part in split_commas(match[2] or ""):
        shape.append(parse_size(part, line, column + start))
        start += len(part) + 1
    if len(shape) > 32:
        raise IRFormatError(f"a rank of {len(shape)}: 32 is the most", line, column)
    try:
        return Type(DTYPES[match[1]], tuple(shape))
    except TypeRuleError as error:
        raise IRFormatError(str(error), line, column) from None


def split_commas(text: str) -> list[str]:
    """Splits at commas outside brackets and strings; an empty text gives no parts."""
    parts, depth, start, quoted = [], 0, 0, False
    for position, letter in enumerate(text):
        if letter == '"' and (position == 0 or text[position - 1] != "\\"):
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                parts.append(text[start:position])
                start = position + 1
    if text.strip():
        parts.append(text[start:])
    return parts


def array_of(x: Any) -> np.ndarray[Any, Any]:
    """``np.asarray``, with a check that an array interface does not claim more memory than its buffer has.

    :raises ValueError: it does.  Other exceptions of the object are passed on.
    """
    about = None if isinstance(x, np.ndarray | np.generic | list | tuple) else getattr(x, "__array_interface__", None)
    array = np.asarray(x)
    if not isinstance(about, Mapping) or isinstance(about.get("data"), tuple) or array.size == 0:
        return array
    buffer = np.frombuffer(x if about.get("data") is None else about["data"], np.uint8)
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(s for s in steps if s < 0) - buffer.ctypes.data
    last = array.ctypes.data + sum(s for s in steps if s > 0) + array.itemsize - buffer.ctypes.data
    if first < 0 or last > buffer.nbytes:
        raise ValueError(f"its array interface reaches from byte {first} to {last} of a buffer of {buffer.nbytes}")
    return array


def typeof(value: Any) -> Type:
    """The type of an array (anything with ``dtype`` and ``shape``: NumPy, CuPy, torch, JAX) or of a Python scalar."""
    if isinstance(value, bool):
        return Type(BOOL)
    if isinstance(value, int):
        return Type(I64)
    if isinstance(value, float):
        return Type(F64)
    try:
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            value = array_of(value)
        name, shape = str(value.dtype).removeprefix("torch."), tuple(int(s) for s in value.shape)
    except TypeRuleError:
        raise
    except Exception as error:  # objects of other libraries may raise anything
        raise TypeRuleError(
            f"a {type(value).__qualname__} has no type: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if any(size < 0 for size in shape):
        raise TypeRuleError(f"a {type(value).__qualname__} says that its shape is {list(shape)}")
    name = {"float8_e5m2": "float8_e5m2", "float4_e2m1fn_x2": "uint8"}.get(name, name)
    try:
        element = dtype(getattr(ml_dtypes, name, name))
    except TypeRuleError:
        raise TypeRuleError(
            f"an array of {value.dtype} is nothing gradc has a type for; there are {' '.join(DTYPES)}"
        ) from None
    return Type(element, shape)
