"""What one constant or one choice of the CUDA kernels is worth: variants of the tree's text beside the tree as it is.

    python -m benchmarks.gpu_variants [TABLE ...] [--seconds 400] [--out FILE.json]
    python -m benchmarks.gpu_variants --static      # the time that a model predicts for sm_90, without a GPU
    python -m benchmarks.gpu_variants --tiny --target cuda-sim   # small sizes on the simulator: are they right?

A variant is a few edits of gradc's text, applied to a copy of it, where the cases run in a process of their own: gradc
has no second way for what is tried here.  Each table has the tree as it is first, as ``default``.

Exit status: 0 all were right, or lose digits as they say; 1 something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .edits import Edit

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("gradc", "templates", "benchmarks", "pyproject.toml")
"""All that a case needs of the tree."""
STEP = 90.0
"""Seconds that a variant's cases may take."""


@dataclass(frozen=True)
class Variant:
    """:param same_bits: only launches are other ones: results have the default's bits.
    :param exact: results have the error that they are stated with; else what they lose is part of what is asked.
    """

    name: str
    edits: tuple[Edit, ...]
    same_bits: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Table:
    """One question.

    :param cases: of :mod:`.gpu_cases`.
    """

    what: str
    cases: tuple[str, ...]
    variants: tuple[Variant, ...]


def constant(file: str, text: str, *values: str, same_bits: bool = False) -> tuple[Variant, ...]:
    """One constant, ``NAME = value`` in the text, at other values."""
    name, _, default = text.partition(" = ")
    return tuple(
        Variant(f"{name} {value} (is {default.strip()})", (Edit(file, text, f"{name} = {value}"),), same_bits)
        for value in values
    )


ROWS, TASK, STRIPS, COLUMNS, LAUNCH = (
    f"gradc/codegen/cuda/{name}.py"
    for name in ("row_registers", "mappings/row_in_registers", "mappings/column_strips", "columns", "launch")
)
PROGRAM, SORT = "templates/cuda/program.h", "templates/cuda/sort.cu"
TWO_SUM = """  const f32 high = s.high + v, seen = high - s.high;
  s.low += (s.high - (high - seen)) + (v - seen);
  s.high = high;
"""
TWO_PAIRS = """  const f32 high = s.high + v.high, seen = high - s.high;
  s.low = (s.low + v.low) + ((s.high - (high - seen)) + (v.high - seen));
  s.high = high;
"""
FAST_TWO_SUM = """  const f32 high = s.high + v;
  s.low += v - (high - s.high);
  s.high = high;
"""
VALUE = "{ return s.low - s.low == 0 ? s.high + s.low : s.high; }"
PAIR = "struct __align__(8) sum_f32 { f32 high, low; };\n"
F64 = """union gradc_pair_as_f64 { sum_f32 pair; f64 value; };
GRADC_FN f64 gradc_as_f64(sum_f32 s) { gradc_pair_as_f64 u; u.pair = s; return u.value; }
GRADC_FN sum_f32 gradc_as_pair(f64 v) { gradc_pair_as_f64 u; u.value = v; return u.pair; }
"""
EX2 = """GRADC_FN f32 gradc_ex2(f32 x) {
#ifdef GRADC_CUDA_SIM
  return __builtin_exp2f(x);
#else
  f32 y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
#endif
}
"""
EXP_MANTISSA = (
    "/* What 1 + high rounds off and the low part of k ln2 are added up beside it; x and its quotient as above */\n"
)

TABLES: Mapping[str, Table] = {
    "threads": Table(
        "threads of a row that stays in registers: elements for each",
        ("N1", "N2", "S1", "C1"),
        (
            *constant(ROWS, "ELEMENTS = 32", "16", "64", "8"),
            *constant(ROWS, "FEWEST_ELEMENTS = 16", "8", "32"),
            *constant(TASK, "WIDEST = 512", "256"),
        ),
    ),
    "sums": Table(
        "how a thread adds up f32: two-sum (default), plain, f64",
        ("N1", "N3"),
        (
            Variant(
                "plain f32",
                (
                    Edit(PROGRAM, TWO_SUM, "  s.high += v;\n"),
                    Edit(PROGRAM, TWO_PAIRS, "  s.high += v.high;\n"),
                    Edit(PROGRAM, FAST_TWO_SUM, "  s.high += v;\n"),
                ),
                exact=False,
            ),
            Variant(
                "f64",
                (
                    Edit(PROGRAM, PAIR, PAIR + F64),
                    Edit(PROGRAM, TWO_SUM, "  s = gradc_as_pair(gradc_as_f64(s) + v);\n"),
                    Edit(PROGRAM, TWO_PAIRS, "  s = gradc_as_pair(gradc_as_f64(s) + gradc_as_f64(v));\n"),
                    Edit(PROGRAM, FAST_TWO_SUM, "  s = gradc_as_pair(gradc_as_f64(s) + v);\n"),
                    Edit(PROGRAM, VALUE, "{ return (f32)gradc_as_f64(s); }"),
                ),
            ),
        ),
    ),
    "exponential": Table(
        "a polynomial of the exponential (default), or the special function unit's",
        ("S1", "C1", "P1"),
        (
            Variant(
                "ex2.approx",
                (
                    Edit(
                        "templates/common/math.h", EXP_MANTISSA, "#ifdef GRADC_GPU\n" + EX2 + "#endif\n" + EXP_MANTISSA
                    ),
                    Edit(
                        "templates/common/math.h",
                        "    i32 small = t < -86.0f;\n",
                        "    return x <= 0x1.62e42ep+6f ? gradc_ex2(t * 0x1.715476p+0f) : x * GRADC_INFINITY_F32;\n"
                        "    i32 small = t < -86.0f;\n",
                    ),
                    Edit(
                        PROGRAM,
                        "  return exp_mantissa_f32(t) * f32_of_bits((u32)(exp_quotient_f32(t) + 191) << 23) * 0x1p-64f",
                        "  return gradc_ex2(t * 0x1.715476p+0f)",
                    ),
                    Edit(
                        "templates/cuda/exp_sums.h",
                        "{f32_of_bits(bits_of_f32(place) << 23), r, mad_f32(exp_polynomial_f32(r), r, 1.0f)}",
                        "{gradc_ex2(mad_f32(x, 0x1.715476p+0f, shift - GRADC_EXP_SHIFT)), 0.0f, 1.0f}",
                    ),
                ),
                exact=False,
            ),
        ),
    ),
    "columns": Table(
        "columns that a thread takes at once",
        ("P1", "P2", "B1"),
        (
            *constant(COLUMNS, "MAX_COLUMNS = 8", "4"),
            *constant(COLUMNS, "ACCESS_BYTES = 16", "8"),
            *constant(COLUMNS, "LONG_BODY = 50", "1000"),
        ),
    ),
    "strips": Table(
        "elements of a block of a map",
        ("P1", "P2"),
        (
            *constant(STRIPS, "STRIP = 2048", "1024", "4096", same_bits=True),
            *constant(STRIPS, "MANY_STRIPS, LONGEST_STRIP = 8192, 4", "8192, 1", "8192, 16", same_bits=True),
        ),
    ),
    "chunks": Table(
        "threads that sums over rows are shared out to",
        ("N1", "B1", "E12"),
        constant("gradc/analysis/chunks.py", "GPU_WORKERS = 1 << 17", "1 << 16", "1 << 18"),
    ),
    "scan": Table(
        "blocks that look for the largest value before sums in fixed point",
        ("E2f",),
        constant(
            LAUNCH,
            "SCAN_BLOCKS = 2 * GPU_WORKERS // THREADS",
            "GPU_WORKERS // THREADS",
            "8 * GPU_WORKERS // THREADS",
            same_bits=True,
        ),
    ),
    "sort": Table(
        "the sort of rows by key: bits of a digit, rows of one block, tiles without a scan",
        ("E2", "E1"),
        (
            Variant(
                "digits of 8 bits (are 9)",
                (
                    Edit("gradc/analysis/combine.py", "DIGIT_BITS = 9", "DIGIT_BITS = 8"),
                    Edit(
                        "templates/cuda/sort_tile.h",
                        "GRADC_DIGIT_BITS = 9, GRADC_DIGITS = 512",
                        "GRADC_DIGIT_BITS = 8, GRADC_DIGITS = 256",
                    ),
                ),
                same_bits=True,
            ),
            *constant(SORT, "GRADC_ONE_BLOCK = 8192", "4096", "16384", same_bits=True),
            *constant(SORT, "GRADC_FEW_TILES = 32", "0", "128", same_bits=True),
        ),
    ),
}
"""Clearing memory beside other work (a forked memset) is none: gradc has one stream."""


def edited(folder: Path, variant: Variant | None) -> Path:
    """A copy of the tree with the variant's edits."""
    root = folder / "tree"
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy2(ROOT / name, root / name)
    for edit in variant.edits if variant else ():
        edit.apply(root)
    return root


def measured(
    table: Table, variant: Variant | None, arguments: Sequence[str], static: bool, seconds: float
) -> dict[str, Any]:
    """What a variant's cases give: ``{case: {...}}``, or ``{"failed": why}``."""
    with tempfile.TemporaryDirectory(prefix="gradc-variant-") as scratch:
        root, out = edited(Path(scratch), variant), Path(scratch) / "found.json"
        command = (
            ["benchmarks.cuda_static", "--json", str(out)]
            if static
            else ["benchmarks.gpu", "--no-compile", "--no-strategies", "--out", str(out), *arguments]
        )
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", *command, *table.cases],
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {seconds:.0f} s"}
        if not out.exists():
            return {"failed": (done.stdout + done.stderr)[-2000:]}
        found = json.loads(out.read_text())
        return _predicted(found) if static else {name: _timed(row) for name, row in found["cases"].items()}


def _predicted(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of every direction of a case."""
    return {
        f"{name} {direction}": {"us": row["microseconds"], "share": row["share"], "spills": row["spills"]}
        for name, directions in found.items()
        for direction, row in directions.items()
    }


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of the part of a case that the benchmark times."""
    if "failed" in row:
        return {"failed": row["failed"]}
    entry: dict[str, Any] = {
        "units": max(result["units"] for result in row["results"].values()),
        "right": all(result["right"] for result in row["results"].values()),
        "bits": {name: result["bits"] for name, result in row["results"].items()},
    }
    if "ours" in row:
        entry |= {"us": row["ours"]["median"] * 1e6, "share": 100 * row["floor_share"]}
    return entry


def compare(table: Table, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a table's variants, a line each; adds the ``ratio`` of their times to the default's."""
    default, wrong = rows["default"], []
    exact = {v.name: v.exact for v in table.variants}
    same = {v.name: v.same_bits for v in table.variants}
    for name, found in rows.items():
        if "failed" in found:
            wrong.append(f"{name}: {found['failed']}")
            continue
        for case, entry in found.items():
            base = default.get(case, {})
            if "failed" in entry:
                wrong.append(f"{name}, {case}: {entry['failed']}")
            if "us" in entry and "us" in base:
                entry["ratio"] = entry["us"] / base["us"]
            if not entry.get("right", True) and exact.get(name, True):
                wrong.append(f"{name}, {case}: an error of {entry['units']:.3g} units")
            if same.get(name) and entry.get("bits") != base.get("bits"):
                wrong.append(f"{name}, {case}: other bits than the default's")
    return wrong


def markdown(name: str, table: Table, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table's text."""
    lines = [
        f"\n{name}: {table.what}\n",
        "| variant | case | us | share of the floor | ratio | error, units |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for variant, found in rows.items():
        for case, entry in found.items() if "failed" not in found else [("", found)]:
            if "failed" in entry:
                lines.append(f"| {variant} | {case} | failed | | | |")
                continue
            cells = (
                (entry.get(key), form)
                for key, form in (("us", ".1f"), ("share", ".0f"), ("ratio", ".2f"), ("units", ".2g"))
            )
            lines.append(f"| {variant} | {case} | {' | '.join('' if v is None else format(v, f) for v, f in cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--target", choices=("cuda", "cuda-sim"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--static", action="store_true", help="predicted, not measured")
    parser.add_argument("--seconds", type=float, default=400.0, help="stop after this long")
    parser.add_argument("--out", type=Path, help="the JSON to write, after each variant")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.tables if name not in TABLES]:
        parser.error(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    passed = ["--target", options.target, *(["--tiny"] if options.tiny else [])]
    until, found, wrong = time.monotonic() + options.seconds, {}, []
    for name in options.tables or TABLES:
        table = TABLES[name]
        rows: dict[str, Any] = found.setdefault(name, {})
        for variant in (None, *table.variants):
            if (left := until - time.monotonic()) < 5:
                print(f"{name}: no time left")
                break
            rows[variant.name if variant else "default"] = measured(
                table, variant, passed, options.static, min(left, STEP)
            )
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
        wrong += [f"{name}: {line}" for line in (compare(table, rows) if rows else [])]
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(markdown(name, table, rows), flush=True)
    if wrong:
        print("wrong:", *wrong, sep="\n  ", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
