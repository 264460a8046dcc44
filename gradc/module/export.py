"""``module.export(folder)``: C sources that need neither Python nor gradc, and a program that checks them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..codegen.cpu.program import render_program
from ..codegen.cpu.standalone import Array, Flags, Interface, Part, standalone
from ..codegen.cuda.standalone import CudaPart, standalone_cuda
from ..codegen.identifiers import members
from ..errors import FileError, InternalError, InvalidProblem, Unsupported
from ..ir.types import Type
from ..ir.verify import verify_program
from ..process import files
from ..process.ieee import plain
from ..process.version import VERSION
from ..runtime.cuda.nvrtc import compile_cuda
from ..runtime.executable import Executable
from ..runtime.host.pool import MATMUL_FLAGS
from ..runtime.host.toolchain import FLAGS
from ..verify.samples import cotangents, sample
from .module import Module

LANGUAGES = ("c",)
_BUILD = ("-fPIC", "-march=native")
"""Flags of :data:`FLAGS` that the build's own files decide."""


@plain()
def export(
    module: Module, folder: Any, *, lang: str = "c", dims: Mapping[str, int] | None = None, seed: int = 0
) -> Path:
    """Writes a new folder; see :meth:`gradc.Module.export`."""
    path = files.as_path(folder, "written")
    if lang not in LANGUAGES:
        raise Unsupported(f"export in the language {lang!r}; there are {', '.join(LANGUAGES)}")
    _exportable(module)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileError(path, "written", FileExistsError(17, "it exists and is no empty folder"))
    texts, interface, arrays = (_for_cuda if module.target == "cuda" else _for_cpu)(module, module.sizes(dims), seed)
    contents: dict[str, bytes] = {name: text.encode() for name, text in texts.items()}
    for a in interface.arrays:
        if a.group != "residual":
            value = np.ascontiguousarray(arrays[a.group, a.key])
            contents[f"sample/{a.file}"] = value.tobytes()
    files.write_folder(path, contents)
    return path


Exported = tuple[dict[str, str], Interface, dict[tuple[str, str], Any]]
"""The texts by path, what callers see, the sample arrays by group and key."""


def _for_cpu(module: Module, dims: Mapping[str, int], seed: int) -> Exported:
    interface = _interface(module, module.options.dims or {})
    parts = [
        Part(name, e.program, render_program(e.program), *_places(module, interface, name))
        for name, e in module.executables.items()
    ]
    arrays, sizes = _samples(module, interface, dims, seed)
    flags = Flags(
        (*(f for f in FLAGS if f not in _BUILD), "-fvisibility=hidden", "-fno-sanitize=undefined"), MATMUL_FLAGS
    )
    return standalone(interface, parts, sizes, flags), interface, arrays


def _for_cuda(module: Module, dims: Mapping[str, int], seed: int) -> Exported:
    """For one set of sizes.  The sample's results are those of the programs' meaning in NumPy: no GPU is needed."""
    sizes = {**(module.options.dims or {}), **dims}
    if missing := [name for name in module.graph.dims if name not in sizes]:
        raise InvalidProblem(f"export for cuda is for one set of sizes: give dims for {', '.join(missing)}")
    interface = _interface(module, {name: sizes[name] for name in module.graph.dims})
    parts = []
    for name, executable in module.executables.items():
        arrays, donations = _places(module, interface, name)
        if donations:
            raise Unsupported("export for cuda of a module with donated inputs")
        parts.append(CudaPart(name, executable.program, arrays))
    arch = module.backward.binary.arch if module.wrt else module.forward.binary.arch
    texts = standalone_cuda(interface, parts, lambda text: compile_cuda(text, arch=arch, emit=("ptx",)).ptx)
    given, _ = sample(module.graph, sizes, seed)
    found: dict[tuple[str, str], Any] = {("input", a.key): given[a.key] for a in interface.group("input")}
    upstream = cotangents({a.key: a.type for a in interface.group("cotangent")}, sizes, seed)
    found |= {("cotangent", key): value for key, value in upstream.items()}
    for part in parts:
        reads = lambda key: ("input", key) if part.name == "forward" else _read_by_backward(module, key)  # noqa: B023
        own = {name: sizes[name] for name in part.program.dims}
        meaning = Executable(part.program, "numpy", dims=own)
        results = meaning.run({key: found[reads(key)] for key in meaning.inputs})
        found |= {_written(module, part.name, key): np.asarray(value) for key, value in results.items()}
    return texts, interface, found


def _exportable(module: Module) -> None:
    """Unsupported if a module cannot be C alone."""
    if module.target not in ("cpu", "cuda"):
        raise Unsupported(f"export of a module for the target {module.target!r}: there are cpu and cuda")
    for executable in module.executables.values():
        undecided = verify_program(executable.program)
        if undecided:
            raise Unsupported(
                f"export of {executable.program.name}: whether {undecided[0].name} stays inside its arrays is decided"
                " for given sizes, by gradc"
            )


# -- what callers see --------------------------------------------------------------------------------------------------


def _interface(module: Module, fixed: Mapping[str, int]) -> Interface:
    """:param fixed: dims that have a value."""
    graph, forward = module.graph, module.forward
    kept = [r.name for r in module.residuals if r.why == "input"]
    groups: list[tuple[str, dict[str, Type]]] = [
        ("input", {n: graph.input(n).type for n in graph.input_names if n in forward.inputs or n in kept}),
        ("output", {n: forward.outputs[n] for n in graph.output_names}),
    ]
    if module.wrt:
        cotangents = {key: name for name, key in module.joint_names[0].items()}
        read = {cotangents[key]: t for key, t in module.backward.inputs.items() if key in cotangents}
        groups += [("cotangent", read), ("gradient", _gradients(module))]
    groups.append(("residual", {r.name: r.node.type for r in module.residuals if not r.borrowed}))
    borrowed = [*kept, *(r.output for r in module.residuals if r.output)]
    donors = {name: forward.donated[b] for name, b in forward.program.outputs if b in forward.donated}
    return Interface(
        graph.name,
        VERSION,
        tuple(graph.dims),
        dict(fixed),
        _arrays(groups, graph.defaults, donors),
        tuple(borrowed),
        tuple(str(graph).splitlines()) if len(str(graph).splitlines()) <= 60 else (module.described,),
    )


def _arrays(
    groups: list[tuple[str, dict[str, Type]]], defaults: Mapping[str, Any], donors: Mapping[str, str]
) -> tuple[Array, ...]:
    """:param donors: results -> the inputs in whose memory they may lie."""
    arrays: list[Array] = []
    inputs = members(groups[0][1])
    for group, types in groups:
        fields = members(types)
        for name, type_ in types.items():
            note = (
                f"; sample/{group}_{fields[name]}.bin has the graph's own"
                if group == "input" and name in defaults
                else f"; may be the input {inputs[donors[name]]}, which a failed call leaves as it is"
                if group == "output" and name in donors
                else ""
            )
            arrays.append(Array(group, name, fields[name], len(arrays), type_, note))
    return tuple(arrays)


def _gradients(module: Module) -> dict[str, Type]:
    """The results of backward by the name of the input; of a sparse one by the names of its parts."""
    outputs = module.backward.outputs
    found: dict[str, Type] = {}
    for name, key in module.joint_names[1].items():
        if key in outputs:
            found[name] = outputs[key]
        else:
            found |= {f"{name}{o.removeprefix(key)}": t for o, t in outputs.items() if o.startswith(f"{key}.")}
    return found


def _places(module: Module, interface: Interface, name: str) -> tuple[dict[str, int], tuple[tuple[int, int], ...]]:
    """Which array, by number, each input and output of a program is; its donations, (result, input)."""
    executable = module.executables[name]
    numbers = {(a.group, a.key): a.number for a in interface.arrays}
    arrays: dict[str, int] = {}
    for key in executable.inputs:
        arrays[key] = numbers[("input", key) if name == "forward" else _read_by_backward(module, key)]
    for key, buffer in executable.program.outputs:
        root = executable.program.root(buffer)
        if root in arrays:
            raise InternalError(f"{executable.program.name}: two results are the buffer {root}")
        arrays[root] = numbers[_written(module, name, key)]
    roots = {b: executable.program.root(b) for b in executable.donated}
    donations = tuple((arrays[roots[b]], arrays[donor]) for b, donor in executable.donated.items())
    return arrays, donations


def _read_by_backward(module: Module, key: str) -> tuple[str, str]:
    for name, cotangent in module.joint_names[0].items():
        if cotangent == key:
            return "cotangent", name
    residual = next(r for r in module.residuals if r.name == key)
    return (
        ("input", key)
        if residual.why == "input"
        else ("output", residual.output)
        if residual.output
        else ("residual", key)
    )


def _written(module: Module, program: str, key: str) -> tuple[str, str]:
    if program == "forward":
        return ("output" if key in module.graph.output_names else "residual"), key
    for name, gradient in module.joint_names[1].items():
        if key == gradient or key.startswith(f"{gradient}."):
            return "gradient", name + key.removeprefix(gradient)
    raise InternalError(f"{program} gives {key}, which is no gradient")


# -- sample arrays -----------------------------------------------------------------------------------------------------


def _samples(
    module: Module, interface: Interface, dims: Mapping[str, int], seed: int
) -> tuple[dict[tuple[str, str], Any], dict[str, int]]:
    """(every public array of one call by group and key, the sizes): random inputs, and what the module gives."""
    inputs, sizes = sample(module.graph, {**interface.fixed, **dims}, seed)
    forward = module.forward
    own = lambda executable: {d: sizes[d] for d in executable.program.dims}
    read = {n: np.array(inputs[n]) for n in forward.inputs}  # copies, for a donated one changes
    results, bound = forward.run_bound(read, None, False, None, None, own(forward))
    arrays: dict[tuple[str, str], Any] = {("input", a.key): inputs[a.key] for a in interface.group("input")}
    arrays |= {("output", a.key): results[a.key] for a in interface.group("output")}
    if not module.wrt:
        return arrays, sizes
    residuals = forward.kept(inputs, results, bound)
    upstream = cotangents({a.key: a.type for a in interface.group("cotangent")}, sizes, seed)
    arrays |= {("cotangent", key): value for key, value in upstream.items()}
    given = module.backward.inputs_of(residuals, (), upstream)
    gradients, _ = module.backward.run_bound(given, None, False, None, None, own(module.backward))
    for key in module.backward.outputs:
        arrays[_written(module, "backward", key)] = gradients[key]
    return arrays, sizes
