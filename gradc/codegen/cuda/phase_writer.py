"""A kernel's phases as statements of a GPU's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir.kernel import Kernel, Phase
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import F32
from ..declarations import used
from ..exponentials import is_exp_below_one, narrow_exponentials
from ..expr import ROUNDED, carrier, literal_in_memory, loaded, to_memory, unrounded, variable
from ..index import number_of_place
from ..phases import phase_comment
from ..text import CODES
from .accums import Accum
from .axes import axis_declarations, declared
from .columns import OFFSETS, Access, access, linear
from .facts import Facts
from .mapping import ThreadMapping, even_columns
from .reductions import Reduction, Reductions, Scan


@dataclass(frozen=True)
class VectorAccess:
    """A thread's columns of one row, moved between memory and an array of registers at once.

    :param name: the array.
    :param ctype: of an element, as it is stored.
    :param address: of the row's first column.
    :param guard: ``if (v3) ``, or nothing.
    :param other: an element where the guard does not hold, as it lies in memory.
    :param function: what moves them.
    :param first: whether the load begins before the row's first phase.
    """

    name: str
    ctype: str
    address: str
    guard: str = ""
    other: str = ""
    function: str = "gradc_get"
    first: bool = False


@dataclass(frozen=True)
class PhaseView:
    """A phase: statements of the row, then a walk over its columns.

    :param comment: what it computes, as a C comment.
    :param row: statements of the row, in order; ``values`` those that name a value, ``effects`` the others.
    :param body: statements of a column.
    :param columns: whether there is a walk over the columns.
    :param scans: what its scans carry, :param scanned: the statements of a column that compute them, and nothing else.
    :param reductions: what the walk reduces.
    :param gets: loads of a thread's columns before their statements.
    :param puts: stores behind them.
    """

    comment: str
    row: tuple[str, ...]
    values: tuple[str, ...]
    effects: tuple[str, ...]
    body: tuple[str, ...]
    columns: bool
    scans: tuple[Scan, ...]
    scanned: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    gets: tuple[VectorAccess, ...]
    puts: tuple[VectorAccess, ...]

    @property
    def loads_first(self) -> tuple[VectorAccess, ...]:
        """Its loads that begin before the row's first phase."""
        return tuple(a for a in self.gets if a.first)

    @property
    def loads(self) -> tuple[VectorAccess, ...]:
        """Its other loads."""
        return tuple(a for a in self.gets if not a.first)

    @property
    def text(self) -> str:
        """All of it, to look for names in."""
        moved = [part for a in (*self.gets, *self.puts) for part in (a.address, a.guard)]
        reduced = [part for r in self.reductions for part in (r.start, r.result)]
        return "\n".join((*self.row, *(s.start for s in self.scans), *self.body, *moved, *reduced))


class VectorArrays:
    """The arrays of registers that a thread's columns of a row are moved through, of all functions of a kernel.

    :param of: what tells their names from those of other rows.
    """

    def __init__(self, of: str = "") -> None:
        self.suffix = of and f"_{of}"
        self.names: dict[tuple[str, Index, str], str] = {}
        self.moved: dict[str, Access] = {}

    def of(self, s: Stmt, row: Access) -> str:
        """The array of a load or store of a row."""
        name = f"{'loaded' if s.op == 'load' else 'stored'}{self.suffix}{len(self.names)}"
        masked = f"{s.where} else {dict(s.attrs).get('other', 0)!r}" if s.where else ""
        name = self.names.setdefault((row.buffer, row.base, s.op + masked), name)
        self.moved[name] = row
        return name


@dataclass
class _Walk:
    """What a walk over the columns is made of while its statements are written.

    :ivar body: statements of a column.
    :ivar scans: what its scans carry, :ivar scanned: statements of a column that compute them.
    :ivar reductions: what it reduces.
    :ivar gets: loads before them.
    :ivar puts: stores behind them.
    """

    body: list[str] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    scanned: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    gets: dict[str, VectorAccess] = field(default_factory=dict)
    puts: dict[str, VectorAccess] = field(default_factory=dict)


def stored_casts(kernel: Kernel) -> dict[str, Stmt]:
    """Casts of columns to storage floats that nothing but stores of this dtype uses, by name."""
    users: dict[str, list[Stmt]] = {}
    for s in kernel.body:
        for name in s.uses:
            users.setdefault(name, []).append(s)
    return {
        s.name: s
        for s in kernel.body
        if s.op == "cast" and s.dtype is not None and s.dtype.name in ROUNDED and kernel.is_column(s)
        if all(u.op == "store" and u.dtype is s.dtype and u.where != s.name for u in users.get(s.name, []))
    }


class PhaseWriter:
    """Writes a kernel's phases under a mapping.

    :param arrays: what a thread's columns are moved through; entered here.
    :param absmax: whether nothing is written, and only the largest |value| that will be added in fixed point is found.
    :ivar phases: what was written.
    :ivar loaded_first: the arrays whose loads begin before a row's first phase.
    """

    def __init__(
        self,
        facts: Facts,
        mapping: ThreadMapping,
        accums: Mapping[str, Accum],
        arrays: VectorArrays,
        absmax: bool = False,
    ):
        self.facts, self.mapping, self.accums, self.arrays, self.absmax = facts, mapping, accums, arrays, absmax
        self.k, self.types, self.scribe = facts.kernel, facts.types, facts.scribe
        self.reductions = Reductions(facts, mapping)
        self.loaded_first: set[str] = set()
        self.stored_casts = stored_casts(self.k)
        self.narrow_exponentials = narrow_exponentials(self.k.body)
        phases, self.exp_sums = mapping.phases(self.k)
        self.kept_first = {} if absmax or mapping.row is None else mapping.row.kept
        written = facts.absmax_kernel.passes if absmax else phases
        self.phases = tuple(self.phase(p, i) for i, p in enumerate(written))

    # -- a phase -------------------------------------------------------------------------------------------------------

    def phase(self, p: Phase, number: int) -> PhaseView:
        """What templates are given of a phase."""
        walk = _Walk()
        scanned = {s.name for s in self.facts.rows.slice_of([s.name for s in self.k.scans])}
        for s in self.facts.rows.values(p, 0 if self.absmax else number, self.cached):
            if s.name in self.stored_casts:
                continue
            if s.op == "scan":
                carried, line = self.reductions.scan(s, number)
                walk.scans.append(carried)
                lines = [line]
            else:
                lines = self.kept(s, walk, number)
            walk.body += lines
            walk.scanned += lines if s.name in scanned else ()
        for s in p.roots:
            self.root(s, walk)
        values = [self.scribe.value(s) for s in p.row if s.name]
        effects = [line for s in p.row if not s.name for line in self.effect(s, once=True)]
        row = [line for s in p.row for line in ([self.scribe.value(s)] if s.name else self.effect(s, once=True))]
        return PhaseView(
            comment=phase_comment(self.k, p, number),
            row=tuple(row),
            values=tuple(values),
            effects=tuple(effects),
            body=tuple(self.column(walk.body)),
            columns=bool(p.roots),
            scans=tuple(walk.scans),
            scanned=tuple(self.column(walk.scanned)) if walk.scans else (),
            reductions=tuple(self.reductions.in_pairs(walk.reductions)),
            gets=tuple(walk.gets.values()),
            puts=tuple(walk.puts.values()),
        )

    def column(self, body: Sequence[str]) -> list[str]:
        """The statements of a column behind its number and its axes."""
        if self.k.scans:
            column = declared(f"const ix c = {'cols - 1 - col' if self.k.descending else 'col'};")
            return [*used([column, *axis_declarations(self.k.cols, "c")], "\n".join(body)), *body]
        even = self.mapping.ragged or even_columns(self.facts, self.mapping.vec)
        guard = [] if even else ["if (c >= end_col) continue;"]
        number = declared("const ix c = col + j * col_step;")
        lines = used([number, *axis_declarations(self.k.cols, "c")], "\n".join([*guard, *body]))
        first = lines[:1] if lines[:1] == [number.line] else []
        return [*first, *guard, *lines[len(first) :], *body]

    def root(self, s: Stmt, walk: _Walk) -> None:
        """What a walk over the columns is for: a reduction or an effect."""
        exp_sums = {} if self.absmax else self.exp_sums
        if any(s is e.stmt for e in exp_sums.values()):
            return
        if s.name in exp_sums:
            reduction = self.reductions.with_exp_sum(s, exp_sums[s.name])
        elif s.op in REDUCTIONS:
            reduction = self.reductions.reduction(REDUCTIONS[s.op], s.args[0], variable(s.name), s.dtype)
        elif s.op == "accum" and not self.facts.rows.in_columns(s) and self.mapping.shares_rows:
            reduction = self.added_up(s)
        else:
            self.column_effect(s, walk)
            return
        walk.body += self.of_columns(reduction.lines)
        walk.reductions.append(reduction)

    def column_effect(self, s: Stmt, walk: _Walk) -> None:
        """A store, accum or check of each column, or of a thread's columns at once."""
        if not self.absmax and (target := self.vector_add(s)) is not None:
            name = f"z{self.accums[s.buffer].number}"
            self.arrays.moved[name] = target
            guard = f"if ({variable(s.where)}) " if s.where else ""
            walk.puts[name] = VectorAccess(name, target.ctype, target.at, guard, function="gradc_atomic_add_row")
            walk.body.append(f"{name}[j] = {variable(s.args[0])};")
        elif not self.absmax and s.dtype is not None and (moved := self.vector(s)) is not None:
            name, row = moved
            if s.dtype.name == "bf16" and (cast := self.stored_casts.get(s.args[0])) is not None:
                value = unrounded(variable(cast.args[0]), self.scribe.values[cast.args[0]])
                walk.puts[name] = VectorAccess(name, "f32", row.at, function="gradc_put_bf16")
                walk.body.append(f"{name}[j] = {value};")
                return
            walk.puts[name] = VectorAccess(name, row.ctype, row.at, function="gradc_put")
            walk.body.append(f"{name}[j] = {self.in_memory(s)};")
        else:
            walk.body += self.of_columns(self.effect(s))

    def of_columns(self, lines: Iterable[str]) -> list[str]:
        """Statements that a thread behind the last column must leave out."""
        return [f"if (live) {line}" if self.mapping.predicate == "columns" else line for line in lines]

    # -- a thread's columns at once ------------------------------------------------------------------------------------

    def vector(self, s: Stmt) -> tuple[str, Access] | None:
        """The array that a linear access moves a thread's columns through, if they move together."""
        m = self.mapping
        if m.vec == 1 and m.prefetch == 1 and (m.unroll < 2 or s.op != "load") and not m.always_vectors:
            return None
        row = access(self.k, self.types, s, masked=True)
        if row is None or not row.fits(m.vec):
            return None
        return self.arrays.of(s, row), row

    def vector_add(self, s: Stmt) -> Access | None:
        """The row of f32 that an atomic accum adds a thread's neighbouring columns to: with words of 16 bytes where the
        hardware has them.
        """
        if (
            s.op != "accum"
            or (a := self.accums[s.buffer]).strategy.atomics != "values"
            or s.combine != "sum"
            or a.sum_dtype is not F32
            or self.mapping.vec % 4
            or not self.facts.rows.in_columns(s)
        ):
            return None
        base = linear(self.k, self.types, s)
        if base is None or (s.where and self.k.levels[s.where] & {a for a, _ in self.k.cols}):
            return None
        row = Access(a.target, "f32", 4, base)
        return row if row.fits(self.mapping.vec) else None

    def loads_first(self, s: Stmt, row: Access) -> bool:
        """Whether a load is one of the row's, and its place known before the first phase."""
        places, rows = [v for v, _ in row.base.terms], {a for a, _ in self.k.rows}
        known = not s.where and not any(v.startswith("%") for v in places)
        task = self.mapping.row
        return task is not None and task.loads_first and known and bool(rows & set(places))

    # -- values that stay in registers ---------------------------------------------------------------------------------

    def cached(self, s: Stmt, number: int) -> Stmt | None:
        """What stands for a value that an earlier phase has left in a register."""
        if self.kept_first.get(s.name, number) >= number:
            return None
        return replace(s, op="cached", args=(), where="", attrs=())

    def kept(self, s: Stmt, walk: _Walk, number: int) -> list[str]:
        """A value's line; behind it what keeps it for later phases."""
        assert s.dtype is not None
        if s.op == "cached":
            return [f"const {carrier(s.dtype)} {variable(s.name)} = kept_{variable(s.name)}[t][j];"]
        kept = self.kept_first.get(s.name) == number
        store = [f"kept_{variable(s.name)}[t][j] = {variable(s.name)};"] if kept else []
        return [self.taken(s, walk), *store]

    def taken(self, s: Stmt, walk: _Walk) -> str:
        """A value's line; a linear load reads what has been fetched.

        Where columns are scanned, threads behind the last one go along, and read nothing; those behind the last of rows
        side by side read that row, if nothing is written there.
        """
        predicated = self.mapping.predicate == "columns" or (
            self.mapping.predicate == "rows" and self.facts.may_alias(s.buffer)
        )
        if predicated and s.op in ("load", "search"):
            assert s.dtype is not None
            value = self.scribe.expression(s)
            return f"const {carrier(s.dtype)} {variable(s.name)} = live ? {f'({value})' if s.where else value} : 0;"
        moved = self.vector(s) if s.op == "load" else None
        if s.name in self.narrow_exponentials:
            return f"const f32 {variable(s.name)} = gradc_exp_narrow({variable(s.args[0])});"
        if is_exp_below_one(self.k.stmts, s):
            return f"const f32 {variable(s.name)} = gradc_exp_f32({variable(s.args[0])});"
        if s.op == "load" and moved is None and s.where and s.dtype is not None:  # predicated, and no branch
            other = literal_in_memory(s.dtype, dict(s.attrs).get("other", 0))
            element = f"({variable(s.where)} ? {self.scribe.element(s.buffer, s.index)} : {other})"
            return f"const {carrier(s.dtype)} {variable(s.name)} = {loaded(s.dtype, element)};"
        if moved is None or s.dtype is None:
            return self.scribe.value(s)
        name, row = moved
        if name not in self.loaded_first:
            guard, first = f"if ({variable(s.where)}) " if s.where else "", self.loads_first(s, row)
            other = literal_in_memory(s.dtype, dict(s.attrs).get("other", 0)) if s.where else ""
            walk.gets[name] = VectorAccess(name, row.ctype, row.at, guard, other, first=first)
            self.loaded_first |= {name} if first else set()
        together = name in self.loaded_first or self.mapping.loads_together
        array = f"{name}[{'t' if together else 0 if self.absmax else self.mapping.array_slot}]"
        read = f"gradc_bf16_at({array}, j)" if s.dtype.name == "bf16" else loaded(s.dtype, f"{array}.items[j]")
        return f"const {carrier(s.dtype)} {variable(s.name)} = {read};"

    # -- reductions ----------------------------------------------------------------------------------------------------

    def added_up(self, s: Stmt) -> Reduction:
        """An accum of all columns to one element: they are added up first."""
        number = self.accums[s.buffer].number
        name = f"b_a{number}"
        reduction = self.reductions.reduction(
            s.combine, s.args[0], name, self.types[s.buffer].dtype, s.where, f"t_a{number}"
        )
        effect = self.effect(replace(s, where=""), name, once=True)
        return replace(reduction, result="\n".join([reduction.result, *effect]))

    # -- effects -------------------------------------------------------------------------------------------------------

    def effect(self, s: Stmt, value: str = "", once: bool = False) -> list[str]:
        """A store, accum or check; once: by one thread of the task."""
        value = value or variable(s.args[0])
        if self.absmax and not (s.op == "accum" and self.accums[s.buffer].fixed):
            return []
        live = ["live"] if self.mapping.predicate == "rows" and not self.absmax else []  # absmax: rows that there are
        first = ["lane == 0"] if once and self.mapping.shares_rows else []
        alone = f"if ({' && '.join([*live, *first])}) " if live or first else ""
        if self.absmax:
            return [self.accums[s.buffer].find_largest(s, value, alone)]
        batch = next((b for b in self.facts.vector_groups if any(a is s for group in b for a in group)), None)
        if batch is not None and self.mapping.exchanges:
            return self.accums[s.buffer].add_together(batch) if s is batch[-1][-1] else []
        if s.op == "check":
            return self.check(s, value, alone)
        if s.op == "store":
            assert s.dtype is not None
            read = ["gradc_sync<WIDTH>(); /* the task's other threads have read what may lie there */"]
            where = f"if ({variable(s.where)}) " if s.where else ""
            store = f"{alone}{where}{self.scribe.element(s.buffer, s.index)} = {self.in_memory(s)};"
            return [*(read if first and self.facts.may_alias(s.buffer) else []), store]
        return [self.accums[s.buffer].add(s, value, alone)]

    def in_memory(self, s: Stmt) -> str:
        """A stored value as it lies in memory; one that is rounded for this alone is converted once."""
        assert s.dtype is not None
        if (cast := self.stored_casts.get(s.args[0])) is None:
            return to_memory(s.dtype, variable(s.args[0]))
        source = self.scribe.values[cast.args[0]]
        return to_memory(s.dtype, unrounded(variable(cast.args[0]), source))

    def check(self, s: Stmt, value: str, alone: str) -> list[str]:
        """Reports an index that is out of range, or below the one before it."""
        # along the axes that it does not depend on the value repeats: the first is meant
        at = number_of_place((*self.k.rows, *self.k.cols), self.k.stmt_level(s), OFFSETS)
        bound = self.scribe.size(s.attr("bound"))
        low = [variable(v) for v in s.args[1:]]
        report = f"{alone}if ({{0}}) gradc_report(flag, site, aux, {{1}}, {at}, {value}, {{2}});"
        below = [report.format(f"{value} < {v}", CODES["GRADC_DECREASES"], v) for v in low]
        above = report.format(f"(u64){value} >= (u64){bound}", CODES["GRADC_INDEX_OUT_OF_RANGE"], bound)
        return [*below, above]
