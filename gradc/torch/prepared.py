"""Calls of a function on the CPU that differ from an earlier one in the addresses of their tensors alone.

The first call with tensors of some dtypes, shapes and strides is checked as any other, forward and backward
(:meth:`.Executable.bind_call`); those after it hand a list of addresses to C (:class:`.Prepared`).  Autograd keeps what
backward reads, and its counts of changes tell that nothing of it was written since.  What backward computes from memory
that is nobody else's lies in one tensor of bytes.

Results that are written over inputs are those tensors themselves, whose counts of changes go up as torch's do.

An input that is not row-major is copied first, by torch, forward and backward: what autograd keeps is the input itself,
which may be one row for many, and whose changes it counts.

Everything else (no memory, other devices, sparse gradients, memory shared with a donated input, an input that a variant
of the module reads in its own order, an error) is a call of the module.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..errors import GradcError
from ..ir.graph import Graph
from ..ir.types import DTYPES, Type
from ..module.module import Module
from ..module.residuals import Residuals
from ..runtime.executable import Executable
from ..runtime.host.arrays import SMALL, empty
from ..runtime.host.backend import CpuBackend
from ..runtime.host.prepared import Prepared
from ..runtime.host.prepared import Tensors as TensorsInC
from ..runtime.host.tensors import storages_stay_resizable, to_tensor
from ..runtime.torch_private import count_changes, data_pointer, empty_strided
from .sizes import TORCH_DTYPES

ALIGN = 64
"""Of values that lie in one tensor of bytes."""

Arrays = Mapping[str, np.ndarray[Any, Any]]
Tensors = Sequence[torch.Tensor]
_new = empty_strided()


_Memory = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""How a result is allocated: a function and its arguments."""


def _from_pool(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    return to_tensor(empty(shape, dtype))  # type: ignore[no-any-return]


def _memory_of(type_: Type, dims: Mapping[str, int]) -> _Memory:
    """Memory of gradc's pool for what is large, else of torch's.

    :raises KeyError: torch has no such dtype.
    """
    of_torch, shape, strides, step = TORCH_DTYPES[type_.dtype], type_.concrete(dims), [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    if step * type_.dtype.np.itemsize >= SMALL:
        return _from_pool, (shape, type_.dtype.np)
    return _new, (shape, tuple(reversed(strides)), of_torch)


def _size_of(type_: Type, dims: Mapping[str, int]) -> tuple[int, int]:
    """(bytes, bytes of an element)."""
    item = type_.dtype.np.itemsize
    return math.prod(type_.concrete(dims)) * item, item


def picked(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that gives the elements at some positions of a sequence, one or more."""
    if len(positions) == 1:
        return lambda given: (given[positions[0]],)
    return operator.itemgetter(*positions)


def described(x: torch.Tensor) -> tuple[Any, ...]:
    """What an address says nothing of.

    :raises RuntimeError: it has no strides.
    """
    return x.dtype, x.shape, x.stride(), x.device, x.is_neg()


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in row-major order: itself if they are, or if it has no memory."""
    return x.resolve_neg().contiguous() if x.data_ptr() else x


class _Bound(NamedTuple):
    """A call to which the addresses are given of inputs, of defaults, and of outputs that lie in no input.

    :param dims: the value of every symbol.
    :param defaults: the other inputs.
    :param donors: output -> the input that it is written over.
    """

    prepared: Prepared
    dims: dict[str, int]
    defaults: Arrays
    donors: Mapping[str, str]


def _prepared(
    executable: Executable, inputs: Mapping[str, Any], dims: Mapping[str, int], outputs: Sequence[str]
) -> _Bound | None:
    """A call on these inputs, with these outputs; None where it is not as simple as that."""
    backend = executable.backend
    if not isinstance(backend, CpuBackend) or set(outputs) != executable.outputs.keys():
        return None
    try:
        with storages_stay_resizable():
            call = executable.bind_call(inputs, dims=dims, allocate=False)
            donors = executable.donors(call)
    except GradcError:
        return None  # the module's call raises it
    if any(
        n not in call.arrays or (call.arrays[n].ctypes.data != x.data_ptr() and x.numel()) for n, x in inputs.items()
    ):
        return None  # it was converted
    if not executable.takes_all(donors):
        return None
    defaults = {n: a for n, a in call.arrays.items() if n not in inputs}
    arrays = {n: call.arrays[n] for n in (*inputs, *defaults)}
    sizes = {name: _size_of(executable.outputs[name], call.dims) for name in outputs}
    made = backend.prepared(dataclasses.replace(call, arrays=arrays, donors=donors), sizes)
    return _Bound(made, call.dims, defaults, donors) if made is not None else None


def with_axes(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor whose axes are in memory order, with those of the program; no view, which eager mode's result is not:
    a view cannot be detached in place, nor written to where one made it without recording.
    """
    y = x.detach().permute(*sorted(range(x.ndim), key=order.__getitem__))
    return x.new_empty(0).set_(x.untyped_storage(), y.storage_offset(), y.size(), y.stride())  # type: ignore[call-overload, no-any-return]


class Called(Protocol):
    """The part of a :class:`.Function` that its calls use."""

    graph: Graph
    names: tuple[str, ...]
    orders: dict[str, tuple[int, ...]]
    in_place: dict[str, str]

    def in_memory_order(self, output: str, value: torch.Tensor) -> torch.Tensor: ...


class Differentiated(Protocol):
    """The part of a :class:`.function.Differentiated` that its calls use."""

    target: str
    graph: Graph
    sparse: list[str]
    wrt: tuple[str, ...]
    read: tuple[str, ...]
    differentiable: dict[str, set[str]]

    @property
    def function(self) -> Called: ...

    @property
    def module(self) -> Module: ...


class _Kept(NamedTuple):
    """Where backward finds a residual.

    :param saved: which of the tensors that autograd keeps has it; -1: it is a default of the graph.
    :param at: the byte of that at which it begins.
    """

    saved: int
    at: int = 0


class PreparedFunction:
    """A call of a function on tensors of some dtypes, shapes and strides.

    :param forward: its forward.
    :param copied: the positions of the inputs that are not row-major.
    :ivar in_place: whether all outputs that the function may write over inputs are.
    """

    def __init__(self, differentiated: Differentiated, forward: _Bound, copied: Sequence[int]):
        self.differentiated, self.dims, self._copied = differentiated, forward.dims, copied
        self._forward, self._defaults, dims = forward.prepared, forward.defaults, forward.dims
        self._fixed = [array.ctypes.data for array in forward.defaults.values()]
        function, module = differentiated.function, differentiated.module
        names, types = differentiated.graph.output_names, module.forward.outputs
        position = {name: i for i, name in enumerate(function.names)}
        self._outputs = [_memory_of(types[n], dims) for n in names if n not in forward.donors]
        self._donors = [position[forward.donors[n]] if n in forward.donors else None for n in names]
        self._donated = picked([position[n] for n in forward.donors.values()]) if forward.donors else None
        self.in_place = len(forward.donors) == len(function.in_place)
        orders = function.orders
        self._orders = [orders.get(n) for n in function.graph.output_names] if orders else []
        borrowed = [r.name for r in module.residuals if r.why == "input" and r.name in position]
        inputs = list(dict.fromkeys(position[n] for n in (*differentiated.read, *borrowed)))
        outputs = list(dict.fromkeys(names.index(r.output) for r in module.residuals if r.output))
        self._saved_inputs, self._saved_outputs = inputs, outputs
        self._read = [inputs.index(position[n]) for n in differentiated.read]
        self._kept: dict[str, _Kept] = {}
        self._offsets: list[int] = []
        end = 0
        for r in module.residuals:
            if r.output:
                self._kept[r.name] = _Kept(len(inputs) + outputs.index(names.index(r.output)))
            elif r.why == "input":
                self._kept[r.name] = _Kept(inputs.index(position[r.name]) if r.name in position else -1)
            else:
                self._kept[r.name] = _Kept(len(inputs) + len(outputs), end)
                self._offsets.append(end)
                end += -(-_size_of(types[r.name], dims)[0] // ALIGN) * ALIGN
        self._own = _memory_of(Type(DTYPES["u8"], (end,)), {}) if self._offsets else None
        others = len(self._fixed) + len(self._outputs) + len(self._offsets)
        in_c = data_pointer() and not copied
        self._tensors = TensorsInC(data_pointer(), len(position), others) if in_c else None
        self._backward: _Backward | bool | None = None

    @staticmethod
    def of(differentiated: Differentiated, dims: Mapping[str, int], inputs: Tensors) -> PreparedFunction | None:
        """The call prepared; None where it is not as simple as that."""
        if differentiated.target != "cpu" or differentiated.sparse:
            return None
        module, names = differentiated.module, differentiated.function.names
        copied = [i for i, x in enumerate(inputs) if not x.is_contiguous() or x.is_neg()]
        if copied:
            with storages_stay_resizable():
                if module.variant(dict(zip(names, inputs, strict=True)), dims)[0] is not None:
                    return None
        given = dict(zip(names, map(_row_major, inputs), strict=True))
        own = [r.name for r in module.residuals if not r.borrowed]
        try:
            made = _prepared(module.forward, given, module.sizes(dims), [*differentiated.graph.output_names, *own])
            if made is None or any(names.index(donor) in copied for donor in made.donors.values()):
                return None
            return PreparedFunction(differentiated, made, copied)
        except KeyError:  # torch has no such dtype
            return None

    def _in_row_major_order(self, inputs: Tensors) -> Tensors:
        """The inputs, with copies of those that are not row-major."""
        if not self._copied:
            return inputs
        names, counts = self.differentiated.function.names, self.differentiated.module.forward.copied
        given = list(inputs)
        for i in self._copied:
            given[i] = _row_major(given[i])
            counts[names[i]] = counts.get(names[i], 0) + 1
        return given

    def run(self, inputs: Tensors) -> tuple[list[torch.Tensor], list[int], list[int]] | None:
        """(the outputs that lie in no input, and the memory of backward's own, if there is some; the addresses of
        inputs in row-major order, and of these); None, and nothing was run, if an input has no memory, is not aligned,
        or shares memory with a donated one.
        """
        try:
            given = self._in_row_major_order(inputs)  # kept until the call is over
            addresses = [x.data_ptr() for x in given]
        except RuntimeError:  # it is inside a transform of torch.func
            return None
        results, where, others = self._allocated()
        if not self._forward([*addresses, *others]):
            return None
        self._count_changes(inputs)
        return results, addresses, where

    def run_on(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
        """The results of :meth:`run`, of tensors that :func:`.tensor_guards` found like those of the call that was
        prepared: their addresses are read in C.
        """
        if self._tensors is None:
            made = self.run(inputs)
            return made[0] if made is not None else None
        results, _, others = self._allocated()
        if not self._forward.on_tensors(self._tensors, inputs, others):
            return None
        self._count_changes(inputs)
        return results

    def _allocated(self) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """(results of a call, their addresses, all addresses that follow those of the inputs)."""
        results = [new(*like) for new, like in self._outputs]
        where = [y.data_ptr() for y in results]
        others = [*self._fixed, *where]
        if self._own is not None:
            new, like = self._own
            results.append(new(*like))
            where.append(results[-1].data_ptr())
            others += [where[-1] + at for at in self._offsets]
        return results, where, others

    def _count_changes(self, inputs: Tensors) -> None:
        if self._donated is not None:
            count_changes(self._donated(inputs))

    def outputs(self, inputs: Tensors, results: Tensors) -> Tensors:
        """The outputs in order, with the program's axes, of the inputs and the results of :meth:`run`."""
        outputs = results
        if self._donated is not None:
            own = iter(results)
            outputs = [next(own) if i is None else inputs[i] for i in self._donors]
        if self._orders:
            outputs = [with_axes(y, o) if o else y for y, o in zip(outputs, self._orders, strict=True)]
        return outputs

    def forward(self, inputs: Tensors) -> tuple[Tensors, list[torch.Tensor], list[int]] | None:
        """(the outputs, what autograd is to keep, the addresses of that, 0 of an input that was copied); None where
        :meth:`run` gives None.
        """
        made = self.run(inputs)
        if made is None:
            return None
        results, addresses, where = made
        for i in self._copied:
            addresses[i] = 0
        own = results[len(self._outputs) :]
        del results[len(self._outputs) :]
        outputs = self.outputs(inputs, results)
        of_inputs, of_outputs = self._saved_inputs, self._saved_outputs
        kept = [*[inputs[i] for i in of_inputs], *[outputs[i] for i in of_outputs], *own]
        at = [*[addresses[i] for i in of_inputs], *[where[i] for i in of_outputs], *where[len(self._outputs) :]]
        return outputs, kept, at

    def read(self, saved: Tensors) -> list[torch.Tensor]:
        """Of what was kept, the inputs that gradients depend on."""
        return [saved[i] for i in self._read]

    def residuals(self, saved: Tensors) -> Residuals:
        """What was kept, for a call of the module."""
        module, function = self.differentiated.module, self.differentiated.function
        arrays: dict[str, Any] = {}
        for r in module.residuals:
            kept, type_ = self._kept[r.name], module.forward.outputs.get(r.name)
            if kept.saved < 0:
                arrays[r.name] = function.graph.defaults[r.name]
            elif r.borrowed or type_ is None:
                arrays[r.name] = function.in_memory_order(r.output or "", saved[kept.saved])
            else:
                part = saved[kept.saved][kept.at : kept.at + _size_of(type_, self.dims)[0]]
                arrays[r.name] = part.view(TORCH_DTYPES[type_.dtype]).view(type_.concrete(self.dims))
        return Residuals(module, arrays, {}, self.dims, module.forward.cotangent_types)

    def backward(self, saved: Tensors, where: Sequence[int], cotangents: Sequence[Any]) -> list[Any] | None:
        """A gradient for each input, or None where there is none; None, and nothing was run, where it takes a call of
        the module.

        :param where: the addresses of what was kept, as of :meth:`forward`.
        :param cotangents: of the outputs, in row-major order with the axes of the graph; None: zero.
        """
        if self._copied:
            try:
                saved = [x if at else _row_major(x) for x, at in zip(saved, where, strict=True)]
            except RuntimeError:  # it is inside a transform of torch.func
                return None
        if self._backward is None:
            self._backward = _Backward.of(self, saved) or False
        return self._backward(saved, where, cotangents) if isinstance(self._backward, _Backward) else None

    def kept(self, name: str) -> _Kept:
        return self._kept[name]


class _Backward:
    """The backward of a :class:`PreparedFunction`.

    :param kept: where it finds each residual.
    :param cotangents: of each that it reads: the position of the output, the program's name, shape and dtype.
    :param saved: what was kept, of a call.
    """

    def __init__(
        self,
        differentiated: Differentiated,
        prepared: Prepared,
        dims: Mapping[str, int],
        defaults: Arrays,
        kept: Sequence[_Kept],
        cotangents: Sequence[tuple[int, str, tuple[int, ...], torch.dtype]],
        saved: Tensors,
    ):
        self._saved = [described(x) for x in saved]
        self._shapes, self._bytes = [x.shape for x in saved], [x.nbytes for x in saved]
        self._prepared, self._defaults, self._kept, self._cotangents = prepared, defaults, kept, cotangents
        self._fixed = [array.ctypes.data for array in defaults.values()]
        function, module = differentiated.function, differentiated.module
        names, types, self._copied = module.joint_names[1], module.backward.outputs, module.backward.copied
        self._results = [_memory_of(types[names[n]], dims) for n in differentiated.wrt]
        number = {name: i for i, name in enumerate(differentiated.wrt)}
        self._inputs = [number.get(name) for name in function.names]
        reached = [differentiated.differentiable.get(name, set()) for name in function.graph.output_names]
        self._reached = [{function.names.index(n) for n in each} for each in reached]

    @staticmethod
    def of(call: PreparedFunction, saved: Tensors) -> _Backward | None:
        differentiated, dims = call.differentiated, call.dims
        module, graph = differentiated.module, differentiated.function.graph
        backward, cotangent_names = module.backward, module.joint_names[0]
        read = [n for n in module.forward.cotangent_types if cotangent_names.get(n) in backward.inputs]
        types = {n: graph.output(n).type for n in read}
        zeros = {n: torch.zeros(t.concrete(dims), dtype=TORCH_DTYPES[t.dtype], device="cpu") for n, t in types.items()}
        inputs = backward.inputs_of(call.residuals(saved), (), zeros)
        inputs = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        own = {d: size for d, size in dims.items() if d in backward.program.dims}
        made = _prepared(backward, inputs, own, [module.joint_names[1][n] for n in differentiated.wrt])
        if made is None:
            return None
        kept = [call.kept(n) for n in list(inputs)[: len(inputs) - len(read)]]
        places = [(graph.output_names.index(n), cotangent_names[n], tuple(x.shape), x.dtype) for n, x in zeros.items()]
        return _Backward(differentiated, made.prepared, dims, made.defaults, kept, places, saved)

    def __call__(self, saved: Tensors, where: Sequence[int], cotangents: Sequence[Any]) -> list[Any] | None:
        """:meth:`PreparedFunction.backward`."""
        try:
            upstream = [self._upstream(cotangents[i], *like) for i, *like in self._cotangents]
            found = [x.data_ptr() for x in saved if x.is_contiguous()]
            same = [x.shape for x in saved] == self._shapes and [x.nbytes for x in saved] == self._bytes
            if (
                found != where or not same
            ):  # a hook gave others (checkpoints do), or their owner other memory (FSDP does)
                if len(found) < len(saved) or [described(x) for x in saved] != self._saved:
                    return None
            own = [x.data_ptr() for x in upstream]
        except RuntimeError:
            # one is inside a transform of torch.func, or of another type: the module says what is wrong
            return None
        results = [new(*like) for new, like in self._results]
        call = [found[i] + at for i, at in self._kept]
        call += own
        call += self._fixed
        call += [y.data_ptr() for y in results]
        if not self._prepared(call):
            return None
        gradients = [None if i is None else results[i] for i in self._inputs]
        if any([x is None for x in cotangents]):
            # where no cotangent comes from, there is no gradient: None, which an optimizer skips, not zeros
            reached = set().union(*(r for r, x in zip(self._reached, cotangents, strict=True) if x is not None))
            return [x if i in reached else None for i, x in enumerate(gradients)]
        return gradients

    def _upstream(self, x: torch.Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A cotangent as the program reads it, the tensor itself if it is that already."""
        if x is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        if x.dtype is not dtype or x.shape != shape:
            raise RuntimeError(f"the cotangent {name} is a {x.dtype}{list(x.shape)}")
        if x.is_contiguous() and not x.is_neg():
            return x
        self._copied[name] = self._copied.get(name, 0) + 1  # that of a sum repeats one element
        return _row_major(x)
