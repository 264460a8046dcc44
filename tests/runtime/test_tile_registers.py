"""The registers of kernels on tensor cores are enough for whatever is computed of a score."""

from __future__ import annotations

import math
import re

import pytest

pytest.importorskip("torch")

from attention_forms import ATTENTION_FORMS

import gradc
from gradc.codegen.cuda.tiles.kernel import tile_kernel
from gradc.compiler import run_passes
from gradc.module.options import Options
from gradc.runtime.cuda.nvrtc import find_nvrtc
from gradc.runtime.executable import Executable

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


@pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed")
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
