"""Data parallel training of a model that gradc runs: torch's DistributedDataParallel over two processes.

Each process takes half of a batch; gradients are averaged by torch while the rest of the backward runs.  The losses are
those of one process with the whole batch.

    python examples/06_ddp.py
"""

import copy
import gc
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import gradc.torch

PROCESSES, STEPS, ROWS = 2, 8, 16


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 50, (ROWS, 4), generator=generator)
        yield tokens, tokens.sum(1) % 3


def train(call, parameters, mine=slice(None)):
    """The losses of some steps on the rows that are this process's."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5, momentum=0.9), []
    for tokens, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(tokens[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def trained(rank):
    """The losses of both processes, and what the model has become."""
    network = model()
    compiled = DistributedDataParallel(torch.compile(network, backend="gradc"))  # Dynamo makes one graph per bucket
    mine = slice(rank * ROWS // PROCESSES, (rank + 1) * ROWS // PROCESSES)
    losses = train(compiled, network.parameters(), mine)
    distributed.all_reduce(losses)
    return {"losses": losses / PROCESSES, "state": copy.deepcopy(network.state_dict())}


def worker(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found = trained(rank)
    if rank == 0:
        print(gradc.torch.report())
        torch.save(found, f"{folder}/found.pt")
    gc.collect()  # DDP first: a group of processes that is freed with it can wait for itself
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (folder,), nprocs=PROCESSES)
        found = torch.load(Path(folder) / "found.pt")
    alone = model()
    losses = train(alone, alone.parameters())
    print("two processes:", " ".join(f"{x:.4f}" for x in found["losses"]))
    print("one process:  ", " ".join(f"{x:.4f}" for x in losses))
    torch.testing.assert_close(found["losses"], losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["state"], alone.state_dict(), rtol=1e-3, atol=1e-5)
    print("the same losses, the same parameters")
