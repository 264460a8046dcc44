"""The process around us is an input: floating-point environment, signals, forks, exits, memory limits, environment
text.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import with_runtime

import gradc
from gradc import knobs, ops
from gradc.errors import CompilerError, GradcError, IndexOutOfRange, InvalidSetting, OutOfMemory
from gradc.process import files, forks, limits
from gradc.runtime.host import arrays, cpu, toolchain

ROOT = Path(__file__).resolve().parents[2]
HANG = 240  # seconds after which a child counts as one that hangs

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.optimised,  # kernels that are interrupted run as long as they were written to
    pytest.mark.skipif(os.name != "posix", reason="the CPU target is for POSIX systems"),
]

# Ctrl-C, forks and ends of processes in the middle of something.
kill_test = pytest.mark.long("gradc/codegen/cpu", "gradc/module", "gradc/process", "gradc/runtime", "templates/cpu")


def child(code: str, *arguments: str, **environment: str) -> str:
    """What another interpreter prints that runs the code to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
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
from gradc.runtime.host import pool, toolchain

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
    return (
        ops.softmax(x) / 3.0,
        tiny * 1e-9 + 1e-42,
        ops.sum(x / 3.0, axis=1),
        (x * 1e-5).astype("f16"),
        (x @ w) * 0.7,
        odd,
        tiny @ (w * 1e-9),
    )

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
    cotangents = [*[value[n] for n in names[:5]], None, value[names[6]]]
    gradients = module.backward(residuals, *cotangents, out={"w": total}, accumulate=True)
    return value, gradients

def digest(value, gradients):
    arrays = (*value.values(), *gradients.values())
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()
'''

ONE_HASH = (
    ENVIRONMENT
    + """
seen, kept, total, count = {}, [], np.zeros((129, 65), np.float32), 0
digest(*run())  # compiled, in peace
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
            seen.setdefault(digest(*found), []).append((threads, hex(kind), born))
            count += 1
assert all(a == b for a, b in kept), sorted({(hex(a), hex(b)) for a, b in kept if a != b})
assert len(seen) == 1, [(len(w), w[:6]) for w in seen.values()]
value, _ = found
for k, least in ((1, 1e-38), (3, 6e-5), (6, 1e-38)):
    assert ((np.abs(value[names[k]]) < least) & (value[names[k]] != 0)).mean() > 0.5
assert np.isinf(value[names[5]]).any() == (x > 3.5).any() and np.isnan(value[names[5]]).any()
print(count, "calls")
"""
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
    from gradc.runtime.host import pool
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


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_what_is_made_at_its_first_use_is_the_same_under_flush_to_zero(target: str, tmp_path: Path) -> None:
    """Constants that are no normal numbers: of a module from the cache or a file, of value and gradients in one
    program, of a pickle.
    """
    pytest.importorskip("torch")
    code = """
    import pickle, sys
    import numpy as np, torch, gradc
    from gradc import ops
    target, path = sys.argv[1:]
    def model(x):
        return ops.sum(x * ops.constant([1e-40, 3e-30, 5e-41, 1.0], shape=(4,), dtype="f32"))
    graph = gradc.trace(model, x="f32[N,4]")
    x = np.ones((2, 4), np.float32)
    def bits(module, joint=True):
        value, residuals = module.forward(x=x)
        gradients = [module.backward(residuals, np.float32(1))["x"]]
        if joint:
            gradients.append(module.value_and_grad(x=x)[1]["x"])
        return {gradient.tobytes() for gradient in gradients}
    module = gradc.compile(graph, wrt=["x"], target=target)
    wanted = bits(module)
    module.save(path)
    kept = pickle.dumps((module, graph))
    torch.set_flush_denormal(True)
    made = [
        gradc.compile(graph, wrt=["x"], target=target),
        gradc.load_module(path),
        gradc.load_module(path, native=False),
        pickle.loads(kept)[0],
    ]
    print(
        len(wanted),
        [bits(each) == wanted for each in made],
        pickle.loads(kept)[1] == graph,
        str(made[0].stages["joint"].result) == str(module.stages["joint"].result),
    )
    """
    assert (
        child(code, target, str(tmp_path / "m.gradc"), GRADC_CACHE_DIR=with_runtime(tmp_path / "cache")).strip()
        == "1 [True, True, True, True] True True"
    )


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

LONG = '''
import os, signal, sys, threading, time
import numpy as np
import gradc
from gradc import ops
from gradc.errors import GradcError, InvalidProblem
from gradc.runtime.host import pool

pool.set_num_threads(int(sys.argv[1]))
what = sys.argv[2]

def heavy(x):
    for _ in range(3):
        x = ops.tanh(ops.exp(x))
    return ops.sum(x, axis=1)

ones = np.ones((1, 4096), np.float32)
if what == "kernel":
    module = gradc.compile(gradc.trace(heavy, x="f32[N,4096]"))
    size, sized = 6_000, lambda n: {"x": np.broadcast_to(ones, (n, 4096)).copy()}
    short = {"x": ones.repeat(5, 0)}
elif what == "matmul":
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[N,4096]", w="f32[4096,M]"))
    size, sized = 3000, lambda n: {"x": ones.repeat(n, 0), "w": np.ones((4096, n), np.float32)}
    short = sized(5)
elif what == "splits":  # partial results, in memory of the thread that asks for them
    module = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[96,K]", w="f32[K,M]"))
    def sized(k, m=600):
        return {"x": np.ones((96, k), np.float32), "w": np.arange(m, dtype=np.float32) + np.zeros((k, 1), np.float32)}

    size, short = 1 << 17, sized(1 << 16, 96)
elif what == "row":  # one task that runs for long, in memory of its thread
    module = gradc.compile(gradc.trace(lambda x: ops.sum(ops.tanh(ops.exp(x)) * 1.5, axis=1), x="f32[N,M]"))
    size, sized = 20_000_000, lambda n: {"x": np.ones((1, n), np.float32)}
    short = sized(5)
elif what == "task":  # the same, of many rows
    graph = gradc.trace(lambda i, x: ops.scatter_add(i, x, axis=0, size=5_000_000), i="i64[N]", x="f32[N]")
    module = gradc.compile(graph, reductions={"*": "privatized"})
    size, sized = 5_000_000, lambda n: {"i": np.arange(n) * 7919 % 5_000_000, "x": np.ones(n, np.float32)}
    short = sized(5)
else:  # a sort and its passes, then sums by segment: later stages read what earlier ones wrote
    sums = lambda i, x: ops.scatter_add(i, ops.exp(ops.tanh(ops.exp(x))), axis=0, size=1000)
    module = gradc.compile(gradc.trace(sums, i="i64[N]", x="f32[N,4096]"), reductions={"*": "segmented"})
    size, sized = 20_000, lambda n: {"i": np.arange(n) % 1000, "x": ones.repeat(n, 0)}
    short = sized(5)
wanted = module(**short).tobytes()
for times in (1, 2, 4, 8):  # a call looks for signals once it has run for a tenth of a second, on a fast machine, too
    long = sized(size * times)
    began = time.perf_counter()
    module(**long)
    if time.perf_counter() - began > 0.3:
        break
began = time.perf_counter()
undisturbed = module(**long).tobytes() if what in ("kernel", "row", "task", "splits") else None

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


@kill_test
@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("what", ["kernel", "matmul", "segments", "row", "task"])
def test_ctrl_c_ends_a_call_and_the_module_goes_on(what: str, threads: str) -> None:
    assert "stopped 3" in child(INTERRUPTED, threads, what)


LONG_SIDES = """
import signal, sys, time
import numpy as np
from gradc.runtime.host import pool
m, n, k = map(int, sys.argv[1:])
a, b = np.broadcast_to(np.ones(k, "f4"), (1, m, k)), np.broadcast_to(np.ones(n, "f4"), (1, k, n))
out = np.zeros((1, m, n), "f4")
assert pool.num_threads() == 1  # compiled
signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.1)
began = time.perf_counter()
try:
    pool.matmul(a, b, out)
except KeyboardInterrupt:
    print("stopped", time.perf_counter() - began < 2)
"""


@kill_test
@pytest.mark.parametrize("shape", [("24", "2000000", "16000"), ("500000", "100", "8000")])
def test_ctrl_c_ends_a_product_with_a_long_side_that_is_read_in_place(shape: tuple[str, ...]) -> None:
    """It takes some seconds, and nothing of it is packed that would end a slab."""
    assert "stopped True" in child(LONG_SIDES, *shape, GRADC_NUM_THREADS="1")


ENDS_EARLY = (
    LONG
    + """
# Tasks of a call that was interrupted in its first tasks: counted, not timed.
import ctypes
from gradc.runtime.host import toolchain
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


@kill_test
@pytest.mark.parametrize("threads", ["1", "3"])
def test_no_task_runs_after_the_interrupt(threads: str) -> None:
    assert "stopped True" in child(ENDS_EARLY, threads, "kernel")


ENDS_WITHIN = (
    LONG
    + """
# Tasks that run until they are told to end, on the thread of the call and on others; then on others alone.
import ctypes
from gradc.codegen.text import read_template
from gradc.runtime.host import toolchain
source = '''
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "runtime.h"
static int64_t begun, done;
static int on_the_thread_of_the_call(void) { return syscall(SYS_gettid) == getpid(); }
__attribute__((visibility("default"))) void body(const void *args, int64_t task) {
  const gradc_ctx *ctx = args;
  struct timespec t = {0, 1000000};
  (void)task;
  __atomic_fetch_add(&begun, 1, __ATOMIC_RELAXED);
  while (!ctx->stopped(ctx)) nanosleep(&t, 0);
  __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
}
__attribute__((visibility("default"))) void others(const void *args, int64_t task) {
  if (on_the_thread_of_the_call()) {
    while (__atomic_load_n(&begun, __ATOMIC_RELAXED) == done) sched_yield();  /* until another has the other task */
  } else {
    body(args, task);
  }
}
__attribute__((visibility("default"))) int64_t count(int ended) { return ended ? done : begun; }
'''
library = toolchain.load_library(toolchain.compile_c(source), "body")
library.count.restype = ctypes.c_int64
for turn in (1, 2):
    context = pool.new_context()
    try:
        interrupt(0.3)
        pool.parallel_for(context, 100, library.body, ctypes.c_void_p(context.address))
        print("not interrupted")
    except KeyboardInterrupt:
        print(0 < library.count(0) == library.count(1) <= turn * int(sys.argv[1]))
if sys.argv[1] != "1":
    context = pool.new_context()
    try:
        interrupt(0.3)
        pool.parallel_for(context, 2, library.others, ctypes.c_void_p(context.address))
    except KeyboardInterrupt:
        print(library.count(0) == library.count(1))
"""
)


@kill_test
@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_long_task_ends_where_it_asks(threads: str) -> None:
    assert child(ENDS_WITHIN, threads, "kernel").split() == ["True"] * (2 if threads == "1" else 3)


@pytest.mark.parametrize(
    "function, types",
    [
        (lambda x, y: ops.sum(ops.tanh(x * y), axis=1), {"x": "f32[4,N,1]", "y": "f32[64]"}),
        (lambda x, y: ops.sum(ops.tanh(x * y), axis=(1, 2)), {"x": "f32[B,N,1]", "y": "f32[M]"}),
        (lambda x: ops.softmax(x), {"x": "f32[N]"}),
        (lambda x, y: ops.sum(x * y, axis=0), {"x": "f32[N]", "y": "f32[N]"}),
        (lambda x, i: ops.scatter_add(i, x, axis=0, size=1 << 23), {"x": "f32[N]", "i": "i32[N]"}),
    ],
    ids=["kept rows", "columns of two axes", "one row", "a sum of all", "one task"],
)
def test_tasks_that_may_be_long_ask(function: Any, types: dict[str, str]) -> None:
    source = gradc.compile(gradc.trace(function, **types), target="cpu").source()
    assert "gradc_poll(A->ctx, &since" in source


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
alone = sys.argv[1] == "1" or what == "row"
while not seen or seen[-1] != ("changed" if alone else "refused"):  # until it came in the middle of a job
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


@kill_test
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("what", ["kernel", "row", "splits"])
def test_handlers_of_the_users_own(what: str, threads: str) -> None:
    assert child(HANDLERS, threads, what).split() == ["enough", "handled"]


FORKING_HANDLER = (
    LONG
    + """
# A child made by a handler in the middle of a call lacks what the parent's workers did: it says so, and the next call
# is right.
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


FORKED_PRODUCT = (
    LONG
    + """
# So does a child in the middle of a product of the pool's own.
a, b, short = np.ones((1, 3000, 4096), np.float32), np.ones((1, 4096, 3000), np.float32), np.empty((1, 40, 3000), "f4")
out, children = np.empty((1, 3000, 3000), np.float32), []
signal.signal(signal.SIGINT, lambda *_: children.append(os.fork()))
parent = os.getpid()
interrupt(0.1)
try:
    while not children:
        pool.matmul(a, b, out)
    status = 0
except gradc.errors.DeviceError as error:
    status = 3 if os.getpid() != parent and str(error).startswith("matmul: the process was forked") else 4
if os.getpid() != parent:
    pool.matmul(a[:, :40], b, short)
    os._exit(status if (short == 4096).all() else 5)
assert status == 0 and (out == 4096).all()
print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) in (0, 3))
"""
)


@kill_test
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_handler_that_forks_in_a_product(threads: str) -> None:
    assert child(FORKED_PRODUCT, threads, "row").strip() == "True"


LOST = (
    LONG
    + """
# The child's handler starts a thread that computes while the parent's call ends here: the thread's result is whole.
children, found = [], []
def handler(number, frame):
    children.append(os.fork())
    if not children[-1]:
        found.append(threading.Thread(target=lambda: found.append(module(**long).tobytes() == undisturbed)))
        found[0].start()
        time.sleep(0.05)
signal.signal(signal.SIGINT, handler)
parent = os.getpid()
interrupt(0.1)
try:
    while not children:
        module(**long)
except gradc.errors.DeviceError:
    assert os.getpid() != parent
if os.getpid() != parent:
    found[0].join()
    os._exit(0 if found[1] is True else 5)
print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
"""
)


def test_a_call_that_a_fork_ends_ends_no_other() -> None:
    assert child(LOST, "2", "kernel").strip() == "0"


@kill_test
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_handler_that_forks(threads: str) -> None:
    assert child(FORKING_HANDLER, threads, "kernel").strip() == "[True]"


def test_ctrl_c_gives_no_partial_result() -> None:
    """What is added to is whole or untouched: the sum is made after the call."""
    code = (
        LONG
        + """
    out = np.zeros(len(long["x"]), np.float32)
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


# ---- Environment text ------------------------------------------------------------------------------------------------

COMMAND = (
    "import sys; from gradc.cli import main; sys.exit(0 if (code := main(['run', *sys.argv[1:]])) == 2 else code + 100)"
)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        *(
            ("GRADC_NUM_THREADS", text, "not an integer from 0 to 1024")
            for text in ("abc", "-1", "1.5", "1025", "9" * 5000, "١", "1_0", "0x4")
        ),
        *(("GRADC_STREAM_FROM", text, "not an integer") for text in ("1MB", "-5")),
        *(
            (name, "maybe", "neither a yes")
            for name in (
                "GRADC_CACHE",
                "GRADC_VERIFY",
                "GRADC_VALIDATE",
                "GRADC_PRINT_PASSES",
                "GRADC_SIM_CHECK",
                "GRADC_CHECK_RESIDUALS",
            )
        ),
        *(("GRADC_OPTIMIZE", text, "not one of 0, 1, 2, 3") for text in ("4", "-O2", "fast")),
        ("GRADC_OBJECTS", "a\nb", "not a path"),
        ("GRADC_TARGET", "gpu", "not one of cpu, numpy, cuda, cuda-sim"),
        ("GRADC_CACHE_DIR", "a\nb", "not a path"),
        *(("CC", text, "not a command") for text in ('"', "gcc '")),
        *(
            ("CC", f"gcc {flag}", flag.split()[-1].partition("=")[0])
            for flag in (
                "-Ofast",
                "-ffast-math",
                "-funsafe-math-optimizations",
                "-ffp-contract=fast",
                "-mdaz-ftz",
                "-mrecip=all",
                "-O2 -ffinite-math-only",
                "-ffp-model=fast",
                "-fdenormal-fp-math=preserve-sign,preserve-sign",
                "-mfpmath=387",
                "-Xclang -menable-no-nans",
                "-mllvm -enable-unsafe-fp-math",
            )
        ),
        ("CC", "gcc @flags", "file of flags"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(
    name: str, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidSetting) as caught:
        knobs.ALL[name].get()
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: ") and told in message and knobs.ALL[name].doc in message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GradcError)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GRADC_NUM_THREADS", " 4 "),
        ("GRADC_NUM_THREADS", "0"),
        ("GRADC_CACHE", "Yes"),
        ("CC", "ccache gcc -m64 -O3 -ffp-contract=off"),
        ("CC", ""),
        ("GRADC_TARGET", ""),
    ],
)
def test_a_variable_that_can_be_read(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    knobs.ALL[name].get()


@pytest.mark.parametrize(
    ("name", "text"), [("GRADC_NUM_THREADS", "abc"), ("GRADC_CACHE", "maybe"), ("CC", '"'), ("CC", "gcc -Ofast")]
)
def test_the_command_line_says_it_is_the_users_mistake(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import gradc\n\n\n@gradc.graph\ndef f(x: 'f32[3]'):\n    return x * 2.0\n")
    environment = {"GRADC_CACHE_DIR": with_runtime(tmp_path / "cache"), name: text}
    output = child(COMMAND, f"{tmp_path}/model.py:f", **environment)
    assert f"{name}={text!r}" in output and "bug" not in output and "Traceback" not in output


@pytest.mark.parametrize("flag", ["-Ofast -O3 -ffast-math", "-fno-signed-zeros", "-ffinite-math-only"])
def test_a_compiler_that_hides_such_a_flag_is_found_out(flag: str, tmp_path: Path) -> None:
    """A wrapper, a specs file or the compiler's own configuration adds it: the headers look at what the compiler was
    told.
    """
    real = toolchain.find_compiler().argv
    wrapper = tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(real)} "$@" {flag}\n')
    wrapper.chmod(0o755)
    with knobs.CC.set(str(wrapper)), pytest.raises(CompilerError, match="break IEEE 754"):
        toolchain.compile_c('#include "runtime.h"\nint x;\n')


# ---- fork ------------------------------------------------------------------------------------------------------------

MODEL = '''
import os, sys, threading, time
import numpy as np
import gradc
from gradc import ops
from gradc.process import forks

def build(k=0, target="cpu"):
    """A module that no cache has for another k."""
    soft = lambda t, x, w: ops.softmax(ops.embedding(t, x) @ w) * (1.0 + k)
    graph = gradc.trace(soft, t="i64[N]", x="f32[V,8]", w="f32[8,4]")
    return gradc.compile(graph, wrt=["x", "w"], target=target)

GIVEN = {"t": np.arange(500) % 6, "x": np.ones((6, 8), np.float32), "w": np.full((8, 4), 0.5, np.float32)}

def work(module):
    y, residuals = module.forward(**GIVEN)
    return b"".join(np.ascontiguousarray(a).tobytes() for a in (y, *module.backward(residuals, y).values()))

def forked(do, seconds=60):
    """The exit status of a child that does it; it is killed, and says 99, when it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 99
'''

LATE_IMPORTS = (
    MODEL
    + """
# Every import that gradc begins after `import gradc` stands under held_off, or a child that is forked in the middle
# waits for it for ever.
bare = []
def hook(event, args):
    if event != "import":
        return
    frame, begun = sys._getframe(1), None
    while frame is not None and begun is None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return  # inside another import
        if frame.f_globals.get("__name__", "").partition(".")[0] == "gradc":
            begun = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
        frame = frame.f_back
    if begun and not forks.held_off.is_inside():
        bare.append((args[0], begun))
sys.addaudithook(hook)
for target in ("cpu", "numpy", "cuda-sim"):
    module = build(0, target)
    work(module)
    str(module), module.explain(N=5, V=6), module.memory(N=5, V=6), module.source(), module.stages, module.kernels
    module.forward(t=GIVEN["t"], x=np.ones((8, 6), np.float32).T, w=GIVEN["w"])
folder = sys.argv[1]
module = build()
module.save(folder)
work(gradc.load_module(folder))
module.graph.save(folder + ".gir")
gradc.load(folder + ".gir")
gradc.plans.embedding_backward(D=4).run(indices=np.arange(3), dy=np.ones((3, 4), np.float32), dims={"V": 5})
assert not bare, bare
print("held off")
"""
)


@kill_test
@pytest.mark.parametrize("cache", ["new", "hit"])
def test_late_imports_hold_forks_off(cache: str, tmp_path: Path) -> None:
    folder = with_runtime(tmp_path / "cache")
    for _ in range(1 + (cache == "hit")):
        assert "held off" in child(LATE_IMPORTS, str(tmp_path / "module"), GRADC_CACHE_DIR=folder)


FIRST_COMPILATION = (
    MODEL
    + """
# A process forks again and again while another thread imports, renders, compiles, loads and runs for the first time.
found, done = [], []
thread = threading.Thread(target=lambda: done.append(work(build(float(sys.argv[1])))))
thread.start()
while thread.is_alive():
    pid = os.fork()
    if pid == 0:
        try:
            import signal
            signal.alarm(120)  # ends one that hangs
            os._exit(0 if len(work(build(1000.0))) else 1)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    found.append(pid)
    time.sleep(float(sys.argv[2]))
    if len(found) >= 6:
        break
thread.join()
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in found]
assert not any(ends) and done, ends
print("children", len(ends))
"""
)


@kill_test
@pytest.mark.parametrize("pause", ["0.0", "0.05"])
def test_fork_during_another_threads_first_compilation(pause: str, tmp_path: Path) -> None:
    # Without the runtime seven processes would compile it at once.
    assert "children" in child(FIRST_COMPILATION, "7", pause, GRADC_CACHE_DIR=with_runtime(tmp_path))


DURING_CALLS = (
    MODEL
    + """
from gradc.runtime.host import pool
pool.set_num_threads(3)
module = build()
product = gradc.compile(gradc.trace(lambda a, b: a @ b, a="f32[N,256]", b="f32[256,256]"))
a, b = np.ones((300, 256), np.float32), np.ones((256, 256), np.float32)
wanted, right = work(module), product(a=a, b=b).tobytes()
stop = threading.Event()
def busy():
    while not stop.is_set():
        assert work(module) == wanted
        assert product(a=a, b=b).tobytes() == right
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads: thread.start()
def check():
    assert work(module) == wanted and product(a=a, b=b).tobytes() == right
    pool.set_num_threads(2)
    assert work(module) == wanted and product(a=a, b=b).tobytes() == right
ends = [forked(check) for _ in range(40)]
stop.set()
for thread in threads: thread.join()
assert not any(ends), ends
print("forked", len(ends))
"""
)


def test_fork_during_calls_of_other_threads() -> None:
    assert "forked 40" in child(DURING_CALLS)


def interrupted(work, within, each):
    """``work()`` with ``each(frame, event)`` wherever a signal's handler could run in the lines of a file; in a thread,
    so that what hangs fails.
    """
    found = []

    def trace(frame, event, _):
        if frame.f_code.co_filename != within:
            return None
        each(frame, event)
        return trace

    def run():
        sys.settrace(trace)
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "hangs"
    return found[0]


def test_an_interrupt_does_not_keep_forks_off() -> None:
    def interrupt(frame, event):
        if event == "return":
            raise KeyboardInterrupt

    def work():
        with forks.held_off:
            pass

    interrupted(work, forks.__file__, interrupt)
    assert interrupted(work, "", lambda *_: None) is None


def test_the_pool_serves_a_handler_in_the_middle_of_a_request() -> None:
    pool, size = arrays.OutputPool(limit=1 << 30), 1 << 18
    kept: list[np.ndarray] = []
    seen: set[int] = set()

    def each(frame, event):
        if event == "line" and frame.f_lineno not in seen:  # once each: what is counted meanwhile is counted there too
            seen.add(frame.f_lineno)
            kept.append(pool.empty((size,), np.uint8))
            kept[-1][:] = len(kept) % 251

    for brief in (False, True):
        for _ in range(3):  # with nothing to reuse, then with something
            seen.clear()
            array = interrupted(lambda brief=brief: pool.empty((size,), np.uint8, brief), arrays.__file__, each)
            array[:] = 255
            assert len(kept) > 10 and all((other == i % 251).all() for i, other in enumerate(kept, 1))
            assert pool.reset_peak() == size * (len(kept) + 1)
            del array
            while kept:
                kept.pop()
            assert pool.reset_peak() == 0


def test_a_call_in_the_middle_of_a_call_keeps_its_error_to_itself() -> None:
    module = gradc.compile(gradc.trace(lambda t, i: ops.gather(t, i, axis=0), t="f32[V]", i="i64[N]"), target="cpu")
    table, right, wrong = np.arange(5, dtype=np.float32), np.array([4, 1]), np.array([0, 9])
    wanted = module(t=table, i=right)

    def failing(frame, event):
        with pytest.raises(IndexOutOfRange):
            module(t=table, i=wrong)

    def fine(frame, event):
        assert np.array_equal(module(t=table, i=right), wanted)

    for _ in range(2):
        assert np.array_equal(interrupted(lambda: module(t=table, i=right), cpu.__file__, failing), wanted)
        error = interrupted(lambda: module(t=table, i=wrong), cpu.__file__, fine)
        assert isinstance(error, IndexOutOfRange) and (error.position, error.value) == (1, 9)


LOCKS = (
    MODEL
    + """
# Whatever lock of ours another thread holds is free in the child.
module = build()
wanted = work(module)
held = [each for each in forks._locks]
assert len(held) >= 5
ready, go = threading.Event(), threading.Event()
def hold():
    for each in held: each.acquire()
    ready.set()
    go.wait()
    for each in held: each.release()
thread = threading.Thread(target=hold)
thread.start()
ready.wait()
def check():
    assert work(module) == wanted
    assert work(build(float(os.getpid())))
end = forked(check)
go.set()
thread.join()
assert end == 0, end
print("free", work(module) == wanted)
"""
)


def test_a_temporary_folder_is_looked_for_while_nobody_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tempfile does so once, under a lock of its own that a child would find locked."""
    held: list[bool] = []
    monkeypatch.setattr("tempfile.gettempdir", lambda: held.append(forks.held_off.is_inside()) or str(tmp_path))
    with files.scratch() as folder:
        assert folder.parent == tmp_path
    assert held == [True]


def test_locks_are_free_in_a_child() -> None:
    assert "free True" in child(LOCKS)


def test_a_property_that_is_kept_has_no_lock() -> None:
    """Python 3.11's functools.cached_property holds one for all instances while it computes."""
    sources = [path for path in (ROOT / "gradc").rglob("*.py") if "process" not in path.parts]
    bare = (
        "functools.cached_property",
        "from functools import cached_property",
        "threading.Lock()",
        "threading.RLock()",
        "threading.Condition()",
    )
    found = [f"{path.name}: {text}" for path in sources for text in bare if text in path.read_text()]
    assert not found, f"gradc.process.forks has what a child can use: {found}"


# ---- Memory ----------------------------------------------------------------------------------------------------------

GB = 1 << 30
FILES = {
    "proc/meminfo": "MemTotal:       33554432 kB\nMemFree:         1 kB\nMemAvailable:   16777216 kB\n",
    "proc/self/statm": "262144 1 1 1 0 131072 0\n",
}
V2 = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "33 29 0:30 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n34 29 0:31 / /sys/fs/cgroup/cpu rw"
    " shared:9 - cgroup cgroup rw,cpu\n"
)


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {**FILES, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, most: object, used: int, *, v1: bool = False, **more: str) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    return {f"{folder}/{name}": f"{value}\n" for name, value in zip(names, (most, used), strict=True)} | {
        f"{folder}/{name.replace('_', '.')}": text for name, text in more.items()
    }


SYSTEMS: dict[str, tuple[dict[str, str], int, str]] = {
    "no groups": ({}, 16 * GB, "machine"),
    "version 2": (
        {
            "proc/self/cgroup": "0::/user/job\n",
            "proc/self/mountinfo": V2,
            **group("sys/fs/cgroup/user/job", 4 * GB, GB),
        },
        3 * GB,
        "user/job/memory.max",
    ),
    "an ancestor": (
        {
            "proc/self/cgroup": "0::/user/job\n",
            "proc/self/mountinfo": V2,
            **group("sys/fs/cgroup/user/job", "max", GB),
            **group("sys/fs/cgroup/user", 2 * GB, GB),
        },
        GB,
        "user/memory.max",
    ),
    "memory.high": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2,
            **group("sys/fs/cgroup/job", 8 * GB, GB, memory_high=f"{2 * GB}\n"),
        },
        GB,
        "memory.high",
    ),
    "files are given back": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2,
            **group(
                "sys/fs/cgroup/job",
                4 * GB,
                4 * GB,
                memory_stat=f"anon 5\ninactive_file {2 * GB}\nactive_file {GB}\nfile {4 * GB}\n",
            ),
        },
        3 * GB,
        "memory.max",
    ),
    "used up": (
        {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2, **group("sys/fs/cgroup/job", GB, 2 * GB)},
        0,
        "memory.max",
    ),
    "a container of version 2": (
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, **group("sys/fs/cgroup", GB, 0)},
        GB,
        "cgroup/memory.max",
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
            "proc/self/mountinfo": V1.format(top="/"),
            **group("sys/fs/cgroup/memory/docker/1", 3 * GB, GB, v1=True),
        },
        2 * GB,
        "limit_in_bytes",
    ),
    "a container of version 1": (
        {
            "proc/self/cgroup": "4:memory:/docker/1\n",
            "proc/self/mountinfo": V1.format(top="/docker/1"),
            **group("sys/fs/cgroup/memory", 3 * GB, GB, v1=True),
        },
        2 * GB,
        "limit_in_bytes",
    ),
    "seen from outside": (
        {
            "proc/self/cgroup": "4:memory:/docker/1/sub\n",
            "proc/self/mountinfo": V1.format(top="/docker/2"),
            **group("sys/fs/cgroup/memory", 3 * GB, GB, v1=True),
        },
        2 * GB,
        "limit_in_bytes",
    ),
    "no limit of version 1": (
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "proc/self/mountinfo": V1.format(top="/"),
            **group("sys/fs/cgroup/memory/a", 9223372036854771712, GB, v1=True),
        },
        16 * GB,
        "machine",
    ),
    "nonsense": (
        {"proc/self/cgroup": "what\n", "proc/self/mountinfo": "x y\n", **group("sys/fs/cgroup", 1, 0)},
        16 * GB,
        "machine",
    ),
    "a path that leaves": (
        {"proc/self/cgroup": "0::/../../etc\n", "proc/self/mountinfo": V2, **group("sys/fs/cgroup", 5 * GB, 0)},
        5 * GB,
        "cgroup/memory.max",
    ),
    "numbers that are none": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2,
            **group("sys/fs/cgroup", "many", 0),
            "proc/meminfo": "MemAvailable: lots\n",
        },
        sys.maxsize,
        "no limit",
    ),
}


@pytest.mark.parametrize("case", SYSTEMS)
def test_what_a_process_may_have(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, left, name = SYSTEMS[case]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (limits.resource.RLIM_INFINITY,) * 2)
    found = limits.tightest(system(tmp_path, files))
    assert found.left == left and name in found.name


def test_resource_limits_count_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for which, taken in (("RLIMIT_AS", 262144), ("RLIMIT_DATA", 131072)):
        number = getattr(limits.resource, which)
        monkeypatch.setattr(
            limits.resource,
            "getrlimit",
            lambda asked, number=number: (3 * GB if asked == number else limits.resource.RLIM_INFINITY,) * 2,
        )
        found = limits.tightest(system(tmp_path, {}))
        assert (found.left, found.total) == (3 * GB - taken * page, 3 * GB) and which in found.name


def test_a_call_that_does_not_fit_says_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x) * 2.0, x="f32[N,64]"), target="cpu")
    kept = module.forward.thread_bytes({"N": 4})
    left, needed = 1000 + kept, 1024 + kept
    monkeypatch.setattr(
        arrays, "tightest", lambda: limits.Limit(left - arrays.pool.retained, 2000, "control group, job/memory.max")
    )
    monkeypatch.setattr(arrays, "tightest_total", lambda: 2000)
    arrays.worth_asking.cache_clear()
    try:
        with pytest.raises(OutOfMemory) as caught:
            module(x=np.ones((4, 64), np.float32))
        said = (
            f"needs {needed} bytes of outputs and workspace, "
            f"{left} are left (control group, job/memory.max, 2000 in all)"
        )
        for error in (module.can_implement(x=np.ones((4, 64), np.float32)), caught.value):
            assert isinstance(error, OutOfMemory) and said in str(error)
        assert module(x=np.ones((3, 64), np.float32)).shape == (3, 64)
    finally:
        arrays.worth_asking.cache_clear()


ADDRESSES = """
import resource, sys
import numpy as np
import gradc
from gradc import ops
from gradc.errors import OutOfMemory
from gradc.process import limits
from gradc.runtime.host import pool
pool.set_num_threads(2)
module = gradc.compile(gradc.trace(lambda x: ops.exp(x) * 2.0, x="f32[N,64]"))
product = gradc.compile(gradc.trace(lambda a, b: a @ b, a="f32[N,64]", b="f32[64,64]"))
small = np.ones((4, 64), np.float32)
wanted = module(x=small).tobytes()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
x = np.broadcast_to(np.float32(1), (1 << 20, 64)).view()
resource.setrlimit(resource.RLIMIT_AS, (taken + (200 << 20), -1))
try:
    module.forward.bind_call({"x": np.lib.stride_tricks.as_strided(small, (1 << 20, 64), (0, 4))}, allocate=False)
except OutOfMemory as error:
    needed = (1 << 29) + module.forward.thread_bytes({"N": 1 << 20})
    assert "RLIMIT_AS" in str(error) and str(needed) in str(error), error
    print("refused")  # the output, and a copy of what lies in no order
# No room for what a thread keeps for itself: an error, not other bits and not the end of the process.
a, b = np.ones((2000, 64), np.float32), np.ones((64, 64), np.float32)
equal = np.equal(a, 64)  # the comparison below needs addresses as well
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 19), -1))
for turn in range(3):
    try:
        found = product(a=a, b=b)
        assert np.equal(found, 64, out=equal).all()
        print("had room")
    except OutOfMemory as error:
        print("typed", "bytes" in str(error))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert (product(a=a, b=b) == 64).all() and module(x=small).tobytes() == wanted
print("goes on")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is not enforced elsewhere")
def test_a_process_with_few_addresses() -> None:
    said = child(ADDRESSES).splitlines()
    assert said[0] == "refused" and said[-1] == "goes on" and set(said[1:-1]) <= {"typed True", "had room"}, said


# ---- The end of a process, and the end of a compilation --------------------------------------------------------------

AT_EXIT = (
    MODEL.replace("import os, sys", "import atexit, os, sys")
    + """
late = []
atexit.register(lambda: print("saved" if late == ["ran", "compiled", "loaded"] else late, flush=True))
module = build()
wanted = work(module)
def last():
    assert work(module) == wanted
    late.append("ran")
    assert len(work(build(2.0)))  # passes, compiler and all
    late.append("compiled")
    module.save(sys.argv[1])
    assert work(gradc.load_module(sys.argv[1])) == wanted
    late.append("loaded")
atexit.register(last)
"""
)


def test_calls_compilations_and_files_in_an_atexit_handler(tmp_path: Path) -> None:
    folder = with_runtime(tmp_path / "cache")
    assert child(AT_EXIT, str(tmp_path / "module"), GRADC_CACHE_DIR=folder).strip() == "saved"


DAEMONS = (
    MODEL
    + """
from gradc.runtime.host import pool
pool.set_num_threads(3)
module = build()
product = gradc.compile(gradc.trace(lambda a, b: a @ b, a="f32[N,256]", b="f32[256,256]"))
a, b = np.ones((300, 256), np.float32), np.ones((256, 256), np.float32)
def busy():
    while True:
        work(module)
        product(a=a, b=b)
work(module)
for _ in range(3): threading.Thread(target=busy, daemon=True).start()
time.sleep(0.05 * int(sys.argv[1]))
print("ends", flush=True)
"""
)


@kill_test
def test_daemon_threads_that_call_while_the_interpreter_ends() -> None:
    for turn in range(4):
        assert "ends" in child(DAEMONS, str(turn))


STOPPED_COMPILATIONS = (
    MODEL
    + """
import signal, glob, tempfile
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
build(0.5)  # what is imported late is there
stopped = 0
for turn in range(24):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.012 * turn)
        work(build(100.0 + turn))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        stopped += 1
for thread in threading.enumerate():  # an interrupt may come while a compilation's own threads are waited for
    if thread is not threading.main_thread():
        assert not thread.daemon
        thread.join()
listed = f"/proc/self/task/{os.getpid()}/children"
children = open(listed).read().split() if os.path.exists(listed) else []
assert not children, children
assert not os.listdir(tempfile.gettempdir()), os.listdir(tempfile.gettempdir())
left = glob.glob(os.environ["GRADC_CACHE_DIR"] + "/.tmp-*")
assert not left, left
fresh = work(build(3.0))
assert work(build(3.0)) == fresh
assert stopped, "no signal came during 24 compilations"
print("stopped", stopped)
"""
)


@kill_test
def test_ctrl_c_in_passes_and_in_the_compiler_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    assert "stopped" in child(
        STOPPED_COMPILATIONS, TMPDIR=str(tmp_path / "tmp"), GRADC_CACHE_DIR=with_runtime(tmp_path / "cache")
    )


@kill_test
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the slow compiler is gcc")
def test_ctrl_c_does_not_wait_for_the_compiler(tmp_path: Path) -> None:
    """It sleeps for longer than a test may take; its group is killed."""
    slow = tmp_path / "gcc"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *-v) exec gcc "$@";; esac\necho $$ >> {tmp_path}/began\nsleep 1000\n')
    slow.chmod(0o755)
    code = (
        MODEL
        + """
    import signal
    def when_begun():
        while not os.path.exists(sys.argv[1]): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=when_begun).start()
    try:
        build(9.0)
    except KeyboardInterrupt:
        print("stopped")
    """.replace("\n    ", "\n")
    )
    assert "stopped" in child(code, str(tmp_path / "began"), CC=str(slow), GRADC_CACHE_DIR=str(tmp_path / "cache"))
    for line in (tmp_path / "began").read_text().split():
        assert not Path(f"/proc/{line}").exists()
