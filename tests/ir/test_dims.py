"""Arithmetic of sizes: what is said of a size for all values of its symbols holds for each."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gradc.ir.dims import (
    Assumption,
    Size,
    assuming,
    ceildiv,
    evaluate,
    floordiv,
    known_nonnegative,
    maximum,
    minimum,
    substitute,
    symbol,
)

NAMES = ("N", "M")
VALUES = [dict(zip(NAMES, values, strict=True)) for values in itertools.product((0, 1, 2, 3, 5, 8), repeat=len(NAMES))]
SIZES = st.recursive(
    st.sampled_from([symbol(n) for n in NAMES]) | st.integers(-4, 6),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
        st.tuples(inner, st.integers(-3, 4)).map(lambda p: p[0] * p[1]),
        st.tuples(inner, st.integers(1, 4)).map(lambda p: floordiv(*p)),
        st.tuples(inner, st.integers(1, 4)).map(lambda p: floordiv(*p) * p[1]),
        st.tuples(inner, st.integers(1, 4)).map(lambda p: ceildiv(*p)),
        st.tuples(inner, inner).map(lambda p: maximum(*p)),
        st.tuples(inner, inner).map(lambda p: minimum(*p)),
    ),
    max_leaves=6,
)


@given(SIZES)
@settings(max_examples=600, deadline=None)
def test_what_is_known_not_to_be_negative_never_is(size: Size) -> None:
    if known_nonnegative(size):
        for values in VALUES:
            assert evaluate(size, values) >= 0, (str(size), values)


@given(SIZES, SIZES, SIZES)
@settings(max_examples=400, deadline=None)
def test_nor_where_something_is_assumed(size: Size, left: Size, right: Size) -> None:
    fact = Assumption(left, ">=", right)
    with assuming([fact]):
        known = known_nonnegative(size)
    if known:
        for values in VALUES:
            assert not fact.holds(values) or evaluate(size, values) >= 0, (str(size), str(fact), values)


@given(SIZES, SIZES)
@settings(max_examples=300, deadline=None)
def test_one_form_has_one_value(a: Size, b: Size) -> None:
    """Sums, products, extrema and substitution, against Python's integers."""
    for values in VALUES[::5]:
        x, y = evaluate(a, values), evaluate(b, values)
        built = {
            a + b: x + y,
            a - b: x - y,
            a * 3: x * 3,
            maximum(a, b): max(x, y),
            minimum(a, b): min(x, y),
            floordiv(a, 3): x // 3,
            ceildiv(a, 3): -(-x // 3),
        }
        for size, value in built.items():
            assert evaluate(size, values) == value == substitute(size, values), (str(size), values)


def test_a_quotient_times_its_divisor_is_no_more_than_it_was_and_not_always_as_much() -> None:
    n = symbol("N")
    for d in (2, 3, 7):
        assert known_nonnegative(n - floordiv(n, d) * d) and not known_nonnegative(floordiv(n, d) * d - n)
        assert known_nonnegative(floordiv(n, d) * d - n + (d - 1))
