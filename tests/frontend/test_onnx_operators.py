"""Operators of ONNX that node tests cannot hold: random ones, sequences and optionals, what is known when a model is
read, rows of attention that are masked whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import gradc  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.errors import InvalidProblem, Unsupported  # noqa: E402

F, I = TensorProto.FLOAT, TensorProto.INT64
Shapes = dict[str, tuple[int, list[Any]]]


def model(nodes: list[Any], inputs: Shapes, outputs: Shapes, weights: dict[str, np.ndarray] | None = None) -> Any:
    infos = [[helper.make_tensor_value_info(n, *v) for n, v in each.items()] for each in (inputs, outputs)]
    initial = [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "net", *infos, initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])


# -- random ------------------------------------------------------------------------------------------------------------

N = 20000


def drawn(op: str, key: int = 0, x: np.ndarray | None = None, count: int = 1, **attributes: Any) -> list[np.ndarray]:
    """What several operators of one kind draw."""
    names = [f"y{k}" for k in range(count)]
    nodes = [helper.make_node(op, [] if x is None else ["x"], [name], **attributes) for name in names]
    inputs = {} if x is None else {"x": (F, list(x.shape))}
    graph = gradc.from_onnx(model(nodes, inputs, {name: (F, ["a"]) for name in names}))
    assert graph.input_names == (*inputs, "key")
    return list(interp.run(graph, {**graph.defaults, "key": np.array(key), **({} if x is None else {"x": x})}).values())


@pytest.mark.parametrize(
    ("op", "attributes", "mean", "deviation"),
    [
        ("RandomUniform", {"shape": [N], "low": -1.0, "high": 3.0}, 1.0, 4 / 12**0.5),
        ("RandomNormal", {"shape": [N], "mean": 2.0, "scale": 0.5}, 2.0, 0.5),
        ("RandomUniformLike", {}, 0.5, 12**-0.5),
        ("RandomNormalLike", {}, 0.0, 1.0),
        ("Bernoulli", {}, 0.3, 0.21**0.5),
    ],
)
def test_numbers_have_their_distribution(op: str, attributes: dict[str, Any], mean: float, deviation: float) -> None:
    """Other numbers under another key and in another operator, the same under the same."""
    x = None if "shape" in attributes else np.full(N, 0.3, np.float32)
    one, other = drawn(op, 0, x, 2, **attributes)
    for y in (one, other):
        assert abs(y.mean() - mean) < 5 * deviation / N**0.5 and abs(y.std() - deviation) < 0.03 * max(deviation, 1)
    (again,), (changed,), (seeded,) = (
        drawn(op, key, x, **attributes, **more) for key, more in ((0, {}), (1, {}), (0, {"seed": 5.0}))
    )
    assert np.array_equal(again, one)
    assert not any(np.array_equal(one, y) for y in (other, changed, seeded))


def test_classes_are_drawn_with_their_probabilities() -> None:
    share = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], np.float32)
    node = helper.make_node("Multinomial", ["x"], ["y"], sample_size=N)
    graph = gradc.from_onnx(model([node], {"x": (F, [2, 3])}, {"y": (TensorProto.INT32, [2, N])}))
    with np.errstate(divide="ignore"):
        found = interp.run(graph, {**graph.defaults, "x": np.log(share) + 3})["y"]
    assert found.dtype == np.int32
    for row, wanted in zip(found, share, strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=3) / N, wanted, atol=0.02)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_dropout_in_training(target: str) -> None:
    """The mask that is returned is the one that was applied, forward and backward; a key gives a mask."""
    node = helper.make_node("Dropout", ["x", "share", "training"], ["y", "mask"])
    made = model(
        [node],
        {"x": (F, [50, 40])},
        {"y": (F, [50, 40]), "mask": (TensorProto.BOOL, [50, 40])},
        {"share": np.float32(0.25).reshape(()), "training": np.array(True)},
    )
    module = gradc.compile(gradc.from_onnx(made), wrt=["x"], target=target)
    x = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    masks = []
    for key in (0, 1):
        found, residuals = module.forward(x=x, key=np.array(key))
        masks.append(np.asarray(found["mask"]))
        np.testing.assert_allclose(found["y"], np.where(masks[-1], x / 0.75, 0), rtol=1e-6)
        gradient = module.backward(residuals, y=np.ones_like(x))["x"]
        np.testing.assert_allclose(gradient, masks[-1] / 0.75, rtol=1e-6)
        assert abs(masks[-1].mean() - 0.75) < 0.05
    assert not np.array_equal(*masks)


# -- sequences and optionals -------------------------------------------------------------------------------------------

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def evaluated(nodes: list[Any], weights: dict[str, np.ndarray] | None = None, kind: int = F) -> None:
    """As ONNX's reference evaluates the model."""
    made = model(nodes, {"x": (F, [3, 4])}, {"y": (kind, None)}, weights)
    made.graph.output[0].type.tensor_type.shape.SetInParent()
    (wanted,) = ReferenceEvaluator(made).run(None, {"x": X})
    found = interp.run(gradc.from_onnx(made), {"x": X})["y"]
    assert np.asarray(found).shape == np.shape(wanted)
    np.testing.assert_array_equal(found, wanted)


def test_parts_are_joined_again() -> None:
    for sizes, axis, new in ((np.array([1, 3]), 1, 0), (np.array(2), 1, 0), (None, 0, 0), (None, 0, 1)):
        inputs = ["x"] if sizes is None else ["x", "sizes"]
        keep = {"keepdims": 1 - new} if sizes is None else {}
        evaluated(
            [
                helper.make_node("SplitToSequence", inputs, ["s"], axis=axis, **keep),
                helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=axis, new_axis=new),
            ],
            {} if sizes is None else {"sizes": sizes},
        )


@pytest.mark.parametrize("sizes", [np.array([1, 3]), np.array(3), np.array([2, 1, 1])])
def test_the_size_of_a_part(sizes: np.ndarray) -> None:
    evaluated(
        [
            helper.make_node("SplitToSequence", ["x", "sizes"], ["s"], axis=1),
            helper.make_node("SequenceAt", ["s", "one"], ["y"]),
        ],
        {"sizes": sizes, "one": np.array(1)},
    )


def test_a_sequence_grows_and_shrinks() -> None:
    evaluated(
        [
            helper.make_node("Neg", ["x"], ["n"]),
            helper.make_node("SequenceConstruct", ["x", "n", "x"], ["a"]),
            helper.make_node("SequenceInsert", ["a", "n", "one"], ["b"]),
            helper.make_node("SequenceErase", ["b", "last"], ["c"]),
            helper.make_node("SequenceLength", ["c"], ["count"]),
            helper.make_node("SequenceAt", ["c", "one"], ["item"]),
            helper.make_node("CastLike", ["count", "item"], ["number"]),
            helper.make_node("Add", ["item", "number"], ["y"]),
        ],
        {"one": np.array(1), "last": np.array(-1)},
    )


def test_an_empty_sequence_is_filled() -> None:
    evaluated(
        [
            helper.make_node("SequenceEmpty", [], ["a"]),
            helper.make_node("SequenceInsert", ["a", "x"], ["b"]),
            helper.make_node("ConcatFromSequence", ["b"], ["y"], axis=0),
        ]
    )


@pytest.mark.parametrize("full", [True, False])
def test_what_an_optional_holds(full: bool) -> None:
    """Something chooses the branch; nothing chooses the other."""
    infos = [helper.make_tensor_value_info("r", F, [3, 4])]
    got = helper.make_graph([helper.make_node("OptionalGetElement", ["o"], ["r"])], "got", [], infos)
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["r"])], "made", [], infos)
    kind = helper.make_tensor_type_proto(F, [3, 4])
    nodes = [
        helper.make_node("Optional", ["x"] if full else [], ["o"], **({} if full else {"type": kind})),
        helper.make_node("OptionalHasElement", ["o"], ["has"]),
        helper.make_node("If", ["has"], ["y"], then_branch=got, else_branch=made),
    ]
    graph = gradc.from_onnx(model(nodes, {"x": (F, [3, 4])}, {"y": (F, [3, 4])}))
    np.testing.assert_array_equal(interp.run(graph, {"x": X})["y"], X if full else -X)


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ([("SequenceAt", ["s", "five"], ["y"])], InvalidProblem, "position 5 of a sequence of 2"),
        ([("SequenceInsert", ["s", "x", "five"], ["y"])], InvalidProblem, "position 5 of a sequence of 2"),
        ([("SequenceAt", ["x", "five"], ["y"])], InvalidProblem, "no sequence"),
        ([("Neg", ["s"], ["y"])], Unsupported, "a sequence where a tensor is needed"),
        ([("SequenceAt", ["s", "place"], ["y"])], Unsupported, "computed from data"),
        ([("Identity", ["s"], ["y"])], Unsupported, "a sequence"),
    ],
)
def test_sequences_that_do_not_fit(nodes: list[Any], error: type[Exception], message: str) -> None:
    made = model(
        [
            helper.make_node("SequenceConstruct", ["x", "x"], ["s"]),
            *[helper.make_node(op, inputs, outputs, name="first") for op, inputs, outputs in nodes],
        ],
        {"x": (F, [3, 4]), "place": (I, [])},
        {"y": (F, [3, 4])},
        {"five": np.array(5)},
    )
    with pytest.raises(error, match=message):
        gradc.from_onnx(made)


# -- known when the model is read --------------------------------------------------------------------------------------


def test_boxes_and_unique_values_that_are_known() -> None:
    """And the error where data decides how many there are."""
    boxes = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11]]], np.float32)
    scores = np.array([[[0.9, 0.75, 0.6]]], np.float32)
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["y"], name="boxes")
    limits = {"most": np.array([3]), "overlap": np.array([0.5], np.float32)}
    given = {"boxes": (F, [1, 3, 4]), "scores": (F, [1, 1, 3])}
    made = model([node], given, {"y": (I, ["k", 3])}, limits)
    graph = gradc.from_onnx(made, constants={"boxes": boxes, "scores": scores})
    np.testing.assert_array_equal(interp.run(graph)["y"], [[0, 0, 0], [0, 0, 2]])
    with pytest.raises(Unsupported, match="NonMaxSuppression 'boxes'"):
        gradc.from_onnx(made)
    unique = model([helper.make_node("Unique", ["x"], ["y"], name="first")], {"x": (F, [4])}, {"y": (F, ["k"])})
    read = gradc.from_onnx(unique, constants={"x": np.array([2, 1, 2, 3], np.float32)})
    np.testing.assert_array_equal(interp.run(read)["y"], [1, 2, 3])
    with pytest.raises(Unsupported, match="Unique 'first'"):
        gradc.from_onnx(unique)


# -- gradients at edges ------------------------------------------------------------------------------------------------


def test_the_determinant_of_a_singular_matrix_has_a_gradient() -> None:
    """The matrix of cofactors (Jacobi 1841), where a gradient by the inverse divides by zero."""
    made = model([helper.make_node("Det", ["x"], ["y"])], {"x": (F, [3, 3])}, {"y": (F, [])})
    module = gradc.compile(gradc.from_onnx(made), wrt=["x"], target="numpy")
    x = np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)
    y, residuals = module.forward(x=x)
    assert y == 0
    cofactors = [
        [(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(x, i, 0), j, 1)) for j in range(3)] for i in range(3)
    ]
    np.testing.assert_allclose(module.backward(residuals, np.ones_like(y))["x"], cofactors, atol=1e-5)


def test_the_determinant_of_large_matrices() -> None:
    draw = np.random.default_rng(0)
    for n in (1, 5, 16):
        made = model([helper.make_node("Det", ["x"], ["y"])], {"x": (F, [3, n, n])}, {"y": (F, [3])})
        x = draw.standard_normal((3, n, n)).astype(np.float32)
        found = interp.run(gradc.from_onnx(made), {"x": x})["y"]
        np.testing.assert_allclose(found, np.linalg.det(x.astype(np.float64)), rtol=1e-4)
    with pytest.raises(Unsupported, match="1 to 16 rows"):
        gradc.from_onnx(model([helper.make_node("Det", ["x"], ["y"])], {"x": (F, [17, 17])}, {"y": (F, [])}))


def test_a_row_of_attention_that_is_masked_whole_passes_zeros_back() -> None:
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 2, 3, 4)).astype(np.float32) for _ in range(3))
    mask = np.array([[True, False, True], [False] * 3, [True, True, False]])
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    inputs: Shapes = {n: (F, [1, 2, 3, 4]) for n in "qkv"}
    made = model([node], {**inputs, "mask": (TensorProto.BOOL, [3, 3])}, {"y": (F, [1, 2, 3, 4])})
    made.opset_import[0].version = 23
    graph = gradc.from_onnx(made)
    values = {"q": q, "k": k, "v": v, "mask": mask}
    assert gradc.check(graph, ["q", "k", "v"], inputs=values).ok
    module = gradc.compile(graph, wrt=["q", "k", "v"], target="cpu")
    y, residuals = module.forward(**values)
    grads = module.backward(residuals, np.ones_like(y))
    assert not np.any(y[:, :, 1]) and not np.any(grads["q"][:, :, 1]) and np.any(grads["q"][:, :, 0])
    assert all(np.isfinite(grads[n]).all() for n in "qkv")
