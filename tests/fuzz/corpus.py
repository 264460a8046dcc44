"""Texts to start from: every sample of the registry as a graph, its joint graph and their programs, and the golden
files.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from registry import Case, cases

from gradc.autodiff import differentiate
from gradc.compiler import kernels, optimise
from gradc.errors import GradcError
from gradc.module.options import Options
from gradc.passes.manager import Pipeline

FORMS = ("graph", "joint", "program", "joint program", "cuda program")
BLOCK = re.compile(r"^(?:graph|program) @.*?^}$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A text, made when it is first asked for.

    :param form: one of :data:`FORMS`, or ``golden``.
    """

    case: Case | None
    form: str
    golden: str = ""

    @property
    def is_graph(self) -> bool:
        return self.golden.startswith("graph") if self.case is None else self.form in ("graph", "joint")

    @functools.cached_property
    def text(self) -> str:
        if self.case is None:
            return self.golden
        graph = self.case.smooth if "joint" in self.form else self.case.graph
        try:
            if "joint" in self.form:
                graph = differentiate(graph, self.case.floats, unused="zeros")
            if self.is_graph:
                return str(graph)
            pipeline = Pipeline()
            return str(
                kernels(
                    optimise(graph, Options(), "cpu", pipeline),
                    Options(),
                    "cuda-sim" if "cuda" in self.form else "cpu",
                    pipeline,
                    "forward",
                )
            )
        except GradcError:  # some have no gradient
            return str(graph)


@functools.cache
def sources() -> tuple[Source, ...]:
    """All of them, in a fixed order."""
    found = [
        Source(case, form) for case in cases(("f32",)) for form in FORMS if "joint" not in form or case.differentiable
    ]
    folder = Path(__file__).resolve().parent.parent / "golden"
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".gir", ".txt"))
    return (
        *found,
        *(Source(None, "golden", text) for p in files for text in BLOCK.findall(p.read_text(encoding="utf-8"))),
    )
