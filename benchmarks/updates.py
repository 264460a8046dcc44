"""A training step of one large table, in the rows that indices name: loss, gradient and update.

``python -m benchmarks.updates [--threads N] [--save]`` times :func:`gradc.step` with ``sparse=`` and torch's
``nn.EmbeddingBag(sparse=True)`` with an optimizer that takes sparse gradients, in turn in one process, over a table
``f32[1000000,64]`` that is read at 2048 indices, and by 4096 bags of 20.  Times are processor times of the process, the
least of several repetitions.  The floor is what must move, at the rate of a copy: rows that the loss reads, and each
distinct row and its state, read and written.  With ``--save`` they are written to
``benchmarks/results/updates-PROCESSOR.json``, for docs/optim.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gradc
from gradc import ops, optim

from . import alternated
from .__main__ import RESULTS, machine, processor, words_of
from .case import type_of

ROWS, WIDTH, RATE = 1_000_000, 64, 0.1
SHAPES = {"2048 rows": (2048, 1), "4096 bags of 20": (4096, 20)}
OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "Adagrad", "adagrad": "Adagrad", "adam": "SparseAdam"}
"""gradc's -> torch's; torch has no Adagrad with one number of state a row."""
ROUNDS, SECONDS = 7, 0.1


def least(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds per call of each."""
    return {name: seconds * 1e6 for name, seconds in alternated.least(calls, ROUNDS, SECONDS).items()}


def steps(optimizer: str, shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Engine -> a step.

    :raises AssertionError: their tables differ after the first.
    """
    import torch

    rng = np.random.default_rng(0)
    start = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    indices, g = rng.integers(0, ROWS, shape), rng.standard_normal((shape[0], WIDTH)).astype(np.float32)
    loss = lambda table, i, g: ops.sum(ops.embedding_bag(i, table, mode="sum") * g)
    more = {"eps": 1e-30} if optimizer == "adam" else {}  # SparseAdam adds it elsewhere, which small gradients show
    step = gradc.step(loss, getattr(optim, optimizer)(RATE, **more), sparse="table", target="cpu")
    kept: list[Any] = [start.copy()]
    kept.append(step.init(kept[0]))

    def ours() -> None:
        kept[:] = step(*kept, i=indices, g=g)[1:]

    bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, _weight=torch.from_numpy(start.copy()))
    theirs_ = getattr(torch.optim, OPTIMIZERS[optimizer])(bag.parameters(), lr=RATE, **more)
    i, dy = torch.from_numpy(indices), torch.from_numpy(g)

    def theirs() -> None:
        theirs_.zero_grad(set_to_none=True)
        (bag(i) * dy).sum().backward()
        theirs_.step()

    ours(), theirs()
    if optimizer != "rowwise_adagrad":
        np.testing.assert_allclose(kept[0], bag.weight.detach().numpy(), rtol=1e-4, atol=1e-4)
    return {"gradc": ours, "torch": theirs}


def floor(optimizer: str, shape: tuple[int, int], bandwidth: float) -> float:
    """Microseconds."""
    slots = getattr(optim, optimizer)(RATE).slots(type_of(f"f32[{ROWS},{WIDTH}]"))
    state = sum(WIDTH if len(slot.shape) == 2 else 1 for slot in slots.values())
    distinct = len(np.unique(np.random.default_rng(0).integers(0, ROWS, shape)))
    moved = 4 * (shape[0] * shape[1] * WIDTH + 2 * distinct * (WIDTH + state)) + 8 * shape[0] * shape[1]
    return moved / bandwidth * 1e6


def copied() -> float:
    """Bytes per second of processor time that a copy reads and writes."""
    source = np.zeros(1 << 26, np.float32)
    target = source.copy()
    return 2 * source.nbytes / least({"copy": lambda: np.copyto(target, source)})["copy"] * 1e6


def measured() -> list[dict[str, Any]]:
    """A record for each shape and optimizer."""
    bandwidth = copied()
    return [
        {
            "what": what,
            "optimizer": name,
            "us": (us := least(steps(name, shape))),
            "floor us": floor(name, shape, bandwidth),
            "of torch": us["gradc"] / us["torch"],
        }
        for what, shape in SHAPES.items()
        for name in OPTIMIZERS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write the records to benchmarks/results")
    given = parser.parse_args()
    os.environ["GRADC_NUM_THREADS"] = str(given.threads)
    import torch

    torch.set_num_threads(given.threads)
    records = measured()
    print(f"{'us, threads: ' + str(given.threads):<36}{'gradc':>10}{'torch':>10}{'of torch':>10}{'floor':>10}")
    for r in records:
        us = r["us"]
        cells = (f"{us['gradc']:.0f}", f"{us['torch']:.0f}", f"{r['of torch']:.2f}", f"{r['floor us']:.0f}")
        print(f"{r['what'] + ', ' + r['optimizer']:<36}" + "".join(f"{cell:>10}" for cell in cells))
    if given.save:
        path = RESULTS / f"updates-{words_of(processor())}.json"
        known = json.loads(path.read_text(encoding="utf-8"))["updates"] if path.exists() else {}
        known[str(given.threads)] = records
        found = {"machine": machine(given.threads), "updates": known}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
