"""Residuals: the values that forward keeps for backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from .. import knobs
from ..errors import InvalidProblem
from ..ir.types import Type
from ..passes.schedule.residual import Residual
from ..runtime.cuda.on_device import to_host
from ..runtime.host.arrays import Arguments
from ..runtime.host.tensors import borrowed
from ..runtime.located import located
from ..runtime.torch_private import version_count
from .options import Options

Orders = dict[str, tuple[int, ...]]
"""Array name -> its axes in memory order, from slowest to fastest."""


class Compiled(Protocol):
    """The part of :class:`gradc.Module` that residuals use."""

    options: Options
    residuals: tuple[Residual, ...]

    @property
    def described(self) -> str: ...

    def equals(self, other: Any) -> bool: ...


class Residuals:
    """The values kept for backward: arrays by name, and the dims of the forward call.

    They belong to one call of one module: backward rejects those of another module, and arrays that were changed in
    place since (torch's version counter tells; arrays of other libraries are compared by a digest if
    GRADC_CHECK_RESIDUALS is set).
    """

    def __init__(
        self,
        module: Compiled,
        arrays: Arguments,
        inputs: Arguments,
        dims: Mapping[str, int],
        cotangent_types: Mapping[str, Type],
        donated: Collection[str] = (),
    ):
        # the module whose forward was run: if `orders` is set, a variant of the module that was called
        self.module = module
        self.arrays, self.dims, self.donated = dict(arrays), dict(dims), frozenset(donated)
        self.inputs = {name: value for name, value in inputs.items() if name not in self.donated}
        self.cotangent_types = cotangent_types
        self.orders: Orders = {}
        self._stamp()

    def _stamp(self) -> None:
        self.arrays, self._versions = borrowed(self.arrays)
        self._sums = {n: _checksum(a) for n, a in self.arrays.items()} if knobs.CHECK_RESIDUALS.get() else {}

    def __getstate__(self) -> dict[str, Any]:
        self.unchanged()
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_versions", "_sums")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._stamp()

    def carrying(self, arrays: Arguments) -> Residuals:
        """The same residuals over other memory: what somebody else (autograd) keeps of them in the meantime.

        It holds no inputs, so :meth:`inner` gives none.

        :param arrays: by the names of :attr:`arrays`, or none of them.
        """
        other = object.__new__(type(self))
        other.__setstate__({**self._state(), "arrays": dict(arrays), "inputs": {}})
        return other

    def of(self, orders: Orders, inputs: Arguments) -> Residuals:
        """These residuals, of a variant, as those of a call of the base module with ``inputs``; ``inner`` returns the
        latter.
        """
        self.orders = orders
        self.inputs = {name: inputs.get(name, value) for name, value in self.inputs.items()}
        return self

    def inner(self, name: str) -> Any:
        """The object that was passed as an input.

        :raises KeyError: there is no such input, or it was donated.
        """
        if name in self.donated:
            raise KeyError(f"the input {name!r} was donated: its memory is an output's now")
        if name not in self.inputs:
            raise KeyError(f"no input {name!r}; there are {', '.join(self.inputs)}")
        return self.inputs[name]

    @property
    def nbytes(self) -> int:
        """The size of the residuals that are neither inputs nor outputs, in bytes."""
        own = {r.name for r in self.module.residuals if not r.borrowed}
        return sum(located(a).nbytes for n, a in self.arrays.items() if n in own)

    def unchanged(self) -> None:
        """InvalidProblem if an array was changed in place since forward."""
        for name, before in self._versions.items():
            now = version_count(self.arrays[name])
            if now != before:
                raise InvalidProblem(
                    f"{self._called(name)} was changed in place between forward and backward, which reads it as it was"
                    f" (torch's count of changes was {before} and is {now}):"
                    f" {'change' if self._output(name) else 'give forward'} a clone, or change it after backward"
                )
        for name, sum_before in self._sums.items():
            if _checksum(self.arrays[name]) != sum_before:
                raise InvalidProblem(
                    f"{self._called(name)} was changed between forward and backward; residuals borrow"
                    f" {'outputs' if self._output(name) else 'inputs'}"
                )

    def _output(self, name: str) -> str:
        """The name of the output that a residual is, or ""."""
        return next((r.output for r in self.module.residuals if r.name == name), "")

    def _called(self, name: str) -> str:
        if output := self._output(name):
            return f"the output {output!r}"
        return f"the input {name!r}" if name in self.inputs else f"the residual {name!r}"

    def __repr__(self) -> str:
        return f"Residuals({', '.join(self.arrays)})"


def _checksum(value: Any) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(to_host(value)).tobytes()).hexdigest()
