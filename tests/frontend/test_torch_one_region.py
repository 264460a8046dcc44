"""Optimizer steps that differ from an earlier one in addresses alone, and what must be seen even so."""

from __future__ import annotations

import copy
import ctypes.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch_compiled import compiled, fresh  # noqa: E402, F401

from gradc import knobs  # noqa: E402
from gradc.runtime.torch_private import data_pointer, release  # noqa: E402
from gradc.torch import dynamo, prepared  # noqa: E402
from gradc.torch.one_region import OneRegion  # noqa: E402


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a program of one region, whether it was one that was prepared."""
    seen: list[bool] = []
    real = OneRegion.__call__

    def call(self: OneRegion, given: Any) -> Any:
        found = real(self, given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(OneRegion, "__call__", call)
    return seen


@pytest.fixture(autouse=True)
def in_f64() -> Iterator[None]:
    """Steps are counted in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Trained:
    """Parameters with gradients, their optimizer, and a twin that torch updates."""

    def __init__(self, shapes: Any = ((3, 4), (4,)), kind: Any = torch.optim.Adam, **more: Any):
        self.own = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.twin = copy.deepcopy(self.own)
        self.optimizer, self.theirs = (kind(p, lr=0.1, foreach=True, **more) for p in (self.own, self.twin))
        self.compiled = compiled(self.optimizer.step, target="cpu")

    def step(self) -> None:
        """A step of both, with gradients of their own memory."""
        for p, q in zip(self.own, self.twin, strict=True):
            p.grad, q.grad = (torch.ones_like(x) * 0.5 + x.detach().sin() for x in (p, q))
        self.compiled()
        self.theirs.step()

    def agrees(self) -> None:
        torch.testing.assert_close(self.own, self.twin, rtol=1e-11, atol=1e-13)


@pytest.fixture(params=[True, False], ids=["addresses by C", "by Python"])
def in_c(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether addresses of tensors are read in C."""
    if not request.param:
        monkeypatch.setattr(prepared, "data_pointer", lambda: 0)
    elif release() >= (2, 13):
        assert data_pointer()
    return bool(request.param)


@pytest.mark.parametrize("lacks", ["_cdata", "aoti_torch_get_data_ptr", "the place"])
def test_a_release_whose_tensors_are_otherwise_has_addresses_read_by_python(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch may have no such names, or the ``at::Tensor`` of an object elsewhere."""

    class Other:
        def __init__(self, *given: Any):
            if lacks == "the place":
                self._cdata = 8

    kept = torch if lacks == "aoti_torch_get_data_ptr" else None
    other = types.SimpleNamespace(
        empty=kept.empty if kept else Other,
        nn=kept.nn if kept else types.SimpleNamespace(Parameter=Other),
        _C=types.SimpleNamespace(__file__=ctypes.util.find_library("m")),
    )
    monkeypatch.setitem(sys.modules, "torch", other)
    assert data_pointer.__wrapped__() == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_are_bound_once(kind: Any, bound: list[str], repeated: list[bool]) -> None:
    trained = Trained(kind=kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    for _ in range(4):
        trained.step()
    bound.clear()
    repeated.clear()
    for _ in range(3):
        counts = [p._version for p in trained.own]
        trained.step()
        trained.agrees()
        assert all(p._version > count for p, count in zip(trained.own, counts, strict=True))
    assert not bound and repeated == [True] * 3


def test_other_memory_of_parameters(repeated: list[bool], in_c: bool) -> None:
    """Another address, other strides, and memory that two of them share, which eager mode updates twice."""
    trained = Trained(((4, 4), (4, 4)))
    for _ in range(4):
        trained.step()

    def moved(change: Any) -> None:
        for parameters in (trained.own, trained.twin):
            for p, new in zip(parameters, change([p.detach().clone() for p in parameters]), strict=True):
                p.data = new
        repeated.clear()
        for _ in range(2):
            trained.step()
        trained.agrees()

    moved(lambda each: each)
    assert repeated == [True, True]
    moved(lambda each: [x.t() for x in each])
    moved(lambda each: [x.clone(memory_format=torch.contiguous_format) for x in each])
    assert repeated == [False, True]
    both = [torch.randn(24) for _ in range(2)]
    moved(lambda each: [(room := both.pop().fill_(0.5))[:16].view(4, 4), room[8:].view(4, 4)])
    assert repeated == [False, False]


@pytest.mark.parametrize("kind", ["transposed", "strided", "broadcast", "negated"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_other_memory_of_gradients(kind: str, optimizer: Any) -> None:
    """Dynamo guards no strides of an optimizer's gradients."""
    trained = Trained(((4, 4), (4, 4)), optimizer)
    change = {
        "transposed": lambda g: g.t().contiguous().t(),
        "strided": lambda g: torch.stack([g, -g], -1)[..., 0],
        "broadcast": lambda g: g[:1].expand(4, 4),
        "negated": lambda g: torch._neg_view(g),
    }[kind]
    for changed in (False, False, False, True, True, False):
        for p, q in zip(trained.own, trained.twin, strict=True):
            g = torch.randn(4, 4)
            p.grad, q.grad = (change(g), change(g)) if changed else (g, g)
        trained.compiled()
        trained.theirs.step()
        trained.agrees()


def test_results_whose_axes_lie_in_another_order(repeated: list[bool]) -> None:
    def update(p: Any, x: Any) -> Any:
        p.add_(1.5)
        return (x * 2).t() + 1, x * p

    call = compiled(update, smallest_region=1, target="cpu")
    with torch.no_grad():
        for _ in range(3):
            mine, theirs = ((torch.ones(3, 4), torch.arange(12.0).view(3, 4)) for _ in range(2))
            found, wanted = call(*mine), update(*theirs)
            torch.testing.assert_close((found, mine), (wanted, theirs))
            assert [y.stride() for y in found] == [y.stride() for y in wanted]
    assert repeated == [False, True, True]


def test_what_autograd_kept_is_known_to_be_written() -> None:
    trained = Trained()
    for _ in range(4):
        trained.step()
    w = trained.own[0]
    y = (w * w).sum()
    trained.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_another_target_is_bound_anew(repeated: list[bool]) -> None:
    def update(p: Any, g: Any) -> None:
        p.mul_(0.9)
        p.add_(g)

    call = compiled(update, smallest_region=1, target=None)
    with torch.no_grad():
        for target, again in (("cpu", False), ("cpu", True), ("numpy", False), ("cpu", False), ("cpu", True)):
            p, g = torch.ones(5), torch.ones(5)
            with knobs.TARGET.set(target):
                call(p, g)
            torch.testing.assert_close(p, torch.full((5,), 1.9))
            assert repeated.pop() is again


@pytest.mark.parametrize("kind", ["given twice", "overlapping", "recorded", "negated", "inference", "subclass"])
def test_other_tensors(kind: str) -> None:
    """After calls that were prepared; as eager mode."""

    class Own(torch.Tensor):
        pass

    def update(p: Any, g: Any) -> Any:
        p.mul_(0.9)
        p.add_(g * 1.5)
        return g * 2

    call = compiled(update, smallest_region=1, target="cpu")
    with torch.no_grad():
        for _ in range(3):
            call(torch.ones(6), torch.ones(6))

    def arguments() -> Any:
        p, g = torch.arange(6.0), torch.ones(6)
        if kind == "given twice":
            return p, p
        if kind == "overlapping":
            both = torch.arange(8.0)
            return both[2:], both[:6]
        if kind == "recorded":
            return p, g.requires_grad_()
        return {"negated": lambda: torch._neg_view(p), "inference": lambda: p, "subclass": lambda: p.as_subclass(Own)}[
            kind
        ](), g

    with torch.set_grad_enabled(kind == "recorded"), torch.inference_mode(kind == "inference"):
        for _ in range(2):
            mine, theirs = arguments(), arguments()
            found, wanted = call(*mine), update(*theirs)
            torch.testing.assert_close((found, *mine), (wanted, *theirs))
            assert found.requires_grad == wanted.requires_grad


def test_threads_at_once() -> None:
    def update(p: Any, g: Any) -> None:
        p.mul_(0.5)
        p.add_(g)

    call = compiled(update, smallest_region=1, target="cpu")
    wrong: list[int] = []
    with torch.no_grad():
        for _ in range(3):
            call(torch.ones(64), torch.ones(64))

    def work(seed: int) -> None:
        with torch.no_grad():
            for i in range(100):
                p = torch.full((64,), float(seed + i))
                call(p, torch.ones(64))
                if not p.eq((seed + i) * 0.5 + 1).all():
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_programs_that_are_more_than_one_region_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = dynamo._one_region
    monkeypatch.setattr(dynamo, "_one_region", lambda *args: made.append(real(*args)) or made[-1])

    def view_of_what_is_written(p: Any) -> Any:
        p.add_(1)
        return p[1:]

    def input_returned(p: Any, g: Any) -> Any:
        p.add_(g)
        return g

    with torch.no_grad():
        for function, inputs in ((view_of_what_is_written, 1), (input_returned, 2)):
            call = compiled(function, smallest_region=1, target="cpu")
            for _ in range(3):
                mine, theirs = ([torch.ones(4) for _ in range(inputs)] for _ in range(2))
                torch.testing.assert_close((call(*mine), mine), (function(*theirs), theirs))
    assert made and not all(made)
