"""copy_donated: a new value of a donated input is written over it, at the latest by a copy at the end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...analysis.lifetimes import donations
from ...ir.kernel import Buffer, Kernel, Program
from ...ir.lexer import suffixed
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ..manager import program_pass


@program_pass("BITS")
def copy_donated(program: Program, *, donate: Collection[str]) -> Program:
    """store w.2[i]; load w[j]  ->  store w.2[i]; load w[j]; store w.3[i] <- load w.2[i], where w.3 may lie where w does

    :param donate: inputs, each for the output of its name.
    """
    for name in [b.name for b in program.of_kind("input") if b.name in donate]:
        program = _copied(program, name) or program
    return program


def _copied(program: Program, name: str) -> Program | None:
    """The program whose output ``name`` is copied to its place by the last step; None if that place may be the input's
    as it is, or cannot be.
    """
    old = dict(program.outputs).get(name)
    if old is None or old in donations(program, {name: None}) or program.buffer[old].alias:
        return None
    number = 2
    while (new := suffixed(name, f".{number}")) in program.types:
        number += 1
    type_ = program.types[old]
    copied = replace(
        program,
        buffers=(
            *(replace(b, kind="temp") if program.root(b.name) == old else b for b in program.buffers),
            Buffer(new, type_, "output"),
        ),
        steps=(*program.steps, copy_of(old, new, type_)),
        outputs=tuple((key, new if key == name else buffer) for key, buffer in program.outputs),
    )
    others = any(program.root(buffer) == old for key, buffer in program.outputs if key != name)
    return None if others or new not in donations(copied, {name: None}) else copied


def copy_of(source: str, target: str, type_: Type) -> Kernel:
    """The kernel that copies one buffer into another of the same type."""
    axes = [(f"i{a}", size) for a, size in enumerate(type_.shape) if size != 1]
    index = tuple(Index() if size == 1 else Index.of(f"i{a}") for a, size in enumerate(type_.shape))
    body = (
        Stmt("%0", "load", (), type_.dtype, buffer=source, index=index),
        Stmt("", "store", ("%0",), type_.dtype, buffer=target, index=index),
    )
    return Kernel("copy", tuple(axes[:-1]), tuple(axes[-1:]), body).named_by_structure(
        "copy", {source: type_, target: type_}
    )
