"""Quantized ONNX models: codes stay codes in memory, and every scale and zero point has the gradient of the float
emulation, written here in NumPy; values are onnxruntime's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from agreement import merged

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import gradc  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.errors import GradcError, NotDifferentiable  # noqa: E402
from gradc.ir.kernel import Call  # noqa: E402

rng = np.random.default_rng(0)
F, I64 = TensorProto.FLOAT, TensorProto.INT64
KINDS = {"f": F, "i": I64}
Values = dict[str, np.ndarray]


class Case(NamedTuple):
    """A model, what it reads, and what its result is in floats.

    :param learned: scales and zero points.
    """

    nodes: list[Any]
    inputs: Values
    weights: Values
    learned: tuple[str, ...]
    emulated: Callable[[Values], np.ndarray]


def model(case: Case) -> Any:
    graph = helper.make_graph(
        case.nodes,
        "net",
        [helper.make_tensor_value_info(n, KINDS[v.dtype.kind], v.shape) for n, v in case.inputs.items()],
        [helper.make_tensor_value_info("y", F, [None] * case.emulated({**case.inputs, **case.weights}).ndim)],
        [numpy_helper.from_array(v, n) for n, v in case.weights.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def spread(v: np.ndarray, shape: tuple[int, ...], axis: int | None) -> np.ndarray:
    """A scale or zero point at each code: of a tensor, of an axis, or of blocks along one."""
    if v.ndim == 0:
        return np.broadcast_to(v, shape)
    if v.ndim == 1:
        return np.broadcast_to(v.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)
    return np.repeat(v, shape[axis or 0] // v.shape[axis or 0], axis or 0)


def scales(*shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.01, 0.02, shape), np.float32)


def codes(*shape: int, kind: str = "i1", low: int = -100, high: int = 100) -> np.ndarray:
    return rng.integers(low, high, shape).astype(kind)


def product(axis: int | None, block: int = 0, zeros: bool = True) -> Case:
    """x @ w, w read by DequantizeLinear."""
    shape = (24, 20)
    of = () if axis is None else (shape[axis],)
    if block:
        of = tuple(n // block if i == axis else n for i, n in enumerate(shape))
    weights = {"q": codes(*shape), "s": scales(*of)} | ({"z": codes(*of, low=-9, high=9)} if zeros else {})
    attributes = {} if axis is None else {"axis": axis} | ({"block_size": block} if block else {})

    def emulated(v: Values) -> np.ndarray:
        zero = spread(v["z"], shape, axis) if zeros else 0.0
        return v["x"] @ ((v["q"] - zero) * spread(v["s"], shape, axis))

    nodes = [
        helper.make_node("DequantizeLinear", list(weights), ["w"], **attributes),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    learned = ("s", "z") if zeros else ("s",)
    return Case(nodes, {"x": rng.standard_normal((3, 24)).astype("f4")}, weights, learned, emulated)


def convolved() -> Case:
    """A scale and a zero point for each output channel."""
    weights = {"q": codes(4, 2, 3, 3), "s": scales(4), "z": codes(4, low=-9, high=9)}

    def emulated(v: Values) -> np.ndarray:
        w = (v["q"] - v["z"].reshape(-1, 1, 1, 1)) * v["s"].reshape(-1, 1, 1, 1)
        windows = np.lib.stride_tricks.sliding_window_view(v["x"], (3, 3), axis=(2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, w)

    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0),
        helper.make_node("Conv", ["x", "w"], ["y"]),
    ]
    return Case(nodes, {"x": rng.standard_normal((2, 2, 6, 5)).astype("f4")}, weights, ("s", "z"), emulated)


def rows() -> Case:
    """Rows of a table with a scale and a zero point for each."""
    weights = {"q": codes(50, 16), "s": scales(50), "z": codes(50, low=-9, high=9)}

    def emulated(v: Values) -> np.ndarray:
        return ((v["q"] - v["z"][:, None]) * v["s"][:, None])[v["i"]]

    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0),
        helper.make_node("Gather", ["w", "i"], ["y"]),
    ]
    return Case(nodes, {"i": rng.integers(0, 50, 7)}, weights, ("s", "z"), emulated)


def packed(values: np.ndarray) -> np.ndarray:
    """Two codes of four bits a byte, the low ones first."""
    return (values[..., 0::2] | values[..., 1::2] << 4).astype(np.uint8)


def four_bits(zeros: str) -> Case:
    """com.microsoft.MatMulNBits; a zero point is 8, packed in bytes, or a float that learns."""
    K, N, block = 32, 6, 16
    count = K // block
    q = codes(N, count, block, kind="u1", low=0, high=16)
    fixed = codes(N, count, kind="u1", low=0, high=16)
    weights = {"b": packed(q), "s": scales(N * count)}
    if zeros:
        weights["z"] = packed(fixed) if zeros == "packed" else rng.uniform(4, 12, N * count).astype(np.float32)

    def emulated(v: Values) -> np.ndarray:
        zero = {"": np.full((N, count), 8.0), "packed": fixed}.get(zeros)
        zero = v["z"].reshape(N, count) if zero is None else zero
        w = (q - zero[..., None].astype(np.float64)) * v["s"].reshape(N, count, 1)
        return v["x"] @ w.reshape(N, K).T

    node = helper.make_node(
        "MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", K=K, N=N, bits=4, block_size=block
    )
    learned = ("s", "z") if zeros == "float" else ("s",)
    return Case([node], {"x": rng.standard_normal((3, K)).astype("f4")}, weights, learned, emulated)


def block_rows(zeros: bool, axes: tuple[int, int] = (0, 1)) -> Case:
    """com.microsoft.GatherBlockQuantized."""
    V, width, block = 40, 64, 16
    q, z = (codes(V, n, kind="u1", low=0, high=16) for n in (width, width // block))
    weights = {"q": packed(q), "s": scales(V, width // block)} | ({"z": packed(z)} if zeros else {})

    def emulated(v: Values) -> np.ndarray:
        zero = np.repeat(z.astype(np.float64), block, 1) if zeros else 8.0
        return ((q - zero) * np.repeat(v["s"], block, 1))[v["i"]]

    inputs = ["q", "i", "s", *(["z"] if zeros else [])]
    said = {"bits": 4, "block_size": block, "gather_axis": axes[0], "quantize_axis": axes[1]}
    node = helper.make_node("GatherBlockQuantized", inputs, ["y"], domain="com.microsoft", **said)
    return Case([node], {"i": rng.integers(0, V, 7)}, weights, ("s",), emulated)


CASES: dict[str, Callable[[], Case]] = {
    "a tensor": lambda: product(None),
    "rows": lambda: product(0),
    "columns": lambda: product(1),
    "columns without zero points": lambda: product(1, zeros=False),
    "blocks of rows": lambda: product(0, 8),
    "blocks of columns": lambda: product(1, 5),
    "channels of a convolution": convolved,
    "rows of a table": rows,
    "four bits": lambda: four_bits(""),
    "four bits, packed zero points": lambda: four_bits("packed"),
    "four bits, float zero points": lambda: four_bits("float"),
    "blocks of a table": lambda: block_rows(False),
    "blocks of a table, packed zero points": lambda: block_rows(True),
    "blocks of a table, axes from the end": lambda: block_rows(False, (-2, -1)),
}
TABLES = [name for name in CASES if "table" in name]
"""Where nothing needs a weight in floats."""


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_float_emulation(name: str) -> None:
    """Of each scale and zero point, element by element: it is linear in each, so that a difference is exact."""
    case = CASES[name]()
    module = gradc.compile(gradc.from_onnx(model(case)), wrt=list(case.learned), target="cpu")
    y, residuals = module.forward(**case.inputs)
    values = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in {**case.weights, **case.inputs}.items()}
    np.testing.assert_allclose(y, case.emulated(values), rtol=1e-4, atol=1e-5)
    dy = rng.standard_normal(y.shape)
    grads = module.backward(residuals, dy.astype(np.float32))
    dy = dy.astype(np.float32).astype(np.float64)
    for learned in case.learned:
        base = values[learned].astype(np.float64)
        wanted = np.empty(base.size)
        for at in range(base.size):
            step = np.zeros(base.size)
            step[at] = 0.5
            sides = (base + s * step.reshape(base.shape) for s in (1, -1))
            above, below = (float((case.emulated({**values, learned: side}) * dy).sum()) for side in sides)
            wanted[at] = above - below
        most = np.abs(wanted).max()
        np.testing.assert_allclose(np.ravel(grads[learned]), wanted, rtol=1e-4, atol=1e-5 * most, err_msg=learned)


def session(runtime: Any, made: bytes) -> Any:
    """As the model is written: optimized, onnxruntime rounds what it multiplies with codes, too."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(made, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", CASES)
def test_values_are_onnxruntimes(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="the oracle")
    case = CASES[name]()
    made = model(case).SerializeToString()
    (wanted,) = session(runtime, made).run(None, case.inputs)
    found = gradc.compile(gradc.from_onnx(made), target="cpu")(**case.inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def floats(program: Any, size: int) -> list[str]:
    """Buffers of as many floats as a weight has codes."""
    return [
        b.name
        for b in program.buffers
        if b.type.dtype.is_float
        and b.kind != "input"
        and all(isinstance(n, int) for n in b.type.shape)
        and np.prod(b.type.shape) >= size
    ]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_nowhere_in_floats(name: str) -> None:
    """Neither forward nor backward, for each scale and zero point: the dump of both programs."""
    case = CASES[name]()
    module = gradc.compile(gradc.from_onnx(model(case)), wrt=list(case.learned), target="cpu")
    size = case.weights["q"].size
    assert not floats(module.forward.program, size) and not floats(module.backward.program, size)


@pytest.mark.parametrize("name", ["rows", "columns", "a tensor", "channels of a convolution", "four bits"])
def test_a_product_keeps_codes(name: str) -> None:
    """A product's weight is in floats while it runs, in its workspace alone: what is kept for the backward is codes,
    and where a scale is that of a column it is read behind the product.
    """
    case = CASES[name]()
    module = gradc.compile(gradc.from_onnx(model(case)), wrt=list(case.learned), target="cpu")
    size = 192 if name == "four bits" else case.weights["q"].size
    kinds = {b.name: b.kind for b in module.forward.program.buffers}
    assert {kinds[name] for name in floats(module.forward.program, size) if name[0] != "y"} <= {"temp"}
    assert not any(r.node.dtype.is_float and np.prod(r.node.shape) >= size for r in module.residuals if not r.borrowed)
    if name == "columns":
        kernel = next(k for k in module.forward.program.kernels if "q" in k.reads)
        assert "s" not in kernel.reads and any("s" in k.reads for k in module.forward.program.kernels)


def test_packed_zero_points_have_no_gradient() -> None:
    """A byte of two codes is no number that could move."""
    graph = gradc.from_onnx(model(four_bits("packed")))
    with pytest.raises(NotDifferentiable, match="unpack"):
        gradc.differentiate(graph, ["z"])


# -- operators that round what they compute ----------------------------------------------------------------------------


def rounded(op: str) -> Any:
    """QLinearMatMul or QLinearConv between DequantizeLinear and QuantizeLinear, every scale and zero point a weight."""
    shapes = {"MatMul": ((3, 8), (8, 5)), "Conv": ((1, 2, 5, 5), (4, 2, 3, 3))}[op]
    weights: Values = {"b": codes(*shapes[1])}
    for name, low, high in (("a", 0.05, 0.06), ("b", 0.01, 0.02), ("y", 0.08, 0.09)):
        channels = (4,) if name == "b" and op == "Conv" else ()
        weights[f"{name}s"] = np.asarray(rng.uniform(low, high, channels), np.float32)
        weights[f"{name}z"] = np.asarray(rng.integers(-3, 4, channels), np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "as", "az"], ["a"]),
        helper.make_node(f"QLinear{op}", ["a", "as", "az", "b", "bs", "bz", "ys", "yz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "ys", "yz"], ["y"]),
    ]
    if op == "Conv":
        weights["bz"][:] = 0  # onnxruntime takes no other of a weight's channels
    x = 4 * rng.standard_normal(shapes[0]).astype(np.float32)  # some saturate: else a zero point shifts nothing
    return Case(nodes, {"x": x}, weights, ("as", "az", "bs", "bz", "ys", "yz"), lambda v: np.zeros((1,) * x.ndim))


@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_operators_that_round_pass_gradients_to_every_scale(op: str) -> None:
    """Against differences of the piecewise linear function that rounding stands for, which :func:`gradc.check` holds
    in its place; values within one step of onnxruntime's.
    """
    runtime = pytest.importorskip("onnxruntime", reason="the oracle")
    case = rounded(op)
    made = model(case).SerializeToString()
    (wanted,) = session(runtime, made).run(None, case.inputs)
    graph = gradc.from_onnx(made)
    wrt = [*case.learned, "x"]
    module = gradc.compile(graph, wrt=wrt, target="cpu")
    y, residuals = module.forward(**case.inputs)
    assert np.abs(y - wanted).max() <= 1.01 * case.weights["ys"] and (np.abs(y - wanted) < 1e-6).mean() > 0.9
    report = gradc.check(graph, wrt, inputs={**graph.defaults, **case.inputs})
    assert {f.verdict for f in report.findings} == {"ok"}, report
    dy = rng.standard_normal(y.shape).astype(np.float32)
    values = {**graph.defaults, **case.inputs, "d.y": dy}
    exact = interp.run(gradc.differentiate(graph, wrt), values)
    found = module.backward(residuals, dy)
    for name in wrt:
        assert np.any(exact[f"d.{name}"]), name
        np.testing.assert_allclose(found[name], exact[f"d.{name}"], rtol=1e-3, atol=1e-3, err_msg=name)


def one_node(
    op: str, given: dict[str, Any], wanted: str, shape: tuple[int, ...], domain: str = "", **attrs: Any
) -> Any:
    """A model of one node whose inputs are the given arrays; those that are None are left out."""
    arrays = {n: v for n, v in given.items() if v is not None}
    graph = helper.make_graph(
        [helper.make_node(op, [n if n in arrays else "" for n in given], ["y"], domain=domain, **attrs)],
        "net",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in arrays.items()
        ],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(wanted)), shape)],
    )
    opsets = [helper.make_opsetid("", 21), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def computed(
    models: Mapping[tuple[Any, ...], tuple[Any, Values]],
) -> tuple[dict[tuple[Any, ...], np.ndarray], list[str]]:
    """What each model makes of its inputs, all of them compiled as one module, and the ops that this calls."""
    names = {case: re.sub(r"\W+", "_", f"of_{case}") for case in models}
    assert len(set(names.values())) == len(models)
    graph = merged("net", ((names[case], gradc.from_onnx(made)) for case, (made, _) in models.items()))
    module = gradc.compile(graph, target="cpu")
    given = {f"{names[case]}.{n}": v for case, (_, values) in models.items() for n, v in values.items()}
    found = module.forward.run(**given)
    calls = [step.op for step in module.forward.program.steps if isinstance(step, Call)]
    return {case: found[f"{names[case]}.y"] for case in models}, calls


def assert_each(
    models: Mapping[tuple[Any, ...], tuple[Any, Values]], wanted: dict[tuple[Any, ...], np.ndarray]
) -> None:
    """Equal to the last bit, and products of integers each."""
    found, calls = computed(models)
    assert calls == ["integer_matmul"] * len(models)
    for case, exact in wanted.items():
        assert found[case].dtype == exact.dtype and found[case].shape == exact.shape, case
        np.testing.assert_array_equal(found[case], exact, err_msg=str(case))


def whole_range(kind: str, *shape: int) -> Any:
    ends = np.iinfo(kind)
    return np.asarray(rng.integers(ends.min, ends.max + 1, shape), kind)


def test_rounded_products_are_those_of_onnx_reference() -> None:
    """QLinearMatMul, bit for bit; of ``ties`` some sums lie between two codes, of which the even one is taken."""

    def product(step: str, lead: tuple[int, ...], left: str, right: str, result: str) -> tuple[Any, Values]:
        columns = (21,) if step == "columns" else ()
        drawn = rng.uniform(0.01, 0.02), rng.uniform(0.01, 0.02, columns), 0.37
        a, b, y = (0.5, 0.25, 16.0) if step == "ties" else drawn
        middle = {"u1": 128, "i1": 0}
        given = {
            "a": whole_range(left, *lead, 33, 3 if step == "ties" else 300),
            "as": np.asarray(a, "f4"),
            "az": np.asarray(middle[left] + 3, left),
            "b": whole_range(right, 3 if step == "ties" else 300, 21),
            "bs": np.asarray(b, "f4"),
            "bz": np.asarray(middle[right] + rng.integers(-3, 4, columns), right),
            "ys": np.asarray(y, "f4"),
            "yz": np.asarray(middle[result] - 5, result),
        }
        return one_node("QLinearMatMul", given, result, (*lead, 33, 21)), given

    kinds = (("u1", "u1", "u1"), ("u1", "i1", "i1"), ("i1", "i1", "u1"), ("i1", "u1", "i1"))
    cases = itertools.product(("any", "ties", "columns"), ((), (2,)), kinds)
    models = {(step, lead, *of): product(step, lead, *of) for step, lead, of in cases}
    wanted = {case: ReferenceEvaluator(made).run(None, given)[0] for case, (made, given) in models.items()}
    assert all(np.unique(exact).size > 20 for exact in wanted.values())
    assert_each(models, wanted)


def product_of(left: tuple[int, ...], right: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...]) -> Any:
    """The inputs of a QLinearMatMul whose operands have scales and zero points of these shapes, and its model."""
    given = {
        "a": whole_range("u1", *left),
        "as": np.asarray(rng.uniform(0.01, 0.02, rows), "f4"),
        "az": whole_range("u1", *rows),
        "b": whole_range("i1", *right),
        "bs": np.asarray(rng.uniform(0.01, 0.02, columns), "f4"),
        "bz": whole_range("i1", *columns),
        "ys": np.asarray(0.37, "f4"),
        "yz": np.asarray(117, "u1"),
    }
    return given, one_node("QLinearMatMul", given, "u1", np.matmul(given["a"], given["b"]).shape)


def test_products_of_vectors_and_scales_of_a_batch_are_those_of_onnx_reference() -> None:
    cases: tuple[tuple[tuple[int, ...], ...], ...] = (
        ((7,), (7, 6), (), ()),
        ((7,), (7, 6), (1,), (6,)),
        ((5, 7), (7,), (), (1,)),
        ((7,), (7,), (), ()),
        ((5, 7), (7, 6), (5, 1), (1, 6)),
        ((2, 5, 7), (7, 6), (2, 5, 1), (6,)),
        ((2, 5, 7), (2, 7, 6), (), (2, 1, 6)),
        ((1, 3, 5, 7), (2, 1, 7, 6), (), ()),
    )
    models = {(number, *case): product_of(*case)[::-1] for number, case in enumerate(cases)}
    assert_each(models, {case: ReferenceEvaluator(made).run(None, given)[0] for case, (made, given) in models.items()})


@pytest.mark.parametrize("lead", [(), (2,)], ids=["matrix", "batch"])
def test_zero_points_of_rows_are_not_taken_for_those_of_columns(lead: tuple[int, ...]) -> None:
    """As many rows as columns; against integers: ONNX's reference takes zero points of rows for a scalar's."""
    given, made = product_of((*lead, 5, 7), (7, 5), (5,), ())
    sums = np.matmul(given["a"].astype("i8") - given["az"][:, None], given["b"].astype("i8") - given["bz"])
    factor = (given["as"][:, None] * given["bs"] / given["ys"]).astype("f8")
    wanted = np.clip(np.rint(sums * factor + given["yz"]), 0, 255)
    np.testing.assert_array_equal(gradc.compile(gradc.from_onnx(made), target="cpu")(**given), wanted)


def test_gemm_of_codes_is_onnxruntimes() -> None:
    """com.microsoft.QGemm, to the last bit of codes, and one of floats."""
    runtime = pytest.importorskip("onnxruntime", reason="the oracle")

    def product(alpha: float, turned: int, rounds: bool, bias: bool) -> tuple[Any, Values]:
        a, b = whole_range("u1", 17, 90), whole_range("i1", 90, 21)
        given = {
            "a": np.ascontiguousarray(a.T) if turned else a,
            "as": np.asarray(0.013, "f4"),
            "az": whole_range("u1"),
            "b": np.ascontiguousarray(b.T) if turned else b,
            "bs": np.asarray(0.021, "f4"),
            "bz": np.asarray(3, "i1"),
            "c": np.asarray(rng.integers(-4000, 4000, 21), "i4") if bias else None,
            "ys": np.asarray(0.7, "f4") if rounds else None,
            "yz": np.asarray(119, "u1") if rounds else None,
        }
        of, attrs = "u1" if rounds else "f4", {"alpha": alpha, "transA": turned, "transB": turned}
        made = one_node("QGemm", given, of, (17, 21), "com.microsoft", **attrs)
        return made, {n: v for n, v in given.items() if v is not None}

    cases = itertools.product((1.0, 0.5), (0, 1), (False, True), (False, True))
    models = {case: product(*case) for case in cases}
    found, calls = computed(models)
    assert calls == ["integer_matmul"] * len(models)
    for case, (made, fed) in models.items():
        oracle = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        (wanted,) = oracle.run(None, fed)
        assert found[case].dtype == wanted.dtype and np.unique(wanted).size > 20, case
        rounds = case[2]
        np.testing.assert_allclose(found[case], wanted, rtol=0 if rounds else 2e-7, err_msg=str(case))


KINDS_OF_CODES = [("u1", "i1"), ("i1", "i1"), ("u1", "u1"), ("i1", "u1")]


# -- products of integers ----------------------------------------------------------------------------------------------


def test_products_of_integers_are_exact() -> None:
    """MatMulInteger, against NumPy's integers of 64 bits; sums of these stay in 32."""

    def product(lead: tuple[int, ...], zeros: str, left: str, right: str) -> tuple[Any, Values, np.ndarray]:
        rows, inner, columns = 5, 1100, 7
        ends = {kind: np.iinfo(kind) for kind in (left, right)}

        def drawn(kind: str, *shape: int) -> np.ndarray:
            return np.asarray(rng.integers(ends[kind].min, ends[kind].max + 1, shape), kind)

        values = {"a": drawn(left, *lead, rows, inner), "b": drawn(right, inner, columns)}
        of_rows = {"one": (), "rows": (*lead, rows), "each": (*lead, rows)}.get(zeros)
        of_columns = {"one": (), "columns": (columns,), "each": (columns,)}.get(zeros)
        za = np.zeros((), left) if of_rows is None else drawn(left, *of_rows)
        zb = np.zeros((), right) if of_columns is None else drawn(right, *of_columns)
        given = values | ({} if of_rows is None else {"za": za}) | ({} if of_columns is None else {"zb": zb})
        names = ["a", "b", "za" if "za" in given else "", "zb" if "zb" in given else ""]
        graph = helper.make_graph(
            [helper.make_node("MatMulInteger", names, ["y"])],
            "net",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for n, v in given.items()
            ],
            [helper.make_tensor_value_info("y", TensorProto.INT32, [*lead, rows, columns])],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        a, b, za, zb = (np.asarray(v, "i8") for v in (values["a"], values["b"], za, zb))
        wanted = (a - (za[..., None] if za.ndim else za)) @ (b - zb)
        assert abs(wanted).max() < 2**31
        return made, given, wanted.astype("i4")

    zeros = ("none", "one", "rows", "columns", "each")
    cases = {(lead, of, *kinds) for lead, of, kinds in itertools.product(((), (2,)), zeros, KINDS_OF_CODES)}
    drawn = {case: product(*case) for case in sorted(cases)}
    assert_each(
        {case: (made, given) for case, (made, given, _) in drawn.items()},
        {case: wanted for case, (_, _, wanted) in drawn.items()},
    )


@pytest.mark.parametrize(
    "left,right,zero_left,zero_right",
    [
        ((5, 9), (9,), (5,), ()),
        ((2, 5, 9), (9,), (2, 5, 1), (1,)),
        ((9,), (2, 9, 4), (1,), (2, 1, 4)),
        ((9,), (9,), (1,), ()),
        ((1, 9), (9, 1), (1,), (1,)),
    ],
)
def test_products_of_integers_with_a_vector_have_an_axis_less(
    left: tuple[int, ...], right: tuple[int, ...], zero_left: tuple[int, ...], zero_right: tuple[int, ...]
) -> None:
    """MatMulInteger multiplies as ``numpy.matmul`` does; a zero point for each row does not broadcast to columns."""
    shapes = {"a": left, "b": right, "za": zero_left, "zb": zero_right}
    given = {n: np.asarray(rng.integers(-128, 128, shape), "i1") for n, shape in shapes.items()}
    a, b, za, zb = (given[n].astype("i8") for n in shapes)
    wanted = (a - (za[:, None] if za.ndim == a.ndim - 1 and za.ndim else za)) @ (b - zb)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", list(shapes), ["y"])],
        "net",
        [helper.make_tensor_value_info(n, TensorProto.INT8, shape) for n, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.INT32, wanted.shape)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = gradc.compile(gradc.from_onnx(made), target="numpy")(**given)
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


# -- convolutions of integers ------------------------------------------------------------------------------------------

PLANE = ((2, 6, 9, 8), (4, 6, 3, 2))
"""The shapes of an image and of a filter."""
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (*PLANE, {}),
    "padded": (*PLANE, {"pads": [1, 0, 2, 3]}),
    "strided": (*PLANE, {"pads": [1, 1, 1, 1], "strides": [2, 3]}),
    "dilated": (*PLANE, {"pads": [2, 1, 0, 1], "dilations": [2, 3]}),
    "upper": (*PLANE, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "lower": (*PLANE, {"auto_pad": "SAME_LOWER", "dilations": [2, 1]}),
    "valid": (*PLANE, {"auto_pad": "VALID", "strides": [1, 2]}),
    "groups": ((2, 6, 9, 8), (4, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 6, 9, 8), (12, 1, 3, 3), {"group": 6, "pads": [0, 1, 2, 1], "strides": [1, 2]}),
    "one channel": ((2, 1, 9, 8), (5, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
    "pointwise": ((2, 6, 5, 4), (7, 6, 1, 1), {}),
    "pointwise, strided": ((2, 6, 5, 4), (7, 6, 1, 1), {"strides": [2, 2], "pads": [0, 1, 0, 1]}),
    "line": ((2, 6, 17), (4, 3, 3), {"group": 2, "pads": [3, 1], "dilations": [2], "strides": [2]}),
    "volume": ((1, 4, 5, 6, 4), (3, 4, 2, 3, 2), {"pads": [1, 0, 1, 0, 2, 1], "strides": [1, 2, 1]}),
    "volume, depthwise": ((1, 3, 5, 6, 4), (3, 1, 2, 3, 2), {"group": 3, "auto_pad": "SAME_UPPER"}),
    "beyond 2^24": ((1, 300, 4, 4), (3, 300, 3, 3), {"pads": [1, 1, 1, 1]}),
    "beyond 2^31": ((1, 70000, 2), (2, 70000, 1), {}),
}
OF_CHANNELS = ("w", "ws", "wz", "bias")


def convolved(op: str, given: Values, result: str, **attrs: Any) -> np.ndarray:
    """What ONNX's reference computes; channel by channel where it takes scales and zero points of a plane alone."""

    def run(values: Values, **attrs: Any) -> np.ndarray:
        made = one_node(op, values, result, (None,) * given["x"].ndim, **attrs)  # type: ignore[arg-type]
        return np.asarray(ReferenceEvaluator(made).run(None, values)[0])

    if given["x"].ndim == 4:
        return run(given, **attrs)
    outer, inner = given["w"].shape[:2]
    groups = attrs.pop("group", 1)
    found = []
    for o in range(outer):
        first = o // (outer // groups) * inner
        one = {n: v[o : o + 1] if n in OF_CHANNELS and v.ndim else v for n, v in given.items()}
        one |= {n: one[n].reshape(()) for n in ("ws", "wz") if n in one}
        found.append(run(one | {"x": given["x"][:, first : first + inner]}, **attrs))
    return np.concatenate(found, 1)


def image_and_filter(geometry: str, left: str, right: str, each: str) -> tuple[Values, dict[str, Any]]:
    """The inputs of a ConvInteger, with zero points of the tensor, of each channel of the filter, or none."""
    image, filter_, attrs = CONVOLUTIONS[geometry]
    given: Values = {"x": whole_range(left, *image), "w": whole_range(right, *filter_)}
    if geometry.startswith("beyond"):  # as large as sums become
        given = {n: np.maximum(v, np.iinfo(v.dtype).max - 3) for n, v in given.items()}
    if each != "none":
        given["xz"] = np.asarray(np.iinfo(left).min + 7, left)
        given["wz"] = whole_range(right, *(filter_[:1] if each == "channels" else ()))
    return given, attrs


COVERED = [
    *((geometry, "channels", ("u1", "i1")) for geometry in CONVOLUTIONS),
    *itertools.product(("padded", "depthwise"), ("none", "tensor", "channels"), KINDS_OF_CODES),
    *itertools.product(("beyond 2^24", "beyond 2^31"), ("none", "tensor"), [("u1", "u1")]),
]
"""Convolutions, what has a zero point, and the dtypes of image and filter."""


def test_convolutions_of_integers_are_those_of_onnx_reference() -> None:
    """ConvInteger, modulo 2^32, also where no f32 holds the sum."""
    models, exact = {}, {}
    for geometry, each, kinds in COVERED:
        given, attrs = image_and_filter(geometry, *kinds, each)
        wanted = convolved("ConvInteger", given, "i4", **attrs)
        if geometry == "beyond 2^24" and each == "none":
            assert wanted.max() > 1 << 24 and np.any(wanted % 2)
        if geometry == "beyond 2^31" and each == "none":  # 70000 products of 252 at least
            assert np.all(wanted < 70000 * 252**2)
        case = geometry, each, kinds
        models[case] = one_node("ConvInteger", given, "i4", wanted.shape, **attrs), given
        exact[case] = wanted
    found, calls = computed(models)
    alone = [case for case, (_, given) in models.items() if given["w"].shape[1] == 1]
    assert calls == ["integer_matmul"] * (len(models) - len(alone))
    for case, wanted in exact.items():
        assert found[case].dtype == wanted.dtype and found[case].shape == wanted.shape and np.any(wanted), case
        np.testing.assert_array_equal(found[case], wanted, err_msg=str(case))


ROUNDED = [
    *(
        (geometry, "any", "channels", ("u1", "i1", "u1"), True)
        for geometry in CONVOLUTIONS
        if geometry != "beyond 2^31"
    ),
    *itertools.product(
        ("padded", "depthwise"),
        ("ties", "saturating"),
        ("tensor",),
        (("i1", "i1", "i1"), ("u1", "u1", "i1")),
        (False, True),
    ),
]


def test_rounded_convolutions_are_those_of_onnx_reference() -> None:
    """QLinearConv, bit for bit; of ``ties`` some sums lie between two codes, of which the even one is taken."""

    def convolution(
        geometry: str, step: str, each: str, kinds: tuple[str, str, str], bias: bool
    ) -> tuple[Any, Values, np.ndarray]:
        left, right, result = kinds
        given, attrs = image_and_filter(geometry, left, right, each)
        outer = given["w"].shape[:1]
        sums = convolved("ConvInteger", given, "i4", **attrs)
        spacing = 2.0 ** np.ceil(
            np.log2(sums.std() / (400 if step == "saturating" else 40))
        )  # codes are a few times that
        channels = outer if each == "channels" else ()
        scales = {
            "xs": np.asarray(0.5 if step == "ties" else rng.uniform(0.01, 0.02), "f4"),
            "ws": np.asarray(0.25 if step == "ties" else rng.uniform(0.01, 0.02, channels), "f4"),
        }
        ys = np.asarray(spacing * scales["xs"] * np.mean(scales["ws"]), "f4")
        middle = int(np.median(sums) / spacing)
        zero = np.asarray(np.clip(-middle, *(np.iinfo(result).min, np.iinfo(result).max)), result)
        given = {
            **{"x": given["x"], "xs": scales["xs"], "xz": given["xz"], "w": given["w"], "ws": scales["ws"]},
            **{"wz": given["wz"], "ys": ys, "yz": zero},
            **({"bias": np.asarray(rng.integers(-3 * spacing, 3 * spacing + 1, outer), "i4")} if bias else {}),
        }
        wanted = convolved("QLinearConv", given, result, **attrs)
        made = one_node("QLinearConv", given, result, wanted.shape, **attrs)
        return made, given, wanted

    drawn = {case: convolution(*case) for case in ROUNDED}
    found, _ = computed({case: (made, given) for case, (made, given, _) in drawn.items()})
    for case, (_, _, wanted) in drawn.items():
        assert found[case].dtype == wanted.dtype and found[case].shape == wanted.shape, case
        assert np.unique(wanted).size > 1, case
        np.testing.assert_array_equal(found[case], wanted, err_msg=str(case))
        geometry, step, _, (*_, result), _ = case
        if step == "saturating" and geometry == "padded":
            assert {np.iinfo(result).min, np.iinfo(result).max} <= set(wanted.ravel().tolist()), case


@pytest.mark.parametrize("geometry", ["padded", "groups", "depthwise", "line"])
def test_convolutions_of_integers_take_any_batch_and_size(geometry: str) -> None:
    given, attrs = image_and_filter(geometry, "u1", "u1", "channels")
    made = one_node("ConvInteger", given, "i4", (None,) * given["x"].ndim, **attrs)  # type: ignore[arg-type]
    for axis, name in ((0, "batch"), (2, "height")):
        made.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    module = gradc.compile(gradc.from_onnx(made), target="cpu")
    for batch, height in ((1, 9), (3, 13)):
        values = given | {"x": whole_range("u1", batch, given["x"].shape[1], height, *given["x"].shape[3:])}
        np.testing.assert_array_equal(module(**values), convolved("ConvInteger", values, "i4", **attrs))


@pytest.mark.parametrize(
    "changed,message",
    [
        ({"w": np.ones((4, 5, 3, 2), "u1")}, "has 6 channels and the weight takes 5"),
        ({"w": np.ones((4, 6, 30, 2), "u1")}, "larger than the padded input"),
        ({"wz": np.ones(3, "u1")}, "a size of 3 does not broadcast to 4"),
        ({"xz": np.ones(6, "u1")}, "6 elements do not fill a scalar"),
        ({"xz": np.ones((), "i1")}, "zero point i8.. of u8.2,6,9,8.: the dtypes differ"),
        ({"wz": np.ones((), "i1")}, "zero point i8.. of u8.4,6,3,2.: the dtypes differ"),
    ],
)
def test_convolutions_of_integers_refuse_what_does_not_fit(changed: Values, message: str) -> None:
    given = image_and_filter("plain", "u1", "u1", "tensor")[0] | changed
    with pytest.raises(GradcError, match=message):
        gradc.from_onnx(one_node("ConvInteger", given, "i4", (None,) * 4))  # type: ignore[arg-type]


def test_a_convolution_of_integers_has_the_derivative_of_the_scale_that_is_multiplied_with_it() -> None:
    """Between steps the integers of DynamicQuantizeLinear are constant, and its scale is (largest - least) / 255."""
    x, w = rng.standard_normal((1, 4, 7, 7)).astype(np.float32), whole_range("u1", 5, 4, 3, 3)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("ConvInteger", ["q", "w", "zero"], ["sums"], pads=[1, 1, 1, 1]),
        helper.make_node("Cast", ["sums"], ["floats"], to=F),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    case = Case(nodes, {"x": x}, {"w": w}, (), lambda v: np.zeros((1,) * 4))
    made = model(case)
    module = gradc.compile(gradc.from_onnx(made), wrt=["x"], target="cpu")
    y, residuals = module.forward(x=x)
    sums = y / np.float32((x.max() - x.min()) / 255)
    wanted = np.zeros_like(x)
    wanted.flat[x.argmax()], wanted.flat[x.argmin()] = sums.sum() / 255, -sums.sum() / 255
    np.testing.assert_allclose(module.backward(residuals, np.ones_like(y))["x"], wanted, rtol=1e-4)
