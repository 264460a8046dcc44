"""torch.compile leaves gradc alone: Dynamo skips every function of this package, and the graph around a call breaks
there.

Traced through, a call would hand addresses of tensors that have no memory to machine code. Dynamo keeps a list of
directories that it never enters, in a module that costs a second to import; so this one is added once somebody else has
imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_RULES = "torch._dynamo.trace_rules"
_PACKAGE = __name__.partition(".")[0]


def keep_out() -> None:
    """Add this package to what Dynamo skips, now or when Dynamo is imported."""
    if _RULES in sys.modules:
        sys.modules[_RULES].add(_PACKAGE)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting:
    """A finder of modules that finds Dynamo's rules where the others do, and adds to them when they have been executed;
    it is gone after that.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _RULES:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in others if each is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def execute(module: ModuleType) -> None:
            del loader.exec_module  # the class's own is seen again
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            module.add(_PACKAGE)

        loader.exec_module = execute
        return spec
