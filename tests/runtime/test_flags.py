"""Error flags of calls that nobody waits for, against a device whose copies arrive when the test says so."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.codegen.cuda.actions import FLAG, FLAG_NOTICE, FLAG_WORDS, Launch, Library, Part
from gradc.runtime.cuda import flags as cuda_flags
from gradc.runtime.cuda import pending
from gradc.runtime.cuda.device import NoKernel, Span
from gradc.runtime.cuda.flags import FINE, FlagPool
from gradc.runtime.cuda.pending import AsyncErrors, DeferredCheck
from gradc.runtime.cuda.steps import PackedPlan


class Device:
    """Memory by address, with work in order that is done when the device is waited for, or by :meth:`run`."""

    def __init__(self) -> None:
        self.memories: dict[int, np.ndarray] = {}
        self.work: list[Callable[[], None]] = []
        self.waits = self.copies = self.uploads = 0
        self.current = False

    def words(self, address: int) -> np.ndarray:
        """The words from an address to the end of its memory."""
        start = max(at for at in self.memories if at <= address)
        return self.memories[start][(address - start) // 8 :]

    def memory(self, nbytes: int, stream: int) -> Any:
        address = 1 << 20 | len(self.memories) << 12
        self.memories[address] = np.full(nbytes // 8, 0xCD, np.uint64)
        return SimpleNamespace(address=address, nbytes=nbytes)

    def mapped(self, nbytes: int) -> tuple[np.ndarray, int]:
        found = self.memory(nbytes, 0)
        return self.memories[found.address].view(np.uint8), found.address

    def upload(self, to: int, array: np.ndarray, stream: int) -> None:
        self.uploads += 1
        kept = array.reshape(-1).copy()
        self.work.append(lambda: self.words(to).__setitem__(slice(kept.size), kept))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        count = slice(nbytes // 8)
        self.work.append(lambda: self.words(to).__setitem__(count, self.words(source)[count]))

    def kernel(self, at: int, position: int | None) -> None:
        """What a call does: looks at its flag and, at a bad index, reports it."""

        def run() -> None:
            flag = self.words(at)
            assert (flag[FLAG_WORDS] == FINE).all(), "a call begins with a flag at rest"
            if position is not None:
                flag[FLAG_WORDS] = min(int(flag[FLAG_WORDS]), position)
                self.words(int(flag[FLAG_NOTICE]))[0] = 1

        self.work.append(run)

    def run(self, count: int | None = None) -> None:
        done = self.work[:count]
        del self.work[:count]
        for each in done:
            each()

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        self.current = True
        yield
        self.current = False

    def synchronize(self) -> None:
        assert self.current, "another device is waited for"
        self.waits += 1
        self.run()

    def read(self, span: Span) -> np.ndarray:
        assert self.current, "another device is waited for"
        self.run()
        return self.words(span.address)[: span.count].copy()


class Calls:
    """A module that calls a program of one check on streams."""

    def __init__(self) -> None:
        self.device, self.errors = Device(), AsyncErrors()
        self.pool = FlagPool(self.device, FLAG_WORDS + 1)  # type: ignore[arg-type]

    def call(self, name: str, position: int | None = None, stream: int = 5) -> None:
        flag = self.pool.take(stream)
        self.device.kernel(flag.address, position)
        check = DeferredCheck(self.pool, lambda words: IndexError(f"{name} at {words[FLAG_WORDS]}"))
        self.pool.submitted(flag, check)
        self.errors.add(check)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_calls_without_errors_share_a_copy_and_a_few_blocks(calls: Calls) -> None:
    for number in range(20 * FlagPool.CALLS):
        calls.call(str(number))
        calls.errors.check()
        if number % 3 == 0:
            calls.device.run()
    assert calls.device.copies == 20 and calls.device.waits == 0
    assert len(calls.pool._used) + len(calls.pool._free) == calls.device.uploads <= 3
    calls.errors.wait()
    assert calls.device.waits == 1 and not calls.pool._used
    calls.errors.wait()
    assert calls.device.waits == 1, "nothing is in flight"


@pytest.mark.parametrize("bad", [0, 1, FlagPool.CALLS - 1, FlagPool.CALLS])
def test_one_of_many_calls_is_raised_by_the_next(calls: Calls, bad: int) -> None:
    for number in range(bad):
        calls.call(str(number))
    calls.call("bad", 7)
    calls.errors.check()  # the device has not been there
    assert calls.device.waits == 0
    calls.device.run()
    calls.call("after")
    with pytest.raises(IndexError, match="bad at 7"):
        calls.errors.check()
    for number in range(3 * FlagPool.CALLS):  # its block is used again, by calls that begin at rest
        calls.errors.check()
        calls.call(str(number))
        calls.device.run()
    calls.errors.wait()


def test_errors_come_in_order_and_each_once(calls: Calls) -> None:
    other = FlagPool(calls.device, FLAG_WORDS + 1)  # type: ignore[arg-type]  # of the module's other program
    calls.call("first", 3, stream=5)
    calls.pool, own = other, calls.pool
    calls.call("second", 2, stream=6)
    calls.pool = own
    calls.call("third", 1, stream=5)
    calls.device.run()
    for name in ("first", "second", "third"):
        with pytest.raises(IndexError, match=name):
            calls.errors.check()
    calls.errors.check()
    calls.errors.wait()


def test_an_error_is_whole_when_it_is_raised(calls: Calls) -> None:
    """The word is written by the first thread that finds something; the lowest position may come later."""
    flag = calls.pool.take(5)
    for position in (90, 4, 60):
        calls.device.work.append(
            lambda at=flag.address, p=position: (
                calls.device.words(at).__setitem__(FLAG_WORDS, min(p, int(calls.device.words(at)[FLAG_WORDS]))),
                calls.device.words(int(calls.device.words(at)[FLAG_NOTICE])).__setitem__(0, 1),
            )
        )
    check = DeferredCheck(calls.pool, lambda words: IndexError(f"at {words[FLAG_WORDS]}"))
    calls.pool.submitted(flag, check)
    calls.errors.add(check)
    calls.device.run(2)  # the upload of the block, and the first thread
    assert calls.pool.noticed
    with pytest.raises(IndexError, match=r"at 4$"):
        calls.errors.check()


def test_an_error_found_while_others_are_raised_is_noticed(calls: Calls) -> None:
    """The word is cleared before the wait: what a kernel writes after that stays."""
    calls.call("first", 3)
    calls.device.run()
    synchronize = calls.device.synchronize

    def late() -> None:
        synchronize()
        calls.call("late", 5)
        calls.device.run()

    calls.device.synchronize = late  # type: ignore[method-assign]
    with pytest.raises(IndexError, match="first"):
        calls.errors.check()
    calls.device.synchronize = synchronize  # type: ignore[method-assign]
    with pytest.raises(IndexError, match="late"):
        calls.errors.check()
    calls.errors.wait()


def test_an_error_without_a_word_comes_with_the_copy_of_its_block(calls: Calls) -> None:
    """Nothing depends on the word: a block that has arrived is looked at before it is used again."""
    calls.call("bad", 7)
    for number in range(FlagPool.CALLS - 1):
        calls.call(str(number))
    calls.device.run()
    calls.pool._notice[0] = 0
    calls.call("next block")
    with pytest.raises(IndexError, match="bad"):
        calls.errors.check()


def test_the_pool_is_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """With calls in flight in every block, on more streams than there are blocks, a call waits for the device."""
    monkeypatch.setattr(FlagPool, "MOST", 3)
    for stream in range(3):
        calls.call(str(stream), 1 if stream == 1 else None, stream)
    assert calls.device.waits == 0
    calls.call("one more", stream=9)
    assert calls.device.waits == 1 and len(calls.pool._used) == 1
    with pytest.raises(IndexError, match="1 at 1"):
        calls.errors.check()
    for stream in range(100):
        calls.call(str(stream), stream=stream)
        calls.errors.check()
    assert len(calls.pool._used) + len(calls.pool._free) <= 3


def test_a_call_that_is_not_submitted_gives_its_flag_back(calls: Calls) -> None:
    for _ in range(2 * FlagPool.CALLS):
        calls.pool.submitted(calls.pool.take(5), None)
    calls.device.run()
    calls.call("after")
    assert calls.device.copies == 2 and len(calls.pool._used) == 1


def test_no_two_calls_in_flight_have_the_same_flag(calls: Calls) -> None:
    held: set[int] = set()
    wrong: list[int] = []

    def work() -> None:
        for _ in range(300):
            flag = calls.pool.take(5)
            if flag.address in held:
                wrong.append(flag.address)
            held.add(flag.address)
            held.discard(flag.address)
            calls.pool.submitted(flag, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and calls.device.copies == 1200 // FlagPool.CALLS


def test_what_nobody_raised_is_printed_at_exit(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.call("bad", 7)
    assert calls.errors in pending._unraised
    pending._print_unraised()
    assert "gradc: found in a call and raised by none: IndexError: bad at 7\n" in capsys.readouterr().err
    pending._print_unraised()
    assert "bad" not in capsys.readouterr().err


def test_a_forked_child_does_not_touch_mapped_memory(calls: Calls) -> None:
    calls.call("bad", 7)
    calls.device.run()
    assert calls.pool in cuda_flags._pools
    mapped, waits = calls.pool._notice, calls.device.waits
    calls.pool.forget()
    assert calls.pool._notice is not mapped and not calls.pool.noticed
    calls.errors.check()
    calls.errors.wait()
    assert calls.device.waits == waits


def test_every_launch_of_a_call_reads_the_flag_of_that_call() -> None:
    """Arguments are packed once for a set of addresses; the flag's is written anew, beside all others."""
    graph = gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_90")
    plan = module.backward.native.bind({"N": 20000, "V": 100, "D": 64})
    launches = [a for actions in plan.actions for a in actions if isinstance(a, Launch)]
    assert len(launches) > 5 and plan.checks
    seen: list[list[int]] = []

    def launch(*given: Any) -> None:
        count, at = len(launches[len(seen) % len(launches)].args), given[9]
        places = (ctypes.c_void_p * count).from_address(at)
        seen.append([ctypes.c_int64.from_address(place).value for place in places])

    device = SimpleNamespace(
        handle=lambda *a: 1, sync=False, capturing=lambda s: False, driver=SimpleNamespace(launchKernel=launch)
    )
    packed = PackedPlan(device, plan)  # type: ignore[arg-type]
    roots = {name: (i + 1) << 30 for i, name in enumerate(packed._roots)}
    for flag in (1 << 50, 1 << 51, 1 << 50):
        seen.clear()
        packed.submit({**roots, FLAG: flag}, 5)
        for action, found in zip(launches, seen, strict=True):
            assert found == [{**roots, FLAG: flag}[x.root] + x.start if isinstance(x, Part) else x for x in action.args]
    assert len(packed._packed) == 1


def test_a_call_in_the_middle_of_another_ones_launches_has_its_own_flag() -> None:
    """As of a handler of a signal; what is packed for its addresses is in use."""
    graph = gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_90")
    plan = module.backward.native.bind({"N": 20000, "V": 100, "D": 64})
    launches = [a for actions in plan.actions for a in actions if isinstance(a, Launch)]
    flags: list[list[int]] = [[], []]
    depth = 0

    def launch(*given: Any) -> None:
        nonlocal depth
        count = len(launches[len(flags[depth])].args)
        places = (ctypes.c_void_p * count).from_address(given[9])
        flags[depth].append([ctypes.c_int64.from_address(place).value for place in places])  # type: ignore[arg-type]
        if len(flags[0]) == 2 and depth == 0:
            depth = 1
            packed.submit({**roots, FLAG: 1 << 51}, 5)
            depth = 0

    device = SimpleNamespace(
        handle=lambda *a: 1, sync=False, capturing=lambda s: False, driver=SimpleNamespace(launchKernel=launch)
    )
    packed = PackedPlan(device, plan)  # type: ignore[arg-type]
    roots = {name: (i + 1) << 30 for i, name in enumerate(packed._roots)}
    packed.submit({**roots, FLAG: 1 << 50}, 5)
    for flag, found in zip((1 << 50, 1 << 51), flags, strict=True):
        wanted = [
            [{**roots, FLAG: flag}[x.root] + x.start if isinstance(x, Part) else x for x in a.args] for a in launches
        ]
        assert found == wanted


def test_what_a_library_has_no_kernel_for_reads_the_flag_of_its_call() -> None:
    """The launches in its place are submitted at addresses that were packed for an earlier call."""

    def function(table: Any, i: Any, w: Any, b: Any) -> Any:
        return ops.gelu(ops.linear(ops.embedding(i, table), w, b), approximate="tanh")

    graph = gradc.trace(function, table="bf16[9,24]", i="i64[N]", w="bf16[40,24]", b="bf16[40]")
    module = gradc.compile(graph, wrt=["table", "w", "b"], target="cuda", arch="sm_90")
    plan = module.forward.native.bind({"N": 5})
    flags: list[int] = []

    def product(library: Library, *given: Any) -> Callable[[int], None]:
        if library.product.epilogue.beyond_bias:
            raise NoKernel("none")
        return lambda stream: None

    def launch(function: str, blocks: int, threads: int, args: Any, *given: Any) -> None:
        assert function == "gradc_epilogue_bf16"
        flags.append(args[-2].address)

    device = SimpleNamespace(
        handle=lambda *a: 1, sync=False, capturing=lambda s: False, product=product, launch=launch,
        driver=SimpleNamespace(launchKernel=lambda *a: None),
    )  # fmt: skip
    packed = PackedPlan(device, plan)  # type: ignore[arg-type]
    roots = {name: (i + 1) << 30 for i, name in enumerate(packed._roots)}
    for flag in (1 << 50, 1 << 51):
        packed.submit({**roots, FLAG: flag}, 5)
    assert flags == [1 << 50, 1 << 51]


def test_each_thread_has_blocks_of_its_own_on_the_stream_of_a_thread(calls: Calls) -> None:
    """cudaStreamPerThread is another queue in each: a block's copy says of no other's calls that they have ended."""
    blocks: list[int] = []

    def work() -> None:
        blocks.append(id(calls.pool.take(2).block))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:  # one after another: the number of a thread that has ended is another one's
        thread.start()
        thread.join()
    work()
    assert len({*blocks}) == 4
    assert calls.pool.take(2).block is calls.pool.take(2).block
    assert calls.pool.take(5).block is calls.pool.take(5).block


def test_an_error_stays_noticed_where_nobody_could_look(calls: Calls) -> None:
    calls.call("bad", 7)
    calls.device.run()
    synchronize = calls.device.synchronize

    def interrupted() -> None:
        raise KeyboardInterrupt

    calls.device.synchronize = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        calls.errors.check()
    calls.device.synchronize = synchronize  # type: ignore[method-assign]
    with pytest.raises(IndexError, match="bad at 7"):
        calls.errors.check()


def test_an_error_of_a_call_that_is_being_submitted_stays_noticed(calls: Calls) -> None:
    """Another thread looks between its launches and the end of its submission."""
    calls.call("before")
    flag = calls.pool.take(5)
    calls.device.kernel(flag.address, 7)
    calls.device.run()
    calls.errors.check()
    check = DeferredCheck(calls.pool, lambda words: IndexError(f"at {words[FLAG_WORDS]}"))
    calls.pool.submitted(flag, check)
    calls.errors.add(check)
    with pytest.raises(IndexError, match="at 7"):
        calls.errors.check()


@pytest.mark.parametrize("at", range(1, 12))
def test_a_handler_that_takes_a_flag_while_one_is_taken_has_another(at: int, calls: Calls) -> None:
    """At each line of it."""
    code, lines, inner = FlagPool.take.__code__, itertools.count(1), list[int]()

    def traced(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            inner.append(calls.pool.take(5).address)
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        outer = calls.pool.take(5).address
    finally:
        sys.settrace(before)
    assert outer not in inner and (inner or at > 4)
