"""A kernel as CUDA functions: what its mapping and its statements say, in the templates of ``cuda/kernel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...analysis.chunks import GPU_FOLDED, fold_lanes
from ...ir.dims import Size, ceildiv, maximum, product
from ...ir.kernel import Kernel
from ...ir.types import Type
from ...process.forks import cached_property
from ..declarations import Declaration, used
from ..expr import stored
from ..heading import kernel_comment
from ..indent import indented
from ..jinja import render
from .accums import Accum, accums_of
from .axes import declared
from .columns import ACCESS_BYTES
from .facts import facts_of
from .finished_rows import Reader, finished_row, mapping_of, parted
from .fixed_sums import elements_as_rows
from .index_bound import index_bounds
from .kernel import SCANNED, CudaKernel, Stage
from .mapping import THREADS, WHOLE_ROW, even_columns
from .mappings.tiled import full_width
from .phase_writer import PhaseView, PhaseWriter, VectorArrays
from .row_order import row_axes, sorted_rows
from .row_program import RowProgram
from .workspace import size_declarations, workspace

FOLDER = "cuda/kernel"
EACH, TIMES = 4, 4
"""Neighbouring elements of a result that a thread clears or finishes, and how many such."""
CLEARED = 8
"""Vectors that a thread stores into rows that nobody hits: enough of them are under way together that the first
positions of rows, which must be loaded before, delay none.
"""
PURPOSE = {
    "clear": "The neutral element in a result that atomics combine into",
    "clear_fixed": "Zeros in sums in fixed point",
    "key": "The key of each row: the row of the result that it adds to",
    "scan": "The largest |value| that is added up in fixed point",
    "split_rows": "One phase of few long rows: a task has a strip of a row",
    "strip_totals": "Few long rows that are scanned: what each strip of a row is combined to",
    "split_scans": "Few long rows that are scanned: a task has a strip of a row, and begins with those before it",
    "fold": "The chunks' partial results, added up",
    "tree": "Segments of many chunks: carry rows added up in groups of GRADC_TREE",
    "finish": "Segments of more than one chunk, their carry rows added up; rows that nobody hits",
    "settle": "Sums in their own type become elements of the result",
    "settle_interleaved": "Sums in their own type become elements of the result, which lie in another order",
}
"""What each template's function does, for the comment above it; a mapping says what that of its rows does."""


@dataclass(frozen=True)
class Function:
    """A function of a kernel.

    :param stage: its place among the launches.
    :param text: its CUDA.
    """

    stage: Stage
    text: str


def cuda_functions(kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """The functions of a kernel, and what a launch must know of them."""
    return KernelWriter(kernel, types).made()


class KernelWriter:
    """Writes the functions of a kernel.

    :ivar k: the kernel, in whose order its statements are written; :ivar step: as launches know it: its functions take
        the buffers and dims in their order there.
    :ivar then: the facts of the kernel that its finished rows are handed to; None without one.
    :ivar facts: of the kernel, :ivar mapping: that they lead to.
    :ivar accums: its accums, :ivar writer: and phases, under this mapping.
    :ivar program: the row program, for templates.
    :ivar fixed: results that are added up in fixed point, and :ivar absmax: the search for the largest value of these.
    :ivar sort: of the rows, where they are visited in the order of their keys.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        first, then = parted(kernel, types)
        self.step, self.k, self.types, self.dims = kernel, elements_as_rows(first), types, kernel.dims(types)
        self.facts, self.then = facts_of(self.k, types), facts_of(then, types) if then is not None else None
        self.mapping = mapping_of(self.facts, self.then)
        self.accums, self.arrays = accums_of(self.facts, self.mapping), VectorArrays()
        self.writer = PhaseWriter(self.facts, self.mapping, self.accums, self.arrays)
        self.program = RowProgram(
            accums=tuple(self.accums.values()),
            facts=self.facts,
            mapping=self.mapping,
            phases=self.writer.phases,
            then=self.reader(self.mapping.vec),
        )
        self.fixed = tuple(a for a in self.accums.values() if a.fixed)
        self.absmax = self.largest_values() if self.fixed else None
        self.sort = sorted_rows(self.facts)

    def largest_values(self) -> tuple[PhaseView, ...]:
        """The phases of the search for the largest values, with nothing that is written."""
        return PhaseWriter(self.facts, self.mapping, self.accums, self.arrays, absmax=True).phases

    def made(self) -> CudaKernel:
        """The functions, and what a launch must know of them."""
        k, m = self.k, self.mapping
        functions = [*self.before_rows(), self.rows(), *self.after_rows()]
        partials = tuple(a.scratch_size for a in self.accums.values() if a.in_workspace)
        folded = [self.types[a.buffer] for a in self.program.privatized]
        private: Size = 0
        for count, _ in partials:
            private = private + count
        by_owner = self.facts.order == "by owner"
        return CudaKernel(
            name=k.name,
            mapping=m.name(),
            reason=m.reason,
            text="\n".join([kernel_comment(self.step if self.then else self.k), *(f.text for f in functions)]),
            buffers=self.step.buffers,
            symbols=self.dims,
            dims=self.dims,
            stages=tuple(f.stage for f in functions),
            threads=m.threads,
            rows=k.row_count,
            columns=k.col_count,
            chunked=product(n for _, n in self.facts.rows.kept_axes) if by_owner else k.row_count,
            by_chunk=not by_owner and bool(self.facts.ordered),
            row_sums=m.row is not None and m.sums == "registers" and m.width >= THREADS,
            sharing=m.sharing,
            most_chunks=GPU_FOLDED * m.threads // max((fold_lanes(a.count) for a in folded), default=1),
            tile=m.tile,
            private=private,
            keys=self.sort.keys if self.sort is not None else None,
            masked=self.sort is not None and bool(self.sort.part.stmt.where),
            groups=self.sort.groups if self.sort is not None else 1,
            in_order=self.facts.in_order,
            scratch=partials,
            fixed=tuple(self.types[a.buffer].count for a in self.fixed),
            f32_staged=tuple(self.types[a.buffer].count for a in self.accums.values() if a.f32_staged),
            split_rows=tuple(k.row_count for _ in m.split_reductions(self.writer)),
            checks=any(s.op == "check" for s in k.body),
            shared=m.shared_bytes,
            chunk_keys=m.chunk_keys,
            exp_sums=bool(self.writer.exp_sums),
            index_bounds=self.index_bounds,
            sites=(),
        )

    # -- functions -----------------------------------------------------------------------------------------------------

    def function(
        self,
        suffix: str,
        kind: str,
        template: str,
        tasks: Size | None,
        width: int,
        lanes: int = 0,
        setup: Sequence[Declaration] = (),
        vec: int = 0,
        **given: Any,
    ) -> Function:
        """A function made of the template of its body and of the declarations that this needs.

        :param width: threads of a task.
        :param lanes: of them that share out columns, if not all.
        :param setup: declarations of this function alone.
        :param vec: columns of a thread at once, if not as many as of the rows.
        :param given: records that the template names.
        """
        m = self.mapping
        vec = vec or m.vec
        then = self.reader(vec) if kind in ("rows", "finish") else None
        setup = [*setup, *(WHOLE_ROW if then is not None and kind == "finish" else ())]
        body = render(f"{FOLDER}/{template}.cu.j2", k=self.program, m=m, vec=vec, then=then, **given)
        name = f"{self.k.name}_{suffix}"
        text = render(
            f"{FOLDER}/function.cu.j2",
            name=name,
            purpose=m.purpose if kind == "rows" else PURPOSE["fold" if kind == "fold" else template],
            threads=m.threads,
            min_blocks=max(1, (m.resident if kind == "rows" else 2 * THREADS) // m.threads),
            buffers=self.parameters,
            dims=range(len(self.dims)),
            declarations=used([*self.declarations(lanes or width, vec, kind), *setup], body),
            body=body,
        )
        return Function(Stage(name, kind, tasks, width), indented(text))

    def before_rows(self) -> Iterator[Function]:
        """What is done before rows are visited: results cleared, keys computed, the largest values looked for."""
        for a in reversed([a for a in self.accums.values() if not a.ordered]):
            yield self.of_elements("clear", "clear_fixed" if a.fixed else "clear", a)
        if self.sort is not None:
            count = product(n for _, n in self.sort.axes)
            yield self.function("key", "key", "key", count, 1, **self.sort.key("element"))
        if self.absmax is not None:
            axes, width = row_axes(self.facts, self.absmax), self.mapping.width
            each = 1 if self.k.cols else SCANNED
            given: dict[str, Any] = {"sums": self.fixed, "row_phases": self.absmax, "row_axes": axes, "each": each}
            yield self.function("scan", "scan", "scan", None, width, setup=WHOLE_ROW, **given)

    def rows(self) -> Function:
        """The row program."""
        m = self.mapping
        scales = [
            declared(f"const int scale{a.number} = gradc_fixed_scale(largest{a.number}[0], {a.additions}){a.over};")
            for a in self.fixed
        ]
        setup = [*scales, *m.place_of_task()]
        width, tasks, given = m.stage_width, m.tasks, m.given(self.writer)
        return self.function("rows", "rows", m.template, tasks, width, m.width, setup=setup, **given)

    def after_rows(self) -> Iterator[Function]:
        """What finishes the results: partial results added up, sums stored in their own types."""
        m = self.mapping
        for a in self.program.privatized:
            count = self.types[a.buffer].count
            elements = fold_lanes(count)
            walkers = m.threads // elements
            yield self.function(f"fold{a.number}", "fold", a.strategy.fold, count, walkers, a=a, elements=elements)
        if self.sort is not None:
            width, vec, times = self.threads_of_result()
            each, beside = ceildiv(CLEARED, times), max(32 // width, 1)
            tasks = ceildiv(self.sort.keys, each * beside) * beside
            yield self.function("tree", "tree", "tree", None, width, vec=vec)
            yield self.function("finish", "finish", "finish", tasks, width, vec=vec, each=each, beside=beside)
        for phase in m.split_phases(self.writer):
            yield self.function(tasks=None, width=m.width, **phase)
        for a in self.accums.values():
            if a.fixed or a.f32_staged:
                yield self.of_elements("settle", "settle_interleaved" if a.interleaved else "settle", a)

    def of_elements(self, kind: str, template: str, a: Accum) -> Function:
        """What is done to each element of a result, whatever it was made from."""
        each = {"clear_fixed": 2, "settle_interleaved": a.interleaved}.get(template, EACH)  # 2 sums: 16 bytes
        times = EACH * TIMES // each
        count = ceildiv(maximum(self.types[a.buffer].count, 1), each * times)
        return self.function(f"{kind}{a.number}", kind, template, count, 1, a=a, each=each, times=times)

    def reader(self, vec: int) -> Reader | None:
        """What is done to finished rows, of which a thread has ``vec`` columns at once."""
        return finished_row(self.then, self.step.handed_on, self.mapping.width, vec) if self.then is not None else None

    @property
    def index_bounds(self) -> tuple[Size, ...]:
        """Of what its functions compute for offsets."""
        kernels = [self.k, *([self.then.kernel] if self.then is not None else [])]
        return tuple(dict.fromkeys(bound for kernel in kernels for bound in index_bounds(kernel, self.types)))

    def threads_of_result(self) -> tuple[int, int, int]:
        """(threads, columns of each at once, how often) for a row of the results that segments are combined into: no
        more than its elements, and few that are idle the last time.  Of columns at least what 16 bytes of the results
        hold, however few the rows' own loads are moved by: most of what is done is to store rows that nobody hits.
        Whole rows that are handed on have the threads of a task, whose columns meet in the same order.
        """
        if self.then is not None and not self.then.separate_columns:
            return self.mapping.width, self.mapping.vec, 1
        counts = [self.facts.result_row(self.facts.rows.parts[a.buffer].stmt) for a in self.program.segmented]
        known = [count for count in counts if isinstance(count, int)]
        if len(known) < len(counts):
            return self.mapping.width, self.mapping.vec, 1
        longest, word = max([1, *known]), min(ACCESS_BYTES // a.word(1) for a in self.program.segmented)
        while any(count % word for count in known):
            word //= 2
        vec = max(self.mapping.vec, word)
        while vec > longest:
            vec //= 2
        width = full_width(-(-longest // vec), self.mapping.width)
        return width, vec, -(-longest // (width * vec))

    # -- declarations --------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The kernel's buffers as parameters of its functions."""
        aliased = {b for facts in (self.facts, self.then) if facts for b in self.step.buffers if facts.may_alias(b)}
        return tuple(
            f"{'' if b in self.step.writes else 'const '}{stored(self.types[b].dtype)}"
            f" *{'' if b in aliased else '__restrict__ '}const {b}"
            for b in self.step.buffers
        )

    def declarations(self, width: int, vec: int, kind: str) -> list[Declaration]:
        """All that a function of this kind may need before its body, in order."""
        m, facts, sort = self.mapping, self.facts, self.sort
        kept = product(n for _, n in facts.rows.kept_axes) if facts.order == "by owner" else None
        arrays = workspace(self.accums.values(), sort.groups if sort is not None else None, facts.in_order)
        conditions = "".join(f" && {c}" for c in self.vector_conditions(vec, kind))
        even = "true" if m.ragged or even_columns(facts, vec) else "cols % VEC == 0"
        exchanged = max((sum(map(len, batch)) for batch in facts.vector_groups), default=0)
        keys = sort.keys if sort is not None else None
        return [
            Declaration("WIDTH", f"enum {{ WIDTH = {width} }}; /* threads of a task */"),
            Declaration("SHARING", f"enum {{ SHARING = {m.sharing} }}; /* tasks of a block that share a chunk */"),
            Declaration("VEC", f"enum {{ VEC = {vec} }}; /* neighbouring columns of a thread */"),
            *size_declarations(self.dims, self.k.row_count, self.k.col_count, kept, keys),
            *arrays,
            declared("const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;"),
            *m.place_of_thread(),
            declared(f"const bool even_cols = {even};"),
            declared("const ix col_step = even_cols ? 1 : WIDTH;"),
            declared("const ix lane_col = even_cols ? lane * VEC : lane;"),
            declared(f"const bool vectorized = even_cols{conditions};"),
            Declaration("EXCHANGED", f"enum {{ EXCHANGED = {exchanged} }}; /* values of a lane at once */"),
            Declaration("exchanged", f"__shared__ u64 exchanged[{m.threads // 32} * GRADC_EXCHANGED * EXCHANGED];"),
            Declaration("shared", f"__shared__ __align__(16) char shared[{m.shared_slots} * 16];"),
        ]

    def vector_conditions(self, vec: int, kind: str) -> list[str]:
        """What a launch must find to move a thread's columns at once."""
        then = self.reader(vec)
        stored = [a.flushed for a in self.accums.values()] if then is None else then.arrays.moved.values()
        rows = [row for row in stored if row is not None and row.fits(vec)]
        rows = [*(self.arrays.moved.values() if kind != "finish" else ()), *rows] if vec > 1 else []
        return list(dict.fromkeys(c for a in rows for c in a.conditions(vec)))
