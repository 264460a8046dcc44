"""Quantization with a block shape: dequantize, quantize, fake_quantize.

One block shape covers every granularity: a parameter (scale, zero point) has one value per block, ceil(shape / block) of them.
Per tensor the block is the shape; per channel it is 1 on the channel's axis and whole elsewhere; per group of 32 it is (1, 32).
Nothing is learnable by itself: a scale or zero point is learned by naming it in ``wrt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import TypeRuleError
from ..ir.dims import Dim, Size, ceildiv, known_nonnegative, same
from ..ir.node import Node, call
from ..ir.op import DISCRETE, BadSample, Composite, Sample
from ..ir.types import DTYPES, F32, F64, DType, Type
from .movement import broadcast_axes
from .pointwise import ge, le, logical_and, maximum, minimum, round, stop_gradient, where
from .reduce import sum
from .rules import converted, full, reshaped, spread, zeros_like

SizeLike = int | Dim
STORED = ("i2", "i4", "i8", "i16", "i32", "u2", "u4", "u8", "u16", "u32", "f8e4m3", "f8e5m2", "f4e2m1")
"""What dequantize reads."""
TARGETS = ("i2", "i4", "i8", "i16", "u2", "u4", "u8", "u16")
"""What quantize makes: every value of these is exact in f32."""

# -- blocks ------------------------------------------------------------------------------------------------------------


def canonical_block(shape: Sequence[Size], block: Sequence[Size] | None) -> tuple[Size, ...]:
    """One size per axis; whatever covers a whole axis is that axis's size."""
    if block is None:
        return tuple(shape)
    if len(block) != len(shape):
        raise TypeRuleError(f"block {_sizes(block)} has {len(block)} sizes for rank {len(shape)}")
    answer: list[Size] = []
    for axis, (n, b) in enumerate(zip(shape, block, strict=True)):
        if isinstance(b, int) and b < 1 and n != b:
            raise TypeRuleError(f"a block of {b} on axis {axis}: 1 at least")
        covers = b != 1 and n != 0 and (same(b, n) or known_nonnegative(b - n))
        answer.append(n if covers else b)
    return tuple(answer)


@dataclass(frozen=True)
class Blocks:
    """A shape cut into blocks.  An axis whose blocks are single elements or the whole axis stays one axis of the view; any other becomes
    two: [number of blocks, block]."""

    shape: tuple[Size, ...]
    block: tuple[Size, ...]

    @cached_property
    def counts(self) -> tuple[Size, ...]:
        """The shape of a parameter: ceil(shape / block)."""
        return tuple(n if b == 1 else 1 if b == n else ceildiv(n, b) for n, b in zip(self.shape, self.block, strict=True))

    @cached_property
    def split(self) -> tuple[bool, ...]:
        return tuple(b != 1 and b != n for n, b in zip(self.shape, self.block, strict=True))

    @cached_property
    def view(self) -> tuple[Size, ...]:
        """The shape in which blocks are axes of their own."""
        return self._axes(lambda n, c, b: (c, b), lambda n, c: n)

    @cached_property
    def parameter(self) -> tuple[Size, ...]:
        """A parameter's shape within the view: 1 along each block."""
        return self._axes(lambda n, c, b: (c, 1), lambda n, c: c)

    def _axes(self, two: Any, one: Any) -> tuple[Size, ...]:
        answer: list[Size] = []
        for n, c, b, split in zip(self.shape, self.counts, self.block, self.split, strict=True):
            answer += two(n, c, b) if split else (one(n, c),)
        return tuple(answer)

    @property
    def padded(self) -> tuple[Size, ...]:
        return tuple(c * b if s else n for n, c, b, s in zip(self.shape, self.counts, self.block, self.split, strict=True))

    def enter(self, x: Node, fill: float = 0.0) -> Node:
        """A value in the view, with ``fill`` where the last block stands out."""
        if not any(self.split):
            return x
        return reshaped(call("pad", x, tuple((0, m - n) for n, m in zip(self.shape, self.padded, strict=True)), fill), self.view)

    def leave(self, x: Node) -> Node:
        """Back from the view."""
        if not any(self.split):
            return x
        x, rank = reshaped(x, self.padded), len(self.shape)
        return x if x.shape == self.shape else call("slice", x, start=(0,) * rank, limit=self.shape, step=(1,) * rank)

    def spread(self, parameter: Node) -> Node:
        """A parameter repeated over its blocks, in the view."""
        return spread(parameter if parameter.rank == 0 else reshaped(parameter, self.parameter), self.view)

    def total(self, x: Node, like: Node) -> Node:
        """The sum over each block: the adjoint of spread."""
        axes = broadcast_axes(self.parameter, self.view)
        return reshaped(sum.plain(x, axis=axes) if axes else x, like.shape)


def _sizes(sizes: Sequence[Size]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _check_parameters(x: Type, scale: Type, zero_point: Type | None, block: tuple[Size, ...] | None) -> tuple[Size, ...]:
    if not scale.dtype.is_float:
        raise TypeRuleError(f"the scale is {scale.dtype}, no float")
    if zero_point is not None and zero_point.dtype.kind == "b":
        raise TypeRuleError("the zero point is bool; it may be an int or a float")
    blocks = Blocks(x.shape, canonical_block(x.shape, block))
    for name, parameter in (("scale", scale), ("zero_point", zero_point)):
        if parameter is None or (parameter.rank == 0 and all(c == 1 for c in blocks.counts)):  # per tensor, a scalar will do
            continue
        if len(parameter.shape) != len(blocks.counts) or not all(same(a, b) for a, b in zip(parameter.shape, blocks.counts, strict=True)):
            raise TypeRuleError(f"{name} has shape {_sizes(parameter.shape)}; blocks of {_sizes(blocks.block)} in {_sizes(x.shape)} need {_sizes(blocks.counts)}")
    return blocks.block


def _compute(*dtypes: DType | None) -> DType:
    return F64 if F64 in dtypes else F32


def _dtype_of(node: Node | None) -> DType | None:
    return None if node is None else node.dtype


def _tangent(node: Node, compute: DType) -> DType:
    """The dtype in which an operand's gradient is given: a float's own; an int passes it straight through."""
    return node.dtype if node.dtype.is_float else compute


def _scale_gradient(gradient: Node, scale: Node) -> Any:
    return DISCRETE if scale.dtype.name == "e8m0" else converted(gradient, scale.dtype)  # powers of two are not moved by a gradient


# -- dequantize --------------------------------------------------------------------------------------------------------


def _dequantize(q: Type, scale: Type, zero_point: Type | None = None, *, block: tuple[SizeLike, ...] | None = None, out_dtype: DType = F32) -> Any:
    if q.dtype.name not in STORED:
        raise TypeRuleError(f"q is {q.dtype}; it may be {' '.join(STORED)}")
    if not out_dtype.is_float:
        raise TypeRuleError(f"out_dtype={out_dtype} is no float")
    return q.with_dtype(out_dtype), {"block": _check_parameters(q, scale, zero_point, block), "out_dtype": out_dtype}


def _centred(q: Node, zero_point: Node | None, blocks: Blocks, compute: DType) -> Node:
    """q - zp, in the view."""
    whole = blocks.enter(converted(q, compute))
    return whole if zero_point is None else whole - blocks.spread(converted(zero_point, compute))


def _dequantize_value(q: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], out_dtype: DType) -> Node:
    blocks, compute = Blocks(q.shape, block), _compute(scale.dtype, _dtype_of(zero_point), out_dtype)
    y = _centred(q, zero_point, blocks, compute) * blocks.spread(converted(scale, compute))
    return converted(blocks.leave(y), out_dtype)


def _dequantize_vjp(g: Node, y: Node, q: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], out_dtype: DType) -> tuple[Any, ...]:
    # y = (q - zp) s, with q taken as a real number
    blocks, compute = Blocks(q.shape, block), _compute(scale.dtype, _dtype_of(zero_point), out_dtype)
    s, dy = converted(scale, compute), blocks.enter(converted(g, compute))
    dq = converted(blocks.leave(dy * blocks.spread(s)), _tangent(q, compute))
    ds = blocks.total(dy * _centred(q, zero_point, blocks, compute), scale)
    gradients = (dq, _scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    dzp = -(reshaped(s, zero_point.shape) * blocks.total(dy, zero_point))
    return (*gradients, converted(dzp, _tangent(zero_point, compute)))


_Q = ("int", "positive", "int")
BAD_SCALE = (
    BadSample(("X[4,6]", "f32[4,1]"), match="scale has shape [4,1]; blocks of [4,6] in [4,6] need [1,1]"),
    BadSample(("X[4,6]", "f32[4,2]"), {"block": (1, 4, 1)}, match="has 3 sizes for rank 2"),
    BadSample(("X[4,6]", "f32[4,1]"), {"block": (1, 4)}, match="need [4,2]"),
    BadSample(("X[4,6]", "f32[]"), {"block": (1, 6)}, match="scale has shape []; blocks of [1,6] in [4,6] need [4,1]"),
    BadSample(("X[4,6]", "f32[4,1]", "i8[1,1]"), {"block": (1, 6)}, match="zero_point has shape [1,1]"),
    BadSample(("X[4,6]", "f32[4,1]"), {"block": (1, 0)}, match="a block of 0 on axis 1"),
    BadSample(("X[4,6]", "i32[1,1]"), match="scale is i32, no float"),
    BadSample(("X[4,6]", "f32[1,1]", "bool[1,1]"), match="zero point is bool"),
)


def _bad(dtype: str) -> tuple[BadSample, ...]:
    return tuple(BadSample((b.operands[0].replace("X", dtype), *b.operands[1:]), b.attrs, b.match) for b in BAD_SCALE)


dequantize = Composite("dequantize", infer=_dequantize, decompose=_dequantize_value, vjp=_dequantize_vjp,
    samples=(
        Sample(("i8[N,4]", "F[1,1]"), draw=_Q), Sample(("i8[3,N]", "F[3,1]"), {"block": (1, "N")}, draw=_Q), Sample(("u8[N,4]", "F[N,1]", "u8[N,1]"), {"block": (1, 4)}, draw=_Q),
        Sample(("i4[N,8]", "F[N,2]", "i8[N,2]"), {"block": (1, 4)}, draw=_Q), Sample(("u4[5,7]", "F[3,2]", "F[3,2]"), {"block": (2, 4)}, draw=("int", "positive", "normal")),
        Sample(("i8[]", "F[]", "i32[]"), draw=_Q), Sample(("i8[2,N,3]", "F[2,N,3]"), {"block": (1, 1, 1), "out_dtype": "bf16"}, draw=_Q), Sample(("i8[N,4]", "F[]"), {"out_dtype": "f64"}, draw=_Q),
        Sample(("i8[N]", "F[(N+3)//4]"), {"block": (4,)}, draw=_Q), Sample(("i2[2,3,N,2]", "F[1,3,1,1]"), {"block": (2, 1, "N", 2)}, draw=_Q), Sample(("u2[N,4]", "F[1,4]", "u2[1,4]"), {"block": ("N", 1)}, draw=_Q),
        Sample(("f8e4m3[N,4]", "F[N,1]"), {"block": (1, 4)}, draw=("normal", "positive")), Sample(("f8e5m2[N,4]", "F[1,1]"), draw=("normal", "positive")),
    ),
    bad=(*_bad("i8"), BadSample(("f32[4]", "f32[1]"), match="q is f32"), BadSample(("i8[4]", "f32[1]"), {"out_dtype": "i8"}, match="out_dtype=i8 is no float")),
    doc="(q - zero_point) * scale, one scale and zero point per block of q (block: a size per axis; the whole shape if not given); computed in f32, or f64 "
    "where an f64 takes part, and rounded once to out_dtype; q takes its gradient straight through",
    source="Jacob et al. 2018, equation 1")  # fmt: skip

# -- quantize ----------------------------------------------------------------------------------------------------------


class _Steps(NamedTuple):
    """A quantization before its clamp, in the view: both directions compute exactly these."""

    ratio: Node  # x / s
    scale: Node
    zero: Node | None
    integer: Node  # rne(x / s) + zp
    low: Node
    high: Node

    @property
    def inside(self) -> Node:
        """Where the clamp changes nothing, bounds included."""
        return logical_and(ge(self.integer, self.low), le(self.integer, self.high))

    @property
    def clamped(self) -> Node:
        return minimum(maximum(self.integer, self.low), self.high)


def _steps(x: Node, scale: Node, zero_point: Node | None, blocks: Blocks, compute: DType, low: int, high: int) -> _Steps:
    s = blocks.spread(converted(scale, compute))
    # beyond the edge x is 1, so that a scale of 0 gives inf there and not NaN
    ratio = blocks.enter(converted(x, compute), 1.0) / s
    zero = None if zero_point is None else blocks.spread(_zero(zero_point, compute, low, high))
    integer = round(ratio) if zero is None else round(ratio) + zero
    return _Steps(ratio, s, zero, integer, full(low, integer), full(high, integer))


def _zero(zero_point: Node, compute: DType, low: int, high: int) -> Node:
    """The zero point that is used: a float one is brought to an integer of the range."""
    if not zero_point.dtype.is_float:
        return converted(zero_point, compute)
    whole = round(converted(zero_point, compute))
    return minimum(maximum(whole, full(low, whole)), full(high, whole))


def _range(dtype: DType, quant_min: int | None, quant_max: int | None) -> dict[str, Any]:
    if dtype.name not in TARGETS:
        raise TypeRuleError(f"dtype={dtype}; quantized values may be {' '.join(TARGETS)}")
    lowest, highest = dtype.range
    low, high = lowest if quant_min is None else quant_min, highest if quant_max is None else quant_max
    if not lowest <= low <= high <= highest:
        raise TypeRuleError(f"quant_min={low}, quant_max={high} are no range within {dtype}, which holds {lowest} to {highest}")
    return {"dtype": dtype, "quant_min": low, "quant_max": high}


def _quantize(x: Type, scale: Type, zero_point: Type | None = None, *, block: tuple[SizeLike, ...] | None = None, dtype: DType = DTYPES["i8"], quant_min: int | None = None, quant_max: int | None = None) -> Any:
    if not x.dtype.is_float:
        raise TypeRuleError(f"{x.dtype} is no float; write a cast")
    return x.with_dtype(dtype), {"block": _check_parameters(x, scale, zero_point, block), **_range(dtype, quant_min, quant_max)}


def _quantize_value(x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int) -> Node:
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    return converted(blocks.leave(_steps(x, scale, zero_point, blocks, compute, quant_min, quant_max).clamped), dtype)


def _quantize_vjp(g: Node, y: Node, x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int) -> tuple[Any, ...]:
    # inside the range q passes for x/s + zp, outside it is constant
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    steps = _steps(x, scale, zero_point, blocks, compute, quant_min, quant_max)
    dq = blocks.enter(converted(g, compute))
    none, slope = zeros_like(dq), dq / steps.scale
    dx = blocks.leave(where(steps.inside, slope, none))
    ds = -blocks.total(where(steps.inside, slope * steps.ratio, none), scale)
    gradients = (converted(dx, x.dtype), _scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    return (*gradients, converted(blocks.total(where(steps.inside, dq, none), zero_point), _tangent(zero_point, compute)))


def _quantize_surrogate(x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int) -> Node:
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    steps = _steps(x, scale, zero_point, blocks, compute, quant_min, quant_max)
    inside = steps.ratio + stop_gradient(round(steps.ratio) - steps.ratio)
    if zero_point is not None:
        inside = inside + blocks.spread(_moving(converted(zero_point, compute), _zero(zero_point, compute, quant_min, quant_max)))
    return blocks.leave(where(stop_gradient(steps.inside), inside, stop_gradient(steps.clamped)))


def _moving(moving: Node, value: Node, factor: float = 1.0) -> Node:
    """``value``, moving ``factor`` times as fast as ``moving``."""
    difference = moving - stop_gradient(moving)
    return stop_gradient(value) + (difference if factor == 1.0 else difference * factor)


_X = ("normal", "positive", "int")
quantize = Composite("quantize", infer=_quantize, decompose=_quantize_value, vjp=_quantize_vjp, surrogate=_quantize_surrogate,
    samples=(
        Sample(("F[N,4]", "F[1,1]"), draw=_X), Sample(("F[3,N]", "F[3,1]", "i8[3,1]"), {"block": (1, "N")}, draw=_X), Sample(("F[N,4]", "F[N,1]", "F[N,1]"), {"block": (1, 4), "dtype": "u8"}, draw=("normal", "positive", "positive")),
        Sample(("F[N,8]", "F[N,2]"), {"block": (1, 4), "dtype": "i4"}, draw=_X), Sample(("F[5,7]", "F[3,2]", "u4[3,2]"), {"block": (2, 4), "dtype": "u4"}, draw=_X), Sample(("F[]", "F[]", "i32[]"), draw=_X),
        Sample(("F[N]", "F[(N+3)//4]"), {"block": (4,), "quant_min": -1, "quant_max": 1}, draw=_X), Sample(("F[2,N,3]", "f32[1,1,3]"), {"block": (2, "N", 1), "dtype": "i2"}, draw=_X),
    ),
    bad=(*_bad("f32"), BadSample(("i8[4]", "f32[1]"), match="i8 is no float"), BadSample(("f32[4]", "f32[1]"), {"dtype": "i64"}, match="dtype=i64; quantized values may be"),
         BadSample(("f32[4]", "f32[1]"), {"quant_max": 255}, match="quant_max=255 are no range within i8, which holds -128 to 127"), BadSample(("f32[4]", "f32[1]"), {"quant_min": 3, "quant_max": 2}, match="no range")),
    doc="clamp(round(x / scale) + zero_point, quant_min, quant_max) as dtype, half to even, one scale and zero point per block of x; a float zero point is rounded "
    "and clamped first; NaN gives 0; the gradient passes straight through where nothing is clamped",
    source="Jacob et al. 2018, equation 12")  # fmt: skip

# -- fake_quantize -----------------------------------------------------------------------------------------------------


def _fake_quantize(x: Type, scale: Type, zero_point: Type | None = None, *, block: tuple[SizeLike, ...] | None = None, dtype: DType = DTYPES["i8"], quant_min: int | None = None, quant_max: int | None = None, grad_factor: float = 1.0) -> Any:
    type_, attrs = _quantize(x, scale, zero_point, block=block, dtype=dtype, quant_min=quant_min, quant_max=quant_max)
    return type_.with_dtype(x.dtype), {**attrs, "grad_factor": grad_factor}


def _fake_value(x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int, grad_factor: float) -> Node:
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    steps = _steps(x, scale, zero_point, blocks, compute, quant_min, quant_max)
    return converted(blocks.leave(_above_zero(steps) * steps.scale), x.dtype)


def _above_zero(steps: _Steps) -> Node:
    """q - zp."""
    return steps.clamped if steps.zero is None else steps.clamped - steps.zero


def _fake_vjp(g: Node, y: Node, x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int, grad_factor: float) -> tuple[Any, ...]:
    # inside the range y passes for x, and moves with s by its rounding error; outside it is (bound - zp) s
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    steps = _steps(x, scale, zero_point, blocks, compute, quant_min, quant_max)
    narrow = blocks.enter(g)
    dx = blocks.leave(where(steps.inside, narrow, zeros_like(narrow)))
    dy = converted(narrow, compute)
    none = zeros_like(dy)
    factor = (lambda total: total) if grad_factor == 1.0 else (lambda total: total * grad_factor)
    # one difference per element: two sums would cancel
    ds = factor(blocks.total(dy * (_above_zero(steps) - where(steps.inside, steps.ratio, none)), scale))
    gradients = (dx, _scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    outside = blocks.total(where(steps.inside, none, dy), zero_point)
    dzp = factor(-(reshaped(converted(scale, compute), zero_point.shape) * outside))
    return (*gradients, converted(dzp, _tangent(zero_point, compute)))


def _fake_surrogate(x: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], dtype: DType, quant_min: int, quant_max: int, grad_factor: float) -> Node:
    blocks, compute = Blocks(x.shape, block), _compute(x.dtype, scale.dtype, _dtype_of(zero_point))
    steps = _steps(x, scale, zero_point, blocks, compute, quant_min, quant_max)
    wide = converted(scale, compute)
    s = blocks.spread(_moving(wide, wide, grad_factor))
    # y = q s - zp s: inside the range q s moves as x does
    bound = stop_gradient(steps.clamped)
    if zero_point is not None:
        bound = bound - blocks.spread(_moving(converted(zero_point, compute), _zero(zero_point, compute, quant_min, quant_max), grad_factor))
    inside = blocks.enter(converted(x, compute), 1.0) + stop_gradient(round(steps.ratio) - steps.ratio) * s
    return converted(blocks.leave(where(stop_gradient(steps.inside), inside, bound * s)), x.dtype)


fake_quantize = Composite("fake_quantize", infer=_fake_quantize, decompose=_fake_value, vjp=_fake_vjp, surrogate=_fake_surrogate,
    samples=(
        *(Sample(s.operands, s.attrs, s.draw) for s in quantize.samples),
        Sample(("F[N,4]", "F[N,1]", "F[N,1]"), {"block": (1, 4), "dtype": "u4", "grad_factor": 0.5}, draw=("normal", "positive", "positive")),
    ),
    bad=quantize.bad,
    doc="dequantize(quantize(x)) in x's dtype, whose gradients are those of the two together; grad_factor multiplies the gradients of scale and zero point (LSQ); NaN stays",
    source="Esser et al. 2020 (LSQ); torch.fake_quantize_per_tensor_affine, torch._fake_quantize_learnable_per_tensor_affine")  # fmt: skip
