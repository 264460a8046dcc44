"""schedule: Graph -> Program, fusing nodes into row programs.

Every node starts as a kernel of its own (``fuse=False`` stops there).  With fusion, ops that move data and cheap
pointwise ops are read where they are used; each other node joins the group that already reads or computes what it
needs, where one iteration space serves both, the kernel can be written, and no group would wait for itself
(reachability in the graph of groups).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ...errors import InternalError
from ...ir.dims import assuming, evaluate, nominal
from ...ir.graph import Graph
from ...ir.kernel import MissedFusion, Program
from ...ir.node import Node
from ...ir.op import Alias, Checked
from ...ir.walk import reachable
from ...targets.devices import CPU, Device
from ..graph.check_indices import check_indices
from ..manager import program_pass
from .groups import lowering
from .lower import CannotInline
from .merge import merge
from .program_builder import ProgramBuilder
from .scheduler import FIRST, MERGED, Scheduler

R = TypeVar("R")


@program_pass("BITS")
def schedule(graph: Graph, *, fuse: bool = True, device: Device = CPU) -> Program:
    """mul, sum, mul  ->  one kernel with two passes over its columns

    :param device: on a CPU, matrix products read other dtypes than their own, and scales, and kernels may be long; on a
        GPU, more is computed again rather than stored (:mod:`recompute`).
    """
    graph = check_indices(graph)
    forced = {n.operands[0] for n in graph.nodes if isinstance(lowering(n), Checked)} - set(graph.inputs)
    return _placed(graph, forced, fuse, device, _built)


def _built(scheduler: Scheduler) -> Program:
    program = ProgramBuilder(scheduler).program()
    names, name_of = {k.name for k in program.kernels}, scheduler.kernel_names.get
    missed = [
        MissedFusion(name_of(a, ""), name_of(b, ""), size, why) for (a, b), (size, why) in scheduler.refused.items()
    ]
    return replace(program, missed=[each for each in missed if {each.first, each.second} <= names])


def written(graph: Graph, *, fuse: bool = True, device: Device = CPU) -> set[Node]:
    """The values of a graph, other than its inputs, that its kernels and library calls write to memory."""
    return _placed(graph, set(), fuse, device, _stored)


def _stored(scheduler: Scheduler) -> set[Node]:
    def behind(node: Node) -> tuple[Node, ...]:
        return node.operands if isinstance(lowering(node), Alias) and node not in scheduler.group_of else ()

    read = set().union(*scheduler.loads.values(), (node for _, node in scheduler.graph.outputs))
    return {node for node in reachable(read, behind) if node in scheduler.group_of}


def missed_fusions(program: Program) -> list[MissedFusion]:
    """The pairs of kernels that move the same bytes and yet are two, most bytes first, and why."""
    return sorted(program.missed, key=lambda each: -evaluate(each.nbytes, nominal([each.nbytes])))


def _placed(graph: Graph, forced: set[Node], fuse: bool, device: Device, result: Callable[[Scheduler], R]) -> R:
    """The result for a scheduler that has placed every node.

    :param forced: nodes that need memory.
    :param result: may raise CannotInline, where a node needs memory after all.
    """
    scheduler = Scheduler(graph, fuse, forced, device)
    with assuming(graph.assumptions):
        while True:
            try:
                scheduler.run()
                if fuse:
                    merge(scheduler, MERGED, MERGED if scheduler.host else FIRST)
                return result(scheduler)
            except CannotInline as reason:
                if reason.node in scheduler.forced:
                    raise InternalError(f"no kernel can be written for {reason.node!r}: {reason.why}") from reason
                scheduler.revisit(reason.node)  # it needs memory after all
