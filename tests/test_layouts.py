"""Arrays whose axes lie in another order: the same numbers, read in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import InvalidProblem
from gradc.ir.dims import symbol

rng = np.random.default_rng(0)


def compiled(rank: int, mode: str, **layout: Any) -> gradc.Module:
    image, grid = ("f32[B,6,H,W]", "f32[B,h,w,2]") if rank == 4 else ("f32[B,6,D,H,W]", "f32[B,k,h,w,3]")
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g, mode=mode), x=image, g=grid)
    return gradc.compile(graph, wrt=["x", "g"], layout=layout or None)


@pytest.mark.parametrize(("rank", "mode", "layout"), [(4, "bilinear", "NHWC"), (4, "nearest", (0, 2, 3, 1)), (4, "bicubic", "NHWC"), (4, "bilinear", "CNHW"), (5, "bilinear", "NDHWC")])
def test_channels_last(rank: int, mode: str, layout: Any) -> None:
    plain, last = compiled(rank, mode), compiled(rank, mode, x=layout, y=layout)
    order = [("NCHW" if rank == 4 else "NCDHW").index(c) for c in layout] if isinstance(layout, str) else layout
    back = np.argsort(order)
    x = rng.standard_normal((2, 6, *(5, 4, 3)[: rank - 2])).astype(np.float32)
    g = rng.uniform(-1.2, 1.2, (2, *(3, 2, 4)[: rank - 2], rank - 2)).astype(np.float32)
    y, kept = plain.forward(x=x, g=g)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    z, residuals = last.forward(x=np.ascontiguousarray(x.transpose(order)), g=g)
    np.testing.assert_allclose(z.transpose(back), y, rtol=1e-6, atol=1e-6)
    want, got = plain.backward(kept, dy), last.backward(residuals, np.ascontiguousarray(dy.transpose(order)))
    np.testing.assert_allclose(got["x"].transpose(back), want["x"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["g"], want["g"], rtol=1e-4, atol=1e-4)


def test_the_image_is_read_where_it_lies() -> None:
    """Neither direction copies the image; its gradient is scattered in the graph's order and then turned, once."""
    module, count = compiled(4, "bilinear", x="NHWC", y="NHWC"), symbol("B") * 6 * symbol("H") * symbol("W")
    found = {what: [b for b in e.program.buffers if b.type.count == count and b.kind == "temp" and not b.alias] for what, e in module.executables.items()}
    assert not found["forward"], str(module.forward.program)
    assert len(found["backward"]) == 1 and not any("x" in k.reads and found["backward"][0].name in k.writes for k in module.backward.program.kernels), str(module.backward.program)


def test_any_graph_and_a_saved_module(tmp_path: Any) -> None:
    graph = gradc.trace(lambda a, b: ops.layer_norm(a * b, (5,)), a="f32[N,3,5]", b="f32[5]")
    module = gradc.compile(graph, wrt=["a"], layout={"a": (1, 0, 2)})
    a, b = rng.standard_normal((3, 7, 5)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    want = gradc.compile(graph)(a=a.transpose(1, 0, 2), b=b)
    np.testing.assert_allclose(module(a=a, b=b), want, rtol=1e-5, atol=1e-6)
    module.save(tmp_path / "m")
    np.testing.assert_array_equal(gradc.load_module(tmp_path / "m")(a=a, b=b), module(a=a, b=b))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"x": "NHWK"}, r"layout='NHWK' for x, which has rank 4: a word of the letters NCHW, or the numbers 0 to 3 in an order"),
        ({"x": (0, 1, 2)}, "which has rank 4"),
        ({"q": "NHWC"}, "layout names 'q'; there are x, g, y"),
        ("NHWC", "it maps names of inputs and outputs"),
    ],
)
def test_what_is_no_layout(layout: Any, message: str) -> None:
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[B,6,H,W]", g="f32[B,h,w,2]")
    with pytest.raises(InvalidProblem, match=message):
        gradc.compile(graph, layout=layout)
