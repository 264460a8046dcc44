"""Programs as text, edited or not: compiled as they are, and run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..errors import IndexOutOfRange, InvalidProblem
from ..interp import bind_dims
from ..ir.dims import evaluate
from ..ir.kernel import Kernel, Loop, Program, alternatives
from ..process.files import write_into
from ..runtime.executable import Executable
from ..runtime.host.arrays import Results
from ..runtime.kernel import draw, index_limits
from ..verify.samples import SMALL
from .model import Settings, read_arrays
from .results import Ran

Array = np.ndarray[Any, Any]


def compile_program(program: Program, settings: Settings) -> Executable:
    """A program on its target.

    :raises UsageError: an option is for graphs.
    :raises TypeRuleError: the program is invalid, or could touch memory outside its arrays.
    """
    given = [*settings.types, *settings.wrt, *settings.options]
    if given:
        raise click.UsageError(
            f"{given[0]} is for graphs: what a program's text says is what runs; --target and --dims are for both"
        )
    unknown = settings.dims.keys() - set(program.dims)
    if unknown:
        raise click.BadParameter(
            f"--dims {min(unknown)}: {program.name} has the dims {', '.join(program.dims) or '(none)'}"
        )
    with settings.waiting(f"compiling {program.name}"):
        executable = Executable(program, settings.target or "cpu")
        if executable.target == "cpu":
            _ = executable.native
    return executable


def emit_program(executable: Executable, wanted: Sequence[str], folder: Path) -> int:
    """Writes the program (``ir``) and its C or CUDA (``c``, ``cu``); how many files."""
    name = executable.program.name
    files: dict[str, str] = {}
    if "ir" in wanted:
        files[f"{name}.gir"] = str(executable.program)
    for suffix in {"c", "cu"} & set(wanted):
        files[f"{name}.{suffix}"] = executable.source
    if "explain" in wanted or {"ptx", "cubin"} & set(wanted):
        raise click.BadParameter("--emit of a program: there are ir, and c or cu")
    write_into(folder, {name: (text.rstrip("\n") + "\n").encode() for name, text in files.items()})
    return len(files)


def run_program(
    program: Program, settings: Settings, inputs: Sequence[str], seed: int, out: Path | None, as_json: bool
) -> None:
    """Runs a program once on arrays from files, or random ones, and prints every output."""
    executable = compile_program(program, settings)
    given = read_arrays(inputs, executable.inputs, program.name)
    dims = _sizes(executable, given, settings.dims)
    arrays = _arrays(executable, given, dims, seed)
    drawn = [name for name in arrays if name not in given]
    began = time.perf_counter()
    with settings.waiting("running"):
        try:
            results: Results = executable.run(arrays, dims=dims)
        except IndexOutOfRange as error:
            if drawn:
                error.add_note(f"{', '.join(drawn)} were drawn at random; --input NAME=FILE gives indices that fit")
            raise
    seconds = time.perf_counter() - began
    Ran(program.name, executable.target, dims, seed, drawn, seconds, results, values=True).say(out, as_json)


def _sizes(executable: Executable, given: Mapping[str, Array], dims: Mapping[str, int]) -> dict[str, int]:
    """A value for every dim: those given, those of the arrays, small ones for the rest."""
    program = executable.program
    types = {name: executable.inputs[name] for name in given}
    bound = bind_dims(types, {name: array.shape for name, array in given.items()}, dims)
    free = [d for d in program.dims if d not in bound]
    for start in range(8 * len(SMALL)):
        drawn = {d: SMALL[(start + i) % len(SMALL)] + start // len(SMALL) for i, d in enumerate(free)}
        attempt = {**bound, **drawn}
        holds = not any(fact.fails(attempt) for fact in program.assumptions)
        if holds and all(evaluate(size, attempt) >= 0 for b in program.buffers for size in b.type.shape):
            return attempt
    raise InvalidProblem(
        f"no sizes for {', '.join(free) or 'these dims'} were found that fit"
        f" {'; '.join(map(str, program.assumptions)) or 'its types'}; give --dims"
    )


def _arrays(executable: Executable, given: Mapping[str, Array], dims: Mapping[str, int], seed: int) -> dict[str, Array]:
    """An array for every input: those given, and random ones, whose indices are in range."""
    program = executable.program
    limits: dict[str, int] = {}
    for step in program.steps:
        at = step.largest(dims) if isinstance(step, Loop) else dims
        for item in alternatives(step):
            for name, limit in index_limits(item, program.types, at).items() if isinstance(item, Kernel) else ():
                root = program.root(name)
                limits[root] = min(limits.get(root, limit), limit)
    random = np.random.default_rng(seed)
    drawn = {
        name: draw(random, name, type_, dims, limits.get(name))
        for name, type_ in executable.inputs.items()
        if name not in given
    }
    return {**drawn, **given}
