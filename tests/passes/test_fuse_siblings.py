"""Both gradients of an interpolation in one kernel: against torch in f64, in the simulator, which looks for races; what
is not fused; and what lanes pass on to their neighbours before they add it.
"""

from __future__ import annotations

import re
from typing import Any

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gradc  # noqa: E402
from gradc import interp, knobs, ops  # noqa: E402
from gradc.inspect.operands import is_predicate  # noqa: E402
from gradc.inspect.semantics import Decoder  # noqa: E402
from gradc.ir.kernel import Kernel, Program  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.types import DTYPES  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.passes.loops.fuse import fuse_siblings  # noqa: E402
from gradc.passes.loops.legality import IllegalMove  # noqa: E402

torch.set_num_threads(1)
IMAGE, POINTS = {2: (6, 70), 3: (4, 3, 40)}, {2: (5, 64), 3: (5, 5, 32)}
"""Neighbouring lanes have neighbouring points of one row, which a warp divides."""
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}


def graph_of(rank: int, channels: int, dtype: str, **options: Any) -> gradc.Graph:
    sizes, points = (",".join(map(str, n[rank])) for n in (IMAGE, POINTS))
    return gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, **options),
        x=f"{dtype}[2,{channels},{sizes}]",
        grid=f"{dtype}[2,{points},{rank}]",
    )


def grid_of(kind: str, rank: int, seed: int = 0) -> np.ndarray:
    """Coordinates of points whose neighbours share all samples but one, as they are or mirrored, some, all, or none."""
    rng = np.random.default_rng(seed)
    shape = (2, *POINTS[rank], rank)
    if kind == "random":
        return rng.uniform(-1.2, 1.2, shape)
    if kind == "one pixel":
        return np.full(shape, 0.01)
    width, points = IMAGE[rank][-1], POINTS[rank][-1]
    step = 1.3 if kind == "wide" else 1.0
    x = (2 * (np.arange(points) * step + 2.3) + 1) / width - 1
    grid = rng.uniform(-0.9, 0.9, (2, *POINTS[rank][:-1], 1, rank)) * np.ones(shape)
    grid[..., 0] = x[::-1] if kind == "mirrored" else x
    return grid


def by_torch(x: Any, grid: Any, dy: Any, **options: Any) -> dict[str, np.ndarray]:
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, grid)]
    y = torch.nn.functional.grid_sample(*leaves, **options)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    return {"x": leaves[0].grad.numpy(), "grid": leaves[1].grad.numpy()}


def drawn(rank: int, channels: int, dtype: str, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng, np_dtype = np.random.default_rng(1), DTYPES[dtype].np
    x, dy = rng.normal(size=(2, channels, *IMAGE[rank])), rng.normal(size=(2, channels, *POINTS[rank]))
    return x.astype(np_dtype), grid_of(kind, rank).astype(np_dtype), dy.astype(np_dtype)


def gradients(graph: gradc.Graph, wrt: list[str], x: Any, grid: Any, dy: Any) -> tuple[Any, dict[str, np.ndarray]]:
    with knobs.SIM_CHECK.set(True):
        forced = {"*": "atomic_fixed"}
        module = gradc.compile(graph, wrt=wrt, target="cuda-sim", reductions=forced)
        _, residuals = module.forward(x=x, grid=grid)
        return module, {name: np.asarray(a) for name, a in module.backward(residuals, dy).items()}


CASES = [
    (2, 3, "f32", "smooth", "bilinear", "zeros", False),
    (2, 1, "f32", "wide", "bilinear", "border", True),
    (2, 4, "f16", "mirrored", "bilinear", "reflection", False),
    (2, 2, "bf16", "random", "bilinear", "zeros", True),
    (2, 3, "f32", "smooth", "bicubic", "zeros", False),
    (2, 4, "f32", "one pixel", "bicubic", "reflection", True),
    (2, 1, "f32", "wide", "bicubic", "border", False),
    (3, 1, "f32", "smooth", "bilinear", "zeros", False),
    (3, 4, "f16", "smooth", "bilinear", "border", False),
    (3, 2, "f32", "random", "bilinear", "reflection", True),
]


@long_tests.values
@pytest.mark.parametrize("rank, channels, dtype, kind, mode, padding, corners", CASES)
def test_both_gradients_of_one_kernel_are_torchs(
    rank: int, channels: int, dtype: str, kind: str, mode: str, padding: str, corners: bool
) -> None:
    """And the image's has the bits of a kernel of its own: integers are added up, whoever adds them."""
    options = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    x, grid, dy = drawn(rank, channels, dtype, kind)
    graph = graph_of(rank, channels, dtype, **options)
    module, got = gradients(graph, ["x", "grid"], x, grid, dy)
    kernels = [k for k in module.backward.program.kernels if {"d.x", "d.grid"} & {*k.writes}]
    assert len(kernels) == 1 or padding != "zeros"  # else the device of the simulator stores what both read
    for name, want in by_torch(x, grid, dy, **options).items():
        error = np.abs(got[name].astype(np.float64) - want).max()
        assert error <= 64 * UNIT[dtype] * np.abs(want).max(), name
    _, alone = gradients(graph, ["x"], x, grid, dy)
    assert got["x"].tobytes() == alone["x"].tobytes()


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_coordinates_that_are_no_numbers(padding: str) -> None:
    """NaN counts as -1, infinities lie outside: against the interpreter in f64.  A cotangent that is no number reaches
    the taps of its point alone.
    """
    x, grid, dy = drawn(2, 3, "f32", "smooth")
    grid[0, 0, 3:6, 0], grid[1, 1, 7, 1], grid[1, 2, 40, 0] = np.nan, np.inf, -np.inf
    graph = graph_of(2, 3, "f32", padding_mode=padding)
    _, got = gradients(graph, ["x", "grid"], x, grid, dy)
    exact = gradc.compile(graph_of(2, 3, "f64", padding_mode=padding), wrt=["x", "grid"], target="numpy")
    wide = [a.astype(np.float64) for a in (x, grid, dy)]
    _, residuals = exact.forward(x=wide[0], grid=wide[1])
    for name, want in exact.backward(residuals, wide[2]).items():
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(want))
        assert np.nanmax(np.abs(got[name] - want)) <= 64 * UNIT["f32"] * np.nanmax(np.abs(want)), name
    grid = grid_of("smooth", 2).astype(np.float32)
    dy[0, 1, 2, 9], dy[1, 0, 1, 31], dy[1, 2, 0, 32] = np.nan, np.inf, -np.inf
    _, got = gradients(graph, ["x", "grid"], x, grid, dy)
    want = by_torch(x, grid, dy, padding_mode=padding, align_corners=False)["x"]
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(got["x"]), test(want))
    fine = np.isfinite(want)
    assert 12 >= np.sum(~fine) >= 3
    assert np.abs(got["x"][fine] - want[fine]).max() <= 64 * UNIT["f32"] * np.abs(want[fine]).max()


@pytest.mark.parametrize("points", [0, 1, 33])
def test_any_number_of_points(points: int) -> None:
    graph = gradc.trace(lambda x, grid: ops.grid_sample(x, grid), x="f32[2,3,5,6]", grid=f"f32[2,5,{points},2]")
    rng = np.random.default_rng(points)
    x, grid = rng.normal(size=(2, 3, 5, 6)), rng.uniform(-1, 1, (2, 5, points, 2))
    dy = rng.normal(size=(2, 3, 5, points))
    given = [a.astype(np.float32) for a in (x, grid, dy)]
    _, got = gradients(graph, ["x", "grid"], *given)
    for name, want in by_torch(*given, align_corners=False).items():
        error = np.abs(got[name] - want).max(initial=0)
        assert got[name].shape == want.shape and error <= 64 * UNIT["f32"] * np.abs(want).max(initial=0)


@pytest.mark.parametrize("channels, dtype, kernels", [(5, "f32", 2), (4, "f32", 1), (3, "f64", 2), (3, "bf16", 1)])
def test_few_channels_are_one_kernel(channels: int, dtype: str, kernels: int) -> None:
    """More are an axis of the scatter, whose threads have some of them; f64 has no atomics with the same bits."""
    graph = graph_of(2, channels, dtype)
    program = gradc.compile(graph, wrt=["x", "grid"], target="cuda", arch="sm_90").backward.program
    assert sum(bool({"d.x", "d.grid"} & {*k.writes}) for k in program.kernels) == kernels
    strict = gradc.compile(graph, wrt=["x", "grid"], target="cuda", arch="sm_90", numerics="strict").backward.program
    assert sum(bool({"d.x", "d.grid"} & {*k.writes}) for k in strict.kernels) == 2


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("rank, mode", [(2, "bicubic"), (3, "bilinear")])
def test_nothing_spills(arch: str, rank: int, mode: str) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    module = gradc.compile(graph_of(rank, 4, "f32", mode=mode), wrt=["x", "grid"], target="cuda", arch=arch)
    assert not any(k.spill_stores + k.spill_loads for k in module.backward.binary.kernels.values())


@pytest.mark.compiles
@pytest.mark.parametrize("arch, padding", [("sm_80", "reflection"), ("sm_90", "border")])
def test_nothing_spills_of_any_size(arch: str, padding: str) -> None:
    """Sizes that are not known take registers, too; 16 taps of four channels take most."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode="bicubic", padding_mode=padding),
        x="f32[B,4,H,W]",
        grid="f32[B,P,Q,2]",
    )
    module = gradc.compile(graph, wrt=["x", "grid"], target="cuda", arch=arch, reductions={"*": "atomic_fixed"})
    assert any(k.accums and any(s.op == "store" for s in k.body) for k in module.backward.program.kernels)
    assert not any(k.spill_stores + k.spill_loads for k in module.backward.binary.kernels.values())


def test_many_rows_have_a_thread_each() -> None:
    """What is a row's alone is computed once; of few rows, threads share the channels."""
    for points, width in ((64, 8), (1 << 18, 1)):
        graph = gradc.trace(lambda x, grid: ops.grid_sample(x, grid), x="f32[4,32,64,64]", grid=f"f32[4,1,{points},2]")
        module = gradc.compile(graph, wrt=["grid"], target="cuda", arch="sm_90")
        (kernel,) = (k for k in module.backward.program.kernels if "d.grid" in k.writes)
        text = module.kernels[kernel.name].source
        assert f"WIDTH = {width} }}; /* threads of a task */" in text or (width == 1 and "WIDTH" not in text)


# -- the transformation ------------------------------------------------------------------------------------------------

SIBLINGS = """program @p {
  input x: f32[4,3]
  input w: f32[4,3]
  input t: i64[4]
  output y: f32[8]
  output u: f32[4]
  output z: f32[4,3]
  kernel @one_aaaaaa rows(n: 4) cols(k: 3) {
    phase
    %0 = load x[n, k] : f32
    %1 = load w[n, k] : f32
    %2 = mul %0, %1 : f32
    accum y[n] <- %2 : f32
  }
  kernel @between_bbbbbb rows(n: 4) cols() {
    %0 = load w[n, 0] : f32
    store u[n] <- %0 : f32
  }
  kernel @two_cccccc rows(i: 4) cols(j: 3) {
    phase
    %0 = load w[i, j] : f32
    %1 = load x[i, j] : f32
    %2 = mul %1, %0 : f32
    %3 = add %2, %0 : f32
    store z[i, j] <- %3 : f32
  }
  return y=y, u=u, z=z
}
"""


def require_same(before: Program, after: Program) -> None:
    verify_program(after)
    rng = np.random.default_rng(0)
    given = {b.name: rng.integers(0, 4, b.type.concrete({})).astype(b.type.dtype.np) for b in before.of_kind("input")}
    want, got = (interp.run(p, given) for p in (before, after))
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_siblings_load_once_what_both_do() -> None:
    program = parse_program(SIBLINGS)
    made = fuse_siblings(program, 0, 2)
    require_same(program, made)
    kernel = made.steps[0]
    assert isinstance(kernel, Kernel) and len(made.steps) == 2 and sorted(kernel.reads) == ["w", "x"]
    assert [s.op for s in kernel.body].count("load") == 2 and {*kernel.writes} == {"y", "z"}


@pytest.mark.parametrize(
    "before, after, why",
    [
        ("%0 = load w[i, j]", "%0 = load u[i]", "between_bbbbbb comes between"),
        ("%0 = load w[i, j]", "%0 = load y[i]", "one_aaaaaa comes between"),
        ("rows(i: 4) cols(j: 3)", "rows(i: 4, j: 3) cols()", "other axes are its columns"),
        ("rows(i: 4) cols(j: 3)", "rows(i: 3) cols(j: 3)", "loads nothing that one_aaaaaa loads"),
        ("store u[n] <- %0 : f32", "%1 = load t[n] : i64\n check %1 {bound=4} : i64\n store u[n] <- %0 : f32", "check"),
        ("cols(k: 3) {", "cols(k: 3) strategy(y: atomic) {", "strategies of its accums are chosen"),
    ],
)
def test_siblings_that_are_not_fused(before: str, after: str, why: str) -> None:
    assert before in SIBLINGS
    with pytest.raises(IllegalMove, match=re.escape(why)):
        fuse_siblings(parse_program(SIBLINGS.replace(before, after)), 0, 2)


# -- the model of their time -------------------------------------------------------------------------------------------


def test_a_vote_of_a_predicate_is_read() -> None:
    """VOTE.ALL P0, P1 has one result and one operand, VOTE.ANY R0, PT, P1 two results."""
    decoder = Decoder(lambda at: None, lambda name: None)
    step, written, read = decoder.step("VOTE", "VOTE.ALL", "P0, P1")
    assert written == ("P0",) and read == ("P1",) and is_predicate("P0")
    registers: dict[str, Any] = {"P1": True}
    assert step is not None
    step(registers)
    assert registers["P0"] is True
    step, written, _ = decoder.step("VOTE", "VOTE.ANY", "R0, PT, P1")
    step(registers)
    assert written == ("R0",) and registers["R0"] == 0xFFFFFFFF
