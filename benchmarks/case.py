"""One CPU case: a model in gradc's ops and in torch's, and its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    :param ours: the forward in gradc's ops.  :param theirs: the same in torch, called with ``(torch, **tensors)``.
    :param types: of the inputs.
    :param wrt: whose gradients are timed; none: the forward is.
    :param draw: integer inputs.
    :param forward: time forward and backward, else backward alone.
    """

    id: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    types: Mapping[str, str]
    wrt: Sequence[str]
    draw: Mapping[str, Callable[[np.random.Generator], Array]] = field(default_factory=dict)
    forward: bool = False
    scale: float = 1.0

    def arrays(self) -> dict[str, Array]:
        """The inputs, the same in every process."""
        import gradc

        random = np.random.default_rng(0)
        out: dict[str, Array] = {}
        for name, text in self.types.items():
            if name in self.draw:
                out[name] = self.draw[name](random).astype(type_of(text).dtype.np)
            else:
                type_ = type_of(text)
                values = random.standard_normal(type_.concrete({})) * self.scale
                out[name] = (
                    values.astype(type_.dtype.np)
                    if type_.dtype.is_float
                    else random.integers(-127, 128, type_.concrete({})).astype(type_.dtype.np)
                )
        assert gradc
        return out

    @property
    def is_bf16(self) -> bool:
        """Whether its floats are bf16; else they are f32."""
        return any(text.startswith("bf16") for text in self.types.values())

    def upstream(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        return np.random.default_rng(1).standard_normal(tuple(shape)).astype(dtype)


def type_of(text: str) -> Any:
    from gradc.ir.types import parse_type

    return parse_type(text)


def uniform(size: int, *shape: int) -> Callable[[np.random.Generator], Array]:
    return lambda random: random.integers(0, size, shape)


def zipf(size: int, *shape: int) -> Callable[[np.random.Generator], Array]:
    return lambda random: np.minimum(random.zipf(1.1, shape), size) - 1
