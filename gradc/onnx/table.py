"""The table of what gradc takes of ONNX: one line per operator, in the files of :mod:`gradc.onnx.operators`.

A line is the operator's name and a function of its inputs and attributes.  Parameters before the ``*`` are inputs,
those behind it attributes by their names.  An input is a :class:`~gradc.ir.node.Node`; where its parameter is annotated
``Sizes`` (a tuple of ints and dims) or ``Known`` (an array), its value has to be known when the model is read; a
``Weight`` is a node that is an input of the graph if it is an initializer, whatever its size and dtype.  A parameter
annotated ``Site`` is given the call itself.  Operators with a body of other operators that have no line are expanded.
A function that cannot take its arguments raises one of gradc's errors.

Where an operator's meaning, its inputs or its attributes changed from one opset to another so that one function cannot
say both, its line is a mapping from the opset that a form is valid from to the form's function.  What an attribute is
by default is never said twice: what a node leaves out has the default of its schema in the model's opset.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidProblem, Unsupported
from ..ir.dims import Size
from ..ir.node import Node
from . import operators

NEWEST_KNOWN = 28
"""The newest opset of ONNX's own domain whose schemas this table was held against: an operator that a later one changed
is refused, since nobody knows here what it means.
"""
MOST_STEPS = 10_000
"""Of a loop or a layer that is written out step by step, and parts of a sequence."""
Known = np.ndarray[Any, Any]
"""Values that are known when a model is read; of dtype object where sizes are among them that vary."""
Sizes = tuple[Size, ...]
Weight = Node
Forms = Callable[..., Any] | Mapping[int, Callable[..., Any]]
"""An operator's function, or its functions by the opset that each is valid from."""


def checked(name: str, value: str, values: Collection[str]) -> str:
    """The value of an attribute that is a word.

    :param name: of the attribute.
    :param values: that it may have.
    :raises InvalidProblem: it is none of them.
    """
    if value not in values:
        raise InvalidProblem(f"the {name} {value!r}; there are {', '.join(values)}")
    return value


def normalized_axis(axis: int, rank: int) -> int:
    """An axis counted from the front.

    :param axis: from the end if negative.
    :raises InvalidProblem: there is no such axis.
    """
    if not -rank <= axis < rank:
        raise InvalidProblem(f"axis {axis} of a tensor of {rank} axes")
    return axis % rank


def normalized_axes(axes: Sequence[Size], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in their order.

    :raises InvalidProblem: one does not exist, or is there twice.
    :raises Unsupported: one is a size that varies.
    """
    known = [a for a in axes if isinstance(a, int)]
    if len(known) < len([*axes]):
        raise Unsupported("an axis whose number is a size that varies")
    found = tuple(normalized_axis(a, rank) for a in known)
    if len({*found}) < len(found):
        raise InvalidProblem(f"axes {found} of a tensor of {rank} axes: one is there twice")
    return found


@dataclass(frozen=True)
class Site:
    """A call of an operator.

    :param op: the operator's name.
    :param opset: the version of its domain.
    :param results: how many of its results have a name, up to the last that has.
    :param outputs: how many results it has, named or not.
    :param draw: the key that the model's random operators read, and the stream of this one.
    """

    op: str
    opset: int
    results: int
    outputs: int
    draw: Callable[[], tuple[Node, int]]


@dataclass(frozen=True)
class Line:
    """One operator, or its form from an opset on.

    :param key: ``Add``; of another domain than ONNX's own ``com.microsoft.MatMulNBits``; ``Attention.Softmax`` in the
        body of an operator.
    :param since: the opset that this form is valid from.
    :param is_newest: whether no later opset has another form.
    :param function: gives a node, or a tuple of them.
    :param inputs: what each input is: ``"Node"``, ``"Sizes"``, ``"Known"`` or ``"Weight"``.
    :param rest: the same of all further inputs, "" if there are none.
    :param site: whether the call is its first argument.
    :param attributes: their names.
    """

    key: str
    since: int
    is_newest: bool
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    rest: str
    site: bool
    attributes: frozenset[str]


def _line(key: str, since: int, is_newest: bool, function: Callable[..., Any]) -> Line:
    parameters = list(inspect.signature(function).parameters.values())
    site = bool(parameters) and "Site" in str(parameters[0].annotation)
    inputs, rest, attributes = [], "", []
    for each in parameters[site:]:
        kind = next((name for name in ("Sizes", "Known", "Weight") if name in str(each.annotation)), "Node")
        if each.kind is each.KEYWORD_ONLY:
            attributes.append(each.name)
        elif each.kind is each.VAR_POSITIONAL:
            rest = kind
        elif each.kind is each.VAR_KEYWORD:
            raise ValueError(f"{key} does not name its attributes: {each}")
        else:
            inputs.append(kind)
    return Line(key, since, is_newest, function, tuple(inputs), rest, site, frozenset(attributes))


@functools.cache
def lines() -> Mapping[str, tuple[Line, ...]]:
    """The forms of every operator by its key, oldest first.

    :raises ValueError: two lines have one key.
    """
    found: dict[str, tuple[Line, ...]] = {}
    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        for key, forms in getattr(importlib.import_module(module.name), "LINES", {}).items():
            if key in found:
                raise ValueError(f"{key} stands twice in the table")
            each = sorted(forms.items()) if isinstance(forms, Mapping) else [(1, forms)]
            found[key] = tuple(_line(key, since, since == each[-1][0], function) for since, function in each)
    return found


def line_of(key: str, opset: int) -> Line | None:
    """The form of an operator that an opset has; None where the table has no line for it."""
    return next((line for line in reversed(lines().get(key, ())) if line.since <= opset), None)
