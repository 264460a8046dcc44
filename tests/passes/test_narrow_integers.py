"""narrow_integers: what is known of integers, and what it costs to be wrong about it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.narrow_integers import narrow_integers, ranges_of

PLACES = """program @p {
  input x: f32[ROWS,5]
  temp t: i32[ROWS]
  output y: i64[ROWS]
  kernel @first_aaaaaa rows(n: ROWS) cols(c: 5) {
    phase
    %0 = load x[n, c] : f32
    %1 = argmax_cols %0 {empty="error"} : i64
    %2 = const {value=FACTOR} : i64
    %3 = mul %1, %2 : i64
    %4 = index n + 3 : i64
    %5 = const {value=1} : i64
    %6 = bitwise_and %4, %5 : i64
    %7 = add %3, %6 : i64
    %8 = cast %7 {dtype=i32} : i32
    store t[n] <- %8 : i32
  }
  kernel @second_aaaaaa rows(i: ROWS) cols() {
    %0 = load t[i] : i32
    %1 = cast %0 {dtype=i64} : i64
    %2 = index i : i64
    %3 = const {value=7} : i64
    %4 = mul %2, %3 : i64
    %5 = add %1, %4 : i64
    store y[i] <- %5 : i64
  }
  return y=y
}
"""


@pytest.mark.parametrize(
    "factor, dtype",
    [(31, "i8"), (32, "i16"), (-32, "i8"), (-33, "i16"), (8191, "i16"), (8192, "i32"), (1 << 40, "i32")],
)
def test_a_temp_has_the_bytes_that_its_values_need(factor: int, dtype: str) -> None:
    """4 * 31 + 1 = 125, 4 * 32 + 1 = 129, -4 * 32 = -128; 2^40 wraps in the cast, of which nothing is known."""
    program = parse_program(PLACES.replace("ROWS", "9").replace("FACTOR", f"({factor})" if factor < 0 else str(factor)))
    made = narrow_integers(program)
    verify_program(made)
    assert made.buffer["t"].type.dtype.name == dtype
    given = {"x": np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)}
    got, want = (interp.run(p, given)["y"] for p in (made, program))
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, want)


def test_sizes_that_are_symbols_say_nothing() -> None:
    program = parse_program(PLACES.replace("ROWS", "N").replace("FACTOR", "3"))
    second = program.kernels[1]
    assert "%2" not in ranges_of(second) and "%4" not in ranges_of(second)
    made = narrow_integers(program)
    verify_program(made)
    assert made.buffer["t"].type.dtype.name == "i32"
    assert [s.dtype.name for s in made.kernels[1].body if s.op == "index" and s.dtype is not None] == ["i64"]


def test_products_beyond_32_bits_stay_64_and_so_does_what_they_alone_are_made_of() -> None:
    program = parse_program(PLACES.replace("ROWS", str(1 << 30)).replace("FACTOR", "1"))
    made = narrow_integers(program)
    dtypes = {s.op: s.dtype.name for s in made.kernels[1].body if s.dtype is not None}
    assert dtypes["index"] == dtypes["mul"] == "i64"
    verify_program(made)


@pytest.mark.parametrize(
    "index",
    [
        lambda i: ops.cast(ops.minimum(i * 2**31, 1), "i32"),
        lambda i: ops.cast((i * 2**31) // 2**31, "i32"),
        lambda i: ops.cast((i * 2654435761) % 16, "i32"),
        lambda i: ops.cast(ops.maximum(i - 2**31, 3), "i32"),
        lambda i: ops.cast(ops.bitwise_and(i * 2**31 + i, ops.cast(7, "i64")), "i32"),
    ],
)
def test_small_values_of_what_does_not_fit(index: Any) -> None:
    graph = gradc.trace(lambda x: x + index(ops.iota((16,), dtype="i64")), x="i32[16]")
    x = np.arange(16, dtype=np.int32)
    got = gradc.compile(graph, [], target="cuda-sim")(x=x)
    np.testing.assert_array_equal(got, gradc.compile(graph, [], target="numpy")(x=x))


def test_the_text_is_the_same_in_every_process() -> None:
    """Strings have another hash in each: casts stand in the order of the operands that they are for."""
    script = (
        "import gradc; from gradc import ops; from gradc.compiler import run_passes;"
        "from gradc.module.options import Options;"
        "graph = gradc.trace(lambda x: ops.unpack(x, dtype='i4'), x='u8[N,3]');"
        "print(run_passes(graph, (), Options(), 'cuda')[2]['forward'])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in "0123"
    }
    assert len(texts) == 1 and "cast" in texts.pop()
