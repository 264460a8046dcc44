"""Rows of an array replaced, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ...ir.kernel import Call, Program
from ..text import standalone
from .actions import Action, Launch, Part, Plan, chunks

THREADS = 256
_MOST_BLOCKS = 1 << 16
"""Their threads go on to further elements."""


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    return 0


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    base, rows, values = (_words(plan.part(operand.buffer)) for operand in call.args)
    out, site = plan.result(call), plan.site(number)
    size, width, to = out.shape[0], prod(out.shape[1:]), _words(plan.part(call.out.buffer))

    def launch(name: str, elements: int, *args: Part | int) -> list[Action]:
        blocks = min(chunks(elements, THREADS), _MOST_BLOCKS)
        function = f"gradc_{name}_{to.dtype.itemsize}"
        return [Launch(function, blocks, THREADS, (*args, plan.flag, site), (args.index(to),))] if blocks else []

    return [
        *launch("put_rows_copy", size * width, base, to, size * width),
        *launch("put_rows", values.count, rows, values, to, size, rows.count, width),
    ]


def _words(part: Part) -> Part:
    """The part as unsigned integers of its elements' size, which is all that a move of them needs to know."""
    return Part(part.root, part.start, part.count, np.dtype(f"u{part.dtype.itemsize}"))


def support(program: Program, calls: Sequence[Call]) -> list[str]:
    """The functions for each size of elements that a program's calls have."""
    sizes = sorted({program.buffer[call.out.buffer].type.dtype.itemsize for call in calls})
    return [standalone("cuda/put_rows.cu"), *map(_entries, sizes)] if sizes else []


def _entries(size: int) -> str:
    head, word = 'extern "C" __global__ void __launch_bounds__(256)', f"u{8 * size}"
    sizes = "i64 size, i64 count, i64 width, const u64 *flag, i64 site"
    return f"""
{head} gradc_put_rows_copy_{size}(const {word} *base, {word} *to, i64 count, const u64 *flag, i64 site) {{
  if (gradc_stopped(flag, site)) return;
  gradc_put_rows_copy<{word}>(blockIdx.x, gridDim.x, base, to, count);
}}
{head} gradc_put_rows_{size}(const i64 *rows, const {word} *values, {word} *to, {sizes}) {{
  if (gradc_stopped(flag, site)) return;
  gradc_put_rows<{word}>(blockIdx.x, gridDim.x, rows, values, to, size, count, width);
}}"""
