"""Convolutions as calls of cuDNN: what a program says of them, what they are asked, and what they give, by a stand-in
of its package that torch computes for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import interp, ops
from gradc.codegen.cuda.actions import Convolution, Launch, Library
from gradc.codegen.cuda.library_time import convolution_time
from gradc.errors import GradcError, InvalidProblem, NotDifferentiable, Unsupported
from gradc.ir.node import REGISTRY
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.module.options import for_target
from gradc.runtime.cuda import cudnn_version
from gradc.targets.devices import gpu_of

torch = pytest.importorskip("torch")
from cudnn_front_end import FrontEnd  # noqa: E402
from registry import unregistered  # noqa: E402
from torch.nn import functional as F  # noqa: E402

ATOL = {"f64": 1e-10, "f32": 1e-5, "bf16": 2.0**-7, "f16": 2.0**-9}
"""A share of the largest element: a rounding or two."""
FUNCTIONS = ("convolution_response", "convolution_image", "convolution_filter")


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    return FrontEnd.installed(monkeypatch)


def compiled(function: Callable[..., Any], wrt: Any = ("x", "w"), target: str = "cuda-sim", **types: str) -> Any:
    return gradc.compile(gradc.trace(function, **types), wrt=list(wrt), target=target, convolutions="cudnn")


def asked_of(module: gradc.Module, **dims: int) -> list[Convolution]:
    plans = [executable.native.bind(dims) for executable in module.executables.values()]
    return [a for plan in plans for actions in plan.actions for a in actions if isinstance(a, Convolution)]


def last(x: Any) -> Any:
    """Channels behind all other axes."""
    return ops.transpose(x, (0, *range(2, x.rank), 1))


def first(x: Any) -> Any:
    return ops.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A convolution, or the transpose of one, of any geometry and layout."""
    spatial, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    most = {1: 9, 2: 7, 3: 5}[spatial]
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(spatial))
    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(spatial))
    transposed = draw(st.booleans())
    extra = tuple(
        draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)
    )
    # of a transpose the image, else the response, has an element
    spans = [d * (k - 1) + 1 - low - high for k, d, (low, high) in zip(kernel, dilation, padding, strict=True)]
    sizes = tuple(max(draw(st.integers(2, most)), span) for span in spans) if not transposed else each(2, 4)
    if transposed and any(
        (n - 1) * s + span + o < 1 for n, s, span, o in zip(sizes, stride, spans, extra, strict=True)
    ):
        sizes = tuple(n + 3 for n in sizes)
    inner, outer = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    weight = (groups * (inner if transposed else outer), outer if transposed else inner, *kernel)
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        attrs |= {"transposed": True, "output_padding": extra}
    layouts = {name: draw(st.booleans()) for name in ("x", "w", "y")}
    return {"x": (draw(st.integers(1, 3)), groups * inner, *sizes), "w": weight, "attrs": attrs, "last": layouts}


def of_torch(x: Any, w: Any, attrs: dict[str, Any]) -> Any:
    spatial = w.ndim - 2
    pairs, how = attrs["padding"], (attrs["stride"], attrs["dilation"], attrs["groups"])
    stride, dilation, groups = how
    if not attrs.get("transposed"):
        x = F.pad(x, [n for pair in reversed(pairs) for n in pair])
        return getattr(F, f"conv{spatial}d")(x, w, None, stride, 0, dilation, groups)
    y = getattr(F, f"conv_transpose{spatial}d")(x, w, None, stride, 0, attrs["output_padding"], groups, dilation)
    for axis, (low, high) in enumerate(pairs):
        y = y.narrow(2 + axis, low, y.shape[2 + axis] - low - high)
    return y


def written(case: dict[str, Any]) -> Callable[[Any, Any], Any]:
    def function(x: Any, w: Any) -> Any:
        layouts = case["last"]
        y = ops.convolution(first(x) if layouts["x"] else x, first(w) if layouts["w"] else w, **case["attrs"])
        return last(y) if layouts["y"] else y

    return function


def drawn(case: dict[str, Any], dtype: str, seed: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays as they lie, and their types."""
    rng, storage = np.random.default_rng(seed), gradc.ir.types.DTYPES[dtype].np
    arrays = {}
    for name in ("x", "w"):
        logical = rng.standard_normal(case[name]).astype(storage)
        arrays[name] = np.ascontiguousarray(np.moveaxis(logical, 1, -1)) if case["last"][name] else logical
    return arrays, {n: f"{dtype}[{','.join(map(str, a.shape))}]" for n, a in arrays.items()}


def wanted(case: dict[str, Any], arrays: dict[str, np.ndarray], g: Any = None) -> list[np.ndarray]:
    """torch's value and gradients in f64; g: the cotangent, by default 1 everywhere."""
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays.values()]
    logical = (t.movedim(-1, 1).contiguous() if case["last"][n] else t for n, t in zip("xw", tensors, strict=True))
    y = of_torch(*logical, case["attrs"])
    y = y.movedim(1, -1) if case["last"]["y"] else y
    slope = torch.ones_like(y) if g is None else torch.tensor(g.astype(np.float64))
    return [t.detach().numpy() for t in (y, *torch.autograd.grad(y, tensors, slope))]


def in_f64(program: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return interp.run(
        program, {n: arrays[n] for n in (b.name for b in program.buffers if b.kind == "input" and not b.alias)}
    )


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_a_programs_meaning_is_torchs(case: dict[str, Any], seed: int) -> None:
    """Value and gradients in f64, of any rank, geometry, groups and layout."""
    arrays, types = drawn(case, "f64", seed)
    module = compiled(written(case), target="cuda", **types)
    forward = in_f64(module.forward.program, arrays)
    g = np.random.default_rng(seed + 1).standard_normal(forward["y"].shape)
    backward = in_f64(module.backward.program, {**arrays, **forward, "d.y": g})
    found = (forward["y"], backward["d.x"], backward["d.w"])
    for value, other in zip(found, wanted(case, arrays, g), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-11, atol=1e-10)


@settings(max_examples=12, deadline=None)
@given(case=cases(), dtype=st.sampled_from(["f64", "f32", "f16", "bf16"]), seed=st.integers(0, 2**32 - 1))
def test_what_cudnn_is_asked_is_torchs(case: dict[str, Any], dtype: str, seed: int) -> None:
    """By the calls that cuDNN is given, at addresses, of every dtype."""
    arrays, types = drawn(case, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        FrontEnd.installed(patch)
        module = compiled(written(case), **types)
        y, residuals = module.forward(**arrays)
        g = np.random.default_rng(seed + 1).standard_normal(y.shape).astype(y.dtype)
        found = (y, *module.backward(residuals, g).values())
    for value, other in zip(found, wanted(case, arrays, g), strict=True):
        scale = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(np.asarray(value).astype(np.float64), other, atol=ATOL[dtype] * scale)


RESNET = {"x": "bf16[32,64,56,56]", "w": "bf16[64,64,3,3]"}


def block(x: Any, w: Any) -> Any:
    return ops.relu(ops.conv2d(x, w, padding=1))


def test_the_block_of_a_resnet_has_no_windows() -> None:
    """All that either direction has in memory beside its arguments are an image, its gradient and what cuDNN works in;
    windows are nine times an image.
    """
    image = 2 * 32 * 64 * 56 * 56
    module = compiled(block, target="cuda", **RESNET)
    for executable in module.executables.values():
        program = executable.program
        held = [b.type.nbytes for b in program.buffers if b.kind not in ("input", "const")]
        assert max(held) <= image and not any("windows" in b.name for b in program.buffers)
        plan = executable.native.bind({})
        assert plan.scratch_size == 0 and plan.offsets.keys() <= {b.name for b in program.buffers}
        assert plan.library.nbytes <= 2 * image + 2 * 9 * 64 * 64 + (33 << 20)
    assert [a.computes for a in asked_of(module)] == ["response", "image", "filter"]
    graph = gradc.trace(block, **RESNET)
    other = gradc.compile(graph, wrt=["x", "w"], target="cuda", convolutions="windows")
    sizes = [b.type.nbytes for e in other.executables.values() for b in e.program.buffers if b.kind == "temp"]
    assert max(sizes) == 9 * image


def test_the_predicted_time() -> None:
    """The longer of flops and bytes; 16-bit arrays channels first are moved three times."""
    gpu, asked = gpu_of("sm_90"), asked_of(compiled(block, target="cuda", **RESNET))[0]
    nbytes, flops = 2 * 32 * 64 * 56 * 56, 2 * 32 * 56 * 56 * 64 * 64 * 9
    assert 2 * asked.products == flops
    time = convolution_time(asked, gpu)
    assert time.bounds["bytes"] == pytest.approx(3 * (2 * nbytes + 2 * 64 * 64 * 9) / gpu.bandwidth)
    assert time.bound == "bytes" and time.seconds > time.bounds["bytes"]
    wide = asked_of(compiled(block, target="cuda", x="f32[32,256,28,28]", w="f32[256,256,3,3]"))[0]
    assert convolution_time(wide, gpu).bound == "flops"


def test_the_text() -> None:
    """It reads back, and a call says its geometry."""
    module = compiled(lambda x, w: ops.conv2d(x, w, stride=2, padding=1, groups=2), x="f32[N,4,9,9]", w="f32[6,2,3,3]")
    text = str(module.forward.program)
    assert (
        "y[n, o, y0, y1] <- convolution_response x[n, c, x0, x1], w[o, i, k0, k1] {stride=[2, 2], padding=[[1, 1], [1,"
        " 1]], dilation=[1, 1], groups=2}" in text
    )
    for executable in module.executables.values():
        assert parse_program(str(executable.program)) == executable.program


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("groups=2", "groups=1"), "has 4 channels and the weight takes 2"),
        ((", groups=2", ""), "carries the attributes stride, padding, dilation, groups"),
        (("stride=[2, 2]", "stride=[2]"), r"stride is written \[2, 2\]"),
        (("stride=[2, 2]", "stride=[4, 4]"), "the response is"),
        (("w[o, i, k0, k1]", "w[o, i, k1, k0]"), None),
        (("x[n, c, x0, x1]", "x[n, c, x0, k0]"), "does not go along k0 of x"),
    ],
)
def test_a_wrong_call_is_refused(change: tuple[str, str], match: str | None) -> None:
    module = compiled(lambda x, w: ops.conv2d(x, w, stride=2, padding=1, groups=2), x="f32[2,4,9,9]", w="f32[6,2,3,3]")
    text = str(module.forward.program)
    assert change[0] in text
    if match is None:  # a filter may lie in any order
        verify_program(parse_program(text.replace(*change)))
        return
    with pytest.raises(GradcError, match=match):
        verify_program(parse_program(text.replace(*change)))


def test_channels_last_are_read_and_written_as_they_lie() -> None:
    """No launch copies an image, a filter or a response, of which each is channels last."""
    module = compiled(
        lambda x, w: last(ops.conv2d(first(x), first(w), padding=1)), x="bf16[N,8,8,16]", w="bf16[32,3,3,16]"
    )
    for executable in module.executables.values():
        plan = executable.native.bind({"N": 2})
        actions = [a for each in plan.actions for a in each]
        assert actions and all(isinstance(a, Convolution) for a in actions)
        for asked in actions:
            assert all(x.strides[1] == 1 for x in (asked.image, asked.filter, asked.response))


@pytest.mark.parametrize("what", ["a part", "repeated", "backwards", "odd"])
def test_what_does_not_lie_packed_is_copied(what: str, front: FrontEnd) -> None:
    seen = {
        "a part": lambda x: x[:, 1:3],
        "repeated": lambda x: ops.broadcast_to(x[:, :1], (2, 2, 6, 6)),
        "backwards": lambda x: ops.flip(x[:, :2], axis=(2,)),
        "odd": lambda x: ops.transpose(x[:, :2], (0, 1, 3, 2)),
    }[what]
    rng = np.random.default_rng(0)
    module = compiled(lambda x, w: ops.conv2d(seen(x), w, padding=1), x="f32[2,4,6,6]", w="f32[3,2,3,3]")
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 6, 6), (3, 2, 3, 3)))
    y, residuals = module.forward(x=x, w=w)
    assert len(front.executed) == 1
    given_ = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, w)]
    part = {
        "a part": lambda x: x[:, 1:3],
        "repeated": lambda x: x[:, :1].expand(2, 2, 6, 6),
        "backwards": lambda x: x[:, :2].flip(2),
        "odd": lambda x: x[:, :2].transpose(2, 3),
    }[what](given_[0])
    want = F.conv2d(part, given_[1], padding=1)
    slopes = torch.autograd.grad(want.sum(), given_)
    found = (y, *module.backward(residuals, np.ones_like(y)).values())
    for value, other in zip(found, (want.detach(), *slopes), strict=True):
        np.testing.assert_allclose(value, other.numpy(), atol=2e-4)


@pytest.mark.parametrize("n", [0, 3])
def test_no_images(n: int, front: FrontEnd) -> None:
    """A sum over nothing is zeros, and no library is asked."""
    module = compiled(lambda x, w: ops.conv2d(x, w), x="f32[N,4,6,6]", w="f32[3,4,3,3]")
    y, residuals = module.forward(x=np.ones((n, 4, 6, 6), np.float32), w=np.ones((3, 4, 3, 3), np.float32))
    grads = module.backward(residuals, np.ones_like(y))
    assert (np.asarray(grads["w"]) == 16 * n).all() and grads["x"].shape == (n, 4, 6, 6)
    assert len(front.executed) == (3 if n else 0)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("places", [0, 1])
def test_a_response_of_no_places(stride: int, places: int) -> None:
    """What a map means of one, or gives as one, is what it is made of: zeros, or nothing."""
    how: Any = {"stride": (stride,), "padding": ((1, 1),), "dilation": (2,)}
    maps: dict[str, Any] = {
        "response": lambda image, filter: ops.convolution_response(image, filter, size=(places,), **how),
        "image": lambda response, filter: ops.convolution_image(response, filter, size=(9,), **how),
        "filter": lambda response, image: ops.convolution_filter(response, image, size=(3,), **how),
    }
    shapes = {"response": (2, 3, places), "image": (2, 4, 9), "filter": (3, 4, 3)}
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for gives, function in maps.items():
        given_ = {name: a for name, a in arrays.items() if name != gives}
        graph = gradc.trace(function, **{n: f"f64[{','.join(map(str, a.shape))}]" for n, a in given_.items()})
        found = interp.run(graph, given_)["y"]
        other, _ = gradc.compile(graph, target="cpu").forward(**given_)
        assert found.shape == shapes[gives]
        np.testing.assert_allclose(found, other, rtol=1e-12, atol=1e-12)


def test_what_stays_as_products() -> None:
    """Windows that are the image itself, and responses of one channel, have none in memory."""
    modules = [
        compiled(lambda x, w: ops.conv2d(x, w), x="f32[2,8,6,6]", w="f32[4,8,1,1]"),
        compiled(lambda x, w: ops.conv2d(x, w, groups=8, padding=1), x="f32[2,8,6,6]", w="f32[8,1,3,3]"),
    ]
    for module in modules:
        assert not asked_of(module)
    actions = [a for each in modules[0].forward.native.bind({}).actions for a in each]
    assert any(isinstance(a, Library) for a in actions)


def test_an_output_behind_a_bad_index_stays(front: FrontEnd) -> None:
    module = gradc.compile(
        gradc.trace(
            lambda t, i, w: ops.conv2d(ops.embedding(i, t).reshape(1, 2, 4, 4), w, padding=1),
            t="f32[5,16]", i="i64[2]", w="f32[3,2,3,3]",
        ), target="cuda-sim", convolutions="cudnn",
    )  # fmt: skip
    values = {"t": np.ones((5, 16), np.float32), "w": np.ones((3, 2, 3, 3), np.float32)}
    out = np.full((1, 3, 4, 4), 7, np.float32)
    with pytest.raises(gradc.errors.IndexOutOfRange):
        module.forward(**values, i=np.array([1, 9]), out={"y": out})
    assert (out == 7).all()
    module.forward(**values, i=np.array([1, 3]), out={"y": out})
    assert out[0, 0, 1, 1] == 18
    launched = [a.function for each in module.forward.native.bind({}).actions for a in each if isinstance(a, Launch)]
    assert launched.count("gradc_gate") == 2


# -- who decides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "installed", "given_", "want"),
    [
        ("cuda", True, None, "cudnn"),
        ("cuda", False, None, "windows"),
        ("cuda", True, "windows", "windows"),
        ("cuda", False, "cudnn", "cudnn"),
        ("cuda-sim", True, None, None),
        ("cuda-sim", False, "cudnn", "cudnn"),
        ("cpu", True, None, None),
    ],
)
def test_the_default(target: str, installed: bool, given_: Any, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A property of the options, found before anything is compiled, and by nothing that is imported."""
    monkeypatch.setattr(cudnn_version, "missing", lambda: "" if installed else "it is not there")
    options = gradc.module.options.Options(convolutions=given_)
    assert for_target(options, target).convolutions == want


def test_a_module_says_what_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = gradc.trace(block, **RESNET)
    for installed, ops_ in ((True, set(FUNCTIONS)), (False, set())):
        monkeypatch.setattr(cudnn_version, "missing", lambda installed=installed: "" if installed else "no")
        module = gradc.compile(graph, wrt=["x", "w"], target="cuda")
        found = {s.op for e in module.executables.values() for s in e.program.steps if hasattr(s, "op")}
        assert found & set(FUNCTIONS) == ops_


def test_a_cpu_has_no_choice() -> None:
    with pytest.raises(InvalidProblem, match="convolutions='cudnn' is for a GPU, not for the target 'cpu'"):
        gradc.compile(gradc.trace(block, **RESNET), target="cpu", convolutions="cudnn")
    with pytest.raises(InvalidProblem, match="there are None, cudnn, windows"):
        gradc.compile(gradc.trace(block, **RESNET), target="cuda", convolutions="winograd")


def test_an_export_asks_for_windows(tmp_path: Any) -> None:
    """What is exported calls no library."""
    module = compiled(block, wrt=(), target="cuda", x="f32[1,4,6,6]", w="f32[4,4,3,3]")
    with pytest.raises(Unsupported, match="compile with convolutions='windows'"):
        module.export(tmp_path / "exported")


def test_a_cpu_has_no_such_function() -> None:
    program = compiled(lambda x, w: ops.conv2d(x, w), wrt=(), x="f32[1,4,6,6]", w="f32[4,4,3,3]").forward.program
    with pytest.raises(Unsupported, match="the cpu has no function for convolution_response"):
        gradc.Executable(program, "cpu")(
            {name: np.ones(program.types[name].concrete({}), np.float32) for name in ("x", "w")}
        )


@pytest.mark.parametrize("differentiable", [True, False])
def test_a_library_op_without_a_vjp_is_differentiated_as_what_it_is_made_of(differentiable: bool) -> None:
    op = unregistered(REGISTRY["convolution_response"], vjp=None, differentiable=differentiable)
    how: Any = {"size": (4, 4), "stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    graph = gradc.trace(lambda x, w: op(x, w, **how), x="f64[2,4,6,6]", w="f64[3,4,3,3]")
    if not differentiable:
        with pytest.raises(NotDifferentiable, match="'convolution_response'"):
            gradc.differentiate(graph, ["x", "w"])
        return
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((2, 4, 6, 6), (3, 4, 3, 3), (2, 3, 4, 4)))
    found = interp.run(gradc.differentiate(graph, ["x", "w"]), {"x": x, "w": w, "d.y": g})
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    wanted_ = torch.autograd.grad(F.conv2d(*tensors), tensors, torch.tensor(g))
    for name, other in zip(("d.x", "d.w"), wanted_, strict=True):
        np.testing.assert_allclose(found[name], other.numpy(), rtol=1e-12, atol=1e-12)
