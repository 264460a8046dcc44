"""Loop-invariant code motion of masked loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import same
from ...ir.kernel import Kernel
from ...ir.statement import Stmt
from ...ir.types import Type


def hoist_loads(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """load x[n] where %k  ->  %1 = load x[n], where %k, %1, 0: loads at places of the row, whose mask goes along the
    columns, are speculated, once for a row, and selected for each column.  Those that could leave their buffer where
    the mask is false are left.

    :param types: of the kernel's buffers.
    """
    names, once = kernel.fresh_names(), dict[str, str]()
    body: list[Stmt] = []

    def value(s: Stmt) -> str:
        if (text := str(s)) not in once:
            once[text] = next(names)
            body.append(replace(s, name=once[text]))
        return once[text]

    for s in kernel.body:
        if s.op == "load" and s.where and _is_dereferenceable(kernel, s, types[s.buffer]):
            loaded = value(Stmt("", "load", (), s.dtype, s.buffer, s.index))
            s = Stmt(s.name, "where", (s.where, loaded, value(passthrough(s))), s.dtype)
        body.append(s)
    return replace(kernel, body=tuple(body))


def passthrough(load: Stmt) -> Stmt:
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
        axis = entry.variable
        if axis not in sizes or not same(sizes[axis], size):
            return False
    return True
