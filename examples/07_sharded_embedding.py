"""A table too large for one process: its rows lie sharded over two, gradc computes each shard's lookups and gradients.

The table is a DTensor, Shard(0), as torch.distributed.tensor has it: process r holds the r-th part of the rows.  Each
process looks up, for the tokens of all, the rows that are its own; the partial sums are reduced and scattered, so that
each process gets the bags of its own part of the batch.  Collectives and their gradients are torch's; what runs on each
shard is compiled by torch.compile(backend="gradc").

    python examples/07_sharded_embedding.py
"""

import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import gradc.torch

PROCESSES, STEPS, BATCH, BAG, ROWS, WIDTH = 2, 6, 16, 5, 1000, 8


def partial_bags(tokens, shard, first):
    """The sums of those rows of each bag that the shard, whose first row is ``first``, holds: float32 [bags, width]."""
    places = tokens - first
    held = (places >= 0) & (places < shard.shape[0])
    rows = nn.functional.embedding(torch.where(held, places, 0), shard)
    return (rows * held.unsqueeze(-1)).sum(1)


class ShardedBags(nn.Module):
    """An embedding bag (mode "sum") whose table is sharded by rows."""

    def __init__(self, table, mesh):
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(distribute_tensor(table, mesh, [Shard(0)]))
        self.lookup = torch.compile(partial_bags, backend="gradc")

    def forward(self, tokens):
        everyones = DTensor.from_local(tokens, self.mesh, [Shard(0)]).full_tensor()
        shard = self.weight.to_local()
        first = torch.tensor(self.mesh.get_local_rank() * ROWS // PROCESSES)
        partial = DTensor.from_local(self.lookup(everyones, shard, first), self.mesh, [Partial()])
        return partial.redistribute(placements=[Shard(0)]).to_local()


def initial():
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, ROWS, (BATCH, BAG), generator=generator)
        yield tokens, (tokens.sum(1, keepdim=True) % 2).float()


def train(bags, head, parameters, mine=slice(None), processes=1):
    """The losses of some steps; the gradients of the head, which every process has, are added up."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    for tokens, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(head(bags(tokens[mine])), labels[mine]) / processes
        loss.backward()
        if processes > 1:
            for p in (*head.parameters(), loss):
                distributed.all_reduce(loss.detach() if p is loss else p.grad)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def worker(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    table, head = initial()
    bags = ShardedBags(table, init_device_mesh("cpu", (PROCESSES,)))
    call = torch.compile(head, backend="gradc")
    mine = slice(rank * BATCH // PROCESSES, (rank + 1) * BATCH // PROCESSES)
    losses = train(bags, call, [*bags.parameters(), *head.parameters()], mine, PROCESSES)
    print(f"process {rank}: {bags.weight.to_local().shape[0]} of {ROWS} rows")
    whole = bags.weight.full_tensor().detach()  # every process takes part
    if rank == 0:
        print(gradc.torch.report())
        torch.save({"losses": losses, "table": whole, "head": head.state_dict()}, f"{folder}/found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (folder,), nprocs=PROCESSES)
        found = torch.load(Path(folder) / "found.pt")
    table, head = initial()
    alone = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum")
    losses = train(alone, head, [alone.weight, *head.parameters()])
    print("two processes:", " ".join(f"{x:.4f}" for x in found["losses"]))
    print("one process:  ", " ".join(f"{x:.4f}" for x in losses))
    torch.testing.assert_close(found["losses"], losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["table"], alone.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["head"], head.state_dict(), rtol=1e-4, atol=1e-5)
    print("the same losses, the same table")
