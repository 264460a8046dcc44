"""What stands between gradc and CuPy (gradc/runtime/cuda/gpu.py, cublas.py), where there is no GPU: CuPy's names and
arities, what is handed to it, its errors as ours.
"""

from __future__ import annotations

import ast
import ctypes
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradc
from benchmarks import host
from gradc import ops
from gradc.codegen.cuda.actions import Part, Product, Strided
from gradc.codegen.cuda.library_products import library_of
from gradc.errors import CaptureError, CompilerError, DeviceError, DriverTooOld, NoDevice, OutOfMemory
from gradc.runtime.cuda import capture_mode, cublas, gpu, nvrtc
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.handles import Handles

ROOT = Path(__file__).resolve().parents[2]
F32 = np.dtype(np.float32)
TEXT = (
    'extern "C" __global__ void __launch_bounds__(256) twice(float *x, long long n) { if (threadIdx.x < n)'
    " x[threadIdx.x] *= 2; }\n"
)

# -- CuPy's names ------------------------------------------------------------------------------------------------------

ROOTS = {"runtime": "cupy.cuda.runtime", "driver": "cupy.cuda.driver", "cupy": "cupy", "_cupy": "cupy"}

CALLING = ("_asked", "relaxed", "with_room")
"""What calls a function that it is given, with the arguments behind that."""


def chain(node: ast.expr) -> str:
    """``self.runtime.getDevice`` -> ``cupy.cuda.runtime.getDevice``; "" if it is nothing of CuPy's."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        else:
            if not isinstance(node.func, ast.Name):
                return ""  # of what a call gave
            node = node.func
    if not isinstance(node, ast.Name):
        return ""
    names = names if node.id == "self" else [node.id, *names]
    return ".".join((ROOTS[names[0]], *names[1:])) if len(names) > 1 and names[0] in ROOTS else ""


def uses() -> Iterator[tuple[str, int | None]]:
    """Every name of CuPy's that we use, and with how many arguments it is called."""
    for file in ("gpu.py", "cublas.py"):
        tree = ast.parse((ROOT / "gradc" / "runtime" / "cuda" / file).read_text())
        calls = {
            node.func: len(node.args) + len(node.keywords) for node in ast.walk(tree) if isinstance(node, ast.Call)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLING:
                places = [i for i, given in enumerate(node.args) if chain(given)]
                calls |= {node.args[i]: len(node.args) - i - 1 for i in places[:1]}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := chain(node)):
                yield name, calls.get(node)


def test_cupy_has_every_name_that_is_used() -> None:
    found = set(uses())
    assert len(found) > 30, "the walk finds what gpu.py uses"
    cupy = pytest.importorskip("cupy")
    for name, count in found:
        value: Any = cupy
        for part in name.split(".")[1:]:
            if part == "ExternalStream" and hasattr(cupy.cuda.Stream, "from_external"):
                break  # CuPy 13's
            assert hasattr(value, part), f"CuPy {cupy.__version__} has no {name}"
            value = getattr(value, part)
        signature = re.match(r"[\w.]+\((.*)\)", (getattr(value, "__doc__", None) or "").split("\n")[0])
        if (
            count is not None
            and signature
            and name.startswith(("cupy.cuda.runtime.", "cupy.cuda.driver."))
            and not isinstance(value, type)
        ):
            parameters = [p for p in signature[1].split(",") if p.strip()]
            assert sum("=" not in p for p in parameters) <= count <= len(parameters), (
                f"{name}({signature[1]}) is called with {count} arguments"
            )


def test_cupys_arrays_are_described() -> None:
    cupy = pytest.importorskip("cupy")
    import ml_dtypes

    from gradc.runtime.cuda.on_device import describe

    memory = cupy.cuda.UnownedMemory(4096, 96, None, 0)  # an address that nobody follows: no GPU is needed
    for dtype in (np.float32, ml_dtypes.bfloat16) if int(cupy.__version__.split(".")[0]) >= 14 else (np.float32,):
        array = cupy.ndarray((4, 6), dtype, cupy.cuda.MemoryPointer(memory, 0))
        found = describe(array)
        assert found is not None and found.native is array and found.number == 0
        assert (found.shape, found.dtype, found.ctypes.data, found.flags.c_contiguous) == (
            (4, 6),
            np.dtype(dtype),
            4096,
            True,
        )
        turned = describe(array.T)
        assert turned is not None and turned.strides == (found.itemsize, 6 * found.itemsize)


# -- without a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(gpu.count() > 0, reason="there is a GPU")
def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N]")
    module = gradc.compile(graph, target="cuda")
    assert module.options.arch == "sm_90" and "__global__" in module.source()
    with pytest.raises(NoDevice, match=r"no GPU: .* target='cuda-sim' runs the same kernels"):
        module(x=np.zeros(3, np.float32))
    assert isinstance(module.forward.can_implement(x=np.zeros(3, np.float32)), NoDevice)
    monkeypatch.delenv("GRADC_TARGET", raising=False)
    assert gradc.compile(graph).target == "cpu"
    monkeypatch.setenv("GRADC_TARGET", "numpy")
    assert gradc.compile(graph).target == "numpy"


def test_the_target_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.delenv("GRADC_TARGET", raising=False)
    monkeypatch.setattr(gpu, "usable", lambda: True)
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"))
    assert (module.target, module.options.arch, module.options.errors) == ("cuda", "sm_90", "async")


# -- a CuPy that writes down what it is asked --------------------------------------------------------------------------


class CudaError(RuntimeError):
    def __init__(self, status: int):
        self.status = status
        super().__init__(f"status {status}")


class Recorder:
    """A module of CuPy's: each function notes its arguments, and gives or raises what the test says."""

    def __init__(self, log: list[Any], answers: dict[str, Any]):
        self.__dict__.update(
            _log=log,
            _answers=answers,
            CUDARuntimeError=CudaError,
            memcpyDefault=4,
            memcpyDeviceToHost=2,
            streamCaptureModeThreadLocal=1,
            hostAllocPortable=1,
            hostAllocMapped=2,
        )
        self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __getattr__(self, name: str) -> Any:
        def asked(*args: Any) -> Any:
            if name == "launchKernel":  # the parameters live as long as the call
                pointers = (ctypes.c_void_p * 2).from_address(args[9])
                args = (*args[:9], [ctypes.c_int64.from_address(p).value for p in pointers], args[10])
            self._log.append((name, *args))
            answer = self._answers.get(name, 0)
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer

        return asked


MAPPED = 1 << 55


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    log: list[Any] = []
    about = {
        "name": b"H100",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 132,
        "l2CacheSize": 50 << 20,
        "sharedMemPerBlockOptin": 227 << 10,
        "totalGlobalMem": 80 << 30,
        "memoryClockRate": 2_619_000,
        "memoryBusWidth": 5120,
    }
    answers: dict[str, Any] = {
        "getDeviceProperties": about,
        "driverGetVersion": 12040,
        "runtimeGetVersion": 12090,
        "moduleLoadData": 70,
        "moduleGetFunction": 71,
        "memGetInfo": (100, 200),
    }
    host: list[Any] = []  # what hostAlloc gave, at other addresses for the device

    def host_alloc(nbytes: int, flags: int) -> int:
        host.append((ctypes.c_ubyte * nbytes)())
        return ctypes.addressof(host[-1])

    answers["hostAlloc"] = host_alloc
    answers["pointerGetAttributes"] = lambda at: SimpleNamespace(devicePointer=at + MAPPED, device=0)
    recorder = Recorder(log, answers)
    stream = SimpleNamespace(ptr=5)
    cuda = SimpleNamespace(
        runtime=recorder,
        driver=recorder,
        get_current_stream=lambda: stream,
        alloc=lambda n: SimpleNamespace(ptr=4096),
        Stream=lambda non_blocking: SimpleNamespace(ptr=9),
        Event=lambda disable_timing: SimpleNamespace(ptr=33),
    )
    pool = SimpleNamespace(free_bytes=lambda: 11, free_all_blocks=lambda: None)
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool, __version__="14")
    monkeypatch.setattr(gpu, "_cupy", lambda: cupy)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    gpu._description.cache_clear()
    yield SimpleNamespace(log=log, answers=answers, cupy=cupy)
    gpu._description.cache_clear()


def calls(fake: Any, name: str) -> list[Any]:
    return [entry[1:] for entry in fake.log if entry[0] == name]


def test_the_description(fake: Any) -> None:
    found = gpu.current_device()
    assert (found.name, found.arch, found.sms, found.driver) == ("H100", "sm_90", 132, (12, 4))
    assert found.bandwidth == 2 * 2_619_000 * 1000 * 5120 // 8


def test_a_launch(fake: Any) -> None:
    device = gpu.Gpu(TEXT, cubin=b"binary", arch="sm_90")
    device.launch("twice", 3, 256, [Span(4096, 10, F32), 10], [0])
    assert calls(fake, "moduleLoadData") == [(b"binary",)] and calls(fake, "moduleGetFunction") == [(70, "twice")]
    assert calls(fake, "launchKernel") == [(71, 3, 1, 1, 256, 1, 1, 0, 5, [4096, 10], 0)]
    assert not calls(fake, "streamSynchronize")
    device.launch("twice", 3, 256, [Span(4096, 10, F32), 10], [0], stream=8, shared=100 << 10)
    assert calls(fake, "funcSetAttribute") == [(71, 8, 100 << 10)] and calls(fake, "launchKernel")[-1][7:9] == (
        100 << 10,
        8,
    )
    assert len(calls(fake, "moduleLoadData")) == 1, "loaded once"
    with pytest.raises(DeviceError, match="no function 'thrice'; there are twice"):
        device.launch("thrice", 1, 1, [], [])


@pytest.mark.parametrize(
    ("where", "status", "error", "match"),
    [
        ("launchKernel", 1, DeviceError, r"twice \(3 blocks of 256 threads\): status 1"),
        ("streamSynchronize", 700, DeviceError, "twice .*status 700"),
        ("launchKernel", 2, OutOfMemory, "twice .*status 2"),
        ("launchKernel", 901, CaptureError, "twice"),
        ("moduleLoadData", 209, DriverTooOld, r"a binary for sm_90 on H100 \(sm_90, driver of CUDA 12.4\): status 209"),
        ("moduleLoadData", 2, OutOfMemory, "a binary for sm_90"),
        ("getDevice", 35, DriverTooOld, "this CuPy is of CUDA 12090"),
        ("getDevice", 100, NoDevice, "asking for the current device"),
    ],
)
def test_errors(fake: Any, where: str, status: int, error: type[Exception], match: str) -> None:
    fake.answers[where] = CudaError(status)
    with pytest.raises(error, match=match):
        gpu.Gpu(TEXT, cubin=b"binary", arch="sm_90", sync=True).launch("twice", 3, 256, [Span(4096, 10, F32), 10], [0])


class Once:
    """Out of memory until torch's cache was emptied, or always."""

    def __init__(self, enough: bool, then: Any):
        self.enough, self.then, self.emptied, self.asked = enough, then, 0, 0

    def empty_cache(self) -> None:
        self.emptied += 1

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.asked += 1
        if not (self.emptied and self.enough):
            raise CudaError(2)
        return self.then(*args, **more)


@pytest.mark.parametrize("enough", [True, False])
@pytest.mark.parametrize("where", ["alloc", "moduleLoadData", "hostAlloc", "launchKernel"])
def test_no_memory_on_the_device(fake: Any, where: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps without using it is given back, once, and what failed is tried again; else it is one error, with
    the plan's bytes, and the next call works.
    """
    addresses = iter(range(1 << 30, 1 << 40, 1 << 20))
    fake.cupy.ndarray, fake.cupy.cuda.alloc = Array, lambda n: SimpleNamespace(ptr=next(addresses))
    fake.answers["memcpy"] = lambda to, source, nbytes, *_: ctypes.memset(to, 255, nbytes)
    fake.answers["memGetInfo"] = (1 << 40, 1 << 40)
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda arch: SimpleNamespace(version=(12, 4)))
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda text, **_: SimpleNamespace(cubin=b"binary"))
    function = lambda t, w: ops.sum(ops.embedding(t, w), axes=(0, 1))
    module = gradc.compile(gradc.trace(function, t="i64[N]", w="f32[V,D]"), target="cuda", arch="sm_90")
    new = lambda shape, dtype: Array(shape, dtype, SimpleNamespace(ptr=next(addresses)))
    given = {"t": new((64,), np.int64), "w": new((10, 32), np.float32)}

    usual = fake.cupy.cuda.alloc if where == "alloc" else fake.answers.get(where, lambda *_: 1)
    once = Once(enough, usual if callable(usual) else lambda *_: usual)
    torch = SimpleNamespace(
        cuda=SimpleNamespace(empty_cache=once.empty_cache, memory_reserved=int, memory_allocated=int)
    )
    monkeypatch.setattr(gpu, "initialised_torch", lambda: torch)
    if where == "alloc":
        fake.cupy.cuda.alloc = once
    else:
        fake.answers[where] = once
    if enough:
        module(**given)
        assert once.emptied == 1 and once.asked >= 2
        return
    with pytest.raises(OutOfMemory) as caught:
        module(**given)
    assert (once.emptied, once.asked) == (1, 2)
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert module.forward.program.name in notes and "bytes of" in notes
    if where == "alloc":
        fake.cupy.cuda.alloc = usual
    else:
        fake.answers[where] = usual
    before = len(calls(fake, "launchKernel"))
    module(**given)
    assert len(calls(fake, "launchKernel")) > before


@pytest.mark.parametrize("capturing", [0, 1])
@pytest.mark.parametrize("enough", [True, False])
def test_no_memory_for_a_graph_or_a_librarys_handle(
    fake: Any, enough: bool, capturing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same; but a capture forbids that anything is given back."""
    device = gpu.Gpu()
    once = Once(enough, lambda *_: 81)
    monkeypatch.setattr(gpu, "initialised_torch", lambda: SimpleNamespace(cuda=once))
    fake.answers["graphInstantiate"], fake.answers["streamIsCapturing"] = once, capturing
    create = lambda at: 0 if once.emptied and enough else 3
    blas = SimpleNamespace(**dict.fromkeys(cublas._SIGNATURES, lambda *_: 0) | {"cublasCreate_v2": create})
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    library = library_of(product(((5, 7), (7, 1)), ((7, 2), (2, 1))))
    for asked in (lambda: device.captured(9), lambda: device.product(library, 0, 0, 0, Span(0, 0, F32))):
        monkeypatch.setattr(cublas, "_handles", Handles(cublas._create, id))
        once.emptied = 0
        if enough and not capturing:
            asked()
        else:
            with pytest.raises(OutOfMemory, match=r"making a graph|no memory for a handle of cuBLAS"):
                asked()
        assert once.emptied == (not capturing)


@pytest.mark.parametrize("sync", [False, True])
def test_a_fault_says_how_it_is_found(fake: Any, sync: bool) -> None:
    """A kernel's fault comes with a later call, unless each launch is waited for."""
    device = gpu.Gpu(TEXT, cubin=b"binary", arch="sm_90", sync=sync)
    fake.answers["streamSynchronize"] = CudaError(719)
    with pytest.raises(DeviceError) as caught:
        device.launch("twice", 3, 256, [Span(4096, 10, F32), 10], [0])
        device.synchronize(5)
    assert ("twice" in str(caught.value)) == sync and ("GRADC_SYNC=1" in str(caught.value)) == (not sync)


def test_the_environment_makes_calls_wait(fake: Any) -> None:
    with gradc.knobs.SYNC.set(True):
        module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), target="cuda", errors="async")
    assert module.forward.backend.waits and module.forward.native.device.sync


def test_another_device_or_architecture(fake: Any) -> None:
    device = gpu.Gpu(TEXT, cubin=b"binary", arch="sm_100")
    with pytest.raises(
        DeviceError, match=r"compiled for sm_100, and device 0 \(H100\) is sm_90; compile\(..., arch='sm_90'\)"
    ):
        device.load()
    fake.answers["getDevice"] = 2
    with pytest.raises(DeviceError, match="loaded on device 0, and the current one is device 2"):
        device.memory(16)
    about = gpu.current_device()
    assert [gpu.fits(arch, about) for arch in ("sm_90", "sm_90a", "sm_80", "sm_91", "sm_100f")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_an_nvrtc_newer_than_the_driver(fake: Any) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    fake.answers["driverGetVersion"] = 11080
    with pytest.raises(
        DriverTooOld, match=r"the driver of H100 is of CUDA 11\.8, and what NVRTC 12\.\d makes needs one of 12\.0"
    ):
        gpu.Gpu(TEXT).load()


def test_a_text_that_does_not_compile(fake: Any) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    with pytest.raises(CompilerError) as caught:
        gpu.Gpu(TEXT.replace("*= 2", "*= two")).load()
    assert "two" in caught.value.log and "    1  extern" in caught.value.source


def test_memory_and_copies(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu.Gpu()
    assert device.memory(10).address == 4096 and device.free() == 111
    device.copy(1, 2, 3, 4)
    device.fill(1, 255, 3, 4)
    assert calls(fake, "memcpyAsync") == [(1, 2, 3, 4, 4)] and calls(fake, "memsetAsync") == [(1, 255, 3, 4)]
    memory, at = device.mapped(16)
    assert memory.flags.writeable and memory.nbytes == 16 and at == memory.ctypes.data + MAPPED
    assert calls(fake, "hostAlloc") == [(16, 3)], "mapped, for every device"
    device.read(Span(4096, 3, F32), 7)
    assert calls(fake, "streamSynchronize") == [(7,)] and calls(fake, "memcpy")[0][1:] == (4096, 12, 2)
    monkeypatch.setattr(fake.cupy.cuda, "alloc", lambda n: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(OutOfMemory, match="10 bytes on H100: no room"):
        device.memory(10)


def test_events_streams_and_captures(fake: Any) -> None:
    device = gpu.Gpu()
    event, later = device.event(), device.event()
    event.record(3)
    fake.answers.update(eventQuery=600, eventElapsedTime=2.5, streamEndCapture=80, graphInstantiate=81)
    assert not event.done() and later.since(event) == 0.0025
    fake.answers["eventQuery"] = 0
    assert event.done()
    fake.answers["eventQuery"] = 700
    with pytest.raises(DeviceError, match="asked of the device before"):
        event.done()
    device.follow(6, 7)
    assert calls(fake, "eventRecord") == [(33, 3), (33, 7)] and calls(fake, "streamWaitEvent") == [(6, 33)]
    fake.answers["streamIsCapturing"] = lambda stream: stream == 6
    with pytest.raises(CaptureError, match="stream 0x6 is being captured, and would wait for stream 0x7, which is not"):
        device.follow(6, 7)
    device.follow(6, 6)
    assert len(calls(fake, "streamWaitEvent")) == 2
    device.capture(device.stream())
    graph = device.captured(9)
    graph.replay(4)
    assert (
        calls(fake, "streamBeginCapture") == [(9, 1)]
        and calls(fake, "graphLaunch") == [(81, 4)]
        and calls(fake, "graphDestroy") == [(80,)]
    )
    del graph
    assert calls(fake, "graphExecDestroy") == [(81,)]
    fake.answers["streamEndCapture"] = CudaError(901)
    assert device.captured(9, keep=False) is None
    with pytest.raises(CaptureError, match="ending a capture"):
        device.captured(9)


# -- cuBLAS ------------------------------------------------------------------------------------------------------------


def product(
    a: tuple[tuple[int, ...], tuple[int, ...]], b: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any = F32
) -> Product:
    """A product of operands with shapes and strides."""
    batch, m, n = a[0][:-2], a[0][-2], b[0][-1]
    shape = (*batch, m, n)
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    part = Part("x", 0, 1 << 20, np.dtype(dtype))
    return Product(Strided(part, *a), Strided(part, *b), Strided(part, shape, strides), 0)


def column_major(memory: np.ndarray, rows: int, columns: int, leading: int, transposed: bool) -> np.ndarray:
    """What cuBLAS sees at the start of memory: op(X), rows x columns."""
    held = (columns, rows) if transposed else (rows, columns)
    seen = np.lib.stride_tricks.as_strided(memory, held, (memory.itemsize, leading * memory.itemsize))
    return seen.T if transposed else seen


@pytest.mark.parametrize(
    "a",
    [
        ((5, 7), (7, 1)),
        ((5, 7), (1, 5)),
        ((5, 7), (20, 1)),
        ((5, 7), (1, 9)),
        ((1, 7), (3, 1)),
        ((5, 1), (1, 1)),
        ((1, 1), (8, 8)),
    ],
)
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_what_cublas_is_asked(a: Any, b_transposed: bool, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cuBLAS of NumPy's computes what it is asked, column-major, and it is our product."""
    k = a[0][1]
    b = ((k, n), (1, k)) if b_transposed else ((k, n), (n, 1))
    asked = product(a, b)
    library = library_of(asked)
    assert library is not None
    memory = [np.random.default_rng(i).standard_normal(400).astype(np.float32) for i in range(2)] + [
        np.zeros(400, np.float32)
    ]
    seen: dict[str, Any] = {}

    def gemm(
        handle: Any,
        op_x: int,
        op_y: int,
        m: int,
        n: int,
        k: int,
        alpha: Any,
        x: int,
        xt: int,
        ldx: int,
        sx: int,
        y: int,
        yt: int,
        ldy: int,
        sy: int,
        beta: Any,
        out: int,
        ot: int,
        ldo: int,
        so: int,
        batch: int,
        compute: int,
        algorithm: int,
    ) -> int:
        seen.update(types=(xt, yt, ot, compute), batch=batch)
        left, right = (
            column_major(memory[i], r, c, ld, bool(op))
            for i, r, c, ld, op in ((x, m, k, ldx, op_x), (y, k, n, ldy, op_y))
        )
        assert ldx >= (k if op_x else m) and ldy >= (n if op_y else k) and ldo >= m, "as cuBLAS requires"
        column_major(memory[out], m, n, ldo, False)[...] = left @ right
        return 0

    blas = SimpleNamespace(
        cublasSetStream_v2=lambda *a: 0, cublasSetWorkspace_v2=lambda *a: 0, cublasGemmStridedBatchedEx=gemm
    )
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    monkeypatch.setattr(cublas, "_handles", Handles(lambda device: 1, id))
    cublas.prepared(0, library, 0, 1, 2, Span(0, 0, np.dtype(np.uint8)))(0)
    x, y = (
        np.lib.stride_tricks.as_strided(m, o.shape, [s * 4 for s in o.strides])
        for m, o in zip(memory, (asked.a, asked.b), strict=False)
    )
    wanted = x @ y
    assert np.allclose(memory[2][: wanted.size].reshape(wanted.shape), wanted, atol=1e-5)
    assert seen == {"types": (0, 0, 0, 68), "batch": 1}


def test_where_there_is_no_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried, CuPy's own words too, and what would bring one."""

    def missing() -> None:
        raise ImportError("libcublas.so.99: cannot open shared object file")

    runtime = SimpleNamespace(runtimeGetVersion=lambda: 99000)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, device=SimpleNamespace(get_cublas_handle=missing)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cublas._library.cache_clear()
    with pytest.raises(
        DeviceError, match=r"no cuBLAS of CUDA 99 \(libcublas.so.99: .*; CuPy: libcublas.so.99.*nvidia-cubl"
    ):
        cublas.prepared(0, None, 0, 0, 0, Span(0, 0, F32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("driver", "code", "error", "match"),
    [
        (12040, 1, DriverTooOld, "cuBLAS 13.2 makes no handle of device 0: status 1, not initialized; the driver is of"
            " CUDA 12.4, and one of 13.0 or newer is needed"),
        (13000, 8, DeviceError, "status 8, architecture mismatch$"),
        (13000, 3, OutOfMemory, "no memory for a handle of cuBLAS on device 0: status 3, allocation failed"),
    ],
)  # fmt: skip
def test_a_cublas_that_does_not_begin(
    driver: int, code: int, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(which: int, at: Any) -> int:
        at._obj.value = (13, 2)[which]
        return 0

    blas = SimpleNamespace(**dict.fromkeys(cublas._SIGNATURES, lambda *_: code) | {"cublasGetProperty": version})
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(driverGetVersion=lambda: driver)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    monkeypatch.setattr(cublas, "_handles", Handles(cublas._create, id))
    library = library_of(product(((5, 7), (7, 1)), ((7, 2), (2, 1))))
    with pytest.raises(error, match=match):
        cublas.prepared(0, library, 0, 1, 2, Span(0, 0, F32))


def test_what_cublas_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    blas = SimpleNamespace(
        cublasSetStream_v2=lambda *a: 0, cublasSetWorkspace_v2=lambda *a: 0, cublasGemmStridedBatchedEx=lambda *a: 15
    )
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    monkeypatch.setattr(cublas, "_handles", Handles(lambda device: 1, id))
    library = library_of(product(((5, 7), (7, 1)), ((7, 2), (2, 1))))
    with pytest.raises(
        DeviceError, match=r"cuBLAS refused a product \(1 x 5 x 2 x 7 in float32\): status 15, not supported"
    ):
        cublas.prepared(0, library, 0, 1, 2, Span(0, 0, np.dtype(np.uint8)))(0)


def test_what_the_library_takes() -> None:
    """Both strides not 1, and rows that overlap or repeat, are ours; axes of a batch that step alike are one, and of
    others the longest is stepped along.
    """
    plain = ((7, 4), (4, 1))
    assert library_of(product(((5, 7), (14, 2)), plain)) is None
    assert library_of(product(((5, 7), (1, 1)), plain)) is None
    assert library_of(product(((5, 7), (0, 1)), plain)) is None
    batched = library_of(product(((6, 5, 7), (35, 7, 1)), ((6, 7, 4), (0, 4, 1))))
    assert batched is not None and (batched.batch, batched.a.step, batched.b.step) == (6, 35, 0)
    merged = library_of(product(((2, 3, 5, 7), (105, 35, 7, 1)), ((2, 3, 7, 4), (84, 28, 4, 1))))
    assert merged is not None and merged.batch == 6
    apart = library_of(product(((2, 3, 5, 7), (35, 70, 7, 1)), ((2, 3, 7, 4), (84, 28, 4, 1))))
    assert apart is not None and (apart.batch, apart.outer) == (3, ((2, (35, 84, 60)),))
    assert (apart.a.step, apart.b.step, apart.out.step, apart.calls) == (70, 28, 20, [(0, 0, 0), (35, 84, 60)])


# -- a whole call ------------------------------------------------------------------------------------------------------


class Array:
    """As CuPy's, at an address that nobody follows."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Any):
        self.shape, self.dtype, self.data, self.device = shape, np.dtype(dtype), memory, SimpleNamespace(id=0)
        self.strides = tuple(int(np.prod(shape[i + 1 :])) * self.dtype.itemsize for i in range(len(shape)))


Array.__module__ = "cupy"


WAIT = {"streamSynchronize", "deviceSynchronize", "eventSynchronize", "memcpy", "memGetInfo"}


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_warm_call_waits_for_nothing(fake: Any, capturing: int) -> None:
    """With numbers that change: no wait, no query of an event (which a capture in the global mode forbids), and the
    only memory is that of the result and the workspace, from the pool.
    """
    allocated: list[int] = []
    addresses = iter(range(1 << 30, 1 << 40, 1 << 20))

    def alloc(nbytes: int) -> Any:
        allocated.append(nbytes)
        return SimpleNamespace(ptr=next(addresses))

    fake.cupy.ndarray, fake.cupy.cuda.alloc = Array, alloc
    graph = gradc.trace(lambda t, w, a: ops.embedding(t, w) * a, t="i64[N]", w="f32[V,D]", a="f32[]")
    module = gradc.compile(graph, target="cuda", arch="sm_90")
    for each in (module.forward.native, module.forward.native.support):
        device = getattr(each, "device", each)
        device._functions[False] = dict.fromkeys(gpu._FUNCTION.findall(device.text), 71)
    new = lambda shape, dtype: Array(shape, dtype, SimpleNamespace(ptr=next(addresses)))
    inputs, y = {"t": new((64,), np.int64), "w": new((10, 32), np.float32)}, new((64, 32), np.float32)
    space = new((module.workspace_size(N=64, V=10, D=32),), np.uint8)
    assert not allocated
    for a in range(3):
        module(**inputs, a=a)
    fake.answers["streamIsCapturing"] = capturing
    fake.log.clear(), allocated.clear()
    if capturing:
        module.forward(**inputs, a=7, out={"y": y}, workspace=space)
        assert not allocated
    else:
        module(**inputs, a=7)
        assert allocated == [64 * 32 * 4, space.shape[0]]
    names = [entry[0] for entry in fake.log]
    assert not WAIT & set(names) and names.count("eventQuery") == 0 and names.count("streamIsCapturing") == 1
    assert names.count("launchKernel") == 3, "the number, the check, the rows"
    assert ("memsetAsync" in names) == bool(capturing), "the flag of a captured call is cleared by each replay"
    assert {"eventRecord", "memcpyAsync", "malloc", "hostAlloc", "funcSetAttribute"}.isdisjoint(names)


IN_A_CAPTURE = {
    *("getDevice", "setDevice", "pointerGetAttributes", "streamIsCapturing"),
    *("getDeviceProperties", "driverGetVersion", "runtimeGetVersion"),
    *("launchKernel", "memcpyAsync", "memcpy2DAsync", "memsetAsync"),
}
"""What a call may ask of the driver while a stream is captured in the global mode: what becomes a node of the graph,
and what tells how things are.  CUDA forbids all threads what is "potentially unsafe" (cudaStreamBeginCapture), which
ends the capture, and does not list it: allocating, giving memory back, waiting, asking an event, loading code are.
"""


class Forbidding(host.Driver):
    """A driver under such a capture.

    :ivar capturing: whether it is of the stream of the calls.
    :ivar elsewhere: whether it is another thread's, beside which a thread in the relaxed mode may do all of it.
    :ivar broken: what ended it.
    """

    capturing, elsewhere = 0, False
    broken: tuple[str, ...] = ()
    OWN = ("calls", "CUDARuntimeError", "exchange", "streamEndCapture")

    def __init__(self) -> None:
        super().__init__()
        self._modes = threading.local()

    def __getattribute__(self, name: str) -> Any:
        try:
            found = super().__getattribute__(name)
        except AttributeError:
            found = self.__getattr__(name)
        if name.startswith("_") or name in {*Forbidding.OWN, *IN_A_CAPTURE} or not callable(found):
            return found

        def asked(*given: Any) -> Any:
            if self.capturing or (self.elsewhere and not self.relaxed):
                self.broken = (*self.broken, name)
                raise CudaError(900)
            return found(*given)

        return asked

    @property
    def relaxed(self) -> bool:
        return getattr(self._modes, "mode", 0) == 2

    def exchange(self, given: Any) -> int:
        """cuThreadExchangeStreamCaptureMode."""
        given._obj.value, self._modes.mode = getattr(self._modes, "mode", 0), given._obj.value
        return 0

    def streamIsCapturing(self, _: int) -> int:
        return self.capturing


def mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return ops.linear(ops.gelu(ops.linear(x, w1, b1), approximate="tanh"), w2, b2)


_LAYERS = {"x": "bf16[128,64]", "w1": "bf16[256,64]", "b1": "bf16[256]", "w2": "bf16[64,256]", "b2": "bf16[64]"}
TRAINED = {
    "checked, sorted, a number": (
        lambda t, w, a: ops.embedding(t, w) * a,
        {"t": "i64[20000]", "w": "f32[16384,64]", "a": "f32[]"},
        ("w",),
    ),
    "partial results of chunks": (
        lambda x, g, b: ops.layer_norm(x, (1024,), g, b),
        {"x": "f32[512,1024]", "g": "f32[1024]", "b": "f32[1024]"},
        ("x", "g", "b"),
    ),
    "cuBLASLt's epilogues": (mlp, _LAYERS, tuple(_LAYERS)),
    "heads beside features": (
        lambda q, k, v: ops.scaled_dot_product_attention(*(ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))),
        {n: "f32[2,64,4,32]" for n in "qkv"},
        ("q", "k", "v"),
    ),
    "a loop over blocks of rows": (
        lambda x, w, t: ops.linear_cross_entropy(x, w, t),
        {"x": "bf16[8192,256]", "w": "bf16[16384,256]", "t": "i64[8192]"},
        ("x", "w"),
    ),
    "a constant of the graph": (lambda x: x * np.arange(64, dtype=np.float32), {"x": "f32[256,64]"}, ("x",)),
}


@pytest.fixture
def forbidding(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Forbidding, Callable[..., Any]]]:
    """Such a driver, with torch's tensors in host memory that say that they are on a GPU."""
    torch = pytest.importorskip("torch")
    driver = Forbidding()
    for owner, name, value in host.replaced(driver):
        if (owner, name) != (gpu.Gpu, "load"):
            monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda arch: SimpleNamespace(version=(12, 4)))
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda text, **_: SimpleNamespace(cubin=b"binary"))

    def created(device: int) -> Any:
        driver.cublasCreate()  # allocates
        return ctypes.c_void_p(1)

    pool, alloc = gpu._cupy().cuda, gpu._cupy().cuda.alloc
    monkeypatch.setattr(pool, "alloc", lambda nbytes: (driver.malloc(), alloc(nbytes))[1])
    monkeypatch.setattr(capture_mode, "_exchange", lambda: driver.exchange)
    monkeypatch.setattr(cublas, "_handles", Handles(created, id))
    monkeypatch.setattr(torch, "empty", torch.empty)  # what tensors_of replaces comes back with the test's end
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.current_stream)
    gpu._description.cache_clear()
    tensor = host.tensors_of()
    assert tensor is not None
    new = torch.empty

    def empty(*given: Any, **more: Any) -> Any:
        if not driver.capturing:  # there torch takes the relaxed mode itself; beside a capture it does not
            driver.malloc()
        return new(*given, **more)

    monkeypatch.setattr(torch, "empty", empty)
    yield driver, tensor
    gpu._description.cache_clear()


def training(name: str, tensor: Callable[..., Any]) -> Callable[[], None]:
    """Forward and backward of a module."""
    function, types, wrt = TRAINED[name]
    graph = gradc.trace(function, **types)
    module = gradc.compile(graph, wrt=wrt, target="cuda", arch="sm_90")
    inputs = {
        n: tensor(x.shape, x.dtype.np) if x.shape else 0.5 for n, x in zip(graph.input_names, graph.inputs, strict=True)
    }
    cotangent = tensor(graph.output("y").shape, graph.output("y").dtype.np)
    return lambda: module.backward(module.forward(**inputs)[1], cotangent)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "a thread's first call"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_warm_call_in_a_capture_in_the_global_mode(
    name: str, elsewhere: bool, forbidding: tuple[Forbidding, Callable[..., Any]]
) -> None:
    """Forward and backward under torch's capture, which is of that mode, in memory of the graph's: nothing that would
    end it, also in a thread that has not called the module before, as autograd's may be.
    """
    driver, tensor = forbidding
    step = training(name, tensor)
    for _ in range(3):
        step()
    driver.calls.clear()
    driver.capturing = 1
    failed: list[Exception] = []

    def captured() -> None:
        try:
            step()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=captured)
    thread.start() if elsewhere else captured()
    if elsewhere:
        thread.join()
    assert not driver.broken and not failed
    assert driver.calls["launchKernel"] and driver.calls.keys() <= IN_A_CAPTURE


@pytest.mark.parametrize("name", TRAINED)
def test_a_first_call_beside_a_capture_of_another_thread(
    name: str, forbidding: tuple[Forbidding, Callable[..., Any]]
) -> None:
    """What allocates does so in the relaxed mode, which the thread leaves."""
    driver, tensor = forbidding
    driver.elsewhere = True
    step = training(name, tensor)
    for _ in range(70):  # more than two blocks of flags hold
        step()
    assert not driver.broken and not driver.relaxed
    assert {"moduleLoadData", "moduleGetFunction", "malloc"} <= driver.calls.keys()


@pytest.mark.parametrize("sync", [False, True])
def test_what_a_device_does_beside_a_capture_of_another_thread(
    sync: bool, forbidding: tuple[Forbidding, Callable[..., Any]]
) -> None:
    driver, _ = forbidding
    device = gpu.Gpu(TEXT, cubin=b"binary", arch="sm_90", sync=sync)
    device.cupy.get_default_memory_pool().free_all_blocks = lambda: driver.free(7)
    device.cupy.cuda.Stream = lambda non_blocking: SimpleNamespace(ptr=driver.streamCreateWithFlags(non_blocking))
    driver.elsewhere = True
    device.launch("twice", 3, 256, [Span(4096, 10, F32), 10], [0], shared=100 << 10)
    device.mapped(8)
    device.read(Span(4096, 1, F32), 8)
    assert device.made_room(CudaError(2)) and device.free() and not device.stream()
    event = device.event()
    event.wait()
    assert event.done() and device.captured(9) is not None
    assert not driver.broken and not driver.relaxed
    wanted = ["moduleLoadData", "moduleGetFunction", "funcSetAttribute", "hostAlloc", "streamSynchronize", "memcpy"]
    wanted += ["free", "memGetInfo", "streamCreateWithFlags", "eventSynchronize", "eventQuery"]
    wanted += ["graphInstantiate", "graphDestroy", "graphExecDestroy"]
    assert driver.calls.keys() >= {*wanted}


@pytest.mark.parametrize("stream", [None, 8])
def test_a_whole_call(fake: Any, stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and an accumulation through the real Gpu: what CuPy is asked, in order; nothing waits."""
    pytest.importorskip("nvidia.cuda_nvrtc")

    class Along(SimpleNamespace):
        entered: list[int] = []

        def __enter__(self) -> None:
            self.entered.append(self.ptr)
            monkeypatch.setattr(fake.cupy.cuda, "get_current_stream", lambda: self)

        def __exit__(self, *_: Any) -> None:
            monkeypatch.setattr(fake.cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=5))

    addresses = iter(range(1 << 30, 1 << 40, 1 << 20))
    fake.cupy.ndarray, fake.cupy.cuda.alloc = Array, lambda n: SimpleNamespace(ptr=next(addresses))
    fake.cupy.cuda.Stream = SimpleNamespace(
        null=Along(ptr=0), from_external=lambda s: Along(ptr=s.__cuda_stream__()[1])
    )
    # what is read is the flags of calls without errors
    fake.answers["memcpy"] = lambda to, source, nbytes, *_: ctypes.memset(to, 255, nbytes)
    fake.answers["memGetInfo"] = (1 << 40, 1 << 40)
    module = gradc.compile(
        gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]"), wrt=["w"], target="cuda", arch="sm_90"
    )
    new = lambda shape, dtype: Array(shape, dtype, fake.cupy.cuda.alloc(0))
    inputs = {"t": new((64,), np.int64), "w": new((10, 32), np.float32)}
    y, residuals = module.forward(**inputs, stream=stream)
    assert isinstance(y, Array) and y.shape == (64, 32) and y.data.ptr >= 1 << 30
    total = new((10, 32), np.float32)
    assert (
        module.backward(residuals, new((64, 32), np.float32), out={"w": total}, accumulate=True, stream=stream)["w"]
        is total
    )
    used = 5 if stream is None else stream
    names = [entry[0] for entry in fake.log]
    launches = calls(fake, "launchKernel")
    assert len(launches) >= 3 and {launch[8] for launch in launches} == {used}
    uploads = calls(fake, "memcpyAsync")
    assert len(uploads) == 2 and {upload[-1] for upload in uploads} == {used}, "a block of flags for each program"
    assert names.index("memcpyAsync") < names.index("launchKernel")
    assert "memsetAsync" not in names and "eventRecord" not in names
    assert "streamSynchronize" not in names and "deviceSynchronize" not in names and "memcpy" not in names
    assert launches[-1][9][0] == total.data.ptr, "the addition is the last"
    assert (stream is None) == (not Along.entered) and set(Along.entered) <= {8}
    module.synchronize()
    assert "deviceSynchronize" in [entry[0] for entry in fake.log]
