"""Names of the user in generated C: any name compiles, and none means what it should not."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.program_text import parse_program
from gradc.runtime.executable import Executable

NAMES = [
    ("x", "w"),
    ("rows", "cols"),
    ("A", "args"),
    ("ctx", "site"),
    ("chunk", "chunks"),
    ("key", "order"),
    ("v0", "i0"),
    ("acc0", "partial0"),
    ("block0", "target0"),
    ("first", "last"),
    ("int", "return"),
    ("GRADC_POLL", "gradc_min"),
    ("f32", "exp_f32"),
    ("N", "D"),
    ("task", "memory"),
    ("combined", "one"),
    ("NDEBUG", "owners"),
]


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_names_that_mean_something_in_c(names: tuple[str, str]) -> None:
    """Dims are called as buffers are, and both as what a kernel's own text names."""
    left, right = names
    types = {left: f"f32[{left},{right}]", right: f"f32[{right}]"}

    def function(**inputs):
        x, w = inputs.values()
        y = ops.exp(x) * w
        return ops.sum(y, axis=0), ops.max(y, axis=1), y

    graph = gradc.trace(lambda x, w: function(x=x, w=w), **dict(zip("xw", types.values(), strict=True)))
    text = str(graph).replace("%x", f"%{left}").replace("%w", f"%{right}")
    module = gradc.compile(gradc.parse(text), wrt=[left], target="cpu")
    x, w = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7), np.arange(7, dtype=np.float32)
    found, residuals = module.forward({left: x, right: w})
    want = np.exp(x.astype(np.float64)) * w
    for value, exact in zip(found.values(), (want.sum(0), want.max(1), want), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-6)
    ones = [np.ones_like(value) for value in found.values()]
    assert np.isfinite(module.backward(residuals, *ones)[left]).all()


def test_a_name_of_the_kernel_s_own_functions() -> None:
    """What a name is does not change the kernel's, so that a user may know it."""
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N,D]")
    (name,) = gradc.compile(graph, target="cpu").forward.kernels
    for suffix in ("", "_args", "_rows", "_layout", "_thread_bytes"):
        renamed = gradc.parse(str(graph).replace("%x", f"%{name}{suffix}"))
        module = gradc.compile(renamed, target="cpu")
        assert name in module.forward.kernels
        x = np.ones((2, 3), np.float32)
        np.testing.assert_allclose(module.forward.run({f"{name}{suffix}": x})["y"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("axis", ["int", "rows", "x", "N", "chunk", "task"])
def test_axes_of_a_program_s_text(axis: str, target: str) -> None:
    """Whoever writes a program as text may call an axis what he likes."""
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N,D]")
    text = str(gradc.compile(graph, target="numpy").forward.program)
    assert "i0" in text
    program = parse_program(re.sub(r"\bi0\b", axis, text))
    x = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    (found,) = Executable(program, target).run({"x": x}).values()
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=1e-6)
