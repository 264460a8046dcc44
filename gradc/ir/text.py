"""The text format of graphs: ``parse(str(g)) == g`` for every graph.

One op per line, with the type of its result; inputs are named, other values are numbered in graph order; attributes
are in braces, sorted::

    graph @f<N,D>(%tokens: i64[N], %table: f32[V,D]) {
      assume(N >= 1)
      %0: f32[N,D] = gather %table, %tokens {axis=0}  # rows  model.py:12
      return y=%0
    }

Grammar (``LINE`` is an end of line; ``#`` comments, ``//`` lines and blank lines are allowed anywhere)::

    file       ::= ["gradc-ir 1" LINE] graph
    graph      ::= "graph" "@" name ["<" [NAME ("," NAME)*] ">"] "(" [input ("," input)*] ")" "{" LINE
                   assume* op* return "}"
    input      ::= value ":" type
    assume     ::= "assume" "(" size (">=" | "==" | "<=") size ")" LINE
    op         ::= value ":" type "=" name [value ("," value)*] [attributes] LINE
    return     ::= "return" [name "=" value ("," name "=" value)*] LINE
    value      ::= "%" name                                          # of an op: may begin with a digit
    name       ::= WORD ("." WORD)*                                  # words of letters, digits and _
    type       ::= dtype ["[" [size ("," size)*] "]"]
    size       ::=                                                   # see gradc.ir.size_text
    attributes ::= "{" [name "=" attribute ("," name "=" attribute)*] "}"
    attribute  ::= "true" | "false" | "none" | dtype | INT | float | STRING | size
                 | "[" [attribute ("," attribute)*] "]"
    float      ::= DECIMAL | HEX | ["-"] "inf" | ["-"] "nan" | "nan(0x" 16 hex digits ")"

A symbol with the name of a reserved word (``none``, ``f32``, ``inf``, ...) is written in parentheses.  The grammar of
programs is in :mod:`gradc.ir.program_text`.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError, InvalidProblem, IRFormatError, TypeRuleError
from ..formats import npz
from ..process import files
from .dims import Assumption, Dim, Size, assuming, same, substitute
from .envelope import kind_of, load_opened
from .graph import Graph, input_node
from .graph_file import GRAPH_FORMAT, NO_ARRAYS
from .lexer import LONGEST_NAME, LONGEST_TEXT, VALUE, WORD, Reader, is_long
from .node import REGISTRY, Node, Note, identity, make
from .types import Type

_NUMBER = re.compile(r"%(0|[1-9]\d{0,8})")


def parse(text: str) -> Graph:
    """Parses a graph.

    :raises IRFormatError, TypeRuleError: with line, column and the line itself; the latter from an op's type rule.
    """
    reader = Reader(text)
    reader.demand("'graph @name(...) {'")
    if reader.maybe("gradc-ir"):
        reader.expect("1")
        reader.finish()
        reader.demand("'graph @name(...) {'")
    name, declared, values = _header(reader)
    inputs = tuple(values.values())
    reader.demand("'return'")
    assumptions = reader.assumptions()
    notes: dict[Node, Note] = {}
    while not reader.maybe("return"):
        if reader.line.startswith(("}", "assume"), reader.at):
            raise reader.fail(
                "expected an op or 'return'"
                + ("" if reader.line[reader.at] == "}" else "; assumptions stand before the first op")
            )
        node = _op(reader, values, assumptions)
        if reader.comment:
            notes.setdefault(node, reader.note())
        reader.demand("'return'")
    outputs = _outputs(reader, values)
    reader.demand("the closing '}'")
    reader.expect("}")
    reader.finish()
    if reader.advance():
        raise reader.fail(f"unexpected {reader.found()} after the end of the graph")
    for value, node in values.items():
        if _NUMBER.fullmatch(value) and notes.get(node, Note()).id is None:
            notes[node] = replace(notes.get(node, Note()), id=int(value[1:]))
    graph = Graph(name, inputs, outputs, assumptions, notes)
    undeclared = [d for d in graph.dims if d not in declared] if declared is not None else []
    if undeclared:
        raise IRFormatError(
            f"the dim {undeclared[0]} is used but the header declares only <{','.join(declared or ())}>", 1, 1
        )
    return graph


def _header(reader: Reader) -> tuple[str, tuple[str, ...] | None, dict[str, Node]]:
    reader.expect("graph")
    reader.expect("@")
    name = reader.name("the graph's name")
    declared: tuple[str, ...] | None = None
    if reader.maybe("<"):
        dims: dict[str, None] = {}
        while not reader.maybe(">"):
            if dims:
                reader.expect(",")
            dims[reader.take(WORD, "the name of a dim or '>'")] = None
        declared = tuple(dims)
    reader.expect("(")
    values: dict[str, Node] = {}
    while not reader.maybe(")"):
        if values:
            reader.expect(",")
        value, start = _defined(reader, values)
        if not WORD.fullmatch(value[1:]):
            raise reader.fail(f"{value}: an input has a name, not a number", start, reader.at)
        reader.expect(":")
        values[value] = input_node(value[1:], reader.type())
    reader.expect("{")
    reader.finish()
    return name, declared, values


def _defined(reader: Reader, values: Mapping[str, Node]) -> tuple[str, int]:
    value = reader.take(VALUE, "a value such as %0")
    start = reader.at - len(value)
    if is_long(value[1:]):
        raise reader.fail(f"a name of {len(value) - 1} characters: {LONGEST_NAME} is the most", start, reader.at)
    if value in values:
        raise reader.fail(f"{value} is defined twice", start, reader.at)
    return value, start


def _used(reader: Reader, values: Mapping[str, Node]) -> Node:
    value = reader.take(VALUE, "a value such as %0")
    if value not in values:
        raise reader.fail(f"{value[:200]} is used before its definition", reader.at - len(value), reader.at)
    return values[value]


def _op(reader: Reader, values: dict[str, Node], assumptions: tuple[Assumption, ...]) -> Node:
    value, _ = _defined(reader, values)
    reader.expect(":")
    reader.at_end()
    type_start = reader.at
    stated = reader.type()
    type_end = reader.at
    reader.expect("=")
    op_name = reader.name("the name of an op")
    op, start, end = REGISTRY.get(op_name), reader.at - len(op_name), reader.at
    if op is None:
        close = difflib.get_close_matches(op_name[:60], REGISTRY, 1)
        raise reader.fail(
            f"there is no op {op_name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), start, end
        )
    if op_name == "input":
        raise reader.fail("inputs stand in the header: graph @name(%x: f32[N]) {", start, end)
    operands: list[Node] = []
    if not reader.at_end() and reader.line[reader.at] != "{":
        operands.append(_used(reader, values))
        while reader.maybe(","):
            operands.append(_used(reader, values))
    most = len(operands) if op.variadic else len(op.operand_names)
    if not op.required <= len(operands) <= most:
        wanted = f"{op.required}" if op.required == most else f"{op.required} to {most}"
        raise reader.fail(f"{op_name} takes {wanted} operands, got {len(operands)}", start, reader.at)
    given = reader.attributes()
    reader.finish()
    for attribute, (_, a, b) in given.items():
        if attribute not in op.parameters:
            raise reader.fail(
                f"{op_name} has no attribute {attribute!r}; it has {', '.join(op.parameters) or 'none'}", a, b
            )
    for attribute, parameter in op.parameters.items():
        if attribute not in given and parameter.default is inspect.Parameter.empty:
            raise reader.fail(f"{op_name}: the attribute {attribute} is missing", start, end)
    attrs = {attribute: item[0] for attribute, item in given.items()}
    types = [o.type for o in operands]
    try:
        with assuming(assumptions):
            inferred, canonical = op.type_of(types, attrs)
            agreed, kept = (
                types_agree(stated, inferred),
                {a: attrs[a] if a in attrs and same_attribute(attrs[a], v) else v for a, v in canonical.items()},
            )
    except TypeRuleError as error:
        raise reader.point(error, start, end) from None
    if not agreed:
        raise reader.fail(
            f"{value} is stated as {stated} but {op_name}({', '.join(map(str, types))}) is {inferred}",
            type_start,
            type_end,
        )
    node = values[value] = make(op, operands, kept, stated)
    return node


def types_agree(stated: Type, inferred: Type) -> bool:
    """Whether two types are the same under the current assumptions."""
    if stated == inferred:
        return True
    sizes = zip(stated.shape, inferred.shape, strict=False)
    return stated.dtype is inferred.dtype and stated.rank == inferred.rank and all(_same(a, b) for a, b in sizes)


def _same(a: Size, b: Size) -> bool:
    again: dict[str, Size] = {"": 0}  # an empty substitution canonicalizes the size under the current assumptions
    return bool(same(a, b) or same(substitute(a, again), substitute(b, again)))


def same_attribute(stated: Any, canonical: Any) -> bool:
    """Whether two values of an attribute are the same under the current assumptions."""
    if isinstance(stated, tuple) and isinstance(canonical, tuple):
        return len(stated) == len(canonical) and all(map(same_attribute, stated, canonical))
    if isinstance(stated, Dim) or isinstance(canonical, Dim):
        return all(isinstance(v, Dim | int) and not isinstance(v, bool) for v in (stated, canonical)) and _same(
            stated, canonical
        )
    return bool(identity(stated) == identity(canonical))


def _outputs(reader: Reader, values: Mapping[str, Node]) -> tuple[tuple[str, Node], ...]:
    outputs: dict[str, Node] = {}
    while not reader.at_end():
        if outputs:
            reader.expect(",")
        reader.at_end()
        start = reader.at
        name = reader.name("NAME=%VALUE")
        if name in outputs:
            raise reader.fail(f"the output {name} is named twice", start, reader.at)
        reader.expect("=")
        outputs[name] = _used(reader, values)
    return tuple(outputs.items())


# -- files ------------------------------------------------------------------------------------------------------------


def load(path: Any) -> Graph:
    """The graph saved at ``path``, with its arrays; nothing in the file is executed.

    For a text without embedded arrays (from an editor or an older gradc), arrays are read from ``path`` + ``.npz`` if
    that file exists.

    :raises FileError: the file cannot be read.
    :raises IRFormatError, TypeRuleError: it holds no graph, or a damaged one.
    """
    path = files.as_path(path, "read")
    with files.opened(path) as (file, about):
        if kind_of(file.read(128)):
            file.seek(0)
            envelope = load_opened(file, about.st_size, "graph", GRAPH_FORMAT, path.name)
            return graph_of_file(envelope.parts.get("graph", b""), envelope.arrays, path.name)
    text = _read_text(path)
    beside = path.with_name(path.name + ".npz")
    if NO_ARRAYS in text[:200].splitlines()[1:2] or not beside.exists():
        return graph_of_file(text.encode("latin-1"), {}, path.name)
    try:
        arrays = npz.read_arrays(beside, compressed=False)
        if not isinstance(arrays, dict):
            raise InvalidProblem(f"{beside.name} is no archive of arrays")
        return graph_of_file(text.encode("latin-1"), arrays, beside.name)
    except InvalidProblem as error:
        raise IRFormatError(str(error)) from error


def _read_text(path: Path) -> str:
    try:
        return files.read(path, LONGEST_TEXT).decode("latin-1")
    except FileError as error:
        if error.errno != errno.EFBIG:
            raise
        raise IRFormatError(str(error)) from None


def graph_of_file(text: bytes, arrays: Mapping[str, np.ndarray[Any, Any]], source: str) -> Graph:
    """The graph of a text, with arrays bound to the inputs of their names.

    :param source: the file's name, for errors.
    """
    graph = parse(text.decode("latin-1"))
    bound = {}
    for name, array in arrays.items():
        if name not in graph.input_names:
            raise IRFormatError(f"{source} holds an array {name[:60]!r}, but the graph has no such input")
        type_ = graph.input(name).type
        if len(array.shape) != type_.rank or any(
            isinstance(want, int) and want != got for want, got in zip(type_.shape, array.shape, strict=True)
        ):
            raise IRFormatError(f"{source}: the array {name} has the shape {list(array.shape)}, the input is {type_}")
        try:
            bound[name] = npz.as_dtype(array, type_.dtype.np, f"{source}: the array {name} of the input {type_}")
        except InvalidProblem as error:
            raise IRFormatError(str(error)) from None
    return Graph(graph.name, graph.inputs, graph.outputs, graph.assumptions, graph.notes, bound)
