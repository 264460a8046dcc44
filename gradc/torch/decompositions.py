"""How torch decomposes ops while a program becomes its normal form: those that gradc keeps stay whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..runtime.torch_private import private, put_kernels
from . import foreach

__all__ = ["decompositions", "kept_whole"]

_override_composite_implicit_decomp = private("_override_composite_implicit_decomp")
_split_decomp_table_to_cia_and_python_decomp = private("_split_decomp_table_to_cia_and_python_decomp")
_fake_rules: dict[Any, Any] = private("op_implementations_dict")


@functools.cache
def decompositions(kept: Callable[[Any], bool]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """How ops are decomposed: those that C++ decomposes, and those that Python does.

    Made once, as it takes a second: an op that is registered later stays whole.

    :param kept: whether an overload is not decomposed.
    """
    table = torch.export.default_decompositions()
    for overload in filter(kept, list(table)):
        del table[overload]
    composite_implicit, python = _split_decomp_table_to_cia_and_python_decomp(table.materialize())
    return composite_implicit, {**python, **foreach.decompositions()}


class _State(NamedTuple):
    """What torch has in Python for an overload: :param kernels: and :param rule: for fake tensors, or None."""

    kernels: dict[Any, Any]
    rule: Any


def _state(overload: Any) -> _State:
    return _State(overload.py_kernels.copy(), _fake_rules.get(overload))


def _put(states: dict[Any, _State]) -> None:
    for overload, state in states.items():
        put_kernels(overload, state.kernels)
        if state.rule is None:
            _fake_rules.pop(overload, None)
        else:
            _fake_rules[overload] = state.rule


@contextlib.contextmanager
def _torchs_own(kept: Callable[[Any], bool]) -> Iterator[dict[Any, _State]]:
    """The context of ``torch.export``, without its dropping rules that it did not make.

    :returns: what was there before.
    """
    table = decompositions(kept)[0]
    outside = {overload: _state(overload) for overload in table}
    try:
        with _override_composite_implicit_decomp(table):
            yield outside
    finally:
        _put(outside)


@functools.cache
def _seen(kept: Callable[[Any], bool]) -> tuple[dict[Any, _State], dict[Any, _State]]:
    """What is there outside and inside of torch's own context, which makes the same 5,000 functions anew whenever it is
    entered: 60 ms, half the time of a small program.
    """
    with _torchs_own(kept) as outside:
        return outside, {overload: _state(overload) for overload in outside}


@contextlib.contextmanager
def kept_whole(kept: Callable[[Any], bool]) -> Iterator[None]:
    """``torch.export``'s context in which overloads for which ``kept`` holds are not decomposed."""
    outside, inside = _seen(kept)
    # Within itself, or over somebody's own kernels.  A rule is also gone where torch.export has run since.
    fits = (o.py_kernels == s.kernels and _fake_rules.get(o) in (None, s.rule) for o, s in outside.items())
    if not all(fits):
        with _torchs_own(kept):
            yield
        return
    try:
        _put(inside)
        yield
    finally:
        _put(outside)
