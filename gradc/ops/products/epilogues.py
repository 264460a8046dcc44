"""The functions of :class:`gradc.ir.epilogue.Epilogue` written in ops: what they compute, and what statements of a
kernel are compared with.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...ir.epilogue import Function
from ...ir.graph import input_node
from ...ir.node import Node
from ...ir.types import Type
from ...ir.types import dtype as dtype_of
from ...ir.walk import topological
from ..elementwise.activations import gelu

Array = np.ndarray[Any, Any]
VALUE, ARGUMENT = "value", "argument"
"""The inputs of a function: the sum that it is applied to, and what ``gelu_grad`` takes the derivative at."""


@functools.cache
def function_of(name: Function, dtype: str) -> Node:
    """``gelu`` of VALUE, by tanh; ``gelu_grad``: VALUE times gelu's derivative at ARGUMENT.  Of one element, in
    primitives.
    """
    value, argument = (input_node(each, Type(dtype_of(dtype), ())) for each in (VALUE, ARGUMENT))
    if name == "gelu":
        result: Node = gelu.decompose(value, approximate="tanh")
        return result
    assert gelu.vjp is not None
    (result,) = gelu.vjp(value, gelu.decompose(argument, approximate="tanh"), argument, approximate="tanh")
    return result


def applied(name: Function, value: Array, argument: Array | None = None) -> Array:
    """A function of every element, in the value's dtype, f32 or wider."""
    values: dict[Node, Any] = {}
    given = {VALUE: value, ARGUMENT: argument}
    with np.errstate(all="ignore"):
        for node in topological([function_of(name, "f32" if value.dtype == np.float32 else "f64")]):
            if node.op.name == "input":
                values[node] = given[dict(node.attrs)["name"]]
            elif node.op.name == "constant":
                values[node] = value.dtype.type(dict(node.attrs)["value"][0])
            else:
                values[node] = node.op.reference(*(values[o] for o in node.operands), **dict(node.attrs))
    return np.asarray(values[node], value.dtype)
