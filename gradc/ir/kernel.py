"""Kernels and programs: for each row, a kernel makes one or more passes over the columns.

A :class:`Kernel` is an iteration space (``rows`` x ``cols``, each a tuple of axes) with straight-line SSA statements.
Every access index is affine in the axes and gathered values: ``table[%t, d]``.  ``accum`` is the only statement that
combines rows; its index decides the form: a scatter of rows ``[%t, d]``, a sum over rows ``[d]``, a sum over some row
axes ``[b, d]``, a scalar ``[]``.  It adds, unless ``{combine=...}`` is given.  A value's level (the axes it depends on)
and phase (the number of passes over the columns that must precede it) are derived, never stored.

A :class:`Program` is a sequence of kernels and library calls over buffers.  A :class:`Loop` runs some of them for a
block of rows at a time, so that what they hand to one another is never more than a block; its :class:`Sweep` for a
block of columns at a time, too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import Unsupported
from ..process.forks import cached_property
from .dims import Assumption, Dim, Predicate, Size, evaluate, product, same, substitute, symbol, symbols
from .epilogue import PLAIN, Epilogue
from .lexer import format_attributes, format_note, format_value
from .node import REGISTRY, Note
from .sample import MOST, Sample
from .statement import EFFECTS, REDUCTIONS, Axis, Index, Operand, Stmt, format_axes
from .types import Type
from .walk import backward_slice

KINDS = ("input", "output", "temp", "forwarded", "const")
"""The kinds of a program's buffers; those of a loop are of the kinds ``block`` and ``carry``."""
TILE_MAPPINGS = ("mma", "wgmma")
"""Instructions by which a tile multiplies: of a warp (sm_80 on), of four warps (sm_90)."""
MOST_PARTS = 4
"""Parts of an axis of a call."""
RowOrder = Literal["", "by key", "by owner"]
"""What decides in which order a kernel visits its rows: nothing, a sort by the index of an accum, or which row of a
result they belong to."""
ROW_ORDERS: dict[str, RowOrder] = {}
"""Every strategy for an accum by name, and the order of rows that it needs; the records in
:mod:`gradc.analysis.strategies` enter themselves."""


@dataclass(frozen=True)
class Kernel:
    """Statements over rows x cols.

    :param order: the buffer whose accum's strategy decides in which order the rows are visited, or "".
    :param strategy: (buffer of an accum, name of its strategy); filled by choose_reduction.
    """

    name: str
    rows: tuple[Axis, ...]
    cols: tuple[Axis, ...]
    body: tuple[Stmt, ...]
    order: str = ""
    strategy: tuple[tuple[str, str], ...] = ()
    note: Note = field(default=Note(), compare=False)

    @cached_property
    def stmts(self) -> Mapping[str, Stmt]:
        return {s.name: s for s in self.body if s.name}

    @cached_property
    def levels(self) -> Mapping[str, frozenset[str]]:
        """For each value, the axes it depends on."""
        cols = frozenset(a for a, _ in self.cols)
        levels: dict[str, frozenset[str]] = {}
        for s in self.body:
            axes = frozenset(v for i in s.index for v, _ in i.terms if not v.startswith("%"))
            level = axes.union(*(levels[u] for u in s.uses))
            if s.op in REDUCTIONS:
                level -= cols
            elif s.op == "scan":  # of equal values, too
                level |= cols
            if s.name:
                levels[s.name] = level
        return levels

    def stmt_level(self, s: Stmt) -> frozenset[str]:
        """The axes over which a statement is executed; for a reduction, those of its argument."""
        axes = frozenset(v for i in s.index for v, _ in i.terms if not v.startswith("%"))
        if s.op == "scan":
            axes |= {a for a, _ in self.cols}
        return axes.union(*(self.levels[u] for u in s.uses))

    def is_column(self, s: Stmt) -> bool:
        """Whether the statement is executed inside a pass over the columns."""
        return s.op in REDUCTIONS or s.op == "scan" or bool(self.stmt_level(s) & {a for a, _ in self.cols})

    @cached_property
    def in_columns(self) -> Sequence[bool]:
        """For each statement (by position), whether it is executed inside a pass over the columns."""
        return list(map(self.is_column, self.body))

    @cached_property
    def phases(self) -> Mapping[int, int]:
        """For each statement (by position), the number of passes over the columns that must precede it."""
        of_value: dict[str, int] = {}
        of_stmt: dict[int, int] = {}
        for position, s in enumerate(self.body):
            phase = max((of_value[u] for u in s.uses), default=0)
            of_stmt[position] = phase
            if s.name:
                of_value[s.name] = phase + (s.op in REDUCTIONS)
        return of_stmt

    @cached_property
    def passes(self) -> tuple[Phase, ...]:
        """The execution order: for each phase the row statements, then the pass over the columns.  Column statements
        that several passes need are recomputed in each.
        """
        count = max(self.phases.values(), default=0) + 1
        out = []
        for p in range(count):
            row = [s for i, s in enumerate(self.body) if self.phases[i] == p and not self.in_columns[i]]
            roots = [
                s
                for i, s in enumerate(self.body)
                if self.phases[i] == p and self.in_columns[i] and (s.op in REDUCTIONS or s.op in EFFECTS)
            ]
            body = backward_slice(
                self.body, (u for s in roots for u in s.uses), lambda s: self.is_column(s) and s.op not in REDUCTIONS
            )
            out.append(Phase(tuple(row), tuple(body), tuple(roots)))
        return tuple(out)

    @property
    def scans(self) -> tuple[Stmt, ...]:
        return tuple(s for s in self.body if s.op == "scan")

    @property
    def descending(self) -> bool:
        """Whether a pass visits the columns from the last to the first: all scans of a kernel go in one direction."""
        return any(s.attr("reverse") for s in self.scans)

    @property
    def accums(self) -> tuple[Stmt, ...]:
        return tuple(s for s in self.body if s.op == "accum")

    @cached_property
    def handed_on(self) -> str:
        """The buffer whose rows it reads where it has combined them, as two kernels of a program that are launched as
        one; else "".
        """
        return self.order if self.order and self.order in self.reads else ""

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.buffer for s in self.body if s.op in ("load", "search")))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.buffer for s in self.body if s.op in ("store", "accum")))

    @cached_property
    def updates(self) -> tuple[str, ...]:
        """The buffers of which it leaves as it is what its stores do not reach."""
        return tuple(dict.fromkeys(s.buffer for s in self.body if s.op == "store" and s.where))

    @property
    def row_count(self) -> Size:
        return product(size for _, size in self.rows)

    @property
    def col_count(self) -> Size:
        return product(size for _, size in self.cols)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in its text, sorted."""
        names: set[str] = set()
        for _, size in (*self.rows, *self.cols):
            names |= symbols(size)
        for s in self.body:
            for i in s.index:
                names |= symbols(i.const).union(*(symbols(c) for _, c in i.terms))
            for _, value in s.attrs:
                if hasattr(value, "terms"):
                    names |= symbols(value)
        return tuple(sorted(names))

    @property
    def strategies(self) -> Mapping[str, str]:
        return dict(self.strategy)

    @property
    def row_order(self) -> RowOrder:
        """The order in which the rows are visited."""
        return ROW_ORDERS.get(self.strategies.get(self.order, ""), "")

    @property
    def accesses(self) -> list[Stmt]:
        """The statements that access a buffer."""
        return [s for s in self.body if s.buffer]

    def finishes_rows(self, buffer: str, type_: Type) -> bool:
        """Whether the kernel combines rows into a buffer of this type in the order of their keys, so that each is
        finished before the next one begins, and does nothing else: each column combines into its own element.
        """
        effects = [s for s in self.body if not s.name]
        if [(s.op, s.buffer) for s in effects] != [("accum", buffer)] or self.order != buffer:
            return False
        (s,) = effects
        sizes = dict(self.cols)
        if self.row_order != "by key" or any(v in sizes for v, _ in s.index[0].terms):
            return False
        columns = [i.variable for i in s.index[1:]]
        return {*columns} == self.stmt_level(s) & sizes.keys() and all(
            column in sizes and same(sizes[column], size) for column, size in zip(columns, type_.shape[1:], strict=True)
        )

    def reads_own_rows(self, buffer: str, type_: Type) -> bool:
        """Whether row ``r`` reads row ``r`` alone of a buffer of this type, each column its own element, while rows are
        combined into nothing and no data is checked.
        """
        loads = [s for s in self.body if s.buffer == buffer]
        if len(self.rows) != 1 or not loads or any(s.op in ("accum", "check") for s in self.body):
            return False
        (row, count), columns = self.rows[0], dict(self.cols)
        if not same(count, type_.shape[0]) or any(s.op != "load" or s.index[0].variable != row for s in loads):
            return False
        return all(
            (i == Index() and size == 1) or (i.variable in columns and same(columns[i.variable], size))
            for s in loads
            for i, size in zip(s.index[1:], type_.shape[1:], strict=True)
        )

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The buffers, in order of first appearance."""
        return tuple(dict.fromkeys(s.buffer for s in self.body if s.buffer))

    def dims(self, types: Mapping[str, Type]) -> tuple[str, ...]:
        """The symbols of its buffers' types and of its text, in order of first appearance: the size arguments of its
        source.
        """
        sizes = [size for b in self.buffers for size in types[b].shape] + [size for _, size in (*self.rows, *self.cols)]
        plain = [
            text for size in sizes if (text := str(size)) in symbols(size)
        ]  # the symbols of one size are sorted by name
        names = [*plain, *(name for size in sizes for name in sorted(symbols(size))), *self.symbols]
        return tuple(dict.fromkeys(names))

    @property
    def live(self) -> Kernel:
        """The kernel with only the statements its effects need, renumbered."""
        needed = {s.name for s in backward_slice(self.body, (v for s in self.body if not s.name for v in s.uses))}
        names: dict[str, str] = {}
        body = []
        for s in (s for s in self.body if not s.name or s.name in needed):
            if s.name:
                names[s.name] = f"%{len(names)}"
            body.append(
                Stmt(
                    names.get(s.name, ""),
                    s.op,
                    tuple(names[a] for a in s.args),
                    s.dtype,
                    s.buffer,
                    tuple(i.renamed(names) for i in s.index),
                    names.get(s.where, ""),
                    s.attrs,
                    s.of,
                )
            )
        return replace(self, body=tuple(body))

    def renamed(
        self, types: Mapping[str, Type], buffers: Mapping[str, str], dims: Mapping[str, str]
    ) -> tuple[Kernel, dict[str, Type]]:
        """(the kernel with buffers and dims renamed, the types of the renamed buffers); it has no other user names.

        :param types: of the buffers, by their current names.
        """
        symbols_ = {name: symbol(other) for name, other in dims.items()}
        plain = self.substitute(symbols_)
        body = []
        for s in plain.body:
            attrs = tuple((k, "" if k == "source" else v) for k, v in s.attrs)
            body.append(s.altered(buffer=buffers.get(s.buffer, ""), attrs=attrs))
        strategy = tuple((buffers[b], name) for b, name in self.strategy)
        plain = replace(plain, body=tuple(body), order=buffers.get(self.order, ""), strategy=strategy, note=Note())
        return plain, {buffers[b]: types[b].substitute(symbols_) for b in self.buffers}

    def with_axes(self, names: Mapping[str, str]) -> Kernel:
        """The kernel with axes renamed; those that ``names`` lacks keep their names."""

        def renamed(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple((names.get(a, a), n) for a, n in axes)

        body = tuple(s.altered(index=tuple(i.renamed(names) for i in s.index)) for s in self.body)
        return replace(self, rows=renamed(self.rows), cols=renamed(self.cols), body=body)

    def canonical(self, types: Mapping[str, Type]) -> tuple[Kernel, dict[str, Type]]:
        """(the kernel with buffers b0, b1... and dims n0, n1..., their types).  Kernel names are hashes of this form,
        so that kernels with the same structure have the same name.
        """
        buffers = {b: f"b{i}" for i, b in enumerate(self.buffers)}
        dims = {d: f"n{i:02d}" if i > 9 else f"n{i}" for i, d in enumerate(self.dims(types))}
        return self.renamed(types, buffers, dims)

    def named_by_structure(self, meaning: str, types: Mapping[str, Type]) -> Kernel:
        """The kernel named ``MEANING_hash``; kernels that differ only in user names get one name and share code."""
        plain, own = self.canonical(types)
        text = str(replace(plain, name="k")) + ";".join(map(str, own.values()))
        return replace(self, name=f"{meaning}_{hashlib.sha256(text.encode()).hexdigest()[:6]}")

    def rehashed(self, types: Mapping[str, Type]) -> Kernel:
        """The kernel under the meaning that its name says, with the hash of its structure."""
        return self.named_by_structure(self.name.rpartition("_")[0] or self.name, types)

    def fresh_names(self) -> Iterator[str]:
        """Names of values that it does not have, without end."""
        return (name for k in itertools.count(len(self.body)) if (name := f"%{k}") not in self.stmts)

    def substitute(self, values: Mapping[str, Size]) -> Kernel:
        if not values:
            return self

        def of_attrs(attrs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
            return tuple((k, substitute(v, values) if isinstance(v, Dim) else v) for k, v in attrs)

        body = tuple(
            s.altered(index=tuple(i.substitute(values) for i in s.index), attrs=of_attrs(s.attrs)) for s in self.body
        )
        return replace(self, rows=_at_sizes(self.rows, values), cols=_at_sizes(self.cols, values), body=body)

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """Its text, which stages share as they share kernels; ``phase`` precedes the first column statement of each
        pass.
        """
        order = f" order({self.order})" if self.order else ""
        strategy = f" strategy({', '.join(f'{b}: {s}' for b, s in self.strategy)})" if self.strategy else ""
        lines = [
            f"kernel @{self.name} rows({format_axes(self.rows)}) cols({format_axes(self.cols)}){order}{strategy}"
            f" {{{format_note(self.note)}"
        ]
        first = self._first_of_passes()
        for position, s in enumerate(self.body):
            if position in first:
                lines.append("  phase")
            lines.append(f"  {s}")
        return "\n".join([*lines, "}"])

    def _first_of_passes(self) -> set[int]:
        """Positions of the first statement of each pass over the columns."""
        positions: set[int] = set()
        if not self.cols:
            return positions
        try:
            opened = -1
            for position in range(len(self.body)):
                if self.in_columns[position] and self.phases[position] > opened:
                    opened = self.phases[position]
                    positions.add(position)
        except KeyError:  # an invalid kernel (undefined value) must still print, for the verifier's error
            pass
        return positions


@dataclass(frozen=True)
class Phase:
    """One phase: statements executed once per row, then one pass over the columns that ends in ``roots`` (reductions,
    stores, accums).
    """

    row: tuple[Stmt, ...]
    body: tuple[Stmt, ...]
    roots: tuple[Stmt, ...]


@dataclass(frozen=True)
class Call:
    """A library call with named axes: ``matmul c[m, n] <- a[m, k], b[k, n]``.

    An axis may have ``parts``, of which it is the row-major numbering, in the indices of its operands:
    ``axes(m: 8, n: 5, k: 6) parts(k: (k0: 2, k1: 3)) c[m, n] <- matmul a[m, k], x[k0, n + k1]``.

    A contraction converts operands of another dtype to the result's dtype, which holds all their values, when it reads
    them.

    :param add: in a :class:`Loop`, the result is added to what the blocks before it left (``c[m, n] += matmul ...``).
    :param epilogue: of a contraction, what is done to the sums before they are rounded: ``c[m, n] <- matmul a[m, k],
        b[k, n] + v[n] then gelu``.
    :param attrs: attributes of the op that it carries, in braces behind its operands.
    """

    name: str
    op: str
    axes: tuple[Axis, ...]
    out: Operand
    args: tuple[Operand, ...]
    note: Note = field(default=Note(), compare=False)
    add: bool = False
    parts: tuple[tuple[str, tuple[Axis, ...]], ...] = ()
    epilogue: Epilogue[Operand] = PLAIN
    attrs: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(o.buffer for o in self.operands))

    @property
    def finest(self) -> dict[str, tuple[Axis, ...]]:
        """For each axis its parts; an axis without any is its only one."""
        parts = dict(self.parts)
        return {axis: parts.get(axis, ((axis, size),)) for axis, size in self.axes}

    @property
    def operands(self) -> Iterator[Operand]:
        """The operands it reads; an operand's scale follows it, and what the epilogue reads all others."""
        for arg in self.args:
            yield from (arg, arg.scale) if arg.scale else (arg,)
        yield from self.epilogue.reads

    @property
    def results(self) -> tuple[Operand, ...]:
        """The result, and what the epilogue writes."""
        return self.out, *self.epilogue.writes

    @property
    def accesses(self) -> list[Operand]:
        """The operands, and the results."""
        return [*self.operands, *self.results]

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(o.buffer for o in self.results)

    @property
    def result_axes(self) -> list[str]:
        """The axes of the result, in the order in which the call has its axes: that of its buffer may be another.  In a
        loop an index may have a constant, its first row.
        """
        used = {v for i in self.out.index for v, _ in i.terms}
        return [axis for axis, _ in self.axes if axis in used]

    @property
    def views(self) -> tuple[tuple[str, ...], ...]:
        """For each operand, its axes in the order in which the library function takes them."""
        out = self.result_axes
        axes: tuple[tuple[str, ...], ...] = REGISTRY[self.op].views(out, [a for a, _ in self.axes if a not in out])
        return axes

    def substitute(self, values: Mapping[str, Size]) -> Call:
        def of(operand: Operand) -> Operand:
            index = tuple(i.substitute(values) for i in operand.index)
            scale, per = of(operand.scale) if operand.scale else None, _at_sizes(operand.per, values)
            return replace(operand, index=index, scale=scale, per=per)

        parts = tuple((axis, _at_sizes(own, values)) for axis, own in self.parts)
        args, axes, epilogue = tuple(map(of, self.args)), _at_sizes(self.axes, values), self.epilogue.map(of)
        return replace(self, axes=axes, out=of(self.out), args=args, parts=parts, epilogue=epilogue)

    def __str__(self) -> str:
        args, arrow = ", ".join(map(str, self.args)), "+=" if self.add else "<-"
        axes = f"axes({format_axes(self.axes)})"
        if self.parts:
            axes += f" parts({', '.join(f'{axis}: ({format_axes(own)})' for axis, own in self.parts)})"
        more = f"{self.epilogue}{format_attributes(self.attrs)}{format_note(self.note)}"
        return f"call @{self.name} {axes} {self.out} {arrow} {self.op} {args}{more}"


@dataclass(frozen=True)
class Select:
    """Alternative kernels: the first whose predicate over the dims holds is run; the last has no predicate.

    :param sample: numbers of an index that the kernels read, which predicates may compare beside dims.
    """

    cases: tuple[tuple[Predicate | None, Kernel], ...]
    sample: Sample | None = None

    @property
    def name(self) -> str:
        return self.cases[0][1].name

    @property
    def note(self) -> Note:
        return self.cases[0][1].note

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b for _, k in self.cases for b in k.reads))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b for _, k in self.cases for b in k.writes))

    @property
    def bounds(self) -> tuple[tuple[Predicate | None, Predicate | None, Kernel], ...]:
        """Each kernel with what sizes say of its predicate: (it may hold, it holds whatever the data are)."""
        names = self.sample.names if self.sample else ()
        return tuple((*(when.within(names, MOST) if when else (None, None)), k) for when, k in self.cases)

    @property
    def compared(self) -> tuple[Assumption, ...]:
        """The comparisons of its predicates, with the numbers of a sample as large as they may be."""
        most = dict.fromkeys(self.sample.names, MOST) if self.sample else {}
        return tuple(
            replace(c, left=substitute(c.left, most), right=substitute(c.right, most))
            for when, _ in self.cases
            for c in (when.comparisons if when else ())
        )

    def __str__(self) -> str:
        lines = [f"select {self.sample} {{" if self.sample else "select {"]
        for when, kernel in self.cases:
            case = f"when {when}" if when else "else"
            lines.append(_indented(f"{case}: {kernel}"))
        return "\n".join([*lines, "}"])


@dataclass(frozen=True)
class Tile:
    """How a GPU runs a loop as one kernel, a thread block for each block of its rows.

    :param mapping: one of :data:`TILE_MAPPINGS`.  :param warps: of a thread block.
    :param stages: blocks of columns that are loaded at once, the depth of the pipeline.
    :param split: warps that have the same rows, each its part of a block's columns; their sums are added up after the
        sweep, in the order of the columns.
    :param parts: of a block's columns, with which a warp computes one after another: what it holds in registers is that
        of a part, and what is copied and waited for is a block.
    """

    mapping: str
    warps: int
    stages: int
    split: int = 1
    parts: int = 1

    def __str__(self) -> str:
        more = "".join(f", {word} {n}" for word, n in (("split", self.split), ("parts", self.parts)) if n > 1)
        return f"tile({self.mapping}, warps {self.warps}, stages {self.stages}{more})"


@dataclass(frozen=True)
class Carry:
    """What one block of columns hands to the next one, and the last to the steps after the sweep: for each row of the
    block the combination of all columns so far.  It begins with the neutral element.

    :param combine: ``max``, ``min``, ``prod`` or ``sum``.
    :param by: of a sum, the carried maximum m of the same rows to which it is relative: where a block raises m from
        ``a`` to ``b``, what was summed before is multiplied by exp(a - b); "" where there is none.
    """

    name: str
    type: Type
    combine: str
    by: str = ""

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.name, self.type, "carry")

    def __str__(self) -> str:
        return f"carry {self.name}: {self.type} {self.combine}{f' by exp({self.by})' if self.by else ''}"


@dataclass(frozen=True)
class Sweep:
    """Steps that a block of rows of a :class:`Loop` runs for one block of columns after another.

    ::

        loop rows(row: N) by(64) count(rows) {
          sweep cols(col: V) by(64) count(n) to(row+rows) {
            carry top: f32[rows] max
            carry total: f32[rows] sum by exp(top)
            block p: f32[rows,n]
            ...
            accum top[i] <- %3 {combine="max"}
            ...
            accum total[i] <- %9
          }
          ...
        }

    ``col`` is the first column of a block and ``n`` the number of its columns, ``by`` many but in the last block.  An
    ``accum``, or a product with ``+=``, combines a block's columns with those before; a maximum is read as it is so far
    by the steps after its own.  After the sweep, carries are read as the blocks of the loop are.

    :param cols: the axis that is cut: the symbol of a block's first column, and the number of all columns.
    :param by: columns of a block, at least 1.
    :param count: the symbol of the number of a block's columns.
    :param blocks: buffers that live as long as a block of columns.
    :param since: where the first block begins.
    :param to: blocks begin before it; None for all.  Before ``since`` and from ``to`` on nothing is that is not 0.  If
        blocks of rows add to one result, the last one of these, the first to come, has all columns all the same.
    """

    cols: Axis
    by: Size
    count: str
    carries: tuple[Carry, ...]
    blocks: tuple[Buffer, ...]
    steps: tuple[Kernel | Call, ...]
    since: Size = 0
    to: Size | None = None

    @property
    def symbols(self) -> tuple[str, str]:
        """What it binds."""
        return self.cols[0], self.count

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (*(carry.buffer for carry in self.carries), *self.blocks)

    @property
    def facts(self) -> tuple[Assumption, ...]:
        """What holds of its symbols in each block."""
        own = symbol(self.cols[0]) + symbol(self.count)
        return Assumption(self.cols[1], ">=", own), Assumption(self.by, ">=", symbol(self.count))

    def positions(self, dims: Mapping[str, int], whole: bool) -> Iterator[dict[str, int]]:
        """What it binds, for each block in order.

        :param dims: with what the loop binds.  :param whole: all columns, whatever ``since`` and ``to`` say.
        """
        size, by = evaluate(self.cols[1], dims), evaluate(self.by, dims)
        begin = 0 if whole else max(0, evaluate(self.since, dims))
        end = size if whole or self.to is None else min(size, evaluate(self.to, dims))
        for first in range(begin, end, by):
            yield {self.cols[0]: first, self.count: min(by, size - first)}

    def __str__(self) -> str:
        bounds = (f" from({self.since})" if self.since != 0 else "") + ("" if self.to is None else f" to({self.to})")
        lines = [f"sweep cols({format_axes((self.cols,))}) by({self.by}) count({self.count}){bounds} {{"]
        lines += [f"  {b}" for b in (*self.carries, *self.blocks)]
        return "\n".join([*lines, *(_indented(str(step)) for step in self.steps), "}"])


@dataclass(frozen=True)
class Loop:
    """Steps that are run for one block of rows after another, for each position along the axes ``over``.

    ::

        loop over(b: B, h: H) rows(s: S) by(128) count(c) cols(w: S) to(s+c) {
          block t7: f32[c,w]
          call @matmul axes(m: c, n: w, k: 64) t7[m, n] <- matmul q[(b), (h), m + (s), k], k[(b), (h), n, k]
          ...
        }

    The steps are written over the rows of one block.  The symbols ``b`` and ``h`` are a position along their axes,
    ``s`` is the first row of the block and ``c`` the number of its rows, ``by`` many but in the last block.  Positions
    along ``over`` are independent of each other, but those along its ``sequential`` axes: a kernel may read there, and
    write anew, the same part of a buffer at each of them (a sum over heads).  Along the rows, only a call that adds to
    its result reads what another block wrote.  The last block comes first: it writes what others add to; without rows
    it has none.

    ``w`` are the columns that the steps go over, ``to`` many at most, behind which nothing is that is not 0 (scores
    above the diagonal): more for later rows, and all of them in the last block.

    A loop whose columns come in blocks, too, has sweeps (:class:`Sweep`): each block of rows makes one after the other,
    and then runs the steps of the loop itself, the epilogue, once.

    :param over: the outer axes, by the symbol of a position.
    :param rows: the axis that is cut: the symbol of a block's first row, and the number of all rows.
    :param by: rows of a block, at least 1 wherever there are rows.
    :param count: the symbol of the number of a block's rows.
    :param blocks: buffers that live as long as a block.
    :param cols: the symbol of a block's columns, and the number of all columns; () where blocks have all.
    :param to: columns of a block but the last, a size that rises with the first row, and is right for blocks of any
        size.
    :param sequential: those of ``over``, by their symbols, whose positions come one after another.
    :param sweeps: what each block does before its steps, of which there may be none then.
    :param tile: how a GPU runs it as one kernel; None leaves that open.
    """

    over: tuple[Axis, ...]
    rows: Axis
    by: Size
    count: str
    blocks: tuple[Buffer, ...]
    steps: tuple[Kernel | Call, ...]
    cols: tuple[Axis, ...] = ()
    to: Size = 0
    sequential: tuple[str, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    tile: Tile | None = None

    @property
    def name(self) -> str:
        return f"loop {self.items[0].name}"

    @property
    def note(self) -> Note:
        return self.items[0].note

    @cached_property
    def items(self) -> tuple[Kernel | Call, ...]:
        """The kernels and calls of its sweeps, then its steps."""
        return (*(step for sweep in self.sweeps for step in sweep.steps), *self.steps)

    def with_items(self, rewrite: Callable[[Kernel | Call], Kernel | Call]) -> Loop:
        """The loop with other kernels and calls for its own."""
        sweeps = tuple(replace(sweep, steps=tuple(map(rewrite, sweep.steps))) for sweep in self.sweeps)
        return replace(self, sweeps=sweeps, steps=tuple(map(rewrite, self.steps)))

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Its blocks, and the carries and blocks of its sweeps."""
        return (*self.blocks, *(b for sweep in self.sweeps for b in sweep.buffers))

    @property
    def reads(self) -> tuple[str, ...]:
        return self._outside(b for step in self.items for b in step.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        return self._outside(b for step in self.items for b in step.writes)

    def _outside(self, names: Iterator[str]) -> tuple[str, ...]:
        own = {b.name for b in self.buffers}
        return tuple(dict.fromkeys(name for name in names if name not in own))

    @property
    def parallel(self) -> tuple[Axis, ...]:
        """The outer axes whose positions are independent of each other."""
        return tuple(axis for axis in self.over if axis[0] not in self.sequential)

    @property
    def reduces_rows(self) -> bool:
        """Whether blocks of rows add to one result, one after another; else they are independent of each other."""
        written = self.writes
        return any(isinstance(step, Call) and step.add and step.out.buffer in written for step in self.items)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that it stands over."""
        inner = (size for sweep in self.sweeps for size in (sweep.cols[1], sweep.by))
        return (*(size for _, size in (*self.over, self.rows, *self.cols)), self.by, self.to, *inner)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """What the loop binds, and its sweeps."""
        own = (*(name for name, _ in self.over), self.rows[0], self.count, *(name for name, _ in self.cols))
        return (*own, *(name for sweep in self.sweeps for name in sweep.symbols))

    @property
    def facts(self) -> tuple[Assumption, ...]:
        """What holds of its symbols in each block."""
        inside = (Assumption(size, ">=", symbol(name) + 1) for name, size in self.over)
        first, size = self.rows
        own = symbol(first) + symbol(self.count)
        columns = (Assumption(size, ">=", symbol(name)) for name, size in self.cols)
        swept = (fact for sweep in self.sweeps for fact in sweep.facts)
        return (*inside, Assumption(size, ">=", own), Assumption(self.by, ">=", symbol(self.count)), *columns, *swept)

    def positions(self, dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """What the loop binds, for each block in order."""
        outer = [evaluate(size, dims) for _, size in self.over]
        rows, by = evaluate(self.rows[1], dims), evaluate(self.by, dims)
        for place in itertools.product(*map(range, outer)):
            for first in reversed(range(0, max(rows, 1), by)):
                bound = dict(zip(self.symbols, (*place, first, min(by, rows - first)), strict=False))
                for name, size in self.cols:
                    every = evaluate(size, dims)
                    to = evaluate(self.to, {**dims, **bound})
                    bound[name] = every if self.is_last(bound, rows) else max(0, min(to, every))
                yield bound

    def is_last(self, position: Mapping[str, int], rows: int) -> bool:
        """Whether a block has the last rows, which is the first one of its position along ``over``."""
        return position[self.rows[0]] + position[self.count] >= rows

    def largest(self, dims: Mapping[str, int]) -> dict[str, int]:
        """The dims with what the loop binds in a block that is as large as any."""
        rows, by = evaluate(self.rows[1], dims), evaluate(self.by, dims)
        columns = {name: evaluate(size, dims) for name, size in self.cols}
        columns |= {s.count: min(evaluate(s.by, dims), evaluate(s.cols[1], dims)) for s in self.sweeps}
        return {**dims, **dict.fromkeys(self.symbols, 0), self.count: min(by, rows), **columns}

    def __str__(self) -> str:
        over = f" over({format_axes(self.over)})" if self.over else ""
        over += f" sequential({', '.join(self.sequential)})" if self.sequential else ""
        cols = f" cols({format_axes(self.cols)}) to({self.to})" if self.cols else ""
        cols += f" {self.tile}" if self.tile else ""
        lines = [f"loop{over} rows({format_axes((self.rows,))}) by({self.by}) count({self.count}){cols} {{"]
        lines += [f"  {b}" for b in self.blocks]
        return "\n".join([*lines, *(_indented(str(step)) for step in (*self.sweeps, *self.steps)), "}"])


Step = Kernel | Call | Select | Loop


@dataclass(frozen=True)
class Buffer:
    """A typed memory region.

    :param kind: ``input``, ``output``, ``temp``, ``forwarded`` or ``const``; in a loop ``block`` or ``carry``.  A
        forwarded buffer has no memory, but where a choice takes a kernel that finishes no row before the others: the
        kernel that combines rows into it hands each row that is finished to the next step, which alone reads it, and
        row by row.
    :param alias: the buffer whose bytes it shares (reshape).
    :param value: the elements of a const, in row-major order.
    :param slot: temps of one slot are never alive together; set by plan_buffers, which places them for given sizes.
    """

    name: str
    type: Type
    kind: str = "temp"
    alias: str = ""
    value: tuple[int | float | bool, ...] = ()
    slot: int = -1

    def __str__(self) -> str:
        alias = f" of {self.alias}" if self.alias else ""
        slot = f" slot {self.slot}" if self.slot >= 0 else ""
        value = f" = {format_value(self.value, exact=True)}" if self.kind == "const" else ""
        return f"{self.kind} {self.name}: {self.type}{alias}{slot}{value}"


@dataclass(frozen=True)
class MissedFusion:
    """Two kernels that would save bytes as one, and why they are two."""

    first: str
    second: str
    nbytes: Size
    why: str


@dataclass(frozen=True)
class MissedTile:
    """A product with what is computed with it that is no loop on tensor cores, and why.

    :param step: the name of the product's step.
    """

    step: str
    note: Note
    why: str


@dataclass(frozen=True)
class Program:
    """Ordered steps over buffers.

    :param batches: (the first, one after the last) of steps none of which waits for another, and may run along with.
    :param missed: the pairs of kernels that schedule could not fuse; like notes it is neither text nor compared.
    :param untiled: the products that tile_rows made no loop of, alike.
    """

    name: str
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    assumptions: tuple[Assumption, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()  # output name -> buffer; two outputs may have the same buffer
    notes: Mapping[str, Note] = field(default_factory=dict, compare=False, repr=False)
    batches: tuple[tuple[int, int], ...] = ()
    missed: Sequence[MissedFusion] = field(default=(), compare=False, repr=False)
    untiled: Sequence[MissedTile] = field(default=(), compare=False, repr=False)

    @cached_property
    def buffer(self) -> Mapping[str, Buffer]:
        """Every buffer by its name, those of loops too."""
        return {b.name: b for b in (*self.buffers, *(b for loop in self.loops for b in loop.buffers))}

    @cached_property
    def types(self) -> Mapping[str, Type]:
        """The type of every buffer, those of loops too."""
        return {name: b.type for name, b in self.buffer.items()}

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(step for step in self.steps if isinstance(step, Loop))

    def copied(self, kernel: Kernel) -> tuple[str, ...]:
        """(source, target) of a kernel that copies one buffer into another of the same type, each element to its own
        place, and does nothing else: where both are one memory, nothing at all.
        """
        if [s.op for s in kernel.body] != ["load", "store"]:
            return ()
        load, store = kernel.body
        pair = (load.buffer, store.buffer)
        plain = load.index == store.index and not (load.where or store.where) and store.args == (load.name,)
        return pair if plain and len({self.buffer[b].type for b in pair if b in self.buffer}) == 1 else ()

    def begins_update(self, kernel: Kernel) -> bool:
        """Whether it copies a donated input for other kernels to update: nothing moves where the caller's memory is
        taken.
        """
        pair = self.copied(kernel)
        return bool(pair) and any(pair[1] in other.updates for other in self.kernels)

    def root(self, name: str) -> str:
        """The buffer that owns the bytes of ``name``."""
        buffer = self.buffer[name]
        while buffer.alias:
            buffer = self.buffer[buffer.alias]
        return buffer.name

    @cached_property
    def sharing(self) -> Mapping[str, tuple[str, ...]]:
        """The buffers, but for those of loops, that have the bytes of each buffer that owns some."""
        names: dict[str, list[str]] = {}
        for b in self.buffers:
            names.setdefault(self.root(b.name) if b.alias else b.name, []).append(b.name)
        return {root: tuple(own) for root, own in names.items()}

    @cached_property
    def touching(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of the steps that read or write each buffer that any does."""
        numbers: dict[str, list[int]] = {}
        for number, step in enumerate(self.steps):
            for name in dict.fromkeys((*step.reads, *step.writes)):
                numbers.setdefault(name, []).append(number)
        return {name: tuple(own) for name, own in numbers.items()}

    @cached_property
    def forwards(self) -> Mapping[int, str]:
        """The steps that hand finished rows to the next one, by number, and the buffer whose rows these are."""
        own = {b.name for b in self.buffers if b.kind == "forwarded"}
        return {number: name for number, step in enumerate(self.steps) for name in step.writes if own and name in own}

    def hands_on(self, number: int, item: Kernel | Call | Loop) -> bool:
        """Whether what a step runs hands its rows to the next step: of a choice the kernels that finish one row after
        another do, and the others store theirs.
        """
        name = self.forwards.get(number, "")
        return bool(name) and isinstance(item, Kernel) and item.finishes_rows(name, self.types[name])

    def handed_on(self, dims: Mapping[str, int]) -> frozenset[str]:
        """The forwarded buffers that have no memory at these sizes."""
        return frozenset(
            name
            for number, name in self.forwards.items()
            if all(self.hands_on(number, item) for item in possible(self.steps[number], dims))
        )

    def of_kind(self, kind: str) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.kind == kind)

    def with_kernels(self, rewrite: Callable[[Kernel], Kernel]) -> Program:
        """The program with other kernels for its own, not those of selects and loops, each named by its structure;
        itself where none is another.
        """

        def made(step: Step) -> Step:
            other = rewrite(step) if isinstance(step, Kernel) else step
            return other.rehashed(self.types) if isinstance(other, Kernel) and other != step else step

        steps = tuple(map(made, self.steps))
        return self if steps == self.steps else replace(self, steps=steps)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, including the alternatives of selects and the steps of loops."""
        return tuple(k for step in self.steps for k in alternatives(step) if isinstance(k, Kernel))

    @cached_property
    def dims(self) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for b in self.buffers:
            for size in b.type.shape:
                names.update(dict.fromkeys(sorted(symbols(size))))
        for k in self.kernels:
            names.update(dict.fromkeys(k.symbols))
        for step in self.steps:
            for item in alternatives(step):
                if isinstance(item, Call):
                    for _, size in item.axes:
                        names.update(dict.fromkeys(sorted(symbols(size))))
            if isinstance(step, Loop):
                for size in step.sizes:
                    names.update(dict.fromkeys(sorted(symbols(size))))
        bound = {name for loop in self.loops for name in loop.symbols}
        return tuple(name for name in names if name not in bound)

    def __str__(self) -> str:
        lines = [f"program @{self.name} {{"]
        lines += [f"  {fact}" for fact in self.assumptions]
        lines += [f"  {b}{format_note(self.notes.get(b.name))}" for b in self.buffers]
        steps = [str(step) for step in self.steps]
        for begin, end in reversed(self.batches):
            steps[begin:end] = ["\n".join(["batch {", *map(_indented, steps[begin:end]), "}"])]
        lines += map(_indented, steps)
        outputs = ", ".join(f"{name}={buffer}" for name, buffer in self.outputs)
        return "\n".join([*lines, f"  return {outputs}".rstrip(), "}"])


def _at_sizes(axes: tuple[Axis, ...], values: Mapping[str, Size]) -> tuple[Axis, ...]:
    """Axes whose extents are those at the sizes that are given."""
    return tuple((axis, substitute(extent, values)) for axis, extent in axes)


def _indented(text: str) -> str:
    return "  " + text.replace("\n", "\n  ")


def taken(step: Step, dims: Mapping[str, int], sampled: Mapping[str, int] | None = None) -> Kernel | Call | Loop:
    """The kernel, call or loop that a step executes at these sizes.

    :param sampled: the numbers of its sample, 0 where they are not given: those of places anywhere, no two of them
        alike.  A dim of another program may have the name of one.
    """
    if not isinstance(step, Select):
        return step
    known = {**dims, **dict.fromkeys(step.sample.names, 0), **(sampled or {})} if step.sample else dims
    return next(k for when, k in step.cases if when is None or when.holds(known))


def possible(step: Step, dims: Mapping[str, int]) -> Iterator[Kernel | Call | Loop]:
    """What a step may execute at these sizes, whatever the data are."""
    if not isinstance(step, Select):
        yield step
        return
    for may, must, kernel in step.bounds:
        if may is None or may.holds(dims):
            yield kernel
            if must is None or must.holds(dims):
                return


def alternatives(step: Step) -> Iterator[Kernel | Call]:
    """The kernels or calls that a step may execute; those of a loop, in their order."""
    if isinstance(step, Select):
        yield from (k for _, k in step.cases)
    elif isinstance(step, Loop):
        yield from step.items
    else:
        yield step


def refuse_sweeps(program: Program, target: str) -> None:
    """
    :raises Unsupported: a loop of the program has blocks of columns, for which the target has no lowering.
    """
    for loop in program.loops:
        if loop.sweeps:
            raise Unsupported(
                f"a loop over blocks of columns on the target {target}: {program.name} has one in {loop.name!r}; the"
                " target numpy and gradc.interp run it"
            )


def refuse_stored_rows(program: Program, target: str) -> None:
    """
    :raises Unsupported: only some kernels of a choice hand their rows on, for which the target has no lowering.
    """
    for number, name in program.forwards.items():
        if isinstance(program.steps[number], Select):
            raise Unsupported(
                f"a choice of kernels that hand on rows on the target {target}: {program.name} has one for {name!r};"
                " the targets cuda, cuda-sim and numpy run it"
            )


def facts(step: Step) -> tuple[Assumption, ...]:
    """What holds of the symbols that a step binds."""
    return step.facts if isinstance(step, Loop) else ()
