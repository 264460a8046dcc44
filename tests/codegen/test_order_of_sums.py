"""The order of a sum or product of floats is stated by its kernel: compilers give the same bits at all levels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops

COMPILERS = [pytest.param(c, marks=[] if shutil.which(c) else pytest.mark.skip(f"no {c}")) for c in ("gcc", "clang")]
LEVELS = ("0", "2")
COLUMNS = (1, 7, 8, 31, 33, 100, 129, 2047, 5000)  # below, at and above vectors, accumulators and blocks
KINDS: dict[str, Callable[..., Any]] = {
    "sum": lambda x: ops.sum(x, axis=-1),
    "mean of squares": lambda x: ops.mean(x * x, axis=-1),
    "prod": lambda x: ops.prod(x * 0.01 + 1.0, axis=-1),
    "of all": lambda x: ops.sum(x * x),
    "of rows": lambda x: ops.sum(x, axis=0),
    "two in a pass": lambda x: ops.sum(x, axis=-1) * ops.sum(x * x, axis=-1),
    "beside a maximum": lambda x: ops.sum(x, axis=-1) + ops.max(x, axis=-1),
    "of a slice": lambda x: ops.sum(ops.pad(x, ((0, 0), (3, 2))), axis=-1),
    "of zeros of both signs": lambda x: 1.0 / ops.max(x * 0.0, axis=-1),
    "least of zeros": lambda x: 1.0 / ops.min(x * 0.0, axis=-1),
    "beside a place": lambda x: ops.sum(x, axis=-1) + ops.argmax(x, axis=-1).astype(x.dtype),
    "of gathered values": lambda x: ops.sum(ops.gather(x, ops.argmax(x * 0.0, axis=0), axis=0), axis=-1),
    "scan": lambda x: ops.cumsum(x, axis=-1),
}


NAMED = {name.replace(" ", "_"): function for name, function in KINDS.items()}


def _bits(dtype: str, compiler: str, level: str) -> dict[tuple[str, int], bytes]:
    with knobs.CC.set(compiler), knobs.OPTIMIZE.set(level):
        function = gradc.trace(lambda x: {name: f(x) for name, f in NAMED.items()}, x=f"{dtype}[N,D]")
        forward = gradc.compile(function, target="cpu").forward
    found = {}
    for columns in COLUMNS:
        x = np.random.default_rng(columns).normal(size=(3, columns)).astype({"f32": "f4", "f64": "f8"}[dtype])
        for name, value in forward.run(x=x).items():
            found[name, columns] = np.asarray(value).tobytes()
    return found


@pytest.mark.compiles
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sums_have_the_same_bits_at_every_level(dtype: str, compiler: str) -> None:
    wanted = _bits(dtype, "gcc" if shutil.which("gcc") else compiler, "2")
    for level in LEVELS:
        got = _bits(dtype, compiler, level)
        assert [at for at in wanted if got[at] != wanted[at]] == [], level
