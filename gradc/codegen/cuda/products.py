"""Matrix products on a GPU: which of them cuBLAS takes, and the kernel of ours for the others.

``out[..., m, n] = a[..., m, k] @ b[..., k, n]``; floats of 32 bits and less are added up in f32, integers wrap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ...ir.dims import Size
from ...ir.kernel import Call, Program
from ...ir.statement import Operand
from ...ir.types import DTYPES, DType
from ...ir.types import dtype as dtype_of
from ..expr import stored
from ..index import flatten
from ..text import standalone
from .actions import U8, WORKSPACE, Action, Launch, Library, Part, Plan, Product, Side, Strided
from .support import element

Array = np.ndarray[Any, Any]
TILE = 32
"""Rows and columns of the result that a block of ours computes, and steps along the inner axis between two barriers."""
THREADS = 256
GATE_BLOCKS = 32
"""Of a launch that has work only where a check has found something, or where a product is empty."""
Kinds = tuple[str, str]
"""The dtypes of a product's operands and of its result."""
LIBRARY = {*((name, name) for name in ("f16", "bf16", "f32", "f64")), ("f16", "f32"), ("bf16", "f32")}
"""What cuBLAS multiplies, to our rules of rounding."""
_MOST = 2**31 - 1
Axis = tuple[int, tuple[int, int, int]]
"""Of a batch: how many, and the strides in a, b and out."""


def library_of(product: Product) -> Library | None:
    """The call of cuBLAS, or None: it does not take such strides or sizes."""
    *_, m, n = product.out.shape
    k = product.a.shape[-1]
    axes = merged(product)
    if len(axes) > 1 or (dtype_of(product.a.part.dtype).name, dtype_of(product.out.part.dtype).name) not in LIBRARY:
        return None
    batch, (step_a, step_b, _) = axes[0] if axes else (1, (0, 0, 0))
    a, b = _side(product.a, step_a), _side(product.b, step_b)
    if a is None or b is None or max(m, n, k, batch, a.leading, b.leading) > _MOST:
        return None
    return Library(product, m, n, k, batch, a, b)


def product_of(plan: Plan, call: Call, number: int) -> Product:
    """A call's matrix product."""
    a, b = (plan.view(call, operand, axes) for operand, axes in zip(call.args, call.views, strict=True))
    return Product(a, b, plan.result(call), plan.site(number))


def gated(product: Product) -> bool:
    """Whether the library must leave an output as it is once a check has found something: it cannot read the flag, so
    that a kernel of ours keeps the output's bytes meanwhile.
    """
    return product.site > 0 and product.out.part.root != WORKSPACE and library_of(product) is not None


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    """Scratch bytes with which the workspace has room for the output of a gated product."""
    product = product_of(plan, call, number)
    return max(0, product.out.part.nbytes - plan.scratch_start) if gated(product) else 0


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    """A call by the library where it takes the product, else by a kernel of ours."""
    product = product_of(plan, call, number)
    out = product.out
    if 0 in out.shape:
        return []
    taken_by = library_of(product)
    if taken_by is None:
        return [*launches_of(product, plan.flag)]
    if not gated(product):
        return [taken_by]
    whole = replace(out.part, count=out.part.nbytes, dtype=U8)
    if taken_by.k == 0:
        return [Launch("gradc_gate_zero", GATE_BLOCKS, 256, (whole, whole.count, plan.flag, product.site), (0,))]
    kept = replace(whole, root=WORKSPACE, start=0)  # over temporaries: after a failed check nothing reads them
    keep, restore = (
        Launch("gradc_gate", GATE_BLOCKS, 256, (to, source, whole.count, plan.flag, product.site), (0,))
        for to, source in ((kept, whole), (whole, kept))
    )
    return [keep, taken_by, restore]


def _side(operand: Strided, step: int) -> Side | None:
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


def merged(product: Product) -> list[Axis]:
    """The axes of the batch, neighbours that step alike as one."""
    axes: list[Axis] = []
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


def launches_of(product: Product, flag: Part) -> list[Launch]:
    """The same by our own kernel: one launch for two axes of the batch, more for more."""
    *_, m, n = product.out.shape
    k = product.a.shape[-1]
    if 0 in product.out.shape:
        return []
    *outer, first, second = [(1, (0, 0, 0)), (1, (0, 0, 0)), *merged(product)]
    outer = [axis for axis in outer if axis[0] > 1]
    blocks = -(-m // TILE) * -(-n // TILE) * first[0] * second[0]
    launches = []
    for at in np.ndindex(*(count for count, _ in outer)):
        from_a, from_b, to = (
            sum(place * strides[i] for place, (_, strides) in zip(at, outer, strict=True)) for i in range(3)
        )
        out = product.out.part
        out = replace(out, start=out.start + to * out.dtype.itemsize, count=out.count - to)
        sizes = (product.a.start + from_a, product.b.start + from_b, m, n, k, second[0])
        steps = [*product.a.strides[-2:], *product.b.strides[-2:], *first[1], *second[1]]
        launches.append(
            Launch(
                _function(dtype_of(product.a.part.dtype), dtype_of(out.dtype)),
                blocks,
                THREADS,
                (product.a.part, product.b.part, out, *sizes, *steps, flag, product.site),
                (2,),
            )
        )
    return launches


def views(product: Product, a: Array, b: Array, out: Array) -> tuple[Array, Array, Array]:
    """Operands and result as arrays over their parts' bytes."""
    return _view(product.a, a), _view(product.b, b), _view(product.out, out)


def _view(operand: Strided, memory: Array) -> Array:
    part = memory.view(operand.part.dtype)[operand.start :]
    if 0 in operand.shape:
        return np.empty(operand.shape, part.dtype)
    return np.lib.stride_tricks.as_strided(part, operand.shape, [s * part.itemsize for s in operand.strides])


def multiplied(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """``a @ b`` as the library does it: short floats are added up in f32, and the result is rounded once."""
    with np.errstate(all="ignore"):
        if dtype_of(a.dtype).is_float and a.itemsize < 4:
            return np.asarray(np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(dtype))
        return np.asarray(np.matmul(a, b))


# -- the text ----------------------------------------------------------------------------------------------------------


def support(program: Program, calls: Sequence[Call]) -> str:
    """What a program's products need of us: the kernel for those that the library may not take, the gate where checks
    come before one.
    """
    own = sorted({_kinds(program, call) for call in calls if not _library_surely(program, call)})
    checks = any(s.op == "check" for kernel in program.kernels for s in kernel.body)
    return "\n".join(
        [*([matmul_text(own)] if own else []), *([standalone("cuda/gate.cu")] if calls and checks else [])]
    )


def without_library(program: Program, calls: Sequence[Call]) -> str:
    """The text beside :func:`support` with which kernels of ours compute every product of a program."""
    every = {_kinds(program, call) for call in calls}
    there = {_kinds(program, call) for call in calls if not _library_surely(program, call)}
    missing = sorted(every - there)
    return matmul_text(missing) if not there else _entries(missing, there)


def _kinds(program: Program, call: Call) -> Kinds:
    (read,) = {program.buffer[operand.buffer].type.dtype.name for operand in call.args}
    return read, program.buffer[call.out.buffer].type.dtype.name


def matmul_text(kinds: Sequence[Kinds]) -> str:
    """``gradc_matmul_NAME``, or ``gradc_matmul_NARROW_NAME`` where operands are narrower than their product."""
    return "\n".join([standalone("cuda/matmul.cu"), _entries(kinds)])


def _entries(kinds: Sequence[Kinds], there: Collection[Kinds] = ()) -> str:
    names = {name for each in kinds for name in each} - {name for each in there for name in each}
    elements = [element(DTYPES[name]) for name in sorted(names)]
    return "\n".join([*elements, *(_entry(DTYPES[read], DTYPES[written]) for read, written in kinds)])


def _function(read: DType, written: DType) -> str:
    return f"gradc_matmul_{written.name}" if read is written else f"gradc_matmul_{read.name}_{written.name}"


def _entry(read: DType, written: DType) -> str:
    ctype, result = stored(read), stored(written)
    strides = ", ".join(f"i64 {name}" for name in _STRIDES)
    arguments = ", ".join(_STRIDES)
    sizes = "i64 from_a, i64 from_b, i64 m, i64 n, i64 k, i64 count1"
    declared = f"const {ctype} *a, const {ctype} *b, {result} *out, {sizes}, {strides}, const u64 *flag, i64 site"
    head = f'extern "C" __global__ void __launch_bounds__(256) {_function(read, written)}({declared})'
    kinds = f"gradc_element_{read.name}, gradc_element_{written.name}"
    return f"""{head} {{
  if (gradc_stopped(flag, site)) return;
  gradc_matmul<{kinds}>(a + from_a, b + from_b, out, m, n, k, count1, {arguments});
}}"""


_STRIDES = ("a_m", "a_k", "b_k", "b_n", "a_0", "b_0", "out_0", "a_1", "b_1", "out_1")


def _library_surely(program: Program, call: Call) -> bool:
    """Whether the library takes a product whatever its sizes."""
    if _kinds(program, call) not in LIBRARY:
        return False
    sizes = dict(call.axes)
    *batch, m, inner = call.views[0]
    n = call.result_axes[-1]

    def strides(operand: Operand) -> dict[str, Size]:
        return dict(flatten(operand.index, program.buffer[operand.buffer].type.shape).terms)

    seen = [strides(operand) for operand in (*call.args, call.out)]
    for steps, rows, columns in ((seen[0], m, inner), (seen[1], inner, n)):
        down, across = steps.get(rows, 0), steps.get(columns, 0)
        if not (across == 1 and _covers(down, sizes[columns])) and not (down == 1 and _covers(across, sizes[rows])):
            return False
    return all(steps.get(a, 0) == sizes[b] * steps.get(b, 0) for steps in seen for a, b in pairwise(batch))


def _covers(stride: Size, extent: Size) -> bool:
    return stride >= extent if isinstance(stride, int) and isinstance(extent, int) else stride == extent
