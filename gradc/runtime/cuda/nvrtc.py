"""Compiles CUDA source to a cubin by NVRTC, called through ctypes, without a GPU, driver or CUDA toolkit; parses its
log and caches its results.

NVRTC is a library: a compilation runs in a thread that can be asked to stop, not in a process that can be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradc import knobs
from gradc.codegen.cuda.cached_text import anonymous
from gradc.errors import CompilerError, CompilerMissing, GradcError, InvalidProblem, RegistersSpilled
from gradc.formats.json_text import read_json
from gradc.process.forks import lock
from gradc.process.version import VERSION
from gradc.runtime.cache import default_cache, digest, object_cache
from gradc.runtime.host.toolchain import LOG_LIMIT, TIMEOUT

OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    # Contraction would change bits; the other three are NVRTC's defaults, which conform to IEEE 754.
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
# Options that print the resources of each kernel to the log.
_PTXAS = ("--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
# There is no --split-compile: with more threads than one, NVRTC 12.9 gives one of two codes for a source by chance.
# The first and the last NVRTC version that compile for an architecture.
_SINCE = {
    89: (11, 8),
    90: (11, 8),
    100: (12, 8),
    101: (12, 8),
    120: (12, 8),
    103: (12, 9),
    121: (12, 9),
    88: (13, 0),
    110: (13, 0),
}
_LAST_MAJOR = {50: 12, 52: 12, 53: 12, 60: 12, 61: 12, 62: 12, 70: 12, 72: 12, 101: 12}
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (ctypes.c_void_p, ctypes.c_void_p),
    "nvrtcGetNumSupportedArchs": (ctypes.c_void_p,),
    "nvrtcGetSupportedArchs": (ctypes.c_void_p,),
    "nvrtcCreateProgram": (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ),
    "nvrtcCompileProgram": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    "nvrtcDestroyProgram": (ctypes.c_void_p,),
    **{f"nvrtcGet{what}Size": (ctypes.c_void_p, ctypes.c_void_p) for what in ("PTX", "CUBIN", "ProgramLog")},
    **{f"nvrtcGet{what}": (ctypes.c_void_p, ctypes.c_void_p) for what in ("PTX", "CUBIN", "ProgramLog")},
}
_CANCELLED = 16


# -- the library -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvrtc:
    """A working NVRTC.

    :param path: its file.  :param version: major and minor.  :param architectures: supported ones: 90 is sm_90.
    :param identity: for cache keys: its version and contents, wherever it is installed, so that a cache can be carried
        to another machine.
    """

    path: str
    version: tuple[int, int]
    architectures: tuple[int, ...]
    identity: str

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def lacks(self, arch: str) -> str:
        """The reason why it does not compile for this architecture, or ""."""
        number, variant = _parse_arch(arch)
        known = ", ".join(f"sm_{n}" for n in self.architectures)
        if number not in self.architectures:
            since, last = _SINCE.get(number), _LAST_MAJOR.get(number)
            hint = ""
            if since is not None and since > self.version:
                hint = f"; sm_{number} needs NVRTC {since[0]}.{since[1]} or later"
            elif last is not None and last < self.version[0]:
                hint = f"; the last for sm_{number} are those of CUDA {last}"
            return f"{self} compiles for {known}, not for sm_{number}{hint}"
        if variant == "f" and self.version < (12, 9):
            return f"{self} does not compile for families; {arch} needs NVRTC 12.9 or later"
        return ""


def find_nvrtc(arch: str = "") -> Nvrtc:
    """``$GRADC_NVRTC`` if it is set, else the first working one of NVIDIA's wheels, CUDA_HOME, CUDA_PATH and the
    system's loader.

    CUDA 12 is preferred to 13, because drivers load the code of older compilers.

    :param arch: skip those that do not compile for it.
    :raises CompilerMissing: there is none, none for ``arch``, or ``$GRADC_NVRTC`` does not exist.
    :raises CompilerError: ``$GRADC_NVRTC`` is no NVRTC.
    :raises InvalidProblem: ``arch`` is malformed.
    """
    return _find(knobs.NVRTC.get(), (knobs.CUDA_HOME.get(), knobs.CUDA_PATH.get()), arch)


@functools.lru_cache(maxsize=32)
def _find(wanted: str, homes: tuple[str, ...], arch: str) -> Nvrtc:
    if wanted:  # no fallback if it was set explicitly
        if not os.path.isfile(wanted):
            raise CompilerMissing(f"GRADC_NVRTC={wanted!r} names no file; set it to a libnvrtc.so or unset it")
        nvrtc = _ask(os.path.realpath(wanted))
        if arch and (lack := nvrtc.lacks(arch)):
            raise CompilerMissing(f"no NVRTC for {arch}: {lack}; it is the one that GRADC_NVRTC names")
        return nvrtc
    passed: list[str] = []
    for name in _candidates(homes):
        try:
            path = os.path.realpath(name if os.path.isabs(name) else _loaded_path(name))
            nvrtc = _ask(path)
        except (OSError, AttributeError):
            continue  # the loader does not find it
        except GradcError as error:
            passed.append(str(error))
            continue
        lack = nvrtc.lacks(arch) if arch else ""
        if not lack:
            return nvrtc
        passed.append(lack)
    if not passed:
        raise CompilerMissing(
            "no NVRTC: GRADC_NVRTC is not set, neither the wheel nvidia-cuda-nvrtc-cu12 nor nvidia-cuda-nvrtc is"
            " installed, CUDA_HOME and CUDA_PATH name no toolkit that has it, and the loader knows no libnvrtc.so.12 or"
            " .13; `pip install gradc[nvrtc]` brings one"
        )
    fit = f"for {arch}" if arch else "that works"
    raise CompilerMissing(
        f"no NVRTC {fit}: {'; '.join(dict.fromkeys(passed))}; `pip install nvidia-cuda-nvrtc-cu12` brings the last of"
        " CUDA 12, `pip install nvidia-cuda-nvrtc` that of CUDA 13"
    )


def _candidates(homes: Sequence[str]) -> Iterator[str]:
    """Files and, last, library names for the loader, in the order in which they are tried."""
    namespace, places = importlib.util.find_spec("nvidia"), []  # a namespace package: nothing is imported
    for root in (namespace.submodule_search_locations if namespace is not None else None) or ():
        places.append([os.path.join(glob.escape(root), folder, "lib") for folder in ("cuda_nvrtc", "cu[0-9]*")])
    for home in filter(None, homes):
        places.append(
            [
                os.path.join(glob.escape(os.path.abspath(home)), *folder)
                for folder in (("lib64",), ("lib",), ("targets", "*", "lib"))
            ]
        )
    for folders in places:
        files = {file for folder in folders for file in glob.glob(os.path.join(folder, "libnvrtc.so.[0-9]*"))}
        major = lambda file: int(re.match(r"\d+", file.rpartition(".so.")[2])[0])  # type: ignore[index]
        yield from sorted(files, key=lambda file: (major(file), file))
    yield from ("libnvrtc.so.12", "libnvrtc.so.13")


def _loaded_path(name: str) -> str:
    """The file that the loader uses for a library name; OSError if there is none."""
    place = (ctypes.c_char_p * 4)()  # struct Dl_info: four pointers, the first to the file's name
    address = ctypes.cast(ctypes.CDLL(name).nvrtcVersion, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, place) or not place[0]:
        raise OSError(f"{name} is loaded from nowhere")
    return os.fsdecode(place[0])


@functools.lru_cache(maxsize=16)
def _ask(path: str) -> Nvrtc:
    """Queries version and architectures of the library; cached on disk until its files change, because loading it takes
    10 ms.
    """
    builtins = _beside(path, "libnvrtc-builtins.so.*")
    stamps = [f"{file} {about.st_size} {about.st_mtime_ns}" for file in (path, *builtins) for about in (os.stat(file),)]
    key = digest("nvrtc", *stamps)
    cache = default_cache()
    known = (cache.get(key) or b"").split()
    if known and all(word.isdigit() for word in known):
        version, *architectures = map(int, known)
    else:
        library = _library(path)
        major, minor, count = (ctypes.c_int() for _ in range(3))
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) or library.nvrtcGetNumSupportedArchs(
            ctypes.byref(count)
        ):
            raise CompilerError(f"{path} does not say its version: not an NVRTC that works")
        numbers = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(numbers)
        version, architectures = major.value * 1000 + minor.value, sorted(numbers)
        cache.put(key, " ".join(map(str, (version, *architectures))).encode())
    nvrtc = Nvrtc(path, divmod(version, 1000), tuple(architectures), _identity((path, *builtins), version))
    wanted = "libnvrtc-builtins.so.{}.{}".format(*nvrtc.version)
    if not any(re.fullmatch(rf"{re.escape(wanted)}(\.\d+)*", os.path.basename(file)) for file in builtins):
        raise CompilerError(f"{nvrtc} has no {wanted} beside it, without which it compiles nothing")
    return nvrtc


def _identity(files: Sequence[str], version: int) -> str:
    """A digest of the version, the files' sizes and their beginnings, where ELF keeps a build's identity."""
    seen = []
    for name in files:
        with open(name, "rb") as file:
            seen.append(f"{os.fstat(file.fileno()).st_size} {file.read(1 << 14).hex()}")
    return digest("nvrtc", str(version), *seen)


def _beside(path: str, pattern: str) -> list[str]:
    """The files in the same folder."""
    return sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(path)), pattern)))


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    """The loaded library with its functions' argument types set.

    Its builtins are loaded with it: those of CUDA 13's wheels lie where the loader does not look, but a library that is
    loaded already is found by its name.
    """
    try:
        library = ctypes.CDLL(path)
        for builtins in _beside(path, "libnvrtc-builtins.so.*"):
            with contextlib.suppress(OSError):  # of another version, perhaps; a compilation names what it lacks
                ctypes.CDLL(builtins)
        for name, types in _FUNCTIONS.items():
            getattr(library, name).argtypes = types
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{path} is not an NVRTC that works: {error}") from error
    if hasattr(library, "nvrtcSetFlowCallback"):
        library.nvrtcSetFlowCallback.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library


# -- compiling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel, in bytes except for registers and barriers.

    :param registers: per thread.
    :param spill_stores: bytes of register spills stored to local memory, including those of called device functions.
    :param spill_loads: bytes of register spills loaded.
    :param shared: static shared memory per block.
    :param stack: local memory per thread.
    :param constant: constant memory; 0 if NVRTC does not report it (sm_90 and later).  :param barriers: per block.
    """

    name: str
    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0
    stack: int = 0
    constant: int = 0
    barriers: int = 0


@dataclass(frozen=True)
class CudaBinary:
    """Compiled CUDA source.

    :param arch: the architecture it was compiled for.
    :param cubin: the binary, b"" if not requested.
    :param ptx: the PTX assembly, "" if not requested.
    :param log: NVRTC's output.  :param kernels: the resources of each kernel by name; empty without a cubin.
    """

    arch: str
    cubin: bytes
    ptx: str
    log: str
    kernels: dict[str, KernelResources]


def compile_cuda(
    source: str,
    *,
    arch: str,
    emit: Sequence[Literal["cubin", "ptx"]] = ("cubin", "ptx"),
    spills: Literal["allow", "error"] = "allow",
    max_registers: int = 0,
    line_info: bool = False,
    timeout: float = TIMEOUT,
) -> CudaBinary:
    """Compiles CUDA source without includes, or takes the result from the cache.

    :param arch: ``sm_90``, ``sm_90a``, ``sm_100f``.
    :param emit: the requested outputs; without ``"cubin"`` the assembler is not run and resources are not known.
    :param spills: ``"error"`` rejects kernels that spill registers.
    :param max_registers: limit per thread for kernels without ``__launch_bounds__``; 0: no limit.
    :param line_info: include line numbers in the binary, for profilers.
    :param timeout: in seconds; NVRTC can be stopped from version 12.8 on.

    :raises CompilerMissing: there is no NVRTC, or none for ``arch``; the message says how to install one.
    :raises CompilerError: it rejected the source or timed out; ``.source`` is the source with line numbers, ``.log``
        NVRTC's output.
    :raises RegistersSpilled: see ``spills``; names kernels and bytes.
    :raises InvalidProblem: ``arch`` or an option is malformed.
    """
    unknown = [repr(e) for e in emit if e not in ("cubin", "ptx")]
    if unknown or not emit or spills not in ("allow", "error") or not 0 <= max_registers <= 255:
        raise InvalidProblem(
            f"emit={tuple(emit)!r}, spills={spills!r}, max_registers={max_registers}: emit names 'cubin', 'ptx' or"
            " both, spills is 'allow' or 'error', max_registers lies in [0, 255]"
        )
    _parse_arch(arch)
    nvrtc = find_nvrtc(arch)
    _check_source(source)
    native = "cubin" in emit
    options = [
        f"--gpu-architecture={arch if native else arch.replace('sm_', 'compute_')}",
        *OPTIONS,
        *(_PTXAS if native else ()),
    ]
    options += [f"--maxrregcount={max_registers}"] if max_registers else []
    options += ["--generate-line-info"] if line_info else []
    key = digest("cuda", VERSION, nvrtc.identity, *options, "\0", anonymous(source))
    cache = object_cache() or default_cache()
    payload = cache.get(key)
    made = _unpack(payload, arch) if payload is not None else None
    if made is None:
        cubin, ptx, log = _compile(nvrtc, source, arch, options, timeout)
        made = CudaBinary(arch, cubin, ptx, log, _resources(log))
        cache.put(key, _pack(made))
    if spills == "error" and native:
        _refuse_spills(nvrtc, made, source)
    return replace(made, cubin=made.cubin if native else b"", ptx=made.ptx if "ptx" in emit else "")


def _parse_arch(arch: str) -> tuple[int, str]:
    """``sm_90a`` -> (90, "a")."""
    match = re.fullmatch(r"sm_([1-9]\d{1,2})([af]?)", arch, re.ASCII)
    if match is None:
        raise InvalidProblem(
            f"arch={arch!r}; an architecture is written sm_90, or sm_90a and sm_100f with what only it or its"
            " family has"
        )
    if int(match[1]) < {"": 0, "a": 90, "f": 100}[match[2]]:
        raise InvalidProblem(f"arch={arch!r}: 'a' is for sm_90 and later, 'f' for sm_100 and later")
    return int(match[1]), match[2]


def _check_source(source: str) -> None:
    """Rejects source with includes, or with a NUL, after which NVRTC would ignore the rest."""
    if (at := source.find("\0")) >= 0:
        raise CompilerError(
            f"our CUDA source has a NUL in line {source.count(chr(10), 0, at) + 1}, where NVRTC stops reading",
            "",
            source,
        )
    if match := re.search(r"^[ \t]*(?:#|%:)[ \t]*(?:include|import|embed)\b", source, re.MULTILINE):
        raise CompilerError(
            f"our CUDA source includes something in line {source.count(chr(10), 0, match.start()) + 1}; it must stand"
            " alone",
            "",
            source,
        )


def _compile(nvrtc: Nvrtc, source: str, arch: str, options: Sequence[str], timeout: float) -> tuple[bytes, str, str]:
    """(cubin, PTX, log), compiled in a separate thread, so that Ctrl-C and the timeout take effect here."""
    stop = ctypes.create_string_buffer(b"0")
    done: list[tuple[bytes, str, str] | BaseException] = []
    finished = threading.Event()  # an interrupted Thread.join may not be repeated before Python 3.13

    def work() -> None:
        try:
            done.append(_run(nvrtc, source, arch, options, stop))
        except BaseException as error:
            done.append(error)
        finished.set()

    thread = threading.Thread(target=work, name="gradc-nvrtc", daemon=True)
    _start(thread)
    try:
        finished.wait(timeout)
    finally:
        late, stop.value = not finished.is_set(), b"1"
        finished.wait()
        thread.join()
    result = done[0]
    if isinstance(result, BaseException):
        if late and isinstance(result, _Stopped):
            raise CompilerError(f"{nvrtc} took too long and was stopped on our CUDA source for {arch}", "", source)
        raise result
    return result


_starting = lock()


def _start(thread: threading.Thread) -> None:
    """Starts the thread with a large stack: NVRTC's recursive parser crashes the process on a stack overflow (60 000
    brackets in 8 MB).
    """
    with _starting:
        before = threading.stack_size(512 << 20)  # address space; pages are mapped when they are touched
        try:
            thread.start()
        except RuntimeError:  # the address space is limited
            threading.stack_size(before)
            thread.start()
        finally:
            threading.stack_size(before)


class _Stopped(Exception):
    """NVRTC was stopped by the flow callback."""


def _run(
    nvrtc: Nvrtc, source: str, arch: str, options: Sequence[str], stop: ctypes.Array[ctypes.c_char]
) -> tuple[bytes, str, str]:
    """Creates, compiles and destroys one NVRTC program: (cubin, PTX, log)."""
    library = _library(nvrtc.path)
    program = ctypes.c_void_p()

    def check(code: int) -> None:
        if code:
            raise CompilerError(
                f"{nvrtc} failed on our CUDA source for {arch}: {library.nvrtcGetErrorString(code).decode()}",
                "",
                source,
            )

    def get(name: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(max(size.value, 1))
        check(getattr(library, f"nvrtcGet{name}")(program, data))
        return data.raw[: size.value]

    try:
        check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode("utf-8", "surrogatepass"), b"gradc.cu", 0, None, None
            )
        )
        if hasattr(library, "nvrtcSetFlowCallback"):
            # NVRTC calls the callback f(stop, NULL) some thousand times and continues while it returns 0.  The C
            # library's atoi serves as f, because a Python callback would wait for the GIL each time.
            check(
                library.nvrtcSetFlowCallback(
                    program, ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p), ctypes.addressof(stop)
                )
            )
        code = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        )
        log = _text(get("ProgramLog"))
        if code == _CANCELLED:
            raise _Stopped
        if code:
            log = log[:LOG_LIMIT] + "\n[...]" * (len(log) > LOG_LIMIT)
            raise CompilerError(
                f"{nvrtc} failed ({library.nvrtcGetErrorString(code).decode()}) on our CUDA source for {arch}",
                log,
                source,
            )
        native = any(o.startswith("--gpu-architecture=sm_") for o in options)
        return get("CUBIN") if native else b"", _text(get("PTX")), log
    finally:
        if program:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(data: bytes) -> str:
    """A text from NVRTC, without the trailing NUL and the timings, which differ in every run."""
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    return re.sub(r"^ptxas info +: Compile time = .*\n", "", text, flags=re.MULTILINE)


# -- the log -----------------------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


def _resources(log: str) -> dict[str, KernelResources]:
    """The resources of each kernel from the assembler's log, in which called functions follow their kernel."""
    resources, name = dict[str, KernelResources](), ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1]
            resources[name] = KernelResources(name, 0)
        elif name and (match := _STACK.search(line)):
            k, (stack, stores, loads) = resources[name], map(int, match.groups())
            resources[name] = replace(
                k, stack=k.stack + stack, spill_stores=k.spill_stores + stores, spill_loads=k.spill_loads + loads
            )
        elif name and (match := _USED.search(line)):
            barriers, shared, constant = (
                sum(map(int, re.findall(pattern, line)))
                for pattern in (r"used (\d+) barriers", r"(\d+) bytes smem", r"(\d+) bytes cmem")
            )
            resources[name] = replace(
                resources[name], registers=int(match[1]), barriers=barriers, shared=shared, constant=constant
            )
    return {name: resources[name] for name in sorted(resources) if resources[name].registers}


def _refuse_spills(nvrtc: Nvrtc, made: CudaBinary, source: str) -> None:
    silent = sorted(
        set(re.findall(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$.%]+)", made.ptx, re.MULTILINE))
        - made.kernels.keys()
    )
    if silent:
        raise CompilerError(
            f"the log of {nvrtc} does not say what {', '.join(silent)} needs, so that spills could not be seen",
            made.log,
            source,
        )
    spilling = {
        k.name: (k.spill_stores, k.spill_loads) for k in made.kernels.values() if k.spill_stores or k.spill_loads
    }
    if spilling:
        raise RegistersSpilled(made.arch, spilling, made.log, source)


# -- entries of the cache ----------------------------------------------------------------------------------------------


def _pack(made: CudaBinary) -> bytes:
    """JSON of the texts, a NUL (JSON has none), the cubin."""
    return json.dumps({"ptx": made.ptx, "log": made.log}).encode() + b"\0" + made.cubin


def _unpack(payload: bytes, arch: str) -> CudaBinary | None:
    """The inverse of :func:`_pack`; None if the payload is malformed (written by a broken build)."""
    head, nul, cubin = payload.partition(b"\0")
    try:
        texts = read_json(head.decode())
        return CudaBinary(arch, cubin, texts["ptx"], texts["log"], _resources(texts["log"])) if nul else None
    except (ValueError, KeyError, TypeError):
        return None
