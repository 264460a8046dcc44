"""From groups to a Program: buffers, names, order, checks of indices."""

from __future__ import annotations

import re
from dataclasses import replace

from ...ir.graph import Graph
from ...ir.kernel import Buffer, Call, Kernel, Program, Step
from ...ir.lexer import is_long, suffixed
from ...ir.node import Node, Note
from ...ir.op import Alias, Checked, Expr, Movement
from ...ir.statement import Operand
from ...ir.walk import topological
from .groups import Group, StridedView, lowering
from .lower import IterationSpace, KernelBuilder
from .scheduler import Scheduler

LONGEST_WORD = 40
"""Characters of an op's name in the name of a kernel."""


class ProgramBuilder:
    """From groups to a Program: buffers, names, order."""

    def __init__(self, scheduler: Scheduler):
        self.s = scheduler
        self.graph = scheduler.graph
        self.names: dict[Node, str] = {n: self.graph.input_name(n) for n in self.graph.inputs}
        self.buffers: list[Buffer] = []
        self.buffer: dict[str, Buffer] = {}
        for n in self.graph.inputs:
            self.add(Buffer(self.graph.input_name(n), n.type, "input"))
        # only those that the graph came with: what scheduling itself makes has none
        self.numbers = {n: note.id for n, note in self.graph.notes.items() if note.id is not None}
        self.used = scheduler.names
        scheduler.kernel_names.clear()
        self.outputs: list[tuple[str, str]] = []
        self.copies: list[tuple[int, Step]] = []

    def unique(self, name_hint: str) -> str:
        name, k = name_hint, 1
        while name in self.used:
            k += 1
            name = suffixed(name_hint, f".{k}")
        return self.s.take_name(name)

    def program(self) -> Program:
        needed = set().union(*self.s.loads.values()) if self.s.loads else set()
        needed |= {n for _, n in self.graph.outputs}
        owners: dict[Node, str] = {}
        first: dict[Node, str] = {}
        for name, node in self.graph.outputs:  # it claims the memory of its node, or of the node it is an alias of
            first.setdefault(node, name)
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
            hint = owners.get(node) or first.get(node) or self.name_hint(node)
            if isinstance(lowering(node), Alias) and node not in self.s.group_of:
                source = self.names[node.operands[0]]
                if isinstance(lowering(node), Checked):
                    self.names[node] = source
                    continue
                kind = self.buffer[source].kind
                self.names[node] = self.unique(hint if hint not in self.used else suffixed(source, ".view"))
                self.add(Buffer(self.names[node], node.type, kind, alias=source))
            else:
                through_alias = node in owners and node not in first
                self.names[node] = self.unique(f"{hint}.base" if through_alias else hint)
                self.add(Buffer(self.names[node], node.type, "output" if node in owners else "temp"))
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
        return Program(
            self.graph.name, tuple(self.buffers), tuple(steps), self.graph.assumptions, tuple(self.outputs), notes
        )

    def name_hint(self, node: Node) -> str:
        note = self.graph.notes.get(node)
        return (
            f"{note.name}"
            if note and note.name and note.name.isascii() and note.name.isidentifier() and not is_long(note.name)
            else f"t{len(self.buffers)}"
        )

    def copy(self, name: str, node: Node, steps: list[Step]) -> str:
        """An output whose bytes belong to an input or to another output is copied."""
        source = self.names[node]
        target = self.unique(name)
        self.add(Buffer(target, node.type, "output"))
        if self._stored_twice(source, target, steps):
            return target
        group = Group(-1, node.shape, None)
        builder = KernelBuilder(group.domain, lambda n: source if n is node else None)
        builder.store(target, node, group.place(node.shape, "element"))
        steps.append(self.named(builder.kernel("copy"), "copy"))
        return target

    def _stored_twice(self, source: str, target: str, steps: list[Step]) -> bool:
        """Have the kernel that stores one buffer, once for each element, store the same to another one, if there is
        such a kernel.
        """
        for number, step in enumerate(steps):
            if not isinstance(step, Kernel) or source not in step.writes:
                continue
            writes = [s for s in step.body if s.buffer == source]
            if [s.op for s in writes] != ["store"] or writes[0].where:
                return False
            at = step.body.index(writes[0]) + 1
            body = (*step.body[:at], writes[0].altered(buffer=target), *step.body[at:])
            steps[number] = self.named(replace(step, body=body), step.name.rsplit("_", 1)[0])
            return True
        return False

    def add(self, buffer: Buffer) -> None:
        self.buffers.append(buffer)
        self.buffer[buffer.name] = buffer

    def named(self, kernel: Kernel, meaning: str) -> Kernel:
        """The kernel under a name made of its meaning and its structure."""
        constants = {name: n.type for n, name in self.s.constants.items()}
        types = {b: constants[b] if b in constants else self.buffer[b].type for b in kernel.buffers}
        return kernel.named_by_structure(meaning, types)

    def steps(self, used: set[Node]) -> list[Step]:
        steps: list[Step] = []
        groups = self.s.groups
        # checks as early as they can be: of a call with a bad index as little as possible has run
        for key in self.s.order.sorted(lambda key: ("check" not in groups[key].placed.values(), key)):
            group = groups[key]
            first, *_ = group.placed
            if group.placed[first] == "library":
                if first in used:  # who reads it may do so outside of it alone, where there are zeros
                    steps.append(self.call(first))
            elif group.placed[first] == "check":
                steps.append(self.check(first))
            else:
                kernel = self.kernel(group, used)
                if kernel.writes:
                    steps.append(self.named(kernel, meaning(group, self.graph)))
                    self.s.kernel_names[key] = steps[-1].name
        return steps

    def kernel(self, group: Group, used: set[Node]) -> Kernel:
        builder = KernelBuilder(
            group.domain,
            lambda n: self.names.get(n) if n in self.s.in_memory and n not in group.placed else None,
            self.s.constant_buffer,
            self.numbers,
        )
        for node, level in group.placed.items():
            if level != "accum":
                builder.homes[node] = group.place(node.shape, level)
        for node, level in group.placed.items():
            if node in used:
                self.s.write(node, group, builder, level, self.names[node])
        notes = (self.graph.notes[n] for n in reversed(group.placed) if n in self.graph.notes)
        note = next((note for note in notes if str(note)), Note())
        kernel = builder.kernel("kernel")
        return Kernel(kernel.name, kernel.rows, kernel.cols, kernel.body, note=note)

    def call(self, node: Node) -> Call:
        axes, operands, out = node.op.axes(node)
        args = [
            StridedView(self.s, node, number).operand(operand, index).operand(self.names)
            for number, (operand, index) in enumerate(zip(node.operands, operands, strict=True))
        ]
        name = (
            f"{node.op.name}_{'x'.join(str(s) for s in node.shape)}"
            if all(isinstance(s, int) for s in node.shape)
            else node.op.name
        )
        return Call(
            name,
            node.op.name,
            tuple(axes),
            Operand(self.names[node], tuple(out)),
            tuple(args),
            self.graph.notes.get(node, Note()),
            attrs=tuple((key, node.attrs[key]) for key in node.op.carries),
        )

    def check(self, node: Node) -> Kernel:
        """The step that looks at every element of a buffer of positions."""
        (index,) = node.operands
        builder = KernelBuilder(
            IterationSpace(index.shape, None),
            lambda n: self.names.get(n) if n in self.s.in_memory else None,
            self.s.constant_buffer,
        )
        builder.check(index, node.attrs["bound"], node.attrs["op"], self.source(index), node.attrs["ascending"])
        note = self.graph.notes.get(node, Note())
        return self.named(replace(builder.kernel("check"), note=replace(note, name="")), "check")

    def source(self, index: Node) -> str:
        """What the user calls positions: the value's own name, else the input that they are computed from."""
        note = self.graph.notes.get(index)
        if index.op.name == "input" or (note and note.name):
            return self.names[index]
        inputs = [n for n in topological([index]) if n.op.name == "input"]
        whole = [n for n in inputs if n.dtype.is_integer] or inputs
        return self.names[whole[-1]] if whole else self.names[index]


def meaning(group: Group, graph: Graph) -> str:
    """A kernel's name: the user's composites that it holds parts of, ``gelu_layer_norm_grad`` where it is gradients of
    theirs, and what it combines beside them; without a composite what it combines and computes.  Three words at most,
    which are identifiers in C and not long, whatever a user's op is called.
    """
    composites = {n: graph.composite(n) for n in group.placed}
    parts = list(dict.fromkeys(name.removesuffix("_grad") for name in composites.values() if name))[:3]
    gradient = ["grad"] if any(name.endswith("_grad") for name in composites.values()) else []
    single = [n for n in group.placed if not composites[n]]
    combined = [n.op.name for n in single if not isinstance(lowering(n), Expr | Movement | Alias)]
    computed = [n.op.name for n in reversed(single) if isinstance(lowering(n), Expr | Movement)]
    others = list(dict.fromkeys(combined if parts else [*combined, *computed]))[: 3 - len(parts)]
    words = (re.sub(r"[^A-Za-z0-9_]+", "_", word).strip("_")[:LONGEST_WORD] for word in (*parts, *gradient, *others))
    return "_".join(filter(None, words)) or "copy"
