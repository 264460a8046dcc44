"""The library functions that a program's calls name: what each does on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...ir.kernel import Call, Program, alternatives
from . import convolutions, grouped, products, put_rows, sorts
from .actions import Action, Plan


@dataclass(frozen=True)
class CudaCall:
    """A library function.

    :param scratch: ``(plan, call, number of its step)`` -> bytes of scratch.
    :param actions: the same -> what is started.
    :param text: ``(program, calls)`` -> the CUDA functions of all calls of it in a program, in pieces: calls of
        different functions may need the same ones.
    """

    scratch: Callable[[Plan, Call, int], int]
    actions: Callable[[Plan, Call, int], list[Action]]
    text: Callable[[Program, Sequence[Call]], Sequence[str]]


CALLS = {
    "matmul": CudaCall(products.scratch_of, products.actions_of, products.support),
    **{
        op: CudaCall(grouped.scratch_of, grouped.actions_of, grouped.support(op))
        for op in ("grouped_matmul", "grouped_outer")
    },
    **{
        op: CudaCall(convolutions.scratch_of, convolutions.actions_of, convolutions.support)
        for op in convolutions.COMPUTED
    },
    "argsort_rows": CudaCall(sorts.scratch_of, sorts.actions_of, sorts.support),
    "put_rows": CudaCall(put_rows.scratch_of, put_rows.actions_of, put_rows.support),
}
"""The functions by the name of their op."""


def support(program: Program) -> str:
    """The CUDA functions that a program's calls need."""
    calls = [item for step in program.steps for item in alternatives(step) if isinstance(item, Call)]
    texts = [text for op, f in CALLS.items() for text in f.text(program, [c for c in calls if c.op == op])]
    return "\n".join(text for text in dict.fromkeys(texts) if text)
