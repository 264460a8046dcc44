"""Learnable quantization scales in a PyTorch training loop.

A linear layer whose weights are 8-bit integers, with one float scale per output channel.  The integers stay as they
are; the scales learn.  torch.compile's own backends leave such a scale without a gradient and say nothing; gradc's has
it.

    python examples/05_qat_loop.py
"""

import torch
from torch import nn
from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib  # noqa: F401, registers the ops

import gradc.torch


class QuantizedLinear(nn.Module):
    """x @ dequantize(q, scale).T + bias, and fake-quantized activations with a learnable step (LSQ)."""

    def __init__(self, weight):
        super().__init__()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("q", (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("zeros", torch.zeros(len(scale), dtype=torch.int64))
        self.scale, self.bias = nn.Parameter(scale), nn.Parameter(torch.zeros(len(scale)))
        self.step, self.zero = nn.Parameter(torch.tensor([0.05])), nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x):
        x = torch._fake_quantize_learnable_per_tensor_affine(x, self.step, self.zero, -128, 127)
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.q, self.scale, self.zeros, 0, -127, 127, torch.int8
        )
        return nn.functional.linear(x, weight, self.bias)


torch.manual_seed(0)
weight = torch.randn(8, 16)
x = torch.randn(64, 16)
wanted = x @ (weight * torch.linspace(0.5, 1.5, 8)[:, None]).T  # the same weights, rescaled per channel


def gradient_of_the_scale(backend):
    """What the scale's gradient is after one backward."""
    torch._dynamo.reset()
    layer = QuantizedLinear(weight)
    call = torch.compile(layer, backend=backend) if backend != "eager mode" else layer
    try:
        (call(x) - wanted).square().mean().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None if layer.scale.grad is None else layer.scale.grad


found = {backend: gradient_of_the_scale(backend) for backend in ("eager mode", "aot_eager", "gradc")}
for backend, gradient in found.items():
    shown = f"{gradient.norm():.4f} (its norm)" if isinstance(gradient, torch.Tensor) else gradient
    print(f"the gradient of the scales, {backend + ':':<12} {shown}")
torch.testing.assert_close(found["gradc"], found["eager mode"], rtol=1e-3, atol=1e-3)

torch._dynamo.reset()
layer = QuantizedLinear(weight)
before = layer.scale.detach().clone()
call = torch.compile(layer, backend="gradc", options={"fallback": "error"})
optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
for i in range(300):  # the user's own loop
    optimizer.zero_grad()
    loss = (call(x) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    if i % 60 == 0 or i == 299:
        print(f"step {i:>3}  loss {loss.item():.5f}")
ratio = (layer.scale / before).detach()
print("the scales grew by", " ".join(f"{r:.2f}" for r in ratio))
print("and should by     ", " ".join(f"{r:.2f}" for r in torch.linspace(0.5, 1.5, 8)))
assert (ratio - torch.linspace(0.5, 1.5, 8)).abs().max() < 0.1
assert gradc.torch.report().graphs[-1].refused == ()
