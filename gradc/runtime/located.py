"""Memory location and memory order of arrays on the host or a GPU, without reading them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..process.forks import held_off
from .host.arrays import Array, to_numpy


def located(x: Any) -> Array:
    """The memory of an array, on the host or on a GPU, as a NumPy array whose elements must not be read."""
    with held_off:
        from .cuda.on_device import describe

    array = describe(x)
    return to_numpy(x)[0] if array is None else array


def all_ordered(values: Iterable[Any]) -> bool:
    """Whether :func:`unordered` finds none among these; what most calls give is decided without it."""
    torch = sys.modules.get("torch")
    for x in values:
        try:
            if torch is not None and isinstance(x, torch.Tensor) and x.is_contiguous():
                continue
        except Exception:  # sparse, or inside a transform of torch.func
            pass
        if unordered(x) is not None:
            return False
    return True


def unordered(x: Any) -> Array | None:
    """The memory of an array that is not in row-major order (as :func:`located`); None for a row-major one or for what
    is no array.  The common case is fast.
    """
    if isinstance(x, np.ndarray):
        return None if x.flags.c_contiguous or type(x) is not np.ndarray else x
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_contiguous()):
            return None
        if not hasattr(x, "shape") or getattr(getattr(x, "flags", None), "c_contiguous", False):
            return None
        array = located(x)
    except Exception:
        return None  # the call raises the error
    return None if array.flags.c_contiguous else array
