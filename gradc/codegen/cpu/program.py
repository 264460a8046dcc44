"""Programs as C: kernels in translation units, and one entry that runs every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ... import knobs
from ...ir.dims import Assumption, Dim, Size, substitute, symbol
from ...ir.kernel import Call, Kernel, Program, Select, Step, alternatives
from ...ir.types import Type
from ..index import size
from ..jinja import render
from .calls import CALLS, CallText
from .kernel import KernelSource, render_kernel
from .products import readers
from .row_memory import cost

PER_UNIT = 8
"""Kernels per translation unit: units compile side by side."""
WIDE_VECTOR_COST = 12
"""Additions' worth of one op from which a kernel gets the widest vectors there are: exp, tanh, erf, sigmoid gain a
third by 512 bits on processors for which compilers prefer 256, and what only moves and adds loses.
"""


@dataclass(frozen=True)
class Source:
    """A program as C.

    :param units: texts compiled apart and linked.
    :param kernels: kernel name -> its own text.
    :param sites: step number -> (op, source) of its check.
    """

    units: tuple[str, ...]
    kernels: Mapping[str, str]
    sites: Mapping[int, tuple[str, str]]

    @property
    def text(self) -> str:
        return "\n".join(self.units)


@dataclass(frozen=True)
class KernelCall:
    """A kernel as the entry calls it.

    :param buffers: pointers, as C, :param dims: and sizes.
    :param has_workspace, has_thread_memory: which functions of it say how many bytes it needs.
    """

    buffers: tuple[str, ...]
    dims: tuple[str, ...]
    has_workspace: bool
    has_thread_memory: bool


@dataclass(frozen=True)
class StepText:
    """A kernel or a library call as the entry runs it.

    :param number: of the step in the program.
    :param name: of the kernel or the call.
    :param opening, closing: what stands around it where the dims decide whether it runs.
    :param kernel: the kernel, :param call: or the call.
    """

    number: int
    name: str
    opening: str
    closing: str
    kernel: KernelCall | None
    call: CallText | None


def render_program(program: Program) -> Source:
    """The C of a program: kernels in units of eight, and one entry that runs them."""
    types = program.types
    kernels: dict[str, KernelSource] = {}
    costly: set[str] = set()
    sites: dict[int, tuple[str, str]] = {}
    for number, step in enumerate(program.steps):
        for item in alternatives(step):
            if isinstance(item, Kernel):
                if item.name not in kernels:  # of steps that share a kernel the first one's names stand
                    kernels[item.name] = render_kernel(item, types)
                if any(cost(s) >= WIDE_VECTOR_COST for s in item.body):
                    costly.add(item.name)
                for s in item.body:
                    if s.op == "check":
                        sites[number] = (s.attr("op"), s.attr("source"))
    calls = [item for step in program.steps for item in alternatives(step) if isinstance(item, Call)]
    numbers = {b.name: i for i, b in enumerate(b for b in program.buffers if not b.alias)}
    place = {b.name: numbers[program.root(b.name)] for b in program.buffers}
    dims = {name: f"n[{i}]" for i, name in enumerate(program.dims)}
    steps = [
        (number, _step(number, step, program, kernels, types, place, dims)) for number, step in enumerate(program.steps)
    ]
    entry = render(
        "cpu/program.c.j2",
        kernels=kernels,
        steps=steps,
        readers=readers(program, calls),
        functions=[text for op in CALLS for text in CALLS[op].functions(program, [c for c in calls if c.op == op])],
        workspace_sizes=_sizes(steps, "workspace_bytes", lambda k: k.has_workspace, lambda call: call.workspace),
        thread_sizes=_sizes(steps, "local_bytes", lambda k: k.has_thread_memory, lambda call: call.local),
    )
    texts = {name: kernel.text for name, kernel in kernels.items()}
    return Source(_units(texts, costly, entry), texts, sites)


def _units(texts: Mapping[str, str], costly: set[str], entry: str) -> tuple[str, ...]:
    """The texts of kernels in translation units: those that get wide vectors apart, the entry behind the last."""
    light, wide = ([name for name in texts if (name in costly) is pays] for pays in (False, True))
    parts = [names[i : i + PER_UNIT] for names in (wide, light) for i in range(0, len(names), PER_UNIT)] or [[]]
    # one unit needs no linkage between its functions; several share hidden symbols
    linkage = "static __attribute__((unused))" if len(parts) == 1 else '__attribute__((visibility("hidden")))'
    units = []
    for part in parts:
        vectors = '#include "wide_vectors.h"\n' if part and part[0] in costly else ""
        includes = f'{vectors}#include "math.h"\n#include "program.h"\n#define GRADC_SHARED {linkage}\n'
        units.append("\n".join([includes, *(texts[name] for name in part)]))
    units[-1] += f"\n{entry}"
    return tuple(units)


def _sizes(
    steps: Sequence[tuple[int, Sequence[StepText]]],
    function: str,
    asked: Callable[[KernelCall], bool],
    of_call: Callable[[CallText], str],
) -> list[str]:
    """The statements that raise ``most`` to what each step needs, each once."""
    lines: dict[str, None] = {}
    for _, cases in steps:
        line = ""
        for s in cases:
            own = ""
            if s.kernel and asked(s.kernel):
                dims = ", ".join(s.kernel.dims) or "0"
                own = f"most = gradc_max(most, {s.name}_{function}((const i64[]){{ {dims} }}));"
            elif s.call and of_call(s.call):
                own = f"most = gradc_max(most, {of_call(s.call)});"
            line += f"{s.opening} {own} {s.closing} " if s.opening else own
        if "most" in line:
            lines[line.strip()] = None
    return [*lines]


def _step(
    number: int,
    step: Step,
    program: Program,
    kernels: Mapping[str, KernelSource],
    types: Mapping[str, Type],
    place: Mapping[str, int],
    dims: Mapping[str, str],
) -> list[StepText]:
    """A step, or each case of a choice.

    :param place: the number of each buffer's memory in the program's table, :param dims: and each dim as C.
    """
    cases: list[tuple[Assumption | None, Kernel | Call]] = (
        [*step.cases] if isinstance(step, Select) else [(None, item) for item in alternatives(step)]
    )
    out, before = [], ""
    for when, item in cases:
        guard = f"if ({_over(when.left, dims)} {when.relation} {_over(when.right, dims)})" if when is not None else ""
        kernel, call = None, None
        if isinstance(item, Kernel):
            source = kernels[item.name]
            kernel = KernelCall(
                tuple(f"buf[{place[b]}]" for b in item.buffers),
                tuple(dims[d] for d in item.dims(types)),
                source.has_workspace,
                source.has_thread_memory,
            )
        else:
            write = CALLS[item.op].write
            call = write(item, program, place, lambda value: _over(value, dims), knobs.BOUNDS.get())
        chosen = bool(before or guard)
        out.append(
            StepText(number, item.name, f"{before}{guard} {{" if chosen else "", "}" if chosen else "", kernel, call)
        )
        before = "else " if guard else ""
    return out


def _over(value: Size, dims: Mapping[str, str]) -> str:
    """A size over the program's dims as C."""
    names = {name: symbol(f"N{i}") for i, name in enumerate(dims)}
    text = size(substitute(value, names)) if isinstance(value, Dim) else size(value)
    for i, place in reversed(list(enumerate(dims.values()))):
        text = text.replace(f"N{i}", place)
    return text
