"""Variants: arrays whose axes lie in another order than the graph's are read where they lie, by a module compiled for that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InvalidProblem
from .runtime.arrays import permuted, to_numpy

Array = np.ndarray[Any, Any]
Orders = dict[str, tuple[int, ...]]
WORTH = 1 << 20
"""Bytes from which on a variant's compilation is worth what it saves: below, the array is copied."""
MOST = 8
"""Variants of one module; what comes in yet another order is copied."""


def order_of(array: Array) -> tuple[int, ...] | None:
    """The axes from slowest to fastest if that is another order than the array's own, and nothing lies between; else None."""
    if array.flags.c_contiguous or array.ndim < 2:
        return None
    strides = array.strides
    real = [a for a, n in enumerate(array.shape) if n != 1]  # the stride of an axis of size 1 says nothing
    places = iter(sorted(real, key=lambda a: -strides[a]))
    order = tuple(next(places) if n != 1 else a for a, n in enumerate(array.shape))
    return order if array.transpose(order).flags.c_contiguous else None


def orders_of(inputs: Mapping[str, Any], donated: Sequence[str] = ()) -> Orders:
    """The inputs that lie in an order of their own, and it."""
    found: Orders = {}
    for name, value in inputs.items():
        if name in donated or not getattr(value, "ndim", 0) or (value.flags.c_contiguous if isinstance(value, np.ndarray) else getattr(value, "is_contiguous", bool)()):
            continue  # the common case costs next to nothing
        array, _ = to_numpy(value)
        order = order_of(array) if array.nbytes >= WORTH else None
        if order is not None:
            found[name] = order
    return found


def laid(inputs: Mapping[str, Any], orders: Orders) -> dict[str, Any]:
    """The same arrays, those with an order as the variant names their axes."""
    return {name: permuted(value, orders[name]) if name in orders else value for name, value in inputs.items()}


def restored(gradients: Mapping[str, Any], orders: Orders) -> dict[str, Any]:
    """Gradients with the graph's axes again; they lie in memory as their inputs do."""
    return {name: permuted(value, np.argsort(orders[name]).tolist()) if name in orders else value for name, value in gradients.items()}


class Targets:
    """The caller's ``out=`` for a variant: what lies in the input's order is written by the kernels, the rest after them.

    :ivar given: the variant's ``out=``.  :ivar later: arrays in the graph's order, by the name of their gradient.
    """

    def __init__(self, out: Any, orders: Orders, accumulate: Any):
        self.given, self.later = out, {}
        names = {accumulate} if isinstance(accumulate, str) else accumulate
        self.accumulate = names
        self.adding: set[str] = set()
        if not isinstance(out, Mapping):
            return
        self.later = {n: v for n, v in out.items() if n in orders and _writable(v)}
        self.given = {n: permuted(v, orders[n]) if n in orders else v for n, v in out.items() if n not in self.later}
        if self.later and (names is True or not isinstance(names, bool)):
            self.adding = set(self.later) if names is True else self.later.keys() & set(names)
            self.accumulate = {n for n in (self.given if names is True else names) if n not in self.later}

    def finish(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """The gradients, with the caller's arrays where he gave some."""
        for name, value in self.later.items():
            target, source = to_numpy(value)[0], to_numpy(gradients[name])[0]
            if target.shape != source.shape or target.dtype != source.dtype:
                raise InvalidProblem(f"out[{name!r}] is {target.dtype}{list(target.shape)}, the gradient {source.dtype}{list(source.shape)}")
        for name, value in self.later.items():
            target, source = to_numpy(value)[0], to_numpy(gradients[name])[0]
            if name in self.adding:
                np.add(target, source, out=target)
            else:
                np.copyto(target, source)
            gradients[name] = value
        return gradients


def _writable(value: Any) -> bool:
    array = to_numpy(value)[0]
    return bool(array.flags.c_contiguous and array.flags.writeable)
