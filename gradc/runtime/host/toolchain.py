"""Compiles C to shared libraries and loads them: finds a compiler and runs it with a timeout, leaving no processes or
files behind.
"""

from __future__ import annotations

import atexit  # noqa: F401  (temporary folders import it when the first is made)
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import select
import shlex
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from gradc import knobs
from gradc.codegen.text import template_dirs
from gradc.errors import CompilerError, CompilerMissing
from gradc.process import files
from gradc.process.files import scratch
from gradc.process.forks import held_off
from gradc.process.interrupts import interrupts_wait
from gradc.runtime.cache import Cache, default_cache, digest, object_cache

if TYPE_CHECKING:
    import subprocess

FLAGS = (
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-march=native",
    # errno and traps prevent vectorization and affect no value; contraction would change bits.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fopenmp-simd",
    # these two passes mix masks of different widths, which prevents vectorization in gcc
    "-fno-tree-pre",
    "-fno-thread-jumps",
    # gcc 12 miscompiles a masked load near a prefetch of the next row: it substitutes the load's address after the
    # pointer has been advanced, so that the wrong row is read
    "-fno-tree-ter",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
)
# The replacements of flags that a compiler rejects.
_INSTEAD = {
    "-march=native": ("-mcpu=native",),
    "-mcpu=native": (),
    "-fno-trapping-math": (),
    "-fno-math-errno": (),
    "-fopenmp-simd": (),
    "-fno-tree-pre": (),
    "-fno-thread-jumps": (),
    "-fno-tree-ter": (),
    "-fvisibility=hidden": (),
    "-std=gnu11": (),
    "-std=gnu++17": (),
}
_PROCESSOR = ("-march=", "-mcpu=")  # flags in CC that select another processor than this one
# Language -> (file suffix, standard, directory of the templates' headers).
_LANGUAGES = {"c": (".c", "-std=gnu11", "cpu"), "c++": (".cpp", "-std=gnu++17", "cuda")}
_TEMPLATES = {"c": ("cpu", "common"), "c++": ("cuda", "common")}  # what a unit may include
_C_HEADER = '#include "math.h"\n#include "program.h"\n'  # how most units in C begin
WHOLE = ("-lm",)  # what a library is linked with that calls the C library
LOG_LIMIT = 20_000  # the most characters of a log kept in an error
TIMEOUT = 300.0  # seconds for compiling one unit


@dataclass(frozen=True)
class Compiler:
    """A working C compiler.

    :param argv: its command line.  :param version: its version line.  :param target: its target triple.
    """

    argv: tuple[str, ...]
    version: str
    target: str

    @property
    def identity(self) -> str:
        """Its identity in cache keys: path, version, target and flags."""
        return digest(*self.argv, "\0", self.version, self.target, *FLAGS)

    def __str__(self) -> str:
        return f"{shlex.join(self.argv)} ({self.version}, {self.target})"


def find_compiler() -> Compiler:
    """``$CC`` if it is set, else the first of gcc, clang, cc and the ziglang wheel.

    ``CC="gcc -march=haswell"`` compiles for that processor; without such a flag, for this machine's.

    :raises CompilerMissing: there is none, or the one in ``$CC`` does not exist.
    :raises InvalidSetting: ``$CC`` is no command, or has a flag that changes numerics (:data:`gradc.knobs.VOIDING`).
    :raises CompilerError: the compiler found does not report its version.
    """
    return _find(knobs.CC.read(knobs.CC.get()), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=16)
def _find(wanted: str, search: str) -> Compiler:
    if wanted.strip():
        command = shlex.split(wanted)
        program = _program(command[0], search)
        if program is None:  # no fallback if $CC was set explicitly
            raise CompilerMissing(f"CC={wanted!r} names no program that can be run; set it to a C compiler or unset it")
        return _ask((program, *command[1:]))
    for name in ("gcc", "clang", "cc"):
        program = _program(name, search)
        if program is not None:
            return _ask((program,))
    if importlib.util.find_spec("ziglang") is not None:
        return _ask((sys.executable, "-m", "ziglang", "cc"))
    raise CompilerMissing(
        "no C compiler: CC is not set, gcc, clang and cc are not on PATH, and the ziglang wheel is not installed; "
        "install a compiler, or `pip install gradc[cpu]`, which brings one; target='numpy' needs none"
    )


def _program(name: str, search: str) -> str | None:
    """As ``shutil.which``: modules from the cache need nothing else of that package, which imports compressors."""
    folders = [""] if os.path.dirname(name) else search.split(os.pathsep) if search else []
    paths = (os.path.join(folder, name) for folder in dict.fromkeys(folders))
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _ask(argv: tuple[str, ...]) -> Compiler:
    """Queries version and target of a compiler; cached on disk until its file changes, because it takes 5 to 300 ms."""
    stamp = _stamp(argv)
    key = digest("compiler", *argv, stamp)
    cache = default_cache()
    known = cache.get(key) if stamp else None
    if known is not None:
        version, _, target = known.decode("utf-8", "replace").partition("\n")
        return Compiler(argv, version, target)
    with scratch() as folder:
        jobs = _run_all([[*argv, "-v"]], folder, 60.0)
    code, log = jobs[0]
    if code != 0:
        raise CompilerError(f"{shlex.join(argv)} -v {_ending(code)}: not a C compiler that works", log)
    lines = log.splitlines()
    version = next(
        (line.strip() for line in lines if re.search(r"\bversion \d", line)), lines[0].strip() if lines else "unknown"
    )
    target = next((line.partition(":")[2].strip() for line in lines if line.startswith("Target:")), platform.machine())
    if stamp:
        cache.put(key, f"{version}\n{target}".encode())
    return Compiler(argv, version, target)


def _stamp(argv: tuple[str, ...]) -> str:
    """An identity of the compiler's file; "" if the file does not determine the compiler (scripts, launchers)."""
    if argv[1:] == ("-m", "ziglang", "cc"):
        with held_off:
            import importlib.metadata

        return importlib.metadata.version("ziglang") if importlib.util.find_spec("ziglang") is not None else ""
    try:
        with open(argv[0], "rb") as file:
            binary = file.read(4) in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
        about = os.stat(argv[0])
    except OSError:
        return ""
    # ccache and similar launchers are binaries too, but do not have a compiler's name.
    plain = re.search(r"(^|-)(gcc|clang|cc)(-[\d.]+)?$", Path(argv[0]).name) and "ccache" not in os.path.realpath(
        argv[0]
    )
    if not binary or not plain or len(argv) > 1:
        return ""
    return f"{os.path.realpath(argv[0])} {about.st_size} {about.st_mtime_ns} {about.st_ino}"


@functools.cache
def processor() -> str:
    """The model of this machine's CPU."""
    return _cpu().get("model name") or platform.processor() or platform.machine() or "unknown"


@functools.cache
def cpu_model() -> str:
    """Name, family and model of this machine's CPU, as words."""
    fields = _cpu()
    numbers = f"family {fields['cpu family']} model {fields.get('model')}" if "cpu family" in fields else ""
    return f"{processor()} {numbers}".strip()


def _cpu() -> dict[str, str]:
    """What the system says of its first CPU, by name."""
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "CPU implementer",
        "CPU part",
        "CPU variant",
        "Features",
        "isa",
    )
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, colon, value = line.partition(":")
            if colon and name.strip() in wanted:
                fields.setdefault(name.strip(), value.strip())
    return fields


@functools.cache
def cpu_identity() -> str:
    """Model and features of this machine's CPU, to which code compiled with ``-march=native`` is specific."""
    fields = _cpu()
    features = " ".join(sorted((fields.pop("flags", "") + " " + fields.pop("Features", "")).split()))
    model = fields.pop("model name", "") or platform.processor() or "unknown"
    rest = "/".join(fields.values())
    return f"{platform.machine()} {model} {rest} {hashlib.sha256(features.encode()).hexdigest()[:16]}"


def compile_c(source: str, *, extra: Sequence[str] = (), units: Sequence[str] = (), timeout: float = TIMEOUT) -> bytes:
    """Compiles C source to a shared object and returns its bytes.

    :param extra: additional flags.  :param units: further sources of the same library, compiled in parallel.
    :param timeout: seconds for one unit.

    The include path has the headers of ``templates/cpu``, such as ``runtime.h``.

    :raises CompilerMissing: there is no compiler.
    :raises CompilerError: it rejected the source, crashed, was killed or timed out; ``.source`` is the source with line
        numbers, ``.log`` the compiler's output.
    """
    return _built(Build(extra=extra, timeout=timeout, link=WHOLE), [[source, *units]])[0]


def compile_libraries(
    libraries: Sequence[Sequence[str]], *, extra: Sequence[str] = (), timeout: float = TIMEOUT
) -> list[bytes]:
    """:func:`compile_c` of several libraries of kernels, of one or more units each: all units are compiled in parallel,
    then linked.

    Those that :func:`.object_cache` has are taken from there.
    """
    return _built(Build(extra=extra, timeout=timeout), libraries)


def _built(begun: Build, libraries: Sequence[Sequence[str]]) -> list[bytes]:
    with begun as build:
        for units in libraries:
            build.add(units)
        return build.finish()


def _kernel_link(compiler: Compiler) -> tuple[str, ...]:
    """Kernels call functions of libm and those that every process has, such as memcpy: gcc need read neither startup
    files nor the C library's table of symbols, and links in a third of the time (6 of 17 ms).  Other flags in CC than a
    processor's may need libraries of their own, as ``-fsanitize=undefined`` does.
    """
    plain = sys.platform == "linux" and _is_gcc(compiler) and all(w.startswith(_PROCESSOR) for w in compiler.argv[1:])
    return ("-nostdlib", "-lm", "-lgcc") if plain else WHOLE


def _is_gcc(compiler: Compiler) -> bool:
    return "gcc version" in compiler.version


class Build:
    """Shared objects that are compiled while the caller does something else: ``with Build() as build:``

    :param extra: additional flags.  :param timeout: seconds for one unit.  :param link: what libraries are linked with:
        what kernels need, or :data:`WHOLE`.

    What a library needs is begun when it is added, one process per CPU at most; :meth:`advance` begins what has to wait
    for others, and :meth:`finish` waits for all.  However the block ends, also by Ctrl-C, no process is left, nor a
    file.

    :raises CompilerMissing, CompilerError: as :func:`compile_c`.
    """

    def __init__(self, *, extra: Sequence[str] = (), timeout: float = TIMEOUT, link: Sequence[str] = ()):
        self._extra, self._timeout, self._owner = extra, timeout, os.getpid()
        self._compiler = find_compiler()
        self._link = link or _kernel_link(self._compiler)
        self._cache = kept_code(self._compiler)
        self._libraries: list[Sequence[str]] = []
        self._found: dict[int, bytes] = {}
        self._objects: _Objects | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *error: object) -> None:
        with interrupts_wait():
            self._exit.close()

    def add(self, units: Sequence[str]) -> None:
        """Begins a library of one or more units, unless :func:`.object_cache` has it."""
        number = len(self._libraries)
        self._libraries.append(units)
        if os.getpid() != self._owner:
            return  # a child of who began compiles all of them in the end, in a folder of its own
        found = self._cache.get(self._key(units)) if self._cache is not None else None
        if found is not None:
            self._found[number] = found
            return
        if self._objects is None:
            folder = self._exit.enter_context(scratch())
            processes = self._exit.enter_context(_Processes(folder, self._timeout))
            self._objects = _Objects(self._compiler, self._extra, self._link, self._timeout, folder, processes)
        self._objects.add(number, units)

    def advance(self) -> None:
        """Begins what there is a free CPU for."""
        if self._objects is not None and os.getpid() == self._owner:
            self._objects.processes.advance()

    def finish(self) -> list[bytes]:
        """The libraries, in the order in which they were added."""
        if os.getpid() != self._owner:  # its parent has the processes, and deletes the files
            return _built(Build(extra=self._extra, timeout=self._timeout, link=self._link), self._libraries)
        for number, made in self._objects.finish().items() if self._objects is not None else ():
            self._found[number] = made
            if self._cache is not None:
                self._cache.put(self._key(self._libraries[number]), made)
        return [self._found[number] for number in range(len(self._libraries))]

    def _key(self, units: Sequence[str]) -> str:
        same = (made_by(self._compiler), *_flags(self._compiler, "c"), *self._extra, *self._link, *headers("c"))
        return digest("library", *same, "\0", *units)


class _Objects:
    """The units of a :class:`Build` in a folder of their own."""

    def __init__(
        self,
        compiler: Compiler,
        extra: Sequence[str],
        link: Sequence[str],
        timeout: float,
        directory: Path,
        processes: _Processes,
    ):
        self.compiler, self.extra, self.link, self.timeout = compiler, extra, link, timeout
        self.directory, self.processes = directory, processes
        self.flags = _flags(compiler, "c")
        self.texts: list[str] = []
        self.jobs: list[tuple[list[str], Sequence[str]]] = []
        self.links: list[tuple[list[str], Sequence[str]]] = []
        self.outputs: dict[int, str] = {}

    def add(self, number: int, units: Sequence[str]) -> None:
        mine = range(len(self.texts), len(self.texts) + len(units))
        self.texts += units
        for i in mine:
            (self.directory / f"unit{i}.c").write_text(self.texts[i], encoding="utf-8")
        self.outputs[number] = f"out{number}.so"
        if len(units) == 1:
            jobs = [(["-shared", "-o", f"out{number}.so", f"unit{mine[0]}.c"], self.extra)]
        else:
            jobs = [(["-c", "-o", f"unit{i}.o", f"unit{i}.c"], self.extra) for i in mine]
            self.links.append((["-shared", "-o", f"out{number}.so", *(f"unit{i}.o" for i in mine)], self.extra))
        self.jobs += jobs
        self.processes.begin(_commands(self.compiler, jobs, self.directory, begin=self._headers(), link=self.link))

    def _headers(self) -> dict[str, str]:
        return {f"unit{i}.c": _C_HEADER for i, text in enumerate(self.texts) if text.startswith(_C_HEADER)}

    def finish(self) -> dict[int, bytes]:
        """The libraries by their numbers."""
        done = self.processes.wait()
        if not _accepted(self.compiler, self.flags, done, self.texts):
            begin = self._headers()
            _compile(self.compiler, self.jobs, self.directory, self.texts, self.timeout, begin=begin, link=self.link)
        if self.links:
            texts = [""] * len(self.links)
            _compile(self.compiler, self.links, self.directory, texts, self.timeout, link=self.link)
        return {number: (self.directory / name).read_bytes() for number, name in self.outputs.items()}


def compile_units(units: Sequence[str], *, extra: Sequence[str] = (), timeout: float = TIMEOUT) -> bytes:
    """:func:`compile_c` of one library from several sources, compiled in parallel."""
    return compile_c(units[0], extra=extra, units=units[1:], timeout=timeout)


def compile_object(
    source: str,
    *,
    language: Literal["c", "c++"] = "c++",
    extra: Sequence[str] = (),
    timeout: float = TIMEOUT,
    header: str = "",
) -> bytes:
    """Compiles one source to an object file for :func:`link_objects` and returns its bytes.

    :param header: text with include guards that the source begins with, too; it is compiled once where
        :func:`.object_cache` keeps it.

    C++ is compiled by the C compiler's C++ front end without the C++ standard library, so that libstdc++ is not needed.
    The include path has the headers of ``templates/cuda``.

    :raises CompilerMissing, CompilerError: as :func:`compile_c`; also if gcc was installed without its C++ front end.
    """
    compiler = find_compiler()
    suffix = _LANGUAGES[language][0]
    with scratch() as directory:
        (directory / f"unit0{suffix}").write_text(source, encoding="utf-8")
        job = ["-c", "-o", "unit0.o", f"unit0{suffix}"], extra
        _compile(compiler, [job], directory, [source], timeout, language, {job[0][-1]: header})
        return (directory / "unit0.o").read_bytes()


def link_objects(objects: Sequence[bytes], *, timeout: float = TIMEOUT) -> bytes:
    """Links objects from :func:`compile_object` to a shared object, without repeating compilation flags."""
    compiler = find_compiler()
    with scratch() as directory:
        for i, payload in enumerate(objects):
            (directory / f"unit{i}.o").write_bytes(payload)
        names = [f"unit{i}.o" for i in range(len(objects))]
        job = ["-shared", "-o", "out.so", *names], ()
        _compile(compiler, [job], directory, [""], timeout, link=_kernel_link(compiler))
        return (directory / "out.so").read_bytes()


def kept_code(compiler: Compiler) -> Cache | None:
    """:func:`.object_cache`, or None for a compiler whose file does not say what it will do tomorrow."""
    return object_cache() if _stamp(compiler.argv) else None


def made_by(compiler: Compiler) -> str:
    """What makes machine code of a source, for the keys of :func:`kept_code`: the compiler's file, the processor, and
    how this module calls it.
    """
    return digest(compiler.identity, _stamp(compiler.argv), cpu_identity(), _own_text())


@functools.cache
def _own_text() -> bytes:
    return Path(__file__).read_bytes()


@functools.cache
def headers(language: Literal["c", "c++"]) -> tuple[str, ...]:
    """Name and text of every header of gradc's that a unit in this language may include."""
    paths = [
        path
        for folder in template_dirs()
        for name in _TEMPLATES[language]
        for path in sorted((folder / name).glob("*"))
        if path.is_file()
    ]
    return tuple(text for path in paths for text in (path.name, path.read_text(encoding="utf-8")))


_refused: dict[Compiler, frozenset[str]] = {}


def _flags(compiler: Compiler, language: str) -> list[str]:
    """The flags of gradc, with those that this compiler is known to reject replaced."""
    chosen = {"-std=gnu11": _LANGUAGES[language][1], "-O2": f"-O{knobs.OPTIMIZE.get()}"}
    flags = [chosen.get(flag, flag) for flag in FLAGS]
    if any(word.startswith(_PROCESSOR) for word in compiler.argv[1:]):
        flags.remove("-march=native")
    refused = _refused.get(compiler, frozenset())
    while any(flag in refused for flag in flags):
        flags = [kept for flag in flags for kept in (_INSTEAD[flag] if flag in refused else (flag,))]
    if "ziglang" in compiler.argv or "zig" in Path(compiler.argv[0]).name:
        flags.append("-fno-sanitize=undefined")  # zig enables it by default, and it traps
    return flags


def _compile(
    compiler: Compiler,
    jobs: list[tuple[list[str], Sequence[str]]],
    directory: Path,
    texts: Sequence[str],
    timeout: float,
    language: Literal["c", "c++"] = "c",
    begin: Mapping[str, str] = MappingProxyType({}),
    link: Sequence[str] = (),
) -> None:
    """Runs the jobs in parallel, and again without a flag that the compiler reported as unknown.

    :param begin: file of a unit -> the header that it begins with.  :param link: what libraries are linked with.
    """
    while True:
        flags = _flags(compiler, language)
        done = _run_all(_commands(compiler, jobs, directory, language, begin, link), directory, timeout)
        if _accepted(compiler, flags, done, texts):
            return


def _commands(
    compiler: Compiler,
    jobs: Sequence[tuple[list[str], Sequence[str]]],
    directory: Path,
    language: Literal["c", "c++"] = "c",
    begin: Mapping[str, str] = MappingProxyType({}),
    link: Sequence[str] = (),
) -> list[list[str]]:
    """The command line of each job."""
    include = [
        word for path in template_dirs() for word in ("-iquote", str(path / _LANGUAGES[language][2]))
    ]  # not -I, which would make our math.h shadow <math.h>
    flags = [*_flags(compiler, language), *include]
    commands = []
    for job, extra in jobs:
        header = begin.get(job[-1], "")
        known = _compiled_header(compiler, directory, (*flags, *extra), header, language) if header else ()
        commands.append([*compiler.argv, *known, *flags, *job, *extra, *link])
    return commands


def _accepted(
    compiler: Compiler, flags: Sequence[str], done: Sequence[tuple[int | None, str]], texts: Sequence[str]
) -> bool:
    """Whether all jobs were done; False where they are to be run again, without a flag that the compiler reported as
    unknown.

    :param done: of each job how it ended, and its output.
    """
    failed = next(((i, code, log) for i, (code, log) in enumerate(done) if code != 0), None)
    if failed is None:
        return True
    i, code, log = failed
    unknown = {flag for flag in flags if flag in _INSTEAD and _complains(log, flag)}
    if not unknown:
        subject = ("the link" if not texts[i] else "our C source") + (f", unit {i}" if len(texts) > 1 else "")
        raise CompilerError(f"{compiler} {_ending(code)} on {subject}", log, texts[i])
    _refused[compiler] = _refused.get(compiler, frozenset()) | unknown
    return False


def _compiled_header(
    compiler: Compiler, directory: Path, flags: tuple[str, ...], header: str, language: Literal["c", "c++"]
) -> tuple[str, ...]:
    """The flags by which gcc reads a precompiled header before a unit of ``directory``; none where it is not kept.  At
    -O0 reading headers is a fifth of the compilation of C, and a third of the simulator's.
    """
    cache = kept_code(compiler)
    if cache is None or cache.directory is None or not _is_gcc(compiler):
        return ()
    made = _precompiled(compiler, cache.directory, flags, header, language)
    if made is None:
        return ()
    path = directory / f"{made.stem}.h"  # which gcc reads where it cannot use the other
    if not path.exists():
        path.write_text(header, encoding="utf-8")
        path.with_suffix(".h.gch").symlink_to(made)
    return ("-include", path.name)


@functools.cache
def _precompiled(
    compiler: Compiler, folder: Path, flags: tuple[str, ...], header: str, language: Literal["c", "c++"]
) -> Path | None:
    """The file of a header compiled with these flags, made if it is not there or is damaged, which gcc does not
    survive; None if it cannot be.
    """
    made = folder.absolute() / f"{digest('header', made_by(compiler), *flags, *headers(language), header)}.gch"
    proof = made.with_suffix(".sha256")
    with contextlib.suppress(OSError):
        if proof.read_text(encoding="ascii") == hashlib.sha256(made.read_bytes()).hexdigest():
            return made
    with scratch() as directory:
        (directory / "header.h").write_text(header, encoding="utf-8")
        command = [*compiler.argv, *flags, "-x", f"{language}-header", "header.h", "-o", "header.gch"]
        ((status, _),) = _run_all([command], directory, TIMEOUT)
        if status != 0:
            return None
        compiled = (directory / "header.gch").read_bytes()
        with contextlib.suppress(OSError):
            files.write(made, compiled, mode=0o600, durable=False)
            files.write(proof, hashlib.sha256(compiled).hexdigest(), mode=0o600, durable=False)
            return made
    return None


def _complains(log: str, flag: str) -> bool:
    """Whether the log has an error about the flag itself."""
    return any(
        flag in line and re.search(r"unrecogni[sz]ed|unknown|unsupported|not supported|invalid", line)
        for line in log.splitlines()
    )


def _ending(code: int | None) -> str:
    if code is None:
        return "took too long and was stopped"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"failed (exit status {code})"


def _run_all(commands: Sequence[Sequence[str]], directory: Path, timeout: float) -> list[tuple[int | None, str]]:
    """Runs commands in parallel, at most one per CPU; (exit status, or None after a timeout; output) of each."""
    with _Processes(directory, timeout) as processes:
        processes.begin(commands)
        return processes.wait()


class _Processes:
    """Commands that run beside each other, at most one per CPU, and beside the caller.

    However the block ends, also by Ctrl-C, no process is left: each leads a process group, and their temporary files
    are in ``directory``.
    """

    def __init__(self, directory: Path, timeout: float):
        with held_off:
            import subprocess  # noqa: F401
        self._directory, self._timeout = directory, timeout
        self._environment = {**os.environ, "TMPDIR": str(directory), "LC_ALL": "C"}
        self._limit = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self._running: list[tuple[int, subprocess.Popen[bytes], float]] = []
        self._commands: list[Sequence[str]] = []
        self._codes: dict[int, int | None] = {}
        self._begun = 0
        self._undone = weakref.finalize(self, _kill_all, self._running, os.getpid())  # also where Ctrl-C drops this

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *error: object) -> None:
        with interrupts_wait():
            self._undone()

    def begin(self, commands: Sequence[Sequence[str]]) -> None:
        """Begins commands, in order, as far as there are CPUs."""
        self._commands += commands
        self._fill()

    def advance(self) -> None:
        """Begins those for which there is a CPU by now."""
        for entry in [*self._running]:
            if entry[1].poll() is not None:
                self._codes[entry[0]] = entry[1].returncode
                self._running.remove(entry)
        self._fill()

    def wait(self) -> list[tuple[int | None, str]]:
        """(Exit status, or None after a timeout; output) of each."""
        while self._running:
            i, process, deadline = self._running[0]  # kept until it has ended, because Ctrl-C may come at any time
            if not _ended(process, deadline - time.monotonic()):
                _kill(process)
                self._codes[i] = None
            else:
                self._codes[i] = process.returncode
            del self._running[0]
            self._fill()
        count = len(self._commands)
        logs = [(self._directory / f"log{i}").read_bytes().decode("utf-8", "replace") for i in range(count)]
        return [
            (self._codes[i], log if len(log) <= LOG_LIMIT else log[:LOG_LIMIT] + "\n[...]")
            for i, log in enumerate(logs)
        ]

    def _fill(self) -> None:
        with held_off:
            import subprocess
        try:
            while self._begun < len(self._commands) and len(self._running) < self._limit:
                i, command = self._begun, self._commands[self._begun]
                with (
                    open(self._directory / f"log{i}", "wb") as log,
                    held_off,
                    interrupts_wait(),
                ):  # a concurrently forked child would keep the pipe open, an interrupt would lose the process
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=self._directory,
                        env=self._environment,
                        start_new_session=True,
                    )
                    self._running.append((i, process, time.monotonic() + self._timeout))
                    self._begun += 1
        except OSError as error:
            raise CompilerError(f"{shlex.join(command)} cannot be run: {error}") from error


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends in time.  Ctrl-C takes effect at once; ``Popen.wait`` would wait for another 0.25 s."""
    if process.poll() is None and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # not supported by the kernel, or no descriptor left
            descriptor = os.pidfd_open(process.pid)
            try:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.poll(max(0.0, seconds * 1000))
            finally:
                os.close(descriptor)
            return process.poll() is not None
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    return process.returncode is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return  # the id may be reused already
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the compiler driver and its children
    process.wait()


def _kill_all(running: Sequence[tuple[int, subprocess.Popen[bytes], float]], owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked meanwhile
        for _, process, _ in running:
            _kill(process)


_loads = itertools.count(1)


def load_library(payload: bytes, name: str) -> ctypes.CDLL:
    """Loads a shared object from its bytes; debuggers and profilers show ``name``.

    :raises CompilerError: this process cannot load it.
    """
    shown = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64]
    try:
        if sys.platform == "linux":
            with contextlib.suppress(OSError), _memory_file(payload, shown) as path, held_off:
                return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        # Without memfd (or /proc): a private file, deleted as soon as it is loaded.
        with scratch() as directory:
            file = directory / f"{shown}.so"
            file.write_bytes(payload)
            with held_off:
                return ctypes.CDLL(str(file), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        missing = re.search(r"undefined symbol: (\w+)", str(error))
        why = f" (an op's Expr calls {missing[1]}, which templates/common/math.h lacks)" if missing else ""
        raise CompilerError(f"the compiled library {name!r} cannot be loaded: {error}{why}") from error


@contextlib.contextmanager
def _memory_file(payload: bytes, name: str) -> Iterator[str]:
    """A context manager with the path of an in-memory file with these bytes."""
    descriptor = os.memfd_create(f"gradc-{name}", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(payload)
        # The loader identifies libraries by path, and descriptor numbers are reused: the path is made unique by
        # spelling the load's number in binary with "./" and "/", which the kernel ignores.
        spelled = "".join("./" if bit == "1" else "/" for bit in f"{next(_loads):b}")
        yield f"/proc/self/fd/{spelled}{descriptor}"
    finally:
        os.close(descriptor)
