"""Partial results in shared memory: few rows of a result, each sum with one owner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.analysis.combine import combines, shared_bytes
from gradc.autodiff import differentiate
from gradc.codegen.cuda.launch import Launch
from gradc.codegen.cuda.mappings.shared_table import STAGED_ROWS
from gradc.codegen.text import widened
from gradc.errors import GradcError, Unsupported
from gradc.inspect.occupancy import resident_blocks
from gradc.runtime.cuda import limits
from gradc.runtime.cuda.nvrtc import compile_cuda, find_nvrtc
from gradc.targets.devices import ARCHITECTURES
from gradc.targets.gpu import SHARED_BYTES

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
    assert "extern __shared__" in module.forward.source
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


@pytest.mark.parametrize("dtype", UNIT)
def test_a_chunk_has_several_batches_of_rows(dtype: str) -> None:
    """A batch takes the place of the one before only when all have read that: sums of integers, which are exact."""
    graph = table_gradient(dtype, 5, 7, padding_idx=3)
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "privatized"})
    rng = np.random.default_rng(0)
    n = 70_000
    chunk = -(-n // rows_launch(module, {"N": n}).blocks)
    assert chunk > 2 * STAGED_ROWS and chunk % STAGED_ROWS
    t, dy = rng.integers(0, 5, n), rng.integers(-3, 4, (n, 7))
    wanted = np.zeros((5, 7), np.int64)
    np.add.at(wanted, t[t != 3], dy[t != 3])
    own = graph.input("w").dtype.np
    found = module.forward.run(t=t, w=np.zeros((5, 7), own), **{"d.y": dy.astype(own)})["d.w"]
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
        "extern __shared__" in module.forward.source
        and np.abs(got - wanted).max() <= 8 * 2.0**-24 * np.abs(wanted).max()
    )


def test_a_launch_asks_for_its_memory() -> None:
    module = gradc.compile(table_gradient("f32", 155, 128), target="cuda-sim", reductions={"*": "privatized"})
    launch = rows_launch(module, {"N": 65536})
    assert launch.shared == 155 * 32 * 8 <= SHARED_BYTES and launch.threads == 512 and launch.blocks == 256
    for keys, columns in ((SHARED_BYTES // 256 + 1, 128), ("V", 128)):  # more rows than fit, or nobody knows how many
        other = gradc.compile(table_gradient("f32", keys, columns), target="cuda-sim", reductions={"*": "privatized"})
        assert (
            "extern __shared__" not in other.forward.source
            and rows_launch(other, {"N": 100, "V": 5} if keys == "V" else {"N": 100}).shared == 0
        )


def test_they_fit_beside_what_a_block_stages() -> None:
    """On every device: a V100's blocks have 96 KB; nothing is spilled."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    for arch in ("sm_80", "sm_90", "sm_100"):
        for dtype in ("f32", "f64", "bf16"):
            module = gradc.compile(
                table_gradient(dtype, SHARED_BYTES // 256, "D"),
                target="cuda",
                arch=arch,
                reductions={"*": "privatized"},
            )
            (rows,) = [
                k for name, k in module.forward.binary.kernels.items() if name.endswith("_rows") and k.shared > 8192
            ]
            assert rows.shared + SHARED_BYTES <= 96 * 1024
            assert not any(k.spill_stores or k.spill_loads for k in module.forward.binary.kernels.values())


@pytest.mark.parametrize(("arch", "rows"), [("sm_75", 188), ("sm_90", 240)])
def test_the_largest_table_fits_as_compiled(arch: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Static and dynamic shared memory as NVRTC counts it is what the choice reckoned with, and a block that has less
    is said when the kernel is compiled, with both numbers.
    """
    try:
        find_nvrtc(arch)
    except GradcError as error:
        pytest.skip(str(error))
    graph = table_gradient("f32", rows, 512)
    module = gradc.compile(graph, target="cuda", arch=arch, reductions={"*": "privatized"})
    launch = rows_launch(module, {"N": 4096})
    static, limit = module.forward.binary.kernels[launch.function].shared, ARCHITECTURES[arch].block_shared
    wide = compile_cuda(widened(module.forward.source), arch=arch).kernels[launch.function].shared
    assert static + launch.shared < wide + launch.shared == combine_bytes(module) <= limit
    assert launch.shared > limit // 4 and resident_blocks(arch, launch.threads, 64, static + launch.shared) > 0
    (kernel,) = [k for k in module.forward.native.kernels.values() if k.shared]
    short = replace(ARCHITECTURES[arch], block_shared=static + launch.shared - 1)
    monkeypatch.setattr(limits, "ARCHITECTURES", {arch: short})
    with pytest.raises(
        Unsupported, match=rf"{static} \+ {launch.shared} bytes of shared memory.*has {short.block_shared}"
    ):
        limits.refuse_large_blocks(module.forward.binary, [kernel])


def combine_bytes(module: gradc.Module) -> int:
    """What the choice of a reduction takes for a block's shared memory."""
    types = {b.name: b.type for b in module.forward.program.buffers}
    (kernel,) = [k for k in module.forward.program.kernels if k.accums]
    (combine,) = combines(kernel, types)
    return shared_bytes(combine, types)
