"""What sampling at points means, in torch ops that can be differentiated any number of times.

``grid_sample`` here is not torch's own (which has no second derivative and no forward mode): test_grid_sample.py
holds the two against each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch


def flat(positions: Any, sizes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(one position in the flattened spatial axes, whether all of its coordinates are inside)."""
    at, inside = torch.zeros((), dtype=torch.long), torch.tensor(True)
    for p, n in zip(positions, sizes, strict=True):
        p = p.long()
        inside = inside & (p >= 0) & (p < n)
        at = at * n + p.clamp(0, max(n - 1, 0))
    return at, inside


def gather(x: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
    at, inside = flat(positions, x.shape[2:])
    n, c, points = x.shape[0], x.shape[1], at.shape[1:]
    if not x.flatten(2).shape[2]:
        return x.new_zeros(n, c, *points)
    values = x.flatten(2).gather(2, at.reshape(n, 1, math.prod(points)).expand(n, c, -1)).reshape(n, c, *points)
    return torch.where(inside.unsqueeze(1), values, torch.zeros((), dtype=x.dtype))


def scatter(updates: torch.Tensor, *positions: torch.Tensor, size: Any) -> torch.Tensor:
    at, inside = flat(positions, size)
    n, c = updates.shape[:2]
    count = math.prod(at.shape[1:])
    out = torch.zeros(n, c, math.prod(size), dtype=updates.dtype)
    updates = torch.where(inside.unsqueeze(1), updates, torch.zeros((), dtype=updates.dtype))
    return out.scatter_add(2, at.reshape(n, 1, count).expand(n, c, -1), updates.reshape(n, c, count)).reshape(
        n, c, *size
    )


def interpolate(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    rank = x.ndim - 2
    weights, positions = parts[:rank], parts[rank:]
    total: Any = 0
    for taps in itertools.product(*(range(w.shape[1]) for w in weights)):
        term = gather(x, *(p[:, t] for p, t in zip(positions, taps, strict=True)))
        for w, t in zip(weights, taps, strict=True):
            term = term * w[:, t].unsqueeze(1)
        total = total + term
    return total


def held(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """clamp, with the derivative 0 on the bounds as well."""
    return torch.where(x <= low, torch.full_like(x, low), torch.where(x >= high, torch.full_like(x, high), x))


def fold(x: torch.Tensor, n: int, corners: bool) -> torch.Tensor:
    """Reflection, one fold at a time."""
    low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
    if high == low:
        return x * 0
    times = torch.floor((x.detach() - low) / (high - low))
    odd = torch.remainder(times, 2) == 1
    return torch.where(odd, high - (x - low - times * (high - low)), low + (x - low - times * (high - low)))


def keys(d: torch.Tensor, a: float = -0.75) -> torch.Tensor:
    d = d.abs()
    return torch.where(
        d <= 1, (a + 2) * d**3 - (a + 3) * d**2 + 1, torch.where(d < 2, a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a, 0)
    )


KERNELS: dict[str, tuple[tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "bilinear": ((0, 1), lambda d: 1 - d.abs()),
    "bicubic": ((-1, 0, 1, 2), keys),
}


def grid_sample(
    x: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> torch.Tensor:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    values, grid, dtype = x.to(wide), grid.to(wide), x.dtype

    def pad(p: torch.Tensor, n: int) -> torch.Tensor:
        if padding_mode == "zeros":
            return p
        return held(fold(p, n, align_corners) if padding_mode == "reflection" else p, 0, n - 1)

    axes = []
    for axis, n in enumerate(x.shape[2:]):
        c = grid[..., x.ndim - 3 - axis]
        p = (c + 1) / 2 * (n - 1) if align_corners else ((c + 1) * n - 1) / 2
        if mode == "nearest":
            axes.append([(torch.ones_like(p), torch.round(pad(p, n)))])
            continue
        p = pad(p, n) if mode == "bilinear" else p
        taps, kernel = KERNELS[mode]
        places = [torch.floor(p).detach() + t for t in taps]
        axes.append([(kernel(p - at), at if mode == "bilinear" else pad(at, n)) for at in places])
    total: Any = 0
    for chosen in itertools.product(*axes):
        term = gather(values, *(at for _, at in chosen))
        for weight, _ in chosen:
            term = term * weight.unsqueeze(1)
        total = total + term
    return total.to(dtype)


def slopes(g: torch.Tensor, x: torch.Tensor, *parts: Any, axis: int) -> Any:
    """The gradient of an interpolation, by torch, for the weights of an axis, of which it is no function."""
    rank = x.ndim - 2
    positions, weights = parts[rank - 1 :], list(parts[: rank - 1])
    with torch.enable_grad():
        own = torch.ones(positions[axis].shape, dtype=x.dtype, requires_grad=True)
        weights.insert(axis, own)
        return torch.autograd.grad(interpolate(x, *weights, *positions), own, g, create_graph=True)[0]


def affine_grid(theta: torch.Tensor, size: Any, align_corners: bool = False) -> torch.Tensor:
    wide = theta.to(torch.float64 if theta.dtype is torch.float64 else torch.float32)
    lines = []
    for n in size[2:]:
        ends = torch.linspace(-1, 1, n, dtype=wide.dtype) if n > 1 else torch.zeros(n, dtype=wide.dtype)
        lines.append(ends if align_corners else ends * (n - 1) / max(n, 1))
    axes = torch.meshgrid(*lines, indexing="ij")
    points = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)
    return torch.einsum("...k,nik->n...i", points, wide).to(theta.dtype)


TORCH: dict[str, Callable[..., Any]] = {
    "grid_sample": grid_sample,
    "affine_grid": affine_grid,
    "insensitive": lambda x, to: x + 0 * to.sum(),
    **{f"gather_{rank}d": gather for rank in (2, 3)},
    **{f"scatter_{rank}d": scatter for rank in (2, 3)},
    **{f"interpolate_{rank}d": interpolate for rank in (2, 3)},
    **{f"interpolate_{rank}d_slopes": slopes for rank in (2, 3)},
}
