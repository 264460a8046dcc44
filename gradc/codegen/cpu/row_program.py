"""What the templates of ``templates/cpu/kernel`` ask of a kernel, beside its mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.chunks import largest
from ...ir.dims import product, symbol
from ...ir.statement import Axis
from ...ir.types import F32
from ...process.forks import cached_property
from ..declarations import Declaration
from ..expr import carrier, stored
from ..index import size
from .accums import Accum
from .arrays import BufferField, LocalArray, StreamedArray, grouped
from .facts import Facts
from .keys import RowKeys, found_by
from .mapping import RowMapping, Stage
from .phase_writer import PhaseText, PhaseWriter
from .row_memory import Gathered


@dataclass(frozen=True, eq=False)
class RowProgram:
    """A kernel's stages and memory.

    :param dims: the symbols in the order in which a caller passes their values: that of the kernel as it stands in the
        program. Collapsed columns name them in another order, and may not name them all.
    :param by_buffer: the results that rows are combined into.
    :param writer: writes the phases of a row.
    """

    facts: Facts
    mapping: RowMapping
    dims: tuple[str, ...]
    by_buffer: Mapping[str, Accum]
    writer: PhaseWriter

    @property
    def name(self) -> str:
        """Of the kernel, with which the names of its functions begin."""
        return self.facts.kernel.name

    @cached_property
    def phases(self) -> tuple[PhaseText, ...]:
        """Of a row."""
        return self.writer.phases()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its functions, in the order in which they run."""
        m = self.mapping
        folds = [
            Stage(f"fold{a.number}", a.strategy.fold, f"gradc_chunks({a.size}, GRADC_FOLD)") for a in self.privatized
        ]
        return (*m.before, Stage("rows", m.template, m.tasks), *folds, *m.after)

    @property
    def checks(self) -> bool:
        """Whether it may report an index."""
        return any(s.op == "check" for s in self.facts.kernel.body)

    # -- sizes and memory ----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> tuple[Declaration, ...]:
        """Sizes that the stages name, of which the largest bound is the rows per task."""
        return (
            *(Declaration(name, f"const i64 {name} = {size(value)};") for name, value in self.mapping.sizes),
            *(Declaration(b.name, f"const i64 {b.name} = {size(b.rows)}; /* {b.why} */") for b in self.mapping.bounds),
        )

    @property
    def chunk(self) -> str:
        """Rows per task, or owners, as C."""
        bounds = self.mapping.bounds
        return size(largest([b if isinstance(b.rows, int) else replace(b, rows=symbol(b.name)) for b in bounds]))

    @property
    def chunked(self) -> str:
        """What chunks are cut from: ``owners`` or ``rows``."""
        return "owners" if "owners" in dict(self.mapping.sizes) else "rows"

    @property
    def buffers(self) -> list[BufferField]:
        """In the order in which a caller passes them."""
        k, types = self.facts.kernel, self.facts.types
        return [BufferField(b, f"{'' if b in k.writes else 'const '}{stored(types[b].dtype)}") for b in k.buffers]

    @cached_property
    def workspace(self) -> list[LocalArray]:
        """What the stages of a kernel hand to one another."""
        arrays = [LocalArray("start", "i32", "keys + 2")] if self.mapping.starts else []
        if self.facts.keys is not None and not self.mapping.starts:
            arrays = [
                LocalArray("key", "i32", "rows"),
                LocalArray("order", "i32", "rows"),
                LocalArray("start", "i32", "keys + 2"),
                LocalArray("sorting", "char", "gradc_sort_bytes(rows, keys)"),
                *(LocalArray(found_by(s), "i64", "rows") for s in self.facts.keys.kept_searches),
            ]
        for a in self.accums:
            count = (
                f"2 * chunks * {a.inner}"
                if a.segmented
                else f"chunks * {a.size}"
                if a.strategy.partials
                else f"chunks * {a.owned_size}"
                if a.wide_accumulator and not self.mapping.owners_at_once
                else ""
            )
            arrays += [LocalArray(f"partial{a.number}", a.partial, count)] if count else []
        return arrays

    @cached_property
    def thread_memory(self) -> list[LocalArray]:
        """What a task keeps: values of a row, blocks and rows to stream, sums of a few rows, wide sums of a chunk."""
        types = [self.facts.kernel.stmts[v].dtype or F32 for v in self.facts.kept_values]
        arrays = [LocalArray(f"cache{i}", carrier(dtype), "cols") for i, dtype in enumerate(types)]
        for i, w in enumerate(self.streams):
            arrays.append(LocalArray(f"staged{i}", w.ctype, f"({w.row} >= GRADC_STREAMED_ROW ? GRADC_BLOCK : 0)"))
        arrays += [LocalArray(f"block{a.number}", a.ctype, a.block_size) for a in self.block_sums]
        arrays += [LocalArray(f"row_a{a.number}", a.ctype, a.inner) for a in self.streamed_results]
        if self.mapping.owners_at_once:
            owned = [a for a in self.accums if a.wide_accumulator]
            arrays += [LocalArray(f"wide{a.number}", a.partial, f"chunk * {a.owned_size}") for a in owned]
        return arrays

    @property
    def streams(self) -> list[StreamedArray]:
        """The arrays that a store streams to."""
        arrays = []
        for s, number in self.writer.stream_number.items():
            type_ = self.facts.types[s.buffer]
            row = f"{grouped(size(self.facts.kernel.cols[-1][1]))} * (i64)sizeof({stored(type_.dtype)})"
            arrays.append(StreamedArray(f"stream{number}", stored(type_.dtype), size(type_.count), row))
        return arrays

    # -- what rows are combined into -----------------------------------------------------------------------------------

    @property
    def accums(self) -> list[Accum]:
        return [*self.by_buffer.values()]

    @property
    def privatized(self) -> list[Accum]:
        """Results of which each chunk has a partial one."""
        return [a for a in self.accums if a.strategy.partials]

    @property
    def owned(self) -> list[Accum]:
        """Results of which each kept row owns a part."""
        return [a for a in self.accums if a.is_owned]

    @property
    def segmented(self) -> list[Accum]:
        """Results into whose rows segments are combined: rows of one key."""
        return [a for a in self.accums if a.segmented]

    @property
    def block_sums(self) -> list[Accum]:
        """Results of which a few rows are added in f32 first, in memory."""
        return [a for a in self.accums if a.block_sums and not self.mapping.sums_in_registers]

    @property
    def streamed_results(self) -> list[Accum]:
        """Results whose rows may be written by streaming stores."""
        return [a for a in self.accums if a.streamed]

    # -- its rows ------------------------------------------------------------------------------------------------------

    @property
    def row_axes(self) -> list[str]:
        """Statements that compute the axes of row ``r``."""
        return _located(self.facts.kernel.rows, "r")

    @property
    def lane_axes(self) -> list[str]:
        """Those of a line ``r`` of rows that lie together."""
        return _located(self.facts.kernel.rows[:-1], "r")

    @property
    def owner_axes(self) -> list[str]:
        """Those of owner ``owner``."""
        return _located(self.facts.rows.kept_axes, "owner")

    @property
    def member_axes(self) -> list[str]:
        """Those of its member ``r``."""
        return _located(self.facts.member_axes, "r")

    @property
    def member_count(self) -> str:
        """Rows that are combined into an owner's elements, as C."""
        return size(self.facts.members)

    @property
    def visits_all(self) -> bool:
        """Whether rows without a key are visited too."""
        return self.facts.rows.visits_all_rows

    @property
    def keys(self) -> RowKeys | None:
        """Of its rows, if they are visited in the order of these."""
        return self.facts.keys

    @property
    def gathered(self) -> tuple[Gathered, ...]:
        """What rows ask for before others gather it."""
        return self.facts.gathered if self.mapping.asks_ahead and not self.facts.guarded else ()

    @property
    def ahead(self) -> list[str]:
        """The statements that ask for what row ``r`` gathers."""
        places = dict.fromkeys(line for g in self.gathered for line in g.lines)
        return [*places, *(line for g in self.gathered for line in g.requests)]

    @property
    def distant(self) -> str:
        """Whether that may be far away, as C."""
        arrays = dict.fromkeys(f"{g.count} * (i64)sizeof(*{g.buffer}) >= GRADC_DISTANT" for g in self.gathered)
        return " || ".join(arrays)


def _located(axes: Sequence[Axis], linear: str) -> list[str]:
    """Statements that compute the axes of a position, row-major."""
    lines = []
    for i, (name, extent) in enumerate(axes):
        below = size(product(n for _, n in axes[i + 1 :]))
        quotient = f"{linear} / {grouped(below)}" if below != "1" else linear
        lines.append(f"const i64 {name} = {quotient}{f' % {grouped(size(extent))}' if i else ''};")
    return lines
