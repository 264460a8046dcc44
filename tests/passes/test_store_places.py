"""store_places: what is stacked of a kernel's values is stored by that kernel."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.store_places import store_places

STACKED = """program @p {
  input x: f32[N,C]
  input z: f32[N]
  temp t: f32[N]
  temp u: f32[N]
  output y: f32[N,2]
  kernel @sums_aaaaaa rows(n: N) cols(c: C) {
    phase
    %0 = load x[n, c] : f32
    %1 = sum_cols %0 : f32
    store t[n] <- %1 : f32
    %2 = mul %1, %1 : f32
    store u[n] <- %2 : f32
  }
  kernel @stack_aaaaaa rows(i: N) cols(k: 2) {
    phase
    %0 = in_bounds k {hi=1, lo=0} : bool
    %1 = load t[i] where %0 : f32
    %2 = in_bounds k + (-1) {hi=1, lo=0} : bool
    %3 = load u[SECOND] where %2 : f32
    %4 = load z[i] : f32
    %5 = mul %3, %4 : f32
    %6 = add %1, %5 : f32
    store y[i, k] <- %6 : f32
  }
  return y=y
}
"""


def test_the_kernel_that_has_the_values_stores_them() -> None:
    program = parse_program(STACKED.replace("SECOND", "i"))
    made = store_places(program)
    verify_program(made)
    (kernel,) = made.kernels
    assert not made.of_kind("temp") and sum(s.op == "store" for s in kernel.body) == 2
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(size=(5, 3)).astype(np.float32), "z": rng.normal(size=5).astype(np.float32)}
    given["x"][0] = -0.0  # whose sum is +0 behind the addition of what is not there
    got, want = (interp.run(p, given)["y"] for p in (made, program))
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize(
    "before, after",
    [
        ("load u[SECOND]", "load u[0]"),  # another row's
        ("  return", "  return t=t, "),  # somebody else has it
    ],
)
def test_what_is_read_otherwise_stays_in_memory(before: str, after: str) -> None:
    text = STACKED.replace(before, after).replace("SECOND", "i")
    if "t=t" in after:
        text = text.replace("temp t", "output t")
    program = parse_program(text)
    assert store_places(program) == program


@pytest.mark.parametrize("rank, channels", [(2, 1), (2, 3), (3, 1), (3, 3)])
def test_the_gradient_of_a_grid_is_one_kernel(rank: int, channels: int) -> None:
    """Against torch in f64."""
    torch = pytest.importorskip("torch")
    sizes, points = (7, 9, 6)[:rank], (5, 8, 6)[:rank]
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid),
        x=f"f32[2,{channels},{','.join(map(str, sizes))}]",
        grid=f"f32[2,{','.join(map(str, points))},{rank}]",
    )
    module = gradc.compile(graph, wrt=["grid"], target="cuda-sim")
    assert len(module.backward.program.kernels) == 1
    rng = np.random.default_rng(rank)
    x, dy = (rng.normal(size=(2, channels, *n)).astype(np.float32) for n in (sizes, points))
    grid = rng.uniform(-1.1, 1.1, (2, *points, rank)).astype(np.float32)
    _, residuals = module.forward(x=x, grid=grid)
    got = module.backward(residuals, dy)["grid"]
    wide = torch.from_numpy(grid.astype(np.float64)).requires_grad_()
    y = torch.nn.functional.grid_sample(torch.from_numpy(x.astype(np.float64)), wide, align_corners=False)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    want = wide.grad.numpy()
    assert np.abs(got - want).max() <= 64 * 2.0**-24 * np.abs(want).max()


def test_long_kernels_that_share_what_they_compute_are_one() -> None:
    """Both coordinates' gradients of bicubic sampling read the same sixteen pixels, to which the image's adds."""
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode="bicubic"), x="f32[16,3,512,512]", grid="f32[16,512,512,2]"
    )
    program = gradc.compile(graph, wrt=["x", "grid"], target="cuda", arch="sm_90").backward.program
    assert [k.writes for k in program.kernels] == [("d.x", "d.grid")]
