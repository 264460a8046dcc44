"""dequantize, quantize, fake_quantize against torch in f64, torch's learnable fake-quantize, and each other."""

import itertools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import registry

from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import NotDifferentiable, TypeRuleError
from gradc.ir.dims import symbol
from gradc.ir.graph import Graph, again, input_node
from gradc.ir.node import Node
from gradc.ir.text import parse
from gradc.ir.types import DTYPES, F64, parse_type
from gradc.trace import trace

torch = pytest.importorskip("torch")

NAMES = ("dequantize", "quantize", "fake_quantize")
U32 = 2.0**-24
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_for_each_test() -> None:
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


BLOCKS = {
    "tensor": ((6, 8), None),
    "tensor3": ((2, 3, 4), None),
    "scalar": ((), None),
    "channel0": ((6, 8), (1, 8)),
    "channel1": ((2, 5, 4), (2, 1, 4)),
    "token": ((2, 5, 4), (1, 1, 4)),
    "element": ((3, 4), (1, 1)),
    "group": ((6, 8), (1, 4)),
    "blocked": ((6, 8), (2, 4)),
    "ragged": ((6, 8), (4, 3)),
    "ragged1": ((7,), (3,)),
    "mixed": ((3, 7, 4), (1, 2, 4)),
    "large": ((6, 8), (100, 5)),
    "empty": ((0, 8), (1, 4)),
    "empty_tensor": ((0, 8), None),
}


def counts(shape: tuple, block: tuple | None) -> tuple:
    return tuple(
        1 if block is None else -(-n // b) if n else n // b for n, b in zip(shape, block or shape, strict=True)
    )


def expand(p: torch.Tensor, shape: tuple, block: tuple | None) -> torch.Tensor:
    """A parameter per block as one per element."""
    if p.ndim == 0:
        return p.expand(shape)
    for axis, n in enumerate(shape):
        b = (block or shape)[axis]
        p = p.repeat_interleave(max(b, 1), axis).narrow(axis, 0, n)
    return p


def traced(fn: Any, arrays: Mapping[str, np.ndarray], wrt: list[str]) -> tuple[Graph, dict[str, np.ndarray]]:
    """The joint graph and its results on the arrays, the cotangent ``d.y`` included in them."""
    graph = trace(fn, **{k: registry.typeof(v) for k, v in arrays.items() if k != "d.y"})
    joint = differentiate(graph, wrt)
    return joint, interp.run(joint, arrays)


def torch_quantized(x: Any, s: Any, zp: Any, low: int, high: int) -> tuple[Any, Any]:
    """(q, zero point) as reals, straight-through: written from the table's words, not its formulas."""
    if zp.is_floating_point():
        zp = zp + (zp.round().clamp(low, high) - zp).detach()
    ratio = x / s
    pre = ratio + (ratio.round() - ratio).detach() + zp
    return torch.where((pre.detach() >= low) & (pre.detach() <= high), pre, pre.detach().clamp(low, high)), zp


def close(got: Any, want: Any, rtol: float = 1e-10) -> None:
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=rtol, atol=rtol * max(1.0, float(np.abs(want).max(initial=0)))
    )


def tensors(arrays: Mapping[str, np.ndarray], *names: str) -> list[torch.Tensor]:
    return [torch.tensor(np.asarray(arrays[n], np.float64), requires_grad=True) for n in names]


def zero_points(kind: str, shape: tuple, low: int, high: int) -> dict[str, np.ndarray]:
    if kind == "none":
        return {}
    # far enough in that an i32 one is also fine; a float one also lies between integers and out of range
    values = rng.integers(low, high + 1, shape) if kind != "float" else rng.uniform(low - 2, high + 2, shape)
    return {"zp": np.asarray(values).astype({"float": np.float64, "int": np.int32}[kind])}


# -- gradients in f64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "int", "float"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["i8", "u4"])
def test_dequantize_gradients(name: str, kind: str, dtype: str) -> None:
    shape, block = BLOCKS[name]
    low, high = DTYPES[dtype].range
    q = rng.integers(low, high + 1, shape).astype(np.int8 if low else np.uint8).astype(DTYPES[dtype].np)
    arrays = {
        "q": np.asarray(q),
        "s": rng.uniform(0.1, 2, counts(shape, block)),
        **zero_points(kind, counts(shape, block), low, high),
        "d.y": rng.standard_normal(shape),
    }
    wrt = ["q", "s", "zp"][: 3 if kind == "float" else 2]
    _, out = traced(lambda q, s, zp=None: ops.dequantize(q, s, zp, block=block, out_dtype="f64"), arrays, wrt)
    ts = tensors(arrays, *[n for n in ("q", "s", "zp") if n in arrays])
    y = (ts[0] - (expand(ts[2], shape, block) if kind != "none" else 0)) * expand(ts[1], shape, block)
    y.backward(torch.tensor(arrays["d.y"]))
    close(out["y"], y)
    assert out["d.q"].dtype == np.float64
    for n, t in zip(wrt, ts, strict=False):
        close(out[f"d.{n}"], t.grad if t.grad is not None else np.zeros(t.shape))


@pytest.mark.parametrize("grad_factor", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["none", "int", "float"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "bounds"), [("i8", {}), ("u8", {}), ("i4", {"quant_min": -7}), ("u2", {"quant_max": 2}), ("i16", {})]
)
def test_fake_quantize_gradients(name: str, kind: str, dtype: str, bounds: dict, grad_factor: float) -> None:
    shape, block = BLOCKS[name]
    low, high = DTYPES[dtype].range
    low, high = bounds.get("quant_min", low), bounds.get("quant_max", high)
    arrays = {
        "x": 3 * rng.standard_normal(shape),
        "s": rng.uniform(4, 9, counts(shape, block)) / (high - low),
        **zero_points(kind, counts(shape, block), low, high),
        "d.y": rng.standard_normal(shape),
    }
    wrt = ["x", "s", "zp"][: 3 if kind == "float" else 2]
    _, out = traced(
        lambda x, s, zp=None: ops.fake_quantize(x, s, zp, block=block, dtype=dtype, grad_factor=grad_factor, **bounds),
        arrays,
        wrt,
    )
    ts = tensors(arrays, "x", "s", *(["zp"] if kind == "float" else []))
    zp = expand(ts[2] if kind == "float" else torch.tensor(np.asarray(arrays.get("zp", 0))), shape, block)
    s = expand(ts[1], shape, block)
    q, zero = torch_quantized(ts[0], s, zp, low, high)
    y = (q - zero) * s
    y.backward(torch.tensor(arrays["d.y"]))
    close(out["y"], y)
    for n, t in zip(wrt, ts, strict=True):
        want = t.grad if t.grad is not None else torch.zeros(t.shape)
        close(out[f"d.{n}"], want * (1.0 if n == "x" else grad_factor))


@pytest.mark.parametrize("kind", ["none", "int", "float"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["i8", "u4", "i2"])
def test_quantize_gradients(name: str, kind: str, dtype: str) -> None:
    """The int result is read through a cast, which hands its float cotangent on."""
    shape, block = BLOCKS[name]
    low, high = DTYPES[dtype].range
    arrays = {
        "x": 3 * rng.standard_normal(shape),
        "s": rng.uniform(4, 9, counts(shape, block)) / (high - low),
        **zero_points(kind, counts(shape, block), low, high),
        "d.y": rng.standard_normal(shape),
    }
    wrt = ["x", "s", "zp"][: 3 if kind == "float" else 2]
    joint, out = traced(
        lambda x, s, zp=None: ops.cast(ops.quantize(x, s, zp, block=block, dtype=dtype), "f64"), arrays, wrt
    )
    assert any(n.dtype.name == dtype for n in joint.nodes)
    ts = tensors(arrays, "x", "s", *(["zp"] if kind == "float" else []))
    zp = expand(ts[2] if kind == "float" else torch.tensor(np.asarray(arrays.get("zp", 0))), shape, block)
    y, _ = torch_quantized(ts[0], expand(ts[1], shape, block), zp, low, high)
    y.backward(torch.tensor(arrays["d.y"]))
    close(out["y"], y)
    for n, t in zip(wrt, ts, strict=True):
        close(out[f"d.{n}"], t.grad if t.grad is not None else np.zeros(t.shape))


def test_every_block_of_a_symbolic_size() -> None:
    graph = trace(lambda x, s: ops.fake_quantize(x, s, block=(1, 32)), x="f64[N,D]", s="f64[N,(D+31)//32]")
    joint = differentiate(graph, ["x", "s"])
    assert parse(str(joint)) == joint
    for n, d in itertools.product((0, 1, 7), (0, 1, 31, 32, 33, 64)):
        x, s, g = rng.standard_normal((n, d)), rng.uniform(0.01, 0.02, (n, -(-d // 32))), rng.standard_normal((n, d))
        out = interp.run(joint, {"x": x, "s": s, "d.y": g})
        wide = np.repeat(s, 32, 1)[:, :d]
        q = np.clip(np.rint(x / wide), -128, 127)
        inside = np.abs(np.rint(x / wide) + 0.5) < 128
        close(out["y"], q * wide)
        close(out["d.x"], g * inside)
        terms = np.pad(g * (q - inside * x / wide), ((0, 0), (0, -d % 32)))
        close(out["d.s"], terms.reshape(n, -(-d // 32), 32).sum(-1))


def test_the_block_may_be_symbolic() -> None:
    d = symbol("D")
    graph = trace(lambda q, s: ops.dequantize(q, s, block=(1, d)), q="i8[N,D]", s="f32[N,1]")
    (node,) = [n for n in graph.nodes if n.op.name == "dequantize"]
    assert node.attrs["block"] == (1, d) and parse(str(graph)) == graph
    q, s = rng.integers(-128, 128, (3, 5)).astype(np.int8), rng.uniform(0, 1, (3, 1)).astype(np.float32)
    assert np.array_equal(interp.run(graph, q=q, s=s)["y"], q.astype(np.float32) * s)


# -- the law, and torch's own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", ["none", "int", "float"])
def test_fake_quantize_is_dequantize_of_quantize(name: str, kind: str) -> None:
    shape, block = BLOCKS[name]
    arrays = {
        "x": 3 * rng.standard_normal(shape),
        "s": rng.uniform(0.2, 0.4, counts(shape, block)),
        **zero_points("none" if kind == "none" else "int", counts(shape, block), -8, 7),
        "d.y": rng.standard_normal(shape),
    }
    if kind == "float":
        arrays["zp"] = arrays["zp"].astype(np.float64)
    wrt = ["x", "s", "zp"][: 2 if kind == "none" else 3]
    _, fake = traced(lambda x, s, zp=None: ops.fake_quantize(x, s, zp, block=block, dtype="i4"), arrays, wrt)
    _, both = traced(
        lambda x, s, zp=None: ops.dequantize(
            ops.quantize(x, s, zp, block=block, dtype="i4"), s, zp, block=block, out_dtype="f64"
        ),
        arrays,
        wrt,
    )
    assert fake.keys() == both.keys()
    assert np.array_equal(fake["y"], both["y"])
    for key in fake:
        close(fake[key], both[key])


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("grad_factor", [1.0, 0.25])
def test_torch_learnable(axis: int | None, grad_factor: float) -> None:
    """torch has this op in f32 only."""
    shape, low, high = (6, 40), 0, 15
    n = 1 if axis is None else shape[axis]
    values = [rng.standard_normal(shape) * 3, rng.uniform(0.3, 0.5, n), rng.uniform(3, 12, n)]
    ts = [torch.tensor(v, dtype=torch.float32, requires_grad=True) for v in values]
    if axis is None:
        y = torch._fake_quantize_learnable_per_tensor_affine(*ts, low, high, grad_factor)
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(*ts, axis, low, high, grad_factor)
    g = torch.tensor(rng.standard_normal(shape), dtype=torch.float32)
    y.backward(g)
    block = None if axis is None else tuple(1 if a == axis else m for a, m in enumerate(shape))
    per = counts(shape, block)
    x, s, zp = (t.detach().numpy() for t in ts)
    _, out = traced(
        lambda x, s, zp: ops.fake_quantize(x, s, zp, block=block, dtype="u4", grad_factor=grad_factor),
        {"x": x, "s": s.reshape(per), "zp": zp.reshape(per), "d.y": g.numpy()},
        ["x", "s", "zp"],
    )
    rtol = 3e-6  # torch multiplies by 1/s
    close(out["y"], y, rtol)
    for name, t in zip(("x", "s", "zp"), ts, strict=True):
        close(out[f"d.{name}"].reshape(t.shape), t.grad, rtol)
    assert np.any(out["d.zp"] != 0) and np.any(out["d.x"] == 0)


# -- the surrogate -----------------------------------------------------------------------------------------------------


def hold(graph: Graph) -> tuple[Graph, dict[str, Node]]:
    """The graph with each stop_gradient as an input: what a numerical derivative must not move."""
    held: dict[Node, Node] = {}
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op.name == "stop_gradient":
            new[node] = held[node] = input_node(f"held{len(held)}", node.type)
        else:
            new[node] = again(node, tuple(new[o] for o in node.operands))
    inputs = (*graph.inputs, *held.values())
    outputs = tuple((name, new[node]) for name, node in graph.outputs)
    return Graph(graph.name, inputs, outputs), {n.attrs["name"]: old for old, n in held.items()}


@pytest.mark.parametrize("name", ["quantize", "fake_quantize"])
@pytest.mark.parametrize("blocks", ["tensor", "channel0", "ragged"])
@pytest.mark.parametrize("grad_factor", [1.0, 0.3])
def test_the_vjp_is_the_derivative_of_the_surrogate(name: str, blocks: str, grad_factor: float) -> None:
    shape, block = BLOCKS[blocks]
    attrs = {"block": block, "dtype": "i4"} | ({"grad_factor": grad_factor} if name == "fake_quantize" else {})
    arrays = {
        "x": 3 * rng.standard_normal(shape),
        "s": rng.uniform(0.2, 0.4, counts(shape, block)),
        "zp": rng.uniform(-9, 8, counts(shape, block)),
    }
    g = rng.standard_normal(shape)

    def surrogate(x: Node, s: Node, zp: Node) -> Node:
        node = getattr(ops, name)(x, s, zp, **attrs)
        return node.op.surrogate(*node.operands, **node.attrs)

    def op(x: Node, s: Node, zp: Node) -> Node:
        return ops.cast(getattr(ops, name)(x, s, zp, **attrs), "f64")

    _, want = traced(op, {**arrays, "d.y": g}, ["x", "s", "zp"])
    _, got = traced(surrogate, {**arrays, "d.y": g}, ["x", "s", "zp"])
    for key in want:
        close(got[key], want[key])
    graph = trace(surrogate, **{k: registry.typeof(v) for k, v in arrays.items()})
    held, olds = hold(graph)
    values = interp.evaluate_graph(graph.with_outputs([*graph.outputs, *olds.items()]), arrays)
    fixed = {k: values[old] for k, old in olds.items()}

    def f(**moved: np.ndarray) -> float:
        return float((interp.run(held, {**arrays, **fixed, **moved})["y"] * g).sum())

    for key, array in arrays.items():  # Richardson
        direction = rng.standard_normal(array.shape)
        slope = [
            (f(**{key: array + h * direction}) - f(**{key: array - h * direction})) / (2 * h) for h in (1e-3, 5e-4)
        ]
        numeric = (4 * slope[1] - slope[0]) / 3
        assert numeric == pytest.approx(float((want[f"d.{key}"] * direction).sum()), rel=1e-7, abs=1e-7)


# -- precision ---------------------------------------------------------------------------------------------------------


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """The largest error relative to the largest value."""
    return float(np.abs(np.asarray(got, np.float64) - exact).max(initial=0) / max(np.abs(exact).max(initial=0), 1e-30))


@pytest.mark.parametrize(
    "shape,block", [((64, 256), None), ((64, 256), (1, 256)), ((64, 256), (1, 32)), ((33, 50), (16, 16))]
)
def test_f32_error(shape: tuple, block: tuple | None) -> None:
    x, g = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    s, zp = (
        rng.uniform(0.01, 0.02, counts(shape, block)).astype(np.float32),
        rng.uniform(-9, 9, counts(shape, block)).astype(np.float32),
    )
    arrays = {"x": x, "s": s, "zp": zp, "d.y": g}
    graph = trace(
        lambda x, s, zp: ops.fake_quantize(x, s, zp, block=block),
        **{k: registry.typeof(v) for k, v in arrays.items() if k != "d.y"},
    )
    joint = differentiate(graph, ["x", "s", "zp"])
    got = interp.run(joint, arrays)
    exact = interp.run(joint, arrays, precision="f64")
    ts = [torch.tensor(a, requires_grad=True) for a in (x, s, zp)]
    q, zero = torch_quantized(ts[0], expand(ts[1], shape, block), expand(ts[2], shape, block), -128, 127)
    ((q - zero) * expand(ts[1], shape, block)).backward(torch.tensor(g))
    assert error(got["y"], exact["y"]) <= 4 * U32
    for name, t in zip(("x", "s", "zp"), ts, strict=True):
        assert t.grad is not None
        assert error(got[f"d.{name}"], exact[f"d.{name}"]) <= max(4 * U32, error(t.grad.numpy(), exact[f"d.{name}"]))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_are_computed_and_summed_in_f32(dtype: Any) -> None:
    x, g = rng.uniform(0.5, 1, (4, 2000)).astype(dtype), np.ones((4, 2000), dtype)
    s = np.full((4, 1), 0.07, dtype)
    arrays = {"x": x, "s": s, "d.y": g}
    _, out = traced(lambda x, s: ops.fake_quantize(x, s, block=(1, 2000)), arrays, ["x", "s"])
    wide = {k: v.astype(np.float32) for k, v in arrays.items()}
    _, exact = traced(lambda x, s: ops.fake_quantize(x, s, block=(1, 2000)), wide, ["x", "s"])
    for key in out:
        assert np.array_equal(out[key], exact[key].astype(dtype))
    q = np.full((4, 2000), 5, np.int8)
    out_dtype = registry.typeof(s).dtype
    _, out = traced(
        lambda q, s: ops.dequantize(q, s, block=(1, 2000), out_dtype=out_dtype), {"q": q, "s": s, "d.y": g}, ["s", "q"]
    )
    assert np.array_equal(out["d.s"], np.full((4, 1), 10000, dtype))  # 2000 ones in bf16 would stop at 256
    assert out["d.q"].dtype == np.float32


def test_the_scale_decides_the_precision() -> None:
    graph = trace(lambda x, s: ops.fake_quantize(x, s), x="f32[3]", s="f64[1]")
    (node,) = [n for n in graph.nodes if n.op.name == "fake_quantize"]
    assert node.dtype.name == "f32"
    inside = registry.opened(graph)
    assert {n.dtype for n in inside.nodes if n.op.name == "div"} == {F64}


# -- values that bite --------------------------------------------------------------------------------------------------


def test_wild_values() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**31, 0.0, 2.5, 3.5, -2.5], np.float32)
    s = np.ones(1, np.float32)
    g = np.ones(x.shape, np.float32)
    quantized = trace(lambda x, s: ops.quantize(x, s), x="f32[10]", s="f32[1]")
    assert interp.run(quantized, x=x, s=s)["y"].tolist() == [0, 127, -128, 127, -128, 127, 0, 2, 4, -2]
    _, out = traced(lambda x, s: ops.fake_quantize(x, s), {"x": x, "s": s, "d.y": g}, ["x", "s"])
    assert out["d.x"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert np.isnan(out["y"][0]) and out["y"][1:].tolist() == [127, -128, 127, -128, 127, 0, 2, 4, -2]
    _, out = traced(lambda x, s: ops.cast(ops.quantize(x, s), "f32"), {"x": x[1:], "s": s, "d.y": g[1:]}, ["x", "s"])
    assert np.isfinite(out["d.x"]).all() and np.isfinite(out["d.s"]).all()


def test_the_bounds_are_closed() -> None:
    x = np.array(
        [127.0, 127.5, 127.49, 128.0, -128.0, -128.5, -128.51, -129.0], np.float64
    )  # 127.5 rounds to 128, -128.5 to -128
    _, out = traced(lambda x, s: ops.fake_quantize(x, s), {"x": x, "s": np.ones(1), "d.y": np.ones(8)}, ["x"])
    assert out["d.x"].tolist() == [1, 0, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "fn",
    [lambda x, s: ops.fake_quantize(x, s, block=(4,)), lambda x, s: ops.cast(ops.quantize(x, s, block=(4,)), "f32")],
)
def test_a_scale_of_zero_in_a_ragged_block(fn: Any) -> None:
    x, s = np.array([1, 2, 3, 4, 5, -6], np.float32), np.array([1, 0], np.float32)
    _, out = traced(fn, {"x": x, "s": s, "d.y": np.ones(6, np.float32)}, ["x", "s"])
    assert np.isfinite(out["d.x"]).all() and out["d.x"].tolist() == [1, 1, 1, 1, 0, 0]
    # 5 and -6 over 0 are clamped to 127 and -128; the two positions beyond the edge add nothing
    assert not np.isnan(out["d.s"]).any()


@pytest.mark.parametrize("q", ["f8e4m3", "f8e5m2", "f4e2m1"])
def test_dequantize_floats(q: str) -> None:
    values = np.array([[1.5, -2, 0.5], [6, 1, -4]]).astype(DTYPES[q].np)
    scale = np.array([[2.0], [0.5]]).astype(ml_dtypes.float8_e8m0fnu)
    graph = trace(lambda q, s: ops.dequantize(q, s, block=(1, 3)), q=f"{q}[2,3]", s="e8m0[2,1]")
    assert interp.run(graph, q=values, s=scale)["y"].tolist() == [[3, -4, 1], [3, 0.5, -2]]
    with pytest.raises(NotDifferentiable):
        differentiate(graph, ["s"])


def test_frozen_codes_and_learnable_scale() -> None:
    """Only the scale is wanted; the codes stay as they are."""
    q, s = rng.integers(-128, 128, (5, 4)).astype(np.int8), rng.uniform(0.1, 1, (5, 1)).astype(np.float32)
    i, g = np.array([0, 2, 2, 4]), rng.standard_normal((4, 4)).astype(np.float32)
    _, out = traced(
        lambda q, s, i: ops.embedding(i, ops.dequantize(q, s, block=(1, 4))), {"q": q, "s": s, "i": i, "d.y": g}, ["s"]
    )
    table = torch.tensor(s, requires_grad=True)
    torch.nn.functional.embedding(torch.tensor(i), torch.tensor(q).float() * table).backward(torch.tensor(g))
    close(out["d.s"], table.grad, 1e-5)


def test_second_order() -> None:
    """d(ds)/d(dy) and d(dq)/ds of dequantize, which is linear in either."""
    shape, block = (6, 8), (4, 3)
    arrays = {
        "q": rng.integers(-8, 8, shape).astype(np.int8),
        "s": rng.uniform(0.1, 1, counts(shape, block)),
        "zp": rng.standard_normal(counts(shape, block)),
        "g": rng.standard_normal(shape),
    }
    first = differentiate(
        trace(
            lambda q, s, zp: ops.dequantize(q, s, zp, block=block, out_dtype="f64"),
            q="i8[6,8]",
            s="f64[2,3]",
            zp="f64[2,3]",
        ),
        ["q", "s", "zp"],
    )
    renamed = {"d.y": "g"}
    new: dict[Node, Node] = {
        n: input_node(renamed.get(first.input_name(n), first.input_name(n)), n.type) for n in first.inputs
    }
    for node in first.nodes:
        if node not in new:
            new[node] = node.op.apply(tuple(new[o] for o in node.operands), node.attrs)
    gradients = Graph(
        "first",
        tuple(new[n] for n in first.inputs),
        tuple((k.replace("d.", "grad_"), new[n]) for k, n in first.outputs),
    )
    second = differentiate(gradients, ["s", "zp", "g"])
    weights = {k: rng.standard_normal(n.type.concrete({})) for k, n in gradients.outputs}
    out = interp.run(second, {**arrays, **{f"d.{k}": v for k, v in weights.items()}})
    q, s, zp, g = tensors(arrays, "q", "s", "zp", "g")
    y = (q - expand(zp, shape, block)) * expand(s, shape, block)
    grads = torch.autograd.grad(y, [q, s, zp], g, create_graph=True)
    total = sum(
        (torch.tensor(weights[k]) * t).sum()
        for k, t in zip(("y", "grad_q", "grad_s", "grad_zp"), (y, *grads), strict=True)
    )
    for key, want in zip(("s", "zp", "g"), torch.autograd.grad(total, [s, zp, g]), strict=True):
        close(out[f"d.{key}"], want)


# -- form --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "block"), [("f32[1,1]", None), ("f32[]", None), ("f32[N,1]", (1, 8)), ("f32[1,8]", ("N", 1))]
)
def test_common_blocks_are_plain_broadcasts(scale: str, block: Any) -> None:
    if block is not None:
        block = tuple(symbol(b) if isinstance(b, str) else b for b in block)
    graph = registry.opened(trace(lambda q, s: ops.dequantize(q, s, block=block), q="i8[N,8]", s=scale))
    assert [n.op.name for n in graph.nodes if n.op.name != "input"] == ["cast", "broadcast_to", "mul"]
    joint = registry.opened(
        differentiate(
            trace(lambda x, s, zp: ops.fake_quantize(x, s, zp, block=block), x="f32[N,8]", s=scale, zp=scale),
            ["x", "s", "zp"],
        )
    )
    names = [n.op.name for n in joint.nodes]
    assert not {"pad", "slice"} & set(names)
    # the forward's quotient and rounding are the backward's
    assert names.count("div") == 1 and names.count("round") == 2


def test_a_dividing_block_needs_no_padding() -> None:
    joint = registry.opened(
        differentiate(
            trace(lambda x, s: ops.fake_quantize(x, s, block=(1, 4)), x="f32[N,4*D]", s="f32[N,D]"), ["x", "s"]
        )
    )
    assert not {"pad", "slice"} & {n.op.name for n in joint.nodes}


@pytest.mark.parametrize("case", list(registry.cases(names=NAMES)), ids=str)
def test_samples(case: registry.Case) -> None:
    assert parse(str(case.graph)) == case.graph
    joint = differentiate(case.smooth, case.floats) if case.differentiable else case.graph
    for dims in case.bindings():
        y = joint.output("y")
        seed = {"d.y": np.ones(y.type.concrete(dims), y.dtype.np)} if case.differentiable else {}
        out = interp.run(joint, {**case.arrays(dims), **seed}, dims=dims)
        for name, node in joint.outputs:
            assert out[name].shape == node.type.concrete(dims) and out[name].dtype == node.dtype.np


@pytest.mark.parametrize(
    "op,bad", [(ops.REGISTRY[n], b) for n in NAMES for b in ops.REGISTRY[n].bad], ids=lambda v: getattr(v, "match", "")
)
def test_refused(op: Any, bad: Any) -> None:
    operands = [input_node(f"x{k}", parse_type(t)) for k, t in enumerate(bad.operands)]
    with pytest.raises(TypeRuleError) as caught:
        registry.call(op, operands, bad.attrs)
    assert bad.match in str(caught.value) and str(caught.value).startswith(f"{op.name}(")
