"""Whatever is given that cannot be: one typed error, with both numbers where there are two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import GradcError, InvalidProblem, TypeRuleError
from gradc.ir.types import DTYPES, typeof
from gradc.runtime.host.arrays import to_numpy

f32 = np.float32
LONG = "n" * 200


# -- Python numbers and dtypes -----------------------------------------------------------------------------------------

# An oracle of its own: what each integer type holds, by NumPy's and ml_dtypes' own words.
HELD = {
    name: (int(info.min), int(info.max))
    for name in ("i8", "i16", "i32", "i64", "u8", "u16", "u32")
    for info in [np.iinfo(DTYPES[name].np)]
}
HELD |= {"i2": (-2, 1), "i4": (-8, 7), "u2": (0, 3), "u4": (0, 15), "bool": (0, 1)}
NOT_INTEGERS = (1.5, math.inf, -math.inf, math.nan, 1e300)


def text_constant(value: str, dtype: str) -> Any:
    return gradc.parse(
        f"graph @g() {{\n  %0: {dtype}[] = constant {{dtype={dtype}, shape=[], value=[{value}]}}\n  return y=%0\n}}"
    )


@pytest.mark.parametrize("dtype", HELD)
def test_a_number_that_a_dtype_does_not_hold(dtype: str) -> None:
    low, high = HELD[dtype]
    for value in (low, high):
        made = gradc.trace(lambda x, v=value: (x, ops.constant((v,), dtype, ())), x=f"{dtype}[N]")
        assert int(gradc.interp.run(made, x=np.zeros(1, DTYPES[dtype].np))["y1"]) == value
        assert text_constant(str(value), dtype)
    for value in (low - 1, high + 1, *NOT_INTEGERS):
        writers: list[Callable[..., Any]] = [
            lambda x, v=value: (x, ops.constant((v,), dtype, ())),
            lambda x, v=value: ops.pad(x, ((1, 0),), v),
        ]
        if dtype != "bool":
            writers += [lambda x, v=value: ops.clamp(x, 0, v)]
        if DTYPES[dtype].bits >= 8 or dtype == "bool":
            writers += [lambda x, v=value: ops.where(ops.eq(x, x), x, v)]
        for write in writers:
            with pytest.raises(TypeRuleError) as caught:
                gradc.trace(write, x=f"{dtype}[N]")
            said = str(caught.value)
            assert any(form in said for form in (str(value), str(float(value)))) and (
                "operand" in said or str(high) in said or abs(value) > 2**63
            ), said
        with pytest.raises(GradcError):
            text_constant(
                float(value).hex() if isinstance(value, float) and math.isfinite(value) else str(value), dtype
            )


def test_lists_do_not_wrap() -> None:
    with pytest.raises(TypeRuleError, match="70000 does not fit i16, which holds -32768 to 32767"):
        gradc.trace(lambda x: ops.add(x, [70000]), x="i16[N]")
    assert gradc.trace(lambda x: ops.add(x, [7]), x="i16[N]")


def test_a_border_of_64_bits_is_exact() -> None:
    graph = gradc.trace(lambda x: ops.pad(x, ((1, 0),), 2**53 + 1), x="i64[N]")
    assert gradc.interp.run(graph, x=np.zeros(1, np.int64))["y"][0] == 2**53 + 1


def test_integers_become_floats_as_in_numpy() -> None:
    for value in (2**53 + 1, 2**64 - 1, -(2**63), 16777217, 10**300):
        for dtype in ("f32", "f64"):
            graph = gradc.trace(lambda x, v=value: x + v, x=f"{dtype}[N]")
            with np.errstate(over="ignore"):
                want = np.zeros(1, DTYPES[dtype].np) + np.asarray(float(value)).astype(DTYPES[dtype].np)
                np.testing.assert_array_equal(gradc.interp.run(graph, x=np.zeros(1, DTYPES[dtype].np))["y"], want)


HUGE: list[Callable[[Any, int], Any]] = [
    lambda x, n: x + n,
    lambda x, n: n * x,
    lambda x, n: ops.pad(x, ((1, 0), (0, 0)), n),
    lambda x, n: ops.clamp(x, 0, n),
    lambda x, n: ops.where(ops.gt(x, 0.0), x, n),
    lambda x, n: ops.constant((n,), "f32", ()),
    lambda x, n: ops.constant((n,), "i32", ()),
    lambda x, n: ops.softplus(x, beta=n),
    lambda x, n: ops.layer_norm(x, (4,), eps=n),
    lambda x, n: ops.sum(x, axis=n),
    lambda x, n: ops.reshape(x, (n,)),
    lambda x, n: x[n],
    lambda x, n: x[:n],
    lambda x, n: ops.iota((n,)),
    lambda x, n: x**n,
]


@pytest.mark.parametrize("number", range(len(HUGE)))
def test_integers_that_nothing_holds(number: int) -> None:
    for value in (10**400, -(10**400), 10**5000):  # Python does not even print the last
        with pytest.raises(TypeRuleError, match=r"an integer of \d+ bits"):
            gradc.trace(lambda x, v=value: HUGE[number](x, v), x="f32[N,4]")


def test_numpy_scalars_are_arrays_of_their_dtype() -> None:
    assert gradc.trace(lambda x: x + np.float32(1.5), x="f32[N]") and gradc.trace(
        lambda x: x + np.float64(1.5), x="f32[N]"
    )  # a float64 is a Python float
    for value in (np.int64(1), np.bool_(True), np.uint64(1), np.float16(1)):
        with pytest.raises(TypeRuleError):
            gradc.trace(lambda x, v=value: x + v, x="f32[N]")


def test_texts_that_are_no_dtype() -> None:
    with pytest.raises(GradcError, match="is not a dtype"):
        gradc.parse('graph @g(%x: f32[4]) {\n  %0: i32[4] = bitcast %x {to="\\ud800"}\n  return y=%0\n}')
    for what in ("\ud800", "a\0", 5, object(), "f" * 10**5):
        with pytest.raises(TypeRuleError):
            gradc.trace(lambda x, w=what: ops.cast(x, w), x="f32[N]")


# -- arguments of calls ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(lambda x, k: ops.sum(x * ops.cast(k, "f32")), x="f32[N]", k="i32[]"), wrt=["x"])


X = np.ones(3, f32)


@pytest.mark.parametrize(
    "inputs", [[X], X, (X, 1), "x", 5, {1: X, "k": 1}, {"x": X, None: 1}, [], np.array([])], ids=lambda v: str(v)[:20]
)
def test_inputs_that_are_no_mapping(inputs: Any, module: gradc.Module) -> None:
    for call in (
        module,
        module.forward,
        module.forward.run,
        module.value_and_grad,
        lambda given: gradc.interp.run(module.graph, given),
    ):
        with pytest.raises(InvalidProblem, match="by name"):
            call(inputs)
    for ask in (module.can_implement, module.forward.can_implement):
        try:
            assert isinstance(ask(inputs), InvalidProblem)
        except InvalidProblem:
            pass


def test_scalars_of_calls(module: gradc.Module) -> None:
    for value in (10**5000, 2**64, 2**40, math.nan, 1.5):
        with pytest.raises(InvalidProblem):
            module(x=X, k=value)


# -- nested parameters -------------------------------------------------------------------------------------------------


def test_parameters_that_hold_themselves() -> None:
    cyclic: dict[str, Any] = {"w": "f32[3]"}
    cyclic["again"] = {"below": cyclic, "too": cyclic}
    around: list[Any] = []
    around.append(around)
    deep: Any = "f32[N]"
    for _ in range(100_000):
        deep = [deep]
    for tree, match in ((cyclic, "hold themselves"), (around, "hold themselves"), (deep, "100 is the most")):
        with pytest.raises(TypeRuleError, match=match):
            gradc.trace(lambda p: p, p=tree)
    with pytest.raises(TypeRuleError, match="hold themselves"):
        gradc.trace(lambda x: around, x="f32[N]")
    shared = {"w": "f32[3]"}
    assert gradc.trace(lambda p: p["a"]["w"] + p["b"]["w"], p={"a": shared, "b": shared}).input_names == (
        "p.a.w",
        "p.b.w",
    )


# -- names -------------------------------------------------------------------------------------------------------------


def test_the_longest_name_can_be_differentiated_and_saved(tmp_path: Any) -> None:
    graph = gradc.parse(
        f"graph @{LONG}(%{LONG}: f32[N]) {{\n  %0: f32[N] = mul %{LONG}, %{LONG}\n  %1: f32[N] = exp %0\n  return"
        f" {LONG}=%1\n}}"
    )
    joint = graph
    for _ in range(4):
        joint = gradc.differentiate(joint, [LONG])
        assert gradc.parse(str(joint)) == joint
    for target in ("numpy", "cpu"):
        module = gradc.compile(graph, wrt=[LONG], target=target, save="all")
        module.save(tmp_path / target)
        again = gradc.load_module(tmp_path / target)
        y, residuals = again.forward({LONG: X})
        np.testing.assert_allclose(again.backward(residuals, y)[LONG], 2 * np.exp(2.0), rtol=1e-5)
        assert str(again) and again.explain(N=3) and again.source()
    for name in (LONG + "n", "d." + LONG + "n" * 9):
        with pytest.raises(TypeRuleError, match="200 characters at most"):
            gradc.trace(
                lambda **k: next(iter(k.values())), **({name: "f32[N]"} if "." not in name else {"p": {name: "f32[N]"}})
            )


def test_names_of_python_that_are_not_ascii(tmp_path: Any) -> None:
    def model(x: Any, w: Any) -> Any:
        größe = ops.exp(x @ w)
        é = ops.tanh(größe)
        with gradc.scope("s" * 190):
            sum_of_all_of_the_squares = ops.exp(é * größe)
        return sum_of_all_of_the_squares * é

    module = gradc.compile(gradc.trace(model, x="f32[N,4]", w="f32[4,4]"), wrt=["w"], save="all")
    module.save(tmp_path / "m")
    assert [r.name for r in gradc.load_module(tmp_path / "m").residuals] == [r.name for r in module.residuals]


# -- arrays of other libraries -----------------------------------------------------------------------------------------


def raising(error: BaseException) -> property:
    def get(self: Any) -> Any:
        raise error

    return property(get)


def giving(value: Any) -> property:
    return property(lambda self: value)


def foreign(**members: Any) -> Any:
    return type("Foreign", (), members)()


def fails(*_: Any, **__: Any) -> Any:
    raise OverflowError("not today")


BUFFER = np.ones(3, f32)
INTERFACE = {"shape": (3,), "typestr": "<f4", "data": (BUFFER.ctypes.data, False), "version": 3}
FOREIGN = {
    **{
        f"{name} raises {type(error).__name__}": foreign(**{name: raising(error)})
        for name in (
            "__array__",
            "__dlpack_device__",
            "__array_interface__",
            "__cuda_array_interface__",
            "__array_namespace__",
            "shape",
            "dtype",
        )
        for error in (RuntimeError("no"), KeyError("no"), MemoryError(), RecursionError(), ZeroDivisionError())
    },
    "__array__ fails": foreign(__array__=fails),
    "__dlpack__ fails": foreign(__dlpack_device__=lambda self: (1, 0), __dlpack__=fails),
    "__array_namespace__ fails": foreign(__array__=lambda self, *a, **k: BUFFER, __array_namespace__=fails),
    "__array__ gives None": foreign(__array__=lambda self, *a, **k: None),
    "__array__ gives a list": foreign(__array__=lambda self, *a, **k: [1.0]),
    "__array__ gives objects": foreign(__array__=lambda self, *a, **k: np.array([object()])),
    "a capsule that is none": foreign(__dlpack_device__=lambda self: (1, 0), __dlpack__=lambda self, **k: object()),
    **{
        f"device {str(d)[:12]}": foreign(__dlpack_device__=lambda self, d=d: d, __dlpack__=fails)
        for d in (None, (), ("cpu", 0), (1,), 5, (10**30, 0))
    },
    **{
        f"interface {key}={str(value)[:12]}": foreign(__array_interface__=giving({**INTERFACE, key: value}))
        for key, value in (
            ("shape", (-1,)),
            ("shape", (2**62, 2**62)),
            ("shape", "3"),
            ("shape", None),
            ("shape", (1.5,)),
            ("typestr", "<f3"),
            ("typestr", "O8"),
            ("typestr", 5),
            ("typestr", "|O"),
            ("strides", (4, 4)),
            ("strides", "x"),
            ("data", None),
            ("data", (None, 5)),
            ("data", ("x", False)),
        )
    },
    **{f"interface {str(value)[:12]}": foreign(__array_interface__=giving(value)) for value in (None, 5, [], {}, "x")},
    "a short buffer": foreign(
        __array_interface__=giving({"shape": (1000,), "typestr": "<f4", "data": b"1234", "version": 3})
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_arrays_that_raise_or_lie(what: str, module: gradc.Module) -> None:
    value = FOREIGN[what]
    calls = [lambda: module(x=value, k=1), lambda: module.forward({"x": value, "k": 1}), lambda: to_numpy(value)]
    if "namespace" not in what:  # of which tracing asks nothing
        calls += [lambda: gradc.trace(lambda x: x * 2.0, x=value), lambda: gradc.trace(lambda x: x + value, x="f32[3]")]
    for number, call in enumerate(calls):
        with pytest.raises(GradcError):
            pytest.fail(f"call {number} gave {call()}")


def test_shapes_that_are_none() -> None:
    for shape in ((-1,), ("a",), 5, (1.5j,)):
        with pytest.raises(TypeRuleError):
            typeof(foreign(dtype=np.dtype(f32), shape=shape))
    with pytest.raises(KeyboardInterrupt):  # what is not the object's fault passes
        to_numpy(foreign(__array__=raising(KeyboardInterrupt())))
