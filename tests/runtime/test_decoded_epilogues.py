"""What meets products by quantized weights in their loop: activations, biases and residuals, a second product of the
same sizes (gate and up), and the second thin product of an adapter.  In cuda-sim that checks races, bounds and
uninitialised memory, against torch in f64.
"""

from __future__ import annotations

from typing import Any

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from skips import compiled  # noqa: E402
from test_decoded_products import FORMATS, drawn  # noqa: E402
from tile_programs import assert_nothing_spills  # noqa: E402

import gradc  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.ir.kernel import Call, Loop, Program  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.passes.column_blocking import tile_rows  # noqa: E402
from gradc.runtime.executable import Executable  # noqa: E402

SCALE = 2.0
"""Of an adapter."""


def types_of(kind: str, formats: tuple[str, ...], dtype: str, m: int, n: int, k: int, rank: int) -> dict[str, Any]:
    types: dict[str, Any] = {"x": f"{dtype}[{m},{k}]"}
    for number, name in enumerate(formats):
        types[f"w{number}"] = FORMATS[name].types(n, k)
        if rank:
            types[f"a{number}"] = {"low": f"{dtype}[{rank},{k}]", "high": f"{dtype}[{n},{rank}]"}
    if kind == "gelu":
        types |= {"bias": f"{dtype}[{n}]", "residual": f"{dtype}[{m},{n}]"}
    return types


def made_of(
    kind: str, formats: tuple[str, ...], dtype: str, m: int, n: int, k: int, rank: int, **options: Any
) -> Program:
    def layer(x: Any, bias: Any = None, residual: Any = None, **p: Any) -> Any:
        y = []
        for number, name in enumerate(formats):
            y.append(ops.linear(x, FORMATS[name].weight(dtype, **p[f"w{number}"])))
            if rank:
                a = p[f"a{number}"]
                y[-1] = y[-1] + ops.linear(ops.linear(x, a["low"]), a["high"]) * SCALE
        if kind == "gelu":
            return ops.gelu(y[0] + bias, approximate="tanh") + residual
        return ops.silu(y[0]) * y[1] if kind == "swiglu" else y[0] if len(y) == 1 else (y[0], y[1])

    graph = gradc.trace(layer, **types_of(kind, formats, dtype, m, n, k, rank))
    return run_passes(graph, (), Options(**{"arch": "sm_90", **options}), "cuda")[2]["forward"]


def exact(kind: str, formats: tuple[str, ...], rank: int, arrays: dict[str, np.ndarray], half: float) -> list[Any]:
    """Results in f64, each with a bound of the error of f32 sums and of values that are rounded once to 16 bits."""
    own = {
        name: torch.tensor(a if a.dtype.kind in "iu" and a.dtype.isbuiltin else a.astype(np.float64))
        for name, a in arrays.items()
    }
    x = own["x"]
    sums = (x.shape[-1] + rank + 8) * 2.0**-23

    def part(name: str) -> dict[str, Any]:
        return {key.partition(".")[2]: value for key, value in own.items() if key.startswith(f"{name}.")}

    y, error = [], []
    for number, name in enumerate(formats):
        weight = FORMATS[name].exact(**part(f"w{number}"))
        y.append(x @ weight.mT)
        error.append(x.abs() @ weight.abs().mT * (half + sums) + y[-1].abs() * half)
        if rank:
            low, high = (part(f"a{number}")[n] for n in ("low", "high"))
            thin = (x @ low.mT) @ high.mT * SCALE
            both = (x.abs() @ low.abs().mT) @ high.abs().mT * SCALE
            y[-1] = y[-1] + thin
            error[-1] = error[-1] + both * (half + 2 * sums) + thin.abs() * half + y[-1].abs() * half
    if kind == "gelu":
        z = y[0] + own["bias"]
        y = [torch.nn.functional.gelu(z, approximate="tanh") + own["residual"]]
        error = [1.13 * (error[0] + z.abs() * half)]
    if kind == "swiglu":
        act = torch.nn.functional.silu(y[0])
        error = [1.1 * error[0] * (y[1].abs() + error[1]) + act.abs() * error[1]]
        y = [act * y[1]]
    return [(a.numpy(), (e + a.abs() * half * 1.01 + 2.0**-20).numpy()) for a, e in zip(y, error, strict=True)]


def assert_close(kind: str, formats: tuple[str, ...], rank: int, made: Program, seed: int) -> None:
    small = {"x": 2.0**-6, "a": 2.0**-3}  # products of two results stay in the range of f16
    arrays = {name: a if name[0] not in small else a * small[name[0]] for name, a in drawn(made, seed).items()}
    arrays = {name: a.astype(made.buffer[name].type.dtype.np) for name, a in arrays.items()}
    with knobs.SIM_CHECK.set(True):
        results = Executable(made, "cuda-sim").run(**arrays)
    half = 2.0**-8 if arrays["x"].dtype.name == "bfloat16" else 2.0**-11
    for got, (wanted, bound) in zip(results.values(), exact(kind, formats, rank, arrays, half), strict=True):
        assert (np.abs(got.astype(np.float64) - wanted) <= bound).all()


def assert_one_loop(made: Program, calls: int) -> None:
    """One loop that decodes, calls of the library for the first thin products alone, and no kernel."""
    assert [type(step) for step in made.steps] == [Call] * calls + [Loop]
    verify_program(made)
    assert parse_program(str(made)) == made


PAIRS = [
    *((name, name) for name in FORMATS),
    ("int8 per channel", "int4 in groups of 128"),
    ("nf4 with double quantisation", "fp8 in blocks"),
]


@settings(max_examples=5)
@given(
    formats=st.sampled_from(PAIRS),
    kind=st.sampled_from(["swiglu", "both"]),
    dtype=st.sampled_from(["bf16", "f16"]),
    m=st.sampled_from([1, 7, 16, 17]),
    n=st.sampled_from([64, 95]),
    k=st.sampled_from([130, 600]),
    rank=st.sampled_from([0, 5, 16]),
    seed=st.integers(0, 99),
)
def test_two_products_are_those_of_f64(formats, kind, dtype, m, n, k, rank, seed):
    form = [FORMATS[name] for name in formats]
    n, k = (
        -(-size // by) * by
        for size, by in ((n, max(f.rows for f in form)), (k, int(np.lcm.reduce([f.multiple for f in form]))))
    )
    made = made_of(kind, formats, dtype, m, n, k, rank)
    assert_close(kind, formats, rank, made, seed)


@settings(max_examples=4)
@given(
    kind=st.sampled_from(["gelu", "one"]),
    name=st.sampled_from(["int8 per channel", "int4 in groups of 32"]),
    dtype=st.sampled_from(["bf16", "f16"]),
    m=st.sampled_from([1, 9, 16, 33]),
    n=st.sampled_from([33, 160]),
    k=st.sampled_from([64, 512]),
    rank=st.sampled_from([0, 1, 4, 24, 64]),
    seed=st.integers(0, 99),
)
def test_adapters_and_activations_are_those_of_f64(kind, name, dtype, m, n, k, rank, seed):
    made = made_of(kind, (name,), dtype, m, n, k, rank)
    assert_close(kind, (name,), rank, made, seed)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_a_layer_is_one_loop(kind, rank, rows):
    formats = ("int4 in groups of 128",) * (2 if kind == "swiglu" else 1)
    assert_one_loop(made_of(kind, formats, "bf16", rows, 4096, 2048, rank), len(formats) * bool(rank))


def test_products_that_wait_for_each_other_have_loops_of_their_own():
    """x W U: the second product reads what the first gives."""
    weight, types = FORMATS["int8 per channel"].weight, FORMATS["int8 per channel"].types(2048, 2048)
    graph = gradc.trace(
        lambda x, w, u: ops.linear(ops.linear(x, weight("bf16", **w)), weight("bf16", **u)),
        x="bf16[16,2048]",
        w=types,
        u=types,
    )
    made = run_passes(graph, (), Options(arch="sm_90"), "cuda")[2]["forward"]
    assert [len(loop.sweeps[0].carries) for loop in made.loops] == [1, 1]


def test_an_adapter_of_another_dtype_leaves_its_product_in_a_loop():
    """Its thin products are f32, which tensor cores are not given."""
    form = FORMATS["int8 per channel"]

    def layer(x: Any, w: Any, low: Any, high: Any) -> Any:
        thin = ops.linear(ops.linear(ops.cast(x, dtype="f32"), low), high)
        return ops.cast(ops.linear(x, form.weight("bf16", **w)), dtype="f32") + thin

    types = {"x": "bf16[16,2048]", "w": form.types(2048, 2048), "low": "f32[16,2048]", "high": "f32[2048,16]"}
    made = run_passes(gradc.trace(layer, **types), (), Options(arch="sm_90"), "cuda")[2]["forward"]
    assert [len(loop.sweeps[0].carries) for loop in made.loops] == [1]
    assert sum(isinstance(step, Call) for step in made.steps) == 2


def test_explain_says_why_two_products_are_not_one_loop(monkeypatch):
    monkeypatch.setattr(tile_rows, "decoded_program_seconds", lambda program, dims, gpu: 1e-6 / len(program.loops))
    types = types_of("swiglu", ("int8 per channel",) * 2, "bf16", 16, 2048, 2048, 0)

    def layer(x: Any, w0: Any, w1: Any) -> Any:
        gate, up = (ops.linear(x, FORMATS["int8 per channel"].weight("bf16", **w)) for w in (w0, w1))
        return ops.silu(gate) * up

    module = gradc.compile(gradc.trace(layer, **types), target="cuda", arch="sm_90")
    assert [len(loop.sweeps[0].carries) for loop in module.forward.program.loops] == [1, 1]
    assert "steps take 1.0 us with matmul_16x2048 in one loop, and 0.5 in two" in module.explain()


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_nothing_spills(name, arch, judged):
    made = (made_of("swiglu", (name, name), "bf16", rows, 1536, 1536, 16, arch=arch) for rows in (1, 16, 64))
    assert_nothing_spills(made, arch, judged)
