"""``python -m benchmarks.compile_time``: seconds of each stage of a cold compilation against a model's size, and
those of the processor for all of them, C compiler included.

The model is a transformer in the shape of GPT-2 (12 heads, width 768, 128 tokens, a tied head and a loss): 52 nodes a
layer forward.  Each size is compiled in a process of its own with an empty cache.  Writes one JSON; nothing here is a
test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, HEADS, TOKENS, BATCH, WORDS = 768, 12, 128, 4, 50257
LAYERS = (1, 2, 6, 12, 24, 48, 96)
STAGES = ("run_passes", "render", "finish", "load")
"""``finish`` is what is waited for the C compiler; ``run_passes`` has the rendering of the forward."""


def transformer(layers: int) -> tuple[Any, list[str]]:
    """The graph, and its parameters."""
    import gradc

    vector = f"f32[{WIDTH}]"

    def dense(rows: int, cols: int) -> dict[str, str]:
        return {"w": f"f32[{rows * WIDTH},{cols * WIDTH}]", "b": f"f32[{cols * WIDTH}]"}

    norm = {"w": vector, "b": vector}
    products = {"qkv": dense(1, 3), "project": dense(1, 1), "expand": dense(1, 4), "reduce": dense(4, 1)}
    p = {
        "words": f"f32[{WORDS},{WIDTH}]",
        "places": f"f32[{TOKENS},{WIDTH}]",
        "layers": [{"before": norm, "after": norm} | products for _ in range(layers)],
        "last": norm,
    }
    graph = gradc.trace(_loss, tokens=f"i64[{BATCH},{TOKENS}]", labels=f"i64[{BATCH * TOKENS}]", p=p)
    return graph, [name for name in graph.input_names if name.startswith("p.")]


def _loss(tokens: Any, labels: Any, p: Any) -> Any:
    from gradc import ops

    x = ops.embedding(tokens, p["words"]) + ops.reshape(p["places"], (1, TOKENS, WIDTH))
    for layer in p["layers"]:
        x = x + _attention(_norm(x, layer["before"]), layer)
        x = x + _dense(ops.gelu(_dense(_norm(x, layer["after"]), layer["expand"])), layer["reduce"])
    rows = ops.reshape(_norm(x, p["last"]), (BATCH * TOKENS, WIDTH))
    return ops.cross_entropy(rows @ ops.transpose(p["words"], (1, 0)), labels)


def _norm(x: Any, p: Any) -> Any:
    from gradc import ops

    return ops.layer_norm(x, (WIDTH,), p["w"], p["b"])


def _dense(x: Any, p: Any) -> Any:
    from gradc import ops

    rows = ops.reshape(x, (BATCH * TOKENS, x.shape[-1]))
    return ops.reshape(rows @ p["w"] + p["b"], (BATCH, TOKENS, p["w"].shape[1]))


def _attention(x: Any, p: Any) -> Any:
    from gradc import ops

    shape, square = (BATCH, TOKENS, HEADS, WIDTH // HEADS), (1, 1, TOKENS, TOKENS)
    qkv = _dense(x, p["qkv"])
    q, k, v = (ops.reshape(qkv[:, :, j * WIDTH : (j + 1) * WIDTH], shape) for j in range(3))
    q, k, v = (ops.transpose(t, (0, 2, 1, 3)) for t in (q, k, v))
    scores = (q @ ops.transpose(k, (0, 1, 3, 2))) / math.sqrt(WIDTH // HEADS)
    past = ops.ge(ops.iota(shape=square, axis=2), ops.iota(shape=square, axis=3))
    weights = ops.softmax(ops.where(past, scores, -1e9), axis=-1)
    return _dense(ops.reshape(ops.transpose(weights @ v, (0, 2, 1, 3)), (BATCH, TOKENS, WIDTH)), p["project"])


def measure(layers: int, target: str) -> dict[str, Any]:
    """Seconds of one cold compilation, by stage, in this process."""
    import gradc
    from gradc import compiler

    began = time.perf_counter()
    graph, wrt = transformer(layers)
    found: dict[str, Any] = {"layers": layers, "nodes": len(graph.nodes), "trace": time.perf_counter() - began}

    def timed(name: str, stage: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return stage(*args, **options)
            finally:
                found[name] = found.get(name, 0.0) + time.perf_counter() - start

        return run

    for name in STAGES:
        owner = compiler if hasattr(compiler, name) else compiler.Emitter
        setattr(owner, name, timed(name, getattr(owner, name)))
    began, spent = time.perf_counter(), sum(os.times()[:4])
    module = gradc.compile(graph, wrt=wrt, target=target)
    found["compile"] = time.perf_counter() - began
    found["processor"] = sum(os.times()[:4]) - spent
    programs = [executable.program for executable in module.executables.values()]
    found["steps"] = sum(len(program.steps) for program in programs)
    found["kernels"] = len({kernel.name for program in programs for kernel in program.kernels})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--target", default="cpu", choices=("cpu", "numpy"))
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a process of its own asks for this
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.one, given.target)))
        return
    rows = []
    columns = ("layers", "nodes", "steps", "kernels", "trace", *STAGES, "compile", "processor")
    print(" ".join(f"{name:>15}" for name in columns))
    for layers in given.layers:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.compile_time", "--one", str(layers), "--target", given.target]
            environment = {**os.environ, "GRADC_CACHE_DIR": folder}
            rows.append(json.loads(subprocess.check_output(command, env=environment, text=True)))
        print(
            " ".join(
                f"{value:15.2f}" if isinstance(value := rows[-1].get(name, 0), float) else f"{value:15}"
                for name in columns
            )
        )
    if given.json:
        given.json.write_text(
            json.dumps({"date": f"{datetime.date.today()}", "target": given.target, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
