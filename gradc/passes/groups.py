"""Groups: nodes that share one kernel, and views of memory that a library call can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..ir.dims import Size, evaluate, product, same, symbols
from ..ir.graph import Graph
from ..ir.kernel import Index, Operand
from ..ir.node import Node
from ..ir.op import Alias, Expr, Movement
from ..ir.pattern import Var, match
from .lower import Builder, CannotInline, Domain


def lowering(node: Node) -> Any:
    return getattr(node.op, "lower", None)


def real(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that are not the literal 1."""
    return tuple(s for s in shape if s != 1)


def alike(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


class Group:
    """Nodes that share one kernel.

    :ivar walked: of each scatter of single elements the axes that it shows; without a column it would run once per row.
    """

    def __init__(self, key: int, shape: Sequence[Size], cols: tuple[int, ...] | None):
        self.key = key
        self.domain = Domain(tuple(shape), cols)
        self.placed: dict[Node, str] = {}  # node -> element | row | accum
        self.scatter: Node | None = None
        self.walked: list[frozenset[str]] = []
        self.builder: Builder

    @property
    def real(self) -> tuple[Size, ...]:
        return real(self.domain.shape)

    @property
    def rows(self) -> tuple[Size, ...]:
        columns = set(self.domain.columns)
        return tuple(s for d, s in enumerate(self.domain.shape) if s != 1 and d not in columns)

    def place(self, shape: Sequence[Size], level: str) -> tuple[Index, ...]:
        """The index of a value of ``shape`` at a level: its real sizes are, in order, the kernel's (row) axes."""
        columns = set(self.domain.columns) if level == "row" else set()
        axes = iter([d for d in self.domain.real if d not in columns])
        return tuple(Index() if size == 1 else Index.of(f"i{next(axes)}") for size in shape)


class Memory(Protocol):
    """What a scheduler knows of memory."""

    graph: Graph
    in_memory: set[Node]
    forced: set[Node]
    narrow: bool


@dataclass(frozen=True)
class Seen:
    """A value in memory, where an element of it lies, and what it is multiplied with as it is read."""

    base: Node
    index: tuple[Index, ...]
    scale: Seen | None = None

    @property
    def bases(self) -> set[Node]:
        return {self.base} | (self.scale.bases if self.scale else set())

    def operand(self, names: Mapping[Node, str]) -> Operand:
        return Operand(names[self.base], self.index, self.scale.operand(names) if self.scale else None)


SCALED = Var("values") * Var("scale")


class View:
    """Follows ops that only move data to the value in memory behind them: what a library call can read through strides.

    A call reads narrower values as its own (int8 weights, bf16), and with a scale: what only converts and scales them needs no memory either.
    """

    def __init__(self, memory: Memory):
        self.memory = memory

    def read(self, node: Node, index: Sequence[Index], where: Any = None, other: Any = 0) -> Seen:
        lower = lowering(node)
        if where is not None:
            raise CannotInline(node, "a mask")
        if node in self.memory.in_memory and not (isinstance(lower, Alias) and node not in self.memory.forced):
            return Seen(node, tuple(Index() if s == 1 else i for s, i in zip(node.shape, index, strict=True)))
        if isinstance(lower, Movement | Alias) and not node.op.indices:  # positions that stand in memory are no strides
            found = lower.at(index, node, self)
            if found is not None:
                return found  # type: ignore[no-any-return]
        if not self.memory.narrow:
            raise CannotInline(node, "a library reads its own dtype")
        if isinstance(lower, Expr) and lower.conversion and node.dtype.holds(node.operands[0].dtype):
            below = self.read(node.operands[0], index)
            if below.scale is not None:  # it is rounded to its own dtype before the conversion
                raise CannotInline(node, "a scale in another dtype")
            return below
        factors: dict[str, Any] = {}
        if match(SCALED, node, factors):
            for core, scale in (("values", "scale"), ("scale", "values")):
                one, two = self.read(factors[core], index), self.read(factors[scale], index)
                if one.base.dtype is not node.dtype and two.base.dtype is node.dtype and not (one.scale or two.scale) and nbytes(two.base) < nbytes(one.base):
                    return replace(one, scale=two)
        raise CannotInline(node, "no view of memory")

    def __getattr__(self, name: str) -> Any:
        raise CannotInline(self.memory.graph.nodes[0], f"no view of memory: {name}")


def nbytes(node: Node) -> float:
    """Bytes of a value; a symbol counts as 1024."""
    total = product(node.shape)
    if isinstance(total, int):
        return float(total * node.dtype.itemsize)
    return float(evaluate(total, dict.fromkeys(symbols(total), 1024)) * node.dtype.itemsize)
