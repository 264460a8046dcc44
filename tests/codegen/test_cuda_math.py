"""The scalar vocabulary has one text, templates/common/math.h: what it means on the CUDA target.

The text that a GPU gets is compiled by NVRTC, and by a C++ compiler as the simulator sees it; the latter must have the
bits of the CPU's, whose meaning tests/codegen/test_cpu_math.py checks.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import compiled
from registry import call
from test_cpu_math import (
    COMPILER,
    FLAGS,
    SIGNATURES,
    TEMPLATES,
    Loops,
    every_value,
    integer_samples,
    largest_error,
    nearest_to_quarter_turns,
    numpy_dtype,
    opened,
    pairs,
    random_f32,
    storage_samples,
)

from gradc.codegen.expr import Scribe, carrier, converted, loaded, stored, to_memory, with_bits
from gradc.codegen.index import literal, size
from gradc.codegen.text import read_template, standalone
from gradc.errors import CompilerError, GradcError, InternalError
from gradc.ir.dims import floordiv, maximum, symbol
from gradc.ir.graph import input_node
from gradc.ir.node import REGISTRY
from gradc.ir.op import Expr
from gradc.ir.statement import Index, Stmt
from gradc.ir.types import DTYPES, DType, Type
from gradc.runtime.cuda.nvrtc import compile_cuda

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CXX = shutil.which("g++") or shutil.which("clang++")
# What templates/cuda/sim.h says of these words, as far as a scalar function can tell.
AS_SIMULATED = (
    "#define GRADC_CUDA_SIM 1\n#define __device__\n#define __forceinline__ inline __attribute__((always_inline))\n"
)
SAMPLES = 100_000

pytestmark = [
    pytest.mark.long(
        *("gradc/codegen/expr.py", "gradc/codegen/index.py", "gradc/codegen/text.py", "gradc/ops/elementwise"),
        *("gradc/ir/types.py", "gradc/runtime/cuda/nvrtc.py", "templates", "tests/codegen/test_cpu_math.py"),
    ),
    pytest.mark.optimised,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy on the NaN and infinities among the samples
]


# ---- as NVRTC compiles it


def kernels_source(names: Iterable[str]) -> str:
    """The text and one kernel per function."""
    lines = [standalone("cuda/math.h")]
    for name in names:
        operands, result = SIGNATURES[name]
        letters = "abc"[: len(operands)]
        parameters = "".join(f"const {t} *{x}, " for x, t in zip(letters, operands, strict=True))
        lines.append(
            f'extern "C" __global__ void kernel_{name}({parameters}{result} *y) {{ y[threadIdx.x] ='
            f" {name}({', '.join(f'{x}[threadIdx.x]' for x in letters)}); }}"
        )
    return "\n".join(lines) + "\n"


def entries(ptx: str) -> dict[str, str]:
    """Each kernel's PTX, by the name of its function."""
    return {m[1]: m[2] for m in re.finditer(r"\.entry kernel_(\w+)\((.*?\n)\}", ptx, re.DOTALL)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_function_compiles_and_none_spills(arch):
    pytest.importorskip("nvidia.cuda_nvrtc")
    made = compile_cuda(kernels_source(SIGNATURES), arch=arch, spills="error")
    assert made.kernels.keys() == {f"kernel_{name}" for name in SIGNATURES}
    assert "warning" not in made.log


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_function_computes_in_f64_unless_its_name_says_so(arch):
    pytest.importorskip("nvidia.cuda_nvrtc")
    found = entries(compile_cuda(kernels_source(SIGNATURES), arch=arch).ptx)
    assert found.keys() == SIGNATURES.keys()
    in_f64 = {name for name, text in found.items() if ".f64" in text}
    assert in_f64 <= {name for name in SIGNATURES if "f64" in name} and len(in_f64) > 20
    inexact = {name for name, text in found.items() if ".ftz" in text or ".approx" in text}
    mended = ("sigmoid_f32", "tanh_f32", "gelu_derivative_f32")
    # fmodf, and 1/x of a known range with a step of Newton's: both mend what they approximate
    assert inexact <= {"floormod_f32", "floordiv_f32", "fmod_f32", *mended, *in_f64}
    assert all(found[name].count("rcp.approx") == 1 for name in mended)
    assert all(".approx" not in found[name].replace("rcp.approx", "") for name in mended)
    assert (
        "fma.rn.f32" in found["exp_f32"]
        and "rcp.rn.f32" in found["reciprocal_f32"]
        and "sqrt.rn.f32" in found["sqrt_f32"]
    )


def test_bits_and_conversions_are_the_devices():
    """What no C++ compiler sees: NVRTC folds the bit casts of constants, and the rest is one instruction each."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    folded = {
        "bits_of_f32(1.5f)": 0x3FC00000,
        "f32_of_bits(0x3fc00000u)": 0x3FC00000,
        "leading_zeros_u64(1ull << 40)": 23,
        "leading_zeros_u64(1ull)": 63,
    }
    folded |= {"bits_of_f64(1.5)": 0x3FF8000000000000, "f64_of_bits(0x3ff8000000000000ull)": 0x3FF8000000000000}
    types = {"f": "f32", "b": "u32", "l": "i32"}
    lines = [standalone("cuda/math.h")]
    for k, text in enumerate(folded):
        result = {"bits_of_f64": "u64", "f64_of_bits": "f64"}.get(text.partition("(")[0], types[text[0]])
        lines.append(f'extern "C" __global__ void kernel_{k}({result} *y) {{ *y = {text}; }}')
    found = entries(compile_cuda("\n".join(lines), arch="sm_90", emit=["ptx"]).ptx)
    assert {text: re.findall(r"mov\.\w+ \t%\w+, (\d+);", found[str(k)]) for k, text in enumerate(folded)} == {
        text: [str(v)] for text, v in folded.items()
    }
    names = ["f16_load", "f16_store", "bf16_store", "sin_f32", "fma_f32", "fma_f64"]
    found = entries(compile_cuda(kernels_source(names), arch="sm_90", emit=["ptx"]).ptx)
    wanted = ["cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32", "mul.hi.u64", "fma.rn.f32", "fma.rn.f64"]
    assert all(instruction in found[name] for name, instruction in zip(names, wanted, strict=True))
    assert (
        "cvt.rn.bf16" not in compile_cuda(kernels_source(["bf16_store"]), arch="sm_75", emit=["ptx"]).ptx
    )  # which has no such instruction


def test_options_that_change_results_are_refused():
    pytest.importorskip("nvidia.cuda_nvrtc")
    for macro in ("__CUDA_FTZ 1", "__CUDA_PREC_DIV 0", "__CUDA_PREC_SQRT 0"):
        name = macro.split()[0]
        with pytest.raises(CompilerError) as caught:
            compile_cuda(f"#undef {name}\n#define {macro}\n" + kernels_source(["exp_f32"]), arch="sm_90")
        assert "change results" in caught.value.log


def test_the_text_stands_alone():
    text = standalone("cuda/math.h")
    assert "#include" not in text and text.count("GRADC_FN f32 exp_f32(") == 1
    assert standalone("cpu/math.h").count("#include") == 1  # <stdint.h>
    for name in ("cuda/nothing.h", "../templates/cuda/math.h"):
        with pytest.raises(InternalError):
            standalone(name)


# ---- as the simulator compiles it, against the CPU's


class Simulated(Loops):
    """The same loops over the CUDA text."""

    def __init__(self, directory: Path):
        self.machine = "native"
        source = directory / "loops.cpp"
        loops = []
        for name, (operands, result) in SIGNATURES.items():
            letters = "abc"[: len(operands)]
            parameters = "".join(f"const {t} *{x}, " for x, t in zip(letters, operands, strict=True))
            loops.append(
                f'extern "C" void loop_{name}({parameters}{result} *y, i64 n) {{ for (i64 i = 0; i < n; i++) y[i] ='
                f" {name}({', '.join(f'{x}[i]' for x in letters)}); }}"
            )
        source.write_text(AS_SIMULATED + standalone("cuda/math.h") + "\n".join(loops) + "\n")
        flags = ["-std=c++17", *(flag for flag in FLAGS if not flag.startswith("-std"))]
        code, _ = compiled([CXX, *flags, "-Wall", "-Werror", "-fPIC", "-shared", "-march=native"], source)
        self.library = opened(code, directory)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Loops, Loops]:
    if COMPILER is None or CXX is None:
        pytest.skip("no C compiler" if COMPILER is None else "no C++ compiler")
    probe = subprocess.run(
        [COMPILER, "-march=native", "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True
    ).stdout
    if "__FMA__" not in probe and "__ARM_FEATURE_FMA" not in probe:
        pytest.skip("no fma on this machine: its polynomials round twice where a GPU's round once")
    return Loops(tmp_path_factory.mktemp("cpu"), "native", flags=["-DGRADC_F16_NATIVE=0"]), Simulated(
        tmp_path_factory.mktemp("cuda")
    )


def different(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two results have other bits; two NaN are alike (which of two operands' bits it has is the compiler's
    choice).
    """
    bits = f"u{a.itemsize}"
    unlike = a.view(bits) != b.view(bits)
    return unlike & ~(np.isnan(a) & np.isnan(b)) if a.dtype.kind == "f" else unlike


def arguments(name: str) -> list[np.ndarray]:
    """For f32 all f16 and bf16 values (of two operands: each with some other), random bits and numbers of ordinary
    size; for f64 alike.
    """
    operands, _ = SIGNATURES[name]
    rng = np.random.default_rng(20)
    first = operands[0]
    if first == "f32":
        parts = [
            every_value("f16"),
            every_value("bf16"),
            random_f32(21, SAMPLES),
            (rng.normal(0, 1, SAMPLES) * np.exp2(rng.integers(-4, 8, SAMPLES))).astype(np.float32),
        ]
        parts += (
            [storage_samples(name.split("_")[0])[-50_000:]]
            if name.endswith(("_store", "_round")) and name != "round_f32"
            else []
        )
        x = np.concatenate(parts)
        return [x, *(rng.permutation(x) for _ in operands[1:])]
    if first == "f64":
        x = rng.integers(0, 2**64, SAMPLES, np.uint64).view(np.float64)
        x = np.concatenate(
            [
                x,
                rng.normal(0, 1, SAMPLES) * np.exp2(rng.integers(-40, 40, SAMPLES)),
                every_value("f16"),
                every_value("bf16"),
            ]
        )
        return [x, *(rng.permutation(x) for _ in operands[1:])]
    if name.endswith("_load"):
        return [np.arange(2 ** (8 * numpy_dtype(first).itemsize)).astype(numpy_dtype(first))]
    return list(integer_samples(first))[: len(operands)]


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "pow_f32"])
def test_cuda_has_the_bits_of_the_cpu(both, name):
    cpu, cuda = both
    x = arguments(name)
    expected, got = cpu(name, *x), cuda(name, *x)
    bad = np.flatnonzero(different(got, expected))
    assert not bad.size, [(name, *(a[i] for a in x), got[i], expected[i]) for i in bad[:5]]


def test_the_comparison_sees_one_bit():
    a = np.float32([0.0, 1.0, np.nan, 2.0])
    b = np.float32([-0.0, 1.0, np.nan, np.nextafter(np.float32(2), np.float32(3))])
    assert different(a, b).tolist() == [True, False, False, True]
    assert different(np.uint8([1, 2]), np.uint8([1, 3])).tolist() == [False, True]


def test_sine_and_cosine_where_reduction_is_hardest(both):
    x = nearest_to_quarter_turns()
    for name in ("sin_f32", "cos_f32"):
        assert not different(*(loops(name, x) for loops in both)).any()


def test_rsqrt_where_rounding_is_hardest(both):
    """One mantissa of 2^24 needs the term of second order."""
    x = (np.arange(0x01, 0x7F, dtype=np.uint32) << 24 | np.uint32(0x09F038)).view(np.float32)
    assert not different(*(loops("rsqrt_f32", x) for loops in both)).any()


def test_sigmoid_differs_at_two_arguments(both):
    """Of all 2^32, by one unit: the quotient lies within 2^-26 units of the middle of two f32."""
    x = np.array([0x3FAFF6A6, 0xC0EC7A48], np.uint32).view(np.float32)
    cpu, cuda = (loops("sigmoid_f32", x).view(np.int32) for loops in both)
    assert np.abs(cpu - cuda).tolist() == [1, 1]


def pow_samples() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(22)
    base = np.exp(rng.normal(0, 3, SAMPLES)).astype(np.float32)
    near_one = (1 + rng.normal(0, 1e-5, SAMPLES)).astype(np.float32)
    near_one[near_one == 1] = 2
    logs = [np.log2(b.astype(np.float64)) for b in (base, near_one)]
    return {
        "special, random, moderate": pairs(23, "f32", SAMPLES),
        "results all over f32's range": (base, (rng.uniform(-150, 128, SAMPLES) / logs[0]).astype(np.float32)),
        "bases near 1": (near_one, (rng.uniform(-150, 128, SAMPLES) / logs[1]).astype(np.float32)),
        "subnormal results": (base, (rng.uniform(-151, -125, SAMPLES) / logs[0]).astype(np.float32)),
    }


@pytest.mark.parametrize("which", pow_samples())
def test_pow_is_within_its_bound_and_hardly_ever_another_than_the_cpus(both, which):
    """In pairs of f32, not in f64: both are within 0.51 units of the exact power, so they are one unit apart where it
    lies between two f32.
    """
    x, y = pow_samples()[which]
    cpu, cuda = (loops("pow_f32", x, y) for loops in both)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
    error, at = largest_error(cuda, exact)
    assert error <= 0.51, (x[at], y[at], cuda[at], exact[at], error)
    zero = exact == 0
    assert (np.signbit(cuda) == np.signbit(exact))[zero].all()
    assert different(cpu, cuda).sum() < SAMPLES / 1000


# ---- what the compiler may write


def accepts(op: Any, types: Iterable[DType], attrs: Mapping[str, Any]) -> DType | None:
    """The result's dtype where the op takes these operands."""
    try:
        return call(op, [input_node(f"x{k}", Type(t, (4,))) for k, t in enumerate(types)], attrs).dtype
    except GradcError:
        return None


def pointwise() -> Iterator[tuple[str, tuple[DType, ...], DType]]:
    """Every op with an expression of its own, at every choice of its operands' dtypes."""
    for name, op in REGISTRY.items():
        lower = getattr(op, "lower", None)
        if isinstance(lower, Expr) and "{0}" in lower.text:
            arity = 1 + max(int(n) for n in re.findall(r"\{(\d)\}", lower.text))
            choices = itertools.product(
                DTYPES.values(), repeat=min(arity, 2)
            )  # of three operands the last two are alike
            found = [(types[:1] + types[-1:] * (arity - 1)) for types in choices]
            taken = [
                (types, result) for types in found if (result := accepts(op, types, op.samples[0].attrs)) is not None
            ]
            assert taken, f"no operands that {name} takes were found"
            yield from ((name, types, result) for types, result in taken)


def functions() -> list[str]:
    """Every expression that a kernel may hold, as a C function ``expression0``, ``expression1``, ... of its
    variables.
    """
    found: dict[str, None] = {}

    def note(text: str, operands: Mapping[str, str], result: str) -> None:
        found[
            f"{result} expression@({', '.join(f'{t} {x}' for x, t in operands.items()) or 'i64 n0'}) {{ return"
            f" {text}; }}"
        ] = None

    n0, n1 = symbol("n0"), symbol("n1")
    note(size(floordiv(n0, n1) * maximum(n0, n1 - 5) + 3), {"n0": "i64", "n1": "i64"}, "i64")
    for t in DTYPES.values():
        note(loaded(t, "b[0]"), {"*b": f"const {stored(t)}"}, carrier(t))
        note(to_memory(t, "v0"), {"v0": carrier(t)}, stored(t))
        for value in (0, 1, *((float("nan"), float("inf"), -0.1) if t.is_float else (-1,) if t.kind == "i" else ())):
            note(literal(value, t), {}, carrier(t))
        for source in DTYPES.values():
            note(converted("v0", source, t), {"v0": carrier(source)}, carrier(t))
        for width in (name for name in ("u8", "u16", "u32", "u64") if name in DTYPES):
            if accepts(REGISTRY["bitcast"], (DTYPES[width],), {"to": t}):
                note(with_bits("v0", t), {"v0": width}, carrier(t))
        if accepts(REGISTRY["segment_ids"], (t,), {"size": 4}):
            text = Scribe({"b0": Type(t, (n0,))}, []).expression(Stmt("%1", "search", ("%0",), DTYPES["i64"], "b0"))
            note(text, {"*b0": f"const {stored(t)}", "n0": "i64", "v0": "i64"}, "i64")
    scribe = Scribe({}, [])
    for oob in ("wrap", "clamp"):
        text = scribe.expression(Stmt("%1", "clamp_index", ("%0",), DTYPES["i64"], attrs=(("size", n0), ("oob", oob))))
        note(text, {"v0": "i64", "n0": "i64"}, "i64")
    for lo in (0, 1):
        text = scribe.expression(
            Stmt("%1", "in_bounds", (), DTYPES["bool"], index=(Index.of("i0"),), attrs=(("lo", lo), ("hi", n0)))
        )
        note(text, {"i0": "i64", "n0": "i64"}, "i32")
    for name, types, result in pointwise():
        values = [Stmt(f"%{k}", "const", dtype=t) for k, t in enumerate(types)]
        attrs = tuple(REGISTRY[name].samples[0].attrs.items())
        text = Scribe({}, values).expression(Stmt("%9", name, tuple(v.name for v in values), result, attrs=attrs))
        note(text, {f"v{k}": carrier(t) for k, t in enumerate(types)}, carrier(result))
    return [text.replace("@", str(k), 1) for k, text in enumerate(found)]


def test_every_expression_means_something_on_both_targets(tmp_path):
    """Contracts 18.  Beside the C compiler's and the C++ compiler's opinion, that of NVRTC where it is installed."""
    written = functions()
    names = set(re.findall(r"\b([a-z]\w*)\(", " ".join(text.partition("return")[2] for text in written)))
    assert {
        "exp_f32",
        "sat_i8_f64",
        "bf16_load",
        "floordiv_i32",
        "odd_f64",
        "f64_of_bits",
        "search_i64",
        "maximum_i64",
    } <= names and len(written) > 500
    (tmp_path / "all.c").write_text(standalone("cpu/math.h") + "".join(f"static {text}\n" for text in written))
    (tmp_path / "all.cpp").write_text(
        AS_SIMULATED + standalone("cuda/math.h") + "".join(f"static {text}\n" for text in written)
    )
    compilers = [
        (COMPILER, "all.c", ["-std=gnu11", "-Werror=implicit-function-declaration"]),
        (CXX, "all.cpp", ["-std=c++17"]),
    ]
    for compiler, source, flags in compilers:
        if compiler is not None:
            done = subprocess.run(
                [compiler, *flags, "-fsyntax-only", str(tmp_path / source)], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[:4000]
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvrtc"):
        compile_cuda(
            standalone("cuda/math.h") + "".join(f"__device__ {text}\n" for text in written), arch="sm_90", emit=["ptx"]
        )


def test_a_name_that_a_target_lacks_is_found(tmp_path):
    for head, name, flags in (
        (standalone("cpu/math.h"), "x.c", ["-std=gnu11", "-Werror=implicit-function-declaration"]),
        (AS_SIMULATED + standalone("cuda/math.h"), "x.cpp", ["-std=c++17"]),
    ):
        compiler = COMPILER if name == "x.c" else CXX
        if compiler is not None:
            (tmp_path / name).write_text(head + "static f32 f(f32 x) { return cbrt_f32(x); }\n")
            done = subprocess.run(
                [compiler, *flags, "-fsyntax-only", str(tmp_path / name)], capture_output=True, text=True
            )
            assert done.returncode != 0 and "cbrt_f32" in done.stderr


def test_the_targets_share_the_text():
    """What a target says itself is types, builtins and conversions: every other function has one definition."""
    cpu, cuda = (
        set(re.findall(r"^GRADC_FN \w+ (\w+)\(", read_template(f"{target}/math.h"), re.MULTILINE))
        for target in ("cpu", "cuda")
    )
    assert cpu - cuda == {"mad_f64"} and cuda - cpu == {
        "leading_zeros_u64",
        "high_product_u64",
        "bf16_store",
        "bf16_round",
        "reciprocal_in_range_f32",
        "at_least_f32",
        "at_most_f32",
        "f8e4m3_decode",
        "f8e5m2_decode",
    }
    assert TEMPLATES.name == "cpu" and "__builtin" not in read_template("common/math.h")
