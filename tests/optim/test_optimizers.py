"""The optimizers: many steps beside torch.optim's, or the definition in torch, in f64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings

torch = pytest.importorskip("torch", reason="the oracle is torch.optim")

import gradc  # noqa: E402
from gradc import ops, optim  # noqa: E402
from gradc.errors import InvalidProblem  # noqa: E402

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3, 2), "d": (2,)}
STEPS = 6
Trees = dict[str, Any]


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., 2023."""

    def __init__(self, parameters: Any, **hyper: float):
        super().__init__(parameters, hyper)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2, lr, decay = (group[k] for k in ("beta1", "beta2", "lr", "weight_decay"))
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = b1 * m + (1 - b1) * p.grad
                p.copy_(p - lr * (c.sign() + decay * p))
                m.copy_(b2 * m + (1 - b2) * p.grad)


class RowwiseAdagrad(torch.optim.Optimizer):
    """One number a row, the sum of the means of its gradient's squares."""

    def __init__(self, parameters: Any, **hyper: float):
        super().__init__(parameters, hyper)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad + group["weight_decay"] * p
                rows = g.reshape(len(g), -1)
                m = self.state[p].setdefault("m", torch.zeros(len(g), dtype=p.dtype))
                m += rows.square().mean(1)
                p -= group["lr"] * g / (m.sqrt() + group["eps"]).reshape(-1, *[1] * (p.ndim - 1))


def hyper_of(optimizer: optim.Optimizer) -> Trees:
    """What an oracle takes; rounding by chance is none of its."""
    return {name: value for name, value in dataclasses.asdict(optimizer).items() if name != "stochastic"}


def betas(hyper: Trees) -> Trees:
    return {**{k: v for k, v in hyper.items() if not k.startswith("beta")}, "betas": (hyper["beta1"], hyper["beta2"])}


def adagrad(p: Any, **hyper: Any) -> Any:
    return torch.optim.Adagrad(p, initial_accumulator_value=hyper.pop("initial"), **hyper)


def adafactor(p: Any, **hyper: Any) -> Any:
    eps = hyper.pop("eps1"), hyper.pop("eps2")
    return torch.optim.Adafactor(p, eps=eps, d=hyper.pop("clip"), **hyper)


ORACLES: dict[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD,
    "adam": lambda p, **hyper: torch.optim.Adam(p, **betas(hyper)),
    "adamw": lambda p, **hyper: torch.optim.AdamW(p, **betas(hyper)),
    "adagrad": adagrad,
    "adafactor": adafactor,
    "lion": lambda p, maximize, **hyper: Lion(p, **hyper),
    "rowwise_adagrad": lambda p, maximize, **hyper: RowwiseAdagrad(p, **hyper),
}


def linear(p: Trees, g: Trees) -> Any:
    """A loss whose gradients are given."""
    return sum((ops.sum(p[name] * g[name]) for name in p if name != "a"), ops.sum(p["a"] * g["a"]))


def drawn(seed: int, dtype: Any = np.float64) -> Trees:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def steps_of_torch(optimizer: optim.Optimizer, clip_norm: float | None = None) -> Trees:
    hyper = hyper_of(optimizer)
    parameters = {name: torch.from_numpy(x).requires_grad_() for name, x in drawn(0).items()}
    theirs = ORACLES[type(optimizer).__name__](list(parameters.values()), **hyper)
    for i in range(STEPS):
        for name, g in drawn(i + 1).items():
            own = type(optimizer).__name__ in ("lion", "rowwise_adagrad") and optimizer.maximize
            parameters[name].grad = torch.from_numpy(-g if own else g)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
        theirs.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def steps_of_gradc(optimizer: optim.Optimizer, target: str, **options: Any) -> Trees:
    step = gradc.step(linear, optimizer, target=target, **options)
    parameters = drawn(0)
    state = step.init(parameters)
    for i in range(STEPS):
        loss, parameters, state = step(parameters, state, g=drawn(i + 1))
    assert state["step"] == STEPS and np.isfinite(loss)
    return parameters


def same(found: Trees, wanted: Trees) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12, atol=1e-13)


FIXED = [
    optim.sgd(0.1),
    optim.sgd(0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    optim.sgd(0.1, momentum=0.9, nesterov=True, maximize=True),
    optim.adam(0.1, weight_decay=0.1, amsgrad=True),
    optim.adamw(0.1),
    optim.adagrad(0.1, lr_decay=0.1, initial=0.5),
    optim.rowwise_adagrad(0.1, weight_decay=0.1),
    optim.lion(0.01, weight_decay=0.1, maximize=True),
    optim.adafactor(),
]


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("optimizer", FIXED, ids=lambda o: type(o).__name__)
def test_steps_are_torchs(optimizer: optim.Optimizer, target: str) -> None:
    same(steps_of_gradc(optimizer, target), steps_of_torch(optimizer))


number = lambda low, high: st.floats(low, high, allow_subnormal=False)
rate, share, decay = number(1e-4, 0.5), number(0.0, 0.999), st.just(0.0) | number(0.0, 0.3)
momentum = number(1e-3, 0.99)
OPTIMIZERS = {
    "sgd": st.builds(optim.sgd, rate, st.just(0.0) | momentum, number(0.0, 0.9), decay, maximize=st.booleans()),
    "nesterov": st.builds(optim.sgd, rate, momentum, weight_decay=decay, nesterov=st.just(True)),
    "adam": st.builds(optim.adam, rate, share, share, number(1e-9, 1e-2), decay, st.booleans()),
    "adamw": st.builds(
        optim.adamw, rate, share, share, number(1e-9, 1e-2), decay, st.booleans(), maximize=st.booleans()
    ),
    "adagrad": st.builds(optim.adagrad, rate, decay, decay, decay, number(1e-9, 1e-2), maximize=st.booleans()),
    "rowwise_adagrad": st.builds(optim.rowwise_adagrad, rate, number(1e-9, 1e-2), decay, maximize=st.booleans()),
    "lion": st.builds(optim.lion, rate, number(0.1, 0.99), number(0.1, 0.99), decay),
    "adafactor": st.builds(
        optim.adafactor,
        rate,
        number(-1.0, -0.1),
        st.none() | number(1e-9, 1e-3),
        number(1e-4, 0.1),
        number(1.0, 3.0),
        decay,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_hyper_parameters(name: str, data: Any) -> None:
    optimizer = data.draw(OPTIMIZERS[name])
    same(steps_of_gradc(optimizer, "numpy"), steps_of_torch(optimizer))


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_gradients_are_clipped_as_torch_clips_them(most: float) -> None:
    optimizer = optim.sgd(0.1, momentum=0.9)
    same(steps_of_gradc(optimizer, "cpu", clip_norm=most), steps_of_torch(optimizer, most))


# -- 16 bits -----------------------------------------------------------------------------------------------------------

BF16 = ml_dtypes.bfloat16


def sixteen_bits(optimizer: optim.Optimizer, **options: Any) -> tuple[Trees, Trees]:
    step = gradc.step(linear, optimizer, target="cpu", **options)
    parameters = drawn(0, BF16)
    state = step.init(parameters)
    for i in range(STEPS):
        _, parameters, state = step(parameters, state, g=drawn(i + 1, BF16))
    return parameters, state


def test_16_bit_parameters_have_a_state_in_f32() -> None:
    """Beside AdamW in f64 whose parameters are rounded after each step."""
    optimizer = optim.adamw(0.1)
    parameters, state = sixteen_bits(optimizer)
    wide = {name: torch.from_numpy(x.astype(np.float64)).requires_grad_() for name, x in drawn(0, BF16).items()}
    theirs = ORACLES["adamw"](list(wide.values()), **hyper_of(optimizer))
    for i in range(STEPS):
        for name, g in drawn(i + 1, BF16).items():
            wide[name].grad = torch.from_numpy(g.astype(np.float64))
        theirs.step()
        with torch.no_grad():
            for p in wide.values():
                p.copy_(p.bfloat16())
    for name, p in wide.items():
        assert parameters[name].dtype == BF16 and state[f"mean.p.{name}"].dtype == np.float32
        np.testing.assert_allclose(parameters[name].astype(np.float64), p.detach().numpy(), rtol=2**-8)
        own = theirs.state[p]
        np.testing.assert_allclose(state[f"mean.p.{name}"], own["exp_avg"], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(state[f"square.p.{name}"], own["exp_avg_sq"], rtol=1e-6)


def test_master_weights_lose_nothing() -> None:
    """Of steps that bf16 alone would not see."""
    optimizer = optim.sgd(1e-4)
    parameters, state = sixteen_bits(optimizer, master_weights=True)
    for name, x in drawn(0, BF16).items():
        wanted = x.astype(np.float64) - 1e-4 * sum(drawn(i + 1, BF16)[name].astype(np.float64) for i in range(STEPS))
        np.testing.assert_allclose(state[f"master.p.{name}"], wanted, rtol=1e-6, atol=1e-7)
        assert np.array_equal(parameters[name], state[f"master.p.{name}"].astype(BF16))
    alone, _ = sixteen_bits(optimizer)
    assert any(not np.array_equal(alone[name], parameters[name]) for name in SHAPES)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: optim.sgd(float("nan")), "sgd: lr=nan: a finite number from 0"),
        (lambda: optim.adam(float("inf")), "adam: lr=inf"),
        (lambda: optim.adam(-1.0), "adam: lr=-1.0"),
        (lambda: optim.adam("0.1"), "adam: lr='0.1'"),
        (lambda: optim.adamw(beta1=1.0), "adamw: beta1=1.0: a finite number from 0 to below 1"),
        (lambda: optim.lion(weight_decay=float("nan")), "lion: weight_decay=nan"),
        (lambda: optim.adafactor(eps1=-1.0), "adafactor: eps1=-1.0"),
        (lambda: optim.adafactor(beta2_decay=0.5), "adafactor: beta2_decay=0.5"),
        (lambda: optim.sgd(nesterov=True), "sgd: nesterov wants momentum"),
    ],
)
def test_numbers_out_of_range(make: Any, what: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        make()
    assert str(caught.value).startswith(what)
