"""What passes in benchmarks/results/conformance.json still passes (a part of it), and docs/conformance.md is what the
script makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import conformance, long_double  # noqa: E402
from benchmarks.opinfo import Case, absent, cases, infos  # noqa: E402
from gradc.runtime.torch_private import release  # noqa: E402

torch.set_num_threads(1)
RESULTS = json.loads(conformance.RESULTS.read_text(encoding="utf-8"))
OF_EACH, LARGEST = 2, 10**4


def some(label: str, dtype: str) -> list[Case]:
    """A few samples, spread over the list."""
    small = [case for case in cases(label, dtype) if sum(a.size for a in case.arrays.values()) <= LARGEST]
    return small[:: max(1, len(small) // OF_EACH)][: OF_EACH + 1]


@pytest.mark.parametrize(
    ("label", "dtype"), [(label, ("f32", "bf16")[k % 2]) for k, label in enumerate(RESULTS["ops"])]
)
def test_what_passed_still_passes(label: str, dtype: str) -> None:
    passed = {name for name, *_, ok in RESULTS["ops"][label][dtype]["cases"] if ok}
    for outcome in conformance.measure(some(label, dtype)):
        assert outcome.case.label in passed or not outcome.passed, (
            f"{outcome.case.label} passes now: run make conformance"
        )
        assert outcome.passed or outcome.case.label not in passed, (
            f"{outcome.case.label}:"
            f" {outcome.refused or f'{outcome.where} is off by {outcome.ours:.3g} units, torch by {outcome.theirs}'}"
        )


def is_newer(case: Case) -> bool:
    """Whether torch has the sample since 2.15, and none of the results: bicubic interpolation in 3-D, which gradc
    leaves to torch.
    """
    return case.sampler is not None and case.sampler[0] == "bicubic" and case.arrays["x0"].ndim == 5


def test_every_sample_is_there() -> None:
    assert RESULTS["absent"] == absent()
    assert list(RESULTS["ops"]) == list(infos())
    for label in infos():
        assert list(RESULTS["ops"][label]) == ["f64", "f32", "f16", "bf16"]
        found = list(cases(label, "f32"))
        newer = sum(map(is_newer, found))
        assert newer == (6 if label == "grid_sample" and release() >= (2, 15) else 0)
        assert len(RESULTS["ops"][label]["f32"]["cases"]) == len(found) - newer


def test_the_page_is_what_the_results_say() -> None:
    assert conformance.PAGE.read_text(encoding="utf-8") == conformance.page(RESULTS)
    assert conformance.RESULTS.read_text(encoding="utf-8") == conformance.as_json(RESULTS)


def test_no_result_depends_on_the_threads() -> None:
    """The quick form; the script's --determinism runs each case 100 times."""
    chosen = [case for k, case in enumerate(conformance.large_cases("f32")) if k in (0, 4, 8, 11, 13, 15, 20, 21)]
    results = conformance.differing(conformance.Batch(chosen), repeats=8, upstreams=2)
    assert len(results) == len(chosen) and set(results.values()) == {1}, {
        c.label: n for c, n in results.items() if n > 1
    }


def samplers() -> Iterator[Any]:
    for rank, mode in ((2, "bilinear"), (2, "nearest"), (2, "bicubic"), (3, "bilinear"), (3, "nearest")):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                yield rank, mode, padding, corners


@pytest.mark.parametrize(("rank", "mode", "padding", "corners"), list(samplers()))
def test_the_long_double_oracle_is_torch(rank: int, mode: str, padding: str, corners: bool) -> None:
    rng = np.random.default_rng(0)
    x, grid, dy = (
        rng.standard_normal((2, 3, *(5, 4, 6)[:rank])),
        rng.uniform(-4, 4, (2, *(3, 7, 2)[:rank], rank)),
        rng.standard_normal((2, 3, *(3, 7, 2)[:rank])),
    )
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, grid)]
    y = torch.nn.functional.grid_sample(*leaves, mode=mode, padding_mode=padding, align_corners=corners)
    y.backward(torch.tensor(dy))
    for got, want in zip(
        long_double.grid_sample(x, grid, dy, mode, padding, corners), (y, *(t.grad for t in leaves)), strict=True
    ):
        np.testing.assert_allclose(got.astype(np.float64), want.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_an_error_is_measured_in_units() -> None:
    one = np.array([1.0], np.float32)
    assert conformance.error(np.nextafter(one, np.float32(2)), np.array([1.0]), 0.0, 2.0**-24) == 2
    assert conformance.error(np.array([np.inf], np.float16), np.array([1e6]), 0.0, 2.0**-11) == 0  # what it rounds to
    assert conformance.error(np.array([np.nan], np.float16), np.array([1.0]), 0.0, 2.0**-11) == np.inf
    assert conformance.error(np.zeros(2), np.zeros(3), 0.0, 2.0**-53) == np.inf
