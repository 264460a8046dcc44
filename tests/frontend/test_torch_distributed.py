"""Two processes over gloo: DDP and FSDP over a module of gradc's, DDP over a compiled model with sparse gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import torch_processes as processes  # noqa: E402


@pytest.mark.long(
    "gradc/torch",
    "gradc/module",
    "gradc/runtime",
    "gradc/passes",
    "gradc/analysis",
    "tests/frontend/torch_processes.py",
)
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(processes.worker, (str(tmp_path),), nprocs=processes.PROCESSES)
    found = torch.load(tmp_path / "found.pt")
    alone = processes.dense()
    losses = processes.train(alone, alone.parameters(), False)
    for name in ("ddp", "fsdp"):
        torch.testing.assert_close(found["losses"][name], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["ddp"], alone.state_dict(), rtol=1e-4, atol=1e-5)
    assert [n.removeprefix("_fsdp_wrapped_module.") for n in found["fsdp"]] == list(alone.state_dict())

    bags = processes.Bags()
    losses = processes.train(bags, bags.parameters(), True)
    torch.testing.assert_close(found["losses"]["sparse"], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["sparse"], bags.state_dict(), rtol=1e-4, atol=1e-5)
    sparse = {name for name, layout in found["layouts"].items() if layout == "torch.sparse_coo"}
    assert sparse == {"words.weight", "bags.weight"} and found["share"] > 0
