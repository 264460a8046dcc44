"""``templates/cuda/tensor_cores.h`` in cuda-sim: products of fragments against exact arithmetic, loads and copies
against NumPy, attention against float64; each fault of a pipeline of copies seeded and caught; and what NVRTC makes of
the same texts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import long_tests
import ml_dtypes
import numpy as np
import pytest
import skips
from attention_tiles import attention, entries, shared_bytes, with_headers

from gradc.errors import GradcError, SimulationFault
from gradc.runtime.cuda.nvrtc import compile_cuda, find_nvrtc
from gradc.runtime.simulator.compile import SimLibrary, compile_sim

simulated = skips.simulated()
MODES = pytest.mark.parametrize("check", [False, True], ids=["plain", "check"])
BF16 = ml_dtypes.bfloat16


@functools.cache
def library(text: str, check: bool) -> SimLibrary:
    return compile_sim(with_headers(text), check=check)


def run(text: str, args: list[Any], written: tuple[int, ...], *, check: bool = True, **options: Any) -> None:
    block, shared = options.pop("block", 32), options.pop("shared", 0)
    library(text, check).launch("f", (1, 1, 1), (block, 1, 1), shared, args, written=written, **options)


# -- products ----------------------------------------------------------------------------------------------------------

PRODUCT = """
extern "C" __global__ void f(const u32 *a, const u32 *b, CTYPE *d) {
  const int lane = threadIdx.x;
  u32 x[4]; CTYPE y[4];
  for (int i = 0; i < 4; i++) x[i] = a[4 * lane + i], y[i] = d[4 * lane + i];
  NAME(y, x, b[2 * lane], b[2 * lane + 1]);
  for (int i = 0; i < 4; i++) d[4 * lane + i] = y[i];
}
"""
# name -> (elements of a register, their dtype, the result's)
PRODUCTS: dict[str, tuple[int, Any, Any]] = {
    "mma_m16n8k16_bf16": (2, np.dtype(BF16), np.dtype(np.float32)),
    "mma_m16n8k16_f16": (2, np.dtype(np.float16), np.dtype(np.float32)),
    "mma_m16n8k8_tf32": (1, np.dtype(np.float32), np.dtype(np.float32)),
    "mma_m16n8k32_s8": (4, np.dtype(np.int8), np.dtype(np.int32)),
}


def fragments(per: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each lane and element of its registers the flat position in a [16, 8 per], b [8 per, 8] and d [16, 8], as the
    figures of PTX's chapter on mma have them: groupID and threadID_in_group.
    """
    depth = 8 * per
    group, thread = np.divmod(np.arange(32), 4)
    of_a, of_b, of_d = (np.zeros((32, n), int) for n in (4 * per, 2 * per, 4))
    for i in range(4 * per):
        row = group + (8 if i // per in (1, 3) else 0)
        of_a[:, i] = row * depth + thread * per + i % per + (4 * per if i // per >= 2 else 0)
    for i in range(2 * per):
        of_b[:, i] = (thread * per + i % per + (4 * per if i >= per else 0)) * 8 + group
    for i in range(4):
        of_d[:, i] = (group + (8 if i >= 2 else 0)) * 8 + thread * 2 + i % 2
    return of_a, of_b, of_d


def toward_zero(x: Fraction) -> np.float32:
    """The nearest f32 that is not further from 0."""
    y = np.float32(float(x))
    return np.nextafter(y, np.float32(0)) if abs(Fraction(float(y))) > abs(x) else y


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, spread: int) -> np.ndarray:
    """Random values over some powers of two, zeros and subnormals among them."""
    if dtype == np.int8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-spread, spread + 1, shape)).astype(dtype)
    x.flat[rng.integers(0, x.size, 5)] = 0
    x.flat[rng.integers(0, x.size, 3)] = np.ldexp(1.0, -24) if dtype == np.float16 else np.ldexp(1.0, -40)
    return x


def multiplied(name: str, a: np.ndarray, b: np.ndarray, d: np.ndarray, check: bool = True) -> np.ndarray:
    per, _, result = PRODUCTS[name]
    of_a, of_b, of_d = fragments(per)
    text = PRODUCT.replace("NAME", name).replace("CTYPE", "i32" if result == np.int32 else "f32")
    given = d.reshape(-1)[of_d].copy()
    x, y = (np.ascontiguousarray(m.reshape(-1)[at]).view(np.uint32) for m, at in ((a, of_a), (b, of_b)))
    run(text, [x, y, given], (2,), check=check, initialised={2: True})
    made = np.zeros(128, result)
    made[of_d] = given
    return made.reshape(16, 8)


@simulated
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("spread", "check"), [(0, False), (6, True)], ids=["plain", "check"])
def test_products_are_exact_and_rounded_toward_zero_once(name: str, spread: int, check: bool) -> None:
    per, dtype, result = PRODUCTS[name]
    rng = np.random.default_rng(per + spread)
    a, b = values(rng, (16, 8 * per), dtype, spread), values(rng, (8 * per, 8), dtype, spread)
    d = rng.integers(-(2**31), 2**31, (16, 8)).astype(result) if result == np.int32 else values(rng, (16, 8), result, 9)
    made = multiplied(name, a, b, d, check)
    if name == "mma_m16n8k8_tf32":  # of an operand the last 13 bits do not count
        assert np.any(a.view(np.uint32) & 0x1FFF)
        a, b = ((m.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32) for m in (a, b))
    for i, j in np.ndindex(16, 8):
        terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j], strict=True)]
        terms, size = [Fraction(float(d[i, j])), *terms], abs(float(d[i, j])) + sum(abs(float(t)) for t in terms)
        exact, found = sum(terms, Fraction(0)), functools.reduce(lambda x, y: x + float(y), terms, 0.0)
        if result == np.int32:
            assert int(made[i, j]) == (int(exact) + 2**31) % 2**32 - 2**31
            continue
        assert all(Fraction(float(t)) == t for t in terms)  # products are exact in f64
        assert abs(Fraction(found) - exact) <= 2.0**-48 * size
        assert made[i, j] == toward_zero(Fraction(found))


@simulated
def test_products_beyond_f32_and_of_no_numbers() -> None:
    """What is no number reaches the elements of its row or column, and an overflow is infinite."""
    a, b, d = np.ones((16, 16), BF16), np.ones((16, 8), BF16), np.zeros((16, 8), np.float32)
    a[3, 5], a[4, 0], a[6] = np.nan, np.inf, 2.0**127
    b[0, 2] = 0
    made = multiplied("mma_m16n8k16_bf16", a, b, d)
    assert np.isnan(made[3]).all() and np.isnan(made[4, 2]) and np.isinf(np.delete(made[4], 2)).all()
    assert np.isinf(made[6]).all() and (made[0] == [16, 16, 15, 16, 16, 16, 16, 16]).all()
    a16 = np.array([[np.inf, np.nan, 65504, 2.0**-24] * 4] * 16, np.float16)
    ones = np.zeros((16, 8), np.float16)
    np.fill_diagonal(ones, 1)
    made = multiplied("mma_m16n8k16_f16", np.where(np.isfinite(a16), a16, 0).astype(np.float16), ones, d)
    assert made[0].tolist() == [0, 0, 65504, 2.0**-24] * 2
    assert np.isnan(multiplied("mma_m16n8k16_f16", a16, ones, d)).all()  # infinity times 0


# -- loads of fragments ------------------------------------------------------------------------------------------------

LOAD = """
extern "C" __global__ void f(const u16 *x, u32 *y) {
  __shared__ __align__(16) u16 tile[32 * 8];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = x[i];
  __syncthreads();
  u32 r[COUNT];
  ldmatrix_xCOUNTSUFFIX(r, threadIdx.x < 8 * COUNT ? tile + 8 * (31 - threadIdx.x) : tile + 1);
  for (int i = 0; i < COUNT; i++) y[COUNT * threadIdx.x + i] = r[i];
}
"""


@simulated
@MODES
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_by_rows_or_columns(count: int, transposed: bool, check: bool) -> None:
    """Rows lie in descending order here; the pointers of lanes without a row may be anything."""
    x = np.random.default_rng(0).integers(0, 2**16, (32, 8)).astype(np.uint16)
    y = np.zeros((32, count, 2), np.uint16)
    run(LOAD.replace("COUNT", str(count)).replace("SUFFIX", "_trans" if transposed else ""), [x, y], (1,), check=check)
    for lane, j in np.ndindex(32, count):
        matrix = x[::-1][8 * j : 8 * j + 8]
        line = (matrix.T if transposed else matrix)[lane // 4]
        assert y[lane, j].tolist() == line[2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()


# -- copies ------------------------------------------------------------------------------------------------------------

COPY = """
extern "C" __global__ void f(const u8 *x, u8 *y, int valid) {
  extern __shared__ __align__(16) u8 s[];
  const int i = BYTES * threadIdx.x;
  for (int part = 0; part < 3; part++) {
    cp_asyncBYTES(s + BYTES * 32 * part + i, x + BYTES * 32 * part + i, part == 1 ? valid : BYTES);
    cp_async_commit();
  }
  cp_async_wait<2>();
  __syncthreads();
  for (int j = 0; j < BYTES; j++) y[i + j] = s[BYTES * 31 - i + j];
  cp_async_wait<0>();
  __syncthreads();
  for (int part = 1; part < 3; part++)
    for (int j = 0; j < BYTES; j++) y[BYTES * 32 * part + i + j] = s[BYTES * 32 * part + i + j];
}
"""


@simulated
@MODES
@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_copies_arrive_group_by_group(nbytes: int, check: bool) -> None:
    """The first group is read while two are in flight; what is not valid becomes zeros."""
    x = np.random.default_rng(0).integers(1, 256, (3, 32, nbytes)).astype(np.uint8)
    for valid in (0, 3, nbytes):
        y = np.zeros_like(x)
        run(COPY.replace("BYTES", str(nbytes)), [x, y, valid], (1,), check=check, shared=x.nbytes)
        assert (y[0] == x[0, ::-1]).all() and (y[2] == x[2]).all()
        assert (y[1, :, :valid] == x[1, :, :valid]).all() and not y[1, :, valid:].any()


@simulated
def test_bytes_arrive_no_sooner_than_at_the_wait() -> None:
    """Without checking, too: what is read before is not there."""
    text = COPY.replace("31 - i", "0 + i").replace("BYTES", "4").replace("cp_async_wait<2>();", "cp_async_wait<3>();")
    x, y = np.ones((3, 32, 4), np.uint8), np.zeros((3, 32, 4), np.uint8)
    run(text, [x, y, 4], (1,), check=False, shared=x.nbytes)
    assert (y[0] == 255).all() and (y[1:] == 1).all()


POWERS = 'extern "C" __global__ void f(f32 *x) { x[threadIdx.x] = exp2_approx(x[threadIdx.x]); }'


@simulated
@MODES
def test_powers_of_two_are_flushed_to_zero(check: bool) -> None:
    """ex2.approx.ftz has no subnormal results."""
    x = np.float32([-127, -126.5, -126, -149, -np.inf, np.inf, np.nan, 0, 128, 127, -1, 1e-40])
    run(POWERS, [x], (0,), check=check, block=len(x), initialised={0: True})
    expected = np.float32([0, 0, 2.0**-126, 0, 0, np.inf, np.nan, 1, np.inf, 2.0**127, 0.5, 1])
    np.testing.assert_array_equal(x, expected)


# -- attention ---------------------------------------------------------------------------------------------------------


Arrays = dict[str, np.ndarray]


def exact_attention(q: Any, k: Any, v: Any, dy: Any, causal: bool) -> tuple[Arrays, Arrays]:
    """Value and gradients in float64, and how far from these elements may be."""
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dy @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[2])
    exact = {"y": p @ v, "dv": p.swapaxes(1, 2) @ dy, "dk": ds.swapaxes(1, 2) @ q, "dq": ds @ k}
    # What a text may be off by that rounds p, ds and results to bf16, 2^-9 of each, and computes in f32, 2^-18 of the
    # terms of dp and delta: twice that.
    slopes = np.abs(dy) @ np.abs(v.swapaxes(1, 2))
    slopes = p * (slopes + (p * slopes).sum(-1, keepdims=True)) / np.sqrt(q.shape[2])
    off_p, off_ds = 2.0**-8 * p, 2.0**-8 * np.abs(ds) + 2.0**-17 * slopes
    errors = {"y": off_p @ np.abs(v), "dv": off_p.swapaxes(1, 2) @ np.abs(dy)}
    errors |= {"dk": off_ds.swapaxes(1, 2) @ np.abs(q), "dq": off_ds @ np.abs(k)}
    return exact, {name: errors[name] + 2.0**-8 * np.abs(x) for name, x in exact.items()}


@long_tests.values
@simulated
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("S", "check"), [(200, False), (1, True), (77, True), (128, True), (200, True)])
def test_attention_and_its_gradients(S: int, causal: bool, check: bool) -> None:
    """Every element within the error of the roundings to bf16 that the text has, whatever order warps and blocks run
    in: these leave every bit as it is.
    """
    heads, d, rng = 2, 64, np.random.default_rng(S)
    simulator = compile_sim(attention(entries(64, 64, d, causal)), check=check)
    q, k, v, dy = (rng.standard_normal((heads, S, d)).astype(BF16) for _ in range(4))
    (exact, allowed), scale, blocks = exact_attention(q, k, v, dy, causal), 1 / np.sqrt(d), heads * -(-S // 64)
    found: list[dict[str, np.ndarray]] = []
    for seed in (None, 3):
        y, dq, dk, dv = (np.zeros((heads, S, d), np.uint16) for _ in range(4))
        lse = np.zeros((heads, S), np.float32)

        def launch(name: str, *args: Any, written: tuple[int, ...], seed: int | None = seed) -> None:
            given = [a.view(np.uint16) if isinstance(a, np.ndarray) and a.dtype == BF16 else a for a in args]
            shape = (blocks, 1, 1), (128, 1, 1), shared_bytes(name, 64, 64, d)
            simulator.launch(name, *shape, given, written=written, seed=seed)

        numbers = (S, float(scale * np.log2(np.e)))
        launch("forward", q, k, v, y, lse, *numbers, written=(3, 4))
        delta = (exact["y"] * dy.astype(np.float64)).sum(-1).astype(np.float32)
        launch("columns", q, k, v, dy, lse, delta, dk, dv, *numbers, float(scale), written=(6, 7))
        launch("rows", q, k, v, dy, lse, delta, dq, *numbers, float(scale), written=(6,))
        found.append({"y": y.view(BF16), "dq": dq.view(BF16), "dk": dk.view(BF16), "dv": dv.view(BF16)})
    for name, made in found[0].items():
        assert made.tobytes() == found[1][name].tobytes()
    for name, made in found[0].items():
        assert (np.abs(made.astype(np.float64) - exact[name]) <= allowed[name]).all(), name


# -- faults ------------------------------------------------------------------------------------------------------------

PIPELINE = """
extern "C" __global__ void f(u16 *x, f32 *y, int steps) {
  extern __shared__ __align__(16) u16 s[];
  const int i = 8 * threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  f32 d[4] = {};
  cp_async16(s + i, x + i);
  cp_async_commit();
  for (int step = 0; step < steps; step++) {
    const u16 *now = s + step % 2 * 512;
    u16 *next = s + (step + 1) % 2 * 512;
    if (step + 1 < steps) cp_async16(next + i, x + (step + 1) * 512 + i);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    u32 a[4];
    ldmatrix_x4(a, now + (1 - warp) * 256 + 8 * lane);
    mma_m16n8k16_bf16(d, a, a[0], a[1]);
    __syncthreads();
  }
  for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = d[i];
}
"""
"""Two warps, each of which multiplies what the other has copied, with a copy of the next step in flight."""
STEPS = 3


def pipeline(*replaced: tuple[str, str]) -> tuple[str, Callable[[], list[Any]]]:
    """The text with some lines replaced; they stay one line each."""
    text = PIPELINE
    for old, new in replaced:
        assert text.count(old) == 1 and "\n" not in old + new, old
        text = text.replace(old, new)
    return text, lambda: [np.ones(512 * STEPS, BF16).view(np.uint16), np.zeros(256, np.float32), STEPS]


WAIT, LAST, FIRST = "cp_async_wait<1>();", "    __syncthreads();\n  }", "    __syncthreads();\n    u32"
START = "cp_async16(next + i, x + (step + 1) * 512 + i);"
LOADS = "ldmatrix_x4(a, now + (1 - warp) * 256 + 8 * lane);"
MULTIPLIES = "mma_m16n8k16_bf16(d, a, a[0], a[1]);"
# name -> (what is replaced, kind, the line it is found in, what the message must hold)
FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "a missing wait": (
        WAIT,
        "",
        "copy in flight",
        LOADS,
        r"reads 16 bytes at byte \d+ of dynamic shared memory .*copies to",
    ),
    "a wait for too few": (
        WAIT,
        "cp_async_wait<2>();",
        "copy in flight",
        LOADS,
        "copies to asynchronously at kernel.cu",
    ),
    "a commit forgotten": (
        "    cp_async_commit();\n    cp",
        "    cp",
        "copy in flight",
        LOADS,
        "which block .* copies to asynchronously at kernel.cu:.* and has not waited for",
    ),
    "a missing barrier": (FIRST, "\n    u32", "copy in flight|race|uninitialised read", LOADS, "block .0,0,0. thread"),
    "a wait after the barrier": (
        "    cp_async_wait<1>();\n    __syncthreads();\n",
        "    __syncthreads();\n    cp_async_wait<1>();\n",
        "copy in flight|race",
        LOADS,
        "block .0,0,0. thread",
    ),
    "an early overwrite": (LAST, "\n  }", "race|copy in flight", "", "block .0,0,0. thread"),
    "a copy over the stage in use": (
        "u16 *next = s + (step + 1) % 2 * 512;",
        "u16 *next = s + step % 2 * 512;",
        "copy in flight",
        START,
        r"writes 16 bytes at byte \d+ of dynamic shared memory .*copies to",
    ),
    "a store into a stage in flight": (
        WAIT,
        "next[i] = 0; " + WAIT,
        "copy in flight",
        "next[i] = 0;",
        r"writes 2 bytes at byte \d+ of dynamic shared memory .*copies to",
    ),
    "a store into what is copied": (
        WAIT,
        "if (step + 1 < steps) x[(step + 1) * 512 + i] = 0; " + WAIT,
        "copy in flight",
        "x[(step + 1) * 512 + i] = 0;",
        r"writes 2 bytes at element \d+ of argument 0 .*copies from",
    ),
    "a product by a part of a warp": (
        MULTIPLIES,
        "if (lane < 16) " + MULTIPLIES,
        "missing lane",
        MULTIPLIES,
        "waits with mask 0xffffffff for lane 16, .* at a barrier",
    ),
    "a product on two lines": (
        MULTIPLIES,
        "if (lane < 16) " + MULTIPLIES + "\n    else " + MULTIPLIES,
        "missing lane",
        MULTIPLIES,
        "lane 16, .* at another collective or mask",
    ),
    "loads of one and of four": (
        LOADS,
        "u32 z[1]; if (lane < 16) " + LOADS + " else ldmatrix_x1(z, (const void *)nullptr);",
        "missing lane",
        "ldmatrix_x4",
        "lane 16, .* at another collective or mask",
    ),
    "a load by a part of a warp": (LOADS, "if (lane) " + LOADS, "missing lane", MULTIPLIES + "|" + LOADS, "lane"),
    "a misaligned row": (
        LOADS,
        "ldmatrix_x4(a, now + (1 - warp) * 256 + 8 * lane + 4 * (lane == 5));",
        "misaligned access",
        "ldmatrix_x4",
        "no multiple of 16",
    ),
    "a row after the end": (
        LOADS,
        "ldmatrix_x4(a, s + 1024 + 8 * lane);",
        "out of bounds",
        "ldmatrix_x4",
        r"reads 16 bytes at byte \d+ of dynamic shared memory \(2048 bytes\)",
    ),
    "a row of global memory": (
        LOADS,
        "ldmatrix_x4(a, x + 8 * lane);",
        "wrong memory",
        "ldmatrix_x4",
        "takes shared memory",
    ),
    "a row of registers": (
        LOADS,
        "u32 z[4] = {}; ldmatrix_x4(a, z);",
        "out of bounds|misaligned access",
        "ldmatrix_x4",
        "",
    ),
    "a copy into global memory": (
        START,
        "cp_async16(x + i, x + 512 + i);",
        "wrong memory",
        "cp_async16(x",
        "takes shared",
    ),
    "a copy from shared memory": (
        START,
        "cp_async16(next + i, s + i);",
        "wrong memory",
        "cp_async16(n",
        "takes global",
    ),
    "a copy to an odd place": (START, "cp_async16(next + i + 4, x + i);", "misaligned access", "cp_async16(n", "of 16"),
    "a copy from an odd place": (
        START,
        "cp_async16(next + i, x + i + 4);",
        "misaligned access",
        "cp_async16(n",
        "of 16",
    ),
    "a copy of nothing from an odd place": (
        START,
        "cp_async16(next + i, x + i + 4, 0);",
        "misaligned access",
        "cp_async16(n",
        "of 16",
    ),
    "a copy from after the end": (
        START,
        "cp_async16(next + i, x + 4096 + i);",
        "out of bounds",
        "cp_async16(n",
        r"element 4\d+ of argument 0",
    ),
    "a copy of too much": (
        START,
        "cp_async16(next + i, x + i, 17);",
        "copy size",
        "cp_async16(n",
        "17 valid bytes of 16",
    ),
}


SEEDS = (None, 1, 2)


@simulated
@MODES
def test_a_pipeline_without_a_fault(check: bool) -> None:
    text, arguments = pipeline()
    for seed in SEEDS:
        args = arguments()
        run(text, args, (0, 1), check=check, block=64, shared=2048, seed=seed, initialised={0: True})
        assert (args[1] == 16 * STEPS).all()


@simulated
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    """Whatever order warps run in, and no argument is half-written."""
    assert PIPELINE.count(FAULTS[name][0]) == 1
    for seed in SEEDS:
        _is_caught(name, seed)


def _is_caught(name: str, seed: int | None) -> None:
    old, new, kinds, where, holds = FAULTS[name]
    text, (_, arguments) = PIPELINE.replace(old, new), pipeline()
    args = arguments()
    before = [np.copy(a) for a in args]
    with pytest.raises(SimulationFault) as caught:
        run(text, args, (0, 1), block=64, shared=2048, seed=seed, initialised={0: True})
    message = str(caught.value)
    assert caught.value.kind in kinds.split("|") and re.search(holds, message, re.DOTALL), message
    assert not where or any(w in message for w in where.split("|")), message
    assert re.fullmatch(r"kernel\.cu:\d+", caught.value.where), message
    for a, b in zip(before, args, strict=True):
        np.testing.assert_array_equal(a, b)


@simulated
def test_without_checking_a_part_of_a_warp_is_still_a_fault() -> None:
    """A lane that has returned, too: for a shuffle it would not be waited for."""
    for skipped in ("if (lane < 16) ", "if (lane >= 16) return; "):
        text, arguments = pipeline((MULTIPLIES, skipped + MULTIPLIES))
        with pytest.raises(SimulationFault, match="missing lane"):
            run(text, arguments(), (0, 1), block=64, shared=2048, check=False)


# -- NVRTC -------------------------------------------------------------------------------------------------------------


def _compiles(arch: str) -> bool:
    try:
        find_nvrtc(arch)
    except GradcError:
        return False
    return True


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_the_same_texts_without_spills(arch: str) -> None:
    """Causal attention for heads of 64 and of 128; every function of the header."""
    if not _compiles(arch):
        pytest.skip(f"no NVRTC for {arch}")
    text = attention(
        entries(64, 64, 64, True, "_causal_64"),
        entries(64, 32, 128, True, "_causal_128"),
    )
    binary = compile_cuda(text, arch=arch, spills="error", emit=("cubin",))
    assert len(binary.kernels) == 6 and all(k.registers <= 255 for k in binary.kernels.values())
    every = [
        PRODUCT.replace("NAME", n).replace("CTYPE", "i32" if r == np.int32 else "f32")
        for n, (_, _, r) in PRODUCTS.items()
    ]
    every += [LOAD.replace("COUNT", str(n)).replace("SUFFIX", s) for n in (1, 2, 4) for s in ("", "_trans")]
    every += [COPY.replace("BYTES", str(n)) for n in (4, 8, 16)]
    named = "".join(t.replace("void f(", f"void f{i}(") for i, t in enumerate(every))
    assert len(compile_cuda(with_headers(named), arch=arch).kernels) == len(every)


# -- conflicts of banks ------------------------------------------------------------------------------------------------

BANKS = """
extern "C" __global__ void f(f32 *y, int step) {
  __shared__ __align__(16) T s[32 * 33];
  s[threadIdx.x * step] = T();
  __syncthreads();
  const T x = s[threadIdx.x * step];
  y[threadIdx.x] = *(const f32 *)&x;
}
"""


@simulated
@pytest.mark.parametrize(
    ("dtype", "step", "each", "least"),
    [
        ("f32", 1, 1, 1),
        ("f32", 2, 2, 1),
        ("f32", 32, 32, 1),
        ("f32", 33, 1, 1),
        ("u8", 1, 1, 1),  # four lanes of a bank want one word
        ("u8", 8, 2, 1),
        ("f64", 1, 2, 2),
        ("f64", 16, 32, 2),
        ("f64", 17, 2, 2),
    ],
)
def test_conflicts_of_banks_are_counted(dtype: str, step: int, each: int, least: int) -> None:
    """A store and a load, with the words of each lane so far apart."""
    text = BANKS.replace("*(const f32 *)&x", "(f32)x").replace("T s[", f"{dtype} s[")
    simulator = library(text.replace("T()", f"({dtype})1").replace("const T x", f"const {dtype} x"), True)
    y = np.zeros(32, np.float32)
    found = simulator.launch("f", (1, 1, 1), (32, 1, 1), 0, [y, step], written=(0,), count=True)
    assert (found.count, found.least) == (2 * each, 2 * least) and (y == 1).all()


LOOP = """
extern "C" __global__ void f(f32 *y, int n) {
  __shared__ f32 s[128];
  s[threadIdx.x] = 1;
  for (int i = 0; i < n; i++) s[threadIdx.x] = s[threadIdx.x] * 0.5f + 1;
  y[threadIdx.x] = s[threadIdx.x];
}
"""


@simulated
def test_memory_is_kept_only_where_transactions_are_counted() -> None:
    """What is kept of each access until the warp synchronises would be 115 MB here."""
    resource = pytest.importorskip("resource")
    simulator, y = library(LOOP, True), np.zeros(128, np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = simulator.launch("f", (1, 1, 1), (128, 1, 1), 0, [y, 50_000], written=(0,))
    assert (found.count, found.least) == (0, 0) and (y == 2).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    found = simulator.launch("f", (1, 1, 1), (128, 1, 1), 0, [y, 10], written=(0,), count=True)
    assert found.count == found.least >= 4


@simulated
@pytest.mark.parametrize(("pitch", "each"), [(8, 1), (16, 2), (64, 8), (72, 1)])
def test_rows_of_matrices_are_counted(pitch: int, each: int) -> None:
    """Four matrices whose rows are so many elements apart."""
    text = LOAD.replace("COUNT", "4").replace("SUFFIX", "").replace("tile[32 * 8]", f"tile[32 * {pitch}]")
    text = text.replace("i < 256", f"i < 32 * {pitch}").replace("x[i]", "x[i % 256]")
    text = text.replace("tile + 8 * (31 - threadIdx.x)", f"tile + {pitch} * threadIdx.x")
    found = library(text, True).launch(
        "f", (1, 1, 1), (32, 1, 1), 0, [np.zeros(256, np.uint16), np.zeros(128, np.uint32)], written=(1,), count=True
    )
    assert (found.count, found.least) == (pitch + 4 * each, pitch + 4)


@simulated
def test_tiles_of_attention_have_no_conflicts() -> None:
    """Pieces are permuted so that copies and loads of fragments take one transaction for each 128 bytes."""
    heads, S, d, rng = 1, 64, 64, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, S, d)).astype(BF16).view(np.uint16) for _ in range(3))
    y, lse = np.zeros((heads, S, d), np.uint16), np.zeros((heads, S), np.float32)
    counted = []
    for permuted in ("((c >> 3 ^ r & 7) << 3) + (c & 7)", "c"):
        text = attention(entries(64, 64, d, False)).replace("((c >> 3 ^ r & 7) << 3) + (c & 7)", permuted)
        simulator = compile_sim(text, check=True)
        shape, args = (1, 1, 1), [q, k, v, y, lse, S, 0.18]
        shared = shared_bytes("forward", 64, 64, d)
        counted.append(simulator.launch("forward", shape, (128, 1, 1), shared, args, written=(3, 4), count=True))
    tiles, loads = 3 * 64 * d * 2 // 128, 4 * (4 + 16 + 16) * 4
    assert counted[0].count == counted[0].least == counted[1].least == tiles + loads
    assert counted[1].count == tiles + 8 * loads
