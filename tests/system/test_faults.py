"""What must not break a compiled module: each fault gives one documented error, before anything is written, and leaves
everything usable.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import with_runtime

import gradc
from gradc import interp, ops
from gradc.errors import (
    BufferTooSmall,
    CompilerError,
    CompilerMissing,
    DeviceError,
    GradcError,
    IndexOutOfRange,
    InvalidProblem,
    IRFormatError,
    MisalignedOperand,
    NotDifferentiable,
    OutOfMemory,
    OverlappingOperands,
    TypeRuleError,
    Unsupported,
    WorkspaceTooSmall,
)
from gradc.ir.dims import evaluate, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.types import parse_type

pytestmark = pytest.mark.compiles

f32 = np.float32
ROOT = Path(__file__).resolve().parents[2]


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, f32)


@pytest.fixture(scope="module")
def product() -> gradc.Module:
    graph = gradc.trace(lambda x, w: ops.softmax(x @ w), x="f32[N,4]", w="f32[4,M]")
    return gradc.compile(graph, wrt=["w"])


@pytest.fixture(scope="module")
def addition() -> gradc.Module:
    return gradc.compile(gradc.trace(lambda x, w: x + w, x="f32[N,M]", w="f32[N,M]"), wrt=["x", "w"])


@pytest.fixture(scope="module")
def table() -> gradc.Module:
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,D]")
    return gradc.compile(graph, wrt=["table"])


@pytest.fixture()
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- arguments ---------------------------------------------------------------------------------------------------------

X, W = ones(3, 4), ones(4, 2)
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"x": X}, "graph needs the input 'w': f32[4,M]"),
    ({"x": X, "w": W, "z": W}, "graph has no input 'z'; it has x, w"),
    ({"x": X.astype(np.float64), "w": W}, "x is f32[N,4], got an array of float64[3, 4]; convert it first"),
    ({"x": X.astype(np.int32), "w": W}, "x is f32[N,4], got an array of int32[3, 4]"),
    ({"x": X.astype(np.complex64), "w": W}, "got an array of complex64"),
    ({"x": X[0], "w": W}, "x is f32[N,4] (rank 2), got an array of rank 1: (4,)"),
    ({"x": X[:, :3], "w": W}, "x is f32[N,4]: axis 1 is 3, not 4"),
    ({"x": X.tolist(), "w": W}, "a builtins.list is not an array"),
    ({"x": None, "w": W}, "a builtins.NoneType is not an array"),
    ({"x": "text", "w": W}, "a builtins.str is not an array"),
    ({"x": np.array([[None] * 4]), "w": W}, "an array of object does not hold numbers"),
    ({"x": np.ma.masked_array(X), "w": W}, "a masked array"),
    ({"x": X, "w": W, "dims": {"N": 5}}, "x is f32[N,4]: axis 0 is 3, not 5 (N=5 from dims=)"),
    ({"x": X, "w": W, "dims": {"Q": 5}}, "graph has no dim 'Q'; it has N, M"),
    ({"x": X, "w": W, "dims": {"N": "3"}}, "dims: N='3' is no size"),
    ({"x": X, "w": W, "dims": {"N": 3.0}}, "dims: N=3.0 is no size"),
    ({"x": X, "w": W, "dims": {"N": True}}, "dims: N=True is no size"),
    ({"x": X, "w": W, "dims": {"N": -1}}, "dims: N=-1 is no size"),
    ({"x": X, "w": W, "dims": {"N": 2**63}}, "is no size"),
    ({"x": X, "w": W, "dims": [3]}, "dims=[3]: it maps names of dims to sizes"),
    ({"x": X, "w": W, "dims": X}, "it maps names of dims to sizes"),
    ({"x": X, "w": W, "out": {"q": W}}, "graph has no output 'q'"),
    ({"x": X, "w": W, "out": W}, "out=ndarray: it maps names of outputs to arrays; the outputs are y"),
    ({"x": X, "w": W, "out": {"y": [1.0]}}, "a builtins.list is not an array"),
    ({"x": X, "w": W, "out": {"y": np.empty((3, 2))}}, "out['y'] is float64, the output is f32[N,M]"),
    ({"x": X, "w": W, "out": {"y": ones(4, 2)}}, "out['y'] has the shape (4, 2), the output f32[N,M] (3, 2)"),
    ({"x": X, "w": W, "out": {"y": ones(6)}}, "out['y'] has the shape (6,), the output f32[N,M] (3, 2)"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=[m for _, m in ARGUMENTS])
def test_wrong_arguments(product: gradc.Module, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        product.forward(**arguments)
    with pytest.raises(InvalidProblem, match=re.escape(message)):
        product(**arguments)
    if "dims" not in arguments or "Q" not in arguments["dims"]:
        assert message in str(product.forward.can_implement(**arguments))
    np.testing.assert_allclose(product(x=X, w=W), 0.5)  # usable after


def test_wrong_options_of_compile() -> None:
    graph = gradc.trace(lambda x, w: x * w, x="f32[N]", w="f32[N]")
    wrong: list[tuple[dict[str, Any], type[GradcError], str]] = [
        ({"colour": 1}, InvalidProblem, "compile has no option 'colour'; it has numerics, fuse"),
        ({"wrt": ["q"]}, InvalidProblem, "wrt names 'q'; the inputs of graph are x, w"),
        ({"wrt": ["w", "w"]}, InvalidProblem, "wrt names an input twice"),
        ({"wrt": [3]}, InvalidProblem, "wrt=[3]: a name or a list of names"),
        ({"wrt": None}, InvalidProblem, "wrt=None: a name or a list of names"),
        ({"target": "tpu"}, Unsupported, "the target 'tpu'"),
        ({"numerics": "loose"}, InvalidProblem, "numerics='loose'; there are real, strict"),
        ({"unused": "ones"}, InvalidProblem, "unused='ones'; there are error, zeros"),
        ({"fuse": "maybe"}, InvalidProblem, "fuse='maybe'"),
        ({"save": "some"}, InvalidProblem, "save='some'; there are 'min-cut', 'all', 'none' and a list of names"),
        ({"save": 3}, InvalidProblem, "save=3: a name or a list of names"),
        ({"save": ["zz"], "wrt": ["w"]}, InvalidProblem, "save names 'zz', which no value of the forward is called"),
        ({"donate": ["zz"]}, InvalidProblem, "donate names 'zz'; the inputs are x, w"),
        ({"donate": 5}, InvalidProblem, "donate=5"),
        ({"dims": {"Q": 3}}, InvalidProblem, "dims names 'Q'; the dims of graph are N"),
        ({"dims": {"N": -3}}, InvalidProblem, "dims: N=-3 is no size"),
        ({"dims": "N"}, InvalidProblem, "dims='N': it maps names of dims to sizes"),
        ({"reductions": "segmented"}, InvalidProblem, "reductions='segmented': it maps names of outputs"),
        (
            {"reductions": {"x": "segmented"}},
            InvalidProblem,
            "reductions names 'x', into which nothing is combined; there are none",
        ),
        (
            {"reductions": {"*": "magic"}},
            Unsupported,
            "the reduction 'magic' for '*': there are privatized, regular, segmented",
        ),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=re.escape(message)):
            gradc.compile(graph, **options)
    for thing in (None, 3, "graph @g"):
        with pytest.raises(InvalidProblem, match="compile takes a graph or a function"):
            gradc.compile(thing)  # type: ignore[arg-type]


def test_numbers_adopt_the_type_they_meet() -> None:
    module = gradc.compile(gradc.trace(lambda n, x: (n + 1, x * 2.0), n="i8[]", x="f32[]"))
    found = module(n=3, x=1)
    assert found["y0"] == 4 and found["y1"] == 2.0
    with pytest.raises(InvalidProblem, match=r"n is i8\[\], and 300 is outside -128 to 127"):
        module(n=300, x=1.0)
    with pytest.raises(InvalidProblem, match=r"n is i8\[\], got an array of float64"):
        module(n=3.5, x=1.0)
    with pytest.raises(InvalidProblem, match="does not fit i64"):
        module(n=2**70, x=1.0)


def test_wrong_cotangents_and_residuals(product: gradc.Module, addition: gradc.Module) -> None:
    y, residuals = product.forward(x=X, w=W)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: product.backward(residuals), "backward needs the cotangent of y: f32[N,M]"),
        (
            lambda: product.backward(residuals, ones(2, 2)),
            "the cotangent of y has the shape (2, 2), and forward gave y: f32[N,M] of the shape (3, 2)",
        ),
        (lambda: product.backward(residuals, np.ones((3, 2))), "d.y is f32[N,M], got an array of float64[3, 2]"),
        (lambda: product.backward(residuals, y, y), "2 cotangents for 1 float outputs: y"),
        (lambda: product.backward(residuals, y, y=y), "cotangents are given in order or by name, once each: y"),
        (lambda: product.backward(residuals, z=y), "cotangents are given in order or by name, once each: y"),
        (
            lambda: product.backward(y, y),
            "backward begins with the residuals that forward gave, backward(residuals, cotangent), not with a ndarray",
        ),
        (lambda: product.backward(None, y), "not with nothing"),
        (lambda: product.backward(addition.forward(x=y, w=y)[1], y), "these residuals are of another module"),
        (lambda: product.backward(residuals, y, out={"q": W}), "out= names 'q'; there are gradients of w"),
        (
            lambda: product.backward(residuals, y, accumulate=True),
            "accumulate=True adds to the arrays of out=, and there are none",
        ),
        (
            lambda: product.backward(residuals, y, accumulate={"w"}),
            "accumulate names 'd.w', for which out= gives no array",
        ),
        (lambda: product.backward(residuals, y, accumulate=1, out={"w": ones(4, 2)}), "accumulate names '1'"),
    ]
    for call, message in wrong:
        with pytest.raises(InvalidProblem, match=re.escape(message)):
            call()
    with pytest.raises(NotDifferentiable, match="compiled without wrt"):
        _ = gradc.compile(product.graph).backward
    with pytest.raises(InvalidProblem, match="value_and_grad needs one scalar float output; graph has y: f32"):
        product.value_and_grad(x=X, w=W)
    with pytest.raises(Unsupported, match="the CPU has no streams"):
        product.forward(x=X, w=W, stream=3)


def test_dims_that_nothing_binds(table: gradc.Module) -> None:
    graph = gradc.trace(lambda x: ops.sum(x) * ops.iota((symbol("K"),), dtype="f32"), x="f32[N]")
    free = gradc.compile(graph)
    with pytest.raises(
        InvalidProblem, match=re.escape("nothing binds the dim K; give dims={'K': ...} to compile or to the call")
    ):
        free(x=ones(2))
    np.testing.assert_array_equal(free(x=ones(2), dims={"K": np.int64(3)}), [0, 2, 4])
    np.testing.assert_array_equal(free(x=ones(2), dims={"K": 2}), [0, 2])  # the last call's sizes are not this one's
    np.testing.assert_array_equal(free(x=ones(2), out={"y": ones(3)}), [0, 2, 4])  # out= binds it
    np.testing.assert_array_equal(gradc.compile(graph, dims={"K": 2})(x=ones(2)), [0, 2])
    with pytest.raises(InvalidProblem, match=re.escape("out['y'] has the shape (4,), the output f32[K] (3,)")):
        free(x=ones(2), dims={"K": 3}, out={"y": ones(4)})


def test_assumptions_are_checked_at_each_call() -> None:
    module = gradc.compile(
        gradc.trace(lambda x: ops.reshape(x, (symbol("M"), 4)), x="f32[N]", assume=["N == 4*M", "N >= 8"])
    )
    assert module(x=ones(8), dims={"M": 2}).shape == (2, 4)
    with pytest.raises(InvalidProblem, match=r"assume\(N >= 8\), and here .*N=4"):
        module(x=ones(4), dims={"M": 1})
    with pytest.raises(InvalidProblem, match=r"assume\(N == 4\*M\)"):
        module(x=ones(12), dims={"M": 2})


def test_index_expressions_beyond_32_bits() -> None:
    """The C of an index, evaluated where 32 bits overflow, with nothing allocated."""
    import ctypes

    from gradc.codegen.index import flatten, index
    from gradc.ir.dims import floordiv, maximum
    from gradc.ir.statement import Index
    from gradc.runtime.host.toolchain import compile_c, load_library

    n0, n1 = symbol("n0"), symbol("n1")
    i0, i1, gathered = Index.of("i0"), Index.of("i1"), Index.of("%3")
    places = {
        "rows": flatten([i0, i1], (n0, n1)),
        "gathered rows": flatten([gathered, i1], (n0, n1)),
        "strided": flatten([i0 * 2 + 1, i1], (n0, n1)),
        "flat": flatten([i0 * n1 + i1], (n0 * n1,)),
        "padded": flatten([i0 + -1, i1], (n0 + 2, n1)),
        "halved": flatten([i0, i1], (n0, maximum(floordiv(n1, 2), n1 - 5))),
    }
    texts = [index(place) for place in places.values()]
    arguments = "i64 n0, i64 n1, i64 i0, i64 i1, i32 v3"
    source = '#include "math.h"\n' + "\n".join(
        f'__attribute__((visibility("default"))) i64 f{k}({arguments}) {{ return {text}; }}'
        for k, text in enumerate(texts)
    )
    library = load_library(compile_c(source), "indices")
    for edge in (2**31 - 1, 2**31, 2**31 + 1, 2**33):
        values = {"n0": edge + 2, "n1": 3, "i0": edge, "i1": 2, "%3": 2**31 - 1}
        for other in (values, {**values, "n0": 5, "n1": edge, "i0": 4, "i1": edge - 1, "%3": 4}):
            for k, (name, place) in enumerate(places.items()):
                function = getattr(library, f"f{k}")
                function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * 4 + [ctypes.c_int32]
                want = evaluate(place.const, other) + sum(other[v] * evaluate(c, other) for v, c in place.terms)
                assert function(*(other[n] for n in ("n0", "n1", "i0", "i1", "%3"))) == want, (name, other)


def test_sorts_count_in_32_bits_and_say_so() -> None:
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,2]")
    module = gradc.compile(graph, wrt=["table"], reductions={"*": "segmented"})
    with pytest.raises(
        Unsupported, match="a segmented sum over 4294967296 rows of its result; it counts to 2147483645"
    ):
        module.backward.workspace_size(N=4, V=2**32)
    with pytest.raises(Unsupported, match="a segmented sum over 2147483648 rows;"):
        module.backward.workspace_size(N=2**31, V=4)
    assert gradc.compile(graph, wrt=["table"], reductions={"*": "privatized"}).backward.workspace_size(N=2**31, V=4) > 0


def test_sizes_beyond_what_can_be() -> None:
    graph = gradc.trace(lambda x, y: ops.reshape(x, (-1, 1)) * y, x="f32[N]", y="f32[M]")
    module = gradc.compile(graph, target="cpu")
    with pytest.raises(InvalidProblem, match="2\\^63 or more"):
        module.workspace_size(N=2**40, M=2**40)
    huge = np.broadcast_to(f32(1), 2**40)
    with pytest.raises(InvalidProblem, match="2\\^63 or more"):
        module(x=huge, y=huge)
    with pytest.raises(OutOfMemory, match="are left"):
        module(x=huge, y=ones(1))
    np.testing.assert_array_equal(module(x=ones(2), y=ones(1)), ones(2, 1))
    shrink = gradc.compile(gradc.trace(lambda x: x[2:], x="f32[N]"))
    assert shrink(x=ones(1)).shape == (0,)


# -- nothing there -----------------------------------------------------------------------------------------------------


def test_extremum_over_nothing_is_an_error() -> None:
    for name in ("amax", "amin", "argmax", "argmin", "max", "min"):
        graph = gradc.trace(lambda x, name=name: getattr(ops, name)(x, axis=1), x="f32[N,M]")
        for run in (
            gradc.compile(graph),
            lambda graph=graph, **inputs: interp.run(graph, inputs)["y"],
            gradc.compile(graph, target="numpy"),
        ):
            with pytest.raises(InvalidProblem, match="over no elements"):
                run(x=ones(3, 0))
            assert run(x=ones(0, 0)).shape == (0,)
            assert run(x=ones(2, 3)).shape == (2,)
        with pytest.raises(TypeRuleError, match="over no elements"):
            gradc.trace(lambda x, name=name: getattr(ops, name)(x, axis=1), x="f32[N,0]")


def test_zero_sizes_everywhere() -> None:
    def everything(x: Any, w: Any, tokens: Any, table: Any) -> Any:
        h = ops.embedding(tokens, table) + x
        p = ops.softmax(ops.layer_norm(h, (h.shape[1],)) @ w)
        return {
            "p": p,
            "total": ops.sum(h),
            "rows": ops.sum(h, axis=1),
            "columns": ops.sum(h, axis=0),
            "prod": ops.prod(h, axis=0),
            "log": ops.logsumexp(h, axis=0),
        }

    graph = gradc.trace(everything, x="f32[N,D]", w="f32[D,M]", tokens="i64[N]", table="f32[V,D]")
    module = gradc.compile(graph, wrt=["x", "w", "table"])
    for n, d, m, v in ((0, 0, 0, 0), (0, 3, 2, 4), (2, 0, 3, 4), (3, 2, 0, 5), (0, 3, 0, 0)):
        inputs = {"x": ones(n, d), "w": ones(d, m), "tokens": np.zeros(n, np.int64), "table": ones(v, d)}
        values, residuals = module.forward(**inputs)
        wanted = interp.run(graph, inputs)
        for name, value in values.items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=f"{name} {n, d, m, v}")
        grads = module.backward(residuals, *[np.ones_like(value) for value in values.values()])
        assert [grads[name].shape for name in ("x", "w", "table")] == [(n, d), (d, m), (v, d)]
        assert n or not grads["table"].any()


@pytest.mark.parametrize("oob", ["skip", "clamp", "wrap"])
def test_empty_table_is_never_read_or_written(oob: str) -> None:
    def read(x: Any, i: Any) -> Any:
        return ops.gather(x, i, oob=oob), ops.take_along_axis(
            x, ops.reshape(i, (-1, 1)) * ops.cast(ops.iota((1, 2), dtype="i64") * 0 + 1, "i64"), axis=0, oob=oob
        )

    module = gradc.compile(gradc.trace(read, x="f32[V,2]", i="i64[N]"), wrt=["x"])
    values, residuals = module.forward(x=ones(0, 2), i=np.array([0, 5, -1]))
    assert not values["y0"].any() and not values["y1"].any()
    assert module.backward(residuals, ones(3, 2), ones(3, 2))["x"].shape == (0, 2)
    write = gradc.compile(
        gradc.trace(lambda u, i: ops.scatter_add(i, u, size=symbol("V"), oob=oob), u="f32[N,2]", i="i64[N]")
    )
    assert write(u=ones(3, 2), i=np.array([0, 5, -1]), dims={"V": 0}).shape == (0, 2)


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_that_is_no_number() -> None:
    graph = gradc.trace(
        lambda x: {
            "s": ops.softmax(x),
            "m": ops.amax(x, axis=1),
            "r": ops.relu(x),
            "i": ops.cast(x, "i32"),
            "l": ops.logsumexp(x, axis=1),
            "a": ops.argmax(x, axis=1),
        },
        x="f32[N,5]",
    )
    module = gradc.compile(graph, wrt=["x"])
    nan, inf = np.nan, np.inf
    x = np.array(
        [
            [nan, 1, 2, 3, 4],
            [inf, -inf, 0, 1e30, -1e30],
            [-inf] * 5,
            [inf] * 5,
            [1e38, 3e38, -3e38, 0.0, -0.0],
            [2**31, -(2.0**31) - 300, 2**40, nan, -inf],
        ],
        f32,
    )
    values, residuals = module.forward(x=x)
    for name, want in interp.run(graph, {"x": x}).items():
        np.testing.assert_allclose(values[name], want, rtol=1e-6, err_msg=name)
    assert np.isnan(values["s"][2]).all() and np.isnan(values["m"][0]) and values["a"][0] == 0
    assert values["i"][5].tolist() == [2**31 - 1, -(2**31), 2**31 - 1, 0, -(2**31)]
    floats = [n for n, v in graph.outputs if v.dtype.is_float]
    assert module.backward(residuals, **{n: np.ones_like(values[n]) for n in floats})["x"].shape == x.shape


def test_nothing_counts() -> None:
    """A mean over nothing is NaN; its gradient is 0, as torch's is, whatever is moved where."""
    graph = gradc.trace(lambda x, w, t: ops.cross_entropy(x @ w, t), x="f32[N,4]", w="f32[4,3]", t="i64[N]")
    square = gradc.trace(
        lambda x, w: ops.mse_loss(x @ w, ops.sum(x, axis=1, keepdims=True)), x="f32[N,4]", w="f32[4,3]"
    )
    for numerics in ("real", "strict"):
        module = gradc.compile(graph, wrt=["x", "w"], numerics=numerics)
        for n in (5, 0):
            y, residuals = module.forward(x=ones(n, 4), w=ones(4, 3), t=np.full(n, -100))
            grads = module.backward(residuals, np.asarray(1, f32))
            assert np.isnan(y) and not grads["x"].any() and not grads["w"].any()
        y, residuals = gradc.compile(square, wrt=["w"], numerics=numerics).forward(x=ones(0, 4), w=ones(4, 3))
        assert (
            np.isnan(y)
            and not gradc.compile(square, wrt=["w"], numerics=numerics)
            .backward(residuals, np.asarray(1, f32))["w"]
            .any()
        )


def test_bytes_that_are_no_bool() -> None:
    odd = np.array([2, 1, 0, 255], np.uint8).view(np.bool_)
    found = gradc.compile(
        gradc.trace(lambda b: {"n": ops.sum(b), "same": b & b, "f": ops.cast(b, "f32"), "not": ~b}, b="bool[N]")
    )(b=odd)
    assert (
        found["n"] == 3
        and found["same"].tolist() == [True, True, False, True]
        and found["f"].tolist() == [1, 1, 0, 1]
        and found["not"].tolist() == [False, False, True, False]
    )


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8", "u16", "u32"])
def test_integer_division_never_traps(dtype: str) -> None:
    about = np.iinfo(parse_type(f"{dtype}[]").dtype.np)
    edges = np.unique(np.array([about.min, about.min + 1, about.max, -1 if about.min else 1, 0, 1, 3], about.dtype))
    a, b = (grid.reshape(-1) for grid in np.meshgrid(edges, edges))
    graph = gradc.trace(
        lambda a, b: {"quotient": a // b, "rest": a % b, "abs": abs(a), "product": a * b},
        a=f"{dtype}[N]",
        b=f"{dtype}[N]",
    )
    found = gradc.compile(graph)(a=a, b=b)
    for name, want in interp.run(graph, {"a": a, "b": b}).items():
        np.testing.assert_array_equal(found[name], want, err_msg=name)


def test_numbers_from_floats_are_never_addresses() -> None:
    graph = gradc.trace(lambda x, f: ops.gather(x, ops.cast(f, "i64"), oob="skip"), x="f32[V]", f="f32[N]")
    module = gradc.compile(graph, wrt=["x"])
    f = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2**31, 2.0**63, -1, 1, 3], f32)
    y, residuals = module.forward(x=np.arange(1, 4, dtype=f32), f=f)
    np.testing.assert_array_equal(y, [1, 0, 0, 0, 0, 0, 0, 0, 2, 0])  # NaN casts to 0
    np.testing.assert_array_equal(module.backward(residuals, ones(10))["x"], [1, 1, 0])


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("strategy", ["segmented", "privatized"])
def test_index_out_of_range_writes_nothing(bad: int, strategy: str) -> None:
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,D]")
    module = gradc.compile(graph, wrt=["table"], reductions={"*": strategy})
    tokens, table = np.array([0, 4, bad, 1, bad]), ones(5, 3)
    out = np.full((5, 3), 7, f32)
    with pytest.raises(IndexOutOfRange) as caught:
        module.forward(tokens=tokens, table=table, out={"y": out})
    error = caught.value
    assert (error.op, error.input, error.position, error.value, error.bound) == ("embedding", "tokens", 2, bad, 5)
    assert str(error) == f"embedding: index {bad} at position 2 of 'tokens' is out of range [0, 5)"
    assert (out == 7).all()
    with pytest.raises(IndexOutOfRange, match=f"index {bad} at position 2 of 'tokens'"):
        interp.run(graph, {"tokens": tokens, "table": table})
    y, residuals = module.forward(tokens=np.array([0, 4, 1, 1, 1]), table=table)
    residuals.arrays["tokens"] = tokens  # as if it had been changed since
    with pytest.raises(IndexOutOfRange, match="at position 2"):
        module.backward(residuals, y, out={"table": out}, accumulate=True)
    assert (out == 7).all()
    np.testing.assert_array_equal(module(tokens=np.array([4]), table=table), ones(1, 3))


def test_index_out_of_range_in_every_op_that_indexes() -> None:
    programs: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
        "gather": (lambda x, i: ops.gather(x, i, axis=1), {"x": "f32[2,N]", "i": "i32[3]"}),
        "take_along_axis": (
            lambda x, i: ops.take_along_axis(x, ops.reshape(i, (1, 3)) + ops.cast(ops.iota((2, 3)) * 0, "i32"), axis=1),
            {"x": "f32[2,N]", "i": "i32[3]"},
        ),
        "scatter_add": (lambda x, i: ops.scatter_add(i, x, size=symbol("N")), {"x": "f32[3]", "i": "i32[3]"}),
        "scatter_add_along_axis": (
            lambda x, i: ops.scatter_add_along_axis(i, x, axis=0, size=symbol("N")),
            {"x": "f32[3]", "i": "i32[3]"},
        ),
    }
    for name, (function, types) in programs.items():
        module = gradc.compile(gradc.trace(function, **types))
        x = ones(*(4 if s == symbol("N") else int(s) for s in parse_type(types["x"]).shape))  # type: ignore[call-overload]
        for bad in (-1, 4, 2**31 - 1, -(2**31)):
            with pytest.raises(IndexOutOfRange, match=f"{name}: index {bad} at position"):
                module(x=x, i=np.array([0, 3, bad], np.int32), dims={"N": 4})
        module(x=x, i=np.array([0, 3, 1], np.int32), dims={"N": 4})


def test_class_index_out_of_range() -> None:
    module = gradc.compile(gradc.trace(lambda x, t: ops.cross_entropy(x, t), x="f32[N,5]", t="i64[N]"), wrt=["x"])
    assert np.isfinite(module(x=ones(3, 5), t=np.array([0, 4, -100])))
    for bad in (5, -1, 2**40):
        with pytest.raises(IndexOutOfRange, match=f"index {bad} at position 1"):
            module(x=ones(3, 5), t=np.array([0, bad, 1]))


# -- memory ------------------------------------------------------------------------------------------------------------


def layouts(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The same values in other arrangements."""
    yield "transposed", np.ascontiguousarray(array.T).T
    yield "every second", np.repeat(array, 2, axis=1)[:, ::2]
    yield "backwards", np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    raw = np.zeros(array.nbytes + 1, np.uint8)
    odd = raw[1:].view(array.dtype).reshape(array.shape)
    odd[...] = array
    yield "at an odd address", odd
    still = array.copy()
    still.flags.writeable = False
    yield "read-only", still
    yield "other byte order", array.astype(array.dtype.newbyteorder())
    yield "offset", np.pad(array, 1)[1:-1, 1:-1]


def test_arrays_as_they_come(addition: gradc.Module) -> None:
    a = np.arange(12, dtype=f32).reshape(3, 4)
    for name, view in layouts(a):
        before = view.copy()
        y, residuals = addition.forward(x=view, w=a)
        np.testing.assert_array_equal(y, a + a, err_msg=name)
        np.testing.assert_array_equal(addition.backward(residuals, view)["w"], a, err_msg=name)
        np.testing.assert_array_equal(view, before)
    wide = np.broadcast_to(f32(2), (3, 4))  # strides of 0
    np.testing.assert_array_equal(addition(x=wide, w=wide), np.full((3, 4), 4))


def test_out_is_written_or_refused(product: gradc.Module, addition: gradc.Module) -> None:
    out = np.empty((3, 2), f32)
    y, _ = product.forward(x=X, w=W, out={"y": out})
    assert y is out and (out == 0.5).all()
    still = np.empty((3, 2), f32)
    still.flags.writeable = False
    flat, square = np.zeros(8, f32), ones(2, 2)
    odd = np.zeros(25, np.uint8)[1:].view(f32).reshape(3, 2)
    for wrong, error, message in (
        (np.empty((3, 4), f32)[:, ::2], MisalignedOperand, "out['y'] is not contiguous and aligned (strides (16, 8))"),
        (odd, MisalignedOperand, "out['y'] is not contiguous and aligned"),
        (still, InvalidProblem, "out['y'] is read-only"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            product.forward(x=X, w=W, out={"y": wrong})
    with pytest.raises(OverlappingOperands, match=re.escape("out['y'] shares memory with the input x")):
        addition.forward(x=square, w=ones(2, 2), out={"y": square})
    _, residuals = addition.forward(x=square, w=square)
    with pytest.raises(OverlappingOperands, match=re.escape("out['d.w'] shares memory with out['d.x']")):
        addition.backward(residuals, ones(2, 2), out={"x": flat[:4].reshape(2, 2), "w": flat[2:6].reshape(2, 2)})
    with pytest.raises(OverlappingOperands, match=re.escape("out['d.x'] shares memory with the input d.y")):
        dy = ones(2, 2)
        addition.backward(residuals, dy, out={"x": dy})
    assert not flat.any()


def test_too_small_a_buffer(product: gradc.Module) -> None:
    with pytest.raises(BufferTooSmall, match="buffer 'y' needs 24 bytes, got 16") as caught:
        product.forward(x=X, w=W, out={"y": ones(2, 2)})
    assert (caught.value.needed, caught.value.got) == (24, 16)


def test_accumulate(addition: gradc.Module, table: gradc.Module) -> None:
    _, residuals = addition.forward(x=ones(2, 2), w=ones(2, 2))
    for accumulate, wanted in ((True, (11, 21)), ({"x"}, (11, 1)), (["w"], (1, 21)), ("x", (11, 1)), (False, (1, 1))):
        x, w = np.full((2, 2), 10, f32), np.full((2, 2), 20, f32)
        grads = addition.backward(residuals, ones(2, 2), out={"x": x, "w": w}, accumulate=accumulate)
        assert grads["x"] is x and (x == wanted[0]).all() and (w == wanted[1]).all(), accumulate
    tokens, dy = np.array([1, 1, 3, 1]), np.arange(8, dtype=f32).reshape(4, 2)
    for strategy in ("segmented", "privatized"):
        module = gradc.compile(table.graph, wrt=["table"], reductions={"*": strategy})
        _, residuals = module.forward(tokens=tokens, table=ones(5, 2))
        fresh = module.backward(residuals, dy)["table"]
        mine = np.full((5, 2), 100, f32)
        module.backward(residuals, dy, out={"table": mine}, accumulate=True)
        np.testing.assert_array_equal(mine, 100 + fresh)


def test_workspace() -> None:
    graph = gradc.trace(lambda x, w: ops.softmax(x @ w) @ w, x="f32[N,4]", w="f32[4,4]")
    module = gradc.compile(graph, wrt=["x", "w"])
    y, residuals = module.forward(x=X, w=ones(4, 4))
    wanted = module.backward(residuals, y)
    size = module.backward.workspace_size(N=3)
    assert 0 < size <= module.workspace_size(N=3) and module.backward.workspace_size(N=1000) > size
    guarded = np.full(size + 64, 0xAB, np.uint8)
    start = -guarded.ctypes.data % 16
    grads = module.backward(residuals, y, workspace=guarded[start : start + size])
    assert (guarded[start + size :] == 0xAB).all()  # exact: nothing behind it
    for name in ("x", "w"):
        np.testing.assert_array_equal(grads[name], wanted[name])
    with pytest.raises(WorkspaceTooSmall, match=f"workspace needs {size} bytes, got {size - 1}") as caught:
        module.backward(residuals, y, workspace=np.empty(size - 1, np.uint8))
    assert (caught.value.needed, caught.value.got) == (size, size - 1)
    with pytest.raises(MisalignedOperand, match="at a multiple of 16 bytes"):
        module.backward(residuals, y, workspace=guarded[start + 1 : start + 1 + size])
    still = np.zeros(size, np.uint8)
    still.flags.writeable = False
    with pytest.raises(MisalignedOperand, match="writable"):
        module.backward(residuals, y, workspace=still)
    with pytest.raises(OverlappingOperands, match="the workspace shares memory with the output"):
        module.backward(
            residuals,
            y,
            workspace=guarded[start : start + size],
            out={"w": guarded[start : start + 64].view(f32).reshape(4, 4)},
        )
    with pytest.raises(OverlappingOperands, match="the workspace shares memory with the input"):
        module.backward(
            residuals, guarded[start : start + 48].view(f32).reshape(3, 4), workspace=guarded[start : start + size]
        )
    with pytest.raises(InvalidProblem, match="is not an array"):
        module.backward(residuals, y, workspace="room")
    with pytest.raises(InvalidProblem, match="workspace_size needs N"):
        module.workspace_size()
    with pytest.raises(InvalidProblem, match="has no dim 'Q'"):
        module.workspace_size(N=1, Q=1)
    with pytest.raises(InvalidProblem, match="N=-1 is no size"):
        module.workspace_size(N=-1)


# -- donated memory ----------------------------------------------------------------------------------------------------


def test_an_optimiser_step_in_place() -> None:
    step = gradc.compile(
        gradc.trace(
            lambda w, m, g: {"w": w - 0.5 * (m * 0.9 + g), "m": m * 0.9 + g}, w="f32[N]", m="f32[N]", g="f32[N]"
        ),
        donate=["w", "m"],
    )
    for n in (5, 100_000):
        w, m, g = ones(n), ones(n) * 2, ones(n) * 3
        wanted = {"m": m * f32(0.9) + g}
        wanted["w"] = w - f32(0.5) * wanted["m"]
        found = step(w=w, m=m, g=g)
        assert np.shares_memory(found["w"], w) and np.shares_memory(found["m"], m)
        for name in ("w", "m"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    out = ones(5)
    step(w=ones(5), m=ones(5), g=ones(5), out={"w": out})
    w = ones(5)
    step(w=w, m=ones(5), g=ones(5), out={"w": w})  # donated: its memory may be given by hand
    np.testing.assert_array_equal(w, out)


def test_donations_that_are_not_safe_are_not_taken() -> None:
    def unsafe(function: Callable[..., Any], **inputs: np.ndarray) -> None:
        types = {name: gradc.typeof(a) for name, a in inputs.items()}
        graph = gradc.trace(function, **types)
        before = {name: a.copy() for name, a in inputs.items()}
        wanted = interp.run(graph, before)
        found = gradc.compile(graph, donate=["w"]).forward.run(**inputs)
        for name, value in found.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)

    square = np.arange(9, dtype=f32).reshape(3, 3)
    unsafe(lambda w: w.T + w, w=square.copy())  # read at another place than written
    unsafe(lambda w: ops.reshape(ops.flip(ops.reshape(w, (9,))), (3, 3)) + w, w=square.copy())  # also through a view
    unsafe(lambda w: (w + 1.0, ops.sum(w, axis=0)), w=square.copy())
    unsafe(lambda w: (w * 2.0, w @ w), w=square.copy())  # read again by a later step
    unsafe(lambda w: ops.softmax(w), w=square.copy())
    unsafe(lambda w: ops.layer_norm(w, (3,)), w=square.copy())
    unsafe(lambda w: (w - ops.amax(w, axis=1, keepdims=True), w * 3.0), w=square.copy())
    unsafe(lambda w, i: ops.gather(w, i), w=square.copy(), i=np.array([2, 1, 0]))


def test_donated_memory_that_others_look_at() -> None:
    module = gradc.compile(gradc.trace(lambda w, g: w - 0.5 * ops.flip(g), w="f32[N]", g="f32[N]"), donate=["w"])
    w = np.arange(8, dtype=f32)
    np.testing.assert_array_equal(module(w=w, g=w), np.arange(8) - 0.5 * np.arange(8)[::-1])  # the same array twice
    np.testing.assert_array_equal(w, np.arange(8))
    still = np.arange(8, dtype=f32)
    still.flags.writeable = False
    module(w=still, g=ones(8))
    np.testing.assert_array_equal(still, np.arange(8))
    learned = gradc.compile(gradc.trace(lambda w: w * w, w="f32[N]"), wrt=["w"], donate=["w"])
    w = np.arange(4, dtype=f32)
    _, residuals = learned.forward(w=w)
    np.testing.assert_array_equal(
        learned.backward(residuals, ones(4))["w"], 2 * np.arange(4)
    )  # backward needs w as it was
    constant = np.arange(100, dtype=f32)
    kept = gradc.compile(gradc.trace(lambda x: constant * 2.0 + x, x="f32[100]"), donate=["x"])
    names = [n for n in kept.graph.input_names if n != "x"]
    kept = gradc.compile(kept.graph, donate=names)
    np.testing.assert_array_equal(kept(x=np.zeros(100, f32)), constant * 2)
    np.testing.assert_array_equal(kept(x=np.zeros(100, f32)), constant * 2)  # the module's own array is no donor


def test_an_input_that_changes_between_forward_and_backward() -> None:
    module = gradc.compile(gradc.trace(lambda x: x * x, x="f32[N]"), wrt=["x"])
    with gradc.knobs.CHECK_RESIDUALS.set(True):
        x = ones(3)
        _, residuals = module.forward(x=x)
        module.backward(residuals, ones(3))
        x[1] = 5
        with pytest.raises(InvalidProblem, match="the input 'x' was changed between forward and backward"):
            module.backward(residuals, ones(3))


# -- names -------------------------------------------------------------------------------------------------------------

HOSTILE = [
    '*/ system("id"); /*',
    "a\n#include <evil.h>",
    "{{7*7}}",
    "nul\0",
    "x" * 201,
    "‮txt",
    '__asm__("ud2")',
    '");system("id");//',
    "%s%n",
    "ä",
    "",
    " ",
    "1",
    "a b",
    "a.",
    ".a",
    "a..b",
    "${HOME}",
    "$(id)",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_that_are_code_are_refused(name: str) -> None:
    x = parse_type("f32[N]")
    with pytest.raises(TypeRuleError, match="is not a name"):
        input_node(name, x)
    with pytest.raises(TypeRuleError, match="is not a name"):
        Graph("g", (input_node("x", x),), ((name, input_node("x", x)),))
    with pytest.raises(TypeRuleError, match="is not a name"):
        Graph(name, (input_node("x", x),), (("y", input_node("x", x)),))
    with pytest.raises(TypeRuleError, match="is not a name"):
        symbol(name)
    with pytest.raises(GradcError):
        gradc.parse(f"graph @g(%{name}: f32[N]) {{\n  return y=%{name}\n}}")


def build(names: dict[str, str]) -> gradc.Module:
    """One graph under other names of inputs, outputs, dims and values."""
    n = names.get

    def function(**v: Any) -> Any:
        with gradc.scope(n("scope", "scope")):
            hidden = ops.gelu(ops.embedding(v[n("tokens", "tokens")], v[n("table", "table")]) @ v[n("w", "w")])
            return {n("y", "y"): ops.layer_norm(hidden, (hidden.shape[1],)), n("z", "z"): ops.sum(hidden)}

    a, b, c = n("N", "N"), n("D", "D"), n("H", "H")
    inputs = {n("tokens", "tokens"): f"i64[{a}]", n("table", "table"): f"f32[V,{b}]", n("w", "w"): f"f32[{b},{c}]"}
    nodes = {key: input_node(key, parse_type(t)) for key, t in inputs.items()}
    result = function(**nodes)
    graph = Graph(n("graph", "graph"), tuple(nodes.values()), tuple(result.items()))
    return gradc.compile(graph, wrt=[n("table", "table"), n("w", "w")])


def bits(module: gradc.Module) -> list[bytes]:
    """Of the values and gradients of one call; inputs by their order."""
    rng = np.random.default_rng(3)
    sizes = ((5,), (7, 6), (6, 4))
    arrays = [rng.integers(0, 7, s) if len(s) == 1 else rng.standard_normal(s).astype(np.float32) for s in sizes]
    values, residuals = module.forward(dict(zip(module.graph.input_names, arrays, strict=True)))
    gradients = module.backward(residuals, *(np.ones_like(value) for value in values.values()))
    return [array.tobytes() for array in (*values.values(), *gradients.values())]


def test_kernels_are_the_same_under_any_names() -> None:
    """The user's names stand in a text as identifiers that mean nothing else there; all else is equal."""
    plain = build({})
    for names in (
        {
            "tokens": "__asm__",
            "table": "system",
            "w": "main",
            "y": "restrict",
            "z": "buffers",
            "N": "int",
            "D": "exit",
            "H": "errno",
            "graph": "gradc_run",
            "scope": "void",
        },
        {"N": "Z", "D": "Y", "H": "X"},  # in another order
        {"N": "n0", "D": "n1", "H": "i0", "w": "b0", "table": "v0", "tokens": "args"},
        {"y": "a.b.c", "w": "params.l1.w", "N": "N" * 64},
    ):
        other = build(names)
        for what in ("forward", "backward"):
            assert list(getattr(other, what).kernels) == list(getattr(plain, what).kernels)
        assert bits(other) == bits(plain), names
    assert re.search(r"\btokens\b", plain.source()) and "scope" not in plain.source()


def test_user_names_that_are_arguments_of_a_call() -> None:
    graph = gradc.parse(
        "graph @g<N>(%out: f32[N], %dims: f32[N], %self: f32[N], %workspace: f32[N], %stream: f32[N], %accumulate:"
        " f32[N], %residuals: f32[N]) {\n  %0: f32[N] = add %out, %dims\n  %1: f32[N] = add %self, %workspace\n  %2:"
        " f32[N] = add %stream, %accumulate\n  %3: f32[N] = mul %0, %1\n  %4: f32[N] = mul %2, %residuals\n  %5: f32[N]"
        " = add %3, %4\n  return out=%5, accumulate=%3\n}"
    )
    module = gradc.compile(graph, wrt=list(graph.input_names))
    inputs = {name: np.full(3, k + 1, f32) for k, name in enumerate(graph.input_names)}
    values, residuals = module.forward(inputs)
    np.testing.assert_array_equal(values["out"], np.full(3, 3 * 7 + 11 * 7))
    np.testing.assert_array_equal(module(inputs)["accumulate"], np.full(3, 21))
    assert module.can_implement(inputs) is None
    grads = module.backward(residuals, ones(3), ones(3))
    np.testing.assert_array_equal(grads["self"], np.full(3, 6))
    with pytest.raises(
        InvalidProblem,
        match="out= is an option of the call, and g has an input of that name",
    ):
        module.forward(out=inputs["out"])
    for kernel in module.kernels.values():
        kernel.run(**kernel.sample(N=3), dims={"N": 3}) if not {"dims"} & kernel.sample(N=3).keys() else None


def test_names_that_gradc_uses_itself() -> None:
    """An array constant, temps and views have names of ours: another value may bear them too."""
    names = ("c0", "c1", "t3", "t4", "y.base", "copy", "x.view")
    nodes = [input_node(name, parse_type("f32[3]")) for name in names]
    total = ops.constant((1.0, 2.0, 5.0), "f32", (3,))
    for node in nodes:
        total = ops.tanh(total @ ops.reshape(ops.concat([node] * 3), (3, 3))) + ops.gather(
            ops.constant((3.0, 4.0, 6.0), "f32", (3,)), ops.cast(node, "i64")
        )
    graph = Graph("g", tuple(nodes), (("c2", total), ("t5", ops.reshape(total, (3, 1)))))
    inputs = {name: np.array([0, 2, 1], f32) for name in names}
    for fuse in (True, False):
        found = gradc.compile(graph, fuse=fuse)(inputs)
        for name, want in interp.run(graph, inputs).items():
            np.testing.assert_allclose(found[name], want, rtol=1e-6)


def test_text_that_is_no_graph() -> None:
    good = "graph @g(%x: f32[4]) {\n  %0: f32[4] = exp %x\n  return y=%0\n}"
    gradc.parse(good)
    for old, new in (
        ("exp", "system"),
        ("%x\n", "%q\n"),
        ("f32[4] =", "f32[5] ="),
        ("%0: ", "%x: "),
        ("f32[4])", "f32[-4])"),
        ("[4]) {", "[99999999999999999999]) {"),
        ("return y=%0", "return y=%7"),
        ("exp %x", "exp"),
        ("exp %x", "exp %x, %x"),
        ("}", ""),
        ("f32", "f33"),
    ):
        with pytest.raises(IRFormatError, match=r"line \d+, column \d+") as caught:
            gradc.parse(good.replace(old, new, 1))
        assert caught.value.line >= 1 and caught.value.column >= 1
    with pytest.raises(IRFormatError):
        gradc.parse("graph @g(%x: f32[4]) {\n  %0: f32[4] = exp %1\n  %1: f32[4] = exp %0\n  return y=%1\n}")  # a cycle


# -- the compiler ------------------------------------------------------------------------------------------------------


def fresh_graph(k: float) -> Graph:
    return gradc.trace(lambda x: ops.exp(x) * k, x="f32[N]")


def test_no_compiler(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(CompilerMissing, match="CC='/nowhere/cc' names no program"):
        gradc.compile(fresh_graph(2.5))(x=ones(2))
    monkeypatch.delenv("CC")
    np.testing.assert_allclose(gradc.compile(fresh_graph(2.5))(x=np.zeros(2, f32)), 2.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [("exit 1", "not a C compiler|exit"), ("kill -SEGV $$", "SEGV|signal"), ("kill -KILL $$", "KILL|signal")],
)
def test_compiler_that_dies(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    script = tmp_path / "gcc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-v) echo "gcc version 12.2.0"; exit 0;; esac\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(CompilerError, match=message) as caught:
        gradc.compile(fresh_graph(3.5))(x=ones(2))
    assert "    1  " in caught.value.source  # numbered
    monkeypatch.delenv("CC")
    np.testing.assert_allclose(gradc.compile(fresh_graph(3.5))(x=np.zeros(2, f32)), 3.5)


# -- the cache ---------------------------------------------------------------------------------------------------------


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.entry"), key=lambda p: p.stat().st_size)


def test_damaged_entries_are_rebuilt(private_cache: Path) -> None:
    graph = gradc.trace(lambda x, w: ops.softmax(x @ w), x="f32[N,4]", w="f32[4,M]")
    source = gradc.compile(graph, wrt=["w"]).source()
    whole = {path: path.read_bytes() for path in entries(private_cache)}
    assert whole

    def works() -> None:
        module = gradc.compile(graph, wrt=["w"])
        y, residuals = module.forward(x=X, w=W)
        np.testing.assert_allclose(y, 0.5)
        module.backward(residuals, y)
        assert module.source() == source

    damages: list[Callable[[bytes], bytes]] = [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-100] + bytes([data[-100] ^ 4]) + data[-99:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: os.urandom(len(data)),
    ]
    for damage in damages:
        for path, data in whole.items():
            path.write_bytes(damage(data))
        works()
        for path, data in whole.items():
            assert path.read_bytes() == data or path.stat().st_size == len(data)  # put back
    for path in whole:
        path.unlink()
        path.symlink_to("/dev/zero")
    works()
    private_cache.chmod(0o500)
    try:
        works()
    finally:
        private_cache.chmod(0o700)
    shutil.rmtree(private_cache)
    with pytest.warns(RuntimeWarning, match="the kernel cache cannot be used"):
        works()


def test_keys_hold_all_that_decides(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradc import api, knobs
    from gradc.runtime.host import toolchain

    graph = fresh_graph(4.5)

    def count() -> int:
        return len(entries(private_cache))

    gradc.compile(graph)
    first = count()
    gradc.compile(graph)
    assert count() == first  # a hit
    gradc.compile(graph, fuse=False)
    gradc.compile(graph, numerics="strict")
    gradc.compile(graph, wrt=["x"])
    assert count() == first + 3
    real = api.fingerprint()
    monkeypatch.setattr(api, "fingerprint", lambda: real[::-1])  # another byte in a template
    gradc.compile(graph)
    assert count() == first + 4
    with knobs.BOUNDS.set(True):
        gradc.compile(graph)
    assert count() == first + 5
    monkeypatch.setattr(toolchain, "cpu_identity", lambda: "another processor")
    gradc.compile(graph)
    assert count() == first + 6
    monkeypatch.setenv("CC", f"{toolchain.find_compiler().argv[0]} -DANOTHER=1")
    toolchain.find_compiler()  # what a compiler says of itself has an entry too
    before = count()
    gradc.compile(graph)
    assert count() == before + 1


def test_files_that_did_not_change_are_not_read_for_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradc import api
    from gradc.codegen import text

    copy = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", copy)
    monkeypatch.setattr(text, "template_dirs", lambda: (copy,))
    monkeypatch.setattr(api, "_CLOCK_NS", 0)
    with gradc.knobs.CACHE_DIR.set(str(tmp_path / "cache")):
        before = api.fingerprint.__wrapped__()
        with monkeypatch.context() as m:
            m.setattr(api, "_bytes", lambda path: pytest.fail(f"{path} is read"))
            assert api.fingerprint.__wrapped__() == before
        file = copy / "cpu" / "math.h"
        about, data = file.stat(), file.read_bytes()
        time.sleep(0.02)  # longer than a tick of the clock of files
        file.write_bytes(data[:-2] + b" \n")
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # same size, same time
        assert api.fingerprint.__wrapped__() != before


def test_the_fingerprint_is_of_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradc import api
    from gradc.codegen import text

    copy = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", copy)
    monkeypatch.setattr(text, "template_dirs", lambda: (copy,))
    before = api.fingerprint.__wrapped__()
    file = copy / "cpu" / "math.h"
    about, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-2] + b" \n")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # same size, same time
    assert api.fingerprint.__wrapped__() != before


def test_two_graphs_that_differ_in_names_only_keep_their_own(private_cache: Path) -> None:
    def named(name: str) -> gradc.Module:
        hidden = {"first": lambda x, w: {"y": _first(x, w)}, "second": lambda x, w: {"y": _second(x, w)}}[name]
        return gradc.compile(gradc.trace(hidden, x="f32[N,4]", w="f32[4,4]"), wrt=["x", "w"])

    def _first(x: Any, w: Any) -> Any:
        alpha = x @ w
        return ops.tanh(alpha) * alpha

    def _second(x: Any, w: Any) -> Any:
        beta = x @ w
        return ops.tanh(beta) * beta

    one, two = named("first"), named("second")
    for module in (one, two, named("first")):
        y, residuals = module.forward(x=X, w=ones(4, 4))
        module.backward(residuals, y)


# -- interruptions and other processes ---------------------------------------------------------------------------------

SCRIPT = """
import sys, numpy as np, gradc
from gradc import ops
def work(k):
    graph = gradc.trace(lambda x, w: ops.layer_norm(ops.gelu(x @ w), (8,)) * k, x="f32[N,8]", w="f32[8,8]")
    module = gradc.compile(graph, wrt=["x", "w"])
    x = np.arange(24, dtype=np.float32).reshape(3, 8) / 24
    y, residuals = module.forward(x=x, w=np.eye(8, dtype=np.float32))
    return float(abs(module.backward(residuals, y)["w"]).sum())
"""


def python(code: str, cache: Path, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "GRADC_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **more}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def slow_compiler(tmp_path: Path) -> str:
    """gcc that says on a file that it has begun, and waits for another."""
    script = tmp_path / "bin" / "gcc"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-v) exec gcc "$@";; esac\necho $$ >> {tmp_path}/began\nuntil [ -e {tmp_path}/go ];'
        ' do sleep 0.05; done\nexec gcc "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def begun(tmp_path: Path) -> None:
    until = time.monotonic() + 600
    while not (tmp_path / "began").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the slow compiler is gcc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_stopped_in_the_middle_of_a_compilation(tmp_path: Path, number: signal.Signals) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    with_runtime(cache)
    temporary.mkdir()
    process = python("print(work(1.0))", cache, CC=slow_compiler(tmp_path), TMPDIR=str(temporary))
    begun(tmp_path)
    time.sleep(0.2)
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.wait(600)
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert not list(temporary.iterdir()) and not list(cache.glob(".tmp-*"))
        for line in (tmp_path / "began").read_text().split():
            assert not Path(f"/proc/{line}").exists()  # the compiler went too
    after = python("print(work(1.0))", cache)
    answer, errors = after.communicate(timeout=600)
    assert after.returncode == 0, errors
    assert float(answer) > 0


def test_two_processes_compile_the_same_module(tmp_path: Path) -> None:
    with_runtime(tmp_path / "cache")
    both = [python("print(work(2.0))", tmp_path / "cache") for _ in range(2)]
    answers = [process.communicate(timeout=600) for process in both]
    assert all(process.returncode == 0 for process in both), answers
    assert answers[0][0] == answers[1][0]
    again = python(
        "print(work(2.0)); from gradc.runtime.cache import default_cache; print(default_cache().counters)",
        tmp_path / "cache",
    )
    answer, errors = again.communicate(timeout=600)
    assert answer.splitlines()[0] == answers[0][0].strip() and "dropped=0" in answer and "misses=0" in answer, errors


def test_one_module_from_four_threads() -> None:
    graph = gradc.trace(
        lambda tokens, table, w: ops.softmax(ops.embedding(tokens, table) @ w),
        tokens="i64[N]",
        table="f32[V,D]",
        w="f32[D,4]",
    )
    module = gradc.compile(graph, wrt=["table", "w"])
    problems = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        n, v, d = 50 + 37 * seed, 20, 8
        inputs = {
            "tokens": rng.integers(0, v, n),
            "table": rng.standard_normal((v, d)).astype(f32),
            "w": rng.standard_normal((d, 4)).astype(f32),
        }
        dy = rng.standard_normal((n, 4)).astype(f32)
        y, residuals = module.forward(**inputs)
        problems.append((inputs, dy, y, module.backward(residuals, dy)))
    fresh = gradc.compile(graph, wrt=["table", "w"])  # its first call comes from several threads too
    wrong: list[str] = []

    def work(k: int) -> None:
        inputs, dy, y, wanted = problems[k]
        for turn in range(40):
            try:
                if turn % 10 == 3:
                    with pytest.raises(IndexOutOfRange):
                        fresh.forward(**{**inputs, "tokens": inputs["tokens"] + 100})
                got, residuals = fresh.forward(**inputs)
                grads = fresh.backward(residuals, dy)
                if not np.array_equal(got, y) or not all(np.array_equal(grads[n], wanted[n]) for n in wanted):
                    wrong.append(f"thread {k} turn {turn}")
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_fork_after_use(tmp_path: Path) -> None:
    code = """
    import os
    here = work(3.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if work(3.0) == here else 1)
    assert os.waitpid(child, 0)[1] == 0
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, [3.0, 3.0]) == [here, here]
    print("ok")
    """
    with_runtime(tmp_path / "cache")
    process = python(code, tmp_path / "cache")
    answer, errors = process.communicate(timeout=600)
    assert answer.strip() == "ok", errors


# -- other libraries ---------------------------------------------------------------------------------------------------


def test_another_device_is_named(product: gradc.Module) -> None:
    class OnCuda:
        __cuda_array_interface__ = {"shape": (3, 4), "typestr": "<f4", "data": (0, False), "version": 3}

    with pytest.raises(DeviceError, match="on cuda was given to a module for the CPU"):
        product.forward(x=OnCuda(), w=W)
    torch = pytest.importorskip("torch")
    with pytest.raises(DeviceError, match="meta"):
        product.forward(x=torch.ones(3, 4, device="meta"), w=W)
    with pytest.raises(InvalidProblem, match="layout"):
        product.forward(x=torch.ones(3, 4).to_sparse(), w=W)


# -- an untrusted graph ------------------------------------------------------------------------------------------------


def test_a_deep_graph_does_not_recurse() -> None:
    x = input_node("x", parse_type("f32[4]"))
    y = x
    for k in range(3000):
        y = ops.add(y, x) if k % 2 else ops.mul(y, x)
    graph = Graph("deep", (x,), (("y", y),))
    assert gradc.parse(str(graph)) == graph
    joint = gradc.differentiate(graph, ["x"])
    assert len(joint.nodes) > 3000


def test_hostile_attributes() -> None:
    x = input_node("x", parse_type("f32[4]"))
    for call in (
        lambda: ops.slice(x, (0,), (4,), (2**63,)),
        lambda: ops.slice(x, (-(2**31),), (4,), (1,)),
        lambda: ops.pad(x, ((2**63, 2**63),)),
        lambda: ops.reshape(x, (2**62, 2**62)),
        lambda: ops.broadcast_to(x, (2**40, 2**40, 4)),
        lambda: ops.dequantize(ops.cast(x, "i8"), x, block=(0,)),
        lambda: ops.scatter_add(ops.cast(x, "i64"), x, size=-1),
        lambda: ops.sum(x, axis=2**70),
        lambda: ops.transpose(x, (0, 0)),
        lambda: ops.concat([], axis=0),
        lambda: ops.gather(x, ops.cast(x, "i64"), padding_idx=2**62),
    ):
        with pytest.raises(TypeRuleError):
            call()
