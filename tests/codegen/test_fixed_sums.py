"""Sums in fixed point of scattered values: lanes exchange what they add; the sums of a few channels lie together."""

from __future__ import annotations

from typing import Any

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gradc  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.codegen.cuda.fixed_sums import elements_as_rows, interleaved, neighbours  # noqa: E402
from gradc.codegen.cuda.functions import cuda_functions  # noqa: E402
from gradc.codegen.cuda.magnitudes import largest_of, ranges  # noqa: E402
from gradc.ir.kernel import Kernel  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402

pytestmark = pytest.mark.optimised

torch.set_num_threads(1)
PLANE, POINTS = {2: (7, 9), 3: (4, 5, 6)}, {2: (5, 13), 3: (5, 5, 7)}
"""Sizes of the image, and numbers of points that fill no warp."""


def scattering(channels: int, mode: str = "bilinear", rank: int = 2, dtype: str = "f32", text: str = "") -> Any:
    """A module of the image's gradient, whose sums are in fixed point, and the kernel that adds them."""
    sizes, points = (",".join(map(str, n[rank])) for n in (PLANE, POINTS))
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode=mode),
        x=f"{dtype}[2,{text or channels},{sizes}]",
        grid=f"{dtype}[2,{points},{rank}]",
    )
    module = gradc.compile(graph, wrt=["x"], target="cuda-sim", reductions={"*": "atomic_fixed"})
    (kernel,) = (k for k in module.backward.program.kernels if k.accums)
    return module, elements_as_rows(kernel)


def drawn(channels: int, rank: int, dtype: type, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(2, channels, *PLANE[rank])).astype(dtype),
        "grid": rng.uniform(-1.2, 1.2, (2, *POINTS[rank], rank)).astype(dtype),
        "dy": rng.normal(size=(2, channels, *POINTS[rank])).astype(dtype),
    }


def by_torch(given: dict[str, np.ndarray], mode: str) -> np.ndarray:
    """d.x in f64."""
    x, grid, dy = (torch.from_numpy(given[n].astype(np.float64)) for n in ("x", "grid", "dy"))
    x.requires_grad_()
    torch.nn.functional.grid_sample(x, grid, mode=mode, align_corners=False).backward(dy)
    return x.grad.numpy()


def by_gradc(module: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    _, residuals = module.forward(x=given["x"], grid=given["grid"])
    return np.asarray(module.backward(residuals, given["dy"])["x"])


def shape_of(kernel: Kernel, module: Any) -> tuple[tuple[int, ...], int]:
    """(how many values are added together each time, how many channels lie beside each other)."""
    (buffer,) = {s.buffer for s in kernel.accums}
    order = interleaved(kernel.accums, module.backward.program.buffer[buffer].type.shape)
    return tuple(map(len, neighbours(kernel))), 0 if order is None else order.width


@long_tests.values
@pytest.mark.parametrize(
    "channels, mode, rank, together",
    [
        (1, "bilinear", 2, ((2, 2), 0)),
        (3, "bilinear", 2, ((6, 6), 3)),
        (4, "nearest", 2, ((4,), 4)),
        (5, "bilinear", 2, ((2, 2), 0)),
        (10, "bicubic", 2, ((8, 8, 8, 8), 2)),
        (1, "bilinear", 3, ((2,) * 4, 0)),
        (8, "bilinear", 3, ((8,) * 4, 4)),
    ],
)
def test_neighbouring_sums_are_added_together(
    channels: int, mode: str, rank: int, together: tuple[tuple[int, ...], int]
) -> None:
    """Against torch in f64; the simulator looks for races in what lanes exchange."""
    with knobs.SIM_CHECK.set(True):
        module, kernel = scattering(channels, mode, rank)
        assert shape_of(kernel, module) == together and not kernel.cols
        given = drawn(channels, rank, np.float32, channels)
        got = by_gradc(module, given)
    want = by_torch(given, mode)
    assert np.abs(got - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


def test_channels_of_any_number_lie_apart() -> None:
    module, kernel = scattering(3, text="C")
    assert shape_of(kernel, module) == ((2, 2), 0)
    given = drawn(3, 2, np.float32, 0)
    want = by_torch(given, "bilinear")
    assert np.abs(by_gradc(module, given) - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


def test_sums_of_f16_are_rounded_once() -> None:
    module, kernel = scattering(4, dtype="f16")
    assert shape_of(kernel, module) == ((8, 8), 4)
    given = drawn(4, 2, np.float16, 0)
    want = by_torch(given, "bilinear")
    assert np.abs(by_gradc(module, given) - want).max() <= 4 * 2.0**-11 * np.abs(want).max()


@pytest.mark.parametrize("channels", [3, 8])
def test_what_is_not_finite_stays_in_its_sums(channels: int) -> None:
    """Flags are of the sum that a value is added to, wherever that lies: each channel has one such value."""
    module, _ = scattering(channels)
    given = drawn(channels, 2, np.float32, 1)
    given["grid"] = given["grid"] / 2  # inside, so that all four taps are there
    for c in range(channels):
        given["dy"][c % 2, c, c % 5, 3] = (np.nan, np.inf, -np.inf)[c % 3]
    want, got = by_torch(given, "bilinear"), by_gradc(module, given)
    assert 4 * channels >= np.sum(~np.isfinite(want)) >= channels
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    fine = np.isfinite(want)
    assert np.abs(got[fine] - want[fine]).max() <= 8 * 2.0**-24 * np.abs(want[fine]).max()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("batch", [16, 1024])
def test_nothing_spills_and_exchanges_fit_in_shared_memory(arch: str, batch: int) -> None:
    """16 values at once, the most there are; the larger batch has more elements than 32 bits count."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode="bicubic"),
        x=f"f32[{batch},4,1024,1024]",
        grid=f"f32[{batch},1024,1024,2]",
    )
    module = gradc.compile(graph, wrt=["x"], target="cuda", arch=arch, reductions={"*": "atomic_fixed"})
    used = module.backward.binary.kernels
    assert not any(k.spill_stores + k.spill_loads for k in used.values())
    assert any("exchanged" in line for line in module.source().splitlines())


def test_equal_accums_are_each_added() -> None:
    """Two points of one tap each, at one position: their accums are equal statements."""
    program = parse_program(TWICE)
    kernel = elements_as_rows(program.kernels[0])
    assert kernel.accums[0] == kernel.accums[1] and [len(group) for group in neighbours(kernel)] == [2]
    text = cuda_functions(kernel, {b.name: b.type for b in program.buffers}).text
    assert text.count("gradc_fixed_add_together(") == 1
    (values,) = (line for line in text.splitlines() if "f32 values[]" in line)
    assert values.count("v1") == 2


TWICE = """program @p {
  input at: i64[N]
  input dy: f32[N]
  output y: f32[4,8]
  kernel @k_aaaaaa rows(n: N) cols() strategy(y: atomic_fixed) {
    %0 = load at[n] : i64
    %1 = load dy[n] : f32
    accum y[0, %0] <- %1 : f32
    accum y[0, %0] <- %1 : f32
  }
  return y=y
}
"""


@pytest.mark.parametrize("mode, exponent", [("bilinear", 0), ("bicubic", 3)])
def test_weights_are_not_computed_to_find_the_largest_value(mode: str, exponent: int) -> None:
    """|value| is at most |dy| times what the weights can be: the scan reads dy alone."""
    module, kernel = scattering(3, mode)
    looked_at, exponents = largest_of(kernel)
    assert {s.buffer for s in looked_at.body if s.op == "load"} == {"d.y"} and len(looked_at.accums) == 3
    assert list(exponents.values()) == [exponent]
    given = drawn(3, 2, np.float32, 5)
    given["dy"] *= np.float32(2.0**100)
    given["grid"][:] = 0.03
    want = by_torch(given, mode)
    assert np.abs(by_gradc(module, given) - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


@pytest.mark.parametrize("factor", ["small", "chosen"])
def test_factors_that_are_no_weights_take_no_digits(factor: str) -> None:
    """A cotangent times 2^-60, as of a mean's, or times one of two constants that is the small one everywhere."""
    small = 2.0**-60 if factor == "small" else 1.0

    def function(x, grid, large):  # type: ignore[no-untyped-def]
        y = ops.grid_sample(x, grid)
        return y * (small if factor == "small" else ops.cast(ops.where(large, 2.0**60, 1.0), "f32"))

    graph = gradc.trace(function, x="f32[2,1,7,9]", grid="f32[2,5,13,2]", large="bool[2,1,5,13]")
    module = gradc.compile(graph, wrt=["x"], target="cuda-sim", reductions={"*": "atomic_fixed"})
    given = drawn(1, 2, np.float32, 7)
    _, residuals = module.forward(x=given["x"], grid=given["grid"], large=np.zeros((2, 1, 5, 13), bool))
    got = np.asarray(module.backward(residuals, given["dy"])["x"]) / small
    want = by_torch(given, "bilinear")
    assert np.abs(got - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


def test_ranges_hold_what_is_computed() -> None:
    """Of every value of a weight's computation, at many fractions, in the arithmetic of the kernel."""
    _, kernel = scattering(3, "bicubic")
    known = ranges(kernel)
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.uniform(-1.5, 1.5, 4000), np.nextafter([-1, 0, 1], 2), [-1, 0, 1]]).astype(np.float32)
    values: dict[str, np.ndarray] = {}
    ops_ = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    held = 0
    for s in kernel.body:
        if s.name and all(a in values for a in s.args):
            given = [values[a] for a in s.args]
            if s.op == "load" and s.buffer == "grid":
                values[s.name] = points
            elif s.op == "const":
                values[s.name] = np.asarray(s.attr("value"), s.dtype.np)
            elif s.op in ("cast", "floor"):
                values[s.name] = np.floor(given[0]) if s.op == "floor" else given[0].astype(s.dtype.np)
            elif s.op in ops_:
                values[s.name] = ops_[s.op](*given)
            elif s.op in ("eq", "lt", "gt", "le", "ge"):
                compare = {"eq": np.equal, "lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal}
                values[s.name] = compare[s.op](*given)
            elif s.op == "where":
                values[s.name] = np.where(*given)
        if s.name in known and s.name in values:
            low, high = known[s.name]
            assert low <= values[s.name].min() and values[s.name].max() <= high, str(s)
            held += 1
    assert held > 60
