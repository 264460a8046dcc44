"""A call's inputs, as they were written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradc.errors import InvalidProblem


def by_name(what: str, names: Collection[str], inputs: Any, extra: Sequence[Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of the mapping that was given first and of the keywords.

    :param what: who is called.  :param names: of its inputs.  :param extra: what else was given without a name: nothing may be.
    :raises InvalidProblem: something has no name.
    """
    if extra or not (inputs is None or isinstance(inputs, Mapping)):
        given = ", ".join(type(x).__name__ for x in ((inputs, *extra) if inputs is not None or extra else ()))
        example = ", ".join(f"{name}=..." if name.isidentifier() else f"**{{{name!r}: ...}}" for name in names)
        raise InvalidProblem(f"{what} takes its inputs by name, {what}({example}), or as one dict of them; it was given {given} without names")
    return {**(inputs or {}), **more}
