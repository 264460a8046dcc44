"""What stands above a kernel's text: where the user wrote it, what it reads and writes, what it moves and computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..ir.dims import Size, product
from ..ir.kernel import Kernel
from ..ir.node import REGISTRY, Note
from ..ir.op import Expr
from ..ir.statement import REDUCTIONS, Stmt
from ..ir.types import Type

LONGEST = 160
"""Characters of a place in the user's files."""


def kernel_comment(kernel: Kernel, above: Sequence[str] = ()) -> str:
    """The C comment above a kernel: its heading, if there is one, then its IR."""
    lines = [*above, *([""] if above else []), *str(kernel).splitlines()]
    return "\n".join(["/*", *(f" * {line}".rstrip() for line in lines), " */"])


def heading(kernel: Kernel, types: Mapping[str, Type], note: Note) -> tuple[str, ...]:
    """Lines for a comment.

    :param kernel: over the names that its text has.  :param types: of its buffers.
    :param note: the user's name and place of what it computes; made safe to stand in a comment.
    """
    buffers = [b for b in kernel.buffers if b != kernel.handed_on]
    written = [b for b in buffers if b in kernel.writes]
    read = [b for b in buffers if b not in kernel.writes]
    moved: Size = 0
    for buffer in buffers:
        moved = moved + buffer_bytes(kernel, types, buffer)
    lines = [f"{kernel.name}: {place}" if (place := comment_text(str(note))) else kernel.name]
    lines += [f"reads {', '.join(f'{b} {types[b]}' for b in read)}"] if read else []
    lines += [f"writes {', '.join(f'{b} {types[b]}' for b in written)}"] if written else []
    return (*lines, f"moves {moved} bytes, computes {operations(kernel)} operations")


def comment_text(text: str) -> str:
    """A user's text as a line of a comment that it cannot end: printable ASCII, no comment signs, no backslashes."""
    plain = re.sub(r"[^ -~]|\\", "?", text.encode("ascii", "backslashreplace").decode())
    return re.sub(r"\*(?=/)|/(?=\*)", r"\g<0> ", plain)[:LONGEST].strip()


def buffer_bytes(kernel: Kernel, types: Mapping[str, Type], buffer: str) -> Size:
    """Bytes that a kernel moves of a buffer: all of it once; of one that is read, or updated, through data, what
    is read and stored.
    """
    uses = [s for s in kernel.body if s.buffer == buffer]
    itemsize = types[buffer].dtype.itemsize
    if all(
        (s.op == "load" or (s.op == "store" and s.where))
        and any(v.startswith("%") for i in s.index for v, _ in i.terms)
        for s in uses
    ):
        read: Size = 0
        for s in uses:
            read = read + _times(kernel, s)
        return read * itemsize
    return types[buffer].count * itemsize


def operations(kernel: Kernel) -> Size:
    """Arithmetic operations, those that a later pass repeats counted again; a function of one value is one."""
    total: Size = 0
    for phase in kernel.passes:
        for s in (*phase.row, *phase.body, *phase.roots):
            lower = getattr(REGISTRY.get(s.op), "lower", None)
            if (
                s.op in REDUCTIONS
                or s.op in ("scan", "accum")
                or (isinstance(lower, Expr) and s.op not in ("const", "cast"))
            ):
                total = total + _times(kernel, s)
    return total


def _times(kernel: Kernel, s: Stmt) -> Size:
    """How often a statement runs."""
    columns = kernel.col_count if kernel.is_column(s) else 1
    return product([kernel.row_count, columns])
