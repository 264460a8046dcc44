"""Programs as C: kernels in translation units, and one entry that runs every step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ... import knobs
from ...analysis.families import Family, families
from ...errors import Unsupported
from ...ir.dims import Dim, Predicate, Size, substitute, symbol
from ...ir.kernel import Call, Kernel, Loop, Program, Select, Step, alternatives, refuse_sweeps
from ...ir.node import REGISTRY
from ...ir.types import Type
from ...targets.cpu import WAKING_WORK, WIDE_VECTOR_COST
from ..index import size
from ..jinja import render
from .calls import CALLS, CallText
from .kernel import KernelSource, forwarding_name, render_forwarding, render_kernel, same_mapping
from .products import readers
from .row_memory import batch_work, cost

PER_UNIT, ONE_UNIT = 16, 8
"""Most kernels of a translation unit, which reads headers once for all, and of a single one: of more, two are compiled
side by side.
"""
STEPS_APART = 100
"""Steps from which on the entry is a unit of its own, as it takes a compiler as long then as four kernels: at the end
of another unit all would wait for the two (resnet50's 430 steps take .55 s, sixteen kernels .5; gcc 12, AMD EPYC,
family 25 model 17).
"""


@dataclass(frozen=True)
class Source:
    """A program as C.

    :param units: texts compiled apart and linked.
    :param kernels: by name.
    :param sites: step number -> (op, source) of its check.
    """

    units: tuple[str, ...]
    kernels: Mapping[str, KernelSource]
    sites: Mapping[int, tuple[str, str]]

    @property
    def text(self) -> str:
        return "\n".join(self.units)


@dataclass(frozen=True)
class KernelCall:
    """A kernel as the entry calls it.

    :param buffers: pointers, as C, :param dims: and sizes.
    :param has_workspace, has_thread_memory: which functions of it say how many bytes it needs.
    :param done: what holds where it has nothing to do, as C, or "".
    """

    buffers: tuple[str, ...]
    dims: tuple[str, ...]
    has_workspace: bool
    has_thread_memory: bool
    done: str


@dataclass(frozen=True)
class StepText:
    """A kernel or a library call as the entry runs it.

    :param number: of the step in the program.
    :param name: of the kernel or the call.
    :param declared: what stands before all cases of a choice.
    :param opening, closing: what stands around it where the dims decide whether it runs.
    :param bound: where data decide, too, when it may run, by dims alone, as C.
    :param kernel: the kernel, :param call: or the call.
    """

    number: int
    name: str
    declared: str
    opening: str
    closing: str
    bound: str
    kernel: KernelCall | None
    call: CallText | None


@dataclass(frozen=True)
class BatchText:
    """Steps that run as the tasks of one launch.

    :param name: of its functions, and of the one that runs it.
    :param first, last: the numbers of its steps.
    :param steps: their functions.
    :param sizes: of each the statement that raises ``most`` to the bytes of workspace that it needs, or "".
    :param elements: as C, the largest of which is how many the largest of them goes through.
    :param work: as C, and for how many steps: what they compute and access; () of what is no kernel.
    """

    name: str
    first: int
    last: int
    steps: tuple[str, ...]
    sizes: tuple[str, ...]
    elements: tuple[str, ...]
    work: tuple[tuple[str, int], ...]


LoopAxis: TypeAlias = tuple[int, str]
"""The place of a position in a loop's table of dims, and the size of its axis, as C."""


@dataclass(frozen=True)
class LoopText:
    """A loop over blocks of rows; sizes as C, over its table of dims.

    :param name: of its functions, :param function: and of the one that is the step.
    :param buffers, dims: entries of its tables, of which :param outer_buffers, outer_dims: are the program's.
    :param over: the outer axes of tasks.  :param sequential: those that each task goes over.
    :param rows, by: all rows, and those of a block.
    :param first, count: the places of a block's first row, and of how many it has.
    :param cols: the columns of a block; () where it has all.  :param to: how many it has.
    :param tasks: how many there are.  :param each_block: a task has one block, which no other block waits for.
    :param slots: the bytes of each piece of a block's memory, :param blocks: and each block's place in the
        table of pointers with the piece that it lies in.
    :param steps: the functions of its steps.
    :param workspace_sizes, thread_sizes: statements that raise ``most`` to what each step needs.
    """

    name: str
    function: str
    buffers: int
    dims: int
    outer_buffers: int
    outer_dims: int
    over: tuple[LoopAxis, ...]
    sequential: tuple[LoopAxis, ...]
    rows: str
    by: str
    first: int
    count: int
    cols: tuple[LoopAxis, ...]
    to: str
    tasks: str
    each_block: bool
    slots: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...]
    steps: tuple[str, ...]
    workspace_sizes: list[str]
    thread_sizes: list[str]


def reader_of(program: Program, number: int) -> Kernel | None:
    """The kernel that a step hands its rows to."""
    then = program.steps[number + 1] if number in program.forwards else None
    return then if isinstance(then, Kernel) else None


@dataclass(frozen=True)
class _Texts:
    """Whose text a kernel has.

    :param families: by name the kernels that share one: their family, and their number in it.
    """

    families: Mapping[str, tuple[Family, int]]

    def name(self, kernel: Kernel) -> str:
        """Of the kernel's functions."""
        return self.families[kernel.name][0].kernel.name if kernel.name in self.families else kernel.name

    def rendered(self, kernel: Kernel, types: Mapping[str, Type]) -> KernelSource:
        if kernel.name not in self.families:
            return render_kernel(kernel, types)
        family, _ = self.families[kernel.name]
        return render_kernel(family.kernel, family.types)

    def dims(self, kernel: Kernel, types: Mapping[str, Type]) -> Sequence[str | int]:
        """The sizes that these functions are given: the kernel's dims, and the numbers that others have others for."""
        own = kernel.dims(types)
        if kernel.name not in self.families:
            return own
        family, member = self.families[kernel.name]
        names = dict(zip(family.members[member].dims(types), own, strict=True))
        sizes = [family.sizes[member][d] for d in family.kernel.dims(family.types)]
        return [names[d] if isinstance(d, str) else d for d in sizes]


def _texts(program: Program) -> _Texts:
    """Which kernels share a text: those that run as fast, and as they would alone."""
    forwarding = {*program.forwards, *(number + 1 for number in program.forwards)}
    items = [k for number, step in enumerate(program.steps) if number not in forwarding for k in alternatives(step)]
    kernels = {k.name: k for k in items if isinstance(k, Kernel)}
    found = families(kernels.values(), program.types, same_mapping, inner=True)
    shared = [f for f in found if len(f.members) > 1]
    return _Texts({kernel.name: (family, i) for family in shared for i, kernel in enumerate(family.members)})


def render_program(program: Program) -> Source:
    """The C of a program: kernels in units, and one entry that runs them."""
    refuse_sweeps(program, "cpu")
    types = program.types
    kernels: dict[str, KernelSource] = {}
    costly: set[str] = set()
    sorts: set[str] = set()
    sites: dict[int, tuple[str, str]] = {}
    texts = _texts(program)
    for number, step in enumerate(program.steps):
        if number - 1 in program.forwards:
            continue  # the kernel before has its text
        then = reader_of(program, number)
        for item in alternatives(step):
            if isinstance(item, Kernel):
                name = forwarding_name(item, then) if then else texts.name(item)
                if name not in kernels:  # of steps that share a kernel the first one's names stand
                    kernels[name] = render_forwarding(item, then, types) if then else texts.rendered(item, types)
                if item.row_order == "by key":
                    sorts.add(name)
                if any(cost(s) >= WIDE_VECTOR_COST for s in (*item.body, *(then.body if then else ()))):
                    costly.add(name)
                for s in item.body:
                    if s.op == "check":
                        sites[number] = (s.attr("op"), s.attr("source"))
    calls = [item for step in program.steps for item in alternatives(step) if isinstance(item, Call)]
    writer = _Steps(program, kernels, texts)
    for number, step in enumerate(program.steps):
        writer.add(number, step)
    batches = [writer.batch(number, begin, end) for number, (begin, end) in enumerate(program.batches)]
    inside = {number for begin, end in program.batches for number in range(begin, end)}
    launches = {number: f"step_{number}" for number in range(len(program.steps)) if number not in inside}
    launches |= {batch.first: batch.name for batch in batches}
    entry = render(
        "cpu/program.c.j2",
        kernels=kernels,
        steps=len(program.steps),
        functions_of_steps=writer.functions,
        loops=writer.loops,
        batches=batches,
        waking_work=WAKING_WORK,
        launches=[launches[number] for number in sorted(launches)],
        samples=any(isinstance(step, Select) and step.sample is not None for step in program.steps),
        readers=readers(program, calls),
        functions=[
            *dict.fromkeys(t for op in CALLS for t in CALLS[op].functions(program, [c for c in calls if c.op == op]))
        ],
        workspace_sizes=[*dict.fromkeys(writer.workspace_sizes)],
        thread_sizes=[*dict.fromkeys(writer.thread_sizes)],
    )
    apart = len(program.steps) >= STEPS_APART
    units = _units({name: kernel.text for name, kernel in kernels.items()}, costly, sorts, entry, apart)
    return Source(units, {**kernels, **{k: kernels[f.kernel.name] for k, (f, _) in texts.families.items()}}, sites)


def _units(texts: Mapping[str, str], costly: set[str], sorts: set[str], entry: str, apart: bool) -> tuple[str, ...]:
    """The texts of kernels in translation units: those that get wide vectors apart, the entry behind the last, or
    ``apart`` in the first.
    """
    light, wide = ([name for name in texts if (name in costly) is pays] for pays in (False, True))
    parts: list[Sequence[str]] = [part for names in (wide, light) for part in even(names)]
    if apart or not parts:
        parts.insert(0, [])
    # one unit needs no linkage between its functions; several share hidden symbols
    linkage = "static __attribute__((unused))" if len(parts) == 1 else '__attribute__((visibility("hidden")))'
    units = []
    for part in parts:
        vectors = '#include "wide_vectors.h"\n' if part and part[0] in costly else ""
        sort = '#include "counting_sort.h"\n' if sorts & {*part} else ""
        includes = f'#include "math.h"\n#include "program.h"\n{vectors}{sort}#define GRADC_SHARED {linkage}\n'
        units.append("\n".join([includes, *(texts[name] for name in part)]))
    units[0 if apart else -1] += f"\n{entry}"
    return tuple(units)


def even(names: Sequence[str]) -> list[Sequence[str]]:
    """Names in parts as even as can be, of a unit's most: all wait for the longest, which two cores make shorter."""
    count = max(-(-len(names) // PER_UNIT), min(-(-len(names) // ONE_UNIT), 2))
    ends = [len(names) * number // count for number in range(count + 1)] if names else []
    return [names[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class _Tables:
    """:param place: the number of each buffer's memory in a table of pointers.  :param dims: each dim as C."""

    place: Mapping[str, int]
    dims: Mapping[str, str]

    def over(self, value: Size) -> str:
        """A size as C."""
        return over(value, self.dims)


class _Steps:
    """The steps of a program as C.

    :ivar functions: (name, its cases) of each kernel or call.  :ivar loops: the loops, whose steps are among these.
    :ivar workspace_sizes, thread_sizes: statements that raise ``most`` to what each step needs.
    """

    def __init__(self, program: Program, kernels: Mapping[str, KernelSource], texts: _Texts):
        self.program, self.kernels, self.texts = program, kernels, texts
        numbers = {b.name: i for i, b in enumerate(b for b in program.buffers if not b.alias)}
        self.memory = len(numbers)
        self.tables = _Tables(
            {b.name: numbers[program.root(b.name)] for b in program.buffers},
            {name: f"n[{i}]" for i, name in enumerate(program.dims)},
        )
        self.functions: list[tuple[str, Sequence[StepText]]] = []
        self.loops: list[LoopText] = []
        self.workspace_sizes: list[str] = []
        self.thread_sizes: list[str] = []

    def add(self, number: int, step: Step) -> None:
        if isinstance(step, Loop):
            loop = self.loop(number, step)
            self.loops.append(loop)
            apart = f"{loop.name}_apart(n)"
            self.workspace_sizes.append(f"if (!{apart}) most = gradc_max(most, {loop.name}_workspace(n));")
            local = f"{loop.name}_local(n) + ({apart} ? {loop.name}_workspace(n) : 0)"
            self.thread_sizes.append(f"most = gradc_max(most, {local});")
            return
        cases = self.cases(number, step, self.tables)
        self.functions.append((f"step_{number}", cases))
        self.workspace_sizes += _workspace_size(cases)
        self.thread_sizes += _thread_size(cases)

    def batch(self, number: int, begin: int, end: int) -> BatchText:
        own = [at for at in range(begin, end) if at - 1 not in self.program.forwards]
        cases = [self.cases(at, self.program.steps[at], self.tables) for at in own]
        work = [each for at in own for each in elements(self.program, next(alternatives(self.program.steps[at])))]
        return BatchText(
            name=f"batch_{number}",
            first=begin,
            last=end - 1,
            steps=tuple(f"step_{at}" for at in own),
            sizes=tuple("".join(_workspace_size(each)) for each in cases),
            elements=tuple(map(self.tables.over, work)),
            work=tuple(Counter(map(self.tables.over, batch_work(self.program.steps[begin:end]))).items()),
        )

    def loop(self, number: int, loop: Loop) -> LoopText:
        outer, memory = len(self.program.dims), self.memory
        symbols = {name: outer + i for i, name in enumerate(loop.symbols)}
        inner = _Tables(
            {**self.tables.place, **{b.name: memory + i for i, b in enumerate(loop.blocks)}},
            {**self.tables.dims, **{name: f"n[{i}]" for name, i in symbols.items()}},
        )
        cases = [self.cases(number, item, inner) for item in loop.steps]
        names = tuple(f"loop_{number}_{i}" for i in range(len(cases)))
        self.functions += zip(names, cases, strict=True)
        axes = {name: (symbols[name], inner.over(size)) for name, size in loop.over}
        over = tuple(axes[name] for name, _ in loop.parallel)
        rows, by = inner.over(loop.rows[1]), inner.over(loop.by)
        each_block = bool(over) and not loop.reduces_rows
        blocks = [f"gradc_max(gradc_chunks({rows}, {by}), 1)"] if each_block else []
        slots: dict[int, list[str]] = {}
        for i, b in enumerate(loop.blocks):
            slots.setdefault(b.slot if b.slot >= 0 else -1 - i, []).append(inner.over(b.type.nbytes))
        order = {slot: i for i, slot in enumerate(slots)}
        return LoopText(
            name=f"loop_{number}",
            function=f"step_{number}",
            buffers=memory + len(loop.blocks) or 1,
            dims=outer + len(symbols),
            outer_buffers=memory,
            outer_dims=outer,
            over=over,
            sequential=tuple(axes[name] for name, _ in loop.over if name in loop.sequential),
            rows=rows,
            by=by,
            first=symbols[loop.rows[0]],
            count=symbols[loop.count],
            cols=tuple((symbols[name], inner.over(size)) for name, size in loop.cols),
            to=inner.over(loop.to),
            tasks=" * ".join([*(extent for _, extent in over), *blocks]) or "1",
            each_block=each_block,
            slots=tuple(functools.reduce(lambda a, b: f"gradc_max({a}, {b})", each) for each in slots.values()),
            blocks=tuple(
                (inner.place[b.name], order[b.slot if b.slot >= 0 else -1 - i]) for i, b in enumerate(loop.blocks)
            ),
            steps=names,
            workspace_sizes=[line for each in cases for line in _workspace_size(each)],
            thread_sizes=[line for each in cases for line in _thread_size(each)],
        )

    def cases(self, number: int, step: Step, tables: _Tables) -> list[StepText]:
        """A step, or each case of a choice; none of a step whose rows the one before hands to it."""
        if number - 1 in self.program.forwards:
            return []
        then = reader_of(self.program, number)
        sample = step.sample if isinstance(step, Select) else None
        cases: list[tuple[Predicate | None, Kernel | Call]] = (
            [*step.cases] if isinstance(step, Select) else [(None, item) for item in alternatives(step)]
        )
        bounds = [*guarded(step, tables.dims)]
        dims, declared = tables.dims, ""
        if sample is not None:
            dims = {**dims, sample.skew: "gradc_skew(&sample)", sample.locality: "gradc_locality(&sample)"}
            looked_at = self.program.types[sample.buffer]
            values = f"{tables.place[sample.buffer]}], {looked_at.dtype.itemsize}, {tables.over(looked_at.count)}"
            declared = f"gradc_sample sample = {{ buf[{values}, 0, 0, 0 }};"
        out: list[StepText] = []
        before = ""
        for (when, item), (bound, _) in zip(cases, bounds, strict=True):
            guard = f"if ({condition(when, dims)})" if when else ""
            kernel, call = None, None
            name = item.name
            if isinstance(item, Kernel):
                both = [item, then] if then else [item]
                name = forwarding_name(item, then) if then else self.texts.name(item)
                source = self.kernels[name]
                types = self.program.types
                sizes = [d for k in both for d in k.dims(types)] if then else self.texts.dims(item, types)
                kernel = KernelCall(
                    tuple(f"buf[{tables.place[b]}]" for k in both for b in k.buffers),
                    tuple(tables.dims[d] if isinstance(d, str) else size(d) for d in sizes),
                    source.has_workspace,
                    source.has_thread_memory,
                    " == ".join(f"buf[{tables.place[b]}]" for b in self.program.copied(item)),
                )
            else:
                if item.op not in CALLS:  # another target's
                    raise Unsupported(f"{item.name}: the cpu has no function for {item.op}")
                write = CALLS[item.op].write
                call = write(item, self.program, tables.place, tables.over, knobs.BOUNDS.get())
            chosen = bool(before or guard)
            opening, closing = (f"{before}{guard} {{", "}") if chosen else ("", "")
            sizes = bound if sample is not None else ""
            out.append(StepText(number, name, declared if not out else "", opening, closing, sizes, kernel, call))
            before = "else " if guard else ""
        return out


def elements(program: Program, item: Kernel | Call) -> list[Size]:
    """How many elements a step goes through: the largest of these.  What a call updates it goes through in part."""
    if isinstance(item, Kernel):
        return [item.row_count * item.col_count]
    updated = REGISTRY[item.op].updates
    read = [arg.buffer for number, arg in enumerate(item.args) if number != updated]
    return [program.buffer[name].type.count for name in (*read, *([item.out.buffer] if updated is None else []))]


def _workspace_size(cases: Sequence[StepText]) -> list[str]:
    return _size(cases, "workspace_bytes", lambda k: k.has_workspace, lambda call: call.workspace)


def _thread_size(cases: Sequence[StepText]) -> list[str]:
    return _size(cases, "local_bytes", lambda k: k.has_thread_memory, lambda call: call.local)


def _size(
    cases: Sequence[StepText],
    function: str,
    asked: Callable[[KernelCall], bool],
    of_call: Callable[[CallText], str],
) -> list[str]:
    """The statement that raises ``most`` to what a step needs, if it needs anything."""
    line = ""
    for s in cases:
        own = ""
        if s.kernel and asked(s.kernel):
            dims = ", ".join(s.kernel.dims) or "0"
            own = f"most = gradc_max(most, {s.name}_{function}((const i64[]){{ {dims} }}));"
        elif s.call and of_call(s.call):
            own = f"most = gradc_max(most, {of_call(s.call)});"
        if s.bound:  # any of these may run
            line += f"if ({s.bound}) {{ {own} }} "
        else:
            line += f"{s.opening} {own} {s.closing} " if s.opening else own
    return [line.strip()] if "most" in line else []


def guarded(step: Step, dims: Mapping[str, str]) -> Iterator[tuple[str, Kernel | Call]]:
    """What a step may run, each with when it may, by dims alone, as C, "" of what always may."""
    if not isinstance(step, Select):
        yield from (("", item) for item in alternatives(step))
        return
    before: list[str] = []
    for may, must, item in step.bounds:
        yield " && ".join([*before, *([f"({condition(may, dims)})"] if may else [])]), item
        before += [f"!({condition(must, dims)})"] if must else []


def condition(when: Predicate, dims: Mapping[str, str]) -> str:
    """A predicate over the program's dims as C."""
    both = [
        " && ".join(f"{over(c.left, dims)} {c.relation} {over(c.right, dims)}" for c in each)
        for each in when.conjunctions
    ]
    return " || ".join(f"({each})" for each in both) if len(both) > 1 else both[0]


def over(value: Size, dims: Mapping[str, str]) -> str:
    """A size over the program's dims as C."""
    names = {name: symbol(f"N{i}") for i, name in enumerate(dims)}
    text = size(substitute(value, names)) if isinstance(value, Dim) else size(value)
    for i, place in reversed(list(enumerate(dims.values()))):
        text = text.replace(f"N{i}", place)
    return text
