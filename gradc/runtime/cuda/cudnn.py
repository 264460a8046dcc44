"""Convolutions by cuDNN, through the Python package of its front end, on raw pointers with the caller's workspace.

A convolution is a graph of one operation.  Its algorithm is the first that cuDNN's heuristics name and that keeps to
our rules: deterministic, in the workspace that the launch plan has for it, and a sum of products as gradc defines one:
elements are multiplied as they are (f32 in f32, no TF32; those of 16 bits exactly), sums are in f32 (f64 of f64), and
nothing is transformed (Winograd, FFT), whose errors are relative to the largest elements around.

Plans are kept by device and geometry, not by address.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...codegen.cuda.actions import Convolution
from ...errors import DeviceError, OutOfMemory
from ...ir.types import dtype as dtype_of
from ...process.forks import lock
from ..recent import Recent
from .cudnn_version import CUDNN_NEEDED, front_end_missing
from .device import NoKernel, Span
from .handles import Handle, Handles

ALIGNMENT = 16
"""Bytes at multiples of which arrays begin."""
_TYPES = {"f16": "HALF", "bf16": "BFLOAT16", "f32": "FLOAT", "f64": "DOUBLE"}
_UIDS = {"image": 1, "filter": 2, "response": 3}
_REFUSED = (
    "NONDETERMINISTIC",
    "REDUCED_PRECISION_REDUCTION",
    "DOWN_CONVERT_INPUTS",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""Numerical notes of algorithms that are left out; tensor cores, too, round operands of f32 (TF32)."""
_PLANS = 512

Graph = Any
"""A graph of the front end with a finished execution plan."""


@dataclass
class _Plan:
    """A plan, for all threads and streams, one at a time: plans of some of cuDNN's engines are not thread-safe (its
    release notes).

    :param refused: why there is none; it is asked for once.
    """

    graph: Graph = None
    refused: str = ""
    lock: Any = field(default_factory=lambda: lock(reentrant=True))


_plans: Recent[tuple[Any, ...], _Plan] = Recent(_PLANS)
_lock = lock(reentrant=True)
"""Held where a plan is made."""


def prepared(
    device: int,
    asked: Convolution,
    first: int,
    second: int,
    out: int,
    workspace: Span,
    capturing: Callable[[int], bool] | None = None,
) -> Callable[[int], None]:
    """A function that submits a convolution to a stream, which may be under capture.

    :param first, second, out: the addresses of its operands and its result, multiples of :data:`ALIGNMENT`.
    :param capturing: whether a stream is being captured.
    :raises DeviceError: there is no cuDNN, or no algorithm that keeps to the rules; the function raises it where cuDNN
        reports an error, with the sizes.
    """
    cudnn = library()
    plan = _plan(device, cudnn, asked)
    names = (*_operands(asked), asked.computes)
    addresses = {_UIDS[name]: at for name, at in zip(names, (first, second, out), strict=True)}
    space = workspace.address

    def submitted(handle: Handle[Any], stream: int) -> None:
        try:
            if handle.given != stream:
                handle.given = None
                cudnn.set_stream(handle.native, stream)
                handle.given = stream
            with plan.lock:
                plan.graph.execute(addresses, space, handle.native)
        except (RuntimeError, ValueError) as error:
            _check_memory(error, f"a convolution ({sizes(asked)})")
            raise DeviceError(f"cuDNN refused a convolution ({sizes(asked)}): {_first_line(error)}") from error

    return _handles.using(device, submitted, capturing)


def _operands(asked: Convolution) -> tuple[str, str]:
    if asked.computes == "response":
        return "image", "filter"
    return "response", "filter" if asked.computes == "image" else "image"


def _plan(device: int, cudnn: Any, asked: Convolution) -> _Plan:
    """
    :raises DeviceError: as :func:`planned` does.
    """
    key = (device, *geometry(asked))
    found = _plans.get(key)
    if found is None:
        with _lock:
            found = _plans.get(key)
            if found is None:
                try:
                    graph = _handles.using(device, lambda handle, _: planned(cudnn, asked, handle=handle.native))(None)
                    found = _Plan(graph)
                except NoKernel as error:
                    found = _Plan(refused=str(error))
                _plans[key] = found
    if found.refused:
        raise NoKernel(found.refused)
    return found


def geometry(asked: Convolution) -> tuple[Any, ...]:
    """What a plan depends on beside the device."""
    arrays = tuple((x.shape, x.strides) for x in (asked.image, asked.filter, asked.response))
    return (asked.computes, asked.dtype.str, dtype_of(asked.dtype).name, arrays, asked.stride, asked.dilation,
            asked.before, asked.after, asked.workspace)  # fmt: skip


def planned(cudnn: Any, asked: Convolution, **target: Any) -> Graph:
    """A convolution's graph with its execution plan.

    :param cudnn: the package.  :param target: what the graph is for: ``handle``, or without a device
        ``device_property`` and ``sm_version``.
    :raises NoKernel: no algorithm keeps to the rules.
    :raises DeviceError, OutOfMemory: making a plan failed, or there is no memory for it.
    """
    try:
        graph = graph_of(cudnn, asked, **target)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes([note for name in _refused(asked) if (note := _note(cudnn, name)) is not None])
        graph.deselect_workspace_greater_than(asked.workspace)
        graph.check_support()
        graph.build_plans()
    except (RuntimeError, ValueError) as error:
        _check_memory(error, f"a plan of a convolution ({sizes(asked)})")
        never = isinstance(error, getattr(cudnn, "cudnnGraphNotSupportedError", ()))
        raise (NoKernel if never else DeviceError)(
            f"cuDNN {cudnn.backend_version()} has no deterministic algorithm for a convolution ({sizes(asked)}):"
            f" {_first_line(error)}; convolutions='windows' computes it without cuDNN"
        ) from error
    return graph


def graph_of(cudnn: Any, asked: Convolution, **target: Any) -> Any:
    """A graph of the one operation."""
    data = getattr(cudnn.data_type, _TYPES[dtype_of(asked.dtype).name])
    total = cudnn.data_type.DOUBLE if asked.dtype == np.float64 else cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=data, intermediate_data_type=total, compute_data_type=total, **target)
    arrays = {"image": asked.image, "filter": asked.filter, "response": asked.response}
    x, y = (
        graph.tensor(
            name=name, dim=list(arrays[name].shape), stride=list(arrays[name].strides), data_type=data, uid=_UIDS[name]
        )
        for name in _operands(asked)
    )
    how: Mapping[str, Any] = {
        "pre_padding": list(asked.before),
        "post_padding": list(asked.after),
        "stride": list(asked.stride),
        "dilation": list(asked.dilation),
    }
    if asked.computes == "response":
        out = graph.conv_fprop(image=x, weight=y, **how)
    elif asked.computes == "image":
        out = graph.conv_dgrad(loss=x, filter=y, **how)
    else:
        out = graph.conv_wgrad(image=y, loss=x, **how)
    out.set_output(True).set_data_type(data).set_uid(_UIDS[asked.computes])
    out.set_dim(list(asked.out.shape)).set_stride(list(asked.out.strides))
    return graph


def _refused(asked: Convolution) -> tuple[str, ...]:
    return (*_REFUSED, "TENSOR_CORE") if asked.dtype == np.float32 else _REFUSED


def _note(cudnn: Any, name: str) -> Any:
    """A numerical note; None in a version that has none of the name."""
    return getattr(cudnn.numerical_note, name, None)


def sizes(asked: Convolution) -> str:
    """What is asked, in words."""
    image, filter_, response = ("x".join(map(str, x.shape)) for x in (asked.image, asked.filter, asked.response))
    return f"the {asked.computes} of image {image}, filter {filter_} and response {response} in {dtype_of(asked.dtype)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_memory(error: Exception, activity: str) -> None:
    """
    :raises OutOfMemory: that is what an error of cuDNN's says.
    """
    if "ALLOC_FAILED" in str(error):
        raise OutOfMemory(f"cuDNN has no memory for {activity}: {_first_line(error)}") from error


def _create(device: int) -> Any:
    try:
        return library().create_handle()
    except RuntimeError as error:
        _check_memory(error, f"a handle of device {device}")
        version = library().backend_version()
        raise DeviceError(f"cuDNN {version} has no handle for device {device}: {_first_line(error)}") from error


def _destroy(made: Any) -> None:
    library().destroy_handle(made)


_handles: Handles[Any] = Handles(_create, _destroy)


@functools.cache
def library() -> Any:
    """The package of cuDNN's front end.

    :raises DeviceError: it is missing or too old, or finds no cuDNN, or one that is too old; the message says what is
        there and what is needed.
    """
    instead = "; convolutions='windows' computes them without cuDNN"
    if why := front_end_missing():
        raise DeviceError(f"convolutions of this module are cuDNN's: {why}{instead}")
    try:
        cudnn = importlib.import_module("cudnn")
        version = int(cudnn.backend_version())
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise DeviceError(f"convolutions of this module are cuDNN's, which does not load: {error}{instead}") from error
    major, minor = CUDNN_NEEDED
    if version < 10_000 * major + 100 * minor:
        there = (
            f"{version // 1000}.{version % 1000 // 100}"
            if version < 10_000
            else f"{version // 10_000}.{version % 10_000 // 100}"
        )
        raise DeviceError(f"convolutions of this module are cuDNN's: it is {there}; {major}.{minor} is needed{instead}")
    return cudnn
