"""block_batch: what products of a batch hand to one another on a GPU is in memory for some positions at a time.

Scores of attention are [B, H, S, S]: too many heads to go over the rows of one after another, and together most of the
workspace.  But a position along the first axis has many heads, and a library is called for each anyway where heads lie
beside features.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...ir.dims import assuming, evaluate, known_nonnegative, maximum, nominal, product
from ...ir.kernel import Call, Program
from ...ir.node import REGISTRY
from ..manager import program_pass
from . import wide_products
from .fusion_group import FusionGroup
from .loop_writer import fuse
from .wide_products import Sizes

BATCH_ELEMENTS = 8_000_000
"""Of a block at least: so many that a launch fills a GPU, and no more, so that what is in L2 may still be there for the
next one.
"""


@program_pass("REAL")
def block_batch(program: Program, *, dims: Sizes = None) -> Program:
    """matmul, softmax, matmul over [b: 8, h: 12, s, s]  ->  loop rows(b: 8) by(1) { matmul, softmax, matmul }

    :param dims: sizes at which elements are counted; 1024 stands for the others.
    """
    tried: set[str] = set()
    with assuming(program.assumptions):
        while seeds := [name for name in _large(program, dims) if name not in tried]:
            tried.add(seeds[0])
            positions, *rest = program.types[seeds[0]].shape
            by = 1 + (BATCH_ELEMENTS - 1) // maximum(product(rest), 1)
            if not known_nonnegative(by - 1) or known_nonnegative(by - positions):
                continue
            group = FusionGroup.grow_from(program, seeds[0], dims, by)
            program = fuse(group) if group is not None else program
    return program


def _large(program: Program, dims: Sizes) -> Iterator[str]:
    """The temps of a program that products write or read, which have many positions of many matrices."""
    touched = (
        o.buffer for step in program.steps if isinstance(step, Call) and _multiplies(step) for o in step.accesses
    )
    for name in dict.fromkeys(touched):
        buffer = program.buffer[name]
        if buffer.kind == "temp" and not buffer.alias and buffer.type.rank > 3:
            sizes = nominal(buffer.type.shape, dims)
            if evaluate(product(buffer.type.shape), sizes) > wide_products.LAUNCH_ELEMENTS:
                yield name


def _multiplies(call: Call) -> bool:
    return REGISTRY[call.op].contraction and not call.parts
