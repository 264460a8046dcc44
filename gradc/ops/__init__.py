"""Every op, callable: ``ops.exp(x)``.  One record per op lives in the modules of this package."""

from __future__ import annotations

from ..ir.node import REGISTRY, Node
from ..ir.op import Composite, Library, Op, Primitive
from . import (  # the records register themselves
    contract,
    indexing,
    loss,
    movement,
    normalize,
    pointwise,
    quantization,
    reduce,
)


def __getattr__(name: str) -> Op:
    try:
        return REGISTRY[name]  # type: ignore[no-any-return]
    except KeyError:
        raise AttributeError(f"there is no op {name!r}; dir(gradc.ops) lists them") from None


def __dir__() -> list[str]:
    return sorted(REGISTRY)


__all__ = ["REGISTRY", "Composite", "Library", "Node", "Op", "Primitive", "contract", "indexing", "loss", "movement", "normalize", "pointwise", "quantization", "reduce"]
