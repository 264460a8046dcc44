"""Cases for the forms that operators of ONNX had in older opsets: values by NumPy, from the text of the schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

Array = np.ndarray[Any, Any]
F = np.float32


@dataclass(frozen=True)
class Case:
    """One node.

    :param opsets: the first and the last that it is valid in.
    :param inputs: None for one that is left out.
    :param wanted: the results.
    :param known: places of inputs whose values have to be known when a model is read.
    :param by_runtime: whether onnxruntime, where it is installed and has the opset, says the same.
    """

    op: str
    opsets: tuple[int, int]
    inputs: Sequence[Array | None]
    wanted: Sequence[Array]
    known: tuple[int, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    by_runtime: bool = True

    def __str__(self) -> str:
        said = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{self.opsets[0]}-{said}"[:80].replace("\n", " ")

    def model(self, opset: int) -> Any:
        names = [f"i{k}" if x is not None else "" for k, x in enumerate(self.inputs)]
        given = {n: x for n, x in zip(names, self.inputs, strict=True) if x is not None}
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in given.items()
        ]
        results = [f"y{k}" for k in range(len(self.wanted))]
        kinds = [helper.np_dtype_to_tensor_dtype(w.dtype) for w in self.wanted]
        outputs = [
            helper.make_tensor_value_info(n, t, w.shape) for n, t, w in zip(results, kinds, self.wanted, strict=True)
        ]
        attributes = {k: v for k, v in self.attributes.items() if not isinstance(v, Ints)}
        node = helper.make_node(self.op, names, results, **attributes)
        node.attribute.extend(  # which make_node cannot write where they are empty
            helper.make_attribute(k, list(v), attr_type=7) for k, v in self.attributes.items() if isinstance(v, Ints)
        )
        graph = helper.make_graph([node], "net", infos, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    @property
    def values(self) -> dict[str, Array]:
        return {f"i{k}": x for k, x in enumerate(self.inputs) if x is not None}

    @property
    def constants(self) -> dict[str, Array]:
        return {f"i{k}": self.values[f"i{k}"] for k in self.known if f"i{k}" in self.values}


class Ints(tuple[int, ...]):
    """An attribute that may be an empty list of integers."""


def case(
    op: str,
    first: int,
    last: int,
    inputs: Sequence[Any],
    *wanted: Any,
    known: tuple[int, ...] = (),
    by_runtime: bool = True,
    **attributes: Any,
) -> Case:
    arrays = [None if x is None else np.asarray(x) for x in inputs]
    return Case(op, (first, last), arrays, [np.asarray(w) for w in wanted], known, attributes, by_runtime)


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


X = drawn(2, 3, 4, 5)


# -- element by element ------------------------------------------------------------------------------------------------

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Greater": np.greater,
    "Less": np.less,
    "Equal": np.equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
}


def binary() -> Iterator[Case]:
    """Before opset 7: equal shapes, or ``broadcast`` and the axis where the second operand's axes begin."""
    for op, function in BINARY.items():
        first = ((2, 5),) if op in ("Add", "Sub", "Mul", "Div") else ((1, 6),)
        for shape, aligned, attributes in (
            ((2, 3, 4, 5), (2, 3, 4, 5), {}),
            ((4, 5), (4, 5), {"broadcast": 1}),
            ((3, 4), (3, 4, 1), {"broadcast": 1, "axis": 1}),
            ((2,), (2, 1, 1, 1), {"broadcast": 1, "axis": 0}),
            ((5,), (5,), {"broadcast": 1, "axis": -1}),
            ((1, 1), (), {"broadcast": 1}),
            ((), (), {"broadcast": 1}),
        ):
            x, y = np.abs(X), np.abs(drawn(*shape, seed=1)) + F(0.1)
            if op == "Equal":
                x, y = (x * 2).astype(np.int32), (y * 2).astype(np.int32)
            elif op in ("And", "Or", "Xor"):
                x, y = x > 0.5, y > 0.5
            wanted = function(x, y.reshape(aligned))
            for a, b in (*first, *(((6, 6),) if first == ((2, 5),) else ())):
                yield case(op, 1 if a == 2 else a, b, (x, y), wanted, **attributes)


def variadic() -> Iterator[Case]:
    operands = [drawn(3, 4, seed=k) for k in range(3)]
    for op, wanted in {
        "Max": np.max(operands, 0),
        "Min": np.min(operands, 0),
        "Sum": np.sum(operands, 0),
        "Mean": np.mean(operands, 0),
    }.items():
        for first, last in ((1, 5), (6, 7)):
            yield case(op, first, last, operands, wanted)


def channels(v: Array, rank: int) -> Array:
    return v.reshape(1, -1, *(1,) * (rank - 2))


def pointwise() -> Iterator[Case]:
    slope, one = np.array([0.1, 0.2, 0.3], F), np.array([0.25], F)
    for first, last in ((1, 5), (6, 6)):
        yield case("PRelu", first, last, (X, slope), np.where(X < 0, X * channels(slope, 4), X))
        yield case("PRelu", first, last, (X, one), np.where(X < 0, X * one, X))
    for first, last in ((7, 8), (9, 15), (16, 28)):
        yield case("PRelu", first, last, (X, drawn(5, seed=1)), np.where(X < 0, X * drawn(5, seed=1), X))
        yield case("PRelu", first, last, (X, slope.reshape(3, 1, 1)), np.where(X < 0, X * channels(slope, 4), X))
    for kind, name in ((np.float16, "FLOAT16"), (np.int32, "INT32"), (np.bool_, "BOOL"), (np.float64, "DOUBLE")):
        yield case("Cast", 1, 5, (X,), X.astype(kind), to=name)
        for first, last in ((6, 8), (9, 12), (13, 18)):
            yield case("Cast", first, last, (X,), X.astype(kind), to=int(TensorProto.DataType.Value(name)))
    most = np.finfo(F).max
    edges = np.array([np.inf, -np.inf, np.nan, 2, -2, 0], F)
    for first, last, limit in ((1, 5, np.inf), (6, 10, most)):
        yield case("Clip", first, last, (edges,), np.clip(edges, -limit, limit))
        yield case("Clip", first, last, (edges,), np.clip(edges, 0, limit), min=0.0)
        yield case("Clip", first, last, (edges,), np.clip(edges, -1, 1.5), min=-1.0, max=1.5)
        half = edges.astype(np.float16)  # whose largest is less than the limit
        yield case("Clip", first, last, (half,), half.clip(-np.inf, 1), max=1.0, by_runtime=False)
    wide = np.array([1e300, -1e300, 1], np.float64)
    yield case("Clip", 6, 10, (wide,), np.clip(wide, -float(most), float(most)), by_runtime=False)
    for first, last in ((11, 11), (12, 12), (13, 28)):
        yield case("Clip", first, last, (X, F(-0.5), None), np.maximum(X, F(-0.5)))
        yield case("Clip", first, last, (X, None, F(0.5)), np.minimum(X, F(0.5)))
    for first, last, alpha, gamma in (
        (1, 5, 1.6732, 1.0507),
        (6, 21, 1.6732632, 1.050701),
        (22, 28, 1.6732632, 1.050701),
    ):
        wide_x = X * 4
        wanted = np.where(wide_x > 0, wide_x, F(alpha) * np.expm1(wide_x)) * F(gamma)
        yield case("Selu", first, last, (wide_x,), wanted.astype(F))
    for first, last in ((7, 8), (9, 10), (11, 12), (13, 28)):
        yield case(
            "Gemm", first, last, (X[0, 0], X[0, 1].T, drawn(4, 1, seed=2)), X[0, 0] @ X[0, 1].T + drawn(4, 1, seed=2)
        )


def flattened() -> Iterator[Case]:
    """Along one axis; before opset 13 over all axes from it on."""

    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    functions: dict[str, Callable[[Array], Array]] = {
        "Softmax": softmax,
        "LogSoftmax": lambda x: np.log(softmax(x)),
        "Hardmax": lambda x: (np.arange(x.shape[-1]) == x.argmax(-1)[..., None]).astype(F),
    }
    tied = np.round(X)  # the first of several
    for op, function in functions.items():
        for first, last in ((1, 10), (11, 12)):
            for axis in (None, 0, 1, 2, 3, *((-1, -3) if first == 11 else ())):
                at = (1 if axis is None else axis) % 4
                rows = tied.reshape(int(np.prod(tied.shape[:at])), -1)
                wanted = function(rows).reshape(tied.shape)
                yield case(op, first, last, (tied,), wanted, **({} if axis is None else {"axis": axis}))
        for axis in (None, 0, 1, -2):
            at = -1 if axis is None else axis
            wanted = np.moveaxis(function(np.moveaxis(tied, at, -1)), -1, at)
            yield case(op, 13, 28, (tied,), wanted, **({} if axis is None else {"axis": axis}))


# -- products and normalizations ---------------------------------------------------------------------------------------


def products() -> Iterator[Case]:
    a, b = drawn(3, 4), drawn(4, 5, seed=1)
    for first, last in ((1, 5), (6, 6)):
        full, row = drawn(3, 5, seed=2), drawn(5, seed=3)
        yield case("Gemm", first, last, (a, b, full), a @ b + full)
        yield case(
            "Gemm", first, last, (a.T.copy(), b, row), 2 * (a @ b) + 3 * row, broadcast=1, transA=1, alpha=2.0, beta=3.0
        )
        yield case("Gemm", first, last, (a, b.T.copy(), F(2)), a @ b + 2, broadcast=1, transB=1)


def normalizations() -> Iterator[Case]:
    scale, bias, mean, var = (np.abs(drawn(3, seed=k)) + F(0.5) for k in range(4))
    wanted = channels(scale, 4) * (X - channels(mean, 4)) / np.sqrt(channels(var, 4) + F(1e-5)) + channels(bias, 4)
    yield case("BatchNormalization", 1, 5, (X, scale, bias, mean, var), wanted, is_test=1, consumed_inputs=[0] * 5)
    yield case("BatchNormalization", 6, 6, (X, scale, bias, mean, var), wanted, is_test=1)
    for first, last in ((7, 8), (9, 13), (14, 14), (15, 28)):
        yield case("BatchNormalization", first, last, (X, scale, bias, mean, var), wanted)
    each = [np.abs(drawn(3, 4, 5, seed=k)) + F(0.5) for k in range(4)]
    wanted = each[0] * (X - each[2]) / np.sqrt(each[3] + F(1e-3)) + each[1]
    said = {"spatial": 0, "epsilon": 1e-3}
    yield case("BatchNormalization", 1, 5, (X, *each), wanted, is_test=1, consumed_inputs=[0] * 5, **said)
    yield case("BatchNormalization", 6, 6, (X, *each), wanted, is_test=1, **said)
    yield case("BatchNormalization", 7, 8, (X, *each), wanted, **said)
    centered = (X - X.mean((0, 2, 3), keepdims=True)) / X.std((0, 2, 3), keepdims=True)
    for first, last in ((9, 12), (13, 28)):
        yield case("MeanVarianceNormalization", first, last, (X,), centered)


# -- windows -----------------------------------------------------------------------------------------------------------


def windows() -> Iterator[Case]:
    for first, last, p in ((1, 1, 3.0), (2, 21, 3), (22, 28, 3)):
        wanted = (np.abs(X) ** 3).sum((2, 3), keepdims=True) ** F(1 / 3)
        yield case("GlobalLpPool", first, last, (X,), wanted, p=p)
    squares = X[..., :4, :4] ** 2
    wanted = np.sqrt(squares.reshape(2, 3, 2, 2, 2, 2).sum((3, 5)))
    for first, last, p in ((1, 1, {}), (2, 10, {}), (11, 17, {"p": 2})):
        yield case("LpPool", first, last, (X[..., :4, :4],), wanted, kernel_shape=[2, 2], strides=[2, 2], **p)
    padded = np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 0)))
    ones = np.pad(np.ones_like(X), ((0, 0), (0, 0), (1, 0), (0, 0)))
    total, count = (v[:, :, :-1] + v[:, :, 1:] for v in (padded, ones))
    for first, last, said in ((1, 6, {}), (7, 9, {}), (10, 10, {}), (11, 18, {"count_include_pad": 0})):
        yield case("AveragePool", first, last, (X,), total / count, kernel_shape=[2, 1], pads=[1, 0, 0, 0], **said)
    for first, last in ((7, 9), (10, 10), (11, 18), (19, 21), (22, 28)):
        yield case(
            "AveragePool", first, last, (X,), total / 2, kernel_shape=[2, 1], pads=[1, 0, 0, 0], count_include_pad=1
        )
    image, rois = np.arange(64, dtype=F).reshape(1, 1, 8, 8), np.array([[1, 1, 5, 5]], F)
    for first, last, half in ((10, 15, 0.0), (16, 21, 0.5), (22, 28, 0.5)):
        at = 1 - half + (np.arange(4) + 0.5)
        points = (at[:, None] * 8 + at).astype(F).reshape(2, 2, 2, 2).mean((1, 3))[None, None]
        said = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
        yield case("RoiAlign", first, last, (image, rois, np.array([0])), points, **said)


# -- resizing ----------------------------------------------------------------------------------------------------------


def at_scale(x: Array, scales: Sequence[float], mode: str) -> Array:
    """Before opset 11: element i lies at i / scale; the nearest is below it, or above it where the image shrinks."""
    for axis, scale in enumerate(np.asarray(scales, F)):
        size = x.shape[axis]
        at = (np.arange(int(np.floor(F(size) * scale)), dtype=F) / scale).astype(F)
        if mode == "nearest":
            x = np.take(x, np.minimum(np.ceil(at) if scale < 1 else np.floor(at), size - 1).astype(int), axis)
            continue
        low = np.minimum(np.floor(at), size - 1).astype(int)
        part = (at - np.floor(at)).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        x = np.take(x, low, axis) * (1 - part) + np.take(x, np.minimum(low + 1, size - 1), axis) * part
    return x.astype(F)


def resizing() -> Iterator[Case]:
    image = drawn(2, 1, 4, 10)
    for mode in ("nearest", "linear"):
        for scales in ((1, 1, 2, 2), (1, 1, 1.5, 1.7), (1, 1, 0.6, 0.7), (1, 1, 1.3, 0.3)):
            given = np.array(scales, F)
            yield case("Resize", 10, 10, (image, given), at_scale(image, scales, mode), known=(1,), mode=mode)
            if min(scales) < 1:
                continue
            yield case("Upsample", 9, 9, (image, given), at_scale(image, scales, mode), known=(1,), mode=mode)
            yield case(
                "Upsample", 7, 8, (image,), at_scale(image, scales, mode), scales=list(map(float, scales)), mode=mode
            )
            name = "nearest" if mode == "nearest" else "bilinear"
            by = {"height_scale": float(scales[2]), "width_scale": float(scales[3]), "mode": name}
            yield case("Upsample", 1, 6, (image,), at_scale(image, scales, mode), **by)
    doubled, nothing = np.repeat(image, 2, 3), np.array([], F)
    said = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    by = (image, nothing, np.array([1, 1, 1, 2], F))
    yield case("Resize", 11, 12, by, doubled, known=(1, 2), **said)
    for first, last in (
        (11, 12),
        (13, 17),
        (18, 18),
        (19, 28),
    ):  # half_pixel and round_prefer_floor where nothing is said
        yield case("Resize", first, last, by, doubled, known=(1, 2))
        sizes = (image, None if first > 12 else nothing, None if first > 12 else nothing, np.array([2, 1, 4, 20]))
        yield case("Resize", first, last, sizes, doubled, known=(1, 2, 3))


# -- shapes ------------------------------------------------------------------------------------------------------------


def shapes() -> Iterator[Case]:
    yield case("Reshape", 1, 4, (X,), X.reshape(2, 12, 5), shape=[0, -1, 5])
    yield case("Concat", 1, 3, (X, X[:, :1]), np.concatenate([X, X[:, :1]], 1))
    yield case("Concat", 1, 3, (X, X), np.concatenate([X, X], 3), axis=3)
    for first, last in ((4, 10), (11, 12), (13, 28)):
        yield case("Concat", first, last, (X, X), np.concatenate([X, X], -2), axis=-2)
    parts = np.split(X, [1, 3], 2)
    yield case("Split", 1, 1, (X,), *parts, axis=2, split=[1, 2, 1])
    yield case("Split", 1, 1, (X, np.array([1, 2, 1], F)), *parts, known=(1,), axis=2)
    for first, last in ((1, 1), (2, 10), (11, 12), (13, 17)):
        yield case("Split", first, last, (X,), *np.split(X, 2, 2), axis=2)
    for first, last in ((2, 10), (11, 12)):
        yield case("Split", first, last, (X,), *parts, axis=2, split=[1, 2, 1])
        yield case("Split", first, last, (X,), *np.split(X, 2, 0))
    for first, last in ((13, 17), (18, 28)):
        yield case("Split", first, last, (X, np.array([1, 2, 1])), *parts, known=(1,), axis=-2)
    yield case("Split", 18, 28, (X,), X[..., :2], X[..., 2:4], X[..., 4:], axis=-1, num_outputs=3)
    yield case("Tile", 1, 5, (X, F(3), F(2)), np.tile(X, (1, 1, 3, 1)), known=(1, 2))
    for first, last in ((6, 12), (13, 28)):
        yield case("Tile", first, last, (X, np.array([1, 2, 1, 3])), np.tile(X, (1, 2, 1, 3)), known=(1,))
    deep = drawn(1, 8, 2, 3)
    blocks = deep.reshape(1, 2, 2, 2, 2, 3).transpose(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 6)
    yield case("DepthToSpace", 1, 10, (deep,), blocks, blocksize=2)
    yield from slices()
    yield from axes_as_attributes()
    yield from indices()


def slices() -> Iterator[Case]:
    cut = X[:, 1:, 1:-1, :3]
    yield case("Slice", 1, 9, (X,), cut, starts=[1, 1, 0], ends=[1000, -1, 3], axes=[1, 2, 3])
    yield case("Slice", 1, 9, (X,), X[1:, :2], starts=[-1, 0], ends=[9, -1])
    for first, last in ((10, 10), (11, 12), (13, 28)):
        by = [np.array(v) for v in ((-1, 0), (0, 9), (3, 1), (-2, 2))]
        yield case("Slice", first, last, (X, *by), X[:, 0:9:2, :, -1:0:-2], known=(1, 2, 3, 4))
    for name, mode, said in (
        ("constant", "constant", {"value": 1.5}),
        ("edge", "edge", {}),
        ("reflect", "reflect", {}),
    ):
        widths = ((0, 0), (1, 0), (2, 1), (0, 3))
        flat = [a for a, _ in widths] + [b for _, b in widths]
        wanted = np.pad(X, widths, name, **({"constant_values": 1.5} if said else {}))
        yield case("Pad", 1, 1, (X,), wanted, paddings=flat, mode=mode, **said)
        yield case("Pad", 2, 10, (X,), wanted, pads=flat, mode=mode, **said)
    yield case("Pad", 2, 10, (X,), X[:, :, 1:-1], pads=[0, 0, -1, 0, 0, 0, -1, 0])


REDUCTIONS: dict[str, Callable[..., Array]] = {
    "ReduceL1": lambda x, a, k: np.abs(x).sum(a, keepdims=k),
    "ReduceL2": lambda x, a, k: np.sqrt((x * x).sum(a, keepdims=k)),
    "ReduceLogSum": lambda x, a, k: np.log(x.sum(a, keepdims=k)),
    "ReduceLogSumExp": lambda x, a, k: np.log(np.exp(x).sum(a, keepdims=k)),
    "ReduceMax": lambda x, a, k: x.max(a, keepdims=k),
    "ReduceMean": lambda x, a, k: x.mean(a, keepdims=k),
    "ReduceMin": lambda x, a, k: x.min(a, keepdims=k),
    "ReduceProd": lambda x, a, k: x.prod(a, keepdims=k),
    "ReduceSum": lambda x, a, k: x.sum(a, keepdims=k),
    "ReduceSumSquare": lambda x, a, k: (x * x).sum(a, keepdims=k),
}


def axes_as_attributes() -> Iterator[Case]:
    x = np.abs(X)
    for op, function in REDUCTIONS.items():
        extreme = op in ("ReduceMax", "ReduceMin")
        ranges = [(1, 10), (11, 11), (12, 12)] if extreme else [(1, 10), (11, 12)]
        for first, last in [*ranges, *([] if op == "ReduceSum" else [(13, 17)])]:
            yield case(op, first, last, (x,), function(x, None, True))
            yield case(op, first, last, (x,), function(x, (1, 3), False), axes=[3, 1], keepdims=0)
            yield case(op, first, last, (x,), function(x, (1,), True), axes=[-3])
        newer = [(13, 28)] if op == "ReduceSum" else [(18, 19), (20, 28)] if extreme else [(18, 28)]
        for first, last in [(18, 27), (28, 28)] if op.startswith("ReduceLog") else newer:
            yield case(op, first, last, (x, np.array([-1, 0])), function(x, (0, 3), True), known=(1,))
    for op, first, last in (("ArgMax", 1, 10), ("ArgMax", 11, 11), ("ArgMin", 1, 10), ("ArgMin", 11, 11)):
        tied = np.round(X)
        place = (tied.argmax if op == "ArgMax" else tied.argmin)(2)
        yield case(op, first, last, (tied,), place, axis=2, keepdims=0)
        yield case(op, first, last, (tied,), place[:, :, None], axis=-2)
    thin = X[:, :1, :1]
    for first, last in ((1, 10), (11, 12)):
        yield case("Squeeze", first, last, (thin,), thin[:, 0], axes=[1])
        yield case("Squeeze", first, last, (thin,), thin[:, 0, 0])
        yield case("Unsqueeze", first, last, (X[0, 0],), X[0, 0][None, :, :, None], axes=[3, 0])
    yield case("Squeeze", 11, 12, (thin,), thin[:, :, 0], axes=[-2])
    yield case("Unsqueeze", 11, 12, (X[0, 0],), X[0, 0][:, :, None], axes=[-1])
    for first, last in ((13, 20), (21, 22), (23, 23), (24, 24), (25, 28)):
        yield case("Unsqueeze", first, last, (X[0, 0], np.array([0, -1])), X[0, 0][None, :, :, None], known=(1,))
        yield case("Squeeze", first, last, (thin, np.array([-2])), thin[:, :, 0], known=(1,))


def indices() -> Iterator[Case]:
    x = np.round(X * 2)
    order = np.argsort(-x, axis=2, kind="stable")[:, :, :2]
    yield case("TopK", 1, 9, (x,), np.take_along_axis(x, order, 2), order, axis=2, k=2)
    for first, last in ((10, 10), (11, 23), (24, 28)):
        yield case("TopK", first, last, (x, np.array([2])), np.take_along_axis(x, order, 2), order, known=(1,), axis=2)
    order = np.argsort(x, axis=-1, kind="stable")[..., :3]
    for first, last in ((11, 23), (24, 28)):
        wanted = np.take_along_axis(x, order, -1)
        yield case("TopK", first, last, (x, np.array([3])), wanted, order, known=(1,), largest=0)
    at, depth, values = np.array([-1, 0, 2, 5, -3, -4]), np.array(3), np.array([2, 7], F)
    for first, last, places in (
        (9, 10, at),
        (11, 27, np.where(at < 0, at + 3, at)),
        (28, 28, np.where(at < 0, at + 3, at)),
    ):
        wanted = np.where(places[:, None] == np.arange(3), F(7), F(2))
        yield case("OneHot", first, last, (at, depth, values), wanted, known=(1,), by_runtime=first > 9)
    signal = drawn(2, 6, 4, 1)
    for axis in (1, 2, -2):
        spectrum = np.fft.fft(signal[..., 0], axis=axis if axis >= 0 else axis + 1)
        wanted = np.stack([spectrum.real, spectrum.imag], -1).astype(F)
        yield case("DFT", 17, 19, (signal,), wanted, **({} if axis == 1 else {"axis": axis}))
        last = (signal,) if axis == -2 else (signal, None, np.array(axis))
        yield case("DFT", 20, 28, last, wanted, known=(2,))


def dropouts() -> Iterator[Case]:
    ones = np.ones_like(X)
    yield case("Dropout", 1, 5, (X,), X, ones, is_test=1)
    yield case("Dropout", 6, 6, (X,), X, ones, is_test=1, ratio=0.9)
    yield case("Dropout", 7, 9, (X,), X, ones, by_runtime=False)  # which gives a mask of zeros
    yield case("Dropout", 10, 11, (X,), X, ones > 0, by_runtime=False)


CASES = [
    each
    for family in (
        binary,
        variadic,
        pointwise,
        flattened,
        products,
        normalizations,
        windows,
        resizing,
        shapes,
        dropouts,
    )
    for each in family()
]


def beside() -> Iterator[Case]:
    """What node tests, which hold these versions, do not ask: integers, and infinities at the edges of a definition."""
    rng = np.random.default_rng(0)
    for kind in (np.int32, np.uint32, np.int64):
        most = np.iinfo(kind).max
        a, b, c = (rng.integers(0, most, shape, kind) - kind(most // 2) for shape in ((2, 3, 4), (4, 5), (4,)))
        for first, last in ((9, 12), (13, 28)):
            yield case("MatMul", first, last, (a, b), a @ b)
            yield case("MatMul", first, last, (a, c), a @ c)
            yield case("MatMul", first, last, (c, b), c @ b)
            yield case("MatMul", first, last, (c, c), c @ c)
        for first, last in ((9, 10), (11, 12), (13, 28)):
            wanted = (a[0] @ b) * kind(3) + b[0] * kind(2)
            yield case("Gemm", first, last, (a[0], b, b[0]), wanted, alpha=3.0, beta=2.0, by_runtime=False)
            if first >= 11:  # where there need be nothing that beta is a factor of
                yield case("Gemm", first, last, (a[0], b), a[0] @ b, beta=0.5, by_runtime=False)
    codes = np.array([-50, 0, 7, 130, 5000], np.int32)
    steps = np.array([0, 3, 6, 55, 255], np.uint8)  # 130 / 2.5 + 3; 7 / 2.5 = 2.8
    for first, last in ((10, 12), (13, 18), (19, 20), (21, 22), (23, 23), (24, 24), (25, 27), (28, 28)):
        yield case("QuantizeLinear", first, last, (codes, F(2.5), np.uint8(3)), steps, by_runtime=False)
        if first >= 19:  # scales of f16, which does not hold the values
            inputs = np.array([-90000, 70000, 100000], np.int32), np.float16(1000), np.int8(0)
            yield case("QuantizeLinear", first, last, inputs, np.array([-90, 70, 100], np.int8), by_runtime=False)
    edges = np.array([-np.inf, np.inf, -2, -0.25, 0, 2], F)
    yield case("Shrink", 9, 28, (edges,), np.array([-np.inf, np.inf, -1.75, 0, 0, 1.75], F), bias=0.25)
    whole = np.arange(-4, 5, dtype=np.int32)
    yield case("Shrink", 9, 28, (whole,), np.array([-3, -2, -1, 0, 0, 0, 1, 2, 3], np.int32), bias=1.0, lambd=1.0)
    for first, last in ((10, 21), (22, 28)):
        wanted = np.array([0, np.inf, 0, -0.25, 0, 2], F)
        yield case("ThresholdedRelu", first, last, (edges,), wanted, alpha=-1.0)
    for first, last in ((9, 15), (16, 28)):
        yield case("PRelu", first, last, (edges, F(-0.5)), np.array([np.inf, np.inf, 1, 0.125, 0, 2], F))
        yield case("PRelu", first, last, (whole, np.int32(2)), np.where(whole < 0, whole * 2, whole))


BESIDE = list(beside())
"""Cases of versions that node tests hold, too."""


# -- what is refused ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A node that is refused.

    :param said: a part of the error's text.
    """

    case: Case
    said: str

    def __str__(self) -> str:
        return str(self.case)


def refused(said: str, op: str, opset: int, inputs: Sequence[Any], outputs: int = 1, **more: Any) -> Refusal:
    return Refusal(case(op, opset, opset, inputs, *[np.zeros(1, F)] * outputs, **more), said)


NINE = [drawn(3)] * 4
REFUSALS = [
    *(refused("two shapes, and no broadcast", op, v, (X, X[0])) for op in ("Add", "Div") for v in (1, 6)),
    refused("does not fit", "Add", 6, (X, X[0, :, 0]), broadcast=1, axis=0),
    refused("does not fit", "Mul", 6, (X[0, 0], X), broadcast=1),
    refused("axis 4 of a tensor of 4 axes", "Sub", 6, (X, X[0, 0, 0]), broadcast=1, axis=4),
    *(refused("before opset 8 of one shape", op, v, (X, X[0])) for op in ("Max", "Sum", "Mean") for v in (1, 6)),
    refused("no broadcast=1", "Gemm", 6, (drawn(3, 4), drawn(4, 5), drawn(5))),
    refused("no element type", "Cast", 1, (X,), to="QUARTER"),
    refused("the precision f16", "QuantizeLinear", 23, (X, F(0.1), np.uint8(3)), precision=10),
    refused("slopes", "PRelu", 6, (X, drawn(4))),
    refused("slopes", "PRelu", 7, (X[0], X)),
    *(refused(f"opset {v} in training mode", "BatchNormalization", v, (X, *NINE)) for v in (6,)),
    refused("opset 1 in training mode", "BatchNormalization", 1, (X, *NINE), consumed_inputs=[0] * 5),
    *(refused(f"opset {v} in training mode", "BatchNormalization", v, (X, *NINE), outputs=5) for v in (7, 9)),
    refused("for each place", "BatchNormalization", 7, (X, *NINE), spatial=0),
    refused("Split of opset 1 without an axis", "Split", 1, (X,), outputs=2),
    refused("equal parts", "Split", 13, (X,), outputs=3, axis=-1),
    refused("neither sizes nor num_outputs", "Split", 18, (X,), outputs=2),
    refused("without a shape", "Reshape", 1, (X,)),
    refused("without a kernel_shape", "LpPool", 1, (X,)),
    refused("a scale is 1 or more", "Upsample", 7, (X,), scales=[1.0, 1.0, 0.5, 1.0]),
    refused("an image of 4 axes", "Upsample", 1, (X[0],), height_scale=2.0, width_scale=2.0),
    refused("the mode 'cubic'", "Resize", 10, (X, np.ones(4, F)), known=(1,), mode="cubic"),
    refused("the mode 'bilinear'", "Resize", 11, (X, np.array([], F), np.ones(4, F)), known=(1, 2), mode="bilinear"),
    refused("scales", "Resize", 10, (X, np.ones(3, F)), known=(1,)),
    refused("the mode 'wrapped'", "Pad", 2, (X,), pads=[0] * 8, mode="wrapped"),
    refused("widths", "Pad", 2, (X,), pads=[0] * 6),
    refused(
        "the direction 'sideways'",
        "RNN",
        7,
        (X[0], drawn(1, 2, 5), drawn(1, 2, 2)),
        hidden_size=2,
        direction="sideways",
    ),
    *(
        refused("of a tensor of 4 axes", op, v, (X,), axis=4)
        for op, v in (
            ("Softmax", 1),
            ("Hardmax", 11),
            ("LogSoftmax", 13),
            ("Concat", 4),
            ("ArgMax", 1),
            ("LpNormalization", 1),
        )
    ),
    *(refused("of a tensor of 4 axes", op, 1, (X,), axes=[-5]) for op in ("ReduceSum", "Squeeze", "ReduceMax")),
    refused("one is there twice", "Squeeze", 11, (X[:, :1],), axes=[1, -3]),
    refused("one is there twice", "Unsqueeze", 11, (X,), axes=[0, -6]),
    refused("one is there twice", "ReduceSum", 11, (X,), axes=[0, -4]),
    refused("not all of one element", "Squeeze", 1, (X,), axes=[0]),
    refused("of a tensor of 1 axes", "Softmax", 11, (drawn(3),)),
    refused("of a tensor of 4 axes", "Gather", 1, (X, np.array([0])), axis=-5),
    refused("of a tensor of 4 axes", "TopK", 1, (X,), outputs=2, axis=4, k=1),
    refused("of a tensor of 4 axes", "Flatten", 9, (X,), axis=5),
    refused("the auto_pad 'SAME'", "Conv", 1, (X, drawn(2, 3, 2, 2)), auto_pad="SAME"),
    refused("the auto_pad 'SAME'", "AveragePool", 7, (X,), auto_pad="SAME", kernel_shape=[2, 2]),
    refused("the auto_pad 'SAME'", "ConvTranspose", 11, (X, drawn(3, 2, 2, 2)), auto_pad="SAME"),
    refused("the mode 'RCD'", "DepthToSpace", 11, (drawn(1, 4, 2, 2),), blocksize=2, mode="RCD"),
    refused("the mode 'RCD'", "SpaceToDepth", 28, (X[:, :, :, :4],), blocksize=2, mode="RCD"),
    refused("the mode 'trilinear'", "GridSample", 16, (X, drawn(2, 2, 2, 2)), mode="trilinear"),
    refused("the padding_mode 'edge'", "GridSample", 20, (X, drawn(2, 2, 2, 2)), padding_mode="edge"),
    refused("the direction 'UP'", "BitShift", 11, (np.uint8([1]), np.uint8([1])), direction="UP"),
    refused(
        "the reduction 'sub'",
        "ScatterElements",
        16,
        (X, np.zeros((1, 1, 1, 1), int), X[:1, :1, :1, :1]),
        reduction="sub",
    ),
    refused("the reduction 'sub'", "ScatterND", 16, (X, np.zeros((1, 1), int), X[:1]), reduction="sub"),
    refused(
        "the nearest_mode 'round'",
        "Resize",
        11,
        (X, np.array([], F), np.array([1, 1, 2, 2], F)),
        known=(1, 2),
        nearest_mode="round",
    ),
    refused(
        "the keep_aspect_ratio_policy 'wider'",
        "Resize",
        18,
        (X, None, None, np.array([2, 3, 8, 9])),
        known=(3,),
        keep_aspect_ratio_policy="wider",
    ),
    refused("the mode 'min'", "RoiAlign", 10, (X, drawn(1, 4), np.array([0])), mode="min", sampling_ratio=2),
    refused("the last", "DFT", 17, (X[..., :1],), axis=-1),
    refused("the last", "DFT", 20, (X[..., :1], None, np.array(3)), known=(2,)),
    refused("element 3 of an axis of 3", "Compress", 9, (X, np.ones(4, bool)), known=(1,), axis=1),
    refused("its result 'y1'", "BatchNormalization", 14, (X, *NINE), outputs=3),
    refused(
        "the coordinate_transformation_mode 'half'",
        "Resize",
        11,
        (X, np.array([], F), np.array([1, 1, 2, 2], F)),
        known=(1, 2),
        coordinate_transformation_mode="half",
    ),
    refused("the reduction 'avg'", "NegativeLogLikelihoodLoss", 13, (drawn(4, 3), np.arange(4) % 3), reduction="avg"),
    refused("the approximate 'erf'", "Gelu", 20, (X,), approximate="erf"),
    refused("the round_mode 'half'", "Cast", 24, (X,), to=24, round_mode="half"),
    refused("inner sizes differ", "MatMul", 13, (np.ones((2, 1), int), np.ones((5, 3), int))),
    refused("inner sizes differ", "Gemm", 13, (np.ones((2, 5), int), np.ones((1, 3), int))),
    refused("a scalar is no matrix", "MatMul", 9, (np.array(2), np.ones((5, 3), int))),
    refused("repeats", "Tile", 6, (X, np.array([2, 2])), known=(1,)),
]
"""None of them may be read as something else."""

DEPRECATED = {("GroupNormalization", 18), ("Scatter", 11), ("Upsample", 10)}
"""What the checker of ONNX refuses."""
NOT_TAKEN = {"ImageDecoder", "MaxRoiPool", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"}
"""Operators without a line."""
