"""Groups: nodes that share one kernel, and views of memory that a library call can read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...ir.dims import Size, evaluate, product, same, symbols
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Alias, Expr, Movement
from ...ir.pattern import Var, match
from ...ir.statement import Index, Operand
from .lower import CannotInline, IterationSpace, KernelBuilder, truncate


def lowering(node: Node) -> Any:
    return getattr(node.op, "lower", None)


def real(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that are not the literal 1."""
    return tuple(s for s in shape if s != 1)


def alike(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and (a == b or all(same(x, y) for x, y in zip(a, b, strict=True)))


class Group:
    """Nodes that share one kernel.

    :ivar walked: the axes in the index of each scatter of single elements; one without a column axis would be added
        once per row.
    """

    def __init__(self, key: int, shape: Sequence[Size], cols: tuple[int, ...] | None):
        self.key = key
        self.domain = IterationSpace(tuple(shape), cols)
        self.placed: dict[Node, str] = {}  # node -> element | row | accum | library | check
        self.scatter: Node | None = None
        self.walked: list[frozenset[str]] = []
        self.builder: KernelBuilder

    def state(self) -> Any:
        """What :meth:`restore` needs: a group only grows."""
        return len(self.placed), len(self.walked), self.scatter, self.domain, self.builder.snapshot()

    def restore(self, state: Any) -> None:
        placed, walked, self.scatter, self.domain, builder = state
        truncate(self.placed, placed)
        del self.walked[walked:]
        self.builder.domain = self.domain
        self.builder.restore(builder)

    @property
    def alone(self) -> bool:
        """Whether it is a step of one node, to which no other may be added."""
        return not {"library", "check"}.isdisjoint(self.placed.values())

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
    host: bool

    def widens(self, node: Node, reader: Node) -> bool: ...

    def reads_narrow(self, node: Node, reader: Node) -> bool: ...


@dataclass(frozen=True)
class StridedOperand:
    """A value in memory, where an element of it lies, and what it is multiplied with as it is read."""

    base: Node
    index: tuple[Index, ...]
    scale: StridedOperand | None = None

    per: tuple[tuple[str, Size], ...] = ()

    def regrouped(self, axis: str, size: Size) -> StridedOperand:
        """The same over the axis that was counted as ``axis/`` groups of ``axis%`` places.

        :raises CannotInline: its values do not lie one after another along the axis, or its scale differs within a
            group.
        """
        if self.scale is None or self.scale.scale is not None:
            raise CannotInline(self.base, "no scale per group")
        whole = []
        for i in self.index:
            steps = dict(i.terms)
            group, place = steps.pop(f"{axis}/", 0), steps.pop(f"{axis}%", 0)
            if not same(group, place * size):
                raise CannotInline(self.base, "groups that do not follow one another")
            whole.append(Index(i.const, tuple(steps.items())) + Index.of(axis) * place)
        if any(v == f"{axis}%" for i in self.scale.index for v, _ in i.terms):
            raise CannotInline(self.base, "a scale that differs within a group")
        scale = replace(
            self.scale, index=tuple(i.renamed({f"{axis}/": axis}) for i in self.scale.index), per=((axis, size),)
        )
        return replace(self, index=tuple(whole), scale=scale)

    @property
    def bases(self) -> set[Node]:
        return {self.base} | (self.scale.bases if self.scale else set())

    def operand(self, names: Mapping[Node, str]) -> Operand:
        return Operand(names[self.base], self.index, self.scale.operand(names) if self.scale else None, self.per)


def _inner_sizes(node: Node) -> Iterator[Size]:
    """The inner sizes of the pairs of axes that reshapes behind a value make one of."""
    while node.operands:
        if isinstance(lowering(node), Alias):
            before = [n for n in node.operands[0].shape if n != 1]
            if len(before) > len([n for n in node.shape if n != 1]):
                yield from before[1:]
        elif not isinstance(lowering(node), Movement) and not (
            isinstance(lowering(node), Expr) and lowering(node).conversion
        ):
            return
        node = node.operands[0]


SCALED = Var("values") * Var("scale")


class StridedView:
    """Follows ops that only move data to the value in memory behind them: what a library call can read through strides.

    A product reads narrower values as its own (int8 weights, bf16), and on the host with a scale: what only converts
    and scales them needs no memory either.
    """

    def __init__(self, memory: Memory, reader: Node, number: int, inner: Mapping[str, Size] | None = None):
        """:param reader: the call.  :param number: of its operand.  :param inner: variables that count the inner of two
        axes, and how far.
        """
        self.memory, self.reader, self.number, self.inner = memory, reader, number, inner or {}
        self.scales = memory.host and number in reader.op.scales

    def operand(self, node: Node, index: Sequence[Index]) -> StridedOperand:
        """What a call reads for an operand; a scale per group is found by counting an axis as groups and places in
        them.
        """
        try:
            return self.read(node, index)
        except CannotInline:
            for size in dict.fromkeys(_inner_sizes(node)) if self.scales else ():
                for axis in dict.fromkeys(v for i in index[-2:] for v, _ in i.terms):  # no group of a batch
                    pair = Index.of(f"{axis}/") * size + Index.of(f"{axis}%")
                    parts = [
                        Index(i.const, tuple(t for t in i.terms if t[0] != axis))
                        + sum((pair * c for v, c in i.terms if v == axis), Index())
                        for i in index
                    ]
                    with contextlib.suppress(CannotInline):
                        return (
                            StridedView(self.memory, self.reader, self.number, {f"{axis}%": size})
                            .read(node, parts)
                            .regrouped(axis, size)
                        )
            raise

    def parted(self, index: Index, sizes: Sequence[Size]) -> list[Index] | None:
        """An index of two axes as one of each, where it is made of two variables that count them."""
        if len(sizes) != 2 or index.const != 0:
            return None
        low = [v for v, c in index.terms if v in self.inner and c == 1 and same(self.inner[v], sizes[1])]
        high = [v for v, c in index.terms if v not in low and same(c, sizes[1])]
        return (
            [Index(0, tuple((v, 1) for v in high)), Index.of(low[0])]
            if len(low) == 1 and len(low) + len(high) == len(index.terms)
            else None
        )

    def read(self, node: Node, index: Sequence[Index], where: Any = None, other: Any = 0) -> StridedOperand:
        lower = lowering(node)
        if where is not None:
            raise CannotInline(node, "a mask")
        widens = self.number in self.reader.op.converts and self.memory.widens(node, self.reader)
        if (
            node in self.memory.in_memory
            and not (isinstance(lower, Alias) and node not in self.memory.forced)
            and not self.memory.reads_narrow(node, self.reader)
        ):
            return StridedOperand(node, tuple(Index() if s == 1 else i for s, i in zip(node.shape, index, strict=True)))
        if isinstance(lower, Movement | Alias) and not node.op.indices:  # positions that stand in memory are no strides
            value = lower.at(index, node, self)
            if value is not None:
                return value  # type: ignore[no-any-return]
        if widens:
            below = self.read(node.operands[0], index)
            if below.scale is not None:  # it is rounded to its own dtype before the conversion
                raise CannotInline(node, "a scale in another dtype")
            return below
        factors: dict[str, Any] = {}
        if self.scales and match(SCALED, node, factors):
            for core, scale in (("values", "scale"), ("scale", "values")):
                one, two = self.read(factors[core], index), self.read(factors[scale], index)
                if (
                    one.base.dtype is not node.dtype
                    and two.base.dtype is node.dtype
                    and not (one.scale or two.scale)
                    and elements(two.base) <= elements(one.base)
                ):
                    return replace(one, scale=two)
        raise CannotInline(node, "no view of memory")

    def __getattr__(self, name: str) -> Any:
        raise CannotInline(self.memory.graph.nodes[0], f"no view of memory: {name}")


def elements(node: Node) -> float:
    """Elements of a value; a symbol counts as 1024."""
    return nbytes(node) / node.dtype.itemsize


def nbytes(node: Node) -> float:
    """Bytes of a value; a symbol counts as 1024."""
    total = product(node.shape)
    if isinstance(total, int):
        return float(total * node.dtype.itemsize)
    return float(evaluate(total, dict.fromkeys(symbols(total), 1024)) * node.dtype.itemsize)
