"""compile(): what it takes and gives, the cache, and modules in files; the passes are in :mod:`gradc.compiler`."""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradc.ops as ops

from . import files, knobs, options
from .errors import GradcError, InvalidProblem, Unsupported
from .ir.graph import Graph
from .ir.kernel import Program
from .ir.text import load as load_graph
from .ir.text import parse as parse_graph
from .knobs import TARGETS
from .module.module import Module, Recipe
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
from .options import Options
from .process.forks import held_off
from .process.ieee import plain
from .runtime.cache import default_cache, digest, unpack
from .runtime.cuda import gpu
from .trace import trace
from .version import VERSION

if TYPE_CHECKING:
    from .passes.manager import Pipeline


@options.documented
def compile(
    graph: Graph | Callable[..., Any],
    wrt: Sequence[str] | str = (),
    target: str | None = None,
    *,
    layout: Mapping[str, Any] | None = None,
    **given: Any,
) -> Module:
    """A graph (or a function decorated with :func:`gradc.graph`) as a module of forward and backward kernels.

    :param wrt: the inputs whose gradients are wanted; a prefix names all nested leaves below it (``params``).
    :param target: ``"cpu"``, ``"numpy"``, ``"cuda"``, ``"cuda-sim"`` (CUDA text, run on the CPU); None:
        ``$GRADC_TARGET``, else cuda where there are a GPU and CuPy, else cpu.
    :param layout: ``{"x": "NHWC"}`` or ``{"x": (0, 2, 3, 1)}``: inputs (with their gradients) and outputs whose arrays
        have their axes in that order.
    :raises NotDifferentiable, InvalidProblem, Unsupported, CompilerError: see the errors' own texts.
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
            from .passes.graph.layouts import relaid

        graph = relaid(graph, layout=layout)
    return compiled(graph, names, target, options.for_target(options.checked(given, graph, target, names), target))


# -- the cache ---------------------------------------------------------------------------------------------------------


@functools.cache
def fingerprint() -> str:
    """What of gradc itself decides a module: version, and every byte of templates and of the package's code."""
    from .codegen.text import template_dirs

    files = sorted(
        p
        for d in (*template_dirs(), Path(__file__).parent)
        for p in d.rglob("*")
        if p.suffix in (".py", ".j2", ".h", ".c", ".cpp", ".cu")
    )
    return digest(VERSION, *(part for p in files for part in (p.name, p.read_bytes())))


@plain()
def compiled(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> Module:
    """The module from the cache, or compiled and put there."""
    recipe = _recipe(graph, wrt, target, options)
    # neither an interpreter nor the simulator has machine code to keep, and passes that are looked at must run
    looked_at = knobs.DUMP.get() or knobs.VERIFY.get() or knobs.VALIDATE.get() or knobs.PRINT_PASSES.get()
    key = None if looked_at or target not in ("cpu", "cuda") else cache_key(graph, wrt, target, options)
    module = _from_cache(key, graph, wrt, target, options, recipe) if key is not None else None
    if module is None:
        _import_compiler()
        from .compiler import compile_graph

        module = compile_graph(graph, wrt, target, options, recipe, key)
    if knobs.DUMP.get():
        with held_off:
            from .inspect.explain import dump_module

        dump_module(module, Path(knobs.DUMP.get()))
    return module


def cache_key(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> str:
    """All that decides a module: what is compiled, gradc itself, and what compiles its C, for which processor."""
    return digest(
        str(graph),
        json.dumps([list(wrt), target, repr(options)]),
        fingerprint(),
        *_toolchain(target),
    )


def _toolchain(target: str) -> tuple[str, ...]:
    """What compiles for a target, and what for; the CUDA text has NVRTC's own entry in the cache."""
    if target == "cuda":
        return ()
    with held_off:
        from .runtime.host.toolchain import cpu_identity, find_compiler

    return find_compiler().identity, cpu_identity(), str(knobs.BOUNDS.get())


def _from_cache(
    key: str, graph: Graph, wrt: Sequence[str], target: str, options: Options, recipe: Recipe
) -> Module | None:
    """The module that is kept under a key, or None."""
    payload = default_cache().get(key)
    if payload is None:
        return None
    try:
        return module_of_parts(graph, wrt, target, options, unpack(payload), recipe)
    except GradcError:
        return None  # written by a broken build of ours: compile again


def _import_compiler() -> None:
    """What a compilation imports: a tenth of a second, and nothing that comes from the cache needs it."""
    with held_off:
        for name in (
            "encodings.unicode_escape",
            "networkx",
            "gradc.compiler",
            "gradc.codegen.jinja",
        ):  # Jinja needs the first
            importlib.import_module(name)
        importlib.import_module("gradc.codegen.jinja").environment()


def _recipe(graph: Graph, wrt: Sequence[str], target: str, options: Options) -> Recipe:
    """What a module does on demand."""

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
        with knobs.DUMP.set(""):  # a dump is of the module itself
            with held_off:
                from .passes.graph.layouts import relaid

            return compiled(relaid(graph, layout=orders, results=False), wrt, target, options)

    return Recipe(stages, joint, save_module, variant)


# -- files -------------------------------------------------------------------------------------------------------------


def again(graph: Graph, wrt: Sequence[str], target: str, options: Options, structure: Any) -> Module:
    """A module out of a pickle: from the cache or compiled anew.  A pickle holds no machine code."""
    module = compiled(graph, wrt, target, options)
    module.structure = structure
    return module


copyreg.pickle(
    Module, lambda module: (again, (module.graph, module.wrt, module.target, module.options, module.structure))
)


@plain()
def parse(text: str) -> Graph:
    """A graph from its text form; IRFormatError says where it is wrong."""
    assert ops.REGISTRY
    return parse_graph(text)


@plain()
def load(path: Any) -> Graph:
    """A graph from a file that ``graph.save`` wrote."""
    return load_graph(path)


def save_module(module: Module, path: Any) -> None:
    """Everything needed to run again, as one file; in a folder that is there, as its ``module.gradc``.

    At any moment the old module or the whole new one is there.

    :raises FileError: it cannot be written; the old module is as it was.
    """
    files.write(
        file_of_module(path, "written"),
        *sealed_module(module, parts_of(module, portable=True), _identity(module.target)),
    )


def module_bytes(module: Module) -> bytes:
    """What :func:`save_module` writes."""
    return b"".join(sealed_module(module, parts_of(module, portable=True), _identity(module.target)))


@plain()
def load_module(path: Any, *, native: bool = True) -> Module:
    """A module that :meth:`Module.save` wrote; compiled anew from its programs if this machine is another.

    **Running a loaded module runs the machine code that its file holds**, as importing a Python file does: the file's
    digest tells damage, not who wrote it.  Load files of others with ``native=False``.

    :param native: False compiles the module anew, from its graph, wrt and options; of the file neither the machine code
        (or a GPU's cubin) nor the programs are used, and it is as safe to open as a graph.
    :raises FileError: the file cannot be read.
    :raises InvalidProblem: it holds no module, or a damaged one.
    """
    file = file_of_module(path, "read")
    return _restored(read_module(file), native, str(file))


@plain()
def module_from_bytes(data: bytes, *, native: bool = True) -> Module:
    """What :func:`module_bytes` made; as :func:`load_module`, whose warning holds here too."""
    return _restored(unsealed_module(data, "these bytes"), native, "these bytes")


def _restored(saved: SavedModule, native: bool, name: str) -> Module:
    """The module of a file.

    :param name: of the file, in errors.
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
        module = module_of_parts(graph, wrt, target, chosen, parts, _recipe(graph, wrt, target, chosen))
        check_module(module)
    return module


def _identity(target: str) -> str:
    """What the machine code of a saved module is for: this CPU and what a runtime gives it; for a GPU it is for its own
    architecture, and made by this very gradc.
    """
    from .codegen.text import read_template
    from .runtime.host.toolchain import cpu_identity

    return (
        fingerprint()
        if target == "cuda"
        else digest(cpu_identity(), *map(read_template, ("common/ieee.h", "cpu/runtime.h")))
    )
