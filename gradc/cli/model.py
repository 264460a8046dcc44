"""The parts common to all commands: the MODEL argument, compilation options, and arrays from files."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.shell_completion import CompletionItem

from ..api import compile, load, load_module, parse
from ..errors import FileError, GradcError, InvalidProblem
from ..formats import npz
from ..ir.envelope import kind_of
from ..ir.graph import Graph
from ..ir.kernel import Program
from ..ir.lexer import LONGEST_TEXT
from ..ir.program_text import parse_program
from ..ir.types import Type, parse_type
from ..knobs import TARGETS
from ..module.module import Module
from ..module.options import FIELDS, OneOf
from ..plans.step import Step
from ..plans.traced import TracedFunction
from ..plans.traced import graph as decorated
from ..process import files
from ..runtime.host import pool
from ..trace import trace
from .progress import Progress

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Settings:
    """The compilation options from the command line.

    :param options: those that were given, as keywords of :func:`gradc.compile`.
    """

    types: Mapping[str, str]
    wrt: tuple[str, ...]
    target: str | None
    dims: Mapping[str, int]
    options: Mapping[str, Any]
    progress: bool | None
    native: bool = True

    def waiting(self, activity: str) -> Progress:
        return Progress(activity, self.progress)


def pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parses several ``NAME=VALUE`` to a dict."""
    named: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise click.BadParameter(f"{text!r} is not {parameter.metavar}")
        if name.strip() in named:
            raise click.BadParameter(f"{name.strip()} is given twice")
        named[name.strip()] = value.strip()
    return named


def sizes(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    """Parses ``N=64,V=32000``, given once or several times."""
    each = pairs(context, parameter, [part for text in values for part in text.split(",") if part.strip()])
    for name, value in each.items():
        if not (value.isascii() and value.isdigit() and len(value) < 19):
            raise click.BadParameter(f"{name}={value}: a size is an integer, 0 or more, of at most 18 digits")
    return {name: int(value) for name, value in each.items()}


def names(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
    """Parses ``a,b``, given once or several times."""
    return tuple(part.strip() for text in values for part in text.split(",") if part.strip())


def budget(context: click.Context, parameter: click.Parameter, value: str | None) -> int | float | None:
    """Parses ``4096``, ``64MB`` (decimal units) or a fraction, ``0.5``."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]?)B?|([01]\.\d*)", value.strip(), re.IGNORECASE | re.ASCII)
    if match is None or (match[3] and float(match[3]) > 1):
        raise click.BadParameter(f"{value!r}: bytes (4096, 64MB) or a fraction from 0.0 to 1.0")
    return float(match[3]) if match[3] else int(match[1]) * 1000 ** " KMG".index(match[2].upper() or " ")


def kept(context: click.Context, parameter: click.Parameter, value: str | None) -> str | tuple[str, ...] | None:
    """Parses ``min-cut``, ``all``, ``none``, or names ``a,b``."""
    return value if value in (None, "min-cut", "all", "none") else names(context, parameter, [str(value)])


def strategies(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str] | None:
    """Parses several ``NAME=STRATEGY``; None for none."""
    return pairs(context, parameter, values) or None


PARSERS: dict[str, Callable[[click.Context, click.Parameter, Any], Any]] = {"memory_budget": budget, "save": kept}
"""Parsers of the options whose values are not plain text."""


def _flag(each: Field[Any]) -> Decorator:
    """The flag that sets a field of :class:`gradc.module.options.Options`; its default is None."""
    about, name = each.metadata, each.name.replace("_", "-")
    if each.type == "bool":
        return click.option(f"--{name}/--no-{name}", default=None, help=about["flag"])
    if name == "reductions":  # a map, one entry at a time
        return click.option(
            "--reduction",
            "reductions",
            multiple=True,
            metavar=about["metavar"],
            callback=strategies,
            help=about["flag"],
        )
    known = [value for value in about["check"].known if value is not None] if isinstance(about["check"], OneOf) else []
    choices = click.Choice(known) if known else None
    return click.option(
        f"--{name}",
        type=choices,
        metavar=about["metavar"] or None,
        callback=PARSERS.get(each.name),
        help=about["flag"],
    )


FLAGS = {each.name: _flag(each) for each in FIELDS if each.metadata["flag"]}
"""The compilation options that have a flag, by name."""
MODEL: tuple[Decorator, ...] = (
    click.argument("model", shell_complete=lambda context, parameter, text: [CompletionItem(text, type="file")]),
    click.option(
        "--type",
        "types",
        multiple=True,
        metavar="NAME=TYPE",
        callback=pairs,
        help="The type of a plain function's parameter: x=f32[N,4], params.w=f32[4].",
    ),
    click.option("--wrt", multiple=True, metavar="A,B", callback=names, help="The inputs to differentiate by."),
    click.option("--target", type=click.Choice(TARGETS), help="The target of the kernels."),
    click.option("--dims", multiple=True, metavar="N=64,V=100", callback=sizes, help="Sizes of symbolic dims."),
    *FLAGS.values(),
    click.option(
        "--native/--no-native",
        default=True,
        help="--no-native: recompile a saved module instead of running the machine code in its file.",
    ),
    click.option(
        "--progress/--no-progress",
        default=None,
        help="Show what is being done after a second; by default on a terminal.",
    ),
)
"""The arguments of every command that takes a MODEL."""
INPUTS = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=FILE",
    help="x=file.npy, x=file.npz:key, or file.npz with all of them; the others are random.",
)
SEED = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrays that are not given."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table, described in docs/report.md.")


def with_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the MODEL argument and the options of a compilation; the command gets ``model`` and ``settings``."""

    @functools.wraps(command)
    def run(
        model: str,
        types: dict[str, str],
        wrt: tuple[str, ...],
        target: str | None,
        dims: dict[str, int],
        progress: bool | None,
        native: bool,
        **rest: Any,
    ) -> Any:
        flags = {name: rest.pop(name) for name in FLAGS}
        options = {name: value for name, value in flags.items() if value is not None}
        return command(model=model, settings=Settings(types, wrt, target, dims, options, progress, native), **rest)

    decorated: Callable[..., Any] = run
    for decorate in reversed(MODEL):
        decorated = decorate(decorated)
    return decorated


# -- MODEL -------------------------------------------------------------------------------------------------------------

STDIN = "-"


@functools.cache
def _stdin() -> str:
    """What the command was given on its standard input, which can be read once."""
    data = sys.stdin.buffer.read(LONGEST_TEXT + 1)
    if len(data) > LONGEST_TEXT:
        raise click.BadParameter(f"more than {LONGEST_TEXT} bytes on the standard input")
    return data.decode("latin-1")


def read_ir(place: str) -> Graph | Program:
    """The graph or program in a file, or on the standard input if ``place`` is ``-``; only comments and the format's
    first line may precede it.
    """
    if place == STDIN:
        return parse_program(_stdin()) if _is_program(_stdin()) else parse(_stdin())
    with files.opened(place) as (stream, _):
        start = stream.read(1 << 16).decode("latin-1")
    return parse_program(files.read(place, LONGEST_TEXT).decode("latin-1")) if _is_program(start) else load(place)


def _is_program(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "gradc-ir"))), "")
    return first.split("@")[0].strip() == "program"


def open_program(text: str) -> Program | None:
    """The program that MODEL is the text of, or None if it is something else."""
    if text != STDIN and not (Path(text).suffix == ".gir" and Path(text).is_file()):
        return None
    read = read_ir(text)
    return read if isinstance(read, Program) else None


def open_model(text: str, types: Mapping[str, str], native: bool = True) -> Graph | Module:
    """The graph or module that MODEL names; ``native=False`` recompiles a saved module instead of running the machine
    code in its file.
    """
    if text == STDIN:
        _no_types(types, "the standard input")
        return _graph(read_ir(text), "the standard input")
    path = Path(text)
    if path.is_dir() or _is_module(path):
        _no_types(types, text)
        return load_module(path, native=native)
    name = ""
    if not path.exists():
        before, colon, name = text.rpartition(":")
        if not colon:
            raise click.BadParameter(
                f"there is no file or folder {text!r}; MODEL is model.gir, model.onnx, a saved module or file.py:NAME"
            )
        path = Path(before)
        if not path.is_file():
            raise click.BadParameter(f"there is no file {before!r}")
    if path.suffix != ".py":
        if name:
            raise click.BadParameter(f"{path} is not a Python file, so it has no {name!r}")
        _no_types(types, text)
        return _from_onnx(path) if path.suffix == ".onnx" else _graph(read_ir(text), text)
    return _from_python(path, name, types)


def _graph(read: Graph | Program, place: str) -> Graph:
    if isinstance(read, Program):
        raise click.BadParameter(f"{place} holds a program, and this command takes a graph; run and compile take both")
    return read


def _from_onnx(path: Path) -> Graph:
    try:
        from ..onnx import from_onnx
    except ModuleNotFoundError as error:
        raise click.BadParameter(f"{path} needs the package onnx: pip install 'gradc[onnx]'") from error
    return from_onnx(path)


def _is_module(path: Path) -> bool:
    try:
        with files.opened(path) as (file, _):
            return kind_of(file.read(128)) == "module"
    except FileError:
        return False


def _no_types(types: Mapping[str, str], text: str) -> None:
    if types:
        raise click.BadParameter(f"--type is for plain functions; {text} has its types")


def _from_python(path: Path, name: str, types: Mapping[str, str]) -> Graph | Module:
    defined = _attributes(path)
    known = {n: v for n, v in defined.items() if isinstance(v, Graph | Module | Step | TracedFunction)}
    if not name:
        if len(known) != 1:
            raise click.BadParameter(f"{path}: say which one, {path}:NAME; {_offer(defined)}")
        (name,) = known
    value: Any = defined
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is None:
            raise click.BadParameter(f"{path} has no {name!r}; {_offer(defined)}")
    if isinstance(value, Graph | Module | Step):
        _no_types(types, f"{path}:{name}")
        return _users(f"{path}:{name}", lambda: value.compile("cpu")) if isinstance(value, Step) else value
    if not callable(value):
        raise click.BadParameter(f"{path}:{name} is {type(value).__name__}, not a graph or a function")
    return _traced(value, f"{path}:{name}", types)


def _traced(function: Any, name: str, types: Mapping[str, str]) -> Graph | Module:
    if not isinstance(function, TracedFunction) and not inspect.signature(function).parameters:
        _no_types(types, name)
        result = _users(name, function)
        if isinstance(result, Graph | Module):
            return result
        raise click.BadParameter(f"{name}() returned {type(result).__name__}, not a graph or a module")
    made = function if isinstance(function, TracedFunction) else _users(name, lambda: decorated(function))
    if not types:
        missing = [p for p in made.signature.parameters if p not in types]
        if made._graph is None:
            raise click.BadParameter(
                f"{name} takes {', '.join(missing)}; give their types:"
                f" {' '.join(f'--type {p}=f32[N,4]' for p in missing)}"
            )
        return made.graph
    tree: dict[str, Any] = {}
    for dotted, text in types.items():
        *outer, last = dotted.split(".")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"--type {dotted}: {part} has a type itself")
        inner[last] = parse_type(text)
    unknown = tree.keys() - made.signature.parameters.keys()
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in made.signature.parameters.values()):
        raise click.BadParameter(
            f"{name} has no parameter {min(unknown)!r}; it takes {', '.join(made.signature.parameters)}"
        )
    absent = [
        n
        for n, p in made.signature.parameters.items()
        if n not in tree
        and p.default is inspect.Parameter.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if absent:
        raise click.BadParameter(f"{name}: --type {absent[0]}=... is missing")
    return _users(name, lambda: trace(made.fn, tree, assume=made.facts))


def _attributes(path: Path) -> dict[str, Any]:
    """The names that a Python file defines, after running it as a module with its folder on the path."""
    spec = importlib.util.spec_from_file_location(f"_gradc_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    _users(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return vars(module)


def _users(name: str, call: Callable[[], Any]) -> Any:
    """Runs the user's code; an exception of it becomes one error message."""
    try:
        return call()
    except (GradcError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise click.ClickException(f"{name} ended Python ({error.code}) while it was read") from error
    except Exception as error:
        package = Path(__file__).resolve().parents[1]
        own = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if package not in Path(f.filename).parents and "importlib" not in f.filename
        ]
        where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        raise click.ClickException(f"{name} raised {type(error).__name__}{where}: {error}") from error


def _offer(defined: Mapping[str, Any]) -> str:
    graphs = [n for n, v in defined.items() if isinstance(v, Graph | Module | Step | TracedFunction)]
    plain = [
        n
        for n, v in defined.items()
        if inspect.isfunction(v) and v.__module__ == defined.get("__name__") and not n.startswith("_")
    ]
    return f"it has {', '.join(graphs + plain) or 'no graph and no function'}"


def compiled(model: str, settings: Settings, wrt: Sequence[str] | None = None, calls: bool = True) -> Module:
    """MODEL compiled with the given options; a saved module is used as it is, unless an option contradicts it.

    :param calls: whether the command calls it.
    """
    opened = open_model(model, settings.types, settings.native)
    wanted = tuple(wrt if wrt is not None else settings.wrt)
    options: dict[str, Any] = dict(settings.options)
    if isinstance(opened, Module):
        if not (
            options
            or (wanted and set(wanted) != set(opened.wrt))
            or (settings.target and settings.target != opened.target)
        ):
            return opened
        graph, wanted, target = opened.graph, wanted or opened.wrt, settings.target or opened.target
        its = opened.options.given() if target == opened.target else opened.options.for_other_target()
        options = {**its, **options}
    else:
        graph, target = opened, settings.target or "cpu"
    unknown = settings.dims.keys() - set(graph.dims)
    if unknown:
        raise click.BadParameter(
            f"--dims {min(unknown)}: {graph.name} has the dims {', '.join(graph.dims) or '(none)'}"
        )
    bare = {str(size) for node in graph.inputs for size in node.shape}
    if options.get("memory_budget") is not None and settings.dims:
        options["hints"] = {**(options.get("hints") or {}), **settings.dims}
    if fixed := {d: n for d, n in settings.dims.items() if d not in bare}:  # no input determines these
        options["dims"] = {**(options.get("dims") or {}), **fixed}
    with settings.waiting(f"compiling {graph.name}"), nullcontext() if calls else pool.no_calls():
        module = compile(graph, wanted, target, **options)
        if target == "cpu":
            for executable in module.executables.values():
                _ = executable.native
    return module


def floats(graph: Graph) -> tuple[str, ...]:
    """Every float input: the default of ``wrt``."""
    return tuple(n for n in graph.input_names if graph.input(n).dtype.is_float)


# -- arrays ------------------------------------------------------------------------------------------------------------


def input_types(graph: Graph) -> dict[str, Type]:
    return {name: graph.input(name).type for name in graph.input_names}


def read_arrays(given: Sequence[str], types: Mapping[str, Type], owner: str) -> dict[str, np.ndarray[Any, Any]]:
    """``x=file.npy``, ``x=file.npz:key`` or ``file.npz``; nothing in a file is executed.

    :param types: of the inputs of ``owner``.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for text in given:
        name, equals, place = text.partition("=")
        name, place = (name.strip(), place.strip()) if equals else ("", text.strip())
        file, _, key = place.rpartition(":") if ".npz:" in place else (place, "", "")
        try:
            loaded = npz.read_arrays(file)
        except (FileError, InvalidProblem) as error:
            why = error.strerror if isinstance(error, FileError) else str(error).removeprefix(f"{file} is ")
            raise click.BadParameter(f"{file or text!r} holds no arrays: {why}") from error
        if isinstance(loaded, np.ndarray):
            if not name:
                raise click.BadParameter(f"{text!r}: which input is it? NAME={text}")
            chosen = {name: loaded}
        else:
            key = key or (name if name in loaded else next(iter(loaded)) if len(loaded) == 1 else "")
            if name and key not in loaded:
                raise click.BadParameter(
                    f"{file} holds {', '.join(loaded) or 'nothing'}; say which one: {name}={file}:KEY"
                )
            chosen = {name: loaded[key]} if name else loaded
        for each, array in chosen.items():
            if each not in types:
                raise click.BadParameter(f"{owner} has no input {each!r}; it has {', '.join(types)}")
            dtype = types[each].dtype
            own = dtype.np.num > 255 and array.dtype.kind in "uV" and array.dtype.itemsize == dtype.np.itemsize
            arrays[each] = array.view(dtype.np) if own else array
    return arrays
