"""A loop's kernels as statements over fragments: of 16 rows and columns, or of rows and features, a lane has two rows,
and two neighbours of each 8 columns.

Values of rows are computed for all rows of a lane, before the columns that need them; values of columns and of elements
in a walk over the lane's elements.  What is the same in all blocks of a sweep is computed before it (hoisted).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....analysis.tiles import SweepForm, TileForm
from ....ir.dims import Size, substitute, symbol, symbols
from ....ir.kernel import Carry, Kernel, Sweep
from ....ir.statement import REDUCTIONS, Index, Stmt, neutral
from ....ir.types import F32, DType, Type
from ....ir.walk import backward_slice
from ....process.forks import cached_property
from ...expr import Scribe, carrier, loaded, stored, to_memory, variable
from ...index import index, literal, size
from ..columns import OFFSETS
from .canonical import COLUMN, ROW
from .folded import EXPRESSIONS
from .lanes import PAIRED, UNROLL, Lanes, StripText, is_byte, shared_values

JOINS = {"sum": "gradc_plain_sum", "prod": "gradc_prod", "max": "gradc_maximum", "min": "gradc_minimum"}
COMPARED = {"le": "<=", "lt": "<", "ge": ">=", "gt": ">"}

EACH_ROW = (UNROLL, "for (int h = 0; h < 2 * TILES; h++) {")
"""Opens a loop over a lane's rows."""


def rows_of(name: str) -> str:
    """The array of a value of rows, for all rows of a lane."""
    return f"r{variable(name)[1:]}"


def declarations(of: Mapping[str, Sequence[str]], const: bool = False) -> list[str]:
    """Declarations, those of a type together."""
    return [f"{'const ' if const else ''}{ctype} {', '.join(names)};" for ctype, names in of.items()]


class TileScribe(Scribe):
    """Writes values of a kernel whose blocks and carries are registers.

    :param registers: their buffers.  :param staged: loads of columns from shared memory, by the values' names.
    :param masks: comparisons that hold in all of a block that is at no edge.
    :param scores: values of a block of columns, whose exponentials need no more digits than the products in them.
    :param strips: loads of what lies in shared memory as in memory, by the values' names.
    :param lanes: which elements a lane has.
    :ivar pairs: the text of two elements of a value that is decoded, in a register.
    """

    def __init__(
        self,
        types: Mapping[str, Type],
        statements: Sequence[Stmt],
        registers: Collection[str],
        staged: Mapping[str, str],
        masks: Mapping[str, Mask],
        scores: Collection[str],
        strips: Mapping[str, StripText],
        lanes: Lanes,
    ):
        super().__init__(types, statements, wraps=False, offsets=OFFSETS)
        self.registers, self.staged, self.masks, self.scores = registers, staged, masks, scores
        self.strips, self.lanes = strips, lanes
        self.pairs: Mapping[str, str] = {}

    def expression(self, s: Stmt, seek: str = "") -> str:
        if (strip := self.strips.get(s.name)) is not None:
            dtype = self.types[s.buffer].dtype
            return loaded(dtype, self.lanes.coded(strip, stored(dtype)))
        if s.name in self.staged:
            return f"{self.staged[s.name]}[stage * COLUMNS + {COLUMN}]"
        if s.op == "load" and s.buffer in self.registers:
            return register(s)
        if s.op == "exp" and s.dtype is F32 and s.name in self.scores:
            return f"gradc_exp_of_score({variable(s.args[0])})"
        if s.op in PAIRED:
            return f"operand::half({self.pairs[s.name]}, i % 2)"
        if s.op in EXPRESSIONS:
            return EXPRESSIONS[s.op].format(*map(variable, s.args))
        if (mask := self.masks.get(s.name)) is not None:
            return f"!EDGE || {mask.text if mask.row else super().expression(s)}"
        return super().expression(s, seek)


def register(s: Stmt) -> str:
    """An element of a block or carry, in a loop over a lane's."""
    return f"{s.buffer}[h]" if len(s.index) == 1 else f"{s.buffer}[n][i]"


def quarter(block: str) -> str:
    """The elements of 16 x 8 that a lane has of a block, before they are packed."""
    return f"of_{block}"


def scales(block: str) -> str:
    """What multiplies the sum of the columns of a product that share it."""
    return f"scale_{block}"


def packed_blocks(form: SweepForm) -> set[str]:
    """The blocks that kernels write and nothing but products read: two of their elements lie in a register."""
    written = {s.buffer for kernel in form.kernels for s in kernel.body if s.op == "store"}
    read = {s.buffer for kernel in form.kernels for s in kernel.body if s.op == "load"}
    return (written & {p.block for p in form.added}) - read


@dataclass(frozen=True)
class Numbered:
    """A kernel of a tile whose values have numbers of the whole tile.

    :ivar sweep: that it is of; None: it follows the sweeps.
    :ivar masks: comparisons that hold in whole blocks, by name.
    :ivar hoisted: the values that are computed before the sweep, :ivar fresh: those that no kernel before it has.
    """

    kernel: Kernel
    scribe: TileScribe
    sweep: SweepForm | None
    masks: Mapping[str, Mask]
    hoisted: frozenset[str]
    fresh: tuple[Stmt, ...]

    @cached_property
    def shared(self) -> frozenset[str]:
        """The values of elements that are the same for all columns of a run, or for all rows of a lane."""
        own = {name: text.strip for name, text in self.scribe.strips.items()}
        return shared_values(self.kernel, own, self.scribe.staged, self.scribe.lanes)

    @cached_property
    def of_rows(self) -> frozenset[str]:
        """The values of rows: those that no column moves, but a row or what columns were reduced to."""
        found: set[str] = set()
        for s in self.kernel.body:
            level = self.kernel.levels[s.name] if s.name else frozenset({COLUMN})
            if COLUMN not in level and (ROW in level or s.op in REDUCTIONS or found.intersection(s.uses)):
                found.add(s.name)
        return frozenset(found)

    def uses(self, s: Stmt) -> tuple[str, ...]:
        """The values that a statement's text uses: not those that a mask compares, whose distance a row has, nor the
        place of what lies in shared memory.
        """
        mask = self.masks.get(s.name)
        return () if s.name in self.scribe.strips or (mask is not None and mask.row) else s.uses

    def read(self, stmts: Iterable[Stmt]) -> list[Stmt]:
        """Statements that use what their text does."""
        return [s.altered(args=(), index=()) if s.uses and not self.uses(s) else s for s in stmts]

    def used_outside(self, stmts: Iterable[Stmt]) -> set[str]:
        """The values that other statements than these use."""
        own = list(stmts)
        return {u for s in self.kernel.body if s not in own for u in self.uses(s)}


class FragmentWriter:
    """Writes the kernels of one tile.

    :param types: of all buffers.  :param tiles: of 16 rows, of a warp.
    :ivar kernels: all of them, in order, those of each sweep and those that follow the sweeps.
    """

    def __init__(
        self,
        form: TileForm,
        types: Mapping[str, Type],
        lanes: Lanes,
        staged: Sequence[Mapping[Stmt, str]],
        strips: Sequence[Mapping[Stmt, StripText]],
        after: Mapping[Stmt, StripText],
    ):
        self.form, self.types, self.lanes, self.tiles = form, types, lanes, lanes.tiles
        self.registers = frozenset(b.name for b in form.loop.buffers)
        self.carries = {c.name: c for sweep in form.loop.sweeps for c in sweep.carries}
        self.packed = frozenset(b for s in form.sweeps for b in packed_blocks(s))
        self._shared: dict[object, str] = {}  # values that all kernels share, by what they compute
        self._count = 0
        self.codebooks: dict[tuple[str, tuple[tuple[str, Any], ...]], str] = {}
        of_sweeps = [
            [self.numbered(k, s, names, own) for k in s.kernels]
            for s, names, own in zip(form.sweeps, staged, strips, strict=True)
        ]
        last = [self.numbered(k, None, {}, after) for k in form.loop.steps if isinstance(k, Kernel)]
        self.kernels = (*of_sweeps, last)

    # -- values --------------------------------------------------------------------------------------------------------

    def numbered(
        self,
        kernel: Kernel,
        sweep: SweepForm | None,
        staged: Mapping[Stmt, str],
        strips: Mapping[Stmt, StripText],
    ) -> Numbered:
        """A kernel with values of its own."""
        names: dict[str, str] = {}
        in_strips: dict[str, StripText] = {}
        body, hoisted, fresh, in_shared = [], set[str](), [], dict[str, str]()
        for s in kernel.body:
            args, place = tuple(names[a] for a in s.args), tuple(i.renamed(names) for i in s.index)
            now = s.altered(args=args, index=place, where=names[s.where] if s.where else "")
            if s.name:
                key = (now.op, now.args, now.dtype, now.buffer, now.index, now.where, now.attrs)
                early = self.is_early(kernel, s, sweep) and all(names[u] in hoisted for u in s.uses)
                known = self._shared.get(key) if early else None
                names[s.name] = known or f"%{self._count}"
                self._count += known is None
                now = now.altered(name=names[s.name])
                if early:
                    hoisted.add(now.name)
                    self._shared[key] = now.name
                    fresh += [now] if known is None else []
                if s in staged:
                    in_shared[now.name] = staged[s]
                if s in strips:
                    in_strips[now.name] = strips[s]
            body.append(now)
        own = replace(kernel, body=tuple(body))
        masks = masks_of(own, self.lanes.first) if sweep is not None else {}
        scores = {s.name for s in own.body if sweep is not None and own.is_column(s)}
        scribe = TileScribe(self.types, own.body, self.registers, in_shared, masks, scores, in_strips, self.lanes)
        made = Numbered(own, scribe, sweep, masks, frozenset(hoisted), tuple(fresh))
        scribe.pairs = {s.name: self.pair(made, s) for s in own.body if s.op in PAIRED}
        return made

    def pair(self, k: Numbered, s: Stmt) -> str:
        """Two digits or entries, of elements ``i`` and ``i + 1``, in a register."""
        word, place = self.lanes.word(k.scribe.strips[s.args[0]])
        if s.op == "entry":
            book = self.codebooks.setdefault((s.buffer, s.attrs), f"codebook{len(self.codebooks)}")
            return f"gradc_entries({book}, {word}, {place})"
        flip = s.attr("flip")
        if len(s.args) == 1:
            return f"operand::digits<{flip}>({word}, {place}, operand::no_zeros({flip}))"
        return f"operand::digits<{flip}>({word}, {place}, operand::zeros({self.zeros(k, s.args[1], flip)}))"

    def zeros(self, k: Numbered, zero: str, flip: int) -> str:
        """The arguments of the zero points of two digits: floats, or bytes in a register."""
        dtype, strip = k.scribe.values[zero], k.scribe.strips.get(zero)
        both = (variable(zero),) * 2
        if zero in k.shared:
            both = self.lanes.of_both(rows_of(zero))
        elif zero in k.of_rows:
            both = (f"{rows_of(zero)}[h]",) * 2
        if not is_byte(dtype):
            return f"{flip}, {', '.join(both)}"
        given = f"gradc_both({', '.join(both)})"
        if strip is not None and self.lanes.at_once(strip):
            given = f"gradc_twice({strip.words}[h], step / {strip.strip.per})"
        return f"{flip}, {given}" if dtype.name == "u8" else f"{flip - 128}, gradc_unsigned({given})"

    def codebook_texts(self) -> Iterator[str]:
        """The registers with the bytes of the numbers that codes are entries of, before the sweeps."""
        for (buffer, attrs), name in self.codebooks.items():
            values = dict(attrs).get("codebook", ())
            given = buffer
            if not buffer:
                given = f"entries{name[8:]}"
                yield f"const f32 {given}[16] = {{{', '.join(literal(v, F32) for v in values)}}};"
            yield f"u32 {name}[8];"
            yield f"gradc_codebook<operand>({name}, {given});"

    def is_early(self, kernel: Kernel, s: Stmt, sweep: SweepForm | None) -> bool:
        """Whether a value, but for what it uses, is the same in all blocks of columns."""
        if sweep is None or kernel.is_column(s):
            return s.op == "const"
        own = {b.name for b in sweep.sweep.buffers}
        return s.buffer not in own and not _symbols(s) & set(sweep.sweep.symbols)

    # -- lines ---------------------------------------------------------------------------------------------------------

    @cached_property
    def late(self) -> frozenset[str]:
        """The values that are used where they are not computed: those of early statements, by later ones."""
        everywhere = [k for group in self.kernels for k in group]
        used = {u for k in everywhere for s in k.kernel.body if s.name not in k.hoisted for u in k.uses(s)}
        for k in reversed(everywhere):
            own = {s.name for s in k.fresh}
            used |= {u for s in _needed(k.fresh, used) for u in s.uses if u not in own}
        return frozenset(used)

    def early(self, kernels: Sequence[Numbered]) -> list[str]:
        """The values of kernels that are computed before a sweep: of rows as arrays, others as they are."""
        lines: list[str] = []
        for k in kernels:
            plain: dict[str, list[str]] = {}
            needed = _needed(k.fresh, self.late)
            for s in needed:
                if s.op == "const":
                    plain.setdefault(self.ctype(s), []).append(f"{variable(s.name)} = {k.scribe.expression(s)}")
            lines += declarations(plain, const=True)
            lines += [k.scribe.value(s) for s in needed if s.op != "const" and s.name not in k.of_rows]
            lines += self.row_loop(k, [s for s in needed if s.name in k.of_rows], self.late)
        return lines

    def ctype(self, s: Stmt) -> str:
        assert s.dtype is not None
        return carrier(s.dtype)

    def row_loop(self, k: Numbered, stmts: Sequence[Stmt], kept: Collection[str]) -> list[str]:
        """Statements for all rows of a lane, and arrays for the values that are kept."""
        stmts = _needed(stmts, kept)
        if not stmts:
            return []
        arrays: dict[str, list[str]] = {}
        own = {s.name for s in stmts}
        body = list(self.taken(k, (u for s in stmts for u in s.uses if u not in own)))
        for s in stmts:
            body += [k.scribe.value(s)] if s.name else self.row_effect(k, s)
            if s.name in kept:
                arrays.setdefault(self.ctype(s), []).append(f"{rows_of(s.name)}[2 * TILES]")
                body.append(f"{rows_of(s.name)}[h] = {variable(s.name)};")
        return [*declarations(arrays), *EACH_ROW, *self.row_place(body), *body, "}"]

    def row_place(self, body: Sequence[str]) -> list[str]:
        """The row that statements are for, if they say where it is."""
        named = any(re.search(rf"\b{ROW}\b", line) for line in body)
        if not named:
            return []
        rows, by = self.form.loop.rows[1], self.form.loop.by
        whole = isinstance(rows, int) and isinstance(by, int) and rows % by == 0
        own = self.lanes.row if whole else f"gradc_min({self.lanes.row}, {self.form.loop.count} - 1)"
        return [f"const ix {ROW} = {own};"]

    def taken(self, k: Numbered, names: Iterable[str]) -> Iterator[str]:
        """Values of rows that were computed before, for one row."""
        for name in dict.fromkeys(names):
            if name in k.shared:
                own = f"{rows_of(name)}{self.lanes.of_element}"
                yield f"const {self.ctype(k.scribe.statements[name])} {variable(name)} = {own};"
            if name in k.of_rows:
                yield f"const {self.ctype(k.scribe.statements[name])} {variable(name)} = {rows_of(name)}[h];"

    def row_effect(self, k: Numbered, s: Stmt) -> Iterator[str]:
        """A store of a row, by one lane of its quad; what a block gives to a carry."""
        value = variable(s.args[0])
        if s.op == "store":
            where = f" && {variable(s.where)}" if s.where else ""
            place, given = k.scribe.element(s.buffer, s.index), to_memory(self.types[s.buffer].dtype, value)
            yield f"if ({self.lanes.row} < {self.form.loop.count} && lane_column == 0{where}) {place} = {given};"
            return
        carry = self.carries[s.buffer]
        relative = [c for c in self.carries.values() if c.by == carry.name]
        join = f"{_join(carry.combine, carry.type.dtype)}::join({carry.name}[h], {value});"
        if carry.by:
            yield f"{carry.name}[h] = mad_f32({carry.name}[h], {carry.by}_factor[h], {value});"
        elif not relative:
            yield join
        elif any(sweep.divides for sweep in self.form.sweeps if carry in sweep.sweep.carries):
            yield f"{carry.name}_factor[h] = gradc_raised({carry.name}[h], {value}, {carry.name}_exponent[h]);"
        else:
            yield f"{carry.name}_factor[h] = gradc_raised_sum({carry.name}[h], {value});"
        for c in relative:
            yield from self.rescaled(c)

    def rescaled(self, c: Carry) -> Iterator[str]:
        """Makes a row of sums of products relative to another maximum; other sums are where a block is added."""
        if len(c.type.shape) == 1:
            return
        tiles = f"{self.form.padded(c.name)} / 8"
        yield from (UNROLL, f"for (int n = h / 2 * ({tiles}); n < (h / 2 + 1) * ({tiles}); n++) {{")
        elements = (f"{c.name}[n][h % 2 * 2{i}] *= {c.by}_factor[h]" for i in ("", " + 1"))
        yield f"{', '.join(elements)};"
        yield "}"

    @staticmethod
    def unrounded_sums(sweep: Sweep) -> Iterator[str]:
        """After a sweep: what is relative to a maximum, without the rounding of the maximum's exponent."""
        relative = [c for c in sweep.carries if c.by]
        if relative:
            yield " ".join(f"gradc_unrounded({c.name}, {c.by});" for c in relative)

    def block(self, k: Numbered) -> list[str]:
        """A kernel's passes over the lane's elements, and what is done for its rows before each."""
        lines = self.distances(k)
        for phase in k.kernel.passes:
            now = [s for s in phase.row if s.name not in k.hoisted]
            rows = [s for s in now if not s.name or s.name in k.of_rows]
            lines += [k.scribe.value(s) for s in now if s not in rows]
            lines += self.row_loop(k, rows, k.used_outside(rows))
            if phase.roots:
                lines += self.columns(k, phase.body, phase.roots)
        return lines

    def distances(self, k: Numbered) -> list[str]:
        """How far the lane's rows are from where masks end, at its first column."""
        masks = [m for m in k.masks.values() if m.row]
        if not masks:
            return []
        body = [f"{m.distance}[h] = {m.row};" for m in masks]
        arrays = declarations({"ix": [f"{m.distance}[2 * TILES]" for m in masks]})
        return [*arrays, *EACH_ROW, *self.row_place(body), *body, "}"]

    def columns(self, k: Numbered, body: Sequence[Stmt], roots: Sequence[Stmt]) -> list[str]:
        """One pass over the lane's elements."""
        reductions = [s for s in roots if s.op in REDUCTIONS]
        arrays: dict[str, list[str]] = {}
        for s in reductions:
            arrays.setdefault(self.ctype(s), []).append(f"{rows_of(s.name)}[2 * TILES]")
        direct = [s for s in roots if s.buffer in self.packed and k.scribe.statements[s.args[0]].op in PAIRED]
        roots = [s for s in roots if s not in direct]
        effects = [self.root(k, s) for s in roots]
        own, wanted = k.read(body), [u for uses, _ in effects for u in uses]
        scaled = [s for s in (*direct, *roots) if s.op == "store" and len(s.args) > 1]
        decoded = [u for s in direct for u in k.scribe.statements[s.args[0]].args[1:]]
        decoded += [u for s in scaled for u in s.args[1:]]
        needed = backward_slice([s for s in own if s.name not in k.shared], wanted, lambda s: True)
        before = self.shared_values(k, own, [u for s in needed for u in s.uses] + wanted + decoded, scaled)
        names = {s.name for s in needed}
        outer = [u for s in needed for u in s.uses if u not in names]
        outer += [u for uses, _ in effects for u in uses if u not in names]
        inner = [*self.taken(k, outer), *map(k.scribe.value, needed), *(line for _, line in effects)]
        inner = [*self.row_place(inner), *self.column_place(k, inner), *inner]
        count = self.lanes.width if k.sweep is not None else str(self.form.padded_features(_features(k.kernel)))
        step = self.lanes.step if k.sweep is not None else "8 * c + i % 2"
        packed = [s.buffer for s in roots if s.buffer in self.packed]
        # the rows of all tiles together, so that values of columns are not kept from one tile to the next
        lines = [
            *before,
            *declarations(arrays),
            UNROLL,
            f"for (int piece = 0; piece < TILES * {count} / 8; piece++) {{",
        ]
        lines += [f"const int t = piece % TILES, c = piece / TILES, n = t * ({count} / 8) + c;"]
        if roots:
            lines += [*(f"f32 {quarter(b)}[4];" for b in packed), UNROLL, "for (int i = 0; i < 4; i++) {"]
            lines += [f"const int h = 2 * t + i / 2, step = {step};", *inner, "}"]
            lines += [f"gradc_pack<operand>({b}[n], {quarter(b)});" for b in packed]
        lines += [*(line for s in direct for line in self.pairs_of(k, s)), "}"]
        joined = [s for s in reductions if k.sweep is None or REDUCTIONS[s.op] != "sum"]  # else after the sweep
        if joined:
            lines += [*EACH_ROW, *(_of_quad(f"{rows_of(s.name)}[h]", REDUCTIONS[s.op], s.dtype) for s in joined), "}"]
        return lines

    def pairs_of(self, k: Numbered, s: Stmt) -> Iterator[str]:
        """The store of digits or entries, two in a register; of columns that are not there they are 0."""
        pair = k.scribe.pairs[s.args[0]]
        yield from (UNROLL, "for (int one = 0; one < 2; one++) {")
        if self.may_lack(k):
            yield f"const int h = 2 * t + one, i = 0, step = {self.lanes.step};"
            both = (f"!EDGE || step{beside} < lane_columns" for beside in ("", f" + {self.lanes.apart}"))
            pair = f"gradc_of_there({pair}, {', '.join(both)})"
        else:
            yield f"const int h = 2 * t + one, i = 0, step = {self.lanes.step};"
        yield from (f"{s.buffer}[n][one] = {pair};", "}")

    def shared_values(
        self, k: Numbered, body: Sequence[Stmt], wanted: Collection[str], scaled: Sequence[Stmt]
    ) -> list[str]:
        """Before a pass over the lane's elements: the bytes of its codes, and what is the same for several elements.

        :param body: the pass's statements.  :param wanted: the values that its elements use.
        :param scaled: stores with a scale of their products.
        """
        used = k.shared.intersection(wanted)
        strips = sorted({x for s in body if (x := k.scribe.strips.get(s.name))}, key=lambda x: x.name)
        words = [x for x in strips if x.strip.is_codes]
        if not used and not words:
            return []
        own = backward_slice(body, used, lambda s: True)
        sizes = "".join(self.lanes.shared)
        arrays: dict[str, list[str]] = {}
        names = {s.name for s in own}
        outer = [u for s in own for u in s.uses if u not in names]
        outer += [u for s in scaled for u in s.args[1:] if u not in names]
        lines = list(self.taken(k, outer))
        for strip in words:
            count = self.lanes.bytes(strip.strip)
            arrays.setdefault("u32", []).append(f"{strip.words}{sizes}[{-(-count // 4)}]")
            to = f"{strip.words}{self.lanes.of_element}"
            lines.append(f"gradc_lane_bytes<{count}>({to}, {strip.stage} + {self.lanes.place(strip)});")
        for s in own:
            lines.append(k.scribe.value(s))
            if s.name in used:
                arrays.setdefault(self.ctype(s), []).append(f"{rows_of(s.name)}{sizes}")
                lines.append(f"{rows_of(s.name)}{self.lanes.of_element} = {variable(s.name)};")
        before = "" if self.lanes.together else f" + lane % 4 * {self.lanes.run}"
        shares = f"!EDGE || step < lane_columns{before} ? " if self.may_lack(k) else ""
        for s in scaled:  # what is computed of no scale may be infinite
            given = (f"{shares}{variable(x)}{' : 0' if shares else ''}" for x in s.args[1:])
            lines += [f"{scales(s.buffer)}{self.lanes.of_element} = {x};" for x in given]
        lines = [*self.row_place(lines), *self.column_place(k, lines), *lines]
        return [*self.at_once(strips), *declarations(arrays), *self.lanes.each, *lines, "}"]

    def at_once(self, strips: Sequence[StripText]) -> Iterator[str]:
        """The words of what a lane loads together of each of its rows."""
        loaded = [(x, size) for x in strips if (size := self.lanes.at_once(x))]
        if loaded:
            yield from declarations({"u32": [f"{x.words}[2 * TILES][{-(-size // 4)}]" for x, size in loaded]})
            yield from EACH_ROW
            for x, size in loaded:
                yield f"gradc_lane_bytes<{size}>({x.words}[h], {x.stage} + {self.lanes.first_of_row(x)});"
            yield "}"

    def column_place(self, k: Numbered, body: Sequence[str]) -> Iterator[str]:
        """The column that statements are for, and whether it is there; if not, its place is that of the last one."""
        text = "\n".join(body)
        last = k.sweep.sweep.count if k.sweep is not None else str(k.kernel.cols[0][1])
        in_sweep = k.sweep is not None
        if re.search(rf"\b{COLUMN}\b", text):
            own = "lane_column + step"
            bounded = f"{'EDGE ? ' if in_sweep else ''}gradc_min({own}, {last} - 1){f' : {own}' if in_sweep else ''}"
            yield f"const ix {COLUMN} = {bounded if self.may_lack(k) else own};"
        if self.may_lack(k) and re.search(r"\bthere\b", text):
            bound = "!EDGE || step < lane_columns" if in_sweep else f"step < {last} - lane_column"
            yield f"const bool there = {bound};"

    def may_lack(self, k: Numbered) -> bool:
        """Whether some of a lane's columns may not be there."""
        return (
            has_part(k.sweep.sweep)
            if k.sweep is not None
            else _features(k.kernel) != self.form.padded_features(_features(k.kernel))
        )

    def root(self, k: Numbered, s: Stmt) -> tuple[list[str], str]:
        """(the values that an effect or a reduction of elements needs, its text)."""
        value, there = s.args[0], "there ? " if self.may_lack(k) else ""
        if s.op in REDUCTIONS:
            how = REDUCTIONS[s.op]
            given = f"{there}{variable(value)}{f' : {_neutral(how, s)}' if there else ''}"
            return [value], f"gradc_join<{_join(how, s.dtype)}>(c == 0 && i % 2 == 0, {rows_of(s.name)}[h], {given});"
        if s.buffer in self.registers:
            value = self.unrounded(k, s)
            place = f"{quarter(s.buffer)}[i]" if s.buffer in self.packed else register(s)
            return [value], f"{place} = {there}{variable(value)}{' : 0' if there else ''};"
        conditions = [*(["there"] if there else []), f"{self.lanes.row} < {self.form.loop.count}"]
        conditions += [variable(s.where)] if s.where else []
        place, given = k.scribe.element(s.buffer, s.index), to_memory(self.types[s.buffer].dtype, variable(value))
        return list(s.uses), f"if ({' && '.join(conditions)}) {place} = {given};"

    def unrounded(self, k: Numbered, s: Stmt) -> str:
        """The value that a block is given: what is packed is rounded there."""
        cast = k.scribe.statements[s.args[0]]
        rounds = s.buffer in self.packed and cast.op == "cast" and carrier(k.scribe.values[cast.args[0]]) == "f32"
        return cast.args[0] if rounds else s.args[0]


def _needed(stmts: Sequence[Stmt], kept: Collection[str]) -> list[Stmt]:
    """The statements that have an effect, or whose values are kept, and those that these use."""
    used, needed = set(kept), list[Stmt]()
    for s in reversed(stmts):
        if not s.name or s.name in used:
            used.update(s.uses)
            needed.insert(0, s)
    return needed


def has_part(sweep: Sweep) -> bool:
    """Whether the last block of columns may have fewer than the others."""
    size = sweep.cols[1]
    return not (isinstance(size, int) and isinstance(sweep.by, int) and size % sweep.by == 0)


def after_sweep(sweep: Sweep) -> list[str]:
    """Sums of rows, of which each lane of a quad has its own columns."""
    sums = [c for c in sweep.carries if c.combine == "sum" and len(c.type.shape) == 1]
    return [*EACH_ROW, *(_of_quad(f"{c.name}[h]", "sum", c.type.dtype) for c in sums), "}"] if sums else []


def _join(combine: str, dtype: DType | None) -> str:
    """The struct whose ``join`` combines two values."""
    assert dtype is not None
    return JOINS[combine] if combine == "sum" else f"{JOINS[combine]}<{carrier(dtype)}>"


def _of_quad(value: str, combine: str, dtype: DType | None) -> str:
    return f"{value} = gradc_of_quad<{_join(combine, dtype)}>({value});"


def _neutral(combine: str, s: Stmt) -> str:
    assert s.dtype is not None
    return literal(neutral(combine, s.dtype), s.dtype)


def _features(kernel: Kernel) -> int:
    (size_,) = (size_ for _, size_ in kernel.cols)
    assert isinstance(size_, int)
    return size_


def _symbols(s: Stmt) -> frozenset[str]:
    """The symbols of a statement's index and attributes."""
    sizes: list[Size] = [size for i in s.index for size in (i.const, *(c for _, c in i.terms))]
    sizes += [v for _, v in s.attrs if hasattr(v, "terms")]
    return frozenset[str]().union(*map(symbols, sizes))


# -- comparisons that hold in whole blocks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A comparison of an element's position, ``difference <= 0`` or so, with a place or with what is one in a block.

    :param whole: the condition on which all elements of a block pass, at the corner that is the last to.
    :param row: of two places, what their difference is for a row at the lane's first column, :param per_column: and
        what each column adds.
    """

    name: str
    whole: str
    compared: str
    row: str = ""
    per_column: int = 0

    @property
    def distance(self) -> str:
        """The array of the rows' differences."""
        return f"d{variable(self.name)[1:]}"

    @property
    def text(self) -> str:
        """The comparison, for an element ``step`` columns behind the lane's first one."""
        step = "step" if self.per_column == 1 else f"{self.per_column} * step"
        return f"{self.distance}[h]{f' + {step}' if self.per_column else ''} {self.compared} 0"


def masks_of(kernel: Kernel, first: Mapping[str, Size]) -> dict[str, Mask]:
    """The comparisons of positions.

    :param first: of the symbols of a block's first row and column, those of what a warp computes with at once.
    """
    found = (_mask(kernel, s, first) for s in kernel.body if s.op in COMPARED and COLUMN in kernel.levels[s.name])
    return {mask.name: mask for mask in found if mask is not None}


def _mask(kernel: Kernel, s: Stmt, first: Mapping[str, Size]) -> Mask | None:
    """A comparison as a mask; None if it compares other things than a place with what is one in a block."""
    compared = COMPARED[s.op]
    places = [_place(kernel.stmts[name]) for name in s.args]
    low = s.op in ("le", "lt")  # the left side must be small
    if places[0] is not None and places[1] is not None:
        difference = places[0] + places[1] * -1
        steps = dict(difference.terms)
        per_column, per_row = steps.pop(COLUMN, 0), steps.pop(ROW, 0)
        whole = _corner(difference, low)
        if steps or whole is None or not isinstance(per_column, int):
            return None
        row = Index(difference.const, ((ROW, per_row),) if per_row else ())
        begin = f"{'' if per_column == 1 else f'{per_column} * '}lane_column + " if per_column else ""
        whole = substitute(whole, first)
        return Mask(s.name, f"{size(whole)} {compared} 0", compared, f"{begin}{index(row, OFFSETS)}", per_column)
    for at, value in ((0, 1), (1, 0)):
        place, other = places[at], kernel.stmts[s.args[value]]
        if place is None or kernel.levels[other.name] or other.dtype is None or not other.dtype.is_integer:
            continue
        corner = _corner(place, low == (at == 0))
        if corner is not None:
            sides = [size(substitute(corner, first)), variable(other.name)]
            return Mask(s.name, f" {compared} ".join(sides if at == 0 else sides[::-1]), compared)
    return None


def _place(s: Stmt) -> Index | None:
    """A place that no value from memory moves."""
    plain = s.op == "index" and not any(v.startswith("%") for v, _ in s.index[0].terms)
    return s.index[0] if plain else None


def _corner(place: Index, largest: bool) -> Size | None:
    """The largest, or smallest, that a place is in a block; None if it is not known which end that is at."""
    corner: Size = place.const
    for axis, coefficient in place.terms:
        if not isinstance(coefficient, int):
            return None
        if (coefficient > 0) == largest:
            corner = corner + coefficient * symbol("LAST_ROW" if axis == ROW else "LAST_COLUMN")
    return corner
