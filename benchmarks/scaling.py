"""``python -m benchmarks.scaling``: time against sizes, for a table's and a norm's gradient: does anything fall off a
cliff?

Each size is doubled over three decades, the others stay; a point is a cliff where it lies more than half above the line
through its neighbours (on logarithmic axes).  Indices of one row, drawn from Zipf's law, and uniform are compared too.
Writes one JSON and one picture; nothing here is a test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradc.inspect.plot import Axis, plot

Array = np.ndarray[Any, Any]
CLIFF = 1.5
DRAWS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "uniform": lambda random, rows, table: random.integers(0, table, rows),
    "zipf": lambda random, rows, table: np.minimum(random.zipf(1.1, rows), table) - 1,
    "one row": lambda random, rows, table: np.full(rows, table // 2),
}


def seconds(run: Callable[[], Any], budget: float = 0.15) -> float:
    """The median of as many runs as fit a budget, after two."""
    run(), run()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < budget and len(times) < 500):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def embedding(rows: int, table: int, width: int, draw: str = "uniform") -> float:
    import gradc
    from gradc import ops

    module = gradc.compile(
        gradc.trace(lambda tokens, weight: ops.embedding(tokens, weight), tokens="i64[N]", weight="f32[V,D]"),
        wrt=["weight"],
    )
    random = np.random.default_rng(0)
    y, residuals = module.forward(tokens=DRAWS[draw](random, rows, table), weight=np.zeros((table, width), np.float32))
    dy = random.standard_normal(y.shape).astype(np.float32)
    return seconds(lambda: module.backward(residuals, dy, dims={"V": table}))


def layer_norm(rows: int, width: int) -> float:
    import gradc
    from gradc import ops

    module = gradc.compile(
        gradc.trace(lambda x, w, b: ops.layer_norm(x, (x.shape[1],), w, b), x="f32[N,D]", w="f32[D]", b="f32[D]"),
        wrt=["x", "w", "b"],
    )
    random = np.random.default_rng(0)
    x, w, b = (random.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (width,), (width,)))
    y, residuals = module.forward(x=x, w=w, b=b)
    dy = random.standard_normal(y.shape).astype(np.float32)
    return seconds(lambda: module.backward(residuals, dy))


def doubled(first: int, last: int) -> list[int]:
    return [first << i for i in range(int(math.log2(last / first)) + 1)]


CURVES: dict[str, tuple[list[int], Callable[[int], float]]] = {
    "embedding N": (doubled(256, 262144), lambda n: embedding(n, 32000, 128)),
    "embedding D": (doubled(2, 2048), lambda d: embedding(8192, 8000, d)),
    "embedding V": (doubled(512, 524288), lambda v: embedding(8192, v, 128)),
    "layer_norm N": (doubled(32, 32768), lambda n: layer_norm(n, 512)),
    "layer_norm D": (doubled(16, 16384), lambda d: layer_norm(1024, d)),
}


def cliffs(points: list[tuple[int, float]]) -> list[int]:
    """The sizes whose time lies above the line through their neighbours by CLIFF; sizes are equidistant."""
    return [
        points[i][0]
        for i in range(1, len(points) - 1)
        if points[i][1] > CLIFF * math.sqrt(points[i - 1][1] * points[i + 1][1])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    out = (
        Path(options.out)
        if options.out
        else Path("benchmarks/results") / f"scaling-{datetime.date.today().isoformat()}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, (sizes, measure) in CURVES.items():
        curves[name] = [(size, measure(size)) for size in sizes]
        print(
            f"{name:<14}"
            + " ".join(f"{size}:{t * 1e3:.3g}" for size, t in curves[name])
            + f"  cliffs: {cliffs(curves[name]) or 'none'}",
            flush=True,
        )
    draws = {name: embedding(8192, 32000, 512, name) for name in DRAWS}
    print(
        "indices (8192 rows of 512 into 32000): " + ", ".join(f"{name} {t * 1e3:.2f} ms" for name, t in draws.items())
    )
    out.write_text(
        json.dumps(
            {"curves": curves, "cliffs": {name: cliffs(points) for name, points in curves.items()}, "draws": draws},
            indent=1,
        )
        + "\n"
    )
    plot(curves, Axis("size", base=2), Axis("time of a call", base=10, unit="s")).save(out.with_suffix(".svg"))
    print(f"written: {out} and {out.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
