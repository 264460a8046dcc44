"""Where the tests of this folder run: a GPU, with the arrays of torch or CuPy, and what stands for one where there is
none.

``cuda-sim`` is the target of that name, with NumPy's or torch's arrays; ``memory`` is the target cuda on a device in
the host's memory (tests/gpu_in_memory.py), which has streams, late work and arrays that nobody can look into.  Both
check every access.  One test text serves them all: ``machine.put`` and ``machine.get`` move arrays, ``machine.compile``
names the target.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gpu_in_memory
import numpy as np

import gradc
from gradc import knobs
from gradc.ir.types import dtype as dtype_named
from gradc.runtime.host.arrays import Kind, from_numpy, to_numpy

Array = np.ndarray[Any, Any]
NARROW = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8}
"""What torch holds them as, one to a byte."""
KINDS = {"cuda-sim": ("numpy", "torch"), "memory": ("cupy", "torch"), "cuda": ("torch", "cupy")}
"""Place -> the libraries whose arrays it is given."""


@functools.cache
def gpus() -> int:
    from gradc.runtime.cuda import gpu

    return gpu.count()


def why_not(place: str, kind: str) -> str:
    """Why a test cannot run there, or ""."""
    if place == "memory":
        return ""
    if place == "cuda" and not gpus():
        return "needs a GPU"
    needed = [name for name in (kind, *(["cupy"] if place == "cuda" else [])) if importlib.util.find_spec(name) is None]
    return f"needs {needed[0]}" if needed else ""


@dataclass(frozen=True)
class Machine:
    """A place and the library whose arrays it is given."""

    place: str
    kind: str

    @property
    def target(self) -> str:
        return "cuda-sim" if self.place == "cuda-sim" else "cuda"

    @property
    def on_gpu(self) -> bool:
        """Whether it is a real one: large sizes, many runs."""
        return self.place == "cuda"

    def __str__(self) -> str:
        return f"{self.place}-{self.kind}"

    # -- arrays --------------------------------------------------------------------------------------------------------

    def put(self, array: Array) -> Any:
        """The same numbers in an array of the machine's."""
        array = np.asarray(array)
        if self.place == "memory":
            return (
                gpu_in_memory.to_cupy(array)
                if self.kind == "cupy"
                else gpu_in_memory.to_torch(array.astype(NARROW.get(array.dtype.name, array.dtype)))
            )
        if self.kind == "cupy":
            import cupy

            return cupy.asarray(array)
        if self.kind == "torch":
            import torch  # noqa: F401  (from_numpy looks for it among what is imported)

            tensor = from_numpy(array.copy(), Kind.TORCH)
            return tensor.cuda() if self.on_gpu else tensor
        return array

    def write(self, array: Any, values: Array) -> None:
        """Other numbers into an array that is there."""
        if self.place == "memory":
            gpu_in_memory.InMemory.drain()
            getattr(array, "array", array).host[...] = values
        elif self.kind == "torch":
            array.copy_(self.put(values))
        else:
            array[...] = self.put(values)

    def cut(self, array: Any) -> Any:
        """All but the first, where they lie: an array that begins in the middle of another."""
        return gpu_in_memory.Tensor(array.array[1:]) if self.place == "memory" and self.kind == "torch" else array[1:]

    def get(self, value: Any, dtype: Any = None) -> Array:
        """The numbers of an array of the machine's; a narrow ``dtype`` is one to a byte in every library."""
        if hasattr(value, "get"):  # CuPy's, which is also what comes of no argument at all
            found = value.get()
        elif self.place == "memory":
            found = value.numpy()
        else:
            found = to_numpy(value.detach().cpu() if self.kind == "torch" else value)[0]
        if dtype is None or found.dtype == np.dtype(dtype):
            return found
        wanted = np.dtype(dtype)
        return found.view(wanted) if found.dtype == np.uint8 and dtype_named(wanted).is_float else found.astype(wanted)

    def takes(self, dtype: str) -> bool:
        """Whether the library has arrays for inputs of a dtype: f4 has none in torch, short floats none in CuPy."""
        return self.place == "cuda-sim" or (
            dtype != "f4e2m1"
            if self.kind == "torch"
            else not dtype.startswith(("bf", "f8", "f4", "e8", "i2", "i4", "u2", "u4"))
        )

    def takes_all(self, graph: Any) -> bool:
        return all(self.takes(node.dtype.name) for node in graph.inputs)

    def is_own(self, value: Any) -> bool:
        """Whether an array is of the machine's library and lies where its arrays do."""
        if self.place == "memory":
            return type(value) is (gpu_in_memory.ndarray if self.kind == "cupy" else gpu_in_memory.Tensor)
        if self.kind == "torch":
            return type(value).__module__ == "torch" and value.is_cuda is self.on_gpu
        return type(value).__module__.partition(".")[0] == self.kind

    def bits(self, values: Mapping[str, Any]) -> str:
        """A hash of everything in some arrays."""
        digest = hashlib.sha256()
        for name in sorted(values):
            found = self.get(values[name])
            digest.update(f"{name} {found.dtype} {found.shape}".encode() + np.ascontiguousarray(found).tobytes())
        return digest.hexdigest()

    # -- modules -------------------------------------------------------------------------------------------------------

    def compile(self, graph: Any, wrt: Any = (), **options: Any) -> gradc.Module:
        return gradc.compile(graph, wrt=wrt, target=self.target, **options)

    def fails_with(self, module: gradc.Module, error: type[Exception], call: Any, match: str = "") -> Exception:
        """The error that a call gives, there or when the module is waited for."""
        import pytest

        with pytest.raises(error, match=match) as found:
            call()
            module.synchronize()
        return found.value

    def shuffled(self, module: gradc.Module, seed: int) -> None:
        """A simulator runs blocks and warps in an order drawn from the seed; a GPU has one of its own each time."""
        if not self.on_gpu:
            for executable in module.executables.values():
                executable.native.device.seed = seed

    def streams(self) -> list[Any]:
        """The current one (None), and two others where there are any."""
        if self.place == "cuda-sim":
            return [None]
        if self.place == "memory":
            return [None, 5, 7]
        if self.kind == "torch":
            import torch

            return [None, torch.cuda.Stream(), torch.cuda.Stream()]
        import cupy

        return [None, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)]

    def waited(self) -> None:
        """What was asked for is done; the module is not told."""
        if self.place == "memory":
            gpu_in_memory.InMemory.drain()
        elif self.on_gpu and self.kind == "torch":
            import torch

            torch.cuda.synchronize()
        elif self.on_gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()

    @contextlib.contextmanager
    def other_work(self) -> Iterator[Any]:
        """Something that keeps a GPU busy on a stream of its own; called, it asks for more."""
        if not self.on_gpu:
            yield lambda: None
            return
        import torch

        stream, a = torch.cuda.Stream(), torch.randn(1500, 1500, device="cuda")

        def more() -> None:
            with torch.cuda.stream(stream):
                a @ a

        yield more
        torch.cuda.synchronize()


def checked(machine: Machine) -> Any:
    """The simulator's checking mode."""
    return knobs.SIM_CHECK.set(not machine.on_gpu)
