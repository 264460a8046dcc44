"""The demo's model in three variants, and its optimiser, both as gradc graphs.

A language model after Bengio et al., "A neural probabilistic language model", 2003: six words are looked up in an
embedding table, their rows are concatenated, one hidden layer follows, and every word of the vocabulary gets a score
for being the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradc.ops as ops

from ..ir.graph import Graph
from ..ir.node import Node
from ..trace import trace

CONTEXT, WIDTH, HIDDEN = 6, 64, 128
LARGEST_CODE = 127
Arrays = dict[str, Any]


# -- the model ---------------------------------------------------------------------------------------------------------


def score_next_word(
    table: Node, tokens: Node, targets: Node, w1: Node, b1: Node, gamma: Node, beta: Node, w2: Node, b2: Node
) -> Node:
    """The mean cross-entropy of the next word, for any float node ``table``."""
    x = ops.embedding(tokens, table).reshape(tokens.shape[0], CONTEXT * WIDTH)
    h = ops.layer_norm(ops.gelu(ops.linear(x, w1, b1)), HIDDEN, gamma, beta)
    return ops.cross_entropy(ops.linear(h, w2, b2), targets)


def float_table(tokens: Node, targets: Node, table: Node, **rest: Node) -> dict[str, Node]:
    return {"loss": score_next_word(table, tokens, targets, **rest)}


def fake_quantized_table(tokens: Node, targets: Node, table: Node, scale: Node, **rest: Node) -> dict[str, Node]:
    """The f32 table is fake-quantized to int8 codes times one scale per row; table and scales are trained."""
    rounded = ops.fake_quantize(table, scale, block=(1, WIDTH), quant_min=-LARGEST_CODE, quant_max=LARGEST_CODE)
    return {"loss": score_next_word(rounded, tokens, targets, **rest)}


def frozen_codes(tokens: Node, targets: Node, codes: Node, scale: Node, **rest: Node) -> dict[str, Node]:
    """The int8 codes are constant; one scale per row is trained."""
    return {"loss": score_next_word(ops.dequantize(codes, scale, block=(1, WIDTH)), tokens, targets, **rest)}


@dataclass(frozen=True)
class Variant:
    """One representation of the embedding table.

    :param constants: inputs that are not trained.
    :param scale_rate: the scale's learning rate as a fraction of its initial mean.
    """

    name: str
    about: str
    function: Callable[..., dict[str, Node]]
    table: tuple[str, ...]
    constants: tuple[str, ...] = ()
    scale_rate: float = 0.0

    def graph(self, vocabulary: int) -> Graph:
        """The forward graph, with a symbolic batch size, so that one module runs batches of any size."""
        types = {
            "table": f"f32[{vocabulary},{WIDTH}]",
            "codes": f"i8[{vocabulary},{WIDTH}]",
            "scale": f"f32[{vocabulary},1]",
        }
        rest = {
            "w1": f"f32[{HIDDEN},{CONTEXT * WIDTH}]",
            "b1": f"f32[{HIDDEN}]",
            "gamma": f"f32[{HIDDEN}]",
            "beta": f"f32[{HIDDEN}]",
            "w2": f"f32[{vocabulary},{HIDDEN}]",
            "b2": f"f32[{vocabulary}]",
        }
        given = {"tokens": f"i64[B,{CONTEXT}]", "targets": "i64[B]", **{t: types[t] for t in self.table}, **rest}
        return trace(self.function, name=self.function.__name__, assume=["B >= 1"], **given)

    def learns(self, graph: Graph) -> list[str]:
        return [name for name in graph.input_names if name not in ("tokens", "targets", *self.constants)]


VARIANTS = (
    Variant("float", "an f32 table", float_table, ("table",)),
    Variant(
        "fake-quantized",
        "an f32 table rounded to int8 codes times a learnable scale per row",
        fake_quantized_table,
        ("table", "scale"),
        scale_rate=0.01,
    ),
    Variant(
        "frozen int8",
        "int8 codes that never change, times a learnable scale per row",
        frozen_codes,
        ("codes", "scale"),
        ("codes",),
        scale_rate=0.03,
    ),
)


def initial_values(unigram: NDArray[np.float64], seed: int = 0) -> Arrays:
    """Initial values of every input that is not data, the same for all variants: the model starts as the unigram.

    ``codes`` and ``scale`` are ``table`` quantized, with code 127 for the largest entry of each row.
    """
    random, vocabulary = np.random.default_rng(seed), len(unigram)
    normal = lambda deviation, *shape: (deviation * random.standard_normal(shape)).astype(np.float32)
    table = normal(0.1, vocabulary, WIDTH)
    scale = np.abs(table).max(1, keepdims=True) / np.float32(LARGEST_CODE)
    return {
        "table": table,
        "scale": scale,
        "codes": np.rint(table / scale).astype(np.int8),
        "w1": normal(0.255, HIDDEN, CONTEXT * WIDTH),
        "b1": np.zeros(HIDDEN, np.float32),
        "gamma": np.ones(HIDDEN, np.float32),
        "beta": np.zeros(HIDDEN, np.float32),
        "w2": normal(0.02, vocabulary, HIDDEN),
        "b2": np.log(unigram).astype(np.float32),
    }


# -- the optimiser -----------------------------------------------------------------------------------------------------

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
Tree = Mapping[str, Any]


def adam(
    parameters: Tree, gradients: Tree, mean: Tree, square: Tree, rate: Tree, unbias_mean: Any, unbias_square: Any
) -> dict[str, dict[str, Any]]:
    """One step of Adam (Kingma and Ba, 2015, algorithm 1) for every parameter.

    :param mean, square: running means of the gradient and of its square.  :param rate: the rate of each parameter.
    :param unbias_mean: the bias correction 1 / (1 - BETA1**step); ``unbias_square`` likewise with BETA2.
    """
    after: dict[str, dict[str, Any]] = {"parameters": {}, "mean": {}, "square": {}}
    for name, parameter in parameters.items():
        g = gradients[name]
        m = after["mean"][name] = BETA1 * mean[name] + (1 - BETA1) * g
        s = after["square"][name] = BETA2 * square[name] + (1 - BETA2) * g * g
        after["parameters"][name] = parameter - rate[name] * (m * unbias_mean) / (ops.sqrt(s * unbias_square) + EPSILON)
    return after


def adam_graph(model: Graph, learns: Sequence[str]) -> Graph:
    """The graph of one Adam step for the inputs ``learns`` of a model."""
    types = {name: node.type for name, node in zip(model.input_names, model.inputs, strict=True) if name in learns}
    rates = dict.fromkeys(types, "f32[]")
    return trace(
        adam,
        parameters=types,
        gradients=types,
        mean=types,
        square=types,
        rate=rates,
        unbias_mean="f32[]",
        unbias_square="f32[]",
    )


def donated(optimiser: Graph) -> list[str]:
    """The inputs that a step may overwrite: the parameters and both means."""
    return [name for name in optimiser.input_names if name.split(".")[0] in ("parameters", "mean", "square")]
