"""Products by quantized weights whose codes a loop on tensor cores decodes, forward and the gradient of x: in cuda-sim
that checks races, bounds and uninitialised memory, against torch in f64.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from skips import compiled  # noqa: E402
from tile_programs import assert_nothing_spills, shared_transactions  # noqa: E402
from torch_oracles import NF4  # noqa: E402

import gradc  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.codegen.cuda.tiles.kernel import tile_kernel  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.errors import Unsupported  # noqa: E402
from gradc.ir.kernel import Call, Program, Tile  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.runtime.cuda.programs import CudaProgram  # noqa: E402
from gradc.runtime.executable import Executable  # noqa: E402
from gradc.runtime.simulator.device import Simulator  # noqa: E402


@dataclass(frozen=True)
class Format:
    """A weight ``[N, K]``.

    :param types: of its parts, for N and K.  :param weight: gradc's, of the parts and the dtype of x.
    :param exact: torch's in f64, of the parts in f64, or as they are if they are integers.
    :param multiple: what K is a multiple of, and :param rows: N.
    """

    types: Callable[[int, int], dict[str, str]]
    weight: Callable[..., Any]
    exact: Callable[..., Any]
    multiple: int = 1
    rows: int = 1


def _nibbles(q: Any) -> Any:
    return torch.stack([q & 15, q >> 4], -1).reshape(q.shape[0], -1).to(torch.int64)


def _spread(s: Any, by: int) -> Any:
    return s.repeat_interleave(by, 1)


def _signed(codes: Any) -> Any:
    return ((codes + 8) % 16 - 8).double()


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of the OCP Microscaling Formats Specification 1.0, table 5."""


def _int4(group: int, dtype: str = "u4", zero: str = "u8", scale: str = "f16") -> Format:
    own = {"z": zero, "s": scale} if zero else {"s": scale}
    codes = _signed if dtype == "i4" else lambda c: c.double()
    return Format(
        lambda n, k: {"q": f"u8[{n},{k // 2}]", **{name: f"{of}[{n},{k // group}]" for name, of in own.items()}},
        lambda d, q, s, z=None: ops.dequantize(
            ops.unpack(q, dtype=dtype, axis=1), s, *([] if z is None else [z]), block=(1, group), out_dtype=d
        ),
        lambda q, s, z=None: (
            (codes(_nibbles(q)) - (0 if z is None else _spread(z, group).double())) * _spread(s, group)
        ),
        group,
    )


def _rows(of: str) -> Format:
    return Format(
        lambda n, k: {"q": f"{of}[{n},{k}]", "s": f"f32[{n},1]"},
        lambda d, q, s: ops.dequantize(q, s, block=(1, q.shape[1]), out_dtype=d),
        lambda q, s: q.double() * s,
    )


FORMATS = {
    "int8 per channel": _rows("i8"),
    "uint8 per channel": _rows("u8"),
    "fp8 per channel": _rows("f8e4m3"),
    "fp8 e5m2 per channel": _rows("f8e5m2"),
    "int8 per tensor": Format(
        lambda n, k: {"q": f"i8[{n},{k}]", "s": "f32[1,1]"},
        lambda d, q, s: ops.dequantize(q, s, out_dtype=d),
        lambda q, s: q.double() * s,
    ),
    "fp8 in blocks": Format(
        lambda n, k: {"q": f"f8e4m3[{n},{k}]", "s": f"f32[{n // 16},{k // 64}]"},
        lambda d, q, s: ops.dequantize(q, s, block=(16, 64), out_dtype=d),
        lambda q, s: q.double() * _spread(s, 64).repeat_interleave(16, 0),
        64,
        16,
    ),
    "int4 in groups of 32": _int4(32),
    "int4 in groups of 128": _int4(128),
    "int4 in groups of 24": _int4(24),
    "int4 in groups of 256": _int4(256),
    "int4 in groups of 32, signed zero points": _int4(32, zero="i8", scale="f32"),
    "signed int4 in groups of 64": _int4(64, "i4", zero=""),
    "signed int4 in groups of 64, zero points": _int4(64, "i4", zero="i8"),
    "nf4 with double quantisation": Format(
        lambda n, k: {"q": f"u8[{n},{k // 2}]", "c": f"i8[{n * k // 64}]", "s": f"f32[{n * k // 1024}]", "m": "f32[]"},
        lambda d, q, c, s, m: ops.dequantize_nf4(
            q,
            ops.reshape(ops.dequantize(c, s, block=(16,)) + m, shape=(q.shape[0], q.shape[1] // 32)),
            block=(1, 64),
            out_dtype=d,
        ),
        lambda q, c, s, m: (
            torch.tensor(NF4, dtype=torch.float64)[_nibbles(q)]
            * _spread((c.double() * s.repeat_interleave(16) + m).reshape(q.shape[0], -1), 64)
        ),
        64,
        16,
    ),
    "mxfp4": Format(
        lambda n, k: {"q": f"u8[{n},{k // 2}]", "s": f"e8m0[{n},{k // 32}]"},
        lambda d, q, s: ops.dequantize(ops.unpack(q, dtype="f4e2m1", axis=1), s, block=(1, 32), out_dtype=d),
        lambda q, s: torch.tensor(E2M1, dtype=torch.float64)[_nibbles(q)] * _spread(s, 32),
        32,
    ),
    "mxfp8": Format(
        lambda n, k: {"q": f"f8e4m3[{n},{k}]", "s": f"e8m0[{n},{k // 32}]"},
        lambda d, q, s: ops.dequantize(q, s, block=(1, 32), out_dtype=d),
        lambda q, s: q.double() * _spread(s, 32),
        32,
    ),
}
DIRECTIONS = ("forward", "dx")


@functools.cache
def program(name: str, direction: str, dtype: str, m: int, n: int, k: int, arch: str = "sm_90") -> Program:
    form = FORMATS[name]
    types = {"x": f"{dtype}[{m},{k if direction == 'forward' else n}]", **form.types(n, k)}

    def product(x: Any, **parts: Any) -> Any:
        weight = form.weight(dtype, **parts)
        return ops.linear(x, weight) if direction == "forward" else x @ weight

    graph = gradc.trace(product, **types)
    return run_passes(graph, (), Options(arch=arch), "cuda")[2]["forward"]


def drawn(made: Program, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def of(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype in ("i8", "u8"):
            return (
                rng.integers(-128, 128, shape) if dtype == "i8" else rng.integers(0, 16 if name == "z" else 256, shape)
            )
        return 2.0 ** rng.integers(-3, 4, shape) if dtype == "e8m0" else rng.standard_normal(shape)

    inputs = [b for b in made.of_kind("input") if not b.alias]
    return {b.name: np.asarray(of(b.name, b.type.shape, b.type.dtype.name)).astype(b.type.dtype.np) for b in inputs}


def exact(name: str, direction: str, arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """The product in f64, and that of magnitudes."""
    own = {
        n: torch.tensor(a if a.dtype.kind in "iu" and a.dtype.isbuiltin else a.astype(np.float64))
        for n, a in arrays.items()
    }
    x = own.pop("x")
    weight = FORMATS[name].exact(**own)
    weight = weight.mT if direction == "forward" else weight
    return (x @ weight).numpy(), (x.abs() @ weight.abs()).numpy()


def assert_close(name: str, direction: str, made: Program, seed: int) -> None:
    """Each weight is rounded once to 16 bits, and the result: no more."""
    arrays = drawn(made, seed)
    with knobs.SIM_CHECK.set(True):
        got = Executable(made, "cuda-sim").run(**arrays)["y"]
    wanted, magnitudes = exact(name, direction, arrays)
    half = 2.0**-8 if got.dtype.name == "bfloat16" else 2.0**-11  # of a unit, of 8 bits and of 11
    terms = arrays["x"].shape[-1]
    bound = magnitudes * (half + (terms + 8) * 2.0**-23) + np.abs(wanted) * half * 1.01 + 2.0**-24
    assert got.shape == wanted.shape
    assert (np.abs(got.astype(np.float64) - wanted) <= bound).all()


def assert_one_tile(made: Program) -> None:
    (loop,) = made.loops
    assert loop.tile is not None
    assert not any(isinstance(step, Call) for step in made.steps)
    verify_program(made)
    assert parse_program(str(made)) == made


@long_tests.values
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=3)
@given(
    dtype=st.sampled_from(["bf16", "f16"]),
    m=st.sampled_from([1, 7, 16, 17]),
    n=st.sampled_from([33, 64, 95, 131]),
    k=st.sampled_from([63, 130, 257, 600]),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_f64(name, direction, dtype, m, n, k, seed):
    form = FORMATS[name]
    n, k = (-(-size // by) * by for size, by in ((n, form.rows), (k, form.multiple)))
    made = program(name, direction, dtype, m, n, k)
    assert_one_tile(made)
    assert_close(name, direction, made, seed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_are_one_kernel(name, direction):
    for rows in (1, 16):
        assert_one_tile(program(name, direction, "bf16", rows, 1536, 1536))
    assert_one_tile(program(name, direction, "f16", 7, 1536, 1536))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("dtype", "scale"), [("f16", np.inf), ("bf16", 2.0**124), ("bf16", 2.0**127), ("f32", 2.0**-140)]
)
def test_scales_at_the_ends_of_their_range(direction, dtype, scale):
    """Large ones give what is finite of finite products, and infinite ones nothing that is finite where x is not 0."""
    n, k, group = 32, 128, 64
    rng = np.random.default_rng(0)
    q, z = rng.integers(0, 256, (n, k // 2)).astype(np.uint8), np.full((n, k // group), 255, np.uint8)
    z[::2] = 7
    s = np.ones((n, k // group))
    s[:, 0] = np.where(np.arange(n) % 3 == 0, scale, 1)
    q[3, : group // 2] = 0x77
    z[3] = 7  # weights that are 0, whatever their scale
    along = k if direction == "forward" else n
    x = np.zeros((2, along))
    x[0, 5], x[1] = 2.0**-12, 2.0**-20 * rng.integers(-4, 5, along)

    def product(x: Any, q: Any, s: Any, z: Any) -> Any:
        own = ops.dequantize(ops.unpack(q, dtype="u4", axis=1), s, z, block=(1, group), out_dtype="bf16")
        return ops.linear(x, own) if direction == "forward" else x @ own

    types = {"x": f"bf16[2,{along}]", "q": f"u8[{n},{k // 2}]", "s": f"{dtype}[{n},{k // group}]"}
    types["z"] = f"u8[{n},{k // group}]"
    made = run_passes(gradc.trace(product, **types), (), Options(arch="sm_90"), "cuda")[2]["forward"]
    assert_one_tile(made)
    arrays = {"x": x, "q": q, "s": s, "z": z}
    arrays = {name: a.astype(made.buffer[name].type.dtype.np) for name, a in arrays.items()}
    with knobs.SIM_CHECK.set(True):
        got = Executable(made, "cuda-sim").run(**arrays)["y"].astype(np.float64)
    spread = torch.tensor(arrays["s"].astype(np.float64)).repeat_interleave(group, 1)
    weight = (_nibbles(torch.tensor(q)).double() - torch.tensor(z).double().repeat_interleave(group, 1)) * spread
    weight = (weight.mT if direction == "forward" else weight).numpy()
    with np.errstate(invalid="ignore"):
        wanted, magnitudes = x @ weight, np.abs(x) @ np.abs(weight)
    finite = np.isfinite(wanted) & (np.abs(weight) < 2.0**128).all(0)  # a weight in bf16 is infinite else
    assert np.isfinite(got[finite]).all() and finite.any()
    assert not np.isfinite(got[~np.isfinite(wanted)]).any()
    assert (np.abs(got - wanted)[finite] <= magnitudes[finite] * 2.0**-7 + 2.0**-133).all()


def _high_bits(q: Any) -> Any:
    return ops.right_shift(q, 4)


def _sliced(begin: int) -> Callable[[Any], Any]:
    return lambda q: ops.unpack(q, dtype="u4", axis=1)[:, begin:]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("codes", "exact_codes"),
    [
        (_high_bits, lambda q: q >> 4),  # a shift of the code itself, by as many bits as a run of columns has
        *((_sliced(n), lambda q, n=n: _nibbles(q)[:, n:]) for n in (1, 2, 7, 16)),  # from the middle of a byte on, too
    ],
    ids=["high bits", "from 1", "from 2", "from 7", "from 16"],
)
def test_codes_that_are_bits_or_parts_of_others(direction, codes, exact_codes):
    rng, (n, k) = np.random.default_rng(0), (96, 640)
    q, s = rng.integers(0, 256, (n, k)).astype(np.uint8), rng.standard_normal((n, 1)).astype(np.float32)
    weight = exact_codes(torch.tensor(q)).double() * torch.tensor(s)
    weight = weight.mT if direction == "forward" else weight
    x = torch.tensor(rng.standard_normal((3, weight.shape[0]))).to(torch.bfloat16)

    def product(x: Any, q: Any, s: Any) -> Any:
        own = ops.cast(ops.cast(codes(q), dtype="f32") * s, dtype="bf16")
        return ops.linear(x, own) if direction == "forward" else x @ own

    types = {"x": f"bf16[3,{weight.shape[0]}]", "q": f"u8[{n},{k}]", "s": f"f32[{n},1]"}
    made = run_passes(gradc.trace(product, **types), (), Options(arch="sm_90"), "cuda")[2]["forward"]
    with knobs.SIM_CHECK.set(True):
        arrays = {"x": x.double().numpy().astype(made.buffer["x"].type.dtype.np), "q": q, "s": s}
        got = Executable(made, "cuda-sim").run(**arrays)["y"].astype(np.float64)
    wanted, magnitudes = (x.double() @ weight).numpy(), (x.double().abs() @ weight.abs()).numpy()
    assert (np.abs(got - wanted) <= magnitudes * 2.0**-8 * 1.01 + np.abs(wanted) * 2.0**-8 * 1.01).all()


def _of_groups(values: Any, scales: Any) -> Any:
    (n, k), (_, groups) = values.shape, scales.shape
    spread = ops.reshape(values, shape=(n, groups, k // groups)) * ops.reshape(scales, shape=(n, groups, 1))
    return ops.cast(ops.reshape(spread, shape=(n, k)), dtype="bf16")


def _whole(q: Any, dtype: str = "u4") -> Any:
    return ops.cast(ops.unpack(q, dtype=dtype, axis=1), dtype="f32")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("k", "group", "weight", "exact_weight", "paired"),
    [
        # scales of 2 bytes of which a block of columns has one, in another half of a word than the block before
        (2048, 1024, lambda q, s, z: _of_groups(_whole(q), s), lambda q, s, z: _nibbles(q) * s, True),
        # a scale of columns that are not there is infinite
        (1600, 64, lambda q, s, z: _of_groups(_whole(q), ops.reciprocal(s)), lambda q, s, z: _nibbles(q) / s, True),
        (128, 64, lambda q, s, z: _of_groups(_whole(q) - 8.0, s), lambda q, s, z: (_nibbles(q) - 8) * s, True),
        # neighbouring lanes have scales of their own
        (256, 16, lambda q, s, z: _of_groups(_whole(q), s), lambda q, s, z: _nibbles(q) * s, True),
        # differences of 9 bits
        (
            128,
            64,
            lambda q, s, z: ops.dequantize(ops.unpack(q, dtype="i4", axis=1), s, z, block=(1, 64), out_dtype="bf16"),
            lambda q, s, z: (_signed(_nibbles(q)) - z) * s,
            False,
        ),
    ],
    ids=[
        "a group of a block",
        "reciprocal scales",
        "a constant zero point",
        "a group of a lane",
        "a zero point of 9 bits",
    ],
)
def test_weights_of_groups_are_exact_before_they_are_rounded(direction, k, group, weight, exact_weight, paired):
    n, rng = 48, np.random.default_rng(0)
    types = {"q": f"u8[{n},{k // 2}]", "s": f"f16[{n},{k // group}]", "z": f"u8[{n},{k // group}]"}
    arrays = {"q": rng.integers(0, 256, (n, k // 2)).astype(np.uint8)}
    arrays["s"] = (2.0 ** rng.integers(-3, 4, (n, k // group))).astype(np.float16)
    arrays["z"] = rng.integers(249, 256, (n, k // group)).astype(np.uint8)

    def product(x: Any, q: Any, s: Any, z: Any) -> Any:
        own = weight(q, ops.cast(s, dtype="f32"), z)
        return ops.linear(x, own) if direction == "forward" else x @ own

    size = k if direction == "forward" else n
    graph = gradc.trace(product, x=f"bf16[7,{size}]", **types)
    made = run_passes(graph, (), Options(arch="sm_90"), "cuda")[2]["forward"]
    assert_one_tile(made)
    assert ("digits<" in tile_kernel(made.loops[0], made).text) == paired
    places = rng.choice(size, 7, replace=False)
    places[0] = size - 1
    arrays["x"] = np.eye(size)[places].astype(made.buffer["x"].type.dtype.np)
    with knobs.SIM_CHECK.set(True):
        got = Executable(made, "cuda-sim").run(**arrays)["y"]
    spread = (_spread(torch.tensor(arrays[name]).double(), group) for name in ("s", "z"))
    wanted = exact_weight(torch.tensor(arrays["q"]), *spread)
    wanted = (wanted.mT if direction == "forward" else wanted)[places]
    assert (got.astype(np.float64) == wanted.to(torch.bfloat16).double().numpy()).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sizes", [(0, 64, 64), (3, 0, 64), (3, 64, 0)])
def test_empty_sizes(direction, sizes):
    made = program("int8 per channel", direction, "bf16", *sizes)
    assert_close("int8 per channel", direction, made, 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["int8 per channel", "int4 in groups of 128"])
def test_the_order_of_warps_changes_no_bit(name, direction):
    made = program(name, direction, "bf16", 7, 160, 1024)
    assert_one_tile(made)
    arrays, seen = drawn(made, 0), []
    for seed in (None, 1, 2):
        (y,) = (made.buffer[b].type for _, b in made.outputs)
        own = {**arrays, "y": np.empty(y.shape, y.dtype.np)}
        native = CudaProgram(made, lambda text, *_, seed=seed: Simulator(text, check=True, seed=seed))
        native.run(own, native.bind({}))
        seen.append(own["y"].tobytes())
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    ("name", "scaled", "at_once"),
    [
        ("int4 in groups of 32", 32, {"u8", "u16"}),
        ("int4 in groups of 32, signed zero points", 32, {"i8", "f32"}),
        ("int4 in groups of 128", 128, set()),
        ("int4 in groups of 256", 128, set()),
        ("signed int4 in groups of 64, zero points", 64, {"i8", "u16"}),
    ],
)
def test_runs_share_what_is_loaded_and_multiplied_once(name, scaled, at_once, dtype):
    """Of 128 columns of a warp."""
    made = program(name, "forward", dtype, 16, 48, 1024 + 256)
    assert_one_tile(made)
    (loop,) = made.loops
    own = replace(loop, by=32, sweeps=tuple(replace(s, by=512) for s in loop.sweeps), tile=Tile("mma", 4, 2, 4))
    made = replace(made, steps=tuple(own if step is loop else step for step in made.steps))
    text = tile_kernel(own, made).text
    assert f", {scaled}>(" in text
    found = set(re.findall(r"gradc_part<(\w+)>", text)) | ({"u8", "i8"} if "gradc_twice" in text else set())
    assert at_once <= found and (at_once or not found)
    assert_close(name, "forward", made, 0)


@pytest.mark.parametrize("name", ["int4 in groups of 32, signed zero points", "int4 in groups of 128"])
def test_columns_of_a_warp_that_are_no_whole_groups(name):
    """192 of each of two warps: the second one's begin within a group of 128, and have six of 32."""
    made = program(name, "forward", "bf16", 7, 48, 640)
    (loop,) = made.loops
    own = replace(loop, by=32, sweeps=tuple(replace(s, by=384) for s in loop.sweeps), tile=Tile("mma", 2, 2, 2))
    assert_close(name, "forward", replace(made, steps=tuple(own if s is loop else s for s in made.steps)), 0)


@pytest.mark.parametrize("name", ["int8 per channel", "mxfp4"])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5])
def test_rows_of_a_warp_are_exact_or_refused(name, tiles):
    """Codes along rows: a lane has two neighbours for each 16 rows of its warp, and loads their bytes at once."""
    made = program(name, "dx", "bf16", 5, 64, 160)
    (loop,) = made.loops
    own = replace(loop, by=32 * tiles, sweeps=tuple(replace(s, by=32) for s in loop.sweeps), tile=Tile("mma", 2, 2))
    made = replace(made, steps=tuple(own if step is loop else step for step in made.steps))
    if tiles in (3, 5):
        with pytest.raises(Unsupported, match=f"a lane has {2 * tiles} neighbouring rows"):
            Executable(made, "cuda-sim")
    else:
        assert_close(name, "dx", made, 0)


@pytest.mark.parametrize("name", ["int8 per channel", "int4 in groups of 32", "int4 in groups of 128"])
def test_loads_of_a_warp_are_of_other_banks(name):
    """Copies of few bytes a row may meet, which are a small part."""
    (found,) = shared_transactions(program(name, "forward", "bf16", 4, 64, 1024), {})
    assert found.least <= found.count <= found.least * 1.03


def test_many_rows_are_the_librarys_and_explain_says_why():
    types = {"x": "bf16[4096,4096]", **FORMATS["int8 per channel"].types(4096, 4096)}
    module = gradc.compile(
        gradc.trace(lambda x, q, s: ops.linear(x, FORMATS["int8 per channel"].weight("bf16", q, s)), **types),
        target="cuda",
        arch="sm_90",
    )
    program_ = module.executables["forward"].program
    assert any(isinstance(step, Call) for step in program_.steps) and not program_.loops
    assert "4096 features" in module.explain()


@pytest.mark.parametrize("rows", [96, 128, 192])
def test_what_is_predicted_to_take_longer_stays_two_steps(rows):
    """Either there is one kernel, or the reason has both times."""
    types = {"x": f"bf16[{rows},4096]", **FORMATS["int8 per channel"].types(4096, 4096)}
    weight = FORMATS["int8 per channel"].weight
    graph = gradc.trace(lambda x, q, s: x @ weight("bf16", q, s), **types)
    pipeline, _, found = run_passes(graph, (), Options(arch="sm_90"), "cuda")
    stage = next(s.result for s in pipeline.stages if s.name == "forward.tile_rows")
    assert bool(found["forward"].loops) != any("registers" in m.why or " us " in m.why for m in stage.untiled)


def test_what_does_not_fit_says_how_much_of_what():
    made = run_passes(
        gradc.trace(
            lambda x, q, s: ops.linear(x, FORMATS["int8 per channel"].weight("bf16", q, s)),
            x="bf16[256,4096]",
            **FORMATS["int8 per channel"].types(4096, 4096),
        ),
        (),
        Options(arch="sm_90"),
        "cuda",
    )[0]
    (missed,) = next(s.result for s in made.stages if s.name == "forward.tile_rows").untiled
    *_, registers, taken, most, shared = map(int, re.findall(r"\d+", missed.why))
    assert registers > most or taken > shared


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_nothing_spills(name, direction, arch, judged):
    n = k = 1536
    assert_nothing_spills((program(name, direction, "bf16", m, n, k, arch) for m in (1, 16, 64)), arch, judged)


OF_MORE = {
    "a power": lambda w: ops.exp(ops.log(ops.abs(w) + 1.0) * 1.7),
    "clipped": lambda w: ops.maximum(ops.minimum(w, 3.0), -3.0),
    "GELU": ops.gelu,
}
"""What a weight may be beside a code less a zero point, times a scale."""


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_weights_of_more_statements_spill_nothing(arch, judged):
    """Of few rows, where shared memory suffices for two blocks of a multiprocessor."""
    n = k = 4096
    types = {"x": f"bf16[8,{k}]", **_int4(64).types(n, k)}

    def made(body: Callable[[Any], Any]) -> Program:
        def product(x: Any, q: Any, s: Any, z: Any) -> Any:
            codes = ops.unpack(q, dtype="u4", axis=1)
            own = body(ops.dequantize(codes, ops.cast(s, dtype="f32"), z, block=(1, 64), out_dtype="f32"))
            return ops.linear(x, ops.cast(own, dtype="bf16"))

        made = run_passes(gradc.trace(product, **types), (), Options(arch=arch), "cuda")[2]["forward"]
        assert_one_tile(made)
        return made

    assert_nothing_spills(map(made, OF_MORE.values()), arch, judged)
