"""Random numbers of torch's in compiled functions: those of eager mode for a seed, without a region cut for them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch_compiled import agree, compiled, fresh, rand  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc.torch.draws import is_draw, mask_of  # noqa: E402

CASES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x.exp(), 0.3).tanh(),
    "all dropped": lambda x: F.dropout(x.exp(), 1.0).tanh(),
    "in place": lambda x: F.dropout(x * 2, 0.3, True, True).tanh(),
    "other memory order": lambda x: F.dropout(x.exp().transpose(0, 2), 0.3).tanh(),
    "expanded": lambda x: F.dropout(x.exp()[:, :1].expand(3, 6, 4), 0.3).tanh(),
    "strided": lambda x: F.dropout(x.exp()[:, ::2], 0.3).tanh(),
    "twice": lambda x: F.dropout(F.dropout(x.exp(), 0.3).tanh(), 0.1),
    "unused": lambda x: (F.dropout(x.exp(), 0.3), F.dropout(x.cos(), 0.2).tanh())[1],
    "dropout1d": lambda x: F.dropout1d(x.exp(), 0.3).tanh(),
    "dropout2d": lambda x: F.dropout2d(x.exp()[None], 0.3).tanh(),
    "dropout3d": lambda x: F.dropout3d(x.exp()[None, None], 0.3).tanh(),
    "alpha_dropout": lambda x: F.alpha_dropout(x.exp(), 0.3, True).tanh(),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.exp()[None], 0.3, True).tanh(),
    "randn_like": lambda x: x.exp() + torch.randn_like(x.exp()) * x.tanh(),
    "rand_like": lambda x: x.exp() + torch.rand_like(x.exp().mT).mT * x.tanh(),
    "randint_like": lambda x: x.exp() + torch.randint_like(x.exp(), 2, 9) * x.tanh(),
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype) * x.exp().tanh(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.exp(), 0.7),
    "a distribution": lambda x: torch.distributions.Normal(x.sin(), x.exp()).rsample().tanh(),
}
WRITTEN: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: (x * 2).normal_(1, 2).sin(),
    "uniform_": lambda x: (x * 2).uniform_(1, 2).sin(),
    "bernoulli_": lambda x: (x * 2).bernoulli_(0.3).sin(),
    "normal_ with gaps": lambda x: [y := x * 2, y[:, ::2].normal_(), y.sin()][-1],
}
"""What is written into a computed value: eager mode's result has a gradient, of zeros."""
SIZES = (3, 6, 4)


SYMBOLIC = ("all dropped", "other memory order", "randn_like", "rand", "dropout2d")


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CASES), *((name, True) for name in SYMBOLIC)]
)
def test_eager_mode_s_numbers_in_one_region(name: str, dynamic: bool) -> None:
    function = CASES[name]
    x = rand(*SIZES)
    agree(function, x, whole=True, dynamic=dynamic)
    (graph,) = gradc.torch.report().graphs
    assert len(graph.regions) == 1
    assert {r.reason for r in graph.refused} <= {"torch draws the random numbers of eager mode"}
    states = []
    for call in (function, compiled(function, dynamic=dynamic)):
        torch.manual_seed(7)
        call(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "the next draw of the caller"


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_into_a_computed_value(name: str) -> None:
    agree(WRITTEN[name], rand(*SIZES))


def attention(**options: Any) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        return F.scaled_dot_product_attention(q.sin(), k, v, *mask, dropout_p=0.3, **options).tanh()

    return function


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(
            (n, False)
            for n in ("plain", "causal", "scaled", "bool mask", "float mask", "grouped", "few grouped", "3-D")
        ),
        *((n, True) for n in ("plain", "layers")),
    ],
)
def test_attention_with_dropout(name: str, dynamic: bool) -> None:
    heads, rows = (8, 20 if name == "grouped" else 5) if "grouped" in name else (4, 5)
    options: dict[str, Any] = {"scale": 0.35} if dynamic else {}  # the default is one of a known size
    lead = (6,) if name == "3-D" else (2, heads)
    q, k = rand(*lead, rows, 8), rand(*(2, 2) if "grouped" in name else lead, 7, 8)
    v = rand(*k.shape[:-1], 6)
    mask: tuple[Any, ...] = ()
    match name:
        case "causal":
            options["is_causal"] = True
        case "scaled":
            options["scale"] = 0.3
        case "bool mask":
            mask = (torch.rand(2, 1, 5, 7) > 0.4,)
        case "float mask":
            mask = (rand(5, 7),)
        case "grouped" | "few grouped":
            options["enable_gqa"] = True
    function = attention(**options)
    if name == "layers":
        once = function

        def function(q: Any, k: Any, v: Any) -> Any:
            y = F.dropout(once(q, k, v), 0.2)
            return once(y @ torch.ones(6, 8, dtype=y.dtype), k, v)

    agree(function, q, k, v, *mask, whole=True, dynamic=dynamic)
    (graph,) = gradc.torch.report().graphs
    assert len(graph.regions) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_rounds_no_more_than_eager_mode(dtype: Any) -> None:
    """Both errors against eager mode in f64 with the same mask: a draw depends on no dtype."""
    given = [torch.randn(2, 2, 9, 16) for _ in range(3)]
    results = {}
    for name, wide, call in (
        ("exact", torch.float64, attention()),
        ("eager", dtype, attention()),
        ("gradc", dtype, compiled(attention())),
    ):
        inputs = [x.to(dtype).to(wide).requires_grad_() for x in given]
        torch.manual_seed(3)
        y = call(*inputs)
        results[name] = [y, *torch.autograd.grad(y.double().sum(), inputs)]
    for exact, eager, ours in zip(*results.values(), strict=True):
        scale = exact.abs().max()
        unit = torch.finfo(dtype).eps * scale
        assert (ours - exact).abs().max() <= (eager - exact).abs().max() + 2 * unit


def alone(q: Any, k: Any, v: Any, mask: Any, x: Any) -> Any:
    """Attention in a region too small for gradc, beside what is torch's."""
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3), torch.linalg.det(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_torch_runs_is_eager_mode_s(dtype: Any, causal: bool) -> None:
    """It multiplies in f32, large values and masks of f32 too, whole rows masked among them."""
    q, k, v = (torch.randn(2, 4, 5, 16).to(dtype) * 60 for _ in range(3))
    mask = None if causal else torch.randn(5, 5).masked_fill(torch.eye(5) > 0, -torch.inf)
    x = torch.randn(3, 3)

    def function(q: Any, k: Any, v: Any, mask: Any, x: Any) -> Any:
        return alone(q, k, v, mask, x) if not causal else (attention(is_causal=True)(q, k, v), torch.linalg.det(x))

    found = []
    for call in (function, compiled(function, smallest_region=50)):
        torch.manual_seed(2)
        found.append(call(q, k, v, mask, x)[0])
    assert not gradc.torch.report().graphs[0].regions
    torch.testing.assert_close(found[1], found[0], rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


def test_what_gradc_s_attention_does_not_take_is_left_whole_to_torch() -> None:
    """Features of no known size, other batches of keys: one call of torch's, in eager mode's order."""
    function = attention()
    agree(function, rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 6), dynamic=True)
    agree(function, rand(2, 4, 5, 8), rand(1, 4, 7, 8), rand(1, 4, 7, 6))
    for graph in gradc.torch.report().graphs:
        assert "aten.scaled_dot_product_attention.default" in {r.op for r in graph.refused}


def test_draws_that_nothing_reads_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is gone when the next is made."""
    drawn: list[Any] = []
    alive: list[int] = []

    def rand_like(x: Any, **options: Any) -> Any:
        alive.append(sum(each() is not None for each in drawn))
        y = torch.rand_like(x)
        drawn.append(weakref.ref(y))
        return y

    monkeypatch.setitem(gradc.torch.dynamo.IN_EAGER, torch.ops.aten.rand_like.default, rand_like)

    def function(x: Any) -> Any:
        for _ in range(5):
            torch.rand_like(x)
            x = x.sin()
        return x

    compiled(function)(torch.ones(3))
    assert alive == [0] * 5


def test_draws_keep_their_order_among_those_that_read_values() -> None:
    def function(x: Any) -> Any:
        a = F.dropout(x.exp(), 0.3)
        b = torch.bernoulli(a.sigmoid()) * a.sin()  # what it draws for depends on values
        return F.dropout(b.cos(), 0.4) + torch.rand_like(b)

    agree(function, rand(*SIZES))
    (graph,) = gradc.torch.report().graphs
    assert len(graph.regions) == 2


def test_a_draw_that_reads_values_is_refused() -> None:
    def function(x: Any) -> Any:
        return torch.bernoulli(x.sigmoid()) * x

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"aten\.bernoulli\.default .*random numbers"):
        compiled(function, fallback="error")(rand(3))
    torch._dynamo.reset()
    gradc.torch.report().clear()
    agree(function, rand(3))
    assert not gradc.torch.report().graphs[0].regions, "too small, both of them"


def test_a_size_that_values_tell_is_left_to_torch() -> None:
    def function(x: Any) -> Any:
        y = x[x > 0].exp() * 2 + 1
        return F.dropout(y, 0.3).sum() + x.exp().sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agree(function, rand(*SIZES))


def test_a_mask_is_one_byte_an_element_and_drawn_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    plan = gradc.torch.dynamo.plan

    def kept(graph: Any, *options: Any) -> Any:
        plans.append((graph, plan(graph, *options)))
        return plans[-1][1]

    monkeypatch.setattr(gradc.torch.dynamo, "plan", kept)

    def function(x: Any) -> Any:
        y = torch.cholesky_solve(F.dropout(x.exp(), 0.3) @ x.mT, torch.eye(6, dtype=x.dtype).expand(3, 6, 6))  # torch's
        return F.dropout(y.sin(), 0.2).cos()

    agree(function, rand(3, 6, 6))
    graph, found = plans[0]
    first, second = (n for n in graph.nodes if is_draw(n))
    assert {n.meta["val"].dtype for n in (first, second)} == {torch.bool}
    assert found.levels[first] < min(found.regions) <= found.levels[second] < max(found.regions)


def test_under_no_grad_and_with_checkpoints() -> None:
    x = rand(*SIZES)
    with torch.no_grad():
        agree(CASES["dropout"], x.detach(), whole=True)

    def function(x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(CASES["twice"], x, use_reentrant=False).sin()

    torch._dynamo.reset()
    agree(function, x, whole=True)


# -- random="gradc" ----------------------------------------------------------------------------------------------------

MASKED: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x * 2, 0.3).sin(),
    "in place": lambda x: F.dropout(x * 2, 0.3, True, True).sin(),
    "dropout1d": lambda x: F.dropout1d(x * 2, 0.3).sin(),
    "other memory order": lambda x: F.dropout((x * 2).mT, 0.3).mT.sin(),
}


@pytest.mark.parametrize("target", ["cpu", "cuda-sim", "numpy"])
@pytest.mark.parametrize("name", MASKED)
def test_one_mask_forward_and_backward(name: str, target: str) -> None:
    """Where the value is 0 nothing passes, elsewhere the calculus of sin(2 x / (1 - p)): of any target, one mask."""
    call = compiled(MASKED[name], random="gradc", fallback="error", target=target)
    x = (torch.rand(50, 40, 7, dtype=torch.float64) + 0.5).requires_grad_()
    torch.manual_seed(3)
    y = call(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, torch.sin(x * 2 / 0.7), 0.0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, torch.where(kept, torch.cos(x * 2 / 0.7) * 2 / 0.7, 0.0), rtol=1e-12, atol=1e-14)
    drawn = kept[..., 0] if name == "dropout1d" else kept
    assert abs(drawn.double().mean() - 0.7) < 5 * (0.7 * 0.3 / drawn.numel()) ** 0.5  # five standard deviations
    torch.manual_seed(3)
    assert torch.equal(call(x) != 0, kept), "one seed, one mask"
    assert not torch.equal(call(x) != 0, kept), "the next call draws a key of its own"


def test_masks_of_every_target_are_the_same_bits() -> None:
    x = torch.rand(33, 65) + 0.5
    masks = []
    for target in ("cpu", "cuda-sim", "numpy"):
        torch._dynamo.reset()
        torch.manual_seed(4)
        masks.append(compiled(lambda x: F.dropout(F.dropout(x, 0.3).exp(), 0.4), random="gradc", target=target)(x) != 0)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_what_torch_runs_for_a_mask_is_the_same_bits() -> None:
    graph = gradc.trace(lambda key: mask_of(key, (30, 41), 0.3, 2), key="i64[]")
    ours = gradc.compile(graph, [])(key=np.int64(5))
    assert np.array_equal(torch.ops.gradc.random_mask(torch.tensor(5), [30, 41], 0.3, 2).numpy(), ours)


def test_two_dropouts_of_a_call_are_independent() -> None:
    def function(x: Any) -> Any:
        return F.dropout(x, 0.5).exp() - 1, F.dropout(x, 0.5).exp() - 1

    a, b = compiled(function, random="gradc", fallback="error")(torch.ones(100, 100))
    both = ((a != 0) & (b != 0)).double().mean()
    assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 10_000) ** 0.5


def test_a_key_a_call_under_checkpoints_and_copies() -> None:
    """What computes its forward again draws the key again; a copy draws as the original does."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Dropout(0.4), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    model = model.double()
    call = compiled(model, random="gradc")
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (
        call,
        lambda x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False),
        copy.deepcopy(call),
    ):
        torch.manual_seed(6)
        y = run(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_attention_with_a_mask_of_gradc_s() -> None:
    """Equal values and weights of one key at a time: the mean of what is kept, times 1 / (1 - p)."""
    q, k, v = torch.zeros(2, 3, 40, 8), torch.zeros(2, 3, 30, 8), torch.ones(2, 3, 30, 4)
    y = compiled(attention(), random="gradc", fallback="error")(q, k, v).atanh() * 30 * 0.7
    torch.testing.assert_close(y, y.round(), rtol=1e-4, atol=1e-4)  # numbers of keys, of 30
    assert torch.equal(y[..., :1].round().expand_as(y), y.round()), "one mask for all features"
    assert abs(y[..., 0].mean() / 30 - 0.7) < 5 * (0.7 * 0.3 / (2 * 3 * 40 * 30)) ** 0.5


def test_the_option_has_two_values() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="random='numpy': 'torch' or 'gradc'"):
        compiled(lambda x: x.exp(), random="numpy")(torch.ones(2))


@pytest.mark.parametrize("random", ["torch", "gradc"])
def test_draws_of_a_function_without_inputs(random: str) -> None:
    def function() -> Any:
        return F.dropout(torch.ones(5, 3).exp() + torch.rand(5, 3), 0.3).sin()

    torch.manual_seed(2)
    want = function()
    torch.manual_seed(2)
    got = compiled(function, random=random)()
    assert got.shape == want.shape
    assert random == "gradc" or torch.allclose(got, want)
