"""A loop's form as the text of one kernel, and what a launch must know of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....analysis.tiles import Added, Panel, Scores, SweepForm, TileForm, column_loads, form_of, unfit, vector_at
from ....errors import Unsupported
from ....ir.dims import Size, minimum, product, substitute, symbols
from ....ir.kernel import Carry, Kernel, Loop, Program
from ....ir.statement import Stmt, neutral
from ....ir.types import F32, Type
from ....targets.devices import ARCHITECTURES
from ...expr import carrier, stored
from ...index import literal, size
from ...indent import indented
from ...jinja import render
from ..index_bound import magnitude
from ..kernel import CudaKernel, Stage
from .canonical import Canonical, canonical
from .fragments import UNROLL, FragmentWriter, Lines, TileScribe, after_sweep

_CANONICAL = re.compile(r"\b[bn]\d+\b")
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
        return f"of_{self.name}"

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

    @property
    def in_pieces(self) -> str:
        return f"gradc_in_pieces({self.name}_from, {self.step}, {self.feature_step}, {self.features})"


@dataclass(frozen=True)
class StagedText:
    """A vector over columns in shared memory: ``at`` elements of f32 before it, and an element of it in memory."""

    name: str
    at: int
    element: str
    comment: str


@dataclass(frozen=True)
class SweepText:
    """A sweep in the template; names and lines of C."""

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
    staged: tuple[StagedText, ...]
    hoisted: Sequence[str]
    masks: str
    body: Sequence[str]
    after: Sequence[str]


def refuse_tiles(program: Program, arch: str = "") -> None:
    """
    :param arch: that the program is compiled for; the largest one if unsaid.
    :raises Unsupported: the program has a loop with sweeps that is no kernel on tensor cores: none of its form, or not with
        the blocks that its tile says.
    """
    for loop in program.loops:
        if loop.sweeps and (reason := unfit(loop, program, ARCHITECTURES[arch or "sm_100"].block_shared)):
            raise Unsupported(
                f"a loop over blocks of columns on the target cuda: {program.name} has one in {loop.name!r}: {reason}; the"
                " target numpy and gradc.interp run it"
            )


def tile_kernel(loop: Loop, program: Program) -> CudaKernel:
    """The kernel of a loop that has a tile and its form.

    :raises NotTiled: it has not.
    """
    plain = canonical(loop, program.types)
    form = form_of(plain.loop, plain.types)
    writer = _TileWriter(plain, form)
    text = _CANONICAL.sub(lambda word: plain.words.get(word[0], word[0]), writer.text())
    assert loop.tile is not None and isinstance(loop.by, int)
    threads = 32 * loop.tile.warps
    rows, columns = product(n for _, n in (*plain.loop.over, plain.loop.rows)), plain.loop.sweeps[0].cols[1]
    shared = writer.shared
    return CudaKernel(
        name=plain.name,
        mapping=MAPPING,
        reason=f"it goes over {loop.by} rows and {loop.sweeps[0].by} columns at a time on tensor cores, with {shared} bytes"
        " of shared memory",
        text=text,
        buffers=plain.buffers,
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
        scratch=(),
        fixed=(),
        f32_staged=(),
        split_rows=(),
        checks=False,
        shared=shared,
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
        self.shared = form.shared_bytes(self.rows, self.columns, self.stages)
        self.writer = FragmentWriter(form, self.types)
        self.resident = self.panels("left", form.resident, self.rows, 0, self.loop.rows[0])
        self.in_registers = form.fragments(self.columns) > 0

    def panels(self, name: str, panels: Sequence[Panel], rows: int, at: int, first: str, stages: int = 1) -> Panels:
        """Panels one after another in shared memory, from element ``at`` on; ``first``: the symbol of their first row."""
        made: dict[Panel, PanelText] = {}
        for number, p in enumerate(panels):
            comment = f"{p.buffer}: {rows} x {p.features}{f', {stages} stages' if stages > 1 else ''}"
            address = f"{p.buffer} + {size(p.start if stages == 1 else substitute(p.start, {first: 0}), 'i64')}"
            made[p] = PanelText(f"{name}{number}", at, address, p, comment)
            at += stages * rows * p.pitch
        return made

    def text(self) -> str:
        comment = "\n".join(["/*", *(f" * {line}".rstrip() for line in str(self.loop).splitlines()), " */"])
        sweeps = [self.sweep(number, s) for number, s in enumerate(self.form.sweeps)]
        view: dict[str, Any] = {
            "comment": comment,
            "name": self.plain.name,
            "threads": 32 * self.warps,
            "resident_blocks": 1,
            "parameters": self.parameters,
            "dims": [f"n{i}" for i in range(len(self.plain.dims))],
            "dtype": self.form.dtype.name,
            "rows": self.rows,
            "columns": self.columns,
            "stages": self.stages,
            "row_count": size(self.loop.rows[1]),
            "row": self.loop.rows[0],
            "count": self.loop.count,
            "last_first": any(s.to is not None and self.loop.rows[0] in symbols(s.to) for s in self.loop.sweeps),
            "over": [(axis, size(n)) for axis, n in self.loop.over],
            "resident": list(self.resident.values()),
            "in_registers": self.in_registers,
            "carries": [
                {"declaration": self.declared(c), "comment": str(c)} for s in self.loop.sweeps for c in s.carries
            ],
            "sweeps": sweeps,
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
            return f"{kind} {c.name}[2] = {{{start}, {start}}};"
        return f"{kind} {c.name}[{self.padded(c.name) // 8}][4] = {{}};"

    def padded(self, carry: str) -> int:
        """Columns of a carry's fragments."""
        return next(p.right.padded for s in self.form.sweeps for p in s.added if p.carry == carry)

    # -- sweeps --------------------------------------------------------------------------------------------------------

    def sweep(self, number: int, form: SweepForm) -> SweepText:
        s, column = form.sweep, form.sweep.cols[0]
        at = sum(self.rows * p.pitch for p in self.form.resident)
        streamed = self.panels(f"right{number}_", form.streamed, self.columns, at, column, self.stages)
        at += sum(self.stages * self.columns * p.pitch for p in form.streamed)
        staged, names = self.staged(number, form, at // 2)
        writer, hoisted, body = self.writer, Lines(), Lines()
        masks: dict[str, None] = {}
        run: list[str] = []
        for step in form.steps:
            if isinstance(step, Kernel):
                k, fresh = writer.numbered(step, form, names)
                hoisted += writer.early(k, fresh)
                masks |= dict.fromkeys(f"!({m})" for m in k.masks.values())
                run += ["{", f"/* {step.name} */", *writer.block(k, form), "}"]
                continue
            body += self.at_edge(run)
            run = []
            body += self.product(step, streamed)
        body += self.at_edge(run)
        scored = {x.block for x in form.scores}
        declared = [f"f32 {b.name}[COLUMNS / 8][4];" for b in s.blocks if b.name not in scored]
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
            staged=tuple(staged),
            hoisted=hoisted,
            masks=" || ".join([f"{s.count} < COLUMNS", *masks]),
            body=[*declared, *body],
            after=after_sweep(s),
        )

    def at_edge(self, lines: Sequence[str]) -> list[str]:
        """Kernels in a loop that is unrolled: for blocks whose elements all are there and pass all masks, and for others."""
        if not lines:
            return []
        return [UNROLL, "for (int EDGE = 0; EDGE < 2; EDGE++) {", "if (edge != EDGE) continue;", *lines, "}"]

    def staged(self, number: int, form: SweepForm, at: int) -> tuple[list[StagedText], dict[Stmt, str]]:
        """Vectors over columns, each once, and the loads that read them."""
        texts: dict[tuple[Any, ...], StagedText] = {}
        names: dict[Stmt, str] = {}
        for kernel, s in column_loads(form):
            key = vector_at(s)
            if key not in texts:
                scribe = TileScribe(self.types, kernel.body, (), {}, (), ())
                element = scribe.element(s.buffer, s.index)
                comment = f"{s.buffer}, {self.columns} in {self.stages} stages"
                texts[key] = StagedText(f"staged{number}_{len(texts)}", at, element, comment)
                at += self.stages * self.columns
            names[s] = texts[key].name
        return list(texts.values()), names

    def product(self, p: Scores | Added, streamed: Panels) -> list[str]:
        right = streamed[p.right]
        stage = f"{right.name} + stage * COLUMNS * {right.pitch}"
        depth = f"operand, {right.pitch}, COLUMNS, {right.padded}"
        text = f"/* {p.call} */"
        if isinstance(p, Added):
            return [text, f"gradc_add_product<{depth}>({p.carry}, {p.block}, {stage});"]
        left = self.resident[p.left]
        rows = left.fragments if self.in_registers else f"{left.name} + warp_row * {left.pitch}"
        lines = [text, f"f32 {p.block}[COLUMNS / 8][4] = {{}};", f"gradc_scores<{depth}>({p.block}, {rows}, {stage});"]
        dtype = self.types[p.block].dtype
        if dtype is not F32:
            lines += [f"for (auto &x : {p.block}) for (f32 &y : x) y = {dtype.name}_round(y);"]
        return lines

    def epilogue(self) -> Lines:
        lines = Lines()
        for kernel in self.loop.steps:
            assert isinstance(kernel, Kernel)
            k, fresh = self.writer.numbered(kernel, None, {})
            early = self.writer.early(k, fresh)
            lines += [*early, "{", f"/* {kernel.name} */", *self.writer.block(k, None), "}"]
        return lines
