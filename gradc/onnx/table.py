"""The table of what gradc takes of ONNX: one line per operator, in the files of :mod:`gradc.onnx.operators`.

A line is the operator's name and a function of its inputs and attributes.  Parameters before the ``*`` are inputs,
those behind it attributes by their names.  An input is a :class:`~gradc.ir.node.Node`; where its parameter is annotated
``Sizes`` (a tuple of ints and dims) or ``Known`` (an array), its value has to be known when the model is read; a
``Weight`` is a node that is an input of the graph if it is an initializer, whatever its size and dtype.  A parameter
annotated ``Site`` is given the call itself.  Operators with a body of other operators that have no line are expanded.
A function that cannot take its arguments raises one of gradc's errors.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.dims import Size
from ..ir.node import Node

FAMILIES = (
    "pointwise",
    "shapes",
    "indexing",
    "reductions",
    "products",
    "windows",
    "resizing",
    "normalizations",
    "quantized",
    "recurrent",
    "losses",
    "regions",
    "random",
)

MOST_STEPS = 10_000
"""Of a loop or a layer that is written out step by step, and parts of a sequence."""
Known = np.ndarray[Any, Any]
"""Values that are known when a model is read; of dtype object where sizes are among them that vary."""
Sizes = tuple[Size, ...]
Weight = Node


@dataclass(frozen=True)
class Site:
    """A call of an operator.

    :param op: the operator's name.
    :param opset: the version of its domain.
    :param results: how many of its results have a name, up to the last that has.
    :param draw: the key that the model's random operators read, and the stream of this one.
    """

    op: str
    opset: int
    results: int
    draw: Callable[[], tuple[Node, int]]


@dataclass(frozen=True)
class Line:
    """One operator.

    :param key: ``Add``; of another domain than ONNX's own ``com.microsoft.MatMulNBits``; ``Attention.Softmax`` in the
        body of an operator.
    :param function: gives a node, or a tuple of them.
    :param inputs: what each input is: ``"Node"``, ``"Sizes"``, ``"Known"`` or ``"Weight"``.
    :param rest: the same of all further inputs, "" if there are none.
    :param site: whether the call is its first argument.
    :param attributes: their names.
    """

    key: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    rest: str
    site: bool
    attributes: frozenset[str]


def _line(key: str, function: Callable[..., Any]) -> Line:
    parameters = list(inspect.signature(function).parameters.values())
    site = bool(parameters) and "Site" in str(parameters[0].annotation)
    inputs, rest, attributes = [], "", []
    for each in parameters[site:]:
        kind = next((name for name in ("Sizes", "Known", "Weight") if name in str(each.annotation)), "Node")
        if each.kind is each.KEYWORD_ONLY:
            attributes.append(each.name)
        elif each.kind is each.VAR_POSITIONAL:
            rest = kind
        else:
            inputs.append(kind)
    return Line(key, function, tuple(inputs), rest, site, frozenset(attributes))


@functools.cache
def lines() -> Mapping[str, Line]:
    """Every line by its key.

    :raises ValueError: two lines have one key.
    """
    found: dict[str, Line] = {}
    for family in FAMILIES:
        for key, function in importlib.import_module(f".operators.{family}", __package__).LINES.items():
            if key in found:
                raise ValueError(f"{key} stands twice in the table")
            found[key] = _line(key, function)
    return found
