"""gradc.torch.Module(update=...): a loop of torch's, in which backward updates tables and other parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import gradc.torch  # noqa: E402
from gradc import ops, optim  # noqa: E402
from gradc.errors import IndexOutOfRange, InvalidProblem, NotDifferentiable, Unsupported  # noqa: E402

SUM = {"mode": "sum", "dtype": torch.float64}


def bag(weight: Any, indices: Any, offsets: Any) -> Any:
    return ops.embedding_bag(indices, weight, offsets, mode="sum")


def bags(tables: Any, indices: Any, offsets: Any) -> Any:
    return {f"y{k}": bag(table, indices[k], offsets[k]) for k, table in enumerate(tables)}


def squared(w: Any, x: Any) -> Any:
    """Whose gradient reads w."""
    return {"y": ops.sum(w * w * x), "z": ops.sum(x)}


def looked_up(seed: int, rows: int = 50) -> Any:
    torch.manual_seed(seed)
    return torch.randint(rows, (20,)), torch.tensor([0, 3, 3, 9])


def updating(weight: Any, optimizer: Any = None, target: str = "cpu", sparse: Any = "weight") -> Any:
    optimizer = optimizer or optim.adagrad(lr=0.1)
    options = {"target": target, **({"sparse": sparse} if sparse else {})}
    return gradc.torch.Module(bag, weight=weight, update={"weight": optimizer}, options=options)


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@pytest.mark.parametrize("sparse", ["weight", ()])
def test_a_bag_beside_a_layer_of_torchs(target: str, sparse: Any) -> None:
    """The weight is the layer's own, before and after; the rate is another one from the third step on."""
    torch.manual_seed(0)
    theirs, layer = torch.nn.EmbeddingBag(50, 8, **SUM), torch.nn.Linear(8, 2, dtype=torch.float64)
    own, own_layer = copy.deepcopy((theirs, layer))
    module = updating(own.weight, target=target, sparse=sparse)
    assert list(module.state_dict()) == ["weight", "state.step", "state.sum.weight"] and module.rates == {"lr": 0.1}
    steps = [
        (layer, torch.optim.SGD(layer.parameters(), 0.1)),
        (own_layer, torch.optim.SGD(own_layer.parameters(), 0.1)),
    ]
    adagrad = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for seed in range(4):
        if seed == 2:
            module.rates["lr"] = torch.tensor(0.25)
            adagrad.param_groups[0]["lr"] = 0.25
        found = []
        for (head, sgd), table in zip(steps, (theirs, module), strict=True):
            sgd.zero_grad()
            adagrad.zero_grad()
            loss = head(table(*looked_up(seed))).square().mean()
            loss.backward()
            sgd.step()
            adagrad.step()
            found.append(loss)
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(module.weight, theirs.weight, rtol=1e-12, atol=1e-14)
    assert module.weight is own.weight and own.weight.grad is None and int(module.get_buffer("state.step")) == 4


def test_several_parameters_with_optimizers_of_their_own() -> None:
    """Nested, by rows and whole; a parameter and an argument that are not updated have gradients."""
    torch.manual_seed(0)

    def fn(tables: Any, w: Any, scale: Any, x: Any, indices: Any) -> Any:
        a, b = (ops.embedding(indices, table) for table in tables)
        return {"y": (a * b * scale) @ w, "x": x * scale}

    tables = [torch.randn(9, 4, dtype=torch.float64) for _ in range(2)]
    w, scale = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    update = {"tables": optim.rowwise_adagrad(lr=0.1), "w": optim.adam(lr=0.01)}
    module = gradc.torch.Module(
        fn, tables=tables, w=w, scale=scale, update=update, options={"target": "cpu", "sparse": "tables"}
    )
    assert module.rates == {"lr.rowwise_adagrad": 0.1, "lr.adam": 0.01}
    p = {name: x.detach().clone().requires_grad_() for name, x in module.named_parameters()}
    adam, sums = torch.optim.Adam([p["w"]], lr=0.01), [torch.zeros(9, dtype=torch.float64) for _ in range(2)]
    for seed in range(3):
        i = looked_up(seed, 9)[0]
        x, other = (torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(2))
        other.data.copy_(x.data)
        module.zero_grad()
        out = module(x, i)
        (out["y"].square().sum() + out["x"].sin().sum()).backward()
        for each in p.values():
            each.grad = None
        y = (p["tables.0"][i] * p["tables.1"][i] * p["scale"]) @ p["w"]
        (y.square().sum() + (other * p["scale"]).sin().sum()).backward()
        adam.step()
        torch.testing.assert_close(x.grad, other.grad)
        torch.testing.assert_close(module.scale.grad, p["scale"].grad)
        for k, total in enumerate(sums):
            table = p[f"tables.{k}"]
            total += table.grad.square().mean(1)
            with torch.no_grad():
                table -= 0.1 * table.grad / (total.sqrt() + 1e-8)[:, None]
        for name, each in module.named_parameters():
            torch.testing.assert_close(each, p[name], rtol=1e-11, atol=1e-13)
            assert (each.grad is None) == (name != "scale")


def test_what_no_cotangent_comes_to_stays() -> None:
    """As a parameter without a gradient in torch.optim: no decay, no momentum; nor without recording, nor frozen."""
    torch.manual_seed(0)
    tables = [torch.randn(50, 3, dtype=torch.float64) for _ in range(2)]
    adam = {"tables": optim.adam(lr=0.1, weight_decay=0.1)}
    module = gradc.torch.Module(bags, tables=tables, update=adam, options={"target": "cpu"})
    i, offsets = looked_up(0)
    call = lambda: module([i, i], [offsets, offsets])
    (call()["y0"].sum() + call()["y1"].sum()).backward()
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        call()
    call()["y1"].sum().backward()
    changed = {name for name, x in module.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"tables.1", "state.step", "state.mean.tables.1", "state.square.tables.1"}
    before = copy.deepcopy(module.state_dict())
    module.get_parameter("tables.1").requires_grad_(False)
    out = call()
    assert out["y0"].requires_grad and not out["y1"].requires_grad
    out["y0"].sum().backward()
    changed = {name for name, x in module.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"tables.0", "state.step", "state.mean.tables.0", "state.square.tables.0"}


def test_two_calls_before_one_backward() -> None:
    """One after the other, where the gradient does not read the table; else autograd sees that it has changed."""
    table = torch.ones(50, 2, dtype=torch.float64)
    module = updating(table, optim.sgd(lr=0.5))
    i, offsets = looked_up(0)
    (module(i, offsets).sum() + 2 * module(i, offsets).sum()).backward()
    counts = torch.bincount(i, minlength=50).double()
    torch.testing.assert_close(module.weight.detach(), 1 - 1.5 * counts[:, None].expand(50, 2))
    module = gradc.torch.Module(squared, w=torch.ones(3), update={"w": optim.sgd()}, options={"target": "cpu"})
    both = module(torch.ones(3))["y"] + module(torch.ones(3))["y"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


def test_copies_and_files_go_on_where_they_were() -> None:
    torch.manual_seed(0)
    module = updating(torch.randn(50, 4), optim.adam(lr=0.1))
    train = lambda m, seed: m(*looked_up(seed)).square().sum().backward()
    train(module, 0)
    other = updating(torch.zeros(50, 4), optim.adam(lr=0.1))
    other.load_state_dict(module.state_dict())
    twins = [other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for each in (module, *twins):
        train(each, 1)
    for twin in twins:
        for name, x in module.state_dict().items():
            assert torch.equal(twin.state_dict()[name], x)


def test_memory_that_a_program_cannot_write_as_it_lies() -> None:
    torch.manual_seed(0)
    start = torch.randn(50, 4)
    strided = torch.nn.Parameter(start.clone().t().contiguous().t())
    modules = [updating(start.clone()), updating(strided)]
    for module in modules:
        module(*looked_up(0)).square().sum().backward()
    assert not strided.is_contiguous() and modules[1].weight is strided
    assert torch.equal(strided, modules[0].weight) and not torch.equal(strided, start)


def test_a_graph_and_a_table_of_16_bits() -> None:
    torch.manual_seed(0)
    graph = gradc.trace(lambda w, i: {"w.y": ops.embedding(i, w)}, w="bf16[V,4]", i="i64[N]")
    options = {"target": "cpu", "sparse": "w"}
    w = torch.randn(9, 4).bfloat16()
    module = gradc.torch.Module(graph, w=w.clone(), update={"w": optim.adagrad(lr=0.5)}, options=options)
    assert module.get_buffer("state.sum.w").dtype is torch.float32
    i, g = torch.tensor([3, 3, 0]), torch.randn(3, 4).bfloat16()
    module(i).backward(g)
    total = torch.zeros(9, 4).index_add(0, i, g.float())
    wanted = (w.float() - 0.5 * total / (total.square().sqrt() + 1e-10)).bfloat16()
    assert torch.equal(module.w, wanted)


def test_a_call_that_fails_changes_nothing() -> None:
    module = updating(torch.randn(50, 4))
    i, offsets = looked_up(0)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(IndexOutOfRange):
        module(i + 45, offsets).sum().backward()
    for rate in (float("nan"), -1.0, torch.tensor([0.1]), "0.1"):
        module.rates["lr"] = rate
        with pytest.raises(InvalidProblem, match=r"lr=.*a finite number from 0"):
            module(i, offsets).sum().backward()
    module.rates["lr"] = 0.1
    with pytest.raises(NotDifferentiable, match="a step has no derivative"):
        torch.autograd.grad(module(i, offsets).sum(), module.weight, create_graph=True)
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(module, {"weight": w}, (i, offsets)).sum())(module.weight)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    module.half()
    with pytest.raises(InvalidProblem, match=r"state\.sum\.weight"):
        module(i, offsets).sum().backward()


@pytest.mark.parametrize(
    ("rates", "what"),
    [
        ({}, "rates are none: a dict of lr"),
        ({"lr": 0.1, "lr.sgd": 0.2}, r"rates are lr, lr\.sgd: a dict of lr"),
        (0.2, r"rates are 0\.2: a dict of lr"),
    ],
)
def test_rates_have_their_names(rates: Any, what: str) -> None:
    """A schedule that writes under another name would change nothing."""
    module = updating(torch.ones(50, 4), optim.sgd(lr=0.1))
    module.rates = rates
    with pytest.raises(InvalidProblem, match=what):
        module(*looked_up(0)).sum().backward()
    assert (module.weight == 1).all() and int(module.get_buffer("state.step")) == 0


def test_a_parameter_with_the_name_of_an_attribute() -> None:
    """Without ``update`` there is no attribute ``rates``."""
    scaled = lambda rates, x: rates * x
    module = gradc.torch.Module(scaled, rates=torch.ones(3), options={"target": "cpu"})
    assert list(module.state_dict()) == ["rates"] and torch.equal(module(torch.ones(3)), module.rates)
    module = gradc.torch.Module(
        scaled, rates=torch.ones(3), update={"rates": optim.sgd(0.5)}, options={"target": "cpu"}
    )
    module(torch.ones(3)).sum().backward()
    assert module.rates == {"lr": 0.5} and list(module.state_dict()) == ["rates_", "state.step"]
    assert (module.rates_ == 0.5).all()


def test_what_is_computed_has_no_memory_to_update() -> None:
    """A parametrization's weight, or a product given by functional_call: what it is computed from would not learn."""
    module = updating(torch.ones(50, 4))
    weight = torch.nn.Parameter(torch.ones(50, 4))
    with pytest.raises(InvalidProblem, match="weight is computed from other tensors"):
        torch.func.functional_call(module, {"weight": weight * 1}, looked_up(0))
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    with pytest.raises(InvalidProblem, match="weight is computed from other tensors"):
        module(*looked_up(0))
    assert int(module.get_buffer("state.step")) == 0


def test_memory_that_two_parameters_or_elements_have() -> None:
    """Also of parameters that were put into the module later; columns of one array are apart."""
    base = torch.zeros(52, 8)
    tables, optimizer = [base[:50], base[2:]], optim.adagrad(lr=0.1)
    make = lambda tables: gradc.torch.Module(
        bags, tables=tables, update={"tables": optimizer}, options={"target": "cpu", "sparse": "tables"}
    )
    with pytest.raises(InvalidProblem, match=r"tables\.0 and tables\.1 share memory"):
        make(tables)
    with pytest.raises(InvalidProblem, match="elements of weight share memory"):
        updating(torch.zeros(1, 4).expand(50, 4))
    later, (i, offsets) = make([torch.zeros(50, 8) for _ in tables]), looked_up(0)
    sum(y.sum() for y in later([i, i], [offsets, offsets]).values()).backward()
    inner = later.get_submodule("tables")
    for name, table in zip("01", tables, strict=True):
        setattr(inner, name, torch.nn.Parameter(table))
    with pytest.raises(InvalidProblem, match=r"tables\.0 and tables\.1 share memory"):
        later([i, i], [offsets, offsets])
    assert not base.any()
    apart = make([base[:, :4], base[:, 4:]])
    out = apart([i, i], [offsets, offsets])
    (out["y0"].sum() + 2 * out["y1"].sum()).backward()
    named = torch.bincount(i, minlength=52) > 0
    assert (base[named] < 0).all() and not base[~named].any()


_TABLE = torch.nn.Parameter(torch.zeros(5, 2))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"update": {"indices": optim.sgd()}}, "update names 'indices', which is no parameter: tables.0, tables.1"),
        ({"update": {"tables": "sgd"}}, "it maps names of parameters to optimizers"),
        ({"update": [optim.sgd()]}, "it maps names of parameters to optimizers"),
        ({"update": {"tables": optim.sgd(), "tables.0": optim.sgd()}}, r"update names 'tables\.0' twice"),
        ({"update": {"tables.0": optim.sgd()}, "options": {"sparse": "tables"}}, r"sparse names 'tables\.1'"),
        ({"update": {"tables": optim.sgd()}, "tables": [_TABLE, _TABLE]}, r"tables\.0 and tables\.1 share memory"),
        ({"update": {"tables": optim.sgd()}, "tables": [torch.zeros(5, 2, dtype=torch.int8)]}, "is no parameter"),
    ],
)
def test_there_is_no_such_module(given: Any, what: str) -> None:
    with pytest.raises(InvalidProblem, match=what):
        gradc.torch.Module(bags, **{"tables": [torch.zeros(5, 2) for _ in range(2)], **given})


def test_adafactor_has_no_step_of_rows() -> None:
    with pytest.raises(Unsupported, match="adafactor of rows of 'weight'"):
        updating(torch.zeros(50, 2), optim.adafactor())(*looked_up(0))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_one_error(layout: Any) -> None:
    """As a parameter, as its state, and as an argument, with update= and without it: before anything is written."""
    sparse = torch.eye(3).to_sparse(layout=layout)
    said = rf"of layout {layout}: make it dense first"
    for update in ({}, {"update": {"w": optim.adam()}}):
        module = gradc.torch.Module(squared, w=torch.ones(3, 3), options={"target": "cpu"}, **update)
        with pytest.raises(InvalidProblem, match=said):
            module(sparse)
        module(torch.ones(3, 3))["y"].backward()
        with pytest.raises(InvalidProblem, match=said):
            module(sparse)
        if update:
            before = module.w.detach().clone()
            module.state.mean.w = torch.nn.Buffer(sparse)
            with pytest.raises(InvalidProblem, match=said):
                module(torch.ones(3, 3))["y"].backward()
            assert torch.equal(module.w, before)
        module.w = torch.nn.Parameter(sparse)
        with pytest.raises(InvalidProblem, match=said):
            module(torch.ones(3, 3))
    with pytest.raises(InvalidProblem, match=said):
        gradc.step(squared, optim.adam()).init(sparse)
