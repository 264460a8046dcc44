"""An index that was checked stays checked where the axis that it is for is a slice, a reversal, a pad or a part of
another: random views of a symbolic axis, read by ops with indices.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import Graph, Node, interp, ops
from gradc.errors import IndexOutOfRange, TypeRuleError
from gradc.ir.dims import Assumption, assuming, evaluate, known_nonnegative, maximum, symbol
from gradc.ir.program_text import parse_program
from gradc.ir.size_text import parse_size
from gradc.ir.verify import verify_program

READERS = {
    "gather": ("f64[N]", "i64[M]"),
    "take_along_axis": ("f64[N]", "i32[M]"),
    "cross_entropy": ("f64[N]", "i32[]"),
    "rows of cross_entropy": ("f64[B,N]", "i64[B]"),
    "embedding": ("f64[N,4]", "i32[M]"),
}


def viewed(draw: random.Random, x: Node, axis: int) -> Node:
    """One random view of an axis, or an array of which it is a part."""
    n = draw.randint(1, 3)
    at = [slice(None)] * x.rank
    match draw.randrange(7):
        case 0:
            at[axis] = slice(n, None)
        case 1:
            at[axis] = slice(None, -n)
        case 2:
            at[axis] = slice(n, -1)
        case 3:
            at[axis] = slice(draw.randint(0, 2), None, n + 1)
        case 4:
            return ops.flip(x, axis=(axis,))
        case 5:
            widths = [(n, draw.randint(0, 2)) if a == axis else (0, 0) for a in range(x.rank)]
            return ops.pad(x, widths, value=0.5)
        case _:
            return ops.roll(x, n, axis=axis)
    return x[tuple(at)]


def graph_of(reader: str, seed: int) -> Graph:
    draw = random.Random(seed)

    def read(x: Node, t: Node) -> Node:
        for _ in range(draw.randint(1, 2)):
            x = viewed(draw, x, x.rank - 1 if "entropy" in reader else 0)
        if draw.random() < 0.3:
            x = ops.exp(x)
        match reader:
            case "gather":
                return ops.gather(x, t, axis=0)
            case "take_along_axis":
                return ops.take_along_axis(x, t, axis=0)
            case "embedding":
                return ops.embedding(t, x)
        return ops.cross_entropy(x, t, label_smoothing=draw.choice((0.0, 0.25)), reduction="sum")

    x, t = READERS[reader]
    return gradc.trace(read, x=x, t=t)


def values_of(graph: Graph, n: int, last: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    shapes = {
        name: [evaluate(s, {"N": n, "M": 5, "B": 3}) for s in graph.input(name).type.shape]
        for name in graph.input_names
    }
    t = rng.integers(0, last, shapes["t"]) if last else np.zeros(shapes["t"])
    return {"x": rng.normal(size=shapes["x"]), "t": t.astype(graph.input("t").type.dtype.np)}


@pytest.mark.parametrize("reader", READERS)
def test_indices_of_random_views(reader: str) -> None:
    """Each builds, forward and backward; the NumPy interpreter of its graph agrees; the first index past the end is an
    error.
    """
    axis = -1 if "entropy" in reader else 0
    for seed in range(25):
        graph = graph_of(reader, seed)
        table = graph.outputs[0][1].operands[1 if reader == "embedding" else 0]
        module = gradc.compile(graph, wrt=["x"], target="numpy")
        for n in (9, 14):
            size = evaluate(table.shape[axis], {"N": n, "M": 5, "B": 3})
            given = values_of(graph, n, size)
            y, residuals = module.forward(**given)
            (wanted,) = interp.run(graph, given).values()
            np.testing.assert_allclose(y, wanted, rtol=1e-12, atol=1e-12)
            slope = module.backward(residuals, np.ones_like(y))["x"]
            direction = np.random.default_rng(1).normal(size=slope.shape)
            step = 1e-6
            ends = [
                float(np.sum(next(iter(interp.run(graph, {**given, "x": given["x"] + s * direction}).values()))))
                for s in (step, -step)
            ]
            assert np.sum(slope * direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-6)
            with pytest.raises(IndexOutOfRange):
                module.forward(**{**given, "t": np.full_like(given["t"], size)})


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_cross_entropy_of_a_slice_with_weights_of_its_size(target: str) -> None:
    def loss(i0: Node, t: Node, weight: Node) -> Node:
        return ops.cross_entropy(i0[1:], t, weight, label_smoothing=0.25, reduction="sum")

    graph = gradc.trace(loss, i0="f64[N]", t="i32[]", weight="f64[max(0, N-1)]")
    module = gradc.compile(graph, wrt=["i0"], target=target)
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=6), rng.uniform(0.5, 1, 5)
    y, residuals = module.forward(i0=x, t=np.int32(3), weight=weight)
    logs = x[1:] - np.log(np.sum(np.exp(x[1:])))
    assert y == pytest.approx(-0.75 * weight[3] * logs[3] - 0.25 / 5 * np.sum(weight * logs), rel=1e-12)
    share = 0.75 * weight[3] * np.eye(5)[3] + 0.05 * weight
    np.testing.assert_allclose(
        module.backward(residuals, 1.0)["i0"], [0, *(np.exp(logs) * share.sum() - share)], rtol=1e-12, atol=1e-15
    )
    for wrong in (-1, 5, 6):
        with pytest.raises(IndexOutOfRange):
            module.forward(i0=x, t=np.int32(wrong), weight=weight)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bound=max(0, N-1)", "bound=N"),  # one index too many
        ("%0 + (N-max(0, N-1))", "%0 + (N-max(0, N-1)+1)"),
        ("%0 + (N-max(0, N-1))", "%0 + (N-max(0, N-1)-1)"),  # -1 where N is 0, and 0 elsewhere
        ("%0 + (N-max(0, N-1))", "%0*2 + (N-max(0, N-1))"),
        ("%0 + (N-max(0, N-1))", "%0 + (N-max(0, N-2))"),
    ],
)
def test_an_index_outside_of_a_slice_is_refused(old: str, new: str) -> None:
    graph = gradc.trace(lambda x, t: ops.gather(x[1:], t, axis=0), x="f64[N]", t="i64[M]")
    text = str(gradc.compile(graph, target="numpy").forward.program)
    verify_program(parse_program(text))
    assert old in text
    with pytest.raises(TypeRuleError, match="nothing before says"):
        verify_program(parse_program(text.replace(old, new)))


def test_what_is_known_of_maxima_is_so() -> None:
    """No size that is known to be >= 0 is negative, over random sizes with quotients and remainders, assumptions and
    values.
    """
    draw = random.Random(5)
    dims = [symbol("N"), symbol("M")]

    def size(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.2:
            return draw.choice([*dims, draw.randint(-4, 4)])
        a, b = size(depth - 1), size(depth - 1)
        if draw.random() < 0.15:
            by = max(b, 1) if isinstance(b, int) else maximum(b, 1)
            return a // by if draw.random() < 0.3 else a % by
        return draw.choice([a + b, a - b, maximum(a, b), a * draw.randint(-2, 3)])

    known = 0
    for _ in range(3000):
        facts = [Assumption(size(2), ">=", size(1)) for _ in range(draw.randrange(2))]
        with assuming(facts):
            asked = size(3)
            if isinstance(asked, int) or not known_nonnegative(asked):
                continue
        known += 1
        for n in range(7):
            for m in range(7):
                at = {"N": n, "M": m}
                if all(fact.holds(at) for fact in facts):
                    assert evaluate(asked, at) >= 0, (asked, facts, at)
    assert known > 500


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("N-max(0, N-1)", True),
        ("N-max(0, N-1)-1", False),
        ("max(0, N-5)-N+5", True),
        ("max(0, N-5)-N+4", False),
        ("max(max(0, N-1), M)-N+1", True),
        ("N-max(N//2, M)", False),
        ("7-7//max(N, 1)*max(N, 1)", True),
        ("max(N, 1)-8+7//max(N, 1)*max(N, 1)", True),
        ("max(N, 1)-9+7//max(N, 1)*max(N, 1)", False),
        ("M*(N-N//max(M, 1)*max(M, 1))", True),
        ("7-7//N*N", False),
    ],
)
def test_what_a_size_with_maxima_and_quotients_is_known_to_be(text: str, known: bool) -> None:
    assert known_nonnegative(parse_size(text)) is known


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_roll_takes_any_shift_of_a_symbolic_size(target: str) -> None:
    n, shifts = symbol("N"), (2, -7, 0, symbol("N") // 2, -symbol("N"), 3 * symbol("M"))
    graph = gradc.trace(
        lambda x, t: tuple(ops.gather(ops.roll(x, by, axis=0), t, axis=0) for by in shifts), x=f"f32[{n}]", t="i64[M]"
    )
    module = gradc.compile(graph, target=target)
    for size in range(1, 9):
        x, t = np.arange(size, dtype=np.float32), np.array([0, size - 1, size // 2])
        for by, got in zip((2, -7, 0, size // 2, -size, 9), module(x=x, t=t).values(), strict=True):
            assert np.asarray(got).tolist() == np.roll(x, by)[t].tolist(), (size, by)
