"""narrow_products: products of 16-bit operands that are rounded at once are 16 bits in memory, with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.kernel import Call, Kernel, Loop, Program, alternatives
from gradc.ir.program_text import parse_program
from gradc.ir.types import DTYPES
from gradc.ir.verify import verify_program
from gradc.passes.program.fuse_copies import fuse_copies
from gradc.passes.program.narrow_products import narrow_products

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


def rounded(program: Program) -> Program:
    return fuse_copies(narrow_products(program))


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
    made = rounded(program)
    assert dtype_of_product(made) == "bf16"
    assert [[s.op for s in kernel.body] for kernel in made.kernels] == [
        ["load", "cast", "load", "add", "store"],
        ["load", "store"],
    ]
    assert rounded(made) == made
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
    assert rounded(program) == program and dtype_of_product(program) == "f32"


COPIED = """program @kept {
  input a: bf16[5,4]
  input b: bf16[4,6]
  temp t: f32[5,6]
  output kept: bf16[5,6]
  output y: f32[5,6]
  call @matmul_5x6 axes(m: 5, n: 6, k: 4) t[m, n] <- matmul a[m, k], b[k, n]
  kernel @kept_000000 rows(i0: 5) cols(i1: 6) {
    phase
    %0 = load t[i0, i1] : f32
    %1 = cast %0 {dtype=bf16} : bf16
    store kept[i0, i1] <- %1 : bf16
    %2 = cast %1 {dtype=f32} : f32
    %3 = exp %2 : f32
    store y[i0, i1] <- %3 : f32
  }
  return kept=kept, y=y
}"""


def test_a_rounded_product_that_is_kept_is_written_where_it_is_kept() -> None:
    program = parse_program(COPIED)
    made = rounded(program)
    (call,) = (step for step in made.steps if isinstance(step, Call))
    assert call.out.buffer == "kept" and "t" not in made.buffer
    assert [s.op for s in made.kernels[0].body] == ["load", "cast", "exp", "store"]
    given = {name: array for name, array in arrays().items() if name != "bias"}
    before, after = interp.run(program, given), interp.run(made, given)
    for name in ("kept", "y"):
        assert before[name].tobytes() == after[name].tobytes(), name
    turned = COPIED.replace("output kept: bf16[5,6]", "output kept: bf16[6,5]").replace(
        "store kept[i0, i1]", "store kept[i1, i0]"
    )
    (call,) = (step for step in rounded(parse_program(turned)).steps if isinstance(step, Call))
    assert call.out.buffer == "t", "a copy that turns it is one"


MOVED = """program @moved {
  input a: bf16[2,3,5,4]
  input b: bf16[2,3,4,6]
  temp t: f32[2,3,5,6]
  output y: bf16[2,5,3,6]
  call @matmul_0 axes(b0: 2, b1: 3, m: 5, n: 6, k: 4) t[b0, b1, m, n] <- matmul a[b0, b1, m, k], b[b0, b1, k, n]
  kernel @moved_000000 rows(i0: 2, i1: 5, i2: 3) cols(i3: 6) {
    phase
    %0 = load t[i0, i2, i1, i3] : f32
    %1 = cast %0 {dtype=bf16} : bf16
    store y[i0, i1, i2, i3] <- %1 : bf16
  }
  return y=y
}"""


def test_a_product_that_is_moved_is_written_where_it_is_moved_to() -> None:
    program = parse_program(MOVED)
    made = rounded(program)
    (call,) = made.steps
    assert isinstance(call, Call) and str(call.out) == "y[b0, m, b1, n]" and call.result_axes == ["b0", "b1", "m", "n"]
    verify_program(made)
    assert parse_program(str(made)) == made
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal(s).astype(DTYPES["bf16"].np) for n, s in (("a", (2, 3, 5, 4)), ("b", (2, 3, 4, 6)))}
    assert interp.run(program, given)["y"].tobytes() == interp.run(made, given)["y"].tobytes()
    turned = MOVED.replace("bf16[2,5,3,6]", "bf16[2,3,6,5]").replace(
        "rows(i0: 2, i1: 5, i2: 3) cols(i3: 6)", "rows(i0: 2, i1: 3, i2: 6) cols(i3: 5)"
    )
    turned = turned.replace("t[i0, i2, i1, i3]", "t[i0, i1, i3, i2]")
    assert len(rounded(parse_program(turned)).steps) == 2, "a library writes rows"


def pure(kernel: Kernel) -> bool:
    """Whether a kernel does nothing but convert and scale."""
    return {s.op for s in kernel.body} <= {"load", "store", "const", "cast", "mul", "div"}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_no_kernel_only_rounds_or_scales_a_product(dtype: str) -> None:
    """Attention and a feed-forward layer: constants stay before roundings, and the library rounds."""
    torch = pytest.importorskip("torch")
    names = {"x": "[2,3,64,32]", "wq": "[32,32]", "wk": "[32,32]", "wv": "[32,32]", "up": "[64,32]", "down": "[32,64]"}

    def block(lib: Any, gelu: Any, x: Any, wq: Any, wk: Any, wv: Any, up: Any, down: Any) -> Any:
        x = x + lib.scaled_dot_product_attention(x @ wq, x @ wk, x @ wv)
        return x + lib.linear(gelu(lib.linear(x, up)), down)

    types = {name: dtype + shape for name, shape in names.items()}
    graph = gradc.trace(lambda **given: block(ops, lambda h: ops.gelu(h, approximate="tanh"), **given), **types)
    module = gradc.compile(graph, list(names), target="cuda-sim")
    programs = [executable.program for executable in module.executables.values()]
    alone = [step for program in programs for step in program.steps if not (isinstance(step, Loop) and step.tile)]
    kernels = [k for step in alone for k in alternatives(step) if isinstance(k, Kernel)]
    assert not [k.name for k in kernels if pure(k)]

    rng = np.random.default_rng(0)
    given = {
        n: (rng.standard_normal(t.shape) / t.shape[-1] ** 0.5).astype(DTYPES[dtype].np)
        for n, t in graph_types(graph).items()
    }
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


@pytest.mark.parametrize(("read", "dtype"), [(False, "f32"), (True, "bf16")])
def test_a_product_that_is_only_added_up_is_not_rounded_before(read: bool, dtype: str) -> None:
    """The gradient of an operand that stands for a whole batch: the sum is rounded once.  Where others read the product
    too, all read it rounded.
    """

    def function(a: gradc.Node, b: gradc.Node) -> dict[str, gradc.Node]:
        y = ops.matmul(a, b)
        return {"z": ops.sum(y, 0)} | ({"y": y} if read else {})

    graph = gradc.trace(function, a="bf16[64,16,32]", b="bf16[64,32,8]")
    module = gradc.compile(graph, target="cuda-sim")
    program = module.forward.program
    (product,) = [step for step in program.steps if isinstance(step, Call)]
    assert program.buffer[product.out.buffer].type.dtype.name == dtype
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(t.concrete({})).astype(t.dtype.np) for t in (graph.input("a").type, graph.input("b").type)
    )
    exact = np.einsum("bmk,bkn->mn", a.astype(np.longdouble), b.astype(np.longdouble))
    found = module(a=a, b=b)
    off = np.abs(np.asarray(found["z"] if read else found, np.longdouble) - exact)
    once = 2.0**-8 * np.abs(exact) + 2.0**-20 * np.abs(exact).max()
    assert (off <= (2.0**-6 * np.abs(exact).max() if read else once)).all()


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@pytest.mark.parametrize("dtype", ["u8", "i32", "f64", "f16"])
def test_casts_there_and_back_leave_the_last_ones_dtype(dtype: str, target: str) -> None:
    """Read by a product, which keeps the rounding, and by something else, which does without it."""

    def function(x: gradc.Node, b: gradc.Node) -> dict[str, gradc.Node]:
        for each in ("bf16", "f32", "bf16", "f32"):
            x = ops.cast(x, each)
        return {"product": x @ b, "negative": -x}

    graph = gradc.trace(function, x=f"{dtype}[5,8]", b="f32[8,4]")
    x = np.arange(40).reshape(5, 8).astype(graph.input("x").dtype.np)
    found = gradc.compile(graph, target=target)(x=x, b=np.ones((8, 4), np.float32))
    assert np.asarray(found["negative"]).dtype == np.float32
    np.testing.assert_array_equal(found["negative"], -x.astype(np.float64))
    np.testing.assert_array_equal(found["product"], np.tile(x.astype(np.float64).sum(1, keepdims=True), (1, 4)))
