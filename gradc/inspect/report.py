"""A module as one HTML file to explore offline: graphs of every stage, what each pass changed, kernels beside their C
and the user's lines, choices of reduction, memory.

The page holds the texts that ``gradc dump`` prints and nothing is drawn from anything else; its script reads them as
:mod:`gradc.ir.text` does.  What no text says (who made a value, bytes, estimates) lies beside them as JSON.
"""

from __future__ import annotations

import bisect
import dataclasses
import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.cost import floor_bytes
from ..analysis.lifetimes import lifetimes
from ..codegen.text import read_template
from ..errors import GradcError
from ..formats.json_text import finite
from ..ir.dims import evaluate
from ..ir.graph import Graph
from ..ir.kernel import Kernel, Loop, Program, Select, alternatives, taken
from ..passes.manager import Stage, changes
from ..passes.program.choose_reduction import decisions
from ..process import files
from ..process.version import VERSION
from ..runtime.executable import Executable
from ..runtime.kernel import KernelHandle
from ..targets.devices import Device
from .explain import (
    Explained,
    _bindings,
    _compiled_for,
    _in_block,
    _step_bytes,
    _way,
    explain,
    missed_fusions_table,
    untiled_table,
)

SCRIPTS = ("text.js", "layout.js", "view.js", "parts.js", "page.js")
MOST_CURVES = 60
"""Combines whose estimates are drawn over every size; of more, only the table is there."""
POINTS = 25
MOST_TEXT, MOST_DIFFERENT = 4_000_000, 0.3
"""Characters of all stages' texts up to which each is written whole; the share of lines up to which one is written as
a difference."""


@dataclass(frozen=True)
class StageEntry:
    """A stage; ``made``: number of a value -> index into ``makers``, for those that this stage added or rewrote."""

    name: str
    kind: str
    size: int
    ms: float
    changes: tuple[int, int, int] | None  # added, removed, rewritten
    made: dict[int, int]


@dataclass(frozen=True)
class KernelEntry:
    """A kernel, or library call, of a step; ``of``: for each statement the number of its value, or None."""

    name: str
    direction: str
    step: int
    call: bool
    bytes: int
    predicted: float  # seconds; 0 where a library computes
    measured: float | None
    strategy: str
    when: str
    where: str
    ir: str
    source: str
    of: list[int | None]


@dataclass(frozen=True)
class EstimateEntry:
    strategy: str
    bytes: int
    seconds: float
    why: str


@dataclass(frozen=True)
class CombineEntry:
    """A choice of reduction: estimates at the report's sizes, over each symbol, and the predicates of the program."""

    direction: str
    kernel: str
    buffer: str
    pick: str
    estimates: list[EstimateEntry]
    cases: list[tuple[str, str]]  # predicate ("" holds always), strategy
    curves: dict[str, dict[str, Any]]  # symbol -> {"at": sizes, "seconds": {strategy: [...]}}


@dataclass(frozen=True)
class BufferEntry:
    """A buffer that a program allocates, alive from step ``first`` to step ``last``."""

    name: str
    kind: str
    type: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class ProgramEntry:
    direction: str
    steps: list[str]
    moved: int
    floor: int
    buffers: list[BufferEntry]
    missed: list[str]


@dataclass(frozen=True)
class ResidualEntry:
    name: str
    type: str
    bytes: int
    why: str
    id: int | None


@dataclass(frozen=True)
class Content:
    """What the page says beside the texts."""

    name: str
    target: str
    device: str
    version: str
    wrt: tuple[str, ...]
    dims: dict[str, int]
    given: tuple[str, ...]
    makers: list[str]
    composites: dict[int, str]
    code: dict[str, str]
    stages: list[StageEntry]
    kernels: list[KernelEntry]
    combines: list[CombineEntry]
    programs: list[ProgramEntry]
    residuals: list[ResidualEntry]


def content(module: Explained, dims: Mapping[str, int], timed: int = 0, *, sources: bool = True) -> Content:
    """Everything but the texts of stages.

    :param dims: sizes; 1024 stands for what is not given.
    :param timed: runs by which each kernel is timed; 0 for none.
    :param sources: whether kernels have their generated source.
    """
    bound = _bindings(module, dims)
    device = _compiled_for(module)
    graphs = [stage.result for stage in module.stages if isinstance(stage.result, Graph)]
    notes = [
        (number, graph.notes[node]) for graph in graphs for node, number in graph.numbers.items() if node in graph.notes
    ]
    makers = list(dict.fromkeys(["", *(note.by for _, note in notes)]))
    return Content(
        module.graph.name,
        module.target,
        device.name,
        VERSION,
        tuple(module.wrt),
        bound,
        tuple(name for name in bound if name in {**module.executables["forward"].fixed_dims, **dims}),
        makers,
        {number: note.composite for number, note in notes if note.composite},
        {note.where: note.code for _, note in notes if note.code},
        list(_stages(list(module.stages), {name: at for at, name in enumerate(makers)})),
        kernel_entries(module, dims, timed, list(module.stages), sources=sources),
        list(_combines(module, bound, device)),
        [_program(module, direction, bound) for direction in module.executables],
        residual_entries(module, dims, graphs),
    )


def kernel_entries(
    module: Explained, dims: Mapping[str, int], timed: int = 0, stages: Sequence[Stage] = (), *, sources: bool = True
) -> list[KernelEntry]:
    """Every kernel and library call, in order.

    :param stages: the module's, in which statements know their values where it comes from the cache.
    :param sources: whether they have their generated source.
    """
    bound, device = _bindings(module, dims), _compiled_for(module)
    return [
        dataclasses.replace(entry, source=_source(handle)) if sources and handle is not None else entry
        for d, e in module.executables.items()
        for entry, handle in _kernels(d, e, _with_values(e.program, stages), bound, device, timed)
    ]


def _sources(module: Explained) -> dict[str, str]:
    """The generated source of each kernel, by its direction and name: kernels of one name are equal but for the names
    of their buffers, and a large graph has hundreds of each.
    """
    kernels = {
        f"{direction} {kernel.name}": (kernel, executable)
        for direction, executable in module.executables.items()
        for kernel in executable.program.kernels
    }
    return {name: source for name, found in kernels.items() if (source := _source(KernelHandle(*found)))}


def residual_entries(module: Explained, dims: Mapping[str, int], graphs: Sequence[Graph] = ()) -> list[ResidualEntry]:
    """What forward keeps.  :param graphs: in which their values have numbers."""
    bound = _bindings(module, dims)
    return [
        ResidualEntry(
            r.name,
            str(r.node.type),
            0 if r.borrowed else evaluate(r.node.type.nbytes, bound),
            r.why,
            _number(graphs, r.node),
        )
        for r in module.residuals
    ]


def _number(graphs: Sequence[Graph], node: Any) -> int | None:
    return next((graph.numbers[node] for graph in reversed(graphs) if node in graph.numbers), None)


def _stages(stages: Sequence[Stage], makers: Mapping[str, int]) -> Iterator[StageEntry]:
    known: dict[int, int] = {}
    for before, stage in zip([None, *stages], stages, strict=False):
        result = stage.result
        made: dict[int, int] = {}
        if isinstance(result, Graph):
            by = {n: makers[result.notes[node].by] for node, n in result.numbers.items() if node in result.notes}
            made = {number: maker for number, maker in by.items() if known.get(number, 0) != maker}
            known.update(made)
        found = changes(before, stage) if before is not None else None
        yield StageEntry(
            stage.name,
            "graph" if isinstance(result, Graph) else "program",
            stage.size,
            stage.seconds * 1e3,
            dataclasses.astuple(found) if found is not None else None,  # type: ignore[arg-type]
            made,
        )


def _with_values(program: Program, stages: Iterable[Stage]) -> Program:
    """The program as the passes make it: one from the cache is its text, which does not say what values of the graph
    its statements compute.
    """
    return next((s.result for s in stages if isinstance(s.result, Program) and s.result == program), program)


def _kernels(
    direction: str, executable: Executable, program: Program, bound: Mapping[str, int], device: Device, timed: int
) -> Iterator[tuple[KernelEntry, KernelHandle | None]]:
    for number, step in enumerate(program.steps):
        chosen = taken(step, bound)
        for when, item in step.cases if isinstance(step, Select) else [(None, step)]:
            if isinstance(item, Loop):
                by = f"by {evaluate(item.by, bound)} rows"
                inner = [(x, _in_block(x, item, program, bound), f"{_way(x)} {by}".lstrip()) for x in item.steps]
            else:
                inner = [(item, _step_bytes(item, program, bound), _way(item))]
            for each, moved, way in inner:
                kernel = isinstance(each, Kernel)
                handle = KernelHandle(each, executable) if isinstance(each, Kernel) else None
                timing = handle is not None and timed and each is chosen
                entry = KernelEntry(
                    each.name,
                    direction,
                    number,
                    not kernel,
                    moved,
                    moved / device.bandwidth if kernel else 0.0,
                    _measured(handle, timed, bound) if timing else None,  # type: ignore[arg-type]
                    way,
                    str(when or ""),
                    each.note.where,
                    str(each),
                    "",
                    [s.of for s in each.body] if isinstance(each, Kernel) else [],
                )
                yield entry, handle


def _source(handle: KernelHandle) -> str:
    if handle.owner.target == "numpy":  # which interprets the statements
        return ""
    try:
        return handle.source
    except GradcError as error:  # a target that generates none
        return f"/* {error} */"


def _measured(handle: KernelHandle, repeat: int, bound: Mapping[str, int]) -> float | None:
    try:
        return handle.time(repeat, None, **bound)
    except GradcError:  # random inputs may be invalid for the kernel
        return None


def _combines(module: Explained, bound: Mapping[str, int], device: Device) -> Iterator[CombineEntry]:
    drawn = 0
    for direction, executable in module.executables.items():
        program = executable.program
        steps = {k.name: step for step in program.steps for k in alternatives(step)}
        own = [d for d in program.dims if d in bound]
        found = decisions(program, bound, device)
        curves = {d: _curve(program, bound, d, device) for d in own} if 0 < len(found) <= MOST_CURVES - drawn else {}
        drawn += len(found)
        for kernel, buffer, pick, table in found:
            step = steps[kernel]
            cases = step.cases if isinstance(step, Select) else ((None, step),)
            yield CombineEntry(
                direction,
                kernel,
                buffer,
                pick,
                [EstimateEntry(e.strategy, e.bytes, e.seconds, e.why) for e in table],
                [(str(when or ""), k.strategies.get(buffer, "")) for when, k in cases if isinstance(k, Kernel)],
                {d: {"at": at, "seconds": by[buffer]} for d, (at, by) in curves.items() if buffer in by},
            )


def _curve(
    program: Program, bound: Mapping[str, int], name: str, device: Device
) -> tuple[list[int], dict[str, dict[str, list[float]]]]:
    """Sizes of one symbol, and for each buffer and strategy the estimated seconds at them."""
    low, high = 4, max(1 << 22, 8 * bound[name])
    sizes = sorted({round(math.exp(math.log(low) + k * math.log(high / low) / (POINTS - 1))) for k in range(POINTS)})
    seconds: dict[str, dict[str, list[float]]] = {}
    for at, size in enumerate(sizes):
        for _, buffer, _, table in decisions(program, {**bound, name: size}, device):
            for e in table:
                line = seconds.setdefault(buffer, {}).setdefault(e.strategy, [])
                line += [math.nan] * (at - len(line)) + [e.seconds]
    return sizes, seconds


def _program(module: Explained, direction: str, bound: Mapping[str, int]) -> ProgramEntry:
    program = module.executables[direction].program
    names = [taken(step, bound).name for step in program.steps]
    last = len(names) - 1
    first = {program.root(b): at for at, step in reversed(list(enumerate(program.steps))) for b in step.writes}
    spans = {
        **{b.name: (first.get(b.name, 0), last) for b in program.of_kind("output") if not b.alias},
        **lifetimes(program),
    }
    buffers = [
        BufferEntry(b.name, b.kind, str(b.type), evaluate(b.type.nbytes, bound), *spans[b.name])
        for b in program.buffers
        if b.name in spans
    ]
    return ProgramEntry(
        direction,
        names,
        sum(_step_bytes(taken(s, bound), program, bound) for s in program.steps),
        floor_bytes(program, bound),
        sorted(buffers, key=lambda b: -b.bytes),
        [line.strip() for line in (*missed_fusions_table(module, direction, bound), *untiled_table(module, direction))],
    )


def as_json(found: Content, indent: int | None = None) -> str:
    """Everything but the texts, as docs/report.md describes it."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(finite(dataclasses.asdict(found)), indent=indent, separators=separators)


def page(module: Explained, dims: Mapping[str, int], timed: int = 0) -> str:
    """The HTML text."""
    found = content(module, dims, timed, sources=False)
    data = as_json(found)
    texts = [("explain", "", explain(module, dims)), *stage_texts(list(module.stages))]
    texts += [(f"{name}.c", f'data-source="{html.escape(name)}"', source) for name, source in _sources(module).items()]
    sections = "".join(
        f'<details class="text"><summary>{html.escape(title)}</summary>'
        f"<pre {place}>{html.escape(text)}</pre></details>\n"
        for title, place, text in texts
    )
    text = read_template("report/page.html")
    parts = {
        "TITLE": html.escape(f"{found.name} on {found.target}"),
        "STYLE": read_template("report/page.css"),
        "TEXTS": sections,
        # no text of a user's can end the element
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "SCRIPT": "\n".join(read_template(f"report/{name}") for name in SCRIPTS),
    }
    pieces = text.split("@@")
    return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def stage_texts(stages: Sequence[Stage]) -> Iterator[tuple[str, str, str]]:
    """(title, attributes of its element, text) of each stage; where all are long, of one that is like an earlier one
    the difference, which the page's script applies to that.
    """
    texts = [str(stage) for stage in stages]
    long = sum(map(len, texts)) > MOST_TEXT
    for number, (stage, text) in enumerate(zip(stages, texts, strict=True)):
        tried = [(base, _difference(texts[base], text)) for base in (_bases(stages, number) if long else ())]
        found = min(((len(d), base, d) for base, d in tried if d is not None), default=None)
        if found is None:
            yield stage.name, f'data-stage="{number}"', text
        else:
            _, base, difference = found
            place = f'data-stage="{number}" data-base="{base}"'
            yield f"{stage.name}: what differs from {stages[base].name}", place, difference


def _bases(stages: Sequence[Stage], number: int) -> Iterator[int]:
    """The stages whose texts may be like this one's: the last of this name, and the one before of this kind."""
    stage = stages[number]
    yield from [at for at in range(number) if stages[at].name == stage.name][-1:]
    direction = stage.name.rpartition(".")[0]  # "" before the partition
    if number and direction in ("", stages[number - 1].name.rpartition(".")[0]):
        if isinstance(stages[number - 1].result, Graph) == isinstance(stage.result, Graph):
            yield number - 1


def _difference(old: str, new: str) -> str | None:
    """A unified diff without context and heads; None where much differs.

    Lines that each text has once are paired where they follow each other in both (the longest such sequence: patience
    diff), and what lies between is replaced; difflib takes minutes for the texts that this is for.
    """
    before, after = old.splitlines(), new.splitlines()
    if len(set(after) - set(before)) > len(after) * MOST_DIFFERENT:
        return None
    hunks, i, j = [], 0, 0
    for at, to in [*_paired(before, after), (len(before), len(after))]:
        while i < at and j < to and before[i] == after[j]:
            i, j = i + 1, j + 1
        if i < at or j < to:
            first, second = i + (at > i), j + (to > j)  # a side without lines names the line before
            hunks.append(f"@@ -{first},{at - i} +{second},{to - j} @@")
            hunks += [f"-{line}" for line in before[i:at]] + [f"+{line}" for line in after[j:to]]
        i, j = at + 1, to + 1
    return "\n".join(hunks)


def _paired(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Places of equal lines, ascending in both."""
    once = [{line for line, count in Counter(lines).items() if count == 1} for lines in (before, after)]
    there = {line: at for at, line in enumerate(before) if line in once[0]}
    pairs = [(there[line], at) for at, line in enumerate(after) if line in once[1] and line in there]
    ends: list[int] = []  # the least place that ends an ascending sequence of each length
    last: list[int] = []  # the pair that does so
    previous: list[int] = []
    for number, (at, _) in enumerate(pairs):
        length = bisect.bisect_left(ends, at)
        previous.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [at]
        last[length : length + 1] = [number]
    found = []
    number = last[-1] if last else -1
    while number >= 0:
        found.append(pairs[number])
        number = previous[number]
    return found[::-1]


def write_report(module: Explained, path: str | Path, dims: Mapping[str, int], timed: int = 0) -> None:
    """Writes the page to the file ``path``, whole or not at all.

    :raises FileError: it cannot be written.
    """
    files.write(path, page(module, dims, timed))
