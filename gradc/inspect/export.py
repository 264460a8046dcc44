"""Export of graphs: DOT, JSON (which can be read back), and Model Explorer; :mod:`gradc.onnx.viewer` has ONNX.

User names are escaped to printable ASCII in quoted strings for DOT; the other two formats are data for a JSON writer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import IRFormatError
from ..ir.dims import Dim
from ..ir.graph import Graph
from ..ir.lexer import FORMAT, VALUE, WORD, format_attributes, format_note, format_value
from ..ir.node import Node
from ..ir.size_text import parse_assumption, parse_size
from ..ir.text import parse
from ..ir.types import DTYPES, DType, parse_type

# -- DOT --------------------------------------------------------------------------------------------------------------


def to_dot(graph: Graph) -> str:
    """The graph in Graphviz's DOT: an ellipse per input, a box with op and type per node, an edge per operand, a double
    circle per output.
    """
    names = graph.value_names
    ids = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = [f"digraph {_quoted(graph.name)} {{", "  rankdir=TB;", '  node [shape=box, fontname="monospace"];']
    for node in graph.nodes:
        shape = ", shape=ellipse" if node.op.name == "input" else ""
        op = "" if shape else f"{node.op.name}{format_attributes(sorted(node.attrs.items()))}\n"
        tooltip = (
            f", tooltip={_quoted(format_note(graph.notes[node]).removeprefix('  # '))}" if node in graph.notes else ""
        )
        lines.append(f"  {ids[node]} [label={_quoted(f'{op}{names[node]}: {node.type}')}{shape}{tooltip}];")
    for node in graph.nodes:
        ordinal = [f" [label={_quoted(str(i))}]" if len(node.operands) > 1 else "" for i in range(len(node.operands))]
        lines += [f"  {ids[o]} -> {ids[node]}{label};" for o, label in zip(node.operands, ordinal, strict=True)]
    for i, (name, node) in enumerate(graph.outputs):
        lines += [f"  out{i} [label={_quoted(name)}, shape=doublecircle];", f"  {ids[node]} -> out{i};"]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    ascii_ = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + re.sub(r"[^ -~]", "?", ascii_) + '"'


# -- plain data -------------------------------------------------------------------------------------------------------


def to_json(graph: Graph) -> dict[str, Any]:
    """The graph as dicts, lists, strings and numbers, from which :func:`from_json` creates an equal graph.

    Attributes without a JSON type are written as ``{"float": hex}``, ``{"dtype": name}`` or ``{"size": text}``.
    """
    names = graph.value_names
    nodes: list[dict[str, Any]] = []
    for node in graph.nodes[len(graph.inputs) :]:
        entry: dict[str, Any] = {"name": names[node], "op": node.op.name, "operands": [names[o] for o in node.operands]}
        entry |= {"attributes": {a: _plain(v) for a, v in sorted(node.attrs.items())}, "type": str(node.type)}
        if node in graph.notes:
            note = graph.notes[node]
            entry["note"] = {"name": note.name, "where": note.where, "scope": note.scope}
        nodes.append(entry)
    return {
        "format": FORMAT,
        "name": graph.name,
        "dims": list(graph.dims),
        "assumptions": [f"{a.left} {a.relation} {a.right}" for a in graph.assumptions],
        "inputs": [{"name": graph.input_name(n), "type": str(n.type)} for n in graph.inputs],
        "nodes": nodes,
        "outputs": [{"name": name, "value": names[n]} for name, n in graph.outputs],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return {"float": format_value(value, exact=True)}
    if isinstance(value, DType | Dim):
        return {"dtype" if isinstance(value, DType) else "size": str(value)}
    return value


def from_json(data: Mapping[str, Any]) -> Graph:
    """The graph that :func:`to_json` wrote; it is validated, converted to the text format and parsed."""
    try:
        if data["format"] != FORMAT:
            raise IRFormatError(f"the format is {str(data['format'])[:40]!r}, not {FORMAT!r}")
        inputs = [f"%{_word(i['name'], WORD)}: {parse_type(i['type'])}" for i in data["inputs"]]
        lines = [f"graph @{_word(data['name'], WORD)}({', '.join(inputs)}) {{"]
        lines += [str(parse_assumption(a)) for a in data["assumptions"]]
        for node in data["nodes"]:
            operands = ", ".join(_word(o, VALUE) for o in node["operands"])
            attributes = ", ".join(f"{_word(a, WORD)}={_text(v)}" for a, v in node["attributes"].items())
            lines.append(
                f"{_word(node['name'], VALUE)}: {parse_type(node['type'])} = {_word(node['op'], WORD)} {operands}"
                f" {{{attributes}}}"
            )
        outputs = ", ".join(f"{_word(o['name'], WORD)}={_word(o['value'], VALUE)}" for o in data["outputs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise IRFormatError(f"not a graph as data: {type(error).__name__} {str(error)[:80]}") from None
    return parse("\n".join([*lines, f"return {outputs}", "}"]))


_FLOAT = re.compile(r"-?(?:0x[0-9a-fp.+-]+|inf)|-?nan|nan\(0x[0-9a-f]{16}\)")
_READ: dict[str, Callable[[Any], str]] = {
    "float": lambda text: _word(text, _FLOAT),
    "dtype": lambda text: format_value(DTYPES[text]),
    "size": lambda text: format_value(parse_size(text)),
}


def _word(text: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise IRFormatError(f"{str(text)[:60]!r} does not belong in a graph")
    return text


def _text(value: Any, depth: int = 0) -> str:
    if depth > 16:
        raise IRFormatError("lists nested too deep")
    if isinstance(value, list):
        return f"[{', '.join(_text(v, depth + 1) for v in value)}]"
    if isinstance(value, Mapping):
        ((kind, text),) = value.items() if len(value) == 1 else ((None, None),)
        if kind not in _READ:
            raise IRFormatError(f"{str(dict(value))[:60]} is not an attribute's value")
        return _READ[kind](text)
    if isinstance(value, float):
        return format_value(value)
    if value is None or isinstance(value, bool | int | str):
        return format_value(value)
    raise IRFormatError(f"{str(value)[:60]} is not an attribute's value")


# -- Model Explorer ---------------------------------------------------------------------------------------------------


def model_explorer(graph: Graph) -> dict[str, Any]:
    """The graph in Model Explorer's JSON; scopes become layers, outputs become nodes."""
    names = graph.value_names
    nodes = [_explorer_node(graph, node, names) for node in graph.nodes]
    for name, node in graph.outputs:
        nodes.append(_entry(f"output {name}", f"output {name}", "", {}, [names[node]]))
    about = {"dims": ", ".join(graph.dims), "assumptions": ", ".join(map(str, graph.assumptions))}
    return {"graphs": [{"id": graph.name, "nodes": nodes, "groupNodeAttributes": {"": about}}]}


def _explorer_node(graph: Graph, node: Node, names: Mapping[Node, str]) -> dict[str, Any]:
    is_input = node.op.name == "input"
    note = graph.notes.get(node)
    attrs = {} if is_input else {a: format_value(v) for a, v in sorted(node.attrs.items())}
    if note:
        attrs |= {key: text for key, text in (("value", note.name), ("source", note.where)) if text}
    label = f"input {graph.input_name(node)}" if is_input else node.op.name
    entry = _entry(names[node], label, note.scope if note else "", attrs, [names[o] for o in node.operands])
    shape = {"tensor_shape": str(node.type), "elements": str(node.type.count)}
    entry["outputsMetadata"] = [{"id": "0", "attrs": [{"key": k, "value": v} for k, v in shape.items()]}]
    return entry


def _entry(id: str, label: str, namespace: str, attrs: Mapping[str, str], sources: list[str]) -> dict[str, Any]:
    return {
        "id": id,
        "label": label,
        "namespace": namespace,
        "attrs": [{"key": key, "value": value} for key, value in attrs.items()],
        "incomingEdges": [
            {"sourceNodeId": s, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)} for i, s in enumerate(sources)
        ],
    }
