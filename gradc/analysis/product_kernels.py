"""Which kernels of matrix products a program runs beside those of f32, which every host has: the runtime's libraries
(``templates/cpu/gemm_*.c``) that have to be there before it is called.
"""

from __future__ import annotations

from ..ir.kernel import Call, Program, alternatives
from ..ir.node import REGISTRY
from ..ir.types import BF16, F64


def product_kernels(program: Program) -> frozenset[str]:
    """Names among ``f64``, ``bf16`` and ``i8``: see :func:`kernels_of`."""
    calls = (item for step in program.steps for item in alternatives(step) if isinstance(item, Call))
    return frozenset({kernels_of(call, program) for call in calls if REGISTRY[call.op].multiplies} - {"f32"})


def kernels_of(call: Call, program: Program) -> str:
    """Those of a product: ``f32``, ``f64``, ``i8``, or ``bf16`` where both operands are, and the result is f32."""
    dtype = program.buffer[call.out.buffer].type.dtype
    if dtype.is_integer:
        return "i8"
    if dtype is F64:
        return "f64"
    operands = [call.args[number] for number in REGISTRY[call.op].converts]
    return "bf16" if all(program.buffer[o.buffer].type.dtype is BF16 and not o.scale for o in operands) else "f32"
