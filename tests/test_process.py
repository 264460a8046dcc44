"""The process around us is an input: floating-point environment, signals, forks, exits, memory limits, environment text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HANG = 240  # seconds after which a child counts as one that hangs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the CPU target is for POSIX systems")


def child(code: str, *arguments: str, **environment: str) -> str:
    """What another interpreter prints that runs the code to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        pytest.fail(f"hangs; so far: {process.communicate()[0]}")
    assert process.returncode == 0, f"exit status {process.returncode}: {output}"
    return output


# ---- The floating-point environment ----------------------------------------------------------------------------------

ENVIRONMENT = '''
import ctypes, hashlib, sys
import numpy as np
import gradc
from gradc import ops
from gradc.runtime import pool, toolchain

# Bits of MXCSR and of FPCR.  x86: exceptions unmasked, FTZ + DAZ, rounding down, up, to zero; AArch64 the same.
SOURCE = """
#include <stdint.h>
#define EXPORT __attribute__((visibility("default")))
#if defined(__x86_64__)
EXPORT uint64_t get(void) { uint32_t x; __asm__ volatile("stmxcsr %0" : "=m"(x)); return x; }
EXPORT void set(uint64_t v) { uint32_t x = (uint32_t)v; __asm__ volatile("ldmxcsr %0" : : "m"(x)); }
EXPORT const uint64_t kinds[] = {0x1f80, 0x9f80, 0x1fc0, 0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0xffc0, 0x0000};
EXPORT const int count = 9;
#elif defined(__aarch64__)
EXPORT uint64_t get(void) { uint64_t x; __asm__ volatile("mrs %0, fpcr" : "=r"(x)); return x; }
EXPORT void set(uint64_t x) { __asm__ volatile("msr fpcr, %0" : : "r"(x)); }
EXPORT const uint64_t kinds[] = {0, 1 << 24, 1 << 19, 1 << 22, 2 << 22, 3 << 22, 0x1f00};
EXPORT const int count = 7;
#else
EXPORT uint64_t get(void) { return 0; }
EXPORT void set(uint64_t x) { (void)x; }
EXPORT const uint64_t kinds[] = {0};
EXPORT const int count = 1;
#endif
"""
thread = toolchain.load_library(toolchain.compile_c(SOURCE), "environment")
thread.get.restype, thread.set.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
kinds = list((ctypes.c_uint64 * ctypes.c_int.in_dll(thread, "count").value).in_dll(thread, "kinds"))

def sensitive(x, w, s):
    """Subnormals in and out, sums and divisions that round, an overflow to infinity and 0/0 on the way."""
    tiny = x * 1e-30 * s
    odd = ops.where(x > 3.5, ops.exp(x * 1000.0), (x - x) / (x - x))
    return ops.softmax(x) / 3.0, tiny * 1e-9 + 1e-42, ops.sum(x / 3.0, axis=1), (x * 1e-5).astype("f16"), (x @ w) * 0.7, odd, tiny @ (w * 1e-9)

rng = np.random.default_rng(0)
x = rng.standard_normal((257, 129)).astype(np.float32)
w = rng.standard_normal((129, 65)).astype(np.float32)
target = sys.argv[1]
if target != "cpu":
    x = x[:9]
graph = gradc.trace(sensitive, x="f32[N,129]", w="f32[129,65]", s="f32[]")
module = gradc.compile(graph, wrt=["x", "w"], target=target)
names = module.graph.output_names

def run():
    """The call under the environment that is set; nothing else runs under it."""
    value, residuals = module.forward(x=x, w=w, s=0.1)
    gradients = module.backward(residuals, *[value[n] for n in (names[0], names[1], names[2], names[3], names[4])], None, value[names[6]], out={"w": total}, accumulate=True)
    return value, gradients

def digest(value, gradients):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in (*value.values(), *gradients.values()))).hexdigest()
'''

ONE_HASH = (
    ENVIRONMENT
    + '''
seen, kept, total, count = {}, [], np.zeros((129, 65), np.float32), 0
digest(*run())  # compiled, in peace
for own in (True, False) if target == "cpu" else (True,):
    pool.use_blas(not own)
    for threads in range(1, 6) if target == "cpu" else (1,):
        for kind in kinds:
            for born in (True, False) if target == "cpu" else (False,):
                total = np.ones((129, 65), np.float32)
                if born:  # workers that are born under it: the first job makes them
                    pool.set_num_threads(7)
                thread.set(kind)
                if born:
                    pool.set_num_threads(threads)
                before = thread.get()
                found = run()
                after = thread.get()
                thread.set(kinds[0])
                kept.append((before & ~0x3f, after & ~0x3f))
                seen.setdefault((own, digest(*found)), []).append((threads, hex(kind), born))
                count += 1
assert all(a == b for a, b in kept), sorted({(hex(a), hex(b)) for a, b in kept if a != b})
for own in (True, False) if target == "cpu" else (True,):
    ways = [at for (o, _), at in seen.items() if o == own]
    assert len(ways) == 1, [(len(w), w[:6]) for w in ways]
value, _ = found
assert all(((np.abs(value[names[k]]) < least) & (value[names[k]] != 0)).mean() > 0.5 for k, least in ((1, 1e-38), (3, 6e-5), (6, 1e-38)))
assert np.isinf(value[names[5]]).any() == (x > 3.5).any() and np.isnan(value[names[5]]).any()
print(count, "calls")
'''
)


@pytest.mark.parametrize("target", ["cpu", "numpy", "cuda-sim"])
def test_one_hash_for_every_floating_point_environment(target: str) -> None:
    assert "calls" in child(ONE_HASH, target)


COMPILED_UNDER = (
    ENVIRONMENT
    + """
total = np.zeros((129, 65), np.float32)
wanted = {}
for kind in kinds[:-1]:  # what traps is tried on calls alone: Python's own arithmetic would not survive it
    thread.set(kind)
    graph = gradc.trace(lambda x: ops.exp(x * 1.1 * 1.3 + 1e-42) * [0.1, 0.7], x="f32[N,2]")
    other = gradc.parse(str(graph))
    texts = [str(m.forward.program) for m in (gradc.compile(g, target=target) for g in (graph, other))]
    thread.set(kinds[0])
    wanted.setdefault(tuple(texts), []).append(hex(kind))
assert len(wanted) == 1, wanted
print("equal")
"""
)


def test_what_is_compiled_under_an_environment_is_the_same() -> None:
    """Constants are folded and parsed in the default one; a wrong one would stay in the cache for everybody."""
    assert "equal" in child(COMPILED_UNDER, "cpu", GRADC_CACHE="0")


def test_torchs_flush_to_zero_changes_no_bits() -> None:
    pytest.importorskip("torch")
    code = """
    import numpy as np, torch, gradc
    from gradc.runtime import pool
    pool.set_num_threads(2)
    module = gradc.compile(gradc.trace(lambda x: x * 0.5, x="f32[N]"))
    x = np.full(100_000, 1e-38, np.float32)
    wanted = (x * np.float32(0.5)).tobytes()
    torch.set_flush_denormal(True)
    found = {module(x=x).tobytes() == wanted for _ in range(30)}
    kept = bool(torch.tensor(1e-38) * 0.5 == 0)
    print(found, kept)
    """
    assert child(code).strip() == "{True} True"


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

LONG = '''
import os, signal, sys, threading, time
import numpy as np
import gradc
from gradc import ops
from gradc.errors import GradcError, InvalidProblem
from gradc.runtime import pool

pool.set_num_threads(int(sys.argv[1]))
what = sys.argv[2]

def heavy(x):
    for _ in range(3):
        x = ops.tanh(ops.exp(x))
    return ops.sum(x, axis=1)

ones = np.ones((1, 4096), np.float32)
if what == "kernel":
    module = gradc.compile(gradc.trace(heavy, x="f32[N,4096]"))
    long, short = {"x": np.broadcast_to(ones, (6_000, 4096)).copy()}, {"x": ones.repeat(5, 0)}
elif what == "matmul":
    pool.use_blas(sys.argv[3] == "blas")
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[N,4096]", w="f32[4096,M]"))
    long, short = ({"x": ones.repeat(n, 0), "w": np.ones((4096, n), np.float32)} for n in (3000, 5))
else:  # a sort and its passes, then sums by segment: later stages read what earlier ones wrote
    module = gradc.compile(gradc.trace(lambda i, x: ops.scatter_add(i, ops.exp(ops.tanh(ops.exp(x))), axis=0, size=1000), i="i64[N]", x="f32[N,4096]"), reductions={"*": "segmented"})
    long, short = ({"i": np.arange(n) % 1000, "x": ones.repeat(n, 0)} for n in (20_000, 5))
wanted = module(**short).tobytes()
began = time.perf_counter()
undisturbed = module(**long).tobytes() if what == "kernel" else None

def interrupt(after):
    """Ctrl-C in so many seconds: the same handler, by a signal that needs no thread to send it."""
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, after)
'''

INTERRUPTED = (
    LONG
    + """
stopped = 0
for turn in range(3):
    try:
        interrupt(0.02)
        while True:  # however fast this machine is, one of these calls is interrupted
            module(**long)
    except KeyboardInterrupt:
        stopped += 1
    assert module(**short).tobytes() == wanted
assert stopped == 3
print("stopped", stopped)
"""
)


@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("what", ["kernel", "matmul own", "matmul blas", "segments"])
def test_ctrl_c_ends_a_call_and_the_module_goes_on(what: str, threads: str) -> None:
    assert "stopped 3" in child(INTERRUPTED, threads, *what.split())


ENDS_EARLY = (
    LONG
    + """
# Tasks of a call that was interrupted in its first tasks: counted, not timed.
import ctypes
from gradc.runtime import toolchain
source = '''
#include <stdint.h>
#include <time.h>
static int64_t done;
__attribute__((visibility("default"))) void body(const void *args, int64_t task) {
  (void)args, (void)task;
  struct timespec t = {0, 1000000};
  nanosleep(&t, 0);
  __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
}
__attribute__((visibility("default"))) int64_t count(void) { return done; }
'''
library = toolchain.load_library(toolchain.compile_c(source), "body")
library.count.restype = ctypes.c_int64
tasks = 100_000_000  # more than a day
try:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    pool.parallel_for(pool.new_context(), tasks, library.body)
    print("not interrupted")
except KeyboardInterrupt:
    before = library.count()
    time.sleep(0.05)
    print("stopped", before < tasks and library.count() == before)
"""
)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_no_task_runs_after_the_interrupt(threads: str) -> None:
    assert "stopped True" in child(ENDS_EARLY, threads, "kernel")


HANDLERS = (
    LONG
    + """
# A handler that does not raise ends nothing; it may use the same module, and may not change the pool.
seen = []
def handler(number, frame):
    seen.append(module(**short).tobytes() == wanted)
    try:
        pool.set_num_threads(3)
        seen.append("changed")
    except InvalidProblem:
        seen.append("refused")
signal.signal(signal.SIGINT, handler)
while not seen or seen[-1] != ("refused" if sys.argv[1] != "1" else "changed"):  # until it came in the middle of a job
    seen.clear()
    interrupt(0.02)
    assert module(**long).tobytes() == undisturbed
assert seen[0] is True, seen

# What a handler raises is what the call raises.
class Stop(Exception):
    pass
def raising(number, frame):
    raise Stop("enough")
signal.signal(signal.SIGINT, raising)
try:
    interrupt(0.02)
    while True:
        module(**long)
except Stop as stop:
    print(stop)

# In another thread a call goes on: handlers are the main thread's.
found, signal_seen = [], []
signal.signal(signal.SIGINT, lambda *_: signal_seen.append(1))
others = [threading.Thread(target=lambda: found.append(module(**long).tobytes() == undisturbed)) for _ in range(2)]
for thread in others: thread.start()
os.kill(os.getpid(), signal.SIGINT)
for thread in others: thread.join()
assert found == [True, True] and signal_seen
assert module(**short).tobytes() == wanted
print("handled")
"""
)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_handlers_of_the_users_own(threads: str) -> None:
    assert child(HANDLERS, threads, "kernel").split() == ["enough", "handled"]


FORKING_HANDLER = (
    LONG
    + """
# A child made by a handler in the middle of a call lacks what the parent's workers did: it says so, and the next call is right.
children = []
def handler(number, frame):
    children.append(os.fork())
signal.signal(signal.SIGINT, handler)
parent = os.getpid()
interrupt(0.1)
try:
    while not children:
        result = module(**long).tobytes()
        assert os.getpid() == parent or result == undisturbed
    status = 0
except gradc.errors.DeviceError as error:
    status = 3 if os.getpid() != parent and "forked" in str(error) else 4
if os.getpid() != parent:
    os._exit(status if module(**short).tobytes() == wanted else 5)
assert status == 0 and result == undisturbed
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, 3) for pid in children))
"""
)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_handler_that_forks(threads: str) -> None:
    assert child(FORKING_HANDLER, threads, "kernel").strip() == "[True]"


def test_ctrl_c_gives_no_partial_result() -> None:
    """What is added to is whole or untouched: the sum is made after the call."""
    code = (
        LONG
        + """
    out = np.zeros(6_000, np.float32)
    interrupt(0.02)
    whole = 0
    try:
        while True:
            module.forward.run(long, out={module.graph.output_names[0]: out}, accumulate=True)
            whole += 1
    except KeyboardInterrupt:
        pass
    first = np.frombuffer(undisturbed, np.float32)
    total = np.zeros_like(first)
    for _ in range(whole):
        total += first
    print((out == total).all() or (out == total + first).all())
    """.replace("\n    ", "\n")
    )
    assert child(code, "2", "kernel").strip() == "True"
