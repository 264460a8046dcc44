"""schedule: Graph -> Program, fusing nodes into row programs.

Every node starts as a kernel of its own (``fuse=False`` stops there).  With fusion, ops that move data and cheap pointwise ops are read where
they are used; each other node joins the group that already reads or computes what it needs, where one iteration space serves both, the
kernel can be written, and no group would wait for itself (reachability in the graph of groups).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx

from ..errors import InternalError
from ..ir.dims import Size, assuming, product, same
from ..ir.graph import Graph
from ..ir.kernel import Buffer, Call, Index, Kernel, Operand, Program, Step
from ..ir.node import Node, Note, topological
from ..ir.op import Alias, Expr, Library, Movement, Reduction, Scatter
from ..ir.types import Type
from .lower import Builder, CannotInline, Domain

MOST_BUFFERS = 24
CHEAP = 8


def schedule(graph: Graph, *, fuse: bool = True) -> Program:
    """mul, sum, mul  ->  one kernel with two passes over its columns"""
    forced: set[Node] = set()
    with assuming(graph.assumptions):
        for _ in range(2 * len(graph.nodes) + 2):
            try:
                return _Scheduler(graph, fuse, forced).run()
            except CannotInline as reason:  # this node needs memory after all: again, with that known
                if reason.node in forced:
                    raise InternalError(f"no kernel can be written for {reason.node!r}: {reason.why}") from reason
                forced.add(reason.node)
    raise InternalError(f"scheduling of {graph.name} does not end")


def lowering(node: Node) -> Any:
    return getattr(node.op, "lower", None)


def real(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that are not the literal 1."""
    return tuple(s for s in shape if s != 1)


def alike(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


class Group:
    """Nodes that share one kernel."""

    def __init__(self, key: int, shape: Sequence[Size], cols: tuple[int, ...] | None):
        self.key = key
        self.domain = Domain(tuple(shape), cols)
        self.placed: dict[Node, str] = {}  # node -> element | row | accum
        self.scatter: Node | None = None
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


class _Scheduler:
    def __init__(self, graph: Graph, fuse: bool, forced: set[Node]):
        self.graph, self.fuse = graph, fuse
        self.forced = forced | {n for _, n in graph.outputs if n.op.name != "input"}
        self.users = graph.users
        self.group_of: dict[Node, Group] = {}
        self.groups: list[Group] = []
        self.order: nx.DiGraph[int] = nx.DiGraph()
        self.library: list[Node] = []
        self.in_memory: set[Node] = set(graph.inputs)
        self.loads: dict[int, set[Node]] = {}
        self.constants: dict[Node, str] = {}
        self.inline: set[Node] = set()

    # -- who gets memory -----------------------------------------------------------------------------------------------

    def run(self) -> Program:
        for node in self.graph.nodes:
            if node.op.name == "input":
                continue
            if isinstance(node.op, Library):
                self.library_node(node)
            elif isinstance(lowering(node), Alias) and (node in self.forced or not self.fuse):
                self.force(node.operands[0])
                self.in_memory.add(node)
            elif node in self.forced or not self.fuse or not self.read_in_place(node):
                self.place(node)
            else:
                self.inline.add(node)
        return _Emission(self).program()

    def force(self, node: Node) -> None:
        if node not in self.in_memory:
            raise CannotInline(node, "its bytes are needed")

    def read_in_place(self, node: Node) -> bool:
        """Whether users compute the node again where they need it: data movement, and pointwise ops no dearer than loading them."""
        lower = lowering(node)
        if isinstance(lower, Movement | Alias):
            return True
        if not isinstance(lower, Expr):
            return False
        cost, leaves, pending, seen = 0, 0.0, [node], {node}
        while pending:
            at = pending.pop()
            inner = lowering(at)
            if at is not node and (at in self.in_memory or at in self.group_of):
                leaves += _bytes(at)
                continue
            cost += inner.cost if isinstance(inner, Expr) else 0
            fresh = [o for o in at.operands if o not in seen]
            seen.update(fresh)
            pending += fresh
        users = self.users[node]
        return cost <= CHEAP and (leaves <= 1.05 * _bytes(node) or len(users) <= 1)

    # -- library calls -------------------------------------------------------------------------------------------------

    def library_node(self, node: Node) -> None:
        for operand in node.operands:
            try:
                base, _ = View(self).read(operand, [Index.of(f"v{a}") for a in range(operand.rank)])
            except CannotInline:
                raise CannotInline(operand, "a library reads it") from None
            if base not in self.in_memory:
                raise CannotInline(base, "a library reads it")
        group = self.open((), None)
        group.placed[node] = "library"
        self.group_of[node] = group
        self.in_memory.add(node)
        self.loads[group.key] = {View(self).read(o, [Index.of(f"v{a}") for a in range(o.rank)])[0] for o in node.operands}
        self.connect(group, self.loads[group.key])
        self.library.append(node)

    def open(self, shape: Sequence[Size], cols: tuple[int, ...] | None) -> Group:
        group = Group(len(self.groups), shape, cols)
        group.builder = self.builder(group)
        self.groups.append(group)
        self.order.add_node(group.key)
        self.loads[group.key] = set()
        return group

    def builder(self, group: Group) -> Builder:
        return Builder(group.domain, lambda node: self.buffer_for(node, group), self.constant_buffer)

    def buffer_for(self, node: Node, group: Group) -> str | None:
        """A stand-in name: the node is loaded unless this group computes it."""
        if node in self.in_memory and node not in group.placed:
            return f"@{id(node)}"
        return None

    def constant_buffer(self, node: Node) -> str:
        return self.constants.setdefault(node, f"c{len(self.constants)}")

    def owner(self, node: Node) -> Group | None:
        while isinstance(lowering(node), Alias) and node not in self.group_of:
            (node,) = node.operands
        return self.group_of.get(node)

    def connect(self, group: Group, loaded: set[Node]) -> None:
        for node in loaded:
            owner = self.owner(node)
            if owner is not None and owner is not group:
                self.order.add_edge(owner.key, group.key)

    # -- placing -------------------------------------------------------------------------------------------------------

    def place(self, node: Node) -> None:
        if self.fuse:
            for group in self.candidates(node):
                if self.join(node, group):
                    return
        shape, cols = self.own_space(node)
        group = self.open(shape, cols)
        reason = self.attempt(node, group)
        if reason is not None:
            self.groups.pop()
            raise reason

    def candidates(self, node: Node) -> list[Group]:
        """Groups that compute what the node reads, the latest first, then groups that load the same."""
        leaves: dict[Node, None] = {}
        pending, seen = list(node.operands), set(node.operands)
        while pending:
            at = pending.pop()
            if at in self.in_memory:
                leaves[at] = None
                continue
            fresh = [o for o in at.operands if o not in seen]
            seen.update(fresh)
            pending += fresh
        producers = {g.key for leaf in leaves if (g := self.group_of.get(leaf)) is not None}
        size = _bytes(self.source(node))
        sharers = {g.key for g in self.groups for leaf in leaves if leaf in self.loads[g.key] and _bytes(leaf) * 2 >= size}
        ranked = [*sorted(producers, reverse=True), *sorted(sharers - producers, reverse=True)]
        return [self.groups[key] for key in ranked if "library" not in self.groups[key].placed.values()]

    @staticmethod
    def source(node: Node) -> Node:
        """The value whose shape is the iteration space of the node's computation."""
        lower = lowering(node)
        if isinstance(lower, Reduction):
            return node.operands[0]
        return node.operands[lower.updates] if isinstance(lower, Scatter) else node

    def own_space(self, node: Node) -> tuple[Sequence[Size], tuple[int, ...] | None]:
        """Iteration space and columns of a kernel for this node alone."""
        shape = self.source(node).shape
        if not isinstance(lowering(node), Reduction):
            return shape, None
        return shape, self.columns_for(node, shape)

    @staticmethod
    def reduced(node: Node) -> tuple[int, ...]:
        axis = node.attrs["axis"]
        return axis if isinstance(axis, tuple) else (axis,)

    def columns_for(self, node: Node, shape: Sequence[Size]) -> tuple[int, ...]:
        """Trailing reduced axes are walked along; leading ones are summed across rows, with the last axis as the columns."""
        gone = tuple(a for a in self.reduced(node) if shape[a] != 1)
        kept = [a for a in range(len(shape)) if shape[a] != 1 and a not in gone]
        if lowering(node).combine != "sum" or not gone:
            return gone
        if not kept:
            return gone[-1:]
        if kept[-1] < gone[0]:
            return gone
        last = kept[-1] if kept[-1] > gone[-1] else gone[-1]
        return (last,)

    def join(self, node: Node, group: Group) -> bool:
        if not alike(real(self.source(node).shape), group.real) and not (group.domain.cols is not None and alike(real(self.source(node).shape), group.rows)):
            return False
        if isinstance(lowering(node), Reduction) and group.domain.cols is None:
            wanted = self.columns_for(node, self.source(node).shape)
            dims = [d for d, s in enumerate(self.source(node).shape) if s != 1]
            mapped = tuple(group.domain.real[dims.index(a)] for a in wanted)
            if not mapped and group.domain.real:
                return False
            if any(level == "row" for level in group.placed.values()):
                return False
            before = group.domain
            group.domain = Domain(before.shape, mapped)
            group.builder.domain = group.domain
            if self.attempt(node, group) is None:
                return True
            group.domain = group.builder.domain = before
            return False
        return self.attempt(node, group) is None

    def attempt(self, node: Node, group: Group) -> CannotInline | None:
        """Write the node into the group's kernel; None if it stands, else why not, with nothing changed."""
        builder = group.builder
        saved = builder.snapshot(), dict(builder.homes)
        level = self.level(node, group)
        if level is None:
            return CannotInline(node, "another iteration space")
        group.placed[node] = level
        try:
            self.write(node, group, builder, level)
            loaded = {n for n in builder.loaded.values() if n not in group.placed}
            if len(loaded) + len(group.placed) > MOST_BUFFERS and len(group.placed) > 1:
                raise CannotInline(node, "too many buffers in one kernel")
            for other in loaded:
                owner = self.owner(other)
                if owner is group:
                    raise CannotInline(node, "it needs a finished result of the same kernel")
                if owner is not None and nx.has_path(self.order, group.key, owner.key):
                    raise CannotInline(node, "the kernels would wait for each other")
        except CannotInline as reason:
            del group.placed[node]
            builder.restore(saved[0])
            builder.homes = saved[1]
            return reason
        self.group_of[node] = group
        self.in_memory.add(node)
        self.loads[group.key] = loaded
        self.connect(group, loaded)
        if isinstance(lowering(node), Scatter):
            group.scatter = node
        return None

    def level(self, node: Node, group: Group) -> str | None:
        lower = lowering(node)
        space = real(self.source(node).shape)
        if isinstance(lower, Scatter):
            if group.scatter is not None and group.scatter.operands[1 - lower.updates] is not node.operands[1 - lower.updates]:
                return None  # one visiting order per kernel
            return "accum" if alike(space, group.real) or alike(space, group.rows) else None
        if isinstance(lower, Reduction):
            if not alike(space, group.real):
                return None
            gone = self.reduced_dims(node, group)
            columns = set(group.domain.columns)
            if gone == columns:
                return "row"
            ordered = bool(set(group.domain.real) - gone - columns)
            if lower.combine == "sum" and (not gone & columns or gone > columns):
                if ordered and (group.scatter is not None or any(self.is_ordered(n, group) for n in group.placed)):
                    return None
                return "accum"
            return None
        if alike(space, group.real):
            return "element"
        return "row" if group.domain.cols is not None and alike(space, group.rows) else None

    def is_ordered(self, node: Node, group: Group) -> bool:
        return group.placed[node] == "accum" and isinstance(lowering(node), Reduction) and bool(set(group.domain.real) - self.reduced_dims(node, group) - set(group.domain.columns))

    def reduced_dims(self, node: Node, group: Group) -> set[int]:
        """The reduced axes as dimensions of the group's space."""
        shape = node.operands[0].shape
        dims = [a for a, s in enumerate(shape) if s != 1]
        return {group.domain.real[dims.index(a)] for a in self.reduced(node) if shape[a] != 1}

    def write(self, node: Node, group: Group, builder: Builder, level: str, buffer: str = "", store: bool = True) -> None:
        """The statements of a placed node."""
        lower = lowering(node)
        if level == "accum" and isinstance(lower, Scatter):
            updates = node.operands[lower.updates]
            at = group.place(updates.shape, "element" if alike(real(updates.shape), group.real) else "row")
            index, where = lower.at(at, node, builder)
            builder.accumulate(buffer, node, tuple(index), builder.read(updates, at), where)
        elif level == "accum":
            (source,) = node.operands
            at = group.place(source.shape, "element")
            gone, columns = self.reduced_dims(node, group), set(group.domain.columns)
            value = builder.read(source, at)
            if source.dtype is not node.dtype:
                value = builder.cast(value, node.dtype)
            if columns and gone > columns:
                value = builder._emit("sum_cols", (value,), node.dtype)
            index = tuple(i for a, i in enumerate(at) if a not in self.reduced(node))
            builder.accumulate(buffer, node, index, value, None)
        else:
            at = group.place(node.shape, level)
            builder.homes[node] = at
            if store and buffer:
                builder.store(buffer, node, at)
            else:
                builder.read(node, at)


class View:
    """Follows ops that only move data to the value in memory behind them: what a library call can read through strides."""

    def __init__(self, scheduler: _Scheduler):
        self.scheduler = scheduler

    def read(self, node: Node, index: Sequence[Index], where: Any = None, other: Any = 0) -> tuple[Node, tuple[Index, ...]]:
        lower = lowering(node)
        if where is not None:
            raise CannotInline(node, "a mask")
        if node in self.scheduler.in_memory and not (isinstance(lower, Alias) and node not in self.scheduler.forced):
            return node, tuple(Index() if s == 1 else i for s, i in zip(node.shape, index, strict=True))
        if isinstance(lower, Movement | Alias):
            found = lower.at(index, node, self)
            if found is not None:
                return found  # type: ignore[no-any-return]
        raise CannotInline(node, "no view of memory")

    def __getattr__(self, name: str) -> Any:
        raise CannotInline(self.scheduler.graph.nodes[0], f"no view of memory: {name}")


def _bytes(node: Node) -> float:
    """Bytes of a value; a symbol counts as 1024."""
    total = product(node.shape)
    if isinstance(total, int):
        return float(total * node.dtype.itemsize)
    from ..ir.dims import evaluate, symbols

    return float(evaluate(total, dict.fromkeys(symbols(total), 1024)) * node.dtype.itemsize)


class _Emission:
    """From groups to a Program: buffers, names, order."""

    def __init__(self, scheduler: _Scheduler):
        self.s = scheduler
        self.graph = scheduler.graph
        self.names: dict[Node, str] = {n: self.graph.input_name(n) for n in self.graph.inputs}
        self.buffers: list[Buffer] = [Buffer(self.graph.input_name(n), n.type, "input") for n in self.graph.inputs]
        self.used = set(self.names.values())
        self.outputs: list[tuple[str, str]] = []
        self.copies: list[tuple[int, Step]] = []

    def unique(self, wish: str) -> str:
        name, k = wish, 1
        while name in self.used:
            k += 1
            name = f"{wish}.{k}"
        self.used.add(name)
        return name

    def program(self) -> Program:
        needed = set().union(*self.s.loads.values()) if self.s.loads else set()
        needed |= {n for _, n in self.graph.outputs}
        for index, _, _ in self.checked():
            needed |= set(self.check(index, 0, "", "", lambda n: "b" if n in self.s.in_memory else None)[1])
        owners: dict[Node, str] = {}
        for name, node in self.graph.outputs:  # an output claims the memory of its node, or of the node it is an alias of
            base = node
            while isinstance(lowering(base), Alias) and base in self.s.in_memory:
                (base,) = base.operands
            if base.op.name != "input" and base not in owners and base in self.s.group_of:
                owners[base] = name
        used: set[Node] = set()
        for node in needed:
            while isinstance(lowering(node), Alias) and node not in self.s.group_of and node.op.name != "input":
                used.add(node)
                (node,) = node.operands
            used.add(node)
        for node in self.graph.nodes:
            if node in self.names or node not in used:
                continue
            wish = owners.get(node) or next((n for n, o in self.graph.outputs if o is node), "") or self.wish(node)
            if isinstance(lowering(node), Alias) and node not in self.s.group_of:
                source = self.names[node.operands[0]]
                kind = next(b.kind for b in self.buffers if b.name == source)
                self.names[node] = self.unique(wish if wish not in self.used else f"{source}.view")
                self.buffers.append(Buffer(self.names[node], node.type, kind, alias=source))
            else:
                self.names[node] = self.unique(f"{wish}.base" if node in owners and not any(o is node for _, o in self.graph.outputs) else wish)
                self.buffers.append(Buffer(self.names[node], node.type, "output" if node in owners else "temp"))
        steps = self.steps(used)
        taken: set[str] = set()
        for name, node in self.graph.outputs:
            base = node
            while isinstance(lowering(base), Alias) and base in self.s.in_memory and base not in self.s.group_of:
                (base,) = base.operands
            root = self.names[base]
            if base.op.name == "input" or root in taken:
                self.outputs.append((name, self.copy(name, node, steps)))
            else:
                taken.add(root)
                self.outputs.append((name, self.names[node]))
        self.buffers += [Buffer(name, n.type, "const", value=n.attrs["value"]) for n, name in self.s.constants.items()]
        notes = {self.names[n]: note for n, note in self.graph.notes.items() if n in self.names}
        return Program(self.graph.name, tuple(self.buffers), tuple(steps), self.graph.assumptions, tuple(self.outputs), notes)

    def wish(self, node: Node) -> str:
        note = self.graph.notes.get(node)
        return f"{note.name}" if note and note.name and note.name.isidentifier() else f"t{len(self.buffers)}"

    def copy(self, name: str, node: Node, steps: list[Step]) -> str:
        """An output whose bytes belong to an input or to another output is copied."""
        source = self.names[node]
        target = self.unique(name)
        self.buffers.append(Buffer(target, node.type, "output"))
        group = Group(-1, node.shape, None)
        builder = Builder(group.domain, lambda n: source if n is node else None)
        builder.store(target, node, group.place(node.shape, "element"))
        steps.append(builder.kernel("copy").named_by_structure("copy", self.types))
        return target

    @property
    def types(self) -> dict[str, Type]:
        return {b.name: b.type for b in self.buffers} | {name: n.type for n, name in self.s.constants.items()}

    def steps(self, used: set[Node]) -> list[Step]:
        steps: list[Step] = []
        checks = self.checks()
        ready: set[Node] = set(self.graph.inputs)
        order = list(nx.lexicographical_topological_sort(self.s.order, key=lambda k: k))

        def flush() -> None:
            for check in list(checks):
                kernel, reads = check
                if reads <= ready:
                    steps.append(kernel.named_by_structure("check", self.types))
                    checks.remove(check)

        flush()
        for key in order:
            group = self.s.groups[key]
            if "library" in group.placed.values():
                steps.append(self.call(next(iter(group.placed))))
            else:
                kernel = self.kernel(group, used)
                if kernel.writes:
                    steps.append(kernel.named_by_structure(meaning(group), self.types))
            ready |= set(group.placed)
            ready |= {n for n in self.names if isinstance(lowering(n), Alias) and n.operands[0] in ready}
            flush()
        return steps

    def kernel(self, group: Group, used: set[Node]) -> Kernel:
        builder = Builder(group.domain, lambda n: self.names.get(n) if n in self.s.in_memory and n not in group.placed else None, self.s.constant_buffer)
        for node, level in group.placed.items():
            if level != "accum":
                builder.homes[node] = group.place(node.shape, level)
        for node, level in group.placed.items():
            if node in used:
                self.s.write(node, group, builder, level, self.names[node])
        note = next((self.graph.notes[n] for n in reversed(group.placed) if n in self.graph.notes), Note())
        kernel = builder.kernel("kernel")
        return Kernel(kernel.name, kernel.rows, kernel.cols, kernel.body, note=note)

    def call(self, node: Node) -> Call:
        axes, operands, out = node.op.axes(node)
        args = []
        for operand, index in zip(node.operands, operands, strict=True):
            base, at = View(self.s).read(operand, index)
            args.append(Operand(self.names[base], at))
        name = f"{node.op.name}_{'x'.join(str(s) for s in node.shape)}" if all(isinstance(s, int) for s in node.shape) else node.op.name
        return Call(name, node.op.name, tuple(axes), Operand(self.names[node], tuple(out)), tuple(args), self.graph.notes.get(node, Note()))

    def checked(self) -> list[tuple[Node, Size, str]]:
        """The data-dependent indices that must lie in range: (index, bound, op)."""
        found: dict[tuple[Node, Size], str] = {}
        for node in self.graph.nodes:
            if node.attrs.get("oob") == "error":
                for operand, bound in node.op.indices.items():
                    found.setdefault((node.operands[operand], bound(node)), node.op.name)
        return [(index, bound, op) for (index, bound), op in found.items()]

    def check(self, index: Node, bound: Size, op: str, source: str, buffer_of: Callable[[Node], str | None]) -> tuple[Kernel, list[Node]]:
        builder = Builder(Domain(index.shape, None), buffer_of, self.s.constant_buffer)
        builder.check(index, bound, op, source)
        return builder.kernel("check"), list(builder.loaded.values())

    def checks(self) -> list[tuple[Kernel, set[Node]]]:
        """A kernel for each checked index, to run as soon as the index is known."""
        found = []
        for index, bound, op in self.checked():
            source = self.names.get(index) or next((self.names[o] for o in reversed(topological([index])) if o in self.names), op)
            kernel, reads = self.check(index, bound, op, source, lambda n: self.names.get(n) if n in self.s.in_memory else None)
            found.append((kernel, set(reads)))
        return found


def meaning(group: Group) -> str:
    """A kernel's name: what it combines, else what it computes."""
    ops = [n.op.name for n in group.placed if not isinstance(lowering(n), Expr | Movement | Alias)]
    ops += [n.op.name for n in reversed(group.placed) if isinstance(lowering(n), Expr | Movement)]
    return "_".join(dict.fromkeys(ops[:3])) or "copy"
