"""Lines of recurrent layers and cells; layers whose length is a constant are written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node


def _layers(function: Any, **options: Any) -> Any:
    def layers(
        x: Node,
        state: Any,
        weights: Sequence[Node],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Node, ...]:
        if dropout and train and num_layers > 1:
            raise Unsupported("dropout between recurrent layers: torch draws the random numbers of eager mode")
        states = state if isinstance(state, tuple) else (state,)
        return function(  # type: ignore[no-any-return]
            x,
            *states,
            *weights,
            has_biases=has_biases,
            num_layers=num_layers,
            bidirectional=bidirectional,
            batch_first=batch_first,
            **options,
        )

    return layers


LINES: dict[str, Any] = {
    "aten.lstm.input": _layers(ops.lstm),
    "aten.gru.input": _layers(ops.gru),
    "aten.rnn_tanh.input": _layers(ops.rnn),
    "aten.rnn_relu.input": _layers(ops.rnn, nonlinearity="relu"),
    "aten.lstm_cell.default": lambda x, states, *weights: ops.lstm_cell(x, *states, *weights),
    "aten.gru_cell.default": lambda x, state, *weights: ops.gru_cell(x, state, *weights),
    "aten.rnn_tanh_cell.default": lambda x, state, *weights: ops.rnn_cell(x, state, *weights),
    "aten.rnn_relu_cell.default": lambda x, state, *weights: ops.rnn_cell(x, state, *weights, nonlinearity="relu"),
}
