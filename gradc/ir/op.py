"""The records that define ops, and what calling an op does.

Filling in a record registers the op, makes it callable as ``ops.NAME``, documents it and creates its tests.  There are
four kinds: a :class:`Primitive` has a meaning and a lowering of its own, a :class:`Composite` is made of other ops, a
:class:`Library` op is a call of a library function (a matrix product, a sort), and a :class:`Function` writes other ops
where it is called and leaves no node.  What a pass may know of an op is a field
of its record; outside ``ops/`` only declared rewrite patterns and exact algebra name one.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import GradcError, InternalError, TypeRuleError
from ..process.forks import cached_property
from .annotations import REFUSED, converter, describe
from .arguments import lifted, meant, renamed, separate, signature_text
from .dims import Assumption, Size
from .node import REGISTRY, Node, make
from .operands import adopt
from .properties import Access
from .ranges import Range, inside
from .types import Type, shown, typeof


class _Mark:
    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


ZERO = _Mark("ZERO")
"""A vjp entry: the derivative exists and is zero (floor, sign, comparisons)."""
DISCRETE = _Mark("DISCRETE")
"""A vjp entry: the operand is discrete (an index, a predicate) and has no derivative."""


# -- how a primitive becomes kernel statements -------------------------------------------------------------------------


@dataclass(frozen=True)
class Expr:
    """A pointwise scalar expression in C: ``Expr("{0} * {1}")``; ``name(...)`` resolves to ``name_<dtype>`` of
    ``templates/*/math.h``.  Integers stand as they are, and take the operands' type; a decimal would make C compute in
    f64, so that it is refused: ``{0} / 2``, or an attribute.

    :param cost: in units of one addition.
    :param by_kind: a different text for operands of a dtype kind (``b``, ``i``, ``u``, ``f``).
    :param conversion: the op is the identity if the result's dtype holds all values of the operand's.
    """

    text: str
    cost: int = 1
    conversion: bool = False
    by_kind: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in (self.text, *self.by_kind.values()):
            if re.search(r"(?<![\w.])(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?(?![\w.])", text):
                raise TypeRuleError(f"Expr({text!r}): a decimal makes C compute in f64; write a quotient of integers")


@dataclass(frozen=True)
class Movement:
    """Each result element is read from an operand: ``at(index, node, kernel) -> value``.

    ``at`` receives one :class:`gradc.ir.statement.Index` per result axis and a statement builder with ``read(operand,
    index, where, other)``, ``in_bounds(index, lo, hi)``, ``select``; it returns a value of the builder.  No copy of the
    operand is made.
    """

    at: Callable[..., Any]


@dataclass(frozen=True)
class Reduction:
    """A combine along ``attrs["axis"]``: sum, prod, max, min, argmax, argmin.

    :param nonempty: reducing no elements is an error, unless the attribute ``empty`` allows it.
    """

    combine: str
    nonempty: bool = False


@dataclass(frozen=True)
class Scan:
    """For each position along ``attrs["axis"]`` the combination of all elements up to it, itself included; from the end
    on where ``attrs["reverse"]`` is true.

    :param combine: one of :data:`gradc.ir.statement.SCANS`.
    """

    combine: str


@dataclass(frozen=True)
class Scatter:
    """Elements of the operand number ``updates`` are combined into the result at ``at(index, node, kernel)``.

    ``at`` maps an index into the updates to ``(result index, mask)``.

    :param combine: ``sum``, ``prod``, ``max`` or ``min``; result elements without an update are
        :func:`gradc.ir.statement.neutral`.
    :param positions: ``(node) -> axes``: which axes of the updates the axes of each index operand are, in order: an
        update is at the position that stands there.  Without it no pass takes the scatter apart, unless the op has the
        property :class:`gradc.ir.properties.Scatters`.
    """

    at: Callable[..., Any]
    updates: int = 0
    combine: str = "sum"
    positions: Callable[[Node], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Lookup:
    """Each result element is computed from its index by reading operands, as a search does.  ``at`` as in
    :class:`Movement`, but its value is not an element of an operand.

    :param mixes: it is computed from several elements of one operand.
    """

    at: Callable[..., Any]
    mixes: bool = False


@dataclass(frozen=True)
class Alias:
    """The operand's bytes with another shape (reshape); ``at`` as in :class:`Movement`, but may return None if the
    index would need a division.
    """

    at: Callable[..., Any]


@dataclass(frozen=True)
class Checked(Alias):
    """The operand's bytes, after a separate kernel has checked that each element is in [0, ``attrs["bound"]``); readers
    are scheduled after that kernel.
    """


# -- samples: the cases from which an op's tests are generated ---------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A valid call: operand types (or arrays), attributes and how to draw values.

    :param operands: types such as ``"f32[N,4]"``, where ``F`` stands for every float dtype the op takes, or constant
        arrays.
    :param draw: per operand one of ``normal positive above_one unit nonzero index:N bool int distinct``, by default
        ``normal``.
    """

    operands: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    draw: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BadSample:
    """A call that must raise ``error`` with the text ``match`` in its message, letter by letter."""

    operands: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    match: str = ""
    error: type[GradcError] = TypeRuleError


@dataclass(frozen=True)
class Parameter:
    """One attribute of an op, as declared by the annotation in the type rule."""

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty

    def check(self, value: Any) -> Any:
        """The value in canonical form, or TypeRuleError."""
        canonical = self._convert(value)
        if canonical is REFUSED:
            raise TypeRuleError(f"{self.name}={_short(value)} is not {describe(self.annotation)}")
        return canonical

    @cached_property
    def _convert(self) -> Callable[[Any], Any]:
        return converter(self.annotation)

    @cached_property
    def canonical_default(self) -> Any:
        """The default in canonical form; the parameter has one."""
        return self._convert(self.default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


AxisReplacement = tuple[tuple[int | tuple[Size, ...], ...], Mapping[str, Any]]
"""(per operand the axis to replace, or the shape to broadcast it to; the attributes)."""


# -- the records -------------------------------------------------------------------------------------------------------


_builtin: weakref.WeakSet[Op] = weakref.WeakSet()


def _importing() -> str:
    """The name of the module whose statements make a record, now, be it by a function of another one; "" if none do."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>":
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class _Documentation:
    """``__doc__`` of a class of records: the class's own text; of a record what ``help(ops.NAME)`` shall show."""

    def __init__(self, text: str | None):
        self.text = text

    def __get__(self, op: Op | None, owner: type) -> str | None:
        return self.text if op is None else op.documentation


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """The fields common to all ops.

    :param infer: the type rule ``(*types, **attrs) -> Type`` or ``-> (Type, canonical attrs)``; its positional
        parameters are the operands, its annotated keyword-only parameters are the attributes.
    :param vjp: ``(g, y, *operands, **attrs)`` -> one node, ``ZERO`` or ``DISCRETE`` per operand.
    :param access: ``(node) -> property``: which of the data movements of :mod:`gradc.ir.properties` the node is (a
        gather along an axis, a sum into positions, a slice...), or None.  Passes rewrite it as they do the package's
        own op of that kind, which must have the same derivative, too.
    :param multilinear: ``(node) -> {operand: axis map}``: the operands the op is linear in; the map gives for each
        operand axis the result axis it becomes, or None if it is mixed (summed, gathered).  The op is linear in each of
        them with the others fixed (mul), unless ``linear``.
    :param linear: linear in those operands jointly, not separately (add, where, concat): a scale of one operand can be
        moved past the op only if the others are zero.
    :param fills: result elements may be 0, or another operand's, independently of the operand (pad, where, a read out
        of bounds): a scale can be moved past the op only if 0 times it is certainly 0.  Not if its attribute ``oob`` is
        "error".
    :param replace_axis: ``(node, axis, sizes) -> (operands, attrs) or None``: how to compute the result with ``axis``
        replaced by axes of ``sizes``; an operand's entry is the operand axis to replace likewise, or, if the operand
        does not vary along it, the shape to broadcast it to.  None if ``axis`` is not a single axis of the operands.
        Pointwise primitives need none.
    :param broadcast: operands are first broadcast to one shape, as in NumPy.
    :param surrogate: the function that the vjp differentiates, if that is not the op itself (straight-through).
    :param order: the names of operands and attributes in call order, if that is not operands first.
    :param indices: ``{operand: (node) -> bound}``: the operands that are data-dependent positions in [0, bound); with
        the attribute ``oob="error"`` they are checked before any kernel reads through them (pass ``check_indices``).
    :param implies: ``(node) -> assumptions``: what its attributes require of the dims; they become assumptions of a
        traced graph.
    :param within: ``(node, *ranges) -> range``: of the elements of its integer result, from those of its operands, if
        nothing wraps (:func:`gradc.ir.node_ranges.range_of`).
    :param ascending: the operands among ``indices`` that must also begin with 0 and never decrease.
    :param omitted: ``{operand: (type of the first operand, **attrs) -> node}``: what stands for an optional operand
        that is None where a later one is given.
    :param sugar: what a call with NumPy's comforts (keepdims, -1, negative axes...) means, in this op's and other ops'
        plain forms.
    :param decompose: ``(*nodes, **attrs) -> node``: what the op is made of: a composite always, a library op where the
        target has no such function.
    :param differentiable: of an op with ``decompose`` and without a vjp, its decomposition is differentiated; False:
        nothing is, as in a primitive.
    :param cheaper: of an op with ``decompose``, ``(sizes of symbols, *nodes, **attrs) -> node`` of the same value over
        the reals that takes a CPU less time, or None.
    """

    name: str
    infer: Callable[..., Any] | None = field(default=None, kw_only=True)
    vjp: Callable[..., Any] | None = field(default=None, kw_only=True)
    samples: Sequence[Sample] = field(default=(), kw_only=True)
    bad: Sequence[BadSample] = field(default=(), kw_only=True)
    multilinear: Callable[[Node], Mapping[int, tuple[int | None, ...]]] | None = field(default=None, kw_only=True)
    linear: bool = field(default=False, kw_only=True)
    access: Callable[[Node], Access | None] | None = field(default=None, kw_only=True)
    fills: bool = field(default=False, kw_only=True)
    replace_axis: Callable[[Node, int, tuple[Size, ...]], AxisReplacement | None] | None = field(
        default=None, kw_only=True
    )
    broadcast: bool = field(default=False, kw_only=True)
    surrogate: Callable[..., Any] | None = field(default=None, kw_only=True)
    order: tuple[str, ...] = field(default=(), kw_only=True)
    indices: Mapping[int, Callable[[Node], Size]] = field(default_factory=dict, kw_only=True)
    within: Callable[..., Range] | None = field(default=None, kw_only=True)
    implies: Callable[[Node], Sequence[Assumption]] | None = field(default=None, kw_only=True)
    ascending: tuple[int, ...] = field(default=(), kw_only=True)
    omitted: Mapping[str, Callable[..., Node]] = field(default_factory=dict, kw_only=True)
    sugar: Callable[..., Node] | None = field(default=None, kw_only=True)
    decompose: Any = field(default=None, kw_only=True)
    differentiable: bool = field(default=True, kw_only=True)
    cheaper: Callable[..., Node | None] | None = field(default=None, kw_only=True)
    doc: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True)

    def __init_subclass__(cls) -> None:
        cls.__doc__ = _Documentation(cls.__doc__)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        REGISTRY[self.name] = self
        if _importing().partition(".")[0] == __name__.partition(".")[0]:
            _builtin.add(self)

    @property
    def is_builtin(self) -> bool:
        """Whether a module of gradc made the record where it was imported, so that the name stands for it."""
        return self in _builtin

    def __repr__(self) -> str:
        return f"<op {self.name}{signature_text(self.__signature__)}>"

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def documentation(self) -> str:
        """The call, what it means, where that is from."""
        parts = (f"{self.name}{signature_text(self.__signature__)}", self.doc and f"{self.doc}.", self.source)
        return "\n\n".join(filter(None, parts))

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def _rule(self) -> Callable[..., Any]:
        if self.infer is None:
            raise InternalError(f"op {self.name} has no type rule")
        return self.infer

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in inspect.signature(self._rule()).parameters.values() if p.kind in kinds)

    @cached_property
    def variadic(self) -> bool:
        return any(
            p.kind is inspect.Parameter.VAR_POSITIONAL for p in inspect.signature(self._rule()).parameters.values()
        )

    @cached_property
    def required(self) -> int:
        parameters = inspect.signature(self._rule()).parameters
        return sum(parameters[name].default is inspect.Parameter.empty for name in self.operand_names)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The attributes: name -> Parameter, in the type rule's order."""
        rule = self._rule()
        hints = typing.get_type_hints(rule)
        signature = inspect.signature(rule)
        return {
            p.name: Parameter(p.name, hints.get(p.name, Any), p.default)
            for p in signature.parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }

    @cached_property
    def call_order(self) -> tuple[str, ...]:
        return self.order or (*self.operand_names, *self.parameters)

    @cached_property
    def __signature__(self) -> inspect.Signature:
        if self.sugar is not None:
            return inspect.signature(self.sugar)
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = []
        given = inspect.signature(self._rule()).parameters
        if self.variadic:
            parameters.append(inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        for name in self.call_order:
            default = given[name].default
            if (
                parameters
                and default is inspect.Parameter.empty
                and parameters[-1].default is not inspect.Parameter.empty
            ):
                kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=default))
        return inspect.Signature(parameters)

    def __call__(self, *positional: Any, **keywords: Any) -> Node:
        _no_huge_integer(self.name, (*positional, *keywords.values()))
        if keywords:
            keywords = renamed(self.name, self.__signature__.parameters, keywords)
        if self.sugar is None:
            return self.plain(*positional, **keywords)
        try:
            return self.sugar(*positional, **keywords)
        except TypeRuleError as error:
            raise _located(error, self.name, _node_types(positional)) from None
        except (TypeError, AttributeError):
            bound = lifted(self.name, self.__signature__, positional, keywords)
            if bound is None:
                raise
        return self(*bound.args, **bound.kwargs)

    def plain(self, *positional: Any, **keywords: Any) -> Node:
        """The call without ``sugar``: operands, then attributes."""
        operands, attrs = self._bind(positional, keywords)
        try:
            nodes = adopt(self.name, operands, broadcasting=self.broadcast)
        except TypeRuleError as error:
            raise _located(error, self.name, _node_types(operands)) from None
        return self.apply(nodes, attrs)

    def _bind(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        if self.variadic:
            separated, named = separate(self.name, positional, keywords, tuple(self.parameters))
            return list(separated), self._check_names(named)
        order = self.call_order
        if self.order:  # an attribute between operands is skipped if it is given by name
            order = tuple(name for name in order if name not in keywords or name not in self.parameters)
        if len(positional) > len(order):
            got = len(positional) + len(self.call_order) - len(order)
            raise TypeRuleError(
                f"{self.name}{signature_text(self.__signature__)}: takes {len(self.call_order)} arguments, got {got}"
            )
        given = dict(zip(order, positional, strict=False))
        twice = given.keys() & keywords.keys()
        if twice:
            raise TypeRuleError(f"{self.name}: {min(twice)} is given twice")
        given |= keywords
        operands = [given.pop(name, None) for name in self.operand_names]
        while operands and operands[-1] is None:
            operands.pop()
        for k, name in enumerate(self.operand_names[: len(operands)]):
            if operands[k] is None and (name not in self.omitted or operands[0] is None):
                raise TypeRuleError(f"{self.name}: operand {name} is missing")
            if operands[k] is None:
                first = operands[0]
                operands[k] = self.omitted[name](first.type if isinstance(first, Node) else typeof(first), **given)
        if len(operands) < self.required:
            raise TypeRuleError(
                f"{self.name} needs {self.required} operands ({', '.join(self.operand_names)}), got {len(operands)}"
            )
        return operands, self._check_names(given)

    def _check_names(self, attrs: dict[str, Any]) -> dict[str, Any]:
        unknown = attrs.keys() - self.parameters.keys()
        if unknown:
            known = ", ".join(self.parameters) or "none"
            raise TypeRuleError(
                f"{self.name} has no attribute {min(unknown)!r}; it has {known}{meant(min(unknown), self.call_order)}"
            )
        return attrs

    def apply(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Node:
        """The node of this op on operands that are nodes of matching dtype and shape; checked by the type rule."""
        type_, canonical = self.type_of([o.type for o in operands], attrs)
        return make(self, operands, canonical, type_)

    def type_of(self, types: Sequence[Type], attrs: Mapping[str, Any]) -> tuple[Type, dict[str, Any]]:
        """The result's type and the canonical attributes; TypeRuleError names op, operand types and both numbers."""
        try:
            checked = {
                name: parameter.check(attrs[name]) for name, parameter in self.parameters.items() if name in attrs
            }
            for name, parameter in self.parameters.items():
                if name not in checked:
                    if parameter.default is inspect.Parameter.empty:
                        raise TypeRuleError(f"attribute {name} is missing")
                    checked[name] = parameter.canonical_default
            most = len(types) if self.variadic else len(self.operand_names)
            if not self.required <= len(types) <= most:
                raise TypeRuleError(f"takes {self.required} to {most} operands, got {len(types)}")
            answer = self._rule()(*types, **checked)
        except TypeRuleError as error:
            raise _located(error, self.name, types) from None
        return answer if isinstance(answer, tuple) else (answer, checked)


Op.__doc__ = _Documentation(Op.__doc__)  # type: ignore[assignment]
_MOST = int(np.finfo(np.float64).max)


def _no_huge_integer(name: str, values: Iterable[Any]) -> None:
    """Rejects integers beyond the range of f64: no dtype or attribute holds them, and Python refuses to print them."""
    for value in values:
        if isinstance(value, tuple | list):
            _no_huge_integer(name, value)
        elif isinstance(value, slice):
            _no_huge_integer(name, (value.start, value.stop, value.step))
        elif isinstance(value, int) and not -_MOST <= value <= _MOST:
            raise TypeRuleError(f"{name}: {shown(value)} fits no dtype; the largest f64 has 1024")


def _node_types(operands: Iterable[Any]) -> list[Type]:
    return [o.type for o in operands if isinstance(o, Node)]


def _located(error: TypeRuleError, name: str, types: Iterable[Type], *, writes: bool = False) -> TypeRuleError:
    """The error prefixed with the op and its operand types, unless its message begins with an op already; of an op that
    writes others (``writes``) with itself.
    """
    said, matched = str(error), re.match(r"(\w+)[(:]", str(error))
    if (matched and (matched[1] == name or (matched[1] in REGISTRY and not writes))) or said.startswith(f"{name} "):
        return error
    return type(error)(f"{name}({', '.join(map(str, types))}): {said}")


@dataclass(frozen=True, eq=False, repr=False)
class Primitive(Op):
    """An op with a NumPy implementation ``reference(*arrays, **attrs)`` and a lowering to kernel statements."""

    reference: Any = field(default=None, kw_only=True)
    lower: Any = field(default=None, kw_only=True)
    in_place_of_dtype: bool = field(
        default=False, kw_only=True
    )  # needs no wider compute dtype, so the pass upcast leaves it alone (cast, where, movement)


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Op):
    """An op defined by other ops: ``decompose(*nodes, **attrs) -> node``."""


@dataclass(frozen=True, eq=False, repr=False)
class Library(Op):
    """An op computed by a library call.  What the function is on a target, ``CALLS`` of that target says
    (:mod:`gradc.codegen.cpu.calls`, :mod:`gradc.codegen.cuda.calls`).  One with ``decompose`` is made of other ops
    where the target has no such function, or where it does not pay.

    :param axes: ``(node) -> (axes, index per operand, index of the result)``: the call with named axes.
    :param views: ``(axes of the result, the other axes) -> axes of each operand``, in the operand's own order.
    :param contraction: the function adds up products over the axes that its result lacks.
    :param converts: the operands of narrower dtypes that it converts to the result's as it reads them, :param scales:
        and those that it scales; both of a contraction.
    :param multiplies: the function is a matrix product, which uses all threads.
    :param attributes: ``(shape of the result) -> attributes``: those of the node that a call does not carry.
    :param carries: the names of those that it does: numbers, which no size is part of.
    :param pays: ``(node) -> bool``: of an op with ``decompose``, whether the function is to compute it where there is
        one.
    :param channels_last: the function also writes its result with axis 1 behind all others.
    :param positions_in: the operand along whose last axis the result's elements are positions.
    :param sorts: the operand along whose last axis the function sorts, with positions and counts of 32 bits.
    :param row_major: the function reads arrays as they lie in memory, without strides.
    :param updates: the operand that the result is but for some elements: it may lie where that does, and these alone
        are written then.
    """

    reference: Any = field(default=None, kw_only=True)
    axes: Any = field(default=None, kw_only=True)
    views: Callable[[list[str], list[str]], tuple[tuple[str, ...], ...]] = field(default=None, kw_only=True)  # type: ignore[assignment]
    contraction: bool = field(default=False, kw_only=True)
    converts: tuple[int, ...] = field(default=(), kw_only=True)
    scales: tuple[int, ...] = field(default=(), kw_only=True)
    multiplies: bool = field(default=False, kw_only=True)
    attributes: Callable[[tuple[Any, ...]], Mapping[str, Any]] = field(default=lambda shape: {}, kw_only=True)
    carries: tuple[str, ...] = field(default=(), kw_only=True)
    pays: Callable[[Node], bool] = field(default=lambda node: True, kw_only=True)
    channels_last: bool = field(default=False, kw_only=True)
    positions_in: int | None = field(default=None, kw_only=True)
    sorts: int | None = field(default=None, kw_only=True)
    row_major: bool = field(default=False, kw_only=True)
    updates: int | None = field(default=None, kw_only=True)
    in_place_of_dtype: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contraction:
            object.__setattr__(self, "converts", (0, 1))
            object.__setattr__(self, "scales", (0, 1))
        if self.converts:
            object.__setattr__(self, "multiplies", True)
        if (operand := self.positions_in) is not None:
            object.__setattr__(self, "within", lambda node, *_: inside(node.operands[operand].shape[-1]))


@dataclass(frozen=True, eq=False, repr=False)
class Function(Op):
    """An op that writes others where it is called and leaves no node of its own: ``stack``, ``split``, ``conv2d``.

    Operands are the parameters of ``write`` that are annotated as nodes, attributes those annotated otherwise; both are
    checked before it is called.

    :param write: ``(*nodes, **attrs) -> node``, or a tuple of nodes; operands are one variadic parameter, or named.
    """

    write: Callable[..., Any] = field(default=None, kw_only=True)  # type: ignore[assignment]

    def _rule(self) -> Callable[..., Any]:
        raise TypeRuleError(f"{self.name} is no node of a graph: a call of it writes other ops")

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.write)

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.write)

    def _takes_node(self, name: str) -> bool:
        return Node in (typing.get_args(self._hints[name]) or (self._hints[name],))

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.__signature__.parameters if self._takes_node(name))

    @cached_property
    def variadic(self) -> bool:
        return any(p.kind is p.VAR_POSITIONAL for p in self.__signature__.parameters.values())

    @cached_property
    def required(self) -> int:
        return sum(self.__signature__.parameters[n].default is inspect.Parameter.empty for n in self.operand_names)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The attributes: name -> Parameter, in the order of a call."""
        return {
            p.name: Parameter(p.name, self._hints[p.name], p.default)
            for p in self.__signature__.parameters.values()
            if not self._takes_node(p.name)
        }

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        _no_huge_integer(self.name, (*positional, *keywords.values()))
        keywords = renamed(self.name, self.__signature__.parameters, keywords)
        if self.variadic:
            behind = [p.name for p in self.__signature__.parameters.values() if p.kind is p.KEYWORD_ONLY]
            positional, keywords = separate(self.name, positional, keywords, behind, len(self._first))
        try:
            bound = self.__signature__.bind(*positional, **keywords)
        except TypeError:
            lifted(self.name, self.__signature__, positional, keywords)  # raises it in the op's own terms
            raise
        types: list[Type] = []
        try:
            for name, nodes in self._nodes(bound).items():
                bound.arguments[name] = nodes
                types += [n.type for n in (nodes if isinstance(nodes, tuple) else (nodes,))]
            for name, parameter in self.parameters.items():
                if name in bound.arguments and not (
                    bound.arguments[name] is None and parameter.default is None
                ):  # None where it is the default
                    bound.arguments[name] = parameter.check(bound.arguments[name])
            return self.write(*bound.args, **bound.kwargs)
        except TypeRuleError as error:
            raise _located(error, self.name, types, writes=True) from None

    def on(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> Any:
        """The call with these operands, in their order, and attributes by name."""
        if not self.variadic:
            return self(**dict(zip(self.operand_names, operands, strict=False)), **attrs)
        first = self._first
        return self(*(attrs[n] for n in first), *operands, **{n: v for n, v in attrs.items() if n not in first})

    @cached_property
    def _first(self) -> list[str]:
        """The attributes before the operands."""
        return [*itertools.takewhile(lambda n: not self._takes_node(n), self.__signature__.parameters)]

    def _nodes(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """The operands of a call as nodes of it; several of one parameter as a tuple."""
        given = {name: bound.arguments[name] for name in self.operand_names if bound.arguments.get(name) is not None}
        for name in self.operand_names:
            empty = self.__signature__.parameters[name].default is inspect.Parameter.empty
            if not self.variadic and empty and name not in given:
                raise TypeRuleError(f"operand {name} is missing")
        flat = [v for value in given.values() for v in (value if self.variadic else (value,))]
        if all(isinstance(v, Node) for v in flat):
            return given
        nodes = iter(adopt(self.name, flat, broadcasting=False))
        return {n: tuple(next(nodes) for _ in value) if self.variadic else next(nodes) for n, value in given.items()}
