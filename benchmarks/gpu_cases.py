"""The GPU cases: each a model written once with gradc's ops and once with torch's, its arrays by type, shape and draw,
and the bytes that must move.

torch is handed in: nothing here imports it.  Sizes stand in the types by name; ``tiny`` are those at which the
simulator runs a case.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace as Sizes
from typing import Any

Draw = Callable[[Any, Sizes, Callable[..., Any]], Any]
"""(torch, sizes, uniform(*shape) in [0, 1)) -> int64 tensor"""
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1}


@dataclass(frozen=True)
class GpuCase:
    """One benchmark.

    :param ours: ``(sizes, **inputs)`` in gradc's ops.  :param theirs: ``(torch, sizes, **tensors)``, the same.
    :param types: of the inputs, sizes by name.  :param wrt: whose gradients are timed; none: the forward is.
    :param floor: bytes that any implementation moves: each input read once, each output written once.
    :param draws: of integer inputs; the others are normal, or bytes.
    :param scatter: the result of a scatter for which strategies are compared.
    :param options: of compile.  :param in_place: an input whose memory the result takes.
    :param memory: types as they lie in memory, where that is another order of axes.
    """

    id: str
    what: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    types: Mapping[str, str]
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]
    floor: Callable[[Sizes], int]
    wrt: tuple[str, ...] = ()
    draws: Mapping[str, Draw] = field(default_factory=dict)
    scatter: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    in_place: str = ""
    scale: float = 1.0
    memory: Mapping[str, str] = field(default_factory=dict)

    def at(self, tiny: bool) -> Sizes:
        return Sizes(**{**self.sizes, **(self.tiny if tiny else {})})

    def concrete(self, tiny: bool, memory: bool = False, symbols: Sequence[str] = ()) -> dict[str, str]:
        """The types with their sizes filled in, but for ``symbols``."""
        sizes = vars(self.at(tiny)) | dict(zip(symbols, symbols, strict=True))
        types = {**self.types, **(self.memory if memory else {})}
        return {name: re.sub(r"[A-Za-z]\w*(?=[\],])", lambda m: str(sizes[m[0]]), text) for name, text in types.items()}

    def graph(self, tiny: bool, symbols: Sequence[str] = ()) -> Any:
        """What gradc compiles; a module with ``symbols`` serves every size of these."""
        import gradc

        return gradc.trace(functools.partial(self.ours, self.at(tiny)), **self.concrete(tiny, symbols=symbols))

    def tensors(self, torch: Any, tiny: bool, device: str, seed: int = 0) -> dict[str, Any]:
        """The inputs, drawn on the device."""
        generator = torch.Generator(device=device).manual_seed(seed)
        sizes = self.at(tiny)
        tensors: dict[str, Any] = {}
        for name, text in self.concrete(tiny, memory=True).items():
            dtype, shape = parsed(text)
            if name in self.draws:
                value = self.draws[name](
                    torch,
                    sizes,
                    lambda *shape: torch.rand(shape, generator=generator, device=device, dtype=torch.float64),
                )
                tensors[name] = value.to(dtype_of(torch, dtype))
            elif dtype in ("i8", "u8"):
                low = 0 if dtype == "u8" else -127
                tensors[name] = torch.randint(
                    low, low + 255, shape, generator=generator, device=device, dtype=dtype_of(torch, dtype)
                )
            else:
                tensors[name] = normal(torch, generator, shape, dtype, device, self.scale)
        return tensors


def normal(torch: Any, generator: Any, shape: tuple[int, ...], dtype: str, device: str, scale: float = 1.0) -> Any:
    """Standard normal values times ``scale``, drawn in f32."""
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype_of(torch, dtype))


def parsed(text: str) -> tuple[str, tuple[int, ...]]:
    """``bf16[3,4]`` -> ("bf16", (3, 4))."""
    dtype, _, rest = text.partition("[")
    return dtype, tuple(int(part) for part in rest.rstrip("]").split(",") if part)


def dtype_of(torch: Any, name: str) -> Any:
    return {
        "f64": torch.float64,
        "f32": torch.float32,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "i64": torch.int64,
        "i32": torch.int32,
        "i8": torch.int8,
        "u8": torch.uint8,
    }[name]


# -- draws -------------------------------------------------------------------------------------------------------------


def uniform(bound: str, *shape: str) -> Draw:
    return lambda torch, s, random: (random(*(getattr(s, n) for n in shape)) * getattr(s, bound)).long()


def zipf(bound: str, *shape: str, power: float) -> Draw:
    """Row k with a probability of about (k + 1)^-power."""

    def draw(torch: Any, s: Sizes, random: Any) -> Any:
        sample = random(*(getattr(s, n) for n in shape))
        weights = torch.arange(1, getattr(s, bound) + 1, device=sample.device, dtype=torch.float64) ** -power
        return torch.searchsorted(weights.cumsum(0) / weights.sum(), sample).clamp(max=getattr(s, bound) - 1)

    return draw


def hot(bound: str, *shape: str, share: float, row: int = 0) -> Draw:
    """A share of all on one row, the rest anywhere."""
    anywhere = uniform(bound, *shape)

    def draw(torch: Any, s: Sizes, random: Any) -> Any:
        value = anywhere(torch, s, random)
        return torch.where(random(*value.shape) < share, torch.full_like(value, row), value)

    return draw


def bytes_of(text: str, s: Sizes) -> int:
    """Bytes of an array of a type."""
    dtype, _, rest = text.partition("[")
    return BYTES[dtype] * prod(getattr(s, part) for part in rest.rstrip("]").split(",") if part)


def moved(*types: str) -> Callable[[Sizes], int]:
    """The bytes of arrays, each named as often as it is read or written."""
    return lambda s: sum(bytes_of(text, s) for text in types)


# -- families ----------------------------------------------------------------------------------------------------------


def embedding(
    id: str, title: str, dtype: str, draw: Draw, N: int, V: int, D: int, kept: float = 1.0, **options: Any
) -> GpuCase:
    """The gradient of a table from N rows, of which ``kept`` are no padding."""
    return GpuCase(
        id,
        title,
        lambda s, tokens, weight: _ops().embedding(tokens, weight, **options),
        lambda torch, s, tokens, weight: torch.nn.functional.embedding(tokens, weight, **options),
        {"tokens": "i64[N]", "weight": f"{dtype}[V,D]"},
        {"N": N, "V": V, "D": D},
        {"N": 300, "V": 70, "D": 24},
        lambda s: int(kept * bytes_of(f"{dtype}[N,D]", s)) + bytes_of(f"{dtype}[V,D]", s) + bytes_of("i32[N]", s),
        ("weight",),
        {"tokens": draw},
        "weight",
    )


def index_add(id: str, dtype: str, draw: Draw, N: int, V: int, D: int, share: float) -> GpuCase:
    """Rows added into a table in place; ``share`` of them lie anywhere, and a row that is hit is read and written."""
    unique = lambda s: round(s.V * -_expm1_log(s.N * share, s.V))
    return GpuCase(
        id,
        f"index_add, {dtype}",
        lambda s, x, i, u: _ops().index_add(x, 0, i, u),
        lambda torch, s, x, i, u: x.index_add(0, i, u),
        {"x": f"{dtype}[V,D]", "i": "i64[N]", "u": f"{dtype}[N,D]"},
        {"N": N, "V": V, "D": D},
        {"N": 400, "V": 90, "D": 16},
        lambda s: (s.N + 2 * unique(s)) * s.D * BYTES[dtype],
        (),
        {"i": draw},
        "y",
        {"donate": ["x"]},
        "x",
    )


def _expm1_log(hits: float, rows: int) -> float:
    """(1 - 1/rows)^hits - 1: minus the share of rows that random hits reach."""
    return math.expm1(hits * math.log1p(-1 / rows))


def rows(
    id: str,
    title: str,
    ours: Any,
    theirs: Any,
    types: Mapping[str, str],
    sizes: Mapping[str, int],
    floor: Any,
    wrt: tuple[str, ...],
    **more: Any,
) -> GpuCase:
    """A kernel of rows and columns."""
    return GpuCase(id, title, ours, theirs, types, sizes, {"N": 37, "D": 72}, floor, wrt, **more)


def sampled(
    id: str,
    title: str,
    dtype: str,
    shape: str,
    sizes: Mapping[str, int],
    tiny: Mapping[str, int],
    mode: str = "bilinear",
    last: bool = False,
) -> GpuCase:
    """Both gradients of grid_sample; ``last``: channels last, in memory and in the graph."""
    spatial = ("d", "h", "w")[4 - shape.count(",") :]
    memory = re.sub(r"\[B,C,(.*)\]", r"[B,\1,C]", shape) if last else shape
    image, points = f"{dtype}{memory}", f"{dtype}[B,{','.join(spatial)},G]"
    out = f"{dtype}[B,C,{','.join(spatial)}]"

    def theirs(torch: Any, s: Sizes, x: Any, grid: Any) -> Any:
        seen = x.permute(0, 3, 1, 2) if last else x
        y = torch.nn.functional.grid_sample(seen, grid, mode=mode, align_corners=False)
        return y.permute(0, 2, 3, 1) if last else y

    return GpuCase(
        id,
        title,
        lambda s, x, grid: _ops().grid_sample(x, grid, mode=mode),
        theirs,
        {"x": f"{dtype}{shape}", "grid": points},
        {**sizes, "G": len(spatial)},
        {**tiny, "G": len(spatial)},
        moved(image, image, out, points, points),
        ("x", "grid"),
        scatter="x" if mode == "bilinear" and not last else "",
        options={"layout": {"x": "NHWC", "y": "NHWC"}} if last else {},
        scale=0.5,
        memory={"x": image} if last else {},
    )


def _ops() -> Any:
    from gradc import ops

    return ops


# -- the cases, the most telling first ---------------------------------------------------------------------------------

HALF = 0.5
K, M = 1_000, 1_000_000


def _norm(id: str, kind: str, dtype: str, N: int, D: int) -> GpuCase:
    types = {"x": f"{dtype}[N,D]", "g": f"{dtype}[D]"} | ({"b": f"{dtype}[D]"} if kind == "layer" else {})
    if kind == "layer":
        ours = lambda s, x, g, b: _ops().layer_norm(x, (s.D,), g, b)
        theirs = lambda torch, s, x, g, b: torch.nn.functional.layer_norm(x, (s.D,), g, b)
    else:
        ours = lambda s, x, g: _ops().rms_norm(x, (s.D,), g, eps=1e-6)
        theirs = lambda torch, s, x, g: torch.nn.functional.rms_norm(x, (s.D,), g, eps=1e-6)
    return rows(
        id, f"{kind} norm, {dtype}", ours, theirs, types, {"N": N, "D": D}, moved(*[f"{dtype}[N,D]"] * 3), tuple(types)
    )


def _swiglu_torch(torch: Any, s: Sizes, a: Any, b: Any) -> Any:
    return torch.nn.functional.silu(a) * b


def _scaled_rows(torch: Any, s: Sizes, tokens: Any, dy: Any, scale: Any) -> Any:
    """Rows of int8 cotangents, scaled, added up in the table's dtype: what the backward of an embedding gets."""
    values = dy.to(scale.dtype) * scale
    values = values if scale.dtype == torch.float64 else values.bfloat16()
    return torch.ops.aten.embedding_dense_backward(values, tokens, s.V, -1, False)


def _int8_table(torch: Any, s: Sizes, tokens: Any, q: Any, scale: Any) -> Any:
    table = q.to(scale.dtype) * scale
    return torch.nn.functional.embedding(tokens, table)


def _int8_linear(torch: Any, s: Sizes, x: Any, q: Any, scale: Any) -> Any:
    return torch.nn.functional.linear(x, (q.to(scale.dtype) * scale).to(x.dtype))


def _nf4_linear(torch: Any, s: Sizes, x: Any, q: Any, scale: Any) -> Any:
    from gradc.ops.quantized.block_scales import NF4

    codes = torch.stack([q & 15, q >> 4], -1).reshape(s.O, s.D).long()
    values = torch.tensor(NF4, device=q.device, dtype=scale.dtype)[codes]
    return torch.nn.functional.linear(
        x, (values.reshape(s.O, s.G, -1) * scale.reshape(s.O, s.G, 1)).reshape(s.O, s.D).to(x.dtype)
    )


def _bag_torch(torch: Any, s: Sizes, ids: Any, table: Any) -> Any:
    return torch.nn.functional.embedding_bag(ids, table, mode="sum")


def all_cases() -> dict[str, GpuCase]:
    from gradc.analysis.strategies import ATOMIC_FIXED

    cases = [
        embedding("E2", "embedding", "bf16", uniform("V", "N"), 16384, 128256, 4096),
        replace(
            embedding("E2f", "embedding, f32, atomic_fixed", "f32", uniform("V", "N"), 16384, 128256, 512),
            scatter="",
            options={"reductions": {"*": ATOMIC_FIXED.name}},
        ),
        embedding("E3", "embedding, zipf 1.05", "bf16", zipf("V", "N", power=1.05), 65536, 128256, 4096),
        embedding("E5", "embedding", "f32", uniform("V", "N"), 16384, 131072, 768),
        _norm("N1", "layer", "bf16", 16384, 4096),
        GpuCase(
            "Q1",
            "int8 cotangents with a scale per token, scattered",
            lambda s, tokens, dy, scale: _ops().scatter_add(
                tokens, _ops().dequantize(dy, scale, block=(1, s.D), out_dtype="bf16"), size=s.V
            ),
            _scaled_rows,
            {"tokens": "i64[N]", "dy": "i8[N,D]", "scale": "f32[N,I]"},
            {"N": 65536, "V": 128256, "D": 4096, "I": 1},
            {"N": 300, "V": 70, "D": 24},
            moved("i8[N,D]", "bf16[V,D]", "f32[N]", "i32[N]"),
            (),
            {"tokens": uniform("V", "N")},
            "y",
            scale=0.01,
        ),
        rows(
            "S1",
            "softmax",
            lambda s, x: _ops().softmax(x),
            lambda torch, s, x: torch.softmax(x, -1),
            {"x": "bf16[N,D]"},
            {"N": 16384, "D": 8192},
            moved(*["bf16[N,D]"] * 3),
            ("x",),
        ),
        sampled(
            "G1",
            "grid_sample",
            "f32",
            "[B,C,H,W]",
            {"B": 64, "C": 3, "H": 224, "W": 224, "h": 224, "w": 224},
            {"B": 2, "H": 7, "W": 9, "h": 5, "w": 6},
        ),
        index_add("E7", "f32", hot("V", "N", share=HALF), 7_770 * K, 1_720 * K, 128, HALF),
        embedding("E1", "embedding", "bf16", uniform("V", "N"), 16384, 32000, 4096),
        embedding("E4", "embedding", "bf16", uniform("V", "N"), 65536, 256000, 3072),
        embedding(
            "E6",
            "embedding, 40 % padding",
            "bf16",
            hot("V", "N", share=0.4),
            32768,
            30522,
            1024,
            kept=0.6,
            padding_idx=0,
        ),
        embedding(
            "E6f",
            "embedding, 40 % padding, scale_grad_by_freq",
            "bf16",
            hot("V", "N", share=0.4),
            32768,
            30522,
            1024,
            kept=0.6,
            padding_idx=0,
            scale_grad_by_freq=True,
        ),
        index_add("E8", "f32", uniform("V", "N"), 500 * K, 100 * K, 128, 1.0),
        index_add("E8b", "bf16", uniform("V", "N"), 500 * K, 100 * K, 128, 1.0),
        GpuCase(
            "E12",
            "bags of five from a small table",
            lambda s, ids, table: _ops().embedding_bag(ids, table, mode="sum"),
            _bag_torch,
            {"ids": "i64[B,L]", "table": "f32[V,D]"},
            {"V": 155, "B": 65536, "L": 5, "D": 128},
            {"V": 31, "B": 60, "D": 24},
            moved("f32[B,D]", "f32[V,D]", "i32[B,L]"),
            ("table",),
            {"ids": uniform("V", "B", "L")},
            "table",
        ),
        GpuCase(
            "Q2",
            "learnable scale per row of an int8 embedding",
            lambda s, tokens, q, scale: _ops().embedding(tokens, _ops().dequantize(q, scale, block=(1, s.D))),
            _int8_table,
            {"tokens": "i64[N]", "q": "i8[V,D]", "scale": "f32[V,I]"},
            {"N": 65536, "V": 128256, "D": 4096, "I": 1},
            {"N": 300, "V": 70, "D": 24},
            moved("f32[N,D]", "i8[N,D]", "f32[V]", "i32[N]"),
            ("scale",),
            {"tokens": uniform("V", "N")},
            "scale",
            scale=0.01,
        ),
        _norm("N2", "rms", "bf16", 4096, 8192),
        _norm("N3", "layer", "f32", 4096, 8192),
        rows(
            "C1",
            "cross-entropy",
            lambda s, x, t: _ops().cross_entropy(x, t),
            lambda torch, s, x, t: torch.nn.functional.cross_entropy(x, t),
            {"x": "bf16[N,D]", "t": "i64[N]"},
            {"N": 8192, "D": 128256},
            moved(*["bf16[N,D]"] * 2),
            ("x",),
            draws={"t": uniform("D", "N")},
        ),
        rows(
            "P1",
            "SwiGLU",
            lambda s, a, b: _ops().silu(a) * b,
            _swiglu_torch,
            {"a": "bf16[N,D]", "b": "bf16[N,D]"},
            {"N": 16384, "D": 14336},
            moved(*["bf16[N,D]"] * 5),
            ("a", "b"),
        ),
        rows(
            "P2",
            "GELU",
            lambda s, x: _ops().gelu(x),
            lambda torch, s, x: torch.nn.functional.gelu(x),
            {"x": "bf16[N,D]"},
            {"N": 16384, "D": 16384},
            moved(*["bf16[N,D]"] * 3),
            ("x",),
        ),
        rows(
            "B1",
            "bias",
            lambda s, x, b: x + b,
            lambda torch, s, x, b: x + b,
            {"x": "bf16[N,D]", "b": "bf16[D]"},
            {"N": 65536, "D": 4096},
            moved("bf16[N,D]"),
            ("b",),
        ),
        sampled(
            "G3",
            "grid_sample, 10k points, channels last",
            "f32",
            "[B,C,H,W]",
            {"B": 42, "C": 128, "H": 120, "W": 160, "h": 100, "w": 100},
            {"B": 2, "C": 20, "H": 7, "W": 9, "h": 5, "w": 6},
            last=True,
        ),
        sampled(
            "G4",
            "grid_sample, bicubic",
            "f32",
            "[B,C,H,W]",
            {"B": 16, "C": 3, "H": 512, "W": 512, "h": 512, "w": 512},
            {"B": 2, "H": 7, "W": 9, "h": 5, "w": 6},
            mode="bicubic",
        ),
        sampled(
            "G5",
            "grid_sample in 3-D",
            "f32",
            "[B,C,D,H,W]",
            {"B": 2, "C": 1, "D": 160, "H": 160, "W": 160, "d": 160, "h": 160, "w": 160},
            {"D": 5, "H": 4, "W": 6, "d": 3, "h": 4, "w": 5},
        ),
        sampled(
            "G6",
            "grid_sample in 3-D",
            "f16",
            "[B,C,D,H,W]",
            {"B": 4, "C": 32, "D": 64, "H": 64, "W": 64, "d": 64, "h": 64, "w": 64},
            {"B": 2, "C": 5, "D": 5, "H": 4, "W": 6, "d": 3, "h": 4, "w": 5},
        ),
        GpuCase(
            "D1",
            "dX of a linear with int8 weights",
            lambda s, x, q, scale: _ops().linear(x, _ops().dequantize(q, scale, block=(1, s.D), out_dtype="bf16")),
            _int8_linear,
            {"x": "bf16[N,D]", "q": "i8[O,D]", "scale": "f32[O,I]"},
            {"N": 4096, "D": 4096, "O": 4096, "I": 1},
            {"N": 20, "D": 24, "O": 36},
            moved("bf16[N,O]", "i8[O,D]", "f32[O]", "bf16[N,D]"),
            ("x",),
            scale=0.05,
        ),
        GpuCase(
            "L1",
            "linear, bias and GELU",
            lambda s, x, w, b: _ops().gelu(_ops().linear(x, w, b)),
            lambda torch, s, x, w, b: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b)),
            {"x": "bf16[N,D]", "w": "bf16[O,D]", "b": "bf16[O]"},
            {"N": 8192, "D": 4096, "O": 4096},
            {"N": 20, "D": 24, "O": 36},
            moved(*["bf16[N,D]"] * 2, *["bf16[O,D]"] * 2, *["bf16[N,O]"] * 2),
            ("x", "w", "b"),
            scale=0.05,
        ),
        GpuCase(
            "A1",
            "attention, causal",
            lambda s, q, k, v: _ops().scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda torch, s, q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            {name: "bf16[B,H,T,E]" for name in "qkv"},
            {"B": 4, "H": 16, "T": 2048, "E": 64},
            {"B": 2, "H": 3, "T": 20, "E": 8},
            moved(*["bf16[B,H,T,E]"] * 8),
            ("q", "k", "v"),
        ),
        GpuCase(
            "D1n",
            "dX of a linear with nf4 weights",
            lambda s, x, q, scale: _ops().linear(
                x, _ops().dequantize_nf4(q, scale, block=(1, s.D // s.G), out_dtype="bf16")
            ),
            _nf4_linear,
            {"x": "bf16[N,D]", "q": "u8[O,H]", "scale": "f32[O,G]"},
            {"N": 4096, "D": 4096, "H": 2048, "O": 4096, "G": 64},
            {"N": 20, "D": 64, "H": 32, "O": 36, "G": 4},
            moved("bf16[N,O]", "u8[O,H]", "f32[O,G]", "bf16[N,D]"),
            ("x",),
            scale=0.05,
        ),
    ]
    return {case.id: case for case in cases}
