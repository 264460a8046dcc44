"""Steps that differ from an earlier one in addresses alone, and what must be seen even so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops, optim
from gradc.errors import InvalidProblem


def loss(p: Any, x: Any) -> Any:
    return ops.sum((p["w"] * x + p["b"]) ** 2.0)


def parameters() -> dict[str, Any]:
    return {"w": np.arange(6, dtype=np.float64).reshape(2, 3) / 6, "b": np.ones(3)}


def in_library(library: str, tree: dict[str, Any]) -> dict[str, Any]:
    if library == "numpy":
        return tree
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in tree.items()}


def started(step: Any, library: str = "numpy") -> tuple[Any, Any, Any]:
    """Parameters, state and x, after calls that are known."""
    p, (x,) = in_library(library, parameters()), in_library(library, {"x": np.full((2, 3), 0.5)}).values()
    state = step.init(p)
    for _ in range(3):
        _, p, state = step(p, state, x=x)
    return p, state, x


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("optimizer", [optim.sgd(0.01, momentum=0.9), optim.adam(0.01), optim.adamw(0.01)])
def test_a_step_is_bound_once_and_has_the_same_bits(library: str, optimizer: Any, bound: list[str]) -> None:
    step = gradc.step(loss, optimizer, target="cpu")
    p, state, x = started(step, library)
    q, other, _ = started(gradc.step(loss, optimizer, donate=False, target="numpy"))
    for i in range(3):
        rate = {} if i == 1 else {"lr": 0.01 / (i + 1)}
        kept = {**p, **{n: s for n, s in state.items() if n != "step"}}
        bound.clear()
        value, p, state = step(p, state, x=x, **rate)
        assert not [name for name in bound if i]  # lr=None and lr=... are known apart
        wanted, q, other = gradc.step(loss, optimizer, donate=False, target="numpy")(q, other, x=np.asarray(x), **rate)
        np.testing.assert_allclose(value, wanted, rtol=1e-12)
        for new, theirs in ((p, q), (state, other)):
            assert new.keys() == theirs.keys()
            for name in new:
                np.testing.assert_allclose(new[name], theirs[name], rtol=1e-12)
        for name, array in {**p, **state}.items():
            assert type(array).__module__ == library and (name == "step" or array is kept[name])


def test_versions_of_parameters_that_require_grad() -> None:
    torch = pytest.importorskip("torch")
    step = gradc.step(loss, optim.sgd(0.01, momentum=0.9), target="cpu")
    p = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in parameters().items()}
    x, state = torch.full((2, 3), 0.5, dtype=torch.float64), None
    state = step.init(p)
    for _ in range(4):
        counts = [each._version for each in p.values()]
        before = p["w"].detach().clone()
        _, new, state = step(p, state, x=x)
        assert [each._version for each in p.values()] == [count + 1 for count in counts]
        assert not new["w"].requires_grad and new["w"].data_ptr() == p["w"].data_ptr()
        assert not torch.equal(p["w"], before)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("donate", [True, False])
def test_what_is_wrong_is_said_after_a_step_too(library: str, donate: bool) -> None:
    step = gradc.step(loss, optim.adam(0.01), donate=donate, target="cpu")
    p, state, x = started(step, library)
    shared = in_library(library, {"": np.ones((3, 3))})[""]
    count = lambda n: in_library(library, {"": np.full((), n)})[""]
    wrong: list[tuple[Any, Any, Any, str]] = [
        ({"w": shared[:2], "b": shared[1]}, state, {}, "share memory"),
        (p, {**state, "mean.p.w": p["w"]}, {}, "share memory"),
        (p, {**state, "square.p.w": state["mean.p.w"]}, {}, "share memory"),
        (p, {**state, "step": count(-1)}, {}, "step is -1"),
        (p, {**state, "step": count(1 << 53)}, {}, "from 0 to below"),
        (p, {**state, "step": np.array("1")}, {}, "does not hold numbers"),
        (p, {**state, "step": np.array(1j)}, {}, "complex128"),
        (p, state, {"lr": float("nan")}, "lr=nan"),
    ]
    copies = {name: np.asarray(a).copy() for name, a in {**p, **state}.items()}
    for given, kept, more, text in wrong:
        with pytest.raises(InvalidProblem, match=text):
            step(given, kept, x=x, **more)
    for name, array in {**p, **state}.items():
        np.testing.assert_array_equal(array, copies[name])
    step(p, state, x=x)


def test_arrays_that_are_copied_stay_as_they_were() -> None:
    step = gradc.step(loss, optim.sgd(0.01, momentum=0.9), target="cpu")
    p, state, x = started(step)
    fixed = {**p, "w": p["w"].copy()}
    fixed["w"].flags.writeable = False
    for w in (fixed["w"], np.asfortranarray(p["w"]), x):
        before = w.copy()
        _, new, _ = step({**p, "w": w}, state, x=x)
        np.testing.assert_array_equal(w, before)
        assert not np.shares_memory(new["w"], w)


def test_another_target_is_another_program(bound: list[str]) -> None:
    step = gradc.step(loss, optim.sgd(0.01))
    p, x = parameters(), np.full((2, 3), 0.5)
    state = step.init(p)
    seen = []
    for target in ("cpu", "cpu", "cpu", "numpy", "cpu"):
        bound.clear()
        with knobs.TARGET.set(target):
            _, p, state = step(p, state, x=x)
        seen.append(len(bound))
    assert seen == [1, 1, 0, 1, 0]


def test_several_steps_of_one_are_known_side_by_side(bound: list[str]) -> None:
    """Batches of two sizes."""
    step = gradc.step(loss, optim.sgd(0.01, momentum=0.9), target="cpu")
    p = {"w": np.ones(3), "b": np.ones(3)}
    state = step.init(p)
    for again in range(4):
        bound.clear()
        for rows in (2, 5):
            _, p, state = step(p, state, x=np.full((rows, 3), 0.5))
        assert again < 2 or not bound


@pytest.mark.parametrize("donate", [True, False])
def test_each_array_stays_in_its_library(donate: bool) -> None:
    torch = pytest.importorskip("torch")
    step = gradc.step(loss, optim.sgd(0.01, momentum=0.9), donate=donate, target="cpu")
    p, x = parameters(), torch.full((2, 3), 0.5, dtype=torch.float64)
    p["b"] = torch.from_numpy(p["b"])
    state = step.init(p)
    kinds = {name: type(a) for name, a in {**p, **state}.items()}
    for _ in range(4):
        value, p, state = step(p, state, x=x)
        assert isinstance(value, torch.Tensor)
        assert {name: type(a) for name, a in {**p, **state}.items() if name != "step"} == {
            name: kind for name, kind in kinds.items() if name != "step"
        }
