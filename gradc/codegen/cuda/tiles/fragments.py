"""A loop's kernels as statements over fragments: of a block of rows and columns, or of rows and features, a lane has two
rows, and two neighbours of each 8 columns.

Values of rows are computed for both rows of a lane, before the columns that need them; values of columns and of elements
in a walk over the lane's elements.  What is the same in all blocks of a sweep is computed before it (hoisted).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....analysis.tiles import Added, SweepForm, TileForm
from ....ir.dims import Size, symbol, symbols
from ....ir.kernel import Carry, Kernel, Sweep
from ....ir.statement import REDUCTIONS, Index, Stmt, neutral
from ....ir.types import F32, DType, Type
from ....ir.walk import backward_slice
from ....process.forks import cached_property
from ...expr import Scribe, carrier, to_memory, variable
from ...index import literal, size
from ..columns import OFFSETS
from .canonical import COLUMN, ROW

JOINS = {"sum": "gradc_plain_sum", "prod": "gradc_prod", "max": "gradc_maximum", "min": "gradc_minimum"}
COMPARED = {"le": "<=", "lt": "<", "ge": ">=", "gt": ">"}
UNROLL = "#pragma unroll"


class Lines(list[str]):
    """Text, with loops over a lane's rows and elements."""

    def rows(self, body: Iterable[str]) -> None:
        """For both rows of a lane."""
        self.extend([UNROLL, "for (int h = 0; h < 2; h++) {", f"const ix {ROW} = row_of[h];", *body, "}"])


def rows_of(name: str) -> str:
    """The array of a value of rows, for both rows of a lane."""
    return f"r{variable(name)[1:]}"


class TileScribe(Scribe):
    """Writes values of a kernel whose blocks and carries are registers.

    :param registers: their buffers.  :param staged: loads of columns from shared memory, by the values' names.
    :param masks: comparisons that hold in all of a block unless it is at an edge.
    :param scores: values of a block of columns, whose exponentials need no more digits than the products they come from.
    """

    def __init__(
        self,
        types: Mapping[str, Type],
        statements: Sequence[Stmt],
        registers: Collection[str],
        staged: Mapping[str, str],
        masks: Collection[str],
        scores: Collection[str],
    ):
        super().__init__(types, statements, wraps=False, offsets=OFFSETS)
        self.registers, self.staged, self.masks, self.scores = registers, staged, masks, scores

    def expression(self, s: Stmt, seek: str = "") -> str:
        if s.name in self.staged:
            return f"{self.staged[s.name]}[stage * COLUMNS + {COLUMN}]"
        if s.op == "load" and s.buffer in self.registers:
            return register(s)
        if s.op == "exp" and s.dtype is F32 and s.name in self.scores:
            return f"gradc_exp_of_score({variable(s.args[0])})"
        text = super().expression(s, seek)
        return f"!EDGE || {text}" if s.name in self.masks else text


def register(s: Stmt) -> str:
    """An element of a block or carry, in a loop over a lane's."""
    return f"{s.buffer}[h]" if len(s.index) == 1 else f"{s.buffer}[n][i]"


@dataclass
class Numbered:
    """A kernel of a tile whose values have numbers of the whole tile.

    :ivar masks: comparisons that hold in whole blocks, and when.
    :ivar hoisted: the values that are computed before the sweep.
    """

    kernel: Kernel
    scribe: TileScribe
    masks: Mapping[str, str]
    hoisted: frozenset[str] = frozenset()

    @cached_property
    def of_rows(self) -> frozenset[str]:
        """The values of rows: those that no column moves, but a row or what columns were reduced to."""
        found: set[str] = set()
        for s in self.kernel.body:
            level = self.kernel.levels[s.name] if s.name else frozenset({COLUMN})
            if COLUMN not in level and (ROW in level or s.op in REDUCTIONS or found.intersection(s.uses)):
                found.add(s.name)
        return frozenset(found)


@dataclass
class FragmentWriter:
    """Writes the kernels of one tile.

    :ivar constants: and the other values that all kernels share, by what they compute.
    :ivar count: of values so far.
    """

    form: TileForm
    types: Mapping[str, Type]
    constants: dict[object, str] = field(default_factory=dict)
    count: int = 0

    @property
    def registers(self) -> frozenset[str]:
        return frozenset(b.name for b in self.form.loop.buffers)

    # -- values --------------------------------------------------------------------------------------------------------

    def numbered(self, kernel: Kernel, sweep: SweepForm | None, staged: Mapping[Stmt, str]) -> tuple[Numbered, list[Stmt]]:
        """A kernel with values of its own, and what of it is computed before the sweep and was not yet."""
        changing = {c.name for c in sweep.sweep.carries} | {b.name for b in sweep.sweep.blocks} if sweep else self.registers
        moving = set(sweep.sweep.symbols) if sweep else set[str]()
        names: dict[str, str] = {}
        hoisted: dict[str, Stmt] = {}
        body, in_shared = [], dict[str, str]()
        for s in kernel.body:
            index_ = tuple(i.renamed(names) for i in s.index)
            attrs = tuple((k, v) for k, v in s.attrs)
            now = s.altered(args=tuple(names[a] for a in s.args), index=index_, where=names.get(s.where, ""), attrs=attrs)
            if not s.name:
                body.append(now)
                continue
            early = (
                not kernel.is_column(s)
                and s.buffer not in changing
                and not _symbols(s) & moving
                and all(names[u] in hoisted or names[u] in self.constants.values() for u in s.uses)
                and (sweep is not None or s.op == "const")
            )
            key = (now.op, now.args, now.dtype, now.buffer, now.index, now.where, now.attrs)
            if early and key in self.constants:
                names[s.name] = self.constants[key]
                body.append(now.altered(name=names[s.name]))
                hoisted[names[s.name]] = body[-1]
                continue
            names[s.name] = f"%{self.count}"
            self.count += 1
            body.append(now.altered(name=names[s.name]))
            if s in staged:
                in_shared[names[s.name]] = staged[s]
            if early:
                self.constants[key] = names[s.name]
                hoisted[names[s.name]] = body[-1]
        own = replace(kernel, body=tuple(body))
        fresh = [s for s in hoisted.values() if s.name not in self._written]
        self._written |= hoisted.keys()
        masks = masks_of(own) if sweep is not None else {}
        scores = {s.name for s in own.body if sweep is not None and own.is_column(s)}
        scribe = TileScribe(self.types, own.body, self.registers, in_shared, masks, scores)
        return Numbered(own, scribe, masks, frozenset(hoisted)), fresh

    def __post_init__(self) -> None:
        self._written: set[str] = set()

    # -- lines ---------------------------------------------------------------------------------------------------------

    def early(self, k: Numbered, stmts: Sequence[Stmt]) -> Lines:
        """Declares hoisted values: of rows as arrays, others as they are."""
        lines = Lines(k.scribe.value(s) for s in stmts if s.name not in k.of_rows)
        by_row = [s for s in stmts if s.name in k.of_rows]
        lines += self.declared(k, by_row)
        if by_row:
            lines.rows(self.row_values(k, by_row))
        return lines

    def declared(self, k: Numbered, stmts: Iterable[Stmt]) -> Iterator[str]:
        """Arrays for values of rows."""
        for s in stmts:
            assert s.dtype is not None
            yield f"{carrier(s.dtype)} {rows_of(s.name)}[2];"

    def row_values(self, k: Numbered, stmts: Sequence[Stmt]) -> Iterator[str]:
        """Statements for one row, which keep their values."""
        own = {s.name for s in stmts}
        yield from self.taken(k, (u for s in stmts for u in s.uses if u not in own))
        for s in stmts:
            if s.name:
                yield k.scribe.value(s)
                yield f"{rows_of(s.name)}[h] = {variable(s.name)};"
            else:
                yield from self.row_effect(k, s)

    def taken(self, k: Numbered, names: Iterable[str]) -> Iterator[str]:
        """Values of rows that were computed before, for one row."""
        for name in dict.fromkeys(names):
            s = k.scribe.statements[name]
            if name in k.of_rows:
                assert s.dtype is not None
                yield f"const {carrier(s.dtype)} {variable(name)} = {rows_of(name)}[h];"

    def row_effect(self, k: Numbered, s: Stmt) -> Iterator[str]:
        """A store of a row, by one lane of its quad; what a block gives to a carry."""
        value = variable(s.args[0])
        if s.op == "store":
            where = f" && {variable(s.where)}" if s.where else ""
            place = k.scribe.element(s.buffer, s.index)
            yield f"if (row_there[h] && lane_column == 0{where}) {place} = {to_memory(self.types[s.buffer].dtype, value)};"
            return
        carry = next(c for sweep in self.form.loop.sweeps for c in sweep.carries if c.name == s.buffer)
        relative = [c for sweep in self.form.loop.sweeps for c in sweep.carries if c.by == carry.name]
        join = f"{JOINS[carry.combine]}{_argument(carry.combine, carry.type.dtype)}::join({carry.name}[h], {value});"
        if not relative:
            yield join
            return
        yield from (f"const f32 before = {carry.name}[h];", join)
        yield f"const f32 factor = gradc_rescaled(before, {carry.name}[h]); /* of what is relative to it */"
        for c in relative:
            yield from _rescaled(c)

    def block(self, k: Numbered, sweep: SweepForm | None) -> Lines:
        """A kernel's passes over the lane's elements, and what is done for its rows before each."""
        lines = Lines()
        for phase in k.kernel.passes:
            rows = [s for s in phase.row if s.name not in k.hoisted]
            lines += [k.scribe.value(s) for s in rows if s.name and s.name not in k.of_rows]
            rows = [s for s in rows if not s.name or s.name in k.of_rows]
            lines += self.declared(k, (s for s in rows if s.name))
            if rows:
                lines.rows(self.row_values(k, rows))
            if phase.roots:
                lines += self.columns(k, phase.body, phase.roots, sweep)
        return lines

    def columns(self, k: Numbered, body: Sequence[Stmt], roots: Sequence[Stmt], sweep: SweepForm | None) -> Lines:
        """One pass over the lane's elements."""
        lines = Lines()
        reductions = [s for s in roots if s.op in REDUCTIONS]
        for s in reductions:
            assert s.dtype is not None
            start = literal(neutral(REDUCTIONS[s.op], s.dtype), s.dtype)
            lines.append(f"{carrier(s.dtype)} {rows_of(s.name)}[2] = {{{start}, {start}}};")
        effects = [self.root(k, s, sweep) for s in roots]
        wanted = [u for value, place, _ in effects for u in (*value, *place)]
        needed = backward_slice(body, wanted, lambda s: True)
        features = None if sweep is not None else k.kernel.cols[0][1]
        count = "COLUMNS" if sweep is not None else str(8 * -(-int(features) // 8))  # type: ignore[arg-type]
        names = {s.name for s in needed}
        outer = [u for s in (*needed, *roots) for u in s.uses if u not in names]
        lines += [UNROLL, f"for (int n = 0; n < {count} / 8; n++) {{", UNROLL, "for (int i = 0; i < 4; i++) {"]
        lines += ["const int h = i / 2, c = n * 8 + lane_column + i % 2;"]
        inner = [*self.taken(k, outer), *map(k.scribe.value, needed), *(line for _, _, own in effects for line in own)]
        text = "\n".join(inner)
        if f"{ROW} " in text or f"{ROW}]" in text or f"{ROW})" in text:
            lines.append(f"const ix {ROW} = row_of[h];")
        if sweep is not None:
            at = f"EDGE ? gradc_min(c, {sweep.sweep.count} - 1) : c"
            lines += [f"const ix {COLUMN} = {at};", f"const bool there = !EDGE || c < {sweep.sweep.count};"]
        elif int(features) % 8:  # type: ignore[arg-type]
            lines += [f"const ix {COLUMN} = gradc_min(c, {features} - 1);", f"const bool there = c < {features};"]
        else:
            lines += [f"const ix {COLUMN} = c;", "const bool there = true;"]
        lines += [*inner, "}", "}"]
        for s in reductions:
            if sweep is None or REDUCTIONS[s.op] != "sum":  # sums of a sweep's columns meet after the sweep
                assert s.dtype is not None
                lines.rows([_of_quad(f"{rows_of(s.name)}[h]", REDUCTIONS[s.op], s.dtype)])
        return lines

    def root(self, k: Numbered, s: Stmt, sweep: SweepForm | None) -> tuple[list[str], list[str], list[str]]:
        """(the values that an effect or reduction needs, those of its place, its lines)."""
        dtype = k.scribe.values[s.args[0]]
        assert dtype is not None
        value = s.args[0]
        if s.op in REDUCTIONS:
            assert s.dtype is not None
            how = REDUCTIONS[s.op]
            given = f"there ? {variable(value)} : {literal(neutral(how, s.dtype), s.dtype)}"
            return [value], [], [f"{JOINS[how]}{_argument(how, s.dtype)}::join({rows_of(s.name)}[h], {given});"]
        where = [s.where] if s.where else []
        if s.buffer in self.registers:
            if sweep is not None and self.packed(s.buffer, sweep) and k.scribe.statements[value].op == "cast":
                source = k.scribe.statements[value].args[0]  # rounded where it becomes an operand
                value = source if k.scribe.values[source] is not None and carrier(k.scribe.values[source]) == "f32" else value  # type: ignore[arg-type]
            return [value], where, [f"{register(s)} = there ? {variable(value)} : 0;"]
        places = [v for i in s.index for v, _ in i.terms if v.startswith("%")]
        guard = "".join(f" && {variable(w)}" for w in where)
        place = k.scribe.element(s.buffer, s.index)
        line = f"if (there && row_there[h]{guard}) {place} = {to_memory(self.types[s.buffer].dtype, variable(value))};"
        return [value], [*places, *where], [line]

    def packed(self, block: str, sweep: SweepForm) -> bool:
        """Whether nothing but products reads a block."""
        read = any(s.op == "load" and s.buffer == block for kernel in sweep.kernels for s in kernel.body)
        return not read and any(isinstance(p, Added) and p.block == block for p in sweep.steps)


def _argument(combine: str, dtype: DType) -> str:
    return "" if combine == "sum" else f"<{carrier(dtype)}>"


def _of_quad(value: str, combine: str, dtype: DType) -> str:
    join = f"{JOINS[combine]}{_argument(combine, dtype)}"
    return f"{value} = gradc_reduce_lanes<{join}, 4>({value}, 0xffffffffu);"


def after_sweep(sweep: Sweep) -> Lines:
    """Sums of rows, of which each lane of a quad has its own columns."""
    lines = Lines()
    for c in sweep.carries:
        if c.combine == "sum" and len(c.type.shape) == 1:
            lines += [UNROLL, "for (int h = 0; h < 2; h++) {", _of_quad(f"{c.name}[h]", "sum", c.type.dtype), "}"]
    return lines


def _rescaled(c: Carry) -> Iterator[str]:
    if len(c.type.shape) == 1:
        yield f"{c.name}[h] *= factor;"
        return
    yield from (UNROLL, f"for (auto &x : {c.name}) {{", "x[2 * h] *= factor;", "x[2 * h + 1] *= factor;", "}")


def _symbols(s: Stmt) -> frozenset[str]:
    """The symbols of a statement's index and attributes."""
    sizes: list[Size] = [size for i in s.index for size in (i.const, *(c for _, c in i.terms))]
    sizes += [v for _, v in s.attrs if hasattr(v, "terms")]
    return frozenset().union(*map(symbols, sizes))


# -- comparisons that hold in whole blocks -----------------------------------------------------------------------------


def masks_of(kernel: Kernel) -> dict[str, str]:
    """The comparisons of positions, and the condition on which all elements of a block pass."""
    made = {}
    for s in kernel.body:
        if s.op in COMPARED and (condition := _holds(kernel, s)):
            made[s.name] = condition
    return made


def _holds(kernel: Kernel, s: Stmt) -> str:
    """That a comparison holds at the corner of the block where it is the last to, or "" if it compares other things."""
    sides = [_position(kernel, name) for name in s.args]
    if None in sides or not kernel.levels[s.name] & {COLUMN}:
        return ""
    (left, over), (right, under) = sides  # type: ignore[misc]
    difference = left + right * -1
    sign = 1 if s.op in ("le", "lt") else -1
    corner: Size = difference.const
    for axis, coefficient in difference.terms:
        if not isinstance(coefficient, int):
            return ""
        if coefficient * sign > 0:
            corner = corner + coefficient * symbol("LAST_ROW" if axis == ROW else "LAST_COLUMN")
    text = "".join([size(corner), *(f" + {v}" for v in over), *(f" - {v}" for v in under)])
    return f"{text} {COMPARED[s.op]} 0"


def _position(kernel: Kernel, name: str) -> tuple[Index, list[str]] | None:
    """A side of a comparison: a place, or a value that is the same in the whole block."""
    s = kernel.stmts[name]
    if s.op == "index" and not any(v.startswith("%") for v, _ in s.index[0].terms):
        return s.index[0], []
    if not kernel.levels[name] and s.dtype is not None and s.dtype.is_integer:
        return Index(), [variable(name)]
    return None
