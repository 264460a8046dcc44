"""What stands between gradc and cuDNN's Python package (gradc/runtime/cuda/cudnn.py), by a stand-in of it: plans,
handles and streams, and what is said where it is missing, too old, or refuses.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.codegen.cuda.actions import Convolution
from gradc.errors import CaptureError, DeviceError, OutOfMemory
from gradc.runtime.cuda import cudnn, cudnn_version, gpu
from gradc.runtime.cuda.device import NoKernel, Span

pytest.importorskip("torch")
from cudnn_front_end import FrontEnd

SPACE = Span(0, 0, np.dtype(np.uint8))


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    return FrontEnd.installed(monkeypatch)


def asked(dtype: str = "f32", n: int = 2, **options: Any) -> Convolution:
    """The forward convolution of a module."""
    graph = gradc.trace(
        lambda x, w: ops.conv2d(x, w, padding=1, **options), x=f"{dtype}[N,3,5,5]", w=f"{dtype}[4,3,3,3]"
    )
    module = gradc.compile(graph, target="cuda", convolutions="cudnn")
    (found,) = (a for each in module.forward.native.bind({"N": n}).actions for a in each if isinstance(a, Convolution))
    return found


def arrays(of: Convolution, skip: int = 0) -> list[np.ndarray]:
    """Operands and the result, ones and zeros, whose first elements lie ``skip`` bytes behind a multiple of 64."""
    made = []
    for x, value in zip((*of.operands, of.out), (1, 1, 0), strict=True):
        memory = np.zeros(x.nbytes + 128, np.uint8)
        at = -memory.ctypes.data % 64 + skip
        made.append(memory[at : at + x.nbytes].view(x.part.dtype))
        made[-1][:] = value
    return made


def test_a_plan_serves_all_addresses_and_streams(front: FrontEnd) -> None:
    of = asked()
    outs = []
    for stream in (0, 7, 9):
        given = arrays(of)
        cudnn.prepared(0, of, *(a.ctypes.data for a in given), SPACE)(stream)
        outs.append(given[2])
    assert front.planned == 1 and len(front.handles) == 3 and [stream for _, stream in front.executed] == [0, 7, 9]
    assert all(out.max() == 27 and out.min() == 12 for out in outs)
    cudnn.prepared(0, asked(n=3), 0, 0, 0, SPACE)
    cudnn.prepared(1, of, 0, 0, 0, SPACE)
    assert front.planned == 3 and len(front.handles) == 4


def test_the_least_used_plans_are_given_up(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_plans", type(cudnn._plans)(2))
    module = [asked(n=n) for n in (1, 2, 3)]
    for of in (module[0], module[1], module[0], module[2], module[0]):
        cudnn.prepared(0, of, 0, 0, 0, SPACE)
    assert front.planned == 3
    cudnn.prepared(0, module[1], 0, 0, 0, SPACE)
    assert front.planned == 4


def test_threads_with_streams_of_their_own_share_a_plan_one_at_a_time(front: FrontEnd) -> None:
    """Each by a handle of its own, which has its stream."""
    of, pause, wrong, inside = asked(), threading.Event(), [], []

    def execute(addresses: Any, workspace: int, handle: Any) -> None:
        inside.append(handle)
        pause.wait(0.001)  # for the others to come between
        wrong.extend([handle.stream] if handle.stream != workspace or len(inside) > 1 else [])
        inside.clear()

    cudnn._plan(0, front, of).graph.execute = execute

    def work(stream: int) -> None:
        submit = cudnn.prepared(0, of, 0, 0, 0, Span(stream, 0, np.dtype(np.uint8)))
        for _ in range(20):
            submit(stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(front.handles) == 4


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_what_algorithms_are_left_out(dtype: str, front: FrontEnd) -> None:
    """None that gives other bits in another run, rounds operands or sums, or transforms them."""
    of = asked(dtype)
    graph = cudnn.planned(front, of, handle=None)
    assert {"NONDETERMINISTIC", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT"} < set(graph.refused)
    assert ("TENSOR_CORE" in graph.refused) == (dtype == "f32")
    assert graph.given["compute_data_type"] == ("DOUBLE" if dtype == "f64" else "FLOAT")
    assert graph.most == of.workspace


def test_what_cudnn_refuses(front: FrontEnd) -> None:
    of, instead = asked(), "convolutions='windows' computes it without cuDNN"
    front.unsupported = front.cudnnGraphNotSupportedError("No valid engine configs\nmore")
    words = "the response of image 2x3x5x5, filter 4x3x3x3 and response 2x4x5x5 in f32"
    for _ in range(2):  # it is asked once
        with pytest.raises(
            NoKernel, match=f"92800 has no deterministic algorithm .*{words}.*engine configs; {instead}"
        ):
            cudnn.prepared(0, of, 0, 0, 0, SPACE)
    assert front.planned == 1
    cudnn._plans.clear()
    front.unsupported = RuntimeError("[cudnn_frontend] Error: CUDNN_STATUS_ALLOC_FAILED")
    with pytest.raises(OutOfMemory, match=f"cuDNN has no memory for a plan of a convolution .{words}"):
        cudnn.prepared(0, of, 0, 0, 0, SPACE)
    front.unsupported = None  # and that only then
    submit = cudnn.prepared(0, of, 0, 0, 0, SPACE)
    front.fails = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
    with pytest.raises(DeviceError, match=f"cuDNN refused a convolution .{words}.: CUDNN_STATUS_EXECUTION_FAILED"):
        submit(0)
    front.fails = RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
    with pytest.raises(OutOfMemory, match=f"cuDNN has no memory for a convolution .{words}"):
        submit(0)


@pytest.mark.parametrize("skip", [0, 4, 20])
def test_arrays_that_begin_anywhere(skip: int, front: FrontEnd) -> None:
    """The library is given memory of its own for them, along the call's stream."""
    of, given = asked(), arrays(asked(), skip)
    copies, taken = [], []

    def copy(to: int, source: int, nbytes: int, stream: int) -> None:
        copies.append(stream)
        ctypes.memmove(to, source, nbytes)

    def memory(nbytes: int, stream: int) -> Any:
        space = np.zeros(nbytes + 64, np.uint8)
        taken.append(space)
        return SimpleNamespace(address=space.ctypes.data + -space.ctypes.data % 64)

    captured: set[int] = set()
    device = SimpleNamespace(
        description=SimpleNamespace(number=0),
        memory=memory,
        copy=copy,
        capturing=captured.__contains__,
        with_room=lambda function, *args: function(*args),
    )
    submit = gpu.Gpu.convolution(device, of, *(a.ctypes.data for a in given), SPACE)  # type: ignore[arg-type]
    submit(5)
    assert given[2].max() == 27 and given[2].min() == 12
    assert (copies, len(taken)) == (([5, 5, 5], 1) if skip % cudnn.ALIGNMENT else ([], 0))
    captured.add(7)
    if not skip % cudnn.ALIGNMENT:
        submit(7)
        return
    with pytest.raises(CaptureError, match="between multiples of 16 bytes: a replay would copy it to memory that is"):
        submit(7)
    assert len(taken) == 1


# -- what is there, and what is needed ---------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The installed packages by name."""
    found: dict[str, str] = {}
    monkeypatch.setattr(cudnn_version, "version_of", lambda name: found.get(name, ""))
    cudnn_version.missing.cache_clear()
    cudnn_version.front_end_missing.cache_clear()
    cudnn.library.cache_clear()
    yield found
    cudnn_version.missing.cache_clear()
    cudnn_version.front_end_missing.cache_clear()
    cudnn.library.cache_clear()


@pytest.mark.parametrize(
    ("there", "match"),
    [
        ({}, "nvidia-cudnn-frontend is not installed; 1.14 or newer is needed"),
        ({"nvidia-cudnn-frontend": "1.9.0", "nvidia-cudnn-cu12": "9.28.0.42"}, "is 1.9.0; 1.14 or newer is needed"),
        ({"nvidia-cudnn-frontend": "1.32.0"}, "neither nvidia-cudnn-cu12 nor nvidia-cudnn-cu13 is installed"),
        ({"nvidia-cudnn-frontend": "1.32.0", "nvidia-cudnn-cu12": "9.1.0.70"}, "cu12 is 9.1.0.70; cuDNN 9.8 or newer"),
        ({"nvidia-cudnn-frontend": "1.14.0", "nvidia-cudnn-cu13": "9.10.1"}, ""),
        ({"nvidia-cudnn-frontend": "2.0", "nvidia-cudnn-cu12": "10.0"}, ""),
    ],
)
def test_what_is_missing(there: dict[str, str], match: str, packages: dict[str, str]) -> None:
    packages |= there
    assert (match in cudnn_version.missing()) if match else not cudnn_version.missing()
    assert cudnn_version.installed() == (not match)


def test_a_call_without_the_package(packages: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match=r"nvidia-cudnn-frontend is not installed.*gradc\[cudnn\].*'windows'"):
        cudnn.prepared(0, asked(), 0, 0, 0, SPACE)


@pytest.mark.parametrize(
    ("version", "match"), [(8907, "it is 8.9; 9.8 is needed"), (90100, "it is 9.1; 9.8 is needed"), (92800, "")]
)
def test_a_loaded_cudnn(version: int, match: str, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own version counts, of a wheel or of the system's."""
    packages["nvidia-cudnn-frontend"] = "1.32.0"
    there = SimpleNamespace(backend_version=lambda: version)
    monkeypatch.setitem(sys.modules, "cudnn", there)
    if match:
        with pytest.raises(DeviceError, match=match):
            cudnn.library()
    else:
        assert cudnn.library() is there


def test_a_cudnn_that_does_not_load(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    packages["nvidia-cudnn-frontend"] = "1.32.0"

    def fails() -> int:
        raise RuntimeError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=fails))
    with pytest.raises(DeviceError, match=r"which does not load: libcudnn\.so\.9: cannot open"):
        cudnn.library()
