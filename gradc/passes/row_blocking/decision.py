"""Which policy a partition follows for products with wide rows: shapes rank the policies, programs refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ...ir.graph import Graph
from ...ir.kernel import Program
from ...ir.node import Node
from ...ir.walk import topological
from ...targets.devices import Device
from ..schedule.partition import Partition
from .attention_scores import attention_scores, weighted_sums
from .precompute_gradients import precompute_gradients
from .sums_to_products import sums_to_products
from .wide_products import Sizes, has_unblocked, is_recomputed, tiled_products


def candidates(
    joint: Graph,
    partition: Callable[..., Partition],
    *,
    values: tuple[str, ...],
    dims: Sizes,
    device: Device,
    simplify: Callable[[Graph], Graph],
    blocked: bool,
    multiply_sums: bool,
    precompute: bool,
    tiled: bool = False,
) -> Iterator[Partition]:
    """A joint graph  ->  its partitions, one for each policy that its shapes allow, least work first.

    :param partition: :func:`.partition` with its other options.
    :param values: the joint graph's outputs that belong to the forward.
    :param dims: sizes at which bytes are counted.
    :param device: that runs the loops.
    :param simplify: applied to the graph in which gradients are precomputed.
    :param blocked: loops over blocks of rows are made; without them everything is saved.
    :param multiply_sums: a sum over rows may become a product, which adds up block by block.
    :param precompute: the forward may make gradients.
    :param tiled: the forward may compute scores in loops on tensor cores (:func:`.attention_scores`).
    """
    scores = _scores(joint, values) if tiled else frozenset[Node]()
    for own in dict.fromkeys((scores, frozenset[Node]())) if blocked else ():

        def recompute(graph: Graph, own: frozenset[Node] = own, **options: Any) -> Partition:
            tiles, sums = (own and _scores(graph, values)), frozenset[Node]()
            if tiles:
                sums = frozenset(p for node in tiles for p in weighted_sums(graph, node, _forward(graph, values)))
            is_blocked = lambda node: node in tiles or is_recomputed(node, dims=dims, device=device)
            parts = partition(graph, blocked=is_blocked, unwritten=sums, **options)
            return replace(parts, tiled=parts.recomputed & tiles)

        graph, recomputing = joint, recompute(joint)
        blocks = recomputing.recomputed - recomputing.tiled
        if multiply_sums and (summed := sums_to_products(joint, blocks)) is not joint:
            graph, recomputing = summed, recompute(summed)
            blocks = recomputing.recomputed - recomputing.tiled
        scaled = precompute_gradients(graph, values, blocks, dims) if precompute else None
        if scaled is not None:
            scaled = simplify(scaled)
            names = scaled.output_names[len(joint.outputs) :]
            yield recompute(scaled, precomputed=names)
        yield recomputing
    yield partition(joint)


def _scores(joint: Graph, values: Iterable[str]) -> frozenset[Node]:
    """Those of the forward."""
    return attention_scores(joint, _forward(joint, values))


def _forward(joint: Graph, values: Iterable[str]) -> set[Node]:
    return set(topological(joint.output(name) for name in values))


def first_blocked(
    partitions: Iterable[Partition],
    programs_of: Callable[[Partition], Iterable[tuple[str, Program]]],
    dims: Sizes,
    device: Device,
) -> tuple[Partition, dict[str, Program]]:
    """Partitions, best first  ->  the first one in whose programs no wide rows are in memory, and these programs.

    A graph's shapes rank the policies.  They do not say whether its products can be blocked: that depends on how the
    nodes around them were fused into kernels and how these reduce (a batch norm's statistics read all rows before a
    row can be normalized, a gradient's sum may be owned in an order of rows).  A product that was to be computed twice
    and yet is in memory costs more than one that is saved, so a partition whose programs have one is given up for the
    next, by its forward already if that has one: as many models do whose convolutions stand between batch norms.  Of
    the benchmarks ten have such products, and seven of them keep the first partition.

    :param programs_of: names and programs of a partition, each made when it is asked for.
    """
    for parts in partitions:
        programs: dict[str, Program] = {}
        for name, program in programs_of(parts):
            programs[name] = program
            untiled = name == "forward" and len(parts.tiled) > tiled_products(program)
            if not parts.is_final and (untiled or has_unblocked(program, dims, device)):
                break
        else:
            break
    return parts, programs
