"""Values and gradients on a machine are what the NumPy meaning says."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import NAMES, UNIT, agree_with_numpy
from machines import Machine
from models import MODELS, Model
from registry import cases

import gradc
from gradc import ops
from gradc.ir.node import REGISTRY
from gradc.ir.types import DTYPES
from gradc.passes.row_blocking import wide_products

FEW = ("mul", "embedding", "softmax", "scatter_add")
"""The simulator has every op in tests/codegen/test_cuda.py; here these show that the tests themselves are right."""
AT_ONCE = 3
"""Samples of one compilation: NVRTC's time grows with them, and other processes can have the others."""
PARTS = [(name, part) for name in NAMES for part in range(-(-len(REGISTRY[name].samples) // AT_ONCE))]
PARTS.sort(key=lambda one: -len(REGISTRY[one[0]].samples[one[1] * AT_ONCE : (one[1] + 1) * AT_ONCE]))


@pytest.mark.places("cuda")
@pytest.mark.kinds("torch")
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_an_op_is_numpy(name: str, part: int, machine: Machine) -> None:
    """Every sample of an op's record and its gradients, in every float, at ordinary sizes and empty."""
    chosen = [case for case in cases(names=[name]) if case.number // AT_ONCE == part]
    agree_with_numpy(chosen, (0, 7, 64), place=machine, target=machine.target)


@pytest.mark.places("cuda-sim", "memory")
@pytest.mark.kinds("torch")
@pytest.mark.parametrize("name", FEW)
def test_a_few_ops_where_there_is_no_gpu(name: str, machine: Machine) -> None:
    chosen = [case for case in cases(("f32", "bf16"), names=[name]) if case.number < AT_ONCE]
    agree_with_numpy(chosen, (7,), place=machine, target=machine.target)


@pytest.mark.kinds("torch")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_loss_in_blocks_of_rows(dtype: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes over blocks, which add to one gradient; in f16 the backward makes the logits again."""
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)
    monkeypatch.setenv("GRADC_CACHE", "0")
    types = {"x": f"{dtype}[N,32]", "w": f"{dtype}[V,32]", "t": "i64[N]"}
    model = Model(lambda x, w, t: ops.linear_cross_entropy(x, w, t), types, ("x", "w"), {}, {})
    sizes = {"N": 1000, "V": 777} if machine.on_gpu else {"N": 300, "V": 99}
    arrays = model.arrays(sizes)
    module = machine.compile(model.graph, model.wrt)
    assert module.forward.program.loops
    _, residuals = module.forward({n: machine.put(a) for n, a in arrays.items()})
    dy = np.ones((), DTYPES[dtype].np)
    gradients = module.backward(residuals, machine.put(dy))
    module.synchronize()
    unit = UNIT[dtype]
    for key, exact in model.exact(arrays, dy).items():
        got = np.asarray(machine.get(gradients[key], arrays[key].dtype)).astype(np.float64)
        assert np.abs(got - exact).max() <= 32 * unit * np.abs(exact).max(), key


@pytest.mark.parametrize("name", MODELS)
def test_gradients_at_size(name: str, machine: Machine) -> None:
    """Large enough to fill a GPU; against the meaning in float64."""
    model = MODELS[name]
    sizes = model.large if machine.on_gpu else model.small
    arrays, dy = model.arrays(sizes), model.cotangent(sizes)
    module = machine.compile(model.graph, model.wrt, **model.options)
    y, residuals = module.forward({n: machine.put(a) for n, a in arrays.items()})
    gradients = module.backward(residuals, machine.put(dy))
    module.synchronize()
    assert machine.is_own(y) and all(machine.is_own(g) for g in gradients.values())
    reference = gradc.compile(model.graph, model.wrt, target="numpy")
    kept = reference.forward(arrays)[1]
    # The errors of n roundings one after another, as in a product by cuBLAS, come to about sqrt(n) of them (Higham and
    # Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019).
    units = max([8.0, *(sizes[d] ** 0.5 for d in model.multiplied if machine.on_gpu)])
    numpy_ = reference.backward(kept, dy)
    for key, exact in model.exact(arrays, dy).items():
        got, own = (
            np.asarray(a).astype(np.float64) for a in (machine.get(gradients[key], numpy_[key].dtype), numpy_[key])
        )
        unit = UNIT[str(gradc.typeof(numpy_[key]).dtype)]
        scale = np.abs(exact).max()
        assert np.abs(got - exact).max() <= max(units * unit * scale, 2 * np.abs(own - exact).max()), key
