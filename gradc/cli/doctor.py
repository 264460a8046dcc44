"""doctor: reports what gradc finds on this machine; broken components are a failed check, missing ones are not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from .. import knobs
from ..api import VERSION
from ..errors import CompilerMissing, GradcError
from ..runtime.cuda import cudnn_version
from .progress import Progress

COMPILERS = ("C compiler", "NVRTC")
C_HINT = "install gcc or clang (Debian: apt-get install gcc), or: pip install ziglang; and unset CC where it names none"
NVRTC_HINT = "for the target cuda: pip install 'gradc[nvrtc]' (without a GPU) or 'gradc[cuda12]'; unset GRADC_NVRTC"
CUDNN_HINT = (
    "for convolutions of the target cuda: pip install 'gradc[cudnn]', and cuDNN itself, which torch brings:"
    " nvidia-cudnn-cu12 or nvidia-cudnn-cu13"
)
CACHE_HINT = "set GRADC_CACHE_DIR to a folder that can be written"


@dataclass(frozen=True)
class Line:
    """One component.

    :param state: ``ok``, ``missing`` (gradc works without it) or ``broken``.
    :param hint: what to do where it is not ok.
    """

    what: str
    text: str
    state: str = "ok"
    hint: str = ""


@click.command(short_help="What was found: compiler, threads, GPU, cache.")
@click.option(
    "--progress/--no-progress", default=None, help="Show what is being done after a second; by default on a terminal."
)
@click.option("--fix-hints", is_flag=True, help="Below each line that is not ok, what to do.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list of {what, text, state, hint}.")
def doctor(progress: bool | None, fix_hints: bool, as_json: bool) -> int:
    """Look for everything that gradc can use and report what was found.

    Exit code 1 if a component is present but does not work; a missing one is no failure.

    \b
    gradc doctor --fix-hints
    """
    lines: list[Line] = []
    with Progress("looking", progress) as shown:
        for subject, look in LOOKS:
            shown.say(f"looking for {subject}")
            try:
                lines += list(look())
            except Exception as error:
                lines.append(Line(subject, f"{type(error).__name__}: {error}".splitlines()[0], "broken"))
    broken = [line.what for line in lines if line.state == "broken"]
    if as_json:
        click.echo(json.dumps([asdict(line) for line in lines], indent=1))
        return 1 if broken else 0
    marks = {"ok": "ok", "missing": "--", "broken": "!!"}
    width = max(len(line.what) for line in lines)
    for line in lines:
        click.echo(f"  {marks[line.state]}  {line.what:<{width}}  {line.text}")
        if fix_hints and line.state != "ok" and line.hint:
            click.echo(f"      {'':<{width}}  -> {line.hint}")
    if not any(line.what in COMPILERS and line.state == "ok" for line in lines):
        click.echo("nothing here compiles C or CUDA: modules run with target='numpy' alone")
    if not fix_hints and any(line.hint for line in lines if line.state != "ok"):
        click.echo("gradc doctor --fix-hints says what to do about what is missing")
    click.echo(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _python() -> Iterator[Line]:
    yield Line("gradc", VERSION)
    yield Line(
        "Python",
        f"{platform.python_version()} ({platform.python_implementation()}, {platform.system()} {platform.machine()})",
    )


def _packages() -> Iterator[Line]:
    for package in ("numpy", "ml_dtypes", "jinja2", "networkx", "click"):
        version = _version(package)
        yield Line(
            package,
            version or "not installed, and gradc needs it",
            "ok" if version else "broken",
            f"pip install {package}",
        )
    for package, purpose in (
        ("platformdirs", "directories are XDG's"),
        ("torch", "gradc[torch]"),
        ("onnx", "gradc[onnx]"),
    ):
        version = _version(package)
        hint = f"pip install '{purpose if purpose.startswith('gradc[') else package}'"
        yield Line(package, version or f"not installed ({purpose})", "ok" if version else "missing", hint)


def _compiler() -> Iterator[Line]:
    from ..runtime.host.toolchain import compile_c, find_compiler, load_library

    try:
        compiler = find_compiler()
    except CompilerMissing as error:
        yield Line("C compiler", str(error), "missing", C_HINT)
        return
    except GradcError as error:
        yield Line("C compiler", str(error).splitlines()[0], "broken", C_HINT)
        return
    try:
        library = load_library(
            compile_c('__attribute__((visibility("default"))) int gradc_answer(void) { return 42; }\n'), "doctor"
        )
        answer = int(library.gradc_answer())
    except (GradcError, OSError, AttributeError) as error:
        yield Line("C compiler", f"{compiler}; it does not compile: {str(error).splitlines()[0]}", "broken", C_HINT)
        return
    yield Line(
        "C compiler",
        str(compiler) if answer == 42 else f"{compiler}; what it compiles does not run",
        "ok" if answer == 42 else "broken",
        C_HINT,
    )


def _threads() -> Iterator[Line]:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = ", ".join(f"{n}={os.environ[n]}" for n in ("GRADC_NUM_THREADS", "OMP_NUM_THREADS") if n in os.environ)
    try:
        from ..runtime.host import pool

        yield Line("threads", f"{pool.num_threads()} of {available} CPUs{f' ({settings})' if settings else ''}")
        yield Line("vectors", f"{8 * pool.vector_bytes()} bits in matrix products")
    except CompilerMissing:
        yield Line(
            "threads", f"{available} CPUs; the pool needs a C compiler{f' ({settings})' if settings else ''}", "missing"
        )
        yield Line("vectors", "needs a C compiler", "missing")


def _constants() -> Iterator[Line]:
    from ..runtime.host.toolchain import cpu_model
    from ..targets.calibration import found
    from ..targets.devices import CPU

    held = found(CPU, None, own=True, model=cpu_model())
    yield Line("constants", f"of {cpu_model()}: {'those listed for any CPU' if held is None else held[0]}")


def _nvrtc() -> Iterator[Line]:
    from ..runtime.cuda.nvrtc import compile_cuda, find_nvrtc

    try:
        nvrtc = find_nvrtc()
    except CompilerMissing as error:
        yield Line("NVRTC", str(error), "missing", NVRTC_HINT)
        return
    except GradcError as error:
        yield Line("NVRTC", str(error).splitlines()[0], "broken", NVRTC_HINT)
        return
    text = (
        f"{nvrtc.version[0]}.{nvrtc.version[1]} ({nvrtc.path}), for {', '.join(f'sm_{n}' for n in nvrtc.architectures)}"
    )
    try:
        with knobs.CACHE.set(False):  # query the library itself, not its cached description
            made = compile_cuda(
                'extern "C" __global__ void gradc_answer(int *answer) { *answer = 42; }\n',
                arch=f"sm_{nvrtc.architectures[0]}",
            )
    except GradcError as error:
        yield Line("NVRTC", f"{text}; it does not compile: {str(error).splitlines()[0]}", "broken", NVRTC_HINT)
        return
    yield Line(
        "NVRTC",
        text if made.kernels else f"{text}; its log is not understood: registers are not known",
        "ok" if made.kernels else "broken",
    )


def _gpu() -> Iterator[Line]:
    cupy = next((f"{name} {v}" for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if (v := _version(name))), "")
    yield Line(
        "CuPy", cupy or "not installed (gradc[cuda12])", "ok" if cupy else "missing", "pip install 'gradc[cuda12]'"
    )
    frontend, why = cudnn_version.version_of(cudnn_version.FRONTEND), cudnn_version.missing()
    yield Line(
        "cuDNN",
        f"{why}; convolutions are products of windows" if why else f"{cudnn_version.FRONTEND} {frontend}",
        "missing" if why else "ok",
        CUDNN_HINT,
    )
    tool = shutil.which("nvidia-smi")
    if tool is None:
        driver = Path("/proc/driver/nvidia/version")
        yield Line(
            "GPU",
            driver.read_text().splitlines()[0] if driver.exists() else "no NVIDIA driver",
            "ok" if driver.exists() else "missing",
        )
        return
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=15,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Line("GPU", "nvidia-smi did not answer within 15 s", "broken")
        return
    devices = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not devices:
        yield Line(
            "GPU",
            f"nvidia-smi finds none ({(answer.stderr or answer.stdout).strip().splitlines()[:1] or 'no output'})",
            "missing",
        )
    for line in devices if not answer.returncode else []:
        yield Line("GPU", line)


def _cache() -> Iterator[Line]:
    from ..runtime.cache import default_cache, digest

    if not knobs.CACHE.get():
        yield Line("cache", "turned off by GRADC_CACHE", "missing", "unset GRADC_CACHE")
        return
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = default_cache()
    if cache.directory is None:
        yield Line(
            "cache", str(caught[0].message) if caught else "no directory; entries live in a process only", "broken"
        )
        return
    entries, total, others = 0, 0, 0
    for entry in os.scandir(cache.directory):
        if entry.name.endswith(".entry") and entry.is_file(follow_symlinks=False):
            entries, total = entries + 1, total + entry.stat(follow_symlinks=False).st_size
        else:
            others += 1
    key = digest("doctor", str(os.getpid()))
    cache.put(key, b"doctor")
    path = cache.path(key)
    cache._memory.pop(key, None)
    healthy = cache.get(key) == b"doctor"
    if path is not None:
        path.unlink(missing_ok=True)
    text = f"{cache.directory}: {entries} entries, {total / 1e6:.1f} MB{f', {others} other files' if others else ''}"
    yield Line(
        "cache",
        f"{text}, healthy" if healthy else f"{text}; an entry that was written could not be read",
        "ok" if healthy else "broken",
        CACHE_HINT,
    )


def _temporary() -> Iterator[Line]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield Line(
        "temporary files",
        f"{folder}, {free / 1e9:.1f} GB free",
        "ok" if free > 1e8 else "broken",
        "make room, or set TMPDIR to a folder with some",
    )
    given = {name: knob for name, knob in knobs.ALL.items() if name in os.environ}
    for name, knob in given.items():
        try:
            knob.get()
        except ValueError as error:
            yield Line(name, str(error), "broken", f"unset {name}")
        else:
            yield Line(name, f"{os.environ[name]!r}: {knob.doc}")


LOOKS: tuple[tuple[str, Callable[[], Iterator[Line]]], ...] = (
    ("Python", _python),
    ("packages", _packages),
    ("C compiler", _compiler),
    ("threads", _threads),
    ("constants", _constants),
    ("NVRTC", _nvrtc),
    ("GPU", _gpu),
    ("cache", _cache),
    ("temporary files", _temporary),
)
