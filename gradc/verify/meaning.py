"""What a graph computes in f64 at one set of inputs, against which the programs made of it are held.

Graph -> Graph passes are decided in exact algebra (:mod:`.exact`).  A program is evaluated by the interpreter in f64:
its kernels may add up in another order, and use identities of functions (of exp, say) that no algebra over residues
has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import interp
from ..errors import GradcError, InternalError
from ..ir.graph import SPARSE_PARTS, Graph, rebuild
from ..ir.kernel import Program
from ..ir.node import Node, call
from ..ir.types import I64
from ..ops.indexing.gathers import scatter_add
from ..ops.rules import converted, spread
from .samples import SMALL, sample, sizes

Array = np.ndarray[Any, Any]
CLOSE = {"f64": 1e-7, "": 2.0**-7}
"""By the precision in which both sides are computed, from the same inputs: of the largest element of an output.  In
their own, values of a sum in another order may be rounded to bf16.
"""
LARGER = (67, 35, 41, 33, 39)
"""Sizes at which loops are unrolled, peeled and blocked, ..."""
MOST = 1 << 20
"""... as long as no value of the graph has more elements than this."""


@dataclass(frozen=True)
class Meaning:
    """What a graph computes.

    :param inputs: arrays by name.  :param dims: the value of each symbol.  :param outputs: in f64, by name.
    :param scale: the largest finite magnitude of a value: a sum that cancels is known as well as its terms are.
    :param precision: of the interpreter.
    """

    name: str
    inputs: Mapping[str, Array]
    dims: Mapping[str, int]
    outputs: Mapping[str, Array]
    scale: float
    precision: str = "f64"

    @classmethod
    def of(cls, graph: Graph, inputs: Mapping[str, Array], dims: Mapping[str, int], precision: str = "f64") -> Meaning:
        """A graph's at these inputs."""
        values = interp.evaluate_graph(graph, inputs, dims, precision)
        outputs = {name: values[node] for name, node in graph.outputs}
        return cls(graph.name, inputs, dims, outputs, max(map(largest, values.values()), default=0.0), precision)

    def difference(self, result: Graph | Program) -> str:
        """How the outputs of a graph or program differ from these; "" if they do not.

        :raises GradcError: it cannot be evaluated.
        """
        names = result.input_names if isinstance(result, Graph) else [b.name for b in result.of_kind("input")]
        given = {name: self.inputs[name] for name in names if name in self.inputs}
        got = interp.run(result, given, dims={d: self.dims[d] for d in result.dims}, precision=self.precision)
        for name, wanted in self.outputs.items():
            if name not in got:
                return f"the output {name} is lost"
            found = apart(np.asarray(wanted), np.asarray(got[name]), 1e-5 * self.scale, CLOSE[self.precision])
            if found:
                sizes = ", ".join(f"{k}={v}" for k, v in self.dims.items())
                return f"the output {name}{found}{f' ({sizes})' if sizes else ''}"
        return ""

    def require(self, stage: str, result: Graph | Program) -> None:
        """
        :raises InternalError: the result means something else; names the stage, the output and the first position.
        """
        try:
            found = self.difference(result)
        except GradcError as error:
            raise InternalError(f"{stage}: what it made of {self.name} cannot be evaluated: {error}") from error
        if found:
            raise InternalError(f"{stage}: {self.name} no longer means the same: {found}")


def meanings(graph: Graph, given: Mapping[str, int] | None = None, precision: str = "f64") -> list[Meaning]:
    """What a graph computes of random inputs, at small sizes and at larger ones.

    :param given: sizes that are taken where neither fit its assumptions.
    :raises InvalidProblem: no such sizes fit.
    """
    return [Meaning.of(graph, *sample(graph, bound), precision) for bound in _bindings(graph, own_sizes(graph, given))]


def own_sizes(graph: Graph, given: Mapping[str, int] | None) -> dict[str, int]:
    """Those of the given sizes that a graph has."""
    return {name: size for name, size in (given or {}).items() if name in graph.dims}


def _bindings(graph: Graph, given: Mapping[str, int]) -> list[dict[str, int]]:
    found = []
    for small in (SMALL, LARGER) if graph.dims else (SMALL,):
        with contextlib.suppress(GradcError):
            bound = sizes(graph, small=small)
            if small is SMALL or all(np.prod(n.type.concrete(bound), dtype=object) <= MOST for n in graph.nodes):
                found.append(bound)
    return found or [sizes(graph, given)]


@dataclass
class Halves:
    """The meanings of a joint graph's forward and backward.

    :ivar forward, backward: at each set of sizes, the backward's at the residuals that the forward gives.
    """

    forward: list[Meaning] = field(default_factory=list)
    backward: list[Meaning] = field(default_factory=list)

    @classmethod
    def of(
        cls, stage: str, joint: Graph, forward: Graph, backward: Graph, bound: Mapping[str, int] | None = None
    ) -> Halves:
        """
        :param bound: sizes that are taken where no small ones fit.
        :raises InternalError: one after the other, the two do not compute what the joint graph does.
        """
        halves, whole = cls(), _composed(joint, forward, backward)
        for meaning in meanings(joint, bound):
            meaning.require(stage, whole)
            given = {name: meaning.inputs[name] for name in forward.input_names}
            dims = {d: meaning.dims[d] for d in forward.dims}
            halves.forward.append(Meaning.of(forward, given, dims))
            residuals = interp.run(forward, given, dims=dims)
            known = {**meaning.inputs, **residuals}
            needed = {name: known[name] for name in backward.input_names}
            halves.backward.append(Meaning.of(backward, needed, {d: meaning.dims[d] for d in backward.dims}))
        return halves


def _composed(joint: Graph, forward: Graph, backward: Graph) -> Graph:
    """The backward read after the forward, as one graph with the outputs of the joint one."""
    made = dict(forward.outputs)
    own = {name: joint.input(name) for name in joint.input_names}
    first = rebuild(list(made.values()), {n: own[forward.input_name(n)] for n in forward.inputs})
    given = {n: first[made[name]] if (name := backward.input_name(n)) in made else own[name] for n in backward.inputs}
    second = rebuild([n for _, n in backward.outputs], given)
    results = {name: second[n] for name, n in backward.outputs} | {name: first[n] for name, n in forward.outputs}
    return joint.with_outputs([(name, results[name]) for name in joint.output_names])


def require_rows(stage: str, joint: Graph, sparse: Graph, bound: Mapping[str, int] | None = None) -> None:
    """That the rows of gradients are those of the dense ones of a joint graph, and all others 0.

    :param bound: sizes that are taken where no small ones fit.
    :raises InternalError: they are not.
    """
    found = dict(sparse.outputs)

    def dense(name: str, node: Node) -> Node:
        """The first ``count`` rows, added to zeros."""
        if name in found:
            return found[name]
        rows, values, count = (found[f"{name}.{part}"] for part in SPARSE_PARTS)
        size = spread(converted(call("dim", size=node.shape[0]), I64), rows.shape)
        valid = call("lt", call("iota", shape=rows.shape, axis=0), spread(count, rows.shape))
        return scatter_add.plain(call("where", valid, rows, size), values, axis=0, size=node.shape[0], oob="skip")

    whole = joint.with_outputs([(name, dense(name, node)) for name, node in joint.outputs])
    for meaning in meanings(joint, bound):
        meaning.require(stage, whole)


def largest(value: Array) -> float:
    """The largest finite magnitude of an array; 0 of none."""
    wide = np.asarray(value, np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def apart(wanted: Array, got: Array, least: float, close: float = CLOSE["f64"]) -> str:
    """Where two arrays differ by more than ``close`` times the largest element; "" if they do not.  Integers must be
    equal, NaN and infinities stand in the same places.

    :param least: magnitude below which the largest element does not count.
    """
    if wanted.shape != got.shape:
        return f" had the shape {wanted.shape} and has {got.shape}"
    if not wanted.size:
        return ""
    a, b = (np.asarray(x, np.float64) for x in (wanted, got))
    finite = np.isfinite(a) & np.isfinite(b)
    scale = np.abs(a[finite]).max(initial=least)
    with np.errstate(invalid="ignore"):
        same = np.where(finite, np.abs(a - b) <= close * scale, (a == b) | (np.isnan(a) & np.isnan(b)))
    if wanted.dtype.kind in "iub":
        same = wanted == got
    if same.all():
        return ""
    at = tuple(int(k) for k in np.argwhere(~same)[0])
    place = ",".join(map(str, at))
    return f" differs at [{place}] ({int((~same).sum())} of {same.size}): it was {wanted[at]!r} and is {got[at]!r}"
