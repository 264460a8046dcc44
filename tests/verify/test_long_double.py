"""The interpreter in long double: an oracle for f64, where a machine has a wider number."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from agreement import NAMES, exactly, joint, upstream
from registry import cases

import gradc
from gradc import interp, ops
from gradc.errors import GradcError, InvalidProblem

WIDER = np.finfo(np.longdouble).nmant >= 63
needs_wider = pytest.mark.skipif(not WIDER, reason="long double is f64 on this machine")


@needs_wider
@pytest.mark.parametrize("size", [1, 64, 1000])
def test_products_and_sums_are_those_of_fractions(size: int) -> None:
    rng = np.random.default_rng(size)
    x, w = rng.standard_normal((2, size)), rng.standard_normal((size, 3))
    graph = gradc.trace(lambda x, w: {"y": x @ w, "s": ops.sum(x * x, -1)}, x="f64[2,K]", w="f64[K,3]")
    got = exactly(graph, {"x": x, "w": w}, {})
    product = [[sum(Fraction(a) * Fraction(b) for a, b in zip(r, c, strict=True)) for c in w.T] for r in x]
    squares = [sum(Fraction(a) ** 2 for a in r) for r in x]
    magnitude = abs(x) @ abs(w)
    for value, exact, scale in ((got["y"], product, magnitude), (got["s"], squares, (x * x).sum(-1))):
        assert value.dtype == np.longdouble
        high = value.astype(np.float64)
        low = (value - high).astype(np.float64)  # together they are the long double
        for at in np.ndindex(value.shape):
            wanted: object = exact
            for k in at:
                wanted = wanted[k]  # type: ignore[index]
            error = abs(Fraction(high[at]) + Fraction(low[at]) - wanted)  # type: ignore[operator]
            assert error <= size * Fraction(2) ** -63 * Fraction(float(np.asarray(scale)[at])), at


@needs_wider
def test_every_op_is_evaluated_in_it() -> None:
    """Each sample, with its gradients: near the result in f64, and not the same number in most of them."""
    finer = count = 0
    for name in NAMES:
        for case in cases(["f64"], [name]):
            graph, dims = joint(case), next(iter(case.bindings((7,))), None)
            if dims is None:
                continue
            arrays = upstream(graph, case.arrays(dims), dims)
            try:
                plain = interp.run(graph, arrays, dims=dims, precision="f64")
            except GradcError:
                continue
            exact = exactly(graph, arrays, dims)
            for key, value in plain.items():
                if value.dtype.kind != "f" or not value.size:
                    continue
                count += 1
                wide = exact[key].astype(np.longdouble)
                finite = np.isfinite(value)
                np.testing.assert_array_equal(np.isfinite(wide), finite)
                apart = np.abs(wide[finite] - value[finite]).max(initial=0)
                assert apart <= 64 * 2.0**-53 * max(np.abs(value[finite]).max(initial=0), 1e-3), (str(case), key)
                finer += apart > 0
    assert count > 1000 and finer > count / 2


def test_programs_are_evaluated_in_it() -> None:
    graph = gradc.trace(lambda x: ops.softmax(x, -1), x="f64[N,5]")
    x = np.random.default_rng(0).standard_normal((3, 5))
    program = gradc.compile(graph, target="numpy").forward.program
    got = interp.run(program, {"x": x}, precision="longdouble")["y"]
    assert got.dtype == np.longdouble
    wide = x.astype(np.longdouble)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), rtol=8 * float(np.finfo(np.longdouble).eps))


@pytest.mark.parametrize("precision", ["f128", "double", "F64"])
def test_an_unknown_precision_is_refused(precision: str) -> None:
    graph = gradc.trace(lambda x: x + 1, x="f64[N]")
    with pytest.raises(InvalidProblem, match=rf"precision='{precision}'; there are '', 'f64', 'longdouble'"):
        interp.run(graph, {"x": np.ones(2)}, precision=precision)
