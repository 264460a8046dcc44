"""The CUDA simulator: CUDA source is compiled as C++ with ``templates/cuda/sim.h``, and run on the CPU by ``sim.cpp``
with a fiber per thread.

It tests kernels on machines without a GPU.  With ``check=True``, the checking mode, the compiler's sanitizers call
hooks of the simulator before every load, store and suspicious operation, and the first fault aborts the launch with a
:class:`~gradc.errors.SimulationFault`.  Compiled code is stored in the cache of the CPU target.

Kernels are found by ``extern "C" __global__ void NAME(``; their parameters, any scalars, pointers and plain structs,
are deduced from the function's type by a C++ template instead of being parsed.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import knobs
from ...codegen.cuda.cached_text import anonymous
from ...codegen.text import read_template, standalone, widened
from ...errors import InvalidProblem, OutOfMemory, SimulationFault
from ...process.forks import lock
from ...process.ieee import plain
from ..cache import Cache, default_cache, digest
from ..host.elf import variables
from ..host.toolchain import compile_object, find_compiler, headers, kept_code, link_objects, load_library, made_by
from . import faults

Array = np.ndarray[Any, Any]

# DWARF 4: addr2line of 2022 takes the first file of a table of DWARF 5 for the unit's own.  -g1: it is asked for lines
# alone, and where variables are stored takes a fifth of the compilation to find out.
_PLAIN = (
    "-gdwarf-4",
    "-g1",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-optimize-sibling-calls",
    "-w",
)
_CHECK = (
    *_PLAIN,
    "-DGRADC_SIM_CHECK",
    "-O0",  # compile time dominates run time
    "-fsanitize=thread,alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero",
    "-fno-wrapv",  # otherwise integer overflow is not reported
    "-fno-tree-vectorize",  # keeps the accesses of the source
    "-fno-tree-slp-vectorize",
)
# Reports a read that is followed by a write of the same address, too.
_CHECK_CLANG = ("-mllvm", "-tsan-instrument-read-before-write=1")
# zig only passes on all checks together, and omits the one for misalignment.
_CHECK_ZIG = ("-fsanitize=undefined", "-fno-sanitize=float-cast-overflow", "-fsanitize=thread")
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\(([^)]*)\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\(([^)]*)\)\s*)?(\w+)\s*\("
)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w\s:]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_GAP_NAME = "gradc_sim_gap_"  # the prefix in sim.h of the padding between variables
_GAP = 1 << 20  # bytes between the copies of two arrays, never touched and therefore not mapped
_SLICE = 100  # milliseconds between checks for Ctrl-C
# In an anonymous namespace, whose names hide those of the C headers.
_BEGIN, _END = f'#include "sim.h"\nnamespace {{\n#line 1 "{faults.FILE}"\n', "\n}\n"
_stacks: list[tuple[int | None, int]] = []
"""Memory for the stacks of a launch's threads, and how many of them have guard pages: of launches that are over.
What a launch of 1024 threads maps and touches anew takes it some milliseconds.
"""
MAX_SHARED = 227 * 1024
MAX_BLOCKS_CHECKED = 1 << 20


def compile_sim(source: str, *, check: bool = False) -> SimLibrary:
    """Compiles CUDA source, the same that NVRTC compiles, for :meth:`SimLibrary.launch`.

    :param source: kernels are its ``extern "C" __global__`` functions; headers of ``templates/cuda`` may be included.
    :param check: compile for the checking mode, which is about three times slower.
    :raises CompilerMissing, CompilerError: as for C; line numbers are those of ``source``.
    :raises InvalidProblem: it has no kernel.
    """
    bare = _COMMENT.sub(" ", source)
    kernels = {name: _bound(first or second) for first, second, name in _KERNEL.findall(bare)}
    if not kernels:
        raise InvalidProblem('no kernel: the text has no extern "C" __global__ void NAME(...)')
    compiler = find_compiler()
    flags: tuple[str, ...] = (
        _PLAIN if not check else (*_CHECK, *_CHECK_CLANG) if "clang" in compiler.version else _CHECK
    )
    if check and "ziglang" in compiler.argv:
        flags += _CHECK_ZIG
    text = _DYNAMIC.sub(r"\1 *const \2 = (\1 *)gradc_sim_dynamic();", _included(source, "tensor_cores.h"))
    entries = "".join(f"GRADC_SIM_KERNEL({name})\n" for name in kernels)
    unit = f'{_BEGIN}{text}{_END}#line 1 "entries"\n{entries}'
    stamp = digest(made_by(compiler), *headers("c++"))
    key = digest("cuda-sim", anonymous(unit), stamp, knobs.OPTIMIZE.get(), *flags)
    cache = kept_code(compiler) or default_cache()
    payload = cache.get(key)
    if payload is None:
        math = standalone("cuda/math.h")
        begin = next((each for each in (math, widened(math)) if text.startswith(each)), "")
        header = f"{_BEGIN}{begin}{_END}" if begin else ""
        payload = link_objects([compile_object(unit, extra=flags, header=header), _runtime(stamp, cache)])
        cache.put(key, payload)
    return SimLibrary(payload, kernels, source, check)


def _included(source: str, name: str) -> str:
    """A text that has a header of ours in it, with an include and as many lines: a fault in the header is said to be
    where it is called.
    """
    header = standalone(f"cuda/{name}")
    return source.replace(header, f'#include "{name}"' + "\n" * header.count("\n"))


def _bound(text: str) -> int:
    """The first argument of __launch_bounds__, or the maximum block size."""
    found = re.match(r"\s*(\d+)", text)
    return int(found[1]) if found else 1024


def _runtime(stamp: str, cache: Cache) -> bytes:
    flags = (*_PLAIN, "-O2")
    key = digest("cuda-sim runtime", stamp, *flags)
    payload = cache.get(key)
    if payload is None:
        payload = compile_object(read_template("cuda/sim.cpp"), extra=flags)
        cache.put(key, payload)
    return payload


@dataclass(frozen=True)
class SharedTransactions:
    """What a launch's accesses to shared memory take, as far as the simulator's compiler keeps those of the source; an
    access of 32 lanes to 32 banks of 4 bytes is one, an 8 x 8 matrix of ``ldmatrix`` is one.

    :param count: with conflicts of banks.  :param least: without.
    """

    count: int
    least: int


class SimLibrary:
    """Compiled kernels, created by :func:`compile_sim`.  Launches are serialised."""

    def __init__(self, payload: bytes, kernels: Mapping[str, int], source: str, check: bool):
        self.payload, self.source, self.check = payload, source, check
        self.kernels = tuple(kernels)
        self._bounds = dict(kernels)
        self._library = load_library(payload, "cuda-sim")
        self._run = self._library.gradc_sim_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.gradc_sim_end.argtypes = [ctypes.c_void_p]
        self._library.gradc_sim_base.restype = ctypes.c_size_t
        # Outside the section, only static variables inside functions count: C++ mangles them with the prefix _ZZ.
        self._shared = [
            v
            for v in variables(payload)
            if v.writable and _GAP_NAME not in v.symbol and (v.section == "gradc_shared" or v.symbol.startswith("_ZZ"))
        ]
        self._lock = lock()

    def signature(self, kernel: str) -> list[tuple[str, int]]:
        """(kind, size in bytes) of each parameter; P: pointer, C: pointer to const, i: signed, u: unsigned, f: float,
        s: other.

        :raises InvalidProblem: there is no such kernel.
        """
        if kernel not in self._bounds:
            raise InvalidProblem(f"no kernel {kernel!r}; there are {', '.join(self.kernels)}")
        ask = getattr(self._library, f"gradc_signature_{kernel}")
        ask.restype = ctypes.c_char_p
        codes, _, sizes = ask().partition(b"/")
        return [(chr(code), size - ord("0")) for code, size in zip(codes, sizes, strict=True)]

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: Sequence[Any],
        *,
        written: Collection[int],
        initialised: Mapping[int, bool | Array] | None = None,
        seed: int | None = None,
        count: bool = False,
        batch: int = 0,
    ) -> SharedTransactions:
        """Runs a kernel; arrays are updated in place after the last block.

        :param shared: bytes of dynamic shared memory.
        :param args: for each parameter a contiguous NumPy array or None (a pointer), a number, or a ctypes structure.
        :param written: positions of the arrays that the kernel may write; in checking mode the others are read-only.
        :param initialised: whether an array is initialised: True, False, or uint8[nbytes] with a flag per byte, which
            the launch updates.  By default, arrays are initialised unless they are in ``written``.
        :param seed: run blocks and warps in a random order drawn from it instead of ascending.
        :param batch: how many of the arguments, arrays and integers of 64 bits, are together the first parameter.
        :param count: whether to count transactions of shared memory, in checking mode; this keeps 300 bytes of each
            access of a warp until it synchronises.
        :return: these transactions; none where they are not counted.
        :raises SimulationFault: a fault; no array was changed.  Without ``check`` only barriers and collectives are
            checked, and arrays may be changed.
        :raises InvalidProblem: a GPU would reject the launch, or the arguments do not fit the parameters.
        """
        signature = self.signature(kernel)
        if batch:
            words = [("P", 8) if isinstance(value, np.ndarray) else ("i", 8) for value in args[:batch]]
            signature = [*words, *signature[1:]]
        self._check_shape(kernel, grid, block, shared)
        if len(args) != len(signature):
            raise InvalidProblem(f"{kernel} takes {len(signature)} arguments, not {len(args)}")
        arrays: dict[int, Array] = {}
        values: list[Any] = []
        for i, (value, (code, size)) in enumerate(zip(args, signature, strict=True)):
            values.append(_value(f"{kernel}: argument {i}", value, code, size))
            if isinstance(value, np.ndarray) and code in "PC":
                arrays[i] = value
                values[i].value = value.ctypes.data
        for i in written:
            if i not in arrays or signature[i][0] == "C" or not arrays[i].flags.writeable:
                raise InvalidProblem(
                    f"{kernel}: argument {i} is to be written but is no array, constant for the kernel, or read-only"
                )
        with self._lock, plain():
            memory = _Memory(arrays, frozenset(written), initialised or {}) if self.check else None
            for i in arrays if memory is not None else ():
                values[i].value = memory.address(i) if memory is not None else None
            if batch:
                values[:batch] = [ctypes.create_string_buffer(b"".join(map(bytes, values[:batch])), 8 * batch)]
            done = self._launch(kernel, grid, block, shared, values, memory, seed, count and self.check)
            if done.found.kind:
                raise self._error(done.found, kernel, grid, block, memory)
            if memory is not None:
                memory.give_back()
            return SharedTransactions(done.transactions, done.least)

    def _error(
        self,
        found: faults.Fault,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        memory: _Memory | None,
    ) -> OutOfMemory | SimulationFault:
        """What a launch raises for the fault that it found."""
        if found.kind == faults.NO_MEMORY:
            return OutOfMemory(f"{kernel}: no memory for the simulation of a block of {block}")
        base = self._library.gradc_sim_base()
        names = ["dynamic shared memory", *(f"__shared__ {_plain_name(v.symbol)}" for v in self._shared)]
        named = memory.name if memory is not None else faults.unnamed
        shape = faults.Shape(kernel, grid, block, self.source, names, named)
        return SimulationFault(*faults.describe(found, shape, lambda pc: self._frames(pc - base)))

    def _check_shape(self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> None:
        threads, blocks = block[0] * block[1] * block[2], grid[0] * grid[1] * grid[2]
        if min(block) < 1 or block[2] > 64 or threads > min(1024, self._bounds[kernel]):
            raise InvalidProblem(
                f"{kernel}: a block of {block}, {threads} threads; at most {min(1024, self._bounds[kernel])}, 64"
                " along z"
            )
        if min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise InvalidProblem(f"{kernel}: a grid of {grid}; 1 to 2^31-1 blocks along x, to 65535 along y and z")
        if not 0 <= shared <= MAX_SHARED:
            raise InvalidProblem(f"{kernel}: {shared} bytes of dynamic shared memory; at most {MAX_SHARED}")
        if self.check and blocks >= MAX_BLOCKS_CHECKED:
            raise InvalidProblem(f"{kernel}: {blocks} blocks; the checking mode tells {MAX_BLOCKS_CHECKED - 1} apart")

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        values: Sequence[Any],
        memory: _Memory | None,
        seed: int | None,
        count: bool,
    ) -> faults.Launch:
        parameters = max(len(values), 1)
        base = self._library.gradc_sim_base()
        extents = [(0, shared), *((base + v.address, v.size) for v in self._shared)]
        ready = np.empty(sum(size for _, size in extents) + 1, np.uint8)
        starts = np.cumsum([0, *(size for _, size in extents)]) + ready.ctypes.data
        shared_memory = (faults.Region * len(extents))(
            *(
                faults.Region(start, size, 1, 1, int(at) if self.check else None)
                for (start, size), at in zip(extents, starts, strict=False)
            )
        )
        launch = faults.Launch(
            call=ctypes.cast(getattr(self._library, f"gradc_call_{kernel}"), ctypes.c_void_p),
            arguments=ctypes.cast((ctypes.c_void_p * parameters)(*map(ctypes.addressof, values)), ctypes.c_void_p),
            grid=grid,
            block=block,
            shared=shared,
            parameters=len(values),
            parameter_sizes=ctypes.cast((ctypes.c_int64 * parameters)(*map(ctypes.sizeof, values)), ctypes.c_void_p),
            check=self.check,
            shuffle=seed is not None,
            seed=(seed or 0) % 2**64,
            regions=ctypes.cast(memory.regions, ctypes.c_void_p) if memory is not None else None,
            region_count=len(memory.groups) if memory is not None else 0,
            variables=ctypes.cast(shared_memory, ctypes.c_void_p),
            variable_count=len(extents),
            counts=count,
        )
        with contextlib.suppress(IndexError):
            launch.stacks, launch.guarded = _stacks.pop()
        try:
            while self._run(ctypes.byref(launch), _SLICE) == 0:
                pass
        finally:
            self._library.gradc_sim_end(ctypes.byref(launch))
            _stacks.append((launch.stacks, launch.guarded))
        return launch

    def _frames(self, offset: int) -> list[str]:
        """``file:line`` of an offset in the library, innermost inlined function first; empty without addr2line."""
        program = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if program is None:
            return []
        with tempfile.NamedTemporaryFile(prefix="gradc-", suffix=".so") as file:
            file.write(self.payload)
            file.flush()
            try:
                done = subprocess.run(
                    [program, "-i", "-e", file.name, hex(offset - 1)], capture_output=True, text=True, timeout=20
                )
            except (OSError, subprocess.TimeoutExpired):
                return []
        lines = (line.split(" (")[0] for line in done.stdout.splitlines())
        return [f"{Path(path).name}:{number}" for path, _, number in (line.rpartition(":") for line in lines)]


def _plain_name(symbol: str) -> str:
    """The plain name of a symbol: ``tile`` for _ZZN4twiceIfEET_S0_E4tile and for tile.0."""
    found = re.search(r"E(\d+)([A-Za-z_]\w*)$", symbol)
    return found[2][: int(found[1])] if found else symbol.partition(".")[0]


def _value(what: str, value: Any, code: str, size: int) -> Any:
    """An argument as a ctypes object of the parameter's size; pointers are null at first."""
    if code in "PC":
        if value is not None and not (isinstance(value, np.ndarray) and value.flags.c_contiguous):
            raise InvalidProblem(f"{what} is a pointer: a contiguous array or None, not {type(value).__name__}")
        return ctypes.c_void_p()
    if code == "s":
        if not isinstance(value, ctypes.Structure | ctypes.Union | ctypes.Array) or ctypes.sizeof(value) != size:
            raise InvalidProblem(f"{what} is a structure of {size} bytes, not {type(value).__name__}")
        return value
    number = getattr(value, "value", value)  # a ctypes number has .value
    if isinstance(number, np.generic):
        number = number.item()
    if code == "f" and isinstance(number, int | float):
        return (ctypes.c_float if size == 4 else ctypes.c_double)(number)
    if code in "iu" and isinstance(number, int):
        low, high = (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1)) if code == "i" else (0, 2 ** (8 * size))
        if not low <= number < high:
            raise InvalidProblem(f"{what}: {number} is outside [{low}, {high})")
        return (ctypes.c_ubyte * size).from_buffer_copy(int(number).to_bytes(size, "little", signed=code == "i"))
    raise InvalidProblem(
        f"{what} is a {8 * size}-bit {'float' if code == 'f' else 'integer'}, not {type(value).__name__}"
    )


class _Memory:
    """The simulated device memory of one launch: copies of the arrays, with gaps between them; overlapping arrays share
    one copy.

    Copies have the same address modulo 256 as the arrays, so that they are not better aligned.
    """

    def __init__(self, arrays: Mapping[int, Array], written: frozenset[int], initialised: Mapping[int, bool | Array]):
        self.arrays, self.written, self.initialised = arrays, written, initialised
        self.groups: list[tuple[int, int, list[int]]] = []  # (first address, one past the last, arguments)
        for i in sorted(arrays, key=lambda i: arrays[i].ctypes.data):
            start, end = arrays[i].ctypes.data, arrays[i].ctypes.data + arrays[i].nbytes
            if self.groups and start < self.groups[-1][1]:
                first, last, members = self.groups[-1]
                self.groups[-1] = (first, max(last, end), [*members, i])
            else:
                self.groups.append((start, end, [i]))
        total = sum(end - start + 2 * _GAP for start, end, _ in self.groups) + _GAP
        self.bytes = np.empty(total, np.uint8)
        self.starts: list[int] = []  # of the groups' copies, in bytes
        self.ready = [np.zeros(max(end - start, 1), np.uint8) for start, end, _ in self.groups]
        self.regions = (faults.Region * max(len(self.groups), 1))()
        base, at = self.bytes.ctypes.data, _GAP
        for region, ready, (start, end, members) in zip(self.regions, self.ready, self.groups, strict=False):
            at += (start - base - at) % 256
            self.starts.append(at)
            for i in members:
                self._copy(i)[:] = _bytes(arrays[i])
                mask = initialised.get(i, i not in written)
                here = ready[arrays[i].ctypes.data - start :][: arrays[i].nbytes]
                here |= np.uint8(mask) if isinstance(mask, bool) else mask.reshape(-1)
            region.start, region.size = base + at, end - start
            region.granule = min(8, *(arrays[i].itemsize & -arrays[i].itemsize for i in members)) if members else 1
            region.writable = any(i in written for i in members)
            region.ready = None if ready.all() else ready.ctypes.data
            at += end - start + _GAP

    def _group(self, i: int) -> int:
        return next(g for g, (_, _, members) in enumerate(self.groups) if i in members)

    def _copy(self, i: int) -> Array:
        g = self._group(i)
        start = self.starts[g] + self.arrays[i].ctypes.data - self.groups[g][0]
        return self.bytes[start : start + self.arrays[i].nbytes]

    def address(self, i: int) -> int:
        return (
            int(self._copy(i).ctypes.data)
            if self.arrays[i].nbytes
            else self.bytes.ctypes.data + self.starts[self._group(i)]
        )

    def give_back(self) -> None:
        """Copies written arrays, and the flags of initialised bytes, back to the caller's."""
        for i in self.written:
            _bytes(self.arrays[i])[:] = self._copy(i)
            mask = self.initialised.get(i, False)
            if isinstance(mask, np.ndarray):
                g = self._group(i)
                mask.reshape(-1)[:] = self.ready[g][self.arrays[i].ctypes.data - self.groups[g][0] :][
                    : self.arrays[i].nbytes
                ]

    def name(self, group: int, offset: int) -> tuple[str, int, int]:
        """(description of the argument, item size, byte offset in the argument) of an offset in a region."""
        start, _, members = self.groups[group]
        nearest = min(members, key=lambda i: _distance(start + offset, self.arrays[i]))
        array = self.arrays[nearest]
        shape = ",".join(map(str, array.shape))
        return f"argument {nearest} ({array.dtype}[{shape}])", array.itemsize, start + offset - array.ctypes.data


def _distance(address: int, array: Array) -> int:
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    return start - address if address < start else max(0, address - end + 1)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
