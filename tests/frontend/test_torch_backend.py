"""torch.compile(model, backend="gradc"): values and gradients against eager, and what falls back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
import torch_models as models  # noqa: E402
from torch import nn  # noqa: E402
from torch_compiled import agree, compiled, fresh, rand  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc.errors import InvalidProblem, Unsupported  # noqa: E402

# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.MODELS)
def test_a_training_step_is_eagers(name: str) -> None:
    kind = models.MODELS[name]
    model = models.seeded(kind)
    batch = models.to(torch.float64, kind.batch())
    wanted = models.step(model, model, batch)
    got = models.step(compiled(model, fallback="error"), model, batch)
    assert models.error(got, wanted) < 1e-8
    assert gradc.torch.report().share == 1


def test_batch_norm_and_convolutions() -> None:
    """Three steps: gradients, and the running statistics that each leaves behind; then in evaluation mode."""
    model = models.seeded(models.ResNet)
    twin = copy.deepcopy(model)
    call = compiled(model, fallback="error")
    batch = models.to(torch.float64, models.ResNet.batch())
    for _ in range(3):
        assert models.error(models.step(call, model, batch), models.step(twin, twin, batch)) < 1e-8
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert not any(buffer.requires_grad for buffer in model.buffers())
    model.eval()
    twin.eval()
    assert models.error(models.step(call, model, batch), models.step(twin, twin, batch)) < 1e-8


class Normed(torch.nn.Module):
    """Running statistics of every kind beside each other: with and without weights, of a batch and of each image."""

    batch = models.ResNet.batch

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.Sequential(
            torch.nn.BatchNorm2d(3),
            torch.nn.Hardtanh(-3, 3),
            torch.nn.BatchNorm2d(3, affine=False, momentum=None),
            torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
            torch.nn.Softsign(),
            torch.nn.InstanceNorm2d(3, track_running_stats=True),
        )

    def forward(self, images: Any, *_: Any) -> Any:
        return self.norms(images).pow(3).mean() + images.mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*models.MODELS, "resnet", "normed"])
def test_a_model_in_16_bits_is_as_exact_as_eagers(name: str, dtype: torch.dtype) -> None:
    """All of it, buffers too: ``model.bfloat16()``, not autocast.  Both round by chance: twice eager's error is
    allowed, as on a GPU (docs/gpu.md).
    """
    kind = {**models.MODELS, "resnet": models.ResNet, "normed": Normed}[name]
    model = models.seeded(kind, torch.float32).to(dtype)
    exact, twin = models.twin(model, torch.float64), copy.deepcopy(model)
    batch = models.to(dtype, kind.batch())
    want = models.step(exact, exact, models.to(torch.float64, batch))
    # That of a bias before a norm is 0: what 16 bits make of it says nothing.
    least = 1e-3 * max(float(value.abs().max()) for value in want.values())
    told = {name: value for name, value in want.items() if value.abs().max() > least}
    got, eagers = (
        {name: value for name, value in models.step(call, own, batch).items() if name in told}
        for call, own in ((compiled(model, fallback="error"), model), (twin, twin))
    )
    assert models.error(got, told) <= 2 * models.error(eagers, told)
    for buffer, other, exactly in zip(model.buffers(), twin.buffers(), exact.buffers(), strict=True):
        error, allowed = ((x.double() - exactly.double()).abs().max() for x in (buffer, other))
        assert buffer.dtype is other.dtype
        assert error <= allowed + torch.finfo(dtype).eps * exactly.double().abs().max()


def test_what_torch_runs_may_have_another_dtype_than_its_tracing_said() -> None:
    """A region reads it in the dtype that the graph has for it."""
    with torch.library._scoped_library("gradc_tests", "FRAGMENT") as library:
        library.define("rounded(Tensor x) -> Tensor")
        library.impl("rounded", lambda x: x.bfloat16(), "CPU")
        library.impl("rounded", lambda x: torch.empty_like(x, dtype=torch.float32), "Meta")
        x = torch.randn(4, 5)
        found = compiled(lambda x: torch.ops.gradc_tests.rounded(x).exp() * 2 - 1)(x)
        assert gradc.torch.report().share < 1
        torch.testing.assert_close(found, x.bfloat16().float().exp() * 2 - 1)


def test_machine_code_two_sizes_and_a_loss_curve() -> None:
    """f32 on the CPU: three shapes in two compilations, errors of at most four times eager's, ten steps of AdamW."""
    model = models.seeded(models.DLRM, torch.float32)
    exact, twin = models.twin(model, torch.float64), copy.deepcopy(model)
    call = compiled(model, target="cpu")
    for rows in (3, 6, 9):
        batch = models.DLRM.batch(rows)
        want = models.step(exact, exact, models.to(torch.float64, batch))
        theirs = models.error(models.step(twin, twin, batch), want)
        assert models.error(models.step(call, model, batch), want) <= max(4 * theirs, 1e-6)
    assert len(gradc.torch.report().graphs) <= 2
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    curves: list[list[float]] = [[], []]
    for _ in range(10):
        for run, optimizer, curve in zip((call, twin), optimizers, curves, strict=True):
            optimizer.zero_grad()
            loss = run(*batch)
            loss.backward()
            optimizer.step()
            curve.append(float(loss.detach()))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4) and curves[0][-1] < curves[0][0]


# -- what a step may do ------------------------------------------------------------------------------------------------


def test_symbolic_sizes_take_two_compilations() -> None:
    function = lambda x, w: (x @ w).softmax(-1).sum(0) * x.shape[0]
    call = compiled(function)
    for rows in (3, 5, 8):
        x, w = rand(rows, 4), rand(4, 2)
        y = call(x, w)
        torch.testing.assert_close(y, function(x, w))
        for got, want in zip(
            torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(function(x, w).sum(), (x, w)), strict=True
        ):
            torch.testing.assert_close(got, want)
    assert len(gradc.torch.report().graphs) == 2


def test_an_empty_batch() -> None:
    agree(lambda x, w: torch.tanh(x @ w) * 2, rand(0, 4), rand(4, 2), whole=True)


def test_inputs_that_share_memory_at_a_later_call() -> None:
    def function(a: Any, b: Any) -> Any:
        a.add_(1)
        return (b * 2).sin().exp()

    call = compiled(function)
    for _ in range(2):
        a, b = torch.zeros(4, 3), torch.ones(2, 3)
        torch.testing.assert_close(call(a, b), function(a.clone(), b))
    ours, eager = torch.zeros(4, 3), torch.zeros(4, 3)
    torch.testing.assert_close(call(ours, ours[:2]), function(eager, eager[:2]))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_beside_16_bit_tensors_are_rounded_where_torch_rounds_them(dtype: torch.dtype) -> None:
    """Products and quotients keep them, sums and powers take them at 16 bits; bit for bit."""
    wide, many = torch.tensor(0.3), torch.tensor(70001)
    every = (
        lambda x: x * 0.1,
        lambda x: x / 0.3,
        lambda x: x * 1e5,
        lambda x: x * wide,
        lambda x: x * many,
        lambda x: torch.lerp(x, x + x, 0.3),
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        lambda x: torch.addcmul(x, x, x, value=0.3),
        lambda x: x + 0.1,
        lambda x: 0.1 - x,
        lambda x: x.abs() ** 0.3,
        lambda x: torch.fmod(x, 0.3),
        lambda x: torch.remainder(x, 0.3),
    )
    function = lambda x: tuple(f(x) for f in every)
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k, (got, want) in enumerate(zip(compiled(function, fallback="error")(x), function(x), strict=True)):
        assert torch.equal(got, want), k


def test_ties_edges_and_scalars() -> None:
    """Gradients at ties of clamp and median; quotients rounded down near integers and at infinity; tensors without
    axes.
    """

    def function(x: Any, low: Any, high: Any, scalar: Any) -> Any:
        return (
            x.clamp(low, high) * torch.tensor([1.0, 2, 3]),
            x.clamp(min=low) * 2,
            x.clamp(max=high) * 3,
            torch.clamp_max(x, high * torch.tensor([math.nan, 1, 1])).isnan(),
            torch.cat([high, high + math.inf, high + math.inf]).median() * 2,
            torch.stack([high, high, low, low]).median() * 2,
            torch.div(x, low, rounding_mode="floor"),
            torch.div(2, high, rounding_mode="floor"),
            torch.ops.aten.elu(x * 1000, 1.5, 2.0, 1.0),
            scalar.squeeze(0) * 2,
            (scalar * 2).argmax(0),
            torch.div(-scalar, math.inf, rounding_mode="floor"),
        )

    x, low, high = (
        torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1, 2, 3], [0.1, 2, 0.3], [5, 2, 3])
    )
    agree(function, x, low, high, torch.tensor(2.0, dtype=torch.float64, requires_grad=True))


def test_inputs_in_other_layouts_and_expanded() -> None:
    call = compiled(lambda x, y: torch.exp(x) * y + x)
    base = rand(4, 3)
    for x, y in ((base.t(), rand(1, 1).expand(3, 4)), (base[:, ::2], rand(4, 2)), (rand(1, 3).expand(4, 3), base)):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        z = call(x, y)
        torch.testing.assert_close(z, torch.exp(x) * y + x)
        grads = torch.autograd.grad(z.sum(), (x, y))
        torch.testing.assert_close(grads, (torch.exp(x) * y + 1, torch.exp(x)))


def test_integer_outputs_and_outputs_without_a_gradient() -> None:
    """Int outputs, detached ones and those of no_grad do not require grad; a cotangent that is missing is zero."""

    def function(x: Any, w: Any) -> Any:
        with torch.no_grad():
            scale = x.abs().amax()
        y = x * w
        return y, y.argmax(-1), y.detach() * w, x * scale, (x > 0)

    agree(function, rand(3, 4), rand(4), whole=True)
    x, w = rand(3, 4), rand(4)
    y, _, z, _, _ = compiled(function)(x, w)
    (got,) = torch.autograd.grad(z.sum(), w)  # y's cotangent is None
    torch.testing.assert_close(got, (x * w).detach().sum(0))
    assert y.requires_grad


def test_no_grad_and_inference_mode() -> None:
    function = lambda x, w: torch.tanh(x * w).sum(-1)
    call = compiled(function)
    x, w = rand(3, 4), rand(4)
    with torch.no_grad():
        y = call(x, w)
    assert not y.requires_grad
    torch.testing.assert_close(y, function(x, w).detach())
    with torch.inference_mode():
        torch.testing.assert_close(call(torch.ones(3, 4).double(), w), function(torch.ones(3, 4).double(), w))
    y = call(x, w)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w), torch.autograd.grad(function(x, w).sum(), w))


def test_autocast_is_casts() -> None:
    def function(x: Any, w: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.linear(torch.tanh(x), w).float().exp()

    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    y = compiled(function, fallback="error")(x, w)
    torch.testing.assert_close(y, function(x, w), rtol=2e-2, atol=2e-2)
    got, want = torch.autograd.grad(y.sum(), w)[0], torch.autograd.grad(function(x, w).sum(), w)[0]
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


class Product(torch.autograd.Function):
    """Whose gradient is another one's: that torch ran it shows."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.float() * 3, None


@pytest.mark.parametrize("left", [1, 100], ids=["gradc's", "torch's"])
def test_autocast_around_a_call_is_what_it_was_at_each_op(left: int) -> None:
    """Also where an inner block turns it off or on, and torch runs what is in it: it casts nothing a second time."""

    def function(x: Any, w: Any) -> Any:
        x = x * 1  # no leaf: torch's cache of casts knows no dtypes
        with torch.autocast("cpu", enabled=False):
            exact = x @ w
        with torch.autocast("cpu", dtype=torch.float16):
            half = Product.apply(x, w)
        return exact, exact @ w, Product.apply(x, w), half

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    call = compiled(function, smallest_region=left, numerics="strict")
    for ambient in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
            found, wanted = call(x, w), function(x, w)
        low = torch.bfloat16 if ambient else torch.float32
        assert [y.dtype for y in found] == [y.dtype for y in wanted] == [torch.float32, low, low, torch.float16]
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            *(torch.autograd.grad(sum(y.float().sum() for y in ys), x) for ys in (found, wanted))
        )


class Running(nn.Module):
    """A buffer that is written in training, as batch norm's are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
            self.seen.add_(1)
        return torch.tanh(y - self.mean) * y.detach()


def test_buffers_that_are_written() -> None:
    model = models.seeded(Running)
    twin = copy.deepcopy(model)
    call = compiled(model, fallback="error")
    x = rand(5, 4)
    for _ in range(3):
        got = models.step(lambda b: call(b).sum(), model, (x,))
        want = models.step(lambda b: twin(b).sum(), twin, (x,))
        assert models.error(got, want) < 1e-12
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert model.mean.grad_fn is None and int(model.seen) == 3


def test_an_input_that_is_written_with_a_gradient() -> None:
    def function(x: Any, w: Any, z: Any) -> Any:
        total = torch.zeros(4, dtype=torch.float64)
        y = x * w
        total.add_(y.sum(0))
        y.mul_(w)
        y[0] = total
        z.add_(total)
        return y, total.view(2, 2), z.t(), z

    agree(function, rand(3, 4, grad=False), rand(4), rand(3, 4, grad=False), whole=True)


def test_outputs_share_memory_as_they_do_in_eager() -> None:
    def function(x: Any) -> Any:
        y = torch.exp(x) * 2 + x
        return x.view(-1), y, y.t(), x

    x = rand(3, 4, grad=False)
    flat, y, turned, same = compiled(function)(x)
    assert flat.data_ptr() == x.data_ptr() and same is x and turned.data_ptr() == y.data_ptr()
    y.zero_()
    assert not turned.any()


def test_a_write_leaves_strides_as_they_are() -> None:
    """Torch's functional form of a scan, say, has its result in the order of the axes."""
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.cumsum_(0),
        lambda x: x.cumprod_(1),
        lambda x: x.tril_(),
        lambda x: x.renorm_(2, 0, 1.0),
        lambda x: x.addmm_(x.detach()[:, :3].clone(), x.detach().clone()),
        lambda x: x.scatter_(0, torch.zeros(3, 4, dtype=torch.long), 0.5),
        lambda x: x.index_add_(1, torch.tensor([0, 3]), x.detach()[:, :2].clone()),
        lambda x: x.index_copy_(0, torch.tensor([1]), x.detach()[:1].clone()),
        lambda x: x.masked_fill_((x.detach() > 0).contiguous(), 1.0),
        lambda x: x.mul_(2),
    ]

    def function(x: Any) -> Any:
        found = []
        for write in writes:
            turned, base = x.mT.clone(), x * 1
            write(turned)
            write(base.mT)  # what it is a view of keeps its own
            found += [turned, turned.mT, base]
        return tuple(found)

    x = rand(4, 3)
    for got, want in zip(agree(function, x, whole=True), function(x), strict=True):
        assert got.stride() == want.stride()

    def of_an_argument(x: Any) -> Any:
        x.cumsum_(0)
        return x * 2, x.mT.tril_() * 2, x.clone()  # what is computed from it is in its order

    for x in (rand(4, 3, grad=False), rand(4, 3, grad=False).mT):
        for got, want in zip(agree(of_an_argument, x, whole=True), of_an_argument(x), strict=True):
            assert got.stride() == want.stride()


def test_random_ops_draw_what_eager_draws() -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        y = F.dropout(torch.tanh(x @ w) * 2 + 1, 0.4)
        noise = torch.rand_like(x)
        z = torch.tanh(y @ v) * 3 - 1
        return F.dropout(z, 0.2) + torch.bernoulli(noise).sum() * y.sum()

    agree(function, rand(3, 4), rand(4, 4), rand(4, 5))
    rows = {row.op: row for row in gradc.torch.report().rows}
    assert {"aten.bernoulli.p", "aten.rand_like.default"} <= rows.keys()
    assert 0 < gradc.torch.report().share < 1
    assert "torch draws the random numbers of eager mode" in str(gradc.torch.report())


def _deep(x: Any) -> Any:
    return (x.exp() + 1).sin() * 2


UNREAD = {
    "nothing but a check of the dtype": lambda x: _deep(x).long().double(),
    "a random op, for its shape": lambda x: torch.randn_like(_deep(x)),
    "a dropout": lambda x: F.dropout(_deep(x), 0.5),
    "two of them": lambda x: F.dropout(torch.rand_like(_deep(x)) * 2 + _deep(x), 0.5),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_region_that_nothing_reads(name: str) -> None:
    """It is not run; what it would have drawn is drawn."""

    def beside_a_view(x: Any) -> Any:
        UNREAD[name](x)
        return x.view(-1)

    def beside_a_region(x: Any) -> Any:
        UNREAD[name](x)
        return F.dropout(_deep(x.mT), 0.5)

    for function in (beside_a_view, beside_a_region):
        for x in (rand(4, 4), rand(4, 4, grad=False)):
            agree(function, x)
            assert gradc.torch.report().graphs[-1].reason == ""


def test_vmap() -> None:
    """Batched along other axes, nested, with a detached value inside; an error inside leaves no level entered."""

    def function(x: Any, w: Any) -> Any:
        y = torch.vmap(lambda a, b: (a * b).sin().sum() * w + w.detach() @ a, in_dims=(0, 1))(x, x.T * 2)
        return torch.vmap(torch.vmap(lambda a, b: a.exp() * b.square()), in_dims=(0, None))(y, w) * x.sum()

    agree(function, rand(4, 4), rand(4), whole=True)
    failing = lambda x: torch.vmap(lambda a: a.exp().sum() + torch.ops.aten.as_strided_scatter(a, a[:1], [1], [1]))(x)
    with pytest.raises(Exception, match=r"as_strided|vmap"):
        compiled(failing)(rand(4, 3))
    assert not torch._C._functorch.maybe_current_level()


def _scan(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of a, and h[t] = a[t] h[t-1] + b[t], by halves, as in state space models."""
    n = a.shape[0]
    if n < 2:
        return a, b
    odd = _scan(a[:-1:2] * a[1::2], a[1::2] * b[:-1:2] + b[1::2])
    before = [y[: (n - 1) // 2] for y in odd]
    even = (torch.cat([a[:1], before[0] * a[2::2]]), torch.cat([b[:1], a[2::2] * before[1] + b[2::2]]))
    padded = [F.pad(y, (0, 0, 0, n % 2)) for y in odd]
    first, second = (torch.stack(pair, 1).flatten(0, 1)[:n] for pair in zip(even, padded, strict=True))
    return first, second


@pytest.mark.parametrize("length", [4, 5])
def test_parts_of_parts_at_constant_places(length: int) -> None:
    """A slice of what is interleaved reads at a place that the test before it rules out."""
    agree(lambda a, b: _scan(a, b)[1].sin(), rand(length, 2), rand(length, 2), whole=True)


def test_checkpointing() -> None:
    body = lambda x, w: torch.tanh(x @ w).exp()

    def function(x: Any, w: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(body, x, w, use_reentrant=False).sum(0)

    agree(function, rand(3, 4), rand(4, 4), whole=True)
    inside = compiled(body)
    x, w = rand(3, 4), rand(4, 4)
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(inside, x, w, use_reentrant=False).sum(), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(body(x, w).sum(), (x, w)))


# -- gradients that others lose ----------------------------------------------------------------------------------------


def test_the_scale_of_a_dequantize_learns() -> None:
    """Measured: eager has this gradient, aot_eager and inductor give None."""
    from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib  # noqa: F401

    q = torch.randint(-127, 128, (6, 8), dtype=torch.int8)
    zeros = torch.zeros(6, dtype=torch.int64)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel

    def function(scale: Any) -> Any:
        return dequantize(q, scale, zeros, 0, -128, 127, torch.int8).square().sum()

    scale = torch.rand(6, requires_grad=True)
    (got,) = torch.autograd.grad(compiled(function, fallback="error")(scale), scale)
    torch.testing.assert_close(got, 2 * scale.detach() * q.float().square().sum(1))


def test_a_gradient_penalty() -> None:
    """torch.compile's own backends refuse the second derivative."""
    critic = models.seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    call = compiled(critic, fallback="error")

    def penalty(run: Any, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    x = rand(5, 4)
    wanted = models.step(lambda b: penalty(critic, b), critic, (x,))
    assert models.error(models.step(lambda b: penalty(call, b), critic, (x,)), wanted) < 1e-10


# -- what is refused, and says so --------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: Straight.apply(x * 2) + x, "torch.autograd.Function"),
        (lambda x: torch.fft.fft(x).abs().sum() + x.exp().log().sum(), "no line"),
        (lambda x: torch.linalg.inv(x @ x.T + torch.eye(3).double()) * x.exp().log().sum(), "no line"),
    ],
)
def test_what_gradc_does_not_take_runs_in_torch(function: Callable[..., Any], reason: str) -> None:
    agree(function, rand(3, 4))
    assert any(reason in row.reason for row in gradc.torch.report().rows)
    with pytest.raises(Exception, match=r"gradc does not take|no normal form") as caught:
        compiled(function, fallback="error")(rand(3, 4))
    assert isinstance(caught.value.inner_exception, Unsupported)


def test_a_write_under_no_grad_that_has_no_functional_form_runs_in_torch() -> None:
    def function(x: Any, w: Any) -> Any:
        y = x * w
        with torch.no_grad():
            y.mul_(2)
        return y + w

    agree(function, rand(3), rand(3))
    assert "no_grad" in gradc.torch.report().rows[0].reason


def test_a_write_through_a_detached_view_runs_in_torch() -> None:
    def function(x: Any, w: Any) -> Any:
        y = x + w
        y.detach().mul_(2)
        return y * 3

    agree(function, rand(3), rand(3))
    assert "detach" in gradc.torch.report().rows[0].reason


def test_small_regions_stay_in_torch() -> None:
    function = lambda x: torch.fft.fft(torch.tanh(x)).abs() + 1
    agree(function, rand(3, 4))
    assert gradc.torch.report().graphs[0].regions == ()
    agree(function, rand(3, 4), smallest_region=1)
    assert gradc.torch.report().graphs[-1].regions


def test_wrong_options() -> None:
    for options, message in (
        ({"fallbakc": "error"}, "no option 'fallbakc'"),
        ({"fallback": "never"}, "'torch' or 'error'"),
        ({"smallest_region": 0}, "a number of ops"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            torch.compile(torch.sin, backend="gradc", options=options)(torch.ones(3))
        assert isinstance(caught.value.inner_exception, InvalidProblem)
        torch._dynamo.reset()


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.fill_diagonal_(0.0)
    return y * 2


def _every_second(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2] *= 3
    return y


def _rotated(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return y * 2


LIKE_EAGER = {
    "a transposed result as one row": lambda x: (x.t() * 2 + 1).t().reshape(-1),
    "as_strided of a result": lambda x: (x.t() * 2 + x.t().exp() * 0).as_strided((2, 2), (3, 1)).cumsum(0),
    "heads side by side": lambda x: (
        F.scaled_dot_product_attention(*[x.view(2, 3, 2, 2).transpose(1, 2)] * 3).transpose(1, 2).reshape(2, 3, 4)
    ),
    "torch.func.grad": lambda x: torch.func.grad(lambda z: (z.sin() * z).sum())(x),
    "torch.func.hessian": lambda x: torch.func.hessian(lambda z: (z**3).sum())(x[0]) + 0 * x.sum(),
    "fill_diagonal_": _diagonal,
    "a write to every second column": _every_second,
    "pairs of columns rotated": _rotated,
    "sinc": lambda x: torch.sinc(x * (x > 0.5)),
    "atan2 at the origin": lambda x: torch.atan2(x * 0, x * 0) + x,
}


@pytest.mark.parametrize("name", LIKE_EAGER)
def test_values_strides_and_gradients_are_eagers(name: str) -> None:
    """Where strides, writes or transforms of torch.func are in the way, what gradc does not take is torch's."""
    function = LIKE_EAGER[name]
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()
    got, want = compiled(function)(ours), function(theirs)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    cotangent = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    for y, leaf in ((got, ours), (want, theirs)):
        (y * cotangent).sum().backward()
        assert leaf.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_batch_of_one_of_an_export() -> None:
    net = torch.nn.Linear(3, 2)
    graph = gradc.from_torch(net, (torch.randn(4, 3),), dynamic_shapes={"input": {0: torch.export.Dim("batch")}})
    for rows in (0, 1, 5):
        x = torch.randn(rows, 3)
        given = {name: p.detach() for name, p in net.named_parameters()}
        torch.testing.assert_close(gradc.compile(graph, target="numpy")(input=x, **given), net(x).detach())


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.stack([b, a]),
        lambda a, b: torch.cat([a.int(), b]),
        lambda a, b: torch.cat([torch.zeros(0), b]),
        lambda a, b: torch.hstack([b, a.double()]),
    ],
    ids=["cat", "stack", "integers", "empty", "hstack"],
)
def test_parts_of_several_dtypes_are_joined_as_the_widest(function: Any) -> None:
    """As a class token in float32 before patches in bfloat16 is, under autocast; each part's gradient has its dtype."""
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3).bfloat16().requires_grad_()
    wanted, found = function(a, b) * 2, compiled(lambda a, b: function(a, b) * 2, fallback="error")(a, b)
    torch.testing.assert_close(found, wanted)
    g = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((y * g).sum(), [a, b], allow_unused=True) for y in (found, wanted)]
    torch.testing.assert_close(*[[x for x in each if x is not None] for each in gradients])
    assert [x is None for x in gradients[0]] == [x is None for x in gradients[1]]


def test_two_results_of_one_cast_are_two_tensors() -> None:
    """Also where several regions read it, so that it is cast once: the caller may write to either."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.double(), x.double()
        between = torch.sort((a * 2).exp().sin().cos(), 0).values + torch.rand(()) * 0
        return (between * b).exp().sin().cos(), a, b

    _, a, b = compiled(function)(torch.ones(4))
    a.zero_()
    assert b.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["y", "y0", "y1", "y2"])
def test_an_input_may_have_the_name_of_a_result(name: str) -> None:
    """Where a region writes it in place, too."""
    scope: dict[str, Any] = {}
    exec(f"def function({name}, b):\n r = b * 2 + {name}\n {name}.add_(b).mul_(3)\n return r.sin().cos()", scope)
    x, b = rand(5).detach(), rand(5).detach()
    other = x.clone()
    with torch.no_grad():
        wanted, found = scope["function"](other, b), compiled(scope["function"], smallest_region=1)(x, b)
    torch.testing.assert_close((found, x), (wanted, other))
