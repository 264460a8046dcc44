"""Gradients of tables of few rows on CUDA, whose blocks sort their own rows: bags as torch's, and other combines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.autodiff import differentiate
from gradc.errors import GradcError
from gradc.ir.program_text import parse_program
from gradc.runtime.executable import Executable

SORTS = "gradc_sort_places<"


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def bag_gradient(mode: str, dtype: str, keys: int, columns: int, weighted: bool, padding: int | None) -> gradc.Graph:
    types = {"i": "i64[B,L]", "w": f"{dtype}[{keys},{columns}]"} | ({"s": f"{dtype}[B,L]"} if weighted else {})

    def bags(i: Any, w: Any, s: Any = None) -> Any:
        return ops.embedding_bag(i, w, per_sample_weights=s, mode=mode, padding_idx=padding)

    return differentiate(gradc.trace(bags, **types), ["w"])


@long_tests.values
@pytest.mark.parametrize("columns", [6, 140])
@pytest.mark.parametrize(("mode", "weighted", "padding"), [("sum", True, None), ("mean", False, 2), ("sum", False, 0)])
def test_bags_are_torch_s(mode: str, weighted: bool, padding: int | None, columns: int) -> None:
    """In f64, which torch's own gradient is computed in, too: of no bag, one, and some of which most hit one row."""
    torch = pytest.importorskip("torch")
    module = gradc.compile(
        bag_gradient(mode, "f64", 9, columns, weighted, padding), target="cuda-sim", reductions={"*": "privatized"}
    )
    assert SORTS in module.forward.source
    rng = np.random.default_rng(3)
    for bags, length in ((0, 3), (1, 1), (37, 5), (200, 7)):
        i = np.where(rng.random((bags, length)) < 0.5, 4, rng.integers(0, 9, (bags, length)))
        s, dy, w = rng.standard_normal((bags, length)), rng.standard_normal((bags, columns)), np.zeros((9, columns))
        found = module.forward.run(i=i, w=w, **({"s": s} if weighted else {}), **{"d.y": dy})["d.w"]
        table = torch.tensor(w, requires_grad=True)
        weights = torch.tensor(s) if weighted else None
        y = torch.nn.functional.embedding_bag(
            torch.tensor(i), table, mode=mode, per_sample_weights=weights, padding_idx=padding
        )
        y.backward(torch.tensor(dy))
        np.testing.assert_allclose(np.asarray(found), table.grad.numpy(), rtol=1e-12, atol=1e-12)


def test_an_index_out_of_range_is_refused() -> None:
    module = gradc.compile(
        bag_gradient("sum", "f32", 9, 6, False, None), target="cuda-sim", reductions={"*": "privatized"}
    )
    given = {"w": np.zeros((9, 6), np.float32), "d.y": np.ones((4, 6), np.float32)}
    with pytest.raises(GradcError, match="9"):
        module.forward.run(i=np.full((4, 2), 9), **given)
    assert np.asarray(module.forward.run(i=np.full((4, 2), 8), **given)["d.w"])[8].tolist() == [8.0] * 6


PROGRAM = """program @p {
  input t: i32[N]
  input x: DTYPE[N,5]
  output g: DTYPE[11,5]
  kernel @c rows(n: N) cols() {
    phase
    %0 = load t[n] : i32
    check %0 {bound=11, op="take", source="t"}
  }
  kernel @k rows(n: N) cols(d: 5) strategy(g: privatized) {
    %0 = load t[n] : i32
    phase
    %1 = load x[n, d] : DTYPE
    accum g[%0, d] <- %1 {combine="HOW"} : DTYPE
  }
  return g=g
}
"""
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize(
    ("how", "dtype"), [("sum", "i64"), ("prod", "i32"), ("max", "f32"), ("min", "f64"), ("max", "i32"), ("prod", "f32")]
)
def test_whatever_is_combined(how: str, dtype: str) -> None:
    """Against NumPy's ufunc.at, of numbers that every dtype has exactly; a row of no index has the neutral one."""
    text = PROGRAM.replace("HOW", how).replace("DTYPE", dtype)
    executable = Executable(parse_program(text), "cuda-sim")
    assert SORTS in executable.source
    rng, own = np.random.default_rng(4), {"i": f"int{dtype[1:]}", "f": f"float{dtype[1:]}"}[dtype[0]]
    t = rng.integers(0, 10, 900).astype(np.int32)
    x = np.where(rng.random((900, 5)) < 0.03, 2, 1) if how == "prod" else rng.integers(-9, 10, (900, 5))
    ends = (np.iinfo(own).max, np.iinfo(own).min) if dtype[0] == "i" else (np.inf, -np.inf)
    neutral = {"sum": 0, "prod": 1, "max": ends[1], "min": ends[0]}[how]
    wanted = np.full((11, 5), neutral, own)
    UFUNCS[how].at(wanted, t, x.astype(own))
    assert np.array_equal(np.asarray(executable.run(t=t, x=x.astype(own))["g"]), wanted)
