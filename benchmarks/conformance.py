"""``make conformance``: PyTorch's own samples of the indexing and sampling ops, through gradc's compiled CPU kernels,
against torch in f64.

    python -m benchmarks.conformance [OP ...] [--dtypes f64,f32,f16,bf16] [--processes 2] [--determinism]

Writes docs/conformance.md and benchmarks/results/conformance.json when every op and dtype was run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradc
from gradc.api import VERSION
from gradc.errors import GradcError
from gradc.runtime.host import pool

from . import long_double
from .opinfo import TORCH, Array, Case, absent, cases, infos, make_case, to_numpy, to_torch

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Half the distance from 1 to the next number."""
ALLOWED = 4
TOGETHER = 16
"""How many graphs are compiled as one."""
THREADS, UPSTREAMS, REPEATS = (1, 2, 3, 5), 5, 20
ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "conformance.json", ROOT / "docs" / "conformance.md"

Values = dict[str, Array]

# -- what is compared --------------------------------------------------------------------------------------------------


def upstream(case: Case, shape: Sequence[int], seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng([case.number, seed]).standard_normal(tuple(shape))).astype(
        next(iter(case.arrays[n].dtype for n in case.floats))
    )


def torchs(case: Case, dy: Array | None, wide: bool) -> Values:
    """torch's value and gradients, in f64 or as it is."""
    as_asked = lambda t: t.double() if wide and t.is_floating_point() else t
    leaves = {n: as_asked(to_torch(a)).requires_grad_(n in case.floats) for n, a in case.arrays.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = case.theirs(*leaves.values())
        dy = upstream(case, y.shape) if dy is None else dy
        wanted = [leaves[n] for n in case.floats]
        grads = torch.autograd.grad(y, wanted, as_asked(to_torch(dy)), allow_unused=True, materialize_grads=True)
    return {"y": to_numpy(y), **{f"d.{n}": to_numpy(g) for n, g in zip(case.floats, grads, strict=True)}}


def error(got: Array, exact: Array, least: float, unit: float) -> float:
    """The largest difference, in units of the dtype, relative to the largest exact element or ``least``.

    Where the exact value does not fit the dtype, the infinity that it rounds to is wanted.
    """
    if got.shape != exact.shape:
        return float("inf")
    with np.errstate(over="ignore"):
        rounded, value = exact.astype(got.dtype).astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(rounded)
    if not np.array_equal(value[~finite], rounded[~finite], equal_nan=True) or not np.isfinite(value[finite]).all():
        return float("inf")
    apart = np.abs(value[finite] - exact[finite]).max(initial=0.0)
    return float(apart / max(np.abs(exact[finite]).max(initial=0.0), least) / unit) if apart else 0.0


@dataclass
class Outcome:
    """One sample: the largest error over its value and gradients, in units; ``where`` it is; ``refused`` says why there
    is none.
    """

    case: Case
    ours: float
    theirs: float | None
    where: str = ""
    refused: str = ""

    @property
    def passed(self) -> bool:
        allowed = max(ALLOWED, self.theirs) if self.theirs is not None and np.isfinite(self.theirs) else ALLOWED
        return not self.refused and self.ours <= allowed


# -- gradc's side ------------------------------------------------------------------------------------------------------


class Batch:
    """Cases of one op and dtype as compiled modules: those of one signature share a graph, and several graphs a
    module.
    """

    def __init__(self, together: Iterable[Case]):
        self.refused: dict[Case, str] = {}
        self.groups: list[list[Case]] = []
        by_signature: dict[Any, list[Case]] = {}
        for case in together:
            by_signature.setdefault(case.signature, []).append(case)
        for group in by_signature.values():
            try:
                gradc.trace(lambda x, group=group: group[0].ours(*x.values()), x=group[0].types("s"))
                self.groups.append(group)
            except GradcError as problem:
                self.refused |= {case: f"{type(problem).__name__}: {problem}".splitlines()[0] for case in group}
        self.modules: list[tuple[Any, list[list[Case]]]] = []
        for k in range(0, len(self.groups), TOGETHER):
            self._compile(self.groups[k : k + TOGETHER])

    def _compile(self, groups: list[list[Case]]) -> None:
        def together(**inputs: Any) -> dict[str, Any]:
            return {f"y{k}": group[0].ours(*inputs[f"s{k}"].values()) for k, group in enumerate(groups)}

        types = {f"s{k}": group[0].types(f"S{k}") for k, group in enumerate(groups)}
        wrt = [f"s{k}.{n}" for k, group in enumerate(groups) for n in group[0].floats]
        try:
            self.modules.append(
                (gradc.compile(gradc.trace(together, **types), wrt=wrt, target="cpu", unused="zeros"), groups)
            )
        except GradcError as problem:
            if len(groups) == 1:
                self.refused |= {case: f"{type(problem).__name__}: {problem}".splitlines()[0] for case in groups[0]}
            else:
                for group in groups:
                    self._compile([group])

    def run(self, given: Callable[[Case], Array]) -> dict[Case, Values]:
        """Value and gradients of every case, for the cotangents ``given``."""
        results: dict[Case, Values] = {}
        for module, groups in self.modules:
            for turn in range(max(map(len, groups))):
                now = [group[min(turn, len(group) - 1)] for group in groups]
                inputs = {f"s{k}.{n}": a for k, case in enumerate(now) for n, a in case.arrays.items()}
                value, residuals = module.forward(inputs)
                values = value if len(now) > 1 or isinstance(value, dict) else {"y0": value}
                grads = module.backward(residuals, **{f"y{k}": given(case) for k, case in enumerate(now)})
                for k, case in enumerate(now):
                    results[case] = {"y": values[f"y{k}"], **{f"d.{n}": grads[f"s{k}.{n}"] for n in case.floats}}
        return results


def measure(together: Sequence[Case]) -> list[Outcome]:
    """Every case's error beside torch's own."""
    wide = {case: torchs(case, None, wide=True) for case in together}
    cotangents = {case: upstream(case, values["y"].shape) for case, values in wide.items()}
    batch = Batch(together)
    results = batch.run(cotangents.__getitem__)
    return [
        _outcome(case, wide[case], cotangents[case], results.get(case), batch.refused.get(case, ""))
        for case in together
    ]


def _outcome(case: Case, wide: Values, dy: Array, values: Values | None, refused: str) -> Outcome:
    largest = max(
        (float(np.abs(a.astype(np.float64)).max(initial=0.0)) for a in [dy, *(case.arrays[n] for n in case.floats)]),
        default=0.0,
    )
    longer = case.dtype == "f64" and case.sampler is not None and long_double.ENOUGH
    exact = (
        dict(zip(wide, long_double.grid_sample(*case.arrays.values(), dy, *case.sampler), strict=True))
        if longer and case.sampler
        else wide
    )
    errors = lambda values: {n: error(values[n], e, 1e-3 * largest, UNIT[case.dtype]) for n, e in exact.items()}
    theirs = None
    if not case.departure and (longer or case.dtype != "f64"):  # else torch would be its own oracle
        try:
            theirs = max(errors(torchs(case, dy, wide=False)).values())
        except (RuntimeError, NotImplementedError):  # torch has no such kernel
            pass
    if values is None:
        return Outcome(case, float("inf"), theirs, refused=refused)
    ours = errors(values)
    where = max(ours, key=ours.__getitem__)
    return Outcome(case, ours[where], theirs, where)


# -- the same bits -----------------------------------------------------------------------------------------------------


def large_cases(dtype: str) -> list[Case]:
    """Calls of each op that are large enough for several threads; half of all indices are one, so that thousands of
    terms are added up.
    """
    torch.manual_seed(1)
    n, v = 6000, 300
    normal = lambda *shape: torch.randn(*shape).to(TORCH[dtype])
    heavy = lambda *shape, size=v: torch.where(torch.rand(*shape) < 0.5, size // 2, torch.randint(0, size, shape))
    offsets = torch.arange(0, n, 7)
    e, b, g, r = "nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.grid_sample", "scatter_reduce"
    grid = lambda *shape: (torch.rand(*shape) * 3 - 1.5).to(TORCH[dtype])
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        (e, [normal(v, 17), heavy(n)], {"padding_idx": 3}),
        (e, [normal(v, 8), heavy(n, 2)], {"scale_grad_by_freq": True, "max_norm": 1.0}),
        *((b, [normal(v, 9), heavy(n)], {"offsets": offsets, "mode": mode}) for mode in ("sum", "mean", "max")),
        (b, [normal(v, 9), heavy(n)], {"offsets": offsets, "mode": "sum", "per_sample_weights": normal(n)}),
        (b, [normal(v, 9), heavy(n // 4, 4)], {"mode": "mean", "padding_idx": 1}),
        *(
            (
                g,
                [normal(2, 3, 40, 33), grid(2, 50, 41, 2)],
                {"mode": mode, "padding_mode": padding, "align_corners": False},
            )
            for mode, padding in (("bilinear", "zeros"), ("nearest", "border"), ("bicubic", "reflection"))
        ),
        *(
            (
                g,
                [normal(2, 3, 9, 12, 10), grid(2, 8, 11, 13, 3)],
                {"mode": mode, "padding_mode": padding, "align_corners": True},
            )
            for mode, padding in (("bilinear", "reflection"), ("nearest", "zeros"))
        ),
        ("index_add", [normal(v, 11), 0, heavy(n), normal(n, 11)], {"alpha": 2}),
        ("index_add", [normal(11, v), 1, heavy(n), normal(11, n)], {}),
        ("index_select", [normal(v, 11), 0, heavy(n)], {}),
        ("gather", [normal(v, 11), 0, heavy(n, 11)], {}),
        ("gather", [normal(n, 30), 1, heavy(n, 20, size=30)], {}),
        ("take_along_dim", [normal(v, 11), heavy(n, 11), 0], {}),
        ("scatter_add", [normal(v, 11), 0, heavy(n, 11), normal(n, 11)], {}),
        ("scatter_add", [normal(n, 30), 1, heavy(n, 20, size=30), normal(n, 20)], {}),
        *(
            (r, [normal(v, 11), 0, heavy(n, 11), normal(n, 11), reduce], {"include_self": self})
            for reduce in ("sum", "mean", "amax", "amin", "prod")
            for self in (True, False)
        ),
    ]
    theirs = {name: info.op for name, info in infos().values()}
    return [
        make_case(name, name.removeprefix("nn.functional."), dtype, k, theirs[name], values, named)
        for k, (name, values, named) in enumerate(calls)
    ]


def differing(
    batch: Batch, repeats: int = REPEATS, upstreams: int = UPSTREAMS, threads: Sequence[int] = THREADS
) -> dict[Case, int]:
    """How many different results each case gave in ``repeats`` runs of each of ``upstreams`` random upstream gradients,
    the number of threads changing from run to run.
    """
    first = batch.run(lambda case: np.zeros(_shape_of(case), next(case.arrays[n].dtype for n in case.floats)))
    seen: dict[Case, list[set[bytes]]] = {case: [] for case in first}
    before = pool.num_threads()
    try:
        for number in range(upstreams):
            cotangents = {case: upstream(case, values["y"].shape, number + 1) for case, values in first.items()}
            for case in seen:
                seen[case].append(set())
            for k in range(repeats):
                pool.set_num_threads(threads[k % len(threads)])
                for case, values in batch.run(cotangents.__getitem__).items():
                    seen[case][-1].add(
                        hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in values.values())).digest()
                    )
    finally:
        pool.set_num_threads(before)
    return {case: max(map(len, results)) for case, results in seen.items()}


def _shape_of(case: Case) -> tuple[int, ...]:
    graph = gradc.trace(lambda x: case.ours(*x.values()), x=dict(case.arrays))
    return tuple(int(n) for n in graph.outputs[0][1].shape)


# -- what is written ---------------------------------------------------------------------------------------------------


def p99(errors: Sequence[float]) -> float:
    """The smallest error that 99 % of the samples do not exceed."""
    return float(np.percentile(errors, 99, method="inverted_cdf")) if errors else 0.0


def short(x: float | None) -> Any:
    return x if x is None else "inf" if not np.isfinite(x) else float(f"{x:.3g}")


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of the table; per sample: its label, our error, torch's, whether it passed."""
    ours, theirs = [o.ours for o in outcomes], [o.theirs for o in outcomes if o.theirs is not None]
    return {
        "samples": len(outcomes),
        "passed": sum(o.passed for o in outcomes),
        "worst": short(max(ours)),
        "p99": short(p99(ours)),
        "torch_worst": short(max(theirs)) if theirs else None,
        "torch_p99": short(p99(theirs)) if theirs else None,
        "departures": sorted({o.case.departure for o in outcomes if o.case.departure}),
        "by_definition": sum(bool(o.case.departure) for o in outcomes),
        "failures": [
            f"{o.case.label}: "
            + (
                o.refused
                or f"{o.where} is off by {o.ours:.3g} units, torch by {'-' if o.theirs is None else f'{o.theirs:.3g}'}"
            )
            for o in outcomes
            if not o.passed
        ],
        "cases": [[o.case.label, short(o.ours), short(o.theirs), o.passed] for o in outcomes],
    }


def one(job: tuple[str, str]) -> tuple[str, str, dict[str, Any], float]:
    """A row, in a process of its own."""
    torch.set_num_threads(1)
    pool.set_num_threads(1)
    began = time.monotonic()
    return *job, summary(measure(list(cases(*job)))), time.monotonic() - began


def long_sums(dtype: str) -> dict[str, dict[str, Any]]:
    """op -> a row of the second table."""
    torch.set_num_threads(1)
    outcomes = measure(
        [case for case in large_cases(dtype) if " prod" not in case.statics]
    )  # a product of thousands fits no dtype
    by_op: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_op.setdefault(outcome.case.op, []).append(outcome)
    return {op: summary(each) for op, each in by_op.items()}


def same_bits(dtypes: Sequence[str] = ("f32", "bf16")) -> dict[str, Any]:
    """op -> [cases, those that gave more than one result], over the large cases and torch's samples of up to 10^5
    elements.
    """
    counts: dict[str, list[int]] = {}
    for dtype in dtypes:
        together = large_cases(dtype)
        for label in infos():
            together += [case for case in cases(label, dtype) if sum(a.size for a in case.arrays.values()) <= 10**5]
        for case, results in differing(Batch(together)).items():
            row = counts.setdefault(case.op, [0, 0])
            row[0] += 1
            row[1] += results > 1
        print(
            f"the same bits, {dtype}: {sum(n for n, _ in counts.values())} cases so far,"
            f" {sum(bad for _, bad in counts.values())} differ",
            flush=True,
        )
    return {
        "runs": REPEATS * UPSTREAMS,
        "upstreams": UPSTREAMS,
        "threads": list(THREADS),
        "dtypes": list(dtypes),
        "ops": counts,
    }


def page(results: dict[str, Any]) -> str:
    """docs/conformance.md."""
    show = lambda x: "-" if x is None else x if isinstance(x, str) else f"{x:.3g}" if x < 1e4 else f"{x:.1e}"
    rows = [(op, dtype, row) for op, by_dtype in results["ops"].items() for dtype, row in by_dtype.items()]
    lines = [
        "# Conformance with PyTorch's own samples",
        "",
        (
            "Written by `python -m benchmarks.conformance --determinism` (`make conformance`) with"
            f" {', '.join(f'{n} {v}' for n, v in results['versions'].items())}."
        ),
        "",
        (
            "Each of PyTorch's OpInfo samples of these ops"
            " (`torch.testing._internal.common_methods_invocations.op_db`), drawn in the dtype, goes through"
        ),
        (
            "gradc's compiled CPU module: the value, and the gradient of every float input for a random upstream"
            " gradient. The oracle is torch in f64 on the same"
        ),
        (
            "numbers; where the dtype itself is f64, the oracle of the samplers is NumPy's long double, because torch's"
            " f64 coordinates round by more than what is"
        ),
        (
            "measured. An error is max|x - exact| / max(max|exact|, 0.001 * the largest input or upstream gradient), in"
            " units u = 2^-53, 2^-24, 2^-11, 2^-8 of"
        ),
        (
            "f64, f32, f16, bf16; a sample's error is the largest of its value's and its gradients'. A sample passes if"
            " it is at most 4 u, or at most torch's"
        ),
        (
            "own error in that sample and dtype on the CPU. `-`: torch in f64 is the oracle itself. p99 is the error"
            " that 99 % of the samples do not exceed;"
        ),
        "with fewer than 100 samples that is the worst.",
        "",
        f"**{sum(r['passed'] for *_, r in rows)} of {sum(r['samples'] for *_, r in rows)} pass.**",
        "",
        "| op | dtype | passed | worst, u | torch's | p99, u | torch's |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {op} | {dtype} | {r['passed']}/{r['samples']} | {show(r['worst'])} | {show(r['torch_worst'])} |"
            f" {show(r['p99'])} | {show(r['torch_p99'])} |"
            for op, dtype, r in rows
        ),
        "",
    ]
    failed = [f"- {op} {dtype} {text}" for op, dtype, r in rows for text in r["failures"]]
    lines += [
        "## What fails",
        "",
        *(failed or ["Nothing."]),
        "",
        "## What is not mapped",
        "",
        *(
            [f"- {name}: op_db of this torch does not have it." for name in results["absent"]]
            or ["Nothing: every sample of these ops is a call of gradc's ops."]
        ),
    ]
    lines += [
        "",
        (
            "The samples are calls of the functional forms. torch's in-place and `out=` variants have no samples of"
            " their own; in gradc `donate=` and `out=` are options of a call. `sparse=True` is compared by its dense"
            " gradient."
        ),
        "",
    ]
    departures: dict[str, list[str]] = {}
    for op, dtype, r in rows:
        for why in r["departures"]:
            departures.setdefault(why, []).append(f"{op} {dtype} ({r['by_definition']})")
    lines += [
        "## Where torch is not the oracle",
        "",
        (
            "There the definition is, written with other torch ops in f64 (`benchmarks/opinfo.py`), and only 4 u are"
            " allowed:"
        ),
        "",
    ]
    lines += [*(f"- {why}: {', '.join(where)}." for why, where in departures.items()), "", "## 16-bit tails", ""]
    tails, none = [], []
    for op, dtype, r in rows:
        if dtype in ("f16", "bf16"):
            far = (
                isinstance(r["torch_p99"], float)
                and isinstance(r["p99"], float)
                and r["torch_p99"] >= 10 * r["p99"]
                and r["torch_p99"] > ALLOWED
            )
            (tails if far else none).append((op, dtype, r))
    lines += [
        *(
            f"- {op} {dtype}: torch's p99 {show(r['torch_p99'])} u, gradc's {show(r['p99'])} u."
            for op, dtype, r in tails
        ),
        "",
    ]
    worst = max((r["torch_p99"] for *_, r in none if isinstance(r["torch_p99"], float)), default=0.0)
    ours = max((r["p99"] for *_, r in none), default=0.0)
    lines += [
        (
            f"Everywhere else torch has no bad tail in these samples (its p99 is at most {show(worst)} u there, gradc's"
            f" {show(ours)} u), so nothing can be ten times better:"
        ),
        "these samples add few terms.",
        "",
    ]
    lines += [
        (
            "A bad tail shows where thousands of terms meet in one element. The same measure for calls with 6000"
            " indices, half of which are one:"
        ),
        "",
        "| op | dtype | passed | worst, u | torch's |",
        "|---|---|---|---|---|",
        *(
            f"| {op} | {dtype} | {r['passed']}/{r['samples']} | {show(r['worst'])} | {show(r['torch_worst'])} |"
            for dtype, by_op in results["long"].items()
            for op, r in by_op.items()
        ),
        "",
    ]
    if bits := results.get("determinism"):
        total, bad = (sum(row[k] for row in bits["ops"].values()) for k in (0, 1))
        lines += [
            "## The same bits",
            "",
            (
                f"Value and every gradient, {bits['runs']} runs each ({bits['upstreams']} random upstream gradients),"
                f" at {', '.join(map(str, bits['threads'][:-1]))} and {bits['threads'][-1]} threads in turn, in"
                f" {' and '.join(bits['dtypes'])}: the samples above of up to 10^5 elements,"
            ),
            (
                "and calls of every op that are large enough for several threads, half of whose indices are one."
                f" {total} cases, {bad} of which gave more than one result."
            ),
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=[], help=", ".join(infos()))
    parser.add_argument("--dtypes", default=",".join(TORCH))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--determinism", action="store_true", help="also run every op 100 times at 1, 2, 3 and 5 threads"
    )
    options = parser.parse_args()
    dtypes = options.dtypes.split(",")
    for given, known in ((options.ops, infos()), (dtypes, TORCH)):
        for wrong in [o for o in given if o not in known]:
            parser.error(f"{wrong!r}: there are {', '.join(known)}")
    began = time.monotonic()
    table: dict[str, dict[str, Any]] = {}
    jobs = [(label, dtype) for label in options.ops or infos() for dtype in dtypes]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as workers:
        for label, dtype, row, seconds in workers.map(one, jobs):
            table.setdefault(label, {})[dtype] = row
            print(
                f"{label:<20}{dtype:>5}{row['passed']:>5}/{row['samples']:<4} worst {row['worst']!s:<9} torch"
                f" {row['torch_worst']!s:<9} p99 {row['p99']!s:<9} torch {row['torch_p99']!s:<9}{seconds:6.1f} s",
                flush=True,
            )
            for text in row["failures"]:
                print(f"  {text}", flush=True)
    versions = {"gradc": VERSION, "torch": torch.__version__.split("+")[0], "numpy": np.__version__}
    results: dict[str, Any] = {
        "versions": versions,
        "absent": absent(),
        "ops": table,
        "long": {dtype: long_sums(dtype) for dtype in dtypes if dtype in ("f16", "bf16")},
        "determinism": same_bits() if options.determinism else None,
    }
    print(
        f"{sum(r['passed'] for d in table.values() for r in d.values())} of"
        f" {sum(r['samples'] for d in table.values() for r in d.values())} pass; {time.monotonic() - began:.0f} s"
    )
    if options.ops or set(dtypes) != set(TORCH):
        return 0
    if results["determinism"] is None and RESULTS.exists():
        results["determinism"] = json.loads(RESULTS.read_text())["determinism"]
    for path, text in ((RESULTS, as_json(results)), (PAGE, page(results))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}")
    return 0


def as_json(results: dict[str, Any]) -> str:
    """One sample a line."""
    text = json.dumps(results, indent=1)
    return (
        re.sub(r"\[\s+(\"[^\n]*?\"),\s+([^\[\]\s]+),\s+([^\[\]\s]+),\s+(true|false)\s+\]", r"[\1, \2, \3, \4]", text)
        + "\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
