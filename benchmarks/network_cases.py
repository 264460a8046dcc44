"""CPU cases of whole networks' parts: attention, a projection onto a vocabulary with its loss, a residual network's
step, a block of a mobile network, a transformer's block in f32 and bf16, linear layers with int8 and NF4 weights, and
experts.

Each is written once: ``gradc.ops`` and ``torch.nn.functional`` have these functions by the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .case import Array, Case, uniform

Draw = Callable[[np.random.Generator], Array]


def _both(write: Callable[..., Any]) -> dict[str, Any]:
    """``ours`` and ``theirs`` of a case, from ``write(f, permute, **inputs)``."""

    def ours(**x: Any) -> Any:
        from gradc import ops

        return write(ops, ops.transpose, **x)

    def theirs(torch: Any, **x: Any) -> Any:
        return write(torch.nn.functional, torch.permute, **x)

    return {"ours": ours, "theirs": theirs}


def _floats(*shape: int, scale: float = 1.0, middle: float = 0.0) -> Draw:
    return lambda random: (middle + scale * random.standard_normal(shape)).astype(np.float32)


# -- attention, and the loss over a vocabulary -------------------------------------------------------------------------


def _attention(f: Any, permute: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    return f.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attention_case(name: str, causal: bool) -> Case:
    return Case(
        name,
        **_both(functools.partial(_attention, causal=causal)),
        types=dict.fromkeys("qkv", "f32[4,8,2048,64]"),
        wrt=["q", "k", "v"],
        forward=True,
    )


def _vocabulary_loss(f: Any, permute: Any, x: Any, weight: Any, target: Any) -> Any:
    return f.cross_entropy(f.linear(x, weight), target)


# -- convolutions ------------------------------------------------------------------------------------------------------

_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Of resnet18 (He et al., 2015): channels and stride of each stage, which has two blocks of two convolutions."""


def _resnet18_sizes() -> dict[str, tuple[int, ...]]:
    """The parameters by name; ``.g`` and ``.b`` are scale and shift of a batch norm."""
    sizes: dict[str, tuple[int, ...]] = {"stem": (64, 3, 7, 7)}
    inner = 64
    for i, (outer, stride) in enumerate(_STAGES):
        for block in range(2):
            sizes[f"s{i}_{block}_a"] = (outer, inner, 3, 3)
            sizes[f"s{i}_{block}_b"] = (outer, outer, 3, 3)
            if not block and stride > 1:
                sizes[f"s{i}_{block}_skip"] = (outer, inner, 1, 1)
            inner = outer
    norms = {f"{name}_{part}": (size[0],) for name, size in sizes.items() for part in ("gamma", "beta")}
    return {**sizes, **norms, "fc": (1000, 512), "fc_bias": (1000,)}


def _normalized(f: Any, p: Mapping[str, Any], name: str, x: Any, **options: Any) -> Any:
    h = f.conv2d(x, p[name], **options)
    return f.batch_norm(h, None, None, p[f"{name}_gamma"], p[f"{name}_beta"], training=True)


def _resnet18(f: Any, permute: Any, x: Any, target: Any, **p: Any) -> Any:
    h = f.relu(_normalized(f, p, "stem", x, stride=2, padding=3))
    h = f.max_pool2d(h, 3, 2, 1)
    for i, (_, stride) in enumerate(_STAGES):
        for block in range(2):
            name, step = f"s{i}_{block}", stride if not block else 1
            skip = _normalized(f, p, f"{name}_skip", h, stride=step) if f"{name}_skip" in p else h
            h = f.relu(_normalized(f, p, f"{name}_a", h, stride=step, padding=1))
            h = f.relu(_normalized(f, p, f"{name}_b", h, padding=1) + skip)
    h = f.adaptive_avg_pool2d(h, 1).reshape((x.shape[0], 512))
    return f.cross_entropy(f.linear(h, p["fc"], p["fc_bias"]), target)


def _mobile_sizes(width: int, wide: int) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "expand": (wide, width, 1, 1),
        "depthwise": (wide, 1, 3, 3),
        "project": (width, wide, 1, 1),
    }
    return {**sizes, **{f"{name}_{part}": (size[0],) for name, size in sizes.items() for part in ("gamma", "beta")}}


def _mobile(f: Any, permute: Any, x: Any, **p: Any) -> Any:
    """The inverted residual block of MobileNetV2 (Sandler et al., 2018)."""
    h = f.relu6(_normalized(f, p, "expand", x))
    h = f.relu6(_normalized(f, p, "depthwise", h, padding=1, groups=p["depthwise"].shape[0]))
    return x + _normalized(f, p, "project", h)


def _parameters(sizes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], dict[str, Draw]]:
    """Types, and how to draw: weights by He's rule, scales around 1."""
    types, draw = {}, {}
    for name, shape in sizes.items():
        types[name] = f"f32[{','.join(map(str, shape))}]"
        inner = int(np.prod(shape[1:])) if len(shape) > 1 else 100
        middle = 1.0 if name.endswith("gamma") else 0.0
        draw[name] = _floats(*shape, scale=(2 / inner) ** 0.5, middle=middle)
    return types, draw


def _convolution_cases() -> list[Case]:
    types, draw = _parameters(_resnet18_sizes())
    mobile_types, mobile_draw = _parameters(_mobile_sizes(32, 192))
    return [
        Case(
            "n-resnet18",
            **_both(_resnet18),
            types={"x": "f32[8,3,224,224]", "target": "i64[8]", **types},
            wrt=list(types),
            draw={"target": uniform(1000, 8), **draw},
            forward=True,
        ),
        Case(
            "n-mobile-block",
            **_both(_mobile),
            types={"x": "f32[16,32,56,56]", **mobile_types},
            wrt=["x", *mobile_types],
            draw=mobile_draw,
            forward=True,
        ),
    ]


# -- transformers ------------------------------------------------------------------------------------------------------


def _gpt2_block(f: Any, permute: Any, x: Any, heads: int, **p: Any) -> Any:
    batch, length, width = x.shape

    def apart(h: Any) -> Any:
        return permute(h.reshape((batch, length, heads, width // heads)), (0, 2, 1, 3))

    h = f.layer_norm(x, (width,), p["ln1"], p["ln1_bias"])
    q, k, v = (apart(f.linear(h, p[name], p[f"{name}_bias"])) for name in ("query", "key", "value"))
    mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + f.linear(permute(mixed, (0, 2, 1, 3)).reshape((batch, length, width)), p["mix"], p["mix_bias"])
    h = f.layer_norm(x, (width,), p["ln2"], p["ln2_bias"])
    return x + f.linear(f.gelu(f.linear(h, p["up"], p["up_bias"]), approximate="tanh"), p["down"], p["down_bias"])


def block_case(name: str, dtype: str, batch: int, length: int, width: int = 768) -> Case:
    """A block of GPT-2 (Radford et al., 2019); the small model has 12 heads and a width of 768."""
    sizes: dict[str, tuple[int, ...]] = {"ln1": (width,), "ln2": (width,)}
    sizes |= dict.fromkeys(("query", "key", "value", "mix"), (width, width))
    sizes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    sizes |= {f"{n}_bias": size[:1] for n, size in sizes.items()}
    types = {n: f"{dtype}[{','.join(map(str, size))}]" for n, size in sizes.items()}
    draw = {n: _floats(*sizes[n], scale=0.02, middle=float(n in ("ln1", "ln2"))) for n in sizes}
    return Case(
        name,
        **_both(functools.partial(_gpt2_block, heads=12)),
        types={"x": f"{dtype}[{batch},{length},{width}]", **types},
        wrt=["x", *types],
        draw=draw,
        forward=True,
    )


def _int8_linear(rows: int) -> Case:
    """A forward alone: the weights are int8 with a scale for each row, as they lie in memory."""

    def ours(x: Any, q: Any, scale: Any) -> Any:
        from gradc import ops

        return ops.linear(x, ops.dequantize(q, scale, block=(1, 4096)))

    return Case(
        f"n-int8-linear-{rows}",
        ours,
        lambda torch, x, q, scale: torch.nn.functional.linear(x, q.to(x.dtype) * scale),
        {"x": f"f32[{rows},4096]", "q": "i8[4096,4096]", "scale": "f32[4096,1]"},
        [],
        {"scale": _floats(4096, 1, scale=1e-4, middle=1e-2)},
        forward=True,
    )


NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""Dettmers et al. 2023 (QLoRA), appendix E, in f32."""


def _nf4_linear(rows: int) -> Case:
    """Forward, and the gradients of the rows and of the scales, one for 64 weights."""

    def ours(x: Any, codes: Any, scale: Any) -> Any:
        from gradc import ops

        return ops.linear(x, ops.dequantize_nf4(codes, scale, block=(1, 64)))

    def theirs(torch: Any, x: Any, codes: Any, scale: Any) -> Any:
        book = torch.tensor(NF4, dtype=x.dtype)
        nibbles = torch.stack((codes & 15, codes >> 4), -1).view(4096, 64, 64)
        return torch.nn.functional.linear(x, (book[nibbles.int()] * scale[..., None]).view(4096, 4096))

    return _learned_scales("nf4", rows, ours, theirs, "u8[4096,2048]", "f32[4096,64]")


def _int8_group_linear(rows: int) -> Case:
    """The same with int8 weights and a scale for 32 of them."""

    def ours(x: Any, codes: Any, scale: Any) -> Any:
        from gradc import ops

        return ops.linear(x, ops.dequantize(codes, scale, block=(1, 32)))

    def theirs(torch: Any, x: Any, codes: Any, scale: Any) -> Any:
        weight = codes.view(4096, 128, 32).to(x.dtype) * scale[..., None]
        return torch.nn.functional.linear(x, weight.view(4096, 4096))

    return _learned_scales("int8-group", rows, ours, theirs, "i8[4096,4096]", "f32[4096,128]")


def _learned_scales(name: str, rows: int, ours: Any, theirs: Any, codes: str, scale: str) -> Case:
    shape = tuple(map(int, scale[4:-1].split(",")))
    return Case(
        f"n-{name}-linear-{rows}",
        ours,
        theirs,
        {"x": f"f32[{rows},4096]", "codes": codes, "scale": scale},
        ["x", "scale"],
        {"scale": _floats(*shape, scale=1e-4, middle=1e-2)},
        forward=True,
    )


def _experts(groups: int) -> Case:
    """1024 tokens that are sorted by expert, each times its expert's matrix."""

    def ours(x: Any, weight: Any, offsets: Any) -> Any:
        from gradc import ops

        return ops.grouped_matmul(x, weight, offsets)

    def theirs(torch: Any, x: Any, weight: Any, offsets: Any) -> Any:
        if x.dtype is not torch.float64:
            return torch._grouped_mm(x, weight, offs=offsets[1:])
        return torch.cat(
            [part @ matrix for part, matrix in zip(x.tensor_split(offsets[1:-1].long()), weight, strict=True)]
        )

    def ends(random: np.random.Generator) -> Array:
        inner = np.sort(random.integers(0, 1025, groups - 1))
        return np.concatenate([[0], inner, [1024]]).astype(np.int32)

    return Case(
        f"n-experts-{groups}",
        ours,
        theirs,
        {"x": "bf16[1024,512]", "weight": f"bf16[{groups},512,1024]", "offsets": f"i32[{groups + 1}]"},
        ["x", "weight"],
        {"weight": _floats(groups, 512, 1024, scale=512**-0.5), "offsets": ends},
    )


def network_cases() -> list[Case]:
    return [
        _attention_case("n-attention", causal=False),
        _attention_case("n-attention-causal", causal=True),
        Case(
            "n-linear-xent",
            **_both(_vocabulary_loss),
            types={"x": "f32[4096,512]", "weight": "f32[32000,512]", "target": "i64[4096]"},
            wrt=["x", "weight"],
            draw={"target": uniform(32000, 4096), "weight": _floats(32000, 512, scale=512**-0.5)},
            forward=True,
        ),
        *_convolution_cases(),
        block_case("n-gpt2-block", "f32", 2, 1024),
        block_case("n-gpt2-block-bf16", "bf16", 2, 512),
        *(case(rows) for case in (_int8_linear, _nf4_linear, _int8_group_linear) for rows in (1, 16, 512)),
        *(_experts(groups) for groups in (8, 64)),
    ]
