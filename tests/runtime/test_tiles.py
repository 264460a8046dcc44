"""Loops with sweeps as kernels on tensor cores, in cuda-sim that checks races, bounds and uninitialised memory: against
float64, against the same rounding in NumPy, and against the interpreter where nothing is finite.
"""

from __future__ import annotations

import functools
import math
import re

import long_tests
import numpy as np
import pytest
from column_blocking import CASES as COLUMN_BLOCKING
from hypothesis import given, settings
from hypothesis import strategies as st
from skips import compiled
from tile_programs import CASES, DTYPES, drawn, shared_transactions, with_tiles

import gradc
from gradc import knobs, ops
from gradc.analysis.tiles import refusal
from gradc.codegen.cuda.tiles.kernel import tile_kernel
from gradc.compiler import run_passes
from gradc.errors import Unsupported
from gradc.inspect.explain import mappings_table, resources_table
from gradc.interp import run_program
from gradc.ir.kernel import Tile
from gradc.ir.program_text import parse_program
from gradc.module.options import Options
from gradc.passes.column_blocking.carry_sums import carry_sums
from gradc.passes.column_blocking.split_loops import split_loops
from gradc.runtime.cuda.programs import CudaProgram
from gradc.runtime.executable import Executable
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import CPU, gpu_of

FEATURES = {"causal": (64, 24), "plain": (20,), "grouped queries": (32,), "tokens before heads": (16,)}
DIMS = st.fixed_dictionaries(
    {"S": st.sampled_from([0, 1, 17, 63, 64, 65, 130]), "T": st.sampled_from([1, 40, 64, 100]), "B": st.integers(1, 2)}
    | {"H": st.integers(1, 2)}
)


@functools.cache
def executable(name: str, features: int, dtype: str = "bf16") -> Executable:
    return Executable(CASES[name].programs(features, dtype)["forward"], "cuda-sim")


def checked(made: Executable, arrays):
    with knobs.SIM_CHECK.set(True):
        return made.run(**arrays)


def wide(arrays):
    return {k: a.astype(np.float64) if a.dtype.kind not in "iu" else a for k, a in arrays.items()}


@long_tests.values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "features"), [(n, f) for n in CASES for f in FEATURES.get(n, (8,))])
@settings(max_examples=4)
@given(dims=DIMS, seed=st.integers(0, 99))
def test_forward_is_as_exact_as_its_rounding(name, features, dtype, dims, seed):
    case, made = CASES[name], executable(name, features, dtype)
    arrays = drawn(case, features, dims, seed, dtype)
    got = checked(made, arrays)["y"].astype(np.float64)
    wanted = case.oracle(**wide(arrays))
    assert got.shape == wanted.shape
    if not got.size:
        return
    emulated = np.abs(case.oracle(rounded=dtype, **wide(arrays)) - wanted)
    eps = float(np.finfo(np.float16).eps) if dtype == "f16" else 2.0**-7
    assert np.abs(got - wanted).max() <= 1.5 * emulated.max() + 2.0**-18 + (eps * np.abs(wanted).max()) / 2


SPECIAL = (np.inf, -np.inf, np.nan, 3e38, -3e38)


@pytest.mark.parametrize("name", ["causal", "bias of heads", "plain"])
@settings(max_examples=8)
@given(seed=st.integers(0, 99), where=st.lists(st.tuples(st.sampled_from("qkv"), st.sampled_from(SPECIAL)), max_size=3))
def test_what_is_not_finite_is_what_the_interpreter_says(name, seed, where):
    features = FEATURES.get(name, (8,))[0]
    made, dims = executable(name, features), {"S": 70, "T": 80, "B": 1, "H": 1}
    arrays, rng = drawn(CASES[name], features, dims, seed), np.random.default_rng(seed)
    for operand, value in where:
        arrays[operand].flat[rng.integers(arrays[operand].size)] = value
    got = checked(made, arrays)
    with np.errstate(all="ignore"):
        wanted = run_program(made.program, arrays)
    for output, w in wanted.items():
        g, w = got[output].astype(np.float64), w.astype(np.float64)
        finite = np.isfinite(w)
        np.testing.assert_array_equal(np.where(finite, 0, w), np.where(finite, 0, g))
        close = 2.0**-6 if output == "y" else 2.0**-18
        np.testing.assert_allclose(np.where(finite, g, 0), np.where(finite, w, 0), rtol=close, atol=close)


LEAST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("least", [LEAST, -1e30, -3e7, 1e30, 2.0**24 + 2])
def test_rows_of_scores_of_any_size_have_the_weights_of_their_differences(least):
    """Whole rows that a mask hides by a finite number, and rows with one score that is far above all: no exponential is
    infinite, or 0 in all of a row, for the rounding of a product with log2 e.
    """
    made, case, dims = executable("bias of heads", 8), CASES["bias of heads"], {"S": 70, "T": 70, "B": 1, "H": 1}
    arrays = drawn(case, 8, dims, 0)
    bias = arrays["bias"] = np.zeros_like(arrays["bias"])
    bias[..., :20, :] = least
    bias[..., 20:40, 65] = abs(least)
    bias[..., 40:60, :64] = least
    got = checked(made, arrays)["y"].astype(np.float64)
    wanted = run_program(made.program, arrays)["y"].astype(np.float64)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=2.0**-6, atol=2.0**-6)


RISES = (
    *((n - 4, n) for n in (2.0**26, -(2.0**26), -(2.0**26) + 4)),
    *((n - 4, n + 8) for n in (2.0**26, -(2.0**26) - 4)),
    *((4.7e7, 6.72e7), (6e7, 7e7), (6.5e7, 9.5e7), (-7e7, -6.6e7), (-9e7, -6.3e7), (-1e30, 2.0**26 - 4)),
    *((-math.inf, -(2.0**26)), (LEAST, 2.0**26), (LEAST, -(2.0**26) + 4)),
)
"""A row's score in its first block of columns, and in its last one."""


def test_maxima_that_rise_across_where_exponents_change_their_base_rescale_sums_by_their_difference():
    """A maximum below 2^26 is multiplied by log2 e and a larger one is not, so that its exponent may be the smaller.
    What is 4 below its next neighbour, half the rounding of a score there, may have the weight 0.
    """
    made, case = executable("bias of heads", 8), CASES["bias of heads"]
    arrays = drawn(case, 8, {"S": 70, "T": 70, "B": 1, "H": 1}, 0)
    arrays["q"] = np.zeros_like(arrays["q"])
    bias = arrays["bias"] = np.full_like(arrays["bias"], -np.inf)
    bias[..., 0] = 0
    for row, rise in enumerate(RISES):
        bias[..., row, [0, 69]] = rise
    weights = np.exp(bias.astype(np.float64) - bias.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ arrays["v"].astype(np.float64)
    got = checked(made, arrays)["y"].astype(np.float64)
    assert (np.abs(got - wanted).max(-1)[0, 0, : len(RISES)] <= [2.0**-7 + _neighbours(rise) for rise in RISES]).all()


def _neighbours(rise: tuple[float, float]) -> float:
    """How far the weight of a lower score is from 0 if it is the upper one's neighbour, times two values."""
    return 8 * math.exp(-4) if rise[1] - rise[0] == 4 else 0.0


@pytest.mark.parametrize("features", [64, 192])
@pytest.mark.parametrize("least", [-65504.0, -1e6, -3e7, -6e8, -1e30])
def test_gradients_of_rows_hidden_by_a_finite_number_are_those_of_their_differences(least, features):
    """Backward as tiles, and as products with kernels, which compute the weights again of the forward's statistics."""
    torch = pytest.importorskip("torch")
    types = {n: f"bf16[B,H,S,{features}]" for n in WRT} | {"bias": "f32[1,H,S,S]"}
    graph = gradc.trace(CASES["bias of heads"].function, **types)
    programs = run_passes(graph, WRT, Options(), "cuda")[2]
    assert any(loop.tile for loop in programs["forward"].loops)
    assert any(loop.tile for loop in programs["backward"].loops) == (features == 64)
    forward, backward = (Executable(programs[n], "cuda-sim") for n in ("forward", "backward"))
    arrays = drawn(CASES["bias of heads"], features, {"S": 70, "T": 70, "B": 1, "H": 1}, 0)
    arrays["bias"] = np.zeros((1, 1, 70, 70), np.float32)
    arrays["bias"][..., :20, :] = least
    dy = np.random.default_rng(1).standard_normal(arrays["q"].shape).astype(DTYPES["bf16"])
    _, got = gradients(lambda a: checked(forward, a), lambda a: checked(backward, a), arrays, dy)
    own = {n: torch.tensor(a, requires_grad=n in WRT) for n, a in wide(arrays).items()}
    s = own["q"] @ own["k"].mT / features**0.5
    rounded = s.detach().float() + own["bias"].float()  # a score has 24 bits
    weights = torch.softmax(s + (rounded.double() - s.detach()), -1)
    (weights @ own["v"]).backward(torch.tensor(dy.astype(np.float64)))
    for n in WRT:
        wanted = own[n].grad.numpy()
        assert np.abs(got[f"d.{n}"].astype(np.float64) - wanted).max() <= 2.0**-6 * np.abs(wanted).max(), n


WRT = ("q", "k", "v")
BACKWARD = [("causal", 64), ("causal", 24), ("plain", 20), ("sliding window", 8), ("softcap", 8), ("bias of heads", 8)]


@functools.cache
def both(name: str, features: int) -> tuple[Executable, Executable]:
    programs = CASES[name].programs(features, wrt=WRT)
    return Executable(programs["forward"], "cuda-sim"), Executable(programs["backward"], "cuda-sim")


def gradients(forward, backward, arrays, dy):
    """What the two programs give, by functions that run them."""
    outputs = forward(arrays)
    kept = {n: a for n, a in outputs.items() if n.startswith("r.")}
    return outputs["y"], backward({**arrays, "d.y": dy, **kept})


@pytest.mark.parametrize(("name", "features"), BACKWARD)
@settings(max_examples=3)
@given(dims=DIMS, seed=st.integers(0, 99))
def test_gradients_are_as_exact_as_their_rounding(name, features, dims, seed):
    """Of torch's autograd in f64, no further than the program before its columns come in blocks."""
    torch = pytest.importorskip("torch")
    case, (forward, backward) = CASES[name], both(name, features)
    arrays = drawn(case, features, dims, seed)
    shape = arrays["q"].shape
    dy = np.random.default_rng(seed).standard_normal(shape).astype(DTYPES["bf16"])
    _, got = gradients(lambda a: checked(forward, a), lambda a: checked(backward, a), arrays, dy)
    before = case.blocked(features, WRT)
    with np.errstate(all="ignore"):
        runs = (functools.partial(run_program, before[n]) for n in ("forward", "backward"))
        _, rounded = gradients(*runs, arrays, dy)
    if 0 in shape:
        return
    given_ = {n: torch.tensor(a, requires_grad=n in WRT) for n, a in wide(arrays).items()}
    masked = {n: a for n, a in given_.items() if n not in WRT}
    y = _torch_oracle(torch, name, given_, masked)
    y.backward(torch.tensor(dy.astype(np.float64)))
    for n in WRT:
        wanted = np.nan_to_num(given_[n].grad.numpy())
        size = np.abs(wanted).max()
        emulated = np.abs(rounded[f"d.{n}"].astype(np.float64) - wanted).max()
        assert np.abs(got[f"d.{n}"].astype(np.float64) - wanted).max() <= 1.5 * emulated + 2.0**-8 * size + 2.0**-18


def test_what_is_infinite_where_a_mask_hides_it_spreads_no_further_than_the_interpreter_says():
    """0 times it is NaN: in all rows of a block that computes with its column, of a warp that leaves it out in none."""
    forward, backward = both("causal", 64)
    arrays = drawn(CASES["causal"], 64, {"B": 1, "H": 1, "S": 128, "T": 1}, 0)
    dy = arrays["q"][..., ::-1].copy()
    arrays["k"][0, 0, 100, 3] = np.inf
    kept = checked(forward, arrays)
    every = {**arrays, **kept, "d.y": dy}
    given_ = {b.name: every[b.name] for b in backward.program.of_kind("input")}
    with np.errstate(all="ignore"):
        wanted = run_program(backward.program, given_)
    got = checked(backward, given_)
    for n in WRT:
        ours, its = (~np.isfinite(a[f"d.{n}"].astype(np.float64)).all(-1)[0, 0] for a in (got, wanted))
        assert ours[100:].all() and not (ours & ~its).any()
    assert its.all() and np.isfinite(got["d.q"][0, 0, :32].astype(np.float64)).all()


def _torch_oracle(torch, name, arrays, more):
    q, k, v = (arrays[n] for n in WRT)
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    row, column = torch.meshgrid(torch.arange(s.shape[-2]), torch.arange(s.shape[-1]), indexing="ij")
    if name in ("causal", "sliding window"):
        hidden = column > row if name == "causal" else (column > row) | (column <= row - 20)
        s = s.masked_fill(hidden, -torch.inf)
    s = 4 * torch.tanh(s / 4) if name == "softcap" else s + more["bias"] if "bias" in more else s
    top = s.amax(-1, keepdim=True)
    each = torch.exp(s - torch.where(top == -torch.inf, 0.0, top))
    total = each.sum(-1, keepdim=True)
    return each / torch.where(total == 0, 1.0, total) @ v


@long_tests.values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "features"),
    [("grouped queries", 32), ("tokens before heads", 16), ("causal", 128), ("causal", 192), ("causal", 256)],
)
def test_gradients_of_what_the_compiler_makes_for_a_gpu_are_torchs(name, features, dtype):
    """Relative to the largest of each, in units of the dtype's rounding; where heads are so wide that registers do
    not suffice the backward has no tile.
    """
    torch = pytest.importorskip("torch")
    case = CASES[name]
    types = {n: t.replace("bf16", dtype) for n, t in case.types(features).items()}
    programs = run_passes(gradc.trace(case.function, **types), WRT, Options(), "cuda")[2]
    assert any(loop.tile for loop in programs["forward"].loops)
    assert any(loop.tile for loop in programs["backward"].loops) == (features <= 128)
    forward, backward = (Executable(programs[n], "cuda-sim") for n in ("forward", "backward"))
    arrays = drawn(case, features, {"B": 2, "H": 1, "S": 67, "T": 67}, 0, dtype)
    dy = np.random.default_rng(1).standard_normal(arrays["q"].shape).astype(DTYPES[dtype])
    y, got = gradients(lambda a: checked(forward, a), lambda a: checked(backward, a), arrays, dy)
    own = {n: torch.tensor(a, requires_grad=True) for n, a in wide(arrays).items()}
    q, k, v = (own[n].transpose(1, 2) if case.tokens_first else own[n] for n in WRT)
    k, v = (x.repeat_interleave(case.groups, 1) for x in (k, v))
    wanted = _torch_oracle(torch, "causal", {"q": q, "k": k, "v": v}, {})
    wanted = wanted.transpose(1, 2) if case.tokens_first else wanted
    wanted.backward(torch.tensor(dy.astype(np.float64)))
    unit = 2.0**-10 if dtype == "f16" else 2.0**-7
    for mine, exact in ((y, wanted.detach()), *((got[f"d.{n}"], own[n].grad) for n in WRT)):
        assert np.abs(mine.astype(np.float64) - exact.numpy()).max() <= unit * np.abs(exact.numpy()).max()


def test_the_order_of_warps_changes_no_bit():
    """Blocks and warps in any order: no sum is shared."""
    case, dims = CASES["causal"], {"B": 1, "H": 2, "S": 130}
    programs = case.programs(64, wrt=WRT)
    arrays = drawn(case, 64, {**dims, "T": 1}, 0)
    arrays["d.y"] = arrays["q"][::-1].copy()
    for program in programs.values():
        seen = []
        for seed in (None, 1, 2):
            own = {b.name: arrays[b.name] for b in program.of_kind("input")}
            types = {b: program.buffer[b].type for _, b in program.outputs}
            own |= {b: np.empty(t.concrete(dims), t.dtype.np) for b, t in types.items()}
            made = CudaProgram(program, lambda text, *_, seed=seed: Simulator(text, check=True, seed=seed))
            made.run(own, made.bind(dims))
            seen.append({name: own[b].tobytes() for name, b in program.outputs})
            arrays |= {name: own[b] for name, b in program.outputs}
        assert seen[0] == seen[1] == seen[2]


@long_tests.values
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("features", [64, 128])
def test_no_access_to_shared_memory_meets_another_in_a_bank(features, direction):
    program = CASES["causal"].programs(features, wrt=WRT)[direction]
    for found in shared_transactions(program, {"B": 1, "H": 1, "S": 128}):
        assert found.count == found.least > 0


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("features", [16, 32, 64, 128])
@pytest.mark.long("gradc/codegen/cuda/tiles/fragments.py", "templates/cuda/tiles.h", "templates/cuda/kernel/tile.cu.j2")
def test_kernels_do_not_spill(features, arch):
    """And what is said of them has their registers and all of their shared memory."""
    for blocked in CASES["causal"].blocked(features, WRT).values():
        program = with_tiles(blocked, device=arch)
        made = Executable(program, "cuda", arch=arch)
        said = "\n".join([*mappings_table(made), *resources_table(made)])
        for kernel in (tile_kernel(loop, program) for loop in program.loops):
            r = made.binary.kernels[kernel.name]
            assert r.registers <= 255 and not r.spill_stores and not r.spill_loads
            assert f"{kernel.name}: tile, because" in said
            assert re.search(rf"{kernel.name} +{r.registers} registers +{kernel.shared} B shared", said)


FORCED = {
    "shared memory": ({"rows": 256, "columns": 512, "tile": Tile("mma", 4, 4)}, r"take \d+ bytes of shared memory"),
    "rows": ({"rows": 40, "columns": 64, "tile": Tile("mma", 4, 2)}, "has a multiple of 64 rows, and a block 40"),
    "columns": ({"rows": 64, "columns": 40, "tile": Tile("mma", 4, 2)}, "one multiple of 16"),
    "stages": ({"rows": 64, "columns": 64, "tile": Tile("mma", 4, 1)}, "is no tile of mma"),
    "parts": ({"rows": 64, "columns": 48, "tile": Tile("mma", 4, 2, parts=2)}, "one multiple of 32"),
    "mapping": ({"rows": 64, "columns": 64, "tile": Tile("wgmma", 4, 2)}, "is no tile of mma"),
    "none": ({"rows": 64, "columns": 64, "tile": None}, "it has no tile"),
}


@pytest.mark.parametrize("target", ["cuda", "cuda-sim"])
@pytest.mark.parametrize("name", FORCED)
def test_a_tile_that_does_not_fit_is_refused_before_anything_runs(name, target):
    sizes, said = FORCED[name]
    program = with_tiles(CASES["causal"].blocked(64)["forward"], **sizes)
    with pytest.raises(Unsupported, match=said):
        Executable(program, target)


def test_a_tile_may_have_any_number_of_warps_and_stages():
    case = CASES["causal"]
    arrays = drawn(case, 64, {"B": 1, "H": 1, "S": 150, "T": 1}, 0)
    wanted = case.oracle(**wide(arrays))
    for rows, columns, tile in ((128, 32, Tile("mma", 4, 3)), (16, 16, Tile("mma", 1, 2)), (96, 48, Tile("mma", 2, 4))):
        program = with_tiles(case.blocked(64)["forward"], rows=rows, columns=columns, tile=tile)
        got = checked(Executable(program, "cuda-sim"), arrays)["y"].astype(np.float64)
        assert np.abs(got - wanted).max() <= 2.0**-7 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_parts_of_a_block_are_blocks(name):
    """A block of columns in parts gives the bits of blocks as wide as a part."""
    case = CASES[name]
    arrays = drawn(case, 64, {"B": 1, "H": 1, "S": 150, "T": 1}, 0)
    arrays["d.y"] = arrays["q"][..., ::-1].copy()
    seen = []
    for columns, parts in ((16, 1), (64, 4), (32, 2)):
        tile, own = Tile("mma", 2, 2, parts=parts), dict(arrays)
        for blocked in case.blocked(64, WRT).values():
            program = with_tiles(blocked, rows=64, columns=columns, tile=tile)
            assert parse_program(str(program)) == program
            inputs = {b.name: own[b.name] for b in program.of_kind("input")}
            own |= checked(Executable(program, "cuda-sim"), inputs)
        seen.append({n: own[n].tobytes() for n in ("y", "d.q", "d.k", "d.v")})
    assert seen[0] == seen[1] == seen[2]


def test_the_kernel_of_attention_is_a_few_pages(golden):
    """With its IR on top; ``--update-golden`` writes it anew."""
    program = CASES["causal"].programs(64)["forward"]
    (loop,) = program.loops
    text = tile_kernel(loop, program).text
    golden("kernels_cuda/attention_tile.cu", text)
    assert len(text.splitlines()) <= 250


def _blocked(function, **types):
    program = run_passes(gradc.trace(function, **types), (), Options(), "cpu")[2]["forward"]
    return carry_sums(split_loops(program))


def _attention(dtype: str, features: int):
    types = dict.fromkeys("qkv", f"{dtype}[B,H,S,{features}]")
    return _blocked(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v), **types)


REFUSED = {
    "dtype": (lambda: _attention("f32", 64), "sm_90", "its products multiply f32"),
    "features": (lambda: _attention("bf16", 512), "sm_90", "512 features|no product"),
    "architecture": (lambda: _attention("bf16", 64), "sm_75", "sm_80 and later"),
    "no product": (lambda: _blocked(lambda x: ops.softmax(x, -1), x="bf16[N,V]"), "sm_90", "no product"),
    "rows added": (
        lambda: carry_sums(CASES["causal"].blocked(64, WRT)["backward"]),
        "sm_90",
        "which other blocks of rows add to",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_a_loop_is_no_tile_is_said(name):
    make, device, said = REFUSED[name]
    program = make()
    reasons = [refusal(loop, program, gpu_of(device)) for loop in program.loops]
    assert reasons and all(reason and re.search(said, reason) for reason in reasons)
    assert all(refusal(loop, program, CPU) for loop in program.loops)


def test_names_of_users_mean_nothing_in_it():
    names = ("there", "factor", "before", "h", "n", "EDGE", "stage", "top", "rows")
    q, k, v, *_ = names
    graph = gradc.trace(
        lambda **x: ops.scaled_dot_product_attention(x[q], x[k], x[v], is_causal=True),
        **dict.fromkeys((q, k, v), "bf16[h,EDGE,n,8]"),
    )
    program = with_tiles(run_passes(graph, (), Options(), "cpu")[2]["forward"])
    case, dims = CASES["causal"], {"B": 1, "H": 1, "S": 20, "T": 1}
    arrays = drawn(case, 8, dims, 0)
    plain = checked(executable("causal", 8), arrays)
    renamed = checked(Executable(program, "cuda-sim"), dict(zip(names, arrays.values(), strict=False)))
    assert [a.tobytes() for a in plain.values()] == [a.tobytes() for a in renamed.values()]


@settings(max_examples=5)
@given(rows=st.integers(1, 80), classes=st.integers(1, 150), seed=st.integers(0, 99))
def test_a_linear_cross_entropy_is_a_tile_too(rows, classes, seed):
    """One sweep of logits that are in no memory, with the logit of each row's class."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((n, 24)).astype(DTYPES["bf16"]) for n in (rows, classes))
    t = np.where(rng.random(rows) < 0.25, -100, rng.integers(0, classes, rows))
    t[0] = 0
    with np.errstate(all="ignore"):
        wanted = CROSS_ENTROPY.oracle(x.astype(np.float64), w.astype(np.float64), t)
    (got,) = checked(_cross_entropy(), {"x": x, "w": w, "t": t}).values()
    np.testing.assert_allclose(float(got), wanted, rtol=2.0**-7)


CROSS_ENTROPY = COLUMN_BLOCKING["linear cross entropy"]


@functools.cache
def _cross_entropy() -> Executable:
    types = {"x": "bf16[N,24]", "w": "bf16[V,24]", "t": "i64[N]"}
    graph = gradc.trace(CROSS_ENTROPY.function, **types)
    program = with_tiles(run_passes(graph, (), Options(), "cpu")[2]["forward"])
    assert len(program.loops) == 1
    return Executable(program, "cuda-sim")


def _dropped(q, k, v, key):
    kept = ops.rand(key, shape=(*q.shape[:-1], k.shape[-2]), stream=0) >= 0.25
    return ops.scaled_dot_product_attention(q, k, v, dropout_p=0.25, dropout_mask=kept)


def _rectified(q, k, v):
    return (ops.relu((q @ k.T).astype("f32")).astype("bf16") @ v).astype("bf16")


def _by_what_is_read(q, k, v, table, document):
    """Of each pair, a bias at their distance, and whether both are of one document."""
    s = ops.mixed_matmul(q, k.T)
    row, column = (ops.iota(shape=s.shape[-2:], axis=axis) for axis in (0, 1))
    s = s + ops.broadcast_to(ops.gather(table, row - column + q.shape[-2], axis=1, oob="error"), s.shape)
    own, other = (ops.broadcast_to(ops.reshape(document, n), s.shape) for n in ((-1, 1), (1, -1)))
    return ops.softmax_matmul(ops.where(own == other, s, s * 0.0 - math.inf), v)


@pytest.mark.parametrize(
    ("function", "more"),
    [(_dropped, {"key": "i64[]"}), (_rectified, {}), (_by_what_is_read, {"table": "f32[2,2*S]", "document": "i64[S]"})],
    ids=["dropout", "relu", "relative positions in documents"],
)
def test_other_forms_are_what_the_interpreter_computes(function, more):
    """Numbers drawn by position, no maximum at all, and what is read at positions."""
    graph = gradc.trace(function, **dict.fromkeys("qkv", "bf16[B,2,S,32]"), **more)
    program = with_tiles(run_passes(graph, (), Options(), "cpu")[2]["forward"])
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 2, 70, 32)).astype(DTYPES["bf16"]) for n in "qkv"}
    drawn_more = {"key": 7, "table": rng.standard_normal((2, 140)).astype(np.float32), "document": np.arange(70) // 25}
    arrays |= {n: np.asarray(drawn_more[n]) for n in more}
    got = checked(Executable(program, "cuda-sim"), arrays)["y"].astype(np.float64)
    wanted = run_program(program, arrays)["y"].astype(np.float64)
    assert np.abs(got - wanted).max() <= 2.0**-8 * np.abs(wanted).max()
