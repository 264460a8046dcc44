"""precompute_gradients: gradients of a scalar that are made in the forward, while what they are made of is there.

A product with wide rows is in memory neither in the forward nor in the backward, which would recompute it: a third
more work for the logits before a loss.  But a gradient is linear in its cotangent, and that of a loss is one number.
What is made of the product for a cotangent of 1 is as good a residual; the backward multiplies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

from ...errors import TypeRuleError
from ...ir.dims import evaluate, nominal
from ...ir.graph import Graph, rebuild
from ...ir.node import Node, Note
from ...ir.op import Library
from ...ir.pattern import splat
from ...ir.types import BF16, F32, F64
from ...ir.walk import topological
from ...ops.rules import full
from ...targets.cpu import FLOPS_PER_BYTE
from ..graph.replace_axis import moves
from ..graph.scales import Scale
from ..schedule.partition import bytes_of
from .wide_products import Sizes

MOVED = 3
"""Times its bytes that a precomputed gradient moves more than another one: it is written, read and written."""
WHOLE = 3
"""Values of a product's size that a backward without blocks has in memory: the log of a softmax, its cotangent, and the
product's.  Precomputed gradients are there twice, what is kept and what is given; they take no more.  Larger ones would
not be kept either, but what they are made of: [rows, wide], whole.
"""
WIDE_RANGE = (F32, F64, BF16)
"""Dtypes in which a gradient for a cotangent of 1 is not too small, where a loss is scaled up lest it be."""


def precompute_gradients(
    joint: Graph, values: Collection[str], products: Collection[Node], dims: Sizes
) -> Graph | None:
    """d.x = f(product, cotangent)  ->  d.x = cotangent * g, g = f(product, 1)

    :param values: the outputs that belong to the forward; the graph's last inputs are their cotangents.
    :param products: those that the backward would recompute.
    :param dims: sizes at which bytes are counted.
    :return: the graph, with one more output at the end for each gradient that is precomputed; None where there is no
        scalar, or nothing is gained.
    """
    floats = [joint.output(name) for name in values if joint.output(name).dtype.is_float]
    if len(floats) != 1 or floats[0].rank:
        return None
    cotangent = joint.inputs[-1]
    early = set(topological(joint.output(name) for name in values))
    found = _profitable(joint, products, {n for n in joint.nodes if n not in early}, cotangent, dims)
    if not found:
        return None
    one = rebuild(found, {cotangent: full(1, cotangent)})
    named: dict[Node, str] = {}
    for name, node in joint.outputs:
        while node not in found and moves(node):
            (node,) = node.operands
        named.setdefault(node, name)
    notes = dict(joint.notes)
    for node in found:
        note = joint.notes.get(node, Note())
        notes[one[node]] = replace(note, name=note.name or named.get(node, ""))

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        return Scale("mul", cotangent, (), node).onto(one[node]) if node in found else None

    scaled = replace(joint, notes=notes).rewrite(rule)
    taken = {*joint.input_names, *joint.output_names}
    names = (name for k in itertools.count() if (name := f"r.precomputed.{k}") not in taken)
    precomputed = zip(names, (one[node] for node in found), strict=False)
    return replace(scaled, outputs=(*scaled.outputs, *precomputed), notes={**scaled.notes, **notes})


def _profitable(
    joint: Graph, products: Collection[Node], late: Collection[Node], cotangent: Node, dims: Sizes
) -> dict[Node, None]:
    """The gradients made of products that cost less to precompute than these products cost to recompute."""
    found: dict[Node, None] = {}
    for product in (n for n in joint.nodes if n in products):
        gradients = _made_of(joint, product, late)
        inner = product.operands[0].shape[-1]
        flops = 2 * bytes_of(product, dims) // product.dtype.itemsize * evaluate(inner, nominal([inner], dims))
        size = sum(bytes_of(n, dims) for n in gradients if n not in found)
        gained = flops >= FLOPS_PER_BYTE * MOVED * size and 2 * size <= WHOLE * bytes_of(product, dims)
        if gradients and gained and all(_is_linear(n, cotangent) for n in gradients):
            found |= dict.fromkeys(gradients)
    return found


def _made_of(joint: Graph, product: Node, late: Collection[Node]) -> list[Node]:
    """The gradients that are made of a product: products among its late users, past what is no product, and outputs.

    None of them where a product's gradient is made with another late product: the whole backward would be precomputed.
    """
    made = {product}
    gradients = []
    outputs = {node for _, node in joint.outputs}
    for node in joint.nodes:
        if not any(o in made for o in node.operands):
            continue
        if node in late and isinstance(node.op, Library):
            gradients.append(node)
        else:
            made.add(node)
            if node in late and node in outputs:
                gradients.append(node)
    behind = topological(o for node in gradients for o in node.operands)
    return [] if any(node in late and isinstance(node.op, Library) for node in behind) else gradients


def _is_linear(node: Node, cotangent: Node) -> bool:
    """Whether a value is linear in the cotangent, and of a dtype of wide range all along."""
    made = {cotangent}
    for each in topological([node]):
        scaled = {k for k, o in enumerate(each.operands) if o in made}
        if not scaled:
            continue
        if each.dtype not in WIDE_RANGE or each.op.multilinear is None:
            return False
        try:
            linear = set(each.op.multilinear(each))
        except TypeRuleError:  # a reshape of no elements has no axes to follow
            return False
        others = linear - scaled
        jointly = each.op.linear and all(splat(each.operands[k]) == 0 for k in others)
        if not scaled <= linear or not (jointly or (not each.op.linear and len(scaled) == 1)):
            return False
        made.add(each)
    return node in made
