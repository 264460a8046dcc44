"""A recommender whose tables lie on several processes: small ones whole, each on one process, the largest by its rows.

Every process looks up what it holds, for the bags of all.  What it finds is a part of a DTensor: of the small tables
Shard(1), its tables' features, of the large one Partial, the sums of its rows; redistribute to Shard(0) gives each
process the features of its own bags, and sends gradients back.  The backward of a lookup updates the rows that it
names, by rowwise Adagrad in the kernel that adds their gradients up, where they lie: tables have no gradients.

    python examples/15_sharded_dlrm.py
"""

import logging
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import gradc.torch
from gradc import ops, optim

PROCESSES, STEPS, BATCH, WIDTH, PADDING = 2, 30, 64, 8, 0
BAG = 5  # indices of a bag at most; shorter ones end in PADDING
SMALL = [3000, 100, 200, 1000, 500, 1800]  # rows of each
LARGE = 20_000
ADAGRAD = optim.rowwise_adagrad(lr=0.05)


# -- lookups, with gradc's ops -----------------------------------------------------------------------------------------


def of_tables(tables, indices):
    """The bags of some whole tables: f32[B, tables, WIDTH] of i64[B, tables, BAG]."""
    bags = [ops.embedding_bag(indices[:, k], table, mode="sum", padding_idx=PADDING) for k, table in enumerate(tables)]
    return ops.stack(bags, axis=1)


def of_rows(rows, indices, first):
    """What some rows of a table, from ``first`` on, give to each bag: f32[B, WIDTH] of i64[B, BAG]."""
    places = indices - first
    held = (places >= 0) & (places < rows.shape[0]) & (indices != PADDING)
    weights = ops.cast(held, "f32")
    return ops.embedding_bag(ops.where(held, places, 0), rows, per_sample_weights=weights, mode="sum")


class Tables(nn.Module):
    """Some tables whole, and some rows of the large one; called with the indices of all bags."""

    def __init__(self, small, rows, first):
        super().__init__()
        self.first = torch.tensor(first)
        sparse = {"options": {"sparse": "tables"}, "update": {"tables": ADAGRAD}}
        self.small = gradc.torch.Module(of_tables, tables=[nn.Parameter(t) for t in small], **sparse)
        sparse = {"options": {"sparse": "rows"}, "update": {"rows": ADAGRAD}}
        self.rows = gradc.torch.Module(of_rows, rows=nn.Parameter(rows), **sparse)

    def forward(self, small, large):
        return self.small(small), self.rows(large, self.first)


# -- the model, and what it learns from --------------------------------------------------------------------------------


def initial():
    torch.manual_seed(0)
    tables = [0.1 * torch.randn(rows, WIDTH) for rows in (*SMALL, LARGE)]
    return tables, nn.Sequential(nn.Linear(WIDTH * len(tables), 32), nn.ReLU(), nn.Linear(32, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, len(SMALL) + 1, BAG)
    for _ in range(STEPS):
        u = torch.rand(shape, generator=generator) ** 3  # few rows are in most bags
        indices = (u * torch.tensor([*SMALL, LARGE]).view(-1, 1)).long()
        length = torch.randint(0, BAG + 1, shape[:2], generator=generator)
        indices[torch.arange(BAG) >= length.unsqueeze(-1)] = PADDING
        yield indices, (indices.sum((1, 2)) % 3 == 0).float().unsqueeze(1)


def train(features, head, call, mine=slice(None), processes=1):
    """The loss of each step; gradients of the head, which every process has, are added up."""
    optimizer, losses = torch.optim.Adam(head.parameters(), lr=0.01), []
    for indices, clicked in batches():
        small, large = features(indices[mine])
        x = torch.cat([small.flatten(1), large], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(call(x), clicked[mine]) / processes
        optimizer.zero_grad()
        loss.backward()  # updates the tables
        loss = loss.detach()
        if processes > 1:
            for total in (*(p.grad for p in head.parameters()), loss):
                distributed.all_reduce(total)
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses)


# -- several processes -------------------------------------------------------------------------------------------------


def worker(rank, folder):
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gloo has no all-to-all: it gathers
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    tables, head = initial()
    large = distribute_tensor(tables[-1], mesh, [Shard(0)])
    each = len(SMALL) // PROCESSES
    own = slice(rank * each, (rank + 1) * each)
    held = Tables(tables[own], large.to_local(), rank * LARGE // PROCESSES)

    def features(indices):
        everyones = DTensor.from_local(indices, mesh, [Shard(0)]).full_tensor()
        small, partial = held(everyones[:, own], everyones[:, -1])
        parts = (DTensor.from_local(small, mesh, [Shard(1)]), DTensor.from_local(partial, mesh, [Partial()]))
        return [part.redistribute(placements=[Shard(0)]).to_local() for part in parts]

    mine = slice(rank * BATCH // PROCESSES, (rank + 1) * BATCH // PROCESSES)
    losses = train(features, head, torch.compile(head, backend="gradc"), mine, PROCESSES)
    rows = [sum(p.shape[0] for p in module.parameters()) for module in (held.small, held.rows)]
    print(
        f"process {rank}: {rows[0]:,} of {sum(SMALL):,} rows of small tables, {rows[1]:,} of {LARGE:,} of the large one"
    )
    whole = large.full_tensor()  # every process takes part
    torch.save(list(held.small.parameters()), f"{folder}/small{rank}.pt")
    if rank == 0:
        torch.save({"losses": losses, "large": whole, "head": head.state_dict()}, f"{folder}/found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (folder,), nprocs=PROCESSES)
        found = torch.load(Path(folder) / "found.pt")
        small = [t for rank in range(PROCESSES) for t in torch.load(Path(folder) / f"small{rank}.pt")]
    tables, head = initial()
    alone = Tables(tables[:-1], tables[-1], 0)
    losses = train(lambda indices: alone(indices[:, :-1], indices[:, -1]), head, head)
    for step in range(0, STEPS, 6):
        print(f"step {step:3}   {PROCESSES} processes {found['losses'][step]:.5f}   one process {losses[step]:.5f}")
    torch.testing.assert_close(found["losses"], losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small, list(alone.small.parameters()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["large"], alone.rows.rows.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["head"], head.state_dict(), rtol=1e-3, atol=1e-4)
    print("the same losses, the same tables")
