"""Variants: modules compiled for arrays whose axes have another memory order than in the graph, which they read without
a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import GradcError, OverlappingOperands
from ..interp import bind_dims
from ..ir.types import Type
from ..process.ieee import plain
from ..runtime.backend import Backend
from ..runtime.cuda.on_device import DeviceArray, DeviceArrays
from ..runtime.executable import Executable
from ..runtime.host.arrays import Arguments, Results, overlap, permuted
from ..runtime.host.tensors import written
from ..runtime.located import located, unordered
from .residuals import Orders, Residuals

Array = np.ndarray[Any, Any]
WORTH = 1 << 20
"""Bytes; for smaller arrays no variant is compiled, they are copied."""
MOST = 8
"""The maximum number of variants of a module; arrays with further orders are copied."""


def order_of(array: Array) -> tuple[int, ...] | None:
    """The axes from slowest to fastest in memory, if the array is dense and not row-major; else None."""
    if array.flags.c_contiguous or array.ndim < 2:
        return None
    strides = array.strides
    real = [a for a, n in enumerate(array.shape) if n != 1]  # the stride of an axis of size 1 is arbitrary
    places = iter(sorted(real, key=lambda a: -strides[a]))
    order = tuple(next(places) if n != 1 else a for a, n in enumerate(array.shape))
    return order if array.transpose(order).flags.c_contiguous else None


def orders_of(inputs: Arguments, types: Mapping[str, Type], dims: Mapping[str, int]) -> Orders:
    """The memory orders of the inputs that are not row-major; empty if the call is invalid (the module raises the
    error).

    :param inputs: including defaults.  :param types: the declared types.  :param dims: sizes given explicitly.
    """
    unordered_inputs = {
        name: array
        for name, value in inputs.items()
        if (array := unordered(value)) is not None and array.nbytes >= WORTH
    }
    orders = {name: order for name, array in unordered_inputs.items() if (order := order_of(array)) is not None}
    if not orders or inputs.keys() != types.keys():
        return {}
    if any(unordered_inputs[name].dtype != types[name].dtype.np for name in orders):
        return {}
    try:
        bind_dims(types, {name: np.shape(value) for name, value in inputs.items()}, dims)
    except GradcError:
        return {}
    return orders


def apply_layout(inputs: Arguments, orders: Orders) -> Results:
    """The inputs, with those that have an order permuted to the axes of the variant's graph."""
    return {name: permuted(value, orders[name]) if name in orders else value for name, value in inputs.items()}


def undo_layout(gradients: Arguments, orders: Orders) -> Results:
    """The gradients permuted back to the axes of the graph; they have the memory order of their inputs."""
    return {
        name: permuted(value, np.argsort(orders[name]).tolist()) if name in orders else value
        for name, value in gradients.items()
    }


class Targets:
    """The caller's ``out=`` for a variant's backward: arrays with the variant's memory order are written by the
    kernels, gradients are copied into the others afterwards.

    :param backward: of the module that was called.
    :param read: arrays that the call reads, by name.
    :ivar given: the ``out=`` of the variant's call.
    :ivar later: the arrays to copy into, by input.
    """

    def __init__(
        self,
        backward: Executable,
        read: Arguments,
        residuals: Residuals,
        out: Any,
        accumulate: Any,
        names: Mapping[str, str],
    ):
        self.given, self.later, self.accumulate, self.adding = out, {}, accumulate, set[str]()
        if not isinstance(out, Mapping) or not out.keys() <= names.keys():
            return  # the variant raises the error
        arrays = {name: located(value) for name, value in out.items()}
        self.later = {
            name: out[name]
            for name, array in arrays.items()
            if name in residuals.orders and order_of(array) != residuals.orders[name]
        }
        if not self.later:
            self.given = apply_layout(out, residuals.orders)
            return
        adding = backward._adding(accumulate, arrays)
        own = {name: arrays[name] for name in self.later}
        for name, array in own.items():
            for other in arrays.keys() - own.keys():
                if overlap(array, arrays[other]):
                    raise OverlappingOperands(f"out[{name!r}] shares memory with out[{other!r}]")
        shapes = {name: backward.outputs[name].concrete(residuals.dims) for name in map(names.__getitem__, own)}
        backward._check_outputs({n: located(v) for n, v in read.items()}, shapes, {names[n]: a for n, a in own.items()})
        self.given = apply_layout({n: v for n, v in out.items() if n not in own}, residuals.orders) or None
        self.adding, self.accumulate = adding & own.keys(), adding - own.keys()

    def finish(self, gradients: Results, backend: Backend, stream: Any = None) -> Results:
        """The gradients; those of ``out=`` are in the caller's arrays."""
        library_stream = backend.stream(None, gradients.values())  # the current stream of the arrays' library
        call_stream = library_stream if stream is None else backend.stream(stream, gradients.values())
        if self.later and call_stream != library_stream and isinstance(backend, DeviceArrays):
            backend.device.follow(library_stream, call_stream)
        for name, value in self.later.items():
            target, source = located(value), located(gradients[name])
            if isinstance(target, DeviceArray):
                value[...] = value + gradients[name] if name in self.adding else gradients[name]
            elif name in self.adding:
                with plain():
                    np.add(target, source, out=target)
            else:
                np.copyto(target, source)
            written(value)
            gradients[name] = value
        if self.later and call_stream != library_stream and isinstance(backend, DeviceArrays):
            backend.device.follow(call_stream, library_stream)
        return gradients
