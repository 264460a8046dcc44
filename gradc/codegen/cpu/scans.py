"""Scans along the columns: what is kept of the columns so far, and the statements that take it one column further."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.statement import Stmt
from ...ir.types import F64, DType
from ..expr import carrier, variable
from ..index import literal
from .reductions import neutral_extreme


@dataclass(frozen=True)
class RunningValue:
    """What a scan keeps of the columns so far.

    :param name: of the variable, or of the array with one for each row of several side by side.
    :param ctype: its type.
    :param start: its value before the first column.
    """

    name: str
    ctype: str
    start: str

    @property
    def number(self) -> str:
        """Of the scan."""
        return self.name.lstrip("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Scan:
    """A scan along the columns.

    :param running: what is kept of the columns so far.
    :param update: the statements of one column that take it further.
    :param value: the column's value, as C.
    """

    running: tuple[RunningValue, ...]
    update: tuple[str, ...]
    value: str


def scan(s: Stmt, operand: DType, number: int, place: str, lane: str = "") -> Scan:
    """A scan; floats are summed, multiplied and recurred in f64, so that each column of a long row is rounded once.

    :param operand: the dtype of what is scanned.
    :param number: of the scan in its kernel, one for each pass that computes it.
    :param place: the column's position, as C.
    :param lane: the row's place among those that are scanned side by side, as C, or "".
    """
    assert s.dtype is not None
    ctype, value, at = carrier(s.dtype), variable(s.args[-1]), f"[{lane}]" if lane else ""
    wide, state = "f64" if s.dtype.is_float else ctype, f"state{number}{at}"

    def running(name: str, of: str, start: str) -> RunningValue:
        return RunningValue(f"{name}{number}", of, start)

    if s.combine in ("sum", "prod"):
        sign, start = ("+", "0") if s.combine == "sum" else ("*", "1")
        return Scan((running("state", wide, start),), (f"{state} {sign}= {value};",), f"({ctype}){state}")
    if s.combine == "affine":
        factor = variable(s.args[0])
        update = f"{state} = {factor} == 0 ? {value} : {factor} * {state} + {value};"
        return Scan((running("state", wide, "0"),), (update,), f"({ctype}){state}")
    if s.combine == "logsumexp":
        return _logsumexp(s, running("state", "f64", "0"), running("top", "f64", literal(-float("inf"), F64)), at)
    largest = s.combine in ("max", "argmax")
    worst, better = neutral_extreme(operand, largest), ">=" if largest else "<="
    best = running("best", carrier(operand), worst)
    wins = f"{value} {better} {best.name}{at}" + (f" || {value} != {value}" if operand.is_float else "")
    update = f"{best.name}{at} = {wins} ? {value} : {best.name}{at};"  # NaN is never worse, and stays
    if s.combine in ("max", "min"):
        return Scan((best,), (update,), f"{best.name}{at}")
    found = running("found", "i64", "0")
    return Scan(
        (best, found), (f"{found.name}{at} = {wins} ? {place} : {found.name}{at};", update), f"{found.name}{at}"
    )


def _logsumexp(s: Stmt, total: RunningValue, top: RunningValue, at: str) -> Scan:
    """log(total) + top, where total is the sum of exp(x - top), and top the largest x so far."""
    assert s.dtype is not None
    value, sum_, most = variable(s.args[0]), f"{total.name}{at}", f"{top.name}{at}"
    below = f"exp_f64({value} > {most} ? {most} - {value} : {value} - {most})"
    return Scan(
        (total, top),
        (  # equal infinities have no difference
            f"const f64 below{total.number} = {value} == {most} ? 1 : {below};",
            f"{sum_} = {value} > {most} ? {sum_} * below{total.number} + 1 : {sum_} + below{total.number};",
            f"{most} = {value} > {most} ? {value} : {most};",
        ),
        f"({carrier(s.dtype)})({most} + log_f64({sum_}))",
    )
