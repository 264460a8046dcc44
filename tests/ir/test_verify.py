"""verify and verify_program refuse what is wrong, and say where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gradc
import gradc.analysis.strategies  # the words of a program's `strategy(...)` are its records
import gradc.ops as ops
from gradc.errors import InternalError, TypeRuleError
from gradc.ir.accesses import check_of
from gradc.ir.dims import Assumption, Predicate, assuming, maximum, nonnegative, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.kernel import Buffer, Call, Kernel, Program, Select
from gradc.ir.node import REGISTRY, make
from gradc.ir.op import Function, Primitive
from gradc.ir.program_text import parse_program
from gradc.ir.statement import Index, Operand, Stmt
from gradc.ir.types import BOOL, DTYPES, F32, F64, I64, Type, parse_type
from gradc.ir.verify import verify, verify_accesses, verify_program
from gradc.passes.graph.decompose import decompose
from gradc.passes.schedule.schedule import schedule

N, D, V = symbol("N"), symbol("D"), symbol("V")
X = input_node("x", parse_type("f32[N,4]"))


def shown(error: TypeRuleError) -> str:
    """What the carets of the note stand under."""
    line, carets = error.__notes__[0].splitlines()[-2:]
    return line[carets.index("^") :][: carets.count("^")]


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_right_graphs_pass() -> None:
    y = ops.softmax(X * 2.0, axis=1)
    verify(Graph("g", (X,), (("y", y), ("x", X))))
    verify(Graph("g", (), ()))
    with assuming([Assumption(N, ">=", 1)]):
        z = input_node("z", Type(F32, (maximum(N - 1, 0),)))
        w = ops.exp(z)
    verify(Graph("g", (z,), (("y", w),), (Assumption(N, ">=", 1),)))


WRONG_NODES = [
    ("exp", (X,), {}, "f32[N,5]", "exp(f32[N,4]) is f32[N,4], but the node says f32[N,5]", "f32[N,5]"),
    ("exp", (X,), {}, "f64[N,4]", "is f32[N,4], but the node says f64[N,4]", "f64[N,4]"),
    ("exp", (X, X), {}, "f32[N,4]", "takes 1 to 1 operands, got 2", "exp"),
    ("sum", (X,), {"axis": (3,)}, "f32[N]", "sum(f32[N,4]): ", "sum"),
    ("sum", (X,), {"axis": (-1,)}, "f32[N]", "axis=(-1,) is not canonical, it should be (1,)", "axis="),
    ("sum", (X,), {}, "f32[N]", "attribute axis is missing", "sum"),
    ("sum", (X,), {"axis": (1,), "more": 1}, "f32[N]", "more is none of its attributes", "sum"),
    ("softmax", (X,), {}, "f32[N,4]", "axis is missing", "softmax"),
]


@pytest.mark.parametrize(("op", "operands", "attrs", "type_", "message", "part"), WRONG_NODES)
def test_wrong_nodes(op, operands, attrs, type_, message, part) -> None:  # type: ignore[no-untyped-def]
    node = make(REGISTRY[op], operands, attrs, parse_type(type_))
    with pytest.raises(TypeRuleError) as caught:
        verify(Graph("g", (X,), (("y", node),)))
    assert message in str(caught.value)
    assert shown(caught.value) == part


def test_an_op_nobody_registered() -> None:
    op = Primitive("test_only", infer=lambda x: x)
    node = op.apply((X,), {})
    graph = Graph("g", (X,), (("y", node),))
    try:
        verify(graph)
    finally:
        del REGISTRY["test_only"]
    with pytest.raises(TypeRuleError, match="there is no op 'test_only'"):
        verify(graph)


def test_bound_arrays() -> None:
    for array in (np.zeros((3, 5), np.float32), np.zeros((3, 4)), np.zeros(4, np.float32)):
        with pytest.raises(TypeRuleError, match="the array bound to the input x"):
            verify(Graph("g", (X,), (("y", X),), defaults={"x": array}))
    verify(Graph("g", (X,), (("y", X),), defaults={"x": np.zeros((3, 4), np.float32)}))


# -- programs ---------------------------------------------------------------------------------------------------------


def at(*variables: str) -> tuple[Index, ...]:
    return tuple(map(Index.of, variables))


BODY = (
    Stmt("%t", "load", (), I64, "tokens", at("n")),
    Stmt("", "check", ("%t",), attrs=(("bound", V), ("op", "embedding"), ("source", "tokens"))),
    Stmt("%k", "in_bounds", (), BOOL, "", at("d"), attrs=(("hi", D), ("lo", 0))),
    Stmt("%g", "load", (), F32, "dy", at("n", "d"), "%k"),
    Stmt("%0", "mul", ("%g", "%g"), F32),
    Stmt("%1", "cast", ("%0",), DTYPES["bf16"], attrs=(("dtype", DTYPES["bf16"]),)),
    Stmt("%s", "sum_cols", ("%0",), F32),
    Stmt("", "store", ("%s",), None, "sums", at("n")),
    Stmt("", "store", ("%1",), None, "low", at("n", "d")),
    Stmt("", "accum", ("%0",), None, "table", at("%t", "d"), "%k"),
)
KERNEL = Kernel("k_0", (("n", N),), (("d", D),), BODY, "table", (("table", "segmented"),))
CALL = Call(
    "mm_0",
    "matmul",
    (("m", N), ("n", N), ("k", D)),
    Operand("square", at("m", "n")),
    (Operand("dy", at("m", "k")), Operand("dy", at("n", "k"))),
)
BUFFERS = (
    Buffer("tokens", parse_type("i64[N]"), "input"),
    Buffer("dy", parse_type("f32[N,D]"), "input"),
    Buffer("sums", parse_type("f32[N]"), "temp"),
    Buffer("again", parse_type("f32[N,1]"), "temp", "sums"),
    Buffer("low", parse_type("bf16[N,D]"), "output"),
    Buffer("table", parse_type("f32[V,D]"), "output"),
    Buffer("square", parse_type("f32[N,N]"), "output"),
    Buffer("c0", parse_type("f32[2]"), "const", "", (1.0, 2.0)),
    Buffer("y", parse_type("f32[N]"), "output"),
)
LAST = Kernel(
    "last",
    (("n", N),),
    (),
    (Stmt("%0", "load", (), F32, "again", (*at("n"), Index())), Stmt("", "store", ("%0",), None, "y", at("n"))),
)
CHECK = check_of("tokens", parse_type("i64[N]"), V, "embedding", "tokens")
PROGRAM = Program(
    "p",
    BUFFERS,
    (CHECK, KERNEL, CALL, LAST),
    (),
    (("low", "low"), ("d.table", "table"), ("square", "square"), ("y", "y"), ("dy", "dy")),
)


def body(position: int, *statements: Stmt) -> Program:
    """The program with one statement of its first kernel replaced."""
    new = (*BODY[:position], *statements, *BODY[position + 1 :])
    return replace(PROGRAM, steps=(replace(KERNEL, body=new), CALL, LAST))


def scan(name: str, combine: str, *args: str, reverse: tuple[tuple[str, bool], ...] = (("reverse", False),)) -> Stmt:
    return Stmt(name, "scan", args, F32, attrs=(("combine", combine), *reverse))


def scan_of(combine: str, *args: str, more: tuple[Stmt, ...] = (), **reverse) -> Program:  # type: ignore[no-untyped-def]
    """The program with a scan in its first kernel."""
    return body(4, BODY[4], scan("%a", combine, *args, **reverse), *more)


def kernel(**changes) -> Program:  # type: ignore[no-untyped-def]
    return replace(PROGRAM, steps=(replace(KERNEL, **changes), CALL, LAST))


def buffers(name: str, **changes) -> Program:  # type: ignore[no-untyped-def]
    return replace(PROGRAM, buffers=tuple(replace(b, **changes) if b.name == name else b for b in BUFFERS))


def test_right_programs_pass() -> None:
    verify_program(PROGRAM)
    verify_program(
        replace(
            PROGRAM,
            steps=(CHECK, Select(((nonnegative([N - 9]), KERNEL), (None, replace(KERNEL, name="k_1")))), CALL, LAST),
        )
    )
    verify_program(Program("p", (), ()))


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (Predicate(()), "a condition without a comparison"),
        (Predicate(((Assumption(N, ">=", 9),), ())), "a condition without a comparison"),
        (nonnegative([N - 9], [symbol("Q") - N]), "no buffer or kernel has the dim Q"),
    ],
)
def test_conditions_of_a_select_are_comparisons_of_the_programs_sizes(when: Predicate, said: str) -> None:
    with pytest.raises(TypeRuleError, match=said):
        verify_program(replace(PROGRAM, steps=(CHECK, Select(((when, KERNEL), (None, KERNEL))), CALL, LAST)))


UNCHECKED = "axis 0 of table has V, and nothing before says that %t is inside: no step checks tokens"
UNSAFE = {
    "no check": (KERNEL, CALL, LAST),
    "a check too late": (KERNEL, CHECK, CALL, LAST),
    "of something else": (check_of("tokens", parse_type("i64[N]"), D, "embedding", "tokens"), KERNEL, CALL, LAST),
    "too loose a check": (check_of("tokens", parse_type("i64[N]"), V + 1, "embedding", "tokens"), KERNEL, CALL, LAST),
    "of some elements": (replace(CHECK, rows=(), cols=(("i0", N // 2),)), KERNEL, CALL, LAST),
    "in one of two cases": (
        Select(((nonnegative([N - 9]), CHECK), (None, replace(CHECK, body=CHECK.body[:1])))),
        KERNEL,
        CALL,
        LAST,
    ),
}


@pytest.mark.parametrize("steps", UNSAFE.values(), ids=UNSAFE)
def test_a_check_dominates_its_use(steps) -> None:  # type: ignore[no-untyped-def]
    """One in the kernel itself is too late too: KERNEL has it, and adds all the same."""
    with pytest.raises(TypeRuleError) as caught:
        verify_program(replace(PROGRAM, steps=steps))
    assert UNCHECKED in str(caught.value)
    assert shown(caught.value) == "table["
    with pytest.raises(TypeRuleError, match="no step checks tokens"):
        gradc.Executable(replace(PROGRAM, steps=steps), "numpy")


def test_places_that_sizes_decide_are_looked_at_when_sizes_are_known() -> None:
    """Of symbolic sizes it may not be known whether a place is inside: a call with sizes that put it outside is
    refused.
    """
    x, y = (Buffer(n, parse_type("f32[N]"), kind) for n, kind in (("x", "input"), ("y", "output")))
    body = (
        Stmt("%0", "load", (), F32, "x", (Index.of("i0") + (N - 2 * D),)),
        Stmt("", "store", ("%0",), F32, "y", at("i0")),
    )
    other = Buffer("d", parse_type("f32[D]"), "input")
    program = Program("p", (x, other, y), (Kernel("k", (), (("i0", D),), body),), (), (("y", "y"),))
    assert [k.name for k in verify_accesses(program)] == ["k"]
    run = gradc.Executable(program, "cpu").run
    assert run(x=np.arange(4, dtype=np.float32), d=np.zeros(2, np.float32))["y"][:2].tolist() == [0, 1]
    with pytest.raises(TypeRuleError, match="is not inside"):
        run(x=np.arange(3, dtype=np.float32), d=np.zeros(2, np.float32))


WRONG_PROGRAMS = {
    "buffer twice": (replace(PROGRAM, buffers=(*BUFFERS, BUFFERS[0])), "the buffer tokens is defined twice", "tokens"),
    "bad kind": (buffers("sums", kind="scratch"), "'scratch' is no kind of buffer", "scratch"),
    "alias of nothing": (buffers("again", alias="nobody"), "alias of nobody, which is not defined before it", "nobody"),
    "alias of itself": (buffers("again", alias="again"), "alias of again, which is not defined", "again"),
    "alias too large": (
        buffers("again", type=parse_type("f32[N,2]")),
        "again: f32[N,2] has other bytes than sums: f32[N]",
        "f32[N,2]",
    ),
    "const count": (buffers("c0", value=(1.0,)), "c0: f32[2] has 2 elements, its value 1", "f32[2]"),
    "output unknown": (replace(PROGRAM, outputs=(("y", "z"),)), "the buffer z, which is not defined", "z"),
    "output a temp": (replace(PROGRAM, outputs=(("s", "sums"),)), "is the temp sums", "sums"),
    "output unwritten": (replace(PROGRAM, steps=(KERNEL, CALL)), "the output y is never written", "y"),
    "temp unwritten": (
        replace(PROGRAM, steps=(LAST, KERNEL, CALL)),
        "kernel last: again is read before anything is written",
        "again[",
    ),
    "rank": (body(0, replace(BODY[0], index=at("n", "d"))), "tokens: i64[N] has rank 1, the index 2 parts", "tokens["),
    "no buffer": (body(0, replace(BODY[0], buffer="toks")), "the buffer toks is not defined", "toks"),
    "no axis": (body(0, replace(BODY[0], index=at("q"))), "there is no axis q", "q"),
    "load dtype": (body(0, replace(BODY[0], dtype=F32)), "loads f32 from tokens: i64[N]", ": f32"),
    "undefined": (body(4, replace(BODY[4], args=("%g", "%z"))), "%z is used before its definition", "%z"),
    "twice": (body(4, BODY[3]), "%g is defined twice", "%g"),
    "name": (body(4, replace(BODY[4], name="0")), "'0' is no name for a value", "0"),
    "unnamed": (body(4, replace(BODY[4], name="")), "a value has a name", "mul"),
    "named effect": (body(7, replace(BODY[7], name="%w")), "an effect has no name", "store"),
    "index dtype": (body(9, replace(BODY[9], index=at("%g", "d"))), "%g is an index, but f32 is no integer", "%g"),
    "mask dtype": (body(9, replace(BODY[9], where="%t")), "%t is a mask, but i64 is not bool", "where %t"),
    "result dtype": (body(4, replace(BODY[4], dtype=F64)), "mul(f32, f32) is f32, the statement says f64", ": f64"),
    "cast dtype": (body(5, replace(BODY[5], dtype=F32)), "cast(f32) is bf16, the statement says f32", ": f32"),
    "arity": (body(4, replace(BODY[4], args=("%g",))), "takes 2 to 2 operands, got 1", "mul"),
    "operand dtypes": (body(4, replace(BODY[4], args=("%g", "%t"))), "dtypes differ", "mul"),
    "unknown op": (body(4, replace(BODY[4], op="mull")), "there is no statement 'mull'", "mull"),
    "reduction": (body(6, replace(BODY[6], args=("%0", "%0"))), "sum_cols takes 1 values, got 2", "sum_cols"),
    "scan": (scan_of("sum", "%0", "%0"), "scan takes 1 values, got 2", "scan"),
    "scan of no kind": (scan_of("mean", "%0"), "scans by 'mean'; there are sum, prod", "scan"),
    "scan dtype": (scan_of("argmax", "%0"), "scan(f32) is i64, the statement says f32", ": f32"),
    "recurrence of integers": (scan_of("affine", "%t", "%t"), "it takes floats of one dtype", "scan"),
    "scan without a direction": (scan_of("sum", "%0", reverse=()), "the attribute reverse is missing", "scan"),
    "scans in two directions": (
        scan_of("sum", "%0", more=(scan("%b", "max", "%0", reverse=(("reverse", True),)),)),
        "%a scans the columns in the other direction",
        "reverse=",
    ),
    "scan in reverse beside the first of equals": (
        scan_of("sum", "%0", reverse=(("reverse", True),), more=(Stmt("%m", "argmax_cols", ("%0",), I64),)),
        "the first of equals is not known",
        "argmax_cols",
    ),
    "scan of two axes": (
        kernel(rows=(), cols=(("n", N), ("d", D)), body=(*BODY[:5], scan("%a", "sum", "%0"))),
        "scans 2 axes of columns",
        "scan",
    ),
    "store dtype": (body(8, replace(BODY[8], args=("%0",))), "stores f32 to low: bf16[N,D]", "<- %0"),
    "store race": (body(7, replace(BODY[7], args=("%0",))), "varies along d at an index that does not", "sums["),
    "accum kind": (body(9, replace(BODY[9], args=("%k",))), "adds bool to table: f32[V,D]", "<- %k"),
    "input written": (
        body(7, replace(BODY[7], buffer="dy", index=at("n", "d"))),
        "writes dy, which is an input",
        "dy[",
    ),
    "const written": (body(7, replace(BODY[7], buffer="c0")), "writes c0, which is a constant", "c0["),
    "check attrs": (body(1, replace(BODY[1], attrs=())), "the attribute bound is missing", "check"),
    "a bound that is no size": (
        body(2, replace(BODY[2], attrs=(("hi", D), ("lo", float("nan"))))),
        "in_bounds: lo=nan is no size",
        "lo=",
    ),
    "in_bounds attrs": (body(2, replace(BODY[2], attrs=(("hi", D),))), "the attribute lo is missing", "in_bounds"),
    "axis twice": (kernel(cols=(("n", D),)), "the axis n is named twice", "n:"),
    "negative axis": (kernel(cols=(("d", -1),)), "the axis d has the size -1", "d:"),
    "strategy": (kernel(strategy=(("table", "magic"),)), "'magic' is no strategy", "magic"),
    "strategy target": (
        kernel(strategy=(("low", "segmented"),)),
        "a strategy for low, which no accum of it writes",
        "low:",
    ),
    "order": (kernel(order="low", strategy=()), "the order low is the buffer of none of its accums", "order(low)"),
    "segmented order": (kernel(order=""), "table is segmented, but the rows are in the order of nothing", "table:"),
    "call op": (
        replace(PROGRAM, steps=(KERNEL, replace(CALL, op="matmull"), LAST)),
        "call mm_0: there is no op 'matmull'",
        "matmull",
    ),
    "call axis": (
        replace(PROGRAM, steps=(KERNEL, replace(CALL, axes=CALL.axes[:2]), LAST)),
        "call mm_0: there is no axis k",
        "k",
    ),
    "select": (
        replace(PROGRAM, steps=(Select(((None, KERNEL), (None, KERNEL))), CALL, LAST)),
        "the last case, and only that",
        "select",
    ),
    "select writes": (
        replace(PROGRAM, steps=(KERNEL, CALL, Select(((nonnegative([N - 2]), LAST), (None, KERNEL))))),
        "the cases write",
        "select",
    ),
}


@pytest.mark.parametrize("case", WRONG_PROGRAMS)
def test_wrong_programs(case: str) -> None:
    program, message, part = WRONG_PROGRAMS[case]
    with pytest.raises(TypeRuleError) as caught:
        verify_program(program)
    assert message in str(caught.value)
    assert shown(caught.value) == part


def test_every_scheduled_sample() -> None:
    checked = 0
    for name, op in sorted(REGISTRY.items()):
        for sample in op.samples if not isinstance(op, Function) else ():
            inputs = [
                input_node(f"x{i}", parse_type(t.replace("F[", "f32[")))
                for i, t in enumerate(sample.operands)
                if isinstance(t, str)
            ]
            places = iter(inputs)
            try:
                result = op(*(next(places) if isinstance(t, str) else t for t in sample.operands), **sample.attrs)
                program = schedule(decompose(Graph(name, tuple(inputs), (("y", result),))))
            except (
                TypeRuleError,
                InternalError,
            ):  # attributes that are texts; what no kernel is written for: others test that
                continue
            verify_program(program)
            assert parse_program(str(program)) == program
            checked += 1
    assert checked > 300


def test_a_program_with_nan_is_the_program_of_its_text() -> None:
    """Python's NaNs are equal only where they are one object; a user, NumPy and the parser each make others."""
    for nan in (float("nan"), np.float32("nan"), np.float64("nan").item()):
        x = input_node("x", parse_type("f32[3]"))
        program = schedule(decompose(Graph("f", (x,), (("y", ops.where(x > 0, nan, x)),))))
        assert "value=nan" in str(program) and parse_program(str(program)) == program
