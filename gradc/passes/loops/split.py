"""Loop splitting: one axis as two."""

from __future__ import annotations

from dataclasses import replace

from ...ir.kernel import Kernel
from ...ir.statement import Axis, Index
from .legality import refuse, require_open

PART = "r"
"""Ends the name of the inner axis."""


def split(kernel: Kernel, axis: str, step: int) -> tuple[Kernel, Axis]:
    """cols(w: 12)  ->  cols(w: 4, wr: 3), where w was w*3 + wr; an outer axis of one iteration is left out.

    :return: the kernel, and its inner axis, which stands right after the outer one.
    :raises IllegalMove: the axis has no constant size that ``step`` divides, or is scanned.
    """
    require_open("split", kernel)
    axes = dict((*kernel.rows, *kernel.cols))
    size, part = axes[axis], f"{axis}{PART}"
    if not isinstance(size, int) or step < 1 or size % step or size == 0:
        refuse("split", kernel, f"{axis} has {size} iterations, which are no whole blocks of {step}")
    if part in axes:
        refuse("split", kernel, f"there is an axis {part}")
    if kernel.scans and axis in dict(kernel.cols):
        refuse("split", kernel, f"it scans {axis}")
    outer = ((axis, size // step),) if size > step else ()
    place = {axis: Index(0, ((axis, step), (part, 1))) if outer else Index.of(part)}

    def of(all_: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(new for a in all_ for new in ((*outer, (part, step)) if a[0] == axis else (a,)))

    body = tuple(s.altered(index=tuple(i.compose(place) for i in s.index)) for s in kernel.body)
    return replace(kernel, rows=of(kernel.rows), cols=of(kernel.cols), body=body), (part, step)
