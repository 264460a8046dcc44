"""Reductions over the columns: those of blocks of columns, merged into totals.

Each column of a strip has accumulators of its own, which are combined in an order that the templates' text states: a
loop with one accumulator has as many partial sums as a compiler makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.statement import REDUCTIONS, Stmt
from ...ir.types import F32, F64, DType
from ..expr import carrier, variable
from ..index import literal


@dataclass(frozen=True)
class Accumulators:
    """Accumulators of a reduction, one for each column of a strip, and one for columns that fill no strip.

    :param ctype: their type, :param name: the array of them, and :param start: what they begin with, as C.
    """

    ctype: str
    name: str
    start: str


@dataclass(frozen=True)
class Reduction:
    """A reduction over the columns: that of a block of columns, merged into totals.

    :param totals: declarations before the columns.
    :param update: statements of one column, which has the accumulators ``[lane]``.
    :param merge: the statements at the end of a block.
    :param result: the statement behind the columns.
    :param lanes: the accumulators of a block.
    :param vectors: whether its loop may be one of vectors.
    :param fine: whether blocks are short.
    """

    totals: str
    update: str
    merge: str
    result: str
    lanes: tuple[Accumulators, ...] = ()
    vectors: bool = True
    fine: bool = False


def reduction(s: Stmt, operand: DType, place: str, lanes: int, wide_blocks: bool) -> Reduction:
    """A reduction of values that are ``operand``.

    :param place: the position along the columns, as C.
    :param lanes: how many columns have accumulators of their own.
    :param wide_blocks: blocks of f32 are added in f64 too, which costs nothing where memory or a gather bounds the
        pass.
    """
    kind = REDUCTIONS[s.op]
    if kind in ("sum", "prod"):
        return _sum_or_product(s, kind, lanes, wide_blocks)
    if kind in ("max", "min"):
        return _extreme(s, kind, operand, lanes)
    return _place_of_extreme(s, kind, operand, place)


def accumulator_type(s: Stmt, wide_blocks: bool) -> str:
    """The C type of what a block of columns is reduced in."""
    assert s.dtype is not None
    return "f64" if wide_blocks and s.dtype.is_float and REDUCTIONS[s.op] == "sum" else carrier(s.dtype)


def combined_lanes(kind: str, of: Accumulators, lanes: int) -> str:
    """The combination of accumulators, as C.

    :param kind: ``sum``, ``prod``, ``max``, ``min`` or, of flags, ``any``.
    """
    return f"gradc_{kind}_{of.ctype}({of.name}, {lanes})"


def _sum_or_product(s: Stmt, kind: str, lanes: int, wide_blocks: bool) -> Reduction:
    """Blocks of f32 add up in f64; of f64 there is no wider total: what its additions lose is kept beside it."""
    assert s.dtype is not None
    name, ctype = variable(s.name), carrier(s.dtype)
    sign, start = ("+", "0") if kind == "sum" else ("*", "1")
    of = Accumulators(accumulator_type(s, wide_blocks), f"lanes_{name}", start)
    block = combined_lanes(kind, of, lanes)
    exact = kind == "sum" and s.dtype is F64
    total = "f64" if kind == "sum" and s.dtype.is_float else ctype
    whole = f"gradc_total(total_{name}, lost_{name})" if exact else f"({ctype})total_{name}"
    return Reduction(
        totals=f"{total} total_{name} = {start}{f', lost_{name} = 0' if exact else ''};",
        lanes=(of,),
        update=f"{of.name}[lane] {sign}= {variable(s.args[0])};",
        merge=f"gradc_add(&total_{name}, &lost_{name}, {block});" if exact else f"total_{name} {sign}= {block};",
        result=f"const {ctype} {name} = {whole};",
        fine=exact,
    )


def _extreme(s: Stmt, kind: str, operand: DType, lanes: int) -> Reduction:
    """The largest or least; NaN wins: flagged beside the comparison that loses it."""
    assert s.dtype is not None
    name, value, ctype = variable(s.name), variable(s.args[0]), carrier(s.dtype)
    total, better = f"total_{name}", ">" if kind == "max" else "<"
    worst = neutral_extreme(operand, kind == "max")
    best, nans = Accumulators(ctype, f"lanes_{name}", worst), Accumulators(_flag(operand), f"nan_{name}", "0")
    block = f"block_{name}"
    update = f"{best.name}[lane] = {value} {better} {best.name}[lane] ? {value} : {best.name}[lane];"
    merge = [
        f"const {ctype} {block} = {combined_lanes(kind, best, lanes)};",
        f"{total} = {block} {better} {total} ? {block} : {total};",
    ]
    if operand.is_float:
        nan = "f64_of_bits(0x7ff8000000000000ull)" if operand is F64 else "f32_of_bits(0x7fc00000u)"
        update += f"\n{nans.name}[lane] |= {value} != {value};"
        merge.append(f"if ({combined_lanes('any', nans, lanes)}) {total} = {nan};")
    return Reduction(
        totals=f"{ctype} {total} = {worst};",
        lanes=(best, nans) if operand.is_float else (best,),
        update=update,
        merge="\n".join(merge),
        result=f"const {ctype} {name} = {total};",
    )


def _flag(operand: DType) -> str:
    """The type of a flag that is as wide as what it is of, so that a vector of comparisons is one of flags."""
    return "i64" if operand is F64 else "i32"


def _place_of_extreme(s: Stmt, kind: str, operand: DType, place: str) -> Reduction:
    """The position of the first of the largest or least; the first NaN wins."""
    name, value = variable(s.name), variable(s.args[0])
    total, best, better = f"total_{name}", f"best_{name}", ">" if kind == "argmax" else "<"
    wins = f"{total} < 0 || {value} {better} {best} || ({value} != {value} && {best} == {best})"
    return Reduction(
        totals=f"i64 {total} = -1; {carrier(operand)} {best} = 0;",
        update=f"if ({wins}) {best} = {value}, {total} = {place};",
        merge="",
        result=f"const i64 {name} = gradc_max({total}, 0);",
        vectors=False,
    )


def neutral_extreme(dtype: DType, lowest: bool) -> str:
    """The value that every other one is better than, or equal to."""
    if dtype.is_float:
        return literal(-float("inf") if lowest else float("inf"), F64 if dtype is F64 else F32)
    low, high = dtype.range if dtype.is_integer else (0, 1)
    return literal(low if lowest else high, dtype)
