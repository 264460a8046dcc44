"""What gradc prints, held against files: the IR after every pass, the C of small kernels, explain(), and errors.

``pytest tests/system/test_golden.py --update-golden`` writes the files anew; their diff is to be read before a commit.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import GradcError
from gradc.runtime.host import pool


def bag(tokens, table, scale, gamma):
    rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 16)), padding_idx=0)
    return ops.layer_norm(ops.gelu(rows), (16,), gamma)


def model() -> gradc.Module:
    graph = gradc.trace(bag, tokens="i64[N]", table="i8[V,16]", scale="f32[V,1]", gamma="f32[16]")
    return gradc.compile(graph, wrt=["scale", "gamma"], target="cpu")


def test_the_ir_after_every_pass(golden) -> None:
    text = "\n\n".join(
        f"-- {name}\n{stage}" for name, stage in ((stage.name, stage) for stage in model().stages.stages)
    )
    golden("model/stages.txt", re.sub(r"test_golden\.py:\d+", "test_golden.py:LINE", text))


KERNELS = {
    "map": (lambda x, gate: ops.silu(x) * gate, {"x": "f32[N,D]", "gate": "f32[D]"}),
    "rms_norm": (lambda x, gamma: ops.rms_norm(x, (768,), gamma), {"x": "bf16[N,768]", "gamma": "bf16[768]"}),
    "privatized_sum": (lambda x: ops.sum(x, axis=0), {"x": "f32[N,D]"}),
    "segmented_scatter": (
        lambda labels, rows: ops.scatter_add(labels, rows, size=1000),
        {"labels": "i64[N]", "rows": "f32[N,16]"},
    ),
}
"""Kernels whose rows are given to tasks in different ways."""


@pytest.mark.parametrize("name", KERNELS)
def test_the_c_of_a_kernel(name: str, golden) -> None:
    function, types = KERNELS[name]
    force = {"*": name.split("_")[0]} if name.startswith(("privatized", "segmented")) else None
    module = gradc.compile(gradc.trace(function, **types), target="cpu", reductions=force)
    *_, kernel = module.forward.kernels.values()  # one before it may check indices
    golden(f"kernels_c/{name}.c", re.sub(r"test_golden\.py:\d+", "test_golden.py:LINE", kernel.source))


CUDA_KERNELS = {
    "map": (lambda x, bias: ops.gelu(x + bias), {"x": "f32[N,D]", "bias": "f32[D]"}, ""),
    "layer_norm": (
        lambda x, gamma, beta: ops.layer_norm(x, (1024,), gamma, beta),
        {"x": "bf16[N,1024]", "gamma": "bf16[1024]", "beta": "bf16[1024]"},
        "",
    ),
    "scatter": (
        lambda token, dy: ops.scatter_add(token, dy, size=32000),
        {"token": "i64[N]", "dy": "f32[N,128]"},
        "segmented",
    ),
    "column_sums": (lambda dy: ops.sum(dy, axis=0), {"dy": "f32[N,256]"}, "privatized"),
}
"""A mapping each: its function, types, and the strategy of its sums.  The scatter is tiled and sorted, segments are in
registers; the column sums are partial results of chunks, folded."""


@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_the_cuda_of_a_kernel(golden, name: str) -> None:
    function, types, strategy = CUDA_KERNELS[name]
    reductions = {"*": strategy} if strategy else None
    module = gradc.compile(gradc.trace(function, **types), target="cuda", arch="sm_90", reductions=reductions)
    (kernel,) = [k for k in module.forward.kernels.values() if not k.name.startswith("check")]
    first, *functions = kernel.source.split("\n\n")
    finish = [text for text in functions if re.search(r"_(tree|finish)\(", text)]
    golden(f"kernels_cuda/{name}.cu", "\n\n".join([first, *(text for text in functions if text not in finish)]))
    if finish:
        golden(f"kernels_cuda/{name}_finish.cu", "\n\n".join(finish))


@pytest.fixture
def two_threads():
    threads = pool.num_threads()
    pool.set_num_threads(2)
    yield
    pool.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")  # whose memory it tells
def test_explain(golden) -> None:
    golden("model/explain.txt", re.sub(r" +\d+(\.\d+)? (us|ms)\b", r" # \2", str(model().explain(N=4096, V=32000))))


MISTAKES = {
    "shapes": lambda: gradc.trace(lambda a, b: a @ b, a="f32[3,4]", b="f32[3,4]"),
    "a symbol is no 1": lambda: gradc.trace(lambda a, b: a + b, a="f32[N]", b="f32[M]"),
    "dtypes": lambda: gradc.trace(lambda a, b: a * b, a="f32[3]", b="bf16[3]"),
    "attribute": lambda: gradc.trace(lambda a: ops.sum(a, axis=3), a="f32[2,3]"),
    "no such padding": lambda: gradc.trace(lambda i, w: ops.embedding(i, w, padding_idx=9), i="i64[N]", w="f32[8,4]"),
    "in the way": lambda: gradc.compile(
        gradc.trace(lambda x: ops.argmax(x, axis=0).astype("f32") * 2.0, x="f32[4]"), wrt=["x"]
    ),
    "discrete": lambda: gradc.compile(
        gradc.trace(lambda i, w: ops.embedding(i, w), i="i64[N]", w="f32[8,4]"), wrt=["i"]
    ),
    "text": lambda: gradc.parse(
        "graph @g<N>(%x: f32[N,4], %w: f32[3,4]) {\n  %0: f32[N,4] = matmul %x, %w\n  return y=%0\n}"
    ),
    "type in text": lambda: gradc.parse("graph @g(%x: f32[4]) {\n  %0: f32[5] = exp %x\n  return y=%0\n}"),
    "dim": (
        lambda: model().forward(
            tokens=np.zeros(3, np.int64),
            table=np.zeros((5, 16), np.int8),
            scale=np.zeros((6, 1), np.float32),
            gamma=np.ones(16, np.float32),
        )
    ),
    "index": (
        lambda: model().forward(
            tokens=np.array([0, 7, 2]),
            table=np.zeros((5, 16), np.int8),
            scale=np.zeros((5, 1), np.float32),
            gamma=np.ones(16, np.float32),
        )
    ),
}


def test_errors(golden) -> None:
    found = []
    for name, mistake in MISTAKES.items():
        with pytest.raises(GradcError) as caught:
            mistake()
        notes = "".join(f"\n{note}" for note in getattr(caught.value, "__notes__", ()))
        found.append(f"-- {name}\n{type(caught.value).__name__}: {caught.value}{notes}")
    golden("errors.txt", "\n\n".join(found))
