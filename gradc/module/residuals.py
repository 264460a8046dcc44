"""Residuals: what forward keeps for backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from .. import knobs
from ..errors import InvalidProblem
from ..ir.types import Type
from ..options import Options
from ..runtime.cuda.on_device import to_host
from ..runtime.host.arrays import Arguments
from ..runtime.host.tensors import borrowed
from ..runtime.located import located

Orders = dict[str, tuple[int, ...]]
"""The axes from slowest to fastest, of arrays by name."""


class Compiled(Protocol):
    """The module whose forward kept residuals, as backward looks at it: :class:`gradc.Module`."""

    options: Options

    @property
    def described(self) -> str: ...

    def equals(self, other: Any) -> bool: ...


class Residuals:
    """What forward keeps for backward: arrays by name, and the forward's dims.

    They belong to one call of one module: backward refuses those of another, and arrays that were changed in place
    since (as torch counts changes; an array of another library has no count, and is compared by a digest where
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
        # whose forward kept them: a variant of the one that was called, where `orders` are not its own
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
        """The same, kept by a variant of the module that was called; ``inner`` gives what was given to that."""
        self.orders = orders
        self.inputs = {name: inputs.get(name, value) for name, value in self.inputs.items()}
        return self

    def inner(self, name: str) -> Any:
        """The plain value of an input, untouched: the very object that was given.

        :raises KeyError: there is no such input; a donated one is gone.
        """
        if name in self.donated:
            raise KeyError(f"the input {name!r} was donated: its memory is an output's now")
        if name not in self.inputs:
            raise KeyError(f"no input {name!r}; there are {', '.join(self.inputs)}")
        return self.inputs[name]

    @property
    def nbytes(self) -> int:
        """Bytes held beyond the inputs."""
        return sum(located(a).nbytes for n, a in self.arrays.items() if n not in self.inputs)

    def unchanged(self) -> None:
        """InvalidProblem if an array was changed in place since forward."""
        for name, before in self._versions.items():
            now = self.arrays[name]._version
            if now != before:
                raise InvalidProblem(
                    f"{self._called(name)} was changed in place between forward and backward, which reads it as it was"
                    f" (torch's count of changes was {before} and is {now}): give forward a clone, or change it after"
                    " backward"
                )
        for name, sum_before in self._sums.items():
            if _checksum(self.arrays[name]) != sum_before:
                raise InvalidProblem(
                    f"{self._called(name)} was changed between forward and backward; residuals borrow inputs"
                )

    def _called(self, name: str) -> str:
        return f"the input {name!r}" if name in self.inputs else f"the residual {name!r}"

    def __repr__(self) -> str:
        return f"Residuals({', '.join(self.arrays)})"


def _checksum(value: Any) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(to_host(value)).tobytes()).hexdigest()
