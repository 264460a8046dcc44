"""copy, deepcopy, pickle and torch.save of everything a user holds: the same thing again, or one typed error."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import errors, ops
from gradc.errors import GradcError, InvalidProblem
from gradc.ir.dims import symbol

ROOT = Path(__file__).resolve().parents[2]
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda x, protocol=protocol: pickle.loads(pickle.dumps(x, protocol))
        for protocol in (2, pickle.HIGHEST_PROTOCOL)
    },
}


def torch_saved(x: Any) -> Any:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES["torch.save"] = torch_saved
table = np.arange(200, dtype=np.float32) / 200  # large enough to be captured as an input


@gradc.graph
def doubled(x: f32[N]):  # type: ignore[name-defined]  # noqa: F821
    return x * 2.0


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    def layer(x, w):
        with gradc.scope("first"):
            product = x @ w
        return {"y": ops.tanh(product), "z": product * ops.sum(ops.exp(table))}

    return gradc.compile(gradc.trace(layer, x="f32[N,4]", w="f32[4,3]", assume=["N >= 1"]), wrt=["w"])


def call(module: Any) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    values, residuals = module.forward(
        x=rng.standard_normal((5, 4)).astype(np.float32), w=rng.standard_normal((4, 3)).astype(np.float32)
    )
    return values, residuals


def gradient(module: Any, residuals: Any) -> Any:
    return module.backward(residuals, y=np.ones((5, 3), np.float32))["w"]


@pytest.mark.parametrize("how", COPIES)
def test_a_graph_is_the_same_with_its_notes_and_arrays(module: gradc.Module, how: str) -> None:
    again = COPIES[how](module.graph)
    assert (
        again == module.graph
        and str(again) == str(module.graph)
        and again.notes == {n: v for n, v in module.graph.notes.items() if n in set(module.graph.nodes)}
    )
    (name,) = again.defaults
    assert np.array_equal(again.defaults[name], table) and not again.defaults[name].flags.writeable


@pytest.mark.parametrize("how", COPIES)
def test_a_module_computes_the_same(module: gradc.Module, how: str) -> None:
    values, residuals = call(module)
    again = COPIES[how](module)
    theirs, kept = call(again)
    assert all(np.array_equal(values[n], theirs[n]) for n in values)
    assert np.array_equal(gradient(module, residuals), gradient(again, kept))
    assert np.array_equal(gradient(module, kept), gradient(again, residuals)), "either takes the other's residuals"
    for part in ("forward", "backward"):
        single = COPIES[how](getattr(module, part))
        assert type(single) is type(getattr(module, part)) and single.program == getattr(module, part).program


@pytest.mark.parametrize("how", COPIES)
def test_residuals_serve_a_later_backward(module: gradc.Module, how: str) -> None:
    _, residuals = call(module)
    expected = gradient(module, residuals)
    both, kept = COPIES[how]((module, residuals))
    assert np.array_equal(gradient(both, kept), expected)
    assert np.array_equal(gradient(module, COPIES[how](residuals)), expected)


def test_residuals_of_arrays_in_another_order_serve_a_later_backward(tmp_path: Path) -> None:
    module = gradc.compile(
        gradc.trace(lambda x, w: ops.sum(ops.tanh(x) * w), x="f32[N,M]", w="f32[N,M]"), wrt=["x", "w"]
    )
    rng = np.random.default_rng(0)
    w = rng.standard_normal((700, 512)).astype(np.float32)
    x = rng.standard_normal((512, 700)).astype(np.float32).T
    _, residuals = module.forward(x=x, w=w)
    assert residuals.module is not module
    expected = module.backward(residuals, np.float32(1))
    module.save(tmp_path / "m.gradc")
    both = pickle.loads(pickle.dumps((module, residuals)))
    for backward, kept in (
        (module.backward, both[1]),
        (both[0].backward, both[1]),
        (gradc.load_module(tmp_path / "m.gradc").backward, residuals),
    ):
        found = backward(kept, np.float32(1))
        assert all(np.array_equal(found[name], expected[name]) for name in ("x", "w"))
    other = gradc.compile(gradc.trace(lambda x, w: ops.sum(ops.exp(x) * w), x="f32[N,M]", w="f32[N,M]"), wrt=["x", "w"])
    with pytest.raises(InvalidProblem, match="of another module"):
        other.backward(residuals, np.float32(1))


@pytest.mark.parametrize("how", COPIES)
def test_what_else_a_user_holds(module: gradc.Module, how: str) -> None:
    make = COPIES[how]
    _, residuals = call(module)
    grads = module.backward(residuals, y=np.ones((5, 3), np.float32))
    assert list(make(grads)) == list(grads) and np.array_equal(make(grads)["w"], grads["w"])
    for thing in (
        module.graph.inputs[0].type,
        symbol("N") * 2 + 1,
        module.forward.program,
        ops.tanh,
        ops.softmax,
        ops.matmul,
    ):
        assert make(thing) == thing
    assert make(ops.tanh) is ops.tanh and make(module.graph.outputs[0][1]) is module.graph.outputs[0][1]
    plan = make(gradc.plans.embedding_backward(D=4))
    dy = np.ones((3, 4), np.float32)
    assert plan.run(indices=np.array([1, 1, 0]), dy=dy, dims={"V": 2})["weight"].tolist() == [[1.0] * 4, [2.0] * 4]
    kernel = next(iter(module.kernels.values()))
    assert make(kernel).ir == kernel.ir
    assert make(doubled) is doubled
    sparse = gradc.compile(
        gradc.trace(lambda i, t: ops.embedding(i, t), i="i64[N]", t="f32[V,4]"), wrt=["t"], sparse=["t"]
    )
    rows = sparse.backward(
        sparse.forward(i=np.array([2, 0]), t=np.ones((5, 4), np.float32))[1], np.ones((2, 4), np.float32)
    )["t"]
    assert np.array_equal(make(rows).dense(), rows.dense())
    alone = gradc.Executable(module.forward.program, module.target)
    assert make(alone).program == alone.program


ERRORS = [
    errors.IndexOutOfRange("embedding", "tokens", 3, 9, 5),
    errors.IndexOutOfRange("embedding", "tokens", 3, None, 5),
    errors.NotAscending("embedding_bag", "offsets", 1, 2, 3),
    errors.BufferTooSmall(4, 3, "x"),
    errors.WorkspaceTooSmall(4, 3),
    errors.IRFormatError("bad", 3, 4),
    errors.CompilerError("m", "log", "a\nb"),
    errors.OutOfMemory("x"),
    errors.FileError("a.gir", "read", FileNotFoundError(2, "No such file or directory")),
    errors.InvalidSetting("GRADC_CACHE", "maybe", "neither 0 nor 1"),
    errors.RegistersSpilled("sm_90", {"k": (1, 2)}, "log", "s"),
    errors.SimulationFault("race", "k", "k.cu:1", (0, 0, 0), (1, 0, 0), "text"),
    errors.TypeRuleError("x"),
    errors.FileError("m.gradc", "written", OSError(28, "No space left on device")),
    errors.InvalidSetting("GRADC_CACHE", "maybe", "not a yes or no"),
]


def test_every_error_class_is_tried() -> None:
    own = lambda kind: "__init__" in vars(kind)
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, GradcError)
        and any(own(k) for k in kind.__mro__ if k.__module__ == errors.__name__)
    }
    assert {kind for kind in kinds if not kind.__name__.startswith("_")} <= {type(e) for e in ERRORS}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_comes_out_of_another_process_as_it_was(error: GradcError, how: str) -> None:
    """A pool of processes pickles what a worker raises; one that cannot be read back ends the pool."""
    error.add_note("where it was")
    again = COPIES[how](error)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert all(getattr(again, name, None) == getattr(error, name, None) for name in ("errno", "strerror", "filename"))


def test_another_process_reads_the_pickle_of_a_module(module: gradc.Module, tmp_path: Path) -> None:
    """It holds text and arrays: nothing is imported for it but gradc, and no machine code comes with it."""
    values, _ = call(module)
    data = pickle.dumps(module)
    assert b"\x7fELF" not in data
    (tmp_path / "module.pickle").write_bytes(data)
    text = (
        "import pickle, sys, numpy as np; m = pickle.load(open(sys.argv[1], 'rb')); rng = np.random.default_rng(0);"
        " print(m.forward(x=rng.standard_normal((5, 4)).astype('f4'), w=rng.standard_normal((4,"
        " 3)).astype('f4'))[0]['y'].tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "module.pickle")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == values["y"].tobytes().hex(), done.stderr


def test_what_cannot_be_pickled_is_told_in_one_error() -> None:
    local = gradc.graph(lambda x: x + 1.0)
    with pytest.raises(InvalidProblem, match=r"<lambda> cannot be pickled: a function is found again by its name"):
        pickle.dumps(local)
    assert copy.deepcopy(local) is local
    with pytest.raises(InvalidProblem, match="names the op 'nonsense', which this process does not have"):
        gradc.pickles.op_named("nonsense")  # type: ignore[attr-defined]


def test_residuals_that_no_longer_hold_are_not_pickled(module: gradc.Module) -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    _, residuals = module.forward(x=x, w=w)
    pickle.loads(pickle.dumps(residuals))
    x.add_(1)
    with pytest.raises(InvalidProblem, match="'x' was changed in place"):
        pickle.dumps(residuals)
