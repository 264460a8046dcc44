"""The mechanism that holds forks off, under every interleaving: threads, forks in the middle of forks, Ctrl-C at any
bytecode, sections that wait for other threads.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from gradc.process import forks

Hooks = dict[str, list[Callable[[], object]]]


def fresh(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Hooks]:
    """The module anew, and its hooks, which this process does not call."""
    hooks: Hooks = {"before": [], "after_in_parent": [], "after_in_child": []}

    def register(**given: Callable[[], object]) -> None:
        for when, hook in given.items():
            hooks[when].append(hook)

    spec = importlib.util.spec_from_file_location("gradc_process_forks_again", forks.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        patched.setattr(os, "register_at_fork", register)
        patched.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module, hooks


class Interleaving:
    """Threads of which one runs at a time, which hand over at random between two bytecodes; their time is not ours.

    ``now`` moves on only while all of them sleep.
    """

    def __init__(self, module: ModuleType, hooks: Hooks, seed: int):
        self.random = random.Random(seed)
        self.module, self.hooks = module, hooks
        self.now = 0.0
        self.turns: dict[int, threading.Semaphore] = {}
        self.wakes: dict[int, float] = {}
        self.done: dict[int, int] = {}
        self.sections: dict[int, int] = {}
        self.forking: dict[int, int] = {}
        self.forked_inside: set[int] = set()  # two such do not wait for each other
        self.within_fork: set[int] = set()  # a section in a hook waits for no fork, or two such would do so for ever
        self.signals: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self.longest = 0.0
        self.forked = self.interrupted = 0
        self.leaves_litter = False

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def hand_over(self, leave: bool = False) -> None:
        me = threading.get_ident()
        mine = self.turns[me]
        if leave:
            del self.wakes[me]
            if not self.wakes:
                return
        ready = [thread for thread, wake in self.wakes.items() if wake <= self.now]
        if not ready:
            self.now = min(self.wakes.values())
            ready = [thread for thread, wake in self.wakes.items() if wake <= self.now]
        chosen = self.random.choice(ready)
        if chosen != me:
            self.turns[chosen].release()
            if not leave:
                mine.acquire()

    def sleep(self, seconds: float) -> None:
        me = threading.get_ident()
        self.wakes[me] = until = self.now + seconds
        while self.now < until:
            self.hand_over()

    def monotonic(self) -> float:
        return self.now

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """At each bytecode of the module and of :meth:`section`.  Not of the process's own :mod:`gradc.process.forks`,
        which has the same file: a finalizer of garbage may run that anywhere, also where no thread is to hand over.
        """
        if frame.f_globals is not self.module.__dict__ and frame.f_code is not Interleaving.section.__code__:
            return None
        frame.f_trace_opcodes = True
        me = threading.get_ident()
        left = self.signals[me] = self.signals.get(me, 0) - 1
        if self.random.random() < 0.03:
            self.hand_over()
        if left == 0:
            self.handle()
        return self.trace

    def handle(self) -> None:
        """What the handler of a signal does."""
        match self.random.randrange(4):
            case 0:
                self.section(0.0)
            case 1:
                self.fork()
            case _:
                self.interrupted += 1
                raise KeyboardInterrupt

    # -- what threads do -----------------------------------------------------------------------------------------------

    def begin(self) -> float:
        me = threading.get_ident()
        if not any(outer.admitted for outer in self.marks_of(me)):
            self.forked_inside.discard(me)
            (self.within_fork.add if self.forking.get(me) else self.within_fork.discard)(me)
        return self.now

    def enter(self, since: float) -> None:
        me = threading.get_ident()
        self.longest = max(self.longest, self.now - since)
        self.sections[me] = self.sections.get(me, 0) + 1

    def leave(self) -> None:
        self.sections[threading.get_ident()] -= 1

    def section(self, seconds: float, inner: Callable[[], object] = lambda: None) -> None:
        since = self.begin()
        with self.module.held_off:
            self.enter(since)
            self.sleep(seconds)
            inner()
            self.leave()

    def is_inside(self, thread: int) -> bool:
        return bool(self.marks_of(thread))

    def marks_of(self, thread: int) -> list[Any]:
        return [mark for mark in self.module._inside if mark.thread == thread]

    def fork(self) -> None:
        """What CPython does: the error of a hook is printed and forgotten."""
        me = threading.get_ident()
        self.forking[me] = self.forking.get(me, 0) + 1
        if self.is_inside(me):
            self.forked_inside.add(me)
        held = True
        hooks = self.hooks["before"][::-1]
        if self.forking[me] < 3 and self.random.random() < 0.2:  # another library's
            hooks.insert(self.random.randint(0, len(hooks)), self.random.choice([self.fork, lambda: self.section(0.0)]))
        for hook in hooks:
            before = self.sections.get(me, 0), self.forking[me]
            try:
                hook()
            except KeyboardInterrupt:
                held = False
                self.sections[me], self.forking[me] = before
        if held:
            waived = self.within_fork | (self.forked_inside if self.is_inside(me) else set())
            others = [t for t, n in self.sections.items() if n and t != me and t not in waived]
            assert not others, "forked while another thread was in a section"
        self.forked += 1
        self.in_child()
        for hook in self.hooks["after_in_parent"]:
            with contextlib.suppress(KeyboardInterrupt):
                hook()
        self.forking[me] -= 1

    def in_child(self) -> None:
        """A child in which nothing of another thread is left; then back in the parent."""
        if self.leaves_litter:
            Litter()
        module, me, before = self.module, threading.get_ident(), sys.gettrace()
        kept = module._claims.copy(), module._inside.copy(), module._yielding.copy()
        sys.settrace(None)
        for hook in self.hooks["after_in_child"]:
            hook()
        assert module._claims == [me] * (kept[0].count(me) - 1)
        assert all(mark.thread == me for mark in module._inside) and me not in module._yielding
        since = self.now
        with module.held_off:
            assert module.held_off.is_inside()
        assert self.now == since
        module._claims[:] = kept[0]
        for attribute, values in (("_inside", kept[1]), ("_yielding", kept[2])):
            getattr(module, attribute).clear()
            getattr(module, attribute).update(values)
        sys.settrace(before)

    def wait_for(self, thread: int) -> None:
        """What must not be waited for under a lock that excludes others: another thread that takes it, too."""
        wanted = self.done[thread] + 1
        while thread in self.wakes and self.done[thread] < wanted:
            self.sleep(0.001)

    def script(self, worker: int, steps: int) -> None:
        me, draw = threading.get_ident(), self.random
        for _ in range(steps):
            # A worker never forks: who waits in a section for one that forks waits for himself.
            kind = draw.randrange(2 if me == worker else 6)
            self.signals[me] = draw.randrange(600) if me != worker and draw.random() < 0.5 else 0
            before = self.sections.get(me, 0), self.forking.get(me, 0)
            sys.settrace(self.trace)
            try:
                match kind:
                    case 0:
                        self.section(draw.choice((0.0, 0.001, 0.03)))
                    case 1:
                        self.section(0.0, lambda: self.section(0.001))
                    case 2:
                        self.section(0.0, lambda: self.wait_for(worker))
                    case 3:
                        self.section(0.001, self.fork)
                    case _:
                        self.fork()
            except KeyboardInterrupt:
                self.sections[me], self.forking[me] = before
            finally:
                sys.settrace(None)
            self.done[me] += 1

    def run(self, threads: int = 3) -> None:
        registered = threading.Semaphore(0)
        numbers: list[int] = []

        def body() -> None:
            me = threading.get_ident()
            mine = self.turns[me] = threading.Semaphore(0)
            numbers.append(me)
            registered.release()
            mine.acquire()
            try:
                self.script(numbers[0], self.random.randint(1, 2))
            except BaseException as error:
                self.errors.append(error)
            finally:
                self.hand_over(leave=True)

        started = [threading.Thread(target=body, daemon=True) for _ in range(threads)]
        for thread in started:  # one after another: a seed is one interleaving
            thread.start()
            assert registered.acquire(timeout=60)
        self.wakes = dict.fromkeys(numbers, 0.0)
        self.done = dict.fromkeys(numbers, 0)
        self.turns[numbers[0]].release()
        for thread in started:
            thread.join(60)
            assert not thread.is_alive(), f"hangs at {self.now}"


@pytest.mark.long("gradc/process")
def test_ten_thousand_interleavings(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hooks = fresh(monkeypatch)
    forked = interrupted = 0
    for seed in range(10_000):
        world = Interleaving(module, hooks, seed)
        module.time = world  # type: ignore[attr-defined]
        world.run(threads=3 + seed % 2)
        assert not world.errors, (seed, world.errors)
        assert world.longest < 1, (seed, world.longest)
        assert not (module._claims or module._inside or module._yielding), seed
        forked, interrupted = forked + world.forked, interrupted + world.interrupted
    assert forked > 10_000 and interrupted > 500, (forked, interrupted)


def test_a_handler_that_comes_before_a_section_has_looked_for_forks_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it interrupts has left its mark, and is not inside by that."""
    module, _ = fresh(monkeypatch)
    over = threading.Event()
    forking = threading.Thread(target=over.wait)
    forking.start()
    began: list[bool] = []

    class Marks(set[Any]):
        def add(self, mark: Any) -> None:
            super().add(mark)
            if not began:  # the signal
                began.append(False)
                with module.held_off:
                    began[0] = not module._claims

    class Time:
        def sleep(self, seconds: float) -> None:
            module._claims.clear()  # the fork is done

    try:
        for name, value in (("_inside", Marks()), ("time", Time()), ("_claims", [forking.ident])):
            setattr(module, name, value)
        with module.held_off:
            assert began == [True] and module.held_off.is_inside()
    finally:
        over.set()
        forking.join()


class Litter:
    """Garbage whose finalizer holds off the forks of this process."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        section()


def test_what_is_collected_meanwhile_changes_no_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs finalizers in the middle of anything that a thread does."""

    def schedules(collected: bool) -> Iterator[tuple[Any, ...]]:
        module, hooks = fresh(monkeypatch)
        for seed in range(40):
            world = Interleaving(module, hooks, seed)
            module.time = world  # type: ignore[attr-defined]
            world.leaves_litter = collected
            world.run()
            assert not world.errors, (seed, world.errors)
            yield world.now, world.forked, world.interrupted, world.random.random(), module._claims.copy()

    threshold = gc.get_threshold()
    quiet = list(schedules(False))
    gc.set_threshold(5)
    try:
        assert list(schedules(True)) == quiet
    finally:
        gc.set_threshold(*threshold)


# ---- Each by itself, in real time ------------------------------------------------------------------------------------


def free(begins: Callable[[], object] | None = None) -> bool:
    """Whether another thread can hold forks off, or fork, at once."""
    entered = threading.Event()

    def enter() -> None:
        (begins or section)()
        entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(5)


@contextlib.contextmanager
def traced(filename: str, moment: int, passed: list[int]) -> Iterator[None]:
    """A context manager in which Ctrl-C comes at one bytecode in the lines of a file."""

    def trace(frame: FrameType, event: str, result: Any) -> Any:
        del result  # the traceback keeps this frame, which is none of Ctrl-C's
        if frame.f_code.co_filename != filename:
            return None
        frame.f_trace_opcodes = True
        passed[0] += 1
        if passed[0] == moment:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def section() -> None:
    with forks.held_off:
        pass


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.long("gradc/process")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("filename", [__file__, forks.__file__], ids=["caller", "forks"])
@pytest.mark.parametrize("work", [section, fork])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_each_bytecode_leaves_nothing_held(work: Callable[[], None], filename: str) -> None:
    parent, moment, reached = os.getpid(), 1, True
    kept: list[BaseException] = []  # with their frames, as a debugger keeps them
    while reached:
        passed = [0]
        try:
            with traced(filename, moment, passed):
                work()
        except KeyboardInterrupt as error:
            kept.append(error)
        if os.getpid() != parent:
            os._exit(0)
        reached = passed[0] >= moment
        assert free() and free(fork), moment
        moment += 1
    assert moment > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_section_may_wait_for_a_thread_that_begins_one() -> None:
    with forks.held_off:
        assert free()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_a_section_and_lets_the_thread_in_for_which_that_waits() -> None:
    began = threading.Event()
    found: list[bool] = []

    def hold() -> None:
        with forks.held_off:
            began.set()
            time.sleep(0.05)  # the fork has begun
            found.append(free())

    thread = threading.Thread(target=hold)
    thread.start()
    began.wait()
    since = time.monotonic()
    fork()
    assert found == [True] and 0.05 <= time.monotonic() - since < 5
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_two_forks_that_wait_let_sections_in_at_the_same_time() -> None:
    """Each kept out what the other let in, until patience ended."""
    holds, over = threading.Event(), threading.Event()

    def hold() -> None:
        with forks.held_off:
            holds.set()
            over.wait()

    def begin() -> None:
        with forks.held_off:
            over.set()

    started = [threading.Thread(target=hold), *(threading.Thread(target=fork) for _ in range(2))]
    started[0].start()
    holds.wait()
    since = time.monotonic()
    for thread in started[1:]:
        thread.start()
        time.sleep((forks.CLOSED + forks.OPEN) / 2)  # half a turn later
    started.append(threading.Thread(target=begin))
    started[-1].start()
    for thread in started:
        thread.join()
    assert time.monotonic() - since < 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_that_waited_too_long_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    end, began = threading.Event(), threading.Event()

    def hold() -> None:
        with forks.held_off:
            began.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    began.wait()
    pid = os.fork()  # the section goes on
    if pid == 0:
        os._exit(0 if free() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    end.set()
    thread.join()
    assert free()


NO_PROCESS = """
import os, resource, threading
from gradc.process import forks

if os.geteuid() == 0:
    os.setuid(65534)  # the superuser has no limit
limit = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, limit[1]))
try:
    os.fork()
except BlockingIOError:
    resource.setrlimit(resource.RLIMIT_NPROC, limit)
    entered = threading.Event()
    def enter():
        with forks.held_off:
            entered.set()
    threading.Thread(target=enter, daemon=True).start()
    print("free", entered.wait(5))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_that_fails_leaves_nothing_held() -> None:
    done = subprocess.run([sys.executable, "-c", NO_PROCESS], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "free True", done.stderr
