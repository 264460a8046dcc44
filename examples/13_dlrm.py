"""A recommender (DLRM) of 26 tables, trained by one program a step, beside torch.

Bags have varying lengths, weights per sample, and padding.  Each step looks up all tables, and updates the rows that
its indices name, and no others, where they lie: by Adagrad beside torch's, and by rowwise Adagrad in half of the memory
(f16, rounded up or down by chance).  At last the tables are files, which a process that ends at any moment leaves
as its last whole step did.

    python examples/13_dlrm.py
"""

import importlib.util
import tempfile
import time

import numpy as np

import gradc
from gradc import ops, optim

TABLES, WIDTH, DENSE, BAGS, STEPS, LR = 26, 16, 13, 512, 60, 0.05
ROWS = [int(n) for n in np.geomspace(20, 200_000, TABLES)]  # from days of a week to users
MEAN = [1 if k % 3 else 4 for k in range(TABLES)]  # indices of a bag, on average
PADDING = 0  # also behind the last bag: the memory of a call is planned anew for sizes that it never had
ROOM = [BAGS * mean * 5 // 4 + 64 for mean in MEAN]
NAMES = [f"t{k:02d}" for k in range(TABLES)]


# -- the model ---------------------------------------------------------------------------------------------------------


def loss(tables, top, dense, indices, offsets, weights, clicked):
    wide = {n: ops.cast(table, "f32") for n, table in tables.items()}  # of the rows that are read
    bags = [
        ops.embedding_bag(indices[n], wide[n], offsets[n], weights[n], mode="sum", padding_idx=PADDING) for n in NAMES
    ]
    features = ops.stack([ops.relu(dense @ top["bottom"]), *bags], axis=1)  # [BAGS, 1 + TABLES, WIDTH]
    products = ops.reshape(features @ ops.transpose(features, (0, 2, 1)), (clicked.shape[0], (1 + TABLES) ** 2))
    hidden = ops.relu(products @ top["w1"] + top["b1"])
    return ops.binary_cross_entropy_with_logits(hidden @ top["w2"], clicked)


def types_of(table):
    """Of the arguments; each table has as many rows, and a batch of it as many indices, as a call brings."""
    return {
        "tables": {n: f"{table}[V{n},{WIDTH}]" for n in NAMES},
        "top": {
            "bottom": f"f32[{DENSE},{WIDTH}]",
            "w1": f"f32[{(1 + TABLES) ** 2},32]",
            "b1": "f32[32]",
            "w2": "f32[32,1]",
        },
        "dense": f"f32[B,{DENSE}]",
        "indices": {n: f"i64[N{n}]" for n in NAMES},
        "offsets": dict.fromkeys(NAMES, "i64[B]"),
        "weights": {n: f"f32[N{n}]" for n in NAMES},
        "clicked": "f32[B,1]",
    }


# -- what is learned, and from what ------------------------------------------------------------------------------------

rng = np.random.default_rng(0)
normal = lambda scale, *shape: (scale * rng.standard_normal(shape)).astype(np.float32)
TOP = {
    "bottom": normal(0.3, DENSE, WIDTH),
    "w1": normal(0.03, (1 + TABLES) ** 2, 32),
    "b1": np.zeros(32, np.float32),
    "w2": normal(0.2, 32, 1),
}
START = {n: normal(0.1, rows, WIDTH) for n, rows in zip(NAMES, ROWS, strict=True)}
TASTE = [rng.standard_normal(rows) for rows in ROWS]  # of a row, which decides with others whether somebody clicks


def batch():
    dense = normal(1.0, BAGS, DENSE)
    score, given = dense[:, :4].sum(1), {"indices": {}, "offsets": {}, "weights": {}}
    for n, rows, mean, taste, room in zip(NAMES, ROWS, MEAN, TASTE, ROOM, strict=True):
        lengths = rng.poisson(mean, BAGS)
        i = np.minimum(rng.zipf(1.3, lengths.sum()), rows - 1)  # few rows are in most bags
        i[rng.random(len(i)) < 0.05] = PADDING
        w = rng.uniform(0.5, 1.5, len(i)).astype(np.float32)
        bag = np.repeat(np.arange(BAGS), lengths)
        score += np.bincount(bag, np.where(i == PADDING, 0, w * taste[i]), BAGS)
        rest = (0, room - len(i))
        given["indices"][n], given["weights"][n] = np.pad(i, rest, constant_values=PADDING), np.pad(w, rest)
        given["offsets"][n] = np.cumsum(lengths) - lengths
    return {"dense": dense, "clicked": (score > 0).astype(np.float32)[:, None], **given}


BATCHES = [batch() for _ in range(STEPS)]


# -- training ----------------------------------------------------------------------------------------------------------


def flat(name, tree):
    return {f"{name}.{key}": x for key, x in tree.items()} if isinstance(tree, dict) else {name: tree}


def module_of(optimizer, table):
    """Its backward, and the update of tables and layers, is the program of one call."""
    update = {"tables": optimizer, "top": optim.adam(lr=0.003)}
    return gradc.compile(gradc.trace(loss, **types_of(table)), ["tables", "top"], "cpu", update=update, sparse="tables")


def state_of(optimizer, tables):
    """What is learned and the optimizers keep, by the names of the program's inputs."""
    state = {"state.step": np.array(0)}
    for name, x in flat("tables", tables).items():
        for slot, kept in optimizer.slots(gradc.typeof(x)).items():
            state[f"state.{slot}.{name}"] = np.full(kept.shape, kept.initial, np.float32)
    for name, x in flat("top", {key: x.copy() for key, x in TOP.items()}).items():
        state |= {name: x, f"state.mean.{name}": np.zeros_like(x), f"state.square.{name}": np.zeros_like(x)}
    return {**flat("tables", tables), **state}


def train(module, arrays, batches):
    """(losses, milliseconds of the fastest step)."""
    losses, times = [], []
    for given in batches:
        inputs = {key: x for name, tree in given.items() for key, x in flat(name, tree).items()}
        began = time.perf_counter()
        losses.append(float(module(**arrays, **inputs)["y"]))
        times.append(time.perf_counter() - began)
    return losses, 1e3 * min(times)


def megabytes(arrays):
    return sum(x.nbytes for name, x in arrays.items() if "tables" in name) / 1e6


def show(what, memory, losses, ms):
    # of three digits: further ones differ by processor, whose vectors decide the order of a product's sums
    tenth = STEPS // 6
    first, last = np.mean(losses[:tenth]), np.mean(losses[-tenth:])
    print(f"{what:44} {memory:6.1f} MB   loss {first:.3f} -> {last:.3f}   {ms:6.2f} ms a step", flush=True)


def with_torch():
    """(losses, milliseconds of the fastest step, bytes): nn.EmbeddingBag with sparse gradients, and torch's Adagrad."""
    import torch

    tensor = lambda x: torch.from_numpy(np.array(x))

    def unpadded(given):
        """The batch without what lies behind its last bag."""
        ends = {n: max(len(np.trim_zeros(i, "b")), given["offsets"][n][-1]) for n, i in given["indices"].items()}
        return given | {name: {n: x[: ends[n]] for n, x in given[name].items()} for name in ("indices", "weights")}

    bags = {}
    for n in NAMES:
        bags[n] = torch.nn.EmbeddingBag(*START[n].shape, mode="sum", sparse=True, padding_idx=PADDING)
        bags[n].weight.data = tensor(START[n])
    top = {name: torch.nn.Parameter(tensor(x)) for name, x in TOP.items()}
    adagrad = torch.optim.Adagrad([bag.weight for bag in bags.values()], lr=LR)
    adam = torch.optim.Adam(top.values(), lr=0.003)
    losses, times = [], []
    for given in map(unpadded, BATCHES):
        g = {k: {n: tensor(x) for n, x in v.items()} if isinstance(v, dict) else tensor(v) for k, v in given.items()}
        began = time.perf_counter()
        rows = [bags[n](g["indices"][n], g["offsets"][n], per_sample_weights=g["weights"][n]) for n in NAMES]
        features = torch.stack([torch.relu(g["dense"] @ top["bottom"]), *rows], dim=1)
        hidden = torch.relu((features @ features.transpose(1, 2)).flatten(1) @ top["w1"] + top["b1"])
        value = torch.nn.functional.binary_cross_entropy_with_logits(hidden @ top["w2"], g["clicked"])
        adagrad.zero_grad()
        adam.zero_grad()
        value.backward()
        adagrad.step()
        adam.step()
        losses.append(float(value.detach()))
        times.append(time.perf_counter() - began)
    sums = sum(x.numel() for state in adagrad.state.values() for x in state.values() if x.dim())
    return losses, 1e3 * min(times), 4e-6 * (sums + sum(x.size for x in START.values()))


print(
    f"{TABLES} tables of {ROWS[0]:,} to {ROWS[-1]:,} rows of {WIDTH}, {BAGS} bags of {min(MEAN)} to {max(MEAN)} indices"
)
theirs = None
if importlib.util.find_spec("torch"):
    theirs, ms, memory = with_torch()
    show("torch: EmbeddingBag(sparse=True), Adagrad", memory, theirs, ms)

# torch's Adagrad, to the same losses
adagrad = optim.adagrad(lr=LR)
module = module_of(adagrad, "f32")
arrays = state_of(adagrad, {n: x.copy() for n, x in START.items()})
losses, ms = train(module, arrays, BATCHES)
show("gradc: the same", megabytes(arrays), losses, ms)
if theirs:
    assert np.allclose(losses, theirs, rtol=1e-3), np.abs(np.subtract(losses, theirs)).max()
    print("the same losses as torch's")
changed = [(arrays[f"tables.{n}"] != START[n]).any(1) for n in NAMES]
named = [np.unique(np.concatenate([b["indices"][n] for b in BATCHES])) for n in NAMES]
assert all(set(np.flatnonzero(c)) <= set(i) - {PADDING} for c, i in zip(changed, named, strict=True))
print(f"{sum(map(np.sum, changed)):,} of {sum(ROWS):,} rows changed, all of them named by an index")
program = module.forward.program
inside = sum(end - begin - 1 for begin, end in program.batches)
print(f"{len(program.steps)} steps in {len(program.steps) - inside} launches")

# one number of state a row, and tables of 16 bits that are rounded by chance
rowwise = optim.rowwise_adagrad(lr=LR, stochastic=True)
module = module_of(rowwise, "f16")
arrays = state_of(rowwise, {n: x.astype(np.float16) for n, x in START.items()})
losses, ms = train(module, arrays, BATCHES)
show("gradc: f16, stochastic, rowwise Adagrad", megabytes(arrays), losses, ms)

# the same, in files: a step reads and writes what it names of a table, and whenever a process ends, steps are whole
mapped = []
with tempfile.TemporaryDirectory() as folder:
    start = state_of(rowwise, {n: x.astype(np.float16) for n, x in START.items()})
    gradc.TableFiles.create(folder, start, rows_of=[f"tables.{n}" for n in NAMES]).close()
    for end in (10, 20):
        files = gradc.TableFiles.open(folder)
        for given in BATCHES[files.number : end]:
            with files.step({f"tables.{n}": i for n, i in given["indices"].items()}):
                mapped += train(module, files.arrays, [given])[0]
        files.close()
assert mapped == losses[:20]
print("tables and states in files, closed and opened in the middle, give the same losses")
