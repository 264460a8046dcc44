"""Wall-clock time of what a compiled program runs: of forwards by a clock around each step, of backwards by hooks of
autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Time:
    """The time of one step of a program, a region of gradc or a call of torch, from its second call on: the first one
    compiles.

    :param op: ``region`` and its number, or the overload's name.
    :ivar calls: how many were measured.
    :ivar forward: seconds of all calls.
    :ivar backward: seconds of what autograd ran for their results; 0 where it ran nothing.
    """

    op: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0
    _compiled: bool = field(default=False, repr=False)

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward

    def measured(self, run: Callable[[], Iterable[Any]], given: Iterable[Any]) -> None:
        """Run the step and add its time; the time of its backward is added when that runs.

        :param run: gives the results.
        :param given: what the step reads: nodes of autograd that these have are not the step's.
        """
        if not self._compiled:
            run()
            self._compiled = True
            return
        before = {id(x.grad_fn) for x in given if isinstance(x, torch.Tensor)}
        began = _now()
        results = run()
        self.forward += _now() - began
        self.calls += 1
        nodes = {id(x.grad_fn): x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None}
        for key, node in nodes.items():
            if key not in before:
                self._hook(node)

    def _hook(self, node: Any) -> None:
        began = [0.0]

        def start(cotangents: Any) -> None:
            began[0] = _now()

        def stop(gradients: Any, cotangents: Any) -> None:
            self.backward += _now() - began[0]

        node.register_prehook(start)
        node.register_hook(stop)


def _now() -> float:
    """Seconds, once the GPU, if one is used, has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
