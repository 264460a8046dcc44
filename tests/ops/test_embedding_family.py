"""Embedding, bags, index ops and scatter_reduce: torch's own samples, every option, every strategy, and what is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from agreement import merged  # noqa: E402
from torch_oracles import _bag, to_numpy, to_torch  # noqa: E402

import gradc  # noqa: E402
from benchmarks.opinfo import OURS as ALL  # noqa: E402
from benchmarks.opinfo import SAMPLERS, op_db  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.errors import IndexOutOfRange, InvalidProblem, NotAscending, TypeRuleError  # noqa: E402
from gradc.ir.graph import Graph  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.types import DTYPES, typeof  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.ops.indexing.sparse import coalesce  # noqa: E402
from gradc.runtime.host import pool  # noqa: E402

torch.set_num_threads(1)
F = torch.nn.functional
Arrays = dict[str, np.ndarray]


def traced(fn: Callable[..., Any], arrays: Arrays) -> Graph:
    """``fn(*values)`` as a graph whose inputs have the arrays' types."""

    def function(**operands: Any) -> Any:
        return fn(*operands.values())

    kind = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in arrays])  # type: ignore[attr-defined]
    return gradc.trace(function, **{n: typeof(a) for n, a in arrays.items()})


def floats(arrays: Arrays) -> list[str]:
    return [n for n, a in arrays.items() if typeof(a).dtype.is_float]


def close(got: np.ndarray, want: np.ndarray, rtol: float, what: str) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    np.testing.assert_allclose(
        got, want, rtol=rtol, atol=rtol * float(np.max(np.abs(want), initial=0, where=np.isfinite(want))), err_msg=what
    )


def same_as_torch(
    ours: Callable[..., Any], theirs: Callable[..., Any], arrays: Arrays, what: str, compiled: bool = False
) -> None:
    """Value and every gradient, with a random cotangent, in f64; ``compiled``: through C as well."""
    graph, wrt = traced(ours, arrays), floats(arrays)
    leaves = {n: to_torch(a).requires_grad_(n in wrt) for n, a in arrays.items()}
    y = theirs(*leaves.values())
    close(interp.run(graph, arrays)["y"], to_numpy(y), 1e-12, what)
    g = np.asarray(np.random.default_rng(3).standard_normal(tuple(y.shape)))
    want = (
        torch.autograd.grad(y, [leaves[n] for n in wrt], to_torch(g), allow_unused=True, materialize_grads=True)
        if y.requires_grad
        else [torch.zeros(())] * 0
    )
    both = differentiate(graph, wrt, unused="zeros")
    given = {n: a for n, a in {**arrays, "d.y": g}.items() if n in both.input_names}
    found = interp.run(both, given)
    for name, w in zip(wrt, want, strict=True):
        close(found[f"d.{name}"], to_numpy(w), 1e-10, f"{what}: d {name}")
    if compiled:
        for name, value in gradc.compile(both).forward.run(**given).items():
            close(value, found[name], 1e-12, f"{what}: compiled {name}")


# -- torch's own samples -----------------------------------------------------------------------------------------------


def by_definition(
    i: Any, w: Any, offsets: Any = None, per_sample_weights: Any = None, sparse: bool = False, **how: Any
) -> Any:
    """Where torch 2.13 is not the oracle: with scale_grad_by_freq its embedding_bag divides by the count of another
    index; it crashes where there is no bag at all; where the last offset falls short it puts the rest in the last bag
    if a gradient is wanted, and does not if none is.
    """
    return _bag(i, w, *(x for x in (offsets, per_sample_weights) if x is not None), **how)


OURS = {name: fn for name, fn in ALL.items() if name not in SAMPLERS}


@pytest.mark.parametrize("name", OURS)
def test_torchs_own_samples(name: str) -> None:
    found = [info for info in op_db() if info.name == name]  # op_db takes seconds to import
    assert found
    for info in found:
        check_samples(info)


def check_samples(info: Any) -> None:
    """Each of an OpInfo's samples, and its gradients, is what torch says."""
    torch.manual_seed(0)
    tried = 0
    for number, sample in enumerate(info.sample_inputs("cpu", torch.float64, requires_grad=False)):
        values = [sample.input, *sample.args]
        where = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor)]
        named = [k for k, v in sample.kwargs.items() if isinstance(v, torch.Tensor)]
        plain = {k: v for k, v in sample.kwargs.items() if k not in named}
        if info.name.endswith("take_along_dim") and plain.get("dim", "") is None:
            plain.pop("dim")
        arrays = {
            f"x{i}": to_numpy(v)
            for i, v in enumerate([*(values[k] for k in where), *(sample.kwargs[k] for k in named)])
        }

        def arranged(
            operands: Any, values: Any = values, where: Any = where, named: Any = named
        ) -> tuple[list[Any], dict[str, Any]]:
            full = list(values)
            for k, o in zip(where, operands, strict=False):
                full[k] = o
            return full, dict(zip(named, operands[len(where) :], strict=True))

        def ours(*operands: Any, arranged: Any = arranged, plain: Any = plain) -> Any:
            full, more = arranged(operands)
            return OURS[info.name](*full, **more, **plain)

        def theirs(*operands: Any, arranged: Any = arranged, plain: Any = plain) -> Any:
            full, more = arranged(operands)
            if info.name.endswith("embedding_bag") and plain.get("scale_grad_by_freq"):
                return by_definition(full[1], full[0], **more, **plain)
            if "max_norm" in plain:
                full[0] = full[0].clone()
            return info.op(*full, **more, **{k: v for k, v in plain.items() if k != "sparse"})

        same_as_torch(
            ours,
            theirs,
            arrays,
            f"sample {number}: {[tuple(a.shape) for a in arrays.values()]} {values[1] if where != [0, 1] else ''}"
            f" {plain}",
            compiled=number % 8 == 0,
        )
        tried += 1
    assert tried >= 3


# -- embedding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize(("max_norm", "norm_type"), [(None, 2.0), (1.0, 2.0), (0.5, 1.0), (0.75, float("inf"))])
def test_embedding(padding: int | None, by_frequency: bool, max_norm: float | None, norm_type: float) -> None:
    rng = np.random.default_rng(0)
    how = {"padding_idx": padding, "max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": by_frequency}
    for shape in ((), (9,), (3, 5)):
        arrays = {"i": rng.integers(0, 6, shape), "w": rng.standard_normal((6, 4))}
        same_as_torch(
            lambda i, w: ops.embedding(i, w, **how),
            lambda i, w: F.embedding(i, w.clone(), **how),
            arrays,
            f"{shape} {how}",
        )


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8"])
def test_index_dtypes(dtype: str) -> None:
    rng = np.random.default_rng(1)
    i = rng.integers(0, 6, (3, 4)).astype(DTYPES[dtype].np)
    same_as_torch(
        lambda i, w: ops.embedding(i, w),
        lambda i, w: F.embedding(i.long(), w),
        {"i": i, "w": rng.standard_normal((6, 4))},
        dtype,
        compiled=True,
    )


@pytest.mark.parametrize(
    "name",
    [
        "embedding",
        "embedding_bag",
        "index_select",
        "index_add",
        "scatter_reduce",
        "segment_ids",
        "coalesce_rows",
        "embedding_renorm",
    ],
)
@pytest.mark.parametrize("dtype", ["bool", "f32", "bf16"])
def test_indices_that_are_no_integers_say_what_to_write(name: str, dtype: str) -> None:
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "embedding": lambda i, w: ops.embedding(i, w),
        "embedding_bag": lambda i, w: ops.embedding_bag(i, w, np.array([0, 1])),
        "index_select": lambda i, w: ops.index_select(w, 0, i),
        "index_add": lambda i, w: ops.index_add(w, 0, i, w),
        "scatter_reduce": lambda i, w: ops.scatter_reduce(w[:, 0], 0, i, w[:, 0], "amax"),
        "segment_ids": lambda i, w: ops.segment_ids(i, size=3),
        "coalesce_rows": lambda i, w: ops.coalesce_rows(i, size=3),
        "embedding_renorm": lambda i, w: ops.embedding_renorm(w, i, max_norm=1.0),
    }
    with pytest.raises(TypeRuleError, match=rf"indices are {dtype}; .*ops\.cast\(indices, 'i64'\)"):
        gradc.trace(lambda i, w: calls[name](i, w), i=f"{dtype}[3]", w="f32[3,2]")


def test_a_gradient_wider_than_its_cotangent() -> None:
    """bf16 dy -> f32 dW: the table is f32, what is read of it bf16; dy is read as bf16 inside the scatter and nothing
    is kept beside.
    """
    graph = gradc.trace(lambda i, w: ops.cast(ops.embedding(i, w), "bf16"), i="i64[N]", w="f32[50,8]")
    module = gradc.compile(graph, wrt=["w"])
    program = module.backward.program
    assert (
        not program.of_kind("temp")
        and program.buffer["d.w"].type.dtype.name == "f32"
        and program.buffer["d.y"].type.dtype.name == "bf16"
    )
    y, residuals = module.forward(i=np.zeros(1000, np.int64), w=np.ones((50, 8), np.float32))
    assert module.backward(residuals, np.ones_like(y))["w"][0].tolist() == [1000.0] * 8
    plain = gradc.trace(lambda i, dy: ops.scatter_add(i, ops.cast(dy, "f32"), size=50), i="i64[N]", dy="bf16[N,8]")
    assert not gradc.compile(plain).forward.program.of_kind("temp")


# -- embedding_bag -----------------------------------------------------------------------------------------------------

OFFSETS = {"empty bags": [0, 2, 2, 5, 9, 9], "one": [0], "all at the end": [0, 9, 9], "none at the end": [0, 3, 7]}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_bags_with_offsets(mode: str, padding: int | None, last: bool, offsets: str) -> None:
    rng = np.random.default_rng(2)
    how: dict[str, Any] = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    arrays = {"i": rng.integers(0, 4, 9), "w": rng.standard_normal((4, 3)), "o": np.array(OFFSETS[offsets])}
    theirs = by_definition if last and offsets in ("one", "none at the end") else F.embedding_bag
    same_as_torch(
        lambda i, w, o: ops.embedding_bag(i, w, o, **how),
        lambda i, w, o: theirs(i, w, o, **how),
        arrays,
        f"{offsets} {how}",
        compiled=offsets == "empty bags",
    )
    if mode == "sum" and theirs is not by_definition:
        more = {**arrays, "p": rng.standard_normal(9)}
        same_as_torch(
            lambda i, w, o, p: ops.embedding_bag(i, w, o, p, **how),
            lambda i, w, o, p: F.embedding_bag(i, w, o, per_sample_weights=p, **how),
            more,
            f"{offsets} {how} weighted",
        )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("more", [{}, {"max_norm": 0.8}, {"scale_grad_by_freq": True}], ids=str)
def test_bags_in_rows(mode: str, padding: int | None, more: dict[str, Any]) -> None:
    if mode == "max" and "scale_grad_by_freq" in more:
        return
    rng = np.random.default_rng(4)
    how: dict[str, Any] = {"mode": mode, "padding_idx": padding, **more}
    arrays = {"i": rng.integers(0, 4, (5, 3)), "w": rng.standard_normal((4, 6))}
    arrays["i"][2] = 1  # a bag of padding only
    theirs = by_definition if "scale_grad_by_freq" in more else F.embedding_bag
    same_as_torch(
        lambda i, w: ops.embedding_bag(i, w, **how),
        lambda i, w: theirs(i, w.clone(), **how),
        arrays,
        str(how),
        compiled=not more,
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("form", ["rows", "offsets"])
@pytest.mark.parametrize("padding", [None, 1])
def test_per_sample_weights(mode: str, form: str, padding: int | None) -> None:
    """Torch has them for sum alone; the definition, bag after bag, for the rest; and the formulas of their gradient."""
    rng = np.random.default_rng(5)
    shape = (3, 4) if form == "rows" else (12,)
    arrays = {"i": rng.integers(0, 5, shape), "w": rng.standard_normal((5, 3))}
    if form == "offsets":
        arrays["o"] = np.array([0, 4, 8])
    arrays["p"] = rng.uniform(0.3, 2, shape)
    how: dict[str, Any] = {"mode": mode, "padding_idx": padding}
    same_as_torch(
        lambda i, w, *rest: ops.embedding_bag(i, w, *rest[:-1], per_sample_weights=rest[-1], **how),
        lambda i, w, *rest: _bag(i, w, *rest, **how),
        arrays,
        f"{form} {how}",
        compiled=True,
    )


def test_weights_gradient_is_the_formula() -> None:
    rng = np.random.default_rng(6)
    i, w, p, g = (
        rng.integers(0, 5, (1, 4)),
        rng.standard_normal((5, 3)),
        rng.uniform(0.3, 2, (1, 4)),
        rng.standard_normal((1, 3)),
    )
    x = w[i[0]]
    r = {"sum": 1.0, "mean": p.sum(), "sqrtn": np.sqrt((p * p).sum())}
    for mode in r:
        y = (p[0] @ x) / r[mode]
        want = {
            "sum": x @ g[0],
            "mean": (x - y) @ g[0] / r[mode],
            "sqrtn": (x @ g[0] - p[0] * (g[0] @ y) / r[mode]) / r[mode],
        }[mode]
        both = differentiate(
            gradc.trace(
                lambda i, w, p, mode=mode: ops.embedding_bag(i, w, per_sample_weights=p, mode=mode),
                i="i64[1,4]",
                w="f64[5,3]",
                p="f64[1,4]",
            ),
            ["p"],
        )
        np.testing.assert_allclose(interp.run(both, {"i": i, "w": w, "p": p, "d.y": g})["d.p"][0], want, rtol=1e-12)


def bag_module(wrt: tuple[str, ...] = ("w",), **how: Any) -> gradc.Module:
    return gradc.compile(
        gradc.trace(lambda i, w, o: ops.embedding_bag(i, w, o, **how), i="i64[N]", w="f64[V,D]", o="i64[B]"),
        wrt=list(wrt),
    )


@pytest.mark.parametrize("form", ["rows", "offsets"])
def test_max_routes_to_the_first_of_equals_per_column(form: str) -> None:
    w = np.array([[1.0, 5, 0], [3, 5, np.nan], [3, 2, 7], [9, 9, 9]])
    i = np.array([[3, 1, 2, 0, 1]])
    fn = (
        (lambda i, w: ops.embedding_bag(i, w, mode="max", padding_idx=3))
        if form == "rows"
        else (lambda i, w: ops.embedding_bag(i, w, np.array([0]), mode="max", padding_idx=3))
    )
    i = i if form == "rows" else i[0]
    both = differentiate(traced(fn, {"i": i, "w": w}), ["w"])
    module = gradc.compile(traced(fn, {"i": i, "w": w}), wrt=["w"])
    y, residuals = module.forward(i=i, w=w)
    g = np.array([[1.0, 2, 4]])
    for values, gradient in (
        (interp.run(both, {"i": i, "w": w, "d.y": g})["y"], interp.run(both, {"i": i, "w": w, "d.y": g})["d.w"]),
        (y, module.backward(residuals, g)["w"]),
    ):
        np.testing.assert_array_equal(values, [[3, 5, np.nan]])
        np.testing.assert_array_equal(gradient, [[0, 0, 0], [1, 2, 4], [0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "sqrtn"])
def test_empty_bags_are_zero_and_padding_gets_nothing(mode: str) -> None:
    module = bag_module(mode=mode, padding_idx=2)
    w = np.full((4, 3), -1.5)
    w[2] = np.inf
    for i, o in (([2, 2, 0, 1], [0, 2, 2]), ([], [0, 0]), ([2], [0]), ([], [])):
        y, residuals = module.forward(i=np.array(i, np.int64), w=w, o=np.array(o, np.int64))
        dw = module.backward(residuals, np.full_like(y, np.inf))["w"]
        assert not dw[2].any() and not y[: min(2, len(y))].any() and np.isfinite(y).all(), (i, o, y, dw)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "sqrtn"])
@pytest.mark.parametrize(("bags", "rows"), [(3, 20000), (3000, 9000)])
def test_bags_are_the_same_for_any_number_of_threads(mode: str, bags: int, rows: int) -> None:
    rng = np.random.default_rng(8)
    graph = gradc.trace(lambda i, w, o: ops.embedding_bag(i, w, o, mode=mode), i="i64[N]", w="f32[200,17]", o="i64[B]")
    module = gradc.compile(graph, wrt=["w"])
    i, w = (
        np.where(rng.random(rows) < 0.5, 7, rng.integers(0, 200, rows)),
        rng.standard_normal((200, 17)).astype(np.float32),
    )
    o = np.concatenate([[0], np.sort(rng.integers(0, rows + 1, bags - 1))])
    dy = rng.standard_normal((bags, 17)).astype(np.float32)
    before, seen = pool.num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = module.forward(i=i, w=w, o=o)
            seen.add((y.tobytes(), module.backward(residuals, dy)["w"].tobytes()))
    finally:
        pool.set_num_threads(before)
    assert len(seen) == 1
    exact = interp.run(differentiate(graph, ["w"]), {"i": i, "w": w, "o": o, "d.y": dy}, precision="f64")
    close(np.frombuffer(next(iter(seen))[1], np.float32).reshape(w.shape), exact["d.w"], 1e-5, mode)


BAD_OFFSETS: dict[str, tuple[list[int], type[Exception], str]] = {
    "decrease": ([0, 5, 3], NotAscending, "3 at position 2 of 'o(ffsets)?' is below the 5 before it"),
    "overrun": ([0, 5, 12], IndexOutOfRange, r"12 at position 2 of 'o(ffsets)?' is out of range \[0, 10\)"),
    "begin late": ([2, 5], IndexOutOfRange, r"2 at position 0 of 'o(ffsets)?' is out of range \[0, 1\)"),
    "negative": ([-1, 5], IndexOutOfRange, r"-1 at position 0 of 'o(ffsets)?' is out of range \[0, 1\)"),
}


@pytest.mark.parametrize("case", BAD_OFFSETS)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_wrong_offsets_are_named_with_both_numbers(case: str, mode: str) -> None:
    offsets, error, message = BAD_OFFSETS[case]
    given = {"i": np.zeros(9, np.int64), "w": np.ones((4, 3)), "o": np.array(offsets)}
    module = bag_module(mode=mode)
    graph = traced(lambda i, w, o: ops.embedding_bag(i, w, o, mode=mode), given)
    for run in (
        lambda: module.forward(**given),
        lambda: interp.run(graph, given),
        lambda: interp.run(module.forward.program, given),
    ):
        with pytest.raises(error, match=message):
            run()
    fine = {**given, "o": np.array([0, 5])}
    module.forward(**fine)  # what was reported is forgotten


def test_a_wrong_index_in_a_bag() -> None:
    with pytest.raises(IndexOutOfRange, match=r"4 at position 1 of 'i' is out of range \[0, 4\)"):
        bag_module().forward(i=np.array([0, 4]), w=np.ones((4, 3)), o=np.array([0]))
    with pytest.raises(InvalidProblem, match="-1"):  # no offset at all, where the last one is asked for
        bag_module(include_last_offset=True).forward(
            i=np.zeros(0, np.int64), w=np.ones((4, 3)), o=np.zeros(0, np.int64)
        )


def test_offsets_that_are_not_looked_at_stay_harmless() -> None:
    """oob='skip': nothing is checked; whatever the offsets say, nothing outside is read or written, and C agrees with
    NumPy.
    """
    rng = np.random.default_rng(9)
    module = bag_module(mode="sum", oob="skip")
    for _ in range(20):
        given = {"i": rng.integers(-3, 9, 40), "w": rng.standard_normal((5, 3)), "o": rng.integers(-50, 90, 7)}
        y, residuals = module.forward(**given)
        np.testing.assert_allclose(y, interp.run(module.forward.program, given)["y"], rtol=1e-12)
        assert module.backward(residuals, np.ones_like(y))["w"].shape == (5, 3)


def test_the_bag_of_a_position_is_searched_for_not_stored() -> None:
    program = bag_module(mode="sum").forward.program
    assert "search o[0] <- " in str(program) and not [b for b in program.of_kind("temp") if b.type.rank == 1]
    assert parse_program(str(program)) == program


@pytest.mark.parametrize("strategy", ["privatized", "segmented"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_scattered_sums_of_16_bits_are_rounded_once(dtype: str, strategy: str) -> None:
    """Whole numbers whose sums f32 holds exactly: the result is the sum, rounded, in any order."""
    module = gradc.compile(
        gradc.trace(lambda i, x: ops.scatter_add(i, x, axis=0, size=7), i="i64[N]", x=f"{dtype}[N,12]"),
        target="cpu",
        reductions={"*": strategy},
    )
    rng, kind = np.random.default_rng(13), DTYPES[dtype].np
    i, x = rng.integers(0, 6, 300), rng.integers(-64, 64, (300, 12)).astype(kind)
    want = np.zeros((7, 12), np.float32)
    np.add.at(want, i, x.astype(np.float32))
    np.testing.assert_array_equal(module.forward.run(i=i, x=x)["y"], want.astype(kind))


# -- scatters that combine otherwise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["privatized", "segmented"])
def test_every_strategy_combines(strategy: str) -> None:
    """Every dtype, each with indices of its own."""

    def column(name: str, dtype: str) -> Graph:
        return gradc.trace(
            lambda i, x: getattr(ops, name)(ops.broadcast_to(ops.reshape(i, (-1, 1)), x.shape), x, axis=0, size=50),
            i="i64[N]",
            x=f"{dtype}[N,5]",
        )

    names, dtypes = ("scatter_amax", "scatter_amin", "scatter_prod"), ("f32", "f64", "i32", "u8")
    cases = {f"{name}_{dtype}": column(name, dtype) for name in names for dtype in dtypes}
    graph = merged("scatters", cases.items())
    module = gradc.compile(graph, reductions={"*": strategy})
    program = module.forward.program
    assert [how for k in program.kernels for _, how in k.strategy] == [strategy] * len(cases), str(program)
    assert parse_program(str(program)) == program
    draws = {case: np.random.default_rng(10) for case in cases}
    for rows in (0, 1, 7, 1000, 5000):
        given = {}
        for case, rng in draws.items():
            dtype = DTYPES[case.rpartition("_")[2]]
            given[f"{case}.i"] = np.where(rng.random(rows) < 0.5, 7, rng.integers(0, 50, rows))
            x = rng.integers(1, 4, (rows, 5)) if dtype.is_integer else rng.uniform(0.9, 1.1, (rows, 5))
            given[f"{case}.x"] = x.astype(dtype.np)
        exact, wanted = interp.run(graph, given, precision="f64"), interp.run(graph, given)
        for results in (module.forward.run(**given), interp.run(program, **given)):
            for case, got in results.items():
                what, dtype = f"{case} of {rows} rows", DTYPES[case.removesuffix(".y").rpartition("_")[2]]
                assert got.dtype == dtype.np, what
                if dtype.is_integer:
                    np.testing.assert_array_equal(got, wanted[case], err_msg=what)
                else:
                    rtol = 1e-4 if dtype.name == "f32" else 1e-12
                    np.testing.assert_allclose(got, exact[case], rtol=rtol, err_msg=what)


@pytest.mark.parametrize("strategy", ["privatized", "regular"])
def test_rows_that_never_meet_have_an_owner(strategy: str) -> None:
    """[B, N]: the result's first axis is the row's own, so one task owns it."""
    graph = gradc.trace(lambda i, x: ops.scatter_amax(i, x, axis=1, size=6), i="i64[A,N]", x="f32[A,N]")
    rng = np.random.default_rng(11)
    i, x = rng.integers(0, 6, (30, 200)), rng.standard_normal((30, 200)).astype(np.float32)
    module = gradc.compile(graph, reductions={"*": strategy})
    np.testing.assert_array_equal(module.forward.run(i=i, x=x)["y"], interp.run(graph, i=i, x=x)["y"])


@pytest.mark.parametrize("strategy", ["privatized", "segmented"])
def test_nan_wins_and_infinities_stay(strategy: str) -> None:
    x = np.array([[1.0], [np.nan], [5], [-np.inf], [np.inf], [2], [np.nan], [-7]], np.float32)
    i = np.array([0, 0, 0, 1, 2, 2, 3, 3])
    for name, want in (
        ("scatter_amax", [np.nan, -np.inf, np.inf, np.nan, -np.inf]),
        ("scatter_amin", [np.nan, -np.inf, 2, np.nan, np.inf]),
    ):
        graph = gradc.trace(
            lambda i, x, name=name: getattr(ops, name)(ops.reshape(i, (-1, 1)), x, axis=0, size=5),
            i="i64[N]",
            x="f32[N,1]",
        )
        module = gradc.compile(graph, reductions={"*": strategy})
        np.testing.assert_array_equal(module.forward.run(i=i, x=x)["y"][:, 0], np.array(want, np.float32))
        np.testing.assert_array_equal(interp.run(graph, i=i, x=x)["y"][:, 0], np.array(want, np.float32))


def test_a_combine_that_is_none_is_refused() -> None:
    program = gradc.compile(
        gradc.trace(lambda i, x: ops.scatter_amax(i, x, axis=0, size=5), i="i64[N]", x="f32[N]")
    ).forward.program
    wrong = parse_program(str(program).replace('combine="max"', 'combine="median"'))
    with pytest.raises(TypeRuleError, match="combines by 'median'; there are sum, prod, max, min"):
        verify_program(wrong)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_reduce_on_any_axis(reduce: str, include_self: bool, dim: int) -> None:
    rng = np.random.default_rng(12)
    draws = {"normal": rng.standard_normal, "ties and zeros": lambda shape: rng.integers(0, 3, shape).astype(float)}
    for what, draw in draws.items():
        arrays = {"x": draw((3, 4, 5)), "i": rng.integers(0, 3, (3, 4, 5)), "s": draw((3, 4, 5))}
        if what != "normal" and not include_self and reduce in ("amax", "amin"):
            continue  # torch counts the element that it leaves out as a winner too
        same_as_torch(
            lambda x, i, s: ops.scatter_reduce(x, dim, i, s, reduce, include_self),
            lambda x, i, s: torch.scatter_reduce(x, dim, i, s, reduce, include_self=include_self),
            arrays,
            f"{what} {reduce} {include_self} {dim}",
            compiled=dim == 1 and include_self,
        )


def test_ties_of_a_scattered_maximum_share() -> None:
    """As torch's scatter_reduce has it: winners that are equal get equal parts of the gradient."""
    arrays = {"x": np.full(4, -1.0), "i": np.array([2, 0, 2, 2, 0]), "s": np.array([3.0, 1, 3, 2, 5])}
    for name in ("amax", "amin"):
        same_as_torch(
            lambda x, i, s, name=name: ops.scatter_reduce(x, 0, i, s, name),
            lambda x, i, s, name=name: x.scatter_reduce(0, i, s, name),
            arrays,
            name,
        )
    both = differentiate(
        traced(lambda i, s: ops.scatter_amax(i, s, axis=0, size=4), {k: arrays[k] for k in "is"}), ["s"]
    )
    got = interp.run(both, {"i": arrays["i"], "s": arrays["s"], "d.y": np.array([6.0, 7, 10, 8])})
    assert got["d.s"].tolist() == [5, 0, 5, 0, 6]


def test_an_element_that_is_left_out_is_no_winner() -> None:
    """x = [2], src = [2, 2], include_self=False: each src gets a half, and x nothing (torch gives a third to each)."""
    arrays = {"x": np.array([2.0, 7]), "i": np.array([0, 0]), "s": np.array([2.0, 2])}
    both = differentiate(traced(lambda x, i, s: ops.scatter_reduce(x, 0, i, s, "amax", False), arrays), ["x", "s"])
    got = interp.run(both, {**arrays, "d.y": np.array([6.0, 5])})
    assert got["d.x"].tolist() == [0, 5] and got["d.s"].tolist() == [3, 3]


# -- sparse gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(5, 40), (200, 30), (70000, 300), (9, 0), (9, 1)])
@pytest.mark.parametrize("padding", [None, 3])
def test_coalesced_rows_are_the_dense_gradient(size: int, count: int, padding: int | None) -> None:
    names = ("rows", "values", "count")
    graph = gradc.trace(
        lambda i, dy, like: dict(zip(names, coalesce(i, dy, like.shape[0], padding_idx=padding), strict=True)),
        i="i64[N]",
        dy="f64[N,4]",
        like="bool[V]",
    )
    rng = np.random.default_rng(13)
    given = {"i": rng.integers(0, size, count), "dy": rng.standard_normal((count, 4)), "like": np.zeros(size, bool)}
    dense = np.zeros((size, 4))
    keep = given["i"] != padding
    np.add.at(dense, given["i"][keep], given["dy"][keep])
    module = gradc.compile(graph)
    for got in (module.forward.run(**given), interp.run(graph, given)):
        n = int(got["count"])
        assert (
            got["rows"][:n].tolist() == sorted(set(given["i"][keep].tolist()))
            and (got["rows"][n:] == size).all()
            and not got["values"][n:].any()
        )
        np.testing.assert_allclose(got["values"][:n], dense[got["rows"][:n]], atol=1e-12)
    assert not [b for b in module.forward.program.of_kind("temp") if b.type.dtype.is_float]  # no dense [V, 4]


# -- padding of a table whose size is a symbol -------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [-1, -2, 3])
@pytest.mark.parametrize("name", ["embedding", "embedding_bag"])
def test_padding_counts_from_the_end_of_a_symbolic_table(name: str, padding_idx: int) -> None:
    op, theirs = getattr(ops, name), getattr(torch.nn.functional, name)
    options = {"mode": "sum"} if name == "embedding_bag" else {}
    graph = gradc.trace(lambda i, w: op(i, w, padding_idx=padding_idx, **options), i="u8[N,4]", w="f32[V,3]")
    assert gradc.parse(str(graph)) == graph
    module = gradc.compile(graph, wrt=["w"])
    rng = np.random.default_rng(4)
    for size in (300, 7, 4):  # beyond what the index dtype can name: no row is padding
        w, i = (
            rng.standard_normal((size, 3)).astype(np.float32),
            rng.integers(0, min(size, 256), (6, 4)).astype(np.uint8),
        )
        y, residuals = module.forward(i=i, w=w)
        weight = torch.tensor(w, requires_grad=True)
        want = theirs(torch.tensor(i).long(), weight, padding_idx=padding_idx, **options)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        want.backward(torch.tensor(dy))
        np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(module.backward(residuals, dy)["w"], weight.grad.numpy(), rtol=1e-6, atol=1e-6)
    small = np.ones((-padding_idx - 1 if padding_idx < 0 else padding_idx, 3), np.float32)
    with pytest.raises(InvalidProblem, match=rf"assume\(V >= {-padding_idx if padding_idx < 0 else padding_idx + 1}\)"):
        module.forward(i=np.zeros((6, 4), np.uint8), w=small)
