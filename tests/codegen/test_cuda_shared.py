"""Results of few rows: each block sorts its rows by their place in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import long_tests
import numpy as np
import pytest
from agreement import simulated

import gradc
from gradc import interp, knobs, ops
from gradc.analysis.combine import OWN_BATCH, OWN_BLOCKS, OWN_KEYS
from gradc.autodiff import differentiate
from gradc.codegen.cuda.launch import Launch
from gradc.errors import Unsupported
from gradc.runtime.cuda import limits
from gradc.targets.devices import ARCHITECTURES

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def table_gradient(dtype: str, keys: Any, columns: Any, **options: Any) -> gradc.Graph:
    graph = gradc.trace(lambda t, w: ops.embedding(t, w, **options), t="i64[N]", w=f"{dtype}[{keys},{columns}]")
    return differentiate(graph, ["w"])


def rows_launch(module: gradc.Module, dims: dict[str, int]) -> Launch:
    return next(
        a
        for actions in module.forward.native.bind(dims).actions
        for a in actions
        if isinstance(a, Launch) and "embedding_grad" in a.function and a.function.endswith("_rows")
    )


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("columns", ["D", 40])
def test_sums_are_the_graph_s_whatever_the_order_of_blocks(dtype: str, columns: Any) -> None:
    """Uniform rows, a hot one, a padding row, rows that nobody hits, none at all; chunks that end within a batch.

    Sums of f64 are plain additions of up to 300 numbers; those of the others keep what each rounds off."""
    graph = table_gradient(dtype, 5, columns, padding_idx=3)
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "privatized"})
    assert "gradc_sort_places<" in module.forward.source
    rng = np.random.default_rng(0)
    for n, d, hot in ((0, 40, 0), (1, 1, 0), (64, 33, 0), (65, 40, 1), (300, 7, 1)):
        d = 40 if columns == 40 else d
        t = np.where(rng.random(n) < 0.5, 4, rng.integers(0, 5, n)) if hot else rng.integers(0, 4, n)
        given = {"t": t, "w": np.zeros((5, d)), "d.y": rng.standard_normal((n, d))}
        given = {k: a.astype(graph.input(k).dtype.np) for k, a in given.items()}
        wanted = np.asarray(interp.run(graph, given, precision="longdouble")["d.w"], np.longdouble)
        first = np.asarray(module.forward.run(**given)["d.w"])
        assert np.abs(first.astype(np.longdouble) - wanted).max(initial=0) <= (16 if dtype == "f64" else 2) * UNIT[
            dtype
        ] * np.abs(wanted).max(initial=0)
        for seed in (1, 2):
            module.forward.native.device.seed = seed
            assert np.asarray(module.forward.run(**given)["d.w"]).tobytes() == first.tobytes()
        module.forward.native.device.seed = None


@long_tests.values
@pytest.mark.parametrize("dtype", UNIT)
def test_a_chunk_has_several_batches_of_rows(dtype: str, judged: Callable[..., None]) -> None:
    """A batch takes the place of the one before only when all have read that: sums of integers, which are exact."""
    graph = table_gradient(dtype, 5, 9, padding_idx=3)
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "privatized"})
    rng = np.random.default_rng(0)
    n = 1_060_000
    chunk = -(-n // rows_launch(module, {"N": n}).blocks)
    assert "gradc_sort_places<" in module.forward.source
    assert chunk > 2 * OWN_BATCH and chunk % OWN_BATCH
    judged(*simulated(module, {"N": n}))
    t, dy = rng.integers(0, 5, n), rng.integers(-3, 4, (n, 9))
    wanted = np.zeros((5, 9), np.int64)
    np.add.at(wanted, t[t != 3], dy[t != 3])
    own = graph.input("w").dtype.np
    found = module.forward.run(t=t, w=np.zeros((5, 9), own), **{"d.y": dy.astype(own)})["d.w"]
    assert np.array_equal(np.asarray(found), wanted.astype(own))


def test_a_computed_row_and_a_maximum() -> None:
    """What a row brings is any expression; extremes have owners, too."""
    graph = differentiate(
        gradc.trace(lambda t, w, s: ops.embedding(t, w) * s[:, None], t="i64[N]", w="f32[7,C]", s="f32[N]"), ["w"]
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "privatized"})
    rng = np.random.default_rng(1)
    given = {
        "t": rng.integers(0, 7, 90),
        "w": np.zeros((7, 37), np.float32),
        "s": rng.standard_normal(90).astype(np.float32),
        "d.y": rng.standard_normal((90, 37)).astype(np.float32),
    }
    wanted = np.asarray(interp.run(graph, given, precision="f64")["d.w"])
    got = np.asarray(module.forward.run(**given)["d.w"])
    assert (
        "gradc_sort_places<" in module.forward.source
        and np.abs(got - wanted).max() <= 8 * 2.0**-24 * np.abs(wanted).max()
    )


def test_a_sum_of_rows_of_one_key_is_one_whoever_has_them() -> None:
    """A key of all rows, one of each slice's first row alone, none: pieces meet in the order of rows, in every slice,
    and the padding row is nobody's."""
    graph = table_gradient("f64", 9, 6, padding_idx=0)
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "privatized"})
    rng = np.random.default_rng(2)
    for t in (
        np.full(700, 4),
        np.zeros(700),
        np.arange(700) % 9,
        np.sort(rng.integers(0, 9, 700)),
        np.repeat([8, 0, 1], [699, 400, 1]),
    ):
        dy = rng.integers(-(2**20), 2**20, (len(t), 6)).astype(np.float64)
        wanted = np.zeros((9, 6))
        np.add.at(wanted, t[t != 0].astype(int), dy[t != 0])
        found = module.forward.run(t=t.astype(np.int64), w=np.zeros((9, 6)), **{"d.y": dy})["d.w"]
        assert np.array_equal(np.asarray(found), wanted)


def test_which_results_have_few_rows() -> None:
    """A digit's values, known when the kernel is made; a launch has as many blocks as the model has."""
    module = gradc.compile(table_gradient("f32", 155, 128), target="cuda-sim", reductions={"*": "privatized"})
    launch = rows_launch(module, {"N": 65536})
    assert launch.shared == 0 and launch.threads == 512 and launch.blocks == OWN_BLOCKS
    for keys in (OWN_KEYS, OWN_KEYS + 1, "V"):
        other = gradc.compile(table_gradient("f32", keys, 128), target="cuda-sim", reductions={"*": "privatized"})
        assert ("gradc_sort_places<" in other.forward.source) == (keys == OWN_KEYS)


def test_they_fit_on_every_device() -> None:
    """The sort's room is within the 48 KB that a block has without asking; nothing is spilled."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100"):
        for dtype in ("f32", "f64", "bf16"):
            module = gradc.compile(
                table_gradient(dtype, OWN_KEYS, "D"), target="cuda", arch=arch, reductions={"*": "privatized"}
            )
            (rows,) = [
                k for name, k in module.forward.binary.kernels.items() if "grad" in name and name.endswith("_rows")
            ]
            assert 8192 < rows.shared <= 48 * 1024
            assert not any(k.spill_stores or k.spill_loads for k in module.forward.binary.kernels.values())


def test_a_block_that_has_less_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel is compiled, with both numbers."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    module = gradc.compile(table_gradient("f32", 155, 512), target="cuda", arch="sm_90", reductions={"*": "privatized"})
    static = module.forward.binary.kernels[rows_launch(module, {"N": 4096}).function].shared
    kernels = list(module.forward.native.kernels.values())
    limits.refuse_large_blocks(module.forward.binary, kernels)
    short = replace(ARCHITECTURES["sm_90"], block_shared=static - 1)
    monkeypatch.setattr(limits, "ARCHITECTURES", {"sm_90": short})
    with pytest.raises(Unsupported, match=rf"{static} \+ 0 bytes of shared memory.*has {static - 1}"):
        limits.refuse_large_blocks(module.forward.binary, kernels)
