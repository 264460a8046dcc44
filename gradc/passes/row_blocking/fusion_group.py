"""Which steps of a program share a loop over blocks of rows: those around a product with wide rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...ir.dims import Size, evaluate, nominal, product, same
from ...ir.kernel import Call, Kernel, Program
from ...ir.statement import Stmt
from ..loops.fission import fission
from ..loops.legality import attempt
from .tiling import Tiling, starts_with, tile
from .wide_products import Sizes


class Placement(NamedTuple):
    """Numbers of a program's other steps: those that run before a loop, those after it, and of the latter those that
    steps of the loop depend on: with one of these the loop is not legal.
    """

    before: list[int]
    after: list[int]
    between: list[int]


@dataclass(frozen=True)
class FusionGroup:
    """Steps of a program that a loop over blocks of rows runs, and the buffers of which it needs a block only.

    :param shape: the sizes of the loop's outer axes, and of the rows.
    :param columns: elements of a row of the product that the loop is made for.
    :param dims: sizes at which elements are counted.
    :param tilings: the steps, by their numbers.
    :param blocks: the buffers with such columns.
    :param by: positions along the first axis of a batch, where these are what the loop goes over, in place of rows.
    :param most: rows that a block has at most; None: as many as their columns leave room for.
    :param tiled: the loop gets blocks of columns: its blocks have all of them, and what sums over them is none.
    """

    program: Program
    shape: tuple[Size, ...]
    columns: Size
    dims: Sizes
    tilings: Mapping[int, Tiling]
    blocks: tuple[str, ...] = ()
    by: Size | None = None
    most: Size | None = None
    tiled: bool = False

    @property
    def steps(self) -> dict[int, Kernel | Call]:
        """The steps by their numbers, in their order: no others can be tiled."""
        steps = ((n, self.program.steps[n]) for n in sorted(self.tilings))
        return {n: step for n, step in steps if isinstance(step, Kernel | Call)}

    # -- growth --------------------------------------------------------------------------------------------------------

    @classmethod
    def grow_from(
        cls,
        program: Program,
        seed: str,
        dims: Sizes,
        by: Size | None = None,
        most: Size | None = None,
        tiled: bool = False,
    ) -> FusionGroup | None:
        """A product, or an operand of one  ->  the largest group found that has a block of it; None where no two steps
        can share a loop.

        :param by: of a batch's first axis, a block; None: a block of rows.  :param most, tiled: see the class.
        """
        shape = program.types[seed].shape
        lead = len(shape) - 1 if by is None else 1
        empty = cls(program, shape[:lead], product(shape[lead:]), dims, {}, by=by, most=most, tiled=tiled)
        group = empty.with_block(seed)
        refused: set[str] = set()
        while group is not None:
            names = (b for step in group.steps.values() for b in (*step.reads, *step.writes))
            name = next((b for b in names if b not in refused and group.is_candidate(b)), None)
            if name is None:
                break
            larger = group.with_block(name)
            if larger is None:
                refused.add(name)
            group = larger or group
        return group if group is not None and len(group.tilings) > 1 else None

    def is_candidate(self, name: str) -> bool:
        """Whether a buffer is a temp, no block yet, whose rows have half the columns that the loop is made for."""
        buffer, lead = self.program.buffer[name], len(self.shape)
        if name in self.blocks or buffer.kind != "temp" or buffer.alias or buffer.type.rank <= lead:
            return False
        rest = product(buffer.type.shape[lead:])
        if self.tiled:
            summed = (step for step in self.steps.values() if isinstance(step, Call) and {*self.blocks} & {*step.reads})
            return same(rest, self.columns) and all(name not in step.writes for step in summed)
        sizes = nominal([rest, self.columns], self.dims)
        return 2 * evaluate(rest, sizes) >= evaluate(self.columns, sizes)

    def with_block(self, name: str) -> FusionGroup | None:
        """The group with every step that accesses a temp, of which a block is left; None if that is not legal."""
        if any(b.alias == name for b in self.program.buffers):
            return None
        tilings = dict(self.tilings)
        for number, step in enumerate(self.program.steps):
            if name not in (*step.reads, *step.writes):
                continue
            tiling = tile(step, name, self.shape)
            if tiling is None or tilings.setdefault(number, tiling) != tiling:
                return None
        group: FusionGroup | None = replace(self, tilings=tilings)
        while group is not None and group.reads_own_rows():
            between = group.placement().between
            if not between:
                return replace(group, blocks=(*group.blocks, name))
            group = group.with_steps(between) or group.hoisted(between) or group.split(between)
        return None

    def with_steps(self, numbers: Iterable[int]) -> FusionGroup | None:
        """The group with more steps; None unless each of them can be tiled by a buffer that has the rows."""
        tilings = dict(self.tilings)
        for number in numbers:
            step = self.program.steps[number]
            names = dict.fromkeys((*step.reads, *step.writes))
            found = (tile(step, name, self.shape) for name in names if self.has_rows(name))
            tiling = next((t for t in found if t is not None and not t.sums_rows), None)
            if tiling is None:
                return None
            tilings[number] = tiling
        return replace(self, tilings=tilings)

    def hoisted(self, numbers: Iterable[int]) -> FusionGroup | None:
        """The group after fission: what the loop writes and other steps read is computed before the loop, if it depends
        on nothing that the loop writes (a statistic's reciprocal, next to the exponentials).
        """
        written = {b: n for n in self.tilings for b in self.accessed(n)[1]}
        asked = dict.fromkeys(b for n in numbers for b in sorted(self.accessed(n)[0]) if b in written)
        return self.after_fission([(written[name], name) for name in asked], set(written))

    def split(self, numbers: Iterable[int]) -> FusionGroup | None:
        """The group after fission of steps that run after the loop: what the loop reads of theirs is computed before
        it, if it depends on nothing that the loop writes (the sum of all rows' weights, next to that of their losses).
        """
        read = {b for n in self.tilings for b in self.accessed(n)[0]}
        made = {b for n in (*self.tilings, *self.placement().after) for b in self.accessed(n)[1]}
        return self.after_fission([(n, b) for n in numbers for b in sorted(self.accessed(n)[1] & read)], made)

    def after_fission(self, asked: Iterable[tuple[int, str]], made: set[str]) -> FusionGroup | None:
        """The group in a program with steps split in two, the first of which stores a buffer and is not of the loop;
        None if a step cannot be split.

        :param asked: numbers of steps, and buffers.
        :param made: the buffers that these may not depend on.
        """
        program, tilings, moved = self.program, dict(self.tilings), dict[int, int]()
        for first, name in asked:
            number = first + sum(by for n, by in moved.items() if n <= first)
            apart = attempt(fission, program, number, name)
            if apart is None or made & set(map(program.root, apart.steps[number].reads)):
                return None
            program = apart
            tilings = {n + (n >= number): tiling for n, tiling in tilings.items()}
            moved[first] = moved.get(first, 0) + 1
        return replace(self, program=program, tilings=tilings) if moved else None

    # -- legality ------------------------------------------------------------------------------------------------------

    def has_rows(self, name: str) -> bool:
        """Whether a buffer's first axes are those of the loop."""
        shape, lead = self.program.types[name].shape, len(self.shape)
        return len(shape) >= lead and all(map(same, shape[:lead], self.shape))

    def reads_own_rows(self) -> bool:
        """Whether all that a step of the loop reads of another one is in the rows of the same iteration."""
        program = self.program
        written = Counter(program.root(b) for step in self.steps.values() for b in step.writes)
        read = {program.root(b) for step in self.steps.values() for b in step.reads}
        for number, step in self.steps.items():
            tiling = self.tilings[number]
            for access in step.accesses:
                root = program.root(access.buffer)
                if root not in written or (isinstance(access, Stmt) and access.op == "store"):
                    continue
                carries = tiling.carries(step, access.buffer)
                alone = written[root] == 1 and root not in read  # no other step of the loop accesses what it writes
                columns = isinstance(step, Call) and access is step.out and alone
                other_rows = not (carries or columns or starts_with(access, tiling.axes))
                if other_rows or access.buffer != root or not program.types[root].dtype.is_float:
                    return False
                if not carries and any(t.carries(program.steps[n], root) for n, t in self.tilings.items()):
                    return False  # a sum is not complete before the last iteration
        return True

    def placement(self) -> Placement:
        """Where the steps that are not of the loop run."""
        first, last = min(self.tilings), max(self.tilings)
        early, late = [*range(first)], list[int]()
        made, read = set[str](), set[str]()  # by the loop's steps so far; what is made from that is made after them
        between: dict[int, None] = {}
        for number in range(first, last + 1):
            reads, writes = self.accessed(number)
            before = [n for n in late if self.accessed(n)[1] & (reads | writes) or self.accessed(n)[0] & writes]
            if number in self.tilings:
                between |= dict.fromkeys(before)
                made |= writes
                read |= reads
            elif before or made & (reads | writes) or read & writes:
                late.append(number)
            else:
                early.append(number)
        return Placement(early, [*late, *range(last + 1, len(self.program.steps))], [*between])

    def accessed(self, number: int) -> tuple[set[str], set[str]]:
        """The buffers that a step reads, and that it writes."""
        step, root = self.program.steps[number], self.program.root
        return {root(b) for b in step.reads}, {root(b) for b in step.writes}
