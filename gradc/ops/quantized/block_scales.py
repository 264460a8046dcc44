"""Block scales computed from the values to be quantized (MX, dynamic), and NF4: 4-bit codes with a code book."""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, SizeLike
from ...ir.node import Node, call
from ...ir.op import DISCRETE, AxisReplacement, BadSample, Composite, Sample
from ...ir.types import DTYPES, F32, F64, DType, Type
from ..elementwise.bits import infer_unpacked, unpack
from ..elementwise.pointwise import eq, maximum, stop_gradient, where
from ..indexing.gathers import gather
from ..rules import converted, floating, full
from .blocks import Blocks, canonical_block, check_parameters, compute_dtype, replace_axis_of_blocks, scale_gradient
from .quantization import LARGEST, TARGETS

E8M0, U4 = DTYPES["e8m0"], DTYPES["u4"]

# -- NF4 ---------------------------------------------------------------------------------------------------------------

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NormalFloat 4, quantiles of a normal distribution: Dettmers et al. 2023 (QLoRA), appendix E."""


def _codebook(*, dtype: DType = F32) -> Any:
    if not dtype.is_float:
        raise TypeRuleError(f"dtype={dtype} is no float")
    return Type(dtype, (16,)), {"dtype": dtype}


nf4_codebook = Composite(
    "nf4_codebook",
    infer=_codebook,
    decompose=lambda *, dtype: call("constant", value=NF4, dtype=dtype, shape=(16,)),
    samples=(Sample(()), Sample((), {"dtype": "bf16"})),
    bad=(BadSample((), {"dtype": "i8"}, match="dtype=i8 is no float"),),
    doc="the 16 values of NormalFloat 4, by code",
    source="Dettmers et al. 2023 (QLoRA), appendix E",
)


def _nf4(
    packed: Type,
    scale: Type,
    *,
    block: tuple[SizeLike, ...] | None = None,
    axis: int = -1,
    low_nibble_first: bool = True,
    out_dtype: DType = F32,
) -> Any:
    codes, attrs = infer_unpacked(packed, dtype=U4, axis=axis, low_nibble_first=low_nibble_first)
    if not out_dtype.is_float:
        raise TypeRuleError(f"out_dtype={out_dtype} is no float")
    del attrs["dtype"]
    return codes.with_dtype(out_dtype), {
        **attrs,
        "block": check_parameters(codes, scale, None, block),
        "out_dtype": out_dtype,
    }


def _nf4_rows(packed: Node, axis: int, low_nibble_first: bool, compute: DType, blocks: Blocks) -> Node:
    codes = unpack.plain(packed, dtype=U4, axis=axis, low_nibble_first=low_nibble_first)
    return blocks.enter(gather.plain(nf4_codebook.plain(dtype=compute), codes, axis=0))


def _nf4_blocks(packed: Node, axis: int, block: tuple[Size, ...]) -> Blocks:
    return Blocks((*packed.shape[:axis], packed.shape[axis] * 2, *packed.shape[axis + 1 :]), block)


def _nf4_value(
    packed: Node, scale: Node, *, block: tuple[Size, ...], axis: int, low_nibble_first: bool, out_dtype: DType
) -> Node:
    blocks, compute = _nf4_blocks(packed, axis, block), compute_dtype(scale.dtype, out_dtype)
    rows = _nf4_rows(packed, axis, low_nibble_first, compute, blocks)
    return converted(blocks.leave(rows * blocks.spread(converted(scale, compute))), out_dtype)


def _nf4_vjp(
    g: Node,
    y: Node,
    packed: Node,
    scale: Node,
    *,
    block: tuple[Size, ...],
    axis: int,
    low_nibble_first: bool,
    out_dtype: DType,
) -> tuple[Any, Any]:
    # ds = the sum over each block of g codebook[packed]
    blocks, compute = _nf4_blocks(packed, axis, block), compute_dtype(scale.dtype, out_dtype)
    rows = _nf4_rows(packed, axis, low_nibble_first, compute, blocks)
    return DISCRETE, scale_gradient(blocks.total(blocks.enter(converted(g, compute)) * rows, scale), scale)


def _replace_axis_of_nf4(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    own = node.attrs["axis"]
    if axis == own:  # an axis of packed pairs cannot be split
        return None
    replacement = replace_axis_of_blocks(node, axis, sizes)
    return replacement and (replacement[0], {**replacement[1], "axis": own if own < axis else own + len(sizes) - 1})


dequantize_nf4 = Composite(
    "dequantize_nf4",
    infer=_nf4,
    decompose=_nf4_value,
    vjp=_nf4_vjp,
    replace_axis=_replace_axis_of_nf4,
    samples=(
        Sample(("u8[N,4]", "F[N,2]"), {"block": (1, 4)}, draw=("int", "positive")),
        Sample(("u8[N,4]", "F[]"), draw=("int", "positive")),
        Sample(
            ("u8[3,N]", "F[6,1]"), {"block": (1, "N"), "axis": 0, "low_nibble_first": False}, draw=("int", "positive")
        ),
        Sample(("u8[N,3]", "F[N,2]"), {"block": (1, 4), "out_dtype": "bf16"}, draw=("int", "positive")),
    ),
    bad=(
        BadSample(("i8[4]", "f32[1]"), match="packed data is u8, not i8"),
        BadSample(("u8[4]", "f32[1]"), {"block": (4,)}, match="blocks of [4] in [8] need [2]"),
        BadSample(("u8[4]", "f32[1]"), {"out_dtype": "i8"}, match="out_dtype=i8 is no float"),
        BadSample(("u8[4]", "i32[1]"), match="scale is i32, no float"),
    ),
    doc=(
        "nf4_codebook()[unpack(packed)] * scale, one scale per block of the unpacked values (block: as for dequantize);"
        " two consecutive values along axis share a byte, the first in the low nibble (low_nibble_first=False for"
        " bitsandbytes' format)"
    ),
    source="Dettmers et al. 2023 (QLoRA)",
)

# -- scales ------------------------------------------------------------------------------------------------------------

BAD_BLOCKS = (
    BadSample(("i8[4]",), {"dtype": "f8e4m3"}, match="i8 is no float"),
    BadSample(("f32[4,6]",), {"block": (4,), "dtype": "f8e4m3"}, match="block [4] has 1 sizes for rank 2"),
    BadSample(("f32[4]",), {"block": (0,), "dtype": "f8e4m3"}, match="a block of 0 on axis 0"),
)
EMAX = {"f8e4m3": 8, "f8e5m2": 15, "f4e2m1": 2}
"""The exponent of the largest normal number of each format (emax in the MX specification)."""


def _mx_scale(x: Type, *, block: tuple[SizeLike, ...] | None = None, dtype: DType) -> Any:
    if dtype.name not in EMAX:
        raise TypeRuleError(f"dtype={dtype}; values with power-of-two scales may be {' '.join(EMAX)}")
    blocks = Blocks(floating(x).shape, canonical_block(x.shape, block))
    return Type(E8M0, blocks.counts), {"block": blocks.block, "dtype": dtype}


def _mx_value(x: Node, *, block: tuple[Size, ...], dtype: DType) -> Node:
    blocks = Blocks(x.shape, block)
    wide = converted(x, x.dtype.compute)
    most = converted(blocks.largest(blocks.enter(call("abs", wide))), F64)
    # the cast to e8m0 rounds 1.5 * 2^k and above to 2^(k+1); 0.75 x therefore rounds to the largest power of two <= x
    return converted(maximum(most * (0.75 * 2.0 ** -EMAX[dtype.name]), full(2.0**-127, most)), E8M0)


mx_scale = Composite(
    "mx_scale",
    infer=_mx_scale,
    decompose=_mx_value,
    vjp=lambda g, y, x, **_: (DISCRETE,),
    samples=(
        Sample(("F[N,8]",), {"block": (1, 4), "dtype": "f4e2m1"}),
        Sample(("F[2,N]",), {"block": (1, 3), "dtype": "f8e4m3"}),
        Sample(("F[N]",), {"dtype": "f8e5m2"}),
        Sample(("F[]",), {"dtype": "f8e5m2"}),
    ),
    bad=(*BAD_BLOCKS, BadSample(("f32[4]",), {"dtype": "i8"}, match="dtype=i8; values with power-of-two scales")),
    doc=(
        "the e8m0 scale 2^(floor(log2(max |x|)) - emax) of each block of x, where emax is the exponent of dtype's"
        " largest value; at least 2^-127 (also for a block of zeros), NaN for a block with NaN or infinity; no gradient"
    ),
    source="OCP Microscaling Formats (MX) v1.0, 6.3",
)


def _dynamic_scale(
    x: Type, *, block: tuple[SizeLike, ...] | None = None, dtype: DType = DTYPES["i8"], differentiable: bool = False
) -> Any:
    if dtype.name not in TARGETS:
        raise TypeRuleError(f"dtype={dtype}; quantized values may be {' '.join(TARGETS)}")
    blocks = Blocks(floating(x).shape, canonical_block(x.shape, block))
    return Type(x.dtype.compute, blocks.counts), {
        "block": blocks.block,
        "dtype": dtype,
        "differentiable": differentiable,
    }


def _dynamic_value(x: Node, *, block: tuple[Size, ...], dtype: DType, differentiable: bool) -> Node:
    blocks = Blocks(x.shape, block)
    most = blocks.largest(blocks.enter(call("abs", converted(x, x.dtype.compute))))
    scale = most / float(LARGEST[dtype.name] if dtype.is_float else dtype.range[1])
    scale = where(eq(scale, full(0, scale)), full(1, scale), scale)
    return scale if differentiable else stop_gradient(scale)


dynamic_scale = Composite(
    "dynamic_scale",
    infer=_dynamic_scale,
    decompose=_dynamic_value,
    samples=(
        Sample(("F[N,4]",), {"block": (1, 4)}, draw=("distinct",)),
        Sample(("F[N,4]",), {"block": (1, 4), "differentiable": True}, draw=("distinct",)),
        Sample(("F[5,7]",), {"block": (2, 3), "dtype": "f8e4m3", "differentiable": True}, draw=("distinct",)),
        Sample(("F[N]",), {"dtype": "u4"}, draw=("distinct",)),
        Sample(("F[]",), {"dtype": "f4e2m1"}, draw=("distinct",)),
    ),
    bad=(*BAD_BLOCKS, BadSample(("f32[4]",), {"dtype": "f32"}, match="dtype=f32; quantized values may be")),
    doc=(
        "max |x| over each block of x, divided by the largest value of dtype, so that quantize clamps nothing; 1 where"
        " that is 0 (a block of zeros), NaN or infinity for a block that has one; f32, or f64 for an f64 x; no gradient"
        " unless differentiable=True"
    ),
    source="per-token dynamic quantization: Yao et al. 2022 (ZeroQuant)",
)
