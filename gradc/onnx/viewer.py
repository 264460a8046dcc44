"""Graphs as ONNX models to look at, with Netron or whatever else reads the format."""

from __future__ import annotations

from typing import Any

import onnx

from ..ir.graph import Graph
from ..ir.lexer import format_note, format_value
from ..ir.node import Node
from .model import element_type


def to_onnx(graph: Graph) -> bytes:
    """An ONNX model: gradc's ops in a domain of their own, which viewers show and no runtime runs; a value has its
    number and, as a comment, its line.
    """
    helper, names = onnx.helper, graph.value_names

    def info(node: Node, name: str) -> Any:
        shape = [d if isinstance(d, int) else str(d) for d in node.type.shape]
        return helper.make_tensor_value_info(name, element_type(node.dtype.name), shape)

    nodes = [
        helper.make_node(
            node.op.name,
            [names[o] for o in node.operands],
            [names[node]],
            name=names[node],
            domain="gradc",
            doc_string=format_note(graph.notes[node]).removeprefix("  # ") if node in graph.notes else "",
            **{key: format_value(value) for key, value in node.attrs.items()},
        )
        for node in graph.nodes
        if node.op.name != "input"
    ]
    nodes += [
        helper.make_node("output", [names[node]], [name], name=f"return {name}", domain="gradc")
        for name, node in graph.outputs
    ]
    made = helper.make_graph(
        nodes,
        graph.name,
        [info(node, names[node]) for node in graph.inputs],
        [info(node, name) for name, node in graph.outputs],
        value_info=[info(node, names[node]) for node in graph.nodes if node.op.name != "input"],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("gradc", 1)], producer_name="gradc")
    return bytes(model.SerializeToString())
