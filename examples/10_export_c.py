"""The demo's model, its backward and its optimiser as C: ten steps of training in C and in Python, to the same bits.

``module.export`` writes each module as a folder of C with a header; 10_export_c.c calls both.  Needs gcc and make.

    python examples/10_export_c.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from gradc.demo.corpus import Corpus, load
from gradc.demo.model import BETA1, BETA2, CONTEXT, VARIANTS
from gradc.demo.ngram import Unigram
from gradc.demo.train import trainee

STEPS, BATCH, WORDS = 10, 64, 500
if not (shutil.which("gcc") and shutil.which("make")):
    sys.exit("this example builds C with gcc and make, and they are not here")

text = load()
frequent = lambda part: np.where(part[:20_000] < WORDS, part[:20_000], 0)
text = Corpus(text.words[:WORDS], frequent(text.train), frequent(text.held_out))
contexts, targets = text.examples("train", CONTEXT)
model = trainee(VARIANTS[-1], Unigram(text.train, WORDS).probability(np.arange(WORDS)))
chosen = np.random.default_rng(0).permutation(len(targets))[: STEPS * BATCH].reshape(STEPS, BATCH)
rates = [0.001 * (step + 1) for step in range(STEPS)]

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "data").mkdir()

    def write(file, array):
        np.ascontiguousarray(array).tofile(folder / "data" / f"{file}.bin")

    # What C is given: the batches, the rates, and where the parameters begin.
    write("tokens", contexts[chosen])
    write("targets", targets[chosen])
    corrections = [(1 / (1 - BETA1**n), 1 / (1 - BETA2**n)) for n in range(1, STEPS + 1)]
    schedule = [[*(r * part for part in model.rates.values()), *c] for r, c in zip(rates, corrections, strict=True)]
    write("schedule", np.array(schedule, np.float32))
    for key, value in {**model.constants, **model.values}.items():
        write(key, value)

    # Both modules as C, built; then the program that calls them.
    for module in (model.module, model.optimiser):
        where = module.export(folder / module.graph.name)
        subprocess.run(["make", "-s", "-j2", "CC=gcc"], cwd=where, check=True)
        print(f"{where.name}: {', '.join(sorted(path.name for path in where.iterdir() if path.suffix != '.o'))}")
    parts = [path for path in folder.rglob("*.o") if path.name != "main.o"]
    headers = [f"-I{folder / m.graph.name}" for m in (model.module, model.optimiser)]
    source = Path(__file__).with_suffix(".c")
    warned = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        ["gcc", "-O2", *warned, *headers, source, *parts, "-pthread", "-lm", "-o", folder / "train"], check=True
    )
    subprocess.run([folder / "train", folder / "data", *map(str, (STEPS, BATCH, WORDS))], check=True)

    # The same in Python.
    for number, (batch, rate) in enumerate(zip(chosen, rates, strict=True), 1):
        model.step(contexts[batch], targets[batch], number, rate)
    print(f"in Python: loss {model.losses[0]:.6f} at step 1, {model.losses[-1]:.6f} at step {STEPS}")
    for key, value in model.values.items():
        trained = np.fromfile(folder / "data" / f"{key}.after.bin", value.dtype).reshape(value.shape)
        assert trained.tobytes() == value.tobytes(), key
    print(f"all {len(model.values)} parameters have the same bits")
