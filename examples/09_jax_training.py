"""A language model's embedding in int8 with learned scales, trained by a JAX loop: jit(value_and_grad) around a gradc
module, beside the same loss written in JAX alone.

JAX owns the parameters, the optimizer and the loop; gradc computes the loss and its gradients, the scales' among them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import gradc
import gradc.jax
from gradc import ops

V, D, C, STEPS = 500, 32, 20, 300
RATES = {"scale": 2e-4, "w": 0.5, "b": 0.5}  # a step of a scale moves codes of up to 127


def loss(tokens, table, scale, w, b, targets):
    rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, D)))
    return ops.cross_entropy(ops.linear(ops.gelu(rows), w, b), targets)


def in_jax(tokens, table, scale, w, b, targets):
    rows = (table * scale)[tokens]
    logits = jax.nn.gelu(rows, approximate=False) @ w.T + b
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1))


def train(function, table, parameters, batches):
    """The losses of each step, and the parameters after the last."""
    step = jax.jit(jax.value_and_grad(lambda p, tokens, targets: function(tokens, table, **p, targets=targets)))
    losses = []
    for tokens, targets in batches:
        value, gradients = step(parameters, tokens, targets)
        parameters = {n: p - RATES[n] * gradients[n] for n, p in parameters.items()}
        losses.append(float(value))
    return losses, parameters


def main() -> None:
    choose = np.random.default_rng(0)
    table = choose.integers(-127, 128, (V, D)).astype(np.int8)
    parameters = {
        "scale": np.full((V, 1), 0.01, np.float32),
        "w": choose.normal(0, 0.2, (C, D)).astype(np.float32),
        "b": np.zeros(C, np.float32),
    }
    answers = choose.integers(0, C, V)
    tokens = choose.integers(0, V, (STEPS, 256)).astype(np.int32)
    batches = [(each, answers[each].astype(np.int32)) for each in tokens]

    types = {"tokens": "i64[N]", "table": f"i8[V,{D}]", "scale": "f32[V,1]", "w": f"f32[{C},{D}]", "b": f"f32[{C}]"}
    module = gradc.compile(gradc.trace(loss, **types, targets="i64[N]"), wrt=["scale", "w", "b"])
    function = gradc.jax.call(module)
    by_name = lambda tokens, table, **others: function(tokens=tokens, table=table, **others)

    ours, learned = train(by_name, table, parameters, batches)
    theirs, expected = train(in_jax, table, parameters, batches)
    for number in (0, STEPS // 2, STEPS - 1):
        print(f"step {number:>3}  loss {ours[number]:.6f} with gradc, {theirs[number]:.6f} in JAX alone")
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    moved = float(jnp.abs(learned["scale"] - 0.01).max())
    print(f"largest difference of a loss: {apart:.1e} of it; the scales moved by up to {moved:.4f}")
    worst = max(float(jnp.abs(learned[n] - expected[n]).max()) for n in learned)
    print(f"largest difference of a parameter after {STEPS} steps: {worst:.1e}")


if __name__ == "__main__":
    main()
