"""The models of :mod:`benchmarks.gpu_models`, at the sizes that people train on one GPU, and small ones of their form.

All are written here in torch's own layers, so that a bare machine with torch has them: ``torch.nn.functional``'s
attention, channels-last convolutions, dropout where the published models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .model_list import DLRM, Batch, UNet


@dataclass(frozen=True)
class GpuModel:
    """A model, its batch and what a step of it is counted in.

    :param build: gives the module and its batch, on the CPU; ``module(*batch)`` is the loss.  :param tiny: the same at
        small sizes.
    :param unit: what :attr:`units` of a step there are: ``"tokens"``, ``"images"``, ``"samples"``.
    :param autocast: whether a step is in bfloat16 by ``torch.autocast``; else it is in f32.
    :param random: whether a step draws random numbers (dropout).
    """

    name: str
    build: Callable[[], tuple[nn.Module, Batch]]
    tiny: Callable[[], tuple[nn.Module, Batch]]
    unit: str
    units: int
    autocast: bool = True
    random: bool = False


# -- transformers ------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys [B,H,S,D] turned by their positions: RoPE, base 10,000."""
    length, width = x.shape[-2:]
    frequencies = 1e4 ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Self-attention; ``groups`` of heads share keys and values."""

    def __init__(self, width: int, heads: int, groups: int, *, causal: bool, rope: bool, bias: bool, dropout: float):
        super().__init__()
        self.heads, self.groups, self.causal, self.rope, self.dropout = heads, groups, causal, rope, dropout
        self.sizes = [width, groups * (width // heads), groups * (width // heads)]
        self.project, self.out = nn.Linear(width, sum(self.sizes), bias), nn.Linear(width, width, bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, n, -1).transpose(1, 2)
            for each, n in zip(
                self.project(x).split(self.sizes, -1), (self.heads, self.groups, self.groups), strict=True
            )
        )
        if self.rope:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            self.dropout if self.training else 0.0,
            self.causal,
            enable_gqa=self.groups != self.heads,
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and an MLP, each with its residual; ``style`` is ``"gpt"``, ``"llama"``, ``"bert"`` (norms after) or
    ``"vit"``.
    """

    def __init__(self, style: str, width: int, heads: int, groups: int, dropout: float):
        super().__init__()
        llama, self.after = style == "llama", style == "bert"
        norm: Any = nn.RMSNorm if llama else nn.LayerNorm
        self.first, self.second, self.drop = norm(width), norm(width), nn.Dropout(dropout)
        self.attention = Attention(
            width, heads, groups, causal=style in ("gpt", "llama"), rope=llama, bias=not llama, dropout=dropout
        )
        gelu = nn.GELU(approximate="tanh" if style == "gpt" else "none")
        self.mlp: nn.Module = (
            SwiGLU(width, width * 8 // 3 // 64 * 64 or 64)
            if llama
            else nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.after:
            x = self.first(x + self.drop(self.attention(x, mask)))
            return self.second(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attention(self.first(x), mask))
        return x + self.drop(self.mlp(self.second(x)))


class OneBlock(nn.Module):
    """A block alone; the loss is a weighted mean."""

    def __init__(self, style: str, width: int, heads: int, dropout: float):
        super().__init__()
        self.block = Block(style, width, heads, heads, dropout)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.block(x) * weights).mean()


class Language(nn.Module):
    """A causal language model; its head is its embedding where ``tied``."""

    def __init__(
        self,
        style: str,
        words: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        groups: int = 0,
        dropout: float = 0.0,
        tied: bool = True,
    ):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width) if style == "gpt" else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(style, width, heads, groups or heads, dropout) for _ in range(layers))
        self.norm: nn.Module = nn.LayerNorm(width) if style == "gpt" else nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Bert(nn.Module):
    """An encoder with padding, whose first row is classified."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, width) for n in (words, length, 2))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block("bert", width, heads, heads, dropout) for _ in range(layers))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places < lengths[:, None])[:, None, None, :]
        x = self.words(tokens) + self.places(places) + self.kinds(torch.zeros_like(tokens))
        x = self.drop(self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.drop(torch.tanh(self.pool(x[:, 0])))), labels)


class ViT(nn.Module):
    """An image's patches as words."""

    def __init__(self, image: int, patch: int, width: int, layers: int, heads: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block("vit", width, heads, heads, 0.0) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


# -- convolutions ------------------------------------------------------------------------------------------------------


def convolved(inner: int, outer: int, size: int, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Sequential:
    """A convolution without bias, batch norm and an activation (None: none)."""
    conv = nn.Conv2d(inner, outer, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), *([act()] if act else []))


class Bottleneck(nn.Module):
    def __init__(self, inner: int, middle: int, stride: int):
        super().__init__()
        outer = 4 * middle
        self.body = nn.Sequential(
            convolved(inner, middle, 1), convolved(middle, middle, 3, stride), convolved(middle, outer, 1, act=None)
        )
        self.short = nn.Identity() if inner == outer else convolved(inner, outer, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.short(x) + self.body(x))


class ResNet(nn.Module):
    """He et al.'s bottleneck network."""

    def __init__(self, depths: Sequence[int], width: int, classes: int):
        super().__init__()
        self.stem = nn.Sequential(convolved(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks, inner = [], width
        for level, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(inner, width << level, 2 if level and not k else 1))
                inner = 4 * (width << level)
        self.body, self.head = nn.Sequential(*blocks), nn.Linear(inner, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.stem(x)).mean((2, 3))), labels)


class Inverted(nn.Module):
    """MobileNetV3's block: wide, by channel, squeezed, narrow."""

    def __init__(self, inner: int, wide: int, outer: int, size: int, stride: int, squeeze: bool, act: Any):
        super().__init__()
        self.wide, self.narrow = convolved(inner, wide, 1, act=act), convolved(wide, outer, 1, act=None)
        self.depthwise = convolved(wide, wide, size, stride, wide, act)
        self.squeeze = (
            nn.Sequential(nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid())
            if squeeze
            else None
        )
        self.residual = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.wide(x))
        if self.squeeze is not None:
            y = y * self.squeeze(y.mean((2, 3), keepdim=True))
        y = self.narrow(y)
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """MobileNetV3 large's form; ``rows`` are (kernel, wide, outer, squeeze, hardswish, stride)."""

    LARGE = (
        (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
        (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
        (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
        (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
        (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
    )  # fmt: skip

    def __init__(self, rows: Sequence[tuple[int, int, int, bool, bool, int]], classes: int):
        super().__init__()
        self.stem, blocks, inner = convolved(3, 16, 3, 2, act=nn.Hardswish), [], 16
        for size, wide, outer, squeeze, hard, stride in rows:
            act = nn.Hardswish if hard else nn.ReLU
            blocks.append(Inverted(inner, wide, outer, size, stride, squeeze, act))
            inner = outer
        self.body, self.last = nn.Sequential(*blocks), convolved(inner, 6 * inner, 1, act=nn.Hardswish)
        self.head = nn.Sequential(nn.Linear(6 * inner, 1280), nn.Hardswish(), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.last(self.body(self.stem(x))).mean((2, 3))), labels)


class ConvBlock(nn.Module):
    """A bottleneck alone; the loss is a weighted mean."""

    def __init__(self, width: int):
        super().__init__()
        self.block = Bottleneck(4 * width, width, 1)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.block(x) * weights).mean()


class LanguageHead(nn.Module):
    """What a language model ends with, alone: logits of many words and their loss."""

    def __init__(self, rows: int, width: int, words: int):
        super().__init__()
        self.rows, self.head = nn.Parameter(torch.randn(rows, width)), nn.Linear(width, words, bias=False)

    def forward(self, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.rows), targets)


# -- the list ----------------------------------------------------------------------------------------------------------


def _block(batch: int, length: int, width: int, heads: int, dropout: float) -> Callable[[], tuple[nn.Module, Batch]]:
    return lambda: (
        OneBlock("gpt", width, heads, dropout),
        (torch.randn(batch, length, width), torch.randn(batch, length, width)),
    )


def _language(batch: int, length: int, words: int, *sizes: Any, **options: Any) -> Any:
    def build() -> tuple[nn.Module, Batch]:
        tokens = torch.randint(0, words, (batch, length + 1))
        return Language(sizes[0], words, length, *sizes[1:], **options), (tokens[:, :-1], tokens[:, 1:])

    return build


def _bert(batch: int, length: int, words: int, *sizes: Any) -> Any:
    def build() -> tuple[nn.Module, Batch]:
        lengths = torch.randint(length // 2, length + 1, (batch,))
        return Bert(words, length, *sizes), (
            torch.randint(0, words, (batch, length)),
            lengths,
            torch.randint(0, 2, (batch,)),
        )

    return build


def _images(make: Callable[[], nn.Module], batch: int, size: int, classes: int) -> Any:
    """A network and its batch, channels last."""

    def build() -> tuple[nn.Module, Batch]:
        last = torch.channels_last
        images = torch.randn(batch, 3, size, size).contiguous(memory_format=last)
        return make().to(memory_format=last), (images, torch.randint(0, classes, (batch,)))

    return build


def _maps(make: Callable[[], nn.Module], channels: int, batch: int, size: int, labels: bool) -> Any:
    """A network whose answer is an image."""

    def build() -> tuple[nn.Module, Batch]:
        last = torch.channels_last
        x = torch.randn(batch, channels, size, size).contiguous(memory_format=last)
        wanted = torch.randint(0, 2, (batch, size, size)) if labels else torch.randn_like(x)
        return make().to(memory_format=last), (x, wanted)

    return build


def _head(rows: int, width: int, words: int) -> Any:
    return lambda: (LanguageHead(rows, width, words), (torch.randint(0, words, (rows,)),))


def _dlrm(batch: int, tables: int, rows: int, bag: int, width: int, *layers: Any) -> Any:
    return lambda: (
        DLRM(width, tables, rows, *layers),
        (
            torch.randn(batch, 13),
            torch.randint(0, rows, (batch, tables, bag)),
            torch.randint(0, 2, (batch,)).float(),
        ),
    )


_LIST = (
    GpuModel("gpt_block", _block(8, 1024, 768, 12, 0.0), _block(2, 16, 64, 4, 0.0), "tokens", 8192),
    GpuModel(
        "conv_block",
        _maps(lambda: ConvBlock(64), 256, 32, 56, False),
        _maps(lambda: ConvBlock(4), 16, 2, 8, False),
        "images",
        32,
    ),
    GpuModel(
        "gpt_block_dropout",
        _block(8, 1024, 768, 12, 0.1),
        _block(2, 16, 64, 4, 0.1),
        "tokens",
        8192,
        random=True,
    ),
    GpuModel(
        "gpt2",
        _language(8, 1024, 50304, "gpt", 768, 12, 12, dropout=0.0),
        _language(2, 16, 64, "gpt", 32, 2, 2),
        "tokens",
        8192,
    ),
    GpuModel("lm_head", _head(8192, 768, 50257), _head(64, 16, 131), "tokens", 8192),
    GpuModel(
        "llama",
        _language(8, 1024, 32000, "llama", 768, 16, 12, 4, tied=False),
        _language(2, 16, 64, "llama", 64, 2, 4, 2, tied=False),
        "tokens",
        8192,
    ),
    GpuModel(
        "bert",
        _bert(32, 512, 30522, 768, 12, 12, 0.1),
        _bert(2, 16, 64, 32, 2, 2, 0.1),
        "tokens",
        16384,
        random=True,
    ),
    GpuModel(
        "resnet50",
        _images(lambda: ResNet((3, 4, 6, 3), 64, 1000), 64, 224, 1000),
        _images(lambda: ResNet((1, 1), 8, 10), 2, 32, 10),
        "images",
        64,
    ),
    GpuModel(
        "vit_s",
        _images(lambda: ViT(224, 16, 384, 12, 6, 1000), 128, 224, 1000),
        _images(lambda: ViT(32, 8, 32, 2, 2, 10), 2, 32, 10),
        "images",
        128,
    ),
    GpuModel(
        "dlrm",
        _dlrm(4096, 26, 1_000_000, 10, 64, (512, 256), (512, 256)),
        _dlrm(8, 3, 50, 4, 8, (16,), (16,)),
        "samples",
        4096,
        autocast=False,
    ),
    GpuModel(
        "mobilenet_v3",
        _images(lambda: MobileNet(MobileNet.LARGE, 1000), 128, 224, 1000),
        _images(lambda: MobileNet(MobileNet.LARGE[:4], 10), 2, 32, 10),
        "images",
        128,
    ),
    GpuModel(
        "unet",
        _maps(lambda: UNet(64, 4, 0.1), 3, 4, 256, True),
        _maps(lambda: UNet(4, 2, 0.1), 3, 2, 16, True),
        "images",
        4,
        random=True,
    ),
)  # fmt: skip

MODELS: dict[str, GpuModel] = {model.name: model for model in _LIST}
"""The most telling first."""
