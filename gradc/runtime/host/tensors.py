"""torch's tensors on the host: their memory as NumPy arrays and back, and what autograd knows of them.

torch itself is never imported here: a tensor cannot exist before somebody has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradc.errors import DeviceError, InvalidProblem, NotDifferentiable

Array = npt.NDArray[Any]

# dtypes that NumPy has no name for: the integers of their size, and what the bits mean.
BITS: dict[str, tuple[str, Any]] = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "torch.float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
STORED = {np.dtype(meaning): (bits, name.removeprefix("torch.")) for name, (bits, meaning) in BITS.items()}
# One narrow value to a byte: torch gets the values.
NARROW: dict[Any, Any] = {
    np.dtype(ml_dtypes.int2): np.int8,
    np.dtype(ml_dtypes.int4): np.int8,
    np.dtype(ml_dtypes.uint2): np.uint8,
    np.dtype(ml_dtypes.uint4): np.uint8,
    np.dtype(ml_dtypes.float4_e2m1fn): np.float32,
}


def is_tensor(x: Any) -> bool:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def from_tensor(torch: Any, x: Any) -> Array:
    """A tensor of the CPU as an array over the same memory.

    :raises DeviceError: it lies elsewhere.
    :raises InvalidProblem: it has no memory of its own that holds its elements: sparse, quantized, fake (torch.compile,
        torch.export), wrapped by torch.func, freed.
    """
    if x.device.type != "cpu":
        raise DeviceError(f"a tensor on {x.device} was given to a module for the CPU")
    if x.layout is not torch.strided or x.is_quantized:
        raise InvalidProblem(
            f"a torch tensor of layout {x.layout}{' (quantized)' if x.is_quantized else ''}: make it dense first"
        )
    try:
        dense = x.detach() if x.requires_grad else x
        if dense.is_neg() or dense.is_conj():  # not in the memory
            dense = dense.resolve_conj().resolve_neg()
        name = str(x.dtype)
        bits, meaning = BITS.get(name, (None, None))
        address = dense.data_ptr()
        array: Array = dense.numpy() if bits is None else dense.view(getattr(torch, bits)).numpy().view(meaning)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # AssertionError: a fake tensor's
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
    """An array as a tensor: the same memory if it is writable and its strides are positive; narrow integers become
    8-bit integers, f4 float32.
    """
    torch = sys.modules["torch"]
    if array.dtype in NARROW:
        array = array.astype(NARROW[array.dtype])
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch has neither
    if array.dtype in STORED:
        bits, name = STORED[array.dtype]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)


# -- autograd ----------------------------------------------------------------------------------------------------------


def check_unrecorded(x: Any, name: str) -> None:
    """Refuse a tensor whose gradient would be lost: autograd is recording, and knows nothing of this call.

    :raises NotDifferentiable: it requires grad, and grad mode is on; it has a tangent of forward mode; torch.jit.trace
        is at work.
    """
    torch = sys.modules["torch"]
    if torch.jit.is_tracing():
        raise NotDifferentiable(
            f"{name} is traced by torch.jit.trace, which would keep this call's result as a constant: call gradc"
            " outside what is traced"
        )
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None:
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
    """A tensor that requires grad as one over the same memory that does not; anything else as it is."""
    return x.detach() if is_tensor(x) and x.requires_grad else x


def borrowed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Arrays to be read later: tensors without their autograd, and how often each was changed in place so far, by
    torch's count.

    Inference tensors have no count, nor has anything but a tensor.
    """
    torch = sys.modules.get("torch")
    held, counts = dict(arrays), {}
    if torch is not None:
        for name, x in arrays.items():
            if isinstance(x, torch.Tensor):
                if x.requires_grad:
                    held[name] = x.detach()
                if not x.is_inference():
                    counts[name] = x._version
    return held, counts


def written(*memory: Any) -> None:
    """Tell torch that tensors were written in place: whoever keeps one for a backward finds out."""
    for x in memory:
        if is_tensor(x) and not x.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(x)
