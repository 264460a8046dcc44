"""Scans along the columns: what is kept of the columns so far, and the statements that take it one column further."""

from __future__ import annotations

from typing import TypeAlias

from ...ir.statement import Stmt
from ...ir.types import F64, DType
from ..expr import carrier, variable
from ..index import literal
from .reductions import neutral_extreme

RunningValue: TypeAlias = tuple[str, str, str]
"""What a scan keeps of the columns so far: C type, name and value before the first column of the variable, or of the
array with one for each row of several side by side.
"""


def scan(s: Stmt, operand: DType, number: int, place: str, lane: str = "") -> tuple[list[RunningValue], list[str], str]:
    """A scan; floats are summed, multiplied and recurred in f64, so that each column of a long row is rounded once.

    :param operand: the dtype of what is scanned.
    :param number: of the scan in its kernel, one for each pass that computes it.
    :param place: the column's position, as C.
    :param lane: the row's place among those that are scanned side by side, as C, or "".
    :returns: what it keeps, the statements of one column that take it further, and the column's value, as C.
    """
    assert s.dtype is not None
    ctype, value, at = carrier(s.dtype), variable(s.args[-1]), f"[{lane}]" if lane else ""
    wide, name, state = "f64" if s.dtype.is_float else ctype, f"state{number}", f"state{number}{at}"
    if s.combine in ("sum", "prod"):
        sign, start = ("+", "0") if s.combine == "sum" else ("*", "1")
        return [(wide, name, start)], [f"{state} {sign}= {value};"], f"({ctype}){state}"
    if s.combine == "affine":
        factor = variable(s.args[0])
        update = f"{state} = {factor} == 0 ? {value} : {factor} * {state} + {value};"
        return [(wide, name, "0")], [update], f"({ctype}){state}"
    if s.combine == "logsumexp":  # log(state) + top: state is the sum of exp(x - top), and top the largest x so far
        top, below = f"top{number}{at}", f"below{number}"
        updates = [  # equal infinities have no difference
            f"const f64 {below} = {value} == {top} ? 1 : exp_f64({value} > {top} ? {top} - {value} : {value} - {top});",
            f"{state} = {value} > {top} ? {state} * {below} + 1 : {state} + {below};",
            f"{top} = {value} > {top} ? {value} : {top};",
        ]
        kept = [("f64", name, "0"), ("f64", f"top{number}", literal(-float("inf"), F64))]
        return kept, updates, f"({ctype})({top} + log_f64({state}))"
    largest = s.combine in ("max", "argmax")
    best, better = f"best{number}{at}", ">=" if largest else "<="
    running = [(carrier(operand), f"best{number}", neutral_extreme(operand, largest))]
    wins = f"{value} {better} {best}" + (f" || {value} != {value}" if operand.is_float else "")
    update = f"{best} = {wins} ? {value} : {best};"  # NaN is never worse, and stays
    if s.combine in ("max", "min"):
        return running, [update], best
    found = f"found{number}{at}"
    return [*running, ("i64", f"found{number}", "0")], [f"{found} = {wins} ? {place} : {found};", update], found
