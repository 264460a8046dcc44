"""Which kernels of matrix products a program runs beside those of f32, which every host has: the runtime's libraries
(``templates/cpu/gemm_*.c``) that have to be there before it is called.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.kernel import Call, Program, alternatives
from ..ir.node import REGISTRY
from ..ir.types import BF16, F64


def product_kernels(program: Program) -> frozenset[str]:
    """Names among ``f64``, ``bf16`` and ``i8``: ``bf16`` where both operands are, and the result is f32."""
    return frozenset(_kernels(program))


def _kernels(program: Program) -> Iterator[str]:
    calls = (item for step in program.steps for item in alternatives(step) if isinstance(item, Call))
    for call in calls:
        op = REGISTRY[call.op]
        if not op.multiplies:
            continue
        dtype = program.buffer[call.out.buffer].type.dtype
        operands = [call.args[number] for number in op.converts]
        if dtype.is_integer:
            yield "i8"
        elif dtype is F64:
            yield "f64"
        elif operands and all(program.buffer[o.buffer].type.dtype is BF16 and not o.scale for o in operands):
            yield "bf16"
