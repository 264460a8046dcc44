"""The scheduler's trail and order: what is undone leaves nothing behind, and the work grows with the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
from agreement import NAMES, groups, joint, merged
from hypothesis import given
from hypothesis import strategies as st
from registry import cases as every

import gradc
from benchmarks.compile_time import transformer
from gradc import ops
from gradc.compiler import cut, lower
from gradc.ir.graph import Graph
from gradc.ir.kernel import Call
from gradc.module.options import Options
from gradc.passes.graph.check_indices import check_indices
from gradc.passes.manager import Pipeline
from gradc.passes.schedule import schedule as stage
from gradc.passes.schedule.order import GroupOrder
from gradc.passes.schedule.scheduler import Scheduler
from gradc.targets.devices import CPU


def halves(graph: Graph, wrt: list[str]) -> list[Graph]:
    parts = next(cut(graph, lower(graph, wrt, Options(), "cpu", Pipeline()), wrt, Options(), "cpu"))
    return [parts.forward, parts.backward]


def scheduled(graph: Graph, forced: set[Any] | None = None) -> tuple[str, Scheduler]:
    """(the program's text, the scheduler that made it).  :param forced: what it knows to need memory."""
    made: list[Scheduler] = []

    def scheduler(checked: Graph, fuse: bool, found: set[Any], device: Any) -> Scheduler:
        made.append(Scheduler(checked, fuse, found if forced is None else forced, device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "Scheduler", scheduler)
        program = stage.schedule(graph)
    (own,) = made
    return str(program), own


@pytest.mark.parametrize("name", sorted({*NAMES[::6], "matmul", "linear", "embedding_bag"}))
def test_a_node_that_is_visited_again_leaves_nothing_behind(name: str) -> None:
    """The program is the one of a scheduler that knew from the beginning which nodes need memory."""
    for cases in groups(every(["f32"], names=[name])).values():
        graph, _ = halves(merged(name, [(f"s{k}", joint(c)) for k, c in enumerate(cases)]), [])
        program, scheduler = scheduled(graph)
        assert program == scheduled(graph, set(scheduler.forced))[0]


def test_a_transformer_is_scheduled_as_if_its_memory_were_known() -> None:
    for graph in halves(*transformer(2)):
        program, scheduler = scheduled(graph)
        fresh, known = scheduled(graph, set(scheduler.forced))
        assert program == fresh
        assert len(known.trail) <= len(scheduler.trail)
        scheduler.rewind(0)
        untouched = Scheduler(check_indices(graph), True, set(), CPU)
        for kept in ("group_of", "checks", "groups", "in_memory", "loads", "constants", "names", "library"):
            assert getattr(scheduler, kept) == getattr(untouched, kept), kept
        assert not any(scheduler.readers.values()) and not scheduler.order.before


def test_what_products_read_at_the_end_is_placed_at_its_first_visit() -> None:
    """Values that a computation reads where it is, and transposed a product after all of them: no node is visited again
    though nothing else asks for their memory.
    """

    def late(x: list[Any], w: list[Any]) -> Any:
        values = [ops.relu(each) for each in x]
        sums = sum(ops.exp(each * 3.0) for each in values)
        return {"sums": sums, **{f"y{k}": ops.transpose(v, (1, 0)) @ w[k] for k, v in enumerate(values)}}

    graph = gradc.trace(late, x=["f32[40,30]"] * 5, w=["f32[40,20]"] * 5)
    program, scheduler = scheduled(graph)
    assert len({node for node in scheduler.forced if node.op.name == "relu"}) == 5
    assert program == scheduled(graph, set(scheduler.forced))[0]
    visits: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        visit = Scheduler.visit
        patch.setattr(Scheduler, "visit", lambda self, node: visits.append(node) or visit(self, node))
        scheduled(graph)
    assert len(visits) == len(set(visits)) == len(check_indices(graph).nodes)


def test_work_grows_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits and trials of three times the layers: three times as many (and no timing)."""
    counts: dict[str, int] = {}

    def counted(name: str) -> None:
        original: Callable[..., Any] = getattr(Scheduler, name)

        def method(self: Scheduler, *args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(self, *args)

        monkeypatch.setattr(Scheduler, name, method)

    for name in ("visit", "attempt", "revisit"):
        counted(name)
    seen = []
    for layers in (2, 6):
        graphs = halves(*transformer(layers))
        counts.clear()  # partition asks what the forward writes
        for graph in graphs:
            scheduled(graph)
        assert counts["visit"] <= 1.5 * sum(len(graph.nodes) for graph in graphs)
        seen.append(dict(counts))
    few, many = seen
    for name, count in many.items():
        assert count <= 3.1 * few[name], name


edges = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40)


def drawn(pairs: list[tuple[int, int]]) -> tuple[GroupOrder, nx.DiGraph]:
    order, graph = GroupOrder(), nx.DiGraph()
    for key in range(12):
        order.add(key)
        graph.add_node(key)
    for a, b in pairs:
        if a != b and not order.has_path(b, a):
            order.connect(a, b)
            graph.add_edge(a, b)
    return order, graph


def agree(order: GroupOrder, graph: nx.DiGraph) -> None:
    assert set(order.edges) == set(graph.edges)
    for a in graph:
        for b in graph:
            assert order.has_path(a, b) == (a != b and nx.has_path(graph, a, b))


@given(edges, edges)
def test_paths_and_undone_edges(pairs: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    order, graph = drawn(pairs)
    agree(order, graph)
    undo = [order.connect(a, b) for a, b in more if a != b and not order.has_path(b, a)]
    for step in reversed(undo):
        step()
    agree(order, graph)


@given(edges, st.integers(0, 11), st.integers(0, 11))
def test_contraction(pairs: list[tuple[int, int]], a: int, b: int) -> None:
    order, graph = drawn(pairs)
    if a == b:
        return
    one = nx.contracted_nodes(graph, a, b, self_loops=False)
    assert order.between(a, b) == (not nx.is_directed_acyclic_graph(one))
    if not order.between(a, b):
        undo = order.contract(a, b, 12)
        agree(order, nx.relabel_nodes(one, {a: 12}))
        undo()
    agree(order, graph)


@given(edges)
def test_the_order_in_which_groups_run(pairs: list[tuple[int, int]]) -> None:
    def rank(key: int) -> tuple[bool, int]:
        return key % 3 > 0, -key

    order, graph = drawn(pairs)
    assert list(order.sorted(rank)) == list(nx.lexicographical_topological_sort(graph, key=rank))


def test_few_elements_between_others_are_walked_along_where_they_are_computed() -> None:
    """Channels of grid_sample's backward are added where their terms are; rows of a bag, which are only read, by the
    threads of their columns.
    """
    sampled = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[2,3,8,8]", g="f32[2,5,6,2]")
    for wrt in (["g"], ["x", "g"]):
        backward = gradc.compile(sampled, wrt=wrt, target="cuda", arch="sm_90").backward.program
        assert not [b.name for b in backward.buffers if b.kind == "temp" and b.type.concrete({})[1:] == (3, 5, 6)]
        assert ("sum_cols" in str(backward)) == (wrt == ["g"])  # one by one beside the image's gradient
    bags = gradc.trace(lambda i, t: ops.embedding_bag(i, t, mode="sum"), i="i64[B,5]", t="f32[V,8]")
    assert "sum_cols" not in str(gradc.compile(bags, target="cuda", arch="sm_90").forward.program)


def test_what_is_filled_up_is_copied_for_those_alone_who_read_several_elements_of_a_window():
    """Who reads one has no mask to save: the windows themselves, further zeros, and rows that may be outside."""

    def copies(read: Callable[..., Any]) -> int:
        graph = gradc.trace(lambda x, i: read(ops.pad(x, ((0, 0), (0, 0), (1, 1))), i), x="f32[N,4,16]", i="i64[M]")
        return sum(b.kind == "temp" for b in gradc.compile(graph, target="cpu").forward.program.buffers)

    def windows(x: Any) -> Any:
        return ops.windows(x, axis=(2,), size=(3,), count=(16,), step=(1,), dilation=(1,), padding=(0,), value=0)

    assert copies(lambda x, i: ops.mode_product(windows(x), matrix=((1.0, 1.0, 0.0), (0.0, 1.0, -1.0)))) == 1
    assert copies(lambda x, i: windows(x)) == 0
    assert copies(lambda x, i: windows(x) * 2.0) == 0
    assert copies(lambda x, i: ops.pad(x, ((1, 1), (0, 0), (0, 0)))) == 0
    assert copies(lambda x, i: ops.gather(x, i, axis=1, oob="skip")) == 0


def test_a_product_of_which_nothing_is_read_is_not_computed():
    """Between the windows of a strided convolution lie elements that none has: their gradient is 0."""
    graph = gradc.trace(lambda x, w: ops.conv1d(x, w, stride=2, padding=3, dilation=2), x="f32[4,5,1]", w="f32[2,5,3]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    x, w = np.ones((4, 5, 1), np.float32), np.ones((2, 5, 3), np.float32)
    y, residuals = module.forward(x=x, w=w)
    np.testing.assert_array_equal(module.backward(residuals, np.ones_like(y))["x"], np.zeros_like(x))
    assert not [step for step in module.backward.program.steps if isinstance(step, Call)]


KEPT = {
    "elementwise": (lambda x: ops.tanh(x), 1, {"y"}),
    "by rows": (lambda x: ops.softmax(x, -1), 1, {"y"}),
    "two of a kernel": (lambda x: (ops.tanh(x), ops.sigmoid(x)), 1, {"y0", "y1"}),
    "of rows alone": (lambda x: ops.logsumexp(x, -1), 1, {"y"}),
    "a view": (lambda x: ops.reshape(ops.tanh(x), (-1,)), 1, {"y"}),
    "a product": (lambda x: ops.sigmoid(x @ x.T) @ x, 3, set()),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_output_that_backward_reads_is_stored_twice_by_the_kernel_that_computes_it(name: str) -> None:
    """The caller may change what is given, so that what is kept is memory of its own."""
    function, steps, stored = KEPT[name]
    module = gradc.compile(gradc.trace(function, x="f32[6,6]"), wrt="x", target="cpu", save="all", residuals="own")
    program = module.forward.program
    assert len(program.steps) == steps
    roots = {s.args[0] for kernel in program.kernels for s in kernel.body if s.op == "store" and s.buffer not in stored}
    own = [s for kernel in program.kernels for s in kernel.body if s.op == "store" and s.buffer in stored]
    assert {s.buffer for s in own} == stored and all(s.args[0] in roots for s in own)
    x = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    given, residuals = module.forward(x=x)
    outputs = [*given.values()] if isinstance(given, dict) else [given]
    slopes = [np.ones_like(y) for y in outputs]
    expected = module.backward(residuals, *slopes)["x"]
    for y in outputs:
        y[...] = np.nan
    np.testing.assert_array_equal(module.backward(residuals, *slopes)["x"], expected)
