"""A loop's form as the text of one kernel, and what a launch must know of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....analysis.tiles import (
    MOST_REGISTERS,
    ROWS,
    SPARE,
    Added,
    Panel,
    RowProduct,
    Scores,
    Strip,
    SweepForm,
    TileForm,
    column_loads,
    form_of,
    unfit,
    vector_at,
)
from ....errors import Unsupported
from ....ir.dims import Size, minimum, product, substitute, symbol, symbols
from ....ir.kernel import Carry, Kernel, Loop, Program, Sweep
from ....ir.statement import Stmt, neutral
from ....ir.types import BF16, F32
from ....process.forks import cached_property
from ....targets.devices import ARCHITECTURES
from ...expr import carrier, stored
from ...indent import indented
from ...index import literal, size
from ...jinja import render
from ..index_bound import magnitude
from ..kernel import CudaKernel, Stage
from .canonical import OF_MAXIMUM, Canonical, canonical
from .decoding import decoded, paired, scaled_columns
from .folded import folded
from .fragments import FragmentWriter, TileScribe, after_sweep, has_part, packed_blocks, scales
from .lanes import UNROLL, Lanes, StripText

_CANONICAL = re.compile(rf"\b[bn]\d+(?:_(?:{'|'.join(OF_MAXIMUM)}))?\b")
MAPPING = "tile"
"""What a launch knows this mapping by."""


@dataclass(frozen=True)
class PanelText:
    """A panel in the template.

    :param first: the address of its first row's first feature; of a sweep, that of its first column.
    :param at: elements before it in shared memory.
    """

    name: str
    at: int
    first: str
    panel: Panel
    comment: str

    @property
    def fragments(self) -> str:
        return f"fragments{self.name[4:]}"

    @property
    def memory(self) -> str:
        return f"from{self.name[5:]}"

    @property
    def features(self) -> int:
        return self.panel.features

    @property
    def padded(self) -> int:
        return self.panel.padded

    @property
    def pitch(self) -> int:
        return self.panel.pitch

    @property
    def step(self) -> str:
        return size(self.panel.step, "i64")

    @property
    def feature_step(self) -> str:
        return size(self.panel.feature_step, "i64")


@dataclass(frozen=True)
class StagedText:
    """A vector over columns in shared memory: ``at`` elements of f32 before it, and an element of it in memory."""

    name: str
    at: int
    element: str
    comment: str


@dataclass(frozen=True)
class SweepText:
    """A sweep in the template; names and lines of C.

    :param parts: the first part of a block that a warp computes with, and what is behind the last one.
    """

    axis: str
    column: str
    count: str
    column_count: str
    begin: str
    end: str
    copy: str
    since: str
    to: str
    streamed: tuple[PanelText, ...]
    strips: tuple[StripText, ...]
    staged: tuple[StagedText, ...]
    copies: bool
    hoisted: Sequence[str]
    parts: tuple[str, str]
    skipped: str
    inside: str
    body: Sequence[str]
    after: Sequence[str]


def refuse_tiles(program: Program, target: str, arch: str = "") -> None:
    """
    :param arch: that the program is compiled for; the one with most shared memory if it is not known.
    :raises Unsupported: the program has a loop with sweeps that is no kernel on tensor cores: none of its form, or not
        with the blocks that its tile says.
    """
    limits = ARCHITECTURES.get(arch.rstrip("af"), ARCHITECTURES["sm_100"])
    for loop in program.loops:
        if (loop.sweeps or loop.tile) and (reason := unfit(loop, program, limits.block_shared)):
            raise Unsupported(
                f"a loop over blocks of columns on the target {target}: {program.name} has one in {loop.name!r}, and"
                f" {reason}; the target numpy and gradc.interp run it"
            )


def tile_kernel(loop: Loop, program: Program) -> CudaKernel:
    """The kernel of a loop that has a tile and its form.

    :raises NotTiled: it has not.
    """
    plain = canonical(loop, program.types)
    form = folded(form_of(plain.loop, plain.types))
    writer = _TileWriter(plain, form)
    text = _CANONICAL.sub(lambda word: plain.words.get(word[0], word[0]), writer.text())
    assert loop.tile is not None and isinstance(loop.by, int)
    threads = 32 * loop.tile.warps
    rows, columns = product(n for _, n in (*plain.loop.over, plain.loop.rows)), form.multiplying[0].sweep.cols[1]
    shared = writer.shared
    return CudaKernel(
        name=plain.name,
        mapping=MAPPING,
        reason=f"it goes over {loop.by} rows and {loop.sweeps[0].by} columns at a time on tensor cores, with {shared}"
        " bytes of shared memory",
        text=text,
        buffers=plain.buffers,
        symbols=plain.dims,
        dims=plain.dims,
        stages=(Stage(plain.name, "rows", None, threads),),
        threads=threads,
        rows=rows,
        columns=columns,
        chunked=rows,
        by_chunk=False,
        row_sums=False,
        sharing=1,
        most_chunks=0,
        tile=0,
        private=0,
        keys=None,
        masked=False,
        groups=1,
        in_order=False,
        scratch=(),
        fixed=(),
        f32_staged=(),
        split_rows=(),
        checks=False,
        shared=shared,
        chunk_keys=0,
        exp_sums=False,
        index_bounds=tuple(_bounds(plain)),
        sites=(),
    )


def _bounds(plain: Canonical) -> Iterator[Size]:
    """What its text counts to."""
    yield from (magnitude(plain.loop.rows[1]), *(magnitude(s.cols[1]) for s in plain.loop.sweeps))
    inside = {b.name for b in plain.loop.buffers}
    yield from (magnitude(t.count) for b, t in plain.types.items() if b not in inside)


Panels = Mapping[Panel, PanelText]


class _TileWriter:
    """Writes one tile.

    :ivar shared: bytes of shared memory.
    """

    def __init__(self, plain: Canonical, form: TileForm):
        self.plain, self.form, self.loop, self.types = plain, form, plain.loop, plain.types
        assert self.loop.tile is not None and isinstance(self.loop.by, int) and isinstance(self.loop.sweeps[0].by, int)
        self.rows, self.columns = self.loop.by, self.loop.sweeps[0].by
        self.warps, self.stages = self.loop.tile.warps, self.loop.tile.stages
        self.split, self.parts = self.loop.tile.split, self.loop.tile.parts
        self.width = self.columns // (self.split * self.parts)
        self.tiles = self.rows * self.split // (ROWS * self.warps)
        self.shared = form.shared_bytes(self.rows, self.columns, self.loop.tile)
        self.given = form_of(self.loop, self.types)  # whose registers are estimated, with no statement rewritten
        narrow = self.split * self.parts > 1
        self.lanes = Lanes(form.run, form.rows_together, self.width, narrow, self.tiles, self.first)
        self.form = form = decoded(form, self.lanes, self.types)
        codes_in_words = self.lanes.run > 2 and any(paired(k) for s in form.sweeps for k in s.kernels)
        self.lanes = replace(self.lanes, in_words=codes_in_words)
        self.names = Counter[str]()
        self.resident = self.panels("left", form.resident, self.rows, 0, self.loop.rows[0])
        self.in_registers = self.given.fragments(self.width, self.tiles) > 0
        at = sum(self.rows * p.pitch for p in form.resident)
        self.streamed = [
            self.panels("right", s.streamed, self.columns, at, s.sweep.cols[0], self.stages) for s in form.sweeps
        ]
        self.staged = [self.vectors(s) for s in form.sweeps]
        self.strips = [self.strips_of(s) for s in form.sweeps]
        codes = [{c.load: texts[c.strip] for c in s.codes} for s, texts in zip(form.sweeps, self.strips, strict=True)]
        self.after = self.strips_after()
        after = {load: self.after[strip] for load, strip in form.epilogue.items()}
        self.writer = FragmentWriter(form, self.types, self.lanes, [names for _, names in self.staged], codes, after)

    def numbered(self, name: str) -> str:
        """The name with a number that it did not have yet."""
        self.names[name] += 1
        return f"{name}{self.names[name] - 1}"

    def panels(self, name: str, panels: Sequence[Panel], rows: int, at: int, first: str, stages: int = 1) -> Panels:
        """Panels one after another in shared memory, from element ``at`` on; ``first``: symbol of their first row."""
        made: dict[Panel, PanelText] = {}
        for p in panels:
            comment = f"{p.buffer}: {rows} x {p.features}{f', {stages} stages' if stages > 1 else ''}"
            start = size(p.start if stages == 1 else substitute(p.start, {first: 0}))
            made[p] = PanelText(self.numbered(name), at, start, p, comment)
            at += stages * rows * p.pitch
        return made

    def strips_of(self, form: SweepForm) -> Mapping[Strip, StripText]:
        """Strips behind panels and vectors in shared memory."""
        at = sum(2 * self.rows * p.pitch for p in self.form.resident)
        at += sum(2 * self.stages * self.columns * p.pitch for p in form.streamed)
        at += 4 * self.stages * self.columns * len({vector_at(s) for _, s in column_loads(form)})
        made: dict[Strip, StripText] = {}
        (column, columns), (row, rows) = form.sweep.cols, self.loop.rows
        for s in form.strips:
            height, width = s.sizes(self.rows, self.columns)
            base = substitute(s.start, {column: 0})
            last = columns - symbol(column) if not s.across else rows - symbol(row)
            by = f" / {s.per}" if s.per > 1 else ""
            offset = size(s.step if s.across else s.next, "i64")
            many = size(columns - symbol(column)) if s.across else str(s.features or self.loop.count)
            stages = f"{self.stages} stages" if self.stages > 1 else ""
            made[s] = StripText(
                name=self.numbered("strip"),
                at=at,
                ctype=stored(self.types[s.buffer].dtype),
                strip=s,
                height=height,
                width=width,
                pitch=s.pitch(self.rows, self.columns, self.lanes.run),
                first=size(base, "i64"),
                step=size(s.step, "i64"),
                next=size(s.next, "i64"),
                offset=f"{column}{'' if offset == '1' else f' * {offset}'}{'' if s.across else by}",
                there=many,
                valid=f"({size(last)} + {s.per - 1}) / {s.per}" if s.per > 1 else size(last),
                comment=f"{s.buffer}: {height} x {width}, {stages}",
            )
            at += -(-self.stages * height * made[s].pitch * s.bytes // 16) * 16
        return made

    def strips_after(self) -> Mapping[Strip, StripText]:
        """Strips of the steps after the sweeps, behind all others."""
        assert self.loop.tile is not None
        at, made = self.form.staged_bytes(self.rows, self.columns, self.loop.tile), dict[Strip, StripText]()
        for s, count in zip(
            dict.fromkeys(self.form.epilogue.values()), self.form.epilogue_bytes(self.rows), strict=True
        ):
            made[s] = StripText(
                name=self.numbered("strip"),
                at=at,
                ctype=stored(self.types[s.buffer].dtype),
                strip=s,
                height=s.padded,
                width=self.rows,
                pitch=s.pitch(self.rows, 0, self.lanes.run),
                first=size(s.start, "i64"),
                step=size(s.step, "i64"),
                next="1",
                offset="0",
                there=str(s.features),
                valid=self.loop.count,
                comment=f"{s.buffer}: {s.padded} x {self.rows}",
                staged=False,
            )
            at += count
        return made

    @cached_property
    def known(self) -> bool:
        """Whether sizes are known: they take no registers."""
        return all(isinstance(n, int) for n in self.loop.sizes)

    @cached_property
    def by_warp(self) -> bool:
        """Whether each warp asks for itself which columns are at an edge, or left out: where registers suffice, and
        with one product, whose blocks leave fewer of them, sizes are known.
        """
        known = self.given.is_several or self.known
        few = self.given.registers(self.width, self.tiles) > MOST_REGISTERS - SPARE
        return known and not few and not self.given.decoded

    @property
    def in_order(self) -> bool:
        """Whether the places of what a thread copies stay in registers, from one block of columns to the next."""
        return self.by_warp or self.known or not self.given.is_several

    @cached_property
    def first(self) -> Mapping[str, Size]:
        """Of the symbols of a block's first row and columns, those of what a warp computes with at once."""
        if not self.by_warp:
            return {name: symbol(name) for name in (self.loop.rows[0], *(s.cols[0] for s in self.loop.sweeps))}
        part = symbol("part") if self.parts > 1 else 0
        columns = {s.cols[0]: symbol(s.cols[0]) + part for s in self.loop.sweeps}
        return {self.loop.rows[0]: symbol(self.loop.rows[0]) + symbol("warp_row"), **columns}

    def text(self) -> str:
        comment = "\n".join(["/*", *(f" * {line}".rstrip() for line in str(self.loop).splitlines()), " */"])
        sweeps = [self.sweep(number, s) for number, s in enumerate(self.form.sweeps)]
        view: dict[str, Any] = {
            "comment": comment,
            "name": self.plain.name,
            "threads": 32 * self.warps,
            "resident_blocks": self.given.resident_blocks(self.warps, self.width, self.tiles, self.shared),
            "parameters": self.parameters,
            "dims": [f"n{i}" for i in range(len(self.plain.dims))],
            "dtype": self.form.dtype.name,
            "rows": self.rows,
            "columns": self.columns,
            "stages": self.stages,
            "tiles": self.tiles,
            "split": self.split,
            "parts": self.parts,
            "by_warp": self.by_warp,
            "in_order": self.in_order,
            "kept": "gradc_kept" if self.known else "gradc_in_shared",
            "run": self.lanes.run,
            "together": self.lanes.together,
            "codebooks": list(self.writer.codebook_texts()),
            "summed": [c.name for s in self.loop.sweeps for c in s.carries],
            "row_count": size(self.loop.rows[1]),
            "row": self.loop.rows[0],
            "count": self.loop.count,
            "last_first": any(s.to is not None and self.loop.rows[0] in symbols(s.to) for s in self.loop.sweeps),
            "over": [(axis, size(n)) for axis, n in self.loop.over],
            "resident": list(self.resident.values()),
            "in_registers": self.in_registers,
            "after": list(self.after.values()),
            "carries": [
                {"declaration": self.declared(c), "comment": str(c)} for s in self.loop.sweeps for c in s.carries
            ],
            "sweeps": sweeps,
            "first_copying": next((s.axis for s in sweeps if s.copies), ""),
            "streamed": [p for s in sweeps for p in s.streamed],
            "epilogue": self.epilogue(),
        }
        return indented(render("cuda/kernel/tile.cu.j2", t=view))

    @property
    def parameters(self) -> list[str]:
        written = self.loop.writes
        return [
            f"{'' if b in written else 'const '}{stored(self.types[b].dtype)} *__restrict__ const {b}"
            for b in (f"b{i}" for i in range(len(self.plain.buffers)))
        ]

    def declared(self, c: Carry) -> str:
        kind, start = carrier(c.type.dtype), literal(neutral(c.combine, c.type.dtype), c.type.dtype)
        if len(c.type.shape) == 1:
            own = f"{kind} {c.name}[2 * TILES] = {{{', '.join([start] * 2 * self.tiles)}}};"
            own_sweep = next(s for s in self.form.sweeps if c in s.sweep.carries)
            if not any(x.by == c.name for x in own_sweep.sweep.carries):
                return own
            lowest = ", ".join(["-0x1.fffffep127f"] * 2 * self.tiles)
            exponent = f", {c.name}_exponent[2 * TILES] = {{{lowest}}}" if own_sweep.divides else ""
            return f"{own} f32 {c.name}_factor[2 * TILES]{exponent};"
        return f"{kind} {c.name}[TILES * {self.form.padded(c.name)} / 8][4] = {{}};"

    # -- sweeps --------------------------------------------------------------------------------------------------------

    def sweep(self, number: int, form: SweepForm) -> SweepText:
        s, column = form.sweep, form.sweep.cols[0]
        streamed, kernels = self.streamed[number], iter(self.writer.kernels[number])
        packed, computed = packed_blocks(form), {x.block for x in form.scores}
        elements = f"TILES * {self.lanes.width} / 8"
        body = [
            f"u32 {b.name}[{elements}][2];" if b.name in packed else f"f32 {b.name}[{elements}][4];"
            for b in s.blocks
            if b.name not in computed
        ]
        body += [f"f32 {scales(b)}{''.join(self.lanes.shared)};" for b in self.scaled(form)]
        run: list[str] = []
        masks = list(dict.fromkeys(m.whole for k in self.writer.kernels[number] for m in k.masks.values()))
        for step in form.steps:
            if isinstance(step, Kernel):
                run += ["{", f"/* {step.name} */", *self.writer.block(next(kernels)), "}"]
            else:
                body += [*inside_and_at_edge(run), *self.product(form, step, streamed, self.strips[number])]
                run = []
        body += inside_and_at_edge(run)
        to = s.cols[1] if s.to is None else minimum(s.cols[1], s.to)
        return SweepText(
            axis=column,
            column=column,
            count=s.count,
            column_count=size(s.cols[1]),
            begin=f"begin{number}",
            end=f"end{number}",
            copy=f"copy{number}",
            since=f"gradc_max(0, {size(s.since)})" if s.since != 0 else "0",
            to=size(to),
            streamed=tuple(streamed.values()),
            strips=tuple(self.strips[number].values()),
            staged=self.staged[number][0],
            copies=bool(streamed or self.strips[number] or self.staged[number][0]),
            hoisted=self.writer.early(self.writer.kernels[number]),
            parts=self.parts_of(s),
            skipped=self.skipped(s),
            inside=self.inside(form, masks),
            body=body,
            after=[
                *after_sweep(s),
                *(self.writer.unrounded_sums(s) if self.form.sweeps[number].divides else ()),
                *self.in_units(form),
            ],
        )

    def inside(self, form: SweepForm, masks: Sequence[str]) -> str:
        """Whether no element of a block is at an edge.

        Where none ever is, a block is compared all the same: in one piece of code without a branch NVRTC loads what the
        next product and the elements need long before, and spills whatever registers it has.  A part's loop is one.
        """
        part = has_part(form.sweep) or (form.scores and not masks and self.parts == 1)
        return " && ".join([*[f"{form.sweep.count} == COLUMNS"] * bool(part), *(f"({m})" for m in masks)]) or "true"

    def beyond(self, s: Sweep) -> tuple[str, str]:
        """(the first column, that behind the last one) which the rows of a warp sum up, where blocks of rows begin or
        end at one that depends on the row; else "".
        """
        row = self.loop.rows[0]
        own = {row: symbol(row) + symbol("warp_row"), self.loop.count: ROWS * self.tiles}
        since = size(substitute(s.since, own)) if row in symbols(s.since) else ""
        return since, size(substitute(s.to, own)) if s.to is not None and row in symbols(s.to) else ""

    def skipped(self, s: Sweep) -> str:
        """Whether the columns of a block are all beyond what a warp's rows sum up; "" where that is not asked."""
        if not self.by_warp or self.parts > 1:
            return ""
        (since, to), first = self.beyond(s), s.cols[0]
        asked = [f"{first} >= {to}"] * bool(to) + [f"{first} + COLUMNS <= {since}"] * bool(since)
        return " || ".join(asked)

    def parts_of(self, s: Sweep) -> tuple[str, str]:
        """(the first, that behind the last one) of a block's parts that a warp computes with."""
        (since, to), first = self.beyond(s), s.cols[0]
        there = "COLUMNS" if not has_part(s) else s.count
        begin = f"gradc_uniform(gradc_max(0, ({since} - {first}) / WIDTH * WIDTH))" if since else "0"
        return begin, f"gradc_min({there}, {to} - {first})" if to else there

    def scaled(self, form: SweepForm) -> list[str]:
        """The blocks that are stored with a scale of their products."""
        return [s.buffer for k in form.kernels for s in k.body if s.op == "store" and len(s.args) > 1]

    def in_units(self, form: SweepForm) -> Iterator[str]:
        """Sums of products of digits, whose unit may be a part of 1."""
        for p in form.added:
            digits = any((s := paired(k)) and s.op == "digit" and p.block in k.writes for k in form.kernels)
            if digits and self.form.dtype is BF16:
                yield from (UNROLL, f"for (auto &x : {p.carry}) for (f32 &y : x) y *= operand::UNITS;")

    def vectors(self, form: SweepForm) -> tuple[tuple[StagedText, ...], dict[Stmt, str]]:
        """Vectors over columns, each once, behind the panels in shared memory, and the loads that read them."""
        at = sum(self.rows * p.pitch for p in self.form.resident)
        at += sum(self.stages * self.columns * p.pitch for p in form.streamed)
        texts: dict[tuple[Any, ...], StagedText] = {}
        names: dict[Stmt, str] = {}
        for kernel, s in column_loads(form):
            key = vector_at(s)
            if key not in texts:
                scribe = TileScribe(self.types, kernel.body, (), {}, {}, (), {}, self.lanes)
                comment = f"{s.buffer}: {self.columns}, {self.stages} stages"
                place = at // 2 + len(texts) * self.stages * self.columns
                texts[key] = StagedText(self.numbered("staged"), place, scribe.element(s.buffer, s.index), comment)
            names[s] = texts[key].name
        return tuple(texts.values()), names

    def product(
        self, form: SweepForm, p: Scores | Added, streamed: Panels, strips: Mapping[Strip, StripText]
    ) -> list[str]:
        if isinstance(p, Added) and isinstance(p.right, Strip):
            strip, width = strips[p.right], self.lanes.width
            depth = f"operand, {strip.pitch}, {width}, {strip.height}, TILES"
            place = f"{strip.stage}{' + warp_column' if self.split > 1 else ''}"
            scale = f", {scales(p.block)}" if p.block in self.scaled(form) else ""
            if self.lanes.run == 2:
                return [f"/* {p.call} */", f"gradc_add_strip<{depth}>({p.carry}, {p.block}, {place}{scale});"]
            shared = f", {scaled_columns(form, p.block, self.lanes)}" if scale else ""
            how = f"gradc_add_runs<{depth}, {self.lanes.run}, {str(self.lanes.in_words).lower()}{shared}>"
            return [f"/* {p.call} */", f"{how}({p.carry}, {p.block}, {place}{scale});"]
        assert isinstance(p.right, Panel)
        right = streamed[p.right]
        side, part = "rows" if isinstance(p, Added) else "columns", " + part" if self.parts > 1 else ""
        stage = f"{side}_{right.pitch} + {right.at} + (stage * COLUMNS{part}) * {right.pitch}"
        depth = f"operand, {right.pitch}, {self.lanes.width}, {right.padded}, TILES"
        text = f"/* {p.call} */"
        if isinstance(p, Added):
            return [text, f"gradc_add_product<{depth}>({p.carry}, {p.block}, {stage});"]
        left = self.resident[p.left]
        rows = left.fragments if self.in_registers else f"rows_{left.pitch} + {left.at} + warp_row * {left.pitch}"
        lines = [
            text,
            f"f32 {p.block}[TILES * {self.lanes.width} / 8][4] = {{}};",
            f"gradc_scores<{depth}>({p.block}, {rows}, {stage});",
        ]
        dtype = self.types[p.block].dtype
        if dtype is not F32:
            lines += [f"for (auto &x : {p.block}) for (f32 &y : x) y = {dtype.name}_round(y);"]
        return lines

    def row_product(self, p: RowProduct) -> Iterator[str]:
        """A product of the block's rows, from memory."""
        features, padded = p.features, self.form.padded_features(p.features)
        yield f"/* {p.call} */"
        yield f"f32 {p.block}[TILES * {padded} / 8][4] = {{}};"
        rows = (
            f"gradc_pairs<{p.left.features}>::at({x.buffer} + {size(x.start, 'i64')}, {size(x.step, 'i64')},"
            f" {size(x.feature_step, 'i64')})"
            for x in (p.left, p.right)
        )
        apart = 1 if self.lanes.together else 8
        how = f"gradc_multiply_rows<operand, {p.left.features}, {features}, {padded}, TILES, {apart}>"
        yield f"{how}({p.block}, {', '.join(rows)}, lane_row, {self.loop.count});"

    def epilogue(self) -> list[str]:
        """What is done once for each row."""
        kernels = self.writer.kernels[-1]
        products = (line for p in self.form.after for line in self.row_product(p))
        blocks = (line for k in kernels for line in ("{", f"/* {k.kernel.name} */", *self.writer.block(k), "}"))
        return [*self.writer.early(kernels), *products, *blocks]


def inside_and_at_edge(lines: Sequence[str]) -> list[str]:
    """Kernels for blocks whose elements all are there and pass all masks, and for others: EDGE is constant."""
    opened = "{ const auto elements = [&](const auto EDGE) {"
    chosen = "}; at_edge ? elements(gradc_constant<1>()) : elements(gradc_constant<0>()); }"
    return [opened, *lines, chosen] if lines else []
