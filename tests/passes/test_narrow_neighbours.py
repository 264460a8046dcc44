"""Weights that a kernel decodes for a product, and the gradients of their scales: a block of rows after another, and no
array of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import ops
from gradc.ir.program_text import parse_program
from gradc.passes.row_blocking.block_rows import block_rows
from gradc.runtime.executable import Executable

torch = pytest.importorskip("torch")

ROWS, COLUMNS, GROUP = 1000, 512, 64
GROUPS = COLUMNS // GROUP
NF4 = torch.tensor(  # Dettmers et al. 2023 (QLoRA), appendix E
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
).double()


@dataclass(frozen=True)
class Format:
    """:param types: of what weights are stored as; f32 parts learn.  :param decode: by ops, :param wanted: by torch."""

    types: Mapping[str, str]
    decode: Callable[..., Any]
    wanted: Callable[..., Any]

    @property
    def learn(self) -> list[str]:
        return [name for name, type_ in self.types.items() if type_.startswith("f32")]


def _by_group(x):
    return x.repeat_interleave(GROUP, 1)


def _nibbles(packed):
    return torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _double(codes, scale, step, mean):
    return ops.dequantize(scale, step, block=(ROWS, GROUPS)) + mean


FORMATS = {
    "int4 with zero points": Format(
        {"codes": f"u4[{ROWS},{COLUMNS}]", "scale": f"f32[{ROWS},{GROUPS}]", "zero": f"f32[{ROWS},{GROUPS}]"},
        lambda codes, scale, zero: ops.dequantize(codes, scale, zero, block=(1, GROUP)),
        lambda codes, scale, zero: (codes - _by_group(zero)) * _by_group(scale),
    ),
    "uint8 with a zero point for each row": Format(
        {"codes": f"u8[{ROWS},{COLUMNS}]", "scale": f"f32[{ROWS},1]", "zero": f"f32[{ROWS},1]"},
        lambda codes, scale, zero: ops.dequantize(codes, scale, zero, block=(1, COLUMNS)),
        lambda codes, scale, zero: (codes - zero) * scale,
    ),
    "nf4": Format(
        {"codes": f"u8[{ROWS},{COLUMNS // 2}]", "scale": f"f32[{ROWS},{GROUPS}]"},
        lambda codes, scale: ops.dequantize_nf4(codes, scale, block=(1, GROUP)),
        lambda codes, scale: NF4[_nibbles(codes.long())] * _by_group(scale),
    ),
    "nf4 with quantised scales": Format(
        {
            "codes": f"u8[{ROWS},{COLUMNS // 2}]",
            "scale": f"i8[{ROWS},{GROUPS}]",
            "step": "f32[1,1]",
            "mean": "f32[1,1]",
        },
        lambda codes, scale, step, mean: ops.dequantize_nf4(codes, _double(codes, scale, step, mean), block=(1, GROUP)),
        lambda codes, scale, step, mean: NF4[_nibbles(codes.long())] * _by_group(scale * step + mean),
    ),
    "mxfp4": Format(
        {"codes": f"f4e2m1[{ROWS},{COLUMNS}]", "scale": f"e8m0[{ROWS},{COLUMNS // 32}]"},
        lambda codes, scale: ops.dequantize(codes, scale, block=(1, 32)),
        lambda codes, scale: codes * scale.repeat_interleave(32, 1),
    ),
}
DTYPES = {"u4": ml_dtypes.uint4, "f4e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu}


def _drawn(name: str, type_: str, rng: np.random.Generator) -> np.ndarray:
    dtype, shape = type_.split("[")[0], tuple(map(int, type_.split("[")[1][:-1].split(",")))
    if dtype == "f32":
        return (rng.integers(0, 15, shape) if name == "zero" else rng.uniform(0.01, 0.02, shape)).astype(np.float32)
    if dtype == "e8m0":
        return (2.0 ** rng.integers(-7, -3, shape)).astype(DTYPES[dtype])
    low, high = {"u4": (0, 16), "u8": (0, 256), "i8": (-8, 8), "f4e2m1": (-6, 7)}[dtype]
    return rng.integers(low, high, shape).astype(DTYPES.get(dtype, {"u8": "u1", "i8": "i1"}.get(dtype)))


@pytest.mark.parametrize("rows", ("R", 1, 5))
@pytest.mark.parametrize("name", FORMATS)
def test_no_array_of_all_weights_and_torchs_values(name: str, rows: str | int) -> None:
    form = FORMATS[name]
    graph = gradc.trace(
        lambda x, **parts: ops.linear(x, form.decode(**parts)), x=f"f32[{rows},{COLUMNS}]", **form.types
    )
    module = gradc.compile(graph, wrt=["x", *form.learn], target="cpu")
    for executable in module.executables.values():
        program = executable.program
        assert program.loops
        for buffer in program.of_kind("temp"):
            assert str(buffer.type).partition("[")[2] != f"{ROWS},{COLUMNS}]", buffer
    rng = np.random.default_rng(0)
    parts = {part: _drawn(part, type_, rng) for part, type_ in form.types.items()}
    for count in (1, 5, 40) if rows == "R" else (rows,):
        x, dy = (rng.standard_normal((count, size)).astype(np.float32) for size in (COLUMNS, ROWS))
        y, residuals = module.forward(x=x, **parts)
        got = module.backward(residuals, dy)
        leaves = {n: torch.from_numpy(np.asarray(a, np.float64)) for n, a in {"x": x, **parts}.items()}
        for leaf in got:
            leaves[leaf].requires_grad_()
        wanted = leaves["x"] @ form.wanted(**{n: a for n, a in leaves.items() if n != "x"}).mT
        gradients = torch.autograd.grad(wanted, [leaves[n] for n in got], torch.from_numpy(dy).double())
        for what, a, b in [("y", y, wanted), *((n, got[n], g) for n, g in zip(got, gradients, strict=True))]:
            exact = b.detach().numpy()
            np.testing.assert_allclose(a, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max(), err_msg=f"{name} {what}")


SCALED = """program @scaled {{
  input x: f32[{x}]
  input codes: i8[{codes}]
  input scale: f32[{scale}]
  output y: f32[M,N]
  call @matmul axes(m: M, n: N, k: K) y[m, n] <- matmul {operands}
  return y=y
}}"""
DENSE = """program @dense {{
  input x: f32[{x}]
  input w: f32[{codes}]
  output y: f32[M,N]
  call @matmul axes(m: M, n: N, k: K) y[m, n] <- matmul {operands}
  return y=y
}}"""


@given(
    sizes=st.tuples(*[st.integers(1, 70)] * 3),
    group=st.sampled_from((1, 2, 3, 16, 200)),
    layout=st.sampled_from(("nk", "kn")),
    along=st.sampled_from(("n", "k", "both", "none")),
    left=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_codes_and_scales_are_read_as_they_lie_and_give_the_bits_of_their_floats(
    sizes: tuple[int, int, int], group: int, layout: str, along: str, left: bool, seed: int
) -> None:
    """Where an operand is converted and multiplied as it is packed, every bit is that of the operand in f32."""
    rows, columns, inner = sizes
    extent = {"n": columns, "k": inner, "m": rows}
    if left:  # the scaled operand has the rows
        layout, along = layout.replace("n", "m"), along.replace("n", "m") if along != "none" else along
    axes = [a for a in layout if a in along or along == "both"] if along != "none" else []
    shape = [extent[a] for a in layout]
    counts = [-(-extent[a] // group) if a in axes else 1 for a in layout]
    index = ", ".join(a if a in axes else "0" for a in layout)
    per = f" per ({', '.join(f'{a}: {group}' for a in axes)})" if axes else ""
    scaled = f"codes[{', '.join(layout)}] * scale[{index}]{per}"
    other = "x[k, n]" if left else "x[m, k]"
    plain = f"w[{', '.join(layout)}]"
    x_shape = (inner, columns) if left else (rows, inner)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(x_shape).astype(np.float32)
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    scale = rng.standard_normal(counts).astype(np.float32)
    whole = scale
    for axis, name in enumerate(layout):
        if name in axes:
            whole = whole.repeat(group, axis).take(range(extent[name]), axis)
    text = {"x": ",".join(map(str, x_shape)), "codes": ",".join(map(str, shape)), "scale": ",".join(map(str, counts))}

    def run(form: str, operand: str, **arrays: np.ndarray) -> np.ndarray:
        operands = f"{operand}, {other}" if left else f"{other}, {operand}"
        source = form.format(**text, operands=operands)
        for name, size in (("M", rows), ("N", columns), ("K", inner)):
            source = (
                source.replace(f"{name}]", f"{size}]").replace(f"{name},", f"{size},").replace(f": {name}", f": {size}")
            )
        return Executable(parse_program(source), "cpu")(**arrays)["y"]

    got = run(SCALED, scaled, x=x, codes=codes, scale=scale)
    dense = run(DENSE, plain, x=x, w=codes.astype(np.float32) * whole)
    assert np.array_equal(got, dense)


REWRITTEN = """program @rewritten {{
  input x: f32[1000,300]
  input codes: i8[1000,300]
  input v: f32[300,1000]
  temp w: f32[1000,300]
  output y: f32[1000,1000]
  kernel @decode rows(i: 1000) cols(j: 300) {{
    %0 = load codes[i, j] : i8
    %1 = cast %0 {{dtype=f32}} : f32
    store w[i, j] <- %1 : f32
  }}
  {0}
  {1}
  return y=y
}}"""
BY_COLUMNS = "call @columns axes(m: 1000, n: 1000, k: 300) y[m, n] <- matmul x[m, k], w[n, k]"
BY_ROWS = "call @rows axes(m: 1000, n: 1000, k: 300) y[m, n] <- matmul w[m, k], v[k, n]"


@pytest.mark.parametrize("calls", ((BY_COLUMNS, BY_ROWS), (BY_ROWS, BY_COLUMNS)))
def test_of_two_products_that_write_one_result_the_last_one_stays(calls: tuple[str, str]) -> None:
    """Blocks of columns of the one are no blocks of rows of the other; products of whole numbers are exact."""
    program = parse_program(REWRITTEN.format(*calls))
    rng = np.random.default_rng(0)
    x, codes, v = (rng.integers(-4, 5, shape) for shape in ((1000, 300), (1000, 300), (300, 1000)))
    wanted = codes @ v if calls[1] is BY_ROWS else x @ codes.T
    got = Executable(block_rows(program), "cpu")(
        x=x.astype(np.float32), codes=codes.astype(np.int8), v=v.astype(np.float32)
    )
    assert np.array_equal(got["y"], wanted)
