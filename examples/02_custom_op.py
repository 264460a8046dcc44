"""Two ops of your own, in one record each, outside the package: and every pass knows what to do with them.

The first: ``shift(x, by, axis)`` moves a signal along an axis and fills with zeros.  Its record says its type, its
meaning in NumPy, how a kernel reads it, its derivative, and that it is linear: which axes of the operand become which
axes of the result.  That last line is all that sink_dequant needs to move a quantization scale through an op it has
never seen.

The second: ``pick(places, table)`` reads rows of a table.  Its record says that it gathers, which operand by which: so
rows of a quantized table are read as int8 and become floats then, as those of ``ops.embedding`` are.

    python examples/02_custom_op.py
"""

import numpy as np

import gradc
from gradc import ops
from gradc.errors import TypeRuleError
from gradc.ir.op import DISCRETE, BadSample, Movement, Primitive, Sample
from gradc.ir.properties import Gathers
from gradc.ir.statement import Index
from gradc.ir.types import Type


def shift_type(x: Type, *, by: int, axis: int = 0):
    if not -x.rank <= axis < x.rank:
        raise TypeRuleError(f"axis={axis} of a rank {x.rank} operand")
    return x, {"by": by, "axis": axis % x.rank}


def shift_in_numpy(x, *, by, axis):
    size = x.shape[axis]
    places = np.arange(size) - by
    inside = (places >= 0) & (places < size)
    moved = np.take(x, np.clip(places, 0, max(size - 1, 0)), axis)
    return np.where(inside.reshape([-1 if a == axis else 1 for a in range(x.ndim)]), moved, np.zeros((), x.dtype))


def shift_in_a_kernel(index, node, kernel):
    """Where the result's element at ``index`` is read: data is never copied to move it."""
    (x,), axis = node.operands, node.attrs["axis"]
    place = index[axis] + -node.attrs["by"]
    return kernel.read(
        x, [*index[:axis], place, *index[axis + 1 :]], where=kernel.in_bounds(place, 0, x.shape[axis]), other=0
    )


shift = Primitive(
    "shift",
    infer=shift_type,
    reference=shift_in_numpy,
    lower=Movement(shift_in_a_kernel),
    vjp=lambda g, y, x, *, by, axis: (shift(g, by=-by, axis=axis),),
    multilinear=lambda node: {
        0: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank))
    },  # the shifted axis is mixed
    in_place_of_dtype=True,
    samples=(Sample(("F[N,4]",), {"by": 1}), Sample(("F[3,N]",), {"by": -2, "axis": 1})),
    bad=(BadSample(("f32[3]",), {"by": 1, "axis": 1}, match="axis=1 of a rank 1 operand"),),
    doc="x moved by some places along an axis, zeros moving in",
)


def model(q, scale, w):
    signal = ops.dequantize(q, scale, block=(1, q.shape[1]))
    return (shift(signal, by=1, axis=1) * w).sum(axis=1)


graph = gradc.trace(model, q="i8[N,D]", scale="f32[N,1]", w="f32[D]")
print("the graph; the op prints, parses and runs like any other:\n")
print(graph)
assert gradc.parse(str(graph)) == graph

module = gradc.compile(graph, wrt=["scale", "w"], target="cpu")
forward = gradc.compile(graph, target="cpu")  # without gradients, to keep the picture small
print("\nbefore sink_dequant the scale multiplies N x D numbers:\n")
print(forward.stages["fold"])
print("\nafter it the scale has passed the shift and the sum, and multiplies N:\n")
print(forward.stages["tidy.fold"])


def multiplied(stage):
    """Where the scale is applied: the type of each product that reads nothing but it and one other value."""
    graph = stage.result
    holds = {graph.input("scale")}
    for node in graph.nodes:
        if len(node.operands) == 1 and node.operands[0] in holds:
            holds.add(node)
    return [str(n.type) for n in graph.nodes if len(n.operands) == 2 and any(o in holds for o in n.operands)]


before, after = multiplied(forward.stages["fold"]), multiplied(forward.stages["tidy.fold"])
print(f"\nthe scale is applied to: {', '.join(before)} before, {', '.join(after)} after")
assert before == ["f32[N,D]"] and after == ["f32[N]"]

print("\nits C: the shift is an index, nothing is moved:\n")
print(next(k for name, k in forward.kernels.items() if "sum" in name).source)

rng = np.random.default_rng(0)
q, scale, w = (
    rng.integers(-127, 128, (1000, 64)).astype("i1"),
    rng.uniform(0.01, 0.02, (1000, 1)).astype("f4"),
    rng.standard_normal(64).astype("f4"),
)
y, residuals = module.forward(q=q, scale=scale, w=w)
dy = rng.standard_normal(1000).astype("f4")
grads = module.backward(residuals, dy)
wide = shift_in_numpy(q.astype("f8"), by=1, axis=1)
for name, got, want in (
    ("y", y, (wide * scale * w).sum(1)),
    ("d.scale", grads["scale"], (dy * (wide * w).sum(1))[:, None]),
    ("d.w", grads["w"], (dy[:, None] * wide * scale).sum(0)),
):
    error = np.max(np.abs(got - want)) / np.max(np.abs(want))
    print(f"{name:<8} worst relative error against NumPy: {error:.1e}")
    assert error < 1e-5

report = gradc.check(module, dims={"N": 4, "D": 6})
print()
print(report)
assert report.ok


def pick_type(places: Type, table: Type):
    return table.with_shape(places.shape[0], *table.shape[1:])


def pick_in_a_kernel(index, node, kernel):
    places, table = node.operands
    row = Index.of(kernel.read(places, index[:1]))
    return kernel.read(table, [row, *index[1:]], where=kernel.in_bounds(row, 0, table.shape[0]), other=0)


def pick_in_numpy(places, table):
    inside = (places >= 0) & (places < len(table))
    rows = np.concatenate([table, np.zeros_like(table[:1], shape=(1, *table.shape[1:]))])
    return rows[np.where(inside, places, len(table))]


pick = Primitive(
    "pick",
    infer=pick_type,
    reference=pick_in_numpy,
    lower=Movement(pick_in_a_kernel),
    vjp=lambda g, y, places, table: (DISCRETE, ops.scatter_add(places, g, size=table.shape[0], oob="skip")),
    indices={0: lambda node: node.operands[1].shape[0]},
    access=lambda node: Gathers(table=1, indices=0, axis=0, oob="skip"),
    in_place_of_dtype=True,
    samples=(Sample(("i64[N]", "F[5,3]"), draw=("index:5", "normal")),),
    doc="rows of a table; zeros for places outside",
)

graph = gradc.trace(
    lambda places, q, scale: pick(places, ops.dequantize(q, scale, block=(1, 8))),
    places="i64[N]",
    q="i8[V,8]",
    scale="f32[V,1]",
)
module = gradc.compile(graph, wrt="scale", target="cpu")
pushed = module.stages["push_gathers"].result
print("\na gather of one's own, before push_gathers and after it: the table is read where it is picked, as int8:\n")
print(graph)
print()
print(pushed)
rows_read = [str(n.operands[0].type) for n in pushed.nodes if n.op is ops.gather]
assert sorted(rows_read) == ["f32[V,1]", "i8[V,8]"] and not any(n.op is pick for n in pushed.nodes)

places, q, scale = np.array([4, 0, 4, 7]), q[:5, :8], scale[:5]
y, residuals = module.forward(places=places, q=q, scale=scale)
assert np.array_equal(y, pick_in_numpy(places, q * scale))
dy = rng.standard_normal((4, 8)).astype("f4")
by_hand = np.zeros((5, 1))
np.add.at(by_hand, [4, 0, 4], (dy[:3] * q[[4, 0, 4]]).sum(1)[:, None])
assert np.allclose(module.backward(residuals, dy)["scale"], by_hand, rtol=1e-5)
with gradc.knobs.VALIDATE.set(True):  # is it what its record says?
    gradc.compile(graph, target="cpu")
report = gradc.check(module, dims={"N": 4, "V": 5})
print()
print(report)
assert report.ok
