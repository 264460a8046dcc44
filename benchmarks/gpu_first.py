"""First light on a GPU: four families of kernels, forward and backward, against float64, in less than two minutes.

``python -m benchmarks.gpu_first --out FILE`` runs modules of ``errors="sync"``, so that a fault names its kernel, then
calls with numbers that change, and a capture by ``torch.cuda.graph`` where torch has a GPU.  The file is written anew
after each of them.  The exit status is 1 if a result was wrong or a call failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate

Array = np.ndarray[Any, Any]
Move = Callable[[Array], Any]
TOLERANCE = 2e-5
"""Of f32 results, relative to the largest element in float64."""
FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, str], tuple[str, ...], dict[str, int]]] = {
    "layer norm": (
        lambda x, g, b: ops.layer_norm(x, (1024,), g, b),
        {"x": "f32[N,1024]", "g": "f32[1024]", "b": "f32[1024]"},
        ("x", "g", "b"),
        {"N": 700},
    ),
    "embedding": (
        lambda t, w: ops.embedding(t, w),
        {"t": "i64[N]", "w": "f32[V,64]"},
        ("w",),
        {"N": 20_000, "V": 3000},
    ),
    "softmax": (lambda x: ops.softmax(x), {"x": "f32[N,3000]"}, ("x",), {"N": 200}),
    "grid sample": (
        lambda x, g: ops.grid_sample(x, g),
        {"x": "f32[B,4,H,W]", "g": "f32[B,h,w,2]"},
        ("x", "g"),
        {"B": 2, "H": 40, "W": 50, "h": 30, "w": 20},
    ),
}
"""Name -> (function, types, inputs with a gradient, sizes)."""


def drawn(graph: Any, sizes: dict[str, int], rng: np.random.Generator) -> dict[str, Array]:
    """Inputs of a graph: uniform numbers, indices below V."""
    found = {}
    for node in graph.inputs:
        shape, dtype = node.type.concrete(sizes), node.dtype.np
        integers = node.dtype.is_integer
        found[graph.input_name(node)] = (
            rng.integers(0, sizes["V"], shape) if integers else rng.uniform(-1, 1, shape)
        ).astype(dtype)
    return found


def error_of(found: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(found - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-30))


def family(name: str, to_device: Move, to_host: Move, shrink: int = 1) -> float:
    """The error of value and gradients of one family.

    :param shrink: divides its sizes.
    """
    function, types, wrt, full = FAMILIES[name]
    sizes = {name: max(size // shrink, 2) for name, size in full.items()}
    graph = gradc.trace(function, **types)
    arrays, rng = drawn(graph, sizes, np.random.default_rng(0)), np.random.default_rng(1)
    module = gradc.compile(graph, wrt=list(wrt), target="cuda", errors="sync")
    y, residuals = module.forward(**{key: to_device(array) for key, array in arrays.items()})
    dy = rng.standard_normal(y.shape).astype(np.float32)
    gradients = module.backward(residuals, to_device(dy))
    (output, _), *_ = graph.outputs
    exact = interp.run(differentiate(graph, wrt), {**arrays, f"d.{output}": dy}, precision="f64")
    value = interp.run(graph, arrays, precision="f64")[output]
    pairs = [(y, value), *((gradients[key], exact[f"d.{key}"]) for key in wrt)]
    return max(error_of(to_host(a).astype(np.float64), np.asarray(b, np.float64)) for a, b in pairs)


def numbers(to_device: Move, to_host: Move) -> float:
    """The error of calls that follow each other at once with another number each."""
    module = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x = to_device(np.ones(1000, np.float32))
    results = [module(x=x, a=i / 4) for i in range(20)]
    module.synchronize()
    return max(error_of(to_host(y), np.full(1000, i / 4)) for i, y in enumerate(results) if i)


def captured_by_torch() -> float:
    """The error of a replay of ``torch.cuda.graph`` that began without waiting for the call before it."""
    import torch

    graph = gradc.trace(lambda t, w: ops.softmax(ops.embedding(t, w)), t="i64[N]", w="f32[V,D]")
    module = gradc.compile(graph, target="cuda")
    t, w = torch.arange(64, device="cuda"), torch.randn(64, 32, device="cuda")
    y = module(t=t, w=w)
    space = torch.empty(module.workspace_size(N=64, V=64, D=32), dtype=torch.uint8, device="cuda")
    capture = torch.cuda.CUDAGraph()
    with torch.cuda.graph(capture):
        module.forward(t=t, w=w, out={"y": y}, workspace=space)
    w.copy_(torch.randn(64, 32, device="cuda"))
    capture.replay()
    torch.cuda.synchronize()
    return error_of(y.double().cpu().numpy(), torch.softmax(w.double(), -1).cpu().numpy())


def checks(to_device: Move, to_host: Move, shrink: int = 1) -> Iterator[tuple[str, Callable[[], float]]]:
    """(name, what gives its error)."""
    for name in FAMILIES:
        yield name, lambda name=name: family(name, to_device, to_host, shrink)  # type: ignore[misc]
    yield "numbers that change", lambda: numbers(to_device, to_host)


def run(todo: Iterator[tuple[str, Callable[[], float]]], out: Path | None = None) -> list[dict[str, Any]]:
    """A record of each check; one that fails is written down, and the next is run."""
    records: list[dict[str, Any]] = []
    for name, check in todo:
        began = time.monotonic()
        record: dict[str, Any] = {"name": name}
        try:
            record["error"] = check()
            record["right"] = record["error"] <= TOLERANCE
        except Exception as error:  # whatever a first contact with a device brings
            record |= {"right": False, "text": f"{type(error).__name__}: {error}"[:2000]}
        record["seconds"] = round(time.monotonic() - began, 1)
        records.append(record)
        print(json.dumps(record), flush=True)
        if out is not None:
            out.write_text(json.dumps(records, indent=1) + "\n")
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON to write")
    options = parser.parse_args()

    def todo() -> Iterator[tuple[str, Callable[[], float]]]:
        import cupy

        yield from checks(cupy.asarray, cupy.asnumpy)
        yield "torch.cuda.graph", captured_by_torch

    return 0 if all(record["right"] for record in run(todo(), options.out)) else 1


if __name__ == "__main__":
    sys.exit(main())
