"""Error messages for op calls with wrong arguments: missing, unknown or too many."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from ..errors import TypeRuleError
from .dims import Dim
from .node import Node
from .operands import adopt

SYNONYMS = (
    ("axis", "dim", "axes", "dims"),
    ("axis0", "dim0"),
    ("axis1", "dim1"),
    ("axis2", "dim2"),
    ("keepdims", "keepdim"),
    ("ddof", "correction"),
    ("x", "input"),
    ("y", "other"),
    ("shape", "size"),
    ("p", "ord"),
)
"""Names that NumPy, torch and ONNX give to one argument: an op takes each of them for the one that it has."""


def renamed(op: str, known: Collection[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call under the op's own names.

    :param known: the op's own names, which mean themselves.
    :raises TypeRuleError: one argument is given under two names.
    """
    found: dict[str, Any] = {}
    for name, value in keywords.items():
        group = next((names for names in SYNONYMS if name in names), ())
        ours = name if name in known else next((own for own in group if own in known), name)
        if ours in found:
            one, other, *_ = (given for given in keywords if given == name or given in group)
            raise TypeRuleError(f"{op}: {one} and {other} are one argument, {ours}; give it once")
        found[ours] = value
    return found


def separate(
    op: str, positional: tuple[Any, ...], keywords: Mapping[str, Any], behind: Sequence[str], first: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the operands one by one that may be one list or tuple, as NumPy and torch take them.

    :param behind: the attributes behind the operands, integers, which then have a position.
    :param first: how many attributes stand before the operands.
    :raises TypeRuleError: something else stands behind a list of traced values, or an attribute is given twice.
    """
    operands, given = positional[first : first + 1], positional[first + 1 :]
    if not (operands and isinstance(operands[0], tuple | list)):
        return positional, dict(keywords)
    if len(given) > len(behind) or not all(isinstance(n, Integral) for n in given):
        if any(isinstance(value, Node) for value in operands[0]):
            may = f"{', '.join(behind)} by position may be" if behind else "nothing is"
            raise TypeRuleError(f"{op}: operands are given one by one or in one list or tuple, behind which {may}")
        return positional, dict(keywords)  # the list is an array, one of several
    named = dict(zip(behind, given, strict=False))
    twice = named.keys() & keywords.keys()
    if twice:
        raise TypeRuleError(f"{op}: {min(twice)} is given twice")
    return (*positional[:first], *operands[0]), {**keywords, **named}


def meant(name: str | None, known: Iterable[str]) -> str:
    """A question at the end of an error, where a name is close to one that is known."""
    near = difflib.get_close_matches(name or "", list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _as_one_tuple(op: str, signature: inspect.Signature, positional: Sequence[Any]) -> str:
    """What to write instead, at the end of an error, where sizes or axes were given one by one."""
    last = len(signature.parameters) - 1
    numbers = positional[last:]
    if len(numbers) < 2 or not all(isinstance(n, int | Dim) and not isinstance(n, bool) for n in numbers):
        return ""
    *names, name = signature.parameters
    written = ", ".join((*names, f"({', '.join(map(str, numbers))})"))
    return f"; {name} is one argument: {op}({written})"


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
        hint = meant(unknown, signature.parameters) or _as_one_tuple(op, signature, positional)
        raise TypeRuleError(f"{op}{signature_text(signature)}: {error}{hint}") from None
    values = {
        p.name: bound.arguments[p.name]
        for p in signature.parameters.values()
        if p.annotation in ("Node", Node) and p.name in bound.arguments
    }
    if all(isinstance(value, Node) for value in values.values()):
        return None
    bound.arguments.update(zip(values, adopt(op, list(values.values()), broadcasting=False), strict=True))
    return bound
