"""Evaluation of a graph in exact algebra."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import interp
from ...errors import IndexOutOfRange
from ...ir.dims import assuming
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Alias, Checked, Expr, Movement, Reduction, Scatter
from ...ir.types import DType
from ...ops.elementwise.pointwise import convert
from .field import Array, P, U, joined, last, matmul, mixed, product, total
from .values import (
    ARITHMETIC,
    CHOICES,
    COMPARISONS,
    EXACT_INTS,
    FRACTION,
    HOLDERS,
    OVER_THE_REALS,
    ExactArray,
    _select,
    concrete,
    embed,
    holders,
)


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array],
    dims: Mapping[str, int] | None = None,
    licence: str = "BITS",
    *,
    folding: bool = True,
) -> dict[str, ExactArray]:
    """The outputs of a graph in exact algebra.

    :param inputs: NumPy arrays; floats are represented exactly, as dyadic rationals.
    :param licence: ``BITS`` (rounding is significant) or ``REAL`` (rounding is the identity).
    :param folding: whether pointwise ops on constants are evaluated with rounding, as the pass ``fold`` does.
    """
    with assuming(graph.assumptions):
        return _Evaluation(graph, inputs, dims or {}, licence, folding).run()


_FIRST = 2.0**52
"""The number of the first element of what an op moves, as f64: nothing that an op fills in is that large."""


class _Evaluation:
    """The evaluation of one graph on one set of inputs."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Array], dims: Mapping[str, int], licence: str, folding: bool):
        self.inputs, self.real, self.folding = inputs, licence == "REAL", folding
        self.graph = graph.opened
        self.dims = interp.bind_dims(
            {graph.input_name(n): n.type for n in graph.inputs}, {n: np.shape(a) for n, a in inputs.items()}, dims
        )
        self.values: dict[Node, ExactArray] = {}
        self.concrete: dict[Node, Array] = {}

    def run(self) -> dict[str, ExactArray]:
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                self.values[node] = self.settled(node, self.value(node))
        return {name: self.values[node] for name, node in self.graph.outputs}

    def settled(self, node: Node, array: ExactArray) -> ExactArray:
        shape = node.type.concrete(self.dims)
        if array.shape != shape:
            array = replace(array, value=np.broadcast_to(array.value, shape), tag=np.broadcast_to(array.tag, shape))
        return array

    def value(self, node: Node) -> ExactArray:
        op, dtype = node.op, node.dtype
        if op.name == "input":
            array = np.asarray(self.inputs[self.graph.input_name(node)])
            return embed(array, dtype) if dtype.is_float else concrete(array, dtype)
        operands = [self.values[o] for o in node.operands]
        folded = self.folded(node, operands)
        if folded is not None:
            return folded
        if isinstance(getattr(op, "lower", None), Checked):  # a check changes no value
            return operands[0]
        if isinstance(getattr(op, "lower", None), Movement | Alias):
            return self.moved(node, operands)
        if not dtype.is_float and not any(x.dtype.is_float for x in operands):
            derived = any(x.derived for k, x in enumerate(operands) if k not in op.indices)
            arrays = [x.value for x in operands]
            if op.indices:
                return concrete(self.through(node, arrays)[0].astype(dtype.np), dtype, derived)
            return concrete(interp.apply(node, arrays, self.dims), dtype, derived)
        if op.name == "cast":
            return self.cast(operands[0], dtype)
        if operands and not any(x.dtype.is_float for x in operands):  # a bitcast to a float
            return embed(interp.apply(node, [x.value for x in operands], self.dims), dtype)
        if op.name in COMPARISONS:
            return concrete(COMPARISONS[op.name](*operands), dtype)
        if op.name == "where":
            exact_in = operands[1].exact_in & operands[2].exact_in
            return ExactArray(dtype, *_select(operands[0].value, *operands[1:]), exact_in)
        return self.rounded(self.computed(node, operands), dtype)

    # constants

    def folded(self, node: Node, operands: Sequence[ExactArray]) -> ExactArray | None:
        """The value of a node that the pass ``fold`` may turn into a constant, or None."""
        if not self.folding:
            return None
        shape = node.type.concrete(self.dims)
        attrs = node.attrs
        if node.op.name in ("constant", "dim"):
            if node.op.name == "dim" and not isinstance(attrs["size"], int):
                return None
            array = np.asarray(interp.apply(node, [], self.dims))
            bits = {a.tobytes() for a in array.reshape(-1)}
            return self.spread(array.reshape(-1)[0], node.dtype, shape) if len(bits) == 1 else None
        if any(x.constant is None for x in operands) or not operands:
            return None
        constants = [x.constant for x in operands if x.constant is not None]
        if isinstance(node.op.lower, Movement | Alias) and len(operands) == 1:
            moved = np.asarray(interp.apply(node, [np.broadcast_to(constants[0], operands[0].shape)], self.dims))
            only_moved = {a.tobytes() for a in moved.reshape(-1)} <= {constants[0].tobytes()}
            return self.spread(constants[0], node.dtype, shape) if only_moved else None
        if isinstance(node.op.lower, Expr):
            return self.spread(interp.apply(node, constants, self.dims), node.dtype, shape)
        return None

    def spread(self, item: Any, dtype: DType, shape: tuple[int, ...]) -> ExactArray:
        item = np.asarray(item)
        one = embed(item, dtype, holders(float(item), dtype)) if dtype.is_float else concrete(item, dtype)
        return replace(one, value=np.broadcast_to(one.value, shape), tag=np.broadcast_to(one.tag, shape), constant=item)

    # rounding

    def rounded(self, x: ExactArray, dtype: DType) -> ExactArray:
        """x rounded to ``dtype``."""
        if not dtype.is_float or dtype.name in x.exact_in:
            return replace(x, dtype=dtype)
        if self.real:
            return replace(x, dtype=dtype, exact_in=HOLDERS[dtype.name])
        return replace(
            x, dtype=dtype, value=mixed("round", dtype.name, x.value), exact_in=HOLDERS[dtype.name], constant=None
        )

    def cast(self, x: ExactArray, dtype: DType) -> ExactArray:
        if not x.dtype.is_float:
            if self.real or dtype.name in HOLDERS[x.dtype.name]:
                residue = np.mod(x.value.astype(np.int64), P).astype(U)
                return ExactArray(
                    dtype, residue, np.zeros(residue.shape, bool), HOLDERS[x.dtype.name] | HOLDERS[dtype.name]
                )
            return embed(convert(x.value, dtype), dtype)
        if dtype.is_float:
            return self.rounded(x, dtype)
        if dtype.kind == "b":
            return concrete((x.value != 0) | x.tag, dtype)
        if x.exact_in & set(EXACT_INTS):
            signed = np.where(x.value > P // 2, x.value.astype(np.int64) - P, x.value.astype(np.int64))
            return concrete(convert(signed.astype(np.float64), dtype), dtype)
        return concrete(convert(mixed("cast", dtype.name, x.value, x.tag).astype(np.int64), dtype), dtype, derived=True)

    # everything else

    def index(self, node: Node, k: int) -> Array:
        """An index operand; evaluated in f64 if it was computed from floats."""
        operand = node.operands[k]
        if not self.values[operand].derived:
            return self.values[operand].value
        if operand not in self.concrete:
            index_graph = Graph("index", self.graph.inputs, (("index", operand),), self.graph.assumptions)
            self.concrete[operand] = interp.run(index_graph, self.inputs, dims=self.dims, precision="f64")["index"]
        return self.concrete[operand]

    def through(self, node: Node, arrays: list[Array]) -> tuple[Array, bool]:
        """The op's NumPy reference applied to surrogate arrays for floats; indices out of range are skipped."""
        for k in node.op.indices:
            arrays[k] = self.index(node, k)
        attrs = {n: interp.concrete(v, self.dims) for n, v in node.attrs.items()}
        try:
            return np.asarray(node.op.reference(*arrays, **attrs)), False
        except IndexOutOfRange:
            return np.asarray(node.op.reference(*arrays, **{**attrs, "oob": "skip"})), True

    def moved(self, node: Node, operands: list[ExactArray]) -> ExactArray:
        """A movement op: its NumPy reference is applied to the numbers of the elements; what is no such number in the
        result was filled in.
        """
        dtype = node.dtype
        if not node.operands:
            array = np.asarray(interp.apply(node, [], self.dims))
            if not dtype.is_float:
                return concrete(array, dtype)
            return embed(
                array,
                dtype,
                frozenset.intersection(
                    HOLDERS["bool"], *(holders(float(v), dtype) for v in set(array.reshape(-1).tolist()))
                ),
            )
        data = [k for k in range(len(operands)) if k not in node.op.indices]
        if not dtype.is_float and any(operands[k].dtype.is_float for k in data):
            return self.rounded(self.unknown(node, operands), dtype)
        arrays, count = [x.value for x in operands], 0
        for k in data:
            size = operands[k].value.size
            arrays[k] = (_FIRST + np.arange(count, count + size)).astype(np.float64).reshape(operands[k].shape)
            count += size
        result, outside = self.through(node, arrays)
        is_element = (result >= _FIRST) & (result < _FIRST + count)
        numbers = np.where(is_element, result - _FIRST, count).astype(np.int64)
        fill = convert(np.where(is_element, 0.0, result), dtype)
        first = embed(fill, dtype) if dtype.is_float else concrete(fill, dtype)
        values, tags = (
            np.concatenate([*(getattr(operands[k], part).reshape(-1) for k in data), np.zeros(1, kind)])[numbers]
            for part, kind in (("value", first.value.dtype), ("tag", bool))
        )
        exact_in = frozenset.intersection(*(operands[k].exact_in for k in data))
        exact_in &= HOLDERS[dtype.name] if fill.astype(bool).any() else exact_in
        return ExactArray(
            dtype,
            np.where(is_element, values, first.value),
            np.where(is_element, tags, first.tag | outside),
            exact_in,
            any(operands[k].derived for k in data),
        )

    def computed(self, node: Node, operands: list[ExactArray]) -> ExactArray:
        name, lower = node.op.name, getattr(node.op, "lower", None)
        wide = node.dtype.compute
        exact_in = HOLDERS[wide.name]
        if name in CHOICES:
            kept = HOLDERS["i2"] if name == "sign" else frozenset.intersection(*(x.exact_in for x in operands))
            signed = name in ("neg", "abs", "sign")
            return ExactArray(wide, *CHOICES[name](*operands), kept & set(FRACTION) if signed else kept)
        if name in ARITHMETIC:
            value, tag = ARITHMETIC[name](*operands)
            for x in operands:  # x / 1 is x: whatever holds that
                exact_in |= x.exact_in if np.array_equal(x.value, value) and np.array_equal(x.tag, tag) else exact_in
            return ExactArray(wide, value, tag, exact_in)
        if self.real and name in OVER_THE_REALS:
            return ExactArray(wide, *OVER_THE_REALS[name](*operands), exact_in)
        if isinstance(lower, Reduction):
            return self.reduction(node, operands[0], exact_in)
        if isinstance(lower, Scatter) and lower.combine == "sum" and operands[lower.updates].dtype.is_float:
            x = operands[lower.updates]
            parts = []
            for part in (x.value & U(0xFFFFFFFF), x.value >> U(32), x.tag):
                arrays = [o.value for o in operands]
                arrays[lower.updates] = part.astype(np.int64)
                parts.append(self.through(node, arrays)[0].astype(U))
            return ExactArray(wide, joined(parts[0], parts[1]), parts[2] > 0, exact_in)
        if name == "matmul":
            a, b = operands
            tag = np.asarray(a.tag.any(-1))[..., None] | np.asarray(b.tag.any(-2))[..., None, :]
            return ExactArray(wide, matmul(a.value, b.value), tag, exact_in)
        if name in ("grouped_matmul", "grouped_outer"):
            return self.grouped(node, operands, exact_in)
        if name == "mode_product":
            return self.mode_product(operands[0], np.array(node.attrs["matrix"]), node.attrs["axis"], wide)
        return self.unknown(node, operands)

    def grouped(self, node: Node, operands: list[ExactArray], exact_in: frozenset[str]) -> ExactArray:
        """Products of the rows of each group alone."""
        a, b, offsets = operands
        rows, ends = (
            np.arange(a.shape[0]),
            np.maximum.accumulate(np.minimum(offsets.value.astype(np.int64), a.shape[0])),
        )
        own = (rows >= ends[:-1, None]) & (rows < ends[1:, None])  # [groups, rows]
        rowwise = node.op.name == "grouped_matmul"
        shape = (a.shape[0], b.shape[2]) if rowwise else (len(own), a.shape[1], b.shape[1])
        value, tag = np.zeros(shape, U), np.zeros(shape, bool)
        for g, mine in enumerate(own):
            if rowwise:
                value[mine] = matmul(a.value[mine], b.value[g])
                tag[mine] = a.tag[mine].any(-1)[:, None] | b.tag[g].any(-2)
            else:
                value[g] = matmul(a.value[mine].T, b.value[mine])
                tag[g] = a.tag[mine].any(0)[:, None] | b.tag[mine].any(0)
        return ExactArray(node.dtype.compute, value, tag, exact_in)

    def mode_product(self, x: ExactArray, matrix: Array, axis: int, dtype: DType) -> ExactArray:
        value, tag = (np.moveaxis(a, axis, -1) for a in (x.value, x.tag))
        used = (matrix != 0).T
        value = matmul(value, embed(matrix.T.astype(dtype.np), dtype).value)
        tag = np.asarray((tag[..., None] & used).any(-2))
        return ExactArray(dtype, np.moveaxis(value, -1, axis), np.moveaxis(tag, -1, axis), HOLDERS[dtype.name])

    def reduction(self, node: Node, x: ExactArray, exact_in: frozenset[str]) -> ExactArray:
        axis, combine = node.attrs["axis"], node.op.lower.combine
        axes = axis if isinstance(axis, tuple) else (axis,)
        tag = np.asarray(x.tag.any(axes))
        if combine in ("sum", "prod"):
            exact_in |= x.exact_in if all(x.shape[a] == 1 for a in axes) else exact_in  # of one element: that element
            return ExactArray(
                node.dtype.compute, (total if combine == "sum" else product)(x.value, axes), tag, exact_in
            )
        if not all(x.shape[a] for a in axes):  # over no elements: any value, the same each time
            return self.unknown(node, [x])
        high = combine.endswith("max")
        key = last(x.key(1 if high else -1), axes)
        position: Array = np.zeros(key.shape[:-1], np.int64)
        if key.shape[-1]:
            position = np.asarray(key.argmax(-1) if high else key.argmin(-1))
        place = position[..., None]
        if combine.startswith("arg"):
            return concrete(place[..., 0], node.dtype)
        value, tags = (np.take_along_axis(last(a, axes), place, -1)[..., 0] for a in (x.value, x.tag))
        return ExactArray(node.dtype.compute, value, tags, x.exact_in)

    def unknown(self, node: Node, operands: list[ExactArray]) -> ExactArray:
        """A hash: element by element for a pointwise op, of everything for another."""
        wide = (
            ""
            if self.real
            else max((x.dtype.compute.name for x in operands if x.dtype.is_float), default=node.dtype.name)
        )
        attrs = "".join(f"{n}={interp.concrete(v, self.dims)} " for n, v in node.attrs.items())
        parts: list[Any] = [node.op.name, wide, attrs]
        shape = node.type.concrete(self.dims)
        if isinstance(getattr(node.op, "lower", None), Expr):
            for x in operands:
                parts += [x.value.astype(np.int64), x.tag]
        else:
            everything = "".join(f"{x.shape}" for x in operands).encode() + b"".join(
                x.value.tobytes() + x.tag.tobytes() for x in operands
            )
            parts += [zlib.crc32(everything), zlib.adler32(everything), np.arange(math.prod(shape)).reshape(shape)]
        value = np.broadcast_to(mixed(*parts), shape)
        if not node.dtype.is_float:
            return concrete(convert(value.astype(np.int64), node.dtype), node.dtype, derived=True)
        tags = [x.tag for x in operands if x.shape == shape]
        tag = np.asarray(np.logical_or.reduce(tags)) if tags else np.zeros(shape, bool)
        return ExactArray(node.dtype.compute, value, tag, HOLDERS[node.dtype.compute.name])
