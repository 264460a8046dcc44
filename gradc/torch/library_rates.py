"""How fast torch's attention and convolutions are on this device, as ``gradc calibrate`` writes it down."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..targets.devices import Gpu

Seconds = Callable[[Callable[[], object]], float]
"""The device's seconds of a function."""
VERSION = str(torch.__version__)


def available() -> bool:
    """Whether torch has a device of CUDA's."""
    return torch.cuda.is_available()


def library_rates(
    gpu: Gpu,
    seconds: Seconds | None = None,
    *,
    device: str = "cuda",
    attention: tuple[int, int, int] = (4, 16, 2048),
    images: tuple[int, int] = (32, 56),
) -> dict[str, float]:
    """The constants ``attention_forward``, ``attention_backward`` and ``convolution`` of a GPU: products and sums per
    second, less a launch, of causal attention with 64 features and of a convolution by 3 x 3 of 64 channels, in bf16.

    :param seconds: by which a function is timed; events of CUDA.
    :param attention: batch, heads, rows.  :param images: how many, and their rows and columns.
    """
    timed = seconds or _by_events
    batch, heads, rows = attention
    q, k, v = (torch.randn(batch, heads, rows, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    recorded = [x.detach().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(recorded[0], recorded[1], recorded[2], is_causal=True)
    dy = torch.randn_like(y)
    forward = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    backward = timed(lambda: torch.autograd.grad(y, recorded, dy, retain_graph=True))
    flops = 2.0 * batch * heads * rows * rows * 64
    count, side = images
    image = torch.randn(count, 64, side, side, device=device, dtype=torch.bfloat16)
    weight = torch.randn(64, 64, 3, 3, device=device, dtype=torch.bfloat16)
    image, weight = (x.to(memory_format=torch.channels_last) for x in (image, weight))
    convolution = timed(lambda: F.conv2d(image, weight, padding=1))
    return {
        "attention_forward": flops / max(forward - gpu.launch, gpu.launch),
        "attention_backward": 2.5 * flops / max(backward - 3 * gpu.launch, gpu.launch),
        "convolution": 2.0 * count * side * side * 64 * 64 * 9 / max(convolution - gpu.launch, gpu.launch),
    }


def _by_events(function: Callable[[], object], warm: int = 3, times: int = 10) -> float:
    """The median of some calls, each between two events."""
    for _ in range(warm):
        function()
    found = []
    for _ in range(times):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()  # type: ignore[no-untyped-call]
        function()
        last.record()  # type: ignore[no-untyped-call]
        last.synchronize()  # type: ignore[no-untyped-call]
        found.append(first.elapsed_time(last) * 1e-3)  # type: ignore[no-untyped-call]
    return sorted(found)[times // 2]
