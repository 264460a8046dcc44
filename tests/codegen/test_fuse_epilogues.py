"""Products with more than a bias: gelu, its derivative and sums in one call; which the pass makes, what they compute,
with cuBLASLt's part by a stand-in, and by kernels of ours where it has none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cublaslt import Lt

import gradc
from gradc import interp, ops
from gradc.analysis.lifetimes import commutes, may_move
from gradc.codegen.cuda.actions import Launch, Library
from gradc.errors import GradcError, IndexOutOfRange, Unsupported
from gradc.ir.epilogue import FORMS
from gradc.ir.kernel import Call, Program
from gradc.ir.program_text import parse_program
from gradc.ir.types import BF16, DTYPES
from gradc.ir.verify import verify_program
from gradc.ops.products.epilogues import applied
from gradc.passes.program.fuse_epilogues import fuse_epilogues
from gradc.runtime.cuda import cublas
from gradc.runtime.cuda.device import NoKernel
from gradc.runtime.executable import Executable
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import gpu_of

UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Half the distance from 1 to the next number."""


# -- the functions -----------------------------------------------------------------------------------------------------


def test_functions_are_torchs_in_f64() -> None:
    torch = pytest.importorskip("torch")
    x = np.array([0.0, -0.0, 1e-30, -3.7, 12.5, -12.5, 1e4, -1e4, 1e200, np.inf, np.nan, *np.linspace(-6, 6, 97)])
    given = torch.from_numpy(x).requires_grad_()
    y = torch.nn.functional.gelu(given, approximate="tanh")
    y.backward(torch.full_like(y, 3))
    np.testing.assert_allclose(applied("gelu", x), y.detach().numpy(), rtol=1e-6, atol=1e-15)
    finite = np.abs(x) < 1e100  # torch's slope is NaN where x^2 overflows
    found = applied("gelu_grad", np.full_like(x, 3), x)
    np.testing.assert_allclose(found[finite], given.grad.numpy()[finite], rtol=1e-6, atol=1e-7)
    assert found[8] == 3 and np.isnan(found[10])


# -- which products ----------------------------------------------------------------------------------------------------


def mlp(x: Any, w: Any, b: Any, w2: Any) -> Any:
    return ops.linear(ops.gelu(ops.linear(x, w, b), approximate="tanh"), w2)


def biased_mlp(x: Any, w: Any, b: Any, w2: Any, b2: Any) -> Any:
    return ops.linear(ops.gelu(ops.linear(x, w, b), approximate="tanh"), w2, b2)


def multiplied(x: Any, w: Any, b: Any, w2: Any, b2: Any) -> Any:
    """Weights as they are multiplied, not transposed."""
    return ops.gelu(x @ w + b, approximate="tanh") @ w2 + b2


def types(x: str, w: str = "40,24", w2: str = "16,40", dtype: str = "bf16", b2: bool = True) -> dict[str, str]:
    shapes = {"x": x, "w": w, "b": "40", "w2": w2, **({"b2": "16"} if b2 else {})}
    return {name: f"{dtype}[{shape}]" for name, shape in shapes.items()}


KEEPING, AT = "+ b[n] then gelu keeping r", "then gelu_grad at r"
FUSED: dict[str, tuple[Callable[..., Any], dict[str, str], list[str], list[str]]] = {
    "mlp": (mlp, types("N,24", b2=False), [KEEPING], [f"{AT} then sum d.b[n] of result"]),
    "batch of rows": (
        biased_mlp, types("3,N,24"), [KEEPING, "+ b2[n]"],
        ["then sum d.b2[m] of first", f"{AT} then sum d.b[n] of result"],
    ),
    "f16": (mlp, types("N,24", dtype="f16", b2=False), [KEEPING], [f"{AT} then sum d.b[n] of result"]),
    "untransposed": (
        multiplied, types("N,24", "24,40", "40,16"), [KEEPING, "+ b2[n]"],
        ["then sum d.b2[n] of second", f"{AT} then sum d.b[n] of result"],
    ),
    "no bias": (
        lambda x, w, w2: ops.linear(ops.gelu(ops.linear(x, w), approximate="tanh"), w2),
        {"x": "bf16[N,24]", "w": "bf16[40,24]", "w2": "bf16[16,40]"},
        ["then gelu keeping r"],
        [AT],
    ),
    "the last layer": (
        lambda x, w, b: ops.gelu(ops.linear(x, w, b), approximate="tanh"),
        {"x": "bf16[N,24]", "w": "bf16[40,24]", "b": "bf16[40]"},
        [KEEPING],
        [],
    ),
    "by erf": (
        lambda x, w, b: ops.gelu(ops.linear(x, w, b)),
        {"x": "bf16[N,24]", "w": "bf16[40,24]", "b": "bf16[40]"},
        [],
        [],
    ),
    "relu": (
        lambda x, w, b, w2: ops.linear(ops.relu(ops.linear(x, w, b)), w2),
        types("N,24", b2=False),
        [],
        [],
    ),
    "f32": (mlp, types("N,24", dtype="f32", b2=False), [], []),
    "odd columns": (mlp, {**types("N,24", "41,24", "16,41", b2=False), "b": "bf16[41]"}, [], []),
    "autocast": (  # whose bias is rounded by a kernel; its gradient in f32 stays one
        lambda x, w, b, w2: ops.linear(ops.gelu(ops.linear(x, w, b.astype("bf16")), approximate="tanh"), w2),
        {**types("N,24", b2=False), "b": "f32[40]"},
        ["+ b16[n] then gelu keeping r"],
        [],
    ),
    "autocast by erf": (  # where it costs nothing in the kernel of gelu
        lambda x, w, b, w2: ops.linear(ops.gelu(ops.linear(x, w, b.astype("bf16"))), w2),
        {**types("N,24", b2=False), "b": "f32[40]"},
        [],
        [],
    ),
}  # fmt: skip


def ended(program: Program) -> list[str]:
    """The epilogues, without where a residual's name ends."""
    calls = [step for step in program.steps if isinstance(step, Call) and step.epilogue]
    return [str(call.epilogue).strip() for call in calls]


def compiled(case: str, target: str = "cuda", **options: Any) -> gradc.Module:
    function, given, *_ = FUSED[case]
    arch = {"arch": "sm_90"} if target == "cuda" else {}
    return gradc.compile(gradc.trace(function, **given), wrt=[*given], target=target, **arch, **options)


@pytest.mark.parametrize("case", FUSED)
def test_which_products_take_what(case: str) -> None:
    module = compiled(case)
    for executable, wanted in zip((module.forward, module.backward), FUSED[case][2:], strict=True):
        program = executable.program
        found = [re.sub(r"t\d+_bias", "b16", re.sub(r"r\.cast\d*\[m, n\]", "r", text)) for text in ended(program)]
        assert sorted(found) == sorted(wanted), program
        assert parse_program(str(program)) == program


@pytest.mark.parametrize(("rows", "taken"), [(1024, []), (1 << 16, ["+ b16[n]"])])
def test_an_epilogue_is_taken_where_it_is_predicted_to_be_faster(rows: int, taken: list[str]) -> None:
    """A bias in f32 takes a kernel that rounds it: longer than what a product of few rows saves by not being written
    before it is added.
    """

    def function(x: Any, w: Any, b: Any) -> Any:
        h = ops.linear(x, w, b.astype("bf16"))
        return {"h": h, "y": ops.gelu(h)}

    given = {"x": "bf16[N,24]", "w": "bf16[512,24]", "b": "f32[512]"}
    module = gradc.compile(gradc.trace(function, **given), target="cuda", arch="sm_90", hints={"N": rows})
    assert [re.sub(r"t\d+_bias|h_bias", "b16", text) for text in ended(module.forward.program)] == taken


def test_what_may_move() -> None:
    """A step past others that neither write what it reads nor touch what it writes."""
    text = STORED_TWICE.replace(
        "  return",
        """  kernel @copy_t rows(i0: 16) cols(i1: 40) {
    %0 = load t[i0, i1] : bf16
    store z[i0, i1] <- %0 : bf16
  }
  kernel @copy_x rows(i0: 16) cols(i1: 24) {
    %0 = load x[i0, i1] : bf16
    store v[i0, i1] <- %0 : bf16
  }
  return""",
    ).replace("  output y", "  output z: bf16[16,40]\n  output v: bf16[16,24]\n  output y")
    program = parse_program(text.replace("y=y", "y=y, z=z, v=v"))
    product, gelu, copy, other = program.steps
    assert may_move(program, other, product) and may_move(program, product, gelu), (
        "nothing between, or nothing of theirs"
    )
    assert may_move(program, gelu, other) and may_move(program, gelu, other, ["y"])
    assert not may_move(program, product, other), "what reads it is between"
    assert not may_move(program, gelu, other, ["t"]) and not may_move(program, gelu, other, ["z"])
    assert commutes(program, [copy], ["t"], []) and not commutes(program, [product], ["t"], [])


def test_without_gradients_nothing_is_kept() -> None:
    function, given, *_ = FUSED["mlp"]
    program = gradc.compile(gradc.trace(function, **given), target="cuda", arch="sm_90").forward.program
    assert ended(program) == ["+ b[n] then gelu"]
    assert all(isinstance(step, Call) for step in program.steps)


def test_rounding_is_kept_where_it_is_asked_for() -> None:
    for options in ({"numerics": "strict"}, {"fuse": False}):
        module = compiled("mlp", **options)
        assert not ended(module.forward.program) and not ended(module.backward.program)


def test_what_is_also_of_the_sum_stays_a_kernels() -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        h = ops.linear(x, w, b)
        return {"y": ops.gelu(h, approximate="tanh"), "z": ops.sin(h)}

    given = {"x": "bf16[N,24]", "w": "bf16[40,24]", "b": "bf16[40]"}
    module = gradc.compile(gradc.trace(function, **given), target="cuda", arch="sm_90")
    assert not ended(module.forward.program)


def test_who_also_reads_the_product_reads_what_is_kept() -> None:
    def function(x: Any, w: Any) -> Any:
        y = ops.matmul(x, ops.transpose(w, (1, 0)))
        return {"y": ops.gelu(y, approximate="tanh"), "product": y}

    module = gradc.compile(gradc.trace(function, x="bf16[N,24]", w="bf16[40,24]"), target="cuda", arch="sm_90")
    assert ended(module.forward.program) == ["then gelu keeping product[m, n]"]


@pytest.mark.parametrize("of", ["first", "second"])
def test_a_part_of_an_operand_is_not_its_sum(of: str) -> None:
    """The product has five rows of an array whose sum has all sixteen."""

    def function(a: Any, c: Any) -> Any:
        part = ops.transpose(a[:5], (1, 0)) if of == "first" else a[:5]
        return {"s": a.sum(0), "y": ops.matmul(part, c) if of == "first" else ops.matmul(c, part)}

    given = {"a": "bf16[16,24]", "c": "bf16[5,40]" if of == "first" else "bf16[40,5]"}
    values = drawn(given, 16)
    found = gradc.compile(gradc.trace(function, **given), target="cuda-sim")(**values)
    exact = values["a"].astype(np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(found["s"], np.float64), exact, rtol=2**-8, atol=1e-6)


def test_a_bias_in_f32_that_nobody_rounds_stays_in_f32() -> None:
    """Rounded to f16 it would be infinite, where the sum is finite."""

    def function(x: Any, w: Any, b: Any) -> Any:
        return (ops.linear(x, w).astype("f32") + b).astype("f16")

    given = {"x": "f16[16,24]", "w": "f16[40,24]", "b": "f32[40]"}
    values = {
        "x": np.full((16, 24), 50, np.float16),
        "w": np.full((40, 24), -40, np.float16),
        "b": np.full(40, 1e5, np.float32),
    }
    found = gradc.compile(gradc.trace(function, **given), target="cuda-sim")(**values)
    assert (np.asarray(found, float) == 52000).all()


STORED_TWICE = """program @p {
  input x: bf16[16,24]
  input w: bf16[40,24]
  output t: bf16[16,40]
  output q: bf16[16,40]
  output y: bf16[16,40]
  call @m axes(m: 16, n: 40, k: 24) t[m, n] <- matmul x[m, k], w[n, k]
  kernel @g rows(i0: 16) cols(i1: 40) {
    %0 = load t[i0, i1] : bf16
    %1 = cast %0 {dtype=f32} : f32
    %2 = mul %1, %1 : f32
    %3 = mul %2, %1 : f32
    %4 = const {value=0x1.6e4e26p-5} : f32
    %5 = mul %3, %4 : f32
    %6 = add %5, %1 : f32
    %7 = const {value=0x1.988454p-1} : f32
    %8 = mul %6, %7 : f32
    %9 = tanh %8 : f32
    %10 = const {value=0x1p+0} : f32
    %11 = add %9, %10 : f32
    %12 = const {value=0x1p-1} : f32
    %13 = mul %11, %12 : f32
    %14 = mul %1, %13 : f32
    %15 = cast %14 {dtype=bf16} : bf16
    %16 = cast %1 {dtype=bf16} : bf16
    store q[i0, i1] <- %16 : bf16
    store y[i0, i1] <- %15 : bf16
  }
  return t=t, q=q, y=y
}
"""


@pytest.mark.parametrize("copied", [False, True])
def test_a_product_that_others_read_is_still_written(copied: bool) -> None:
    """Beside a copy of it that the kernel of gelu stores."""
    stored = ("store q", "output q", "%16")
    lines = [line for line in STORED_TWICE.splitlines() if copied or not line.strip().startswith(stored)]
    text = "\n".join(lines) if copied else "\n".join(lines).replace(", q=q", "")
    program = parse_program(text)
    given = {b.name: values_of(b.type.concrete({})) for b in program.of_kind("input")}
    fused = fuse_epilogues(program, device=gpu_of("H100"))
    verify_program(fused)
    assert (ended(fused) == ["then gelu keeping t[m, n]"]) is not copied
    wanted, found = (interp.run(each, given, precision="f64") for each in (program, fused))
    for name, exact in wanted.items():
        np.testing.assert_allclose(found[name], exact, rtol=1e-6, atol=1e-7)


def test_a_product_stays_before_what_overwrites_its_operand() -> None:
    """The kernel that reads it comes after that."""

    def copied(source: str, target: str) -> str:
        return f"""  kernel @copy_{source} rows(i0: 16) cols(i1: 24) {{
    %0 = load {source}[i0, i1] : bf16
    store {target}[i0, i1] <- %0 : bf16
  }}
"""

    text = STORED_TWICE.replace("output t", "temp t").replace("t=t, ", "").replace("x[m, k]", "h[m, k]")
    text = text.replace("  input w", "  input z: bf16[16,24]\n  temp h: bf16[16,24]\n  input w")
    text = text.replace("  call", copied("x", "h") + "  call").replace("  kernel @g", copied("z", "h") + "  kernel @g")
    program = parse_program(text)
    given = {b.name: values_of(b.type.concrete({})) * (1 + (b.name == "z")) for b in program.of_kind("input")}
    wanted, found = (
        interp.run(each, given, precision="f64") for each in (program, fuse_epilogues(program, device=gpu_of("H100")))
    )
    for name, exact in wanted.items():
        np.testing.assert_allclose(found[name], exact, rtol=1e-6, atol=1e-7)


def values_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(shape).astype(BF16.np)


def test_what_is_kept_may_have_another_shape() -> None:
    """It is seen as a matrix."""

    def function(x: Any, w: Any, b: Any) -> Any:
        h = ops.linear(x, w, b)
        return {"h": ops.reshape(h, (520,)), "y": ops.reshape(ops.gelu(h, approximate="tanh"), (520,))}

    given = {"x": "bf16[13,24]", "w": "bf16[40,24]", "b": "bf16[40]"}
    module = gradc.compile(gradc.trace(function, **given), target="cuda-sim")
    (text,) = ended(module.forward.program)
    assert text.startswith("+ b[n] then gelu keeping")
    values = drawn(given, 13)
    exact = values["x"].astype(np.float64) @ values["w"].T.astype(np.float64) + values["b"].astype(np.float64)
    found = module(**values)
    np.testing.assert_allclose(np.asarray(found["h"], float), exact.reshape(-1), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(
        np.asarray(found["y"], float), applied("gelu", exact).reshape(-1), rtol=2**-6, atol=2**-7
    )


# -- what they compute -------------------------------------------------------------------------------------------------


def drawn(given: dict[str, str], n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, text in given.items():
        dtype, shape = text[:-1].split("[")
        sizes = [n if s == "N" else int(s) for s in shape.split(",")]
        arrays[name] = (rng.standard_normal(sizes) / np.sqrt(sizes[-1])).astype(DTYPES[dtype].np)
    return arrays


def agrees(case: str, n: int, module: gradc.Module) -> None:
    """Values and gradients against torch's autograd in f64."""
    torch = pytest.importorskip("torch")
    _, given, *_ = FUSED[case]
    values = drawn(given, n)
    exact = {name: torch.from_numpy(a.astype(np.float64)).requires_grad_() for name, a in values.items()}
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    h = exact["x"] @ exact["w"] if case == "untransposed" else linear(exact["x"], exact["w"])
    h = gelu(h + exact["b"] if "b" in exact else h, approximate="tanh")
    if "w2" in exact:
        h = h @ exact["w2"] if case == "untransposed" else linear(h, exact["w2"])
        h = h + exact["b2"] if "b2" in exact else h
    y, residuals = module.forward(**values)
    unit = UNIT[given["x"].split("[")[0]]
    found, wanted = np.asarray(y, np.float64), h.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=4 * unit, atol=4 * unit, err_msg=f"{n} rows")
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(y.dtype)
    h.backward(torch.from_numpy(dy.astype(np.float64)))
    for name, gradient in module.backward(residuals, dy).items():
        wanted = exact[name].grad.numpy()
        scale, what = max(1.0, float(np.abs(wanted).max(initial=0))), f"{name} of {n} rows"
        found = np.asarray(gradient, np.float64)
        np.testing.assert_allclose(found, wanted, rtol=8 * unit, atol=6 * unit * scale, err_msg=what)


VALUES = [case for case, (_, _, forward, _) in FUSED.items() if any("gelu" in text for text in forward)]


@pytest.mark.parametrize("case", VALUES)
def test_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt's part by its stand-in."""
    lt = Lt.installed(monkeypatch)
    module = compiled(case, "cuda-sim")
    epilogues = [step.epilogue for each in (module.forward, module.backward) for step in each.program.steps
                 if isinstance(step, Call) and step.epilogue]  # fmt: skip
    wanted = [FORMS[each.form] for each in epilogues]
    for n in (0, 1, 13):
        lt.forms.clear()
        agrees(case, n, module)
        if n == 13:
            assert sorted(lt.forms) == sorted(wanted), f"{n} rows"
        assert n or not lt.forms, f"{n} rows"


@pytest.mark.parametrize("case", VALUES)
def test_what_cublaslt_has_no_kernel_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products by themselves, and launches of ours behind them."""
    simulated, refused = Simulator.product, []

    def product(self: Simulator, library: Library, *given: Any) -> Any:
        if library.product.epilogue.beyond_bias:
            refused.append(library)
            raise NoKernel("none")
        return simulated(self, library, *given)

    monkeypatch.setattr(Simulator, "product", product)
    agrees(case, 13, compiled(case, "cuda-sim"))
    assert refused


@pytest.mark.parametrize("case", VALUES)
def test_the_interpreter_computes_the_same(case: str) -> None:
    torch = pytest.importorskip("torch")
    module = compiled(case, "cuda-sim")
    values = drawn(FUSED[case][1], 13)
    found = interp.run(module.forward.program, values, precision="f64")
    x, w = (torch.from_numpy(values[name].astype(np.float64)) for name in "xw")
    h = x @ w if case == "untransposed" else torch.nn.functional.linear(x, w)
    h = h + torch.from_numpy(values["b"].astype(np.float64)) if "b" in values else h
    kept = next(name for name, a in found.items() if name.startswith("r.") and a.size == h.numel())
    np.testing.assert_allclose(found[kept].reshape(h.shape), h.numpy(), rtol=1e-12, atol=1e-13)
    y = torch.nn.functional.gelu(h, approximate="tanh")
    if case == "the last layer":  # f32's constants
        np.testing.assert_allclose(found["y"], y.numpy(), rtol=1e-6, atol=1e-8)


def test_gelu_is_of_the_sum_before_it_is_rounded() -> None:
    """256 + 1 is no bf16; the kept argument is rounded, and gelu, which is its argument there, of the sum is rounded to
    the same side as the sum with another 1.
    """
    text = written("+ v[n] then gelu keeping h[m, n]", outputs="output h: bf16[N,24]", inputs="input v: bf16[24]")
    program = parse_program(text)
    a, b = np.zeros((1, 16), BF16.np), np.zeros((16, 24), BF16.np)
    a[0, :2], b[0], b[1] = 1, 256, 1
    for v, wanted in ((1, 258), (-1, 256)):
        given = {"a": a, "b": b, "v": np.full(24, v, BF16.np)}
        for found in (interp.run(program, given), Executable(program, "cuda-sim")(given)):
            assert (np.asarray(found["y"], float) == wanted).all() and (np.asarray(found["h"], float) == wanted).all()


def test_a_check_keeps_every_output_as_it_is() -> None:
    """A residual is an output, too."""

    def function(table: Any, i: Any, w: Any, b: Any) -> Any:
        return ops.gelu(ops.linear(ops.embedding(i, table), w, b), approximate="tanh")

    given = {"table": "bf16[9,24]", "i": "i64[N]", "w": "bf16[40,24]", "b": "bf16[40]"}
    module = gradc.compile(gradc.trace(function, **given), wrt=["table", "w", "b"], target="cuda-sim")
    assert any("gelu keeping" in text for text in ended(module.forward.program))
    values = {name: a for name, a in drawn({k: t for k, t in given.items() if k != "i"}, 5).items()}
    plan = module.forward.native.bind({"N": 5})
    gates = [a for each in plan.actions for a in each if isinstance(a, Launch) and a.function == "gradc_gate"]
    assert len(gates) == 4, "the result and what is kept, before the product and after it"
    y, _ = module.forward(**values, i=np.arange(5))
    wanted = applied("gelu", values["table"][:5].astype(np.float32) @ values["w"].T.astype(np.float32)
                     + values["b"].astype(np.float32))  # fmt: skip
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, rtol=2e-2, atol=1e-2)
    with pytest.raises(IndexOutOfRange):
        module.forward(**values, i=np.full(5, 99))
        module.synchronize()


# -- programs that no pass made ----------------------------------------------------------------------------------------

TEXT = """program @p {{
  input a: {dtype}[N,{k}]
  input b: {dtype}[{k},{n}]
  {inputs}
  output y: {dtype}[N,{n}]
  {outputs}
  call @product axes(m: N, n: {n}, k: {k}) y[m, n] <- matmul a[m, k], b[k, n] {epilogue}
  return y=y{returned}
}}
"""


def written(epilogue: str, dtype: str = "bf16", n: int = 24, k: int = 16, inputs: str = "", outputs: str = "") -> str:
    returned = f", {outputs.split()[1][:-1]}={outputs.split()[1][:-1]}" if outputs else ""
    return TEXT.format(
        epilogue=epilogue, dtype=dtype, n=n, k=k, inputs=inputs, outputs=outputs, returned=returned
    ).replace("  \n", "")  # fmt: skip


GRAD, SUMMED = "then gelu_grad at h[m, n] then sum s[n] of result", "then sum s[m] of first"


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (written(GRAD, inputs="input h: bf16[N,24]", outputs="output s: bf16[24]"), True),
        (written(GRAD, "f32", inputs="input h: f32[N,24]", outputs="output s: f32[24]"), False),
        (written(GRAD, n=20, inputs="input h: bf16[N,20]", outputs="output s: bf16[20]"), False),
        (written("then sum s[n] of second", outputs="output s: bf16[24]"), True),
        (written(SUMMED, outputs="output s: bf16[N]"), False),  # BGRADB is refused of a B that is not transposed
        (written("then gelu", k=11), False),
    ],
    ids=["whole", "f32", "odd columns", "second", "first", "odd sums"],
)
def test_what_the_library_does_not_take_kernels_of_ours_do(
    text: str, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lt = Lt.installed(monkeypatch)
    program = parse_program(text)
    rng, m = np.random.default_rng(3), 5
    given = {
        b.name: rng.standard_normal(b.type.concrete({"N": m})).astype(b.type.dtype.np) for b in program.of_kind("input")
    }
    executable = Executable(program, "cuda-sim")
    actions = [a for each in executable.native.bind({"N": m}).actions for a in each]
    assert any(isinstance(a, Launch) and a.function.startswith("gradc_epilogue") for a in actions) is not library
    wanted = interp.run(program, given, precision="f64")
    found = executable(given)
    unit = 2.0**-7 if program.types["y"].dtype is BF16 else 1e-5
    for name, exact in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name], np.float64), exact, rtol=unit, atol=4 * unit)
    assert len(lt.forms) == library


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (written("then relu"), "expected 'sum', found 'relu'"),
        (written("then gelu then gelu"), "expected 'sum', found 'gelu'"),
        (written("then sum s[n] of third", outputs="output s: bf16[24]"), "expected result, first, second, found"),
        (written("then gelu_grad"), "there is no epilogue 'then gelu_grad' in one call"),
        (written("then sum s[n] of result", outputs="output s: bf16[24]"), "there is no epilogue 'then sum s"),
        (written("+ v[n] then sum s[n] of second", inputs="input v: bf16[24]", outputs="output s: bf16[24]"),
         "there is no epilogue"),
        (written("then sum s[n] of second", outputs="output s: f32[24]"), r"the sum s is f32\[24\], not bf16\[24\]"),
        (written("then sum s[n] of first", outputs="output s: bf16[24]"), "a sum goes along m, the rows of the result"),
        (written("then gelu keeping h[m, n]", outputs="output h: bf16[N,25]"), r"h is bf16\[N,25\], and no"),
        (written("then gelu keeping h[m, n]", outputs="output h: f32[N,24]"), r"h is f32\[N,24\], and no"),
        (written("then gelu").replace("output y: bf16[N,24]", "output y: bf16[N,48]"),
         r"an epilogue beyond a bias is of all of y, bf16\[N,48\]"),
        (written("then gelu keeping y[m, n]"), "y is memory that the call has for something else"),
        (written("then gelu keeping h[m, n]", inputs="input h: bf16[N,24]"), "writes h, which is an input"),
        (written(GRAD, inputs="input v: bf16[N,24]", outputs="output s: bf16[24]"), "the buffer h is not defined"),
    ],
)  # fmt: skip
def test_a_wrong_epilogue_is_refused(text: str, match: str) -> None:
    with pytest.raises(GradcError, match=match):
        verify_program(parse_program(text))


def test_the_cpu_has_none() -> None:
    given = {"a": np.ones((2, 16), np.float32), "b": np.ones((16, 24), np.float32)}
    with pytest.raises(Unsupported, match="a matrix product with another epilogue on the cpu"):
        Executable(parse_program(written("then gelu", "f32")), "cpu")(given)


# -- cuBLASLt ----------------------------------------------------------------------------------------------------------


def test_a_kernel_is_asked_for_once_for_each_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    lt = Lt.installed(monkeypatch)
    module = compiled("mlp", "cuda-sim")
    values = drawn(FUSED["mlp"][1], 13)
    for _ in range(3):
        y, residuals = module.forward(**values)
        module.backward(residuals, np.ones_like(y))
    asked = [tuple(sorted(each.items(), key=str)) for each in lt.asked]  # addresses may be aligned otherwise
    assert len(lt.forms) == 3 * 2 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("code", [0, 15])
def test_no_kernel_is_an_error_that_says_which(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradc.runtime.cuda.device import Span

    lt, asked = Lt.installed(monkeypatch), []
    lt.offers = 0
    if code:
        lt.cublasLtMatmulAlgoGetHeuristic = lambda *_: asked.append(1) or code  # type: ignore[method-assign]
    (library,) = Executable(parse_program(written("then gelu")), "cuda-sim").native.bind({"N": 3}).actions[0]
    epilogue = library.product.epilogue.map(lambda part: Span(2048, part.count, part.dtype))
    for _ in range(2):  # it is asked once
        with pytest.raises(
            NoKernel, match=r"kernel for a product with the epilogue 32 \(1 x 3 x 24 x 16 in bfloat16\)"
        ):
            cublas.prepared(0, library, 256, 512, 1024, Span(0, 4 << 20, np.dtype(np.uint8)), 0, epilogue)
    assert not lt.alive and lt.heuristics == (0 if code else 1) and len(asked) == bool(code)
