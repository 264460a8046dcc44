"""fuse_bias: a vector that a kernel only adds to the rows of a product is added by the product's library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.dims import Size, same
from ...ir.dims import product as dims_product
from ...ir.kernel import Buffer, Call, Kernel, Program
from ...ir.node import REGISTRY
from ...ir.statement import Index, Operand, Stmt
from ...ir.types import BF16, F16, F32, DType
from ...targets.gpu import MATRIX_ALIGN
from ..manager import program_pass

DTYPES = (F16, BF16, F32)
"""Of operands, bias and result alike: what cuBLASLt adds a bias to."""


@program_pass("REAL")
def fuse_bias(program: Program) -> Program:
    """call t[m, n] <- matmul a[m, k], b[n, k];  store y[i, h, j] <- load t[i*H + h, j] + load v[j]  ->  call t[m, n] <-
    matmul a[m, k], b[n, k] + v[n], where t is y, seen as a matrix

    The library adds up in f32 and rounds the sum with the bias, where a product in 16 bits was rounded by itself.
    Operands are whole matrices, whose rows and those of the result are multiples of 16 bytes, as the library's kernels
    with a bias have them.
    """
    for call in [step for step in program.steps if isinstance(step, Call)]:
        found = _bias_of(program, call)
        if found is None:
            continue
        kernel, store, bias = found
        own = replace(call, bias=Operand(bias.buffer, (Index.of(call.result_axes[-1]),)), note=kernel.note)
        steps = tuple(own if step is kernel else step for step in program.steps if step is not call)
        program = replace(program, steps=steps, buffers=_seen_in(program, call.out.buffer, store.buffer))
    return program


def _seen_in(program: Program, product: str, result: str) -> tuple[Buffer, ...]:
    """The buffers, with that of a product as the matrix that another one is."""
    view = replace(program.buffer[product], alias=result, kind=program.buffer[result].kind)
    others = [b for b in program.buffers if b.name != product]
    return tuple(each for b in others for each in ((b, view) if b.name == result else (b,)))


def _bias_of(program: Program, call: Call) -> tuple[Kernel, Stmt, Stmt] | None:
    """The kernel that does nothing but add a bias to a product that nobody else reads, its store, and its load of the
    bias.
    """
    product = call.out.buffer
    if not _takes_bias(program, call) or any(b.alias == product for b in program.buffers):
        return None
    readers = [step for step in program.steps if step is not call and product in (*step.reads, *step.writes)]
    kernel = readers[0] if len(readers) == 1 else None
    found = _sum(kernel, product, program.types[product].dtype) if isinstance(kernel, Kernel) else None
    if found is None:
        return None
    assert isinstance(kernel, Kernel)
    store, load, bias = found
    result, matrix, axes = program.types[store.buffer], program.types[product], (*kernel.rows, *kernel.cols)
    whole = [i.variable for i in store.index] == [axis for axis, _ in axes] and all(
        same(size, own) for (_, size), own in zip(axes, result.shape, strict=True)
    )
    same_rows = same(result.shape[-1], matrix.shape[-1]) and [i.variable for i in bias.index] == [axes[-1][0]]
    same_places = _place(store.index, result.shape) == _place(load.index, matrix.shape)
    alike = result.dtype is matrix.dtype and same(dims_product(result.shape), dims_product(matrix.shape))
    return (kernel, store, bias) if alike and whole and same_rows and same_places else None


def _place(index: Sequence[Index], shape: Sequence[Size]) -> tuple[Size, dict[str, Size]]:
    """The number of an element of a row-major buffer."""
    total = Index()
    for entry, size in zip(index, shape, strict=True):
        total = total * size + entry
    return total.const, dict(total.terms)


def _takes_bias(program: Program, call: Call) -> bool:
    """Whether a call is a product of two whole matrices in one dtype, written to a temp in the same, whose rows the
    library's kernels with a bias take.
    """
    out, types = program.buffer[call.out.buffer], program.types
    dtype, sizes = out.type.dtype, dict(call.axes)
    if not REGISTRY[call.op].contraction or out.kind != "temp" or out.alias or dtype not in DTYPES:
        return False
    whole = all(
        not operand.scale and len(operand.index) == 2 and all(i.variable for i in operand.index)
        for operand in (*call.args, call.out)
    )
    plain = whole and not call.bias and not call.parts and len(call.axes) == 3
    if not plain or [i.variable for i in call.out.index] != call.result_axes:
        return False
    rows = [types[o.buffer].shape[-1] for o in (*call.args, call.out)]
    (summed,) = (size for axis, size in sizes.items() if axis not in call.result_axes)
    unit = MATRIX_ALIGN * 8 // dtype.bits
    aligned = all(isinstance(size, int) and size > 0 and size % unit == 0 for size in (*rows, summed))
    return aligned and all(types[o.buffer].dtype is dtype for o in call.args)


def _sum(kernel: Kernel, product: str, dtype: DType) -> tuple[Stmt, Stmt, Stmt] | None:
    """The statements of a kernel that does nothing but store a sum of two values that it loads, one of them of a
    product, added in f32: the store, the load of the product, and the other.
    """
    known = {s.name: s for s in kernel.body if s.name}
    stores = [s for s in kernel.body if not s.name and s.op != "phase"]
    if len(stores) != 1 or stores[0].op != "store" or any(s.where for s in kernel.body):
        return None

    def converted(name: str, to: DType) -> tuple[Stmt, int]:
        """What a value is converted from, and how many statements that takes; itself, if all are in f32."""
        s = known[name]
        return (known[s.args[0]], 2) if s.op == "cast" and s.dtype is to else (s, 1)

    (store,) = stores
    total, count = converted(store.args[0], dtype)
    if total.op != "add" or total.dtype is not F32:
        return None
    terms = [converted(name, F32) for name in total.args]
    loads = [s for s, _ in terms]
    if count + sum(n for _, n in terms) != len(known) or any(s.op != "load" or s.dtype is not dtype for s in loads):
        return None
    of_product = [s for s in loads if s.buffer == product]
    others = [s for s in loads if s.buffer != product]
    return (store, of_product[0], others[0]) if len(of_product) == len(others) == 1 else None
