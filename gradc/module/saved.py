"""The file format of modules, and the checks made before any part of a file is used.

The file is an envelope (:mod:`gradc.ir.envelope`) of the kind ``module`` with the parts ``module`` (JSON: wrt, target,
options, the machine that the machine code is for), ``graph`` (text; the arrays bound to its inputs), ``residuals``
(JSON), the texts of the programs ``forward`` and ``backward``, and for each of them the machine code, ``forward.so``,
the sites of its checks, ``forward.sites``, and the names of what is checked for the sizes of a call,
``forward.undecided``; for the CPU also the thread pool's, ``runtime.so``, and
that of the kernels of its products, ``runtime.f64.so``, so that the file runs on a machine of its kind without a
compiler.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.product_kernels import product_kernels
from ..errors import FileError, GradcError, InvalidProblem, IRFormatError, TypeRuleError
from ..formats.json_text import read_json
from ..ir.envelope import Envelope, load, sealed, unsealed
from ..ir.graph import SPARSE_PARTS, Graph, input_node
from ..ir.graph_file import file_text
from ..ir.program_text import parse_program
from ..ir.text import graph_of_file
from ..ir.types import Type, parse_type
from ..ir.verify import verify_program
from ..knobs import TARGETS
from ..passes.schedule.residual import Residual
from ..process import files
from ..process.forks import held_off
from ..process.version import VERSION
from ..targets.devices import cpu_of, gpu_of
from .module import Code, Module, Recipe
from .options import TEXTS, Options

MODULE_FORMAT = 3
"""1 was a directory of graph.gir, module.json and module.bin; 2 used the statements ``inside`` and ``bounded``."""
_FILE = "module.gradc"


@dataclass(frozen=True)
class SavedModule:
    """The parsed contents of a file; :func:`check_module` checks that they are consistent.

    :param machine: the identity of the machine that the machine code is for.
    :param parts: residuals, programs and machine code by name.
    """

    graph: Graph
    wrt: tuple[str, ...]
    target: str
    options: Mapping[str, Any]
    machine: str
    parts: Mapping[str, bytes]


def file_of_module(path: Any, doing: str) -> Path:
    """The file of a path; for an existing directory, ``module.gradc`` in it."""
    file = files.as_path(path, doing)
    return file / _FILE if file.is_dir() else file


def sealed_module(module: Module, parts: Mapping[str, bytes], machine: str) -> list[bytes | memoryview]:
    """The file of a module, as consecutive pieces to write."""
    description = {
        "gradc": VERSION,
        "wrt": list(module.wrt),
        "target": module.target,
        "options": module.options.as_json(),
        "machine": machine,
    }
    named = {"module": json.dumps(description).encode(), "graph": file_text(str(module.graph))}
    return sealed("module", MODULE_FORMAT, {**named, **parts}, module.graph.bound_arrays)


# -- the parts of a module, in its file and in the cache ---------------------------------------------------------------


def _side_by_side(tasks: Sequence[Callable[[], bytes]]) -> list[bytes]:
    """The tasks' results, computed in parallel; sequentially if no thread can be started (interpreter shutdown, process
    limit).
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    try:
        with held_off:
            from concurrent.futures import ThreadPoolExecutor

        threads = ThreadPoolExecutor(len(tasks) - 1)
        started = [threads.submit(task) for task in tasks[1:]]
    except RuntimeError:
        return [task() for task in tasks]
    with threads:
        return [tasks[0](), *(each.result() for each in started)]


def parts_of(module: Module, portable: bool = False) -> dict[str, bytes]:
    """The parts of a module, with its machine code.

    :param portable: include what another machine needs: the cubin, if there is an NVRTC; the CPU's thread pool.
    """
    residuals = [[r.name, str(r.node.type), r.why, *([r.output] if r.output else [])] for r in module.residuals]
    parts = {"residuals": json.dumps(residuals).encode()}
    parts |= {name: str(e.program).encode() for name, e in module.executables.items()}
    if module.target not in ("cpu", "cuda"):
        return parts
    code = lambda executable: executable.portable() if portable else executable.native.payload
    codes = _side_by_side([functools.partial(code, executable) for executable in module.executables.values()])
    for (name, executable), payload in zip(module.executables.items(), codes, strict=True):
        parts[f"{name}.so"] = payload
        parts[f"{name}.sites"] = executable.native.sites_json().encode()
        parts[f"{name}.undecided"] = json.dumps([item.name for item in executable.undecided]).encode()
    if portable and module.target == "cpu":
        from ..runtime.host import pool

        programs = [executable.program for executable in module.executables.values()]
        parts |= pool.packed({name for program in programs for name in product_kernels(program)})
    return parts


def module_of_parts(
    graph: Graph, wrt: Sequence[str], target: str, options: Options, parts: Mapping[str, bytes], recipe: Recipe
) -> Module:
    """The module of the parts from :func:`parts_of`.

    :raises IRFormatError, TypeRuleError: the parts are malformed.
    """
    programs: dict[str, Code] = {}
    for name in ("forward", "backward") if wrt else ("forward",):
        program = parse_program(part_text(parts, name))
        if f"{name}.so" not in parts:
            programs[name] = Code(program)
            continue
        sites, undecided = read_sites(parts, f"{name}.sites"), read_undecided(parts, f"{name}.undecided")
        programs[name] = Code(program, parts[f"{name}.so"], sites, undecided)
    return Module(graph, wrt, target, programs, read_residuals(parts), options, recipe)


# -- reading -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
    """A context manager that turns errors about the contents of a file into InvalidProblem, which names the file."""
    try:
        yield
    except FileError:
        raise
    except GradcError as error:
        refused = InvalidProblem(f"{source} holds no module of gradc: {error}")
        for note in getattr(error, "__notes__", ()):
            refused.add_note(note)
        raise refused from error


def read_module(file: Path) -> SavedModule:
    """The contents of a file.

    :raises FileError: it cannot be read.
    :raises InvalidProblem: it holds no module.
    """
    try:
        with refusing(str(file)):
            return _described(load(file, "module", MODULE_FORMAT))
    except FileError as error:
        old = file.parent / "module.json"
        if file.name == _FILE and error.errno == errno.ENOENT:
            about = (
                f"a module of the format 1, a folder; this gradc reads {MODULE_FORMAT}: compile the graph in its"
                " graph.gir again, and save it"
                if old.exists()
                else f"a folder without {_FILE}"
            )
            raise InvalidProblem(f"{file.parent} holds no module of gradc that can be loaded: it is {about}") from error
        raise


def unsealed_module(data: bytes, source: str) -> SavedModule:
    """:func:`read_module` of bytes."""
    with refusing(source):
        return _described(unsealed(data, "module", MODULE_FORMAT, source))


def _described(envelope: Envelope) -> SavedModule:
    description = _json(envelope.parts, "module")
    kinds = {"gradc": str, "wrt": list, "target": str, "options": dict, "machine": str}
    for key, kind in kinds.items():
        if not isinstance(description, dict) or not isinstance(description.get(key), kind):
            raise IRFormatError(f"its description has no {key!r} that is a {kind.__name__}")
    target, wrt, options = description["target"], description["wrt"], description["options"]
    if target not in TARGETS:
        raise IRFormatError(f"the target {target[:40]!r}; there are {', '.join(TARGETS)}")
    graph = graph_of_file(envelope.parts.get("graph", b""), envelope.arrays, "it")
    unknown = [name for name in wrt if not isinstance(name, str) or name not in graph.input_names]
    if unknown or len(set(wrt)) < len(wrt):
        raise IRFormatError(
            f"wrt names {str(unknown[0])[:60]!r}; the inputs are {', '.join(graph.input_names)}"
            if unknown
            else "wrt names an input twice"
        )
    for option in TEXTS:
        if not isinstance(options.get(option), str | None):
            raise IRFormatError(f"the option {option} is {str(options[option])[:60]!r}: a text is wanted")
    if (target == "cuda") != bool(options.get("arch")):
        raise IRFormatError(f"the target {target} with arch={options.get('arch')!r}")
    if target.startswith("cuda") and (options.get("device") or options.get("arch")):
        gpu_of(options.get("device") or options.get("arch"), options.get("calibration"))
    elif not target.startswith("cuda"):
        cpu_of(options.get("calibration"))
    parts = {name: data for name, data in envelope.parts.items() if name not in ("module", "graph")}
    return SavedModule(graph, tuple(wrt), target, options, description["machine"], parts)


def part_text(parts: Mapping[str, bytes], name: str) -> str:
    """A part that is text."""
    if name not in parts:
        raise IRFormatError(f"the part {name!r} is missing")
    try:
        return parts[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise IRFormatError(f"the part {name!r} is no text: {error}") from None


def _json(parts: Mapping[str, bytes], name: str) -> Any:
    try:
        return read_json(part_text(parts, name))
    except IRFormatError:
        raise
    except ValueError as error:
        raise IRFormatError(f"the part {name!r} is no JSON: {error}") from None


def read_residuals(parts: Mapping[str, bytes]) -> list[Residual]:
    """The residuals, stored as ``[[name, type, why], ...]``; of an output as ``[name, type, why, output]``."""
    entries = _json(parts, "residuals")
    if not isinstance(entries, list) or not all(
        isinstance(r, list) and len(r) in (3, 4) and all(isinstance(word, str) for word in r) for r in entries
    ):
        raise IRFormatError("the part 'residuals' is no list of name, type and reason")
    return [Residual(name, input_node(name, parse_type(type_)), *said) for name, type_, *said in entries]


def read_sites(parts: Mapping[str, bytes], name: str) -> dict[int, tuple[str, str]]:
    """The sites of a program's checks: number -> (op, source)."""
    sites = _json(parts, name)
    right = isinstance(sites, dict) and all(
        k.isascii()
        and k.isdigit()
        and len(k) < 10
        and isinstance(v, list)
        and len(v) == 2
        and all(isinstance(w, str) for w in v)
        for k, v in sites.items()
    )
    if not right:
        raise IRFormatError(f"the part {name!r} does not map numbers to an op and a source")
    return {int(k): (v[0], v[1]) for k, v in sites.items()}


def read_undecided(parts: Mapping[str, bytes], name: str) -> frozenset[str] | None:
    """The names of what is checked for the sizes of a call; None in files that do not have them."""
    if name not in parts:
        return None
    names = _json(parts, name)
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise IRFormatError(f"the part {name!r} is no list of names")
    return frozenset(names)


# -- whether the parts fit together ------------------------------------------------------------------------------------


def check_module(module: Module) -> None:
    """Checks that the programs are valid and have the inputs, outputs, residuals and gradients of the graph's forward
    and backward.

    :raises TypeRuleError: they do not.
    """
    graph, forward = module.graph, module.forward
    inputs = {name: graph.input(name).type for name in graph.input_names}
    kept = {r.name: r.node.type for r in module.residuals}
    if len(kept) < len(module.residuals):
        raise TypeRuleError("two residuals have one name")
    verify_program(forward.program)
    _same("forward reads", forward.inputs, inputs)
    _same("forward borrows", {r.name: r.node.type for r in module.residuals if r.why == "input"}, inputs)
    results = {name: node.type for name, node in graph.outputs}
    _same("backward borrows", {r.output: r.node.type for r in module.residuals if r.output}, results)
    results |= {r.name: r.node.type for r in module.residuals if not r.borrowed}
    _same("forward gives", forward.outputs, results, all_of_them=True)
    if not module.wrt:
        return
    backward, (cotangents, gradients) = module.backward, module.joint_names
    verify_program(backward.program)
    _same(
        "backward reads",
        backward.inputs,
        kept | {cotangents[name]: node.type for name, node in graph.outputs if name in cotangents},
    )
    sparse = module.options.sparse
    dense = {gradients[name]: inputs[name] for name in module.wrt if name not in sparse}
    expected = {*dense, *(f"{gradients[name]}.{part}" for name in sparse for part in SPARSE_PARTS)}
    if backward.outputs.keys() != expected:
        raise TypeRuleError(
            f"backward gives {', '.join(backward.outputs) or 'nothing'}; {', '.join(sorted(expected))} is wanted"
        )
    for name, type_ in dense.items():
        if backward.outputs[name].shape != type_.shape:
            raise TypeRuleError(f"backward gives {name}: {backward.outputs[name]} for an input {type_}")


def _same(claim: str, types: Mapping[str, Type], known: Mapping[str, Type], all_of_them: bool = False) -> None:
    for name, type_ in types.items():
        if name not in known or type_ != known[name]:
            raise TypeRuleError(
                f"{claim} {name}: {type_}, and there is"
                f" {f'{name}: {known[name]}' if name in known else 'nothing of that name'}"
            )
    if all_of_them and known.keys() - types.keys():
        raise TypeRuleError(f"{claim} no {min(known.keys() - types.keys())}")
