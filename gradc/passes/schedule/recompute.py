"""Whether the kernels that read a pointwise value compute it again, or load what one of them stored.

Storing costs the value's bytes twice, once written and once read; reads after the first are served by a cache.
Computing it again costs its instructions once per element of each space that it is read in, and the bytes it is made
from once more: where several kernels do so, and where one kernel has it at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ...ir.dims import same
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Alias, Expr, Lookup, Movement, Scatter
from ...ir.types import F64
from ...ir.walk import reachable
from ...targets.devices import ARCHITECTURES, Device, Gpu
from ...targets.gpu import ACCESS_COST
from ..program.unroll_scatters import unrollable
from .groups import elements, lowering, nbytes

MOST_SEEN = 96
"""Values that a chain is made of at most: longer ones are stored."""
MOST_COST = 160
"""Of a chain that is computed again, in additions."""


@dataclass(frozen=True)
class RecomputeCost:
    """What a machine's memory costs, in additions of f32.

    :param per_byte: of traffic to memory.  :param f64: of one addition in f64.
    """

    per_byte: float
    f64: float

    def cost(self, node: Node) -> float:
        """Of one element of a pointwise node."""
        lower = lowering(node)
        if not isinstance(lower, Expr):
            return 0
        wide = node.dtype is F64 or any(o.dtype is F64 for o in node.operands)
        return lower.cost * (self.f64 if wide else 1)


def recompute_cost(device: Device) -> RecomputeCost | None:
    """The costs on a GPU.  None on a CPU, which is bound by instructions: there only what costs no more than a load is
    computed again.
    """
    if not isinstance(device, Gpu):
        return None
    lanes = 32 * device.issue / (device.sms * device.clock)  # elements that a clock of a multiprocessor adds
    rate = 32 * device.issue * device.issue_share
    return RecomputeCost(rate / device.bandwidth, lanes / ARCHITECTURES[device.arch].f64)


@dataclass(frozen=True)
class Uses:
    """Where a value is read, by itself or as a part of others.

    :param space: elements of the largest iteration space that it is read in.
    :param ends: two of the nodes that are stored or reduced there, or the only one.
    """

    space: float
    ends: tuple[Node, ...]

    def with_(self, other: Uses) -> Uses:
        """Of a value that is read at both."""
        return Uses(max(self.space, other.space), tuple(dict.fromkeys((*self.ends, *other.ends)))[:2])


NOWHERE = Uses(0, ())


class Decided(Protocol):
    """What a scheduler has decided."""

    @property
    def users(self) -> Mapping[Node, Sequence[Node]]: ...

    @property
    def uses(self) -> Mapping[Node, Uses]: ...

    @property
    def recomputed(self) -> Set[Node]: ...

    def stored(self, node: Node) -> bool: ...

    def at_hand(self, operand: Node, node: Node) -> bool: ...


def cheaper_again(node: Node, machine: RecomputeCost, decided: Decided) -> bool:
    """Whether the readers of a pointwise node compute it again in less time than they load it.  What is computed again
    already costs nothing more: who reads the node reads that too.
    """

    def operands(at: Node) -> Sequence[Node]:
        return () if decided.stored(at) else at.operands

    chain = [*islice(reachable([node], operands), MOST_SEEN + 1)]
    if len(chain) > MOST_SEEN or sum(machine.cost(at) for at in chain if not decided.stored(at)) > MOST_COST:
        return False
    own = [*reachable([node], lambda at: () if at in decided.recomputed else operands(at))]
    cost = sum(machine.cost(at) for at in own if at not in decided.recomputed and not decided.stored(at))
    # what others are made from too, as it is or as a part of what is computed, is read by their kernels anyhow
    inside = set(own)
    parts = {at: sum(user not in inside for user in decided.users[at]) for at in own if at is not node}
    others = sum(count for at, count in parts.items() if not decided.stored(at))
    read = sum(nbytes(at) / (1 + parts[at] + others) for at in own if at in parts and decided.stored(at))
    uses, count = decided.uses[node], max(elements(node), 1.0)
    times = max(1.0, uses.space / count)
    loaded = read * max(len(uses.ends) - 1, 0) + sum(nbytes(at) for at in own if decided.at_hand(at, node))
    again = cost * times + machine.per_byte * loaded / count
    return again <= 2 * node.dtype.itemsize * machine.per_byte + ACCESS_COST * (1 + times)


def uses_of(graph: Graph, stored: Set[Node]) -> dict[Node, Uses]:
    """Where each node of a graph is read in the end, if nothing is stored but ``stored`` and what must be."""
    uses: dict[Node, Uses] = {}
    for node in reversed(graph.nodes):
        found = NOWHERE
        for user in graph.users[node]:
            found = found.with_(uses[user] if _passes_on(user, stored) else Uses(_space(user), (user,)))
        uses[node] = found
    return uses


def _passes_on(node: Node, stored: Set[Node]) -> bool:
    return isinstance(lowering(node), Movement | Lookup | Alias | Expr) and node not in stored


def _space(user: Node) -> float:
    """Elements of the space in which a node is computed, less the axes of a scatter that become statements."""
    lower = lowering(user)
    if isinstance(lower, Movement | Lookup | Alias | Expr):
        return elements(user)
    if not isinstance(lower, Scatter):
        return max([elements(user), *map(elements, user.operands)])
    updates = user.operands[lower.updates]
    kept = next(
        (k for k, (a, b) in enumerate(zip(updates.shape, user.shape, strict=False)) if not same(a, b)), user.rank
    )
    return elements(updates) / unrollable(updates.shape[kept:])
