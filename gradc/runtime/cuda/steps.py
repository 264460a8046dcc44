"""The steps of a launch plan submitted to a device: one by one, or all with their arguments packed once for each set of
addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from ...codegen.cuda.actions import FLAG, Action, Address, Convolution, Launch, Library, Part, Strided
from ...codegen.cuda.launch import LaunchPlan
from ...errors import DeviceError, OutOfMemory
from ..recent import Recent
from .capture_mode import relaxed
from .device import Device, NoKernel, Span

Array = np.ndarray[Any, Any]
Roots = Mapping[str, int]
"""The address of each memory root of a plan."""


def span_of(part: Part, roots: Roots) -> Span:
    return Span(roots[part.root] + part.start, part.count, part.dtype)


def _argument(value: Part | int, roots: Roots) -> Span | int:
    if isinstance(value, Part):
        span = span_of(value, roots)
        return span.address if isinstance(value, Address) else span
    return value


def submit(device: Device, plan: LaunchPlan, actions: Iterable[Action], roots: Roots, stream: int) -> None:
    """Submits actions of a plan one by one."""
    for action in actions:
        if isinstance(action, Launch):
            args = [_argument(a, roots) for a in action.args]
            device.launch(
                action.function,
                action.blocks,
                action.threads,
                args,
                action.written,
                stream,
                action.shared,
                action.wide,
                action.batch,
            )
        else:
            call(device, plan, action, roots)(stream)


def call(device: Device, plan: LaunchPlan, action: Library | Convolution, roots: Roots) -> Callable[[int], None]:
    """A function that submits a library's call to a stream."""
    if isinstance(action, Convolution):
        return convolution(device, plan, action, roots)
    return product(device, plan, action, roots)


def convolution(device: Device, plan: LaunchPlan, action: Convolution, roots: Roots) -> Callable[[int], None]:
    """A function that submits a convolution to a stream."""
    out = action.out.part
    if any(0 in x.shape for x in action.operands):  # an empty sum
        span = span_of(out, roots)
        return lambda stream: device.fill(span.address, 0, span.nbytes, stream)
    first, second, written = (_first(x, roots) for x in (*action.operands, action.out))
    return device.convolution(action, first, second, written, span_of(plan.library, roots))


def _first(operand: Strided, roots: Roots) -> int:
    """The address of an operand's first element."""
    return span_of(operand.part, roots).address + operand.skipped


def product(device: Device, plan: LaunchPlan, action: Library, roots: Roots) -> Callable[[int], None]:
    """A function that submits a matrix product to a stream."""
    p = action.product
    out = span_of(p.out.part, roots)
    if action.k == 0:  # an empty sum
        return lambda stream: None if p.add else device.fill(out.address, 0, out.nbytes, stream)
    a, b = (_first(side, roots) for side in (p.a, p.b))
    workspace = span_of(plan.library, roots)
    pointers = span_of(action.pointers, roots).address if action.pointers is not None else 0
    epilogue = p.epilogue.map(lambda part: span_of(part, roots))
    try:
        return device.product(action, a, b, out.address, workspace, pointers, epilogue)
    except NoKernel:
        if not action.otherwise:
            raise
        return lambda stream: submit(device, plan, action.otherwise, roots, stream)


class StepByStep:
    """A plan whose actions are submitted one by one, by a device that looks at each argument."""

    def __init__(self, device: Device, plan: LaunchPlan):
        self.device, self.plan = device, plan

    def submit(self, roots: Roots, stream: int) -> None:
        for actions in self.plan.actions:
            submit(self.device, self.plan, actions, roots, stream)


class Launcher(Device, Protocol):
    """What :class:`.gpu.Gpu` has beside :class:`.device.Device`.

    :ivar driver, runtime: CuPy's modules of these names.
    :ivar sync: wait after each launch.
    """

    driver: Any
    runtime: Any
    sync: bool

    def handle(self, function: str, wide: bool, shared: int) -> int: ...

    def failed(self, error: Exception, function: str, blocks: int, threads: int) -> Exception: ...

    def made_room(self, error: Exception, stream: int | None = None) -> bool: ...


PackedCall = tuple[Action, tuple[int, ...] | None, Any]
"""An action with its function, grid and block, and the address of its arguments' places; or None, and what submits it.
"""


@dataclass(frozen=True)
class Packed:
    """A plan's actions at fixed addresses.

    :param values: 8 bytes for each argument, and the address of the flag, which each call writes.
    :param places: the address of each parameter's first value, as cuLaunchKernel takes them.
    :param roots: what these look addresses up in when they submit launches in a library's place; each call writes the
        flag's.
    """

    values: Array
    places: Array
    calls: tuple[PackedCall, ...]
    roots: dict[str, int]


class PackedPlan:
    """A plan whose launches differ between calls in the addresses of their roots alone.

    Arguments are packed for a set of addresses once, and kept: allocators give the same ones again and again.  The flag
    is another in each call: all launches read its address in one place, and what is packed is one call's at a time.
    """

    KEPT = 64
    """Sets of addresses."""

    def __init__(self, device: Launcher, plan: LaunchPlan):
        self.device, self.plan = device, plan
        self.actions = [action for actions in plan.actions for action in actions]
        launches = [a for a in self.actions if isinstance(a, Launch)]
        args = [x for launch in launches for x in launch.args]
        parts = [x for x in args if isinstance(x, Part)]
        of_calls = [p for a in self.actions if not isinstance(a, Launch) for p in _parts(plan, a)]
        self._roots = tuple(dict.fromkeys(p.root for p in (*parts, *of_calls) if p.root != FLAG))
        number = {root: i + 1 for i, root in enumerate(self._roots)}
        number[FLAG] = 0
        self._starts = np.array([*(x.start if isinstance(x, Part) else x for x in args), 0], np.int64)
        self._root = np.array([*(number[x.root] if isinstance(x, Part) else 0 for x in args), 0], np.intp)
        firsts = accumulate((len(launch.args) for launch in launches), initial=0)
        given = [
            (at + i, launch.args[i]) for launch, at in zip(launches, firsts, strict=False) for i in parameters(launch)
        ]
        self._slots = np.array([len(args) if isinstance(x, Part) and x.root == FLAG else i for i, x in given], np.int64)
        self._handles = {id(a): device.handle(a.function, a.wide, a.shared) for a in launches}
        self._packed: Recent[tuple[int, ...], list[Packed]] = Recent(self.KEPT)

    def submit(self, roots: Roots, stream: int) -> None:
        """Submits all actions.

        :raises DeviceError, OutOfMemory, CaptureError: a launch failed; the function is named.
        """
        addresses = tuple([roots[name] for name in self._roots])
        idle = self._packed.get(addresses)
        if idle is None:
            idle = self._packed[addresses] = []
        try:
            packed = idle.pop()
        except IndexError:  # none, or other threads, or a handler of a signal, have them
            packed = self._pack(addresses, roots)
        try:
            packed.values[-1] = packed.roots[FLAG] = roots[FLAG]
            self._start(packed.calls, stream)
        finally:
            idle.append(packed)

    def _start(self, calls: Sequence[PackedCall], stream: int, again: bool = True) -> None:
        """Submits calls in order.

        :param again: whether a launch that finds no memory (for its code, which a driver may load now, or its
            registers' spills) is tried once more.
        """
        device, start = self.device, self.device.driver.launchKernel
        waits = device.sync and not device.capturing(stream)
        done = 0
        try:
            for action, function, given in calls:
                if function is None:
                    given(stream)
                else:
                    start(*function, stream, given, 0)
                if waits:
                    self._wait(action, stream)
                done += 1
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, DeviceError | OutOfMemory) or not isinstance(action, Launch):
                raise
            if not (again and device.made_room(error, stream)):
                raise device.failed(error, action.function, action.blocks, action.threads) from error
            self._start(calls[done:], stream, again=False)

    def _wait(self, action: Action, stream: int) -> None:
        try:
            relaxed(self.device.runtime.streamSynchronize, stream)
        except RuntimeError as error:
            if not isinstance(action, Launch):
                raise
            raise self.device.failed(error, action.function, action.blocks, action.threads) from error

    def _pack(self, addresses: tuple[int, ...], roots: Roots) -> Packed:
        values = self._starts + np.array((0, *addresses), np.int64)[self._root]
        places = values.ctypes.data + 8 * self._slots
        at, own = places.ctypes.data, dict(roots)
        calls: list[PackedCall] = []
        for action in self.actions:
            if isinstance(action, Launch):
                grid = (action.blocks, 1, 1, action.threads, 1, 1, action.shared)
                calls.append((action, (self._handles[id(action)], *grid), at))
                at += 8 * len(parameters(action))
            else:
                calls.append((action, None, call(self.device, self.plan, action, own)))
        return Packed(values, places, tuple(calls), own)


def parameters(launch: Launch) -> Sequence[int]:
    """The places of the arguments with which a function's parameters begin."""
    return [0, *range(launch.batch, len(launch.args))] if launch.batch else range(len(launch.args))


def _parts(plan: LaunchPlan, action: Library | Convolution) -> list[Part]:
    if isinstance(action, Convolution):
        return [*(x.part for x in (*action.operands, action.out)), plan.library]
    p = action.product
    return [p.a.part, p.b.part, *p.written, *p.epilogue.reads, plan.library]
