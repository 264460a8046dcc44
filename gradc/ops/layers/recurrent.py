"""Recurrent layers of a constant number of steps, each step written out: rnn_cell, lstm_cell, gru_cell; rnn, lstm, gru.

A layer's product with its inputs is one matrix product for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import TypeRuleError
from ...ir.dims import Size, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ..elementwise.pointwise import sigmoid, tanh
from ..rules import floating, reshaped, spread
from ..shapes.movement import concat, flip, slice

Activation = Literal["tanh", "relu"]

# -- one step ----------------------------------------------------------------------------------------------------------


def _parts(x: Node, count: int) -> list[Node]:
    """The last axis in equal parts, one per gate."""
    whole = x.shape[-1]
    assert isinstance(whole, int)
    size, lead = whole // count, x.shape[:-1]
    low, one = (0,) * len(lead), (1,) * x.rank
    return [slice.plain(x, (*low, k * size), (*lead, (k + 1) * size), one) for k in range(count)]


def _rnn_step(from_input: Node, from_state: Node, state: Sequence[Node], activation: Activation) -> tuple[Node, ...]:
    # h' = tanh(W x + b + U h + c)
    total = from_input + from_state
    return (tanh(total) if activation == "tanh" else call("relu", total),)


def _lstm_step(from_input: Node, from_state: Node, state: Sequence[Node], _: Any) -> tuple[Node, ...]:
    # i, f, o sigmoid, g tanh: c' = f c + i g; h' = o tanh(c')
    i, f, g, o = _parts(from_input + from_state, 4)
    c = sigmoid(f) * state[1] + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def _gru_step(from_input: Node, from_state: Node, state: Sequence[Node], _: Any) -> tuple[Node, ...]:
    # r, z sigmoid; n = tanh(W x + r (U h)); h' = n + z (h - n)
    (ri, zi, ni), (rh, zh, nh) = _parts(from_input, 3), _parts(from_state, 3)
    n = tanh(ni + sigmoid(ri + rh) * nh)
    return (n + sigmoid(zi + zh) * (state[0] - n),)


@dataclass(frozen=True)
class _Kind:
    """A recurrent unit.

    :ivar gates: rows of its weights per unit of state.  :ivar states: how many arrays its state is.
    """

    name: str
    gates: int
    states: int
    step: Callable[..., tuple[Node, ...]]


RNN = _Kind("rnn", 1, 1, _rnn_step)
LSTM = _Kind("lstm", 4, 2, _lstm_step)
GRU = _Kind("gru", 3, 1, _gru_step)


def _affine(x: Node, weight: Node, bias: Node | None) -> Node:
    y = call("matmul", x, weight.T)
    return y if bias is None else y + spread(bias, y.shape)


def _check_weights(kind: _Kind, x: Node, state: Sequence[Node], w_ih: Node, w_hh: Node, *biases: Node | None) -> None:
    """TypeRuleError where weights do not fit an input and states; h has less features than c with a projection."""
    features, hidden, back = x.shape[-1], state[-1].shape[-1], state[0].shape[-1]
    if not isinstance(hidden, int):
        raise TypeRuleError(f"a state of {hidden} features: a constant is needed")
    for name, weight, columns in (("w_ih", w_ih, features), ("w_hh", w_hh, back)):
        if not _is(weight, kind.gates * hidden, columns):
            raise TypeRuleError(f"{name} is {weight.type}; [{kind.gates * hidden}, {columns}] is needed")
    for name, bias in zip(("b_ih", "b_hh"), biases, strict=False):
        if bias is not None and not _is(bias, kind.gates * hidden):
            raise TypeRuleError(f"{name} is {bias.type}; [{kind.gates * hidden}] is needed")


def _is(x: Node, *shape: Size) -> bool:
    return x.rank == len(shape) and all(map(same, x.shape, shape))


def _cell_of(kind: _Kind) -> Function:
    def cell(x: Node, state: tuple[Node, ...], weights: Sequence[Node | None], activation: Any) -> tuple[Node, ...]:
        w_ih, w_hh, b_ih, b_hh = weights
        assert w_ih is not None and w_hh is not None
        floating(x.type)
        for name, s in zip(("h", "c"), state, strict=False):
            if x.rank not in (1, 2) or s.rank != x.rank or not _is(s, *x.shape[:-1], s.shape[-1]):
                raise TypeRuleError(f"input is {x.type} and {name} {s.type}: [N, I] and [N, H], or [I] and [H]")
        _check_weights(kind, x, state, w_ih, w_hh, b_ih, b_hh)
        return kind.step(_affine(x, w_ih, b_ih), _affine(state[0], w_hh, b_hh), state, activation)

    if kind.states == 2:

        def write(
            input: Node, h: Node, c: Node, w_ih: Node, w_hh: Node, b_ih: Node | None = None, b_hh: Node | None = None
        ) -> tuple[Node, ...]:
            return cell(input, (h, c), (w_ih, w_hh, b_ih, b_hh), None)
    elif kind is RNN:

        def write(  # type: ignore[misc]
            input: Node,
            h: Node,
            w_ih: Node,
            w_hh: Node,
            b_ih: Node | None = None,
            b_hh: Node | None = None,
            nonlinearity: Activation = "tanh",
        ) -> Node:
            return cell(input, (h,), (w_ih, w_hh, b_ih, b_hh), nonlinearity)[0]
    else:

        def write(  # type: ignore[misc]
            input: Node, h: Node, w_ih: Node, w_hh: Node, b_ih: Node | None = None, b_hh: Node | None = None
        ) -> Node:
            return cell(input, (h,), (w_ih, w_hh, b_ih, b_hh), None)[0]

    rows = kind.gates * 2
    states = ("F[3,2]",) * kind.states
    plain = Sample(("F[3,4]", *states, f"F[{rows},4]", f"F[{rows},2]", f"F[{rows}]", f"F[{rows}]"))
    return Function(
        f"{kind.name}_cell",
        write=write,
        samples=(plain, *((Sample(plain.operands[:-2], {"nonlinearity": "relu"}),) if kind is RNN else ())),
        bad=(
            BadSample(("f32[3,4]", *("f32[3,2]",) * kind.states, f"f32[{rows},3]", f"f32[{rows},2]"), match="w_ih is"),
            BadSample(
                ("f32[3,4]", *("f32[1,2]",) * kind.states, f"f32[{rows},4]", f"f32[{rows},2]"),
                match="h f32[1,2]: [N, I] and [N, H]",
            ),
            BadSample(("f32[4]", *("f32[]",) * kind.states, f"f32[{rows},4]", f"f32[{rows},2]"), match="h f32[]"),
        ),
        doc=(
            f"one step of a {kind.name.upper()}: the new state of [N, H] from input [N, I], the state and the weights"
            f" [{kind.gates}H, I] and [{kind.gates}H, H]" + (": h and c" if kind.states == 2 else "")
        ),
        source=f"torch.{kind.name}_cell",
    )


rnn_cell, lstm_cell, gru_cell = (_cell_of(kind) for kind in (RNN, LSTM, GRU))

# -- layers ------------------------------------------------------------------------------------------------------------


def _at(x: Node, k: int) -> Node:
    """x[k]"""
    low, one = (0,) * (x.rank - 1), (1,) * x.rank
    return reshaped(slice.plain(x, (k, *low), (k + 1, *x.shape[1:]), one), x.shape[1:])


def _joined(parts: Sequence[Node]) -> Node:
    return concat(*(reshaped(x, (1, *x.shape)) for x in parts), axis=0)


def _one_direction(
    kind: _Kind, x: Node, state: tuple[Node, ...], weights: Sequence[Node], has_biases: bool, activation: Any
) -> tuple[Node, tuple[Node, ...]]:
    """[T, N, H] of every step, and the last state."""
    w_ih, w_hh, *more = weights
    b_ih, b_hh = more[:2] if has_biases else (None, None)
    projection = more[-1] if len(more) == (3 if has_biases else 1) else None
    _check_weights(kind, x, state, w_ih, w_hh, b_ih, b_hh)
    if projection is not None and not _is(projection, state[0].shape[-1], state[1].shape[-1]):
        raise TypeRuleError(f"w_hr is {projection.type}; [{state[0].shape[-1]}, {state[1].shape[-1]}] is needed")
    from_inputs = _affine(x, w_ih, b_ih)
    outputs = []
    steps = x.shape[0]
    assert isinstance(steps, int)
    for t in range(steps):
        state = kind.step(_at(from_inputs, t), _affine(state[0], w_hh, b_hh), state, activation)
        if projection is not None:
            state = (call("matmul", state[0], projection.T), *state[1:])
        outputs.append(state[0])
    return _joined(outputs), state


def _check_states(x: Node, states: Sequence[Node], count: int, batch_first: bool) -> None:
    """TypeRuleError where the initial states do not fit an input [T, N, I], or [T, I]."""
    wanted = "[N, T, I]" if batch_first else "[T, N, I]"
    if x.rank not in (2, 3):
        raise TypeRuleError(f"the input is {x.type}: {wanted} or [T, I]")
    batch = () if x.rank == 2 else (x.shape[0 if batch_first else 1],)
    for name, s in zip(("h", "c"), states, strict=False):
        if s.rank != x.rank or not _is(s, count, *batch, s.shape[-1]):
            lead = ", ".join(map(str, (count, *batch)))
            raise TypeRuleError(f"the input is {x.type} and {name} {s.type}: [{lead}, H] is needed")


def _layers(
    kind: _Kind,
    tensors: Sequence[Node],
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    activation: Any,
) -> tuple[Node, ...]:
    directions = 2 if bidirectional else 1
    if num_layers < 1:
        raise TypeRuleError(f"num_layers={num_layers}: 1 at least")
    if len(tensors) < 1 + kind.states:
        raise TypeRuleError(f"an input and {kind.states} initial states are needed before the weights")
    x, states, weights = tensors[0], tensors[1 : 1 + kind.states], tensors[1 + kind.states :]
    floating(x.type)
    count = num_layers * directions
    _check_states(x, states, count, batch_first)
    projected = kind is LSTM and not same(states[0].shape[-1], states[1].shape[-1])
    each = 2 + 2 * has_biases + projected
    if len(weights) != each * count:
        raise TypeRuleError(f"{len(weights)} weights; {each} for each of {count} layers and directions")
    unbatched = x.rank == 2
    if unbatched:
        x, states = reshaped(x, (x.shape[0], 1, x.shape[1])), [reshaped(s, (s.shape[0], 1, s.shape[1])) for s in states]
    elif batch_first:
        x = call("swapaxes", x, 0, 1)
    if not isinstance(x.shape[0], int) or x.shape[0] < 1:
        raise TypeRuleError(f"{x.shape[0]} steps: they are written out, so that it must be a constant of 1 or more")
    last: list[tuple[Node, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            line = flip.plain(x, axis=(0,)) if direction else x
            own = weights[k * each : (k + 1) * each]
            y, end = _one_direction(kind, line, tuple(_at(s, k) for s in states), own, has_biases, activation)
            outputs.append(flip.plain(y, axis=(0,)) if direction else y)
            last.append(end)
        x = outputs[0] if directions == 1 else concat(*outputs, axis=2)
    ends = tuple(_joined([state[j] for state in last]) for j in range(kind.states))
    if unbatched:
        return tuple(reshaped(v, (v.shape[0], v.shape[2])) for v in (x, *ends))
    return call("swapaxes", x, 0, 1) if batch_first else x, *ends


def _layer_of(kind: _Kind) -> Function:
    if kind is RNN:

        def write(
            *tensors: Node,
            has_biases: bool = True,
            num_layers: int = 1,
            bidirectional: bool = False,
            batch_first: bool = False,
            nonlinearity: Activation = "tanh",
        ) -> tuple[Node, ...]:
            return _layers(kind, tensors, num_layers, has_biases, bidirectional, batch_first, nonlinearity)
    else:

        def write(  # type: ignore[misc]
            *tensors: Node,
            has_biases: bool = True,
            num_layers: int = 1,
            bidirectional: bool = False,
            batch_first: bool = False,
        ) -> tuple[Node, ...]:
            return _layers(kind, tensors, num_layers, has_biases, bidirectional, batch_first, None)

    rows = kind.gates * 2
    bias = (f"F[{rows}]",) * 2
    one = ("F[3,2,4]", *("F[1,2,2]",) * kind.states, f"F[{rows},4]", f"F[{rows},2]", *bias)
    both = (
        "F[2,3,4]",
        *("F[4,2,2]",) * kind.states,
        *(f"F[{rows},4]", f"F[{rows},2]") * 2,
        *(f"F[{rows},4]", f"F[{rows},2]") * 2,
    )
    given = tuple(t.replace("F", "f32") for t in one)
    attrs = {"num_layers": 2, "bidirectional": True, "batch_first": True, "has_biases": False}
    projected = ("F[3,2,4]", "F[1,2,1]", "F[1,2,2]", "F[8,4]", "F[8,1]", *bias, "F[1,2]")
    return Function(
        kind.name,
        write=write,
        samples=(Sample(one), Sample(both, attrs), *((Sample(projected),) if kind is LSTM else ())),
        bad=(
            BadSample(given[:-1], match="4 for each of 1 layers and directions"),
            BadSample(given, {"num_layers": 0}, match="num_layers=0: 1 at least"),
            BadSample((given[0], "f32[1,1,2]", *given[2:]), match="h f32[1,1,2]: [1, 2, H] is needed"),
            BadSample((given[0], "f32[]", *given[2:]), match="h f32[]: [1, 2, H] is needed"),
            BadSample((*given[:-1], "f32[1]"), match="b_hh is f32[1]"),
        ),
        doc=(
            f"{kind.name}(input, {'h, c' if kind.states == 2 else 'h'}, weights...): the outputs [T, N, H] of layers of"
            " T steps and the last states; the weights of each layer and direction in torch's order, w_ih, w_hh, b_ih,"
            " b_hh" + (", w_hr where h has less features than c" if kind is LSTM else "")
        ),
        source=f"torch.{'rnn_tanh' if kind is RNN else kind.name}",
    )


rnn, lstm, gru = (_layer_of(kind) for kind in (RNN, LSTM, GRU))
