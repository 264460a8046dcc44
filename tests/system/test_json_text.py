"""JSON that somebody else may have written: equal to Python's reader, but for what is nested too deep."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradc.formats.json_text import DEEPEST, read_json

TRICKY = st.text(alphabet='[]{}"\\a:,\n\u2028', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
)


@given(VALUES, st.integers(0, 2 * DEEPEST), st.booleans())
def test_it_reads_what_python_reads_down_to_its_depth(value: Any, lists: int, objects: bool) -> None:
    for _ in range(lists):
        value = {'"[': value} if objects else [value]
    text = json.dumps(value)
    if _depth(value) <= DEEPEST:
        assert read_json(text) == value
    else:
        with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST}"):
            read_json(text)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(_depth, inner), default=0)


@given(TRICKY)
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    for long in (text, "[" * DEEPEST + text, text * 50):
        try:
            expected = json.loads(long)
        except ValueError:
            with pytest.raises(ValueError):
                read_json(long)
        else:
            assert _depth(expected) > DEEPEST or read_json(long) == expected


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 70 + '"\\' * 1_000_000, "[" * 70 + '"' * 1_000_001])
def test_strings_without_end_and_deep_nesting_end_at_once(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)
