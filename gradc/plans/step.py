"""gradc.step: the loss, its gradients and the optimizer's update as one program."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import knobs
from ..api import compile
from ..errors import GradcError, InvalidProblem
from ..interp import by_name
from ..ir.graph import Graph
from ..ir.types import Type, typeof
from ..module.module import Module
from ..module.options import expand, names_of
from ..optim.optimizer import STATE, STEP, Optimizer, checked
from ..optim.step_graph import LR, check_learned, slots_of, step_graph
from ..runtime.cuda.on_device import DeviceArray, describe
from ..runtime.host.arrays import Array, Kind, from_numpy, overlap, overlapping, overlaps_itself, to_numpy
from ..runtime.host.tensors import check_dense, detached, is_tensor
from ..runtime.recent import Recent
from ..runtime.shared import Shared
from ..trace import flatten, unflatten
from .traced import TracedFunction

State = dict[str, Any]
"""``step``: the number of steps made; ``SLOT.NAME``: what the optimizer keeps of a parameter, an array."""


def step(
    fn: Graph | Callable[..., Any],
    optimizer: Optimizer,
    wrt: Sequence[str] | str | None = None,
    *,
    sparse: Sequence[str] | str = (),
    clip_norm: float | None = None,
    master_weights: bool = False,
    donate: bool = True,
    target: str | None = None,
    **options: Any,
) -> Step:
    """A step of training as one program: the loss, its gradients and the update of the parameters.

    >>> step = gradc.step(loss, optim.adamw(lr=1e-3))
    >>> state = step.init(parameters)
    >>> value, parameters, state = step(parameters, state, x=x, y=y)

    :param fn: a function of arrays that returns a scalar float, beside which it may return what is no float; types
        are inferred at the first call, as by :func:`gradc.value_and_grad`.  Or its graph.
    :param wrt: what is learned; a name, or None for the first parameter of ``fn``: a call takes and gives its arrays,
        nested as they are.  A list of names: a dict of these by name.
    :param sparse: tables, which are updated in the rows that indices name; others are neither read nor written.
    :param clip_norm: the largest norm of all gradients together; they are scaled down to it, as by
        :func:`torch.nn.utils.clip_grad_norm_`.
    :param master_weights: keeps f16 and bf16 parameters in f32, too, and updates those.
    :param donate: whether a call may write new values over the parameters and the state that it is given; then use
        what it returns.
    :param target: as :func:`gradc.compile` takes it; by default that of the arrays.
    :param options: of :func:`gradc.compile`.
    :raises InvalidProblem: a name is none of a parameter's, or is there twice; an argument is invalid.
    """
    return Step(fn, optimizer, wrt, sparse, clip_norm, master_weights, donate, target, options)


@dataclass(frozen=True)
class Compiled:
    """A step for given types.

    :param values: the names of the results of the function.
    :param new: those of parameters and state.
    """

    module: Module
    values: tuple[str, ...]
    new: tuple[str, ...]


class Step(Shared):
    """What :func:`step` returns.

    :ivar wrt: the names of what is learned.
    :ivar single: whether it is one, which calls take and give without its name.
    """

    def __init__(
        self,
        fn: Graph | Callable[..., Any],
        optimizer: Optimizer,
        wrt: Sequence[str] | str | None,
        sparse: Sequence[str] | str,
        clip_norm: float | None,
        master_weights: bool,
        donate: bool,
        target: str | None,
        options: Mapping[str, Any],
    ):
        if not isinstance(optimizer, Optimizer):
            raise InvalidProblem(f"a step takes an optimizer of gradc.optim, not a {type(optimizer).__name__}")
        self.fn = fn if isinstance(fn, Graph | TracedFunction) else TracedFunction(fn)
        self.optimizer, self.sparse = optimizer, names_of("sparse", sparse)
        self.clip_norm = None if clip_norm is None else checked("clip_norm", clip_norm)
        self.master_weights, self.donate = master_weights, donate
        self.target, self.options = target, dict(options)
        known = self.fn.input_names if isinstance(self.fn, Graph) else tuple(self.fn.signature.parameters)
        self.single = wrt is None or isinstance(wrt, str)
        self.wrt = known[:1] if wrt is None else names_of("wrt", wrt)
        for name in self.wrt:
            if self.wrt.count(name) > 1:
                raise InvalidProblem(f"wrt names {name!r} twice")
            if name not in known and not any(each.startswith(f"{name}.") for each in known):
                raise InvalidProblem(f"wrt names {name!r}; there are {', '.join(known) or 'no parameters'}")
        self._known: Recent[Any, Compiled] = Recent(256)
        self._last: tuple[Compiled, str | None] | None = None  # and what knobs.TARGET was

    # -- compiling -----------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph of the step; :func:`gradc.optim.step_graph.step_graph` says what it reads and gives.

        :raises TypeRuleError: the types of the function's parameters are not known.
        """
        return self._graph(self.fn if isinstance(self.fn, Graph) else self.fn.graph)

    def compile(self, target: str | None = None) -> Module:
        """The step as a module: ``module(**inputs)`` gives the outputs of :attr:`graph` by name, and
        ``module.export(folder)`` writes it as C.
        """
        loss = self.fn if isinstance(self.fn, Graph) else self.fn.graph
        return self._compiled(loss, target or self.target).module

    def _graph(self, loss: Graph) -> Graph:
        return step_graph(
            loss,
            dict.fromkeys(expand(loss, self.wrt), self.optimizer),
            sparse=expand(loss, self.sparse),
            clip_norm=self.clip_norm,
            master_weights=self.master_weights,
            numerics=self.options.get("numerics", "real"),
            unused=self.options.get("unused", "error"),
        )

    def _compiled(self, loss: Graph, target: str | None) -> Compiled:
        graph = self._graph(loss)
        values, new = graph.output_names[: len(loss.outputs)], graph.output_names[len(loss.outputs) :]
        module = compile(graph, (), target, donate=new if self.donate else (), **self.options)
        module.forward.exclusive = new
        return Compiled(module, values, new)

    def _for(self, arguments: dict[str, Any], leaves: Mapping[str, Any]) -> Compiled:
        """What is compiled for these arguments of the function, and their leaves."""
        fn, target = self.fn, self.target
        key = () if isinstance(fn, Graph) else (knobs.TARGET.get(), *((n, *_described(x)) for n, x in leaves.items()))
        compiled: Compiled | None = self._known.get(key)
        if compiled is None:
            if isinstance(fn, Graph):
                compiled = self._compiled(fn, target)
            else:
                compiled = fn.specialised(self, arguments, lambda loss, own, _: self._compiled(loss, target or own))
            self._known[key] = compiled
        return compiled

    # -- calling -------------------------------------------------------------------------------------------------------

    def init(self, parameters: Any) -> State:
        """The state before the first step, in the library and on the device of each parameter.

        :param parameters: as a call takes them.
        :raises InvalidProblem: one is no array of floats, or a sparse tensor.
        """
        state: State = {"step": 0}
        for name, x in _leaves(self._by_name(parameters)).items():
            if is_tensor(x):
                check_dense(x)
            type_ = typeof(x)
            check_learned(name, type_, self.optimizer)
            initial = {slot: kept.initial for slot, kept in self.optimizer.slots(type_).items()}
            for slot, kept in slots_of(self.optimizer, type_, self.master_weights).items():
                state[f"{slot}.{name}"] = _filled(x, kept, initial.get(slot))
        return state

    def __call__(
        self,
        parameters: Any,
        state: State,
        inputs: Mapping[str, Any] | None = None,
        /,
        *extra: Any,
        lr: float | None = None,
        stream: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> tuple[Any, Any, State]:
        """(the loss, or a dict of it and the other results; the parameters; the state) after the step.

        A call that raises an error of an argument or of an index has changed nothing.

        :param parameters: arrays in the structure that ``fn`` takes.
        :param state: from :meth:`init` or the call before.
        :param inputs: the other arguments of ``fn`` by name, those that are not given as keywords.
        :param lr: the learning rate of this step, not that of the optimizer.
        :raises InvalidProblem: an array has another shape or dtype, or is there twice; ``lr`` is no number from 0.
        :raises IndexOutOfRange: an index is out of range.
        """
        given, rest = self._by_name(parameters), by_name("step", (), inputs, extra, more)
        if twice := given.keys() & rest.keys():
            raise InvalidProblem(f"{min(twice)!r} is among the parameters and the other arguments")
        learned, others = _leaves(given), _leaves(rest)
        kept = {f"{STATE}.{key}": x for key, x in self._checked(state).items()}
        arrays = {**learned, **kept, **others}
        arrays |= {name: detached(x) for name, x in learned.items() if getattr(x, "requires_grad", False)}
        if lr is not None:
            arrays[LR] = np.array(checked(LR, lr))
        found = self._repeated(arrays, dims) if stream is None else None
        if found is None:
            found = self._checked_call(given, rest, learned, kept, others, arrays, stream, dims)
        compiled, after = found
        values = {name: after[name] for name in compiled.values}
        new = {name: unflatten(tree, after, name) for name, tree in given.items()}
        return (
            next(iter(values.values())) if len(values) == 1 else values,
            new[self.wrt[0]] if self.single else new,
            {key: after[f"{STATE}.{key}"] for key in state},
        )

    def _repeated(
        self, arrays: Mapping[str, Any], dims: Mapping[str, int] | None
    ) -> tuple[Compiled, Mapping[str, Any]] | None:
        """(what was compiled, arrays and results by name) of a call that differs from one before in addresses alone;
        None, and nothing was run, if it does not.
        """
        last = self._last
        if last is None or last[1] != knobs.TARGET.get():
            return None
        compiled = last[0]
        forward = compiled.module.forward
        described = forward.described(arrays, None, compiled.module.sizes(dims), None)
        if described is None or described.known is None or not _counts(arrays[STEP]):
            return None
        done = forward.repeated(described, arrays, None)
        if done is None:
            return None
        after = {**arrays, **done[0]}
        if len(forward.donated) < len(compiled.new):  # else each is the array given
            after |= _in_library({name: arrays[name] for name in compiled.new}, after)
        return compiled, after

    def _checked_call(
        self,
        given: Mapping[str, Any],
        rest: Mapping[str, Any],
        learned: Mapping[str, Any],
        kept: Mapping[str, Any],
        others: Mapping[str, Any],
        arrays: Mapping[str, Any],
        stream: Any,
        dims: Mapping[str, int] | None,
    ) -> tuple[Compiled, Mapping[str, Any]]:
        """As :meth:`_repeated`, of any call."""
        memory = memory_of({**learned, **kept})
        _check_count(memory.get(STEP))
        check_distinct(memory)
        compiled = self._for({**given, **rest}, {**learned, **others})
        results = compiled.module(arrays, stream=stream, dims=dims)
        after = {**arrays, **results}
        after |= _in_library({name: arrays[name] for name in memory}, after)
        self._last = (compiled, knobs.TARGET.get())
        return compiled, after

    def _checked(self, state: Any) -> Mapping[str, Any]:
        if not isinstance(state, Mapping) or "step" not in state:
            raise InvalidProblem(f"the state is a {type(state).__name__}: init, and then each call, gives one")
        return state

    def _by_name(self, parameters: Any) -> dict[str, Any]:
        """The arrays, or trees of them, by the names of :attr:`wrt`."""
        if self.single:
            return {self.wrt[0]: parameters}
        if not isinstance(parameters, Mapping) or parameters.keys() != set(self.wrt):
            names = ", ".join(map(str, parameters)) if isinstance(parameters, Mapping) else type(parameters).__name__
            raise InvalidProblem(f"the parameters are a dict of {', '.join(self.wrt)}, not {names}")
        return {name: parameters[name] for name in self.wrt}


def _described(x: Any) -> tuple[Any, ...]:
    """What a leaf's type and target depend on."""
    return type(x), getattr(x, "dtype", None), getattr(x, "shape", None), getattr(x, "device", None)


def _leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for name, tree in trees.items() for key, x in flatten(tree, name).items()}


def memory_of(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """The memory of arrays by name, without what is no array, of which the call raises the error."""
    found: dict[str, Array] = {}
    for name, x in arrays.items():
        try:
            array = describe(x)
            found[name] = to_numpy(x)[0] if array is None else array
        except GradcError:
            continue
    return found


def check_distinct(memory: Mapping[str, Array]) -> None:
    """InvalidProblem where two arrays, or two elements of one, share memory."""
    for name, x in memory.items():
        if overlaps_itself(x):
            raise InvalidProblem(
                f"elements of {name} share memory: its shape is {x.shape}, and its strides in bytes are {x.strides}"
            )
    shared = overlapping(memory)
    for one, other in itertools.combinations([name for name in memory if name in shared], 2):
        if overlap(memory[one], memory[other]):
            raise InvalidProblem(f"{one} and {other} share memory: each is updated by itself")


MOST_STEPS = 1 << 53


def _counts(count: Any) -> bool:
    """Whether it is an array, in memory of the host, that :func:`_check_count` has nothing against."""
    host = type(count) is np.ndarray or (is_tensor(count) and count.device.type == "cpu")
    if not host or count.ndim:
        return False
    try:
        number = count.item()
    except RuntimeError:  # a tensor without memory
        return False
    return isinstance(number, int) and 0 <= number < MOST_STEPS


def _check_count(count: Array | None) -> None:
    """InvalidProblem for a number of steps that no training reaches, or whose f64 would be another number; in memory
    of a GPU, which the host does not read, it is not looked at.
    """
    if count is None or isinstance(count, DeviceArray) or count.dtype.kind not in "iu" or count.shape:
        return
    if not 0 <= int(count) < MOST_STEPS:
        raise InvalidProblem(f"the state's step is {int(count)}: the number of steps made, from 0 to below 2**53")


def _in_library(given: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The new values, in host memory, that come in another library than the arrays given, in theirs; those of numbers
    in the library of the first array.
    """
    first = next((x for x in given.values() if not isinstance(x, int | float)), None)
    found = {}
    for name, own in given.items():
        new, like = after[name], first if isinstance(own, int | float) else own
        if type(new) is not type(like) and describe(new) is None and describe(like) is None:
            array, kind = to_numpy(new)
            wanted = Kind.NUMPY if like is None else to_numpy(like)[1]
            if kind != wanted:
                found[name] = from_numpy(array, wanted)
    return found


def _filled(like: Any, type_: Type, value: float | None) -> Any:
    """An array of a value, or for None of what ``like`` holds, in the library and on the device of ``like``."""
    shape, dtype = type_.concrete({}), type_.dtype.np
    if is_tensor(like):
        other = getattr(sys.modules["torch"], dtype.name)
        return like.detach().to(other, copy=True) if value is None else like.new_full(shape, value, dtype=other)
    library: Any = np if describe(like) is None else sys.modules["cupy"]
    if library is np:
        array, kind = to_numpy(like)
        return from_numpy(array.astype(dtype) if value is None else np.full(shape, value, dtype), kind)
    return like.astype(dtype) if value is None else library.full(shape, value, dtype)
