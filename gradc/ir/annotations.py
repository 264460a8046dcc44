"""The values that an attribute of an op takes, from the annotation in its type rule."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

import numpy as np

from ..errors import TypeRuleError
from .dims import Dim
from .types import DType, dtype

Converter = Callable[[Any], Any]
"""value -> its canonical form, or :data:`REFUSED`."""


class _Refused:
    def __repr__(self) -> str:
        return "REFUSED"


REFUSED = _Refused()
"""What a converter gives for a value that its annotation does not allow."""


def describe(annotation: Any) -> str:
    """An annotation in words (``"a tuple of an int"``), for errors and docs."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        if set(args) == {int, Dim}:
            return "a size"
        return " or ".join(describe(a) for a in args)
    if origin is tuple:
        return f"a tuple of {describe(args[0])}"
    return {
        DType: "a dtype",
        type(None): "None",
        int: "an int",
        float: "a float",
        bool: "a bool",
        str: "a str",
        Dim: "a dim",
    }.get(annotation, str(annotation))


def converter(annotation: Any) -> Converter:
    """The function that checks a value and brings it into canonical form: made once per attribute, called per node."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return lambda value: value
    if origin is Literal:
        return lambda value: value if isinstance(value, (str, int, types.NoneType)) and value in args else REFUSED
    if origin in (Union, types.UnionType):
        return _first_of([converter(a) for a in args])
    if origin is tuple:
        return _each(converter(args[0]))
    return _PLAIN.get(annotation) or (lambda value: value if isinstance(value, annotation) else REFUSED)


def _first_of(converters: list[Converter]) -> Converter:
    def convert(value: Any) -> Any:
        for each in converters:
            canonical = each(value)
            if canonical is not REFUSED:
                return canonical
        return REFUSED

    return convert


def _each(element: Converter) -> Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, (tuple, list)):
            return REFUSED
        canonical = tuple([element(v) for v in value])
        return REFUSED if any(v is REFUSED for v in canonical) else canonical

    return convert


def _dtype(value: Any) -> Any:
    if value is None or isinstance(value, (int, float, tuple, list)):
        return REFUSED
    try:
        return dtype(value)
    except TypeRuleError:
        return REFUSED


def _bool(value: Any) -> Any:
    return bool(value) if isinstance(value, (bool, np.bool_)) else REFUSED


def _int(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return REFUSED
    return int(value) if abs(int(value)) < 2**63 else REFUSED


def _float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (float, int, np.floating, np.integer)):
        return REFUSED
    # an int beyond i64 is accepted only if it is exactly representable: -2^63 - 1 must not become -2^63
    if isinstance(value, int) and abs(value) >= 2**63 and float(value) != value:
        return REFUSED
    return float(value)


_PLAIN: dict[Any, Converter] = {
    DType: _dtype,
    bool: _bool,
    int: _int,
    float: _float,
    types.NoneType: lambda value: None if value is None else REFUSED,
}
