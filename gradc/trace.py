"""Tracing: builds a graph by calling a Python function on symbolic values.

>>> graph = trace(lambda x, w: ops.relu(x @ w), x="f32[N,4]", w="f32[4,3]")
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import ops, pickles
from .errors import TypeRuleError
from .ir.dims import STATED, Assumption, assume_from_here, assuming, known_nonnegative
from .ir.graph import Graph, check_name, input_node
from .ir.node import Node, Note, listening
from .ir.operands import CAPTURE
from .ir.size_text import parse_assumption
from .ir.types import Type, parse_type, typeof
from .ir.walk import topological

pickles.register()
_PACKAGE = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), ""
)  # a checkout's directory may be called gradc too
_DEMO = os.path.join(_PACKAGE, "demo", "")

_DEEPEST = 100  # levels of nested parameters: a name has at most 200 characters

_scopes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("scopes", default=())


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """A context manager: values created in it are shown as ``name/...`` in dumps."""
    token = _scopes.set((*_scopes.get(), check_name(name)))
    try:
        yield
    finally:
        _scopes.reset(token)


def assume(fact: str | Assumption) -> None:
    """In a traced function, states a fact about dims: ``"N >= 1"`` or ``"N == 4*M"``.  It becomes an assumption of the
    graph, holds for the ops that follow, and is checked at each call.
    """
    facts = STATED.get()
    if facts is None:
        raise TypeRuleError(
            "assume() stands inside a traced function; gradc.trace(..., assume=[...]) states it from outside"
        )
    stated = parse_assumption(fact) if isinstance(fact, str) else fact
    facts.append(stated)
    assume_from_here(stated)


# -- nested parameters -------------------------------------------------------------------------------------------------


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict, list, tuple or dataclass by their dotted names: ``{"l1.w": leaf}``.

    :raises TypeRuleError: two leaves have the same name, or the structure contains itself or is nested too deeply.
    """
    return _flattened(tree, prefix, ())


@functools.lru_cache(1024)
def _is_leaf(kind: type) -> bool:
    """Whether instances of a class hold no others, as far as trees go."""
    if dataclasses.is_dataclass(kind):
        return issubclass(kind, type | Type)
    return not issubclass(kind, Mapping | list | tuple | types.NoneType)


def _flattened(tree: Any, prefix: str, around: tuple[int, ...]) -> dict[str, Any]:
    if id(tree) in around:
        raise TypeRuleError(f"the parameters hold themselves: {prefix[:60]!r} is what it lies in")
    if len(around) > _DEEPEST:
        raise TypeRuleError(f"parameters nested {len(around)} deep below {prefix[:60]!r}: {_DEEPEST} is the most")
    items: list[tuple[str, Any]]
    if isinstance(tree, Mapping):
        items = [(str(k), v) for k, v in tree.items()]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | Type):
        items = [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    elif isinstance(tree, list | tuple):
        items = [(str(i), v) for i, v in enumerate(tree)]
    elif tree is None:  # an absent parameter
        return {}
    else:
        return {prefix: tree}
    out: dict[str, Any] = {}
    inside = (*around, id(tree))
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else key
        if _is_leaf(value.__class__) and name not in out:  # most are: a training step calls this for each array
            out[name] = value
            continue
        below = _flattened(value, name, inside)
        twice = out.keys() & below.keys()
        if twice:
            raise TypeRuleError(
                f"two leaves are called {min(twice)!r}: a key of the parameters reads like a path, or like another key"
            )
        out |= below
    return out


def unflatten(tree: Any, leaves: Mapping[str, Any], prefix: str = "") -> Any:
    """The structure of ``tree`` with its leaves replaced by ``leaves``, which are keyed as by :func:`flatten`."""
    join = lambda key: f"{prefix}.{key}" if prefix else str(key)
    if isinstance(tree, Mapping):
        return {k: leaves[join(k)] if _is_leaf(v.__class__) else unflatten(v, leaves, join(k)) for k, v in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | Type):
        return dataclasses.replace(
            tree, **{f.name: unflatten(getattr(tree, f.name), leaves, join(f.name)) for f in dataclasses.fields(tree)}
        )
    if isinstance(tree, list | tuple):
        filled = [unflatten(v, leaves, join(i)) for i, v in enumerate(tree)]
        return tree.__class__(*filled) if hasattr(tree, "_fields") else tree.__class__(filled)
    return None if tree is None else leaves[prefix]


def as_type(leaf: Any) -> Type:
    """A type from ``"f32[N]"``, a Type, or an array."""
    if isinstance(leaf, Type):
        return leaf
    return parse_type(leaf) if isinstance(leaf, str) else typeof(leaf)


def said_of_numbers(error: TypeRuleError, leaves: Mapping[str, Any]) -> TypeRuleError:
    """The error with a hint which inputs are plain Python numbers, whose dtype may not be the intended one."""
    numbers = [
        f"{name}={value!r} is {typeof(value)}"
        for name, value in leaves.items()
        if isinstance(value, bool | int | float)
    ]
    if not numbers:
        return error
    return type(error)(
        f"{error}; the Python number {', '.join(numbers)} here, an input like any other: give it as an array of the"
        " dtype it meets, or leave it out of the parameters, and it is a constant"
    )


# -- tracing -----------------------------------------------------------------------------------------------------------


def trace(
    fn: Callable[..., Any],
    inputs: Mapping[str, Any] | None = None,
    /,
    *,
    assume: Sequence[str] = (),
    name: str = "",
    **types: Any,
) -> Graph:
    """Calls ``fn`` once on symbolic values and records what it computes as a graph.

    :param inputs: of ``types``, those that are not given as keywords (a parameter may be called ``name``).
    :param types: for each parameter ``"f32[N,4]"``, a Type, an array, or a nested dict/list/dataclass of these; names
        of nested leaves are joined by dots: ``params.l1.w``.
    :param assume: facts about dims, such as ``"N >= 1"``.
    :raises TypeRuleError: an op rejects its operands, or ``fn`` returns something that is not a traced value.
    """
    assert ops.REGISTRY  # importing ops registers ``input``
    signature = inspect.signature(fn)
    spread = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    if spread is not None:
        raise TypeRuleError(
            f"{getattr(fn, '__name__', 'the function')}{signature}: inputs have names; a list as one parameter takes"
            f" what *{spread} would"
        )
    facts = [parse_assumption(text) for text in assume]
    arguments: dict[str, Any] = {}
    nodes: list[Node] = []
    types = {**(inputs or {}), **types}
    for parameter, tree in types.items():
        leaves = {key: input_node(check_name(key), as_type(leaf)) for key, leaf in flatten(tree, parameter).items()}
        nodes += leaves.values()
        arguments[parameter] = unflatten(tree, leaves, parameter)
    recorder = _Recorder(fn)
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise TypeRuleError(f"{getattr(fn, '__name__', 'the function')}{signature}: {error}") from None
    tokens = STATED.set(facts)
    try:
        with recorder, assuming(facts):
            result = fn(*bound.args, **bound.kwargs)
            outputs = _outputs(result)
    except TypeRuleError as error:
        said = said_of_numbers(error, flatten(types))
        if said is error:
            raise
        raise said from None
    else:
        facts += implied(outputs.values(), facts)
    finally:
        STATED.reset(tokens)
    title = name or getattr(fn, "__name__", "graph")
    return Graph(
        name=title if title.isidentifier() else "graph",
        inputs=(*nodes, *recorder.captured),
        outputs=tuple(outputs.items()),
        assumptions=tuple(facts),
        notes=recorder.notes,
        defaults=recorder.defaults,
    )


def implied(outputs: Iterable[Node], facts: Sequence[Assumption]) -> list[Assumption]:
    """What the ops take for granted of the dims (a padding row that exists), beyond what is known."""
    implied: list[Assumption] = []
    for node in topological(outputs):
        for fact in node.op.implies(node) if node.op.implies is not None else ():
            with assuming([*facts, *implied]):
                if not known_nonnegative(fact.left - fact.right):
                    implied.append(fact)
    return implied


def _outputs(result: Any) -> dict[str, Node]:
    if isinstance(result, Node):
        return {"y": result}
    if isinstance(result, tuple | list):
        leaves = {
            f"y{key.replace('.', '_')}" if key[0].isdigit() else key: leaf
            for key, leaf in flatten(list(result)).items()
        }
    else:
        leaves = flatten(result)
    for key, leaf in leaves.items():
        if not isinstance(leaf, Node):
            raise TypeRuleError(
                f"the traced function returned {type(leaf).__name__} as {key or 'its result'}, not a traced value"
            )
    if not leaves:
        raise TypeRuleError("the traced function returned nothing")
    return leaves


class _Recorder:
    """While active, records names and source locations of values, and turns large arrays into inputs with defaults."""

    def __init__(self, fn: Callable[..., Any]):
        self.code = getattr(fn, "__code__", None)
        self.notes: dict[Node, Note] = {}
        self.captured: list[Node] = []
        self.defaults: dict[str, np.ndarray[Any, Any]] = {}
        self.met: list[tuple[np.ndarray[Any, Any], Node]] = []
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Recorder:
        self.stack.enter_context(listening(self.heard))
        CAPTURE.append(self.capture)
        self.previous = sys.getprofile()
        if self.previous is None and self.code is not None:
            sys.setprofile(self.profile)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.previous is None:
            sys.setprofile(None)
        CAPTURE.pop()
        self.stack.close()

    def heard(self, node: Node) -> None:
        if node in self.notes:
            return
        frame: Any = sys._getframe(1)
        while (
            frame is not None
            and frame.f_code.co_filename.startswith(_PACKAGE)
            and not frame.f_code.co_filename.startswith(_DEMO)
        ):
            frame = frame.f_back
        where = code = ""
        if frame is not None:
            path = frame.f_code.co_filename
            where = f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.f_lineno}"
            code = linecache.getline(path, frame.f_lineno).strip()
        self.notes[node] = Note("", where, "/".join(_scopes.get()), code=code)

    def profile(self, frame: Any, event: str, _: Any) -> None:
        """A profile hook: when the traced function returns, values are named after its local variables."""
        if event == "return" and frame.f_code is self.code:
            for variable, value in frame.f_locals.items():
                if isinstance(value, Node) and value in self.notes and not self.notes[value].name:
                    self.notes[value] = dataclasses.replace(self.notes[value], name=variable)

    def capture(self, array: np.ndarray[Any, Any]) -> Node:
        for known, made in self.met:
            if known is array:
                return made
        node = input_node(f"captured{len(self.captured)}", typeof(array))
        self.captured.append(node)
        self.met.append((array, node))
        frozen = array.copy()  # a constant: later changes of the array must have no effect
        frozen.flags.writeable = False
        self.defaults[str(node.attrs["name"])] = frozen
        return node
