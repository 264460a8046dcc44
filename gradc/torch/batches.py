"""A function of tensors called once for each element of a batch that ``vmap`` laid over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["one_by_one"]

_LIBRARY = torch.library.Library("gradc", "FRAGMENT")  # lives as long as its ops are to exist

Function = Callable[..., Sequence[torch.Tensor]]

_running: dict[int, Function] = {}
_keys = itertools.count()


def one_by_one(function: Function, tensors: Sequence[torch.Tensor], results: int) -> list[torch.Tensor]:
    """What a function gives of tensors that hold a batch: of torch.func's ``vmap``, of that behind
    ``is_grads_batched=True``, or of several, one in another.

    The function is called inside an op that has no batching rule: torch calls such an op with each element, on
    tensors that have memory, stacks the results, and records each call where autograd records.

    :param function: of as many tensors; gives a sequence of tensors.
    :param results: how many it gives, 1 or more.
    """
    key = next(_keys)
    _running[key] = function
    try:
        found = _op(len(tensors), results)(key, *tensors)
    finally:
        del _running[key]
    return [found] if results == 1 else list(found)


@functools.cache
def _op(tensors: int, results: int) -> Any:
    """The op of so many tensors: torch's loop takes no lists."""
    name = f"one_by_one_{tensors}_{results}"
    operands = "".join(f", Tensor x{i}" for i in range(tensors))
    _LIBRARY.define(f"{name}(int key{operands}) -> ({', '.join(['Tensor'] * results)})")
    for dispatch_key in ("Autograd", "CompositeExplicitAutograd"):
        _LIBRARY.impl(name, _call, dispatch_key)
    return getattr(torch.ops.gradc, name).default


def _call(key: int, *tensors: torch.Tensor) -> Any:
    found = tuple(_running[key](*tensors))
    return found[0] if len(found) == 1 else found
