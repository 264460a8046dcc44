"""push_gathers and sink_dequant: each rule fires, means the same, refuses look-alikes; the fact they exist for.

``pytest tests/passes/test_sink_dequant.py --update-golden`` writes the goldens anew.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.ir.dims import evaluate, symbol
from gradc.ir.graph import Graph
from gradc.ir.node import REGISTRY, call
from gradc.ir.op import Movement, Primitive
from gradc.ir.size_text import parse_size
from gradc.ir.types import DTYPES, Type
from gradc.ir.verify import verify
from gradc.passes.graph.decompose import decompose
from gradc.passes.graph.fold import fold
from gradc.passes.graph.push_gathers import push_gathers
from gradc.passes.graph.simplify import simplify
from gradc.passes.graph.sink_dequant import sink_dequant
from gradc.passes.graph.upcast import upcast
from gradc.trace import trace
from gradc.verify.exact import equal

torch = pytest.importorskip("torch")
F = torch.nn.functional

D, V = 16, symbol("V")


def plain(graph: Graph) -> Graph:
    return simplify(decompose(graph))


def sunk(graph: Graph, **options) -> Graph:
    """The graph after sink_dequant, which verifies and means the same."""
    after = sink_dequant(graph, **options)
    verify(after)
    equal(graph, after, licence="REAL")
    assert sink_dequant(after, **options) == after, "a second run changes something"
    return after


def prepared(graph: Graph, wrt=(), **options) -> Graph:
    """The graph after push_gathers: the same bits in the value, the same gradients over the reals."""
    after = push_gathers(graph, **options)
    verify(after)
    equal(graph, after, licence="BITS")
    if wrt:
        equal(differentiate(graph, wrt), differentiate(after, wrt), licence="REAL")
    return after


@pytest.fixture
def pair(golden):
    """``pair(name, before, after)``: both graphs are what the golden file says."""
    return lambda name, before, after: golden(
        f"sink_dequant/{name}.gir",
        "\n\n".join(
            f"{title}\n{dataclasses.replace(g, notes={})}" for title, g in (("before", before), ("after", after))
        ),
    )


def tables(graph: Graph, backward_only: bool = True) -> list:
    """The floats of the table's size that the gradients need and no input is."""
    late = {n for n in graph.inputs if graph.input_name(n).startswith("d.")}
    for node in graph.nodes:
        if any(o in late for o in node.operands):
            late.add(node)
    gradients = graph.with_outputs([(n, v) for n, v in graph.outputs if n.startswith("d.")])
    nodes = gradients.nodes if backward_only else graph.nodes
    return [
        n
        for n in nodes
        if n.op.name != "input"
        and n.dtype.is_float
        and n.rank == 2
        and str(n.type.count) in (f"{D}*V", f"V*{D}", "D*V")
    ]


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes if n.op.name != "input"]


# -- the tables that are gathered --------------------------------------------------------------------------------------

QUANTIZED = {"tokens": "i64[N]", "q": f"i8[V,{D}]"}
PREPARED = {
    "per_channel": (
        lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale.reshape(-1, 1), block=(1, D))),
        {**QUANTIZED, "scale": "f32[V]"},
        ["scale"],
    ),
    "per_channel_zero_point": (
        lambda tokens, q, scale, zp: ops.embedding(tokens, ops.dequantize(q, scale, zp, block=(1, D)), padding_idx=1),
        {**QUANTIZED, "scale": "f32[V,1]", "zp": "f32[V,1]"},
        ["scale", "zp"],
    ),
    "per_tensor": (
        lambda tokens, q, scale, zp: ops.embedding(tokens, ops.dequantize(q, scale, zp), padding_idx=1),
        {**QUANTIZED, "scale": "f32[]", "zp": "f32[]"},
        ["scale", "zp"],
    ),
    "per_group": (
        lambda tokens, q, scale: ops.embedding(
            tokens, ops.dequantize(q, scale, block=(1, 4)), scale_grad_by_freq=True, padding_idx=1
        ),
        {**QUANTIZED, "scale": "f32[V,4]"},
        ["scale"],
    ),
    "ragged_group": (
        lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale, block=(1, 5))),
        {**QUANTIZED, "scale": "f32[V,4]"},
        ["scale"],
    ),
    "by_hand": (
        lambda tokens, q, scale: (q.astype("f32") * scale[:, None])[tokens],
        {**QUANTIZED, "scale": "f32[V]"},
        ["scale"],
    ),
    "keepdims": (
        lambda tokens, q, scale: ops.embedding(tokens, ops.sum(scale, axis=1, keepdims=True) * q.astype("f32")),
        {**QUANTIZED, "scale": "f32[V,1]"},
        ["scale"],
    ),
    "transposed": (
        lambda tokens, q, scale: ops.embedding(tokens, (q.astype("f32") / scale).T, oob="skip"),
        {"tokens": "i64[N]", "q": f"i8[{D},V]", "scale": "f32[V]"},
        ["scale"],
    ),
    "two_dimensional_indices": (
        lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale, block=(1, D)), padding_idx=0),
        {"tokens": "i64[B,3]", "q": f"i8[V,{D}]", "scale": "f32[V,1]"},
        ["scale"],
    ),
    "second_axis": (
        lambda tokens, q, scale: ops.gather(ops.dequantize(q, scale, block=(D, 1)), tokens, axis=1),
        {"tokens": "i64[2,N]", "q": f"i8[{D},V]", "scale": "f32[1,V]"},
        ["scale"],
    ),
    "composite": (
        lambda tokens, table: ops.embedding(tokens, ops.softplus(ops.gelu(table) * 2)),
        {"tokens": "i64[N]", "table": f"f32[V,{D}]"},
        ["table"],
    ),
    "two_gathers": (
        lambda tokens, others, q, scale: (lambda w: (w[tokens], w[others]))(ops.dequantize(q, scale, block=(1, D))),
        {**QUANTIZED, "others": "i32[M]", "scale": "f32[V,1]"},
        ["scale"],
    ),
    "bf16": (
        lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale, block=(1, D), out_dtype="bf16")),
        {**QUANTIZED, "scale": "f32[V,1]"},
        ["scale"],
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_gather_of_a_computed_table_gathers_its_operands(name, pair):
    fn, types, wrt = PREPARED[name]
    before = trace(fn, **types, name=name)
    after = prepared(before, wrt)
    pair(f"prepare_{name}", before, after)
    assert not tables(simplify(decompose(after)), backward_only=False)
    joint = simplify(decompose(upcast(differentiate(after, wrt))))
    allowed = 2 if "table" in wrt else 0  # the zeros that the table's own gradient starts from are none of ours
    assert len(tables(sunk(joint))) <= allowed


@pytest.mark.parametrize("oob", ["error", "skip", "clamp", "wrap"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("kind", ["zero", "not_zero", "not_gathered"])
def test_the_new_gathers_keep_the_rules_for_positions(oob, padding_idx, by_frequency, kind):
    """f(0) = 0, f(0) != 0, and an operand that is not gathered: value and gradient are those of the old graph."""

    def fn(tokens, table, s):
        value = {
            "zero": ops.sin(table) * s[:, None],
            "not_zero": ops.cos(table) + s[:, None],
            "not_gathered": table * s[0] * 2,
        }[kind]
        return ops.embedding(tokens, value, padding_idx=padding_idx, scale_grad_by_freq=by_frequency, oob=oob)

    before = trace(fn, tokens="i64[N]", table="f64[7,3]", s="f64[7]")
    after = prepared(before)
    if not (kind == "not_gathered" and by_frequency):
        assert after != before
        table = names(after)
        assert ("where" in table) == (
            (oob == "skip" and kind != "zero") or (kind == "not_gathered" and padding_idx is not None)
        )
    random = np.random.default_rng(3)
    tokens = random.integers(0, 7, 20) if oob == "error" else random.integers(-3, 11, 20)
    inputs = {"tokens": tokens, "table": random.normal(size=(7, 3)), "s": random.normal(size=7)}
    dy = random.normal(size=(20, 3))
    for wrt in (["table"], ["s"], ["table", "s"]):
        old, new = (interp.run(differentiate(g, wrt), {**inputs, "d.y": dy}, precision="f64") for g in (before, after))
        for key in old:
            np.testing.assert_allclose(new[key], old[key], rtol=1e-12, atol=1e-12)


def look_alikes():
    q, s = f"i8[V,{D}]", "f32[V,1]"
    yield (
        "used elsewhere",
        trace(lambda t, q, s: (lambda w: (w[t], ops.sum(w)))(q.astype("f32") * s), t="i64[N]", q=q, s=s),
    )
    yield "an output too", trace(lambda t, q, s: (lambda w: (w[t], w))(q.astype("f32") * s), t="i64[N]", q=q, s=s)
    yield "not pointwise", trace(lambda t, x: ops.softmax(x, axis=0)[t], t="i64[N]", x=f"f32[V,{D}]")
    yield "only moved", trace(lambda t, x: x.T[t], t="i64[N]", x=f"f32[{D},V]")
    yield "its own index", trace(lambda x: (lambda w: ops.gather(w, w, oob="clamp"))(x + 1), x="i64[V]")
    yield "more rows than the table", trace(lambda t, x: ops.exp(x)[t], t="i64[5]", x="f32[4,8]")
    yield "reversed rows", trace(lambda t, x: ops.flip(ops.exp(x), axis=0)[t], t="i64[N]", x="f32[V,8]")


@pytest.mark.parametrize(("why", "graph"), [pytest.param(w, g, id=w) for w, g in look_alikes()])
def test_look_alikes_are_not_prepared(why, graph):
    assert push_gathers(graph) == graph


def test_narrow_rows_pay_however_many_are_gathered():
    graph = trace(
        lambda t, q, s: ops.embedding(t, ops.dequantize(q, s, block=(1, 8))), t="i64[500]", q="i8[4,8]", s="f32[4,1]"
    )
    assert prepared(graph, ["s"]) != graph


def test_what_one_refusal_leaves_is_not_half_done():
    """The inner table feeds a gather that is taken and one that is refused: its rows are there anyway."""

    def fn(t, x):
        w = ops.exp(x)
        return w[t], ops.sum(ops.sin(w) * 2)

    graph = trace(fn, t="i64[N]", x="f32[V,8]")
    assert push_gathers(graph) == graph


def test_strict_turns_both_passes_off():
    graph = trace(PREPARED["by_hand"][0], **PREPARED["by_hand"][1])
    assert push_gathers(graph, numerics="strict") is graph
    joint = plain(differentiate(graph, ["scale"]))
    assert sink_dequant(joint, numerics="strict") is joint


# -- rules b, c, d -----------------------------------------------------------------------------------------------------

RULES = {
    # b
    "b_scale_gradient": lambda i, q, u: ops.sum(ops.scatter_add(i, u, size=V) * q.astype("f32"), axis=1),
    "b_two_gradients": lambda i, q, s, u: (
        lambda dw: (ops.sum(dw * q.astype("f32"), axis=1), -(s * ops.sum(dw, axis=1)))
    )(ops.scatter_add(i, u, size=V, padding_idx=0)),
    "b_per_tensor": lambda i, q, u: ops.sum(q.astype("f32") * ops.scatter_add(i, u, size=V)),
    "b_transposed": lambda i, q, u: ops.sum(
        q.astype("f32").T * ops.scatter_add(i, u, size=V, oob="skip").T, axis=0, keepdims=True
    ),
    "b_masked": lambda i, q, u: ops.sum(
        ops.where(ops.gt(q.astype("f32"), 0.0), ops.scatter_add(i, u, size=V), 0.0) * q.astype("f32"), axis=1
    ),
    "b_group": lambda i, q, u: ops.sum((ops.scatter_add(i, u, size=V) * q.astype("f32")).reshape(V, 4, 4), axis=2),
    # c
    "c_into_the_load": lambda i, s, u: s[:, None] * ops.scatter_add(i, u, size=V),
    "c_column": lambda i, c, u: ops.scatter_add(i, u, size=V) * c,
    # d
    "d_sum": lambda x, s: ops.sum(x * s[:, None], axis=1),
    "d_sum_left_divided": lambda x, s: ops.sum(s.reshape(-1, 1) * x / ops.exp(s)[:, None], axis=1),
    "d_negative": lambda x: ops.sum(-x, axis=1),
    "d_through_products": lambda x, s, dy: ops.sum((x * s[:, None]) * dy, axis=1),
    "d_two_readers": lambda x, s, dy: (lambda w: (ops.sum(w, axis=1), ops.sum(w * dy, axis=1)))(x * s[:, None]),
    "d_slice_and_cast": lambda x, s: (x * s[:, None])[:, :4].astype("bf16").astype("f32"),
    "d_gather": lambda x, c, few: (x * c)[few],
    "d_merge_scales": lambda x, s: (x * s[:, None]) * ops.exp(s)[:, None],
}
TYPES = {
    "i": "i64[N]",
    "q": f"i8[V,{D}]",
    "u": f"f32[N,{D}]",
    "s": "f32[V]",
    "c": f"f32[{D}]",
    "x": f"f32[V,{D}]",
    "dy": f"f32[V,{D}]",
    "few": "i64[5]",
}


def ruled(name: str) -> Graph:
    fn = RULES[name]
    types = {p: TYPES[p] for p in fn.__code__.co_varnames[: fn.__code__.co_argcount]}
    if name == "d_gather":
        types["x"] = f"f32[100,{D}]"
    return plain(trace(fn, **types, name=name))


@pytest.mark.parametrize("name", RULES)
def test_each_rule(name, pair):
    before = ruled(name)
    after = sunk(before)
    pair(name, before, after)
    assert after != before
    if name.startswith("b_"):
        assert not [n for n in tables(after, backward_only=False) if n.op.name in ("scatter_add", "mul", "where")]


MATMUL = {
    "result": ("f32[8,64]", "f32[64,32]", lambda a, b, s: a @ (b * s[None, :]), "f32[32]"),
    "operand": ("f32[64,8]", "f32[8,64]", lambda a, b, s: (a @ b) * s[:, None], "f32[64]"),
    "across": ("f32[64,32]", "f32[32,2]", lambda a, b, s: ops.exp((a * s) @ b), "f32[32]"),
    "batched": ("f32[3,4,64]", "f32[3,64,5]", lambda a, b, s: (a / s[:, None, None]) @ b, "f32[3]"),
    "linear": ("f32[8,64]", "f32[32,64]", lambda a, b, s: ops.linear(a, s[:, None] * b), "f32[32]"),
}


@pytest.mark.parametrize("name", MATMUL)
def test_a_scale_goes_to_the_cheapest_side_of_a_product(name, pair):
    a, b, fn, s = MATMUL[name]
    before = plain(trace(fn, a=a, b=b, s=s, name=name))
    after = sunk(before)
    pair(f"d_matmul_{name}", before, after)

    def multiplied(graph):
        return sum(n.type.count for n in graph.nodes if n.op.name in ("mul", "div"))

    assert multiplied(after) < multiplied(before)


def test_a_scale_that_varies_along_what_is_summed_stays():
    for fn in (
        lambda x, c: ops.sum(x * c, axis=1),
        lambda x, c: ops.sum(x * ops.exp(x), axis=1),
        lambda x, s: ops.sum(x * s[:, None], axis=0),
        lambda x, s: ops.amax(x * s[:, None], axis=1),  # a negative scale would make it the least
        lambda x, s, dy: ops.sum(x * s[:, None] + dy, axis=1),
        lambda x, s: ops.sum(ops.exp(x * s[:, None]), axis=1),
        lambda x, s: ops.sum(ops.where(ops.gt(x, 0.0), x * s[:, None], 1.0), axis=1),
        lambda x, s: (lambda w: ops.sum(w * w, axis=1))(x * s[:, None]),
        lambda x, s: ops.sum((x * s[:, None]).astype("f16"), axis=1),  # f16 might overflow
        lambda x, s: (lambda w: (w, ops.sum(w, axis=1)))(x * s[:, None]),
        lambda a, c: (a * c) @ a,
    ):
        types = {p: {**TYPES, "a": f"f32[{D},{D}]"}[p] for p in fn.__code__.co_varnames[: fn.__code__.co_argcount]}
        graph = plain(trace(fn, **types))
        assert sunk(graph) == graph, graph


def test_scatters_that_only_look_alike_stay():
    for fn in (
        lambda i, u, x: ops.sum(ops.scatter_add(i, u, size=V) + x, axis=1),  # affine in the scatter
        lambda i, u: (lambda w: ops.sum(w * w, axis=1))(ops.scatter_add(i, u, size=V)),  # quadratic
        lambda i, u, x: (lambda w: (w, ops.sum(w * x, axis=1)))(ops.scatter_add(i, u, size=V)),  # wanted itself
        lambda i, u, x: ops.sum(ops.relu(ops.scatter_add(i, u, size=V)) * x, axis=1),
        lambda i, u, x: ops.sum((ops.scatter_add(i, u, size=V) * x).reshape(-1), axis=0),  # the axes were merged
    ):
        graph = plain(trace(fn, **{p: TYPES[p] for p in fn.__code__.co_varnames[: fn.__code__.co_argcount]}))
        assert sunk(graph) == graph


@pytest.mark.parametrize("axis", [0, (0, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"oob": "skip"}, {"oob": "wrap", "padding_idx": 1}], ids=str
)
def test_a_sum_over_the_scattered_axis_needs_no_scatter(axis, options):
    graph = plain(
        trace(
            lambda i, u, x: ops.sum(x * ops.scatter_add(i, u, size=V, **options), axis=axis),
            i="i64[N]",
            u=f"f32[N,{D}]",
            x=f"f32[V,{D}]",
        )
    )
    after = sunk(graph)
    assert "scatter_add" not in [n.op.name for n in after.nodes], after
    rng = np.random.default_rng(0)
    given = {"i": rng.integers(0, 7, 20), "u": rng.standard_normal((20, D)), "x": rng.standard_normal((7, D))}
    if options.get("oob"):
        given["i"] = rng.integers(-5, 12, 20)
    hidden = (given["i"] % 7 if options.get("oob") == "wrap" else given["i"]) == options.get("padding_idx", -99)
    hidden |= (options.get("oob") == "skip") & ((given["i"] < 0) | (given["i"] >= 7))
    given["u"][hidden] = np.inf  # what is not added is not multiplied either
    given = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in given.items()}
    want, got = (interp.run(g, given, precision="f64")["y"] for g in (graph, after))
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_scatter_and_scale_by_cost(pair):
    """Few rows into a large table read the scale in the load; many rows into a small one scale its rows."""
    types = {"i": "i64[10000]", "s": "f32[10]", "u": "f32[10000,4]"}
    many = plain(trace(lambda i, s, u: ops.scatter_add(i, u * s[i][:, None], size=10), **types, name="many_rows"))
    after = sunk(many)
    pair("c_out_of_the_load", many, after)
    assert "gather" not in names(after)
    inward = plain(trace(lambda i, s, u: ops.scatter_add(i, u, size=10) * s[:, None], **types))
    assert sunk(inward) == inward
    few = plain(
        trace(
            lambda i, s, u: ops.scatter_add(i, u * s[i][:, None], size=10000),
            i="i64[10]",
            s="f32[10000]",
            u="f32[10,4]",
        )
    )
    assert sunk(few) == few
    other = plain(
        trace(lambda i, j, s, u: ops.scatter_add(i, u * s[j][:, None], size=10), **types, j="i64[10000]")
    )  # another index
    assert sunk(other) == other


def test_scales_of_several_axes_follow_their_rows_into_a_scatter():
    for fn, types in (
        (
            lambda i, s, u: ops.scatter_add(i, u, size=V) * s[:, None],
            {"i": "i64[3,2]", "s": "f32[V]", "u": "f32[3,2,4]"},
        ),
        (
            lambda i, s, u: ops.scatter_add(i, u, size=V, axis=1) / s[:, :, None],
            {"i": "i64[3,2]", "s": "f32[5,V]", "u": "f32[5,3,2,4]"},
        ),
        (
            lambda i, s, u: ops.scatter_add(i, u, size=V, axis=1).T * s[:, None],
            {"i": "i64[]", "s": "f32[V]", "u": "f32[4]"},
        ),
        (
            lambda i, s, u: ops.scatter_add(i, u, size=V, axis=1, oob="wrap") * s.T[:, :, None],
            {"i": "i64[6]", "s": "f32[V,5]", "u": "f32[5,6,4]"},
        ),
    ):
        graph = plain(trace(fn, **types))
        after = sunk(graph)
        assert after != graph
        assert "gather" in names(after)


def test_symbolic_columns_and_narrow_integers():
    graph = trace(
        lambda t, q, s: ops.embedding(t, ops.dequantize(q, s, block=(1, symbol("K"))), oob="skip"),
        t="u8[N]",
        q="i4[V,K]",
        s="f32[V,1]",
    )
    after = prepared(graph, ["s"])
    assert names(after).count("gather") == 2
    assert "where" not in names(after)  # (0 - 0) * 0 = 0 needs no mask


def test_an_op_declared_linear_needs_no_pass_to_know_it(pair):
    def infer(x: Type) -> Type:
        return x.with_shape(*x.shape[:-1], x.shape[-1] // 2)

    pairs = Primitive(
        "pair_sums",
        infer=infer,
        lower=Movement(lambda *_: None),
        reference=lambda x: x[..., ::2] + x[..., 1::2],
        multilinear=lambda node: {0: (*range(node.rank - 1), None)},
        vjp=lambda g, y, x: (g,),
    )
    try:
        fn = lambda x, s: ops.pair_sums(ops.pair_sums(x * s[:, None]))
        before = trace(fn, x="f64[N,16]", s="f64[N]", name="custom")
        after = sink_dequant(before)
        pair("d_custom_op", before, after)
        random = np.random.default_rng(0)
        inputs = {"x": random.normal(size=(5, 16)), "s": random.normal(size=5)}
        np.testing.assert_allclose(interp.run(after, inputs)["y"], interp.run(before, inputs)["y"], rtol=1e-12)
        stays = trace(lambda x, c: ops.pair_sums(x * c), x="f64[N,16]", c="f64[16]")
        assert sink_dequant(stays) == stays
    finally:
        del REGISTRY["pair_sums"]
    assert pairs.name == "pair_sums"


# -- random graphs -----------------------------------------------------------------------------------------------------


def random_graph(seed: int) -> Graph:
    """A dozen ops, many of them scales, sums, gathers and scatters, over a few shapes."""
    random = np.random.default_rng(seed)

    def fn(x, w, s, c, i, t, q):
        pool = [x, w, q.astype("f32") * s[:, None], s, c]

        def pick(rank):
            return pool[random.choice([k for k, n in enumerate(pool) if n.rank == rank])]

        def scaled(n):
            axis = int(random.integers(n.rank))
            v = [m for m in pool if m.rank == 1 and m.shape[0] == n.shape[axis]]
            if not v:
                return n * 0.5
            r = v[random.integers(len(v))].reshape(*(n.shape[a] if a == axis else 1 for a in range(n.rank)))
            return (n * r, r * n, n / r)[random.integers(3)]

        for _ in range(int(random.integers(4, 14))):
            n = pick(2)
            choice = random.integers(11)
            if choice <= 2:
                pool.append(scaled(n))
            elif choice == 3:
                pool.append(n.T)
            elif choice == 4:
                pool.append(ops.sum(n, axis=int(random.integers(2))))
            elif choice == 5:
                pool.append(-n)
            elif choice == 6 and n.shape[0] == V:
                pool.append(
                    ops.gather(
                        n, i, padding_idx=(None, 1)[random.integers(2)], oob=("error", "skip")[random.integers(2)]
                    )
                )
            elif choice == 7 and str(n.shape[0]) == "N":
                pool.append(ops.scatter_add(i, n, size=V, padding_idx=(None, 1)[random.integers(2)]))
            elif choice == 8:
                m = [p for p in pool if p.rank == 2 and p.shape[0] == n.shape[1]]
                pool.append(n @ m[random.integers(len(m))] if m else -n)
            elif choice == 9:
                same = [p for p in pool if p.shape == n.shape]
                pool.append(n * same[random.integers(len(same))])
            else:
                pool.append(ops.where(ops.gt(n, 0.0), n, 0.0).reshape(1, *n.shape).sum(axis=0))
        v = pick(1)
        return pool[-1], scaled(pick(2)), v * 2

    return trace(fn, x="f32[N,6]", w="f32[V,6]", s="f32[V]", c="f32[6]", i="i64[N]", t="f32[6,6]", q="i8[V,6]")


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_mean_the_same(seed):
    graph = random_graph(seed)
    sunk_once = sink_dequant(plain(graph))
    verify(sunk_once)
    equal(plain(graph), sunk_once, licence="REAL")
    ready = push_gathers(graph)
    equal(graph, ready, licence="BITS")
    wrt = ["x", "w", "s", "c"]
    joint, from_ready = (differentiate(g, wrt, unused="zeros") for g in (graph, ready))
    equal(joint, from_ready, licence="REAL")
    after = sink_dequant(fold(plain(from_ready)))
    verify(after)
    equal(joint, after, licence="REAL")
    assert sink_dequant(fold(plain(from_ready))) == after


def test_the_work_grows_with_the_graph():
    """Counted in calls of Python functions, which no machine changes: twice the nodes take about twice the calls."""

    def joint(depth):
        def deep(x, s):
            for _ in range(depth):
                x = ops.gelu(x * s[:, None]) + x * 0.5
            return ops.sum(-x, axis=1)

        return plain(differentiate(trace(deep, x="f32[N,16]", s="f32[N]"), ["s"]))

    def calls(graph):
        count = 0

        def seen(frame, event, argument):
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            sink_dequant(graph)
        finally:
            sys.setprofile(before)
        return count

    small, large = joint(45), joint(90)
    assert len(large.nodes) > 1000
    assert calls(large) <= 2.3 * calls(small)


# -- the fact ----------------------------------------------------------------------------------------------------------


def optimised(graph: Graph, wrt) -> Graph:
    joint = fold(simplify(upcast(decompose(differentiate(push_gathers(graph), wrt)))))
    return fold(simplify(sunk(joint)))


def embedding_case(granularity: str):
    zero_point = "zp" if "zero_point" in granularity else None
    groups = {"channel": 1, "group": 4, "tensor": 0}[granularity.split("_")[0]]
    block = {0: None, 1: (1, D), 4: (1, D // 4)}[groups]
    shape = f"V,{groups}" if groups else ""

    def fn(tokens, q, scale, zp=None):
        return ops.embedding(tokens, ops.dequantize(q, scale, zp, block=block, out_dtype="f64"), padding_idx=3)

    types = {"tokens": "i64[N]", "q": f"i8[V,{D}]", "scale": f"f64[{shape}]"} | (
        {"zp": f"f64[{shape}]"} if zero_point else {}
    )
    return trace(fn, **types), ["scale"] + ([zero_point] if zero_point else []), groups


@pytest.mark.parametrize(
    "granularity", ["channel", "channel_zero_point", "group", "group_zero_point", "tensor", "tensor_zero_point"]
)
def test_no_float_of_the_tables_size_in_the_backward_of_a_quantized_embedding(granularity):
    graph, wrt, groups = embedding_case(granularity)
    joint = optimised(graph, wrt)
    assert not tables(joint, backward_only=False)
    random = np.random.default_rng(5)
    rows, n = 11, 40
    shape = (rows, groups) if groups else ()
    inputs = {
        "tokens": random.integers(0, rows, n),
        "q": random.integers(-128, 128, (rows, D)).astype(np.int8),
        "scale": random.uniform(0.5, 2, shape),
    }
    if "zp" in wrt:
        inputs["zp"] = random.normal(size=shape)
    dy = random.normal(size=(n, D))
    got = interp.run(joint, {**inputs, "d.y": dy})
    learned = {name: torch.tensor(inputs[name], requires_grad=True) for name in wrt}
    wide = {k: v.repeat_interleave(D // groups, 1) if groups else v for k, v in learned.items()}
    weight = (torch.tensor(inputs["q"]).double() - wide.get("zp", 0.0)) * wide["scale"]
    y = F.embedding(torch.tensor(inputs["tokens"]), weight, padding_idx=3)
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-12)
    for name, tensor in learned.items():
        np.testing.assert_allclose(got[f"d.{name}"], tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_a_table_that_learns_itself_has_one_gradient_of_its_size():
    """fake_quantize -> embedding: d.table is a scatter of rows, and nothing else has the table's size."""
    fn = lambda tokens, table, scale: ops.embedding(
        tokens, ops.fake_quantize(table, scale, block=(1, D)), padding_idx=3
    )
    joint = optimised(trace(fn, tokens="i64[N]", table=f"f64[V,{D}]", scale="f64[V,1]"), ["table", "scale"])
    assert tables(joint, backward_only=False) == [joint.output("d.table")]
    random = np.random.default_rng(5)
    rows, n = 11, 40
    inputs = {
        "tokens": random.integers(0, rows, n),
        "table": random.normal(size=(rows, D)) * 3,
        "scale": random.uniform(0.01, 0.05, (rows, 1)),
    }
    dy = random.normal(size=(n, D))
    got = interp.run(joint, {**inputs, "d.y": dy})
    table, scale = (torch.tensor(inputs[k], requires_grad=True) for k in ("table", "scale"))
    ratio = table / scale
    inside = (ratio.round() >= -128) & (ratio.round() <= 127)
    whole = ratio + (ratio.round() - ratio).detach()
    y = F.embedding(
        torch.tensor(inputs["tokens"]),
        torch.where(inside, whole, ratio.round().clamp(-128, 127)) * scale,
        padding_idx=3,
    )
    y.backward(torch.tensor(dy))
    for name, tensor in (("table", table), ("scale", scale)):
        np.testing.assert_allclose(got[f"d.{name}"], tensor.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_a_float_table_in_wrt_beside_its_scale():
    fn = lambda tokens, table, scale: ops.embedding(tokens, table * scale[:, None])
    graph = trace(fn, tokens="i64[N]", table=f"f64[V,{D}]", scale="f64[V]")
    joint = optimised(graph, ["table", "scale"])
    assert len([n for n in tables(joint, backward_only=False)]) == 1


def test_without_prepare_the_scale_gradient_is_still_free_of_tables():
    """Rule (b) alone: the joint graph of a table that was not prepared, or written by hand."""
    graph, wrt, _ = embedding_case("channel_zero_point")
    after = sunk(plain(differentiate(graph, wrt)))
    late = [n for n in tables(after) if any(o.op.name == "scatter_add" for o in (n, *n.operands))]
    assert not late


def test_dequantize_then_linear(pair):
    """Few rows: the scale is put on the result, which is smaller than the weight; right beside torch."""
    fn = lambda x, q, scale: ops.linear(x, ops.dequantize(q, scale, block=(1, 64), out_dtype="f64"))
    graph = trace(fn, x="f64[4,64]", q="i8[32,64]", scale="f64[32,1]", name="linear")
    before = fold(simplify(upcast(decompose(differentiate(push_gathers(graph), ["x", "scale"])))))
    after = sunk(before)
    pair("dequantize_linear", before, after)
    assert not any(
        n.op.name == "mul" and n.shape == (32, 64) and n.operands[1].op.name == "broadcast_to" for n in after.nodes
    )
    random = np.random.default_rng(1)
    x, q, s, dy = (
        random.normal(size=(4, 64)),
        random.integers(-128, 128, (32, 64)).astype(np.int8),
        random.uniform(0.5, 2, (32, 1)),
        random.normal(size=(4, 32)),
    )
    got = interp.run(after, {"x": x, "q": q, "scale": s, "d.y": dy})
    tx, ts = torch.tensor(x, requires_grad=True), torch.tensor(s, requires_grad=True)
    F.linear(tx, torch.tensor(q).double() * ts).backward(torch.tensor(dy))
    np.testing.assert_allclose(got["d.x"], tx.grad.numpy(), rtol=1e-10)
    np.testing.assert_allclose(got["d.scale"], ts.grad.numpy(), rtol=1e-10)


def test_every_record_of_a_replaced_axis_tells_the_truth():
    """Taking positions along an axis of the result = the op with that axis replaced, on operands taken alike."""
    checked = set()
    random = np.random.default_rng(0)
    for op in list(REGISTRY.values()):
        if op.replace_axis is None:
            continue
        for sample in op.samples:
            dims = {"N": 8, **sample.dims}
            graph = trace_sample(op, sample, dims)
            if graph is None:
                continue
            node = graph.output("y")
            for axis in range(node.rank):
                if node.shape[axis] == 1:
                    continue
                index = [0, node.shape[axis] - 1, 0, 1]
                for shape in ((4,), (2, 2), (1,)):
                    positions = np.asarray(index[: int(np.prod(shape))]).reshape(shape)
                    how = op.replace_axis(node, axis, shape)
                    if how is None:
                        continue
                    checked.add(op.name)
                    where = call(
                        "constant", value=tuple(int(p) for p in positions.reshape(-1)), dtype="i64", shape=shape
                    )
                    operands = [
                        call("gather", o, where, axis=a) if isinstance(a, int) else o.reshape(*a)
                        for o, a in zip(node.operands, how[0], strict=True)
                    ]
                    both = graph.with_outputs(
                        [("old", call("gather", node, where, axis=axis)), ("new", op.apply(operands, how[1]))]
                    )
                    inputs = {
                        both.input_name(n): random.integers(0, 2, n.shape).astype(n.dtype.np) + (n.dtype.is_float and 1)
                        for n in both.inputs
                    }
                    values = interp.run(both, {k: v.astype(both.input(k).dtype.np) for k, v in inputs.items()})
                    old, new = (
                        np.asarray(values[k]).astype(np.float64) for k in ("old", "new")
                    )  # NumPy knows no NaN of the short floats
                    np.testing.assert_array_equal(old, new, err_msg=f"{op.name} {node.attrs} axis {axis}")
    assert checked == {op.name for op in REGISTRY.values() if op.replace_axis is not None}


def trace_sample(op, sample, dims):
    from gradc.ir.graph import input_node
    from gradc.ir.types import parse_type

    if not all(isinstance(o, str) for o in sample.operands):
        return None
    concrete = [parse_type(o.replace("F[", "f32[")) for o in sample.operands]
    inputs = [input_node(f"x{k}", Type(t.dtype, t.concrete(dims))) for k, t in enumerate(concrete)]

    def bound(value):
        """An attribute with numbers for sizes: ``N-2`` is 6."""
        if isinstance(value, tuple):
            return tuple(map(bound, value))
        if isinstance(value, str) and "N" in value:
            return evaluate(parse_size(value), dims)
        return value

    result = op(*inputs, **{k: bound(v) for k, v in sample.attrs.items()})
    return Graph("sample", tuple(inputs), (("y", result),)) if result.op is op else None


@pytest.mark.parametrize("masked", ["skipped", "padded", "outside the image", "in no sum"])
@pytest.mark.parametrize("scale", [np.inf, np.nan, 2.0])
def test_a_scale_stays_before_a_mask_where_it_could_be_infinite(masked: str, scale: float) -> None:
    """Behind the mask it would multiply the mask's 0."""
    functions = {
        "skipped": lambda x, s, i: ops.sum(ops.gather(x * s, i, oob="skip"), axis=1),
        "padded": lambda x, s, i: ops.sum(ops.pad(x * s, ((1, 0), (0, 0))), axis=1),
        "outside the image": lambda x, s, i: ops.sum(
            ops.gather_2d(ops.reshape(x * s, (1, 1, 3, 64)), ops.reshape(i, (1, -1)), ops.reshape(i, (1, -1))),
            axis=(0, 1),
        ),
        "in no sum": lambda x, s, i: ops.mode_product(x * s, matrix=((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)), axis=0),
    }
    graph = trace(functions[masked], x="f32[3,64]", s="f32[1]", i="i64[N]")
    x, s, i = np.ones((3, 64), np.float32), np.full(1, scale, np.float32), np.array([0, 7, 2])
    want = interp.run(graph, x=x, s=s, i=i)["y"]
    assert (want == 0).any()
    for simple in (sink_dequant(simplify(decompose(graph))), gradc.compile(graph, target="cpu").forward.program):
        np.testing.assert_array_equal(interp.run(simple, x=x, s=s, i=i)["y"], want)


@pytest.mark.parametrize("columns", ["T", "5", "S"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_scale_that_is_a_sum_over_nothing_does_not_divide_what_nothing_adds_up_to(dtype, columns):
    """exp(s) / sum(exp(s)) @ v: the division sinks behind the product, where of no columns both are 0."""

    def function(s, v):
        each = ops.exp(s)
        return ops.cast(each / ops.sum(each, -1, keepdims=True), dtype=v.dtype) @ v

    graph = gradc.trace(function, s=f"f32[S,{columns}]", v=f"{dtype}[{columns},8]")
    module = gradc.compile(graph, target="cpu")
    sizes = [s for kernel in module.forward.program.kernels for s in kernel.body if s.op == "size"]
    assert bool(sizes) == (columns == "T")  # where the result has no elements either, or there are columns, none asks
    for rows, count in ((3, 0), (3, 5), (5, 5), (0, 0)):
        if columns == "T" or count == (5 if columns == "5" else rows):
            rng = np.random.default_rng(count)
            s, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, count), (count, 8)))
            v = v.astype(DTYPES[dtype].np)
            y = module(s=s, v=v).astype(np.float64)
            wide = np.exp(s.astype(np.float64))
            exact = (wide / wide.sum(-1, keepdims=True)) @ v.astype(np.float64)
            limit = 1e-2 if dtype == "bf16" else 1e-6
            np.testing.assert_allclose(y, exact, rtol=limit, atol=limit)
