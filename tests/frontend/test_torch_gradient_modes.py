"""Gradient modes that a compiled function sets itself, whatever the mode of its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch_compiled import compiled, fresh, rand  # noqa: E402, F401

import gradc  # noqa: E402
import gradc.torch  # noqa: E402
from gradc.torch.function import Function  # noqa: E402


def enabled(x: Any, w: Any) -> Any:
    before = x * w.sin()
    with torch.enable_grad():
        inside = (x * w * before).sum()
    return before, inside, inside * w


def nested(x: Any, w: Any) -> Any:
    with torch.enable_grad():
        y = x * w
        with torch.no_grad():
            z = y.sin()
            with torch.enable_grad():
                u = (z * w).exp()
        return y, z, u, u * z


def by_flags(x: Any, w: Any) -> Any:
    for flag in (True, False, True):
        with torch.set_grad_enabled(flag):
            x = (x * w).tanh()
    return x


def switched(x: Any, w: Any) -> Any:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    y = x * w
    torch.set_grad_enabled(False)
    z = y * x
    torch.set_grad_enabled(before)
    return y, z


@torch.enable_grad()
def decorated(x: Any, w: Any) -> Any:
    return (x * w).cos(), x.view(-1)


@torch.no_grad()
def under_no_grad(x: Any, w: Any) -> Any:
    return decorated(x, w)[0] * 2


def decorators(x: Any, w: Any) -> Any:
    y = under_no_grad(x, w)
    return y * w, decorated(x, w)[0] * y


def written(x: Any, w: Any) -> Any:
    sums = x * w
    with torch.enable_grad():
        y = x * w
        y.mul_(w)
        sums.add_(y)
    return sums, y


def written_before(x: Any, w: Any) -> Any:
    y = torch.zeros_like(x)
    y.add_(x)
    y[0] = 1
    with torch.enable_grad():
        return y, y * w


def written_after(x: Any, w: Any) -> Any:
    with torch.enable_grad():
        y = x * w
    y.mul_(2)
    return y


def passed_on(x: Any, w: Any) -> Any:
    with torch.enable_grad():
        return x, w, x * w


def forces(x: Any, w: Any) -> Any:
    """Energies and forces of particles, as simulators ask for them at inference."""
    with torch.enable_grad():
        places = x.detach().requires_grad_(True)
        energy = ((places * w) ** 3).sum()
        return energy.detach(), -torch.autograd.grad(energy, places)[0]


def trained_on_forces(x: Any, w: Any) -> Any:
    with torch.enable_grad():
        x.requires_grad_(True)
        energy = ((x * w) ** 3).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


def in_inference_mode(x: Any, w: Any) -> Any:
    with torch.inference_mode():
        y = x * w
        with torch.enable_grad():
            z = y * w
    return y + 1, z.clone()


def left_enabled(x: Any, w: Any) -> Any:
    y = x * w
    torch.set_grad_enabled(True)
    return y, (x * w).sin()


def left_disabled(x: Any, w: Any) -> Any:
    y = x * w
    torch.set_grad_enabled(False)
    return y, (y * w).sin()


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    enabled, nested, by_flags, switched, decorated, decorators, written, written_before, written_after, passed_on,
    forces, trained_on_forces, in_inference_mode, left_enabled, left_disabled,
)  # fmt: skip


def called(function: Any, mode: Any, x_learns: bool) -> Any:
    """Values, what requires grad, the mode left behind and gradients of the second of two calls; "refused" where there
    is no gradient.
    """
    torch.manual_seed(0)
    x, w = rand(3, 4, grad=x_learns), rand(4)
    try:
        for _ in range(2):
            with mode():
                outputs = function(x, w)
                left = torch.is_grad_enabled()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        recorded = [y for y in outputs if y.requires_grad]
        wanted = [v for v in (x, w) if v.requires_grad]
        upstream = [torch.full_like(y, 0.5) for y in recorded]
        gradients = torch.autograd.grad(recorded, wanted, upstream, allow_unused=True) if recorded else ()
    except RuntimeError as error:
        assert "does not require grad" in str(error)  # in inference mode nothing is recorded
        return "refused"
    return [(y.requires_grad, y.is_inference(), y.detach()) for y in outputs], left, gradients


@pytest.mark.parametrize("x_learns", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_mode_that_a_function_sets_is_eagers(function: Any, mode: Any, x_learns: bool) -> None:
    want = called(function, mode, x_learns)
    got = called(compiled(function, smallest_region=1), mode, x_learns)
    if "refused" in (got, want):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert torch.is_grad_enabled()


def test_gradc_takes_a_function_that_enables_gradients_whole() -> None:
    for function in (enabled, nested, by_flags, decorators, written):
        torch._dynamo.reset()
        gradc.torch.report().clear()
        with torch.no_grad():
            compiled(function, fallback="error")(rand(3, 4), rand(4))
        (graph,) = gradc.torch.report().graphs
        assert len(graph.regions) == 1 and not graph.reason


def test_both_modes_of_the_caller_in_turn() -> None:
    ours, x, w = compiled(enabled), rand(3, 4), rand(4)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            got, want = ours(x, w), enabled(x, w)
        assert [y.requires_grad for y in got] == [y.requires_grad for y in want]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_module_in_inference_mode_records_nothing() -> None:
    layer = gradc.torch.Module(lambda x, w: gradc.ops.tanh(x * w), w=torch.randn(4), options={"target": "numpy"})
    with torch.inference_mode(), torch.enable_grad():
        y = layer(torch.randn(3, 4))
    assert not y.requires_grad and y.is_inference()


class Exported(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any, w: Any) -> Any:
        return self.function(x, w)


@pytest.mark.parametrize(
    "function",
    [enabled, nested, by_flags, switched, decorated, decorators, written, written_before, written_after, left_disabled],
    ids=lambda f: f.__name__,
)
def test_an_export_has_the_gradients_that_modes_leave(function: Any) -> None:
    x, w = rand(3, 4), rand(4)
    exported = Function(gradc.from_torch(Exported(function), (x.detach(), w.detach())), "numpy")
    given, found = {"x": x, "w": w}, []
    for call in (lambda x, w: exported({}, *(given[name] for name in exported.names)), function):
        with torch.enable_grad():
            outputs = call(x, w)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        recorded = [y for y in outputs if y.requires_grad]
        upstream = [torch.full_like(y, 0.5) for y in recorded]
        gradients = torch.autograd.grad(recorded, (x, w), upstream, allow_unused=True, materialize_grads=True)
        found.append(([y.requires_grad for y in outputs], [y.detach() for y in outputs], gradients))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
