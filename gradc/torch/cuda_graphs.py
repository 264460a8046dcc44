"""``mode="reduce-overhead"``: calls of a program that are alike, captured as CUDA graphs and replayed.

torch captures forward and backward (``torch.cuda.make_graphed_callables``).  What a call returns, and the gradients of
its inputs, are copies: the graph's own memory is written by each replay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import InvalidProblem
from ..process.forks import lock
from ..runtime.torch_private import private

WARM = 2
"""Calls of one kind that run without a graph before one is captured: they compile, and allocate what stays."""

GRAPHS = 8
"""Captures that a program keeps; the one that was replayed least recently goes first."""

KINDS = 256
"""Kinds of calls that a program knows."""

_without_autocast = private("_DisableAutocast")

_capturing = lock(reentrant=True)
"""Held where a graph is captured: torch captures one at a time in a process."""

_streams: dict[torch.device, Any] = {}
"""The stream of each device on which graphs are captured."""


@dataclass
class Captures:
    """What became of the calls of a program.

    :ivar captured: how many graphs were captured.
    :ivar replayed: how many calls were replays.
    :ivar reason: why calls run without a graph, "" where none has to; the last one.
    """

    captured: int = 0
    replayed: int = 0
    reason: str = ""

    @property
    def any(self) -> bool:
        """Whether there was a call to capture."""
        return bool(self.captured or self.reason)

    def __str__(self) -> str:
        why = f"; without a graph: {self.reason}" if self.reason else ""
        return f"{self.captured} CUDA graphs captured, {self.replayed} calls replayed{why}"


class _Impossible(Exception):
    """Why a call has no graph."""


@dataclass
class _Kind:
    """Calls of the same sizes, dtypes and modes.

    :ivar warm: how many ran without a graph.
    :ivar last: the tensors of the last call, and their ``addresses``.
    :ivar varying: the arguments that were another tensor at a later call: a graph reads copies of them.
    :ivar replay: the captured call.
    :ivar stream: the one of the last replay.
    :ivar generation: how often it was replayed.
    :ivar pending: gives something for as long as the backward of the last replay may still come.
    :ivar reason: why there will be no graph.
    """

    warm: int = 0
    last: tuple[weakref.ref[torch.Tensor], ...] = ()
    addresses: tuple[int, ...] = ()
    varying: set[int] = field(default_factory=set)
    replay: Callable[..., Any] | None = None
    stream: Any = None
    pending: Callable[[], Any] = lambda: None
    generation: int = 0
    reason: str = ""


class WithGraphs:
    """A program that replays graphs of its calls.

    :param program: called with tensors and sizes; gives a list, whose tensors lie on one GPU.
    :param written: the arguments that it writes in place.
    :param report: filled in.
    """

    def __init__(self, program: Callable[..., Any], written: Sequence[int], report: Captures):
        self.program, self.written, self.report = program, frozenset(written), report
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self._lock = lock(reentrant=True)  # threads write the memory of one graph one after another

    def __call__(self, *arguments: Any) -> Any:
        try:
            with self._lock:
                kind = self._kind(arguments)
                if kind.replay is None and kind.warm < WARM:
                    return self._warm(kind, arguments)
                if kind.replay is None:
                    self._capture(kind, arguments)
                return self._replayed(kind, arguments)
        except _Impossible as error:
            self.report.reason = str(error)
            return self.program(*arguments)

    def _kind(self, arguments: Sequence[Any]) -> _Kind:
        """The kind of a call, told what varies.

        :raises _Impossible: it has no graph.
        """
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        if not tensors or any(not on_gpu(x) for x in tensors):
            raise _Impossible("an input that is not on the GPU" if tensors else "no input is a tensor")
        if len({x.device for x in tensors}) > 1:
            raise _Impossible("inputs on several GPUs")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise _Impossible("a capture of the caller's")
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter) or _repeats(x) for x in tensors):
            raise _Impossible("an input whose memory is not its own elements, once each")
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = (*modes, *(_described(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS:
            self._drop(self._kinds.popitem(last=False)[1])
        if kind.reason:
            raise _Impossible(kind.reason)
        self._note_varying(kind, arguments, tensors)
        return kind

    def _note_varying(self, kind: _Kind, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        addresses = tuple(x.data_ptr() for x in tensors)
        if kind.last:
            places = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
            same = zip(places, tensors, kind.last, addresses, kind.addresses, strict=True)
            now = {i for i, x, before, at, was in same if before() is not x or at != was} - kind.varying
            if now:
                kind.varying |= now
                self._drop(kind)
            if kind.varying & self.written:
                kind.reason = "an input that is written in place is another tensor at each call"
                raise _Impossible(kind.reason)
        kind.last, kind.addresses = tuple(map(weakref.ref, tensors)), addresses

    def _warm(self, kind: _Kind, arguments: Sequence[Any]) -> Any:
        """A call without a graph on the stream that captures: what is allocated once for a stream is so before."""
        kind.warm += 1
        with warming(_device(arguments)) as used:
            results = self.program(*arguments)
            used(results)
        storages = [x.untyped_storage().data_ptr() for x in results if isinstance(x, torch.Tensor)]
        given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        if len(set(storages)) < len(storages) or given & set(storages):
            kind.reason = "a result that shares memory with another or with an input"
        return results

    def _capture(self, kind: _Kind, arguments: Sequence[Any]) -> None:
        """
        :raises _Impossible: something in the program cannot be captured.
        """
        for other in [k for k in self._kinds.values() if k.replay is not None][: -(GRAPHS - 1)]:
            self._drop(other)
        places = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
        samples = [_sample(arguments[i], i in kind.varying) for i in places]
        returned: list[Any] = []  # what is no tensor, and of a tensor whether it requires grad

        def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = list(arguments)
            for place, x in zip(places, tensors, strict=True):
                given[place] = x
            results = self.program(*given)
            returned[:] = [_Tensor(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in results]
            return tuple(x for x in results if isinstance(x, torch.Tensor))

        try:
            with _without_autocast(), capturing(_device(arguments)):  # its casts are calls of the program
                made: Any = torch.cuda.make_graphed_callables(  # type: ignore[call-overload]
                    call, tuple(samples), num_warmup_iters=0, allow_unused_input=True
                )
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            kind.reason = f"its capture failed: {lines[0]}"
            raise _Impossible(kind.reason) from error
        recorded = tuple(x.requires_grad for x in returned if isinstance(x, _Tensor))

        def replay(*given: Any) -> Any:
            inputs = _Inputs.apply(kind, *(given[i] for i in places))
            tensors = iter(_Results.apply(kind, recorded, *made(*inputs)))
            return [next(tensors) if isinstance(each, _Tensor) else each for each in returned]

        kind.replay = replay
        self.report.captured += 1

    def _replayed(self, kind: _Kind, arguments: Sequence[Any]) -> Any:
        """
        :raises _Impossible: the backward of the call before is still to come, and reads the graph's memory.
        """
        assert kind.replay is not None
        if kind.pending() is not None:
            raise _Impossible("a call before the backward of the one before it")
        stream = current_stream(_device(arguments))
        if kind.stream is not None and kind.stream != stream:
            stream.wait_stream(kind.stream)  # which may still read the graph's memory
        kind.stream = stream
        kind.generation += 1
        self.report.replayed += 1
        results = kind.replay(*arguments)
        for i in self.written:
            torch.autograd.graph.increment_version(arguments[i])
        return results

    @staticmethod
    def _drop(kind: _Kind) -> None:
        if kind.replay is not None:
            if kind.stream is not None:
                synchronize(kind.stream.device)  # its memory is another's once it is gone
            kind.replay = kind.stream = None


class _Inputs(torch.autograd.Function):
    """The arguments of a replay; their gradients are copied out of the graph's memory, which ends its backward."""

    @staticmethod
    def forward(ctx: Any, kind: _Kind, *inputs: torch.Tensor) -> Any:  # type: ignore[override]
        if any(ctx.needs_input_grad):
            ctx.waiting = _Backward()
            kind.pending = weakref.ref(ctx.waiting)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        copies = tuple(None if g is None else g.clone() for g in gradients)
        ctx.waiting = None
        return (None, *copies)


@dataclass(frozen=True)
class _Tensor:
    requires_grad: bool


class _Backward:
    """That the backward of a replay is still to come, for as long as this lives."""


class _Results(torch.autograd.Function):
    """The results of a replay, copied out of the graph's memory."""

    @staticmethod
    def forward(ctx: Any, kind: _Kind, recorded: Sequence[bool], *results: torch.Tensor) -> Any:  # type: ignore[override]
        if any(ctx.needs_input_grad):
            ctx.kind, ctx.generation = kind, kind.generation
        ctx.set_materialize_grads(False)
        copies = tuple(x.clone() for x in results)
        ctx.mark_non_differentiable(*(y for y, requires in zip(copies, recorded, strict=True) if not requires))
        return copies

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        if ctx.kind.generation != ctx.generation:
            raise InvalidProblem(
                "mode='reduce-overhead': a second backward of a call after a later call, which has written over what"
                " the first one kept; compile without that mode"
            )
        return (None, None, *cotangents)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU that can capture."""
    return x.device.type == "cuda"


def _device(arguments: Sequence[Any]) -> torch.device:
    """Where the tensors of a call lie."""
    return next(x.device for x in arguments if isinstance(x, torch.Tensor))


def current_stream(device: torch.device) -> Any:
    """torch's current stream of a GPU."""
    return torch.cuda.current_stream(device)


def _capture_stream(device: torch.device) -> Any:
    """The stream of a GPU on which its graphs are captured."""
    with _capturing:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """A context in which torch captures on a stream of this GPU, as the one that it makes for all captures is of the
    GPU that was current at the first of them.
    """
    graph, stream = torch.cuda.graph, _capture_stream(device)
    with _capturing, torch.cuda.device(device):
        before, graph.default_capture_stream = graph.default_capture_stream, stream
        try:
            yield
        finally:
            graph.default_capture_stream = before


@contextlib.contextmanager
def warming(device: torch.device) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A context on the stream that captures, in order with the current one; its function is told what was made."""
    stream, current = _capture_stream(device), torch.cuda.current_stream(device)

    def used(results: Sequence[Any]) -> None:
        for x in results:
            if isinstance(x, torch.Tensor) and x.device.type == "cuda":
                x.record_stream(current)

    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield used
    finally:
        current.wait_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    torch.cuda.synchronize(device)


def _described(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf


def _repeats(x: torch.Tensor) -> bool:
    """Whether elements may share memory, or others lie between them."""
    step = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda each: each[1]):
        if size != 1 and stride != step:
            return True
        step *= size
    return False


def _sample(x: torch.Tensor, varies: bool) -> torch.Tensor:
    """What a graph reads for an argument: its memory, or memory of the graph's where the argument is another each
    time.
    """
    with torch.no_grad():
        held = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x) if varies else x
    return held.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())
