"""Loops with sweeps as kernels on tensor cores, in cuda-sim that checks races, bounds and uninitialised memory: against
float64, against the same rounding in NumPy, and against the interpreter where nothing is finite.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tile_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_programs import CASES, DTYPES, drawn, with_tiles

from gradc import knobs
from gradc.errors import Unsupported
from gradc.interp import run_program
from gradc.ir.kernel import Tile
from gradc.runtime.executable import Executable

FEATURES = {"causal": (64, 24), "plain": (20,), "grouped queries": (32,), "tokens before heads": (16,)}
DIMS = st.fixed_dictionaries(
    {"S": st.sampled_from([0, 1, 17, 63, 64, 65, 130]), "T": st.sampled_from([1, 40, 64, 100]), "B": st.integers(1, 2)}
    | {"H": st.integers(1, 2)}
)


@functools.cache
def executable(name: str, features: int, dtype: str = "bf16") -> Executable:
    return Executable(CASES[name].programs(features, dtype)["forward"], "cuda-sim")


def checked(made: Executable, arrays):
    with knobs.SIM_CHECK.set(True):
        return made.run(**arrays)


def wide(arrays):
    return {k: a.astype(np.float64) if a.dtype.kind not in "iu" else a for k, a in arrays.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "features"), [(n, f) for n in CASES for f in FEATURES.get(n, (8,))])
@settings(max_examples=4)
@given(dims=DIMS, seed=st.integers(0, 99))
def test_forward_is_as_exact_as_its_rounding(name, features, dtype, dims, seed):
    case, made = CASES[name], executable(name, features, dtype)
    arrays = drawn(case, features, dims, seed, dtype)
    got = checked(made, arrays)["y"].astype(np.float64)
    wanted = case.oracle(**wide(arrays))
    assert got.shape == wanted.shape
    if not got.size:
        return
    emulated = np.abs(case.oracle(rounded=dtype, **wide(arrays)) - wanted)
    eps = float(np.finfo(np.float16).eps) if dtype == "f16" else 2.0**-7
    assert np.abs(got - wanted).max() <= 1.5 * emulated.max() + 2.0**-18 + (eps * np.abs(wanted).max()) / 2
