"""Every version of every operator of ONNX: right by an oracle, or refused.

The schemas of the installed package are the list.  A version is held by ONNX's node tests where these are valid in its
opsets, with onnxruntime's results there if it is installed, else those stored; and by the cases of
:mod:`onnx_versions`, by NumPy, wherever a version means something else than the newest does.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the ONNX frontend needs onnx")

import onnx_table  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_node_cases import cases  # noqa: E402
from onnx_versions import (  # noqa: E402
    BESIDE,
    CASES,
    DEPRECATED,
    NOT_TAKEN,
    REFUSALS,
    Case,
    Refusal,
    drawn,
)

import gradc  # noqa: E402
from benchmarks import onnx_nodes as nodes  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.errors import InvalidProblem, Unsupported  # noqa: E402
from gradc.onnx import folding, importer, sequences, table  # noqa: E402
from gradc.onnx import model as onnx_model  # noqa: E402

try:
    import onnxruntime
except ImportError:  # an oracle more where it is there
    onnxruntime = None
else:
    onnxruntime.set_default_logger_severity(4)

OLDEST_OF_RUNTIME = 7
"""The opset from which on onnxruntime says that it is right."""


@functools.cache
def history() -> Mapping[str, tuple[int, ...]]:
    """The versions of each operator of ONNX's own domain, oldest first."""
    found: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            found.setdefault(schema.name, []).append(schema.since_version)
    return {op: tuple(sorted(versions)) for op, versions in found.items()}


def last_opset(op: str, version: int) -> int:
    later = [v for v in history()[op] if v > version]
    return later[0] - 1 if later else onnx.defs.onnx_opset_version()


# -- comparing ---------------------------------------------------------------------------------------------------------


def evaluated(model: Any, values: Mapping[str, Any], constants: Sequence[str]) -> list[np.ndarray]:
    graph = gradc.from_onnx(model, constants={n: values[n] for n in constants})
    feeds = {n: v for n, v in values.items() if n in graph.input_names}
    return [np.asarray(v) for v in interp.run(graph, {**graph.defaults, **feeds}).values()]


def by_runtime(model: Any, values: Mapping[str, Any]) -> list[np.ndarray] | None:
    """What onnxruntime gives; None if it is not there, or does not have the operator."""
    if onnxruntime is None:
        return None
    known = copy.deepcopy(model)
    known.ir_version = min(known.ir_version, 10)
    try:
        session = onnxruntime.InferenceSession(known.SerializeToString(), providers=["CPUExecutionProvider"])
        found: list[np.ndarray] = session.run(None, dict(values))
    except Exception:  # of many classes: no kernel, an opset that it does not know
        return None
    return found


def differ(found: Sequence[Any], wanted: Sequence[Any]) -> str:
    """What is not the same; "" if everything is."""
    if len(found) != len(wanted):
        return f"{len(found)} results for {len(wanted)}"
    for got, want in zip(map(np.asarray, found), map(np.asarray, wanted), strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{got.dtype}{got.shape} for {want.dtype}{want.shape}"
        if got.dtype.kind in "biu":
            if not np.array_equal(got, want):
                return f"{got} for {want}"
            continue
        short = got.dtype.itemsize < 4
        got, want = got.astype(np.float64), want.astype(np.float64)
        finite = np.abs(want[np.isfinite(want)])
        scale = float(finite.max()) if finite.size and finite.max() < 1e30 else 1.0
        if not np.allclose(
            got, want, rtol=1e-2 if short else 1e-5, atol=(1e-3 if short else 2e-6) * max(scale, 1.0), equal_nan=True
        ):
            return f"{got} for {want}"
    return ""


# -- the older forms, by NumPy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, *BESIDE], ids=str)
def test_a_form_is_right_in_its_first_and_its_last_opset(case: Case) -> None:
    """Of data, and of values that are known when the model is read."""
    first, last = case.opsets
    assert first in history()[case.op] and last == last_opset(case.op, first), case
    for opset in {first, last}:
        model = case.model(opset)
        for constants in (case.constants, case.values):
            assert not differ(evaluated(model, case.values, list(constants)), case.wanted), (opset, list(constants))
        if case.constants:  # as files have them
            model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in case.constants.items())
            assert not differ(evaluated(model, case.values, []), case.wanted), (opset, "initializers")
    if case.by_runtime and last >= OLDEST_OF_RUNTIME:
        theirs = by_runtime(case.model(max(first, OLDEST_OF_RUNTIME)), case.values)
        assert theirs is None or not differ(theirs, case.wanted), "onnxruntime"


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_what_an_opset_does_not_have_is_refused(refusal: Refusal) -> None:
    case = refusal.case
    for constants in (case.constants, case.values):
        with pytest.raises((InvalidProblem, Unsupported), match=refusal.said) as raised:
            gradc.from_onnx(case.model(case.opsets[0]), constants=constants)
        assert case.op in str(raised.value) and f"opset {case.opsets[0]}" in str(raised.value)


# -- sequences, optionals, bodies, recurrent layers: by ONNX's reference -----------------------------------------------

X = drawn(3, 4)
Infos = dict[str, Any]


def info(name: str, shape: Sequence[int] | None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def net(nodes: Sequence[Any], opset: int, shape: Sequence[Any], inputs: Infos | None = None) -> Any:
    """A model of x [3, 4], or of other inputs, with the result y."""
    given = [info(n, v.shape, helper.np_dtype_to_tensor_dtype(v.dtype)) for n, v in (inputs or {"x": X}).items()]
    graph = helper.make_graph(list(nodes), "net", given, [info("y", shape)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def of_sequences(opset: int) -> Any:
    node = helper.make_node
    return net(
        [
            node("SplitToSequence", ["x"], ["parts"], axis=-1, keepdims=0),
            node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.INT64, [], [1])),
            node("SequenceAt", ["parts", "one"], ["second"]),
            node("SequenceErase", ["parts", "one"], ["fewer"]),
            node("SequenceInsert", ["fewer", "second"], ["again"]),
            node("SequenceLength", ["again"], ["length"]),
            node("Cast", ["length"], ["count"], to=TensorProto.FLOAT),
            node("SequenceEmpty", [], ["nothing"]),
            node("SequenceInsert", ["nothing", "second"], ["alone"]),
            node("SequenceConstruct", ["second", "second"], ["twice"]),
            node("ConcatFromSequence", ["again"], ["wide"], axis=-1, new_axis=1),
            node("ConcatFromSequence", ["twice"], ["long"], axis=0),
            node("Constant", [], ["last"], value=helper.make_tensor("last", TensorProto.INT64, [], [-1])),
            node("SequenceAt", ["alone", "last"], ["same"]),
            node("Mul", ["wide", "count"], ["scaled"]),
            node("ReduceSum", ["long"], ["sum"], keepdims=0),
            node("ReduceSum", ["same"], ["more"], keepdims=0),
            node("Add", ["scaled", "sum"], ["moved"]),
            node("Add", ["moved", "more"], ["y"]),
        ],
        opset,
        [3, 4],
    )


def of_a_map(opset: int) -> Any:
    body = helper.make_graph([helper.make_node("Mul", ["a", "a"], ["b"])], "body", [info("a", None)], [info("b", None)])
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["both"]),
        helper.make_node("SequenceMap", ["both"], ["squares"], body=body),
        helper.make_node("ConcatFromSequence", ["squares"], ["y"], axis=0),
    ]
    return net(nodes, opset, [6, 4])


def of_optionals(opset: int) -> Any:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [3, 4]))
    branches = [
        helper.make_graph([helper.make_node(op, ["held"], ["r"])], "branch", [], [info("r", [3, 4])])
        for op in ("Neg", "Abs")
    ]
    nodes = [
        helper.make_node("Optional", ["x"], ["maybe"]),
        helper.make_node("OptionalHasElement", ["maybe"], ["there"]),
        helper.make_node("OptionalGetElement", ["maybe"], ["held"]),
        helper.make_node("If", ["there"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    made = net(nodes, opset, [3, 4])
    made.graph.value_info.append(helper.make_value_info("maybe", kind))
    return made


def of_a_loop(opset: int) -> Any:
    boolean, whole = TensorProto.BOOL, TensorProto.INT64
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [info("i", [], whole), info("c", [], boolean), info("s", [3, 4])],
        [info("d", [], boolean), info("t", [3, 4])],
    )
    nodes = [
        helper.make_node("Constant", [], ["count"], value=helper.make_tensor("n", whole, [], [3])),
        helper.make_node("Constant", [], ["go"], value=helper.make_tensor("g", boolean, [], [1])),
        helper.make_node("Loop", ["count", "go", "x"], ["y"], body=body),
    ]
    return net(nodes, opset, [3, 4])


def of_a_scan(opset: int) -> Any:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [info("s", [4]), info("e", [4])],
        [info("t", [4]), info("o", [4])],
    )
    nodes = [helper.make_node("Scan", ["start", "x"], ["end", "y"], body=body, num_scan_inputs=1)]
    return net(nodes, opset, [3, 4], {"start": drawn(4, seed=1), "x": X})


MODELS: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "sequences": (
        of_sequences,
        (
            "ConcatFromSequence",
            "SequenceAt",
            "SequenceConstruct",
            "SequenceEmpty",
            "SequenceErase",
            "SequenceInsert",
            "SequenceLength",
            "SplitToSequence",
        ),
    ),
    "a map": (of_a_map, ("SequenceMap",)),
    "optionals": (of_optionals, ("Optional", "OptionalGetElement", "OptionalHasElement", "If")),
    "a loop": (of_a_loop, ("Loop",)),
    "a scan": (of_a_scan, ("Scan",)),
}
"""Models whose operators the reference has in all their opsets, and which of them they hold."""
BEGINS = {"sequences": 11, "a map": 17, "optionals": 15, "a loop": 1, "a scan": 9}
OF_MODELS = [
    (name, version)
    for name, (_, ops) in MODELS.items()
    for version in sorted({v for op in ops for v in history()[op] if v >= BEGINS[name]})
]


@pytest.mark.parametrize(("name", "opset"), OF_MODELS)
def test_models_of_several_operators(name: str, opset: int) -> None:
    model = MODELS[name][0](opset)
    values = {"start": drawn(4, seed=1), "x": X} if name == "a scan" else {"x": X}
    wanted = [-X] if name == "optionals" else ReferenceEvaluator(model).run(None, values)  # which has no optionals
    assert not differ(evaluated(model, values, []), wanted)


def test_a_scan_of_batches() -> None:
    """Of opset 8, each batch by itself, the second input backwards."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Sub", ["t", "f"], ["o"])],
        "body",
        [info("s", [4]), info("e", [4]), info("f", [4])],
        [info("t", [4]), info("o", [4])],
    )
    node = helper.make_node("Scan", ["", "s0", "x", "z"], ["s1", "y"], body=body, num_scan_inputs=2, directions=[0, 1])
    s0, x, z = drawn(2, 4), drawn(2, 3, 4, seed=1), drawn(2, 3, 4, seed=2)
    values = {"s0": s0, "x": x, "z": z}
    model = net([node], 8, [2, 3, 4], values)
    model.graph.output.insert(0, info("s1", [2, 4]))
    sums = s0[:, None] + np.cumsum(x, 1)
    assert not differ(evaluated(model, values, []), [sums[:, -1], sums - z[:, ::-1]])
    node.input[0] = "lengths"
    given = {"lengths": np.array([3, 2]), **values}
    with pytest.raises(Unsupported, match=r"Scan of opset 8 over sequences of several lengths"):
        gradc.from_onnx(net([node], 8, [2, 3, 4], given))


RECURRENT = {"RNN": (1, (1,)), "LSTM": (4, (1,)), "GRU": (3, (1, 3))}
"""(gates, versions before opset 7)."""


@pytest.mark.parametrize(("op", "version"), [(op, v) for op, (_, versions) in RECURRENT.items() for v in versions])
def test_recurrent_layers_of_the_first_opsets(op: str, version: int) -> None:
    """What opset 7 has, whatever they say of their output."""
    gates = RECURRENT[op][0]
    values = {"x": drawn(3, 2, 4), "w": drawn(1, gates * 5, 4, seed=1), "recurrence": drawn(1, gates * 5, 5, seed=2)}
    values["b"] = drawn(1, gates * 10, seed=3)
    node = helper.make_node(op, list(values), ["y", "end"], hidden_size=5)
    (wanted,) = ReferenceEvaluator(net([node], 7, [3, 1, 2, 5], values)).run(None, values)
    for said in (0, 1):
        old = helper.make_node(op, list(values), ["y", "end"], hidden_size=5, output_sequence=said)
        for opset in (version, last_opset(op, version)):
            assert not differ(evaluated(net([old], opset, [3, 1, 2, 5], values), values, []), [wanted])


RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")


@pytest.mark.parametrize(("op", "version"), [(op, v) for op in RANDOM for v in history()[op]])
def test_random_operators_in_every_version(op: str, version: int) -> None:
    """Their shape and their mean; tests/frontend/test_onnx_operators.py has the rest."""
    x = np.full((1, 2000) if op != "Multinomial" else (1, 2), 0.5, np.float32)
    has_input = op not in ("RandomNormal", "RandomUniform")
    attributes = {"sample_size": 2000} if op == "Multinomial" else {} if has_input else {"shape": [1, 2000]}
    wanted = np.zeros((1, 2000), np.int32 if op == "Multinomial" else np.float32)
    case = Case(op, (version, version), [x] if has_input else [], [wanted], attributes=attributes)
    (found,) = evaluated(case.model(version), case.values, [])
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert abs(found.mean() - (0.0 if "Normal" in op else 0.5)) < 0.1 and found.std() > 0.2


@pytest.mark.parametrize("opset", [1, 6])
def test_dropout_is_in_training_mode_before_opset_7(opset: int) -> None:
    """If nothing else is said: where the mask is not zero x / (1 - ratio)."""
    x = np.ones((50, 40), np.float32)
    case = Case("Dropout", (opset, opset), [x], [x, x], attributes={"ratio": 0.25})
    y, mask = evaluated(case.model(opset), case.values, [])
    np.testing.assert_allclose(y, mask / np.float32(0.75), rtol=1e-6)
    assert set(np.unique(mask)) == {0, 1} and abs(mask.mean() - 0.75) < 0.05


OTHERWISE = {
    **{(op, v): name for name, v in OF_MODELS for op in MODELS[name][1] if v in history()[op]},
    **{(op, v): "recurrent" for op, (_, versions) in RECURRENT.items() for v in versions},
    **{(op, v): "random" for op in RANDOM for v in history()[op]},
    ("Scan", 8): "a scan of batches",
}
"""Versions that a test above holds, and which."""


# -- every version -----------------------------------------------------------------------------------------------------

RUNTIME_DIFFERS = (
    "attention_4d_with_past_and_present_qk_matmul_bias",  # onnxruntime returns the scores before the mask
    "maxunpool_export_with_output_shape",  # indices count over the larger image there
    "onehot_negative_indices",  # the text of opset 9 has none
    "onehot_out_of_range_indices",
    "resize_downsample_scales_cubic_align_corners",  # scales that leave no whole number of elements
    "resize_downsample_scales_linear_align_corners",
)
"""Node tests whose stored results onnxruntime does not give, in no opset."""
OF_EACH = 4
"""Node tests that hold one version."""


@functools.cache
def held_by_cases() -> frozenset[tuple[str, int]]:
    found = {(case.op, case.opsets[0]) for case in CASES}
    return frozenset(found | OTHERWISE.keys())


def in_opset(model: Any, opset: int) -> Any:
    """The model in another opset; None where it is not valid."""
    made = copy.deepcopy(model)
    for each in made.opset_import:
        if each.domain in ("", "ai.onnx"):
            each.version = opset
    for node in made.graph.node:
        schema = onnx.defs.get_schema(node.op_type, opset)
        if "consumed_inputs" in schema.attributes:
            node.attribute.append(helper.make_attribute("consumed_inputs", [0] * len(node.input)))
    try:
        onnx.checker.check_model(made)
        onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True)
    except Exception:  # onnx's own, of several classes
        return None
    return made


def node_tests(op: str, version: int) -> list[tuple[Any, Any]]:
    """(the test, its model in the last opset of a version), some of those that are valid there."""
    found = []
    for case in cases().get(op, []):
        if nodes.name_of(case) not in onnx_table.REFUSED and len(case.model.graph.node) == 1:
            model = in_opset(case.model, last_opset(op, version))
            if model is not None:
                found.append((case, model))
    return [found[k] for k in sorted({i * (len(found) - 1) // (OF_EACH - 1) for i in range(OF_EACH)})] if found else []


def held(case: Any, model: Any, opset: int) -> None:
    """A node test in an opset, of data and of known values."""
    given, stored = case.data_sets[0]
    values = dict(zip((i.name for i in model.graph.input), map(nodes.array, given), strict=False))
    wanted = list(map(nodes.array, stored))
    if opset >= OLDEST_OF_RUNTIME and not nodes.name_of(case).startswith(RUNTIME_DIFFERS):
        theirs = by_runtime(model, values)
        if theirs is not None and [w.dtype for w in theirs] == [w.dtype for w in wanted]:  # bytes for float8
            assert not differ(theirs, wanted), (case.name, opset, "onnxruntime")
    op = model.graph.node[0].op_type
    known = [n for n in values if n in nodes.CONSTANTS.get(op, ())]
    for constants in (known, list(values)):
        assert not differ(evaluated(model, values, constants), wanted), (case.name, opset, constants)


@pytest.mark.parametrize("op", sorted(history()))
def test_every_version(op: str) -> None:
    """A version without a node test that is valid in it has a case of its own, or is refused."""
    for version in history()[op]:
        assert version <= table.NEWEST_KNOWN, f"{op} {version} is newer than the table; hold it against its schema"
        if op in NOT_TAKEN or (op, version) in DEPRECATED:
            continue
        own = (op, version) in held_by_cases()
        tests = [] if own else node_tests(op, version)
        assert own or tests, f"{op} {version} is neither tested nor refused"
        for case, model in tests:
            held(case, model, last_opset(op, version))


def test_cases_are_of_versions_that_there_are() -> None:
    """A case that no schema has would hold nothing."""
    assert {*NOT_TAKEN} <= history().keys()
    for op, version in held_by_cases() | DEPRECATED:
        assert version in history()[op], (op, version)
    taken = {*importer._CONTROL, *sequences.HANDLERS, *folding.FOLDED_ONLY, "Constant"}
    own = {key for key in table.lines() if "." not in key}
    assert (taken | own) <= history().keys()


def test_forms_begin_where_schemas_do() -> None:
    for key, forms in table.lines().items():
        if "." not in key:
            assert len(forms) == 1 or {line.since for line in forms} <= {*history()[key]}, key


def test_defaults_are_those_of_schemas() -> None:
    """A parameter that has a default, for a call from another line, has the one of the newest schema it is for."""
    for key, forms in table.lines().items():
        for line, after in zip(forms, [*forms[1:], None], strict=True) if "." not in key else ():
            newest = max(v for v in history()[key] if after is None or v < after.since)
            standard = onnx_model.defaults(key, "", newest)
            parameters = inspect.signature(line.function).parameters
            for name in line.attributes & standard.keys():
                own = parameters[name].default
                if own is inspect.Parameter.empty:
                    continue
                said = importer._plain(helper.get_attribute_value(standard[name]))
                same = (
                    own is not None and np.float32(own) == np.float32(said) if isinstance(said, float) else own == said
                )
                assert own is None or same, (key, line.since, name, own, said)


@pytest.mark.parametrize("op", sorted(NOT_TAKEN))
def test_an_operator_without_a_line_is_named(op: str) -> None:
    assert op not in table.lines()


@pytest.mark.parametrize(("op", "opset"), sorted(DEPRECATED))
def test_a_deprecated_operator_is_refused(op: str, opset: int) -> None:
    schema = onnx.defs.get_schema(op, opset)
    x = drawn(1, 4, 2, 2)
    inputs = [x] * len([i for i in schema.inputs if i.option == onnx.defs.OpSchema.FormalParameterOption.Single])
    attributes = {"num_groups": 2} if op == "GroupNormalization" else {}
    model = Case(op, (opset, opset), inputs, [x], attributes=attributes).model(opset)
    with pytest.raises(InvalidProblem, match=f"{op} is deprecated.*{opset}"):
        gradc.from_onnx(model)


def test_an_opset_that_nobody_knew_is_refused_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what changed after the table was written: with a newer onnx most of a model is as it was."""
    monkeypatch.setattr(table, "NEWEST_KNOWN", 12)
    x = drawn(2, 3)
    relu, softmax = (Case(op, (v, v), [x], [x]) for op, v in (("Sigmoid", 12), ("Softmax", 13)))
    assert not differ(evaluated(relu.model(12), relu.values, []), [1 / (1 + np.exp(-x))])
    with pytest.raises(Unsupported, match="Softmax as opset 13 has it"):
        gradc.from_onnx(softmax.model(13))


# -- gradients ---------------------------------------------------------------------------------------------------------

WITHOUT_GRADIENT = {"Cast", "Hardmax", "OneHot"}
"""Older forms whose results do not move with what they are given, or only with a choice."""


def older_forms() -> list[Case]:
    """The first and the last case of each older form of an operator on floats."""
    found: dict[tuple[str, int], list[Case]] = {}
    for case in CASES:
        line = table.line_of(case.op, case.opsets[0])
        floats = case.wanted[0].dtype.kind == "f" and any(v.dtype == np.float32 for v in case.values.values())
        if line is not None and not line.is_newest and floats and case.op not in WITHOUT_GRADIENT:
            found.setdefault((case.op, line.since), []).append(case)
    return [case for cases in found.values() for case in (cases[:1] if len(cases) == 1 else [cases[0], cases[-1]])]


@pytest.mark.parametrize("case", older_forms(), ids=str)
def test_gradients_of_older_forms(case: Case) -> None:
    """Against differences, at values without ties and infinities."""
    graph = gradc.from_onnx(case.model(case.opsets[0]), constants=case.constants)
    values = {n: v for n, v in case.values.items() if n in graph.input_names}
    if case.op in ("Clip", "TopK"):
        values = {n: drawn(*v.shape, seed=7) for n, v in values.items()}
    wrt = [n for n in values if graph.input(n).dtype.is_float]
    if case.op == "BatchNormalization":
        wrt = wrt[:3]  # what is estimated passes no gradient, here as in every other opset
    report = gradc.check(graph, wrt, inputs={**graph.defaults, **values})
    assert {finding.verdict for finding in report.findings} == {nodes.HELD}, report


# -- axes that count from the end --------------------------------------------------------------------------------------

FROM_THE_FRONT = {"ReverseSequence", "Flatten"}
"""Operators whose axes are 0 and 1, or may be one behind the last."""
PER_AXIS = {"DequantizeLinear": 1, "QuantizeLinear": 1}
"""The node test that reads its axis, where that is not the first."""
EXTRA_AXES = {"OneHot": 1, "ConcatFromSequence": 1}


def with_other_axes(case: Any) -> tuple[Any, dict[str, Any]] | None:
    """A node test whose axes count from the other end, and its values; None where it has none."""
    model = copy.deepcopy(case.model)
    (node,) = model.graph.node
    values = dict(zip((i.name for i in model.graph.input), map(nodes.array, case.data_sets[0][0]), strict=False))
    if node.input[0] not in values:
        return None
    rank = values[node.input[0]].ndim + EXTRA_AXES.get(node.op_type, 0)
    found = False
    schema = onnx.defs.get_schema(node.op_type, model.opset_import[0].version)
    place = next((k for k, i in enumerate(schema.inputs) if i.name in ("axis", "axes")), len(node.input))
    name = node.input[place] if place < len(node.input) else ""
    if name and values[name].size:
        rank += values[name].size if node.op_type == "Unsqueeze" else 0
        values[name] = np.where(values[name] < 0, values[name] + rank, values[name] - rank).astype(values[name].dtype)
        found = True
    for attribute in node.attribute:
        if attribute.name == "axis":
            attribute.i += rank if attribute.i < 0 else -rank
            found = True
        elif attribute.name == "axes":
            attribute.ints[:] = [a + rank if a < 0 else a - rank for a in attribute.ints]
            found = True
    return (model, values) if found else None


@pytest.mark.parametrize("op", [op for op in onnx_table.OPERATORS if op not in FROM_THE_FRONT])
def test_axes_count_from_both_ends(op: str) -> None:
    """Of data, the others known: each node test with an axis says the same from the other end."""
    for case in cases()[op]:
        if nodes.name_of(case) in onnx_table.REFUSED or len(case.model.graph.node) > 1 or not case.model.graph.input:
            continue
        other = with_other_axes(case)
        if other is not None:
            model, values = other
            known = [n for n in values if n in nodes.CONSTANTS.get(op, ())]
            wanted = list(map(nodes.array, case.data_sets[0][1]))
            assert not differ(evaluated(model, values, known), wanted), case.name


OF_ONE_AXIS = sorted(
    op
    for op in onnx_table.OPERATORS
    if op not in {*FROM_THE_FRONT, *NOT_TAKEN} and "axis" in onnx.defs.get_schema(op).attributes
)


@pytest.mark.parametrize("op", OF_ONE_AXIS)
def test_an_axis_that_is_not_there_is_refused(op: str) -> None:
    """Beyond either end; counted modulo the rank it would be another axis."""
    case = cases()[op][PER_AXIS.get(op, 0)]
    values = dict(zip((i.name for i in case.model.graph.input), map(nodes.array, case.data_sets[0][0]), strict=False))
    (node,) = case.model.graph.node
    rank = values[node.input[0]].ndim + EXTRA_AXES.get(op, 0)
    for axis in (rank, -rank - 1):
        model = copy.deepcopy(case.model)
        others = [a for a in node.attribute if a.name != "axis"]
        del model.graph.node[0].attribute[:]
        model.graph.node[0].attribute.extend([*others, helper.make_attribute("axis", axis)])
        known = {n: v for n, v in values.items() if n in nodes.CONSTANTS.get(op, ())}
        for constants in (known, values):
            with pytest.raises((InvalidProblem, Unsupported)):
                gradc.from_onnx(model, constants=constants)


# -- what is known when a model is read --------------------------------------------------------------------------------


def test_what_no_dtype_of_gradc_holds_is_folded_all_the_same() -> None:
    """An unsigned count of 64 bits on the way to a shape, and a range of nothing."""
    count = np.array([2, 3], np.uint64)
    nodes_ = [
        helper.make_node("Add", ["count", "count"], ["twice"]),
        helper.make_node("Cast", ["twice"], ["shape"], to=TensorProto.INT64),
        helper.make_node("Expand", ["x", "shape"], ["y"]),
    ]
    x = np.float32(1.5).reshape(1, 1)
    model = net(nodes_, 21, [4, 6], {"x": x, "count": count})
    assert not differ(evaluated(model, {"x": x, "count": count}, ["count"]), [np.full((4, 6), 1.5, np.float32)])
    limits = [np.array(v) for v in (0, -3, 1)]
    case = Case("Range", (11, 26), limits, [np.zeros(0, np.int64)], known=(0, 1, 2))
    assert not differ(evaluated(case.model(11), case.values, ["i0", "i1", "i2"]), case.wanted)


def test_the_largest_of_three_sizes() -> None:
    nodes_ = [
        *(helper.make_node("Shape", ["x"], [f"s{k}"], start=k, end=k + 1) for k in range(3)),
        helper.make_node("Max", ["s0", "s1", "s2"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["y"]),
    ]
    model = net(nodes_, 21, ["n"], {"x": drawn(2, 3, 5)})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "a"
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "c"
    for shape in ((2, 3, 5), (7, 3, 5), (1, 3, 2)):
        assert evaluated(model, {"x": drawn(*shape)}, [])[0].shape == (max(shape),)


def test_constants_cast_like_a_float8_saturate() -> None:
    kind = TensorProto.FLOAT8E4M3FN
    node = helper.make_node("CastLike", ["given", "like"], ["y"])
    like = np.zeros(1, helper.tensor_dtype_to_np_dtype(kind))
    values = {"given": np.array([1e6, -1e6, 1], np.float32), "like": like}
    model = net([node], 19, [3], values)
    model.graph.output[0].type.tensor_type.elem_type = kind
    for constants in (["given"], ["given", "like"], []):
        np.testing.assert_array_equal(evaluated(model, values, constants)[0].astype(np.float32), [448, -448, 1])


def test_a_part_without_a_name_is_a_part() -> None:
    for opset in (2, 11, 13):
        node = helper.make_node("Split", ["x"], ["y", ""], axis=1)
        assert not differ(evaluated(net([node], opset, [3, 2]), {"x": X}, []), [X[:, :2]])


@pytest.mark.parametrize("opset", [10, 11, 13, 18, 19])
def test_ten_elements_times_seven_tenths_are_seven(opset: int) -> None:
    """In f32, as onnxruntime and ONNX's inference of shapes have it: of f32's .7 in f64 they are six."""
    x, scales = drawn(1, 1, 10), np.array([1, 1, 0.7], np.float32)
    inputs = [x, scales] if opset == 10 else [x, np.array([], np.float32), scales]
    model = Case("Resize", (opset, opset), inputs, [np.zeros((1, 1, 7), np.float32)]).model(opset)
    values = {f"i{k}": v for k, v in enumerate(inputs)}
    assert evaluated(model, values, list(values)[1:])[0].shape == (1, 1, 7)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_older_forms_of_sizes_that_vary(target: str) -> None:
    """Forward and backward, with a size in each place that a form looks at."""
    nodes_ = [
        helper.make_node("Add", ["x", "bias"], ["moved"], broadcast=1, axis=1),
        helper.make_node("PRelu", ["moved", "slope"], ["bent"]),
        helper.make_node("Softmax", ["bent"], ["share"]),
        helper.make_node("Mul", ["share", "one"], ["y"], broadcast=1),
    ]
    values = {
        "x": drawn(2, 3, 4),
        "bias": drawn(3, seed=1),
        "slope": np.abs(drawn(3, seed=2)),
        "one": drawn(1, 1, seed=3),
    }
    model = net(nodes_, 6, ["n", 3, "m"], values)
    for axis, name in ((0, "n"), (2, "m")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    module = gradc.compile(gradc.from_onnx(model), wrt=["x", "bias", "slope"], target=target)
    for n, m in ((2, 4), (1, 1), (5, 2)):
        x = drawn(n, 3, m)
        moved = x + values["bias"][:, None]
        rows = np.where(moved < 0, moved * values["slope"][:, None], moved).reshape(n, -1)
        shares = np.exp(rows - rows.max(1, keepdims=True))
        shares = (shares / shares.sum(1, keepdims=True)).reshape(x.shape)
        found, residuals = module.forward(**{**values, "x": x})
        np.testing.assert_allclose(found, shares * values["one"][0, 0], rtol=2e-5, atol=1e-7)
        gradients = module.backward(residuals, np.ones_like(x))  # of shares that add up to one: none
        assert all(np.abs(np.asarray(gradients[k])).max() < 1e-6 for k in ("x", "bias", "slope"))
    assert gradc.check(gradc.from_onnx(model), ["x", "bias", "slope"], inputs=values).ok


def test_a_function_has_the_opset_that_it_imports() -> None:
    """Which is the model's where an operator of it changed."""
    body = [helper.make_node("Softmax", ["a"], ["b"], axis=1)]
    function = helper.make_function("own", "Shares", ["a"], ["b"], body, [helper.make_opsetid("", 11)])
    x = drawn(2, 3, 4)
    graph = helper.make_graph(
        [helper.make_node("Shares", ["x"], ["y"], domain="own")], "net", [info("x", x.shape)], [info("y", x.shape)]
    )
    imports = [helper.make_opsetid("", 11), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    share = np.exp(x.reshape(2, 12) - x.reshape(2, 12).max(1, keepdims=True))
    assert not differ(evaluated(model, {"x": x}, []), [(share / share.sum(1, keepdims=True)).reshape(x.shape)])
    model.opset_import[0].version = 13  # which the checker of ONNX has no function of opset 11 in
    with pytest.raises(InvalidProblem, match=r"version 11.*version 13"):
        gradc.from_onnx(model)


@pytest.mark.parametrize("name", ["Shares", "Attention", "LinearAttention", "CastLike", "Identity"])
@pytest.mark.parametrize("opset", [11, 17])
def test_a_function_may_be_named_as_an_operator_with_a_body(name: str, opset: int) -> None:
    """In ONNX's own Attention a row that is masked whole is zeros, and its Softmax is along one axis in every opset."""
    body = [helper.make_node("Softmax", ["a"], ["b"], axis=1)]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", name, ["a"], ["b"], body, imports[:1])
    x = drawn(2, 3, 4)
    x[0] = -np.inf
    graph = helper.make_graph(
        [helper.make_node(name, ["x"], ["y"], domain="own")], "net", [info("x", x.shape)], [info("y", x.shape)]
    )
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    rows = x.reshape(2, 12) if opset < 13 else x
    with np.errstate(invalid="ignore"):
        share = np.exp(rows - rows.max(1, keepdims=True))
    wanted = (share / share.sum(1, keepdims=True)).reshape(x.shape)
    for constants in ([], ["x"]):
        assert not differ(evaluated(model, {"x": x}, constants), [wanted])


@pytest.mark.parametrize("name", ["Neg", "Identity", "SequenceConstruct"])
def test_a_function_goes_before_an_operator_of_the_same_domain(name: str) -> None:
    function = helper.make_function("", name, ["a"], ["b"], [node("Add", "a", "a", "b")], [helper.make_opsetid("", 17)])
    model = net([node(name, "x", "y")], 17, X.shape, {"x": X})
    model.functions.append(function)
    for constants in ([], ["x"]):
        assert not differ(evaluated(model, {"x": X}, constants), [X + X])


def test_a_body_means_the_same_of_known_values() -> None:
    """Its operators compute them, not ONNX's reference, whose products before a soft cap are others."""
    values = {name: drawn(1, 2, 3, 4, seed=k) for k, name in enumerate("qkv")}
    node = helper.make_node("Attention", [*values], ["y", "", "", "products"], qk_matmul_output_mode=0, softcap=2.0)
    model = net([node], 23, [1, 2, 3, 4], values)
    model.graph.output.append(info("products", [1, 2, 3, 3]))
    wanted = values["q"] @ values["k"].swapaxes(2, 3) / 2
    for constants in ([], [*values]):
        assert not differ(evaluated(model, values, constants)[1:], [wanted])


# -- domains, formats, and what is refused -----------------------------------------------------------------------------


def test_the_domain_of_onnx_has_two_names() -> None:
    x = drawn(2, 3, 4)
    share = np.exp(x.reshape(2, 12) - x.reshape(2, 12).max(1, keepdims=True))
    wanted = (share / share.sum(1, keepdims=True)).reshape(x.shape)
    for imported, domain in (("ai.onnx", "ai.onnx"), ("", "ai.onnx"), ("ai.onnx", "")):
        model = net([helper.make_node("Softmax", ["x"], ["y"], domain=domain)], 11, x.shape, {"x": x})
        model.opset_import[0].domain = imported
        before = model.SerializeToString()
        for constants in ([], ["x"]):
            assert not differ(evaluated(model, {"x": x}, constants), [wanted])
        assert model.SerializeToString() == before
    model.opset_import.append(helper.make_opsetid("", 13))
    with pytest.raises(InvalidProblem, match="opsets 11 and 13 of the domain ''"):
        gradc.from_onnx(model)


def test_a_model_without_opsets_is_of_the_first() -> None:
    """Of the format's versions 1 and 2, as a file and as a message."""
    x = drawn(2, 3, 4)
    model = net([helper.make_node("Hardmax", ["x"], ["y"])], 1, x.shape, {"x": x})
    del model.opset_import[:]
    model.ir_version = 2
    rows = x.reshape(2, 12)
    wanted = (np.arange(12) == rows.argmax(1)[:, None]).astype(np.float32).reshape(x.shape)
    for source in (model, model.SerializeToString()):
        assert not differ(evaluated(source, {"x": x}, []), [wanted])


FORMS_OF_OTHER_OPSETS: list[tuple[str, int, Sequence[np.ndarray], Mapping[str, Any]]] = [
    ("Clip", 13, [X], {"min": 0.0}),
    ("Clip", 10, [X, X[0, 0]], {}),
    ("Concat", 4, [X, X], {}),
    ("Cast", 5, [X], {"to": 1}),
    ("Cast", 6, [X], {"to": "FLOAT"}),
    ("Slice", 10, [X], {"starts": [0], "ends": [1]}),
    ("Add", 7, [X, X[0]], {"broadcast": 1}),
    ("ReduceMax", 18, [X], {"axes": [0]}),
    ("Gelu", 7, [X], {}),
    ("MaxRoiPool", 7, [drawn(1, 1, 4, 4), drawn(1, 5)], {"pooled_shape": [2, 2]}),
]


@pytest.mark.parametrize(("op", "opset", "inputs", "attributes"), FORMS_OF_OTHER_OPSETS)
def test_a_form_of_another_opset_is_refused_by_operator_and_opset(
    op: str, opset: int, inputs: Sequence[np.ndarray], attributes: Mapping[str, Any]
) -> None:
    """Where the checker of ONNX finds it, too."""
    with pytest.raises((InvalidProblem, Unsupported), match=rf"(?s){op}.*opset {opset}\b"):
        gradc.from_onnx(Case(op, (opset, opset), inputs, [X], attributes=attributes).model(opset))


def test_an_operator_of_another_domain_is_refused_with_its_opset() -> None:
    model = net([helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml")], 11, X.shape)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    with pytest.raises(Unsupported, match=r"ai\.onnx\.ml\.Normalizer of opset 1 "):
        gradc.from_onnx(model)


def test_a_share_of_an_integer_product_is_refused() -> None:
    a = np.ones((2, 2), np.int32)
    with pytest.raises(Unsupported, match=r"Gemm.*alpha 0.5.*opset 11"):
        gradc.from_onnx(Case("Gemm", (11, 11), [a, a], [a], attributes={"alpha": 0.5}).model(11))


@pytest.mark.parametrize("opset", [14, 16, 21])
def test_an_identity_of_a_sequence(opset: int) -> None:
    nodes_ = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["both"]),
        helper.make_node("Identity", ["both"], ["same"]),
        helper.make_node("ConcatFromSequence", ["same"], ["y"], axis=0),
    ]
    assert not differ(evaluated(net(nodes_, opset, [6, 4]), {"x": X}, []), [np.concatenate([X, X])])


# -- sizes that vary ---------------------------------------------------------------------------------------------------

SIZE = [
    helper.make_node("Shape", ["x"], ["shape"]),
    helper.make_node("Gather", ["shape", "first"], ["n"]),
    helper.make_node("Gather", ["shape", "last"], ["m"]),
]
"""Of x [n, 3, m]: n and m, [1] each."""
FLOAT, INT32, BOOL = (int(k) for k in (TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL))


def cast(given: str, made: str, to: Any) -> Any:
    return helper.make_node("Cast", [given], [made], to=to)


def node(op: str, *names: str, **attributes: Any) -> Any:
    """The last name is the result's."""
    return helper.make_node(op, names[:-1], names[-1:], **attributes)


OF_SIZES: dict[str, tuple[int, list[Any], Callable[[np.ndarray], Any]]] = {
    "a float": (
        13,
        [cast("n", "f", FLOAT), node("Sqrt", "f", "r"), node("Mul", "x", "r", "y")],
        lambda x: x * np.sqrt(np.float32(len(x))),
    ),
    "a quotient of floats": (
        13,
        [cast("n", "f", FLOAT), cast("m", "g", FLOAT), node("Div", "f", "g", "r"), node("Mul", "x", "r", "y")],
        lambda x: x * np.float32(x.shape[0] / x.shape[2]),
    ),
    "less a half": (
        13,
        [cast("n", "f", FLOAT), node("Sub", "f", "half", "r"), node("Mul", "x", "r", "y")],
        lambda x: x * np.float32(len(x) - 0.5),
    ),
    "a product of floats": (
        13,
        [cast("n", "f", FLOAT), node("Mul", "f", "f", "r"), node("Add", "x", "r", "y")],
        lambda x: x + np.float32(len(x) ** 2),
    ),
    "doubled as a float": (
        13,
        [
            cast("n", "f", FLOAT),
            node("Mul", "f", "two", "g"),
            node("Floor", "g", "h"),
            cast("h", "r", TensorProto.INT64),
            node("Concat", "r", "one", "s", axis=0),
            node("Expand", "unit", "s", "y"),
        ],
        lambda x: np.ones((2 * len(x), 1), np.float32),
    ),
    "a float by its name": (
        5,
        [cast("n", "f", "FLOAT"), node("Mul", "x", "f", "y", broadcast=1)],
        lambda x: x * np.float32(len(x)),
    ),
    "a float like another": (
        15,
        [node("CastLike", "n", "x", "f"), node("Div", "x", "f", "y")],
        lambda x: x / np.float32(len(x)),
    ),
    "a bool": (
        13,
        [cast("n", "b", BOOL), node("Where", "b", "x", "half", "y")],
        lambda x: x,
    ),
    "a whole quotient": (
        13,
        [
            cast("shape", "f", FLOAT),
            node("Div", "f", "f", "g"),
            cast("g", "r", TensorProto.INT64),
            node("Tile", "x", "r", "y"),
        ],
        lambda x: x,
    ),
    "u8 below zero": (
        13,
        [cast("n", "i", TensorProto.UINT8), node("Sub", "i", "six", "r"), cast("r", "y", FLOAT)],
        lambda x: np.array([len(x) - 6 + 256], np.float32),
    ),
    "the size of windows": (
        11,
        [
            node("AveragePool", "x", "p", kernel_shape=[1], strides=[2]),
            node("Sub", "m", "one", "less"),
            node("Div", "less", "second", "q"),
            node("Add", "q", "one", "r"),
            node("Concat", "one", "r", "s", axis=0),
            node("Expand", "unit", "s", "e"),
            node("Add", "p", "e", "y"),
        ],
        lambda x: x[:, :, ::2] + np.float32(1),
    ),
    "a scalar and one element": (
        5,
        [node("Size", "x", "z"), node("Add", "z", "one", "v", broadcast=1), cast("v", "y", "FLOAT")],
        lambda x: np.array(x.size + 1, np.float32),
    ),
    "i32": (
        9,
        [cast("n", "i", INT32), node("Mul", "i", "i", "j"), node("Div", "j", "three", "y")],
        lambda x: np.array([len(x) ** 2 // 3], np.int32),
    ),
    "a negative quotient": (
        13,
        [
            node("Sub", "one", "n", "less"),
            node("Div", "less", "second", "q"),
            node("Sub", "one", "q", "r"),
            node("Concat", "r", "one", "s", axis=0),
            node("Expand", "unit", "s", "y"),
        ],
        lambda x: np.ones((1 + (len(x) - 1) // 2, 1), np.float32),
    ),
    "a product that keeps its axis": (
        11,
        [
            node("ReduceProd", "shape", "p", axes=[0]),
            node("Concat", "p", "one", "s", axis=0),
            node("Reshape", "x", "s", "y"),
        ],
        lambda x: x.reshape(-1, 1),
    ),
    "a slice along its second axis": (
        9,
        [
            node("Unsqueeze", "shape", "u", axes=[0]),
            node("Slice", "u", "v", axes=[1], starts=[0], ends=[2]),
            node("Reshape", "v", "second", "w"),
            node("Concat", "w", "minus", "s", axis=0),
            node("Reshape", "x", "s", "y"),
        ],
        lambda x: x,
    ),
    "a shape of zeros": (
        13,
        [node("Reshape", "shape", "zero", "s"), node("Reshape", "x", "s", "y")],
        lambda x: x,
    ),
    "a shape that is an attribute": (
        4,
        [node("Reshape", "shape", "s", shape=[1, 3]), cast("s", "y", "FLOAT")],
        lambda x: np.array([x.shape], np.float32),
    ),
    "a part of its shape": (
        15,
        [
            node("Unsqueeze", "shape", "zero", "u"),
            node("Shape", "u", "s", start=1),
            cast("s", "f", FLOAT),
            node("Add", "x", "f", "y"),
        ],
        lambda x: x + np.float32(3),
    ),
    "a sum along its first axis": (
        5,
        [
            node("Unsqueeze", "shape", "u", axes=[1]),
            node("Add", "u", "shape", "v", broadcast=1, axis=0),
            cast("v", "y", "FLOAT"),
        ],
        lambda x: 2 * np.array(x.shape, np.float32)[:, None],
    ),
}


@pytest.mark.parametrize("name", OF_SIZES)
def test_numbers_made_of_sizes_that_vary(name: str) -> None:
    """In the forms of their opset, and of the dtype they were cast to."""
    opset, body, wanted = OF_SIZES[name]
    constants = {
        "first": np.array([0]),
        "last": np.array([2]),
        "zero": np.array([0]),
        "one": np.array([1]),
        "minus": np.array([-1]),
        "second": np.array([2]),
        "half": np.array([0.5], np.float32),
        "two": np.array([2], np.float32),
        "three": np.array([3], np.int32),
        "six": np.array([6], np.uint8),
        "unit": np.ones((1, 1), np.float32),
    }
    model = net([*SIZE, *body], opset, [1], {"x": drawn(5, 3, 4)})
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in constants.items())
    model.graph.output[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(wanted(drawn(5, 3, 4)).dtype)
    for axis, title in ((0, "n"), (2, "m")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = title
    for n, m in ((5, 4), (2, 2), (1, 3)):
        x = drawn(n, 3, m)
        assert not differ(evaluated(model, {"x": x}, []), [wanted(x)]), (n, m)


@pytest.mark.parametrize(("op", "opset"), [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("wider", [2.0, 1.5])
def test_scales_are_quotients_of_sizes(op: str, opset: int, wider: float) -> None:
    """As exporters of these opsets write an interpolation, of as many images as there are."""
    nodes_ = [
        node("Shape", "x", "shape"),
        node("Gather", "shape", "last", "m"),
        cast("m", "f", FLOAT),
        node("Mul", "f", "wider", "g"),
        node("Floor", "g", "h"),
        cast("h", "w", TensorProto.INT64),
        node("Gather", "shape", "first", "n"),
        node("Concat", "n", "w", "size", axis=0),
        cast("size", "to", FLOAT),
        cast("shape", "from", FLOAT),
        node("Div", "to", "from", "scales"),
        node(op, "x", "scales", "y"),
    ]
    model = net(nodes_, opset, [1, 1, 1], {"x": drawn(5, 3, 4)})
    values = {"first": np.array([0, 1]), "last": np.array([2]), "wider": np.array([wider], np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in values.items())
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    for n in (5, 1):
        x = drawn(n, 3, 4)
        places = np.floor(np.arange(int(4 * wider)) / wider).astype(int)
        assert not differ(evaluated(model, {"x": x}, []), [x[:, :, places]])


def test_a_size_less_a_number_is_not_negative() -> None:
    """(m - 3) / 2 + 1 windows there are where m is 3 or more: what is assumed is checked."""
    body = [node("Sub", "m", "one", "less"), node("Div", "less", "second", "q"), node("Expand", "unit", "q", "y")]
    model = net([*SIZE, *body], 13, [1], {"x": drawn(5, 3, 4)})
    values = {"first": [0], "last": [2], "one": [3], "second": [2]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in values.items())
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "unit"))
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "m"
    assert not differ(evaluated(model, {"x": drawn(5, 3, 7)}, []), [np.ones(2, np.float32)])
    with pytest.raises(InvalidProblem, match="m >= 3"):
        evaluated(model, {"x": drawn(5, 3, 2)}, [])
