"""Convolutions, pooling and attention: what is read in place, symbolic sizes, extremes."""

from __future__ import annotations

from typing import Any

import long_tests
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DataObject, booleans, data, integers, sampled_from

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import InvalidProblem, TypeRuleError
from gradc.trace import trace

torch = pytest.importorskip("torch")
F = torch.nn.functional
rng = np.random.default_rng(0)
inf, nan = np.inf, np.nan
_ENDS = {"kernel": (1, 5), "stride": (1, 4), "dilation": (1, 3), "padding": (0, 3), "count": (1, 5)}


def gradients(fn: Any, g: np.ndarray | None = None, **arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The value and the gradients in NumPy."""
    graph = trace(fn, **arrays)
    joint, y = differentiate(graph, list(arrays)), interp.run(graph, arrays)["y"]
    given = {**arrays, "d.y": np.ones_like(y) if g is None else g}
    return tuple(interp.run(joint, {n: given[n] for n in joint.input_names}).values())


def torchs(fn: Any, g: np.ndarray | None = None, **arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}
    y = fn(**leaves)
    y.backward(torch.ones_like(y) if g is None else torch.tensor(g))
    return (y.detach().numpy(), *(t.grad.numpy() for t in leaves.values()))


def agree(module: gradc.Module, theirs: Any, **arrays: np.ndarray) -> None:
    """A module's value and gradients are those of torch."""
    y, residuals = module.forward(**arrays)
    g = rng.standard_normal(y.shape)
    found = (y, *module.backward(residuals, g).values())
    for value, want in zip(found, torchs(theirs, g, **arrays), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-11)


def test_a_module_serves_every_batch_and_image() -> None:
    def net(x: Any, w: Any, b: Any, v: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, b, stride=2, padding=1))
        y = ops.max_pool2d(y, 3, 2, 1)
        return ops.conv2d(y, v, padding=1, groups=6)

    def same(x: Any, w: Any, b: Any, v: Any) -> Any:
        return F.conv2d(F.max_pool2d(F.relu(F.conv2d(x, w, b, 2, 1)), 3, 2, 1), v, padding=1, groups=6)

    weights = {n: rng.standard_normal(s) for n, s in (("w", (6, 3, 3, 3)), ("b", (6,)), ("v", (6, 1, 3, 3)))}
    module = gradc.compile(trace(net, x="f64[N,3,H,W]", **weights), wrt=["x", *weights], target="numpy")
    for shape in ((2, 3, 11, 9), (1, 3, 7, 16)):
        arrays = {"x": rng.standard_normal(shape), **weights}
        y, residuals = module.forward(**arrays)
        g = rng.standard_normal(y.shape)
        got = (y, *module.backward(residuals, g).values())
        for value, want in zip(got, torchs(same, g, **arrays), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-12)
    with pytest.raises(InvalidProblem):
        interp.run(trace(lambda x: ops.max_pool1d(x, 3), x="f64[2,L]"), x=np.zeros((2, 2)))


@given(data())
@settings(max_examples=60, deadline=None)
def test_an_image_of_strided_windows_of_any_geometry(data: DataObject) -> None:
    """The transpose of a convolution, and the gradient of one: by phases or by columns, what no window meets is 0."""
    spatial, groups = data.draw(integers(1, 2)), data.draw(integers(1, 2))
    sizes = {n: tuple(data.draw(integers(*ends)) for _ in range(spatial)) for n, ends in _ENDS.items()}
    extra = tuple(
        data.draw(integers(0, max(s, d) - 1)) for s, d in zip(sizes["stride"], sizes["dilation"], strict=True)
    )
    options = {"stride": sizes["stride"], "dilation": sizes["dilation"], "padding": sizes["padding"], "groups": groups}
    kernel, axes = sizes["kernel"], range(spatial)
    far = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, sizes["dilation"], sizes["padding"], strict=True)]
    count = [
        max(n, 1 + -(far[a] + extra[a]) // sizes["stride"][a] + 1) for a, n in zip(axes, sizes["count"], strict=True)
    ]
    channels = data.draw(sampled_from((1, 3, 8)))
    x, w = rng.standard_normal((2, groups * 2, *count)), rng.standard_normal((groups * 2, channels, *kernel))
    ours, theirs = getattr(ops, f"conv_transpose{spatial}d"), getattr(F, f"conv_transpose{spatial}d")
    y = theirs(torch.tensor(x), torch.tensor(w), output_padding=extra, **options).numpy()
    got = interp.run(trace(lambda x, w: ours(x, w, output_padding=extra, **options), x=x, w=w), x=x, w=w)["y"]
    np.testing.assert_allclose(got, y, rtol=1e-11, atol=1e-11)
    conv, its = getattr(ops, f"conv{spatial}d"), getattr(F, f"conv{spatial}d")
    g = rng.standard_normal(its(torch.tensor(y), torch.tensor(w), **options).shape)
    found = (
        gradients(lambda x, w: conv(x, w, **options), g, x=y, w=w),
        torchs(lambda x, w: its(x, w, **options), g, x=y, w=w),
    )
    for value, want in zip(*found, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("stride", "dilation"), [((2, 2, 2), (3, 1, 1)), ((3, 2, 1), (1, 2, 3))])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_strided_convolution_of_a_volume_of_any_size(
    stride: tuple[int, ...], dilation: tuple[int, ...], transposed: bool
) -> None:
    """The number of windows, a product of three quotients, bounds where the gradient reads."""
    name = "conv_transpose3d" if transposed else "conv3d"
    options = {"stride": stride, "dilation": dilation, "padding": 1}
    graph = trace(lambda x, w: getattr(ops, name)(x, w, **options), x="f64[2,4,A,B,C]", w="f64[4,4,3,3,3]")
    module = gradc.compile(graph, wrt=["x", "w"], target="numpy")
    for shape in ((2, 4, 8, 7, 6), (2, 4, 9, 9, 5)):
        arrays = {"x": rng.standard_normal(shape), "w": rng.standard_normal((4, 4, 3, 3, 3))}
        y, residuals = module.forward(**arrays)
        g = rng.standard_normal(y.shape)
        want = torchs(lambda x, w: getattr(F, name)(x, w, **options), g, **arrays)
        for value, other in zip((y, *module.backward(residuals, g).values()), want, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-11, atol=1e-11)


@long_tests.values
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((1, 3, 1), (2, 2, 2), (2, 2, 3), (2, 3, 2)),
        ((1, 3, 2), (3, 2, 3), (3, 0, 1), (3, 3, 2)),
        ((2, 3, 1), (1, 1, 3), (3, 0, 2), (1, 3, 2)),
    ],
)
def test_windows_whose_numbers_are_other_quotients(
    kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    """What the gradient reads is bounded by the sizes of the image, too, in quotients that are at most one larger."""
    graph = trace(
        lambda x, w: ops.conv3d(x, w, stride=stride, padding=padding, dilation=dilation),
        x="f64[N,2,A,B,C]",
        w=f"f64[4,2,{','.join(map(str, kernel))}]",
    )
    for target in ("numpy", "cpu"):  # whose passes differ
        gradc.compile(graph, wrt=["x"], target=target)


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding", "dilation"),
    [
        # a part of a place is tested in multiples of a symbolic number: of rows, of planes
        ("1,W", (4, 2), (1, 3), (4, 0), (2, 3)),
        ("H,1,D", (2, 3, 1), (1, 1, 4), (1, 4, 3), (3, 3, 3)),
        ("H,1,D", (2, 2, 2), (3, 1, 2), (1, 1, 2), (2, 2, 1)),
        # the number of windows is a product of two quotients, each of which is another than what is read
        ("H,W,3", (1, 3, 2), (2, 4, 4), (1, 4, 3), (1, 1, 2)),
        # more bounds than are kept
        ("H,W,D", (3, 3, 3), (1, 2, 2), (3, 2, 2), (3, 1, 1)),
        ("H,W,D", (3, 2, 1), (2, 3, 2), (3, 1, 1), (1, 2, 2)),
        ("H,W,D", (2, 1, 1), (3, 3, 4), (4, 0, 2), (2, 3, 3)),
    ],
)
def test_what_a_gradient_reads_is_known_to_be_inside(
    image: str, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    conv = getattr(ops, f"conv{len(kernel)}d")
    graph = trace(
        lambda x, w: conv(x, w, stride=stride, padding=padding, dilation=dilation),
        x=f"f64[N,4,{image}]",
        w=f"f64[3,4,{','.join(map(str, kernel))}]",
    )
    for target in ("numpy", "cpu"):  # whose passes differ
        gradc.compile(graph, wrt=["x", "w"], target=target)


@given(data())
@settings(max_examples=40, deadline=None)
def test_a_convolution_of_any_geometry_and_any_size(data: DataObject) -> None:
    """Sizes of images and filters are numbers or symbols, and one module serves two bindings of them."""
    spatial, transposed, groups = data.draw(integers(1, 3)), data.draw(booleans()), data.draw(integers(1, 2))

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(integers(low, high)) for _ in range(spatial))

    stride, dilation, padding = draw(1, 4), draw(1, 3), draw(0, 4)
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    extra = tuple(data.draw(integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    if transposed:
        options["output_padding"] = extra
    symbolic, kernels = [n < 3 for n in draw(0, 3)], [draw(1, 3), draw(1, 3)]
    if data.draw(booleans()):
        kernels[1] = kernels[0]

    def least(axis: int, kernel: int) -> int:
        far = dilation[axis] * (kernel - 1) - 2 * padding[axis]
        return 1 + max(-((far + extra[axis]) // stride[axis]) if transposed else far, 0)

    sizes = [max(least(a, kernel[a]) for kernel in kernels) + n for a, n in enumerate(draw(0, 3))]
    others = [n + m if named else n for n, m, named in zip(sizes, draw(0, 3), symbolic, strict=True)]
    inner, outer = data.draw(sampled_from((1, 2, 8))), data.draw(sampled_from((1, 3)))
    channels = groups * (outer if transposed else inner)
    image = ",".join(f"S{a}" if named else str(n) for a, (n, named) in enumerate(zip(sizes, symbolic, strict=True)))
    places = ",".join(str(k) if k == m else f"K{a}" for a, (k, m) in enumerate(zip(*kernels, strict=True)))
    name = f"conv_transpose{spatial}d" if transposed else f"conv{spatial}d"
    graph = trace(
        lambda x, w: getattr(ops, name)(x, w, **options),
        x=f"f64[N,{channels},{image}]",
        w=f"f64[{groups * outer},{inner},{places}]",
    )
    module = gradc.compile(graph, wrt=["x", "w"], target="numpy")
    for n, axes, kernel in ((2, sizes, kernels[0]), (1, others, kernels[1])):
        x, w = rng.standard_normal((n, channels, *axes)), rng.standard_normal((groups * outer, inner, *kernel))
        agree(module, lambda x, w: getattr(F, name)(x, w, **options), x=x, w=w)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 3, 1), (2, 3, 1)])
@pytest.mark.parametrize("name", ["max_pool3d", "avg_pool3d"])
def test_pooling_of_a_volume_of_any_size_whose_last_windows_stand_out(
    name: str, kernel: int, stride: int, padding: int
) -> None:
    graph = trace(lambda x: getattr(ops, name)(x, kernel, stride, padding, ceil_mode=True), x="f64[2,3,A,B,C]")
    module = gradc.compile(graph, wrt=["x"], target="numpy")
    for sizes in ((5, 6, 7), (4, 8, 9)):
        x = rng.standard_normal((2, 3, *sizes))
        y, residuals = module.forward(x=x)
        g = rng.standard_normal(y.shape)
        want = torchs(lambda x: getattr(F, name)(x, kernel, stride, padding, ceil_mode=True), g, x=x)
        for value, other in zip((y, *module.backward(residuals, g).values()), want, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", ["2,3,0,5", "N,3,4,0"])
def test_an_image_of_no_elements_has_gradients(shape: str, transposed: bool) -> None:
    """Of which the response, all padding, may have some."""

    def conv(x: Any, w: Any) -> Any:
        return ops.conv_transpose2d(x, w) if transposed else ops.conv2d(x, w, padding=2)

    joint = differentiate(trace(conv, x=f"f32[{shape}]", w="f32[3,3,3,3]"), ["x", "w"])
    module = gradc.compile(joint, wrt=["x", "w", "d.y"], target="cpu")
    sizes = [2 if n == "N" else int(n) for n in shape.split(",")]
    x, w = np.zeros(sizes, np.float32), np.ones((3, 3, 3, 3), np.float32)
    dy = np.ones((*sizes[:2], sizes[2] + 2, sizes[3] + 2), np.float32)
    values, residuals = module.forward(**{"x": x, "w": w, "d.y": dy})
    got = module.backward(residuals, *(np.ones_like(v) for v in values.values()))
    assert values["d.x"].shape == got["x"].shape == x.shape
    for zero in (values["y"], values["d.w"], got["w"], got["d.y"]):
        assert not zero.any()
    assert got["d.y"].shape == dy.shape


@given(data())
@settings(max_examples=60, deadline=None)
def test_a_pooling_of_any_geometry_and_any_size(data: DataObject) -> None:
    """Pooling and unfold of images whose sizes are numbers or symbols, and fold to a size that is a number; one module
    serves two bindings of them.
    """
    kind = data.draw(sampled_from(("max", "avg", "unfold", "fold")))
    spatial = 2 if "fold" in kind else data.draw(integers(1, 3))

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(integers(low, high)) for _ in range(spatial))

    kernel = draw(1, 3)
    options: dict[str, Any] = {"kernel_size": kernel, "stride": draw(1, 4)}
    options["padding"] = draw(0, 3) if "fold" in kind else tuple(data.draw(integers(0, k // 2)) for k in kernel)
    if kind == "avg":
        options |= {"ceil_mode": data.draw(booleans()), "count_include_pad": data.draw(booleans())}
        if spatial > 1:
            options["divisor_override"] = data.draw(sampled_from((None, 3)))
    else:
        options["dilation"] = draw(1, 3)
    if kind == "max":
        options["ceil_mode"] = data.draw(booleans())
    spread = [d * (k - 1) + 1 for k, d in zip(kernel, options.get("dilation", (1,) * spatial), strict=True)]
    # torch takes no average of images that are smaller than a window, and the maximum of padding alone has a gradient
    # there that lies outside of the image
    least = [max(1, wide - 2 * p * ("fold" in kind)) for wide, p in zip(spread, options["padding"], strict=True)]
    sizes = [n + m for n, m in zip(least, draw(0, 3), strict=True)]
    symbolic = [n < 3 for n in draw(0, 3)]
    others = [n + m if named else n for n, m, named in zip(sizes, draw(0, 4), symbolic, strict=True)]
    axes = ",".join(f"S{a}" if named else str(n) for a, (n, named) in enumerate(zip(sizes, symbolic, strict=True)))
    channels, name = 2, kind if "fold" in kind else f"{kind}_pool{spatial}d"
    if kind == "fold":
        steps = zip(sizes, spread, options["padding"], options["stride"], strict=True)
        windows = [(n + 2 * p - wide) // step + 1 for n, wide, p, step in steps]
        options["output_size"], channels = tuple(sizes), 2 * kernel[0] * kernel[1]
        sizes = others = [windows[0] * windows[1]]
        axes = str(sizes[0])
    graph = trace(lambda x: getattr(ops, name)(x, **options), x=f"f64[N,{channels},{axes}]")
    module = gradc.compile(graph, wrt=["x"], target="numpy")
    for shape in ((2, channels, *sizes), (1, channels, *others)):
        agree(module, lambda x: getattr(F, name)(x, **options), x=rng.standard_normal(shape))


def test_windows_are_read_in_place() -> None:
    """A pooling is one kernel, its gradient one more, and neither keeps the windows; a convolution writes the columns
    that its product reads, once.
    """
    pool = trace(lambda x: ops.avg_pool2d(ops.relu(x), 3, 2, 1), x="f32[N,8,32,32]")
    module = gradc.compile(pool, wrt=["x"], target="numpy")
    assert [len(e.program.steps) for e in (module.forward, module.backward)] == [1, 1]
    graph = trace(lambda x, w: ops.conv2d(x, w, padding=1), x="f32[4,8,32,32]", w="f32[8,8,3,3]")
    columns = 4 * 8 * 9 * 32 * 32 * 4
    module = gradc.compile(graph, wrt=["w"], target="numpy")
    for program in (module.forward.program, module.backward.program):
        large = [b for b in program.of_kind("temp") if not b.alias and int(b.type.nbytes) >= columns]
        assert len(large) == 1 and int(large[0].type.nbytes) == columns
    one = trace(lambda x, w: ops.conv2d(x, w), x="f32[4,8,32,32]", w="f32[8,8,1,1]")
    assert not gradc.compile(one, wrt=[], target="numpy").forward.program.of_kind("temp")


def test_attention_of_rows_without_keys() -> None:
    """They are zeros and pass no gradient, as in torch; what is masked in part is as without those keys."""
    q, k, v = (rng.standard_normal((2, n, 4)) for n in (3, 5, 5))
    masks = [np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)]
    masks.append(np.where(masks[0], 0.5, -inf))
    for mask in masks:
        got = gradients(lambda q, k, v, mask=mask: ops.scaled_dot_product_attention(q, k, v, mask), q=q, k=k, v=v)
        want = torchs(
            lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, torch.tensor(mask)), q=q, k=k, v=v
        )
        assert not got[0][:, 1].any() and not got[1][:, 1].any()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
    large = gradients(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v), q=q * 1e150, k=k * 1e150, v=v)
    assert all(np.isfinite(a).all() for a in large)


def test_normalisation_at_extremes() -> None:
    """Constant channels have a finite gradient; large means lose nothing."""
    x = np.stack([np.full((3, 4), 7.0), rng.standard_normal((3, 4)) + 1e6], 1)
    g = rng.standard_normal(x.shape)
    got = gradients(lambda x: ops.batch_norm(x, training=True), g, x=x)
    want = torchs(lambda x: F.batch_norm(x, None, None, training=True), g, x=x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


def test_overlapping_windows_have_one_writer_per_element() -> None:
    """The gradient of windows gathers, so that its sums have one order."""
    graph = trace(lambda x: ops.max_pool2d(ops.unfold(x, 3, stride=2)[:, None], 3, 2), x="f32[2,3,9,9]")
    program = gradc.compile(graph, wrt=["x"], target="numpy").backward.program
    assert not any(kernel.accums for kernel in program.kernels)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.conv2d(x, x), "an input of rank 3 and a weight of rank 3"),
        (lambda x: ops.max_pool2d(x, (2, 2, 2)), r"kernel_size=\[2, 2, 2\] has 3 entries for 2 spatial axes"),
        (lambda x: ops.max_pool2d(x, 2.5), r"max_pool2d\(f32\[2,6,6\]\): kernel_size=2.5 is not an int"),
        (lambda x: ops.max_pool2d(x), "missing a required argument: 'kernel_size'"),
        (lambda x: ops.max_pool2d(x, 2, strides=1), "did you mean stride"),
        (lambda x: ops.conv1d(x, np.ones((2, 6, 3), np.float32), padding="full"), "padding='full' is not"),
        (lambda x: ops.stack(), "nothing to join"),
    ],
)
def test_a_wrong_call_says_so(call: Any, message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        trace(call, x="f32[2,6,6]")


def test_what_is_beyond_a_constant_image() -> None:
    """A movement of equal elements gives other ones where it fills: no pass may take it for a constant."""
    graph = gradc.trace(
        lambda x: {
            "window_sums": ops.reduce_window(x * 0 + 1.0, "sum", (3,), padding=(1,)),
            "identity": ops.diag_embed(ops.broadcast_to(1.0, (4,))),
            "coverage": ops.overlap_add(
                ops.windows(x * 0 + 1.0, axis=(0,), size=(3,), count=(4,), step=(1,), dilation=(1,), padding=(1,)),
                axis=(0,),
                length=(4,),
                step=(1,),
                dilation=(1,),
                padding=(1,),
            ),
        },
        x="f32[4]",
    )
    for target in ("numpy", "cpu"):
        got = gradc.compile(graph, target=target)(x=np.zeros(4, np.float32))
        np.testing.assert_array_equal(got["window_sums"], [2, 3, 3, 2])
        np.testing.assert_array_equal(got["identity"], np.eye(4))
        np.testing.assert_array_equal(got["coverage"], [2, 3, 3, 2])
