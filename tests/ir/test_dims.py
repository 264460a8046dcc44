"""Arithmetic of sizes: what is said of a size for all values of its symbols holds for each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradc.errors import TypeRuleError
from gradc.ir.dims import (
    Assumption,
    Size,
    assuming,
    ceildiv,
    evaluate,
    floordiv,
    known_nonnegative,
    maximum,
    memoized,
    minimum,
    nonnegative,
    product,
    same,
    substitute,
    symbol,
)
from gradc.ir.size_text import parse_assumption, parse_predicate, parse_size
from gradc.ops.shapes.axes import axis_groups

NAMES = ("N", "M")
VALUES = [dict(zip(NAMES, values, strict=True)) for values in itertools.product((0, 1, 2, 3, 5, 8), repeat=len(NAMES))]
SIZES = st.recursive(
    st.sampled_from([symbol(n) for n in NAMES]) | st.integers(-4, 6),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] - p[1]),
        st.tuples(inner, st.integers(-3, 4)).map(lambda p: p[0] * p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] * p[1]),
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


@given(SIZES, SIZES, st.lists(st.tuples(SIZES, st.sampled_from(["==", ">="]), SIZES), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_what_equations_say_holds_where_they_do(a: Size, b: Size, given: list[tuple[Size, str, Size]]) -> None:
    facts = [Assumption(*fact) for fact in given]
    with assuming(facts):
        equal, known = same(a, b), known_nonnegative(a - b)
    for values in VALUES:
        if all(f.holds(values) for f in facts):
            difference = evaluate(a, values) - evaluate(b, values)
            assert (not equal or difference == 0) and (not known or difference >= 0), (str(a), str(b), facts, values)


@pytest.mark.parametrize(
    ("facts", "a", "b"),
    [
        (["N == M", "M == K"], "K", "N"),
        (["N == M", "N == K"], "M", "K"),
        (["M == N", "K == N"], "M", "K"),
        (["N == 2*M", "M == K"], "N", "2*K"),
        (["N + M == K", "M == 3"], "K", "N + 3"),
        (["N == 2*(N//2)"], "N//2", "N - N//2"),
    ],
)
def test_equations_that_say_it_only_together_are_used(facts: list[str], a: str, b: str) -> None:
    left, right = parse_size(a), parse_size(b)
    assert not same(left, right)
    with assuming(map(parse_assumption, facts)):
        assert same(left, right) and known_nonnegative(left - right) and known_nonnegative(right - left)


@given(SIZES, st.lists(st.tuples(SIZES, st.integers(-4, 6)), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_nor_where_sizes_are_bounded(size: Size, bounds: list[tuple[Size, int]]) -> None:
    facts = [Assumption(bounded, ">=", least) for bounded, least in bounds]
    with assuming(facts):
        known = known_nonnegative(size)
    if known:
        for values in VALUES:
            assert not all(f.holds(values) for f in facts) or evaluate(size, values) >= 0, (str(size), facts, values)


@given(st.lists(st.lists(SIZES, max_size=3), max_size=3), st.lists(st.tuples(SIZES, st.integers(-4, 6)), max_size=2))
@settings(max_examples=200, deadline=None)
def test_a_predicate_says_that_sizes_are_not_negative(
    conjunctions: list[list[Size]], bounds: list[tuple[Size, int]]
) -> None:
    """Also read back from its text; what always holds, or never, is what says so."""
    facts = [Assumption(bounded, ">=", least) for bounded, least in bounds]
    with assuming(facts):
        made = nonnegative(*conjunctions)
    if made.conjunctions and all(made.conjunctions):
        assert parse_predicate(str(made)) == made
    for values in VALUES:
        if all(f.holds(values) for f in facts):
            said = any(all(evaluate(size, values) >= 0 for size in sizes) for sizes in conjunctions)
            assert made.holds(values) == said, (str(made), values)


def test_a_predicate_has_no_conjunction_of_bounds_that_exclude_each_other() -> None:
    v, d = symbol("V"), symbol("D")
    assert str(nonnegative([v - 9, 8 - v], [v - 20, 20 - v])) == "V >= 20 and V <= 20"
    assert nonnegative([v * d - 9, v, 8 - v * d]).conjunctions == ()


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


def test_quotients_by_a_number_that_are_equal_have_one_form() -> None:
    n, m = symbol("N"), symbol("M")
    assert floordiv(n - 1, 2) + 1 == floordiv(n + 1, 2) == ceildiv(n, 2)
    assert str(floordiv(n * 6 - m - 7, 3)) == "2*N+((-M+2)//3)-3"


def test_of_quotients_with_other_constants_the_order_is_known() -> None:
    """How many windows a pooling has is the smaller of two such sizes."""
    n = symbol("N")
    for a, b, more in itertools.product(range(-4, 5), range(-4, 5), range(-2, 3)):
        left, right = floordiv(n + a, 3) + more, floordiv(n + b, 3)
        larger, smaller = maximum(left, right), minimum(left, right)
        assert {larger, smaller} == {left, right}
        for value in range(9):
            assert evaluate(larger - smaller, {"N": value}) >= 0


def test_of_products_of_such_quotients_it_is_known_too() -> None:
    """How many windows a plane has, and how many of them a strided convolution's gradient reads."""
    h, w = symbol("H"), symbol("W")
    count = ceildiv(h, 2) * floordiv(w + 3, 4)
    for read in (floordiv(h, 2) * floordiv(w + 3, 4), ceildiv(h, 2) * floordiv(w, 4), floordiv(h, 2) * floordiv(w, 4)):
        assert known_nonnegative(count - read) and not known_nonnegative(count - read - 1)
        assert not known_nonnegative(read - count)


def test_of_sizes_that_are_bounded_products_are() -> None:
    """The number of windows of an image, each of whose axes has one at least."""
    rows, columns = (floordiv(symbol(n) - k, 2) + 1 for n, k in (("N", 5), ("M", 3)))
    with assuming([Assumption(rows, ">=", 1), Assumption(columns, ">=", 1)]):
        assert known_nonnegative(rows * columns - rows) and not known_nonnegative(rows * columns - rows - 1)
        assert known_nonnegative(symbol("N") - 5) and not known_nonnegative(symbol("N") - 6)
    with assuming([Assumption(symbol("N") * 2, ">=", 5)]):
        assert known_nonnegative(symbol("N") - 3) and not known_nonnegative(symbol("N") - 4)


def test_products_of_what_facts_say_to_be_positive_are() -> None:
    """The number of windows of a filter whose size is a symbol, of an image whose size is one or not."""
    width, kernel = symbol("W"), symbol("K")
    counts = [width - kernel + 1, floordiv(symbol("H") - symbol("L") * 2, 3) + 2, 7 - symbol("M") * 2]
    assert not any(map(known_nonnegative, counts))
    with assuming([Assumption(count, ">=", 1) for count in counts]):
        for several in itertools.combinations(counts, 2):
            assert known_nonnegative(product(several) - 1) and not known_nonnegative(product(several) - 2)
        assert known_nonnegative(floordiv(width, 2) * product(counts)) and known_nonnegative(3 - symbol("M"))
        assert not known_nonnegative(2 - symbol("M")) and not known_nonnegative(kernel - width)


def test_a_diagonal_of_every_second_row_is_inside() -> None:
    """The facts of a case of a maximum and the bounds of a quotient, both twice."""
    n, m = symbol("N"), symbol("M")
    for step in (2, 3, 5):
        rows = ceildiv(n, step)
        shorter = minimum(rows, m)
        assert known_nonnegative(n - 1 - step * (shorter - 1)) and known_nonnegative(m - shorter)
        assert not known_nonnegative(n - 1 - step * shorter) and not known_nonnegative(n - 2 - step * (shorter - 1))


def test_what_would_be_too_large_to_look_at_is_not_known() -> None:
    sizes = [symbol(f"N{i}") for i in range(12)]
    with assuming([Assumption(size, ">=", 2) for size in sizes]):
        assert not known_nonnegative(product(sizes) - symbol("M"))


def test_what_is_kept_holds_under_its_own_assumptions_alone() -> None:
    n, asked = symbol("N"), list[Size]()

    @memoized
    def positive(size: Size) -> bool:
        asked.append(size)
        return known_nonnegative(size - 1)

    for _ in range(2):
        assert not positive(n)
        with assuming([Assumption(n, ">=", 1)]):
            assert positive(n)
    assert asked == [n, n]


def test_runs_of_a_reshape_are_found_under_its_own_assumptions_alone() -> None:
    n = symbol("N")
    for _ in range(2):
        with pytest.raises(TypeRuleError, match="no common runs"):
            axis_groups((n, 2), (6, 2))
        with assuming([Assumption(n, "==", 6)]):
            assert axis_groups((n, 2), (6, 2)) == ((range(1), range(1)), (range(1, 2), range(1, 2)))


def test_sizes_of_numpys_integers_do_not_wrap_around() -> None:
    n = symbol("N")
    for value in (np.int32(60000), np.uint8(200), np.int64(2**40)):
        for size in (n * n * n, 3 * n, maximum(n, 3), floordiv(1, n) + n):
            found = evaluate(size, {"N": value})
            assert type(found) is int and found == evaluate(size, {"N": int(value)})
