"""What autograd sees of compiled regions: gradients that a user wrote, several losses, sparse gradients, optimizers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch_models as models  # noqa: E402
from torch import nn  # noqa: E402
from torch_compiled import agree, compiled, fresh, rand  # noqa: E402, F401

import gradc.torch  # noqa: E402


class Straight(torch.autograd.Function):
    """Rounds, and passes its gradient on times what was saved; a mask beside it has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.round() * factor, x > 0

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x * ctx.factor, None


class Reversed(torch.autograd.Function):
    """The identity, as a view; its gradient is reversed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -g


class Written(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_autograd_function_runs_in_torch_between_regions(dynamic: bool) -> None:
    def function(x: Any, w: Any) -> Any:
        y, mask = Straight.apply(torch.tanh(x * w).exp(), 3.0)
        with torch.no_grad():
            z = Reversed.apply(x)
        return (Reversed.apply(torch.where(mask, y, w) * w + z).sin().cos() * w + 1).sum()

    agree(function, rand(3, 4), rand(4), dynamic=dynamic)
    report = gradc.torch.report()
    assert report.graphs[0].regions == (3, 3, 5) and report.graphs[0].ops == 13
    row = next(row for row in report.rows if row.op == "torch.autograd.Function")
    assert row.count == 2 and "gradient of its own" in row.reason


def test_torch_interprets_no_op_of_an_autograd_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its op visits the nodes of both graphs, which takes as long as small ops themselves."""
    call = compiled(lambda x: Straight.apply(x.exp() * 2, 3.0)[0].sum(), False)
    call(rand(4, 3).requires_grad_()).backward()
    visited: list[str] = []
    run_node = torch.fx.Interpreter.run_node
    monkeypatch.setattr(torch.fx.Interpreter, "run_node", lambda self, n: visited.append(n.op) or run_node(self, n))
    x = rand(4, 3).requires_grad_()
    call(x).backward()
    torch.testing.assert_close(x.grad, 3 * (x.exp() * 2) * (x.exp() * 2))
    assert {*visited} <= {"placeholder", "call_module", "output"}  # of old releases: of two graphs of one call


class Product(torch.autograd.Function):
    """A product, which autocast rounds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.t().to(g.dtype), x.t().to(g.dtype) @ g


def test_an_autograd_function_under_autocast_has_the_type_that_autocast_gives() -> None:
    """What follows is typed by it: a conversion back must not be dropped."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = Product.apply(x.tanh(), w)
        return y.float().cos()

    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3)
    found, wanted = compiled(function, False)(x, w), function(x, w)
    torch.testing.assert_close(found, wanted)  # dtypes, too
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, wanted)), rtol=2e-2, atol=2e-2)


def test_an_autograd_function_that_writes_to_its_input() -> None:
    """Dynamo itself does not trace it, and hands over what is before and what is after."""
    agree(lambda x: Written.apply(x.exp().sin() + 1).cos().sum(), rand(3, 4))
    assert [graph.ops for graph in gradc.torch.report().graphs] == [3, 2]


# -- several losses ----------------------------------------------------------------------------------------------------


def test_losses_that_share_no_value_are_differentiated_one_after_another() -> None:
    def losses(x: Any, w: Any, v: Any) -> Any:
        return torch.tanh(x * w).exp().sum(), torch.sin(x * v).exp().sum(), (x * w).detach().mean()

    x, w, v = rand(3, 4, grad=False), rand(4), rand(4)
    first, second, mean = compiled(losses, fallback="error")(x, w, v)
    first.backward()  # without retain_graph
    assert v.grad is None and w.grad is not None and not mean.requires_grad
    second.backward()
    wanted = torch.autograd.grad(sum(losses(x, w, v)[:2]), (w, v))
    torch.testing.assert_close((w.grad, v.grad), wanted)


def test_losses_that_torch_finishes() -> None:
    """Values of one region, each of which torch makes a loss of: one after another, without retain_graph."""

    def losses(x: Any, w: Any, v: Any) -> Any:
        y, z = torch.tanh(x * w), torch.exp(x * v)
        return torch.fft.fft(y).real.sum(), torch.fft.fft(z).imag.square().sum(), torch.fft.fft(x * 2).abs().argmax()

    def views(x: Any, w: Any, v: Any) -> Any:
        return torch.tanh(x * w)[None].squeeze(0)[1, 2], torch.exp(x * v).t()[2:].sum(0)[0]

    def loss(x: Any, w: Any, v: Any) -> Any:
        return (torch.fft.fft(torch.tanh(x * w)) * torch.fft.fft(torch.exp(x * v))).real.sum()

    def masked(x: Any, w: Any, v: Any) -> Any:
        mask = (x > 0).double() + 1  # has no gradient, and keeps nothing together
        y, z = torch.tanh(x * w), torch.exp(x * v)
        return [torch.fft.fft(torch.complex(each, mask)).abs().sum() for each in (y, z)]

    for program in (losses, views, loss, masked):
        x, w, v = rand(3, 4, grad=False), rand(4), rand(4)
        found = compiled(program, smallest_region=1)(x, w, v)
        for each in found[:2] if isinstance(found, tuple | list) else (found,):
            each.backward()
        wanted = program(x, w, v)
        wanted = torch.autograd.grad(sum(wanted[:2]) if isinstance(wanted, tuple | list) else wanted, (w, v))
        torch.testing.assert_close((w.grad, v.grad), wanted)


@pytest.mark.parametrize("both_ways", [False, True])
def test_losses_that_share_a_detached_value(both_ways: bool) -> None:
    """One after another, without retain_graph; where each reads the other's value they stay one."""

    def losses(x: Any, w: Any, v: Any) -> Any:
        y, z = torch.tanh(x * w).exp(), torch.sin(x * v).exp()
        first = (y * z.detach() if both_ways else y).square().sum()
        return first, (z * y.detach()).square().sum(), y.detach().mean()

    x, w, v = rand(3, 4, grad=False), rand(4), rand(4)
    first, second, mean = compiled(losses, fallback="error")(x, w, v)
    assert not mean.requires_grad
    second.backward(retain_graph=both_ways)
    assert w.grad is None and v.grad is not None
    first.backward()
    wanted = torch.autograd.grad(sum(losses(x, w, v)[:2]), (w, v))
    torch.testing.assert_close((w.grad, v.grad), wanted)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_does_not_exist_is_none(create_graph: bool) -> None:
    def losses(x: Any, w: Any, v: Any) -> Any:
        y = torch.tanh(x * w).exp()
        return y.sum(), (y * v).sum()

    x, w, v = rand(3, 4, grad=False), rand(4), rand(4)
    for call in (losses, compiled(losses, fallback="error")):
        first, second = call(x, w, v)
        got = torch.autograd.grad(first, (w, v), allow_unused=True, create_graph=create_graph, retain_graph=True)
        assert got[1] is None and got[0] is not None
        assert all(g is not None for g in torch.autograd.grad(second, (w, v)))
        with pytest.raises(RuntimeError, match="second time"):  # they share a value
            torch.autograd.grad(second, (w, v))


# -- sparse gradients --------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Sparse tables, one of them read by an op of its own, too, whose gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0, sparse=True)
        self.bags = nn.EmbeddingBag(9, 4, mode="mean", sparse=True)
        self.both = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).sum(1) + self.words(tokens[:, :1] * 0 + 1).sum(1) + self.bags(tokens)
        x = torch.tanh(x) + self.both(tokens).sum(1) * self.both.weight.sum(0)
        return self.head(x).square().mean()


def test_sparse_gradients_are_sparse_and_sparse_adam_follows_eager() -> None:
    model = models.seeded(Tables)
    twin = copy.deepcopy(model)
    call = compiled(model, fallback="error")
    sparse = ("words.weight", "bags.weight")
    optimizers = [
        (
            torch.optim.SparseAdam([m.get_parameter(n) for n in sparse], lr=0.05),
            torch.optim.SGD([p for n, p in m.named_parameters() if n not in sparse], lr=0.05),
        )
        for m in (model, twin)
    ]
    for step in range(4):
        tokens = torch.randint(0, 9, (step + 2, 3))
        for run, each, own in ((call, model, optimizers[0]), (twin, twin, optimizers[1])):
            each.zero_grad()
            run(tokens).backward()
            layouts = {n: p.grad.layout for n, p in each.named_parameters() if p.grad is not None}
            assert {n for n, layout in layouts.items() if layout is torch.sparse_coo} == set(sparse)
            for optimizer in own:
                optimizer.step()
    rows = model.words.weight.grad._indices()[0]
    assert (rows.diff() > 0).all()  # each row once, in order
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-11)
    assert len(gradc.torch.report().graphs) == 2


# -- time --------------------------------------------------------------------------------------------------------------


def test_the_report_tells_the_time_of_regions_and_ops() -> None:
    def function(x: Any, w: Any) -> Any:
        return torch.fft.fft(torch.tanh(x * w).exp()).abs().sin().square().sum()

    x, w = rand(3, 4), rand(4)
    call = compiled(function, timed=True)
    for _ in range(3):
        call(x, w).backward()
    report = gradc.torch.report()
    times = {time.op: time for time in report.times}
    assert {"region 0", "region 1", "aten._fft_r2c.default"} <= times.keys()
    assert all(time.calls == 2 and time.forward > 0 for time in times.values())
    assert all(times[op].backward > 0 for op in ("region 0", "region 1", "aten._fft_r2c.default"))
    row = next(row for row in report.rows if row.op == "aten._fft_r2c.default")
    assert row.time is not None
    assert row.time == pytest.approx(times[row.op].seconds / sum(t.seconds for t in times.values()))
    assert "share of time" in str(report) and "ms backward" in str(report)
    report.clear()
    torch._dynamo.reset()
    compiled(function)(x, w)
    assert not report.times and report.rows[0].time is None  # off unless asked for


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_compiled_optimizer_steps(kind: Any, whole: bool) -> None:
    """``torch.compile(optimizer.step)``, and a training step as one function; beside aot_eager, as Dynamo counts the
    steps of AdamW in f32.
    """
    model = models.seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    x = rand(5, 4, grad=False)

    def trained(each: Any, compile: Any) -> list[Any]:
        optimizer = kind(each.parameters(), lr=0.1)
        update = optimizer.step if whole else compile(optimizer.step)

        def step() -> Any:
            optimizer.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            update()
            return loss.detach()

        run = compile(step) if whole else step
        return [run() for _ in range(3)]

    twin = copy.deepcopy(model)
    ours, theirs = trained(model, compiled), trained(twin, lambda f: torch.compile(f, backend="aot_eager"))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-7, atol=1e-7)
    report = gradc.torch.report()
    assert report.share > 0.9 and {row.op for row in report.rows} <= {"prims.fma.default"}


# -- observers of quantization -----------------------------------------------------------------------------------------


class Observer(nn.Module):
    """A moving average of minima and maxima, and the fake quantization by it, as PT2E's training inserts them.

    :param axis: of the channels; None: per tensor.
    """

    def __init__(self, axis: int | None) -> None:
        super().__init__()
        self.axis = axis
        shape = () if axis is None else (0,)  # that of channels is found at the first call
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))
        self.register_buffer("low", torch.full(shape, float("inf")))
        self.register_buffer("high", torch.full(shape, float("-inf")))
        self.register_buffer("scale", torch.ones(1) if axis is None else torch.ones(0))
        self.register_buffer("zero_point", torch.zeros(1 if axis is None else 0, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.on, self.on, self.low, self.high, self.scale, self.zero_point
        each, axis = self.axis is not None, self.axis if self.axis is not None else -1
        return torch.fused_moving_avg_obs_fake_quant(x, *state, 0.01, -128, 127, axis, each, each)


class Observed(nn.Module):
    """Fake-quantized in training mode: observers that write to their buffers, and step sizes that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.weights, self.inputs = Observer(0), Observer(None)
        self.steps = nn.Parameter(torch.full((3,), 0.04))
        self.register_buffer("zeros", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(nn.functional.linear(self.inputs(x), self.weights(self.first.weight), self.first.bias))
        weight = torch._fake_quantize_learnable_per_channel_affine(
            self.second.weight, self.steps, self.zeros, 0, -128, 127, (6 * 127) ** -0.5
        )  # the gradient of a step size is scaled as its paper (LSQ) has it: training is unstable without
        return nn.functional.linear(hidden, weight, self.second.bias).exp().sin().square().mean()


def test_quantization_aware_training_follows_eager() -> None:
    """20 steps in f32: losses within 1e-4 of eager mode's, observers' buffers (sized by their first call) the same."""
    model = models.seeded(Observed, torch.float32)
    twin = copy.deepcopy(model)
    call = compiled(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in range(20):
        x, losses = torch.randn(8, 4), []
        for run, optimizer in zip((call, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-3, atol=1e-4)
    assert not torch.equal(model.steps, torch.full((3,), 0.04))
    assert {row.op for row in gradc.torch.report().rows if "no line" in row.reason} == {
        "aten._fused_moving_avg_obs_fq_helper_functional.default"
    }


def test_results_that_lie_on_a_gpu_are_not_read_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's arrays refuse NumPy; torch takes them where they lie."""
    from gradc.torch import function

    class OnGpu:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("Implicit conversion to a NumPy array is not allowed")

    taken = torch.arange(3)
    monkeypatch.setattr(function.torch, "as_tensor", lambda array: taken if isinstance(array, OnGpu) else None)
    host = np.float32([1, 2])
    first, second, third, fourth = function._tensors([OnGpu(), host, None, taken])
    assert first is taken and third is None and fourth is taken
    assert second.tolist() == [1, 2] and second.data_ptr() == host.ctypes.data
