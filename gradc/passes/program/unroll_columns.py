"""unroll_columns: unrolls short inner loops (windows, taps, stacked values), so that the lanes of a vector run along a
longer axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...ir.dims import same
from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.statement import EFFECTS, REDUCTIONS, Axis, Index, Stmt
from ...ir.types import BOOL, I32, DType, Type
from ..manager import program_pass
from .unroll_sums import unrolled_sums

LONGEST = 32
"""Elements of a window at most."""
LARGEST = 768
"""Statements of an unrolled kernel at most."""
FEWEST = 8
"""Windows along the last axis at least: fewer leave most lanes of a vector empty."""
MOST_STEPS = 4
"""Columns that become one at most."""
DIVISIONS: dict[str, Callable[[int], int]] = {
    "right_shift": lambda places: 1 << places if 0 <= places < 8 else 0,
    "bitwise_and": lambda mask: mask + 1 if mask & (mask + 1) == 0 else 0,
    "floordiv": lambda size: size,
    "mod": lambda size: size,
}
"""Divisions of an integer by the constant that they have, and what the constant says that it is divided by."""
CHAINS = {"sum_cols": "add", "prod_cols": "mul", "max_cols": "maximum", "min_cols": "minimum"}
"""A reduction and the pointwise op that adds one more element."""
EXTREMES = {"argmax_cols": "gt", "argmin_cols": "lt"}
"""A reduction and the comparison that finds a better element; of equal ones the first stays, and the first NaN."""


@program_pass("REAL")
def unroll_columns(program: Program, *, reorder: bool = True, side_by_side: bool = True) -> Program:
    """Full unrolling of short loops, so that a longer axis is vectorized:
    rows(n, w) cols(k: 3) { max_cols x[n, w*2 + k] }  ->  rows(n) cols(w) { maximum x[n, w*2], x[n, w*2 + 1], ... }
    rows(n, w) cols(k: 3) { accum y[k] <- x[n, w+k] }  ->  rows(n, k: 3) cols(w) { accum y[k] <- sum_cols x[n, w+k] }
    rows(n, w) cols(k: 2) { y[n, w, k] <- where k < 1, a[n, w], b[n, w] }  ->
        rows(n) cols(w) { y[n, w, 0] <- a[n, w], y[n, w, 1] <- b[n, w] }
    rows(n) cols(l: 2*W) { y[n, l] <- x[n, l >> 1] }  ->  cols(l: W) { y[n, l*2] <- x[n, l], y[n, l*2+1] <- ... }
    rows(k: 2, n) cols(w) { y[k, n, w] <- where k == 0, a + b, a - b }  ->
        rows(n) cols(w) { y[0, n, w] <- a + b, y[1, n, w] <- a - b }

    As columns, the elements of a window are a loop of three inside the loop over windows, and no vector is filled;
    elements of interleaved arrays are loaded one by one; elements of strided windows are gathered one by one; and where
    each position of a short axis is another expression, all of them are computed for each position, to select one.

    :param reorder: sums may be added up in another order, as in the second line.
    :param side_by_side: a few of them are added up side by side, into buffers of their own (:mod:`.unroll_sums`).
    """
    types = {b.name: b.type for b in program.buffers}
    steps: list[Step] = []
    buffers: list[Buffer] = []
    for step in program.steps:
        if isinstance(step, Kernel):
            made, own = _rewritten(step, program, types, reorder, side_by_side)
            steps += made
            buffers += own
        else:
            steps.append(step)
    if tuple(steps) == program.steps:
        return program
    return replace(program, steps=tuple(steps), buffers=(*program.buffers, *buffers))


def _rewritten(
    kernel: Kernel, program: Program, types: Mapping[str, Type], reorder: bool, side_by_side: bool
) -> tuple[list[Step], list[Buffer]]:
    """Kernel -> the steps in place of it, and their new buffers: unswitched, unrolled over its windows or lanes, or
    interchanged, whichever applies first.
    """
    given = kernel
    if (short := unswitchable_axes(kernel)) and (branches_folded := unswitched(kernel, short, types)) is not None:
        return [branches_folded], []
    if _reduces_windows(kernel):
        kernel = _speculate_loads(
            Unrolled(kernel, kernel.cols).kernel(kernel.rows[:-1], kernel.rows[-1:], types), types
        )
    elif _interleaves(kernel):
        unrolled = Unrolled(kernel, kernel.cols).kernel(kernel.rows[:-1], kernel.rows[-1:], types)
        return [unrolled.live.named_by_structure(kernel.name.rpartition("_")[0], types)], []
    if (step := _unroll_factor(kernel)) > 1:
        return [_unrolled_by(kernel, step, types)], []
    lane = _axis_to_vectorize(kernel) if reorder and kernel is given else None
    if lane is None:
        return [kernel], []
    if side_by_side and prod(n for _, n in kernel.cols if isinstance(n, int)) * len(kernel.body) <= LARGEST:
        rows = tuple(axis for axis in kernel.rows if axis != lane)
        unrolled = _speculate_loads(Unrolled(kernel, kernel.cols).kernel(rows, (lane,), types), types)
        if (made := unrolled_sums(kernel, unrolled, program)) is not None:
            return made
    return [_speculate_loads(_interchanged(kernel, lane), types)], []


def _axis_to_vectorize(kernel: Kernel) -> Axis | None:
    """The row axis along which a kernel that accumulates into few columns reads contiguous memory; None if there is
    none.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    effects = [s for s in kernel.body if s.op in EFFECTS]
    if len(sizes) < len(kernel.cols) or not 2 <= prod(sizes) <= LONGEST or not effects:
        return None
    if any(s.op in REDUCTIONS or s.op in ("scan", "search") for s in kernel.body):
        return None
    if any(s.op != "accum" or s.combine != "sum" or s.where or not kernel.is_column(s) for s in effects):
        return None
    if any(v.startswith("%") for s in kernel.body for entry in s.index for v, _ in entry.terms):
        return None
    loads = [s for s in kernel.body if s.op == "load"]
    for lane in reversed(kernel.rows):
        along = [s for s in loads if _depends_on(kernel, s, lane[0])]
        long = not isinstance(lane[1], int) or lane[1] >= max(FEWEST, 2 * prod(sizes))
        if long and along and all(_is_contiguous_along(kernel, s, lane[0]) for s in along):
            return None if any(_depends_on(kernel, s, lane[0]) for s in effects) else lane
    return None


def _interchanged(kernel: Kernel, lane: Axis) -> Kernel:
    """Loop interchange: the columns become rows, and ``lane`` the columns, reduced before each accum."""
    fresh = _fresh_names(kernel)
    body: list[Stmt] = []
    for s in kernel.body:
        if s.op == "accum":
            (value,) = s.args
            body.append(Stmt(next(fresh), "sum_cols", (value,), kernel.stmts[value].dtype))
            s = replace(s, args=(body[-1].name,))
        body.append(s)
    rows = (*(axis for axis in kernel.rows if axis != lane), *kernel.cols)
    return replace(kernel, rows=rows, cols=(lane,), body=tuple(body))


def _interleaves(kernel: Kernel) -> bool:
    """Whether a kernel interleaves a few arrays: its short columns choose among arrays that are contiguous along the
    rows.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    if not kernel.rows or len(sizes) < len(kernel.cols) or not 2 <= prod(sizes) <= MOST_STEPS:
        return False
    lane, count = kernel.rows[-1]
    if (isinstance(count, int) and count < FEWEST) or _has_reduction_or_check(kernel):
        return False
    loads = [s for s in kernel.body if s.op == "load"]
    along = [s for s in loads if _depends_on(kernel, s, lane)]
    bits = [s.dtype.bits for s in kernel.body if s.op in ("load", "store") and s.dtype is not None]
    return (
        len(along) > 1
        and min(bits) >= 8
        and all(_is_contiguous_along(kernel, s, lane) for s in along)
        and not any(_depends_on(kernel, s, axis) for s in loads for axis, _ in kernel.cols)
        and all(_is_innermost(s, (lane, *(a for a, _ in kernel.cols))) for s in kernel.body if s.op == "store")
    )


def unswitchable_axes(kernel: Kernel, masks: bool = False) -> list[Axis]:
    """The short axes on which a kernel branches: a select tests for one position of them.

    :param masks: or the mask of a load does.
    """
    if _has_reduction_or_check(kernel):
        return []
    tests = {s.name: s.index[0] for s in kernel.body if s.op == "in_bounds" and s.attr("hi") - s.attr("lo") == 1}
    choices = [s.args[0] for s in kernel.body if s.op == "where"]
    choices += [s.where for s in kernel.body if s.op == "load" and masks]
    asked = {tests[name].terms for name in choices if name in tests}
    axes = [
        axis
        for axis in (*kernel.rows, *kernel.cols)
        if isinstance(axis[1], int) and 2 <= axis[1] <= MOST_STEPS and ((axis[0], 1),) in asked
    ]
    return axes if prod(n for _, n in axes if isinstance(n, int)) <= LONGEST else []


def unswitched(kernel: Kernel, short: Sequence[Axis], types: Mapping[str, Type]) -> Kernel | None:
    """Loop unswitching: the kernel unrolled over its short axes, each branch folded; None if that is too long, or has
    no other axes.
    """
    rows, cols = ([axis for axis in axes if axis not in short] for axes in (kernel.rows, kernel.cols))
    if not rows and not cols:
        return None
    if not cols:
        cols = [rows.pop()]
    made = Unrolled(kernel, short).kernel(tuple(rows), tuple(cols), types).live
    if len(made.body) > LARGEST:
        return None
    return made.named_by_structure(kernel.name.rpartition("_")[0], types)


def _is_innermost(store: Stmt, axes: Sequence[str]) -> bool:
    """Whether a store's last dimensions are indexed by these axes, in order."""
    return [i.variable for i in store.index[-len(axes) :]] == list(axes)


def _has_reduction_or_check(kernel: Kernel) -> bool:
    """Whether a kernel is more than a map: it reduces, scans, searches, checks or accumulates."""
    return any(s.op in REDUCTIONS or s.op in ("scan", "search", "check", "accum") for s in kernel.body)


def _unroll_factor(kernel: Kernel) -> int:
    """The constant that all divisions of the last column's index share, by which unrolling the column folds them; 1
    where there is none.
    """
    if not kernel.cols or _has_reduction_or_check(kernel):
        return 1
    column, size = kernel.cols[-1]
    steps = {
        step
        for s in kernel.body
        if s.op in DIVISIONS
        and (place := kernel.stmts[s.args[0]]).op == "index"
        and kernel.stmts[s.args[1]].op == "const"
        and (column, 1) in place.index[0].terms
        and (step := DIVISIONS[s.op](kernel.stmts[s.args[1]].attr("value")))
    }
    bytes_ = any(s.op == "load" and s.dtype is not None and s.dtype.bits <= 8 and s.uses for s in kernel.body)
    if len(steps) != 1 or not isinstance(size, int) or bytes_:  # bytes have parts, which a block unpacks
        return 1
    (step,) = steps
    fits = 1 < step <= MOST_STEPS and size % step == 0 and size // step >= FEWEST
    return step if fits and step * len(kernel.body) <= LARGEST else 1


def _unrolled_by(kernel: Kernel, step: int, types: Mapping[str, Type]) -> Kernel:
    """Partial unrolling: the kernel with one column for each ``step`` of its last axis, whose divisions by ``step`` are
    folded.
    """
    column, size = kernel.cols[-1]
    part = f"{column}r"
    moved = {column: Index(0, ((column, step), (part, 1)))}
    body = tuple(replace(s, index=tuple(substituted(i, moved) for i in s.index)) for s in kernel.body)
    assert isinstance(size, int)
    cols = (*kernel.cols[:-1], (column, size // step))
    wide = replace(kernel, cols=(*cols, (part, step)), body=body)
    return Unrolled(wide, wide.cols[-1:]).kernel(kernel.rows, cols, types)


def substituted(index: Index, axes: Mapping[str, Index]) -> Index:
    """Affine index -> the index with affine expressions for some of its axes."""
    new = Index(index.const)
    for variable, factor in index.terms:
        new += axes.get(variable, Index.of(variable)) * factor
    return new


def _speculate_loads(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """Masked loads whose address is dereferenceable for every column  ->  one unconditional load for the row and a
    select for each column.
    """
    fresh, once = _fresh_names(kernel), dict[str, str]()
    body: list[Stmt] = []

    def value(s: Stmt) -> str:
        if (text := str(s)) not in once:
            once[text] = next(fresh)
            body.append(replace(s, name=once[text]))
        return once[text]

    for s in kernel.body:
        if s.op == "load" and s.where and _is_dereferenceable(kernel, s, types[s.buffer]):
            loaded = value(Stmt("", "load", (), s.dtype, s.buffer, s.index))
            zero = value(_passthrough(s))
            s = Stmt(s.name, "where", (s.where, loaded, zero), s.dtype)
        body.append(s)
    new = replace(kernel, body=tuple(body))
    return new.named_by_structure(kernel.name.rpartition("_")[0] or kernel.name, types)


def _passthrough(load: Stmt) -> Stmt:
    """Masked load -> the constant that is its value where the mask is false."""
    assert load.dtype is not None
    other = dict(load.attrs).get("other", 0)
    return Stmt("", "const", (), load.dtype, attrs=(("value", float(other) if load.dtype.is_float else other),))


def _is_dereferenceable(kernel: Kernel, s: Stmt, type_: Type) -> bool:
    """Whether a load is in bounds whatever its mask is, and independent of the columns."""
    sizes = dict(kernel.rows)
    for entry, size in zip(s.index, type_.shape, strict=True):
        if not entry.terms:
            if not (isinstance(entry.const, int) and isinstance(size, int) and 0 <= entry.const < size):
                return False
            continue
        ((axis, factor), *more) = entry.terms
        if more or entry.const != 0 or factor != 1 or axis not in sizes or not same(sizes[axis], size):
            return False
    return True


def _fresh_names(kernel: Kernel) -> Iterator[str]:
    """Kernel -> an endless supply of value names that it does not use."""
    taken = {s.name for s in kernel.body}
    return (name for k in itertools.count(len(taken)) if (name := f"%{k}") not in taken)


def _reduces_windows(kernel: Kernel) -> bool:
    """Whether a kernel reduces short columns of rows that overlap or adjoin: what it reads along them is contiguous
    along the last row axis.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    count = prod(sizes)
    if not kernel.rows or len(sizes) < len(kernel.cols) or not 2 <= count <= LONGEST:
        return False
    lane, windows = kernel.rows[-1]
    if (isinstance(windows, int) and windows < FEWEST) or count * len(kernel.body) > LARGEST:
        return False
    if any(s.op in ("accum", "check", "scan", "search") for s in kernel.body):
        return False
    reductions = [s for s in kernel.body if s.op in REDUCTIONS]
    return (
        bool(reductions)
        and all(kernel.stmts[s.args[0]].dtype is not BOOL for s in reductions)
        and all(
            _is_contiguous_along(kernel, s, lane) or not _depends_on(kernel, s, lane)
            for s in kernel.body
            if s.op == "load" and kernel.is_column(s)
        )
        and all(
            not kernel.is_column(s) and _is_contiguous_along(kernel, s, lane) for s in kernel.body if s.op == "store"
        )
    )


def _is_contiguous_along(kernel: Kernel, s: Stmt, lane: str) -> bool:
    """Whether an access moves along its buffer's last dimension, and no other, when axis ``lane`` does."""
    along = [
        any(v == lane or (v.startswith("%") and lane in kernel.levels[v]) for v, _ in entry.terms) for entry in s.index
    ]
    return bool(along) and along[-1] and not any(along[:-1])


def _depends_on(kernel: Kernel, s: Stmt, axis: str) -> bool:
    """Whether the address of an access depends on an axis."""
    return any(v == axis or axis in kernel.levels.get(v, ()) for entry in s.index for v, _ in entry.terms)


class Unrolled:
    """Full unrolling of some axes of a kernel: its statements once per iteration, value-numbered, with constants and
    branches folded.
    """

    def __init__(self, kernel: Kernel, axes: Sequence[Axis]):
        """:param axes: of constant sizes; all of the columns, if the kernel has reductions."""
        self.before, self.axes = kernel, axes
        self.along = frozenset(a for a, _ in axes)
        self.body: list[Stmt] = []
        self.known: dict[str, str] = {}
        """A statement's text -> its value's name; as statements, constants of 0.0 and -0.0 are equal."""
        self.constants: dict[str, Any] = {}
        self.false = set[str]()
        """Values that are false everywhere."""
        self.places: dict[str, Index] = {}
        """Values that are affine in the axes that are left."""
        self.names: dict[tuple[str, tuple[int, ...]], str] = {}
        """(value, place) -> its new name; values that do not go along the axes have the place ()."""

    def kernel(self, rows: tuple[Axis, ...], cols: tuple[Axis, ...], types: Mapping[str, Type]) -> Kernel:
        """(rows, columns) that are left -> the unrolled kernel."""
        k = self.before
        for s in k.body:
            if s.op in REDUCTIONS:
                self.names[s.name, ()] = self.chain(s)
            elif k.stmt_level(s) & self.along:
                for column in self.iterations():
                    self.names[s.name, column] = self.instantiate(s, column)
            else:
                name = self.instantiate(s, ())
                if s.name:
                    self.names[s.name, ()] = name
        new = replace(k, rows=rows, cols=cols, body=tuple(self.body))
        return new.named_by_structure(k.name.rpartition("_")[0], types)

    def iterations(self) -> Iterator[tuple[int, ...]]:
        """All iterations of the unrolled axes, in order."""
        return itertools.product(*(range(n) for _, n in self.axes if isinstance(n, int)))

    def of(self, value: str, column: tuple[int, ...]) -> str:
        """(value of the old kernel, iteration) -> its name in the new one."""
        return self.names[value, column] if (value, column) in self.names else self.names[value, ()]

    def instantiate(self, s: Stmt, column: tuple[int, ...]) -> str:
        """(statement, iteration) -> the name of its value in the new kernel, folded where that is known."""
        here = dict(zip((a for a, _ in self.axes), column, strict=False))

        def at(index: Index) -> Index:
            new = Index(index.const)
            for variable, c in index.terms:
                if variable in here:
                    new += c * here[variable]
                elif variable.startswith("%"):
                    value = self.of(variable, column)
                    new += self.places.get(value, Index.of(value)) * c
                else:
                    new += Index.of(variable) * c
            return new

        index = tuple(map(at, s.index))
        if s.op == "in_bounds" and not index[0].terms and isinstance(index[0].const, int):
            lo, hi = s.attr("lo"), s.attr("hi")
            if isinstance(lo, int) and isinstance(hi, int):
                return self.value("const", (), s.dtype, value=lo <= index[0].const < hi)
        args, where = tuple(self.of(a, column) for a in s.args), s.where and self.of(s.where, column)
        if s.op == "index":
            return self.affine(index[0], s.dtype)
        if s.op in DIVISIONS and (divided := self.quotient(s.op, *args)) is not None:
            return self.affine(divided, s.dtype)
        if s.op == "bitwise_and" and (false := [a for a in args if a in self.false]):
            return false[0]
        if s.op == "bitwise_and" and (true := [k for k, a in enumerate(args) if self.constants.get(a) is True]):
            return args[1 - true[0]]
        if s.op == "where" and (args[0] in self.false or args[1] == args[2]):
            return args[2]
        if s.op == "where" and self.constants.get(args[0]) is True:
            return args[1]
        if s.op == "load" and where in self.false:  # a place outside, as beside the only window
            return self.add(_passthrough(s))
        where = "" if self.constants.get(where) is True else where
        return self.add(replace(s, name="", args=args, index=index, where=where))

    def affine(self, index: Index, dtype: DType | None) -> str:
        """Affine index -> the name of the value that it is, a constant if it has no axes."""
        if not index.terms and isinstance(index.const, int):
            name = self.value("const", (), dtype, value=index.const)
        else:
            name = self.add(Stmt("", "index", (), dtype, index=(index,)))
        self.places[name] = index
        return name

    def quotient(self, op: str, value: str, by: str) -> Index | None:
        """Quotient or remainder of an affine value by a constant that divides all its factors, as an affine index; None
        if it is none.
        """
        place, constant = self.places.get(value), self.constants.get(by)
        if place is None or constant is None or not isinstance(place.const, int):
            return None
        size = DIVISIONS[op](constant)
        if size < 1 or not all(isinstance(c, int) and c % size == 0 for _, c in place.terms):
            return None
        if op in ("bitwise_and", "mod"):
            return Index(place.const % size)
        return Index(place.const // size, tuple((v, c // size) for v, c in place.terms))

    def add(self, s: Stmt) -> str:
        """Statement -> the name of its value; one that is there already is not repeated (value numbering)."""
        if s.op in EFFECTS:
            self.body.append(s)
            return ""
        text = str(s)
        if text not in self.known:
            self.known[text] = f"%{len(self.known)}"
            self.body.append(replace(s, name=self.known[text]))
            if s.op == "const":
                self.constants[self.known[text]] = s.attr("value")
                if s.attr("value") is False:
                    self.false.add(self.known[text])
        return self.known[text]

    def value(self, op: str, args: tuple[str, ...], dtype: DType | None, **attrs: int | bool) -> str:
        """(op, operands, dtype, attributes) -> the name of a new statement's value."""
        return self.add(Stmt("", op, args, dtype, attrs=tuple(attrs.items())))

    def chain(self, s: Stmt) -> str:
        """Reduction -> a chain of pointwise ops over the iterations, in order."""
        own = self.before.stmts[s.args[0]].dtype
        assert own is not None
        values = [self.of(s.args[0], column) for column in self.iterations()]
        if s.op in EXTREMES:
            return self.chain_of_extreme(s, values, own)
        values = [v if own is s.dtype else self.value("cast", (v,), s.dtype) for v in values]
        total = values[0]
        for v in values[1:]:
            total = self.value(CHAINS[s.op], (total, v), s.dtype)
        return total

    def chain_of_extreme(self, s: Stmt, values: list[str], own: DType) -> str:
        """argmax or argmin -> a chain of compares and selects that carries the best value and its index."""
        best, place = values[0], self.value("const", (), I32, value=0)  # lanes as wide as the values' most often
        for k, v in enumerate(values[1:], 1):
            better = self.value(EXTREMES[s.op], (v, best), BOOL)
            if own.is_float:  # a NaN is better than a number
                nan, found = self.value("ne", (v, v), BOOL), self.value("eq", (best, best), BOOL)
                better = self.value("bitwise_or", (better, self.value("bitwise_and", (nan, found), BOOL)), BOOL)
            best = self.value("where", (better, v, best), own)
            place = self.value("where", (better, self.value("const", (), I32, value=k), place), I32)
        return place if s.dtype is I32 else self.add(Stmt("", "cast", (place,), s.dtype, attrs=(("dtype", s.dtype),)))
