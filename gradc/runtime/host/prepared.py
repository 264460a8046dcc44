"""Calls of which everything but the addresses of their arrays was checked and bound before.

A call's arguments are checked completely once for their dtypes, shapes and strides (:meth:`.Executable.bind_call`).
What is left to each call is what depends on addresses: that there is memory, and its alignment; both are checked where
the table of pointers is filled, in C (``gradc_call_prepared`` of ``templates/cpu/runtime.c``).  Only calls are prepared
whose results are memory of their own, so that nothing that is written is anybody else's.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import BoundCall
from . import pool
from .arrays import SMALL, Arguments, Array, empty

if TYPE_CHECKING:
    from .cpu import Binding, CpuProgram

KEPT = 8
"""Calls of a program on arrays of NumPy's that are remembered."""


class _Frame(NamedTuple):
    """What one call at a time needs.

    :param addresses: of the arrays: room for them.
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
    """

    def __init__(self, native: CpuProgram, binding: Binding, arrays: Mapping[str, tuple[int, int]]):
        self.native, self.binding = native, binding
        self._frames: list[_Frame] = []  # those not in use; a signal handler or another thread may call meanwhile
        self._pack = struct.Struct(f"={len(arrays)}Q").pack_into
        places = [n for root, (size, unit) in arrays.items() for n in (native.place[root], unit if size else 0)]
        tables = [
            (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
            for numbers in (places, [n for p in binding.temps for n in p], [n for p in binding.lent for n in p])
        ]
        self._call = pool.PreparedCall(
            native.entry,
            ctypes.addressof(binding.dims),
            len(arrays),
            len(binding.temps),
            len(binding.lent),
            binding.scratch,
            *map(ctypes.addressof, tables),
        )
        self._kept = tables  # what the struct points to
        self._count, self._pointer, self._entry = len(arrays), ctypes.addressof(self._call), pool.prepared_entry()

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Runs the call; False, and nothing was run, if an array has no memory or is not aligned.

        :param addresses: of arrays that are as they were when the call was prepared.
        :raises IndexOutOfRange: a data-dependent index is out of range; nothing that depends on it was written.
        """
        frame = self._frame()
        self._pack(frame.addresses, 0, *addresses)
        return self._run(frame, self._entry)

    def on_arrays(self, types: ArrayTypes, arrays: tuple[Any, ...]) -> bool:
        """:meth:`__call__` on arrays of NumPy's; False, too, if they are not of these types."""
        frame = self._frame()
        if types.entry is not None:
            return self._run(frame, types.entry, types.pointer, arrays)
        if not types.read(arrays, frame.addresses):
            self._frames.append(frame)
            return False
        return self._run(frame, self._entry)

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
        addresses = (ctypes.c_uint64 * max(self._count, 1))()
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
            own = empty((self.binding.workspace,), np.uint8, brief=True)
            pointers = (*pointers[:3], own.ctypes.data)
        code = entry(*first, self._pointer, *pointers)
        error = self.native.failure(frame.context) if code not in (0, pool.UNFIT) else None
        self._frames.append(frame)
        if error is not None:
            raise error
        return code != pool.UNFIT


def prepared(native: CpuProgram, call: BoundCall, outputs: Mapping[str, tuple[int, int]]) -> Prepared | None:
    """A checked call as one to which addresses alone are given, of inputs and then of outputs, in order; None where it
    is not as simple as that: an input was copied, or several outputs are one array.

    :param outputs: (bytes, bytes of an element) by output.
    """
    if call.noncontiguous or call.add_to:
        return None
    root_of = {name: native.program.root(buffer) for name, buffer in native.program.outputs}
    roots = {root_of[name]: size for name, size in outputs.items()}
    if len(roots) < len(outputs) or any(native.program.buffer[root].kind != "output" for root in roots):
        return None
    return Prepared(native, call.plan, {n: (a.nbytes, a.itemsize) for n, a in call.arrays.items()} | roots)


class ArrayTypes:
    """What arrays of NumPy's have to be, to be given to a :class:`Prepared`: row-major and aligned, too.

    :param types: (shape, dtype) of each.
    :ivar entry: :func:`.pool.arrays_entry`.
    :ivar pointer: the first argument of that.
    """

    def __init__(self, types: Sequence[tuple[tuple[int, ...], Any]]):
        self._types = types
        numbers = [n for shape, dtype in types for n in (id(dtype), len(shape), *shape)]
        self._expected = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        self._struct = pool.ArrayTypes(pool.tuple_item(), id(np.ndarray), ctypes.addressof(self._expected), len(types))
        self.pointer, self.entry = ctypes.addressof(self._struct), pool.arrays_entry()

    def read(self, arrays: tuple[Any, ...], addresses: Any) -> bool:
        """Whether the arrays are so, and if so, their addresses, without :attr:`entry`."""
        for i, (array, (shape, dtype)) in enumerate(zip(arrays, self._types, strict=True)):
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return False
            if not (array.flags.c_contiguous and array.flags.aligned):
                return False
            addresses[i] = array.ctypes.data
        return True


class Known(NamedTuple):
    """A call on arrays of NumPy's that was checked.

    :param given: the sizes that were given with it.
    :param dims: the value of every symbol.
    :param types: of inputs and outputs.
    :param outputs: the name of each, what allocates it, its shape and dtype.
    :param shapes: of the inputs, which are compared before memory for large results is asked for; None: all are small.
    """

    prepared: Prepared
    given: Mapping[str, int]
    dims: dict[str, int]
    types: ArrayTypes
    outputs: tuple[tuple[str, Callable[..., Array], tuple[int, ...], Any], ...]
    shapes: list[tuple[int, ...]] | None


class Described(NamedTuple):
    """A call without ``out=``.

    :param arrays: its inputs.
    :param given: the sizes given with it.
    :param known: calls that it may be a repetition of; None: there are none.
    """

    arrays: tuple[Any, ...]
    given: Mapping[str, int]
    known: Sequence[Known] | None


class NumpyCalls:
    """The calls of a program on arrays of NumPy's that are known.

    :param inputs: the program's.
    """

    def __init__(self, inputs: Sequence[str]):
        self._inputs = inputs
        self._pick: Callable[[Arguments], Any] | None = operator.itemgetter(*inputs) if len(inputs) > 1 else None
        self._known: list[Known] = []  # the most recent one first; replaced as a whole, for threads read it

    def described(self, inputs: Arguments, dims: Mapping[str, int] | None) -> Described | None:
        """A call as it may be known; None if an input is missing, or one too many, or sizes are given otherwise."""
        if len(inputs) != len(self._inputs) or not (dims is None or isinstance(dims, Mapping)):
            return None
        try:
            arrays = self._pick(inputs) if self._pick is not None else tuple([inputs[name] for name in self._inputs])
        except KeyError:
            return None
        return Described(arrays, dims or {}, self._known or None)

    def remember(self, call: Described, bound: BoundCall, prepare: Callable[[], Prepared | None]) -> None:
        """Keeps a call that was checked and launched if others may repeat it.

        :param prepare: gives it prepared.
        """
        for x, array in zip(call.arrays, bound.arrays.values(), strict=True):
            if type(x) is not np.ndarray or x.dtype is not array.dtype or x.ctypes.data != array.ctypes.data:
                return
            if x.dtype is not np.dtype(x.dtype.type):  # of an array that was unpickled: another object for each
                return
        prepared = prepare()
        if prepared is None:
            return
        types = ArrayTypes([(x.shape, x.dtype) for x in (*call.arrays, *bound.outputs.values())])
        outputs = tuple(
            (name, np.empty if array.nbytes < SMALL else empty, array.shape, array.dtype)
            for name, array in bound.outputs.items()
        )
        large = any(array.nbytes >= SMALL for array in bound.outputs.values())
        shapes = [x.shape for x in call.arrays] if large else None
        known = Known(prepared, dict(call.given), bound.dims, types, outputs, shapes)
        self._known = [known, *self._known][:KEPT]

    @staticmethod
    def repeat(call: Described) -> tuple[dict[str, Array], dict[str, int]] | None:
        """Runs a call that is known: (results, value of every symbol); None, and nothing was done, if it is not."""
        for known in call.known or ():
            if known.given == call.given and (
                known.shapes is None or [getattr(x, "shape", None) for x in call.arrays] == known.shapes
            ):
                results = {name: allocate(shape, dtype) for name, allocate, shape, dtype in known.outputs}
                if known.prepared.on_arrays(known.types, (*call.arrays, *results.values())):
                    return results, known.dims
        return None
