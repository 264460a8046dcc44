"""The compiler on one page: :func:`compile_graph` and its stages, in order, from a graph to a loaded module.

=======================  ==============================================================================
:func:`run_passes`       Graph -> joint Graph (:func:`lower`) -> forward and backward Graph (:func:`cut`)
                         -> Program (:func:`kernels`)
:class:`.Module`         verifies that no access of a Program leaves its array
:class:`Emitter`         Program -> C or CUDA -> machine code, beside the passes that are left; CUDA is compiled by
                         NVRTC at its first launch
:func:`load`             machine code -> this process
:func:`.parts_of`        module -> bytes, for the cache
=======================  ==============================================================================

:mod:`gradc.api` looks in the cache before.  A module that comes from there needs none of this, so that nothing here is
imported before one is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .analysis.product_kernels import product_kernels
from .analysis.strategies import ON_GPU, ON_HOST
from .autodiff import differentiate, joint_names
from .codegen.cpu.program import Source, render_program
from .errors import InvalidProblem
from .ir.graph import Graph
from .ir.kernel import Program
from .ir.types import BF16, F16, DType
from .module.module import Code, Module, Recipe
from .module.options import Options
from .module.saved import parts_of
from .passes.column_blocking.tile_rows import tile_rows
from .passes.graph.centre_sums import centre_sums
from .passes.graph.cheaper_forms import cheaper_forms
from .passes.graph.check_indices import name_readers
from .passes.graph.decompose import decompose
from .passes.graph.fold import fold
from .passes.graph.invert_scatters import invert_scatters
from .passes.graph.propagate_reshapes import propagate_reshapes
from .passes.graph.push_gathers import push_gathers
from .passes.graph.push_slices import push_slices
from .passes.graph.scalarize_axes import scalarize_axes
from .passes.graph.simplify import simplify
from .passes.graph.sink_dequant import sink_dequant
from .passes.graph.sparse_rows import sparse_rows
from .passes.graph.static_indices import static_indices
from .passes.graph.upcast import upcast
from .passes.manager import PASSES, Pipeline
from .passes.program.align_rows import align_rows
from .passes.program.batch_steps import batch_steps
from .passes.program.choose_reduction import choose_reduction
from .passes.program.columns_to_rows import columns_to_rows
from .passes.program.copy_donated import copy_donated
from .passes.program.forward_rows import forward_rows
from .passes.program.fuse_copies import fuse_copies
from .passes.program.fuse_epilogues import fuse_epilogues
from .passes.program.fuse_siblings import fuse_siblings
from .passes.program.inline_constants import inline_constants
from .passes.program.interchange import gathers_elements, interchange
from .passes.program.narrow_integers import narrow_integers
from .passes.program.narrow_products import narrow_products
from .passes.program.order_steps import order_steps
from .passes.program.plan_buffers import plan_buffers
from .passes.program.read_in_place import read_in_place
from .passes.program.relayout_temps import relayout_temps
from .passes.program.rows_to_columns import rows_to_columns
from .passes.program.store_places import store_places
from .passes.program.store_rows import store_rows
from .passes.program.unroll_columns import unroll_columns
from .passes.program.unroll_scatters import unroll_scatters
from .passes.program.unroll_windows import unroll_windows
from .passes.row_blocking.block_batch import block_batch
from .passes.row_blocking.block_rows import block_rows
from .passes.row_blocking.decision import candidates, first_blocked
from .passes.row_blocking.merge_rows import merge_rows
from .passes.row_blocking.push_transposes import push_transposes
from .passes.row_blocking.resize_blocks import resize_blocks
from .passes.schedule.partition import Partition, partition
from .passes.schedule.save_biased import save_biased
from .passes.schedule.schedule import schedule, written
from .process.collection import collection_waits
from .process.forks import held_off
from .process.interrupts import interrupts_wait
from .runtime.cache import default_cache, pack
from .runtime.host import pool
from .runtime.host.toolchain import Build
from .targets.devices import Device, Gpu, cpu_of, gpu_of

if TYPE_CHECKING:
    from .runtime.cuda.programs import CudaSource

# PASSES: every pass is registered by these imports
__all__ = ["PASSES", "compile_graph", "cut", "joint_program", "kernels", "lower", "optimise"]


def compile_graph(
    graph: Graph, wrt: Sequence[str], target: str, options: Options, recipe: Recipe, cache_key: str | None
) -> Module:
    """A graph as a loaded module of forward and backward: every stage of the compiler.

    :param recipe: how the module does later what is only done on demand.
    :param cache_key: under which the module is kept; None keeps nothing, and leaves rendering and compiling to the
        first call.
    """
    with Emitter("" if cache_key is None else target) as emitter:
        with collection_waits:
            pipeline, parts, programs = run_passes(graph, wrt, options, target, emitter)  # Graph -> Graphs -> Programs
            code = {name: Code(program) for name, program in programs.items()}
            module = Module(graph, wrt, target, code, parts.residuals, options, recipe, pipeline)  # verifies accesses
            for name, executable in module.executables.items():
                emitter.begin(name, executable.program)  # Program -> C or CUDA
        binaries = emitter.finish()  # C -> machine code
    if cache_key is not None:
        load(module, emitter.sources, binaries)  # machine code -> this process
        default_cache().put(cache_key, pack(parts_of(module)))
    return module


# -- Graph -> Program: the passes --------------------------------------------------------------------------------------


def run_passes(
    graph: Graph, wrt: Sequence[str], options: Options, target: str, emitter: Emitter | None = None
) -> tuple[Pipeline, Partition, dict[str, Program]]:
    """Every pass, in order.

    :param emitter: that is given the forward before the passes of the backward.
    """
    pipeline = Pipeline(sizes=options.dims or {}, between=emitter.advance if emitter is not None else None)

    def programs_of(parts: Partition) -> Iterator[tuple[str, Program]]:
        del pipeline.stages[lowered:]  # those of a partition that was given up are no stages of the module
        if wrt:
            pipeline.split(joint, parts.forward, parts.backward)
        pipeline.start("forward.partition", parts.forward)
        in_place = () if wrt else options.donate  # what backward reads stays as it is
        forward = kernels(parts.forward, options, target, pipeline, "forward", in_place)
        yield "forward", forward
        if wrt:
            if emitter is not None and parts.is_final:
                emitter.begin("forward", forward)
            pipeline.start("backward.partition", parts.backward)
            yield "backward", kernels(parts.backward, options, target, pipeline, "backward")

    try:
        joint = lower(graph, wrt, options, target, pipeline)
        lowered = len(pipeline.stages)
        device = _device(options, target)
        parts, programs = first_blocked(cut(graph, joint, wrt, options, target), programs_of, _hints(options), device)
    finally:
        pipeline.between = None  # who keeps the stages does not keep compilers
    _check_forced(programs.values(), options.reductions or {})
    return pipeline, parts, programs


def _blocks_rows(options: Options) -> bool:
    """Whether loops over blocks of rows are made."""
    return options.fuse and options.numerics != "strict"


def _check_forced(programs: Collection[Program], reductions: Mapping[str, str]) -> None:
    """InvalidProblem where ``reductions=`` names something into which nothing is combined."""
    combined = {p.root(s.buffer): "" for p in programs for k in p.kernels for s in k.accums}
    named = {
        name: b
        for p in programs
        for name, b in (*((b.name, p.root(b.name)) for b in p.buffers), *((n, p.root(b)) for n, b in p.outputs))
    }
    unknown = [name for name in reductions if name != "*" and named.get(name) not in combined]
    if unknown:
        raise InvalidProblem(
            f"reductions names {unknown[0]!r}, into which nothing is combined; there are"
            f" {', '.join(combined) or 'none'}"
        )


def joint_program(graph: Graph, wrt: Sequence[str], options: Options, target: str) -> Program:
    """Value and gradients in one program, with nothing kept between."""
    pipeline = Pipeline(sizes=options.dims or {})
    return kernels(lower(graph, wrt, options, target, pipeline), options, target, pipeline, "joint")


def lower(graph: Graph, wrt: Sequence[str], options: Options, target: str, pipeline: Pipeline) -> Graph:
    """Forward graph -> optimised graph of values and gradients: the middle of the picture in the design."""
    graph = name_readers(pipeline.start("forward", graph))
    graph = pipeline.run(static_indices, graph)
    graph = pipeline.run(push_gathers, graph, numerics=options.numerics)
    graph = pipeline.run(push_slices, graph, numerics=options.numerics)
    graph = optimise(_joint(graph, wrt, options, pipeline) if wrt else graph, options, target, pipeline)
    if target.startswith("cuda") and _blocks_rows(options):
        device = _device(options, target)
        graph = pipeline.run(push_transposes, graph, dims=_hints(options), device=device, numerics=options.numerics)
    return graph


def cut(graph: Graph, joint: Graph, wrt: Sequence[str], options: Options, target: str) -> Iterator[Partition]:
    """Optimised graph -> its partitions in a forward with residuals and a backward, the best one first."""
    if not wrt:
        return iter([Partition(joint, joint, ())])
    dims, materialized = _hints(options), functools.partial(written, fuse=options.fuse, device=_device(options, target))
    parts = candidates(
        joint,
        functools.partial(
            partition,
            values=graph.output_names,
            save=options.save,
            budget=options.memory_budget,
            dims=dims,
            borrow=options.residuals == "borrow",
            materialized=functools.cache(materialized),
        ),
        values=graph.output_names,
        dims=dims,
        device=_device(options, target),
        simplify=functools.partial(_simplified, numerics=options.numerics, target=target),
        blocked=_blocks_rows(options),
        multiply_sums=(options.reductions or {}).keys() <= {"*"},  # else one of these sums may be named
        precompute=options.save == "min-cut" and options.memory_budget is None,
        tiled=isinstance(_device(options, target), Gpu),
    )
    rounded = given_as_they_are(target) if _blocks_rows(options) else ()
    return (save_biased(each, rounded) for each in parts)


def multiplied_as_they_are(target: str) -> tuple[DType, ...]:
    """The dtypes to which operands of products stay rounded; a GPU multiplies both faster than f32."""
    return (BF16, F16) if target.startswith("cuda") else (BF16,)


def given_as_they_are(target: str) -> tuple[DType, ...]:
    """The dtypes to which products stay rounded: a GPU's library rounds them, and moves half of the bytes."""
    return (BF16, F16) if target.startswith("cuda") else ()


def library_functions(options: Options, target: str) -> tuple[str, ...]:
    """The library ops that a target has a function for although they are made of others."""
    if target == "cpu":
        return ("sort_segments", "integer_matmul")
    return (
        ("convolution_response", "convolution_image", "convolution_filter") if options.convolutions == "cudnn" else ()
    )


def _hints(options: Options) -> dict[str, int]:
    """Sizes at which bytes are counted."""
    return {**(options.hints or {}), **(options.dims or {})}


def _device(options: Options, target: str) -> Device:
    """The device that a program is scheduled for."""
    if target.startswith("cuda"):
        return gpu_of(options.device or options.arch, options.calibration)
    return cpu_of(options.calibration)


def _joint(graph: Graph, wrt: Sequence[str], options: Options, pipeline: Pipeline) -> Graph:
    joint: Graph = pipeline.keep("joint", graph, lambda: differentiate(graph, wrt, unused=options.unused))
    if not options.sparse:
        return joint
    names = joint_names(graph, wrt)[1]
    return pipeline.sparse("sparse_rows", joint, sparse_rows(joint, names=[names[n] for n in options.sparse]))


def optimise(graph: Graph, options: Options, target: str, pipeline: Pipeline) -> Graph:
    """The Graph -> Graph passes, in order."""
    numerics = options.numerics
    round_operands, round_products = multiplied_as_they_are(target), given_as_they_are(target)
    if not target.startswith("cuda"):  # whose tiles have no registers for three sums of a row
        graph = pipeline.run(centre_sums, graph, numerics=numerics)
    if target == "cpu":
        graph = pipeline.run(cheaper_forms, graph, dims=_hints(options), numerics=numerics)
    graph = pipeline.run(decompose, graph, functions=library_functions(options, target))
    graph = pipeline.run(upcast, graph)
    graph = pipeline.run(
        simplify, graph, numerics=numerics, round_operands=round_operands, round_products=round_products
    )
    graph = pipeline.run(fold, graph)
    if target.startswith("cuda"):
        graph = pipeline.run(invert_scatters, graph, numerics=numerics)
    graph = pipeline.run(sink_dequant, graph, numerics=numerics, round_once=round_products)
    graph = pipeline.run(scalarize_axes, graph, numerics=numerics)
    graph = pipeline.run(merge_rows, graph, numerics=numerics)
    graph = pipeline.run(propagate_reshapes, graph, numerics=numerics)
    graph = pipeline.run(  # what the passes between made of it
        simplify,
        graph,
        of="tidy",
        numerics=numerics,
        round_operands=round_operands,
        round_products=round_products,
        functions=library_functions(options, target),
    )
    return pipeline.run(fold, graph, of="tidy")


def _simplified(graph: Graph, numerics: str, target: str) -> Graph:
    """simplify and fold, after what a partition leaves out."""
    round_operands, round_products = multiplied_as_they_are(target), given_as_they_are(target)
    return fold(simplify(graph, numerics=numerics, round_operands=round_operands, round_products=round_products))


def _for_gpu(program: Program, options: Options, device: Device, run: Callable[..., Any]) -> Program:
    """Program -> Program, by the passes for GPUs that come before a choice of reductions."""
    if _blocks_rows(options):
        program = run(tile_rows, program, dims=_hints(options), device=device)
        program = run(block_rows, program, dims=_hints(options), device=device)
    program = run(store_places, program)
    program = run(narrow_products, program)
    program = run(fuse_copies, program)
    program = run(unroll_windows, program)
    program = run(relayout_temps, program)
    program = run(fuse_copies, program)
    program = run(align_rows, program)
    program = run(interchange, program)
    program = run(narrow_integers, program)
    program = run(columns_to_rows, program)
    program = run(rows_to_columns, program)
    program = run(unroll_scatters, program)
    if _blocks_rows(options):
        program = run(fuse_siblings, program)
    program = run(inline_constants, program)
    if _blocks_rows(options):
        program = run(resize_blocks, program)
        program = run(block_batch, program, dims=_hints(options))
        program = run(fuse_epilogues, program, dims=_hints(options), device=device)
    return program


def kernels(
    graph: Graph, options: Options, target: str, pipeline: Pipeline, name: str, in_place: Collection[str] = ()
) -> Program:
    """Graph -> Program, ready to render.

    :param name: of the program, before those of its stages: ``forward``, ``backward``, ``joint``.
    :param in_place: inputs over which the outputs of their names are written.
    """
    device = _device(options, target)
    run = functools.partial(pipeline.run, of=name)
    program: Program = run(schedule, graph, fuse=options.fuse, device=device)
    if target.startswith("cuda"):
        program = _for_gpu(program, options, device, run)
    if target == "cpu":
        reorder = options.numerics != "strict"
        if reorder and options.fuse:
            program = run(relayout_temps, program, wanted=gathers_elements)
            program = run(fuse_copies, program, wanted=gathers_elements, rounded=False)
            program = run(interchange, program, wanted=gathers_elements)
        unnamed = (options.reductions or {}).keys() <= {"*"}  # else one of the sums may be named
        program = run(unroll_columns, program, reassociate=reorder, side_by_side=unnamed)
    program = run(
        choose_reduction,
        program,
        force=options.reductions,
        device=device,
        determinism=options.determinism,
        available=ON_GPU if target.startswith("cuda") else ON_HOST,
    )
    if target == "cpu" and options.fuse:
        program = run(read_in_place, program)
    if target == "cpu" and _blocks_rows(options):
        program = run(block_rows, program, dims=_hints(options), device=device)
    program = run(order_steps, program, dims=_hints(options))
    if in_place:
        program = run(store_rows, program, donate=in_place, fuse=options.fuse and target == "cpu")
        program = run(copy_donated, program, donate=in_place)
    if options.fuse and target != "numpy":
        program = run(forward_rows, program, donate=in_place, **_handing_on(target))
    if options.fuse:
        program = run(batch_steps, program, donate=in_place, alike=target.startswith("cuda"))
    return run(plan_buffers, program)  # type: ignore[no-any-return]


def _handing_on(target: str) -> dict[str, Any]:
    """What the pass forward_rows is told of a target."""
    if not target.startswith("cuda"):
        return {}
    with held_off:
        from .codegen.cuda.finished_rows import can_hand_on
    return {"can_hand_on": can_hand_on, "choices": True}


# -- Program -> text -> machine code -> a process ----------------------------------------------------------------------


class Emitter:
    """Program -> C or CUDA -> machine code.  C is compiled beside the caller, from :meth:`begin` to the end of the
    block: the forward's during the passes of the backward.

    :param target: that it is for; "" does nothing, and leaves everything to the first call.
    :ivar sources: the texts, by the names of their programs.
    """

    def __init__(self, target: str):
        self.target = target
        self.sources: dict[str, Source | CudaSource] = {}
        self._build = Build() if target == "cpu" else None

    def __enter__(self) -> Emitter:
        if self._build is not None:
            self._build.__enter__()
            pool.begin()
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        if self._build is not None:
            with interrupts_wait():  # one that comes here stops both, too
                if error is not None:
                    pool.stop()
                self._build.__exit__(error, *details)

    def begin(self, name: str, program: Program) -> None:
        """A program that no pass will change, unless it is begun already."""
        if not self.target or name in self.sources:
            return
        source = self.sources[name] = render(program, self.target)
        if self._build is not None and isinstance(source, Source):
            self._build.add(source.units)
            pool.begin(product_kernels(program))

    def advance(self) -> None:
        """Keeps compilers running while there are units for them."""
        if self._build is not None:
            self._build.advance()

    def finish(self) -> Sequence[bytes | None]:
        """The machine code of each program, by the calling thread, which Ctrl-C can stop.  CUDA is left to NVRTC when a
        device is asked for its first launch, or :attr:`gradc.Executable.binary` is: None.
        """
        return self._build.finish() if self._build is not None else [None] * len(self.sources)


def render(program: Program, target: str) -> Source | CudaSource:
    """Program -> C, in units that are compiled side by side; or CUDA."""
    if target == "cpu":
        return render_program(program)
    with held_off:  # a sixth of importing the compiler, of no use to a CPU
        from .codegen.cuda.render import render_cuda
        from .runtime.cuda.programs import CudaSource
    return CudaSource(*render_cuda(program))


def load(module: Module, sources: Mapping[str, Source | CudaSource], binaries: Sequence[bytes | None]) -> None:
    """What the module's calls run, into this process."""
    for (name, source), binary in zip(sources.items(), binaries, strict=True):
        module.executables[name].backend.load(source, binary)
