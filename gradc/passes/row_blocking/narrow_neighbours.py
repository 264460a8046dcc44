"""Which matrices of products are decoded from fewer bytes than they have, or summed to fewer elements at once: weights
in codes with zero points or code books, and the gradients of their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeGuard

from ...ir.dims import Size, evaluate, nominal, product, same
from ...ir.kernel import Buffer, Call, Kernel, Program, Step
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS, Index
from .wide_products import MIN_BYTES, Sizes

BLOCK_ROWS = 480
"""Rows of a block of such a matrix: so many that what they are multiplied with is packed rarely.  Measured for
f32[4096,4096] on an AMD EPYC family 25 model 1: with 1 to 512 rows of the other operand 480 take at most 3 % longer
than all at once, 48 up to 13 % longer.
"""
DECODED_BYTES = 0.75
"""Bytes that are read for a decoded matrix, for each that it has."""
SUMMED_ELEMENTS = 0.25
"""Elements that a product is summed to, for each that it has."""


def narrow_neighbours(program: Program, dims: Sizes) -> Iterator[str]:
    """The large temps [rows, columns] that a kernel decodes, element by element, and products alone read; and those
    that are products, and of which kernels store few elements.
    """
    for buffer in program.of_kind("temp"):
        if buffer.alias or len(program.sharing[buffer.name]) > 1:
            continue
        touching = _touching(program, buffer.name)
        makers = [step for step in touching if buffer.name in step.writes]
        if len(makers) != 1 or not _is_large(buffer, dims):
            continue
        readers = [step for step in touching if step is not makers[0]]
        names = {name for step in touching for name in (*step.reads, *step.writes)}
        sizes = nominal([n for name in names for n in program.types[name].shape], dims)
        own = evaluate(buffer.type.nbytes, sizes)
        if _decodes(makers[0]) and all(map(_is_product, readers)):
            if _bytes(program, makers[0].reads, sizes) <= DECODED_BYTES * own:
                yield buffer.name
        elif _is_product(makers[0]) and readers and all(isinstance(step, Kernel) for step in readers):
            stored = {name for step in readers for name in step.writes}
            if _bytes(program, stored, sizes) <= SUMMED_ELEMENTS * own:
                yield buffer.name


def _is_large(buffer: Buffer, dims: Sizes) -> bool:
    """Whether a buffer is a matrix of which a block is a part."""
    sizes = nominal(buffer.type.shape, dims)
    large = buffer.type.rank == 2 and evaluate(buffer.type.nbytes, sizes) >= MIN_BYTES
    return large and evaluate(buffer.type.shape[0], sizes) > BLOCK_ROWS


def _bytes(program: Program, names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(evaluate(program.types[name].nbytes, sizes) for name in names)


def with_matrices(program: Program, dims: Sizes) -> Program:
    """A program whose kernels store what they decode by groups, [rows, groups, columns of a group], as the matrix
    [rows, columns] that products read, where these are large.
    """
    for buffer in program.of_kind("temp"):
        names = program.sharing.get(buffer.name, ())
        if buffer.alias or len(names) != 2 or not any(map(_is_product, _touching(program, names[1]))):
            continue
        matrix, stores = program.buffer[names[1]], _touching(program, buffer.name)
        if not _is_large(matrix, dims) or len(stores) != 1 or not _decodes(stores[0]):
            continue
        merged = _merged(buffer.type.shape, matrix.type.shape)
        if merged is not None and buffer.name not in stores[0].reads:
            program = _stored_as(program, stores[0], buffer, matrix, merged)
    return program


def _touching(program: Program, name: str) -> list[Step]:
    return [program.steps[n] for n in program.touching.get(name, ())]


def _is_product(step: Step) -> bool:
    return isinstance(step, Call) and REGISTRY[step.op].contraction and not step.parts


def _decodes(step: Step) -> TypeGuard[Kernel]:
    """Whether a step is a kernel that computes one array, element by element."""
    if not isinstance(step, Kernel) or step.accums or any(s.op in (*REDUCTIONS, "scan") for s in step.body):
        return False
    return len([s for s in step.body if s.op == "store"]) == 1


def _merged(shape: tuple[Size, ...], matrix: tuple[Size, ...]) -> int | None:
    """How many axes of a shape are the rows of a matrix; None if that is not known."""
    rows = (n for n in range(1, len(shape)) if same(product(shape[:n]), matrix[0]))
    return next((n for n in rows if same(product(shape[n:]), matrix[1])), None)


def _stored_as(program: Program, kernel: Kernel, buffer: Buffer, matrix: Buffer, rows: int) -> Program:
    """The program with the kernel's result as a matrix, of whose rows the first axes are so many."""

    def flat(index: tuple[Index, ...], shape: tuple[Size, ...]) -> Index:
        total = Index()
        for place, part in enumerate(index):
            total = total + part * product(shape[place + 1 :])
        return total

    shape = buffer.type.shape
    body = tuple(
        s.altered(buffer=matrix.name, index=(flat(s.index[:rows], shape[:rows]), flat(s.index[rows:], shape[rows:])))
        if s.op == "store"
        else s
        for s in kernel.body
    )
    buffers = tuple(
        replace(matrix, alias="", kind="temp") if b is matrix else b for b in program.buffers if b is not buffer
    )
    types = {b.name: b.type for b in buffers}
    steps = tuple(replace(kernel, body=body).rehashed(types) if s is kernel else s for s in program.steps)
    return replace(program, buffers=buffers, steps=steps)
