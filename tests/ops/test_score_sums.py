"""Gradients of parameters of many scores (ALiBi's slopes, a bias of each head, a temperature, a softcap): sums over the
columns of what an attention of 16-bit operands passes to its scores, whose terms cancel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.types import DTYPES

torch = pytest.importorskip("torch")

BATCH, HEADS, ROWS, FEATURES = 2, 3, 96, 32
SCALE = 0.25
SHAPE = (BATCH, HEADS, ROWS, FEATURES)
NAMES = ("q", "k", "v", "p")


@dataclass(frozen=True, eq=False)
class Form:
    """A parameter of a head, ``p``, and the scores that it makes of products ``s = q @ k.T`` and distances ``d``.

    :param gradc: given s, d and p in f32, p spread.  :param torch: the same in any dtype.
    :param axes: those along which the parameter is spread.
    """

    gradc: Callable[..., Any]
    torch: Callable[..., Any]
    axes: tuple[int, ...] = (0, 2, 3)
    dtype: str = "f32"
    centre: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if axis in self.axes else n for axis, n in enumerate((*SHAPE[:3], ROWS)))


def _sloped(s: Any, d: Any, p: Any) -> Any:
    return s * SCALE + d * p


def _biased(s: Any, d: Any, p: Any) -> Any:
    return s * SCALE + p


def _scaled(s: Any, d: Any, p: Any) -> Any:
    return s * p


def _capped(tanh: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda s, d, p: tanh(s * SCALE / p) * p


FORMS = {
    "slopes": Form(_sloped, _sloped),
    "slopes in 16 bits": Form(_sloped, _sloped, dtype="D"),
    "a slope of all heads": Form(_sloped, _sloped, axes=(0, 1, 2, 3)),
    "a slope of each row": Form(_sloped, _sloped, axes=(0, 3)),
    "a bias of each head": Form(_biased, _biased),
    "a bias of keys": Form(_biased, _biased, axes=(0, 1, 2)),
    "a temperature": Form(_scaled, _scaled, centre=SCALE),
    "a softcap": Form(_capped(ops.tanh), _capped(torch.tanh), centre=4),
}
CASES = [*((name, "bf16") for name in FORMS), ("slopes", "f16"), ("slopes in 16 bits", "f16")]


def graph_of(form: Form, dtype: str) -> gradc.Graph:
    def attention(q: Any, k: Any, v: Any, p: Any) -> Any:
        s = ops.mixed_matmul(q, k.T)
        row, column = (ops.iota(shape=s.shape, axis=axis) for axis in (2, 3))
        scores = form.gradc(s, ops.cast(column - row, dtype="f32"), ops.broadcast_to(ops.cast(p, dtype="f32"), s.shape))
        return ops.softmax_matmul(ops.where(column <= row, scores, scores * 0.0 - math.inf), v)

    types = dict.fromkeys("qkv", f"{dtype}[{','.join(map(str, SHAPE))}]")
    return gradc.trace(attention, **types, p=f"{form.dtype.replace('D', dtype)}[{','.join(map(str, form.shape))}]")


@functools.cache
def given(name: str, dtype: str) -> list[np.ndarray]:
    form, rng = FORMS[name], np.random.default_rng(0)
    *arrays, dy = ((2 * rng.standard_normal(SHAPE)).astype(DTYPES[dtype].np) for _ in range(4))
    p = (form.centre + 0.1 * rng.standard_normal(form.shape)).astype(DTYPES[form.dtype.replace("D", dtype)].np)
    return [*arrays, p, dy]


@functools.cache
def torchs(name: str, dtype: str, eager: bool) -> list[np.ndarray]:
    """The gradient of p and the sum of its terms' magnitudes, in f64.

    :param eager: with the operands, their product and the weights in 16 bits.
    """
    form = FORMS[name]
    wide = torch.float64 if not eager else {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    q, k, v, p, dy = (torch.tensor(x.astype(np.float64)) for x in given(name, dtype))
    q, k, v, dy = (x.to(wide) for x in (q, k, v, dy))
    each = p.expand(*SHAPE[:3], ROWS).clone().requires_grad_()  # the same parameter of each score
    row, column = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    scores = form.torch((q @ k.mT).to(each.dtype), (column - row).double(), each)
    weights = torch.softmax(torch.where(column <= row, scores, -math.inf).to(wide), -1)
    (weights @ v).backward(dy)
    terms = torch.where(column <= row, each.grad, 0.0)
    return [x.sum(form.axes, keepdim=True).numpy() for x in (terms, terms.abs())]


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@long_tests.values
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_sum_over_scores_is_as_exact_as_its_terms(name: str, dtype: str) -> None:
    form, (*arrays, dy) = FORMS[name], given(name, dtype)
    module = gradc.compile(graph_of(form, dtype), NAMES, target="cpu")
    _, residuals = module.forward(**dict(zip(NAMES, arrays, strict=True)))
    ours = module.backward(residuals, dy)["p"].astype(np.float64)
    exact, terms = torchs(name, dtype, False)
    theirs = torchs(name, dtype, True)[0]
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    rounded = unit * rms(exact) if form.dtype == "D" else 0.0
    assert rms(ours - exact) <= rms(theirs - exact)
    if 3 in form.axes:  # of whole rows: nothing in them is of 16 bits but the operands
        assert rms(ours - exact) <= rounded + unit / 512 * rms(terms)
