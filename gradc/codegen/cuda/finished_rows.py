"""Rows of a segmented sum that are handed to the kernel that reads them: two kernels as one.

Of a pair that ``forward_rows`` has made, launches know one kernel, whose statements behind its accum are those of the
second, for a row that is finished: ``load x[k, d]; load t[k, d]; ...; store y[k, d]`` of an axis ``k`` that is none of
its rows.  Its functions execute them where they would store a row of ``t``: where a segment ends, where the carry rows
of a longer one are added up, and for the rows that nobody hits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import Unsupported
from ...ir.kernel import Kernel, Program, Select, Step, alternatives
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from .choose_mapping import choose_mapping
from .columns import fits_registers, linear
from .facts import Facts, facts_of
from .fixed_sums import elements_as_rows
from .mapping import ThreadMapping
from .phase_writer import PhaseView, PhaseWriter, VectorArrays

Types = Mapping[str, Type]

FREE = 2
"""Times as many registers as while rows are added up: seven arrays of eight f32 of a thread need 126 of 128, and eleven
spill.
"""


def can_hand_on(first: Kernel, then: Kernel, types: Types) -> bool:
    """Whether there is text for two kernels of which one reads the rows that the other combines: sums lie in the
    registers of the threads that have the columns, and these compute each column of the second by itself, or have all
    of its row together, with no more in registers than there are when a row is finished.
    """
    if elements_as_rows(first) is not first or [n for _, n in first.cols] != [n for _, n in then.cols]:
        return False
    facts, reader = facts_of(first, types), facts_of(then, types)
    mapping = mapping_of(facts, reader)
    if facts.order != "by key" or mapping.sums != "registers" or then.scans:
        return False
    if not reader.separate_columns and (_gathers(then) or not _has_whole_rows(facts, mapping)):
        return False
    if not fits_registers(then, types, mapping.vec, share=FREE):
        return False
    loads = [s for s in then.body if s.buffer == first.order]
    return all(not s.where and linear(then, types, s, leading=1) == Index() for s in loads)


def mapping_of(facts: Facts, then: Facts | None) -> ThreadMapping:
    """The mapping of a kernel: of whole rows, where it hands them to one that combines their columns.

    :param then: the facts of that one; None without one.
    """
    return choose_mapping(facts, whole=then is not None and not then.separate_columns)


def _has_whole_rows(facts: Facts, mapping: ThreadMapping) -> bool:
    """Whether the threads of a task have all columns of a row at once."""
    columns = facts.known_columns
    return mapping.iterations == 1 and columns is not None and columns <= mapping.width * mapping.vec


def _gathers(kernel: Kernel) -> bool:
    """Whether it loads at places that are data: rows that a task finishes one after another wait for loads that wait
    for loads, where a kernel of its own has four times as many rows under way.
    """
    return any(s.op == "load" and any(v.startswith("%") for i in s.index for v, _ in i.terms) for s in kernel.body)


def refuse_handed_on(program: Program, target: str) -> None:
    """
    :raises Unsupported: a kernel of the program hands its rows to the next one, and there is no text for the two.
    """
    for number, name in program.forwards.items():
        first, then = program.steps[number : number + 2]
        assert isinstance(then, Kernel)
        handing = [k for k in alternatives(first) if isinstance(k, Kernel) and program.hands_on(number, k)]
        if not all(can_hand_on(k, then, program.types) for k in handing):
            raise Unsupported(
                f"rows that one kernel hands to the next on the target {target}: {program.name} has {name!r}, which"
                " is forwarded, and there is no text for what is done to its rows; the targets cpu and numpy run it"
            )


def launched(program: Program) -> tuple[Step | None, ...]:
    """The steps of a program as they are launched: the first of two that hand on rows is both, the second is None.

    Of a choice the kernels that hand on rows are both, and the second step is for the others.
    """
    steps: list[Step | None] = [*program.steps]
    for number in program.forwards:
        first, then = program.steps[number : number + 2]
        assert isinstance(then, Kernel)
        if isinstance(first, Select):
            cases = [(when, k, program.hands_on(number, k)) for when, k in first.cases]
            ways = tuple((when, joined(k, then, program.types) if on else k) for when, k, on in cases)
            steps[number] = replace(first, cases=ways)
        else:
            assert isinstance(first, Kernel)
            steps[number : number + 2] = joined(first, then, program.types), None
    return tuple(steps)


def joined(first: Kernel, then: Kernel, types: Types) -> Kernel:
    """The two as one kernel."""
    (own,) = first.accums
    body = [*(s for s in first.body if s is not own), own]
    axes = {a for a, _ in (*first.rows, *first.cols)}
    row = next(a for k in range(len(axes) + 1) if (a := f"i{k}") not in axes)
    names = {s.name: f"%{len(body) + i}" for i, s in enumerate(then.body) if s.name}
    names |= {then.rows[0][0]: row} | {a: b for (a, _), (b, _) in zip(then.cols, first.cols, strict=True)}
    body += [_renamed(s, names) for s in then.body]
    return replace(first, body=tuple(body)).rehashed(types)


def _renamed(s: Stmt, names: Mapping[str, str]) -> Stmt:
    args, index = tuple(names.get(a, a) for a in s.args), tuple(i.renamed(names) for i in s.index)
    return s.altered(name=names.get(s.name, ""), args=args, index=index, where=names.get(s.where, ""))


def parted(kernel: Kernel, types: Types) -> tuple[Kernel, Kernel | None]:
    """The two of which a kernel was joined; any other kernel, and None."""
    if not kernel.handed_on:
        return kernel, None
    at = next(i for i, s in enumerate(kernel.body) if s.op == "accum") + 1
    body = kernel.body[at:]
    ((row, _),) = next(s for s in body if s.buffer == kernel.handed_on).index[0].terms
    rows = ((row, types[kernel.handed_on].shape[0]),)
    then = replace(kernel, rows=rows, body=body, order="", strategy=())
    return replace(kernel, body=kernel.body[:at]), then


@dataclass(frozen=True, kw_only=True)
class FinishedRow(ThreadMapping):
    """Threads have the columns of a row as its sums lie in their registers."""

    purpose = "A finished row"
    always_vectors = True


@dataclass(frozen=True)
class Reader:
    """What is done to a finished row, as templates ask for it.

    :param axis: its number.
    :param sums: the vector that a thread's sums are handed in.
    :param phases: the statements, without the loads of these.
    :param arrays: what the columns of other rows are moved through.
    """

    axis: str
    sums: str
    phases: tuple[PhaseView, ...]
    arrays: VectorArrays


def finished_row(facts: Facts, handed_on: str, width: int, vec: int) -> Reader:
    """The statements of a kernel that rows are handed to, for ``vec`` columns of a thread."""
    arrays = VectorArrays("f")
    phases = PhaseWriter(facts, FinishedRow(reason="", width=width, vec=vec), {}, arrays).phases
    (sums,) = [name for name, row in arrays.moved.items() if row.buffer == handed_on]
    del arrays.moved[sums]
    without = (replace(p, gets=tuple(a for a in p.gets if a.name != sums)) for p in phases)
    return Reader(facts.kernel.rows[0][0], sums, tuple(without), arrays)
