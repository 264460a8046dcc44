"""What the templates of ``templates/cpu/kernel`` ask of a kernel, beside its mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.chunks import Bound, largest
from ...ir.dims import Size, product, symbol
from ...ir.statement import Axis
from ...ir.types import F32
from ...process.forks import cached_property
from ..declarations import Declaration
from ..expr import carrier, stored, variable
from ..index import grouped, size
from ..row_accum import Results
from .accums import Accum
from .facts import Facts
from .keys import found_by
from .mapping import RowMapping, Stage
from .phase_writer import PhaseText, PhaseWriter
from .row_memory import Gathered


@dataclass(frozen=True)
class LocalArray:
    """An array in the workspace, or in the memory of the running thread.

    :param name: what it is called.
    :param ctype: the type of its elements.
    :param count: how many there are, as C.
    """

    name: str
    ctype: str
    count: str

    @property
    def bytes(self) -> str:
        """Its bytes, as C."""
        return f"{grouped(self.count)} * (i64)sizeof({self.ctype})"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowProgram(Results[Accum]):
    """A kernel's stages and memory.

    :param dims: the symbols in the order in which a caller passes their values: that of the kernel as it stands in the
        program. Collapsed columns name them in another order, and may not name them all.
    :param writer: writes the phases of a row.
    :param then: the program of the kernel that its finished rows are handed to.
    :param of_row: the buffer that is such a row, of a kernel that is handed it; "" else.
    """

    facts: Facts
    mapping: RowMapping
    dims: tuple[str, ...]
    writer: PhaseWriter
    then: RowProgram | None = None
    of_row: str = ""

    @property
    def name(self) -> str:
        """Of the kernel, with which the names of its functions begin."""
        return self.facts.kernel.name

    @cached_property
    def phases(self) -> list[PhaseText]:
        """Of a row."""
        return [self.writer.phase(p, number) for number, p in enumerate(self.facts.kernel.passes)]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its functions, in the order in which they run."""
        m = self.mapping
        folds = [
            Stage(f"fold{a.number}", a.strategy.fold, f"gradc_chunks({a.size}, GRADC_FOLD)") for a in self.privatized
        ]
        return (*m.before, Stage("rows", m.template, m.tasks(self.facts)), *folds, *m.after)

    @property
    def checks(self) -> bool:
        """Whether it may report an index."""
        return any(s.op == "check" for s in self.facts.kernel.body)

    # -- sizes and memory ----------------------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> tuple[list[Bound], Mapping[str, Size]]:
        """The bounds of which the largest is the rows per task, or owners, and the sizes that the stages name."""
        facts = self.facts
        sizes: dict[str, Size] = {"rows": facts.kernel.row_count, "cols": facts.kernel.col_count}
        sizes |= {"owners": facts.owners} if self.mapping.chunked == "owners" else {}
        sizes |= {"keys": facts.keys.count} if facts.keys is not None else {}

        def short(name: str, value: Size) -> Size:
            """A size by a name, so that expressions of it are as short for sizes that are long themselves."""
            if isinstance(value, int):
                return value
            sizes[name] = value
            return symbol(name)

        return self.mapping.bounds(facts, short), sizes

    @cached_property
    def counts(self) -> list[Declaration]:
        """The declarations of these."""
        bounds, sizes = self.bounds
        counts = [Declaration(name, f"const i64 {name} = {size(value)};") for name, value in sizes.items()]
        return [*counts, *(Declaration(b.name, f"const i64 {b.name} = {size(b.rows)}; /* {b.why} */") for b in bounds)]

    @cached_property
    def chunk(self) -> str:
        """Rows per task, or owners, as C."""
        bounds, _ = self.bounds
        return size(largest([b if isinstance(b.rows, int) else replace(b, rows=symbol(b.name)) for b in bounds]))

    @cached_property
    def buffers(self) -> list[tuple[str, str]]:
        """C types of elements and names of its buffers, in the order in which a caller passes them."""
        k, types = self.facts.kernel, self.facts.types
        return [(f"{'' if b in k.writes else 'const '}{stored(types[b].dtype)}", b) for b in k.buffers]

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
        for number, array, row in self.streams:
            arrays.append(
                LocalArray(f"staged{number}", array.ctype, f"({row} >= GRADC_STREAMED_ROW ? GRADC_BLOCK : 0)")
            )
        arrays += [LocalArray(f"block{a.number}", a.ctype, a.block_size) for a in self.block_sums]
        rows = [a for a in self.accums if a.streamed or a.forwarded]
        for a in rows:
            handed = f"gradc_handed({a.inner} * (i64)sizeof({a.ctype})) * " if a.forwarded else ""
            arrays.append(LocalArray(f"row_a{a.number}", a.ctype, f"{handed}{a.inner}"))
        if self.then is not None and self.then.thread_memory:
            arrays.append(LocalArray("then_memory", "char", f"{self.then.name}_thread_bytes(&A->then)"))
        if self.mapping.owners_at_once:
            owned = [a for a in self.accums if a.wide_accumulator]
            arrays += [LocalArray(f"wide{a.number}", a.partial, f"chunk * {a.owned_size}") for a in owned]
        return arrays

    @property
    def streams(self) -> list[tuple[int, LocalArray, str]]:
        """The stores that may stream: number, array, and bytes of it that lie side by side in a row of the kernel."""
        arrays = []
        for s, number in self.writer.stream_number.items():
            type_ = self.facts.types[s.buffer]
            array = LocalArray(s.buffer, stored(type_.dtype), size(type_.count))
            row = f"{grouped(size(self.facts.kernel.cols[-1][1]))} * (i64)sizeof({array.ctype})"
            arrays.append((number, array, row))
        return arrays

    # -- what rows are combined into -----------------------------------------------------------------------------------

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
    def without_effect(self) -> str:
        """The value without which a row has no effect, of those that it computes first, as C; "" if there is none."""
        k = self.facts.kernel
        masks = {s.where for s in k.body if not s.name}
        known = {s.name for s in k.passes[0].row}
        return variable(mask) if len(masks) == 1 and (mask := masks.pop()) in known else ""

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
    def gathered(self) -> tuple[Gathered, ...]:
        """What rows ask for before others gather it."""
        return self.facts.gathered if self.mapping.asks_ahead and not self.facts.guarded else ()

    @property
    def ahead(self) -> list[str]:
        """The statements that ask for what row ``r`` gathers."""
        places = dict.fromkeys(line for g in self.gathered for line in g.lines)
        return [*places, *(line for g in self.gathered for line in g.requests)]

    @cached_property
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
