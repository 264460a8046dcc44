"""Reductions over the columns: those of blocks of columns, merged into totals.

The terms of a float's sum or product are put into an array, which a function of the templates combines in an order that
its text states: a loop with one accumulator has as many partial sums as a compiler makes of it.
"""

from __future__ import annotations

from ...ir.statement import REDUCTIONS, Stmt
from ...ir.types import F32, F64, DType
from ..expr import carrier, variable
from ..index import literal
from .records import Reduction


def reduction(
    s: Stmt, operand: DType, place: str, at: str, wide_blocks: bool, half: bool = False, there: str = ""
) -> Reduction:
    """A reduction of values that are ``operand``.

    :param place: the position along the columns, as C, :param at: and that in a block of them.
    :param wide_blocks: blocks of f32 are added in f64 too, which costs nothing where memory or a gather bounds the
        pass.
    :param half: that of the second half of a block, whose accumulators have names of their own.
    :param there: where the terms of a block lie side by side in memory already, as C, or "".
    """
    assert s.dtype is not None
    kind = REDUCTIONS[s.op]
    if kind == "sum" and s.dtype is F64:
        return _sum_f64(s, at, there)
    if kind in ("sum", "prod") and s.dtype.is_float:
        return _sum_or_product(s, kind, at, wide_blocks, there)
    if kind in ("sum", "prod"):
        return _of_integers(s, kind, half)
    if kind in ("max", "min"):
        return _extreme(s, kind, operand, half)
    return _place_of_extreme(s, kind, operand, place)


def _of_block(name: str, half: bool) -> str:
    """The accumulator of a block of columns, or of its second half."""
    return f"{'half' if half else 'block'}_{name}"


def _sum_f64(s: Stmt, at: str, there: str) -> Reduction:
    """There is no wider total: what its additions lose is kept beside it."""
    name = variable(s.name)
    terms = there or f"terms_{name}"
    return Reduction(
        totals=f"f64 total_{name} = 0, lost_{name} = 0;",
        block="",
        update="" if there else f"terms_{name}[{at}] = {variable(s.args[0])};",
        merge=f"gradc_add(&total_{name}, &lost_{name}, {combined_terms('sum', 'f64', 'f64', terms)});",
        result=f"const f64 {name} = gradc_total(total_{name}, lost_{name});",
        terms=() if there else ("f64", terms),
        fine=True,
    )


def _sum_or_product(s: Stmt, kind: str, at: str, wide_blocks: bool, there: str) -> Reduction:
    """Sums of blocks of f32 add up in f64."""
    assert s.dtype is not None
    name, ctype = variable(s.name), carrier(s.dtype)
    sign, start = ("+", "0") if kind == "sum" else ("*", "1")
    total = "f64" if kind == "sum" else ctype
    block = combined_terms(kind, ctype, total if wide_blocks else ctype, there or f"terms_{name}")
    return Reduction(
        totals=f"{total} total_{name} = {start};",
        block="",
        update="" if there else f"terms_{name}[{at}] = {variable(s.args[0])};",
        merge=f"total_{name} {sign}= {block};",
        result=f"const {ctype} {name} = ({ctype})total_{name};",
        terms=() if there else (ctype, f"terms_{name}"),
    )


def combined_terms(kind: str, ctype: str, wide: str, terms: str) -> str:
    """The sum or product of a block's terms, as C.

    :param ctype: the type of a term, :param wide: and that in which they are combined.
    """
    return f"gradc_{kind}_{ctype}{'' if wide == ctype else f'_in_{wide}'}({terms}, c1 - c0)"


def _of_integers(s: Stmt, kind: str, half: bool) -> Reduction:
    """The same in any order."""
    assert s.dtype is not None
    name, value, ctype = variable(s.name), variable(s.args[0]), carrier(s.dtype)
    sign, start = ("+", "0") if kind == "sum" else ("*", "1")
    block = _of_block(name, half)
    return Reduction(
        totals=f"{ctype} total_{name} = {start};",
        block=f"{ctype} {block} = {start};",
        update=f"{block} {sign}= {value};",
        merge=f"total_{name} {sign}= {block};",
        result=f"const {ctype} {name} = ({ctype})total_{name};",
        clauses=((sign, block),),
    )


def _extreme(s: Stmt, kind: str, operand: DType, half: bool) -> Reduction:
    """The largest or least; NaN wins: counted beside the comparison that loses it."""
    assert s.dtype is not None
    name, value, ctype = variable(s.name), variable(s.args[0]), carrier(s.dtype)
    block, nans = _of_block(name, half), f"{'half' * half}nan_{name}"
    total, better = f"total_{name}", ">" if kind == "max" else "<"
    worst = neutral_extreme(operand, kind == "max")
    declared = f"{ctype} {block} = {worst};"
    update = f"{block} = {value} {better} {block} ? {value} : {block};"
    merge = f"{total} = {block} {better} {total} ? {block} : {total};"
    clauses = [(kind, block)]
    if operand.is_float:
        nan = "f64_of_bits(0x7ff8000000000000ull)" if operand is F64 else "f32_of_bits(0x7fc00000u)"
        declared += f" i32 {nans} = 0;"
        update += f"\n{nans} |= {value} != {value};"
        merge = f"if ({total} == {total}) {{ {merge} if ({nans}) {total} = {nan}; }}"
        clauses.append(("|", nans))
    return Reduction(
        totals=f"{ctype} {total} = {worst};",
        block=declared,
        update=update,
        merge=merge,
        result=f"const {ctype} {name} = {total};",
        clauses=tuple(clauses),
    )


def _place_of_extreme(s: Stmt, kind: str, operand: DType, place: str) -> Reduction:
    """The position of the first of the largest or least; the first NaN wins."""
    name, value = variable(s.name), variable(s.args[0])
    total, best, better = f"total_{name}", f"best_{name}", ">" if kind == "argmax" else "<"
    wins = f"{total} < 0 || {value} {better} {best} || ({value} != {value} && {best} == {best})"
    return Reduction(
        totals=f"i64 {total} = -1; {carrier(operand)} {best} = 0;",
        block="",
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
