"""Programs for a GPU as C that needs no Python: PTX, and tables of what is launched for one set of sizes.

Matrix products are those of our own kernels, so that the driver is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import InternalError
from ...ir.kernel import Call, Kernel, Program, alternatives
from ...ir.types import Type
from ..cpu.standalone import (
    GROUPS,
    OF_PROGRAM,
    GroupText,
    Interface,
    bytes_of,
    comment,
    quoted,
    spaced,
)
from ..jinja import render
from ..text import read_template, widened
from .actions import FLAG, FLAG_WORDS, WORKSPACE, Launch, Part
from .launch import LaunchPlan
from .products import without_library
from .render import render_cuda

AUX = 0x7FFF_FFFF_FFFF_FF00
"""In a launch that looks at one position again: the position + 1 stands there."""
ROOTS = {WORKSPACE: "LAUNCH_WORKSPACE", FLAG: "LAUNCH_FLAG"}


@dataclass(frozen=True)
class CudaPart:
    """A program of a module.

    :param name: ``forward`` or ``backward``.
    :param arrays: its input and output buffers -> the number of the array that each is.
    """

    name: str
    program: Program
    arrays: Mapping[str, int]


@dataclass(frozen=True)
class ArgumentText:
    """An argument of a launch: an offset from a root, or a number.  :param root: as C."""

    root: str
    value: int


@dataclass(frozen=True)
class LaunchText:
    """A launch.  :param function: its number, :param first: its first argument in the program's table."""

    function: int
    blocks: int
    threads: int
    shared: int
    first: int
    arguments: int


class _Tables:
    """The tables of one program, filled launch by launch."""

    def __init__(self, part: CudaPart, dims: Mapping[str, int]):
        self.part, self.program = part, part.program
        program = replace(part.program, batches=())  # a step starts its own launches: the driver is called from C
        text, kernels = render_cuda(program)
        items = [item for step in part.program.steps for item in alternatives(step)]
        calls = [item for item in items if isinstance(item, Call) and item.op == "matmul"]
        self.text = "\n".join([text, without_library(part.program, calls)]) if calls else text
        self.plan = LaunchPlan(program, kernels, {name: dims[name] for name in part.program.dims}, own_products=True)
        self.functions: dict[tuple[str, bool], int] = {}
        self.arguments: list[ArgumentText] = []
        self.constants = [b for b in part.program.buffers if not b.alias and b.kind == "const"]

    def launches(self, number: int, aux: int = 0) -> list[LaunchText]:
        """Those of a step."""
        item, found = self.plan.steps[number], []
        actions = self.plan.actions[number]
        if aux and isinstance(item, Kernel):
            actions = self.plan.actions_of(number, item, aux)
        for action in actions:
            if not isinstance(action, Launch):
                raise InternalError(f"{self.program.name}: a product of a product")
            function = self.functions.setdefault((action.function, action.wide), len(self.functions))
            first = len(self.arguments)
            self.arguments += [self.argument(each) for each in action.args]
            found.append(LaunchText(function, action.blocks, action.threads, action.shared, first, len(action.args)))
        return found

    def argument(self, value: Part | int) -> ArgumentText:
        if not isinstance(value, Part):
            return ArgumentText("LAUNCH_POSITION" if value == AUX else "LAUNCH_NUMBER", 0 if value == AUX else value)
        if value.root in ROOTS:
            return ArgumentText(ROOTS[value.root], value.start)
        if value.root in self.part.arrays:
            return ArgumentText(f"LAUNCH_ARRAY + {self.part.arrays[value.root]}", value.start)
        at = next((i for i, b in enumerate(self.constants) if b.name == value.root), None)
        if at is None:
            raise InternalError(f"{self.program.name}: nothing is the memory of {value.root}")
        return ArgumentText("LAUNCH_CONSTANTS", value.start + sum(_room(b.type) for b in self.constants[:at]))


def _room(type_: Type) -> int:
    """The bytes of a constant, at a multiple of 256."""
    return -(-int(type_.nbytes) // 256) * 256  # type: ignore[arg-type]


def standalone_cuda(interface: Interface, parts: Sequence[CudaPart], compiled: Callable[[str], str]) -> dict[str, str]:
    """The files of an exported module, by path.

    :param interface: all its dims are fixed.
    :param compiled: the PTX of a text.
    """
    prefix, dims = interface.prefix, interface.fixed
    groups = [
        GroupText(name, about, name in ("input", "cotangent"), interface.group(name))
        for name, about in GROUPS.items()
        if interface.group(name)
    ]
    files: dict[str, str] = {}
    programs = []
    for part in parts:
        tables = _Tables(part, dims)
        programs.append(_program(tables, [g for g in groups if g.name in OF_PROGRAM[part.name]]))
        texts = {"": tables.text, "_wide": widened(tables.text)}
        for suffix, text in texts.items():
            if any(wide == bool(suffix) for _, wide in tables.functions):
                files[f"{part.name}{suffix}.cu"] = text
                files[f"{part.name}{suffix}.ptx"] = ptx = compiled(text).rstrip("\0")
                lines = ptx.replace("\\", "\\\\").replace('"', '\\"').splitlines()
                rows = "".join(f'  "{line}\\n"\n' for line in lines)
                files[f"{part.name}{suffix}_ptx.h"] = f"static const char {part.name}{suffix}_ptx[] =\n{rows};\n"
    public = [a for a in interface.arrays if a.group != "residual"]
    common: dict[str, object] = {
        "name": prefix,
        "guard": f"{prefix.upper()}_H",
        "version": interface.version,
        "signature": [line.replace("*/", "* /") for line in interface.signature],
        "dims": ", ".join(f"{comment(name)}={size}" for name, size in dims.items()),
        "backward": len(parts) > 1,
        "borrowed": ", ".join(interface.borrowed),
        "groups": groups,
        "count": len(public),
        "arrays": [
            {"name": a.name, "number": a.number, "bytes": a.type.with_shape(*a.type.concrete(dims)).nbytes}
            for a in interface.arrays
        ],
        "residuals": [a.number for a in interface.group("residual")],
        "programs": programs,
    }
    files[f"{prefix}.h"] = spaced("export/cuda.h.j2", **common)
    files[f"{prefix}.c"] = spaced("export/cuda.c.j2", **common)
    main = {"name": prefix, "arrays": public, "sizes": [], "programs": programs, "device": True, "exact": False}
    files["main.c"] = spaced("export/main.c.j2", **main)
    files["driver.h"] = read_template("export/driver.h")
    files["Makefile"] = render("export/Makefile.j2", **_build(prefix, "-ldl"))
    files["CMakeLists.txt"] = render("export/CMakeLists.txt.j2", **_build(prefix, "${CMAKE_DL_LIBS}"))
    return files


def _build(name: str, library: str) -> dict[str, object]:
    flags = ("-std=gnu11", "-O2", "-fvisibility=hidden")
    return {"name": name, "units": [], "flags": flags, "runtime_flags": (), "libraries": library}


def _program(tables: _Tables, groups: Sequence[GroupText]) -> dict[str, object]:
    """A program's tables, for the templates."""
    plan = tables.plan
    steps = [tables.launches(number) for number in range(len(plan.steps))]
    checks = []
    for number in plan.checks:
        item = plan.steps[number]
        assert isinstance(item, Kernel)
        op, source = next(iter(plan.kernel(item).sites), ("index", "?"))
        before = sum(map(len, steps[:number]))
        checks.append(
            {"op": quoted(op), "source": quoted(source), "before": before, "again": tables.launches(number, AUX)}
        )
    launches = [launch for step in steps for launch in step]
    for check in checks:
        again = check["again"]
        assert isinstance(again, list)
        check["first"], check["count"] = len(launches), len(again)
        launches += again
    constants: list[int] = []
    for b in tables.constants:
        data = [int(x) for x in bytes_of(b.value, b.type.dtype).split(", ")]
        constants += data + [0] * (_room(b.type) - len(data))
    return {
        "name": tables.part.name,
        "groups": groups,
        "functions": [{"name": name, "wide": wide} for name, wide in tables.functions],
        "wide": sorted({wide for _, wide in tables.functions}),
        "launches": launches,
        "steps": sum(map(len, steps)),
        "arguments": tables.arguments,
        "most": max([launch.arguments for launch in launches], default=1),
        "checks": checks,
        "first_word": FLAG_WORDS,
        "flag": plan.scratch_start + plan.scratch_size,
        "flag_bytes": plan.flag.nbytes,
        "words": plan.flag.nbytes // 8,
        "workspace": plan.workspace,
        "constants": ", ".join(map(str, constants)),
        "constant_bytes": len(constants),
        "given": sorted(set(tables.part.arrays.values())),
    }
