"""The registers of kernels on tensor cores are enough for whatever is computed of a score, and for any sizes."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import long_tests
from attention_forms import ATTENTION_FORMS, heads
from skips import compiled
from tile_programs import assert_nothing_spills

import gradc
from gradc import ops
from gradc.analysis.tiles import tiled
from gradc.codegen.cuda.tiles.kernel import tile_kernel
from gradc.compiler import run_passes
from gradc.module.options import Options
from gradc.runtime.executable import Executable
from gradc.targets.devices import gpu_of

FORMS = (
    "sliding window",
    "bias of each",
    "mask of each",
    "softcap",
    "documents",
    "alibi",
    "relative positions",
    "dropout",
)


@compiled()
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.long(
    "gradc/codegen/cuda/tiles/fragments.py", "gradc/analysis/tiles.py", "templates/cuda/kernel/tile.cu.j2"
)
def test_no_form_of_attention_spills(name, features, arch, monkeypatch):
    """Whatever is predicted of it as products with kernels between."""
    form = ATTENTION_FORMS[name]
    types = {n: re.sub(r"\b64\]", f"{features}]", t).replace("D[", "bf16[") for n, t in form.types.items()}
    graph = gradc.trace(form.function, **types)
    monkeypatch.setattr("gradc.passes.column_blocking.tile_rows.calls_seconds", lambda *_: math.inf)
    programs = run_passes(graph, ("q", "k", "v"), Options(arch=arch), "cuda")[2]
    assert any(loop.tile for loop in programs["forward"].loops)
    for program in programs.values():
        tiles = [loop for loop in program.loops if loop.tile]
        kernels = Executable(program, "cuda", arch=arch).binary.kernels if tiles else {}
        for loop in tiles:
            r = kernels[tile_kernel(loop, program).name]
            assert r.registers <= 255 and not r.spill_stores and not r.spill_loads


def _lengths(q, k, v, lengths):
    shape = (4, 1, 1, k.shape[-2])
    return heads(q, k, v, attn_mask=ops.iota(shape=shape, axis=3) < ops.broadcast_to(lengths, shape))


def _plain(q, k, v):
    return heads(q, k, v)


def _biased(q, k, v, bias):
    return heads(q, k, v, attn_mask=bias)


def _causal(q, k, v):
    return heads(q, k, v, is_causal=True)


SIZES = {
    "no edges, d64": (_plain, 64, 2048, 2048, {}, "sm_90"),
    "no edges, d128": (_plain, 128, 2048, 2048, {}, "sm_100"),
    "part of the rows, d96": (_plain, 96, 2000, 2048, {}, "sm_90"),
    "bias without edges, d32": (_biased, 32, 2000, 2048, {"bias": "f32[4,16,2000,2048]"}, "sm_90"),
    "bias without edges, d80": (_biased, 80, 2048, 2048, {"bias": "f32[4,16,2048,2048]"}, "sm_80"),
    "bias without edges, d96": (_biased, 96, 2048, 2048, {"bias": "f32[4,16,2048,2048]"}, "sm_100"),
    "mask and parts, d128": (_causal, 128, 2000, 2000, {}, "sm_90"),
    "mask and sizes not known, d160": (_causal, 160, "S", "S", {}, "sm_90"),
    "lengths and parts, d64": (_lengths, 64, 2000, 2000, {"lengths": "i64[4,1,1,1]"}, "sm_90"),
}
"""Function, features, rows, columns, other inputs, and the architecture, of kernels that did spill, or would in larger
blocks.
"""


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_no_choice_of_blocks_spills(arch, judged):
    """Not only the first: a program may take a later one, for few rows.  Some do on one device alone."""
    types = {n: "bf16[4,16,2048,64]" for n in "qkv"}
    program = run_passes(gradc.trace(_causal, **types), (), Options(arch=arch), "cuda")[2]["forward"]
    (loop,) = (loop for loop in program.loops if loop.tile)
    choices = tiled(loop, program, gpu_of(arch))
    assert len(choices) >= 6
    made = [replace(program, steps=tuple(x if s is loop else s for s in program.steps)) for x in choices]
    assert_nothing_spills(made, arch, judged)


GRADIENTS = [
    *itertools.product((2048, 2000), (_causal, _plain), (64, 128), ("sm_80", "sm_90", "sm_100")),
    *((2000, function, 80, "sm_80") for function in (_causal, _plain)),
]


@compiled()
@pytest.mark.parametrize(("rows", "function", "features", "arch"), GRADIENTS)
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_no_gradient_spills(arch, features, function, rows, judged):
    """Of these dK and dV have the most registers: sums of two products, and fragments of the rows of both.  A forward
    that keeps what they need has other ones than one without gradients.
    """
    graph = gradc.trace(function, **{n: f"bf16[4,16,{rows},{features}]" for n in "qkv"})
    programs = run_passes(graph, ("q", "k", "v"), Options(arch=arch), "cuda")[2]
    assert [sum(loop.tile is not None for loop in program.loops) for program in programs.values()] == [1, 2]
    assert_nothing_spills([*programs.values()], arch, judged)


@compiled()
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
def test_no_sizes_of_attention_spill(name, judged):
    function, features, rows, columns, more, arch = SIZES[name]
    types = {n: f"bf16[4,16,{size},{features}]" for n, size in zip("qkv", (rows, columns, columns), strict=True)}
    graph = gradc.trace(function, **types, **more)
    program = run_passes(graph, (), Options(arch=arch), "cuda")[2]["forward"]
    assert any(loop.tile for loop in program.loops)
    assert_nothing_spills([program], arch, judged)
