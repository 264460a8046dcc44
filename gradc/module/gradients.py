"""Gradients: the result of backward."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np

from ..errors import InvalidProblem
from ..formats.html_text import table
from ..runtime.cuda.on_device import DeviceArray
from ..runtime.host.arrays import Arguments, empty, from_numpy, to_numpy
from ..runtime.located import located
from ..trace import unflatten
from .sparse import SparseRows


class Gradients(MutableMapping[str, Any]):
    """A mapping from name to gradient, in the order of ``wrt`` (also after one was removed and put back); other names
    that were inserted follow.
    """

    def __init__(self, arrays: Arguments, structure: Any = None):
        self._arrays = dict(arrays)
        self._order = tuple(arrays)
        self._structure = structure

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no gradient of {name!r}; there are {', '.join(self) or 'none'}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._arrays[name] = value

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._order if name in self._arrays)
        yield from (name for name in self._arrays if name not in self._order)

    def __len__(self) -> int:
        return len(self._arrays)

    def _repr_html_(self) -> str:
        return table(("gradient of", "array", "", "largest"), ((name, *_described(self[name])) for name in self))

    def as_dict(self) -> dict[str, Any]:
        """The gradients by name, in a dict of its own."""
        return dict(self._arrays)

    def replace(self, name: str, gradient: Any) -> None:
        """Overwrites the gradient of ``name``, or inserts it."""
        self._arrays[name] = gradient

    def accumulate(self, other: Arguments) -> None:
        """Adds another set of gradients, creating new arrays of this set's library; new names are inserted.

        :raises InvalidProblem: shapes or dtypes differ; nothing was changed.
        """
        sums = {name: self._sum(name, value) for name, value in other.items() if name in self._arrays}
        self._arrays |= {**other, **sums}

    def _sum(self, name: str, value: Any) -> Any:
        if isinstance(value, SparseRows) or isinstance(self._arrays[name], SparseRows):
            return value + self._arrays[name] if isinstance(value, SparseRows) else self._arrays[name] + value
        own = self._arrays[name]
        mine, more = located(own), located(value)
        if mine.shape != more.shape or mine.dtype != more.dtype:
            raise InvalidProblem(
                f"the gradients of {name!r} differ: {mine.dtype}{list(mine.shape)} and {more.dtype}{list(more.shape)}"
            )
        if isinstance(mine, DeviceArray) or isinstance(more, DeviceArray):
            if not (isinstance(mine, DeviceArray) and isinstance(more, DeviceArray)) or type(own) is not type(value):
                raise InvalidProblem(
                    f"the gradients of {name!r} are a {type(own).__qualname__} and a {type(value).__qualname__}: on a"
                    " GPU, one library adds its own"
                )
            return own + value
        return from_numpy(np.add(mine, more, out=empty(mine.shape, mine.dtype)), to_numpy(own)[1])

    @property
    def tree(self) -> Any:
        """The gradients in the structure of the parameters; as nested dicts if the graph was traced from types."""
        if self._structure is not None:
            return unflatten(self._structure, self)
        tree: dict[str, Any] = {}
        for name, array in self.items():
            *path, last = name.split(".")
            at = tree
            for part in path:
                at = at.setdefault(part, {})
            at[last] = array
        return tree

    def __repr__(self) -> str:
        shown = [f"{n}: {g.dtype}{list(g.shape)}" if hasattr(g, "dtype") else f"{n}: {g!r}" for n, g in self.items()]
        return f"Gradients({', '.join(shown)})"


_MOST_READ = 1 << 20
"""Elements of an array that are read for a notebook."""


def _described(value: Any) -> tuple[str, str, str]:
    """(dtype and shape, the array's library, its largest magnitude if it is a small array of NumPy's)."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    shape = ",".join(map(str, getattr(value, "shape", ())))
    small = isinstance(value, np.ndarray) and 0 < value.size <= _MOST_READ
    largest = f"{np.max(np.abs(value.astype(np.float64))):.6g}" if small else ""
    return f"{dtype}[{shape}]", kind, largest
