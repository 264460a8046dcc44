"""cuBLASLt's functions by NumPy, which read the descriptors and the addresses that they are given."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gradc.codegen.cuda.actions import Library
from gradc.ir.epilogue import PLAIN, Epilogue
from gradc.ir.types import BF16
from gradc.runtime.cuda import cublas
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.handles import Handles
from gradc.runtime.simulator.device import Simulator

TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: BF16.np}
"""cudaDataType."""
NAMES = {
    4: "BIAS",
    32: "GELU",
    36: "GELU_BIAS",
    160: "GELU_AUX",
    164: "GELU_AUX_BIAS",
    192: "DGELU",
    208: "DGELU_BGRAD",
    256: "BGRADA",
    512: "BGRADB",
}
"""cublasLtEpilogue_t."""


def gelu(x: np.ndarray) -> np.ndarray:
    """By tanh."""
    return x * 0.5 * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))


def gelu_slope(x: np.ndarray) -> np.ndarray:
    """gelu's derivative, by tanh."""
    t = np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.float32(0.7978845608) * (1 + np.float32(0.134145) * x * x)


class Lt:
    """Its functions by NumPy, with descriptors by number.

    :ivar products, heuristics: calls.  :ivar alive: descriptors.  :ivar forms: the epilogue of each product.
    :ivar asked: what each call of the heuristic was for: preferences by number, and the epilogue.
    """

    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}
        self.products = self.heuristics = 0
        self.offers = 1
        self.forms: list[int] = []
        self.asked: list[dict[int | str, int]] = []
        self.numbers = iter(range(1, 10**6))
        for kind, make in {
            "MatmulDesc": lambda compute, scale: {"compute": compute, "scale": scale},
            "MatrixLayout": lambda *shape: shape,
            "MatmulPreference": lambda: {},
        }.items():
            setattr(self, f"cublasLt{kind}Create", lambda at, *given, _make=make: self.create(at, _make(*given)))
            setattr(self, f"cublasLt{kind}SetAttribute", self.set)
            setattr(self, f"cublasLt{kind}Destroy", lambda number: self.alive.pop(number) and 0)

    @staticmethod
    def installed(monkeypatch: pytest.MonkeyPatch) -> Lt:
        """In the place of the library of products with a bias, in the simulator, which has computed them before."""
        lt, simulated = Lt(), Simulator.multiply
        monkeypatch.setattr(cublas, "_lt", lambda: lt)
        monkeypatch.setattr(cublas, "_handles", Handles(lambda device: 77, id))
        cublas._algorithms.clear()

        def multiply(
            self: Simulator, library: Library, a: int, b: int, out: int, workspace: Span, stream: int = 0,
            pointers: int = 0, epilogue: Epilogue[Span] = PLAIN,
        ) -> None:  # fmt: skip
            p = library.product
            there = [
                self.bytes_at(out, p.out.part.nbytes),
                *(self.bytes_at(s.address, s.nbytes) for s in epilogue.writes),
            ]
            before = [each.copy() for each in there]
            simulated(self, library, a, b, out, workspace, stream, pointers, epilogue)
            if epilogue:
                for each, kept in zip(there, before, strict=True):
                    each[:] = kept
                cublas.prepared(0, library, a, b, out, workspace, pointers, epilogue)(stream)

        monkeypatch.setattr(Simulator, "multiply", multiply)
        return lt

    def create(self, at: int, made: Any) -> int:
        number = next(self.numbers)
        self.alive[number] = made
        ctypes.c_void_p.from_address(at).value = number
        return 0

    def set(self, number: int, attribute: int, at: int, size: int) -> int:
        self.alive[number][attribute] = int.from_bytes(ctypes.string_at(at, size), "little")
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self,
        handle: int,
        product: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        most: int,
        found: int,
        count: int,
    ) -> int:
        assert handle == 77 and most == 1 and c == d
        self.heuristics += 1
        self.asked.append(self.alive[preference] | {"epilogue": self.alive[product][7]})
        cublas._Algorithm.from_address(found).algorithm[3] = 5
        ctypes.c_int.from_address(count).value = self.offers
        return 0

    def cublasLtMatmul(
        self, handle: int, product: int, alpha: int, a: int, at_a: int, b: int, at_b: int, beta: int, c: int, at_c: int,
        d: int, at_d: int, algorithm: int, workspace: int, nbytes: int, stream: int,
    ) -> int:  # fmt: skip
        said = self.alive[product]
        assert handle == 77 and (c, at_c) == (d, at_d) and ctypes.c_float.from_address(alpha).value == 1
        assert (said["compute"], said["scale"]) == (68, 0), "f32"
        assert cublas._Algorithm.from_address(algorithm).algorithm[3] == 5
        left, right, out = self.matrix(a, at_a), self.matrix(b, at_b), self.matrix(d, at_d)
        left, right = (x.T if said[op] else x for x, op in ((left, 3), (right, 4)))
        total = left.astype(np.float32) @ right.astype(np.float32)
        if ctypes.c_float.from_address(beta).value:
            total = total + out.astype(np.float32)
        self.forms.append(said[7])
        name = NAMES[said[7]]
        vector = (
            self.vector(said[8], left.shape[0] if name != "BGRADB" else right.shape[1], out.dtype)
            if 8 in said
            else None
        )
        argument = None
        if 11 in said:
            assert said[12] % 8 == 0 and said[12] >= out.shape[0]
            argument = self.strided(said[11], out.dtype, out.shape[0], out.shape[1], said[12])
        if "BIAS" in name:
            total = total + vector.astype(np.float32)[:, None]
        if "AUX" in name:
            argument[...] = total.astype(out.dtype)
        if "DGELU" in name:
            total = total * gelu_slope(argument.astype(np.float32))
        elif "GELU" in name:
            total = gelu(total)
        if "BGRAD" in name:
            assert name == "DGELU_BGRAD" or (not said[3] if name == "BGRADA" else said[4]), "op(A) = N, op(B) = T"
            of = {"BGRADA": left, "BGRADB": right.T}.get(name, total)
            vector[...] = of.astype(np.float32).sum(1).astype(out.dtype)
        out[...] = total.astype(out.dtype)
        self.products += 1
        return 0

    def matrix(self, at: int, layout: int) -> np.ndarray:
        """A matrix of column-major memory."""
        kind, rows, columns, leading = self.alive[layout]
        return self.strided(at, TYPES[kind], rows, columns, leading)

    @staticmethod
    def strided(at: int, dtype: np.dtype, rows: int, columns: int, leading: int) -> np.ndarray:
        assert leading >= rows
        memory = (ctypes.c_ubyte * (((columns - 1) * leading + rows) * dtype.itemsize)).from_address(at)
        flat = np.frombuffer(memory, dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))

    @staticmethod
    def vector(at: int, count: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(at), dtype)
