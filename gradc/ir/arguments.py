"""Error messages for op calls with wrong arguments: missing, unknown or too many."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import TypeRuleError
from .node import Node
from .operands import adopt

MEANT = {
    "dim": "axis",
    "dims": "axis",
    "axes": "axis",
    "keepdim": "keepdims",
    "input": "x",
    "other": "y",
    "size": "shape",
}
"""Argument names of other libraries -> gradc's, for suggestions."""


def meant(name: str | None, known: Iterable[str]) -> str:
    """``; did you mean ...?`` if ``name`` is similar to a known name, or another library's name for one; else ""."""
    names = list(known)
    near = [MEANT[name]] if name in MEANT and MEANT[name] in names else difflib.get_close_matches(name or "", names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def signature_text(signature: inspect.Signature) -> str:
    """``(x, axis=None, keepdims=False)``"""
    return str(
        signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
            return_annotation=signature.empty,
        )
    )


def lifted(
    op: str, signature: inspect.Signature, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """The arguments of a failed call with arrays and numbers converted to nodes; None if they were nodes already.

    :raises TypeRuleError: an argument is missing, unknown, or one too many.
    """
    try:
        bound = signature.bind(*positional, **keywords)
    except TypeError as error:
        unknown = next((name for name in keywords if name not in signature.parameters), None)
        raise TypeRuleError(f"{op}{signature_text(signature)}: {error}{meant(unknown, signature.parameters)}") from None
    values = {
        p.name: bound.arguments[p.name]
        for p in signature.parameters.values()
        if p.annotation in ("Node", Node) and p.name in bound.arguments
    }
    if all(isinstance(value, Node) for value in values.values()):
        return None
    bound.arguments.update(zip(values, adopt(op, list(values.values()), broadcasting=False), strict=True))
    return bound
