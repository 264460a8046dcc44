"""About how long a loop takes as one kernel on tensor cores, and as library calls with kernels between them.

Both are estimates from shapes and the constants of :mod:`gradc.targets`, good enough to tell where the one takes
several times as long as the other: few rows and many columns leave most multiprocessors of the kernel without work, and
most of its products multiply rows that are not there.  The model of machine code (:mod:`gradc.inspect.predicted`) is
not asked: this is decided before there is a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from ..ir.dims import evaluate
from ..ir.kernel import Call, Kernel, Loop, Program
from ..ir.types import F32, Type
from ..targets.devices import Gpu
from ..targets.gpu import LIBRARY_CALL, SECTOR_BYTES, SHARED_RATE, WARP
from .in_turn import in_turn
from .library_time import product_time
from .tiles import PIECE, ROWS, TileForm, form_of

STEP = 80
"""Instructions of a warp for a block of columns beside those of its codes: copies, addresses, a barrier; STEP_ACROSS
where codes lie along rows.
"""
STEP_ACROSS = 110
DECODING = {4: 1.8, 8: 3.7}
"""Of a code of so many bits that becomes an element of a product, SCALED more where each is multiplied by its scale,
FLOAT8 where it is a float of 8 bits that no instruction converts, and MULTIPLIED for each 8 rows of x (all counted in
machine code for sm_90, of 4096 x 4096 and 1 or 16 rows of x).
"""
SCALED, FLOAT8, MULTIPLIED = 3.2, 8.0, 0.6
SCALED_RIGHT = 2.5
"""The same of an element of x, where that is multiplied by the scale."""
CONVERTS_F8 = 89
"""The first architecture with a conversion of floats of 8 bits."""
RESIDENT_WARPS = 16
"""Of a multiprocessor, with the 128 registers of a thread that decoding takes about (NVRTC for sm_80 to sm_100: 72 to
135 for 1 and 16 rows of x).
"""
UNDER_WAY = 0.9e-6
"""Seconds from the request of bytes of memory to when they are there, of a device whose multiprocessors all ask
(estimate): what a block has under way in its stages is bounded by it.
"""
INSTRUCTIONS = 2.0
"""Of a statement per element of a block, with conversions and the rescaling of sums (estimate)."""
LANES = 128
"""Elementwise instructions per clock of a multiprocessor (published: four schedulers, a warp each)."""
STALLED = 1.5
"""Times its instructions' clocks that a block of rows takes which is alone on its multiprocessor (estimate)."""
RESULT_BYTES = 12
"""Per element of a product with wide rows that calls hand on: written and read in f32, its weights in 16 bits."""
REDUCED_BYTES = 3.8
"""The same where rows are reduced and no weights are made of them, beside the statements of their kernel (fitted: for
the loss of 8192 rows over 50257 words the model of machine code has 526 us as one kernel and 772 as calls with 64
features, 781 and 834 with 128, 1350 and 897 with 192).
"""


def tile_seconds(form: TileForm, program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of the loop as one kernel: of what its warps compute, or of its bytes, a bias of each element with them.

    :param dims: the size of every symbol.
    """
    loop = form.loop
    rows, by = evaluate(loop.rows[1], dims), evaluate(loop.by, dims)
    blocks = prod(evaluate(size, dims) for _, size in loop.over) * ceil(rows / by)
    clocks = sum(_clocks(form, number, dims, by, gpu) for number in range(len(form.sweeps)))
    rounds = ceil(blocks / gpu.sms)
    computed = rounds * clocks * (STALLED if rounds == 1 else 1.0) / gpu.clock
    return float(gpu.launch + max(computed, _outside(loop, program, dims) / gpu.bandwidth))


def _outside(loop: Loop, program: Program, dims: Mapping[str, int]) -> int:
    """Bytes of all that a loop reads and writes in memory, each once."""
    return sum(evaluate(program.types[b].nbytes, dims) for b in {*loop.reads, *loop.writes})


def _clocks(form: TileForm, number: int, dims: Mapping[str, int], rows: int, gpu: Gpu) -> float:
    """Of a sweep for one block of rows."""
    own = form.sweeps[number]
    columns, by = evaluate(own.sweep.cols[1], dims), evaluate(own.sweep.by, dims)
    features = [p.left.padded for p in own.scores] + [_features(form.loop, p.carry) for p in own.added]
    elements = rows * by
    matrix = elements * sum(features) / gpu.matrix
    statements = sum(len(kernel.body) for kernel in own.kernels)
    return _share(own.sweep.to, columns) * ceil(columns / by) * (matrix + elements * statements * INSTRUCTIONS / LANES)


def _share(to: object, columns: int) -> float:
    """Of the columns, those that a block of rows goes over: half of them below a diagonal."""
    return 1.0 if to is None or columns == 0 else 0.5


def _features(loop: Loop, carry: str) -> int:
    (own,) = (c for sweep in loop.sweeps for c in sweep.carries if c.name == carry)
    return int(own.type.shape[1])


def calls_seconds(form: TileForm, program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of its products as library calls, with a kernel for each kernel of the first sweep that makes wide rows."""
    loop, own = form.loop, form.multiplying[0]
    columns = evaluate(own.sweep.cols[1], dims)
    rows = prod(evaluate(size, dims) for _, size in (*loop.over, loop.rows))
    features = [p.left.features for p in own.scores] + [_features(loop, p.carry) for p in own.added]
    flops = 2.0 * rows * columns * sum(features)
    products = product_time(gpu, form.dtype.name, flops, 0, 0, calls=len(features)).seconds
    wide = rows * columns * len(own.scores) * (RESULT_BYTES if own.added else REDUCED_BYTES) / gpu.bandwidth
    if not own.added:
        statements = sum(len(kernel.body) for kernel in own.kernels)
        wide += rows * columns * statements * INSTRUCTIONS / (LANES * gpu.sms * gpu.clock)
    outside = _outside(loop, program, dims) / gpu.bandwidth
    launches = sum(isinstance(step, Kernel) for step in loop.steps) * gpu.launch
    return float(products + wide + outside + launches)


# -- products whose weight is decoded ----------------------------------------------------------------------------------


def decoded_seconds(form: TileForm, program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of a loop that decodes a weight in its blocks: of its bytes, those that blocks of rows read again from the L2
    cache, its instructions, or its products, whichever takes longest.
    """
    loop, (own,) = form.loop, form.sweeps
    assert loop.tile is not None
    rows, columns = evaluate(loop.rows[1], dims), evaluate(own.sweep.cols[1], dims)
    by, width = evaluate(loop.by, dims), evaluate(own.sweep.by, dims)
    blocks = max(1, prod(evaluate(size, dims) for _, size in loop.over) * ceil(rows / by))
    steps = ceil(columns / width)
    elements = blocks * by * steps * width
    features = sum(p.padded for p in own.added)
    outside = _outside(loop, program, dims)
    sizes = [(s, *s.sizes(by, width)) for s in own.strips]
    stage = sum(height * ceil(neighbours * s.bytes / SECTOR_BYTES) * SECTOR_BYTES for s, height, neighbours in sizes)
    tile, shared = loop.tile, sum(form.strip_bytes(own, by, width))
    resident = max(1, min(RESIDENT_WARPS // tile.warps, gpu.shared // max(form.shared_bytes(by, width, tile), 1)))
    rounds, clocks = ceil(blocks / (resident * gpu.sms)), gpu.sms * gpu.clock * min(1.0, blocks / gpu.sms)
    waits = UNDER_WAY * (1 + rounds * steps / max(1, tile.stages - 1) + rounds * bool(form.after))
    issued = float(blocks * steps * tile.warps * (STEP_ACROSS if form.rows_together else STEP))
    tiles = by * tile.split // (ROWS * tile.warps)
    decoding = sum(_decoding(form, kernel, program.types, gpu, tiles) for kernel in own.kernels)
    issued += elements / WARP * (decoding + MULTIPLIED * features / PIECE)
    units = (
        issued / (4 * gpu.issue_share * clocks),
        elements * features / (gpu.matrix * clocks),
        2 * blocks * steps * shared / (SHARED_RATE * clocks),
    )
    warps = max(1, round(min(resident, blocks / gpu.sms) * tile.warps / 4))
    l2 = blocks * steps * stage / (gpu.copied * min(1.0, blocks / gpu.sms))
    return float(gpu.launch + max(in_turn(units, warps), outside / gpu.bandwidth, l2, waits))


def _decoding(form: TileForm, kernel: Kernel, types: Mapping[str, Type], gpu: Gpu, tiles: int) -> float:
    """Instructions of a code that a kernel decodes, where a warp has so many tiles of 16 rows."""
    (own,) = form.sweeps
    codes = [c.strip for c in own.codes if c.strip.is_codes and c.kernel is kernel]
    if not codes:
        return 0.0
    scaled = form.rows_together and any(s.op == "mul" for s in kernel.body if s.dtype is F32)
    bits = 4 if any(s.per == 2 for s in codes) else 8
    floats = bits == 8 and any(types[s.buffer].dtype.kind == "f" for s in codes)
    features = sum(p.padded for p in own.added if p.block in kernel.writes)
    each = SCALED_RIGHT * features / (ROWS * tiles) if form.scales_right(tiles) else SCALED
    return DECODING[bits] + each * scaled + FLOAT8 * (floats and int(gpu.arch[3:]) < CONVERTS_F8)


def library_seconds(form: TileForm, program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of the same as kernels that write the decoded weights, the library's products, and a kernel for what follows."""
    loop, (own,) = form.loop, form.sweeps
    count, call = len(own.added), own.added[0].call
    rows, columns = prod(evaluate(size, dims) for _, size in (*loop.over, loop.rows)), evaluate(own.sweep.cols[1], dims)
    features = evaluate(dict(call.axes)[str(call.out.index[1].variable)], dims)
    outside = _outside(loop, program, dims)
    weights = 2.0 * count * rows * columns  # bytes, of 16-bit elements
    decode = count * gpu.launch + (outside + weights) / gpu.bandwidth
    products = product_time(gpu, form.dtype.name, weights * features, weights, 0, calls=count).seconds
    follows = any(len(step.body) > 3 for step in loop.steps if isinstance(step, Kernel))
    return float(decode + products + len(form.after) * LIBRARY_CALL + follows * gpu.launch)


def decoded_program_seconds(program: Program, dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of the loops that decode weights in a program, and of starting its other steps."""
    total = 0.0
    for step in program.steps:
        decodes = isinstance(step, Loop) and step.tile is not None and step.tile.split > 1
        if isinstance(step, Loop) and decodes:
            total += decoded_seconds(form_of(step, program.types), program, dims, gpu)
        else:
            total += LIBRARY_CALL if isinstance(step, Call) else gpu.launch
    return total
