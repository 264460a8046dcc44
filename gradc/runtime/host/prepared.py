"""Calls of which everything but the addresses of their arrays was checked and bound before.

A call's arguments are checked completely once for their dtypes, shapes and strides (:meth:`.Executable.bind_call`).
What is left to each call is what depends on addresses: that there is memory, its alignment, and that no other array has
a byte of a donated one, where the results lie that are no memory of their own.  They are checked where the table of
pointers is filled, in C (``gradc_call_prepared`` of ``templates/cpu/runtime.c``).
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import BoundCall
from ..torch_private import forward_level, is_tracing, tensor_guards
from . import pool
from .arrays import SMALL, Arguments, Array, Kind, Results, empty, lease
from .tensors import is_tensor, to_tensor, written

if TYPE_CHECKING:
    from .cpu import Binding, CpuProgram

_ROW_MAJOR, _ALIGNED, _WRITEABLE = 1, 0x100, 0x400  # NumPy's NPY_ARRAY_*

KEPT = 8
"""Calls of a program that are remembered."""


class _Frame(NamedTuple):
    """What one call at a time needs.

    :param addresses: of the arrays, and their order in memory: room for both.
    :param table: of pointers, with those of constants.
    :param workspace: memory for temps if it is small; else each call takes its own.
    :param pointers: to the context, addresses, table and workspace.
    """

    context: pool.Context
    addresses: Any
    table: Any
    workspace: Array | None
    pointers: tuple[int, int, int, int]


class Prepared:
    """A call of a program on the CPU: ``prepared(addresses)`` runs it.

    :param arrays: root -> (bytes, bytes of an element) of the arrays whose addresses are given, in their order.
    :param donors: root of an output -> that of the donated input in whose memory it lies.
    :param exclusive: others that are to share memory with no array: inputs, and outputs in the caller's memory.
    """

    def __init__(
        self,
        native: CpuProgram,
        binding: Binding,
        arrays: Mapping[str, tuple[int, int]],
        donors: Mapping[str, str],
        exclusive: Collection[str] = (),
    ):
        self.native, self.binding = native, binding
        self._frames: list[_Frame] = []  # those not in use; a signal handler or another thread may call meanwhile
        self._pack = struct.Struct(f"={len(arrays)}Q").pack_into
        place, alone = native.place, {*donors.values(), *exclusive}
        lent = [*((place[output], place[donor], 0) for output, donor in donors.items()), *binding.lent]
        of_arrays = [n for root, (size, unit) in arrays.items() for n in (place[root], size, unit, root in alone)]
        tables = [
            (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
            for numbers in (of_arrays, [n for p in binding.temps for n in p], [n for p in lent for n in p])
        ]
        self._call = pool.PreparedCall(
            native.entry,
            ctypes.addressof(binding.dims),
            len(arrays),
            len(binding.temps),
            len(lent),
            binding.scratch,
            bool(alone),
            *map(ctypes.addressof, tables),
        )
        self._kept = tables  # what the struct points to
        self._count, self._pointer, self._entry = len(arrays), ctypes.addressof(self._call), pool.prepared_entry()

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Runs the call; False, and nothing was run, if an array has no memory or is not aligned, or shares it with a
        donated one.

        :param addresses: of arrays that are as they were when the call was prepared.
        :raises IndexOutOfRange: a data-dependent index is out of range; nothing that depends on it was written.
        """
        frame = self._frame()
        self._pack(frame.addresses, 0, *addresses)
        return self._run(frame, self._entry)

    def on_tensors(self, tensors: Tensors, given: tuple[Any, ...], others: Sequence[int]) -> bool:
        """:meth:`__call__` on tensors that have memory, and on the addresses that follow theirs."""
        frame = self._frame()
        tensors.pack(frame.addresses, others)
        return self._run(frame, tensors.entry, tensors.pointer, given)

    def on_arrays(self, types: ArrayTypes | TensorTypes, arrays: tuple[Any, ...]) -> bool:
        """:meth:`__call__` on arrays, or tensors; False, too, if they are not of these types."""
        if types.entry is not None:
            return self._run(self._frame(), types.entry, types.pointer, arrays)
        addresses = types.addresses(arrays)
        return addresses is not None and self(addresses)

    def _frame(self) -> _Frame:
        """A frame that no other call has."""
        try:
            return self._frames.pop()
        except IndexError:
            return self._new_frame()

    def _new_frame(self) -> _Frame:
        native, size = self.native, self.binding.workspace
        table = (ctypes.c_void_p * max(len(native.roots), 1))()
        for name, array in native.constants.items():
            table[native.place[name]] = array.ctypes.data
        context = pool.new_context()
        if self.binding.large:
            context.stream_from = pool.stream_from()
        addresses = (ctypes.c_uint64 * max(2 * self._count, 1))(*[0] * self._count, *range(self._count))
        workspace = np.empty(size, np.uint8) if size < SMALL else None
        pointers = (
            context.address,
            ctypes.addressof(addresses),
            ctypes.addressof(table),
            workspace.ctypes.data if workspace is not None else 0,
        )
        return _Frame(context, addresses, table, workspace, pointers)

    def _run(self, frame: _Frame, entry: Callable[..., int], *first: Any) -> bool:
        """Calls an entry with what is in a frame, which is free then."""
        pointers = frame.pointers
        if frame.workspace is None:
            own = lease(self.binding.workspace, brief=True)  # until the call is over
            pointers = (*pointers[:3], own.address)
        code = entry(*first, self._pointer, *pointers)
        error = self.native.failure(frame.context) if code not in (0, pool.UNFIT) else None
        self._frames.append(frame)
        if error is not None:
            raise error
        return code != pool.UNFIT


def prepared(
    native: CpuProgram, call: BoundCall, outputs: Mapping[str, tuple[int, int]], out: Collection[str] = ()
) -> Prepared | None:
    """A checked call as one to which addresses alone are given, of inputs and then of outputs that lie in no donated
    input, in order; None where it is not as simple as that: an input was copied, or several outputs are one array.

    :param outputs: (bytes, bytes of an element) by output.
    :param out: those whose memory is the caller's.
    """
    if call.noncontiguous or call.add_to:
        return None
    root_of = {name: native.program.root(buffer) for name, buffer in native.program.outputs}
    roots = {root_of[name]: size for name, size in outputs.items()}
    if len(roots) < len(outputs) or any(native.program.buffer[root].kind != "output" for root in roots):
        return None
    donors = {root_of[name]: donor for name, donor in call.donors.items()}
    own = {root: size for root, size in roots.items() if root not in donors}
    arrays = {n: (a.nbytes, a.itemsize) for n, a in call.arrays.items()} | own
    return Prepared(native, call.plan, arrays, donors, {*call.exclusive, *(root_of[name] for name in out)})


class Tensors:
    """The tensors of a call of :meth:`Prepared.on_tensors`.

    :param data_pointer: :func:`.data_pointer`.
    :param count: of the tensors.
    :param others: how many addresses follow theirs.
    """

    def __init__(self, data_pointer: int, count: int, others: int):
        self._struct = pool.Tensors(pool.tuple_item(), data_pointer, count)
        self.pointer, self.entry = ctypes.addressof(self._struct), pool.tensors_entry()
        self._pack, self._after = struct.Struct(f"={others}Q").pack_into, 8 * count

    def pack(self, addresses: Any, others: Sequence[int]) -> None:
        """Puts these behind the tensors' addresses."""
        self._pack(addresses, self._after, *others)


class ArrayTypes:
    """What arrays of NumPy's have to be, to be given to a :class:`Prepared`: row-major and aligned, too.

    :param types: (shape, dtype, whether it is written) of each.
    :ivar entry: :func:`.pool.arrays_entry`.
    :ivar pointer: the first argument of that.
    """

    def __init__(self, types: Sequence[tuple[tuple[int, ...], Any, bool]]):
        self._types = types
        flags = {written: _ROW_MAJOR | _ALIGNED | (_WRITEABLE if written else 0) for written in (False, True)}
        numbers = [n for shape, dtype, written in types for n in (id(dtype), flags[written], len(shape), *shape)]
        self._expected = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        self._struct = pool.ArrayTypes(pool.tuple_item(), id(np.ndarray), ctypes.addressof(self._expected), len(types))
        self.pointer, self.entry = ctypes.addressof(self._struct), pool.arrays_entry()

    def addresses(self, arrays: Sequence[Any]) -> list[int] | None:
        """Those of the arrays if they are so, without :attr:`entry`."""
        for array, (shape, dtype, over) in zip(arrays, self._types, strict=True):
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return None
            flags = array.flags
            if not (flags.c_contiguous and flags.aligned and (flags.writeable or not over)):
                return None
        return [array.ctypes.data for array in arrays]


class TensorTypes:
    """What arrays of NumPy's and tensors of torch's have to be, among them at least one tensor; as :class:`ArrayTypes`.

    :param like: arrays and tensors that are so.
    """

    entry = None
    pointer = 0

    def __init__(self, like: Sequence[Any], types: Sequence[tuple[tuple[int, ...], Any, bool]]):
        self._tensors = [i for i, x in enumerate(like) if is_tensor(x)]
        self._arrays = sorted(set(range(len(types))).difference(self._tensors))
        self._types = ArrayTypes([types[i] for i in self._arrays])
        at = {i: n for n, i in enumerate((*self._tensors, *self._arrays))}
        self._order = [at[i] for i in range(len(types))]
        self._guards = tensor_guards([like[i] for i in self._tensors])
        self._require_grad = any([like[i].requires_grad for i in self._tensors])

    @property
    def known(self) -> bool:
        """Whether torch at hand can tell."""
        return self._guards is not None

    def addresses(self, arrays: Sequence[Any]) -> list[int] | None:
        """:meth:`ArrayTypes.addresses`; None, too, for tensors that something records."""
        tensors = [arrays[i] for i in self._tensors]
        if is_tracing() or forward_level() >= 0 or not self._guards(*tensors):
            return None
        if self._require_grad and sys.modules["torch"].is_grad_enabled():
            return None
        others = self._types.addresses([arrays[i] for i in self._arrays])
        if others is None:
            return None
        found = [*[x.data_ptr() for x in tensors], *others]
        return [found[n] for n in self._order]


class Known(NamedTuple):
    """A call that was checked.

    :param given: the sizes that were given with it.
    :param out: the names of the outputs for which it had arrays.
    :param dims: the value of every symbol.
    :param types: of inputs and outputs.
    :param of_torch: whether results are tensors.
    :param outputs: the name of each that is allocated, what allocates it, its shape and dtype.
    :param donors: the name of each that is written over an input, and that one's position.
    :param shapes: of the inputs, which are compared before memory for large results is asked for; None: all are small.
    """

    prepared: Prepared
    given: Mapping[str, int]
    out: tuple[str, ...]
    dims: dict[str, int]
    types: ArrayTypes | TensorTypes
    of_torch: bool
    outputs: tuple[tuple[str, Callable[..., Array], tuple[int, ...], Any], ...]
    donors: tuple[tuple[str, int], ...]
    shapes: list[tuple[int, ...]] | None


class Described(NamedTuple):
    """A call.

    :param arrays: its inputs, and then those of ``out=``.
    :param given: the sizes given with it.
    :param out: the names in ``out=``.
    :param known: calls that it may be a repetition of; None: there are none.
    """

    arrays: tuple[Any, ...]
    given: Mapping[str, int]
    out: tuple[str, ...]
    known: Sequence[Known] | None


class KnownCalls:
    """The calls of a program on arrays of NumPy's, and tensors of torch's, that are known.

    :param inputs: the program's.
    """

    def __init__(self, inputs: Sequence[str]):
        self._inputs = inputs
        self._pick: Callable[[Arguments], Any] | None = operator.itemgetter(*inputs) if len(inputs) > 1 else None
        self._known: list[Known] = []  # the most recent one first; replaced as a whole, for threads read it

    def described(self, inputs: Arguments, out: Any, dims: Mapping[str, int] | None) -> Described | None:
        """A call as it may be known; None if an input is missing, or one too many, or sizes or ``out=`` are given
        otherwise than by name.
        """
        if len(inputs) != len(self._inputs) or not (dims is None or isinstance(dims, Mapping)):
            return None
        if not (out is None or type(out) is dict):
            return None
        try:
            arrays = self._pick(inputs) if self._pick is not None else tuple([inputs[name] for name in self._inputs])
        except KeyError:
            return None
        if out:
            return Described((*arrays, *out.values()), dims or {}, tuple(out), self._known or None)
        return Described(arrays, dims or {}, (), self._known or None)

    def remember(self, call: Described, bound: BoundCall, prepare: Callable[[], Prepared | None]) -> None:
        """Keeps a call that was checked and launched if others may repeat it.

        :param prepare: gives it prepared.
        """
        if not bound.donors.keys().isdisjoint(call.out):  # an input may be what is given for an output
            return
        given = {name: bound.outputs[name] for name in call.out}
        for x, array in zip(call.arrays, (*bound.arrays.values(), *given.values()), strict=True):
            if is_tensor(x):
                if x.data_ptr() != array.ctypes.data:
                    return
                continue
            if type(x) is not np.ndarray or x.dtype is not array.dtype or x.ctypes.data != array.ctypes.data:
                return
            if x.dtype is not np.dtype(x.dtype.type):  # of an array that was unpickled: another object for each
                return
        prepared = prepare()
        if prepared is None:
            return
        written, own = set(bound.donors.values()), bound.outputs.keys() - bound.donors.keys() - given.keys()
        made = {name: y for name, y in bound.outputs.items() if name in own}
        expected = [
            *((x.shape, x.dtype, name in written) for name, x in bound.arrays.items()),
            *((y.shape, y.dtype, True) for y in (*given.values(), *made.values())),
        ]
        tensors = any([is_tensor(x) for x in call.arrays])
        types = TensorTypes(call.arrays, expected) if tensors else ArrayTypes(expected)
        if isinstance(types, TensorTypes) and not types.known:
            return
        outputs = tuple((n, np.empty if y.nbytes < SMALL else empty, y.shape, y.dtype) for n, y in made.items())
        donors = tuple((output, self._inputs.index(donor)) for output, donor in bound.donors.items())
        shapes = [x.shape for x in call.arrays] if any(y.nbytes >= SMALL for y in made.values()) else None
        of_torch = bound.kind is Kind.TORCH
        known = Known(prepared, dict(call.given), call.out, bound.dims, types, of_torch, outputs, donors, shapes)
        self._known = [known, *self._known][:KEPT]

    @staticmethod
    def repeat(call: Described) -> tuple[Results, dict[str, int]] | None:
        """Runs a call that is known: (results, value of every symbol); None, and nothing was done, if it is not."""
        for known in call.known or ():
            if (
                known.out == call.out
                and known.given == call.given
                and (known.shapes is None or [getattr(x, "shape", None) for x in call.arrays] == known.shapes)
            ):
                results: Results = {name: allocate(shape, dtype) for name, allocate, shape, dtype in known.outputs}
                if known.prepared.on_arrays(known.types, (*call.arrays, *results.values())):
                    over = [(name, call.arrays[donor]) for name, donor in known.donors]
                    if known.of_torch:
                        written(*[x for _, x in over])
                        results = {name: to_tensor(y) for name, y in results.items()}
                        over = [(name, x.detach() if getattr(x, "requires_grad", False) else x) for name, x in over]
                    results.update(over)
                    if known.out:
                        results.update(zip(known.out, call.arrays[-len(known.out) :], strict=True))
                    return results, known.dims
        return None
