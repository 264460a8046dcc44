"""simplify: algebraic identities of single ops, as rewrite rules to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ...ir.dims import known_nonnegative, product, same
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.op import Alias, Movement
from ...ir.pattern import Rule, Var, apply_rules, match, op, splat
from ...ir.properties import Broadcasts, Reshapes, access
from ...ir.types import DType
from ...ops.rules import converted, full, reshaped, spread
from ...ops.shapes.movement import broadcast_axes
from ..manager import graph_pass
from .products_of_codes import ProductsOfCodes
from .replace_axis import converts, sums

x, y, z = Var("x"), Var("y"), Var("z")


def holds(inner: DType, outer: DType) -> bool:
    """Whether every value of dtype ``inner`` is a value of dtype ``outer``."""
    fraction = {"f8e4m3": 3, "f8e5m2": 2, "f16": 10, "bf16": 7, "f32": 23, "f64": 52, "f4e2m1": 1, "e8m0": 0}
    exponent = {"f8e4m3": 4, "f8e5m2": 5, "f16": 5, "bf16": 8, "f32": 8, "f64": 11, "f4e2m1": 2, "e8m0": 8}
    if inner is outer:
        return True
    if inner.is_float and outer.is_float:
        known = inner.name in fraction and outer.name in fraction
        return known and fraction[inner.name] <= fraction[outer.name] and exponent[inner.name] <= exponent[outer.name]
    if inner.is_integer and outer.is_integer:
        return outer.range[0] <= inner.range[0] and inner.range[1] <= outer.range[1]
    if inner.is_integer and outer.is_float and outer.name in fraction:
        return (inner.bits <= fraction[outer.name] + 1 and outer.name not in ("f8e4m3", "f8e5m2", "f16", "f4e2m1")) or (
            outer.name == "f16" and inner.bits <= 8
        )
    return False


def _cast_once(bound: Mapping[str, Node]) -> Node:
    """cast(cast(x, inner), outer)  ->  cast(x, outer)"""
    return converted(bound["x"], bound["outer"].dtype)


def _is_lossless(bound: Mapping[str, Node]) -> bool:
    """Whether cast(cast(x, inner), outer) equals cast(x, outer) for every x.  An integer cast to a float and back to an
    integer saturates, where a direct cast would wrap.
    """
    source, middle, outer = bound["x"].dtype, bound["inner"].dtype, bound["outer"].dtype
    return holds(source, middle) and (
        not (source.is_integer and middle.is_float and outer.is_integer) or holds(source, outer)
    )


def _outer_select(bound: Mapping[str, Node]) -> Node:
    """where(z, where(z, x, y), w)  ->  where(z, x, w)"""
    return call("where", bound["z"], bound["x"], bound["w"])


def _quotient(bound: Mapping[str, Node]) -> Node:
    """reciprocal(x) * y  ->  y / x"""
    return bound["y"] / bound["x"]


def _is_float(node: Node) -> bool:
    return node.dtype.is_float


def _one(bound: Mapping[str, Node]) -> Node:
    """pow(x, 0)  ->  1, of NaN, too"""
    return full(1, bound["power"])


def _repeated_product(bound: Mapping[str, Node]) -> Node:
    """pow(x, 2)  ->  x * x, pow(x, 3)  ->  x * x * x, of floats of 16 bits and fewer in f32: as torch computes them,
    and nothing overflows on the way that the power does not
    """
    x = bound["x"]
    wide = converted(x, x.dtype.compute) if x.dtype.is_float else x
    return converted(wide * wide * wide if splat(bound["n"]) == 3 else wide * wide, x.dtype)


def _operand(bound: Mapping[str, Node]) -> Node:
    """cast(x)  ->  x"""
    return bound["x"]


def _is_rounding(bound: Mapping[str, Node]) -> bool:
    """Whether cast(cast(x, inner), outer) does nothing but round x to a narrower float of 16 bits or more."""
    source, middle, outer = bound["x"].dtype, bound["inner"].dtype, bound["outer"].dtype
    return source is outer and source.is_float and middle.is_float and not holds(source, middle) and middle.bits >= 16


_cast_twice = op("cast", op("cast", x, bind="inner"), bind="outer")

BITS = [
    Rule(x * 1, x),
    Rule(1 * x, x),
    Rule(x / 1, x),
    Rule(x - 0.0, x),
    Rule(x + -0.0, x),
    Rule(op("neg", op("neg", x)), x),
    Rule(op("pow", x, 1), x),
    Rule(op("pow", x, 0, bind="power"), _one),
    Rule(op("stop_gradient", x), x),
    Rule(op("where", z, x, x), x),
    Rule(op("where", Var("c", lambda c: splat(c) == 1), x, y), x),
    Rule(op("where", Var("c", lambda c: splat(c) == 0), x, y), y),
    Rule(op("where", z, op("where", z, x, y), Var("w")), _outer_select),
    Rule(_cast_twice, _cast_once, _is_lossless),
    Rule(op("cast", x, bind="outer"), _operand, lambda m: m["x"].dtype is m["outer"].dtype),
]

REAL = [
    Rule(x + 0.0, x),
    Rule(0.0 + x, x),
    Rule(x - -0.0, x),
    Rule(op("reciprocal", x) * y, _quotient),
    Rule(op("pow", x, Var("n", lambda n: splat(n) in (2, 3))), _repeated_product),
    Rule(op("pow", Var("x", _is_float), -1), op("reciprocal", x)),
]
"""Equal over the reals: a zero added, a power as products."""


def _composed_movement(node: Node) -> Node | None:
    """movement of a constant of one value  ->  that constant; broadcast(broadcast(x)), reshape(reshape(x))  ->  one of
    them; reshape(cast(reshape(x)))  ->  cast(reshape(x))
    """
    if not isinstance(getattr(node.op, "lower", None), Movement | Alias) or len(node.operands) != 1:
        return None
    (source,) = node.operands
    value = splat(source)
    if (
        value is not None
        and not node.op.fills
        and not (access(node, Broadcasts) and not source.operands and source.rank == 0)
    ):
        return full(value, node)
    if access(node, Broadcasts) and access(source, Broadcasts):
        (narrow,) = source.operands
        ends = zip(narrow.shape, node.shape[node.rank - narrow.rank :], strict=True)
        # of an N that an assumption says to be 1, the 1 alone is repeated
        return spread(narrow, node.shape) if all(n == 1 or same(n, m) for n, m in ends) else None
    if access(node, Reshapes) and access(source, Reshapes):
        return reshaped(source.operands[0], node.shape)
    if access(node, Reshapes) and converts(source) and access(source.operands[0], Reshapes):
        return converted(reshaped(source.operands[0].operands[0], node.shape), source.dtype)
    return None


def _summed_broadcast(node: Node) -> Node | None:
    """sum(broadcast(x)) over axes that the broadcast added  ->  sum(x) * number of copies"""
    if not sums(node) or not access(node.operands[0], Broadcasts) or not node.dtype.is_float:
        return None
    wide = node.operands[0]
    (narrow,) = wide.operands
    repeated = set(broadcast_axes(narrow.shape, wide.shape)) & set(node.attrs["axis"])
    if not repeated:
        return None
    kept = tuple(1 if a in repeated else s for a, s in enumerate(wide.shape))
    lead = wide.rank - narrow.rank
    inner = spread(reshaped(narrow, (1,) * lead + narrow.shape), kept)
    size = product(wide.shape[a] for a in repeated)
    count = call("cast", call("dim", size=size), node.dtype)
    scaled = call("sum", inner, axis=node.attrs["axis"]) * count
    if known_nonnegative(size - 1):
        return scaled
    return call(
        "where", call("eq", spread(count, scaled.shape), full(0, scaled)), full(0, scaled), scaled
    )  # nothing added up is 0, whatever x is


def _unit_sum(node: Node) -> Node | None:
    """sum(x) over axes of size 1  ->  reshape(x), or the sum of that over the other axes"""
    if not sums(node) or node.operands[0].dtype is not node.dtype:
        return None
    (source,) = node.operands
    unit = [a for a in node.attrs["axis"] if source.shape[a] == 1]
    if not unit:
        return None
    left = tuple(s for a, s in enumerate(source.shape) if a not in unit)
    gone = [a for a in node.attrs["axis"] if a not in unit]
    axes = tuple(a - sum(u < a for u in unit) for a in gone)
    inner = reshaped(source, left)
    return call("sum", inner, axis=axes) if axes else inner


def _product_transposed(graph: Graph) -> Callable[[Node, Node], Node | None]:
    """transpose(matmul(x, y))  ->  matmul(y.T, x.T), or a transpose of that which keeps the last axis, where the
    product's rows become the last axis and nothing else reads it: a library can write it transposed; what is read may
    be rounded
    """
    product = op("matmul", x, y)
    patterns = (op("transpose", product), op("transpose", op("cast", product)))

    def rewrite(old: Node, new: Node) -> Node | None:
        bound: dict[str, Node] = {}
        found = next((p for p in patterns if match(p, new, bound)), None)
        if found is None or len(graph.users.get(old.operands[0], ())) != 1:
            return None
        if found is not patterns[0] and len(graph.users.get(old.operands[0].operands[0], ())) != 1:
            return None
        rank = new.rank
        axes = new.attrs["axes"]
        if axes[-1] != rank - 2:
            return None
        swapped_product = converted(call("matmul", bound["y"].T, bound["x"].T), new.dtype)
        swapped = {rank - 2: rank - 1, rank - 1: rank - 2}
        order = [swapped.get(axis, axis) for axis in axes]
        return swapped_product if order == [*range(rank)] else swapped_product.transpose(*order)

    return rewrite


def _sum_of_product(graph: Graph) -> Callable[[Node, Node], Node | None]:
    """sum(cast(cast(product, bf16), f32))  ->  sum(product), where nothing else reads the rounded product: there is
    nobody to move fewer bytes for, and a sum of many rounded values is off by more than one rounding
    """
    pattern, results = op("sum", _cast_twice), {node for _, node in graph.outputs}

    def rewrite(old: Node, new: Node) -> Node | None:
        bound: dict[str, Node] = {}
        if not match(pattern, new, bound) or not (_is_rounding(bound) and _is_contraction(bound["x"])):
            return None
        chain = (old.operands[0], *old.operands[0].operands)
        alone = all(len(graph.users.get(n, ())) == 1 and n not in results for n in chain)
        return again(new, (bound["x"],)) if alone else None

    return rewrite


def _is_movement(node: Node) -> bool:
    """Whether an op is unary data movement."""
    return isinstance(getattr(node.op, "lower", None), Movement | Alias) and len(node.operands) == 1


def _rounded_operands(graph: Graph, dtypes: Collection[DType]) -> set[Node]:
    """Graph -> the casts f32 -> bf16 -> f32 that contractions read, and the data movement after: rounded, an operand
    lies in half the memory, and processors multiply bf16 several times as fast.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if getattr(node.op, "contraction", False):
            for operand in node.operands:
                chain = [operand]
                while _is_movement(chain[-1]):
                    chain.append(chain[-1].operands[0])
                if converts(chain[-1]) and _is_rounded(chain[-1].operands[0], chain[-1].dtype, dtypes):
                    found.update(chain)
    return found


def _is_rounded(narrow: Node, wide: DType, dtypes: Collection[DType]) -> bool:
    """Whether a value is what was rounded from a wider float to one of these dtypes, and may have been moved since."""
    while _is_movement(narrow):
        narrow = narrow.operands[0]
    source = narrow.operands[0].dtype if converts(narrow) else narrow.dtype
    return narrow.dtype in dtypes and source is wide and source.is_float and not holds(source, narrow.dtype)


def _sink_widening(node: Node) -> Node:
    """move(cast(x, f32))  ->  cast(move(x), f32), so that the narrow value is what is moved"""
    if not _is_movement(node) or not converts(node.operands[0]):
        return node
    (wide,) = node.operands
    return converted(again(node, wide.operands), wide.dtype)


def _without_rounding(node: Node, round_products: Collection[DType]) -> Node:
    """A rounded operand after :func:`_sink_widening` -> the value without its rounding, for a reader that is no
    contraction; a product stays rounded to one of some dtypes.
    """

    def below(narrow: Node) -> Node:
        if _is_movement(narrow):
            return again(narrow, (below(narrow.operands[0]),))
        if converts(narrow) and narrow.operands[0].dtype is node.dtype:
            return narrow.operands[0]
        return converted(narrow, node.dtype)  # a constant by now, or what had that dtype before it was widened

    value = below(node.operands[0])
    kept = _is_contraction(value) or _is_scaled_product(_unmoved(value))
    return node if node.operands[0].dtype in round_products and kept else value


def _unmoved(node: Node) -> Node:
    """What a value is moved from."""
    while _is_movement(node):
        node = node.operands[0]
    return node


def _is_contraction(node: Node) -> bool:
    """Whether a value is a product, or one that was only moved since."""
    return bool(getattr(_unmoved(node).op, "contraction", False))


def _is_scaled_product(value: Node) -> bool:
    """Whether a value is a product times something, or rounded from one."""
    scaled = value.operands[0] if converts(value) else value
    return scaled.op.name == "mul" and any(map(_is_contraction, scaled.operands))


@graph_pass("REAL")
def simplify(
    graph: Graph,
    *,
    numerics: str = "real",
    round_operands: Collection[DType] = (),
    round_products: Collection[DType] = (),
    functions: Collection[str] = (),
) -> Graph:
    """x * 1 -> x, cast(cast(x)) -> x, ...: the BITS rules, and the REAL ones unless numerics="strict"; of these,
    f32 -> bf16 -> f32 is no rounding.

    :param round_operands: keep what rounds an operand of a contraction to one of these.
    :param round_products: and what rounds its result, for every reader; and what rounds a product times something
        that contractions read, or that is a result of the graph.
    :param functions: library ops that the target has a function for: products of 8-bit integers become
        ``integer_matmul`` where it is one.
    """

    def is_dropped(bound: Mapping[str, Node]) -> bool:
        kept = bound["inner"].dtype in round_products and _is_contraction(bound["x"])
        return _is_rounding(bound) and not kept

    rules = BITS + ([*REAL, Rule(_cast_twice, _cast_once, is_dropped)] if numerics != "strict" else [])
    of_products = [_product_transposed(graph), _sum_of_product(graph)] if numerics != "strict" else []
    structural = [_composed_movement, _unit_sum] + ([_summed_broadcast] if numerics != "strict" else [])
    if numerics != "strict" and "integer_matmul" in functions:
        products = ProductsOfCodes()
        of_products.append(lambda old, new: products.rewritten(new))
    rounded = _rounded_operands(graph, round_operands) if numerics != "strict" else set()
    new_rounded: set[Node] = set()
    in_memory = (*(node for _, node in graph.outputs), *(n.operands[0] for n in rounded if converts(n)))
    stored = {_unmoved(node) for node in in_memory if node.dtype in round_products}

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node in rounded:
            current = _sink_widening(again(node, operands))
            new_rounded.add(current)
            return current
        if not getattr(node.op, "contraction", False):
            operands = tuple(_without_rounding(o, round_products) if o in new_rounded else o for o in operands)
        current = again(node, operands)
        if converts(node) and node.operands[0] in stored and _is_scaled_product(operands[0]):
            return current  # it is in memory as it is given
        for _ in range(20):
            new = apply_rules(rules, current)
            moved = next((m for rewrite in structural if (m := rewrite(new)) is not None), new)
            if moved is current:
                return next((m for rewrite in of_products if (m := rewrite(node, current)) is not None), current)
            current = moved
        return current

    return graph.rewrite(rule)
