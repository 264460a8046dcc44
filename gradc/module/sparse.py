"""Sparse gradients: the rows of a table that indices selected, with their values."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidProblem
from ..ir.graph import SPARSE_PARTS
from ..runtime.host.arrays import Arguments, Results


@dataclass(frozen=True)
class SparseRows:
    """An array of which only some rows are nonzero; the form of gradients with ``gradc.compile(graph, wrt=["table"],
    sparse=["table"])``.

    :param rows: i64 [R], distinct, ascending.
    :param values: [R, ...], the contents of these rows.
    :param shape: of the dense array.
    """

    rows: Any
    values: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def dense(self) -> Any:
        """The dense array."""
        out = _zeros(self.values, self.shape)
        out[self.rows] = self.values
        return out

    def add_to(self, array: Any) -> Any:
        """Adds the rows to a dense array in place; other rows are not accessed."""
        if tuple(array.shape) != self.shape or str(array.dtype) != str(self.dtype):
            raise InvalidProblem(
                f"rows of a {self.dtype}{list(self.shape)} are added to one like it, not to"
                f" {array.dtype}{list(array.shape)}"
            )
        array[self.rows] += self.values
        return array

    def __add__(self, other: Any) -> Any:
        """The sum with other SparseRows is SparseRows; the sum with an array is a new dense array."""
        if not isinstance(other, SparseRows):
            return self.add_to(
                other.clone()
                if hasattr(other, "clone")
                else other.copy()
                if hasattr(other, "copy")
                else np.array(other)
            )
        if other.shape != self.shape or str(other.dtype) != str(self.dtype):
            raise InvalidProblem(
                f"rows of a {self.dtype}{list(self.shape)} and of a {other.dtype}{list(other.shape)} do not add up"
            )
        if hasattr(self.rows, "new_tensor"):
            torch = sys.modules["torch"]
            rows = torch.unique(torch.cat([self.rows, other.rows.to(self.rows.device)]))
            places = [torch.searchsorted(rows, part.rows) for part in (self, other)]
        else:
            library = _library(self.rows)
            rows = library.union1d(self.rows, other.rows)
            places = [library.searchsorted(rows, part.rows) for part in (self, other)]
        values = _zeros(self.values, (len(rows), *self.shape[1:]))
        for part, at in zip((self, other), places, strict=True):
            values[at] += part.values
        return SparseRows(rows, values, self.shape)

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"SparseRows({len(self.rows)} of {self.dtype}{list(self.shape)})"


def _library(array: Any) -> Any:
    """The module of an array's functions: NumPy or CuPy."""
    return sys.modules["cupy"] if type(array).__module__.partition(".")[0] == "cupy" else np


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(like, "new_zeros"):
        return like.new_zeros(shape)
    library = _library(like)
    return library.zeros(shape, like.dtype if library is not np else np.asarray(like).dtype)


def assembled(
    results: Arguments, names: Mapping[str, str], sparse: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> Results:
    """Gradients by the names of their inputs, from a program's results.

    :param names: input -> the program's name of its gradient.
    :param sparse: inputs with sparse gradients, whose arrays are truncated to the actual number of rows.
    """
    out: Results = {}
    for name, key in names.items():
        if name not in sparse:
            out[name] = results[key]
            continue
        rows, values, count = (results[f"{key}.{part}"] for part in SPARSE_PARTS)
        out[name] = SparseRows(rows[: int(count)], values[: int(count)], shapes[name])
    return out
