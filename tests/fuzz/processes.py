"""fork, threads, signals and the interpreter's end, at any moment: no hang, no crash, right values afterwards in every
process.

A seed is an event, a moment and a delay (:mod:`.process_scenario`), in a process of its own with a watchdog; a third of
them begin with an empty kernel cache, so that the runtime itself is compiled in that moment.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import sanitize
from .campaign import Campaign, Options, Outcome
from .process_scenario import EVENTS, MOMENTS

SECONDS = 60.0
"""After which a process counts as hung; the slowest takes a few on a quiet machine."""
LONGEST = {"import": 0.4, "compile": 1.5, "call": 0.3, "backward": 0.3, "matmul": 0.3, "between": 0.1}
"""Seconds from the beginning of a moment in which an event comes."""
ROOT = Path(__file__).resolve().parents[2]


def cell(seed: int) -> tuple[str, str, float, bool]:
    """(event, moment, delay, whether the cache is empty): the cells take turns."""
    cells = [(event, moment) for moment in MOMENTS for event in EVENTS]
    random.Random(11).shuffle(cells)
    event, moment = cells[seed % len(cells)]
    choose = random.Random(seed)
    return event, moment, round(choose.random() * LONGEST[moment], 4), moment == "compile" and choose.random() < 0.33


def attempt(seed: int, options: Options) -> Outcome:
    event, moment, delay, cold = cell(seed)
    what = f"{event} during {moment}, after {delay} s{', with an empty cache' if cold else ''}"
    with tempfile.TemporaryDirectory(prefix="gradc-process-") as folder:
        surroundings = {k: v for k, v in os.environ.items() if not k.startswith("LD_PRELOAD")} | {
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
        }
        if cold:
            surroundings["GRADC_CACHE_DIR"] = os.path.join(folder, "cache")
        began = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("process_scenario.py")), event, moment, str(delay)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=surroundings,
                cwd=folder,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
            process.wait()
            out.seek(0)
            err.seek(0)
            said, errors = out.read().decode("utf-8", "replace"), err.read().decode("utf-8", "replace")
    counts = {f"during {moment}": 1, "milliseconds": int(1000 * (time.monotonic() - began))}
    kind = f"{event} during {moment}"
    text = (
        f"{what}\npython tests/fuzz/process_scenario.py {event} {moment} {delay}\nstatus"
        f" {status}\n{said[-3000:]}\n{errors[-5000:]}"
    )
    if status is None:
        return Outcome("hang", text, kind, counts)
    if status < 0 or re.search(r"^Fatal Python error|^the child ended with -", said + errors, re.MULTILINE):
        return Outcome("crash", text, kind, counts)
    if status or said != "right\n":
        return Outcome("hang" if "TimeoutError" in said else "wrong", text, kind, counts)
    return Outcome("right", counts=counts)


def missing() -> str:
    return "" if hasattr(os, "fork") else "there is no fork here"


CAMPAIGN = Campaign(
    "processes",
    attempt,
    limit=SECONDS + 60,
    ci=3,
    tries=("gradc/module", "gradc/process", "gradc/runtime", "templates/cpu/runtime.c"),
    environment=lambda options: sanitize.surroundings(),
    missing=missing,
)
