"""Each mapping of a kernel to a GPU's threads: a kernel that has it, its file and template, and what explain says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradc
from gradc import Graph, ops
from gradc.codegen.cuda.choose_mapping import MAPPINGS

ROOT = Path(__file__).resolve().parents[2]


def bag(rows: int, width: int) -> Graph:
    """Whose gradient adds rows of so many elements to a table."""
    table = f"f32[{rows},{width}]" if width else f"f32[{rows}]"
    return gradc.trace(lambda w, i: ops.gather(w, i), w=table, i="i32[4096]")


CASES: dict[str, tuple[Graph, dict[str, Any]]] = {
    "column strips": (gradc.trace(lambda x: ops.exp(x), x="f32[64,8192]"), {}),
    "tiled transpose": (gradc.trace(lambda x: ops.transpose(x) + 1.0, x="f32[256,512]"), {}),
    "thread per row": (gradc.trace(lambda x: ops.sum(x, axis=1), x="f32[64,32,128]"), {}),
    "row in registers": (gradc.trace(lambda x: ops.softmax(x), x="f32[64,512]"), {}),
    "whole rows": (gradc.trace(lambda x: ops.softmax(x), x="f32[512,100000]"), {}),
    "split rows": (gradc.trace(lambda x: ops.sum(x, axis=1), x="f32[4,1000000]"), {}),
    "scanned rows": (gradc.trace(lambda x: ops.cumsum(x, axis=1), x="f32[64,512]"), {}),
    "tiled": (bag(1000, 256), {"reductions": {"*": "segmented"}}),
    "shared table": (bag(16, 256), {"reductions": {"*": "privatized"}}),
    "warp segmented scan": (bag(1000, 0), {"reductions": {"*": "segmented"}}),
}


def test_every_mapping_has_a_case_a_file_and_a_template() -> None:
    assert CASES.keys() == MAPPINGS.keys()
    for name in MAPPINGS:
        stem = name.replace(" ", "_")
        assert (ROOT / f"gradc/codegen/cuda/mappings/{stem}.py").exists()
        assert (ROOT / f"templates/cuda/kernel/{stem}.cu.j2").exists()


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_has_the_mapping_and_explain_says_why(name: str) -> None:
    graph, options = CASES[name]
    wrt = ["w"] if options else []
    module = gradc.compile(graph, wrt=wrt, target="cuda", arch="sm_90", **options)
    kernels = [k for e in module.executables.values() for k in e.native.kernels.values()]
    reasons = {k.name: k.reason for k in kernels if k.mapping == name}
    assert reasons, [(k.name, k.mapping, k.reason) for k in kernels]
    explained = str(module.explain())
    assert all(reason and f"{kernel}: {name}, because {reason}" in explained for kernel, reason in reasons.items())
