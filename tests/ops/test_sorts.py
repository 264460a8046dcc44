"""Sorts: positions and values are torch's stable ones on every target, whatever the threads; gradients of what is read
by position; the library call in a program's text, verifier, explanation and memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import interp, ops
from gradc.errors import GradcError, TypeRuleError, Unsupported
from gradc.ir.kernel import Call
from gradc.ir.program_text import parse_program
from gradc.ir.types import DTYPES
from gradc.ir.verify import verify_program
from gradc.runtime.host import pool

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.optimised

SHAPES = ((7, 300), (2, 1, 3, 70), (0, 3), (3, 0), (), (2500,))
"""Rows of few and many keys, of more than one tile of the GPU, empty ones, a scalar."""


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers with ties, both zeros, infinities and NaN."""
    random = np.random.default_rng(seed)
    x = np.round(random.standard_normal(shape) * 4) / 4
    flat = np.atleast_1d(x).reshape(-1)
    if flat.size > 8:
        flat[:5] = [np.nan, -0.0, np.inf, -np.inf, np.nan]
    return random.permuted(flat).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(DTYPES)), st.booleans(), st.integers(0, 40))
def test_argsort_of_every_dtype(seed: int, name: str, descending: bool, n: int) -> None:
    """All bits that a dtype has, sorted by Python's own stable sort."""
    dtype = DTYPES[name]
    raw = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, np.uint8)
    raw = raw & (2**dtype.bits - 1) if dtype.bits < 8 else raw
    x = raw.view(bool if name == "bool" else dtype.np)
    graph = gradc.trace(lambda x: ops.argsort(x, descending=descending), x=f"{name}[{n}]")
    (got,) = interp.run(graph, {"x": x}).values()
    wide = [float(v) if dtype.is_float else int(v) for v in x.tolist()] if name != "i64" else x.tolist()
    places = [(v != v, 0.0 if v != v else v) for v in wide]
    want = sorted(range(n), key=lambda i: places[i], reverse=descending)  # equal elements keep their order
    assert got.tolist() == want


def sorted_at_once(target: str, dtype: str = "f32", shapes: Any = SHAPES, **options: Any) -> Any:
    """One module of all shapes: sorted both ways, along the first axis and the last."""

    def fn(*xs: Any) -> dict[str, Any]:
        out = {}
        for k, x in enumerate(xs):
            for axis in {0, max(x.rank - 1, 0)}:
                for down in (False, True):
                    out[f"v{k}_{axis}_{down}"], out[f"i{k}_{axis}_{down}"] = ops.sort(x, axis, down)
        return out

    names = [f"x{k}" for k in range(len(shapes))]
    text = f"lambda {', '.join(names)}: fn({', '.join(names)})"
    graph = gradc.trace(
        eval(text, {"fn": fn}),
        **{n: f"{dtype}[{','.join(map(str, s))}]" for n, s in zip(names, shapes, strict=True)},
    )
    return gradc.compile(graph, target=target, **options)


@pytest.mark.parametrize(
    ("target", "dtype"), [("cpu", "f32"), ("cpu", "f64"), ("cuda-sim", "f32"), ("cuda-sim", "i64")]
)
def test_sorts_are_torchs(target: str, dtype: str) -> None:
    shapes = (*SHAPES, (2, 40000), (40001,)) if target == "cpu" else SHAPES
    module = sorted_at_once(target, dtype, shapes)
    arrays = {f"x{k}": values(s, k) for k, s in enumerate(shapes)}
    if dtype == "i64":  # beside small numbers the ends of the range
        ends = np.iinfo(np.int64)
        arrays = {n: np.where(np.abs(x) < 99, x * 4, 0) for n, x in arrays.items()}
        arrays = {n: np.where(x == 3, ends.min, np.where(x == 5, ends.max, x.astype(int))) for n, x in arrays.items()}
    arrays = {n: np.asarray(x).astype(DTYPES[dtype].np) for n, x in arrays.items()}
    found = module(**arrays)
    for name, got in found.items():
        which, axis, down = name[1:].split("_")
        x = torch.from_numpy(arrays[f"x{which}"])
        want, order = torch.sort(x, dim=int(axis), descending=down == "True", stable=True)
        np.testing.assert_array_equal(np.asarray(got), (want if name[0] == "v" else order).numpy(), err_msg=name)


THREADS = """
import hashlib, sys
import numpy as np
sys.path[:0] = {paths!r}
import gradc
from gradc import ops
def fn(x, y):
    a, i = ops.sort(x, 1)
    b, j = ops.topk(y, 7, 1)
    return {{"a": a, "i": i, "b": b, "j": j}}
module = gradc.compile(gradc.trace(fn, x="f32[2,50000]", y="f32[40,3000]"), ["x", "y"], target="cpu")
r = np.random.default_rng(0)
arrays = {{n: np.round(r.standard_normal(s) * 9).astype(np.float32) for n, s in (("x", (2, 50000)), ("y", (40, 3000)))}}
found = module(**arrays)
print(hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in found.values())).hexdigest())
"""


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    text = THREADS.format(paths=sys.path)
    runs = [
        subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "GRADC_NUM_THREADS": str(count)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for count in (1, 2, 5)
    ]
    assert len(set(runs)) == 1


# -- a part of the order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_the_first_of_a_long_row(target: str) -> None:
    """Few of many: rows that ascend, descend, are equal, and random ones."""
    n = 3000
    x = np.stack([np.arange(n), -np.arange(n), np.zeros(n), np.random.default_rng(0).integers(0, 50, n)])
    x = x.astype(np.float32)

    def fn(x: Any) -> Any:
        return *ops.topk(x, 5, 1), *ops.topk(x, 5, 1, largest=False), *ops.kthvalue(x, 100, 1), ops.topk(x, 0, 1)[0]

    found = gradc.compile(gradc.trace(fn, x=f"f32[4,{n}]"), target=target)(x=x)
    found = list(found.values())
    down, up = np.argsort(-x, 1, kind="stable")[:, :5], np.argsort(x, 1, kind="stable")
    want = [down, up[:, :5], up[:, 99]]
    for k, places in enumerate(want):
        np.testing.assert_array_equal(found[2 * k + 1], places)
        np.testing.assert_array_equal(
            found[2 * k], np.take_along_axis(x, places.reshape(4, -1), 1).reshape(places.shape)
        )
    assert found[6].shape == (4, 0)


def test_a_symbolic_axis_has_as_many_elements_as_are_asked_for() -> None:
    graph = gradc.trace(lambda x: ops.topk(x, 3), x="f32[2,N]")
    module = gradc.compile(graph, target="numpy")
    values_, places = module(x=np.arange(10, dtype=np.float32).reshape(2, 5)).values()
    assert places.tolist() == [[4, 3, 2]] * 2 and values_.tolist() == [[4, 3, 2], [9, 8, 7]]
    with pytest.raises(GradcError, match="N >= 3"):
        module(x=np.zeros((2, 2), np.float32))
    with pytest.raises(TypeRuleError, match="k=N is not an int"):
        gradc.trace(lambda x: ops.topk(x, x.shape[1]), x="f32[2,N]")


# -- gradients ---------------------------------------------------------------------------------------------------------


def routed(x: Any, gate: Any, w: Any) -> Any:
    """A mixture of experts: each token goes to its two best, and comes back weighted."""
    scores, experts = ops.topk(x @ gate, 2, 1)
    weights = ops.softmax(scores, 1)
    picked = ops.gather(w, experts, axis=0)  # [tokens, 2, in, out]
    out = ops.sum(ops.reshape(x, (6, 1, 4, 1)) * picked, 2)
    return ops.sum(ops.square(ops.sum(ops.reshape(weights, (6, 2, 1)) * out, 1)))


def test_routing_by_topk_trains() -> None:
    random = np.random.default_rng(3)
    given_ = {"x": random.standard_normal((6, 4)), "gate": random.standard_normal((4, 5))}
    given_["w"] = random.standard_normal((5, 4, 3))
    tensors = {n: torch.from_numpy(v).requires_grad_() for n, v in given_.items()}
    x, gate, w = tensors.values()
    scores, experts = torch.topk(x @ gate, 2, 1)
    out = (x.reshape(6, 1, 4, 1) * w[experts]).sum(2)
    want = (torch.softmax(scores, 1).reshape(6, 2, 1) * out).sum(1).square().sum()
    want.backward()
    graph = gradc.trace(routed, x="f64[6,4]", gate="f64[4,5]", w="f64[5,4,3]")
    for target in ("numpy", "cpu"):
        module = gradc.compile(graph, list(given_), target=target)
        value, gradients = module.value_and_grad(**given_)
        np.testing.assert_allclose(value, want.item(), rtol=1e-12)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(gradients[name], tensor.grad.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)


def test_second_order() -> None:
    """The gradient of a gradient's square through a sort and a top-k loss."""

    def of(x: Any, own: Any) -> Any:
        values_ = own.sort(x, 1)[0] if own is ops else torch.sort(x, dim=1)[0]
        best = own.topk(x, 2, 1)[0]
        return (values_ * values_ * values_).sum() + (best * best * best * best).sum()

    x = np.random.default_rng(0).standard_normal((3, 5))
    graph = gradc.trace(lambda x: of(x, ops), x="f64[3,5]")
    first = gradc.differentiate(graph, ["x"])
    t = torch.from_numpy(x).requires_grad_()
    (slope,) = torch.autograd.grad(of(t, torch), t, create_graph=True)
    found = interp.run(first, {"x": x, **{n: np.ones(()) for n in first.input_names if n != "x"}})
    np.testing.assert_allclose(found["d.x"], slope.detach(), rtol=1e-12)
    again = gradc.differentiate(first.with_outputs([("g", first.output("d.x"))]), ["x"])
    direction = np.random.default_rng(1).standard_normal((3, 5))
    ones = {n: np.ones(()) for n in again.input_names if n not in ("x", "d.g")}
    found = interp.run(again, {"x": x, "d.g": direction, **ones})
    (want,) = torch.autograd.grad(slope, t, torch.from_numpy(direction))
    np.testing.assert_allclose(found["d.x"], want, rtol=1e-12)


# -- the call in a program ---------------------------------------------------------------------------------------------


def test_a_programs_call_is_read_again_and_verified() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.argsort(x, 0), x="f32[N,3]"), target="cpu")
    program = module.forward.program
    again = parse_program(str(program))
    assert str(again) == str(program)
    verify_program(again)
    (at,) = [k for k, step in enumerate(program.steps) if isinstance(step, Call)]
    call: Any = program.steps[at]
    wrong = {
        "scales no such operand": replace(call, args=(replace(call.args[0], scale=call.args[0]),)),
        "keys are i64|is no library call|result is": replace(call, out=replace(call.out, buffer=call.args[0].buffer)),
        "there is no op": replace(call, op="argsort_row"),
    }
    for match, step in wrong.items():
        steps = (*program.steps[:at], step, *program.steps[at + 1 :])
        with pytest.raises(TypeRuleError, match=match):
            verify_program(replace(program, steps=steps))


def test_explain_and_memory_count_a_sort() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.sort(x), x="f32[1,100000]"), ["x"], target="cpu")
    assert "library argsort_rows" in module.explain() and "argsort_rows: a library call" in module.explain()
    assert module.forward.workspace_size() > 2 * 8 * 100000  # both sides of a radix pass
    assert module.forward.precision.bit_stable


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("op", [ops.argsort, ops.sort_segments])
def test_a_row_too_long_to_count_is_refused(op: Any, dtype: str, target: str) -> None:
    forward = gradc.compile(gradc.trace(lambda x: op(x), x=f"{dtype}[N]"), target=target).forward
    assert forward.workspace_size(N=2**31 - 3) > 0
    with pytest.raises(Unsupported, match="a sort of 2147483646 elements"):
        forward.workspace_size(N=2**31 - 2)


def test_bf16_keys_have_the_order_of_the_values() -> None:
    x = np.array([1.5, -0.0, 0.0, -2, np.nan, -np.inf], ml_dtypes.bfloat16)
    (got,) = interp.run(gradc.trace(ops.argsort, x="bf16[6]"), {"x": x}).values()
    assert got.tolist() == [5, 3, 1, 2, 0, 4]


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
def test_places_in_a_line(target: str) -> None:
    """Extremes, ties, infinities and NaN, of several dtypes in one module."""
    rng = np.random.default_rng(5)
    given: dict[str, np.ndarray] = {}
    for name, dtype in (("a", np.float32), ("b", np.int64), ("c", np.uint8), ("d", np.float64)):
        line, x = (rng.integers(0, 6, n).astype(dtype) for n in (17, 40))
        if dtype == np.int64:
            line[:2] = x[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
        if dtype in (np.float32, np.float64):
            line[:3] = -np.inf, -0.0, np.inf
            x[:4] = np.nan, -np.inf, np.inf, 0.0
        given |= {f"{name}.line": np.sort(line), f"{name}.x": x}
    names = {key.partition(".")[0] for key in given}

    def places(**nodes: Any) -> dict[str, Any]:
        found = {}
        for name in sorted(names):
            line, x = nodes[f"{name}_line"], nodes[f"{name}_x"]
            found[f"{name}_left"] = ops.searchsorted(line, x)
            found[f"{name}_right"] = ops.bucketize(x, line, right=True)
            found[f"{name}_in"] = ops.isin(x, line)
        return found

    arrays = {key.replace(".", "_"): value for key, value in given.items()}
    types = {key: str(gradc.typeof(value)) for key, value in arrays.items()}
    got = gradc.compile(gradc.trace(places, **types), target=target)(**arrays)
    for name in names:
        line, x = arrays[f"{name}_line"], arrays[f"{name}_x"]
        np.testing.assert_array_equal(got[f"{name}_left"], np.searchsorted(line, x, "left"))
        np.testing.assert_array_equal(got[f"{name}_right"], np.searchsorted(line, x, "right"))
        np.testing.assert_array_equal(got[f"{name}_in"], np.isin(x, line))


def test_what_needs_sizes_from_data_says_so() -> None:
    with pytest.raises(AttributeError, match="size of its result would depend on the data"):
        _ = ops.unique
    graph = gradc.trace(lambda i: ops.one_hot(i, 3), i="i64[N]")
    with pytest.raises(gradc.errors.IndexOutOfRange, match="one_hot"):
        gradc.compile(graph)(i=np.array([0, 3]))


SEGMENTS = {
    "few": lambda random, n: random.integers(0, 5, n),
    "one": lambda random, n: np.full(n, 7),
    "rows of a table": lambda random, n: random.integers(0, 10**8, n),
    "small table": lambda random, n: random.integers(0, 3000, n),
    "one digit": lambda random, n: random.permutation(np.append([0, 2**14 - 1], random.integers(0, 2**14, n))[:n]),
    "one digit and a bit": lambda random, n: random.permutation(
        np.append([-1, 2**14 - 1], random.integers(0, 2**14, n))[:n]
    ),
    "one digit around 0": lambda random, n: random.integers(-4000, 6000, n),
    "multiples of a power of two": lambda random, n: random.integers(0, 2**15, n) << 13,
    "a digit that all share": lambda random, n: (random.integers(0, 2**9, n) << 20) + random.integers(0, 3, n) - 2**28,
    "any": lambda random, n: random.integers(-(2**63), 2**63 - 1, n),
    "ends": lambda random, n: random.choice([-(2**63), 2**63 - 1, 0], n),
    "hot": lambda random, n: random.zipf(1.1, n) % 10**7,
    "ascending": lambda random, n: np.sort(random.integers(0, n + 1, n)),
}
"""Keys by how far apart and how many they are: what decides about digits, and the width of an item."""


@pytest.fixture(scope="module")
def segments() -> dict[str, Any]:
    """A module for each dtype of keys."""
    return {
        dtype: gradc.compile(gradc.trace(lambda k: {"y": ops.sort_segments(k)}, k=f"{dtype}[N]"), target="cpu")
        for dtype in ("i32", "i64")
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 2, 63, 1025, 16_384, 70_001])
@pytest.mark.parametrize("law", SEGMENTS)
def test_segments_of_equal_keys(segments: dict[str, Any], law: str, n: int, threads: int) -> None:
    """NumPy's own: what is sorted, which keys are distinct, and where each begins."""
    keys = SEGMENTS[law](np.random.default_rng(n), n).astype(np.int64)
    before = pool.num_threads()
    pool.set_num_threads(threads)
    try:
        for dtype in ("i64", "i32"):
            own = keys.astype(dtype.replace("i", "int"))
            order, found, starts = segments[dtype](k=own)
            distinct, firsts = np.unique(own[np.argsort(own, kind="stable")], return_index=True)
            np.testing.assert_array_equal(order, np.argsort(own, kind="stable"))
            np.testing.assert_array_equal(found, [*distinct, *[2**63 - 1] * (n - len(distinct))])
            np.testing.assert_array_equal(starts, [*firsts, *[n] * (n - len(distinct))])
    finally:
        pool.set_num_threads(before)
