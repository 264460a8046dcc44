"""What the CUDA kernels of the standard cases take of a multiprocessor: ``python -m benchmarks.resources`` writes them
into docs/cuda.md.

NVRTC compiles without a GPU; nothing here is a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gradc
from gradc import ops

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
DTYPES = ("f32", "bf16")
CASES: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "layer norm": (
        lambda x, g, b: ops.layer_norm(x, (1024,), g, b),
        {"x": "F[N,1024]", "g": "F[1024]", "b": "F[1024]"},
        ["x", "g", "b"],
    ),
    "rms norm": (lambda x, g: ops.rms_norm(x, (4096,), g), {"x": "F[N,4096]", "g": "F[4096]"}, ["x", "g"]),
    "softmax": (lambda x: ops.softmax(x), {"x": "F[N,4096]"}, ["x"]),
    "gelu + bias": (lambda x, b: ops.gelu(x + b), {"x": "F[N,4096]", "b": "F[4096]"}, ["x", "b"]),
    "silu * b": (lambda a, b: ops.silu(a) * b, {"a": "F[N,4096]", "b": "F[N,4096]"}, ["a", "b"]),
    "cross entropy": (lambda x, t: ops.cross_entropy(x, t), {"x": "F[N,32000]", "t": "i64[N]"}, ["x"]),
    "embedding": (lambda i, w: ops.embedding(i, w, padding_idx=0), {"i": "i64[N]", "w": "F[V,512]"}, ["w"]),
    "int8 embedding, d.scale": (
        lambda i, q, s: ops.embedding(i, ops.dequantize(q, s, block=(1, 512))),
        {"i": "i64[N]", "q": "i8[V,512]", "s": "f32[V,1]"},
        ["s"],
    ),
    "grid sample": (lambda x, g: ops.grid_sample(x, g), {"x": "F[B,64,H,W]", "g": "F[B,h,w,2]"}, ["x", "g"]),
}
"""Name -> function, types (F is the case's float), inputs with a gradient."""


def module(name: str, dtype: str, arch: str) -> gradc.Module:
    """A case compiled for an architecture."""
    fn, types, wrt = CASES[name]
    return gradc.compile(
        gradc.trace(fn, **{n: t.replace("F[", f"{dtype}[") for n, t in types.items()}),
        wrt=wrt,
        target="cuda",
        arch=arch,
    )


def table() -> str:
    """The page from its second heading on."""
    lines = [
        "# What the CUDA kernels take",
        "",
        (
            "Registers of a thread, static shared memory of a block and spilled bytes of each function that NVRTC makes"
            " of the standard cases, written by"
        ),
        (
            "`python -m benchmarks.resources` on a machine without a GPU. `_rows` is the row program; `_key` before and"
            " `_finish` after it belong to a sort by"
        ),
        (
            "index, `_tree` adds up a hot row's pieces, `_fold` the partial results of chunks; `_partN` are the passes"
            " over few long rows. Functions of sorting itself"
        ),
        "are the same in every module and stand once.",
        "",
        f"| case | dtype | function | {' | '.join(ARCHITECTURES)} | shared |",
        f"|---|---|---|{'---:|' * len(ARCHITECTURES)}---:|",
    ]
    sorts: dict[str, list[Any]] = {}
    for name in CASES:
        for dtype in DTYPES:
            resources: dict[str, list[Any]] = {}
            for arch in ARCHITECTURES:
                for executable in module(name, dtype, arch).executables.values():
                    for function, r in executable.binary.kernels.items():
                        rows = sorts if function.startswith("gradc_sort") else resources
                        if len(rows.setdefault(function, [])) <= ARCHITECTURES.index(arch):
                            rows[function].append(r)
            lines += [_line(name, dtype, function, each) for function, each in sorted(resources.items())]
    lines += [_line("every sort", "", function, each) for function, each in sorted(sorts.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, dtype: str, function: str, each: list[Any]) -> str:
    cells = [
        f"{r.registers}{f' ({r.spill_stores + r.spill_loads} B spilled)' if r.spill_stores + r.spill_loads else ''}"
        for r in each
    ]
    return f"| {name} | {dtype} | `{function}` | {' | '.join(cells)} | {each[0].shared} |"


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "cuda.md"
    path.write_text(path.read_text().partition("# What the CUDA kernels take")[0] + table())
    sys.stdout.write(f"wrote {path.name}\n")
