"""Translation validation: every pass on a graph is held against the graph before it.

First in exact algebra (:mod:`gradc.verify.exact`), under the licence that the pass declares, or under ``BITS`` where
the module is compiled with ``numerics="strict"``.  Where that cannot decide, and for passes that make programs of
graphs, both sides run in the interpreter, in f64 at random points; so does every changed graph, as a second opinion.
The text of each stage must verify and round-trip.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from gradc import interp
from gradc.errors import GradcError, IndexOutOfRange, InternalError, InvalidProblem
from gradc.ir.graph import Graph
from gradc.ir.kernel import Program
from gradc.ir.program_text import parse_program
from gradc.ir.text import parse
from gradc.ir.verify import verify, verify_program
from gradc.module.module import Module
from gradc.passes.manager import PASSES
from gradc.verify.exact import equal
from gradc.verify.meaning import apart, largest
from gradc.verify.samples import sample

STARTS = ("forward", "joint", "forward.partition", "backward.partition", "sparse_rows")
"""Stages that begin with another graph than the one before them: the joint graph has more inputs, a partition is half
of one.
"""


def validate(module: Module, problem: Any, counts: Counter[str]) -> None:
    """
    :raises Wrong: a pass changed what its graph means, or a stage does not round-trip.
    """
    last: Graph | Program | None = None
    for stage in module.stages:
        result = stage.result
        same_as_before = result == last
        if not same_as_before:
            _texts(stage.name, result)
        if last is not None and stage.name not in STARTS:
            if same_as_before:
                counts["passes that changed nothing"] += 1
            else:
                _same(stage.name, last, result, problem, counts)
        last = result


def _texts(name: str, result: Graph | Program) -> None:
    from .graphs import Wrong

    verify(result) if isinstance(result, Graph) else verify_program(result)
    again = parse(str(result)) if isinstance(result, Graph) else parse_program(str(result))
    if again != result:
        raise Wrong("text of a stage", f"the text after {name} does not parse back to it:\n{result}")


def _same(name: str, before: Graph | Program, after: Graph | Program, problem: Any, counts: Counter[str]) -> None:
    from .graphs import Wrong

    reason = ""
    if isinstance(before, Graph) and isinstance(after, Graph):
        licence = (
            "BITS" if problem.options.get("numerics") == "strict" else getattr(PASSES.get(name), "licence", "REAL")
        )
        reason = undecided(before, after, licence, problem.seed)
        counts[f"rewritten graphs: {'undecided: ' + reason if reason else 'equal in exact algebra'}"] += 1
        if reason:
            counts[f"undecided of {name} ({licence})"] += 1
    apart = numerically(before, after, problem)
    counts[
        "rewritten graphs in f64 at random points" if isinstance(after, Graph) else "programs in f64 at random points"
    ] += apart is not None
    if apart:
        raise Wrong(
            f"pass {name}",
            f"{name} changes what the graph means:"
            f" {apart}{f' (exact algebra: {reason})' if reason else ''}\n{before}\n--- after {name}\n{after}",
        )


def undecided(before: Graph, after: Graph, licence: str, seed: int) -> str:
    """ "", or why exact algebra does not say that the two are equal."""
    try:
        equal(before, after, licence=licence, seed=seed)
    except InvalidProblem:
        return "no small sizes fit"
    except InternalError as error:
        return "cannot be evaluated" if "cannot be evaluated" in str(error) else "they differ there, not in f64"
    return ""


def numerically(before: Graph | Program, after: Graph | Program, problem: Any) -> str | None:
    """How the two differ in f64 at random points; "" if they do not, None where there are no such points."""
    graph = before if isinstance(before, Graph) else None
    try:
        if graph is not None:
            arrays, dims = sample(graph, {d: v for d, v in problem.sizes[0].items() if d in graph.dims}, problem.seed)
        else:
            assert isinstance(before, Program)
            dims = {d: problem.sizes[0][d] for d in before.dims}
            arrays = _inputs(before, dims, problem.seed)
        one = interp.run(before, arrays, dims=dims, precision="f64")
        two = interp.run(
            after,
            {n: a for n, a in arrays.items() if n in _names(after)},
            dims={d: dims[d] for d in after.dims},
            precision="f64",
        )
    except (IndexOutOfRange, InvalidProblem, GradcError, KeyError):
        return None
    terms = interp.evaluate_graph(graph, arrays, dims, "f64") if graph is not None else arrays
    scale = max(map(largest, (*terms.values(), *one.values())), default=0.0)
    for name in one.keys() & two.keys():
        found = apart(one[name], two[name], 1e-5 * scale)  # a sum that cancels is known as well as its terms are
        if found:
            return f"{name}{found} at {dict(dims)}"
    return ""


def _names(of: Graph | Program) -> set[str]:
    return set(of.input_names) if isinstance(of, Graph) else {b.name for b in of.buffers if b.kind == "input"}


def _inputs(program: Program, dims: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Inputs of a program: numbers; small whole ones where it may index by them."""
    rng = np.random.default_rng(seed)
    out = {}
    for buffer in program.buffers:
        if buffer.kind == "input":
            shape, dtype = buffer.type.concrete(dims), buffer.type.dtype
            array = rng.standard_normal(shape) if dtype.is_float else rng.integers(0, 2, shape)
            out[buffer.name] = np.asarray(array).astype(dtype.np)
    return out
