"""Graphs and programs as text: round trips, errors that point, and texts that mean harm."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import struct
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry import call

import gradc.ops as ops
from gradc.errors import GradcError, IRFormatError, TypeRuleError
from gradc.inspect.export import from_json, model_explorer, to_dot, to_json
from gradc.ir.dims import Assumption, Predicate, assuming, ceildiv, floordiv, maximum, minimum, nonnegative, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.kernel import Buffer, Call, Kernel, Program, Select
from gradc.ir.node import REGISTRY, Note
from gradc.ir.op import Function
from gradc.ir.program_text import parse_kernel, parse_program
from gradc.ir.size_text import parse_size
from gradc.ir.statement import Index, Operand, Stmt
from gradc.ir.text import load, parse
from gradc.ir.types import BOOL, DTYPES, F32, I64, Type, parse_type
from gradc.ir.verify import verify

SLOW = bool(os.environ.get("GRADC_SLOW_TESTS"))
N, D, V = symbol("N"), symbol("D"), symbol("V")


def graph_of(value, *inputs, assumptions=(), notes=None, name="f"):  # type: ignore[no-untyped-def]
    return Graph(name, inputs, (("y", value),), assumptions, notes or {})


def example() -> Graph:
    tokens, table = input_node("tokens", parse_type("i64[N]")), input_node("d.table", parse_type("f32[V,D]"))
    rows = ops.gather(table, tokens, axis=0)
    y = ops.sum(ops.exp(rows) * 0.5, axis=1)
    notes = {rows: Note("rows", "model.py:12", "embed")}
    return Graph("bag", (tokens, table), (("y", y), ("d.rows", rows)), (Assumption(N, ">=", 1),), notes)


TEXT = """\
gradc-ir 1
// a comment, and a blank line

graph @bag<N,V,D>(%tokens: i64[N], %table: f32[V,D]) {
  assume(N >= 1)
  %0: f32[N,D] = gather %table, %tokens {axis=0}   # rows  model.py:12
  %1: f32[N,D] = exp %0
  %2: f32[N] = sum %1 {axis=[1]}
  return y=%2
}
"""


# -- round trips ------------------------------------------------------------------------------------------------------


def check_round_trip(graph: Graph) -> None:
    text = str(graph)
    again = parse(text)
    assert again == graph
    assert str(again).split("  #")[0] == text.split("  #")[0]
    verify(graph)
    assert from_json(json.loads(json.dumps(to_json(graph)))) == graph
    assert text.isascii() and to_dot(graph).isascii()
    json.dumps(model_explorer(graph))


def sample_graphs() -> list[tuple[str, Graph]]:
    found = []
    for name, op in sorted(REGISTRY.items()):
        for sample in op.samples if not isinstance(op, Function) else ():
            for dtype in ("f32", "bf16"):
                inputs = [
                    input_node(f"x{i}", parse_type(t.replace("F[", f"{dtype}[")))
                    for i, t in enumerate(sample.operands)
                    if isinstance(t, str)
                ]
                places = iter(inputs)
                try:
                    operands = [next(places) if isinstance(t, str) else t for t in sample.operands]
                    result = call(op, operands, sample.attrs)
                except TypeRuleError:  # a sample whose attributes are texts, for its own tests to read
                    continue
                found.append((name, graph_of(result, *inputs, name="g")))
    return found


def test_every_sample_of_every_op_round_trips() -> None:
    graphs = sample_graphs()
    assert {name for name, _ in graphs} >= {
        name for name, op in REGISTRY.items() if op.samples and not isinstance(op, Function)
    }
    for _, graph in graphs:
        check_round_trip(graph)


def test_the_text_of_a_graph() -> None:
    assert str(example()).splitlines()[:4] == [
        "graph @bag<N,V,D>(%tokens: i64[N], %d.table: f32[V,D]) {",
        "  assume(N >= 1)",
        (
            '  %0: f32[N,D] = gather %d.table, %tokens {axis=0, oob="error", padding_idx=none,'
            " scale_grad_by_freq=false}  # embed/rows  model.py:12"
        ),
        "  %1: f32[N,D] = exp %0",
    ]
    check_round_trip(example())
    assert next(iter(parse(str(example())).notes.values())) == Note("rows", "model.py:12", "embed", id=0)


def test_by_hand() -> None:
    graph = parse(TEXT)
    assert graph.input_names == ("tokens", "table") and graph.output_names == ("y",)
    assert parse(TEXT.replace("\n", "\r\n")) == graph
    assert parse(TEXT.replace("{axis=0}", "")) == graph  # a default
    assert parse(TEXT.replace("[1]", "[-1]")) == graph  # canonical
    assert parse("graph @g() {\nreturn\n}") == Graph("g", (), ())
    assert parse("graph @g(%x: f32[4]) {\nreturn y=%x\n}").output("y").op.name == "input"


CONSTANTS = {
    "f64": [
        0.0,
        -0.0,
        1.5,
        0.1,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0],
        5e-324,
        1.7976931348623157e308,
    ],
    "bool": [True, False],
    "i64": [0, 1, -1, 2**63 - 1, -(2**63) + 1],
}


@pytest.mark.parametrize("dtype", CONSTANTS)
def test_constants_are_exact(dtype: str) -> None:
    values = tuple(CONSTANTS[dtype])
    node = REGISTRY["constant"].apply((), {"value": values, "dtype": DTYPES[dtype], "shape": (len(values),)})
    check_round_trip(graph_of(node))


def test_zeros_and_nans_of_other_bits_are_other_constants() -> None:
    def one(value: object, dtype: str) -> Graph:
        return graph_of(REGISTRY["constant"].apply((), {"value": (value,), "dtype": DTYPES[dtype], "shape": ()}))

    texts = [str(one(v, "f64")) for v in CONSTANTS["f64"]]
    assert len(set(texts)) == len(texts)
    assert parse(texts[0]) != parse(texts[1])
    assert "-0x0p+0" in texts[1] and "value=[nan]" in texts[6] and "nan(0xfff8000000000001)" in texts[7]


sizes = st.recursive(
    st.one_of(
        st.integers(0, 9),
        st.sampled_from([N, D, symbol("none"), symbol("f32"), symbol("inf"), symbol("true"), symbol("max")]),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] * p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
        st.tuples(inner, st.integers(1, 9)).map(lambda p: floordiv(*p)),
        st.tuples(inner, st.sampled_from([N, D + 1, 7])).map(lambda p: ceildiv(*p)),
        st.tuples(inner, inner).map(lambda p: maximum(*p)),
        st.tuples(inner, inner).map(lambda p: minimum(*p)),
    ),
    max_leaves=6,
)


@given(sizes)
@settings(deadline=None, max_examples=300)
def test_sizes_read_back(size) -> None:  # type: ignore[no-untyped-def]
    assert parse_size(str(size)) == size
    check_round_trip(graph_of(ops.dim(size=size)))


@st.composite
def graphs(draw) -> Graph:  # type: ignore[no-untyped-def]
    """A random graph over a few square and vector values, with symbols, assumptions and notes."""
    rows = draw(st.sampled_from([N, 4, N * D, N + 1, symbol("inf")]))
    shape = (rows, draw(st.sampled_from([D, 3, 2 * D])))
    names = draw(st.lists(st.sampled_from(["x", "w.a", "_", "d.x", "return", "f32"]), min_size=1, unique=True))
    values = [input_node(name, Type(F32, shape)) for name in names]
    inputs = tuple(values)
    for _ in range(draw(st.integers(0, 12))):
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        which = draw(st.integers(0, 7))
        if which == 0:
            values.append(x * y)
        elif which == 1:
            values.append(x + draw(st.floats()))
        elif which == 2:
            values.append(ops.where(ops.gt(x, y), x, y))
        elif which == 3:
            values.append(ops.softmax(x, axis=draw(st.integers(-2, 1))))
        elif which == 4:
            values.append(ops.exp(x.astype(draw(st.sampled_from(["f64", "bf16", "f16"])))).astype("f32"))
        elif which == 5:
            values.append(x * ops.sum(y, axis=1, keepdims=True))
        elif which == 6:
            values.append(
                ops.clamp(
                    x, min=draw(st.one_of(st.none(), st.floats(-3, 0))), max=draw(st.one_of(st.none(), st.floats(0, 3)))
                )
            )
        else:
            values.append(x.T.reshape(shape) if draw(st.booleans()) else ops.flip(x, axis=(0,)))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    notes = {
        v: Note(draw(st.text(max_size=20)), draw(st.text(max_size=20)), draw(st.text(max_size=8)))
        for v in draw(st.lists(st.sampled_from(values)))
    }
    facts = draw(
        st.lists(
            st.sampled_from([Assumption(N, ">=", 1), Assumption(N, "==", 4 * D), Assumption(maximum(N, D), ">=", 2)])
        )
    )
    return Graph("g", inputs, tuple((f"o{i}", v) for i, v in enumerate(outputs)), tuple(facts), notes)


@given(graphs())
@settings(deadline=None, max_examples=1000 if SLOW else 150)
def test_random_graphs_round_trip(graph: Graph) -> None:
    check_round_trip(graph)


def test_types_made_under_an_assumption_and_without_it() -> None:
    x = input_node("x", Type(F32, (maximum(N - 1, 0), 4)))  # not simplified, though the graph assumes N >= 1
    facts = (Assumption(N, ">=", 1),)
    check_round_trip(graph_of(ops.exp(x), x, assumptions=facts))
    with assuming(facts):
        z = input_node("z", Type(F32, (maximum(N - 1, 0),)))
        assert str(z.type) == "f32[N-1]"
        check_round_trip(graph_of(ops.exp(z), z, assumptions=facts))


def test_a_file_and_its_arrays(tmp_path) -> None:  # type: ignore[no-untyped-def]
    names = ("file", "d.t", "w")
    arrays = {
        "file": np.arange(6, dtype=np.float32).reshape(2, 3),
        "d.t": np.arange(6).astype(ml_dtypes.bfloat16),
        "w": np.array([1, 2, 3], ml_dtypes.int4),
    }
    inputs = tuple(
        input_node(n, Type(DTYPES[t], arrays[n].shape)) for n, t in zip(names, ("f32", "bf16", "i4"), strict=True)
    )
    graph = Graph("g", inputs, tuple((n, i) for n, i in zip(names, inputs, strict=True)), defaults=arrays)
    path = tmp_path / "g.gir"
    graph.save(path)
    assert b"gradc-ir 1\ngraph @g(" in path.read_bytes()[:600] and [p.name for p in tmp_path.iterdir()] == ["g.gir"]
    again = load(path)
    assert again == graph
    for name in names:
        assert (
            again.defaults[name].dtype == arrays[name].dtype
            and again.defaults[name].tobytes() == arrays[name].tobytes()
        )
    Graph("g", inputs, graph.outputs).save(path)
    assert path.read_text().startswith("gradc-ir 1\n# no arrays\ngraph @g(")
    assert load(path).defaults == {} and sorted(p.name for p in tmp_path.iterdir()) == ["g.gir"]


def test_arrays_that_lie(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = input_node("x", parse_type("f32[2,3]"))
    path = tmp_path / "g.gir"
    graph = Graph("g", (x,), (("y", x),), defaults={"x": np.zeros((2, 3), np.float32)})

    def refused(match: str) -> None:
        with pytest.raises(IRFormatError, match=match):
            load(path)

    path.write_text(f"gradc-ir 1\n{graph}\n")  # as it was saved when arrays lay beside the text
    beside = tmp_path / "g.gir.npz"
    np.savez(beside, x=np.zeros((2, 3), np.float32))
    whole = beside.read_bytes()
    np.testing.assert_array_equal(load(path).defaults["x"], 0)
    for length in range(0, len(whole), 7):
        beside.write_bytes(whole[:length])
        refused("archive|holds|declares")
    np.savez_compressed(beside, x=np.zeros((2, 3), np.float32))
    refused("compressed")
    np.savez(beside, y=np.zeros((2, 3), np.float32))
    refused("no such input")
    np.savez(beside, x=np.zeros((3, 2), np.float32))
    refused("the input is f32")
    np.savez(beside, x=np.array([object()]))
    refused("declares")
    beside.write_bytes(whole.replace(b"(2, 3)", b"(2,10**15)"))
    refused("archive|declares")
    beside.write_bytes(whole.replace(b"'shape': (2, 3), }         ", b"'shape': (2, 3000000000), }"))
    refused("archive|declares")


# -- programs ---------------------------------------------------------------------------------------------------------


def at(*variables: str) -> tuple[Index, ...]:
    return tuple(map(Index.of, variables))


def example_program() -> Program:
    n, d = symbol("n"), D  # a dim that has the name of an axis
    body = (
        Stmt("%t", "load", (), I64, "tokens", at("n")),
        Stmt("", "check", ("%t",), attrs=(("source", 'a"b'), ("op", "embedding"), ("bound", V))),
        Stmt(
            "%k",
            "in_bounds",
            (),
            BOOL,
            "",
            (Index(n - 1, (("n", 2), ("d", V), ("%t", -1))),),
            attrs=(("hi", N), ("lo", 0)),
        ),
        Stmt("%i", "index", (), I64, "", (Index(),)),
        Stmt("%z", "size", (), I64, attrs=(("size", N * D),)),
        Stmt("%c", "const", (), F32, attrs=(("value", -0.1),)),
        Stmt("%g", "load", (), F32, "where", (Index.of("n"), Index(3, (("d", -2),))), "%k", (("other", -math.inf),)),
        Stmt("%0", "mul", ("%g", "%c"), F32),
        Stmt("%1", "cast", ("%0",), DTYPES["bf16"], attrs=(("dtype", DTYPES["bf16"]),)),
        Stmt("%s", "sum_cols", ("%0",), F32),
        Stmt("%2", "mul", ("%s", "%g"), F32),
        Stmt("", "accum", ("%2",), None, "g", at("%t", "d"), "%k"),
        Stmt("", "accum", ("%s",), None, "total", ()),
    )
    kernel = Kernel(
        "k_0",
        (("n", n), ("h", 2)),
        (("d", d),),
        body,
        "g",
        (("g", "segmented"), ("total", "privatized")),
        Note("k", "a.py:1"),
    )
    call = Call(
        "mm",
        "matmul",
        (("m", N), ("k", D)),
        Operand("c", at("m")),
        (Operand("a", at("m", "k")), Operand("b", (Index(1, (("k", 2),)),))),
        Note("mm"),
    )
    buffers = (
        Buffer("tokens", parse_type("i64[n]"), "input"),
        Buffer("where", parse_type("f32[N,D]"), "temp"),
        Buffer("flat", parse_type("f32[N*D]"), "temp", "where"),
        Buffer("c0", parse_type("f32[2]"), "const", "", (0.1, -math.inf)),
        Buffer("g", parse_type("f32[V,D]"), "output"),
    )
    of_some = Predicate(
        ((Assumption(N, ">=", 3072), Assumption(N, "==", 4 * D)), (Assumption(9 - D, ">=", maximum(N, V)),))
    )
    choice = Select(((of_some, kernel), (nonnegative([symbol("or") - 1, symbol("and") - 2]), kernel), (None, kernel)))
    return Program(
        "p",
        buffers,
        (kernel, call, choice),
        (Assumption(N, "==", 4 * D),),
        (("d.table", "g"), ("again", "g")),
        {"g": Note("g", "b.py:2")},
    )


def test_programs_round_trip() -> None:
    program = example_program()
    again = parse_program(str(program))
    assert again == program and str(again) == str(program)
    assert again.notes == program.notes and again.steps[0].note == program.steps[0].note
    kernel = program.kernels[0]
    assert parse_kernel(str(kernel)) == kernel
    assert parse_program("gradc-ir 1\nprogram @p {\nreturn\n}") == Program("p", (), ())


def test_the_text_of_a_kernel() -> None:
    assert [line.strip() for line in str(example_program().kernels[0]).splitlines()] == [
        "kernel @k_0 rows(n: n, h: 2) cols(d: D) order(g) strategy(g: segmented, total: privatized) {  # k  a.py:1",
        "%t = load tokens[n] : i64",
        'check %t {source="a\\"b", op="embedding", bound=V}',
        "phase",
        "%k = in_bounds n*2 + d*V + %t*(-1) + (n-1) {hi=N, lo=0} : bool",
        "%i = index 0 : i64",
        "%z = size {size=D*N} : i64",
        "%c = const {value=-0x1.999999999999ap-4} : f32",
        "%g = load where[n, d*(-2) + 3] where %k {other=-inf} : f32",
        "%0 = mul %g, %c : f32",
        "%1 = cast %0 {dtype=bf16} : bf16",
        "%s = sum_cols %0 : f32",
        "phase",
        "%2 = mul %s, %g : f32",
        "accum g[%t, d] <- %2 where %k",
        "accum total[] <- %s",
        "}",
    ]


indices = st.builds(
    Index,
    sizes,
    st.lists(st.tuples(st.sampled_from(["n", "d", "%t", "%0.x"]), sizes), unique_by=lambda t: t[0]).map(tuple),
)


@given(
    st.lists(indices, max_size=3),
    st.sampled_from(["load", "index", "in_bounds", "max", "where"]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None)
def test_any_statement_round_trips(index, op, buffer, where) -> None:  # type: ignore[no-untyped-def]
    if op in ("index", "in_bounds"):
        buffer, index = False, index[:1] or [Index()]
    s = Stmt(
        "%a",
        op,
        () if op in ("index", "in_bounds") else ("%b", "%c"),
        F32,
        "where" if buffer else "",
        tuple(index),
        "%m" if where else "",
    )
    kernel = Kernel("k", (("n", N),), (("d", D),), (s,))
    assert parse_kernel(str(kernel)) == kernel


# -- errors that point ------------------------------------------------------------------------------------------------

MISTAKES = [  # (what to replace, by what, message, the part under the carets)
    ("exp %0", "expp %0", "there is no op 'expp'; did you mean 'exp'?", "expp"),
    ("exp %0", "exp %0, %0", "exp takes 1 operands, got 2", "exp %0, %0"),
    ("exp %0", "exp", "exp takes 1 operands, got 0", "exp"),
    ("exp %0", "exp %9", "%9 is used before its definition", "%9"),
    ("exp %0", "exp %1", "%1 is used before its definition", "%1"),
    ("%1: f32", "%0: f32", "%0 is defined twice", "%0"),
    ("%1: f32", "%tokens: f32", "%tokens is defined twice", "%tokens"),
    ("%1: f32[N,D]", "%1: f32[N,4]", "%1 is stated as f32[N,4] but exp(f32[N,D]) is f32[N,D]", "f32[N,4]"),
    ("%1: f32[N,D]", "%1: f64[N,D]", "%1 is stated as f64[N,D] but exp(f32[N,D]) is f32[N,D]", "f64[N,D]"),
    ("%1: f32[N,D]", "%1: f33[N,D]", "'f33[N,D]' is not a type", "f33"),
    ("%1: f32[N,D]", "%1: f32[N,-4]", "f32[N,-4] has a negative size: -4", "f32"),
    ("%1: f32[N,D]", "%1: f32[N,D+]", "expected a number, a name or '('", "]"),
    ("%1: f32[N,D]", "%1: f32[N,9223372036854775808]", "a number beyond 2^63", "9223372036854775808"),
    ("%1: f32[N,D]", "%1: f32[9223372036854775807,2]", "more than 2^63 elements", "f32"),
    ("{axis=[1]}", "{axes=[1]}", "sum has no attribute 'axes'; it has axis", "axes=[1]"),
    ("{axis=[1]}", "", "sum: the attribute axis is missing", "sum"),
    ("{axis=[1]}", "{axis=[1], axis=[1]}", "the attribute axis is given twice", "axis"),
    ("{axis=[1]}", "{axis=[1}", "expected ',', found '}'", "}"),
    ("{axis=[1]}", "{axis=[1]", "expected ',', found the end of the line", " "),
    ("{axis=[1]}", '{axis="1', "a string that does not end", '"1'),
    ("{axis=[1]}", "{axis=[1e999999]}", "beyond what a number can be", "1e999999"),
    ("{axis=[1]}", "{axis=[99999999999999999999999]}", "beyond what a number can be", "99999999999999999999999"),
    ("{axis=[1]}", "{axis=[1]} x", "unexpected 'x'", "x"),
    ("@bag<", "@bag/<", "expected '(', found '/'", None),
    ("<N,V,D>", "<N,V>", "the dim D is used but the header declares only <N,V>", None),
    ("%tokens: i64", "%0: i64", "%0: an input has a name, not a number", "%0"),
    ("%table: f32", "%tokens: f32", "%tokens is defined twice", "%tokens"),
    ("y=%2", "y=%2, y=%1", "the output y is named twice", "y"),
    ("y=%2", "y=%3", "%3 is used before its definition", "%3"),
    ("y=%2", "%2", "expected NAME=%VALUE, found '%2'", "%2"),
    ("N >= 1", "N > 1", "an assumption reads 'N >= 1'", None),
    ("N >= 1", "N < 1", "an assumption reads 'N >= 1'", None),
    ("  %1", "  assume(N >= 2)\n  %1", "assumptions stand before the first op", "assume"),
    ("  return y=%2\n", "", "expected an op or 'return'", "}"),
    ("%2\n}\n", "%2\n}\n}\n", "unexpected '}' after the end of the graph", "}"),
    ("%2\n}\n", "%2\n", "the text ends before the closing '}'", None),
    ("gradc-ir 1", "gradc-ir 2", "expected '1', found '2'", "2"),
    ("exp %0", "exp %\x000", "U+0000 may not stand", "?"),
    ("exp %0", "exp %0\u202e", "U+202E may not stand", "?"),
    ("exp %0", "\u0435xp %0", "U+0435 may not stand", "?"),
    ("exp %0", "exp %0\x1b[31m", "U+001B may not stand", "?"),
    ("%1: f32[N,D] = exp %0", '%1: f32[N] = input {name="tokens"}', "inputs stand in the header", "input"),
]


@pytest.mark.parametrize(("old", "new", "message", "part"), MISTAKES)
def test_mistakes_are_pointed_at(old: str, new: str, message: str | None, part: str | None) -> None:
    text = TEXT.replace(old, new, 1)
    with pytest.raises(IRFormatError) as caught:
        parse(text)
    error = caught.value
    assert error.line >= 1 and error.column >= 1
    if message:
        assert message in str(error) and f"line {error.line}, column {error.column}" in str(error)
    if part:
        shown, carets = error.__notes__[0].splitlines()
        start = carets.index("^")
        assert shown[start : start + carets.count("^")].ljust(1) == part
        source = text.split("\n")[error.line - 1]
        assert part == "?" or source[error.column - 1 :][: len(part)].ljust(1) == part


def test_a_type_rule_keeps_its_class_and_gains_the_line() -> None:
    with pytest.raises(TypeRuleError) as caught:
        parse(TEXT.replace("axis=[1]", "axis=[2]"))
    assert str(caught.value).startswith("sum(f32[N,D]): ")
    assert caught.value.__notes__ == ["line 8, column 16:\n    %2: f32[N] = sum %1 {axis=[2]}\n                 ^^^"]


PROGRAM_MISTAKES = [
    ("program @p", "graph @p", "expected 'program'"),
    ("input tokens", "inpt tokens", "expected a kernel, a call, a select, a loop or 'return'"),
    ("temp flat: f32[D*N] of where", "temp flat: f32[D*N] of where2", "alias of where2, which is not defined above"),
    ("temp flat", "temp tokens", "the buffer tokens is defined twice"),
    ("const c0: f32[2] = [", "const c0: f32[2] = 3 [", "expected ',', found|unexpected|a list of numbers"),
    ("rows(n: n, h: 2)", "rows(n: n, n: 2)", "the axis n is named twice"),
    ("%i = index", "%k = index", "%k is defined twice"),
    (": bf16", ": bf17", "'bf17' is not a dtype"),
    ("tokens[n]", "tokens[n", "expected ']'"),
    ("tokens[n]", "tokens[n +]", "expected an axis, a value, a number or '\\('"),
    ("tokens[n]", "tokens[n + n]", "n stands twice"),
    ("<- %2 where %k", "<- 2 where %k", "expected a value, found '2'"),
    ("when N >= 3072 and", "when N > 3072 and", "an assumption reads"),
    ("when N >= 3072 and", "when N >= 3072 and and", "an assumption reads"),
    ("when N >= 3072 and", "when N >= 3072 xor", "unexpected 'xor'"),
    ("when N >= 3072 and", "when or", "an assumption reads"),
    ("else:", "otherwise:", "expected 'when SIZE >= SIZE:' or 'else:'"),
    ("d.table=g", "d.table=", "expected a name"),
    ("d.table=g, again=g", "d.table=g, d.table=g", "named twice"),
]


@pytest.mark.parametrize(("old", "new", "message"), PROGRAM_MISTAKES)
def test_mistakes_in_programs(old: str, new: str, message: str) -> None:
    text = str(example_program())
    assert old in text
    with pytest.raises(IRFormatError, match=message) as caught:
        parse_program(text.replace(old, new, 1))
    assert "^" in caught.value.__notes__[0]


# -- texts that mean harm ---------------------------------------------------------------------------------------------

HANG = 60.0
"""Seconds of the processor's time, far above what any of these takes; work that grows faster than the text takes hours.
"""


def refused(text: str, read=parse) -> GradcError:  # type: ignore[no-untyped-def]
    start = time.process_time()
    with pytest.raises(GradcError) as caught:
        read(text)
    assert time.process_time() - start < HANG
    assert len(str(caught.value)) < 2000 and all(len(note) < 2000 for note in getattr(caught.value, "__notes__", ()))
    return caught.value


@pytest.mark.parametrize("read", [parse, parse_program, parse_kernel])
def test_large_garbage(read) -> None:  # type: ignore[no-untyped-def]
    head = (
        "graph @f(%x: f32[4]) {\n"
        if read is parse
        else "program @f {\n"
        if read is parse_program
        else "kernel @k rows() cols() {\n"
    )
    noise = random.Random(0).randbytes(20_000_000).decode("latin-1")
    long = 20_000_000
    for text in (
        noise,
        head + noise,
        "a" * long,
        head + "%" * long,
        "\n" * long,
        head + "{[(" * (long // 3),
        " " * long,
        "x" * (2**26 + 1),
    ):
        with pytest.raises(IRFormatError):
            start = time.process_time()
            read(text)
        assert time.process_time() - start < HANG


@pytest.mark.parametrize("bracket", ["[", "(", "{", '"', "\\", "-", "max(", "[1,", '"\\', "#", "0x", "9", "a.", "%a,"])
def test_nesting_and_repetition(bracket: str) -> None:
    deep = bracket * 100_000
    for place in ("[1]", "f32[N,D] = exp", "N >= 1", "i64[N]", "bag", "%0: f32", "=%2"):
        refused(TEXT.replace(place, deep, 1))
    text = str(example_program())
    for place in ("tokens[n]", "[n, d*(-2) + 3]", "D*N", "3072", "segmented", "%g, %c"):
        start = time.process_time()
        with contextlib.suppress(GradcError):
            parse_program(text.replace(place, deep, 1))
        assert time.process_time() - start < HANG


EXPLODING = (
    "*".join(f"(a{i}+b{i})" for i in range(60)),
    "//".join(f"a{i}" for i in range(150)),
    "min(" * 30 + "N" + "".join(f",b{i})" for i in range(30)),
    "9" * 5000,
)


@pytest.mark.parametrize("size", EXPLODING)
def test_sizes_that_explode(size: str) -> None:
    refused(f"graph @f(%x: f32[{size}]) {{\nreturn y=%x\n}}")


def test_a_million_lines() -> None:
    refused("graph @f(%x: f32[4]) {\n" + "  %0: f32[4] = exp %x\n" * 1_000_000)
    refused("graph @f(%x: f32[4]) {\n" + "  assume(N >= 1)\n" * 1_000_000)
    refused("\n" * 1_100_000)


def test_reading_is_linear() -> None:
    def calls(lines: int) -> int:
        """How many functions, Python's and C's, reading so many lines calls: the same on every machine, however
        busy.
        """
        text = (
            "graph @f(%x: f32[N]) {\n"
            + "".join(f"  %{i:05}: f32[N] = exp %{f'{i - 1:05}' if i else 'x'}\n" for i in range(lines))
            + f"  return y=%{lines - 1:05}\n}}"
        )
        count = 0

        def seen(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += "call" in event

        sys.setprofile(seen)
        try:
            graph = parse(text)
        finally:
            sys.setprofile(None)
        assert len(graph.nodes) == lines + 1
        return count

    calls(100)
    few, more, most = calls(1000), calls(2000), calls(4000)
    assert most - more <= 2.02 * (more - few)


def test_truncated_at_every_byte() -> None:
    for text, read in ((TEXT.rstrip(), parse), (str(example()), parse), (str(example_program()), parse_program)):
        for length in range(len(text)):
            with pytest.raises(GradcError) as caught:
                read(text[:length])
            assert isinstance(caught.value, IRFormatError | TypeRuleError)


HOSTILE = [
    "*/",
    'x\n#include "/etc/passwd"',
    "{{7*7}}",
    "a\0b",
    "a" * 1_000_000,
    "a\u202eb",
    "__asm__()",
    '"); system("id");//',
    "a b",
    "",
    "1a",
    "a..b",
    "%a",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names(name: str) -> None:
    with pytest.raises(TypeRuleError):
        input_node(name, parse_type("f32[4]"))
    x = input_node("x", parse_type("f32[4]"))
    for make in (lambda: Graph(name, (x,), (("y", x),)), lambda: Graph("g", (x,), ((name, x),))):
        with pytest.raises(TypeRuleError):
            make()
    refused(TEXT.replace("%tokens: ", f"%{name}: "))
    refused(TEXT.replace("@bag", f"@{name}"))
    refused(TEXT.replace("y=%2", f"{name}=%2"))
    with pytest.raises(IRFormatError):
        from_json({**to_json(example()), "name": name})
    noted = graph_of(ops.exp(x), x, notes={ops.exp(x): Note(name, name, name)})
    check_round_trip(noted)
    assert len(str(noted).splitlines()) == 4 and len(str(noted)) < 500
    assert all(line.count('"') % 2 == 0 for line in to_dot(noted).replace('\\"', "").splitlines())


def mutations(text: str, count: int, seed: int):  # type: ignore[no-untyped-def]
    rng = random.Random(seed)
    words = "none nan inf 1e999 -1 f64 99999999999999999999999999 %0 %1 {axis=0} max( return phase".split()
    pieces = [*'[](){}<>%@=,:#"\\/*+-. \n\t\0\r09aNf', *words, "\u202e", "\xe9"]
    for _ in range(count):
        letters = text
        for _ in range(rng.randint(1, 4)):
            a = rng.randrange(len(letters) + 1)
            b = min(len(letters), a + rng.choice((0, 1, 1, 2, 5, 30)))
            kind = rng.randrange(4)
            if kind == 0:
                new = rng.choice(pieces)
            elif kind == 1:
                new = ""
            elif kind == 2:
                c = rng.randrange(len(letters) + 1)
                new = letters[c : c + rng.randint(1, 12)]
            else:
                new = chr(rng.randrange(32, 127))
            letters = letters[:a] + new + letters[b:]
        yield letters


def attribute_rich() -> str:
    """A text with many kinds of ops and attributes."""
    lines = ["graph @m<N,D>(%x: f32[N,4], %i: i64[N], %b: bool[N,4]) {", "  assume(N >= 1)"]
    body = [
        "f32[4,N] = transpose %x {axes=[1, 0]}",
        "f32[N,4] = clamp %x {max=1.5, min=none}",
        "f32[4*N] = reshape %x {shape=[4*N]}",
        "f32[N,4] = pad %x {pad_width=[[0, 0], [0, 0]], value=0.0}",
        "f32[N,2] = slice %x {limit=[N, 4], start=[0, 0], step=[1, 2]}",
        "f32[2] = constant {dtype=f32, shape=[2], value=[0x1p-1, nan(0x7ff8000000000001)]}",
        "f32[N,4] = where %b, %x, %x",
        'f32[N,4] = gather %x, %i {axis=0, oob="skip", padding_idx=1, scale_grad_by_freq=true}',
        "f32[D,4] = scatter_add %i, %x {axis=0, size=D}",
        "bf16[N,4] = cast %x {dtype=bf16}",
        "i64[] = dim {size=max(N, D)//2}",
        "f32[N] = mean %x {axis=-1, keepdims=false}",
        "f32[N,8] = concat %x, %x {axis=1}",
        "f32[3,N,4] = broadcast_to %x {shape=[3, N, 4]}",
        "f32[N,N] = matmul %x, %0",
        "f32[N,4] = softmax %x {axis=1}",
        'f32[N,4] = gelu %x {approximate="tanh"}',
        "i64[N] = argmax %x {axis=1}",
    ]
    lines += [f"  %{i}: {op}" for i, op in enumerate(body)]
    return "\n".join([*lines, f"  return {', '.join(f'o{i}=%{i}' for i in range(len(body)))}", "}"])


@pytest.mark.long("gradc/ir", "gradc/ops", "gradc/errors.py")
@pytest.mark.parametrize("which", ["graph", "attributes", "program"])
def test_mutations(which: str) -> None:
    text, read = {
        "graph": (str(example()), parse),
        "attributes": (attribute_rich(), parse),
        "program": (str(example_program()), parse_program),
    }[which]
    read(text)
    count = 400_000 if SLOW else 4_000
    slowest = accepted = 0.0
    for mutated in mutations(text, count, seed=int(os.environ.get("GRADC_FUZZ_SEED", 1))):
        start = time.process_time()
        try:
            result = read(mutated)
        except (IRFormatError, TypeRuleError):
            pass
        else:
            accepted += 1
            assert read(str(result)) == result or "nan" in mutated, mutated
        slowest = max(slowest, time.process_time() - start)
    assert slowest < HANG
    assert accepted < count / 2


def test_hostile_data() -> None:
    good = to_json(example())
    for broken in (
        {},
        {**good, "format": "gradc-ir 2"},
        {**good, "nodes": [{}]},
        {**good, "inputs": None},
        {**good, "assumptions": ["N >= 1)\nreturn"]},
    ):
        with pytest.raises(IRFormatError):
            from_json(broken)
    deep = json.loads("[" * 18 + "]" * 18)
    for value in (
        {"size": "N}"},
        {"float": "1e5"},
        {"code": "x"},
        {"size": 3},
        {"dtype": "f33"},
        deep,
        "x",
        {},
        {"a": 1, "b": 2},
    ):
        nodes = [{**good["nodes"][0], "attributes": {"axis": value}}, *good["nodes"][1:]]
        with pytest.raises((IRFormatError, TypeRuleError)):
            from_json({**good, "nodes": nodes})
