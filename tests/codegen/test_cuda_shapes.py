"""Narrow columns, sums of everything, axes that are not the last, and transposes on a GPU: enough blocks, accesses that
lie together, and NumPy's numbers in the simulator's checking mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.codegen.cuda.actions import Launch
from gradc.codegen.cuda.launch import LaunchPlan
from gradc.codegen.cuda.render import render_cuda
from gradc.codegen.text import widened

F32 = 2.0**-24
DEVICE = 264
"""Blocks: two for each of 132 multiprocessors."""
LIGHT = 8 << 20
"""Bytes of partial results, a few percent of what the kernels below read."""


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def planned(fn: Callable[..., Any], dims: dict[str, int], wrt: tuple[str, ...] = (), **inputs: str) -> LaunchPlan:
    """The launches of the last program of a function; nothing is compiled."""
    module = gradc.compile(gradc.trace(fn, **inputs), wrt=list(wrt), target="cuda", arch="sm_90")
    program = [*module.executables.values()][-1].program
    return LaunchPlan(program, render_cuda(program)[1], dims)


def most_blocks(plan: LaunchPlan) -> int:
    return max(a.blocks for actions in plan.actions for a in actions if isinstance(a, Launch))


def simulated(fn: Callable[..., Any], **inputs: str) -> Callable[..., dict[str, np.ndarray]]:
    module = gradc.compile(gradc.trace(fn, **inputs), target="cuda-sim")

    def run(**given: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs, the same in every order of blocks and threads."""
        module.forward.native.device.seed = None
        once = {name: np.asarray(a) for name, a in module.forward.run(**given).items()}
        module.forward.native.device.seed = 5
        again = module.forward.run(**given)
        assert all(np.asarray(again[name]).tobytes() == a.tobytes() for name, a in once.items())
        return once

    return run


def near(found: np.ndarray, wanted: np.ndarray, roundings: int = 4) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= roundings * F32 * np.abs(wanted).max(initial=0)


# -- column sums -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3, 4, 64, 100, 512])
def test_column_sums_of_any_width_fill_a_device(columns: int) -> None:
    plan = planned(lambda x: ops.sum(x, axis=0), {"N": (1 << 26) // columns}, x=f"f32[N,{columns}]")
    assert most_blocks(plan) >= DEVICE and plan.workspace <= LIGHT
    assert sum(isinstance(a, Launch) for actions in plan.actions for a in actions) == 2


def test_sums_beside_whole_rows_fill_a_device() -> None:
    norm = planned(lambda x, w: ops.rms_norm(x, 128, w), {"N": 1 << 19}, ("x", "w"), x="bf16[N,128]", w="bf16[128]")
    assert most_blocks(norm) >= DEVICE and norm.workspace <= LIGHT


def test_narrow_column_sums() -> None:
    """Tasks of a block share a chunk: chunks that end inside a block's rows, and fewer rows than tasks."""
    run = simulated(
        lambda a, b, c: {f"y{i}": ops.sum(x, axis=0) for i, x in enumerate((a, b, c))},
        a="f32[N,3]",
        b="f32[N,4]",
        c="f32[N,40]",
    )
    rng = np.random.default_rng(0)
    for rows in (0, 1, 63, 700, 5000):
        given = {n: rng.uniform(0.5, 1.5, (rows, d)).astype(np.float32) for n, d in (("a", 3), ("b", 4), ("c", 40))}
        for found, x in zip(run(**given).values(), given.values(), strict=True):
            near(found, x.astype(np.float64).sum(axis=0), 1)


# -- sums of everything ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1 << 24), (1 << 20, 64)])
def test_a_sum_of_everything_fills_a_device(shape: tuple[int, int]) -> None:
    for types in ({"x": "f32[N,M]"}, {"x": f"bf16[{shape[0]},{shape[1]}]"}):
        plan = planned(ops.sum, {"N": shape[0], "M": shape[1]}, **types)
        assert most_blocks(plan) >= DEVICE and plan.workspace <= LIGHT


def test_sums_of_everything() -> None:
    """All of an array, a product of two, one with a row's factor (which stays rows), a maximum, one rounded to bf16."""
    run = simulated(
        lambda x, t, w: {
            "all": ops.sum(x),
            "product": ops.sum(x * t),
            "by_row": ops.sum(x * w),
            "most": ops.amax(x),
            "narrow": ops.sum(ops.cast(x, "bf16")),
        },
        x="f32[N,M]",
        t="f32[N,M]",
        w="f32[N,1]",
    )
    rng = np.random.default_rng(0)
    for rows, columns in ((3, 5), (200, 130), (2, 20000)):
        x, t = (rng.uniform(0.5, 1.5, (rows, columns)).astype(np.float32) for _ in range(2))
        w = rng.uniform(0.5, 1.5, (rows, 1)).astype(np.float32)
        found, wide = run(x=x, t=t, w=w), x.astype(np.float64)
        near(found["all"], wide.sum(), 1)
        near(found["product"], (wide * t).sum(), 2)
        near(found["by_row"], (wide * w).sum(), 2)
        assert found["most"] == x.max()
        assert abs(float(found["narrow"]) - wide.sum()) <= 2.0**-8 * wide.sum()


# -- axes that are not the last ----------------------------------------------------------------------------------------


def test_axes_between_others_are_walked_along_by_neighbouring_rows() -> None:
    """One kernel forward and one backward, that load each array once per phase."""
    for wrt in ((), ("x",)):
        plan = planned(lambda x: ops.softmax(x, axis=1), {}, wrt, x="f32[64,1000,256]")
        assert len(plan.actions) == 1 and most_blocks(plan) >= DEVICE


@pytest.mark.parametrize("shape", ["f32[A,B,C]", "f32[3,50,40]"])
def test_axes_between_others(shape: str) -> None:
    run = simulated(
        lambda x: {
            "softmax": ops.softmax(x, axis=1),
            "sum": ops.sum(x, axis=1),
            "least": ops.amin(x, axis=1),
            "most_at": ops.argmax(x, axis=1),
        },
        x=shape,
    )
    rng = np.random.default_rng(0)
    for size in ((3, 50, 40), (1, 3, 33), (2, 600, 7), (2, 5, 0)) if "A" in shape else ((3, 50, 40),):
        x = rng.standard_normal(size).astype(np.float32)
        found, wide = run(x=x), x.astype(np.float64)
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        near(found["softmax"], powers / powers.sum(axis=1, keepdims=True))
        near(found["sum"], wide.sum(axis=1), 2)
        assert np.array_equal(found["least"], x.min(axis=1))
        assert np.array_equal(found["most_at"], x.argmax(axis=1))


def test_a_softmax_over_another_axis_in_its_own_memory() -> None:
    """Threads behind the last row must not read what the last row's have written."""
    module = gradc.compile(
        gradc.trace(lambda x: ops.softmax(x, axis=1), x="f32[A,B,C]"), target="cuda-sim", donate=["x"]
    )
    x = np.random.default_rng(0).standard_normal((3, 9, 15)).astype(np.float32)
    powers = np.exp(x.astype(np.float64))
    found = np.asarray(module.forward.run(x=x.copy())["y"])
    near(found, powers / powers.sum(axis=1, keepdims=True))


# -- transposes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["f32[N,M]", "bf16[8192,8192]"])
def test_transposes_go_through_tiles(of: str) -> None:
    plan = planned(ops.transpose, {"N": 8192, "M": 8192}, x=of)
    (kernel,) = plan.kernels.values()
    assert kernel.mapping == "tiled transpose" and "__syncthreads" in kernel.text and most_blocks(plan) == 256 * 256


def test_transposes() -> None:
    """Tiles that end inside: two axes, the last or outer two of three, beside what is not turned, of two loads."""
    run = simulated(
        lambda x, y, z, b: {
            "plain": ops.transpose(x),
            "last": ops.transpose(z, (0, 2, 1)),
            "outer": ops.transpose(z, (2, 1, 0)),
            "beside": ops.transpose(x) * 2 + y + b,
            "two": ops.transpose(x + ops.transpose(y)),
        },
        x="f32[N,M]",
        y="f32[M,N]",
        z="f32[A,B,C]",
        b="f32[N]",
    )
    rng = np.random.default_rng(0)
    for n, m in ((70, 45), (1, 33), (32, 64)):
        x, y, b, z = (rng.integers(-9, 9, s).astype(np.float32) for s in ((n, m), (m, n), (n,), (3, n, m)))
        found = run(x=x, y=y, z=z, b=b)
        wanted = (x.T, z.transpose(0, 2, 1), z.transpose(2, 1, 0), x.T * 2 + y + b, (x + y.T).T)
        for name, a in zip(("plain", "last", "outer", "beside", "two"), wanted, strict=True):
            assert np.array_equal(found[name], a), name


# -- NVRTC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_takes_these_mappings_without_spills(arch: str) -> None:
    """With offsets of 32 bits, and of 64 on one of the architectures."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    from gradc.runtime.cuda.nvrtc import compile_cuda

    graph = gradc.trace(
        lambda x, z, h: {
            "sum": ops.sum(x),
            "narrow": ops.sum(h, axis=0),
            "softmax": ops.softmax(z, axis=1),
            "turned": ops.transpose(x),
        },
        x="f32[N,M]",
        z="f32[A,B,C]",
        h="bf16[N,128]",
    )
    source = gradc.compile(graph, target="cuda", arch=arch).forward.source
    found = compile_cuda(widened(source) if arch == "sm_90" else source, arch=arch, spills="error").kernels
    assert found and all(r.registers <= 128 for r in found.values())
