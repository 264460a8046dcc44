"""Quantization with a block shape: dequantize, quantize, fake_quantize.

The block shape expresses every granularity: a parameter (scale, zero point) has one value per block, hence the shape
ceil(shape / block).  Per tensor, the block is the whole shape; per channel, it is 1 on the channel axis and the whole
size on the others; for groups of 32 it is (1, 32).  A scale or zero point is learnable if ``wrt`` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, SizeLike
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Sample
from ...ir.types import DTYPES, F32, DType, Type
from ...process.forks import cached_property
from ..elementwise.pointwise import LIMITS, ge, le, logical_and, maximum, minimum, round, stop_gradient, where
from ..rules import converted, full, reshaped, zeros_like
from .blocks import Blocks, check_parameters, compute_dtype, replace_axis_of_blocks, scale_gradient, tangent

STORED = ("i2", "i4", "i8", "i16", "i32", "u2", "u4", "u8", "u16", "u32", "f8e4m3", "f8e5m2", "f4e2m1")
"""The operand dtypes of dequantize."""
TARGETS = ("i2", "i4", "i8", "i16", "u2", "u4", "u8", "u16", "f8e4m3", "f8e5m2", "f4e2m1")
"""The result dtypes of quantize; f32 holds every value of them exactly."""
LARGEST = {**LIMITS, "f4e2m1": 6.0}
"""The largest finite value of each narrow float."""


def _dtype_of(node: Node | None) -> DType | None:
    return None if node is None else node.dtype


# -- dequantize --------------------------------------------------------------------------------------------------------


def _dequantize(
    q: Type,
    scale: Type,
    zero_point: Type | None = None,
    *,
    block: tuple[SizeLike, ...] | None = None,
    out_dtype: DType = F32,
) -> Any:
    if q.dtype.name not in STORED:
        raise TypeRuleError(f"q is {q.dtype}; it may be {' '.join(STORED)}")
    if not out_dtype.is_float:
        raise TypeRuleError(f"out_dtype={out_dtype} is no float")
    return q.with_dtype(out_dtype), {"block": check_parameters(q, scale, zero_point, block), "out_dtype": out_dtype}


def _centred(q: Node, zero_point: Node | None, blocks: Blocks, compute: DType) -> Node:
    """q - zp, in the blocked view."""
    whole = blocks.enter(converted(q, compute))
    return whole if zero_point is None else whole - blocks.spread(converted(zero_point, compute))


def _dequantize_value(
    q: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], out_dtype: DType
) -> Node:
    blocks, compute = Blocks(q.shape, block), compute_dtype(scale.dtype, _dtype_of(zero_point), out_dtype)
    y = _centred(q, zero_point, blocks, compute) * blocks.spread(converted(scale, compute))
    return converted(blocks.leave(y), out_dtype)


def _dequantize_vjp(
    g: Node, y: Node, q: Node, scale: Node, zero_point: Node | None = None, *, block: tuple[Size, ...], out_dtype: DType
) -> tuple[Any, ...]:
    # y = (q - zp) s with q treated as real: dq = g s, ds = sum of g (q - zp) over each block, dzp = -s times the sum of
    # g over each block
    blocks, compute = Blocks(q.shape, block), compute_dtype(scale.dtype, _dtype_of(zero_point), out_dtype)
    s, dy = converted(scale, compute), blocks.enter(converted(g, compute))
    dq = converted(blocks.leave(dy * blocks.spread(s)), tangent(q, compute))
    ds = blocks.total(dy * _centred(q, zero_point, blocks, compute), scale)
    gradients = (dq, scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    dzp = -(reshaped(s, zero_point.shape) * blocks.total(dy, zero_point))
    return (*gradients, converted(dzp, tangent(zero_point, compute)))


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


dequantize = Composite(
    "dequantize",
    infer=_dequantize,
    decompose=_dequantize_value,
    replace_axis=replace_axis_of_blocks,
    vjp=_dequantize_vjp,
    samples=(
        Sample(("i8[N,4]", "F[1,1]"), draw=_Q),
        Sample(("i8[3,N]", "F[3,1]"), {"block": (1, "N")}, draw=_Q),
        Sample(("u8[N,4]", "F[N,1]", "u8[N,1]"), {"block": (1, 4)}, draw=_Q),
        Sample(("i4[N,8]", "F[N,2]", "i8[N,2]"), {"block": (1, 4)}, draw=_Q),
        Sample(("u4[5,7]", "F[3,2]", "F[3,2]"), {"block": (2, 4)}, draw=("int", "positive", "normal")),
        Sample(("i8[]", "F[]", "i32[]"), draw=_Q),
        Sample(("i8[2,N,3]", "F[2,N,3]"), {"block": (1, 1, 1), "out_dtype": "bf16"}, draw=_Q),
        Sample(("i8[N,4]", "F[]"), {"out_dtype": "f64"}, draw=_Q),
        Sample(("i8[N]", "F[(N+3)//4]"), {"block": (4,)}, draw=_Q),
        Sample(("i2[2,3,N,2]", "F[1,3,1,1]"), {"block": (2, 1, "N", 2)}, draw=_Q),
        Sample(("u2[N,4]", "F[1,4]", "u2[1,4]"), {"block": ("N", 1)}, draw=_Q),
        Sample(("f8e4m3[N,4]", "F[N,1]"), {"block": (1, 4)}, draw=("normal", "positive")),
        Sample(("f8e5m2[N,4]", "F[1,1]"), draw=("normal", "positive")),
        Sample(("f4e2m1[N,8]", "e8m0[N,2]"), {"block": (1, 4)}, draw=("normal", "positive")),
        Sample(("f4e2m1[N,8]", "F[N,2]"), {"block": (1, 4)}, draw=("normal", "positive")),
        Sample(("f8e4m3[N,4]", "f8e4m3[N,1]"), {"block": (1, 4)}, draw=("normal", "positive")),
    ),
    bad=(
        *_bad("i8"),
        BadSample(("f32[4]", "f32[1]"), match="q is f32"),
        BadSample(("i8[4]", "f32[1]"), {"out_dtype": "i8"}, match="out_dtype=i8 is no float"),
    ),
    doc=(
        "(q - zero_point) * scale, with one scale and zero point per block of q "
        "(block: a size per axis; by default the whole shape, for which the parameters may be scalars); computed in"
        " f32, or in f64 if a parameter or out_dtype is f64, and rounded once to out_dtype; q's gradient is"
        " straight-through: scale times the cotangent"
    ),
    source="Jacob et al. 2018, equation 1",
)

# -- quantize ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Steps:
    """The intermediate values of one quantization in its compute dtype, shared by value and vjp; those of x's shape are
    in the blocked view.
    """

    x: Node
    parameter: Node
    zero_point: Node | None
    block: tuple[Size, ...]
    dtype: DType
    quant_min: int | None
    quant_max: int | None
    grad_factor: float = 1.0

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.x.shape, self.block)

    @cached_property
    def compute(self) -> DType:
        return compute_dtype(self.x.dtype, self.parameter.dtype, _dtype_of(self.zero_point))

    @cached_property
    def scale(self) -> Node:
        return self.blocks.spread(converted(self.parameter, self.compute))

    @cached_property
    def wide(self) -> Node:
        # x is padded with 1, so that a scale of 0 gives inf in the padding and not NaN
        return self.blocks.enter(converted(self.x, self.compute), 1.0)

    @cached_property
    def ratio(self) -> Node:
        return self.wide / self.scale

    @cached_property
    def whole_zero(self) -> Node | None:
        """The zero point per block as it is used: a float one is rounded and clamped to the range."""
        if self.zero_point is None or not self.zero_point.dtype.is_float:
            return None if self.zero_point is None else converted(self.zero_point, self.compute)
        return self.clamp(round(converted(self.zero_point, self.compute)))

    @cached_property
    def zero(self) -> Node | None:
        return None if self.whole_zero is None else self.blocks.spread(self.whole_zero)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        if self.quant_min is None or self.quant_max is None:
            return -LARGEST[self.dtype.name], LARGEST[self.dtype.name]
        return self.quant_min, self.quant_max

    @cached_property
    def before(self) -> Node:
        """The value before clamping, from which the gradient's mask is computed: round(x / s) + zp, or x / s for a
        float dtype.
        """
        if self.dtype.is_float:
            return self.ratio
        return round(self.ratio) if self.zero is None else round(self.ratio) + self.zero

    @cached_property
    def inside(self) -> Node:
        """Mask of the values within the closed bounds of the clamp."""
        low, high = (full(bound, self.before) for bound in self.bounds)
        return logical_and(ge(self.before, low), le(self.before, high))

    @cached_property
    def clamped(self) -> Node:
        value = self.clamp(self.before)
        return converted(converted(value, self.dtype), self.compute) if self.dtype.is_float else value

    @cached_property
    def above_zero(self) -> Node:
        """q - zp, in the blocked view."""
        return self.clamped if self.zero is None else self.clamped - self.zero

    def clamp(self, x: Node) -> Node:
        low, high = (full(bound, x) for bound in self.bounds)
        return minimum(maximum(x, low), high)

    # for the surrogates, the functions whose derivatives the vjps are: stop_gradient marks what they treat as constant

    @cached_property
    def rounding(self) -> Node:
        return stop_gradient((self.clamped if self.dtype.is_float else round(self.ratio)) - self.ratio)

    def moving(self, operand: Node, value: Node) -> Node:
        """``value`` per block in the blocked view, with ``grad_factor`` times the derivative of ``operand``."""
        wide = converted(operand, self.compute)
        return self.blocks.spread(stop_gradient(value) + self.slowed(wide - stop_gradient(wide)))

    def slowed(self, x: Node) -> Node:
        return x if self.grad_factor == 1.0 else x * self.grad_factor


def _range(dtype: DType, quant_min: int | None, quant_max: int | None) -> dict[str, Any]:
    if dtype.name not in TARGETS:
        raise TypeRuleError(f"dtype={dtype}; quantized values may be {' '.join(TARGETS)}")
    if dtype.is_float:
        if quant_min is not None or quant_max is not None:
            raise TypeRuleError(
                f"quant_min and quant_max are for integers; {dtype} saturates at {LARGEST[dtype.name]:g}"
            )
        return {"dtype": dtype, "quant_min": None, "quant_max": None}
    lowest, highest = dtype.range
    low, high = lowest if quant_min is None else quant_min, highest if quant_max is None else quant_max
    if not lowest <= low <= high <= highest:
        raise TypeRuleError(
            f"quant_min={low}, quant_max={high} are no range within {dtype}, which holds {lowest} to {highest}"
        )
    return {"dtype": dtype, "quant_min": low, "quant_max": high}


def _quantize(
    x: Type,
    scale: Type,
    zero_point: Type | None = None,
    *,
    block: tuple[SizeLike, ...] | None = None,
    dtype: DType = DTYPES["i8"],
    quant_min: int | None = None,
    quant_max: int | None = None,
) -> Any:
    if not x.dtype.is_float:
        raise TypeRuleError(f"{x.dtype} is no float; write a cast")
    if dtype.is_float and zero_point is not None:
        raise TypeRuleError(f"{dtype} has no zero point")
    return x.with_dtype(dtype), {
        "block": check_parameters(x, scale, zero_point, block),
        **_range(dtype, quant_min, quant_max),
    }


def _quantize_value(x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any) -> Node:
    steps = _Steps(x, scale, zero_point, **attrs)
    return converted(steps.blocks.leave(steps.clamped), steps.dtype)


def _quantize_vjp(
    g: Node, y: Node, x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any
) -> tuple[Any, ...]:
    # with m = [qmin <= round(x/s) + zp <= qmax]: dx = g m / s, ds = sum of -g m x / s^2 over each block, dzp = sum of
    # g m over each block
    steps = _Steps(x, scale, zero_point, **attrs)
    blocks, inside = steps.blocks, steps.inside
    dq = blocks.enter(converted(g, steps.compute))
    none, slope = zeros_like(dq), dq / steps.scale
    dx = blocks.leave(where(inside, slope, none))
    ds = -blocks.total(where(inside, slope * steps.ratio, none), scale)
    gradients = (converted(dx, x.dtype), scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    dzp = blocks.total(where(inside, dq, none), zero_point)
    return (*gradients, converted(dzp, tangent(zero_point, steps.compute)))


def _quantize_surrogate(x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any) -> Node:
    """As a float: x/s + zp plus a constant rounding error in range, the constant bound outside."""
    steps = _Steps(x, scale, zero_point, **attrs)
    q = steps.ratio + steps.rounding
    if zero_point is not None and steps.whole_zero is not None:
        q = q + steps.moving(zero_point, steps.whole_zero)
    return steps.blocks.leave(where(stop_gradient(steps.inside), q, stop_gradient(steps.clamped)))


_X = ("normal", "positive", "int")
quantize = Composite(
    "quantize",
    infer=_quantize,
    decompose=_quantize_value,
    replace_axis=replace_axis_of_blocks,
    vjp=_quantize_vjp,
    surrogate=_quantize_surrogate,
    samples=(
        Sample(("F[N,4]", "F[1,1]"), draw=_X),
        Sample(("F[3,N]", "F[3,1]", "i8[3,1]"), {"block": (1, "N")}, draw=_X),
        Sample(
            ("F[N,4]", "F[N,1]", "F[N,1]"), {"block": (1, 4), "dtype": "u8"}, draw=("normal", "positive", "positive")
        ),
        Sample(("F[N,8]", "F[N,2]"), {"block": (1, 4), "dtype": "i4"}, draw=_X),
        Sample(("F[5,7]", "F[3,2]", "u4[3,2]"), {"block": (2, 4), "dtype": "u4"}, draw=_X),
        Sample(("F[]", "F[]", "i32[]"), draw=_X),
        Sample(("F[N]", "F[(N+3)//4]"), {"block": (4,), "quant_min": -1, "quant_max": 1}, draw=_X),
        Sample(("F[2,N,3]", "f32[1,1,3]"), {"block": (2, "N", 1), "dtype": "i2"}, draw=_X),
        Sample(("F[N,8]", "F[N,2]"), {"block": (1, 4), "dtype": "f4e2m1"}, draw=_X),
        Sample(("F[N,8]", "e8m0[N,2]"), {"block": (1, 4), "dtype": "f8e4m3"}, draw=_X),
        Sample(("F[N]", "F[]"), {"dtype": "f8e5m2"}, draw=_X),
    ),
    bad=(
        *_bad("f32"),
        BadSample(("i8[4]", "f32[1]"), match="i8 is no float"),
        BadSample(("f32[4]", "f32[1]"), {"dtype": "i64"}, match="dtype=i64; quantized values may be"),
        BadSample(
            ("f32[4]", "f32[1]"),
            {"quant_max": 255},
            match="quant_max=255 are no range within i8, which holds -128 to 127",
        ),
        BadSample(("f32[4]", "f32[1]"), {"quant_min": 3, "quant_max": 2}, match="no range"),
        BadSample(("f32[4]", "f32[1]"), {"dtype": "f4e2m1", "quant_max": 2}, match="f4e2m1 saturates at 6"),
        BadSample(("f32[4]", "f32[1]", "f32[1]"), {"dtype": "f8e4m3"}, match="f8e4m3 has no zero point"),
    ),
    doc=(
        "clamp(round(x / scale) + zero_point, quant_min, quant_max) as dtype, rounding half to even, with one scale and"
        " zero point per block of x (block: as for dequantize); a float zero point is rounded and clamped first; a NaN"
        " in x gives 0; the gradient is straight-through where nothing is clamped, else 0. With an f8 or f4e2m1 dtype:"
        " x / scale, saturated and rounded, without a zero point; f8 keeps NaN. A scale of 0 gives the bound with x's"
        " sign (0/0 counts as NaN), an infinite scale gives 0, a NaN scale counts as a NaN in x, a negative scale"
        " quantizes -x by -scale"
    ),
    source="Jacob et al. 2018, equation 12; OCP Microscaling Formats v1.0",
)

# -- fake_quantize -----------------------------------------------------------------------------------------------------


def _fake_quantize(
    x: Type,
    scale: Type,
    zero_point: Type | None = None,
    *,
    block: tuple[SizeLike, ...] | None = None,
    dtype: DType = DTYPES["i8"],
    quant_min: int | None = None,
    quant_max: int | None = None,
    grad_factor: float = 1.0,
) -> Any:
    type_, attrs = _quantize(x, scale, zero_point, block=block, dtype=dtype, quant_min=quant_min, quant_max=quant_max)
    return type_.with_dtype(x.dtype), {**attrs, "grad_factor": grad_factor}


def _fake_value(x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any) -> Node:
    steps = _Steps(x, scale, zero_point, **attrs)
    return converted(steps.blocks.leave(steps.above_zero * steps.scale), x.dtype)


def _fake_vjp(g: Node, y: Node, x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any) -> tuple[Any, ...]:
    # with m = [qmin <= round(x/s) + zp <= qmax]: dx = g m, ds = sum of g ((q - zp) - m x/s) over each block, dzp = -s
    # times the sum of g (1 - m) over each block; ds and dzp times grad_factor
    steps = _Steps(x, scale, zero_point, **attrs)
    blocks, inside = steps.blocks, steps.inside
    narrow = blocks.enter(g)
    dx = blocks.leave(where(inside, narrow, zeros_like(narrow)))
    dy = converted(narrow, steps.compute)
    none = zeros_like(dy)
    # the difference is taken per element: the difference of two sums would cancel
    ds = steps.slowed(blocks.total(dy * (steps.above_zero - where(inside, steps.ratio, none)), scale))
    gradients = (dx, scale_gradient(ds, scale))
    if zero_point is None:
        return gradients
    outside = blocks.total(where(inside, none, dy), zero_point)
    dzp = steps.slowed(-(reshaped(converted(scale, steps.compute), zero_point.shape) * outside))
    return (*gradients, converted(dzp, tangent(zero_point, steps.compute)))


def _fake_surrogate(x: Node, scale: Node, zero_point: Node | None = None, **attrs: Any) -> Node:
    """x + (rounding error) s in range, (bound - zp) s outside, with rounding error and bound constant."""
    steps = _Steps(x, scale, zero_point, **attrs)
    s, outside = steps.moving(scale, converted(scale, steps.compute)), stop_gradient(steps.clamped)
    if zero_point is not None and steps.whole_zero is not None:
        outside = outside - steps.moving(zero_point, steps.whole_zero)
    y = where(stop_gradient(steps.inside), steps.wide + steps.rounding * s, outside * s)
    return converted(steps.blocks.leave(y), x.dtype)


fake_quantize = Composite(
    "fake_quantize",
    infer=_fake_quantize,
    decompose=_fake_value,
    replace_axis=replace_axis_of_blocks,
    vjp=_fake_vjp,
    surrogate=_fake_surrogate,
    samples=(
        *(Sample(s.operands, s.attrs, s.draw) for s in quantize.samples),
        Sample(
            ("F[N,4]", "F[N,1]", "F[N,1]"),
            {"block": (1, 4), "dtype": "u4", "grad_factor": 0.5},
            draw=("normal", "positive", "positive"),
        ),
    ),
    bad=quantize.bad,
    doc=(
        "dequantize(quantize(x)) in x's dtype, with the gradients of that composition; grad_factor "
        "multiplies the gradients of scale and zero point (LSQ); propagates NaN"
    ),
    source="Esser et al. 2020 (LSQ); torch._fake_quantize_learnable_per_tensor_affine",
)
