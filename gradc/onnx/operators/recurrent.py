"""Lines of recurrent layers, written out step by step: activations, peepholes and lengths as ONNX has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim
from ...ir.node import Node
from ...ir.types import I64
from ...ops.rules import converted
from ..table import MOST_STEPS, Forms, Weight

Activation = Callable[[Node], Node]


def _activations(
    names: Any, alphas: Any, betas: Any, default: Sequence[str], directions: int
) -> list[list[Activation]]:
    """Of each direction."""
    given = [str(n).lower() for n in (names or tuple(default) * directions)]
    alpha, beta = list(alphas or ()), list(betas or ())
    made: list[Activation] = []
    for name in given:
        a = (
            alpha.pop(0)
            if alpha and name in ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
            else None
        )
        b = beta.pop(0) if beta and name in ("affine", "scaledtanh", "hardsigmoid") else None
        made.append(_activation(name, a, b))
    count = len(default)
    return [made[i * count : (i + 1) * count] for i in range(directions)]


def _activation(name: str, a: float | None, b: float | None) -> Activation:
    simple = {
        "sigmoid": ops.sigmoid,
        "tanh": ops.tanh,
        "relu": ops.relu,
        "softsign": ops.softsign,
        "softplus": ops.softplus,
    }
    if name in simple:
        return simple[name]
    if name == "affine":
        return lambda x: x * (1.0 if a is None else a) + (0.0 if b is None else b)
    if name == "leakyrelu":
        return lambda x: ops.leaky_relu(x, 0.01 if a is None else a)
    if name == "thresholdedrelu":
        return lambda x: ops.where(x > (1.0 if a is None else a), x, 0.0)
    if name == "scaledtanh":
        return lambda x: ops.tanh(x * (1.0 if b is None else b)) * (1.0 if a is None else a)
    if name == "hardsigmoid":
        return lambda x: ops.clamp(x * (0.2 if a is None else a) + (0.5 if b is None else b), 0.0, 1.0)
    if name == "elu":
        return lambda x: ops.elu(x, 1.0 if a is None else a)
    raise Unsupported(f"the activation {name}")


_DIRECTIONS = ("forward", "reverse", "bidirectional", "foward")
"""The last is what the GRU of opset 1 has where nothing is said."""


def _part(x: Node, axis: int, at: int, size: int) -> Node:
    key: list[Any] = [slice(None)] * x.rank
    key[axis] = slice(at * size, (at + 1) * size)
    return x[tuple(key)]


def _layer(
    x: Node,
    w: Node,
    states: Sequence[Node | None],
    lengths: Node | None,
    direction: str,
    layout: int,
    hidden: int,
    cell: Callable[[int, Node], Callable[[Node, tuple[Node, ...]], tuple[Node, ...]]],
    bias: Callable[[int], Node | None],
) -> tuple[Node, ...]:
    """All results: [T, D, B, H], and the last states [D, B, H].

    :param cell: of a direction and its input weights: a step on an input's gates.
    """
    if layout:
        x = ops.transpose(x, (1, 0, 2))
        states = [None if s is None else ops.transpose(s, (1, 0, 2)) for s in states]
    steps, batch, _ = x.shape
    if isinstance(steps, Dim):
        raise Unsupported(f"a recurrent layer over {steps} steps; dims= can give sizes")
    if steps > MOST_STEPS:
        raise Unsupported(f"a recurrent layer over {steps} steps; at most {MOST_STEPS} are written out")
    if direction not in _DIRECTIONS:
        raise InvalidProblem(f"the direction {direction!r}")
    directions = 2 if direction == "bidirectional" else 1
    every, last = [], []
    for d in range(directions):
        back = direction == "reverse" or d == 1
        weights, more = w[d], bias(d)
        projected = ops.matmul(x, ops.transpose(weights, (1, 0)))
        gates = projected if more is None else projected + more
        zero = ops.broadcast_to(converted(ops.constant(value=(0.0,), dtype="f32"), x.dtype), (batch, hidden))
        state = tuple(zero if s is None else s[d] for s in states)
        step, made = cell(d, weights), [zero] * steps
        for t in reversed(range(steps)) if back else range(steps):
            new = step(gates[t], state)
            if lengths is not None:
                going = ops.reshape(converted(lengths, I64) > t, (batch, 1))
                mask = ops.broadcast_to(going, (batch, hidden))
                made[t] = ops.where(mask, new[0], 0.0)
                state = tuple(ops.where(mask, a, b) for a, b in zip(new, state, strict=True))
            else:
                made[t], state = new[0], new
        every.append(ops.stack(*made))
        last.append(state)
    y = ops.stack(*every, axis=1)
    ends = [ops.stack(*(state[i] for state in last)) for i in range(len(states))]
    if layout:
        y, ends = ops.transpose(y, (2, 0, 1, 3)), [ops.transpose(e, (1, 0, 2)) for e in ends]
    return y, *ends


def _clipped(clip: float | None) -> Activation:
    return (lambda x: x) if clip is None else (lambda x: ops.clamp(x, -clip, clip))


def _lstm(
    x: Node,
    w: Weight,
    r: Weight,
    b: Weight | None = None,
    sequence_lens: Node | None = None,
    initial_h: Node | None = None,
    initial_c: Node | None = None,
    p: Weight | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Node, ...]:
    """``LSTM``."""
    kinds = _activations(activations, activation_alpha, activation_beta, ("sigmoid", "tanh", "tanh"), int(w.shape[0]))
    states = (initial_h, initial_c)
    return _long_short(x, w, r, b, sequence_lens, states, p, kinds, clip, direction, input_forget, layout, lambda x: x)


def dynamic_quantize_lstm(
    x: Node,
    w: Weight,
    r: Weight,
    b: Weight | None = None,
    sequence_lens: Node | None = None,
    initial_h: Node | None = None,
    initial_c: Node | None = None,
    p: Weight | None = None,
    w_scale: Weight | None = None,
    w_zero: Weight | None = None,
    r_scale: Weight | None = None,
    r_zero: Weight | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Node, ...]:
    """``com.microsoft.DynamicQuantizeLSTM``: weights are codes, [D, I, 4H], with a scale for a direction or for each of
    its columns; what they are multiplied with is rounded to u8 over the range that it has, the input as a whole, the
    state in every step.
    """
    if w_scale is None or r_scale is None:
        raise Unsupported("weights without scales")
    kinds = _activations(activations, activation_alpha, activation_beta, ("sigmoid", "tanh", "tanh"), int(w.shape[0]))
    wide, narrow = _dequantized(w, w_scale, w_zero), _dequantized(r, r_scale, r_zero)
    return _long_short(
        x,
        ops.transpose(wide, (0, 2, 1)),
        ops.transpose(narrow, (0, 2, 1)),
        b,
        sequence_lens,
        (initial_h, initial_c),
        p,
        kinds,
        clip,
        direction,
        input_forget,
        0,
        rounded_to_u8,
    )


def _dequantized(codes: Node, scale: Node, zero: Node | None) -> Node:
    """Codes [D, rows, columns] with scales [D] or [D, columns]."""
    directions, rows, columns = codes.shape
    each = columns if scale.rank == 2 and scale.shape[1] != 1 else 1
    shape = (directions, 1, each)
    zeros = None if zero is None else ops.reshape(zero, shape)
    return ops.dequantize(codes, ops.reshape(scale, shape), zeros, block=(1, rows, columns if each == 1 else 1))


def rounded_to_u8(x: Node) -> Node:
    """x rounded to 255 steps between its least and its largest value, and 0 (``DynamicQuantizeLinear``), back as a
    float.
    """
    axes = tuple(range(x.rank))
    zero, one = (converted(ops.constant(value=(v,), dtype="f32"), x.dtype) for v in (0.0, 1.0))
    low, high = ops.minimum(ops.amin(x, axes), zero), ops.maximum(ops.amax(x, axes), zero)
    scale = ops.where(high > low, (high - low) / 255.0, one)
    code = ops.cast(ops.clamp(ops.round(-low / scale), 0.0, 255.0), "u8")
    return ops.dequantize(ops.quantize(x, scale, code, dtype="u8"), scale, code, out_dtype=x.dtype)


def _long_short(
    x: Node,
    w: Node,
    r: Node,
    b: Node | None,
    lengths: Node | None,
    states: tuple[Node | None, Node | None],
    p: Node | None,
    kinds: list[list[Activation]],
    clip: float | None,
    direction: str,
    input_forget: int,
    layout: int,
    multiplied: Activation,
) -> tuple[Node, ...]:
    """:param multiplied: what is multiplied with weights, made of the input or of a state."""
    size = int(r.shape[-1])
    limit = _clipped(clip)

    def cell(d: int, _: Node) -> Callable[[Node, tuple[Node, ...]], tuple[Node, ...]]:
        f, g, h = kinds[d]
        recurrent = ops.transpose(r[d], (1, 0))
        peep = None if p is None else p[d]

        def seen(i: int, c: Node) -> Any:
            return 0.0 if peep is None else _part(peep, 0, i, size) * c

        def step(gates: Node, state: tuple[Node, ...]) -> tuple[Node, ...]:
            before, c = state
            whole = gates + ops.matmul(multiplied(before), recurrent)
            i, o, forget, new = (_part(whole, 1, k, size) for k in range(4))  # ONNX's order: i, o, f, c
            i = f(limit(i + seen(0, c)))
            forget = 1.0 - i if input_forget else f(limit(forget + seen(2, c)))
            c = forget * c + i * g(limit(new))
            o = f(limit(o + seen(1, c)))
            return o * h(c), c

        return step

    def bias(d: int) -> Node | None:
        return None if b is None else _part(b[d], 0, 0, 4 * size) + _part(b[d], 0, 1, 4 * size)

    return _layer(multiplied(x), w, states, lengths, direction, layout, size, cell, bias)


def _gru(
    x: Node,
    w: Weight,
    r: Weight,
    b: Weight | None = None,
    sequence_lens: Node | None = None,
    initial_h: Node | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Node, ...]:
    size = int(r.shape[-1])
    kinds = _activations(activations, activation_alpha, activation_beta, ("sigmoid", "tanh"), int(w.shape[0]))
    limit = _clipped(clip)

    def cell(d: int, _: Node) -> Callable[[Node, tuple[Node, ...]], tuple[Node, ...]]:
        f, g = kinds[d]
        recurrent = ops.transpose(r[d], (1, 0))
        gated, own = recurrent[:, : 2 * size], recurrent[:, 2 * size :]
        more = None if b is None else _part(b[d], 0, 1, 3 * size)

        def step(gates: Node, state: tuple[Node, ...]) -> tuple[Node, ...]:
            (before,) = state
            both = gates[:, : 2 * size] + ops.matmul(before, gated)
            if more is not None:
                both = both + more[: 2 * size]
            update, reset = (f(limit(_part(both, 1, k, size))) for k in range(2))  # ONNX's order: z, r, h
            if linear_before_reset:
                inner = ops.matmul(before, own)
                inner = reset * (inner if more is None else inner + more[2 * size :])
            else:
                inner = ops.matmul(reset * before, own)
                inner = inner if more is None else inner + more[2 * size :]
            new = g(limit(gates[:, 2 * size :] + inner))
            return ((1.0 - update) * new + update * before,)

        return step

    def bias(d: int) -> Node | None:
        return None if b is None else _part(b[d], 0, 0, 3 * size)

    return _layer(x, w, (initial_h,), sequence_lens, direction, layout, size, cell, bias)


def _rnn(
    x: Node,
    w: Weight,
    r: Weight,
    b: Weight | None = None,
    sequence_lens: Node | None = None,
    initial_h: Node | None = None,
    *,
    activation_alpha: Any = None,
    activation_beta: Any = None,
    activations: Any = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Node, ...]:
    size = int(r.shape[-1])
    kinds = _activations(activations, activation_alpha, activation_beta, ("tanh",), int(w.shape[0]))
    limit = _clipped(clip)

    def cell(d: int, _: Node) -> Callable[[Node, tuple[Node, ...]], tuple[Node, ...]]:
        recurrent = ops.transpose(r[d], (1, 0))
        return lambda gates, state: (kinds[d][0](limit(gates + ops.matmul(state[0], recurrent))),)

    def bias(d: int) -> Node | None:
        return None if b is None else _part(b[d], 0, 0, size) + _part(b[d], 0, 1, size)

    return _layer(x, w, (initial_h,), sequence_lens, direction, layout, size, cell, bias)


LINES: dict[str, Forms] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN": _rnn,
    "com.microsoft.DynamicQuantizeLSTM": dynamic_quantize_lstm,
}
