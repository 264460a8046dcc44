"""``python -m tests.mutants [NAME ...] [--jobs J] [--stop-at likely|quick|whole] [--seconds S] [--out FILE]``: the
mutation score.

Each mutant is tried on a copy of the tree's files, in up to three steps, the next only where the one before passed:

- ``likely``: the test files that its record names, with ``-m "not slow and not gpu"``: a part of the quick suite;
- ``quick``: the quick suite, which is every test that ``pytest -m "not slow and not gpu"`` finds under ``tests/``;
- ``whole``: the slow ones too, ``-m "not gpu"``, as ``make test`` runs them on a machine without a GPU.

A mutant is caught where a test fails that passes on a copy of the tree as it is; one that fails there too is left out.
A mutant whose tests do not end within ``--seconds`` is reported as a hang, by itself.  What is not caught has
survived.  The status is 0 where all were caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from . import ROOT, Mutant, mutants, path_of_test

STEPS = ("likely", "quick", "whole")
QUICK, WHOLE = "not slow and not gpu", "not gpu"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?|\S+\.py)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """:param step: of :data:`STEPS`, the last one tried.
    :param verdict: caught, hang, survived, or error: pytest could not run.
    """

    name: str
    step: str
    verdict: str
    test: str
    seconds: float


class Tree:
    """A copy of the files of the tree, in which one mutant at a time is applied."""

    def __init__(self, folder: Path):
        self.root = folder / "tree"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def pytest(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Its status, None if it did not end, and what it said."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("GRADC_", "PYTEST_"))}
        environment |= {"PYTHONPATH": str(self.root), "TMPDIR": str(self.temporary)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--all",
            "--tb=line",
            *arguments,
        ]
        running = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = running.communicate(timeout=seconds)
            return running.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return None, running.communicate()[0]
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(exist_ok=True)

    def tried(self, mutant: Mutant, clean: Clean, stop_at: str, seconds: float) -> Verdict:
        path, began = self.root / mutant.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        mutant.edit.apply(self.root)
        try:
            for step in STEPS[: STEPS.index(stop_at) + 1]:
                for arguments in _selections(mutant, step):
                    verdict, test = self.seen(arguments, clean, seconds)
                    if verdict:
                        return Verdict(mutant.name, step, verdict, test, time.monotonic() - began)
            return Verdict(mutant.name, stop_at, "survived", "", time.monotonic() - began)
        finally:
            path.write_text(text, encoding="utf-8")

    def seen(self, arguments: list[str], clean: Clean, seconds: float) -> tuple[str, str]:
        """(verdict, test) of a selection, or ("", "") if nothing is wrong with it but what is wrong with the tree as it
        is.
        """
        left_out = [test for test, fails in list(clean.known.items()) if fails]
        while True:
            status, said = self.pytest([*arguments, *(f"--deselect={test}" for test in left_out)], seconds)
            failed = FAILED.findall(said)
            if status == 0:
                return "", ""
            if failed and failed[0] not in left_out and clean.fails(failed[0], seconds):
                left_out.append(failed[0])
                continue
            if failed and failed[0] in left_out:
                return "error", f"cannot be left out: {failed[0]}"
            last = said.strip().splitlines()[-1][:200] if said.strip() else ""
            return "hang" if status is None else "caught" if failed or status < 0 else "error", (
                failed[0] if failed else f"status {status}: {last}"
            )


class Clean:
    """The tree as it is: which tests fail there too."""

    def __init__(self, folder: Path):
        self.tree = Tree(folder)
        self.known: dict[str, bool] = {}
        self.lock = threading.Lock()

    def fails(self, test: str, seconds: float) -> bool:
        with self.lock:
            if test not in self.known:
                self.known[test] = self.tree.pytest([test], seconds)[0] != 0
                if self.known[test]:
                    print(f"fails without a fault too, and is left out: {test}", flush=True)
            return self.known[test]


def _selections(mutant: Mutant, step: str) -> list[list[str]]:
    if step == "likely":
        parts = [shlex.split(t) for t in mutant.tests]
        return [["-m", QUICK, path_of_test(ROOT, name), *rest] for name, *rest in parts]
    return [["-m", QUICK if step == "quick" else WHOLE]]


def run(chosen: list[Mutant], jobs: int, stop_at: str, seconds: float, out: Path) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="gradc-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for job in range(jobs):
            trees.put(Tree(Path(folder) / str(job)))
        clean = Clean(Path(folder) / "clean")

        def tried(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.tried(mutant, clean, stop_at, seconds)
            finally:
                trees.put(tree)

        for future in as_completed([pool.submit(tried, m) for m in chosen]):
            verdicts.append(future.result())
            v = verdicts[-1]
            print(
                f"{len(verdicts):3}/{len(chosen)}  {v.verdict:8} {v.step:6} {v.seconds:6.0f} s  {v.name}  {v.test}",
                flush=True,
            )
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps([asdict(v) for v in verdicts], indent=1), encoding="utf-8")
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="The mutation score: which of the seeded faults the tests see."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants, or beginnings of their names; all if none is named"
    )
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="mutants at a time")
    parser.add_argument(
        "--stop-at", choices=STEPS, default="quick", help="the last step that is tried (default: quick)"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for one run of pytest; beyond, it is a hang")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    given = parser.parse_args()
    table = mutants()
    problems = [problem for m in table if (problem := m.problem())]
    chosen = [m for m in table if not given.names or m.name.startswith(tuple(given.names))]
    if problems or not chosen:
        print("\n".join(problems) or f"no mutant is called {' '.join(given.names)}")
        return 2
    verdicts = run(chosen, given.jobs, given.stop_at, given.seconds, given.out)
    for kind in ("error", "hang", "survived"):
        for v in (v for v in verdicts if v.verdict == kind):
            print(f"{kind}: {v.name} {v.test}: {next(m.breaks for m in table if m.name == v.name)}")
    counts = {
        (step, kind): sum(v.step == step and v.verdict == kind for v in verdicts)
        for step in STEPS
        for kind in ("caught", "hang", "survived", "error")
    }
    print(f"{len(verdicts)} mutants: " + ", ".join(f"{n} {kind} ({step})" for (step, kind), n in counts.items() if n))
    return int(any(v.verdict != "caught" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
