"""What a kernel's functions may declare: its dims and sizes, the arrays of its workspace, a thread's place.

This is the one place that says where in the workspace an array lies; a launch counts the same bytes
(:func:`gradc.codegen.cuda.launch.sizes_of`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir.dims import Size
from ..declarations import Declaration
from ..index import size
from .accums import Accum
from .axes import declared


def size_declarations(
    dims: Sequence[str], rows: Size, cols: Size, kept: Size | None, keys: Size | None
) -> list[Declaration]:
    """Dims in the type of offsets, then rows, columns, keys and chunks."""
    lines = [f"const ix {name} = (ix)dim{i};" for i, name in enumerate(dims)]
    lines += ["const ix chunk = (ix)chunk_length;", f"const ix rows = {size(rows)};", f"const ix cols = {size(cols)};"]
    if kept is not None:
        lines.append(f"const ix kept_rows = {size(kept)};")
    if keys is not None:
        lines.append(f"const ix keys = {size(keys)};")
    lines.append(f"const ix chunks = gradc_chunks({'rows' if kept is None else 'kept_rows'}, chunk);")
    return [*map(declared, lines)]


class Workspace:
    """The arrays of a workspace in their order; each at a multiple of GRADC_ALIGN bytes behind the one before."""

    def __init__(self) -> None:
        self.declarations: list[Declaration] = []
        self.end = "workspace"

    def array(self, ctype: str, name: str, bytes_: str, times: int = 1) -> None:
        """An array of so many bytes, an expression of 64 bits, in a place for so many of them."""
        self.declarations.append(declared(f"{ctype} *const {name} = ({ctype} *){self.end};"))
        self.end = f"((char *){name} + {f'{times} * ' if times > 1 else ''}gradc_align({bytes_}))"


def sort_arrays(arrays: Workspace, groups: int, in_order: bool) -> None:
    """What rows are visited by in the order of their keys.  With groups, one row of each is sorted before."""
    if in_order:
        arrays.array("u32", "sorted_keys", "(i64)rows * 4")
        arrays.array("u32", "segment_start", "(i64)(keys + 2) * 4")
        return
    single = groups == 1
    rows, keys = ("rows", "keys") if single else (f"(rows / {groups})", f"(keys / {groups})")
    arrays.array("u32", "sorted_keys" if single else "collapsed_keys", f"(i64){rows} * 4")
    arrays.array("u32", "sorted_rows" if single else "collapsed_rows", f"(i64){rows} * 4")
    arrays.array("u32", "unsorted_keys", f"(i64){rows} * 4", times=2)  # and their rows, which the sort alone knows
    arrays.array("u32", "segment_start" if single else "collapsed_start", f"(i64)({keys} + 2) * 4")
    if not single:
        arrays.array("u32", "sorted_keys", "(i64)rows * 4")
        arrays.array("u32", "sorted_rows", "(i64)rows * 4")
        arrays.array("u32", "segment_start", "(i64)(keys + 2) * 4")


def workspace(accums: Collection[Accum], groups: int | None, in_order: bool = False) -> list[Declaration]:
    """The arrays of a kernel's workspace.

    :param groups: neighbouring rows that the sort takes as one; None: rows are not visited by their keys.
    :param in_order: whether rows come in the order of their keys.
    """
    arrays = Workspace()
    if groups is not None:
        sort_arrays(arrays, groups, in_order)
    for a in accums:
        if a.in_workspace:
            bytes_ = f"(i64)(chunks * {_factor(a.scratch_size[0])}) * (i64)sizeof({a.partial})"
            arrays.array(a.partial, f"partial{a.number}", bytes_)
    for a in accums:
        if a.strategy.atomics == "fixed point":
            arrays.array("u64", f"fixed{a.number}", f"(i64)({a.size}) * 8")
            arrays.array("u32", f"largest{a.number}", "4")
    for a in accums:
        if a.f32_staged:
            arrays.array("f32", f"staged{a.number}", f"(i64)({a.size}) * 4")
    return arrays.declarations


def strip_arrays(strips: Sequence[tuple[str, str]]) -> list[Declaration]:
    """All of the workspace of split rows: for each reduction, of this type and name, a partial result of each strip."""
    arrays = Workspace()
    for ctype, name in strips:
        arrays.array(ctype, name, "(i64)rows * strips * 16")
    return arrays.declarations


def _factor(value: Size) -> str:
    text = size(value)
    return text if text.startswith("(") or " " not in text else f"({text})"
