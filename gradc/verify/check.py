"""check: compares every gradient with numerical derivatives that do not use vjps.

The oracles need only NumPy: Richardson extrapolation of central differences in f64, along random directions and for
single elements; and the adjoint identity, with a numerical directional derivative.  An op whose vjp is the derivative
of another function (``surrogate=``) is replaced by that function, and operands of ``stop_gradient`` are held at their
values at the base point.  Kinks, ties and jumps are distinguished from errors by how the differences change with the
step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import interp
from ..autodiff import differentiate, joint_names
from ..errors import InvalidProblem, TypeRuleError, Unsupported
from ..ir.dims import assuming
from ..ir.graph import Graph, input_node
from ..ir.node import Node, make
from ..ir.op import Composite
from ..ir.pattern import Var, match, op
from ..ir.types import F64, DType, Type
from ..ir.walk import postorder, topological
from ..process.forks import cached_property
from .samples import sample

if TYPE_CHECKING:
    from ..module.module import Module

Array = np.ndarray[Any, Any]
STOP, CAST = op("stop_gradient", Var("x")), op("cast", Var("x"))
GRADIENT_OF = op("with_gradient_of", Var("x"), Var("of"))
STEPS = ((2e-3, 1e-7), (3e-5, 1e-7), (1e-6, 1e-6))
"""(step, tolerance), the largest first: large steps suffer from nearby kinks, small ones from rounding."""
DIRECTIONS, ELEMENTS = 3, 16
RANK = {"ok": 0, "kink": 1, "jump": 2, "FAILED": 3}
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Finding:
    """The comparison of one gradient with one oracle.

    :param error: the largest relative error.
    :param verdict: ``ok``, ``FAILED``, or ``kink`` or ``jump``: the function is not differentiable there.
    """

    gradient: str
    oracle: str
    error: float
    where: str
    verdict: str


@dataclass(frozen=True)
class Report:
    """The result of :func:`check`; prints as a table.

    :param notes: the ops replaced by their surrogates, and the values held constant.
    """

    name: str
    dims: Mapping[str, int]
    seed: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(f.verdict != "FAILED" for f in self.findings)

    def __str__(self) -> str:
        rows = [("gradient", "oracle", "worst error", "where", "verdict")]
        rows += [(f.gradient, f.oracle, f"{f.error:.1e}", f.where, f.verdict) for f in self.findings]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        bound = ", ".join(f"{k}={v}" for k, v in self.dims.items())
        lines = [f"gradients of {self.name}{f' at {bound}' if bound else ''}, seed {self.seed}"]
        lines += [
            "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        ]
        lines += [f"  note: {note}" for note in self.notes]
        verdicts = [f.verdict for f in self.findings]
        summary = f"{verdicts.count('ok')} of {len(verdicts)} hold"
        rough = verdicts.count("kink") + verdicts.count("jump")
        if rough:
            summary += f", {rough} at a kink or jump, where differences cannot decide"
        return "\n".join([*lines, summary + (f", {verdicts.count('FAILED')} FAILED" if not self.ok else "")])


def check(
    subject: Graph | Module,
    wrt: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    *,
    inputs: Mapping[str, Array] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compares each gradient of a graph, or of a module (then also its kernels' results), with numerical derivatives.

    :param wrt: the inputs to differentiate by; by default a module's own, or every float input.
    :param dims: sizes of symbols; the others get small ones.
    :param inputs: arrays at which to check; the others are random, from ``seed``.
    :raises NotDifferentiable, InvalidProblem: a gradient does not exist, or the arguments do not fit the graph.
    """
    graph = subject if isinstance(subject, Graph) else subject.graph
    wanted = (
        list(wrt)
        or ([] if isinstance(subject, Graph) else list(subject.wrt))
        or [n for n in graph.input_names if graph.input(n).dtype.is_float]
    )
    if not wanted:
        raise InvalidProblem(
            f"{graph.name} has no float input to differentiate:"
            f" {', '.join(f'{n}: {graph.input(n).type}' for n in graph.input_names)}"
        )
    unused = "error" if isinstance(subject, Graph) else subject.options.unused
    joint = differentiate(graph, wanted, unused=unused)
    arrays, bound = sample(graph, dims, seed, inputs)
    held = HeldGraph(graph, arrays, bound, wanted)
    say = progress or (lambda _: None)
    problem = _Problem(held, joint, wanted, seed)
    findings: list[Finding] = []
    for name in wanted:
        say(f"d.{name}: differences")
        findings += [problem.along(name), problem.elements(name)]
    say("the adjoint identity")
    findings.append(problem.adjoint())
    if not isinstance(subject, Graph):
        say("the compiled kernels")
        findings += _compiled(subject, problem)
    return Report(graph.name, bound, seed, tuple(findings), (*held.notes, *problem.notes))


def _differentiated(node: Node) -> tuple[Node, ...]:
    """The operands of which a node has the derivatives."""
    return node.operands[1:] if match(GRADIENT_OF, node, {}) else node.operands


# -- the function that the differences are taken of --------------------------------------------------------------------


class HeldGraph:
    """A graph decomposed into primitives in f64, with surrogates substituted and operands of ``stop_gradient`` held at
    a base point.

    :param moving: inputs that are varied; they become f64 even if they are integers.
    """

    def __init__(self, graph: Graph, arrays: Mapping[str, Array], dims: Mapping[str, int], moving: Sequence[str]):
        self.surrogates: dict[str, int] = {}
        self._opened: set[Node] = set()
        self.dims = dict(dims)
        self.base = {
            n: np.asarray(a, np.float64) if n in moving or graph.input(n).dtype.is_float else np.asarray(a)
            for n, a in arrays.items()
        }
        inputs = {
            node: input_node(
                graph.input_name(node),
                Type(F64, node.shape) if self.base[graph.input_name(node)].dtype == np.float64 else node.type,
            )
            for node in graph.inputs
        }
        with assuming(graph.assumptions):
            new: dict[Node, Node] = dict(inputs)
            for node in postorder([n for _, n in graph.outputs], new, _differentiated):
                new[node] = self._open(node, tuple(new[o] if o in new else o for o in node.operands))
        outputs = [(name, new[node]) for name, node in graph.outputs if node.dtype.is_float]
        self.graph = self._freeze(Graph(graph.name, tuple(inputs.values()), tuple(outputs), graph.assumptions))
        self.notes = (
            *(
                f"{name} ({count}x) was replaced by its surrogate: its vjp is the derivative of that, on purpose"
                for name, count in sorted(self.surrogates.items())
            ),
            *((f"{self.frozen} values under stop_gradient were held",) if self.frozen else ()),
        )

    def _open(self, node: Node, operands: tuple[Node, ...], within: tuple[str, ...] = ()) -> Node:
        """The node as primitives in f64; an op ``within`` its own surrogate is not replaced again."""
        rounds = not within and match(
            CAST, node, {}
        )  # casts to narrow floats too; those inside a surrogate make quantized values
        attrs = {
            name: F64 if isinstance(value, DType) and (value.has_tangent or (rounds and value.is_float)) else value
            for name, value in node.attrs.items()
        }
        try:
            root = (
                node.op.surrogate(*operands, **attrs)
                if node.op.surrogate is not None and node.op.name not in within
                else None
            )
            if root is not None and root is not node.op.apply(
                operands, attrs
            ):  # otherwise the op is its own surrogate with these attributes
                self.surrogates[node.op.name] = self.surrogates.get(node.op.name, 0) + 1
                within = (*within, node.op.name)
            elif isinstance(node.op, Composite):
                root = node.op.decompose(*operands, **attrs)
            else:
                root = None
        except TypeRuleError as error:
            raise self._refused(node, error) from error
        if root is not None:
            inside: dict[Node, Node] = {}
            for inner in topological([root]):
                done = inner.op.name == "input" or inner in self._opened
                inside[inner] = inner if done else self._open(inner, tuple(inside[o] for o in inner.operands), within)
            return inside[root]
        if match(CAST, node, {}) and operands[0].dtype is F64 and not node.operands[0].dtype.is_float:
            return operands[0]  # a varied integer stays a float
        try:
            result: Node = node.op.apply(operands, attrs)
        except TypeRuleError as error:
            raise self._refused(node, error) from error
        self._opened.add(result)
        return result

    @staticmethod
    def _refused(node: Node, error: TypeRuleError) -> Unsupported:
        return Unsupported(f"check cannot take differences through '{node.op.name}' ({node.type}): {error}")

    def _freeze(self, graph: Graph) -> Graph:
        values = interp.evaluate_graph(graph, self.base, self.dims)
        held: dict[Node, Node] = {}
        new: dict[Node, Node] = {}
        for node in graph.nodes:
            if match(STOP, node, {}):
                new[node] = held[node] = input_node(f"held{len(held)}", node.type)
            elif any(new[o] is not o for o in node.operands):
                new[node] = make(node.op, tuple(new[o] for o in node.operands), node.attrs, node.type)
            else:
                new[node] = node
        result = Graph(
            graph.name, (*graph.inputs, *held.values()), tuple((n, new[v]) for n, v in graph.outputs), graph.assumptions
        )
        self._held = {str(i.attrs["name"]): values[node] for node, i in held.items()}
        self.frozen = len(held)
        return result

    def __call__(self, moved: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """The float outputs with some inputs replaced."""
        return interp.run(self.graph, {**self.base, **self._held, **(moved or {})}, dims=self.dims)


# -- differences -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A numerical derivative.

    :param value: the extrapolated slope.
    :param left: and :param right: one-sided differences at the smallest step.
    :param kind: ``smooth``, ``kink`` or ``jump``, from how the differences change as the step shrinks.
    :param noise: a bound of the rounding error.
    """

    value: float
    left: float
    right: float
    kind: str
    noise: float


def slope(function: Callable[[float], float], step: float, size: float) -> Slope:
    """d function / dt at 0 from eight values; ``size`` is the magnitude of the values that are rounded.

    As the step shrinks, the two one-sided differences of a smooth function converge; at a kink their distance stays, at
    a jump it grows.
    """
    middle = function(0.0)
    central, gaps = [], []
    rows: list[list[float]] = []
    for k in range(4):
        h = step / 2**k
        above, below = function(h), function(-h)
        central.append((above - below) / (2 * h))
        gaps.append(abs(above - 2 * middle + below) / h)
        left, right = (middle - below) / h, (above - middle) / h
        row = [central[-1]]
        for order in range(1, k + 1):
            row.append(row[-1] + (row[-1] - rows[-1][order - 1]) / (4**order - 1))
        rows.append(row)
    noise = 64 * 2.0**-53 * size / (step / 8)
    scale = max(*map(abs, central), 1e-300)
    small = 1e-6 * scale + noise
    apart = gaps[3] > max(0.4 * gaps[0], small)  # the ratio is 1/8 for smooth functions
    wild = abs(central[3] - central[2]) > max(0.5 * abs(central[1] - central[0]), small)  # 1/16 for smooth functions
    kind = "jump" if gaps[3] > max(4 * gaps[0], small) else "kink" if apart or wild else "smooth"
    return Slope(rows[3][3], left, right, kind, noise)


class _Problem:
    """A base point, random cotangents, and the gradients to be checked, in f64."""

    def __init__(self, held: HeldGraph, joint: Graph, wanted: Sequence[str], seed: int):
        self.held, self.joint, self.seed = held, joint, seed
        values = held()
        self.cotangents: dict[str, Array] = {
            name: np.asarray(self.random(f"cotangent of {name}").standard_normal(v.shape)) for name, v in values.items()
        }
        self.finite = {name: np.isfinite(v) for name, v in values.items()}
        if not any(f.any() for f in self.finite.values()) and any(f.size for f in self.finite.values()):
            raise InvalidProblem(
                f"no value of {held.graph.name} is finite at this point: give other inputs or another seed"
            )
        self.cotangents = {n: np.where(self.finite[n], c, 0.0) for n, c in self.cotangents.items()}
        self.magnitude = self.summed(self.cotangents, values, np.abs)
        self.names = joint_names(held.graph, wanted)[0]
        """The name of each output's cotangent in the joint graph."""
        arrays = {name: self._input(name) for name in joint.input_names}
        result = interp.run(joint, arrays, dims=held.dims, precision="f64")
        names = [name for name, _ in joint.outputs][-len(wanted) :]
        self.gradients = {name: np.asarray(result[full], np.float64) for name, full in zip(wanted, names, strict=True)}

    def _input(self, name: str) -> Array:
        dtype = self.joint.input(name).dtype.np
        if name in self.held.base:
            return self.held.base[name].astype(dtype)
        (output,) = (n for n, full in self.names.items() if full == name)
        return self.cotangents[output].astype(dtype)

    @cached_property
    def exact_cotangents(self) -> dict[str, Array]:
        """The cotangents as the joint graph gets them: rounded to their dtypes."""
        return {
            n: self._input(self.names[n]).astype(np.float64) if self.names.get(n) in self.joint.input_names else c
            for n, c in self.cotangents.items()
        }

    def random(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([zlib.crc32(purpose.encode()), self.seed])

    def direction(self, name: str, k: int) -> Array:
        """A random direction with the input's magnitude."""
        base = self.held.base[name]
        size = float(np.sqrt(np.mean(base * base))) if base.size else 1.0
        return np.asarray(self.random(f"{name} {k}").standard_normal(base.shape) * (size or 1.0))

    def value(self, t: float, tangents: Mapping[str, Array]) -> float:
        """<cotangents, f(x + t v)>."""
        outputs = self.held({n: self.held.base[n] + t * v for n, v in tangents.items()})
        return self.summed(self.exact_cotangents, outputs)

    def summed(
        self, cotangents: Mapping[str, Array], outputs: Mapping[str, Array], of: Callable[[Array], Array] = np.asarray
    ) -> float:
        """<cotangents, outputs>, summed over the elements that are finite at the base point."""
        return sum(float(np.sum(of(c[self.finite[n]] * outputs[n][self.finite[n]]))) for n, c in cotangents.items())

    @property
    def notes(self) -> tuple[str, ...]:
        left = {n: int(f.size - f.sum()) for n, f in self.finite.items() if not f.all()}
        return tuple(f"{count} elements of {name} are not finite and were left out" for name, count in left.items())

    def judge(self, tangents: Mapping[str, Array]) -> tuple[float, str, Slope]:
        """(error, verdict, slope): the directional derivative by the gradient compared with the numerical one."""
        parts = [self.gradients[n] * v for n, v in tangents.items()]
        have, size = sum(float(p.sum()) for p in parts), sum(float(np.abs(p).sum()) for p in parts)
        answer: tuple[float, str, Slope] | None = None
        for step, tolerance in STEPS:
            estimate = slope(lambda t: self.value(t, tangents), step, self.magnitude)
            scale = max(size, abs(estimate.value)) + estimate.noise / tolerance
            relative = abs(estimate.value - have) / scale if scale else 0.0
            if relative <= tolerance:
                return relative, "ok", estimate
            if answer is None or (estimate.kind == "smooth" and answer[1] != "FAILED"):
                answer = (relative, "FAILED" if estimate.kind == "smooth" else estimate.kind, estimate)
        assert answer is not None
        return answer

    def along(self, name: str) -> Finding:
        """Checks random directions of one input."""
        if not self.gradients[name].size:
            return Finding(name, "differences", 0.0, "no elements", "ok")
        worst, verdict, where = 0.0, "ok", f"{DIRECTIONS} directions"
        for k in range(DIRECTIONS):
            error, said, _ = self.judge({name: self.direction(name, k)})
            if RANK[said] > RANK[verdict]:
                verdict, where, worst = said, f"direction {k}", error
            elif said == verdict:
                worst = max(worst, error)
        return Finding(name, "differences", worst, where, verdict)

    def elements(self, name: str) -> Finding:
        """Checks single elements of one input: those with the largest gradient, and random ones."""
        gradient = self.gradients[name]
        if not gradient.size:
            return Finding(name, "single elements", 0.0, "no elements", "ok")
        order = np.argsort(-np.abs(gradient.reshape(-1)), kind="stable")[: ELEMENTS // 2]
        others = self.random(f"elements of {name}").permutation(gradient.size)
        picked = list(dict.fromkeys([*order.tolist(), *others.tolist()]))[: min(ELEMENTS, gradient.size)]
        worst, verdict, where = -1.0, "ok", ""
        for flat in picked:
            place = tuple(int(i) for i in np.unravel_index(flat, gradient.shape))
            tangent = np.zeros(gradient.shape)
            tangent[place] = max(abs(float(self.held.base[name][place])), 1.0)
            error, said, estimate = self.judge({name: tangent})
            have, want = float(gradient[place]), estimate.value / tangent[place]
            left, right = estimate.left / tangent[place], estimate.right / tangent[place]
            label = f"[{', '.join(map(str, place))}]" if place else ""
            text = label if said == "ok" else f"{label} differences say {want:.6g}, the gradient {have:.6g}"
            if said in ("kink", "jump"):
                text = f"{label} one-sided slopes {left:.6g} and {right:.6g}, the gradient says {have:.6g}"
                slack = 1e-3 * max(abs(left), abs(right), 1e-300)
                if not min(left, right) - slack <= have <= max(left, right) + slack:
                    said = "FAILED"
            if (RANK[said], error) > (RANK[verdict], worst):
                worst, verdict, where = error, said, text
        return Finding(name, "single elements", max(worst, 0.0), where, verdict)

    def adjoint(self) -> Finding:
        """Checks <g, J v> = <J^T g, v> with all inputs varied at once and J v computed numerically."""
        tangents = {name: self.direction(name, 97) for name in self.gradients if self.gradients[name].size}
        if not tangents:
            return Finding("all", "adjoint identity", 0.0, "no elements", "ok")
        error, verdict, _ = self.judge(tangents)
        return Finding("all", "adjoint identity", error, f"{len(tangents)} inputs together", verdict)


def _compiled(module: Module, problem: _Problem) -> list[Finding]:
    """Compares the kernels' gradients with those in f64; the tolerance is derived from the interpreter's error at the
    graph's own precision.
    """
    graph, held = module.graph, problem.held
    arrays: dict[str, Any] = {n: held.base[n].astype(graph.input(n).dtype.np) for n in graph.input_names}
    needed: dict[str, Any] = {n: problem._input(full) for n, full in problem.names.items()}
    free = {d: v for d, v in held.dims.items() if d in module.forward.program.dims}
    _, residuals = module.forward(dims=free, **arrays)
    gradients = module.backward(
        residuals, dims={d: v for d, v in held.dims.items() if d in module.backward.program.dims}, **needed
    )
    own = interp.run(problem.joint, {n: problem._input(n) for n in problem.joint.input_names}, dims=held.dims)
    findings = []
    for (name, exact), rounded in zip(
        problem.gradients.items(), list(own.values())[-len(problem.gradients) :], strict=True
    ):
        error, place = _worst(np.asarray(gradients[name], np.float64), exact)
        expected, _ = _worst(np.asarray(rounded, np.float64), exact)
        unit = UNIT.get(str(graph.input(name).dtype), UNIT["f32"])
        limit = max(64 * unit, 16 * expected)
        where = f"{place} (the interpreter: {expected:.1e})"
        findings.append(
            Finding(name, f"{module.target} kernels, f64", error, where.strip(), "ok" if error <= limit else "FAILED")
        )
    return findings


def _worst(got: Array, want: Array) -> tuple[float, str]:
    if not want.size:
        return 0.0, "no elements"
    difference = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(difference)), want.shape))
    return float(difference[place] / max(float(np.max(np.abs(want))), 1e-300)) if difference[place] else 0.0, (
        f"[{', '.join(map(str, place))}]" if place else ""
    )
