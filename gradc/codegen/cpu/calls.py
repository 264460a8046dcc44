"""The library functions that a program's calls name: how each is written in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.dims import Size
from ...ir.kernel import Call, Program
from .grouped import grouped_call, grouped_functions
from .products import product_call
from .put_rows import put_rows_call, put_rows_functions
from .sorts import sort_call, sort_functions


@dataclass(frozen=True)
class CallText:
    """A call as the entry runs it.

    :param template: the statements of the call, over ``p``.
    :param arguments: ``p``; its ``extents`` are what GRADC_BOUNDS looks at first.
    :param workspace: bytes of the workspace that it needs, as C, or "".
    :param local: bytes that each thread keeps for it, as C, or "".
    """

    template: str
    arguments: Any
    workspace: str = ""
    local: str = ""


@dataclass(frozen=True)
class CpuCall:
    """A library function.

    :param write: ``(call, program, place of each buffer's memory, size -> C, whether accesses are checked)``.
    :param functions: what stands above the entry for all calls of it in a program.
    :param multiplies: it calls the runtime's matrix product, which is most of the runtime's code.
    """

    write: Callable[[Call, Program, Mapping[str, int], Callable[[Size], str], bool], CallText]
    functions: Callable[[Program, Sequence[Call]], list[str]] = lambda program, calls: []
    multiplies: bool = False


def _product(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> CallText:
    return CallText("cpu/product.c.j2", product_call(call, program, place, over_dims, checked))


def _sort(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> CallText:
    made = sort_call(call, program, place, over_dims, checked)
    return CallText("cpu/argsort_call.c.j2", made, made.bytes("workspace"), made.bytes("local"))


def _put_rows(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> CallText:
    return CallText("cpu/put_rows_call.c.j2", put_rows_call(call, program, place, over_dims, checked))


def _grouped(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> CallText:
    return CallText("cpu/grouped_call.c.j2", grouped_call(call, program, place, over_dims, checked))


CALLS = {
    **dict.fromkeys(("matmul", "integer_matmul"), CpuCall(_product, multiplies=True)),
    **{op: CpuCall(_grouped, grouped_functions(op), multiplies=True) for op in ("grouped_matmul", "grouped_outer")},
    **dict.fromkeys(("argsort_rows", "sort_segments"), CpuCall(_sort, sort_functions)),
    "put_rows": CpuCall(_put_rows, put_rows_functions),
}
"""The functions by the name of their op."""
