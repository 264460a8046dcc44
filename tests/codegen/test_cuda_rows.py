"""Rows of the CUDA target: what stays in registers between phases, and sums of exponentials in one pass."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.codegen.cuda import launch
from gradc.codegen.cuda.mappings import column_strips

torch = pytest.importorskip("torch")

SIZES = (1, 7, 100, 4099)


def rows(count: int) -> np.ndarray:
    """Rows whose maxima and sums of exponentials are hard: infinities, NaN, growing and huge values."""
    normal, place = np.random.default_rng(count).normal(size=count), np.arange(count)
    special = [np.where(place == count // 2, x, normal) for x in (np.inf, np.nan, -np.inf)]
    both = np.where(place == 0, np.inf, special[1])
    last = np.where(place == count - 1, 3.0, -np.inf)
    ramps = [np.linspace(-300, 300, count), np.linspace(300, -300, count), place * 1e-3, np.linspace(-1e5, 1e5, count)]
    flat = [np.full(count, x) for x in (-np.inf, -3.4e38, 3.4e38, 0.0)]
    return np.stack([normal, 50 * normal, 1e30 * normal, *special, both, last, *ramps, *flat]).astype(np.float32)


@pytest.fixture(scope="module")
def long_rows() -> gradc.Module:
    """Functions with a sum of exponentials, each over rows of a length of its own, and over a row in registers."""

    def every(u, v, w, x, y, t):
        loss = ops.cross_entropy(x, t, reduction="none")
        return ops.softmax(u), ops.logsumexp(v, -1), ops.log_softmax(w), loss, ops.softmax(y)

    names = {"u": "f32[N,A]", "v": "f32[N,B]", "w": "f32[N,C]", "x": "f32[N,D]", "y": "f32[N,1000]"}
    return gradc.compile(gradc.trace(every, **names, t="i64[N]"), target="cuda-sim")


def test_phases_of_a_maximum_and_a_sum_are_one(long_rows: gradc.Module) -> None:
    assert long_rows.source().count("= gradc_exp_nothing();") == 4


@pytest.mark.parametrize("count", SIZES)
def test_sums_of_exponentials_in_one_pass(long_rows: gradc.Module, count: int) -> None:
    """The values of torch in f64, and its infinities and NaN."""
    x, short = rows(count), rows(1000)
    t = np.full(len(x), count // 2)
    got = long_rows(u=x, v=x, w=x, x=x, y=short, t=t)
    wide = torch.tensor(x, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(wide, torch.tensor(t), reduction="none")
    exact = torch.tensor(short, dtype=torch.float64).softmax(-1)
    want = (wide.softmax(-1), wide.logsumexp(-1), wide.log_softmax(-1), loss, exact)
    for name, ours, theirs in zip(
        ("softmax", "logsumexp", "log_softmax", "loss", "short"), got.values(), want, strict=True
    ):
        absolute = 1e-37 if name in ("softmax", "short") else 1e-6  # a logarithm may be near 0
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=3e-6, atol=absolute, err_msg=name)


def test_a_row_in_registers_is_read_and_exponentiated_once() -> None:
    graph = gradc.trace(lambda x: ops.softmax(x), x="bf16[N,4096]")
    text = gradc.compile(graph, target="cuda", arch="sm_90", wrt=["x"]).source()
    body = re.search(r"extern \"C\" __global__ void __launch_bounds__\(\d+, \d+\) softmax_\w+_rows\(.*?\n}", text, re.S)
    assert body is not None
    assert body[0].count("exp_f32(") == 1 and body[0].count("gradc_get_all(") == 1


@pytest.mark.parametrize("columns", [130, 1000])
def test_a_row_that_its_threads_do_not_divide(columns: int) -> None:
    """Gradients of layer_norm, sums of columns beside a row in registers, against torch in f64."""
    norm = gradc.trace(lambda x, g: ops.layer_norm(x, (columns,), g, g), x=f"f32[N,{columns}]", g=f"f32[{columns}]")
    module = gradc.compile(norm, target="cuda-sim", wrt=["x", "g"])
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(37, columns)).astype(np.float32) for _ in range(2))
    g = rng.normal(size=columns).astype(np.float32)
    y, residuals = module.forward(x=x, g=g)
    grads = module.backward(residuals, dy)
    wide = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, g)]
    exact = torch.nn.functional.layer_norm(wide[0], (columns,), wide[1], wide[1])
    dx, dg = torch.autograd.grad(exact, wide, torch.tensor(dy, dtype=torch.float64))
    for ours, theirs in ((y, exact.detach()), (grads["x"], dx), (grads["g"], dg)):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_sums_of_long_rows_are_partly_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of layer_norm whose sums of columns a thread has no registers for, chunks of 6 and of 5 rows: against
    torch in f64, within a unit of bf16 and what sums of as many terms round.
    """
    monkeypatch.setattr(launch, "GPU_WORKERS", 1024)
    names = {"x": "bf16[N,4096]", "g": "bf16[4096]", "b": "bf16[4096]"}
    graph = gradc.trace(lambda x, g, b: ops.layer_norm(x, (4096,), g, b), **names)
    module = gradc.compile(graph, target="cuda-sim", wrt=["x", "g", "b"])
    assert re.search(r"gradc_add_next\(shared1\[", module.source())
    rng = np.random.default_rng(0)
    values = [torch.tensor(rng.normal(size=shape)).bfloat16() for shape in ((11, 4096), 4096, 4096, (11, 4096))]
    *inputs, dy = values
    _, residuals = module.forward(**dict(zip("xgb", inputs, strict=True)))
    grads = module.backward(residuals, dy)
    wide = [a.double().requires_grad_() for a in inputs]
    exact = torch.autograd.grad(torch.nn.functional.layer_norm(wide[0], (4096,), *wide[1:]), wide, dy.double())
    for name, want in zip("xgb", exact, strict=True):
        np.testing.assert_allclose(grads[name].double().numpy(), want.numpy(), rtol=2**-8, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("offset", [0.0, 7.75, -300.5, 30000.25, 65536.0])
def test_a_sum_of_exponentials_is_within_three_units(offset: float) -> None:
    """Rows of one 0 and 4500 of the same difference to it, which make up the most of the sum: against f64."""

    def total(x):
        return ops.sum(ops.exp(x - ops.amax(x, axes=(1,), keepdims=True)), axes=(1,))

    module = gradc.compile(gradc.trace(total, x="f32[N,C]"), target="cuda-sim")
    assert "gradc_exp_first" in module.source()
    differences = -np.arange(0, 256) * (8 / 256)  # each is exact beside the offset
    x = np.repeat(differences[:, None], 4501, axis=1) + offset
    x[:, 2000] = offset
    assert (x == x.astype(np.float32)).all()
    want = 1 + 4500 * np.exp(differences)
    got = np.asarray(module(x=x.astype(np.float32)))
    assert (np.abs(got - want) / np.spacing(want.astype(np.float32))).max() < 3


def test_exponentials_beside_a_maximum_have_the_bits_of_exp() -> None:
    """Whatever is below the largest of a row, subnormal results and NaN too."""

    def both(x):
        return ops.exp(x - ops.amax(x, axes=(1,), keepdims=True)), ops.exp(x)

    graph = gradc.trace(both, x="f32[N,1000]")
    module = gradc.compile(graph, target="cuda-sim")
    assert "= gradc_exp_f32(" in module.source()
    x = -np.random.default_rng(0).uniform(0, 1, (60, 1000)).astype(np.float32) * np.float32(110)
    x[:, 0], x[7, 5], x[8, 6] = 0, np.nan, -np.inf
    beside, plain = module(x=x).values()
    rows = [n for n in range(60) if n != 7]
    np.testing.assert_array_equal(beside[rows].view(np.int32), plain[rows].view(np.int32))
    assert np.isnan(beside[7]).all()


def test_exponentials_of_negative_squares_have_the_bits_of_exp() -> None:
    """As GELU's gradient has them: subnormal results, infinities and NaN too."""
    graph = gradc.trace(lambda x, y: (ops.exp(x * x * -0.5), ops.exp(y)), x="f32[N]", y="f32[N]")
    module = gradc.compile(graph, target="cuda-sim")
    assert module.source().count("= gradc_exp_f32(") == 1
    x = np.append(np.linspace(-15, 15, 4000), [0.0, np.nan, np.inf, -np.inf, 1e19]).astype(np.float32)
    square, plain = module(x=x, y=x * x * np.float32(-0.5)).values()
    np.testing.assert_array_equal(square, plain)
    np.testing.assert_array_equal(square[:4000].view(np.int32), plain[:4000].view(np.int32))


def test_strips_of_large_maps_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column is computed once, whatever the length of a strip, and the last one is shorter."""
    module = gradc.compile(gradc.trace(lambda x: x * 2.0, x="f32[R,C]"), target="cuda-sim")
    x = np.arange(2 * 9001, dtype=np.float32).reshape(2, 9001)
    strips = []
    for most in (8192, 4, 1):
        monkeypatch.setattr(column_strips, "MANY_STRIPS", most)
        plan = launch.LaunchPlan(module.forward.program, module.forward.native.kernels, {"R": 2, "C": 9001})
        strips.append(sum(a.blocks for actions in plan.actions for a in actions))
    assert strips == [10, 6, 4]
    np.testing.assert_array_equal(module(x=x), 2 * x)


@pytest.mark.parametrize(("count", "dtype"), [(2, "f32"), (100, "f64"), (64, "bf16"), (520, "f32"), (1024, "f32")])
def test_rows_side_by_side_stay_in_registers(count: int, dtype: str) -> None:
    """A reduced axis between others, of known length: what is read of it is read once, where there is room for it."""
    columns = 16 if count > 100 else 48
    graph = gradc.trace(lambda x: ops.softmax(x, axis=1), x=f"{dtype}[3,{count},{columns}]")
    sim, wanted = (gradc.compile(graph, wrt=["x"], target=target) for target in ("cuda-sim", "numpy"))
    random = np.random.default_rng(count)
    x, dy = (random.standard_normal((3, count, columns)).astype(graph.inputs[0].dtype.np) for _ in "xy")
    (y, kept), (y_wanted, kept_wanted) = sim.forward(x=x), wanted.forward(x=x)
    dx, dx_wanted = sim.backward(kept, dy)["x"], wanted.backward(kept_wanted, dy)["x"]
    for found, want in ((y, y_wanted), (dx, dx_wanted)):
        scale = np.abs(want.astype(np.float64)).max()
        assert (
            np.abs(found.astype(np.float64) - want.astype(np.float64)).max()
            <= (1e-2 if dtype == "bf16" else 1e-5) * scale
        )
    text = sim.forward.source
    rows = text[text.index("_rows(") :]
    assert "neighbouring threads have neighbouring rows" in text and len(re.findall(r"\bx\[", rows)) == 1


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_exponentials_that_are_rounded_to_short_floats(dtype: str) -> None:
    """Every argument that the format has: the rounded exponential, but for a few that lie between two of its values to
    within the function's own error, which is 6.4 units of f32 at most.
    """
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x=f"{dtype}[N]"), target="cuda-sim")
    assert "= gradc_exp_narrow(" in module.source()
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind)
    got, exact = module(x=x), torch.exp(x.double())
    finite = torch.isfinite(got.double()) & (got != 0)
    unlike = (got != exact.to(kind)) & ~(torch.isnan(got) & torch.isnan(exact))
    assert not unlike[~finite].any() and int(unlike.sum()) <= (3 if dtype == "bf16" else 12)
    wrong = (got.double() - exact)[unlike]
    ulp = (torch.nextafter(got, got * 2) - got).double()[unlike]
    assert bool((wrong.abs() <= ulp * (0.5 + 6.4 * torch.finfo(torch.float32).eps / torch.finfo(kind).eps)).all())


def test_exponentials_that_something_takes_as_they_are() -> None:
    """A sum that is stored, a decision, a result in f32, and a sigmoid's own exponential."""
    for function, types in (
        (lambda x: ops.exp(ops.cast(x, "f32")), {"x": "bf16[N]"}),
        (lambda x: (ops.exp(x), ops.sum(ops.exp(ops.cast(x, "f32")), axes=(1,))), {"x": "bf16[N,40]"}),
        (lambda x: ops.where(ops.gt(ops.exp(ops.cast(x, "f32")), ops.cast(x, "f32")), x, x * 2), {"x": "bf16[N]"}),
        (lambda x: ops.exp(-ops.abs(x)) * ops.sigmoid(x), {"x": "bf16[N]"}),
    ):
        module = gradc.compile(gradc.trace(function, **types), target="cuda-sim")
        assert "exp_f32(" in module.source() and "= gradc_exp_narrow(" not in module.source()


def test_a_column_is_compared_with_a_place_of_more_than_32_bits() -> None:
    """Its low bits are another column's number."""
    graph = gradc.trace(
        lambda x, t: ops.where(ops.eq(ops.iota((8,), dtype="i64"), t), x, -x), x="f32[N,8]", t="i64[N,1]"
    )
    module = gradc.compile(graph, target="cuda-sim")
    assert "gradc_is_at(" in module.source()
    t = np.array([3, 2**32 + 3, -(2**32) + 3, -1, 8, 7, 0], np.int64)[:, None]
    got = module(x=np.ones((7, 8), np.float32), t=t)
    np.testing.assert_array_equal(got, np.where(np.arange(8) == t, 1, -1))
