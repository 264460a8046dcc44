"""Attention on tensor cores as one text of CUDA, ``attention_tiles.cu``: for cuda-sim and for NVRTC."""

from __future__ import annotations

from pathlib import Path

from gradc.codegen.text import standalone

_FUNCTIONS = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
_GRADIENT = "const u16 *q, const u16 *k, const u16 *v, const u16 *dy, const f32 *lse, const f32 *delta"
_ENTRIES = """
extern "C" __global__ void __launch_bounds__({threads}{resident}) forward{suffix}(
    const u16 *q, const u16 *k, const u16 *v, u16 *y, f32 *lse, int S, f32 scale) {{
  extern __shared__ __align__(16) u16 shared[];
  attention<{bm}, {bn}, {d}, {causal}>(q, k, v, y, lse, S, scale, shared);
}}
extern "C" __global__ void __launch_bounds__({threads}) columns{suffix}(
    {gradient}, u16 *dk, u16 *dv, int S, f32 scale, f32 slope) {{
  extern __shared__ __align__(16) u16 shared[];
  gradients_of_columns<{rows}, {bm}, {d}, {causal}>(q, k, v, dy, lse, delta, dk, dv, S, scale, slope, shared);
}}
extern "C" __global__ void __launch_bounds__({threads}) rows{suffix}(
    {gradient}, u16 *dq, int S, f32 scale, f32 slope) {{
  extern __shared__ __align__(16) u16 shared[];
  gradients_of_rows<{bm}, {bn}, {d}, {causal}>(q, k, v, dy, lse, delta, dq, S, scale, slope, shared);
}}
"""


def with_headers(text: str) -> str:
    """A text after the headers that it needs, complete for NVRTC and for cuda-sim."""
    return f"{standalone('cuda/math.h')}\n{standalone('cuda/tensor_cores.h')}\n{text}"


def entries(
    bm: int, bn: int, d: int, causal: bool, suffix: str = "", rows: int | None = None, resident: int = 0
) -> str:
    """Kernels ``forward``, ``columns`` (dk, dv) and ``rows`` (dq) with blocks of ``bm`` rows and ``bn`` columns; of
    ``columns``, of ``bm`` columns and ``rows`` rows.

    :param resident: blocks of ``forward`` that a multiprocessor is to hold.
    """
    return _ENTRIES.format(
        bm=bm,
        bn=bn,
        d=d,
        rows=rows or bn,
        causal=str(causal).lower(),
        suffix=suffix,
        threads=2 * bm,
        resident=f", {resident}" if resident else "",
        gradient=_GRADIENT,
    )


def attention(*made: str) -> str:
    """The whole text with these entries."""
    return with_headers(_FUNCTIONS + "".join(made))


def shared_bytes(kernel: str, bm: int, bn: int, d: int, rows: int | None = None) -> int:
    """Dynamic shared memory of one of them."""
    if kernel == "columns":
        return 2 * (2 * bm + 4 * (rows or bn)) * d + 16 * (rows or bn)
    return 2 * ((1 if kernel == "forward" else 2) * bm + 4 * bn) * d
