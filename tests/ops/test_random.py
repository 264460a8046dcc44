"""Random numbers: the generator against its published answers, and what a user relies on."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import philox4x32

import gradc
from gradc import interp, ops
from gradc.errors import TypeRuleError
from gradc.ops.elementwise.random import philox_block

KNOWN = (  # counter, key, words: Random123's kat_vectors, philox 4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_answers(counter: str, key: str, words: str) -> None:
    c, k, expected = ([int(w, 16) for w in text.split()] for text in (counter, key, words))
    assert philox4x32(c, k) == expected
    assert [int(w) for w in philox_block([np.uint64(w) for w in c], [np.uint64(w) for w in k])] == expected


def model(x: object, key: object) -> dict[str, object]:
    return {
        "uniform": ops.rand(key, shape=(64, 33), stream=0),
        "fine": ops.rand(key, shape=(64, 33), stream=0, dtype="f64"),
        "bits": ops.random_bits(key, shape=(64, 33), stream=1),
        "dropped": ops.dropout(x, key, p=0.3, stream=2),
        "again": ops.dropout(x, key, p=0.3, stream=2),
        "other": ops.dropout(x, key, p=0.3, stream=3),
        "channels": ops.feature_dropout(x, key, stream=4),
    }


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_the_same_bits_on_every_target(target: str) -> None:
    graph = gradc.trace(model, x="f32[8,6,5]", key="i64[]")
    x = np.random.default_rng(0).standard_normal((8, 6, 5)).astype(np.float32)
    module = gradc.compile(graph, target=target, wrt=[])
    for key in (0, -1, 2**62 + 12345):
        given = {"x": x, "key": np.int64(key)}
        expected, got = interp.run(graph, **given), module(**given)
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(got[name]), value, err_msg=name)
        assert np.array_equal(expected["dropped"], expected["again"])
        assert not np.array_equal(expected["dropped"], expected["other"])
        kept = (expected["channels"] != 0).reshape(48, -1)
        assert (kept.all(1) | ~kept.any(1)).all() and kept.any() and not kept.all()


def test_the_backward_computes_the_mask_again() -> None:
    graph = gradc.trace(lambda x, key: ops.dropout(x, key, p=0.4, stream=0), x="f32[N,D]", key="i64[]")
    module = gradc.compile(graph, wrt=["x"])
    x = np.ones((50, 40), np.float32)
    y, residuals = module.forward(x=x, key=np.int64(9))
    (dx,) = module.backward(residuals, np.full_like(y, 3.0)).values()
    np.testing.assert_array_equal(dx, 3 * y)
    assert {r.why for r in module.residuals} == {"input"}  # no mask is kept
    assert abs((y == 0).mean() - 0.4) < 0.05


def test_moments() -> None:
    """Means and variances of a million draws, within five standard errors."""
    graph = gradc.trace(
        lambda key: {
            "u": ops.rand(key, shape=(1000, 1000), stream=0),
            "n": ops.randn(key, shape=(1000, 1000), stream=1),
            "wide": ops.randn(key, shape=(1000, 1000), stream=1, dtype="f64"),
            "k": ops.randint(key, low=-5, high=5, shape=(1000, 1000), stream=2),
        },
        key="i64[]",
    )
    draws = gradc.compile(graph, wrt=[])(key=np.int64(3))
    # mean, variance, and the fourth central moment, which gives the variance of the variance
    for name, mean, variance, fourth in (
        ("u", 0.5, 1 / 12, 1 / 80),
        ("n", 0, 1, 3),
        ("wide", 0, 1, 3),
        ("k", -0.5, 8.25, 120.8625),
    ):
        x = np.asarray(draws[name], np.float64)
        assert abs(x.mean() - mean) < 5 * (variance / x.size) ** 0.5, name
        assert abs(x.var() - variance) < 5 * ((fourth - variance**2) / x.size) ** 0.5, name
        pairs = np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]
        assert abs(pairs) < 5 / x.size**0.5, name
    assert np.asarray(draws["u"]).max() < 1 and np.asarray(draws["u"]).min() >= 0


def test_a_draw_says_which_stream_it_is() -> None:
    with pytest.raises(TypeRuleError, match="stream is missing"):
        gradc.trace(lambda x, key: ops.dropout(x, key, p=0.5), x="f32[3]", key="i64[]")
