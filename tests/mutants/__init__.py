"""Seeded faults: one hundred small changes of gradc, each of which the tests must see.

``python -m tests.mutants`` (``make mutants``) applies one after another to a copy of the tree and runs the tests there;
see :mod:`.__main__`. A mutant is the exact text of the tree and what stands there instead; tests/system/test_mutants.py
holds that each text is found once, so that a change of the code cannot leave the table behind.  A mutant that changes
no behaviour (an equivalent one) has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.edits import Edit

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault.

    :param name: unique.
    :param file: path in the tree.
    :param old: text that stands there exactly once.
    :param new: the fault.
    :param breaks: what is wrong then.
    :param tests: pytest's arguments for those who are likely to see it, each a file of a folder of ``tests/`` without
        ``.py``, with ``-k EXPRESSION`` behind it where the file is long.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def edit(self) -> Edit:
        return Edit(self.file, self.old, self.new)

    def problem(self, root: Path = ROOT) -> str:
        """Why it cannot be applied to a tree, or ""."""
        if problem := self.edit.problem(root):
            return f"{self.name}: {problem}"
        missing = [t.split()[0] for t in self.tests if not path_of_test(root, t.split()[0])]
        return f"{self.name}: there is no tests/*/{missing[0]}.py" if missing else ""


def path_of_test(root: Path, name: str) -> str:
    """The path in the tree of the test file of this name, "" where there is none."""
    return next((str(path.relative_to(root)) for path in (root / "tests").glob(f"*/{name}.py")), "")


def mutants() -> tuple[Mutant, ...]:
    """All of them, by part of the compiler."""
    from . import kernels, passes, runtime, vjps

    return (*vjps.MUTANTS, *passes.MUTANTS, *kernels.MUTANTS, *runtime.MUTANTS)
