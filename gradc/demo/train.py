"""The demo: a small language model with a quantized table is differentiated, compiled, inspected, trained and measured.

Three models that differ only in their embedding tables are trained on the same batches of the text that comes with
gradc.  All float arithmetic is done by gradc's kernels (forward, backward, optimiser); NumPy shuffles and gathers word
indices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..api import compile
from ..autodiff import differentiate
from ..inspect.dump import dump_module
from ..inspect.explain import reduction_table
from ..inspect.plot import plot
from ..ir.dims import assuming
from ..ir.graph import Graph
from ..ir.node import Node
from ..ir.walk import topological
from ..module.module import Module
from ..passes.graph.decompose import decompose
from ..passes.graph.fold import fold
from ..passes.graph.simplify import simplify
from ..process import files
from .corpus import Corpus, load
from .model import BETA1, BETA2, CONTEXT, HIDDEN, VARIANTS, WIDTH, Arrays, Variant, adam_graph, donated, initial_values
from .ngram import Trigram, Unigram, perplexity
from .report import Report

PEAK_RATE = 0.01
CLEARLY = 0.7  # the fraction of the unigram's perplexity that every trained model must stay below
QUICK_STEPS = 60
# the fraction of the initial loss that every model of a quick run must stay below; it reaches 0.59 to 0.62, and the
# order of batches changes that by 0.002
LEARNED = 0.8
ONE = np.float32(1)


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    :param every: steps between two rows of the printed table.
    :param warm_up: steps until the learning rate reaches its peak.
    :param slice: the maximum number of words of text and of vocabulary; None: all.
    """

    steps: int
    batch: int = 512
    evaluation_batch: int = 1024
    every: int = 25
    warm_up: int = 30
    slice: tuple[int, int] | None = None


def main(steps: int = 500, quick: bool = False, out: str | None = None) -> int:
    """Runs the demo, printing a report, and writes the report and all compilation stages to a folder.

    :param steps: training steps, each on 512 contexts.  :param quick: a few steps on a slice of the text, in seconds.
    :param out: the folder; ``gradc-demo`` by default.
    :returns: 0, or 1 if a trained model is not clearly better than the unigram or, in a quick run, than before
        training.
    """
    passed, _ = run(steps, quick, out)
    return 0 if passed else 1


def run(steps: int, quick: bool, out: str | None, *, quiet: bool = False) -> tuple[bool, Report]:
    """:func:`main`, with the report; ``quiet`` prints nothing."""
    began = time.perf_counter()
    folder = files.make_folder(out or "gradc-demo")
    plan = Plan(min(steps, QUICK_STEPS), 128, 512, 10, 10, (20_000, 1000)) if quick else Plan(steps)
    report = Report("gradc demo: a quantized language model", quiet)
    report.say(
        f"A model that guesses the next word from the {CONTEXT} before it is written once with gradc's operations,"
        " differentiated, optimised, compiled to C and trained by those kernels alone; three times side by side, with"
        " its embedding table held in three ways:"
    )
    report.code("\n".join(f"  {v.name:<15} {v.about}" for v in VARIANTS))
    text = read_text(report, plan)
    trainees = compile_all(report, text)
    quantized = trainees[-1]
    show_derivative(report, quantized, folder)
    show_choices(report, trainees, plan)
    report.heading("The compiled module")
    report.say(
        "One line per kernel: bytes moved, share of them, how sums across rows are made, and the source line it came"
        " from."
    )
    report.code(str(quantized.module))
    dump(report, trainees, folder)
    start = on_training_text(trainees, text, plan) if quick else []
    curve = train(report, trainees, text, plan)
    passed, baselines = measure(report, trainees, text, plan, start)
    levels = {f"{name}, held out": float(np.log(value)) for name, value in baselines.items()}
    report.picture("losses.svg", plot(curve, "step", "running loss, nats per word", levels=levels).svg())
    report.say(
        f"Total: {time.perf_counter() - began:.0f} s.  This report: {folder / 'report.html'} and"
        f" {folder / 'report.md'}."
    )
    report.write(folder)
    return passed, report


# -- the text ----------------------------------------------------------------------------------------------------------


def read_text(report: Report, plan: Plan) -> Corpus:
    report.heading("The text")
    began = time.perf_counter()
    text = load()
    if plan.slice is not None:
        tokens, words = plan.slice
        cut = lambda part, most: np.where(part[:most] < words, part[:most], 0)
        text = Corpus(text.words[:words], cut(text.train, tokens), cut(text.held_out, tokens // 5))
    report.say(
        f"{len(text.train) + len(text.held_out):,} words of gradc's own documentation, docstrings and comments, read in"
        f" {time.perf_counter() - began:.1f} s: {len(text.train):,} to learn from, {len(text.held_out):,} of other"
        f" documents held out.  The vocabulary is the {len(text.words):,} words seen twice or more."
    )
    return text


# -- compiling ---------------------------------------------------------------------------------------------------------


@dataclass
class Trainee:
    """One variant with its modules, its current parameters and its training time.

    :param values: its parameters, updated in place.
    :param rates: each parameter's learning rate as a fraction of the common one.
    """

    variant: Variant
    module: Module
    optimiser: Module
    constants: Arrays
    values: Arrays
    rates: dict[str, float]
    means: Arrays = field(init=False)
    squares: Arrays = field(init=False)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.means = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.squares = {name: np.zeros_like(value) for name, value in self.values.items()}

    def step(self, tokens: NDArray[np.int64], targets: NDArray[np.int64], number: int, rate: float) -> None:
        """One training step: forward, backward, Adam; ``number`` counts from 1."""
        began = time.perf_counter()
        loss, residuals = self.module.forward(tokens=tokens, targets=targets, **self.constants, **self.values)
        gradients = self.module.backward(residuals, ONE)
        after = self.optimiser(
            parameters=self.values,
            gradients=gradients,
            mean=self.means,
            square=self.squares,
            rate={name: rate * part for name, part in self.rates.items()},
            unbias_mean=1 / (1 - BETA1**number),
            unbias_square=1 / (1 - BETA2**number),
        )
        for kept, name in ((self.values, "parameters"), (self.means, "mean"), (self.squares, "square")):
            kept.update({key: after[f"{name}.{key}"] for key in kept})  # the same arrays, because they were donated
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss))

    def loss(self, tokens: NDArray[np.int64], targets: NDArray[np.int64], batch: int) -> float:
        """The mean loss over all examples, in batches of another size than in training, with the same module."""
        total = 0.0
        for first in range(0, len(targets), batch):
            part = slice(first, first + batch)
            total += float(
                self.module(tokens=tokens[part], targets=targets[part], **self.constants, **self.values)
            ) * len(targets[part])
        return total / len(targets)


def trainee(variant: Variant, unigram: NDArray[np.float64]) -> Trainee:
    """The variant, compiled, with initial values."""
    graph = variant.graph(len(unigram))
    learns = variant.learns(graph)
    optimiser = adam_graph(graph, learns)
    start = initial_values(unigram)
    rates = dict.fromkeys(learns, 1.0)
    if "scale" in rates:
        rates["scale"] = variant.scale_rate / PEAK_RATE * float(start["scale"].mean())
    return Trainee(
        variant,
        compile(graph, wrt=learns, target="cpu"),
        compile(optimiser, target="cpu", donate=donated(optimiser)),
        {name: start[name] for name in variant.constants},
        {name: start[name] for name in learns},
        rates,
    )


def compile_all(report: Report, text: Corpus) -> list[Trainee]:
    report.heading("The model, forward")
    vocabulary = len(text.words)
    report.say(
        f"As it was traced, with its table frozen in int8 (B is the batch: one module serves any; {vocabulary} words,"
        f" {WIDTH} numbers each, {HIDDEN} hidden):"
    )
    report.code(str(VARIANTS[-1].graph(vocabulary)))
    report.progress("compiling three models and their optimisers ...")
    began = time.perf_counter()
    unigram = Unigram(text.train, vocabulary).probability(np.arange(vocabulary))
    trainees = [trainee(variant, unigram) for variant in VARIANTS]
    report.say(
        "Compiled three models, each forward and backward, and three optimisers in"
        f" {time.perf_counter() - began:.1f} s."
    )
    return trainees


# -- looking -----------------------------------------------------------------------------------------------------------


def show_derivative(report: Report, quantized: Trainee, folder: Path) -> None:
    """Shows the gradient of the scales as autodiff gives it, and after sink_dequant."""
    plain = derivative(quantized.module)
    sunk = quantized.module.stages["tidy.fold"].result
    assert isinstance(sunk, Graph)
    files.write(folder / "backward-before.gir", f"{plain}\n")
    files.write(folder / "backward-after.gir", f"{sunk}\n")
    vocabulary = quantized.values["scale"].shape[0]
    report.heading("The gradient of the scales, before and after sink_dequant")
    report.say(
        "Of the derivative, the part that nothing but the scales' gradient needs.  As calculus gives it, the gradients"
        f" of all {CONTEXT}*B looked-up rows are first added up in a table of {vocabulary} x {WIDTH} floats, most of"
        " them zero, only to be multiplied by the codes and summed again:"
    )
    report.code("\n".join(only_for(plain, "d.scale")))
    report.say(
        "After sink_dequant (its rule for gathers works before differentiation, in the pass push_gathers; its rule for"
        " sums after):"
    )
    report.code("\n".join(only_for(sunk, "d.scale")))
    gone, left = dense(plain, vocabulary), dense(sunk, vocabulary)
    report.say(
        "What changed: each row's gradient meets its codes at once and only sums of one number per row are scattered,"
        f" so that of the {len(gone)} f32[{vocabulary},{WIDTH}] values of before ({', '.join(gone)}), the dequantized"
        f" table of the forward among them, {'none is' if not left else f'{len(left)} are'} left.  Both derivatives"
        f" whole: {folder / 'backward-before.gir'}, {folder / 'backward-after.gir'}."
    )


def derivative(module: Module) -> Graph:
    """The joint graph without the passes push_gathers and sink_dequant."""
    with assuming(module.graph.assumptions):
        return fold(simplify(decompose(differentiate(module.graph, module.wrt))))


def only_for(graph: Graph, output: str) -> list[str]:
    """The lines of the values on which ``output`` depends and no other output does."""
    outputs = dict(graph.outputs)
    others = set(topological([node for name, node in graph.outputs if name != output]))
    names = graph.value_names
    mine = {f"{names[node]}:" for node in topological([outputs[output]]) if node not in others}
    return [line for line in str(graph).splitlines() if line.split(maxsplit=1)[0] in mine] + [
        f"  return {output}={names[outputs[output]]}"
    ]


def dense(graph: Graph, vocabulary: int) -> list[str]:
    """The ops whose results have a float for each element of the table."""
    wide = lambda node: node.op.name != "input" and node.dtype.is_float and node.shape == (vocabulary, WIDTH)
    results = {node for _, node in graph.outputs}
    made: list[Node] = [node for node in graph.nodes if wide(node) and node not in results]
    return [node.op.name for node in made]


def show_choices(report: Report, trainees: list[Trainee], plan: Plan) -> None:
    report.heading("How rows of one word are added up: choose_reduction's table")
    report.say(
        f"Predicted for a batch of {plan.batch}, that is {plan.batch * CONTEXT} looked-up rows; the arrow is the"
        " choice."
    )
    for each in (trainees[0], trainees[-1]):
        wanted = f"d.{each.variant.table[0] if not each.constants else 'scale'}"
        report.code(
            "\n".join([f"{each.variant.name}: the gradient {wanted}", *table_of(each.module, wanted, plan.batch)])
        )


def table_of(module: Module, buffer: str, batch: int) -> list[str]:
    """The lines of explain() for one combine."""
    lines = iter(reduction_table(module.backward.program, {"B": batch}))
    found: list[str] = []
    for line in lines:
        if line.startswith("  combine"):
            inside = line.split()[2] == buffer
        if inside:
            found.append(line)
    return found


def dump(report: Report, trainees: list[Trainee], folder: Path) -> None:
    """Writes every stage of every module, as GRADC_DUMP does."""
    report.heading("Every stage, to read")
    for each in trainees:
        own = folder / each.variant.name.replace(" ", "-")
        files.make_folder(own / "kernels")
        for stale in (*own.glob("*.gir"), *(own / "kernels").glob("*.c")):
            stale.unlink()
        for number, stage in enumerate(each.module.stages):
            files.write(own / f"{number:02d}-{stage.name}.gir", f"{stage}\n")
        dump_module(each.module, own)
    report.say(
        f"The dump lies in {folder}: a folder per model with the IR after each of its {len(trainees[-1].module.stages)}"
        " stages, the C of each kernel and the whole explanation."
    )
    report.link("Begin with", folder, f"{trainees[-1].variant.name.replace(' ', '-')}/index.html")


# -- training ----------------------------------------------------------------------------------------------------------


def batches(examples: int, plan: Plan, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """The examples of each step: repeated shuffled passes over all examples."""
    order = np.random.default_rng(seed).permutation(examples)
    for step in range(plan.steps):
        yield order[np.arange(step * plan.batch, (step + 1) * plan.batch) % examples]


def train(report: Report, trainees: list[Trainee], text: Corpus, plan: Plan) -> dict[str, list[tuple[float, float]]]:
    """Trains all three on the same batches; returns their running losses by step."""
    report.heading("Training")
    report.say(
        f"{plan.steps} steps of {plan.batch} contexts, the same for all three; running loss in nats per word (the mean"
        f" of the last {plan.every} steps)."
    )
    contexts, targets = text.examples("train", CONTEXT)
    table = report.table("step", *(each.variant.name for each in trainees))
    curve: dict[str, list[tuple[float, float]]] = {each.variant.name: [] for each in trainees}
    for number, chosen in enumerate(batches(len(targets), plan), 1):
        rate = PEAK_RATE * min(1.0, number / plan.warm_up) * (1 - (number - 1) / plan.steps)
        for each in trainees:
            each.step(contexts[chosen], targets[chosen], number, rate)
        if number % plan.every == 0 or number == plan.steps:
            running = [float(np.mean(each.losses[-plan.every :])) for each in trainees]
            for each, loss in zip(trainees, running, strict=True):
                curve[each.variant.name].append((number, loss))
            table.add(str(number), *(f"{loss:.3f}" for loss in running))
    table.add("ms per step", *(f"{1e3 * np.median(each.seconds):.1f}" for each in trainees))
    return curve


def on_training_text(trainees: list[Trainee], text: Corpus, plan: Plan) -> list[float]:
    """Each model's mean loss on the training text."""
    contexts, targets = text.examples("train", CONTEXT)
    return [each.loss(contexts, targets, plan.evaluation_batch) for each in trainees]


def measure(
    report: Report, trainees: list[Trainee], text: Corpus, plan: Plan, start: list[float]
) -> tuple[bool, dict[str, float]]:
    """Measures perplexities on the held-out documents; (whether every model learned, the baselines' perplexities).

    :param start: the losses from :func:`on_training_text` before training; a quick run is compared with them, any other
        run with the unigram.
    """
    report.heading("On documents never seen")
    contexts, targets = text.examples("held_out", CONTEXT)
    size = len(text.words)
    unigram = perplexity(Unigram(text.train, size).probability(targets))
    baselines = {
        "unigram": unigram,
        "trigram": perplexity(Trigram(text.train, size).probability(contexts[:, -2], contexts[:, -1], targets)),
    }
    reached = {
        each.variant.name: float(np.exp(each.loss(contexts, targets, plan.evaluation_batch))) for each in trainees
    }
    report.say(
        "Perplexity: between how many equally likely words a model hesitates; less is better.  The unigram and the"
        " trigram (which backs off) count words."
    )
    table = report.table("model", "perplexity", "of the unigram")
    for name, value in {**baselines, **reached}.items():
        table.add(name, f"{value:.1f}", f"{value / unigram:.2f}")
    if plan.slice is not None:
        parts = [after / before for before, after in zip(start, on_training_text(trainees, text, plan), strict=True)]
        enough, passed = plan.steps >= QUICK_STEPS, all(part < LEARNED for part in parts)
        told = (
            f"after {plan.steps} steps the losses on the text learned from are"
            f" {', '.join(f'{part:.2f}' for part in parts)} of what they were"
        )
        asked = f"{LEARNED} at most was asked for" if enough else f"{QUICK_STEPS} steps are judged, fewer are not"
        report.say(
            f"Verdict: {'' if passed or not enough else 'FAILED: '}{told} ({asked}; perplexities need the whole run)."
        )
        return passed or not enough, baselines
    worst = max(reached, key=lambda name: reached[name] if np.isfinite(reached[name]) else np.inf)
    passed = all(value < CLEARLY * unigram for value in reached.values())
    against = lambda name: f"{100 * (reached[name] / reached[VARIANTS[0].name] - 1):+.1f} %"
    report.say(
        f"Verdict: every trained model clearly beats the unigram (the worst, {worst}, has"
        f" {reached[worst] / unigram:.2f} of its perplexity; {CLEARLY} was asked for); against the float table, one"
        f" rounded to int8 in every step while it is learned costs {against(VARIANTS[1].name)} of perplexity, and int8"
        f" codes that never change, with learned scales, {against(VARIANTS[2].name)}."
        if passed
        else (
            f"Verdict: FAILED: {worst} has {reached[worst]:.1f}, and the unigram's {unigram:.1f} times {CLEARLY} was to"
            " be beaten."
        )
    )
    return passed, baselines
