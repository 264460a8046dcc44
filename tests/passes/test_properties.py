"""Passes ask records for properties: an op of a user's is rewritten as the package's op that it says it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
from registry import cases

import gradc
from gradc import ops
from gradc.errors import InternalError
from gradc.ir.dims import Dim, symbol
from gradc.ir.graph import Graph
from gradc.ir.node import REGISTRY, Node
from gradc.ir.op import DISCRETE, Movement, Primitive, Scatter
from gradc.ir.properties import Concats, Gathers, GathersElements, Pads, Reshapes, Scatters, Transposes, access
from gradc.ir.statement import Index
from gradc.ir.types import Type, typeof
from gradc.ops.shapes.canonical import canonical
from gradc.passes.graph.decompose import decompose
from gradc.passes.graph.propagate_reshapes import propagate_reshapes
from gradc.passes.graph.push_gathers import push_gathers
from gradc.passes.graph.push_slices import push_slices
from gradc.passes.graph.scalarize_axes import scalarize_axes
from gradc.passes.graph.simplify import simplify
from gradc.passes.graph.sink_dequant import sink_dequant
from gradc.passes.graph.sparse_rows import sparse_rows
from gradc.passes.row_blocking.merge_rows import merge_rows
from gradc.trace import trace
from gradc.verify.exact import equal, require_declared

DECLARED = [op for op in REGISTRY.values() if op.access is not None]


def test_the_packages_ops_declare_themselves() -> None:
    seen = set()
    for case in cases(("f32",)):
        for node in case.graph.nodes:
            if node.op in DECLARED:
                assert canonical(node) is node
                seen.add(node.op)
    assert seen == set(DECLARED)


# -- each pass, on copies of the ops under other names -----------------------------------------------------------------


@pytest.fixture(scope="module")
def copies() -> Iterator[dict[Any, Any]]:
    made = {}
    for op in DECLARED:
        fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op) if f.name not in ("name", "sugar")}
        made[op] = Primitive(f"my_{op.name}", **fields)
    yield made
    for copy in made.values():
        del REGISTRY[copy.name]


def renamed(graph: Graph, names: dict[Any, Any]) -> Graph:
    return graph.rewrite(
        lambda node, operands: names[node.op].apply(operands, node.attrs) if node.op in names else None
    )


def _scatter(i: Node, u: Node) -> Node:
    return ops.scatter_add(i, u, size=symbol("V"), axis=0)


PASSES: dict[str, tuple[Callable[..., Graph], Callable[..., Node], dict[str, str]]] = {
    "push_gathers": (
        push_gathers,
        lambda q, s, i: ops.gather(ops.dequantize(q, s, block=(1, 8)), i),
        {"q": "i8[V,8]", "s": "f32[V,1]", "i": "i64[N]"},
    ),
    "sum_of_a_scatter": (sink_dequant, lambda i, u: ops.sum(_scatter(i, u), axis=1), {"i": "i64[N]", "u": "f32[N,8]"}),
    "scale_into_a_scatter": (
        sink_dequant,
        lambda i, u, s: _scatter(i, u) * s[:, None],
        {"i": "i64[4]", "u": "f32[4,8]", "s": "f32[V]"},
    ),
    "scale_out_of_a_scatter": (
        sink_dequant,
        lambda i, u, s: ops.scatter_add(i, u * ops.gather(s, i)[:, None], size=4, axis=0),
        {"i": "i64[1000]", "u": "f32[1000,8]", "s": "f32[4]"},
    ),
    "sparse_rows": (
        lambda graph: sparse_rows(graph, names=["y"]),
        lambda i, u, j, v: _scatter(i, u) + _scatter(j, v),
        {"i": "i64[N]", "u": "f32[N,8]", "j": "i64[M]", "v": "f32[M,8]"},
    ),
    "propagate_reshapes": (
        propagate_reshapes,
        lambda x, i: ops.gather(ops.reshape(x * x, (x.shape[0], 32)), i),
        {"x": "f32[V,4,8]", "i": "i64[N]"},
    ),
    "push_slices": (push_slices, lambda x, w: (x @ w)[:, :3], {"x": "f32[N,8]", "w": "f32[8,16]"}),
    "push_slices_of_rows": (
        push_slices,
        lambda x, w, b: (ops.reshape(x @ w, (2, 4, 16)) + b)[:, :3],
        {"x": "f32[8,8]", "w": "f32[8,16]", "b": "f32[16]"},
    ),
    "merge_rows": (
        merge_rows,
        lambda x, w, t: ops.cross_entropy(ops.reshape(x @ w, (2, 4, 64)).transpose(0, 2, 1), t),
        {"x": "f32[8,8]", "w": "f32[8,64]", "t": "i64[2,4]"},
    ),
    "scalarize_axes": (
        scalarize_axes,
        lambda x, y: ops.exp(ops.concat(x, y, axis=1))[:, 1:2] + ops.pad(x * x, ((0, 0), (1, 1)))[:, 1:2],
        {"x": "f32[N,1]", "y": "f32[N,1]"},
    ),
    "simplify": (
        simplify,
        lambda x: ops.sum(ops.broadcast_to(ops.reshape(ops.exp(x), (4, 1, 2)), (4, 8, 2)), axis=1),
        {"x": "f32[8]"},
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_rewrites_an_op_that_declares_what_it_is(name: str, copies: dict[Any, Any]) -> None:
    run, function, types = PASSES[name]
    graph = trace(function, **types)
    graph = graph if name in ("push_gathers", "push_slices_of_rows") else decompose(graph)
    expected, mine = run(graph), renamed(graph, copies)
    assert expected != graph
    assert mine != graph
    require_declared(mine)
    originals = {copy: op for op, copy in copies.items()}
    assert renamed(run(mine), originals) == expected


# -- a gather and a scatter of a user's --------------------------------------------------------------------------------


def _pick_type(positions: Type, table: Type, *, oob: Literal["error"] = "error") -> Type:
    return table.with_shape(positions.shape[0], *table.shape[1:])


def _add_type(updates: Type, positions: Type, *, rows: Dim | int, oob: Literal["error"] = "error") -> Type:
    return updates.with_shape(rows, *updates.shape[1:])


def _add_in_numpy(updates: Any, positions: Any, *, rows: int, oob: str) -> Any:
    total = np.zeros((rows, *updates.shape[1:]), updates.dtype)
    np.add.at(total, positions, updates)
    return total


def _pick_in_a_kernel(index: Any, node: Node, kernel: Any) -> Any:
    positions, table = node.operands
    row = Index.of(kernel.read(positions, index[:1]))
    return kernel.read(table, [row, *index[1:]])


@contextlib.contextmanager
def rows_of_ones_own(gathers: Any, scatters: Any) -> Iterator[tuple[Primitive, Primitive]]:
    """A gather of rows whose table is its second operand, and its adjoint."""

    def back(g: Node, y: Node, positions: Node, table: Node, *, oob: str) -> tuple[Any, Node]:
        return DISCRETE, add(g, positions, rows=table.shape[0])

    def into(index: Any, node: Node, kernel: Any) -> Any:
        return [Index.of(kernel.read(node.operands[1], index[:1])), *index[1:]], None

    pick = Primitive(
        "pick_rows",
        infer=_pick_type,
        reference=lambda positions, table, *, oob: table[positions],
        lower=Movement(_pick_in_a_kernel),
        vjp=back,
        in_place_of_dtype=True,
        indices={0: lambda node: node.operands[1].shape[0]},
        access=gathers,
    )
    add = Primitive(
        "add_rows",
        infer=_add_type,
        reference=_add_in_numpy,
        lower=Scatter(into, updates=0),
        vjp=lambda g, y, updates, positions, **_: (pick(positions, g), DISCRETE),
        indices={1: lambda node: node.shape[0]},
        access=scatters,
    )
    try:
        yield pick, add
    finally:
        del REGISTRY["pick_rows"], REGISTRY["add_rows"]


def _loss(pick: Any) -> Callable[..., Node]:
    return lambda i, q, s, w: ops.sum(pick(i, ops.dequantize(q, s, block=(1, 8))) * w, axis=1)


TYPES = {"i": "i64[N]", "q": "i8[V,8]", "s": "f32[V,1]", "w": "f32[8]"}
TRUE = lambda node: Gathers(1, 0, axis=0), lambda node: Scatters(1, 0, axis=0)


def _inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "i": np.array([4, 0, 4, 2, 1, 4]),
        "q": rng.integers(-9, 9, (5, 8)).astype("i1"),
        "s": rng.uniform(0.5, 2, (5, 1)).astype("f4"),
        "w": rng.standard_normal(8).astype("f4"),
    }


@pytest.mark.parametrize("declares", [True, False])
def test_a_gather_of_ones_own(declares: bool) -> None:
    """Declared, no float of the table's size is left, as of the package's gather; undeclared, it is left alone.  The
    value and the gradients are NumPy's, and those of differences, both ways.
    """
    with rows_of_ones_own(*(TRUE if declares else (None, None))) as (pick, _):
        graph = trace(_loss(pick), **TYPES)
        after = push_gathers(graph)
        theirs = push_gathers(trace(_loss(lambda i, table: ops.gather(table, i, oob="error")), **TYPES))
        assert (after == theirs) is declares
        assert (after == graph) is not declares
        equal(graph, after)
        with gradc.knobs.VALIDATE.set(True):
            module = gradc.compile(graph, wrt=["s", "w"], target="cpu")
        inputs = _inputs()
        i, q, s, w = (v.astype("f8") if v.dtype.kind == "f" else v for v in inputs.values())
        y, residuals = module.forward(**inputs)
        np.testing.assert_allclose(y, (q * s)[i] @ w, rtol=1e-5)
        dy = np.arange(1, 7, dtype="f4")
        grads = module.backward(residuals, dy)
        rows = np.zeros((5, 1))
        np.add.at(rows, i, dy[:, None] * (q[i] @ w)[:, None])
        np.testing.assert_allclose(grads["s"], rows, rtol=1e-5)
        np.testing.assert_allclose(grads["w"], dy @ (q * s)[i], rtol=1e-5)
        assert gradc.check(module, dims={"N": 6, "V": 5}).ok


@pytest.mark.parametrize("declares", [True, False])
def test_a_scatter_of_ones_own_has_a_sparse_form_if_it_declares_one(declares: bool) -> None:
    with rows_of_ones_own(*(TRUE if declares else (None, None))) as (pick, _):
        graph = trace(lambda i, t: ops.sum(pick(i, t) ** 2), i="i64[N]", t="f32[V,8]", name=f"declared_{declares}")
        if not declares:
            with pytest.raises(gradc.errors.Unsupported, match="'add_rows' has a part in it"):
                gradc.compile(graph, wrt=["t"], target="cpu", sparse=["t"])
            return
        module = gradc.compile(graph, wrt=["t"], target="cpu", sparse=["t"])
        table = np.random.default_rng(1).standard_normal((5, 8)).astype("f4")
        _, residuals = module.forward(i=np.array([3, 1, 3]), t=table)
        rows = module.backward(residuals, np.float32(1))["t"]
        expected = np.zeros((5, 8))
        np.add.at(expected, [3, 1, 3], 2 * table[[3, 1, 3]])
        np.testing.assert_allclose(rows.dense(), expected, rtol=1e-5)


def _square(pick: Any) -> Graph:
    return trace(lambda i, q, s: pick(i, q.astype("f32") * s), i="i64[4]", q="i8[4,4]", s="f32[4,1]")


@pytest.mark.parametrize(
    ("gathers", "says"),
    [
        (lambda node: Gathers(1, 0, axis=1), r"op pick_rows declares: .* the output pick_rows differs at \["),
        (lambda node: Gathers(1, 0, axis=2), r"op pick_rows declares a data movement that cannot be: Gathers.*axis=2"),
        (lambda node: Scatters(0, 1, axis=0), r"op pick_rows declares: .* the output pick_rows differs at \["),
        (lambda node: Reshapes(), r"op pick_rows declares a data movement that cannot be: reshape"),
    ],
    ids=["another axis", "no axis", "a scatter", "a reshape"],
)
def test_a_false_declaration_is_found(gathers: Any, says: str) -> None:
    with rows_of_ones_own(gathers, None) as (pick, _):
        with gradc.knobs.VALIDATE.set(True), pytest.raises(InternalError, match=says):
            gradc.compile(_square(pick), target="cpu")


def test_what_a_pass_makes_of_a_false_declaration_is_found() -> None:
    """Also where nothing has looked at the declaration itself."""
    with rows_of_ones_own(lambda node: Gathers(1, 0, axis=1), None) as (pick, _):
        graph = _square(pick)
        after = push_gathers(graph)
        assert after != graph
        with pytest.raises(InternalError, match="no longer means the same"):
            equal(graph, after)


@pytest.mark.parametrize(
    "declared",
    [Gathers(1, 0, axis=-1), GathersElements(1, 0, axis=-1), Transposes((0, -1)), Concats(-1), Scatters(0, 1, axis=2)],
    ids=str,
)
def test_axes_count_from_0(declared: Any) -> None:
    says = "op pick_rows declares a data movement that cannot be: .* of 2 axes"
    with rows_of_ones_own(lambda node: declared, None) as (pick, _):
        graph = _square(pick)
        (node,) = (n for n in graph.nodes if n.op is pick)
        with pytest.raises(InternalError, match=says):
            access(node, type(declared))
        with pytest.raises(InternalError, match=says):
            canonical(node)
        if isinstance(declared, Gathers):
            with pytest.raises(InternalError, match=says):
                gradc.compile(graph, target="cpu")


@contextlib.contextmanager
def five_rows_of_ones_own(oob: Any, says: Any = None) -> Iterator[Primitive]:
    """A sum into five rows, without attributes, that declares to do ``says`` with positions outside, or nothing."""
    theirs = REGISTRY["scatter_add"]
    own = Primitive(
        "add_rows",
        infer=lambda i, u: u.with_shape(5, *u.shape[i.rank :]),
        reference=lambda i, u: _added_outside(i, u, oob),
        lower=Scatter(
            lambda index, node, kernel: theirs.lower.at(  # type: ignore[attr-defined]
                index, ops.scatter_add.plain(*node.operands, axis=0, size=5, oob=oob), kernel
            ),
            updates=1,
        ),
        vjp=lambda g, y, i, u: (DISCRETE, ops.gather(g, i, oob=oob)),
        multilinear=lambda node: {1: (*(None for _ in node.operands[0].shape), 1)},
        indices={0: lambda node: 5},
        access=None if says is None else lambda node: Scatters(0, 1, axis=0, oob=says),
    )
    try:
        yield own
    finally:
        del REGISTRY["add_rows"]


def check_sum_of_rows(own: Primitive, i: Any, oob: str) -> None:
    """The sum of the rows, weighted, against NumPy."""
    rng = np.random.default_rng(0)
    u, a = rng.standard_normal((*i.shape, 4)).astype("f4"), rng.standard_normal((5, 4)).astype("f4")
    types = {"i": typeof(i), "u": typeof(u), "a": typeof(a)}
    graph = trace(lambda i, u, a: ops.sum(own(i, u) * a), **types)
    wanted = (_added_outside(i, u.astype("f8"), oob) * a).sum()
    for target in ("cpu", "numpy"):
        with gradc.knobs.VALIDATE.set(True):
            module = gradc.compile(graph, target=target)
        np.testing.assert_allclose(module(i=i, u=u, a=a), wanted, rtol=1e-5)


@pytest.mark.parametrize("oob", ["clamp", "skip", "wrap"])
def test_what_a_declared_scatter_does_with_positions_outside(oob: Any) -> None:
    """Its property says so, whatever attributes it has: the gather in its place reads the same rows."""
    with five_rows_of_ones_own(oob, oob) as own:
        check_sum_of_rows(own, np.array([7, -2, 1, 4, 0, 9]), oob)


def test_positions_of_an_undeclared_scatter_may_have_any_axes() -> None:
    """Two axes of positions before one of columns are not taken for a batch axis and points, whatever their sizes."""
    with five_rows_of_ones_own("skip") as own:
        check_sum_of_rows(own, np.random.default_rng(1).integers(-2, 7, (3, 4)), "skip")


@pytest.mark.parametrize(
    ("oob", "says", "found"),
    [
        *(
            (a, b, "outside.* differs at")
            for a in ("clamp", "skip", "wrap")
            for b in ("clamp", "skip", "wrap")
            if a != b
        ),
        ("skip", "error", "declares has oob='error', but the positions are not checked"),
    ],
)
def test_a_false_word_about_positions_outside_is_found(oob: Any, says: Any, found: str) -> None:
    with five_rows_of_ones_own(oob, says) as own:
        graph = trace(lambda i, u: own(i, u), i="i64[6]", u="f32[6,8]")
        with gradc.knobs.VALIDATE.set(True), pytest.raises(InternalError, match=found):
            gradc.compile(graph, target="numpy")


def _added_outside(i: Any, u: Any, oob: str) -> Any:
    total = np.zeros((5, *u.shape[i.ndim :]), u.dtype)
    inside = (i >= 0) & (i < 5) if oob == "skip" else np.ones(i.shape, bool)
    np.add.at(total, (np.clip(i, 0, 4) if oob == "clamp" else i % 5)[inside], u[inside])
    return total


def test_a_pad_of_ones_own_may_call_its_value_as_it_likes() -> None:
    theirs = REGISTRY["pad"]

    def plain(node: Node) -> Node:
        return ops.pad.plain(*node.operands, pad_width=((0, 0), (0, 1)), value=node.attrs["fill"])

    def own_type(x: Type, *, fill: float = 5.0) -> Type:
        return x.with_shape(x.shape[0], x.shape[1] + 1)

    own = Primitive(
        "pad_columns",
        infer=own_type,
        reference=lambda x, *, fill: np.concatenate([x, np.full((len(x), 1), fill, x.dtype)], 1),
        lower=Movement(lambda index, node, kernel: theirs.lower.at(index, plain(node), kernel)),  # type: ignore[attr-defined]
        vjp=lambda g, y, x, *, fill: (g[:, :-1],),
        in_place_of_dtype=True,
        fills=True,
        multilinear=lambda node: {0: (0, None)},
        replace_axis=lambda node, axis, sizes: ((axis,), node.attrs) if axis == 0 else None,
        access=lambda node: Pads(((0, 0), (0, 1)), node.attrs["fill"]),
    )
    try:
        types = {"q": "i8[3,8]", "s": "f32[3,1]", "i": "i64[4]"}
        graph = trace(lambda q, s, i: ops.gather(own(q.astype("f32") * s), i, oob="skip"), **types)
        q, s = np.arange(24, dtype="i1").reshape(3, 8), np.full((3, 1), 2.5, "f4")
        i = np.array([2, 0, 3, -1])
        rows = np.concatenate([q * 2.5, np.full((3, 1), 5.0)], 1)
        wanted = np.where(((i >= 0) & (i < 3))[:, None], rows[np.clip(i, 0, 2)], 0)
        for target in ("cpu", "numpy"):
            with gradc.knobs.VALIDATE.set(True):
                module = gradc.compile(graph, target=target)
            np.testing.assert_allclose(module(q=q, s=s, i=i), wanted, rtol=1e-6)
    finally:
        del REGISTRY["pad_columns"]
