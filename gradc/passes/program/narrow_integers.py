"""narrow_integers: integers whose values are known to be small take fewer bytes in memory, and one register."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from math import prod

from ...ir.kernel import Buffer, Kernel, Program
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt
from ...ir.types import BOOL, DTYPES, I32, I64, DType, Type
from ..manager import program_pass

Range = tuple[int, int]
"""(least, largest)"""
NARROW = (DTYPES["i8"], DTYPES["i16"], I32)
"""What a temp may become; the first that holds its values."""


@program_pass("BITS")
def narrow_integers(program: Program) -> Program:
    """temp t: i32[N];  store t[n] <- argmax_cols x[n, k] over 9 columns;  load t[n]
    ->  temp t: i8[N];  store t[n] <- cast ... : i8;  cast (load t[n]) : i32
    %1 = index n + 1 : i64;  %2 = right_shift %1, 1 : i64  ->  %1 = index n + 1 : i32;  %2 = right_shift %1, 1 : i32

    Only ranges that follow from constants and the sizes of axes are known.  A GPU computes i64 in pairs of registers.
    """
    for temp in program.of_kind("temp"):
        if (narrow := _narrower(program, temp)) is not None:
            program = _narrowed(program, temp, narrow)
    types = {b.name: b.type for b in program.buffers}
    steps = tuple(_in_i32(step, types) if isinstance(step, Kernel) else step for step in program.steps)
    return program if steps == program.steps else replace(program, steps=steps)


def _narrower(program: Program, temp: Buffer) -> DType | None:
    """The narrowest dtype that holds all that kernels store in an integer temp, if it is narrower than the temp's."""
    if temp.type.dtype.kind not in "iu" or temp.type.dtype.bits < 16 or temp.alias:
        return None
    touching = [step for step in program.steps if temp.name in (*step.reads, *step.writes)]
    if any(b.alias == temp.name for b in program.buffers) or not all(isinstance(step, Kernel) for step in touching):
        return None
    accesses = [(k, s) for k in touching if isinstance(k, Kernel) for s in k.body if s.buffer == temp.name]
    if any(s.op not in ("store", "load") for _, s in accesses):
        return None
    ranges = [ranges_of(k).get(s.args[0]) for k, s in accesses if s.op == "store"]
    other = [dict(s.attrs).get("other", 0) for _, s in accesses if s.where]
    for dtype in NARROW:
        low, high = dtype.range
        if dtype.bits >= temp.type.dtype.bits or not ranges:
            return None
        if all(r is not None and low <= r[0] and r[1] <= high for r in ranges) and all(low <= v <= high for v in other):
            return dtype
    return None


def _narrowed(program: Program, temp: Buffer, dtype: DType) -> Program:
    """The program whose temp has another dtype, to and from which it is cast."""
    wide = temp.type.dtype
    buffers = tuple(replace(b, type=b.type.with_dtype(dtype)) if b.name == temp.name else b for b in program.buffers)
    types = {b.name: b.type for b in buffers}

    def rewritten(kernel: Kernel) -> Kernel:
        fresh = kernel.fresh_names()
        body: list[Stmt] = []
        for s in kernel.body:
            if s.buffer != temp.name:
                body.append(s)
            elif s.op == "store":
                body.append(Stmt(next(fresh), "cast", s.args, dtype, attrs=(("dtype", dtype),)))
                body.append(replace(s, args=(body[-1].name,), dtype=dtype))
            else:
                body.append(replace(s, name=next(fresh), dtype=dtype))
                body.append(Stmt(s.name, "cast", (body[-1].name,), wide, attrs=(("dtype", wide),)))
        return replace(kernel, body=tuple(body)).rehashed(types)

    steps = tuple(
        rewritten(step) if isinstance(step, Kernel) and temp.name in (*step.reads, *step.writes) else step
        for step in program.steps
    )
    return replace(program, buffers=buffers, steps=steps)


# -- registers ---------------------------------------------------------------------------------------------------------


def _in_i32(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """Kernel -> the kernel that computes in i32 what is i64 and known to fit."""
    ranges, (low, high) = ranges_of(kernel), I32.range
    small = {
        s.name
        for s in kernel.body
        if s.dtype is I64 and (known := ranges.get(s.name)) is not None and low <= known[0] and known[1] <= high
    }
    addresses = _address_slice(kernel)
    wide = {s.name for s in kernel.body if s.dtype is I64} - small
    narrowed = {
        s.name
        for s in kernel.body
        if s.name in small - addresses
        and s.op not in REDUCTIONS  # whose dtype is their own
        and (s.op == "cast" or wide.isdisjoint(s.args))
    }
    for s in reversed(kernel.body):  # to widen a value for each of its users again costs what it saves
        if s.name in narrowed and not any(_takes(u, s.name, narrowed) for u in kernel.body):
            narrowed.discard(s.name)
    if not narrowed:
        return kernel
    fresh = kernel.fresh_names()
    casts: dict[str, str] = {}
    body: list[Stmt] = []

    def cast(values: Iterable[str], dtype: DType) -> None:
        for value in values:
            if value not in casts:
                casts[value] = next(fresh)
                body.append(Stmt(casts[value], "cast", (value,), dtype, attrs=(("dtype", dtype),)))

    for s in kernel.body:
        if s.name in narrowed:
            attrs = tuple((key, I32 if key == "dtype" else value) for key, value in s.attrs)
            s = replace(s, dtype=I32, attrs=attrs)
            others = () if s.op == "cast" else (small - narrowed).intersection(s.args)
            cast((a for a in s.args if a in others), I32)
        else:
            alike = s.op == "cast" or s.op in REDUCTIONS or _compares(s, narrowed)
            others = () if alike else narrowed.intersection(s.args)
            cast((a for a in s.args if a in others), I64)
        body.append(replace(s, args=tuple(casts[a] if a in others else a for a in s.args)))
    return replace(kernel, body=tuple(body)).rehashed(types)


def _address_slice(kernel: Kernel) -> set[str]:
    """The backward slice of the addresses and masks of accesses: what proves that these are inside."""
    found: set[str] = set()
    for s in reversed(kernel.body):
        if s.buffer:
            found.update(v for entry in s.index for v, _ in entry.terms)
            found.update({s.where} - {""})
        elif s.name in found:
            found.update(s.uses)
    return found


def _takes(user: Stmt, value: str, narrowed: Set[str]) -> bool:
    """Whether a statement takes a value in i32."""
    if value not in user.uses:
        return False
    return value not in user.args or user.name in narrowed or user.op == "cast" or _compares(user, narrowed)


def _compares(s: Stmt, narrowed: Set[str]) -> bool:
    """Whether a statement compares values that are all i32."""
    return s.dtype is BOOL and all(a in narrowed for a in s.args)


# -- ranges ------------------------------------------------------------------------------------------------------------


def ranges_of(kernel: Kernel) -> dict[str, Range]:
    """The ranges of the integers of a kernel, where they follow from constants and the sizes of its axes."""
    axes: tuple[Axis, ...] = (*kernel.rows, *kernel.cols)
    known: dict[str, Range] = {a: (0, n - 1) for a, n in axes if isinstance(n, int) and n > 0}
    columns = prod(n for _, n in kernel.cols if isinstance(n, int))
    whole = all(isinstance(n, int) for _, n in kernel.cols)
    for s in kernel.body:
        if s.dtype is None or s.dtype.kind not in "iu" or not s.name:
            continue
        found: Range | None = None
        if s.op == "index":
            found = _of_index(s.index[0], known)
        elif s.op == "const":
            found = (s.attr("value"), s.attr("value"))
        elif s.op in ("argmax_cols", "argmin_cols") and whole and columns:
            found = (0, columns - 1)
        elif s.op == "cast" and (given := known.get(s.args[0])) is not None:
            found = given
        elif s.op == "where" and s.args[1] in known and s.args[2] in known:
            (a, b), (c, d) = known[s.args[1]], known[s.args[2]]
            found = (min(a, c), max(b, d))
        elif s.op in _OF_PAIRS and all(a in known for a in s.args):
            found = _OF_PAIRS[s.op](*(known[a] for a in s.args))
        low, high = s.dtype.range
        if found is not None and low <= found[0] and found[1] <= high:  # else it wraps around
            known[s.name] = found
    return known


def _of_index(index: Index, known: Mapping[str, Range]) -> Range | None:
    """The range of an affine index."""
    if not isinstance(index.const, int):
        return None
    low = high = index.const
    for variable, factor in index.terms:
        if variable not in known or not isinstance(factor, int):
            return None
        ends = [factor * end for end in known[variable]]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _products(a: Range, b: Range) -> Range:
    ends = [x * y for x, y in itertools.product(a, b)]
    return min(ends), max(ends)


_OF_PAIRS: dict[str, Callable[[Range, Range], Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _products,
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "right_shift": lambda a, b: (a[0] >> b[0], a[1] >> b[0]) if b[0] == b[1] and 0 <= b[0] < 32 else None,
    "bitwise_and": lambda a, b: (0, min(a[1], b[1])) if a[0] >= 0 and b[0] >= 0 else None,
    "floordiv": lambda a, b: (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] > 0 else None,
    "mod": lambda a, b: (0, b[0] - 1) if b[0] == b[1] > 0 else None,
}
"""Of two operands' ranges that of the result."""
