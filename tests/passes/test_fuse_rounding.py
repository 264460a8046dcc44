"""fuse_rounding: products of 16-bit operands that are rounded at once are 16 bits in memory, with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.kernel import Call, Kernel, Program
from gradc.ir.program_text import parse_program
from gradc.ir.types import DTYPES
from gradc.passes.program.fuse_rounding import fuse_rounding

TEXT = """program @twice {
  input a: bf16[5,4]
  input b: bf16[4,6]
  input bias: f32[6]
  temp t: f32[5,6]
  output y: f32[5,6]
  output z: bf16[6,5]
  call @matmul_5x6 axes(m: 5, n: 6, k: 4) t[m, n] <- matmul a[m, k], b[k, n]
  kernel @biased_000000 rows(i0: 5) cols(i1: 6) {
    phase
    %0 = load t[i0, i1] : f32
    %1 = cast %0 {dtype=bf16} : bf16
    %2 = cast %1 {dtype=f32} : f32
    %3 = load bias[i1] : f32
    %4 = add %2, %3 : f32
    store y[i0, i1] <- %4 : f32
  }
  kernel @turned_000000 rows(i0: 6) cols(i1: 5) {
    phase
    %0 = load t[i1, i0] : f32
    %1 = cast %0 {dtype=bf16} : bf16
    store z[i0, i1] <- %1 : bf16
  }
  return y=y, z=z
}"""
UNROUNDED = {
    "a reader does not round": ("%2 = cast %1 {dtype=f32} : f32", "%2 = mul %0, %0 : f32"),
    "a reader rounds to another dtype": ("%1 = cast %0 {dtype=bf16} : bf16", "%1 = cast %0 {dtype=f16} : f16"),
    "an output": ("temp t", "output t"),
    "an operand in f32": ("input b: bf16[4,6]", "input b: f32[4,6]"),
}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"a": ((5, 4), "bf16"), "b": ((4, 6), "bf16"), "bias": ((6,), "f32")}
    return {n: rng.standard_normal(shape).astype(DTYPES[dtype].np) for n, (shape, dtype) in sizes.items()}


def dtype_of_product(program: Program) -> str:
    (call,) = (step for step in program.steps if isinstance(step, Call))
    return program.buffer[call.out.buffer].type.dtype.name


def test_a_product_that_all_its_readers_round() -> None:
    program = parse_program(TEXT)
    made = fuse_rounding(program)
    assert dtype_of_product(made) == "bf16"
    assert [[s.op for s in kernel.body] for kernel in made.kernels] == [
        ["load", "cast", "load", "add", "store"],
        ["load", "store"],
    ]
    assert fuse_rounding(made) == made
    assert all(kernel.name.partition("_")[0] in ("biased", "turned") for kernel in made.kernels)
    before, after = interp.run(program, arrays()), interp.run(made, arrays())
    for name in ("y", "z"):
        assert np.array_equal(before[name].view(np.uint8), after[name].view(np.uint8)), name


@pytest.mark.parametrize("name", UNROUNDED)
def test_a_product_that_stays_wide(name: str) -> None:
    found, given = UNROUNDED[name]
    text = TEXT.replace(found, given, 1)
    text = text.replace("return ", "return t=t, ") if name == "an output" else text
    program = parse_program(text)
    assert fuse_rounding(program) == program and dtype_of_product(program) == "f32"


def pure(kernel: Kernel) -> bool:
    """Whether a kernel does nothing but convert and scale."""
    return {s.op for s in kernel.body} <= {"load", "store", "const", "cast", "mul", "div"}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_no_kernel_only_rounds_or_scales_a_product(dtype: str) -> None:
    """Attention and a feed-forward layer: constants stay before roundings, and the library rounds."""
    torch = pytest.importorskip("torch")
    names = {"x": "[7,16]", "wq": "[16,16]", "wk": "[16,16]", "wv": "[16,16]", "up": "[32,16]", "down": "[16,32]"}

    def block(lib: Any, gelu: Any, x: Any, wq: Any, wk: Any, wv: Any, up: Any, down: Any) -> Any:
        x = x + lib.scaled_dot_product_attention(x @ wq, x @ wk, x @ wv)
        return x + lib.linear(gelu(lib.linear(x, up)), down)

    types = {name: dtype + shape for name, shape in names.items()}
    graph = gradc.trace(lambda **given: block(ops, lambda h: ops.gelu(h, approximate="tanh"), **given), **types)
    module = gradc.compile(graph, list(names), target="cuda-sim")
    programs = [executable.program for executable in module.executables.values()]
    assert not [k.name for program in programs for k in program.kernels if pure(k)]

    rng = np.random.default_rng(0)
    given = {n: (rng.standard_normal(t.shape) / 4).astype(DTYPES[dtype].np) for n, t in graph_types(graph).items()}
    y, residuals = module.forward(**given)
    dy = rng.standard_normal(y.shape).astype(y.dtype)
    found = {**module.backward(residuals, dy), "y": y}

    def torchs(computed: Any) -> dict[str, np.ndarray]:
        leaves = {n: torch.tensor(a.astype(np.float64)).to(computed).requires_grad_() for n, a in given.items()}
        gelu = lambda h: torch.nn.functional.gelu(h, approximate="tanh")
        value = block(torch.nn.functional, gelu, **leaves)
        value.backward(torch.tensor(dy.astype(np.float64)).to(computed))
        return {
            n: x.detach().double().numpy() for n, x in {**{n: t.grad for n, t in leaves.items()}, "y": value}.items()
        }

    exact, theirs = torchs(torch.float64), torchs(torch.bfloat16 if dtype == "bf16" else torch.float16)
    for name, wanted in exact.items():
        ours, other = (np.sqrt(np.mean((x.astype(np.float64) - wanted) ** 2)) for x in (found[name], theirs[name]))
        assert ours <= 1.1 * other, (name, ours, other)


def graph_types(graph: gradc.Graph) -> dict[str, Any]:
    return {name: node.type for name, node in zip(graph.input_names, graph.inputs, strict=True)}
