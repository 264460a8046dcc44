"""The GPU cases against torch eager and torch.compile: ``python -m benchmarks.gpu`` where there is a GPU.

    python -m benchmarks.gpu [CASE ...] [--seconds 300] [--out FILE]
    python -m benchmarks.gpu --tiny --target cuda-sim   # every case at a small size on the CPU: is the harness right?

For each case: every result against torch in float64, then the device's time for gradc and for torch, the share of the
floor (the bytes that must move over the copy bandwidth of the same moment), each strategy of a scatter beside the
model's choice, and the time of each kernel.  torch.compile comes last, as long as there is time.  The JSON is written
anew after each case, so that what was measured stays whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradc.targets.devices import Gpu, gpu_of

from .gpu_cases import GpuCase, all_cases
from .gpu_contest import Round, judged, widest_combine

SLOWER = 20.0
"""A strategy that the model predicts to be so many times slower than the best is not timed."""
WITHIN = 1.1
"""The model's choice is right if it takes at most this much of the fastest's time."""
COMPILE_BOX = 40
"""Seconds that torch.compile may take for a case."""
CASE_BOX = 60
"""Seconds for everything else of a case."""


class OutOfTime(Exception):
    """A time box is over."""


@contextlib.contextmanager
def boxed(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block when the seconds are over, wherever it is in Python."""

    def over(*_: Any) -> None:
        raise OutOfTime(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Report:
    """What was found, on disk after each step.

    :param path: of the JSON, or None.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]):
        self.path, self.content = path, {**head, "cases": {}}

    def row(self, case: GpuCase) -> dict[str, Any]:
        row: dict[str, Any] = self.content["cases"].setdefault(case.id, {"what": case.what})
        return row

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(temporary, self.path)

    @property
    def wrong(self) -> list[str]:
        """Cases with a wrong result, or that did not run; of atomics, whose error depends on their order, none."""
        from gradc.analysis.strategies import STRATEGIES

        rows = self.content["cases"].items()
        ids = [
            id for id, row in rows if "failed" in row or any(not r["right"] for r in row.get("results", {}).values())
        ]
        return ids + [
            f"{id} {name}"
            for id, row in rows
            for name, e in row.get("strategies", {}).items()
            if STRATEGIES[name].deterministic and not e.get("right", "notes" not in e)
        ]


class Benchmark:
    """All cases on one machine.

    :param target: of gradc.  :param tiny: small sizes.  :param until: when to stop, by ``time.monotonic``.
    :param clock: a :class:`~benchmarks.gpu_clock.Clock`; the target cuda has one of its own, without one nothing is
        timed.
    """

    def __init__(self, torch: Any, target: str, tiny: bool, until: float, report: Report, clock: Any = None):
        self.torch, self.target, self.tiny, self.until, self.report = torch, target, tiny, until, report
        self.device = "cuda" if target == "cuda" else "cpu"
        self.clock = clock
        if target == "cuda" and clock is None:
            from gradc.runtime.cuda.gpu import Gpu

            from .gpu_clock import Clock, kernels

            self.clock = Clock(Gpu(kernels()), int(torch.cuda.current_stream().cuda_stream))
        self._kept: tuple[Round, Any, Any, Any] | None = (
            None  # of the case at hand: its module, what is exact, what torch gives
        )

    def left(self) -> float:
        return self.until - time.monotonic()

    def run(self, cases: list[GpuCase], peers: bool = True, strategies: bool = True) -> None:
        self._kept = None
        for case in cases:
            self._step(case, self._case, CASE_BOX, "the case")
            if case.scatter and strategies and self._kept is not None:
                self._step(case, self._strategies, CASE_BOX, "strategies")
            self._kept = None
        if self.clock is not None:
            if strategies:
                self._step(cases[0], self._fmad, CASE_BOX, "fmad")
            for case in cases if peers else ():
                self._step(case, self._compiled, COMPILE_BOX, "torch.compile")

    def _step(self, case: GpuCase, work: Callable[[GpuCase, dict[str, Any]], None], seconds: float, name: str) -> None:
        """Do it within its time; what goes wrong becomes part of the report."""
        row = self.report.row(case)
        if self.left() < 5:
            row.setdefault("skipped", []).append(f"{name}: no time left")
            return
        began = time.monotonic()
        try:
            with boxed(min(seconds, self.left())):
                work(case, row)
        except (Exception, OutOfTime) as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            if name == "the case":
                row["failed"] = text
            else:
                row.setdefault("notes", []).append(f"{name}: {text}")
        row["seconds"] = round(row.get("seconds", 0.0) + time.monotonic() - began, 2)
        self.report.write()
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()
        print(_said(case, row, name), flush=True)

    # -- one case ------------------------------------------------------------------------------------------------------

    def _case(self, case: GpuCase, row: dict[str, Any]) -> None:
        """Right? How fast? Which strategy?"""
        round_ = Round(case, self.torch, self.device, self.target, self.tiny)
        module, results, timed = round_.ours()
        row["floor_MB"] = case.floor(round_.sizes) / 1e6
        self.report.content["constants"] = calibrated(modelled(module))
        row["kernels"] = [step.name for e in module.executables.values() for step in e.program.kernels]
        exact = round_.exact()
        theirs = _attempt(row, "torch eager", round_.theirs)
        other = theirs[0]() if theirs else None
        row["results"] = judged(self.torch, results(), other, exact)
        if self.clock is not None:
            self._times(round_, row, timed, theirs[1] if theirs else None)
        self._kept = round_, module, exact, other

    def _times(
        self, round_: Round, row: dict[str, Any], timed: Callable[[], Any], theirs: Callable[[], Any] | None
    ) -> None:
        from .gpu_clock import kernel_times

        bandwidth = self.clock.copy_bandwidth()
        row["copy_GB_s"], row["ours"] = bandwidth / 1e9, self.clock.seconds(timed)
        row["floor_share"] = row["floor_MB"] * 1e6 / bandwidth / row["ours"]["median"]
        self.report.write()
        if theirs is not None:
            row["eager"] = self.clock.seconds(theirs)
            row["over_eager"] = row["eager"]["median"] / row["ours"]["median"]
        if self.device == "cuda":
            _attempt(
                row,
                "kernel times",
                lambda: row.__setitem__("kernel_s", kernel_times(self.torch, timed, self.clock.wait)),
            )

    def _strategies(self, case: GpuCase, row: dict[str, Any]) -> None:
        """Each strategy forced; the choice against the fastest of those that it may take."""
        assert self._kept is not None
        round_, module, exact, theirs = self._kept
        import gradc
        from gradc.analysis.strategies import STRATEGIES
        from gradc.codegen.cuda.launch import MOST_PARTIALS

        model = modelled(module)
        buffer, pick, predicted = widest_combine(module, vars(round_.sizes), model)
        row["choice"] = {
            "run": pick,
            "none": widest_combine(round_.ours(determinism="none")[0], vars(round_.sizes), model)[1],
        }
        open_ = gradc.compile(
            case.graph(self.tiny, ("N", "V", "B")), wrt=case.wrt, target=self.target, **case.options
        )  # what one module for every size takes here
        row["choice"]["symbols"] = widest_combine(open_, vars(round_.sizes), model)[1]
        timings: dict[str, Any] = {}
        row["strategies"] = timings
        elements = math.prod(
            list(module.executables.values())[-1].program.buffer[buffer].type.concrete(vars(round_.sizes))
        )
        try:
            for name in predicted:
                entry: dict[str, Any] = timings.setdefault(name, {"predicted_s": predicted[name]})
                if predicted[name] > SLOWER * min(predicted.values()) and not self.tiny:
                    entry["skipped"] = f"predicted to be more than {SLOWER:g} times slower than the best"
                    continue
                if STRATEGIES[name].partials and elements > MOST_PARTIALS:
                    entry["skipped"] = f"{elements} partial sums for each task: there would be one task"
                    continue
                if self.left() < 10:
                    entry["skipped"] = "no time left"
                    continue
                self.report.write()
                made = _attempt(
                    entry, "run", lambda name=name: round_.ours(determinism="none", reductions={buffer: name})
                )
                if made is None:
                    continue
                got = made[1]()
                entry |= judged(
                    self.torch, {case.scatter: got[case.scatter]}, theirs, {case.scatter: exact[case.scatter]}
                )[case.scatter]
                if self.clock is not None:
                    entry |= self.clock.seconds(made[2], budget=0.1)
                del made, got
        finally:
            self._verdict(row, timings)

    def _verdict(self, row: dict[str, Any], timings: Mapping[str, Any]) -> None:
        """The choice's time over the fastest's."""
        from gradc.analysis.strategies import STRATEGIES

        timed = {n: e["median"] for n, e in timings.items() if "median" in e}
        fixed = [n for n in timed if STRATEGIES[n].deterministic]
        for freedom, allowed in (("run", fixed), ("none", list(timed)), ("symbols", fixed)):
            best = min(allowed, key=timed.__getitem__, default="")
            if best and row["choice"].get(freedom) in timed:
                row.setdefault("best", {})[freedom] = best
                row.setdefault("choice_over_best", {})[freedom] = timed[row["choice"][freedom]] / timed[best]

    def _compiled(self, case: GpuCase, row: dict[str, Any]) -> None:
        """torch.compile, which may take its time."""
        if "ours" not in row:
            return
        round_ = Round(case, self.torch, self.device, self.target, self.tiny)
        self.torch._dynamo.reset()
        began = time.monotonic()
        _, run = round_.theirs(compiled=True)
        run()
        self.clock.wait()
        row["compile_build_s"] = time.monotonic() - began
        row["compiled"] = self.clock.seconds(run)
        row["over_compiled"] = row["compiled"]["median"] / row["ours"]["median"]

    def _fmad(self, case: GpuCase, row: dict[str, Any]) -> None:
        """What it costs that a product and a sum are rounded one after the other."""
        from gradc import knobs
        from gradc.runtime.cuda import nvrtc

        chosen = all_cases()["N1"]
        seconds: dict[str, float] = {}
        own = nvrtc.OPTIONS
        for flag in ("--fmad=false", "--fmad=true"):
            nvrtc.OPTIONS = tuple(flag if o.startswith("--fmad") else o for o in own)
            try:
                with knobs.CACHE.set(False):  # a module of the other flag may be there
                    seconds[flag] = self.clock.seconds(
                        Round(chosen, self.torch, self.device, self.target, self.tiny).ours()[2]
                    )["median"]
            finally:
                nvrtc.OPTIONS = own
        self.report.content["fmad"] = {
            "case": chosen.id,
            **seconds,
            "price": seconds["--fmad=false"] / seconds["--fmad=true"],
        }


def _attempt(row: dict[str, Any], name: str, work: Callable[[], Any]) -> Any:
    """The result, or None and a note of what went wrong; a time box still ends everything."""
    try:
        return work()
    except OutOfTime:
        raise
    except Exception as error:
        row.setdefault("notes", []).append(f"{name}: {type(error).__name__}: {error}"[:500])
        return None


def modelled(module: Any) -> Gpu:
    """The device of the cost model that a module was compiled with, its constants as they were then."""
    return gpu_of(module.options.device or module.options.arch, module.options.calibration)


def calibrated(device: Gpu) -> dict[str, float]:
    """Those of its constants that were measured by ``gradc calibrate``; the listed ones hold for the others."""
    return {name: getattr(device, name) for name, source in device.sources.items() if source == "calibrated"}


def _said(case: GpuCase, row: Mapping[str, Any], name: str) -> str:
    if "failed" in row:
        return f"{case.id:<5} {name}: failed: {row['failed'].splitlines()[0][:150]}"
    worst = max((r["units"] for r in row.get("results", {}).values()), default=0.0)
    parts = [f"{case.id:<5} {name:<14} error {worst:.2g} units"]
    for key, word in (("ours", "gradc"), ("eager", "eager"), ("compiled", "compile")):
        if key in row:
            parts.append(f"{word} {row[key]['median'] * 1e6:.1f} us")
    if "floor_share" in row:
        parts.append(f"{row['floor_share']:.0%} of the floor")
    return ", ".join([*parts, *row.get("notes", ())])


def machine(torch: Any, target: str) -> dict[str, Any]:
    """What it ran on, and with what."""
    import numpy

    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": target,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
    }
    if target == "cuda":
        from gradc.runtime.cuda.gpu import current_device
        from gradc.runtime.cuda.nvrtc import find_nvrtc

        about |= {"device": vars(current_device()), "nvrtc": "{}.{}".format(*find_nvrtc().version)}
    return about


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join(all_cases()))
    parser.add_argument("--target", choices=("cuda", "cuda-sim"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this long")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--no-strategies", action="store_true", help="without forcing each strategy, and other flags")
    parser.add_argument("--onto", type=Path, help="a JSON whose content stands first in the one that is written")
    parser.add_argument("--out", type=Path, help="the JSON to write; a table in Markdown is written beside it")
    options = parser.parse_args(arguments)
    known = all_cases()
    unknown = [c for c in options.cases if c not in known]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    until = time.monotonic() + options.seconds
    import torch

    from .gpu_report import markdown

    if options.target == "cuda" and not torch.cuda.is_available():
        print("no GPU that torch can use; --tiny --target cuda-sim runs the cases on the CPU")
        return 0
    before = json.loads(options.onto.read_text()) if options.onto and options.onto.exists() else {}
    report = Report(options.out, before | machine(torch, options.target))
    Benchmark(torch, options.target, options.tiny, until, report).run(
        [known[c] for c in options.cases or known], not options.no_compile, not options.no_strategies
    )
    report.write()
    table = markdown(report.content)
    if options.out:
        options.out.with_suffix(".md").write_text(table)
    print(table)
    if report.wrong:
        print(f"wrong: {', '.join(report.wrong)}", file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
