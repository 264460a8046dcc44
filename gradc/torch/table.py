"""The table of what gradc takes of torch: one line per ATen overload, in the files of :mod:`gradc.torch.aten`.

A line is the overload's name and a function of its arguments, as the graph has them: tensors are nodes, sizes are
sizes, dtypes are gradc's, tuples stand for lists; what says where a result lies (device, layout, memory format) is left
out.  An overload that stands here is not decomposed.  A function that cannot take its arguments raises one of gradc's
errors, whose text is the reason that a report gives.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import aten

Promotion = Literal["", "result", "opmath", "operands"]


@dataclass(frozen=True)
class Line:
    """One overload.

    :param key: ``aten.add.Tensor``.
    :param function: of its arguments; gives a node, or a tuple of them where the overload gives several.
    :param promotion: to which dtype tensors are cast first: to the ``"result"``'s; in ``"opmath"``, f32 where a 16-bit
        result is made with numbers, which torch does not round to 16 bits there, and else to the result's; to torch's
        ``result_type`` of the ``"operands"`` (comparisons); or not at all.
    """

    key: str
    function: Callable[..., Any]
    promotion: Promotion = ""

    @property
    def overload(self) -> Any:
        """The overload in this torch; None where there is none of that name."""
        at: Any = torch.ops
        for name in self.key.split("."):
            at = getattr(at, name, None)
        return at


def to_result(function: Callable[..., Any]) -> tuple[Callable[..., Any], Promotion]:
    """A line whose operands are first cast to the result's dtype."""
    return function, "result"


def in_opmath(function: Callable[..., Any]) -> tuple[Callable[..., Any], Promotion]:
    """A line as :func:`to_result`, whose numbers are not rounded to 16 bits."""
    return function, "opmath"


def to_common(function: Callable[..., Any]) -> tuple[Callable[..., Any], Promotion]:
    """A line whose operands are first cast to their common dtype."""
    return function, "operands"


@functools.cache
def lines() -> Mapping[str, Line]:
    """Every line by its key.

    :raises ValueError: two lines have one key.
    """
    found: dict[str, Line] = {}
    for module in pkgutil.iter_modules(aten.__path__, f"{aten.__name__}."):
        for key, value in getattr(importlib.import_module(module.name), "LINES", {}).items():
            function, promotion = value if isinstance(value, tuple) else (value, "")
            if key in found:
                raise ValueError(f"{key} stands twice in the table")
            found[key] = Line(key, function, promotion)
    return found


def line_of(overload: Any) -> Line | None:
    """The line of an overload, also of one that was registered just now."""
    return lines().get(str(overload))


def draws(overload: Any) -> bool:
    """Whether an overload of ATen's draws random numbers, and does nothing that gradc could take."""
    seeded = torch.Tag.nondeterministic_seeded in overload.tags
    return seeded and overload.namespace == "aten" and line_of(overload) is None


def is_kept(overload: Any) -> bool:
    """Whether a normal form keeps an overload whole: one with a line, and one that draws random numbers, as torch then
    draws the same in eager mode.
    """
    return line_of(overload) is not None or torch.Tag.nondeterministic_seeded in overload.tags
