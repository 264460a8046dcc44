"""One contestant of one case, in a process of its own: reads ``run COUNT`` lines, answers with the seconds of each
run.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .case import Array, Case
from .cases import all_cases


def ours(case: Case) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]], dict[str, Any]]:
    import gradc

    arrays = case.arrays()
    began = time.perf_counter()
    module = gradc.compile(gradc.trace(case.ours, **case.types), wrt=case.wrt, target="cpu")
    built = time.perf_counter() - began
    assert all(executable.native is not None for executable in module.executables.values())
    before = memory("VmRSS", afresh=True)
    if not case.wrt:
        return (
            lambda: module(arrays),
            lambda: {"y": module(arrays)},
            {
                "kernels": [k.name for k in module.forward.program.kernels],
                "floor_bytes": module.forward.floor(),
                "product_flops": product_flops(module.forward.program, {}),
                "compile_s": built,
                "before_MB": before,
            },
        )
    y, residuals = module.forward(**arrays)
    dy = case.upstream(np.shape(y), np.asarray(y).dtype)

    def backward() -> Any:
        return module.backward(residuals, dy)

    def both() -> Any:
        _, kept = module.forward(**arrays)
        return module.backward(kept, dy)

    timed = (module.forward, module.backward) if case.forward else (module.backward,)
    names = [k.name for e in timed for k in e.program.kernels]
    floor = sum(e.floor(**residuals.dims) for e in timed)
    flops = sum(product_flops(e.program, residuals.dims) for e in timed)
    return (
        (both if case.forward else backward),
        lambda: {"y": module.forward(**arrays)[0], **backward()},
        {"kernels": names, "floor_bytes": floor, "product_flops": flops, "compile_s": built, "before_MB": before},
    )


def product_flops(program: Any, dims: Mapping[str, int]) -> int:
    """Multiplications and additions of a program's matrix products and convolutions; of a loop's, block by block."""
    from gradc.ir.dims import evaluate
    from gradc.ir.kernel import Call, Loop

    def of(step: Any, bound: Mapping[str, int]) -> int:
        if isinstance(step, Call):
            return 2 * math.prod(evaluate(size, bound) for _, size in step.axes)
        if not isinstance(step, Loop):
            return 0
        (row, size), outer, total = step.rows, math.prod(evaluate(n, bound) for _, n in step.over), 0
        rows, by = evaluate(size, bound), evaluate(step.by, bound)
        for first in range(0, rows, by):
            block = {**bound, row: first, step.count: min(by, rows - first)}
            for name, columns in step.cols:
                block[name] = evaluate(columns if first + by >= rows else step.to, block)
            total += outer * sum(of(s, block) for s in step.steps)
        return total

    return sum(of(step, dims) for step in program.steps)


def torch_peer(case: Case, compiled: bool) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]], dict[str, Any]]:
    import torch

    set_threads(torch)
    tensors = {n: as_tensor(a).requires_grad_(n in case.wrt) for n, a in case.arrays().items()}

    def forward() -> Any:
        return case.theirs(torch, **tensors)

    before = memory("VmRSS", afresh=True)
    began = time.perf_counter()
    run = torch.compile(forward) if compiled else forward
    y = run()
    if not case.wrt:
        return run, dict, {"compile_s": time.perf_counter() - began, "before_MB": before}
    dy = torch.from_numpy(case.upstream(y.shape)).to(y.dtype)
    wanted = [tensors[n] for n in case.wrt]

    def backward() -> Any:
        return torch.autograd.grad(y, wanted, dy, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(run(), wanted, dy)

    (both if case.forward else backward)()
    built = time.perf_counter() - began
    return (
        (both if case.forward else backward),
        dict,
        {"compile_s": built, "before_MB": before},
    )


def reference(case: Case, exact: bool) -> dict[str, Array]:
    """The value ``y`` and the gradients by torch, as f64: computed in f64, or in the case's own dtypes."""
    import torch

    set_threads(torch)
    wide = (lambda t: t.double() if t.is_floating_point() or t.dtype is torch.int8 else t) if exact else lambda t: t
    tensors = {n: wide(as_tensor(a)).requires_grad_(n in case.wrt) for n, a in case.arrays().items()}
    y = case.theirs(torch, **tensors)
    found = {"y": y}
    if case.wrt:
        narrow = torch.bfloat16 if case.is_bf16 else torch.float32
        dy = wide(torch.from_numpy(case.upstream(y.shape)).to(narrow))
        found |= zip(case.wrt, torch.autograd.grad(y, [tensors[n] for n in case.wrt], dy), strict=True)
    return {n: t.detach().double().numpy() for n, t in found.items()}


def errors(case: Case) -> dict[str, dict[str, float]]:
    """Of the value and each gradient the largest distance from torch in f64, as a share of the largest element: ours,
    torch's in the case's dtypes, and what is allowed: 64 units in the last place of f32, four of bf16, or four times
    torch's.  Of a gradient that is next to none beside the others (a key's bias changes no softmax) it is a share of a
    thousandth of theirs.
    """
    want, theirs, got = reference(case, exact=True), reference(case, exact=False), ours(case)[1]()
    slack = 4 * 2.0**-8 if case.is_bf16 else 64 * 2.0**-24

    sizes = {name: float(np.abs(exact).max(initial=0.0)) for name, exact in want.items()}
    least = max((size for name, size in sizes.items() if name != "y"), default=0.0) / 1000

    def distance(name: str, x: Array) -> float:
        if x.shape != want[name].shape or not np.isfinite(x).all():
            return float("inf")
        size = sizes[name] if name == "y" else max(sizes[name], least)
        return float(np.abs(x - want[name]).max(initial=0.0) / max(size, 1e-30))

    found = {}
    for name in want:
        torchs = distance(name, theirs[name])
        mine = distance(name, np.asarray(got[name]).astype(np.float64))
        found[name] = {"ours": mine, "torch": torchs, "allowed": max(slack, 4 * torchs)}
    return found


def as_tensor(array: Array) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def set_threads(torch: Any) -> None:
    """As many as gradc takes, which the environment names."""
    torch.set_num_threads(int(os.environ.get("GRADC_NUM_THREADS", os.cpu_count() or 1)))


def stream_copy() -> tuple[Callable[[], Any], Callable[[], dict[str, Any]], dict[str, Any]]:
    """One read and one write of 128 MB each, by a kernel that does nothing else."""
    import gradc

    module = gradc.compile(gradc.trace(lambda x: -x, x="f32[N]"), target="cpu")
    x = np.random.default_rng(0).standard_normal(1 << 25).astype(np.float32)
    out = {"y": np.empty_like(x)}
    return (lambda: module(x=x, out=out)), dict, {"floor_bytes": 2 * x.nbytes}


def same_bits(results: Callable[[], dict[str, Any]], runs: int = 100) -> bool:
    """Whether every result has the same bits in many runs, with 1, 2, 3 and 5 threads."""
    from gradc.runtime.host import pool

    def digest() -> str:
        hasher = hashlib.sha256()
        for name, value in results().items():
            hasher.update(name.encode() + np.ascontiguousarray(value).tobytes())
        return hasher.hexdigest()

    before, seen = pool.num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            seen |= {digest() for _ in range(runs // 4)}
    finally:
        pool.set_num_threads(before)
    return len(seen) == 1


def memory(field: str, afresh: bool = False) -> float:
    """Megabytes of this process: VmRSS now, or VmHWM, the most since it was counted afresh; 0 where the system does not
    say.

    :param afresh: begin to count; what malloc and gradc's pool keep of freed memory (of the inputs' making, of calls
        before) goes back first, for who takes memory from there would be given it uncounted.
    """
    try:
        if afresh:
            if arrays := sys.modules.get("gradc.runtime.host.arrays"):
                arrays.pool.trim()
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # glibc's
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith(field + ":")), 0.0)


def peak(call: Callable[[], Any]) -> float:
    """Megabytes that a call takes beside what the process holds between calls."""
    before = memory("VmRSS", afresh=True)
    call()
    return max(memory("VmHWM") - before, 0.0)


def graph_to_callable(who: str, name: str) -> None:
    """Prints the seconds from a model to something that has run once, imports excluded; gradc's on the cache that the
    environment names.
    """
    case = all_cases()[name]
    arrays = case.arrays()
    if who == "ours":
        import gradc

        began = time.perf_counter()
        module = gradc.compile(gradc.trace(case.ours, **case.types), wrt=case.wrt)
        for executable in module.executables.values():
            assert executable.native is not None
    else:
        import torch

        set_threads(torch)
        tensors = {n: as_tensor(a).requires_grad_(n in case.wrt) for n, a in arrays.items()}
        began = time.perf_counter()
        y = torch.compile(lambda: case.theirs(torch, **tensors))()
        torch.autograd.grad(y, [tensors[n] for n in case.wrt], torch.ones_like(y))
    print(json.dumps([time.perf_counter() - began]))


def main() -> None:
    if sys.argv[1] == "compile-time":
        graph_to_callable(*sys.argv[2:4])
        return
    if sys.argv[1] == "check":
        print(json.dumps(errors(all_cases()[sys.argv[2]])))
        return
    who, name = sys.argv[1:3]
    if who == "stream":
        run, results, facts = stream_copy()
    else:
        case = all_cases()[name]
        run, results, facts = ours(case) if who == "ours" else torch_peer(case, who == "compile")
    began = time.perf_counter()
    while time.perf_counter() - began < 0.5:
        run()
    # more than when inputs and program were there: values, residuals, gradients, workspace (and what torch.compile took
    # to compile)
    facts["peak_MB"] = max(memory("VmHWM") - facts.pop("before_MB", 0.0), 0.0)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        word, _, count = line.partition(" ")
        if word == "run":
            times = []
            for _ in range(int(count)):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
            print(json.dumps(times), flush=True)
        elif word.strip() == "bits":
            print(json.dumps({"same": same_bits(results)}), flush=True)
        else:
            return


if __name__ == "__main__":
    main()
