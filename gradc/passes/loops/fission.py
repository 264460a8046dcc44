"""Loop fission: one of a kernel's results in a kernel of its own, before it."""

from __future__ import annotations

from dataclasses import replace

from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS
from ...ir.walk import backward_slice
from .legality import IllegalMove, attempt, refuse
from .reorder import reorder


def fission(program: Program, number: int, buffer: str) -> Program:
    """rows(n) cols(k) { store s[n] <- sum_cols f; accum y[k] <- g(sum_cols f) }  ->  rows(n) cols(k) { store s[n] <-
    sum_cols f };  rows(n) cols(k) { accum y[k] <- g(load s[n]) }

    What is not reduced from columns is computed in both; the first of the two has the last row axis as its columns
    then.  Strategies of accums stay with them, in the second.

    :param number: of a kernel among the steps, :param buffer: and where it stores a value of each row.
    :raises IllegalMove: it is no kernel, or not the one store of a value of rows; the value is a reduction in another
        dtype than is stored, or not of columns among others that are; the kernel reads what it stores, or does nothing
        else.
    """
    kernel = program.steps[number]
    if not isinstance(kernel, Kernel):
        raise IllegalMove(f"fission of {kernel.name}: it is no kernel")
    stores = [s for s in kernel.body if s.buffer == buffer]
    if [s.op for s in stores] != ["store"] or kernel.is_column(stores[0]):
        refuse("fission", kernel, f"{buffer} is not stored once for each row")
    (store,), rest = stores, [s for s in kernel.body if s.buffer != buffer]
    if not any(not s.name for s in rest):
        refuse("fission", kernel, "it does nothing else")
    body = backward_slice(kernel.body, store.uses)
    first = replace(kernel, body=(*body, store), order="", strategy=())
    if any(s.op in REDUCTIONS for s in body):  # the second reads the sum
        (value,) = store.args
        at = next(n for n, s in enumerate(rest) if s.name == value)
        if rest[at].dtype is not program.types[buffer].dtype:
            refuse("fission", kernel, f"{value} is not what {buffer} has of it")
        rest[at] = replace(rest[at], op="load", args=(), buffer=buffer, index=store.index, where="", attrs=())
    elif kernel.rows and not any(map(kernel.is_column, body)):
        first = replace(first, cols=())
        first = attempt(reorder, first, [kernel.rows[-1][0]]) or first
    else:
        refuse("fission", kernel, f"what it stores to {buffer} goes through the columns")
    live = {s.name for s in backward_slice(rest, (v for s in rest if not s.name for v in s.uses))}
    second = replace(kernel, body=tuple(s for s in rest if not s.name or s.name in live))
    made = (first.rehashed(program.types), second.rehashed(program.types))
    return replace(program, steps=(*program.steps[:number], *made, *program.steps[number + 1 :]))
