"""A stand-in of the package ``cudnn`` (nvidia-cudnn-frontend): its graphs of one convolution are computed by torch in
f64, from and to the host memory at the addresses that they are given.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradc.codegen.cuda.actions import Convolution
from gradc.ir.types import BF16
from gradc.runtime.cuda import cudnn
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.handles import Handles
from gradc.runtime.simulator.device import Simulator

DTYPES = {"HALF": np.dtype(np.float16), "BFLOAT16": BF16.np, "FLOAT": np.dtype("f4"), "DOUBLE": np.dtype("f8")}
VERSION = 92800


@dataclass(eq=False)
class Tensor:
    """A tensor's description; setters return it, as the package's do."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: str = ""
    uid: int = 0
    name: str = ""

    def set_output(self, output: bool) -> Tensor:
        assert output
        return self

    def set_data_type(self, given: str) -> Tensor:
        self.data_type = given
        return self

    def set_uid(self, given: int) -> Tensor:
        self.uid = given
        return self

    def set_dim(self, given: list[int]) -> Tensor:
        self.dim = given
        return self

    def set_stride(self, given: list[int]) -> Tensor:
        self.stride = given
        return self

    def at(self, address: int) -> np.ndarray:
        """The array at an address."""
        assert address % cudnn.ALIGNMENT == 0
        dtype = DTYPES[self.data_type]
        count = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address))
        steps = [s * dtype.itemsize for s in self.stride]
        return np.lib.stride_tricks.as_strided(memory.view(dtype), self.dim, steps)


class Graph:
    """A graph of one convolution."""

    def __init__(self, front: FrontEnd, **given: Any):
        self.front, self.given = front, given
        self.refused: list[str] = []

    def tensor(self, **given: Any) -> Tensor:
        return Tensor(**given)

    def conv_fprop(self, image: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return self._is("response", image, weight, Tensor(), how)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **how: Any) -> Tensor:
        return self._is("image", Tensor(), filter, loss, how)

    def conv_wgrad(self, image: Tensor, loss: Tensor, **how: Any) -> Tensor:
        return self._is("filter", image, Tensor(), loss, how)

    def _is(self, computes: str, image: Tensor, filter_: Tensor, response: Tensor, how: dict[str, Any]) -> Tensor:
        self.computes, self.how = computes, how
        self.image, self.filter, self.response = image, filter_, response
        return {"image": image, "filter": filter_, "response": response}[computes]

    def validate(self) -> None:
        """As the package does: the response has the size that the others and the padding give it."""
        how = self.how
        taps = zip(self.image.dim[2:], self.filter.dim[2:], how["pre_padding"], how["post_padding"], how["stride"],
                   how["dilation"], strict=True)  # fmt: skip
        made = [(n + low + high - d * (k - 1) - 1) // s + 1 for n, k, low, high, s, d in taps]
        if made != self.response.dim[2:] or min(*how["pre_padding"], *how["post_padding"]) < 0:
            raise RuntimeError(f"the response is {self.response.dim}, not {made}")
        if len(self.image.dim) < 4:
            raise RuntimeError("four dims at least")

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, heuristics: list[str]) -> None:
        self.front.planned += 1

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.refused = notes

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        self.most = nbytes

    def check_support(self) -> None:
        if self.front.unsupported:
            raise self.front.unsupported

    def build_plans(self) -> None: ...

    def execute(self, addresses: dict[int, int], workspace: int, handle: Any) -> None:
        if self.front.fails:
            raise self.front.fails
        import torch
        from torch.nn import functional as F

        self.front.executed.append((self, handle.stream))
        x, w, y = (t.at(addresses[t.uid]) for t in (self.image, self.filter, self.response))
        spatial, how = x.ndim - 2, self.how
        given = [torch.tensor(_plain(a), requires_grad=True) for a in (x, w)]
        pairs = zip(how["pre_padding"], how["post_padding"], strict=True)
        padded = F.pad(given[0], [n for pair in reversed(list(pairs)) for n in pair])
        groups = x.shape[1] // w.shape[1]
        made = getattr(F, f"conv{spatial}d")(padded, given[1], None, how["stride"], 0, how["dilation"], groups)
        if self.computes == "response":
            y[...] = made.detach().numpy().astype(y.dtype)
            return
        which = 0 if self.computes == "image" else 1
        # the map is linear in what it gives the gradient of, whose memory holds anything
        (slope,) = torch.autograd.grad(made, given[which], torch.tensor(_plain(y)))
        (x, w)[which][...] = slope.numpy().astype(x.dtype)


def _plain(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a.astype(np.float64))


class Names:
    """Every name is itself."""

    def __getattr__(self, name: str) -> str:
        return name


class FrontEnd:
    """The package.

    :ivar planned: how many graphs were.  :ivar handles: that there are.  :ivar executed: each graph with its stream.
    :ivar unsupported, fails: raised where support is checked, or a plan is executed.
    """

    data_type, numerical_note, heur_mode = Names(), Names(), Names()

    class cudnnGraphNotSupportedError(RuntimeError): ...

    def __init__(self) -> None:
        self.planned = 0
        self.handles: list[Any] = []
        self.executed: list[tuple[Graph, int]] = []
        self.unsupported: Exception | None = None
        self.fails: Exception | None = None

    def backend_version(self) -> int:
        return VERSION

    def pygraph(self, **given: Any) -> Graph:
        return Graph(self, **given)

    def create_handle(self) -> Any:
        self.handles.append(SimpleNamespace(stream=0))
        return self.handles[-1]

    def set_stream(self, handle: Any, stream: int) -> None:
        handle.stream = stream

    @staticmethod
    def installed(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
        """In the place of the package, for the simulator's convolutions, too."""
        front = FrontEnd()
        monkeypatch.setattr(cudnn, "library", lambda: front)
        monkeypatch.setattr(cudnn, "_handles", Handles(lambda device: front.create_handle(), front.handles.remove))
        cudnn._plans.clear()

        def convolve(
            self: Simulator, asked: Convolution, first: int, second: int, out: int, workspace: Span, stream: int = 0
        ) -> None:
            if asked.computes != "response":  # finite, whatever was there
                self.bytes_at(out - asked.out.skipped, asked.out.part.nbytes)[:] = 0
            cudnn.prepared(0, asked, first, second, out, workspace)(stream)
            self.has(self.bytes_at(out - asked.out.skipped, asked.out.part.nbytes))

        monkeypatch.setattr(Simulator, "convolve", convolve)
        return front
