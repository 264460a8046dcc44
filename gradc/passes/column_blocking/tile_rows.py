"""tile_rows: what a GPU's tensor cores compute as one kernel becomes a loop over blocks of rows with sweeps.

Wide rows that a product gives, what a kernel makes of them, and the product that sums that over the columns: attention
is one such loop, whatever masks, biases and weights its graph has.  So are logits of which values of their rows alone
are left, a cross entropy.  What goes on with a row of its results joins the loop's epilogue.  Nothing of the size of
the wide rows is in memory then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...analysis.tile_time import (
    calls_seconds,
    decoded_program_seconds,
    decoded_seconds,
    library_seconds,
    tile_seconds,
)
from ...analysis.tiles import NotTiled, form_of, tiled
from ...ir.dims import assuming
from ...ir.kernel import Call, Kernel, Loop, MissedTile, Program
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS
from ...targets.devices import Device, Gpu
from ..loops.legality import IllegalMove
from ..manager import program_pass
from ..row_blocking.fission import fuse_unused, split_sums
from ..row_blocking.fusion_group import FusionGroup
from ..row_blocking.loop_writer import fuse
from ..row_blocking.tiling import with_unit_axes, without_unit_axes
from ..row_blocking.wide_products import Sizes
from .body import body_of
from .carry_sums import swept
from .decoded_products import Decoded, Thin, decoded_loop, decoded_products, thin_products
from .decoded_sums import summed_loop, summed_products
from .epilogue import with_epilogue
from .prologue import with_prologue
from .split_loops import split

LARGE = 8192
"""Stands for sizes that are not known: where it is the wide rows that take time, and memory."""


@program_pass("REAL")
def tile_rows(program: Program, *, device: Device, dims: Sizes = None) -> Program:
    """matmul, softmax, matmul, divide over rows(b: B, h: H, s: S)  ->  loop over(b: B, h: H) rows(s: S) tile(mma) {
    sweep cols(t: T) { matmul, carry max, sum by exp(max), matmul by exp(max) }, divide }

    Licence REAL, as :func:`.carry_sums` has it.  Where the device has no kernel for such a loop
    (:mod:`gradc.analysis.tiles`), or where it would take longer than the steps do (:mod:`gradc.analysis.tile_time`),
    these stay as they are, and the program says why (``Program.untiled``).

    :param device: whose kernels these are.
    :param dims: sizes at which time is predicted; ``LARGE`` stands for the others.
    """
    given, program, tried = program, without_unit_axes(program), set[str]()
    likely = {**dict.fromkeys(program.dims, LARGE), **(dims or {})}
    with assuming(program.assumptions):
        program, decided = _summed(program, device, likely)
        tried |= decided
        program, fissions = split_sums(program, [*_products(program)])
        while seeds := [name for name in _products(program) if name not in tried]:
            tried.add(seeds[0])
            group = FusionGroup.grow_from(program, seeds[0], dims, tiled=True)
            if group is None or not _leaves_narrow_rows(group):
                continue
            tried |= {*group.blocks}
            try:
                program = _tiled(group, device, likely)
            except (IllegalMove, NotTiled) as error:
                step = next(step for step in group.steps.values() if seeds[0] in step.writes)
                missed = MissedTile(step.name, step.note, str(error))
                program = replace(program, untiled=(*program.untiled, missed))
        program = _decoded(fuse_unused(program, fissions), device, likely)
    return with_unit_axes(program, given)


def _summed(program: Program, device: Device, dims: Mapping[str, int]) -> tuple[Program, set[str]]:
    """The program with a loop for each product that a kernel sums times what it decodes, where that takes no longer
    than the product in memory; and the products for which there is one.
    """
    decided = set[str]()
    if not isinstance(device, Gpu):
        return program, decided
    for p in [*summed_products(program)]:
        try:
            made, loop = summed_loop(program, p)
            loops = tiled(loop, made, device)
            decided.add(p.call.out.buffer)
            program = _with_loop(made, loop, _fastest_decoded(loops, made, device, dims))
        except (IllegalMove, NotTiled) as error:
            missed = MissedTile(p.call.name, p.call.note, str(error))
            program = replace(program, untiled=(*program.untiled, missed))
    return program, decided


def _decoded(program: Program, device: Device, dims: Mapping[str, int]) -> Program:
    """The program with loops for the products whose operand a kernel decodes, where that takes no longer than to decode
    it into memory for the library's product: one loop for several of equal sizes, where that is faster than a loop for
    each.
    """
    if not isinstance(device, Gpu):
        return program
    left = [*decoded_products(program)]
    while left:
        group = [left.pop(0)]
        try:
            best = _decoded_loop(program, group, device, dims)
        except (IllegalMove, NotTiled) as error:
            program = _missed(program, group[0], str(error))
            continue
        for other in [p for p in left if p.sizes == group[0].sizes]:
            try:
                together = _decoded_loop(program, [*group, other], device, dims)
                apart = _decoded_loop(best, [other], device, dims)
            except IllegalMove:  # nor do later ones join
                break
            except NotTiled as error:
                best = _missed(best, other, f"it is in no loop with {group[0].call.name}: {error}")
                continue
            times = [decoded_program_seconds(each, dims, device) for each in (together, apart)]
            if times[0] < times[1]:
                best, group = together, [*group, other]
                left.remove(other)
            else:
                one, two = (f"{t * 1e6:.1f}" for t in times)
                why = f"steps take {one} us with {group[0].call.name} in one loop, and {two} in two"
                best = _missed(best, other, why)
        program = best
    return program


def _missed(program: Program, product: Decoded, why: str) -> Program:
    missed = MissedTile(product.call.name, product.call.note, why)
    return replace(program, untiled=(*program.untiled, missed))


def _decoded_loop(program: Program, products: Sequence[Decoded], device: Gpu, dims: Mapping[str, int]) -> Program:
    """The program with one loop for the products, and for thin ones whose results meet theirs where that is faster.

    :raises IllegalMove, NotTiled: there is none, or it would take longer than the library's products.
    """

    def made(thin: Sequence[Thin]) -> Program:
        own, loop = with_epilogue(*decoded_loop(program, products, thin))
        return _with_loop(own, loop, _fastest_decoded(tiled(loop, own, device), own, device, dims))

    thin = thin_products(program, products)
    found, why = list[Program](), Exception()
    for joined in (thin, ()) if thin else ((),):
        try:
            found.append(made(joined))
        except (IllegalMove, NotTiled) as error:
            why = error
    if not found:
        raise why
    return min(found, key=lambda own: decoded_program_seconds(own, dims, device))


def _fastest_decoded(loops: Sequence[Loop], program: Program, device: Gpu, dims: Mapping[str, int]) -> Loop:
    """The loop, of those with other blocks, that takes least.

    :raises NotTiled: it takes longer than the library's product with a kernel before it.
    """
    forms = [form_of(loop, program.types) for loop in loops]
    times = [decoded_seconds(form, program, dims, device) for form in forms]
    library, best = library_seconds(forms[0], program, dims, device), min(times)
    if best > library:
        both = (
            f"{best * 1e6:.0f} us as one kernel that decodes its operand, and {library * 1e6:.0f} with that in memory"
        )
        raise NotTiled(f"it takes about {both}")
    return loops[times.index(best)]


def _products(program: Program) -> Iterator[str]:
    """The temps that matrix products write and kernels read."""
    read = {b for kernel in program.kernels for b in kernel.reads}
    for step in program.steps:
        if isinstance(step, Call) and REGISTRY[step.op].contraction and not step.parts:
            buffer = program.buffer[step.out.buffer]
            if buffer.kind == "temp" and not buffer.alias and buffer.name in read:
                yield buffer.name


def _leaves_narrow_rows(group: FusionGroup) -> bool:
    """Whether a group reduces the columns of a product to values of rows, as a cross entropy does; or reduces them, or
    computes two products of its shape, and then multiplies what it makes of them: attention, forward and backward.
    """
    steps, blocks = group.steps.values(), {*group.blocks}
    calls = [step for step in steps if isinstance(step, Call)]
    computed = [call for call in calls if call.out.buffer in blocks]
    kernels = [step for step in steps if isinstance(step, Kernel)]
    readers = [kernel for kernel in kernels if blocks & {*kernel.reads}]
    reduces = any(s.op in REDUCTIONS for kernel in readers for s in kernel.body)
    stored = [(kernel, s) for kernel in kernels for s in kernel.body if s.op == "store" and s.buffer not in blocks]
    narrow = not any(kernel.is_column(s) for kernel, s in stored)
    multiplies = len(calls) > len(computed)
    return len(computed) > 0 and ((reduces and (multiplies or narrow)) or (len(computed) > 1 and multiplies))


def _tiled(group: FusionGroup, device: Device, dims: Mapping[str, int]) -> Program:
    """The program with a loop with sweeps for a group.

    :raises IllegalMove, NotTiled: there is none, or the device has no kernel for it, or a slower one.
    """
    program = fuse(group)
    written = {b for step in group.steps.values() for b in step.writes}
    loop = next(loop for loop in program.loops if written & {*loop.writes, *(b.name for b in loop.blocks)})
    loops = [loop]
    if loop.reduces_rows:
        others = program.loops
        program = split(body_of(loop, program), program)
        loops = [own for own in program.loops if own not in others]
    for own in loops:
        made = own if own.sweeps else swept(body_of(own, program), program)
        program, made = with_epilogue(_with_loop(program, own, made), made)
        program, made = with_prologue(program, made)
        program = _with_loop(program, made, _profitable(tiled(made, program, device), program, device, dims))
    return program


def _profitable(loops: Sequence[Loop], program: Program, device: Device, dims: Mapping[str, int]) -> Loop:
    """The first of the loops, which differ in their blocks, that takes no longer than products with kernels between
    them: where blocks of many rows leave multiprocessors without work, ones of fewer rows may not.

    :raises NotTiled: each of them takes longer.
    """
    if not isinstance(device, Gpu):
        return loops[0]
    forms = [form_of(loop, program.types) for loop in loops]
    times = [tile_seconds(form, program, dims, device) for form in forms]
    several = calls_seconds(forms[0], program, dims, device)
    found = next((loop for loop, one in zip(loops, times, strict=True) if one <= several), None)
    if found is None:
        both = f"{min(times) * 1e6:.0f} us as one kernel, and {several * 1e6:.0f} as products with kernels between"
        raise NotTiled(f"it takes about {both}")
    return found


def _with_loop(program: Program, loop: Loop, other: Loop) -> Program:
    return replace(program, steps=tuple(other if step is loop else step for step in program.steps))
