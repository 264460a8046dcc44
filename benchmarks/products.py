"""``python -m benchmarks.products``: matrix products of ours, of torch and of NumPy, in one process and in turn.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.products [PATTERN ...] [--dtypes f32,f64] [--threads 1] [--seconds 0.6]
    [--peers torch,numpy] [--json]

A product is written m x k x n, after it its form: ``nn`` is the forward (a[m,k] b[k,n]), ``nt`` that with b stored as
its transpose (a Linear's weight), ``da`` and ``db`` the products of its backward (g[m,n] b^T and a^T g).  Every
contestant runs each product in turn, until the time is spent; a time is the minimum of its runs (the median stands
beside it in the JSON), of one thread the processor's time, so that what others run beside us counts little; and the
share is ours of the faster peer's speed: 1 is as fast.  The arrays of one product stay
where they are: what fits a cache is in it.  ``--json`` writes benchmarks/results/products-PROCESSOR.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .__main__ import processor, words_of

Array = np.ndarray[Any, Any]
DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}
FORMS = ("nn", "nt", "da", "db")


@dataclass(frozen=True)
class Shape:
    """a[batch,m,k] b[batch,k,n]."""

    m: int
    k: int
    n: int
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}" + (f"*{self.batch}" if self.batch > 1 else "")

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


SHAPES = (
    *(Shape(n, n, n) for n in (512, 1024)),
    Shape(2048, 512, 512),
    Shape(512, 6697, 128),
    Shape(2048, 1024, 4096),
    Shape(2048, 128, 384),
    Shape(64, 64, 64, 256),
    Shape(197, 64, 197, 96),
    Shape(65536, 64, 16),
    Shape(16, 65536, 64),
    *(Shape(m, 1024, 4096) for m in (1, 16)),
    *(Shape(256, k, 256) for k in (8, 64, 4096, 65536)),
)


def operands(shape: Shape, form: str, dtype: Any) -> tuple[Array, Array]:
    """Both operands of a form, views of contiguous arrays."""
    random = np.random.default_rng(0)

    def stored(rows: int, cols: int) -> Array:
        return random.standard_normal((shape.batch, rows, cols), np.float32).astype(dtype)

    m, k, n = shape.m, shape.k, shape.n
    return {
        "nn": lambda: (stored(m, k), stored(k, n)),
        "nt": lambda: (stored(m, k), stored(n, k).swapaxes(1, 2)),
        "da": lambda: (stored(m, n), stored(k, n).swapaxes(1, 2)),
        "db": lambda: (stored(m, k).swapaxes(1, 2), stored(m, n)),
    }[form]()


def contestants(a: Array, b: Array, peers: list[str]) -> dict[str, Callable[[], Any]]:
    """Who -> a product into memory of its own, after which nothing is allocated."""
    from gradc.runtime.host import pool

    shape = (a.shape[0], a.shape[1], b.shape[2])
    is_bf16 = a.dtype == DTYPES["bf16"]
    ours, theirs = np.empty(shape, np.float32 if is_bf16 else a.dtype), np.empty(shape, a.dtype)
    found: dict[str, Callable[[], Any]] = {"ours": pool.prepared_matmul(a, b, ours)}
    if "torch" in peers:
        import torch

        x, y = (
            torch.from_numpy(v.view(np.uint16)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(v) for v in (a, b)
        )
        out = torch.empty(shape, dtype=x.dtype)
        multiply: Callable[..., Any] = torch.bmm
        if shape[0] == 1:
            x, y, out, multiply = x[0], y[0], out[0], torch.mm
        found["torch"] = lambda: multiply(x, y, out=out)
    if "numpy" in peers and not is_bf16:
        p, q, to = (a[0], b[0], theirs[0]) if shape[0] == 1 else (a, b, theirs)
        found["numpy"] = lambda: np.matmul(p, q, out=to)
    for run in found.values():
        run()
    if "numpy" in found:
        bound = 1e-4 if a.dtype == np.float32 else 1e-12
        assert np.allclose(ours, theirs, atol=bound * math.sqrt(a.shape[2]), rtol=bound)
    return found


def times_of(runs: dict[str, Callable[[], Any]], seconds: float, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Times of each, one after the other until the time is spent and each has had seven."""
    times: dict[str, list[float]] = {who: [] for who in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 7:
        for who, run in runs.items():
            run()  # what another has left in the caches
            began = clock()
            run()
            times[who].append(clock() - began)
    return times


def measured(
    shape: Shape, form: str, dtype: str, peers: list[str], seconds: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """A record: microseconds and GFLOPS of each, and our share of the faster peer's speed."""
    times = times_of(contestants(*operands(shape, form, DTYPES[dtype]), peers), seconds, clock)
    least = {who: min(t) for who, t in times.items()}
    others = [t for who, t in least.items() if who != "ours"]
    return {
        "product": str(shape),
        "form": form,
        "dtype": dtype,
        "us": {who: t * 1e6 for who, t in least.items()},
        "median us": {who: statistics.median(t) * 1e6 for who, t in times.items()},
        "gflops": {who: shape.flops / t / 1e9 for who, t in least.items()},
        "share": min(others) / least["ours"] if others else None,
    }


def write(records: list[dict[str, Any]], threads: int) -> Path:
    """The records as JSON, named by processor."""
    path = Path(__file__).parent / "results" / f"products-{words_of(processor())}.json"
    about = {"processor": processor(), "threads": threads, "numpy": np.__version__}
    path.write_text(json.dumps({**about, "products": records}, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("patterns", nargs="*", help="products whose name, as 512x512x512:nn:f32, contains one of these")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--peers", default="torch,numpy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6, help="per product")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/products-PROCESSOR.json")
    given = parser.parse_args()
    peers = [peer for peer in given.peers.split(",") if peer]
    if "numpy" in peers and os.environ.get("OPENBLAS_NUM_THREADS") != str(given.threads):
        parser.error(f"NumPy's BLAS takes its threads when it is loaded: set OPENBLAS_NUM_THREADS={given.threads}")
    if "torch" in peers:
        import torch

        torch.set_num_threads(given.threads)
    from gradc.runtime.host import pool

    pool.set_num_threads(given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    records = []
    print(
        f"{'product':<24}{'dtype':<6}{'form':<6}"
        + "".join(f"{who:>9}" for who in ("ours", *peers))
        + "    share  (GFLOPS)"
    )
    for shape in SHAPES:
        for dtype in given.dtypes.split(","):
            for form in FORMS:
                if given.patterns and not any(p in f"{shape}:{form}:{dtype}" for p in given.patterns):
                    continue
                record = measured(shape, form, dtype, peers, given.seconds, clock)
                records.append(record)
                speeds = "".join(
                    f"{record['gflops'][who]:>9.1f}" for who in ("ours", *peers) if who in record["gflops"]
                )
                share = f"{record['share']:>9.2f}" if peers else ""
                print(f"{record['product']:<24}{dtype:<6}{form:<6}{speeds}{share}", flush=True)
    if given.json:
        print(write(records, given.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
