"""torch CPU tensors: conversion to and from NumPy arrays without copies, and interaction with autograd.

torch is never imported here: if there is a tensor, it is imported already.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradc.errors import DeviceError, InvalidProblem, NotDifferentiable

from ..torch_private import count_changes, forward_level, version_count

Array = npt.NDArray[Any]

# dtypes without a NumPy equivalent: the integer dtype of their size, and the dtype of ml_dtypes.
BITS: dict[str, tuple[str, Any]] = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "torch.float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
STORED = {np.dtype(meaning): (bits, name.removeprefix("torch.")) for name, (bits, meaning) in BITS.items()}
# Sub-byte dtypes: torch gets the values in wider dtypes.
NARROW: dict[Any, Any] = {
    np.dtype(ml_dtypes.int2): np.int8,
    np.dtype(ml_dtypes.int4): np.int8,
    np.dtype(ml_dtypes.uint2): np.uint8,
    np.dtype(ml_dtypes.uint4): np.uint8,
    np.dtype(ml_dtypes.float4_e2m1fn): np.float32,
}


_resizable: contextvars.ContextVar[bool] = contextvars.ContextVar("resizable", default=False)


@contextlib.contextmanager
def storages_stay_resizable() -> Iterator[None]:
    """A context manager: tensors are read without ``tensor.numpy()``, after which torch does not resize a storage any
    more, as FSDP does.  For callers that keep tensors between calls, not arrays over their memory.
    """
    token = _resizable.set(True)
    try:
        yield
    finally:
        _resizable.reset(token)


class _Memory:
    """A dense tensor by NumPy's array interface; an array made of it keeps the tensor."""

    def __init__(self, tensor: Any):
        self.tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": _typestr(tensor.dtype),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple([size * stride for stride in tensor.stride()]),
        }


@functools.cache
def _typestr(dtype: Any) -> str:
    """The array interface's name of a torch dtype that NumPy has."""
    return np.dtype(str(dtype).removeprefix("torch.")).str


@functools.cache
def _bits_of(dtype: Any) -> tuple[str | None, Any]:
    """The entry of a torch dtype in :data:`BITS`."""
    return BITS.get(str(dtype), (None, None))


def is_tensor(x: Any) -> bool:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def check_dense(x: Any) -> None:
    """InvalidProblem for a torch tensor whose memory is not that of its elements: sparse, quantized."""
    if x.layout is not sys.modules["torch"].strided or x.is_quantized:
        raise InvalidProblem(
            f"a torch tensor of layout {x.layout}{' (quantized)' if x.is_quantized else ''}: make it dense first"
        )


def from_tensor(torch: Any, x: Any) -> Array:
    """A CPU tensor as an array that shares its memory.

    :raises DeviceError: it is on another device.
    :raises InvalidProblem: it has no dense memory: sparse, quantized, fake (torch.compile, torch.export), wrapped by
        torch.func, freed.
    """
    if x.device.type != "cpu":
        raise DeviceError(f"a tensor on {x.device} was given to a module for the CPU")
    check_dense(x)
    try:
        dense = x.detach() if x.requires_grad else x
        if dense.is_neg() or dense.is_conj():  # lazily negated or conjugated: the memory differs
            dense = dense.resolve_conj().resolve_neg()
        bits, meaning = _bits_of(x.dtype)
        address = dense.data_ptr()
        same_bits = dense if bits is None else dense.view(getattr(torch, bits))
        array: Array = np.asarray(_Memory(same_bits)) if _resizable.get() else same_bits.numpy()
        array = array if meaning is None else array.view(meaning)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # fake tensors raise AssertionError
        raise InvalidProblem(
            f"a torch tensor of {x.dtype} ({type(x).__name__}) has no memory that NumPy can see: {error}"
        ) from error
    if array.size and not address:
        raise InvalidProblem(
            f"a torch tensor of {x.dtype} ({type(x).__name__}) has no memory: it is a stand-in for a tensor, or its"
            " storage was freed"
        )
    return array


def to_tensor(array: Array) -> Any:
    """An array as a tensor, which shares its memory if that is writable and the strides are positive; sub-byte integers
    become 8-bit integers, f4e2m1 becomes float32.
    """
    torch = sys.modules["torch"]
    if array.dtype in NARROW:
        array = array.astype(NARROW[array.dtype])
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()  # torch supports neither read-only memory nor negative strides
    if array.dtype in STORED:
        bits, name = STORED[array.dtype]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)


# -- autograd ----------------------------------------------------------------------------------------------------------


def check_unrecorded(x: Any, name: str) -> None:
    """Rejects a tensor whose gradient would be lost, because autograd does not record this call.

    :raises NotDifferentiable: it requires grad in grad mode, has a forward-mode tangent, or torch.jit.trace is active.
    """
    torch = sys.modules["torch"]
    if torch.jit.is_tracing():
        raise NotDifferentiable(
            f"{name} is traced by torch.jit.trace, which would keep this call's result as a constant: call gradc"
            " outside what is traced"
        )
    if forward_level() >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        raise NotDifferentiable(
            f"{name} has a tangent (torch.autograd.forward_ad), which this call would lose: gradc has reverse mode"
            " alone"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise NotDifferentiable(
            f"{name} is a tensor that requires grad, and autograd does not record this call: no gradient would reach it"
            " through backward() of torch. Pass x.detach(), or call under torch.no_grad(), and use the gradients that"
            " gradc gives; or make a gradc.torch.Module of it (docs/torch.md), or call it inside a"
            " torch.autograd.Function"
        )


def detached(x: Any) -> Any:
    """A tensor that requires grad, detached; anything else unchanged."""
    return x.detach() if is_tensor(x) and x.requires_grad else x


def borrowed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """(arrays with tensors detached, the version counter of each tensor), to detect in-place changes later.

    Inference tensors, and arrays other than tensors, have no version counter.
    """
    torch = sys.modules.get("torch")
    held, counts = dict(arrays), {}
    if torch is not None:
        for name, x in arrays.items():
            if isinstance(x, torch.Tensor):
                if x.requires_grad:
                    held[name] = x.detach()
                if not x.is_inference():
                    counts[name] = version_count(x)
    return held, counts


def written(*memory: Any) -> None:
    """Increments the version counters of tensors that were written in place, so that autograd detects it."""
    torch = sys.modules.get("torch")
    tensors = [x for x in memory if isinstance(x, torch.Tensor)] if torch is not None else []
    if tensors:
        count_changes(tensors)
