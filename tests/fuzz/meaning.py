"""What a graph means in torch: its values and its gradients by autograd, in f64, and how well each of them is known.

The op -> torch function table is ``tests/torch_oracles.py``, which was written from torch's documentation; what has a
straight-through gradient (quantize, fake_quantize) is added here, made of torch ops.

**How well a value is known** is found by running again with every rounded result made wrong on purpose, by up to a few
units in the last place of its dtype (Monte Carlo arithmetic): where the runs go apart, rounding alone can move the
result that far.  A sum that cancels, a floor near an integer, a tie that is one only up to rounding: all show as a wide
spread, without a list of ops that jump.  autograd passes the same factors on, and each gradient is made wrong in the
same way.  What lies further from torch than the spread allows is wrong; what the spread leaves open is counted as
undecided.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracles
import torch
import torch_oracles
from torch_oracles import DTYPE, to_torch

from gradc.ir.dims import Dim, evaluate
from gradc.ir.graph import Graph, open_composites
from gradc.ir.node import REGISTRY, Node
from gradc.ir.op import Expr, Function, Primitive
from gradc.ir.types import DType

torch.set_num_threads(1)

UNIT = {"f64": 2.0**-44, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
"""By how much a rounded result is made wrong: twice the unit roundoff; for f64 more, because exp and its kin differ
between libraries.
"""
TINY = {"f16": 2.0**-20, "f32": 1e-36, "f64": 1e-290, "bf16": 1e-36}
LARGE = {"f16": 3e4, "f32": 1e36, "f64": 1e290, "bf16": 1e36}
RUNS = 3
UNROUNDED = frozenset(
    "neg abs maximum minimum relu floor round sign where amax amin max min cast clamp stop_gradient embedding gather_2d"
    " gather_3d index_select flip dim iota constant".split()
)
"""Ops whose results are operands, or whole numbers: they round nothing (cast only to a narrower type)."""


class NoCounterpart(Exception):
    """torch has no such op, or not for these operands."""


def _straight(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return x + (rounded - x).detach()


def _levels(
    x: torch.Tensor, scale: torch.Tensor, zero: Any, block: Any, quant_min: int, quant_max: int
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    s = torch_oracles._over_blocks(scale, x.shape, block)
    q = _straight(x / s, torch.round(x / s))
    z: Any = 0
    if zero is not None:
        z = (
            zero.to(x.dtype)
            if not zero.dtype.is_floating_point
            else torch.clamp(_straight(zero, torch.round(zero)), quant_min, quant_max)
        )
        z = torch_oracles._over_blocks(z, x.shape, block)
    return torch.clamp(q + z, quant_min, quant_max), z, s


def _quantize(
    x: torch.Tensor, scale: torch.Tensor, zero: Any = None, *, block: Any, dtype: str, quant_min: Any, quant_max: Any
) -> torch.Tensor:
    if dtype[0] not in "iu":
        raise NoCounterpart("quantize to a short float")
    return _levels(x, scale, zero, block, quant_min, quant_max)[0]  # whole numbers that carry a gradient


def _fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: Any = None,
    *,
    block: Any,
    dtype: str,
    quant_min: Any,
    quant_max: Any,
    grad_factor: float,
) -> torch.Tensor:
    if dtype[0] not in "iu":
        raise NoCounterpart("fake_quantize to a short float")
    scaled = lambda p: p if p is None or not p.dtype.is_floating_point else p.detach() + grad_factor * (p - p.detach())
    q, z, s = _levels(x, scaled(scale), scaled(zero), block, quant_min, quant_max)
    return (q - z) * s


def _right_shift(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    inside = (by >= 0) & (by < 8 * x.element_size())
    return torch.where(
        inside, torch.bitwise_right_shift(x, torch.where(inside, by, 0)), torch.where(x < 0, -1, 0).to(x.dtype)
    )


def _by_definition(name: str) -> Any:
    """Of codes and scales torch has none: the definition in NumPy, through which no gradient passes."""

    def value(*operands: torch.Tensor, **attrs: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(oracles.NUMPY[name](*(o.detach().numpy() for o in operands), **attrs)))

    return value


TORCH = {
    **torch_oracles.TORCH,
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "right_shift": _right_shift,
    **{n: _by_definition(n) for n in ("unpack", "nf4_codebook", "mx_scale")},
}
TAKES = {
    name: {p.name for p in inspect.signature(f).parameters.values()} if inspect.isfunction(f) else None
    for name, f in TORCH.items()
}


def _attributes(node: Node, dims: Mapping[str, int]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if isinstance(value, Dim):
            return evaluate(value, dims)
        if isinstance(value, DType):
            return "f64" if value.has_tangent else value.name
        return value

    attrs = {k: plain(v) for k, v in node.attrs.items()}
    attrs.pop("empty", None)
    names = TAKES[node.op.name]
    if "oob" in attrs and names is not None and "oob" not in names:
        if attrs.pop("oob") != "error":
            raise NoCounterpart(f"{node.op.name} with a rule for indices outside")
    if node.op.name == "nf4_codebook":
        attrs["dtype"] = node.dtype.name
    if node.op.name in ("max", "min") and isinstance(attrs["axis"], tuple) and len(attrs["axis"]) == 1:
        attrs["axis"] = attrs["axis"][0]
    return attrs


def _apply(node: Node, operands: Sequence[torch.Tensor], dims: Mapping[str, int]) -> torch.Tensor:
    name = node.op.name
    if name not in TORCH:
        raise NoCounterpart(name)
    attrs = _attributes(node, dims)
    if attrs.get("axis") == () and name != "flip":
        return operands[0] if name != "var" else TORCH[name](*operands, **attrs)
    target = node.dtype.name
    if name == "cast" and target not in DTYPE:
        raise NoCounterpart(f"a cast to {target}")
    if name == "cast" and node.dtype.is_float and operands[0].dtype.is_floating_point:
        return operands[0]
    try:
        result: torch.Tensor = TORCH[name](*operands, **attrs)
    except (RuntimeError, IndexError) as error:
        if 0 not in node.type.concrete(dims) and all(o.numel() for o in operands):
            raise
        raise NoCounterpart(f"{name} of nothing") from error
    if node.dtype.is_integer and not result.dtype.is_floating_point and target in DTYPE:
        result = result.to(DTYPE[target])
    return result


def _rounds(node: Node) -> bool:
    if node.dtype.name not in UNIT or node.op.name == "input":
        return False
    if node.op.name == "cast":
        source = node.operands[0].dtype
        return not source.is_float or UNIT.get(source.name, 1.0) < UNIT[node.dtype.name]
    if node.op.name in UNROUNDED:
        return False
    return (
        not isinstance(node.op, Primitive)
        or isinstance(node.op.lower, Expr)
        or node.op.lower.__class__.__name__ in ("Reduction", "Scatter")
    )


@dataclass
class Known:
    """Arrays by name, each with how far rounding can move each element; None: not known at all."""

    values: dict[str, np.ndarray]
    spread: dict[str, np.ndarray]
    overflow: bool


class Meaning:
    """A graph in torch, at some arrays.

    :raises NoCounterpart: it has an op that torch lacks.
    """

    def __init__(
        self, graph: Graph, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int], wrt: Sequence[str], seed: int
    ):
        self.graph, self.dims, self.wrt, self.seed = graph, dims, wrt, seed
        self.arrays = arrays
        self.overflow = False
        # Rounding inside a composite shows where it is opened: what layer_norm makes of equal numbers is all rounding.
        plain = all(n.op.surrogate is None for n in graph.nodes)
        self.noisy = open_composites(graph) if plain else graph

    def _forward(self, noise: torch.Generator | None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        graph = self.graph if noise is None else self.noisy
        leaves = {}
        values: dict[Node, torch.Tensor] = {}
        for node in graph.inputs:
            name = graph.input_name(node)
            tensor = to_torch(self.arrays[name])
            if node.dtype.has_tangent:
                tensor = tensor.double().requires_grad_()
                leaves[name] = tensor
            values[node] = tensor
        for node in graph.nodes:
            if node in values:
                continue
            result = _apply(node, [values[o] for o in node.operands], self.dims)
            shape = node.type.concrete(self.dims)
            if tuple(result.shape) != shape:
                raise AssertionError(f"torch says {tuple(result.shape)} of {node.op.name}: {node.type}, {shape}")
            if node.dtype.name in LARGE and result.numel():
                self.overflow |= bool((result.detach().abs() > LARGE[node.dtype.name]).any())
            if noise is not None and node.dtype.name in UNIT:
                result = self._noisy(result, UNIT[node.dtype.name], noise, _rounds(node))
            values[node] = result
        return {name: values[node] for name, node in graph.outputs}, [leaves[n] for n in self.wrt]

    @staticmethod
    def _noisy(value: torch.Tensor, unit: float, noise: torch.Generator, rounded: bool) -> torch.Tensor:
        """The value made wrong by some units if it is ``rounded``, its gradient in any case: that is a sum of
        contributions, each rounded.
        """
        factor = lambda: 1 + unit * (2 * torch.rand(value.shape, generator=noise, dtype=torch.float64) - 1)
        result = value * factor() if rounded else value * 1.0
        if result.requires_grad:
            result.register_hook(lambda g: g * factor())
        return result

    def _gradients(
        self,
        outputs: Mapping[str, torch.Tensor],
        leaves: Sequence[torch.Tensor],
        cotangents: Mapping[str, np.ndarray],
        create: bool = False,
    ) -> list[torch.Tensor]:
        used = [(outputs[n], to_torch(c).double()) for n, c in cotangents.items() if outputs[n].requires_grad]
        if not used or not leaves:
            return [torch.zeros_like(x) for x in leaves]
        found = torch.autograd.grad(
            [y for y, _ in used], leaves, [c for _, c in used], allow_unused=True, create_graph=create
        )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]

    def _run(
        self,
        cotangents: Mapping[str, np.ndarray],
        second: Mapping[str, np.ndarray] | None,
        noise: torch.Generator | None,
    ) -> dict[str, np.ndarray]:
        outputs, leaves = self._forward(noise)
        gradients = self._gradients(outputs, leaves, cotangents, create=second is not None)
        if second is not None:
            first = {f"d.{n}": g for n, g in zip(self.wrt, gradients, strict=True)}
            again = self._gradients(first, leaves, second)
            named = {
                **{n: v.detach() for n, v in first.items()},
                **{f"dd.{n}": g.detach() for n, g in zip(self.wrt, again, strict=True)},
            }
        else:
            named = {
                **{n: v.detach() for n, v in outputs.items()},
                **{f"d.{n}": g.detach() for n, g in zip(self.wrt, gradients, strict=True)},
            }
        return {n: v.numpy() for n, v in named.items()}

    def _noisy_run(
        self, cotangents: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray] | None, noise: torch.Generator
    ) -> dict[str, np.ndarray]:
        try:
            return self._run(cotangents, second, noise)
        except NoCounterpart:
            if self.noisy is self.graph:
                raise
            self.noisy = self.graph
            return self._run(cotangents, second, noise)

    def known(self, cotangents: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray] | None = None) -> Known:
        """Outputs and ``d.NAME``; with ``second`` (cotangents of ``d.NAME``) ``d.NAME`` and ``dd.NAME``."""
        values = self._run(cotangents, second, None)
        noise = torch.Generator().manual_seed(self.seed)
        spread = {n: np.zeros(v.shape) for n, v in values.items()}
        with np.errstate(invalid="ignore", over="ignore"):
            for _ in range(RUNS):
                for name, other in self._noisy_run(cotangents, second, noise).items():
                    apart = np.array(np.abs(other.astype(np.float64) - values[name].astype(np.float64)))
                    apart[np.isnan(apart)] = np.inf
                    spread[name] = np.maximum(spread[name], apart)
        return Known(values, spread, self.overflow)


@dataclass(frozen=True)
class Comparison:
    """:param decided: elements held against torch; ``undecided``: those that rounding may move too far.
    :param wrong: what is wrong, or "".
    """

    decided: int
    undecided: int
    wrong: str = ""


def compare(got: np.ndarray, want: np.ndarray, spread: np.ndarray, dtype: str, coarsest: str) -> Comparison:
    """
    :param dtype: of the value in the graph.  :param coarsest: the narrowest float on the way to it.
    """
    if got.shape != want.shape:
        return Comparison(0, 0, f"the shape is {got.shape}, not {want.shape}")
    if not got.size:
        return Comparison(1, 0)
    a, b = got.astype(np.float64), want.astype(np.float64)
    if dtype not in UNIT:
        known = spread == 0
        bad = known & (a != b)
    else:
        finite = np.isfinite(b) & np.isfinite(spread)
        scale = np.abs(b[finite]).max(initial=0.0)
        unit = UNIT[coarsest]
        allowed = (
            32 * spread + (4 * spread[finite].mean() if finite.any() else 0.0) + 16 * unit * scale + 16 * TINY[coarsest]
        )
        known = finite & (allowed <= max(0.02, 64 * unit) * scale + 64 * TINY[coarsest])
        with np.errstate(invalid="ignore"):
            bad = known & ~(np.abs(a - b) <= allowed)
    if bad.any():
        at = tuple(int(k) for k in np.argwhere(bad)[0])
        return Comparison(
            int(known.sum()),
            int((~known).sum()),
            f"{int(bad.sum())} of {bad.size} elements differ, first at {list(at)}: {a[at]!r}, torch {b[at]!r} (rounding"
            f" explains {float(spread[at]):.1e})",
        )
    return Comparison(int(known.sum()), int((~known).sum()))


WITHOUT_COUNTERPART = sorted(
    name
    for name, op in REGISTRY.items()
    if name not in TORCH and name not in ("input", "getitem") and not isinstance(op, Function)
)
