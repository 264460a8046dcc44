"""ONNX files from strangers: valid models with bytes changed, and with fields of their messages dropped, repeated,
swapped and replaced (cycles, names twice, huge sizes, other opsets and domains, external data elsewhere).

What is read must be a graph that verifies, prints and parses back, and runs or is refused by a typed error; anything
else is one error of gradc's.  A file takes no more than ten seconds and a gigabyte.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from .campaign import Campaign, Options, Outcome
from .containers import changed

SECONDS, BYTES = 10.0, 1 << 30
SECRET = b"\xa7\x3c\xd1\x5e"
UNLIKE = ("Dropout", "MatMulNBits", "Loop", "Softmax", "LogSoftmax")
"""Random, of another domain, ended at once by the reference where it has no condition, or not of old opsets there."""
MOST = 1 << 16
"""Elements of all values of a graph that is run."""
NUMBERS = (0, 1, -1, 2, 3, 7, 16, 127, 1 << 16, 1 << 20, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 10**12)
TEXTS = ("", "x", "../x", "/etc/passwd", "ai.onnx", "com.microsoft", "d.y", "key", "\n", "é" * 40, "a b", "N*N", "-1")
LOCATIONS = ("../weights", "/etc/passwd", "weights", "", ".", "weights/../../weights", "none", "\0", "link")


# -- what is changed ---------------------------------------------------------------------------------------------------


@functools.cache
def sources() -> tuple[bytes, ...]:
    """Small models: of onnx's own package, and some with what those have not."""
    import onnx

    data = Path(onnx.__file__).parent / "backend/test/data"
    found = [
        path.read_bytes()
        for kind in ("simple", "pytorch-operator", "pytorch-converted")
        for path in sorted((data / kind).glob("*/model.onnx"))
    ]
    own = [_quantized(), _external(), _controlled(), _function(), _sequences(), _shaped()]
    return (*(m.SerializeToString() for m in own * 4), *(f for f in found if len(f) < 20000))


def _model(nodes: list[Any], inputs: Any, outputs: Any, weights: Any = None, **options: Any) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    infos = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in each.items()] for each in (inputs, outputs)
    ]
    initial = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "net", *infos, initial)
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **options)


def _quantized() -> Any:
    from onnx import helper

    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "t"], ["c"], output_dtype=3),
        helper.make_node("DequantizeLinear", ["c", "t"], ["d"]),
        helper.make_node(
            "MatMulNBits", ["d", "b", "e"], ["y"], domain="com.microsoft", K=4, N=2, bits=4, block_size=16
        ),
    ]
    weights = {
        "q": np.ones((3, 4), np.int8),
        "s": np.ones(4, np.float32),
        "z": np.zeros(4, np.int8),
        "t": np.float32(0.1),
        "b": np.ones((2, 1, 8), np.uint8),
        "e": np.ones(2, np.float32),
    }
    return _model(nodes, {"x": ["n", 3]}, {"y": ["n", 2]}, weights)


def _external() -> Any:
    from onnx import TensorProto, helper

    made = _model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": ["n", 4]}, {"y": ["n", 4]}, {"w": np.ones(4, "f4")}
    )
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return made


def _controlled() -> Any:
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "x"], ["b"]), helper.make_node("Identity", ["going"], ["still"])],
        "body",
        [info("i", TensorProto.INT64, []), info("going", TensorProto.BOOL, []), info("a", TensorProto.FLOAT, [2])],
        [info("still", TensorProto.BOOL, []), info("b", TensorProto.FLOAT, [2])],
    )
    branches = {
        name: helper.make_graph([helper.make_node(op, ["l"], ["r"])], name, [], [info("r", TensorProto.FLOAT, [2])])
        for name, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        helper.make_node("Loop", ["steps", "", "x"], ["l"], body=body),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    return _model(nodes, {"x": [2]}, {"y": [2]}, {"steps": np.array(3), "c": np.array(True)})


def _function() -> Any:
    from onnx import AttributeProto, helper

    inner = [helper.make_node("LeakyRelu", ["a"], ["c"]), helper.make_node("Add", ["c", "c"], ["b"])]
    body = helper.make_function("own", "Twice", ["a"], ["b"], inner, [helper.make_opsetid("", 21)], ["alpha"])
    body.node[0].attribute.append(AttributeProto(name="alpha", ref_attr_name="alpha", type=1))
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="own", alpha=0.5)]
    return _model(nodes, {"x": [3]}, {"y": [3]}, functions=[body])


def _sequences() -> Any:
    from onnx import helper

    nodes = [
        helper.make_node("SplitToSequence", ["x", "one"], ["s"], axis=1),
        helper.make_node("SequenceErase", ["s", "one"], ["t"]),
        helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=1),
    ]
    return _model(nodes, {"x": [2, 4]}, {"y": [2, 3]}, {"one": np.array(1)})


def _shaped() -> Any:
    from onnx import helper

    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "b"], ["g"], transB=1),
        helper.make_node("Dropout", ["g", "half", "yes"], ["d"]),
        helper.make_node("LSTM", ["u", "lw", "lr"], ["", "h"], hidden_size=2),
        helper.make_node("Resize", ["i", "", "", "sizes"], ["y"], mode="linear"),
        helper.make_node("Conv", ["y", "k"], ["v"], pads=[1, 1, 1, 1]),
    ]
    weights = {
        "zero": np.array([0]),
        "rest": np.array([-1]),
        "w": np.ones((2, 12), np.float32),
        "b": np.ones(2, np.float32),
        "half": np.float32(0.5),
        "yes": np.array(True),
        "lw": np.ones((1, 8, 3), np.float32),
        "lr": np.ones((1, 8, 2), np.float32),
        "sizes": np.array([1, 1, 4, 5]),
        "k": np.ones((2, 1, 3, 3), np.float32),
    }
    inputs = {"x": ["N", 3, 4], "u": [2, 1, 3], "i": [1, 1, 2, 3]}
    return _model(nodes, inputs, {"d": ["N", 2], "h": [1, 1, 2], "v": [1, 2, 4, 5]}, weights)


# -- how ---------------------------------------------------------------------------------------------------------------


def mutated(choose: random.Random) -> tuple[bytes, str]:
    """A file, and what was done to it."""
    data = choose.choice(sources())
    if choose.random() < 0.25:
        return changed(choose, data)
    import onnx

    made = onnx.ModelProto()
    made.ParseFromString(data)
    said = []
    for _ in range(choose.choice((1, 1, 1, 2, 3, 6))):
        said.append(choose.choices((_field, _wired, _sized, _elsewhere), (8, 3, 2, 1))[0](choose, made))
    return made.SerializeToString(), "; ".join(said)


def _messages(message: Any) -> list[Any]:
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found += _messages(each)
    return found


def _field(choose: random.Random, made: Any) -> str:
    """A field of some message cleared, or one of its values dropped, repeated, swapped or replaced."""
    message = choose.choice(_messages(made))
    fields = [f for f, _ in message.ListFields()]
    if not fields:
        return "nothing"
    field = choose.choice(fields)
    name = f"{message.DESCRIPTOR.name}.{field.name}"
    if choose.random() < 0.25:
        message.ClearField(field.name)
        return f"{name} cleared"
    if not field.is_repeated:
        if field.message_type is None:
            setattr(message, field.name, _other(choose, field, getattr(message, field.name), made))
        return f"{name} replaced"
    values = getattr(message, field.name)
    at, to = choose.randrange(len(values)), choose.randrange(len(values))
    how = choose.choice(("drop", "repeat", "swap", "replace"))
    kept = list(values)
    if field.message_type is not None:
        kept = [type(v).FromString(v.SerializeToString()) for v in kept]
    if how == "drop":
        del kept[at]
    elif how == "repeat":
        kept.insert(to, kept[at])
    elif how == "swap" or field.message_type is not None:
        kept[at], kept[to] = kept[to], kept[at]
    else:
        kept[at] = _other(choose, field, kept[at], made)
    message.ClearField(field.name)
    getattr(message, field.name).extend(kept)
    return f"{name} {how}"


def _other(choose: random.Random, field: Any, value: Any, made: Any) -> Any:
    """Another value of a field's type."""
    if field.type == field.TYPE_STRING:
        names = [n for node in made.graph.node for n in (*node.input, *node.output, node.op_type)]
        return choose.choice((*TEXTS, *names))
    if field.type == field.TYPE_BYTES:
        return changed(choose, value)[0] if value else b"x"
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return choose.choice((0.0, -1.0, 1e30, -1e-30, float("nan"), float("inf"), 0.5, 3.0))
    if field.type == field.TYPE_ENUM:
        return choose.choice([v.number for v in field.enum_type.values])
    number = choose.choice((*NUMBERS, value + 1, value - 1, -value))
    low, high = (-(2**31), 2**31 - 1) if field.type == field.TYPE_INT32 else (-(2**63), 2**63 - 1)
    return max(low, min(number, high)) if field.type in (field.TYPE_INT32, field.TYPE_INT64) else abs(number)


def _wired(choose: random.Random, made: Any) -> str:
    """An operand or a result under another's name: cycles, names twice, values that are not there."""
    nodes = [m for m in _messages(made) if m.DESCRIPTOR.name == "NodeProto"]
    names = [n for node in nodes for n in (*node.input, *node.output)] + list(TEXTS)
    node = choose.choice(nodes) if nodes else None
    slots = [s for s in (node.input, node.output) if len(s)] if node is not None else []
    if not slots:
        return "nothing"
    slot = choose.choice(slots)
    slot[choose.randrange(len(slot))] = choose.choice(names)
    return "wired otherwise"


def _sized(choose: random.Random, made: Any) -> str:
    """A size of a tensor or of an input."""
    found = [m for m in _messages(made) if m.DESCRIPTOR.name in ("TensorProto", "Dimension")]
    if not found:
        return "nothing"
    message = choose.choice(found)
    if message.DESCRIPTOR.name == "Dimension":
        if choose.random() < 0.5:
            message.dim_param = choose.choice(TEXTS)
        else:
            message.dim_value = choose.choice(NUMBERS)
    elif len(message.dims) and choose.random() < 0.7:
        message.dims[choose.randrange(len(message.dims))] = choose.choice(NUMBERS)
    else:
        message.dims.append(choose.choice(NUMBERS))
    return "sized otherwise"


def _elsewhere(choose: random.Random, made: Any) -> str:
    """A tensor's data in a file, or that file elsewhere."""
    tensors = [m for m in _messages(made) if m.DESCRIPTOR.name == "TensorProto"]
    if not tensors:
        return "nothing"
    tensor = choose.choice(tensors)
    tensor.data_location = 1
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=choose.choice(LOCATIONS))
    for key in ("offset", "length"):
        if choose.random() < 0.5:
            tensor.external_data.add(key=key, value=str(choose.choice((*NUMBERS, "x", ""))))
    return "data elsewhere"


# -- what becomes of a file --------------------------------------------------------------------------------------------


@functools.cache
def _limited() -> None:
    """A gigabyte more than the process has, with all that is imported."""
    import gradc

    gradc.from_onnx(sources()[0])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + BYTES, -1))


def attempt(seed: int, options: Options) -> Outcome:
    _limited()
    data, how = mutated(random.Random(seed))
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="gradc-onnx-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = judged(data, Path(name), how)
    spent = time.process_time() - began
    if spent > SECONDS:
        return Outcome("hang", f"seed {seed}: {how}: {spent:.0f} s of CPU", how)
    return outcome


def judged(data: bytes, folder: Path, how: str) -> Outcome:
    """What becomes of a model's file; a secret lies outside of its folder."""
    import gradc
    from gradc.errors import GradcError, InternalError

    inside = folder / "model"
    inside.mkdir()
    (folder / "weights").write_bytes(SECRET * 16)
    (inside / "weights").write_bytes(np.arange(64, dtype=np.float32).tobytes())
    (inside / "link").symlink_to("../weights")
    path = inside / "model.onnx"
    path.write_bytes(data)
    try:
        graph = gradc.from_onnx(path)
    except InternalError:
        raise
    except GradcError as error:
        return Outcome("typed", counts={"refused": 1, f"refused by {type(error).__name__.strip('_')}": 1})
    if any(SECRET in v.tobytes() for v in graph.defaults.values()):
        return Outcome("wrong", f"{how}\n{graph}\na file outside of the model's folder was read", "escaped")
    text = str(graph)
    if str(gradc.parse(text)) != text:
        return Outcome("wrong", f"{how}\n{text}", "does not parse back")
    sizes = [np.prod([n if isinstance(n, int) else 2 for n in node.shape], dtype=float) for node in graph.nodes]
    if sum(sizes) > MOST:
        return Outcome("right", counts={"read, too large to run": 1})
    return _run(graph, data, how)


def _run(graph: Any, data: bytes, how: str) -> Outcome:
    """Its values are of the types that it says, or there is a typed error."""
    from gradc import interp
    from gradc.errors import GradcError
    from gradc.ir.dims import evaluate

    dims = dict.fromkeys(graph.dims, 2)
    values = {
        name: np.ones([evaluate(n, dims) for n in graph.input(name).shape], graph.input(name).dtype.np)
        for name in graph.input_names
        if name not in graph.defaults
    }
    try:
        with np.errstate(all="ignore"):
            found = interp.run(graph, {**graph.defaults, **values}, dims=dims)
    except GradcError:
        return Outcome("typed", counts={"read, refused when run": 1})
    for name, node in graph.outputs:
        wanted = tuple(evaluate(n, dims) for n in node.shape)
        if np.shape(found[name]) != wanted:
            return Outcome(
                "wrong", f"{how}\n{graph}\n{name} has {np.shape(found[name])}, not {wanted}", "another shape"
            )
    wanted = _reference(data, values)
    if wanted is None:
        return Outcome("right", counts={"run": 1})
    for got, want in zip(found.values(), wanted, strict=True):
        both = [np.asarray(x, np.float64) for x in (got, want)]
        if np.shape(got) != np.shape(want) or not np.allclose(*both, rtol=1e-3, atol=1e-4, equal_nan=True):
            return Outcome("wrong", f"{how}\n{graph}\n{got}\nthe reference:\n{want}", "other values")
    return Outcome("right", counts={"run": 1, "compared": 1})


def _reference(data: bytes, values: dict[str, np.ndarray]) -> list[Any] | None:
    """What ONNX's reference computes; None where it does not take the model, which it does not check, or where numbers
    are random, too large or not finite.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    made = onnx.ModelProto()
    made.ParseFromString(data)
    names = {t.name for t in made.graph.initializer}
    given = dict(zip([i.name for i in made.graph.input if i.name not in names], values.values(), strict=False))
    if any(n.op_type in UNLIKE for n in made.graph.node) or any(t.data_location for t in made.graph.initializer):
        return None
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(made).run(None, given)
            fits = all(
                isinstance(x, np.ndarray | np.generic) and np.abs(x.astype(float)).max(initial=0) < 1e4 for x in found
            )
    except Exception:  # it has no errors of its own
        return None
    return list(found) if fits else None


CAMPAIGN = Campaign(
    "onnx_files", attempt, limit=120, ci=150, tries=("gradc/errors.py", "gradc/ir", "gradc/onnx"), needs=("onnx",)
)
