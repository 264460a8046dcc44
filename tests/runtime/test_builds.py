"""Compilers that run beside the caller: what is begun when, and what is left of it."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import compiler, knobs
from gradc.errors import CompilerError, InvalidProblem
from gradc.module import options
from gradc.passes.program.plan_buffers import plan_buffers
from gradc.runtime.executable import Executable
from gradc.runtime.host import pool, toolchain

ROOT = Path(__file__).parents[2]
UNITS = [f'__attribute__((visibility("default"))) int f{i}(void) {{ return {i}; }}\n' for i in range(5)]
GRAPH = """
import gradc, numpy as np
graph = gradc.trace(lambda x, w: (gradc.ops.tanh(x @ w) ** 2).sum(), x="f64[3,4]", w="f64[4,4]")
"""


def script(folder: Path, body: str, version: str = 'echo "fake version 1.0"') -> str:
    """A compiler that answers -v and then does as told."""
    path = folder / "fake compiler"
    path.write_text(f'#!/bin/sh\nif [ "$*" = "-v" ]; then {version}; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return shlex.quote(str(path))


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def real(tmp_path: Path) -> str:
    """The compiler of this machine, which notes each unit that it has begun."""
    command = shlex.join(toolchain.find_compiler().argv)
    folder = shlex.quote(str(tmp_path))
    return script(
        tmp_path,
        f'for last; do case "$last" in unit*.c) : > {folder}/"$last";; esac; done\nexec {command} "$@"',
        f"exec {command} -v",
    )


def begun(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("unit*.c")}


def test_units_are_compiled_before_the_caller_waits(tmp_path: Path, real: str) -> None:
    plain = toolchain.compile_libraries([UNITS[:3], UNITS[3:4]])
    with knobs.CC.set(real), toolchain.Build() as build:
        build.add(UNITS[:3])
        build.add(UNITS[3:4])

        def all_have_begun() -> bool:
            build.advance()
            return len(begun(tmp_path)) == 4

        wait_for(all_have_begun)
        assert build.finish() == plain


def test_no_more_of_them_than_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    folder = shlex.quote(str(tmp_path))
    with knobs.CC.set(script(tmp_path, f"echo $$ > {folder}/pid$$\nsleep 10000")):
        with toolchain.Build() as build:
            build.add(UNITS)
            wait_for(lambda: len([p for p in tmp_path.glob("pid*") if p.read_text()]) == 2)
            build.advance()
            build.add(UNITS[:1])
            pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
            assert len(pids) == 2 and all(map(is_running, pids))
        assert len([*tmp_path.glob("pid*")]) == 2
        assert not any(map(is_running, pids))


def test_an_error_is_of_its_unit_and_a_refused_flag_is_dropped(tmp_path: Path) -> None:
    with toolchain.Build() as build:
        build.add(UNITS[:2])
        build.add(["int fine;", "int y = ;"])
        with pytest.raises(CompilerError, match="unit 3") as caught:
            build.finish()
        assert "int y = ;" in caught.value.source
    command = shlex.join(toolchain.find_compiler().argv)
    refuses = (
        'for flag; do case "$flag" in -march=native) echo "error: unknown argument: \'$flag\'"; exit 1;; esac; done'
    )
    with knobs.CC.set(script(tmp_path, f'{refuses}\nexec {command} "$@"')), toolchain.Build() as build:
        build.add(UNITS[:2])
        build.add(UNITS[2:3])
        one, two = (toolchain.load_library(payload, "flags") for payload in build.finish())
    assert (one.f0(), one.f1(), two.f2()) == (0, 1, 2)


def ended_in_a_child(run: Callable[[], int]) -> int:
    """The exit status of a child that was forked here."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(run())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("how", ["finishes", "adds", "drops"])
def test_a_child_compiles_by_itself_and_leaves_its_parent_alone(how: str) -> None:
    with knobs.OBJECTS.set(""), toolchain.Build() as build:
        build.add(UNITS[:3])
        assert build._objects is not None
        folder = build._objects.directory

        def child() -> int:
            with build:
                build.advance()
                if how == "adds":
                    build.add(UNITS[3:5])
                libraries = build.finish() if how != "drops" else []
            loaded = [toolchain.load_library(each, "child") for each in libraries]
            return loaded[-1].f4() if how == "adds" else loaded[0].f2() if loaded else 7

        assert ended_in_a_child(child) == {"finishes": 2, "adds": 4, "drops": 7}[how]
        assert sorted(path.name for path in folder.glob("*.c")) == ["unit0.c", "unit1.c", "unit2.c"]
        build.add(UNITS[4:])
        one, two = (toolchain.load_library(each, "parent") for each in build.finish())
        assert (one.f1(), two.f4()) == (1, 4)
    assert not folder.exists()


# -- of a module -------------------------------------------------------------------------------------------------------


def recorded(monkeypatch: pytest.MonkeyPatch, graph: gradc.Graph, wrt: list[str]) -> tuple[gradc.Module, list[str]]:
    """A module, and in which order its programs were scheduled and given to the compiler."""
    events: list[str] = []
    kernels, add = compiler.kernels, toolchain.Build.add

    def scheduled(graph: Any, options: Any, target: str, pipeline: Any, name: str, *rest: Any) -> Any:
        events.append(name)
        return kernels(graph, options, target, pipeline, name, *rest)

    def added(build: Any, units: Any) -> None:
        events.append("C")
        add(build, units)

    monkeypatch.setattr(pool, "begin", lambda *libraries: None)
    monkeypatch.setattr(compiler, "kernels", scheduled)
    monkeypatch.setattr(toolchain.Build, "add", added)
    with knobs.CACHE.set(False):
        module = gradc.compile(graph, wrt=wrt, target="cpu")
    return module, events


def test_the_forward_is_compiled_during_the_passes_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    function = lambda x, w: (gradc.ops.tanh(x @ w) ** 2).sum()
    module, events = recorded(monkeypatch, gradc.trace(function, x="f64[3,4]", w="f64[4,4]"), ["w"])
    assert [e for e in events if e != "joint"] == ["forward", "C", "backward", "C"]
    x, w = np.random.default_rng(0).normal(size=(2, 4, 4))
    value, gradients = module.value_and_grad(x=x[:3], w=w)
    y = np.tanh(x[:3] @ w)
    np.testing.assert_allclose(value, (y**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(gradients["w"], x[:3].T @ (2 * y * (1 - y**2)), rtol=1e-12)


def test_a_forward_that_may_be_given_up_is_not_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    function = lambda q, k, v: gradc.ops.softmax(q @ k.T, axis=-1) @ v
    graph = gradc.trace(function, q="f32[4096,64]", k="f32[4096,64]", v="f32[4096,64]")
    _, events = recorded(monkeypatch, graph, ["q", "k", "v"])
    assert events[-3:] == ["backward", "C", "C"] and events.count("C") == 2


@pytest.mark.parametrize("how", ["interrupted", "refused"])
def test_nothing_is_left_where_a_pass_ends_otherwise(how: str, tmp_path: Path) -> None:
    """Ctrl-C in the passes of the backward, or an error there, stops the compilers of the forward and of the pool."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    fake = script(tmp_path, f"echo $$ > {shlex.quote(str(tmp_path))}/pid$$\nsleep 10000")
    code = f"""{GRAPH}
import os, signal, sys, time
from gradc import compiler
kernels = compiler.kernels
def slow(graph, options, target, pipeline, name, *rest):
    if name == "backward":
        print("waits", flush=True)
        if {how == "interrupted"}:
            time.sleep(10000)
        sys.stdin.readline()
        raise gradc.errors.InvalidProblem("refused")
    return kernels(graph, options, target, pipeline, name, *rest)
compiler.kernels = slow
try:
    gradc.compile(graph, wrt=["w"], target="cpu")
except (gradc.errors.InvalidProblem, KeyboardInterrupt) as error:
    print(type(error).__name__, flush=True)
    sys.stdin.readline()
"""
    environment = {"CC": fake, "TMPDIR": str(temporary), "GRADC_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GRADC_OBJECTS": "", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        wait_for(lambda: len([p for p in tmp_path.glob("pid*") if p.read_text()]) == 3)  # pool, f64, forward
        pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
        assert all(map(is_running, pids))
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.readline() in ("KeyboardInterrupt\n", "InvalidProblem\n")
        wait_for(lambda: not any(map(is_running, pids)), 60)
        assert list(temporary.iterdir()) == []
        process.communicate("\n", timeout=600)


@long_tests.values
def test_the_pool_is_compiled_beside_and_ends_with_its_process(tmp_path: Path, real: str) -> None:
    """A process that never calls its module ends without waiting for the pool; the first call of another waits."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    slow = script(
        tmp_path,
        f'case "$*" in *ffp-contract=fast*) echo $$ > {shlex.quote(str(tmp_path))}/pid$$; sleep 10000;; esac\n'
        f'exec {shlex.join(toolchain.find_compiler().argv)} "$@"',
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GRADC_OBJECTS": "",
        "GRADC_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(temporary),
    }
    code = f"{GRAPH}module = gradc.compile(graph, wrt=['w'], target='cpu')\n"
    waits = f"import glob, time\nwhile len(glob.glob({str(tmp_path / 'pid*')!r})) < 2: time.sleep(.01)\n"
    command = [sys.executable, "-c", code + waits]
    subprocess.run(command, env={**environment, "CC": slow}, check=True, timeout=600)
    pids = [int(text) for path in tmp_path.glob("pid*") if (text := path.read_text())]  # of the pool, of f64
    wait_for(lambda: not any(map(is_running, pids)), 60)
    assert list(temporary.iterdir()) == []
    code += "print(module(x=np.ones((3, 4)), w=np.zeros((4, 4))))\n"
    code += "from gradc.runtime.host import pool; pool.begin(); print(pool._begun)"
    made = subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600, capture_output=True)
    assert made.stdout.split() == [b"0.0", b"{}"]


@pytest.fixture
def no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that has no pool yet; the compiler, which takes for ever, notes what it is given there."""
    for name in ("_loaded", "_begun", "_offered"):
        monkeypatch.setattr(pool, name, {})
    noted = tmp_path / "noted"
    noted.mkdir()
    slow = script(tmp_path, f"echo $$ > {shlex.quote(str(noted))}/$$\nsleep 10000")
    for name, value in {"CC": slow, "GRADC_OBJECTS": "", "GRADC_CACHE": "0"}.items():
        monkeypatch.setenv(name, value)  # for all threads
    yield noted
    pool.stop()


def noted_in(folder: Path) -> list[int]:
    return [int(text) for path in folder.iterdir() if (text := path.read_text())]


def test_the_pool_is_begun_once_whoever_asks(no_pool: Path) -> None:
    asked = threading.Barrier(8)

    def ask() -> None:
        asked.wait()
        pool.begin()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: noted_in(no_pool))
    time.sleep(0.2)
    (pid,) = noted_in(no_pool)
    pool.stop()
    assert not is_running(pid) and not pool._begun


def test_the_pool_is_not_begun_where_nothing_is_called(no_pool: Path) -> None:
    with pool.no_calls():
        pool.begin()
    assert not pool._begun
    pool.begin()
    assert pool._begun


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_may_end_untold_begins_no_pool(no_pool: Path) -> None:
    """``os._exit``, with which children of multiprocessing end, would leave its compilers and their files."""

    def child() -> int:
        pool.begin()
        return len(pool._begun)

    assert ended_in_a_child(child) == 0
    temporary = no_pool.parent / "temporary"
    temporary.mkdir()
    code = f"""{GRAPH}
import multiprocessing
def compiled():
    gradc.compile(graph, wrt=["w"], target="cpu")
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=compiled)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GRADC_CACHE_DIR": str(no_pool.parent / "cache"),
        "GRADC_OBJECTS": "",
        "TMPDIR": str(temporary),
    }
    environment.pop("CC", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("no space"), CompilerError("cannot be run"), KeyboardInterrupt()])
def test_a_pool_that_cannot_be_begun_is_the_first_calls(
    error: BaseException, no_pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = toolchain.Build.add

    def refused(build: toolchain.Build, units: Any) -> None:
        add(build, units)
        raise error

    monkeypatch.setattr(toolchain.Build, "add", refused)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        pool.begin()
    wait_for(lambda: not any(map(is_running, noted_in(no_pool))), 60)
    assert not pool._begun


def test_an_interrupt_at_the_end_of_a_compilation_stops_the_pool_too(no_pool: Path) -> None:
    emitter = compiler.Emitter("cpu")
    with pytest.raises(KeyboardInterrupt), emitter:
        emitter._build = InterruptedExit(emitter._build)  # type: ignore[assignment]
        raise InvalidProblem("refused")
    assert not pool._begun


class InterruptedExit:
    """A :class:`.Build` at whose end Ctrl-C comes."""

    def __init__(self, build: Any):
        self.build = build

    def __exit__(self, *error: object) -> None:
        signal.raise_signal(signal.SIGINT)
        self.build.__exit__(*error)


@pytest.mark.parametrize("flag", ["-fsanitize=undefined", "--coverage"])
def test_flags_in_cc_bring_their_own_libraries(flag: str) -> None:
    """UBSan's and gcov's functions are in libraries that gcc links unless it is told to link none."""
    gcc = shutil.which("gcc")
    if gcc is None or "gcc version" not in toolchain.find_compiler().version:
        pytest.skip("needs gcc")
    unit = '__attribute__((visibility("default"))) int at(const int *a, int i) { return a[i] + 1; }\n'
    with knobs.CC.set(f"{gcc} {flag}"):
        library = toolchain.load_library(toolchain.compile_libraries([[unit]])[0], "flags")
    assert library.at((ctypes.c_int * 3)(4, 5, 6), 2) == 7


def test_buffers_planned_twice_are_planned_alike() -> None:
    """An Executable plans its program's buffers again, of which the C was made before."""
    norm = lambda x, w, t: (
        gradc.ops.softmax(gradc.ops.layer_norm(x @ w, normalized_shape=(64,)) @ w, axis=-1) * gradc.ops.embedding(t, x)
    ).sum()
    graph = gradc.trace(norm, x="f32[N,64]", w="f32[64,64]", t="i64[N]")
    with compiler.Emitter("") as emitter:
        given = options.for_target(options.checked({}, graph, "cpu", ["x", "w"]), "cpu")
        programs = compiler.run_passes(graph, ["x", "w"], given, "cpu", emitter)[2]
    assert sum(len(program.of_kind("temp")) for program in programs.values()) > 2
    for program in programs.values():
        assert plan_buffers(program) == program
        assert compiler.render(Executable(program, "cpu").program, "cpu") == compiler.render(program, "cpu")
