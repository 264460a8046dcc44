"""Which policy a partition follows for products with wide rows: shapes rank the policies, programs refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...ir.graph import Graph
from ...ir.kernel import Program
from ..schedule.partition import Partition
from .policy import WideRowPolicy
from .precompute_gradients import precompute_gradients
from .sums_to_products import sums_to_products
from .wide_products import Sizes, has_unblocked


@dataclass(frozen=True)
class Candidates:
    """The partitions of a joint graph, one for each policy that its shapes allow.

    :param partition: :func:`.partition` with all of its options but the policy's.
    :param values: the joint graph's outputs that belong to the forward.
    :param dims: sizes at which bytes are counted.
    :param simplify: applied to the graph in which gradients are precomputed.
    :param blocked: loops over blocks of rows are made; without them everything is saved.
    :param multiply_sums: a sum over rows may become a product, which adds up block by block.
    :param precompute: the forward may make gradients.
    """

    partition: Callable[..., Partition]
    values: tuple[str, ...]
    dims: Sizes
    simplify: Callable[[Graph], Graph]
    blocked: bool
    multiply_sums: bool
    precompute: bool

    def of(self, joint: Graph) -> Iterator[Partition]:
        """The partitions, fewest multiplications and bytes first; each is computed when it is asked for."""
        if self.blocked:
            graph, recomputing = self._recomputing(joint)
            precomputing = self._precomputing(graph, recomputing) if self.precompute else None
            if precomputing is not None:
                yield precomputing
            yield recomputing
        yield self.partition(joint, policy=WideRowPolicy.SAVE)

    def _recomputing(self, joint: Graph) -> tuple[Graph, Partition]:
        parts = self.partition(joint, policy=WideRowPolicy.RECOMPUTE)
        if not self.multiply_sums or not parts.recomputed:
            return joint, parts
        summed = sums_to_products(joint, parts.recomputed)
        return summed, parts if summed is joint else self.partition(summed, policy=WideRowPolicy.RECOMPUTE)

    def _precomputing(self, joint: Graph, recomputing: Partition) -> Partition | None:
        graph = precompute_gradients(joint, self.values, recomputing.recomputed, self.dims)
        if graph is None:
            return None
        graph = self.simplify(graph)
        names = graph.output_names[len(joint.outputs) :]
        return self.partition(graph, policy=WideRowPolicy.PRECOMPUTE_GRADIENT, precomputed=names)


def first_blocked(
    candidates: Iterable[Partition], programs_of: Callable[[Partition], dict[str, Program]], dims: Sizes
) -> tuple[Partition, dict[str, Program]]:
    """Partitions, best first  ->  the first one in whose programs no wide rows are in memory, and these programs.

    A graph's shapes rank the policies.  They do not say whether its products can be blocked: that depends on how the
    nodes around them were fused into kernels and how these reduce (a batch norm's statistics read all rows before a
    row can be normalized, a gradient's sum may be owned in an order of rows).  A product that was to be computed twice
    and yet is in memory costs more than one that is saved, so a partition whose programs have one is given up for the
    next.  Most graphs have no wide products, and of those that have, two of three keep their first partition.
    """
    for parts in candidates:
        programs = programs_of(parts)
        if parts.policy is WideRowPolicy.SAVE or not any(has_unblocked(p, dims) for p in programs.values()):
            break
    return parts, programs
