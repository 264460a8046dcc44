"""How near a table's lookups and updates come to what memory gives: rows at random places, read and updated.

``python -m benchmarks.lookups [--rows 10000 1000000 ...] [--widths 64 128] [--threads 1] [--save]`` times 4096 bags of
20 over a table of f32: the forward (sums of bags), and the backward with the update by rowwise Adagrad, in the table.
The floor is C that does the same with what it needs to know given: it asks for rows ahead, and sums those of each bag;
for the update it has the indices of each distinct row side by side already, sums its gradients, and reads and writes
the row and its state.  So the floor is the bandwidth of this machine for rows at these places, and the shares (goals:
80 % forward, 60 % backward) are how much of it is reached.  *Sorted* is the share of C that does not know the order
and sorts the indices before (by digits of 14 bits at most, lines asked for ahead): what is left of the bandwidth by
hand.  Uniform indices, and Zipf's law of exponent 1.05.  Processor times, the least of several rounds, by turns.

A table that does not fit into memory is a sparse file (``np.memmap``), of which the rows that are named exist.  With
``--save`` each record is written to ``benchmarks/results/lookups-PROCESSOR.json`` as soon as it is measured, for
docs/embeddings.md.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import operator
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradc
from gradc import ops, optim
from gradc.optim.step_graph import step_graph
from gradc.runtime.host import pool
from gradc.runtime.host.toolchain import compile_c, load_library

from .__main__ import RESULTS, machine, one_a_line, processor, words_of
from .alternated import least
from .streams import of_ranks

Array = np.ndarray[Any, Any]
ROWS, WIDTHS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000), (64, 128)
BAGS, BAG = 4096, 20
IN_MEMORY = 6 << 30
"""Bytes of a table beyond which it is a file."""
ROUNDS, SECONDS = 9, 0.05
GOALS = {"forward": 0.8, "backward": 0.6}
FLOOR = """
typedef long long i64;
#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__
enum { LANES = 8 }; /* vectors that the processor lacks are taken apart in memory */
#else
enum { LANES = 4 };
#endif
enum { AHEAD = 16, LINE = 16, WIDTH = %d, VECTORS = WIDTH / LANES };
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
#define EACH _Pragma("GCC unroll 32") for (int v = 0; v < VECTORS; v++)
#define AT(row, v) ((vector *)(row))[v]
static inline void ask(const float *row) { /* into the second cache, as gradc does: more lines are on their way */
  _Pragma("GCC unroll 8") for (int c = 0; c < WIDTH; c += LINE) __builtin_prefetch(row + c, 0, 2);
  __builtin_prefetch(row + WIDTH - 1, 0, 2); /* a row that begins within a line ends in one more */
}
__attribute__((visibility("default")))
void read_rows(const float *table, const i64 *at, i64 bags, i64 bag, float *restrict out) {
  for (i64 b = 0; b < bags; b++) {
    vector sum[VECTORS] = {0};
    for (i64 p = b * bag; p < b * bag + bag; p++) {
      if (p + AHEAD < bags * bag) ask(table + at[p + AHEAD] * WIDTH);
      const float *row = table + at[p] * WIDTH;
      EACH sum[v] += AT(row, v);
    }
    EACH AT(out + b * WIDTH, v) = sum[v];
  }
}
/* rows: the distinct ones, ascending; from[start[k]..start[k + 1]]: whose gradients row k has. */
__attribute__((visibility("default")))
void update_rows(float *table, float *state, const i64 *rows, const i64 *start, const i64 *from, const float *g,
                 i64 distinct) {
  for (i64 k = 0; k < distinct; k++) {
    if (k + AHEAD < distinct) ask(table + rows[k + AHEAD] * WIDTH), __builtin_prefetch(state + rows[k + AHEAD]);
    vector sum[VECTORS] = {0}, squares = {0};
    for (i64 p = start[k]; p < start[k + 1]; p++) {
      if (p + AHEAD < start[distinct]) ask(g + from[p + AHEAD] * WIDTH);
      const float *row = g + from[p] * WIDTH;
      EACH sum[v] += AT(row, v);
    }
    EACH squares += sum[v] * sum[v];
    float square = 0;
    for (int i = 0; i < LANES; i++) square += squares[i];
    state[rows[k]] += square / WIDTH;
    const float rate = 1e-3f / (1e-10f + __builtin_sqrtf(state[rows[k]]));
    float *const row = table + rows[k] * WIDTH;
    EACH AT(row, v) -= rate * sum[v];
  }
}
/* What update_rows is given, of indices below 2^bits; items, to: [count].  Returns how many are distinct. */
typedef unsigned long long u64;
__attribute__((visibility("default")))
i64 sort_indices(const i64 *restrict at, i64 count, i64 bag, i64 bits, u64 *items, u64 *to, i64 *restrict rows,
                 i64 *restrict start, i64 *restrict from) {
  static unsigned place[4][1 << 14];
  const int digits = (bits + 13) / 14, each = (bits + digits - 1) / digits;
  const u64 mask = ((u64)1 << each) - 1;
  for (int d = 0; d < digits; d++) __builtin_memset(place[d], 0, sizeof(unsigned) << each);
  for (i64 i = 0; i < count; i++)
    for (int d = 0; d < digits; d++) place[d][at[i] >> d * each & mask]++;
  for (int d = 0; d < digits; d++)
    for (u64 v = 0, before = 0; v <= mask; v++) {
      const unsigned here = place[d][v];
      place[d][v] = before, before += here;
    }
  for (int d = 0; d < digits; d++) {
    unsigned *restrict const next = place[d];
    u64 *restrict const out = to;
#define ITEM(i) (d ? items[i] : (u64)at[i] << 32 | (i))
#define DIGIT(i) (ITEM(i) >> (32 + d * each) & mask)
    for (i64 i = 0; i < count; i++) {
      if (i + AHEAD < count) __builtin_prefetch(out + next[DIGIT(i + AHEAD)], 1);
      out[next[DIGIT(i)]++] = ITEM(i);
    }
    to = items, items = out;
  }
  i64 number = -1;
  for (i64 i = 0, row = -1; i < count; i++) {
    const i64 here = items[i] >> 32;
    number += here != row, row = here;
    rows[number] = here, start[number + 1] = i + 1, from[i] = (unsigned)items[i] / bag;
  }
  start[0] = 0;
  return number + 1;
}
"""


@functools.cache
def floor_library(width: int) -> ctypes.CDLL:
    return load_library(compile_c(FLOOR % width, extra=["-O3", "-ffast-math"]), "floor")


def of(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def draw(law: str, rows: int) -> Array:
    """[BAGS, BAG] indices; hot rows anywhere in the table."""
    rng = np.random.default_rng(0)
    if law == "uniform":
        return rng.integers(0, rows, (BAGS, BAG))
    most = min(rows, 10_000_000)  # ranks beyond that have a share of some percent, and memory for them none
    ranks = of_ranks(np.arange(1, most + 1) ** -1.05)(rng, BAGS * BAG)
    return (ranks * 2654435761 % rows).reshape(BAGS, BAG)  # a multiplicative hash: spreads the hot ones


@functools.cache
def modules(width: int) -> tuple[gradc.Module, gradc.Module]:
    """The forward, and the backward with the update: arguments table, i, and state and cotangent."""
    graph = gradc.trace(
        lambda table, i: ops.embedding_bag(i, table, mode="sum"), table=f"f32[V,{width}]", i=f"i64[N,{BAG}]"
    )
    step = step_graph(graph, {"table": optim.rowwise_adagrad(0.001)}, sparse=["table"], loss=False)
    written = [name for name in step.output_names if name in step.input_names]
    return gradc.compile(graph, target="cpu"), gradc.compile(step, target="cpu", donate=written)


def calls(table: Array, state: Array, i: Array) -> dict[str, dict[str, Callable[[], Any]]]:
    """Forward, backward -> ours, the floor's, and that of a floor which sorts; their results agree.

    :raises AssertionError: they do not.
    """
    width = table.shape[1]
    forward, backward = modules(width)
    g = np.random.default_rng(1).standard_normal((BAGS, width)).astype(np.float32)
    out, again = np.empty((BAGS, width), np.float32), np.empty((BAGS, width), np.float32)
    (cotangent,) = set(backward.graph.input_names) - {"table", "i", "lr", "state.step", "state.sum.table"}
    given = {"table": table, "i": i, "lr": 1e-3, "state.step": np.array(0), "state.sum.table": state, cotangent: g}
    flat = i.ravel()
    order = np.argsort(flat, kind="stable")
    rows, start = np.unique(flat[order], return_index=True)
    start, bag = np.append(start, flat.size).astype(np.int64), (order // BAG).astype(np.int64)
    library, long = floor_library(width), ctypes.c_longlong
    read = lambda: library.read_rows(of(table), of(flat), long(BAGS), long(BAG), of(again))
    write = lambda: library.update_rows(*map(of, (table, state, rows, start, bag, g)), long(len(rows)))
    items, by_hand = np.empty((2, flat.size), np.int64), np.empty((3, flat.size + 1), np.int64)
    bits = long(int(flat.max()).bit_length())
    sort = lambda: library.sort_indices(of(flat), long(flat.size), long(BAG), bits, *map(of, (*items, *by_hand)))
    sort_and_write = lambda: library.update_rows(*map(of, (table, state, *by_hand, g)), long(sort()))
    for found, wanted in zip(by_hand, (rows, start, bag), strict=True):
        distinct = sort()
        np.testing.assert_array_equal(found[: len(wanted)], wanted)
    assert distinct == len(rows)
    before = table[rows], state[rows]
    backward(**given)
    ours = table[rows], state[rows]
    table[rows], state[rows] = before
    write()
    for found, wanted in zip((table[rows], state[rows]), ours, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    forward(table=table, i=i, out={forward.graph.output_names[0]: out}), read()
    np.testing.assert_allclose(out, again, rtol=1e-4, atol=1e-4)
    return {
        "forward": {
            "gradc": lambda: forward(table=table, i=i, out={forward.graph.output_names[0]: out}),
            "floor": read,
        },
        "backward": {"gradc": lambda: backward(**given), "floor": write, "sorted": sort_and_write},
    }


def record(law: str, rows: int, width: int, threads: int) -> dict[str, Any]:
    i = draw(law, rows)
    distinct = len(np.unique(i))
    with tempfile.TemporaryDirectory() as folder:
        if 4 * rows * width > IN_MEMORY:
            made = lambda name, shape: np.memmap(Path(folder) / name, np.float32, "w+", shape=shape)
        else:
            made = lambda name, shape: np.zeros(shape, np.float32)
        table, state = made("table", (rows, width)), made("state", (rows,))
        table[np.unique(i)] = 1  # these rows exist
        pool.set_num_threads(threads)
        us = {
            what: {n: s * 1e6 for n, s in least(pair, ROUNDS, SECONDS).items()}
            for what, pair in calls(table, state, i).items()
        }
        file = isinstance(table, np.memmap)
        del table, state
    moved = {"forward": 4 * width * i.size, "backward": 4 * width * (2 * distinct + i.size)}
    return {
        "law": law,
        "rows": rows,
        "width": width,
        "threads": threads,
        "distinct": distinct,
        "file": file,
        "us": {what: {name: round(t, 1) for name, t in pair.items()} for what, pair in us.items()},
        "share": {what: round(pair["floor"] / pair["gradc"], 3) for what, pair in us.items()},
        "sorted": round(us["backward"]["floor"] / us["backward"]["sorted"], 3),
        "floor GB/s": {what: round(moved[what] / us[what]["floor"] / 1e3, 1) for what in us},
    }


def line(r: dict[str, Any]) -> str:
    cells = [f"{r['law']}, {r['rows']} x {r['width']}" + (", a file" if r["file"] else ""), str(r["distinct"])]
    for what in GOALS:
        us = r["us"][what]
        cells += [f"{us['gradc']:.0f}", f"{us['floor']:.0f}", f"{r['share'][what]:.0%}"]
    cells.append(f"{r['sorted']:.0%}")
    return f"{cells[0]:<36}" + "".join(f"{cell:>10}" for cell in cells[1:])


def save(record: dict[str, Any]) -> None:
    """Puts a record in the place of that of its case in this processor's file."""
    path = RESULTS / f"lookups-{words_of(processor())}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["lookups"] if path.exists() else []
    case = operator.itemgetter("threads", "law", "width", "rows")
    records = sorted([*(r for r in known if case(r) != case(record)), record], key=case)
    about = {"machine": machine(record["threads"]), "goals": GOALS}
    path.write_text(one_a_line(about, "lookups", records), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write the records to benchmarks/results")
    given = parser.parse_args()
    titles = ("distinct", *(f"{what[:4]}. {x}" for what in GOALS for x in ("us", "floor", "share")), "sorted")
    print(f"{'indices, table':<36}" + "".join(f"{t:>10}" for t in titles))
    for law in ("uniform", "zipf"):
        for width in given.widths:
            for rows in given.rows:
                print(line(r := record(law, rows, width, given.threads)), flush=True)
                if given.save:
                    save(r)
    print("goals: " + ", ".join(f"{what} {goal:.0%}" for what, goal in GOALS.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
