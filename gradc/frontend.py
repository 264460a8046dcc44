"""Decorators: a Python function as a graph, and as a value with gradients, types inferred on the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .errors import TypeRuleError
from .ir.graph import Graph
from .ir.types import DTYPES, Type, typeof
from .module import Gradients, Module
from .trace import flatten, trace


class TracedFunction:
    """A function whose graph is traced once its types are known: from string annotations (``x: "f32[N,4]"``) or from the first call's arrays.

    Calling it runs the compiled forward; ``.graph`` is the graph, ``.compile(wrt=...)`` a module.
    """

    def __init__(self, fn: Callable[..., Any], assume: Sequence[str] = ()):
        functools.update_wrapper(self, fn)
        self.fn, self.facts = fn, tuple(assume)
        self.signature = inspect.signature(fn)
        annotated = {p.name: p.annotation for p in self.signature.parameters.values() if _is_type(p.annotation)}
        self._graph: Graph | None = None
        self._modules: dict[Any, Module] = {}
        if len(annotated) == len(self.signature.parameters):
            self._graph = trace(fn, assume=self.facts, **{n: _plain(a) for n, a in annotated.items()})

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            names = ", ".join(self.signature.parameters)
            raise TypeRuleError(f"{self.fn.__name__}: the types of {names} are not known yet; annotate them ('f32[N,4]') or call it once")
        return self._graph

    def compile(self, wrt: Sequence[str] | str = (), target: str | None = None, **options: Any) -> Module:
        """:func:`gradc.compile` of the graph."""
        from .api import compile

        return compile(self.graph, wrt, target, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        return self._module((), bound)(**bound)

    def _module(self, wrt: tuple[str, ...], arguments: dict[str, Any]) -> Module:
        """The module for these arguments' dtypes and ranks; their sizes are dims, so that other sizes need no new one."""
        from .api import compile

        leaves = {k: typeof(v) for name, tree in arguments.items() for k, v in flatten(tree, name).items()}
        key: Any = (wrt, "fixed") if self._graph is not None else (wrt, *((k, str(t)) for k, t in leaves.items()))
        if key not in self._modules:
            graph = self._graph or trace(self.fn, assume=self.facts, **{n: _typed(tree) for n, tree in arguments.items()})
            module = compile(graph, wrt)
            module.structure = {n: arguments[n] for n in arguments if any(w == n or w.startswith(n + ".") for w in module.wrt)}
            self._modules[key] = module
        return self._modules[key]


def _typed(tree: Any) -> Any:
    from .trace import unflatten

    leaves = flatten(tree, "x")
    return unflatten(tree, {k: typeof(v) for k, v in leaves.items()}, "x")


def _plain(annotation: Any) -> Any:
    """Under ``from __future__ import annotations`` a string annotation arrives with its quotes."""
    if isinstance(annotation, str) and annotation[:1] in "\"'":
        return annotation[1:-1]
    return annotation


def _is_type(annotation: Any) -> bool:
    text = _plain(annotation)
    return isinstance(text, Type) or (isinstance(text, str) and text.split("[")[0].strip() in DTYPES)


def graph(fn: Callable[..., Any] | None = None, *, assume: Sequence[str] = ()) -> Any:
    """``@gradc.graph``: the function becomes a :class:`TracedFunction`; types stand as string annotations or are inferred on the first call."""
    if fn is None:
        return lambda f: TracedFunction(f, assume)
    return TracedFunction(fn, assume)


def value_and_grad(fn: Callable[..., Any] | TracedFunction, wrt: Sequence[str] | str | None = None) -> Callable[..., tuple[Any, Gradients]]:
    """A function that gives ``fn``'s scalar value and its gradients.

    :param wrt: parameters (a nested one stands for all its leaves); None means the first.  ``grads.tree`` has the parameters' shape.
    """
    traced = fn if isinstance(fn, TracedFunction) else TracedFunction(fn)
    first = next(iter(traced.signature.parameters), None)
    names = ([first] if first else []) if wrt is None else [wrt] if isinstance(wrt, str) else list(wrt)

    @functools.wraps(traced.fn)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Gradients]:
        arguments = traced.signature.bind(*args, **kwargs).arguments
        module = traced._module(tuple(names), dict(arguments))
        return module.value_and_grad(**arguments)

    run.traced = traced  # type: ignore[attr-defined]
    return run
