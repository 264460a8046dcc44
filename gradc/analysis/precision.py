"""The dtypes that a program computes and accumulates in, and whether its bits are reproducible, derived from its
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.kernel import Call, Kernel, Program, alternatives
from ..ir.node import REGISTRY
from ..ir.statement import REDUCTIONS, Stmt
from .combine import combines
from .cost import deterministic as is_deterministic

_SUMS = ("sum", "prod", "logsumexp", "affine")


@dataclass(frozen=True)
class Precision:
    """Derived from the kernels, never typed in.

    :param math: float dtypes in which values are computed, sums and extrema included; what only moves, casts, selects
        or compares is not computed.
    :param accumulator: dtypes that sums and products (those of a matrix product too) are kept in at least; a strategy
        may keep parts of a sum wider.
    :param deterministic: same inputs, same build, same machine: same bits.
    :param bit_stable: the bits do not depend on the number of threads.
    """

    math: tuple[str, ...]
    accumulator: tuple[str, ...]
    deterministic: bool
    bit_stable: bool


def precision_of(program: Program, target: str) -> Precision:
    """(program, target) -> its :class:`Precision`."""
    math: set[str] = set()
    sums: set[str] = set()
    types = program.types
    deterministic, calls = True, False
    for step in program.steps:
        for item in alternatives(step):
            if isinstance(item, Kernel):
                deterministic &= all(
                    is_deterministic(item.strategies[part.buffer], part, types)
                    for part in combines(item, types)
                    if part.buffer in item.strategies
                )
                for s in item.body:
                    if s.dtype is not None and s.dtype.is_float and _computes(s):
                        math.add(s.dtype.name)
                        if _accumulates(s):
                            sums.add(s.dtype.name)
            elif isinstance(item, Call) and REGISTRY[item.op].converts:
                calls = True
                dtype = program.buffer[item.out.buffer].type.dtype
                if dtype.is_float:
                    math.add(dtype.name)
                    sums.add(dtype.name)
    # NumPy's own matrix product may add up in another order with another number of threads
    return Precision(
        tuple(sorted(math)), tuple(sorted(sums)), deterministic, deterministic and not (calls and target == "numpy")
    )


def _computes(s: Stmt) -> bool:
    """Whether a statement does arithmetic, as opposed to moves, casts, selects and compares."""
    op = REGISTRY.get(s.op)
    return (
        s.op in REDUCTIONS
        or s.op in ("scan", "accum")
        or (op is not None and not getattr(op, "in_place_of_dtype", False))
    )


def _accumulates(s: Stmt) -> bool:
    """Whether a statement sums or multiplies up more than one value."""
    return REDUCTIONS.get(s.op, s.combine if s.op in ("scan", "accum") else "") in _SUMS
