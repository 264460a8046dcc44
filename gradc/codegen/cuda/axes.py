"""Declarations of the axes of a place, from its number among all of theirs."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.dims import product
from ...ir.statement import Axis
from ..declarations import Declaration
from ..index import size


def declared(line: str) -> Declaration:
    """``const ix rows = N;`` declares ``rows``."""
    return Declaration(line.partition(" = ")[0].rpartition(" ")[2].lstrip("*"), line)


def axis_declarations(axes: Sequence[Axis], linear: str) -> list[Declaration]:
    """The axes of a place whose number among all of theirs, row-major, is ``linear``."""
    declarations = []
    for i, (name, extent) in enumerate(axes):
        below = size(product(n for _, n in axes[i + 1 :]))
        divided = f" / ({below})" if below != "1" else ""
        declarations.append(declared(f"const ix {name} = {linear}{divided}{f' % ({size(extent)})' if i else ''};"))
    return declarations
