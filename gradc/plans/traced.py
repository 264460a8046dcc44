"""The decorators gradc.graph and gradc.value_and_grad, which infer types at the first call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from .. import knobs
from ..errors import InvalidProblem, TypeRuleError
from ..interp import bind_dims
from ..ir.dims import Size, symbol
from ..ir.graph import Graph
from ..ir.types import DTYPES, Type, typeof
from ..module.gradients import Gradients
from ..module.module import Module
from ..process.forks import held_off
from ..runtime.cuda.on_device import describe
from ..runtime.shared import Shared
from ..trace import flatten, said_of_numbers, trace, unflatten

T = TypeVar("T")


class TracedFunction(Shared):
    """A function that is traced once its types are known, from annotations (``x: "f32[N,4]"``, or for type checkers
    ``x: Annotated[gradc.Node, "f32[N,4]"]``) or from the arrays of the first call.

    Calling it runs the compiled forward; ``.graph`` is its graph, ``.compile(wrt=...)`` gives a module.
    """

    def __init__(self, fn: Callable[..., Any], assume: Sequence[str] = ()):
        functools.update_wrapper(self, fn)
        self.fn, self.facts = fn, tuple(assume)
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError) as error:
            raise InvalidProblem(f"no function whose parameters are known: {error}") from error
        types = {p.name: _annotated_type(p.annotation, fn) for p in self.signature.parameters.values()}
        annotated: dict[str, Any] = {name: type_ for name, type_ in types.items() if type_ is not None}
        self._graph: Graph | None = None
        self._modules: dict[Any, list[tuple[Mapping[str, Type], Any]]] = {}
        if len(annotated) == len(self.signature.parameters):
            self._graph = trace(fn, annotated, assume=self.facts)

    def __reduce__(self) -> str:
        """Pickled by name, like a function."""
        value: Any = sys.modules.get(self.__module__)
        name: str = vars(self)["__qualname__"]
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not self:
            raise InvalidProblem(
                f"{self.__module__}.{name} cannot be pickled: a function is found again by its name, so it must stand"
                " at the top of its module; its graph can be pickled"
            )
        return name

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            names = ", ".join(self.signature.parameters)
            raise TypeRuleError(
                f"{self.fn.__name__}: the types of {names} are not known; annotate them ('f32[N,4]'), or give the graph"
                " that gradc.trace makes of it with types; a call infers types for itself alone"
            )
        return self._graph

    def compile(self, wrt: Sequence[str] | str = (), target: str | None = None, **options: Any) -> Module:
        """:func:`gradc.compile` of the graph."""
        with held_off:
            from ..api import compile

        return compile(self.graph, wrt, target, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        return self._module((), bound)(bound)

    def _module(self, wrt: tuple[str, ...], arguments: dict[str, Any]) -> Module:
        """The module for these arguments."""
        with held_off:
            from ..api import compile

        def build(graph: Graph, target: str, shape: dict[str, Any]) -> Module:
            module = compile(graph, wrt, target)
            module.structure = {
                n: shape[n] for n in arguments if any(w == n or w.startswith(n + ".") for w in module.wrt)
            }
            return module

        return self.specialised(wrt, arguments, build)

    def specialised(self, key: Any, arguments: dict[str, Any], build: Callable[[Graph, str, dict[str, Any]], T]) -> T:
        """What is built for arguments of these types.

        Inferred types are at first those of the first call; an axis whose size differs in a later call becomes
        symbolic, and one more module serves all sizes.

        :param key: of what ``build`` makes.
        :param build: (graph, target of the arrays, the arguments' structure) -> a module, or what has one.
        """
        shape = {
            name: unflatten(tree, dict.fromkeys(flatten(tree, name), ...), name) for name, tree in arguments.items()
        }
        values = {k: v for name, tree in arguments.items() for k, v in flatten(tree, name).items()}
        leaves = {k: typeof(v) for k, v in values.items()}
        target = knobs.TARGET.get() or (
            "cuda" if any(describe(v) is not None for v in values.values()) else "cpu"
        )  # the device of the arrays
        whole: Any = (
            (key, target, "fixed")
            if self._graph is not None
            else (key, target, repr(shape), *((k, t.dtype, t.rank) for k, t in leaves.items()))
        )
        known = self._modules.setdefault(whole, [])
        for types, built in known:
            if self._graph is not None or serves(types, leaves):
                return built  # type: ignore[no-any-return]
        types = generalised(known[-1][0], leaves) if known else leaves
        try:
            graph = self._graph or trace(
                self.fn, {n: unflatten(tree, types, n) for n, tree in arguments.items()}, assume=self.facts
            )
        except TypeRuleError as error:
            raise said_of_numbers(error, values) from None
        made = build(graph, target, shape)
        known.append((types, made))
        return made


def serves(types: Mapping[str, Type], leaves: Mapping[str, Type]) -> bool:
    """Whether arrays of these types fit a module of those."""
    try:
        bind_dims(dict(types), {k: t.concrete({}) for k, t in leaves.items()})
    except InvalidProblem:
        return False
    return True


def generalised(types: Mapping[str, Type], leaves: Mapping[str, Type]) -> dict[str, Type]:
    """The types with a dim wherever a size differs; sizes that changed alike share one."""
    dims: dict[Any, Size] = {}

    def size(old: Size, new: Size) -> Size:
        if isinstance(old, int) and old != new:
            return dims.setdefault((old, new), symbol(f"n{len(dims)}"))
        return dims.setdefault((old, new), symbol(f"n{len(dims)}")) if not isinstance(old, int) else old

    return {k: Type(t.dtype, tuple(map(size, types[k].shape, t.shape))) for k, t in leaves.items()}


def _annotated_type(annotation: Any, fn: Callable[..., Any]) -> Type | str | None:
    """The type that a parameter is annotated with: ``"f32[N,4]"``, a :class:`Type`, or ``Annotated[Node, "f32[N,4]"]``,
    which type checkers accept; None for what is no type of gradc's.
    """
    if isinstance(annotation, str):
        text = annotation[1:-1] if annotation[:1] in "\"'" else annotation  # two quotes: from __future__ annotations
        if text.split("[")[0].strip() in DTYPES:
            return text
        named = SimpleNamespace(__annotations__={"type": annotation})
        try:
            annotation = get_type_hints(named, getattr(fn, "__globals__", {}), include_extras=True)["type"]
        except Exception:  # a name that only a type checker knows
            return None
    if get_origin(annotation) is Annotated:
        found = (_annotated_type(each, fn) for each in annotation.__metadata__ if isinstance(each, Type | str))
        return next((each for each in found if each is not None), None)
    return annotation if isinstance(annotation, Type) else None


def graph(fn: Callable[..., Any] | None = None, *, assume: Sequence[str] = ()) -> Any:
    """The decorator ``@gradc.graph``: makes a function a :class:`TracedFunction`, with types from string annotations or
    inferred at the first call.
    """
    if fn is None:
        return lambda f: TracedFunction(f, assume)
    return TracedFunction(fn, assume)


def value_and_grad(
    fn: Callable[..., Any] | TracedFunction, wrt: Sequence[str] | str | None = None
) -> Callable[..., tuple[Any, Gradients]]:
    """A function that returns (``fn``'s scalar value, its gradients).

    :param wrt: the parameters to differentiate by (a nested one stands for all its leaves); None means the first.
        ``grads.tree`` has the structure of the parameters.
    """
    traced = fn if isinstance(fn, TracedFunction) else TracedFunction(fn)
    first = next(iter(traced.signature.parameters), None)
    names = ([first] if first else []) if wrt is None else [wrt] if isinstance(wrt, str) else list(wrt)

    @functools.wraps(traced.fn)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Gradients]:
        arguments = traced.signature.bind(*args, **kwargs).arguments
        module = traced._module(tuple(names), dict(arguments))
        return module.value_and_grad(arguments)

    run.traced = traced  # type: ignore[attr-defined]
    return run
