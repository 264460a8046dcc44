"""What quantized models get from damaged files and wrong indices: one error with the position, or the stated value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import interp, ops, optim
from gradc.errors import GradcError, IndexOutOfRange, InvalidProblem, NotAscending, TypeRuleError

every_target = pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])

# -- codes outside of the code book ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "target"), [(6, "numpy"), (6, "cpu"), (6, "cuda-sim"), (1024, "cpu")])
def test_a_code_outside_of_the_code_book(rows: int, target: str) -> None:
    """Refused with its position before anything is written: what is donated stays as it was.  On the CPU a large weight
    is decoded in blocks.
    """

    def loss(x: Any, codes: Any, book: Any, scale: Any, state: Any) -> Any:
        weight = ops.gather(book, codes, axis=0) * scale
        return {"y": ops.linear(x, weight), "state": state + ops.sum(x)}

    types = {"x": "f32[2,1024]", "codes": f"u8[{rows},1024]", "book": "f32[12]", "scale": f"f32[{rows},1]"}
    graph = gradc.trace(loss, **types, state="f32[5]")
    module = gradc.compile(graph, target=target, donate=["state"])
    rng = np.random.default_rng(0)
    given = {
        "x": rng.standard_normal((2, 1024), np.float32),
        "codes": rng.integers(0, 12, (rows, 1024)).astype(np.uint8),
        "book": rng.standard_normal(12).astype(np.float32),
        "scale": np.ones((rows, 1), np.float32),
        "state": np.arange(5, dtype=np.float32),
    }
    y = np.asarray(module(**{**given, "state": given["state"].copy()})["y"])
    np.testing.assert_allclose(y, given["x"] @ given["book"][given["codes"]].T, rtol=1e-3, atol=1e-4)
    given["codes"][rows - 2, 7] = 12
    with pytest.raises(IndexOutOfRange, match=rf"12 at position {(rows - 2) * 1024 + 7} of 'codes'.*\[0, 12\)"):
        module(**given)
        module.synchronize()
    np.testing.assert_array_equal(given["state"], np.arange(5, dtype=np.float32))


# -- wild scales -------------------------------------------------------------------------------------------------------

SCALES = np.array([1.0, 0.0, -0.25, np.nan, np.inf, 1e-40, -1e-45, 3e38])
"""A negative one turns a row's sign, one of 0 gives zeros, NaN and infinity spoil their own groups, no other."""
GROUP = 32


def decode_nf4(codes: Any, scale: Any, zero: Any) -> Any:
    return ops.dequantize_nf4(codes, scale, block=(1, GROUP))


def decode_zero(codes: Any, scale: Any, zero: Any) -> Any:
    return ops.dequantize(codes, scale, zero, block=(1, GROUP))


def decode(codes: Any, scale: Any, zero: Any) -> Any:
    return ops.dequantize(codes, scale, block=(1, GROUP))


NF4 = np.asarray(interp.run(gradc.trace(lambda: ops.nf4_codebook()))["y"], np.float64)
FORMATS: dict[str, tuple[Callable[..., Any], Any]] = {
    "nf4": (decode_nf4, np.uint8),
    "int4": (decode, ml_dtypes.int4),
    "int4, zero points": (decode_zero, ml_dtypes.uint4),
    "int8": (decode, np.int8),
    "fp8": (decode, ml_dtypes.float8_e4m3fn),
    "fp4": (decode, ml_dtypes.float4_e2m1fn),
}


def drawn(form: str, rows: int, columns: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """The arrays of a product, and the centred codes in f64."""
    dtype = FORMATS[form][1]
    rng = np.random.default_rng(1)
    given = {
        "x": rng.integers(1, 5, (3, columns)).astype(np.float32),  # every sum of products is exact where it is finite
        "scale": np.ones((rows, columns // GROUP), np.float32),
        "zero": np.full((rows, columns // GROUP), 3, np.float32),
    }
    given["scale"][: len(SCALES), 1] = SCALES
    if form == "nf4":
        given["codes"] = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
        wide = NF4[np.stack([given["codes"] & 15, given["codes"] >> 4], -1).reshape(rows, columns)]
    else:
        low = 0 if dtype is ml_dtypes.uint4 else -4
        given["codes"] = rng.integers(low, 5, (rows, columns)).astype(dtype)
        wide = given["codes"].astype(np.float64) - (3 if "zero" in form else 0)
    return given, wide


@every_target
@pytest.mark.parametrize("name", ["i8", "u4", "f8e4m3", "f4e2m1"])
def test_values_over_wild_scales_are_clamped(name: str, target: str) -> None:
    """x / s rounded and clamped, whatever s is; NaN becomes 0 in formats that have none."""
    x = np.array([0.0, 1, -1, 3.5, -np.inf, np.inf, np.nan, 1e-40], np.float32)
    given = {"x": np.tile(x, (len(SCALES), 1)), "s": SCALES.astype(np.float32)[:, None]}
    graph = gradc.trace(
        lambda x, s: ops.cast(ops.quantize(x, s, block=(1, 8), dtype=name), "f32"),
        **{key: gradc.typeof(array) for key, array in given.items()},
    )
    found = np.asarray(gradc.compile(graph, target=target)(**given))
    low, high = {"i8": (-128, 127), "u4": (0, 15), "f8e4m3": (-448, 448), "f4e2m1": (-6, 6)}[name]
    with np.errstate(all="ignore"):
        ratio = np.clip(given["x"] / given["s"], low, high)
    if name in ("i8", "u4"):
        wanted = np.nan_to_num(np.rint(ratio), nan=0.0)
    else:
        kind = {"f8e4m3": ml_dtypes.float8_e4m3fn, "f4e2m1": ml_dtypes.float4_e2m1fn}[name]
        ratio = np.nan_to_num(ratio, nan=0.0) if name == "f4e2m1" else ratio
        wanted = ratio.astype(kind).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("rows", "target"), [(12, "numpy"), (12, "cpu"), (12, "cuda-sim"), (1056, "cpu")])
@pytest.mark.parametrize("form", FORMATS)
def test_wild_scales_spoil_their_own_results_alone(form: str, rows: int, target: str) -> None:
    """Value and gradients of a product against f64: which are NaN, which infinite, and the others to rounding."""
    columns = 64 if rows == 12 else 1024
    given, wide = drawn(form, rows, columns)
    types = {name: gradc.typeof(array) for name, array in given.items()}
    function = FORMATS[form][0]
    graph = gradc.trace(lambda x, codes, scale, zero: ops.linear(x, function(codes, scale, zero)), **types)
    module = gradc.compile(graph, wrt=["x", "scale"], target=target)
    y, residuals = module.forward(**given)
    found = module.backward(residuals, np.ones((3, rows), np.float32))
    with np.errstate(all="ignore"):
        weight = (wide.reshape(rows, -1, GROUP) * given["scale"].astype(np.float64)[..., None]).reshape(rows, columns)
        products = given["x"].astype(np.float64)[:, None, :] * weight
        d_scale = (given["x"].astype(np.float64).sum(0) * wide).reshape(rows, -1, GROUP).sum(-1)
        d_x = np.broadcast_to(weight.sum(0), (3, columns))
        wanted = products.sum(-1)
        bound = np.abs(products).sum(-1)
    agrees(np.asarray(y), wanted, bound)
    agrees(np.asarray(found["scale"]), d_scale, np.abs(wide).reshape(rows, -1, GROUP).sum(-1) * 12)
    with np.errstate(all="ignore"):
        agrees(np.asarray(found["x"]), d_x, np.abs(weight).sum(0)[None])


def agrees(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], size: np.ndarray[Any, Any]) -> None:
    """To f32's rounding of what is added up; what exceeds f32 is infinite, and a sum with both infinities NaN."""
    largest = float(np.finfo(np.float32).max)
    safe = np.isfinite(wanted) & (np.broadcast_to(size, wanted.shape) < largest / 4)
    np.testing.assert_array_equal(np.isfinite(found) | ~safe, True, "finite where every term is small")
    error = np.abs(found.astype(np.float64) - wanted)[safe]
    assert (error <= 2e-5 * np.broadcast_to(size, wanted.shape)[safe] + 1e-40).all()
    spoiled = np.isnan(wanted) | np.isinf(wanted)
    assert not np.isfinite(found[spoiled]).any()


# -- shapes ------------------------------------------------------------------------------------------------------------


@every_target
def test_groups_that_do_not_divide_a_row(target: str) -> None:
    """The last group is shorter, and has a scale of its own; a scale too few is an error with both sizes."""
    graph = gradc.trace(
        lambda codes, scale: ops.dequantize(codes, scale, block=(1, GROUP)), codes="i8[3,K]", scale="f32[3,(K+31)//32]"
    )
    module = gradc.compile(graph, target=target)
    codes = np.arange(300, dtype=np.int64).reshape(3, 100).astype(np.int8)
    scale = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    wanted = codes.astype(np.float32) * scale.repeat(GROUP, 1)[:, :100]
    np.testing.assert_array_equal(np.asarray(module(codes=codes, scale=scale)), wanted)
    with pytest.raises(InvalidProblem, match=r"scale.*3.*4"):
        module(codes=codes, scale=scale[:, :3].copy())
    with pytest.raises(TypeRuleError, match=r"scale has shape \[3,3\]; blocks of \[1,32\] in \[3,100\] need \[3,4\]"):
        gradc.trace(
            lambda codes, scale: ops.dequantize(codes, scale, block=(1, GROUP)), codes="i8[3,100]", scale="f32[3,3]"
        )


# -- bags of quantized rows --------------------------------------------------------------------------------------------


def test_weights_have_no_meaning_where_the_mode_is_max() -> None:
    types = {"i": "i64[N]", "codes": "i8[V,4]", "scale": "f32[V,1]", "o": "i64[B]", "w": "f32[N]"}
    with pytest.raises(TypeRuleError, match="per_sample_weights have no meaning with mode='max'"):
        gradc.trace(
            lambda i, codes, scale, o, w: ops.embedding_bag(
                i, ops.dequantize(codes, scale, block=(1, 4)), o, w, mode="max"
            ),
            **types,
        )


ENDS = (-1, 5, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63))


@pytest.fixture(scope="module")
def bags() -> dict[tuple[str, str], gradc.Module]:
    return {}


def bag(bags: dict[tuple[str, str], gradc.Module], mode: str, target: str) -> gradc.Module:
    if (mode, target) not in bags:
        graph = gradc.trace(
            lambda i, codes, scale, o: ops.embedding_bag(i, ops.dequantize(codes, scale, block=(1, 4)), o, mode=mode),
            **{"i": "i64[N]", "codes": "i8[5,4]", "scale": "f32[5,1]", "o": "i64[B]"},
        )
        bags[mode, target] = gradc.compile(graph, wrt=["scale"], target=target)
    return bags[mode, target]


def arguments(**other: Any) -> dict[str, Any]:
    codes = np.arange(20, dtype=np.int8).reshape(5, 4)
    return {
        "i": np.array([1, 4, 0, 2]),
        "codes": codes,
        "scale": np.ones((5, 1), np.float32),
        "o": np.array([0, 2]),
        **other,
    }


@every_target
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_indices_at_the_ends_of_their_type(mode: str, target: str, bags: Any) -> None:
    module = bag(bags, mode, target)
    for end in ENDS:
        with pytest.raises(IndexOutOfRange, match=rf"{end} at position 2 of 'i' is out of range \[0, 5\)"):
            module.forward(**arguments(i=np.array([1, 4, end, 2])))
            module.synchronize()
    y, _ = module.forward(**arguments())  # what was reported is forgotten
    assert np.isfinite(np.asarray(y)).all()


@every_target
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets_that_go_back_or_out(mode: str, target: str, bags: Any) -> None:
    module = bag(bags, mode, target)
    for offsets, error, text in (
        ([0, 3, 2], NotAscending, "2 at position 2 of 'o(ffsets)?' is below the 3 before it"),
        ([0, 2**63 - 1], (NotAscending, IndexOutOfRange), f"{2**63 - 1} at position 1"),
        ([0, -(2**63)], (NotAscending, IndexOutOfRange), f"{-(2**63)} at position 1"),
        ([0, 2, 2**63 - 1, 3], (NotAscending, IndexOutOfRange), "at position [23]"),
        ([-(2**63), 2], IndexOutOfRange, f"{-(2**63)} at position 0"),
    ):
        with pytest.raises(error, match=text):
            module.forward(**arguments(o=np.array(offsets)))
            module.synchronize()
    assert issubclass(NotAscending, GradcError)
    y, _ = module.forward(**arguments())
    assert np.isfinite(np.asarray(y)).all()


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_step_refuses_bags_before_it_writes_a_table(mode: str, target: str) -> None:
    def loss(t: Any, i: Any, o: Any) -> Any:
        return ops.sum(ops.embedding_bag(i, t, o, mode=mode))

    step = gradc.step(loss, optim.rowwise_adagrad(0.1), sparse="t", target=target)
    table = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    state = step.init(table)
    good = {"i": np.array([1, 4, 0, 2]), "o": np.array([0, 2, 3])}
    _, table, state = step(table, state, **good)
    before = [np.array(x) for x in (table, *state.values())]
    for end in ENDS:
        with pytest.raises(IndexOutOfRange, match=f"{end} at position 3 of 'i'"):
            float(np.asarray(step(table, state, **good | {"i": np.array([1, 4, 0, end])})[0]))
    for offsets, text in (([0, 3, 2], "2 at position 2 of 'o'"), ([0, 5, 5], "5 at position 1 of 'o'")):
        with pytest.raises((NotAscending, IndexOutOfRange), match=text):
            float(np.asarray(step(table, state, **good | {"o": np.array(offsets)})[0]))
    for kept, now in zip(before, (table, *state.values()), strict=True):
        np.testing.assert_array_equal(now, kept)
    step(table, state, **good)
    assert not np.array_equal(np.asarray(table), before[0])
