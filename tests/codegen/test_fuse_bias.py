"""Products with a bias: what the pass makes one call of, what that computes, and what cuBLASLt is asked, by a stand-in
of NumPy's that reads the descriptors and the addresses that it is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cublaslt import Lt

import gradc
from gradc import interp, ops
from gradc.codegen.cuda.actions import Launch, Library
from gradc.errors import DeviceError, GradcError, Unsupported
from gradc.ir.epilogue import Epilogue
from gradc.ir.kernel import Call, Kernel
from gradc.ir.program_text import parse_program
from gradc.ir.types import BF16, DTYPES
from gradc.ir.verify import verify_program
from gradc.runtime.cuda import cublas
from gradc.runtime.cuda.device import Span
from gradc.runtime.executable import Executable
from gradc.runtime.simulator.device import Simulator

UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
"""Half the distance from 1 to the next number."""


# -- which products ----------------------------------------------------------------------------------------------------


def linear(x: Any, w: Any, b: Any) -> Any:
    return ops.linear(x, w, b)


def shared(x: Any, w: Any, b: Any) -> Any:
    y = ops.matmul(x, ops.transpose(w, (1, 0)))
    return {"y": y + b, "product": y}


def shared_by_gelu(x: Any, w: Any, b: Any) -> Any:
    y = x @ w
    return {"y": ops.gelu(y + b, approximate="tanh"), "product": y}


def multiplied_again(x: Any, w: Any, b: Any) -> Any:
    y = x @ w
    return {"y": y + b, "z": ops.transpose(y, (1, 0)) @ x}


def moved(x: Any, w: Any, b: Any) -> Any:
    """Rows of the product, in another order."""
    y = ops.reshape(x @ w, (2, 20, 40))
    return ops.reshape(ops.transpose(y, (1, 0, 2)) + b, (40, 40))


def twice(x: Any, w: Any, b: Any) -> Any:
    y = x @ w
    return {"y": y + y, "z": ops.exp(b)}


FUSED: dict[str, tuple[Callable[..., Any], dict[str, str], int]] = {
    "linear": (linear, {"x": "bf16[N,24]", "w": "bf16[40,24]", "b": "bf16[40]"}, 1),
    "f16": (linear, {"x": "f16[N,24]", "w": "f16[40,24]", "b": "f16[40]"}, 1),
    "f32": (linear, {"x": "f32[N,24]", "w": "f32[40,24]", "b": "f32[40]"}, 1),
    "batch of rows": (linear, {"x": "bf16[3,N,24]", "w": "bf16[40,24]", "b": "bf16[40]"}, 1),
    "more axes": (linear, {"x": "bf16[3,N,5,24]", "w": "bf16[40,24]", "b": "bf16[40]"}, 1),
    "the bias first": (lambda x, w, b: b + x @ w, {"x": "f32[N,24]", "w": "f32[24,40]", "b": "f32[40]"}, 1),
    "two layers": (
        lambda x, w, b: ops.linear(ops.linear(x, w, b), w, b),
        {"x": "bf16[N,24]", "w": "bf16[24,24]", "b": "bf16[24]"},
        2,
    ),
    "read by others": (shared, {"x": "f32[N,24]", "w": "f32[40,24]", "b": "f32[40]"}, 0),
    "read by others, with GELU": (shared_by_gelu, {"x": "bf16[N,64]", "w": "bf16[64,128]", "b": "bf16[128]"}, 0),
    "read by another product": (multiplied_again, {"x": "f32[N,24]", "w": "f32[24,40]", "b": "f32[40]"}, 0),
    "in another order": (moved, {"x": "f32[40,24]", "w": "f32[24,40]", "b": "f32[40]"}, 0),
    "reversed": (lambda x, w, b: ops.flip(x @ w, 0) + b, {"x": "f32[N,24]", "w": "f32[24,40]", "b": "f32[40]"}, 0),
    "more than a sum": (
        lambda x, w, b: ops.tanh(ops.linear(x, w, b)),
        {"x": "bf16[N,24]", "w": "bf16[40,24]", "b": "bf16[40]"},
        0,
    ),
    "odd columns": (linear, {"x": "bf16[N,24]", "w": "bf16[41,24]", "b": "bf16[41]"}, 0),
    "odd sums": (linear, {"x": "bf16[N,23]", "w": "bf16[40,23]", "b": "bf16[40]"}, 0),
    "unknown columns": (linear, {"x": "bf16[N,24]", "w": "bf16[V,24]", "b": "bf16[V]"}, 0),
    "f64": (linear, {"x": "f64[N,24]", "w": "f64[40,24]", "b": "f64[40]"}, 0),
    "along rows": (lambda x, w, b: x @ w + b, {"x": "f32[40,24]", "w": "f32[24,40]", "b": "f32[40,1]"}, 0),
    "the matrix twice": (twice, {"x": "f32[N,24]", "w": "f32[24,40]", "b": "f32[40]"}, 0),
    "a wide bias": (lambda x, w, b: x @ w + b, {"x": "f32[N,24]", "w": "f32[24,40]", "b": "f32[N,40]"}, 0),
    "batch": (lambda x, w, b: x @ w + b, {"x": "f32[3,N,24]", "w": "f32[3,24,40]", "b": "f32[40]"}, 0),
}  # fmt: skip


def calls(module: gradc.Module) -> list[Call]:
    return [step for step in module.forward.program.steps if isinstance(step, Call)]


@pytest.mark.parametrize("case", FUSED)
def test_which_products_take_their_bias(case: str) -> None:
    function, types, count = FUSED[case]
    module = gradc.compile(gradc.trace(function, **types), target="cuda", arch="sm_90")
    program = module.forward.program
    assert sum(call.epilogue.bias is not None for call in calls(module)) == count
    assert bool(count) == (not any(isinstance(step, Kernel) for step in program.steps))
    assert parse_program(str(program)) == program
    assert (" + b[n]" in str(program)) == bool(count)


def test_rounding_before_the_bias_is_kept_where_it_is_asked_for() -> None:
    function, types, _ = FUSED["linear"]
    graph = gradc.trace(function, **types)
    for target, options in (("cuda", {"numerics": "strict"}), ("cuda", {"fuse": False}), ("cpu", {})):
        assert not any(c.epilogue for c in calls(gradc.compile(graph, target=target, **options)))


# -- what they compute -------------------------------------------------------------------------------------------------


def drawn(types: dict[str, str], n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, text in types.items():
        dtype, shape = text[:-1].split("[")
        sizes = [n if s == "N" else int(s) for s in shape.split(",")]
        arrays[name] = rng.standard_normal(sizes).astype(DTYPES[dtype].np)
    return arrays


@pytest.mark.parametrize("n", [0, 1, 13])
@pytest.mark.parametrize("case", [name for name, (_, _, count) in FUSED.items() if count == 1])
def test_values(case: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch in f64: the sum and its bias, rounded once; cuBLASLt's part by its stand-in."""
    torch = pytest.importorskip("torch")
    lt = Lt.installed(monkeypatch)
    function, types, _ = FUSED[case]
    module = gradc.compile(gradc.trace(function, **types), target="cuda-sim")
    values = drawn(types, n)
    x, w, b = (torch.from_numpy(values[name].astype(np.float64)) for name in "xwb")
    wanted = (x @ w + b if case == "the bias first" else torch.nn.functional.linear(x, w, b)).numpy()
    size = (x.abs() @ (w if case == "the bias first" else w.T).abs() + b.abs()).numpy()
    unit = UNIT[types["x"].split("[")[0]]
    bound = unit * np.abs(wanted) + 30 * 2.0**-24 * size
    y = np.asarray(module(**values)).astype(np.float64)
    assert y.shape == wanted.shape and (np.abs(y - wanted) <= bound).all()
    assert lt.products == (1 if n else 0)
    found = interp.run(module.forward.program, values)["y"].astype(np.float64)
    assert (np.abs(found - wanted) <= bound).all()


def test_it_is_rounded_once() -> None:
    """256 + 1 is no bf16, and 256 + 1 + 1 is."""
    function, types, _ = FUSED["linear"]
    program = gradc.compile(gradc.trace(function, **types), target="cuda-sim").forward.program
    bf16 = BF16.np
    x, w = np.zeros((1, 24), bf16), np.zeros((40, 24), bf16)
    x[0, :2], w[:, 0], w[:, 1] = 1, 256, 1
    for b, wanted in ((1, 258), (-1, 256)):
        values = {"x": x, "w": w, "b": np.full(40, b, bf16)}
        assert (interp.run(program, values)["y"].astype(float) == wanted).all()
        assert (np.asarray(Executable(program, "cuda-sim")(values)["y"]).astype(float) == wanted).all()


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the forward is the library's; the backward is as it was."""
    torch = pytest.importorskip("torch")
    Lt.installed(monkeypatch)
    types = {"x": "f32[N,24]", "w": "f32[40,24]", "b": "f32[40]"}
    module = gradc.compile(gradc.trace(linear, **types), wrt=["x", "w", "b"], target="cuda-sim")
    assert [call.epilogue.bias is not None for call in calls(module)] == [True]
    values = drawn(types, 13)
    y, residuals = module.forward(**values)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    given = {name: torch.from_numpy(a.astype(np.float64)).requires_grad_() for name, a in values.items()}
    torch.nn.functional.linear(*given.values()).backward(torch.from_numpy(dy.astype(np.float64)))
    for name, gradient in module.backward(residuals, dy).items():
        np.testing.assert_allclose(gradient, given[name].grad.numpy(), rtol=1e-5, atol=1e-5)


TEXT = """program @p {{
  input a: {dtype}[{batch}N,{k}]
  input b: {dtype}[{batch}{k},{n}]
  input v: {dtype}[{n}]
  output y: {dtype}[{batch}N,{n}]
  call @product axes({axes}m: N, n: {n}, k: {k}) y[{at}m, n] <- matmul a[{at}m, k], b[{at}k, n] + v[n]
  return y=y
}}
"""


def written(dtype: str = "f32", n: object = 24, k: object = 16, batch: str = "") -> str:
    axes, at = (f"i: {batch}, ", "i, ") if batch else ("", "")
    return TEXT.format(dtype=dtype, n=n, k=k, batch=batch and f"{batch},", axes=axes, at=at)


@pytest.mark.parametrize(
    ("text", "k", "own"),
    [
        (written(), 16, False),
        (written(k="K"), 5, False),
        (written(k="K"), 0, True),
        (written("f64"), 16, True),
        (written(batch="3"), 16, True),
        (written("bf16", n=4097, k=8203), 8203, False),
    ],
    ids=["whole", "any sum", "no sum", "f64", "batch", "odd"],
)
def test_programs_that_no_pass_made(text: str, k: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cuBLASLt does not take are kernels of ours; an odd product's parts have the bias once each."""
    lt = Lt.installed(monkeypatch)
    program = parse_program(text)
    rng, m = np.random.default_rng(0), 3
    types = {name: program.types[name] for name in ("a", "b", "v")}
    values = {name: rng.standard_normal(t.concrete({"N": m, "K": k})).astype(t.dtype.np) for name, t in types.items()}
    executable = Executable(program, "cuda-sim")
    dims = {"N": m, **({"K": k} if "K" in program.dims else {})}
    actions = [a for each in executable.native.bind(dims).actions for a in each]
    assert all(isinstance(a, Launch if own else Library) for a in actions)
    wide = np.longdouble if program.types["y"].dtype.name == "f64" else np.float64
    y = np.asarray(executable(values)["y"]).astype(wide)
    a, b, v = (values[name].astype(wide) for name in ("a", "b", "v"))
    unit = UNIT.get(program.types["y"].dtype.name, 2.0**-53)
    # parts of a sum in 16 bits are rounded twice
    bound = 2 * unit * (np.abs(a) @ np.abs(b) + np.abs(v)) + k * min(unit, 2.0**-24) * (np.abs(a) @ np.abs(b))
    assert (np.abs(y - (a @ b + v)) <= bound).all()
    np.testing.assert_allclose(interp.run(program, values)["y"].astype(wide), y, atol=float(bound.max()))
    assert lt.products == sum(isinstance(a, Library) and bool(a.product.epilogue) for a in actions)


def test_a_kernel_of_ours_adds_it_where_there_is_no_library() -> None:
    """As in what is exported as C."""
    from gradc.codegen.cuda.launch import LaunchPlan
    from gradc.codegen.cuda.products import without_library
    from gradc.codegen.cuda.render import render_cuda
    from gradc.runtime.cuda.steps import submit

    program = parse_program(written("bf16"))
    text, kernels = render_cuda(program)
    steps = [step for step in program.steps if isinstance(step, Call)]
    plan = LaunchPlan(program, kernels, {"N": 40}, own_products=True)
    device = Simulator("\n".join([text, without_library(program, steps)]), check=True)
    values = {name: a.astype(BF16.np) for name, a in {"a": np.ones((40, 16)), "b": np.ones((16, 24))}.items()}
    values |= {"v": np.arange(24).astype(BF16.np), "y": np.zeros((40, 24), BF16.np)}
    roots = {name: a.ctypes.data for name, a in values.items()}
    submit(device, plan, plan.actions[0], {**roots, ".workspace": 0, ".flag": 0}, 0)
    assert (values["y"].astype(float) == 16 + np.arange(24)).all()


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("+ v[n]", "+ v[m]"), "a bias goes along n, the columns of the result"),
        (("+ v[n]", "+ v[n + 1]"), "a bias goes along n, the columns of the result"),
        (("+ v[n]", "+ w[n]"), "the buffer w is not defined"),
        (("input v: f32[24]", "input v: f64[24]"), r"the bias v is f64\[24\], not f32\[24\]"),
        (("input v: f32[24]", "input v: f32[23]"), r"the bias v is f32\[23\], not f32\[24\]"),
        (("input v: f32[24]", "input v: f32[25]"), r"the bias v is f32\[25\], not f32\[24\]"),
        (("input v: f32[24]", "input v: f32[24,1]"), "the index 1 parts"),
        (("input v: f32[24]", "output v: f32[24]"), "v is read before anything is written to it"),
    ],
)
def test_a_wrong_bias_is_refused(change: tuple[str, str], match: str) -> None:
    assert change[0] in written()
    with pytest.raises(GradcError, match=match):
        verify_program(parse_program(written().replace(*change)))


def test_the_cpu_has_none() -> None:
    with pytest.raises(Unsupported, match="a matrix product with a bias on the cpu"):
        Executable(parse_program(written()), "cpu")({n: np.ones(s, np.float32) for n, s in
                                                    {"a": (2, 16), "b": (16, 24), "v": (24,)}.items()})  # fmt: skip


# -- cuBLASLt ----------------------------------------------------------------------------------------------------------


BIAS = Epilogue(Span(2048, 24, BF16.np))


def a_product() -> Library:
    plan = Executable(parse_program(written("bf16")), "cuda-sim").native.bind({"N": 3})
    (library,) = plan.actions[0]
    assert isinstance(library, Library)
    return library


def test_an_algorithm_is_found_once_for_addresses_that_are_aligned_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    lt, library, space = Lt.installed(monkeypatch), a_product(), Span(0, 4 << 20, np.dtype(np.uint8))
    kept = [cublas.prepared(0, library, at, 512, 1024, space, 0, BIAS) for at in (256, 4096, 272, 528)]
    assert lt.heuristics == 2 and len(lt.alive) == 4 * 4 + 2, "a product and three matrices each, two preferences"
    assert [asked[1] for asked in lt.asked] == [4 << 20] * 2 and {asked[3] for asked in lt.asked} == {2}
    # cuBLAS's A is our b
    assert [[asked[i] for i in (5, 6, 7, 8)] for asked in lt.asked] == [[256] * 4, [256, 16, 256, 256]]
    kept.clear()
    assert not lt.alive


def test_what_cublaslt_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    lt, library, space = Lt.installed(monkeypatch), a_product(), Span(0, 4 << 20, np.dtype(np.uint8))
    lt.offers = 0
    with pytest.raises(
        DeviceError, match=r"cuBLASLt has no kernel for a product with a bias \(1 x 3 x 24 x 16 in bfloat16\)"
    ):
        cublas.prepared(0, library, 256, 512, 1024, space, 0, BIAS)
    lt.offers = 1
    cublas._algorithms.clear()
    lt.cublasLtMatmul = lambda *a: 13  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"refused a product \(1 x 3 x 24 x 16 in bfloat16\): status 13, execution"):
        cublas.prepared(0, library, 256, 512, 1024, space, 0, BIAS)(5)
    assert not lt.alive


@pytest.mark.parametrize("wide", [False, True])
def test_what_cublaslt_has_no_kernel_for_is_added_to_copies_of_the_bias(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cuBLAS alone; behind the columns of a result is what was there."""
    lt, library = Lt.installed(monkeypatch), a_product()
    lt.offers = 0
    rng = np.random.default_rng(5)
    leading = library.n + 8 * wide
    library = replace(library, m=7, out=replace(library.out, leading=leading))
    a, b, bias = (rng.standard_normal(s).astype(BF16.np) for s in ((7, library.k), (library.k, library.n), library.n))
    out = np.full((7, leading), 3, BF16.np)

    def copy_rows(to: int, source: int, pitch: int, width: int, rows: int, stream: int) -> None:
        assert stream == 5
        for i in range(rows):
            ctypes.memmove(to + i * pitch, source + i * pitch, width)

    def gemm(handle: int, *given: Any) -> int:
        beta, at = given[14:16]
        assert ctypes.c_float.from_address(ctypes.addressof(beta._obj)).value == 1 and at == out.ctypes.data
        product = a.astype(np.float32) @ b.astype(np.float32)
        out[:, : library.n] = (product + out[:, : library.n].astype(np.float32)).astype(BF16.np)
        return 0

    nothing = lambda *_: 0
    blas = SimpleNamespace(cublasSetStream_v2=nothing, cublasSetWorkspace_v2=nothing, cublasGemmStridedBatchedEx=gemm)
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    at, space = (x.ctypes.data for x in (a, b, out)), Span(0, 4 << 20, np.dtype(np.uint8))
    cublas.prepared(0, library, *at, space, 0, Epilogue(Span(bias.ctypes.data, bias.size, bias.dtype)), copy_rows)(5)
    exact = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
    assert np.allclose(out[:, : library.n].astype(np.float64), exact, rtol=2**-8, atol=2**-8)
    assert (out[:, library.n :] == 3).all() and not lt.alive


def test_a_cublas_without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_library", lambda: SimpleNamespace())
    cublas._lt.cache_clear()
    with pytest.raises(DeviceError, match="a product with a bias needs cuBLASLt, and this cuBLAS has none"):
        cublas._lt()


def test_arguments_have_the_types_of_its_header() -> None:
    """64 bits for addresses, sizes and leading dimensions; through ctypes, as the real library is called."""
    widths = {"p": 8, "l": 8, "z": 8, "i": 4}
    for name, types in cublas._LT_SIGNATURES.items():
        assert {ctypes.sizeof(cublas._KINDS[letter]) for letter in types.split()} <= set(widths.values()), name
    assert ctypes.sizeof(cublas._Algorithm) == 96
    assert len(cublas._LT_SIGNATURES["cublasLtMatmul"].split()) == 16
    assert len(cublas._LT_SIGNATURES["cublasLtMatmulAlgoGetHeuristic"].split()) == 10
