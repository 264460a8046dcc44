"""Calls that differ from an earlier one in the addresses of their arrays alone, which are not checked and bound again.

What an earlier call was found to be stands under everything that the checks look at: the arrays' types, dtypes, shapes,
strides and devices, and the sizes.  What is left to each call is what depends on addresses: that there is memory, its
alignment, and that nothing that is written overlaps anything else.  Whatever is not as simple as that (numbers, copies,
captures, donated inputs, an error) is a call like the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...codegen.cuda.launch import LaunchPlan
from ..backend import BoundCall
from ..host.arrays import Arguments, Kind, address_of
from ..recent import Recent
from ..torch_private import forward_level
from .on_device import DeviceArrays, is_cupys

KEPT = 64
"""Calls that are remembered."""


@dataclass(frozen=True)
class Known:
    """A checked call.

    :param dims: the value of every symbol.
    :param kind: the library of the results' arrays.
    :param places: of inputs and then given outputs: the root, and the sizes of the array and of an element in bytes.
    :param read: how many of them are inputs.
    :param fresh: of outputs to allocate: name, root, shape, dtype.
    """

    plan: LaunchPlan
    dims: dict[str, int]
    kind: Kind
    places: tuple[tuple[str, int, int], ...]
    read: int
    fresh: tuple[tuple[str, str, tuple[int, ...], Any], ...]


class Repeated(NamedTuple):
    """A call, described.

    :param key: everything but its addresses.
    :param known: what such a call was found to be.
    :param addresses: of inputs and then given outputs.
    """

    key: tuple[Any, ...]
    known: Known | None
    addresses: list[int]
    stream: int


class RepeatedCalls:
    """The calls of a program that are known.

    :param inputs: the program's.
    """

    def __init__(self, backend: DeviceArrays, inputs: Iterable[str]):
        self.backend, self.inputs = backend, tuple(inputs)
        self._known: Recent[tuple[Any, ...], Known] = Recent(KEPT)

    def described(self, inputs: Arguments, out: Any, dims: Any, stream: Any) -> Repeated | None:
        """A call as it may be known; None if it has anything that needs a closer look, errors included."""
        if len(inputs) != len(self.inputs) or not (out is None or type(out) is dict):
            return None
        torch = sys.modules.get("torch")
        tensors = False
        key: list[Any] = []
        addresses: list[int] = []
        try:
            given = [inputs[name] for name in self.inputs]
            if out:
                given += out.values()
                key += out
            for x in given:
                if torch is not None and isinstance(x, torch.Tensor):
                    if (x.requires_grad and torch.is_grad_enabled()) or x.is_neg():
                        return None
                    tensors = True
                    key += (type(x), x.dtype, x.shape, x.stride(), x.device)
                    addresses.append(x.data_ptr())
                elif is_cupys(type(x)):
                    key += (type(x), x.dtype, x.shape, x.strides, x.device.id)
                    addresses.append(x.data.ptr)
                else:
                    return None
            if tensors and (torch.jit.is_tracing() or forward_level() >= 0):  # type: ignore[union-attr]
                return None
            for name, size in (dims or {}).items():
                if type(size) is not int:
                    return None
                key += (name, size)
            called = tuple(key)
            known = self._known.get(called)
        except Exception:  # of foreign objects: the closer look says what is wrong
            return None
        at = self.backend.stream(stream, given[: len(self.inputs)] or given)
        return None if self.backend.capturing(at) else Repeated(called, known, addresses, at)

    @staticmethod
    def fits(call: Repeated, known: Known) -> bool:
        """Whether every array has memory and is aligned, and none that is written overlaps another."""
        ranges = []
        for address, (_, nbytes, unit) in zip(call.addresses, known.places, strict=True):
            if address % unit or (not address and nbytes):  # 0: a tensor's storage was freed
                return False
            ranges.append((address, address + nbytes))
        for i in range(known.read, len(ranges)):
            start, end = ranges[i]
            for other_start, other_end in ranges[:i]:
                if start < other_end and other_start < end:
                    return False
        return True

    def remember(self, call: Repeated, bound: BoundCall, roots: Mapping[str, str]) -> None:
        """Keeps a call that was checked and launched if others may repeat it.

        :param roots: of the outputs.
        """
        if bound.noncontiguous or bound.numbers or bound.add_to or bound.captured:
            return
        names = list(bound.outputs)[: len(call.addresses) - len(self.inputs)]  # those of out=, in its order
        arrays = [*(bound.arrays[name] for name in self.inputs), *(bound.outputs[name] for name in names)]
        if [address_of(array) for array in arrays] != call.addresses:
            return  # empty, or converted
        places = zip((*self.inputs, *(roots[name] for name in names)), arrays, strict=True)
        self._known[call.key] = Known(
            bound.plan,
            bound.dims,
            bound.kind,
            tuple((root, array.nbytes, array.itemsize) for root, array in places),
            len(self.inputs),
            tuple((name, roots[name], a.shape, a.dtype) for name, a in bound.outputs.items() if name not in names),
        )
