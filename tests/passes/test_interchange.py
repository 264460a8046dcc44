"""Neighbouring threads go along the axis that lies together: channels-last images on a GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.fuse_copies import fuse_copies
from gradc.passes.program.interchange import gathers_elements, interchange
from gradc.passes.program.relayout_temps import relayout_temps

TRANSPOSED = """program @p {
  input x: f32[N,64,H]
  input s: f32[N,64]
  temp t: f32[N,64,H]
  output y: f32[N,H,64]
  kernel @mul_aaaaaa rows(n: N, c: 64) cols(h: H) {
    %0 = load s[n, c] : f32
    phase
    %1 = load x[n, c, h] : f32
    %2 = mul %1, %0 : f32
    store t[n, c, h] <- %2 : f32
  }
  kernel @transpose_bbbbbb rows(n: N, h: H) cols(c: 64) {
    phase
    %0 = load t[n, c, h] : f32
    store y[n, h, c] <- %0 : f32
  }
  return y=y
}
"""


def columns(program: Any, name: str) -> list[str]:
    return [a for k in program.kernels if k.name.startswith(name) for a, _ in k.cols]


def test_a_result_is_stored_as_it_is_asked_for() -> None:
    """No kernel that transposes alone; what another reads, or what is an output itself, stays."""
    program = parse_program(TRANSPOSED)
    made = fuse_copies(program)
    verify_program(made)
    assert len(made.steps) == 1 and "store y[n, h, c]" in str(made) and "t:" not in str(made)
    rng = np.random.default_rng(0)
    given = {
        "x": rng.standard_normal((3, 64, 5)).astype(np.float32),
        "s": rng.standard_normal((3, 64)).astype(np.float32),
    }
    np.testing.assert_array_equal(interp.run(made, given)["y"], interp.run(program, given)["y"])
    kept = parse_program(TRANSPOSED.replace("temp t", "output t").replace("return y=y", "return y=y, t=t"))
    assert fuse_copies(kept) == kept


@pytest.mark.parametrize(
    ("x", "y", "axis"),
    [
        ("n, h, c", "n, h, c", "c"),
        ("n, c, h", "n, c, h", "h"),
        ("n, h, c", "n, c, h", "h"),
        ("n, c, h", "n, h, c", "h"),
    ],
)
def test_columns_go_where_fewest_bytes_move(x: str, y: str, axis: str) -> None:
    """Both ways round: as the memory lies; where one of two lies each way, as it was."""
    shape = {"n, h, c": "N,H,64", "n, c, h": "N,64,H"}
    text = f"""program @p {{
  input x: f32[{shape[x]}]
  output y: f32[{shape[y]}]
  kernel @exp_aaaaaa rows(n: N, c: 64) cols(h: H) {{
    phase
    %0 = load x[{x}] : f32
    %1 = exp %0 : f32
    store y[{y}] <- %1 : f32
  }}
  return y=y
}}
"""
    program = parse_program(text)
    made = interchange(program)
    verify_program(made)
    assert columns(made, "exp") == [axis] and (made.kernels[0].name == program.kernels[0].name) == (axis == "h")
    given = {
        "x": (
            np.random.default_rng(0)
            .standard_normal(tuple({"N": 2, "H": 7, "64": 64}[d] for d in shape[x].split(",")))
            .astype(np.float32)
        )
    }
    np.testing.assert_array_equal(interp.run(made, given)["y"], interp.run(program, given)["y"])


ROWS = """program @p {
  input x: f32[N,H,64]
  input s: f32[N,64]
  output y: f32[N]
  output z: f32[N,H,64]
  kernel @k_aaaaaa rows(n: N, c: 64) cols(h: H) {
    %0 = load s[n, c] : f32
    phase
    %1 = load x[n, h, c] : f32
    store z[n, h, c] <- %1 : f32
    accum y[n] <- VALUE : f32
  }
  return y=y, z=z
}
"""


@pytest.mark.parametrize(("value", "turned"), [("%0", False), ("%1", True)])
def test_what_happens_once_a_row_is_left_alone(value: str, turned: bool) -> None:
    """A sum of the rows' own values would count each of them H times."""
    program = parse_program(
        ROWS.replace("VALUE", value)
        .replace("    phase\n", "    phase\n" if turned else "    accum y[n] <- %0 : f32\n    phase\n")
        .replace("    accum y[n] <- %0 : f32\n  }", "  }")
    )
    made = interchange(program)
    verify_program(made)
    assert (columns(made, "k") == ["c"]) == turned
    rng = np.random.default_rng(0)
    given = {
        "x": rng.integers(-9, 9, (2, 5, 64)).astype(np.float32),
        "s": rng.integers(-9, 9, (2, 64)).astype(np.float32),
    }
    np.testing.assert_array_equal(interp.run(made, given)["y"], interp.run(program, given)["y"])


def batch_norm(x: gradc.Node, gain: gradc.Node) -> gradc.Node:
    wide, axes = ops.cast(x, "f32"), (0, 2, 3)
    mean = ops.mean(wide, axes, keepdims=True)
    off = wide - mean
    y = off * ops.rsqrt(ops.mean(off * off, axes, keepdims=True) + 1e-5) * gain[None, :, None, None]
    return ops.cast(ops.relu(y), x.dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", ["3,32,6,5", "N,32,H,W"])
def test_sums_of_channels_go_along_channels(dtype: str, shape: str) -> None:
    """Channels last: what the rows of an image are reduced to is added to its channel, so that neighbouring threads may
    as well have a channel each; where the channels come first, the columns stay those of the image.
    """
    graph = gradc.trace(batch_norm, x=f"{dtype}[{shape}]", gain="f32[32]")
    name = graph.output_names[0]
    rng = np.random.default_rng(0)
    kind = graph.input("x").dtype.np
    x, g = (rng.standard_normal((3, 32, 6, 5)).astype(kind) for _ in range(2))
    gain = rng.standard_normal(32).astype(np.float32)
    wide = gradc.compile(gradc.trace(batch_norm, x=f"f32[{shape}]", gain="f32[32]"), wrt=["x", "gain"], target="numpy")
    _, kept = wide.forward(x=x.astype(np.float32), gain=gain)
    wanted = wide.backward(kept, g.astype(np.float32))
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-22
    for layout, axis in (({"x": "NHWC", name: "NHWC"}, 32), ({}, 5)):
        with knobs.SIM_CHECK.set(True):
            module = gradc.compile(graph, wrt=["x", "gain"], target="cuda-sim", layout=layout)
            order = (0, 2, 3, 1) if layout else (0, 1, 2, 3)
            _, residuals = module.forward(x=np.ascontiguousarray(x.transpose(order)), gain=gain)
            found = module.backward(residuals, np.ascontiguousarray(g.transpose(order)))
        summed = [k for m in (module.forward, module.backward) for k in m.program.kernels if k.accums and k.rows]
        assert len(summed) >= 3 and all(str(n) in (str(axis), "W") for k in summed for _, n in k.cols)
        assert all([n for _, n in k.cols] == [32] for k in summed) == bool(layout)
        for got, want in (
            (np.asarray(found["x"]).transpose(np.argsort(order)), wanted["x"]),
            (np.asarray(found["gain"]), wanted["gain"]),
        ):
            assert np.abs(got.astype(np.float64) - want).max() <= 16 * unit * np.abs(want).max()


@pytest.mark.parametrize(("dtype", "channels"), [("f32", 32), ("f32", 33), ("bf16", 32)])
def test_grid_sample_of_channels_last(dtype: str, channels: int) -> None:
    """Forward and both gradients go along channels, nothing is transposed by itself, and all agree with NumPy."""
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid), x=f"{dtype}[2,{channels},7,9]", grid=f"{dtype}[2,5,6,2]"
    )
    name = graph.output_names[0]
    with knobs.SIM_CHECK.set(True):
        module = gradc.compile(graph, wrt=["x", "grid"], target="cuda-sim", layout={"x": "NHWC", name: "NHWC"})
        program = module.forward.program, module.backward.program
        over = [k for p in program for k in p.kernels if channels in (n for _, n in (*k.rows, *k.cols))]
        assert len(over) >= 3 and all([n for _, n in k.cols] == [channels] for k in over)
        assert not any({s.op for s in k.body} <= {"load", "cast", "store"} for k in over)
        rng = np.random.default_rng(0)
        kind = graph.input("x").dtype.np
        x, grid = (
            rng.uniform(-1, 1, (2, channels, 7, 9)).astype(kind),
            rng.uniform(-1.2, 1.2, (2, 5, 6, 2)).astype(kind),
        )
        g = rng.uniform(-1, 1, (2, channels, 5, 6)).astype(kind)
        plain = gradc.compile(graph, wrt=["x", "grid"], target="numpy")
        y, residuals = module.forward(x=np.ascontiguousarray(x.transpose(0, 2, 3, 1)), grid=grid)
        grads = module.backward(residuals, np.ascontiguousarray(g.transpose(0, 2, 3, 1)))
        wanted, kept = plain.forward(x=x, grid=grid)
        other = plain.backward(kept, g)
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-24
    for got, want in (
        (np.asarray(y).transpose(0, 3, 1, 2), wanted),
        (np.asarray(grads["x"]).transpose(0, 3, 1, 2), other["x"]),
        (grads["grid"], other["grid"]),
    ):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.abs(got - want).max() <= 8 * unit * np.abs(want).max()


def test_corners_move_16_bytes_at_a_time() -> None:
    """The mask of a corner is the row's: its channels are loaded as words, or none of them."""
    graph = gradc.trace(lambda x, grid: ops.grid_sample(x, grid), x="f32[2,128,7,9]", grid="f32[2,5,6,2]")
    module = gradc.compile(graph, target="cuda-sim", layout={"x": "NHWC", graph.output_names[0]: "NHWC"})
    assert len(re.findall(r"if \(v\d+\) gradc_get(?:_all)?\(loaded\d+, ", module.forward.source)) == 4


@pytest.mark.parametrize(
    ("channels", "size", "padding"),
    [(16, "7,9", "zeros"), (33, "H,W", "border"), (17, "3,7,5", "zeros"), (40, "1,1,1", "reflection")],
)
def test_a_cpu_gathers_vectors_of_channels(channels: int, size: str, padding: Any) -> None:
    """Channels last: forward and gradients read and add whole vectors, nothing is turned by itself, with any number of
    threads the same bits, for NaN and inf in the grid too.
    """
    rank, points = size.count(",") + 1, "H,W" if size == "H,W" else "5,6" if size == "7,9" else "K,5,6"
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, padding_mode=padding),
        x=f"f32[B,{channels},{size}]",
        grid=f"f32[B,{points},{rank}]",
    )
    name, last = graph.output_names[0], (0, *range(2, rank + 2), 1)
    module = gradc.compile(graph, wrt=["x", "grid"], layout={"x": last, name: last})
    programs = module.forward.program, module.backward.program
    over = [k for p in programs for k in p.kernels if channels in (n for _, n in (*k.rows, *k.cols))]
    if size != "1,1,1":  # what is gathered from one pixel is kept for the backward, in the graph's order
        assert len(over) >= 3 and all([n for _, n in k.cols] == [channels] for k in over)
        assert not any({s.op for s in k.body} <= {"load", "store"} for k in over)
    plain = gradc.compile(graph, wrt=["x", "grid"], target="numpy")
    sizes, places = ([{"H": 4, "W": 11, "K": 2}.get(n) or int(n) for n in text.split(",")] for text in (size, points))
    rng = np.random.default_rng(0)
    for batch in (0, 1, 3):
        x = rng.standard_normal((batch, channels, *sizes)).astype(np.float32)
        grid = rng.uniform(-1.3, 1.3, (batch, *places, rank)).astype(np.float32)
        for place, value in zip(np.ndindex(grid.shape), (np.nan, np.inf, -np.inf), strict=False):
            grid[place] = value
        g = rng.standard_normal((batch, channels, *places)).astype(np.float32)
        wanted, kept = plain.forward(x=x, grid=grid)
        other = plain.backward(kept, g)
        results = []
        for threads in (1, 2, 3, 5):
            with knobs.NUM_THREADS.set(threads):
                y, residuals = module.forward(x=np.ascontiguousarray(x.transpose(last)), grid=grid)
                grads = module.backward(residuals, np.ascontiguousarray(g.transpose(last)))
            results.append((np.asarray(y), np.asarray(grads["x"]), np.asarray(grads["grid"])))
        assert len({tuple(a.tobytes() for a in r) for r in results}) == 1
        back = np.argsort(last)
        for got, want in zip(
            (results[0][0].transpose(back), results[0][1].transpose(back), results[0][2]),
            (wanted, other["x"], other["grid"]),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_cpu_turns_only_what_it_gathers() -> None:
    """Kernels without positions in data keep their columns, and a sum of what one gathers counts once."""
    program = parse_program(ROWS.replace("VALUE", "%1"))
    for each in (relayout_temps, fuse_copies, interchange):
        assert each(program, wanted=gathers_elements) == program
    assert interchange(program) != program
