"""Under autocast a result has the dtype that eager mode gives it, also of ops that are kept whole and that autocast has
no rule for: eager mode decomposes these, and casts their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import long_tests
import pytest

torch = pytest.importorskip("torch", reason="gradc[torch]")

import torch.nn.functional as F  # noqa: E402

from gradc.runtime.torch_private import has_kernel, private  # noqa: E402
from gradc.torch import autocast  # noqa: E402
from gradc.torch.normal_form import normal_form  # noqa: E402
from gradc.torch.table import is_kept, lines  # noqa: E402

X, W = torch.linspace(-2, 2, 24).reshape(4, 6), torch.linspace(-1, 1, 30).reshape(5, 6)
CELL = (torch.linspace(-1, 1, 108).reshape(18, 6),) * 2
LAYER = [torch.linspace(-1, 1, 24).reshape(4, 6), torch.ones(4, 4) / 4, torch.zeros(4), torch.zeros(4)]
GATED = [torch.cat([w] * 4) for w in LAYER]
RESET = [torch.cat([w] * 3) for w in LAYER]
H = torch.zeros(1, 2, 4)
SEQUENCE = torch.linspace(-1, 1, 36).reshape(3, 2, 6)
LABELS = torch.tensor([0, 2, 5, 1])
IMAGE = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)

CASES: dict[str, Callable[[Any], Any]] = {
    "aten.square": lambda c: c(X).square(),
    "aten.special_erfinv": lambda c: torch.special.erfinv(c(X) / 4),
    "aten.special_ndtr": lambda c: torch.special.ndtr(c(X)),
    "aten.isfinite": lambda c: torch.isfinite(c(X)),
    "aten.relu6": lambda c: F.relu6(c(X)),
    "aten.log_sigmoid": lambda c: F.logsigmoid(c(X)),
    "aten.embedding_bag": lambda c: F.embedding_bag(LABELS[None] % 4, c(X)),
    "aten.softmax": lambda c: F.softmax(c(X), -1),
    "aten.log_softmax": lambda c: F.log_softmax(c(X), -1),
    "aten.cosine_similarity": lambda c: F.cosine_similarity(c(X), c(W[:4])),
    "aten.pairwise_distance": lambda c: F.pairwise_distance(c(X), c(W[:4])),
    "aten.einsum": lambda c: torch.einsum("ij,kj->ik", c(X), c(W)),
    "aten.bilinear": lambda c: F.bilinear(c(X), c(X), c(torch.ones(2, 6, 6))),
    "aten.max_pool2d": lambda c: F.max_pool2d(c(IMAGE), 2),
    "aten.avg_pool1d": lambda c: F.avg_pool1d(c(X), 2),
    "aten.adaptive_avg_pool1d": lambda c: F.adaptive_avg_pool1d(c(X), 3),
    "aten.adaptive_avg_pool2d": lambda c: F.adaptive_avg_pool2d(c(IMAGE), 3),
    "aten.upsample_nearest1d": lambda c: F.interpolate(c(IMAGE)[0], scale_factor=2),
    "aten.upsample_nearest2d": lambda c: F.interpolate(c(IMAGE), scale_factor=2),
    "aten.upsample_nearest3d": lambda c: F.interpolate(c(IMAGE)[None], scale_factor=2),
    "aten.upsample_linear1d": lambda c: F.interpolate(c(IMAGE)[0], scale_factor=2, mode="linear"),
    "aten.upsample_bilinear2d": lambda c: F.interpolate(c(IMAGE), scale_factor=2, mode="bilinear"),
    "aten.upsample_trilinear3d": lambda c: F.interpolate(c(IMAGE)[None], scale_factor=2, mode="trilinear"),
    "aten.upsample_bicubic2d": lambda c: F.interpolate(c(IMAGE), scale_factor=2, mode="bicubic"),
    "aten.layer_norm": lambda c: F.layer_norm(c(X), (6,)),
    "aten.rms_norm": lambda c: F.rms_norm(c(X), (6,)),
    "aten.group_norm": lambda c: F.group_norm(c(X), 2),
    "aten._weight_norm": lambda c: torch._weight_norm(c(X), c(torch.ones(4, 1))),
    "aten.lstm": lambda c: torch.lstm(c(SEQUENCE), [c(H)] * 2, [*map(c, GATED)], True, 1, 0.0, False, False, False)[0],
    "aten.gru": lambda c: torch.gru(c(SEQUENCE), c(H), [*map(c, RESET)], True, 1, 0.0, False, False, False)[0],
    "aten.rnn_tanh": lambda c: torch.rnn_tanh(c(SEQUENCE), c(H), [*map(c, LAYER)], True, 1, 0.0, False, False, False)[
        0
    ],
    "aten.rnn_relu": lambda c: torch.rnn_relu(c(SEQUENCE), c(H), [*map(c, LAYER)], True, 1, 0.0, False, False, False)[
        0
    ],
    "aten.lstm_cell": lambda c: torch.lstm_cell(c(X), [c(X)] * 2, *(torch.cat([c(w), c(w[:6])]) for w in CELL))[0],
    "aten.gru_cell": lambda c: torch.gru_cell(c(X), c(X), *map(c, CELL)),
    "aten.rnn_tanh_cell": lambda c: torch.rnn_tanh_cell(c(X), c(X), *(c(w[:6]) for w in CELL)),
    "aten.rnn_relu_cell": lambda c: torch.rnn_relu_cell(c(X), c(X), *(c(w[:6]) for w in CELL)),
    "aten.cross_entropy_loss": lambda c: F.cross_entropy(c(X), LABELS.to(c(X).device)),
    "aten.nll_loss_nd": lambda c: F.nll_loss(c(X), LABELS.to(c(X).device)),
    "aten.quantile": lambda c: torch.quantile(c(X), 0.3),
    "aten.nanquantile": lambda c: torch.nanquantile(c(X), 0.3),
    "aten.fake_quantize_per_channel_affine": lambda c: torch.fake_quantize_per_channel_affine(
        c(X), torch.ones(4), torch.zeros(4), 0, -8, 7
    ),
    "aten.fake_quantize_per_tensor_affine": lambda c: torch.fake_quantize_per_tensor_affine(c(X), 0.5, 0, -8, 7),
    "aten.max_pool3d": lambda c: F.max_pool3d(c(IMAGE)[None].expand(1, 1, 4, 8, 8), 2),
    "aten.adaptive_avg_pool3d": lambda c: F.adaptive_avg_pool3d(c(IMAGE)[None].expand(1, 1, 4, 8, 8), 2),
}
MOVING = {
    *("where", "to", "contiguous", "reshape", "view_as", "flatten", "numpy_T", "narrow", "chunk", "pad", "movedim"),
    *("swapaxes", "repeat_interleave", "expand_as", "reshape_as", "argsort", "msort"),
}
"""Composites that compute no float."""


def test_every_composite_without_a_rule_has_a_case() -> None:
    found = set()
    for name in lines():
        namespace, packet, *overload = name.split(".")
        if namespace == "gradc":  # the normal form's own, which runs without autocast
            continue
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload[0], None) if overload else None
        ruled = op is not None and all(has_kernel(op, f"Autocast{device}") for device in ("CPU", "CUDA"))
        if op is not None and has_kernel(op, "CompositeImplicitAutograd") and not ruled:
            found.add(f"{namespace}.{packet}")
    assert found - CASES.keys() == {f"aten.{name}" for name in MOVING} & found
    assert CASES.keys() <= found


@long_tests.values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_result_has_eager_modes_dtype(name: str, dtype: torch.dtype) -> None:
    """And its value, as far as bfloat16 tells it, whether a region has it or torch.  Without oneDNN, whose LSTM
    autocast has a rule for: which one a call takes depends on the processor.
    """
    function = lambda: CASES[name](lambda x: x.to(dtype))
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        wanted = function()
        torch._dynamo.reset()
        got = torch.compile(function, backend="gradc", options={"smallest_region": 1})()
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


class Called(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> tuple[Any]:
        return (self.function(x),)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=x.device)), torch.float32),
        (lambda x: x.square(), torch.float32),
        (lambda x: F.pairwise_distance(x, x), torch.float32),
        (lambda x: torch.special.erfinv(x), torch.float32),
        (lambda x: F.softmax(x, -1), torch.float32),
        (lambda x: F.relu6(x), torch.bfloat16),
        (lambda x: torch.einsum("ij,kj->ik", x.float(), x.float()), torch.bfloat16),
    ],
    ids=["cross_entropy", "square", "pairwise_distance", "erfinv", "softmax", "relu6", "einsum"],
)
def test_rules_of_a_gpu(function: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Those of torch.amp's documentation, for CUDA, on a tensor without values."""
    with private("FakeTensorMode")(allow_non_fake_inputs=True):
        x = torch.ones(4, 6, dtype=torch.bfloat16, device="cuda")
    program = torch.fx.GraphModule({}, torch.fx.Graph())
    program.function = Called(function)
    node = program.graph.placeholder("x")
    program.graph.output(program.graph.call_module("function", (node,)))
    program.recompile()
    with autocast.enabling({"cuda": torch.bfloat16}):
        form = normal_form(program, [x], is_kept)
    (result,) = form.module.graph.output_node().args[0]
    assert result.meta["val"].dtype == dtype
