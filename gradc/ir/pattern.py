"""Rewrite rules written as algebra.

>>> x = Var("x")
>>> RULES = [Rule(x * 1, x), Rule(neg(neg(x)), x)]

A pattern matches a node; a number matches a constant broadcast to any shape; a :class:`Var` matches any node, the same
one at each occurrence.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .node import Node, call, made_by

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class Pattern:
    """The base class of patterns."""

    def __add__(self, other: Any) -> Pattern:
        return Apply("add", (self, as_pattern(other)))

    def __sub__(self, other: Any) -> Pattern:
        return Apply("sub", (self, as_pattern(other)))

    def __mul__(self, other: Any) -> Pattern:
        return Apply("mul", (self, as_pattern(other)))

    def __rmul__(self, other: Any) -> Pattern:
        return Apply("mul", (as_pattern(other), self))

    def __radd__(self, other: Any) -> Pattern:
        return Apply("add", (as_pattern(other), self))

    def __truediv__(self, other: Any) -> Pattern:
        return Apply("div", (self, as_pattern(other)))

    def __neg__(self) -> Pattern:
        return Apply("neg", (self,))


@dataclass(frozen=True)
class Var(Pattern):
    """Matches any node for which ``when``, if given, holds."""

    name: str
    when: Callable[[Node], bool] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Number(Pattern):
    """Matches a constant with this value at every element; ``-0.0`` and ``0.0`` are different."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Apply(Pattern):
    """Matches an op applied to operands that match; ``bind`` names the node for the rule's condition and result."""

    op: str
    operands: tuple[Pattern, ...]
    bind: str = ""

    def __str__(self) -> str:
        if self.op in _INFIX:
            return f"({f' {_INFIX[self.op]} '.join(map(str, self.operands))})"
        return f"{self.op}({', '.join(map(str, self.operands))})"


def as_pattern(value: Any) -> Pattern:
    return value if isinstance(value, Pattern) else Number(float(value))


def op(name: str, *operands: Any, bind: str = "") -> Apply:
    """A pattern for ``name(*operands)``."""
    return Apply(name, tuple(as_pattern(o) for o in operands), bind)


@dataclass(frozen=True)
class Rule:
    """Rewrites ``left`` to ``right`` (a pattern, or a function of the bound nodes) if ``when`` holds."""

    left: Pattern
    right: Pattern | Callable[[Mapping[str, Node]], Node | None]
    when: Callable[[Mapping[str, Node]], bool] | None = None

    def __call__(self, node: Node) -> Node | None:
        bound: dict[str, Node] = {}
        if not match(self.left, node, bound) or (self.when is not None and not self.when(bound)):
            return None
        with made_by(str(self)):
            return build(self.right, bound) if isinstance(self.right, Pattern) else self.right(bound)

    def __str__(self) -> str:
        result = str(self.right) if isinstance(self.right, Pattern) else self.right.__name__.strip("_<>")
        return f"{self.left} -> {result}"


def splat(node: Node) -> Any:
    """The value of a constant that is the same at every element, looking through broadcasts and reshapes; else None."""
    while node.op.name in ("broadcast_to", "reshape"):
        (node,) = node.operands
    if node.op.name != "constant" or not node.attrs["value"]:
        return None
    first, *rest = node.attrs["value"]
    return first if all(_same_number(r, first) for r in rest) and not (rest and first != first) else None


def _same_number(a: Any, b: float) -> bool:
    return a is not None and (
        struct.pack("<d", float(a)) == struct.pack("<d", float(b)) if isinstance(a, float) else a == b
    )


def match(pattern: Pattern, node: Node, bound: dict[str, Node]) -> bool:
    """Whether ``node`` matches ``pattern``; adds the variables' nodes to ``bound``."""
    if isinstance(pattern, Var):
        if pattern.when is not None and not pattern.when(node):
            return False
        return bound.setdefault(pattern.name, node) is node
    if isinstance(pattern, Number):
        return _same_number(splat(node), pattern.value)
    assert isinstance(pattern, Apply)
    if node.op.name != pattern.op or len(node.operands) != len(pattern.operands):
        return False
    if pattern.bind:
        bound[pattern.bind] = node
    return all(match(p, o, bound) for p, o in zip(pattern.operands, node.operands, strict=True))


def build(pattern: Pattern, bound: Mapping[str, Node]) -> Node:
    if isinstance(pattern, Var):
        return bound[pattern.name]
    if isinstance(pattern, Number):
        raise TypeError("a rule's result needs a node to take dtype and shape from")
    assert isinstance(pattern, Apply)
    return call(pattern.op, *(p.value if isinstance(p, Number) else build(p, bound) for p in pattern.operands))


def apply_rules(rules: Sequence[Rule], node: Node) -> Node:
    """The node after applying the first matching rule, repeated until none matches."""
    for _ in range(100):
        for rule in rules:
            if isinstance(rule.left, Apply) and rule.left.op != node.op.name:
                continue
            result = rule(node)
            if result is not None and result is not node:
                node = result
                break
        else:
            return node
    return node
