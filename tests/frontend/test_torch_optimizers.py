"""Optimizers compiled: steps against eager's in f64, ``_foreach_*`` op by op, what is written in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch import optim  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc.runtime.torch_private import overload_schema  # noqa: E402
from gradc.torch import dynamo, foreach  # noqa: E402
from gradc.torch import function as functions  # noqa: E402

OPTIMIZERS = {
    "adamw": lambda p, **more: optim.AdamW(p, lr=1e-2, **more),
    "adam amsgrad": lambda p, **more: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, **more),
    "sgd": lambda p, **more: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **more),
    "rmsprop": lambda p, **more: optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5, **more),
    "adagrad": lambda p, **more: optim.Adagrad(p, lr=1e-2, lr_decay=0.1, **more),
    "adamax": lambda p, **more: optim.Adamax(p, lr=1e-2, **more),
}


class Counter(TorchDispatchMode):
    """Counts the calls that copy a tensor of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default) and args[0].numel() > 1:
            self.copies.append(str(function))
        return function(*args, **(kwargs or {}))


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_eagers(name: str, foreach: bool) -> None:
    """The last of them copies nothing: what is written is written where it lies."""
    models = model(), model()
    ours, theirs = (OPTIMIZERS[name](m.parameters(), foreach=foreach) for m in models)
    step = compiled(ours.step)
    for i in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).double()
        for each, optimizer, update in zip(models, (ours, theirs), (step, theirs.step), strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            places = [p.data_ptr() for p in each.parameters()]
            with Counter() as counter:
                update()
            assert places == [p.data_ptr() for p in each.parameters()]
            if optimizer is ours and i == 3:
                assert not counter.copies
    found, wanted = ([*m.parameters(), *_state(o)] for m, o in zip(models, (ours, theirs), strict=True))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    assert gradc.torch.report().share == 1


@pytest.mark.parametrize("name", ["adamw", "adam amsgrad", "sgd", "adagrad"])
def test_a_fused_optimizer_is_torchs_until_its_groups_say_otherwise(name: str) -> None:
    """Dynamo keeps what ``fused=True`` calls out of graphs, and the report says that nothing came; the same optimizer,
    with the state that it has by then, is gradc's once its groups are not fused.
    """
    gradc.torch.report().clear()
    models = model(), model()
    ours, theirs = (OPTIMIZERS[name](m.parameters(), fused=True) for m in models)
    step = compiled(ours.step)
    for i in range(5):
        if i == 2:
            found, wanted = ([*m.parameters(), *_state(o)] for m, o in zip(models, (ours, theirs), strict=True))
            assert all(map(torch.equal, found, wanted)) and not gradc.torch.report().graphs
            assert (
                str(gradc.torch.report()) == "0 graphs: torch has handed gradc none since the start or the last clear()"
            )
            for group in ours.param_groups:
                group["fused"] = False
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).double()
        places = [p.data_ptr() for p in models[0].parameters()]
        for each, optimizer, update in zip(models, (ours, theirs), (step, theirs.step), strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            update()
    assert places == [p.data_ptr() for p in models[0].parameters()]
    found, wanted = ([*m.parameters(), *_state(o)] for m, o in zip(models, (ours, theirs), strict=True))
    # an update is about 1e-2; compiled, 1 - beta**step is in f32, as torch keeps the step
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert gradc.torch.report().ops and gradc.torch.report().share == 1


def _state(optimizer: Any) -> list[Any]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]


def test_clipping_is_eagers() -> None:
    models = model(), model()

    def clip(parameters: Any) -> Any:
        return torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True)

    norms = []
    for each, call in zip(models, (compiled(clip), clip), strict=True):
        each(torch.ones(4, 6).double()).square().sum().backward()
        norms.append(call(list(each.parameters())))
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in models))


@pytest.mark.parametrize("overload", foreach.decompositions(), ids=str)
def test_a_foreach_op_is_torchs(overload: Any) -> None:
    """On lists of two tensors in f64, ours as what it is made of."""
    schema = overload_schema(overload)
    generator = torch.Generator().manual_seed(0)
    given: list[Any] = []
    for argument in (a for a in schema.arguments if not a.kwarg_only):
        kind = str(argument.type)
        tensors = [torch.rand(n, n, generator=generator).double() * 0.8 + 0.1 for n in (2, 3)]
        given.append(
            tensors
            if kind == "List[Tensor]"
            else tensors[0][0, 0]
            if kind == "Tensor"
            else [0.5, 2.0]
            if kind.startswith("List")
            else None
            if kind.startswith("Optional")
            else False
            if kind == "bool"
            else 2.0
        )
    wanted = overload(*copy.deepcopy(given))
    found = foreach.decompositions()[overload](*copy.deepcopy(given))
    torch.testing.assert_close(found, list(wanted))


def test_a_product_and_a_sum_of_dynamos() -> None:
    """What it makes of ``addcmul_`` whose value is a tensor."""
    from torch._inductor import inductor_prims  # defines prims.fma

    x, y, z = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = compiled(lambda x, y, z: inductor_prims.fma(x, y, z), fallback="error", smallest_region=1)
    torch.testing.assert_close(call(x, y, z), x * y + z)
    torch.testing.assert_close(
        torch.autograd.grad(call(x, y, z).square().sum(), (x, y, z)),
        torch.autograd.grad((x * y + z).square().sum(), (x, y, z)),
    )


# -- what is written in place ------------------------------------------------------------------------------------------


def swapped(a: Any, b: Any) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def read_later(a: Any, b: Any) -> Any:
    before = a.cumsum(0).sort().values + torch.rand(()) * 0  # torch's op between: two regions read a
    a.mul_(2).add_(b)
    return before + a.sum()


def crosswise(a: Any, b: Any) -> None:
    x, y = a * 2 + b, b * 3 + a
    a.copy_(x)
    b.copy_(y)


def of_others(a: Any, b: Any) -> Any:
    a.copy_(b.flip(0) * 2 + a.flip(0))
    return a + 1


def by_positions(a: Any, b: Any) -> Any:
    a.copy_(b[(b * 0).long()] + a)
    return a * 2


@pytest.mark.parametrize("function", [swapped, read_later, crosswise, of_others, by_positions])
@pytest.mark.parametrize("recording", [False, True])
def test_what_is_written_reads_what_was_there_before(function: Any, recording: bool) -> None:
    call = compiled(function, smallest_region=1)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(5, generator=generator).double() for _ in range(2))
        others = a.clone(), b.clone()
        with torch.set_grad_enabled(recording):
            found, wanted = call(a, b), function(*others)
        torch.testing.assert_close((found, a, b), (wanted, *others))


def test_what_backward_reads_is_not_written() -> None:
    """The same function, recorded and not; eager mode refuses the gradient, as a has been written."""

    def function(a: Any, w: Any) -> Any:
        y = (a * w).exp()
        a.add_(1)
        return y

    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    call = compiled(function)
    for _ in range(2):
        a = torch.ones(5).double()
        found = call(a, w)
        assert a.eq(2).all()
        torch.testing.assert_close(torch.autograd.grad(found.sum(), w)[0], w.detach().exp())
        b = a.clone()
        with torch.no_grad():
            torch.testing.assert_close((call(a, w), a), (function(b, w), b))


def test_which_memory_a_region_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output goes to the memory of the input that it is the new value of, or to its own."""
    made: list[functions.Function] = []
    monkeypatch.setattr(dynamo, "Function", lambda *args: made.append(functions.Function(*args)) or made[-1])
    a, b = torch.randn(5), torch.randn(5)
    with torch.no_grad():
        compiled(crosswise, smallest_region=1)(a, b)
        compiled(of_others, smallest_region=1)(a, b)
        compiled(by_positions, smallest_region=1)(a, b)
    assert [len(f.in_place) for f in made] == [2, 1, 0]
    donated = [set(f.wrt(()).module.forward.donated.values()) for f in made]
    assert donated == [{"a", "b"}, {"a"}, set()]
