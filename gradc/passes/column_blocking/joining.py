"""How a kernel beside a loop joins it: what its prologue and its epilogue have in common."""

from __future__ import annotations

from collections.abc import Callable

from ...ir.kernel import Kernel, Loop, Program
from ..loops.legality import attempt, refuse


def joined(
    program: Program, loop: Loop, join: Callable[[Program, Loop, int], tuple[Program, Loop]]
) -> tuple[Program, Loop]:
    """The program in which every step that may join a loop has done so, and the loop then.

    :param loop: a step of the program.  :param join: of a program, its loop and a step's number; raises IllegalMove
        where that step cannot join.
    """
    while True:
        made = next((made for n in range(len(program.steps)) if (made := attempt(join, program, loop, n))), None)
        if made is None:
            return program, loop
        program, loop = made


def check_between(what: str, program: Program, kernel: Kernel, loop: Loop) -> None:
    """That a kernel may go to where the loop is.

    :param what: it is to be.  :raises IllegalMove: a step between them writes what it reads or writes, or reads what it
        writes.
    """
    root = program.root
    reads, writes = set(map(root, kernel.reads)), set(map(root, kernel.writes))
    first, last = sorted((program.steps.index(kernel), program.steps.index(loop)))
    for step in program.steps[first + 1 : last]:
        if {*map(root, step.writes)} & (reads | writes) or {*map(root, step.reads)} & writes:
            refuse(what, kernel, "other steps come between")
