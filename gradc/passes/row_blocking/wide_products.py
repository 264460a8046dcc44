"""Which products have wide rows: in graphs and in programs, and which of those a program still has in memory whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ...ir.dims import Size, evaluate, maximum, nominal, product
from ...ir.kernel import Call, Loop, Program
from ...ir.node import REGISTRY, Node
from ...ir.op import Library
from ...targets.devices import CPU, Cpu, Device

BLOCKED = 2
"""A product's rows are computed in blocks where they have as many times the elements of what they are products of."""
RECOMPUTED = 8
"""And computed twice, rather than saved, where they have as many."""
MIN_BYTES = 1 << 20
"""Bytes that such a product has at least: a smaller one is left to the caches."""

FEW_TERMS = ((8, 1 << 18, 12), (64, 1 << 20, 192))
"""Terms of a product at most, elements of a block of it, so that these stay in a cache, and rows at least."""

Sizes = Mapping[str, int] | None
"""Sizes at which elements are counted; 1024 stands for the others."""
LAUNCH_ELEMENTS = 40_000_000
"""Of the widest block of a loop on a GPU, about: 240 MB as f32 with its gradient in 16 bits."""
MOST_POSITIONS = 4
"""Positions along a product's batch for which a GPU goes over blocks of its rows: it does one after another, and many
small products take longer than one large one.
"""


def is_wide(columns: Size, inner: Size, ratio: int, dims: Sizes = None) -> bool:
    """Whether a row of ``columns`` elements has ``ratio`` times the ``inner`` ones that each of them is summed over."""
    sizes = nominal([columns, inner], dims)
    return evaluate(columns, sizes) >= ratio * evaluate(inner, sizes)


def is_wide_product(node: Node, ratio: int, dims: Sizes = None) -> bool:
    """Whether a node is a matrix product with rows that wide."""
    contraction = isinstance(node.op, Library) and node.op.contraction
    return contraction and is_wide(node.shape[-1], node.operands[0].shape[-1], ratio, dims)


def is_worth_blocks(shape: Sequence[Size], columns: Size, inner: Size, dims: Sizes, device: Device) -> bool:
    """Whether a device goes over blocks of rows of a product: on a GPU of one that is larger than a block, with rows
    so wide that it may be computed twice.
    """
    if isinstance(device, Cpu):
        return True
    sizes = nominal(shape, dims)
    few = evaluate(product(shape[:-2]), sizes) <= MOST_POSITIONS
    return few and evaluate(product(shape), sizes) > LAUNCH_ELEMENTS and is_wide(columns, inner, RECOMPUTED, dims)


def is_recomputed(product: Node, dims: Sizes, device: Device = CPU) -> bool:
    """Whether a node is a product with rows so wide that it is computed twice, in blocks, rather than saved."""
    wide = is_wide_product(product, RECOMPUTED, dims) and is_worth_blocks(
        product.shape, product.shape[-1], product.operands[0].shape[-1], dims, device
    )
    return wide and evaluate(product.type.nbytes, nominal(product.shape, dims)) >= MIN_BYTES


def wide_products(program: Program, ratio: int, dims: Sizes, device: Device = CPU) -> Iterator[str]:
    """The temps of a program that are products with rows that wide, and large."""
    for step in program.steps:
        if not isinstance(step, Call) or not REGISTRY[step.op].contraction or step.parts:
            continue
        buffer, axes = program.buffer[step.out.buffer], dict(step.axes)
        inner = product(size for axis, size in step.axes if axis not in step.result_axes)
        large = evaluate(buffer.type.nbytes, nominal(buffer.type.shape, dims)) >= MIN_BYTES
        columns = axes[step.result_axes[-1]]
        worth = large and is_worth_blocks(buffer.type.shape, columns, inner, dims, device)
        if buffer.kind == "temp" and worth and is_wide(columns, inner, ratio, dims):
            yield buffer.name


def rows_of_few_terms(program: Program, name: str, dims: Sizes) -> Size | None:
    """How many rows a block of a product has that sums so few terms that what it is made of is packed in no time: those
    that stay in a cache; None for one of more terms.  Measured for the gradient of a scale of [4096,4096] codes on an
    AMD EPYC family 25 model 1: with 1 term 8.7 ms in blocks of 48 rows, 14.6 of 1368; with 16 terms 12.9 of 192, 17.0
    of 1368.
    """
    call = next(step for step in program.steps if name in step.writes)
    if not isinstance(call, Call):
        return None
    axes = dict(call.axes)
    inner = product(size for axis, size in call.axes if axis not in call.result_axes)
    terms = evaluate(inner, nominal([inner], dims))
    columns = maximum(axes[call.result_axes[-1]], 1)
    return next((maximum(kept // columns, least) for most, kept, least in FEW_TERMS if terms <= most), None)


def has_unblocked(program: Program, dims: Sizes, device: Device = CPU) -> bool:
    """Whether a program has a product that was to be recomputed, or a value of half its size that comes of its loop,
    in memory whole.
    """
    return any(True for _ in wide_products(program, RECOMPUTED, dims, device)) or any(
        2 * evaluate(program.types[name].count, sizes) >= elements
        for loop in program.loops
        for elements, sizes in _blocked_products(loop, program, dims)
        for name in (*loop.reads, *loop.writes)
        if program.buffer[program.root(name)].kind == "temp"
    )


def _blocked_products(loop: Loop, program: Program, dims: Sizes) -> Iterator[tuple[int, dict[str, int]]]:
    """For each product with wide rows that a loop computes: the elements that all its blocks have, and the sizes for
    which this is so.
    """
    shapes = [size for name in (*loop.reads, *loop.writes) for size in program.types[name].shape]
    sizes = nominal([*shapes, *loop.sizes, *(size for b in loop.blocks for size in b.type.shape)], dims)
    inside = {**loop.largest(sizes), loop.count: 1}
    for step in loop.steps:
        if isinstance(step, Call) and step.out.buffer not in loop.writes:
            axes = {axis: evaluate(size, inside) for axis, size in step.axes}
            inner = math.prod(n for axis, n in axes.items() if axis not in step.result_axes)
            if axes[step.result_axes[-1]] >= RECOMPUTED * inner:
                own = math.prod(axes[axis] for axis in step.result_axes)
                yield evaluate(product(size for _, size in (*loop.over, loop.rows)), sizes) * own, sizes


def tiled_products(program: Program) -> int:
    """How many products with wide rows loops of a program compute on tensor cores."""
    own = (loop for loop in program.loops if loop.tile)
    return sum(isinstance(step, Call) and not step.add for loop in own for step in loop.sweeps[0].steps)
