"""A model written in gradc as a ``torch.nn.Module``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import InvalidProblem
from ..frontend import generalised, serves
from ..ir.graph import Graph
from ..ir.types import Type, typeof
from ..options import check_names
from ..trace import flatten, trace, unflatten
from .function import Function


class Module(torch.nn.Module):
    """A function of gradc's ops, or a graph, whose forward and backward are gradc's.

    >>> layer = gradc.torch.Module(lambda x, w: ops.gelu(ops.linear(x, w)), w=torch.randn(16, 8))
    >>> layer(torch.randn(4, 8)).sum().backward()

    Parameters, ``state_dict``, ``to``, ``deepcopy``, ``pickle`` and what wraps modules (DistributedDataParallel) are
    those of any module.  A function is traced once its inputs' types are known; a size that differs at a later call
    becomes a dim, so that one more module serves every size.  Pickle finds a function by its name; a graph needs none.

    :param function: of traced values, as :func:`gradc.trace` takes it, or a graph.
    :param options: of :func:`gradc.compile`, and ``target``.
    :param parameters: tensors or arrays, nested as :func:`gradc.trace` takes them, by the names of ``function``'s
        arguments.  Those of floats become parameters, ``torch.nn.Buffer`` and those of integers buffers.
    :raises InvalidProblem: a name that ``function`` does not have, or that a module cannot have.
    """

    def __init__(
        self,
        function: Callable[..., Any] | Graph,
        /,
        *,
        options: Mapping[str, Any] | None = None,
        **parameters: Any,
    ):
        super().__init__()
        self._source = function
        self._target = (options or {}).get("target")
        self._options = {k: v for k, v in (options or {}).items() if k != "target"}
        check_names(self._options)
        names = (
            list(function.input_names) if isinstance(function, Graph) else list(inspect.signature(function).parameters)
        )
        self._trees: dict[str, Any] = {}
        self._places: dict[str, tuple[torch.nn.Module, str]] = {}
        for name, tree in parameters.items():
            leaves = flatten(tree, name)
            known = leaves.keys() <= set(names) if isinstance(function, Graph) else name in names
            if not known:
                raise InvalidProblem(f"there is no input {name!r}; there are {', '.join(names)}")
            self._trees[name] = unflatten(tree, dict.fromkeys(leaves, ...), name)
            for path, value in leaves.items():
                self._places[path] = self._register(path, value)
        own = set(self._places) if isinstance(function, Graph) else set(self._trees)
        self._arguments = tuple(n for n in names if n not in own)
        self._known: dict[Any, list[tuple[Mapping[str, Type], Function]]] = {}

    def _register(self, path: str, value: Any) -> tuple[torch.nn.Module, str]:
        """The tensor as a parameter or buffer of nested modules; gives the innermost and the last word of its path."""
        *words, last = path.split(".")
        at: torch.nn.Module = self
        try:
            for word in words:
                if word not in at._modules:
                    at.add_module(word, torch.nn.Module())
                at = at._modules[word]  # type: ignore[assignment]
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
            if isinstance(tensor, torch.nn.Buffer) or not tensor.is_floating_point():
                at.register_buffer(last, tensor)
            else:
                known = isinstance(tensor, torch.nn.Parameter)
                at.register_parameter(last, tensor if known else torch.nn.Parameter(tensor.detach()))
        except (KeyError, TypeError) as error:
            raise InvalidProblem(f"{path!r} cannot be a parameter of a torch module: {error}") from None
        return at, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One tensor, or a dict of several by name."""
        arguments = self._bound(args, kwargs)
        leaves = {path: getattr(at, last) for path, (at, last) in self._places.items()}
        for name, tree in arguments.items():
            leaves |= flatten(tree, name)
        function = self._function(arguments, leaves)
        given = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in map(leaves.get, function.names)]
        values = function({}, *given)
        return values[0] if len(values) == 1 else dict(zip(function.graph.output_names, values, strict=True))

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by name.

        :raises InvalidProblem: too many, one given twice, a name that there is not, one that is missing.
        """
        listed = ", ".join(self._arguments) or "nothing"
        if len(args) > len(self._arguments):
            raise InvalidProblem(f"{len(args)} arguments; the call takes {listed}")
        arguments = dict(zip(self._arguments, args, strict=False))
        wrong = sorted(kwargs.keys() - set(self._arguments)) or sorted(kwargs.keys() & arguments.keys())
        if wrong:
            raise InvalidProblem(f"the argument {wrong[0]!r}: the call takes {listed}, each once")
        arguments |= kwargs
        defaults = self._source.defaults if isinstance(self._source, Graph) else {}
        required = [n for n in self._arguments if n not in arguments and n not in defaults and self._required(n)]
        if required:
            raise InvalidProblem(f"the argument {required[0]!r} is missing; the call takes {listed}")
        return arguments

    def _required(self, name: str) -> bool:
        if isinstance(self._source, Graph):
            return True
        return inspect.signature(self._source).parameters[name].default is inspect.Parameter.empty

    def _function(self, arguments: Mapping[str, Any], leaves: Mapping[str, Any]) -> Function:
        """The function for tensors of these types."""
        if isinstance(self._source, Graph):
            if () not in self._known:
                self._known[()] = [({}, Function(self._source, self._target, self._options))]
            return self._known[()][0][1]
        trees = {**self._trees, **arguments}
        types = {name: typeof(value) for name, value in leaves.items()}
        key = tuple((name, t.dtype, t.rank) for name, t in types.items())
        known = self._known.setdefault(key, [])
        for served, function in known:
            if serves(served, types):
                return function
        types = generalised(known[-1][0], types) if known else types
        graph = trace(self._source, **{n: unflatten(tree, types, n) for n, tree in trees.items()})
        known.append((types, Function(graph, self._target, self._options)))
        return known[-1][1]

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled: that is made again, or comes from the cache."""
        return {**self.__dict__, "_known": {}}
