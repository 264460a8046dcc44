"""Every op, callable: ``ops.exp(x)``.  One record per op lives in the modules of this package."""

from __future__ import annotations

import importlib

from ..ir.node import REGISTRY, Node
from ..ir.op import Composite, Library, Op, Primitive

_MODULES = (
    "pointwise",
    "elementary",
    "special",
    "rounding",
    "logic",
    "activations",
    "piecewise",
    "movement",
    "reduce",
    "statistics",
    "norms",
    "indexing",
    "contract",
    "bits",
    "quantization",
    "block_scales",
    "normalize",
    "loss",
    "losses",
    "class_losses",
    "tables",
    "bags",
    "scatters",
    "sparse",
    "sample",
)
for _module in _MODULES:  # the records register themselves
    importlib.import_module(f".{_module}", __name__)
from .statistics import std_mean, var_mean  # noqa: E402  (pairs of ops, no op)

# A module may bear an op's name (embedding); ops.NAME is the op.
globals().update(REGISTRY)


def __getattr__(name: str) -> Op:
    try:
        return REGISTRY[name]  # type: ignore[no-any-return]
    except KeyError:
        raise AttributeError(f"there is no op {name!r}; dir(gradc.ops) lists them") from None


def __dir__() -> list[str]:
    return sorted({*REGISTRY, "std_mean", "var_mean"})


__all__ = ["REGISTRY", "Composite", "Library", "Node", "Op", "Primitive", "std_mean", "var_mean"]
