"""Forward and backward of one Llama block whose linear layers hold codes, beside what else computes it on a CPU.

``python -m benchmarks.quantized_block [FORMAT ...] [--rows 1,16,512] [--threads N] [--engines gradc,dequantise]``,
with ``--save`` each record into benchmarks/results as soon as it is measured.

Engines, in turn in one process: ``gradc`` is torch.compile(backend="gradc"); ``torchao`` and ``bitsandbytes`` are their
layers in eager mode; ``dequantise`` writes each weight out in torch's ops and multiplies by MKL; ``inductor`` is
torch.compile of that.  gradc takes the library's layers where there are such, else those that are written out.  What is
not installed is left out, and said.  The gradient is that of the block's input (weights are frozen, as adapters have
them).  Times are processor times of the process, the least of several repetitions; the share is gradc's of the fastest
other's.  ``MB`` is the most memory that a step takes beside the codes and what else is there between steps.  Before
anything is measured, values and gradients are held against f64.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from . import alternated
from .__main__ import RESULTS, machine, processor, words_of
from .worker import peak

WIDTH, HIDDEN, HEADS, KV_HEADS = 1024, 2816, 16, 4
SIZE = WIDTH // HEADS
SHAPES = {"q": (WIDTH, WIDTH), "k": (KV_HEADS * SIZE, WIDTH), "v": (KV_HEADS * SIZE, WIDTH), "o": (WIDTH, WIDTH)}
SHAPES |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
ENGINES = ("gradc", "torchao", "bitsandbytes", "dequantise", "inductor")
ROUNDS, SECONDS = 5, 0.3


def _by_groups(w: Any, size: int) -> Any:
    return w.reshape(len(w), -1, size)


def _largest(w: Any) -> Any:
    return w.abs().amax(-1, keepdim=True)


class Format:
    """A linear layer in torch's ops: its parts are buffers, and its weight is written out at each call."""

    library = ""

    def parts(self, w: Any) -> dict[str, Any]:
        """f32[rows, columns] -> what is stored."""
        raise NotImplementedError

    def weight(self, p: Any) -> Any:
        """What is stored -> f32[rows, columns]."""
        raise NotImplementedError

    def layer(self, linear: Any) -> Any:
        """A layer of the library's with the weight of a torch.nn.Linear."""
        raise NotImplementedError


class Int8(Format):
    """A scale for each row."""

    library = "torchao"

    def parts(self, w: Any) -> dict[str, Any]:
        scale = _largest(w) / 127
        return {"codes": (w / scale).round().to(_torch().int8), "scale": scale}

    def weight(self, p: Any) -> Any:
        return p.codes.float() * p.scale

    def config(self) -> Any:
        return importlib.import_module("torchao.quantization").Int8WeightOnlyConfig()

    def layer(self, linear: Any) -> Any:
        importlib.import_module("torchao.quantization").quantize_(linear, self.config())
        return linear


class Int4(Int8):
    """A scale for 32 weights of a row."""

    def parts(self, w: Any) -> dict[str, Any]:
        groups = _by_groups(w, 32)
        scale = _largest(groups) / 7
        return {"codes": (groups / scale).round().to(_torch().int8), "scale": scale}

    def weight(self, p: Any) -> Any:
        return (p.codes.float() * p.scale).flatten(1)

    def config(self) -> Any:
        made = importlib.import_module("torchao.quantization")
        return made.IntxWeightOnlyConfig(weight_dtype=_torch().int4, granularity=made.PerGroup(32))


class Fp8(Int8):
    """E4M3, a scale for each row."""

    def parts(self, w: Any) -> dict[str, Any]:
        scale = _largest(w) / 448
        return {"codes": (w / scale).to(_torch().float8_e4m3fn), "scale": scale}

    def config(self) -> Any:
        return importlib.import_module("torchao.quantization").Float8WeightOnlyConfig()


class Nf4(Format):
    """Codes of a code book, two in a byte, the first in the high bits, and a scale for 64 weights."""

    library = "bitsandbytes"

    def parts(self, w: Any) -> dict[str, Any]:
        from gradc.ops.quantized.block_scales import NF4

        torch = _torch()
        groups, book = _by_groups(w, 64), torch.tensor(NF4)
        scale = _largest(groups)
        codes = torch.bucketize(groups / scale, (book[1:] + book[:-1]) / 2).reshape(w.shape).to(torch.uint8)
        return {"codes": codes[:, ::2] << 4 | codes[:, 1::2], "scale": scale, "book": book}

    def weight(self, p: Any) -> Any:
        torch = _torch()
        codes = torch.stack([p.codes >> 4, p.codes & 15], -1).flatten(1)
        return (_by_groups(p.book[codes.int()], 64) * p.scale).flatten(1)

    def layer(self, linear: Any) -> Any:
        made = importlib.import_module("bitsandbytes").nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, quant_type="nf4", compress_statistics=False
        )
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")


class Int4Zeros(Format):
    """A scale and a zero point for 32 weights of a row."""

    def parts(self, w: Any) -> dict[str, Any]:
        groups = _by_groups(w, 32)
        low = groups.amin(-1, keepdim=True)
        scale = (groups.amax(-1, keepdim=True) - low) / 15
        codes = ((groups - low) / scale).round().to(_torch().uint8)
        return {"codes": codes, "scale": scale, "zero": (-low / scale).round()}

    def weight(self, p: Any) -> Any:
        return ((p.codes.float() - p.zero) * p.scale).flatten(1)


class Mxfp8(Format):
    """OCP MX: E4M3, and a power of two for 32 weights of a row."""

    def parts(self, w: Any) -> dict[str, Any]:
        torch, groups = _torch(), _by_groups(w, 32)
        exponent = _largest(groups).log2().floor() - 8
        codes = (groups / exponent.exp2()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"codes": codes, "scale": exponent.exp2().to(torch.float8_e8m0fnu)}

    def weight(self, p: Any) -> Any:
        return (p.codes.float() * p.scale.float()).flatten(1)


FORMATS: dict[str, Format] = {
    "int8": Int8(),
    "int4": Int4(),
    "fp8": Fp8(),
    "nf4": Nf4(),
    "int4 with zeros": Int4Zeros(),
    "mxfp8": Mxfp8(),
}


def _torch() -> Any:
    return importlib.import_module("torch")


def block(layers: dict[str, Any]) -> Any:
    """Attention with grouped queries and a SwiGLU, each behind an RMS norm."""
    torch = _torch()
    functional = torch.nn.functional

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = torch.nn.ModuleDict(layers), torch.nn.RMSNorm(WIDTH)

        def forward(self, x: Any) -> Any:
            run = self.layers
            h = self.norm(x)
            q, k, v = (run[n](h).unflatten(-1, (-1, SIZE)).transpose(0, 1)[None] for n in "qkv")
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + run["o"](mixed[0].transpose(0, 1).flatten(1))
            h = self.norm(x)
            return x + run["down"](functional.silu(run["gate"](h)) * run["up"](h))

    return Block().requires_grad_(False)


def written(form: Format, weight: Any) -> Any:
    """A layer that writes its weight out in torch's ops."""
    torch = _torch()

    class Written(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for name, part in form.parts(weight).items():
                self.register_buffer(name, part)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, form.weight(self))

    return Written()


def blocks(form: Format) -> dict[str, Any]:
    """The block in torch's ops, and, where its library is installed, of its layers."""
    torch = _torch()
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 for n, s in SHAPES.items()}
    found = {"dequantise": block({n: written(form, w) for n, w in weights.items()})}
    if form.library and importlib.util.find_spec(form.library):
        layers = {}
        for name, w in weights.items():
            linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
            linear.weight.data.copy_(w)
            layers[name] = form.layer(linear)
        found[form.library] = block(layers)
    elif form.library:
        print(f"{form.library} is not installed: it is left out", file=sys.stderr)
    return found


def engines(form: Format, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Engine -> the block as it runs there."""
    torch = _torch()
    found = blocks(form)
    made = {name: each for name, each in found.items() if name in chosen}
    if "inductor" in chosen:
        made["inductor"] = torch.compile(found["dequantise"], backend="inductor")
    if "gradc" in chosen:
        importlib.import_module("gradc.torch")
        taken = found.get(form.library, found["dequantise"])
        made["gradc"] = torch.compile(taken, backend="gradc", options={"fallback": "error"})
    return made


def step(model: Any, x: Any, g: Any) -> tuple[Any, Any]:
    y = model(x)
    return y, _torch().autograd.grad(y, x, g)[0]


def checked(form: Format, models: dict[str, Any], x: Any, g: Any) -> None:
    """:raises AssertionError: an engine's values or gradients are not those of its own weights in f64."""
    torch = _torch()
    eager = blocks(form)
    exact = {}
    for name, each in eager.items():  # a library rounds scales its own way
        columns = {n: torch.eye(s[1]) for n, s in SHAPES.items()}
        layers = {}
        for n, unit in columns.items():
            with torch.no_grad():
                weight = each.layers[n](unit).T.double().contiguous()
            layers[n] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
            layers[n].weight.data.copy_(weight)
        wide = block(layers).double()
        exact[name] = step(wide, x.detach().double().requires_grad_(), g.double())
    for name, model in models.items():
        own = name if name in exact else form.library if name == "gradc" and form.library in exact else "dequantise"
        for found, wanted in zip(step(model, x, g), exact[own], strict=True):
            error = ((found.double() - wanted).norm() / wanted.norm()).item()
            assert error < 1e-4, f"{name}: {error:.1e} from f64"


def least(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds per call of each."""
    return {name: seconds * 1e3 for name, seconds in alternated.least(calls, ROUNDS, SECONDS).items()}


def measured(name: str, rows: int, chosen: tuple[str, ...]) -> dict[str, Any]:
    torch = _torch()
    torch._dynamo.reset()
    models = engines(FORMATS[name], chosen)
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    x.requires_grad_()
    checked(FORMATS[name], models, x, g)
    calls = {engine: functools.partial(step, model, x, g) for engine, model in models.items()}
    ms = least(calls)
    others = [t for engine, t in ms.items() if engine != "gradc"]
    share = ms["gradc"] / min(others) if "gradc" in ms and others else None
    return {"format": name, "rows": rows, "ms": ms, "share": share, "MB": {e: peak(call) for e, call in calls.items()}}


def save(record: dict[str, Any], threads: int) -> None:
    """Puts a record in the place of that of its format and rows in this processor's file."""
    path = RESULTS / f"quantized_block-{words_of(processor())}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["records"] if path.exists() else {}
    case = (record["format"], record["rows"])
    kept = [r for r in known.get(str(threads), ()) if (r["format"], r["rows"]) != case]
    known[str(threads)] = sorted([*kept, record], key=lambda r: (r["format"], r["rows"]))
    found = {"machine": machine(threads), "records": known}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("formats", nargs="*", help=f"of {', '.join(FORMATS)}; all by default")
    parser.add_argument("--rows", default="1,16,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--save", action="store_true", help="write the records to benchmarks/results")
    given = parser.parse_args()
    unknown = [*({*given.formats} - FORMATS.keys()), *({*given.engines.split(",")} - {*ENGINES})]
    if unknown:
        parser.error(f"{unknown[0]!r}: no format of {', '.join(FORMATS)} and no engine of {', '.join(ENGINES)}")
    if importlib.util.find_spec("torch") is None:
        parser.error("every engine here is one of PyTorch's: pip install 'gradc[torch]'")
    os.environ["GRADC_NUM_THREADS"] = str(given.threads)
    warnings.simplefilter("ignore")
    _torch().set_num_threads(given.threads)
    chosen = tuple(given.engines.split(","))
    heads = (*chosen, "share", *(f"{name} MB" for name in chosen))
    print(f"{'ms, threads: ' + str(given.threads):<24}" + "".join(f"{head:>17}" for head in heads))
    for name in given.formats or FORMATS:
        for rows in map(int, given.rows.split(",")):
            r = measured(name, rows, chosen)
            cells = [f"{r['ms'][e]:.2f}" if e in r["ms"] else "" for e in chosen]
            cells.append("" if r["share"] is None else f"{r['share']:.2f}")
            cells += [f"{r['MB'][e]:.1f}" if e in r["MB"] else "" for e in chosen]
            print(f"{name + ', ' + str(rows):<24}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
            if given.save:
                save(r, given.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
