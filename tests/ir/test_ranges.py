"""The ranges of integers that the verifier of programs believes: none is narrower than what a kernel computes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradc import interp
from gradc.ir.dims import evaluate, symbol
from gradc.ir.kernel import Buffer, Kernel, Program
from gradc.ir.ranges import KernelRanges, Range, constant, inside, multiples
from gradc.ir.statement import Index, Stmt
from gradc.ir.types import BOOL, DTYPES, F64, I32, I64, DType, parse_type

U8, I8, F32 = DTYPES["u8"], DTYPES["i8"], DTYPES["f32"]
INTEGERS, FLOATS = (I64, I32, I8, U8), (F64, F32)
N, M = symbol("N"), symbol("M")
HERE = (Index.of("n"),)
ELEMENTS = {
    I64: [3, 0, 7, -2, 5, 1],
    I32: [0, 1, 2, 3, 4, 5],
    I8: [-128, 127, 5, 0, -1, 3],
    U8: [255, 0, 128, 1, 7, 4],
    F64: [3.5, -0.5, np.nan, np.inf, 4.0, -2.0],
    F32: [0.0, 3.5, 6.5, -1.5, np.inf, np.nan],
}


@st.composite
def kernels(draw: st.DrawFn) -> tuple[Stmt, ...]:
    """Statements over one axis n: loads of every type, and what the ranges have rules for."""
    body: list[Stmt] = [Stmt(f"%{t.name}", "load", (), t, f"in_{t.name}", HERE) for t in (*INTEGERS, *FLOATS)]

    def of(*dtypes: DType) -> str:
        return draw(st.sampled_from([s.name for s in body if s.dtype in dtypes]))

    def add(op: str, args: tuple[str, ...], dtype: DType, **more: object) -> str:
        attrs = tuple(sorted(more.pop("attrs", {}).items()))  # type: ignore[attr-defined]
        body.append(Stmt(f"%{len(body)}", op, args, dtype, attrs=attrs, **more))  # type: ignore[arg-type]
        return body[-1].name

    def number(dtype: DType) -> str:
        if dtype in (I64, F64) and draw(st.booleans()):
            size = add("size", (), I64, attrs={"size": draw(st.sampled_from([N, M, N * 2, N - 1]))})
            return size if dtype is I64 else add("cast", (size,), F64, attrs={"dtype": F64})
        low = 0 if dtype is U8 else -3
        return add("const", (), dtype, attrs={"value": draw(st.integers(low, 9)) * (1.0 if dtype.is_float else 1)})

    def step(kind: str) -> None:
        dtype = draw(st.sampled_from(INTEGERS))
        if kind == "number":
            number(draw(st.sampled_from((*INTEGERS, *FLOATS))))
        elif kind in ("add", "sub", "mul"):
            add(kind, (of(dtype), draw(st.sampled_from([of(dtype), number(dtype)]))), dtype)
        elif kind == "compare":
            of_ = draw(st.sampled_from((*INTEGERS, *FLOATS)))
            add(draw(st.sampled_from(["ge", "gt", "le", "lt"])), (of(of_), number(of_)), BOOL)
        elif kind == "both" and any(s.dtype is BOOL for s in body):
            add("bitwise_and", (of(BOOL), of(BOOL)), BOOL)
        elif kind == "where" and any(s.dtype is BOOL for s in body):
            of_ = draw(st.sampled_from((*INTEGERS, *FLOATS)))
            add("where", (of(BOOL), of(of_), of(of_)), of_)
        elif kind == "masked load" and any(s.dtype is BOOL for s in body):
            add(
                "load",
                (),
                dtype,
                buffer=f"in_{dtype.name}",
                index=HERE,
                where=of(BOOL),
                attrs={"other": draw(st.integers(0, 100))},
            )
        elif kind == "cast":
            source = draw(st.sampled_from((*INTEGERS, *FLOATS)))
            to = draw(st.sampled_from(INTEGERS if source.is_float else (*INTEGERS, *FLOATS)))
            add("cast", (of(source),), to, attrs={"dtype": to})
        elif kind == "in_bounds":
            low = draw(st.integers(-2, 3))
            add(
                "in_bounds", (), BOOL, index=(place(),), attrs={"lo": low, "hi": draw(st.sampled_from([low + 4, N, M]))}
            )
        elif kind == "index":
            add("index", (), I64, index=(place(),))
        elif kind == "divided":
            by = add("const", (), I64, attrs={"value": draw(st.integers(1, 5))})
            add(draw(st.sampled_from(["mod", "floordiv", "right_shift", "bitwise_and"])), (of(I64), by), I64)

    def place() -> Index:
        terms = draw(st.lists(st.tuples(st.sampled_from(["n", of(I64)]), st.integers(-3, 3)), min_size=1, max_size=2))
        return sum((Index.of(v) * c for v, c in terms), Index(draw(st.integers(-4, 4))))

    kinds = [
        "number",
        "add",
        "sub",
        "mul",
        "compare",
        "compare",
        "both",
        "where",
        "where",
        "masked load",
        "cast",
        "in_bounds",
        "index",
        "divided",
    ]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=14)):
        step(kind)
    return tuple(body)


def holds(found: Range, values: np.ndarray, sizes: dict[str, int]) -> bool:
    """Whether all values lie between the bounds; a range without a bound says nothing, one with a bound leaves no
    NaN.
    """
    lows, highs = ([evaluate(b, sizes) for b in bounds] for bounds in (found.lows, found.highs))
    for value in values.tolist():
        if isinstance(value, float) and not np.isfinite(value):
            inside = not (lows and (value != value or value < 0)) and not (highs and (value != value or value > 0))
        else:
            inside = all(low <= Fraction(value) for low in lows) and all(Fraction(value) <= high for high in highs)
        if not inside:
            return False
    return True


def ranges_and_values(body: tuple[Stmt, ...]) -> tuple[KernelRanges, dict[str, np.ndarray], dict[str, int]]:
    """What is believed of a kernel's values, and what they are."""
    loaded = {t: np.array(values, t.np) for t, values in ELEMENTS.items()}
    sizes = {"N": 6, "M": 4}
    named = [s for s in body if s.dtype is not None]
    stores = tuple(Stmt("", "store", (s.name,), s.dtype, f"out_{i}", HERE) for i, s in enumerate(named))
    kernel = Kernel("k", (), (("n", N),), (*body, *stores))
    buffers = [Buffer(f"in_{t.name}", parse_type(f"{t.name}[N]"), "input") for t in ELEMENTS] + [
        Buffer("of_m", parse_type("i8[M]"), "input")
    ]
    outputs = [Buffer(f"out_{i}", parse_type(f"{s.dtype}[N]"), "output") for i, s in enumerate(named)]
    program = Program("p", (*buffers, *outputs), (kernel,), (), tuple((b.name, b.name) for b in outputs))
    given = {f"in_{t.name}": array for t, array in loaded.items()} | {"of_m": np.zeros(4, np.int8)}
    got = interp.run(program, given)
    known = {f"in_{t.name}": constant(tuple(values), t) for t, values in ELEMENTS.items() if t.is_integer}
    ranges = KernelRanges(kernel, {b.name: b.type for b in program.buffers}, lambda buffer: known.get(buffer, Range()))
    return ranges, {s.name: np.asarray(got[f"out_{i}"]) for i, s in enumerate(named)}, sizes


@given(kernels())
@settings(max_examples=300, deadline=None)
def test_no_range_is_too_narrow(body: tuple[Stmt, ...]) -> None:
    """For every value of a kernel, everywhere and where a mask is true."""
    ranges, values, sizes = ranges_and_values(body)
    masks = ["", *(s.name for s in body if s.dtype is BOOL)]
    for mask in masks:
        true = ranges.conditions(mask)
        where = values[mask] if mask else np.ones(sizes["N"], bool)
        for s in body:
            if s.dtype is not BOOL:
                found = ranges.value(s.name, true)
                assert holds(found, values[s.name][where], sizes), (
                    f"{s} where {mask or 'anything'}: {found}, but {values[s.name][where]}\n"
                    + "\n".join(map(str, body))
                )


def test_what_the_ranges_say() -> None:
    """What they know is believed by every program with a mask, so it may not get lost either."""
    x, four = Stmt("%x", "load", (), F32, "in_f32", HERE), Stmt("%4", "const", (), F32, attrs=(("value", 4.0),))
    byte, one = Stmt("%b", "load", (), I32, "in_i32", HERE), Stmt("%1", "const", (), I64, attrs=(("value", 1),))
    wide, next_ = Stmt("%i", "cast", ("%b",), I64, attrs=(("dtype", I64),)), Stmt("%d", "add", ("%i", "%1"), I64)
    ranges, _, _ = ranges_and_values((x, four, Stmt("%m", "lt", ("%x", "%4"), BOOL), byte, one, wide, next_))
    assert ranges.value("%d", frozenset()) == Range((1,), (6,))
    assert ranges.value("%x", ranges.conditions("%m")) == Range((), (4,)) and ranges.value("%x", frozenset()) == Range()


def test_what_tests_of_its_parts_say_of_an_index() -> None:
    """Each test names variables of its own, and others that bring more bounds than are kept do not hide it."""
    a, b = Index.of("a"), Index.of("b")
    assert list(multiples(a * (N * -2) + b, a * -2 + Index(4))) == [(N, b + Index(N * -4))]
    rows = tuple((name, size) for name, size in zip("abc", (N, M, N + M), strict=True))
    tested = [Index.of(v) * 2 + Index.of(f"%{v}") for v in "abc"]
    body = [Stmt(f"%{v}", "load", (), I64, "in_i64", (Index.of("n"),)) for v in "abc"]
    body += [
        Stmt(f"%0{k}", "in_bounds", (), BOOL, index=(i,), attrs=(("hi", 3), ("lo", 0))) for k, i in enumerate(tested)
    ]
    more = [a * -1 + Index.of("%b"), b * -1 + Index.of("%c")]
    body += [
        Stmt(f"%1{k}", "in_bounds", (), BOOL, index=(i,), attrs=(("hi", N), ("lo", 0))) for k, i in enumerate(more)
    ]
    kernel = Kernel("k", rows, (("n", N),), tuple(body))
    ranges = KernelRanges(kernel, {"in_i64": parse_type("i64[N]")}, lambda buffer: Range())
    whole = sum((i * 3**k for k, i in enumerate(tested)), Index(0))
    found = ranges.index(whole, frozenset(s.name for s in body if s.dtype is BOOL))
    assert found.within(inside(27))
