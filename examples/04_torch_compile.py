"""A PyTorch model trained through gradc with one line: torch.compile(model, backend="gradc").

Its forward and backward are gradc's, sizes that vary are symbols, what gradc leaves to torch (here: the random numbers
of dropout, which are eager mode's) runs in torch before or between its regions, and a report says so.

    python examples/04_torch_compile.py
"""

import copy
import time

import torch
from torch import nn
from torch.nn import functional as F

import gradc.torch


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        past = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~past, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Characters in, the next character out; the output layer is the embedding."""

    def __init__(self, characters, width=32, heads=4):
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, width), nn.Embedding(64, width)
        self.block, self.norm = Block(width, heads), nn.LayerNorm(width)

    def forward(self, text, target):
        x = self.embedding(text) + self.places(torch.arange(text.shape[1]))
        logits = F.linear(self.norm(self.block(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


text = "a compiler from forward tensor graphs to fused, readable kernels, forward and backward. " * 20
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])


def batch(rows, length):
    starts = torch.randint(0, len(data) - length - 1, (rows,))
    rows = torch.stack([data[s : s + length + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def train(step, parameters):
    """The losses of some AdamW steps on batches of three sizes; dropout draws the same numbers for the same seed."""
    optimizer, losses, torch_seed = torch.optim.AdamW(parameters, lr=3e-3), [], 0
    torch.manual_seed(torch_seed)
    for i in range(30):
        optimizer.zero_grad()
        loss = step(*batch(*((8, 24), (8, 16), (4, 24))[i % 3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def rounded_up(model):
    """A copy whose parameters are the next larger floats."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.copy_(torch.nextafter(p, torch.tensor(torch.inf)))
    return model


def apart(losses, others):
    a, b = torch.tensor([losses, others], dtype=torch.float64)
    return ((a - b).abs() / b).max().item()  # NaN, where a loss is


torch.manual_seed(0)
eager = Model(len(letters))
model, nearest = copy.deepcopy(eager), rounded_up(eager)
compiled = torch.compile(model, backend="gradc")  # the one line

began = time.perf_counter()
with torch.random.fork_rng():
    compiled(*batch(8, 24)).backward()
    compiled(*batch(6, 20)).backward()  # other sizes: Dynamo asks once more, for symbols
print(f"two compilations: {time.perf_counter() - began:.0f} s")
model.zero_grad()

ours, theirs = train(compiled, model.parameters()), train(eager, eager.parameters())
print("loss in gradc:", " ".join(f"{x:.4f}" for x in ours[::6]))
print("loss in eager:", " ".join(f"{x:.4f}" for x in theirs[::6]))
worst, rounding = apart(ours, theirs), apart(train(nearest, nearest.parameters()), theirs)
print(f"largest relative difference of {len(ours)} losses: {worst:.1e}")
print(f"in eager mode, from parameters that are the next larger floats: {rounding:.1e}")
assert worst <= len(ours) * max(rounding, torch.finfo(torch.float32).eps)  # each step rounds once more
assert ours[-1] < ours[0] / 1.3

print()
print(gradc.torch.report())
assert gradc.torch.report().share > 0.9
