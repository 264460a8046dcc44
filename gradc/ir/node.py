"""Node: one value of a graph, immutable and hash-consed.

Two nodes with the same op, operands and attributes are one object, so common subexpressions never exist twice and
equality of graphs is ``==``.  A node has one result; ops with several results are several nodes.

Operators on nodes write graphs, ``==`` and ``!=`` like the others: inside the compiler nodes are compared by ``is``,
tuples of them by :func:`identical`, and found in sets and dicts (whose keys hash by identity), never by ``in`` a tuple.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from ..errors import TypeRuleError
from .dims import Dim, Size
from .types import DType, Type

REGISTRY: dict[str, Any] = {}
"""Every op by name; each record of :mod:`gradc.ir.op` registers itself."""

_interned: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Note:
    """Provenance of a value; not part of a node's identity.

    :param name: the user's name of it.  :param scope: the enclosing gradc.scope(...).
    :param where: ``file:line`` of the user's call, also for what passes made of it: a gradient has its primal's.
    :param reader: for indices: the op that the user passed them to.
    :param composite: the composite whose decomposition it belongs to, or ``NAME_grad`` if it belongs to its gradient.
    :param by: who made it, "" for the user: a pass, and the rule where there are several: ``simplify: x * 1 -> x``.
    :param code: the text of that line.
    :param id: its number in the text, ``%7``, the same after every pass.
    """

    name: str = ""
    where: str = ""
    scope: str = ""
    reader: str = ""
    composite: str = ""
    by: str = ""
    code: str = ""
    id: int | None = None

    def derived(self, by: str, composite: str = "") -> Note:
        """The note of what ``by`` makes of the value."""
        return Note(where=self.where, scope=self.scope, composite=composite, by=by, code=self.code)

    def numbered(self, number: int) -> Note:
        """The note with another number; :func:`dataclasses.replace`, which takes three times as long."""
        new = object.__new__(Note)
        new.__dict__.update(self.__dict__, id=number)
        return new

    @property
    def strength(self) -> int:
        """Of two notes of one value, the stronger one stays: a name before a line, the user's line before a pass's."""
        return 3 if self.name else bool(self.scope or self.where) * (1 if self.by else 2)

    def __str__(self) -> str:
        return "  ".join(
            part for part in (f"{self.scope}/{self.name}" if self.scope else self.name, self.where) if part
        )


_maker: contextvars.ContextVar[str] = contextvars.ContextVar("maker", default="")


@contextlib.contextmanager
def made_by(name: str) -> Iterator[None]:
    """A context manager in which what is made is ``name``'s (:attr:`Note.by`); inside another one, ``outer: name``."""
    outer = _maker.get()
    token = _maker.set(f"{outer}: {name}" if outer else name)
    try:
        yield
    finally:
        _maker.reset(token)


def maker() -> str:
    """Who makes nodes now; "" is the user."""
    return _maker.get()


_listener: contextvars.ContextVar[Callable[[Node], None] | None] = contextvars.ContextVar("listener", default=None)


class listening:
    """A context manager in which ``listener`` is called with every node that :func:`make` returns."""

    def __init__(self, listener: Callable[[Node], None]):
        self.listener = listener

    def __enter__(self) -> Self:
        self.token = _listener.set(self.listener)
        return self

    def __exit__(self, *error: object) -> None:
        _listener.reset(self.token)


def identity(value: Any) -> Any:
    """A key that distinguishes 0.0 from -0.0, 1 from True, and NaNs with different bits."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, tuple):
        return tuple(identity(v) for v in value)
    return (type(value).__name__, value)


NUMPY_NAMES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "negative": "neg",
    "power": "pow",
    "absolute": "abs",
    "rint": "round",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "concatenate": "concat",
    "clip": "clamp",
    "take": "gather",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "tan2", "sinh", "cosh", "tanh")},
}
"""NumPy's name of a function -> the op's name, if they differ."""


class Node:
    """A value of ``type``: ``op`` applied to ``operands`` with ``attrs``.  Created by :func:`make` only."""

    __slots__ = ("__weakref__", "attrs", "op", "operands", "type")

    op: Any
    operands: tuple[Node, ...]
    attrs: Mapping[str, Any]
    type: Type

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a node cannot be changed: {name}")

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return self.type.rank

    def __repr__(self) -> str:
        name = self.attrs.get("name", "") if self.op.name == "input" else ""
        return f"<{self.op.name}{' ' + name if name else ''}: {self.type}>"

    def __bool__(self) -> bool:
        raise TypeRuleError(f"a traced {self.type} has no truth value: Python cannot branch on data; use ops.where")

    def __iter__(self) -> Iterator[Node]:
        if not self.shape or not isinstance(self.shape[0], int):
            raise TypeRuleError(f"a traced {self.type} can only be iterated along a constant first axis")
        return (self[i] for i in range(self.shape[0]))

    def __len__(self) -> int:
        if not self.shape or not isinstance(self.shape[0], int):
            raise TypeRuleError(f"a traced {self.type} has no length Python could know; x.shape[0] is a size")
        return self.shape[0]

    def __float__(self) -> float:
        raise TypeRuleError(f"a traced {self.type} is not a number yet: float() and int() need data")

    __int__ = __float__
    __complex__ = __float__

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeRuleError(
            f"a traced {self.type} cannot be written into; ops.where, ops.concat and ops.scatter_add make new values"
        )

    # -- NumPy: its elementwise functions are the ops of that name, array + node among them; nothing else of it is
    # traced

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Node:
        name = NUMPY_NAMES.get(ufunc.__name__, ufunc.__name__)
        if method != "__call__" or options or name not in REGISTRY:
            called = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            option = f"({next(iter(options))}=)" if options else ""
            raise TypeRuleError(f"numpy.{called}{option} cannot be traced; gradc.ops has what can")
        return call(name, *operands)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Node:
        name = NUMPY_NAMES.get(function.__name__, function.__name__)
        raise TypeRuleError(
            f"numpy.{function.__name__} was given a traced {self.type};"
            f" {f'ops.{name}' if name in REGISTRY else 'gradc.ops'} can be traced"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeRuleError(f"a traced {self.type} has no data yet that NumPy could take")

    # -- writing graphs: each operator is the op of that name ----------------------------------------------------------

    def __add__(self, other: Any) -> Node:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return call("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return call("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return call("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return call("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return call("div", self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return call("div", other, self)

    def __floordiv__(self, other: Any) -> Node:
        return call("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Node:
        return call("floordiv", other, self)

    def __mod__(self, other: Any) -> Node:
        return call("mod", self, other)

    def __rmod__(self, other: Any) -> Node:
        return call("mod", other, self)

    def __pow__(self, other: Any) -> Node:
        return call("pow", self, other)

    def __rpow__(self, other: Any) -> Node:
        return call("pow", other, self)

    def __matmul__(self, other: Any) -> Node:
        return call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Node:
        return call("matmul", other, self)

    def __neg__(self) -> Node:
        return call("neg", self)

    def __pos__(self) -> Node:
        return self

    def __abs__(self) -> Node:
        return call("abs", self)

    def __and__(self, other: Any) -> Node:
        return call("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Node:
        return call("bitwise_and", other, self)

    def __or__(self, other: Any) -> Node:
        return call("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Node:
        return call("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Node:
        return call("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Node:
        return call("bitwise_xor", other, self)

    def __invert__(self) -> Node:
        return call("invert", self)

    def __lt__(self, other: Any) -> Node:
        return call("lt", self, other)

    def __le__(self, other: Any) -> Node:
        return call("le", self, other)

    def __gt__(self, other: Any) -> Node:
        return call("gt", self, other)

    def __ge__(self, other: Any) -> Node:
        return call("ge", self, other)

    def __eq__(self, other: Any) -> Any:
        return call("eq", self, other) if _comparable(other) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return call("ne", self, other) if _comparable(other) else NotImplemented

    __hash__ = object.__hash__

    @property
    def T(self) -> Node:
        """The matrix transpose: the last two axes swapped."""
        if self.rank < 2:
            return self
        return call("transpose", self, (*range(self.rank - 2), self.rank - 1, self.rank - 2))

    def __getitem__(self, key: Any) -> Node:
        return call("getitem", self, key)

    def astype(self, dtype: Any) -> Node:
        return call("cast", self, dtype)

    def reshape(self, *shape: Any) -> Node:
        return call("reshape", self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)

    def transpose(self, *axes: int) -> Node:
        return call("transpose", self, axes or None)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Node:
        return call("sum", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Node:
        return call("mean", self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Node:
        return call("max", self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Node:
        return call("min", self, axis=axis, keepdims=keepdims)


def identical(nodes: Iterable[Node], others: Iterable[Node]) -> bool:
    """Whether two sequences hold the same nodes in the same order."""
    nodes, others = tuple(nodes), tuple(others)
    return len(nodes) == len(others) and all(map(operator.is_, nodes, others))


def _comparable(other: Any) -> bool:
    """Whether ``==`` with it compares values; None, a str and the like are just not equal to a traced value."""
    return isinstance(other, Node | bool | int | float | list | Dim) or hasattr(other, "__array__")


def call(name: str, *operands: Any, **attrs: Any) -> Node:
    """``ops.NAME(*operands, **attrs)``, with the op looked up by name."""
    result: Node = REGISTRY[name](*operands, **attrs)
    return result


def make(op: Any, operands: Iterable[Node], attrs: Mapping[str, Any], type: Type) -> Node:
    """The unique node with this op, operands, attributes and type; created if it does not exist."""
    operands = tuple(operands)
    attrs = dict(sorted(attrs.items()))
    key = (id(op), tuple(id(o) for o in operands), identity(tuple(attrs.values())), type)
    node = _interned.get(key)
    if node is None:
        node = object.__new__(Node)
        for slot, value in (("op", op), ("operands", operands), ("attrs", MappingProxyType(attrs)), ("type", type)):
            object.__setattr__(node, slot, value)
        node = _interned.setdefault(key, node)
    listener = _listener.get()
    if listener is not None:
        listener(node)
    return node
