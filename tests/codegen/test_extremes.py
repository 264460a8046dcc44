"""The fused kernels of the CPU at the edges: sizes of 0, 1 and 10^7, arrays that lie anyhow, other compilers and
processors, little memory.

What else holds bad input: indices, files, names and wrong arguments in test_faults, test_text and test_unsupported;
sizes of 0 and 1 of each op in test_ops; the same bits for any number of threads in test_determinism; the pool itself in
test_runtime_cpu; the scalar functions on every width of vector in test_cpu_math.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest
from standard_kernels import STANDARD, TOLERANCE, agree, computed, cotangent, expected

import gradc
from gradc.errors import IndexOutOfRange, OutOfMemory
from gradc.runtime.host import arrays, prepared
from gradc.runtime.host.toolchain import find_compiler

pytestmark = pytest.mark.optimised

f32 = np.float32
Array = np.ndarray[Any, Any]
MODULES: dict[str, gradc.Module] = {}


def module(name: str) -> gradc.Module:
    """One for every size."""
    if name not in MODULES:
        MODULES[name] = gradc.compile(STANDARD[name].graph, wrt=STANDARD[name].wrt)
    return MODULES[name]


every_kernel = pytest.mark.parametrize("name", STANDARD)
SIZES = [(0, 5), (0, 0), (3, 0), (1, 1), (1, 9), (300, 1), (2, 100_003), (5000, 2), (257, 65), (1030, 16)]


@every_kernel
def test_sizes(name: str) -> None:
    """No rows, no columns, one element, one row, rows of one, few long rows, many short ones."""
    m = module(name)
    for n, d in SIZES:
        given = STANDARD[name].inputs(n, min(d, 1003) if name == "grid_sample" else d)  # an image of up to 3 x 1003
        if name == "cross_entropy" and n and not d:
            with pytest.raises(
                IndexOutOfRange, match=r"index 0 at position 0 .* out of range \[0, 0\)"
            ):  # no class is a target of none
                m.forward(**given)
            continue
        got = computed(m, given)
        agree(got, expected(m, given, got["y"]), f"{n} rows of {d}")


EACH = 9973
"""Of ten million elements one in so many is compared; sums in f64 run over all."""


def reference(name: str, x: Array, dy: Array) -> tuple[Array, Array]:
    """Value and gradient of a row, by definition and in f64, at each EACH-th element."""
    mean = lambda a: a.mean(-1, dtype=np.float64, keepdims=True)
    if name == "softmax":
        e = np.exp(x, dtype=np.float64)
        total, inner = e.sum(-1, keepdims=True), np.einsum("nd,nd->n", e, dy)[:, None]
        y = e[:, ::EACH] / total
        return y, y * (dy[:, ::EACH] - inner / total)
    x = x.astype(np.float64)
    x -= mean(x) if name == "layer_norm" else 0
    r = 1 / np.sqrt(
        np.einsum("nd,nd->n", x, x)[:, None] / x.shape[1] + (1e-5 if name == "layer_norm" else np.finfo(f32).eps)
    )
    y = (x * r)[:, ::EACH]
    inner = np.einsum("nd,nd->n", x, dy)[:, None] * r / x.shape[1]
    return y, r * (dy[:, ::EACH] - (mean(dy) if name == "layer_norm" else 0) - y * inner)


def ten_million(name: str, shape: tuple[int, int]) -> tuple[Array, Array, dict[str, Array]]:
    x, dy = (np.resize(np.random.default_rng(seed).standard_normal(1_000_003, f32), shape) for seed in (0, 1))
    others = {
        "layer_norm": {"gamma": np.ones(shape[1], f32), "beta": np.zeros(shape[1], f32)},
        "rms_norm": {"gamma": np.ones(shape[1], f32)},
        "softmax": {},
    }
    return x, dy, computed(module(name), {"x": x, **others[name]}, lambda y: dy)


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_a_row_of_ten_million(name: str) -> None:
    x, dy, got = ten_million(name, (1, 10**7))
    for found, want in zip((got["y"], got["d.x"]), reference(name, x, dy), strict=True):
        np.testing.assert_allclose(found[:, ::EACH], want, rtol=0, atol=TOLERANCE * float(np.abs(want).max()))


@pytest.mark.parametrize("name", ["softmax", "rms_norm"])
def test_ten_million_rows_of_one(name: str) -> None:
    x, dy, got = ten_million(name, (10**7, 1))
    some = slice(None, None, EACH)
    for found, want in zip((got["y"], got["d.x"]), reference(name, x[some], dy[some]), strict=True):
        np.testing.assert_allclose(found[some], want, rtol=0, atol=TOLERANCE * max(1, float(np.abs(want).max())))
    if name == "rms_norm":  # a sum over all rows
        total = float((dy.astype(np.float64) * got["y"]).sum())
        assert abs(got["d.gamma"][0] - total) < 1e-6 * float(np.abs(dy).sum())


@long_tests.values
def test_ten_million_rows_of_an_embedding_and_a_loss() -> None:
    """Half of all rows on one row of the table; of the loss the mean."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, 10**7)
    tokens[::2] = 7
    m = module("embedding")
    _, residuals = m.forward(tokens=tokens, weight=np.zeros((50, 1), f32))
    dy = random.standard_normal((10**7, 1), f32)
    want = np.bincount(tokens, dy[:, 0].astype(np.float64), 50)
    np.testing.assert_allclose(
        m.backward(residuals, dy)["weight"][:, 0], want, rtol=0, atol=1e-6 * float(np.abs(dy).sum()) / 50
    )
    x = random.standard_normal((1, 10**7), f32)
    m = module("cross_entropy")
    loss, residuals = m.forward(x=x, target=np.array([3]))
    e = np.exp(x.astype(np.float64))
    assert abs(loss - (np.log(e.sum()) - float(x[0, 3]))) < 1e-5
    e /= e.sum()
    e[0, 3] -= 1
    np.testing.assert_allclose(m.backward(residuals, f32(1))["x"], e, rtol=0, atol=1e-6)


# -- arrays that lie anyhow --------------------------------------------------------------------------------------------


def odd(a: Array) -> Array:
    """From an address that is no multiple of the item."""
    raw = np.empty(a.nbytes + 1, np.uint8)
    out = raw[1:].view(a.dtype).reshape(a.shape) if a.size else a
    out[...] = a
    return out


def spread(a: Array) -> Array:
    """Every other element, backwards."""
    out = np.empty(tuple(2 * n for n in a.shape), a.dtype)[tuple(slice(None, None, -2) for _ in a.shape)]
    out[...] = a
    return out


def shifted(a: Array) -> Array:
    """From the second element of a row: aligned for the element, for no vector."""
    out = np.empty((*a.shape[:-1], a.shape[-1] + 3), a.dtype)[..., 1:-2]
    out[...] = a
    return out


def locked(a: Array) -> Array:
    out = a.copy()
    out.flags.writeable = False
    return out


@every_kernel
@pytest.mark.parametrize("lying", [odd, spread, shifted, np.asfortranarray, locked])
def test_arrays_that_lie_anyhow_give_the_same_bits(name: str, lying: Callable[[Array], Array]) -> None:
    m = module(name)
    given = STANDARD[name].inputs(37, 19)
    want = computed(m, given)
    moved = {k: lying(v) for k, v in given.items()}
    got = computed(m, moved, lambda y: lying(cotangent(y)) if y.ndim else cotangent(y))
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)
    for k, v in given.items():
        np.testing.assert_array_equal(moved[k], v)  # what was given is as it was


def test_a_broadcast_input_has_strides_of_0() -> None:
    x = np.broadcast_to(np.arange(5, dtype=f32), (64, 5))
    got = computed(module("softmax"), {"x": x})
    np.testing.assert_array_equal(got["y"], computed(module("softmax"), {"x": x.copy()})["y"])


# -- other compilers, processors and numbers of threads ----------------------------------------------------------------

TESTS = str(Path(__file__).parents[1])
CHECK = f"import sys; sys.path.insert(0, {TESTS!r}); import standard_kernels; standard_kernels.main()"


@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime", "tests/standard_kernels.py")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its levels are meant")
@pytest.mark.parametrize(("machine", "width"), [("x86-64", 16), ("x86-64-v3", 32)], ids=["no AVX", "no AVX-512"])
def test_processors(machine: str, width: int, tmp_path: Path) -> None:
    """A compiler that knows of narrower vectors only; each kernel, the pool and the matrix product as for such a
    processor, on one thread.
    """
    compiler = find_compiler()
    wrapper = tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(compiler.argv)} "$@" -march={machine}\n')
    wrapper.chmod(0o755)
    environment = {**os.environ, "CC": str(wrapper), "OMP_NUM_THREADS": "1", "GRADC_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("GRADC_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"right with 1 threads and vectors of {width} bytes\n"


# -- little memory -----------------------------------------------------------------------------------------------------


@every_kernel
def test_a_pool_that_keeps_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = module(name)
    given = STANDARD[name].inputs(130, 257 if name != "grid_sample" else 33)
    want = computed(m, given)
    monkeypatch.setattr(arrays, "SMALL", 1)
    monkeypatch.setattr(arrays.pool, "limit", 0)
    for _ in range(3):
        for key, value in computed(m, given).items():
            np.testing.assert_array_equal(value, want[key], err_msg=key)
    assert arrays.pool.retained == 0


@every_kernel
@pytest.mark.parametrize("known", [False, True])
def test_no_memory_is_one_error_and_the_next_call_is_right(
    known: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever allocation of a call fails, be the call the first of its sizes, or one that is prepared."""
    given = STANDARD[name].inputs(40, 33)
    want = computed(module(name), given)
    for each in (arrays, prepared):
        monkeypatch.setattr(each, "SMALL", 1)
    m = gradc.compile(STANDARD[name].graph, wrt=STANDARD[name].wrt)
    if known:
        computed(m, given)
    arrays.pool.trim()
    given_out = arrays._map
    left = 0

    def scarce(size: int) -> Array:
        nonlocal left
        if left <= 0:
            raise OSError(12, "Cannot allocate memory")
        left -= 1
        return given_out(size)

    monkeypatch.setattr(arrays, "_map", scarce)
    refused = 0
    for enough in range(20):
        left = enough
        arrays.pool.trim()
        before = arrays.pool.reset_peak()
        try:
            got = computed(m, given)
        except OutOfMemory as error:
            assert "Cannot allocate memory" in str(error)
            refused += 1
        else:
            break
        assert arrays.pool.reset_peak() == before  # nothing of the failed call is held
    assert 1 < refused < 20
    for key, value in got.items():
        np.testing.assert_array_equal(value, want[key], err_msg=key)


@long_tests.values
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of the address space")
def test_a_process_at_its_limit() -> None:
    """What the pool keeps is given back before a call is refused; a refused call leaves everything usable."""
    script = """
    import resource, numpy as np, gradc
    from gradc import ops
    from gradc.errors import OutOfMemory
    from gradc.runtime.host import arrays
    arrays.pool.limit = 1 << 40
    module = gradc.compile(gradc.trace(lambda x: ops.softmax(x), x="f32[N,D]"), wrt=["x"])
    def both(n, x=np.linspace(-1, 1, 1024, dtype=np.float32)):
        y, residuals = module.forward(x=np.broadcast_to(x, (n, 1024)))
        assert np.allclose(y.sum(1), 1, atol=1e-4)
        return module.backward(residuals, y)["x"]
    first = both(4).copy()
    both(5000)  # three arrays of 20 MB, which the pool keeps
    kept = arrays.pool.retained
    size = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), resource.RLIM_INFINITY))
    both(6000)  # of another class: 72 MB, and 60 are kept in blocks that are too small
    print("kept", kept >= 2 * 5000 * 4096)
    try:
        both(100000)
    except OutOfMemory as error:
        print("refused")
    print("right", np.array_equal(both(4), first))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    long = np.ones((1, 3 * 10**7), np.float32)
    out = {"y": np.empty_like(long)}
    size = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20), resource.RLIM_INFINITY))
    try:
        module.forward.run(x=long, out=out)  # a thread keeps the row from pass to pass: 120 MB of its own
    except OutOfMemory as error:
        print("bytes more" in str(error))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("right", np.allclose(module.forward.run(x=long, out=out)["y"], 1 / long.size), np.array_equal(both(4), first))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stdout == "kept True\nrefused\nright True\nTrue\nright True True\n", done.stdout + done.stderr[-3000:]
