"""The samples of every op as concrete cases: dtypes filled in, dims bound, arrays drawn.

A :class:`Case` is one sample at one float dtype: a graph with symbolic dims, and for each of several bindings
the arrays to run it on.  Whoever runs graphs (the interpreter, a compiled module) runs these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from gradc import ops
from gradc.errors import GradcError
from gradc.ir.dims import Dim, evaluate, symbol, symbols
from gradc.ir.graph import Graph, again, input_node
from gradc.ir.node import REGISTRY, Node, make
from gradc.ir.op import Composite, Function, Op, Sample
from gradc.ir.size_text import parse_size
from gradc.ir.types import DTYPES, DType, Type, parse_type, typeof
from gradc.ir.walk import topological
from gradc.ops.elementwise.pointwise import convert

FLOATS = ("f64", "f32", "bf16", "f16")
SIZES = (7, 0, 1, 64)
"""What a symbolic dim is bound to unless the sample says."""
WITHOUT_RULE = ("input", "getitem")
"""Beside the functions, whose calls leave no node: tests/ops/test_functions.py has those."""


def tested_ops() -> list[Op]:
    """Every op that has a type rule of its own."""
    named = [REGISTRY[name] for name in sorted(REGISTRY) if name not in WITHOUT_RULE]
    return [op for op in named if not isinstance(op, Function)]


tested_ops.__test__ = False  # a function that pytest would call


@dataclass(frozen=True)
class Case:
    """One sample at one dtype.

    :param types: of the operands; inputs are named x0, x1, ...  :param fixed: operands given as arrays by the sample.
    """

    op: Op
    sample: Sample
    number: int
    dtype: str
    types: tuple[Type, ...]
    fixed: Mapping[int, np.ndarray]
    attrs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op.name}{self.number}" + (f"-{self.dtype}" if self.dtype else "")

    @cached_property
    def graph(self) -> Graph:
        """``y = op(x0, x1, ...)``; several results are y, y1, ..."""
        inputs = tuple(input_node(f"x{k}", type) for k, type in enumerate(self.types))
        made = call(self.op, inputs, self.attrs)
        results = made if isinstance(made, tuple) else (made,)
        return Graph(self.op.name, inputs, tuple((f"y{k or ''}", result) for k, result in enumerate(results)))

    @property
    def floats(self) -> list[str]:
        """The inputs that may be differentiated (the narrow floats stand for integers)."""
        return [f"x{k}" for k, type in enumerate(self.types) if type.dtype.name in FLOATS]

    @cached_property
    def smooth(self) -> Graph:
        """The graph with a float output: quantize's, also a short float, is cast, through which the gradient passes."""
        (name, y), *_ = self.graph.outputs
        straight = not y.dtype.has_tangent and self.op.surrogate is not None
        return self.graph.with_outputs([(name, y.astype(self.dtype or "f32"))]) if straight else self.graph

    @property
    def differentiable(self) -> bool:
        """Whether a gradient can be asked for at all."""
        opaque = isinstance(self.op, Composite) and not self.op.differentiable
        return not opaque and bool(self.floats) and all(n.dtype.has_tangent for _, n in self.smooth.outputs)

    @property
    def coarsest(self) -> str:
        """The narrowest of the floats that take part: it bounds what can be asked of the result."""
        names = [
            t.dtype.name for t in (*self.types, *(n.type for _, n in self.smooth.outputs)) if t.dtype.name in FLOATS
        ]
        return max(names, key=FLOATS.index, default="f64")

    def bindings(self, sizes: Iterable[int] = SIZES) -> Iterator[dict[str, int]]:
        """Values of the dims: the sample's own, else one of ``sizes`` (several dims get different ones)."""
        names = sorted(frozenset().union(*(t.symbols for t in self.types), frozenset(self.graph.dims)))
        free = [n for n in names if n not in self.sample.dims]
        sizes = list(sizes) if free else [0]
        for k in range(len(sizes)):
            bound = {**self.sample.dims, **{n: sizes[(k + i) % len(sizes)] for i, n in enumerate(free)}}
            try:
                empty = any(0 in t.concrete(bound) and t.count != 0 for t in self.types)
                if not empty or all(_drawable(w, t, bound) for w, t in zip(self.words, self.types, strict=True)):
                    yield {n: bound[n] for n in names}
            except ValueError:
                continue

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.sample.draw[k] if k < len(self.sample.draw) else "normal" for k in range(len(self.types)))

    def arrays(self, bindings: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
        """The inputs, drawn by the sample's words; the same values (rounded) at every float dtype."""
        out = {}
        for k, (word, type_) in enumerate(zip(self.words, self.types, strict=True)):
            rng = np.random.default_rng(
                [zlib.crc32(f"{self.op.name}{self.number}.{k}".encode()), seed, *bindings.values()]
            )
            out[f"x{k}"] = (
                self.fixed[k] if k in self.fixed else draw(rng, word, type_.dtype, type_.concrete(bindings), bindings)
            )
        return out


def for_cases(found: Iterable[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test of one ``case``: pytest gets one test per op, which runs all its cases and names the one that
    fails (a test per case would spend more in pytest than in gradc).
    """
    every: dict[str, list[Case]] = {}
    for case in found:
        every.setdefault(case.op.name, []).append(case)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_an_op(op_name: str, **fixtures: Any) -> None:
            for case in every[op_name]:
                try:
                    test(case, **fixtures)
                except Exception as error:
                    error.add_note(f"the case {case}")
                    raise

        others = [p for n, p in inspect.signature(test).parameters.items() if n != "case"]
        named = inspect.Parameter("op_name", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        of_an_op.__signature__ = inspect.Signature([named, *others])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("op_name", every)(of_an_op)

    return decorate


def symbolic_rows(case: Case) -> Case | None:
    """The case with a symbol for each size but those of last axes, one symbol per size; None where the op wants
    numbers.
    """

    def shape(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            symbol(f"S{s}") if isinstance(s, int) and s > 1 and k < len(sizes) - 1 else s for k, s in enumerate(sizes)
        )

    types = tuple(t if k in case.fixed else t.with_shape(*shape(t.shape)) for k, t in enumerate(case.types))
    if types == case.types:
        return None
    named = {str(s): int(str(s)[1:]) for t in types for s in t.shape if str(s)[0] == "S"}
    attrs = {k: shape(v) if k == "shape" and isinstance(v, tuple) else v for k, v in case.attrs.items()}
    for tried in (attrs, dict(case.attrs)):
        new = replace(
            case, sample=replace(case.sample, dims={**{"N": 5}, **case.sample.dims, **named}), types=types, attrs=tried
        )
        with contextlib.suppress(GradcError):
            return new if new.graph else None
    return None


@dataclass(frozen=True)
class Repeated(Case):
    """A case whose operands are repeated along their first axis: ``y = op(broadcast_to(x0, wide[0]), ...)``, inputs
    without that axis.
    """

    wide: tuple[Type, ...] = ()

    @cached_property
    def graph(self) -> Graph:
        inputs = tuple(input_node(f"x{k}", type) for k, type in enumerate(self.types))
        operands = tuple(
            x if x.type == wide else ops.broadcast_to(x, wide.shape) for x, wide in zip(inputs, self.wide, strict=True)
        )
        return Graph(self.op.name, inputs, (("y", call(self.op, operands, self.attrs)),))


def repeated(case: Case) -> Case | None:
    """The case with each operand of several axes repeated along its first; None where none can be."""
    types = tuple(t if k in case.fixed or t.rank < 2 else t.with_shape(*t.shape[1:]) for k, t in enumerate(case.types))
    if types == case.types:
        return None
    return Repeated(case.op, case.sample, case.number, case.dtype, types, case.fixed, case.attrs, case.types)


def call(op: Op, operands: Iterable[Node], attrs: Mapping[str, Any]) -> Any:
    """``ops.NAME(operands, attrs)`` as a user writes it."""
    operands = tuple(operands)
    if isinstance(op, Function):
        return op.on(operands, attrs)
    if op.sugar is None and op.order:
        return op(**dict(zip(op.operand_names, operands, strict=False)), **attrs)
    return op(*operands, **attrs)


def _drawable(word: str, type_: Type, bindings: Mapping[str, int]) -> bool:
    bound = word.partition(":")[2]
    return not bound or evaluate(parse_size(bound), bindings) > 0 or 0 in type_.concrete(bindings)


def draw(
    rng: np.random.Generator, word: str, dtype: DType, shape: tuple[int, ...], bindings: Mapping[str, int]
) -> np.ndarray:
    """An array of ``dtype`` by one of the words of :class:`Sample`."""
    count = int(np.prod(shape, dtype=np.int64))
    if word.startswith("index:"):
        bound = evaluate(parse_size(word[6:]), bindings)
        return rng.integers(0, max(bound, 1), shape).astype(dtype.np)
    if word == "bool" or (dtype.kind == "b" and word == "normal"):
        return convert(rng.random(shape) < 0.5, dtype)
    if word == "int" or (dtype.is_integer and word == "normal"):
        low, high = dtype.range if dtype.is_integer else (-9, 9)
        small = rng.integers(max(low, -9), min(high, 9) + 1, shape)
        wide = rng.integers(low + 1, high, shape) if dtype.is_integer else small
        return convert(np.where(rng.random(shape) < 0.8, small, wide), dtype)
    signs = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    values = {
        "normal": lambda: rng.standard_normal(shape),
        "positive": lambda: rng.uniform(0.25, 4.0, shape),
        "above_one": lambda: rng.uniform(1.25, 4.0, shape),
        "unit": lambda: rng.uniform(0.02, 0.98, shape),
        "nonzero": lambda: signs * rng.uniform(0.25, 3.0, shape),
        "distinct": lambda: ((rng.permutation(count) - count // 2) * 0.125).reshape(shape),
    }[word]()
    return convert(np.asarray(values, np.float64), dtype)


def _sizes_from_text(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_sizes_from_text(v) for v in value)
    return parse_size(value) if isinstance(value, str) else value


def _attrs(op: Op, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Names of dims in an op's sizes become dims."""
    out = {}
    for name, value in attrs.items():
        annotation = str(op.parameters[name].annotation) if name in op.parameters else ""
        dims = (isinstance(value, tuple) and "Literal" not in annotation) or (
            isinstance(value, str) and "Dim" in annotation
        )
        out[name] = _sizes_from_text(value) if dims else value
    return out


def cases(dtypes: Iterable[str] = FLOATS, names: Iterable[str] | None = None) -> Iterator[Case]:
    """Every sample of every op, at each of ``dtypes`` where the sample leaves the dtype open."""
    wanted = None if names is None else set(names)
    for op in tested_ops():
        if wanted is not None and op.name not in wanted:
            continue
        for number in range(len(op.samples)):
            yield from _registered(op.name, number, tuple(dtypes))


@functools.cache
def _registered(name: str, number: int, dtypes: tuple[str, ...]) -> tuple[Case, ...]:
    """:func:`cases_of` of an op in the registry: the files of tests ask for the same, whose graphs are built once."""
    op = REGISTRY[name]
    return tuple(cases_of(op, op.samples[number], number, dtypes))


_type = functools.cache(parse_type)


def cases_of(op: Op, sample: Sample, number: int, dtypes: Iterable[str] = FLOATS) -> Iterator[Case]:
    texts = [o if isinstance(o, str) else None for o in sample.operands]
    is_open = any(t is not None and t.startswith("F[") for t in texts)
    for name in dtypes if is_open else ("",):
        fixed = {k: np.asarray(o) for k, o in enumerate(sample.operands) if not isinstance(o, str)}
        types = tuple(
            _type(name + t[1:] if t.startswith("F[") else t) if t is not None else typeof(fixed[k])
            for k, t in enumerate(texts)
        )
        yield Case(op, sample, number, name, types, fixed, _attrs(op, sample.attrs))


def with_op(graph: Graph, old: Op, new: Op) -> Graph:
    """The graph with every node of ``old`` made one of ``new``."""
    return graph.rewrite(lambda node, operands: make(new, operands, node.attrs, node.type) if node.op is old else None)


def opened(graph: Graph) -> Graph:
    """Every composite opened, those with a vjp too."""

    def deep(root: Node) -> Node:
        new: dict[Node, Node] = {}
        for node in topological([root]):
            operands = tuple(new[o] for o in node.operands)
            if isinstance(node.op, Composite):
                new[node] = deep(node.op.decompose(*operands, **node.attrs))
            else:
                new[node] = again(node, operands)
        return new[root]

    return graph.with_outputs((name, deep(node)) for name, node in graph.outputs)


def unregistered(op: Op, **changes: Any) -> Op:
    """A changed copy of a record; the registry keeps the original."""
    try:
        return replace(op, **changes)
    finally:
        REGISTRY[op.name] = op


__all__ = [
    "DTYPES",
    "FLOATS",
    "SIZES",
    "Case",
    "Dim",
    "call",
    "cases",
    "cases_of",
    "draw",
    "opened",
    "ops",
    "repeated",
    "symbolic_rows",
    "symbols",
    "tested_ops",
    "unregistered",
    "with_op",
]
