"""How far a kernel counts: bounds of what its text computes in the type of its offsets, which is 32 or 64 bits wide.

A kernel's text is written once, over ``ix``; it is compiled for 32 bits, and for 64 where a call needs it.  What is
bounded here is every size, every element of a buffer and every affine index, each with all its intermediate results: a
polynomial is at most the same one with its coefficients' absolute values.  A value from memory that serves as an index
has 64 bits until it was checked: it lies in the axis that it indexes, which bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...ir.dims import FloorDiv, Max, Size, product, symbol
from ...ir.kernel import Kernel
from ...ir.statement import Index
from ...ir.types import Type
from ..index import flatten, strides

LIMIT = 2**31
"""The first integer that 32 bits do not hold."""
HEAD_ROOM = 1 << 16
"""What a loop adds to the last of its positions before it looks: threads of a block times their columns, strips and
chunks of a tree.
"""


def index_bounds(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Size, ...]:
    """Sizes over the kernel's dims; below LIMIT - HEAD_ROOM all of them, 32 bits hold whatever its text computes for an
    offset.
    """
    sizes = dict.fromkeys(_sizes(kernel, types))
    numbers = [size for size in sizes if isinstance(size, int)]
    return (max(numbers, default=0), *(size for size in sizes if not isinstance(size, int)))


def _sizes(kernel: Kernel, types: Mapping[str, Type]) -> Iterator[Size]:
    extents = {name: magnitude(size) for name, size in (*kernel.rows, *kernel.cols)}
    rows, columns = magnitude(kernel.row_count), magnitude(kernel.col_count)
    yield from (rows, columns)
    yield from (symbol(name) for name in kernel.dims(types))
    for buffer in kernel.buffers:
        yield magnitude(types[buffer].count)
        yield from map(magnitude, strides(types[buffer].shape))
    for s in kernel.body:
        if s.op == "check":
            yield rows * columns
        if s.buffer and s.index:
            yield placed(s.index, types[s.buffer].shape, extents)
        elif s.index:
            yield from (_of_axes(entry, extents) for entry in s.index)


def magnitude(size: Size) -> Size:
    """At least the absolute value of each part of a size, for symbols of 1 and more."""
    if isinstance(size, int):
        return abs(size)
    total: Size = 0
    for monomial, coefficient in size.terms:
        total = total + abs(coefficient) * product(_atom(atom) for atom, power in monomial for _ in range(power))
    return total


def _atom(atom: str | FloorDiv | Max) -> Size:
    if isinstance(atom, str):
        return symbol(atom)
    if isinstance(atom, FloorDiv):
        return magnitude(atom.numerator) + magnitude(atom.denominator)
    return magnitude(atom.left) + magnitude(atom.right)


def _of_axes(entry: Index, extents: Mapping[str, Size]) -> Size:
    """Of an entry without its values from memory, which are added to it in 64 bits."""
    terms: Iterable[Size] = (magnitude(c) * (extents[v] - 1) for v, c in entry.terms if not v.startswith("%"))
    return sum(terms, magnitude(entry.const))


def placed(place: Sequence[Index], shape: Sequence[Size], extents: Mapping[str, Size]) -> Size:
    """Of an element's place, and of what it is added up from; the element is there, or nobody computes its place.

    LIMIT where nothing bounds it: two values from memory in one entry.
    """
    whole = flatten(place, shape)
    total = magnitude(whole.const)
    for entry, extent, step in zip(place, shape, strides(shape), strict=True):
        axes = _of_axes(entry, extents)
        values = sum(v.startswith("%") for v, _ in entry.terms)
        if values > 1:
            return LIMIT
        total = total + (axes + values * (magnitude(extent) - 1 + axes)) * magnitude(step)
    return total
