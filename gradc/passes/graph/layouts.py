"""layouts: transposes at the inputs and outputs whose axes are stored in another order than the graph has them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import InvalidProblem
from ...ir.graph import Graph, input_node, rebuild
from ...ir.node import Node, call
from ..manager import graph_pass

ORDERS = {3: "NCL", 4: "NCHW", 5: "NCDHW"}
"""What the axes of images are called, by rank; another order is another word of these letters."""


def permutation(name: str, rank: int, layout: str | Sequence[int]) -> tuple[int, ...]:
    """(layout of an array, as ``"NHWC"`` or ``(0, 2, 3, 1)``) -> the permutation: for each axis in memory the axis of
    the graph.

    :raises InvalidProblem: it is not a permutation of the axes.
    """
    if isinstance(layout, str):
        order = tuple(ORDERS.get(rank, "").find(letter) for letter in layout)
    else:
        try:
            order = tuple(map(operator.index, layout))
        except TypeError:  # not a sequence, or not of integers
            order = (-1,)
    if sorted(order) != list(range(rank)):
        known = f"a word of the letters {ORDERS[rank]}, or " if rank in ORDERS else ""
        raise InvalidProblem(
            f"layout={layout!r} for {name}, which has rank {rank}: {known}the numbers 0 to {rank - 1} in an order"
        )
    return order


@graph_pass("BITS")
def apply_layout(graph: Graph, *, layout: Mapping[str, str | Sequence[int]], results: bool = True) -> Graph:
    """f(x)  ->  f(transpose(x')): x' has x's axes in the order of its layout; an output is transposed to its own

    :param results: False: the names are those of inputs alone.
    """
    both = layout.keys() & set(graph.input_names) & set(graph.output_names) if results else set()
    if both:
        raise InvalidProblem(f"layout names {min(both)!r}, which is an input and an output: name them apart")
    unknown = layout.keys() - {*graph.input_names, *graph.output_names}
    if unknown:
        raise InvalidProblem(
            f"layout names {min(map(str, unknown))!r}; there are {', '.join((*graph.input_names, *graph.output_names))}"
        )
    new: dict[Node, Node] = {}
    inputs = []
    for node in graph.inputs:
        name, given = graph.input_name(node), node
        if name in layout:
            order = permutation(name, node.rank, layout[name])
            given = input_node(name, node.type.with_shape(*(node.shape[a] for a in order)))
            new[node] = call("transpose", given, axes=tuple(order.index(a) for a in range(node.rank)))
        inputs.append(given)
    rebuild(graph.nodes, new)
    outputs = []
    for name, node in graph.outputs:
        if results and name in layout:
            outputs.append((name, call("transpose", new[node], axes=permutation(name, node.rank, layout[name]))))
        else:
            outputs.append((name, new[node]))
    defaults = {
        n: a.transpose(permutation(n, a.ndim, layout[n])) if n in layout else a for n, a in graph.defaults.items()
    }
    return replace(
        graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        notes={new.get(n, n): note for n, note in graph.notes.items()},
        defaults=defaults,
    )
