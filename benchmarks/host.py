"""The host's cost of a call on a GPU, measured against a driver that does nothing.

``python -m benchmarks.host [--json FILE]`` compiles programs for sm_90, replaces CuPy by functions that return at once
(a launch is a call of an empty C function through ctypes), and prints for each program: launches and other driver calls
per call, microseconds per call, and these as multiples of one of those ctypes calls in a loop of nothing else.  Neither
a GPU nor CuPy is needed, and NVRTC is not called.  Times are processor times, the least of several repetitions.

Where torch is installed, the calls named ``torch`` take tensors of its in host memory, which say that they are on a
GPU.  They are of a subclass, whose attributes take about three times as long as a tensor's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradc
from gradc import ops
from gradc.ir.types import BF16
from gradc.runtime.cuda import cublas, gpu
from gradc.runtime.cuda.handles import Handles

REPEAT, CALLS = 25, 40
WAITS = ("streamSynchronize", "deviceSynchronize", "eventSynchronize", "memcpy")
ALLOCATES = ("malloc", "hostAlloc", "memGetInfo")
_ABOUT = {
    "name": b"nothing",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "l2CacheSize": 50 << 20,
    "sharedMemPerBlockOptin": 227 << 10,
    "totalGlobalMem": 80 << 30,
}


def _empty_function() -> Any:
    """An empty C function with the parameters of cuLaunchKernel."""
    function = ctypes.CDLL(None).abs  # ignores what is beyond its first argument
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


def cublas_of() -> Any:
    """cuBLAS's functions with their parameters, which do nothing and give 0 (as ``pthread_condattr_destroy`` does);
    ctypes converts their arguments as it does for cuBLAS.  cuBLASLt's has an algorithm for every product.
    """
    made: dict[str, Any] = {}
    for name, types in (cublas._SIGNATURES | cublas._LT_SIGNATURES).items():
        made[name] = ctypes.CDLL(None)["pthread_condattr_destroy"]  # indexing gives a new function each time
        made[name].argtypes = [cublas._KINDS[letter] for letter in types.split()]

    def heuristic(*given: int) -> int:
        ctypes.c_int.from_address(given[-1]).value = 1
        return 0

    return SimpleNamespace(**made | {"cublasLtMatmulAlgoGetHeuristic": heuristic})


class Driver:
    """The functions of ``cupy.cuda.runtime`` and ``cupy.cuda.driver`` that are used, each of which counts its calls.

    :ivar calls: name -> number of calls.
    """

    CUDARuntimeError = RuntimeError
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    memcpyDefault, memcpyDeviceToHost, streamCaptureModeThreadLocal = 4, 2, 1
    hostAllocPortable, hostAllocMapped = 1, 2

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._host: dict[int, Any] = {}
        self._launch = _empty_function()
        self._answers = {
            "getDeviceProperties": _ABOUT,
            "driverGetVersion": 12080,
            "runtimeGetVersion": 12090,
            "moduleLoadData": 1,
            "moduleGetFunction": 2,
            "memGetInfo": (1 << 40, 1 << 40),
        }

    def launchKernel(self, *args: int) -> None:
        self.calls["launchKernel"] += 1
        self._launch(*args)

    def memcpyAsync(self, to: int, source: int, nbytes: int, *_: Any) -> None:
        """Flags of calls without errors, at once, where they are what is copied to the host."""
        self.calls["memcpyAsync"] += 1
        if to in self._host:
            ctypes.memset(to, 255, nbytes)

    def memcpy(self, to: int, source: int, nbytes: int, *_: Any) -> None:
        self.calls["memcpy"] += 1
        ctypes.memset(to, 255, nbytes)

    def hostAlloc(self, nbytes: int, _: int) -> int:
        self.calls["hostAlloc"] += 1
        memory = (ctypes.c_ubyte * nbytes)()
        self._host[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def pointerGetAttributes(self, address: int) -> Any:
        return SimpleNamespace(devicePointer=address)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = self._answers.get(name, 0)

        def function(*_: Any) -> Any:
            self.calls[name] += 1
            return answer

        setattr(self, name, function)
        return function


class Array:
    """An array of CuPy's, as far as gradc looks."""

    __slots__ = ("__weakref__", "data", "device", "dtype", "flags", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Any):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), memory
        self.device, self.flags = _DEVICE, _FLAGS
        step, strides = self.dtype.itemsize, []
        for size in reversed(shape):
            strides.append(step)
            step *= size
        self.strides = tuple(reversed(strides))


Array.__module__ = "cupy"
_DEVICE, _FLAGS = SimpleNamespace(id=0), SimpleNamespace(c_contiguous=True)


def cupy_of(driver: Driver) -> Any:
    """A CuPy over the driver; its pool hands out the same few addresses again, as CuPy's does."""
    addresses = iter(())

    def alloc(nbytes: int) -> Any:
        nonlocal addresses
        driver.calls["alloc from the pool"] += 1
        at = next(addresses, 0)
        if not at:
            addresses = iter(range(1 << 30, (1 << 30) + (8 << 20), 1 << 20))
            at = next(addresses)
        return SimpleNamespace(ptr=at)

    stream = SimpleNamespace(ptr=5)
    cuda = SimpleNamespace(
        runtime=driver,
        driver=driver,
        get_current_stream=lambda: stream,
        alloc=alloc,
        Event=lambda disable_timing: SimpleNamespace(ptr=3),
    )
    free = SimpleNamespace(free_bytes=lambda: 0)
    return SimpleNamespace(cuda=cuda, ndarray=Array, get_default_memory_pool=lambda: free, __version__="14")


def replaced(driver: Driver) -> list[tuple[Any, str, Any]]:
    """What the benchmark puts in the place of CuPy, cuBLAS and NVRTC: (owner, name, value) of each."""
    cupy, blas = cupy_of(driver), cublas_of()
    return [
        (gpu, "_cupy", lambda: cupy),
        (gpu, "count", lambda: 1),
        (gpu.Gpu, "load", _load),
        (cublas, "_library", lambda: blas),
        (cublas, "_lt", lambda: blas),
        (cublas, "_handles", Handles(cublas._create, id)),
    ]


def tensors_of() -> Callable[..., Any] | None:
    """(shape, dtype) -> a tensor that says that it is on a GPU; None without torch.  torch's current stream and its
    ``torch.empty`` for a GPU, which a build for the CPU lacks, are replaced by what takes no time.
    """
    try:
        import torch
    except ImportError:
        return None
    on_gpu, empty = torch.device("cuda", 0), torch.empty

    class Tensor(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        device, is_cuda = on_gpu, True

    def made(shape: tuple[int, ...], dtype: Any, device: Any = None) -> Any:
        found = getattr(torch, np.dtype(dtype).name) if device is None else dtype
        return torch.Tensor._make_subclass(Tensor, empty(shape, dtype=found))

    torch.empty = made
    torch._C._cuda_getCurrentRawStream = lambda device: 5
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=5)
    return made


def chained(count: int) -> Any:
    """A program of ``count`` launches that follow each other: reductions over alternating axes."""

    def function(x: Any) -> Any:
        for i in range(count - 1):
            x = x + ops.sum(x, axes=(i % 2,), keepdims=True)
        return ops.exp(x)

    return gradc.trace(function, x="f32[64,64]")


def adam(count: int) -> Any:
    """A step over ``count`` parameters with a learning rate that differs in each call."""

    def function(lr: Any, **arrays: Any) -> Any:
        out = {}
        for i in range(count):
            p, g, m, v = (arrays[f"{name}{i}"] for name in "pgmv")
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            out |= {f"m{i}_": m, f"v{i}_": v, f"p{i}_": p - lr * m / (ops.sqrt(v) + 1e-8)}
        return out

    return gradc.trace(function, lr="f32[]", **{f"{name}{i}": "f32[64]" for name in "pgmv" for i in range(count)})


def perceptron(layers: int, bias: bool = False) -> Any:
    """``layers`` products, and a kernel behind each; or with a bias and without a kernel."""

    def function(x: Any, **given: Any) -> Any:
        for i in range(layers):
            y = ops.linear(x, given[f"w{i}"], given.get(f"b{i}"))
            x = y if bias else ops.tanh(y)
        return x

    types = {f"w{i}": "bf16[64,64]" for i in range(layers)}
    return gradc.trace(function, x="bf16[64,64]", **types, **{f"b{i}": "bf16[64]" for i in range(layers) if bias})


def programs() -> dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]]:
    """Name -> (a call, its arguments by the number of the call)."""
    new = lambda shape, dtype=np.float32: Array(shape, dtype, SimpleNamespace(ptr=next(_fixed)))
    one = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), target="cuda", arch="sm_90")
    many = gradc.compile(chained(16), target="cuda", arch="sm_90")
    table = gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]")
    rows = gradc.compile(table, wrt=["w"], target="cuda", arch="sm_90")
    step = gradc.compile(
        adam(8), target="cuda", arch="sm_90", donate=[f"{name}{i}" for name in "pmv" for i in range(8)]
    )
    x, square = new((4096,)), new((64, 64))
    t, w, dy = new((20000,), np.int64), new((1 << 20, 64)), new((20000, 64))
    _, residuals = rows.forward(t=t, w=w)
    layers = gradc.compile(perceptron(16), target="cuda", arch="sm_90")
    biased = gradc.compile(perceptron(16, bias=True), target="cuda", arch="sm_90")
    matrices = {n: new((64, 64), BF16.np) for n in ("x", *(f"w{i}" for i in range(16)))}
    with_biases = matrices | {f"b{i}": new((64,), BF16.np) for i in range(16)}
    states = {f"{name}{i}": new((64,)) for name in "pgmv" for i in range(8)}
    return {
        "one launch": (one, lambda _: {"x": x}),
        "many launches": (many, lambda _: {"x": square}),
        "embedding forward, checked": (rows, lambda _: {"t": t, "w": w}),
        "embedding backward, sorted": (lambda **_: rows.backward(residuals, dy), lambda _: {}),
        "16 products and kernels": (layers, lambda _: matrices),
        "16 products with a bias": (biased, lambda _: with_biases),
        "Adam, 8 parameters": (step, lambda number: {"lr": 1e-3 / (1 + number), **states}),
        **of_torch(one, rows),
    }


def of_torch(one: Any, rows: Any) -> dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]]:
    """As :func:`programs`, with tensors of torch; backward into given ones, as training loops do."""
    new = tensors_of()
    if new is None:
        return {}
    types = {"x": "f32[N,1024]", "g": "f32[1024]", "b": "f32[1024]"}
    normed = gradc.trace(lambda x, g, b: ops.layer_norm(x, (1024,), g, b), **types)
    norm = gradc.compile(normed, wrt=["x", "g", "b"], target="cuda", arch="sm_90")
    x, t, w, dy = new((4096,), "f4"), new((20000,), "i8"), new((1 << 14, 64), "f4"), new((20000, 64), "f4")
    given = {"x": new((512, 1024), "f4"), "g": new((1024,), "f4"), "b": new((1024,), "f4")}
    cotangent = new((512, 1024), "f4")
    (_, of_rows), (_, of_norm) = rows.forward(t=t, w=w), norm.forward(**given)
    out, outs = {"w": new((1 << 14, 64), "f4")}, {n: new(tuple(a.shape), "f4") for n, a in given.items()}
    return {
        "one launch, torch": (one, lambda _: {"x": x}),
        "embedding forward, checked, torch": (lambda **_: rows.forward(t=t, w=w), lambda _: {}),
        "embedding backward, sorted, torch, out=": (lambda **_: rows.backward(of_rows, dy, out=out), lambda _: {}),
        "layer norm forward, torch": (lambda **_: norm.forward(**given), lambda _: {}),
        "layer norm backward, torch, out=": (lambda **_: norm.backward(of_norm, cotangent, out=outs), lambda _: {}),
    }


_fixed = iter(range(1 << 40, 1 << 50, 1 << 30))


def least(work: Callable[[int], Any]) -> float:
    """Seconds per call, of this thread's processor time, so that other processes count little."""
    times = []
    for i in range(REPEAT):
        began = time.thread_time()
        for j in range(CALLS):
            work(i * CALLS + j)
        times.append((time.thread_time() - began) / CALLS)
    return min(times)


def measured(driver: Driver) -> list[dict[str, Any]]:
    """A record for each program."""
    bare, args = _empty_function(), (2, 16, 1, 1, 256, 1, 1, 0, 5, 4096, 0)
    floor = least(lambda _: bare(*args))
    records = []
    for name, (call, given) in programs().items():
        for number in range(3):
            call(**given(number))
        driver.calls.clear()
        call(**given(10**6))
        counted = dict(driver.calls)
        driver.__dict__["launchKernel"] = bare
        seconds = least(lambda number, call=call, given=given: call(**given(number + 3)))  # type: ignore[misc]
        del driver.__dict__["launchKernel"]
        launches = counted.pop("launchKernel", 0)
        records.append(
            {
                "program": name,
                "launches": launches,
                "driver calls": counted,
                "us": seconds * 1e6,
                "bare launches": seconds / floor,
                "waits": sum(counted.get(n, 0) for n in WAITS),
                "allocations": sum(counted.get(n, 0) for n in ALLOCATES),
            }
        )
    first, second = records[0], records[1]
    more = (second["us"] - first["us"]) / max(second["launches"] - first["launches"], 1)
    records.append({"program": "each further launch", "us": more, "bare launches": more / (floor * 1e6)})
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the records to this file")
    given = parser.parse_args()
    driver = Driver()
    for owner, name, value in replaced(driver):
        setattr(owner, name, value)
    records = measured(driver)
    print(f"{'':<40} launches {'us':>8} {'bare launches':>14}  other driver calls")
    for r in records:
        others = ", ".join(f"{n} {name}" for name, n in r.get("driver calls", {}).items())
        print(f"{r['program']:<40} {r.get('launches', ''):>8} {r['us']:>8.1f} {r['bare launches']:>14.1f}  {others}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(records, file, indent=1)
    return 0


def _load(self: gpu.Gpu, wide: bool = False) -> None:
    """Names the functions of the text without compiling it."""
    self.check_current()
    self._functions.setdefault(wide, dict.fromkeys(gpu._FUNCTION.findall(self.text), 2))


if __name__ == "__main__":
    sys.exit(main())
