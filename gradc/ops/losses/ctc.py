"""Connectionist temporal classification: ctc_loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ...ir.types import I64
from ..elementwise.pointwise import bitwise_and, eq, exp, ge, log, lt, maximum, ne, where
from ..indexing.gathers import take_along_axis
from ..indexing.positions import constant_array
from ..reductions.reduce import sum
from ..rules import along, converted, floating, full, reshaped, spread, zeros_like
from ..shapes.movement import concat, iota, pad, slice
from .cross_entropy import Reduction


def _log_sum(terms: Sequence[Node]) -> Node:
    """log of the sum of exponentials; where all are -inf it is, and passes no gradient."""
    top = terms[0]
    for term in terms[1:]:
        top = maximum(top, term)
    top = call("stop_gradient", top)
    none = eq(top, full(-math.inf, top))
    top = where(none, zeros_like(top), top)
    total = exp(terms[0] - top)
    for term in terms[1:]:
        total = total + exp(term - top)
    return where(none, full(-math.inf, total), log(where(none, full(1, total), total)) + top)


def _integers(given: Any, name: str) -> Any:
    """Lengths as a node of integers, or as an array i64 [N] where they are known.

    :raises TypeRuleError: they are no integers, or of rank 2.
    """
    if isinstance(given, Node):
        if not given.dtype.is_integer or given.rank > 1:
            raise TypeRuleError(f"{name} are {given.type}: integers, one for each sequence")
        return given
    try:
        line = np.asarray(given)
    except ValueError as error:  # lists of several lengths
        raise TypeRuleError(f"{name}: {error}") from None
    if (line.dtype.kind not in "iu" and line.size) or line.ndim > 1:
        raise TypeRuleError(f"{name} are {str(given)[:60]}: integers, one for each sequence")
    return line.astype(np.int64).reshape(-1)


def _lengths(given: Any, count: Any, most: Size, name: str) -> Node:
    """One length per sequence, i64 [N], none above ``most``."""
    if not isinstance(given, Node):
        wrong = [int(n) for n in given if n < 0 or (isinstance(most, int) and n > most)]
        if wrong:
            raise TypeRuleError(f"one of the {name} is {wrong[0]}: 0 to {most} exist")
    node = given if isinstance(given, Node) else constant_array(given)
    node = reshaped(converted(node, I64), (node.type.count,))
    if not same(node.shape[0], count):
        raise TypeRuleError(f"{node.shape[0]} {name} for {count} sequences")
    return node if node.op.name == "constant" else call("check_index", node, bound=most + 1, op="ctc_loss")


def _padded_targets(targets: Node, lengths: Any, count: Any) -> Node:
    """[N, S] of targets that stand one after the other."""
    if not targets.dtype.is_integer or targets.rank not in (1, 2):
        raise TypeRuleError(f"targets are {targets.type}: integers [N, S], or [sum of target_lengths]")
    if targets.rank == 2:
        if not same(targets.shape[0], count):
            raise TypeRuleError(f"targets are {targets.type} for {count} sequences")
        return targets
    size = targets.type.count
    if not isinstance(lengths, Node) and isinstance(size, int) and int(np.sum(lengths)) != size:
        raise TypeRuleError(
            f"{size} targets one after the other for target_lengths whose sum is {int(np.sum(lengths))}"
        )
    if count in (0, 1):
        return reshaped(targets, (count, size))
    if isinstance(lengths, Node):
        raise TypeRuleError("targets one after the other need target_lengths that are constants; or give [N, S]")
    sizes = lengths.tolist()
    starts, most = np.cumsum([0, *sizes[:-1]]), max([1, *sizes])
    rows = [
        pad(slice.plain(targets, (int(start),), (int(start) + n,), (1,)), ((0, most - n),))
        for start, n in zip(starts, sizes, strict=True)
    ]
    return concat(*(reshaped(row, (1, most)) for row in rows), axis=0)


def _refuse_blanks(targets: Node, lengths: Any, blank: int) -> None:
    """TypeRuleError where a target that is known when tracing has the blank among its labels."""
    if targets.op.name != "constant" or isinstance(lengths, Node):
        return
    values = np.reshape(targets.attrs["value"], targets.shape)
    rows = [values] if values.ndim == 1 else [row[:n] for row, n in zip(values, lengths, strict=False)]
    for row in rows:
        if blank in row:
            raise TypeRuleError(f"the target {row.tolist()} has the blank, {blank}, in it")


def _own_labels(labels: Node, lengths: Node, blank: int, classes: Size) -> Node:
    """[N, S] with blanks in place of the labels behind each sequence's own, which are checked."""
    own = lt(spread(iota.plain(shape=labels.shape[1:]), labels.shape), along(lengths, labels.shape, (1,)))
    return call("check_index", where(own, labels, full(blank, labels)), bound=classes, op="ctc_loss")


def _forward(emitted: Node, skips: Node, steps: Node) -> Node:
    """log alpha [N, L] after the last step of each sequence, by the recursion over [T, N, L] (Graves 2006, eq. 6).

    :param skips: where a label may follow the label before the blank before it.
    """
    count, labels = emitted.shape[1:]
    never = full(-math.inf, emitted.type.with_shape(count, labels))
    alpha = where(
        spread(lt(iota.plain(shape=(labels,)), full(2, iota.plain(shape=(labels,)))), never.shape),
        _step(emitted, 0),
        never,
    )
    most = emitted.shape[0]
    assert isinstance(most, int)
    for t in range(1, most):
        one = pad(alpha, ((0, 0), (1, -1)), -math.inf)
        two = where(skips, pad(alpha, ((0, 0), (2, -2)), -math.inf), never) if labels != 1 else never
        after = _log_sum((alpha, one, two)) + _step(emitted, t)
        alpha = where(along(lt(full(t, steps), steps), alpha.shape, (1,)), after, alpha)
    return alpha


def _step(x: Node, t: int) -> Node:
    return reshaped(slice.plain(x, (t, 0, 0), (t + 1, *x.shape[1:]), (1, 1, 1)), x.shape[1:])


def _ctc_loss(
    log_probs: Node,
    targets: Node,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Reduction = "mean",
    zero_infinity: bool = False,
) -> Node:
    if floating(log_probs.type).rank not in (2, 3):
        raise TypeRuleError(f"log_probs are {log_probs.type}: [T, N, C] or [T, C]")
    if not isinstance(log_probs.shape[0], int) or log_probs.shape[0] < 1:
        raise TypeRuleError(f"{log_probs.shape[0]} steps: the steps are written out, so that it must be a constant")
    batched = log_probs.rank == 3
    x = log_probs if batched else reshaped(log_probs, (log_probs.shape[0], 1, log_probs.shape[1]))
    x = converted(x, x.dtype.compute)
    count, classes = x.shape[1:]
    if isinstance(classes, int) and not 0 <= blank < classes:
        raise TypeRuleError(f"blank={blank} of {classes} classes")
    input_lengths = _integers(input_lengths, "input_lengths")
    target_lengths = _integers(target_lengths, "target_lengths")
    labels = converted(_padded_targets(targets, target_lengths, count), I64)
    _refuse_blanks(targets, target_lengths, blank)
    steps = _lengths(input_lengths, count, x.shape[0], "input_lengths")
    lengths = _lengths(target_lengths, count, labels.shape[1], "target_lengths")
    labels = _own_labels(labels, lengths, blank, classes)
    width = 2 * labels.shape[1] + 1
    # blank, label, blank, label ... blank
    pairs = concat(full(blank, labels.type.with_shape(*labels.shape, 1)), reshaped(labels, (*labels.shape, 1)), axis=2)
    line = concat(reshaped(pairs, (count, width - 1)), full(blank, labels.type.with_shape(count, 1)), axis=1)
    before = pad(line, ((0, 0), (2, -2)), blank) if width > 2 else full(blank, line)
    skips = bitwise_and(ne(line, full(blank, line)), ne(line, before))
    place = spread(reshaped(line, (1, *line.shape)), (x.shape[0], *line.shape))
    alpha = _forward(take_along_axis.plain(x, place, axis=2), skips, steps)
    last = reshaped(lengths * 2, (count, 1))
    ends = take_along_axis.plain(alpha, last, axis=1)
    short = ge(full(0, last), last)  # without labels there is one path, of blanks
    early = take_along_axis.plain(alpha, maximum(last - 1, zeros_like(last)), axis=1)
    loss = -_log_sum((ends, where(short, full(-math.inf, early), early)))
    none = full(0, steps)  # of no steps only the empty text can be said
    unsaid = where(eq(lengths, none), full(0, loss.type.with_shape(count)), full(math.inf, loss.type.with_shape(count)))
    loss = where(eq(steps, none), unsaid, reshaped(loss, (count,)))
    if zero_infinity:
        loss = where(eq(loss, full(math.inf, loss)), zeros_like(loss), loss)
    if reduction == "mean":
        loss = call("mean", loss / converted(maximum(lengths, full(1, lengths)), loss.dtype))
    elif reduction == "sum":
        loss = sum.plain(loss, axis=(0,))
    elif not batched:
        loss = reshaped(loss, ())
    return converted(loss, log_probs.dtype)


ctc_loss = Function(
    "ctc_loss",
    write=_ctc_loss,
    samples=(
        Sample(
            ("F[5,2,4]", np.array([[1, 2, 2], [3, 1, 1]])),
            {"input_lengths": (5, 4), "target_lengths": (3, 2), "reduction": "none"},
        ),
        Sample(("F[4,3]", np.array([1, 1])), {"input_lengths": (4,), "target_lengths": (2,), "reduction": "sum"}),
    ),
    bad=(
        BadSample(("f32[N,2,4]", "i64[2,3]"), {"input_lengths": (5, 4), "target_lengths": (3, 2)}, match="N steps"),
        BadSample(("f32[5,2,4]", "i64[2,3]"), {"input_lengths": (5,), "target_lengths": (3, 2)}, match="for 2"),
        BadSample(
            ("f32[5,2,4]", "i64[2,3]"), {"input_lengths": (6, 5), "target_lengths": (3, 2)}, match="is 6: 0 to 5"
        ),
        BadSample(("f32[5,2,4]", "i64[2,3]"), {"input_lengths": (5, 5), "target_lengths": (3, -1)}, match="is -1"),
        BadSample(
            ("f32[5,2,4]", "i64[6]"), {"input_lengths": (5, 5), "target_lengths": (3, 2)}, match="whose sum is 5"
        ),
        BadSample(
            ("f32[5,2,4]", "i64[2,3]"),
            {"input_lengths": (5, 2.5), "target_lengths": (3, 2)},
            match="(5, 2.5): integers",
        ),
        BadSample(("f32[5,1,4]", "i64[]"), {"input_lengths": (5,), "target_lengths": (1,)}, match="targets are i64[]"),
        BadSample(("f32[5,1,4]", "f32[1,2]"), {"input_lengths": (5,), "target_lengths": (1,)}, match="are f32[1,2]"),
        BadSample(
            ("f32[5,1,4]", "i64[1,2,1]"),
            {"input_lengths": (5,), "target_lengths": (1,)},
            match="targets are i64[1,2,1]",
        ),
        BadSample(
            ("f32[5,1,4]", "i64[1,2]"),
            {"input_lengths": (5,), "target_lengths": (1,), "blank": 4},
            match="blank=4 of 4",
        ),
    ),
    doc=(
        "-log of the probability of all alignments of targets ([N, S], or one after the other) in log_probs [T, N, C],"
        " with a blank between; lengths are constants or arrays [N]; the mean is over loss / target length (NaN of no"
        " sequences). A target with the blank in it has no meaning: one that is known when tracing is refused. The"
        " gradient is the derivative; torch's has exp(log_probs) more, which log_softmax before it takes away"
    ),
    source="torch.nn.functional.ctc_loss; Graves et al. 2006",
)
