"""grid_sample and affine_grid: against torch in f64, at the coordinates torch gets wrong, and compiled.

torch's own backward is never given a NaN under border or reflection padding: it segfaults there (2.13, CPU).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import sampling  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from agreement import merged  # noqa: E402
from torch_oracles import to_numpy, to_torch  # noqa: E402

import gradc  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.errors import InvalidProblem, TypeRuleError  # noqa: E402
from gradc.ir.graph import Graph  # noqa: E402
from gradc.ir.types import DTYPES  # noqa: E402
from gradc.passes.graph.cheaper_forms import cheaper_forms  # noqa: E402
from gradc.runtime.host import pool  # noqa: E402
from gradc.trace import trace  # noqa: E402

torch.set_num_threads(1)
KINDS = [(2, "bilinear"), (2, "nearest"), (2, "bicubic"), (3, "bilinear"), (3, "nearest")]
PADDINGS = ("zeros", "border", "reflection")
OPTIONS = list(itertools.product(PADDINGS, (False, True)))
ALL = [(rank, mode, padding, corners) for (rank, mode), (padding, corners) in itertools.product(KINDS, OPTIONS)]
SPATIAL, POINTS = (5, 4, 6), (3, 7, 2)
UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def graph_of(rank: int, mode: str, padding: str, corners: bool, dtype: str = "f64") -> Graph:
    """With every size a symbol."""
    spatial, points = "DHW"[3 - rank :], "RPQ"[3 - rank :]
    return trace(
        lambda x, grid: ops.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners),
        x=f"{dtype}[N,C,{','.join(spatial)}]",
        grid=f"{dtype}[N,{','.join(points)},{rank}]",
    )


def identity(rank: int, corners: bool) -> np.ndarray:
    """The grid that reads each pixel at its centre, as affine_grid makes it."""
    theta = torch.eye(rank, rank + 1, dtype=torch.float64).expand(2, -1, -1)
    return to_numpy(F.affine_grid(theta, [2, 1, *POINTS[:rank]], align_corners=corners))


def grids(rank: int, corners: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random, smooth, and far out of range."""
    rng = np.random.default_rng(seed)
    shape = (2, *POINTS[:rank], rank)
    base = identity(rank, corners)
    return {
        "random": rng.uniform(-1.1, 1.1, shape),
        "smooth": 0.9 * base + 0.15 * np.sin(3 * base[..., ::-1] + 0.2) + 0.003,
        "identity": base,
        "far": rng.uniform(-9, 9, shape),
    }


def images(rank: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, *SPATIAL[:rank]))


def upstream(rank: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, *POINTS[:rank]))


def torchs(x: Any, grid: Any, dy: Any, mode: str, padding: str, corners: bool) -> dict[str, np.ndarray]:
    tx, tg = to_torch(x).requires_grad_(), to_torch(grid).requires_grad_()
    y = F.grid_sample(tx, tg, mode=mode, padding_mode=padding, align_corners=corners)
    y.backward(to_torch(dy))
    return {"y": to_numpy(y), "d.x": to_numpy(tx.grad), "d.grid": to_numpy(tg.grad)}


def close(got: np.ndarray, want: np.ndarray, rtol: float, what: str, floor: float = 1e-30) -> None:
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    scale = np.abs(want).max(initial=floor)
    worst = np.abs(got - want).max(initial=0.0) / scale
    assert worst <= rtol, f"{what}: off by {worst:.2e}"


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "mode", "padding", "corners"), ALL)
def test_is_torchs(rank: int, mode: str, padding: str, corners: bool) -> None:
    both = differentiate(graph_of(rank, mode, padding, corners), ["x", "grid"])
    x, dy = images(rank), upstream(rank)
    for name, grid in grids(rank, corners).items():
        got = interp.run(both, {"x": x, "grid": grid, "d.y": dy})
        for key, want in torchs(x, grid, dy, mode, padding, corners).items():
            close(got[key], want, 1e-12 if key == "y" else 1e-10, f"{name} {key}")


@pytest.mark.parametrize(("rank", "mode", "padding", "corners"), ALL)
def test_one_pixel(rank: int, mode: str, padding: str, corners: bool) -> None:
    """Axes of size 1, where the folds of a reflection meet."""
    both = differentiate(graph_of(rank, mode, padding, corners), ["x", "grid"])
    x, dy = images(rank)[(..., *(slice(1) for _ in range(rank)))], upstream(rank)
    for name, grid in grids(rank, corners).items():
        got = interp.run(both, {"x": x, "grid": grid, "d.y": dy})
        for key, want in torchs(x, grid, dy, mode, padding, corners).items():
            close(got[key], want, 1e-10, f"{name} {key}", floor=1.0)


SMOOTH = [case for case in ALL if case[1] != "nearest"]


@pytest.mark.parametrize(("rank", "mode", "padding", "corners"), SMOOTH)
def test_second_order(rank: int, mode: str, padding: str, corners: bool) -> None:
    """The gradients' own gradients, against torch's double backward of the definition (tests/sampling.py), which is
    torch's op to the first order.
    """
    first = differentiate(graph_of(rank, mode, padding, corners), ["x", "grid"])
    first = first.with_outputs([(n, node) for n, node in first.outputs if n != "y"])
    second = differentiate(first, ["x", "grid", "d.y"])
    rng = np.random.default_rng(5)
    x, grid, dy = images(rank), rng.uniform(-1.3, 1.3, (2, *POINTS[:rank], rank)), upstream(rank)
    vx, vg = rng.standard_normal(x.shape), rng.standard_normal(grid.shape)
    leaves = [to_torch(a).requires_grad_() for a in (x, grid, dy)]
    y = sampling.grid_sample(*leaves[:2], mode, padding, corners)
    once = torch.autograd.grad(y, leaves[:2], leaves[2], create_graph=True)
    for g, key in zip(once, ("d.x", "d.grid"), strict=True):
        close(to_numpy(g), torchs(x, grid, dy, mode, padding, corners)[key], 1e-10, f"the oracle's {key}")
    want = torch.autograd.grad((once[0] * to_torch(vx)).sum() + (once[1] * to_torch(vg)).sum(), leaves)
    names = [n for n in second.output_names if n not in first.output_names]
    seeds = [n for n in second.input_names if n not in first.input_names]
    got = interp.run(second, {"x": x, "grid": grid, "d.y": dy, **dict(zip(seeds, (vx, vg), strict=True))})
    for name, w in zip(names, want, strict=True):
        close(got[name], to_numpy(w), 1e-10, name)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("rank", "mode"), KINDS)
def test_narrow_types_compute_in_f32(rank: int, mode: str, dtype: str) -> None:
    """One rounding of what f32 gives: half a unit of the type, and what f32 itself loses of a coordinate."""
    kind = DTYPES[dtype].np
    x, dy = images(rank).astype(kind), upstream(rank).astype(kind)
    # away from whole and half places, where a rounding of f32 would choose another pixel
    grid = grids(rank, False)["random"].astype(kind)
    padding = PADDINGS[(KINDS.index((rank, mode)) + ("f16", "bf16", "f32").index(dtype)) % 3]
    both = differentiate(graph_of(rank, mode, padding, False, dtype), ["x", "grid"])
    module = gradc.compile(graph_of(rank, mode, padding, False, dtype), wrt=["x", "grid"], target="numpy")
    y, residuals = module.forward(x=x, grid=grid)
    grads = module.backward(residuals, dy)
    want = torchs(*(a.astype(np.float64) for a in (x, grid, dy)), mode, padding, False)
    for key, got in {"y": y, "d.x": grads["x"], "d.grid": grads["grid"]}.items():
        assert got.dtype == kind and both.output(key).dtype.name == dtype
        close(got, want[key], UNIT[dtype] + 2e-6, f"{padding} {key}")


# -- coordinates that are no numbers, or too large ones ----------------------------------------------------------------

inf, nan = np.inf, np.nan
STRANGE = [("zeros", True), ("border", False), ("reflection", True)]
FAR = [1e30, -1e30, 2.0**31, -(2.0**31), 2.0**63, 3.4e38, -3.4e38]


def stand_in(value: float, padding: str) -> float | None:
    """The finite coordinate that a strange one counts as; None: it samples nothing."""
    if np.isnan(value):
        return -1.0
    if padding == "zeros":
        return None
    return -1.0 if padding == "reflection" else float(np.sign(value)) * 50


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize(("rank", "mode"), KINDS)
def test_coordinates_that_are_no_numbers(rank: int, mode: str, target: str) -> None:
    """NaN counts as -1, an infinity as far outside (zeros), the edge (border) or -1 (reflection); its gradient is 0.

    The case that ends torch's process is among them: one NaN, border or reflection, bilinear.
    """
    options = STRANGE if target == "cpu" else OPTIONS
    graphs = {f"s{k}": graph_of(rank, mode, *o, "f32" if target == "cpu" else "f64") for k, o in enumerate(options)}
    kind = np.float32 if target == "cpu" else np.float64
    x, dy = images(rank).astype(kind), upstream(rank).astype(kind)
    plain = grids(rank, False)["random"].astype(kind)
    strange, where = plain.copy(), np.zeros(plain.shape, bool)
    for k, value in enumerate([nan, inf, -inf, nan, inf]):
        place = (k % 2, *((k * 2 + a) % n for a, n in enumerate(POINTS[:rank])), k % rank)
        strange[place], where[place] = value, True
    strange[1, -1], where[1, -1] = nan, True  # every coordinate of a row
    run = runner(graphs, target)
    got = run({key: {"x": x, "grid": strange, "d.y": dy} for key in graphs})
    for key, (padding, corners) in zip(graphs, options, strict=True):
        usual, outside = plain.copy(), np.zeros(plain.shape[:-1], bool)
        for place in np.argwhere(where):
            finite = stand_in(strange[tuple(place)], padding)
            usual[tuple(place)] = 50.0 if finite is None else finite
            outside[tuple(place[:-1])] |= finite is None
        both = differentiate(graph_of(rank, mode, padding, corners, "f32" if target == "cpu" else "f64"), ["x", "grid"])
        want = interp.run(both, {"x": x, "grid": usual, "d.y": dy})
        want["d.grid"] = np.where(where, 0, want["d.grid"])
        for name in ("y", "d.x", "d.grid"):
            close(got[key][name], want[name], 1e-12 if target == "numpy" else 1e-5, f"{padding} {corners} {name}")
        assert not got[key]["d.grid"][where].any()
        assert not got[key]["y"].transpose(0, *range(2, rank + 2), 1)[outside].any()
        if mode == "nearest":
            assert not got[key]["d.grid"].any()


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize(("rank", "mode"), KINDS)
def test_numbers_beyond_any_address(rank: int, mode: str, target: str) -> None:
    """Nothing is read out of bounds, and what is out of range samples nothing, the edge, or some pixel."""
    graphs = {f"s{k}": graph_of(rank, mode, *o, "f32") for k, o in enumerate(STRANGE)}
    x, dy = images(rank).astype(np.float32), upstream(rank).astype(np.float32)
    grid = np.resize(np.asarray(FAR, np.float32), (2, *POINTS[:rank], rank))
    got = runner(graphs, target)({key: {"x": x, "grid": grid, "d.y": dy} for key in graphs})
    for result in got.values():
        assert all(np.isfinite(a).all() for a in result.values())
    assert not any(a.any() for a in got["s0"].values())
    edge = interp.run(graphs["s1"], {"x": x, "grid": np.sign(grid) * 50})["y"]
    close(got["s1"]["y"], edge, 1e-6, "border")
    assert not got["s1"]["d.grid"].any()


def test_an_infinite_cotangent_stays_at_its_pixel() -> None:
    """A point outside the image has the gradient 0, whatever comes from above: masks select, they are never factors."""
    both = differentiate(graph_of(2, "bilinear", "zeros", False), ["x", "grid"])
    x, grid, dy = images(2), grids(2, False)["random"], upstream(2)
    grid[0, 0, 0], dy[0, :, 0, 0] = (7.0, 0.1), inf
    got = interp.run(both, {"x": x, "grid": grid, "d.y": dy})
    assert np.isfinite(got["d.x"]).all() and np.isfinite(got["d.grid"]).all()
    assert not got["d.grid"][0, 0, 0].any()


# -- what the definition says, by hand ---------------------------------------------------------------------------------


def test_nearest_rounds_half_to_even() -> None:
    x = np.arange(5.0).reshape(1, 1, 1, 5)
    grid = np.stack([np.array([-0.75, -0.25, 0.25, 0.75]), np.zeros(4)], -1).reshape(1, 1, 4, 2)  # 0.5, 1.5, 2.5, 3.5
    graph = graph_of(2, "nearest", "zeros", True)
    assert interp.run(graph, {"x": x, "grid": grid})["y"].reshape(-1).tolist() == [0, 2, 2, 4]


def test_nearest_has_a_grid_gradient_of_zeros() -> None:
    both = differentiate(graph_of(2, "nearest", "border", False), ["grid"])
    got = interp.run(
        both,
        {"x": images(2), "grid": grids(2, False)["random"], "d.y": upstream(2)} if "d.y" in both.input_names else {},
    )
    assert got["d.grid"].shape == (2, 3, 7, 2) and not got["d.grid"].any()


def test_bicubic_derivative_is_signed() -> None:
    """At t = 0.3 the tap at the distance -1-t has the derivative -0.0525; with absolute distances a formula gives
    -19.55.
    """
    both = differentiate(graph_of(2, "bicubic", "border", True), ["grid"])
    x = np.zeros((1, 1, 1, 5))
    x[..., 0] = 1.0
    grid = np.array([1.3 / 4 * 2 - 1, 0.0]).reshape(1, 1, 1, 2)
    got = interp.run(both, {"x": x, "grid": grid, "d.y": np.ones((1, 1, 1, 1))})
    np.testing.assert_allclose(got["d.grid"][..., 0] / (4 / 2), -0.0525, rtol=1e-12)


def test_gradients_only_when_asked() -> None:
    graph = graph_of(2, "bilinear", "zeros", False)
    kinds = {
        name: {n.op.name for n in gradc.compile(graph, wrt=[name], target="numpy").stages["tidy.fold"].result.nodes}
        for name in ("x", "grid")
    }
    assert "scatter_2d" in kinds["x"] and "sum" not in kinds["x"]
    assert "scatter_2d" not in kinds["grid"] and "sum" in kinds["grid"]


def test_dequantized_images_are_read_where_they_stand() -> None:
    """No float image is stored: the scale is applied to each pixel that is read."""

    def sampled(q: Any, scale: Any, grid: Any) -> Any:
        return ops.grid_sample(ops.dequantize(q, scale, block=(8, 1, 16, 16)), grid)

    graph = trace(sampled, q="i8[8,4,16,16]", scale="f32[1,4,1,1]", grid="f32[8,P,Q,2]")
    program = gradc.compile(graph, target="numpy").forward.program
    stored = [b for b in program.buffers if b.type.dtype.is_float and tuple(b.type.shape) == (8, 4, 16, 16)]
    assert not stored
    rng = np.random.default_rng(0)
    q = rng.integers(-9, 10, (8, 4, 16, 16)).astype(np.int8)
    scale = rng.uniform(0.1, 1, (1, 4, 1, 1)).astype(np.float32)
    grid = rng.uniform(-1, 1, (8, 3, 2, 2)).astype(np.float32)
    got = gradc.interp.run(program, {"q": q, "scale": scale, "grid": grid})
    want = F.grid_sample(
        torch.tensor(q * scale.astype(np.float64)), torch.tensor(grid.astype(np.float64)), align_corners=False
    ).numpy()
    close(next(iter(got.values())), want, 1e-6, "y")


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_empty(mode: str) -> None:
    module = gradc.compile(graph_of(2, mode, "border", False, "f32"), wrt=["x", "grid"])
    for n, c, p, q in ((0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (2, 3, 2, 0)):
        x, grid = np.ones((n, c, 5, 4), np.float32), np.zeros((n, p, q, 2), np.float32)
        y, residuals = module.forward(x=x, grid=grid)
        grads = module.backward(residuals, np.ones_like(y))
        assert y.shape == (n, c, p, q) and grads["x"].shape == x.shape and grads["grid"].shape == grid.shape
        assert not grads["x"].any() and not grads["grid"].any()


@pytest.mark.parametrize(
    ("x", "grid", "options", "match"),
    [
        ("f32[2,3,0,4]", "f32[2,3,3,2]", {}, "size 0 on axis 2"),
        ("f32[2,3,5,0]", "f32[2,3,3,2]", {}, "size 0 on axis 3"),
        ("f32[2,3,5,4]", "f32[2,3,3,4]", {}, "last dim is 4, not 2"),
        ("f32[2,3,5,4,4]", "f32[2,3,3,3,Q]", {}, "last dim is Q, not 3"),
        ("f32[2,3,5,4]", "f32[2,3,3,3,3]", {}, "rank 5 and the input 4"),
        ("f16[2,3,5,4]", "f32[2,3,3,2]", {}, "f16 and grid f32"),
        ("f32[N,3,5,4]", "f32[M,3,3,2]", {}, "has N and the grid M"),
        ("f32[2,3,5,4,4]", "f32[2,3,3,3,3]", {"mode": "bicubic"}, "rank 4, not 5"),
        ("f32[2,3,5,4]", "f32[2,3,3,2]", {"mode": "linear"}, "mode='linear'"),
    ],
)
def test_bad_input(x: str, grid: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeRuleError, match=match):
        trace(lambda x, grid: ops.grid_sample(x, grid, **options), x=x, grid=grid)


# -- affine_grid -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 5, 4), (2, 1, 1, 3), (2, 3, 4, 2, 5), (2, 1, 1, 1, 2)])
def test_affine_grid(size: tuple[int, ...], corners: bool) -> None:
    rank = len(size) - 2
    names = ("N", "C", *"DHW"[3 - rank :])
    for symbolic in (False, True):

        def fn(theta: Any, symbolic: bool = symbolic) -> Any:
            dims = tuple(map(gradc.ir.dims.symbol, names)) if symbolic else size
            return ops.affine_grid(theta, dims, align_corners=corners)

        both = differentiate(trace(fn, theta=f"f64[{'N' if symbolic else 2},{rank},{rank + 1}]"), ["theta"])
        rng = np.random.default_rng(3)
        theta = rng.standard_normal((2, rank, rank + 1))
        leaf = to_torch(theta).requires_grad_()
        want = F.affine_grid(leaf, list(size), align_corners=corners)
        dy = rng.standard_normal(want.shape)
        want.backward(to_torch(dy))
        dims = dict(zip(names, size, strict=True)) if symbolic else {}
        got = interp.run(
            both,
            {n: {"theta": theta, "d.y": dy}[n] for n in both.input_names},
            dims={n: v for n, v in dims.items() if n in both.dims},
        )
        close(got["y"], to_numpy(want), 1e-12, "y")
        close(got["d.theta"], to_numpy(leaf.grad), 1e-12, "d.theta")


def test_a_spatial_transformer() -> None:
    """affine_grid -> grid_sample, its gradients compiled, against torch's."""

    def transformed(x: Any, theta: Any) -> Any:
        return ops.grid_sample(x, ops.affine_grid(theta, (4, 2, 6, 5)), padding_mode="border")

    module = gradc.compile(trace(transformed, x="f64[4,2,8,7]", theta="f64[4,2,3]"), wrt=["x", "theta"])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 8, 7))
    theta = np.array([[1.0, 0, 0], [0, 1, 0]]) + 0.3 * rng.standard_normal((4, 2, 3))
    dy = rng.standard_normal((4, 2, 6, 5))
    leaves = [to_torch(x).requires_grad_(), to_torch(theta).requires_grad_()]
    want = F.grid_sample(
        leaves[0],
        F.affine_grid(leaves[1], [4, 2, 6, 5], align_corners=False),
        padding_mode="border",
        align_corners=False,
    )
    want.backward(to_torch(dy))
    y, residuals = module.forward(x=x, theta=theta)
    grads = module.backward(residuals, dy)
    close(y, to_numpy(want), 1e-12, "y")
    close(grads["x"], to_numpy(leaves[0].grad), 1e-10, "d.x")
    close(grads["theta"], to_numpy(leaves[1].grad), 1e-10, "d.theta")


# -- compiled ----------------------------------------------------------------------------------------------------------


def runner(graphs: dict[str, Graph], target: str, fuse: bool = True) -> Any:
    """The values and gradients of several graphs, compiled as one module: ``{graph: inputs} -> {graph: outputs}``."""
    joint = {key: differentiate(graph, ["x", "grid"]) for key, graph in graphs.items()}
    if target == "numpy":
        return lambda given: {
            key: interp.run(graph, {n: given[key][n] for n in graph.input_names}) for key, graph in joint.items()
        }
    # one dim of a name in all: the cases of a module share their sizes
    module = gradc.compile(merged("cases", joint.items()), fuse=fuse)

    def run(given: Any) -> dict[str, dict[str, np.ndarray]]:
        flat = {f"{key}.{n}": given[key][n] for key, graph in joint.items() for n in graph.input_names}
        got = module.forward.run(**flat)
        return {key: {n: got[f"{key}.{n}"] for n in graph.output_names} for key, graph in joint.items()}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize(("rank", "mode"), KINDS)
def test_compiled_is_interpreted_for_any_number_of_threads(rank: int, mode: str, fuse: bool) -> None:
    options = OPTIONS[KINDS.index((rank, mode)) % 2 :: 2] if fuse else OPTIONS[:1]
    graphs = {f"s{k}": graph_of(rank, mode, *o, "f32") for k, o in enumerate(options)}
    run = runner(graphs, "cpu", fuse)
    rng = np.random.default_rng(9)
    spatial, points = ((40, 33), (50, 41)) if rank == 2 else ((9, 12, 10), (8, 11, 13))
    given = {}
    for key in graphs:
        x, dy = (rng.standard_normal((2, 3, *s)).astype(np.float32) for s in (spatial, points))
        grid = rng.uniform(-1.3, 1.3, (2, *points, rank)).astype(np.float32)
        given[key] = {"x": x, "grid": grid, "d.y": dy}
    results, before = [], pool.num_threads()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            results.append(run(given))
    finally:
        pool.set_num_threads(before)
    for (key, graph), option in zip(graphs.items(), options, strict=True):
        want = interp.run(differentiate(graph, ["x", "grid"]), given[key])
        for name in want:
            close(results[0][key][name], want[name], 2e-6, f"{option} {name}")
            for other in results[1:]:
                assert other[key][name].tobytes() == results[0][key][name].tobytes(), (
                    f"{option} {name}: bits differ between numbers of threads"
                )


def test_an_image_without_pixels_is_an_error_at_the_call() -> None:
    module = gradc.compile(trace(lambda x, g: ops.grid_sample(x, g), x="f32[N,2,H,W]", g="f32[N,h,w,2]"), wrt=["x"])
    grid = np.zeros((1, 3, 3, 2), np.float32)
    for height, width, fact in ((0, 4, "H >= 1"), (4, 0, "W >= 1")):
        with pytest.raises(InvalidProblem, match=rf"assume\({fact}\)"):
            module.forward(x=np.zeros((1, 2, height, width), np.float32), g=grid)
    y, residuals = module.forward(x=np.zeros((1, 2, 1, 1), np.float32), g=grid[:, :0])
    assert y.shape == (1, 2, 0, 3) and not module.backward(residuals, y)["x"].any()


@pytest.mark.parametrize("channels, sums", [(3, 8), (9, 16)])
def test_few_channels_are_weighed_before_they_are_added_up(channels: int, sums: int) -> None:
    """On a CPU there is then a sum for each of 4 + 4 weights, not for each of 16 taps."""
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode="bicubic"), x=f"f64[2,{channels},9,8]", grid="f64[2,17,19,2]"
    )
    module = gradc.compile(graph, ["x", "grid"], "cpu")
    beside = [len(k.accums) for k in module.backward.program.kernels if k.accums and "d.x" not in k.writes]
    assert beside == [sums]
    rng = np.random.default_rng(channels)
    x, grid = rng.standard_normal((2, channels, 9, 8)), rng.uniform(-1.2, 1.2, (2, 17, 19, 2))
    y, residuals = module.forward(x=x, grid=grid)
    dy = rng.standard_normal(y.shape)
    want, got = torchs(x, grid, dy, "bicubic", "zeros", False), module.backward(residuals, dy)
    for name in ("x", "grid"):
        close(got[name], want[f"d.{name}"], 1e-10, name)


@pytest.mark.parametrize("channels, weighed", [(1, False), (2, True), (8, True), (9, False), ("C", False)])
def test_products_of_one_channel_are_not_weighed_first(channels: Any, weighed: bool) -> None:
    """There is no sum to save: of f32 the gradient of the grid took twice as long, in twice the memory."""
    graph = gradc.trace(
        lambda x, grid: ops.grid_sample(x, grid, mode="bicubic"), x=f"f32[2,{channels},9,8]", grid="f32[2,17,19,2]"
    )
    joint = differentiate(graph, ["grid"])
    assert (str(cheaper_forms(joint)) != str(joint)) is weighed


@pytest.mark.parametrize("channels", [3, 40])
def test_a_chunk_goes_through_a_channel_before_the_next(channels: int) -> None:
    """Sums over few channels add up in the gradient itself, over many beside it: in memory of the thread, as much for a
    large grid as for a small one.
    """
    graph = gradc.trace(lambda x, grid: ops.grid_sample(x, grid), x=f"f32[N,{channels},H,W]", grid="f32[N,Q,P,2]")
    module = gradc.compile(graph, wrt=["grid"], target="cpu")
    program = module.backward.program
    assert any(
        "regular" in k.strategies.values() and "stays near for all of the chunk" in text
        for k in program.kernels
        for text in [module.backward.native.kernels[k.name].text]
    )
    scratch = [
        (made := module.backward.native.bind({"N": 2, "H": 9, "W": 7, "Q": q, "P": 11})).workspace - made.scratch
        for q in (5, 5000)
    ]
    assert scratch[0] == scratch[1]
    rng = np.random.default_rng(channels)
    for points in (1, 5, 700):  # 700 rows of points are several chunks
        given = {
            "x": rng.standard_normal((2, channels, 9, 7)).astype(np.float32),
            "grid": rng.uniform(-1.2, 1.2, (2, points, 11, 2)).astype(np.float32),
        }
        y, residuals = module.forward(**given)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        got = module.backward(residuals, dy)["grid"]
        exact = interp.run(differentiate(graph, ["grid"]), {**given, "d.y": dy}, precision="f64")["d.grid"]
        assert np.abs(got - exact).max() <= 16 * 2.0**-24 * np.abs(exact).max()
