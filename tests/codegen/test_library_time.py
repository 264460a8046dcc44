"""The predicted time of cuBLAS's products, against those that a device was measured with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradc.codegen.cuda.actions import Part, Product, Strided
from gradc.codegen.cuda.library_products import library_of
from gradc.codegen.cuda.library_time import is_aligned, library_seconds
from gradc.ir.types import DTYPES
from gradc.targets.devices import gpu_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TIMES = json.loads((RESULTS / "gpu-nvidia-h200-2026-11-28-tiles.json").read_text())["gemm"]


def strided(dtype: str, *shape: int, order: str = "n", leading: int = 0, root: str = "a") -> Strided:
    """Matrices of a batch in row-major order, or (``"t"``) in column-major order."""
    *batch, rows, columns = shape
    held = (rows, columns) if order == "n" else (columns, rows)
    step = max(leading, held[1])
    strides = [step * held[0] if count > 1 else 0 for count in batch]
    inner = (step, 1) if order == "n" else (1, step)
    count = int(np.prod(batch, dtype=np.int64)) * held[0] * step
    return Strided(Part(root, 0, count, DTYPES[dtype].np), shape, (*strides, *inner))


def product(sizes: tuple[int, int, int, int], kinds: tuple[str, str], orders: str, leading: Any = (0, 0, 0)) -> Product:
    batch, m, n, k = sizes
    read, written = kinds
    a = strided(read, batch, m, k, order=orders[0], leading=leading[0])
    b = strided(read, batch, k, n, order=orders[1], leading=leading[1], root="b")
    return Product(a, b, strided(written, batch, m, n, leading=leading[2], root="out"), 0)


@pytest.mark.parametrize("name", TIMES)
def test_an_h200_took_within_a_tenth_of_it(name: str) -> None:
    """``qk 96x1024x1024x64 nt bf16->f32``: a batch (or none), m, n, k, and which operands are transposed."""
    text = name.replace("8192^3", "8192x8192x8192")
    sizes = tuple(map(int, re.search(r"\d+(x\d+)+", text).group().split("x")))  # type: ignore[union-attr]
    orders, (read, written) = re.search(r" ([nt]{2}) ", text).group(1), text.split()[-1].split("->")  # type: ignore[union-attr]
    library = library_of(product((1,) * (4 - len(sizes)) + sizes, (read, written), orders))  # type: ignore[arg-type]
    assert library is not None and is_aligned(library)
    assert library_seconds(library, gpu_of("H200")) == pytest.approx(TIMES[name]["us"] * 1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("orders", "sizes", "leading", "taken"),
    [
        ("nt", (1, 744, 50257, 768), (0, 0, 50264), 0.0),  # logits: cutlass_75 align1
        ("nn", (1, 744, 768, 50257), (50264, 0, 0), 0.0),  # of what they are made: align1
        ("tn", (1, 50257, 768, 744), (50264, 0, 0), 1.0),  # of the weight: cutlass_80 align8
        ("nt", (1, 744, 50256, 768), (0, 0, 50264), 1.0),
        ("nt", (1, 744, 50256, 768), (0, 0, 50257), 0.0),
        ("nn", (1, 744, 768, 50256), (50261, 0, 0), 0.0),
    ],
)
def test_which_rows_fast_kernels_take(orders: str, sizes: Any, leading: Any, taken: float) -> None:
    """The first three as an H200 had them: ``linear_cross_entropy`` in ``gpu-nvidia-h200-2026-11-28.json``."""
    library = library_of(product(sizes, ("bf16", "bf16"), orders, leading))
    assert library is not None and is_aligned(library) == bool(taken)
    plain = library_of(product(sizes, ("f32", "f32"), orders, leading))
    assert plain is not None and is_aligned(plain)


def test_what_is_added_to_is_read_too() -> None:
    sizes = (1, 8192, 768, 64)
    one = product(sizes, ("bf16", "f32"), "nn")
    first, more = (library_of(Product(one.a, one.b, one.out, 0, add)) for add in (False, True))
    assert first is not None and more is not None
    gpu = gpu_of("H200")
    taken = library_seconds(more, gpu) - library_seconds(first, gpu)
    assert taken == pytest.approx(8192 * 768 * 4 / gpu.bandwidth)
