"""Axis maps of movement ops: which result axis each operand axis becomes, and the rules (``Op.replace_axis``) that
rewrite a movement op so that one axis of its result is replaced by several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, memoized, product, same
from ...ir.node import Node
from ...ir.op import AxisReplacement


@memoized
def axis_groups(before: tuple[Size, ...], after: tuple[Size, ...]) -> Sequence[tuple[range, range]]:
    """Partitions the axes of two shapes into the shortest consecutive runs whose sizes have equal products:
    [2,3,N] and [6,N] give ({0,1}, {0}) and ({2}, {1}).

    :raises TypeRuleError: the shapes have different products.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        lengths = None
        for total in range(1, len(before) + len(after) - i - j + 1):
            for di in range(max(0, total - len(after) + j), min(total, len(before) - i) + 1):
                if same(product(before[i : i + di]), product(after[j : j + total - di])):
                    lengths = (di, total - di)
                    break
            if lengths:
                break
        if lengths is None:  # a size of 0 closed a run too early: merge the remaining axes into the runs before it
            old, new = range(i, len(before)), range(j, len(after))
            while not same(product(before[a] for a in old), product(after[a] for a in new)):
                if not groups:
                    raise TypeRuleError(f"shapes {before} and {after} have no common runs")
                left, right = groups.pop()
                old, new = range(left.start, old.stop), range(right.start, new.stop)
            return (*groups, (old, new))
        groups.append((range(i, i + lengths[0]), range(j, j + lengths[1])))
        i, j = i + lengths[0], j + lengths[1]
    return tuple(groups)


def reshape_axes(node: Node) -> tuple[int | None, ...]:
    """For each operand axis of a reshape, the result axis that is identical to it; None if it is split or merged."""
    before, after = node.operands[0].shape, node.shape
    answer: list[int | None] = [None] * len(before)
    for old, new in axis_groups(before, after):
        kept_old, kept_new = [a for a in old if before[a] != 1], [a for a in new if after[a] != 1]
        if len(kept_old) == 1 and len(kept_new) == 1:
            answer[kept_old[0]] = kept_new[0]
    return tuple(answer)


def replaced(shape: Sequence[Any], axis: int, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """The tuple ``shape`` with the entry at ``axis`` replaced by the entries ``sizes``."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def replace_axis_beside(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    """Of an op that works elementwise along all axes but its attribute ``axis``."""
    own = node.attrs["axis"]
    if axis == own:
        return None
    return (axis,) * len(node.operands), {**node.attrs, "axis": own if own < axis else own + len(sizes) - 1}


def replace_axis_of_reshape(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    maps = reshape_axes(node)
    if axis not in maps:
        return None
    return (maps.index(axis),), {"shape": replaced(node.shape, axis, sizes)}


def replace_axis_of_transpose(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement:
    moved = node.attrs["axes"][axis]
    after = [
        [moved + i for i in range(len(sizes))] if a == moved else [a if a < moved else a + len(sizes) - 1]
        for a in node.attrs["axes"]
    ]
    return (moved,), {"axes": tuple(a for run in after for a in run)}


def replace_axis_of_broadcast(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement:
    before, lead = node.operands[0].shape, node.rank - node.operands[0].rank
    own = axis - lead
    operand = before if own < 0 else own if before[own] != 1 else replaced(before, own, (1,) * len(sizes))
    return (operand,), {"shape": replaced(node.shape, axis, sizes)}


def replace_axis_of_slice(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    if node.shape[axis] != node.operands[0].shape[axis]:
        return None
    fresh = {"start": (0,) * len(sizes), "limit": sizes, "step": (1,) * len(sizes)}
    return (axis,), {name: replaced(node.attrs[name], axis, part) for name, part in fresh.items()}


def replace_axis_of_pad(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    width = node.attrs["pad_width"]
    return (
        ((axis,), {**node.attrs, "pad_width": replaced(width, axis, ((0, 0),) * len(sizes))})
        if width[axis] == (0, 0)
        else None
    )
