"""What a call does on a GPU, as data: the launches and products of a Program for one set of dims, over parts of its
memory.

Everything here follows from shapes alone; nothing is known of where memory lies.  A runtime binds the roots to
addresses and runs the steps in order, now or into a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ...analysis.chunks import GPU_WORKERS, MOST_PARTIALS
from ...analysis.lifetimes import offsets
from ...ir.dims import evaluate
from ...ir.kernel import Call, Kernel, Loop, Program, alternatives, taken
from ...ir.statement import Operand
from ..index import flatten
from .actions import (
    ALIGN,
    FLAG,
    FLAG_WORDS,
    U8,
    U32,
    U64,
    WORKSPACE,
    Action,
    Convolution,
    Launch,
    Library,
    Part,
    Product,
    Strided,
    align,
    chunks,
)
from .batches import MOST_BLOCKS, alone, started_together, together
from .calls import CALLS
from .choose_mapping import MAPPINGS
from .finished_rows import launched
from .index_bound import HEAD_ROOM, LIMIT
from .kernel import SCANNED, CudaKernel, Stage, own_dims
from .mapping import THREADS, Extents
from .products import gated
from .render import rebind
from .row_sort import TREE, RowSort
from .tiles.canonical import canonical

MOST_STRIPS = 1024
"""Strips of all rows that are split."""
BATCH_BYTES = 1 << 28
"""Scratch memory of steps that run together: those that need more have enough to do one after another."""
SCAN_BLOCKS = 2 * GPU_WORKERS // THREADS
"""Of a scan for the largest value, whose threads go on to further rows: some 8 for each multiprocessor."""


@dataclass(frozen=True)
class Sizes:
    """A kernel's numbers for one set of dims.

    :param chunk: rows (or positions) per task; columns, where rows are cut up or in strips.
    :param scratch: bytes.
    :param strips_per_row: where rows are split; 0: they are not.
    :param index_bound: no offset that its functions compute is larger, whatever the launch.
    :param sort: of the rows by their keys, if there is one.
    """

    dims: tuple[int, ...]
    rows: int
    chunk: int
    tasks: int
    scratch: int
    strips_per_row: int = 0
    index_bound: int = 0
    sort: RowSort | None = None

    @property
    def chunks(self) -> int:
        """Of its rows."""
        return chunks(self.rows, self.chunk)

    def wide(self, stage: Stage, blocks: int, threads: int) -> bool:
        """Whether so many blocks of a stage need offsets of 64 bits: nothing proves that 32 are enough."""
        grid = blocks * threads
        looped = self.rows + SCANNED * grid // stage.width if stage.kind == "scan" else 0
        return max(self.index_bound, grid, looped) >= LIMIT

    def count(self, stage: Stage) -> int:
        """Tasks of a stage whose number depends on the chunk."""
        if stage.kind in ("part", "last"):
            return self.rows * (self.strips_per_row if stage.kind == "part" else min(self.strips_per_row, 1))
        groups = self.chunks // TREE
        return (self.tasks if self.strips_per_row == 0 else 0) if stage.kind != "tree" else groups if groups > 1 else 0


def sizes_of(kernel: CudaKernel, dims: Mapping[str, int]) -> Sizes:
    """What a launch needs to know, from shapes alone; ``dims`` by the names of the kernel's own text."""
    rows, columns, chunked = (max(0, evaluate(x, dims)) for x in (kernel.rows, kernel.columns, kernel.chunked))
    keys = evaluate(kernel.keys, dims) if kernel.keys is not None else 0
    tiles = chunks(columns, kernel.tile) if kernel.tile else 1
    width = next(stage.width for stage in kernel.stages if stage.kind == "rows")
    n, mapping = Extents(rows, columns, chunked, tiles, width, GPU_WORKERS), MAPPINGS[kernel.mapping]
    chunk = max(mapping.chunk(kernel, n), chunks(chunked * evaluate(kernel.private, dims), MOST_PARTIALS))
    tasks = mapping.task_count(kernel, n, chunk)
    strips = 0
    if kernel.split_rows and rows < mapping.few_rows and columns > mapping.long_row:
        chunk = align(max(mapping.strip, chunks(columns * max(rows, 1), MOST_STRIPS)))
        strips = chunks(columns, chunk)
    scratch = len(kernel.split_rows) * align(16 * rows * strips)
    sort = RowSort(rows, keys, kernel.groups, kernel.masked, kernel.in_order) if kernel.keys is not None else None
    if sort is not None:
        scratch += sort.bytes
    for count, each in kernel.scratch:
        scratch += align(chunks(chunked, chunk) * evaluate(count, dims) * each)
    for count in kernel.fixed:
        scratch += align(8 * evaluate(count, dims)) + align(4)
    for count in kernel.f32_staged:
        scratch += align(4 * evaluate(count, dims))
    if sort is not None:
        scratch += align(4 * sort.counts)
    arrays = [chunks(chunked, chunk) * evaluate(count, dims) for count, _ in kernel.scratch] + [
        evaluate(count, dims) for count in (*kernel.fixed, *kernel.f32_staged)
    ]
    ends = (chunked + (2 * TREE + 1) * chunk, columns + 2 * chunk if strips else 0, rows * strips, keys + 2, *arrays)
    bound = max(*ends, index_bound_of(kernel, dims)) + HEAD_ROOM
    return Sizes(
        tuple(dims[f"{d}"] for d in own_dims(kernel)),
        rows,
        chunk,
        tasks,
        scratch,
        strips,
        bound,
        sort,
    )


def index_bound_of(kernel: CudaKernel, dims: Mapping[str, int]) -> int:
    """The largest of a kernel's bounds; sizes of 0 count as 1, as :mod:`gradc.codegen.cuda.index_bound` has them."""
    ones = {name: max(value, 1) for name, value in dims.items()}
    return max(evaluate(bound, ones) for bound in kernel.index_bounds)


@dataclass(frozen=True)
class Run:
    """One execution of a kernel or of a library call.

    :param step: a kernel, a call, or a loop that is one kernel.
    :param number: of its step.
    :param dims: the sizes, and what a loop that it is in binds for one block.
    :param scratch: where its scratch memory begins, in bytes behind that of all.
    """

    step: Kernel | Call | Loop
    number: int
    dims: Mapping[str, int]
    scratch: int = 0


def runs_of(number: int, step: Kernel | Call | Loop, dims: Mapping[str, int]) -> Iterator[Run]:
    """What a step executes, in order: a loop goes over its blocks on the host.  The first block of a position writes
    what the others add to.
    """
    if not isinstance(step, Loop) or step.tile is not None:
        yield Run(step, number, dims)
        return
    rows = evaluate(step.rows[1], dims)
    for position in step.positions(dims):
        first = step.is_last(position, rows)
        for item in step.steps:
            item = replace(item, add=False) if isinstance(item, Call) and first else item
            yield Run(item, number, {**dims, **position})


class LaunchPlan:
    """A Program's steps for one set of dims.

    :ivar steps: one kernel, call or loop for each step of the program, :ivar actions: and what they start: the first of
        steps that run together for all of them.
    :ivar runs: what they execute, :ivar started: and what each of these starts.
    :ivar workspace: bytes: temps, the widest kernel's scratch (``scratch_size`` bytes from
        ``scratch_start`` on), the flag, the library's own (``library``).
    :ivar checks: the steps that look for bad indices.
    :ivar flag: the words that every kernel looks at: all ones while nothing is wrong; none without checks.
    :ivar kept: outputs that a library writes and that are put back where a check has found something.

    :param library: bytes that the library of matrix products works in.
    :param own_products: kernels of ours compute all of these.
    """

    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, CudaKernel],
        dims: Mapping[str, int],
        library: int = 0,
        own_products: bool = False,
    ):
        self.program, self.dims, self.own_products = program, dict(dims), own_products
        self.types = program.types
        self.kernels = kernels
        steps = launched(program)
        self.steps = [taken(joined or step, dims) for joined, step in zip(steps, program.steps, strict=True)]
        self.readers = {number + 1 for number in program.forwards}
        numbers = [number for number, joined in enumerate(steps) if joined is not None and not self._is_handed(number)]
        self.runs = [run for number in numbers for run in runs_of(number, self.steps[number], self.dims)]
        self.checks = checks_of(program)
        places, total = offsets(program, dims, ALIGN, blocks=True)
        self.offsets = {name: at for name, (_, at) in places.items()}
        self.scratch_start = total
        self.flag = Part(FLAG, 0, FLAG_WORDS + len(self.checks) if self.checks else 0, U64)
        self.together = started_together(program, kernels)
        self.groups = self._groups()
        self.runs = [run for group in self.groups for run in group]
        self.scratch_size = max((run.scratch + self._scratch(run) for run in self.runs), default=0)
        self.actions: list[list[Action]] = [[] for _ in self.steps]
        self.started = [actions for group in self.groups for actions in self._started(group)]
        for run, started in zip(self.runs, self.started, strict=True):
            self.actions[run.number] += started
        every = [a for actions in self.actions for a in actions]
        products = [a.product for a in every if isinstance(a, Library)]
        convolutions = [a for a in every if isinstance(a, Convolution)]
        written: list[Product | Convolution] = [*products, *convolutions]
        self.kept = {part.root for asked in written for part in gated(asked)}
        start = total + self.scratch_size + align(self.flag.nbytes)
        room = max([library if products else 0, *(asked.workspace for asked in convolutions)])
        self.library = Part(WORKSPACE, start, room, U8)
        self.workspace = self.library.start + self.library.nbytes

    def kernel(self, item: Kernel) -> CudaKernel:
        """A step's functions over its own dims: steps of one structure share a name and a text."""
        return rebind(self.kernels[item.name], item, self.types)

    def sizes(self, kernel: CudaKernel, dims: Mapping[str, int] | None = None) -> Sizes:
        """A kernel's; in a loop, in a block of it."""
        given = self.dims if dims is None else dims
        values = (given[dim] if isinstance(dim, str) else dim for dim in kernel.dims)
        return sizes_of(kernel, dict(zip(own_dims(kernel), values, strict=True)))

    def part(self, name: str, dims: Mapping[str, int] | None = None) -> Part:
        """Where a buffer lies."""
        root = self.program.root(name)
        type_ = self.program.buffer[root].type
        if (
            self.program.buffer[root].kind == "forwarded" and root not in self.offsets
        ):  # of no use to functions, which hand its rows on
            return Part(WORKSPACE, 0, 0, type_.dtype.np)
        count = prod(type_.concrete(self.dims if dims is None else dims))
        return (
            Part(WORKSPACE, self.offsets[root], count, type_.dtype.np)
            if root in self.offsets
            else Part(root, 0, count, type_.dtype.np)
        )

    def space(self, start: int, count: int, dtype: np.dtype[Any]) -> Part:
        """Scratch memory."""
        return Part(WORKSPACE, self.scratch_start + start, count, dtype)

    def site(self, number: int) -> int:
        """How many checks come before a step."""
        return sum(c < number for c in self.checks)

    @property
    def wide(self) -> list[str]:
        """The functions that are started with offsets of 64 bits."""
        return sorted({a.function for actions in self.actions for a in actions if isinstance(a, Launch) and a.wide})

    @property
    def index_bound(self) -> int:
        """The largest bound of an offset in any of its kernels."""
        kernels = [(run.step, run.dims) for run in self.runs if isinstance(run.step, Kernel)]
        return max((self.sizes(self.kernel(step), dims).index_bound for step, dims in kernels), default=0)

    def _is_handed(self, number: int) -> bool:
        """Whether the step before hands its rows to this one, which it starts."""
        before = self.steps[number - 1] if number in self.readers else None
        return isinstance(before, Kernel) and bool(before.handed_on)

    def _groups(self) -> list[list[Run]]:
        """The runs in order, those that run together in one group: with scratch memory of their own, as much of a batch
        as has room for it; of steps that store rows the one that reads them in a later group.
        """
        begins = {number: begin for begin, end in self.program.batches for number in range(begin, end)}
        at = {n: (begins.get(n, n), n in begins and n in self.readers) for n in range(len(self.steps))}
        groups: list[list[Run]] = []
        used = 0
        for run in sorted(self.runs, key=lambda run: at[run.number]):
            own, last = self._scratch(run), groups[-1][-1].number if groups else run.number
            if groups and run.number in begins and at[last] == at[run.number] and used + own <= BATCH_BYTES:
                groups[-1].append(replace(run, scratch=used))
                used += own
            else:
                groups.append([run])
                used = own
        return groups

    def _started(self, group: Sequence[Run]) -> list[list[Action]]:
        """What each run of a group starts: the first what all start together."""
        if len(group) == 1:
            return [self._actions(group[0])]
        launches = [[a for a in self._plain(run) if isinstance(a, Launch)] for run in group]
        return [[*together(launches)], *([] for _ in group[1:])]

    # -- one step ------------------------------------------------------------------------------------------------------

    def actions_of(self, number: int, item: Kernel | Call, aux: int = 0) -> list[Action]:
        """A step's; ``aux``: a position + 1 at which its check writes down what stands there, instead of working."""
        return self._actions(Run(item, number, self.dims), aux)

    def _scratch(self, run: Run) -> int:
        """Bytes of scratch memory."""
        if isinstance(run.step, Loop):
            return 0
        if isinstance(run.step, Call):
            return align(CALLS[run.step.op].scratch(_PlanOfRun(self, run), run.step, run.number))
        return self.sizes(self.kernel(run.step), run.dims).scratch

    def _actions(self, run: Run, aux: int = 0) -> list[Action]:
        """What a run starts by itself."""
        return alone(self._plain(run, aux), self.together)

    def unbatched(self) -> Iterator[Action]:
        """All that its runs would start if none ran together with another one."""
        return (action for run in self.runs for action in self._plain(run))

    def _plain(self, run: Run, aux: int = 0) -> list[Action]:
        """The same, as if no step ran together with another one."""
        item, number = run.step, run.number
        if isinstance(item, Loop):
            return self.tile_launches(run, item)
        if isinstance(item, Call):
            return CALLS[item.op].actions(_PlanOfRun(self, run), item, number)
        kernel = self.kernel(item)
        sizes = self.sizes(kernel, run.dims)
        actions: list[Action] = []
        for stage in kernel.stages:
            tasks = (
                sizes.count(stage)
                if stage.tasks is None
                else evaluate(stage.tasks, dict(zip(own_dims(kernel), sizes.dims, strict=True)))
            )
            tasks += sizes.chunks if stage.kind == "finish" else 0
            own = aux or (-1 if stage.kind == "key" and sizes.sort and sizes.sort.moves % 2 else 0)
            if tasks > 0:
                actions += self.launches(stage, kernel, run, sizes, tasks, own)
            if stage.kind == "key" and sizes.sort:
                actions += self.sort(sizes.sort, run.scratch, sizes.scratch, self.site(number))
        return actions

    def launches(self, stage: Stage, kernel: CudaKernel, run: Run, sizes: Sizes, tasks: int, aux: int) -> list[Launch]:
        """A stage; more than one where it has more blocks than a grid can have."""
        item = run.step
        assert isinstance(item, Kernel)
        args = [self.part(b, run.dims) for b in item.buffers]
        written = [i for i, b in enumerate(item.buffers) if b in item.writes]
        scratch, flag = len(args) + len(sizes.dims), len(args) + len(sizes.dims) + 1
        shared: tuple[Part | int, ...] = (
            *args,
            *sizes.dims,
            self.space(run.scratch, sizes.scratch, np.dtype(np.uint8)),
            self.flag,
            self.site(run.number),
            sizes.chunk,
            aux,
        )
        blocks = chunks(tasks * stage.width, kernel.threads)
        if stage.kind == "scan":
            blocks = min(blocks, SCAN_BLOCKS)
        wide = sizes.wide(stage, blocks, kernel.threads)
        return [
            Launch(
                stage.name,
                min(blocks - at, MOST_BLOCKS),
                kernel.threads,
                (*shared, at),
                (*written, scratch, flag),
                wide,
                kernel.dynamic_shared(stage),
            )
            for at in range(0, blocks, MOST_BLOCKS)
        ]

    def tile_launches(self, run: Run, loop: Loop) -> list[Action]:
        """A loop as one kernel: a block for each block of its rows."""
        plain = canonical(loop, self.types)
        kernel = self.kernels[plain.name]
        rows, by = evaluate(loop.rows[1], run.dims), evaluate(loop.by, run.dims)
        blocks = chunks(rows, by) * prod(evaluate(size, run.dims) for _, size in loop.over)
        args = [self.part(b, run.dims) for b in plain.buffers]
        written = [i for i, b in enumerate(plain.buffers) if b in loop.writes]
        dims = [run.dims[d] for d in plain.dims]
        own = dict(zip(own_dims(kernel), dims, strict=True))
        bound = max(evaluate(b, {n: max(v, 1) for n, v in own.items()}) for b in kernel.index_bounds)
        wide = max(bound + HEAD_ROOM, blocks) >= LIMIT
        stage, flag = kernel.stages[0], len(args) + len(dims)
        return [
            Launch(
                stage.name,
                min(blocks - at, MOST_BLOCKS),
                kernel.threads,
                (*args, *dims, self.flag, self.site(run.number), at),
                (*written, flag),
                wide,
                kernel.shared,
            )
            for at in range(0, blocks, MOST_BLOCKS)
        ]

    def sort(self, sort: RowSort, begin: int, nbytes: int, site: int) -> list[Launch]:
        """The launches of a sort, whose arrays begin a run's scratch memory and whose counts end it."""
        counts = self.space(begin + nbytes - align(4 * sort.counts), sort.counts, U32)
        return sort.launches(lambda start, count: self.space(begin + start, count, U32), counts, (self.flag, site))


@dataclass(frozen=True)
class _PlanOfRun:
    """What a library call knows of the launch plan that one execution of it is part of."""

    plan: LaunchPlan
    run: Run

    @property
    def flag(self) -> Part:
        return self.plan.flag

    @property
    def scratch_start(self) -> int:
        return self.plan.scratch_start

    @property
    def own_products(self) -> bool:
        return self.plan.own_products

    def part(self, name: str) -> Part:
        return self.plan.part(name, self.run.dims)

    def space(self, start: int, count: int, dtype: np.dtype[Any]) -> Part:
        return self.plan.space(self.run.scratch + start, count, dtype)

    def site(self, number: int) -> int:
        return self.plan.site(number)

    def view(self, item: Call, operand: Operand, axes: Sequence[str]) -> Strided:
        """An operand of a call, seen with axes of the call."""
        sizes, dims = dict(item.axes), self.run.dims
        shape = tuple(evaluate(sizes[a], dims) for a in axes)
        flat = flatten(operand.index, self.plan.types[operand.buffer].shape)
        steps, at = dict(flat.terms), evaluate(flat.const, dims)
        strides = tuple(evaluate(steps.get(a, 0), dims) for a in axes)
        return Strided(self.part(operand.buffer), shape, strides, 0 if 0 in shape else at)

    def result(self, item: Call) -> Strided:
        """The result of a call, from its first element to its last."""
        return self.view(item, item.out, item.result_axes).trimmed


def checks_of(program: Program) -> list[int]:
    """The steps that look for bad indices."""
    return [
        i
        for i, step in enumerate(program.steps)
        if any(isinstance(k, Kernel) and any(s.op == "check" for s in k.body) for k in alternatives(step))
    ]
