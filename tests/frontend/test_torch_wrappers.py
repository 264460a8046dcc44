"""Tensors that wrap others: torchao's quantized weights, and what of such tensors is left to torch."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch import nn  # noqa: E402

import gradc  # noqa: E402
import gradc.torch  # noqa: E402

ROWS, INNER, COLUMNS = 8, 64, 96


def quantized(config: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization", reason="torchao's weights need torchao")
    torch.manual_seed(0)
    parts = OrderedDict(first=nn.Linear(INNER, COLUMNS), gelu=nn.GELU(), last=nn.Linear(COLUMNS, INNER))
    model = nn.Sequential(parts)
    if config == "IntxWeightOnlyConfig":
        options = {"weight_dtype": torch.int4, "granularity": torchao.PerGroup(32)}
    torchao.quantize_(model, getattr(torchao, config)(**options))
    return model


def batch() -> torch.Tensor:
    return torch.randn(ROWS, INNER, generator=torch.Generator().manual_seed(1), requires_grad=True)


WEIGHT_ONLY = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")


@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_weights_of_torchao_through_the_backend(config: str) -> None:
    model, x = quantized(config), batch()
    wanted = model(x)
    gradient = torch.autograd.grad(wanted.square().sum(), [x, model.first.bias])
    torch._dynamo.reset()
    y = torch.compile(model, backend="gradc", options={"fallback": "error"})(x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    for found, each in zip(torch.autograd.grad(y.square().sum(), [x, model.first.bias]), gradient, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)


def test_integer_activations_through_the_backend() -> None:
    """Quantized as they come: the product of integers is the same, and so are the bits."""
    model, x = quantized("Int8DynamicActivationInt8WeightConfig"), batch().detach()
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(model, backend="gradc", options={"fallback": "error"})(x)
        torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_scales_of_torchao_are_inputs_with_a_gradient(config: str) -> None:
    """Against autograd through the product with the weight written out, in f64."""
    model, x = quantized(config), batch().detach()
    graph = gradc.from_torch(model, (x,))
    weight = model.first.weight
    parts = {f"first.weight.{name}": getattr(weight, name) for name in ("qdata", "scale")}
    assert {*parts, "first.bias", "last.bias", "last.weight.scale"} <= set(graph.input_names)
    module = gradc.compile(graph, wrt=["first.weight.scale", "input"], target="numpy", unused="zeros")
    given = {
        name: getattr(getattr(model, name.partition(".")[0]).weight, name.rpartition(".")[2])
        for name in graph.input_names
        if ".weight." in name
    }
    given |= {"first.bias": model.first.bias.detach(), "last.bias": model.last.bias.detach(), "input": x}
    y, residuals = module.forward(**given)
    found = module.backward(residuals, torch.ones_like(torch.as_tensor(y)))

    def dense(layer: nn.Module, scale: torch.Tensor) -> torch.Tensor:
        codes = layer.weight.qdata.to(torch.float64)
        return (codes.reshape(*scale.shape, -1) * scale[..., None]).reshape(codes.shape)

    scale = weight.scale.to(torch.float64).requires_grad_()
    wide = x.to(torch.float64).requires_grad_()
    hidden = nn.functional.gelu(wide @ dense(model.first, scale).T + model.first.bias.to(torch.float64))
    whole = hidden @ dense(model.last, model.last.weight.scale.to(torch.float64)).T + model.last.bias.to(torch.float64)
    wanted = torch.autograd.grad(whole.sum(), [scale, wide])
    torch.testing.assert_close(torch.as_tensor(y), whole.detach().float(), rtol=1e-5, atol=1e-5)
    for name, each in zip(("first.weight.scale", "input"), wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(found[name]).to(torch.float64), each, rtol=1e-5, atol=1e-5)


class Adapted(nn.Module):
    """A layer of torchao's beside a product of two thin matrices; ``learned``: taken apart, its scales a parameter."""

    def __init__(self, layer: nn.Module, learned: bool):
        super().__init__()
        self.layer, self.learned = layer, learned
        outputs, inputs = layer.weight.shape
        self.low, self.high = (nn.Parameter(torch.randn(shape) / 8) for shape in ((4, inputs), (outputs, 4)))
        if learned:
            self.codes = layer.weight.qdata
            self.scale = nn.Parameter(layer.weight.scale.reshape(outputs, -1).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapter = x @ self.low.T @ self.high.T
        if not self.learned:
            return self.layer(x) + adapter
        groups = self.codes.unflatten(1, (self.scale.shape[1], -1)).to(x.dtype)
        return nn.functional.linear(x, (groups * self.scale[..., None]).flatten(1), self.layer.bias) + adapter


@pytest.mark.parametrize("learned", [False, True], ids=["", "scales"])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_adapters_and_scales_learn_in_one_region(config: str, learned: bool) -> None:
    """Losses of steps beside eager mode's, and the first gradients against f64."""
    model = quantized(config)
    for name in ("first", "last"):
        setattr(model, name, Adapted(getattr(model, name).requires_grad_(False), learned))
    x, names = batch().detach(), [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == (6 if learned else 4)
    twin = copy.deepcopy(model)
    if learned:
        wide = copy.deepcopy(model).double()
        wanted = torch.autograd.grad(
            wide(x.double()).square().mean(), [p for p in wide.parameters() if p.requires_grad]
        )
    torch._dynamo.reset()
    gradc.torch.report().clear()
    losses: list[list[float]] = []
    compiled = torch.compile(model, backend="gradc", options={"fallback": "error"})
    for call, owner in ((compiled, model), (twin, twin)):
        own = [p for p in owner.parameters() if p.requires_grad]
        rates = [1e-7 if name.endswith("scale") else 1e-2 for name in names]
        optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(own, rates, strict=True)])
        losses.append([])
        for step in range(4):
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            if learned and not step:
                for p, each in zip(own, wanted, strict=True):
                    torch.testing.assert_close(p.grad.double(), each, rtol=1e-4, atol=1e-6)
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    report = gradc.torch.report()
    assert report.share == 1 and "1 regions" in str(report)


def test_quantization_aware_training_with_learned_ranges() -> None:
    """torchao's: the scales are parameters, and learn as in eager mode."""
    qat = pytest.importorskip("torchao.quantization.qat", reason="torchao's weights need torchao")
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(INNER, COLUMNS), nn.GELU(), nn.Linear(COLUMNS, INNER)), batch()
    config = qat.IntxFakeQuantizeConfig(
        torch.int8,
        granularity="per_channel",
        is_dynamic=False,
        range_learning=True,
        scale_precision=torch.float32,
        zero_point_precision=torch.float32,
    )
    quantize_(model, qat.QATConfig(weight_config=config, step="prepare"))
    qat.initialize_fake_quantizers(model, (x,))
    parameters = dict(model.named_parameters())
    assert "0.weight_fake_quantizer.scale" in parameters
    torch._dynamo.reset()
    wanted = torch.autograd.grad(model(x).square().sum(), list(parameters.values()))
    found = torch.autograd.grad(torch.compile(model, backend="gradc")(x).square().sum(), list(parameters.values()))
    for name, each, other in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()), msg=name)


class Doubled(torch.Tensor):
    """A wrapper of our own: the tensor, and a copy of it."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, first.size(), strides=first.stride(), dtype=first.dtype, requires_grad=first.requires_grad
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor):
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Doubled:
        return Doubled(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(name: str) -> Any:
            return torch.utils._pytree.tree_map_only(Doubled, lambda x: getattr(x, name), (args, kwargs or {}))

        (first, options), (second, _) = part("first"), part("second")
        return Doubled(function(*first, **options), function(*second, **options))


def test_what_is_left_to_torch() -> None:
    """A wrapper among the results, and a wrapper's own gradient, are wrappers again."""
    torch._dynamo.reset()
    given = Doubled(torch.randn(4, 3), torch.randn(4, 3))
    y = torch.compile(lambda x: torch.sin(x) * 2 + 1, backend="gradc")(given)
    assert isinstance(y, Doubled)
    torch.testing.assert_close(y.second, torch.sin(given.second) * 2 + 1)
    assert "tensor subclass" in str(gradc.torch.report())
    weight = Doubled(*(torch.randn(3, 3, requires_grad=True) for _ in range(2)))
    x = torch.randn(4, 3)
    torch._dynamo.reset()
    y = torch.compile(lambda x, w: (x @ w.detach()).sum() + x.sum(), backend="gradc")(x, weight)
    assert "the gradient of a Doubled" in str(gradc.torch.report())
    assert isinstance(y, Doubled)
