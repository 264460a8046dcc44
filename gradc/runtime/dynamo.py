"""Excludes gradc from torch.compile: Dynamo skips every function of this package, with a graph break at each call.

If Dynamo traced a call, machine code would get addresses of fake tensors, which have no memory. Dynamo has a list of
directories to skip, in a module that takes a second to import; this package is added when something else imports that
module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .torch_private import DYNAMO_RULES

_PACKAGE = __name__.partition(".")[0]


def keep_out() -> None:
    """Adds this package to Dynamo's skip list, now or when Dynamo is imported."""
    if DYNAMO_RULES in sys.modules:
        sys.modules[DYNAMO_RULES].add(_PACKAGE)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """A meta path finder that delegates to the others, extends Dynamo's skip list when its module has been executed,
    and then removes itself.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != DYNAMO_RULES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in others if each is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def execute(module: ModuleType) -> None:
            del loader.exec_module  # restores the class's method
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            module.add(_PACKAGE)

        loader.exec_module = execute
        return spec
