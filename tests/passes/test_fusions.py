"""The fusions that the names promise: what a dequantize feeds reads the quantized values itself, and the scale's
gradient is a sum in the kernel that has its terms.  Each case has its graph, its gradient graph and its programs in
tests/golden/fusions, and no float of the table's size in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import long_tests
import ml_dtypes
import numpy as np
import pytest
from agreement import merged

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.ir.dims import symbol
from gradc.ir.graph import Graph
from gradc.ir.kernel import Call, Program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.graph.propagate_reshapes import propagate_reshapes

V, D = symbol("V"), 16
GRANULARITY = {
    "tensor": ("f32[1,1]", (V, D)),
    "row": ("f32[V,1]", (1, D)),
    "column": ("f32[1,16]", (V, 1)),
    "group": ("f32[V,4]", (1, 4)),
}
"""Type of the scale, block; a row is a channel of a weight, a token of activations."""


CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "embedding": (lambda w, i: ops.embedding(i, w, padding_idx=0), {"i": "i64[N]"}),
    "bag": (lambda w, i: ops.embedding_bag(i, w, mode="mean"), {"i": "i64[N,5]"}),
    "bag_offsets": (lambda w, i, o: ops.embedding_bag(i, w, o, mode="sum"), {"i": "i64[N]", "o": "i64[B]"}),
    "bag_max": (lambda w, i: ops.embedding_bag(i, w, mode="max"), {"i": "i64[N,5]"}),
    "linear": (lambda w, x: ops.linear(x, w), {"x": "f32[N,16]"}),
    "layer_norm": (lambda w, g: ops.layer_norm(w, (16,), g), {"g": "f32[16]"}),
    "softmax": (lambda w: ops.softmax(w), {}),
    "pointwise": (lambda w, x: ops.gelu(w) * ops.sigmoid(x), {"x": "f32[V,16]"}),
}
SIZES = {"V": 12, "N": 9, "B": 4}


def compiled(fn: Any, scale: str, block: Any, types: dict[str, str]) -> gradc.Module:
    graph = gradc.trace(
        lambda q, s, **rest: fn(ops.dequantize(q, s, block=block), **rest), q="i8[V,16]", s=scale, **types
    )
    return gradc.compile(graph, wrt=["s"])


def arrays(module: gradc.Module) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out: dict[str, np.ndarray] = {}
    for node in module.graph.inputs:
        name, shape = module.graph.input_name(node), node.type.concrete(SIZES)
        values = {
            "i": lambda s: rng.integers(0, SIZES["V"], s),
            "o": lambda s: np.array([0, 3, 3, 7]),
            "q": lambda s: rng.integers(-128, 128, s),
            "s": lambda s: rng.uniform(0.01, 0.05, s),
        }
        draw = values.get(name, rng.standard_normal)
        out[name] = np.asarray(draw(shape)).astype(node.dtype.np)
    return out


def floats_in_memory(program: Any, count: Any) -> list[str]:
    """Buffers of floats with as many elements as the table, beside inputs and outputs; an alias is no memory of its
    own.
    """
    return [
        b.name
        for b in program.buffers
        if b.type.dtype.is_float and b.type.count == count and b.kind == "temp" and not b.alias
    ]


def check_against_float64(module: gradc.Module) -> None:
    """A norm cancels its scale: what is left of that gradient is rounding, here and op by op, and how much of it there
    is in one draw is luck: the largest of sixteen draws counts.
    """
    given, joint = arrays(module), differentiate(module.graph, ["s"])
    y, residuals = module.forward(**given)
    ours, theirs, largest = dict.fromkeys(("y", "d.s"), 0.0), dict.fromkeys(("y", "d.s"), 0.0), dict[str, float]()
    for seed in range(1, 17):
        dy = np.random.default_rng(seed).standard_normal(np.shape(y)).astype(np.float32)
        all_given = {**given, "d.y": dy}
        exact, plain = interp.run(joint, all_given, precision="f64"), interp.run(joint, all_given)
        for key, value in {"y": y, "d.s": module.backward(residuals, dy)["s"]}.items():
            ours[key] = max(ours[key], np.abs(value - exact[key]).max())
            theirs[key] = max(theirs[key], np.abs(plain[key] - exact[key]).max())
            largest[key] = max(largest.get(key, 0.0), np.abs(exact[key]).max())
    for key, error in ours.items():
        assert error <= max(16 * 2.0**-24 * largest[key], 2 * theirs[key]), key


@long_tests.values
@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("name", CASES)
def test_dequantize_is_read_where_it_is_used(name: str, granularity: str, golden: Any) -> None:
    fn, types = CASES[name]
    module = compiled(fn, *GRANULARITY[granularity], types)
    for what in ("forward", "backward"):
        program = getattr(module, what).program
        found = floats_in_memory(program, V * D)
        if (
            name == "linear" and what == "backward"
        ):  # what the scale's gradient is summed from: dy^T x, a product, no table
            assert len(found) == 1 and {c.out.buffer for c in program.steps if isinstance(c, Call)} == set(found), (
                f"{found}\n{program}"
            )
        else:
            assert not found, f"{what}: {found}\n{program}"
    check_against_float64(module)
    stages = {
        "before": module.graph,
        "gradient": module.stages["tidy.fold"],
        "forward": module.forward.program,
        "backward": module.backward.program,
    }
    text = "\n\n".join(f"-- {title}\n{stage}" for title, stage in stages.items())
    golden(f"fusions/{name}_{granularity}.txt", re.sub(r"  # .*", "", text))


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("name", ["embedding", "softmax", "pointwise"])
def test_the_scales_gradient_is_a_sum_in_the_kernel_that_has_its_terms(name: str, granularity: str) -> None:
    """The kernel that reads the upstream gradient and the quantized values adds their products up; no product reaches
    memory.
    """
    fn, types = CASES[name]
    program = compiled(fn, *GRANULARITY[granularity], types).backward.program
    adds = [
        k
        for k in program.kernels
        if {"d.y", "q"} <= set(k.reads) and any(s.op in ("sum_cols", "accum") for s in k.body)
    ]
    assert adds and all(k in adds for k in program.kernels if "d.y" in k.reads), str(program)
    assert not floats_in_memory(program, (symbol("N") if name == "embedding" else V) * D), (
        "a product of the upstream gradient's size"
    )


NARROW = ("bool", "i2", "u4", "i4", "i8", "u8", "i16", "u16", "f16", "bf16", "f8e4m3", "f8e5m2", "f4e2m1")


def assert_each_reads_its_own(program: Program, cases: Iterable[str], names: Iterable[str]) -> None:
    """One product for each case, of the inputs as they are."""
    calls = {next(iter(call.reads)).partition(".")[0]: call for call in program.steps if isinstance(call, Call)}
    assert len(calls) == len(program.steps) and calls.keys() == set(cases), str(program)
    for case, call in calls.items():
        assert set(call.reads) == {f"{case}.{name}" for name in names}, f"{case}\n{program}"


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_matrix_product_reads_narrow_values_as_they_are(side: str) -> None:
    """No f32 copy of int8 weights, nor of bf16 operands, in either layout; 70 steps and 300 columns are more than a
    tile's.
    """

    def product(dtype: str, flip: bool) -> Graph:
        def of(x: Any, w: Any) -> Any:
            x, w = (ops.cast(v, "f32") if v.dtype.name != "f32" else v for v in (x, w))
            return (x.T if flip else x) @ (w.T if flip else w)

        left, right = (dtype if side in (which, "both") else "f32" for which in ("left", "right"))
        types = {"x": f"{left}[{'K,M' if flip else 'M,K'}]", "w": f"{right}[{'N,K' if flip else 'K,N'}]"}
        return gradc.trace(of, **types)

    cases = {f"{dtype}{'_T' if flip else ''}": product(dtype, flip) for dtype in NARROW for flip in (False, True)}
    module = gradc.compile(merged("products", cases.items()))
    assert_each_reads_its_own(module.forward.program, cases, "xw")
    for sizes in (
        {"M": 5, "K": 70, "N": 300},
        {"M": 40, "K": 300, "N": 3},
        {"M": 1, "K": 1, "N": 1},
        {"M": 3, "K": 0, "N": 2},
    ):
        given = inputs_of(cases, sizes)
        exact = interp.run(module.graph, given, precision="f64")
        for name, got in module.forward.run(**given).items():
            wanted, what = exact[name], f"{name} {sizes}"
            assert got.dtype == np.float32, what
            assert np.abs(got - wanted).max(initial=0) <= 8 * 2.0**-24 * np.abs(wanted).max(initial=0), what


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("wide", ["f32", "f64"])
def test_a_matrix_product_reads_scaled_values(side: str, wide: str) -> None:
    """Scales per tensor, batch, row, column and element, of either operand, in either layout: read where they lie,
    multiplied as they are read.
    """
    rows, cols = ("M", "K") if side == "left" else ("K", "N")
    other = "K,N" if side == "left" else "M,K"

    def product(scale: str, flip: bool) -> Graph:
        def of(q: Any, s: Any, y: Any) -> Any:
            q = ops.cast(ops.transpose(q, (0, 2, 1)) if flip else q, wide) * s
            return q @ y if side == "left" else y @ q

        return gradc.trace(
            of,
            q=f"i8[B,{cols if flip else rows},{rows if flip else cols}]",
            s=wide + scale.replace("R", rows).replace("C", cols),
            y=f"{wide}[B,{other}]",
        )

    scales = {
        "tensor": "[]",
        "batch": "[B,1,1]",
        "row": "[1,R,1]",
        "row_of_two_axes": "[R,1]",
        "column": "[C]",
        "element": "[R,C]",
        "row_of_each": "[B,R,1]",
        "column_of_each": "[B,1,C]",
    }
    cases = {f"{n}{'_T' if flip else ''}": product(s, flip) for n, s in scales.items() for flip in (False, True)}
    module = gradc.compile(merged("products", cases.items()))
    assert_each_reads_its_own(module.forward.program, cases, "qsy")
    for sizes in (
        {"B": 2, "M": 5, "K": 70, "N": 300},
        {"B": 3, "M": 270, "K": 300, "N": 3},
        {"B": 1, "M": 1, "K": 1, "N": 1},
    ):
        given = inputs_of(cases, sizes)
        exact = interp.run(module.graph, given, precision="longdouble")
        unit = 2.0**-24 if wide == "f32" else 2.0**-52
        for results in (module.forward.run(**given), interp.run_program(module.forward.program, given)):
            for name, got in results.items():
                wanted = exact[name]
                assert np.abs(got - wanted).max() <= 16 * unit * np.abs(wanted).max(), f"{name} {sizes}"
    assert str(parse_program(str(module.forward.program))) == str(module.forward.program)


def inputs_of(cases: Mapping[str, Graph], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Of the cases' merged graph; each draws as if it were alone."""
    given = {}
    for case, graph in cases.items():
        rng = np.random.default_rng(0)
        given |= {f"{case}.{graph.input_name(n)}": random_of(n.type, sizes, rng) for n in graph.inputs}
    return given


def random_of(type_: gradc.Type, sizes: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    shape, dtype = type_.concrete(sizes), type_.dtype
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.np)
    low, high = dtype.range if dtype.is_integer else (0, 1)
    return rng.integers(low, high, shape, endpoint=True).astype(dtype.np)


def mlp(x: Any, up: Any, down: Any, bias: Any = None) -> Any:
    return ops.linear(ops.gelu(ops.linear(ops.tanh(x), up, bias), approximate="tanh"), down)


MLP = {"x": "[2,20,16]", "up": "[48,16]", "down": "[8,48]"}


@pytest.mark.parametrize("sizes", [MLP, {**MLP, "bias": "[48]"}], ids=["plain", "bias"])
def test_products_of_bf16_read_bf16(sizes: dict[str, str]) -> None:
    """Operands are rounded to their type, though the kernels around them compute in f32, and no scale (GELU's 1/2)
    moves from one to the other; the gradient of a weight is written as it lies.
    """
    module = gradc.compile(gradc.trace(mlp, **{n: f"bf16{t}" for n, t in sizes.items()}), wrt=list(sizes), target="cpu")
    found = [
        (program.buffer[operand.buffer].type.dtype.name, call.out.buffer)
        for program in (module.forward.program, module.backward.program)
        for call in program.steps
        if isinstance(call, Call)
        for operand in call.args
    ]
    assert len(found) == 2 * (2 + 4)
    assert {dtype for dtype, _ in found} == {"bf16"}
    assert not re.search(r"load \w+\[i1, i0\]", str(module.backward.program))  # nothing is transposed by a kernel


def test_a_rounded_operand_is_rounded_for_the_product_alone() -> None:
    """The result is that of operands rounded once; a sum that reads the same value has it in f32."""

    def both(x: Any, w: Any) -> Any:
        h = ops.tanh(x)
        return ops.linear(h, w), ops.cast(h, dtype="f32").sum()

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((64, 32), (16, 32)))
    module = gradc.compile(gradc.trace(both, x="bf16[64,32]", w="bf16[16,32]"), target="cpu")
    y, total = module.forward(x=x, w=w)[0].values()
    h, wide = np.tanh(x.astype("f8")), w.astype("f8")
    assert (abs(y.astype("f8") - h @ wide.T) <= 2**-8 * (abs(h) @ abs(wide.T))).all()
    rounded = h.astype("f4").astype(x.dtype).astype("f8")
    assert (abs(y.astype("f8") - rounded @ wide.T) <= 2**-8 * abs(rounded @ wide.T) + 1e-5).all()
    assert abs(total - h.sum()) <= 1e-6 * abs(h).sum() < abs(rounded.sum() - h.sum())


def test_a_matrix_product_does_not_read_what_its_type_does_not_hold() -> None:
    """i32 -> f32 rounds as the node says it does: in memory, once."""
    module = gradc.compile(gradc.trace(lambda x, w: ops.cast(x, "f32") @ w, x="i32[M,K]", w="f32[K,N]"))
    assert [b.type.dtype.name for b in module.forward.program.buffers if b.kind == "temp"] == ["f32"]
    text = str(
        gradc.compile(gradc.trace(lambda x, w: ops.cast(x, "f32") @ w, x="i16[M,K]", w="f32[K,N]")).forward.program
    )
    with pytest.raises(gradc.errors.GradcError, match="x is i32, and f32 does not hold its values"):
        verify_program(parse_program(text.replace("x: i16", "x: i32")))


@pytest.mark.parametrize("read", [True, False], ids=["groups of one axis", "blocks of both"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("flip", [False, True])
def test_a_matrix_product_reads_scales_per_group(read: bool, side: str, flip: bool) -> None:
    """A scale per group of one axis is read where it lies, that of blocks of both axes makes a copy; tiles begin inside
    groups.
    """

    def product(block: tuple[int, int], rows: int, cols: int, other: int) -> Graph:
        def of(q: Any, s: Any, y: Any) -> Any:
            w = ops.dequantize(q, s, block=block)
            w = w.T if flip else w
            return w @ y if side == "left" else y @ w

        inner = {("left", False): cols, ("left", True): rows, ("right", False): rows, ("right", True): cols}[side, flip]
        return gradc.trace(
            of,
            q=f"i8[{rows},{cols}]",
            s=f"f32[{rows // block[0]},{cols // block[1]}]",
            y=f"f32[{inner},{other}]" if side == "left" else f"f32[{other},{inner}]",
        )

    blocks = [(1, 8), (1, 1), (4, 1), (1, 60)] if read else [(4, 8), (5, 60)]
    sizes = ((20, 120, 7), (540, 600, 5), (60, 120, 300))
    cases = {"_".join(map(str, ("b", *b, *s))): product(b, *s) for b in blocks for s in sizes}
    graph = merged("products", cases.items())
    module = gradc.compile(graph)
    if read:
        assert_each_reads_its_own(module.forward.program, cases, "qsy")
    given = inputs_of(cases, {})
    exact = interp.run(graph, given, precision="f64")
    for results in (
        module.forward.run(**given),
        interp.run_program(module.forward.program, given),
        gradc.compile(graph, numerics="strict").forward.run(**given),
    ):
        for name, got in results.items():
            assert np.abs(got - exact[name]).max() <= 16 * 2.0**-24 * np.abs(exact[name]).max(), name
    assert str(parse_program(str(module.forward.program))) == str(module.forward.program)


@pytest.mark.parametrize("block", [(4, 1, 1), (4, 6, 5), (1, 3, 1), (1, 1, 5), (8, 6, 1)])
def test_groups_of_batched_products(block: tuple[int, int, int]) -> None:
    """Groups of the batch make a copy; those of rows or columns are read."""
    scales = [n // b for n, b in zip((8, 6, 5), block, strict=True)]
    graph = gradc.trace(
        lambda q, s, y: ops.dequantize(q, s, block=block) @ y,
        q="i8[8,6,5]",
        s=f"f32[{','.join(map(str, scales))}]",
        y="f32[8,5,7]",
    )
    rng = np.random.default_rng(0)
    given = {n: random_of(graph.input(n).type, {}, rng) for n in graph.input_names}
    exact = interp.run(graph, given, precision="f64")["y"]
    for numerics in ("real", "strict"):
        module = gradc.compile(graph, numerics=numerics)
        np.testing.assert_allclose(module(**given), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
        np.testing.assert_allclose(
            interp.run_program(module.forward.program, given)["y"], exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max()
        )


@pytest.mark.parametrize("numerics", ["real", "strict"])
def test_a_scale_is_rounded_to_its_own_dtype(numerics: str) -> None:
    """A product in f64 of values scaled in f32: the scaled values are f32 before they are f64."""
    graph = gradc.trace(
        lambda q, s, y: ops.cast(ops.cast(q, "f32") * s, "f64") @ y, q="i8[M,K]", s="f32[M,1]", y="f64[K,N]"
    )
    rng = np.random.default_rng(0)
    given = {n: random_of(graph.input(n).type, {"M": 7, "K": 50, "N": 3}, rng) for n in graph.input_names}
    scaled, y = given["q"].astype(np.float32) * given["s"], given["y"]
    exact = scaled.astype(np.longdouble) @ y.astype(np.longdouble)
    limit = 50 * 2.0**-53 * (np.abs(scaled).astype(np.float64) @ np.abs(y))  # a rounding a term; one of f32 is 2**29
    for found in (gradc.compile(graph, numerics=numerics)(**given), interp.run(graph, given)["y"]):
        assert (np.abs(found - exact) <= limit).all()


IMAGE = {
    "tensor": ("f32[1,1,1,1]", None),
    "channel": ("f32[1,3,1,1]", (symbol("B"), 1, symbol("H"), symbol("W"))),
    "image": ("f32[B,1,1,1]", (1, 3, symbol("H"), symbol("W"))),
}


@pytest.mark.parametrize("granularity", IMAGE)
def test_dequantize_then_grid_sample(granularity: str) -> None:
    scale, block = IMAGE[granularity]
    graph = gradc.trace(
        lambda q, s, g: ops.grid_sample(ops.dequantize(q, s, block=block), g),
        q="i8[B,3,H,W]",
        s=scale,
        g="f32[B,h,w,2]",
    )
    module = gradc.compile(graph, wrt=["s", "g"])
    count = symbol("B") * 3 * symbol("H") * symbol("W")
    for program in (module.forward.program, module.backward.program):
        assert not floats_in_memory(program, count), str(program)
    sizes = {"B": 2, "H": 5, "W": 6, "h": 4, "w": 3}
    rng = np.random.default_rng(0)
    given = {
        "q": rng.integers(-128, 128, (2, 3, 5, 6)).astype(np.int8),
        "g": rng.uniform(-1.2, 1.2, (2, 4, 3, 2)).astype(np.float32),
    }
    given["s"] = rng.uniform(0.01, 0.05, graph.input("s").type.concrete(sizes)).astype(np.float32)
    y, residuals = module.forward(**given)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    exact = interp.run(differentiate(graph, ["s", "g"]), {**given, "d.y": dy}, precision="f64")
    got = module.backward(residuals, dy)
    for key in ("s", "g"):
        assert np.abs(got[key] - exact[f"d.{key}"]).max() <= 1e-5 * np.abs(exact[f"d.{key}"]).max()


@pytest.mark.parametrize("granularity", GRANULARITY)
def test_fake_quantize_then_embedding(granularity: str, golden: Any) -> None:
    """The mask of what was clamped is computed where the scatter loads its rows."""
    scale, block = GRANULARITY[granularity]
    graph = gradc.trace(
        lambda w, s, i: ops.embedding(i, ops.fake_quantize(w, s, block=block)), w="f32[V,16]", s=scale, i="i64[N]"
    )
    module = gradc.compile(graph, wrt=["w", "s"])
    for program in (module.forward.program, module.backward.program):
        assert not floats_in_memory(program, V * D), str(program)
        assert not [b for b in program.buffers if b.type.dtype.name == "bool" and b.type.rank == 2], "a mask in memory"
    golden(f"fusions/fake_quantize_embedding_{granularity}.txt", re.sub(r"  # .*", "", str(module.backward.program)))
    rng = np.random.default_rng(0)
    given = {"w": rng.standard_normal((12, 16)).astype(np.float32), "i": rng.integers(0, 12, 9)}
    given["s"] = rng.uniform(0.005, 0.02, graph.input("s").type.concrete(SIZES)).astype(np.float32)
    y, residuals = module.forward(**given)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    exact = interp.run(differentiate(graph, ["w", "s"]), {**given, "d.y": dy})
    got = module.backward(residuals, dy)
    for key in ("w", "s"):
        assert np.abs(got[key] - exact[f"d.{key}"]).max() <= 16 * 2.0**-24 * np.abs(exact[f"d.{key}"]).max()


def test_a_value_read_under_a_mask_is_not_the_value_read_without_one() -> None:
    """Both at one place in one kernel: x behind a slice and a pad is masked at row 0, x itself is not."""
    graph = gradc.trace(lambda x: ops.pad(ops.exp(x)[1:], ((1, 0), (0, 0))) * 3.0 + ops.exp(x), x="f32[4,5]")
    module = gradc.compile(graph, target="cpu")
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    padded = np.exp(x.astype(np.float64))
    padded[0] = 0
    np.testing.assert_allclose(module.forward.run(x=x)["y"], padded * 3 + np.exp(x.astype(np.float64)), rtol=1e-6)
    assert len(module.forward.program.kernels) == 1


@pytest.mark.parametrize("axes", [(1, 2), (0, 1, 2), (1,), (0, 2)])
def test_sums_over_joined_axes_and_those_behind_them(axes: tuple[int, ...]) -> None:
    """[N, 4, 3, K] read as [N, 12, K]: a sum over the joined axis is one over both, and the axis behind moves by
    one.
    """
    graph = gradc.trace(
        lambda x: ops.sum(ops.exp(ops.reshape(ops.exp(x), (-1, 12, x.shape[3]))), axis=axes), x="f64[N,4,3,K]"
    )
    split = propagate_reshapes(graph)
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 5))
    want = np.exp(np.exp(x).reshape(2, 12, 5)).sum(axes)
    np.testing.assert_allclose(interp.run(split, x=x)["y"], want, rtol=1e-12)
    if 1 in axes:
        assert not any(node.op.name == "reshape" for node in split.nodes), "the sum runs over the axes as they were"
