"""Decompositions of ``_foreach_*``, of which optimizers are made: one call per tensor, which regions fuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..runtime.torch_private import overload_schema

aten = torch.ops.aten

_SAME = (
    "abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp lgamma log"
    " log10 log1p log2 max mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc copy"
).split()
_NAMED: dict[str, Callable[..., Any]] = {
    **{name: getattr(aten, name) for name in _SAME},
    "addcdiv": lambda x, y, z, value=1: aten.addcdiv(x, y, z, value=value),
    "addcmul": lambda x, y, z, value=1: aten.addcmul(x, y, z, value=value),
    "maximum": lambda x, y: aten.maximum(x, y) if isinstance(y, torch.Tensor) else aten.clamp_min(x, y),
    "minimum": lambda x, y: aten.minimum(x, y) if isinstance(y, torch.Tensor) else aten.clamp_max(x, y),
    "norm": lambda x, ord=2, dtype=None: aten.linalg_vector_norm(x, ord, dtype=dtype),
    "zero": lambda x: aten.zeros_like(x),
}
"""What each op does with one tensor."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch has of these ops, functional, by overload."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, single in _NAMED.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in [] if packet is None else [getattr(packet, each) for each in packet.overloads()]:
            schema = overload_schema(overload)
            numbers_in_tensor = name.startswith("addc") and schema.overload_name == "Tensor"  # read on the host
            if not schema.is_mutable and not numbers_in_tensor:
                found[overload] = _over_lists(schema, single)
    return found


def _over_lists(schema: Any, single: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists of a function of their elements; what is no list, each element gets."""
    keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        given, lists = _arguments(schema, args, kwargs)
        count = len(given[lists[0]])
        each = [{n: v[i] if n in lists else v for n, v in given.items()} for i in range(count)]
        return [
            single(*(v for n, v in call.items() if n not in keywords), **{n: call[n] for n in call if n in keywords})
            for call in each
        ]

    return run


def one_by_one(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keyword arguments of the calls, of lists of one element each, that eager mode runs a call as, in order; empty
    where an overload is not of ``_foreach_*``.
    """
    schema = overload_schema(function)
    if not schema.name.startswith("aten::_foreach_"):
        return []
    given, lists = _arguments(schema, args, kwargs)
    return [{n: v[i : i + 1] if n in lists else v for n, v in given.items()} for i in range(len(given[lists[0]]))]


def _arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments by name, and the names of those that are lists."""
    given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    return given, [a.name for a in schema.arguments if a.name in given and isinstance(a.type, torch.ListType)]
