"""Products of rows by groups, in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import Unsupported
from ...ir.dims import Size
from ...ir.kernel import Call, Program
from ...ir.types import F32, F64
from ..expr import stored
from ..jinja import render
from .products import ABSENT, Extent, extent, matrix, operand_view


@dataclass(frozen=True)
class GroupedCall:
    """A call of ``gradc_OP_INDEX``; sizes as C.

    :param op: the library function.
    :param index: the C type of the offsets, :param offsets: the address of the first, :param step: elements from one to
        the next, :param groups: and how many groups they bound.
    :param width: bits of an element of the result.
    :param rows: of all groups.
    :param columns: of both factors but their rows, or what they are multiplied along.
    :param matrices: the initialisers of both factors.
    :param out: the number of the result's memory in the program's table.
    :param extents: what is to be checked with GRADC_BOUNDS.
    """

    op: str
    index: str
    offsets: str
    step: str
    groups: str
    width: int
    rows: str
    columns: tuple[str, str]
    matrices: tuple[str, str]
    out: int
    extents: tuple[Extent, ...]


def grouped_call(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> GroupedCall:
    """A call as the template of the entry writes it; parameters as of :func:`.products.product_call`."""
    sizes = {axis: over_dims(size) for axis, size in call.axes}
    dtype, index = (program.buffer[name].type.dtype for name in (call.out.buffer, call.args[2].buffer))
    if dtype not in (F32, F64):
        raise Unsupported(f"a product of groups in {dtype} on the cpu")
    left, right, offsets = (
        operand_view(o, program, place, over_dims, d) for o, d in zip(call.args, (dtype, dtype, index), strict=True)
    )
    scale = call.args[1].scale
    scales = operand_view(scale, program, place, over_dims, dtype) if scale else ABSENT
    (rows, first), (*batch, inner, second), (bound,) = call.views
    touched = [(left, call.views[0]), (right, call.views[1]), (offsets, call.views[2])]
    touched += [(scales, call.views[1])] if scale else []
    return GroupedCall(
        op=call.op,
        index=stored(index),
        offsets=offsets.at,
        step=offsets.step(bound),
        groups=f"({sizes[bound]} - 1)",
        width=dtype.bits,
        rows=sizes[rows],
        columns=(sizes[first], sizes[second]),
        matrices=(
            matrix(left, ABSENT, rows, first),
            matrix(right, scales, inner, second, batch=batch[0] if batch else ""),
        ),
        out=place[call.out.buffer],
        extents=tuple(extent(view, {a: sizes[a] for a in axes}) for view, axes in touched) if checked else (),
    )


def grouped_functions(op: str) -> Callable[[Program, Sequence[Call]], list[str]]:
    """The function of an op, for each dtype of the offsets of a program's calls."""

    def written(program: Program, calls: Sequence[Call]) -> list[str]:
        dtypes = {stored(program.buffer[call.args[2].buffer].type.dtype): None for call in calls}
        return [render(f"cpu/{op}.h", index=name) for name in dtypes]

    return written
