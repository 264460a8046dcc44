"""gradc.from_onnx: weights as inputs, sizes that vary, quantized models and their scales, control flow, bad files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import gradc  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.cli import main  # noqa: E402
from gradc.errors import GradcError, InvalidProblem, Unsupported  # noqa: E402
from gradc.ir.operands import CAPTURE  # noqa: E402
from gradc.onnx.viewer import to_onnx  # noqa: E402

rng = np.random.default_rng(0)
DATA = Path(onnx.__file__).parent / "backend/test/data/light"
F = TensorProto.FLOAT


def model(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 21,
    **options: Any,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, **options)


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_weights_are_inputs_with_defaults_and_learn() -> None:
    """Names are the model's; a number is a constant; the gradient of a weight is that of the written formula."""
    w, b = f32(4, 3), f32(3)
    made = model(
        [
            helper.make_node("MatMul", ["x", "/body/w"], ["m"]),
            helper.make_node("Add", ["m", "body.b"], ["a"]),
            helper.make_node("Mul", ["a", "two"], ["y"]),
        ],
        {"x": (F, ["batch", 4])},
        {"y": (F, ["batch", 3])},
        {"/body/w": w, "body.b": b, "two": np.float32(2).reshape(())},
    )
    graph = gradc.from_onnx(made)
    assert graph.input_names == ("x", "body.w", "body.b") and graph.dims == ("batch",)
    module = gradc.compile(graph, wrt=["body.w", "body.b"])
    x, dy = f32(5, 4), f32(5, 3)
    y, residuals = module.forward(x=x)
    np.testing.assert_allclose(y, (x @ w + b) * 2, rtol=1e-5, atol=1e-6)
    grads = module.backward(residuals, dy)
    np.testing.assert_allclose(grads["body.w"], x.T @ dy * 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["body.b"], dy.sum(0) * 2, rtol=1e-5, atol=1e-6)
    assert gradc.parse(str(graph)) == graph


def test_shapes_are_computed_when_the_model_is_read() -> None:
    """What exporters write for ``x.reshape(x.shape[0], -1)``, with sizes that vary."""
    made = model(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["n"]),
            helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
            helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["y"]),
        ],
        {"x": (F, ["N", 3, 4])},
        {"y": (F, ["N", 12])},
        {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])},
    )
    graph = gradc.from_onnx(made)
    assert str(graph.outputs[0][1].type) == "f32[N,12]" and graph.input_names == ("x",)
    bound = gradc.from_onnx(made, dims={"N": 2})
    assert str(bound.outputs[0][1].type) == "f32[2,12]"
    with pytest.raises(InvalidProblem, match="no dim 'M'"):
        gradc.from_onnx(made, dims={"M": 2})
    with pytest.raises(InvalidProblem, match="no input 'z'"):
        gradc.from_onnx(made, constants={"z": 1})


def test_a_quantized_model_keeps_codes_and_its_scales_learn() -> None:
    """QDQ: no float copy of the weight beside its codes in the program, gradients of scales against differences of the
    float emulation.
    """
    codes = rng.integers(-100, 100, (6, 4)).astype(np.int8)
    scale = (0.01 + 0.01 * rng.random(4)).astype(np.float32)
    made = model(
        [
            helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=1),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        {"x": (F, [3, 6])},
        {"y": (F, [3, 4])},
        {"codes": codes, "scale": scale},
    )
    graph = gradc.from_onnx(made)
    assert graph.input_names == ("x", "codes", "scale")
    assert [n.op.name for n in graph.nodes if n.op.name != "input"] == ["reshape", "dequantize", "matmul"]
    module = gradc.compile(graph, wrt=["scale", "x"])
    x, dy = f32(3, 6), f32(3, 4)
    y, residuals = module.forward(x=x)
    weight = codes.astype(np.float64) * scale
    np.testing.assert_allclose(y, x @ weight, rtol=1e-5, atol=1e-6)
    grads = module.backward(residuals, dy)
    np.testing.assert_allclose(grads["scale"], (codes * (x.T.astype(np.float64) @ dy)).sum(0), rtol=1e-4)
    np.testing.assert_allclose(grads["x"], dy @ weight.T, rtol=1e-4, atol=1e-5)
    stored = [b for b in module.backward.program.buffers if b.kind == "temp" and str(b.type) == "f32[6,4]"]
    assert len(stored) <= 1, "x^T dy alone; the weight stays codes"


@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
def test_matmul_of_four_bits(zeros: str) -> None:
    """com.microsoft.MatMulNBits against its definition, K no multiple of the block."""
    K, N, block = 40, 5, 16
    count = -(-K // block)
    codes = rng.integers(0, 16, (N, count * block)).astype(np.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(N, count, block // 2)
    scales = (0.1 + rng.random((N, count))).astype(np.float32)
    zero = np.full((N, count), 8.0)
    weights = {"b": packed, "scales": scales.reshape(-1)}
    if zeros == "packed":
        whole = rng.integers(0, 16, (N, count + count % 2)).astype(np.uint8)
        weights["z"], zero = (whole[:, 0::2] | whole[:, 1::2] << 4).reshape(-1), whole[:, :count].astype(float)
    elif zeros == "float":
        weights["z"] = (zero := rng.random((N, count)) * 15).astype(np.float32).reshape(-1)
    node = helper.make_node(
        "MatMulNBits", ["a", *weights], ["y"], domain="com.microsoft", K=K, N=N, bits=4, block_size=block
    )
    graph = gradc.from_onnx(model([node], {"a": (F, [2, K])}, {"y": (F, [2, N])}, weights))
    assert {"b", "scales"} <= set(graph.input_names)
    a = f32(2, K)
    dense = ((codes.reshape(N, count, block) - zero[..., None]) * scales[..., None]).reshape(N, -1)[:, :K]
    np.testing.assert_allclose(interp.run(graph, {"a": a})["y"], a @ dense.T, rtol=1e-4, atol=1e-4)
    module = gradc.compile(graph, wrt=["scales"], target="numpy")
    y, residuals = module.forward(a=a)
    found = np.asarray(module.backward(residuals, np.ones_like(y))["scales"]).reshape(N, count)
    wanted = (codes.reshape(N, count, block) - zero[..., None]) * np.pad(a.sum(0), (0, count * block - K)).reshape(
        count, block
    )
    np.testing.assert_allclose(found, wanted.sum(-1), rtol=1e-4, atol=1e-4)


def test_control_flow_that_is_known() -> None:
    """If by a constant, Loop unrolled with a carried value and a collected one, both reading names around them."""
    inner = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "x"], ["next"]),
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("Mul", ["next", "next"], ["square"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", F, [2]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", F, [2]),
            helper.make_tensor_value_info("square", F, [2]),
        ],
    )
    branch = {
        name: helper.make_graph(
            [helper.make_node(op, ["last"], ["r"])], name, [], [helper.make_tensor_value_info("r", F, [2])]
        )
        for name, op in (("yes", "Neg"), ("no", "Abs"))
    }
    made = model(
        [
            helper.make_node("Loop", ["steps", "", "x"], ["last", "all"], body=inner),
            helper.make_node("If", ["c"], ["y"], then_branch=branch["yes"], else_branch=branch["no"]),
        ],
        {"x": (F, [2])},
        {"y": (F, [2]), "all": (F, [3, 2])},
        {"steps": np.array(3), "c": np.array(True)},
    )
    graph = gradc.from_onnx(made)
    x = f32(2)
    found = interp.run(graph, {"x": x})
    np.testing.assert_allclose(found["y"], -4 * x, rtol=1e-6)
    np.testing.assert_allclose(found["all"], np.stack([(k * x) ** 2 for k in (2, 3, 4)]), rtol=1e-5)


def test_functions_of_the_model() -> None:
    body = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("LeakyRelu", ["a"], ["c"]), helper.make_node("Add", ["c", "c"], ["b"])],
        [helper.make_opsetid("", 21)],
        ["alpha"],
    )
    body.node[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=1))
    made = model(
        [helper.make_node("Twice", ["x"], ["y"], domain="own", alpha=0.5)],
        {"x": (F, [3])},
        {"y": (F, [3])},
        functions=[body],
    )
    made.opset_import.append(helper.make_opsetid("own", 1))
    x = np.array([-2, 0, 3], np.float32)
    assert interp.run(gradc.from_onnx(made), {"x": x})["y"].tolist() == [-2, 0, 6]


@long_tests.values
@pytest.mark.parametrize("path", sorted(DATA.glob("*.onnx")), ids=lambda p: p.stem)
def test_networks_with_stored_outputs(path: Path) -> None:
    """The light ones of onnx's package, whose input is a ramp from 0 to 1."""
    graph = gradc.from_onnx(path)
    (given,) = [n for n in graph.inputs if graph.input_name(n) not in graph.defaults]
    count = int(np.prod(given.shape))
    image = (np.arange(count) / count).astype(np.float32).reshape(given.shape)
    output = TensorProto()
    output.ParseFromString(path.with_name(f"{path.stem}_output_0.pb").read_bytes())
    feed = {graph.input_name(given): image}
    if path.stem.endswith("vgg19"):  # twice as fast, compiled
        found = gradc.compile(graph, target="cpu")(**feed)
    else:
        (found,) = interp.run(graph, feed).values()
    np.testing.assert_allclose(found, numpy_helper.to_array(output), rtol=1e-3, atol=1e-6)


def test_the_page() -> None:
    """The block of docs/onnx.md."""
    page = (Path(__file__).resolve().parents[2] / "docs/onnx.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/onnx.md", "exec"), {})


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    assert main(["dump", str(tmp_path / "model.onnx")]) == 0
    assert "relu" in capsys.readouterr().out


# -- bad files ---------------------------------------------------------------------------------------------------------


def small(op: str = "Relu", **options: Any) -> Any:
    return model([helper.make_node(op, ["x"], ["y"], name="first")], {"x": (F, [2])}, {"y": (F, [2])}, **options)


def test_files_that_are_none(tmp_path: Path) -> None:
    for data in (b"", b"\x08", b"no model", bytes(range(256)) * 9, small().SerializeToString()[:-7]):
        path = tmp_path / "model.onnx"
        path.write_bytes(data)
        with pytest.raises(GradcError):
            gradc.from_onnx(path)
    with pytest.raises(InvalidProblem, match=r"gone.onnx cannot be read"):
        gradc.from_onnx(tmp_path / "gone.onnx")
    with pytest.raises(InvalidProblem, match="not a int"):
        gradc.from_onnx(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "", "inside/../../secret", "gone"])
def test_external_data_is_beside_the_model(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 64)
    folder = tmp_path / "model"
    (folder / "inside").mkdir(parents=True)
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (F, [4])}, {"y": (F, [4])}, {"w": f32(4)})
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(InvalidProblem, match="'w'"):
        gradc.from_onnx(path)
    if location != "gone":
        return
    (folder / location).write_bytes(np.arange(4, dtype=np.float32).tobytes())
    assert gradc.from_onnx(path).defaults["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidProblem, match="give the model's path"):
        gradc.from_onnx(path.read_bytes())


def test_all_that_is_missing_is_named_at_once() -> None:
    made = model(
        [
            helper.make_node("ImageDecoder", ["a"], ["c"], name="picture"),
            helper.make_node("TreeEnsembleRegressor", ["b"], ["d"], name="forest", domain="ai.onnx.ml"),
        ],
        {"a": (TensorProto.UINT8, [9]), "b": (F, [2, 2])},
        {"c": (TensorProto.UINT8, ["h", "w", 3]), "d": (F, [2, 1])},
    )
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(Unsupported, match=r"(?s)take 2 of.*ImageDecoder.*'picture'.*TreeEnsemble.*'forest'"):
        gradc.from_onnx(made)


BAD: dict[str, tuple[Any, str]] = {
    "an opset that is not there": (lambda: small(opset=999), "999"),
    "strings": (
        lambda: model(
            [helper.make_node("Identity", ["x"], ["y"])],
            {"x": (TensorProto.STRING, [2])},
            {"y": (TensorProto.STRING, [2])},
        ),
        "STRING",
    ),
    "complex numbers": (
        lambda: model(
            [helper.make_node("Identity", ["x"], ["y"])],
            {"x": (TensorProto.COMPLEX64, [2])},
            {"y": (TensorProto.COMPLEX64, [2])},
        ),
        "COMPLEX64",
    ),
    "an unknown domain": (
        lambda: model(
            [helper.make_node("Thing", ["x"], ["y"], domain="com.microsoft")], {"x": (F, [2])}, {"y": (F, [2])}
        ),
        "com.microsoft.Thing",
    ),
    "a value that is not there": (
        lambda: model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (F, [2])}, {"y": (F, [2])}),
        "w",
    ),
    "shapes that do not fit": (
        lambda: model(
            [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
            {"x": (F, [2, 3])},
            {"y": (F, [2, 2])},
            {"w": f32(4, 2)},
        ),
        "product",
    ),
    "a shape that depends on data": (
        lambda: model(
            [helper.make_node("Reshape", ["x", "s"], ["y"], name="shaped")],
            {"x": (F, [4]), "s": (TensorProto.INT64, [2])},
            {"y": (F, ["a", "b"])},
        ),
        "shaped.*constants=",
    ),
    "a circle": (
        lambda: model(
            [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])],
            {"x": (F, [2])},
            {"b": (F, [2])},
        ),
        "b",
    ),
    "no opset": (lambda: without_opset(), "no graph or no opset"),
    "an opset before the first": (lambda: small(opset=0), "opset 0"),
    "two results of one name": (
        lambda: model(
            [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])],
            {"x": (F, [2])},
            {"y": (F, [2])},
        ),
        "y",
    ),
    "two inputs of one name": (lambda: twice("input"), "x"),
    "two weights of one name": (lambda: twice("initializer"), "w"),
    "a branch by data": (lambda: branching("If"), "If 'chosen'.*computed from data"),
    "a loop by data": (lambda: branching("Loop"), "Loop 'chosen'.*computed from data"),
    "a sequence given": (lambda: given(helper.make_sequence_type_proto), "the input 's' is a sequence_type"),
    "an optional given": (lambda: given(helper.make_optional_type_proto), "the input 's' is a optional_type"),
    "a sequence returned": (
        lambda: model([helper.make_node("SequenceConstruct", ["x"], ["y"])], {"x": (F, [2])}, {"y": (F, [2])}),
        "a sequence where a tensor is needed",
    ),
    "a sequence without end": (
        lambda: model(
            [
                helper.make_node("SplitToSequence", ["x"], ["s"], name="parts"),
                helper.make_node("SequenceLength", ["s"], ["y"]),
            ],
            {"x": (F, [10**12])},
            {"y": (TensorProto.INT64, [])},
        ),
        "SplitToSequence 'parts'.*more than 10000 parts",
    ),
    "a recurrent layer without end": (
        lambda: model(
            [helper.make_node("RNN", ["x", "w", "r"], ["", "y"], hidden_size=2, name="layer")],
            {"x": (F, [10**12, 1, 3])},
            {"y": (F, [1, 1, 2])},
            {"w": f32(1, 2, 3), "r": f32(1, 2, 2)},
        ),
        "RNN 'layer'.*1000000000000 steps",
    ),
    "a function that calls itself": (lambda: endless(), "Again.*recursive"),
    "a tensor larger than its data": (lambda: huge(), "'w'|w"),
    "a constant of strings": (
        lambda: model([helper.make_node("Constant", [], ["y"], value_string="a", name="word")], {}, {"y": (F, [])}),
        "Constant 'word'.*value_string",
    ),
}


def without_opset() -> bytes:
    made = small()
    del made.opset_import[:]
    return made.SerializeToString()


def twice(field: str) -> Any:
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (F, [2])}, {"y": (F, [2])}, {"w": f32(2)})
    getattr(made.graph, field).append(getattr(made.graph, field)[0])
    return made


def branching(op: str) -> Any:
    """Control flow whose condition is an input."""
    info = helper.make_tensor_value_info
    if op == "If":
        branch = helper.make_graph([helper.make_node("Neg", ["x"], ["r"])], "b", [], [info("r", F, [2])])
        node = helper.make_node("If", ["c"], ["y"], name="chosen", then_branch=branch, else_branch=branch)
    else:
        body = helper.make_graph(
            [helper.make_node("Neg", ["a"], ["b"])],
            "b",
            [info("i", TensorProto.INT64, []), info("going", TensorProto.BOOL, []), info("a", F, [2])],
            [info("going", TensorProto.BOOL, []), info("b", F, [2])],
        )
        node = helper.make_node("Loop", ["", "c", "x"], ["y"], name="chosen", body=body)
    return model([node], {"x": (F, [2]), "c": (TensorProto.BOOL, [])}, {"y": (F, [2])})


def given(kind: Any) -> Any:
    """A model with an input that is no tensor."""
    made = small()
    made.graph.input.append(helper.make_value_info("s", kind(helper.make_tensor_type_proto(F, [2]))))
    return made


def endless() -> Any:
    nodes = [helper.make_node("Again", ["a"], ["b"], domain="own")]
    body = helper.make_function("own", "Again", ["a"], ["b"], nodes, [helper.make_opsetid("own", 1)])
    made = model([helper.make_node("Again", ["x"], ["y"], domain="own")], {"x": (F, [2])}, {"y": (F, [2])})
    made.functions.append(body)
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def huge() -> Any:
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (F, [2])}, {"y": (F, [2])}, {"w": f32(2)})
    made.graph.initializer[0].dims[:] = [2**40, 2**40]
    return made


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    """By one typed error, after which nothing of it is left."""
    made, message = BAD[name]
    captures = len(CAPTURE)
    with pytest.raises((InvalidProblem, Unsupported), match=f"(?s){message}"):
        gradc.from_onnx(made())
    assert len(CAPTURE) == captures and gradc.from_onnx(small()).input_names == ("x",)


# What mutated files have found (tests/fuzz/onnx_files.py).


def test_names_that_are_no_text() -> None:
    for field in (b"net", b"first", b"Relu"):
        data = small().SerializeToString().replace(field, b"\xff" * len(field))
        with pytest.raises(InvalidProblem, match="UTF-8"):
            gradc.from_onnx(data)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"location": "a\0b"}, "cannot be read"),
        ({"location": "a" * 5000}, "cannot be read"),
        ({"location": "data", "length": str(10**12)}, "ends early: 16 bytes"),
        ({"location": "data", "offset": "17"}, "ends early"),
        ({"location": "data", "offset": "-1"}, "ends early"),
        ({"location": "data", "offset": "x"}, "cannot be read"),
        ({"location": "link"}, "outside of the model's folder"),
    ],
)
def test_external_data_that_cannot_be_there(places: dict[str, str], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * 16)
    (folder / "data").write_bytes(b"\0" * 16)
    (folder / "link").symlink_to("../secret")
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (F, [4])}, {"y": (F, [4])}, {"w": f32(4)})
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in places.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(InvalidProblem, match=message):
        gradc.from_onnx(folder / "model.onnx")


def test_no_axes_are_all_of_size_one() -> None:
    """As onnxruntime takes an empty list, where there is none."""
    made = model([helper.make_node("Squeeze", ["x"], ["y"])], {"x": (F, [1, 3, 1])}, {"y": (F, [3])}, opset=11)
    made.graph.node[0].attribute.append(helper.make_attribute("axes", [], attr_type=onnx.AttributeProto.INTS))
    assert interp.run(gradc.from_onnx(made), {"x": f32(1, 3, 1)})["y"].shape == (3,)


def test_windows_that_hold_nothing_are_refused() -> None:
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[2], pads=[0, 2])
    with pytest.raises(InvalidProblem, match="padding of 2 for windows of 2"):
        gradc.from_onnx(model([node], {"x": (F, [1, 1, 4])}, {"y": (F, [1, 1, 5])}))


def test_a_border_wider_than_the_axis_turns_out_to_be() -> None:
    node = helper.make_node("Pad", ["x", "pads"], ["y"], mode="reflect")
    made = model([node], {"x": (F, ["n"])}, {"y": (F, ["m"])}, {"pads": np.array([0, 5])})
    graph = gradc.from_onnx(made)
    x = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(interp.run(graph, {"x": x})["y"], np.pad(x, (0, 5), mode="reflect"))
    with pytest.raises(InvalidProblem, match="a slice from -4 to 1 of a size of 2"):
        interp.run(graph, {"x": x[:2]})


def test_names_are_no_code() -> None:
    """Whatever a model calls its values, the graph prints and parses back."""
    made = model(
        [helper.make_node("Add", ["d.x", "w;\n}"], ["r'y"])],
        {"d.x": (F, ["n-1", 2])},
        {"r'y": (F, ["n-1", 2])},
        {"w;\n}": f32(2)},
    )
    graph = gradc.from_onnx(made, name="a b")
    assert gradc.parse(str(graph)) == graph and graph.name == "a_b"


@pytest.mark.parametrize("stage", ["forward", "joint"])
def test_a_graph_is_written_as_a_valid_model(stage: str) -> None:
    """By the checker of the package onnx, whose format viewers read."""

    def loss(tokens: Any, q: Any, scale: Any) -> Any:
        rows = ops.embedding(tokens, ops.dequantize(q, scale, block=(1, 8)))
        return ops.mean(ops.cast(ops.softmax(ops.cast(rows, "bf16")), "f32"))

    traced = gradc.trace(loss, tokens="i64[N]", q="i8[V,8]", scale="f32[V,1]")
    graph = gradc.compile(traced, wrt=["scale"], target="numpy").stages[stage].result
    model = onnx.load_model_from_string(to_onnx(graph))
    onnx.checker.check_model(model)
    written = [node.op_type for node in model.graph.node]
    assert written == [n.op.name for n in graph.nodes if n.op.name != "input"] + ["output"] * len(graph.outputs)
    assert [o.name for o in model.graph.output] == list(graph.output_names)
    assert {"N", "V"} <= {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim}
    assert any("test_onnx.py:" in node.doc_string for node in model.graph.node)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("code", ["i1", "u1"])
@pytest.mark.parametrize("per_column", [False, True])
def test_a_recurrent_layer_of_codes(direction: str, code: str, per_column: bool) -> None:
    """As onnxruntime rounds what it multiplies with codes; every scale has a gradient."""
    ort = pytest.importorskip("onnxruntime", reason="the oracle")
    steps, batch, width, hidden = 5, 1, 6, 4
    directions = 2 if direction == "bidirectional" else 1
    draw = np.random.default_rng(len(direction))
    # Without VNNI onnxruntime adds two products of a byte and a signed code in 16 bits, which saturate beyond codes of
    # 7 bits (its own advice for such processors is reduce_range).
    low, high = (-64, 64) if code == "i1" else (0, 256)
    columns = (4 * hidden,) if per_column else ()
    data = {
        "w": draw.integers(low, high, (directions, width, 4 * hidden)).astype(code),
        "r": draw.integers(low, high, (directions, hidden, 4 * hidden)).astype(code),
        "b": draw.normal(0, 0.3, (directions, 8 * hidden)).astype("f4"),
        "h": draw.normal(0, 0.5, (directions, batch, hidden)).astype("f4"),
        "c": draw.normal(0, 0.5, (directions, batch, hidden)).astype("f4"),
        "ws": draw.uniform(0.005, 0.01, (directions, *columns)).astype("f4"),
        "wz": np.full((directions, *columns), 0 if code == "i1" else 128, code),
        "rs": draw.uniform(0.005, 0.01, (directions, *columns)).astype("f4"),
        "rz": np.full((directions, *columns), 0 if code == "i1" else 128, code),
    }
    inputs = ["x", "w", "r", "b", "", "h", "c", "", "ws", "wz", "rs", "rz"]
    node = helper.make_node(
        "DynamicQuantizeLSTM",
        inputs,
        ["y", "yh", "yc"],
        domain="com.microsoft",
        direction=direction,
        hidden_size=hidden,
    )
    shapes = {"y": [steps, directions, batch, hidden], **{name: [directions, batch, hidden] for name in ("yh", "yc")}}
    model = helper.make_model(
        helper.make_graph(
            [node],
            "lstm",
            [helper.make_tensor_value_info("x", F, [steps, batch, width])],
            [helper.make_tensor_value_info(name, F, shape) for name, shape in shapes.items()],
            [numpy_helper.from_array(array, name) for name, array in data.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=8,
    )
    x = draw.normal(0, 1, (steps, batch, width)).astype("f4")
    wanted = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    graph = gradc.from_onnx(model)
    for got, want in zip(interp.run(graph, {"x": x}).values(), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if direction != "bidirectional":  # which is made of both
        return
    module = gradc.compile(graph, wrt=["ws", "rs"], unused="zeros")
    given, residuals = module.forward(x=x)
    np.testing.assert_allclose(given["y"], wanted[0], rtol=1e-4, atol=1e-5)
    gradients = module.backward(residuals, **{name: np.ones_like(value) for name, value in given.items()})
    assert all(np.any(gradients[name]) and gradients[name].shape == data[name].shape for name in ("ws", "rs"))


def test_inputs_called_as_gradcs_own() -> None:
    """``d.y`` is an input, beside the cotangent of the output ``y``."""
    nodes = [helper.make_node("Mul", ["d", "r"], ["product"]), helper.make_node("Add", ["product", "d.y"], ["y"])]
    names = ("d", "r", "d.y")
    graph = gradc.from_onnx(model(nodes, {n: (F, [3]) for n in names}, {"y": (F, [3])}))
    assert graph.input_names == names
    module = gradc.compile(graph, wrt=names, target="numpy")
    d, r, out, dy = (rng.normal(size=3).astype(np.float32) for _ in range(4))
    y, residuals = module.forward({"d": d, "r": r, "d.y": out})
    np.testing.assert_array_equal(y, d * r + out)
    grads = module.backward(residuals, dy)
    for name, wanted in zip(names, (dy * r, dy * d, dy), strict=True):
        np.testing.assert_array_equal(grads[name], wanted)
