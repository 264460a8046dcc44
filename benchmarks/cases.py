"""The CPU cases: each a model written once with gradc's ops and once with torch's, its arrays, and the bytes that must
move.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .case import Array, Case, type_of, uniform, zipf
from .network_cases import network_cases


def _embedding(name: str, rows: int, table: int, width: int, draw: Any) -> Case:
    from gradc import ops

    return Case(
        name,
        lambda tokens, weight: ops.embedding(tokens, weight),
        lambda torch, tokens, weight: torch.nn.functional.embedding(tokens, weight),
        {"tokens": f"i64[{rows}]", "weight": f"f32[{table},{width}]"},
        ["weight"],
        {"tokens": draw(table, rows)},
    )


def _block(
    x: Any,
    g1: Any,
    b1: Any,
    wqkv: Any,
    bqkv: Any,
    wo: Any,
    bo: Any,
    g2: Any,
    b2: Any,
    w1: Any,
    c1: Any,
    w2: Any,
    c2: Any,
) -> Any:
    from gradc import ops

    batch, length, width = x.shape
    heads, each = 8, width // 8
    h = ops.layer_norm(x, (width,), g1, b1)
    qkv = ops.transpose(ops.reshape(ops.linear(h, wqkv, bqkv), (batch, length, 3, heads, each)), (2, 0, 3, 1, 4))
    weights = ops.softmax((qkv[0] @ qkv[1].T) * each**-0.5)
    mixed = ops.reshape(ops.transpose(weights @ qkv[2], (0, 2, 1, 3)), x.shape)
    x = x + ops.linear(mixed, wo, bo)
    h = ops.layer_norm(x, (width,), g2, b2)
    return x + ops.linear(ops.gelu(ops.linear(h, w1, c1)), w2, c2)


def _torch_block(
    torch: Any,
    x: Any,
    g1: Any,
    b1: Any,
    wqkv: Any,
    bqkv: Any,
    wo: Any,
    bo: Any,
    g2: Any,
    b2: Any,
    w1: Any,
    c1: Any,
    w2: Any,
    c2: Any,
) -> Any:
    f = torch.nn.functional
    batch, length, width = x.shape
    heads, each = 8, width // 8
    h = f.layer_norm(x, (width,), g1, b1)
    q, k, v = f.linear(h, wqkv, bqkv).reshape(batch, length, 3, heads, each).permute(2, 0, 3, 1, 4)
    weights = torch.softmax((q @ k.mT) * each**-0.5, -1)
    x = x + f.linear((weights @ v).permute(0, 2, 1, 3).reshape(x.shape), wo, bo)
    h = f.layer_norm(x, (width,), g2, b2)
    return x + f.linear(f.gelu(f.linear(h, w1, c1)), w2, c2)


def _language_model(
    tokens: Any, target: Any, table: Any, w1: Any, b1: Any, gamma: Any, beta: Any, w2: Any, b2: Any
) -> Any:
    from gradc import ops

    h = ops.linear(ops.reshape(ops.embedding(tokens, table), (tokens.shape[0], -1)), w1, b1)
    return ops.cross_entropy(ops.linear(ops.layer_norm(ops.gelu(h), (128,), gamma, beta), w2, b2), target)


def _torch_language_model(
    torch: Any, tokens: Any, target: Any, table: Any, w1: Any, b1: Any, gamma: Any, beta: Any, w2: Any, b2: Any
) -> Any:
    f = torch.nn.functional
    h = f.linear(f.embedding(tokens, table).reshape(tokens.shape[0], -1), w1, b1)
    return f.cross_entropy(f.linear(f.layer_norm(f.gelu(h), (128,), gamma, beta), w2, b2), target)


# -- grid_sample and the spatial transformer ---------------------------------------------------------------------------


def _random_grid(random: np.random.Generator, shape: Sequence[int]) -> Array:
    return random.uniform(-1.1, 1.1, shape).astype(np.float32)


def _smooth_grid(random: np.random.Generator, shape: Sequence[int]) -> Array:
    """The identity with a small slow displacement: what a flow field looks like."""
    *_, height, width, _ = shape
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    grid = np.stack([x + 0.05 * np.sin(3 * y), y + 0.05 * np.cos(3 * x)], -1)
    return (grid + 0.002 * random.standard_normal(shape)).astype(np.float32)


def _grid_case(name: str, image: str, grid: str, draw: Callable[[np.random.Generator, Sequence[int]], Array]) -> Case:
    from gradc import ops

    shape = type_of(grid).concrete({})
    return Case(
        name,
        lambda x, grid: ops.grid_sample(x, grid, padding_mode="zeros", align_corners=False),
        lambda torch, x, grid: torch.nn.functional.grid_sample(x, grid, padding_mode="zeros", align_corners=False),
        {"x": image, "grid": grid},
        ["x", "grid"],
        {"grid": lambda random: draw(random, shape)},
    )


def _transformer(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    from gradc import ops

    flat = ops.reshape(x, (x.shape[0], -1))
    theta = ops.reshape(ops.linear(ops.relu(ops.linear(flat, w1, b1)), w2, b2), (x.shape[0], 2, 3))
    return ops.grid_sample(x, ops.affine_grid(theta, x.shape), align_corners=False)


def _torch_transformer(torch: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    f = torch.nn.functional
    theta = f.linear(torch.relu(f.linear(x.flatten(1), w1, b1)), w2, b2).reshape(-1, 2, 3)
    return f.grid_sample(x, f.affine_grid(theta, x.shape, align_corners=False), align_corners=False)


# -- a recommender: the tables of MLPerf's DLRM v2, capped at 1e5 rows -------------------------------------------------

_ROWS = (
    40_000_000,
    39060,
    17295,
    7424,
    20265,
    3,
    7122,
    1543,
    63,
    40_000_000,
    3067956,
    405282,
    10,
    2209,
    11938,
    155,
    4,
    976,
    14,
    40_000_000,
    40_000_000,
    40_000_000,
    590152,
    12973,
    108,
    36,
)
_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_CAP, _BATCH, _WIDTH = 100_000, 2048, 64
_TABLES = [f"table{i}" for i in range(len(_ROWS))]
_LAYERS = {"bottom": (13, 512, 256, _WIDTH), "top": (_WIDTH + len(_ROWS) * (len(_ROWS) + 1) // 2, 1024, 512, 1)}
_BELOW = [i * (len(_ROWS) + 1) + j for i in range(len(_ROWS) + 1) for j in range(i)]


def _layers(linear: Callable[..., Any], relu: Callable[..., Any], x: Mapping[str, Any], name: str, h: Any) -> Any:
    for i in range(3):
        h = linear(h, x[f"{name}_w{i}"], x[f"{name}_b{i}"])
        h = relu(h) if (name, i) != ("top", 2) else h
    return h


def _recommender(**x: Any) -> Any:
    from gradc import ops

    layers = functools.partial(_layers, ops.linear, ops.relu, x)
    dense = layers("bottom", x["dense"])
    bags = [ops.embedding_bag(x[f"bag{i}"], x[name], mode="sum") for i, name in enumerate(_TABLES)]
    each = ops.concat(*(ops.reshape(v, (_BATCH, 1, _WIDTH)) for v in (dense, *bags)), axis=1)
    products = ops.reshape(each @ each.T, (_BATCH, -1))
    return layers("top", ops.concat(dense, ops.index_select(products, 1, x["below"]), axis=1))


def _torch_recommender(torch: Any, **x: Any) -> Any:
    f = torch.nn.functional

    layers = functools.partial(_layers, f.linear, torch.relu, x)
    dense = layers("bottom", x["dense"])
    bags = [f.embedding_bag(x[f"bag{i}"], x[name], mode="sum") for i, name in enumerate(_TABLES)]
    each = torch.stack([dense, *bags], 1)
    products = (each @ each.mT).reshape(_BATCH, -1)
    return layers("top", torch.cat([dense, products[:, x["below"]]], 1))


def _recommender_case() -> Case:
    rows = [min(r, _CAP) for r in _ROWS]
    types = {"dense": f"f32[{_BATCH},13]", "below": f"i64[{len(_BELOW)}]"}
    types |= {f"bag{i}": f"i64[{_BATCH},{hot}]" for i, hot in enumerate(_HOTS)}
    types |= {name: f"f32[{n},{_WIDTH}]" for name, n in zip(_TABLES, rows, strict=True)}
    wrt = list(_TABLES)
    for part, sizes in _LAYERS.items():
        for i, (inner, outer) in enumerate(itertools.pairwise(sizes)):
            types |= {f"{part}_w{i}": f"f32[{outer},{inner}]", f"{part}_b{i}": f"f32[{outer}]"}
            wrt += [f"{part}_w{i}", f"{part}_b{i}"]
    draw = {f"bag{i}": uniform(n, _BATCH, hot) for i, (n, hot) in enumerate(zip(rows, _HOTS, strict=True))}
    return Case(
        "c-dlrm",
        _recommender,
        _torch_recommender,
        types,
        wrt,
        {**draw, "below": lambda random: np.array(_BELOW)},
        forward=True,
        scale=0.05,
    )


def _dequantized_rows(name: str, dtype: str) -> Case:
    """A forward alone: rows of a quantized gradient, scaled and added where their indices say."""
    from gradc import ops

    rows, table, width = 8192, 32000, 512

    def ours(index: Any, dy: Any, scale: Any) -> Any:
        wide = ops.dequantize(dy, scale, block=(1, width)) if dtype == "i8" else dy * scale
        return ops.scatter_add(index, wide, size=table)

    return Case(
        name,
        ours,
        lambda torch, index, dy, scale: torch.zeros(table, width, dtype=scale.dtype).index_add_(0, index, dy * scale),
        {"index": f"i64[{rows}]", "dy": f"{dtype}[{rows},{width}]", "scale": f"f32[{rows},1]"},
        [],
        {"index": uniform(table, rows)},
        forward=True,
    )


def all_cases() -> dict[str, Case]:
    """Every case, by id."""
    from gradc import ops

    d = 512
    cases = [
        Case(
            "demo-step",
            _language_model,
            _torch_language_model,
            {
                "tokens": "i64[512,6]",
                "target": "i64[512]",
                "table": "f32[6697,64]",
                "w1": "f32[128,384]",
                "b1": "f32[128]",
                "gamma": "f32[128]",
                "beta": "f32[128]",
                "w2": "f32[6697,128]",
                "b2": "f32[6697]",
            },
            ["table", "w1", "b1", "gamma", "beta", "w2", "b2"],
            {"tokens": uniform(6697, 512, 6), "target": uniform(6697, 512)},
            forward=True,
            scale=0.1,
        ),
        _embedding("c-emb-uniform", 8192, 32000, 512, uniform),
        _embedding("c-emb-zipf", 8192, 32000, 512, zipf),
        _embedding("c-emb-wide-uniform", 65536, 1000000, 64, uniform),
        _embedding("c-emb-wide-zipf", 65536, 1000000, 64, zipf),
        Case(
            "c-dequant-scale",
            lambda tokens, table, scale: ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 512))),
            lambda torch, tokens, table, scale: torch.nn.functional.embedding(tokens, table.float() * scale),
            {"tokens": "i64[8192]", "table": "i8[32000,512]", "scale": "f32[32000,1]"},
            ["scale"],
            {"tokens": uniform(32000, 8192)},
        ),
        _dequantized_rows("c-dequant-emb", "i8"),
        _dequantized_rows("c-dequant-emb-f32", "f32"),
        _grid_case("c-grid-random", "f32[4,64,128,128]", "f32[4,128,128,2]", _random_grid),
        _grid_case("c-grid-smooth", "f32[4,64,128,128]", "f32[4,128,128,2]", _smooth_grid),
        _grid_case("c-grid-3d", "f32[2,16,32,32,32]", "f32[2,32,32,32,3]", _random_grid),
        Case(
            "c-layernorm",
            lambda x, w, b: ops.layer_norm(x, (1024,), w, b),
            lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (1024,), w, b),
            {"x": "f32[8192,1024]", "w": "f32[1024]", "b": "f32[1024]"},
            ["x", "w", "b"],
        ),
        Case(
            "c-rmsnorm",
            lambda x, w: ops.rms_norm(x, (1024,), w),
            lambda torch, x, w: torch.nn.functional.rms_norm(x, (1024,), w),
            {"x": "f32[8192,1024]", "w": "f32[1024]"},
            ["x", "w"],
        ),
        Case(
            "c-softmax", lambda x: ops.softmax(x), lambda torch, x: torch.softmax(x, -1), {"x": "f32[4096,4096]"}, ["x"]
        ),
        Case(
            "c-xent",
            lambda x, t: ops.cross_entropy(x, t),
            lambda torch, x, t: torch.nn.functional.cross_entropy(x, t),
            {"x": "f32[4096,32000]", "t": "i64[4096]"},
            ["x"],
            {"t": uniform(32000, 4096)},
        ),
        Case(
            "c-gelu-bias",
            lambda x, b: ops.gelu(x + b),
            lambda torch, x, b: torch.nn.functional.gelu(x + b),
            {"x": "f32[8192,4096]", "b": "f32[4096]"},
            ["x", "b"],
        ),
        Case(
            "c-silu-mul",
            lambda a, b: ops.silu(a) * b,
            lambda torch, a, b: torch.nn.functional.silu(a) * b,
            {"a": "f32[8192,4096]", "b": "f32[8192,4096]"},
            ["a", "b"],
        ),
        Case(
            "c-block",
            _block,
            _torch_block,
            {
                "x": f"f32[4,512,{d}]",
                "g1": f"f32[{d}]",
                "b1": f"f32[{d}]",
                "wqkv": f"f32[{3 * d},{d}]",
                "bqkv": f"f32[{3 * d}]",
                "wo": f"f32[{d},{d}]",
                "bo": f"f32[{d}]",
                "g2": f"f32[{d}]",
                "b2": f"f32[{d}]",
                "w1": f"f32[{4 * d},{d}]",
                "c1": f"f32[{4 * d}]",
                "w2": f"f32[{d},{4 * d}]",
                "c2": f"f32[{d}]",
            },
            ["g1", "b1", "wqkv", "bqkv", "wo", "bo", "g2", "b2", "w1", "c1", "w2", "c2"],
            forward=True,
            scale=0.05,
        ),
        _recommender_case(),
        Case(
            "c-stn",
            _transformer,
            _torch_transformer,
            {"x": "f32[256,1,28,28]", "w1": "f32[32,784]", "b1": "f32[32]", "w2": "f32[6,32]", "b2": "f32[6]"},
            ["w1", "b1", "w2", "b2"],
            forward=True,
            scale=0.1,
        ),
        *network_cases(),
    ]
    return {case.id: case for case in cases}
