"""Runs a compiled Program on the CPU: one C function, bound once per set of sizes."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis.lifetimes import offsets
from ...analysis.product_kernels import kernels_of, product_kernels
from ...codegen.text import CODES, enumerators
from ...errors import IndexOutOfRange, InternalError, NotAscending
from ...ir.dims import evaluate
from ...ir.kernel import Call, Loop, Program, alternatives
from ...ir.node import REGISTRY
from ...process.forks import held_off
from ..recent import Recent
from . import pool
from .arrays import empty
from .toolchain import compile_units, load_library

if TYPE_CHECKING:
    from ...codegen.cpu.kernel import KernelSource
    from ...codegen.cpu.program import Source

Array = np.ndarray[Any, Any]
ALIGN = enumerators("cpu/program.h")["GRADC_ALIGN"]


@dataclass(frozen=True)
class Binding:
    """The memory plan of a call for given sizes.

    :param workspace: bytes of the workspace: temps, then the scratch memory of the kernel that needs most.
    :param local: bytes of thread-local memory per thread: rows cached between passes, packed panels of matrix products.
    :param large: whether an array is written that may exceed the caches.
    """

    dims: Any
    temps: tuple[tuple[int, int], ...]  # (position in the pointer table, byte of the workspace) of each temp there
    lent: tuple[tuple[int, int, int], ...]  # (its position, that of the output it lies in, byte there) of the others
    scratch: int
    workspace: int
    local: int
    large: bool


class CpuProgram:
    """A compiled Program.

    :param payload: the shared object of an earlier compilation, or None to compile now.
    """

    def __init__(
        self,
        program: Program,
        payload: bytes | None = None,
        sites: Mapping[int, tuple[str, str]] | None = None,
        source: Source | None = None,
    ):
        self.program = program
        self._source = source
        if payload is None:
            payload = compile_units(list(self.source.units))
        self.payload = payload
        self.sites = dict(sites) if sites is not None else dict(self.source.sites)
        self.library = load_library(payload, program.name)
        self.entry = ctypes.cast(self.library.gradc_run, ctypes.c_void_p).value
        for size in (self.library.gradc_scratch, self.library.gradc_local_bytes):
            size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self.roots = [b for b in program.buffers if not b.alias]
        self.place = {b.name: i for i, b in enumerate(self.roots)}
        self.constants = {
            b.name: np.asarray(b.value, np.float64 if b.type.dtype.is_float else None).astype(b.type.dtype.np)
            for b in self.roots
            if b.kind == "const"
        }
        self._table = ctypes.c_void_p * max(len(self.roots), 1)
        self._bindings: Recent[tuple[Any, ...], Binding] = Recent(256)
        self._contexts: list[
            pool.Context
        ] = []  # those not in use; several are needed because a signal handler may make a call during a call
        self._call: Any = None

    @property
    def source(self) -> Source:
        if self._source is None:
            with held_off:  # imported lazily: a program from the cache is not rendered
                from ...codegen.cpu.program import render_program
            self._source = render_program(self.program)
        return self._source

    @property
    def kernels(self) -> Mapping[str, KernelSource]:
        """The C of its kernels, by name."""
        return self.source.kernels

    def bind(self, dims: Mapping[str, int], lenders: frozenset[str] = frozenset()) -> Binding:
        """The memory plan for these dims; cached.

        :param lenders: see :func:`gradc.analysis.lifetimes.offsets`.
        """
        sizes = [dims[name] for name in self.program.dims]
        key = (lenders, *sizes)
        binding = self._bindings.get(key)
        if binding is None:
            pool.require(product_kernels(self.program))
            values = (ctypes.c_int64 * max(len(sizes), 1))(*sizes)
            places, total = offsets(self.program, dims, ALIGN, lenders)
            temps = tuple((self.place[name], at) for name, (output, at) in places.items() if not output)
            lent = tuple((self.place[name], self.place[output], at) for name, (output, at) in places.items() if output)
            scratch = int(self.library.gradc_scratch(values))
            largest = max(
                (evaluate(b.type.nbytes, dims) for b in self.roots if b.kind in ("output", "temp")), default=0
            )
            local = int(self.library.gradc_local_bytes(values)) + self._packed(dims)
            binding = Binding(values, temps, lent, total, total + scratch, local, largest >= pool.least_streamed())
            self._bindings[key] = binding
        return binding

    def _packed(self, dims: Mapping[str, int]) -> int:
        """The bytes that each thread keeps for matrix products."""
        most = 0
        for step in self.program.steps:
            bound = step.largest(dims) if isinstance(step, Loop) else dims
            for item in alternatives(step):
                if isinstance(item, Call) and REGISTRY[item.op].multiplies:
                    sizes, out = dict(item.axes), item.result_axes
                    (summed,) = set(item.views[0]) - set(out)
                    m, n, k = (evaluate(sizes[a], bound) for a in (*out[-2:], summed))
                    if item.parts:  # the columns of the whole batch
                        n *= math.prod(evaluate(sizes[a], bound) for a in item.result_axes[:-2])
                    most = max(most, pool.pack_bytes(kernels_of(item, self.program), m, n, k))
        return most

    def run(
        self, arrays: Mapping[str, Array], binding: Binding, workspace: Array | None = None, only: int = -1
    ) -> None:
        """Runs all steps, or the step ``only``, on contiguous arrays by buffer name; outputs are written in place.

        :raises IndexOutOfRange: a data-dependent index is out of range; nothing that depends on it was written.
        """
        if workspace is None:
            workspace = empty((binding.workspace,), np.uint8, brief=True) if binding.workspace else None
        base = workspace.ctypes.data if workspace is not None else 0
        table = self._table()
        place = self.place
        for name, array in arrays.items():
            table[place[name]] = array.ctypes.data
        for name, array in self.constants.items():
            table[place[name]] = array.ctypes.data
        for at, offset in binding.temps:
            table[at] = base + offset
        for at, output, offset in binding.lent:
            table[at] = (table[output] or 0) + offset
        try:
            context = self._contexts.pop()
        except IndexError:
            context = pool.new_context()
            self._call = pool.call_entry()
        if binding.large and context.stream_from == pool.NEVER:
            context.stream_from = pool.stream_from()
        code = self._call(self.entry, context.pointer, table, binding.dims, base + binding.scratch, only)
        error = self.failure(context) if code or context.code else None
        self._contexts.append(context)
        if error is not None:
            raise error

    def failure(self, context: pool.Context) -> Exception:
        """The error that a call reported."""
        code, site, position, value, bound = context.error
        if code == CODES["GRADC_INDEX_OUT_OF_RANGE"]:
            op, source = self.sites.get(site, ("index", "?"))
            return IndexOutOfRange(op, source, position, value, bound)
        if code == CODES["GRADC_DECREASES"]:
            op, source = self.sites.get(site, ("index", "?"))
            return NotAscending(op, source, position, value, bound)
        if code == CODES["GRADC_OUTSIDE"]:
            step = self.program.steps[site]
            return InternalError(f"{self.program.name}: {step.name} touches element {value} of an array of {bound}")
        return context.failure(self.program.name)

    def sites_json(self) -> str:
        return json.dumps({str(k): list(v) for k, v in self.sites.items()})
