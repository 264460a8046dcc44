"""Losses of logits that are in no memory whole: one kernel on tensor cores, or products with kernels between them for a
block of rows at a time; in the simulator's checking mode, against torch in f64.
"""

from __future__ import annotations

import functools
import math

import long_tests
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from loss_forms import CONTRASTIVE, LARGE, LOSS_FORMS, OF_TWO_PRODUCTS, exact  # noqa: E402
from skips import compiled  # noqa: E402

import gradc  # noqa: E402
from gradc import knobs  # noqa: E402
from gradc.analysis.tiles import MOST_FEATURES  # noqa: E402
from gradc.codegen.cuda.tiles.kernel import tile_kernel  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.ir.dims import evaluate  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.passes.row_blocking import wide_products  # noqa: E402
from gradc.runtime.executable import Executable  # noqa: E402

ROUNDED = 2.0**-8
"""Of a logit, a slope and a result in bf16: rounding to nearest is half of it."""


def programs(name, features, dtype="bf16", wrt=()):
    graph = LOSS_FORMS[name].graph(dtype, features)
    return run_passes(graph, wrt, Options(hints=LARGE), "cuda")[2]


def wide(program):
    """The buffers that have as many elements as there are logits."""
    dims = {**LARGE, **dict.fromkeys(program.dims - LARGE.keys(), 1)}
    own = {d: dims[d] for d in program.dims}
    return [b.name for b in program.buffers if evaluate(b.type.count, own) >= LARGE["N"] * LARGE["V"]]


def floats(name):
    """What torch differentiates by, too."""
    return tuple(n for n, text in LOSS_FORMS[name].types.items() if text.startswith("D[") and n != "c")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", LOSS_FORMS)
def test_no_logits_are_in_memory_whole(name, dtype):
    for features in (64, 768):
        for program in (
            *programs(name, features, dtype).values(),
            *programs(name, features, dtype, floats(name)).values(),
        ):
            assert not wide(program), program.name


@pytest.mark.parametrize("name", LOSS_FORMS)
def test_a_loss_of_few_features_is_one_loop_on_tensor_cores(name):
    """Else the program says what it would take, or that a block does not keep so many features."""
    program = programs(name, 64)["forward"]
    if LOSS_FORMS[name].tiled:
        (loop,) = program.loops
        assert loop.tile and len(loop.sweeps) == 1 and not program.untiled
    else:
        (missed,) = program.untiled
        assert "as one kernel, and" in missed.why
    (missed,) = programs(name, 768)["forward"].untiled
    assert f"768 features: blocks keep 1 to {MOST_FEATURES}" in missed.why


@functools.cache
def tile_of(name, features, dtype):
    """The forward as one kernel, whatever is predicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradc.passes.column_blocking.tile_rows.calls_seconds", lambda *_: math.inf)
        program = programs(name, features, dtype)["forward"]
    assert [bool(loop.tile) for loop in program.loops] == [True]
    return program


@functools.cache
def forward_of(name, features, dtype):
    return Executable(tile_of(name, features, dtype), "cuda-sim")


SIZES = st.fixed_dictionaries(
    {"N": st.sampled_from([0, 1, 17, 65, 130]), "V": st.sampled_from([1, 2, 63, 64, 65, 131])}
)


@pytest.mark.parametrize(("name", "features", "dtype"), [(n, 24, "bf16") for n in LOSS_FORMS] + [("mean", 7, "f16")])
@settings(max_examples=6)
@given(dims=SIZES, seed=st.integers(0, 99), ignored=st.sampled_from([0.0, 0.25, 1.0]))
def test_the_kernel_has_the_values_of_torch(name, features, dtype, dims, seed, ignored):
    made = forward_of(name, features, dtype)
    arrays = LOSS_FORMS[name].drawn(LOSS_FORMS[name].graph(dtype, features), dims, seed, ignored)
    with knobs.SIM_CHECK.set(True):
        (got,) = made.run(**arrays).values()
    wanted = LOSS_FORMS[name].torchs(**exact(arrays)).detach().numpy()
    scale = (abs(arrays["x"].astype(np.float64)) @ abs(arrays["w"].astype(np.float64)).T).max(initial=1.0)
    several = arrays["t"].size if "sum" in name else 1
    error = 2 * ROUNDED * scale * several + ROUNDED * np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=0, atol=error)


@compiled()
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("features", [16, 64, 128])
@pytest.mark.parametrize("name", ["mean", "bias", "softcap", "z-loss"])
@pytest.mark.long("gradc/codegen/cuda/tiles/fragments.py", "templates/cuda/tiles.h", "templates/cuda/kernel/tile.cu.j2")
def test_its_kernel_does_not_spill(name, features, arch):
    program = tile_of(name, features, "bf16")
    (loop,) = program.loops
    r = Executable(program, "cuda", arch=arch).binary.kernels[tile_kernel(loop, program).name]
    assert r.registers <= 255 and not r.spill_stores and not r.spill_loads


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 128 rows, of small products, too."""
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    monkeypatch.setenv("GRADC_CACHE", "0")


@long_tests.values
@pytest.mark.parametrize(("name", "dtype"), [*((n, "bf16") for n in LOSS_FORMS), ("mean", "f16"), ("bias", "f16")])
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients_are_torchs(name, dtype):
    """Of losses that are differentiated the host goes over blocks of rows."""
    graph, wrt = LOSS_FORMS[name].graph(dtype, 8), floats(name)
    module = gradc.compile(graph, wrt, target="cuda-sim", hints=LARGE)
    assert any(executable.program.loops for executable in module.executables.values())
    for n, v, ignored in ((130, 131, 0.25), (1, 65, 0.0), (257, 64, 1.0), (0, 70, 0.0)):
        arrays = LOSS_FORMS[name].drawn(graph, {"N": n, "V": v}, n, ignored)
        y, residuals = module.forward(**arrays)
        dy = np.asarray(np.random.default_rng(2).standard_normal(np.shape(y)) + 2, np.asarray(y).dtype)
        given_ = exact(arrays)
        wanted = LOSS_FORMS[name].torchs(**given_)
        slopes = torch.autograd.grad(wanted, [given_[n] for n in wrt], torch.tensor(dy.astype(np.float64)))
        found = {"y": y, **module.backward(residuals, dy)}
        for output, value in (("y", wanted.detach()), *zip(wrt, slopes, strict=True)):
            value = value.numpy()
            got = np.asarray(found[output]).astype(np.float64)
            size = 0.0 if not value.size else np.abs(np.nan_to_num(value)).max()
            np.testing.assert_allclose(got, value, rtol=0, atol=6 * ROUNDED * max(size, 0.05), err_msg=output)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_contrastive_loss_keeps_no_scores(dtype):
    """32768 rows of 512 features: the columns of their scores are rows of a product of their own."""
    graph, dims = CONTRASTIVE.graph(dtype, 512), {"N": 32768}
    for wrt in ((), ("x", "w", "scale")):
        for program in run_passes(graph, wrt, Options(hints=dims), "cuda")[2].values():
            assert not [b.name for b in program.buffers if evaluate(b.type.count, dims) >= 32768**2]


@pytest.mark.parametrize(
    ("form", "dtype", "rows"),
    [("one", "bf16", 1), ("one", "bf16", 130), ("one", "f16", 257), ("two", "bf16", 130), ("two", "f16", 65)],
)
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients_of_a_contrastive_loss_are_torchs(form, dtype, rows):
    """With one product in it, or two: these share a loop, whose kernel carries sums along two maxima."""
    graph, wrt = (CONTRASTIVE if form == "one" else OF_TWO_PRODUCTS).graph(dtype, 8), ("x", "w", "scale")
    module = gradc.compile(graph, wrt, target="cuda-sim", hints={"N": 32768})
    arrays = CONTRASTIVE.drawn(graph, {"N": rows}, rows, 0.0)
    y, residuals = module.forward(**arrays)
    tensors = exact(arrays)
    wanted = CONTRASTIVE.torchs(**tensors)
    slopes = torch.autograd.grad(wanted, [tensors[n] for n in wrt])
    found = {"y": y, **module.backward(residuals, np.asarray(1, np.float32))}
    for output, value in (("y", wanted.detach()), *zip(wrt, slopes, strict=True)):
        error = np.abs(np.asarray(found[output]).astype(np.float64) - value.numpy())
        assert error.max() <= 6 * ROUNDED * max(float(value.abs().max()), 0.05), output


def test_a_target_beyond_the_classes_is_an_error():
    made, graph = forward_of("mean", 24, "bf16"), LOSS_FORMS["mean"].graph("bf16", 24)
    arrays = LOSS_FORMS["mean"].drawn(graph, {"N": 5, "V": 9}, 0, 0.0)
    arrays["t"][3] = 9
    with pytest.raises(gradc.errors.IndexOutOfRange):
        made.run(**arrays)
