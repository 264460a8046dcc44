"""Every failure of gradc, as one small tree.

The user's mistakes derive from :class:`GradcError`; :class:`InternalError` alone is ours.  A message names the op, the
operand types, both numbers and the place; ``add_note`` carries the excerpt that points at it.
"""

from __future__ import annotations

from typing import Any


def _again(kind: type[GradcError], args: tuple[Any, ...]) -> GradcError:
    """An error as it was, its parts in its state: its constructor would make the message anew from them."""
    base: Any = kind.__base__  # of several, the one that an error of this kind lies in memory as
    error: GradcError = base.__new__(kind)
    error.args = args
    return error


class GradcError(Exception):
    """Anything gradc refuses, and why."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


class TypeRuleError(GradcError, TypeError):
    """Operands or attributes that an op does not take."""


class NotDifferentiable(GradcError):
    """A wanted gradient that does not exist; the op in the way is named."""


class IRFormatError(GradcError, ValueError):
    """Text that is not IR.

    :param line: 1-based line of the first thing that is wrong.
    :param column: 1-based column of it.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0):
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {message}" if line else message)


class Unsupported(GradcError, NotImplementedError):
    """Something gradc means to have and does not have yet, named."""


class InvalidProblem(GradcError, ValueError):
    """Arguments that contradict the graph: a missing input, an unbound dim, a broken assumption, a wrong shape."""


class IndexOutOfRange(GradcError, IndexError):
    """A data-dependent index outside its table.

    :param op: the op that indexes.  :param input: the name of the index value.
    :param position: flat position in the index array.
    :param value: what stands there; None if the array is gone by now.
    :param bound: the valid range is [0, bound).
    """

    def __init__(self, op: str, input: str, position: int, value: int | None, bound: int):
        self.op, self.input, self.position, self.value, self.bound = op, input, position, value, bound
        what = f"index {value}" if value is not None else "the index (its array is gone or was changed since)"
        super().__init__(f"{op}: {what} at position {position} of '{input}' is out of range [0, {bound})")


class NotAscending(GradcError, ValueError):
    """Positions that must not decrease, such as the offsets of bags, and do.

    :param position: of the first that is below the one before it.
    :param value: what stands there.
    :param before: the one before it.
    """

    def __init__(self, op: str, input: str, position: int, value: int, before: int):
        self.op, self.input, self.position, self.value, self.before = op, input, position, value, before
        super().__init__(
            f"{op}: {value} at position {position} of '{input}' is below the {before} before it; it must not decrease"
        )


class InvalidSetting(GradcError, ValueError):
    """An environment variable, or what :meth:`gradc.knobs.Knob.set` was given, that cannot be read or must not be
    honoured.

    :param name: of the variable.  :param value: its text.  :param wrong: what is wrong with it, and what it may be.
    """

    def __init__(self, name: str, value: str, wrong: str):
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}: {wrong}")


class MisalignedOperand(GradcError, ValueError):
    """An array whose address or strides a kernel cannot take."""


class OverlappingOperands(GradcError, ValueError):
    """An output array that shares memory with an input that is not donated, or with another output."""


class _TooSmall(GradcError, ValueError):
    what = "buffer"

    def __init__(self, needed: int, got: int, name: str = ""):
        self.needed, self.got = needed, got
        super().__init__(f"{self.what}{f' {name!r}' if name else ''} needs {needed} bytes, got {got}")


class WorkspaceTooSmall(_TooSmall):
    """The caller's workspace holds fewer bytes than ``workspace_size()`` says."""

    what = "workspace"


class BufferTooSmall(_TooSmall):
    """The caller's array holds fewer bytes than its type says."""


class OutOfMemory(GradcError, MemoryError):
    """The known peak of a call exceeds what can be had; nothing was launched."""


class FileError(GradcError, OSError):
    """A file that cannot be read or written: a full disk, no permission, no such folder.

    :param path: the file that was asked for.
    :param doing: ``read`` or ``written``.
    :param cause: what the system said; ``errno`` is its.
    """

    def __init__(self, path: object, doing: str, cause: OSError):
        self.message = f"{path} cannot be {doing}: {cause.strerror or cause}"
        super().__init__(self.message)
        self.errno, self.strerror, self.filename = cause.errno, cause.strerror, str(path)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        again, args, state = super().__reduce__()
        return again, args, {**state, "errno": self.errno, "strerror": self.strerror, "filename": self.filename}


class CompilerMissing(GradcError):
    """No C compiler (or no NVRTC) was found; says where it was looked for and how to get one."""


class CompilerError(GradcError):
    """A compiler refused or died on our source.

    :param log: what it printed.  :param source: the source, lines numbered.
    """

    def __init__(self, message: str, log: str = "", source: str = ""):
        self.log = log
        self.source = "\n".join(f"{i:5d}  {line}" for i, line in enumerate(source.splitlines(), 1))
        super().__init__(f"{message}\n{log}" if log else message)


class RegistersSpilled(CompilerError):
    """CUDA kernels that need more registers than they may have, where that was to be an error.

    :param kernels: by name, the bytes stored to local memory and the bytes loaded again.
    """

    def __init__(self, arch: str, kernels: dict[str, tuple[int, int]], log: str = "", source: str = ""):
        self.kernels = kernels
        spilling = "; ".join(
            f"{name}: {stores} bytes stored, {loads} loaded" for name, (stores, loads) in kernels.items()
        )
        super().__init__(f"registers are spilled on {arch}: {spilling}", log, source)


class DeviceError(GradcError, RuntimeError):
    """An accelerator reported an error; the kernel that raised it is named."""


class NoDevice(DeviceError):
    """There is no GPU to run on, no driver for it, or nothing to reach it with; says which."""


class DriverTooOld(DeviceError):
    """The driver does not know what was compiled, or the CUDA that wants to talk to it; both versions are given."""


class CaptureError(DeviceError):
    """A call that cannot become part of a CUDA graph, and why; nothing was captured."""


class SimulationFault(DeviceError):
    """What a CUDA kernel must not do, seen by cuda-sim; the launch ended there and wrote nothing to its arrays.

    :param kind: one word for it: "race", "out of bounds", ...
    :param kernel: its name.
    :param where: ``kernel.cu:12``, "" if unknown.
    :param block: and :param thread: whose access or call it was.
    :param message: all of it in words.
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        where: str,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        message: str,
    ):
        self.kind, self.kernel, self.where, self.block, self.thread = kind, kernel, where, block, thread
        super().__init__(message)


class InternalError(Exception):
    """A broken promise of ours: please report it with the dump (``GRADC_DUMP``)."""
