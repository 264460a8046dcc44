"""Fine-tunes a small quantized Llama: adapters (LoRA) beside frozen codes, and, which QLoRA cannot do, the scales and
zero points of the codes themselves.

A Llama (grouped queries, RMSNorm, SwiGLU, rotary positions, tied head) learns one part of a text in f32.  Its linear
layers are then quantized, in some of five formats, and fine-tuned on another part.

    python examples/12_qlora.py                 # f32, nf4 and int4
    python examples/12_qlora.py fp8 mxfp4 int8
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

import gradc
from gradc import ops, optim
from gradc.demo import corpus

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, LENGTH, BATCH, RANK = 128, 384, 2, 4, 2, 64, 16, 8
PRETRAINING, STEPS, LR = 150, 40, 2e-3
SIZE = WIDTH // HEADS
SHAPES = {"q": (WIDTH, WIDTH), "k": (KV_HEADS * SIZE, WIDTH), "v": (KV_HEADS * SIZE, WIDTH), "o": (WIDTH, WIDTH)}
SHAPES |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
LINEARS = {f"{name}{layer}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}

rng = np.random.default_rng(0)
text = corpus.load()
WORDS = len(text.words)


# -- the model ---------------------------------------------------------------------------------------------------------


def rotated(x, cos, sin):
    """Rotary positions: pairs of features, half of them apart, turn by an angle of their position."""
    first, second = ops.chunk(x, 2, axis=-1)
    return ops.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def llama(tokens, targets, embedding, norms, linear, angle):
    """The mean loss of the next word; ``linear(x, name)`` is a layer."""
    cos, sin = ops.cos(angle), ops.sin(angle)  # [LENGTH, SIZE / 2]
    x = ops.embedding(tokens, embedding)

    def heads(h, count):
        return ops.transpose(ops.reshape(h, (*tokens.shape, count, SIZE)), (0, 2, 1, 3))

    for i in range(LAYERS):
        h = ops.rms_norm(x, (WIDTH,), norms[f"attention{i}"])
        q, k = (rotated(heads(linear(h, f"{n}{i}"), c), cos, sin) for n, c in (("q", HEADS), ("k", KV_HEADS)))
        v = heads(linear(h, f"v{i}"), KV_HEADS)
        mixed = ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), x.shape), f"o{i}")
        h = ops.rms_norm(x, (WIDTH,), norms[f"mlp{i}"])
        x = x + linear(ops.silu(linear(h, f"gate{i}")) * linear(h, f"up{i}"), f"down{i}")
    x = ops.reshape(ops.rms_norm(x, (WIDTH,), norms["last"]), (tokens.shape[0] * LENGTH, WIDTH))
    return ops.linear_cross_entropy(x, embedding, ops.reshape(targets, (tokens.shape[0] * LENGTH,)))


ANGLE = (np.arange(LENGTH)[:, None] / 10000 ** (np.arange(SIZE // 2) / (SIZE // 2))).astype(np.float32)


def normal(*shape, scale):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def batches(words, count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        at = rng.integers(0, len(words) - LENGTH - 1, BATCH)[:, None] + np.arange(LENGTH)
        yield {"tokens": words[at], "targets": words[at + 1], "angle": ANGLE}


# -- formats of quantized weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """:param quantize: f32[rows, columns] -> its arrays by name.  :param decode: (nodes of these, what can learn of
    them: a factor of each group's ``scale``, and its ``zero`` point where there are such) -> the weight.
    :param group: weights of a row that have a scale.
    """

    quantize: Callable
    decode: Callable
    group: int | None = None

    def parts(self, w):
        """What stays of a weight, and what can learn: scales as they are, and zero points."""
        stay = self.quantize(w)
        learn = {"scale": np.ones((w.shape[0], w.shape[1] // (self.group or w.shape[1])), np.float32)}
        return stay, learn | {name: stay.pop(name) for name in ["zero"] if name in stay}


NF4 = np.asarray(gradc.interp.run(gradc.trace(lambda: ops.nf4_codebook()))["y"])


def parts_of(w, size):
    """[rows, groups, size], and the largest magnitude of each group."""
    parts = w.reshape(len(w), -1, size or w.shape[1])
    return parts, np.maximum(np.abs(parts).max(-1), 1e-8)


def quantize_nf4(w):
    """QLoRA's: 4-bit codes of a code book, two in a byte, and a scale for 64 weights, itself in int8."""
    parts, scale = parts_of(w, 64)
    nearest = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, parts / scale[..., None])
    codes = nearest.astype(np.uint8).reshape(w.shape)
    mean = scale.mean(keepdims=True)
    step = np.abs(scale - mean).max(keepdims=True) / 127
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"codes": packed, "scale": np.rint((scale - mean) / step).astype(np.int8), "step": step, "mean": mean}


def quantize_int4(w):
    """A scale and a zero point for 32 weights."""
    parts = w.reshape(len(w), -1, 32)
    low, high = parts.min(-1), parts.max(-1)
    scale = np.maximum(high - low, 1e-8) / 15
    codes = np.clip(np.rint((parts - low[..., None]) / scale[..., None]), 0, 15)
    return {"codes": codes.reshape(w.shape).astype(ml_dtypes.uint4), "scale": scale, "zero": -low / scale}


def quantize_int8(w):
    parts, scale = parts_of(w, None)
    return {"codes": np.rint(parts / scale[..., None] * 127).reshape(w.shape).astype(np.int8), "scale": scale / 127}


def quantize_fp8(w):
    parts, scale = parts_of(w, 64)
    codes = (parts / scale[..., None] * 448).reshape(w.shape).astype(ml_dtypes.float8_e4m3fn)
    return {"codes": codes, "scale": scale / 448}


def quantize_mxfp4(w):
    """OCP MX: a power of two for 32 weights."""
    parts, scale = parts_of(w, 32)
    scale = 2.0 ** (np.floor(np.log2(scale)) - 2)
    codes = (parts / scale[..., None]).reshape(w.shape).astype(ml_dtypes.float4_e2m1fn)
    return {"codes": codes, "scale": scale.astype(ml_dtypes.float8_e8m0fnu)}


def decode_nf4(p, learned):
    scale = ops.dequantize(p["scale"], p["step"], block=p["scale"].shape) + p["mean"]
    return ops.dequantize_nf4(p["codes"], scale * learned["scale"], block=(1, 64))


def decode(p, learned):
    columns = p["codes"].shape[1]
    scale = ops.cast(p["scale"], "f32") * learned["scale"]
    return ops.dequantize(p["codes"], scale, learned.get("zero"), block=(1, columns // scale.shape[1]))


FORMATS = {
    "f32": Format(lambda w: {"codes": w}, lambda p, learned: p["codes"] * learned["scale"]),
    "nf4": Format(quantize_nf4, decode_nf4, 64),
    "int4": Format(quantize_int4, decode, 32),
    "int8": Format(quantize_int8, decode),
    "fp8": Format(quantize_fp8, decode, 64),
    "mxfp4": Format(quantize_mxfp4, decode, 32),
}


def nbytes(arrays):
    """Bytes of arrays; of codes of four bits, each of which has a byte of its own in NumPy, half."""
    return sum(a.nbytes / (2 if a.dtype in (ml_dtypes.uint4, ml_dtypes.float4_e2m1fn) else 1) for a in arrays.values())


# -- training ----------------------------------------------------------------------------------------------------------


def float_loss(params, tokens, targets, angle):
    def linear(x, name):
        return ops.linear(x, params["linear"][name])

    return llama(tokens, targets, params["embedding"], params["norms"], linear, angle)


def loss_of(form):
    """The loss of a model whose ``codes`` stay: of its adapters, and of its scales and zero points (``grid``)."""

    def loss(lora, grid, tokens, targets, angle, embedding, norms, codes):
        def linear(x, name):
            adapter = ops.linear(ops.linear(x, lora[name]["low"]), lora[name]["high"])
            return ops.linear(x, form.decode(codes[name], grid[name])) + adapter

        return llama(tokens, targets, embedding, norms, linear, angle)

    return loss


def train(step, params, words, steps, lr, **frozen):
    """What was learned, and ms of the fastest step."""
    state, times = step.init(params), []
    for number, batch in enumerate(batches(words, steps, seed=1)):
        began = time.perf_counter()
        rate = lr * min(1, (steps - number) / (0.3 * steps))
        _, params, state = step(params, state, lr=rate, **batch, **frozen)
        times.append(time.perf_counter() - began)
    return params, 1e3 * min(times)


def measure(loss, words, **arrays):
    return np.mean([float(loss(**batch, **arrays)) for batch in batches(words, 12, seed=2)])


def pretrained(words):
    params = {
        "embedding": normal(WORDS, WIDTH, scale=WIDTH**-0.5),
        "norms": {f"{name}{i}": np.ones(WIDTH, np.float32) for i in range(LAYERS) for name in ("attention", "mlp")},
        "linear": {name: normal(*shape, scale=shape[1] ** -0.5) for name, shape in LINEARS.items()},
    }
    params["norms"]["last"] = np.ones(WIDTH, np.float32)
    step = gradc.step(float_loss, optim.adamw(lr=3e-3), clip_norm=1.0)
    return train(step, params, words, PRETRAINING, 3e-3)[0]


def fine_tuned(form, model, words, held_out):
    """What is frozen, what was learned; the loss on text that nothing has learned: quantized, with adapters, and with
    scales and zero points, too; and ms of a step."""
    parts = {name: form.parts(w) for name, w in model["linear"].items()}
    codes, grid = ({name: each[i] for name, each in parts.items()} for i in (0, 1))
    lora = {
        name: {"low": normal(RANK, shape[1], scale=shape[1] ** -0.5), "high": np.zeros((shape[0], RANK), np.float32)}
        for name, shape in LINEARS.items()
    }
    frozen = {"embedding": model["embedding"], "norms": model["norms"], "codes": codes}
    begin, loss = {"lora": lora, "grid": grid}, gradc.graph(loss_of(form))
    losses = [measure(loss, held_out, **begin, **frozen)]
    for wrt in (["lora"], ["lora", "grid"]):
        step = gradc.step(loss_of(form), optim.adamw(lr=LR, weight_decay=0.0), wrt, clip_norm=1.0, donate=False)
        stay = {name: x for name, x in begin.items() if name not in wrt}
        learned, ms = train(step, {name: begin[name] for name in wrt}, words, STEPS, LR, **stay, **frozen)
        losses.append(measure(loss, held_out, **learned, **stay, **frozen))
    return {**learned, **frozen}, losses, ms


def shipped(form, arrays, held_out):
    """The fine-tuned model's module: written, read again, and as C."""
    batch = next(batches(held_out, 1, seed=2))
    types = tree({**batch, **arrays}, gradc.typeof)
    module = gradc.compile(gradc.trace(loss_of(form), **types), target="cpu")
    with tempfile.TemporaryDirectory() as name:
        module.save(Path(name) / "model.gradc")
        again = gradc.load_module(Path(name) / "model.gradc")
        assert again(**batch, **arrays) == module(**batch, **arrays)
        folder = module.export(Path(name) / "c")
        return (Path(name) / "model.gradc").stat().st_size, sorted(path.name for path in folder.iterdir())


def tree(arrays, what):
    return {name: tree(x, what) if isinstance(x, dict) else what(x) for name, x in arrays.items()}


def one_layer(form, rows=16, size=4096):
    """Of a layer of a large model: bytes of its weights, and of what forward and backward take beside their arguments
    and results."""
    weight = normal(size, size, scale=0.02)
    codes, grid = form.parts(weight)
    call = {"p": tree(codes, gradc.typeof), "grid": tree(grid, gradc.typeof), "x": f"f32[{rows},{size}]"}
    graph = gradc.trace(lambda p, grid, x: ops.linear(x, form.decode(p, grid)), **call)
    module = gradc.compile(
        graph, wrt=["x", *(name for name in graph.input_names if name.startswith("grid"))], target="cpu"
    )
    memory = module.memory()
    return nbytes(form.quantize(weight)), max(memory.forward_workspace, memory.backward_workspace)


# -- the whole story ---------------------------------------------------------------------------------------------------


def main(chosen):
    cut = np.array([0.7, 0.95]) * len(text.train)
    first, second, held_out = np.split(text.train, cut.astype(int))
    model = pretrained(first)
    weights = sum(w.size for w in model["linear"].values())
    print(f"a Llama with {weights:,} weights in linear layers; loss in nats per word of text that it has not seen\n")
    print("        kB in   as it   with      scales and ms a |  a layer of 4096 x 4096, 16 rows:")
    print("format  layers  is      adapters  zeros too  step |  MB of weights, MB of workspace")
    for name in chosen:
        arrays, losses, ms = fine_tuned(FORMATS[name], model, second, held_out)
        stored, workspace = one_layer(FORMATS[name])
        kB = sum(nbytes(FORMATS[name].quantize(w)) for w in model["linear"].values()) / 1e3
        numbers = f"{kB:6.0f}  {losses[0]:.3f}   {losses[1]:.3f}     {losses[2]:.3f}      {ms:5.1f}"
        print(f"{name:<6}  {numbers} |  {stored / 1e6:5.1f}          {workspace / 1e6:5.1f}", flush=True)
    size, files = shipped(FORMATS[name], arrays, held_out)
    print(f"\nthe last one as a file: {size / 1e3:.0f} kB of machine code and graph; read again, it has the same bits")
    print(f"and as C: {', '.join(files)}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["f32", "nf4", "int4"])
