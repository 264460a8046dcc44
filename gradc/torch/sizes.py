"""torch's sizes and dtypes as gradc's: a SymInt's sympy expression becomes a size over symbols of the same names."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..errors import Unsupported
from ..ir.dims import Assumption, Size, maximum, minimum, symbol
from ..ir.types import DTYPES, DType, Type

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DTYPES[name]: getattr(torch, of_torch)
    for name, of_torch in {
        "bool": "bool",
        **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
        **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32)},
        "f16": "float16",
        "bf16": "bfloat16",
        "f32": "float32",
        "f64": "float64",
        "f8e4m3": "float8_e4m3fn",
        "f8e5m2": "float8_e5m2",
        "e8m0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, of_torch)
}
_OF_TORCH = {of_torch: dtype for dtype, of_torch in TORCH_DTYPES.items()}


_names: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("names", default=MappingProxyType({}))


@contextlib.contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """A context manager: torch's symbols become dims of these names; others keep their own."""
    token = _names.set(names)
    try:
        yield
    finally:
        _names.reset(token)


def dtype_of(dtype: torch.dtype) -> DType:
    """
    :raises Unsupported: gradc has no such dtype (complex numbers, quantized tensors of torch).
    """
    try:
        return _OF_TORCH[dtype]
    except KeyError:
        raise Unsupported(f"the dtype {dtype}") from None


def type_of(tensor: torch.Tensor) -> Type:
    """The type of a (fake) tensor; symbolic sizes keep their symbols.

    :raises Unsupported: a dtype, a layout or a size that gradc has no word for.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise Unsupported(f"a tensor of the layout {tensor.layout}{' (quantized)' if tensor.is_quantized else ''}")
    return Type(dtype_of(tensor.dtype), tuple(map(size_of, tensor.shape)))


def size_of(value: int | torch.SymInt) -> Size:
    """
    :raises Unsupported: the size depends on data, or is no polynomial with floordiv, mod, max and min.
    """
    if isinstance(value, int):
        return value
    node = value.node
    return int(node.expr) if node.expr.is_number else _of_expression(node.expr)


def _of_expression(expression: Any) -> Size:
    """A sympy expression over integer symbols as a size."""
    return evaluated(expression, _symbol, lambda function, *sizes: _ON_SIZES.get(function, function)(*sizes))  # type: ignore[no-any-return]


def _symbol(symbol_: Any) -> Size:
    if str(symbol_)[:1] in "uz":  # torch's names of sizes that only running the program can tell
        raise Unsupported(f"the size {symbol_} depends on data")
    return symbol(_names.get().get(str(symbol_), str(symbol_)))


def evaluated(expression: Any, leaf: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
    """The value of a sympy expression over integer symbols.

    :param leaf: the value of a symbol.
    :param call: of a function of two integers (``operator``'s, :func:`torch.sym_max`) and two values.
    :raises Unsupported: it is no polynomial with floordiv, mod, max and min.
    """
    name = type(expression).__name__
    if expression.is_Symbol:
        return leaf(expression)
    if expression.is_Integer:
        return int(expression)
    if name == "Pow" and expression.exp.is_Integer and expression.exp >= 0:
        operands = [evaluated(expression.base, leaf, call)] * int(expression.exp)
        return functools.reduce(functools.partial(call, operator.mul), operands, 1)
    if name not in _FUNCTIONS:
        raise Unsupported(f"the size {expression}")
    operands = [evaluated(argument, leaf, call) for argument in expression.args]
    return functools.reduce(functools.partial(call, _FUNCTIONS[name]), operands)


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
_ON_SIZES: dict[Any, Callable[[Size, Size], Size]] = {torch.sym_max: maximum, torch.sym_min: minimum}


def typical(size: int | torch.SymInt) -> int:
    """A size as it was in the example that was traced; 4096 where torch knows none."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return 4096 if hint is None else int(hint)


def assumptions(
    values: Iterable[torch.Tensor | torch.SymInt], ranges: Mapping[Any, Any] | None = None
) -> tuple[Assumption, ...]:
    """What torch guards of the symbols in these sizes: ranges (``N >= 2``, as Dynamo compiles sizes of 0 and 1 on their
    own), equations and inequalities.

    :param ranges: symbol -> its range, where a program promises it (``ExportedProgram.range_constraints``).
    """
    environment, names = None, set()
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                names |= {str(each) for each in size.node.expr.free_symbols}
    if environment is None:
        return ()
    facts: dict[Assumption, None] = {}
    known = environment.var_to_range if ranges is None else ranges
    for each, bounds in sorted(known.items(), key=lambda item: str(item[0])):
        if str(each) in names and bounds.lower.is_Integer and bounds.lower > 0:
            facts[Assumption(_of_expression(each), ">=", int(bounds.lower))] = None
    for guard in environment.guards:
        expression = environment.simplify(guard.expr)
        if {str(each) for each in getattr(expression, "free_symbols", ())} <= names:
            facts |= dict.fromkeys(_facts_of(expression))
    return tuple(facts)


def _facts_of(expression: Any) -> list[Assumption]:
    """A guard as facts about sizes; none where it says nothing that a fact could."""
    relation = type(expression).__name__
    if relation not in ("Equality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"):
        return []
    try:
        left, right = _of_expression(expression.lhs), _of_expression(expression.rhs)
    except Unsupported:
        return []
    match relation:
        case "Equality":
            return [Assumption(left, "==", right)]
        case "GreaterThan":
            return [Assumption(left, ">=", right)]
        case "LessThan":
            return [Assumption(right, ">=", left)]
        case "StrictGreaterThan":
            return [Assumption(left, ">=", right + 1)]
    return [Assumption(right, ">=", left + 1)]
