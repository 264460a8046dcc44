"""``python -m benchmarks.gpu_models``: training steps of whole models on a GPU through
``torch.compile(backend="gradc")`` beside eager mode and inductor.

    python -m benchmarks.gpu_models [MODEL[:ENGINE] ...] [--seconds 200] [--out FILE]
    python -m benchmarks.gpu_models --tiny --device cpu   # the same at small sizes without a GPU

A step is the loss and every parameter's gradient; models and sizes are those of :mod:`.gpu_model_list`.  Each pair of a
model and an engine is a process of its own: all compile beside each other, and measure one after the other.  What a
process knows it says at once, and it is written at once, so that a run that is cut off leaves what it had.

Of each engine: the seconds until the first step was done (``first_s``), then the median of back-to-back steps by the
device's events (``step_ms``), the host's time to start one (``host_ms``), the largest memory of a step (``peak_MB``),
``units_per_s``, the share of the device's peak in bf16 (``mfu``: flops as torch counts them), its slowest kernels
(``kernels_ms``); of gradc also what torch's backend reports, and where the host's time goes (``host_us``).  Errors are
relative norms against eager mode in f32, of the loss and of the worst gradient, those of eager mode at the same dtype
beside them; where a step draws random numbers, against eager mode at the same dtype from the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import fcntl
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("eager", "gradc", "inductor")
"""In the order of their beginning; ``python -m benchmarks.gpu_models MODEL --engines autotune graphs`` runs more."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "gradc": {"backend": "gradc"},
    "gradc_all": {"backend": "gradc", "options": {"take": "all"}},
    "gradc_graphs": {"backend": "gradc", "mode": "reduce-overhead"},
    "inductor": {},
    "autotune": {"mode": "max-autotune-no-cudagraphs"},
    "graphs": {"mode": "reduce-overhead"},
}
"""What torch.compile is called with."""
PEAK = {"sm_90": 989e12, "sm_80": 312e12}
"""Dense flops a second in bf16: NVIDIA's data sheets."""
SEED, STEPS, KERNELS, HOST_ROWS = 7, 12, 14, 25
ALLOWED = 2.0
"""An engine's error over eager mode's at the same dtype; 1 more where it is held against eager mode at that dtype."""
SLACK, LOSS_SLACK = 2.0**-20, 2.0**-11
"""Relative errors that are none, where eager mode's is smaller by luck: f32 adds up in another order, and the loss is
that of bf16 values; a loss that is rounded to bf16 is not taken for right.
"""
DRAWS_ITS_OWN = ("inductor", "autotune", "graphs")
"""Engines whose random numbers are others than those of eager mode from the same seed, and are not held against it."""
Tensors = dict[str, Any]


# -- one model with one engine, in this process ------------------------------------------------------------------------


class Job:
    """A model on its device.

    :param lock: a file that whoever measures holds.
    """

    def __init__(self, name: str, engine: str, device: str, tiny: bool, lock: Path):
        import torch

        from .gpu_model_list import MODELS

        self.torch, self.engine, self.model, self.device = torch, engine, MODELS[name], device
        torch.manual_seed(SEED)
        net, batch = self.model.tiny() if tiny else self.model.build()
        self.net, self.batch = net.to(device), tuple(x.to(device) for x in batch)
        self.lock, self.units = lock, self.model.units
        self.on_gpu = device == "cuda"

    def step(self, call: Callable[..., Any], autocast: bool) -> Any:
        """The loss, after its gradients are written."""
        torch = self.torch
        self.net.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            loss = call(*self.batch)
        loss.backward()
        return loss.detach()

    def results(self, call: Callable[..., Any], autocast: bool) -> Tensors:
        """The loss under ``""``, and the gradients by name, from the same seed; batch norm's statistics stay."""
        buffers = {name: b.clone() for name, b in self.net.named_buffers()}
        self.torch.manual_seed(SEED)
        loss = self.step(call, autocast)
        found = {"": loss.float(), **{n: p.grad.float() for n, p in self.net.named_parameters() if p.grad is not None}}
        with self.torch.no_grad():
            for name, buffer in self.net.named_buffers():
                buffer.copy_(buffers[name])
        self.net.zero_grad(set_to_none=True)
        return found

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """While no other process measures."""
        with open(self.lock, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def wait(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def run(self) -> None:
        """Say what is known, each part as it is."""
        torch, cast = self.torch, self.model.autocast
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        began = time.perf_counter()
        call = self.net if self.engine == "eager" else torch.compile(self.net, **self.options())
        first = self.results(call, cast)
        self.wait()
        say(first_s=time.perf_counter() - began)
        if self.engine.startswith("gradc"):
            say(report=self.report())
        with self.measuring():
            if self.engine != "eager":
                say(**self.judged(first))
            del first
            for _ in range(3):  # the second call may compile once more, for a mode's capture the third
                self.step(call, cast)
            self.wait()
            say(**self.times(lambda: self.step(call, cast)))
            say(kernels_ms=self.kernels(lambda: self.step(call, cast)))
            if self.engine == "eager":
                say(flops=self.flops())
            elif self.engine.startswith("gradc"):
                say(host_us=self.host(lambda: self.step(call, cast)))

    def options(self) -> dict[str, Any]:
        """Of torch.compile; the backend itself, because a bare machine has a checkout and no installed entry point."""
        options = dict(MODES[self.engine])
        if "backend" in options:
            from gradc.torch.dynamo import backend

            options["backend"] = backend
        return options

    def judged(self, found: Tensors) -> dict[str, Any]:
        """The errors of an engine's first step, eager mode's, and whether ours are no larger than they may be."""
        with self.without_dropout():
            exact = self.results(self.net, False)
            eager = errors(self.results(self.net, self.model.autocast), exact)
        if self.model.random:  # the same numbers are drawn in f32 and in bf16 by no promise of torch's
            exact = self.results(self.net, self.model.autocast)
        own, allowed = errors(found, exact), ALLOWED + self.model.random
        slack = (LOSS_SLACK if self.model.autocast else SLACK, SLACK)
        right = all(own[i] <= max(allowed * eager[i], slack[i]) for i in range(2))
        told = {"loss_error": own[0], "gradient_error": own[1], "worst": own[2], "eager_errors": eager[:2]}
        return told if self.model.random and self.engine in DRAWS_ITS_OWN else {**told, "right": bool(right)}

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        kept = [
            (m, name, getattr(m, name)) for m in self.net.modules() for name in ("p", "dropout") if hasattr(m, name)
        ]
        for module, name, _ in kept:
            setattr(module, name, 0.0)
        try:
            yield
        finally:
            for module, name, value in kept:
                setattr(module, name, value)

    def times(self, run: Callable[[], Any]) -> dict[str, float]:
        """Of back-to-back steps, of the host alone, and the memory."""
        torch = self.torch
        if not self.on_gpu:
            began = time.perf_counter()
            run()
            return {"step_ms": (time.perf_counter() - began) * 1e3}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        each = [a.elapsed_time(b) for a, b in pairwise(events[2:])]
        hosts = []
        for _ in range(3):
            self.wait()
            began = time.perf_counter()
            run()
            hosts.append((time.perf_counter() - began) * 1e3)
        self.wait()
        median = statistics.median(each)
        return {
            "step_ms": median,
            "least_ms": min(each),
            "most_ms": max(each),
            "host_ms": min(hosts),
            "peak_MB": torch.cuda.max_memory_allocated() / 1e6,
            "units_per_s": self.units / median * 1e3,
        }

    def kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """Milliseconds of a step by kernel, the slowest; ``all`` is their sum, ``launches`` how many there are."""
        if not self.on_gpu:
            return {}
        from torch.profiler import ProfilerActivity, profile

        run()
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            run()
            self.wait()
        times: dict[str, float] = {}
        launches = 0
        for event in traced.key_averages():
            total = getattr(event, "self_device_time_total", 0)
            if total:
                times[event.key[:90]] = times.get(event.key[:90], 0.0) + total * 1e-3
                launches += event.count
        slowest = sorted(times.items(), key=lambda item: -item[1])[:KERNELS]
        return {"all": sum(times.values()), "launches": launches, **dict(slowest)}

    def host(self, run: Callable[[], Any], count: int = 3) -> dict[str, float]:
        """Microseconds of the host's in a step by function, without what it calls, the most first; the profiler's own
        price is in them.  The backward runs in this thread, which is profiled.
        """
        profile = cProfile.Profile()
        with self.torch.autograd.set_multithreading_enabled(False):
            run()
            self.wait()
            for _ in range(count):
                profile.enable()
                run()
                profile.disable()
                self.wait()
        entries = sorted(profile.getstats(), key=lambda e: -e.inlinetime)[:HOST_ROWS]
        return {named(e.code): round(e.inlinetime / count * 1e6, 1) for e in entries}

    def flops(self) -> float | None:
        """Of a step, as torch counts them; None where it cannot (up to 2.11 attention with grouped heads)."""
        from torch.utils.flop_counter import FlopCounterMode

        try:
            with FlopCounterMode(display=False) as counted:
                self.step(self.net, self.model.autocast)
        except AssertionError:
            return None
        return float(counted.get_total_flops())

    def report(self) -> dict[str, Any]:
        import gradc.torch

        made = gradc.torch.report()
        return {
            "graphs": len(made.graphs),
            "ops": made.ops,
            "share": made.share,
            "regions": sum(len(g.regions) for g in made.graphs),
            "left": [[row.op, row.count, row.reason[:200]] for row in made.rows[:12]],
        }


def named(code: Any) -> str:
    """A function that was profiled, by its file and line or, of C, its name."""
    return code if isinstance(code, str) else f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}"


def errors(found: Tensors, wanted: Tensors) -> tuple[float, float, str]:
    """Relative norms: of the loss, of the worst gradient, and whose that is; a gradient that is no more than rounding
    of the others is relative to these.
    """
    if found.keys() != wanted.keys():
        return float("inf"), float("inf"), f"gradients of other parameters: {sorted(found.keys() ^ wanted.keys())[:3]}"
    norms = {name: float(want.norm()) for name, want in wanted.items()}
    largest = max((n for name, n in norms.items() if name), default=0.0)
    each = {}
    for name, want in wanted.items():
        scale = max(norms[name], 1e-3 * largest if name else 0.0, 1e-30)
        off = float((found[name] - want).norm()) / scale
        each[name] = off if off == off else float("inf")
    loss = each.pop("")
    worst = max(each, key=each.__getitem__, default="")
    return loss, each.get(worst, 0.0), worst


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def child(arguments: Sequence[str]) -> int:
    name, engine, device, tiny, lock = arguments
    try:
        Job(name, engine, device, tiny == "tiny", Path(lock)).run()
    except BaseException as error:
        trace = re.sub(r'File "[^"]*/([^/"]+/[^/"]+)"', r'File "\1"', traceback.format_exc())
        say(failed=f"{type(error).__name__}: {error}"[:2000], trace=trace[-3000:])
        return 1
    return 0


# -- all of them -------------------------------------------------------------------------------------------------------


class Measured:
    """The processes, some at a time, and what they have said.

    :ivar rows: of the JSON: by model and engine.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], device: str, tiny: bool, write: Callable[[Any], None]):
        self.rows: dict[str, dict[str, Any]] = {}
        self.pairs, self.device, self.tiny, self.write = pairs, device, tiny, write
        self.mutex = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()

    def run(self, workers: int, until: float) -> None:
        waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for pair in self.pairs:
            waiting.put(pair)
        with tempfile.TemporaryDirectory(prefix="gradc-models-") as folder:
            threads = [threading.Thread(target=self.work, args=(waiting, until, Path(folder))) for _ in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(until - time.monotonic(), 0.0))
            with self.mutex:
                for process in self.running:
                    process.kill()
            for thread in threads:
                thread.join()

    def work(self, waiting: queue.SimpleQueue[tuple[str, str]], until: float, folder: Path) -> None:
        while time.monotonic() < until:
            try:
                name, engine = waiting.get_nowait()
            except queue.Empty:
                return
            path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
            asked = (name, engine, self.device, "tiny" if self.tiny else "full", str(folder / "lock"))
            threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
            with open(folder / f"{name}-{engine}.log", "w+", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_models", "--child", *asked],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path, **threads},
                    stdout=subprocess.PIPE,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )
                self.follow(name, engine, process, log)

    def follow(self, name: str, engine: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        """Take what a process says until it ends."""
        with self.mutex:
            self.running.add(process)
            row = self.rows.setdefault(name, {}).setdefault(engine, {})
        assert process.stdout is not None
        for line in process.stdout:
            with self.mutex:
                if line.startswith("{"):
                    row |= json.loads(line)
                    self.write(self.rows)
        code = process.wait()
        with self.mutex:
            self.running.discard(process)
            if code and "failed" not in row:
                log.seek(0)
                row["failed"] = f"ended by {code}: {log.read()[-1500:]}"
            self.write(self.rows)


def derived(rows: dict[str, dict[str, Any]], arch: str) -> None:
    """Add to each engine how long the others take and its share of the device's peak."""
    for engines in rows.values():
        flops = engines.get("eager", {}).get("flops")
        for engine, row in engines.items():
            if "step_ms" not in row:
                continue
            if flops and arch in PEAK:
                row["mfu"] = flops / (row["step_ms"] * 1e-3) / PEAK[arch]
            for other in ENGINES:
                if other != engine and "step_ms" in engines.get(other, {}):
                    row[f"{other}_over"] = engines[other]["step_ms"] / row["step_ms"]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown, a row per model and engine."""
    lines = [
        "| model | engine | ms a step | host ms | eager / it | inductor / it | units/s | peak MB | MFU | launches"
        " | first step s | right | share of ops |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    number = lambda row, key, form: format(row[key], form) if key in row else "-"
    for name, engines in rows.items():
        for engine, row in engines.items():
            right = {True: "yes", False: f"NO ({row.get('gradient_error', 0):.1g}: {row.get('worst', '')})", None: "-"}
            cells = [
                number(row, "step_ms", ".2f"),
                number(row, "host_ms", ".2f"),
                number(row, "eager_over", ".2f"),
                number(row, "inductor_over", ".2f"),
                number(row, "units_per_s", ",.0f"),
                number(row, "peak_MB", ",.0f"),
                number(row, "mfu", ".0%"),
                number(row.get("kernels_ms", {}), "launches", "d"),
                number(row, "first_s", ".1f"),
                "failed" if "failed" in row else right[row.get("right")],
                number(row.get("report", {}), "share", ".0%"),
            ]
            lines.append(f"| {name} | {engine} | " + " | ".join(cells) + " |")
    failures = [
        f"- {name}, {engine}: " + row["failed"].replace("\n", " ")[:300]
        for name, engines in rows.items()
        for engine, row in engines.items()
        if "failed" in row
    ]
    return "\n".join([*lines, *(["", *failures] if failures else [])]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="all, if none is named; gpt2:inductor is one engine of one")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=("eager", *MODES), help="of the others")
    parser.add_argument("--seconds", type=float, default=200.0, help="for everything")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes at a time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--arch", default="sm_90", help="whose peak the MFU is a share of")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child)
    from .gpu_model_list import MODELS

    named = [name.partition(":")[::2] for name in options.models or MODELS]
    for kind, given, known in (
        ("model", [name for name, _ in named], MODELS),
        ("engine", [engine for _, engine in named if engine], ("eager", *MODES)),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"there is no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    names = list(dict.fromkeys(name for name, _ in named))
    pairs = [(name, each) for name, engine in named for each in ([engine] if engine else options.engines)]

    def write(rows: dict[str, dict[str, Any]]) -> None:
        derived(rows, options.arch)
        if options.out:
            temporary = options.out.with_suffix(".part")
            temporary.write_text(json.dumps(rows, indent=1) + "\n")
            os.replace(temporary, options.out)

    measured = Measured(pairs, options.device, options.tiny, write)
    measured.run(options.workers, time.monotonic() + options.seconds)
    write(measured.rows)
    ordered = {name: measured.rows[name] for name in names if name in measured.rows}
    print(table(ordered))
    wrong = [row for engines in ordered.values() for row in engines.values() if row.get("right") is False]
    return int(bool(wrong) or any("failed" in row for engines in ordered.values() for row in engines.values()))


if __name__ == "__main__":
    raise SystemExit(main())
