"""Matrix products on a GPU: which of them cuBLAS takes, and the kernel of ours for the others.

``out[..., m, n] = a[..., m, k] @ b[..., k, n]``; floats of 32 bits and less are added up in f32, integers wrap.

cuBLAS steps along one axis of a batch.  Axes that step alike are one (:func:`merged`); it is given the longest, and the
others as a loop of calls, or, where these were many, every matrix by its address.  A matrix without a unit stride is
copied before where that is predicted to be faster than the kernel of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ...analysis.library_time import product_time
from ...ir.dims import Size, product, same
from ...ir.epilogue import PLAIN, Epilogue, Function
from ...ir.kernel import Call, Program
from ...ir.statement import Operand
from ...ir.types import DTYPES, DType
from ...ir.types import dtype as dtype_of
from ...ops.products.epilogues import applied
from ...targets.devices import gpu_of
from ...targets.gpu import PRODUCT_FLOPS, SECTOR_BYTES
from ..expr import stored
from ..index import flatten
from ..text import standalone
from .actions import (
    U8,
    U64,
    WORKSPACE,
    Action,
    Address,
    Convolution,
    Launch,
    Library,
    Part,
    Plan,
    Product,
    Strided,
    align,
)
from .library_products import LIBRARY, LIBRARY_BIAS, library_of, merged, side_of, with_aligned_ends
from .support import AXES, blocks, element, merged_axes, packing

Array = np.ndarray[Any, Any]
TILE = 32
"""Rows and columns of the result that a block of ours computes, and steps along the inner axis between two barriers."""
THREADS = 256
GATE_BLOCKS = 32
"""Of a launch that has work only where a check has found something, or where a product is empty."""
Kinds = tuple[str, str]
"""The dtypes of a product's operands and of its result."""
MOST_CALLS = 16
"""For the axes of a batch that a call does not step along: more would take the host longer than two more launches."""
POINTER_ALIGN = 16
"""Bytes at multiples of which matrices of 16-bit elements begin, where a library is given their addresses."""
FUNCTIONS: Sequence[Function] = ("", "gelu", "gelu_grad")
"""Of epilogues, as ``gradc_epilogue`` numbers them."""
POINTER_AXES = 3
"""Of a batch whose matrices one launch writes the addresses of."""


def product_of(plan: Plan, call: Call, number: int) -> Product:
    """A call's matrix product."""
    a, b = (plan.view(call, operand, axes) for operand, axes in zip(call.args, call.views, strict=True))
    epilogue = call.epilogue.map(lambda operand: plan.part(operand.buffer))
    return Product(a, b, plan.result(call), plan.site(number), call.add, epilogue)


@dataclass(frozen=True)
class _Planned:
    """How a product is computed.

    :param product: what is computed: it, or it without what launches after it do.
    :param libraries: the library's products that this is, in order; none: the kernel of ours computes it.
    :param before: the launches that make what these read: copies of operands, the addresses of matrices.
    :param scratch: bytes of scratch memory that these, and the outputs of a gated product, need.
    :param after: the launches that do what the library's epilogue does not.
    """

    product: Product
    libraries: tuple[Library, ...] = ()
    before: tuple[Launch, ...] = ()
    scratch: int = 0
    after: tuple[Launch, ...] = ()


def _planned(plan: Plan, product: Product) -> _Planned:
    plain, after = _separately(plan, product)
    if plan.own_products or 0 in product.out.shape:
        return _Planned(plain, after=after)
    room = gate_room(plan, product)
    read, before = _with_unit_strides(plan, product, room)
    whole = library_of(read)
    if whole is None:
        return replace(_planned(plan, plain), after=after) if after else _Planned(plain)
    if after:
        whole = replace(whole, otherwise=(*filter(None, [library_of(_separately(plan, read)[0])]), *after))
    end = max([room, *(end_of(plan, launch) for launch in before)])
    libraries = []
    for library in with_aligned_ends(whole, _GPU):
        if len(library.calls) > MOST_CALLS and library.k > 0 and _may_point(library.product):
            library, written = _by_pointers(plan, library, end)
            before += written
            end = end_of(plan, written[-1])
        libraries.append(library)
    return _Planned(product, tuple(libraries), before, end)


def end_of(plan: Plan, launch: Launch) -> int:
    """Where scratch memory that a launch writes ends."""
    (written,) = (launch.args[i] for i in launch.written)
    assert isinstance(written, Part)
    return align(written.start + written.nbytes - plan.scratch_start)


def gated(asked: Product | Convolution) -> tuple[Part, ...]:
    """The outputs that the library must leave as they are once a check has found something: it cannot read the flag, so
    that a kernel of ours keeps their bytes meanwhile.
    """
    return tuple(part for part in asked.written if part.root != WORKSPACE) if asked.site > 0 else ()


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    """Scratch bytes of a product: the workspace has room for the output of a gated one."""
    return _planned(plan, product_of(plan, call, number)).scratch


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    """A call by the library where it takes the product, else by a kernel of ours."""
    planned = _planned(plan, product_of(plan, call, number))
    product, after = planned.product, planned.after
    if not planned.libraries:
        return [*launches_of(product, plan.flag), *after]
    empty = planned.libraries[0].k == 0
    calls: Sequence[Action] = () if empty and product.add else (*planned.before, *planned.libraries)
    return [*gate(plan, product, calls, zero=empty and not product.add), *after]


def gate(plan: Plan, asked: Product | Convolution, calls: Sequence[Action], zero: bool) -> list[Action]:
    """The calls of a library, with kernels of ours before and after them that keep the outputs where a check has found
    something.

    :param zero: the result is a sum over nothing.
    """
    if not calls or not gated(asked):
        return [*calls]
    whole = [replace(part, count=part.nbytes, dtype=U8) for part in gated(asked)]
    if zero:
        given = [(part, part.count, plan.flag, asked.site) for part in whole]
        return [Launch("gradc_gate_zero", GATE_BLOCKS, 256, each, (0,)) for each in given]
    keep: list[Launch] = []
    restore: list[Launch] = []
    end = 0
    for part in whole:
        kept = replace(part, root=WORKSPACE, start=end)  # over temporaries: after a failed check nothing reads them
        end += align(part.nbytes)
        for launches, to, source in ((keep, kept, part), (restore, part, kept)):
            args = (to, source, part.count, plan.flag, asked.site)
            launches.append(Launch("gradc_gate", GATE_BLOCKS, 256, args, (0,)))
    return [*keep, *calls, *restore]


def gate_room(plan: Plan, asked: Product | Convolution) -> int:
    """Scratch bytes for what is kept of gated outputs."""
    return align(max(0, sum(align(part.nbytes) for part in gated(asked)) - plan.scratch_start))


def _separately(plan: Plan, product: Product) -> tuple[Product, tuple[Launch, ...]]:
    """A product without what its epilogue is beyond a bias, and the launch of ours that does this to it."""
    epilogue, out = product.epilogue, product.out
    if not epilogue.beyond_bias:
        return product, ()
    if epilogue.function == "gelu" and epilogue.argument is not None:
        out = replace(out, part=epilogue.argument)
    a = replace(product.a, shape=product.a.shape[::-1], strides=product.a.strides[::-1])
    summed = {"first": a, "second": product.b}.get(epilogue.summed, out)
    rows, columns = summed.shape
    none = replace(out.part, count=0)
    result, sums, argument = product.out.part, epilogue.sums or none, epilogue.argument or none
    does = (FUNCTIONS.index(epilogue.function), int(epilogue.sums is not None))
    seen = (summed.start, *summed.strides, rows, columns)
    args: tuple[Part | int, ...] = (summed.part, *seen, argument, result, sums, *does)
    name = f"gradc_epilogue_{dtype_of(out.part.dtype).name}"
    launch = Launch(name, max(1, -(-columns // TILE)), THREADS, (*args, plan.flag, product.site), (7, 8))
    return replace(product, out=out, epilogue=Epilogue(epilogue.bias)), (launch,)


# -- what the library cannot step along --------------------------------------------------------------------------------


def _by_pointers(plan: Plan, library: Library, start: int) -> tuple[Library, tuple[Launch, ...]]:
    """The same product as one call with the address of each matrix, and the launches that write these addresses to
    scratch memory from ``start`` on.
    """
    p = library.product
    *further, first, second, third = [(1, (0, 0, 0))] * POINTER_AXES + merged(p)
    each = first[0] * second[0] * third[0]
    total = each * prod(count for count, _ in further)
    pointers = plan.space(start, 3 * total, U64)
    places = np.ndindex(*(count for count, _ in further))
    launches = []
    for number, place in enumerate(places):
        firsts, steps = [], []
        for side, operand in enumerate((p.a, p.b, p.out)):
            before = sum(at * strides[side] for at, (_, strides) in zip(place, further, strict=True))
            size = operand.part.dtype.itemsize
            firsts.append(operand.skipped + before * size)
            steps += [strides[side] * size for _, strides in (first, second, third)]
        begin = (Address(x.part.root, x.part.start, x.part.count, x.part.dtype) for x in (p.a, p.b, p.out))
        sizes = (number * each, total, each, second[0], third[0])
        args: list[Part | int] = [pointers, *begin, *sizes, *firsts, *steps]
        launches.append(Launch("gradc_pointers", blocks(each), 256, tuple(args), (0,)))
    return replace(library, pointers=pointers), tuple(launches)


def _may_point(product: Product) -> bool:
    """Whether all matrices of 16-bit elements lie at multiples of :data:`POINTER_ALIGN` bytes if the arrays do, for
    kernels that use tensor cores are not chosen by addresses that lie on the device.
    """
    sides = enumerate((product.a, product.b, product.out))
    return product.a.part.dtype.itemsize > 2 or not any(
        at % POINTER_ALIGN
        for side, operand in sides
        for at in (
            operand.skipped,
            *(strides[side] * operand.part.dtype.itemsize for _, strides in merged(product)),
        )
    )


def _with_unit_strides(plan: Plan, product: Product, start: int) -> tuple[Product, tuple[Launch, ...]]:
    """The product of operands that the library can read, and the launches that copy those which it cannot to scratch
    memory from ``start`` on; the product as it is, if the kernel of ours is predicted to be faster.
    """
    kinds = dtype_of(product.a.part.dtype).name, dtype_of(product.out.part.dtype).name
    copied = [side for side in ("a", "b") if side_of(getattr(product, side), 0) is None]
    if not copied or kinds not in LIBRARY or product.a.shape[-1] == 0:
        return product, ()
    given, launches, seconds = product, [], 0.0
    for side in copied:
        operand: Strided = getattr(product, side)
        packed = _packed(plan, operand, start)
        launch = copying(operand, _held(operand), packed.part, plan.flag, product.site)
        if launch is None:
            return product, ()
        launches.append(launch)
        start = end_of(plan, launch)
        given = replace(given, a=packed) if side == "a" else replace(given, b=packed)
        seconds += _GPU.launch + packed.part.count * (SECTOR_BYTES + operand.part.dtype.itemsize) / _GPU.bandwidth
    flops = 2.0 * prod(product.out.shape) * product.a.shape[-1]
    faster = seconds + product_time(_GPU, kinds[0], flops, 0, 0).bounds["flops"] < flops / PRODUCT_FLOPS
    return (given, tuple(launches)) if faster and library_of(given) is not None else (product, ())


_GPU = gpu_of("sm_90")
"""What a copy is weighed by; as the plan follows from shapes alone, the same for every device."""


def _held(operand: Strided) -> list[int]:
    """The sizes of an operand's axes, of a batch that does not step 1: each matrix once."""
    batch = zip(operand.shape[:-2], operand.strides[:-2], strict=True)
    return [*(1 if step == 0 else size for size, step in batch), *operand.shape[-2:]]


def _packed(plan: Plan, operand: Strided, start: int) -> Strided:
    """Scratch memory for an operand's elements in row-major order, each matrix once."""
    held = _held(operand)
    strides = [0 if size == 1 else prod(held[i + 1 :]) for i, size in enumerate(held)]
    strides[-2:] = [held[-1], 1]
    return Strided(plan.space(start, prod(held), operand.part.dtype), operand.shape, tuple(strides))


def copying(operand: Strided, held: Sequence[int], packed: Part, flag: Part, site: int) -> Launch | None:
    """The launch that copies the first ``held`` elements along each axis of an operand to row-major order; None where
    it has more axes that step differently than the kernel takes.
    """
    sizes, steps = merged_axes(held, operand.strides)
    pad = AXES - len(sizes)
    if pad < 0:
        return None
    sizes, steps = [1] * pad + sizes, [0] * pad + steps
    size = operand.part.dtype.itemsize
    source, to = (replace(part, dtype=np.dtype(f"u{size}")) for part in (operand.part, packed))
    args: list[Part | int] = [source, to, to.count, operand.start, *sizes[1:], *steps, flag, site]
    return Launch(f"gradc_copy_{size}", blocks(to.count), 256, tuple(args), (1,))


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
        steps = [*product.a.strides[-2:], *product.b.strides[-2:], *first[1], *second[1], product.out.strides[-2]]
        bias = product.epilogue.bias
        more = (bias or replace(out, count=0), int(bias is not None), int(product.add), flag, product.site)
        launches.append(
            Launch(
                _function(dtype_of(product.a.part.dtype), dtype_of(out.dtype)),
                blocks,
                THREADS,
                (product.a.part, product.b.part, out, *sizes, *steps, *more),
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


def multiplied(
    a: Array,
    b: Array,
    out: Array,
    add: bool = False,
    epilogue: Epilogue[Array] = PLAIN,
) -> None:
    """``a @ b`` (+ ``out``) with an epilogue to ``out``, as the library does it: short floats are added up in f32, and
    it is rounded once.
    """
    with np.errstate(all="ignore"):
        narrow = dtype_of(a.dtype).is_float and a.itemsize < 4
        a, b = (x.astype(np.float32) if narrow else x for x in (a, b))
        total = np.matmul(a, b)
        for term in (out if add else None, epilogue.bias):
            total = total if term is None else total + term.astype(a.dtype)
        argument = epilogue.argument
        if argument is not None and epilogue.function == "gelu":
            argument.reshape(total.shape)[...] = total.astype(out.dtype)
        if epilogue.function:
            at = None if argument is None else argument.reshape(total.shape).astype(a.dtype)
            total = applied(epilogue.function, total, at)
        if epilogue.sums is not None:
            summed = {"first": a.T, "second": b, "result": total}[epilogue.summed]
            epilogue.sums[...] = summed.sum(0).astype(out.dtype)
        out[...] = total.astype(out.dtype)


# -- the text ----------------------------------------------------------------------------------------------------------


def support(program: Program, calls: Sequence[Call]) -> list[str]:
    """What a program's products need of us: the kernel for those that the library may not take, the gate where checks
    come before one.
    """
    own = sorted({_kinds(program, call) for call in calls if not _library_surely(program, call)})
    taken = [call for call in calls if _kinds(program, call) in LIBRARY]
    copied = {
        program.buffer[operand.buffer].type.dtype.itemsize
        for call in taken
        if not _library_surely(program, call)
        for operand in call.args
    }
    return [
        matmul_text(own) if own else "",
        *copying_texts(copied),
        standalone("cuda/pointers.cu") if any(not _one_axis(program, call) for call in taken) else "",
        *gate_texts(program, calls),
        epilogue_text({_kinds(program, call)[1] for call in calls if call.epilogue.beyond_bias}),
    ]


def copying_texts(sizes: Collection[int]) -> list[str]:
    """The functions that :func:`copying` starts, for elements of so many bytes."""
    return [standalone("cuda/pack.cu"), *(packing("copy", size) for size in sorted(sizes))] if sizes else []


def gate_texts(program: Program, calls: Sequence[Call]) -> list[str]:
    """The functions that :func:`gate` starts, where checks come before calls."""
    checks = any(s.op == "check" for kernel in program.kernels for s in kernel.body)
    return [standalone("cuda/gate.cu")] if calls and checks else []


def without_library(program: Program, calls: Sequence[Call]) -> str:
    """The text beside :func:`support` with which kernels of ours compute every product of a program."""
    every = {_kinds(program, call) for call in calls}
    there = {_kinds(program, call) for call in calls if not _library_surely(program, call)}
    missing = sorted(every - there)
    return matmul_text(missing) if not there else _entries(missing, there)


def epilogue_text(names: Collection[str]) -> str:
    """``gradc_epilogue_NAME`` for dtypes; "" for none."""
    declared = (
        "const {0} *from, i64 start, i64 down, i64 across, i64 rows, i64 columns, const {0} *argument, {0} *to, {0}"
        " *sums, i64 function, i64 summed, const u64 *flag, i64 site"
    )
    given = "from, start, down, across, rows, columns, argument, to, sums, function, summed"
    entries = [
        f"""{element(DTYPES[name], "ended")}
extern "C" __global__ void __launch_bounds__(256) gradc_epilogue_{name}({declared.format(stored(DTYPES[name]))}) {{
  if (!gradc_stopped(flag, site)) gradc_epilogue<gradc_ended_{name}>({given});
}}"""
        for name in sorted(names)
    ]
    return "\n".join([standalone("cuda/epilogue.cu"), *entries]) if entries else ""


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
    more = f"const {result} *bias, i64 biased, i64 add, const u64 *flag, i64 site"
    declared = f"const {ctype} *a, const {ctype} *b, {result} *out, {sizes}, {strides}, {more}"
    head = f'extern "C" __global__ void __launch_bounds__(256) {_function(read, written)}({declared})'
    kinds = f"gradc_element_{read.name}, gradc_element_{written.name}"
    return f"""{head} {{
  if (gradc_stopped(flag, site)) return;
  gradc_matmul<{kinds}>(a + from_a, b + from_b, out, m, n, k, count1, {arguments}, biased ? bias : nullptr, add);
}}"""


_STRIDES = ("a_m", "a_k", "b_k", "b_n", "a_0", "b_0", "out_0", "a_1", "b_1", "out_1", "out_m")


def _library_surely(program: Program, call: Call) -> bool:
    """Whether the library takes a product whatever its sizes."""
    if _kinds(program, call) not in LIBRARY:
        return False
    if call.epilogue and (_kinds(program, call) not in LIBRARY_BIAS or len(call.result_axes) > 2):
        return False  # what it does beyond a bias is left to a launch where the library does not take that
    sizes = dict(call.axes)
    *_, m, inner = call.views[0]
    n = call.result_axes[-1]
    for operand, rows, columns in zip(call.args, (m, inner), (inner, n), strict=True):
        steps = _strides(program, operand)
        down, across = steps.get(rows, 0), steps.get(columns, 0)
        if not (across == 1 and _covers(down, sizes[columns])) and not (down == 1 and _covers(across, sizes[rows])):
            return False
    inner_size, result = sizes[inner], product(sizes[axis] for axis in call.result_axes)
    if isinstance(inner_size, int) and inner_size > 0:
        return True
    # a sum over nothing is written as the zeros of a whole buffer
    return not call.epilogue and same(product(program.buffer[call.out.buffer].type.shape), result)


def _one_axis(program: Program, call: Call) -> bool:
    """Whether a product's batch is one axis whatever the sizes, or none."""
    sizes, batch = dict(call.axes), call.result_axes[:-2]
    seen = [_strides(program, operand) for operand in (*call.args, call.out)]
    return all(steps.get(a, 0) == sizes[b] * steps.get(b, 0) for steps in seen for a, b in pairwise(batch))


def _strides(program: Program, operand: Operand) -> dict[str, Size]:
    """Elements that an operand steps along each axis of its call."""
    return dict(flatten(operand.index, program.buffer[operand.buffer].type.shape).terms)


def _covers(stride: Size, extent: Size) -> bool:
    return stride >= extent if isinstance(stride, int) and isinstance(extent, int) else stride == extent
