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
_AUTOGRAD, _COMPOSITE = private("DispatchKey").Autograd, private("DispatchKey").CompositeImplicitAutograd
_fake_rules: dict[Any, Any] = private("op_implementations_dict")


class Decompositions(NamedTuple):
    """How ops are decomposed.

    :ivar composite: those that C++ decomposes.
    :ivar python: those that Python does.
    :ivar above: overloads that are kept, and that torch, while it traces, decomposes before autograd sees them: into
        what has other values where a number is NaN, and other gradients at a kink (``multi_margin_loss``).
    """

    composite: dict[Any, Any]
    python: dict[Any, Any]
    above: list[Any]


@functools.cache
def decompositions(kept: Callable[[Any], bool]) -> Decompositions:
    """Made once, as it takes a second: an op that is registered later stays whole.

    :param kept: whether an overload is not decomposed.
    """
    table = torch.export.default_decompositions()
    whole = [*filter(kept, list(table))]
    for overload in whole:
        del table[overload]
    composite, python = _split_decomp_table_to_cia_and_python_decomp(table.materialize())
    above = [o for o in whole if _AUTOGRAD in o.py_kernels and _COMPOSITE not in o.py_kernels]
    return Decompositions(composite, {**python, **foreach.decompositions()}, above)


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
    table, _, above = decompositions(kept)
    outside = {overload: _state(overload) for overload in (*table, *above)}
    try:
        with _override_composite_implicit_decomp(table):
            for overload in above:
                put_kernels(overload, {k: kernel for k, kernel in overload.py_kernels.items() if k is not _AUTOGRAD})
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
