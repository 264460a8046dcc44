"""Rows of temps of products that begin at multiples of 16 bytes."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.types import DTYPES
from gradc.passes.program.align_rows import align_rows


def compiled(dtype: str = "bf16", columns: str = "131", **options: object) -> gradc.Module:
    types = {"x": f"{dtype}[40,64]", "w": f"{dtype}[{columns},64]", "v": f"{dtype}[{columns},24]"}
    graph = gradc.trace(lambda x, w, v: ops.gelu(ops.linear(x, w)) @ v, **types)
    return gradc.compile(graph, ["x", "w", "v"], target="cuda-sim", **options)


@pytest.mark.parametrize("target", ["forward", "backward"])
def test_no_temp_of_a_product_has_rows_of_131_elements(target: str) -> None:
    stages = {stage.name: stage.result for stage in compiled().stages}
    before, after = stages[f"{target}.fuse_copies"], stages[f"{target}.align_rows"]
    old = {b.name: b.type.shape for b in before.buffers}
    new = {b.name: b.type.shape for b in after.buffers}
    changed = {name for name, shape in new.items() if shape != old[name]}
    assert changed and all(old[n] == (40, 131) and new[n] == (40, 136) for n in changed)
    assert all(b.kind == "temp" for b in after.buffers if b.name in changed)
    assert [b for b in after.buffers if b.kind != "temp"] == [b for b in before.buffers if b.kind != "temp"]
    assert align_rows(after) == after


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"columns": "136"}, {"columns": "V"}, {"columns": "35"}])
def test_which_rows_stay(options: dict[str, str]) -> None:
    """Of f32, of whole 16 bytes, of unknown sizes, and such that an eighth more memory would not do."""
    module = compiled(**options)
    assert "forward.align_rows" not in {stage.name for stage in module.stages} or all(
        b.type.shape[-1] not in (40, 136) or options == {"columns": "136"}
        for b in module.forward.program.of_kind("temp")
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_values_and_gradients_are_those_of_the_interpreter(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    module, rng = compiled(dtype), np.random.default_rng(0)
    shapes = {"x": (40, 64), "w": (131, 64), "v": (131, 24)}
    given = {n: (0.2 * rng.standard_normal(shape)).astype(DTYPES[dtype].np) for n, shape in shapes.items()}
    y, residuals = module.forward(**given)
    meant = interp.run_program(module.forward.program, given)
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    assert np.allclose(*(np.asarray(a).astype(np.float64) for a in (y, meant["y"])), rtol=2 * unit, atol=unit)
    dy = rng.standard_normal(y.shape).astype(DTYPES[dtype].np)
    found = module.backward(residuals, dy)
    exact = gradc.compile(module.graph, ["x", "w", "v"], target="cpu")
    wanted = exact.backward(exact.forward(**given)[1], dy)
    for name, value in wanted.items():
        a, b = (np.asarray(g).astype(np.float64) for g in (found[name], value))
        assert np.abs(a - b).max() <= 6 * unit * np.abs(b).max(), name
