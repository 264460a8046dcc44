"""What a call on a GPU does beside its program's kernels: adding results to what is there, packing arrays that lie in
another order, writing numbers to memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...ir.types import DTYPES, DType
from ..expr import carrier, loaded, stored, to_memory
from ..text import standalone

ADDED = ("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32")
"""What ``gradc_add_NAME`` adds; integers wrap."""
AXES = 8
"""Of an array that ``gradc_pack_BYTES`` packs, at most; axes that step alike are one."""
THREADS, BLOCKS = 256, 1 << 14
_ENTRY = f'extern "C" __global__ void __launch_bounds__({THREADS})'


def element(dtype: DType, family: str = "element") -> str:
    """A struct ``gradc_FAMILY_NAME``: how an element is stored, and what it is added and multiplied as."""
    total = carrier(dtype) if dtype.is_float else "u64" if dtype.bits == 64 else "u32"
    return f"""struct gradc_{family}_{dtype.name} {{
  typedef {stored(dtype)} stored;
  typedef {total} sum;
  static __device__ __forceinline__ sum load(stored x) {{ return (sum){loaded(dtype, "x")}; }}
  static __device__ __forceinline__ stored store(sum x) {{ return {to_memory(dtype, f"({carrier(dtype)})x")}; }}
}};
"""


@functools.cache
def support_text() -> str:
    """``gradc_add_NAME(to, from, count, flag, checks)`` and ``gradc_pack_BYTES(from, to, count, start, n1..n7,
    s0..s7)``, and ``gradc_numbers(cells, count, at0..at7, v0..v7)``.
    """
    names = ("math.h", "program.h", "pack.cu", "support.cu", "numbers.cu")
    parts = [standalone(f"cuda/{name}") for name in names]
    for name in ADDED:
        ctype = stored(DTYPES[name])
        declared = f"{ctype} *to, const {ctype} *from, i64 count, const u64 *flag, i64 site"
        parts.append(
            f"""{element(DTYPES[name])}{_ENTRY} gradc_add_{name}({declared}) {{
  gradc_add_elements<gradc_element_{name}>(to, from, count, flag, site);
}}"""
        )
    return "\n".join([*parts, *(packing("pack", size) for size in (1, 2, 4, 8))])


def packing(name: str, size: int) -> str:
    """The function that packs elements of so many bytes: ``gradc_pack_BYTES``, or a program's ``gradc_copy_BYTES``,
    which stops behind a check that has found something.
    """
    names = [*(f"n{i}" for i in range(1, AXES)), *(f"s{i}" for i in range(AXES))]
    declared = ", ".join(
        [f"const u{8 * size} *from, u{8 * size} *to, i64 count, i64 start", *(f"i64 {n}" for n in names)]
    )
    stops = "  if (gradc_stopped(flag, site)) return;\n" if name == "copy" else ""
    declared += ", const u64 *flag, i64 site" if stops else ""
    return f"""{_ENTRY} gradc_{name}_{size}({declared}) {{
{stops}  gradc_pack_elements(from, to, count, start, {", ".join(names)});
}}"""


def blocks(count: int) -> int:
    """Of a launch over so many elements."""
    return min(max(-(-count // THREADS), 1), BLOCKS)


def merged_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same elements in the same order with as few axes as they have."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * step:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps
