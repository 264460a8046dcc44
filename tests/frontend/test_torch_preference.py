"""What attention and convolutions are left to torch for on CUDA: predictions of both, against what devices took."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from test_torch_devices import Compiler, compiled, compiler, rows  # noqa: E402, F401
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import gradc.torch  # noqa: E402
from gradc import knobs  # noqa: E402
from gradc.targets.devices import GPUS, calibrated_by, calibration_text, gpu_of, tensor_share  # noqa: E402
from gradc.torch import preference  # noqa: E402
from gradc.torch.library_rates import library_rates  # noqa: E402

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
CONVOLUTION = torch.ops.aten.convolution.default
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def call(target: Any, *arguments: Any, **keywords: Any) -> torch.fx.Node:
    """A call of tensors of given sizes on a device of CUDA's, in bf16 or (``dtype``)."""
    dtype, graph = keywords.pop("dtype", torch.bfloat16), torch.fx.Graph()
    nodes, values = [], []
    with FakeTensorMode():
        for i, argument in enumerate(arguments):
            if isinstance(argument, tuple):
                node = graph.placeholder(f"x{i}")
                node.meta["val"] = torch.empty(argument, dtype=dtype, device="cuda")
                nodes.append(node)
                values.append(node.meta["val"])
            else:
                nodes.append(argument)
                values.append(argument)
        node = graph.call_function(target, tuple(nodes), keywords)
        node.meta["val"] = target(*values, **keywords)
    return node


def attention(batch: int, heads: int, rows: int, features: int, causal: bool = True, **more: Any) -> torch.fx.Node:
    sizes = (batch, heads, rows, features)
    return call(ATTENTION, sizes, sizes, sizes, None, 0.0, causal, **more)


def convolution(image: tuple[int, ...], weight: tuple[int, ...], groups: int = 1, transposed: bool = False,
                **more: Any) -> torch.fx.Node:  # fmt: skip
    rank = len(weight) - 2
    pad = [size // 2 for size in weight[2:]]
    return call(CONVOLUTION, image, weight, None, [1] * rank, pad, [1] * rank, transposed, [0] * rank, groups, **more)


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [64, 128])
def test_torchs_attention_takes_what_an_h200_took(features: int) -> None:
    found = json.loads((RESULTS / "gpu-nvidia-h200-2026-11-28-tiles.json").read_text())["sdpa"]
    found = found[f"default d{features}"]
    node, h200 = attention(4, 1024 // features, 2048, features), gpu_of("H200")
    (forward, both) = (preference._times(node, h200, gradients) for gradients in (False, True))
    assert forward and both
    assert forward.torchs * 1e6 == pytest.approx(found["forward"]["us"], rel=0.1)
    assert (both.torchs - forward.torchs) * 1e6 == pytest.approx(found["backward"]["us"], rel=0.1)


@pytest.mark.parametrize(
    ("model", "node", "kernels"),
    [
        ("gpt_block", attention(8, 12, 1024, 64), "sdpa"),
        ("conv_block", convolution((32, 64, 56, 56), (64, 64, 3, 3)), "implicit_gemm"),
    ],
)
def test_a_step_of_models_took_what_is_predicted(model: str, node: torch.fx.Node, kernels: str) -> None:
    """Forward and backward together, in the middle of others."""
    found = json.loads((RESULTS / "gpu-nvidia-h200-2026-11-28.json").read_text())["models"][model]["eager"]
    measured = sum(ms for name, ms in found["kernels_ms"].items() if kernels in name)
    times = preference._times(node, gpu_of("H200"), True)
    assert times and times.torchs * 1e3 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("features", "wanted"), [(64, (109, 377)), (128, (130, 458))])
def test_our_attention_takes_what_the_static_model_says(features: int, wanted: tuple[float, float]) -> None:
    """docs/tiles.md; ``python -m benchmarks.cuda_static A1``."""
    node, h100 = attention(4, 1024 // features, 2048, features), gpu_of("H100")
    (forward, both) = (preference._times(node, h100, gradients) for gradients in (False, True))
    assert forward and both
    assert forward.ours * 1e6 == pytest.approx(wanted[0], rel=0.03)
    assert (both.ours - forward.ours) * 1e6 == pytest.approx(wanted[1], rel=0.03)


def test_our_convolution_takes_what_the_static_model_says() -> None:
    """90.7 us forward and 191.5 backward, explain_static of 32 x 64 x 56 x 56 by 3 x 3 on sm_90."""
    node = convolution((32, 64, 56, 56), (64, 64, 3, 3))
    (forward, both) = (preference._times(node, gpu_of("H100"), gradients) for gradients in (False, True))
    assert forward and both
    assert forward.ours * 1e6 == pytest.approx(90.7, rel=0.1) and both.ours * 1e6 == pytest.approx(282, rel=0.1)


def test_other_devices_go_by_their_tensor_cores() -> None:
    for gpu in GPUS:
        assert gpu.attention_forward == pytest.approx(345e12 * tensor_share(gpu))
    assert gpu_of("A100").sources["convolution"] == "estimate" and gpu_of("H200").sources["convolution"] == "measured"


@pytest.mark.parametrize(
    "node",
    [
        attention(4, 16, 2048, 64, dtype=torch.float32),
        attention(4, 16, 2048, 192),
        attention(4, 16, 1, 64, False),
        convolution((32, 64, 56, 56), (64, 64, 3, 3), dtype=torch.float32),
        convolution((32, 64, 56, 56), (64, 1, 3, 3), groups=64),
        convolution((32, 64, 56, 56), (64, 64, 3, 3), transposed=True),
    ],
    ids=["f32", "wide heads", "a row", "f32 images", "groups", "transposed"],
)
def test_what_there_is_no_prediction_of_is_torchs(node: torch.fx.Node) -> None:
    assert preference.faster_in_torch(node).endswith("is faster on CUDA (take='all' has gradc run it)")


def test_a_device_that_the_cost_model_does_not_know_leaves_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error: what is asked is only a preference."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (11, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA Thor")
    preference._listed.cache_clear()
    try:
        reason = preference.faster_in_torch(attention(4, 16, 2048, 64))
    finally:
        preference._listed.cache_clear()
    assert reason == "flash attention is faster on CUDA (take='all' has gradc run it)"


def test_nothing_that_takes_no_time_is_torchs(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    path.write_text(calibration_text(gpu_of("H100"), {"launch": 0.0}))
    for node in (attention(0, 16, 2048, 64), convolution((1, 0, 8, 8), (4, 0, 3, 3)), attention(2, 0, 8, 64)):
        for gradients in (False, True):
            reason = preference.faster_in_torch(node, gradients, path)
            assert "x faster there" in reason or "as fast there" in reason


def test_the_reason_has_figures() -> None:
    reason = preference.faster_in_torch(attention(4, 16, 2048, 64))
    assert reason == ("flash attention, predicted 1.2x faster there (396 us against 488; take='all' has gradc run it)")
    reason = preference.faster_in_torch(attention(4, 16, 2048, 64), gradients=False)
    assert reason.startswith("flash attention, predicted 1.1x faster there")
    reason = preference.faster_in_torch(attention(1, 2, 16, 64))
    assert reason.startswith("flash attention, predicted as fast there (10 us against 10;")
    assert "cuDNN's convolution, predicted 3." in preference.faster_in_torch(
        convolution((32, 64, 56, 56), (64, 64, 3, 3))
    )


def test_a_prediction_takes_less_than_a_millisecond() -> None:
    node = attention(4, 16, 2048, 64)
    preference.faster_in_torch(node)
    start = time.process_time()
    for _ in range(100):
        preference.faster_in_torch(node)
    assert time.process_time() - start < 1.0


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Path]:
    """A calibration of an H100 whose libraries take three times as long."""
    h100 = gpu_of("H100")
    path = tmp_path / "h100.json"
    path.write_text(calibration_text(h100, {name: getattr(h100, name) / 3 for name in
                                            ("attention_forward", "attention_backward", "convolution")}))  # fmt: skip
    yield path


def test_a_measurement_of_this_device_decides(slow: Path) -> None:
    """Attention is gradc's then; a convolution is still torch's, whose figures are measured."""
    assert preference.faster_in_torch(attention(4, 16, 2048, 64), calibration=slow) == ""
    reason = preference.faster_in_torch(convolution((32, 64, 56, 56), (64, 64, 3, 3)), calibration=slow)
    assert reason.startswith("cuDNN's convolution, measured 1.") and "x faster there" in reason
    with knobs.CALIBRATION.set(str(slow)):
        assert preference.faster_in_torch(attention(4, 16, 2048, 64)) == ""
        assert preference.faster_in_torch(attention(4, 16, 2048, 64), calibration="none")


def test_calibrate_finds_the_rates_again() -> None:
    """What a clock would show is reckoned from rates; everything runs, on the CPU and smaller."""
    h200 = gpu_of("H200")
    flops = {"forward": 2.0 * 2 * 3 * 32 * 32 * 64, "convolution": 2.0 * 2 * 8 * 8 * 64 * 64 * 9}
    wanted = [flops["forward"] / 1e9 + h200.launch, 2.5 * flops["forward"] / 2e9 + 3 * h200.launch,
              flops["convolution"] / 3e9 + h200.launch]  # fmt: skip

    def seconds(function: Any) -> float:
        function()
        return wanted.pop(0)

    found = library_rates(h200, seconds, device="cpu", attention=(2, 3, 32), images=(2, 8))
    assert found == pytest.approx({"attention_forward": 1e9, "attention_backward": 2e9, "convolution": 3e9})
    assert calibrated_by(h200, calibration_text(h200, found)).sources["convolution"] == "calibrated"


# -- the backend -------------------------------------------------------------------------------------------------------


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(2, -1, 2, 32).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(-1) + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report_says_it(compiler: Compiler, dynamic: bool) -> None:  # noqa: F811
    """Of known sizes, and of those that may be any by their hints; with gradients and without."""
    model, x = Heads(), torch.randn(2, 640, 64, dtype=torch.bfloat16)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    compiled(model)(x)
    ((_, reason),) = [row for row in rows() if row[0] == str(ATTENTION)]
    assert reason.startswith("flash attention, predicted ") and "us against" in reason
    gradc.torch.report().clear()
    with torch.no_grad():
        compiled(model)(x)
    ((_, alone),) = [row for row in rows() if row[0] == str(ATTENTION)]
    assert alone != reason


def test_what_gradc_does_faster_it_takes(compiler: Compiler, slow: Path) -> None:  # noqa: F811
    model, x = Heads(), torch.randn(2, 1024, 64, dtype=torch.bfloat16)
    with knobs.CALIBRATION.set(str(slow)):
        found = compiled(model)(x)
    torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.05)
    assert str(ATTENTION) not in {op for op, _ in rows()}
