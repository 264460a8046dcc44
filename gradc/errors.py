"""The exception classes of gradc.

All errors that a user can cause derive from :class:`GradcError`; only :class:`InternalError` reports a bug of gradc.  A
message names the op, the operand types, both numbers and the place; notes (``add_note``) hold the excerpt that points
at it.
"""

from __future__ import annotations

from typing import Any


def _again(kind: type[GradcError], args: tuple[Any, ...]) -> GradcError:
    """Unpickles an error without calling its constructor, which would take other arguments than ``args``."""
    base: Any = kind.__base__  # the base that determines the object's layout
    error: GradcError = base.__new__(kind)
    error.args = args
    return error


class GradcError(Exception):
    """The base class of all errors that gradc reports to its user."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


class TypeRuleError(GradcError, TypeError):
    """Operands or attributes that an op does not accept."""


class NotDifferentiable(GradcError):
    """A requested gradient does not exist; the op that blocks it is named."""


class IRFormatError(GradcError, ValueError):
    """A text that is not valid IR.

    :param line: 1-based line of the first error.
    :param column: 1-based column of it.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0):
        self.line, self.column = line, column
        super().__init__(f"line {line}, column {column}: {message}" if line else message)


class Unsupported(GradcError, NotImplementedError):
    """A feature that gradc does not implement yet; it is named."""


class InvalidProblem(GradcError, ValueError):
    """Arguments that contradict the graph: a missing input, an unbound dim, a broken assumption, a wrong shape."""


class IndexOutOfRange(GradcError, IndexError):
    """A data-dependent index outside its table.

    :param op: the op that indexes.  :param input: the name of the index value.
    :param position: flat position in the index array.
    :param value: of the index; None if the array no longer exists.
    :param bound: the valid range is [0, bound).
    """

    def __init__(self, op: str, input: str, position: int, value: int | None, bound: int):
        self.op, self.input, self.position, self.value, self.bound = op, input, position, value, bound
        what = f"index {value}" if value is not None else "the index (its array is gone or was changed since)"
        super().__init__(f"{op}: {what} at position {position} of '{input}' is out of range [0, {bound})")


class NotAscending(GradcError, ValueError):
    """Positions that must be ascending, such as the offsets of bags, decrease.

    :param position: of the first element that is less than its predecessor.
    :param value: of that element.
    :param before: the value of its predecessor.
    """

    def __init__(self, op: str, input: str, position: int, value: int, before: int):
        self.op, self.input, self.position, self.value, self.before = op, input, position, value, before
        super().__init__(
            f"{op}: {value} at position {position} of '{input}' is below the {before} before it; it must not decrease"
        )


class InvalidSetting(GradcError, ValueError):
    """An environment variable, or a value given to :meth:`gradc.knobs.Knob.set`, is malformed or not allowed.

    :param name: of the variable.  :param value: its text.  :param wrong: what is wrong with it, and what is allowed.
    """

    def __init__(self, name: str, value: str, wrong: str):
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}: {wrong}")


class MisalignedOperand(GradcError, ValueError):
    """An array whose address or strides a kernel does not support."""


class OverlappingOperands(GradcError, ValueError):
    """An output array shares memory with an input that is not donated, or with another output."""


class _TooSmall(GradcError, ValueError):
    what = "buffer"

    def __init__(self, needed: int, got: int, name: str = ""):
        self.needed, self.got = needed, got
        super().__init__(f"{self.what}{f' {name!r}' if name else ''} needs {needed} bytes, got {got}")


class WorkspaceTooSmall(_TooSmall):
    """The caller's workspace is smaller than ``workspace_size()`` bytes."""

    what = "workspace"


class BufferTooSmall(_TooSmall):
    """The caller's array is smaller than its type requires."""


class OutOfMemory(GradcError, MemoryError):
    """The predicted peak memory of a call exceeds the available memory; nothing was launched."""


class FileError(GradcError, OSError):
    """A file that cannot be read or written: a full disk, no permission, no such folder.

    :param path: the file that was asked for.
    :param doing: ``read`` or ``written``.
    :param cause: the operating system's error, whose ``errno`` is copied.
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
    """No C compiler (or no NVRTC) was found; the message says where it was searched and how to install one."""


class CompilerError(GradcError):
    """A compiler rejected generated source, or crashed on it.

    :param log: the compiler's output.  :param source: the source, with line numbers.
    """

    def __init__(self, message: str, log: str = "", source: str = ""):
        self.log = log
        self.source = "\n".join(f"{i:5d}  {line}" for i, line in enumerate(source.splitlines(), 1))
        super().__init__(f"{message}\n{log}" if log else message)


class RegistersSpilled(CompilerError):
    """CUDA kernels spill registers, and the caller asked for that to be an error.

    :param kernels: name -> (bytes of spill stores, bytes of spill loads).
    """

    def __init__(self, arch: str, kernels: dict[str, tuple[int, int]], log: str = "", source: str = ""):
        self.kernels = kernels
        spilling = "; ".join(
            f"{name}: {stores} bytes stored, {loads} loaded" for name, (stores, loads) in kernels.items()
        )
        super().__init__(f"registers are spilled on {arch}: {spilling}", log, source)


class DeviceError(GradcError, RuntimeError):
    """An accelerator reported an error; the kernel that caused it is named."""


class NoDevice(DeviceError):
    """There is no GPU, no driver, or no library (CuPy, torch) to use it with; the message says which."""


class DriverTooOld(DeviceError):
    """The driver is too old for the compiled code or for the CUDA runtime; both versions are given."""


class CaptureError(DeviceError):
    """A call cannot be captured in a CUDA graph; nothing was captured."""


class SimulationFault(DeviceError):
    """cuda-sim detected an error of a CUDA kernel; the launch was aborted and its arrays are unchanged.

    :param kind: of the error: "race", "out of bounds", ...
    :param kernel: its name.
    :param where: ``kernel.cu:12``, "" if unknown.
    :param block: and :param thread: that made the access or call.
    :param message: the complete message.
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


class UntestedVersion(UserWarning):
    """A package next to gradc is newer than all releases that gradc was tested with; it is used all the same."""


class InternalError(Exception):
    """A bug in gradc: please report it with a dump (``GRADC_DUMP``)."""
