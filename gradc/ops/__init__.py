"""Every op, callable: ``ops.exp(x)``.  One record per op lives in the modules of this package, in folders by family;
each module that stands there is imported.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..ir.node import REGISTRY, Node
from ..ir.op import Composite, Function, Library, Op, Primitive

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):  # importing a module registers its records
    importlib.import_module(_module.name)
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
