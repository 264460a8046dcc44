"""gradc: a forward tensor graph in, a module of fused forward and backward kernels out, readable at every stage.

>>> import gradc
>>> from gradc import ops
>>> graph = gradc.trace(lambda x, w: ops.softmax(x @ w), x="f32[N,4]", w="f32[4,3]")
>>> module = gradc.compile(graph, wrt=["w"])
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from .process.forks import held_off
from .runtime.dynamo import keep_out
from .version import VERSION

_PUBLIC = {
    "assume": "trace",
    "check": "verify.check",
    "compile": "api",
    "differentiate": "autodiff",
    "graph": "frontend",
    "load": "api",
    "load_module": "api",
    "pack": "ops.bits",
    "parse": "api",
    "scope": "trace",
    "trace": "trace",
    "typeof": "ir.types",
    "value_and_grad": "frontend",
    "Executable": "runtime.executable",
    "Gradients": "module.gradients",
    "SparseRows": "module.sparse",
    "Graph": "ir.graph",
    "Module": "module.module",
    "Type": "ir.types",
}
_MODULES = ("errors", "interp", "knobs", "ops", "plans")
__all__ = sorted([*_PUBLIC, *_MODULES])
__version__ = VERSION


_LATER = ("from_onnx",)
_WITH_TORCH = ("from_torch", "torch")


def _not_yet(name: str, *_: Any, **__: Any) -> Any:
    from .errors import Unsupported

    raise Unsupported(f"gradc.{name} is not there yet")


def _of_torch(name: str) -> Any:
    """``gradc.torch`` or a name in it, for which PyTorch must be there."""
    from .errors import Unsupported

    try:
        package = importlib.import_module(".torch", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise Unsupported(f"gradc.{name} needs PyTorch 2.6 or later: pip install 'gradc[torch]'") from error
    return package if name == "torch" else getattr(package, name)


def __getattr__(name: str) -> Any:
    # loaded on first use: importing gradc costs no more than the parts that are used
    if name in _PUBLIC:
        with held_off:
            value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    elif name in _MODULES:
        with held_off:
            value = importlib.import_module(f".{name}", __name__)
    elif name in _WITH_TORCH:
        value = _of_torch(name)
    elif name in _LATER:
        return functools.partial(_not_yet, name)
    else:
        raise AttributeError(f"gradc has no {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """``gradc.trace`` is the function, also after something has imported the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name, getattr(value, name) if isinstance(value, ModuleType) and _PUBLIC.get(name) == name else value
        )


sys.modules[__name__].__class__ = _Package
keep_out()
