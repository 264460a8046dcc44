"""What kernels of a GPU compute again, and the taps of a value that one thread adds: grid_sample stores no position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.unroll_scatters import unroll_scatters
from gradc.passes.schedule.recompute import recompute_cost
from gradc.targets.devices import CPU, gpu_of


def sampled(channels: int, dtype: str = "f32", **options: Any) -> gradc.Graph:
    return gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, **options),
        x=f"{dtype}[2,{channels},7,9]",
        grid=f"{dtype}[2,5,6,2]",
    )


def stored(graph: gradc.Graph, arch: str) -> set[str]:
    """The temps that a forward for a GPU stores."""
    program = gradc.compile(graph, target="cuda", arch=arch).forward.program
    return {s.buffer for k in program.kernels for s in k.body if s.op == "store"} - {b for _, b in program.outputs}


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_few_channels_compute_their_positions_again(mode: str) -> None:
    """One kernel, which reads the grid; many channels load positions that are computed once."""
    assert not stored(sampled(3, mode=mode), "sm_90")
    assert stored(sampled(64, mode=mode), "sm_90")


@pytest.mark.parametrize("channels", [3, 64])
def test_the_gradient_of_a_grid_alone_is_one_kernel(channels: int) -> None:
    """A thread has the sums of all 16 taps of its row, none of which is stored."""
    sample = lambda x, grid: ops.grid_sample(x, grid, mode="bicubic")
    graph = gradc.trace(sample, x=f"f32[8,{channels},128,128]", grid="f32[8,128,128,2]")
    program = gradc.compile(graph, ["grid"], "cuda", arch="sm_90").backward.program
    assert len(program.steps) == 1 and not program.of_kind("temp")


def test_slow_f64_is_not_repeated() -> None:
    """Where an addition in f64 takes as long as 64 in f32, positions in f64 are stored; those of f16 are not in f64."""
    fast, slow = recompute_cost(gpu_of("sm_90")), recompute_cost(gpu_of("sm_120"))
    assert fast is not None and slow is not None and fast.f64 < slow.f64
    assert stored(sampled(3), "sm_120") and not stored(sampled(3, "f16"), "sm_120")


def test_a_cpu_is_asked_nothing() -> None:
    assert recompute_cost(CPU) is None


TAPS = """program @p {
  input t: i32[N,2,W]
  input dy: i32[N,W]
  output y: i32[N,8]
  kernel @k_aaaaaa rows(n: N, k: 2) cols(w: W) {
    phase
    %0 = load t[n, k, w] : i32
    %1 = in_bounds %0 {hi=8, lo=0} : bool
    %2 = load dy[n, w] : i32
    accum y[n, PLACE] <- %2 where %1 : i32
  }
  return y=y
}
"""


def test_the_taps_of_a_value_are_added_by_one_thread() -> None:
    """The value is loaded once, and the sums stay; an axis that is a place itself, or a sorted one, stays an axis."""
    program = parse_program(TAPS.replace("PLACE", "%0"))
    made = unroll_scatters(program)
    verify_program(made)
    (kernel,) = made.kernels
    assert [a for a, _ in kernel.rows] == ["n"] and len(kernel.accums) == 2
    assert sum(s.op == "load" and s.buffer == "dy" for s in kernel.body) == 1
    rng = np.random.default_rng(0)
    given = {
        "t": rng.integers(-1, 8, (3, 2, 5)).astype(np.int32),
        "dy": rng.integers(-9, 9, (3, 5)).astype(np.int32),
    }
    np.testing.assert_array_equal(interp.run(made, given)["y"], interp.run(program, given)["y"])
    by_itself = parse_program(TAPS.replace("PLACE", "%0 + k").replace("hi=8", "hi=7"))
    assert unroll_scatters(by_itself) == by_itself


def test_sums_in_fixed_point_of_several_taps() -> None:
    """All points read one pixel: as many additions as there are taps and points, and none overflows.  A thread has a
    point's taps of all three channels."""
    graph = sampled(3)
    with knobs.SIM_CHECK.set(True):
        module = gradc.compile(graph, wrt=["x"], target="cuda-sim", reductions={"d.x": "atomic_fixed"})
        scatter = [k for k in module.backward.program.kernels if "d.x" in k.writes]
        assert [len(k.accums) for k in scatter] == [12] and scatter[0].strategies == {"d.x": "atomic_fixed"}
        rng = np.random.default_rng(0)
        x = rng.uniform(-1, 1, (2, 3, 7, 9)).astype(np.float32)
        grid = np.full((2, 5, 6, 2), 0.01, np.float32)
        dy = rng.uniform(0.5, 1, (2, 3, 5, 6)).astype(np.float32)
        y, residuals = module.forward(x=x, grid=grid)
        got = {"y": y, **module.backward(residuals, dy)}
    exact = gradc.compile(sampled(3, "f64"), wrt=["x"], target="numpy")
    wanted, kept = exact.forward(x=x.astype(np.float64), grid=grid.astype(np.float64))
    for name, want in {"y": wanted, **exact.backward(kept, dy.astype(np.float64))}.items():
        assert np.abs(got[name] - want).max() <= 8 * 2.0**-24 * np.abs(want).max(), name


@pytest.mark.parametrize("rows", [64, 48])
def test_a_square_is_summed_across_its_rows(rows: int) -> None:
    """Sizes alone do not say which axis is reduced: the sum of a bias gradient reads what dx reads."""
    graph = gradc.trace(lambda x, b: ops.gelu(x + b), x=f"bf16[{rows},64]", b="bf16[64]")
    program = gradc.compile(graph, wrt=("x", "b"), target="cuda", arch="sm_90").backward.program
    first = program.kernels[0]
    assert sorted(s.op for s in first.body if s.op in ("accum", "sum_cols", "store")) == ["accum", "store"]
    assert len({s.index for s in first.body if s.buffer == "x"}) == 1
