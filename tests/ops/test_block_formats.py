"""Packed values, 4-bit floats, code books, and scales in blocks: against their definitions, ml_dtypes and torch in
f64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from agreement import merged
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import InvalidProblem, NotDifferentiable
from gradc.ir.dims import evaluate
from gradc.ir.types import DTYPES
from gradc.ir.verify import verify
from gradc.ops.elementwise.bits import PACKED, with_bits
from gradc.ops.elementwise.pointwise import convert
from gradc.ops.quantized.block_scales import NF4
from gradc.passes.graph.push_gathers import push_gathers
from gradc.verify.exact import equal

torch = pytest.importorskip("torch")

E8M0, F4 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
FLOATS = ("f8e4m3", "f8e5m2", "f4e2m1")
LARGEST = {"f8e4m3": 448.0, "f8e5m2": 57344.0, "f4e2m1": 6.0}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def same_bits(a: Any, b: Any, what: str = "") -> None:
    """Equal bit for bit, but for which NaN it is, and for the bits of a byte that a narrow integer does not have."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape, what
    if gradc.typeof(a).dtype.is_integer:
        assert np.array_equal(a.astype(np.int64), b.astype(np.int64)), what
        return
    nan = np.isnan(a.astype(np.float64))
    assert np.array_equal(nan, np.isnan(b.astype(np.float64))), what
    kind = f"u{a.dtype.itemsize}"
    assert np.array_equal(np.ascontiguousarray(a).view(kind)[~nan], np.ascontiguousarray(b).view(kind)[~nan]), what


def both(function: Any, **arrays: np.ndarray) -> np.ndarray:
    """The value on the CPU, the same bits as the interpreter's."""
    graph = gradc.trace(function, **{k: gradc.typeof(a) for k, a in arrays.items()})
    got, want = np.asarray(gradc.compile(graph)(**arrays)), interp.run(graph, arrays)["y"]
    same_bits(got, want)
    return got


# -- the formats on the CPU --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f4e2m1", "e8m0"])
def test_every_pattern_is_loaded_and_stored(name: str) -> None:
    values = np.arange(2 ** DTYPES[name].bits, dtype=np.uint8).view(DTYPES[name].np)
    for target in ("f32", "f64"):
        assert np.array_equal(
            both(lambda x, t=target: ops.cast(x, t), x=values), values.astype(np.float64), equal_nan=True
        )
    same_bits(both(lambda x: ops.flip(x), x=values), values[::-1])


@pytest.mark.parametrize("source", ["f32", "f64", "bf16", "f16", "f8e5m2", "i32", "i4", "bool"])
@pytest.mark.parametrize("name", ["f4e2m1", "e8m0"])
def test_casts_are_numpys(name: str, source: str) -> None:
    values = np.sort(np.arange(2 ** DTYPES[name].bits, dtype=np.uint8).view(DTYPES[name].np).astype(np.float64))
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middle, s * np.inf) for s in (1, -1)]
    x = np.concatenate(
        [
            values,
            middle,
            *beside,
            [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e300, -1e300, 1e-300],
            rng().standard_normal(500) * 4,
        ]
    )
    both(lambda x: ops.cast(x, name), x=convert(x, DTYPES[source]))


def test_a_skipped_row_of_either_format_is_what_a_zero_casts_to() -> None:
    i = np.array([0, 9, -1, 2])
    x = convert(rng().uniform(0.1, 5, (4, 3)), DTYPES["e8m0"])
    got = both(lambda i, x: ops.gather(x, i, oob="skip"), i=i, x=x)
    assert np.isnan(got[1:3].astype(np.float32)).all()  # e8m0 has no zero
    got = both(lambda i, x: ops.gather(x, i, oob="skip"), i=i, x=convert(x, DTYPES["f4e2m1"]))
    assert (got[1:3].astype(np.float32) == 0).all()
    table = both(
        lambda i, q, s: ops.embedding(i, ops.dequantize(q, s, block=(1, 3)), oob="skip"),
        i=i,
        q=convert(rng().standard_normal((4, 3)), DTYPES["f4e2m1"]),
        s=x[:, :1],
    )
    assert not table[1:3].any()


# -- pack and unpack ---------------------------------------------------------------------------------------------------


@st.composite
def packed_values(draw: Any) -> tuple[np.ndarray, str, int, bool]:
    name = draw(st.sampled_from(PACKED))
    per = 8 // DTYPES[name].bits
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    shape = tuple(n * per if a == axis % len(shape) else n for a, n in enumerate(shape))
    codes = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2 ** DTYPES[name].bits - 1)))
    return with_bits(codes, DTYPES[name]), name, axis, draw(st.booleans())


@settings(max_examples=200, deadline=None)
@given(packed_values())
def test_unpack_undoes_pack(case: tuple[np.ndarray, str, int, bool]) -> None:
    values, name, axis, low = case
    packed = gradc.pack(values, axis=axis, low_nibble_first=low)
    assert packed.dtype == np.uint8 and packed.size * (8 // DTYPES[name].bits) == values.size
    graph = gradc.trace(lambda p: ops.unpack(p, name, axis=axis, low_nibble_first=low), p=gradc.typeof(packed))
    same_bits(interp.run(graph, p=packed)["y"], values)
    assert np.array_equal(gradc.pack(interp.run(graph, p=packed)["y"], name, axis, low), packed)


@pytest.mark.parametrize("name", PACKED)
def test_unpack_on_the_cpu(name: str) -> None:
    def unpacked(part: bool, axis: int, low: bool) -> gradc.Graph:
        def of(p: Any) -> Any:
            whole = ops.unpack(p, name, axis=axis, low_nibble_first=low)
            return ops.cast(ops.flip(whole)[::2, 1:, 1:3], "f32") if part else whole

        return gradc.trace(of, p="u8[3,5,4]")

    cases = {
        f"{'part' if part else 'whole'}_{axis}_{'low' if low else 'high'}": unpacked(part, axis, low)
        for part in (False, True)
        for axis in (0, 1, 2)
        for low in (True, False)
    }
    graph = merged("unpacked", cases.items())
    given = {n: rng().integers(0, 256, (3, 5, 4), dtype=np.uint8) for n in graph.input_names}
    got = gradc.compile(graph).forward.run(**given)
    for case, want in interp.run(graph, given).items():
        same_bits(got[case], want, case)


def test_the_order_of_the_halves() -> None:
    assert gradc.pack(np.array([1, 2, -1, -8]), "i4").tolist() == [0x21, 0x8F]
    assert gradc.pack(np.array([1, 2, -1, -8]), "i4", low_nibble_first=False).tolist() == [0x12, 0xF8]
    assert gradc.pack(np.array([1, 2, 3, 0]), "u2").tolist() == [0b00111001]
    assert gradc.pack(np.array([0.5, 5.1, -100.0, 0.0]), "f4e2m1").tolist() == [0x71, 0x0F]


@pytest.mark.parametrize(
    ("values", "dtype", "match"),
    [
        (np.array([1, 2, 3]), "i4", "axis 0 has 3 values of i4; 2 fill a byte"),
        (np.array([8, 0]), "i4", "i4 holds integers of -8 to 7, and values is int64 up to 8"),
        (np.array([1.5, 0]), "u4", "values is float64"),
        (np.array([1, 0]), "i8", "a byte holds several of"),
        (np.array(1), "i4", "along an axis"),
    ],
)
def test_what_pack_refuses(values: np.ndarray, dtype: str, match: str) -> None:
    with pytest.raises(InvalidProblem, match=match):
        gradc.pack(values, dtype)


def test_packed_data_has_no_gradient() -> None:
    graph = gradc.trace(lambda q, s: ops.dequantize(ops.unpack(q, "i4"), s, block=(1, 8)), q="u8[V,4]", s="f32[V,1]")
    with pytest.raises(NotDifferentiable, match="'unpack'"):
        differentiate(graph, ["q"])
    differentiate(graph, ["s"])


# -- the unpacked table is never stored --------------------------------------------------------------------------------

V, D, N = 97, 64, 11
FOLDED: dict[str, tuple[Any, dict[str, str]]] = {
    "i4": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "i4"), s, block=(1, D))),
        {"q": f"u8[V,{D // 2}]", "s": "f32[V,1]"},
    ),
    "groups": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "u4", low_nibble_first=False), s, block=(1, 16))),
        {"q": f"u8[V,{D // 2}]", "s": "f32[V,4]"},
    ),
    "two_bits": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "u2"), s, block=(1, D))),
        {"q": f"u8[V,{D // 4}]", "s": "bf16[V,1]"},
    ),
    "per_tensor": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "i2"), s)),
        {"q": f"u8[V,{D // 4}]", "s": "f32[]"},
    ),
    "along_the_packed_axis": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "i4", axis=0), s, block=(1, D))),
        {"q": f"u8[V,{D}]", "s": "f32[2*V,1]"},
    ),
    "another_axis": (
        lambda i, q, s: ops.gather(ops.dequantize(ops.unpack(q, "i4", axis=0), s, block=(D, 1)), i, axis=1),
        {"q": f"u8[{D // 2},V]", "s": "f32[1,V]"},
    ),
    "f4e2m1": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(ops.unpack(q, "f4e2m1"), s, block=(1, 16))),
        {"q": f"u8[V,{D // 2}]", "s": "f8e4m3[V,4]"},
    ),
    "nv": (
        lambda i, q, s, t: ops.embedding(
            i, ops.dequantize(ops.unpack(q, "f4e2m1"), ops.cast(s, "f32") * t, block=(1, 16))
        ),
        {"q": f"u8[V,{D // 2}]", "s": "f8e4m3[V,4]", "t": "f32[]"},
    ),
    "nf4": (
        lambda i, q, s: ops.embedding(i, ops.dequantize_nf4(q, s, block=(1, 16))),
        {"q": f"u8[V,{D // 2}]", "s": "f32[V,4]"},
    ),
    "bag": (
        lambda i, q, s: ops.embedding_bag(ops.reshape(i, (1, N)), ops.dequantize_nf4(q, s, block=(1, D)), mode="sum"),
        {"q": f"u8[V,{D // 2}]", "s": "f32[V,1]"},
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_no_buffer_has_the_unpacked_size(name: str) -> None:
    function, types = FOLDED[name]
    graph = gradc.trace(function, i=f"i64[{N}]", **types)
    wrt = [n for n in types if n != "q"]
    module = gradc.compile(graph, wrt=wrt)
    for program in (module.forward.program, module.backward.program):
        assert [
            b.name for b in program.buffers if b.kind != "input" and evaluate(b.type.count, {"V": V}) >= V * D // 2
        ] == []
    arrays = {
        "i": rng(1).integers(0, V, N),
        "q": rng(2).integers(0, 256, graph.input("q").type.concrete({"V": V}), dtype=np.uint8),
    }
    arrays |= {
        n: convert(rng(3).uniform(0.1, 2, graph.input(n).type.concrete({"V": V})), graph.input(n).dtype) for n in wrt
    }
    value, residuals = module.forward(**arrays)
    g = rng(4).standard_normal(value.shape).astype(np.float32)
    gradients = module.backward(residuals, g)
    exact = interp.run(differentiate(graph, wrt), {**arrays, "d.y": g})
    np.testing.assert_allclose(value, exact["y"], rtol=0 if name != "bag" else 1e-6)
    for n in wrt:
        want = exact[f"d.{n}"].astype(np.float64)
        np.testing.assert_allclose(
            np.asarray(gradients[n]).astype(np.float64),
            want,
            rtol=1e-5 if gradients[n].dtype == np.float32 else 1e-2,
            atol=1e-5 * np.abs(want).max(),
        )


@pytest.mark.parametrize("name", [n for n in FOLDED if n != "bag"])
@pytest.mark.parametrize("options", [{}, {"oob": "skip"}, {"oob": "wrap", "padding_idx": 3}], ids=str)
def test_gathering_the_bytes_means_the_same(name: str, options: dict[str, Any]) -> None:
    function, types = FOLDED[name]
    graph = gradc.trace(function, i=f"i64[{N}]", **types)
    graph = graph.rewrite(
        lambda node, operands: (
            node.op.apply(operands, {**node.attrs, **options}) if node.op.name in ("embedding", "gather") else None
        )
    )
    after = push_gathers(graph)
    verify(after)
    equal(graph, after, licence="BITS")
    wrt = [n for n in types if n != "q"]
    equal(differentiate(graph, wrt), differentiate(after, wrt), licence="REAL")
    if (
        name != "along_the_packed_axis" and options.get("oob") != "wrap"
    ):  # half a byte is no row of it; a table without rows has a 0 for wrap
        gathered = {n.operands[0] for n in after.nodes if n.op.name == "gather"}
        assert after.input("q") in gathered


def test_a_byte_is_read_without_division_where_the_place_in_it_is_known() -> None:
    graph = gradc.trace(lambda q: ops.cast(ops.unpack(q, "i4")[:, 1::2], "f32"), q="u8[V,32]")
    body = str(gradc.compile(graph).forward.program)
    assert "load q[i0, i1]" in body and "index" not in body


# -- NF4 ---------------------------------------------------------------------------------------------------------------


def test_the_code_book_is_the_papers() -> None:
    """Quantiles of a normal distribution: 8 of its lower half, 0, 7 of its upper, scaled to [-1, 1]."""
    offset = 0.9677083  # (1 - 1/30 + 1 - 1/32) / 2 in the paper's words
    point = statistics.NormalDist().inv_cdf
    upper = [point(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    lower = [-point(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    want = np.sort([*upper, 0.0, *lower]) / max(upper)
    np.testing.assert_allclose(NF4, want, atol=2e-7)
    assert np.array_equal(interp.run(gradc.trace(lambda: ops.nf4_codebook()))["y"], np.float32(NF4))


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("columns", [6, 14, 16, 18, 32, 46, 1026])
def test_a_code_book_is_looked_up_by_vectors(columns: int, low: bool) -> None:
    """Every code, books with NaN and infinities, rows that end inside of a vector; the same bits as NumPy's."""
    book = np.linspace(-3, 4, 16).astype(np.float32)
    book[[2, 9, 15]] = np.nan, np.inf, -0.0
    graph = gradc.trace(
        lambda codes, book, scale: (
            ops.gather(book, ops.unpack(codes, dtype="u4", axis=1, low_nibble_first=low), axis=0) * scale
        ),
        codes=f"u8[5,{columns // 2}]",
        book="f32[16]",
        scale="f32[5,1]",
    )
    module = gradc.compile(graph, target="cpu")
    assert "gradc_lookup(" in module.forward.source
    codes = np.random.default_rng(0).integers(0, 256, (5, columns // 2)).astype(np.uint8)
    scale = np.array([[1], [-2], [0.5], [0], [3]], np.float32)
    halves = (codes & 15, codes >> 4) if low else (codes >> 4, codes & 15)
    with np.errstate(invalid="ignore"):
        wanted = book[np.stack(halves, -1).reshape(5, columns)] * scale
    np.testing.assert_array_equal(module(codes=codes, book=book, scale=scale).view(np.int32), wanted.view(np.int32))


def test_a_code_that_is_read_twice_stays_a_code() -> None:
    """As a place in the book and as a number."""

    def both_ways(codes: Any, book: Any) -> Any:
        u4 = ops.unpack(codes, dtype="u4", axis=1)
        return ops.gather(book, u4, axis=0) + ops.cast(u4, "f32")

    module = gradc.compile(gradc.trace(both_ways, codes="u8[3,20]", book="f32[16]"), target="cpu")
    assert "gradc_lookup(" not in module.forward.source
    codes, book = np.arange(60, dtype=np.uint8).reshape(3, 20) * 4, np.arange(16, dtype=np.float32) ** 2
    u4 = np.stack([codes & 15, codes >> 4], -1).reshape(3, 40)
    np.testing.assert_array_equal(module(codes=codes, book=book), book[u4] + u4)


def test_dequantize_nf4_is_a_code_book_times_a_scale() -> None:
    q, s = rng().integers(0, 256, (6, 8), dtype=np.uint8), rng(1).uniform(0.5, 2, (6, 4))
    composed = lambda q, s: ops.reshape(
        ops.reshape(ops.gather(ops.nf4_codebook(dtype="f64"), ops.unpack(q, "u4")), (6, 4, 4)) * s[:, :, None], (6, 16)
    )
    got = both(lambda q, s: ops.dequantize_nf4(q, s, block=(1, 4), out_dtype="f64"), q=q, s=s)
    assert np.array_equal(got, both(composed, q=q, s=s))
    codes = np.stack([q & 15, q >> 4], -1).reshape(6, 16)
    assert np.array_equal(got, np.asarray(NF4)[codes] * np.repeat(s, 4, 1))


# -- MX and NV block scales --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS)
def test_mx_values_take_a_straight_gradient_and_powers_of_two_none(name: str) -> None:
    graph = gradc.trace(lambda q, s: ops.dequantize(q, s, block=(1, 32)), q=f"{name}[3,64]", s="e8m0[3,2]")
    joint = differentiate(graph, ["q"])
    q, s = (
        convert(rng().standard_normal((3, 64)) * 3, DTYPES[name]),
        np.exp2(rng(1).integers(-4, 5, (3, 2))).astype(E8M0),
    )
    g = rng(2).standard_normal((3, 64)).astype(np.float32)
    out = gradc.compile(graph, wrt=["q"])
    value, residuals = out.forward(q=q, s=s)
    wide = np.repeat(s.astype(np.float32), 32, 1)
    assert np.array_equal(value, q.astype(np.float32) * wide)
    gradient = out.backward(residuals, g)["q"]
    assert gradient.dtype == np.float32 and np.array_equal(
        gradient, g * wide
    )  # f32: a quantized value's own type would round it away
    assert np.array_equal(gradient, interp.run(joint, {"q": q, "s": s, "d.y": g})["d.q"])
    with pytest.raises(NotDifferentiable):
        differentiate(graph, ["s"])


def test_nv_scales_of_two_levels() -> None:
    """f8e4m3 per 16 values and one f32 per tensor: each has its gradient, that of the f8 one in f32."""
    q, s = (
        convert(rng().standard_normal((4, 32)) * 3, DTYPES["f4e2m1"]),
        convert(rng(1).uniform(0.1, 400, (4, 2)), DTYPES["f8e4m3"]),
    )
    t, g = np.float32(0.003), rng(2).standard_normal((4, 32)).astype(np.float32)
    module = gradc.compile(
        gradc.trace(
            lambda q, s, t: ops.dequantize(q, ops.cast(s, "f32") * t, block=(1, 16)),
            q="f4e2m1[4,32]",
            s="f8e4m3[4,2]",
            t="f32[]",
        ),
        wrt=["q", "s", "t"],
    )
    value, residuals = module.forward(q=q, s=s, t=t)
    gradients = module.backward(residuals, g)
    tq, ts, tt = (torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (q, s, t))
    y = tq * (ts * tt).repeat_interleave(16, 1)
    y.backward(torch.tensor(g, dtype=torch.float64))
    np.testing.assert_allclose(value, y.detach(), rtol=2e-7)
    for name, leaf in (("q", tq), ("s", ts), ("t", tt)):
        assert gradients[name].dtype == np.float32
        np.testing.assert_allclose(gradients[name], leaf.grad, rtol=1e-5, atol=1e-6 * float(leaf.grad.abs().max()))


def test_a_float8_scale_by_itself_is_learnable() -> None:
    q, s = rng().integers(-8, 8, (3, 8)).astype(np.int8), convert(np.array([[0.5], [3.0], [100.0]]), DTYPES["f8e4m3"])
    joint = differentiate(
        gradc.trace(lambda q, s: ops.dequantize(q, s, block=(1, 8)), q="i8[3,8]", s="f8e4m3[3,1]"), ["s"]
    )
    got = interp.run(joint, {"q": q, "s": s, "d.y": np.full((3, 8), 100, np.float32)})["d.s"]
    assert got.dtype == np.float32 and np.array_equal(got, 100.0 * q.sum(1, keepdims=True, dtype=np.float32))


@pytest.mark.parametrize("name", FLOATS)
def test_quantize_saturates_and_its_mask_is_closed(name: str) -> None:
    most = LARGEST[name]
    x = np.array([most, -most, np.nextafter(most, np.inf), -1e30, np.inf, -np.inf, 0.375 * most, -0.0, 1.25])
    s = np.ones(1)
    got = both(lambda x, s: ops.quantize(x, s, dtype=name), x=x, s=s)
    assert got.astype(np.float64)[:6].tolist() == [most, -most, most, -most, most, -most]
    joint = differentiate(
        gradc.trace(lambda x, s: ops.cast(ops.quantize(x, s, dtype=name), "f64"), x="f64[9]", s="f64[1]"), ["x", "s"]
    )
    out = interp.run(joint, {"x": x, "s": s, "d.y": np.ones(9)})
    assert out["d.x"].tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert out["d.s"] == -x[out["d.x"] == 1].sum()  # exact in every order


@pytest.mark.parametrize("scale", ["f64", "e8m0", "f8e4m3"])
@pytest.mark.parametrize("name", FLOATS)
def test_the_law_of_fake_quantize_for_short_floats(name: str, scale: str) -> None:
    x, g = rng().standard_normal((4, 32)) * LARGEST[name] / 3, rng(1).standard_normal((4, 32))
    s = convert(rng(2).uniform(0.3, 1.5, (4, 2)), DTYPES[scale])
    wrt = ["x"] if scale == "e8m0" else ["x", "s"]
    types = {"x": "f64[4,32]", "s": f"{scale}[4,2]"}
    fake = gradc.trace(lambda x, s: ops.fake_quantize(x, s, block=(1, 16), dtype=name), **types)
    pair = gradc.trace(
        lambda x, s: ops.dequantize(ops.quantize(x, s, block=(1, 16), dtype=name), s, block=(1, 16), out_dtype="f64"),
        **types,
    )
    a, b = (interp.run(differentiate(graph, wrt), {"x": x, "s": s, "d.y": g}) for graph in (fake, pair))
    assert a.keys() == b.keys() and np.array_equal(a["y"], b["y"])
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-12, atol=1e-12 * np.abs(b[key]).max())
    wide = np.repeat(s.astype(np.float64), 16, 1)
    q = convert(np.clip(x / wide, -LARGEST[name], LARGEST[name]), DTYPES[name]).astype(np.float64)
    assert np.array_equal(a["y"], q * wide) and np.array_equal(a["d.x"], g * (np.abs(x / wide) <= LARGEST[name]))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_mx_scale_is_the_specifications(name: str, dtype: str) -> None:
    emax = {"f8e4m3": 8, "f8e5m2": 15, "f4e2m1": 2}[name]
    wide = np.float32 if dtype != "f64" else np.float64
    powers = np.exp2(np.arange(-126, 127)).astype(wide)
    x = np.concatenate(
        [
            powers,
            np.nextafter(powers, wide(0)),
            np.nextafter(powers, wide(np.inf)),
            [0.0, 1e-45, 3e38],
            rng().standard_normal(100),
        ]
    )
    x = convert(np.asarray(x, wide), DTYPES[dtype])
    blocks = np.stack([x, -x / 2, np.zeros_like(x)], 1).astype(x.dtype)
    got = both(lambda x: ops.mx_scale(x, block=(1, 3), dtype=name), x=blocks).astype(np.float64)[:, 0]
    most = np.abs(blocks.astype(np.float64)).max(1)
    want = [2.0 ** max((math.frexp(m)[1] - 1 if m else -1000) - emax, -127) for m in most]
    assert got.tolist() == want
    for bad in (np.nan, np.inf, -np.inf):
        assert np.isnan(
            both(lambda x: ops.mx_scale(x, dtype=name), x=convert(np.array([1.0, bad]), DTYPES[dtype])).astype(
                np.float32
            )
        ).all()


@pytest.mark.parametrize("name", FLOATS)
def test_mx_quantization_there_and_back(name: str) -> None:
    """The error of each value is at most half a unit of its format at its block's scale, but for what the scale's floor
    saturates.
    """
    x = (rng().standard_normal((8, 96)) * np.exp2(rng(1).integers(-20, 20, (8, 1)))).astype(np.float32)
    x[3, :32] = 0

    def there_and_back(x: Any) -> Any:
        s = ops.mx_scale(x, block=(1, 32), dtype=name)
        return ops.dequantize(ops.quantize(x, s, block=(1, 32), dtype=name), s, block=(1, 32))

    y = both(there_and_back, x=x)
    most = np.repeat(np.abs(x.reshape(8, 3, 32)).max(-1), 32, 1)
    assert (np.abs(y - x) <= most / {"f8e4m3": 8, "f8e5m2": 4, "f4e2m1": 4}[name]).all() and not y[3, :32].any()
    joint = differentiate(gradc.trace(there_and_back, x="f32[8,96]"), ["x"])
    out = interp.run(joint, {"x": x, "d.y": np.ones_like(x)})["d.x"]
    assert set(np.unique(out)) <= {0.0, 1.0} and out.mean() > 0.9


# -- dynamic scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("block", [(1, 16), (1, 4), (2, 8), None, (4, 5)])
@pytest.mark.parametrize("name", ["i8", "i4", "u4", "f8e4m3"])
def test_dynamic_quantization_is_torchs(name: str, block: Any, differentiable: bool) -> None:
    x, g = rng().standard_normal((4, 16)), rng(1).standard_normal((4, 16))

    def quantized(x: Any) -> Any:
        s = ops.dynamic_scale(x, block=block, dtype=name, differentiable=differentiable)
        return ops.dequantize(ops.quantize(x, s, block=block, dtype=name), s, block=block, out_dtype="f64")

    out = interp.run(differentiate(gradc.trace(quantized, x="f64[4,16]"), ["x"]), {"x": x, "d.y": g})
    leaf = torch.tensor(x, requires_grad=True)
    rows, cols = block or (4, 16)
    padded = torch.nn.functional.pad(leaf, (0, -16 % cols, 0, -4 % rows))
    low, high = (-LARGEST[name], LARGEST[name]) if name in LARGEST else DTYPES[name].range
    most = padded.abs().reshape(-(-4 // rows), rows, -(-16 // cols), cols).amax((1, 3)) / high
    s = (most if differentiable else most.detach()).repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:4, :16]
    ratio = leaf / s
    rounded = (
        torch.tensor(convert(ratio.detach().numpy().clip(low, high), DTYPES[name]).astype(np.float64))
        if name in LARGEST
        else ratio.detach().round()
    )
    inside = (ratio.detach() if name in LARGEST else rounded).clamp(low, high) == (
        ratio.detach() if name in LARGEST else rounded
    )
    q = torch.where(inside, ratio + (rounded - ratio).detach(), rounded.clamp(low, high))
    y = q * s
    y.backward(torch.tensor(g))
    np.testing.assert_allclose(out["y"], y.detach(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(out["d.x"], leaf.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
def test_a_block_of_zeros_has_the_scale_one(dtype: str) -> None:
    x = convert(np.array([[0.0, -0.0, 0.0], [1e-7, 0.0, -2e-6], [3.0, -254.0, 1.0]]), DTYPES[dtype])
    s = both(lambda x: ops.dynamic_scale(x, block=(1, 3)), x=x)
    assert s.dtype == (np.float64 if dtype == "f64" else np.float32) and s[0] == 1 and s[2] == np.float64(2)
    y = both(
        lambda x: (lambda s: ops.dequantize(ops.quantize(x, s, block=(1, 3)), s, block=(1, 3)))(
            ops.dynamic_scale(x, block=(1, 3))
        ),
        x=x,
    )
    assert not np.isnan(y).any() and not y[0].any() and y[2, 1] == -254
    least = np.array([5e-324 if dtype == "f64" else 1e-45, 0.0])
    assert (
        both(lambda x: ops.dynamic_scale(x), x=least.astype(np.float64 if dtype == "f64" else np.float32)) == 1
    )  # the quotient underflows
    assert np.isnan(both(lambda x: ops.dynamic_scale(x), x=convert(np.array([1.0, np.nan]), DTYPES[dtype]))).all()


def test_a_constant_scale_moves_nothing() -> None:
    graph = gradc.trace(lambda x: ops.dynamic_scale(x, block=(1, 4)), x="f32[3,4]")
    zero = interp.run(
        differentiate(graph, ["x"], unused="zeros"),
        {"x": np.ones((3, 4), np.float32), "d.y": np.ones((3, 1), np.float32)},
    )
    assert not zero["d.x"].any()


# -- scales that no one should give ------------------------------------------------------------------------------------

WILD = np.array([1.0, 0.0, -0.0, -2.0, np.nan, np.inf, -np.inf, 1e-45, 3e38])
X = np.array([0.0, -0.0, 1.0, -3.0, 1e30, -1e30, np.inf, -np.inf, np.nan])


def wild(dtype: str) -> Mapping[str, np.ndarray]:
    s = WILD.astype(np.float32 if dtype == "f32" else np.float64)
    return {"x": np.broadcast_to(X.astype(s.dtype), (9, 9)).copy(), "s": s[:, None].copy()}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ["i8", "u4", "i16", *FLOATS])
def test_wild_scales_give_the_documented_result(name: str, dtype: str) -> None:
    arrays = wild(dtype)
    got = both(lambda x, s: ops.quantize(x, s, block=(1, 9), dtype=name), **arrays).astype(np.float64)
    low, high = (-LARGEST[name], LARGEST[name]) if name in LARGEST else DTYPES[name].range
    lost = np.nan if name in ("f8e4m3", "f8e5m2") else 0.0  # what NaN becomes
    with np.errstate(all="ignore"):
        ratio = arrays["x"] / arrays["s"]
    assert np.array_equal(got[np.isnan(ratio)], np.full(np.isnan(ratio).sum(), lost), equal_nan=True)
    assert (got[ratio == np.inf] == high).all() and (got[ratio == -np.inf] == low).all()
    assert (got[ratio == 0] == 0).all()
    assert (
        got[1].tolist()[2:6] == [high, low, high, low] and not got[5][:6].any()
    )  # over 0: the bound on x's side; over infinity: 0
    both(lambda x, s: ops.fake_quantize(x, s, block=(1, 9), dtype=name), **arrays)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ["i8", "u4", *FLOATS])
def test_wild_scales_dequantize_as_a_product(name: str, dtype: str) -> None:
    s = wild(dtype)["s"]
    q = convert(np.broadcast_to(np.array([0.0, 1, 3, 6, -2]), (9, 5)), DTYPES[name])
    got = both(lambda q, s: ops.dequantize(q, s, block=(1, 5), out_dtype=dtype), q=q, s=s)
    with np.errstate(all="ignore"):
        assert np.array_equal(got, q.astype(s.dtype) * s, equal_nan=True)


@pytest.mark.parametrize("op", ["quantize", "fake_quantize", "dequantize"])
def test_gradients_under_wild_scales_are_numpys(op: str) -> None:
    arrays = dict(wild("f32"))
    if op == "dequantize":
        arrays["x"] = np.broadcast_to(np.arange(-4, 5), (9, 9)).astype(np.int8)
    graph = gradc.trace(
        lambda x, s: ops.cast(getattr(ops, op)(x, s, block=(1, 9)), "f32"),
        **{k: gradc.typeof(a) for k, a in arrays.items()},
    )
    module = gradc.compile(graph, wrt=["x", "s"])
    _, residuals = module.forward(**arrays)
    gradients = module.backward(residuals, np.ones((9, 9), np.float32))
    want = interp.run(differentiate(graph, ["x", "s"]), {**arrays, "d.y": np.ones((9, 9), np.float32)})
    for name in ("x", "s"):
        np.testing.assert_allclose(gradients[name], want[f"d.{name}"], rtol=1e-6)


@pytest.mark.parametrize("name", ["e8m0", "f8e4m3", "f8e5m2", "f4e2m1"])
def test_every_code_of_a_short_float_is_a_scale(name: str) -> None:
    s = np.arange(2 ** DTYPES[name].bits, dtype=np.uint8).view(DTYPES[name].np)[:, None]
    q = np.broadcast_to(np.array([0, 1, -3, 127], np.int8), (len(s), 4)).copy()
    both(lambda q, s: ops.dequantize(q, s, block=(1, 4)), q=q, s=s)
    both(lambda x, s: ops.quantize(x, s, block=(1, 4)), x=q.astype(np.float32), s=s)


def test_arithmetic_in_a_short_float_has_its_derivative_in_that_float() -> None:
    joint = differentiate(gradc.trace(lambda x: ops.cast(ops.exp(x), "f32"), x="f8e4m3[3]"), ["x"])
    x = convert(np.array([0.5, 1.0, -2.0]), DTYPES["f8e4m3"])
    out = interp.run(joint, {"x": x, "d.y": np.ones(3, np.float32)})
    assert out["d.x"].dtype == np.float32
    np.testing.assert_allclose(out["d.x"], np.exp(x.astype(np.float64)), rtol=2.0**-4)
