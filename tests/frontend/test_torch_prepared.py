"""Calls that differ from an earlier one in addresses alone, and what must be seen even so."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc  # noqa: E402
from gradc.errors import InvalidProblem  # noqa: E402


def model_of(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(m, n), nn.Tanh()) for m, n in itertools.pairwise(sizes)])


def gradients(call: Any, model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> list[Any]:
    """The value, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    for p in model.parameters():
        p.grad = None
    y = call(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def agrees(call: Any, model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None) -> None:
    torch.testing.assert_close(gradients(call, model, x, dy), gradients(model, model, x, dy), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_size_is_bound_once(bound: list[str], dynamic: bool) -> None:
    model = model_of(4, 6, 3)
    call = compiled(model, dynamic, target="cpu")
    for rows in (5, 7):
        agrees(call, model, torch.randn(rows, 4))
        assert len(bound) == 2  # forward and backward
        for _ in range(3):
            agrees(call, model, torch.randn(rows, 4), torch.randn(rows, 3))
            agrees(call, model, torch.randn(rows, 4), torch.randn(3, rows).t())
        assert len(bound) == 2
        bound.clear()


def test_without_gradients_and_in_inference_mode(bound: list[str]) -> None:
    model = model_of(4, 3)
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4)
    with torch.no_grad():
        call(x)
        bound.clear()
        torch.testing.assert_close(call(2 * x), model(2 * x))
        assert not bound
    with torch.inference_mode():
        for _ in range(2):
            y = call(x)
            assert y.is_inference() and not y.requires_grad
            torch.testing.assert_close(y, model(x))


def test_residuals_are_one_tensor() -> None:
    model = model_of(4, 4, 4, 4)
    call, saved = compiled(model, False, target="cpu"), []
    given = {x.data_ptr() for x in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    for _ in range(2):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            call(torch.randn(5, 4).requires_grad_()).sum().backward()
    assert sum(x.dtype == torch.uint8 for x in saved) == 1
    assert sum(x.data_ptr() not in given for x in saved) <= 3  # the input, the output, and all the rest


@pytest.mark.parametrize("kind", ["dtype", "order", "sizes", "gaps", "no rows", "misaligned"])
def test_a_call_with_other_arguments(kind: str) -> None:
    model = model_of(4, 3)
    call, x = compiled(model, None, target="cpu"), torch.randn(6, 4)
    agrees(call, model, x)
    if kind == "dtype":
        model.double()
        x = x.double()
    elif kind == "order":
        x = torch.randn(4, 6).t()
    elif kind == "sizes":
        x = torch.randn(9, 4)
    elif kind == "gaps":
        x = torch.randn(12, 4)[::2]
    elif kind == "no rows":
        x = torch.randn(0, 4)
    else:
        x = torch.frombuffer(bytearray(1 + 4 * 24), dtype=torch.float32, offset=1, count=24).view(6, 4)
    for _ in range(2):
        agrees(call, model, x)


def test_what_was_written_since_is_seen() -> None:
    model = model_of(4, 4)
    call = compiled(model, False, target="cpu")
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        y = call(x)
        with torch.no_grad():
            model[0][0].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_other_memory_at_backward_is_read() -> None:
    """Where a parameter's owner puts it elsewhere, as FSDP does."""
    model = model_of(4, 4).double()
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4, dtype=torch.float64)
    agrees(call, model, x)
    for _ in range(2):
        given = x.clone().requires_grad_()
        y = call(given)
        model[0][0].weight.data = torch.randn(4, 4, dtype=torch.float64)
        (dx,) = torch.autograd.grad(y.sum(), given)
        torch.testing.assert_close(dx, (1 - y.detach() ** 2) @ model[0][0].weight.detach())


def test_a_storage_that_was_freed_is_an_error() -> None:
    model = model_of(4, 4)
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4)
    agrees(call, model, x)
    strided = torch.stack([x, x], -1)[..., 0]
    call(strided)
    for freed in (strided, model[0][0].weight):
        freed.untyped_storage().resize_(0)
        with pytest.raises(Exception, match="memory"):
            call(freed if freed is strided else x)


def test_hooks_on_what_is_saved_and_checkpoints(bound: list[str]) -> None:
    model = model_of(4, 4, 4)
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4)
    agrees(call, model, x)
    bound.clear()
    with torch.autograd.graph.save_on_cpu():
        agrees(call, model, x)
    agrees(lambda x: checkpoint(call, x, use_reentrant=False), model, x)
    assert not bound


def test_other_tensors_from_hooks() -> None:
    model = model_of(4, 4)
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4)
    wanted = gradients(call, model, x)
    for unpack in (lambda x: x.t().contiguous().t(), lambda x: torch.stack([x, x], -1)[..., 0]):
        turned = lambda x, unpack=unpack: unpack(x) if x.ndim == 2 else x
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
            torch.testing.assert_close(gradients(call, model, x), wanted)


NOT_ROW_MAJOR = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("kind", NOT_ROW_MAJOR)
def test_an_input_that_is_not_row_major_is_copied(bound: list[str], kind: str) -> None:
    model = model_of(4, 6, 3)
    call, like = compiled(model, False, target="cpu"), NOT_ROW_MAJOR[kind]
    for _ in range(3):
        agrees(call, model, like(torch.randn(5, 4)))
    with torch.no_grad():
        call(like(torch.randn(5, 4)))
        x = like(torch.randn(5, 4))
        torch.testing.assert_close(call(x), model(x))
    assert len(bound) == 3  # forward, backward, and the forward that keeps nothing
    found = []
    for run in (model, call):
        x = like(torch.linspace(-1, 1, 20).view(5, 4)).detach().requires_grad_()
        (once,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    with torch.autograd.graph.save_on_cpu():
        agrees(call, model, like(torch.randn(5, 4)))


def test_a_change_of_an_input_that_was_copied_is_seen() -> None:
    model = model_of(4, 4)
    call = compiled(model, False, target="cpu")
    for _ in range(2):
        x = NOT_ROW_MAJOR["strided"](torch.randn(5, 4))
        y = call(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()


def test_an_input_that_was_copied_is_kept_itself() -> None:
    """One row for nine takes the memory of one until backward."""
    call = compiled(lambda x, a: (x * a).tanh(), False, target="cpu")
    for _ in range(3):
        x, a = torch.randn(1, 4).expand(9, 4), torch.randn(9, 4, requires_grad=True)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = call(x, a)
        assert {t.data_ptr() for t in kept} == {x.data_ptr(), a.data_ptr()}
        y.sum().backward()
        torch.testing.assert_close(a.grad, (1 - (x * a).tanh() ** 2) * x)


def test_outputs_without_a_cotangent() -> None:
    def two(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.tanh(x * a).sum(0), torch.exp(x * b).sum(0), (x > 0).sum(0)

    call, x = compiled(two, False, target="cpu"), torch.randn(5, 4)
    for _ in range(3):
        found = []
        for run in (two, call):
            a, b = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
            outputs = run(x, a, b)
            assert not outputs[2].requires_grad
            outputs[0].sum().backward()
            assert b.grad is None
            found.append(a.grad)
        torch.testing.assert_close(*found)


def test_backward_twice_and_a_second_derivative() -> None:
    model = model_of(4, 4)
    call = compiled(model, False, target="cpu")
    for _ in range(3):
        found = []
        for run in (model, call):
            x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
            y = run(x).sum()
            (once,) = torch.autograd.grad(y, x, retain_graph=True)
            (again,) = torch.autograd.grad(y, x, create_graph=True)
            torch.testing.assert_close(once, again)
            found.append(torch.autograd.grad(again.square().sum(), x)[0])
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()
                y.backward()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_inputs_that_are_one_tensor_and_overlap() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * y + x

    call, memory = compiled(product, False, target="cpu"), torch.randn(12)
    for x, y in ((memory[:8], memory[4:]), (memory[:8], memory[:8])):
        for _ in range(2):
            torch.testing.assert_close(call(x, y), product(x, y))


def test_threads_that_call_at_once() -> None:
    model = model_of(16, 16, 16)
    call = compiled(model, False, target="cpu")
    xs = [torch.randn(8, 16) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in xs]
        call(xs[0])
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(call(xs[i]), wanted[i], atol=1e-6):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_torch_traces_and_transforms_is_refused_after_a_call_too() -> None:
    model = model_of(4, 4)
    call, x = compiled(model, False, target="cpu"), torch.randn(5, 4)
    with torch.no_grad():
        call(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            y = call(dual)  # torch computes it
            assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None


def test_large_results_come_from_the_pool() -> None:
    from gradc.runtime.host.arrays import pool

    model = model_of(64, 64).double()
    call, x = compiled(model, False, target="cpu"), torch.randn(2048, 64, dtype=torch.float64)
    agrees(call, model, x)
    before = pool.reused
    agrees(call, model, x)
    assert pool.reused > before


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_nothing_but_autograd_holds_what_it_keeps(target: str) -> None:
    """After backward it is gone, and where a hook packs it away it is not there at all."""
    call, w = compiled(lambda a, w: torch.softmax(a * w, 1), False, target=target), torch.rand(64, requires_grad=True)
    leaf, alive, kept = torch.rand(8, 64, requires_grad=True), [], []
    for hooked in (False, True, False):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: None if hooked else x, lambda x: x):  # noqa: B023
            a = leaf * 1
            kept.append(call(a, w).sum())
        alive.append(weakref.ref(a))
        del a
        if not hooked:
            kept[-1].backward()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_a_saved_parameter_that_was_made_smaller_is_an_error(bound: list[str]) -> None:
    """Its memory begins where it did, and autograd counts no change of ``.data``."""
    w = nn.Parameter(torch.rand(64, 64))
    call = compiled(lambda x, w: torch.tanh(x @ w), False, target="cpu")
    for _ in range(2):
        call(torch.rand(8, 64, requires_grad=True), w).sum().backward()
    bound.clear()
    y = call(torch.rand(8, 64, requires_grad=True), w).sum()
    assert not bound
    w.data = w.data[:32]
    with pytest.raises(InvalidProblem):
        y.backward()


def test_the_target_of_the_environment_is_that_of_each_call(bound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradc.torch.function import Function

    function, x = Function(gradc.trace(lambda x: x * 2, x="f32[N]")), torch.ones(3)
    for target in ("cpu", "numpy", "cpu"):
        monkeypatch.setenv("GRADC_TARGET", target)
        assert function.wrt((), (x,)).target == target
        torch.testing.assert_close(function({}, x)[0], 2 * x)
