"""What a call costs beside its kernels, on the CPU: layers so small that the way to their kernels is what is measured.

``python -m benchmarks.calls [--save]`` runs forward and backward of 2, 13 and 50 layers ``Linear(8, 8)`` (4, 26
and 100 parameters) on 4 rows, in eager mode, compiled by inductor and compiled by gradc, in turn in one process with
one thread; a module over 1, 10 and 100 arrays of NumPy's, 8 elements each; and updates of 2, 26 and 200 parameters by
torch's optimizers (``foreach`` and ``fused``), by ``torch.compile(optimizer.step, backend="gradc")``, and by
``gradc.step`` with a loss that only has the gradients, on arrays of NumPy's and on tensors; ``dynamo`` is a compiled
step whose graph does nothing, which no backend is faster than.  Times are processor times of the process, the least of
several repetitions.  With ``--save`` they are written to ``benchmarks/results/calls-PROCESSOR.json``, for
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gradc
from gradc import ops

from . import alternated
from .__main__ import RESULTS, machine, processor, words_of

PARAMETERS, ARRAYS = (4, 26, 100), (1, 10, 100)
ENGINES = ("eager", "inductor", "gradc")
UPDATED, SHAPES = (2, 26, 200), ((8, 8), (256, 256))
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
}
"""Arguments, which torch's and gradc's have both.

torch's Adafactor reads numbers on the host, where Dynamo gives up: no backend sees it, and
:func:`gradc.optim.adafactor` is the way.  torch has no Lion.
"""
UPDATERS = ("foreach", "fused", "dynamo", "compiled", "step", "step torch")
SIZE, ROWS = 8, 4
ROUNDS, SECONDS = 15, 0.04


def least(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds per call of each."""
    return {name: seconds * 1e6 for name, seconds in alternated.least(calls, ROUNDS, SECONDS, together=10).items()}


def training_steps(parameters: int) -> dict[str, Callable[[], Any]]:
    """Engine -> forward and backward of a stack of layers, with that many parameters.

    :raises AssertionError: gradients differ from eager mode's.
    """
    import torch

    import gradc.torch  # noqa: F401

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE) for _ in range(parameters // 2)])
    x, dy, own = torch.randn(ROWS, SIZE), torch.ones(ROWS, SIZE), list(model.parameters())

    def step(call: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            for p in own:
                p.grad = None
            call(x).backward(dy)

        return run

    steps = {}
    wanted = None
    for engine in ENGINES:
        torch._dynamo.reset()
        steps[engine] = step(model if engine == "eager" else torch.compile(model, backend=engine))
        steps[engine]()
        got = [p.grad for p in own]
        wanted = wanted or got
        torch.testing.assert_close(got, wanted)
    return steps


def sums(arrays: int) -> dict[str, Callable[[], Any]]:
    """A module that adds that many arrays of NumPy's up."""
    names = [f"x{i}" for i in range(arrays)]

    def total(**given: Any) -> Any:
        first, *others = given.values()
        for other in others:
            first = first + other
        return ops.exp(first)

    module = gradc.compile(gradc.trace(total, **dict.fromkeys(names, "f32[N]")))
    given = {name: np.zeros(8, np.float32) for name in names}
    return {"gradc": lambda: module(**given)}


def nothing(gm: Any, _: Any) -> Callable[..., Any]:
    """A backend of Dynamo's whose graphs give what they gave when they were first called."""
    first: list[Any] = []

    def run(*given: Any) -> Any:
        if not first:
            first.append(gm(*given))
        return first[0]

    return run


def updates(name: str, count: int, shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """What updates that many parameters of a shape."""
    import torch

    import gradc.torch

    def optimizer(**form: Any) -> Any:
        own = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
        for p in own:
            p.grad = torch.randn(shape)
        made = getattr(torch.optim, name.split()[0])(own, lr=1e-3, **OPTIMIZERS[name], **form)
        made.step()
        return made

    def step(new: Callable[[], Any]) -> Callable[[], Any]:
        def loss(p: Any, gradients: Any) -> Any:
            each = [ops.sum(x * gradients[key]) for key, x in p.items()]
            return sum(each[1:], each[0])

        made = gradc.step(
            loss, getattr(gradc.optim, name.split()[0].lower())(lr=1e-3, **OPTIMIZERS[name]), target="cpu"
        )
        gradients, p = ({f"p{i}": new() for i in range(count)} for _ in range(2))
        last = [p, made.init(p)]

        def run() -> None:
            _, *last[:] = made(*last, gradients=gradients)

        return run

    calls = {form: optimizer(**{form: True}).step for form in ("foreach", "fused")}
    for title, backend in (("dynamo", nothing), ("compiled", "gradc")):
        torch._dynamo.reset()
        calls[title] = torch.compile(optimizer(foreach=True).step, backend=backend)
        calls[title]()
    rng = np.random.default_rng(0)
    calls["step"] = step(lambda: rng.standard_normal(shape).astype(np.float32))
    calls["step torch"] = step(lambda: torch.randn(shape))
    return calls


def updated() -> list[dict[str, Any]]:
    """A record for each optimizer, shape and number of parameters."""
    return [
        {
            "optimizer": name,
            "shape": shape,
            "parameters": count,
            "us": (us := least(updates(name, count, shape))),
            "of torch": {form: us["compiled"] / us[form] for form in ("foreach", "fused")},
        }
        for name in OPTIMIZERS
        for shape in SHAPES
        for count in UPDATED
    ]


def means(steps: list[dict[str, Any]]) -> list[str]:
    """The geometric means of what compiled steps take of torch's, over optimizers and numbers of parameters."""
    return [
        f"{list(shape)}: compiled / {form} "
        + f"{statistics.geometric_mean([r['of torch'][form] for r in steps if r['shape'] == shape]):.2f}"
        for shape in SHAPES
        for form in ("foreach", "fused")
    ]


def measured() -> list[dict[str, Any]]:
    """A record for each number of parameters, and of arrays."""
    records: list[dict[str, Any]] = []
    for count in PARAMETERS:
        us = least(training_steps(count))
        records.append({"parameters": count, "us": us, "of inductor": us["gradc"] / us["inductor"]})
    return records + [{"arrays": count, "us": least(sums(count))} for count in ARRAYS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", action="store_true", help="write the records to benchmarks/results")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    records = measured()
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in (*ENGINES, "of inductor")))
    for r in records:
        title = f"{r['parameters']} parameters" if "parameters" in r else f"{r['arrays']} arrays"
        cells = [f"{r['us'][e]:.1f}" if e in r["us"] else "" for e in ENGINES]
        ratio = f"{r['of inductor']:.2f}" if "of inductor" in r else ""
        print(f"{title:<16}" + "".join(f"{cell:>12}" for cell in (*cells, ratio)))
    steps = updated()
    print(f"\n{'':<34}" + "".join(f"{name:>12}" for name in UPDATERS))
    for r in steps:
        title = f"{r['optimizer']} {r['parameters']} x {list(r['shape'])}"
        print(f"{title:<34}" + "".join(f"{r['us'][name]:>12.1f}" for name in UPDATERS))
    print("geometric means: " + "; ".join(means(steps)))
    if given.save:
        path = RESULTS / f"calls-{words_of(processor())}.json"
        path.write_text(
            json.dumps({"machine": machine(1), "calls": records, "updates": steps}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    os.environ["GRADC_NUM_THREADS"] = "1"
    sys.exit(main())
