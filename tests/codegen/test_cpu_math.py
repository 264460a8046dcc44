"""templates/cpu/math.h against NumPy in f64, ml_dtypes, and Python's integers.

The header is compiled once per session into a library of `#pragma omp simd` loops, one per function, with the flags
of generated code; and once more for x86-64-v2, which has neither fma nor F16C nor vectors wider than four floats.
GRADC_SLOW_TESTS=1 draws ten million random bit patterns per function instead of one.
"""

import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from caches import compiled

from gradc.ir.types import DTYPES
from gradc.ops.elementwise import bessel, special
from gradc.ops.elementwise.activations import gelu_derivative, normal_cdf
from gradc.ops.elementwise.pointwise import convert

TEMPLATES = Path(__file__).parents[2] / "templates" / "cpu"
COMPILER = shutil.which(os.environ.get("CC") or "gcc")
FLAGS = (
    "-std=c11 -O2 -fno-math-errno -fno-trapping-math -ffp-contract=off -fwrapv -fopenmp-simd -fno-strict-aliasing"
).split()
SAMPLES = 10_000_000 if os.environ.get("GRADC_SLOW_TESTS") else 1_000_000

pytestmark = [
    pytest.mark.long("gradc/ir/types.py", "gradc/ops/elementwise", "templates/common", "templates/cpu"),
    pytest.mark.optimised,
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy on the NaN and infinities among the samples
]

NUMPY = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
}
NUMPY |= {"f4e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu}
STORAGE = {"bf16": "u16", "f16": "u16", **dict.fromkeys(("f8e4m3", "f8e5m2", "f4e2m1", "e8m0"), "u8")}
SIGNED, UNSIGNED = ("i8", "i16", "i32", "i64"), ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
NARROW = {"i2": ("i8", -2, 1), "u2": ("u8", 0, 3), "i4": ("i8", -8, 7), "u4": ("u8", 0, 15)}
FLOATS = ("f32", "f64")

# name -> (the function in f64, largest error in units in the last place, as the header states it)
LIMITS_F32 = {
    "exp": (np.exp, 0.8),
    "log": (np.log, 0.9),
    "log1p": (np.log1p, 1.5),
    "expm1": (np.expm1, 1.7),
    "tanh": (np.tanh, 1.5),
    "sigmoid": (lambda x: np.where(x >= 0, 1.0, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x))), 1.5),
    "erf": (lambda x: np.frompyfunc(math.erf, 1, 1)(x).astype(np.float64), 1.2),
    "sin": (np.sin, 1.6),
    "cos": (np.cos, 1.6),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 0.51),
    "exp2": (np.exp2, 1.1),
    "log2": (np.log2, 1.6),
    "log10": (np.log10, 2.0),
    "tan": (np.tan, 3.6),
    "asin": (np.arcsin, 2.4),
    "acos": (np.arccos, 1.2),
    "atan": (np.arctan, 2.2),
    "sinh": (np.sinh, 2.9),
    "cosh": (np.cosh, 2.2),
    "asinh": (np.arcsinh, 1.9),
    "acosh": (np.arccosh, 2.0),
    "atanh": (np.arctanh, 2.2),
    "erfc": (lambda x: np.frompyfunc(math.erfc, 1, 1)(x).astype(np.float64), 5.6),
    "erfinv": (special.erfinv.reference, 3.0),
    "sqrt": (np.sqrt, 0.5),
    "reciprocal": (lambda x: 1 / x, 0.5),
}
EXACT = {
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "relu": lambda x: np.where(x < 0, np.zeros_like(x), x),
    "exponent": lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(x.dtype),
    "isnan": np.isnan,
    "isfinite": np.isfinite,
}
EXACT_PAIRS = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "floormod": np.mod,
    "floordiv": np.floor_divide,
    "fmod": np.fmod,
    "copysign": np.copysign,
}
PAIRS_F32 = {"atan2": (np.arctan2, 2.2), "hypot": (np.hypot, 1.2)}
SERIES_LIMITS = {"i0": 7.0, "i0e": 9.0, "i1": 8.0, "i1e": 9.0, "erfcx": 9.0}
GAMMA_F32 = {"lgamma": (special.lgamma.reference, 5.0), "digamma": (special.digamma.reference, 4.0)}
"""Of arguments above 0, in units of the larger of 1 and the result: both have zeros there."""
SERIES = {name: (getattr(bessel, name).reference, limit) for name, limit in SERIES_LIMITS.items()}
"""In f32: of arguments up to 80, where nothing overflows."""
SLOPES_F32 = {"gelu_derivative": (gelu_derivative.reference, 1.8)}
"""In units of the larger of 1 and the result, which has a zero."""
LIBM_F64 = tuple(name for name in LIMITS_F32 if name != "erfinv")
INTEGER_UNARY, INTEGER_PAIRS = ("abs", "sign"), ("minimum", "maximum", "floordiv", "floormod", "pow", "right_shift")


def in_wider(function: Callable[..., np.ndarray], *operands: np.ndarray) -> np.ndarray:
    """A function of f64, computed in long double and rounded once: NumPy's own of f64 is no more exact than ours, and
    another one on each processor.
    """
    return function(*(x.astype(np.longdouble) for x in operands)).astype(np.float64)


def numpy_dtype(c_type: str) -> np.dtype:
    return np.dtype({"i": "int", "u": "uint", "f": "float"}[c_type[0]] + c_type[1:])


def signatures() -> dict[str, tuple[list[str], str]]:
    """Every public function of the header: name -> (operand types, result type)."""
    table = {}
    for f in FLOATS:
        for name in (*LIMITS_F32, *EXACT, *GAMMA_F32, *SERIES, *SLOPES_F32, "normal_cdf"):
            table[f"{name}_{f}"] = ([f], "i32" if name.startswith("is") else f)
        for name in ("pow", *EXACT_PAIRS, *PAIRS_F32):
            table[f"{name}_{f}"] = ([f, f], f)
        table[f"fma_{f}"] = ([f, f, f], f)
        for t in INTEGERS:
            table[f"sat_{t}_{f}"] = ([f], t)
        for t, (stored, _, _) in NARROW.items():
            table[f"sat_{t}_{f}"] = ([f], stored)
    for t in INTEGERS:
        table |= {f"{name}_{t}": ([t], t) for name in INTEGER_UNARY} | {
            f"{name}_{t}": ([t, t], t) for name in INTEGER_PAIRS
        }
    for t, stored in STORAGE.items():
        table |= {f"{t}_load": ([stored], "f32"), f"{t}_store": (["f32"], stored), f"{t}_round": (["f32"], "f32")}
    table["odd_f64"] = (["f64"], "f32")
    return table


SIGNATURES = signatures()


def loops_source(names: Iterable[str]) -> str:
    """The header and one loop per function, `loop_NAME(a, b, ..., result, n)`, each on a line of its own."""
    lines = ['#include "math.h"']
    for name in names:
        operands, result = SIGNATURES[name]
        letters = "abc"[: len(operands)]
        parameters = "".join(f"const {t} *restrict {x}, " for x, t in zip(letters, operands, strict=True))
        call = f"{name}({', '.join(f'{x}[i]' for x in letters)})"
        loop = f'_Pragma("omp simd") for (i64 i = 0; i < n; i++) y[i] = {call};'
        lines.append(f"void loop_{name}({parameters}{result} *restrict y, i64 n) {{ {loop} }}")
    return "\n".join(lines) + "\n"


class Loops:
    """The compiled loops; `loops("exp_f32", x)` is the function over an array."""

    def __init__(
        self, directory: Path, machine: str, names: Iterable[str] = tuple(SIGNATURES), flags: Iterable[str] = ()
    ):
        self.machine = machine
        self.source = directory / "loops.c"
        self.source.write_text(loops_source(names))
        report = ["-fopt-info-vec-optimized"] if is_gcc() else []
        options = [*FLAGS, "-fPIC", "-shared", *flags, *report, f"-march={machine}", "-I", str(TEMPLATES)]
        code, self.report = compiled([COMPILER, *options], self.source, TEMPLATES)
        self.library = opened(code, directory)

    def __call__(self, name: str, *operands) -> np.ndarray:
        types, result = SIGNATURES[name]
        arrays = [np.ascontiguousarray(x, numpy_dtype(t)) for x, t in zip(operands, types, strict=True)]
        y = np.empty(arrays[0].shape, numpy_dtype(result))
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, y)]
        getattr(self.library, f"loop_{name}")(*pointers, ctypes.c_int64(y.size))
        return y

    def vectorised(self) -> set[str]:
        """The functions whose loop gcc reports as vectorised."""
        rows = self.source.read_text().splitlines()
        found = re.findall(r"loops\.c:(\d+):\d+: optimized: loop vectorized", self.report)
        return {re.search(r"void loop_(\w+)\(", rows[int(line) - 1])[1] for line in found}


def opened(code: bytes, directory: Path) -> ctypes.CDLL:
    """A shared object in this process."""
    library = directory / "loaded.so"
    library.write_bytes(code)
    return ctypes.CDLL(str(library))


def is_gcc() -> bool:
    macros = subprocess.run([COMPILER, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True).stdout
    return "__GNUC__" in macros and "__clang__" not in macros


@pytest.fixture(scope="session", params=["native", "x86-64-v2"])
def loops(request, tmp_path_factory) -> Loops:
    if request.param != "native" and platform.machine() != "x86_64":
        pytest.skip("an x86-64 build")
    return Loops(tmp_path_factory.mktemp("cpu_math"), request.param)


def from_bits(bits, dtype) -> np.ndarray:
    return np.asarray(bits).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


def every_value(c_type: str) -> np.ndarray:
    """All values of a storage format, as f32."""
    return from_bits(np.arange(2 ** DTYPES[c_type].bits), NUMPY[c_type]).astype(np.float32)


def random_f32(seed: int, n: int = SAMPLES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32).view(np.float32)


def all_f32_samples(seed: int) -> np.ndarray:
    """All f16 and bf16 values, random bit patterns, and as many values of the size at which functions do their work."""
    rng = np.random.default_rng(seed)
    usual = rng.normal(0, 1, SAMPLES // 4) * np.exp2(rng.integers(-4, 8, SAMPLES // 4))
    with np.errstate(invalid="ignore"):
        return np.concatenate([every_value("f16"), every_value("bf16"), random_f32(seed), usual.astype(np.float32)])


def largest_error(got: np.ndarray, exact: np.ndarray) -> tuple[float, int]:
    """Largest |got - exact| in units in the last place of the f32 result, and where.

    NaN must meet NaN; beyond the largest f32 infinity counts as 2^128, the number that would follow."""
    with np.errstate(all="ignore"):
        expected = exact.astype(np.float32)
        big = 2.0**128
        numbers = np.clip(np.where(np.isinf(got), np.copysign(big, got), got.astype(np.float64)), -big, big)
        exponent = np.where(exact == 0, -149, np.frexp(np.clip(exact, -big, big))[1] - 24)
        unit = np.exp2(np.maximum(exponent, -149).astype(np.float64))
        error = np.abs(numbers - np.clip(exact, -big, big)) / np.where(np.abs(exact) >= big, 2.0**104, unit)
    error = np.where(np.isinf(expected) & (got == expected), 0.0, error)
    error = np.where(
        np.isnan(expected) | np.isnan(got), np.where(np.isnan(expected) & np.isnan(got), 0.0, np.inf), error
    )
    at = int(np.argmax(error))
    return float(error[at]), at


def same_values(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return (got == expected) | (np.isnan(got) & np.isnan(expected))


# ---- f32 and f64 functions


@pytest.mark.parametrize("name", LIMITS_F32)
def test_f32_function_is_within_its_bound(loops, name):
    function, limit = LIMITS_F32[name]
    x = all_f32_samples(seed=1)
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.float64))
    got = loops(f"{name}_f32", x)
    error, at = largest_error(got, exact)
    assert error <= limit, f"{name}({x[at]!r}) = {got[at]!r}, exact {exact[at]!r}: {error:.3f} ulp, bound {limit}"


def test_ulp_measure_sees_wrong_results():
    exact = np.array([1.0, 1.0, 0.0, np.inf, 3.4e38, np.nan, 1.0])
    assert largest_error(exact.astype(np.float32), exact)[0] <= 0.5
    for at, wrong in enumerate([1 + 2**-22, np.nan, 1e-44, 3.4e38, np.inf, 1.0, -1.0]):
        got = exact.astype(np.float32)
        got[at] = wrong
        assert largest_error(got, exact)[0] > 1.9 and largest_error(got, exact)[1] == at


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", [-np.inf, np.inf, 0.0, -104.0, 88.8, -103.0], [0, np.inf, 1, 0, np.inf, 2.0**-149]),
        (
            "log",
            [0.0, -0.0, -1.0, -np.inf, np.inf, 1.0, 2.0**-149],
            [-np.inf, -np.inf, np.nan, np.nan, np.inf, 0, -103.27893],
        ),
        ("log1p", [-1.0, -2.0, np.inf, -np.inf, 1e-45, 3.4e38], [-np.inf, np.nan, np.inf, np.nan, 1e-45, 88.72228]),
        ("expm1", [-np.inf, np.inf, 1e-45, -1e-45, -20.0], [-1, np.inf, 1e-45, -1e-45, -1]),
        ("tanh", [-np.inf, np.inf, 1e-45, 20.0], [-1, 1, 1e-45, 1]),
        ("sigmoid", [-np.inf, np.inf, 0.0, -104.0, -100.0, -88.0], [0, 1, 0.5, 0, 3.8e-44, 6.0546e-39]),
        ("erf", [-np.inf, np.inf, 5.0, -5.0], [-1, 1, 1, -1]),
        ("sin", [np.inf, -np.inf, 1e-45, 2.0**72], [np.nan, np.nan, 1e-45, math.sin(2.0**72)]),
        ("cos", [np.inf, -np.inf, 0.0, 1e-45], [np.nan, np.nan, 1, 1]),
        ("rsqrt", [0.0, -0.0, np.inf, -1.0, 2.0**-148], [np.inf, -np.inf, 0, np.nan, 2.0**74]),
    ],
)
def test_special_values(loops, name, x, expected):
    x, expected = np.float32(x), np.float32(expected)
    np.testing.assert_allclose(loops(f"{name}_f32", x), expected, rtol=1e-4, atol=0)
    assert np.isnan(loops(f"{name}_f32", np.float32([np.nan]))).all()


@pytest.mark.parametrize(
    "name", ["expm1", "log1p", "tanh", "erf", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh", "erfinv"]
)
def test_odd_functions_keep_the_sign_of_zero(loops, name):
    assert np.signbit(loops(f"{name}_f32", np.array([0.0, -0.0], np.float32))).tolist() == [False, True]


def scaled_pi(bits: int) -> int:
    """pi * 2^bits by Machin's formula, pi/4 = 4 arctan(1/5) - arctan(1/239)."""

    def arctan_of_inverse(n: int) -> int:
        total, power, k = 0, (1 << bits) // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))


def nearest_to_quarter_turns() -> np.ndarray:
    """For each exponent the f32 values m * 2^e that come closest to multiples of pi/2.

    m * 2^e * 2/pi is nearly an integer where m is a multiple of a denominator in the continued fraction of 2^e * 2/pi.
    """
    bits, found = 400, []
    two_over_pi = (1 << 2 * bits + 1) // scaled_pi(bits)
    for e in range(-24, 105):
        rest, unit = (two_over_pi << (e + 24)) % (1 << (bits + 24)), 1 << (bits + 24)
        before, q = 0, 1
        while q < 1 << 24 and rest:
            found += [math.ldexp(q * k, e) for k in (1, -(-(1 << 23) // q)) if q * k < 1 << 24]
            before, q = q, unit // rest * q + before
            unit, rest = rest, unit % rest
    return np.float32(found)


def test_sine_and_cosine_where_reduction_is_hardest(loops):
    x = nearest_to_quarter_turns()
    assert np.abs(np.sin(2 * x.astype(np.float64))).min() < 1e-8  # as hard as f32 gets
    x = np.concatenate([x, np.nextafter(x, 0), -x])
    for name, function in (("sin", np.sin), ("cos", np.cos)):
        error, at = largest_error(loops(f"{name}_f32", x), function(x.astype(np.float64)))
        assert error <= LIMITS_F32[name][1], (name, x[at], error)


@pytest.mark.parametrize("name", LIBM_F64)
def test_f64_function(loops, name):
    rng = np.random.default_rng(2)
    special = [0.0, np.inf, -np.inf, np.nan, -745.0]
    x = np.concatenate([rng.normal(0, 3, 20_000), rng.normal(0, 300, 20_000), rng.normal(0, 1e-9, 2_000), special])
    if name == "sigmoid":  # 1 / (1 + e^-x) would lose everything here
        far = np.float64([-700, -730])
        np.testing.assert_allclose(loops("sigmoid_f64", far), in_wider(np.exp, far), rtol=1e-15)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(loops(f"{name}_f64", x), in_wider(LIMITS_F32[name][0], x), rtol=1e-15, atol=0)


@pytest.mark.parametrize("f", FLOATS)
@pytest.mark.parametrize("name", EXACT)
def test_exact_function(loops, name, f):
    x = np.concatenate([random_f32(3, 200_000), every_value("f16")]).astype(numpy_dtype(f))
    halves = np.arange(-40, 41, dtype=numpy_dtype(f)) / 2
    x = np.concatenate(
        [x, halves, np.nextafter(halves, np.inf), np.array([-0.0, np.inf, -np.inf, np.nan], numpy_dtype(f))]
    )
    got, expected = loops(f"{name}_{f}", x), EXACT[name](x)
    assert same_values(got, expected).all()
    if name in ("floor", "ceil", "trunc", "round", "abs"):
        number = ~np.isnan(x)
        assert (np.signbit(got) == np.signbit(expected))[number].all()


SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1,
        -1,
        0.5,
        -0.5,
        2,
        -2,
        3,
        -3,
        1e-45,
        -1e-45,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        7.5,
        -7.5,
        1e-30,
    ]
)


def pairs(seed: int, f: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of special values, random bit patterns, and pairs of moderate size."""
    rng = np.random.default_rng(seed)
    a, b = (np.ravel(m) for m in np.meshgrid(SPECIAL, SPECIAL))
    moderate = rng.normal(0, 10, (2, n))
    moderate[:, : n // 2] = np.round(moderate[:, : n // 2])
    with np.errstate(invalid="ignore"):
        a = np.concatenate([a, moderate[0], random_f32(seed, n)])
        b = np.concatenate([b, moderate[1], random_f32(seed + 1, n)])
        return a.astype(numpy_dtype(f)), b.astype(numpy_dtype(f))


@pytest.mark.parametrize("f", FLOATS)
@pytest.mark.parametrize("name", EXACT_PAIRS)
def test_exact_function_of_two(loops, name, f):
    a, b = pairs(4, f, 50_000)
    got = loops(f"{name}_{f}", a, b)
    with np.errstate(all="ignore"):
        expected = EXACT_PAIRS[name](a, b)
    bad = ~same_values(got, expected)
    assert not bad.any(), [(name, a[i], b[i], got[i], expected[i]) for i in np.flatnonzero(bad)[:5]]
    if name.startswith("floor"):
        number = ~np.isnan(expected)
        assert (np.signbit(got) == np.signbit(expected))[number].all()


@pytest.mark.parametrize("name", PAIRS_F32)
def test_f32_function_of_two_is_within_its_bound(loops, name):
    function, limit = PAIRS_F32[name]
    a, b = pairs(7, "f32", SAMPLES // 4)
    with np.errstate(all="ignore"):
        exact = function(a.astype(np.float64), b.astype(np.float64))
    got = loops(f"{name}_f32", a, b)
    error, at = largest_error(got, exact)
    assert error <= limit, f"{name}({a[at]!r}, {b[at]!r}) = {got[at]!r}, exact {exact[at]!r}: {error:.3f} ulp"
    zero = exact == 0
    assert (np.signbit(got) == np.signbit(exact))[zero].all()


@pytest.mark.parametrize("name", GAMMA_F32)
def test_f32_function_of_the_gamma_function_is_within_its_bound(loops, name):
    function, limit = GAMMA_F32[name]
    x = np.abs(all_f32_samples(seed=8)[:: SAMPLES // 50_000])
    exact = function(x.astype(np.float64))
    got = loops(f"{name}_f32", x)
    finite = np.abs(exact) < 3.4e38
    assert same_values(got, exact.astype(np.float32))[~finite].all()
    error = np.abs(got - exact)[finite] / (2.0**-23 * np.maximum(np.abs(exact[finite]), 1))
    assert error.max() <= limit, (x[finite][error.argmax()], error.max())
    negative = -np.random.default_rng(9).uniform(0.1, 0.9, 2000).astype(np.float32) - np.float32(3)
    np.testing.assert_allclose(loops(f"{name}_f32", negative), function(negative.astype(np.float64)), rtol=0, atol=4e-5)
    poles = np.float32([0.0, -0.0, -1.0, -7.0, -np.inf, np.inf, np.nan])
    np.testing.assert_array_equal(loops(f"{name}_f32", poles), function(poles.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("name", SLOPES_F32)
def test_derivative_with_a_zero_is_within_its_bound(loops, name):
    """torch is the oracle of the references (tests/ops/test_ops_torch.py).  Below -1 the relative error has a bound:
    2^-24 (10 + x^2), as the square is rounded.
    """
    function, limit = SLOPES_F32[name]
    x = all_f32_samples(seed=12)[:: SAMPLES // 200_000]
    x = np.concatenate([x, np.linspace(-14, 14, 200_001), [np.inf, -np.inf, np.nan, -0.0]]).astype(np.float32)
    exact, got = function(x.astype(np.float64)), loops(f"{name}_f32", x)
    assert same_values(got, exact.astype(np.float32))[~np.isfinite(x)].all()
    finite = np.isfinite(x)
    error = np.abs(got - exact)[finite] / (2.0**-23 * np.maximum(np.abs(exact[finite]), 1))
    assert error.max() <= limit, (x[finite][error.argmax()], error.max())
    below = (x < -1) & (x > -13)
    allowed = 2.0**-24 * np.abs(exact[below]) * (10 + x[below].astype(np.float64) ** 2)
    relative = np.abs(got - exact)[below] / allowed
    assert relative.max() <= 1, (x[below][relative.argmax()], relative.max())
    wide = np.concatenate([np.linspace(-39, 39, 20_001), [np.inf, -np.inf, np.nan, 1e300]])
    np.testing.assert_allclose(loops(f"{name}_f64", wide), function(wide), rtol=2e-14, atol=1e-16)


def test_normal_cdf_is_within_its_bounds(loops):
    """torch is the oracle of the reference.  In units of 1, and to -5.75, below which it is 0, of itself."""
    x = all_f32_samples(seed=12)[:: SAMPLES // 200_000]
    x = np.concatenate([x, np.linspace(-14, 14, 200_001), [np.inf, -np.inf, np.nan, -0.0]]).astype(np.float32)
    exact, got = normal_cdf.reference(x.astype(np.float64)), loops("normal_cdf_f32", x)
    assert same_values(got, exact.astype(np.float32))[~np.isfinite(x)].all()
    finite = np.isfinite(x)
    assert (np.abs(got - exact)[finite]).max() <= 0.8 * 2.0**-23
    assert (got[finite] >= 0).all() and (got[finite] <= 1).all() and (got[x < -5.75] == 0).all()
    for least, bits in {-1.0: 21, -3.0: 18, -5.7499: 10.5}.items():
        some = (x >= least) & (x < 0)
        assert (np.abs(got - exact)[some] / exact[some]).max() <= 2.0**-bits, least
    wide = np.concatenate([np.linspace(-39, 39, 20_001), [np.inf, -np.inf, np.nan, 1e300]])
    np.testing.assert_allclose(loops("normal_cdf_f64", wide), normal_cdf.reference(wide), rtol=2e-14, atol=0)


@pytest.mark.parametrize("name", ["erfinv", *GAMMA_F32])
def test_f64_function_without_libm(loops, name):
    """Near its poles and ends, too; torch is the oracle of the references (tests/ops/test_ops_torch.py)."""
    rng = np.random.default_rng(10)
    if name == "erfinv":
        far = 1 - np.exp2(-rng.uniform(1, 52, 5000))
        x = np.concatenate([rng.uniform(-1, 1, 20_000), far, -far, rng.normal(0, 1e-9, 100), [0.0, 1.0, -1.0, 1.5]])
    else:
        x = np.concatenate([rng.uniform(0, 30, 20_000), rng.uniform(-20, 0, 20_000), [0.0, -3.0, 1e17, 1e300, np.inf]])
    got, want = loops(f"{name}_f64", x), getattr(special, name).reference(x)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    np.testing.assert_allclose(got[finite], want[finite], rtol=2e-14 if name == "erfinv" else 1e-12, atol=1e-14)


@pytest.mark.parametrize("name", SERIES)
def test_function_of_a_series_is_within_its_bound(loops, name):
    """torch is the oracle of the references (tests/ops/test_ops_torch.py)."""
    function, limit = SERIES[name]
    rng = np.random.default_rng(11)
    x = np.concatenate(
        [rng.uniform(-9, 80, 5000), rng.uniform(-3, 3, 5000), rng.normal(0, 1e-3, 1000), [0.0, 9.0, 19.0]]
    )
    narrow = x.astype(np.float32)
    error, at = largest_error(loops(f"{name}_f32", narrow), function(narrow.astype(np.float64)))
    assert error <= limit, f"{name}({narrow[at]!r}): {error:.3f} ulp"
    np.testing.assert_allclose(loops(f"{name}_f64", x), function(x), rtol=2e-14, atol=0)
    edges = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, -0.0, 1e-30, -30.0])
    with np.errstate(over="ignore"):
        for suffix, dtype in (("f32", np.float32), ("f64", np.float64)):
            line = np.concatenate([edges, np.finfo(dtype).max * np.array([1, -1, 0.1])]).astype(dtype)
            np.testing.assert_allclose(loops(f"{name}_{suffix}", line), function(line), rtol=1e-6)


def test_pow(loops):
    a, b = pairs(5, "f32", SAMPLES // 2)
    rng = np.random.default_rng(6)
    base = np.exp(rng.normal(0, 3, SAMPLES // 2)).astype(np.float32)  # results all over f32's range, subnormals too
    power = (rng.uniform(-150, 128, base.size) / np.log2(base.astype(np.float64))).astype(np.float32)
    near_one = (1 + rng.normal(0, 1e-5, 100_000)).astype(np.float32)
    a = np.concatenate([a, base, near_one])
    b = np.concatenate(
        [b, power, (rng.uniform(-100, 88, near_one.size) / np.log(near_one.astype(np.float64))).astype(np.float32)]
    )
    got = loops("pow_f32", a, b)
    with np.errstate(all="ignore"):
        exact = np.power(a.astype(np.float64), b.astype(np.float64))
    error, at = largest_error(got, exact)
    assert error <= 0.51, (a[at], b[at], got[at], exact[at], error)
    zero = exact == 0
    assert (np.signbit(got) == np.signbit(exact))[zero].all()


def test_pow_f64_and_fma(loops):
    a, b = pairs(7, "f64", 10_000)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(loops("pow_f64", a, b), in_wider(np.power, a, b), rtol=1e-15, atol=0)
    one = np.float64([1 + 2.0**-30])
    assert loops("fma_f64", one, one, -one)[0] == 2.0**-30 + 2.0**-60
    one = np.float32([1 + 2.0**-20])
    assert loops("fma_f32", one, one, -one)[0] == np.float32(2.0**-20 + 2.0**-40)


def test_hot_loops_are_vectorised(loops):
    if not is_gcc():
        pytest.skip("-fopt-info-vec is gcc's")
    hot = {f"{name}_f32" for name in (*LIMITS_F32, *EXACT, "pow", "minimum", "maximum")}
    hot |= {f"{t}_{way}" for t in STORAGE for way in ("load", "store", "round")}
    hot |= {f"sat_{t}_f32" for t in ("i8", "u8", "i16", "u16", "i32", "u32", *NARROW)}
    hot |= {f"{name}_{t}" for name in ("floordiv", "floormod") for t in ("i8", "u8", "i16", "u16", "i32", "u32")}
    hot |= {f"{name}_{t}" for name in ("minimum", "maximum", "sign") for t in INTEGERS} | {f"abs_{t}" for t in SIGNED}
    if loops.machine != "native":  # SSE shifts all lanes by one count, and their reduction shifts each by its own
        hot -= {"sin_f32", "cos_f32", "tan_f32"}
    assert hot <= set(SIGNATURES)
    scalar = hot - loops.vectorised()
    assert not scalar, f"gcc left these loops scalar: {sorted(scalar)}"


# ---- storage formats


F16 = ("f16_load", "f16_store", "f16_round")


def test_f16_through_the_compilers_own_type(tmp_path):
    """The header takes whichever of the two ways becomes vector code; they have the same bits, those of NaN
    included.
    """
    probe = [COMPILER, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    if "__FLT16_MAX__" not in subprocess.run(probe, capture_output=True, text=True).stdout:
        pytest.skip("no _Float16")
    ways = []
    for native in (0, 1):
        (directory := tmp_path / str(native)).mkdir()
        ways.append(Loops(directory, "native", F16, [f"-DGRADC_F16_NATIVE={native}"]))
    test_load_every_pattern(ways[1], "f16")
    test_store_and_round(ways[1], "f16")
    nans = np.random.default_rng(14).integers(0x7F800001, 0x80000000, 50_000, np.uint32)
    x = np.concatenate([storage_samples("f16"), nans.view(np.float32), (nans | 0x80000000).view(np.float32)])
    for name, given in zip(F16, (np.arange(1 << 16), x, x), strict=True):
        own, compilers = (way(name, given) for way in ways)
        assert own.tobytes() == compilers.tobytes(), name


@pytest.mark.parametrize("machine", ["x86-64", "haswell", "skylake-avx512", "sapphirerapids", "znver2"])
def test_f16_is_vectorised_for_other_processors(machine, tmp_path):
    if not is_gcc() or platform.machine() != "x86_64":
        pytest.skip("gcc's report, for x86-64")
    assert Loops(tmp_path, machine, F16).vectorised() == set(F16)  # nothing is run


@pytest.mark.parametrize("t", STORAGE)
def test_load_every_pattern(loops, t):
    bits = np.arange(2 ** (8 * np.dtype(NUMPY[t]).itemsize))
    stored = from_bits(bits & 15 if t == "f4e2m1" else bits, NUMPY[t])  # one to a byte: the upper bits are nothing
    got, expected = loops(f"{t}_load", bits), stored.astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(got.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.isnan(got[~number]).all()


def storage_samples(t: str) -> np.ndarray:
    """Random bit patterns, and every value of the format with the midpoints to its neighbours and those midpoints'
    own.
    """
    values = np.sort(every_value(t)[np.isfinite(every_value(t))])
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    near = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    rng = np.random.default_rng(8)
    usual = rng.normal(0, 1, SAMPLES // 4).astype(np.float32) * np.exp2(rng.integers(-20, 17, SAMPLES // 4)).astype(
        np.float32
    )
    edges = np.float32(
        [0.0, -0.0, np.inf, -np.inf, 448, 464, 465, 57344, 61440, 65504, 65519.996, 65520, 3.4e38, -3.4e38, 1e-45]
    )
    return np.concatenate([random_f32(9), usual, values, *near, edges])


def expected_store(t: str, x: np.ndarray) -> np.ndarray:
    """ml_dtypes' rounding, with the saturation of finite values that gradc adds to the f8 formats, one zero for NaN in
    f4e2m1, and e8m0 right below 2^-126.
    """
    largest = {"f8e4m3": 448.0, "f8e5m2": 57344.0}.get(t)
    if largest is not None:
        x = np.where(np.isfinite(x), np.clip(x, -np.float32(largest), np.float32(largest)), x)
    if t == "f4e2m1":
        x = np.where(np.isnan(x), np.float32(np.nan), x)
    if t == "e8m0":  # ml_dtypes rounds what lies just above its least value up
        x = np.where((x > 0) & (x < np.float32(1.5 * 2.0**-127)), np.float32(2.0**-127), x)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(NUMPY[t])


@pytest.mark.parametrize("t", STORAGE)
def test_store_and_round(loops, t):
    x = storage_samples(t)
    expected = expected_store(t, x)
    as_f32 = expected.astype(np.float32)
    number = ~np.isnan(as_f32)
    got = loops(f"{t}_store", x)
    assert np.array_equal(got[number], expected.view(got.dtype)[number])
    assert np.isnan(got[~number].view(NUMPY[t]).astype(np.float32)).all()
    rounded = loops(f"{t}_round", x)
    assert np.array_equal(rounded.view(np.uint32)[number], as_f32.view(np.uint32)[number])
    assert np.isnan(rounded[~number]).all()


def test_f8_saturates_finite_values_only(loops):
    x = np.float32([449, 1e30, -1e30, np.inf, -np.inf, np.nan])
    assert loops("f8e4m3_store", x).tolist()[:3] == [0x7E, 0x7E, 0xFE]
    assert np.isnan(loops("f8e4m3_round", x)[3:]).all()
    assert loops("f8e5m2_round", 1000 * x).tolist()[:5] == [57344, 57344, -57344, np.inf, -np.inf]


def test_the_four_bit_floats():
    """Every value, every midpoint, and what lies one f32 beside it: written from the formats' definitions."""
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert from_bits(np.arange(16), NUMPY["f4e2m1"]).astype(np.float32).tolist() == [*e2m1, *(-v for v in e2m1)]
    e8m0 = from_bits(np.arange(256), NUMPY["e8m0"]).astype(np.float64)
    assert e8m0[:255].tolist() == [2.0 ** (k - 127) for k in range(255)] and np.isnan(e8m0[255])


def test_f4e2m1_stores_the_nearest_value(loops):
    x = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, np.inf, np.nan])  # ties go to the even code
    up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))
    assert loops("f4e2m1_store", x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 8]
    assert loops("f4e2m1_store", up).tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert loops("f4e2m1_store", down).tolist()[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert loops("f4e2m1_store", -x).tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15, 15, 8]


def test_e8m0_stores_the_nearest_power_of_two(loops):
    k = np.arange(-127, 127)
    middle = np.ldexp(np.float64(1.5), k).astype(np.float32)
    assert np.array_equal(loops("e8m0_store", middle), k + 128)  # half-way goes up
    assert np.array_equal(loops("e8m0_store", np.nextafter(middle, np.float32(0))), k + 127)
    x = np.float32([0.0, -0.0, -1.0, np.inf, -np.inf, np.nan, 1.5 * 2.0**127, 2.0**-149, 2.0**-128, 2.0**127])
    assert loops("e8m0_store", x).tolist() == [255] * 7 + [0, 0, 254]


def nearest(t: str, x: np.ndarray) -> np.ndarray:
    """The value of format t nearest to each f64, by comparing with the midpoints, which f64 holds."""
    values = np.unique(every_value(t)[np.isfinite(every_value(t))].astype(np.float64))
    even = (values.astype(NUMPY[t]).view(f"u{np.dtype(NUMPY[t]).itemsize}") & 1) == 0
    middle = (values[1:] + values[:-1]) / 2
    below = np.searchsorted(middle, x, "left")  # at a midpoint the lower of the two
    tie = (below < middle.size) & (middle[np.minimum(below, middle.size - 1)] == x)
    return values[below + (tie & (~even[below] if t != "e8m0" else True))]


@pytest.mark.parametrize("t", STORAGE)
def test_f64_is_rounded_once(loops, t):
    """Through f32 first, a value beside a midpoint would land on it: by the C and by the cast's NumPy meaning."""
    values = np.unique(every_value(t)[np.isfinite(every_value(t))].astype(np.float64))
    middle = (values[1:] + values[:-1]) / 2
    x = np.concatenate(
        [
            values,
            middle,
            np.nextafter(middle, np.inf),
            np.nextafter(middle, -np.inf),
            middle * (1 + 2.0**-40),
            middle * (1 - 2.0**-40),
        ]
    )
    x = np.concatenate([x, np.exp2(np.random.default_rng(13).uniform(-30, 17, 20_000))])
    x = x[(x >= values[0]) & (x <= values[-1]) & ((x > 0) | (t != "e8m0"))]
    expected = nearest(t, x)
    assert np.array_equal(loops(f"{t}_round", loops("odd_f64", x)).astype(np.float64), expected)
    assert np.array_equal(convert(x, DTYPES[t]).astype(np.float64), expected)
    far = np.array([1e300, -1e300, 1e-300, -1e-300, np.inf, -np.inf, np.nan, -0.0])
    c, py = loops(f"{t}_store", loops("odd_f64", far)), convert(far, DTYPES[t])
    number = ~np.isnan(py.astype(np.float32))
    assert (
        np.array_equal(c[number], py.view(c.dtype)[number])
        and np.isnan(c.view(py.dtype).astype(np.float32)[~number]).all()
    )


@pytest.mark.parametrize("t", STORAGE)
def test_a_cast_means_the_same_in_numpy(loops, t):
    x = storage_samples(t)
    c, py = loops(f"{t}_store", x), convert(x, DTYPES[t])
    number = ~np.isnan(py.astype(np.float32))
    assert (
        np.array_equal(c[number], py.view(c.dtype)[number])
        and np.isnan(c.view(py.dtype).astype(np.float32)[~number]).all()
    )


# ---- casts and integers


@pytest.mark.parametrize("f", FLOATS)
@pytest.mark.parametrize("t", [*INTEGERS, *NARROW])
def test_saturating_cast(loops, t, f):
    low, high = NARROW[t][1:] if t in NARROW else (int(np.iinfo(numpy_dtype(t)).min), int(np.iinfo(numpy_dtype(t)).max))
    dtype = numpy_dtype(f)
    edges = np.array([low, high, low - 1, high + 1, low - 0.5, high + 0.5, 0, -0.0, 0.99, -0.99, 1.5, -1.5], dtype)
    edges = np.concatenate([edges, np.nextafter(edges, dtype.type(np.inf)), np.nextafter(edges, dtype.type(-np.inf))])
    beyond = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**63, -(2.0**63), 2.0**64], dtype)
    spread = (np.random.default_rng(10).normal(0, 1, 5_000) * high).astype(dtype)
    x = np.concatenate([edges, beyond, spread, random_f32(11, 5_000).astype(dtype)])
    expected = [0 if math.isnan(v) else high if v >= high else low if v <= low else int(v) for v in x.tolist()]
    assert loops(f"sat_{t}_{f}", x).tolist() == expected


def integer_samples(t: str) -> tuple[np.ndarray, np.ndarray]:
    info, rng = np.iinfo(numpy_dtype(t)), np.random.default_rng(12)
    if t in ("i8", "u8"):
        every = np.arange(info.min, info.max + 1, dtype=numpy_dtype(t))
        return tuple(np.ravel(m) for m in np.meshgrid(every, every))
    negative = [-1, -2, -3, -7] if info.min else []
    edges = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, *negative], numpy_dtype(t))
    a, b = (np.ravel(m) for m in np.meshgrid(edges, edges))
    wide = rng.integers(info.min, info.max, (2, 20_000), numpy_dtype(t), endpoint=True)
    small = wide[1] >> rng.integers(0, info.bits, 20_000).astype(numpy_dtype(t))
    divisor = np.where(wide[1] == 0, 1, wide[1])  # multiples and their neighbours: where a rounded quotient would slip
    near = (wide[0] // divisor * divisor).astype(numpy_dtype(t)) - (rng.integers(0, 2, 20_000)).astype(numpy_dtype(t))
    return np.concatenate([a, wide[0], near, wide[0]]), np.concatenate([b, wide[1], divisor, small])


def wrap(value: int, t: str) -> int:
    bits = int(t[1:])
    value %= 1 << bits
    return value - (1 << bits) if t[0] == "i" and value >> (bits - 1) else value


@pytest.mark.parametrize("t", INTEGERS)
def test_integer_division_and_modulo(loops, t):
    """Python's own integers, with x // 0 = x % 0 = 0 and the least value // -1 wrapping."""
    a, b = integer_samples(t)
    x, y = a.tolist(), b.tolist()
    assert loops(f"floordiv_{t}", a, b).tolist() == [wrap(p // q, t) if q else 0 for p, q in zip(x, y, strict=True)]
    assert loops(f"floormod_{t}", a, b).tolist() == [p % q if q else 0 for p, q in zip(x, y, strict=True)]


@pytest.mark.parametrize("t", INTEGERS)
def test_integer_minimum_maximum_abs_sign(loops, t):
    a, b = integer_samples(t)
    assert np.array_equal(loops(f"minimum_{t}", a, b), np.minimum(a, b))
    assert np.array_equal(loops(f"maximum_{t}", a, b), np.maximum(a, b))
    assert np.array_equal(loops(f"abs_{t}", a), np.abs(a))
    assert np.array_equal(loops(f"sign_{t}", a), np.sign(a))


@pytest.mark.parametrize("t", INTEGERS)
def test_right_shift(loops, t):
    a, b = integer_samples(t)
    for by in (b, np.abs(b.astype(np.int64)).astype(b.dtype) % numpy_dtype(t).type(8 * b.itemsize + 1)):
        shifts = [min(n, 63) if n >= 0 else 63 for n in by.tolist()]
        expected = [v >> n if n < 8 * b.itemsize else -(v < 0) for v, n in zip(a.tolist(), shifts, strict=True)]
        wide = [n >= 8 * b.itemsize or n < 0 for n in by.tolist()]
        expected = [-(v < 0) if far else e for v, e, far in zip(a.tolist(), expected, wide, strict=True)]
        assert loops(f"right_shift_{t}", a, by).tolist() == expected == np.right_shift(a, by).tolist()


@pytest.mark.parametrize("t", INTEGERS)
def test_integer_pow(loops, t):
    a, b = (x[:3_000] for x in integer_samples(t))
    if t in ("i8", "u8"):
        a, b = integer_samples(t)

    def power(base: int, exponent: int) -> int:
        if exponent < 0:
            return {1: 1, -1: -1 if exponent % 2 else 1}.get(base, 0)
        return wrap(pow(base, exponent, 1 << 64), t)

    assert loops(f"pow_{t}", a, b).tolist() == [power(p, q) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
