"""docs/compared.md: its Python runs, and what it says of torch is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compared.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"docs/compared.md, block {number}", "exec"), {})


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 6


def test_what_is_said_of_torchs_embedding() -> None:
    torch = pytest.importorskip("torch")
    from gradc.runtime.torch_private import release

    F = torch.nn.functional
    w = torch.ones(6, 4)
    for index in (torch.int8, torch.int16, torch.uint8):
        with pytest.raises(RuntimeError, match="Long, Int"):
            F.embedding(torch.tensor([1], dtype=index), w)
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(torch.tensor([9]), w)
    with pytest.raises(ValueError, match="sum, mean or max"):
        F.embedding_bag(torch.tensor([[1]]), w, mode="sqrtn")
    with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
        F.embedding_bag(torch.tensor([[1]]), w, mode="mean", per_sample_weights=torch.ones(1, 1))
    row = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    F.embedding(torch.zeros(1000, dtype=torch.long), row).backward(torch.ones(1000, 1, dtype=torch.bfloat16))
    assert row.grad.item() == 256
    table = torch.zeros(6, 1, requires_grad=True)
    F.embedding_bag(torch.tensor([[3, 0, 0, 0]]), table, mode="sum", scale_grad_by_freq=True).sum().backward()
    assert table.grad[:, 0].tolist() == pytest.approx([1, 0, 0, 1 / 3 if release() < (2, 14) else 1, 0, 0])
    x, s = torch.tensor([2.0, 7], requires_grad=True), torch.tensor([2.0, 2], requires_grad=True)
    x.scatter_reduce(0, torch.tensor([0, 0]), s, "amax", include_self=False).backward(torch.tensor([6.0, 5]))
    assert s.grad.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_of_torchs_quantization() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([0.31, 2.0, -3.0], requires_grad=True)
    s, z = torch.tensor([0.1], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 1.0).backward(torch.tensor([1.0, 10, 100]))
    assert (
        x.grad.tolist() == [1, 0, 0]
        and s.grad.item() == pytest.approx(-730.1, rel=1e-5)
        and z.grad.item() == pytest.approx(-11)
    )
    with pytest.raises(RuntimeError, match="1-D"):
        torch.fake_quantize_per_channel_affine(
            torch.zeros(4, 8), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32), 0, -8, 7
        )
    assert (
        not torch.quantize_per_tensor(torch.ones(3, requires_grad=True), 0.1, 0, torch.qint8).dequantize().requires_grad
    )
    for value, slope in ((0.75, 0), (0.7, 1)):  # 8 and 7 before clamping to 7
        x = torch.tensor([value], requires_grad=True)
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7).backward()
        assert x.grad.item() == slope


NAN = """
import sys, torch
import torch.nn.functional as F
grid = torch.tensor([float("nan"), 0]).reshape(1, 1, 1, 2).requires_grad_()
x = torch.ones(1, 1, 4, 4, requires_grad=True)
y = F.grid_sample(x, grid, padding_mode=sys.argv[1], align_corners=False)
print(y.item())
sys.stdout.flush()
y.sum().backward()
"""


@pytest.mark.parametrize(
    ("padding", "value", "fate"), [("zeros", "nan", 0), ("border", "1.0", -11), ("reflection", "1.0", -11)]
)
def test_what_is_said_of_torchs_grid_sample(padding: str, value: str, fate: int) -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", NAN, padding], capture_output=True, text=True)
    assert done.stdout.split() == [value]
    assert done.returncode == fate


def test_what_is_said_of_torchs_bicubic_interpolation() -> None:
    torch = pytest.importorskip("torch")
    from gradc.runtime.torch_private import release

    x, grid = torch.ones(1, 1, 4, 4, 4), torch.zeros(1, 1, 1, 1, 3)
    interpolated = lambda: torch.nn.functional.grid_sample(x, grid, mode="bicubic", align_corners=False)
    if release() >= (2, 15):
        assert interpolated().item() == pytest.approx(1)
        compiled = torch.compile(interpolated, backend="gradc")
        assert torch.equal(compiled(), interpolated())
    else:
        with pytest.raises(RuntimeError, match="bicubic"):
            interpolated()
