"""Casts as torch defines them, where they differ from gradc's: to floats of 8 bits that do not hold the value.

Releases of torch differ there, so torch is asked.  A float beyond the range of an integer type is undefined in torch
(machines differ); gradc's answer is the nearest integer of the type.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import DType
from ...ops.elementwise.float8 import E8M0, LEAST, SUBNORMAL
from ...ops.elementwise.pointwise import LIMITS
from ...ops.rules import converted
from ..sizes import TORCH_DTYPES

FLOATS8 = (*LIMITS, E8M0.name)


def number(value: Any, dtype: DType) -> Any:
    """A number as it stands in a tensor of a dtype: a float of 8 bits as torch makes it, others as they are."""
    if dtype.name not in FLOATS8:
        return value
    return float(torch.tensor(value, dtype=torch.float32).to(TORCH_DTYPES[dtype]).to(torch.float32))


@functools.cache
def _saturates(dtype: DType) -> bool:
    """Whether the torch at hand makes the largest number of what is beyond a float of 8 bits.

    :raises Unsupported: it has a conversion that :func:`gradc.ops.to_float8` does not know.
    """
    if dtype is E8M0:
        known = {-1.0: 1.0, 0.0: LEAST, LEAST: LEAST, 1.25 * LEAST: SUBNORMAL, 1.5: 2.0, math.inf: math.nan}
        saturates = False
    else:
        most = LIMITS[dtype.name]
        saturates = number(math.inf, dtype) == most
        beyond = most if saturates else dtype.np.type(math.inf)
        known = {most: most, 2 * most: beyond, math.inf: beyond}
    for value, wanted in known.items():
        found = number(value, dtype)
        if found != wanted and not (math.isnan(found) and math.isnan(wanted)):
            raise Unsupported(f"a cast to {TORCH_DTYPES[dtype]} by torch {torch.__version__}, of {value} {found}")
    return saturates


def cast(x: Node, dtype: DType) -> Node:
    """x in a dtype.  A float of 8 bits has a gradient of its own format, to which eager mode rounds cotangents."""
    if dtype.name not in FLOATS8 or x.dtype is dtype:
        return converted(x, dtype)
    return ops.to_float8(x, dtype=dtype, saturate=_saturates(dtype))
