"""What crosses the border of a region does so in its memory order, so that neither side copies it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .normal_form import stops_gradient
from .regions import Plan
from .sizes import typical

_permute = torch.ops.aten.permute.default
BEFORE = -1
"""The level of what torch runs before the first region."""


def in_memory_order(graph: torch.fx.Graph, found: Plan, written: Collection[str] = ()) -> Plan:
    """The plan in which a value whose axes do not lie in memory in their order (what attention gives, channels last)
    enters a region by a view with its axes as they lie, in rows one after another, and is given by a region as it lies.

    What torch runs on it was chosen by its strides, so it gets those; and what is returned is no view.

    :param written: names of inputs that are written in place: they stay as they are, as a region may write them itself.
    """
    for node in graph.nodes:  # those that are added, too
        value = node.meta.get("val")
        enters = node.op == "call_function" or (node.op == "placeholder" and node.name not in written)
        order = _memory_order(value) if enters and isinstance(value, torch.Tensor) else None
        if order is not None and (node in found.taken or _is_dense(value.permute(*order))):
            _cross(graph, found, node, order)
    found.taken = {node: found.taken[node] for node in graph.nodes if node in found.taken}
    return found


def _cross(graph: torch.fx.Graph, found: Plan, node: torch.fx.Node, order: tuple[int, ...]) -> None:
    """Have other regions than the one that makes a value read it through views of its memory order."""
    own = found.taken.get(node)
    readers: dict[int, list[torch.fx.Node]] = {}
    for user in node.users:
        if (region := found.taken.get(user)) is not None and region != own:
            readers.setdefault(region, []).append(user)
    if own is not None and any(found.taken.get(user) != own for user in node.users):
        found.orders[node] = order
    if not readers:
        return

    def view(of: torch.fx.Node, axes: Sequence[int], region: int | None) -> torch.fx.Node:
        """A new view, of a region, or of torch as soon as it can run it."""
        with graph.inserting_after(of):
            made = graph.call_function(_permute, (of, list(axes)))
        told = {key: of.meta[key] for key in ("nn_module_stack", "stack_trace") if key in of.meta}
        made.meta = {**told, "val": of.meta["val"].permute(*axes)}
        if region is not None:
            found.taken[made] = region
        else:
            found.levels[made] = found.levels.get(node, BEFORE) if own is None else own
        return made

    ordered = view(node, order, None)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    for region, users in readers.items():
        detached = [user for user in users if stops_gradient(user)]
        for user in detached:  # the view comes after it: what is read for its value alone stays known as that
            user.replace_input_with(node, ordered)
            user.meta["val"] = user.meta["val"].permute(*order)
            again = view(user, inverse, region)
            user.replace_all_uses_with(again, lambda reader, view=again: reader is not view)
        if len(detached) < len(users):
            back = view(ordered, inverse, region)
            for user in users:
                user.replace_input_with(node, back)


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a traced value from the outermost in memory to the innermost; None where that is their order."""
    strides = [typical(stride) for stride in value.stride()]
    sizes = [typical(size) for size in value.shape]
    order = sorted(range(value.ndim), key=lambda axis: (-strides[axis], axis))
    places = [axis for axis in order if sizes[axis] != 1]
    return None if places == sorted(places) else tuple(order)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a traced value's elements lie in memory one after another, the last axis innermost."""
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if typical(size) != 1 and typical(stride) != step:
            return False
        step *= typical(size)
    return True
