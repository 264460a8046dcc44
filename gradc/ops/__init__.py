"""Every op, callable: ``ops.exp(x)``.  One record per op lives in the modules of this package, in folders by family."""

from __future__ import annotations

import importlib

from ..ir.node import REGISTRY, Node
from ..ir.op import Composite, Function, Library, Op, Primitive

_MODULES = {
    "elementwise": "pointwise elementary special bessel rounding logic activations piecewise bits random",
    "shapes": "movement diagonals windows views",
    "reductions": "reduce window_reductions statistics norms scans differences sorts quantiles",
    "indexing": "gathers tables bags scatters writes sparse search",
    "products": "contract grouped convolution einsum algebra attention",
    "layers": "pooling normalize batch_norm unpooling recurrent",
    "quantized": "quantization block_scales",
    "images": "resample sample",
    "losses": "cross_entropy elementwise classes ctc linear_cross_entropy",
}
for _family, _modules in _MODULES.items():  # importing a module registers its records
    for _module in _modules.split():
        importlib.import_module(f".{_family}.{_module}", __name__)
# A module and an op may have the same name; ops.NAME is always the op.
globals().update(REGISTRY)


_OF_A_SIZE_THAT_DATA_DECIDES = frozenset(
    ("argwhere", "compress", "extract", "flatnonzero", "masked_select", "nonzero", "unique", "unique_consecutive")
)


def __getattr__(name: str) -> Op:
    try:
        return REGISTRY[name]  # type: ignore[no-any-return]
    except KeyError:
        if name in _OF_A_SIZE_THAT_DATA_DECIDES:
            raise AttributeError(f"there is no op {name!r}: the size of its result would depend on the data") from None
        raise AttributeError(f"there is no op {name!r}; dir(gradc.ops) lists them") from None


def __dir__() -> list[str]:
    return sorted(REGISTRY)


__all__ = ["REGISTRY", "Composite", "Function", "Library", "Node", "Op", "Primitive"]
