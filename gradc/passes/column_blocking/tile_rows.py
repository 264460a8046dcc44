"""tile_rows: what a GPU's tensor cores compute as one kernel becomes a loop over blocks of rows with sweeps.

Wide rows that a product gives, what a kernel makes of them, and the product that sums that over the columns: attention
is one such loop, whatever masks, biases and weights its graph has.  What goes on with a row of its results joins the
loop's epilogue.  Nothing of the size of the wide rows is in memory then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...analysis.tiles import NotTiled, tiled
from ...ir.dims import assuming
from ...ir.kernel import Call, Kernel, Loop, MissedTile, Program
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS
from ...targets.devices import Device
from ..loops.legality import IllegalMove
from ..manager import program_pass
from ..row_blocking.fusion_group import FusionGroup
from ..row_blocking.loop_writer import fuse
from ..row_blocking.tiling import with_unit_axes, without_unit_axes
from ..row_blocking.wide_products import Sizes
from .body import body_of
from .carry_sums import swept


@program_pass("REAL")
def tile_rows(program: Program, *, device: Device, dims: Sizes = None) -> Program:
    """matmul, softmax, matmul, divide over rows(b: B, h: H, s: S)  ->  loop over(b: B, h: H) rows(s: S) tile(mma) {
    sweep cols(t: T) { matmul, carry max, sum by exp(max), matmul by exp(max) }, divide }

    Licence REAL, as :func:`.carry_sums` has it.  Where the device has no kernel for such a loop
    (:mod:`gradc.analysis.tiles`) the steps stay as they are, and the program says why (``Program.untiled``).

    :param device: whose kernels these are.  :param dims: sizes at which elements are counted; 1024 stands for others.
    """
    given, program, tried = program, without_unit_axes(program), set[str]()
    with assuming(program.assumptions):
        while seeds := [name for name in _products(program) if name not in tried]:
            tried.add(seeds[0])
            group = FusionGroup.grow_from(program, seeds[0], dims, tiled=True)
            if group is None or not _is_reduced(group, seeds[0]):
                continue
            tried |= {*group.blocks}
            try:
                program = _tiled(group.with_epilogue(), device)
            except (IllegalMove, NotTiled) as error:
                step = next(step for step in group.steps.values() if seeds[0] in step.writes)
                missed = MissedTile(step.name, step.note, str(error))
                program = replace(program, untiled=(*program.untiled, missed))
    return with_unit_axes(program, given)


def tiled_products(program: Program) -> int:
    """How many products with wide rows loops of a program compute on tensor cores."""
    own = (loop for loop in program.loops if loop.tile)
    return sum(
        isinstance(step, Call) and not step.add for loop in own for step in loop.sweeps[0].steps
    )


def _products(program: Program) -> Iterator[str]:
    """The temps that matrix products write and kernels read."""
    read = {b for kernel in program.kernels for b in kernel.reads}
    for step in program.steps:
        if isinstance(step, Call) and REGISTRY[step.op].contraction and not step.parts:
            buffer = program.buffer[step.out.buffer]
            if buffer.kind == "temp" and not buffer.alias and buffer.name in read:
                yield buffer.name


def _is_reduced(group: FusionGroup, seed: str) -> bool:
    """Whether a group reduces the columns of a product, and multiplies what it makes of them."""
    steps = group.steps.values()
    kernels = (step for step in steps if isinstance(step, Kernel) and seed in step.reads)
    reduces = any(s.op in REDUCTIONS for kernel in kernels for s in kernel.body)
    return reduces and any(isinstance(step, Call) and {*group.blocks} & {*step.reads} for step in steps)


def _tiled(group: FusionGroup, device: Device) -> Program:
    """The program with a loop with sweeps for a group.

    :raises IllegalMove, NotTiled: there is none, or the device has no kernel for it.
    """
    program = fuse(group)
    own = {b for step in group.steps.values() for b in step.writes}
    loop = next(loop for loop in program.loops if own & {*loop.writes, *(b.name for b in loop.blocks)})
    made = swept(body_of(loop, program), program)
    swapped = lambda other: replace(program, steps=tuple(other if step is loop else step for step in program.steps))
    return swapped(tiled(made, swapped(made), device))
