"""PyTorch's OpInfo samples of the indexing and sampling ops: each as arrays, as a call of gradc's ops, and as the torch
call that says what is right.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gradc import ops
from gradc.ir.types import DTYPES, typeof

Array = np.ndarray[Any, Any]
TORCH = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SYMBOLIC = {4: ("NCHW", "NPQ"), 5: ("NCDHW", "NPQR")}
"""Sizes that stay symbols in the samplers, so that samples of one kind share their kernels."""


def to_torch(array: Array) -> torch.Tensor:
    if array.dtype == DTYPES["bf16"].np:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


def to_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().to_dense().contiguous()
    return (
        tensor.view(torch.int16).numpy().view(DTYPES["bf16"].np) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    )


# -- what gradc's ops make of torch's arguments ------------------------------------------------------------------------


def _gather(x: Any, dim: int, index: Any) -> Any:
    """torch's index may have less than x on the other axes, and any shape where it is empty."""
    if x.rank == 0 or index.rank == 0:
        line = ops.reshape(x, (x.type.count,))
        return ops.reshape(_gather(line, 0, ops.reshape(index, (index.type.count,))), index.shape)
    if x.rank != index.rank and 0 in index.shape:
        return ops.broadcast_to(ops.sum(x) * 0.0, index.shape)
    limit = tuple(n if a == dim % x.rank else m for a, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)))
    return ops.take_along_axis(x[tuple(slice(0, n) for n in limit)], index, axis=dim)


def _take_along_dim(x: Any, index: Any, dim: int | None = None) -> Any:
    """Negative indices count from the end: oob='wrap'."""
    if dim is None:
        return ops.take_along_axis(ops.reshape(x, (-1,)), ops.reshape(index, (-1,)), axis=0, oob="wrap")
    dim = dim % x.rank
    shape = [max(n, m) if a != dim else 0 for a, (n, m) in enumerate(zip(x.shape, index.shape, strict=True))]
    grown = [ops.broadcast_to(v, tuple(v.shape[a] if a == dim else n for a, n in enumerate(shape))) for v in (x, index)]
    return ops.take_along_axis(*grown, axis=dim, oob="wrap")


MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def _sampler(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """torch's numbers for mode and padding."""
    return ops.grid_sample(x, grid, mode=MODES[mode], padding_mode=PADDINGS[padding], align_corners=align_corners)


# sparse=True asks torch for another form of the same gradient: here both are compared dense.
OURS: dict[str, Callable[..., Any]] = {
    "nn.functional.embedding": lambda weight, index, sparse=False, **more: ops.embedding(index, weight, **more),
    "nn.functional.embedding_bag": (
        lambda weight, index, offsets=None, sparse=False, per_sample_weights=None, **more: ops.embedding_bag(
            index, weight, offsets, per_sample_weights, **more
        )
    ),
    "nn.functional.grid_sample": ops.grid_sample,
    "grid_sampler_2d": _sampler,
    "grid_sampler_3d": _sampler,
    "index_add": ops.index_add,
    "index_select": ops.index_select,
    "gather": _gather,
    "scatter_add": lambda x, dim, index, src: ops.scatter_reduce(x, dim, index, src, "sum"),
    "scatter_reduce": ops.scatter_reduce,
    "take_along_dim": _take_along_dim,
}
SAMPLERS = ("nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d")

# -- where torch itself is not the oracle ------------------------------------------------------------------------------

WRONG_COUNT = "scale_grad_by_freq: torch's embedding_bag divides a row's gradient by how often another index occurs"
FALSE_WINNER = (
    "include_self=False: torch counts an element that it leaves out as one of the winners when it equals the result"
)


def _bag_by_frequency(
    weight: Any,
    index: Any,
    offsets: Any = None,
    per_sample_weights: Any = None,
    *,
    mode: str = "mean",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    **_: Any,
) -> torch.Tensor:
    """By definition: the rows of torch's embedding, then sums bag after bag."""
    rows = F.embedding(index.reshape(-1), weight, padding_idx, max_norm, norm_type, scale_grad_by_freq=True)
    factors = torch.ones(len(rows), dtype=rows.dtype) if per_sample_weights is None else per_sample_weights.reshape(-1)
    kept = (
        torch.ones(len(rows), dtype=torch.bool)
        if padding_idx is None
        else index.reshape(-1) != padding_idx % len(weight)
    )
    starts = list(range(0, index.numel(), index.shape[1])) if offsets is None else offsets.tolist()
    ends = [*starts, index.numel()]
    out = []
    for i, j in list(itertools.pairwise(ends))[: len(starts) - include_last_offset]:
        total = (rows[i:j] * factors[i:j, None])[kept[i:j]].sum(0)
        out.append(total / kept[i:j].sum().clamp(min=1) if mode == "mean" else total)
    return torch.stack(out)


def _extremum_without_self(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool) -> torch.Tensor:
    """Elements that something is written to become the neutral one, and then take part."""
    line = x.reshape(1) if x.ndim == 0 else x
    hit = (
        torch.zeros(line.shape, dtype=torch.bool)
        .scatter(dim, index.reshape(1) if x.ndim == 0 else index, True)
        .reshape(x.shape)
    )
    neutral = torch.full_like(x, float("-inf" if reduce == "amax" else "inf"))
    return torch.where(hit, neutral, x).scatter_reduce(dim, index, src, reduce, include_self=True)


def _departure(
    name: str, arguments: list[Any], named: dict[str, Any]
) -> tuple[str, Callable[..., torch.Tensor]] | None:
    """(why, the definition) where torch departs from what it documents."""
    if name == "nn.functional.embedding_bag" and named.get("scale_grad_by_freq"):
        return WRONG_COUNT, _bag_by_frequency
    if name == "scatter_reduce" and arguments[-1] in ("amax", "amin") and not named.get("include_self", True):
        x, dim, index, src, reduce = arguments
        y = _extremum_without_self(x, dim, index, src, reduce, False)
        hit = torch.isinf(_extremum_without_self(x, dim, index, torch.full_like(src, float("inf")), "amax", False))
        if bool((hit & (x == y)).any()):
            return FALSE_WINNER, _extremum_without_self
    return None


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """One sample in one dtype.

    :ivar arrays: x0, x1... in the order of torch's arguments.  :ivar ours: of nodes.  :ivar theirs: of tensors.
    :ivar statics: the other arguments.
    :ivar departure: why the oracle is the definition and not torch's op; "" if it is torch's.
    :ivar sampler: mode, padding and align_corners of what grid_sample does; its sizes stay symbols.
    """

    op: str
    dtype: str
    number: int
    arrays: dict[str, Array]
    ours: Callable[..., Any]
    theirs: Callable[..., torch.Tensor]
    statics: str
    departure: str = ""
    sampler: tuple[str, str, bool] | None = None

    @property
    def label(self) -> str:
        return f"{self.number}: {', '.join(str(typeof(a)) for a in self.arrays.values())}{self.statics}"

    @property
    def signature(self) -> tuple[Any, ...]:
        """Cases that have the same one share a graph."""
        kinds = tuple((str(typeof(a).dtype), a.ndim) if self.sampler else str(typeof(a)) for a in self.arrays.values())
        return (self.op, kinds, self.statics)

    def types(self, prefix: str) -> dict[str, str]:
        """Of the inputs; symbols begin with ``prefix``."""
        if not self.sampler:
            return {n: str(typeof(a)) for n, a in self.arrays.items()}
        image, grid = SYMBOLIC[self.arrays["x0"].ndim]
        sizes = [",".join(prefix + s for s in image), ",".join([*(prefix + s for s in grid), str(len(image) - 2)])]
        return {n: f"{self.dtype}[{s}]" for n, s in zip(self.arrays, sizes, strict=True)}

    @property
    def floats(self) -> list[str]:
        return [n for n, a in self.arrays.items() if typeof(a).dtype.is_float]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sampling(name: str, values: list[Any], named: dict[str, Any]) -> tuple[str, str, bool] | None:
    if name == "nn.functional.grid_sample":
        return named["mode"], named["padding_mode"], named["align_corners"]
    return (MODES[values[2]], PADDINGS[values[3]], values[4]) if name in SAMPLERS else None


def make_case(
    name: str, label: str, dtype: str, number: int, call: Callable[..., Any], values: list[Any], named: dict[str, Any]
) -> Case:
    """A call ``call(*values, **named)`` of a torch op as a case: its tensors become inputs, the rest stays."""
    places = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor)]
    keys = [k for k, v in named.items() if isinstance(v, torch.Tensor)]
    plain = {k: v for k, v in named.items() if k not in keys}
    tensors = [*(values[k] for k in places), *(named[k] for k in keys)]
    departure = _departure(name, values, named)

    def arranged(operands: Any) -> tuple[list[Any], dict[str, Any]]:
        full = list(values)
        for k, o in zip(places, operands, strict=False):
            full[k] = o
        return full, dict(zip(keys, operands[len(places) :], strict=True))

    def ours(*operands: Any) -> Any:
        full, more = arranged(operands)
        return OURS[name](*full, **more, **plain)

    def theirs(*operands: Any) -> Any:
        full, more = arranged(operands)
        if "max_norm" in plain:  # torch changes the table in place
            full[0] = full[0].clone()
        if departure is not None:
            return departure[1](*full, **more, **plain)
        return call(*full, **more, **{k: v for k, v in plain.items() if k != "sparse"})

    words = [_text(v) for k, v in enumerate(values) if k not in places] + [
        f"{k}={_text(v)}" for k, v in plain.items() if v is not None
    ]
    arrays = {f"x{i}": to_numpy(t) for i, t in enumerate(tensors)}
    return Case(
        label,
        dtype,
        number,
        arrays,
        ours,
        theirs,
        "".join(f" {w}" for w in words),
        departure[0] if departure else "",
        _sampling(name, values, plain),
    )


@cache
def op_db() -> list[Any]:
    """torch's OpInfos."""
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # a base class of torch's own tests, which are not run here
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core

        # Each sample's iterator looks through the stack, and the files of its frames, for a unittest.TestCase, to name
        # a failure by it; there is none here.
        core.extract_test_fn = common_utils.extract_test_fn = lambda: None
        return list(op_db)


@cache
def infos() -> dict[str, tuple[str, Any]]:
    """label -> (torch's name, OpInfo), in the order of OURS."""
    by_label = {}
    for name in OURS:
        for info in sorted((i for i in op_db() if i.name == name), key=lambda i: i.variant_test_name):
            by_label[
                name.removeprefix("nn.functional.") + (f".{info.variant_test_name}" if info.variant_test_name else "")
            ] = (name, info)
    return by_label


def absent() -> list[str]:
    """Which of the ops torch's op_db does not have."""
    there = {name for name, _ in infos().values()}
    return [name for name in OURS if name not in there]


def cases(label: str, dtype: str) -> Iterator[Case]:
    """The samples of one op, the same in every run."""
    name, info = infos()[label]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # some samples are drawn with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(info.sample_inputs("cpu", TORCH[dtype], requires_grad=False)):
            yield make_case(name, label, dtype, number, info.op, [sample.input, *sample.args], dict(sample.kwargs))
