"""Arrays whose axes lie in another order: the same numbers, read in place."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import InvalidProblem
from gradc.ir.dims import symbol
from gradc.module.variants import MOST
from gradc.runtime.host.arrays import to_numpy

rng = np.random.default_rng(0)


def compiled(rank: int, mode: str, **layout: Any) -> gradc.Module:
    image, grid = ("f32[B,6,H,W]", "f32[B,h,w,2]") if rank == 4 else ("f32[B,6,D,H,W]", "f32[B,k,h,w,3]")
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g, mode=mode), x=image, g=grid)
    return gradc.compile(graph, wrt=["x", "g"], layout=layout or None)


@pytest.mark.parametrize(
    ("rank", "mode", "layout"),
    [
        (4, "bilinear", "NHWC"),
        (4, "nearest", (0, 2, 3, 1)),
        (4, "bicubic", "NHWC"),
        (4, "bilinear", "CNHW"),
        (5, "bilinear", "NDHWC"),
    ],
)
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
    """Neither direction copies the image, and its gradient is scattered where it is asked for."""
    module, count = compiled(4, "bilinear", x="NHWC", y="NHWC"), symbol("B") * 6 * symbol("H") * symbol("W")
    found = {
        what: [b for b in e.program.buffers if b.type.count == count and b.kind == "temp" and not b.alias]
        for what, e in module.executables.items()
    }
    assert not found["forward"], str(module.forward.program)
    assert not found["backward"], str(module.backward.program)


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
        (
            {"x": "NHWK"},
            r"layout='NHWK' for x, which has rank 4: a word of the letters NCHW, or the numbers 0 to 3 in an order",
        ),
        ({"x": (0, 1, 2)}, "which has rank 4"),
        ({"x": 4}, r"layout=4 for x, which has rank 4"),
        ({"x": (0, 1, 2, "W")}, "which has rank 4"),
        ({"q": "NHWC"}, "layout names 'q'; there are x, g, y"),
        ("NHWC", "it maps names of inputs and outputs"),
    ],
)
def test_what_is_no_layout(layout: Any, message: str) -> None:
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[B,6,H,W]", g="f32[B,h,w,2]")
    with pytest.raises(InvalidProblem, match=message):
        gradc.compile(graph, layout=layout)


def last_axis_channels(kind: str, shape: tuple[int, ...]) -> Any:
    """An image [B,C,H,W] whose memory is [B,H,W,C]."""
    array = rng.standard_normal((shape[0], *shape[2:], shape[1])).astype(np.float32)
    if kind == "numpy":
        return np.moveaxis(array, -1, 1)
    torch = pytest.importorskip("torch")
    if kind == "torch":
        return torch.from_numpy(array).movedim(-1, 1)
    xp = pytest.importorskip("array_api_strict")
    return xp.permute_dims(xp.asarray(array), (0, 3, 1, 2))


@pytest.mark.parametrize("kind", ["numpy", "torch", "array api"])
def test_channels_last_is_recognised_at_the_call(kind: str) -> None:
    """The image is read where it lies, by a module compiled for that order, and its gradient lies in memory as the
    image does.
    """
    module = compiled(4, "bilinear")
    x, g = last_axis_channels(kind, (2, 6, 160, 170)), rng.uniform(-1.2, 1.2, (2, 30, 40, 2)).astype(np.float32)
    plain = np.ascontiguousarray(to_numpy(x)[0])
    want, kept = module.forward(x=plain, g=g)
    assert not module.variants
    y, residuals = module.forward(x=x, g=g)
    assert (
        len(module.variants) == 1
        and residuals.module in module.variants.values()
        and not residuals.module.forward.copied
        and type(y) is type(x)
    )
    np.testing.assert_allclose(np.asarray(y), want, rtol=1e-6, atol=1e-6)
    assert residuals.inner("x") is x
    dy = rng.standard_normal(want.shape).astype(np.float32)
    exact, got = module.backward(kept, dy), module.backward(residuals, dy)
    assert list(got) == ["x", "g"] and tuple(got["x"].shape) == plain.shape
    strides = lambda a: tuple(s // 4 for s in to_numpy(a)[0].strides)
    assert strides(got["x"]) == strides(x)
    for name in got:
        np.testing.assert_allclose(np.asarray(got[name]), exact[name], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(module(x=x, g=g)), np.asarray(y))
    module.forward(x=x, g=g)
    assert len(module.variants) == 1


def test_out_of_a_recognised_layout() -> None:
    """out= is written whether it lies as the input does or as the graph says, and added to with accumulate."""
    module = compiled(4, "bilinear")
    x, g = last_axis_channels("numpy", (2, 6, 160, 170)), rng.uniform(-1, 1, (2, 30, 40, 2)).astype(np.float32)
    y, residuals = module.forward(x=x, g=g)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    want = module.backward(residuals, dy)
    for make in (
        lambda: np.moveaxis(np.ones((2, 160, 170, 6), np.float32), -1, 1),
        lambda: np.ones(x.shape, np.float32),
    ):
        for accumulate in (False, True, {"x"}, {"g"}, "x"):
            out = {"x": make(), "g": np.ones(g.shape, np.float32)}
            got = module.backward(residuals, dy, out=dict(out), accumulate=accumulate)
            for name in out:
                adds = accumulate is True or (accumulate is not False and name in accumulate)
                np.testing.assert_allclose(out[name], want[name] + adds, rtol=1e-6, atol=1e-6)
                assert np.shares_memory(got[name], out[name])
    with pytest.raises(InvalidProblem, match="out"):
        module.backward(residuals, dy, out={"x": np.ones(x.shape, np.float64)})
    with pytest.raises(gradc.errors.MisalignedOperand):
        module.backward(residuals, dy, out={"x": np.ones((*x.shape[:3], 2 * x.shape[3]), np.float32)[..., ::2]})


def test_what_lies_in_no_order_is_copied_and_counted() -> None:
    module = compiled(4, "bilinear")
    g = rng.uniform(-1, 1, (2, 30, 40, 2)).astype(np.float32)
    small, gaps = last_axis_channels("numpy", (2, 6, 8, 9)), np.zeros((2, 6, 300, 300), np.float32)[..., ::2]
    for x in (small, gaps, np.zeros((2, 6, 300, 150), np.float32)[..., ::-1]):
        module.forward(x=x, g=g)
    assert not module.variants and module.forward.copied == {"x": 3}
    assert "x was copied in 3 calls" in module.explain(B=2, H=8, W=9, h=30, w=40)


def test_value_and_grad_and_a_weight_turned() -> None:
    graph = gradc.trace(lambda x, w: ops.mean((x @ w) * (x @ w)), x="f32[N,K]", w="f32[K,M]")
    module = gradc.compile(graph, wrt=["w"])
    x, w = rng.standard_normal((7, 600)).astype(np.float32), rng.standard_normal((500, 600)).astype(np.float32)
    want, exact = module.value_and_grad(x=x, w=np.ascontiguousarray(w.T))
    value, got = module.value_and_grad(x=x, w=w.T)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(got["w"], exact["w"], rtol=1e-5, atol=1e-7)
    assert got["w"].strides == w.T.strides
    axes = [
        np.moveaxis(np.zeros((40, 30, 20, 15), np.float32), (0, 1, 2, 3), order)
        for order in itertools.permutations(range(4))
    ]
    many = gradc.compile(gradc.trace(lambda a: ops.sum(a * a, axis=0), a="f32[A,B,C,D]"))
    for a in axes:
        many(a=a)
    assert len(many.variants) == MOST


# -- what a reader found -----------------------------------------------------------------------------------------------


def turned(rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    """[rows, columns], its memory [columns, rows], more than 1 MiB."""
    return rng.standard_normal((columns, rows)).astype(dtype).T


def test_an_input_with_an_outputs_name() -> None:
    module = gradc.compile(gradc.trace(lambda x, y: x @ y, x="f32[N,K]", y="f32[K,M]"))
    x, y = rng.standard_normal((5, 600)).astype(np.float32), turned(600, 600)
    np.testing.assert_array_equal(module(x=x, y=y), module(x=x, y=np.ascontiguousarray(y)))
    with pytest.raises(InvalidProblem, match="'y', which is an input and an output"):
        gradc.compile(module.graph, layout={"y": (1, 0)})


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("rows", [1, 5, 600])
def test_products_have_the_same_bits_in_any_layout(dtype: str, rows: int) -> None:
    """Values and gradients; what is turned is read in place, by a variant, or copied (x of few rows)."""
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x=f"{dtype}[N,K]", w=f"{dtype}[K,M]"), wrt=["x", "w"])
    x, w = (turned(r, 600, dtype.replace("f", "float")) for r in (rows, 600))
    seen = set()
    for left in (x, np.ascontiguousarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
        for right in (w, np.ascontiguousarray(w), np.repeat(w, 2, axis=0)[::2]):
            y, residuals = module.forward(x=left, w=right)
            got = module.backward(residuals, np.cos(y))
            seen.add(tuple(np.ascontiguousarray(a).tobytes() for a in (y, got["x"], got["w"])))
    assert len(seen) == 1


def test_a_captured_array_stays_with_the_residuals() -> None:
    table = rng.standard_normal(600).astype(np.float32)
    module = gradc.compile(gradc.trace(lambda x: x * table, x="f32[N,600]"), wrt=["x"])
    x = turned(500, 600)
    y, residuals = module.forward(x=x)
    np.testing.assert_array_equal(y, x * table)
    np.testing.assert_array_equal(module.backward(residuals, np.ones_like(y))["x"], np.broadcast_to(table, x.shape))


def test_where_no_variant_can_be_made_the_array_is_copied() -> None:
    graph = gradc.trace(lambda i, w: ops.embedding(i, w), i="i64[N]", w="f32[V,D]")
    i, w = np.array([3, 3, 1]), turned(600, 500)
    for options in ({"sparse": ["w"]}, {"reductions": {"d.w": "segmented"}}):
        module = gradc.compile(graph, wrt=["w"], **options)
        y, residuals = module.forward(i=i, w=w)
        np.testing.assert_array_equal(y, w[i])
        got = module.backward(residuals, np.ones_like(y))["w"]
        assert np.asarray(got.dense() if "sparse" in options else got).sum() == 1500
        assert list(module.variants.values()) == [None] and module.forward.copied == {"w": 1}


def test_a_wrong_call_is_told_as_without_variants() -> None:
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[N,K]", w="f32[K,M]"), wrt=["w"])
    x, w = rng.standard_normal((5, 600)).astype(np.float32), turned(600, 500)
    for wrong in (
        {"w": turned(600, 500, np.float64)},
        {"w": turned(601, 500)},
        {"w": w, "q": w},
        {"w": np.moveaxis(np.ones((8, 300, 200), np.float32), 0, 2)},
    ):
        with pytest.raises(InvalidProblem) as seen:
            module.forward(x=x, **wrong)
        with pytest.raises(InvalidProblem) as wanted:
            module.forward(x=x, **{n: np.ascontiguousarray(a) for n, a in wrong.items()})
        assert str(seen.value) == str(wanted.value)
    assert not module.variants


def test_out_of_a_variant_is_checked_before_anything_is_written() -> None:
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[N,K]", w="f32[K,M]"), wrt=["x", "w"])
    x, w = rng.standard_normal((5, 600)).astype(np.float32), turned(600, 500)
    y, residuals = module.forward(x=x, w=w)
    dy = np.ascontiguousarray(rng.standard_normal(y.shape), np.float32)
    gx, both, kept = np.zeros_like(x), np.zeros((600, 500), np.float32), dy.copy()
    read_only = np.zeros((600, 500), np.float32)
    read_only.flags.writeable = False
    for out, accumulate in (
        ({"x": gx, "w": np.zeros((600, 501), np.float32)}, False),
        ({"x": both.reshape(-1)[:3000].reshape(5, 600), "w": both}, False),
        ({"w": read_only}, False),
        ({"w": both, "q": both}, False),
        ({"w": both}, 3),
        ({"w": both}, "x"),
    ):
        with pytest.raises(gradc.errors.GradcError):
            module.backward(residuals, dy, out=out, accumulate=accumulate)
        assert not gx.any() and not both.any() and np.array_equal(dy, kept)
    large = np.zeros((600, 500), np.float32)
    big = large.reshape(-1)[: dy.size].reshape(dy.shape)
    with pytest.raises(gradc.errors.OverlappingOperands):
        module.backward(residuals, big, out={"w": large})
    again = gradc.compile(module.graph, wrt=["x", "w"])  # an equal one is the same module
    np.testing.assert_array_equal(again.backward(residuals, dy)["w"], module.backward(residuals, dy)["w"])
    other = gradc.compile(gradc.trace(lambda x, w: x @ w + 1.0, x="f32[N,K]", w="f32[K,M]"), wrt=["x", "w"])
    with pytest.raises(InvalidProblem, match="of another module"):
        other.backward(residuals, dy)


def test_objects_that_cannot_say_whether_they_are_contiguous() -> None:
    torch = pytest.importorskip("torch")
    module = gradc.compile(gradc.trace(lambda x: x + 1, x="f32[N,K]"))
    with pytest.raises(InvalidProblem, match="make it dense first"):
        module.forward(x=torch.eye(600).to_sparse_csr())

    class Odd:
        is_contiguous = True
        ndim, shape = 2, (2, 3)

        def __array__(self, *args: Any, **more: Any) -> np.ndarray:
            return np.ones((2, 3), np.float32)

    np.testing.assert_array_equal(module(x=Odd()), np.full((2, 3), 2))


def test_a_product_that_is_read_as_it_is_and_transposed() -> None:
    """Which nodes read a value is asked by identity: == of two values compares their elements."""
    graph = gradc.trace(lambda x, y: (ops.exp(x @ y), (x @ y).T), x="f64[3,4]", y="f64[4,5]")
    module = gradc.compile(graph, target="numpy")
    x, y = np.random.default_rng(0).standard_normal((2, 20))
    x, y = x[:12].reshape(3, 4), y.reshape(4, 5)
    for got, want in zip(module(x=x, y=y).values(), (np.exp(x @ y), (x @ y).T), strict=True):
        np.testing.assert_allclose(got, want)
