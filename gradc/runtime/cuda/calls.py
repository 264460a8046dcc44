"""A call of an Executable on a device: asked for along a stream, its bad indices raised now or later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import knobs
from ...codegen.cuda.launch import LaunchPlan
from ...errors import CaptureError, DeviceError, GradcError
from ..simulator.device import Simulator
from . import gpu
from .cublas import workspace_bytes
from .on_device import DeviceArray, check_addable
from .programs import Arrays, CudaProgram, Submission

if TYPE_CHECKING:
    from ..executable import Executable, Prepared

Array = np.ndarray[Any, Any]


def on_a_device(executable: Executable, payload: bytes | None) -> CudaProgram:
    """The program of an executable for cuda or cuda-sim; nothing is asked of a device yet."""
    if executable.target == "cuda":
        sync, arch = executable.errors == "sync", executable.arch
        return CudaProgram(
            executable.program,
            lambda text, cubin, wide: gpu.Gpu(text, cubin=cubin, wide=wide, arch=arch, sync=sync),
            workspace_bytes(arch),
            payload,
        )
    check = knobs.SIM_CHECK.get()
    return CudaProgram(executable.program, lambda text, *_: Simulator(text, check))


def call(executable: Executable, prepared: Prepared, arrays: Arrays, plan: LaunchPlan, workspace: Array | None) -> None:
    """Ask for it.

    :raises CaptureError: the stream is being captured, and no workspace was given.
    :raises IndexOutOfRange: with ``errors="sync"``; else :attr:`Executable.pending` has it.
    """
    native: CudaProgram = executable.native
    captured = native.device.capturing(prepared.stream)
    if captured and workspace is None and plan.workspace:
        raise CaptureError(
            f"{executable.program.name} is called on a stream that is being captured, where nothing can be allocated:"
            f" workspace= of {plan.workspace} bytes is needed"
        )
    started = start(executable, prepared, arrays, plan, workspace)
    if captured:
        return  # the word stays in the workspace
    if executable.errors == "sync":
        with_program(executable, lambda: native.finish(started))
        return
    watch = native.watch(started, again(executable, prepared))
    if watch is not None:
        executable.pending.add(watch)


def timed(executable: Executable, prepared: Prepared, only: int = -1) -> float:
    """Seconds of a call, or of one step of it, on the device."""
    native: CudaProgram = executable.native
    plan, device = native.bind(prepared.dims), native.device
    space = executable.place.scratch((max(plan.workspace, 1),), np.uint8, prepared.stream)
    device.load()
    begin, end = device.event(), device.event()
    begin.record(prepared.stream)
    started = start(executable, prepared, executable.bound(prepared), plan, space, only)
    end.record(prepared.stream)
    end.wait()
    with_program(executable, lambda: native.finish(started))
    return float(end.since(begin))


def start(
    executable: Executable,
    prepared: Prepared,
    arrays: Arrays,
    plan: LaunchPlan,
    workspace: Array | None,
    only: int = -1,
) -> Submission:
    """The launches alone."""
    adds = {executable.program.root(executable.output_buffers[key]): target for key, target in prepared.add_to.items()}
    for key, target in prepared.add_to.items():
        check_addable(target, key)
    native: CudaProgram = executable.native
    return with_program(
        executable, lambda: native.start(arrays, plan, workspace, prepared.stream, only=only, adds=adds)
    )  # type: ignore[no-any-return]


def with_program(executable: Executable, work: Callable[[], Any]) -> Any:
    """An error of the device says whose call it was."""
    try:
        return work()
    except DeviceError as error:
        error.add_note(f"in {executable.program.name}")
        raise


def again(executable: Executable, prepared: Prepared) -> Callable[[], Arrays | None]:
    """The call's arrays, with results of their own, for as long as the caller keeps what he gave; they are not kept
    alive for it.
    """
    given = {name: _weak(value) for name, value in prepared.given.items()}
    outputs = {a.ctypes.data for a in prepared.outputs.values()}
    donated = any(a.ctypes.data in outputs for a in prepared.arrays.values() if a.nbytes)
    dims = {d: prepared.dims[d] for d in executable.program.dims}
    stream = prepared.stream

    def arrays() -> Mapping[str, Array] | None:
        values = {name: recall() for name, recall in given.items()}
        if donated or any(value is None for value in values.values()):
            return None
        try:
            return executable.bound(executable.prepare(values, dims=dims, stream=stream))
        except GradcError:
            return None

    return arrays


def _weak(value: Any) -> Callable[[], Any]:
    """What gives a value as long as somebody else has it; a number, always."""
    if isinstance(value, bool | int | float | np.generic) or (
        isinstance(value, np.ndarray) and not isinstance(value, DeviceArray)
    ):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None
