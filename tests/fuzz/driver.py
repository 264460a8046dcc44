"""Runs a campaign: seeds in a child process, a watchdog beside it, counters, a table, and a file for each kind of
finding.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from .campaign import FAILURES, VERDICTS, Campaign, Options, Outcome

SHRINKING = 300.0
"""Seconds in which a finding must have been made small; else it is reported as it is."""
KINDS, EACH = 25, 3
"""How many kinds of findings are made small and written down, and how many of one kind; the others are counted."""


@dataclass
class Tally:
    """What a campaign has done.

    :param counts: what the campaign itself counts.
    :param findings: by seed, those written down.
    :param seeds: of each kind.
    :param slowest: CPU seconds and the seed.
    """

    name: str
    verdicts: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[int, Outcome] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, -1)
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return self.verdicts.total()

    @property
    def failed(self) -> bool:
        return any(self.verdicts[v] for v in FAILURES)

    def add(self, seed: int, outcome: Outcome, seconds: float) -> bool:
        """True: a finding to be written down."""
        self.verdicts[outcome.verdict] += 1
        self.counts.update(outcome.counts)
        self.slowest = max(self.slowest, (seconds, seed))
        if not outcome.failed:
            return False
        kind = f"{outcome.verdict} {outcome.kind}".strip()
        self.seeds.setdefault(kind, []).append(seed)
        if len(self.seeds) > KINDS or len(self.seeds[kind]) > EACH:
            return False
        self.findings[seed] = outcome
        return True


def run(
    campaign: Campaign,
    first: int,
    count: int | None,
    seconds: float | None,
    options: Options,
    folder: Path | None = None,
) -> Tally:
    """Tries seeds from ``first`` on until ``count`` of them or ``seconds`` are over.

    :param folder: receives a file for each kind of finding.
    """
    tally, began = Tally(campaign.name), time.monotonic()
    last = first + count if count is not None else None
    deadline = began + seconds if seconds is not None else None
    seed = first
    while (last is None or seed < last) and (deadline is None or time.monotonic() < deadline):
        for tried, outcome, cost in _batch(campaign, seed, last, deadline, options):
            seed = tried + 1
            if tally.add(tried, outcome, cost):
                tally.findings[tried] = outcome = _shrunk(campaign, tried, outcome, options)
                if folder is not None:
                    write(folder, campaign, tried, outcome, options)
    tally.seconds = time.monotonic() - began
    return tally


def write(folder: Path, campaign: Campaign, seed: int, outcome: Outcome, options: Options) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = " ".join(f"--option {name}={value}" for name, value in options.items() if campaign.options[name] != value)
    command = f"python -m tests.fuzz {campaign.name} --seed {seed} --count 1 {given}".rstrip()
    (folder / f"{campaign.name}-{seed}.txt").write_text(
        f"{outcome.verdict} {outcome.kind}\n{command}\n\n{outcome.text}\n", encoding="utf-8", errors="backslashreplace"
    )


# -- child processes ---------------------------------------------------------------------------------------------------


def isolated(attempt: Callable[[], Outcome], limit: float) -> Outcome:
    """``attempt`` in a fork of this process: its death and its silence are outcomes too."""
    with _child({}, False, _once, attempt) as child:
        answer = child.answer(limit)
    assert answer is not None
    return answer[1]


def _batch(
    campaign: Campaign, seed: int, last: int | None, deadline: float | None, options: Options
) -> Iterator[tuple[int, Outcome, float]]:
    """Outcomes of seed after seed until the child has died, or all is done."""
    seconds = None if deadline is None else deadline - time.monotonic()
    variables, anew = campaign.environment(options), campaign.starts_anew
    with _child(variables, anew, _seeds, campaign.name, seed, last, seconds, options) as child:
        while True:
            answer = child.answer(campaign.limit)
            if answer is None:
                return
            cost, outcome = answer
            yield seed, outcome, cost
            if child.gone:
                return
            seed += 1


def _shrunk(campaign: Campaign, seed: int, outcome: Outcome, options: Options) -> Outcome:
    if campaign.shrink is None:
        return outcome
    variables, anew = campaign.environment(options), campaign.starts_anew
    with _child(variables, anew, _shrinking, campaign.name, seed, outcome, options) as child:
        answer = child.answer(SHRINKING)
    return answer[1] if answer is not None and not child.gone else outcome


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection
    errors: Path
    gone: bool = False

    def answer(self, limit: float) -> tuple[float, Outcome] | None:
        """What the child says next, or what its silence means; None: it has ended as it should."""
        try:
            if self.pipe.poll(limit):
                return self.pipe.recv()  # type: ignore[no-any-return]
            self.gone = True
            self.process.kill()
            return limit, Outcome("hang", f"no answer within {limit:g} s\n{self.said()}")
        except (EOFError, ConnectionResetError):
            self.gone = True
            self.process.join()
            code = self.process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            said = self.said()
            kind = re.findall(r"^kind: (.*)$", said, re.MULTILINE)[-1:]  # a campaign may say what it is about to run
            return 0.0, Outcome("crash", f"the process died: {name}\n{said}", " ".join((name, *kind)))

    def said(self) -> str:
        return self.errors.read_text(errors="replace")[-12000:]


@contextlib.contextmanager
def _child(variables: Mapping[str, str], anew: bool, work: Callable[..., None], *arguments: object) -> Iterator[_Child]:
    """A process that runs ``work(pipe, errors, *arguments)``: a fork, or a new one where that is asked for or variables
    must be there when it starts.
    """
    context = multiprocessing.get_context("spawn" if variables or anew else "fork")
    with tempfile.TemporaryDirectory(prefix="gradc-fuzz-") as folder:
        errors = Path(folder) / "stderr"
        errors.touch()
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(there, str(errors), *arguments))
        with _environment(variables):
            process.start()
        there.close()
        try:
            yield _Child(process, here, errors)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            here.close()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _quiet(errors: str) -> None:
    """What the C runtime, a sanitizer and Python say goes to a file, for the report."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(2)


def attempted(attempt: Callable[[], Outcome]) -> tuple[float, Outcome]:
    """CPU seconds and the outcome; what escapes is an outcome too."""
    began = time.process_time()
    try:
        outcome = attempt()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(
            "untyped", traceback.format_exc(), f"{type(error).__name__} at {Path(place.filename).name}:{place.name}"
        )
    return time.process_time() - began, outcome


def _once(pipe: Connection, errors: str, attempt: Callable[[], Outcome]) -> None:
    _quiet(errors)
    pipe.send(attempted(attempt))


def _seeds(
    pipe: Connection, errors: str, name: str, seed: int, last: int | None, seconds: float | None, options: Options
) -> None:
    from . import campaign as found

    _quiet(errors)
    attempt, began = found(name).attempt, time.monotonic()
    while (last is None or seed < last) and (seconds is None or time.monotonic() - began < seconds):
        pipe.send(attempted(lambda seed=seed: attempt(seed, options)))  # type: ignore[misc]
        seed += 1
    pipe.send(None)


def _shrinking(pipe: Connection, errors: str, name: str, seed: int, outcome: Outcome, options: Options) -> None:
    from . import campaign as found

    _quiet(errors)
    shrink = found(name).shrink
    assert shrink is not None
    pipe.send(attempted(lambda: shrink(seed, outcome, options)))


# -- printing ----------------------------------------------------------------------------------------------------------


def table(tallies: Sequence[Tally]) -> str:
    heads = ("campaign", "inputs", *VERDICTS, "seconds", "slowest")
    rows = [
        heads,
        *(
            (
                t.name,
                f"{t.tried:,}",
                *(f"{t.verdicts[v]:,}" for v in VERDICTS),
                f"{t.seconds:.0f}",
                f"{t.slowest[0]:.2f} s (seed {t.slowest[1]})",
            )
            for t in tallies
        ),
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for t in tallies:
        lines += [f"{t.name}: {name} {count:,}" for name, count in sorted(t.counts.items())]
        lines += [
            f"{t.name}: {kind}: {len(seeds):,} x, first seeds {', '.join(map(str, seeds[:8]))}"
            for kind, seeds in t.seeds.items()
        ]
    return "\n".join(lines)
