"""Products of rows by groups, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir.kernel import Call, Program
from ...ir.types import dtype as dtype_of
from ..expr import stored
from ..text import standalone
from .actions import Action, Launch, Part, Plan, chunks
from .products import THREADS, TILE


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    return 0


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    left, right, offsets = (plan.view(call, o, axes) for o, axes in zip(call.args, call.views, strict=True))
    out = plan.result(call)
    *groups, rows, columns = out.shape
    tiles = chunks(rows, TILE) * chunks(columns, TILE)
    for count in groups:
        tiles *= count
    if not tiles:
        return []
    sizes = (offsets.strides[0], offsets.shape[0] - 1, *left.shape, right.shape[-1])
    numbers = (left.start, right.start, offsets.start, *sizes, *left.strides, *right.strides)
    name = _function(call.op, dtype_of(out.part.dtype).name, stored(dtype_of(offsets.part.dtype)))
    args: tuple[Part | int, ...] = (left.part, right.part, offsets.part, out.part, plan.flag, plan.site(number))
    return [Launch(name, tiles, THREADS, (*args, *numbers), (3,))]


def support(op: str) -> Callable[[Program, Sequence[Call]], list[str]]:
    """The functions of an op, for each dtype of the rows and of the offsets in a program's calls."""

    def text(program: Program, calls: Sequence[Call]) -> list[str]:
        dtypes = program.types
        kinds = {(dtypes[c.out.buffer].dtype.name, stored(dtypes[c.args[2].buffer].dtype)): None for c in calls}
        entries = [_entry(op, *kind) for kind in kinds]
        return [standalone(f"cuda/{op}.cu"), *entries] if entries else []

    return text


def _function(op: str, dtype: str, index: str) -> str:
    return f"gradc_{op}_{dtype}_{index}"


_STRIDES = {
    "grouped_matmul": ("x_s", "x_k", "w_g", "w_k", "w_n"),
    "grouped_outer": ("x_s", "x_k", "y_s", "y_n"),
}


def _entry(op: str, dtype: str, index: str) -> str:
    sizes = ("step", "groups", "rows", "k", "n", *_STRIDES[op])
    declared = ", ".join(f"i64 {name}" for name in ("from_x", "from_y", "first", *sizes))
    arrays = f"const {dtype} *x, const {dtype} *y, const {index} *offsets, {dtype} *out, const u64 *flag, i64 site"
    head = (
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {_function(op, dtype, index)}({arrays}, {declared})'
    )
    return f"""{head} {{
  if (gradc_stopped(flag, site)) return;
  gradc_{op}(x + from_x, y + from_y, offsets + first, out, {", ".join(sizes)});
}}"""
