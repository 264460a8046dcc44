"""``python -m benchmarks.onnx_nodes``: the gradient of each of ONNX's own node tests, against differences in f64.

For every case on dense tensors of numbers whose values gradc has right and that has an input of floats: each gradient
along random directions, for single elements, and by the adjoint identity (:func:`gradc.check`), or the reason why there
is none.  Writes benchmarks/results/onnx-nodes.json, a verdict for each case, and the table by operator in docs/onnx.md;
tests/frontend/test_onnx_nodes.py holds a few cases of each operator against that file.  Needs ``gradc[onnx]``.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import gradc
from gradc import interp
from gradc.errors import GradcError, InvalidProblem, NotDifferentiable, Unsupported

STRINGS_AND_COMPLEX = (onnx.TensorProto.STRING, onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "onnx-nodes.json", ROOT / "docs" / "onnx.md"
BEGIN, END = "<!-- benchmarks.onnx_nodes writes this table -->\n", "<!-- its end -->\n"
HELD = "ok"

CONSTANTS: dict[str, tuple[str, ...]] = {
    "AffineGrid": ("size",),
    "ArrayFeatureExtractor": (),
    "CenterCropPad": ("shape",),
    "Col2Im": ("image_shape", "block_shape"),
    "Compress": ("condition",),
    "ConstantOfShape": ("x",),
    "CumProd": ("axis",),
    "CumSum": ("axis",),
    "DFT": ("dft_length", "axis"),
    "Dropout": ("r", "t"),
    "Expand": ("shape", "new_shape"),
    "MaxUnpool": ("output_shape",),
    "NonMaxSuppression": (
        "boxes",
        "scores",
        "max_output_boxes_per_class",
        "iou_threshold",
        "score_threshold",
    ),
    "NonZero": ("condition",),
    "OneHot": ("depth",),
    "Pad": ("pads", "value", "axes"),
    "Range": ("start", "limit", "delta"),
    "Reshape": ("shape",),
    "Resize": ("roi", "scales", "sizes"),
    "STFT": ("frame_step", "step", "frame_length", "length"),
    "Slice": ("starts", "ends", "axes", "steps"),
    "Split": ("split",),
    "Squeeze": ("axes",),
    "Tile": ("repeats", "y"),
    "TopK": ("k",),
    "Trilu": ("k",),
    "Unique": ("x", "X"),
    "Unsqueeze": ("axes",),
    "Upsample": ("scales",),
    "Loop": ("trip_count", "cond"),
    "If": ("cond",),
    "MelWeightMatrix": ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"),
    "BlackmanWindow": ("x",),
    "HammingWindow": ("x",),
    "HannWindow": ("x",),
    **{
        f"Reduce{n}": ("axes",)
        for n in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}
"""Inputs whose values decide shapes, by operator: given as constants."""


@functools.cache
def cases() -> dict[str, list[Any]]:
    """The node tests on dense tensors of numbers, by operator; those with bodies written out are left out."""
    import onnx.backend.test.case.node as node

    before, node.function_testcase_helper = node.function_testcase_helper, lambda *_, **__: ([], 0)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = node.collect_testcases(None)
    finally:
        node.function_testcase_helper = before
    by_operator: dict[str, list[Any]] = {}
    for case in found:
        infos = [*case.model.graph.input, *case.model.graph.output]
        dense = all(
            i.type.HasField("tensor_type") and i.type.tensor_type.elem_type not in STRINGS_AND_COMPLEX for i in infos
        )
        if dense and case.model.graph.node[0].domain in ("", "ai.onnx"):
            by_operator.setdefault(case.model.graph.node[0].op_type, []).append(case)
    return by_operator


def name_of(case: Any) -> str:
    return str(case.name).removeprefix("test_")


def array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def graph_of(case: Any) -> tuple[gradc.Graph, dict[str, np.ndarray]]:
    """The graph, and its inputs' values by name; inputs that shapes depend on are constants."""
    inputs, _ = case.data_sets[0]
    values = dict(zip((i.name for i in case.model.graph.input), map(array, inputs), strict=False))
    wanted = CONSTANTS.get(case.model.graph.node[0].op_type, ())
    known = {name: values[name] for name in wanted if name in values}
    graph = gradc.from_onnx(case.model, constants=known)
    given = [value for name, value in values.items() if name not in known]
    names = [n for n in graph.input_names if n not in graph.defaults]
    return graph, dict(zip(names, given, strict=True))


# -- values ------------------------------------------------------------------------------------------------------------


def differs(case: Any) -> str:
    """What is wrong with a case's results, "" if nothing is."""
    try:
        graph, values = graph_of(case)
    except (Unsupported, InvalidProblem) as error:
        return str(error)
    _, wanted = case.data_sets[0]
    results = list(interp.run(graph, values).values())
    assert len(results) == len(wanted)
    for got, want in zip(map(np.asarray, results), map(array, wanted), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), case.name
        if got.dtype.kind in "biu":
            if not np.array_equal(got, want):
                return "other integers"
            continue
        short = got.dtype.itemsize < 4
        got, want = got.astype(np.float64), want.astype(np.float64)
        if not np.allclose(got, want, rtol=2e-2 if short else 1e-3, atol=1e-3 if short else 1e-5, equal_nan=True):
            return "other numbers"
    return ""


# -- gradients ---------------------------------------------------------------------------------------------------------


def verdict(case: Any) -> str:
    """``"ok"``, or why a gradient is not there, or cannot be compared."""
    graph, values = graph_of(case)
    floats = [n for n in values if graph.input(n).dtype.is_float]
    if not any(node.dtype.is_float for _, node in graph.outputs):
        return "no result of floats"
    if not floats:
        return "no input of floats"
    found = [_held(graph, name, values) for name in floats]
    reasons = [reason for reason in found if reason != HELD]
    if "FAILED" in reasons:
        return "FAILED"
    edges = [reason for reason in reasons if reason.startswith("at a")]
    return edges[0] if edges else HELD if HELD in found else reasons[0]


def _held(graph: gradc.Graph, name: str, values: Mapping[str, np.ndarray]) -> str:
    """Of one input: at its values or, where these are at a kink, at the edge of a domain or beyond it, beside
    them.  What moves is finite everywhere.
    """
    kinds = {n: np.asarray(v).dtype for n, v in values.items()}
    floats = {n: v.astype(np.float64) for n, v in values.items() if graph.input(n).dtype.is_float}
    finite = {n: np.where(np.isfinite(v), v, 0.25) for n, v in floats.items()}
    draw = np.random.default_rng(0)
    beside = {n: v + 0.02 * (np.abs(v).mean() + 0.1) * draw.uniform(0.5, 1, v.shape) for n, v in finite.items()}
    worst = ""
    for trial in ({**floats, name: finite[name]}, beside):
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                given = {**values, **{n: v.astype(kinds[n]) for n, v in trial.items()}}
                said = {f.verdict for f in gradc.check(graph, [name], inputs=given).findings}
        except NotDifferentiable as error:
            through = re.match(r"'(\w+)' \(", str(error))
            return f"no gradient passes {through[1]}" if through else "the result does not depend on it"
        except GradcError as error:
            return "no finite result" if str(error).startswith("no value of") else str(error).splitlines()[0]
        if said == {HELD}:
            return HELD
        worst = worst or next(v for v in ("FAILED", "jump", "kink") if v in said)
    return worst if worst == "FAILED" else f"at a {worst}"


# -- all of them -------------------------------------------------------------------------------------------------------


def judged(case: Any) -> dict[str, str]:
    """A case's entry of the file: what its values and gradients come to."""
    wrong = differs(case)
    return {"values": wrong.strip().splitlines()[-1].strip() if wrong else HELD} | (
        {} if wrong else {"gradients": verdict(case)}
    )


def table(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Markdown, a line for each operator."""
    lines = ["| operator | right, of all | gradients right | no gradient, or none to compare |", "|---|--:|--:|---|"]
    totals = Counter[str]()
    for operator, entries in sorted(found.items()):
        right = [e for e in entries.values() if e["values"] == HELD]
        reasons = Counter(e["gradients"] for e in right if e["gradients"] != HELD)
        held = sum(e["gradients"] == HELD for e in right)
        said = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        lines.append(f"| {operator} | {len(right)}/{len(entries)} | {held or ''} | {said} |")
        totals.update({"all": len(entries), "right": len(right), "held": held, "reasons": sum(reasons.values())})
    lines.append(
        f"| **all** | **{totals['right']}/{totals['all']}** | **{totals['held']}** | **{totals['reasons']}** |"
    )
    return "\n".join(lines)


def write(path: Path) -> None:
    """The table of the page, from the file of results."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    facts = json.loads(path.read_text())
    PAGE.write_text(f"{head}{BEGIN}\n{table(facts['operators'])}\n\n{END}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("operators", nargs="*", help="all of them where none is named")
    parser.add_argument("--write", action="store_true", help="write the table of docs/onnx.md, and measure nothing")
    given = parser.parse_args()
    if given.write:
        return write(RESULTS)
    facts = json.loads(RESULTS.read_text()) if given.operators and RESULTS.exists() else {"operators": {}}
    for operator in given.operators or sorted(cases()):
        began = time.process_time()
        entries = facts["operators"][operator] = {name_of(case): judged(case) for case in cases()[operator]}
        failed = [name for name, entry in entries.items() if entry.get("gradients") == "FAILED"]
        print(f"{operator:<28}{len(entries):>4}{time.process_time() - began:>8.1f} s  {', '.join(failed)}", flush=True)
        facts["onnx"] = onnx.__version__
        RESULTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
