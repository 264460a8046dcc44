"""Changes of the tree's text, each found at one place or refused: seeded faults (``tests/mutants``) and variants of the
CUDA kernels (:mod:`.gpu_variants`) are tables of them, which code that moves on cannot leave behind unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """:param file: path in the tree.  :param old: text that stands there exactly once.  :param new: instead of it."""

    file: str
    old: str
    new: str

    def problem(self, root: Path) -> str:
        """Why it cannot be applied to a tree, or ""."""
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        count = path.read_text(encoding="utf-8").count(self.old)
        if count != 1 or self.old == self.new:
            return f"the text {self.old!r} is found {count} times in {self.file}, once is needed"
        return ""

    def apply(self, root: Path) -> None:
        """:raises ValueError: its text is not there, or twice."""
        if problem := self.problem(root):
            raise ValueError(problem)
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")
