"""When each buffer of a program is live, and where it may lie then: at which bytes of the workspace or of an output,
or in which donated input.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..ir.dims import evaluate
from ..ir.kernel import Call, Kernel, Loop, Program, Step, alternatives
from ..ir.node import REGISTRY
from ..process.forks import once_each
from ..targets.cpu import PRIVATE_BYTES
from .strategies import DEFAULT, STRATEGIES

Span = tuple[int, int]
"""The steps that first write and last use a buffer; the bytes at which it begins and ends."""


@once_each
def lifetimes(program: Program) -> Mapping[str, Span]:
    """Program -> the live range of each temp that owns bytes, in steps."""
    return _in_batches(program, lifetimes_of(program, "temp", _alternatives(program)))


def _stored_rows(program: Program, dims: Mapping[str, int]) -> dict[str, Span]:
    """Program -> the live range of each forwarded buffer whose rows a choice stores at these sizes."""
    if not program.forwards:
        return {}
    span = _in_batches(program, lifetimes_of(program, "forwarded", _alternatives(program)))
    handed_on = program.handed_on(dims)
    return {name: own for name, own in span.items() if name not in handed_on}


@once_each
def _touched(program: Program) -> Mapping[str, int]:
    """Program -> the step that first touches each output."""
    span = _in_batches(program, lifetimes_of(program, "output", _alternatives(program)))
    return {name: first for name, (first, _) in span.items()}


def _in_batches(program: Program, span: dict[str, Span]) -> dict[str, Span]:
    """Live ranges -> those where all steps of a batch run at once."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for begin, end in program.batches:
        begins |= dict.fromkeys(range(begin, end), begin)
        ends |= dict.fromkeys(range(begin, end), end - 1)
    return {name: (begins.get(first, first), ends.get(last, last)) for name, (first, last) in span.items()}


def _alternatives(program: Program) -> list[list[Kernel | Call]]:
    """Program -> for each step the kernels and calls of which one runs; one that hands its rows to the next step runs
    when that does.
    """
    steps = [list(alternatives(step)) for step in program.steps]
    for number in program.forwards:
        steps[number + 1] += steps[number]
    return steps


def lifetimes_of(program: Program, kind: str, steps: Sequence[Sequence[Kernel | Call]]) -> dict[str, Span]:
    """(program, kind of buffer, steps) -> the live range of each buffer of the kind."""
    span: dict[str, Span] = {}
    for number, items in enumerate(steps):
        for item in items:
            for name in (*item.reads, *item.writes):
                root = program.root(name)
                if program.buffer[root].kind == kind:
                    span[root] = (span.get(root, (number, number))[0], number)
    return span


Place = tuple[str, int]
"""Where a temp lies: in which output, or "" for the workspace, and at which byte of it."""


def offsets(
    program: Program, dims: Mapping[str, int], alignment: int, lenders: Collection[str] = (), blocks: bool = False
) -> tuple[dict[str, Place], int]:
    """(program, sizes of its dims) -> the place of each temp and the bytes of the workspace: best fit, the largest temp
    first, each in the smallest free interval between those that are live with it.  Rather than make the workspace
    larger, a temp takes memory of a lender that no step has touched before the temp's last use, or that is written
    there in its place.

    :param alignment: of every temp, in bytes.
    :param lenders: outputs of this alignment whose memory may be written before they are.
    :param blocks: whether those of loops lie there, too, each loop's as long as it runs, at sizes of its largest block.
    """
    span = {**lifetimes(program), **_stored_rows(program, dims)}
    sizes = {name: -(-evaluate(program.buffer[name].type.nbytes, dims) // alignment) * alignment for name in span}
    if blocks:
        return _with_blocks(program, span, sizes, dims, alignment)
    plain = _best_fit(program, span, sizes, {})
    if not lenders or max(sizes.values(), default=0) < PRIVATE_BYTES:
        return plain
    rooms = {
        name: (first, evaluate(program.buffer[name].type.nbytes, dims))
        for name, first in _touched(program).items()
        if name in lenders
    }
    return min(plain, _best_fit(program, span, sizes, rooms), key=lambda plan: plan[1])  # never more than without them


def _with_blocks(
    program: Program, lives: Mapping[str, Span], sizes: dict[str, int], dims: Mapping[str, int], alignment: int
) -> tuple[dict[str, Place], int]:
    """The same with the blocks of loops; those of one slot share their memory."""
    span, sharing = dict(lives), dict[str, str]()
    for number, loop in enumerate(program.steps):
        if isinstance(loop, Loop):
            largest, owner = loop.largest(dims), dict[int, str]()
            for block in loop.blocks:
                first = owner.setdefault(block.slot, block.name) if block.slot >= 0 else block.name
                nbytes = -(-evaluate(block.type.nbytes, largest) // alignment) * alignment
                sizes[first], span[first] = max(sizes.get(first, 0), nbytes), (number, number)
                sharing[block.name] = first
    places, total = _best_fit(program, span, sizes, {})
    return {**places, **{name: places[first] for name, first in sharing.items()}}, total


def _best_fit(
    program: Program, span: Mapping[str, Span], sizes: Mapping[str, int], rooms: Mapping[str, Span]
) -> tuple[dict[str, Place], int]:
    """(live ranges, bytes) -> (offset of each temp, bytes of the workspace): largest temp first, each in the smallest
    free interval that holds it.

    :param rooms: of each output that lends memory the step that first touches it, and its bytes.
    """
    taken: dict[str, list[tuple[int, int, int, int]]] = {memory: [] for memory in ("", *rooms)}  # bytes, steps; sorted
    placed: dict[str, Place] = {}
    total = 0
    latest = max((touched for touched, _ in rooms.values()), default=0)
    # of one size first what only the workspace has room for
    for name in sorted(span, key=lambda n: (-sizes[n], span[n][1] < latest, span[n], n)):
        need, (first, last) = sizes[name], span[name]
        gaps, end = _free_intervals(taken[""], span[name], need, total)
        places = [(False, gap, "", at) for gap, at in gaps]
        for output, (touched, room) in rooms.items() if not places and need >= PRIVATE_BYTES else ():
            early = last < touched
            if early or (last == touched and _is_overwritten_by(program, last, name, output)):
                gaps, _ = _free_intervals(taken[output], span[name], need, room)
                places += [(early, gap, output, at) for gap, at in gaps if early or not at]
        memory, at = placed[name] = min(places)[2:] if places else ("", end)
        insort(taken[memory], (at, at + need, first, last))
        if not memory:
            total = max(total, at + need)
    return placed, total


def _is_overwritten_by(program: Program, step: int, temp: str, output: str) -> bool:
    """Whether a step reads a temp at the index at which it stores an output of the same type, so that the two may be
    one memory.
    """
    same = program.types[temp] == program.types[output]
    items = _alternatives(program)[step]
    return same and all(isinstance(item, Kernel) and may_overwrite(program, item, temp, output) for item in items)


def _free_intervals(
    taken: Sequence[tuple[int, int, int, int]], live: Span, need: int, room: int
) -> tuple[list[Span], int]:
    """(occupied intervals with the steps of each, sorted, live range, bytes needed, bytes of the memory) -> its
    intervals that are free then and large enough, as (bytes, begin), and where the last occupied one ends.
    """
    gaps, end = [], 0
    first, last = live
    for start, stop, written, used in taken:
        if written <= last and first <= used:
            if start - end >= need:
                gaps.append((start - end, end))
            if stop > end:
                end = stop
    return [*gaps, *([(room - end, end)] if room - end >= need else [])], end


def donations(program: Program, names: Mapping[str, None]) -> dict[str, str]:
    """(program, donated inputs) -> {output: donated input whose memory it may take}: what writes the
    output first reads the input, at the index that it stores, or is a call that updates it, and no step after that one
    reads the input; no loop over blocks, which come one after another, reads it; and no data is checked by then or
    later, so that a call which is refused has not changed it.

    Where an output has the name of an input, that input goes to it or to none.
    """
    taken: dict[str, str] = {}
    called = {buffer: name for name, buffer in program.outputs}
    named = {name for name, _ in program.outputs}
    last_check = max((i for i, step in enumerate(program.steps) if checks_data(step)), default=-1)
    for name in names:
        source = program.buffer[name]
        readers = [
            (i, k)
            for i, step in enumerate(program.steps)
            for k in alternatives(step)
            if any(program.root(r) == name for r in k.reads)
        ]
        for target in program.of_kind("output"):
            if name in named and called.get(target.name) != name:
                continue
            if target.alias or target.name in taken or target.type != source.type or not readers:
                continue
            writers = [
                (i, k)
                for i, step in enumerate(program.steps)
                for k in alternatives(step)
                if any(program.root(w) == target.name for w in k.writes)
            ]
            if not writers:
                continue
            number, kernel = writers[0]
            if not commutes(program, program.steps[number + 1 :], (), (name,)):
                continue  # what is written there now is not what a later step means
            if any(i == number for i, _ in writers[1:]):
                continue
            if number <= last_check:
                continue
            if isinstance(program.steps[number], Loop) and any(i == number for i, _ in readers):
                continue  # a later block may read what an earlier one has stored
            if (
                may_overwrite(program, kernel, name, target.name)
                if isinstance(kernel, Kernel)
                else may_update(program, kernel, name)
            ):
                taken[target.name] = name
                break
    return taken


def commutes(program: Program, steps: Iterable[Step], reads: Collection[str], writes: Collection[str]) -> bool:
    """Whether what reads and writes these buffers may run before as well as after some steps: none of them writes what
    it reads, or reads or writes what it writes.
    """
    read, written = ({program.root(b) for b in names} for names in (reads, writes))
    for step in steps:
        if any(program.root(b) in written for b in step.reads):
            return False
        if any((root := program.root(b)) in written or root in read for b in step.writes):
            return False
    return True


def may_move(program: Program, step: Step, to: Step, writes: Collection[str] | None = None) -> bool:
    """Whether a step, or the part of it that writes some of its buffers and reads nothing that the steps between write,
    may run where another does.

    :param writes: of the part; None: the whole step.
    """
    first, last = sorted((program.steps.index(step), program.steps.index(to)))
    between = program.steps[first + 1 : last]
    if writes is None:
        return commutes(program, between, step.reads, step.writes)
    return commutes(program, between, (), writes)


def may_update(program: Program, call: Call, source: str) -> bool:
    """Whether a library call may give its result in the memory of ``source``, of which it writes some elements anew."""
    read = [number for number, arg in enumerate(call.args) if program.root(arg.buffer) == source]
    return read == [REGISTRY[call.op].updates]


def checks_data(step: Step) -> bool:
    """Whether a step checks data: indices."""
    return any(s.op == "check" for item in alternatives(step) if isinstance(item, Kernel) for s in item.body)


def _in_partial_results(kernel: Kernel) -> bool:
    """Whether what a kernel adds up goes to partial results of its tasks, each of which has rows of its own."""
    return all(STRATEGIES[kernel.strategies.get(s.buffer, DEFAULT.name)].partials for s in kernel.accums)


def may_overwrite(program: Program, kernel: Kernel, source: str, target: str) -> bool:
    """Whether a kernel may store ``target`` into the memory of ``source``: it goes through each row once, and loads
    each element no later than it stores the one at the same index.
    """
    stores = [(i, s) for i, s in enumerate(kernel.body) if s.buffer and program.root(s.buffer) == target]
    loads = [s for s in kernel.body if s.buffer and program.root(s.buffer) == source]
    if len(stores) != 1 or stores[0][1].op != "store" or stores[0][1].where or not _in_partial_results(kernel):
        return False
    position, store = stores[0]
    if kernel.accums and kernel.cols and not kernel.is_column(store):
        return False  # several tasks may have columns of the row, which each load for themselves
    if any(
        load.index != store.index
        or load.where
        or program.buffer[load.buffer].type.shape != program.buffer[store.buffer].type.shape
        for load in loads
    ):
        return False
    last = kernel.phases[position]
    if any(load in each.row or load in each.body for load in loads for each in kernel.passes[last + 1 :]):
        return False
    if kernel.cols and not kernel.is_column(store):  # every thread of a row loads its element, and one stores it
        return all(kernel.phases[i] < last for i, s in enumerate(kernel.body) if s in loads)
    return True
