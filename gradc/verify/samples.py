"""Sample sizes and arrays for a graph: given ones, completed by random ones that satisfy its constraints."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import interp
from ..errors import GradcError, InvalidProblem
from ..ir.dims import Dim, assuming, evaluate, symbols
from ..ir.graph import Graph
from ..ir.node import Node
from ..ir.op import Composite, Library
from ..ir.types import DType, Type
from ..ir.walk import topological
from ..ops.elementwise.pointwise import convert

Array = np.ndarray[Any, Any]
SMALL = (5, 4, 7, 3, 6)


def sizes(
    graph: Graph,
    dims: Mapping[str, int] | None = None,
    inputs: Mapping[str, Array] | None = None,
    small: Sequence[int] = SMALL,
) -> dict[str, int]:
    """A value for every symbol: those given, those that ``inputs`` determine, and small distinct ones for the rest.

    :raises InvalidProblem: the given sizes violate the assumptions, or no small sizes satisfy them.
    """
    types = {n: graph.input(n).type for n in graph.input_names}
    unknown = set(dims or {}) - set(graph.dims)
    if unknown:
        raise InvalidProblem(f"{graph.name} has no dim {min(unknown)!r}; it has {', '.join(graph.dims) or 'none'}")
    given = {n: a.shape for n, a in (inputs or {}).items()}
    extra = given.keys() - types.keys()
    if extra:
        raise InvalidProblem(f"{graph.name} has no input {min(extra)!r}; it has {', '.join(types)}")
    bound = interp.bind_dims({n: types[n] for n in given}, given, dims)
    equal = [(a, b) for f in graph.assumptions if f.relation == "==" for a, b in ((f.left, f.right), (f.right, f.left))]
    derived = {
        str(a): b
        for a, b in equal
        if str(a) in graph.dims and str(a) not in bound and str(a) not in map(str, symbols(b))
    }
    free = [d for d in graph.dims if d not in bound and d not in derived]
    shifted = (
        [small[(start + i) % len(small)] + start // len(small) for i in range(len(free))]
        for start in range(len(small) * 8)
    )
    attempts = itertools.chain(shifted, itertools.product(range(1, 40), repeat=len(free))) if free else [()]
    for values in itertools.islice(attempts, 5000):
        attempt = {**bound, **dict(zip(free, values, strict=True))}
        try:
            for _ in derived:  # one may depend on another
                attempt |= {
                    d: evaluate(size, attempt) for d, size in derived.items() if symbols(size) <= attempt.keys()
                }
            if not any(f.fails(attempt) for f in graph.assumptions) and all(
                n >= 0 for node in graph.nodes for n in node.type.concrete(attempt)
            ):
                return {d: attempt[d] for d in graph.dims}
        except (GradcError, ValueError, ArithmeticError, KeyError):
            continue
    facts = "; ".join(map(str, graph.assumptions))
    raise InvalidProblem(
        f"no sizes for {', '.join(d for d in graph.dims if d not in bound) or 'these dims'} were found that"
        f" fit{f' {facts}' if facts else ''}; give dims for them"
    )


def sample(
    graph: Graph,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    inputs: Mapping[str, Array] | None = None,
    small: Sequence[int] = SMALL,
) -> tuple[dict[str, Array], dict[str, int]]:
    """(an array for every input, a value for every dim): those given, and random ones from ``seed``.

    An input is drawn from the distribution of the samples of the op that reads it (positive for a logarithm); indices
    are in range.
    """
    given = {**graph.defaults, **(inputs or {})}
    bound = sizes(graph, dims, given, small)
    words, limits = _readers(graph, bound)
    arrays = {}
    for node in graph.inputs:
        name = graph.input_name(node)
        random = np.random.default_rng([zlib.crc32(name.encode()), seed])
        arrays[name] = (
            given[name]
            if name in given
            else _draw(random, node.dtype, node.type.concrete(bound), words.get(name, ""), limits.get(name))
        )
    return arrays, bound


def cotangents(types: Mapping[str, Type], dims: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Cotangents for outputs: 1 for a scalar, random ones from ``seed`` for the others."""
    random = np.random.default_rng([seed, 1])
    return {
        name: (
            np.ones(type_.concrete(dims)) if type_.count == 1 else random.standard_normal(type_.concrete(dims))
        ).astype(type_.dtype.np)
        for name, type_ in types.items()
    }


def _readers(graph: Graph, dims: Mapping[str, int]) -> tuple[dict[str, str], dict[str, int]]:
    """(for each input the distribution of the op that reads it, for each index input the size that it indexes)."""
    words: dict[str, str] = {}
    limits: dict[str, int] = {}
    origin: dict[Node, Node] = {}
    pending = list(topological(n for _, n in graph.outputs))
    known = set(pending)
    with assuming(graph.assumptions):
        for node in pending:  # grows: the decompositions of composites are appended
            if node.op.name == "input":
                origin[node] = node
            elif not isinstance(node.op, Library) and (  # positions in the order of keys are no keys
                node.dtype.is_integer or (len(node.operands) == 1 and node.op.multilinear is not None)
            ):
                sources = {origin[o] for o in node.operands if o in origin and o.dtype.kind == node.dtype.kind}
                if len(sources) == 1:
                    origin[node] = sources.pop()
            for k, operand in enumerate(node.operands):
                source = origin.get(operand, operand)
                if source.op.name != "input":
                    continue
                name = str(source.attrs["name"])
                drawn = {s.draw[k] for s in node.op.samples if k < len(s.draw)}
                if len(drawn) == 1 and drawn <= {"positive", "above_one", "nonzero", "unit"}:
                    words.setdefault(name, drawn.pop())
                if k in node.op.ascending:
                    words[name] = "ascending"
                if k in node.op.indices:
                    limit = node.op.indices[k](node)
                    if symbols(limit) <= dims.keys():
                        limits[name] = min(
                            limits.get(name, 2**62), evaluate(limit, dims) if isinstance(limit, Dim) else int(limit)
                        )
            if isinstance(node.op, Composite):
                inside = [n for n in topological([node.op.decompose(*node.operands, **node.attrs)]) if n not in known]
                known.update(inside)
                pending += inside
    return words, limits


def from_zero(line: Array) -> Array:
    """The sorted elements of a 1-D array with the first set to 0: valid offsets."""
    return np.where(np.arange(line.size) == 0, 0, np.sort(line))


def _draw(random: np.random.Generator, dtype: DType, shape: tuple[int, ...], word: str, limit: int | None) -> Array:
    if dtype.is_integer:
        low, high = (
            (0, max(limit, 1)) if limit is not None else (max(dtype.range[0], -100), min(dtype.range[1], 100) + 1)
        )
        drawn = random.integers(low, min(high, dtype.range[1] + 1), shape)
        return convert(from_zero(drawn) if word == "ascending" else drawn, dtype)
    if not dtype.is_float:
        return convert(random.random(shape) < 0.5, dtype)
    signs = np.where(random.random(shape) < 0.5, -1.0, 1.0)
    values = {
        "positive": lambda: random.uniform(0.25, 4.0, shape),
        "above_one": lambda: random.uniform(1.25, 4.0, shape),
        "unit": lambda: random.uniform(0.02, 0.98, shape),
        "nonzero": lambda: signs * random.uniform(0.25, 3.0, shape),
    }
    return convert(np.asarray(values.get(word, lambda: random.standard_normal(shape))()), dtype)
