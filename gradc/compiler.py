"""The passes, in order: from a graph to the programs of its forward and backward.

A module that comes from the cache needs none of them, so that nothing here is imported before one is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .autodiff import differentiate, joint_names
from .errors import InvalidProblem
from .ir.graph import Graph
from .ir.kernel import Program
from .passes.graph.check_indices import name_readers
from .passes.graph.decompose import decompose
from .passes.graph.fold import fold
from .passes.graph.propagate_reshapes import propagate_reshapes
from .passes.graph.scalarize_axes import scalarize_axes
from .passes.graph.simplify import simplify
from .passes.graph.sink_dequant import push_gathers, sink_dequant
from .passes.graph.sparse_rows import sparse_rows
from .passes.graph.upcast import upcast
from .passes.manager import PASSES, Pipeline
from .passes.program.coalesce import coalesce
from .passes.program.columns_to_rows import columns_to_rows
from .passes.program.fuse_rounding import fuse_rounding
from .passes.program.plan_buffers import plan_buffers
from .passes.reductions.choose_reduction import choose_reduction
from .passes.reductions.devices import gpu_of
from .passes.reductions.strategies import ON_GPU
from .passes.schedule.partition import Partition, partition
from .passes.schedule.residual import Residual
from .passes.schedule.schedule import schedule

__all__ = ["PASSES", "build", "joint_program", "kernels", "lower", "optimise"]  # PASSES: all are registered here


def build(
    graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], target: str
) -> tuple[Pipeline, dict[str, Program], tuple[Residual, ...]]:
    """Run every pass."""
    pipeline = Pipeline()
    parts = lower(graph, wrt, options, pipeline)
    pipeline.start("forward.partition", parts.forward)
    programs = {"forward": kernels(parts.forward, options, target, pipeline, "forward")}
    if wrt:
        pipeline.start("backward.partition", parts.backward)
        programs["backward"] = kernels(parts.backward, options, target, pipeline, "backward")
    combined = {p.root(s.buffer): "" for p in programs.values() for k in p.kernels for s in k.accums}
    named = {
        name: b
        for p in programs.values()
        for name, b in (*((b.name, p.root(b.name)) for b in p.buffers), *((n, p.root(b)) for n, b in p.outputs))
    }
    strange = [name for name in options["reductions"] or () if name != "*" and named.get(name) not in combined]
    if strange:
        raise InvalidProblem(
            f"reductions names {strange[0]!r}, into which nothing is combined; there are"
            f" {', '.join(combined) or 'none'}"
        )
    return pipeline, programs, parts.residuals


def joint_program(graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], target: str) -> Program:
    """Value and gradients in one program, with nothing kept between."""
    pipeline = Pipeline()
    ready = pipeline.run(push_gathers, name_readers(pipeline.start("forward", graph)), numerics=options["numerics"])
    return kernels(
        optimise(_joint(ready, wrt, options, pipeline), options, pipeline), options, target, pipeline, "joint"
    )


def lower(graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], pipeline: Pipeline) -> Partition:
    """Forward graph -> optimised forward with residuals and backward: the middle of the picture in the design."""
    graph = name_readers(pipeline.start("forward", graph))
    graph = pipeline.run(push_gathers, graph, numerics=options["numerics"])
    joint = _joint(graph, wrt, options, pipeline) if wrt else graph
    joint = optimise(joint, options, pipeline)
    if not wrt:
        return Partition(joint, joint, ())
    return partition(
        joint,
        graph.output_names,
        save=options["save"],
        budget=options["memory_budget"],
        dims={**(options["hints"] or {}), **(options["dims"] or {})},
    )


def _joint(graph: Graph, wrt: Sequence[str], options: Mapping[str, Any], pipeline: Pipeline) -> Graph:
    joint: Graph = pipeline.keep("joint", graph, lambda: differentiate(graph, wrt, unused=options["unused"]))
    if not options["sparse"]:
        return joint
    names = joint_names(graph, wrt)[1]
    return pipeline.run(sparse_rows, joint, names=[names[n] for n in options["sparse"]])  # type: ignore[no-any-return]


def optimise(graph: Graph, options: Mapping[str, Any], pipeline: Pipeline) -> Graph:
    """The Graph -> Graph passes, in order."""
    numerics = options["numerics"]
    graph = pipeline.run(decompose, graph)
    graph = pipeline.run(upcast, graph)
    graph = pipeline.run(simplify, graph, numerics=numerics)
    graph = pipeline.run(fold, graph)
    graph = pipeline.run(sink_dequant, graph, numerics=numerics)
    graph = pipeline.run(scalarize_axes, graph, numerics=numerics)
    graph = pipeline.run(propagate_reshapes, graph, numerics=numerics)
    return pipeline.keep("tidy", graph, lambda: fold(simplify(graph, numerics=numerics)), "REAL")


def kernels(graph: Graph, options: Mapping[str, Any], target: str, pipeline: Pipeline, what: str) -> Program:
    """Graph -> Program, ready to render."""
    program = pipeline.keep(
        f"{what}.schedule", graph, lambda: schedule(graph, fuse=options["fuse"], host=target in ("cpu", "numpy"))
    )
    how: dict[str, Any] = (
        {"device": gpu_of(options["device"] or options["arch"], options["calibration"]), "available": ON_GPU}
        if target.startswith("cuda")
        else {}
    )
    if target.startswith("cuda"):
        program = pipeline.keep(f"{what}.coalesce", program, lambda: coalesce(program))
        program = pipeline.keep(f"{what}.fuse_rounding", program, lambda: columns_to_rows(fuse_rounding(program)))
    program = pipeline.keep(
        f"{what}.choose_reduction",
        program,
        lambda: choose_reduction(program, force=options["reductions"], **how, determinism=options["determinism"]),
    )
    return pipeline.keep(f"{what}.plan_buffers", program, lambda: plan_buffers(program))  # type: ignore[no-any-return]
