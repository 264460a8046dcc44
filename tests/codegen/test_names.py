"""Names of the user in generated C: any name compiles, and none means what it should not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from tile_programs import CASES as TILES

import gradc
from gradc import knobs, ops
from gradc.analysis.strategies import ON_GPU, ON_HOST
from gradc.codegen.cpu.kernel import render_kernel
from gradc.codegen.cuda.finished_rows import launched
from gradc.codegen.cuda.render import cuda_kernel
from gradc.codegen.cuda.tiles.canonical import canonical
from gradc.codegen.cuda.tiles.kernel import tile_kernel
from gradc.codegen.identifiers import WRITTEN, identifier
from gradc.compiler import joint_program, run_passes
from gradc.errors import NotDifferentiable
from gradc.ir.kernel import Kernel, Program
from gradc.ir.node import Node
from gradc.ir.op import Expr, Op
from gradc.ir.program_text import parse_program
from gradc.ir.types import Type
from gradc.module.options import Options
from gradc.runtime.executable import Executable
from tests.registry import cases
from tests.standard_kernels import STANDARD

NAMES = [
    ("x", "w"),
    ("rows", "cols"),
    ("A", "args"),
    ("ctx", "site"),
    ("chunk", "chunks"),
    ("key", "order"),
    ("v0", "i0"),
    ("acc0", "partial0"),
    ("block0", "target0"),
    ("first", "last"),
    ("int", "return"),
    ("GRADC_POLL", "gradc_min"),
    ("f32", "exp_f32"),
    ("N", "D"),
    ("task", "memory"),
    ("combined", "one"),
    ("NDEBUG", "owners"),
]


@pytest.mark.parametrize("dtype", ["i8", "i64"])
def test_no_axis_hides_a_type(dtype: str) -> None:
    """The ninth axis of nine or more is i8 in a program."""
    order = (9, 0, 2, 1, 4, 3, 6, 5, 8, 7)
    x = np.random.default_rng(0).integers(-9, 9, (*(2,) * 9, 3)).astype(f"i{int(dtype[1:]) // 8}")
    graph = gradc.trace(lambda x: ops.transpose(x, order) * 2, x=f"{dtype}[2,2,2,2,2,2,2,2,2,3]")
    module = gradc.compile(graph, target="cpu")
    kernels = [step for step in module.forward.program.steps if isinstance(step, Kernel)]
    assert any(axis == "i8" for kernel in kernels for axis, _ in (*kernel.rows, *kernel.cols))
    np.testing.assert_array_equal(module(x=x), x.transpose(order) * 2)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_names_that_mean_something_in_c(names: tuple[str, str]) -> None:
    """Dims are called as buffers are, and both as what a kernel's own text names."""
    left, right = names
    types = {left: f"f32[{left},{right}]", right: f"f32[{right}]"}

    def function(**inputs):
        x, w = inputs.values()
        y = ops.exp(x) * w
        return ops.sum(y, axis=0), ops.max(y, axis=1), y

    graph = gradc.trace(lambda x, w: function(x=x, w=w), **dict(zip("xw", types.values(), strict=True)))
    text = str(graph).replace("%x", f"%{left}").replace("%w", f"%{right}")
    module = gradc.compile(gradc.parse(text), wrt=[left], target="cpu")
    x, w = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7), np.arange(7, dtype=np.float32)
    found, residuals = module.forward({left: x, right: w})
    want = np.exp(x.astype(np.float64)) * w
    for value, exact in zip(found.values(), (want.sum(0), want.max(1), want), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-6)
    ones = [np.ones_like(value) for value in found.values()]
    assert np.isfinite(module.backward(residuals, *ones)[left]).all()


def test_a_name_of_the_kernel_s_own_functions() -> None:
    """What a name is does not change the kernel's, so that a user may know it."""
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N,D]")
    (name,) = gradc.compile(graph, target="cpu").forward.kernels
    for suffix in ("", "_args", "_rows", "_layout", "_thread_bytes"):
        renamed = gradc.parse(str(graph).replace("%x", f"%{name}{suffix}"))
        module = gradc.compile(renamed, target="cpu")
        assert name in module.forward.kernels
        x = np.ones((2, 3), np.float32)
        np.testing.assert_allclose(module.forward.run({f"{name}{suffix}": x})["y"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("axis", ["int", "rows", "x", "N", "chunk", "task"])
def test_axes_of_a_program_s_text(axis: str, target: str) -> None:
    """Whoever writes a program as text may call an axis what he likes."""
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N,D]")
    text = str(gradc.compile(graph, target="numpy").forward.program)
    assert "i0" in text
    program = parse_program(re.sub(r"\bi0\b", axis, text))
    x = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    (found,) = Executable(program, target).run({"x": x}).values()
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=1e-6)


def _calls_functions_alone(op: Op) -> bool:
    """Whether an op is an expression of functions of the templates, whose names are read from there."""
    return isinstance(getattr(op, "lower", None), Expr)


def decoded_weights() -> Iterator[Program]:
    """Products by weights whose codes lie along the summed axis, and along the other."""
    types = {"q": "u8[256,128]", "s": "f16[256,2]", "z": "u8[256,2]"}

    def weight(q: Node, s: Node, z: Node) -> Node:
        return ops.dequantize(ops.unpack(q, dtype="u4", axis=1), s, z, block=(1, 128), out_dtype="bf16")

    forward = gradc.trace(lambda x, q, s, z: ops.linear(x, weight(q, s, z)), x="bf16[7,256]", **types)
    backward = gradc.trace(lambda x, q, s, z: x @ weight(q, s, z), x="bf16[7,256]", **types)
    for graph in (forward, backward):
        yield run_passes(graph, (), Options(arch="sm_90"), "cuda")[2]["forward"]


def rendered_tiles() -> Iterator[tuple[str, str]]:
    """Loops as kernels: what buffers and sizes are called, the user's or the compiler's, begins with Users."""
    for program in (*TILES["causal"].programs(64, wrt=("q", "k", "v")).values(), *decoded_weights()):
        for loop in program.loops:
            made, words = tile_kernel(loop, program), canonical(loop, program.types).words
            named = "|".join(map(re.escape, words.values()))
            yield made.name, re.sub(rf"\b({named})\b", r"Users_\1", made.text)


def as_users(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Kernel, Mapping[str, Type]]:
    """A kernel, and the types of its buffers, where all that the user names begins with Users."""
    buffers = {b: f"Users_b{i}" for i, b in enumerate(kernel.buffers)}
    named, own = kernel.renamed(types, buffers, {d: f"Users_n{i}" for i, d in enumerate(kernel.dims(types))})
    return replace(named, name=kernel.name), own


def kernels_of_two() -> Iterator[tuple[str, str]]:
    """Of which one reads the rows that the other has finished."""
    graph = gradc.trace(lambda x, i, u: ops.index_add(x, 0, i, u), x="bf16[V,D]", i="i64[N]", u="bf16[N,D]")
    program = run_passes(graph, (), Options(arch="sm_90", reductions={"*": "segmented"}), "cuda")[2]["forward"]
    for kernel in (step for step in launched(program) if isinstance(step, Kernel) and step.handed_on):
        yield kernel.name, cuda_kernel(*as_users(kernel, program.types)).text


def rendered_kernels(target: str) -> Iterator[tuple[str, str]]:
    """Kernels of every op, of the standard graphs and of every strategy: the name and the text, in which the user's
    names begin with Users.
    """
    options = Options(arch="sm_90") if target == "cuda" else Options()
    first = {case.op.name: case for case in reversed([*cases(("f32",))]) if not _calls_functions_alone(case.op)}
    jobs = [(case.smooth, case.floats if case.differentiable else [], options) for case in first.values()]
    jobs += [(standard.graph, list(standard.wrt), options) for standard in STANDARD.values()]
    norm = gradc.trace(
        lambda t, w: ops.layer_norm(ops.embedding(t, w), (w.shape[1],)), t="i64[Rows]", w="bf16[Keys,Columns]"
    )
    ways = ON_GPU if target == "cuda" else ON_HOST
    jobs += [(norm, ["w"], replace(options, reductions={"*": way})) for way in ways]
    groups = gradc.trace(
        lambda t, w, s: ops.embedding(t, ops.dequantize(w, s, block=(1, 32))),
        t="i64[Rows]",
        w="i8[Keys,96]",
        s="f32[Keys,3]",
    )
    jobs.append((groups, ["s"], replace(options, reductions={"*": "segmented"})))  # which are sorted once
    jobs.append((gradc.trace(ops.max, x="f32[]"), [], options))  # a pass over columns where there are none
    if target == "cuda":
        yield from rendered_tiles()
        yield from kernels_of_two()
    for graph, wrt, given in jobs:
        with contextlib.suppress(NotDifferentiable):
            program = joint_program(graph, wrt, given, target)
            types = {b.name: b.type for b in program.buffers}
            for kernel in program.kernels:
                named, own = as_users(kernel, types)
                if target == "cuda":
                    yield kernel.name, cuda_kernel(named, own).text
                    continue
                for guarded in (False, True) if graph is norm else (False,):
                    with knobs.BOUNDS.set(guarded):
                        yield kernel.name, render_kernel(named, own).text


def test_every_word_of_a_text_is_known() -> None:
    """What a generated text declares or calls, no name of the user's becomes.  The words of the templates are read from
    them; the others are listed, and this holds the list against what is written.
    """
    unknown: dict[str, str] = {}
    seen: set[str] = set()
    for target in ("cpu", "cuda"):
        for name, text in rendered_kernels(target):
            code = re.sub(r"/\*.*?\*/|\"[^\"]*\"|#\w+[^\n]*", " ", text, flags=re.DOTALL)
            words = {
                w for w in re.findall(r"(?<![\w.])(?<!->)[A-Za-z_]\w*", code) if not w.startswith((name, "Users_"))
            }
            unknown |= {f"{w} ({target})": name for w in words if identifier(w, target) == w}
            seen |= words
    assert not unknown, unknown
    assert set(WRITTEN.split()) <= seen, set(WRITTEN.split()) - seen
