"""A recommender trained by one call a step: loss, gradients and update are one program, and a table of a million rows
costs what its looked-up rows cost.

    python examples/11_training_step.py
"""

import time

import numpy as np

import gradc
from gradc import ops, optim

ROWS, WIDTH, BATCH, STEPS = 1_000_000, 16, 512, 60


def loss(params, items, liked):
    features = ops.reshape(ops.embedding(items, params["table"]), (liked.shape[0], 2 * WIDTH))
    hidden = ops.relu(features @ params["w1"] + params["b1"])
    return ops.binary_cross_entropy_with_logits(hidden @ params["w2"], liked)


rng = np.random.default_rng(0)
normal = lambda deviation, *shape: (deviation * rng.standard_normal(shape)).astype(np.float32)
params = {
    "table": normal(0.1, ROWS, WIDTH),
    "w1": normal(0.2, 2 * WIDTH, 32),
    "b1": np.zeros(32, np.float32),
    "w2": normal(0.2, 32, 1),
}
taste = rng.standard_normal(200)  # the items that are looked up, and whether two of them are liked together


def batch():
    chosen = rng.integers(0, len(taste), (BATCH, 2))
    liked = taste[chosen[:, :1]] * taste[chosen[:, 1:]] > 0
    return {"items": chosen * (ROWS // len(taste)), "liked": liked.astype(np.float32)}


for sparse in ("params.table", ()):
    step = gradc.step(loss, optim.rowwise_adagrad(lr=0.1), sparse=sparse, clip_norm=10.0, target="cpu")
    learned = {name: x.copy() for name, x in params.items()}
    state = step.init(learned)
    rng = np.random.default_rng(1)
    losses, times = [], []
    for number in range(STEPS if sparse else 5):
        given = batch()
        began = time.perf_counter()
        value, learned, state = step(learned, state, lr=0.1 if number < 50 else 0.02, **given)
        times.append(time.perf_counter() - began)
        losses.append(float(value))
    what = "rows alone" if sparse else "whole table"
    print(f"{what}: loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}; {1e3 * min(times):.1f} ms")
    if sparse:
        first = losses
        changed = np.flatnonzero((learned["table"] != params["table"]).any(1))
        print(f"{len(changed)} of {ROWS} rows changed, all of them among the {len(taste)} that were looked up")
np.testing.assert_allclose(first[: len(losses)], losses, rtol=1e-5)
print("the same losses")

before = {name: x.copy() for name, x in learned.items()}
try:
    step(learned, state, items=np.full((BATCH, 2), ROWS), liked=np.zeros((BATCH, 1), np.float32))
except gradc.errors.IndexOutOfRange as error:
    print(error)
print("nothing changed:", all(np.array_equal(learned[name], before[name]) for name in before))
