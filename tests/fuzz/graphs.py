"""Random graphs against torch autograd in f64, and every pass validated on them.

**What is tried.**  A graph of :mod:`.drawing` is compiled with random options (numerics, fuse, save, memory_budget,
residuals, reductions, sparse, donate, layout, or its gradients differentiated again) for numpy, cpu or cuda-sim; one
module runs at several sizes, 0 and 1 among them; outputs and gradients are held against
:mod:`.meaning`, torch in f64.  A wrong meaning and a wrong vjp show although all our targets share them.  Every pass is
    validated by :mod:`.validation`.

**Why the random graphs of before saw less.**  They held cpu against the interpreter, but (1) broadcasts made rank 1 or
2 values wider by at most one axis of size 2 or M and kept N first, so that the sizes of a kernel were mentioned in the
same order in its caller and in its own body; (2) their shapes had at most two symbols and, where there were columns
behind a symbol, no second symbol before it: the four miscompilations need rows of two symbolic axes (or one symbol
twice, or a pad's N + 2) over short columns; (3) N and M were equal or one of them 0 or 1 in four of six bindings, where
swapped sizes go unnoticed; (4) 12 examples a run of 15 nodes each, most of which the element loop served, not the loop
of joined columns; and the registry's samples, the other 15,000 tests, have one symbol each.  This generator draws
shapes of any symbols in any order, and each module runs at sizes that all differ.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import gradc
from gradc import knobs
from gradc.autodiff import differentiate
from gradc.errors import GradcError, IndexOutOfRange, InternalError, InvalidProblem, NotDifferentiable, Unsupported
from gradc.ir.graph import Graph, input_node
from gradc.ir.node import Node
from gradc.ir.walk import positions
from gradc.verify.exact import draw
from gradc.verify.samples import sample

from . import sanitize
from .bits import Expected
from .campaign import Campaign, Options, Outcome
from .drawing import Drawing, pruned

SIZES = (5, 3, 7, 2, 4, 6, 9, 17, 33, 50)
COARSE = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True)
class Problem:
    """One graph, how it is compiled and where it runs; :func:`judge` is a function of this alone.

    :param text: the graph.
    :param options: of ``gradc.compile``.
    :param sizes: one binding of the dims after another, for one module.
    :param second: compile the gradients, as a graph of their own, and differentiate them again.
    """

    text: str
    wrt: tuple[str, ...] = ()
    target: str = "numpy"
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[Mapping[str, int], ...] = ({},)
    seed: int = 0
    second: bool = False
    validate: bool = False

    def __str__(self) -> str:
        fields = {
            "wrt": self.wrt,
            "target": self.target,
            "options": dict(self.options),
            "sizes": tuple(map(dict, self.sizes)),
            "seed": self.seed,
            "second": self.second,
            "validate": self.validate,
        }
        given = ", ".join(f"{k}={v!r}" for k, v in fields.items())
        return (
            f'from tests.fuzz.graphs import Problem, judge\n\ngraph = """{self.text}"""\nprint(judge(Problem(graph,'
            f" {given})).text)"
        )


# -- drawing -----------------------------------------------------------------------------------------------------------


def problem(seed: int, target: str) -> Problem:
    choose = random.Random(seed)
    graph = Drawing(choose).graph()
    chance = lambda share: choose.random() < share
    wrt = tuple(n for n in graph.input_names if graph.input(n).dtype.has_tangent)
    if wrt and chance(0.15):
        wrt = tuple(n for n in wrt if chance(0.6))
    return Problem(
        str(graph),
        wrt,
        target,
        _options(graph, wrt, choose),
        tuple(_sizes(graph.dims, choose)),
        seed,
        bool(wrt) and chance(0.12),
        target == "numpy",
    )


def _options(graph: Graph, wrt: Sequence[str], choose: random.Random) -> dict[str, Any]:
    chance = lambda share: choose.random() < share
    options: dict[str, Any] = {}
    if chance(0.35):
        options["numerics"] = "strict"
    if chance(0.25):
        options["fuse"] = False
    if chance(0.4):
        options["save"] = choose.choice(("all", "none"))
    elif chance(0.15):
        options["memory_budget"] = choose.choice((0.0, 0.5, 1.0, 0, 200))
        options["hints"] = {d: choose.choice(SIZES) for d in graph.dims}
    if chance(0.25):
        options["reductions"] = {"*": choose.choice(("segmented", "regular", "privatized"))}
    if chance(0.15):
        options["donate"] = [n for n in graph.input_names if chance(0.5)]
    if chance(0.15):
        options["layout"] = {
            n: tuple(choose.sample(range(rank), rank))
            for n in (*graph.input_names, *graph.output_names)
            if (rank := _rank(graph, n)) > 1 and chance(0.4)
        }
    tables = [
        n
        for n in wrt
        if any(
            n == graph.input_name(v) for v in graph.inputs if any(positions(u, v) and u.op.indices for u in graph.nodes)
        )
    ]
    if tables and chance(0.3):
        options["sparse"] = tables[:1]
    if chance(0.2):
        options["residuals"] = "borrow"
    return options


def _rank(graph: Graph, name: str) -> int:
    return (graph.input(name) if name in graph.input_names else graph.output(name)).rank


def _sizes(dims: Sequence[str], choose: random.Random) -> Iterator[dict[str, int]]:
    """All different first; then others, with 0 and 1 and equal ones among them."""
    yield dict(zip(dims, choose.sample(SIZES[:6], len(dims)), strict=True))
    if not dims:
        return
    yield {d: choose.choice(SIZES) for d in dims}
    yield {d: choose.choice((0, 1, 1, *SIZES[:4])) for d in dims}


# -- judging -----------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """:param kind: what was wrong, in a few words that stay the same while a graph shrinks."""

    def __init__(self, kind: str, text: str):
        self.kind = kind
        super().__init__(text)


def judge(problem: Problem) -> Outcome:
    """What a problem comes to."""
    counts: Counter[str] = Counter()
    try:
        _Trial(problem, counts).run()
    except Wrong as wrong:
        return Outcome("wrong", f"{wrong}\n\n{problem}", f"{problem.target} {wrong.kind}", counts)
    except (NotDifferentiable, Unsupported, InvalidProblem) as error:
        text = re.sub(r"[%\w.]*\[[^\]]*\]|\d+|'[^']*'", "_", str(error).split("\n")[0])[:90]
        counts[f"refused: {type(error).__name__}: {text}"] += 1
        return Outcome("typed", f"{type(error).__name__}: {error}\n\n{problem}", text, counts)
    except (GradcError, InternalError) as error:  # the graph was accepted: no type is wrong, no index outside
        kind = re.sub(r"[%\w.]*\d[\w.]*|@\w+|'[^']*'", "_", str(error).split("\n")[0])[:60]
        return Outcome(
            "untyped",
            f"{type(error).__name__}: {error}\n\n{problem}",
            f"{problem.target} {type(error).__name__}: {kind}",
            counts,
        )
    return Outcome("right", counts=counts)


class _Trial:
    def __init__(self, problem: Problem, counts: Counter[str]):
        self.problem, self.counts = problem, counts
        self.graph = gradc.parse(problem.text)

    def run(self) -> None:
        if self.problem.second:
            self._second()
            return
        module = self._compiled(self.graph)
        self._validated(module)
        for sizes in self.problem.sizes:
            at = self._at(sizes)
            if at is not None:
                self._compare(module, *at)
        self._bits(module)

    def _compiled(self, graph: Graph) -> gradc.Module:
        options = dict(self.problem.options)
        if options.get("layout"):
            options["layout"] = {
                n: order for n, order in options["layout"].items() if n in (*graph.input_names, *graph.output_names)
            }
        try:
            return gradc.compile(graph, wrt=self.problem.wrt, target=self.problem.target, unused="zeros", **options)
        except Unsupported as error:
            if "has no sparse form" not in str(error):
                raise
            self.counts["no sparse form"] += 1
            del options["sparse"]
            return gradc.compile(graph, wrt=self.problem.wrt, target=self.problem.target, unused="zeros", **options)
        except NotDifferentiable:
            if not self.problem.wrt:
                raise
            self.counts["no gradient"] += 1
            return gradc.compile(
                graph, target=self.problem.target, **{k: v for k, v in options.items() if k != "sparse"}
            )

    def _validated(self, module: gradc.Module) -> None:
        if self.problem.validate:
            from .validation import validate

            validate(module, self.problem, self.counts)

    def _at(self, sizes: Mapping[str, int]) -> tuple[dict[str, np.ndarray], dict[str, int]] | None:
        """Inputs at these sizes; None where there can be none."""
        try:
            arrays, dims = sample(self.graph, sizes, self.problem.seed)
            gradc.interp.run(self.graph, arrays, dims=dims)
        except (IndexOutOfRange, InvalidProblem):  # an index into nothing, a largest of nothing
            self.counts["sizes that do not fit"] += 1
            return None
        return arrays, dims

    def _cotangents(self, graph: Graph, dims: Mapping[str, int]) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.problem.seed, 1])
        return {
            n: rng.standard_normal(v.type.concrete(dims)).astype(v.dtype.np)
            for n, v in graph.outputs
            if v.dtype.has_tangent
        }

    def _compare(self, module: gradc.Module, arrays: dict[str, np.ndarray], dims: dict[str, int]) -> None:
        from .meaning import Meaning, NoCounterpart

        cotangents = self._cotangents(self.graph, dims)
        got = self._run(module, arrays, dims, cotangents)
        try:
            known = Meaning(self.graph, arrays, dims, module.wrt, self.problem.seed).known(cotangents)
        except NoCounterpart as missing:
            self.counts[f"without counterpart: {missing}"] += 1
            return
        self._against(self.graph, got, known, dims)

    def _bits(self, module: gradc.Module) -> None:
        """On dyadic inputs, against the interpreter."""
        joint = differentiate(self.graph, module.wrt, unused="zeros") if module.wrt else self.graph
        dims = {d: self.problem.sizes[0][d] for d in joint.dims}
        arrays = draw(joint, dims, self.problem.seed)
        arrays = {n: quarters(a) if a.dtype.kind not in "biu" else a for n, a in arrays.items()}
        try:
            expected = Expected(joint, arrays, dims)
        except (IndexOutOfRange, InvalidProblem):
            self.counts["sizes that do not fit"] += 1
            return
        cotangents, gradients = module.joint_names
        own = {n: arrays[n] for n in self.graph.input_names}
        got = self._run(module, own, dims, {n: arrays[c] for n, c in cotangents.items()} if module.wrt else {})
        renamed = {
            gradients.get(n[2:], n) if n.startswith("d.") and n not in self.graph.output_names else n: a
            for n, a in got.items()
        }
        wrong = expected.differs({n: a for n, a in renamed.items() if n in expected.values})
        self.counts["outputs held against the interpreter, to the bit"] += sum(
            expected.exact[n] for n in renamed if n in expected.exact
        )
        self.counts["outputs held against the interpreter, within rounding"] += sum(
            expected.steady[n] and not expected.exact[n] for n in renamed if n in expected.exact
        )
        if wrong:
            raise Wrong("bits", f"{self.problem.target}: {wrong}")

    def _run(
        self,
        module: gradc.Module,
        arrays: Mapping[str, np.ndarray],
        dims: Mapping[str, int],
        cotangents: Mapping[str, np.ndarray],
        prefix: str = "d.",
    ) -> dict[str, np.ndarray]:
        """Outputs, and gradients under ``prefix`` + name."""
        orders = self.problem.options.get("layout") or {}
        into = lambda n, a: np.ascontiguousarray(a.transpose(orders[n])) if n in orders else a.copy()
        back = lambda n, a: a.transpose(np.argsort(orders[n])) if n in orders else a
        given = {n: into(n, a) for n, a in arrays.items()}
        before = {n: a.tobytes() for n, a in given.items()}
        values, residuals = module.forward(dims=dims, **given)
        values = dict(values) if isinstance(values, dict) else {module.graph.output_names[0]: values}
        got = {n: back(n, np.asarray(v)) for n, v in values.items()}
        if module.wrt:
            cotangents = {n: into(n, c) for n, c in cotangents.items() if n in residuals.cotangent_types}
            if cotangents:
                gradients = module.backward(residuals, dims=dims, **cotangents)
                got |= {prefix + n: back(n, _dense(gradients[n])) for n in module.wrt}
        for name, array in given.items():
            if name not in (self.problem.options.get("donate") or ()) and array.tobytes() != before[name]:
                raise Wrong("changed an input", f"the input {name} was changed")
        return got

    def _against(self, graph: Graph, got: Mapping[str, np.ndarray], known: Any, dims: Mapping[str, int]) -> None:
        from .meaning import compare

        if known.overflow:
            self.counts["overflow on the way"] += 1
            return
        coarsest = max((n.dtype.name for n in graph.nodes if n.dtype.name in COARSE), key=COARSE.index, default="f64")
        for name, value in got.items():
            want = known.values.get(name)
            if want is None:
                continue
            dtype = value.dtype.name if value.dtype.kind != "V" else "bf16"
            dtype = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(dtype, dtype)
            found = compare(value, want, known.spread[name], dtype, coarsest)
            self.counts["elements held against torch"] += found.decided
            self.counts["elements that rounding may move too far"] += found.undecided
            if found.wrong:
                what = "second order" if self.problem.second else "gradient" if name.startswith("d.") else "value"
                raise Wrong(what, f"{self.problem.target}: {name} at {dict(dims)}: {found.wrong}")

    # -- second order --------------------------------------------------------------------------------------------------

    def _second(self) -> None:
        """d.x as a graph of x and d.y, compiled with respect to x."""
        from .meaning import Meaning, NoCounterpart

        if any(n.op.surrogate is not None for n in self.graph.nodes):
            self.counts["second order of a straight-through gradient: left out"] += 1
            return
        try:
            joint = differentiate(self.graph, self.problem.wrt, unused="zeros")
        except NotDifferentiable:
            self.counts["no gradient"] += 1
            return
        first = pruned(joint.with_outputs(joint.outputs[len(self.graph.outputs) :]))
        wrt = tuple(n for n in self.problem.wrt if n in first.input_names)
        if not wrt:
            return
        options = {k: v for k, v in self.problem.options.items() if k not in ("layout", "sparse", "donate")}
        try:
            module = gradc.compile(first, wrt=wrt, target=self.problem.target, unused="zeros", **options)
        except NotDifferentiable:
            self.counts["no second derivative"] += 1
            return
        for sizes in self.problem.sizes:
            at = self._at(sizes)
            if at is None:
                continue
            arrays, dims = at
            cotangents = self._cotangents(self.graph, dims)
            again = self._cotangents(first, dims)
            read = {**arrays, **{f"d.{n}": c for n, c in cotangents.items()}}
            got = self._run(
                module, {n: read[n] for n in first.input_names}, {d: dims[d] for d in first.dims}, again, "dd."
            )
            try:
                known = Meaning(self.graph, arrays, dims, self.problem.wrt, self.problem.seed).known(cotangents, again)
            except NoCounterpart as missing:
                self.counts[f"without counterpart: {missing}"] += 1
                return
            except (RuntimeError, NotImplementedError) as error:
                if (
                    "derivative for" not in str(error)
                    and "double backward" not in str(error)
                    and "not differentiable" not in str(error)
                ):
                    raise
                self.counts["torch has no second derivative"] += 1
                return
            self._against(self.graph, got, known, dims)


def quarters(array: np.ndarray) -> np.ndarray:
    """Multiples of 1/4, so that short sums and products round nothing."""
    return np.asarray(np.rint(array.astype(np.float64) * 4) / 4).astype(array.dtype)


def _dense(gradient: Any) -> np.ndarray:
    return np.asarray(gradient.dense() if hasattr(gradient, "dense") else gradient)


# -- making a problem small --------------------------------------------------------------------------------------------


def smaller(problem: Problem) -> Iterator[Problem]:
    """What is left when one thing is taken away, the largest first."""
    graph = gradc.parse(problem.text)
    for size in problem.sizes:
        if len(problem.sizes) > 1:
            yield replace(problem, sizes=(size,))
    if len(graph.outputs) > 1:
        yield from (_with(problem, graph.with_outputs([output])) for output in graph.outputs)
        yield from (
            _with(problem, graph.with_outputs([o for o in graph.outputs if o is not output]))
            for output in graph.outputs
        )
    if problem.validate:
        yield replace(problem, validate=False)
    yield from (
        replace(problem, options={k: v for k, v in problem.options.items() if k != name}) for name in problem.options
    )
    if problem.second:
        yield replace(problem, second=False)
    if len(problem.wrt) > 1:
        yield from (replace(problem, wrt=(name,)) for name in problem.wrt)
    yield from (replace(problem, wrt=tuple(n for n in problem.wrt if n != name)) for name in problem.wrt)
    for node in reversed([n for n in graph.nodes if n.op.name != "input"]):
        yield from (_with(problem, g) for g in _without(graph, node))
    for k, size in enumerate(problem.sizes):
        for name, value in size.items():
            for less in sorted({1, 2, 3, value // 2, value - 1} - {0}):
                if less < value:
                    yield replace(problem, sizes=(*problem.sizes[:k], {**size, name: less}, *problem.sizes[k + 1 :]))


def _without(graph: Graph, node: Node) -> Iterator[Graph]:
    """The graph with a node replaced by an operand of its type, or by an input."""
    fresh = input_node(next(f"z{k}" for k in range(1000) if f"z{k}" not in graph.input_names), node.type)
    for other in (*(o for o in dict.fromkeys(node.operands) if o.type == node.type), fresh):
        if node.dtype.is_integer and other is fresh:
            continue
        new = graph.rewrite(lambda n, operands, other=other: other if n == node else None)
        used = {o for n in new.nodes for o in n.operands} | {n for _, n in new.outputs}
        yield Graph(new.name, tuple(n for n in (*graph.inputs, fresh) if n in used), new.outputs)


def _with(problem: Problem, graph: Graph) -> Problem:
    graph = pruned(Graph(graph.name, graph.inputs, graph.outputs))
    names = (*graph.input_names, *graph.output_names)
    floats = [n for n in graph.input_names if graph.input(n).dtype.has_tangent]
    wrt = tuple(n for n in (*problem.wrt, *(n for n in floats if n.startswith("z") and problem.wrt)) if n in floats)
    options = dict(problem.options)
    if options.get("hints"):
        options["hints"] = {d: v for d, v in options["hints"].items() if d in graph.dims}
    for option in ("layout", "donate", "sparse"):
        if option in options:
            kept = [
                n
                for n in options[option]
                if n in (wrt if option == "sparse" else graph.input_names if option == "donate" else names)
            ]
            options[option] = {n: options[option][n] for n in kept} if option == "layout" else kept
            if not kept:
                del options[option]
    return replace(
        problem,
        text=str(graph),
        wrt=tuple(dict.fromkeys(wrt)),
        options=options,
        sizes=tuple({d: v for d, v in s.items() if d in graph.dims} for s in problem.sizes),
    )


def shrink(seed: int, outcome: Outcome, options: Options) -> Outcome:
    """Smaller and smaller problems that fail in the same way; each is judged in a process of its own, as some end
    it.
    """
    from .driver import SHRINKING, isolated

    current, best = problem(seed, target_of(seed, options)), outcome
    budget, found, until = 400, True, time.monotonic() + 0.7 * SHRINKING
    while found and budget:
        found = False
        for candidate in _legal(current):
            budget -= 1
            result = isolated(lambda candidate=candidate: judge(candidate), CAMPAIGN.limit)  # type: ignore[misc]
            if (result.verdict, result.kind) == (outcome.verdict, outcome.kind):
                current, best, found = candidate, result, True
                break
            if not budget or time.monotonic() > until:
                budget = 0
                break
    text = best.text if str(current) in best.text else f"{best.text}\n\n{current}"
    return Outcome(best.verdict, text, best.kind)


def _legal(problem: Problem) -> Iterator[Problem]:
    """Those that can be made at all."""
    candidates = smaller(problem)
    while True:
        try:
            candidate = next(candidates, None)
            if candidate is None:
                return
            if gradc.parse(candidate.text).outputs:
                yield candidate
        except (GradcError, StopIteration):
            return


# -- the campaign ------------------------------------------------------------------------------------------------------


def target_of(seed: int, options: Options) -> str:
    """``mixed``: of 20 seeds 13 on numpy (with every pass validated), 6 on cpu and 1 on cuda-sim."""
    if options["target"] != "mixed":
        return options["target"]
    return "cuda-sim" if seed % 20 == 19 else "cpu" if seed % 20 >= 13 else "numpy"


def attempt(seed: int, options: Options) -> Outcome:
    chosen = problem(seed, target_of(seed, options))
    try:
        with np.errstate(all="ignore"), knobs.CACHE.set(False):
            return judge(chosen)
    except Exception as error:
        error.add_note(str(chosen))
        raise


def environment(options: Options) -> dict[str, str]:
    """``sanitize=1``: kernels and the runtime under ASan and UBSan."""
    return sanitize.environment() if options["sanitize"] == "1" else {}


CAMPAIGN = Campaign(
    "graphs",
    attempt,
    limit=120,
    ci=8,
    needs=("torch",),
    options={"target": "mixed", "sanitize": "0"},
    environment=environment,
    shrink=shrink,
)
