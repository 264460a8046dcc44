"""Lines of losses."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...ir.node import Node

_REDUCTIONS = ("none", "mean", "sum")


def _cross_entropy(
    x: Node,
    target: Node,
    weight: Node | None = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Node:
    return ops.cross_entropy(
        x,
        target,
        weight=weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
    )


def _nll(x: Node, target: Node, weight: Node | None = None, reduction: int = 1, ignore_index: int = -100) -> Node:
    return ops.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction])


def _of_logits(
    x: Node, target: Node, weight: Node | None = None, pos_weight: Node | None = None, reduction: int = 1
) -> Node:
    return ops.binary_cross_entropy_with_logits(
        x, target, weight, reduction=_REDUCTIONS[reduction], pos_weight=pos_weight
    )


def _triplet(
    anchor: Node,
    positive: Node,
    negative: Node,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Node:
    return ops.triplet_margin_loss(
        anchor, positive, negative, margin=margin, p=p, eps=eps, swap=swap, reduction=_REDUCTIONS[reduction]
    )


def _multi_margin(
    x: Node, target: Node, p: float = 1, margin: float = 1, weight: Node | None = None, reduction: int = 1
) -> Node:
    x = x if x.rank else ops.reshape(x, (1,))
    target = ops.reshape(target, x.shape[:-1])  # of one row, also of shape (1,)
    return ops.multi_margin_loss(x, target, p=p, margin=float(margin), weight=weight, reduction=_REDUCTIONS[reduction])


def _poisson(x: Node, target: Node, log_input: bool, full: bool, eps: float, reduction: int) -> Node:
    return ops.poisson_nll_loss(x, target, log_input=log_input, full=full, eps=eps, reduction=_REDUCTIONS[reduction])


def _of(name: str, *options: str) -> Any:
    """A loss of two or three tensors, then its options and the reduction in ATen's order."""
    count = 3 if name in ("cosine_embedding_loss", "margin_ranking_loss") else 2

    def loss(*args: Any, **kwargs: Any) -> Node:
        tensors, rest = args[:count], dict(zip(options, args[count:], strict=False))
        attrs = {**rest, **kwargs}
        attrs["reduction"] = _REDUCTIONS[attrs.get("reduction", 1)]
        return getattr(ops, name)(*tensors, **attrs)

    return loss


LINES: dict[str, Any] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.nll_loss_nd.default": _nll,
    "aten.nll_loss.default": _nll,
    "aten.nll_loss2d.default": _nll,
    "aten.nll_loss_forward.default": lambda *args: (_nll(*args),),
    "aten.nll_loss2d_forward.default": lambda *args: (_nll(*args),),
    "aten.mse_loss.default": _of("mse_loss", "reduction"),
    "aten.l1_loss.default": _of("l1_loss", "reduction"),
    "aten.smooth_l1_loss.default": _of("smooth_l1_loss", "reduction", "beta"),
    "aten.huber_loss.default": _of("huber_loss", "reduction", "delta"),
    "aten.soft_margin_loss.default": _of("soft_margin_loss", "reduction"),
    "aten.kl_div.default": _of("kl_div", "reduction"),
    "aten.binary_cross_entropy.default": _of("binary_cross_entropy", "weight", "reduction"),
    "aten.binary_cross_entropy_with_logits.default": _of_logits,
    "aten.hinge_embedding_loss.default": _of("hinge_embedding_loss", "margin", "reduction"),
    "aten.cosine_embedding_loss.default": _of("cosine_embedding_loss", "margin", "reduction"),
    "aten.margin_ranking_loss.default": _of("margin_ranking_loss", "margin", "reduction"),
    "aten.multilabel_margin_loss.default": _of("multilabel_margin_loss", "reduction"),
    "aten.multilabel_margin_loss_forward.default": lambda *args: (_of("multilabel_margin_loss", "reduction")(*args),),
    "aten.multi_margin_loss.default": _multi_margin,
    "aten.triplet_margin_loss.default": _triplet,
    "aten.poisson_nll_loss.default": _poisson,
}
