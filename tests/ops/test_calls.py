"""How ops are called: other libraries' names of arguments, operators, optional operands that are left out."""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradc import interp, ops
from gradc.errors import TypeRuleError
from gradc.ir.node import REGISTRY, call
from gradc.ir.op import Composite, Expr, Primitive
from gradc.ops.rules import unary_float
from gradc.trace import trace

X = np.array([[1.0, 2.0, 0.0], [-1.0, 2.0, 7.0]])


def value(fn: Callable[..., Any], **arrays: Any) -> np.ndarray:
    given = arrays or {"x": X}
    return np.asarray(interp.run(trace(fn, **given), **given)["y"])


NAMES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dim, keepdim": (lambda x: ops.sum(x, dim=1, keepdim=True), lambda x: ops.sum(x, axis=1, keepdims=True)),
    "dim of an op without comforts": (lambda x: ops.softmax(x, dim=0), lambda x: ops.softmax(x, axis=0)),
    "dims": (lambda x: ops.flip(x, dims=(0,)), lambda x: ops.flip(x, axis=(0,))),
    "correction": (lambda x: ops.var(x, dim=1, correction=1), lambda x: ops.var(x, axis=1, ddof=1)),
    "input and other": (lambda x: ops.add(input=x, other=1.0), lambda x: x + 1.0),
    "size": (lambda x: ops.broadcast_to(x, size=(2, 2, 3)), lambda x: ops.broadcast_to(x, (2, 2, 3))),
    "dim of the sugar": (lambda x: ops.argmax(x, dim=1), lambda x: ops.argmax(x, axis=1)),
    "axis of an op with dim": (
        lambda x: ops.index_select(x, np.array([1]), axis=1),
        lambda x: ops.index_select(x, np.array([1]), dim=1),
    ),
}


NAMES |= {
    "a list": (lambda x: ops.stack([x, x * 2.0], 1), lambda x: ops.stack(x, x * 2.0, axis=1)),
    "a tuple": (lambda x: ops.concat((x, x * 2.0), -1), lambda x: ops.concat(x, x * 2.0, axis=-1)),
    "a list and dim": (lambda x: ops.concat([x, x], dim=1), lambda x: ops.concat(x, x, axis=1)),
    "a list behind an equation": (lambda x: ops.einsum("ij,ij->i", [x, x]), lambda x: ops.einsum("ij,ij->i", x, x)),
    "a list with an array": (lambda x: ops.stack([x, X], np.int64(0)), lambda x: ops.stack(x, X)),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries(name: str) -> None:
    """The same graph, but for its name."""
    theirs, own = (trace(fn, name="g", x=X) for fn in NAMES[name])
    assert theirs == own


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [list, tuple])
def test_operands_in_one_list(kind: Callable[..., Any], axis: int) -> None:
    for op, numpys in ((ops.stack, np.stack), (ops.concat, np.concatenate)):
        np.testing.assert_array_equal(value(lambda x, op=op: op(kind([x, x * 2.0]), axis)), numpys([X, X * 2.0], axis))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.stack([x, x], 1, axis=1), "stack: axis is given twice"),
        (lambda x: ops.concat([x, x], 1, dim=0), "concat: axis is given twice"),
        (lambda x: ops.stack([x, x], 1, 2), "in one list or tuple, behind which axis by position may be"),
        (lambda x: ops.concat([x], x), "in one list or tuple, behind which axis by position may be"),
        (lambda x: ops.einsum("ij,jk", [x], x), "in one list or tuple, behind which nothing is"),
        (lambda x: ops.stack([]), "nothing to join"),
        (lambda x: ops.stack([x, x], 3), "axis=3"),
    ],
)
def test_a_list_of_operands_that_is_wrong(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        trace(call, x=X)


COMPARISONS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "== a number": (lambda x: x == 2.0, X == 2.0),
    "!= a number": (lambda x: x != 2.0, X != 2.0),
    "a number ==": (lambda x: 2.0 == x, X == 2.0),
    "== a value": (lambda x: x == ops.flip(x, axis=0), X == X[::-1]),
    "== an array": (lambda x: x == np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]) == X),
    "an array !=": (lambda x: np.array([1.0, 2.0, 3.0]) != x, np.array([1.0, 2.0, 3.0]) != X),
    "itself": (lambda x: x != x, X != X),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_equality_compares_elements(name: str) -> None:
    fn, want = COMPARISONS[name]
    np.testing.assert_array_equal(value(fn), want)


def test_a_value_equals_no_object_of_another_kind() -> None:
    def fn(x: Any) -> Any:
        assert not (x == None) and x != None and not (x == "x")  # noqa: E711
        return x

    assert value(fn) is not None


def test_values_are_keys_by_identity() -> None:
    def fn(x: Any) -> Any:
        other = x + 1.0
        found = {x: 1, other: 2}
        assert (found[x], found[x + 1.0], len({x, other, x + 1.0})) == (1, 2, 2)
        return x

    assert value(fn) is not None


def test_graphs_are_equal_where_their_nodes_are() -> None:
    one, again = (trace(lambda x: x * 2.0, name="g", x="f32[N]") for _ in range(2))
    assert one == again and hash(one) == hash(again) and one != trace(lambda x: x * 3.0, name="g", x="f32[N]")
    assert one != "g"


def test_a_bias_needs_no_weight() -> None:
    bias = np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(
        value(lambda x, b: ops.layer_norm(x, (3,), None, b), x=X, b=bias),
        value(lambda x: ops.layer_norm(x, (3,)), x=X) + bias,
        rtol=1e-15,
    )


@pytest.mark.parametrize("text", ["{0} * 0.5", "1. - {0}", "{0} * .5", "1e-3 * {0}", "{0} * 1.5e3"])
def test_a_decimal_in_an_expression_of_c_is_refused(text: str) -> None:
    """It would make an f32 kernel compute in f64."""
    with pytest.raises(TypeRuleError, match="a decimal makes C compute in f64"):
        Expr(text)
    assert Expr("{0} / 2 + 1").text


def test_the_interpreter_sees_an_op_that_is_registered_anew() -> None:
    """A composite is made of it, and the graph is the one that ran before."""
    before = dict(ops.REGISTRY)

    def add(number: int) -> None:
        Primitive("inner", infer=unary_float, reference=lambda x: x + number, lower=Expr(f"{{0}} + {number}"), doc="-")

    try:
        add(1)
        outer = Composite("outer", infer=unary_float, decompose=lambda x: call("inner", x), doc="-")
        first = trace(lambda x: outer(x), x=X)
        assert interp.run(first, x=X)["y"].tolist() == (X + 1).tolist()
        add(10)
        again = trace(lambda x: outer(x), x=X)
        assert again == first and interp.run(again, x=X)["y"].tolist() == (X + 10).tolist()
    finally:
        ops.REGISTRY.clear()
        ops.REGISTRY.update(before)


def test_help_is_about_the_op() -> None:
    """What ``help(ops.NAME)`` prints, and what stands at a prompt."""
    for op in (ops.layer_norm, ops.sum, ops.stack, ops.matmul, ops.exp):
        text = pydoc.plain(pydoc.render_doc(op))
        assert f"{op.name}(" in text and op.doc in " ".join(text.split()).replace("\n", " "), text
        assert "Method resolution order" not in text
    assert repr(ops.layer_norm) == "<op layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05)>"
    assert all(repr(op).startswith("<op ") and len(repr(op)) < 400 for op in REGISTRY.values())
    assert type(ops.exp).__doc__ != ops.exp.__doc__
