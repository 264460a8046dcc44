"""Random small ONNX models over operators on floats: their values against onnxruntime, their gradients against
differences in f64.

A seed is a chain of operators with random shapes and attributes, each of which reads values before it.  Values that
onnxruntime finds too large or not finite are compared nowhere: sums of both have other orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from .campaign import Campaign, Options, Outcome

SIZES = (1, 2, 3, 4, 5)
MOST, LARGEST = 2000, 1e3
"""Elements of a value, and how large they may be where values are compared."""


class Drawing:
    """A model that grows node by node.

    :ivar shapes: of the values of floats by name.
    """

    def __init__(self, choose: random.Random):
        self.choose, self.rng = choose, np.random.default_rng(choose.randrange(2**32))
        self.nodes: list[Any] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.choose.choice(SIZES) for _ in range(rank))

    def value(self, low: int = 0, high: int = 4) -> str:
        """A value of a rank between, made if there is none."""
        fit = [n for n, s in self.shapes.items() if low <= len(s) <= high]
        if fit and self.choose.random() < 0.85:
            return self.choose.choice(fit[-3:])
        return self.input(self.shape(self.choose.randint(low, high)))

    def input(self, shape: tuple[int, ...]) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.shapes[name] = shape
        return name

    def weight(self, shape: tuple[int, ...] | np.ndarray, positive: bool = False) -> str:
        """A known array, or one of floats that is drawn."""
        name = f"w{len(self.weights)}"
        if isinstance(shape, np.ndarray):
            self.weights[name] = shape
        else:
            drawn = self.rng.uniform(0.5, 1.5, shape) if positive else self.rng.standard_normal(shape)
            self.weights[name] = np.asarray(drawn, np.float32)
        return name

    def whole(self, *numbers: int) -> str:
        return self.weight(np.array(numbers, np.int64))

    def put(self, op: str, inputs: list[str], count: int = 1, **attributes: Any) -> None:
        from onnx import helper

        outputs = [f"v{len(self.nodes)}_{k}" for k in range(count)]
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))

    def model(self) -> Any:
        """The model so far; its outputs are what no node reads."""
        from onnx import TensorProto, helper, numpy_helper, shape_inference

        read = {name for node in self.nodes for name in node.input}
        left = [name for node in self.nodes for name in node.output if name not in read]
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in self.inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in left],
            [numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        inferred = shape_inference.infer_shapes(made, strict_mode=True)
        for info in (*inferred.graph.value_info, *inferred.graph.output):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT:
                self.shapes[info.name] = tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        return inferred


# -- operators ---------------------------------------------------------------------------------------------------------

UNARY: dict[str, dict[str, tuple[Any, ...]]] = {
    **{
        name: {}
        for name in "Abs Relu Sigmoid Tanh Softplus Softsign Erf HardSwish Mish Neg Identity Sin Cos Atan Asinh".split()
    },
    "Elu": {"alpha": (0.5, 1.0, 2.0)},
    "Celu": {"alpha": (0.5, 2.0)},
    "Selu": {},
    "LeakyRelu": {"alpha": (0.01, 0.3)},
    "HardSigmoid": {"alpha": (0.2, 0.5), "beta": (0.5, 0.1)},
    "ThresholdedRelu": {"alpha": (0.5, 1.0)},
    "Gelu": {"approximate": ("none", "tanh")},
    "Shrink": {"lambd": (0.5,), "bias": (0.0, 0.5)},
}


def _unary(d: Drawing) -> None:
    op = d.choose.choice(sorted(UNARY))
    d.put(op, [d.value()], **{k: d.choose.choice(v) for k, v in UNARY[op].items() if d.choose.random() < 0.8})


def _binary(d: Drawing) -> None:
    x = d.value()
    shape = tuple(n if d.choose.random() < 0.7 else 1 for n in d.shapes[x])[d.choose.choice((0, 0, 1)) :]
    op = d.choose.choice(("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu"))
    y = d.weight(shape, positive=op == "Div")
    d.put(op, [x, y] if op in ("Div", "PRelu") or d.choose.random() < 0.5 else [y, x])


def _along(d: Drawing) -> None:
    """Softmax, sums and norms along an axis."""
    x = d.value(1)
    rank = len(d.shapes[x])
    axis = d.choose.randrange(-rank, rank)
    match d.choose.randrange(4):
        case 0:
            d.put(d.choose.choice(("Softmax", "LogSoftmax")), [x], axis=axis)
        case 1:
            flags = {k: d.choose.randrange(2) for k in ("exclusive", "reverse")}
            d.put("CumSum", [x, d.whole(axis)], **flags)
        case 2:
            op = d.choose.choice(("Sum", "Mean", "Max", "Min", "SumSquare", "L1", "L2", "LogSumExp", "Prod"))
            axes = sorted(d.choose.sample(range(rank), d.choose.randint(1, rank)))
            if op == "Prod":
                axes = axes[:1]
            d.put(f"Reduce{op}", [x, d.whole(*axes)], keepdims=d.choose.randrange(2))
        case 3:
            size = d.shapes[x][axis % rank :]
            names = [x, d.weight(size)] + ([d.weight(size)] if d.choose.random() < 0.5 else [])
            d.put("LayerNormalization", names, axis=axis)


def _product(d: Drawing) -> None:
    x = d.value(2)
    inner = d.shapes[x][-1]
    if len(d.shapes[x]) == 2 and d.choose.random() < 0.4:
        flip = d.choose.randrange(2)
        out = d.choose.choice(SIZES)
        w = d.weight((out, inner) if flip else (inner, out))
        more = [d.weight(d.choose.choice(((out,), (1, out), ())))] if d.choose.random() < 0.5 else []
        d.put("Gemm", [x, w, *more], transB=flip, alpha=d.choose.choice((1.0, 0.5)), beta=d.choose.choice((1.0, 2.0)))
    elif d.choose.random() < 0.3:
        d.put("Einsum", [x, d.weight((inner, 3))], equation="...i,ij->...j")
    else:
        d.put("MatMul", [x, d.weight((inner,) if d.choose.random() < 0.2 else (inner, d.choose.choice(SIZES)))])


def _window(d: Drawing) -> None:
    """Convolutions and pools, on an image that is large enough."""
    rank = d.choose.choice((1, 2, 2, 3))
    x = d.input((d.choose.choice((1, 2)), d.choose.choice((2, 4)), *(d.choose.randint(4, 7) for _ in range(rank))))
    channels = d.shapes[x][1]
    kernel = [d.choose.randint(1, 3) for _ in range(rank)]
    attributes: dict[str, Any] = {"strides": [d.choose.randint(1, 2) for _ in kernel]}
    if d.choose.random() < 0.25:
        attributes["auto_pad"] = d.choose.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    else:
        attributes["pads"] = [d.choose.randrange(k) for k in kernel * 2]
    op = d.choose.choice(("Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool"))
    if op == "GlobalAveragePool":
        return d.put(op, [x])
    if op in ("Conv", "MaxPool") and "auto_pad" not in attributes and d.choose.random() < 0.4:
        attributes["dilations"] = [d.choose.randint(1, 2) for _ in kernel]
    if op in ("Conv", "ConvTranspose"):
        group, out = d.choose.choice((1, 2)), d.choose.choice((2, 4))
        attributes |= {"group": group, "kernel_shape": kernel}
        w = (out, channels // group) if op == "Conv" else (channels, out // group)
        bias = [d.weight((out,))] if d.choose.random() < 0.5 else []
        if op == "ConvTranspose":
            attributes.pop("auto_pad", None)
        return d.put(op, [x, d.weight((*w, *kernel)), *bias], **attributes)
    if op == "AveragePool":
        attributes["count_include_pad"] = d.choose.randrange(2)
    if op != "LpPool" and "auto_pad" not in attributes:
        attributes["ceil_mode"] = d.choose.randrange(2)
    return d.put(op, [x], kernel_shape=kernel, **attributes)


def _normalized(d: Drawing) -> None:
    x = d.value(3)
    channels = d.shapes[x][1]
    op = d.choose.choice(("BatchNormalization", "InstanceNormalization", "LRN"))
    if op == "LRN":
        return d.put(op, [x], size=d.choose.choice((1, 3)), alpha=0.1)
    given = [d.weight((channels,)) for _ in range(2)]
    if op == "BatchNormalization":
        given += [d.weight((channels,)), d.weight((channels,), positive=True)]
    return d.put(op, [x, *given])


def _moved(d: Drawing) -> None:
    x = d.value(1)
    shape = d.shapes[x]
    rank = len(shape)
    axis = d.choose.randrange(rank)
    match d.choose.randrange(9):
        case 0:
            d.put("Transpose", [x], perm=d.choose.sample(range(rank), rank))
        case 1:
            sizes = list(shape)
            sizes[axis] = -1
            d.put("Reshape", [x, d.whole(*d.choose.sample(sizes, rank))])
        case 2:
            d.put("Concat", [x, d.weight(shape), x], axis=axis - d.choose.choice((0, rank)))
        case 3:
            begin = [d.choose.randint(-n - 1, n) for n in shape]
            end = [d.choose.choice((n, n - 1, -1, 2**31 - 1, -n - 1)) for n in shape]
            step = [d.choose.choice((1, 1, 2, -1, -2)) for _ in shape]
            d.put("Slice", [x, d.whole(*begin), d.whole(*end), d.whole(*range(rank)), d.whole(*step)])
        case 4:
            mode = d.choose.choice(("constant", "edge", "reflect"))
            most = [n - 1 if mode == "reflect" else 2 for n in shape]
            d.put("Pad", [x, d.whole(*(d.choose.randint(0, m) for m in most * 2))], mode=mode)
        case 5:
            d.put("Tile", [x, d.whole(*(d.choose.randint(1, 2) for _ in shape))])
        case 6:
            d.put("Unsqueeze", [x, d.whole(d.choose.randint(-rank - 1, rank))])
        case 7:
            d.put("Expand", [x, d.whole(*(n if n > 1 else d.choose.randint(1, 3) for n in shape))])
        case 8:
            d.put("Flatten", [x], axis=d.choose.randint(0, rank))


def _indexed(d: Drawing) -> None:
    x = d.value(1)
    shape = d.shapes[x]
    axis = d.choose.randrange(len(shape))
    size = shape[axis]

    def places(of: tuple[int, ...], below: int) -> str:
        return d.weight(d.rng.integers(-below, below, of))

    match d.choose.randrange(5):
        case 0:
            d.put("Gather", [x, places(d.shape(d.choose.randint(0, 2)), size)], axis=axis)
        case 1:
            d.put(
                "GatherElements", [x, places(tuple(max(1, n - d.choose.randrange(2)) for n in shape), size)], axis=axis
            )
        case 2:
            how = d.choose.choice(("none", "add", "mul", "max", "min"))
            own = tuple(1 if how == "none" and i == axis else n for i, n in enumerate(shape))
            d.put("ScatterElements", [x, places(own, size), d.weight(own)], axis=axis, reduction=how)
        case 3:
            d.put("GatherND", [x, places((d.choose.choice(SIZES), 1), shape[0])])
        case 4:
            d.put("Where", [d.weight(d.rng.random(shape) < 0.5), x, d.weight(shape)])


def _resized(d: Drawing) -> None:
    x = d.input((1, 2, d.choose.randint(2, 5), d.choose.randint(2, 5)))
    mode = d.choose.choice(("nearest", "linear", "cubic"))
    how = d.choose.choice(("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"))
    sizes = [1, 2, *(d.choose.randint(1, 8) for _ in range(2))]
    d.put("Resize", [x, "", "", d.whole(*sizes)], mode=mode, coordinate_transformation_mode=how)


def _recurrent(d: Drawing) -> None:
    steps, batch, width, hidden = (d.choose.randint(1, 3) for _ in range(4))
    op, gates = d.choose.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    direction = d.choose.choice(("forward", "reverse", "bidirectional"))
    n = 2 if direction == "bidirectional" else 1
    x = d.input((steps, batch, width))
    w, r = d.weight((n, gates * hidden, width)), d.weight((n, gates * hidden, hidden))
    bias = d.weight((n, 2 * gates * hidden)) if d.choose.random() < 0.5 else ""
    more = {"linear_before_reset": d.choose.randrange(2)} if op == "GRU" else {}
    d.put(op, [x, w, r, bias], 1, hidden_size=hidden, direction=direction, **more)


def _quantized(d: Drawing) -> None:
    """Codes with a scale for each column, or for each block of rows."""
    columns, block = d.choose.choice(SIZES), d.choose.choice((0, 0, 2))
    x = d.value(2)
    rows = d.shapes[x][-1]
    if block and rows % block:
        block = 0
    codes = d.weight(d.rng.integers(-128, 128, (rows, columns)).astype(np.int8))
    scale = d.weight((rows // block, columns) if block else (columns,), positive=True)
    zero = [d.weight(d.rng.integers(-9, 9, d.weights[scale].shape).astype(np.int8))] if d.choose.random() < 0.5 else []
    kind = {"axis": 0, "block_size": block} if block else {"axis": 1}
    d.put("DequantizeLinear", [codes, scale, *zero], **kind)
    d.put("Mul", [d.nodes[-1].output[0], d.weight(np.array(0.01, np.float32))])
    d.put("MatMul", [x, d.nodes[-1].output[0]])


def _space(d: Drawing) -> None:
    n, b = d.choose.randint(1, 2), 2
    if d.choose.random() < 0.5:
        x = d.input((n, 8, d.choose.choice((1, 2)), d.choose.choice((1, 3))))
        d.put("DepthToSpace", [x], blocksize=b, mode=d.choose.choice(("DCR", "CRD")))
    else:
        d.put("SpaceToDepth", [d.input((n, 2, 2, 4))], blocksize=b)


def _clipped(d: Drawing) -> None:
    d.put("Clip", [d.value(), d.weight(np.array(-0.7, np.float32)), d.weight(np.array(0.9, np.float32))])


DRAWN: tuple[tuple[Callable[[Drawing], None], int], ...] = (
    (_unary, 5), (_binary, 4), (_along, 4), (_product, 3), (_window, 4), (_normalized, 2), (_moved, 5), (_indexed, 4),
    (_resized, 1), (_recurrent, 1), (_quantized, 1), (_space, 1), (_clipped, 1),
)  # fmt: skip


def drawn(seed: int) -> Drawing:
    """A model of up to eight nodes, those left out that onnx finds no shape for or that grow too large."""
    import onnx

    d = Drawing(random.Random(seed))
    for _ in range(d.choose.randint(1, 8)):
        before = len(d.nodes), dict(d.weights), dict(d.inputs), dict(d.shapes)
        d.choose.choices([f for f, _ in DRAWN], [w for _, w in DRAWN])[0](d)
        try:
            d.model()
            fits = all(0 < np.prod(s, dtype=float) <= MOST for s in d.shapes.values())
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
            fits = False
        if not fits or any(0 in s for s in d.shapes.values()):
            del d.nodes[before[0] :]
            d.weights, d.inputs, d.shapes = before[1:]
    return d


# -- what becomes of one -----------------------------------------------------------------------------------------------


def attempt(seed: int, options: Options) -> Outcome:
    import onnxruntime

    import gradc
    from gradc import interp

    d = drawn(seed)
    if not d.nodes:
        return Outcome("typed", counts={"empty": 1})
    made = d.model()
    kinds = " ".join(dict.fromkeys(n.op_type for n in d.nodes))
    head = f"seed {seed}\n" + "\n".join(f"{n.output[0]} = {n.op_type}({', '.join(n.input)})" for n in d.nodes)
    values = {n: d.rng.standard_normal(s).astype(np.float32) for n, s in d.inputs.items()}
    peer = onnxruntime.SessionOptions()
    peer.intra_op_num_threads, peer.log_severity_level = 1, 4
    try:
        session = onnxruntime.InferenceSession(made.SerializeToString(), peer, providers=["CPUExecutionProvider"])
        wanted = session.run(None, {i.name: values[i.name] for i in session.get_inputs()})
    except Exception as error:  # onnxruntime's errors have no common class; what it refuses is compared nowhere
        return Outcome("typed", counts={f"refused by onnxruntime: {type(error).__name__}": 1})
    graph = gradc.from_onnx(made)
    floats = [n for n in graph.input_names if graph.input(n).dtype.is_float and n not in graph.defaults]
    found = list(interp.run(graph, {**graph.defaults, **values}, precision="f64").values())
    small = all(np.isfinite(w).all() and np.abs(w).max(initial=0) < LARGEST for w in wanted)
    for got, want in zip(found, wanted, strict=True):
        if got.shape != want.shape:
            return Outcome("wrong", f"{head}\n{got.shape}, onnxruntime has {want.shape}", f"shape: {kinds}")
        if small and not np.allclose(got, want, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(want).max(initial=0)))):
            worst = float(np.abs(got - want).max())
            return Outcome("wrong", f"{head}\noff by {worst:g}:\n{got}\nonnxruntime:\n{want}", f"values: {kinds}")
    counts = {"compared" if small else "too large to compare": 1}
    report = _gradients(graph, floats, values)
    if report is not None and not report.ok:
        return Outcome("wrong", f"{head}\n{report}", f"gradient: {kinds}", counts)
    if seed % 8 == 0 and small:
        outputs = gradc.compile(graph, target="cpu")(**values)
        for got, want in zip(outputs.values() if isinstance(outputs, dict) else [outputs], wanted, strict=True):
            if not np.allclose(got, want, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(want).max(initial=0)))):
                return Outcome("wrong", f"{head}\ncompiled:\n{got}\nonnxruntime:\n{want}", f"kernels: {kinds}", counts)
        counts["compiled"] = 1
    return Outcome("right", counts={**counts, **({"gradients": 1} if report is not None else {})})


def _gradients(graph: Any, names: list[str], values: dict[str, np.ndarray]) -> Any:
    """gradc's own check of the gradients of all inputs that have one; None where none has."""
    import gradc
    from gradc.errors import NotDifferentiable

    used = []
    for name in names:
        try:
            gradc.differentiate(graph, [name])
            used.append(name)
        except NotDifferentiable:
            continue
    return gradc.check(graph, used, inputs={**graph.defaults, **values}) if used else None


CAMPAIGN = Campaign("onnx_graphs", attempt, limit=120, ci=25, needs=("onnx", "onnxruntime"))
