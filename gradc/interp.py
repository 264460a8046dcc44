"""Interpreter of Graphs and Programs in NumPy: the reference semantics for every target.

Each value is computed in its compute dtype (f32 for f16, bf16 and f8) and rounded to its own dtype.
``precision="f64"`` evaluates any stage with floats in f64 and without intermediate rounding, except that quantized
values (floats of at most 8 bits) keep their dtype.  ``precision="longdouble"`` does so in NumPy's long double, which
has 11 bits more than f64 on x86-64 and none on some machines: what f64 results are judged by.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import IndexOutOfRange, InvalidProblem
from .ir.dims import LARGEST, Dim, Size, assuming, evaluate, solved, substitute, symbols
from .ir.graph import Graph
from .ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Select, Step, Sweep, alternatives, taken
from .ir.node import REGISTRY, Node
from .ir.op import Composite
from .ir.statement import REDUCTIONS, Index, Operand, Stmt, neutral
from .ir.types import DTYPES, DType, Type, read
from .ir.walk import postorder, topological
from .ops.elementwise.pointwise import convert
from .ops.indexing.bags import count_not_above
from .ops.indexing.gathers import check_positions
from .ops.products.epilogues import applied
from .ops.reductions.scans import accumulate
from .ops.rules import UFUNCS, summing
from .process.forks import once_each
from .process.ieee import plain

Array = np.ndarray[Any, Any]
Wide = np.dtype[Any] | None
"""The dtype in which all floats are evaluated; None: each in its own."""
PRECISIONS: dict[str, Wide] = {"": None, "f64": np.dtype(np.float64), "longdouble": np.dtype(np.longdouble)}
_opened: weakref.WeakKeyDictionary[Graph, tuple[Sequence[Node], Mapping[Node, Node]]] = weakref.WeakKeyDictionary()
"""Graph -> what :func:`_open` gives, kept from run to run: finite differences run a graph many times."""
_registered: dict[str, Any] = {}
"""The ops that these were made with."""


def _open(graph: Graph) -> tuple[Sequence[Node], Mapping[Node, Node]]:
    """A graph's nodes but its inputs, with those that its composites are made of, each after what it is computed from;
    and of each composite the value that it is.

    Made anew after an op was registered anew: a composite may be made of that.
    """
    if REGISTRY != _registered:
        _opened.clear()
        _registered.clear()
        _registered.update(REGISTRY)
    if (found := _opened.get(graph)) is not None:
        return found
    order: dict[Node, None] = dict.fromkeys(graph.inputs)
    decomposed: dict[Node, Node] = {}

    def sources(node: Node) -> tuple[Node, ...]:
        if not isinstance(node.op, Composite):
            return node.operands
        if node not in decomposed:
            decomposed[node] = node.op.decompose(*node.operands, **node.attrs)
        return (decomposed[node],)

    with assuming(graph.assumptions):
        for node in postorder(topological(n for _, n in graph.outputs), order, sources):
            order[node] = None
    return _opened.setdefault(graph, ([*order][len(graph.inputs) :], decomposed))


def sizes_given(dims: Any, argument: str = "dims") -> dict[str, int]:
    """The caller's sizes by symbol; InvalidProblem if one is no size."""
    if dims is None:
        return {}
    if not isinstance(dims, Mapping):
        raise InvalidProblem(f"{argument}={dims!r}: it maps names of dims to sizes")
    sizes = {}
    for name, value in dims.items():
        try:
            sizes[name] = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            sizes[name] = -1
        if not 0 <= sizes[name] <= LARGEST:
            raise InvalidProblem(f"{argument}: {name}={value!r} is no size (an integer from 0)")
    return sizes


def by_name(
    callee: str, names: Collection[str], inputs: Any, extra: Sequence[Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a call: those of the mapping ``inputs`` and those given as keywords, ``more``.

    :param callee: the name of the called function, for errors.
    :param names: of its inputs.
    :param extra: further positional arguments, of which there may be none.
    :raises InvalidProblem: there are further positional arguments, or a name is not a string.
    """
    if inputs is None and not extra:
        return dict(more)
    if extra or not (inputs is None or isinstance(inputs, Mapping)):
        given = ", ".join(type(x).__name__ for x in ((inputs, *extra) if inputs is not None or extra else ()))
        example = ", ".join(f"{name}=..." if name.isidentifier() else f"**{{{name!r}: ...}}" for name in names)
        raise InvalidProblem(
            f"{callee} takes its inputs by name, {callee}({example}), or as one dict of them; it was given {given}"
            " without names"
        )
    unnamed = [name for name in inputs or () if not isinstance(name, str)]
    if unnamed:
        raise InvalidProblem(f"inputs are given by name, and {str(unnamed[0])[:60]!r} is a {type(unnamed[0]).__name__}")
    return {**(inputs or {}), **more}


def refuse_inputs_as_options(callee: str, needed: Collection[str], inputs: Mapping[str, Any], **options: Any) -> None:
    """Refuses an option of a call that is called as an input which the call needs and is not given.

    :raises InvalidProblem: as said.
    """
    for option, value in options.items():
        if value is not None and value is not False and option in needed and option not in inputs:
            raise InvalidProblem(
                f"{option}= is an option of the call, and {callee} has an input of that name: give its inputs as one"
                f" dict, {callee}({{{option!r}: ...}})"
            )


def bind_dims(
    types: Mapping[str, Type], shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The value of each symbol: an axis whose size is a single symbol binds it, and one whose size is linear in a
    symbol that no such axis has, ``2*N+1``, solves for it; then all sizes are checked.

    :raises InvalidProblem: a size does not fit; names the input, the axis and both numbers.
    """
    bound = sizes_given(dims)
    source = {name: "dims=" for name in bound}
    for name, type_ in types.items():
        shape = shapes[name]
        if len(shape) != type_.rank:
            raise InvalidProblem(
                f"{name} is {type_} (rank {type_.rank}), got an array of rank {len(shape)}: {tuple(shape)}"
            )
        for size, got in zip(type_.shape, shape, strict=True):
            if isinstance(size, Dim) and str(size).isidentifier() and str(size) not in bound:
                bound[str(size)], source[str(size)] = int(got), name
    linear = [(n, size, int(got)) for n, t in types.items() for size, got in zip(t.shape, shapes[n], strict=True)]
    pending = True
    while pending:  # what one size tells, another may need
        pending = False
        for name, size, got in linear:
            unknown = sorted(symbols(size) - bound.keys())
            if len(unknown) == 1 and (value := solved(size, unknown[0], got, bound)) is not None:
                bound[unknown[0]], source[unknown[0]], pending = value, name, True
    for name, type_ in types.items():
        for axis, (size, got) in enumerate(zip(type_.shape, shapes[name], strict=True)):
            if not symbols(size) <= bound.keys():
                continue
            want = evaluate(size, bound)
            if want != got:
                because = ", ".join(f"{s}={bound[s]} from {source.get(s, 'dims=')}" for s in sorted(symbols(size)))
                raise InvalidProblem(
                    f"{name} is {type_}: axis {axis} is {got}, not {want}{f' ({because})' if because else ''}"
                )
    return bound


def concrete(value: Any, bindings: Mapping[str, int]) -> Any:
    """An attribute's value with numbers for its sizes."""
    if isinstance(value, tuple):
        return tuple(concrete(v, bindings) for v in value)
    return evaluate(value, bindings) if isinstance(value, Dim) else value


def round_to(value: Any, dtype: DType, wide: Wide = None) -> Array:
    """An array converted to ``dtype``; with ``wide``, to that instead if it is a float of more than 8 bits."""
    array = np.asarray(value)
    if wide is not None and dtype.has_tangent:
        return array.astype(wide)
    if dtype.is_integer and array.dtype.kind in "iu" and dtype.bits < 8:
        return convert(array, dtype)
    return convert(array, dtype) if array.dtype != dtype.np else array


def _widened(array: Array) -> Array:
    wide = _computed_in(array.dtype)
    return array if wide is array.dtype else array.astype(wide)


@functools.cache
def _computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that NumPy's functions are given for an array of another; itself for one of NumPy's own."""
    if str(dtype) in ("bool", "float32", "float64") or dtype.kind in "iu" or dtype == PRECISIONS["longdouble"]:
        return dtype
    return np.dtype(np.int64 if str(dtype) in ("int4", "int2", "uint4", "uint2") else np.float32)


def apply(node: Node, operands: Sequence[Array], bindings: Mapping[str, int], wide: Wide = None) -> Array:
    """Evaluates one op on arrays: operands widened to the compute dtype, the result rounded to the node's dtype."""
    attrs = {name: concrete(value, bindings) for name, value in node.attrs.items()}
    if wide is not None and "dtype" in attrs and attrs["dtype"].has_tangent:
        attrs["dtype"] = DTYPES["f64"]
    exact = node.op.in_place_of_dtype
    with np.errstate(all="ignore"):
        result = node.op.reference(*(operands if exact else map(_widened, operands)), **attrs)
    return round_to(result, node.dtype, wide)


@plain()
def evaluate_graph(
    graph: Graph, inputs: Mapping[str, Array], dims: Mapping[str, int] | None = None, precision: str = ""
) -> dict[Node, Array]:
    """The value of every node of a graph; composites are decomposed."""
    types = {graph.input_name(n): n.type for n in graph.inputs}
    given = {**{k: v for k, v in graph.defaults.items() if k in types}, **inputs}
    missing, extra = types.keys() - given.keys(), given.keys() - types.keys()
    if missing:
        raise InvalidProblem(f"graph {graph.name} needs {', '.join(sorted(missing))}")
    if extra:
        raise InvalidProblem(f"graph {graph.name} has no input {', '.join(sorted(extra))}; it has {', '.join(types)}")
    arrays = {name: np.asarray(value) for name, value in given.items()}
    bindings = bind_dims(types, {name: a.shape for name, a in arrays.items()}, dims)
    for fact in graph.assumptions:
        if fact.fails(bindings):
            raise InvalidProblem(
                f"graph {graph.name} has {fact}, and here {', '.join(f'{k}={v}' for k, v in bindings.items())}"
            )
    wide = _wide(precision)
    values: dict[Node, Array] = {}
    for node in graph.inputs:
        name = graph.input_name(node)
        if arrays[name].dtype != node.dtype.np:
            raise InvalidProblem(f"{name} is {node.type}, got an array of {arrays[name].dtype}")
        values[node] = (
            arrays[name].astype(wide) if wide is not None and node.dtype.has_tangent else read(arrays[name], node.dtype)
        )

    order, decomposed = _open(graph)
    with assuming(graph.assumptions):
        for node in order:
            if node in decomposed:
                values[node] = values[decomposed[node]]
                continue
            try:
                values[node] = apply(node, [values[o] for o in node.operands], bindings, wide)
            except IndexOutOfRange as error:
                index_nodes = (n for k in node.op.indices for n in topological([node.operands[k]]))
                source = next((graph.input_name(n) for n in index_nodes if n.op.name == "input"), error.input)
                raise IndexOutOfRange(error.op, source, error.position, error.value, error.bound) from None
    return values


def run(
    graph: Graph | Program,
    inputs: Mapping[str, Array] | None = None,
    /,
    *,
    dims: Mapping[str, int] | None = None,
    precision: str = "",
    **more: Array,
) -> dict[str, Array]:
    """Evaluates a graph or a program in NumPy.

    :param inputs: arrays by name; also as keywords.
    :param dims: sizes that no input determines.
    :param precision: ``"f64"`` evaluates with floats in f64, ``"longdouble"`` in long double.
    :returns: the outputs by name.
    """
    names = graph.input_names if isinstance(graph, Graph) else [b.name for b in graph.of_kind("input")]
    given = by_name(graph.name, names, inputs, (), more)
    if isinstance(graph, Program):
        return run_program(graph, given, dims, precision)
    values = evaluate_graph(graph, given, dims, precision)
    return {name: values[node] for name, node in graph.outputs}


# -- programs ----------------------------------------------------------------------------------------------------------


@plain()
def run_program(
    program: Program, inputs: Mapping[str, Array], dims: Mapping[str, int] | None = None, precision: str = ""
) -> dict[str, Array]:
    """The outputs of a program.  Each kernel is evaluated over its whole iteration space at once, in a loop over a
    block; strategies make no difference.
    """
    types = {b.name: b.type for b in program.of_kind("input") if not b.alias}
    arrays = {name: np.asarray(inputs[name]) for name in types if name in inputs}
    missing = types.keys() - arrays.keys()
    if missing:
        raise InvalidProblem(f"program {program.name} needs {', '.join(sorted(missing))}")
    bindings = bind_dims(types, {n: a.shape for n, a in arrays.items()}, dims)
    check_nonempty(program, bindings)
    memory = _Memory(program, arrays, bindings, _wide(precision))
    for step in program.steps:
        seen = step.sample.of(memory.read(step.sample.buffer)) if isinstance(step, Select) and step.sample else {}
        step = taken(step, bindings, seen)
        if isinstance(step, Loop):
            for position in step.positions(bindings):
                _run_block(step, memory.of_block(step, position))
        else:
            _run_items((step,), memory)
    return {name: memory.read(buffer) for name, buffer in program.outputs}


def check_sizes(program: Program, bound: Mapping[str, int]) -> None:
    """InvalidProblem if a buffer has a negative size, or more bytes than 63 bits can count."""
    extents, counts = _sizes(program)
    for size, name in extents.items():
        if (value := evaluate(size, bound)) < 0:
            raise InvalidProblem(f"{program.name}: {name} would have a size of {value} ({size})")
    for size, name in counts.items():
        if (value := evaluate(size, bound)) > LARGEST:
            raise InvalidProblem(f"{program.name}: {name} would have {value} bytes, 2^63 or more")


def check_conditions(program: Program, bound: Mapping[str, int]) -> None:
    """InvalidProblem if 63 bits cannot count what a condition of a step compares.  Checked last: sizes that are too
    large for memory, or for a sort, are refused as such.
    """
    for step in program.steps:
        for each in step.compared if isinstance(step, Select) else ():
            if max(evaluate(each.left, bound), evaluate(each.right, bound)) > LARGEST:
                raise InvalidProblem(f"{program.name}: {each.comparison} has a side of 2^63 or more")


@once_each
def _sizes(program: Program) -> tuple[Mapping[Size, str], Mapping[Size, str]]:
    """Program -> each extent and each number of bytes of its buffers, and the first buffer that has it."""
    buffers = program.buffers[::-1]
    return {size: b.name for b in buffers for size in b.type.shape}, {b.type.nbytes: b.name for b in buffers}


@once_each
def _extrema(program: Program) -> Sequence[tuple[Step, Kernel, Stmt]]:
    """Program -> its extrema that no elements have not, with their kernels and steps."""
    return [
        (step, item, s)
        for step in program.steps
        for item in alternatives(step)
        if isinstance(item, Kernel)
        for s in item.body
        if dict(s.attrs).get("empty") == "error"
    ]


def check_nonempty(program: Program, bindings: Mapping[str, int]) -> None:
    """InvalidProblem if a program computes an extremum over no elements."""
    for step, kernel, s in _extrema(program):
        if isinstance(step, Loop) and 0 in [evaluate(size, bindings) for _, size in step.over]:
            continue
        bound = step.largest(bindings) if isinstance(step, Loop) else bindings
        if not evaluate(kernel.col_count, bound) and evaluate(kernel.row_count, bound):
            sizes = ", ".join(f"{size}={evaluate(size, bound)}" for _, size in kernel.cols)
            raise InvalidProblem(f"{program.name}: the {REDUCTIONS[s.op]} over no elements ({sizes}) in {kernel.name}")


def _run_items(items: Sequence[Kernel | Call], memory: _Memory) -> None:
    for item in items:
        if isinstance(item, Call):
            _run_call(item, memory)
        else:
            _KernelRun(item, memory).run()


def _run_block(loop: Loop, memory: _Memory) -> None:
    """One block of rows of a loop."""
    for sweep in loop.sweeps:
        for position in sweep.positions(memory.bindings, loop.reduces_rows and memory.first):
            columns = memory.of_columns(sweep, position)
            for item in sweep.steps:
                before = {c.name: columns.read(c.name).copy() for c in sweep.carries if c.name in item.writes}
                _run_items((item,), columns)
                for carry in sweep.carries:
                    if carry.by in before:
                        columns.rescale(carry, before[carry.by])
    _run_items(loop.steps, memory)


class _Memory:
    def __init__(self, program: Program, arrays: Mapping[str, Array], bindings: Mapping[str, int], wide: Wide):
        self.program, self.bindings, self.wide = program, bindings, wide
        self.first = True
        """Whether no block before this one has written what calls of a loop add to."""
        self.carries: frozenset[str] = frozenset()
        """The buffers that are combined with what they hold."""
        self.flat: dict[str, Array] = {}
        for buffer in program.buffers:
            if buffer.alias:
                continue
            dtype = self.dtype(buffer.type.dtype)
            if buffer.kind == "input":
                self.flat[buffer.name] = read(arrays[buffer.name], buffer.type.dtype).astype(dtype).reshape(-1)
            elif buffer.kind == "const":
                self.flat[buffer.name] = (
                    np.asarray(buffer.value, np.float64 if buffer.type.dtype.is_float else None)
                    .astype(dtype)
                    .reshape(-1)
                )
            else:
                self.flat[buffer.name] = np.empty(int(np.prod(self.shape(buffer.name), dtype=np.int64)), dtype)

    def dtype(self, dtype: DType) -> np.dtype[Any]:
        """In which values of this dtype are kept."""
        return self.wide if self.wide is not None and dtype.has_tangent else dtype.np

    def of_block(self, loop: Loop, position: Mapping[str, int]) -> _Memory:
        """The memory that the steps of a loop see in one block."""
        block = copy.copy(self)
        block.bindings = {**self.bindings, **position}
        block.first = loop.is_last(position, evaluate(loop.rows[1], self.bindings))
        block.flat = dict(self.flat)
        block.allocate(loop.blocks)
        carries = [carry for sweep in loop.sweeps for carry in sweep.carries]
        block.carries = frozenset(carry.name for carry in carries)
        for carry in carries:
            dtype = self.dtype(carry.type.dtype)
            start = neutral(carry.combine, carry.type.dtype)
            block.flat[carry.name] = np.full(math.prod(block.shape(carry.name)), start, dtype)
        return block

    def of_columns(self, sweep: Sweep, position: Mapping[str, int]) -> _Memory:
        """The memory that the steps of a sweep see in one block of columns."""
        columns = copy.copy(self)
        columns.bindings = {**self.bindings, **position}
        columns.flat = dict(self.flat)
        columns.allocate(sweep.blocks)
        return columns

    def allocate(self, blocks: Sequence[Buffer]) -> None:
        for buffer in blocks:
            self.flat[buffer.name] = np.empty(math.prod(self.shape(buffer.name)), self.dtype(buffer.type.dtype))

    def rescale(self, carry: Carry, before: Array) -> None:
        """Makes a carried sum relative to the present maximum of each row; it was to that ``before``."""
        old, new, total = _widened(before), _widened(self.read(carry.by)), self.read(carry.name)
        with np.errstate(all="ignore"):
            factor = np.where(old == new, 1, np.exp(old - new)).reshape(old.shape + (1,) * (total.ndim - 1))
            total[...] = round_to(_widened(total) * factor, carry.type.dtype, self.wide)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.program.buffer[name].type.concrete(self.bindings)

    def read(self, name: str) -> Array:
        return self.flat[self.program.root(name)].reshape(self.shape(name))


def _run_call(step: Call, memory: _Memory) -> None:
    sizes = {axis: evaluate(size, memory.bindings) for axis, size in step.axes}
    grids = dict(
        zip(sizes, np.meshgrid(*(np.arange(n) for n in sizes.values()), indexing="ij", sparse=True), strict=True)
    )

    for axis, own in step.parts:
        places = np.unravel_index(grids[axis], [evaluate(size, memory.bindings) for _, size in own])
        grids |= zip((part for part, _ in own), places, strict=True)

    def place(index: Index, per: Mapping[str, Size]) -> Any:
        total: Any = evaluate(index.const, memory.bindings)
        for variable, coefficient in index.terms:
            total = total + grids[variable] // evaluate(per.get(variable, 1), memory.bindings) * evaluate(
                coefficient, memory.bindings
            )
        return total

    op, result = REGISTRY[step.op], memory.program.buffer[step.out.buffer].type

    def seen(operand: Operand, own: Sequence[str], converts: bool = True) -> Array:
        array = (
            memory.read(operand.buffer)[tuple(np.asarray(place(i, dict(operand.per))) for i in operand.index)]
            if operand.index
            else memory.read(operand.buffer)
        )
        full = np.broadcast_to(array, np.broadcast_shapes(array.shape, (1,) * len(sizes)))
        keep = [list(sizes).index(a) for a in own]
        drop = tuple(i for i in range(len(sizes)) if i not in keep)
        full = full[tuple(0 if i in drop else slice(None) for i in range(len(sizes)))]
        left = sorted(keep)
        full = np.transpose(full, [left.index(k) for k in keep])
        values = np.broadcast_to(full, [sizes[a] for a in own])
        if converts:  # it reads operands as the result's dtype
            values = round_to(values, result.dtype, memory.wide)
        if operand.scale:
            values = round_to(values * seen(operand.scale, own), result.dtype, memory.wide)
        return values

    arrays = [
        seen(operand, own, number in op.converts)
        for number, (operand, own) in enumerate(zip(step.args, step.views, strict=True))
    ]
    shape = tuple(sizes[axis] for axis in step.result_axes)
    value = op.reference(*map(_widened, arrays), **op.attributes(shape), **dict(step.attrs))
    value = _ended(step, value, arrays, memory)
    window = []
    for index in step.out.index:
        start = evaluate(index.const, memory.bindings)
        window.append(slice(start, start + sizes[index.terms[0][0]]) if index.terms else start)
    stored = [index.terms[0][0] for index in step.out.index if index.terms]
    value = np.transpose(value, [step.result_axes.index(axis) for axis in stored])
    target = memory.read(step.out.buffer)
    if step.add and (step.out.buffer in memory.carries or not memory.first):
        value = value + target[tuple(window)]
    target[tuple(window)] = round_to(value, result.dtype, memory.wide)


def _ended(call: Call, value: Array, arrays: Sequence[Array], memory: _Memory) -> Array:
    """A product after its epilogue, not rounded yet; what else that gives is written."""
    epilogue = call.epilogue

    def read(operand: Operand) -> Array:
        return _widened(memory.read(operand.buffer))

    def write(operand: Operand, given: Array) -> None:
        memory.read(operand.buffer)[...] = round_to(given, memory.program.types[operand.buffer].dtype, memory.wide)

    if epilogue.bias:
        value = value + read(epilogue.bias)
    if epilogue.function == "gelu" and epilogue.argument:
        write(epilogue.argument, value)
    if epilogue.function:
        at = read(epilogue.argument) if epilogue.argument and epilogue.function == "gelu_grad" else None
        value = applied(epilogue.function, value, at)
    if epilogue.sums:
        summed = {"result": value, "first": _widened(arrays[0]).T, "second": _widened(arrays[1])}
        write(epilogue.sums, summed[epilogue.summed].sum(0))
    return value


class _KernelRun:
    """Evaluates a kernel over its whole iteration space: its row and column axes are the axes of NumPy arrays."""

    def __init__(self, kernel: Kernel, memory: _Memory):
        self.kernel, self.memory = kernel, memory
        self.sums: dict[str, Array] = {}
        """What accums have added into each buffer so far, not rounded."""
        axes = (*kernel.rows, *kernel.cols)
        self.sizes = [evaluate(size, memory.bindings) for _, size in axes]
        grids = np.meshgrid(*(np.arange(n) for n in self.sizes), indexing="ij", sparse=True) if axes else []
        self.values: dict[str, Any] = dict(zip((a for a, _ in axes), grids, strict=True))
        self.column_axes = tuple(range(len(kernel.rows), len(axes)))
        self.rank = len(axes)

    def run(self) -> None:
        for statement in self.kernel.body:
            with np.errstate(all="ignore"):
                self.step(statement)

    def place(self, index: Index) -> Any:
        total: Any = np.asarray(evaluate(index.const, self.memory.bindings), np.int64)
        for variable, coefficient in index.terms:
            total = total + np.asarray(self.values[variable]).astype(np.int64) * evaluate(
                coefficient, self.memory.bindings
            )
        return total

    def step(self, s: Stmt) -> None:
        args = [self.values[a] for a in s.args]
        where = self.values[s.where] if s.where else None
        if s.op == "store":
            self.store(s, args[0], where)
        elif s.op == "accum":
            self.accum(s, args[0], where)
        elif s.op == "check":
            self.check(s, *args)
        else:
            self.values[s.name] = self.value(s, args, where)

    def value(self, s: Stmt, args: Sequence[Any], where: Any) -> Any:
        """What a statement with a name computes."""
        bindings = self.memory.bindings
        if s.op == "load":
            return self.load(s, where)
        if s.op == "search":
            return count_not_above(self.memory.read(s.buffer), np.asarray(args[0]))
        if s.op == "size":
            return np.asarray(evaluate(s.attr("size"), bindings), np.int64)
        if s.op == "index":
            return self.place(s.index[0])
        if s.op == "in_bounds":
            low, high = (evaluate(s.attr(k), bindings) for k in ("lo", "hi"))
            place = self.place(s.index[0])
            return (place >= low) & (place < high)
        if s.op == "clamp_index":
            size = evaluate(s.attr("size"), bindings)
            raw = np.asarray(args[0]).astype(np.int64)
            return raw % max(size, 1) if s.attr("oob") == "wrap" else np.clip(raw, 0, max(size - 1, 0))
        if s.op in REDUCTIONS:
            return self.reduce(s, args[0])
        if s.op == "scan":
            return self.scan(s, args)
        assert s.dtype is not None
        if s.op == "const":
            return round_to(np.asarray(s.attr("value")), s.dtype, self.memory.wide)
        return self.pointwise(s, args, s.dtype)

    def load(self, s: Stmt, where: Any) -> Any:
        array = self.memory.read(s.buffer)
        places = [self.place(i) for i in s.index]
        if where is None:
            shape = np.broadcast_shapes(*map(np.shape, places)) if places else ()
            return np.zeros(shape, array.dtype) if 0 in shape else array[tuple(places)]
        places = [np.where(where, p, 0) for p in places]
        other = np.asarray(dict(s.attrs).get("other", 0)).astype(array.dtype)
        if 0 in array.shape:
            return np.full(np.broadcast_shapes(np.shape(where), *map(np.shape, places)), other)
        return np.where(where, array[tuple(places)], other)

    def store(self, s: Stmt, value: Any, where: Any) -> None:
        places = [self.place(i) for i in s.index]
        full = np.broadcast_shapes(*map(np.shape, places), np.shape(value)) if places else np.shape(value)
        if 0 in full:
            return
        array = self.memory.read(s.buffer)
        there = ... if where is None else np.broadcast_to(where, full)
        array[tuple(np.broadcast_to(p, full)[there] for p in places)] = (
            np.broadcast_to(value, full)[there] if places else np.reshape(value, ())
        )

    def pointwise(self, s: Stmt, args: Sequence[Any], dtype: DType) -> Any:
        """An op of one element, rounded to its dtype."""
        op, wide = REGISTRY[s.op], self.memory.wide
        attrs = {k: concrete(v, self.memory.bindings) for k, v in s.attrs}
        if wide is not None and "dtype" in attrs and attrs["dtype"].has_tangent:
            attrs["dtype"] = DTYPES["f64"]
        operands = args if op.in_place_of_dtype else [_widened(np.asarray(a)) for a in args]
        return round_to(op.reference(*operands, **attrs), dtype, wide)

    def full(self, value: Any) -> Array:
        array = np.asarray(value)
        return np.broadcast_to(array, np.broadcast_shapes(array.shape, (1,) * self.rank))

    def reduce(self, s: Stmt, value: Any) -> Array:
        shape = list(np.shape(self.full(value)))
        for axis in self.column_axes:
            shape[axis] = self.sizes[axis]
        array = _widened(np.broadcast_to(self.full(value), shape))
        kind = REDUCTIONS[s.op]
        if kind in ("argmax", "argmin"):
            rows = len(self.kernel.rows)
            flat = array.reshape((*shape[:rows], math.prod(shape[rows:])))
            answer = getattr(np, kind)(flat, -1) if flat.shape[-1] else np.zeros(flat.shape[:-1], np.int64)
            result = answer.reshape((*answer.shape, *(1 for _ in self.column_axes)))
        else:
            function: Any = getattr(np, kind)
            extra: Any = (
                {"dtype": summing(array.dtype) if kind == "sum" else array.dtype} if kind in ("sum", "prod") else {}
            )
            if kind in ("max", "min") and 0 in [shape[a] for a in self.column_axes]:
                least = (np.inf if kind == "min" else -np.inf) if array.dtype.kind == "f" else 0
                result = np.full([1 if a in self.column_axes else n for a, n in enumerate(shape)], least, array.dtype)
            else:
                result = function(array, axis=self.column_axes, keepdims=True, **extra)
        assert s.dtype is not None
        return round_to(result, s.dtype, self.memory.wide)

    def scan(self, s: Stmt, args: Sequence[Any]) -> Array:
        (axis,) = self.column_axes
        full = [self.full(value) for value in args]
        shape = list(np.broadcast_shapes(*(array.shape for array in full)))
        shape[axis] = self.sizes[axis]
        operands = tuple(_widened(np.broadcast_to(array, shape)) for array in full)
        assert s.dtype is not None
        return round_to(accumulate(operands, s.combine, s.attr("reverse"), axis), s.dtype, self.memory.wide)

    def accum(self, s: Stmt, value: Any, where: Any) -> None:
        array, memory_type = self.memory.read(s.buffer), self.memory.program.buffer[s.buffer].type
        # a value that does not vary along the columns is added once per row, not once per column
        level = self.kernel.stmt_level(s)
        names = [a for a, _ in (*self.kernel.rows, *self.kernel.cols)]
        columns = {a for a, _ in self.kernel.cols}
        shape = [n if (names[i] not in columns or level & columns) else 1 for i, n in enumerate(self.sizes)]
        places = [np.broadcast_to(self.full(self.place(i)), shape) for i in s.index]
        values = np.broadcast_to(self.full(value), shape)
        keep = np.ones(shape, bool) if where is None else np.broadcast_to(self.full(where), shape)
        dtype = memory_type.dtype
        if s.buffer not in self.sums:
            wide = np.full(array.shape, neutral(s.combine, dtype), summing(_widened(array.reshape(-1)[:0]).dtype))
            if s.buffer in self.memory.carries:
                wide[...] = array
            self.sums[s.buffer] = wide
        wide = self.sums[s.buffer]
        combine = UFUNCS[s.combine]
        if places:
            combine.at(wide, tuple(p[keep] for p in places), _widened(values[keep]))
        elif keep.any():
            wide[...] = combine(wide, combine.reduce(_widened(values[keep]), dtype=wide.dtype))
        array[...] = round_to(wide, dtype, self.memory.wide)

    def check(self, s: Stmt, value: Any, before: Any = None) -> None:
        array = np.broadcast_to(self.full(value), self.sizes)
        bound = evaluate(s.attr("bound"), self.memory.bindings)
        check_positions(s.attr("op"), s.attr("source"), array, bound, ascending=before is not None)


def _wide(precision: str) -> Wide:
    if precision not in PRECISIONS:
        raise InvalidProblem(f"precision={precision!r}; there are {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[precision]


def sizes_of(shape: Sequence[Size], bindings: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(substitute(s, bindings)) for s in shape)  # type: ignore[arg-type]
