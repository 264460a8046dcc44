"""Matrix products as calls of cuBLAS: which it takes, and in which parts it is given them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ...ir.epilogue import PLAIN
from ...ir.types import F16
from ...ir.types import dtype as dtype_of
from ...targets.devices import Gpu
from ...targets.gpu import HOST_CALL, MATRIX_ALIGN
from .actions import BatchAxis, Library, Part, Product, Side, Strided
from .library_time import is_aligned, library_seconds

LIBRARY = {*((name, name) for name in ("f16", "bf16", "f32", "f64")), ("f16", "f32"), ("bf16", "f32")}
"""What cuBLAS multiplies, to our rules of rounding."""
LIBRARY_BIAS = {(name, name) for name in ("f16", "bf16", "f32")}
"""What cuBLASLt adds a bias to, one matrix at a time."""
LIBRARY_EPILOGUE = {(name, name) for name in ("f16", "bf16")}
"""What it does more to; f32 is left to kernels of ours, because how exactly its functions are computed is not
documented.
"""
_MOST = 2**31 - 1


def library_of(product: Product) -> Library | None:
    """The calls of cuBLAS, or None: it does not take such strides or sizes."""
    *_, m, n = product.out.shape
    k = product.a.shape[-1]
    kinds = dtype_of(product.a.part.dtype).name, dtype_of(product.out.part.dtype).name
    if kinds not in LIBRARY:
        return None
    wanted = LIBRARY_EPILOGUE if product.epilogue.beyond_bias else LIBRARY_BIAS
    if product.epilogue and (kinds not in wanted or k == 0 or len(product.out.shape) > 2):
        return None
    axes = merged(product)
    longest = max(axes, key=lambda axis: axis[0], default=(1, (0, 0, 0)))
    outer = tuple(axis for axis in axes if axis is not longest)
    batch, (step_a, step_b, step_out) = longest
    a, b = side_of(product.a, step_a), side_of(product.b, step_b)
    out = Side(False, product.out.strides[-2] if m > 1 else max(n, 1), step_out)
    if a is None or b is None or (k == 0 and product.out.part.count != prod(product.out.shape)):
        return None
    if max(m, n, k, prod(count for count, _ in axes), a.leading, b.leading, out.leading) > _MOST:
        return None
    library = Library(product, m, n, k, batch, a, b, out, outer)
    return library if not product.epilogue.beyond_bias or takes_epilogue(library) else None


def takes_epilogue(library: Library) -> bool:
    """Whether an epilogue beyond a bias has the sides and the alignment that cuBLASLt wants of it.

    The leading dimension of gelu's argument is a multiple of 8 (cublasLt.h, EPILOGUE_AUX_LD).  The operand that is
    summed has its rows, as cuBLAS sees it, along the result's: BGRADA is refused of a transposed A, BGRADB of a B that
    is not.
    """
    sides = {"first": library.a.transposed, "second": not library.b.transposed}
    own = library.n % 8 == 0 and library.out.leading == library.n
    return own and is_aligned(library) and sides.get(library.product.epilogue.summed, True)


def side_of(operand: Strided, step: int) -> Side | None:
    """An operand as the library sees it; None without a unit stride."""
    rows, columns = operand.shape[-2:]
    down, across = operand.strides[-2:]
    if 0 in (rows, columns):
        return Side(False, max(columns, 1), step)
    if columns == 1 or across == 1:
        leading = down if rows > 1 else max(columns, 1)
        return Side(False, leading, step) if leading >= max(columns, 1) else None
    if rows == 1 or down == 1:
        leading = across if columns > 1 else max(rows, 1)
        return Side(True, leading, step) if leading >= max(rows, 1) else None
    return None


def merged(product: Product) -> list[BatchAxis]:
    """The axes of the batch, neighbours that step alike as one."""
    axes: list[BatchAxis] = []
    for axis in range(len(product.out.shape) - 2):
        count = product.out.shape[axis]
        strides = (product.a.strides[axis], product.b.strides[axis], product.out.strides[axis])
        if count == 1:
            continue
        if axes and all(before == count * step for before, step in zip(axes[-1][1], strides, strict=True)):
            axes[-1] = (axes[-1][0] * count, strides)
        else:
            axes.append((count, strides))
    return axes


# -- rows that end between multiples of 16 bytes -----------------------------------------------------------------------


def with_aligned_ends(library: Library, gpu: Gpu) -> list[Library]:
    """out[m, 50257] = a b  ->  out[m, 50256:] = a b[:, 50256:];  out[m, :50256] = a b[:, :50256]

    And the summed axis likewise, whose last elements are summed first, and the others added to them, so that a 16-bit
    result is rounded twice: once as the sum of at most seven terms.  Only where this is predicted to be faster by more
    than the further calls take the host; there is no other way where rows do not begin at multiples of 16 bytes, or
    where it is a caller's array that has the odd size.  A sum in f16 stays one: a part of it may be out of range where
    the sum is not.
    """
    if is_aligned(library) or library.product.epilogue.beyond_bias:
        return [library]
    libraries: list[Library] = []
    for part in _parts(library):
        each = library_of(part)
        if each is None:
            return [library]
        libraries.append(each)
    before = library_seconds(library, gpu)
    after = sum(library_seconds(each, gpu) + HOST_CALL * len(each.calls) for each in libraries)
    faster = after < before + HOST_CALL * len(library.calls)
    return libraries if faster and is_aligned(libraries[-1]) else [library]


def _parts(library: Library) -> Iterator[Product]:
    """The products of the last columns and of the last summed elements, and at last that of all before them."""
    product, unit = library.product, MATRIX_ALIGN // library.read.itemsize
    columns, summed = library.n // unit * unit, library.k // unit * unit
    if 0 < columns < library.n:
        yield _columns(product, columns, library.n)
        product = _columns(product, 0, columns)
    if 0 < summed < library.k and dtype_of(product.out.part.dtype) is not F16:
        yield replace(_summed(product, summed, library.k), epilogue=PLAIN)
        product = replace(_summed(product, 0, summed), add=True)
    yield product


def _columns(p: Product, start: int, end: int) -> Product:
    def part(vector: Part) -> Part:
        return replace(vector, start=vector.start + start * vector.dtype.itemsize, count=end - start)

    b, out = p.b.between(-1, start, end), p.out.between(-1, start, end).trimmed
    return replace(p, b=b, out=out, epilogue=p.epilogue.map(part))


def _summed(p: Product, start: int, end: int) -> Product:
    return replace(p, a=p.a.between(-1, start, end), b=p.b.between(-2, start, end))
