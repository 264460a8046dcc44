"""The public functions compile(), load() and load_module(), and the module cache; the passes are in
:mod:`gradc.compiler`.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradc.ops as ops

from . import knobs
from .errors import GradcError, InvalidProblem, Unsupported
from .ir.graph import Graph
from .ir.kernel import Program
from .ir.text import load as load_graph
from .ir.text import parse as parse_graph
from .ir.types import Type
from .knobs import TARGETS
from .module import options
from .module.module import Module, Recipe
from .module.options import Options
from .module.residuals import Orders
from .module.saved import (
    SavedModule,
    check_module,
    file_of_module,
    module_of_parts,
    parts_of,
    read_module,
    refusing,
    sealed_module,
    unsealed_module,
)
from .process import files
from .process.forks import held_off
from .process.ieee import plain
from .process.version import VERSION
from .runtime.cache import default_cache, digest, unpack
from .runtime.cuda import gpu
from .trace import trace

if TYPE_CHECKING:
    from .optim.optimizer import Optimizer
    from .passes.manager import Pipeline


@options.documented
def compile(
    graph: Graph | Callable[..., Any],
    wrt: Sequence[str] | str = (),
    target: str | None = None,
    *,
    layout: Mapping[str, Any] | None = None,
    update: Mapping[str, Optimizer] | None = None,
    **given: Any,
) -> Module:
    """Compiles a graph (or a function decorated with :func:`gradc.graph`) to a module of forward and backward kernels.

    :param wrt: the inputs to differentiate by; a prefix (``params``) stands for all nested leaves below it.
    :param target: ``"cpu"``, ``"numpy"``, ``"cuda"``, ``"cuda-sim"`` (CUDA source run by a simulator on the CPU); None
        is ``$GRADC_TARGET`` if it is set, else cuda if there are a GPU and CuPy, else cpu.
    :param layout: ``{"x": "NHWC"}`` or ``{"x": (0, 2, 3, 1)}``: the memory order of the axes of inputs (and their
        gradients) and outputs.
    :param update: ``{"table": optim.adagrad(lr=0.1)}``: the module makes a training step.  The graph has one scalar
        float output, the loss; the module takes ``lr``, ``state.step`` and ``state.SLOT.NAME`` besides, and gives
        parameters and state after the step under the names of these inputs, whose memory is donated, and ``d.NAME``
        for what is in ``wrt`` alone.  Names in ``sparse`` are updated in the rows that indices name, and nowhere else.
    :raises NotDifferentiable, InvalidProblem, Unsupported, CompilerError: see these classes in :mod:`gradc.errors`.
    """
    options.check_names(given)
    if not isinstance(graph, Graph):
        if not callable(graph):
            raise InvalidProblem(
                f"compile takes a graph or a function decorated with gradc.graph, not a {type(graph).__name__}"
            )
        graph = getattr(graph, "graph", None) or trace(graph)
    target = target or knobs.TARGET.get() or ("cuda" if gpu.usable() else "cpu")
    if target not in TARGETS:
        raise Unsupported(f"the target {target!r}; there are {', '.join(TARGETS)}")
    names = options.expand(graph, options.names_of("wrt", wrt))
    if layout is not None:
        if not isinstance(layout, Mapping):
            raise InvalidProblem(f"layout={layout!r}: it maps names of inputs and outputs to orders of their axes")
        with held_off:
            from .passes.graph.layouts import apply_layout

        graph = apply_layout(graph, layout=layout)
    if update is not None:
        graph, names, given = _updating(graph, names, update, given, layout or {})
    return compiled(graph, names, target, options.for_target(options.checked(given, graph, target, names), target))


def _updating(
    graph: Graph,
    wrt: Sequence[str],
    update: Mapping[str, Optimizer],
    given: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> tuple[Graph, list[str], dict[str, Any]]:
    """(the graph of a step, what it is still differentiated by: nothing, its options).

    :param layout: that the graph has.
    """
    with held_off:
        from .optim.optimizer import Optimizer
        from .optim.step_graph import step_graph

    if not isinstance(update, Mapping) or not all(isinstance(each, Optimizer) for each in update.values()):
        raise InvalidProblem(f"update={update!r}: it maps names of parameters to optimizers of gradc.optim")
    by_name: dict[str, Optimizer] = {}
    for name, optimizer in zip(options.names_of("update", [*update]), update.values(), strict=True):
        for leaf in options.expand(graph, [name]):
            if leaf not in wrt:
                raise InvalidProblem(f"update names {leaf!r}, which is not in wrt: {', '.join(wrt) or 'nothing'}")
            if leaf in by_name:
                raise InvalidProblem(f"update names {leaf!r} twice")
            by_name[leaf] = optimizer
            if leaf in layout:
                _check_order(leaf, graph.input(leaf).type, optimizer, layout[leaf])
    sparse = options.expand(graph, options.names_of("sparse", given.get("sparse") or ()))
    about = {name: given[name] for name in ("numerics", "unused") if name in given}
    step = step_graph(graph, by_name, wrt=wrt, sparse=sparse, **about)
    donate = options.names_of("donate", given.get("donate") or ())
    in_place = [name for name in step.output_names if name in step.input_names and name not in donate]
    return step, [], {**given, "sparse": (), "donate": (*donate, *in_place)}


def _check_order(name: str, stored: Type, optimizer: Optimizer, layout: Any) -> None:
    """Unsupported where an optimizer keeps something of some axes of a parameter, and these are stored elsewhere: its
    state, and its step, would be of others.
    """
    with held_off:
        from .passes.graph.layouts import permutation

    order = permutation(name, stored.rank, layout)
    moved = order[:1] != (0,) if optimizer.by_rows else order != tuple(range(stored.rank))
    if moved and any(slot.shape != stored.shape for slot in optimizer.slots(stored).values()):
        raise Unsupported(
            f"layout={layout!r} for {name!r}: {type(optimizer).__name__} keeps state of some of its axes, and these are"
            " moved; leave out the layout"
        )


# -- the cache ---------------------------------------------------------------------------------------------------------


_CLOCK_NS = 2 * 10**9
"""Nanoseconds in which two writes of a file may bear one time."""


@functools.cache
def fingerprint() -> str:
    """A digest of gradc itself for cache keys: the version, and every byte of the templates and the package's code.

    The cache keeps it by what the system says of the files, as git does, for to ask takes less time than to read.
    """
    from .codegen.text import template_dirs

    found = sorted(path for folder in (*template_dirs(), Path(__file__).parent) for path in _sources(folder))
    about = [(path, os.stat(path)) for path in found]
    key = digest(
        "fingerprint",
        *(f"{path} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for path, s in about),
    )
    known = default_cache().get(key)
    if known is not None:
        return known.decode()
    made = digest(VERSION, *(part for path in found for part in (os.path.basename(path), _bytes(path))))
    if time.time_ns() - max(s.st_ctime_ns for _, s in about) > _CLOCK_NS:  # else a file may change within its time
        default_cache().put(key, made.encode())
    return made


def _sources(folder: Path) -> Iterator[str]:
    """The files of gradc's code in a folder and those below it; ``Path.rglob`` takes twice the time of reading them."""
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, n) for n in names if n.endswith((".py", ".j2", ".h", ".c", ".cpp", ".cu")))


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


@plain()
def compiled(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> Module:
    """The module from the cache, or newly compiled and stored there."""
    recipe = _recipe(graph, wrt, target, options)
    # interpreter and simulator have no machine code to cache; passes that are to be dumped or verified must run
    looked_at = knobs.DUMP.get() or knobs.VERIFY.get() or knobs.VALIDATE.get() or knobs.PRINT_PASSES.get()
    # of an op of the user's the graph's text has the name alone, whose record may be another one next time
    own = any(not node.op.is_builtin for node in graph.nodes)
    key = None if looked_at or own or target not in ("cpu", "cuda") else cache_key(graph, wrt, target, options)
    module = _from_cache(key, graph, wrt, target, options, recipe) if key is not None else None
    if module is not None:
        return module
    _import_compiler()
    from .compiler import compile_graph

    if not knobs.DUMP.get():
        return compile_graph(graph, wrt, target, options, recipe, key)
    with held_off:
        from .inspect.dump import dump_module, folder_of

    folder = folder_of(graph.name, Path(knobs.DUMP.get()))
    with knobs.DUMP.set(str(folder)):
        module = compile_graph(graph, wrt, target, options, recipe, key)
    dump_module(module, folder)
    return module


def cache_key(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> str:
    """The key of a module in the cache: a digest of graph, wrt, options, gradc itself, and the C compiler and CPU."""
    return digest(
        str(graph),
        json.dumps([list(wrt), target, repr(options)]),
        fingerprint(),
        *_toolchain(target),
    )


def _toolchain(target: str) -> tuple[str, ...]:
    """The identity of a target's compiler and CPU; for CUDA nothing, because NVRTC's results are cached separately."""
    if target == "cuda":
        return ()
    with held_off:
        from .runtime.host.toolchain import cpu_identity, find_compiler

    return find_compiler().identity, cpu_identity(), knobs.OPTIMIZE.get(), str(knobs.BOUNDS.get())


def _from_cache(
    key: str, graph: Graph, wrt: Sequence[str], target: str, options: Options, recipe: Recipe
) -> Module | None:
    """The module cached under a key, or None."""
    payload = default_cache().get(key)
    if payload is None:
        return None
    try:
        return module_of_parts(graph, wrt, target, options, unpack(payload), recipe)
    except GradcError:
        return None  # an invalid entry, by a broken build of gradc: compile again


def _import_compiler() -> None:
    """Imports the compiler lazily: it takes 0.1 s, and modules from the cache do not need it."""
    with held_off:
        for name in ("encodings.unicode_escape", "gradc.compiler", "gradc.codegen.jinja"):  # Jinja needs the first
            importlib.import_module(name)
        importlib.import_module("gradc.codegen.jinja").environment()


def _recipe(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> Recipe:
    """The functions by which a module computes its stages, joint program and variants on demand."""

    @plain()
    def stages() -> Pipeline:
        _import_compiler()
        from .compiler import run_passes

        return run_passes(graph, wrt, options, target)[0]

    @plain()
    def joint() -> Program:
        _import_compiler()
        from .compiler import joint_program

        return joint_program(graph, wrt, options, target)

    def variant(orders: Orders) -> Module:
        with knobs.DUMP.set(""):  # only the module itself is dumped
            with held_off:
                from .passes.graph.layouts import apply_layout

            return compiled(apply_layout(graph, layout=orders, results=False), wrt, target, options)

    def value() -> Module:
        with knobs.DUMP.set(""):
            return compiled(graph, (), target, options.without_gradients())

    return Recipe(stages, joint, save_module, export_module, variant, value)


# -- files -------------------------------------------------------------------------------------------------------------


def again(graph: Graph, wrt: Sequence[str], target: str, options: Options, structure: Any) -> Module:
    """Unpickles a module: from the cache, or compiled anew; a pickle holds no machine code."""
    module = compiled(graph, wrt, target, options)
    module.structure = structure
    return module


copyreg.pickle(
    Module, lambda module: (again, (module.graph, module.wrt, module.target, module.options, module.structure))
)


@plain()
def parse(text: str) -> Graph:
    """Parses a graph's text; IRFormatError has the position of an error."""
    assert ops.REGISTRY
    return parse_graph(text)


@plain()
def load(path: Any) -> Graph:
    """Loads a graph from a file written by ``graph.save``."""
    return load_graph(path)


def save_module(module: Module, path: Any) -> None:
    """Saves a module as one file; if ``path`` is an existing directory, as ``module.gradc`` in it.

    The file is replaced atomically.

    :raises FileError: it cannot be written; the old file is unchanged.
    """
    files.write(
        file_of_module(path, "written"),
        *sealed_module(module, parts_of(module, portable=True), _identity(module.target)),
    )


def export_module(module: Module, folder: Any, **options: Any) -> Path:
    """:meth:`Module.export`."""
    with held_off:
        from .module.export import export

    return export(module, folder, **options)


def module_bytes(module: Module) -> bytes:
    """The bytes that :func:`save_module` writes."""
    return b"".join(sealed_module(module, parts_of(module, portable=True), _identity(module.target)))


@plain()
def load_module(path: Any, *, native: bool = True) -> Module:
    """Loads a module that :meth:`Module.save` wrote; on a different machine it is recompiled from its programs.

    **Running a loaded module executes the machine code in its file**, as importing a Python file does; the file's
    digest detects damage, not its author.  Load untrusted files with ``native=False``.

    :param native: False compiles the module anew from its graph, wrt and options; machine code (or a GPU's cubin) and
        programs in the file are not used, and loading is as safe as loading a graph.
    :raises FileError: the file cannot be read.
    :raises InvalidProblem: it holds no module, or a damaged one.
    """
    file = file_of_module(path, "read")
    return _restored(read_module(file), native, str(file))


@plain()
def module_from_bytes(data: bytes, *, native: bool = True) -> Module:
    """The module in the bytes of :func:`module_bytes`; see the warning of :func:`load_module`."""
    return _restored(unsealed_module(data, "these bytes"), native, "these bytes")


def _restored(saved: SavedModule, native: bool, name: str) -> Module:
    """The module of a parsed file.

    :param name: the file's name, for errors.
    """
    with refusing(name):
        unknown = saved.options.keys() - set(options.NAMES)
        if unknown:
            raise InvalidProblem(f"compile has no option {min(unknown)!r}")
        graph, wrt, target = saved.graph, saved.wrt, saved.target
        chosen = options.checked(saved.options, graph, target, wrt)
        if not native:
            return compiled(graph, wrt, target, chosen)
        fits = saved.machine == _identity(target)
        parts = {name: data for name, data in saved.parts.items() if fits or not name.endswith((".so", ".sites"))}
        if target == "cpu":
            from .runtime.host import pool

            pool.offer(parts)
        module = module_of_parts(graph, wrt, target, chosen, parts, _recipe(graph, wrt, target, chosen))
        check_module(module)
    return module


def _identity(target: str) -> str:
    """The machine that a saved module's machine code is valid for: this CPU and the runtime; for a GPU, the version of
    gradc (the binary itself has its architecture).
    """
    from .runtime.host import pool
    from .runtime.host.toolchain import cpu_identity

    return fingerprint() if target == "cuda" else digest(cpu_identity(), *pool.texts())
