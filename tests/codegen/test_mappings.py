"""Each mapping of a kernel, to a CPU's tasks or to a GPU's threads: a kernel that has it, its file and template, and
what explain says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gradc
from gradc import Graph, ops
from gradc.codegen.cpu import choose_mapping as cpu
from gradc.codegen.cuda import choose_mapping as cuda
from gradc.codegen.cuda.render import render_cuda

ROOT = Path(__file__).resolve().parents[2]
MAPPINGS = {"cpu": cpu.MAPPINGS, "cuda": cuda.MAPPINGS}
ENDING = {"cpu": "c.j2", "cuda": "cu.j2"}


def bag(rows: int, width: int) -> Graph:
    """Whose gradient adds rows of so many elements to a table."""
    table = f"f32[{rows},{width}]" if width else f"f32[{rows}]"
    return gradc.trace(lambda w, i: ops.gather(w, i), w=table, i="i32[4096]")


def scaled_bag() -> Graph:
    """Whose gradient adds what is left of a row to one element of its scale."""
    weight = lambda table, w: ops.dequantize(table, w, block=(1, 64))
    return gradc.trace(
        lambda i, table, w: ops.embedding(i, weight(table, w)), i="i64[4096]", table="i8[1000,64]", w="f32[1000,1]"
    )


def sampled() -> Graph:
    """Whose gradient of the grid adds up what each channel's image has at places that the grid says, and whose gradient
    of the image goes to these places.
    """
    return gradc.trace(lambda w, grid: ops.grid_sample(w, grid), w="f32[2,64,32,32]", grid="f32[2,32,32,2]")


CASES: dict[tuple[str, str], tuple[Graph, dict[str, Any]]] = {
    ("cuda", "column strips"): (gradc.trace(lambda x: ops.exp(x), x="f32[64,8192]"), {}),
    ("cuda", "tiled transpose"): (gradc.trace(lambda x: ops.transpose(x) + 1.0, x="f32[256,512]"), {}),
    ("cuda", "thread per row"): (gradc.trace(lambda x: ops.sum(x, axis=1), x="f32[64,64,128]"), {}),
    ("cuda", "row in registers"): (gradc.trace(lambda x: ops.softmax(x), x="f32[64,512]"), {}),
    ("cuda", "whole rows"): (gradc.trace(lambda x: ops.softmax(x), x="f32[512,100000]"), {}),
    ("cuda", "split rows"): (gradc.trace(lambda x: ops.sum(x, axis=1), x="f32[4,1000000]"), {}),
    ("cuda", "scanned rows"): (gradc.trace(lambda x: ops.cumsum(x, axis=1), x="f32[64,512]"), {}),
    ("cuda", "split scans"): (gradc.trace(lambda x: ops.cumsum(x, axis=1), x="f32[4,1000000]"), {}),
    ("cuda", "tiled"): (bag(1000, 256), {"reductions": {"*": "segmented"}}),
    ("cuda", "sorted chunk"): (bag(16, 256), {"reductions": {"*": "privatized"}}),
    ("cuda", "warp segmented scan"): (bag(1000, 0), {"reductions": {"*": "segmented"}}),
    ("cpu", "column strips"): (gradc.trace(lambda x: ops.exp(x), x="f32[64,8192]"), {}),
    ("cpu", "lane per row"): (gradc.trace(lambda x: ops.cumsum(x, axis=0), x="f32[64,512]"), {}),
    ("cpu", "whole rows"): (gradc.trace(lambda x: ops.softmax(x), x="f32[64,512]"), {}),
    ("cpu", "segments in registers"): (bag(1000, 256), {"reductions": {"*": "segmented"}}),
    ("cpu", "segmented rows"): (scaled_bag(), {"reductions": {"*": "segmented"}}),
    ("cpu", "owners in registers"): (gradc.trace(lambda x: ops.sum(x, axis=1), x="f32[64,32,128]"), {}),
    ("cpu", "owned rows"): (sampled(), {"reductions": {"*": "regular"}}),
    ("cpu", "interchanged owners"): (sampled(), {"reductions": {"*": "regular"}, "wrt": ["grid"]}),
}


def test_every_mapping_has_a_case_a_file_and_a_template() -> None:
    assert CASES.keys() == {(target, name) for target, mappings in MAPPINGS.items() for name in mappings}
    for target, name in CASES:
        stem = name.replace(" ", "_")
        assert (ROOT / f"gradc/codegen/{target}/mappings/{stem}.py").exists()
        assert (ROOT / f"templates/{target}/kernel/{stem}.{ENDING[target]}").exists()


@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_kernel_has_the_mapping_and_explain_says_why(target: str, name: str) -> None:
    graph, options = CASES[target, name]
    given: dict[str, Any] = {"wrt": ["w"] if options else []} | options
    given |= {"arch": "sm_90"} if target == "cuda" else {}
    module = gradc.compile(graph, target=target, **given)
    kernels = [k for e in module.executables.values() for k in e.native.kernels.values()]
    reasons = {k.name: k.reason for k in kernels if k.mapping == name}
    assert reasons, [(k.name, k.mapping, k.reason) for k in kernels]
    explained = str(module.explain())
    assert all(reason and f"{kernel}: {name}, because {reason}" in explained for kernel, reason in reasons.items())


@pytest.mark.parametrize(
    ("dtype", "width", "columns"), [("f32", 64, 4), ("f32", 6, 2), ("f32", 65, 1), ("bf16", 64, 8)]
)
def test_rows_that_nobody_hits_are_stored_as_widely_as_they_can(dtype: str, width: int, columns: int) -> None:
    """However few of its columns the loads of a bag's gradient move, which a mask of the row keeps from vectors."""
    graph = gradc.trace(
        lambda i, w, o: ops.embedding_bag(i, w, o), i="i64[40960]", w=f"{dtype}[1000000,{width}]", o="i64[4096]"
    )
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_90", reductions={"*": "segmented"})
    body = module.backward.source.partition("_finish_of(" if "_finish_of(" in module.backward.source else "_finish(")[2]
    assert f"enum {{ VEC = {columns} }};" in body.partition("\n}\n")[0]


@pytest.mark.parametrize(("table", "mapping"), [(5000, "tiled"), (40, "sorted chunk")])
def test_rows_that_a_value_masks_come_columns_at_once(table: int, mapping: str) -> None:
    """Of positions before the first bag there is no cotangent: the others' are loaded 16 bytes at a time."""
    bags = gradc.trace(lambda i, o, w: ops.embedding_bag(i, w, o), i="i64[900]", o="i64[90]", w=f"f32[{table},64]")
    program = gradc.compile(bags, ["w"], "cuda").backward.program
    kernel = next(k for k in render_cuda(program)[1].values() if k.mapping == mapping)
    assert "enum { VEC = 4 }" in kernel.text
    assert re.search(r"if \(v\d+\) gradc_get_vector\(.*\n\s*else gradc_fill\(", kernel.text)
