"""gradc: a forward tensor graph in, a module of fused forward and backward kernels out, readable at every stage.

>>> import gradc
>>> from gradc import ops
>>> graph = gradc.trace(lambda x, w: ops.softmax(x @ w), x="f32[N,4]", w="f32[4,3]")
>>> module = gradc.compile(graph, wrt=["w"])
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .process.forks import held_off
from .process.version import VERSION
from .runtime.dynamo import keep_out

if TYPE_CHECKING:  # what type checkers see; at run time __getattr__ imports each when it is first used
    from . import errors as errors
    from . import interp as interp
    from . import knobs as knobs
    from . import onnx as onnx
    from . import ops as ops
    from . import optim as optim
    from . import plans as plans
    from . import torch as torch
    from .api import compile as compile
    from .api import load as load
    from .api import load_module as load_module
    from .api import parse as parse
    from .autodiff import differentiate as differentiate
    from .ir.graph import Graph as Graph
    from .ir.node import Node as Node
    from .ir.types import Type as Type
    from .ir.types import typeof as typeof
    from .module.gradients import Gradients as Gradients
    from .module.module import Module as Module
    from .module.sparse import SparseRows as SparseRows
    from .module.table_files import TableFiles as TableFiles
    from .onnx import from_onnx as from_onnx
    from .ops.elementwise.bits import pack as pack
    from .plans.step import step as step
    from .plans.traced import graph as graph
    from .plans.traced import value_and_grad as value_and_grad
    from .runtime.executable import Executable as Executable
    from .torch import from_torch as from_torch
    from .trace import assume as assume
    from .trace import scope as scope
    from .trace import trace as trace
    from .verify.check import check as check

_PUBLIC = {
    "assume": "trace",
    "check": "verify.check",
    "compile": "api",
    "differentiate": "autodiff",
    "graph": "plans.traced",
    "load": "api",
    "load_module": "api",
    "pack": "ops.elementwise.bits",
    "parse": "api",
    "scope": "trace",
    "step": "plans.step",
    "trace": "trace",
    "typeof": "ir.types",
    "value_and_grad": "plans.traced",
    "Executable": "runtime.executable",
    "Gradients": "module.gradients",
    "SparseRows": "module.sparse",
    "TableFiles": "module.table_files",
    "Graph": "ir.graph",
    "Module": "module.module",
    "Node": "ir.node",
    "Type": "ir.types",
}
_MODULES = ("errors", "interp", "knobs", "ops", "optim", "plans")
__all__ = sorted([*_PUBLIC, *_MODULES])
__version__ = VERSION


_WITH_OTHERS = {
    "from_torch": ("torch", "PyTorch 2.6 or later"),
    "torch": ("torch", "PyTorch 2.6 or later"),
    "from_onnx": ("onnx", "the package onnx"),
}


def _of_others(name: str) -> Any:
    """A name in ``gradc.torch`` or ``gradc.onnx``, or the package itself, for which another one must be there."""
    from .errors import Unsupported

    other, needed = _WITH_OTHERS[name]
    try:
        package = importlib.import_module(f".{other}", __name__)
    except ModuleNotFoundError as error:
        if error.name != other:
            raise
        raise Unsupported(f"gradc.{name} needs {needed}: pip install 'gradc[{other}]'") from error
    return package if name == other else getattr(package, name)


def _getattr(name: str) -> Any:
    # loaded on first use: importing gradc costs no more than the parts that are used
    if name in _PUBLIC:
        with held_off:
            value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    elif name in _MODULES:
        with held_off:
            value = importlib.import_module(f".{name}", __name__)
    elif name in _WITH_OTHERS:
        value = _of_others(name)
    else:
        raise AttributeError(f"gradc has no {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:
    __getattr__ = _getattr


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
