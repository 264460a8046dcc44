"""gradc.step: loss, gradients and update as one program; what it writes, what it leaves, what it refuses."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies

import gradc
from gradc import knobs, ops, optim
from gradc.cli import main
from gradc.errors import GradcError, IndexOutOfRange, InvalidProblem, NotDifferentiable, TypeRuleError, Unsupported
from gradc.ir.kernel import Call
from gradc.optim.step_graph import step_graph
from gradc.runtime.host import pool

TARGETS = ("numpy", "cpu", "cuda-sim")
Trees = dict[str, Any]


def perceptron(p: Any, x: Any, t: Any) -> Any:
    return ops.mean((ops.tanh(x @ p["w"][0] + p["b"]) @ p["w"][1] - t) ** 2.0)


def weights(dtype: Any = np.float64) -> Trees:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
    return {"w": (normal(4, 8), normal(8, 2)), "b": normal(8)}


def batch(seed: int, rows: int, dtype: Any = np.float64) -> Trees:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 4)).astype(dtype), "t": rng.standard_normal((rows, 2)).astype(dtype)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_trains_as_torchs(target: str) -> None:
    """In place, at any batch size, with a rate that differs in each step."""
    torch = pytest.importorskip("torch")
    step = gradc.step(perceptron, optim.adamw(0.1), target=target)
    parameters = weights()
    arrays = [*parameters["w"], parameters["b"]]
    theirs = [torch.from_numpy(x.copy()).requires_grad_() for x in arrays]
    adamw = torch.optim.AdamW(theirs, lr=0.1)
    state = step.init(parameters)
    kept = {name: x for name, x in state.items() if name != "step"}
    for i, rows in enumerate((5, 5, 3, 9)):
        given, rate = batch(i, rows), 0.1 / (i + 1)
        loss, parameters, state = step(parameters, state, lr=rate, **given)
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        w, v, b = theirs
        wanted = ((torch.tanh(torch.from_numpy(given["x"]) @ w + b) @ v - torch.from_numpy(given["t"])) ** 2).mean()
        wanted.backward()
        adamw.step()
        np.testing.assert_allclose(loss, wanted.item(), rtol=1e-12)
    assert isinstance(parameters["w"], tuple)
    for mine, array, other in zip((*parameters["w"], parameters["b"]), arrays, theirs, strict=True):
        assert np.shares_memory(mine, array)
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-11, atol=1e-13)
    assert all(np.shares_memory(state[name], x) for name, x in kept.items()) and state["step"] == 4


def test_without_donation_nothing_given_is_written() -> None:
    step = gradc.step(perceptron, optim.adam(0.1), donate=False, target="cpu")
    parameters = weights()
    state = step.init(parameters)
    before = copy.deepcopy((parameters, state))
    step(parameters, state, **batch(0, 5))
    assert _same_bits((parameters, state), before)


@pytest.mark.parametrize("optimizer", [optim.adafactor(), optim.adamw(), optim.sgd(momentum=0.9)])
def test_everything_is_written_where_it_lies(optimizer: optim.Optimizer) -> None:
    """Also where a penalty, or a mean, reads a parameter in the kernel that updates it, or after."""

    def loss(p: Any, x: Any, t: Any) -> Any:
        return perceptron(p, x, t) + 0.1 * ops.sum(p["b"] * ops.flip(p["b"], axis=0)) + ops.sum(p["w"][1] ** 2.0)

    found = []
    for donate in (True, False):
        step = gradc.step(loss, optimizer, target="cpu", donate=donate, clip_norm=1.0)
        parameters = weights()
        state = step.init(parameters)
        for i in range(3):
            given = [*parameters["w"], parameters["b"], *(x for name, x in state.items() if name != "step")]
            _, parameters, state = step(parameters, state, **batch(i, 5))
            new = [*parameters["w"], parameters["b"], *(x for name, x in state.items() if name != "step")]
            assert all(np.shares_memory(a, b) == donate for a, b in zip(given, new, strict=True))
        found.append((parameters, state))
    assert _same_bits(*found)


def test_a_list_of_names_gives_a_dict_and_a_graph_its_inputs() -> None:
    fn = lambda w, b, x: {"loss": ops.mean((x @ w + b) ** 2.0), "rows": ops.cast(ops.sum(x * 0.0), "i64")}
    graph = gradc.trace(fn, w="f64[4,2]", b="f64[2]", x="f64[N,4]")
    x = batch(0, 5)["x"]
    found = []
    for each in (fn, graph):
        step = gradc.step(each, optim.sgd(0.1), ["b", "w"], target="cpu")
        parameters = {"w": np.ones((4, 2)), "b": np.ones(2)}
        value, parameters, state = step(parameters, step.init(parameters), x=x)
        assert value.keys() == {"loss", "rows"} and parameters.keys() == {"w", "b"} and state.keys() == {"step"}
        found.append(parameters)
    assert _same_bits(*found)
    g = 2 * (x.sum(1, keepdims=True) + 1) / 10
    np.testing.assert_allclose(found[0]["b"], 1 - 0.1 * np.broadcast_to(g.sum(0), 2), rtol=1e-12)


def test_an_output_may_be_called_like_a_parameter() -> None:
    graph = gradc.trace(lambda y, x: ops.sum(y * x), y="f64[3]", x="f64[3]")
    step = gradc.step(graph, optim.sgd(1.0), "y", target="cpu")
    loss, y, _ = step(np.ones(3), {"step": 0}, x=np.arange(3.0))
    assert loss == 3 and y.tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (lambda n: {"state": {"n": n}}, "state_n"),
        (lambda n: {"w": {"n": n}}, "w_n"),
        (lambda n: {"w.rows": n}, "w_rows"),
        (lambda n: {"state.n": n, "state_n": n + 1}, "state_n_2"),
        (lambda n: {"w": n, "w_2": n + 1}, "w_3"),
    ],
)
def test_an_output_may_be_called_like_a_part_of_the_state(extra: Any, name: str) -> None:
    graph = gradc.trace(lambda w, x: {"loss": ops.sum(w * x), **extra(ops.cast(x, "i64"))}, w="f64[3]", x="f64[3]")
    step = gradc.step(graph, optim.sgd(1.0), "w", target="numpy")
    value, w, state = step(np.ones(3), {"step": 0}, x=np.arange(3.0))
    assert value["loss"] == 3 and value[name].tolist() == [0, 1, 2]
    assert w.tolist() == [1, 0, -1] and state == {"step": 1}


def test_a_parameter_that_the_loss_does_not_read_may_stay() -> None:
    fn = lambda p, x: ops.sum(p["a"] * x)
    step = gradc.step(fn, optim.sgd(1.0), unused="zeros", target="numpy")
    _, new, _ = step({"a": np.ones(3), "b": np.ones(2)}, {"step": 0}, x=np.arange(3.0))
    assert new["a"].tolist() == [1, 0, -1] and new["b"].tolist() == [1, 1]


def test_torch_knows_that_rows_were_written() -> None:
    torch = pytest.importorskip("torch")
    step = gradc.step(lambda w, i: ops.sum(ops.embedding(i, w)), optim.adagrad(0.1), sparse="w")
    w = torch.nn.Parameter(torch.ones(3, 2))
    state = step.init(w)
    of_table, of_state = (w * w).sum(), (state["sum.w"].requires_grad_() ** 2.0).sum()
    state["sum.w"] = state["sum.w"].detach()
    step(w, state, i=torch.tensor([1]))
    for each in (of_table, of_state):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.backward()


def test_tensors_that_require_grad() -> None:
    torch = pytest.importorskip("torch")
    step = gradc.step(lambda w, x: ops.sum(w * x), optim.adamw(0.1))
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    state = step.init(w)
    assert state["mean.w"].dtype == torch.float32
    _, new, state = step(w, state, x=torch.ones(3, dtype=torch.bfloat16))
    assert new.data_ptr() == w.data_ptr() and isinstance(state["square.w"], torch.Tensor)
    assert w.detach().tolist() == torch.tensor([0.899]).bfloat16().tolist() * 3


# -- rows --------------------------------------------------------------------------------------------------------------


def bag(p: Any, i: Any, t: Any) -> Any:
    return ops.mean((ops.sum(ops.embedding(i, p["table"]), axis=1) @ p["w"] - t) ** 2.0)


def tables() -> Trees:
    rng = np.random.default_rng(0)
    return {"table": rng.standard_normal((30, 4)), "w": rng.standard_normal((4, 2))}


def looked_up(seed: int) -> Trees:
    rng = np.random.default_rng(seed)
    return {"i": rng.integers(0, 25, (6, 3)), "t": rng.standard_normal((6, 2))}


@pytest.mark.parametrize(
    ("optimizer", "target"),
    [
        (optim.sgd(0.1), "cpu"),
        (optim.adagrad(0.1), "numpy"),
        *((optim.rowwise_adagrad(0.1), target) for target in TARGETS),
    ],
)
def test_rows_alone_are_what_the_whole_table_would_be(optimizer: optim.Optimizer, target: str) -> None:
    """What no index names is not read: it may be NaN."""
    found = []
    for sparse in ((), "p.table"):
        step = gradc.step(bag, optimizer, sparse=sparse, target=target, clip_norm=2.0)
        parameters = tables()
        state = step.init(parameters)
        if sparse:
            parameters["table"][25:] = np.nan
            for name, x in state.items():
                if name.endswith(".table"):
                    x[25:] = np.nan
        for seed in range(5):
            _, parameters, state = step(parameters, state, **looked_up(seed))
        found.append((parameters, state))
    (dense, whole), (sparse_, rows) = found
    for name, x in {**dense, **whole}.items():
        y = {**sparse_, **rows}[name]
        if name.endswith("table"):
            assert np.isnan(y[25:]).all()
            x, y = x[:25], y[:25]
        np.testing.assert_allclose(y, x, rtol=1e-12)


READS = {
    "padded": lambda i, w: ops.embedding(i, w, padding_idx=1),
    "skipped and by frequency": lambda i, w: ops.embedding(i, w, oob="skip", scale_grad_by_freq=True),
    "wrapped and padded": lambda i, w: ops.embedding(i, w, oob="wrap", padding_idx=-1),
    "bags": lambda i, w: ops.embedding_bag(i, w, mode="mean"),
    "twice": lambda i, w: ops.embedding(i, w) * 2.0 + ops.tanh(ops.embedding(i, w)),
}


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("read", READS)
def test_rows_however_a_table_is_read(read: str, rows: int) -> None:
    def loss(w: Any, i: Any, g: Any) -> Any:
        return ops.sum(READS[read](i, w) * g)

    rng = np.random.default_rng(rows)
    low, high = (-3, 14) if read.startswith(("skipped", "wrapped")) else (0, 11)
    i = rng.integers(low, high, (rows, 3))
    shape = (rows, 4) if read == "bags" else (rows, 3, 4)
    table, g = rng.standard_normal((11, 4)), rng.standard_normal(shape)
    found = []
    for sparse in ((), "w"):
        step = gradc.step(loss, optim.adagrad(0.1), sparse=sparse, clip_norm=0.5, target="numpy")
        found.append(step(table.copy(), step.init(table), i=i, g=g)[1:])
    (dense, whole), (sparse_, own) = found
    np.testing.assert_allclose(sparse_, dense, rtol=1e-12)
    np.testing.assert_allclose(own["sum.w"], whole["sum.w"], rtol=1e-12)


def test_rows_of_a_table_of_rank_3_with_one_gradient_for_a_row() -> None:
    """Repeated along the first axis of a row, as a bag's is for each of its indices."""
    rng = np.random.default_rng(0)
    table, i, g = rng.standard_normal((5, 2, 3)), np.array([4, 0, 4]), rng.standard_normal((3, 3))
    step = gradc.step(
        lambda w, i, g: ops.sum(ops.sum(ops.gather(w, i), axis=1) * g), optim.sgd(1.0), sparse="w", target="numpy"
    )
    wanted = table.copy()
    np.subtract.at(wanted, i, g[:, None])
    np.testing.assert_allclose(step(table, step.init(table), i=i, g=g)[1], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", ["0", "L"])
def test_bags_of_no_index_change_no_row(width: str, target: str) -> None:
    loss = lambda w, i, g: ops.sum(ops.embedding_bag(i, w, mode="sum") * g)
    graph = gradc.trace(loss, w="f64[5,3]", i=f"i64[B,{width}]", g="f64[B,3]")
    step = gradc.step(graph, optim.adagrad(0.1), "w", sparse="w", target=target)
    start = np.random.default_rng(0).standard_normal((5, 3))
    table = start.copy()
    for bags in (4, 0):
        value, table, _ = step(table, step.init(table), i=np.zeros((bags, 0), np.int64), g=np.ones((bags, 3)))
        assert value == 0
        np.testing.assert_array_equal(table, start)


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_rows_are_as_torchs_sparse_steps(name: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[name]
    eps = {} if name == "sgd" else {"eps": 1e-100}  # which SparseAdam adds before its correction of the square
    step = gradc.step(bag, getattr(optim, name)(0.1, **eps), ["p"], sparse=["p.table"], target="cpu")
    table, w = (torch.from_numpy(x).requires_grad_() for x in tables().values())
    optimizer = theirs([table], lr=0.1, **eps)
    parameters = {"p": tables()}
    state = step.init(parameters)
    for seed in range(5):
        given = looked_up(seed)
        parameters["p"]["w"] = tables()["w"]  # the table alone learns
        _, parameters, state = step(parameters, state, **given)
        i, t = torch.from_numpy(given["i"]), torch.from_numpy(given["t"])
        optimizer.zero_grad()
        ((torch.nn.functional.embedding(i, table, sparse=True).sum(1) @ w - t) ** 2).mean().backward()
        optimizer.step()
        np.testing.assert_allclose(parameters["p"]["table"], table.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("optimizer", [optim.adamw(0.1, amsgrad=True), optim.lion(0.1), optim.sgd(0.1, momentum=0.9)])
def test_rows_are_written_where_they_lie(optimizer: optim.Optimizer, target: str) -> None:
    """With their state, of 16 bits with master weights, to the bits of steps that leave alone what they are given."""
    loss = lambda w, i, g: ops.sum(ops.cast(ops.embedding(i, w, padding_idx=3), "f32") * g)
    rng = np.random.default_rng(0)
    start = rng.standard_normal((20, 3)).astype(ml_dtypes.bfloat16)
    found = []
    for donate in (True, False):
        step = gradc.step(loss, optimizer, sparse="w", donate=donate, master_weights=True, target=target)
        w, state = start.copy(), step.init(start)
        for seed in range(3):
            i = np.random.default_rng(seed).integers(0, 20, 8)
            given, before = {"w": w, **state}, copy.deepcopy({"w": w, **state})
            _, w, state = step(w, state, i=i, g=np.ones((8, 3), np.float32))
            others = np.setdiff1d(np.arange(20), np.setdiff1d(i, [3]))
            for name, new in {"w": w, **state}.items():
                if name != "step":
                    assert np.shares_memory(new, given[name]) == donate, name
                    assert new[others].tobytes() == before[name][others].tobytes()
            assert donate or _same_bits(given, before)
        found.append({"w": w, **state})
    assert _same_bits(*found) and found[0]["w"].tobytes() != start.tobytes()


def test_a_table_that_cannot_be_written_is_copied() -> None:
    """A read-only one, one in Fortran order, and one that another argument lies in."""
    step = gradc.step(lambda w, i, g: ops.sum(ops.embedding(i, w) * g), optim.adagrad(0.1), sparse="w", target="cpu")
    start, g, i = np.random.default_rng(0).standard_normal((9, 4)), np.ones((3, 4)), np.array([8, 1, 8])
    wanted = step(start.copy(), step.init(start), i=i, g=g)[1]
    fixed, inside = start.copy(), start.copy()
    fixed.flags.writeable = False
    for table, other in ((fixed, g), (np.asfortranarray(start), g), (inside, inside[:3])):
        before = table.copy()
        _, new, _ = step(table, step.init(table), i=i, g=other)
        assert np.array_equal(table, before) and not np.shares_memory(new, table)
        assert other is not g or new.tobytes() == wanted.tobytes()
        assert new[2].tobytes() == before[2].tobytes()


@pytest.mark.parametrize("read", ["padded", "wrapped and padded", "skipped"])
@hypothesis.given(data=strategies.data())
@hypothesis.settings(deadline=None, max_examples=30)
def test_rows_for_any_indices(read: str, data: Any) -> None:
    """None at all, all the same, negative ones where they mean something: as torch on the gradient of the whole table,
    whose Adagrad changes no row of a zero gradient, and the rows of SparseAdam.
    """
    torch = pytest.importorskip("torch")
    low, high = (0, 6) if read == "padded" else (-9, 15)
    i = np.array(data.draw(strategies.lists(strategies.integers(low, high), max_size=12)), np.int64)
    name = data.draw(strategies.sampled_from(["adagrad", "adam"]))
    step = _any_step(read, name)
    rng = np.random.default_rng(len(i))
    table, g = rng.standard_normal((7, 5)), rng.standard_normal((len(i), 5))
    state = step.init(table)
    theirs = torch.from_numpy(table.copy()).requires_grad_()
    kind = torch.optim.Adagrad if name == "adagrad" else torch.optim.SparseAdam
    optimizer = kind([theirs], lr=0.1, eps=1e-100)
    new = table
    for _ in range(2):
        _, new, state = step(new, state, i=i, g=g)
        there = (i >= 0) & (i < 7) if read == "skipped" else np.ones(len(i), bool)
        at = torch.from_numpy(i[there] % 7)
        padding = {"padded": 2, "wrapped and padded": 6}.get(read)
        rows = torch.nn.functional.embedding(at, theirs, padding_idx=padding, sparse=True)
        optimizer.zero_grad()
        (rows * torch.from_numpy(g[there])).sum().backward()
        if padding is not None:  # SparseAdam moves by its momentum the row of padding, too, of a gradient of zero
            gradient = theirs.grad.coalesce()
            kept = gradient.indices()[0] != padding
            theirs.grad = torch.sparse_coo_tensor(gradient.indices()[:, kept], gradient.values()[kept], (7, 5))
        optimizer.step()
        np.testing.assert_allclose(new, theirs.detach().numpy(), rtol=1e-12, atol=1e-14)
    assert new is table or np.shares_memory(new, table)


@functools.cache
def _any_step(read: str, name: str) -> Any:
    how = {
        "padded": lambda i, w: ops.embedding(i, w, padding_idx=2),
        "wrapped and padded": lambda i, w: ops.embedding(i, w, oob="wrap", padding_idx=-1),
        "skipped": lambda i, w: ops.embedding(i, w, oob="skip"),
    }[read]
    graph = gradc.trace(lambda w, i, g: ops.sum(how(i, w) * g), w="f64[7,5]", i="i64[N]", g="f64[N,5]")
    return gradc.step(graph, getattr(optim, name)(0.1, eps=1e-100), "w", sparse="w", target="cpu")


def test_the_kernel_that_computes_rows_stores_them() -> None:
    """Table and state in one kernel; nothing else goes over the table, and nothing is as large."""
    graph = gradc.trace(lambda w, i, g: ops.sum(ops.embedding(i, w) * g), w="f32[V,8]", i="i64[N]", g="f32[N,8]")
    with knobs.VALIDATE.set("1"):
        program = gradc.step(graph, optim.adam(), "w", sparse="w").compile("cpu").forward.program
    stores = [k for k in program.kernels if any(s.op == "store" and s.where for s in k.body)]
    assert len(stores) == 1 and set(stores[0].writes) == {dict(program.outputs)[n] for n in _IN_PLACE}
    assert [name for k in program.kernels for name in program.copied(k)[:1]] == _IN_PLACE
    others = [b for b in program.of_kind("temp") if "V" in str(b.type)]
    assert not others and not any(isinstance(s, Call) and s.op == "put_rows" for s in program.steps)


_IN_PLACE = ["w", "state.mean.w", "state.square.w"]


@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_are_made_of_other_rows(target: str) -> None:
    """A kernel that reads a table elsewhere than it stores it would read what it has stored: a call stores the rows."""

    def moved(w: Any, rows: Any) -> Any:
        return ops.put_rows.plain(w, rows, ops.gather(w, rows + 1, oob="wrap") * 2.0)

    module = gradc.compile(gradc.trace(moved, w="f64[V,3]", rows="i64[N]"), (), target, donate=["w"])
    w = np.arange(15.0).reshape(5, 3)
    wanted = w.copy()
    wanted[[0, 1, 4]] = 2 * w[[1, 2, 0]]
    new = module(w=w, rows=np.array([0, 1, 4, 5, 5]))
    assert np.array_equal(new, wanted) and np.shares_memory(new, w)


def test_a_table_in_a_file_is_written_where_it_lies(tmp_path: Path) -> None:
    """And its state; of a file that is only read, what a call gives is an array."""
    graph = gradc.trace(lambda w, i, g: ops.sum(ops.embedding(i, w) * g), w="f32[V,8]", i="i64[N]", g="f32[N,8]")
    module = gradc.compile(graph, ["w"], "cpu", update={"w": optim.rowwise_adagrad(0.1)}, sparse="w")
    rng = np.random.default_rng(0)
    start, i = rng.standard_normal((5000, 8)).astype(np.float32), np.array([4999, 7, 7])
    more = {"i": i, "g": rng.standard_normal((3, 8)).astype(np.float32), "state.step": np.array(0)}
    wanted = module(w=start.copy(), **{"state.sum.w": np.zeros(5000, np.float32)}, **more)
    files = {name: tmp_path / name for name in ("w", "state.sum.w")}
    start.tofile(files["w"])
    np.zeros(5000, np.float32).tofile(files["state.sum.w"])
    shapes = {"w": (5000, 8), "state.sum.w": (5000,)}
    for mode in ("r", "r+"):
        before = {name: file.read_bytes() for name, file in files.items()}
        mapped = {name: np.memmap(files[name], np.float32, mode, shape=shape) for name, shape in shapes.items()}
        out = module(**mapped, **{**more, "state.step": np.array(0)})
        for name, file in files.items():
            np.testing.assert_array_equal(out[name], wanted[name])
            assert np.shares_memory(out[name], mapped[name]) == (mode == "r+")
            mapped[name].flush()
            assert file.read_bytes() == (before[name] if mode == "r" else wanted[name].tobytes())


def test_adafactor_has_no_step_of_rows() -> None:
    with pytest.raises(Unsupported, match=r"adafactor of rows of 'p\.table'"):
        step = gradc.step(bag, optim.adafactor(), sparse="p.table", target="numpy")
        step(tables(), step.init(tables()), **looked_up(0))


# -- a call that fails -------------------------------------------------------------------------------------------------


def computed(p: Any, x: Any, k: Any) -> Any:
    """Gradients of w need no lookup, and the index is computed."""
    return (
        ops.sum(p["w"] * x) + ops.sum(ops.embedding(ops.cast(ops.floor(k * 2.0), "i64"), p["table"])) + ops.sum(p["v"])
    )


@pytest.mark.parametrize("sparse", [(), ("p.table",)])
@pytest.mark.parametrize("target", TARGETS)
def test_an_index_out_of_range_changes_nothing(target: str, sparse: Any) -> None:
    step = gradc.step(computed, optim.adamw(0.1), target=target, sparse=sparse)
    parameters = {"w": np.ones(100), "table": np.ones((7, 3)), "v": np.ones(3)}
    state = step.init(parameters)
    good, bad = np.array([0.0, 1.5]), np.array([0.0, 9.5])
    _, parameters, state = step(parameters, state, x=np.arange(100.0), k=good)
    before = copy.deepcopy((parameters, state))
    with pytest.raises(IndexOutOfRange, match="position 1"):
        step(parameters, state, x=np.arange(100.0), k=bad)
    assert _same_bits((parameters, state), before)
    step(parameters, state, x=np.arange(100.0), k=good)
    assert not np.array_equal(parameters["w"], before[0]["w"])


def _bad(change: Any) -> Any:
    """A call with something wrong in it."""

    def call(step: Any, parameters: Trees, state: Trees) -> Any:
        given = {"parameters": parameters, "state": state, "batch": batch(0, 5), "lr": None}
        change(given)
        return step(given["parameters"], given["state"], given["batch"], lr=given["lr"])

    return call


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (_bad(lambda c: c["state"].update({"mean.p.b": np.zeros(9)})), r"state\.mean\.p\.b is f64\[8\]: axis 0 is 9"),
        (_bad(lambda c: c["state"].update({"mean.p.b": np.zeros(8, "f4")})), r"state\.mean\.p\.b is f64\[8\], got"),
        (_bad(lambda c: c["state"].pop("mean.p.b")), r"needs the input 'state\.mean\.p\.b'"),
        (_bad(lambda c: c["state"].update({"sum.p.b": np.zeros(8)})), r"has no input 'state\.sum\.p\.b'"),
        (_bad(lambda c: c.update(state=[])), "the state is a list"),
        (_bad(lambda c: c.update(lr=float("nan"))), "lr=nan: a finite number from 0"),
        (_bad(lambda c: c.update(lr="much")), "lr='much'"),
        (_bad(lambda c: c.update(lr=10**400)), "lr=an integer of 1329 bits: a finite number from 0"),
        (_bad(lambda c: c["batch"].update(p=weights())), "'p' is among the parameters"),
        (
            _bad(lambda c: c["state"].update({"mean.p.b": c["parameters"]["b"]})),
            r"p\.b and state\.mean\.p\.b share memory",
        ),
        (
            _bad(lambda c: c["state"].update({"square.p.b": c["parameters"]["b"].view()})),
            r"p\.b and state\.square\.p\.b share memory",
        ),
        (
            _bad(lambda c: c["parameters"].update(b=c["parameters"]["w"][0][1])),
            r"p\.w\.0 and p\.b share memory",
        ),
        (
            _bad(lambda c: c["parameters"].update(b=np.lib.stride_tricks.as_strided(np.ones(1), (8,), (0,)))),
            r"elements of p\.b share memory: its shape is \(8,\), and its strides in bytes are \(0,\)",
        ),
        (_bad(lambda c: c["state"].update(step=-1)), "the state's step is -1: "),
        (_bad(lambda c: c["state"].update(step=np.array(1 << 53))), "the state's step is 9007199254740992: .* below 2"),
        (_bad(lambda c: c["parameters"].update(b=np.zeros(7))), "shapes do not broadcast: 8 and "),
    ],
)
def test_a_wrong_argument_changes_nothing(call: Any, what: str) -> None:
    step = gradc.step(perceptron, optim.adam(0.1), target="cpu")
    parameters = weights()
    _, parameters, state = step(parameters, step.init(parameters), **batch(0, 5))
    before = copy.deepcopy((parameters, state))
    error = TypeRuleError if what.startswith("shapes") else InvalidProblem
    with pytest.raises(error, match=what):
        call(step, dict(parameters), dict(state))
    assert _same_bits((parameters, state), before)


def test_tied_weights_and_tables_are_refused_however_they_are_tied() -> None:
    torch = pytest.importorskip("torch")
    step = gradc.step(lambda p, x: ops.sum(ops.tanh(x @ p["e"]) @ p["h"]), optim.sgd(0.1))
    w = torch.nn.Parameter(torch.ones(3, 3))
    for other in (w, w.detach(), w.T):
        with pytest.raises(InvalidProblem, match=r"p\.e and p\.h share memory"):
            step({"e": w, "h": other}, {"step": 0}, x=torch.ones(2, 3))
    step = gradc.step(lambda w, i: ops.sum(ops.embedding(i, w)), optim.adagrad(0.1), sparse="w")
    table = torch.ones(1, 3).expand(7, 3)
    with pytest.raises(InvalidProblem, match=r"elements of w share memory"):
        step(table, {"step": 0, "sum.w": torch.zeros(7, 3)}, i=torch.tensor([1]))
    assert table[0].tolist() == [1, 1, 1] and w.tolist() == [[1] * 3] * 3


def test_columns_of_one_array_are_two_parameters() -> None:
    """Interleaved views share no byte; nor do equal numbers."""
    both = np.ones((3, 2))
    step = gradc.step(lambda p, x: ops.sum(p["a"] * x) - ops.sum(p["b"]) + p["c"] * p["d"], optim.sgd(1.0))
    half = 0.5
    parameters = {"a": both[:, 0], "b": both[:, 1], "c": half, "d": half}
    _, new, _ = step(parameters, {"step": 0}, x=np.arange(3.0))
    assert new["a"].tolist() == [1, 0, -1] and new["b"].tolist() == [2] * 3 and new["c"] == new["d"] == 0


@pytest.mark.parametrize("sparse", ["", "p.e"])
def test_parameters_and_state_stay_in_their_library(sparse: str) -> None:
    torch = pytest.importorskip("torch")
    fn = lambda p, i, x: ops.sum(ops.embedding(i, p["e"]) @ p["w"] * x)
    step = gradc.step(fn, optim.adam(0.1), sparse=[sparse] if sparse else ())
    numpys = {"e": np.ones((5, 2)), "w": np.ones((2, 3))}
    state = step.init(numpys)
    _, new, after = step(numpys, state, i=np.array([1]), x=torch.ones(1, 3, dtype=torch.float64))
    for mine, given in zip((*new.values(), *after.values()), (*numpys.values(), *state.values()), strict=True):
        assert isinstance(mine, np.ndarray) and (isinstance(given, int) or np.shares_memory(mine, given))
    tensors = {name: torch.from_numpy(x) for name, x in numpys.items()}
    state = step.init(tensors)
    _, new, after = step(tensors, state, i=np.array([1]), x=np.ones((1, 3)))
    assert all(isinstance(x, torch.Tensor) for x in (*new.values(), *after.values()))


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda: gradc.step(perceptron, "adam"), InvalidProblem, "an optimizer of gradc.optim, not a str"),
        (lambda: gradc.step(3, optim.adam()), InvalidProblem, "no function .* 3 is not a callable"),
        (lambda: optim.sgd(10**400), InvalidProblem, "sgd: lr=an integer of 1329 bits"),
        (lambda: optim.adam(maximize="False"), InvalidProblem, "adam: maximize='False': True or False"),
        (lambda: optim.adam(amsgrad=1), InvalidProblem, "adam: amsgrad=1: True or False"),
        (lambda: optim.sgd(momentum=0.9, nesterov="no"), InvalidProblem, "sgd: nesterov='no': True or False"),
        (lambda: optim.adafactor(beta2_decay=0.5), InvalidProblem, "beta2_decay=0.5: a finite number from -inf to 0$"),
        (
            lambda: gradc.step(perceptron, optim.adam()).init({"w": np.ones(3, int)}),
            InvalidProblem,
            r"p\.w is i64\[3\]",
        ),
        (lambda: gradc.step(perceptron, optim.adam()).init(True), InvalidProblem, r"p is bool\[\]: adam updates"),
        (
            lambda: gradc.step(perceptron, optim.adam()).graph,
            TypeRuleError,
            r"of p, x, t are not known;.* gradc\.trace",
        ),
        (lambda: gradc.step(perceptron, optim.adam(), ["p", "p"]), InvalidProblem, "wrt names 'p' twice"),
        (lambda: gradc.step(perceptron, optim.adam(), "q"), InvalidProblem, "wrt names 'q'; there are p, x, t"),
        (lambda: gradc.step(perceptron, optim.adam(), clip_norm=float("nan")), InvalidProblem, "clip_norm=nan"),
        (lambda: _of(lambda w, lr: ops.sum(w * lr), w="f64[3]", lr="f64[3]"), InvalidProblem, "an input 'lr'"),
        (lambda: _of(lambda w, x: w * x, w="f64[3]", x="f64[3]"), InvalidProblem, r"one scalar float output.*f64\[3\]"),
        (lambda: _of(lambda w: ops.sum(ops.cast(w, "f32")), w="i32[3]"), InvalidProblem, r"w is i32\[3\]"),
        (lambda: _of(lambda w, x: ops.sum(x), w="f64[3]", x="f64[3]"), NotDifferentiable, "depends on 'w'"),
        (lambda: _of(lambda w: ops.sum(w), sparse=["x"], w="f64[3]"), InvalidProblem, "sparse names 'x'"),
        (lambda: _of(lambda w: ops.sum(w), sparse=["w"], w="f64[3]"), Unsupported, "no sparse form"),
    ],
)
def test_there_is_no_such_step(make: Any, error: type[GradcError], what: str) -> None:
    with pytest.raises(error, match=what):
        make()


def _of(fn: Any, sparse: Any = (), **types: str) -> Any:
    return step_graph(gradc.trace(fn, **types), {"w": optim.adam()}, sparse=sparse)


# -- gradc.compile(update=) --------------------------------------------------------------------------------------------


def test_a_module_of_a_step() -> None:
    """A table by rows, a layer whole, each with its rate; a gradient beside."""
    torch = pytest.importorskip("torch")
    fn = lambda table, w, b, i, t: ops.mean((ops.sum(ops.embedding(i, table), axis=1) @ w + b - t) ** 2.0)
    graph = gradc.trace(fn, table="f64[V,4]", w="f64[4,2]", b="f64[2]", i="i64[N,3]", t="f64[N,2]")
    update = {"table": optim.adagrad(0.1), "w": optim.adam()}
    module = gradc.compile(graph, ["table", "w", "b"], "cpu", update=update, sparse="table")
    assert set(module.graph.output_names) - set(module.graph.input_names) == {"y", "d.b"}
    arrays = {**tables(), "b": np.zeros(2), "state.step": np.zeros((), np.int64)}
    for name in ("sum.table", "mean.w", "square.w"):
        arrays[f"state.{name}"] = np.zeros_like(arrays[name.partition(".")[2]])
    theirs = {name: torch.from_numpy(arrays[name].copy()).requires_grad_() for name in ("table", "w", "b")}
    adagrad, adam = torch.optim.Adagrad([theirs["table"]], lr=0.1), torch.optim.Adam([theirs["w"]], lr=0.2)
    for seed in range(3):
        given = looked_up(seed)
        out = module(**arrays, **given, **{"lr.adam": np.array(0.2)})
        for x in theirs.values():
            x.grad = None
        i, t = torch.from_numpy(given["i"]), torch.from_numpy(given["t"])
        (((theirs["table"][i].sum(1) @ theirs["w"] + theirs["b"]) - t) ** 2).mean().backward()
        adagrad.step(), adam.step()
        np.testing.assert_allclose(out["d.b"], theirs["b"].grad.numpy(), rtol=1e-12)
        for name in arrays.keys() - {"b"}:
            assert np.shares_memory(out[name], arrays[name])
    for name in ("table", "w"):
        np.testing.assert_allclose(arrays[name], theirs[name].detach().numpy(), rtol=1e-11, atol=1e-13)


def test_a_module_of_a_step_refuses_before_it_writes() -> None:
    """State of another shape or dtype, an index out of range; one array for two is left as it is."""
    fn = lambda a, b, i: ops.sum(ops.embedding(i, a) * ops.embedding(i, b))
    graph = gradc.trace(fn, a="f32[7,3]", b="f32[7,3]", i="i64[N]")
    update = dict.fromkeys(("a", "b"), optim.rowwise_adagrad(0.1))
    module = gradc.compile(graph, ["a", "b"], "cpu", update=update, sparse=["a", "b"])

    def arrays() -> Trees:
        ones = {name: np.ones((7, 3), np.float32) for name in "ab"}
        sums = {f"state.sum.{name}": np.zeros(7, np.float32) for name in "ab"}
        return {**ones, **sums, "state.step": np.zeros((), np.int64), "i": np.array([1, 6])}

    for change, error in (
        ({"state.sum.a": np.zeros(8, np.float32)}, InvalidProblem),
        ({"state.sum.b": np.zeros(7)}, GradcError),
        ({"i": np.array([1, 7])}, IndexOutOfRange),
        *(({"lr": np.array(rate)}, InvalidProblem) for rate in (np.nan, np.inf, -1.0)),
    ):
        given = {**arrays(), **change}
        before = copy.deepcopy(given)
        with pytest.raises(error):
            module(**given)
        assert _same_bits(given, before)
    given = arrays()
    out = module(**{**given, "b": given["a"]})
    assert (given["a"] == 1).all() and (out["a"][[1, 6]] < 1).all() and out["a"].tobytes() == out["b"].tobytes()


RATES: dict[str, Any] = {
    "a float": 0.5,
    "an int": 1,
    "a NumPy scalar": np.float32(0.5),
    "an array": np.array(0.5),
    "an f32 array": np.array(0.5, np.float32),
    "a tensor": lambda torch: torch.tensor(0.5),
    "a tensor of ints": lambda torch: torch.tensor(1),
    "a bf16 tensor": lambda torch: torch.tensor(0.5, dtype=torch.bfloat16),
    "a tensor that requires grad": lambda torch: torch.tensor(0.5, requires_grad=True),
    "an item": lambda torch: torch.tensor(0.5).item(),
}
NO_RATES: dict[str, Any] = {
    "one with an axis": np.array([0.5]),
    "a tensor with an axis": lambda torch: torch.tensor([0.5]),
    "two": np.array([0.5, 0.5]),
    "a bool": True,
    "a tensor of a bool": lambda torch: torch.tensor(True),
    "a word": "0.5",
    "an array of a word": np.array("0.5"),
    "bytes": b"0.5",
    "NaN": np.float32(np.nan),
    "a tensor of NaN": lambda torch: torch.tensor(np.nan),
    "one below 0": np.array(-1.0),
    "a complex number": np.array(0.5j),
    "a narrow complex number": np.complex64(0.5 + 2j),
    "lists of other lengths": [[0.5], [0.5, 0.5]],
    "a complex tensor": lambda torch: torch.tensor(0.5j),
    "a tensor without memory": lambda torch: torch.tensor(0.5, device="meta"),
    "a huge int": 10**400,
}


def _rate(given: Any) -> Any:
    return given(pytest.importorskip("torch")) if callable(given) else given


def _learning(rate: Any) -> Any:
    """Three ways to give a rate: the arrays after a step of a loss whose gradient is 1."""
    w, x = np.ones(4, np.float32), np.ones(4, np.float32)
    module, step = _steps_of_one()
    yield lambda: module(w=w.copy(), x=x, lr=rate, **{"state.step": np.array(0)})["w"]
    yield lambda: step(w, {"step": 0}, x=x, lr=rate)[1]
    yield lambda: w - np.float32(optim.sgd(rate).lr)


@functools.cache
def _steps_of_one() -> Any:
    graph = gradc.trace(lambda w, x: ops.sum(w * x), w="f32[4]", x="f32[4]")
    module = gradc.compile(graph, ["w"], "cpu", update={"w": optim.sgd(3.0)})
    return module, gradc.step(graph, optim.sgd(3.0), "w", target="cpu", donate=False)


@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_a_number_in_any_form(name: str) -> None:
    rate = _rate(RATES[name])
    for call in _learning(rate):
        new = call()
        assert type(new) is np.ndarray and (new == np.float32(1 - float(rate))).all()


@pytest.mark.parametrize("name", NO_RATES)
def test_what_is_no_rate_is_refused(name: str) -> None:
    for call in _learning(_rate(NO_RATES[name])):
        with pytest.raises(InvalidProblem, match="a finite number from 0"):
            call()


def test_a_rate_on_a_gpu_that_requires_grad() -> None:
    """It has no __cuda_array_interface__ to be looked at: torch raises RuntimeError, not AttributeError."""
    torch = pytest.importorskip("torch")

    class OnDevice(torch.Tensor):  # type: ignore[misc, name-defined]
        is_cuda = True

    rate = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True).as_subclass(OnDevice)
    found = _steps_of_one()[0].with_rates({"lr": rate})["lr"]
    assert found.dtype is torch.float64 and not found.requires_grad and float(found) == 0.5


def test_rows_have_the_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    start, g = rng.standard_normal((5000, 16)).astype(np.float32), rng.standard_normal((60000, 16)).astype(np.float32)
    i = np.minimum(rng.zipf(1.3, 60000) - 1, 4999)  # one row has thousands of indices
    step = gradc.step(lambda w, i, g: ops.sum(ops.embedding(i, w) * g), optim.adam(0.1), sparse="w", target="cpu")
    found, threads = set(), pool.num_threads()
    try:
        for count in (1, 2, 5):
            pool.set_num_threads(count)
            w = start.copy()
            _, w, state = step(w, step.init(w), i=i, g=g)
            found.add((w.tobytes(), state["mean.w"].tobytes(), state["square.w"].tobytes()))
    finally:
        pool.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("update", "more", "error", "what"),
    [
        ({"x": optim.sgd()}, {}, InvalidProblem, "update names 'x', which is not in wrt: w, v"),
        ({"w": "sgd"}, {}, InvalidProblem, "it maps names of parameters to optimizers"),
        ([optim.sgd()], {}, InvalidProblem, "it maps names of parameters to optimizers"),
        ({3: optim.sgd()}, {}, InvalidProblem, "a name or a list of names"),
        ({}, {}, InvalidProblem, "by no parameter"),
        ({"w": optim.adafactor()}, {"sparse": "w"}, Unsupported, "adafactor of rows of 'w'"),
        ({"w": optim.sgd()}, {"sparse": "v"}, InvalidProblem, "sparse names 'v', which is not learned: w"),
        ({"w": optim.sgd(), "v": optim.sgd()}, {"sparse": "v"}, Unsupported, "no sparse form"),
        ({"w": optim.sgd()}, {"save": 3}, InvalidProblem, "save"),
    ],
)
def test_there_is_no_such_module(update: Any, more: Any, error: type[GradcError], what: str) -> None:
    fn = lambda w, v, i, x: ops.sum(ops.embedding(i, w) * v) + ops.sum(x)
    graph = gradc.trace(fn, w="f64[7,3]", v="f64[3]", i="i64[N]", x="f64[2]")
    with pytest.raises(error, match=what):
        gradc.compile(graph, ["w", "v"], "numpy", update=update, **more)


def test_a_parameter_under_two_names_is_refused() -> None:
    graph = gradc.trace(lambda p: ops.sum(p["a"] * p["b"]), p={"a": "f64[3]", "b": "f64[3]"})
    with pytest.raises(InvalidProblem, match=r"update names 'p\.a' twice"):
        gradc.compile(graph, ["p"], "numpy", update={"p": optim.sgd(), "p.a": optim.adam()})


def test_any_of_parameters_and_state_may_be_donated() -> None:
    """The kernel that computes the rows of several arrays stores those of the donated ones, and has computed the others
    before they are put.
    """
    graph = gradc.trace(lambda w, i: ops.sum(ops.tanh(ops.embedding(i, w))), w="f32[V,4]", i="i64[N]")
    step = gradc.step(graph, optim.rowwise_adagrad(0.1), "w", sparse="w").graph
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)

    def run(target: str, donate: Any) -> Trees:
        state = {"state.sum.w": np.ones(9, np.float32), "state.step": np.array(0)}
        out = gradc.compile(step, target=target, donate=donate)(w=table.copy(), i=np.array([1, 3, 3]), **state)
        return {name: np.asarray(x) for name, x in out.items()}

    wanted = run("cpu", ())
    for donate in (["w"], ["state.sum.w"], ["w", "state.sum.w"]):
        assert _same_bits(run("cpu", donate), wanted)
    np.testing.assert_allclose(wanted["w"], run("numpy", ())["w"], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [(optim.rowwise_adagrad(0.1), [(1, 0, 2)]), (optim.adafactor(), [(1, 0, 2), (0, 2, 1)]), (optim.adam(0.1), [])],
    ids=lambda x: type(x).__name__,
)
def test_a_step_does_not_depend_on_the_order_in_memory(optimizer: optim.Optimizer, refused: Any) -> None:
    """State of some axes of a parameter is not that of those which are stored in their place."""
    graph = gradc.trace(lambda w, x: ops.sum(w * x), w="f64[2,3,4]", x="f64[2,3,4]")
    w, x = np.random.default_rng(0).standard_normal((2, 2, 3, 4))

    def run(layout: Any, order: Any) -> Any:
        module = gradc.compile(graph, ["w"], "numpy", update={"w": optimizer}, layout=layout)
        state = {name: module.graph.input(name).type for name in module.graph.input_names if name.startswith("state.")}
        zeros = {name: np.zeros(t.concrete({}), t.dtype.np) for name, t in state.items()}
        return module(w=w.transpose(order).copy(), x=x, **zeros)["w"]

    wanted = run(None, (0, 1, 2))
    for order in ((1, 0, 2), (0, 2, 1)):
        if order in refused:
            with pytest.raises(Unsupported, match=rf"{type(optimizer).__name__} keeps state of some of its axes"):
                run({"w": order}, order)
        else:
            np.testing.assert_array_equal(run({"w": order}, order), wanted.transpose(order))


# -- C -----------------------------------------------------------------------------------------------------------------

MODEL = """
import gradc
from gradc import ops, optim
def loss(w1: "f32[4,8]", b1: "f32[8]", w2: "f32[8,2]", x: "f32[N,4]", t: "f32[N,2]"):
    return ops.mean((ops.tanh(x @ w1 + b1) @ w2 - t) ** 2.0)
step = gradc.step(loss, optim.adamw(lr=0.01), ["w1", "b1", "w2"])
"""
ROWS = """
import gradc
from gradc import ops, optim
def loss(table: "f32[V,8]", i: "i64[N]", g: "f32[N,8]"):
    return ops.sum(ops.tanh(ops.embedding(i, table)) * g)
step = gradc.step(loss, optim.rowwise_adagrad(lr=0.1), "table", sparse="table")
"""
ARRAYS = """
#include <stdio.h>
#include <stdlib.h>
#include "loss_step.h"
static void *array(const char *name, size_t bytes) {
  void *data = calloc(bytes + 64, 1);
  FILE *file = name ? fopen(name, "rb") : NULL;
  if (name && (!file || fread(data, 1, bytes, file) != bytes)) exit(3);
  if (file) fclose(file);
  return data;
}
#define IN_PLACE(name, file) in.name = out.name = array(file, (size_t)loss_step_bytes(m, loss_step_input_##name));
"""
DRIVER = """
int main(void) {
  loss_step_module *m;
  const loss_step_sizes sizes = { .N = 5 };
  if (loss_step_create(&m, &sizes)) return 2;
  const double lr = 0.01;
  float loss;
  loss_step_inputs in = { .x = array("x", 5 * 4 * 4), .t = array("t", 5 * 2 * 4), .lr = &lr };
  loss_step_outputs out = { .y = &loss };
  IN_PLACE(w1, "w1") IN_PLACE(b1, "b1") IN_PLACE(w2, "w2") IN_PLACE(state_step, NULL)
  IN_PLACE(state_mean_w1, NULL) IN_PLACE(state_mean_b1, NULL) IN_PLACE(state_mean_w2, NULL)
  IN_PLACE(state_square_w1, NULL) IN_PLACE(state_square_b1, NULL) IN_PLACE(state_square_w2, NULL)
  for (int i = 0; i < 20; i++)
    if (loss_step_forward(m, &in, &out)) { puts(loss_step_error(m)); return 1; }
  FILE *file = fopen("after", "wb");
  fwrite(out.w1, 4, 32, file), fwrite(out.b1, 4, 8, file), fwrite(out.w2, 4, 16, file), fwrite(&loss, 4, 1, file);
  fclose(file);
  loss_step_destroy(m);
  return 0;
}
"""


ROWS_DRIVER = """
int main(void) {
  loss_step_module *m;
  const loss_step_sizes sizes = { .V = 9, .N = 5 };
  if (loss_step_create(&m, &sizes)) return 2;
  const double lr = 0.1;
  float loss;
  int64_t *const i = array("i", 5 * 8);
  loss_step_inputs in = { .i = i, .g = array("g", 5 * 8 * 4), .lr = &lr };
  loss_step_outputs out = { .y = &loss };
  IN_PLACE(table, "table") IN_PLACE(state_step, NULL) IN_PLACE(state_sum_table, NULL)
  for (int step = 0; step < 20; step++)
    if (loss_step_forward(m, &in, &out)) { puts(loss_step_error(m)); return 1; }
  i[4] = 9;
  if (loss_step_forward(m, &in, &out) != loss_step_index_out_of_range) return 4;
  FILE *file = fopen("after", "wb");
  fwrite(out.table, 4, 9 * 8, file), fwrite(out.state_sum_table, 4, 9, file), fwrite(out.state_step, 8, 1, file);
  fclose(file);
  loss_step_destroy(m);
  return 0;
}
"""
built = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("make")), reason="an export is built by gcc and make"
)


@built
def test_a_table_trains_in_c(tmp_path: Path) -> None:
    """Its rows and their state, in place, to the bits of Python; a call with a bad index changes nothing."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((9, 8)).astype(np.float32)
    given = {"i": np.array([3, 0, 3, 8, 5]), "g": rng.standard_normal((5, 8)).astype(np.float32)}
    folder = _trained(tmp_path, ROWS, ("N=5", "V=9"), ROWS_DRIVER, {**given, "table": table}, 4)
    namespace: Trees = {}
    exec(ROWS, namespace)
    step = namespace["step"]
    state = step.init(table)
    for _ in range(20):
        _, table, state = step(table, state, **given)
    wanted = table.tobytes() + state["sum.table"].tobytes() + np.int64(20).tobytes()
    assert (folder / "after").read_bytes() == wanted


def _trained(tmp_path: Path, model: str, dims: Any, driver: str, arrays: Trees, outputs: int) -> Path:
    """The folder in which a program that was built, without a warning, with an exported step has run."""
    (tmp_path / "model.py").write_text(model)
    folder = tmp_path / "out"
    sizes = [word for each in dims for word in ("--dims", each)]
    assert main(["export", f"{tmp_path}/model.py:step", *sizes, "-o", str(folder)]) == 0
    (folder / "train.c").write_text(ARRAYS + driver)
    for name, x in arrays.items():
        x.tofile(folder / name)
    made = subprocess.run(["make", "-s", "-j2", "CC=gcc"], cwd=folder, capture_output=True, text=True, env=os.environ)
    assert (made.returncode, made.stderr) == (0, "")
    checked = subprocess.run(["./loss_step_main"], cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("the same bits") == outputs, checked.stdout
    objects = [str(path) for path in folder.rglob("*.o") if path.name != "main.o"]
    warned = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["gcc", "-O2", *warned, "train.c", *objects, "-pthread", "-lm", "-o", "train"], cwd=folder, check=True
    )
    subprocess.run(["./train"], cwd=folder, check=True)
    return folder


@built
def test_a_model_trains_in_c(tmp_path: Path) -> None:
    """Twenty steps of one function, in place, to the bits of Python."""
    given = batch(0, 5, np.float32)
    start = weights(np.float32)
    parameters = {"w1": start["w"][0], "b1": start["b"], "w2": start["w"][1]}
    folder = _trained(tmp_path, MODEL, ["N=5"], DRIVER, {**given, **parameters}, 11)
    namespace: Trees = {}
    exec(MODEL, namespace)
    step = namespace["step"]
    state = step.init(parameters)
    for _ in range(20):
        loss, parameters, state = step(parameters, state, **given)
    wanted = b"".join(parameters[name].tobytes() for name in ("w1", "b1", "w2")) + np.asarray(loss).tobytes()
    assert (folder / "after").read_bytes() == wanted


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_bits(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(_same_bits, a, b))
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
