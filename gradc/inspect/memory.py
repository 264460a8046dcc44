"""What a module allocates at given sizes, predicted."""

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
    """Bytes that one forward and one backward allocate beyond the caller's own arrays (inputs, donated ones too,
    cotangents, ``out=``, ``workspace=``).

    Not in it: what an allocator adds (the pool of the CPU at most an eighth), partial sums of a product of few rows and
    columns over a long axis (at most 16 times its result), and copies of inputs that do not lie in order.  The target
    numpy has temporaries that nobody counts.

    :ivar outputs: the values of forward.  :ivar residuals: what forward keeps for backward beyond its inputs.
    :ivar forward_workspace, backward_workspace: temporaries and scratch, free again after the call.
    :ivar gradients: what backward gives.
    :ivar threads: what the threads of the CPU keep from call to call, all together: packed parts of a product's
        operands, rows that a kernel holds.
    """

    outputs: int
    residuals: int
    forward_workspace: int
    gradients: int
    backward_workspace: int
    threads: int = 0

    @property
    def forward(self) -> int:
        """The most that forward allocates while it runs."""
        return self.outputs + self.residuals + self.forward_workspace

    @property
    def backward(self) -> int:
        """The most that is allocated while backward runs and its caller still has the values of forward."""
        return self.outputs + self.residuals + self.gradients + self.backward_workspace

    @property
    def peak(self) -> int:
        """The most at any time, what threads keep included."""
        return max(self.forward, self.backward) + self.threads


def predicted(executables: Mapping[str, Executable], residuals: frozenset[str], dims: Mapping[str, int]) -> Memory:
    """The memory of ``forward`` and ``backward``.

    :param residuals: the outputs of forward that are kept for backward.
    :raises InvalidProblem: a dim has no size.
    """
    outputs: dict[str, dict[str, int]] = {}
    space: dict[str, int] = {}
    threads = 0
    for direction, executable in executables.items():
        bound = {**executable.fixed_dims, **{d: n for d, n in dims.items() if d in executable.program.dims}}
        missing = [d for d in executable.program.dims if d not in bound]
        if missing:
            raise InvalidProblem(f"memory of {executable.program.name} depends on {', '.join(missing)}: give a size")
        space[direction] = executable.workspace_size(**bound)
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
