"""compile(): what it takes and gives, the cache, and modules in files; the passes are in :mod:`gradc.compiler`."""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradc.ops as ops

from . import files, knobs
from .calibration.choose import calibration_text_for
from .errors import GradcError, InvalidProblem, Unsupported
from .interp import sizes_given
from .ir.graph import Graph
from .ir.kernel import Program
from .ir.program_text import parse_program
from .ir.text import load as load_graph
from .ir.text import parse as parse_graph
from .knobs import TARGETS
from .module.module import Module, Recipe
from .module.saved import (
    SavedModule,
    check_module,
    file_of_module,
    part_text,
    read_module,
    read_residuals,
    read_sites,
    refusing,
    sealed_module,
    unsealed_module,
)
from .passes.schedule.residual import Residual
from .process.forks import held_off
from .process.ieee import plain
from .runtime.cuda import gpu
from .trace import trace
from .version import VERSION

if TYPE_CHECKING:
    from .passes.manager import Pipeline

DEFAULTS: dict[str, Any] = {
    "numerics": "real",
    "fuse": True,
    "save": "min-cut",
    "memory_budget": None,
    "hints": None,
    "unused": "error",
    "reductions": None,
    "dims": None,
    "donate": (),
    "sparse": (),
    "arch": None,
    "determinism": "run",
    "errors": None,
    "device": None,
    "calibration": None,
}


def compile(
    graph: Graph | Callable[..., Any],
    wrt: Sequence[str] | str = (),
    target: str | None = None,
    *,
    layout: Mapping[str, Any] | None = None,
    **options: Any,
) -> Module:
    """A graph (or a function decorated with :func:`gradc.graph`) as a module of forward and backward kernels.

    :param wrt: the inputs whose gradients are wanted; a prefix names all nested leaves below it (``params``).
    :param target: ``"cpu"``, ``"numpy"``, ``"cuda"``, ``"cuda-sim"`` (CUDA text, run on the CPU); None:
        ``$GRADC_TARGET``, else cuda where there are a GPU and CuPy, else cpu.
    :param determinism: ``"run"``: the same bits in every run; ``"none"`` lets a GPU add floats in any order where that
        is faster.
    :param arch: what the target cuda compiles for; if unsaid the current device's, ``"sm_90"`` where there is none.
    :param device: whose constants choose reductions, by the cost model's name (``"H200"``); if unsaid the current
        device, or the first of ``arch``.
    :param calibration: a file that ``gradc calibrate`` wrote, or ``"none"``; unsaid, the target cuda reads
        ``GRADC_CALIBRATION`` or the user's own, if any.
    :param errors: of data, on a GPU: ``"async"`` raises them at ``module.synchronize()`` or a later call, ``"sync"``
        waits in each call.
    :param numerics: ``"real"`` allows rewrites that are equal over the reals, ``"strict"`` only those that keep every
        bit.
    :param fuse: False gives each node its own kernel.
    :param save: ``"min-cut"``, ``"all"``, ``"none"`` or names of values to keep.
    :param memory_budget: what forward may leave for backward beyond the inputs: an int, in bytes, at the sizes of
        ``hints`` and ``dims``; or a float from 0.0, the fewest bytes possible, to 1.0, what ``save`` keeps.  The rest
        is computed again, reductions included, matrix products and scatters never.
    :param hints: sizes of symbols at which what to save is weighed; they bind nothing, and 1024 stands for those
        without.
    :param unused: ``"zeros"`` gives a zero gradient where no path leads.
    :param dims: values of symbols that no argument binds.
    :param reductions: ``{"*" or output: "segmented" | "regular" | "privatized"}`` forces the choice; CUDA has
        ``"atomic"`` and ``"atomic_fixed"`` too.
    :param donate: inputs whose memory outputs may take.
    :param sparse: tables whose gradients come as :class:`gradc.SparseRows`.
    :param layout: ``{"x": "NHWC"}`` or ``{"x": (0, 2, 3, 1)}``: inputs (with their gradients) and outputs whose arrays
        have their axes in that order.
    :raises NotDifferentiable, InvalidProblem, Unsupported, CompilerError: see the errors' own texts.
    """
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise InvalidProblem(f"compile has no option {min(unknown)!r}; it has {', '.join((*DEFAULTS, 'layout'))}")
    if not isinstance(graph, Graph):
        if not callable(graph):
            raise InvalidProblem(
                f"compile takes a graph or a function decorated with gradc.graph, not a {type(graph).__name__}"
            )
        graph = getattr(graph, "graph", None) or trace(graph)
    target = target or knobs.TARGET.get() or ("cuda" if gpu.usable() else "cpu")
    if target not in TARGETS:
        raise Unsupported(f"the target {target!r}; there are {', '.join(TARGETS)}")
    names = expand(graph, _names("wrt", wrt))
    if layout is not None:
        if not isinstance(layout, Mapping):
            raise InvalidProblem(f"layout={layout!r}: it maps names of inputs and outputs to orders of their axes")
        with held_off:
            from .passes.graph.layouts import relaid

        graph = relaid(graph, layout=layout)
    settings = _settings(graph, options, target)
    if settings["arch"] is not None and target != "cuda":
        raise InvalidProblem(f"arch={settings['arch']!r} is for the target 'cuda', not {target!r}")
    if settings["errors"] == "async" and target != "cuda":
        raise InvalidProblem(
            f"errors='async' is for the target 'cuda': {target!r} has raised its errors when a call returns"
        )
    settings["errors"] = settings["errors"] or ("async" if target == "cuda" else "sync")
    if target == "cuda":
        settings["arch"] = settings["arch"] or (gpu.current_device().arch if gpu.usable() else "sm_90")
        with held_off:
            from .passes.reductions.devices import listed_device

        settings["device"] = settings["device"] or (
            listed_device(gpu.current_device().name, settings["arch"]).name
            if gpu.usable() and gpu.current_device().arch == settings["arch"]
            else None
        )
    for option in ("device", "calibration"):
        if settings[option] is not None and not target.startswith("cuda"):
            raise InvalidProblem(f"{option}={settings[option]!r} is for a GPU, not for the target {target!r}")
    if target.startswith("cuda"):  # a module keeps what it was chosen by, not where that lay
        with held_off:
            from .passes.reductions.devices import gpu_of

        settings["calibration"] = calibration_text_for(
            gpu_of(settings["device"] or settings["arch"]), settings["calibration"], found=target == "cuda"
        )
    settings["sparse"] = _sparse(expand(graph, _names("sparse", settings["sparse"] or ())), names)
    return cached(graph, names, target, settings)


def _sparse(given: Any, wrt: Sequence[str]) -> tuple[str, ...]:
    """The inputs whose gradients come as rows."""
    names = _names("sparse", given or ())
    strange = [name for name in names if name not in wrt]
    if strange:
        raise InvalidProblem(f"sparse names {strange[0]!r}, which is not in wrt: {', '.join(wrt) or 'nothing'}")
    return tuple(names)


def _names(what: str, given: Any) -> list[str]:
    """One name, or several."""
    names: list[Any] = (
        [given]
        if isinstance(given, str)
        else list(given)
        if isinstance(given, Collection) and not isinstance(given, Mapping)
        else [None]
    )
    if not all(isinstance(name, str) for name in names):
        raise InvalidProblem(f"{what}={given!r}: a name or a list of names")
    return names


def _settings(graph: Graph, options: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The options of a compilation, checked."""
    settings = {**DEFAULTS, **options}
    for option, known in (
        ("numerics", ("real", "strict")),
        ("unused", ("error", "zeros")),
        ("fuse", (True, False)),
        ("determinism", ("run", "none")),
        ("errors", (None, "sync", "async")),
    ):
        if settings[option] not in known:
            raise InvalidProblem(f"{option}={settings[option]!r}; there are {', '.join(map(str, known))}")
    if settings["save"] not in ("min-cut", "all", "none"):
        if isinstance(settings["save"], str):
            raise InvalidProblem(f"save={settings['save']!r}; there are 'min-cut', 'all', 'none' and a list of names")
        settings["save"] = _names("save", settings["save"])
    settings["donate"] = tuple(_names("donate", settings["donate"] or ()))
    for option in ("dims", "hints"):
        if settings[option] is not None:
            settings[option] = sizes_given(settings[option], option)
            unknown = settings[option].keys() - set(graph.dims)
            if unknown:
                raise InvalidProblem(
                    f"{option} names {min(map(str, unknown))!r}; the dims of {graph.name} are"
                    f" {', '.join(graph.dims) or 'none'}"
                )
    budget = settings["memory_budget"]
    possible = budget >= 0 if type(budget) is int else isinstance(budget, float) and 0 <= budget <= 1
    if budget is not None and not possible:
        raise InvalidProblem(
            f"memory_budget={budget!r}: bytes as an int from 0, or a fraction as a float from 0.0 to 1.0"
        )
    force = settings["reductions"]
    if force is not None and not (isinstance(force, Mapping) and all(isinstance(k, str) for k in force)):
        raise InvalidProblem(f"reductions={force!r}: it maps names of outputs, or '*', to strategies")
    if force:
        _load_the_passes()
        from .passes.reductions.strategies import ON_GPU, ON_HOST

        strategies = ON_GPU if target.startswith("cuda") else ON_HOST
        for name, strategy in force.items():
            if strategy not in strategies:
                raise Unsupported(f"the reduction {strategy!r} for {name!r}: there are {', '.join(strategies)}")
    return settings


def expand(graph: Graph, wrt: Sequence[str]) -> list[str]:
    """Names of inputs; ``params`` stands for ``params.l1.w``, ``params.l1.b``..."""
    out: list[str] = []
    for name in wrt:
        below = [n for n in graph.input_names if n.startswith(name + ".")]
        out += [name] if name in graph.input_names or not below else below
    return out


# -- the cache ---------------------------------------------------------------------------------------------------------


@functools.cache
def fingerprint() -> str:
    """What of gradc itself decides a module: version, and every byte of templates and of the package's code."""
    from .codegen.text import template_dirs
    from .runtime.cache import digest

    files = sorted(
        p
        for d in (*template_dirs(), Path(__file__).parent)
        for p in d.rglob("*")
        if p.suffix in (".py", ".j2", ".h", ".c", ".cpp", ".cu")
    )
    return digest(VERSION, *(part for p in files for part in (p.name, p.read_bytes())))


@plain()
def cached(graph: Graph, wrt: Sequence[str], target: str, options: Mapping[str, Any]) -> Module:
    """The module from the cache, or built and put there."""
    from .runtime.cache import default_cache, digest, pack, unpack

    pipeline: list[Pipeline] = []

    def stages() -> Pipeline:
        if not pipeline:
            pipeline.append(_built(graph, wrt, options, target)[0])
        return pipeline[0]

    recipe = _recipe(graph, wrt, target, options, stages)
    if (
        target not in ("cpu", "cuda")
        or knobs.DUMP.get()
        or knobs.VERIFY.get()
        or knobs.VALIDATE.get()
        or knobs.PRINT_PASSES.get()
    ):
        made, programs, residuals = _built(graph, wrt, options, target)
        pipeline.append(made)
        module = Module(graph, wrt, target, programs, residuals, options, recipe)
        if knobs.DUMP.get():
            with held_off:
                from .inspect.explain import dump_module

            dump_module(module, Path(knobs.DUMP.get()))
        return module
    key = digest(
        str(graph),
        json.dumps([list(wrt), target, {k: repr(v) for k, v in options.items()}]),
        fingerprint(),
        *_toolchain(target),
    )
    cache = default_cache()
    payload = cache.get(key)
    if payload is not None:
        try:
            return _from_parts(graph, wrt, target, options, unpack(payload), recipe)
        except GradcError:
            payload = None  # written by a broken build of ours: build again
    made, programs, residuals = _built(graph, wrt, options, target)
    pipeline.append(made)
    module = Module(graph, wrt, target, programs, residuals, options, recipe)
    compile_natives(module)
    cache.put(key, pack(_parts(module)))
    return module


def _toolchain(target: str) -> tuple[str, ...]:
    """What compiles for a target, and what for; the CUDA text has NVRTC's own entry in the cache."""
    if target == "cuda":
        return ()
    with held_off:
        from .runtime.host.toolchain import cpu_identity, find_compiler

    return find_compiler().identity, cpu_identity(), str(knobs.BOUNDS.get())


@plain()
def _built(
    graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], target: str
) -> tuple[Pipeline, dict[str, Program], tuple[Residual, ...]]:
    _load_the_passes()
    from .compiler import build

    return build(graph, wrt, options, target)


def _load_the_passes() -> None:
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


@plain()
def _joint_program(graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], target: str) -> Program:
    _load_the_passes()
    from .compiler import joint_program

    return joint_program(graph, wrt, options, target)


def _recipe(
    graph: Graph, wrt: Sequence[str], target: str, options: Mapping[str, Any], stages: Callable[[], Pipeline]
) -> Recipe:
    return Recipe(
        stages,
        lambda: _joint_program(graph, wrt, options, target),
        save_module,
        lambda orders: _variant(graph, orders, wrt, target, options),
    )


def _variant(
    graph: Graph, orders: Mapping[str, Any], wrt: Sequence[str], target: str, options: Mapping[str, Any]
) -> Module:
    """The module for inputs in other orders; a dump is of the module itself."""
    with knobs.DUMP.set(""):
        with held_off:
            from .passes.graph.layouts import relaid

        return cached(relaid(graph, layout=orders, results=False), wrt, target, options)


def compile_natives(module: Module) -> None:
    """Forward and backward, their units compiled side by side."""
    if module.target == "cpu":
        with held_off:
            from .runtime.host.cpu import compile_programs
        executables = list(module.executables.values())
        for executable, native in zip(executables, compile_programs([e.program for e in executables]), strict=True):
            executable.native = native
    for executable in module.executables.values():
        assert executable.native


def _together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The tasks' results, computed side by side; one after the other where no thread can be had (Python shuts down, the
    process is at its limit).
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


def _parts(module: Module, whole: bool = False) -> dict[str, bytes]:
    """A module as bytes, with its machine code; ``whole``: with what NVRTC makes of it, where there is one."""
    parts = {"residuals": json.dumps([[r.name, str(r.node.type), r.why] for r in module.residuals]).encode()}
    parts |= {name: str(e.program).encode() for name, e in module.executables.items()}
    if module.target not in ("cpu", "cuda"):
        return parts
    codes = _together([lambda e=e: e.portable() if whole else e.native.payload for e in module.executables.values()])  # type: ignore[misc]
    for (name, executable), code in zip(module.executables.items(), codes, strict=True):
        parts[f"{name}.so"] = code
        parts[f"{name}.sites"] = executable.native.sites_json().encode()
    return parts


def _from_parts(
    graph: Graph,
    wrt: Sequence[str],
    target: str,
    options: Mapping[str, Any],
    parts: Mapping[str, bytes],
    recipe: Recipe,
) -> Module:
    """The module of what :func:`_parts` made; IRFormatError or TypeRuleError if the parts are no module's."""
    programs: dict[str, Any] = {}
    for name in ("forward", "backward") if wrt else ("forward",):
        programs[name] = parse_program(part_text(parts, name))
        if f"{name}.so" in parts:
            programs[f"{name}.so"] = parts[f"{name}.so"]
            programs[f"{name}.sites"] = read_sites(parts, f"{name}.sites")
    return Module(graph, wrt, target, programs, read_residuals(parts), options, recipe)


# -- files -------------------------------------------------------------------------------------------------------------


def again(graph: Graph, wrt: Sequence[str], target: str, options: Mapping[str, Any], structure: Any) -> Module:
    """A module out of a pickle: from the cache or compiled anew.  A pickle holds no machine code."""
    module = cached(graph, wrt, target, options)
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
        file_of_module(path, "written"), *sealed_module(module, _parts(module, whole=True), _identity(module.target))
    )


def module_bytes(module: Module) -> bytes:
    """What :func:`save_module` writes."""
    return b"".join(sealed_module(module, _parts(module, whole=True), _identity(module.target)))


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


def _restored(saved: SavedModule, native: bool, what: str) -> Module:
    with refusing(what):
        options = saved.options.keys() - DEFAULTS.keys()
        if options:
            raise InvalidProblem(f"compile has no option {min(options)!r}")
        settings = _settings(saved.graph, saved.options, saved.target)
        settings["sparse"] = _sparse(settings["sparse"], saved.wrt)
        graph, wrt, target = saved.graph, saved.wrt, saved.target
        fits = saved.machine == _identity(target)
        parts = {name: data for name, data in saved.parts.items() if fits or not name.endswith((".so", ".sites"))}
        if not native:
            return cached(graph, wrt, target, settings)
        recipe = _recipe(graph, wrt, target, settings, lambda: _built(graph, wrt, settings, target)[0])
        module = _from_parts(graph, wrt, target, settings, parts, recipe)
        check_module(module)
    return module


def _identity(target: str) -> str:
    """What the machine code of a saved module is for: this CPU and what a runtime gives it; for a GPU it is for its own
    architecture, and made by this very gradc.
    """
    from .codegen.text import read_template
    from .runtime.cache import digest
    from .runtime.host.toolchain import cpu_identity

    return (
        fingerprint()
        if target == "cuda"
        else digest(cpu_identity(), *map(read_template, ("common/ieee.h", "cpu/runtime.h")))
    )
