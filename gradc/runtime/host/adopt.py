"""Conversions of arguments whose dtype differs from the input's: Python numbers and sub-byte values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...errors import InvalidProblem
from ...ir.types import Type
from ...process.ieee import plain
from .arrays import Kind

Array = np.ndarray[Any, Any]


def adopt(key: str, array: Array, type_: Type, kind: Kind, on_host: bool) -> Array:
    """The argument in the input's dtype: Python numbers are converted, 8-bit integers are accepted for sub-byte dtypes.

    :param on_host: whether the values can be checked now.
    :raises InvalidProblem: a number or a value is out of range, or the dtype differs otherwise.
    """
    if (
        kind is Kind.SCALAR
        and not (array.dtype.kind == "f" and not type_.dtype.is_float)
        and not (array.dtype.kind == "b" and type_.dtype.kind != "b")
    ):
        if type_.dtype.is_integer and not type_.dtype.range[0] <= int(array) <= type_.dtype.range[1]:
            raise InvalidProblem(
                f"{key} is {type_}, and {int(array)} is outside {type_.dtype.range[0]} to {type_.dtype.range[1]}"
            )
        return _number(array.tobytes(), array.dtype, type_.dtype.np)
    if type_.dtype.is_integer and type_.dtype.bits < 8 and array.dtype in (np.dtype(np.int8), np.dtype(np.uint8)):
        low, high = type_.dtype.range
        if not on_host:
            return array.view(type_.dtype.np)  # unchecked: kernels read only the low bits
        if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
            raise InvalidProblem(
                f"{key} is {type_}: a value of {int(array.min())} or {int(array.max())} is outside {low} to {high}"
            )
        return array.astype(type_.dtype.np)
    raise InvalidProblem(f"{key} is {type_}, got an array of {array.dtype}{list(array.shape)}; convert it first")


@functools.lru_cache(maxsize=1024)
@plain()
def _number(number: bytes, dtype: np.dtype[Any], wanted: np.dtype[Any]) -> Array:
    """A Python number as an array; cached, because programs are called with the same numbers repeatedly."""
    array = np.frombuffer(number, dtype).reshape(()).astype(wanted)
    array.flags.writeable = False
    return array
