"""Positions that come from data: checked before anything reads or writes through them, however they are made, in
forward, backward and alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import registry

import gradc
from gradc import interp, ops
from gradc.errors import IndexOutOfRange
from gradc.ir.node_ranges import only_moves_elements
from gradc.ir.op import Movement, Primitive
from gradc.passes.graph.check_indices import check_indices

ROWS = 5
BAD = (-1, ROWS, 2**31, -(2**63), 2**63 - 1)
rng = np.random.default_rng(5)

MAKES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda t: t,
    "reshaped": lambda t: ops.reshape(t, (-1,)),
    "computed": lambda t: ops.where(ops.ne(t, 2), t, t * 0),
    "moved": lambda t: ops.flip(t, axis=0) + 0,
    "sliced": lambda t: t[1:],
    "twice": lambda t: ops.concat([t, t]),
}
READS: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda t, x: ops.gather(x, t),
    "embedding summed": lambda t, x: ops.sum(ops.embedding(t, x), axis=-1),
    "two reads": lambda t, x: ops.gather(x, t) * ops.tanh(ops.gather(x * 2.0, t)),
    "scatter_add": lambda t, x: ops.scatter_add(t, ops.gather(x, t * 0), axis=0, size=ROWS),
    "take_along_axis": lambda t, x: ops.take_along_axis(
        x, ops.broadcast_to(ops.reshape(t, (-1, 1)), (t.type.count, 3)), axis=0
    ),
    "scatter_amax": lambda t, x: ops.scatter_amax(t, ops.gather(x[:, 0], t * 0), axis=0, size=ROWS),
    "embedding_bag": lambda t, x: ops.embedding_bag(ops.reshape(t, (-1, 1)), x, mode="sum"),
}


def traced(make: str, read: str) -> gradc.Graph:
    return gradc.trace(lambda t, x: READS[read](MAKES[make](t), x), t="i64[N]", x=f"f32[{ROWS},3]")


@pytest.mark.parametrize("target", ["cpu", "numpy"])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("read", READS)
def test_an_index_out_of_range_writes_nothing(read: str, make: str, target: str) -> None:
    module = gradc.compile(traced(make, read), wrt=["x"], target=target)
    x = rng.standard_normal((ROWS, 3)).astype(np.float32)
    good = rng.integers(0, ROWS, 12)
    y, residuals = module.forward(t=good, x=x)
    untouched = np.full_like(y, 7)
    for bad in BAD:
        t = good.copy()
        t[-1] = bad
        with pytest.raises(IndexOutOfRange) as caught:
            module.forward(t=t, x=x, out={"y": untouched})
        assert caught.value.value == bad and caught.value.bound == ROWS
        assert (untouched == 7).all()
    np.testing.assert_array_equal(module.forward(t=good, x=x)[0], y)
    if residuals is not None and target == "cpu":
        module.backward(residuals, np.ones_like(y))


@pytest.mark.parametrize("read", READS)
def test_positions_that_changed_since_forward(read: str) -> None:
    """Backward reads the caller's own array again."""
    module = gradc.compile(traced("as it is", read), wrt=["x"], target="cpu")
    t = rng.integers(0, ROWS, 12)
    y, residuals = module.forward(t=t, x=rng.standard_normal((ROWS, 3)).astype(np.float32))
    t[3] = 2**40
    if any(r.name == "t" or r.node.type.dtype.is_integer for r in module.residuals) or "t" in module.backward.inputs:
        with pytest.raises(gradc.errors.GradcError):
            module.backward(residuals, np.ones_like(y))


@pytest.mark.parametrize("target", ["cpu", "numpy"])
@pytest.mark.parametrize("read", READS)
def test_a_kernel_alone_checks_what_it_reads_through(read: str, target: str) -> None:
    module = gradc.compile(traced("computed", read), wrt=["x"], target=target)
    reading = 0
    for handle in module.kernels.values():
        program = handle.executable.program
        sample = handle.sample(N=12)
        expected = handle.run(**sample)
        if len(program.steps) == 1:
            continue
        reading += 1
        for name, array in sample.items():
            if array.dtype.kind != "i" or not any(s.buffer == name for step in program.steps[:-1] for s in step.body):  # type: ignore[union-attr]
                continue
            for bad in BAD:
                with pytest.raises(IndexOutOfRange):
                    handle.run(**{**sample, name: np.full_like(array, bad)})
        again = handle.run(**sample)
        assert all(np.array_equal(again[n], expected[n]) for n in expected)
    assert reading


ATTACKS = {
    "an alias": (
        """
scatter = lambda t, x: ops.scatter_add(ops.reshape(t, (-1,)), x, axis=0, size=5)
m = gradc.compile(gradc.trace(scatter, t="i64[2,6]", x="f32[12,4]"), target="cpu")
t = np.zeros((2, 6), np.int64); t[1, 3] = BAD
for _ in range(50): refused(lambda: m(t=t, x=np.ones((12, 4), "f")))
"""
    ),
    "weights of classes": (
        """
loss = lambda x, t, w: ops.cross_entropy(x, t, w)
m = gradc.compile(gradc.trace(loss, x="f32[N,5]", t="i64[N]", w="f32[5]"), target="cpu")
refused(lambda: m(x=np.ones((7, 5), "f"), t=np.full(7, BAD), w=np.ones(5, "f")))
"""
    ),
    "a shared cast": (
        """
rows = lambda t, a, b: ops.gather(a, ops.cast(t * 1.0, "i64")) + ops.gather(b, ops.cast(t * 1.0, "i64"))
m = gradc.compile(gradc.trace(rows, t="f64[N]", a="f32[5,4]", b="f32[5,4]"), target="cpu")
refused(lambda: m(t=np.full(6, float(BAD)), a=np.ones((5, 4), "f"), b=np.ones((5, 4), "f")))
"""
    ),
    "sparse rows of tokens that changed": (
        """
graph = gradc.trace(lambda t, T: ops.embedding(t, T, padding_idx=0), t="i64[N,3]", T="f32[V,4]")
m = gradc.compile(graph, wrt=["T"], sparse=["T"], target="cpu")
t = np.ones((6, 3), np.int64)
y, r = m.forward(t=t, T=np.ones((5, 4), "f"))
t[2, 1] = BAD
refused(lambda: m.backward(r, np.ones_like(y)))
"""
    ),
}
ASKED = """
import numpy as np, gradc
from gradc import ops
BAD = {bad}
def refused(call):
    try: call()
    except gradc.errors.GradcError as error: print(type(error).__name__)
    else: raise SystemExit("nothing was refused")
"""


@pytest.mark.parametrize("bad", [-1, 10**9])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_that_corrupted_the_heap(attack: str, bad: int) -> None:
    environment = {"MALLOC_PERTURB_": "85", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(bad=bad) + ATTACKS[attack]], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"IndexOutOfRange", "ResidualsChanged", "InvalidProblem"}


def test_what_only_moves_positions_is_checked_once() -> None:
    """Reshaped, widened and repeated positions are looked at where they come from."""
    spread = lambda t, x: ops.take_along_axis(
        x, ops.broadcast_to(ops.reshape(ops.cast(t, "i64"), (-1, 1)), (t.type.count, 3)), axis=0
    )
    program = gradc.compile(gradc.trace(spread, t="i32[N]", x="f32[5,3]"), target="numpy").forward.program
    assert [k.body[0].buffer for k in program.kernels if any(s.op == "check" for s in k.body)] == ["t"]


def test_positions_that_are_in_range_by_what_they_are_need_no_check() -> None:
    graph = gradc.trace(lambda x, t: ops.gather(x, ops.argmax(x, axis=0)) + ops.gather(x, t), x="f32[256,3]", t="u8[3]")
    assert not any(
        s.op == "check" for k in gradc.compile(graph, target="numpy").forward.program.kernels for s in k.body
    )


MOVES = [
    case
    for case in registry.cases(("f32",))
    if isinstance(case.op, Primitive)
    and isinstance(case.op.lower, Movement)
    and len(case.types) == 1
    and not case.op.indices
]


@pytest.mark.parametrize("case", MOVES, ids=str)
def test_what_is_said_to_keep_elements_keeps_them(case: registry.Case) -> None:
    """A check before a move stands for one after it: no element is lost, none is new."""
    (node,) = [n for _, n in case.graph.outputs]
    if node.op.name != case.op.name or not only_moves_elements(node):
        return
    for dims in case.bindings((3, 4)):
        shape = case.types[0].concrete(dims)
        x = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
        assert set(interp.run(case.graph, {"x0": x})["y"].ravel()) == set(x.ravel())


def test_the_pass_changes_no_value_and_is_its_own_square() -> None:
    graph = traced("computed", "two reads")
    once = check_indices(graph)
    assert once != graph and check_indices(once) == once
    t, x = rng.integers(0, ROWS, 6), rng.standard_normal((ROWS, 3)).astype(np.float32)
    np.testing.assert_array_equal(interp.run(once, {"t": t, "x": x})["y"], interp.run(graph, {"t": t, "x": x})["y"])


READERS = {
    "embedding": (lambda tokens, w: ops.embedding(tokens, w), "tokens"),
    "index_select": (lambda tokens, w: ops.index_select(w, ops.reshape(tokens, (-1,)), dim=0), "tokens"),
    "cross_entropy": (lambda tokens, w: ops.cross_entropy(ops.transpose(w), tokens), "tokens"),
    "gather": (lambda tokens, w: ops.gather(w * 2.0, tokens + 0), "tokens"),
}


@pytest.mark.parametrize("op", READERS)
def test_an_error_names_the_users_op_and_input(op: str) -> None:
    fn, source = READERS[op]
    module = gradc.compile(gradc.trace(fn, tokens="i64[3]", w="f32[5,3]"), wrt=["w"], target="cpu")
    tokens, w = np.array([0, 9, 1]), np.ones((5, 3), np.float32)
    for call in (lambda: module.forward(tokens=tokens, w=w), lambda: module(tokens=tokens, w=w)):
        with pytest.raises(IndexOutOfRange) as caught:
            call()
        assert (caught.value.op, caught.value.input, caught.value.position) == (op, source, 1)


@pytest.mark.parametrize("step", [1, 2])
def test_a_test_of_another_place_bounds_a_place(step: int) -> None:
    """The gradient of a slice that is read backwards: 4 - i where 0 <= i - 2 < 3."""
    graph = gradc.trace(lambda x: ops.flip(x[2:, ::step], axis=0), x="f32[5,2]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    y, residuals = module.forward(x=np.ones((5, 2), np.float32))
    expected = np.zeros((5, 2), np.float32)
    expected[2:, ::step] = 1
    np.testing.assert_array_equal(module.backward(residuals, np.ones_like(y))["x"], expected)


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_a_cast_that_wraps_makes_other_positions(target: str) -> None:
    """An argmax of 300 columns is inside 300 rows; as a byte it may be negative, which a check has to see."""
    graph = gradc.trace(
        lambda x, table: ops.gather(table, ops.cast(ops.argmax(x, axis=1), "i8")), x="f32[N,300]", table="f32[300,2]"
    )
    module = gradc.compile(graph, target=target)
    table = np.arange(600, dtype=np.float32).reshape(300, 2)
    for place in (0, 127, 128, 299):
        x = np.zeros((3, 300), np.float32)
        x[1, place] = 1
        wrapped = int(np.array(place).astype(np.int8))
        if wrapped >= 0:
            np.testing.assert_array_equal(module.forward.run(x=x, table=table)["y"], table[[0, wrapped, 0]])
            continue
        with pytest.raises(IndexOutOfRange) as caught:
            module.forward.run(x=x, table=table)
        assert (caught.value.value, caught.value.bound) == (wrapped, 300)
