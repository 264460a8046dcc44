"""Sums in fixed point of values that are scattered one by one: which of them lie together, and are added together.

L2 takes an atomic instruction of a warp apart into its sectors of 32 bytes, four sums.  Where positions are data, the
lanes of a warp are in a sector each, while the taps of a point along the last axis, and its channels, are neighbours:
the sums of a few channels lie beside each other, and the lanes of a warp exchange what they add, so that neighbouring
lanes add to neighbours.  Integers have the same sum in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...analysis.strategies import STRATEGIES
from ...ir.dims import Size, floordiv, product
from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.walk import backward_slice
from ..index import flatten

MOST = 16
"""Values of a lane that are added together at most: each takes 8 or 16 bytes of shared memory."""


@dataclass(frozen=True)
class Interleaved:
    """The order of a result's sums where ``width`` places on an axis are innermost.

    :param axis: of the result.
    :param width: divides its size.
    :param plane: elements of the axes behind it.
    """

    axis: int
    width: int
    plane: Size


def interleaved(accums: Iterable[Stmt], shape: Sequence[Size]) -> Interleaved | None:
    """The order in which accums into one result add to neighbours: each stands there for all places that differ on an
    axis, another than the last, by constants.  None: in that of the result.
    """
    accums = [*accums]
    for axis in range(len(shape) - 1):
        consts = {s.index[axis].const for s in accums}
        width = len(consts)
        if width < 2 or consts != {*range(width)}:
            continue
        factors = [c for s in accums for _, c in s.index[axis].terms]
        if not all(isinstance(c, int) and c % width == 0 for c in (*factors, shape[axis])):
            continue
        found: dict[object, set[Size]] = {}
        for s in accums:
            found.setdefault(_but_for(s, axis), set()).add(s.index[axis].const)
        if all(each == consts for each in found.values()):
            return Interleaved(axis, width, product(shape[axis + 1 :]))
    return None


def _but_for(s: Stmt, axis: int) -> object:
    """What an accum's place is made from, but for a constant on an axis."""
    return (*s.index[:axis], s.index[axis].terms, *s.index[axis + 1 :])


def place_of_sum(index: Sequence[Index], shape: Sequence[Size], order: Interleaved | None) -> Index:
    """The number of the sum that an index stands for."""
    if order is None:
        return flatten(index, shape)
    axis, width = order.axis, order.width
    entry, size = index[axis], shape[axis]
    outer = Index(floordiv(entry.const, width), tuple((v, floordiv(c, width)) for v, c in entry.terms))
    inner = Index(entry.const - outer.const * width)
    return flatten(
        [*index[:axis], outer, *index[axis + 1 :], inner],
        [*shape[:axis], floordiv(size, width), *shape[axis + 1 :], width],
    )


def fixed_results(kernel: Kernel) -> list[str]:
    """The results whose sums are in fixed point."""
    fixed = {name for name, strategy in STRATEGIES.items() if strategy.atomics == "fixed point"}
    return [buffer for buffer, strategy in kernel.strategy if strategy in fixed]


def taps(group: Sequence[Stmt], places: Sequence[Index]) -> list[Stmt]:
    """Of accums that are added together, to sums of these numbers: the first of each tap, if all have equally many that
    add to one sum after another, under one mask; else each is one by itself.
    """

    def follows(k: int) -> bool:
        return group[k].where == group[k - 1].where and places[k] == places[k - 1] + 1

    firsts = [k for k in range(len(group)) if k == 0 or not follows(k)]
    each = len(group) // len(firsts)
    return [group[k] for k in firsts] if firsts == [*range(0, len(group), each)] else [*group]


def batches(groups: Sequence[tuple[Stmt, ...]]) -> tuple[tuple[tuple[Stmt, ...], ...], ...]:
    """Groups one after another of as many accums into one result, of which a lane exchanges all values at once."""
    made: list[tuple[tuple[Stmt, ...], ...]] = []
    for group in groups:
        before = made[-1] if made else ()
        alike = before and (before[0][0].buffer, len(before[0])) == (group[0].buffer, len(group))
        if alike and (len(before) + 1) * len(group) <= MOST:
            made[-1] = (*before, group)
        else:
            made.append((group,))
    return tuple(made)


def elements_as_rows(kernel: Kernel) -> Kernel:
    """rows(n) cols(w) { accum y[n, %t0] <- ...; accum y[n, %t1] <- ... }  ->  rows(n, w) cols() { ... }, where accums
    go to neighbouring sums: each thread of a warp has an element then, and takes part in exchanges.
    """
    groups = neighbours(kernel)
    if not groups:
        return kernel
    body: dict[int, Stmt] = {}  # by identity: accums of equal values may be equal
    alone = [(s,) for s in kernel.accums if not any(s is a for group in groups for a in group)]
    stores = [(s,) for s in kernel.body if s.op == "store"]  # before lanes wait for each other: all loads are under way
    for group in [*stores, *groups, *alone]:  # a value directly before it is added: few are alive at a time
        for s in (*backward_slice(kernel.body, (u for a in group for u in a.uses)), *group):
            body.setdefault(id(s), s)
    return replace(kernel, rows=(*kernel.rows, *kernel.cols), cols=(), body=tuple(body.values()))


def neighbours(kernel: Kernel) -> list[tuple[Stmt, ...]]:
    """The accums in fixed point of an element that go to neighbouring sums, where there are several: those which differ
    in the last entry of their index, and by a constant in another; in the order of the sums.  None where a kernel does
    anything else than to add so and to store elements.
    """
    results = fixed_results(kernel)
    adds = kernel.accums and all(s.buffer in results for s in kernel.accums)
    if not adds or any(s.op in REDUCTIONS or s.op in ("scan", "search", "check") for s in kernel.body):
        return []
    groups: dict[object, list[Stmt]] = {}
    for s in kernel.accums:
        groups.setdefault((s.buffer, *(i.terms for i in s.index[:-1])), []).append(s)
    made: list[tuple[Stmt, ...]] = []
    for group in groups.values():
        lasts = list(dict.fromkeys(s.index[-1] for s in group))
        group.sort(key=lambda s, lasts=lasts: (lasts.index(s.index[-1]), [i.const for i in s.index[:-1]]))  # type: ignore[misc]
        made += [tuple(group[at : at + MOST]) for at in range(0, len(group), MOST)]
    return [group for group in made if len(group) > 1]
