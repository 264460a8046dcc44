"""Running passes: each is a pure function; between them graphs are verified, compared, timed, printed and dumped."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from .. import knobs
from ..errors import InvalidProblem
from ..ir.dims import assuming
from ..ir.graph import Graph, format_op
from ..ir.kernel import Program
from ..ir.node import Note, made_by
from ..ir.walk import operands
from ..process import files
from ..process.forks import held_off

Licence = Literal["BITS", "REAL", "FAST"]
GraphPass = Callable[..., Graph]
ProgramPass = TypeVar("ProgramPass", bound=Callable[..., Program])
PASSES: dict[str, GraphPass] = {}
"""Every Graph -> Graph pass by name; :func:`graph_pass` fills it."""


@dataclass(frozen=True)
class Stage:
    """What one pass left behind.

    :param seconds: its time.  :param size: nodes of a graph, kernels of a program.
    """

    name: str
    result: Graph | Program
    seconds: float

    @property
    def size(self) -> int:
        """Nodes of the graph, or steps of the program."""
        return len(self.result.nodes) if isinstance(self.result, Graph) else len(self.result.steps)

    def __str__(self) -> str:
        return str(self.result)


@dataclass(frozen=True)
class Changes:
    """How many values of a graph, or steps of a program, one stage has that the other has not, and how many both have
    that are computed otherwise.
    """

    added: int
    removed: int
    rewritten: int


def changes(before: Stage, after: Stage) -> Changes | None:
    """From one stage to the next; None if the one does not come from the other: of a graph a program, of a forward a
    backward.
    """
    graphs = isinstance(before.result, Graph), isinstance(after.result, Graph)
    if graphs[0] != graphs[1] or (not graphs[0] and before.name.split(".")[0] != after.name.split(".")[0]):
        return None
    old, new = _entries(before.result), _entries(after.result)
    both = old.keys() & new.keys()
    return Changes(
        len(new) - len(both),
        len(old) - len(both),
        sum(not _same(before.result, old[name], after.result, new[name]) for name in both),
    )


def _entries(result: Graph | Program) -> dict[str, Any]:
    """Each value or step by its name."""
    if isinstance(result, Graph):
        return {name: node for node, name in result.value_names.items()}
    steps: dict[str, Any] = {}
    count: Counter[str] = Counter()
    for step in result.steps:
        count[step.name] += 1
        steps[f"{step.name} {count[step.name]}"] = step
    return steps


def _same(before: Graph | Program, old: Any, after: Graph | Program, new: Any) -> bool:
    """Whether a value or step has the same text in both, but for its note."""
    if not isinstance(before, Graph) or not isinstance(after, Graph):
        return old is new or str(old) == str(new)
    if old is new and all(before.value_names[o] == after.value_names[o] for o in old.operands):
        return True
    if old.op.name == new.op.name == "input":
        return str(old.type) == str(new.type)
    return format_op(old, before.value_names) == format_op(new, after.value_names)


@dataclass
class Pipeline:
    """The stages of one compilation, in order.

    :param sizes: of dims that the caller has bound: where no small ones fit, stages are validated at these.
    :param between: called before each pass.
    """

    stages: list[Stage] = field(default_factory=list)
    sizes: Mapping[str, int] = field(default_factory=dict)
    between: Callable[[], None] | None = None
    _meanings: dict[str, Any] = field(default_factory=dict)
    """For ``GRADC_VALIDATE``: of each program (forward, backward, joint), what it computes at some inputs."""

    def start(self, name: str, graph: Graph) -> Graph:
        """Graph -> the same graph, kept as the first stage of its name."""
        if knobs.VALIDATE.get():
            with held_off:
                from ..verify.exact import require_declared

            self._at_sizes(graph, functools.partial(require_declared, graph))
        self._keep(name, graph, graph, 0.0)
        return graph

    def split(self, joint: Graph, forward: Graph, backward: Graph) -> None:
        """A joint graph was cut in two."""
        if knobs.VALIDATE.get():
            with held_off:
                from ..verify.meaning import Halves

            halves = Halves.of("partition", joint, forward, backward, self.sizes)
            self._meanings |= {"forward": halves.forward, "backward": halves.backward}

    def sparse(self, name: str, joint: Graph, graph: Graph) -> Graph:
        """Gradients of a joint graph became rows: a first stage, with other outputs."""
        if knobs.VALIDATE.get():
            with held_off:
                from ..verify.meaning import require_rows

            require_rows(name, joint, graph, self.sizes)
        return self.start(name, graph)

    def run(self, step: Callable[..., Any], subject: Any, *, of: str = "", **options: Any) -> Any:
        """``step(subject, **options)`` as a stage named after the pass.

        :param step: a :func:`graph_pass` or :func:`program_pass`.
        :param of: the program that it makes or changes.
        """
        name = f"{of}.{step.__name__}" if of else step.__name__
        compute = functools.partial(step, subject, **options)
        by_values = getattr(step, "by_values", False)
        return self.keep(name, subject, compute, step.licence, by_values)  # type: ignore[attr-defined]

    def keep(
        self, name: str, before: Any, compute: Callable[[], Any], licence: Licence = "BITS", by_values: bool = False
    ) -> Any:
        """(name, what the pass was given, the pass) -> its result, timed and kept as a stage."""
        if self.between is not None:
            self.between()
        began = time.perf_counter()
        with assuming(getattr(before, "assumptions", ())):
            result = compute()
        self._keep(name, before, result, time.perf_counter() - began, licence, by_values)
        return result

    def _keep(
        self,
        name: str,
        before: Any,
        result: Any,
        seconds: float,
        licence: Licence = "BITS",
        by_values: bool = False,
    ) -> None:
        """A stage: verified, validated, printed and dumped as the knobs ask, and appended."""
        stage = Stage(name, result, seconds)
        if knobs.VERIFY.get():
            with held_off:
                from ..ir.verify import verify, verify_program

            verify(result) if isinstance(result, Graph) else verify_program(result)
        if knobs.VALIDATE.get() and before is not result and licence != "FAST":
            self._validate(name, before, result, licence, by_values)
        if knobs.PRINT_PASSES.get() and (before != result or before is result):
            old = Stage(name, before, 0).size if isinstance(before, Graph | Program) else 0
            print(f"after {name}: {old} -> {stage.size} nodes, {seconds * 1e3:.1f} ms")
        if knobs.DUMP.get():
            folder = files.make_folder(knobs.DUMP.get())
            files.write(folder / f"{len(self.stages):02d}-{name}.gir", f"{result}\n")
        self.stages.append(stage)

    def _validate(
        self, name: str, before: Graph | Program, result: Graph | Program, licence: Licence, by_values: bool
    ) -> None:
        """
        :raises InternalError: the pass changed what the graph or program means.
        """
        with held_off:
            from ..verify.exact import equal
            from ..verify.meaning import meanings
        if isinstance(result, Program):
            program = name.partition(".")[0]
            if program not in self._meanings:
                assert isinstance(before, Graph)  # from which the first of a program's passes makes it
                self._meanings[program] = meanings(before, self.sizes)
            for meaning in self._meanings[program]:
                meaning.require(name, result)
        elif by_values and isinstance(before, Graph):
            for meaning in meanings(before, self.sizes, precision=""):
                meaning.require(name, result)
        # differentiate adds inputs: what it makes is no other form of the same graph
        elif isinstance(before, Graph) and set(result.input_names) <= set(before.input_names):
            self._at_sizes(before, functools.partial(equal, before, result, licence=licence, stage=name))

    def _at_sizes(self, graph: Graph, check: Callable[..., None]) -> None:
        """Makes a check of a graph at small sizes, or at sizes of its own where none fit."""
        try:
            check()
        except InvalidProblem:
            with held_off:
                from ..verify.meaning import own_sizes

            check(dims=own_sizes(graph, self.sizes))

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; there are {', '.join(s.name for s in self.stages)}")

    def __iter__(self) -> Any:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def names(self) -> Sequence[str]:
        """The names of all stages, in order."""
        return [s.name for s in self.stages]


def credited(graph: Graph, name: str) -> Graph:
    """The graph in which every node has a note: one that nobody noted was made by the pass ``name``, for the first of
    its users that has a line, else of the last of its operands that has one.
    """
    if all(node in graph.notes or node.op.name == "input" for node in graph.nodes):
        return graph.numbered()
    notes = dict(graph.notes)
    for order, beside in ((reversed(graph.nodes), graph.users.__getitem__), (graph.nodes, operands)):
        for node in order:
            if node not in notes and node.op.name != "input":
                source = next((notes[n] for n in beside(node) if n in notes and notes[n].where), None)
                if source is not None:
                    notes[node] = source.derived(name)
    for node in graph.nodes:
        if node.op.name != "input":
            notes.setdefault(node, Note(by=name))
    return replace(graph, notes=notes).numbered()


def graph_pass(licence: Licence = "BITS", by_values: bool = False) -> Callable[[GraphPass], GraphPass]:
    """Marks a Graph -> Graph pass with what it may lose (contracts 1).

    :param by_values: it is validated at random inputs, each side in its own precision: positions that follow from
        rounding (floor) are beyond exact algebra.
    """

    def mark(function: GraphPass) -> GraphPass:
        @functools.wraps(function)
        def run(graph: Graph, **options: Any) -> Graph:
            with assuming(graph.assumptions), made_by(function.__name__):
                before = graph.numbered()
                after = function(before, **options)
                return graph if after is before else credited(after, function.__name__)

        run.licence, run.by_values = licence, by_values  # type: ignore[attr-defined]
        PASSES[function.__name__] = run
        return run

    return mark


def program_pass(licence: Licence = "BITS") -> Callable[[ProgramPass], ProgramPass]:
    """Marks a Graph -> Program or Program -> Program pass with what it may lose: under ``BITS`` nothing but the order
    in which a sum is added up (contracts 1).
    """

    def mark(function: ProgramPass) -> ProgramPass:
        function.licence = licence  # type: ignore[attr-defined]
        return function

    return mark
