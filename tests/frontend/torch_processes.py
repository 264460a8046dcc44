"""What two processes of torch.distributed do in tests, in a module that processes which are spawned import."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import gradc.torch
from gradc import ops

ROWS, STEPS, PROCESSES = 8, 4, 2


def mlp(x: Any, layers: Any) -> Any:
    for layer in layers:
        x = ops.tanh(ops.linear(x, layer["w"], layer["b"]))
    return x


def dense(target: str = "numpy") -> nn.Module:
    torch.manual_seed(0)
    layers = [{"w": torch.randn(n, m), "b": torch.randn(n)} for m, n in ((4, 6), (6, 2))]
    return gradc.torch.Module(mlp, layers=layers, options={"target": target})


class Bags(nn.Module):
    """Sparse tables, and dense layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 4, sparse=True)
        self.bags = nn.EmbeddingBag(11, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(tokens).mean(1) + self.bags(tokens)))


def train(call: Any, parameters: Any, tokens: bool, mine: slice = slice(None)) -> list[torch.Tensor]:
    """The losses of some steps of SGD on the rows that are this process's."""
    generator = torch.Generator().manual_seed(1)
    optimizer, losses = torch.optim.SGD(list(parameters), lr=0.3), []
    for _ in range(STEPS):
        x = (
            torch.randint(0, 11, (ROWS, 3), generator=generator)
            if tokens
            else torch.randn(ROWS, 4, generator=generator)
        )
        optimizer.zero_grad()
        loss = (call(x[mine]) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found = trained(slice(rank * ROWS // PROCESSES, (rank + 1) * ROWS // PROCESSES))
    gc.collect()  # what wraps modules waits for its process group when it is freed
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def trained(mine: slice) -> dict[str, Any]:
    """What DDP over a gradc.torch.Module, FSDP over one, and DDP over a compiled model of sparse tables lead to."""
    ddp = DistributedDataParallel(dense())
    fsdp = FullyShardedDataParallel(dense(), use_orig_params=True, device_id=torch.device("cpu"))
    model = Bags()
    compiled = torch.compile(model, backend=gradc.torch.backend, options={"target": "numpy"})
    losses = {
        "ddp": train(ddp, ddp.parameters(), False, mine),
        "fsdp": train(fsdp, fsdp.parameters(), False, mine),
        "sparse": train(DistributedDataParallel(compiled), model.parameters(), True, mine),
    }
    for each in losses.values():
        for loss in each:
            distributed.all_reduce(loss)
            loss /= PROCESSES
    return {
        "losses": losses,
        "ddp": ddp.module.state_dict(),
        "fsdp": [n for n, _ in fsdp.named_parameters()],
        "sparse": model.state_dict(),
        "layouts": {n: str(p.grad.layout) for n, p in model.named_parameters() if p.grad is not None},
        "share": gradc.torch.report().share,
    }
