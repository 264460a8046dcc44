"""``python -m benchmarks.models``: well-known models, a training step each, through ``torch.compile(backend="gradc")``
beside eager mode and inductor.

For each model and engine, in a process of its own with a limit of its own: the share of its ops that gradc runs and why
it does not run the others; value and every parameter's gradient against eager mode in f64, in f64 and in f32; seconds
of a cold compilation; megabytes of a warm step (``peak_MB``: the high-water mark of resident memory that is reset
before it, less what is resident then) and of the process with its compilation (``process_MB``: ru_maxrss after the
steps, less ru_maxrss before the first; compilers are processes of their own and not in it).  In one process more the
engines take turns at warm steps (``steps_ms``: processor time, so that a machine need not be quiet; ``--steps`` is of
these alone).  Writes a table and one JSON, a row as soon as it is known: called again it goes on where it ended.
Nothing here is a test.  Needs ``gradc[torch]``, transformers and timm.  ``python -m benchmarks.model_curves`` trains
some of them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .__main__ import processor, words_of
from .alternated import least
from .worker import peak

RESULTS = Path(__file__).parent / "results"
LIMIT = 300
"""Seconds that one model may take with one engine."""
ROUNDS, SECONDS = 7, 0.1
"""Of the turns that engines take, and processor seconds of a turn: two steps at least."""
THREADS = 1
"""Of every engine: threads that wait for each other a few times a millisecond measure what else the machine does."""
ENGINES = ("gradc", "inductor")
ALL_ENGINES = ("eager", *ENGINES)
STEPS, FASTER = "steps", "the faster of both"
"""What is measured of all engines together, and what eager mode and inductor are called then."""
F64_ERROR, F32_FACTOR, F32_EPSILON = 1e-8, 4.0, 2.0**-23
SMALL = 1e-4
"""A tensor's error is relative to its largest element, or to this part of the largest element of any gradient: where a
gradient is zero but for rounding (a bias before a batch norm) there is nothing to be relative to."""

Tensors = dict[str, Any]


# -- one model, in this process ----------------------------------------------------------------------------------------


def step(call: Callable[..., Any], model: Any, batch: Any) -> Tensors:
    """A training step: the loss under ``""``, and the gradients by name."""
    model.zero_grad(set_to_none=True)
    loss = call(*batch)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"": loss.detach(), **found}


def errors(found: Tensors, wanted: Tensors) -> tuple[float, float, str]:
    """The error of the loss, the worst of a gradient, and whose that is."""
    if found.keys() != wanted.keys():
        return float("inf"), float("inf"), f"gradients of other parameters: {sorted(found.keys() ^ wanted.keys())[:3]}"
    largest = max((float(w.abs().max()) for name, w in wanted.items() if name and w.numel()), default=0.0)
    each = {}
    for name, want in wanted.items():
        if want.numel():
            scale = max(float(want.abs().max()), SMALL * largest if name else 0.0, 1e-300)
            difference = float((found[name].double() - want.double()).abs().max())
            each[name] = difference / scale if difference == difference else float("inf")
    value = each.pop("")
    worst = max(each, key=each.__getitem__, default="")
    return value, each.get(worst, 0.0), worst


def measure(name: str, engine: str) -> None:
    """Print what is known of one model with one engine as lines of JSON, each phase as it is done.

    Running statistics move with each step of training, so every step that is compared is that of a fresh copy.  Memory
    and times come first: what is compared with them afterwards would count in the process's high-water mark.
    """
    import torch

    import gradc.torch

    from .model_list import cast

    def fresh(backend: Any, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
        torch._dynamo.reset()
        return *_compiled(model, backend, dtype), cast(batch, dtype)

    model, batch = _built(name)
    call, twin, _ = fresh(_backend(engine), torch.float32)
    most, began = _most_resident(), time.perf_counter()
    found = step(call, twin, batch)
    found = {name: value.clone() for name, value in found.items()}
    compiled = {} if engine == "eager" else {"compile_s": time.perf_counter() - began}
    if engine == "gradc":
        _say(coverage=_coverage(gradc.torch.report()))
    _say(**{engine: compiled})
    _say(**{engine: {**compiled, "peak_MB": _peak(call, twin, batch), "process_MB": _most_resident() - most}})
    truth = step(*fresh(_wide(lambda gm, inputs: gm.forward, exact=True), torch.float64))
    value, gradient, worst = errors(found, truth)
    _say(**{f"{engine}_f32": {"value": value, "gradient": gradient, "worst": worst}})
    if engine == "gradc":
        value, gradient, worst = errors(step(*fresh(_wide(gradc.torch.backend), torch.float64)), truth)
        _say(gradc_f64={"value": value, "gradient": gradient, "worst": worst})
    _say(parameters=sum(p.numel() for p in model.parameters()))


def take_turns(name: str, engines: Sequence[str]) -> None:
    """Print what a warm step of a model takes with each engine, in milliseconds, as a line of JSON."""
    import torch

    model, batch = _built(name)
    pairs = {engine: _compiled(model, _backend(engine), torch.float32) for engine in engines}
    seconds = least({e: functools.partial(step, *pair, batch) for e, pair in pairs.items()}, ROUNDS, SECONDS)
    _say(steps_ms={engine: each * 1e3 for engine, each in seconds.items()})


def _built(name: str) -> tuple[Any, Any]:
    """A model and its batch, with what torch is told before."""
    import torch

    from .model_list import MODELS

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch._dynamo.config.allow_rnn = True  # else Dynamo leaves torch.nn's recurrent layers, and what calls them, alone
    model, batch = MODELS[name].build()
    return model, batch


def _backend(engine: str) -> Any:
    import gradc.torch

    return {"eager": None, "gradc": gradc.torch.backend}.get(engine, engine)


def _compiled(model: Any, backend: Any, dtype: Any) -> tuple[Callable[..., Any], Any]:
    """A copy of a model, as it is called and as it is; in eager mode, where no backend is given, both are one."""
    import torch

    twin = copy.deepcopy(model).to(dtype)
    return (torch.compile(twin, backend=backend) if backend else twin), twin


def _most_resident() -> float:
    """The most megabytes that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def _wide(backend: Callable[..., Any], exact: bool = False) -> Callable[..., Any]:
    """A backend that is given f64 where the model's own code says f32: transformers' norms and losses cast to it.

    :param exact: for eager mode: write hardsigmoid out, in whose derivative torch rounds 1/6 to f32.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    def widened(dtype: Any) -> Any:
        return torch.float64 if dtype == torch.float32 else dtype

    def compiled(gm: Any, inputs: Any) -> Any:
        for module in gm.modules():
            if not isinstance(module, torch.fx.GraphModule):
                continue
            for node in module.graph.nodes:
                if (node.op, node.target) == ("call_method", "float"):
                    node.target = "double"
                if exact and getattr(node.target, "__name__", "") == "hardsigmoid":
                    node.target, node.kwargs = _hardsigmoid, {}
                node.args, node.kwargs = tree_map_only(torch.dtype, widened, (node.args, node.kwargs))
            module.recompile()
        return backend(gm, inputs)

    return compiled


def _hardsigmoid(x: Any, *_: Any) -> Any:
    return (x + 3).clamp(0, 6) / 6


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _peak(call: Callable[..., Any], model: Any, batch: Any) -> float:
    """Megabytes that a warm step takes beside what the process holds between steps."""
    for _ in range(2):
        step(call, model, batch)
    model.zero_grad(set_to_none=True)
    return peak(lambda: step(call, model, batch))


def _coverage(report: Any) -> dict[str, Any]:
    return {
        "graphs": len(report.graphs),
        "ops": report.ops,
        "share": report.share,
        "regions": sum(len(graph.regions) for graph in report.graphs),
        "left": [[row.op, row.reason, row.count] for row in report.rows],
    }


# -- all of them -------------------------------------------------------------------------------------------------------


def row_of(name: str, parts: Sequence[str], engines: Sequence[str], limit: float) -> dict[str, Any]:
    """A model's row: of each engine that is a part, and of the turns of ``engines`` where ``"steps"`` is one.

    What did not come to an end says so under its ``"failed"``.
    """
    row: dict[str, Any] = {"name": name}
    for part in parts:
        found = run(name, ("--engines", *engines, "--one", part), limit)
        failed = found.pop("failed", None)
        row |= found
        if failed:
            row[part] = {**row.get(part, {}), "failed": failed}
    return row


def run(
    name: str, arguments: Sequence[str] = ("--one",), limit: float = LIMIT, module: str = "benchmarks.models"
) -> dict[str, Any]:
    """What a process of its own says of a model, on empty caches; ``"failed"`` where it did not come to an end."""
    found: dict[str, Any] = {"name": name}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "GRADC_CACHE_DIR": os.path.join(folder, "gradc"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
            "GRADC_NUM_THREADS": str(THREADS),
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", module, *arguments, name]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            found["failed"] = f"more than {limit:.0f} s"
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if process.returncode and "failed" not in found:
        found["failed"] = next((x for x in reversed(err.splitlines()) if x.strip()), f"exit {process.returncode}")
    return found


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether gradc runs every op of a model, as one region."""
    cover = row.get("coverage", {})
    return bool(cover) and not cover["left"] and cover["regions"] == cover["graphs"] > 0


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether value and gradients are torch's: in f64, and in f32 as near to f64 as torch's own f32."""
    if not {"gradc_f64", "gradc_f32", "eager_f32"} <= row.keys():
        return False
    own, ours = row["eager_f32"], row["gradc_f32"]
    return max(row["gradc_f64"]["value"], row["gradc_f64"]["gradient"]) <= F64_ERROR and all(
        ours[kind] <= F32_FACTOR * max(own[kind], F32_EPSILON) for kind in ("value", "gradient")
    )


_COLUMNS = (
    ("model", 16), ("ops", 5), ("gradc", 6), ("regions", 8), ("f64 error", 10), ("f32/torch", 10), ("compile s", 10),
    ("inductor", 9), ("step ms", 8), ("eager", 7), ("inductor", 9), ("MB", 6), ("eager", 6), ("inductor", 9),
)  # fmt: skip


def heading() -> str:
    return "".join(f"{name:<{width}}" if not i else f"{name:>{width}}" for i, (name, width) in enumerate(_COLUMNS))


def line(row: Mapping[str, Any]) -> str:
    """A model's line of the table; what was left to torch, or went wrong, after it."""
    cover, ours, theirs = row.get("coverage", {}), row.get("gradc", {}), row.get("inductor", {})
    eager = row.get("eager", {})
    f64 = row.get("gradc_f64")
    ratio = "-"
    if "gradc_f32" in row and "eager_f32" in row:
        ratio = f"{row['gradc_f32']['gradient'] / max(row['eager_f32']['gradient'], F32_EPSILON):.2f}"
    cells = [
        row["name"], cover.get("ops", "-"), f"{cover['share']:.0%}" if cover else "-", cover.get("regions", "-"),
        f"{max(f64['value'], f64['gradient']):.0e}" if f64 else "-", ratio,
        *(_cell(each, "compile_s", ".1f") for each in (ours, theirs)),
        *(_cell(row.get("steps_ms", {}), each, ".1f") for each in ("gradc", "eager", "inductor")),
        *(_cell(each, "peak_MB", ".0f") for each in (ours, eager, theirs)),
    ]  # fmt: skip
    text = "".join(
        f"{cell:<{width}}" if not i else f"{cell:>{width}}"
        for i, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    )
    left: dict[str, int] = {}
    for op, _, count in cover.get("left", ()):
        left[op] = left.get(op, 0) + count
    after = ["" if is_right(row) else "WRONG" if f64 else "", ", ".join(f"{n} {op}" for op, n in left.items())]
    failed = [f"{part}: {row[part]['failed']}" for part in (*ALL_ENGINES, STEPS) if "failed" in row.get(part, ())]
    return "  ".join([text, *filter(None, [*after, *failed, row.get("failed", "")])])


def _cell(facts: Mapping[str, Any], name: str, form: str) -> str:
    return format(facts[name], form) if name in facts else "-"


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Where the numbers were taken, and with which packages."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "commit": _commit(),
        "date": f"{datetime.date.today()}",
    }


def _commit() -> str:
    """What is checked out, ``+`` behind it where files differ from it; "" outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help="models; all of them where none is named")
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS / f"models-{words_of(processor())}.json",
        help="where the results go; what it has already of a model and engine is not measured again",
    )
    parser.add_argument("--again", action="store_true", help="measure also what the JSON has already")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one model and engine")
    parser.add_argument("--engines", nargs="+", default=ALL_ENGINES, choices=ALL_ENGINES, help="which are measured")
    parser.add_argument("--steps", action="store_true", help="measure warm steps alone")
    parser.add_argument("--show", action="store_true", help="print the table of the JSON, and measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a process of its own asks for this part
    given = parser.parse_args()
    if given.one:
        return take_turns(given.names[0], given.engines) if given.one == STEPS else measure(given.names[0], given.one)
    if given.show:
        rows = json.loads(given.json.read_text())["models"]
        return print("\n".join([heading(), *map(line, rows), summary(rows)]))
    from .model_list import MODELS

    unknown = [name for name in given.names if name not in MODELS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    print(heading())
    rows = []
    known = json.loads(given.json.read_text())["models"] if given.json.exists() and not given.again else []
    parts = (*(() if given.steps else given.engines), STEPS)
    done = {(row["name"], part) for row in known for part in parts if _is_complete(row, part, given.engines)}
    for name in given.names or MODELS:
        missing = [part for part in parts if (name, part) not in done]
        rows.append(save(given.json, "models", row_of(name, missing, given.engines, given.limit)))
        print(line(rows[-1]), flush=True)
    print(summary(rows))


def _is_complete(row: Mapping[str, Any], part: str, engines: Sequence[str]) -> bool:
    """Whether a part of a row is there, its end by the limit included."""
    if "failed" in row.get(part, ()):
        return True
    return row.get("steps_ms", {}).keys() >= set(engines) if part == STEPS else f"{part}_f32" in row


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many models are whole, and how many right; how gradc's times compare where both were taken."""
    text = f"{len(rows)} models: {sum(map(is_whole, rows))} whole, {sum(map(is_right, rows))} right"
    times = [{e: row[e]["compile_s"] for e in ENGINES if "compile_s" in row.get(e, ())} for row in rows]
    steps = [row.get("steps_ms", {}) for row in rows]
    fastest = [s | {FASTER: min(s["eager"], s["inductor"])} for s in steps if {"eager", "inductor"} <= s.keys()]
    for what, each, peer in (
        ("compile time", times, "inductor"), ("a step", steps, "eager"), ("a step", fastest, FASTER)
    ):  # fmt: skip
        ratios = [one["gradc"] / one[peer] for one in each if {"gradc", peer} <= one.keys()]
        if ratios:
            most = f"the most {max(ratios):.2f}, {len(ratios)} models"
            text += f"; {what} {statistics.geometric_mean(ratios):.2f} of {peer}'s ({most})"
    return text


def save(path: Path, kind: str, row: dict[str, Any], packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """Write a row into the file, over what it says of that name, and return what it says then.

    :param packages: whose versions the numbers depend on.
    """
    facts = json.loads(path.read_text()) if path.exists() else {}
    rows = {each["name"]: each for each in facts.get(kind, [])}
    known = {k: v for k, v in rows.get(row["name"], {}).items() if k != "failed"}
    rows[row["name"]] = known | row
    facts |= {"machine": machine(packages), kind: list(rows.values())}
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return rows[row["name"]]


if __name__ == "__main__":
    main()
