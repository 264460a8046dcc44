"""One cell of the matrix of :mod:`.processes`, as a process of its own: ``python process_scenario.py EVENT MOMENT
DELAY``.

It prints ``right`` when every process and thread that took part found the right values afterwards.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# now: an import that a fork finds half done in another thread never ends in the child, which is Python's affair
import numpy.testing

X = np.linspace(-1, 1, 1 << 20, dtype=np.float32).reshape(1024, 1024)
state: dict[str, Any] = {}
failures: list[str] = []


# -- moments -----------------------------------------------------------------------------------------------------------


def build(scale: float = 2.0) -> Any:
    import gradc
    from gradc import ops

    return gradc.compile(
        gradc.trace(lambda x: ops.sum(ops.tanh(x) * scale, axis=1), x="f32[N,M]"), wrt=["x"], target="cpu"
    )


def product() -> Any:
    import gradc
    from gradc import ops

    return gradc.compile(gradc.trace(lambda x: ops.sum(ops.matmul(x, x), axis=1), x="f32[N,N]"), target="cpu")


def right(module: Any = None, scale: float = 2.0) -> None:
    """Forward and backward of a module are what NumPy says."""
    module = module or build(scale)
    x = X[:64]
    y, residuals = module.forward(x=x)
    np.testing.assert_allclose(y, (np.tanh(x) * np.float32(scale)).sum(1), rtol=1e-4, atol=1e-3)
    dx = module.backward(residuals, np.ones_like(y))["x"]
    np.testing.assert_allclose(dx, scale * (1 - np.tanh(x) ** 2), rtol=1e-4, atol=1e-4)


def during_import() -> None:
    import gradc

    gradc.ops  # noqa: B018  (loads lazily)


def during_compile() -> None:
    state["module"] = build()


def during_call() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        state["module"](x=X)


def during_matmul() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        state["product"](x=X)


def during_backward() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        y, residuals = state["module"].forward(x=X)
        state["module"].backward(residuals, np.ones_like(y))


def between() -> None:
    right(state["module"])
    time.sleep(0.05)


MOMENTS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "import": (during_import, ()),
    "compile": (during_compile, ()),
    "call": (during_call, ("module",)),
    "backward": (during_backward, ("module",)),
    "matmul": (during_matmul, ("module", "product")),
    "between": (between, ("module",)),
}


# -- events ------------------------------------------------------------------------------------------------------------


def beside(moment: Callable[[], None], delay: float, event: Callable[[], None]) -> None:
    """The moment in a thread, the event in the main one."""
    thread = threading.Thread(target=noted, args=("the thread", moment))
    thread.start()
    time.sleep(delay)
    event()
    thread.join()
    noted("afterwards", lambda: right(scale=3.0))


def noted(who: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except BaseException as error:
        failures.append(f"{who}: {type(error).__name__}: {error}")


def forked(work: Callable[[], None], leave: Callable[[int], Any] = os._exit) -> Callable[[], None]:
    def event() -> None:
        pid = os.fork()
        if not pid:
            failures.clear()
            noted("the child", work)
            for failure in failures:
                print(failure, file=sys.stderr, flush=True)
            leave(1 if failures else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            failures.append(f"the child ended with {status}")

    return event


def in_the_child() -> None:
    right(scale=2.0)
    right(scale=5.0)
    if "product" in state:
        np.testing.assert_allclose(
            state["product"](x=X[:8, :8].copy()), (X[:8, :8] @ X[:8, :8]).sum(1), rtol=1e-3, atol=1e-3
        )


def fork(moment: Callable[[], None], delay: float) -> None:
    beside(moment, delay, forked(in_the_child))


def fork_and_exit(moment: Callable[[], None], delay: float) -> None:
    """The child leaves as programs do: atexit handlers, then the interpreter's end."""
    beside(moment, delay, forked(in_the_child, sys.exit))


def fork_twice(moment: Callable[[], None], delay: float) -> None:
    beside(moment, delay, forked(lambda: (in_the_child(), forked(in_the_child)())))  # type: ignore[arg-type, return-value]


def fork_from_a_thread(moment: Callable[[], None], delay: float) -> None:
    thread = threading.Thread(target=lambda: (time.sleep(delay), forked(in_the_child)()))
    thread.start()
    noted("the main thread", moment)
    thread.join()
    noted("afterwards", lambda: right(scale=3.0))


def spawn(moment: Callable[[], None], delay: float) -> None:
    def event() -> None:
        done = subprocess.run(
            [sys.executable, "-c", "import gradc; print(gradc.__name__)"], capture_output=True, text=True
        )
        if done.stdout != "gradc\n":
            failures.append(f"the program that was started: {done.returncode} {done.stderr[-300:]}")

    beside(moment, delay, event)


def threads(moment: Callable[[], None], delay: float) -> None:
    """Several at the same thing, begun one after the other."""
    started = [threading.Thread(target=noted, args=(f"thread {k}", moment)) for k in range(4)]
    for thread in started:
        thread.start()
        time.sleep(delay / 4)
    for thread in started:
        thread.join()
    noted("afterwards", lambda: right(scale=3.0))


def _until_interrupted(moment: Callable[[], None], delay: float) -> None:
    """The moment, with Ctrl-C after a delay."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        moment()
        timer.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        failures.append(f"Ctrl-C became {type(error).__name__}: {error}")
    timer.join()


def interrupt(moment: Callable[[], None], delay: float) -> None:
    """Ctrl-C in the moment; then everything works."""
    _until_interrupted(moment, delay)
    noted("afterwards", lambda: right(scale=3.0))
    noted("the same again", moment)


def interrupts(moment: Callable[[], None], delay: float) -> None:
    """Ctrl-C again and again."""
    for k in range(3):
        _until_interrupted(moment, delay * (k + 1) / 3)
    noted("afterwards", lambda: right(scale=3.0))


def terminate(moment: Callable[[], None], delay: float) -> None:
    """SIGTERM in a child that is at it: it dies of that, and at once."""
    pid = os.fork()
    if not pid:
        while True:
            moment()
    time.sleep(delay)
    os.kill(pid, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != -signal.SIGTERM:
        failures.append(f"SIGTERM ended the child with {status}")
    noted("afterwards", lambda: right(scale=3.0))


def terminate_politely(moment: Callable[[], None], delay: float) -> None:
    """SIGTERM with a handler that exits, as servers have it."""
    pid = os.fork()
    if not pid:
        asked: list[int] = []

        def stop(number: int, frame: Any) -> None:
            asked.append(number)
            sys.exit(7)

        signal.signal(signal.SIGTERM, stop)
        while not asked:  # Python loses what a handler raises inside of its own compiler, which an import runs
            moment()
        sys.exit(7)
    time.sleep(delay)
    os.kill(pid, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (7, -signal.SIGTERM):  # the latter before the handler stood
        failures.append(f"the child ended with {status}")
    noted("afterwards", lambda: right(scale=3.0))


def at_exit(moment: Callable[[], None], delay: float) -> None:
    """The moment, and a first compile, when the interpreter is about to end."""

    def late() -> None:
        noted("atexit", moment)
        noted("atexit", lambda: right(scale=3.0))
        finish()

    atexit.register(late)
    state["late"] = True


def daemons(moment: Callable[[], None], delay: float) -> None:
    """The interpreter ends while threads are in the middle of it."""

    def forever() -> None:
        while True:
            moment()

    for _ in range(2):
        threading.Thread(target=forever, daemon=True).start()
    time.sleep(delay)


def saved_at_exit(moment: Callable[[], None], delay: float) -> None:
    """A module is saved when the interpreter is about to end, and loads."""
    import tempfile

    import gradc

    folder = tempfile.TemporaryDirectory()
    module = state.get("module") or build()

    def late() -> None:
        noted("save in atexit", lambda: module.save(os.path.join(folder.name, "m")))
        noted("load in atexit", lambda: right(gradc.load_module(os.path.join(folder.name, "m"))))
        finish()

    atexit.register(late)
    state["late"] = True
    moment()


EVENTS = {
    f.__name__: f
    for f in (
        fork,
        fork_and_exit,
        fork_twice,
        fork_from_a_thread,
        spawn,
        threads,
        interrupt,
        interrupts,
        terminate,
        terminate_politely,
        at_exit,
        daemons,
        saved_at_exit,
    )
}


def finish() -> None:
    print("right" if not failures else "\n".join(failures), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    event, moment, delay = sys.argv[1:]
    action, before = MOMENTS[moment]
    if "module" in before:
        state["module"] = build()
    if "product" in before:
        state["product"] = product()
    main = os.getpid()
    EVENTS[event](action, float(delay))
    if "late" not in state and os.getpid() == main:
        finish()
