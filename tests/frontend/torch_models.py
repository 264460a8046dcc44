"""Small models in the style of well-known ones, written for these tests, and how two training steps are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# -- models: called with their batch, they give a loss -----------------------------------------------------------------


class Attention(nn.Module):
    """GPT-2's: one projection for three, a causal mask, or BERT's: a mask of padding."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str = "none"):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(approximate=approximate), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned positions, a causal mask, an output layer tied to the embedding."""

    def __init__(self, words: int = 23, width: int = 8, heads: int = 2, longest: int = 16):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.block, self.norm = Block(width, heads, "tanh"), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        x = self.block(x, torch.ones(length, length, dtype=torch.bool).tril())
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(rows: int = 3, length: int = 5) -> tuple[torch.Tensor, ...]:
        return torch.randint(0, 23, (rows, length)), torch.randint(0, 23, (rows, length))


class BERT(nn.Module):
    """Padding, token types, a pooled classifier."""

    def __init__(self, words: int = 19, width: int = 8, heads: int = 2):
        super().__init__()
        self.words, self.kinds = nn.Embedding(words, width, padding_idx=0), nn.Embedding(2, width)
        self.block, self.pool, self.head = Block(width, heads), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor, kinds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.kinds(kinds)
        x = self.block(x, (tokens != 0)[:, None, None, :])
        return F.cross_entropy(self.head(torch.tanh(self.pool(x[:, 0]))), labels, label_smoothing=0.1)

    @staticmethod
    def batch(rows: int = 3, length: int = 5) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(1, 19, (rows, length))
        tokens[:, -1] = 0
        return tokens, torch.randint(0, 2, (rows, length)), torch.randint(0, 3, (rows,))


class DLRM(nn.Module):
    """Dense and categorical features, pairwise products, a click's probability."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode=mode) for n, mode in ((7, "sum"), (11, "mean")))
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 3, 8), nn.SiLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, first: torch.Tensor, second: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, self.tables[0](first), self.tables[1](second)], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, [0, 0, 1], [1, 2, 2]]
        p = self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
        return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log1p(1e-7 - p)).mean()

    @staticmethod
    def batch(rows: int = 3) -> tuple[torch.Tensor, ...]:
        return (
            torch.randn(rows, 5),
            torch.randint(0, 7, (rows, 2)),
            torch.randint(0, 11, (rows, 3)),
            torch.randint(0, 2, (rows,)).float(),
        )


class GCN(nn.Module):
    """Messages along edges, added up per node, divided by degrees."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 3)

    def spread(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(edges.shape[1], dtype=x.dtype)
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, edges[1], ones)
        messages = x[edges[0]] / degree.clamp(min=1).sqrt()[edges[1]].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, edges[1], messages)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.spread(self.first(x), edges))
        return F.cross_entropy(self.spread(self.second(x), edges), labels)

    @staticmethod
    def batch(rows: int = 5, edges: int = 9) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 4), torch.randint(0, rows, (2, edges)), torch.randint(0, 3, (rows,))


class ResNet(nn.Module):
    """Convolutions, batch norm with running statistics, a residual, pooling."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.inner, self.norm2 = nn.Conv2d(width, width, 3, padding=1, groups=2), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        x = F.relu(x + self.norm2(self.inner(x)))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)

    @staticmethod
    def batch(rows: int = 2) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3, 9, 9), torch.randint(0, 3, (rows,))


MODELS: dict[str, Any] = {"gpt": GPT, "bert": BERT, "dlrm": DLRM, "gcn": GCN}


# -- comparing ---------------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def to(dtype: torch.dtype, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)


def step(call: Callable[..., torch.Tensor], model: nn.Module, batch: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """A training step's loss and gradients by name."""
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone(), **grads}


def error(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The worst error of a value, relative to the largest element of what is wanted."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return max(
        float((got[n].double() - w.double()).abs().max() / w.double().abs().max().clamp(min=1e-6))
        for n, w in wanted.items()
        if w.numel()
    )


def twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)
