"""Prediction of the memory that a module allocates for given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidProblem
from ..ir.dims import evaluate

if TYPE_CHECKING:
    from ..runtime.executable import Executable


@dataclass(frozen=True)
class Memory:
    """The bytes that one forward and one backward allocate, not counting the caller's arrays (inputs, also donated
    ones, cotangents, ``out=``, ``workspace=``).

    Not included: the allocator's overhead (for the CPU's pool at most an eighth), partial sums of a split-K matrix
    product (at most 16 times its result), copies of non-contiguous inputs, and the temporaries of the target numpy.

    :ivar outputs: the results of forward.  :ivar residuals: values kept for backward, except inputs.
    :ivar forward_workspace, backward_workspace: temporaries and scratch memory, freed after the call.
    :ivar gradients: the results of backward.
    :ivar threads: thread-local memory of all CPU threads, kept between calls: packed panels of matrix products, rows
        cached by kernels.
    """

    outputs: int
    residuals: int
    forward_workspace: int
    gradients: int
    backward_workspace: int
    threads: int = 0

    @property
    def forward(self) -> int:
        """The peak of the memory allocated while forward runs."""
        return self.outputs + self.residuals + self.forward_workspace

    @property
    def backward(self) -> int:
        """The peak of the memory allocated while backward runs and its caller still holds the results of forward."""
        return self.outputs + self.residuals + self.gradients + self.backward_workspace

    @property
    def peak(self) -> int:
        """The overall peak, including thread-local memory."""
        return max(self.forward, self.backward) + self.threads


def predicted(executables: Mapping[str, Executable], residuals: frozenset[str], dims: Mapping[str, int]) -> Memory:
    """The predicted memory of ``forward`` and ``backward``.

    :param residuals: the outputs of forward that are kept for backward.
    :raises InvalidProblem: a dim is not given.
    """
    outputs: dict[str, dict[str, int]] = {}
    space: dict[str, int] = {}
    threads = 0
    for direction, executable in executables.items():
        bound = {**executable.fixed_dims, **{d: n for d, n in dims.items() if d in executable.program.dims}}
        missing = [d for d in executable.program.dims if d not in bound]
        if missing:
            raise InvalidProblem(f"memory of {executable.program.name} depends on {', '.join(missing)}: give a size")
        space[direction] = executable.own_workspace(**bound)
        threads = max(threads, executable.thread_bytes(bound))
        outputs[direction] = {
            name: 0 if executable.output_buffers[name] in executable.donated else evaluate(type_.nbytes, bound)
            for name, type_ in executable.outputs.items()
        }
    forward = outputs["forward"]
    kept = sum(size for name, size in forward.items() if name in residuals)
    return Memory(
        sum(forward.values()) - kept,
        kept,
        space["forward"],
        sum(outputs.get("backward", {}).values()),
        space.get("backward", 0),
        threads,
    )
