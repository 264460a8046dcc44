"""Convolutions on a GPU as calls of a library (cuDNN): what it is asked, and copies of what it cannot read as it lies.

The library reads and writes arrays that lie packed, channels first or channels last, and each of the three as it does.
A convolution along one axis is one along two, the first of which has one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np

from ...errors import Unsupported
from ...ir.dims import same
from ...ir.kernel import Call, Program
from ...ir.node import REGISTRY
from ...ir.statement import Operand
from .actions import Action, Convolution, Launch, Plan, Strided
from .products import copying, copying_texts, end_of, gate, gate_room, gate_texts

Array = np.ndarray[Any, Any]
Computed = Literal["image", "filter", "response"]
COMPUTED: Mapping[str, Computed] = {
    "convolution_response": "response",
    "convolution_image": "image",
    "convolution_filter": "filter",
}
"""What each library op gives; it reads the other two."""
SPATIAL = 2
"""Axes beside those of images and channels that the library asks for at least."""
_READS: Mapping[str, tuple[Computed, Computed]] = {
    "convolution_response": ("image", "filter"),
    "convolution_image": ("response", "filter"),
    "convolution_filter": ("response", "image"),
}


@dataclass(frozen=True)
class _Planned:
    """How a convolution is computed.

    :param before: the launches that make what it reads.  :param scratch: bytes of scratch memory that these, and the
        output of a gated one, need.
    """

    convolution: Convolution
    before: tuple[Launch, ...]
    scratch: int


def _planned(plan: Plan, call: Call, number: int) -> _Planned:
    """
    :raises Unsupported: a plan of kernels of ours alone was asked for.
    """
    if plan.own_products:
        raise Unsupported(
            f"{call.name} is a call of cuDNN, and no library is to be called: compile with convolutions='windows'"
        )
    operands = [plan.view(call, operand, axes) for operand, axes in zip(call.args, call.views, strict=True)]
    asked = _asked(call, dict(zip(_READS[call.op], operands, strict=True)), plan.result(call), plan.site(number))
    scratch = gate_room(plan, asked)
    before: list[Launch] = []
    for name in _READS[call.op]:
        operand: Strided = getattr(asked, name)
        if packed_order(operand) is not None:
            continue
        steps = _packed_steps(operand.shape, tuple(range(len(operand.shape))))
        packed = Strided(plan.space(scratch, prod(operand.shape), operand.part.dtype), operand.shape, steps)
        launch = copying(operand, operand.shape, packed.part, plan.flag, asked.site)
        if launch is None:  # eight axes at most are copied, and a convolution has five
            raise Unsupported(f"{call.name}: {name} has more axes than a copy takes")
        before.append(launch)
        scratch = end_of(plan, launch)
        given: dict[str, Any] = {name: packed}
        asked = replace(asked, **given)
    return _Planned(asked, tuple(before), scratch)


def _asked(call: Call, given: Mapping[str, Strided], out: Strided, site: int) -> Convolution:
    attrs = dict(call.attrs)
    parts = {name: _widened(x) for name, x in {**given, COMPUTED[call.op]: out}.items()}
    more = SPATIAL - len(attrs["stride"])
    stride, dilation = ((1,) * more + tuple(attrs[name]) for name in ("stride", "dilation"))
    before = (0,) * more + tuple(low for low, _ in attrs["padding"])
    image, filter_, response = (parts[name].shape[2:] for name in ("image", "filter", "response"))
    after = tuple(  # the elements behind the last window are none of its padding
        max(0, (o - 1) * s + d * (k - 1) + 1 - n - low)
        for o, s, d, k, n, low in zip(response, stride, dilation, filter_, image, before, strict=True)
    )
    return Convolution(
        call.op, COMPUTED[call.op], **parts, stride=stride, dilation=dilation, before=before, after=after,
        groups=attrs["groups"], site=site,
    )  # fmt: skip


def _widened(x: Strided) -> Strided:
    """An array with as many spatial axes as the library asks for, those of one element before its own, and the strides
    of these as they are in a packed array.
    """
    more = SPATIAL - (len(x.shape) - 2)
    if more > 0:
        x = replace(
            x, shape=(*x.shape[:2], *(1,) * more, *x.shape[2:]), strides=(*x.strides[:2], *(0,) * more, *x.strides[2:])
        )
    order = packed_order(x)
    return x if order is None else replace(x, strides=_packed_steps(x.shape, order))


def packed_order(x: Strided) -> tuple[int, ...] | None:
    """The order of axes in which an array lies packed, channels last or first; None if it does in neither."""
    rank = len(x.shape)
    for order in ((0, *range(2, rank), 1), tuple(range(rank))):
        steps = _packed_steps(x.shape, order)
        if all(n == 1 or own == step for n, own, step in zip(x.shape, x.strides, steps, strict=True)):
            return order
    return None


def _packed_steps(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    steps, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps[axis] = step
        step *= shape[axis]
    return tuple(steps)


def scratch_of(plan: Plan, call: Call, number: int) -> int:
    """Scratch bytes of a convolution: copies of operands, and room for a gated output."""
    return _planned(plan, call, number).scratch


def actions_of(plan: Plan, call: Call, number: int) -> list[Action]:
    """A call of the library, after the copies that it reads."""
    planned = _planned(plan, call, number)
    asked = planned.convolution
    if 0 in asked.out.shape:
        return []
    empty = any(0 in x.shape for x in asked.operands)
    return gate(plan, asked, [*planned.before, asked], zero=empty)


def computed(asked: Convolution, first: Array, second: Array, out: Array) -> None:
    """A convolution in NumPy, from and to the bytes of its parts: added up in f64, and rounded once."""
    x, y, result = (
        _view(s, memory) for s, memory in zip((*asked.operands, asked.out), (first, second, out), strict=True)
    )
    with np.errstate(all="ignore"):
        wide = REGISTRY[asked.op].reference(x.astype(np.float64), y.astype(np.float64), **asked.attrs)
        result[...] = wide.astype(result.dtype)


def _view(operand: Strided, memory: Array) -> Array:
    part = memory.view(operand.part.dtype)[operand.start :]
    if 0 in operand.shape:
        return np.empty(operand.shape, part.dtype)
    return np.lib.stride_tricks.as_strided(part, operand.shape, [s * part.itemsize for s in operand.strides])


# -- the text ----------------------------------------------------------------------------------------------------------


def support(program: Program, calls: Sequence[Call]) -> list[str]:
    """What a program's convolutions need of us: copies of operands that may not lie packed, the gate where checks come
    before one.
    """
    copied = {
        program.types[operand.buffer].dtype.itemsize
        for call in calls
        for operand, axes in zip(call.args, call.views, strict=True)
        if not _surely_packed(program, call, operand, axes)
    }
    return [*copying_texts(copied), *gate_texts(program, calls)]


def _surely_packed(program: Program, call: Call, operand: Operand, axes: Sequence[str]) -> bool:
    """Whether an operand is a whole buffer, channels first or last, whatever the sizes."""
    sizes, shape = dict(call.axes), program.types[operand.buffer].shape
    named = [(i.variable, n) for i, n in zip(operand.index, shape, strict=True) if n != 1]
    if not all(a in sizes and same(sizes[a], n) for a, n in named):
        return False
    own = [a for a, _ in named]
    orders = (axes, (axes[0], *axes[2:], axes[1]))
    return any(own == [a for a in order if a in own or sizes[a] != 1] for order in orders)
