"""Argsorts of rows on a GPU: tiles in shared memory, then passes that merge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from ...ir.kernel import Call, Program
from ...ir.types import dtype as dtype_of
from ..text import enumerators, standalone
from .actions import U32, Action, Launch, Part, Plan
from .support import merged_axes

TILE = enumerators("cuda/argsort.cu")["GRADC_ORDER_TILE"]
THREADS = 256
_MOST_BLOCKS = 1 << 20
"""Of a merging pass, whose threads go on to further items."""
_ALIGN = 256


def _pieces(count: int, itemsize: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of the keys and positions of both sides of a merging pass."""
    sizes = [-(-size * count // _ALIGN) * _ALIGN for size in (itemsize, 4, itemsize, 4)]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    keys = plan.view(call, call.args[0], call.views[0])
    *_, (start, size) = _pieces(prod(keys.shape), keys.part.dtype.itemsize)
    return start + size if keys.shape[-1] > TILE else 0


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    keys, out = plan.view(call, call.args[0], call.views[0]), plan.result(call).part
    site, n, count = plan.site(number), keys.shape[-1], plan.result(call).shape[-1]
    if not out.count:
        return []
    name, size = dtype_of(keys.part.dtype).name, keys.part.dtype.itemsize
    total, long = prod(keys.shape), n > TILE
    pieces = _pieces(total, size) if long else [(0, 0)] * 4
    sides = [
        (plan.space(k, total * long, keys.part.dtype), plan.space(p, total * long, U32))
        for (k, _), (p, _) in (pieces[:2], pieces[2:])
    ]
    width = TILE if long else 1 << (n - 1).bit_length()
    launches: list[Action] = []
    done = 0
    for start, rows, (step0, rows1, step1) in _parts(keys.shape[:-1], keys.strides[:-1]):
        place = Part(out.root, out.start + done * count * 8, rows * count, out.dtype)
        run = [_shifted(p, done * n * long, rows * n * long) for side in sides for p in side]
        blocks = rows * -(-n // TILE) if long else -(-rows // (TILE // width))
        numbers = (rows, n, count, width, rows1, step0, step1, keys.strides[-1])
        first = _shifted(keys.part, keys.start + start, keys.part.count - keys.start - start)
        args: tuple[Part | int, ...] = (first, place, run[0], run[1], plan.flag, *numbers, site)
        launches.append(Launch(f"gradc_order_tile_{name}", blocks, THREADS, args, (1, 2, 3) if long else (1,)))
        length, (a, b) = TILE, (run[:2], run[2:])
        while length < n:
            args = (*a, place, *b, plan.flag, rows, n, count, length, site)
            blocks = min(-(-rows * n // THREADS), _MOST_BLOCKS)
            written = (3, 4) if 2 * length < n else (2,)
            launches.append(Launch(f"gradc_order_merge_{name}", blocks, THREADS, args, written))
            length, (a, b) = 2 * length, (b, a)
        done += rows
    return launches


def _parts(shape: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Rows as parts that two axes number, in order: (position of the first, rows, (outer stride, inner count, inner
    stride)).
    """
    *outer, (rows0, step0), (rows1, step1) = [(1, 0), (1, 0), *zip(*merged_axes(shape, strides), strict=True)]
    for at in np.ndindex(*(count for count, _ in outer)):
        start = sum(place * step for place, (_, step) in zip(at, outer, strict=True))
        yield start, rows0 * rows1, (step0, rows1, step1)


def _shifted(part: Part, by: int, count: int) -> Part:
    return Part(part.root, part.start + by * part.dtype.itemsize, count, part.dtype)


def support(program: Program, calls: Sequence[Call]) -> list[str]:
    """The sorts of each dtype of keys that a program's calls have."""
    names = sorted({program.buffer[call.args[0].buffer].type.dtype.name for call in calls})
    return [standalone("cuda/argsort.cu"), *map(_entries, names)] if names else []


def _entries(key: str) -> str:
    head = 'extern "C" __global__ void __launch_bounds__(256)'
    tile, merge = (", ".join(f"i64 {name}" for name in (*names, "site")) for names in (_TILE_SIZES, _MERGE_SIZES))
    keys, out = f"const {key} *key", f"i64 *out, {key} *key_out, u32 *at_out, const u64 *flag"
    return f"""
{head} gradc_order_tile_{key}({keys}, {out}, {tile}) {{
  if (gradc_stopped(flag, site)) return;
  gradc_order_tile<{key}>(blockIdx.x, key, out, key_out, at_out, {", ".join(_TILE_SIZES)});
}}
{head} gradc_order_merge_{key}({keys}, const u32 *at, {out}, {merge}) {{
  if (gradc_stopped(flag, site)) return;
  gradc_order_merge<{key}>(blockIdx.x, gridDim.x, key, at, out, key_out, at_out, {", ".join(_MERGE_SIZES)});
}}"""


_TILE_SIZES = ("rows", "n", "count", "width", "rows1", "step0", "step1", "step")
_MERGE_SIZES = ("rows", "n", "count", "run")
