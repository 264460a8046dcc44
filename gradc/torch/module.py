"""A model written in gradc as a ``torch.nn.Module``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InvalidProblem
from ..ir.graph import Graph, name_of
from ..ir.types import DType, Type, typeof
from ..module.options import check_names, names_of
from ..optim.optimizer import Optimizer
from ..optim.step_graph import STATE, check_learned, rates_of
from ..plans.step import check_distinct, memory_of
from ..plans.traced import generalised, serves
from ..trace import flatten, trace, unflatten
from .function import Function
from .sizes import TORCH_DTYPES
from .updates import Kept, UpdatingFunction


class Module(torch.nn.Module):
    """A function of gradc's ops, or a graph, whose forward and backward are gradc's.

    >>> layer = gradc.torch.Module(lambda x, w: ops.gelu(ops.linear(x, w)), w=torch.randn(16, 8))
    >>> layer(torch.randn(4, 8)).sum().backward()

    Parameters, ``state_dict``, ``to``, ``deepcopy``, ``pickle`` and what wraps modules (DistributedDataParallel) are
    those of any module.  A function is traced once its inputs' types are known; a size that differs at a later call
    becomes a dim, so that one more module serves every size.  Pickle finds a function by its name; a graph needs none.

    A Python number as an argument takes the dtype that it has in eager mode beside the tensors that it meets: a float
    that of the float tensors, an int that of the integer tensors among the arguments, or else of the floats.
    ``torch.func.functional_call`` works; ``vmap``, ``grad`` and ``jvp`` of torch.func are :class:`Unsupported`.

    :param function: of traced values, as :func:`gradc.trace` takes it, or a graph.
    :param options: of :func:`gradc.compile`, and ``target``.
    :param update: ``{"table": optim.rowwise_adagrad(lr=0.1)}``: the optimizers of parameters, which the backward of a
        call updates where they lie; their ``grad`` stays None.  Their state is buffers, ``state.step`` and
        ``state.SLOT.NAME``, and :attr:`rates` has the learning rates of the steps to come.  Those that
        ``options={"sparse": ...}`` names are updated in the rows that indices name, and nowhere else.  One that does
        not require grad stays.
    :param parameters: tensors or arrays, nested as :func:`gradc.trace` takes them, by the names of ``function``'s
        arguments.  Those of floats become parameters, ``torch.nn.Buffer`` and those of integers buffers.  A name that
        every module has already (``forward``, ``training``) gets a ``_`` behind, in ``state_dict``, too.
    :ivar rates: with ``update``, its learning rates: ``lr``, or of several optimizers ``lr.adam``.
    :raises InvalidProblem: ``function`` is no function and no graph, or does not have a name; a parameter is no array,
        or there twice in ``update``.
    """

    def __init__(
        self,
        function: Callable[..., Any] | Graph,
        /,
        *positional: Any,
        options: Mapping[str, Any] | None = None,
        update: Mapping[str, Optimizer] | None = None,
        **parameters: Any,
    ):
        super().__init__()
        names, others = _names_of(function)
        if positional:
            raise InvalidProblem(f"parameters are given by name: {', '.join(names)}")
        if not isinstance(options, Mapping | None):
            raise InvalidProblem(
                f"options is a mapping of gradc.compile's options, not a {type(options).__name__}; a parameter cannot"
                " have this name"
            )
        self._source = function
        self._target = (options or {}).get("target")
        self._options = {k: v for k, v in (options or {}).items() if k != "target"}
        check_names(self._options)
        self._trees: dict[str, Any] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._known: dict[Any, list[_Traced]] = {}
        self._arguments: tuple[str, ...] = ()
        self._update: dict[str, Optimizer] = {}
        self._sparse: tuple[str, ...] = ()
        self._state: dict[str, tuple[str, ...]] = {}
        if update is not None:  # else a parameter may have this name
            self.rates: dict[str, Any] = {}
        inner: dict[str, tuple[torch.nn.Module, tuple[str, ...]]] = {}
        for name, tree in parameters.items():
            leaves = flatten(tree, name)
            known = leaves.keys() <= set(names) if isinstance(function, Graph) else others or name in names
            if not known:
                raise InvalidProblem(f"there is no input {name!r}; there are {', '.join(names)}")
            self._trees[name] = unflatten(tree, dict.fromkeys(leaves, ...), name)
            for path, value in leaves.items():
                self._places[path] = self._register(path, value, inner)
        own = set(self._places) if isinstance(function, Graph) else set(self._trees)
        self._arguments = tuple(n for n in names if n not in own)
        if update is not None:
            self._learn(update, inner)
            self.rates |= {rate: each.lr for each, rate in rates_of(self._update.values()).items()}

    def _learn(
        self, update: Mapping[str, Optimizer], inner: dict[str, tuple[torch.nn.Module, tuple[str, ...]]]
    ) -> None:
        """Registers the state of the parameters that have an optimizer, as it is before the first step."""
        if not isinstance(update, Mapping) or not all(isinstance(each, Optimizer) for each in update.values()):
            raise InvalidProblem(
                f"update={update!r}: it maps names of parameters to optimizers of gradc.optim; a parameter cannot have"
                " this name"
            )
        for name, optimizer in update.items():
            for path in self._below("update", name):
                if path in self._update:
                    raise InvalidProblem(f"update names {path!r} twice")
                self._update[path] = optimizer
        self._sparse = tuple(
            path
            for name in names_of("sparse", self._options.pop("sparse", None) or ())
            for path in self._below("sparse", name)
        )
        for path in self._sparse:
            if path not in self._update:
                raise InvalidProblem(f"sparse names {path!r}, which update does not: {', '.join(self._update)}")
        learned = {path: self._at(self._places[path]).detach() for path in self._update}
        check_distinct(memory_of(learned))
        for path, optimizer in self._update.items():
            x = self._at(self._places[path])
            check_learned(path, typeof(x), optimizer)
            for slot, kept in optimizer.slots(typeof(x)).items():
                dtype = TORCH_DTYPES[typeof(x).dtype.compute]
                full = torch.full(kept.shape, kept.initial, dtype=dtype, device=x.device)
                name = f"{STATE}.{slot}.{path}"
                self._state[name] = self._register(name, torch.nn.Buffer(full), inner)
        if self._update:
            name = f"{STATE}.step"
            device = self._at(self._places[next(iter(self._update))]).device
            self._state[name] = self._register(name, torch.zeros((), dtype=torch.int64, device=device), inner)

    def _below(self, what: str, name: str) -> list[str]:
        """The paths of the parameters that a name stands for."""
        found = [path for path in self._places if path == name or path.startswith(f"{name}.")]
        learned = [path for path in found if isinstance(self._at(self._places[path]), torch.nn.Parameter)]
        if not learned:
            raise InvalidProblem(f"{what} names {name!r}, which is no parameter: {', '.join(self._places) or 'none'}")
        return learned

    def _at(self, way: tuple[str, ...]) -> Any:
        """What attributes lead to."""
        return functools.reduce(getattr, way, self)

    def _register(
        self, path: str, value: Any, inner: dict[str, tuple[torch.nn.Module, tuple[str, ...]]]
    ) -> tuple[str, ...]:
        """The tensor as a parameter or buffer of nested modules; gives the attributes that lead to it, by which it is
        found at each call: a user may put another module, or parameter, in their place.

        :param inner: the modules that there are and the attributes that lead to them, by the path of what lies in them.
        """
        *words, last = path.split(".")
        if not all((*words, last)):
            raise InvalidProblem(f"{path!r} cannot be a parameter of a torch module: a word of its path is empty")
        at: torch.nn.Module = self
        way: tuple[str, ...] = ()
        for i, word in enumerate(words):
            prefix = ".".join(words[: i + 1])
            if prefix not in inner:
                word = _free(at, word)
                inner[prefix] = torch.nn.Module(), (*way, word)
                at.add_module(word, inner[prefix][0])
            at, way = inner[prefix]
        last = _free(at, last)
        try:
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
            _check_real(f"the parameter {path!r}", tensor)
            if isinstance(tensor, torch.nn.Buffer) or not tensor.is_floating_point():
                at.register_buffer(last, tensor)
            else:
                known = isinstance(tensor, torch.nn.Parameter)
                at.register_parameter(last, tensor if known else torch.nn.Parameter(tensor.detach()))
        except (KeyError, TypeError) as error:
            raise InvalidProblem(f"{path!r} cannot be a parameter of a torch module: {error}") from None
        return (*way, last)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if "self" in kwargs:
            raise InvalidProblem(
                "the argument 'self' is given by position: torch's modules have that keyword themselves"
            )
        return super().__call__(*args, **kwargs)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """One tensor, or a dict of several by name."""
        arguments = self._bound(args, kwargs)
        leaves = {path: self._at(way) for path, way in self._places.items()}
        given = {path: leaf for name, tree in arguments.items() for path, leaf in flatten(tree, name).items()}
        declared = (
            {n: self._source.input(n).dtype for n in self._source.input_names}
            if isinstance(self._source, Graph)
            else None
        )
        tensors = {**leaves, **_tensors(given, leaves, declared)}
        traced = self._traced(arguments, tensors)
        function = traced.function
        operands = [tensors[traced.paths[name]] for name in function.names]
        if isinstance(function, UpdatingFunction):
            own = {path: name for name, path in traced.paths.items()}
            state = {_renamed_state(name, own): self._at(way) for name, way in self._state.items()}
            values = function(Kept(state, self.rates), *operands)
        else:
            values = function({}, *operands)
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

    def _traced(self, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> _Traced:
        """The function for tensors of these types."""
        if isinstance(self._source, Graph):
            if () not in self._known:
                own = {n: n for n in self._source.input_names}
                self._known[()] = [_Traced({}, self._function(self._source, own), own)]
            return self._known[()][0]
        trees = {**self._trees, **arguments}
        types = {path: typeof(value) for path, value in tensors.items()}
        key = tuple((path, t.dtype, t.rank) for path, t in types.items())
        known = self._known.setdefault(key, [])
        for traced in known:
            if serves(traced.types, types):
                return traced
        types = generalised(known[-1].types, types) if known else types
        names: dict[str, str] = {}
        for path in types:
            names[path] = name_of(path, lambda name: name in names.values())
        if all(path == name for path, name in names.items()):
            graph = trace(self._source, {n: unflatten(tree, types, n) for n, tree in trees.items()})
        else:
            graph = _renamed(self._source, trees, types, names)
        paths = {name: path for path, name in names.items()}
        known.append(_Traced(types, self._function(graph, names), paths))
        return known[-1]

    def _function(self, graph: Graph, names: Mapping[str, str]) -> Function | UpdatingFunction:
        """The function of a graph.

        :param names: of its inputs, by path.
        """
        if not self._update:
            return Function(graph, self._target, self._options)
        update = {names[path]: optimizer for path, optimizer in self._update.items()}
        sparse = [names[path] for path in self._sparse]
        return UpdatingFunction(graph, update, sparse, self._target, self._options)

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled: that is made again, or comes from the cache."""
        return {**self.__dict__, "_known": {}}


@dataclass(frozen=True)
class _Traced:
    """A function for tensors of some types.

    :param paths: the path of the tensor that each input of its graph is.
    """

    types: Mapping[str, Type]
    function: Function | UpdatingFunction
    paths: Mapping[str, str]


def _names_of(function: Any) -> tuple[list[str], bool]:
    """The names of a function's or a graph's inputs, and whether it takes others, too.

    :raises InvalidProblem: it is neither, or says nothing of its arguments.
    """
    if isinstance(function, Graph):
        return list(function.input_names), False
    if not callable(function) or isinstance(function, type | torch.nn.Module):
        raise InvalidProblem(
            f"gradc.torch.Module takes a function of gradc's ops or a gradc.Graph, not {function!s:.60}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise InvalidProblem(f"gradc.torch.Module takes a function whose arguments have names: {error}") from None
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _renamed_state(name: str, names: Mapping[str, str]) -> str:
    """The name of a buffer of state where parameters are called by ``names``, which are by path."""
    state, slot, *path = name.split(".", 2)
    return ".".join([state, slot, *(names[each] for each in path)])


def _free(module: torch.nn.Module, word: str) -> str:
    """The word, with a ``_`` behind where the module has an attribute of that name."""
    while hasattr(module, word):
        word += "_"
    return word


def _renamed(function: Any, trees: Mapping[str, Any], types: Mapping[str, Type], names: Mapping[str, str]) -> Graph:
    """The function's graph, its inputs called by ``names``: for paths that cannot be names of inputs."""

    def flat(**leaves: Any) -> Any:
        by_path = {path: leaves[name] for path, name in names.items()}
        return function(**{n: unflatten(tree, by_path, n) for n, tree in trees.items()})

    by_name: dict[str, Any] = {names[path]: t for path, t in types.items()}
    return trace(flat, by_name, name=getattr(function, "__name__", ""))


def _tensors(
    given: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], declared: Mapping[str, DType] | None
) -> dict[str, torch.Tensor]:
    """The arguments as tensors, Python's numbers in the dtype that eager mode computes in.

    :param declared: the dtypes that a graph's inputs have.
    """
    arrays = {p: x for p, x in given.items() if not isinstance(x, bool | int | float)}
    made = {p: _as_tensor(p, x) for p, x in arrays.items()}
    floats = [x.dtype for x in (*made.values(), *parameters.values()) if x.is_floating_point()]
    integers = [x.dtype for x in made.values() if not x.is_floating_point() and x.dtype is not torch.bool]
    real = functools.reduce(torch.promote_types, floats) if floats else torch.get_default_dtype()
    whole = functools.reduce(torch.promote_types, integers) if integers else real if floats else torch.int64
    device = next((x.device for x in (*made.values(), *parameters.values())), None)
    for path, number in given.items():
        if path in made:
            continue
        dtype = torch.bool if isinstance(number, bool) else whole if isinstance(number, int) else real
        if declared is not None and path in declared and torch.can_cast(dtype, TORCH_DTYPES[declared[path]]):
            dtype = TORCH_DTYPES[declared[path]]
        made[path] = torch.tensor(number, dtype=dtype, device=device)
    return {path: made[path] for path in given}


def _check_real(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """:raises InvalidProblem: the tensor is complex."""
    if tensor.is_complex():
        raise InvalidProblem(f"{what} is of {tensor.dtype}: gradc has no complex numbers")
    return tensor


def _as_tensor(path: str, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(f"the argument {path!r} is a {type(value).__name__}, not a tensor") from None
    return _check_real(f"the argument {path!r}", tensor)
