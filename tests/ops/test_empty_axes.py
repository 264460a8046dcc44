"""Looking something up along an axis of size 0: one meaning on every target, with indices and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.errors import IndexOutOfRange, TypeRuleError
from gradc.ir.types import parse_type
from gradc.trace import trace

every_target = pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
Fn = Callable[..., Any]
READS: dict[str, tuple[Fn, dict[str, str], float]] = {
    "gather": (lambda x, i, **o: ops.gather(x, i, **o), {"x": "f32[N,3]", "i": "i64[M]"}, 0),
    "gather of a middle axis": (
        lambda x, i, **o: ops.gather(x, i, axis=1, **o),
        {"x": "f32[2,N,3]", "i": "i8[M,2]"},
        0,
    ),
    "gather of a computed table": (
        lambda x, i, **o: ops.gather(ops.exp(x) + 1.0, i, **o) + 2.0,
        {"x": "f32[N,3]", "i": "i64[M]"},
        2,
    ),
    "gather of means": (lambda x, i, **o: ops.gather(ops.mean(x, axis=1), i, **o), {"x": "f32[N,3]", "i": "i64[M]"}, 0),
    "gather, grouped by frequency": (
        lambda x, i, **o: ops.gather(x, i, scale_grad_by_freq=True, **o),
        {"x": "f32[N,3]", "i": "i64[M]"},
        0,
    ),
    "take_along_axis": (
        lambda x, i, **o: ops.take_along_axis(x, i, axis=1, **o),
        {"x": "f32[M,N]", "i": "i64[M,1]"},
        0,
    ),
    "index_select": (lambda x, i, **o: ops.index_select(x, 0, i, **o), {"x": "f32[N,3]", "i": "i64[M]"}, 0),
    "embedding": (lambda x, i, **o: ops.embedding(i, x, max_norm=1.0, **o), {"x": "f32[N,3]", "i": "i64[M]"}, 0),
    "embedding_bag": (
        lambda x, i, **o: ops.embedding_bag(i, x, mode="mean", **o),
        {"x": "f32[N,3]", "i": "i64[M,2]"},
        0,
    ),
}
WRITES: dict[str, tuple[Fn, dict[str, str], float]] = {
    "scatter_add": (
        lambda x, i, z, **o: ops.scatter_add(i, x, size=z.shape[0], **o),
        {"x": "f32[M,3]", "i": "i64[M]", "z": "f32[N]"},
        0,
    ),
    "scatter_add_along_axis": (
        lambda x, i, z, **o: ops.scatter_add_along_axis(i, x, axis=0, size=z.shape[0], **o),
        {"x": "f32[M,3]", "i": "i64[M,3]", "z": "f32[N]"},
        0,
    ),
    "scatter_prod": (
        lambda x, i, z, **o: ops.scatter_prod(i, x, axis=0, size=z.shape[0], **o),
        {"x": "f32[M,3]", "i": "i64[M,3]", "z": "f32[N]"},
        0,
    ),
    "scatter_reduce": (
        lambda x, i, z, **o: ops.scatter_reduce(z, 0, i, x, "mean", **o),
        {"x": "f32[M]", "i": "i64[M]", "z": "f32[N]"},
        0,
    ),
    "index_add": (
        lambda x, i, z, **o: ops.index_add(z, 0, i, x, **o),
        {"x": "f32[M]", "i": "i64[M]", "z": "f32[N]"},
        0,
    ),
}


CASES = READS | WRITES


def together(names: list[str], oob: str, target: str) -> gradc.Module:
    """A module of several cases, each with inputs and an output of its own."""

    def function(**given: Any) -> dict[str, Any]:
        out = {}
        for number, name in enumerate(names):
            build, types, _ = CASES[name]
            out[f"y{number}"] = build(**{k: given[f"{k}{number}"] for k in types}, oob=oob)
        return out

    types = {f"{k}{number}": t for number, name in enumerate(names) for k, t in CASES[name][1].items()}
    return gradc.compile(
        gradc.trace(function, **types), wrt=[k for k in types if k[0] == "x"], unused="zeros", target=target
    )


def arrays(names: list[str], count: int, index: int) -> dict[str, np.ndarray[Any, Any]]:
    given = {}
    for number, name in enumerate(names):
        for k, text in CASES[name][1].items():
            type_ = parse_type(text)
            given[f"{k}{number}"] = np.full(
                type_.concrete({"N": 0, "M": count}), index if k == "i" else 0.5, type_.dtype.np
            )
    return given


@every_target
@pytest.mark.parametrize("oob", ["skip", "clamp", "wrap"])
def test_no_place_to_look(oob: str, target: str) -> None:
    """Zeros are read and nothing is added anywhere."""
    names = list(CASES)
    module = together(names, oob, target)
    for count, index in ((0, 0), (2, 0), (2, -1), (2, 5)):
        given = arrays(names, count, index)
        y, residuals = module.forward(given)
        gradients = module.backward(residuals, *(np.ones_like(v) for v in y.values()))
        for number, name in enumerate(names):
            np.testing.assert_array_equal(y[f"y{number}"], np.full_like(y[f"y{number}"], CASES[name][2]), name)
            np.testing.assert_array_equal(gradients[f"x{number}"], np.zeros_like(given[f"x{number}"]), name)


@every_target
def test_an_index_that_is_repeated_no_times(target: str) -> None:
    """Nothing is read by it, wherever it points."""

    def function(x: Any, i: Any) -> Any:
        return ops.index_select(x, 0, ops.broadcast_to(i, (0,))), ops.gather(x, ops.reshape(i, (1,))[:0])

    module = gradc.compile(gradc.trace(function, x="f32[N,3]", i="i64[]"), wrt=["x"], target=target)
    for size in (0, 4):
        x = np.ones((size, 3), np.float32)
        y, residuals = module.forward(x=x, i=np.int64(99))
        assert [v.shape for v in y.values()] == [(0, 3)] * 2
        grads = module.backward(residuals, *y.values())
        np.testing.assert_array_equal(grads["x"], np.zeros_like(x))


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "numpy") for name in CASES), ("gather", "cpu"), ("scatter_add", "cpu"), ("take_along_axis", "cuda-sim")],
)
def test_every_index_is_out_of_range(name: str, target: str) -> None:
    module = together([name], "error", target)
    for index in (0, -1, 5):
        with pytest.raises(IndexOutOfRange, match=r"out of range \[0, 0\)"):
            module.forward(arrays([name], 2, index))
    y, _ = module.forward(arrays([name], 0, 0))
    assert y.size == 0


@every_target
@pytest.mark.parametrize("oob", ["skip", "clamp", "wrap"])
def test_rows_of_an_empty_table(oob: str, target: str) -> None:
    graph = gradc.trace(
        lambda i, u, z: ops.coalesce_values(i, u, size=z.shape[0], oob=oob), i="i64[M]", u="f32[M,3]", z="f32[N]"
    )
    given = {"i": np.array([0, -1, 4]), "u": np.ones((3, 3), np.float32), "z": np.zeros(0, np.float32)}
    np.testing.assert_array_equal(gradc.compile(graph, target=target).forward.run(given)["y"], np.zeros((3, 3)))


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@pytest.mark.parametrize("classes", ["C", "0"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_positions_of_no_classes(reduction: str, classes: str, target: str) -> None:
    """As torch: nothing, 0, NaN."""
    torch = pytest.importorskip("torch")
    graph = gradc.trace(lambda x, t: ops.cross_entropy(x, t, reduction=reduction), x=f"f32[N,{classes}]", t="i64[N]")
    module = gradc.compile(graph, wrt=["x"], target=target)
    y, residuals = module.forward(x=np.zeros((0, 0), np.float32), t=np.zeros(0, np.int64))
    np.testing.assert_array_equal(
        y, torch.nn.functional.cross_entropy(torch.zeros(0, 0), torch.zeros(0).long(), reduction=reduction).numpy()
    )
    assert module.backward(residuals, np.ones_like(y))["x"].shape == (0, 0)
    if classes == "0":
        with pytest.raises(IndexOutOfRange):
            module.forward(x=np.zeros((2, 0), np.float32), t=np.zeros(2, np.int64))


def test_a_number_of_positions_that_is_known_refuses_no_classes() -> None:
    with pytest.raises(TypeRuleError, match="0 classes"):
        gradc.trace(lambda x, t: ops.cross_entropy(x, t), x="f32[4,0]", t="i64[4]")


@every_target
@pytest.mark.parametrize("value", [np.inf, np.nan, 3.0])
def test_a_sum_of_nothing_is_0_whatever_was_repeated(target: str, value: float) -> None:
    """sum(broadcast_to(x, (N, 3)), 0) is N x for N > 0, and 0 for N = 0: not 0 * inf."""
    graph = gradc.trace(lambda x, n: ops.sum(ops.broadcast_to(x, (n.shape[0], 3)), axis=0), x="f32[3]", n="f32[N]")
    module = gradc.compile(graph, target=target)
    for count in (0, 2):
        x = np.full(3, value, np.float32)
        (got,) = module.forward.run(x=x, n=np.zeros(count, np.float32)).values()
        np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(x, (count, 3)).sum(0))


def test_an_extremum_over_nothing_that_is_allowed_is_the_bound_of_its_dtype() -> None:
    """The same in NumPy and compiled, integers too."""
    graph = trace(lambda x: [op.plain(x, axis=(0,), empty="infinite") for op in (ops.amax, ops.amin)], x="i32[N,2]")
    empty, bounds = np.zeros((0, 2), np.int32), np.iinfo(np.int32)
    compiled, _ = gradc.compile(graph, wrt=[]).forward(x=empty)
    for found in (list(interp.run(graph, {"x": empty}).values()), list(compiled.values())):
        np.testing.assert_array_equal(found, [[bounds.min] * 2, [bounds.max] * 2])


EMPTY_RESULTS: dict[str, tuple[Fn, dict[str, str]]] = {
    "rows of a table": (lambda x, i: ops.gather(x, i, axis=0), {"x": "f32[V,0]", "i": "i64[M]"}),
    "updates": (lambda x, i: ops.scatter_add(i, x, size=3, axis=0), {"x": "f32[M,0]", "i": "i64[M]"}),
    "a grid": (lambda x, g: ops.grid_sample(x, g), {"x": "f32[1,1,2,2]", "g": "f32[1,0,2,2]"}),
    "a symbolic grid": (lambda x, g: ops.grid_sample(x, g), {"x": "f32[1,1,2,2]", "g": "f32[1,H,2,2]"}),
}


@every_target
@pytest.mark.parametrize("name", EMPTY_RESULTS)
def test_gradients_of_rows_without_elements(name: str, target: str) -> None:
    fn, types = EMPTY_RESULTS[name]
    module = gradc.compile(trace(fn, **types), ["x"], target=target)
    dims = {"V": 4, "M": 5, "H": 0}
    given = {n: np.zeros(parse_type(t).concrete(dims), parse_type(t).dtype.np) for n, t in types.items()}
    y, residuals = module.forward(**given)
    dx = module.backward(residuals, y).as_dict()["x"]
    assert dx.shape == given["x"].shape and not dx.any()
