"""Random numbers apart from what is computed with them: torch draws what eager mode draws, in eager mode's order, and
no region is cut for it.

What an op draws depends on the shape, the memory order, the dtype and the device of its operand, not on its values.  So
it draws for an empty tensor like its operand, before the region in which that is computed; the region takes the numbers
(of a dropout, the mask) as an input.  Or masks are gradc's: a function of a key, which torch draws once a call, that
kernels compute where they read it, forward and backward.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from .. import ops
from ..errors import Unsupported
from ..interp import run
from ..ir.dims import SizeLike
from ..ir.node import Node
from ..ops.products.attention import scale_of_kept
from ..trace import trace
from .sizes import evaluated, typical
from .table import draws

aten = torch.ops.aten

_LIBRARY = torch.library.Library("gradc", "FRAGMENT")  # lives as long as its ops are to exist
_LIBRARY.define("dropout(Tensor x, Tensor mask, float p) -> Tensor")
_LIBRARY.define(
    "dropout_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor mask, float p, bool is_causal,"
    " float? scale, bool enable_gqa) -> Tensor"
)


def _dropout(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``native_dropout``, once its mask is drawn."""
    return x * mask * scale_of_kept(p)


def _dropout_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    mask: torch.Tensor,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """``scaled_dot_product_attention``, once the mask of its dropout [..., L, S] is drawn: as in eager mode, 16-bit
    operands are multiplied in f32.
    """
    dtype = query.dtype
    if dtype.itemsize == 2:
        query, key, value = (x.float() for x in (query, key, value))
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask.to(scores.dtype)
    return (_dropout(aten._safe_softmax.default(scores, -1), mask, p) @ value).to(dtype)


def _random_mask(key: torch.Tensor, shape: Sequence[int], p: float, stream: int) -> torch.Tensor:
    """``true`` with probability 1 - p: what gradc's kernels compute, by NumPy."""
    graph = trace(lambda key: mask_of(key, tuple(shape), p, stream), key="i64[]")
    return torch.from_numpy(run(graph, {"key": key.cpu().numpy()})["y"]).to(key.device)


def mask_of(key: Node, shape: Sequence[SizeLike], p: float, stream: int) -> Node:
    """What a dropout keeps, with probability 1 - p: bool of a shape."""
    return ops.rand(key, shape=tuple(shape), stream=stream) < 1 - p


_LIBRARY.define("random_mask(Tensor key, SymInt[] shape, float p, int stream) -> Tensor")
_LIBRARY.impl("random_mask", _random_mask, "CompositeExplicitAutograd")
_LIBRARY.impl("dropout", _dropout, "CompositeImplicitAutograd")
_LIBRARY.impl("dropout_attention", _dropout_attention, "CompositeImplicitAutograd")

_LIKE_OPERAND = (
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
)
"""Overloads that give numbers like their operand, whatever its values are.  Those that write into it (``normal_``) stay
where they are if it is computed: what they give has a gradient where that has, of zeros.
"""


def is_draw(node: torch.fx.Node) -> bool:
    """Whether a call of ATen's draws random numbers, and does nothing that gradc could take."""
    return hasattr(node.target, "namespace") and draws(node.target)


def is_own_draw(node: torch.fx.Node) -> bool:
    """Whether a call computes a mask of gradc's."""
    return node.target is torch.ops.gradc.random_mask.default


def draw_first(graph: torch.fx.Graph, random: str = "torch", attention_on_gpu: bool = False) -> None:
    """Have the draws of a normal form read no value, where they need none.

    :param random: who computes the masks of dropouts: ``"torch"``, those of eager mode, or ``"gradc"``, from a key.
    :param attention_on_gpu: whether attention with dropout on a GPU is gradc's, if the masks are.
    """
    drawing = _Drawing(graph, random == "gradc")
    for node in list(graph.nodes):
        if is_draw(node):
            _read_memory_itself(node)
        try:
            if node.target is aten.native_dropout.default and node.args[2] is True:
                _dropout_apart(node, drawing)
            elif node.target is aten.scaled_dot_product_attention.default:
                _attention_apart(node, drawing, attention_on_gpu and random == "gradc")
            elif node.target is aten.bernoulli.p and random == "gradc" and node.args[0].target in _EMPTY:
                _bernoulli_apart(node, drawing)
            elif node.target in _LIKE_OPERAND and node.args[0].op == "call_function":
                like = node.args[0].meta["val"]
                with graph.inserting_before(node):
                    node.replace_input_with(node.args[0], drawing.empty(like, like.shape, like.dtype, like))
        except Unsupported:  # a size that only values tell: torch draws where it stands
            continue
    graph.eliminate_dead_code(is_impure_node=lambda n: n.target not in _EMPTY and n.target not in _SAME)


def _read_memory_itself(node: torch.fx.Node) -> None:
    """Have a draw into empty memory read that, and no alias of it."""
    for operand in node.all_input_nodes:
        memory = operand
        while memory.target in _SAME:
            memory = memory.all_input_nodes[0]
        if memory.target in _EMPTY:
            node.replace_input_with(operand, memory)


_EMPTY = (aten.empty.memory_format, aten.empty_permuted.default)
_SAME = (aten.alias.default, aten.detach.default)
"""What gives all of its operand's memory."""


def is_drawn_into(node: torch.fx.Node) -> bool:
    """Whether a call gives memory that draws alone fill."""
    return node.target in _EMPTY and bool(node.users) and all(map(is_draw, node.users))


def _dropout_apart(node: torch.fx.Node, drawing: _Drawing) -> None:
    x, p, *_ = node.args
    like, (value, _) = x.meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if like.device.type == "cuda" and not drawing.has_keys and not _is_whole(like):
        return  # what its kernel draws for an element depends on where the operand lies
    reads_mask = any(user.args[1] and user.users for user in node.users)
    with node.graph.inserting_before(node):
        if p == 1 and not reads_mask:  # for which eager mode's dropout draws nothing
            y = mask = _call(node, aten.mul.Scalar, (x, 0.0), value)
        else:
            mask = drawing.mask(like, like.shape, float(p), like)  # type: ignore[arg-type]
            y = _call(node, torch.ops.gradc.dropout.default, (x, mask, p), value)
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] else y)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _is_whole(x: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, each element once."""
    return not x.storage_offset() and bool(aten.is_non_overlapping_and_dense(x))


def _bernoulli_apart(node: torch.fx.Node, drawing: _Drawing) -> None:
    like = node.meta["val"]
    with node.graph.inserting_before(node):
        mask = drawing.mask(like, like.shape, 1 - float(node.args[1]), like)  # type: ignore[arg-type]
        y = _call(node, aten._to_copy.default, (mask,), like)
        y.kwargs = {"dtype": like.dtype}
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


def _attention_apart(node: torch.fx.Node, drawing: _Drawing, on_gpu: bool) -> None:
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    named |= node.kwargs
    query, key, p = named["query"], named["key"], named.get("dropout_p", 0.0)
    like, keys = query.meta["val"], key.meta["val"]
    if p in (0, 1) or not (on_gpu or like.device.type == "cpu"):  # a GPU draws in the kernels of its attention
        return
    grouped = bool(named.get("enable_gqa", False))
    values = named["value"].meta["val"]
    same = values.shape[:-2] == keys.shape[:-2] == (keys if grouped else like).shape[:-2]
    if not same or (named.get("scale") is None and isinstance(like.shape[-1], torch.SymInt)):
        return  # gradc's takes no such operands
    with node.graph.inserting_before(node):
        mask = drawing.mask(like, (*like.shape[:-1], keys.shape[-2]), float(p))
        tensors = (query, key, named["value"], named.get("attn_mask"), mask)
        options = (p, bool(named.get("is_causal", False)), named.get("scale"), grouped)
        y = _call(node, torch.ops.gradc.dropout_attention.default, (*tensors, *options), node.meta["val"])
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)


def _call(at: torch.fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> torch.fx.Node:
    made = at.graph.call_function(target, args)
    made.meta = {**at.meta, "val": value}
    return made


class _Drawing:
    """Calls that read no value: sizes of values by those of inputs, empty tensors of such sizes, masks of dropouts.

    :param has_keys: whether masks are gradc's, from keys.
    """

    def __init__(self, graph: torch.fx.Graph, has_keys: bool):
        self.graph, self.has_keys = graph, has_keys
        self.keys: dict[torch.device, torch.fx.Node] = {}
        self.streams = 0
        self.known: dict[Any, torch.fx.Node] = {}
        """By their expressions."""
        self.axes: dict[Any, tuple[torch.fx.Node, int]] = {}
        """Where a placeholder has a size."""
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt):
                self.known.setdefault(value.node.expr, node)
            for axis, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt):
                    self.axes.setdefault(size.node.expr, (node, axis))
        self.last = next(reversed(graph.find_nodes(op="placeholder")), None)
        """After which sizes and keys are computed; None: before all."""

    def of(self, size: int | torch.SymInt) -> int | torch.fx.Node:
        """
        :raises Unsupported: no size of the graph's inputs tells it.
        """
        if not isinstance(size, torch.SymInt):
            return size
        return evaluated(size.node.expr, self._symbol, self._computed)  # type: ignore[no-any-return]

    def _symbol(self, symbol: Any) -> torch.fx.Node:
        if symbol not in self.known:
            if symbol not in self.axes:
                raise Unsupported(f"the size {symbol}")
            node, axis = self.axes[symbol]
            self.known[symbol] = self._first(aten.sym_size.int, (node, axis), node.meta["val"].shape[axis])
        return self.known[symbol]

    def _computed(self, function: Any, *operands: Any) -> Any:
        if not any(isinstance(o, torch.fx.Node) for o in operands):
            return function(*operands)
        value = function(*(o.meta["val"] if isinstance(o, torch.fx.Node) else o for o in operands))
        return self._first(function, operands, value)

    def _first(self, target: Any, args: tuple[Any, ...], value: Any) -> torch.fx.Node:
        graph = self.graph
        after = (
            graph.inserting_before(next(iter(graph.nodes))) if self.last is None else graph.inserting_after(self.last)
        )
        with after:
            self.last = self._call(target, args, value)
        return self.last

    def _call(self, target: Any, args: tuple[Any, ...], value: Any) -> torch.fx.Node:
        made = self.graph.call_function(target, args)
        made.meta["val"] = value
        return made

    def _key(self, of: torch.Tensor) -> torch.fx.Node:
        """What torch draws once a call, where ``of`` lies."""
        if of.device not in self.keys:
            with of.fake_mode:  # type: ignore[attr-defined]
                value = torch.empty((), dtype=torch.int64, device=of.device)
                key = self._first(aten.randint.low, (-(2**63), 2**63 - 1, []), value)
            key.kwargs = {"dtype": torch.int64, "device": of.device}
            self.keys[of.device] = key
        return self.keys[of.device]

    def empty(
        self, of: torch.Tensor, shape: Sequence[Any], dtype: torch.dtype, like: torch.Tensor | None = None
    ) -> torch.fx.Node:
        """An empty tensor where another one lies, with its axes in the order in which they lie in a third."""
        with of.fake_mode:  # type: ignore[attr-defined]
            steps = () if like is None else [typical(s) for s in torch.empty_like(like).stride()]
            order = sorted(range(len(steps)), key=lambda axis: -steps[axis]) or [*range(len(shape))]
            value = torch.empty_permuted(tuple(shape), order, dtype=dtype, device=of.device)
        made = self._call(aten.empty_permuted.default, ([self.of(n) for n in shape], order), value)
        made.kwargs = {"dtype": dtype, "device": of.device}
        return made

    def mask(self, of: torch.Tensor, shape: Sequence[Any], p: float, like: torch.Tensor | None = None) -> torch.fx.Node:
        """What a dropout keeps of a value of this shape: bool, drawn where ``of`` lies."""
        if self.has_keys:
            with of.fake_mode:  # type: ignore[attr-defined]
                value = torch.empty(tuple(shape), dtype=torch.bool, device=of.device)
            self.streams += 1
            args = (self._key(of), [self.of(n) for n in shape], p, self.streams)
            return self._call(torch.ops.gradc.random_mask.default, args, value)
        if of.device.type == "cpu":
            empty = self.empty(of, shape, torch.bool, like)
            return self._call(aten.bernoulli.p, (empty, 1 - p), empty.meta["val"])
        empty = self.empty(of, shape, of.dtype, like)  # a GPU draws in the kernel of the dropout
        with of.fake_mode:  # type: ignore[attr-defined]
            value = torch.native_dropout(empty.meta["val"], p, True)
        both = self._call(aten.native_dropout.default, (empty, p, True), value)
        return self._call(operator.getitem, (both, 1), value[1])
