"""Argsorts of rows in C: a radix sort of keys with their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...ir.dims import Size, product
from ...ir.kernel import Call, Program
from ..jinja import render
from .products import BatchAxis, Extent, extent, operand_view


@dataclass(frozen=True)
class SortCall:
    """A call of ``gradc_argsort_KEY``; all in C.

    :param key: the C type of the keys, :param keys: and the address of the first.
    :param batch: the axes that number the rows.
    :param rows: how many there are.
    :param n: keys of a row, :param step: and elements from one to the next.
    :param count: positions of each row that are asked for.
    :param out: the number of the result's memory in the program's table.
    :param extents: what is to be checked with GRADC_BOUNDS.
    :param segments: whether the segments of equal keys are asked for, too.
    """

    key: str
    keys: str
    batch: tuple[BatchAxis, ...]
    rows: str
    n: str
    step: str
    count: str
    out: int
    extents: tuple[Extent, ...]
    segments: bool

    def bytes(self, which: str) -> str:
        """The C expression of the bytes that it needs, ``workspace`` or ``local``."""
        if self.segments:
            return f"gradc_argsort_{self.key}_long_workspace({self.n})" if which == "workspace" else ""
        return f"gradc_argsort_{self.key}_{which}({self.rows}, {self.n}, {self.count})"


def sort_call(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> SortCall:
    """A call as the template of the entry writes it; parameters as of :func:`.products.product_call`."""
    sizes = {axis: over_dims(size) for axis, size in call.axes}
    (operand,), (*batch, along) = call.args, call.views[0]
    key = program.buffer[operand.buffer].type.dtype
    view = operand_view(operand, program, place, over_dims, key)
    return SortCall(
        key=key.name,
        keys=view.at,
        batch=tuple((sizes[a], (view.step(a),)) for a in batch),
        rows=over_dims(product(size for axis, size in call.axes if axis in batch)),
        n=sizes[along],
        step=view.step(along),
        count=sizes[call.result_axes[-1]],
        out=place[call.out.buffer],
        extents=(extent(view, {a: sizes[a] for a in call.views[0]}),) if checked else (),
        segments=call.op == "sort_segments",
    )


def sort_functions(program: Program, calls: Sequence[Call]) -> list[str]:
    """The sorts that a program calls: one for each dtype of keys."""
    dtypes = {call.args[0].buffer: program.buffer[call.args[0].buffer].type.dtype for call in calls}
    return [
        render("cpu/argsort.h", key=dtype.name, bits=dtype.bits, item="u64" if dtype.bits == 32 else "u128")
        for dtype in dict.fromkeys(dtypes.values())
    ]
