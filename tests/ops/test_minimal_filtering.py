"""Convolutions by minimal filtering: against torch in f64, against the sum in exact algebra, and where they are not."""

from __future__ import annotations

from typing import Any

import hypothesis
import long_tests
import numpy as np
import pytest
from hypothesis import strategies as st

import gradc
from gradc import ops
from gradc.autodiff import differentiate
from gradc.ir.kernel import Call
from gradc.ops.products import minimal_filtering
from gradc.runtime.host import pool
from gradc.verify import exact

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.optimised
F = torch.nn.functional
ULP = 2.0**-24


def _conv(**options: Any) -> Any:
    name = "conv_transpose2d" if options.pop("transposed", False) else "conv2d"
    return lambda x, w, b=None: getattr(ops, name)(x, w, b, **options), lambda x, w, b=None: getattr(F, name)(
        x, w, b, **options
    )


def _torchs(theirs: Any, dtype: Any, dy: Any, **arrays: Any) -> list[Any]:
    tensors = [torch.tensor(a, dtype=dtype, requires_grad=True) for a in arrays.values()]
    y = theirs(*tensors)
    return [y.detach().double().numpy(), *(g.double().numpy() for g in torch.autograd.grad(y, tensors, dy.to(dtype)))]


def _products(module: Any) -> list[list[int]]:
    """The batch of each matrix product of both programs."""
    steps = [s for e in module.executables.values() for s in e.program.steps if isinstance(s, Call)]
    return [[size for axis, size in s.axes if axis.startswith("b")] for s in steps]


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "even": ("f32[4,32,24,32]", "f32[48,32,3,3]", {"padding": 1}),
    "odd": ("f32[8,33,13,17]", "f32[40,33,3,3]", {"padding": 1}),
    "valid": ("f32[8,32,19,16]", "f32[32,32,3,3]", {}),
    "wide padding": ("f32[8,32,15,15]", "f32[32,32,3,3]", {"padding": (2, 0)}),
    "windows outside": ("f32[8,32,9,12]", "f32[32,32,3,3]", {"padding": (4, 3)}),
    "one image": ("f32[1,64,46,47]", "f32[64,64,3,3]", {"padding": 1}),
    "transposed": ("f32[8,32,18,17]", "f32[32,40,3,3]", {"transposed": True}),
    "transposed, cut": ("f32[8,32,18,17]", "f32[32,40,3,3]", {"padding": (1, 2), "transposed": True}),
    "any batch": ("f32[N,32,14,14]", "f32[32,32,3,3]", {"padding": 1}),
    "any image": ("f32[N,32,H,W]", "f32[32,32,3,3]", {"padding": 1}),
    "any image, valid": ("f32[N,32,H,W]", "f32[32,32,3,3]", {}),
    "few channels": ("f32[N,32,H,W]", "f32[17,32,3,3]", {"padding": 1}),
}
SIZES = {"N": 3, "H": 13, "W": 10}


@long_tests.values
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    x, w, options = CASES[name]
    ours, theirs = _conv(**options)
    bias = w[4:].split(",")[1 if options.get("transposed") else 0]
    types = {"x": x, "w": w, "b": f"f32[{bias}]"}
    module = gradc.compile(gradc.trace(ours, **types), wrt=["x", "w", "b"], target="cpu")
    assert _products(module) and all(batch == [16] for batch in _products(module))
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.standard_normal([SIZES.get(s) or int(s) for s in t[4:-1].split(",")], np.float32)
        for n, t in types.items()
    }
    y, residuals = module.forward(**arrays)
    dy = rng.standard_normal(y.shape, np.float32)
    got = [y, *module.backward(residuals, dy).values()]
    want, theirs_f32 = (_torchs(theirs, t, torch.tensor(dy), **arrays) for t in (torch.float64, torch.float32))
    for value, right, other in zip(got, want, theirs_f32, strict=True):
        bound = max(16 * ULP * np.abs(right).max(), 4 * np.abs(other - right).max())
        assert np.abs(value - right).max() <= bound


@long_tests.values
@pytest.mark.parametrize("save", ["min-cut", "none"])
def test_nothing_is_kept_but_what_the_sum_keeps(save: str) -> None:
    conv, _ = _conv(padding=1)
    types = {"x": "f32[8,64,28,28]", "w": "f32[64,64,3,3]", "v": "f32[64,64,3,3]"}
    graph = gradc.trace(lambda x, w, v: conv(ops.relu(conv(ops.relu(x), w)), v), **types)
    kept = {
        numerics: sum(
            r.node.type.nbytes
            for r in gradc.compile(graph, wrt=list(types), target="cpu", numerics=numerics, save=save).residuals
            if not r.borrowed
        )
        for numerics in ("real", "strict")
    }
    assert kept["real"] <= kept["strict"]


def test_a_step_for_the_filters_one_for_the_image_and_one_for_the_response() -> None:
    """No transform is computed twice, and none in a loop over its 16 elements."""
    ours, _ = _conv(padding=1)
    module = gradc.compile(gradc.trace(ours, x="f32[8,64,28,28]", w="f32[64,64,3,3]"), target="cpu")
    steps = module.forward.program.steps
    assert len(steps) == 5  # and one that copies the image between zeros
    for kernel in module.forward.program.kernels:
        assert not any(s.op == "where" for s in kernel.body)
        assert sum(s.op in ("add", "sub") for s in kernel.body) <= 32
    columns = [[n for _, n in kernel.cols] for kernel in module.forward.program.kernels]
    assert sorted(columns) == [[14], [14], [30], [64]]  # tiles, tiles, a row between zeros, channels


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ("f32[8,64,28,28]", "f32[64,64,3,3]", {"padding": 1, "stride": 2}),
        ("f32[8,64,28,28]", "f32[64,64,3,3]", {"padding": 1, "dilation": 2}),
        ("f32[8,64,28,28]", "f32[64,32,3,3]", {"padding": 1, "groups": 2}),
        ("f32[8,64,28,28]", "f32[64,64,5,5]", {"padding": 2}),
        ("f32[8,64,28,28]", "f32[64,64,3,1]", {}),
        ("f32[8,3,28,28]", "f32[64,3,3,3]", {"padding": 1}),
        ("f32[1,512,7,7]", "f32[512,512,3,3]", {"padding": 1}),
        ("f64[8,64,28,28]", "f64[64,64,3,3]", {"padding": 1}),
        ("bf16[8,64,28,28]", "bf16[64,64,3,3]", {"padding": 1}),
        ("f32[8,64,28,28]", "f32[64,64,A,B]", {}),
    ],
)
def test_others_are_sums(x: str, w: str, options: dict[str, Any]) -> None:
    graph = gradc.trace(_conv(**options)[0], x=x, w=w)
    module = gradc.compile(graph, wrt=["x", "w"], target="cpu")
    assert [16] not in _products(module)


def test_sizes_that_are_told_decide() -> None:
    """A filter of many channels is transformed for many tiles; a symbol counts as few."""
    graph = gradc.trace(_conv(padding=1)[0], x="f32[N,256,7,7]", w="f32[256,256,3,3]")
    for hints, chosen in ((None, False), ({"N": 1}, False), ({"N": 64}, True)):
        assert ([16] in _products(gradc.compile(graph, target="cpu", hints=hints))) is chosen


def test_strict_numerics_and_other_targets_add_up() -> None:
    graph = gradc.trace(_conv(padding=1)[0], x="f32[8,64,28,28]", w="f32[64,64,3,3]")
    assert [16] not in _products(gradc.compile(graph, wrt=["x", "w"], target="cpu", numerics="strict"))
    module = gradc.compile(graph, wrt=["x", "w"], target="numpy")
    assert not any("minimal" in stage.name for stage in module.stages)


@hypothesis.given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2),
    transposed=st.booleans(),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_it_is_the_sum_over_the_reals(sizes: Any, padding: Any, transposed: bool) -> None:
    """In exact algebra, for both forms and the gradient of the filter."""
    attrs = {"stride": (1, 1), "padding": padding, "dilation": (1, 1)}
    far = [n - 1 + 3 - sum(p) for n, p in zip(sizes, padding, strict=True)]
    near = [n + sum(p) - 2 for n, p in zip(sizes, padding, strict=True)]
    hypothesis.assume(all(n >= 1 for n in (far if transposed else near)))
    shape, response = (2, 2, *sizes), (2, 3, *near)

    def whole(x: Any, w: Any) -> Any:
        return ops.convolution(x, w, transposed=transposed, **attrs)

    def minimal(x: Any, w: Any) -> Any:
        if transposed:
            return minimal_filtering.image_of(x, w, tuple(far), tuple(2 - low for low, _ in padding))
        return minimal_filtering.response_of(x, w, tuple(near), tuple(low for low, _ in padding))

    weight = (2, 3, 3, 3) if transposed else (3, 2, 3, 3)
    types = {n: f"f32[{','.join(map(str, s))}]" for n, s in (("x", shape), ("w", weight))}
    exact.equal(gradc.trace(whole, **types), gradc.trace(minimal, **types), licence="REAL")
    if transposed:
        return
    types = {n: f"f32[{','.join(map(str, s))}]" for n, s in (("g", response), ("x", shape))}
    exact.equal(
        gradc.trace(lambda g, x: ops.convolution_filter(g, x, size=(3, 3), **attrs), **types),
        gradc.trace(lambda g, x: minimal_filtering.filter_of(g, x, tuple(low for low, _ in padding)), **types),
        licence="REAL",
    )


def test_a_wrong_transform_is_no_sum(monkeypatch: Any) -> None:
    """The comparison in exact algebra can fail."""
    monkeypatch.setattr(minimal_filtering, "TURNED", (3, 2, 1, 0))
    types = {"x": "f32[2,3,4,5]", "w": "f32[3,2,3,3]"}
    graphs = (
        gradc.trace(lambda x, w: ops.conv_transpose2d(x, w), **types),
        gradc.trace(lambda x, w: minimal_filtering.image_of(x, w, (6, 7), (2, 2)), **types),
    )
    with pytest.raises(gradc.errors.InternalError, match="no longer means the same"):
        exact.equal(*graphs, licence="REAL")


def test_what_is_not_finite_stays_in_the_windows_that_hold_it() -> None:
    """There it is not finite, as the sum is, though a NaN where that is infinite; elsewhere the bits are the same."""
    ours, theirs = _conv(padding=1)
    module = gradc.compile(gradc.trace(ours, x="f32[N,32,11,14]", w="f32[32,32,3,3]"), target="cpu")
    assert _products(module) == [[16]]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 32, 11, 14), np.float32), rng.standard_normal((32, 32, 3, 3), np.float32)
    plain = module(x=x, w=w)
    for value in (np.nan, np.inf, -np.inf):
        for at in ((0, 3, 0, 0), (1, 31, 10, 13), (1, 0, 5, 6), (0, 7, 4, 3)):
            other = x.copy()
            other[at] = value
            finite = np.isfinite(theirs(torch.tensor(other), torch.tensor(w)).numpy())
            got = module(x=other, w=w)
            np.testing.assert_array_equal(np.isfinite(got), finite)
            np.testing.assert_array_equal(got[finite], plain[finite])


def test_the_bits_do_not_depend_on_threads() -> None:
    module = gradc.compile(
        gradc.trace(_conv(padding=1)[0], x="f32[3,48,27,27]", w="f32[64,48,3,3]"), wrt=["x", "w"], target="cpu"
    )
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 48, 27, 27), np.float32), rng.standard_normal((64, 48, 3, 3), np.float32)
    before, found = pool.num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = module.forward(x=x, w=w)
            found.append([a.tobytes() for a in (y, *module.backward(residuals, np.ones_like(y)).values())])
    finally:
        pool.set_num_threads(before)
    assert all(other == found[0] for other in found)


@pytest.mark.parametrize("transposed", [False, True])
def test_second_derivatives_are_torchs(transposed: bool) -> None:
    ours, theirs = _conv(padding=1, transposed=transposed)
    joint = differentiate(gradc.trace(ours, x="f32[8,32,14,15]", w="f32[32,32,3,3]"), ["x", "w"])
    module = gradc.compile(joint, wrt=["x", "w", "d.y"], target="cpu")
    assert [16] in _products(module)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(n, np.float32) for n in ((8, 32, 14, 15), (32, 32, 3, 3), (8, 32, 14, 15)))
    values, residuals = module.forward(**{"x": x, "w": w, "d.y": dy})
    cotangents = [rng.standard_normal(v.shape, np.float32) for v in values.values()]
    got = module.backward(residuals, *cotangents)
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w, dy)]
    y = theirs(*tensors[:2])
    outputs = [y, *torch.autograd.grad(y, tensors[:2], tensors[2], create_graph=True)]
    want = torch.autograd.grad(outputs, tensors, [torch.tensor(c).double() for c in cotangents])
    for value, right in zip(got.values(), want, strict=True):
        exact_ = right.numpy()
        assert np.abs(value - exact_).max() <= 32 * ULP * np.abs(exact_).max()


@pytest.mark.parametrize("n", [0, 1])
def test_no_images(n: int) -> None:
    module = gradc.compile(
        gradc.trace(_conv(padding=1)[0], x="f32[N,32,16,16]", w="f32[32,32,3,3]"), wrt=["x", "w"], target="cpu"
    )
    x, w = np.ones((n, 32, 16, 16), np.float32), np.ones((32, 32, 3, 3), np.float32)
    y, residuals = module.forward(x=x, w=w)
    assert y.shape == (n, 32, 16, 16)
    gradients = module.backward(residuals, np.ones_like(y))
    assert gradients["x"].shape == x.shape and np.all(gradients["w"][..., 1, 1] == n * 256)
