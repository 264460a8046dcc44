"""Block partition of a shape, as block-wise quantization uses it: one scale and zero point per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, ceildiv, known_nonnegative, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, AxisReplacement
from ...ir.types import F32, F64, DType, Type
from ...process.forks import cached_property
from ..reductions.reduce import amax, sum
from ..rules import converted, leading, reshaped, spread
from ..shapes.movement import broadcast_axes


def text_of(sizes: Sequence[Size]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def canonical_block(shape: Sequence[Size], block: Sequence[Size] | None) -> tuple[Size, ...]:
    """One block size per axis; a size that covers a whole axis becomes that axis's size, and None covers all."""
    if block is None:
        return tuple(shape)
    if len(block) != len(shape):
        raise TypeRuleError(f"block {text_of(block)} has {len(block)} sizes for rank {len(shape)}")
    answer: list[Size] = []
    for axis, (n, b) in enumerate(zip(shape, block, strict=True)):
        if isinstance(b, int) and b < 1 and n != b:
            raise TypeRuleError(f"a block of {b} on axis {axis}: 1 at least")
        covers = b != 1 and n != 0 and (same(b, n) or known_nonnegative(b - n))
        answer.append(n if covers else b)
    return tuple(answer)


@dataclass(frozen=True)
class Blocks:
    """A shape partitioned into blocks, and its blocked view, in which blocks are axes of their own.

    An axis whose block is 1 or the whole axis stays one axis of the blocked view; any other axis becomes two:
    [number of blocks, block size].
    """

    shape: tuple[Size, ...]
    block: tuple[Size, ...]

    @cached_property
    def counts(self) -> tuple[Size, ...]:
        """The shape of a parameter: ceil(shape / block)."""
        return tuple(
            n if b == 1 else 1 if b == n else ceildiv(n, b) for n, b in zip(self.shape, self.block, strict=True)
        )

    def fit(self, parameter: Sequence[Size]) -> bool:
        """Whether a parameter has one value per block; for a single block it may be a scalar."""
        if not parameter and all(c == 1 for c in self.counts):
            return True
        return len(parameter) == len(self.counts) and all(map(same, parameter, self.counts))

    @cached_property
    def split(self) -> tuple[bool, ...]:
        return tuple(b != 1 and b != n for n, b in zip(self.shape, self.block, strict=True))

    @cached_property
    def view(self) -> tuple[Size, ...]:
        """The shape of the blocked view."""
        return self._axes(lambda n, c, b: (c, b), lambda n, c: n)

    @cached_property
    def parameter(self) -> tuple[Size, ...]:
        """A parameter's shape in the blocked view: 1 along each block."""
        return self._axes(lambda n, c, b: (c, 1), lambda n, c: c)

    def _axes(self, two: Any, one: Any) -> tuple[Size, ...]:
        answer: list[Size] = []
        for n, c, b, split in zip(self.shape, self.counts, self.block, self.split, strict=True):
            answer += two(n, c, b) if split else (one(n, c),)
        return tuple(answer)

    @property
    def padded(self) -> tuple[Size, ...]:
        return tuple(
            c * b if s else n for n, c, b, s in zip(self.shape, self.counts, self.block, self.split, strict=True)
        )

    def enter(self, x: Node, fill: float = 0.0) -> Node:
        """A value of ``shape`` in the blocked view; the elements of a partial last block are padded with ``fill``."""
        if not any(self.split):
            return x
        return reshaped(
            call("pad", x, tuple((0, m - n) for n, m in zip(self.shape, self.padded, strict=True)), fill), self.view
        )

    def leave(self, x: Node) -> Node:
        """The inverse of ``enter``: a value of the blocked view in ``shape``, without the padding."""
        if not any(self.split):
            return x
        return leading(reshaped(x, self.padded), self.shape)

    def spread(self, parameter: Node) -> Node:
        """A parameter broadcast over its blocks, in the blocked view."""
        return spread(parameter if parameter.rank == 0 else reshaped(parameter, self.parameter), self.view)

    def total(self, x: Node, like: Node) -> Node:
        """The sum over each block, in the shape of ``like``: the adjoint of ``spread``."""
        axes = broadcast_axes(self.parameter, self.view)
        return reshaped(sum.plain(x, axis=axes) if axes else x, like.shape)

    def largest(self, x: Node) -> Node:
        """The maximum of each block of values >= 0, in a parameter's shape; 0 for an empty block."""
        axes = broadcast_axes(self.parameter, self.view)
        extreme = amax.plain(x, axis=axes, empty="infinite") if axes else x
        return reshaped(call("maximum", extreme, 0.0), self.counts)


# -- parameters --------------------------------------------------------------------------------------------------------


def check_parameters(x: Type, scale: Type, zero_point: Type | None, block: tuple[Size, ...] | None) -> tuple[Size, ...]:
    """The canonical block shape; TypeRuleError if a parameter's dtype or shape does not fit it."""
    if not scale.dtype.is_float:
        raise TypeRuleError(f"the scale is {scale.dtype}, no float")
    if zero_point is not None and zero_point.dtype.kind == "b":
        raise TypeRuleError("the zero point is bool; it may be an int or a float")
    blocks = Blocks(x.shape, canonical_block(x.shape, block))
    for name, parameter in (("scale", scale), ("zero_point", zero_point)):
        if parameter is None or blocks.fit(parameter.shape):
            continue
        blocked = f"blocks of {text_of(blocks.block)} in {text_of(x.shape)}"
        raise TypeRuleError(f"{name} has shape {text_of(parameter.shape)}; {blocked} need {text_of(blocks.counts)}")
    return blocks.block


def compute_dtype(*dtypes: DType | None) -> DType:
    """The dtype a quantization computes in: f64 if any of ``dtypes`` is f64, else f32."""
    return F64 if F64 in dtypes else F32


def tangent(node: Node, compute: DType) -> DType:
    """The dtype of an operand's gradient: its own for a float, ``compute`` for a quantized value, which passes the
    gradient straight through.
    """
    return node.dtype if node.dtype.has_tangent else compute


def scale_gradient(gradient: Node, scale: Node) -> Any:
    """A scale's vjp entry; an e8m0 scale (a power of two) has no gradient."""
    return DISCRETE if scale.dtype.name == "e8m0" else converted(gradient, tangent(scale, gradient.dtype))


def replace_axis_of_blocks(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    """Where the block is 1 along the axis, the parameters' axis is replaced too; where it is the whole axis, the
    parameters have size 1 there.
    """
    block, whole = node.attrs["block"], node.shape[axis]
    if block[axis] not in (1, whole):
        return None
    alone = block[axis] == 1

    def parameter(shape: tuple[Size, ...]) -> int | tuple[Size, ...]:
        return axis if alone and shape else (*shape[:axis], *(1,) * len(sizes), *shape[axis + 1 :]) if shape else ()

    operands = (axis, *(parameter(o.shape) for o in node.operands[1:]))
    return operands, {
        **node.attrs,
        "block": (*block[:axis], *((1,) * len(sizes) if alone else sizes), *block[axis + 1 :]),
    }
