"""QLoRA in PyTorch, whole in one region of torch.compile(model, backend="gradc").

A Llama as a torch.nn.Module learns one part of a text.  Its linear layers then hold torchao's quantized weights (int8,
or int4 by groups of 32) or are bitsandbytes' Linear4bit (NF4, double quantised, where that is installed), with
adapters (LoRA) beside them.  No layer's weight is ever a matrix of floats, as it is in eager mode, forward and
backward; and the scales of the codes, which neither library differentiates, learn, too.

    python examples/14_qlora_torch.py            # int4
    python examples/14_qlora_torch.py int8 nf4
"""

import copy
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import gradc.torch
from gradc.demo import corpus

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, LENGTH, BATCH, RANK = 128, 384, 2, 4, 2, 64, 16, 8
PRETRAINING, STEPS, LR = 150, 30, 2e-3
SIZE = WIDTH // HEADS

text = corpus.load()
WORDS = len(text.words)


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with grouped queries and rotary positions, and a SwiGLU, each behind an RMS norm."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (y.chunk(2, -1) for y in (q, k)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """The mean loss of the next word; the output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        angle = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(SIZE // 2) / (SIZE // 2))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1), targets.flatten())


# -- quantized layers --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer that stays, and a product of two thin matrices that learns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.low = nn.Linear(layer.in_features, RANK, bias=False)
        self.high = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.high.weight)

    def forward(self, x):
        return self.layer(x) + self.high(self.low(x))


class Scaled(nn.Module):
    """A layer of torchao's, taken apart: codes, and scales that are parameters."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("codes", layer.weight.qdata)
        self.scale = nn.Parameter(layer.weight.scale.reshape(self.out_features, -1).clone())

    def forward(self, x):
        groups = self.codes.unflatten(1, (self.scale.shape[1], -1)).float()
        return F.linear(x, (groups * self.scale[..., None]).flatten(1))


def quantized(model, form):
    """A copy whose layers in blocks hold codes, with adapters beside them, which alone learn."""
    model = copy.deepcopy(model).requires_grad_(False)
    if form == "nf4":
        from bitsandbytes.nn import Linear4bit

        def taken(layer):
            made = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            made.load_state_dict(layer.state_dict())
            return made.to("cpu")  # quantizes

    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
        config = Int8WeightOnlyConfig() if form == "int8" else IntxWeightOnlyConfig(torch.int4, PerGroup(32))

        def taken(layer):
            quantize_(layer, config)
            return layer

    return replaced(model, lambda layer: Adapted(taken(layer)))


def with_scales(model, form):
    """A copy whose scales learn, too, and these scales."""
    model = copy.deepcopy(model)
    adapted = [m for m in model.modules() if isinstance(m, Adapted)]
    if form == "nf4":  # those of the scales, which are codes of eight bits themselves
        states = [each.layer.weight.quant_state for each in adapted]
        return model, [state.state2.absmax.requires_grad_() for state in states]
    for each in adapted:
        each.layer = Scaled(each.layer)
    return model, [each.layer.scale for each in adapted]


def replaced(model, what):
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, what(layer))
    return model


# -- training ----------------------------------------------------------------------------------------------------------


def batches(words, count, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.as_tensor(words)
    for _ in range(count):
        at = torch.randint(len(words) - LENGTH - 1, (BATCH, 1), generator=generator) + torch.arange(LENGTH)
        yield words[at], words[at + 1]


def train(step, groups, words, steps):
    """The losses of AdamW's steps."""
    optimizer, losses = torch.optim.AdamW(groups, weight_decay=0.0), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (steps - n) / (0.3 * steps)))
    for batch in batches(words, steps, seed=1):
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def measured(step, words):
    return sum(step(*batch).item() for batch in batches(words, 8, seed=2)) / 8


def learning(model):
    return [p for p in model.parameters() if p.requires_grad]


def compiled(model):
    torch._dynamo.reset()
    gradc.torch.report().clear()
    return torch.compile(model, backend="gradc", options={"fallback": "error"})


@torch.no_grad()
def rounded_up(model):
    """A copy whose learning parameters are the next larger floats."""
    model = copy.deepcopy(model)
    for p in learning(model):
        p.copy_(torch.nextafter(p, torch.tensor(torch.inf)))
    return model


def apart(losses, others):
    a, b = torch.tensor([losses, others], dtype=torch.float64)
    return ((a - b).abs() / b).max().item()  # NaN, where a loss is


def fine_tuned(base, form, words, held_out):
    model = quantized(base, form)
    eager, nearest = copy.deepcopy(model), rounded_up(model)
    print(f"\n{form}: {measured(eager, held_out):.3f} as it is", flush=True)
    step = compiled(model)
    ours = train(step, [{"params": learning(model), "lr": LR}], words, STEPS)
    theirs, near = (train(m, [{"params": learning(m), "lr": LR}], words, STEPS) for m in (eager, nearest))
    report = gradc.torch.report()
    print(f"with adapters: {measured(model, held_out):.3f}; {str(report).splitlines()[0]}")
    print("  loss in gradc:", " ".join(f"{x:.4f}" for x in ours[::6]))
    print("  loss in eager:", " ".join(f"{x:.4f}" for x in theirs[::6]))
    worst, rounding = apart(ours, theirs), apart(near, theirs)
    print(f"  largest relative difference of {STEPS} losses: {worst:.1e}")
    print(f"  in eager mode, from parameters that are the next larger floats: {rounding:.1e}")
    assert worst <= STEPS * max(rounding, torch.finfo(torch.float32).eps)  # each step rounds once more
    assert report.share == 1

    model, scales = with_scales(quantized(base, form), form)
    step, before = compiled(model), [s.detach().clone() for s in scales]
    groups = [{"params": [p for p in learning(model) if all(p is not s for s in scales)], "lr": LR}]
    groups += [{"params": [s], "lr": LR * s.detach().abs().mean().item()} for s in scales]
    train(step, groups, words, STEPS)
    moved = max(((s.detach() - b).norm() / b.norm()).item() for s, b in zip(scales, before, strict=True))
    print(f"with adapters and scales: {measured(model, held_out):.3f}; the scales moved by up to {100 * moved:.1f} %")


def main(chosen):
    torch.manual_seed(0)
    first, second, held_out = torch.as_tensor(text.train).tensor_split([int(s * len(text.train)) for s in (0.7, 0.95)])
    model = Llama()
    train(compiled(model), [{"params": learning(model), "lr": 3e-3}], first, PRETRAINING)
    print(f"a Llama in f32: {measured(model, held_out):.3f} nats per word of text that it has not seen")
    for form in chosen:
        fine_tuned(model, form, second, held_out)


if __name__ == "__main__":
    main(sys.argv[1:] or ["int4"])
