"""The verifier of graphs and programs: applies the type rules to every node and statement again.

A violation is a :class:`TypeRuleError` whose note shows the line with carets under the part that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from ..errors import TypeRuleError
from .accesses import Elements, by_data, unsafe_accesses, unsafe_operands
from .dims import Dim, Size, assuming, evaluate, known_nonnegative, product, rises, same, substitute, symbol, symbols
from .epilogue import FORMS
from .graph import Graph, check_name, format_op
from .kernel import (
    KINDS,
    MOST_PARTS,
    ROW_ORDERS,
    TILE_MAPPINGS,
    Buffer,
    Call,
    Carry,
    Kernel,
    Loop,
    Program,
    Select,
    Sweep,
    alternatives,
    facts,
)
from .lexer import excerpt, format_value
from .node import REGISTRY, Node
from .op import Library
from .ranges import KernelRanges, Range, inside, sources
from .sample import Sample
from .statement import COMBINES, MASKED, REDUCTIONS, SCANS, Axis, Index, Operand, Stmt
from .text import same_attribute, types_agree
from .types import BOOL, I64, DType, Type

# -- graphs -----------------------------------------------------------------------------------------------------------


def verify(graph: Graph) -> None:
    """Infers every node's type and attributes again and compares them; checks names, operands and bound arrays."""
    names = graph.value_names
    known: set[Node] = set()
    inputs = set(graph.inputs)
    with assuming(graph.assumptions):
        for node in graph.nodes:
            if node in inputs:
                check_name(graph.input_name(node))
            else:
                _verify_node(node, names, known)
            known.add(node)
    for name, array in graph.defaults.items():
        type_ = graph.input(name).type
        sizes = zip(type_.shape, array.shape, strict=False)
        if (
            array.dtype != type_.dtype.np
            or array.ndim != type_.rank
            or any(isinstance(s, int) and s != n for s, n in sizes)
        ):
            raise TypeRuleError(f"the array bound to the input {name}: {type_} is {array.dtype}{list(array.shape)}")


def _verify_node(node: Node, names: Mapping[Node, str], known: set[Node]) -> None:
    line, op = format_op(node, names), node.op
    at = line.index(" = ") + 3
    for operand in node.operands:
        if operand not in known:
            raise _pointing(
                TypeRuleError(f"{op.name} reads a value that is not computed before it: {operand!r}"), line, op.name, at
            )
    if op.name not in REGISTRY:
        raise _pointing(TypeRuleError(f"there is no op {op.name!r}"), line, op.name, at)
    types = [o.type for o in node.operands]
    try:
        inferred, canonical = op.type_of(types, node.attrs)
    except TypeRuleError as error:
        raise _pointing(error, line, op.name, at) from None
    head = f"{op.name}({', '.join(map(str, types))})"
    if not types_agree(node.type, inferred):
        raise _pointing(
            TypeRuleError(f"{head} is {inferred}, but the node says {node.type}"), line, str(node.type), line.index(":")
        )
    if canonical.keys() != node.attrs.keys():
        wrong = min(canonical.keys() ^ node.attrs.keys())
        problem = "is missing" if wrong in canonical else "is none of its attributes"
        raise _pointing(TypeRuleError(f"{head}: {wrong} {problem}"), line, op.name, at)
    for name, value in canonical.items():
        if not same_attribute(node.attrs[name], value):
            message = f"{head}: {name}={node.attrs[name]!r} is not canonical, it should be {value!r}"
            raise _pointing(TypeRuleError(message), line, f"{name}=", at)


def _pointing(error: TypeRuleError, line: str, part: str, start: int = 0) -> TypeRuleError:
    at = max(line.find(part, start), 0)
    error.add_note(excerpt(line, at, at + len(part)))
    return error


def _goes_along(kernel: Kernel, buffer: str) -> bool:
    """Whether the rows are visited in the order of the accum into ``buffer``, or of one with the same index."""

    def places(name: str) -> list[object]:
        return [
            (s.where, [i for i in s.index if any(v.startswith("%") for v, _ in i.terms)])
            for s in kernel.accums
            if s.buffer == name
        ]

    return kernel.order == buffer or (bool(kernel.order) and places(buffer) == places(kernel.order))


# -- programs ---------------------------------------------------------------------------------------------------------


def verify_program(program: Program) -> list[Kernel | Call]:
    """Checks buffers, steps and outputs: kinds, aliases, ranks, dtypes, single assignment, writes before reads,
    strategies, and that kernels with one name are the same.

    :returns: see :func:`verify_accesses`.
    """
    with assuming(program.assumptions):
        _verify_buffers(program)
        written = {b.name for b in program.buffers if b.kind in ("input", "const") and not b.alias}
        for step in program.steps:
            if isinstance(step, Select):
                _verify_select(step, program, written)
            if isinstance(step, Loop):
                _verify_loop(step, program)
            inside = set(written)
            with assuming(facts(step)):
                for choice in alternatives(step):
                    check = _CallCheck(choice, program) if isinstance(choice, Call) else _KernelCheck(choice, program)
                    check.loop = step if isinstance(step, Loop) else None
                    check.run(inside)
                    if isinstance(step, Loop):
                        inside |= {program.root(b) for b in choice.writes}
            written |= {program.root(b) for b in step.writes}
        for name, buffer in program.outputs:
            _verify_output(name, buffer, program, written)
        _verify_batches(program)
        undecided = verify_accesses(program)
        _verify_names(program)
        return undecided


def verify_accesses(program: Program) -> list[Kernel | Call]:
    """Proves that every access stays inside its buffer: a data-dependent position has been checked by an earlier step,
    is in range by its computation, or is masked.

    :returns: the kernels and calls with data-independent accesses that are not proved for all sizes; at a call,
        :func:`verify_sizes` checks them for the actual sizes.
    :raises TypeRuleError: a data-dependent access is not proved.
    """
    undecided: dict[Kernel | Call, None] = {}
    with assuming(program.assumptions):
        elements = Elements(program)
        for step in program.steps:
            if isinstance(step, Loop):
                elements.after(step)  # what its steps write to one another
            with assuming(facts(step)):
                for item in alternatives(step):
                    if not _proved(item, program, elements):
                        undecided[item] = None
                        _demand(
                            not isinstance(step, Loop),
                            f"{item.name} is not known to stay inside its buffers for all sizes, and it is in a loop",
                            item,
                            item.name,
                        )
            elements.after(step)
    return list(undecided)


def _proved(item: Kernel | Call, program: Program, elements: Elements) -> bool:
    """Whether the data-independent accesses are proved for all sizes.

    :raises TypeRuleError: a data-dependent one is not.
    """
    if isinstance(item, Call):
        return not any(True for _ in unsafe_operands(item, program.types))
    proved = True
    for s, axis, size in unsafe_accesses(item, elements):
        index = s.index[axis]
        if not by_data(index):
            proved = False
            continue
        named = ", ".join(dict.fromkeys(sources(item, index))) or f"what {index} is computed from"
        _outside(item, s, axis, size, f"nothing before says that {index} is inside: no step checks {named}")
    return proved


def verify_sizes(kernel: Kernel | Call, program: Program, dims: Mapping[str, int]) -> None:
    """Checks that the data-independent accesses stay inside their buffers at these sizes.

    :raises TypeRuleError: one does not.
    """
    if isinstance(kernel, Call):
        types = {b: program.buffer[b].type.substitute(dims) for b in (*kernel.reads, *kernel.writes)}
        for operand, axis, size in unsafe_operands(kernel.substitute(dims), types):
            message = (
                f"call {kernel.name}: axis {axis} of {operand.buffer} has {size}, and {operand.index[axis]} is not"
                " inside"
            )
            raise _pointing(TypeRuleError(message), str(kernel), f"{operand.buffer}[")
        return
    if any(evaluate(size, dims) == 0 for _, size in kernel.rows):
        return
    empty = {name for name, size in kernel.cols if evaluate(size, dims) == 0}
    at = {b: program.buffer[b].type.substitute(dims) for b in kernel.buffers}
    ranges = KernelRanges(kernel.substitute(dims), at, lambda buffer: Range())
    for s, axis, place, size in ranges.accesses():
        if kernel.stmt_level(s) & empty:  # it never runs
            continue
        if not by_data(s.index[axis]) and not place.within(inside(size)):
            _outside(kernel, s, axis, size, f"{s.index[axis]} is not inside")


def _outside(kernel: Kernel, s: Stmt, axis: int, size: Size, why: str) -> NoReturn:
    error = TypeRuleError(f"kernel {kernel.name}: axis {axis} of {s.buffer} has {size}, and {why}")
    raise _pointing(error, str(s), f"{s.buffer}[")


def _verify_buffers(program: Program) -> None:
    known: dict[str, Buffer] = {}
    for b in program.buffers:
        line = b
        _demand(b.name not in known, f"the buffer {b.name} is defined twice", line, b.name)
        check_name(b.name)
        _demand(b.kind in KINDS, f"{b.kind!r} is no kind of buffer; there are {', '.join(KINDS)}", line, b.kind)
        if b.alias:
            _demand(
                b.alias in known, f"{b.name} is an alias of {b.alias}, which is not defined before it", line, b.alias
            )
            other = known[b.alias].type
            fits = b.type.dtype.itemsize == other.dtype.itemsize and same(b.type.count, other.count)
            _demand(fits, f"{b.name}: {b.type} has other bytes than {b.alias}: {other}", line, str(b.type))
        if b.kind == "const" and not b.alias:
            count = b.type.count
            _demand(
                count == len(b.value),
                f"{b.name}: {b.type} has {count} elements, its value {len(b.value)}",
                line,
                str(b.type),
            )
        known[b.name] = b
    _verify_slots(program.buffers, "temp")
    _verify_forwarded(program)


def _verify_forwarded(program: Program) -> None:
    """One kernel, or a choice of some, writes a forwarded buffer, and the next one, which nothing else does, reads it
    row by row.
    """
    for b in program.of_kind("forwarded"):
        writers, readers = (
            [number for number, step in enumerate(program.steps) if b.name in getattr(step, how)]
            for how in ("writes", "reads")
        )
        alone = len(writers) == len(readers) == 1 and readers[0] == writers[0] + 1
        first, then = (program.steps[at[0]] if alone else None for at in (writers, readers))
        handed = isinstance(then, Kernel) and then.reads_own_rows(b.name, b.type)
        kernels = alternatives(first) if isinstance(first, (Kernel, Select)) else ()
        handed = handed and any(isinstance(k, Kernel) and k.finishes_rows(b.name, b.type) for k in kernels)
        _demand(handed, f"the rows of {b.name} are not handed from one kernel to the next", b, b.name)
        shared = program.sharing[b.name]
        _demand(shared == (b.name,) and not b.alias, f"{b.name} has no memory to share", b, b.name)


def _verify_batches(program: Program) -> None:
    """No step of a batch touches what another one writes, but for rows that one hands to the next."""
    last = 0
    for begin, end in program.batches:
        what = f"a batch of the steps {begin} to {end - 1}"
        _demand(last <= begin < end - 1 and end <= len(program.steps), f"{what} of {len(program.steps)}", program, what)
        last = end
        reads: dict[str, int] = {}
        writes: dict[str, int] = {}
        for number, step in enumerate(program.steps[begin:end], begin):
            _demand(not isinstance(step, Loop), f"{what} has a loop", step, what)
            unit = number - (number - 1 in program.forwards)
            for name in {program.root(b) for b in step.writes}:
                others = {writes.setdefault(name, unit), reads.get(name, unit)}
                _demand(others == {unit}, f"{what}: another one touches {name}, which step {number} writes", step, name)
            for name in {program.root(b) for b in step.reads}:
                _demand(
                    writes.get(name, unit) == unit,
                    f"{what}: step {number} reads {name}, which another one writes",
                    step,
                    name,
                )
                reads.setdefault(name, unit)


def _verify_slots(buffers: Iterable[Buffer], kind: str) -> None:
    """Slots are numbered from 0 and belong to buffers of one kind; each slot has one that is provably its largest."""
    slots: dict[int, list[Buffer]] = {}
    for b in buffers:
        if b.slot >= 0:
            _demand(
                b.kind == kind and not b.alias,
                f"{b.name} has the slot {b.slot}, and only {kind}s of their own have one",
                b,
                "slot",
            )
            slots.setdefault(b.slot, []).append(b)
    for number, (slot, sharing) in enumerate(sorted(slots.items())):
        line = sharing[0]
        _demand(slot == number, f"{sharing[0].name} has the slot {slot}, and there is no slot {number}", line, "slot")
        held = any(all(known_nonnegative(large.type.nbytes - b.type.nbytes) for b in sharing) for large in sharing)
        _demand(
            held,
            f"none of {', '.join(b.name for b in sharing)} is known to be the largest, and they share the slot {slot}",
            line,
            "slot",
        )


def _verify_names(program: Program) -> None:
    """Kernels with the same name have the same structure, because they share a binary."""
    types = program.types
    named: dict[str, Kernel] = {}
    forms: dict[str, object] = {}
    for kernel in program.kernels:
        first = named.setdefault(kernel.name, kernel)
        if first is not kernel and kernel.name not in forms:
            forms[kernel.name] = first.canonical(types)
        equal = first is kernel or forms[kernel.name] == kernel.canonical(types)
        _demand(
            equal,
            f"two kernels are called {kernel.name}, and they differ",
            kernel,
            kernel.name,
        )


def _verify_output(name: str, buffer: str, program: Program, written: set[str]) -> None:
    line = f"return {name}={buffer}"
    check_name(name)
    _demand(buffer in program.buffer, f"the output {name} is the buffer {buffer}, which is not defined", line, buffer)
    kind = program.buffer[program.root(buffer)].kind
    _demand(
        kind not in ("temp", "forwarded") or program.buffer[buffer].kind == "output",
        f"the output {name} is the {kind} {buffer}, whose bytes are given back",
        line,
        buffer,
    )
    _demand(program.root(buffer) in written, f"the output {name} is never written", line, buffer)


def _verify_select(step: Select, program: Program, written: Collection[str]) -> None:
    line = str(step).partition("\n")[0]
    last = len(step.cases) - 1
    names = step.sample.names if step.sample else ()
    if step.sample is not None:
        _verify_sample(step, step.sample, program, written)
    for position, (when, kernel) in enumerate(step.cases):
        _demand(
            (when is None) == (position == last),
            f"select {step.name}: the last case, and only that, has no condition",
            line,
            "select",
        )
        _demand(
            when is None or (bool(when.conjunctions) and all(when.conjunctions)),
            f"select {step.name}: a condition without a comparison",
            line,
            "select",
        )
        for name in sorted(
            frozenset().union(*(symbols(c.left) | symbols(c.right) for c in when.comparisons)) if when else ()
        ):
            _demand(
                name in program.dims or name in names,
                f"select {step.name}: no buffer or kernel has the dim {name}",
                line,
                name,
            )
        for each in when.comparisons if when else ():
            _demand(
                not (symbols(each.left) | symbols(each.right)) & {*names}
                or (each.relation == ">=" and rises(each.left, names) and rises(each.right, names)),
                f"select {step.name}: {each.comparison} does not say where a sample's numbers reach it",
                line,
                "select",
            )
        roots = [{program.root(b) for b in k.writes if b in program.buffer} for k in (step.cases[0][1], kernel)]
        _demand(
            roots[0] == roots[1],
            f"select {step.name}: the cases write {sorted(roots[0])} and {sorted(roots[1])}",
            line,
            "select",
        )


def _verify_sample(step: Select, sample: Sample, program: Program, written: Collection[str]) -> None:
    line = str(step).partition("\n")[0]
    for name in sample.names:
        check_name(name)
        _demand(
            name not in program.dims and sample.names.count(name) == 1, f"a sample's {name}, which is taken", line, name
        )
    seen = program.buffer.get(sample.buffer)
    _demand(
        seen is not None and seen.type.dtype.name in ("i32", "i64") and program.root(sample.buffer) in written,
        f"a sample of {sample.buffer}, which is no buffer of i32 or i64 that is written before",
        line,
        f" of {sample.buffer}",
    )
    _demand(  # whose memory is kept for them
        all(sample.buffer in kernel.reads for _, kernel in step.cases),
        f"a sample of {sample.buffer}, which not every kernel of the select reads",
        line,
        f" of {sample.buffer}",
    )


def _verify_loop(loop: Loop, program: Program) -> None:
    """A loop binds symbols of its own, its buffers are blocks, and no other block touches what its steps write."""
    line = str(loop).partition("\n")[0]
    outside = replace(program, steps=tuple(step for step in program.steps if not isinstance(step, Loop)))
    outer = set(outside.dims).union(
        *(symbols(size) for own in program.loops for size in own.sizes if size is not own.to)
    )
    outer |= {name for other in program.loops if other is not loop for name in other.symbols}
    for name in loop.symbols:
        check_name(name)
        _demand(
            name not in outer and loop.symbols.count(name) == 1, f"the loop binds {name}, which is taken", line, name
        )
    _demand(known_nonnegative(loop.by - 1), f"blocks of {loop.by} rows: 1 at least", line, "by(")
    every = Counter(b.name for b in (*program.buffers, *(b for other in program.loops for b in other.buffers)))
    for b in loop.buffers:
        check_name(b.name)
        _demand(b.kind in ("block", "carry") and not b.alias, f"{b.name} is no block", str(b), b.name)
        _demand(every[b.name] == 1, f"the buffer {b.name} is defined twice", str(b), b.name)
    if loop.cols:
        rise = loop.to - substitute(loop.to, {loop.rows[0]: 0})
        _demand(
            symbols(loop.to) <= outer | {loop.rows[0], loop.count} and known_nonnegative(rise),
            f"{loop.to} does not rise with {loop.rows[0]}",
            line,
            "to(",
        )
    for blocks in (loop.blocks, *(sweep.blocks for sweep in loop.sweeps)):
        _verify_slots(blocks, "block")
    _verify_sweeps(loop, outer)
    axes = {name for name, _ in loop.over}
    _demand(set(loop.sequential) <= axes, "sequential names no axis that it goes over", line, "seq")
    _verify_own_parts(loop, program, every)


def _verify_own_parts(loop: Loop, program: Program, defined: Collection[str]) -> None:
    """Each block of a loop writes a part of its own of the buffers outside, and none touches what another writes.

    :param defined: the names of all buffers.
    """
    own, sequential = {b.name for b in loop.buffers}, set(loop.sequential)
    made: dict[str, set[object]] = {}
    swept = {id(step): sweep for sweep in loop.sweeps for step in sweep.steps}
    for step in loop.items:
        sweep = swept.get(id(step))
        for access in step.accesses:
            _demand(access.buffer in defined, f"the buffer {access.buffer} is not defined", step, step.name)
            if access.buffer in own:
                continue
            part = _own_part(access, loop, sweep, step)
            writes = access.buffer in step.writes
            rows = {p for p in part if p is not None and p[1] == loop.rows[0]}
            over = {p[1] for p in part if p is not None}
            own_columns = sweep is None or sweep.cols[0] in over
            adds = isinstance(step, Call) and step.add and access is step.out
            own_order = set[str]() if adds else sequential
            if writes:
                kept = not loop.sweeps or isinstance(access, Operand) or access.op == "store"
                _demand(kept, f"{step.name} combines with all of {access.buffer}", step, step.name)
                every_column = adds or sweep is None or (sweep.since == 0 and sweep.to is None)
                _demand(every_column, f"{step.name} leaves columns of {access.buffer} unwritten", step, step.name)
                _demand(
                    over >= {name for name, _ in loop.over} - own_order and (bool(rows) is not adds) and own_columns,
                    f"{step.name} writes {access.buffer} where another block does",
                    str(step).partition("\n")[0],
                    step.name,
                )
                made.setdefault(program.root(access.buffer), set()).add((access.buffer, part, adds))
    for step in loop.items:
        for access in step.accesses:
            root = program.root(access.buffer)
            if root in made and access.buffer not in own:
                part = _own_part(access, loop, swept.get(id(step)), step)
                _demand(
                    made[root] == {(access.buffer, part, False)} or (isinstance(step, Call) and access is step.out),
                    f"{step.name} touches {access.buffer}, which another block writes",
                    str(step).partition("\n")[0],
                    step.name,
                )


def _verify_sweeps(loop: Loop, outer: set[str]) -> None:
    """Bounds of blocks of columns; carries have one writer each, and are read where they are defined."""
    line = _first_line(loop)
    _demand(not (loop.cols and loop.sweeps), "the columns of a loop with sweeps are cut by these", line, "cols(")
    if loop.tile:
        fits = loop.tile.mapping in TILE_MAPPINGS and 1 <= loop.tile.warps <= 32 and 1 <= loop.tile.stages <= 8
        fits = fits and loop.tile.split >= 1 and loop.tile.warps % loop.tile.split == 0 and loop.tile.parts >= 1
        known = (
            f"{', '.join(TILE_MAPPINGS)}, 1 to 32 warps, 1 to 8 stages, split among a part of the warps, 1 part or more"
        )
        _demand(bool(loop.sweeps), "a tile has blocks of columns, and the loop has no sweep", line, "tile(")
        _demand(fits, f"there is no such tile; there are {known}", line, "tile(")
    bound = outer | {loop.rows[0], loop.count, *(name for name, _ in loop.over)}
    private = {b.name: sweep for sweep in loop.sweeps for b in sweep.buffers}
    for number, sweep in enumerate(loop.sweeps):
        line = _first_line(sweep)
        _demand(known_nonnegative(sweep.by - 1), f"blocks of {sweep.by} columns: 1 at least", line, "by(")
        for word, size in (("from(", sweep.since), ("to(", sweep.to)):
            if size is not None:
                _demand(symbols(size) <= bound, f"{size} is no size of a block of rows", line, word)
        carried = {carry.name: carry for carry in sweep.carries}
        for carry in sweep.carries:
            _verify_carry(carry, carried, loop, sweep)
        finished = {c.name for other in loop.sweeps[:number] for c in other.carries}
        for step in sweep.steps:
            _verify_scope(step, private, {*finished, *(b.name for b in sweep.buffers)}, finished)
            blocks = {b.name for b in loop.blocks} & {*step.writes}
            _demand(not blocks, f"{step.name} writes {min(blocks, default='')}, of all columns", step, step.name)
    finished = {c.name for sweep in loop.sweeps for c in sweep.carries}
    for step in loop.steps:
        _verify_scope(step, private, finished, finished)


def _verify_scope(step: Kernel | Call, private: Mapping[str, object], seen: set[str], finished: set[str]) -> None:
    """A step sees of the buffers of sweeps those of its own, and the carries of those before, which it leaves."""
    for name in dict.fromkeys((*step.reads, *step.writes)):
        _demand(name not in private or name in seen, f"{step.name} touches {name} of another sweep", step, step.name)
        _demand(name not in finished or name not in step.writes, f"{step.name} writes {name}", step, step.name)


def _verify_carry(carry: Carry, carried: Mapping[str, Carry], loop: Loop, sweep: Sweep) -> None:
    """A carry has a row for each of the block's; one statement or product combines with it; steps before that, and all
    in the sweep if it is a sum, do not read it.
    """
    own, shape = symbol(loop.count), carry.type.shape
    _demand(
        carry.combine in COMBINES,
        f"combines by {carry.combine!r}; there are {', '.join(COMBINES)}",
        carry,
        carry.combine,
    )
    rows = bool(shape) and same(shape[0], own) and not any(symbols(size) & {*sweep.symbols} for size in shape)
    _demand(rows, f"{carry.name}: {carry.type} does not begin with the {own} rows of a block", carry, str(carry.type))
    if carry.by:
        base = carried.get(carry.by)
        _demand(
            base is not None and base.combine == "max" and base.type.rank == 1 and base.type.dtype.is_float,
            f"{carry.by} is no maximum of floats, one for each row, that the sweep carries",
            carry,
            carry.by,
        )
        _demand(carry.combine == "sum" and carry.type.dtype.is_float, f"only a sum is by exp({carry.by})", carry, "by")
    writers = [step for step in sweep.steps if carry.name in step.writes]
    _demand(len(writers) == 1, f"{len(writers)} steps combine with {carry.name}: 1 does", carry, carry.name)
    (writer,) = writers
    writes: list[Stmt] | list[Operand]
    if isinstance(writer, Kernel):
        writes = [s for s in writer.accesses if s.buffer == carry.name and s.op in ("store", "accum")]
        combines = all(s.op == "accum" and s.combine == carry.combine for s in writes)
        axes = dict((*writer.rows, *writer.cols))
    else:
        writes, combines, axes = [writer.out], writer.add and carry.combine == "sum", dict(writer.axes)
    _demand(
        len(writes) == 1 and combines,
        f"{writer.name} does not combine with {carry.name} by {carry.combine}, once",
        writer,
        writer.name,
    )
    variable = writes[0].index[0].variable if writes[0].index else None
    whole = variable in axes and same(axes[str(variable)], own)
    _demand(whole, f"{writer.name} does not combine each row with its own of {carry.name}", writer, writer.name)
    at = sweep.steps.index(writer)
    for number, step in enumerate(sweep.steps):
        if carry.by in step.writes and carry.by:
            _demand(number < at, f"{step.name} raises {carry.by} after {carry.name} was summed", step, step.name)
        reads = carry.name in step.reads
        partial = carry.combine not in ("max", "min")
        _demand(
            not reads or not partial, f"{step.name} reads {carry.name} before all columns are in it", step, step.name
        )
        _demand(not reads or number > at, f"{step.name} reads {carry.name} before the block is in it", step, step.name)


def _own_part(
    access: Stmt | Operand, loop: Loop, sweep: Sweep | None, step: Kernel | Call
) -> tuple[tuple[int, str] | None, ...]:
    """For each axis of a buffer, what keeps the access in the block's own part of it: (axis, symbol of the loop)."""
    axes = dict((*step.rows, *step.cols) if isinstance(step, Kernel) else step.axes)
    counts = {loop.rows[0]: loop.count} | ({sweep.cols[0]: sweep.count} if sweep else {})
    part: list[tuple[int, str] | None] = []
    for at, index in enumerate(access.index):
        name = str(index.const)
        cut = name in counts and len(index.terms) == 1 and index.terms[0][1] == 1
        cut = cut and same(axes.get(index.terms[0][0], 0), symbol(counts[name]))
        part.append((at, name) if cut or (not index.terms and name in dict(loop.over)) else None)
    return tuple(part)


_SIZES = {"in_bounds": ("hi", "lo"), "check": ("bound",), "size": ("size",), "clamp_index": ("size",)}
"""The attributes of statements that are sizes."""


def _demand(holds: bool, message: str, at: object, part: str, start: int = 0) -> None:
    """:param at: what is wrong; its text's first line is shown."""
    if not holds:
        raise _pointing(TypeRuleError(message), _first_line(at), part, start)


def _first_line(at: object) -> str:
    return str(at).partition("\n")[0]


@dataclass
class _StepCheck:
    """The checks common to kernels and calls.

    :param at: what is looked at, whose text an error shows: few are wrong, and texts take long.
    """

    step: Kernel | Call
    program: Program
    at: object = ""
    loop: Loop | None = None

    def wrong(self, message: str, part: str, start: int = 0) -> NoReturn:
        kind = "kernel" if isinstance(self.step, Kernel) else "call"
        raise _pointing(TypeRuleError(f"{kind} {self.step.name}: {message}"), _first_line(self.at), part, start)

    def axes(self, axes: Iterable[Axis]) -> dict[str, DType]:
        dtypes: dict[str, DType] = {}
        for name, size in axes:
            if name in dtypes:
                self.wrong(f"the axis {name} is named twice", f"{name}:")
            if isinstance(size, int) and size < 0:
                self.wrong(f"the axis {name} has the size {size}", f"{name}:")
            dtypes[name] = I64
        return dtypes

    def access(self, operand: Operand, known: Mapping[str, DType]) -> Buffer:
        """The buffer of an access; its index must have the buffer's rank and use known axes and integer values."""
        buffer = self.program.buffer.get(operand.buffer)
        if buffer is None:
            self.wrong(f"the buffer {operand.buffer} is not defined", operand.buffer)
        if len(operand.index) != buffer.type.rank:
            self.wrong(
                f"{buffer.name}: {buffer.type} has rank {buffer.type.rank}, the index {len(operand.index)} parts",
                f"{operand.buffer}[",
            )
        self.indices(operand.index, known)
        return buffer

    def indices(self, index: tuple[Index, ...], known: Mapping[str, DType]) -> None:
        for variable in (v for part in index for v, _ in part.terms):
            if variable not in known:
                problem = (
                    f"{variable} is used before its definition"
                    if variable.startswith("%")
                    else f"there is no axis {variable}"
                )
                self.wrong(problem, variable)
            if not known[variable].is_integer:
                self.wrong(f"{variable} is an index, but {known[variable]} is no integer", variable)

    def written(self, names: Iterable[str], written: set[str]) -> None:
        for name in names:
            if self.program.root(name) not in written:
                self.wrong(f"{name} is read before anything is written to it", f"{name}[")

    def writable(self, name: str) -> None:
        kind = self.program.buffer[self.program.root(name)].kind
        if kind in ("input", "const"):
            self.wrong(f"writes {name}, which is {'an input' if kind == 'input' else 'a constant'}", f"{name}[")


class _CallCheck(_StepCheck):
    def run(self, written: set[str]) -> None:
        call = self.step
        assert isinstance(call, Call)
        self.at = call
        if call.op not in REGISTRY:
            self.wrong(f"there is no op {call.op!r}", call.op)
        op = REGISTRY[call.op]
        if not isinstance(op, Library) or any(len(s.operands) != len(call.args) for s in op.samples[:1]):
            self.wrong(f"{call.op} of {len(call.args)} operands is no library call", call.op)
        known = self.axes((*call.axes, *(part for _, own in call.parts for part in own)))
        self.parted(call, op)
        for operand in call.accesses:
            self.access(operand, known)
        self.converted(call, op)
        if call.epilogue:
            self.ended(call, op)
        self.typed(call, op)
        self.written(call.reads, written)
        for name in call.writes:
            self.writable(name)

    def parted(self, call: Call, op: Library) -> None:
        """Parts make up an axis of a product; operands that use them are not converted or scaled."""
        axes = dict(call.axes)
        batch = {i.variable for i in call.out.index[:-2]}
        for axis, own in call.parts:
            if not op.contraction or axis not in axes or axis in batch or self.loop:
                self.wrong(f"{axis} is no axis of a product that has parts", f"{axis}:")
            if not 2 <= len(own) <= MOST_PARTS or not same(product(size for _, size in own), axes[axis]):
                self.wrong(f"{len(own)} parts do not make up the axis {axis} of {axes[axis]}", f"{axis}: (")
        names = {part for _, own in call.parts for part, _ in own}
        dtype = self.program.buffer[call.out.buffer].type.dtype if call.out.buffer in self.program.buffer else None
        for operand in call.args:
            if names & {v for i in operand.index for v, _ in i.terms}:
                buffer = self.program.buffer.get(operand.buffer)
                if operand.scale or operand.per or (buffer and buffer.type.dtype is not dtype):
                    self.wrong(f"{operand.buffer} is converted or scaled, and goes along parts", f"{operand.buffer}[")

    def typed(self, call: Call, op: Library) -> None:
        """The op's type rule for the operands as the call sees them gives the result's type."""
        axes, out = dict(call.axes), self.program.buffer[call.out.buffer].type
        whole = self.window(call) if self.loop else len(call.result_axes) == out.rank
        if not whole or (not self.loop and any(i.variable not in axes for i in call.out.index)):
            self.wrong("the index of the result is one axis at each place", f"{call.out.buffer}[")
        if call.add and not (self.loop and op.contraction):
            self.wrong("only a product in a loop adds to its result", "+=")
        shape = tuple(axes[a] for a in call.result_axes)
        types = []
        for number, (operand, own) in enumerate(zip(call.args, call.views, strict=True)):
            parts = {part for a in own for part, _ in call.finest[a]}
            used = {v for i in operand.index for v, _ in i.terms} - {*own, *parts}
            if used:
                self.wrong(f"{call.op} does not go along {min(used)} of {operand.buffer}", f"{operand.buffer}[")
            if operand.scale and number not in op.scales:
                self.wrong(f"{call.op} scales no such operand", f"{operand.scale.buffer}[")
            dtype = out.dtype if number in op.converts else self.program.buffer[operand.buffer].type.dtype
            types.append(Type(dtype, tuple(axes[a] for a in own)))
        if tuple(name for name, _ in call.attrs) != op.carries:
            self.wrong(f"{call.op} carries the attributes {', '.join(op.carries) or 'none'}", call.op)
        try:
            given, canonical = op.type_of(types, {**op.attributes(shape), **dict(call.attrs)})
        except TypeRuleError as error:
            self.wrong(str(error), call.op)
        if different := next((name for name, value in call.attrs if canonical[name] != value), ""):
            self.wrong(f"{different} is written {format_value(canonical[different])}", f"{different}=")
        if given.dtype is not out.dtype or not all(map(same, given.shape, shape)):
            self.wrong(f"the result is {given}, and {call.out.buffer} is {out}", f"{call.out.buffer}[")

    def window(self, call: Call) -> bool:
        """Whether the rows of the result of a call in a loop are evenly spaced: positions, part of an axis, whole axes
        in any order, the last of which may be a part of the buffer's.
        """
        axes, shape = dict(call.axes), self.program.buffer[call.out.buffer].type.shape
        begun = False
        for place, (index, size) in enumerate(zip(call.out.index, shape, strict=True)):
            if len(index.terms) > 1 or any(v not in axes or c != 1 for v, c in index.terms):
                return False
            whole = index.terms and index.const == 0 and same(axes[index.terms[0][0]], size)
            if index.terms and begun and not whole and place < len(shape) - 1:
                return False
            if begun and not index.terms:
                return False
            begun = begun or bool(index.terms)
        found = [v for i in call.out.index for v, _ in i.terms]
        return sorted(found) == sorted(call.result_axes) and found[-1:] == call.result_axes[-1:]

    def ended(self, call: Call, op: Library) -> None:
        """An epilogue's vectors go along an axis of the whole result, its matrix is like it; all are in its dtype.
        What it writes is memory of its own.
        """
        epilogue, out = call.epilogue, self.program.buffer[call.out.buffer].type
        if not op.contraction or call.add or self.loop:
            self.wrong("only a product outside of loops has a bias or another epilogue", f"{call.out.buffer}[")
        if epilogue.form not in FORMS:
            self.wrong(f"there is no epilogue {str(epilogue).strip()!r} in one call", call.op)
        if bias := epilogue.bias:
            self.vector(call, "bias", bias, call.result_axes[-1])
        if not epilogue.beyond_bias:
            return
        read = {self.program.buffer[o.buffer].type.dtype for o in call.operands}
        along = [i.variable for i in call.out.index]
        if len(call.axes) != 3 or along != call.result_axes or call.parts or read != {out.dtype}:
            self.wrong("only a product of two matrices in one dtype has an epilogue beyond a bias", call.op)
        if not all(map(same, (dict(call.axes)[axis] for axis in call.result_axes), out.shape)):
            self.wrong(f"an epilogue beyond a bias is of all of {call.out.buffer}, {out}", f"{call.out.buffer}[")
        if argument := epilogue.argument:
            given = self.program.buffer[argument.buffer].type
            like = given.dtype is out.dtype and all(map(same, given.shape, out.shape))
            if argument.index != call.out.index or not like:
                self.wrong(f"{argument.buffer} is {given}, and no matrix like the result, {out}", f"{argument.buffer}[")
        if sums := epilogue.sums:
            self.vector(call, "sum", sums, call.result_axes[0 if epilogue.summed == "first" else -1])
        memory = [self.program.root(o.buffer) for o in (*call.results, *call.operands)]
        for result in call.results:
            if memory.count(self.program.root(result.buffer)) > 1:
                self.wrong(f"{result.buffer} is memory that the call has for something else", f"{result.buffer}[")

    def vector(self, call: Call, what: str, operand: Operand, axis: str) -> None:
        along = [i.variable for i in operand.index]
        columns = axis == call.result_axes[-1]
        place = [i.variable for i in call.out.index][-1 if columns else 0]
        if along != [axis] or place != axis:
            which = "columns" if columns else "rows"
            self.wrong(f"a {what} goes along {axis}, the {which} of the result", f"{operand.buffer}[")
        wanted = Type(self.program.buffer[call.out.buffer].type.dtype, (dict(call.axes)[axis],))
        given = self.program.buffer[operand.buffer].type
        if given.dtype is not wanted.dtype or not same(given.shape[0], wanted.shape[0]):
            self.wrong(f"the {what} {operand.buffer} is {given}, not {wanted}", f"{operand.buffer}[")

    def converted(self, call: Call, op: Library) -> None:
        """Operands that are converted and scaled as they are read."""
        own = self.program.buffer[call.out.buffer].type.dtype
        for operand in (call.args[number] for number in op.converts):
            dtype = self.program.buffer[operand.buffer].type.dtype
            if dtype is not own and not own.holds(dtype):
                self.wrong(f"{operand.buffer} is {dtype}, and {own} does not hold its values", operand.buffer)
            divided = dict(operand.scale.per) if operand.scale else {}
            batch = {i.variable for i in call.out.index[:-2]}
            if (
                operand.per
                or not divided.keys() <= {axis for axis, _ in call.axes} - batch
                or any(isinstance(n, int) and n < 1 for n in divided.values())
            ):
                self.wrong(
                    "per divides axes of the product, not of its batch, by sizes from 1, in the index of a scale", "per"
                )
            if operand.scale and self.program.buffer[operand.scale.buffer].type.dtype is not own:
                self.wrong(
                    f"the scale {operand.scale.buffer} is {self.program.buffer[operand.scale.buffer].type.dtype}, not"
                    f" {own}",
                    operand.scale.buffer,
                )


class _KernelCheck(_StepCheck):
    def run(self, written: set[str]) -> None:
        kernel = self.step
        assert isinstance(kernel, Kernel)
        self.at = kernel
        check_name(kernel.name)
        known = self.axes((*kernel.rows, *kernel.cols))
        for s in kernel.body:
            self.at = s
            self.statement(s, known, written)
            if s.name:
                assert s.dtype is not None
                known[s.name] = s.dtype
        for s in kernel.body:
            self.at = s
            if s.op == "store":
                self.covers(s, kernel)
        self.scans(kernel)
        self.at = kernel
        self.strategies(kernel)

    def statement(self, s: Stmt, known: Mapping[str, DType], written: set[str]) -> None:
        effect = s.op in ("store", "accum", "check")
        if effect == bool(s.name) or (s.name and s.dtype is None):
            self.wrong("an effect has no name" if effect else "a value has a name and a dtype", s.op)
        if s.name and (s.name in known or not s.name.startswith("%")):
            self.wrong(
                f"{s.name} is defined twice" if s.name in known else f"{s.name!r} is no name for a value", s.name
            )
        for value in s.uses:
            if value not in known:
                self.wrong(f"{value} is used before its definition", value, len(s.name))
        if s.where and s.op not in MASKED:
            self.wrong(f"a {s.op} has no mask", f"where {s.where}")
        if s.where and known[s.where] is not BOOL:
            self.wrong(f"{s.where} is a mask, but {known[s.where]} is not bool", f"where {s.where}")
        if s.op in ("load", "search", "store", "accum"):
            self.memory(s, known, written)
        else:
            self.indices(s.index, known)
            if s.buffer:
                self.wrong(f"{s.op} names the buffer {s.buffer}", f"{s.buffer}[")
        args = [known[a] for a in s.args]
        wanted = self.result(s, args)
        if wanted is not None and s.dtype is not wanted:
            self.wrong(f"{s.op}({', '.join(map(str, args))}) is {wanted}, the statement says {s.dtype}", f": {s.dtype}")

    def memory(self, s: Stmt, known: Mapping[str, DType], written: set[str]) -> None:
        buffer = self.access(Operand(s.buffer, s.index), known)
        if s.op in ("load", "search"):
            self.written([s.buffer], written)
            if s.op == "search" and not (buffer.type.dtype.is_integer and known[s.args[0]].is_integer):
                self.wrong(
                    f"searches {buffer.name}: {buffer.type} for a value of {known[s.args[0]]}; both are integers",
                    f"{s.buffer}[",
                )
            if s.op == "load" and s.dtype is not buffer.type.dtype:
                self.wrong(f"loads {s.dtype} from {buffer.name}: {buffer.type}", f": {s.dtype}")
            return
        self.writable(s.buffer)
        if s.op == "store" and s.where and self.program.root(s.buffer) not in written:
            self.wrong(
                f"a mask leaves elements of {s.buffer} as they are, and nothing is written to them", f"{s.buffer}["
            )
        if len(s.args) != 1:
            self.wrong(f"{s.op} takes 1 value, got {len(s.args)}", s.op)
        dtype = known[s.args[0]]
        if s.op == "store" and dtype is not buffer.type.dtype:
            self.wrong(f"stores {dtype} to {buffer.name}: {buffer.type}", f"<- {s.args[0]}")
        if s.op == "accum" and dtype.kind != buffer.type.dtype.kind:
            self.wrong(f"adds {dtype} to {buffer.name}: {buffer.type}", f"<- {s.args[0]}")
        if s.op == "accum" and s.combine not in COMBINES:
            self.wrong(f"combines by {s.combine!r}; there are {', '.join(COMBINES)}", s.op)

    def result(self, s: Stmt, args: list[DType]) -> DType | None:
        """The dtype that a rule prescribes for the statement's value, or None."""
        count = {
            "load": 0,
            "search": 1,
            "const": 0,
            "size": 0,
            "index": 0,
            "in_bounds": 0,
            "check": 1,
            "clamp_index": 1,
            "scan": 2 if s.combine == "affine" else 1,
            **dict.fromkeys(REDUCTIONS, 1),
        }.get(s.op)
        if count is not None and len(args) != count and not (s.op == "check" and len(args) == 2):
            self.wrong(f"{s.op} takes {count} values, got {len(args)}", s.op)
        for needed in {
            "const": ("value",),
            "size": ("size",),
            "in_bounds": ("hi", "lo"),
            "check": ("bound", "op", "source"),
            "scan": ("combine", "reverse"),
        }.get(s.op, ()):
            if needed not in dict(s.attrs):
                self.wrong(f"{s.op}: the attribute {needed} is missing", s.op)
        for name, value in s.attrs:
            if name in _SIZES.get(s.op, ()) and (isinstance(value, bool) or not isinstance(value, int | Dim)):
                self.wrong(f"{s.op}: {name}={value} is no size", f"{name}=")
        if s.op in ("index", "in_bounds") and len(s.index) != 1:
            self.wrong(f"{s.op} takes one index, got {len(s.index)}", s.op)
        for value, dtype in zip(s.args, args, strict=True):
            if s.op == "check" and not dtype.is_integer:
                self.wrong(f"checks {value}, but {dtype} is no integer", value)
        if s.op == "scan":
            return self.scanned(s, args)
        if s.op in ("argmax_cols", "argmin_cols", "size", "search"):
            return I64
        if s.op == "in_bounds":
            return BOOL
        if count is not None or s.op in ("store", "accum"):
            return None
        op = REGISTRY.get(s.op)
        if op is None:
            self.wrong(f"there is no statement {s.op!r}", s.op)
        try:
            attrs = {name: value for name, value in s.attrs if name in op.parameters}
            result: DType = op.type_of([Type(d) for d in args], attrs)[0].dtype
        except TypeRuleError as error:
            self.wrong(str(error), s.op, len(s.name))
        return result

    def scanned(self, s: Stmt, args: list[DType]) -> DType:
        """The dtype of a scan, whose attributes and operands are looked at."""
        if s.combine not in SCANS:
            self.wrong(f"scans by {s.combine!r}; there are {', '.join(SCANS)}", s.op)
        if not isinstance(s.attr("reverse"), bool):
            self.wrong(f"scan: reverse={s.attr('reverse')} is no bool", "reverse=")
        if s.combine in ("logsumexp", "affine") and not all(dtype.is_float and dtype is args[0] for dtype in args):
            self.wrong(f"a scan by {s.combine} of {', '.join(map(str, args))}: it takes floats of one dtype", s.op)
        return I64 if s.combine in ("argmax", "argmin") else args[0]

    def scans(self, kernel: Kernel) -> None:
        """A pass visits the columns of one axis in one direction."""
        first = next(iter(kernel.scans), None)
        for s in kernel.scans:
            self.at = s
            assert first is not None
            if len(kernel.cols) != 1:
                self.wrong(f"scans {len(kernel.cols)} axes of columns; a scan goes along one", s.op)
            if s.attr("reverse") is not first.attr("reverse"):
                self.wrong(f"{first.name} scans the columns in the other direction", "reverse=")
        for s in kernel.body if kernel.descending else ():
            self.at = s
            if s.op in ("argmax_cols", "argmin_cols"):
                self.wrong("the first of equals is not known in a kernel that scans its columns in reverse", s.op)

    def covers(self, s: Stmt, kernel: Kernel) -> None:
        """A store writes each element once: its index must depend on every axis that its value depends on, and that has
        more than one position.
        """
        single = {axis for axis, size in (*kernel.rows, *kernel.cols) if size == 1}
        level = frozenset(v for i in s.index for v, _ in i.terms if not v.startswith("%"))
        level = level.union(*(kernel.levels[v] for i in s.index for v, _ in i.terms if v.startswith("%")))
        for axis in sorted(kernel.levels[s.args[0]] - level - single):
            self.wrong(
                f"stores a value that varies along {axis} at an index that does not: {s.buffer} is written more than"
                " once",
                f"{s.buffer}[",
            )

    def strategies(self, kernel: Kernel) -> None:
        targets = {s.buffer for s in kernel.accums}
        for buffer, strategy in kernel.strategy:
            if buffer not in targets:
                self.wrong(f"a strategy for {buffer}, which no accum of it writes", f"{buffer}:")
            if strategy not in ROW_ORDERS:
                self.wrong(f"{strategy!r} is no strategy; there are {', '.join(sorted(ROW_ORDERS))}", strategy)
            if ROW_ORDERS[strategy] == "by key" and not _goes_along(kernel, buffer):
                self.wrong(
                    f"{buffer} is {strategy}, but the rows are in the order of {kernel.order or 'nothing'}",
                    f"{buffer}:",
                )
        if kernel.order and kernel.order not in targets:
            self.wrong(f"the order {kernel.order} is the buffer of none of its accums", f"order({kernel.order})")
