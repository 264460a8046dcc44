"""Matrix products of any strides by cuBLAS: what its functions are asked, computed by a stand-in of NumPy's on the
addresses that they are given, in modules that the simulator runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis import library_time as calls_time
from gradc.codegen.cuda import library_products, library_time
from gradc.codegen.cuda.actions import Launch, Library
from gradc.codegen.cuda.products import views
from gradc.errors import DeviceError, IndexOutOfRange
from gradc.ir.types import BF16, DTYPES
from gradc.passes.row_blocking import wide_products
from gradc.runtime.cuda import cublas
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.handles import Handles
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import gpu_of

TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 2: np.dtype(np.float16), 14: BF16.np}
"""cudaDataType."""


def matrix(address: int, rows: int, columns: int, leading: int, dtype: np.dtype[Any], transposed: bool) -> np.ndarray:
    """op(X), rows x columns, of column-major memory."""
    held = (columns, rows) if transposed else (rows, columns)
    assert leading >= max(held[0], 1), "as cuBLAS requires"
    count = (held[1] - 1) * leading + held[0]
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)).view(dtype)
    seen = np.lib.stride_tricks.as_strided(memory, held, (dtype.itemsize, leading * dtype.itemsize))
    return seen.T if transposed else seen


@dataclass(frozen=True)
class Given:
    """A call's matrices: op(X) m x k, op(Y) k x n, in columns."""

    op_x: int
    op_y: int
    m: int
    n: int
    k: int
    types: Any
    leading: Any
    starts: list[int]
    adds: bool

    @property
    def has_fast_kernels(self) -> bool:
        """As "Tensor Core Usage" of cuBLAS's documentation says it, without the rows of an operand that are no rows of
        the result and no summands.
        """
        x, _, out = (t.itemsize for t in self.types)
        summed = self.k if self.op_x or not self.op_y else 0
        leading = [n * t.itemsize for n, t in zip(self.leading, self.types, strict=True)]
        return not any(at % 16 for at in (self.m * out, summed * x, *leading, *self.starts))


class Blas:
    """cuBLAS's functions by NumPy; ``asked`` is (function, batch) of each call, ``given`` what its matrices are."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.given: list[Given] = []
        self.cublasSetStream_v2 = self.cublasSetWorkspace_v2 = lambda *a: 0

    def multiply(self, sizes: Any, types: Any, leading: Any, starts: Any, alpha: Any, beta: Any) -> None:
        (op_x, op_y, m, n, k), (xt, yt, ot) = sizes, (TYPES[t] for t in types)
        wide = np.float64 if ot == np.float64 else np.float32
        assert alpha._obj.value == 1, "nothing is scaled"
        starts = list(starts)
        given = Given(*sizes, (xt, yt, ot), leading, [at for each in starts for at in each], bool(beta._obj.value))
        self.given.append(given)
        for x, y, out in starts:
            left, right = matrix(x, m, k, leading[0], xt, op_x), matrix(y, k, n, leading[1], yt, op_y)
            total = left.astype(wide) @ right.astype(wide)
            there = matrix(out, m, n, leading[2], ot, False)
            there[...] = (total + there.astype(wide) if beta._obj.value else total).astype(ot)

    def cublasGemmStridedBatchedEx(
        self, handle: Any, op_x: int, op_y: int, m: int, n: int, k: int, alpha: Any, x: int, xt: int, ldx: int, sx: int,
        y: int, yt: int, ldy: int, sy: int, beta: Any, out: int, ot: int, ldo: int, so: int, batch: int, compute: int,
        algorithm: int,
    ) -> int:  # fmt: skip
        sizes = [TYPES[t].itemsize for t in (xt, yt, ot)]
        starts = [[at + i * step * size for at, step, size in zip((x, y, out), (sx, sy, so), sizes, strict=True)]
                  for i in range(batch)]  # fmt: skip
        self.asked.append(("strided", batch))
        self.multiply((op_x, op_y, m, n, k), (xt, yt, ot), (ldx, ldy, ldo), starts, alpha, beta)
        return 0

    def cublasGemmBatchedEx(
        self, handle: Any, op_x: int, op_y: int, m: int, n: int, k: int, alpha: Any, x: int, xt: int, ldx: int, y: int,
        yt: int, ldy: int, beta: Any, out: int, ot: int, ldo: int, batch: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        read = [np.ctypeslib.as_array((ctypes.c_uint64 * batch).from_address(at)).tolist() for at in (x, y, out)]
        self.asked.append(("pointers", batch))
        self.multiply((op_x, op_y, m, n, k), (xt, yt, ot), (ldx, ldy, ldo), zip(*read, strict=True), alpha, beta)
        return 0


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Blas:
    """The simulator's products are those of :mod:`gradc.runtime.cuda.cublas`, with this library."""
    stand_in, simulated = Blas(), Simulator.multiply
    monkeypatch.setattr(cublas, "_library", lambda: stand_in)
    monkeypatch.setattr(cublas, "_handles", Handles(lambda device: 1, id))

    def multiply(
        self: Simulator, library: Library, a: int, b: int, out: int, workspace: Span, stream: int = 0,
        pointers: int = 0, bias: int = 0,
    ) -> None:  # fmt: skip
        p = library.product
        there = self.bytes_at(out, p.out.part.nbytes)
        before = there.copy()
        simulated(self, library, a, b, out, workspace, stream, pointers, bias)  # which looks at the addresses, too
        if not p.add:
            views(p, *(self.bytes_at(at - o.skipped, o.part.nbytes) for at, o in ((a, p.a), (b, p.b))), before)[2][
                ...
            ] = -7
        there[:] = before
        cublas.prepared(0, library, a, b, out, workspace, pointers, bias)(stream)

    monkeypatch.setattr(Simulator, "multiply", multiply)
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    return stand_in


def compiled(f: Callable[..., Any], **types: str) -> gradc.Module:
    return gradc.compile(gradc.trace(f, **types), target="cuda-sim", wrt=[])


def heads(q: Any, k: Any) -> Any:
    """Scores of attention where heads lie beside features."""
    return ops.matmul(ops.transpose(q, (0, 2, 1, 3)), ops.transpose(k, (0, 2, 3, 1)))


def exact(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.einsum("bmhe,bnhe->bhmn", q.astype(np.float64), k.astype(np.float64))


@pytest.mark.parametrize(
    ("batch", "heads_", "asked"),
    [
        (3, 5, [("strided", 5)] * 3),
        (5, 3, [("strided", 5)] * 3),
        (1, 3, [("strided", 3)]),
        (16, 17, [("strided", 17)] * 16),
        (17, 18, [("pointers", 17 * 18)]),
    ],
)
def test_two_axes_of_a_batch_that_step_differently(
    batch: int, heads_: int, asked: list[tuple[str, int]], blas: Blas
) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((batch, 7, heads_, 4)), rng.standard_normal((batch, 6, heads_, 4))
    module = compiled(heads, q=f"f64[{batch},7,{heads_},4]", k=f"f64[{batch},6,{heads_},4]")
    y = module(q=q, k=k)
    assert blas.asked == asked
    assert np.allclose(np.asarray(y), exact(q, k), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("batch", "heads_"), [(3, 5), (17, 18)])
def test_rows_of_a_result_that_lie_apart(batch: int, heads_: int, blas: Blas) -> None:
    """Heads are written beside features, by the library itself; the simulator says what of the result was written."""

    def f(p: Any, v: Any) -> Any:
        return ops.transpose(ops.matmul(p, ops.transpose(v, (0, 2, 1, 3))), (0, 2, 1, 3))

    module = compiled(f, p=f"f64[{batch},{heads_},7,6]", v=f"f64[{batch},6,{heads_},4]")
    ((*before, library),) = module.forward.native.bind({}).actions
    assert isinstance(library, Library) and library.out.leading == 4 * heads_ and len(before) == (batch > 16)
    rng = np.random.default_rng(6)
    p, v = rng.standard_normal((batch, heads_, 7, 6)), rng.standard_normal((batch, 6, heads_, 4))
    y = np.asarray(module(p=p, v=v))
    assert np.allclose(y, np.einsum("bhmk,bkhn->bmhn", p, v), rtol=1e-13, atol=1e-13)
    none = compiled(f, p=f"f64[{batch},{heads_},7,0]", v=f"f64[{batch},0,{heads_},4]")
    assert not np.asarray(none(p=p[..., :0], v=v[:, :0])).any()


@pytest.mark.parametrize(("width", "start", "asked"), [(8, 0, "pointers"), (8, 3, "strided"), (4, 0, "strided")])
def test_addresses_of_16_bit_matrices_are_multiples_of_16_bytes(width: int, start: int, asked: str, blas: Blas) -> None:
    """As far as steps tell when it is planned, and at each call by where the caller's arrays begin."""
    rng = np.random.default_rng(3)
    shapes = {"q": (17, 8, 18, width), "k": (17, 16, 18, width)}
    module = compiled(heads, **{n: f"bf16[{','.join(map(str, shape))}]" for n, shape in shapes.items()})
    bf16 = BF16.np
    given = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        memory = np.zeros(size + 32, bf16)
        first = -memory.ctypes.data // 2 % 8 + start  # of the element at a multiple of 16 bytes
        given[name] = memory[first : first + size].reshape(shape)
        given[name][:] = rng.standard_normal(shape)
    y = np.asarray(module(**given)).astype(np.float64)
    assert {how for how, _ in blas.asked} == {asked}
    assert np.allclose(y, exact(given["q"], given["k"]), rtol=2.0**-7, atol=1e-3)


def test_sizes_that_the_first_call_knows(blas: Blas) -> None:
    """One module with symbolic sizes is one call, a loop of calls, and addresses."""
    module = compiled(heads, q="f32[B,M,H,4]", k="f32[B,N,H,4]")
    rng = np.random.default_rng(1)
    for batch, count in ((1, 4), (2, 9), (40, 19)):
        q, k = (rng.standard_normal((batch, n, count, 4)).astype(np.float32) for n in (5, 3))
        assert np.allclose(np.asarray(module(q=q, k=k)), exact(q, k), atol=1e-5)
    assert blas.asked == [("strided", 4), ("strided", 9), ("strided", 9), ("pointers", 760)]


def test_more_axes_than_one_launch_writes_addresses_of(blas: Blas) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 3, 4, 5, 3, 2)), rng.standard_normal((5, 4, 3, 2, 2, 6))
    module = compiled(
        lambda a, b: ops.matmul(ops.transpose(a, (3, 2, 1, 0, 4, 5)), b), a="f64[2,3,4,5,3,2]", b="f64[5,4,3,2,2,6]"
    )
    written = [x for step in module.forward.native.bind({}).actions for x in step if isinstance(x, Launch)]
    assert [launch.function for launch in written] == ["gradc_pointers"] * 5
    y = np.asarray(module(a=a, b=b))
    assert blas.asked == [("pointers", 120)]
    assert np.allclose(y, a.transpose(3, 2, 1, 0, 4, 5) @ b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_matrix_without_a_unit_stride_is_copied_where_that_is_faster(dtype: str, blas: Blas) -> None:
    """Every second column of one operand, a batch that is repeated; the kernel of ours computes what is small."""
    shapes = {"a": "[2,400,800]", "b": "[1,800,300]"}
    module = compiled(
        lambda a, b: ops.matmul(a[:, :, ::2], b[:, ::2]),
        **{name: dtype + shape for name, shape in shapes.items()},
    )
    functions = [x.function for step in module.forward.native.bind({}).actions for x in step if isinstance(x, Launch)]
    assert [f for f in functions if f.startswith("gradc")] == [f"gradc_copy_{4 if dtype == 'f32' else 2}"]
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(n).astype(TYPES[0 if dtype == "f32" else 14]) for n in ((2, 400, 800), (1, 800, 300)))
    y = np.asarray(module(a=a, b=b)).astype(np.float64)
    wanted = a[:, :, ::2].astype(np.float64) @ b[:, ::2].astype(np.float64)
    unit = 2.0**-24 if dtype == "f32" else 2.0**-8
    assert blas.asked == [("strided", 2)]
    assert (np.abs(y - wanted) <= unit * np.abs(wanted) + 400 * 2.0**-24 * 40).all()
    small = compiled(lambda a, b: ops.matmul(a[:, ::2], b), a="f32[9,20]", b="f32[10,7]")
    functions = [x.function for step in small.forward.native.bind({}).actions for x in step if isinstance(x, Launch)]
    assert functions == ["gradc_matmul_f32"]


@pytest.mark.parametrize(("batch", "heads_"), [(3, 5), (17, 18)])
def test_nothing_is_written_behind_a_check_that_finds_something(batch: int, heads_: int, blas: Blas) -> None:
    """The library cannot read the flag: an output is put by while it writes, and copies and addresses lie elsewhere."""

    def f(table: Any, at: Any, k: Any) -> Any:
        return heads(ops.reshape(ops.embedding(at, table), (batch, 7, heads_, 4)), k)

    module = compiled(f, table=f"f64[9,{heads_ * 4}]", at=f"i64[{batch},7]", k=f"f64[{batch},6,{heads_},4]")
    rng = np.random.default_rng(4)
    table, k = rng.standard_normal((9, heads_ * 4)), rng.standard_normal((batch, 6, heads_, 4))
    at = rng.integers(0, 9, (batch, 7))
    assert np.allclose(
        np.asarray(module(table=table, at=at, k=k)),
        exact(table[at].reshape(batch, 7, heads_, 4), k),
        rtol=1e-13,
        atol=1e-13,
    )
    out = np.full((batch, heads_, 7, 6), 7.0)
    at[1, 3] = 9
    with pytest.raises(IndexOutOfRange, match="9"):
        module(table=table, at=at, k=k, out={"y": out})
    assert (out == 7.0).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_takes_what_writes_copies_and_addresses(arch: str) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = gradc.trace(heads, q="bf16[B,M,H,E]", k="bf16[B,N,H,E]")
    binary = gradc.compile(graph, target="cuda", arch=arch, wrt=[]).forward.binary
    assert {"gradc_pointers", "gradc_copy_2"} <= binary.kernels.keys()
    assert not any(found.spill_stores for found in binary.kernels.values())


def test_blocks_of_rows_add_to_one_result(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block writes what the others add to; each reads its rows, and writes to them."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)
    monkeypatch.setenv("GRADC_CACHE", "0")
    graph = gradc.trace(lambda x, w, t: ops.linear_cross_entropy(x, w, t), x="f32[300,8]", w="f32[90,8]", t="i64[300]")
    module = gradc.compile(graph, ["x", "w"], target="cuda-sim")
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((300, 8), (90, 8)))
    t = rng.integers(0, 90, 300)
    y, residuals = module.forward(x=x, w=w, t=t)
    gradients = module.backward(residuals, np.asarray(1, np.float32))
    assert blas.asked == [("strided", 1)] * 12, "three blocks: logits, the same again, and two gradients"
    leaves = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, w)]
    loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, torch.tensor(t))
    loss.backward()
    assert np.allclose(float(y), loss.item(), rtol=1e-6)
    for name, leaf in zip(("x", "w"), leaves, strict=True):
        assert np.allclose(np.asarray(gradients[name]), leaf.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("heads_", "rows"), [(1, 40), (3, 33)])
def test_columns_and_sums_that_end_between_16_bytes(
    dtype: str, heads_: int, rows: int, blas: Blas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131 columns of a temp lie 136 apart: 128 of them, and sums over 128, go to kernels for tensor cores.

    A sum in f16 stays one: a part of it may be more than f16 holds.
    """
    monkeypatch.setattr(library_products, "HOST_CALL", 0.0)
    monkeypatch.setattr(calls_time, "UNALIGNED_FLOPS", {dtype: 1.0})
    shapes = {"x": (heads_, rows, 64), "w": (heads_, 131, 64), "v": (heads_, 131, 24)}
    module = compiled(
        lambda x, w, v: ops.matmul(ops.relu(ops.matmul(x, ops.transpose(w, (0, 2, 1)))), v),
        **{name: f"{dtype}[{','.join(map(str, shape))}]" for name, shape in shapes.items()},
    )
    rng = np.random.default_rng(7)
    x, w, v = (rng.standard_normal(shape).astype(DTYPES[dtype].np) for shape in shapes.values())
    y = np.asarray(module(x=x, w=w, v=v)).astype(np.float64)
    assert [(g.m, g.k, g.adds) for g in blas.given] == [
        (3, 64, False),
        (128, 64, False),
        *([(24, 3, False), (24, 128, True)] if dtype == "bf16" else [(24, 131, False)]),
    ]
    assert [g.has_fast_kernels for g in blas.given] == [False, True, False, *([True] if dtype == "bf16" else [])]
    x, w, v = (a.astype(np.float64) for a in (x, w, v))
    h = np.maximum(x @ w.transpose(0, 2, 1), 0)
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    # h is rounded, the last three terms are, and their sum with the others
    bound = unit * (np.abs(h) @ np.abs(v) + np.abs(h[..., 128:] @ v[:, 128:]) + np.abs(h @ v)) * 1.01
    assert (np.abs(y - h @ v) <= bound).all()


def test_the_products_of_an_odd_vocabulary_go_to_fast_kernels() -> None:
    """Logits, and the gradient of what they are made of: 50257 words are 50256 and one, a part of a block at a time.

    An H200 had kernels at a seventh of the rate for these two where they were whole (docs/gpu.md).
    """
    types = {"x": "bf16[8192,768]", "w": "bf16[50257,768]", "t": "i64[8192]"}
    graph = gradc.trace(lambda x, w, t: ops.linear_cross_entropy(x, w, t), **types)
    plan = gradc.compile(graph, ["x", "w"], target="cuda", arch="sm_90").forward.native.bind({})
    products = [a for step in plan.actions for a in step if isinstance(a, Library)]
    large = [p for p in products if p.m * p.n * p.k > 1e9]
    assert len(large) == 3 * 4 and all(map(library_time.is_aligned, large))
    assert {(p.n, p.k) for p in products if p not in large} == {(1, 768), (768, 1)}
    seconds = sum(library_time.library_seconds(p, gpu_of("H200")) for p in products)
    assert seconds < 6e-3, "12.9 ms of 15.7 before"


def test_a_caller_s_array_with_odd_rows_is_given_as_it_is(blas: Blas) -> None:
    module = compiled(lambda x, w: ops.matmul(x, w), x="bf16[512,2049]", w="bf16[2049,1031]")
    ((library,),) = module.forward.native.bind({}).actions
    assert isinstance(library, Library) and not library_time.is_aligned(library)


def test_cublas_says_which_function_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(
        cublasSetStream_v2=lambda *a: 0, cublasSetWorkspace_v2=lambda *a: 0, cublasGemmBatchedEx=lambda *a: 15
    )
    monkeypatch.setattr(cublas, "_library", lambda: refusing)
    monkeypatch.setattr(cublas, "_handles", Handles(lambda device: 1, id))
    module = compiled(heads, q="f32[17,7,18,4]", k="f32[17,6,18,4]")
    ((*_, library),) = module.forward.native.bind({}).actions
    with pytest.raises(DeviceError, match=r"\(306 x 7 x 6 x 4 in float32\): status 15, not supported"):
        cublas.prepared(0, library, 0, 0, 0, Span(0, 0, np.dtype(np.uint8)), pointers=8)(0)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_nothing_to_sum_in_an_odd_product(dtype: str, blas: Blas) -> None:
    module = compiled(lambda a, b: ops.matmul(a, b), a=f"{dtype}[M,K]", b=f"{dtype}[K,N]")
    y = module(a=np.ones((4, 0), DTYPES[dtype].np), b=np.ones((0, 67), DTYPES[dtype].np))
    assert y.shape == (4, 67) and not y.astype(np.float32).any()


def test_a_sum_whose_parts_f16_does_not_hold(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_products, "HOST_CALL", 0.0)
    monkeypatch.setattr(calls_time, "UNALIGNED_FLOPS", {"f16": 1.0})
    x, w, v = (np.zeros(shape, np.float16) for shape in ((33, 64), (131, 64), (131, 24)))
    x[:, 0], w[:, 0], v[-3:], v[:3] = 1, 100, 300, -300
    module = compiled(
        lambda x, w, v: ops.matmul(ops.relu(ops.matmul(x, w.T)), v), x="f16[33,64]", w="f16[131,64]", v="f16[131,24]"
    )
    assert not module(x=x, w=w, v=v).any()
