"""Graph: named inputs, named outputs and the nodes between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TypeRuleError
from ..formats.html_text import Html, joined, pre
from ..process.forks import cached_property, held_off
from .dims import Assumption, Dim, assuming, symbols
from .graph_file import save_graph
from .lexer import LONGEST_NAME, format_attributes, format_note, is_long
from .node import REGISTRY, Node, Note, identical, listening, make, maker
from .op import Op
from .types import Type
from .walk import operands, postorder, topological

if TYPE_CHECKING:
    import networkx as nx

NO_NOTE = Note()
SPARSE_PARTS = ("rows", "values", "count")
"""What stands for ``d.w`` where a gradient is sparse: ``d.w.rows`` i64[N], ascending, the size of the table where there
is none; ``d.w.values`` [N, ...]; ``d.w.count`` i64[].
"""
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)


def check_name(name: str) -> str:
    """The name, if it is valid: words joined by dots, at most 200 characters."""
    if not isinstance(name, str) or is_long(name) or not _NAME.fullmatch(name):
        shown = (
            f"{name[:60]!r} of {len(name)} characters"
            if isinstance(name, str)
            else f"{str(name)[:60]!r}, a {type(name).__name__},"
        )
        raise TypeRuleError(
            f"{shown} is not a name (words of letters, digits and _, joined by dots; {LONGEST_NAME} characters at most)"
        )
    return name


def name_of(path: str, taken: Callable[[str], bool]) -> str:
    """A path of another program's as a name of an input: what is no letter, digit or _ of ASCII becomes a ``_``, and a
    digit in front gets one.
    """
    words = [re.sub(r"\W", "_", word, flags=re.ASCII) for word in path.split(".") if word]
    if words and words[0][:1].isdigit():
        words[0] = f"_{words[0]}"
    name = ".".join(words)[-LONGEST_NAME + 8 :].lstrip(".") or "_"
    number, unique = 2, name
    while taken(unique):
        unique, number = f"{name}_{number}", number + 1
    return unique


def input_node(name: str, type: Type) -> Node:
    """The graph input of that name and type."""
    return make(REGISTRY["input"], (), {"name": check_name(name)}, type)


def again(node: Node, operands: tuple[Node, ...]) -> Node:
    """The same op on other operands, the node itself on its own; the type rule is asked only if their types differ."""
    if all(map(is_, operands, node.operands)):
        return node
    if all(a.type == b.type for a, b in zip(operands, node.operands, strict=True)):
        return make(node.op, operands, node.attrs, node.type)
    result: Node = node.op.apply(operands, node.attrs)
    return result


def rebuild(roots: Iterable[Node], new: dict[Node, Node]) -> dict[Node, Node]:
    """Rebuilds every node the roots need with the replacements in ``new``, whose operands are not visited; fills and
    returns ``new``.
    """
    for node in postorder(roots, new, operands):
        rebuilt = tuple(new[o] for o in node.operands)
        new[node] = again(node, rebuilt)
    return new


class parts_of(listening):
    """A context manager that notes every node made in it as made of what has the note ``source``: its line, its scope,
    and its composite unless the node is part of another one; a node that a composite and its gradient share belongs to
    the composite.

    :ivar source: may be set to another note, for what is made from then on, and to None, for what shall have none.
    """

    def __init__(self, source: Note | None, notes: dict[Node, Note]):
        super().__init__(self._noted)
        self.source, self.notes = source, notes

    def _noted(self, node: Node) -> None:
        if self.source is None:
            return
        composite, note = self.source.composite, self.notes.get(node)
        if note is None:
            if node.op.name != "input":
                self.notes[node] = self.source.derived(maker(), composite)
        elif composite and (
            not note.composite or (note.composite.endswith("_grad") and not composite.endswith("_grad"))
        ):
            self.notes[node] = replace(note, composite=composite)


class _Carried(dict[Node, Note]):
    """Notes of nodes from those of the nodes that they replace."""

    def __init__(self) -> None:
        self.ranks: dict[Node, tuple[int, bool]] = {}

    def carry(self, note: Note, new: Node, own: bool) -> None:
        """Of several notes the strongest stays; of equals the one that the node had before (``own``), else the user's
        last, or a pass's first.
        """
        rank = note.strength, own
        if new not in self or rank > self.ranks[new] or (rank == self.ranks[new] and not note.by):
            self[new], self.ranks[new] = note, rank


def format_op(node: Node, names: Mapping[Node, str]) -> str:
    """The text line of one op, without its note."""
    operands = ", ".join(names[o] for o in node.operands)
    attributes = format_attributes(sorted(node.attrs.items()), exact=node.op.name == "constant")
    return f"{names[node]}: {node.type} = {node.op.name}{' ' if operands else ''}{operands}{attributes}"


@dataclass(frozen=True)
class Graph:
    """A tensor function: ``outputs`` computed from ``inputs``.

    Graphs are equal iff their inputs, outputs, names and assumptions are; ``notes`` and ``defaults`` are not compared.

    :param defaults: arrays bound to inputs that the caller may omit.
    """

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]
    assumptions: tuple[Assumption, ...] = ()
    notes: Mapping[Node, Note] = field(default_factory=dict, compare=False, repr=False)
    defaults: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        names = [self.input_name(n) for n in self.inputs]
        for kind, listed in (("input", names), ("output", [n for n, _ in self.outputs])):
            twice = {n for n in listed if listed.count(n) > 1} if len(set(listed)) < len(listed) else set()
            if twice:
                raise TypeRuleError(f"graph {self.name}: the {kind} {min(twice)!r} is named twice")
        for output, _ in self.outputs:
            check_name(output)
        known = set(self.inputs)
        for node in self._order:
            if node.op.name == "input" and node not in known:
                raise TypeRuleError(f"graph {self.name}: {node!r} is used but is not an input of the graph")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return (
            (self.name, self.input_names, self.output_names, self.assumptions)
            == (other.name, other.input_names, other.output_names, other.assumptions)
            and identical(self.inputs, other.inputs)
            and identical([n for _, n in self.outputs], [n for _, n in other.outputs])
        )

    def __copy__(self) -> Graph:
        return self

    def __deepcopy__(self, memo: Any) -> Graph:
        return self

    @staticmethod
    def input_name(node: Node) -> str:
        return str(node.attrs["name"])

    @cached_property
    def _order(self) -> list[Node]:
        return topological(node for _, node in self.outputs)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node in topological order: the inputs in their order, then the rest."""
        return (*self.inputs, *(n for n in self._order if n.op.name != "input"))

    @cached_property
    def opened(self) -> Graph:
        """The graph with all composites replaced by their decompositions."""
        return open_composites(self)

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self.input_name(n) for n in self.inputs)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.outputs)

    def input(self, name: str) -> Node:
        for node in self.inputs:
            if self.input_name(node) == name:
                return node
        raise KeyError(f"graph {self.name} has no input {name!r}; it has {', '.join(self.input_names)}")

    def output(self, name: str) -> Node:
        for other, node in self.outputs:
            if other == name:
                return node
        raise KeyError(f"graph {self.name} has no output {name!r}; it has {', '.join(self.output_names)}")

    @cached_property
    def value_names(self) -> Mapping[Node, str]:
        """The name each node has in the text: an input's own, else its number."""
        return {
            node: f"%{self.input_name(node) if node.op.name == 'input' else self.numbers[node]}" for node in self.nodes
        }

    @cached_property
    def numbers(self) -> Mapping[Node, int]:
        """The number of each node but inputs: that of its note if no node before it has the same, else a new one."""
        numbers: dict[Node, int] = {}
        taken: set[int] = set()
        rest = self.nodes[len(self.inputs) :]
        for node in rest:
            number = self.notes[node].id if node in self.notes else None
            if number is not None and number not in taken:
                numbers[node] = number
                taken.add(number)
        free = 1 + max((note.id for note in self.notes.values() if note.id is not None), default=-1)
        for node in rest:
            if node not in numbers:
                numbers[node], free = free, free + 1
        return numbers

    def numbered(self) -> Graph:
        """The graph with every node's number in its note, so that it keeps it through passes."""
        found = {node: (number, self.notes.get(node, NO_NOTE)) for node, number in self.numbers.items()}
        new = {node: note.numbered(number) for node, (number, note) in found.items() if note.id != number}
        return replace(self, notes={**self.notes, **new}) if new else self

    @property
    def bound_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays bound to inputs, by name."""
        return {name: np.asarray(self.defaults[name]) for name in self.input_names if name in self.defaults}

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The symbols, in order of first appearance."""
        names: dict[str, None] = {}
        for node in self.nodes:
            for size in node.shape:
                names.update(dict.fromkeys(sorted(symbols(size))))
            pending = [*node.attrs.values()][::-1]
            while pending:
                value = pending.pop()
                if isinstance(value, tuple):
                    pending += reversed(value)
                elif isinstance(value, Dim):
                    names.update(dict.fromkeys(sorted(symbols(value))))
        return tuple(names)

    @cached_property
    def users(self) -> Mapping[Node, tuple[Node, ...]]:
        """For every node, the nodes that have it as an operand (each once)."""
        users: dict[Node, dict[Node, None]] = {n: {} for n in self.nodes}
        for node in self.nodes:
            for operand in node.operands:
                users[operand][node] = None
        return {n: tuple(u) for n, u in users.items()}

    def rewrite(
        self, rule: Callable[[Node, tuple[Node, ...]], Node | None], new: dict[Node, Node] | None = None
    ) -> Graph:
        """The graph with every node replaced by ``rule(node, new operands)`` (None: the same op on the new operands),
        bottom up.

        Notes are carried over; a value that the rule has made anew is the rule's.

        :param new: filled with the replacement of each node, for rules that inspect more than their operands.
        """
        notes, carried = dict(self.notes), _Carried()
        new = {} if new is None else new
        with assuming(self.assumptions), parts_of(None, notes) as made:
            for node in self.nodes:
                operands = tuple([new[o] for o in node.operands])
                made.source = self.notes.get(node, NO_NOTE)
                result = rule(node, operands)
                made.source = None
                same = again(node, operands) if result is not node else node
                if result is None:
                    result = same
                if not isinstance(result, Node):
                    raise TypeError(f"a rewrite of {node!r} gave {result!r}")
                new[node] = result
                if (note := notes.get(node)) is not None:
                    if result is not same and result not in self.notes and result in notes:
                        note = replace(note, by=notes[result].by)
                    carried.carry(note, result, result is node)
        if notes == self.notes and all(new[node] is node for node in self.nodes):
            return self
        outputs = tuple((name, new[node]) for name, node in self.outputs)
        return replace(
            self, outputs=outputs, notes={**{n: note for n, note in notes.items() if n not in new}, **carried}
        )

    def composite(self, node: Node) -> str:
        """The name of the composite that a node is part of, or ""."""
        return self.notes[node].composite if node in self.notes else ""

    def renamed(self, new: Mapping[Node, Node]) -> Graph:
        """The graph with its outputs replaced by the map ``old -> new``; notes are carried over."""
        notes, before = _Carried(), set(self.nodes)
        for n, note in self.notes.items():
            notes.carry(note, new.get(n, n), new.get(n) is n and n in before)
        return replace(self, outputs=tuple((name, new.get(n, n)) for name, n in self.outputs), notes=notes)

    def with_outputs(self, outputs: Iterable[tuple[str, Node]], name: str | None = None) -> Graph:
        return replace(self, name=name or self.name, outputs=tuple(outputs))

    @cached_property
    def network(self) -> nx.DiGraph[Node]:
        """The graph as a networkx DiGraph: an edge from each operand to its user."""
        with held_off:
            import networkx as nx

        network: nx.DiGraph[Node] = nx.DiGraph()
        network.add_nodes_from(self.nodes)
        network.add_edges_from((o, n) for n in self.nodes for o in n.operands)
        return network

    def _repr_html_(self) -> str:
        return joined(
            Html("<div><b>"),
            f"graph {self.name}",
            Html("</b>"),
            f": {len(self.nodes)} nodes",
            Html("</div>"),
            pre(str(self)),
        )

    def __str__(self) -> str:
        dims = f"<{','.join(self.dims)}>" if self.dims else ""
        inputs = ", ".join(f"{self.value_names[n]}: {n.type}" for n in self.inputs)
        lines = [f"graph @{self.name}{dims}({inputs}) {{"]
        lines += [f"  {fact}" for fact in self.assumptions]
        for n in self.nodes[len(self.inputs) :]:
            lines.append(f"  {format_op(n, self.value_names)}{format_note(self.notes.get(n))}")
        outputs = ", ".join(f"{name}={self.value_names[n]}" for name, n in self.outputs)
        return "\n".join([*lines, f"  return {outputs}".rstrip(), "}"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"graph {self.name} is a description: gradc.compile(graph) makes it callable, gradc.interp.run(graph, ...)"
            " runs it in NumPy"
        )

    def save(self, path: Any) -> None:
        """Writes the text and the arrays bound to inputs to the single file ``path``
        (:func:`gradc.ir.graph_file.save_graph`).
        """
        save_graph(path, str(self), self.bound_arrays)


def open_composites(
    graph: Graph, opens: Callable[[Op], bool] = lambda op: True, keeps: Callable[[Node], bool] = lambda node: False
) -> Graph:
    """The graph with composites, and library ops that are made of others, replaced by their decompositions,
    recursively.

    :param opens: which of these ops are replaced, :param keeps: but for which nodes.
    """

    def is_open(node: Node) -> bool:
        return node.op.decompose is not None and opens(node.op) and not keeps(node)

    if not any(map(is_open, graph.nodes)):
        return graph
    new: dict[Node, Node] = {}
    meant: dict[Node, Node] = {}
    notes = dict(graph.notes)

    def sources(node: Node) -> tuple[Node, ...]:
        if node not in meant and is_open(node):
            if not all(o in new for o in node.operands):
                return node.operands
            inner = tuple(new[o] for o in node.operands)
            new.update((o, o) for o in inner if o not in new)  # these are decomposed already
            note = notes.get(node, Note())
            notes[node] = note = replace(note, composite=note.composite or node.op.name)
            with parts_of(note, notes):
                meant[node] = node.op.decompose(*inner, **node.attrs)
        return (meant[node],) if node in meant else node.operands

    with assuming(graph.assumptions):
        for node in postorder(graph.nodes, new, sources):
            rebuilt = tuple(new[o] for o in node.operands)
            new[node] = new[meant[node]] if node in meant else again(node, rebuilt)
    return replace(graph, notes=notes).renamed(new)
