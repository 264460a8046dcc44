"""``python -m tests.mutants [NAME ...] [--jobs J] [--stop-at likely|quick|whole] [--seconds S] [--out FILE]``: the mutation score.

Each mutant is tried on a copy of the tree's files, in up to three steps, the next only where the one before passed:

- ``likely``: the test files that its record names, with ``-m "not slow and not gpu"``: a part of the quick suite;
- ``quick``: the quick suite, which is every test that ``pytest -m "not slow and not gpu"`` finds under ``tests/``;
- ``whole``: the slow ones too, ``-m "not gpu"``, as ``make test`` runs them on a machine without a GPU.

A mutant is caught where a test fails that passes on the tree as it is: the tests that failed are run there once more, all together, at the end.
One whose tests do not end within ``--seconds`` is reported as a hang, by itself.  What is not caught has survived.  The status is 0 where nothing
survived and nothing was left out.
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
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from . import ROOT, Mutant, mutants

STEPS = ("likely", "quick", "whole")
QUICK, WHOLE = "not slow and not gpu", "not gpu"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?|\S+\.py)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """:param step: of :data:`STEPS`, the last one tried.  :param verdict: caught, hang, survived, or failing: the test fails without the mutant too."""

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
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def pytest(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Its status, None if it did not end, and what it said."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("GRADC_", "PYTEST_"))}
        environment |= {"PYTHONPATH": str(self.root), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *arguments]
        running = subprocess.Popen(command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        try:
            said, _ = running.communicate(timeout=seconds)
            return running.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return None, running.communicate()[0]
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(exist_ok=True)

    def tried(self, mutant: Mutant, stop_at: str, seconds: float) -> Verdict:
        path, began = self.root / mutant.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            for step in STEPS[: STEPS.index(stop_at) + 1]:
                for arguments in _selections(mutant, step):
                    status, said = self.pytest(arguments, seconds)
                    if status == 0:
                        continue
                    failed = FAILED.findall(said)
                    test = failed[0] if failed else f"status {status}: {said.strip().splitlines()[-1][:200] if said.strip() else ''}"
                    verdict = "hang" if status is None else "caught" if failed or status < 0 else "failing"
                    return Verdict(mutant.name, step, verdict, test, time.monotonic() - began)
            return Verdict(mutant.name, stop_at, "survived", "", time.monotonic() - began)
        finally:
            path.write_text(text, encoding="utf-8")


def _selections(mutant: Mutant, step: str) -> list[list[str]]:
    if step == "likely":
        parts = [shlex.split(t) for t in mutant.tests]
        return [["-m", QUICK, f"tests/{name}.py", *rest] for name, *rest in parts]
    return [["-m", QUICK if step == "quick" else WHOLE]]


def confirmed(verdicts: list[Verdict], seconds: float) -> list[Verdict]:
    """The verdicts, with those changed whose test fails on the tree as it is."""
    tests = sorted({v.test for v in verdicts if v.verdict == "caught" and "::" in v.test})
    if not tests:
        return verdicts
    with tempfile.TemporaryDirectory(prefix="gradc-mutants-") as folder:
        status, said = Tree(Path(folder)).pytest(["-m", WHOLE, "--maxfail=1000", *tests], seconds)
    failing = set(FAILED.findall(said))
    if status not in (0, 1):
        raise RuntimeError(f"the tests that caught mutants cannot be run on the tree as it is: status {status}\n{said[-2000:]}")
    return [replace(v, verdict="failing") if v.test in failing else v for v in verdicts]


def run(chosen: list[Mutant], jobs: int, stop_at: str, seconds: float, out: Path) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="gradc-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for job in range(jobs):
            trees.put(Tree(Path(folder) / str(job)))

        def tried(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.tried(mutant, stop_at, seconds)
            finally:
                trees.put(tree)

        for future in as_completed([pool.submit(tried, m) for m in chosen]):
            verdicts.append(future.result())
            v = verdicts[-1]
            print(f"{len(verdicts):3}/{len(chosen)}  {v.verdict:8} {v.step:6} {v.seconds:6.0f} s  {v.name}  {v.test}", flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps([asdict(v) for v in verdicts], indent=1), encoding="utf-8")
    verdicts = confirmed(verdicts, 3600.0)
    out.write_text(json.dumps([asdict(v) for v in verdicts], indent=1), encoding="utf-8")
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="The mutation score: which of the seeded faults the tests see.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants, or beginnings of their names; all if none is named")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="mutants at a time")
    parser.add_argument("--stop-at", choices=STEPS, default="quick", help="the last step that is tried (default: quick)")
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
    for kind in ("failing", "hang", "survived"):
        for v in (v for v in verdicts if v.verdict == kind):
            print(f"{kind}: {v.name} {v.test}: {next(m.breaks for m in table if m.name == v.name)}")
    counts = {(step, kind): sum(v.step == step and v.verdict == kind for v in verdicts) for step in STEPS for kind in ("caught", "hang", "survived", "failing")}
    print(f"{len(verdicts)} mutants: " + ", ".join(f"{n} {kind} ({step})" for (step, kind), n in counts.items() if n))
    return int(any(v.verdict != "caught" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
