"""The kernels that serve a call beside a program's own: matrix products of any strides, additions, packing; in the
simulator's checking mode, and compiled by NVRTC.
"""

from __future__ import annotations

from typing import Any

import long_tests
import numpy as np
import pytest

from gradc.codegen.cuda.actions import FLAG_WORDS, Part, Product, Strided
from gradc.codegen.cuda.library_products import library_of
from gradc.codegen.cuda.products import launches_of, matmul_text
from gradc.codegen.cuda.render import prelude
from gradc.codegen.cuda.support import ADDED, support_text
from gradc.errors import SimulationFault
from gradc.ir.types import DTYPES
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.on_device import DeviceArrays, add
from gradc.runtime.host.arrays import byte_bounds
from gradc.runtime.simulator.device import Simulator

pytestmark = pytest.mark.optimised

MULTIPLIED = ("f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2", "i8", "i16", "i32", "i64", "u8", "u16", "u32")
WIDENED = (("f16", "f32"), ("bf16", "f32"))
"""The dtypes of operands and of a wider product."""
KINDS = (*((name, name) for name in MULTIPLIED), *WIDENED)
TEXT = prelude() + matmul_text(KINDS)
FINE = np.full(FLAG_WORDS + 1, 2**64 - 1, np.uint64)
U64 = np.dtype(np.uint64)


def span(array: np.ndarray) -> Span:
    return Span(array.ctypes.data, array.size, array.dtype)


def multiplied(
    device: Simulator,
    a: np.ndarray,
    b: np.ndarray,
    flag: np.ndarray = FINE,
    site: int = 0,
    dtype: np.dtype[Any] | None = None,
    more: np.ndarray | None = None,
) -> np.ndarray:
    """By our kernel, whatever the strides, added to ``more``."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    out = np.full(shape, 7, dtype or a.dtype) if more is None else more.copy()

    def operand(name: str, array: np.ndarray) -> tuple[Strided, np.ndarray]:
        low, high = byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
        start = array.ctypes.data - low
        held = Part(name, 0, (high - low) // array.itemsize, array.dtype)
        return (
            Strided(held, array.shape, tuple(s // array.itemsize for s in array.strides), start // array.itemsize),
            array,
        )

    parts = {"a": operand("a", a)[0], "b": operand("b", b)[0], "out": operand("out", out)[0]}
    bases = {
        "a": byte_bounds(a)[0] if a.size else 0,
        "b": byte_bounds(b)[0] if b.size else 0,
        "out": out.ctypes.data,
        "flag": flag.ctypes.data,
    }
    device.begin([Span(out.ctypes.data, out.nbytes, np.dtype(np.uint8))] if more is None else [])
    asked = Product(parts["a"], parts["b"], parts["out"], site, more is not None)
    for launch in launches_of(asked, Part("flag", 0, 4, U64)):
        args = [Span(bases[x.root] + x.start, x.count, x.dtype) if isinstance(x, Part) else x for x in launch.args]
        device.launch(launch.function, launch.blocks, launch.threads, args, launch.written)
    return out


@pytest.fixture(scope="module")
def device() -> Simulator:
    return Simulator(TEXT, check=True)


def values(rng: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    dtype = DTYPES[name]
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.np)
    return rng.integers(*dtype.range, shape, dtype=dtype.np, endpoint=True)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind in "iu":  # wrapping
        wide = np.matmul(a.astype(np.int64).view(np.uint64), b.astype(np.int64).view(np.uint64))
        return wide.astype(a.dtype)
    return np.matmul(a.astype(np.longdouble), b.astype(np.longdouble))


@pytest.mark.parametrize(("name", "result"), KINDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 31, 65), (5, 40, 3), (7, 2, 0), (0, 3, 4), (3, 0, 4)])
def test_products_of_ours(device: Simulator, name: str, result: str, sizes: tuple[int, int, int]) -> None:
    """Odd sizes, transposed and strided operands; an empty inner axis gives zeros; integers wrap."""
    m, n, k = sizes
    rng = np.random.default_rng(m)
    for a, b in (
        (values(rng, (m, k), name), values(rng, (k, n), name)),
        (
            values(rng, (2 * k, 3 * m), name).T[::3, 1::2] if k else values(rng, (m, k), name),
            values(rng, (n, k), name).T,
        ),
        (np.broadcast_to(values(rng, (1, k), name), (m, k)), values(rng, (k, n), name)[::-1]),
    ):
        out, wanted = multiplied(device, a, b, dtype=DTYPES[result].np), exact(a, b)
        if DTYPES[name].is_float:
            unit = {"f64": 1e-15, "f32": 1e-7, "f16": 5e-4, "bf16": 4e-3, "f8e4m3": 0.07, "f8e5m2": 0.13}[result]
            # each term is rounded once when it is added, the sum once when it is stored
            assert (
                np.abs(out.astype(np.float64) - wanted)
                <= unit * np.abs(wanted)
                + max(1e-7 if name != "f64" else 1e-15, 0)
                * max(k, 1)
                * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
                + (2e-3 if name.startswith("f8") else 1e-7)
            ).all()
        else:
            assert np.array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_a_product_that_is_added(device: Simulator, dtype: str) -> None:
    rng = np.random.default_rng(1)
    a, b, more = (values(rng, shape, dtype) for shape in ((33, 5), (5, 40), (33, 40)))
    wanted = exact(a, b) + more
    found = multiplied(device, a, b, more=more)
    unit = {"f64": 1e-15, "f32": 1e-7, "bf16": 4e-3}[dtype]
    assert (np.abs(found.astype(np.float64) - wanted) <= unit * np.abs(wanted) + 20 * min(unit, 1e-7)).all()


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 2), (2, 1, 3, 2)])
def test_batches_of_any_strides(device: Simulator, shape: tuple[int, ...]) -> None:
    """Axes of a batch in another order, repeated, and more of them than a launch takes."""
    rng = np.random.default_rng(0)
    a = values(rng, (*shape[::-1], 5, 4), "f32").transpose(*range(len(shape))[::-1], len(shape), len(shape) + 1)
    b = np.broadcast_to(values(rng, (*shape[1:], 4, 6), "f32"), (*shape, 4, 6))
    assert np.allclose(multiplied(device, a, b), a @ b, atol=1e-5)


def test_a_product_of_ours_stops_behind_a_check(device: Simulator) -> None:
    flag = FINE.copy()
    flag[FLAG_WORDS] = 5
    a, b = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)
    untouched = Simulator(TEXT)
    assert (multiplied(untouched, a, b, flag, 1) == 7).all()
    assert (multiplied(device, a, b, flag, 0) == 4).all(), "this check comes later"


def test_the_check_sees_a_product_out_ofbyte_bounds(device: Simulator) -> None:
    a, b, out = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32), np.zeros((3, 2), np.float32)
    args = [
        span(a),
        span(b),
        span(out),
        0,
        0,
        3,
        3,
        4,
        1,
        4,
        1,
        3,
        1,
        *[0] * 6,
        4,
        span(out[:0]),
        0,
        0,
        span(FINE),
        0,
    ]  # b has two columns
    with pytest.raises(SimulationFault, match="out of bounds"):
        device.launch("gradc_matmul_f32", 1, 256, args, [2])


def test_what_is_ours_alone() -> None:
    part = Part("x", 0, 100, np.dtype(np.float32))
    asked = Product(Strided(part, (3, 4), (8, 2)), Strided(part, (4, 2), (2, 1)), Strided(part, (3, 2), (2, 1)), 0)
    assert library_of(asked) is None and len(launches_of(asked, part)) == 1


@pytest.mark.parametrize("name", ADDED)
def test_additions(name: str) -> None:
    device = Simulator(support_text(), check=True)
    rng = np.random.default_rng(0)
    to, more = values(rng, (1001,), name), values(rng, (1001,), name)
    wanted = to + more
    add(device, to, more, span(FINE), 1, 0)
    assert np.array_equal(to.view(np.uint8), wanted.view(np.uint8))
    flag = FINE.copy()
    flag[FLAG_WORDS] = 0
    add(device, to, more, span(flag), 1, 0)
    assert np.array_equal(to.view(np.uint8), wanted.view(np.uint8)), "a check has found something"


class SimulatedArrays(DeviceArrays):
    device = Simulator()
    support = Simulator(support_text(), check=True)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_packing(dtype: str) -> None:
    """Any order, negative and repeated steps, odd addresses."""
    arrays = SimulatedArrays()
    whole = (
        np.random.default_rng(0)
        .integers(0, 255, 6000 * 8)
        .astype(np.uint8)[: 2520 * np.dtype(dtype).itemsize]
        .view(dtype)
        .reshape(2, 3, 4, 5, 3, 7)
    )
    odd = np.zeros(2520 * whole.itemsize + 1, np.uint8)[1:].view(dtype).reshape(whole.shape)
    odd[...] = whole
    for array in (
        whole.transpose(5, 0, 3, 1, 4, 2),
        whole[:, ::-1, 1:3, ::2],
        np.broadcast_to(whole[0, 0, 0, 0], (4, 3, 7)),
        odd,
        odd[:, :, ::2],
        whole[0, 0, 0, 0, 0, :0],
    ):
        if not array.size:
            continue
        found = arrays.contiguous(array, 0)
        assert found.flags.c_contiguous and np.array_equal(
            np.asarray(found.view(np.ndarray)).view(np.uint8), np.ascontiguousarray(array).view(np.uint8)
        )


@long_tests.values
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_takes_them(arch: str) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    from gradc.runtime.cuda.nvrtc import compile_cuda

    products, support = (compile_cuda(text, arch=arch, spills="error") for text in (TEXT, support_text()))
    assert set(products.kernels) == {f"gradc_matmul_{name}" for name in (*MULTIPLIED, *map("_".join, WIDENED))}
    assert set(support.kernels) == {
        *(f"gradc_add_{name}" for name in ADDED),
        *(f"gradc_pack_{size}" for size in (1, 2, 4, 8)),
        "gradc_numbers",
    }
