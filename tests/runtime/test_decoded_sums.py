"""Gradients of learned scales and zero points as products by codes: in cuda-sim that checks races, bounds and
uninitialised memory, against torch's autograd in f64.
"""

from __future__ import annotations

import functools
from typing import Any

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from skips import compiled  # noqa: E402
from test_decoded_products import FORMATS, Format, _nibbles, _spread, drawn  # noqa: E402
from tile_programs import assert_nothing_spills  # noqa: E402

import gradc  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.ir.kernel import Call, Program  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.runtime.cuda.programs import CudaProgram  # noqa: E402
from gradc.runtime.executable import Executable  # noqa: E402
from gradc.runtime.simulator.device import Simulator  # noqa: E402


def _zeros(group: int) -> Format:
    """int4 with a zero point that is learned, too."""
    return Format(
        lambda n, k: {"q": f"u8[{n},{k // 2}]", **dict.fromkeys("sz", f"f32[{n},{k // group}]")},
        lambda d, q, s, z: ops.dequantize(ops.unpack(q, dtype="u4", axis=1), s, z, block=(1, group), out_dtype=d),
        lambda q, s, z: (_nibbles(q).double() - _spread(z, group)) * _spread(s, group),
        group,
    )


LEARNED = {name: form for name, form in FORMATS.items() if not name.startswith("mx")} | {
    "int4 in groups of 64 with learned zero points": _zeros(64),
    "int8 in groups of 32": Format(
        lambda n, k: {"q": f"i8[{n},{k}]", "s": f"f32[{n},{k // 32}]"},
        lambda d, q, s: ops.dequantize(q, s, block=(1, 32), out_dtype=d),
        lambda q, s: q.double() * _spread(s, 32),
        32,
    ),
}


def learned(types: dict[str, str]) -> tuple[str, ...]:
    """The parts of a weight whose gradients are asked for."""
    return tuple(name for name, type_ in types.items() if name in "szm" and type_.startswith("f"))


@functools.cache
def program(name: str, dtype: str, m: int | str, n: int | str, k: int, arch: str = "sm_90") -> Program:
    form = LEARNED[name]
    types = {"x": f"{dtype}[{m},{k}]", **form.types(n, k)}
    graph = gradc.trace(lambda x, **parts: ops.linear(x, form.weight(dtype, **parts)), **types)
    return run_passes(graph, learned(types), Options(arch=arch), "cuda")[2]["backward"]


def exact(name: str, arrays: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Each gradient in f64, and the sum of its terms' magnitudes: a weight is linear in each of its parts."""
    own = {
        part: torch.tensor(a if a.dtype.kind in "iu" and a.dtype.isbuiltin else a.astype(np.float64))
        for part, a in arrays.items()
        if not part.startswith("r.")
    }
    x, dy = own.pop("x"), own.pop("d.y")
    for part, given in outputs.items():
        own.setdefault(part, torch.ones(given.shape, dtype=torch.float64))  # the gradient needs no value of it
    found = {}
    for part in outputs:
        for of, cotangent in (
            (own, dy.mT @ x),
            ({**own, "z": -own["z"].abs()} if "z" in own else own, dy.abs().mT @ x.abs()),
        ):

            def weight(value: Any, of: dict[str, Any] = of, part: str = part) -> Any:
                return LEARNED[name].exact(**{**of, part: value})

            _, slope = torch.func.jvp(weight, (of[part],), (torch.ones_like(of[part]),))
            _, back = torch.func.vjp(weight, of[part])
            (gradient,) = back(cotangent * (1 if of is own and part not in found else slope.sign()))
            found[part] = (*found.get(part, ()), gradient.numpy())
    return found


def assert_close(name: str, made: Program, seed: int = 0, rounded: float = 0.0) -> None:
    """:param rounded: what the gradient of the weight is rounded by."""
    arrays = drawn(made, seed)
    with knobs.SIM_CHECK.set(True):
        got = {out.removeprefix("d."): a for out, a in Executable(made, "cuda-sim").run(**arrays).items()}
    entries = 2.0**-9 if name.startswith("nf4") else 0.0  # those of a codebook are rounded
    for part, (wanted, magnitudes) in exact(name, arrays, got).items():
        half = 2.0**-11 if got[part].dtype == np.float16 else 2.0**-24
        terms = sum(arrays["x"].shape) + arrays["d.y"].shape[1]
        bound = magnitudes * (entries + rounded + (terms + 8) * 2.0**-23) + np.abs(wanted) * half * 1.01 + 2.0**-24
        assert got[part].shape == wanted.shape
        assert (np.abs(got[part].astype(np.float64) - wanted) <= bound).all()


def assert_one_tile(made: Program, elements: int) -> None:
    """No number of more than 8 bits for each element of the weight is in memory."""
    assert [loop.tile is not None for loop in made.loops] == [True]
    assert not any(isinstance(step, Call) for step in made.steps)
    assert all(b.type.count < elements or b.type.dtype.bits <= 8 for b in made.buffers)
    verify_program(made)
    assert parse_program(str(made)) == made


CASES = [
    (
        name,
        ("bf16", "f16")[n % 2],
        (5, 1, 16, 17)[n % 4],
        (33, 80, 64, 95)[n // 2 % 4],
        (384, 256, 200, 640)[n % 3 + n % 2],
    )
    for n, name in enumerate(LEARNED)
]


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k"), CASES)
def test_values_are_those_of_f64(name, dtype, m, n, k):
    form = LEARNED[name]
    n, k = (-(-size // by) * by for size, by in ((n, form.rows), (k, form.multiple)))
    made = program(name, dtype, m, n, k)
    assert_one_tile(made, n * k)
    assert_close(name, made)


def test_gradients_of_weights_in_blocks():
    """Of more rows than two sums of them fit registers: a sweep of blocks of the weight's gradient, each rounded."""
    name = "int4 in groups of 64 with learned zero points"
    made = program(name, "bf16", 234, 33, 64)
    (loop,) = made.loops
    assert loop.tile is not None and isinstance(loop.sweeps[0].steps[0], Call)
    assert_close(name, made, rounded=2.0**-8)


@pytest.mark.parametrize(
    ("dtype", "rounded", "unit"),
    [("f8e5m2", torch.float8_e5m2, 1.0), ("f8e4m3", torch.float8_e4m3fn, 1.0), ("f16", torch.float16, 2.0**-26)],
)
def test_what_rounds_a_gradient_still_does(dtype, rounded, unit):
    """A cast to a dtype of less range or precision than the product's, of integers that bf16 has."""

    def layer(x: Any, dy: Any, q: Any) -> Any:
        given = ops.cast(ops.matmul(ops.transpose(dy), x), dtype=dtype)
        return ops.sum(ops.cast(given, dtype="f32") * ops.cast(q, dtype="f32"), axis=1)

    graph = gradc.trace(layer, x="bf16[8,128]", dy="bf16[8,32]", q="i8[32,128]")
    made = run_passes(graph, (), Options(arch="sm_90"), "cuda")[2]["forward"]
    rng = np.random.default_rng(0)
    x, dy, q = (torch.tensor(rng.integers(-5, 6, shape)).double() for shape in ((8, 128), (8, 32), (32, 128)))
    product = dy.mT @ x * unit
    wanted = (product.to(rounded).double() * q).sum(1)
    assert (wanted != (product * q).sum(1)).any()
    arrays = {"x": x * unit, "dy": dy, "q": q}
    arrays = {name: a.numpy().astype(made.buffer[name].type.dtype.np) for name, a in arrays.items()}
    with knobs.SIM_CHECK.set(True):
        (got,) = Executable(made, "cuda-sim").run(**arrays).values()
    assert (got == wanted.numpy()).all()


@pytest.mark.parametrize("sizes", [(0, 64, 64), (3, 0, 64), (3, 64, 0)])
def test_empty_sizes(sizes):
    made = program("int8 in groups of 32", "bf16", *sizes)
    got = Executable(made, "cuda-sim").run(**drawn(made, 0))["d.s"]
    assert got.shape == (sizes[1], sizes[2] // 32)
    assert (got == 0).all()


def test_the_order_of_warps_changes_no_bit():
    made = program("int8 in groups of 32", "bf16", 5, 80, 384)
    assert_one_tile(made, 80 * 384)
    arrays, seen = drawn(made, 0), []
    out = {b.name: np.empty(b.type.shape, b.type.dtype.np) for b in made.of_kind("output") if not b.alias}
    for seed in (None, 1, 2):
        own = {**arrays, **{name: np.empty_like(a) for name, a in out.items()}}
        native = CudaProgram(made, lambda text, *_, seed=seed: Simulator(text, check=True, seed=seed))
        native.run(own, native.bind({}))
        seen.append([own[name].tobytes() for name in out])
    assert seen[0] == seen[1] == seen[2]


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_nothing_spills(name, arch, judged):
    assert_nothing_spills((program(name, "bf16", rows, 1536, 1536, arch) for rows in (1, 16, 64)), arch, judged)
