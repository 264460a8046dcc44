"""Which nodes get memory, and which share a kernel: nodes become groups, each of which becomes a kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from ...ir.dims import Size, known_nonnegative, product
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Alias, Checked, Expr, Library, Lookup, Movement, Reduction, Scan, Scatter
from ...ir.pattern import Var, match, op
from ...ir.statement import Index
from ...ir.types import BF16, BOOL, F16, F32
from ...ir.walk import reachable
from ...process.forks import cached_property
from ...targets.cpu import CHEAP_COST, STORE_COST, STRIDED_COST
from ...targets.devices import Cpu, Device
from .groups import SCALED, Group, StridedOperand, StridedView, alike, lowering, nbytes, real
from .lower import CannotInline, IterationSpace, KernelBuilder
from .order import GroupOrder
from .recompute import cheaper_again, recompute_cost, uses_of


@dataclass(frozen=True)
class Limits:
    """Limits of a kernel that computes several values: buffers, statements, and their cost in additions.  A C
    compiler's time grows faster than the length of a kernel.
    """

    buffers: int
    statements: int
    cost: int


COPIED = 2
"""A value that is filled up may be as many times as large as what it is made of, to be copied."""
FEW_BETWEEN = 16
"""Elements of reduced axes between others that are added by the threads that have their columns, if they are read."""
CAST = op("cast", Var("x"))
FIRST, MERGED = Limits(24, 300, 400), Limits(64, 600, 1000)
"""Limits of a kernel that grows value by value, and of two merged kernels, on a machine whose registers spill to a near
cache.
"""
LONGEST = 48
"""Values that are computed in one expression."""


def moves(lower: object) -> bool:
    """Whether an op only says where an element lies, or in which dtype."""
    return isinstance(lower, Movement | Alias) or (isinstance(lower, Expr) and lower.conversion)


def multiplies_narrow(graph: Graph, node: Node) -> bool:
    """Whether it is a product of two f16 or two bf16 operands, widened to f32: a GPU multiplies them as they are, ten
    times as fast, and adds up in f32.
    """
    if not (isinstance(node.op, Library) and node.op.contraction and node.dtype is F32):
        return False
    wide = [_moved_from(operand) for operand in node.operands]
    kinds = {cast.operands[0].dtype if match(CAST, cast, {}) else F32 for cast in wide}
    if len(kinds) > 1 or not kinds <= {F16, BF16}:
        return False
    memory = _BehindCasts(graph, {cast.operands[0] for cast in wide})
    try:
        for number, operand in enumerate(node.operands):
            StridedView(memory, node, number).operand(operand, [Index.of(f"v{a}") for a in range(operand.rank)])
    except CannotInline:  # what moves them after they are widened is no view
        return False
    return True


class _BehindCasts:
    """Memory that has only what is widened."""

    host = False

    def __init__(self, graph: Graph, narrow: set[Node]):
        self.graph, self.in_memory, self.forced = graph, narrow, narrow

    def widens(self, node: Node, reader: Node) -> bool:
        return _converts(node)

    def reads_narrow(self, node: Node, reader: Node) -> bool:
        return node.dtype is F32


def _converts(node: Node) -> bool:
    """Whether the node's operand has the same values in another dtype."""
    lower = lowering(node)
    return isinstance(lower, Expr) and lower.conversion and node.dtype.holds(node.operands[0].dtype)


def _moved_from(node: Node) -> Node:
    """What ops that only move it show."""
    while isinstance(lowering(node), Movement | Alias) and len(node.operands) == 1:
        node = node.operands[0]
    return node


def _is_of_windows(node: Node) -> bool:
    """Whether it has elements of windows as they are."""
    while isinstance(lowering(node), Movement | Alias) and node.operands and not node.op.indices:
        if node.op.fills and nbytes(node) > COPIED * nbytes(node.operands[0]):
            return True
        node = node.operands[0]
    return False


def _is_strided(index: Sequence[Index], shape: Sequence[Size], last: Index) -> bool:
    """Whether an access goes along another axis of its array than the last one when the last axis of a value is."""
    entries = [i for i, n in zip(index, shape, strict=True) if n != 1]
    return any(v == last.variable for i in entries[:-1] for v, _ in i.terms)


def _stand_in(node: Node) -> str:
    """What a node's buffer is called until buffers have names."""
    return f"@{id(node)}"


def _builder(
    domain: IterationSpace, loaded: Callable[[Node], bool], constants: Callable[[Node], str] = _stand_in
) -> KernelBuilder:
    """A kernel whose buffers have no names yet.

    :param loaded: whether it loads a node, which else it computes.
    """
    return KernelBuilder(domain, lambda node: _stand_in(node) if loaded(node) else None, constants)


def _trial(node: Node, loaded: Callable[[Node], bool]) -> KernelBuilder | None:
    """A kernel for a value alone; None where what the value is made of needs memory."""
    builder = _builder(IterationSpace(node.shape), loaded)
    try:
        builder.read(node, builder.domain.index())
    except CannotInline:
        return None
    return builder


class Scheduler:
    """What has been decided so far, and the trail of it: every change leaves how it is undone, so that a node which
    turns out to need memory is visited again with that known, and nothing before it is.
    """

    def __init__(self, graph: Graph, fuse: bool, forced: set[Node], device: Device):
        self.graph, self.fuse, self.host = graph, fuse, isinstance(device, Cpu)
        self.recompute = recompute_cost(device)
        self.limits = FIRST
        self.forced = forced | {n for _, n in graph.outputs if n.op.name != "input"}
        self.users = graph.users
        self.windows: dict[tuple[Node, bool], float] = {}
        """What :meth:`times_in_windows` gave: nothing that is decided changes it."""
        self.uses = uses_of(graph, self.forced) if self.recompute else {}
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.group_of: dict[Node, Group] = {}
        self.checks: dict[Node, Group] = {}
        """The step that checks the elements of each :class:`Checked` node."""
        self.groups: list[Group] = []
        self.order = GroupOrder()
        self.library: list[Node] = []
        self.in_memory: set[Node] = set(graph.inputs)
        self.recomputed: set[Node] = set()
        """What is computed in each kernel that reads it though that costs more than a load."""
        self.loads: dict[int, set[Node]] = {}
        self.readers: dict[Node, set[int]] = {}
        """The groups that load a node: ``loads`` the other way round."""
        self.constants: dict[Node, str] = {}
        self.names = set(graph.input_names)
        """Names of buffers given so far."""
        self.refused: dict[tuple[int, int], tuple[Size, str]] = {}
        """Pairs of groups that would save bytes as one and cannot be: the bytes and why."""
        self.kernel_names: dict[int, str] = {}
        self.trail: list[Callable[[], object]] = []
        """What undoes each change, the oldest first."""
        self.visited: list[int] = []
        """The trail's length before the visit to each node of the graph."""

    # -- the trail -----------------------------------------------------------------------------------------------------

    def rewind(self, length: int) -> None:
        """Undo every change since the trail had this length."""
        while len(self.trail) > length:
            self.trail.pop()()

    def revisit(self, node: Node) -> None:
        """The node needs memory: undo what was decided since it was visited."""
        self.forced.add(node)
        position = min(self.position[node], len(self.visited) - 1)
        self.rewind(self.visited[position])
        del self.visited[position:]

    def remember(self, node: Node, group: Group) -> None:
        """The node is computed by a group, and lies in memory from then on."""
        self._hold(node, group)
        self.trail.append(functools.partial(self._release, node))

    def forget(self, node: Node) -> None:
        """The node's group is taken apart."""
        self.trail.append(functools.partial(self._hold, node, self.group_of[node]))
        self._release(node)

    def _hold(self, node: Node, group: Group) -> None:
        self.group_of[node] = group
        self.in_memory.add(node)

    def _release(self, node: Node) -> None:
        del self.group_of[node]
        self.in_memory.discard(node)

    def load(self, group: Group, loaded: set[Node]) -> None:
        """What a group loads, and so which groups run before it."""
        before = self.loads.get(group.key, set())
        self._set_loads(group.key, before, loaded)
        self.trail.append(functools.partial(self._set_loads, group.key, loaded, before))
        for node in loaded:
            owner = self.owner(node)
            if owner is not None and owner is not group:
                self.trail.append(self.order.connect(owner.key, group.key))

    def contract(self, a: Group, b: Group) -> None:
        """The group that is opened next stands for both in the order."""
        self.trail.append(self.order.contract(a.key, b.key, len(self.groups)))

    def retire(self, group: Group) -> None:
        """Another group computes its nodes."""
        loaded = self.loads[group.key]
        self._set_loads(group.key, loaded, set())
        del self.loads[group.key]
        self.trail.append(functools.partial(self._set_loads, group.key, set(), loaded))

    def _set_loads(self, key: int, before: set[Node], after: set[Node]) -> None:
        self.loads[key] = after
        for node in before - after:
            self.readers[node].discard(key)
        for node in after - before:
            self.readers.setdefault(node, set()).add(key)

    def take_name(self, name: str) -> str:
        self.names.add(name)
        self.trail.append(functools.partial(self.names.discard, name))
        return name

    # -- who gets memory -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Give each node its place: in a kernel, in memory, or where it is read."""
        self.limits = FIRST
        for node in itertools.islice(self.graph.nodes, len(self.visited), None):
            self.visited.append(len(self.trail))
            self.visit(node)

    def visit(self, node: Node) -> None:
        if node.op.name == "input":
            return
        if isinstance(node.op, Library):
            self.library_node(node)
        elif isinstance(lowering(node), Checked):
            self.checked_node(node)
        elif isinstance(lowering(node), Alias) and (node in self.forced or not self.fuse):
            self.force(node.operands[0])
            self.in_memory.add(node)
            self.trail.append(functools.partial(self.in_memory.discard, node))
        elif node in self.forced or not self.fuse or not self.read_in_place(node):
            self.place(node)
        elif self.awaited(node):
            self.forced.add(node)
            self.rewind(self.visited[-1])
            self.place(node)

    def force(self, node: Node) -> None:
        if node not in self.in_memory:
            raise CannotInline(node, "its bytes are needed")

    def read_in_place(self, node: Node) -> bool:
        """Whether each user computes the node itself: data movement, and pointwise ops that cost no more than loading
        their result.
        """
        lower = lowering(node)
        if isinstance(lower, Movement | Lookup | Alias):
            return not (self.read_under_masks(node) or self.found_again_in_windows(node))
        if not isinstance(lower, Expr):
            return False
        if not self.shared_index(node) and self.costs_no_more_than_a_load(node):
            return True
        if self.recompute is None or not cheaper_again(node, self.recompute, self):
            return False
        self.recomputed.add(node)
        self.trail.append(functools.partial(self.recomputed.discard, node))
        return True

    def awaited(self, node: Node) -> bool:
        """Whether a later library call is certain to need it in memory: it is computed, or on a CPU put together of
        several values, and so no view of memory, and no other node reads what moves it to the call.  Else all nodes up
        to the call would be visited twice, and what is moved would be stored in its place: all windows of what is put
        together.  A call that reads only a part of that has the part stored, and one that reads few windows has these:
        what is put together would be stored, and stored once more with its border.
        """
        lower = lowering(node)
        computed = isinstance(lower, Expr) and not lower.conversion and not (self.host and match(SCALED, node, {}))
        joined = self.host and isinstance(lower, Movement) and len(node.operands) > 1 and not node.op.indices
        if not computed and not joined:
            return False
        for user in self.users[node]:
            at, fills = node, False
            while (
                isinstance(lowering(user), Movement | Alias)
                and user.operands[0] is at
                and not user.op.indices
                and user not in self.forced
                and len(self.users[user]) == 1
                and not self.read_under_masks(user)
                and (computed or nbytes(user) >= nbytes(node))
            ):
                at, user, fills = user, self.users[user][0], fills or user.op.fills
            if isinstance(user.op, Library) and (computed or not fills or nbytes(at) > 2 * COPIED * nbytes(node)):
                return True
        return False

    def read_under_masks(self, node: Node) -> bool:
        """Whether a value that fills what is around another has readers, each of several elements of a window of it,
        for which it would be masked everywhere: they read a copy without.
        """
        if not (self.host and node.op.fills and nbytes(node) <= COPIED * nbytes(node.operands[0])):
            return False
        cut = [user for user in self.users[node] if isinstance(lowering(user), Movement) and user.op.fills]
        read = [lowering(reader) for user in cut for _, reader in self.moved_uses(user)]
        readers = [lower for lower in read if not isinstance(lower, Movement | Alias)]
        return bool(readers) and all(isinstance(lower, Lookup) and lower.mixes for lower in readers)

    def found_again_in_windows(self, node: Node) -> bool:
        """Whether to find an element of a value that is moved, in each window that has it, takes longer than to store
        it once: of what is padded by reflection, or spread by a pooling's gradient.
        """
        times = self.times_in_windows(node, spread=True)
        return times > 1 and self.cost_to_find(node) * (times - 1) > STORE_COST

    def cost_to_find(self, node: Node) -> int:
        """The statements that select an element of a moved value and compute its place; loads, masks of bounds, which
        hold for all of a row's interior, and what is pointwise, which has a rule of its own, are none.  But for loads
        of elements that do not lie beside one another along the last axis, which no vector loads: a library packs
        them, and others load them one by one, unless they read them in the order of the array.
        """
        builder = _trial(node, lambda at: at in self.in_memory or isinstance(lowering(at), Expr))
        if builder is None:  # it is visited again after what it is made of has memory
            return 0
        found = sum(s.op not in ("load", "const", "size") and s.dtype is not BOOL for s in builder.body)
        if any(isinstance(user.op, Library) for _, user in self.moved_uses(node)):
            return found
        last = next(iter(builder.domain.index()[-1:]), Index())
        loads = [s for s in builder.body if s.op == "load"]
        strided = sum(_is_strided(s.index, builder.loaded[s.buffer].shape, last) for s in loads)
        return found + (STRIDED_COST * strided if strided and self.read_along_last_axis(node) else 0)

    def read_along_last_axis(self, node: Node) -> bool:
        """Whether a kernel that reads windows of a moved value, or the value beside windows, goes along its last axis:
        one that reduces them does; one that stores what they are moved to, or computed into, goes along the last axis
        of that, which may be another one: the value was moved there and is moved back.
        """
        in_windows, pending, ends = {node: False}, [node], []
        while pending:
            at = pending.pop()
            stored = at in self.forced or not (moves(lowering(at)) or len(self.users[at]) == 1)
            if stored and in_windows[at]:
                ends.append(at)
            for user in () if stored and at is not node else self.users[at]:
                found = in_windows[at] or user.op.fills or any(map(_is_of_windows, user.operands))
                if user.op.indices or not isinstance(lowering(user), Movement | Alias | Expr):
                    if found and not self.adds_along_last_axis(user, node, in_windows.keys()):
                        return True
                elif user not in in_windows or (found and not in_windows[user]):
                    in_windows[user] = found
                    pending.append(user)
        return any(self.goes_along_last_axis(node, end, in_windows.keys()) for end in ends)

    def goes_along_last_axis(self, node: Node, end: Node, moved: Container[Node]) -> bool:
        """Whether elements of a value that lie along its last axis do so where another is made of it."""
        last = next((Index.of(f"i{a}") for a in reversed(range(end.rank)) if end.shape[a] != 1), Index())
        places = self.places_in(node, end, moved)
        return not places or any(not _is_strided(index, node.shape, last) for index in places)

    def adds_along_last_axis(self, reader: Node, node: Node, moved: Container[Node]) -> bool:
        """Whether a reduction of its operand's last axes reduces the last one of a value that is moved there, as the
        gradient of an image adds up what each place of a filter gives: kernels go along an axis before.
        """
        if not isinstance(lowering(reader), Reduction):
            return False
        (source,), gone = reader.operands, self.reduced(reader)
        kept = max((a for a in range(source.rank) if a not in gone and source.shape[a] != 1), default=-1)
        trailing = {f"i{a}" for a in gone if a > kept}
        places = [
            [i for i, n in zip(index, node.shape, strict=True) if n != 1]
            for index in self.places_in(node, source, moved)
        ]
        return any(place and place[-1].variable in trailing for place in places)

    def places_in(self, node: Node, end: Node, moved: Container[Node]) -> list[Sequence[Index]]:
        """Where a value is read by another that is made of it, in the axes ``i0, i1, ...`` of that; none if it is made
        of what needs memory.
        """
        builder = _trial(end, lambda at: at is node or at not in moved)
        body = builder.body if builder is not None else ()
        return [s.index for s in body if s.op == "load" and s.buffer == _stand_in(node)]

    def stored(self, node: Node) -> bool:
        """Whether a group computes it, or it lies in memory."""
        return node in self.in_memory or node in self.group_of

    def at_hand(self, operand: Node, node: Node) -> bool:
        """Whether a kernel that reduces rows has an operand where it could store the node, a value of each row."""
        group = self.group_of.get(operand)
        return group is not None and group.placed.get(operand) == "row" and alike(real(node.shape), group.rows)

    def costs_no_more_than_a_load(self, node: Node) -> bool:
        """Whether a pointwise node is computed from what is loaded in its place, or once."""
        cost, leaves, pending, seen = 0, 0.0, [node], {node}
        once = self.computed_once(node)
        while pending:  # an operand that an op reads twice counts twice
            at = pending.pop()
            inner = lowering(at)
            if at is not node and (self.stored(at) or at in self.recomputed):
                leaves += nbytes(at)
                continue
            cost += inner.cost if isinstance(inner, Expr) else 0
            if cost > (FIRST.cost // 2 if once and len(seen) <= LONGEST else CHEAP_COST):
                return False
            fresh = [o for o in at.operands if o not in seen]
            seen.update(fresh)
            pending += fresh
        if len(seen) <= LONGEST and cost <= FIRST.cost // 2 and once:
            return True
        if cost * (self.times_in_windows(node) - 1) > STORE_COST:
            return False
        return cost <= CHEAP_COST and (leaves <= 1.05 * nbytes(node) or len(self.users[node]) <= 1)

    def times_in_windows(self, node: Node, spread: bool = False) -> float:
        """How many windows an element of it is in, if it is read in windows, else 1; on a GPU the threads that read an
        element share what memory gives them, and :mod:`.recompute` weighs it.

        :param spread: how many elements of windows it is, also where it is broadcast and computed with before, and how
            many it meets there, as in the gradient of a filter of few channels.
        """
        if not self.host:
            return 1.0
        known = self.windows.get((node, spread))
        if known is None:
            known = self.windows[node, spread] = self._times_in_windows(node, spread)
        return known

    def _times_in_windows(self, node: Node, spread: bool) -> float:
        most, size, pending, seen = 1.0, nbytes(node) or 1, [node], {node}
        while pending:
            at = pending.pop()
            for user in self.users[at]:
                moved = isinstance(lowering(user), Movement | Alias) and not user.op.indices
                computed = spread and isinstance(lowering(user), Expr) and nbytes(at) > size
                met = computed and any(_is_of_windows(other) for other in user.operands)
                if (moved and user.op.fills) or met:
                    most = max(most, nbytes(user) / (size if spread else max(nbytes(at), 1)))
                elif user not in seen and (moved or computed):
                    seen.add(user)
                    pending.append(user)
        return most

    def computed_once(self, node: Node) -> bool:
        """Whether it has one reader, a computation that needs each element once: computed there it costs what it would
        cost here.  A conversion that a library does when it reads is none.
        """
        users = self.users[node]
        while len(users) == 1 and isinstance(lowering(users[0]), Alias):
            users = self.users[users[0]]
        if len(users) != 1 or not isinstance(lowering(users[0]), Expr):
            return False
        readers = (user for _, user in self.moved_uses(users[0]) if isinstance(user.op, Library))
        return not any(self.widens(users[0], reader) for reader in readers)

    def shared_index(self, node: Node) -> bool:
        """Whether it is a position that more elements are read (or added) at than it has."""
        return any(
            any(user.operands[k] is value for k in user.op.indices)
            and nbytes(self.source(user)) // self.source(user).dtype.itemsize > nbytes(node) // node.dtype.itemsize
            for value, user in self.moved_uses(node)
        )

    def moved_uses(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """The value and its user, for each user of the node and of what only moves it."""

        def moved(use: tuple[Node, Node]) -> list[tuple[Node, Node]]:
            _, user = use
            moves = isinstance(lowering(user), Movement | Alias) and not user.op.indices
            return [(user, further) for further in self.users[user]] if moves else []

        return reachable([(node, user) for user in self.users[node]], moved)

    # -- library calls -------------------------------------------------------------------------------------------------

    def library_node(self, node: Node) -> None:
        seen: list[StridedOperand] = []
        for number, operand in enumerate(node.operands):
            if node.op.row_major:
                self.force(operand)
            index = [Index.of(f"v{a}") for a in range(operand.rank)]
            try:
                seen.append(StridedView(self, node, number).operand(operand, index))
            except CannotInline:
                raise CannotInline(self.behind(operand, node, number), "a library reads it") from None
        group = self.open((), None)
        group.placed[node] = "library"
        self.remember(node, group)
        self.load(group, set().union(*(s.bases for s in seen)))
        self.library.append(node)
        self.trail.append(self.library.pop)

    def checked_node(self, node: Node) -> None:
        """Memory that is read after a step of its own has looked at it."""
        self.force(node.operands[0])
        group = self.open(node.shape, None)
        group.placed[node] = "check"
        self.checks[node] = group
        self.in_memory.add(node)
        self.trail += functools.partial(self.in_memory.discard, node), functools.partial(self.checks.pop, node)
        self.load(group, set(node.operands))

    def behind(self, node: Node, reader: Node, number: int) -> Node:
        """What needs memory so that a library can read the node as an operand of a call: the value behind ops that only
        move it, or widen it as a library does when it reads; if that has some, a reshape of it; if none, the nearest
        reshape, of which the moves after it are views; if none, the node.
        """
        base, above = node, node
        nearest: Node | None = None
        while base not in self.in_memory or self.reads_narrow(base, reader):
            if number in reader.op.converts and self.widens(base, reader):
                base = base.operands[0]
                if not self.host:  # what needs memory is narrow
                    node, above, nearest = base, base, None
            elif base.operands and isinstance(lowering(base), Movement | Alias) and not base.op.indices:
                reshapes = isinstance(lowering(base), Alias)
                nearest = base if reshapes and nearest is None else nearest
                above, base = (base if reshapes else node if nearest is None else nearest), base.operands[0]
            else:
                break
        return above if base in self.in_memory else base

    def widens(self, node: Node, reader: Node) -> bool:
        """Whether a library call reads the node's operand in its place; on a GPU both of a product are narrow."""
        return _converts(node) and (self.host or self.reads_narrow(node, reader))

    def reads_narrow(self, node: Node, reader: Node) -> bool:
        """Whether a library call reads what the node is widened from, even if the node is in memory."""
        return not self.host and node.dtype is F32 and reader in self.narrow_products

    @cached_property
    def narrow_products(self) -> set[Node]:
        """The products on a GPU of which both operands are read narrow."""
        return {node for node in self.graph.nodes if multiplies_narrow(self.graph, node)}

    def open(self, shape: Sequence[Size], cols: tuple[int, ...] | None) -> Group:
        group = Group(len(self.groups), shape, cols)
        group.builder = _builder(
            group.domain, lambda node: node in self.in_memory and node not in group.placed, self.constant_buffer
        )
        self.groups.append(group)
        self.loads[group.key] = set()
        self.trail += functools.partial(self.loads.pop, group.key), self.groups.pop
        if group.key not in self.order:  # it stands for two others already
            self.trail.append(self.order.add(group.key))
        return group

    def constant_buffer(self, node: Node) -> str:
        if node not in self.constants:
            free = (
                name
                for k in itertools.count(len(self.constants))
                if (name := f"c{k}") not in self.names and name not in self.graph.output_names
            )
            self.constants[node] = self.take_name(next(free))
            self.trail.append(functools.partial(self.constants.pop, node))
        return self.constants[node]

    def owner(self, node: Node) -> Group | None:
        while isinstance(lowering(node), Alias) and node not in self.group_of and node not in self.checks:
            (node,) = node.operands
        return self.checks.get(node) or self.group_of.get(node)

    # -- placing -------------------------------------------------------------------------------------------------------

    def place(self, node: Node) -> None:
        if self.fuse:
            for group in self.candidates(node):
                if self.join(node, group) is None:
                    return
        shape, cols = self.own_space(node)
        before = len(self.trail)
        reason = self.attempt(node, self.open(shape, cols))
        if reason is not None and isinstance(lowering(node), Scatter):  # with every axis a row, each element is visited
            self.rewind(before)
            reason = self.attempt(node, self.open(shape, ()))
        if reason is not None:
            raise reason

    def candidates(self, node: Node) -> list[Group]:
        """Groups that compute what the node reads, the latest first, then groups that load the same."""
        behind = reachable(node.operands, lambda at: () if at in self.in_memory else at.operands)
        leaves = [at for at in behind if at in self.in_memory]
        producers = {g.key for leaf in leaves if (g := self.group_of.get(leaf)) is not None}
        size = nbytes(self.source(node))
        sharers = {key for leaf in leaves if nbytes(leaf) * 2 >= size for key in self.readers.get(leaf, ())}
        ranked = [*sorted(producers, reverse=True), *sorted(sharers - producers, reverse=True)]
        return [self.groups[key] for key in ranked if not self.groups[key].alone]

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
        if not isinstance(lowering(node), Reduction | Scan):
            return shape, None
        return shape, self.columns_for(node, shape)

    @staticmethod
    def reduced(node: Node) -> tuple[int, ...]:
        axis = node.attrs["axis"]
        return axis if isinstance(axis, tuple) else (axis,)

    def columns_for(self, node: Node, shape: Sequence[Size]) -> tuple[int, ...]:
        """Scanned and trailing reduced axes are walked along; leading ones are summed across rows, with the last axis
        as the columns.  A GPU walks along axes between others, too: its neighbouring threads have neighbouring rows,
        one element each.  Only a few that are read and not computed are added several columns at a time: with other
        columns, the sum of what is computed is kept out of kernels that compute it.
        """
        gone = tuple(a for a in self.reduced(node) if shape[a] != 1)
        if isinstance(lowering(node), Scan):
            return gone
        kept = [a for a in range(len(shape)) if shape[a] != 1 and a not in gone]
        if lowering(node).combine != "sum" or not gone:
            return gone
        if not kept:
            return gone[-1:]
        between = kept[0] < gone[0] and not any(gone[0] < a < gone[-1] for a in kept)
        few = known_nonnegative(FEW_BETWEEN - product(shape[a] for a in gone)) and self.only_read(node.operands[0])
        if kept[-1] < gone[0] or (between and not self.host and not few):
            return gone
        last = kept[-1] if kept[-1] > gone[-1] else gone[-1]
        return (last,)

    def only_read(self, node: Node) -> bool:
        """Whether a value is elements of what lies in memory, at most converted; their indices may be computed."""
        behind = reachable([node], lambda at: () if at in self.in_memory or at.dtype.kind in "biu" else at.operands)
        return all(at in self.in_memory or at.dtype.kind in "biu" or moves(lowering(at)) for at in behind)

    def join(self, node: Node, group: Group) -> CannotInline | None:
        """The node in a group with the columns that it needs; None if it stands, else why not."""
        other = CannotInline(node, "another iteration space")
        if not alike(real(self.source(node).shape), group.real) and not (
            group.domain.cols is not None and alike(real(self.source(node).shape), group.rows)
        ):
            return other
        if isinstance(lowering(node), Reduction | Scan) and group.domain.cols is None:
            wanted = self.columns_for(node, self.source(node).shape)
            dims = [d for d, s in enumerate(self.source(node).shape) if s != 1]
            mapped = tuple(group.domain.real[dims.index(a)] for a in wanted)
            if not mapped and group.domain.real:
                return other
            if any(level == "row" for level in group.placed.values()) or any(
                not axes & {f"i{d}" for d in mapped} for axes in group.walked
            ):
                return CannotInline(node, "the kernel's columns are not what is summed or scanned")
            before = len(self.trail)
            self.trail.append(functools.partial(group.restore, group.state()))
            group.builder.domain = group.domain = IterationSpace(group.domain.shape, mapped)
            reason = self.attempt(node, group)
            if reason is not None:
                self.rewind(before)
            return reason
        return self.attempt(node, group)

    def attempt(self, node: Node, group: Group) -> CannotInline | None:
        """Write the node into the group's kernel; None if it stands, else why not, with nothing changed."""
        level = self.level(node, group)
        if level is None:
            return CannotInline(node, self.misfit(node, group))
        before = len(self.trail)
        self.trail.append(functools.partial(group.restore, group.state()))
        group.placed[node] = level
        try:
            self.write(node, group, group.builder, level)
            loaded = {n for n in group.builder.loaded.values() if n not in group.placed}
            self.check_limits(node, group, loaded)
            self.check_segments(node, group, loaded)
            for other in loaded:
                owner = self.owner(other)
                if owner is group:
                    raise CannotInline(node, "it needs a finished result of the same kernel")
                if owner is not None and self.order.has_path(group.key, owner.key):
                    raise CannotInline(node, "the kernels would wait for each other")
        except CannotInline as reason:
            self.rewind(before)
            return reason
        if isinstance(lowering(node), Scatter):
            group.scatter = node
        self.remember(node, group)
        self.load(group, loaded)
        return None

    def check_limits(self, node: Node, group: Group, loaded: set[Node]) -> None:
        """:raises CannotInline: the kernel is longer with the node than a kernel of several values may be."""
        if len(group.placed) == 1:
            return
        if len(loaded) + len(group.placed) > self.limits.buffers:
            raise CannotInline(node, "too many buffers in one kernel")
        if len(group.builder.body) > self.limits.statements or group.builder.cost > self.limits.cost:
            raise CannotInline(node, "too long a kernel")

    def check_segments(self, node: Node, group: Group, loaded: set[Node]) -> None:
        """:raises CannotInline: rows of segments, or who reads their sums, would share a kernel with what has another
        order.

        Alone they hand each sum on as soon as it is finished (:mod:`..program.forward_rows`), which moves less than
        reading together would save: what both read is read at other places.
        """
        if not self.host:
            return
        scatters = [n for n in group.placed if isinstance(lowering(n), Scatter)]
        if scatters and len(scatters) < len(group.placed) and group.builder.in_segments:
            raise CannotInline(node, "rows in segments are added up alone, and each sum handed on as it is finished")
        finished = {n for n in loaded if (owner := self.owner(n)) and owner.scatter is n and owner.builder.in_segments}

        def sources(n: Node) -> tuple[Node, ...]:
            return n.operands if n in group.placed or n not in self.in_memory else ()

        if finished and any(not finished & {*reachable([n], sources)} for n in group.placed):
            raise CannotInline(node, "a kernel that is handed finished sums computes nothing else")

    def level(self, node: Node, group: Group) -> str | None:
        lower = lowering(node)
        space = real(self.source(node).shape)
        if isinstance(lower, Scatter):
            if (
                group.scatter is not None
                and group.scatter.operands[1 - lower.updates] is not node.operands[1 - lower.updates]
            ):
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
            if lower.combine == "sum" and (not gone & columns or gone > columns or gone < columns):
                others = [n for n in group.placed if self.is_ordered(n, group)]
                if ordered and (group.scatter is not None or any(self.reduced_dims(n, group) != gone for n in others)):
                    return None  # one visiting order per kernel
                return "accum"
            return None
        if isinstance(lower, Scan) and not self.along_columns(node, group):
            return None
        if alike(space, group.real):
            return "element"
        return "row" if group.domain.cols is not None and alike(space, group.rows) else None

    def misfit(self, node: Node, group: Group) -> str:
        """Why a node has no level in a group."""
        lower, space = lowering(node), real(self.source(node).shape)
        if isinstance(lower, Scatter):
            fits = alike(space, group.real) or alike(space, group.rows)
            return "a kernel visits its rows in one order" if fits else "another iteration space"
        if isinstance(lower, Scan) and alike(space, group.real):
            return "a scan goes along the columns of a row"
        if not isinstance(lower, Reduction) or not alike(space, group.real):
            return "another iteration space"
        if lower.combine != "sum":
            return f"{lower.combine} goes along the columns of a row, only sums are combined across rows"
        return "a kernel visits its rows in one order, and reduces along its columns or across its rows"

    def along_columns(self, node: Node, group: Group) -> bool:
        """Whether a scan goes along a group's columns, or along an axis of one element."""
        if not alike(real(node.shape), group.real):
            return False
        gone = self.reduced_dims(node, group)
        return not gone or (group.domain.cols is not None and gone == set(group.domain.columns))

    def is_ordered(self, node: Node, group: Group) -> bool:
        return (
            group.placed[node] == "accum"
            and isinstance(lowering(node), Reduction)
            and bool(set(group.domain.real) - self.reduced_dims(node, group) - set(group.domain.columns))
        )

    def reduced_dims(self, node: Node, group: Group) -> set[int]:
        """The reduced axes as dimensions of the group's space."""
        shape = node.operands[0].shape
        dims = [a for a, s in enumerate(shape) if s != 1]
        return {group.domain.real[dims.index(a)] for a in self.reduced(node) if shape[a] != 1}

    def write(
        self, node: Node, group: Group, builder: KernelBuilder, level: str, buffer: str = "", store: bool = True
    ) -> None:
        """The statements of a placed node."""
        lower = lowering(node)
        if level == "accum" and isinstance(lower, Scatter):
            updates = node.operands[lower.updates]
            at = group.place(updates.shape, "element" if alike(real(updates.shape), group.real) else "row")
            index, where = lower.at(at, node, builder)
            builder.accumulate(buffer, node, tuple(index), builder.read(updates, at), where)
            if alike(real(updates.shape), group.real) and group.domain.columns:
                axes = builder.axes_of(builder.body[-1])
                if not axes & {f"i{d}" for d in group.domain.columns}:
                    raise CannotInline(node, "it would be added once per row, not once per column")
                group.walked.append(axes)
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
