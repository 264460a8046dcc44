"""Attributes that count from the end (axes, padding_idx, starts, ends, shifts, offsets) are eager mode's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc.torch.function import Function  # noqa: E402

Op = Callable[[Any], Any]

X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROWS, ENDS = torch.tensor([1, 4, 6, 0, 4]), torch.tensor([0, 2])


def along(axis: int) -> list[Op]:
    """Ops along an axis, each in its negative form."""
    other = -3 if axis != -3 else -2
    names = "sum mean prod amax amin logsumexp nansum std var argmax argmin count_nonzero".split()
    pairs = "max min median nanmedian mode cummax cummin sort var_mean std_mean aminmax".split()
    same = "cumsum cumprod logcumsumexp softmax log_softmax unsqueeze unbind argsort diff trapezoid".split()
    return [
        *(lambda x, n=n: getattr(torch, n)(x, dim=axis) for n in (*names, *same)),
        *(lambda x, n=n: tuple(getattr(torch, n)(x, dim=axis)) for n in pairs),
        *(lambda x, n=n: getattr(torch, n)(x > 0, dim=axis) for n in ("any", "all")),
        *(lambda x, n=n: getattr(torch, n)(x, dim=(axis, other)) for n in ("sum", "amax", "logsumexp", "var")),
        lambda x: torch.gather(x, axis, x.argsort(axis)),
        lambda x: torch.take_along_dim(x, x.argsort(axis), axis),
        lambda x: torch.index_select(x, axis, torch.tensor([1, 0, 1])),
        lambda x: torch.index_add(x, axis, torch.tensor([1, 0]), x.narrow(axis, 0, 2), alpha=2),
        lambda x: torch.index_copy(x, axis, torch.tensor([1, 0]), x.narrow(axis, 0, 2) * 2),
        lambda x: torch.index_fill(x, axis, torch.tensor([-1]), 3.0),
        lambda x: torch.scatter(x, axis, torch.zeros(1, 1, 1, dtype=torch.int64), 2.0),
        lambda x: torch.scatter_add(x, axis, x.argsort(axis), x * 2),
        lambda x: torch.scatter_reduce(x, axis, x.argsort(axis), x * 2, "amax"),
        lambda x: torch.flip(x, (axis, other)) * 2,
        lambda x: x.transpose(axis, -1) * 2,
        lambda x: x.movedim((axis, other), (-1, -2)) * 2,
        lambda x: x[:1, :1, :1].squeeze(axis) * 2,
        lambda x: torch.narrow(x, axis, -2, 2) * 2,
        lambda x: x.select(axis, -2) * 2,
        lambda x: torch.ops.aten.slice(x, axis, -200, -1) * 2,
        lambda x: torch.slice_scatter(x, x.narrow(axis, 0, 1) * 2, axis, -2, -1),
        lambda x: torch.slice_scatter(x, x.narrow(axis, 0, 0) * 2, axis, -1, -2),
        lambda x: torch.select_scatter(x, x.select(axis, 0) * 2, axis, -2),
        lambda x: torch.split(x, 2, axis),
        lambda x: torch.chunk(x, 2, axis),
        lambda x: torch.tensor_split(x, (1, -1), axis),
        lambda x: torch.cat([x, x * 2], axis),
        lambda x: torch.stack([x, x * 2], axis - 1),
        lambda x: torch.roll(x, (-7, -1), (axis, other)) * 2,
        lambda x: torch.rot90(x, -1, (axis, other)) * 2,
        lambda x: torch.repeat_interleave(x, 2, axis) * 2,
        lambda x: torch.flatten(x, axis, -1) * 2,
        lambda x: torch.unflatten(x, axis, (-1, 1)) * 2,
        lambda x: F.glu(torch.cat([x, x * 2], axis), axis),
        lambda x: F.cosine_similarity(x, x * x, dim=axis),
        lambda x: torch.linalg.vector_norm(x, 3, dim=axis),
        lambda x: F.normalize(x, dim=axis),
        lambda x: tuple(torch.topk(x, 2, axis)),
        lambda x: tuple(torch.kthvalue(x, 2, axis)),
        lambda x: torch.quantile(x, 0.3, axis),
        lambda x: torch.nanquantile(x, 0.3, axis),
        lambda x: torch.diagonal(x, -1, axis, other) * 2,
        lambda x: torch.diag_embed(x[0], -1, axis, other) * 2,
    ]


OTHERS: list[Op] = [
    *(lambda x, k=k: (torch.tril(x, k), torch.triu(x, k), torch.roll(x, k)) for k in (-9, -3, -1)),
    *(lambda x, k=k: x[..., k:, :k] * 2 for k in (-9, -3, -1)),
    lambda x: F.pad(x, (-1, 3, -2, -1)),
    lambda x: x[torch.tensor([-1, 0]), :, torch.tensor([-2, -1])] * 2,
    lambda x: torch.index_put(x, (torch.tensor([-1]), torch.tensor([-3])), x[:1, 0] * 2, accumulate=True),
    lambda x: torch.take(x, torch.tensor([-1, -5, 3])) * 2,
    lambda x: torch.put(x, torch.tensor([-1, -5, 3]), x[0, 0, :3] * 2),
    lambda x: torch.linalg.cross(x, x * x, dim=-3),
    lambda x: x.expand(2, -1, -1, -1).reshape(-1, 5) * torch.arange(-1, -6, -1),
    lambda x: F.cross_entropy(x[:, :, 0], torch.tensor([-1, 0, 2]), ignore_index=-1),
]
OF_TABLES: list[Op] = [
    op
    for p in (-1, -3, -7, 0, 6)
    for op in (
        lambda w, p=p: F.embedding_bag(ROWS.reshape(5, 1), w, padding_idx=p),
        lambda w, p=p: F.embedding_bag(ROWS, w, ENDS, mode="mean", padding_idx=p),
        lambda w, p=p: F.embedding_bag(ROWS, w, ENDS, mode="max", padding_idx=p),
        lambda w, p=p: F.embedding(ROWS, w, padding_idx=p) * 2,
        lambda w, p=p: torch.ops.aten.embedding(w, ROWS, p) * 2,
    )
]
GROUPS = {
    **{f"axis {axis}": (along(axis), X) for axis in (-1, -2, -3)},
    "others": (OTHERS, X),
    "tables": (OF_TABLES, TABLE),
}


class Program(torch.nn.Module):
    """Each op of an input of its own, so that one backward has the gradients of all."""

    def __init__(self, ops: list[Op]):
        super().__init__()
        self.ops = ops

    def forward(self, *xs: torch.Tensor) -> Any:
        return tuple(y for op, x in zip(self.ops, xs, strict=True) for y in _several(op(x)))


def _several(y: Any) -> tuple[Any, ...]:
    return tuple(y) if isinstance(y, tuple | list) else (y,)


def values_and_gradients(function: Any, xs: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    xs = [x.clone().requires_grad_() for x in xs]
    values = function(*xs)
    upstream = [(n, torch.linspace(0.5, 2 + n, y.numel(), dtype=torch.float64)) for n, y in enumerate(values)]
    loss = sum((values[n] * u.reshape(values[n].shape)).sum() for n, u in upstream if values[n].requires_grad)
    gradients = torch.autograd.grad(loss, xs, allow_unused=True)
    return [y.detach() for y in values], list(gradients)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_the_negative_form_is_eagers(group: str, exported: bool) -> None:
    ops, x = GROUPS[group]
    program, xs = Program(ops), [x.clone() for _ in ops]
    if exported:
        function = Function(gradc.from_torch(program, tuple(xs)), "numpy")

        def ours(*xs: torch.Tensor) -> Any:
            return function({}, *xs)
    else:
        ours = compiled(program, fallback="error", smallest_region=1)
    torch.testing.assert_close(values_and_gradients(ours, xs), values_and_gradients(program, xs), rtol=1e-9, atol=1e-11)
