"""What the templates of ``templates/cuda/kernel`` are given of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.types import DType
from ...passes.reductions.strategies import Strategy
from ..expr import to_memory


@dataclass(frozen=True)
class Value:
    """A variable of a generated function.

    :param name: of the variable.
    :param ctype: its C type.
    """

    name: str
    ctype: str


@dataclass(frozen=True)
class OwnedElements:
    """The elements of an owned result that belong to one kept row.

    :param axes: declare their axes, from the number ``e`` of an element.
    :param size: how many there are.
    :param element: the element's place in the result.
    :param partial: its place among wider sums.
    """

    axes: tuple[str, ...]
    size: str
    element: str
    partial: str


@dataclass(frozen=True)
class AccumView:
    """An accum: a result that rows are combined into.

    :param number: of the accum in the kernel.
    :param buffer: the result.
    :param dtype: of its elements.
    :param ctype: their C type in memory.
    :param combine: ``sum``, ``prod``, ``max`` or ``min``.
    :param strategy: how rows meet.
    :param ordered: whether they are combined in a fixed order.
    :param neutral: what a combine of nothing gives, as C.
    :param sum: C type of a combined value in memory.
    :param accumulator: C type that many values are combined in.
    :param partial: C type of partial results in the workspace.
    :param register: C type of partial results in registers.
    :param size: elements of the result; ``outer`` times ``inner``, those of a row.
    :param in_workspace: whether chunks have partial results in the workspace.
    :param wide_accumulator: whether an owned result is added up in wider elements beside it.
    :param f32_staged: whether a 16-bit result is added up in f32 in the workspace and rounded at the end.
    :param additions: values that one element may be the sum of, at most.
    :param target: where sums are finished: the result, or its f32 staging.
    :param target_bytes: of an element there.
    :param over: behind a scale, how far values may be above the largest that was looked for, as C.
    :param interleaved: places on an axis of the result whose sums are innermost, if not 0; ``plane``: elements of the
        axes behind it.
    :param kept_row: address of a kept row in the result, where it is owned.
    :param owned: its elements, likewise.
    :param shared_sums: of a thread's sums, the first, that are in shared memory.
    :param shared_before: those of the accums before it.
    """

    number: int
    buffer: str
    dtype: DType
    ctype: str
    combine: str
    strategy: Strategy
    ordered: bool
    neutral: str
    sum: str
    accumulator: str
    partial: str
    register: str
    size: str
    outer: str
    inner: str
    in_workspace: bool
    wide_accumulator: bool
    f32_staged: bool
    additions: str
    target: str
    target_bytes: int
    over: str = ""
    interleaved: int = 0
    plane: str = ""
    kept_row: str = ""
    owned: OwnedElements | None = None
    shared_sums: int = 0
    shared_before: int = 0

    @property
    def running(self) -> str:
        """The registers, or the row in memory, that values are being combined in."""
        return f"a{self.number}"

    def empty(self, target: str, ctype: str) -> str:
        """A statement: ``target``, of this type, becomes the neutral element."""
        return f"gradc_clear({target});" if ctype == "sum_f32" else f"{target} = {self.neutral};"

    def join(self, target: str, value: str) -> str:
        """A statement: ``target`` is combined with a value."""
        if self.combine in ("sum", "prod"):
            return f"{'gradc_add' if self.combine == 'sum' else 'gradc_times'}({target}, {value});"
        return f"{target} = {self.combine}imum_{self.sum}({target}, {value});"

    def result(self, total: str, ctype: str) -> str:
        """An expression: the value of a combined element of this type."""
        return f"gradc_value({total})" if ctype == "sum_f32" else total

    def final(self, total: str, ctype: str) -> str:
        """An expression: the same, as it is stored in the result."""
        return to_memory(self.dtype, self.result(total, ctype))

    @property
    def settled(self) -> str:
        """Element ``at + j`` of the result, of its sum in fixed point or in f32."""
        flags = f"any_odd ? gradc_odd_flags(odd{self.number}, at + j) : 0u"
        return self.final(f"gradc_fixed_value(sums[j], {flags}, scale)" if self.fixed else "sums[j]", self.sum)

    @property
    def fixed(self) -> bool:
        """Whether it is added up in fixed point."""
        return self.strategy.atomics == "fixed point"

    @property
    def kept_text(self) -> str:
        """What names the axes of a kept row."""
        owned = (*self.owned.axes, self.owned.element, self.owned.partial) if self.owned is not None else ()
        return "\n".join((self.kept_row, *owned))

    @property
    def segment_row(self) -> str:
        """Address of the row of the result that a segment adds up to."""
        return f"{self.buffer} + segment * ({self.inner})"

    def word(self, vec: int) -> int:
        """Bytes that ``vec`` neighbouring elements of the target are moved in."""
        return min(vec * self.target_bytes, 16)
