"""gradc.plans: every plan against torch or the formula of its gradient, and every error that a call can have."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import errors, ops, plans
from gradc.errors import InvalidProblem, NotDifferentiable, TypeRuleError, Unsupported
from gradc.ir.types import DTYPES

f32 = np.float32
rng = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = f32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def close(found: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = np.asarray(want, np.float64)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max(initial=0.0)))
    )


def added(indices: np.ndarray, dy: np.ndarray, rows: int, padding: int | None = None) -> np.ndarray:
    """The gradient of a table, in f64; what is out of range is skipped."""
    total = np.zeros((rows, dy.shape[-1]))
    for at, row in zip(indices.reshape(-1), dy.reshape(-1, dy.shape[-1]).astype(np.float64), strict=True):
        if 0 <= at < rows and at != padding:
            total[at] += row
    return total


# -- what each gives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("index_dtype", ["i64", "i32", "u8"])
def test_embedding_backward(dtype: str, index_dtype: str) -> None:
    plan = plans.embedding_backward(dtype=dtype, index_dtype=index_dtype, padding_idx=1)
    kind = DTYPES[dtype].np
    for n, d, v in ((30, 8, 7), (0, 3, 4), (1, 1, 2), (400, 5, 3)):
        indices, dy = rng.integers(0, v + 3, n).astype(DTYPES[index_dtype].np), normal(n, d, dtype=kind)
        found = plan.run(indices=indices, dy=dy, dims={"V": v})
        assert list(found) == ["weight"] and found["weight"].dtype == kind
        close(found["weight"], added(indices, dy, v, padding=1), {"bf16": 2**-8, "f16": 2**-11}.get(dtype, 1e-5))
        out = np.full((v, d), 2, kind)
        assert plan.run(indices=indices, dy=dy, out={"weight": out}, accumulate=True)["weight"] is out  # out= binds V
        close(out, added(indices, dy, v, padding=1) + 2, {"bf16": 2**-6, "f16": 2**-9}.get(dtype, 1e-5))


def test_embedding_backward_of_any_rank_into_another_dtype() -> None:
    plan = plans.embedding_backward(9, 4, rank=2, dy_dtype="bf16")
    assert str(plan.arguments["dy"]) == "bf16[N0,N1,4]" and str(plan.results["weight"]) == "f32[9,4]"
    indices, dy = rng.integers(-3, 12, (5, 6)), normal(5, 6, 4, dtype=DTYPES["bf16"].np)
    close(plan.run(indices=indices, dy=dy)["weight"], added(indices, dy, 9), 1e-6)
    one = plans.embedding_backward(rank=0).run(indices=np.asarray(2), dy=normal(4), dims={"V": 3})["weight"]
    assert one.shape == (3, 4) and not one[:2].any()
    counted = plans.embedding_backward(3, scale_grad_by_freq=True).run(
        indices=np.array([0, 0, 2]), dy=np.ones((3, 2), f32)
    )["weight"]
    np.testing.assert_array_equal(counted, [[1, 1], [0, 0], [1, 1]])


def test_out_of_range_is_skipped_unless_asked() -> None:
    dy = np.ones((3, 2), f32)
    bad = np.array([0, 5, -1])
    np.testing.assert_array_equal(plans.embedding_backward(2).run(indices=bad, dy=dy)["weight"], [[1, 1], [0, 0]])
    np.testing.assert_array_equal(
        plans.index_add().run(input=np.zeros((2, 2), f32), index=bad, source=dy)["y"], [[1, 1], [0, 0]]
    )
    with pytest.raises(errors.IndexOutOfRange, match="index 5 at position 1 of 'indices'"):
        plans.embedding_backward(2, oob="error").run(indices=bad, dy=dy)
    for op, plan in (
        ("embedding", plans.embedding_backward),
        ("embedding_bag", plans.embedding_bag_backward),
        ("index_add", plans.index_add),
    ):
        assert inspect.signature(plan).parameters["oob"].default == "skip"
        assert (
            '"skip"' in str(plan.__doc__)
            and '"error"' in str(plan.__doc__)
            and "'skip' in gradc.plans" in ops.REGISTRY[op].doc
        )


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_embedding_bag_backward(mode: str, weighted: bool) -> None:
    """What the same op gives inside a module, whose gradients are held against torch elsewhere."""
    if mode == "max" and weighted:
        with pytest.raises(TypeRuleError, match="no meaning with mode='max'"):
            plans.embedding_bag_backward(mode="max", per_sample_weights=True)
        return
    offsets, indices, table, dy = np.array([0, 2, 2, 7]), rng.integers(0, 6, 9), normal(6, 3), normal(4, 3)
    operands: dict[str, Any] = {"indices": indices, "weight": table, "offsets": offsets} | (
        {"per_sample_weights": rng.uniform(0.5, 2, 9).astype(f32)} if weighted else {}
    )
    graph = gradc.trace(
        lambda **o: ops.embedding_bag(**o, mode=mode, padding_idx=1),
        indices="i64[N]",
        weight="f32[V,D]",
        offsets="i64[B]",
        **({"per_sample_weights": "f32[N]"} if weighted else {}),
    )
    wrt = ["weight", *(["per_sample_weights"] if weighted else [])]
    module = gradc.compile(graph, wrt=wrt)
    _, residuals = module.forward(**operands)
    want = module.backward(residuals, dy)
    plan = plans.embedding_bag_backward(mode=mode, padding_idx=1, per_sample_weights=weighted)
    assert list(plan.results) == wrt
    found = plan.run({n: a for n, a in operands.items() if n in plan.arguments}, dy=dy, dims={"V": 6})
    for name in wrt:
        close(found[name], want[name])
    rows = plans.embedding_bag_backward(mode=mode, rank=2)
    square = rows.run(
        {k: v for k, v in {"indices": indices[:8].reshape(4, 2), "weight": table}.items() if k in rows.arguments},
        dy=dy,
        dims={"V": 6},
    )["weight"]
    assert square.shape == (6, 3)


GRANULARITIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tensor": (plans.per_tensor(), (1, 1)),
    "channel 0": (plans.per_channel(0), (4, 1)),
    "channel -1": (plans.per_channel(-1), (1, 10)),
    "token": (plans.per_token(), (4, 1)),
    "group": (plans.per_group(4), (4, 3)),
    "blocks": ((3, 4), (2, 3)),
    "scalar": (None, ()),
}


def spread(parameter: np.ndarray, block: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter repeated over its blocks, in f64."""
    wide = parameter.astype(np.float64)
    if not wide.ndim:
        return np.broadcast_to(wide, shape)
    for axis, (b, n) in enumerate(zip(block, shape, strict=True)):
        wide = np.repeat(wide, n if b is None else b, axis).take(range(n), axis)
    return wide


def total(values: np.ndarray, parameter: np.ndarray, block: Any) -> np.ndarray:
    """The sum over each block."""
    if not parameter.ndim:
        return np.asarray(values.sum())
    for axis, (b, n) in enumerate(zip(block, values.shape, strict=True)):
        values = np.add.reduceat(values, range(0, n, n if b is None else b), axis)
    return values


@pytest.mark.parametrize("name", GRANULARITIES)
@pytest.mark.parametrize("zero", [None, "i8", "f32"])
def test_quantization_backward_by_the_table(name: str, zero: str | None) -> None:
    """Section 2 of the semantics, written out in NumPy."""
    block, counts = GRANULARITIES[name]
    shape = (4, 10)
    scale = rng.uniform(0.5, 1.5, counts).astype(f32)
    more = {} if zero is None else {"zero_point": rng.integers(-3, 4, counts).astype(DTYPES[zero].np)}
    s, zp = spread(scale, block, shape), spread(more.get("zero_point", np.zeros(counts)), block, shape)
    dy = normal(*shape)
    d = dy.astype(np.float64)

    q = rng.integers(-100, 100, shape).astype(np.int8)
    found = plans.dequantize_backward(block=block, zero_point_dtype=zero).run(q=q, scale=scale, dy=dy, **more)
    close(found["q"], s * d)
    close(found["scale"], total(d * (q - zp), scale, block))
    assert ("zero_point" in found) == (zero is not None)
    if zero is not None:
        close(found["zero_point"], total(-s * d, scale, block))

    x = (100 * normal(*shape)).astype(f32)
    for plan, fake in ((plans.quantize_backward, False), (plans.fake_quantize_backward, True)):
        found = plan(block=block, zero_point_dtype=zero, quant_min=-100).run(x=x, scale=scale, dy=dy, **more)
        ratio = x.astype(np.float64) / s
        integer = np.round((x / s.astype(f32)).astype(f32)) + zp
        m = (integer >= -100) & (integer <= 127)
        level = np.clip(integer, -100, 127)
        close(found["x"], d * m if fake else d * m / s)
        close(found["scale"], total(d * ((level - zp) - m * ratio) if fake else -d * m * ratio / s, scale, block), 2e-5)
        if zero is not None:
            close(found["zero_point"], total(-s * d * ~m if fake else d * m, scale, block))


def test_options_of_quantization_plans() -> None:
    plan = plans.dequantize_backward(
        block=plans.per_group(2, rank=3),
        shape=(2, "N", 4),
        q_dtype="u4",
        scale_dtype="bf16",
        out_dtype="bf16",
        wrt="scale",
    )
    assert (
        str(plan.results["scale"]) == "bf16[2,N,2]"
        and str(plan.arguments["dy"]) == "bf16[2,N,4]"
        and list(plan.results) == ["scale"]
    )
    x, s = np.array([[0.4, 9.0]], f32), np.asarray(1, f32)
    half = plans.fake_quantize_backward(dtype="i4", grad_factor=0.5).run(x=x, scale=s, dy=np.ones((1, 2), f32))
    np.testing.assert_allclose(half["scale"], 0.5 * (-0.4 + 7), rtol=1e-6)
    assert str(plans.quantize_backward(x_dtype="f64", dy_dtype="f64", scale_dtype="f64").results["scale"]) == "f64[]"


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_grid_sample_backward(rank: int, mode: str, padding_mode: str) -> None:
    torch = pytest.importorskip("torch")
    sizes, out = (3, 4, 5)[5 - rank :], (2, 3, 2)[5 - rank :]
    image, grid = normal(2, 3, *sizes), rng.uniform(-1.3, 1.3, (2, *out, rank - 2)).astype(f32)
    a, b = (torch.from_numpy(x).double().requires_grad_() for x in (image, grid))
    y = torch.nn.functional.grid_sample(a, b, mode=mode, padding_mode=padding_mode, align_corners=True)
    dy = normal(*y.shape)
    want = dict(zip(("input", "grid"), torch.autograd.grad(y, [a, b], torch.from_numpy(dy).double()), strict=True))
    options: dict[str, Any] = {"rank": rank, "mode": mode, "padding_mode": padding_mode, "align_corners": True}
    spatial = dict(zip("DHW"[5 - rank :], sizes, strict=True))
    for wrt in (("input", "grid"), ("grid",), ("input",)) if padding_mode == "border" else (("input", "grid"),):
        plan = plans.grid_sample_backward(**options, wrt=wrt)
        given = {k: v for k, v in {"input": image, "grid": grid, "dy": dy}.items() if k in plan.arguments}
        found = plan.run(given, dims=spatial if "input" in wrt else None)
        assert tuple(found) == wrt
        for name in wrt:
            close(found[name], want[name].numpy(), 2e-5)


def test_index_add_forward_and_backward() -> None:
    x, index, source, dy = normal(2, 5, 3), np.array([1, 4, 1, 9]), normal(2, 4, 3), normal(2, 5, 3)
    y = plans.index_add(rank=3, dim=1, alpha=2.0).run(input=x, index=index, source=source)["y"]
    want = x.astype(np.float64)
    for k, at in enumerate(index):
        if at < 5:
            want[:, at] += 2.0 * source[:, k]
    close(y, want)
    plan = plans.index_add_backward(rank=3, dim=-2, alpha=2.0)
    found = plan.run(index=index, dy=dy)
    np.testing.assert_array_equal(found["input"], dy)
    np.testing.assert_array_equal(
        found["source"], 2 * np.concatenate([dy[:, index[:3]], np.zeros((2, 1, 3), f32)], axis=1)
    )
    assert list(plans.index_add_backward(wrt="source").results) == ["source"]


def test_the_kind_that_went_in() -> None:
    torch = pytest.importorskip("torch")
    found = plans.embedding_backward(4, dtype="bf16").run(
        indices=torch.tensor([1, 1]), dy=torch.ones(2, 3, dtype=torch.bfloat16)
    )
    assert (
        isinstance(found["weight"], torch.Tensor)
        and found["weight"].dtype == torch.bfloat16
        and found["weight"][1, 0] == 2
    )


# -- what it is --------------------------------------------------------------------------------------------------------


def test_plans_are_kept_by_descriptor() -> None:
    first = plans.embedding_backward(D=8, padding_idx=1)
    assert plans.embedding_backward(D=8, padding_idx=1, dtype=np.float32, oob="skip", index_dtype="i64") is first
    assert gradc.plans is plans and "plans" in dir(gradc)
    others = [
        plans.embedding_backward(D=8),
        plans.embedding_backward(D=8, padding_idx=0),
        plans.embedding_backward(D=9, padding_idx=1),
        plans.embedding_backward(D=8, padding_idx=1, target="numpy"),
    ]
    assert len({id(p) for p in (first, *others)}) == 5
    fresh = plans.embedding_backward(D=8, padding_idx=3)
    assert (
        fresh._module is None and fresh.arguments["dy"].shape[1] == 8 and fresh._module is None
    )  # looking compiles nothing
    assert fresh.precision.accumulator == ("f32",) and fresh._module is not None


def test_every_plan_can_be_looked_at() -> None:
    for name in plans.TABLE:
        make = getattr(plans, name)
        plan = make()
        assert name in repr(plan) and make.__name__ == name and str(plan.graph).startswith(f"graph @{name}")
        assert gradc.parse(str(plan.graph)) == plan.graph
        dims = dict.fromkeys(plan.executable.program.dims, 4)
        assert (
            plan.workspace_size(**dims) >= 0
            and plan.precision.deterministic
            and plan.precision.bit_stable
            and set(plan.precision.math) <= {"f32", "f64"}
        )
        assert plan.sku(**dims).startswith(f"{name}.{plan.executable.target}.")
        assert plan.kernels and "kernel" in plan.source and plan.explain()
        assert plan.executable.inputs == plan.arguments and plan.executable.outputs == plan.results
        assert inspect.signature(make).parameters["target"].default is None and make.__doc__
        for option, parameter in ops.REGISTRY[
            plans.TABLE[name].op
        ].parameters.items():  # the op's options, under their names
            mine = inspect.signature(make).parameters[option]
            assert mine.default == plans.TABLE[name].options.get(option, parameter.default)
    skus = [
        p.sku(V=5)
        for p in (
            plans.embedding_bag_backward(),
            plans.embedding_bag_backward(mode="max"),
            plans.embedding_bag_backward(D=4),
            plans.embedding_bag_backward(dtype="bf16"),
        )
    ]
    assert len(set(skus)) == 4 and "mode_max" in skus[1] and skus[2].endswith("D4.V5")


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        plans.embedding_backward,
        {"colour": 1},
        InvalidProblem,
        "has no 'colour'; it has the sizes D, N, V and dtype, index_dtype",
    ),
    (plans.embedding_backward, {"colour": None}, InvalidProblem, "has no 'colour'"),
    (plans.embedding_backward, {"V": -1}, InvalidProblem, "V=-1 is no size"),
    (plans.embedding_backward, {"V": 2.5}, InvalidProblem, "V=2.5 is no size"),
    (plans.embedding_backward, {"rank": -1}, InvalidProblem, "rank=-1"),
    (plans.embedding_backward, {"wrt": "indices"}, NotDifferentiable, "indices"),
    (
        plans.embedding_backward,
        {"wrt": "offsets"},
        InvalidProblem,
        "wrt names 'offsets'; there are gradients of weight",
    ),
    (plans.embedding_backward, {"wrt": ()}, InvalidProblem, "wrt names 'nothing'"),
    (plans.embedding_backward, {"wrt": 3}, InvalidProblem, "wrt=3: a tuple of names"),
    (plans.embedding_backward, {"padding_idx": 5, "V": 5}, TypeRuleError, "padding_idx=5 of 5 rows"),
    (plans.embedding_backward, {"oob": "ignore"}, TypeRuleError, "oob='ignore'"),
    (plans.embedding_backward, {"index_dtype": "f32"}, TypeRuleError, "indices are f32"),
    (plans.embedding_backward, {"dtype": "f7"}, TypeRuleError, "f7"),
    (plans.embedding_bag_backward, {"rank": 3}, InvalidProblem, "rank=3: 1 (with offsets) or 2"),
    (plans.dequantize_backward, {"block": (1, 2), "shape": (4,)}, InvalidProblem, "2 sizes"),
    (plans.dequantize_backward, {"block": 3}, InvalidProblem, "block=3: a tuple of sizes"),
    (plans.dequantize_backward, {"block": (0, 4)}, TypeRuleError, "a block of 0"),
    (plans.quantize_backward, {"dtype": "i64"}, TypeRuleError, "dtype=i64"),
    (plans.grid_sample_backward, {"rank": 3}, InvalidProblem, "rank=3: 4 (images) or 5 (volumes)"),
    (plans.grid_sample_backward, {"H": 0}, TypeRuleError, "size 0 on axis 2"),
    (plans.index_add, {"dim": 2}, InvalidProblem, "dim=2 of rank=2"),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"), WRONG, ids=[f"{m.__name__}-{o}" for m, o, _, _ in WRONG]
)
def test_wrong_options(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make(**options)
    assert message in str(caught.value)


def test_sizes_by_position_once() -> None:
    for call in (
        lambda: plans.embedding_backward(3, V=4),
        lambda: plans.embedding_backward(1, 2, 3),
        lambda: plans.index_add(3),
    ):
        with pytest.raises(InvalidProblem, match="by position, once"):
            call()


# -- what a call can have wrong, each found before anything runs -------------------------------------------------------


class Elsewhere:
    """An array on another device, as DLPack tells it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody asks for it")


def shifted(*shape: int) -> np.ndarray:
    """f32 one byte off its alignment."""
    return np.frombuffer(bytearray(4 * int(np.prod(shape)) + 1), np.uint8)[1:].view(f32).reshape(shape)


V, N, D = 6, 5, 4
INDICES, DY = np.array([0, 1, 1, 5, 2]), np.ones((5, 4), f32)
WHOLE = np.zeros((V + N, D), f32)
CALLS: dict[str, tuple[dict[str, Any], type[errors.GradcError], str]] = {
    "a stream": ({"stream": object()}, Unsupported, "the CPU has no streams"),
    "an argument missing": ({"dy": None}, InvalidProblem, "needs the input 'dy': f32[N,4]"),
    "one too many": ({"weight": WHOLE}, InvalidProblem, "has no input 'weight'; it has indices, dy"),
    "a dtype": (
        {"dy": DY.astype(np.float64)},
        InvalidProblem,
        "dy is f32[N,4], got an array of float64[5, 4]; convert it first",
    ),
    "an index dtype": (
        {"indices": INDICES.astype(np.int32)},
        InvalidProblem,
        "indices is i64[N], got an array of int32[5]",
    ),
    "a rank": (
        {"indices": INDICES[None]},
        InvalidProblem,
        "indices is i64[N] (rank 1), got an array of rank 2: (1, 5)",
    ),
    "a length": ({"dy": DY[:3]}, InvalidProblem, "axis 0 is 3, not 5 (N=5 from indices)"),
    "a width": ({"dy": DY[:, :2]}, InvalidProblem, "axis 1 is 2, not 4"),
    "no array": ({"dy": [1.0]}, InvalidProblem, "a builtins.list is not an array"),
    "another device": ({"dy": Elsewhere()}, errors.DeviceError, "on cuda:0 was given to a module for the CPU"),
    "out of another dtype": (
        {"out": {"weight": np.zeros((V, D))}},
        InvalidProblem,
        "out['weight'] is float64, the output is f32[6,4]",
    ),
    "out of another shape": (
        {"out": {"weight": np.zeros((D, V), f32)}},
        InvalidProblem,
        "out['weight'] has the shape (4, 6), the output f32[6,4] (6, 4)",
    ),
    "out of another name": ({"out": {"d.weight": WHOLE}}, InvalidProblem, "has no output 'd.weight'; it has weight"),
    "out too short": (
        {"out": {"weight": np.zeros((V - 1, D), f32)}},
        errors.BufferTooSmall,
        "'weight' needs 96 bytes, got 80",
    ),
    "out with strides": (
        {"out": {"weight": np.zeros((V, 2 * D), f32)[:, ::2]}},
        errors.MisalignedOperand,
        "out['weight'] is not contiguous and aligned (strides (32, 8))",
    ),
    "out misaligned": (
        {"out": {"weight": shifted(V, D)}},
        errors.MisalignedOperand,
        "out['weight'] is not contiguous and aligned",
    ),
    "out over an input": (
        {"dy": WHOLE[V:], "out": {"weight": WHOLE[V - 3 : 2 * V - 3]}},
        errors.OverlappingOperands,
        "out['weight'] shares memory with the input dy",
    ),
    "accumulate over an input": (
        {"dy": WHOLE[V:], "out": {"weight": WHOLE[V - 3 : 2 * V - 3]}, "accumulate": True},
        errors.OverlappingOperands,
        "shares memory with the input dy",
    ),
    "out read-only": (
        {"out": {"weight": np.frombuffer(bytes(96), f32).reshape(V, D)}},
        InvalidProblem,
        "out['weight'] is read-only",
    ),
    "accumulate without out": ({"accumulate": True}, InvalidProblem, "accumulate=True adds to the arrays of out="),
    "accumulate a stranger": (
        {"accumulate": [["weight"]], "out": {"weight": WHOLE[:V]}},
        InvalidProblem,
        "accumulate names \"['weight']\"",
    ),
    "a size": ({"dims": {"N": -2}}, InvalidProblem, "dims: N=-2 is no size"),
    "sizes that differ": ({"dims": {"N": 4}}, InvalidProblem, "axis 0 is 5, not 4 (N=4 from dims=)"),
    "workspace too small": ({"workspace": np.empty(16, np.uint8)}, errors.WorkspaceTooSmall, "workspace needs"),
    "workspace misaligned": (
        {"workspace": np.empty(1 << 16, np.uint8)[1:]},
        errors.MisalignedOperand,
        "the workspace is not contiguous",
    ),
    "workspace with strides": (
        {"workspace": np.empty(1 << 17, np.uint8)[::2]},
        errors.MisalignedOperand,
        "the workspace is not contiguous",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_error_by_its_name(name: str) -> None:
    plan = plans.embedding_backward(V, D)
    changes, error, message = CALLS[name]
    call = {"indices": INDICES, "dy": DY, **changes}
    call = {k: v for k, v in call.items() if not (k == "dy" and v is None)}
    before = WHOLE.copy()
    found = plan.can_implement(**call)
    assert type(found) is error and message in str(found)
    with pytest.raises(error) as caught:
        plan.run(**call)
    assert type(caught.value) is error and str(caught.value) == str(found)  # what can_implement says is what run raises
    np.testing.assert_array_equal(WHOLE, before)
    if isinstance(found, errors.WorkspaceTooSmall):
        assert (found.needed, found.got) == (plan.workspace_size(N=N), 16)
    if isinstance(found, errors.BufferTooSmall):
        assert (found.needed, found.got) == (96, 80)
    np.testing.assert_array_equal(plan.run(indices=INDICES, dy=DY)["weight"].sum(), N * D)  # usable after


def test_can_implement_what_is_right() -> None:
    plan = plans.embedding_backward(V, D)
    strided = np.asfortranarray(DY)
    room = np.empty(plan.workspace_size(N=N) + 64, np.uint8)
    start = -room.ctypes.data % 64
    for call in (
        {},
        {"dy": strided},
        {"dy": shifted(N, D)},
        {"out": {"weight": np.zeros((V, D), f32)}, "accumulate": "weight"},
        {"workspace": room[start:]},
    ):
        call = {"indices": INDICES, "dy": DY, **call}
        assert plan.can_implement(**call) is None
        plan.run(**call)
    out = np.full((V, D), 7, f32)
    assert plan.can_implement(indices=INDICES, dy=DY, out={"weight": out}) is None and (out == 7).all()  # nothing ran
    loose = plans.embedding_backward(padding_idx=9)
    assert "nothing binds the dim V" in str(loose.can_implement(indices=INDICES, dy=DY))
    assert "assume(V >= 10)" in str(loose.can_implement(indices=INDICES, dy=DY, dims={"V": 9}))
    assert loose.can_implement(indices=INDICES, dy=DY, dims={"V": 10}) is None
    overlap = loose.can_implement(
        indices=INDICES,
        dy=DY,
        dims={"V": 10},
        out={"weight": (whole := np.zeros((30, 4), f32))[:10]},
        workspace=whole[:, :].view(np.uint8),
    )
    assert isinstance(overlap, errors.GradcError)


def test_what_there_is_no_target_for() -> None:
    plan = plans.embedding_backward(target="tpu")
    found = plan.can_implement(indices=INDICES, dy=DY)
    assert isinstance(found, Unsupported) and "the target 'tpu'" in str(found)
    with pytest.raises(Unsupported, match="the target 'tpu'"):
        plan.run(indices=INDICES, dy=DY)


def test_more_than_there_is_memory() -> None:
    plan = plans.embedding_backward()
    call: dict[str, Any] = {"indices": np.array([0]), "dy": np.ones((1, 4096), f32)}
    found = plan.can_implement(**call, dims={"V": 2**31 - 4})
    assert isinstance(found, errors.OutOfMemory) and "bytes of outputs and workspace" in str(found)
    found = plan.can_implement(**call, dims={"V": 2**45})
    assert isinstance(found, Unsupported) and "it counts to 2147483645" in str(found)


def test_the_numpy_target_agrees() -> None:
    for make, arguments in (
        (plans.embedding_backward, {"indices": INDICES, "dy": DY}),
        (plans.fake_quantize_backward, {"x": DY * 3, "scale": np.asarray(0.7, f32), "dy": DY}),
    ):
        cpu, numpy = (
            make(target=target).run(arguments, dims={"V": V} if "indices" in arguments else None)
            for target in ("cpu", "numpy")
        )
        for name in cpu:
            close(cpu[name], numpy[name], 1e-6)
