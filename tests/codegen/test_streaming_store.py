"""Streaming stores: the same bits, whatever the sizes, alignments and strategies; and the rule that decides."""

import ctypes
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.ir.types import parse_type
from gradc.runtime.host import pool
from gradc.runtime.host.cpu import ALIGN

pytestmark = pytest.mark.optimised

EVERYTHING = 1
"""Bytes from which arrays are written by streaming stores: all of them."""
CASES = {
    "map": (lambda x, w: ops.silu(x) * w, {"x": "f32[N,D]", "w": "f32[D]"}),
    "two outputs": (lambda x, w: (ops.exp(x), ops.tanh(x) + w), {"x": "f32[N,D]", "w": "f32[D]"}),
    "softmax": (lambda x, w: ops.softmax(x * w), {"x": "f32[N,D]", "w": "f32[D]"}),
    "softmax of the middle": (
        lambda x, w: ops.softmax(ops.reshape(x, (x.shape[0], x.shape[1], 1)) * 2.0, axis=1),
        {"x": "f32[N,D]", "w": "f32[D]"},
    ),
    "layer_norm": (lambda x, w: ops.layer_norm(x, (x.shape[1],), w), {"x": "f32[N,D]", "w": "f32[D]"}),
    "bf16": (lambda x, w: ops.gelu(x) * w, {"x": "bf16[N,D]", "w": "bf16[D]"}),
    "f64": (lambda x, w: ops.sigmoid(x) * w, {"x": "f64[N,D]", "w": "f64[D]"}),
    "transposed": (lambda x, w: ops.transpose(ops.exp(x), (1, 0)), {"x": "f32[N,D]", "w": "f32[D]"}),
}
SHAPES = [(0, 5), (1, 1), (3, 17), (7, 513), (40, 1025), (1, 5000)]


def arrays(types, n, d):
    random = np.random.default_rng(n * 7 + d)
    dims = {"N": n, "D": d}
    found = {}
    for name, text in types.items():
        type_ = parse_type(text)
        found[name] = random.standard_normal(type_.concrete(dims)).astype(type_.dtype.np)
    return found


def results(function, types, given):
    """Values and gradients, in a module compiled anew."""
    module = gradc.compile(gradc.trace(function, **types), wrt=["x"])
    y, residuals = module.forward(given)
    values = y if isinstance(y, dict) else {"y": y}
    random = np.random.default_rng(5)
    cotangents = [random.standard_normal(v.shape).astype(v.dtype) for v in values.values()]
    return [*values.values(), *dict(module.backward(residuals, *cotangents)).values()]


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_same(case, shape):
    function, types = CASES[case]
    given = arrays(types, *shape)
    plain = results(function, types, given)
    with knobs.STREAM_FROM.set(EVERYTHING):
        same(results(function, types, given), plain)


@pytest.mark.parametrize("rows, table, width", [(0, 4, 40), (9, 5, 33), (700, 40, 64), (700, 3, 257), (64, 1000, 32)])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_rows_of_a_table(rows, table, width, dtype):
    """Segments that are whole, split over chunks, and empty."""
    types = {"tokens": "i64[N]", "weight": f"{dtype}[V,D]"}
    random = np.random.default_rng(rows + table)
    tokens = random.integers(0, table, rows)
    tokens[: rows // 2] = 0  # a hot row
    weight = random.standard_normal((table, width)).astype(np.float32 if dtype == "f32" else np.float64)

    def gradient():
        module = gradc.compile(
            gradc.trace(lambda tokens, weight: ops.embedding(tokens, weight), **types), wrt=["weight"]
        )
        y, residuals = module.forward(tokens=tokens, weight=weight)
        return module.backward(
            residuals, np.random.default_rng(1).standard_normal(y.shape).astype(y.dtype), dims={"V": table}
        )["weight"]

    plain = gradient()
    with knobs.STREAM_FROM.set(EVERYTHING):
        assert gradient().tobytes() == plain.tobytes()


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
def test_outputs_that_begin_anywhere(offset):
    """The first and last elements lie in lines that are not filled."""
    x = np.random.default_rng(0).standard_normal((11, 700)).astype(np.float32)
    memory = np.full(11 * 700 + 64, 7.0, np.float32)
    out = memory[offset : offset + 7700].reshape(11, 700)
    with knobs.STREAM_FROM.set(EVERYTHING):
        module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N,D]"))
        module(x=x, out={"y": out})
    assert (memory[:offset] == 7).all() and (memory[offset + 7700 :] == 7).all()
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=2e-7)


@pytest.mark.parametrize("columns", [511, 512])
@pytest.mark.parametrize("known", [True, False])
def test_short_rows_are_not_staged(known, columns):
    """Rows of less than 2 KB are written where they lie: no thread keeps a block of them."""
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x=f"f32[N,{columns}]" if known else "f32[N,D]"), wrt=[])
    kept = module.memory(N=4096, **({} if known else {"D": columns})).threads / pool.num_threads()
    if columns == 512:
        assert kept >= 512 * 4
    else:
        assert kept == 0 if known else kept <= ALIGN


def test_narrow_types_in_memory():
    x = np.random.default_rng(0).standard_normal((5, 1300)).astype(ml_dtypes.bfloat16)
    with knobs.STREAM_FROM.set(EVERYTHING):
        module = gradc.compile(gradc.trace(lambda x: -x, x="bf16[N,D]"))
        assert (module(x=x) == -x).all()


def test_the_rule_is_measured_once(monkeypatch, tmp_path):
    """What a machine gains is kept; below a gain of 5 percent nothing is written by streaming stores, and small arrays
    never ask.
    """
    monkeypatch.setenv("GRADC_CACHE_DIR", str(tmp_path))
    asked = []

    def gain(percent):
        def measure():
            asked.append(percent)
            return percent

        monkeypatch.setattr(pool, "_stream_gain", measure)
        pool._stream_from.cache_clear()
        return pool.stream_from()

    try:
        assert gain(104) == pool.NEVER
        assert gain(300) == pool.NEVER and asked == [104]  # from the cache
        monkeypatch.setenv("GRADC_CACHE_DIR", str(tmp_path / "other"))
        assert pool._LEAST <= gain(130) <= pool._MOST and asked == [104, 130]
    finally:
        pool._stream_from.cache_clear()


def test_without_room_to_measure_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADC_CACHE_DIR", str(tmp_path))

    def full():
        raise MemoryError

    monkeypatch.setattr(pool, "_stream_gain", full)
    pool._stream_from.cache_clear()
    try:
        assert pool.stream_from() == pool.NEVER
        monkeypatch.setattr(pool, "_stream_gain", lambda: 130)
        pool._stream_from.cache_clear()
        assert pool.stream_from() <= pool._MOST
    finally:
        pool._stream_from.cache_clear()


def test_the_measurement():
    """Both ways write all of it; which is faster is nobody's promise."""
    assert pool._stream_gain() > 0
    source = np.arange(3 << 18, dtype=np.float32)
    target = np.zeros_like(source)
    assert (
        pool._library().gradc_stream_gain(
            pool.new_context().pointer,
            *(ctypes.c_void_p(a.ctypes.data) for a in (target, source)),
            ctypes.c_int64(source.nbytes),
        )
        > 0
    )
    np.testing.assert_array_equal(target, -source)


def test_empty_rows_of_two_tables_in_one_kernel():
    """Each has a row of its own to write from; memory that was given back is overwritten here, so that its contents
    would show.
    """
    script = """
    import numpy as np, gradc
    from gradc import ops
    from gradc.ir.dims import symbol
    def both(i, x):
        y = ops.exp(x)
        return ops.scatter_add(i, y, size=symbol("V")), ops.scatter_add(i, ops.cast(y, "f64"), size=symbol("V"))
    module = gradc.compile(gradc.trace(both, i="i64[N]", x="f32[N,D]"), reductions={"*": "segmented"})
    assert len(module.forward.program.kernels) == 2  # one of them looks at the indices
    for d in range(64, 513, 64):  # each time more than a thread has
        found = module.forward.run(i=np.array([1, 1, 70]), x=np.zeros((3, d), np.float32), dims={"V": 6000})
        for value in found.values():
            assert value[1, 0] == 2 and value[70, 0] == 1 and value.sum() == 3 * d
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "GRADC_STREAM_FROM": str(EVERYTHING), "GRADC_NUM_THREADS": "4", "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
