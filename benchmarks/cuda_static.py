"""docs/cuda_static.md: what the machine code of the GPU cases says, and the time that a model predicts; without a GPU.

    python -m benchmarks.cuda_static [--check] [--out FOLDER] [--json FILE] [CASE ...]

Nothing is executed: each case is compiled once and read back (needs ``gradc[nvrtc,nvdisasm]``).  Without names it runs
all cases and writes the page and benchmarks/results/cuda_static.json; ``--check`` writes nothing and says whether these
are what the code gives; with names it prints the rows of these cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gradc
from gradc import ops
from gradc.analysis.strategies import ATOMIC, Strategy
from gradc.inspect.static import Direction, directions

from .gpu_cases import all_cases
from .network_cases import block_case

ARCH = "sm_90"
ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = "docs/cuda_static.md", "benchmarks/results/cuda_static.json"


@dataclass(frozen=True)
class Static:
    """A case of the page.

    :param review: the shares of the floor, forward and backward, that a review by hand predicts; None: it has none.
    """

    id: str
    what: str
    function: Callable[..., Any]
    types: Mapping[str, str]
    wrt: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    review: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Row:
    """A direction of a case.

    :param instructions: of threads, per element of its largest array.  :param kernel_bytes: over the floor.
    :param loads, stores: bytes per thread of the accesses that move most, in the launch that takes longest.
    :param registers, resident: of that launch; resident in blocks per multiprocessor.
    :param launches: of ours, :param products: and calls of a library.
    :param microseconds: predicted, of both, :param in_products: and of the library's products.
    :param host: microseconds that they take the host to start.
    :param share: of the peak bandwidth that the floor's bytes are.  :param workspace: MB of it.
    """

    instructions: float
    kernel_bytes: float
    loads: int
    stores: int
    registers: int
    threads: int
    resident: int
    spills: int
    launches: int
    products: int
    microseconds: float
    in_products: float
    host: float
    workspace: float
    share: float | None
    bound: str
    finished: bool
    review: int | None


REVIEWED: Mapping[str, tuple[int | None, int | None]] = {
    "E2": (None, 78),
    "E2f": (None, 7),
    "N1": (34, 28),
    "S1": (31, 30),
    "C1": (29, 60),
    "P1": (68, 80),
    "B1": (None, 85),
    "G1": (9, 3),
    "G3": (75, 40),
    "G5": (10, 2),
    "E12": (None, 77),
    "Q2": (None, 45),
}
"""Of the GPU cases; 2.5 % is given as 2."""


def _layer_norm(columns: int) -> Callable[..., Any]:
    return lambda x, g, b: ops.layer_norm(x, (columns,), g, b)


def _rms_norm(columns: int) -> Callable[..., Any]:
    return lambda x, g: ops.rms_norm(x, (columns,), g, eps=1e-6)


def _embedding(tokens: Any, weight: Any) -> Any:
    return ops.embedding(tokens, weight)


def _layer_types(dtype: str, rows: int, columns: int) -> dict[str, str]:
    return {"x": f"{dtype}[{rows},{columns}]", "g": f"{dtype}[{columns}]", "b": f"{dtype}[{columns}]"}


def _rms_types(dtype: str, rows: int, columns: int) -> dict[str, str]:
    return {"x": f"{dtype}[{rows},{columns}]", "g": f"{dtype}[{columns}]"}


def _table(dtype: str, rows: int, table: int, columns: int) -> dict[str, str]:
    return {"tokens": f"i64[{rows}]", "weight": f"{dtype}[{table},{columns}]"}


def _forced(strategy: Strategy) -> dict[str, Any]:
    return {"reductions": {"*": strategy.name}}


def _around_attention(x: Any, mixed: Any, **p: Any) -> Any:
    """A block of GPT-2 whose attention is somebody else's: what it reads, and what is made of its result."""
    width = x.shape[-1]
    h = ops.layer_norm(x, (width,), p["ln1"], p["ln1_bias"])
    q, k, v = (ops.linear(h, p[name], p[f"{name}_bias"]) for name in ("query", "key", "value"))
    x = x + ops.linear(mixed, p["mix"], p["mix_bias"])
    h = ops.layer_norm(x, (width,), p["ln2"], p["ln2_bias"])
    up = ops.gelu(ops.linear(h, p["up"], p["up_bias"]), approximate="tanh")
    return q, k, v, x + ops.linear(up, p["down"], p["down_bias"])


def _contrastive(x: Any, w: Any, scale: Any) -> Any:
    """Row i of one belongs to row i of the other, and the other way round."""
    logits, t = (x @ w.T).astype("f32") * scale, ops.iota(shape=(x.shape[0],))
    return (ops.cross_entropy(logits, t) + ops.cross_entropy(logits.T, t)) * 0.5


def _blocks() -> tuple[Static, ...]:
    block = block_case("", "bf16", 8, 1024)
    around = {**block.types, "mixed": block.types["x"]}
    return (
        Static("GPT2", "block of GPT-2, 8 x 1024, bf16", block.ours, block.types, tuple(block.wrt)),
        Static("GPT2r", "the same around attention", _around_attention, around, (*block.wrt, "mixed")),
        Static(
            "LCE",
            "loss of 8192 rows over 50257 words, bf16",
            lambda x, w, t: ops.linear_cross_entropy(x, w, t),
            {"x": "bf16[8192,768]", "w": "bf16[50257,768]", "t": "i64[8192]"},
            ("x", "w"),
        ),
        Static(
            "LCE128",
            "its value alone, of 128 features",
            lambda x, w, t: ops.linear_cross_entropy(x, w, t),
            {"x": "bf16[8192,128]", "w": "bf16[50257,128]", "t": "i64[8192]"},
        ),
        Static(
            "CLIP",
            "contrastive loss of 32768 pairs, bf16",
            _contrastive,
            {"x": "bf16[32768,512]", "w": "bf16[32768,512]", "scale": "f32[]"},
            ("x", "w", "scale"),
        ),
    )


def _int4_types(rows: int, outputs: int, features: int) -> dict[str, str]:
    groups = features // 128
    codes = {"q": f"u8[{outputs},{features // 2}]", "s": f"f16[{outputs},{groups}]", "z": f"u8[{outputs},{groups}]"}
    return {"x": f"bf16[{rows},{features}]", **codes}


def _int4_linear(x: Any, q: Any, s: Any, z: Any) -> Any:
    codes = ops.unpack(q, dtype="u4", axis=1)
    return ops.linear(x, ops.dequantize(codes, s, z, block=(1, 128), out_dtype="bf16"))


def _int8_linear(x: Any, q: Any, s: Any) -> Any:
    return ops.linear(x, ops.dequantize(q, s, block=(1, q.shape[1]), out_dtype="bf16"))


def _int8_dx(x: Any, q: Any, s: Any) -> Any:
    return x @ ops.dequantize(q, s, block=(1, q.shape[1]), out_dtype="bf16")


def _quantized() -> tuple[Static, ...]:
    """Linears of few rows, bound by the bytes of their codes."""
    int8 = {"q": "i8[4096,4096]", "s": "f32[4096,1]"}
    named = {1: "a row", 16: "16 rows"}
    found = [
        Static(f"W4A16x{rows}", f"int4 linear of {what}, 4096 x 4096", _int4_linear, _int4_types(rows, 4096, 4096))
        for rows, what in named.items()
    ]
    wide = _int4_types(16, 28672, 8192)
    found += [Static("W4A16L", "int4 linear of 16 rows, 28672 x 8192", _int4_linear, wide)]
    for rows, what in named.items():
        types = {"x": f"bf16[{rows},4096]", **int8}
        found += [Static(f"W8A16x{rows}", f"int8 linear of {what}, 4096 x 4096", _int8_linear, types)]
    return (*found, Static("W8dX", "dX of an int8 linear of 16 rows", _int8_dx, {"x": "bf16[16,4096]", **int8}))


NORM = ("x", "g", "b")
EXTRA = (
    Static("LN1024", "layer norm, bf16", _layer_norm(1024), _layer_types("bf16", 65536, 1024), NORM, {}, (17, 22)),
    Static("LN8192", "layer norm, bf16", _layer_norm(8192), _layer_types("bf16", 8192, 8192), NORM, {}, (42, None)),
    Static("LN4096f", "layer norm, f32", _layer_norm(4096), _layer_types("f32", 16384, 4096), NORM, {}, (70, None)),
    Static("RMS4096", "rms norm, bf16", _rms_norm(4096), _rms_types("bf16", 16384, 4096), ("x", "g"), {}, (75, 48)),
    Static("RMS128", "rms norm, bf16", _rms_norm(128), _rms_types("bf16", 524288, 128), ("x", "g"), {}, (None, 27)),
    Static(
        "GELUb",
        "GELU + bias, bf16",
        lambda x, b: ops.gelu(x + b),
        {"x": "bf16[16384,16384]", "b": "bf16[16384]"},
        ("x", "b"),
        {},
        (60, 38),
    ),
    Static("SUM64", "column sums", lambda x: ops.sum(x, axes=(0,)), {"x": "f32[1048576,64]"}, (), {}, (55, None)),
    Static("SUM4", "column sums", lambda x: ops.sum(x, axes=(0,)), {"x": "f32[1048576,4]"}, (), {}, (1, None)),
    Static("SUMall", "a sum over all", lambda x: ops.sum(x), {"x": "f32[4,16777216]"}, (), {}, (1, None)),
    Static(
        "SOFT1",
        "softmax over axis 1",
        lambda x: ops.softmax(x, axis=1),
        {"x": "f32[16,1024,4096]"},
        ("x",),
        {},
        (8, None),
    ),
    Static("TRANS", "2-D transpose", lambda x: ops.transpose(x, (1, 0)), {"x": "f32[8192,8192]"}, (), {}, (35, None)),
    Static(
        "G1h",
        "grid_sample, bf16, channels last",
        lambda x, grid: ops.grid_sample(x, grid, mode="bilinear"),
        {"x": "bf16[42,128,120,160]", "grid": "bf16[42,100,100,2]"},
        (),
        {"layout": {"x": "NHWC", "y": "NHWC"}},
        (25, None),
    ),
    Static(
        "E1M",
        "embedding, f32, V = N = 1M",
        _embedding,
        _table("f32", 1 << 20, 1 << 20, 64),
        ("weight",),
        {},
        (None, 64),
    ),
    Static("E16k", "embedding, f32, D = 64", _embedding, _table("f32", 16384, 32000, 64), ("weight",), {}, (None, 15)),
    Static(
        "E2a",
        "embedding, f32, atomic",
        _embedding,
        _table("f32", 16384, 128256, 512),
        ("weight",),
        _forced(ATOMIC),
        (None, 85),
    ),
    Static(
        "Q2g",
        "learnable scale per group of 64 of an int8 embedding",
        lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale, block=(1, 64))),
        {"tokens": "i64[65536]", "q": "i8[128256,512]", "scale": "f32[128256,8]"},
        ("scale",),
        {},
        (None, 40),
    ),
)


def cases() -> dict[str, Static]:
    """The GPU cases at their own sizes, and those that a review by hand has beside them."""
    found = {}
    for case in all_cases().values():
        sizes = case.at(False)
        found[case.id] = Static(
            case.id,
            case.what,
            lambda case=case, sizes=sizes, **inputs: case.ours(sizes, **inputs),
            case.concrete(False),
            case.wrt,
            case.options,
            REVIEWED.get(case.id, (None, None)),
        )
    return found | {case.id: case for case in (*EXTRA, *_blocks(), *_quantized())}


# -- one case ----------------------------------------------------------------------------------------------------------


def rows_of(case: Static) -> dict[str, Row]:
    """A row of each direction that launches anything."""
    graph = gradc.trace(case.function, **case.types)
    module = gradc.compile(graph, wrt=list(case.wrt), target="cuda", arch=ARCH, **case.options)
    reviews = dict(zip(("forward", "backward"), case.review, strict=True))
    return {
        name: _row(direction, reviews.get(name))
        for name, direction in directions(module, {}).items()
        if direction.launches or direction.products
    }


def _row(d: Direction, review: int | None) -> Row:
    launch, longest = max(d.launches, key=lambda pair: pair[1].seconds, default=(None, None))
    resources = d.executable.binary.kernels
    shapes = [b.type.concrete({}) for b in d.executable.program.buffers if b.kind in ("input", "output")]
    elements = max(prod(shape) for shape in shapes)
    used = {launch.function for launch, _ in d.launches}
    assert d.bound is not None
    return Row(
        instructions=_digits(sum(p.instructions for _, p in d.launches) / elements),
        kernel_bytes=_digits(d.kernel_bytes / d.floor if d.floor else 0.0),
        loads=longest.load_width if longest else 0,
        stores=longest.store_width if longest else 0,
        registers=resources[launch.function].registers if launch else 0,
        threads=launch.threads if launch else 0,
        resident=longest.resident if longest else 0,
        spills=sum(resources[name].spill_stores + resources[name].spill_loads for name in used),
        launches=len(d.launches),
        products=d.calls,
        microseconds=_digits(d.seconds * 1e6),
        in_products=_digits(d.product_seconds * 1e6),
        host=_digits(d.host_seconds * 1e6),
        workspace=_digits(d.workspace / 1e6),
        share=None if d.share is None else _digits(100 * d.share),
        bound=d.bound,
        finished=all(p.finished for _, p in d.launches),
        review=review,
    )


def _digits(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")


# -- the page ----------------------------------------------------------------------------------------------------------

HEAD = """# CUDA without a GPU: instructions, bytes, and a predicted time

Written by `python -m benchmarks.cuda_static` from the machine code for sm_90; do not edit. **Only the column
*measured* is.** Each kernel is compiled, disassembled and followed thread by thread (`gradc/inspect/machine.py`); the
time is the model's of `gradc/inspect/predicted.py` with the constants of the H100 in
`gradc/targets/devices.py`. None of these kernels uses tensor cores itself; how the model does on some that do, and
what an H200 took for them, is in [gpu.md](gpu.md#tensor-cores).

- *instructions*: of threads, per element of the direction's largest array, in all of its launches;
- *bytes*: what its kernels say that they move, over what must move (each input once, each output once);
- *load, store*: bytes per thread of the accesses that move most, in the launch that takes longest, whose registers,
  threads per block and resident blocks per multiprocessor stand beside them; *spills* are bytes of all its kernels;
- *launches*: of ours, and (+n) calls of cuBLAS; *us*: predicted, of both, *products*: of these, by rates that an H200
  was measured with (`gradc/codegen/cuda/library_time.py`: `gpu-nvidia-h200-2026-11-28-tiles.json`);
  with > and <, a loop's end depends on data, and what was followed of it is all that counts;
- *share*: how much of *us* the floor's bytes take at 3.35 TB/s; *host*: us that launches, calls and memory of results
  take the host to start (8, 13 and 5 us, `gradc/targets/gpu.py`); *MB*: of the workspace;
- *measured*: us of that direction on an H100, by the code of that day: `benchmarks/results/{source}`;
- *review*: the share that a review by hand predicted, at a commit before the first of this page;
- *before*: the share at the last commit of this page, where it is another.

"""
COLUMNS = tuple(
    "case what direction instructions bytes load store registers threads blocks spills launches us products host MB"
    " measured bound share before review".split()
)
HELD = """
Held against the device: of {count} directions that were measured, {near} took within 10 % of the prediction and {fair}
within 30 %. Furthest from it: {far}.
"""
NOTES = """
Where the review and the model disagree, the reasons are these. The review left out the loop that looks at the error
flags of earlier checks, and weighed instructions, bytes and launches only. The model counts that loop, transfers
between L2 and the multiprocessors in sectors of 32 bytes, atomics by the rates of the device's record, the fewer issue
slots of a grid with fewer blocks than multiprocessors, and a warp's chain of dependent instructions. Indices are taken
to be spread over the whole table whatever the case draws, and a loop whose end depends on data is followed once. Where
a block sorts its rows by few keys (E12), what guards the end of a key is passed as often as keys end: for 155 of 2,560
rows. Where rows are masked, too, how many a block has is data: its loop over them is not followed, and the time is
too short. `?` is a direction of which a thread could not be followed to its end; its instructions mean nothing.

Where they are furthest apart, counted by hand:

- a transpose (TRANS): the review saw loads 4096 elements apart, a sector of 32 bytes for each 4. Tiles are turned in
  shared memory since: a warp's load and its store are four whole sectors each, and 2 x 268 MB take 179 us at 3 TB/s.
- atomics (E2a): the review counted the floor's bytes, 296 MB, which take 99 us. Beside them are the 33.5 MB of the sums
  that the adds go to (11 us) and three launches (9 us), one of which has nothing but the check of the indices.
- sums in fixed point (E2f): a sum of 8 bytes for each element of the result is cleared, read, and made into 4 bytes:
  20 bytes where atomics clear 4. Less is to move only where it is known which rows of the table nothing hits.
- grid_sample (G1, G4, G5, G6): lanes pass on what they add to a sum of the next lane's, so that on a smooth grid the 2
  or 4 taps of a row are about one add. Places that follow from data are not known to the model: it takes grids to be
  smooth. Where no two neighbours share a sum, each tap is an add: by the same model about 230 us (G1), 760 (G4), 340
  (G5), 960 (G6); and where places are random, each lane has a sector of its own, four times as many.
- groups of scales (Q2g): the rows kernel moves the floor's bytes in 57 us. The sort of the indices before it and what
  finishes the result are ten launches one after another, whose own time is 30 us.
"""


def measured() -> tuple[str, dict[tuple[str, str], float]]:
    """The newest results of an H100: their file's name, and us by case and direction."""
    *_, path = sorted((ROOT / RESULTS).parent.glob("gpu-nvidia-h100*-[0-9][0-9].json"))
    found = json.loads(path.read_text())["cases"]
    direction = {name: "backward" if case.wrt else "forward" for name, case in cases().items()}
    return path.name, {(n, direction[n]): 1e6 * c["ours"]["median"] for n, c in found.items() if "ours" in c}


def page(rows: Mapping[str, Mapping[str, Row]], before: Mapping[str, Any]) -> str:
    """The text of docs/cuda_static.md."""
    titles = {name: case.what for name, case in cases().items()}
    source, times = measured()
    lines = [
        _line(name, titles[name], d, row, before.get(name, {}).get(d), times.get((name, d)))
        for name, found in rows.items()
        for d, row in found.items()
    ]
    rule = "|" + "|".join("---" if c in ("case", "what", "direction", "bound") else "---:" for c in COLUMNS) + "|"
    lines = [f"| {' | '.join(COLUMNS)} |", rule, *lines]
    return HEAD.format(source=source) + "\n".join(lines) + "\n" + _held(rows, times) + NOTES


def _held(rows: Mapping[str, Mapping[str, Row]], times: Mapping[tuple[str, str], float]) -> str:
    """How far measured times are from predicted ones."""
    over = {
        name: times[name, d] / row.microseconds
        for name, found in rows.items()
        for d, row in found.items()
        if (name, d) in times
    }
    far = ", ".join(f"{name} ({ratio:.1f} times)" for name, ratio in over.items() if not 0.7 < ratio < 1.3)
    near, fair = (sum(abs(ratio - 1) <= most for ratio in over.values()) for most in (0.1, 0.3))
    return HELD.format(count=len(over), near=near, fair=fair, far=far)


def _line(
    name: str, what: str, direction: str, row: Row, before: Mapping[str, Any] | None, time: float | None = None
) -> str:
    changed = ""
    if before is not None and None not in (row.share, before["share"]) and before["share"] != row.share:
        changed = f"{before['share']:g} %"
    launches = f"{row.launches}+{row.products}" if row.products else f"{row.launches}"
    more, less = ("", "") if row.finished else ("> ", "< ")
    seconds, share = f"{more}{row.microseconds:g}", "" if row.share is None else f"{less}{row.share:g} %"
    cells = (
        *(name, what, direction, f"{row.instructions:g}", f"{row.kernel_bytes:g}x", row.loads, row.stores),
        *(
            row.registers,
            row.threads,
            row.resident,
            row.spills,
            launches,
            seconds,
            f"{row.in_products:g}" if row.products else "",
            f"{row.host:g}",
            f"{row.workspace:g}",
            "" if time is None else f"{time:.3g}",
            row.bound,
        ),
        *(share, changed, "" if row.review is None else f"{row.review} %"),
    )
    return f"| {' | '.join(map(str, cells))} |"


def committed() -> dict[str, Any]:
    """The results as they were last committed; none outside a repository."""
    done = subprocess.run(["git", "show", f"HEAD:{RESULTS}"], cwd=ROOT, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--check", action="store_true", help="say whether the results are what the code gives")
    parser.add_argument("--out", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args(arguments)
    known = cases()
    if unknown := [name for name in options.cases if name not in known]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    rows = {}
    for name in options.cases or known:
        rows[name] = rows_of(known[name])
        print(*(_line(name, known[name].what, d, row, None) for d, row in rows[name].items()), sep="\n", flush=True)
    made = {name: {d: asdict(row) for d, row in found.items()} for name, found in rows.items()}
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    before = committed()
    if options.check:
        stale = [name for name in made if made[name] != before.get(name)]
        print(f"other than committed: {', '.join(stale)}" if stale else "as committed")
        return int(bool(stale))
    if not options.cases:
        for place, text in ((PAGE, page(rows, before)), (RESULTS, json.dumps(made, indent=1) + "\n")):
            (options.out / place).parent.mkdir(parents=True, exist_ok=True)
            (options.out / place).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
