"""torch's own samples (OpInfo) of convolutions, pooling, views, products, normalisation and attention, in f64: values
and gradients are torch's.

``GRADC_ALL_SAMPLES=1`` runs every sample, otherwise some of each op, spread over the list.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_ops import close, random_like

from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.trace import trace

torch = pytest.importorskip("torch")

from torch_oracles import to_numpy  # noqa: E402

from benchmarks.opinfo import op_db  # noqa: E402

OF_EACH = 5


def _axis(name: str, own: str = "axis", theirs: str = "dim") -> Callable[..., Any]:
    """The op of that name with torch's name of an axis."""

    def called(*arguments: Any, **named: Any) -> Any:
        if theirs in named:
            named[own] = named.pop(theirs)
        return getattr(ops, name)(*arguments, **named)

    return called


def _varargs(name: str) -> Callable[..., Any]:
    return lambda x, *sizes: getattr(ops, name)(x, sizes[0] if isinstance(sizes[0], tuple | list) else sizes)


def _pad(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return ops.pad(x, (*((0, 0),) * (x.rank - len(pairs)), *reversed(pairs)), value or 0, mode)


NAMED = (
    "nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d"
    " nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.max_pool1d nn.functional.max_pool2d"
    " nn.functional.max_pool3d nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d"
    " nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d"
    " nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d"
    " nn.functional.unfold nn.functional.local_response_norm nn.functional.pixel_shuffle"
    " nn.functional.pixel_unshuffle nn.functional.group_norm nn.functional.instance_norm nn.functional.batch_norm"
    " nn.functional.bilinear nn.functional.linear nn.functional.scaled_dot_product_attention nn.functional.interpolate"
    " bmm outer addmm baddbmm tensordot flatten movedim tril triu"
)
OURS: dict[str, Callable[..., Any]] = {name: getattr(ops, name.rpartition(".")[2]) for name in NAMED.split()}
OURS |= {
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: ops.diagonal(x, offset=offset, axis1=dim1, axis2=dim2),
    "diag_embed": lambda x, offset=0, dim1=-2, dim2=-1: ops.diag_embed(x, offset=offset, axis1=dim1, axis2=dim2),
    "einsum": lambda tensors, equation: ops.einsum(equation, *tensors),
    "linalg.cross": _axis("cross"),
    "roll": _axis("roll", theirs="dims"),
    "squeeze": _axis("squeeze"),
    "unsqueeze": _axis("unsqueeze"),
    "unflatten": _axis("unflatten"),
    "unbind": _axis("unbind"),
    "chunk": _axis("chunk"),
    "split": _axis("split"),
    "stack": lambda tensors, *dim, **named: ops.stack(tensors, axis=dim[0] if dim else named.get("dim", 0)),
    "tile": _varargs("tile"),
    "repeat": _varargs("repeat"),
    "nn.functional.pad": _pad,
}


def _label(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


INFOS = {_label(info): info for info in op_db() if info.name in OURS}


def refused(label: str, arguments: list[Any], named: dict[str, Any]) -> bool:
    """What is not there: random numbers, antialiasing, complex numbers, a batch without channels."""
    return bool(
        named.get("dropout_p", 0)
        or named.get("antialias")
        or any(isinstance(v, torch.Tensor) and v.is_complex() for v in arguments)
        or (INFOS[label].name.endswith("batch_norm") and arguments[0].ndim < 2)
    )


def samples(label: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments and keywords of each sample, or of some."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [
            ([s.input, *s.args], dict(s.kwargs))
            for s in INFOS[label].sample_inputs("cpu", torch.float64, requires_grad=False)
        ]
    every = [s for s in every if not refused(label, *s)]
    yield from every if os.environ.get("GRADC_ALL_SAMPLES") else every[:: max(1, len(every) // OF_EACH)]


def check(label: str, arguments: list[Any], named: dict[str, Any]) -> None:
    """One sample: its tensors are inputs x0, x1..., the rest stays."""
    tensors: list[torch.Tensor] = []

    def taken(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return len(tensors) - 1, "place"
        return [taken(v) for v in value] if isinstance(value, list | tuple) else value

    def filled(value: Any, given: Any) -> Any:
        if isinstance(value, tuple) and value[1:] == ("place",):
            return given[value[0]]
        return tuple(filled(v, given) for v in value) if isinstance(value, list) else value

    places, more = [taken(a) for a in arguments], {k: taken(v) for k, v in named.items()}

    def called(function: Any, given: Any) -> tuple[Any, ...]:
        made = function(*(filled(p, given) for p in places), **{k: filled(v, given) for k, v in more.items()})
        return tuple(made) if isinstance(made, tuple | list) else (made,)

    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    running = named.get("running_mean", arguments[1] if len(arguments) > 1 else None)
    if INFOS[label].name.endswith(("batch_norm", "instance_norm")) and running is not None:
        leaves[1:3] = [t.detach() for t in leaves[1:3]]  # torch gives running statistics no gradient
    want = called(INFOS[label].op, leaves)
    floats = [k for k, t in enumerate(leaves) if t.requires_grad]
    arrays = {f"x{k}": to_numpy(t) for k, t in enumerate(tensors)}
    graph = trace(lambda **x: called(OURS[INFOS[label].name], list(x.values())), **arrays) if arrays else None
    assert graph is not None
    got = interp.run(graph, arrays)
    words = f"{label} {[tuple(t.shape) for t in tensors]} {arguments} {named}"[:400]
    for value, expected in zip(got.values(), want, strict=True):
        close(value, to_numpy(expected), 1e-11, words)
    smooth = [k for k, w in enumerate(want) if w.requires_grad]
    if not smooth:
        return
    joint = differentiate(
        graph.with_outputs([graph.outputs[k] for k in smooth]), [f"x{k}" for k in floats], unused="zeros"
    )
    upstream = [random_like(to_numpy(want[k]), 7 + k) for k in smooth]
    found = torch.autograd.grad(
        [want[k] for k in smooth],
        [leaves[k] for k in floats],
        [torch.tensor(g) for g in upstream],
        allow_unused=True,
        materialize_grads=True,
    )
    given = {**arrays, **{f"d.{graph.outputs[k][0]}": g for k, g in zip(smooth, upstream, strict=True)}}
    gradients = interp.run(joint, {n: given[n] for n in joint.input_names})
    for k, expected in zip(floats, found, strict=True):
        close(gradients[f"d.x{k}"], to_numpy(expected), 1e-10, f"d/dx{k} of {words}", floor=1e-3)


@pytest.mark.parametrize("label", list(INFOS))
def test_torchs_samples(label: str) -> None:
    with np.errstate(all="ignore"):
        for arguments, named in samples(label):
            check(label, arguments, named)


def test_torch_has_samples_of_each() -> None:
    assert OURS.keys() == {info.name for info in INFOS.values()}
