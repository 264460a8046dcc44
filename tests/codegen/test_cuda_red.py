"""Atomic sums of f32 rows: 16 bytes an add from sm_90 on, plain adds before and in the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.autodiff import differentiate

VECTOR = "red.relaxed.gpu.global.add.v4.f32"


def table_gradient(what: str, dtype: str) -> gradc.Graph:
    graph = gradc.trace(lambda t, w: ops.embedding(t, w, padding_idx=1), t="i64[N]", w=f"{dtype}[V,{what}]")
    return differentiate(graph, ["w"])


@pytest.mark.parametrize(
    ("columns", "dtype", "vector"),
    [
        ("D", "f32", True),
        (40, "f32", True),
        (40, "bf16", True),
        ("D", "bf16", True),
        (33, "f32", False),
        (40, "f64", False),
    ],
)
def test_neighbouring_columns_are_added_together(columns: Any, dtype: str, vector: bool) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = table_gradient(columns, dtype)
    for arch in ("sm_80", "sm_90"):
        module = gradc.compile(graph, target="cuda", arch=arch, reductions={"*": "atomic"}, determinism="none")
        assert (VECTOR in module.forward.binary.ptx) == (vector and arch == "sm_90"), arch
        assert not any(k.spill_stores or k.spill_loads for k in module.forward.binary.kernels.values())


@pytest.mark.parametrize(("columns", "dtype"), [("D", "f32"), (40, "f32"), (40, "bf16"), (33, "f32")])
def test_every_alignment_adds_each_column_once(columns: Any, dtype: str) -> None:
    """Rows of the padding index are left out, odd tails are added one by one, and so are rows at odd addresses."""
    graph = table_gradient(columns, dtype)
    with knobs.SIM_CHECK.set(True):
        module = gradc.compile(graph, target="cuda-sim", reductions={"*": "atomic"}, determinism="none")
        rng = np.random.default_rng(0)
        for d in (40, 7, 33) if columns == "D" else (columns,):
            given = {"t": rng.integers(0, 5, 21), "w": np.zeros((5, d)), "d.y": rng.integers(-8, 9, (21, d))}
            given = {k: a.astype(graph.input(k).dtype.np) for k, a in given.items()}
            wanted = interp.run(graph, given)["d.w"]
            np.testing.assert_array_equal(
                np.asarray(module.forward.run(**given)["d.w"]), wanted
            )  # small integers: exact in any order
            room = np.zeros(5 * d + 1, given["w"].dtype)
            out = room[1:].reshape(5, d)
            module.forward.run(**given, out={"d.w": out})
            np.testing.assert_array_equal(out, wanted)
