"""Matrix products: calls of the runtime's library, and how a call sees its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import Unsupported
from ...ir.dims import Size, product, symbol
from ...ir.kernel import Call, Program
from ...ir.node import REGISTRY
from ...ir.statement import Operand
from ...ir.types import BF16, DTYPES, F32, F64, I32, DType
from ..expr import converted, loaded, stored
from ..index import flatten

_NUMBERS = {F32: "32", F64: "64", I32: "GRADC_I32"}
"""Dtypes of products -> the runtime's numbers."""
_OWN_KERNELS = {
    (BF16, F32): "GRADC_BF16",
    (DTYPES["i8"], I32): "GRADC_I8",
    (DTYPES["u8"], I32): "GRADC_U8",
}
"""(dtype of an operand, of the product) -> the runtime's name of operands that it has kernels for."""


@dataclass(frozen=True)
class OperandView:
    """A buffer as a product sees it, in C; an operand that is not there has steps of 0 from address 0.

    :param at: the address of its first element.
    :param first: the position of that element in the buffer.
    :param count: elements of the buffer.
    :param steps: elements from one position of an axis to the next, by axis.
    :param groups: positions of an axis that share an element, by axis.
    :param item_bytes: of an element.
    :param reader: the function that reads its elements as the product's, or "0".
    :param dtype: the runtime's name of their dtype where it has kernels for it, else "0".
    """

    at: str
    first: str
    count: str
    steps: Mapping[str, str]
    groups: Mapping[str, str]
    item_bytes: int
    reader: str
    dtype: str = "0"

    def step(self, axis: str) -> str:
        return self.steps.get(axis, "0")

    def group(self, axis: str) -> str:
        return self.groups.get(axis, "1")


ABSENT = OperandView("0", "0", "0", {}, {}, 0, "0")


@dataclass(frozen=True)
class Extent:
    """What a product touches of a buffer, for the check that it stays inside; groups count as one.

    :param first: the position of the first element.
    :param count: elements of the buffer.
    :param sizes: the extent along each axis, :param steps: and the elements from one position to the next.
    """

    first: str
    count: str
    sizes: tuple[str, ...]
    steps: tuple[str, ...]


BatchAxis: TypeAlias = tuple[str, tuple[str, ...]]
"""The extent of an axis that all operands have, as C, and the steps of both and of their scales."""


@dataclass(frozen=True)
class ProductCall:
    """A call of the matrix product.

    :param dtype: the runtime's number of the result's dtype.
    :param batch: the axes that all operands have.
    :param m, n, k: the axes of the result and the one that is summed over, as C.
    :param matrices: the initialisers of both operands.
    :param places: those of their places, "" where both their axes are evenly spaced.
    :param out: the address of the result, :param out_row: and the elements from one of its rows to the next, as C.
    :param add: whether it is added to what is there.
    :param extents: what is to be checked with GRADC_BOUNDS.
    """

    dtype: str
    batch: tuple[BatchAxis, ...]
    m: str
    n: str
    k: str
    matrices: tuple[str, str]
    places: tuple[str, str]
    out: str
    out_row: str
    add: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Reader:
    """A function that reads elements of a narrower type.

    :param name: of the function.
    :param source: the C type of the elements, :param target: and that of the product.
    :param contiguous: the value of element ``i``, :param strided: and of element ``i * from_step``.
    """

    name: str
    source: str
    target: str
    contiguous: str
    strided: str


def product_call(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> ProductCall:
    """A call as the template of the entry writes it.

    :param place: the number of each buffer's memory in the program's table.
    :param over_dims: a size as C.
    :param checked: whether what it touches is looked at first.
    """
    sizes = dict(call.axes)
    *batch, m, k = call.views[0]
    n = call.result_axes[-1]
    dtype = program.buffer[call.out.buffer].type.dtype
    if dtype not in _NUMBERS:
        raise Unsupported(f"a matrix product in {dtype} on the cpu")
    if call.epilogue:
        what = "another epilogue" if call.epilogue.beyond_bias else "a bias"
        raise Unsupported(f"a matrix product with {what} on the cpu")
    stored = [v for i in call.out.index for v, _ in i.terms]
    if stored != call.result_axes:
        raise Unsupported("a matrix product on the cpu whose rows are not neighbours")

    def view(operand: Operand | None) -> OperandView:
        return operand_view(operand, program, place, over_dims, dtype) if operand else ABSENT

    left, right = call.args
    out = view(call.out)
    a, b, a_scale, b_scale = (view(o) for o in (left, right, left.scale, right.scale))
    touched = [(out, [*batch, m, n])] if checked else []
    if checked:  # where an axis has no positions, nothing of an operand is read
        touched = [*((o, list(sizes)) for o in (a, a_scale, b, b_scale) if o is not ABSENT), *touched]
    places = (_places(a, call, over_dims, m, k), _places(b, call, over_dims, k, n))
    return ProductCall(
        dtype=_NUMBERS[dtype],
        batch=tuple((over_dims(sizes[x]), tuple(o.step(x) for o in (a, b, a_scale, b_scale))) for x in batch),
        m=over_dims(sizes[m]),
        n=over_dims(sizes[n]),
        k=over_dims(sizes[k]),
        matrices=(matrix(a, a_scale, m, k, places[0]), matrix(b, b_scale, k, n, places[1])),
        places=places,
        out=f"(char *)buf[{place[call.out.buffer]}]"
        + (f" + ({out.first}) * {dtype.itemsize}" if out.first != "0" else ""),
        out_row=next((out.steps[axis] for axis in (m, *reversed(batch)) if axis in out.steps), over_dims(sizes[n])),
        add=_adds(call, program, over_dims) if call.add else "0",
        extents=tuple(
            extent(o, {a: over_dims(size) for a, size in _along(o, call, axes).items()}) for o, axes in touched
        ),
    )


def _along(operand: OperandView, call: Call, axes: Iterable[str]) -> dict[str, Size]:
    """The axes that an operand goes along, or their parts, and their sizes."""
    finest, sizes = call.finest, dict(call.axes)
    return {
        part: size
        for axis in axes
        for part, size in (((axis, sizes[axis]),) if axis in operand.steps else finest[axis])
    }


def _places(operand: OperandView, call: Call, over_dims: Callable[[Size], str], row: str, col: str) -> str:
    """The initialiser of a ``gradc_places``; "" for an operand both of whose axes are evenly spaced."""
    sides = [_along(operand, call, [axis]) for axis in (row, col)]
    if not any(len(own) > 1 and operand.steps.keys() & own.keys() for own in sides):
        return ""
    axes = (
        f"{{{len(own)}, {{{', '.join(map(over_dims, own.values()))}}}, {{{', '.join(map(operand.step, own))}}}}}"
        for own in sides
    )
    return f"{', '.join(axes)}, {operand.at} + ({operand.count} - ({operand.first})) * {operand.item_bytes}"


def _adds(call: Call, program: Program, over_dims: Callable[[Size], str]) -> str:
    """Whether a block of a loop is not the first one: that has the last rows."""
    loop = next(loop for loop in program.loops if call in loop.steps)
    return f"{over_dims(symbol(loop.rows[0]) + symbol(loop.count))} < {over_dims(loop.rows[1])}"


def operand_view(
    operand: Operand, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], dtype: DType
) -> OperandView:
    """An operand of a call that takes elements of ``dtype``."""
    type_ = program.buffer[operand.buffer].type
    flat = flatten(operand.index, type_.shape)
    first = over_dims(flat.const)
    return OperandView(
        at=f"(const char *)buf[{place[operand.buffer]}] + ({first}) * {type_.dtype.itemsize}",
        first=first,
        count=over_dims(product(type_.shape)),
        steps={axis: over_dims(step) for axis, step in flat.terms},
        groups={axis: over_dims(size) for axis, size in operand.per},
        item_bytes=type_.dtype.itemsize,
        reader="0" if type_.dtype is dtype or dtype is I32 else _reader_name(type_.dtype, dtype),
        dtype=_OWN_KERNELS.get((type_.dtype, dtype), "0"),
    )


def extent(operand: OperandView, sizes: Mapping[str, str]) -> Extent:
    """What a call touches of an operand.  :param sizes: of the axes it goes along, as C."""
    extents = (f"gradc_chunks({n}, {operand.group(a)})" for a, n in sizes.items())
    return Extent(operand.first, operand.count, tuple(extents), tuple(operand.step(a) for a in sizes))


def matrix(operand: OperandView, scale: OperandView, row: str, col: str, places: str = "", batch: str = "") -> str:
    """The initialiser of a ``gradc_matrix``, but for its places.

    :param batch: the axis of several matrices; "" where their steps are the call's.
    """
    steps = "0, 0" if places else f"{operand.step(row)}, {operand.step(col)}"
    own = f"{operand.at}, {operand.step(batch)}, {steps}, {operand.item_bytes}, {operand.reader}"
    scales = (
        f"{scale.at}, {scale.step(batch)}, {scale.step(row)}, {scale.step(col)}, {scale.group(row)}, {scale.group(col)}"
    )
    return f"{own}, {scales}, {operand.dtype}"


def _reader_name(source: DType, target: DType) -> str:
    return f"read_{source}_{target}"


def readers(program: Program, calls: list[Call]) -> list[Reader]:
    """The functions that a program's products read narrower operands with."""
    dtypes = {name: type_.dtype for name, type_ in program.types.items()}
    pairs = {
        (dtypes[call.args[i].buffer], dtypes[call.out.buffer]): None
        for call in calls
        for i in REGISTRY[call.op].converts
    }
    return [
        Reader(
            _reader_name(source, target),
            stored(source),
            target.name,
            *(converted(f"({loaded(source, f'from[{at}]')})", source, target) for at in ("i", "i * from_step")),
        )
        for source, target in pairs
        if source is not target
    ]
