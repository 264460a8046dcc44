"""Masks that are true wherever their kernel runs.

A vector is loaded under a mask lane by lane, and the mask is made for each row; what needs none is loaded as it is.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.dims import floordiv, same
from ...ir.kernel import Kernel
from ...ir.statement import Stmt


def without_certain_masks(kernel: Kernel) -> Kernel:
    """rows(i: 20*N) { load x[clamp(k[i], N)] where 0 <= clamp(k[i], N) < N }  ->  load x[clamp(k[i], N)]

    A place that is clamped lies in its axis if that has elements.  It has some where the place differs along an axis of
    a multiple of its size; a place that is a sum over such an axis is there without any.
    """
    certain = {s.name for s in kernel.body if s.op == "in_bounds" and _is_certain(s, kernel)}
    if not certain:
        return kernel
    body = [s.altered(where="") if s.where in certain else s for s in kernel.body]
    used = {name for s in body for name in s.uses}
    return replace(kernel, body=tuple(s for s in body if s.name not in certain - used))


def _is_certain(mask: Stmt, kernel: Kernel) -> bool:
    place = kernel.stmts.get(mask.index[0].variable or "")
    size = mask.attr("hi")
    clamped = (
        place is not None and place.op == "clamp_index" and mask.attr("lo") == 0 and same(place.attr("size"), size)
    )
    if place is None or not clamped or size == 0:
        return False
    extents = (extent for axis, extent in (*kernel.rows, *kernel.cols) if axis in kernel.levels[place.name])
    return any(same(floordiv(extent, size) * size, extent) for extent in extents)
