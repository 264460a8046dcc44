"""cuda-sim: CUDA text on the CPU.  Its primitives against NumPy; each fault seeded and caught; correct kernels pass
clean.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from skips import simulated

from gradc.errors import CompilerError, InvalidProblem, SimulationFault
from gradc.runtime.simulator import compile as cudasim
from gradc.runtime.simulator.compile import SimLibrary, compile_sim

pytestmark = simulated()

MODES = pytest.mark.parametrize("check", [False, True], ids=["plain", "check"])
FULL = 0xFFFFFFFF


@functools.cache
def library(source: str, check: bool) -> SimLibrary:
    return compile_sim(source, check=check)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(
    source: str,
    args: list[Any],
    written: tuple[int, ...],
    *,
    block: Any = 32,
    grid: Any = 1,
    shared: int = 0,
    check: bool = True,
    kernel: str = "f",
    **options: Any,
) -> None:
    """Launch the only kernel of a text; sizes are tuples, or numbers along x."""
    grid, block = (((n, 1, 1) if isinstance(n, int) else n) for n in (grid, block))
    library(source, check).launch(kernel, grid, block, shared, args, written=written, **options)


# ---- What a thread knows of itself
# ------------------------------------------------------------------------------------

INDICES = r"""
extern "C" __global__ void __launch_bounds__(64) f(int *out) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int *mine = out + 6 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
  mine[0] = threadIdx.x; mine[1] = threadIdx.y; mine[2] = threadIdx.z;
  mine[3] = blockIdx.x; mine[4] = blockIdx.y; mine[5] = blockIdx.z;
}
"""


@MODES
@pytest.mark.parametrize("seed", [None, 1, 7])
def test_every_thread_runs_once_under_its_index(check: bool, seed: int | None):
    out = np.full((3, 4, 5, 2, 3, 7, 6), -1, np.int32)
    run(INDICES, [out], (0,), grid=(5, 4, 3), block=(7, 3, 2), check=check, seed=seed)
    z, y, x, tz, ty, tx = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out, np.stack([tx, ty, tz, x, y, z], -1))


PARAMETERS = r"""
struct both { int a; double b; };
extern "C" __global__ void f(double *out, bool b, signed char c, short s, int i, long long l,
                             unsigned char uc, unsigned u, unsigned long long ul,
                             float x, double y, const float *none, both z) {
  const double all[] = {(double)b, (double)c, (double)s, (double)i, (double)l, (double)uc,
                        (double)u, (double)ul, x, y, (double)(none == nullptr), (double)z.a, z.b};
  for (int k = 0; k < 13; k++) out[k] = all[k];
}
"""


@MODES
def test_parameters_of_every_kind(check: bool):
    class Both(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))

    out = np.zeros(13)
    values = [
        True,
        -3,
        np.int16(-300),
        ctypes.c_int(-70000),
        -(2**40),
        200,
        np.uint32(4_000_000_000),
        2**63,
        np.float32(0.5),
        0.1,
    ]
    run(PARAMETERS, [out, *values, None, Both(-7, 2.5)], (0,), block=1, check=check)
    assert out.tolist() == [1, -3, -300, -70000, -(2**40), 200, 4e9, 2.0**63, 0.5, 0.1, 1, -7, 2.5]
    assert library(PARAMETERS, check).signature("f")[:3] == [("P", 8), ("u", 1), ("i", 1)]


# ---- Collectives
# ---------------------------------------------------------------------------------------------------------

COLLECTIVE = r"""
extern "C" __global__ void f(const TYPE *in, TYPE *out, unsigned mask) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x, lane = threadIdx.x % 32;
  const TYPE v = in[i];
  out[i] = v;
  if (mask >> lane & 1) out[i] = EXPRESSION;
}
"""


def shuffled(kind: str, other: int, width: int) -> np.ndarray:
    """The lane that each of 32 lanes reads, as CUDA's manual says."""
    lane = np.arange(32)
    base = lane // width * width
    match kind:
        case "":
            return base + other % width
        case "_up":
            return np.where(lane - other < base, lane, lane - other)
        case "_down":
            return np.where(lane + other >= base + width, lane, lane + other)
        case _:
            return np.where(lane ^ other >= base + width, lane, lane ^ other)


@MODES
@pytest.mark.parametrize("dtype", ["int", "unsigned", "float", "double", "long long", "unsigned long long"])
def test_shuffles(check: bool, dtype: str):
    kinds = {
        "int": "i4",
        "unsigned": "u4",
        "float": "f4",
        "double": "f8",
        "long long": "i8",
        "unsigned long long": "u8",
    }
    cases = [
        (kind, other, width)
        for kind in ("", "_up", "_down", "_xor")
        for other, width in ((0, 32), (1, 32), (5, 8), (16, 32), (2, 4))
    ]
    lines = " ".join(
        f"out[{k * 64} + i] = __shfl{kind}_sync(0xffffffffu, v, {other}, {width});"
        for k, (kind, other, width) in enumerate(cases)
    )
    source = (
        f'extern "C" __global__ void f(const {dtype} *in, {dtype} *out) {{ int i = threadIdx.x; {dtype} v = in[i];'
        f" {lines} }}"
    )
    x = np.random.default_rng(0).integers(0, 256, 64 * np.dtype(kinds[dtype]).itemsize, np.uint8).view(kinds[dtype])
    out = np.zeros((len(cases), 64), x.dtype)
    run(source, [x, out], (1,), block=64, check=check)
    for row, case in zip(out, cases, strict=True):
        index = np.concatenate([shuffled(*case), 32 + shuffled(*case)])
        np.testing.assert_array_equal(row.view(np.uint8), x[index].view(np.uint8), err_msg=str(case))


VOTES = {
    "__ballot_sync(mask, v & 1)": lambda v, lanes: sum(
        1 << int(lane) for lane, x in zip(lanes, v, strict=True) if x & 1
    ),
    "__any_sync(mask, v == 3)": lambda v, lanes: int((v == 3).any()),
    "__all_sync(mask, v < 100)": lambda v, lanes: int((v < 100).all()),
    "__match_any_sync(mask, v & 3)": lambda v, lanes: [
        sum(1 << int(m) for m, y in zip(lanes, v, strict=True) if y & 3 == x & 3) for x in v
    ],
    "__reduce_add_sync(mask, v)": lambda v, lanes: v.sum(),
    "__reduce_min_sync(mask, v)": lambda v, lanes: v.min(),
    "__reduce_max_sync(mask, v)": lambda v, lanes: v.max(),
    "__reduce_min_sync(mask, (unsigned)v - 7)": lambda v, lanes: (v - 7).astype(np.uint32).min(),
    "__reduce_max_sync(mask, (unsigned)v - 7)": lambda v, lanes: (v - 7).astype(np.uint32).max(),
    "__reduce_and_sync(mask, (unsigned)v | 8)": lambda v, lanes: np.bitwise_and.reduce(v | 8),
    "__reduce_or_sync(mask, (unsigned)v)": lambda v, lanes: np.bitwise_or.reduce(v),
    "__reduce_xor_sync(mask, (unsigned)v)": lambda v, lanes: np.bitwise_xor.reduce(v),
}


@MODES
@pytest.mark.parametrize("mask", [FULL, 0x0F0F1234, 0x80000000])
def test_votes_and_warp_reductions(check: bool, mask: int):
    lines = " ".join(f"out[{k * 64} + i] = (int){call};" for k, call in enumerate(VOTES))
    source = (
        'extern "C" __global__ void f(const int *in, int *out, unsigned mask) { int i = threadIdx.x, v = in[i]; if'
        f" (mask >> i % 32 & 1) {{ {lines} }} }}"
    )
    x = np.random.default_rng(mask).integers(-20, 20, 64).astype(np.int32)
    out = np.zeros((len(VOTES), 64), np.int32)
    run(source, [x, out, mask], (1,), block=64, check=check)
    lanes = np.flatnonzero([mask >> lane & 1 for lane in range(32)])
    for row, (call, meaning) in zip(out, VOTES.items(), strict=True):
        for warp in range(2):
            wanted = np.asarray(meaning(x[32 * warp + lanes], lanes)).astype(np.uint32).view(np.int32)
            np.testing.assert_array_equal(row[32 * warp + lanes], np.broadcast_to(wanted, lanes.shape), err_msg=call)


@MODES
@pytest.mark.parametrize("seed", [None, 3])
def test_barriers_that_count(check: bool, seed: int | None):
    source = r"""
    extern "C" __global__ void f(const int *in, int *out) {
      const int i = threadIdx.x;
      out[i] = __syncthreads_count(in[i]);
      out[i + blockDim.x] = __syncthreads_or(in[i] == 2);
      out[i + 2 * blockDim.x] = __syncthreads_and(in[i] != 2);
      __syncthreads();
    }"""
    x = np.random.default_rng(1).integers(0, 2, 100).astype(np.int32)
    for last in (0, 2):
        x[77] = last
        out = np.zeros((3, 100), np.int32)
        run(source, [x, out], (1,), block=100, check=check, seed=seed)
        assert (out[0] == (x != 0).sum()).all() and (out[1] == (last == 2)).all() and (out[2] == (last != 2)).all()


def test_without_checking_who_has_returned_is_not_waited_for():
    source = r"""
    extern "C" __global__ void f(int *out) {
      __shared__ int sum;
      if (threadIdx.x == 5 || threadIdx.x == 40) return;
      if (threadIdx.x == 0) sum = 0;
      __syncthreads();
      atomicAdd(&sum, __popc(__ballot_sync(__activemask(), 1)));
      __syncthreads();
      out[threadIdx.x] = sum;
    }"""
    out = np.zeros(64, np.int32)
    run(source, [out], (0,), block=64, check=False)
    assert (np.delete(out, [5, 40]) == 62 * 31).all() and out[5] == out[40] == 0


# ---- Atomics
# --------------------------------------------------------------------------------------------------------------

ATOMICS = [
    ("int", "i4", "atomicAdd(out, v)", lambda s, x: s + x.sum()),
    ("unsigned", "u4", "atomicAdd(out, v)", lambda s, x: s + x.sum(dtype="u4")),
    ("unsigned long long", "u8", "atomicAdd(out, v)", lambda s, x: s + x.sum(dtype="u8")),
    ("float", "f4", "atomicAdd(out, v)", lambda s, x: s + x.sum()),
    ("double", "f8", "atomicAdd(out, v)", lambda s, x: s + x.sum()),
    *(
        (t, d, "atomicMin(out, v)", lambda s, x: min(s, x.min()))
        for t, d in (("int", "i4"), ("unsigned", "u4"), ("long long", "i8"), ("unsigned long long", "u8"))
    ),
    *(
        (t, d, "atomicMax(out, v)", lambda s, x: max(s, x.max()))
        for t, d in (("int", "i4"), ("unsigned", "u4"), ("long long", "i8"), ("unsigned long long", "u8"))
    ),
    ("int", "i4", "atomicAnd(out, v)", lambda s, x: s & np.bitwise_and.reduce(x)),
    ("unsigned", "u4", "atomicOr(out, v)", lambda s, x: s | np.bitwise_or.reduce(x)),
    ("unsigned long long", "u8", "atomicXor(out, v)", lambda s, x: s ^ np.bitwise_xor.reduce(x)),
    ("float", "f4", "v = atomicExch(out, v)", lambda s, x: x[-1]),
    (
        "int",
        "i4",
        "for (int old = *(volatile int *)&first, seen; (seen = atomicCAS(out, old, old + v)) != old; old = seen)",
        lambda s, x: s + x.sum(),
    ),
]


@MODES
@pytest.mark.parametrize(
    ("ctype", "dtype", "call", "meaning"), ATOMICS, ids=[f"{t}-{c[:12]}" for t, _, c, _ in ATOMICS]
)
def test_atomics(check: bool, ctype: str, dtype: str, call: str, meaning: Any):
    source = (
        f'extern "C" __global__ void f(const {ctype} *in, {ctype} *out, {ctype} first) {{ {ctype} v = in[threadIdx.x +'
        f" blockDim.x * blockIdx.x]; {call}; }}"
    )
    x = np.random.default_rng(5).integers(0, 100, 128).astype(dtype)
    out = np.array([7], dtype)
    run(source, [x, out, 7], (1,), grid=4, check=check, initialised={1: True})
    assert out[0] == meaning(np.array(7, dtype), x)


@MODES
def test_vector_atomics(check: bool):
    source = r"""
    extern "C" __global__ void f(const float4 *in, float4 *out, float2 *pairs) {
      atomicAdd(out + threadIdx.x % 2, in[threadIdx.x]);
      atomicAdd(pairs, make_float2(in[threadIdx.x].x, 1.0f));
    }"""
    x = np.random.default_rng(5).integers(0, 100, (64, 4)).astype(np.float32)
    raw = np.zeros(16, np.float32)
    out, pairs = aligned(8, np.float32).reshape(2, 4), raw[:2]
    run(source, [aligned_copy(x), out, pairs], (1, 2), block=64, check=check, initialised={1: True, 2: True})
    np.testing.assert_array_equal(out, x.reshape(32, 2, 4).sum(0))
    assert pairs.tolist() == [x[:, 0].sum(), 64]


def aligned(count: int, dtype: Any, offset: int = 0) -> np.ndarray:
    """Zeros that start ``offset`` bytes behind a multiple of 256."""
    size = count * np.dtype(dtype).itemsize
    memory = np.zeros(size + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return memory[start : start + size].view(dtype)


def aligned_copy(array: np.ndarray, offset: int = 0) -> np.ndarray:
    out = aligned(array.size, array.dtype, offset).reshape(array.shape)
    out[...] = array
    return out


# ---- Bits and numbers
# -------------------------------------------------------------------------------------------------------


def _ffs(x: int) -> int:
    return (x & -x).bit_length()


BITS = {
    "__popc(x)": lambda x, y: x.bit_count(),
    "__clz(x)": lambda x, y: 32 - x.bit_length(),
    "__ffs(x)": lambda x, y: _ffs(x),
    "__brev(x)": lambda x, y: int(f"{x:032b}"[::-1], 2),
    "__popcll((unsigned long long)x << 32 | y)": lambda x, y: (x << 32 | y).bit_count(),
    "__clzll((unsigned long long)x << 32 | y)": lambda x, y: 64 - (x << 32 | y).bit_length(),
    "__ffsll((unsigned long long)x << 32 | y)": lambda x, y: _ffs(x << 32 | y),
    "__brevll((unsigned long long)x << 32 | y) >> 32": lambda x, y: int(f"{y:032b}"[::-1], 2),
    "__umulhi(x, y)": lambda x, y: x * y >> 32,
    "__umul64hi((unsigned long long)x << 32, (unsigned long long)y << 32)": lambda x, y: x * y,
    "__byte_perm(x, y, 0x6214)": lambda x, y: int.from_bytes(
        [(y << 32 | x).to_bytes(8, "little")[k] for k in (4, 1, 2, 6)], "little"
    ),
    "__funnelshift_l(x, y, 7)": lambda x, y: (y << 32 | x) << 7 >> 32,
    "__funnelshift_r(x, y, 37)": lambda x, y: (y << 32 | x) >> 5,
    "__float_as_uint(__uint_as_float(x))": lambda x, y: x,
    "__double_as_longlong(__longlong_as_double((unsigned long long)x << 32 | y))": lambda x, y: y,
    "min(x, y)": min,
    "max((long long)x, (long long)y)": max,
}


@MODES
def test_bits(check: bool):
    lines = " ".join(f"out[{k} * n + i] = (unsigned)({call});" for k, call in enumerate(BITS))
    source = (
        'extern "C" __global__ void f(const unsigned *a, const unsigned *b, unsigned *out, int n) { int i ='
        f" threadIdx.x; unsigned x = a[i], y = b[i]; {lines} }}"
    )
    a = np.array([0, 1, 2, 0x80000000, FULL, 0x12345678, 0x0FF00000, 77] * 4, np.uint32)
    b = np.random.default_rng(2).integers(0, 2**32, 32, np.uint32)
    out = np.zeros((len(BITS), 32), np.uint32)
    run(source, [a, b, out, 32], (2,), check=check)
    for row, (call, meaning) in zip(out, BITS.items(), strict=True):
        assert row.tolist() == [meaning(x, y) & FULL for x, y in zip(a.tolist(), b.tolist(), strict=True)], call


def test_numbers():
    calls = {
        "__fadd_rn(x, y)": lambda x, y: x + y,
        "__fmul_rn(x, y)": lambda x, y: x * y,
        "__fdiv_rn(x, y)": lambda x, y: x / y,
        "__fsqrt_rn(fabsf(x))": lambda x, y: np.sqrt(np.abs(x)),
        "fmaf(x, y, 1.0f)": lambda x, y: (x.astype(np.longdouble) * y + 1).astype(np.float32),
        "__fmaf_rn(x, y, -x)": lambda x, y: (x.astype(np.longdouble) * y - x).astype(np.float32),
        "x * y + 1.0f": lambda x, y: x * y + np.float32(1),  # two roundings
        "fminf(x, y)": np.fmin,
        "max(x, y)": np.fmax,
        "(float)__float2int_rn(x * 1e3f)": lambda x, y: np.rint(x * np.float32(1e3)),
        "(float)__float2int_rz(x * 1e30f)": lambda x, y: np.where(x > 0, np.float32(2**31), np.float32(-(2**31))),
    }
    lines = " ".join(f"out[{k} * n + i] = {call};" for k, call in enumerate(calls))
    source = (
        'extern "C" __global__ void f(const float *a, const float *b, float *out, int n) { int i = threadIdx.x; float'
        f" x = a[i], y = b[i]; {lines} }}"
    )
    a, b = random(256), random(256, seed=1)
    out = np.zeros((len(calls), 256), np.float32)
    run(source, [a, b, out, 256], (2,), block=256, check=False)
    for row, (call, meaning) in zip(out, calls.items(), strict=True):
        np.testing.assert_array_equal(row, meaning(a, b), err_msg=call)


def test_the_headers_of_the_templates_are_found():
    source = r"""
    #include "math.h"
    extern "C" __global__ void f(const f32 *x, f32 *y) { y[threadIdx.x] = exp_f32(__ldg(x + threadIdx.x)); }"""
    x = random(32)
    y = np.zeros_like(x)
    for check in (False, True):
        run(source, [x, y], (1,), check=check)
        np.testing.assert_allclose(y, np.exp(x), rtol=3e-7)


# ---- Correct kernels
# ----------------------------------------------------------------------------------------------------------

LAYERNORM = r"""
__device__ __forceinline__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}
extern "C" __global__ void __launch_bounds__(256) f(const float *__restrict__ x, float *__restrict__ y, int n, int d) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  float sum = 0, squares = 0;
  for (int i = lane; i < d; i += 32) sum += x[(long long)row * d + i];
  const float mean = warp_sum(sum) / d;
  for (int i = lane; i < d; i += 32) { const float c = x[(long long)row * d + i] - mean; squares += c * c; }
  const float scale = rsqrtf(warp_sum(squares) / d + 1e-5f);
  for (int i = lane; i < d; i += 32) y[(long long)row * d + i] = (x[(long long)row * d + i] - mean) * scale;
}
"""

TREE = r"""
extern "C" __global__ void f(const float *x, float *partial, int n) {
  extern __shared__ __align__(16) float tree[];
  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  tree[t] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) tree[t] += tree[t + half];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = tree[0];
}
"""

HISTOGRAM = r"""
extern "C" __global__ void f(const int *x, unsigned *counts, int n, int bins) {
  __shared__ unsigned mine[64];
  for (int b = threadIdx.x; b < 64; b += blockDim.x) mine[b] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1u);
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts[b], mine[b]);
}
"""

# Rows sorted by key, `chunk` of them to a block: whole segments go to their row, pieces to two carries of the block.
SEGMENTED = r"""
extern "C" __global__ void chunks(const int *key, const float *x, float *out, float *carry, int *carry_key,
                                  int n, int d, int chunk) {
  const int first = blockIdx.x * chunk, last = min(first + chunk, n), column = threadIdx.x;
  if (threadIdx.x < 2) carry_key[2 * blockIdx.x + threadIdx.x] = -1;
  __syncthreads();
  for (int i = first; i < last;) {
    const int k = key[i];
    float sum = 0;
    const int start = i;
    for (; i < last && key[i] == k; i++) if (column < d) sum += x[i * d + column];
    const bool open_left = start == first && first > 0 && key[first - 1] == k;
    const bool open_right = i == last && last < n && key[last] == k;
    if (!open_left && !open_right) {
      if (column < d) out[k * d + column] = sum;
    } else {
      const int slot = 2 * blockIdx.x + (open_left ? 0 : 1);
      if (column < d) carry[slot * d + column] = sum;
      if (column == 0) carry_key[slot] = k;
    }
  }
}
extern "C" __global__ void finish(const float *carry, const int *carry_key, float *out, int slots, int d) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= d) return;
  for (int s = 0; s < slots;) {
    const int k = carry_key[s];
    if (k < 0) { s++; continue; }
    float sum = 0;
    for (; s < slots && (carry_key[s] == k || carry_key[s] < 0); s++)
      if (carry_key[s] == k) sum += carry[s * d + column];
    out[k * d + column] = sum;
  }
}
"""

# Each block writes a partial sum; the block that comes last adds them.
LAST_BLOCK = r"""
extern "C" __global__ void f(const float *x, float *partial, unsigned *arrived, float *sum) {
  __shared__ bool last;
  __shared__ float part[64];
  part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 2) partial[2 * blockIdx.x + threadIdx.x] = part[threadIdx.x] + part[threadIdx.x + 32];
  __syncthreads();
  if (threadIdx.x == 0) { FENCE last = atomicAdd(arrived, 1u) == gridDim.x - 1; }
  __syncthreads();
  if (last && threadIdx.x == 7) {
    float total = 0;
    for (int i = 0; i < 2 * gridDim.x; i++) total += partial[i];
    sum[0] = total;
  }
}
"""

EXCHANGE = r"""
extern "C" __global__ void f(const float *x, float *y) {
  __shared__ float tile[4][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 0; step < 3; step++) {
    tile[warp][lane] = x[threadIdx.x] + step;
    __syncwarp();
    const float other = tile[warp][lane ^ 5];
    __syncwarp();
    y[threadIdx.x * 3 + step] = other;
  }
  if (lane < 16) {
    tile[warp][lane] = x[threadIdx.x];
    __syncwarp(0x0000ffffu);
    y[threadIdx.x * 3] = tile[warp][15 - lane];
  }
}
"""


@MODES
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("n", "d"), [(13, 5), (8, 96), (30, 77)])
def test_layernorm(check: bool, seed: int | None, n: int, d: int):
    x = random(n, d)
    y = np.zeros_like(x)
    run(LAYERNORM, [x, y, n, d], (1,), grid=-(-n // 8), block=256, check=check, seed=seed)
    np.testing.assert_allclose(y, (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5), atol=2e-6)


@MODES
@pytest.mark.parametrize("seed", [None, 5])
def test_tree_reduction(check: bool, seed: int | None):
    x = np.random.default_rng(0).integers(-50, 50, 1000).astype(np.float32)
    partial = np.zeros(8, np.float32)
    run(TREE, [x, partial, 1000], (1,), grid=8, block=128, shared=512, check=check, seed=seed)
    np.testing.assert_array_equal(partial, np.pad(x, (0, 24)).reshape(8, 128).sum(1))


@MODES
@pytest.mark.parametrize("seed", [None, 5])
def test_histogram(check: bool, seed: int | None):
    x = np.random.default_rng(0).integers(0, 50, 5000).astype(np.int32)
    counts = np.zeros(50, np.uint32)
    run(HISTOGRAM, [x, counts, 5000, 50], (1,), grid=7, block=96, check=check, seed=seed, initialised={1: True})
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=50))


@MODES
@pytest.mark.parametrize("seed", [None, 5])
def test_segments_with_carries(check: bool, seed: int | None):
    n, d, rows, chunk = 200, 40, 30, 16
    key = np.sort(np.random.default_rng(0).choice(rows, n, p=[0.5, *[0.5 / (rows - 1)] * (rows - 1)])).astype(np.int32)
    x = np.random.default_rng(1).integers(-9, 9, (n, d)).astype(np.float32)
    blocks = -(-n // chunk)
    out = np.zeros((rows, d), np.float32)
    has_value = np.zeros(out.nbytes, np.uint8)
    carry, carry_key = np.zeros((2 * blocks, d), np.float32), np.zeros(2 * blocks, np.int32)
    carried = np.zeros(carry.nbytes, np.uint8)
    lib = library(SEGMENTED, check)
    lib.launch(
        "chunks",
        (blocks, 1, 1),
        (64, 1, 1),
        0,
        [key, x, out, carry, carry_key, n, d, chunk],
        written=[2, 3, 4],
        initialised={2: has_value, 3: carried},
        seed=seed,
    )
    if check:  # each row is written at most once, the carries only where they are used
        assert 0 < has_value.sum() < out.nbytes and 0 < carried.sum() < carry.nbytes
        with pytest.raises(SimulationFault, match="uninitialised read"):
            lib.launch(
                "finish",
                (2, 1, 1),
                (32, 1, 1),
                0,
                [carry, np.zeros_like(carry_key), out, 2 * blocks, d],
                written=[2],
                initialised={0: carried},
            )
    lib.launch(
        "finish",
        (2, 1, 1),
        (32, 1, 1),
        0,
        [carry, carry_key, out, 2 * blocks, d],
        written=[2],
        initialised={0: carried, 2: has_value},
        seed=seed,
    )
    wanted = np.zeros_like(out)
    np.add.at(wanted, key, x)
    np.testing.assert_array_equal(out, wanted)
    if check:
        np.testing.assert_array_equal(has_value.reshape(rows, -1).all(1), np.isin(np.arange(rows), key))


@pytest.mark.parametrize("seed", [None, 5, 6])
def test_the_last_block_reads_what_the_others_wrote(seed: int | None):
    x = np.random.default_rng(0).integers(-50, 50, (9, 64)).astype(np.float32)
    for fence in (True, False):
        args = [x, np.zeros(18, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)]
        source = LAST_BLOCK.replace("FENCE", "__threadfence();" if fence else "")
        if fence:
            run(source, args, (1, 2, 3), grid=9, block=64, seed=seed, initialised={2: True})
            assert args[3][0] == x[:, [0, 1, 32, 33]].sum()
        else:
            with pytest.raises(
                SimulationFault, match=r"race: .* thread \(7,0,0\) reads 4 bytes at element \d+ of argument 1"
            ):
                run(source, args, (1, 2, 3), grid=9, block=64, seed=seed, initialised={2: True})


@MODES
@pytest.mark.parametrize("seed", [None, 5, 6])
def test_exchange_within_a_warp(check: bool, seed: int | None):
    x = random(128)
    y = np.zeros((128, 3), np.float32)
    run(EXCHANGE, [x, y], (1,), block=128, check=check, seed=seed)
    wanted = x[np.arange(128) ^ 5][:, None] + np.arange(3, dtype=np.float32)
    low = np.arange(128) % 32 < 16
    wanted[low, 0] = x.reshape(4, 32)[:, 15::-1].reshape(-1)
    np.testing.assert_array_equal(y, wanted)


def test_arrays_in_place_and_views_of_one_buffer():
    source = (
        'extern "C" __global__ void f(const float *x, float *y, float *z) { int i = threadIdx.x; float v = x[i]; y[i] ='
        " v + 1; z[i] = v * 2; }"
    )
    memory = random(96)
    x, z = memory[:32], memory[32:64]
    before = memory.copy()
    run(source, [x, x, z], (1, 2))
    np.testing.assert_array_equal(memory, np.concatenate([before[:32] + 1, before[:32] * 2, before[64:]]))


def test_a_seed_finds_what_depends_on_order():
    """The last writer wins: races are not looked for without check, but another order gives another result."""
    source = 'extern "C" __global__ void f(int *out) { out[0] = blockIdx.x; out[1] = threadIdx.x / 32; }'
    results = set()
    for seed in range(8):
        out = np.zeros(2, np.int32)
        run(source, [out], (0,), grid=50, block=256, check=False, seed=seed)
        again = np.zeros(2, np.int32)
        run(source, [again], (0,), grid=50, block=256, check=False, seed=seed)
        assert out.tolist() == again.tolist()
        results.add(tuple(out.tolist()))
    out = np.zeros(2, np.int32)
    run(source, [out], (0,), grid=50, block=256, check=False)
    assert out.tolist() == [49, 7] and len({a for a, _ in results}) > 2 and len({b for _, b in results}) > 2


# ---- Faults, each seeded
# ---------------------------------------------------------------------------------------------------------


def kernel(parameters: str, *body: str) -> str:
    """A text whose first statement is on line 2."""
    return f'extern "C" __global__ void f({parameters}) {{\n' + "\n".join(body) + "\n}\n"


def fresh(count: int = 64, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(count, dtype)


# text, arguments, written, launch, (kind, line, block, thread, what the message must hold)
FAULTS: dict[str, tuple[str, Any, tuple[int, ...], dict[str, Any], tuple[str, int, int, int, str]]] = {
    "read behind an argument": (
        kernel("const float *x, float *y", "int i = threadIdx.x + 32 * blockIdx.x;", "y[i] = x[i + 1];"),
        lambda: [fresh(64), fresh(64)],
        (1,),
        {"grid": 2},
        ("out of bounds", 3, 1, 31, r"reads 4 bytes at element 64 of argument 0 \(float32\[64\]\)"),
    ),
    "read before an argument": (
        kernel("const float *x, float *y", "y[threadIdx.x] = x[(int)threadIdx.x - 1];"),
        lambda: [fresh(), fresh()],
        (1,),
        {},
        ("out of bounds", 2, 0, 0, r"element -1 of argument 0"),
    ),
    "write behind an argument": (
        kernel("short *y, int n", "if (threadIdx.x <= n) y[threadIdx.x] = 1;"),
        lambda: [fresh(20, np.int16), 20],
        (0,),
        {},
        ("out of bounds", 2, 0, 20, r"writes 2 bytes at element 20 of argument 0 \(int16\[20\]\)"),
    ),
    "a vector over the end": (
        kernel("const float4 *x, float *y", "float4 v = x[threadIdx.x];", "y[threadIdx.x] = v.x + v.y + v.z + v.w;"),
        lambda: [aligned(4 * 32 - 2, np.float32), fresh()],
        (1,),
        {},
        ("out of bounds", 2, 0, 31, r"reads \d+ bytes at element 12\d of argument 0"),
    ),
    "an atomic out of bounds": (
        kernel("float *y", "atomicAdd(y + 10 * threadIdx.x, 1.0f);"),
        lambda: [fresh()],
        (0,),
        {"initialised": {0: True}},
        ("out of bounds", 2, 0, 7, r"updates 4 bytes at element 70"),
    ),
    "a null pointer": (
        kernel("const float *x, float *y", "y[threadIdx.x] = x[threadIdx.x];"),
        lambda: [None, fresh()],
        (1,),
        {},
        ("out of bounds", 2, 0, 0, "address 0x0, near no array"),
    ),
    "behind dynamic shared memory": (
        kernel("float *y", "extern __shared__ float s[];", "s[threadIdx.x] = 1;", "y[threadIdx.x] = s[threadIdx.x];"),
        lambda: [fresh()],
        (0,),
        {"shared": 80},
        ("out of bounds", 3, 0, 20, r"byte 80 of dynamic shared memory \(80 bytes\)"),
    ),
    "behind a shared array, through a pointer": (
        kernel(
            "float *y",
            "__shared__ float s[32];",
            "__shared__ float t[32];",
            "float *p = s, *q = t;",
            "p[threadIdx.x] = q[threadIdx.x] = 0;",
            "y[threadIdx.x] = p[threadIdx.x + 64];",
        ),
        lambda: [fresh()],
        (0,),
        {},
        ("out of bounds", 6, 0, 0, "__shared__ [st]"),
    ),
    "a write to a constant": (
        kernel("const float *x, float *y", "y[threadIdx.x] = 1;", "((float *)x)[threadIdx.x] = 1;"),
        lambda: [fresh(), fresh()],
        (1,),
        {},
        ("write to a constant", 3, 0, 0, "argument 0"),
    ),
    "a race in shared memory": (
        kernel("float *y", "__shared__ float s[64];", "s[threadIdx.x] = 1;", "y[threadIdx.x] = s[63 - threadIdx.x];"),
        lambda: [fresh()],
        (0,),
        {"block": 64, "seed": 3},
        ("uninitialised read", 4, 0, 22, "__shared__ s"),  # the order in which nobody has written yet
    ),
    "a race in shared memory in the other order": (
        kernel(
            "float *y",
            "__shared__ float s[64];",
            "s[63 - threadIdx.x] = 1;",
            "s[threadIdx.x] = 2;",
            "__syncthreads();",
            "y[threadIdx.x] = s[0];",
        ),
        lambda: [fresh()],
        (0,),
        {"block": 64, "seed": 3},
        ("", 3, -1, -1, ""),
    ),
    "a missing barrier": (
        kernel(
            "float *y",
            "__shared__ float s[64];",
            "s[threadIdx.x] = 1;",
            "__syncthreads();",
            "float v = s[threadIdx.x ^ 33];",
            "s[threadIdx.x] = v;",
            "y[threadIdx.x] = v;",
        ),
        lambda: [fresh()],
        (0,),
        {"block": 64},
        (
            "race",
            5,
            0,
            30,
            (
                r"reads 4 bytes at byte 252 of __shared__ s \(256 bytes\), which block \(0,0,0\) thread \(63,0,0\)"
                r" wrote at kernel.cu:6"
            ),
        ),
    ),
    "a missing syncwarp": (
        kernel(
            "float *y",
            "__shared__ float s[32];",
            "s[threadIdx.x] = 1;",
            "__shfl_sync(0xffffffffu, 1, 0);",
            "y[threadIdx.x] = s[threadIdx.x ^ 1];",
        ),
        lambda: [fresh()],
        (0,),
        {},
        (
            "race",
            5,
            0,
            31,
            r"thread \(30,0,0\) wrote at kernel.cu:3",
        ),  # a shuffle orders no memory; the last lane to arrive goes on first
    ),
    "a syncwarp of other lanes": (
        kernel(
            "float *y",
            "__shared__ float s[32];",
            "s[threadIdx.x ^ 16] = 1;",
            "__syncthreads();",
            "s[threadIdx.x] = 2;",
            "__syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);",
            "y[threadIdx.x] = s[threadIdx.x ^ 16];",
        ),
        lambda: [fresh()],
        (0,),
        {},
        ("", 0, -1, -1, ""),
    ),
    "two blocks write one element": (
        kernel("float *y", "if (threadIdx.x == 3) y[5] = blockIdx.x;"),
        lambda: [fresh()],
        (0,),
        {"grid": 2},
        (
            "race",
            2,
            1,
            3,
            r"element 5 of argument 0 \(float32\[64\]\), which block \(0,0,0\) thread \(3,0,0\) wrote at kernel.cu:2",
        ),
    ),
    "a block reads what another wrote": (
        kernel("float *y", "if (blockIdx.x == 0) y[threadIdx.x] = 1;", "else y[threadIdx.x + 32] = y[threadIdx.x];"),
        lambda: [fresh()],
        (0,),
        {"grid": 2},
        ("race", 3, 1, 0, r"block \(0,0,0\) thread \(0,0,0\) wrote at kernel.cu:2"),
    ),
    "a block writes what another read": (
        kernel("float *y", "float v = y[threadIdx.x];", "if (blockIdx.x == 1) y[threadIdx.x] = v + 1;"),
        lambda: [fresh()],
        (0,),
        {"grid": 2, "initialised": {0: True}},
        ("race", 3, 1, 0, r"block \(0,0,0\) thread \(0,0,0\) read at kernel.cu:2"),
    ),
    "an atomic and a plain write": (
        kernel("int *y", "if (threadIdx.x == 4) y[0] = 0;", "atomicAdd(y, 1);"),
        lambda: [fresh(64, np.int32)],
        (0,),
        {"initialised": {0: True}},
        ("race", 2, 0, 4, r"thread \(0,0,0\) updated atomically at kernel.cu:3"),
    ),
    "an atomic and a plain read": (
        kernel("int *y, int *z", "atomicAdd(y, 1);", "__syncwarp();", "z[threadIdx.x] = y[0];"),
        lambda: [fresh(64, np.int32), fresh(64, np.int32)],
        (0, 1),
        {"block": 64, "initialised": {0: True}},
        ("", 0, -1, -1, ""),
    ),
    "uninitialised shared memory": (
        kernel(
            "float *y",
            "__shared__ float s[32];",
            "if (threadIdx.x != 9) s[threadIdx.x] = 0;",
            "y[threadIdx.x] = s[threadIdx.x];",
        ),
        lambda: [fresh()],
        (0,),
        {},
        ("uninitialised read", 4, 0, 9, r"byte 36 of __shared__ s \(128 bytes\)"),
    ),
    "shared memory of the block before": (
        kernel(
            "float *y",
            "extern __shared__ float s[];",
            "if (blockIdx.x == 0) s[threadIdx.x] = 1;",
            "y[threadIdx.x + 32 * blockIdx.x] = s[threadIdx.x];",
        ),
        lambda: [fresh()],
        (0,),
        {"grid": 2, "shared": 128},
        ("uninitialised read", 4, 1, 0, "byte 0 of dynamic shared memory"),
    ),
    "an output that is read": (
        kernel("float *y", "y[threadIdx.x] += 1;"),
        lambda: [fresh()],
        (0,),
        {},
        ("uninitialised read", 2, 0, 0, "element 0 of argument 0"),
    ),
    "an atomic on an output without a value": (
        kernel("float *y", "atomicAdd(y + threadIdx.x, 1.0f);"),
        lambda: [fresh()],
        (0,),
        {},
        ("uninitialised read", 2, 0, 0, "updates 4 bytes at element 0 of argument 0"),
    ),
    "a misaligned vector": (
        kernel("const float *x, float *y", "float4 v = *(const float4 *)(x + threadIdx.x);", "y[threadIdx.x] = v.x;"),
        lambda: [aligned(64, np.float32), fresh()],
        (1,),
        {},
        ("misaligned access", 2, 0, 1, "no multiple of 16"),
    ),
    "an array that starts at an odd place": (
        kernel("const float2 *x, float2 *y", "y[threadIdx.x] = x[threadIdx.x];"),
        lambda: [aligned(64, np.float32, offset=4), aligned(64, np.float32)],
        (1,),
        {},
        ("misaligned access", 2, 0, 0, "no multiple of 8"),
    ),
    "a misaligned atomic": (
        kernel("float *y", "atomicAdd((float4 *)(y + 2 * threadIdx.x), make_float4(1, 1, 1, 1));"),
        lambda: [aligned(256, np.float32)],
        (0,),
        {"initialised": {0: True}},
        ("misaligned access", 2, 0, 1, "no multiple of 16"),
    ),
    "an index that overflows 32 bits": (
        kernel(
            "const float *x, float *y, int d",
            "int row = threadIdx.x * 1000;",
            "int i = row * d;",
            "y[threadIdx.x] = x[i % 32 & 31];",
        ),
        lambda: [fresh(), fresh(), 300_000],
        (1,),
        {},
        ("signed overflow", 3, 0, 8, r"8000 \* 300000"),
    ),
    "a local array out of bounds": (
        kernel(
            "float *y, int n",
            "float a[8] = {0};",
            "for (int i = 0; i < n; i++) a[i] = y[i];",
            "y[threadIdx.x] = a[threadIdx.x % 8];",
        ),
        lambda: [fresh(), 9],
        (0,),
        {"initialised": {0: True}, "block": 1},
        ("array bounds", 3, 0, 0, r"index 8 of an array of type 'float ?\[8\]'"),
    ),
    "a shared array out of bounds": (
        kernel("float *y", "__shared__ float s[4][33];", "s[threadIdx.x % 5][threadIdx.x] = 1;"),
        lambda: [fresh()],
        (0,),
        {},
        ("array bounds", 3, 0, 4, "index 4"),
    ),
    "a shift by 32": (
        kernel("int *y, int n", "y[threadIdx.x] = 1 << (n + threadIdx.x);"),
        lambda: [fresh(64, np.int32), 10],
        (0,),
        {},
        ("shift", 2, 0, 22, "shifts 1, of type 'int', by 32"),
    ),
    "a division by zero": (
        kernel("int *y", "y[threadIdx.x] = 7 / ((int)threadIdx.x - 6);"),
        lambda: [fresh(64, np.int32)],
        (0,),
        {},
        ("division", 2, 0, 6, "computes 7 / 0"),
    ),
    "a divergent barrier": (
        kernel(
            "float *y",
            "if (threadIdx.x < 40)",
            "  __syncthreads();",
            "else",
            "  __syncthreads();",
            "y[threadIdx.x] = 1;",
        ),
        lambda: [fresh()],
        (0,),
        {"block": 64},
        ("divergent barrier", 5, 0, 40, r"another barrier than block \(0,0,0\) thread \(0,0,0\) at kernel.cu:3"),
    ),
    "a skipped barrier": (
        kernel("float *y", "if (threadIdx.x == 33) return;", "__syncthreads();", "y[threadIdx.x] = 1;"),
        lambda: [fresh()],
        (0,),
        {"block": 64},
        ("skipped barrier", 3, 0, 0, r"without block \(0,0,0\) thread \(33,0,0\), which has returned"),
    ),
    "a lane that does not come to a shuffle": (
        kernel(
            "float *y",
            "float v = threadIdx.x;",
            "if (threadIdx.x != 7) v = __shfl_xor_sync(0xffffffffu, v, 1);",
            "__syncthreads();",
            "y[threadIdx.x] = v;",
        ),
        lambda: [fresh()],
        (0,),
        {},
        (
            "missing lane",
            3,
            0,
            0,
            r"waits with mask 0xffffffff for lane 7, .*thread \(7,0,0\), which is at a barrier at kernel.cu:4",
        ),
    ),
    "a lane that has returned": (
        kernel("float *y", "if (threadIdx.x == 7) return;", "__syncwarp();", "y[threadIdx.x] = 1;"),
        lambda: [fresh()],
        (0,),
        {},
        ("missing lane", 3, 0, 0, "lane 7, .*has returned"),
    ),
    "a lane that the block does not have": (
        kernel("float *y", "y[threadIdx.x] = __ballot_sync(0xffffffffu, 1);"),
        lambda: [fresh()],
        (0,),
        {"block": 40},
        ("missing lane", 2, 0, 32, "lane 8, .*does not exist"),
    ),
    "a lane outside the mask": (
        kernel("float *y", "y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0);"),
        lambda: [fresh()],
        (0,),
        {},
        ("lane outside its mask", 2, 0, 16, "is lane 16 and calls with mask 0x0000ffff"),
    ),
    "a value from outside the mask": (
        kernel("float *y", "if (threadIdx.x < 16) y[threadIdx.x] = __shfl_down_sync(0x0000ffffu, 1.0f, 4);"),
        lambda: [fresh()],
        (0,),
        {},
        ("foreign lane", 2, 0, 12, "lane 16, which is not in mask 0x0000ffff"),
    ),
    "different masks": (
        kernel(
            "float *y",
            "unsigned mask = threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u;",
            "y[threadIdx.x] = __ballot_sync(mask, 1);",
        ),
        lambda: [fresh()],
        (0,),
        {},
        ("missing lane", 3, 0, 0, "lane 16"),
    ),
    "a trap": (
        kernel("float *y", "if (blockIdx.x == 2 && threadIdx.x == 3) __trap();"),
        lambda: [fresh()],
        (0,),
        {"grid": 4},
        ("trap", 2, 2, 3, "stops the launch"),
    ),
}
# Both parties of these races may be the one that comes second.
EITHER = {
    "a race in shared memory in the other order": (3, 4),
    "a syncwarp of other lanes": (5, 7),
    "an atomic and a plain read": (2, 4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str):
    source, arguments, written, options, (kind, line, block, thread, holds) = FAULTS[name]
    args = arguments()
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    with pytest.raises(SimulationFault) as caught:
        run(source, args, written, **options)
    fault, message = caught.value, str(caught.value)
    lines = {int(found) for found in re.findall(r"kernel\.cu:(\d+)", message)}
    assert message.startswith(f"f: {fault.kind}: block ({fault.block[0]},0,0) thread ({fault.thread[0]},0,0) "), message
    if name in EITHER:
        assert fault.kind == "race" and lines == set(EITHER[name]), message
    else:
        assert (fault.kernel, fault.kind, fault.block, fault.thread) == (
            "f",
            kind,
            (block, 0, 0),
            (thread, 0, 0),
        ), message
        assert fault.where == f"kernel.cu:{line}" and re.search(holds, message), message
    for old, new in zip(before, args, strict=True):  # nothing half-written
        if isinstance(old, np.ndarray):
            np.testing.assert_array_equal(old, new)
    # The process and the library go on: the same library runs clean with threads that do nothing wrong, or fails alike.
    with pytest.raises(SimulationFault) as again:
        run(source, arguments(), written, **options)
    assert str(again.value).replace(" ", "")[:60] == message.replace(" ", "")[:60]


def test_a_library_is_usable_after_a_fault():
    source = kernel(
        "float *y, int n",
        "y[threadIdx.x] = 1;",
        "if (threadIdx.x == 5 && n == 5) return;",
        "__syncthreads();",
        "y[threadIdx.x + n] = 2;",
    )
    for n in (5, 64, 5, 64):
        y = np.zeros(128, np.float32)
        if n == 5:
            with pytest.raises(SimulationFault, match="skipped barrier"):
                run(source, [y, n], (0,), block=64)
            assert not y.any()
        else:
            run(source, [y, n], (0,), block=64)
            assert y[:64].tolist() == [1] * 64 and y[64:].tolist() == [2] * 64


def test_a_fault_in_a_header_names_both_places():
    source = '#include "math.h"\nextern "C" __global__ void f(i32 *y, i32 a) {\n  y[0] = sign_f32(y[0]) + (f32)a;\n}\n'
    with pytest.raises(SimulationFault) as caught:
        run(source, [np.zeros(1, np.int32), 1], (0,))
    assert caught.value.where.startswith("kernel.cu:3") and "y[0] = sign_f32" in str(caught.value)


def test_without_checking_missing_lanes_and_barriers_are_still_faults():
    for name in ("a lane that does not come to a shuffle", "a lane outside the mask"):
        source, arguments, written, options, (kind, line, *_) = FAULTS[name]
        with pytest.raises(SimulationFault) as caught:
            run(source, arguments(), written, check=False, **options)
        assert (caught.value.kind, caught.value.where) == (kind, f"kernel.cu:{line}")


# ---- Bad input
# --------------------------------------------------------------------------------------------------------------------

COPY = (
    'extern "C" __global__ void __launch_bounds__(128) f(const float *x, float *y, int n) { if (threadIdx.x < n)'
    " y[threadIdx.x] = x[threadIdx.x]; }"
)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"kernel": "g"}, "no kernel 'g'; there are f"),
        ({"block": 0}, "block"),
        ({"block": 129}, "at most 128"),
        ({"block": (1, 1, 65)}, "64 along z"),
        ({"grid": 0}, "grid"),
        ({"grid": (1, 65536, 1)}, "65535"),
        ({"shared": 228 * 1024}, "shared memory; at most"),
        ({"args": [fresh(), fresh()]}, "takes 3 arguments, not 2"),
        ({"args": [fresh(), fresh(), 2**31]}, r"argument 2: 2147483648 is outside"),
        ({"args": [fresh(), fresh(), 1.5]}, "argument 2 is a 32-bit integer, not float"),
        ({"args": [fresh(), 3, 3]}, "argument 1 is a pointer"),
        ({"args": [fresh(), fresh()[::2], 3]}, "contiguous"),
        ({"written": (0,)}, "argument 0 is to be written"),
        ({"written": (2,)}, "argument 2 is to be written"),
        ({"args": [fresh(), np.broadcast_to(np.float32(0), 1), 1]}, "read-only"),
    ],
)
def test_launches_that_are_refused(changed: dict[str, Any], match: str):
    options: dict[str, Any] = {"args": [fresh(), fresh(), 64], "written": (1,), **changed}
    with pytest.raises(InvalidProblem, match=match):
        run(COPY, options.pop("args"), options.pop("written"), **options)


def test_text_that_does_not_compile():
    with pytest.raises(CompilerError) as caught:
        compile_sim('extern "C" __global__ void f(int *y) {\n  y[0] = nothing;\n}\n')
    assert "kernel.cu:2" in caught.value.log and "nothing" in caught.value.source
    with pytest.raises(InvalidProblem, match="no kernel"):
        compile_sim('/* extern "C" __global__ void f() {} */ int x;')


def test_names_of_c_headers_are_free():
    """NVRTC knows no C headers: a text may give their names another meaning."""
    source = r"""
    typedef long long int64_t;
    typedef unsigned char uint8_t;
    template <class T> __device__ T twice(T v) {
      __shared__ T kept[32]; kept[threadIdx.x] = v; return kept[threadIdx.x] + v;
    }
    __constant__ float table[4] = {1, 2, 3, 4};
    __device__ const int signal = 3;
    extern "C" __global__ void f(int64_t *y) {
      y[threadIdx.x] = twice((int64_t)threadIdx.x) + (int)twice((float)signal) + (int)table[threadIdx.x % 4];
    }"""
    y = np.zeros(32, np.int64)
    for check in (False, True):
        run(source, [y], (0,), check=check)
        np.testing.assert_array_equal(y, np.arange(32) * 2 + 6 + np.arange(32) % 4 + 1)


def test_launches_from_several_threads():
    results = [np.zeros((13, 5), np.float32) for _ in range(4)]
    x = random(13, 5)
    jobs = [
        threading.Thread(target=run, args=(LAYERNORM, [x, y, 13, 5], (1,)), kwargs={"grid": 2, "block": 256})
        for y in results
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert all((y == results[0]).all() and y.any() for y in results)


def test_compiled_text_is_kept(monkeypatch: pytest.MonkeyPatch):
    compile_sim(COPY, check=True)
    monkeypatch.setattr(cudasim, "compile_object", None)
    compile_sim(COPY, check=True)
    with pytest.raises(TypeError):
        compile_sim(COPY + "\n", check=True)


def test_unused_functions_of_the_simulator_are_not_compiled_without_optimisation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRADC_OPTIMIZE", "0")
    text = 'extern "C" __global__ void count(int *n) { atomicAdd(n, 1); }'
    payload = compile_sim(text).payload
    assert b"atomicAdd" in payload and b"atomicXor" not in payload


def test_speed(record_property: Any):
    """Threads per second, for the record."""
    x = random(4096, 64)
    for check in (False, True):
        y = np.zeros_like(x)
        start = time.perf_counter()
        run(LAYERNORM, [x, y, 4096, 64], (1,), grid=512, block=256, check=check)
        record_property(f"layernorm, check={check}, threads/s", round(4096 * 32 / (time.perf_counter() - start)))
