"""The CPU runtime: cache, compiler, pool, matrix product and arrays, and above all what must not break them."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import io
import itertools
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import long_tests
import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.codegen.text import read_template, template_dirs
from gradc.errors import CompilerError, CompilerMissing, DeviceError, InternalError, InvalidProblem, OutOfMemory
from gradc.runtime import cache
from gradc.runtime.cache import Cache, digest
from gradc.runtime.host import arrays, pool, toolchain

ROOT = Path(__file__).resolve().parents[2]
THREADS = (1, 2, 3, 5)

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(os.name != "posix", reason="the CPU target is for POSIX systems"),
]


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    """Another interpreter that runs the code."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition: Any, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# ---- Templates -----------------------------------------------------------------------------------------------------


def test_templates_are_found_and_stay_inside() -> None:
    assert all(path.is_dir() for path in template_dirs())
    assert "gradc_ctx" in read_template("cpu/runtime.h")
    for name in ("../pyproject.toml", "/etc/passwd", "cpu/nothing.h"):
        with pytest.raises(InternalError):
            read_template(name)


# ---- Cache ---------------------------------------------------------------------------------------------------------


def test_digest_depends_on_where_parts_end() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("a", b"b") == digest(b"a", "b")
    assert len(digest()) == 64


def test_cache_keeps_entries_for_another_process(tmp_path: Path) -> None:
    first = Cache(tmp_path / "new" / "cache")
    assert first.get("k") is None
    first.put("k", b"payload")
    first.put("empty", b"")
    second = Cache(tmp_path / "new" / "cache")
    assert second.get("k") == b"payload"
    assert second.get("empty") == b""
    assert (first.counters.misses, second.counters.hits, second.counters.misses) == (1, 2, 0)
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


def damage(data: bytes, how: str) -> bytes:
    flipped = bytearray(data)
    match how:
        case "empty":
            return b""
        case "torn":
            return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        case "truncated":
            return data[:-1]
        case "header only":
            return data[:30]
        case "too long":
            return data + b"x"
        case "other version":
            return data[:6] + b"\x02" + data[7:]
        case "huge length":
            flipped[12:20] = b"\xff" * 8
        case "payload bit":
            flipped[-1] ^= 1
        case "checksum bit":
            flipped[21] ^= 128
        case "key bit":
            flipped[52] ^= 4
    return bytes(flipped)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "torn",
        "truncated",
        "header only",
        "too long",
        "other version",
        "huge length",
        "payload bit",
        "checksum bit",
        "key bit",
    ],
)
def test_damaged_entry_is_dropped_and_rebuilt(tmp_path: Path, how: str) -> None:
    store = Cache(tmp_path / "c")
    store.put("key", b"payload" * 100)
    path = store.path("key")
    assert path is not None
    path.write_bytes(damage(path.read_bytes(), how))
    assert store.get("key") is None
    assert not path.exists()
    assert (store.counters.dropped, store.counters.misses) == (1, 1)
    store.put("key", b"again")
    assert store.get("key") == b"again"


def test_an_entry_outlives_a_read_that_the_system_refused(tmp_path: Path) -> None:
    """No descriptor is left, which says nothing of the entry."""
    store = Cache(tmp_path / "c")
    store.put("key", b"payload")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert store.get("key") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.counters.dropped == 0
    assert store.get("key") == b"payload"


def test_an_entry_outlives_a_shortage_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(io.BytesIO):
        def read(self, size: int = -1) -> bytes:
            if size > 1000:
                raise MemoryError
            return super().read(size)

    store = Cache(tmp_path / "c")
    store.put("key", bytes(5000))
    path = store.path("key")
    assert path is not None
    whole = path.read_bytes()
    load = cache.load_opened
    monkeypatch.setattr(cache, "load_opened", lambda file, *rest: load(Short(whole), *rest))
    assert store.get("key") is None and store.counters.dropped == 0
    monkeypatch.undo()
    assert store.get("key") == bytes(5000)


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    store.put("key", b"pay")
    path = store.path("key")
    assert path is not None
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert store.get("key") is None, f"bit {bit}"
        path.touch(mode=0o600)
        path.chmod(0o600)


def test_entry_of_another_key_or_writable_by_others_or_a_link_is_dropped(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    store.put("one", b"1")
    one, two = store.path("one"), store.path("two")
    assert one is not None and two is not None
    two.write_bytes(one.read_bytes())
    two.chmod(0o600)
    assert store.get("two") is None
    one.chmod(0o666)
    assert store.get("one") is None
    store.put("one", b"1")
    two.symlink_to(one)
    assert store.get("two") is None
    assert store.get("one") == b"1"
    os.mkfifo(two)  # must not wait for a writer
    assert store.get("two") is None
    assert store.counters.dropped == 4


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_directory_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others"):
        store = Cache(directory)
    store.put("k", b"v")
    assert store.get("k") == b"v"
    assert list(directory.iterdir()) == []


def test_directory_of_someone_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "c"
    directory.mkdir(mode=0o700)
    owner = directory.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        store = Cache(directory)
    assert store.directory is None


@pytest.mark.parametrize("where", ["/proc/gradc-cache", "file/cache"])
def test_directory_that_cannot_be_made(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        store = Cache(tmp_path / where)
    store.put("k", b"v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_failing_writes_warn_once_and_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = Cache(tmp_path / "c")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        store.put("a", b"1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put("b", b"2")
    assert (store.get("a"), store.get("b"), store.counters.write_failures) == (b"1", b"2", 2)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Path]:
    """A directory of a user to whom permissions apply; root becomes nobody for the time of the test."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are below one that only root may enter
        os.chmod(folder, 0o755)
        mine = Path(folder) / "mine"
        mine.mkdir()
        os.chown(mine, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield mine
        finally:
            os.seteuid(0)


def test_read_only_directory_still_serves(unprivileged: Path) -> None:
    Cache(unprivileged / "c").put("k", b"v")
    (unprivileged / "c").chmod(0o500)
    store = Cache(unprivileged / "c")
    with pytest.warns(RuntimeWarning, match="not writable|Permission denied"):
        store.put("l", b"w")
    assert (store.get("k"), store.get("l")) == (b"v", b"w")
    (unprivileged / "c").chmod(0o700)


def test_directory_deleted_under_the_cache(tmp_path: Path) -> None:
    store = Cache(tmp_path / "c")
    (tmp_path / "c").rmdir()
    with pytest.warns(RuntimeWarning):
        store.put("k", b"v")
    assert store.get("k") == b"v"


WRITER = """
import sys
from pathlib import Path
from gradc.runtime.cache import Cache
store = Cache(Path(sys.argv[1] if len(sys.argv) > 1 else {directory!r}))
print("ready", flush=True)
for round in range({rounds}):
    for key in range(8):
        store.put(str(key), bytes([key]) * (50_000 + (round * 7919) % 100_000))
"""


def test_two_processes_writing_at_once(tmp_path: Path) -> None:
    writers = [python(WRITER.format(directory=str(tmp_path / "c"), rounds=15)) for _ in range(2)]
    store = Cache(tmp_path / "c")
    while any(w.poll() is None for w in writers):
        for key in range(8):
            payload = store.get(str(key))
            assert payload is None or payload == bytes([key]) * len(payload)
    assert [w.communicate()[0] for w in writers] == ["ready\n", "ready\n"]
    assert store.counters.dropped == 0
    assert all(store.get(str(key)) is not None for key in range(8))


def test_kill_at_any_point_leaves_whole_entries(tmp_path: Path) -> None:
    for delay in (0.0, 0.003, 0.02, 0.07):
        wrote = Cache(tmp_path / "c").get("0") is not None
        writer = python(WRITER.format(directory=str(tmp_path / "c"), rounds=10_000))
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        if delay == 0.07 and not wrote:
            wait_for(lambda: Cache(tmp_path / "c").get("0") is not None)
        writer.kill()
        writer.communicate()
    store = Cache(tmp_path / "c")
    for key in range(8):
        payload = store.get(str(key))
        assert payload is None or payload == bytes([key]) * len(payload)
    assert store.counters.dropped == 0
    assert store.counters.hits > 0
    old = time.time() - 7200
    for left in (tmp_path / "c").glob(".tmp-*"):
        os.utime(left, (old, old))
    store.put("sweeps", b"")
    assert list((tmp_path / "c").glob(".tmp-*")) == []


def test_default_cache_follows_the_knobs(tmp_path: Path) -> None:
    with knobs.CACHE_DIR.set(str(tmp_path / "c")):
        assert cache.default_cache() is cache.default_cache()
        assert cache.default_cache().directory == tmp_path / "c"
        with knobs.CACHE.set(False):
            assert cache.default_cache().directory is None


# ---- Compiler ------------------------------------------------------------------------------------------------------


def script(tmp_path: Path, body: str) -> str:
    """A compiler that answers -v and then does as told."""
    path = tmp_path / "fake compiler"
    path.write_text(
        f'#!/bin/sh\nif [ "$*" = "-v" ]; then echo "fake version 1.0"; echo "Target: fake"; exit 0; fi\n{body}\n'
    )
    path.chmod(0o755)
    return shlex.quote(str(path))


def test_compiler_says_what_it_is() -> None:
    compiler = toolchain.find_compiler()
    assert compiler.version and compiler.target and len(compiler.identity) == 64
    assert toolchain.cpu_identity() == toolchain.cpu_identity() != ""


def test_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with knobs.CC.set("no-such-compiler -m64"), pytest.raises(CompilerMissing, match="no-such-compiler"):
        toolchain.find_compiler()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with knobs.CC.set(""), pytest.raises(CompilerMissing, match=r"gcc, clang and cc .* ziglang"):
        toolchain.find_compiler()
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # which is no folder, and not this one
    with knobs.CC.set(""), pytest.raises(CompilerMissing, match=r"gcc, clang and cc .* ziglang"):
        toolchain.find_compiler()


def test_compiler_that_cannot_even_start(tmp_path: Path) -> None:
    path = tmp_path / "cc"
    path.write_text("#!/bin/sh\necho broken installation >&2\nexit 3\n")
    path.chmod(0o755)
    with knobs.CC.set(str(path)), pytest.raises(CompilerError, match="exit status 3") as caught:
        toolchain.find_compiler()
    assert "broken installation" in caught.value.log
    path.write_bytes(b"\x7fELF garbage")
    with knobs.CC.set(f"{path} -x"), pytest.raises(CompilerError):
        toolchain.find_compiler()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo internal compiler error; exit 4", "exit status 4"),
        ("kill -9 $$", "SIGKILL"),
        ("kill -SEGV $$", "SIGSEGV"),
        ("exec sleep 10000", "too long"),
    ],
)
def test_crashing_compiler(tmp_path: Path, body: str, message: str) -> None:
    with knobs.CC.set(script(tmp_path, body)), pytest.raises(CompilerError, match=message) as caught:
        toolchain.compile_c("int answer;", timeout=0.5 if message == "too long" else toolchain.TIMEOUT)
    assert "    1  int answer;" in caught.value.source


def test_refused_source_comes_back_numbered() -> None:
    with pytest.raises(CompilerError) as caught:
        toolchain.compile_c("int fine;\nint x = ;\n")
    assert "    2  int x = ;" in caught.value.source
    assert "2:" in caught.value.log and "error" in caught.value.log
    with pytest.raises(CompilerError, match="unit 1") as caught:
        toolchain.compile_units(["int fine;", "int y = ;"])
    assert "int y = ;" in caught.value.source


def test_flag_that_a_compiler_does_not_take_is_dropped(tmp_path: Path) -> None:
    real = toolchain.find_compiler().argv
    body = f"""for flag in "$@"; do case "$flag" in -march=native|-mcpu=native|-fno-trapping-math)
echo "error: unknown argument: '$flag'"; exit 1;; esac; done
exec {shlex.join(real)} "$@\""""
    with knobs.CC.set(script(tmp_path, body)):
        library = toolchain.load_library(
            toolchain.compile_c('__attribute__((visibility("default"))) int f(void) { return 7; }'), "seven"
        )
    assert library.f() == 7


def test_kept_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRADC_OBJECTS: what was compiled from the same text, flags, headers and compiler is not compiled again, by any
    gradc; a compiler that is a script may be another one tomorrow.
    """
    compiled: list[str] = []
    add = toolchain._Objects.add

    def counted(objects: Any, number: int, units: Sequence[str]) -> None:
        compiled.append(units[0])
        add(objects, number, units)

    monkeypatch.setattr(toolchain._Objects, "add", counted)
    one, two = "int one;", "int two;"
    with knobs.OBJECTS.set(str(tmp_path / "objects")), knobs.OPTIMIZE.set("2"):
        first = toolchain.compile_libraries([[one], [two]])
        assert compiled == [one, two]
        assert toolchain.compile_libraries([[two], ["int three;"], [one]])[::2] == first[::-1]
        assert compiled == [one, two, "int three;"]
        with pytest.raises(CompilerError):
            toolchain.compile_c("int x = ;")
        with pytest.raises(CompilerError):  # a refusal is not kept
            toolchain.compile_c("int x = ;")
        assert len(compiled) == 5
        toolchain.compile_c(one, extra=("-DX",))
        with knobs.OPTIMIZE.set("0"):
            toolchain.compile_c(one)
        monkeypatch.setattr(toolchain, "headers", lambda language: ("other",))
        toolchain.compile_c(one)
        assert compiled[5:] == [one] * 3
        wrapper = script(tmp_path, f'exec {shlex.join(toolchain.find_compiler().argv)} "$@"')
        with knobs.CC.set(wrapper):
            toolchain.compile_c(one)
            toolchain.compile_c(one)
        assert compiled[8:] == [one] * 2
    toolchain.compile_c(one)
    assert compiled[10:] == [one]


def test_a_precompiled_header_changes_no_code(tmp_path: Path) -> None:
    """GRADC_OBJECTS keeps the headers that units begin with, by level; one that gcc cannot use costs time alone."""
    if "gcc version" not in toolchain.find_compiler().version:
        pytest.skip("headers are precompiled for gcc")
    visible = '__attribute__((visibility("default")))'
    text = f"{toolchain._C_HEADER}{visible} float f(float x) {{ return exponent_f32(x); }}\n"
    other = text.replace("(x)", "(-x)")
    plain = {level: compiled_at(level, text) for level in "02"}
    kept = tmp_path / "objects"
    with knobs.OBJECTS.set(str(kept)):
        for count, level in enumerate(plain, 1):
            assert compiled_at(level, text) == plain[level]
            assert len(list(kept.glob("*.gch"))) == count
        assert compiled_at("2", f"int one;\n{text}") != plain["2"]  # begins with something else
        found = list(kept.glob("*.gch"))
        for path in found:
            path.write_bytes(b"gpch" + bytes(100))
        assert compiled_at("2", other) != plain["2"]
        for size in (100, 4096, 200_000):  # what another process finds is made anew
            for path in found:
                with path.open("r+b") as file:
                    file.truncate(size)
            toolchain._precompiled.cache_clear()
            assert compiled_at("0", f"{text}int another{size};\n") != plain["0"]
            assert max(path.stat().st_size for path in found) > 1_000_000
        for path in found:
            path.unlink()
        assert compiled_at("0", other) != plain["0"]


def compiled_at(level: str, text: str) -> bytes:
    with knobs.OPTIMIZE.set(level):
        return toolchain.compile_c(text)


def test_no_level_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRADC_OPTIMIZE= is as good as none; -O alone would be -O1."""
    for text in (None, "", "2"):
        monkeypatch.delenv("GRADC_OPTIMIZE") if text is None else monkeypatch.setenv("GRADC_OPTIMIZE", text)
        assert "-O2" in toolchain._flags(toolchain.find_compiler(), "c"), text


@pytest.mark.parametrize("level", ["0", "1", "3"])
def test_a_level_of_optimisation_changes_no_value(level: str, tmp_path: Path) -> None:
    graph = gradc.trace(lambda x, w: gradc.ops.softmax(x @ w, -1), x="f32[N,33]", w="f32[33,17]")
    given = {"x": np.random.default_rng(0).standard_normal((9, 33)).astype("f4"), "w": np.ones((33, 17), "f4")}
    with knobs.OPTIMIZE.set("2"):
        wanted = gradc.compile(graph, target="cpu")(**given)
    with knobs.OPTIMIZE.set(level):
        np.testing.assert_array_equal(gradc.compile(graph, target="cpu")(**given), wanted)


def test_libraries_loaded_one_after_another_are_different() -> None:
    source = '__attribute__((visibility("default"))) int f(void) {{ return {}; }}'
    libraries = [toolchain.load_library(toolchain.compile_c(source.format(i)), "same name/../x") for i in range(3)]
    assert [library.f() for library in libraries] == [0, 1, 2]
    with pytest.raises(CompilerError, match="cannot be loaded"):
        toolchain.load_library(b"not a library", "x")


def test_a_function_that_is_not_there_is_named() -> None:
    made = toolchain.compile_c("float log1q_f32(float); float (*f)(float) = log1q_f32;")
    with pytest.raises(CompilerError, match=r"log1q_f32, which templates/common/math\.h lacks"):
        toolchain.load_library(made, "x")


def test_units_share_symbols_and_the_header() -> None:
    first = (
        '#include "runtime.h"\n#include <math.h>\nint two(void);\n'
        '__attribute__((visibility("default"))) double f(void) { return sqrt(two() * 2.0); }'
    )
    library = toolchain.load_library(toolchain.compile_units([first, "int two(void) { return 2; }"]), "units")
    library.f.restype = ctypes.c_double
    assert library.f() == 2.0


def test_programs_are_found_as_by_which(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, mode in ((first, 0o644), (second, 0o755)):
        (folder / "cc").mkdir(parents=True)  # a folder of that name is none
        (folder / "tool").write_text("")
        (folder / "tool").chmod(mode)
    search = f"{tmp_path}:{first}:{second}"
    for name in ("tool", "cc", "none", str(first / "tool"), str(second / "tool"), f"{tmp_path}/none"):
        assert toolchain._program(name, search) == shutil.which(name, path=search)
    assert toolchain._program("tool", search) == str(second / "tool")


COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] + [f"{sys.executable} -m ziglang cc"] * (
    importlib.util.find_spec("ziglang") is not None
)


@pytest.mark.parametrize("command", COMPILERS, ids=lambda command: command.split("/")[-1])
def test_every_compiler_of_this_machine_builds_the_runtime(command: str) -> None:
    with knobs.CC.set(command):
        built = {
            name: toolchain.load_library(toolchain.compile_c(read_template(path)), "other")
            for name, path in pool._SOURCES.items()
        }
    assert built[pool.RUNTIME].gradc_vector_bytes() in (16, 32, 64)
    assert all(hasattr(built[name], f"gradc_{name}_kernels") for name in pool.KERNELS)


@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/host/toolchain.py")
def test_the_runtime_and_a_kernel_compile_for_arm(tmp_path: Path, judged: Callable[..., None]) -> None:
    """Without a warning; what sets the floating-point environment there is assembly of its own."""
    pytest.importorskip("ziglang")
    module = gradc.compile(
        gradc.trace(lambda x: gradc.ops.softmax(gradc.ops.tanh(x)), x="f32[N,M]"), wrt=["x"], target="cpu"
    )
    texts = {**{name: read_template(path) for name, path in pool._SOURCES.items()}, "kernels": module.forward.source}
    judged(*pool.texts(), *texts.values())
    for name, text in texts.items():
        (tmp_path / f"{name}.c").write_text(text)
        flags = [
            flag for flag in toolchain.FLAGS if flag != "-march=native" and not flag.startswith("-fno-t")
        ]  # gcc's alone
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            "aarch64-linux-gnu",
            *flags,
            "-Wall",
            "-Werror",
            "-Wno-unused-function",
            "-Wno-pass-failed",
        ]
        for folder in template_dirs():
            command += ["-iquote", str(folder / "cpu"), "-iquote", str(folder / "common")]
        subprocess.run([*command, "-c", "-o", f"{name}.o", f"{name}.c"], cwd=tmp_path, check=True)
        assert (tmp_path / f"{name}.o").read_bytes()[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64


def test_interrupt_stops_the_compiler_and_cleans_up(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    compiler = script(tmp_path, f"echo $$ > {shlex.quote(str(tmp_path / 'pid'))}\nsleep 10000")
    code = "from gradc.runtime.host import toolchain; toolchain.compile_units(['int x;', 'int y;', 'int z;'])"
    process = python(code, CC=compiler, TMPDIR=str(temporary), GRADC_CACHE_DIR=str(tmp_path / "c"))
    pid_file = tmp_path / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert "KeyboardInterrupt" in output
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# ---- Pool ----------------------------------------------------------------------------------------------------------

BODIES = r"""
#include "runtime.h"
#define EXPORT __attribute__((visibility("default")))

typedef struct { const gradc_ctx *ctx; int64_t *out; int64_t inner; } job;

static void inner_body(const void *args, int64_t task) {
  __atomic_fetch_add((int64_t *)args, task + 1, __ATOMIC_RELAXED);
}

static void body(const void *args, int64_t task) {
  const job *j = args;
  int64_t sum = 0;
  if (j->inner) j->ctx->parallel_for(j->ctx, j->inner, inner_body, &sum);
  __atomic_fetch_add(&j->out[task], 1000 * (task + 1) + sum, __ATOMIC_RELAXED);
}

EXPORT void run(const gradc_ctx *ctx, int64_t tasks, int64_t inner, int64_t *out) {
  job j = {ctx, out, inner};
  ctx->parallel_for(ctx, tasks, body, &j);
}

static void bad(const void *args, int64_t task) {
  const gradc_ctx *ctx = args;
  if (task % 7 == 5) gradc_report(ctx, GRADC_INDEX_OUT_OF_RANGE, 2, task, -task, 99);
  if (task % 7 == 6) gradc_report(ctx, GRADC_INDEX_OUT_OF_RANGE, 3, 0, 0, 1);
}

EXPORT int report(const gradc_ctx *ctx, int64_t tasks) {
  ctx->parallel_for(ctx, tasks, bad, ctx);
  return gradc_failed(ctx);
}

static void slow_body(const void *args, int64_t task) {
  volatile double x = (double)task;
  for (int64_t i = 0; i < *(const int64_t *)args; i++) x = x * 1.0000001 + 1;
}

EXPORT void slow(const gradc_ctx *ctx, int64_t tasks, int64_t steps) {
  ctx->parallel_for(ctx, tasks, slow_body, &steps);
}
"""


@pytest.fixture(scope="module")
def bodies() -> ctypes.CDLL:
    return toolchain.load_library(toolchain.compile_c(BODIES), "bodies")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    yield
    if pool._loaded:
        pool.set_num_threads(2)


def run(bodies: ctypes.CDLL, tasks: int, inner: int = 0) -> np.ndarray:
    out = np.zeros(max(tasks, 1), np.int64)
    bodies.run(
        pool.new_context().pointer, ctypes.c_int64(tasks), ctypes.c_int64(inner), ctypes.c_void_p(out.ctypes.data)
    )
    return out[:tasks]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("inner", [0, 10])
def test_each_task_runs_once_nested_or_not(bodies: ctypes.CDLL, threads: int, inner: int) -> None:
    pool.set_num_threads(threads)
    assert pool.num_threads() == threads
    for tasks in (0, 1, 2, 3, 17, 1000):
        for _ in range(20):
            assert (run(bodies, tasks, inner) == 1000 * np.arange(1, tasks + 1) + inner * (inner + 1) // 2).all()


def test_lowest_error_wins(bodies: ctypes.CDLL) -> None:
    for threads in THREADS:
        pool.set_num_threads(threads)
        for _ in range(20):
            context = pool.new_context()
            assert bodies.report(context.pointer, ctypes.c_int64(500)) == 1
            assert context.error == (1, 2, 5, -5, 99)
        context.clear()
        assert context.code == 0 and bodies.report(context.pointer, ctypes.c_int64(5)) == 0


def test_wrong_numbers_of_threads() -> None:
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match="1 to 1024"):
            pool.set_num_threads(threads)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"GRADC_NUM_THREADS": "3", "OMP_NUM_THREADS": "4"}, "3"), ({"OMP_NUM_THREADS": "4,2"}, "4")],
)
def test_size_comes_from_the_environment(environment: dict[str, str], threads: str) -> None:
    process = python(
        "from gradc.runtime.host import pool; print(pool.num_threads())",
        GRADC_CACHE_DIR=knobs.CACHE_DIR.get(),
        **environment,
    )
    assert process.communicate(timeout=600)[0].strip() == threads


def test_four_python_threads_at_once(bodies: ctypes.CDLL) -> None:
    pool.set_num_threads(3)
    wrong: list[int] = []

    def caller(seed: int) -> None:
        for i in range(300):
            tasks = 1 + (seed * 31 + i * 17) % 40
            if not (run(bodies, tasks, i % 3) == 1000 * np.arange(1, tasks + 1) + (i % 3) * (i % 3 + 1) // 2).all():
                wrong.append(i)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for size in (2, 5, 1, 3):  # and the size changes meanwhile
        pool.set_num_threads(size)
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert wrong == []


def in_child(work: Any) -> int:
    """The exit status of a forked child that does the work; 0 if it returned true."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(300)
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork(bodies: ctypes.CDLL) -> None:
    pool.set_num_threads(3)
    a = np.random.default_rng(0).standard_normal((1, 300, 300))
    expected = np.empty_like(a)
    pool.matmul(a, a, expected)

    def work() -> bool:
        out = np.empty_like(a)
        pool.matmul(a, a, out)
        again = in_child(lambda: (run(bodies, 100) == 1000 * np.arange(1, 101)).all())  # a child of the child
        return (run(bodies, 100) == 1000 * np.arange(1, 101)).all() and (out == expected).all() and again == 0

    assert in_child(work) == 0
    assert work()


def test_fork_while_another_thread_has_the_pool(bodies: ctypes.CDLL) -> None:
    pool.set_num_threads(2)
    context = pool.new_context()
    busy = threading.Thread(target=lambda: bodies.slow(context.pointer, ctypes.c_int64(40), ctypes.c_int64(3_000_000)))
    busy.start()
    time.sleep(0.02)
    for _ in range(5):
        assert in_child(lambda: (run(bodies, 100) == 1000 * np.arange(1, 101)).all()) == 0
    busy.join(600)
    assert not busy.is_alive()


# ---- Matrix product ------------------------------------------------------------------------------------------------

SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 7, 5),
    (1, 7, 1, 5),
    (1, 5, 7, 1),
    (1, 12, 32, 16),
    (1, 13, 33, 257),
    (1, 290, 70, 300),
    (1, 129, 257, 64),
    (1, 20, 3, 8200),
    (1, 3, 300, 4200),
    (1, 20, 200, 130),
    (1, 90, 20, 130),
    (2, 130, 140, 150),
    (2, 1, 300, 300),
    (3, 37, 41, 29),
    (200, 5, 6, 7),
    (70, 130, 30, 20),
    (0, 3, 4, 5),
    (2, 0, 4, 5),
    (2, 3, 0, 5),
    (2, 3, 4, 0),
]


def lying(x: np.ndarray, how: str) -> np.ndarray:
    """The same numbers, [batch, rows, cols], with the strides that the letter names."""
    batch, rows, cols = x.shape
    if how == "n":
        return x
    if how == "b":
        return np.broadcast_to(x[:1], x.shape)
    memory = {
        "t": lambda: np.empty((batch, cols, rows), x.dtype).transpose(0, 2, 1),
        "s": lambda: np.empty((batch, 2 * rows, 2 * cols), x.dtype)[:, ::2, ::-2],  # every second of each, backwards
        "w": lambda: np.empty((batch, rows + 3, cols + 5), x.dtype)[
            :, 1 : rows + 1, 2 : cols + 2
        ],  # a window of something wider
        "v": lambda: np.empty((batch, cols + 5, rows + 3), x.dtype)[:, 1 : cols + 1, 2 : rows + 2].transpose(0, 2, 1),
        "u": lambda: np.empty(x.size + 1, x.dtype)[1:].reshape(x.shape),  # begins between two vectors
    }[how]()
    memory[...] = x
    return memory


def operands(batch: int, m: int, n: int, k: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m * 1000 + n * 10 + k)
    return random.standard_normal((batch, m, k)).astype(dtype), random.standard_normal((batch, k, n)).astype(dtype)


BF16 = ml_dtypes.bfloat16
DTYPES = {"f4": "f4", "f8": "f8", BF16: "f4"}
"""Of operands -> of their product."""
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


@long_tests.values
@every_dtype
@pytest.mark.parametrize("layout", ["nn", "tn", "nt", "tt", "ss", "wb", "bw"])
def test_matmul_is_right_and_the_same_for_any_number_of_threads(layout: str, dtype: Any) -> None:
    results: dict[Any, bytes] = {}
    wide = np.dtype(DTYPES[dtype])
    for threads in THREADS:
        pool.set_num_threads(threads)
        for shape in SHAPES:
            batch, m, n, k = shape
            a, b = (lying(x, how) for x, how in zip(operands(batch, m, n, k, dtype), layout, strict=True))
            out = np.full((batch, m, n), np.nan, wide)
            pool.matmul(a, b, out)
            if threads == THREADS[0]:
                exact = np.matmul(a.astype("f8"), b.astype("f8"))
                bound = (k + 2) * np.finfo(wide).eps * np.matmul(abs(a).astype("f8"), abs(b).astype("f8"))
                assert (abs(out - exact) <= bound).all(), shape
                more = exact.astype(wide)
                pool.matmul(a, b, more, accumulate=True)
                assert (abs(more - 2 * exact) <= 2 * bound + np.finfo(wide).eps * abs(exact)).all(), shape
                results[shape] = out.tobytes()
            assert out.tobytes() == results[shape], (threads, shape)


@every_dtype
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 70, 300])
def test_matmul_has_the_same_bits_however_operands_lie(columns: int, dtype: Any) -> None:
    """Plain, transposed, strided, in windows, at any alignment, with and without accumulation: one row, one column,
    edges of tiles, long sums.
    """
    random = np.random.default_rng(columns)
    for batch, m, k in [
        *itertools.product((1,), (1, 2, 5, 12, 13, 40), (1, 7, 15, 16, 65, 300)),
        (3, 20, 30),
        (1, 5, 540),
        (1, 90, 700),
        (1, 290, 130),
        (1, 1, 4200),
        (1, 3, 4200),
    ]:
        a, b = operands(batch, m, columns, k, dtype)
        before = random.standard_normal((batch, m, columns)).astype(DTYPES[dtype])
        seen = set()
        for layout in ("nn", "nt", "tn", "tt", "ss", "wv", "vw", "uu", "ns", "sn"):
            out, more = np.empty_like(before), before.copy()
            for to, accumulate in ((out, False), (more, True)):
                pool.matmul(lying(a, layout[0]), lying(b, layout[1]), to, accumulate=accumulate)
            seen.add((out.tobytes(), more.tobytes()))
        assert len(seen) == 1, (batch, m, columns, k)


@every_dtype
@pytest.mark.parametrize("columns", [1500, 2300])
def test_one_row_has_the_same_bits_however_its_columns_are_cut(columns: int, dtype: Any) -> None:
    """Threads decide how wide a task is; a part of the columns is a narrower product."""
    a, b = operands(1, 1, columns, 300, dtype)
    seen = set()
    for threads in THREADS:
        pool.set_num_threads(threads)
        for layout in ("n", "t"):
            out = np.empty((1, 1, columns), DTYPES[dtype])
            pool.matmul(a, lying(b, layout), out)
            seen.add(out.tobytes())
    part = np.empty((1, 1, 700), DTYPES[dtype])
    pool.matmul(a, b[:, :, 500:1200], part)
    assert len(seen) == 1
    assert part.tobytes() == out[:, :, 500:1200].tobytes()


@pytest.mark.parametrize("dtype", ["f4", BF16], ids=["float32", "bfloat16"])
def test_an_element_does_not_depend_on_its_neighbours(dtype: Any) -> None:
    """Rows and columns of a product are those of a product of fewer, from two of each on and while k is not cut."""
    a, b = operands(1, 300, 520, 700, dtype)
    whole = np.empty((1, 300, 520), "f4")
    pool.matmul(a, b, whole)
    for rows, columns in (
        (slice(0, 20), slice(0, 520)),
        (slice(37, 300), slice(3, 100)),
        (slice(7, 9), slice(500, 520)),
        (slice(7, 28), slice(0, 9)),
    ):
        part = np.empty(whole[:, rows, columns].shape, "f4")
        pool.matmul(a[:, rows], b[:, :, columns], part)
        np.testing.assert_array_equal(part, whole[:, rows, columns])


@pytest.mark.parametrize("steps,per", [(16640, 64), (33000, 33)])
@pytest.mark.parametrize("layout", ["rows", "columns", "left"])
def test_groups_of_scales_go_on_behind_what_is_packed_at_a_time(steps: int, per: int, layout: str) -> None:
    """A product of more steps than one slab has, of codes with a scale for each group of steps: integers, exact in
    f32.
    """
    random, groups = np.random.default_rng(0), steps // per
    x = random.integers(-3, 4, (50, steps)).astype("f4")
    q, s = random.integers(-9, 10, (40, steps)).astype("i1"), random.integers(1, 5, (40, groups)).astype("f4")
    wanted = x.astype("i8") @ (q * np.repeat(s, per, axis=1)).T.astype("i8")
    if layout == "columns":
        product = lambda x, q, s: x @ ops.dequantize(q, s, block=(per, 1))
        q, s = np.ascontiguousarray(q.T), np.ascontiguousarray(s.T)
    elif layout == "rows":
        product = lambda x, q, s: ops.linear(x, ops.dequantize(q, s, block=(1, per)))
    else:
        product, wanted = (lambda x, q, s: ops.dequantize(q, s, block=(1, per)) @ ops.transpose(x)), wanted.T
    assert np.abs(wanted).max() < 2**24
    shapes = {"q": f"i8[{q.shape[0]},{q.shape[1]}]", "s": f"f32[{s.shape[0]},{s.shape[1]}]"}
    module = gradc.compile(gradc.trace(product, x=f"f32[N,{steps}]", **shapes), target="cpu")
    (call,) = module.forward.program.steps
    assert f"per (k: {per})" in str(call)
    assert np.array_equal(module(x=x, q=q, s=s), wanted)


@pytest.mark.parametrize("dtype", ["f4", BF16], ids=["float32", "bfloat16"])
def test_matmul_of_several_slabs(dtype: Any) -> None:
    """More rows, columns and steps than are packed at a time, none of them whole panels."""
    a, b = operands(1, 1031, 1101, 521, dtype)
    exact, results = np.matmul(a.astype("f8"), b.astype("f8")), set()
    for threads in THREADS:
        pool.set_num_threads(threads)
        for layout in ("nn", "tt"):
            out = np.full(exact.shape, np.nan, "f4")
            pool.matmul(lying(a, layout[0]), lying(b, layout[1]), out)
            results.add(out.tobytes())
    assert len(results) == 1
    assert (abs(out - exact) <= 75 * np.finfo("f4").eps * np.matmul(abs(a).astype("f8"), abs(b).astype("f8"))).all()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 7, 500, 600),
        (1, 90, 1001, 33),
        (1, 40, 60, 4000),
        (1, 64, 3000, 600),
        (1, 3000, 64, 1200),
        (1, 3000, 7, 600),
        (1, 700, 900, 300),
        (3, 200, 500, 700),
    ],
)
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_parts_are_multiplied_by_threads_of_their_own(shape: tuple[int, ...], layout: str) -> None:
    """A result is cut by the number of threads, whose parts meet without a gap; more of them than processors are in
    each other's way.
    """
    batch, m, n, k = shape
    a, b = operands(batch, m, n, k, "f4")
    a, b = lying(a, layout[0]), lying(b, layout[1])
    pool.set_num_threads(1)
    expected, out = np.empty((2, batch, m, n), "f4")
    pool.matmul(a, b, expected)
    for threads in (2, 7, 16):
        pool.set_num_threads(threads)
        for _ in range(25):
            out[...] = np.nan
            pool.matmul(a, b, out)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_the_last_columns_of_a_part_fill_no_vector(rows: int, dtype: str) -> None:
    """Few rows leave columns where they are, but for those that fill no vector, however many of a part do."""
    for columns in (127, 187, 190, 253, 318, 501):
        a, b = operands(1, rows, columns, 3000, dtype)
        pool.set_num_threads(1)
        expected, out = np.empty((2, 1, rows, columns), dtype)
        pool.matmul(a, b, expected)
        for threads in (2, 3, 4, 7, 16):
            pool.set_num_threads(threads)
            out[...] = np.nan
            pool.matmul(a, b, out)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kernels", ["f32", *pool.KERNELS])
def test_what_a_thread_keeps_is_enough_for_any_part_of_a_product(kernels: str) -> None:
    """A part is a product of fewer rows and columns, whose slabs may have more steps."""
    random = np.random.default_rng(0)
    for m, n, k in random.integers(2, 3000, (200, 3)).tolist():
        most = pool.pack_bytes(kernels, m, n, k)
        for part in random.integers(2, (m + 1, n + 1), (20, 2)).tolist():
            assert pool.pack_bytes(kernels, *part, k) <= most, (m, n, k, part)


@every_dtype
@pytest.mark.parametrize("rows", [1, 2, 15, 40])
@pytest.mark.parametrize("k", [200, 4095, 65536])
def test_long_sums_round_as_short_ones(k: int, rows: int, dtype: Any) -> None:
    """Runs of 64 steps, the sums of runs, and at most 16 stretches of them: no element is rounded more often."""
    a, b = (abs(x) for x in operands(1, rows, 17, k, dtype))
    out = np.empty((1, rows, 17), DTYPES[dtype])
    pool.matmul(a, b, out)
    exact = np.matmul(a.astype(np.longdouble), b.astype(np.longdouble))
    roundings = 64 + k / 64 + 17
    assert (abs(out - exact) <= roundings * np.finfo(out.dtype).eps / 2 * exact).all()


def test_a_new_thread_multiplies_what_it_need_not_pack() -> None:
    a, b = operands(1, 64, 64, 64, "f4")
    expected, out = np.empty((2, 1, 64, 64), "f4")
    pool.matmul(a, b, expected)
    thread = threading.Thread(target=pool.matmul, args=(a, b, out))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["f4", BF16], ids=["float32", "bfloat16"])
def test_matmul_keeps_nan_and_inf(dtype: Any) -> None:
    a = np.zeros((1, 20, 30), dtype)
    b = np.zeros((1, 30, 40), dtype)
    a[0, 3, 4], b[0, 5, 6] = np.nan, np.inf
    for rows, columns in ((20, 40), (20, 1), (1, 40)):
        out = np.empty((1, rows, columns), "f4")
        pool.matmul(a[:, 3 : 3 + rows] if rows == 1 else a, b[:, :, 6:7] if columns == 1 else b, out)
        assert np.isnan(out).sum() == {800: 40 + 20 - 1, 20: 20, 40: 40}[out.size]
    assert np.isnan(out[0, 0]).all()


def of_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product by what runs here, addition by addition: each odd step before the even one, in runs of 64."""
    batch, m, k = a.shape
    wide = [x.astype("f4") for x in (a, b)]
    total = np.zeros((batch, m, b.shape[2]), "f4")
    if pool.bf16_product() == "f32":
        pool.matmul(*wide, total)
        return total
    products = [wide[0][:, :, p, None] * wide[1][:, None, p] for p in range(k)]  # exact
    for begin in range(0, k, 64):
        run = np.zeros_like(total)
        for p in range(begin, min(begin + 64, k), 2):
            for step in (p + 1, p) if p + 1 < k else (p,):
                run = run + products[step]
        total = total + run if begin else run
    return total


@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 1), (1, 13, 33, 65), (2, 24, 64, 128), (1, 40, 70, 333), (1, 200, 3, 31), (1, 5, 300, 1100)]
)
@pytest.mark.parametrize("layout", ["nn", "tt", "ss"])
def test_bf16_products_have_the_bits_that_their_kernels_say(shape: tuple[int, ...], layout: str) -> None:
    """The order of both steps of a pair, runs, edges of panels, odd numbers of steps."""
    if pool.bf16_product() == "tiles":
        pytest.skip("the order of additions in a tile is not modelled here")
    a, b = (lying(x, how) for x, how in zip(operands(*shape, BF16), layout, strict=True))
    out = np.full((shape[0], *shape[1:3]), np.nan, "f4")
    pool.matmul(a, b, out)
    np.testing.assert_array_equal(out.view("u4"), of_bf16(a, b).view("u4"))


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("at", [(0, 0), (50, 7), (50, 8), (69, 88)], ids=str)
@pytest.mark.parametrize("subnormal", [9e-39, -1e-40])
@pytest.mark.parametrize("where", ["left", "right"])
def test_a_subnormal_is_not_taken_for_zero(where: str, subnormal: float, at: tuple[int, int], layout: str) -> None:
    """The kernels of bf16 would; nor is any other element of such a product changed: it is left to those of f32."""
    a, b = operands(1, 70, 70, 89, BF16)
    row, step = at
    (a[0] if where == "left" else b[0].T)[row, step] = subnormal
    (b[0, step, :] if where == "left" else a[0, :, step])[...] = 5e37
    out, expected = np.empty((2, 1, 70, 70), "f4")
    pool.matmul(lying(a, layout[0]), lying(b, layout[1]), out)
    exact = np.matmul(a.astype("f8"), b.astype("f8"))
    assert (abs(out - exact) <= 1e-5 * np.matmul(abs(a).astype("f8"), abs(b).astype("f8"))).all()
    pool.matmul(a.astype("f4"), b.astype("f4"), expected)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("k", [31, 700])
def test_of_subnormal_sums_less_is_lost_than_the_least_normal_number_an_addition(k: int) -> None:
    a, b = (x * BF16(scale) for x, scale in zip(operands(1, 40, 50, k, BF16), (2.0**-60, 2.0**-66), strict=True))
    out = np.empty((1, 40, 50), "f4")
    pool.matmul(a, b, out)
    exact = np.matmul(a.astype("f8"), b.astype("f8"))
    bound = k * np.finfo("f4").eps * np.matmul(abs(a).astype("f8"), abs(b).astype("f8"))
    assert (abs(out - exact) <= bound + (k + k / 64) * np.finfo("f4").smallest_normal).all()


# Integers of 8 bits: exact modulo 2^32, whatever multiplies them.

I8_SHAPES = [
    *SHAPES,
    (1, 1, 33, 70),
    (1, 16, 100, 1030),
    (3, 5, 33, 129),
    (1, 48, 97, 2100),
    (1, 49, 97, 2100),
    (1, 97, 61, 2047),
    (2, 64, 64, 2049),
    (1, 600, 2, 300),
    (1, 35, 3, 40000),
    (1, 2, 5, 140000),
]


def integer_operands(batch: int, m: int, n: int, k: int, dtypes: tuple[str, str]) -> list[np.ndarray]:
    """Integers of the whole range, a quarter of them its ends, pairs of whose products leave 16 bits."""
    random = np.random.default_rng(m * 1000 + n * 10 + k)
    found = []
    for shape, dtype in zip(((batch, m, k), (batch, k, n)), dtypes, strict=True):
        ends = np.iinfo(dtype)
        drawn = random.integers(ends.min, ends.max + 1, shape)
        found.append(
            np.where(random.random(shape) < 0.25, random.choice([ends.min, ends.max], shape), drawn).astype(dtype)
        )
    return found


def exact_integers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product modulo 2^32: every sum of these is an integer of f64."""
    return np.matmul(a.astype("f8"), b.astype("f8")).astype("i8").astype("i4")


every_sign = pytest.mark.parametrize("dtypes", list(itertools.product(("i1", "u1"), repeat=2)), ids="-".join)


@every_sign
def test_integer_products_are_exact(dtypes: tuple[str, str]) -> None:
    """However operands lie, also where sums wrap around, at edges of panels and of vectors of steps, added to what is
    there.
    """
    wrapped = 0
    for shape in I8_SHAPES:
        plain = integer_operands(*shape, dtypes)
        exact_plain, wide = exact_integers(*plain), shape[0] * shape[1] * shape[2] * shape[3] > 1 << 19
        wrapped += int((exact_plain != np.matmul(*(x.astype("f8") for x in plain))).sum())
        for layout in ("nt", "ss") if wide else ("nn", "tn", "nt", "tt", "ss", "wb", "bw", "vv", "uu", "wv"):
            a, b = (lying(x, how) for x, how in zip(plain, layout, strict=True))
            exact = exact_integers(a, b) if "b" in layout else exact_plain
            out, more = np.full(exact.shape, -1, "i4"), exact[..., ::-1].copy()
            pool.matmul(a, b, out)
            np.testing.assert_array_equal(out, exact, err_msg=f"{shape} {layout}")
            pool.matmul(a, b, more, accumulate=True)
            np.testing.assert_array_equal(more, exact + exact[..., ::-1], err_msg=f"{shape} {layout}")
    assert wrapped or dtypes != ("u1", "u1")


@every_sign
def test_integer_products_of_several_slabs_are_exact(dtypes: tuple[str, str]) -> None:
    """More rows, columns and steps than are packed at a time, by any number of threads."""
    a, b = integer_operands(1, 1031, 1101, 2100, dtypes)
    exact = exact_integers(a, b)
    for threads in THREADS:
        pool.set_num_threads(threads)
        for layout in ("nn", "tt"):
            out = np.full(exact.shape, -1, "i4")
            pool.matmul(lying(a, layout[0]), lying(b, layout[1]), out)
            np.testing.assert_array_equal(out, exact)


def test_matmul_from_four_python_threads() -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 300, 200)), random.standard_normal((2, 200, 300))
    expected = np.empty((2, 300, 300))
    pool.matmul(a, b, expected)
    wrong: list[int] = []

    def caller() -> None:
        for i in range(10):
            out = np.empty_like(expected)
            pool.matmul(a, b, out)
            if out.tobytes() != expected.tobytes():
                wrong.append(i)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_matmul_refuses_what_does_not_fit() -> None:
    a, out = np.zeros((1, 3, 4)), np.zeros((1, 3, 3))
    for b in (np.zeros((1, 3, 3)), np.zeros((2, 4, 3)), np.zeros((1, 4, 3), "f4")):
        with pytest.raises(ValueError, match="matmul: float64"):
            pool.matmul(a, b, out)


# ---- Arrays --------------------------------------------------------------------------------------------------------


def test_pool_gives_a_block_back_when_the_last_view_dies() -> None:
    mine = arrays.OutputPool()
    first = mine.empty((1000, 1000), "f4")
    address = first.ctypes.data
    assert (
        first.shape == (1000, 1000) and first.flags.c_contiguous and first.flags.writeable and address % (2 << 20) == 0
    )
    view = first[10:20].T
    del first
    gc.collect()
    other = mine.empty((1000, 1000), "f4")
    assert other.ctypes.data != address and (mine.fresh, mine.reused) == (2, 0)
    view[...] = 1
    del view
    again = mine.empty((500, 1000), "f8")  # the same size class
    assert again.ctypes.data == address and mine.reused == 1


def test_pool_keeps_no_more_than_its_limit() -> None:
    mine = arrays.OutputPool(limit=10 << 20)
    several = [mine.empty((1 << 20,), "f4") for _ in range(6)]
    assert mine.retained == 0
    del several
    assert 0 < mine.retained <= 10 << 20
    mine.trim()
    assert mine.retained == 0


def test_pool_edges() -> None:
    assert arrays.empty((0, 5), "f4").shape == (0, 5)
    assert arrays.empty((), "f8").shape == ()
    assert arrays.empty((3,), ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    assert arrays.empty((1 << 20,), ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    for shape in ((1 << 55,), (1 << 40, 1 << 40)):
        with pytest.raises(OutOfMemory):
            arrays.empty(shape, "f4")
    for size in (1, 4095, arrays.SMALL, (1 << 20) + 1, (2 << 20) - 1, 123_456_789):
        assert size <= arrays._size_class(size) <= size * 1.125 + 4096
    assert arrays.nbytes((1 << 40, 1 << 40), "f8") == 1 << 83


def test_pool_from_four_threads() -> None:
    mine = arrays.OutputPool(limit=8 << 20)
    wrong: list[int] = []

    def caller(mark: int) -> None:
        for i in range(200):
            array = mine.empty((200_000 + 1000 * (i % 3),), "i4")
            array[::1000] = mark
            if (array[::1000] != mark).any():
                wrong.append(i)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and mine.reused > 0 and mine.retained <= 8 << 20


def test_child_writes_do_not_reach_the_parent() -> None:
    array = arrays.empty((1 << 20,), "u1")
    array[...] = 1

    def work() -> bool:
        array[...] = 2
        return bool(arrays.empty((1 << 20,), "u1").size)

    assert in_child(work) == 0
    assert (array == 1).all()


def test_overlap() -> None:
    x = np.zeros((10, 10))
    assert arrays.overlap(x, x[3:4]) and arrays.overlap(x, x)
    assert not arrays.overlap(x[:5], x[5:])
    assert not arrays.overlap(x[:, 0], x[:, 1])  # interleaved
    assert not arrays.overlap(x, x[:0]) and not arrays.overlap(x, x.copy())


def test_numbers_and_numpy_arrays() -> None:
    x = np.arange(6.0)
    assert arrays.to_numpy(x) == (pytest.approx(x), arrays.Kind.NUMPY) and arrays.to_numpy(x)[0] is x
    for value, dtype, kind in (
        (True, "?", arrays.Kind.SCALAR),
        (3, "i8", arrays.Kind.SCALAR),
        (2.5, "f8", arrays.Kind.SCALAR),
        (np.float64(1), "f8", arrays.Kind.NUMPY),
        (np.int8(1), "i1", arrays.Kind.NUMPY),
    ):
        array, found = arrays.to_numpy(value)
        assert (array.dtype, array.shape, found) == (np.dtype(dtype), (), kind)
    assert arrays.to_numpy(x.astype(">f8"))[0].dtype.isnative
    assert arrays.to_numpy(np.zeros(3, ml_dtypes.int4))[0].dtype == ml_dtypes.int4
    for wrong in (
        [1.0],
        "x",
        None,
        np.array(["a"]),
        np.array([object()]),
        np.ma.masked_array([1.0], [True]),
        1 << 80,
        1 << 63,
        1j,
    ):
        with pytest.raises(InvalidProblem):
            arrays.to_numpy(wrong)


class Interface:
    """What an array of another library looks like."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_other_libraries() -> None:
    x = np.arange(6.0).reshape(2, 3)
    array, kind = arrays.to_numpy(Interface(x))
    assert np.shares_memory(array, x) and kind is arrays.Kind.NUMPY and arrays.from_numpy(array, kind) is array
    with pytest.raises(DeviceError, match="Interface on cuda:1"):
        arrays.to_numpy(Interface(x, (2, 1)))

    class ByInterface:
        __array_interface__ = x.__array_interface__

    class OnCuda:
        @property
        def __cuda_array_interface__(self) -> dict[str, int]:
            return {"version": 3}

    assert (arrays.to_numpy(ByInterface())[0] == x).all()
    with pytest.raises(DeviceError, match="cuda"):
        arrays.to_numpy(OnCuda())


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize(
    "name",
    [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "bool",
    ],
)
def test_torch_goes_in_and_comes_out(torch: Any, name: str) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [0.5, 4.0, 1.5]]).to(getattr(torch, name))
    for given in (tensor, tensor.t(), tensor[1, 1], tensor[:0]):
        array, kind = arrays.to_numpy(given)
        assert kind is arrays.Kind.TORCH and array.shape == tuple(given.shape)
        assert (array.astype("f8") == given.to(torch.float64).numpy()).all()
        back = arrays.from_numpy(array, kind)
        assert (
            back.dtype == given.dtype
            and back.shape == given.shape
            and (back.numel() == 0 or back.data_ptr() == given.data_ptr())
        )


def test_torch_special_tensors(torch: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    array, kind = arrays.to_numpy(x)
    assert (array == 1).all() and not arrays.from_numpy(array, kind).requires_grad
    assert (arrays.to_numpy(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))[0].astype("f4") == 1).all()
    with pytest.raises(DeviceError, match="meta"):
        arrays.to_numpy(torch.ones(2, device="meta"))
    with pytest.raises(InvalidProblem, match="sparse"):
        arrays.to_numpy(torch.ones(2, 2).to_sparse())
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (arrays.from_numpy(frozen, kind) == torch.arange(3.0)).all()
    assert (arrays.from_numpy(np.arange(3.0)[::-1], kind).flip(0) == torch.arange(3.0)).all()
    assert arrays.from_numpy(np.array([-3, 7], ml_dtypes.int4), kind).tolist() == [-3, 7]


def test_torch_holds_a_pooled_block(torch: Any) -> None:
    mine = arrays.OutputPool()
    tensor = arrays.from_numpy(mine.empty((1 << 20,), "f4"), arrays.Kind.TORCH)
    part = tensor[5:10]
    del tensor
    gc.collect()
    assert mine.retained == 0
    del part
    gc.collect()
    assert mine.retained > 0


def test_torch_is_not_imported_by_us() -> None:
    process = python(
        "import sys, numpy, gradc.runtime.host.arrays as a; a.to_numpy(numpy.ones(3)); print('torch' in sys.modules)"
    )
    assert process.communicate(timeout=600)[0].strip() == "False"
