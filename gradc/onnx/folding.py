"""Values that are known when a model is read: shapes and what is computed from them, numbers, small constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from .. import ops
from ..errors import Unsupported
from ..ir.dims import Dim, Size, evaluate, floordiv, known_nonnegative, maximum, minimum, nonnegative, symbols
from ..ir.node import Node
from ..ir.operands import CAPTURE
from ..ir.types import I64, DType
from ..ops.rules import converted
from ..trace import assume
from . import model
from .table import Known, normalized_axis

MOST = 1 << 20
"""Elements of a result that is computed here."""
FOLDED_ONLY = frozenset({"MelWeightMatrix", "NonMaxSuppression", "NonZero", "Unique"})
"""Operators without a line, whose inputs have to be known."""
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)


def is_known(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


@dataclass(frozen=True)
class Typed:
    """A size of another dtype than i64, which a Cast gave it, or a quotient of two of them that do not vary."""

    size: Size | float
    dtype: DType


def size_of(value: Any) -> Size:
    """A known value as a size."""
    value = _untyped(value)
    return value if isinstance(value, Dim) else int(value)


def _untyped(value: Any) -> Any:
    return value.size if isinstance(value, Typed) else value


def as_node(value: Known) -> Node:
    """Known values as an operand: a constant, or where sizes are among them what computes them."""
    if value.dtype == object and value.size and isinstance(value.reshape(-1)[0], Typed):
        return converted(as_node(_each(size_of, value)), value.reshape(-1)[0].dtype)
    if value.dtype != object:
        if value.size > 64 and not np.any(value != value.reshape(-1)[0]):  # zeros, ones
            return ops.broadcast_to(as_node(value.reshape(-1)[:1].reshape(())), value.shape)
        if value.size > 64:
            return CAPTURE[-1](np.ascontiguousarray(value))
        return ops.reshape(np.asarray(value).reshape(-1), value.shape) if value.ndim else _scalar(value)
    items = [
        ops.dim(x) if isinstance(x, Dim) else ops.constant(value=(int(x),), dtype="i64") for x in value.reshape(-1)
    ]
    return ops.reshape(ops.stack(*items), value.shape) if value.ndim else items[0]


def _scalar(value: Known) -> Node:
    from ..ir.types import typeof

    kind = typeof(value).dtype
    number: Any = value.astype(np.float64).item() if kind.is_float else value.item()
    return ops.constant(value=(kind.literal(number),), dtype=kind)


def shape_of(sizes: Sequence[Size]) -> Known:
    """Sizes as a vector."""
    if all(isinstance(n, int) for n in sizes):
        return np.array(sizes, np.int64)
    found = np.empty(len(sizes), object)
    found[:] = list(sizes)
    return found


def folded(
    node: onnx.NodeProto, operands: Sequence[Any], attributes: Mapping[str, Any], opsets: Mapping[str, int]
) -> list[Any] | None:
    """The results of an operator that :func:`may_fold` lets through; None where its line is to compute them."""
    arrays = [np.asarray(x) if x is not None else None for x in operands]
    if any(x is not None and x.dtype == object for x in arrays):
        floats = any(isinstance(v, Typed) and v.dtype.is_float for x in arrays if x is not None for v in x.reshape(-1))
        function = (_ON_FLOATS if floats else _ON_SIZES).get(node.op_type)
        try:
            return None if function is None else [_tidy(x) for x in function(arrays, attributes)]
        except _Computed:
            return None
    return _evaluated(node, arrays, opsets)


def may_fold(node: onnx.NodeProto, operands: Sequence[Any], attributes: Mapping[str, Any]) -> bool:
    """Whether the results of an operator on known values are computed when the model is read: neither random numbers
    nor codes, nor anything large.
    """
    if node.op_type in _RANDOM or node.domain:
        return False
    if any(hasattr(a, "node") for a in attributes.values()):
        return False
    arrays = [np.asarray(x) for x in operands if x is not None]
    if any(x.dtype == object for x in arrays):
        return True
    if not operands or any(x.size > MOST for x in arrays):
        return False
    if node.op_type in ("ConstantOfShape", "Expand", "Tile", "Range") and _result_size(node.op_type, arrays) > MOST:
        return False
    return not node.op_type.startswith(("Quantize", "Dequantize", "QLinear", "Dynamic"))


def _result_size(op: str, arrays: Sequence[Known]) -> int:
    if op == "Range":
        start, limit, delta = (float(x.reshape(-1)[0]) for x in arrays)
        return int(abs((limit - start) / delta)) if delta else MOST + 1
    sizes = [int(n) for n in arrays[0 if op == "ConstantOfShape" else 1].reshape(-1)]
    return int(np.prod([max(n, 1) for n in sizes], dtype=float)) * (arrays[0].size if op == "Tile" else 1)


def _evaluated(node: onnx.NodeProto, arrays: Sequence[Known | None], opsets: Mapping[str, int]) -> list[Any] | None:
    """By ONNX's own reference implementation."""
    from onnx.reference import ReferenceEvaluator

    names = [f"i{i}" if x is not None else "" for i, x in enumerate(arrays)]
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    del alone.input[:]
    alone.input.extend(names)
    infos = [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in names if n]
    results = [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in node.output if n]
    if any(a.ref_attr_name for a in node.attribute):
        return None
    standard = model.defaults(node.op_type, "", opsets.get("", 1))
    alone.attribute.extend(standard[name] for name in standard.keys() - {a.name for a in alone.attribute})
    graph = onnx.helper.make_graph([alone], "known", infos, results)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        proto = onnx.helper.make_model(graph, opset_imports=imports)
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(proto).run(None, {n: x for n, x in zip(names, arrays, strict=True) if n})
    except Exception:  # whatever it does not take, the operator's line may
        return None
    made = iter(found)
    values = [next(made) if name else None for name in node.output]
    if any(v is not None and not isinstance(v, np.ndarray | np.generic) for v in values):
        return None
    if any(v is not None and np.asarray(v).dtype.kind in "OSUc" for v in values):
        return None
    return [None if v is None else np.asarray(v) for v in values]


# -- on sizes ----------------------------------------------------------------------------------------------------------

_Function = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


class _Computed(Exception):
    """The result is no size any more: the operator's line computes it."""


def _each(function: Callable[[Any], Any], values: Known) -> Known:
    return np.asarray(np.frompyfunc(function, 1, 1)(values), object)


def _tidy(value: Any) -> Known:
    """Sizes of one dtype, as numbers where none varies.

    :raises _Computed: sizes vary, and some number among them is no whole one.
    """
    array = np.asarray(value)
    if array.dtype != object:
        return array
    items = array.reshape(-1)
    dtype = next((x.dtype for x in items if isinstance(x, Typed)), None)
    if any(isinstance(_untyped(x), Dim) for x in items):
        return array if dtype is None else _each(lambda x: Typed(_whole(x), dtype), array)
    if dtype is not None:
        return _each(_untyped, array).astype(dtype.np)
    return array.astype(bool if any(isinstance(x, bool | np.bool_) for x in items) else np.int64)


def _whole(value: Any) -> Size:
    """:raises _Computed: the value is no whole number."""
    value = _untyped(value)
    if not isinstance(value, Dim) and value != value // 1:
        raise _Computed
    return size_of(value)


def _pairwise(function: Callable[[Any, Any], Any]) -> _Function:
    each = np.frompyfunc(_typed(function), 2, 1)

    def broadcast(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
        a, b = (np.asarray(v, object) for v in x)
        if attributes.get("broadcast") and b.size == 1:  # before opset 7: to the shape of a
            b = b.reshape(())
        elif attributes.get("broadcast"):  # from an axis on
            first = a.ndim - b.ndim if attributes.get("axis") is None else normalized_axis(attributes["axis"], a.ndim)
            b = b.reshape(*b.shape, *[1] * (a.ndim - first - b.ndim))
        return [each(a, b)]

    return broadcast


def _all_of(function: Callable[[Any, Any], Any]) -> _Function:
    each = np.frompyfunc(_typed(function), 2, 1)
    return lambda x, _: [functools.reduce(each, [np.asarray(v, object) for v in x])]


def _typed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of sizes, of sizes of another dtype, too, and of whole numbers of that dtype."""

    def of(a: Any, b: Any) -> Any:
        dtypes = [x.dtype for x in (a, b) if isinstance(x, Typed)]
        if not dtypes:
            return function(a, b)
        made = function(_whole(a), _whole(b))
        return made if isinstance(made, bool) else Typed(made, dtypes[0])

    return of


def _cast(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    made = cast(x[0], model.element(attributes["to"]))
    if made is None:
        raise _Computed
    return [made]


def cast(sizes: Known, wanted: DType) -> Known | None:
    """Sizes of another dtype; None for one that does not hold them: bool, unsigned integers and those of few bits."""
    if not (wanted.is_float or (wanted.kind == "i" and wanted.bits >= 32)):
        return None
    whole = _each(size_of, sizes)
    return whole if wanted is I64 else _each(lambda size: Typed(size, wanted), whole)


def _quotient(a: Size, b: Size) -> Size:
    """a / b rounded towards zero, as integers are divided; b is positive where it varies.

    A size less a number, (H - 3) / 2 as in the size of a result of windows, is assumed not to be negative: so it is the
    size that the windows give.
    """
    if isinstance(b, int) and b <= 0:
        return _quotient(-a, -b) if b else 0
    if isinstance(a, Dim) and known_nonnegative(a - evaluate(a, dict.fromkeys(symbols(a), 0))):
        for fact in nonnegative([a]).comparisons:
            assume(fact)
        return floordiv(a, b)
    return floordiv(maximum(a, 0), b) - floordiv(maximum(-a, 0), b)


def _quotient_of_floats(a: Size, b: Size) -> Size | float:
    """a / b.

    :raises _Computed: it varies, and is no size.
    """
    if b == 0:
        raise _Computed
    if isinstance(a, int) and isinstance(b, int):
        return a / b
    quotient = floordiv(a, b)
    if quotient * b != a:
        raise _Computed
    return quotient


def _compared(a: Any, b: Any) -> bool:
    """Whether sizes are equal: one that varies is not negative, and may have any other value."""
    if isinstance(a, Dim) or isinstance(b, Dim):
        other = b if isinstance(a, Dim) else a
        if isinstance(other, int) and other < 0:
            return False
        if a == b:
            return True
        raise Unsupported(f"whether {a} and {b} are equal decides what is computed; dims= can give sizes")
    return bool(a == b)


def _axes(x: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(a) for a in (x[1] if len(x) > 1 and x[1] is not None else attributes.get("axes", ())))


def _gather(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    return [np.take(x[0], np.asarray(x[1], np.int64), axis=attributes.get("axis", 0))]


def _slice(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    given = x[1:] if len(x) > 1 else [attributes.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, axes, steps = [*given, None, None, None][:4]
    if any(v is not None and np.asarray(v).dtype == object for v in (starts, ends)):
        raise Unsupported("a part of a shape that begins or ends at a size that varies")
    whole = [slice(None)] * x[0].ndim
    for i, axis in enumerate(axes if axes is not None else range(len(starts))):
        whole[int(axis)] = slice(int(starts[i]), int(ends[i]), 1 if steps is None else int(steps[i]))
    return [x[0][tuple(whole)]]


def _reshape(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    shape = [int(n) for n in (x[1] if len(x) > 1 else attributes["shape"])]  # an attribute before opset 5
    if not attributes.get("allowzero", 0):
        shape = [x[0].shape[i] if n == 0 and i < x[0].ndim else n for i, n in enumerate(shape)]
    return [x[0].reshape(shape)]


def _unsqueeze(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    return [np.expand_dims(x[0], _axes(x, attributes))]


def _squeeze(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    axes = _axes(x, attributes)
    return [np.squeeze(x[0], axes if axes else None)]


def _concat(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    return [np.concatenate([np.asarray(v, object) for v in x], attributes.get("axis", 1))]


def _product(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    axes = _axes(x, attributes)
    if not axes and attributes.get("noop_with_empty_axes", 0):
        return [x[0]]
    product = np.frompyfunc(_typed(lambda a, b: a * b), 2, 1, identity=1)
    return [product.reduce(x[0], axes or None, keepdims=bool(attributes.get("keepdims", 1)))]


def _where(x: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    return [np.where(np.asarray(x[0], bool), np.asarray(x[1], object), np.asarray(x[2], object))]


_ON_SIZES: dict[str, _Function] = {
    "Add": _pairwise(lambda a, b: a + b),
    "Sub": _pairwise(lambda a, b: a - b),
    "Mul": _pairwise(lambda a, b: a * b),
    "Div": _pairwise(_quotient),
    "Max": _all_of(maximum),
    "Min": _all_of(minimum),
    "Equal": _pairwise(_compared),
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "ReduceProd": _product,
    "Where": _where,
    "Shape": lambda x, a: [np.array(x[0].shape[slice(a.get("start"), a.get("end"))], np.int64)],
    "Size": lambda x, _: [np.array(x[0].size, np.int64)],
}
"""Operators on shapes among whose sizes some vary."""
_ON_FLOATS: dict[str, _Function] = {
    **_ON_SIZES,
    "Div": _pairwise(_quotient_of_floats),
    **dict.fromkeys(("Floor", "Ceil", "Round"), lambda x, _: [x[0]]),
}
"""Operators on sizes cast to floats that leave whole numbers; the others compute with data."""
