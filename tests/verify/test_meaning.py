"""GRADC_VALIDATE on programs: every pass that is broken on purpose is named, and none that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import gradc
from gradc import compiler, ops
from gradc.errors import InternalError
from gradc.ir.graph import Graph
from gradc.ir.kernel import Kernel, Program, Select
from gradc.ir.node import call
from gradc.ir.statement import Stmt
from gradc.ops.rules import full
from gradc.passes.manager import PASSES
from gradc.verify.meaning import LARGER, meanings

PROGRAM_PASSES = {
    "cpu": (
        "schedule",
        "relayout_temps",
        "fuse_copies",
        "interchange",
        "unroll_columns",
        "choose_reduction",
        "read_in_place",
        "block_rows",
        "order_steps",
        "plan_buffers",
    ),
    "cuda": (
        "schedule",
        "store_places",
        "narrow_products",
        "relayout_temps",
        "fuse_copies",
        "interchange",
        "columns_to_rows",
        "rows_to_columns",
        "unroll_scatters",
        "inline_constants",
        "choose_reduction",
        "order_steps",
        "plan_buffers",
    ),
}


def graph() -> Graph:
    return gradc.trace(
        lambda tokens, table, w: ops.softmax(ops.embedding(tokens, table) @ w, -1),
        tokens="i64[N]",
        table="f32[V,8]",
        w="f32[8,6]",
    )


def _swapped(s: Stmt) -> Stmt:
    """An addition as a multiplication, a product as a sum, a sum of columns as their maximum."""
    swapped = {"add": "mul", "sub": "add", "mul": "add", "div": "mul", "exp": "neg", "sum_cols": "max_cols"}
    return replace(s, op=swapped.get(s.op, s.op))


def _broken_kernel(kernel: Kernel) -> Kernel:
    return replace(kernel, body=tuple(map(_swapped, kernel.body)))


def broken(program: Program) -> Program:
    """A program that computes something else, and still verifies."""
    steps = tuple(
        _broken_kernel(step)
        if isinstance(step, Kernel)
        else replace(
            step, cases=tuple((when, _broken_kernel(k) if isinstance(k, Kernel) else k) for when, k in step.cases)
        )
        if isinstance(step, Select)
        else step
        for step in program.steps
    )
    assert steps != program.steps
    return replace(program, steps=steps)


@pytest.mark.parametrize("target,name", [(t, name) for t, names in PROGRAM_PASSES.items() for name in names])
def test_the_pass_that_breaks_a_program_is_named(target: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true: Callable[..., Program] = getattr(compiler, name)

    def wrong(subject: Any, **options: Any) -> Program:
        return broken(true(subject, **options))

    wrong.__name__, wrong.licence = name, true.licence  # type: ignore[attr-defined]
    monkeypatch.setattr(compiler, name, wrong)
    with (
        gradc.knobs.VALIDATE.set(True),
        pytest.raises(InternalError, match=rf"^forward\.{name}: .* no longer means the same: the output y differs at"),
    ):
        gradc.compile(graph(), wrt=["table", "w"], target=target)


@pytest.mark.parametrize("part", ["rows", "values", "count"])
def test_wrong_rows_of_a_gradient_are_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = compiler.sparse_rows
    traced = gradc.trace(lambda t, w: ops.embedding(t, w) * 2.0, t="i64[N]", w="f32[V,8]")

    def wrong(joint: Graph, **options: Any) -> Graph:
        made = true(joint, **options)
        parts = [
            (name, call("sub", node, full(1, node)) if name == f"d.w.{part}" else node) for name, node in made.outputs
        ]
        return made.with_outputs(parts)

    with gradc.knobs.VALIDATE.set(True):
        gradc.compile(traced, wrt=["w"], sparse=["w"])
        monkeypatch.setattr(compiler, "sparse_rows", wrong)
        with pytest.raises(InternalError, match=r"^sparse_rows: .*the output d\.w differs at"):
            gradc.compile(traced, wrt=["w"], sparse=["w"])


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_wrong_partition_is_named(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = compiler.partition

    def wrong(joint: Graph, *args: Any, **options: Any) -> Any:
        parts = true(joint, *args, **options)
        own = getattr(parts, half)
        name, node = own.outputs[0]
        return replace(parts, **{half: own.with_outputs([(name, node * 3.0), *own.outputs[1:]])})

    monkeypatch.setattr(compiler, "partition", wrong)
    with gradc.knobs.VALIDATE.set(True), pytest.raises(InternalError, match=r"^partition: .* no longer means the same"):
        gradc.compile(graph(), wrt=["table", "w"], target="cpu")


def test_the_graph_pass_that_breaks_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    true = compiler.fold

    def wrong(subject: Graph, **options: Any) -> Graph:
        made = true(subject, **options)
        (name, node), *rest = made.outputs
        return made.with_outputs([(name, node + node), *rest])

    wrong.__name__, wrong.licence = "fold", true.licence  # type: ignore[attr-defined]
    monkeypatch.setattr(compiler, "fold", wrong)
    with gradc.knobs.VALIDATE.set(True), pytest.raises(InternalError, match=r"^fold: .* no longer means the same"):
        gradc.compile(graph(), target="cpu")


@pytest.mark.parametrize("target", PROGRAM_PASSES)
@pytest.mark.parametrize("numerics", ["real", "strict"])
def test_right_passes_are_not_named(target: str, numerics: str) -> None:
    """With loops over blocks of rows, windows that are unrolled, integers, an int8 table whose scale learns, and what
    is computed again or ahead.
    """

    def several(x: Any, w: Any, tokens: Any, table: Any, scale: Any, labels: Any) -> Any:
        pooled = ops.max_pool2d(ops.conv2d(x, w, padding=1), 2)
        weight = ops.dequantize(table, scale, block=(1, 64))
        rows = ops.embedding(tokens, weight)
        return {
            "pooled": pooled,
            "loss": ops.cross_entropy(rows @ weight.T, labels),
            "best": ops.argmax(rows, -1),
            "sorted": ops.sort(rows, -1),
        }

    traced = gradc.trace(
        several,
        x="f32[2,3,H,8]",
        w="f32[8,3,3,3]",
        tokens="i64[N]",
        table="i8[V,64]",
        scale="f32[V,1]",
        labels="i64[N]",
    )
    with gradc.knobs.VALIDATE.set(True):
        made = gradc.compile(traced, wrt=["x", "w", "scale"], target=target, numerics=numerics)
    assert {name.partition(".")[2] for name in made.stages.names()} >= set(PROGRAM_PASSES[target]) - (
        {"block_rows", "relayout_temps", "fuse_copies", "interchange"}
        if (numerics, target) == ("strict", "cpu")
        else set()
    )


CONSTRAINED: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "rows that are sparse": (
        lambda t, w: ops.embedding(t, w),
        {"t": "i64[N]", "w": "f32[V,8]"},
        {"wrt": ["w"], "sparse": ["w"]},
    ),
    "an axis of 64 at least": (lambda x: ops.topk(x, 64, -1), {"x": "f32[N,V]"}, {"dims": {"V": 100}}),
    "an image of 99 at least": (
        lambda x, w: ops.sum(ops.conv2d(x, w)),
        {"x": "f32[1,1,H,W]", "w": "f32[1,1,99,99]"},
        {"wrt": ["w"], "dims": {"H": 101, "W": 102}},
    ),
}


@pytest.mark.parametrize("target", PROGRAM_PASSES)
@pytest.mark.parametrize("name", CONSTRAINED)
def test_graphs_that_small_sizes_do_not_fit(name: str, target: str) -> None:
    function, types, options = CONSTRAINED[name]
    with gradc.knobs.VALIDATE.set(True):
        made = gradc.compile(gradc.trace(function, **types), target=target, **options)
    assert "forward.plan_buffers" in made.stages.names()


def test_larger_sizes_are_tried_where_they_fit() -> None:
    at = [m.dims for m in meanings(graph())]
    assert len(at) == 2 and set(at[1].values()) <= set(LARGER)
    wide = gradc.trace(lambda x: ops.broadcast_to(ops.reshape(x, (-1, 1)), (x.shape[0], 1 << 20)), x="f32[N]")
    assert [len(m.dims) for m in meanings(wide)] == [1]


def test_every_pass_declares_its_licence() -> None:
    named = {name for names in PROGRAM_PASSES.values() for name in names}
    found = {name: getattr(compiler, name).licence for name in named}
    found |= {name: each.licence for name, each in PASSES.items()}  # type: ignore[attr-defined]
    assert set(found.values()) <= {"BITS", "REAL"}
    assert {name for name in named if found[name] == "REAL"} == {"unroll_columns", "block_rows"}
