"""The same bits where there is no rounding: a module on small dyadic numbers against the joint graph in the
interpreter.

Where a value is computed without rounding on these inputs (found by running in f64 beside, and by the grain of sums)
equality is demanded to the last bit, whatever the target and the order of the sums; other values are compared within
the rounding of the types that take part.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradc import interp
from gradc.ir.graph import Graph, open_composites
from gradc.ir.node import Node

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
MANTISSA = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
STEPWISE = frozenset(
    "floor round sign eq ne lt le gt ge argmax argmin floordiv mod cast quantize fake_quantize abs maximum minimum amax"
    " amin relu where".split()
)
"""Ops (or their derivatives) that jump: on a value that is not known to the last bit their results are not compared."""
SUMS = frozenset("sum matmul scatter_add scatter_add_along_axis".split())
NOT_EXACT = frozenset(
    "exp expm1 log log1p sin cos tanh erf sigmoid rsqrt sqrt pow prod scatter_prod div reciprocal".split()
)


class Expected:
    """A graph's meaning on some inputs, and how well each output can be known."""

    def __init__(self, graph: Graph, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int]):
        plain = open_composites(graph)
        own = interp.evaluate_graph(plain, arrays, dims)
        wide = interp.evaluate_graph(plain, arrays, dims, "f64")
        exact: dict[Node, bool] = {}
        steady: dict[Node, bool] = {}
        scale: dict[Node, float] = {}
        unit: dict[Node, float] = {}
        for node in plain.nodes:
            before = node.operands
            value = np.abs(np.asarray(own[node], np.float64))
            finite = value[np.isfinite(value)]
            scale[node] = max([float(finite.max(initial=0.0)), *(scale[o] for o in before)])
            unit[node] = max([UNIT.get(node.dtype.name, 0.0), *(unit[o] for o in before)])
            exact[node] = (
                all(exact[o] for o in before)
                and node.op.name not in NOT_EXACT
                and np.array_equal(
                    np.asarray(own[node], np.float64), np.asarray(wide[node], np.float64), equal_nan=True
                )
            )
            exact[node] = exact[node] and (not node.dtype.is_float or grain(wide[node]) * 2.0**50 > scale[node])
            if exact[node] and node.op.name in SUMS and node.dtype.is_float:
                exact[node] = _short(node, wide)
            jumps = node.op.name in STEPWISE and not all(exact[o] for o in before)
            # what comes of a division by a size of 0 is no real number: the REAL rules need not keep it
            divided = node.op.name in ("div", "reciprocal", "rsqrt", "log") and not np.asarray(wide[before[-1]]).all()
            steady[node] = (
                all(steady[o] for o in before)
                and not jumps
                and not divided
                and bool(np.isfinite(np.asarray(wide[node], np.float64)).all())
            )
        self.dims = dims
        self.values = {name: own[n] for name, n in plain.outputs}
        self.wide = {name: wide[n] for name, n in plain.outputs}
        self.exact = {name: exact[n] for name, n in plain.outputs}
        self.steady = {name: steady[n] for name, n in plain.outputs}
        self.scale = {name: scale[n] for name, n in plain.outputs}
        self.unit = {name: unit[n] for name, n in plain.outputs}

    def differs(self, got: Mapping[str, np.ndarray]) -> str:
        """Which output is not what it must be, and how; or ""."""
        for name, value in got.items():
            expected = self.values[name]
            place = f"{name} at {dict(self.dims)}, on dyadic inputs"
            if value.shape != expected.shape or value.dtype != expected.dtype:
                return f"{place}: {value.dtype}{value.shape}, not {expected.dtype}{expected.shape}"
            a, b = value.astype(np.float64), expected.astype(np.float64)
            if self.exact[name]:
                bad = ~((a == b) | (np.isnan(a) & np.isnan(b)))
                allowed = 0.0
            elif self.steady[name]:
                if not (np.isfinite(a).all() and np.isfinite(b).all()) and (
                    self.scale[name] > 1e30 or not np.isfinite(self.wide[name]).all()
                ):
                    continue  # overflow at another step of the way
                spread = np.abs(b - self.wide[name])
                allowed = 16 * float(spread[np.isfinite(spread)].max(initial=0.0)) + 128 * self.unit[name] * max(
                    self.scale[name], 1e-3
                )
                bad = ~((np.abs(a - b) <= allowed) | (np.isnan(a) & np.isnan(b)))
            else:
                continue
            if bad.any():
                at = tuple(int(k) for k in np.argwhere(bad)[0])
                return (
                    f"{place}: {int(bad.sum())} of {bad.size} elements differ, first at {list(at)}: {a[at]!r}, not"
                    f" {b[at]!r} (allowed {allowed:.1e})"
                )
        return ""


def grain(values: np.ndarray) -> float:
    """The largest power of two from 1 to 2^-24 of which all are multiples, else 0."""
    array = np.abs(np.asarray(values, np.float64))
    array = array[np.isfinite(array)]
    return next((2.0**-k for k in range(25) if np.array_equal(np.rint(array * 2.0**k), array * 2.0**k)), 0.0)


def _short(node: Node, values: Mapping[Node, np.ndarray]) -> bool:
    """Whether a sum has no rounding in any order."""
    step, total = 1.0, 1.0
    for operand in node.operands:
        if operand.dtype.is_float:
            array = np.abs(values[operand])
            step *= grain(array)
            total *= (
                float(array.sum())
                if node.op.name != "matmul"
                else float(array.max(initial=0.0) * max(array.shape[-2:]))
            )
    return step > 0 and total / step < 2.0 ** MANTISSA[node.dtype.name]
