"""gradc.torch.Module is a torch.nn.Module like any other."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import gradc.torch  # noqa: E402
from gradc import ops  # noqa: E402
from gradc.errors import InvalidProblem, TypeRuleError, Unsupported  # noqa: E402

NUMPY = {"target": "numpy"}


def mlp(x: Any, layers: Any) -> Any:
    for layer in layers:
        x = ops.tanh(ops.linear(x, layer["w"], layer["b"]))
    return x


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = ((4, 5), (5, 3))
    layers = [{"w": torch.randn(n, m).double(), "b": torch.randn(n).double()} for m, n in sizes]
    return gradc.torch.Module(mlp, options={**NUMPY, **options}, layers=layers)


def reference(module: Any, x: Any) -> Any:
    for i in range(2):
        w, b = (module.get_parameter(f"layers.{i}.{n}") for n in "wb")
        x = torch.tanh(torch.nn.functional.linear(x, w, b))
    return x


def check(module: Any, x: Any) -> None:
    wanted = [x, *module.parameters()]
    got, want = module(x), reference(module, x)
    torch.testing.assert_close(got, want)
    for g, w in zip(
        torch.autograd.grad(got.square().sum(), wanted),
        torch.autograd.grad(want.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


def test_any_number_of_rows_takes_two_traces() -> None:
    module = made()
    for rows in (2, 3, 7, 0, 1):
        check(module, torch.randn(rows, 4, dtype=torch.float64, requires_grad=True))
    assert len(next(iter(module._known.values()))) == 2


def test_state_dict_dtype_copies_and_files() -> None:
    module = made()
    assert list(module.state_dict()) == ["layers.0.w", "layers.0.b", "layers.1.w", "layers.1.b"]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = module(x)
    other = made()
    with torch.no_grad():
        other.get_parameter("layers.0.w").zero_()
    assert not torch.allclose(other(x), y)
    other.load_state_dict(module.state_dict())
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x), y)
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}
    torch.testing.assert_close(copy.deepcopy(module).float()(x.float()), y.float(), rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), y)


def test_second_derivatives() -> None:
    module = made()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x) and torch.autograd.gradgradcheck(module, x)


def test_a_graph_its_buffers_and_several_outputs() -> None:
    def bag(tokens: Any, table: Any, scale: Any) -> Any:
        rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 4)))
        return {"rows": rows, "first": ops.argmax(rows, axis=-1)}

    graph = gradc.trace(bag, tokens="i64[N]", table="i8[V,4]", scale="f32[V,1]")
    table, scale = torch.randint(-127, 128, (6, 4), dtype=torch.int8), torch.rand(6, 1)
    module = gradc.torch.Module(graph, table=table, scale=scale, options=NUMPY)
    assert [n for n, _ in module.named_parameters()] == ["scale"] and [n for n, _ in module.named_buffers()] == [
        "table"
    ]
    found = module(torch.tensor([1, 1, 5]))
    assert found.keys() == {"rows", "first"} and not found["first"].requires_grad
    found["rows"].sum().backward()
    wanted = torch.zeros(6, 1).index_add_(0, torch.tensor([1, 1, 5]), table[[1, 1, 5]].float().sum(1, keepdim=True))
    torch.testing.assert_close(module.scale.grad, wanted)
    torch.testing.assert_close(
        pickle.loads(pickle.dumps(module))(torch.tensor([2]))["rows"], module(torch.tensor([2]))["rows"]
    )


def test_machine_code_learns() -> None:
    """On the CPU, an optimizer's steps; a frozen parameter has no gradient."""
    module = made(target="cpu").float()
    module.get_parameter("layers.0.b").requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.05)
    x, losses = torch.randn(16, 4), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4 and module.get_parameter("layers.0.b").grad is None


def scaled(x: Any, factor: Any, w: Any) -> Any:
    return x * w * factor


@pytest.mark.parametrize("number", [2, 0.5, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_python_numbers_take_eagers_dtype(number: Any, dtype: Any) -> None:
    """A number never widens a tensor of floats: ``x * 0.5`` is of x's dtype."""
    w, x = torch.ones(3).to(dtype), torch.arange(3.0).to(dtype)
    module = gradc.torch.Module(
        (lambda x, factor, w: ops.where(factor, x, w)) if number is True else scaled, w=w, options=NUMPY
    )
    got = module(x, number)
    want = torch.where(torch.tensor(number), x, w) if number is True else x * w * number
    torch.testing.assert_close(got.detach(), want)
    assert len(module._known) == 1
    graph = gradc.trace(lambda x, factor: x * factor, x="f32[N]", factor="f32[]")
    if number is not True:
        torch.testing.assert_close(gradc.torch.Module(graph, options=NUMPY)(x.float(), number), x.float() * number)


def test_an_int_beside_tensors_of_integers() -> None:
    module = gradc.torch.Module(lambda x, w, k: ops.embedding(x + k, w), w=torch.eye(5), options=NUMPY)
    torch.testing.assert_close(module(torch.tensor([0, 2], dtype=torch.int32), k=2), torch.eye(5)[[2, 4]])


def test_any_name_works() -> None:
    """Names that gradc keeps for cotangents and residuals, that every module has, and that are no words."""

    def function(x: Any, d: Any, r: Any, forward: Any, _source: Any, self: Any, **others: Any) -> Any:
        y = x * d["w 1"] + r + forward["a"]["training"] * _source
        return y * self + others["class"] * others["forward_"]

    torch.manual_seed(0)
    values = [torch.randn(3) for _ in range(8)]
    names = dict(r=values[1], _source=values[3], self=values[4], forward_=values[6])
    module = gradc.torch.Module(
        function,
        d={"w 1": values[0]},
        forward={"a": {"training": values[2]}},
        options=NUMPY,
        **names,
        **{"class": values[5]},
    )
    w, r, f, s, own, c, g, x = values
    got = module(x)
    torch.testing.assert_close(got.detach(), (x * w + r + f * s) * own + c * g)
    got.sum().backward()
    assert len(list(module.parameters())) == 7 and all(p.grad is not None for p in module.parameters())
    torch.testing.assert_close(dict(module.named_parameters())["d.w 1"].grad, x * own)
    assert {"r", "forward_.a.training_", "forward__", "class", "self"} <= module.state_dict().keys()
    module.load_state_dict(module.state_dict())
    torch.testing.assert_close(copy.deepcopy(module)(x), got)
    again = gradc.torch.Module(lambda d, r: d * r, options=NUMPY)  # as arguments, too
    torch.testing.assert_close(again(x, r=w), x * w)
    own = gradc.torch.Module(lambda self, w: self * w, w=w, options=NUMPY)  # the first argument's name, too
    torch.testing.assert_close(own(x).detach(), x * w)


def test_an_absent_parameter_is_none() -> None:
    def affine(x: Any, w: Any, more: Any, b: Any) -> Any:
        assert b is None and more["scale"] is None
        return x * w

    module = gradc.torch.Module(affine, w=torch.ones(3), more={"scale": None}, b=None, options=NUMPY)
    assert list(module.state_dict()) == ["w"] and torch.equal(module(torch.ones(3)).detach(), torch.ones(3))


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, x: torch.func.vmap(m)(x),
        lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
        lambda m, x: torch.func.jvp(m, (x,), (x,)),
        lambda m, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sum())(
            dict(m.named_parameters())
        ),
    ],
)
def test_transforms_of_torch_func_are_one_error(transform: Any) -> None:
    with pytest.raises(Unsupported, match=r"torch\.autograd\.grad"):
        transform(made(), torch.ones(2, 4, dtype=torch.float64))


def test_functional_call() -> None:
    module, x = made(), torch.ones(2, 4, dtype=torch.float64)
    zeros = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    assert not torch.func.functional_call(module, zeros, (x,)).any() and module(x).any()


@pytest.mark.parametrize(
    ("attempt", "kind", "message"),
    [
        (
            lambda: gradc.torch.Module(mlp, weights=torch.ones(2)),
            InvalidProblem,
            "no input 'weights'; there are x, layers",
        ),
        (lambda: gradc.torch.Module(3, w=torch.ones(2)), InvalidProblem, "a function of gradc's ops or .*, not 3"),
        (lambda: gradc.torch.Module(torch.nn.Linear(2, 2)), InvalidProblem, "not Linear"),
        (lambda: gradc.torch.Module(max), InvalidProblem, "whose arguments have names"),
        (lambda: gradc.torch.Module(mlp, torch.ones(2)), InvalidProblem, "by name: x, layers"),
        (lambda: gradc.torch.Module(mlp, layers="w"), InvalidProblem, "'layers' cannot be a parameter"),
        (lambda: gradc.torch.Module(mlp, options=torch.ones(2)), InvalidProblem, "options is a mapping"),
        (lambda: made()("text"), InvalidProblem, "the argument 'x' is a str"),
        (lambda: made()(), InvalidProblem, "the argument 'x' is missing"),
        (lambda: made()(torch.ones(1, 4), torch.ones(1)), InvalidProblem, "2 arguments; the call takes x"),
        (lambda: made()(torch.ones(1, 4), x=torch.ones(1)), InvalidProblem, "the argument 'x'"),
        (lambda: made()(y=torch.ones(1)), InvalidProblem, "the argument 'y'"),
        (lambda: made()(torch.ones(1, 4)), TypeRuleError, "dtypes differ"),
        (lambda: made(fuze=True), InvalidProblem, "fuze"),
        *(
            (lambda key=key: gradc.torch.Module(mlp, layers={key: torch.ones(2)}), InvalidProblem, "path is empty")
            for key in ("a..b", ".a", "a.", "")
        ),
        (
            lambda: gradc.torch.Module(mlp, layers={"w": torch.ones(2, dtype=torch.complex64)}),
            InvalidProblem,
            r"'layers\.w' is of torch\.complex64: gradc has no complex numbers",
        ),
        (lambda: made()(torch.ones(1, 4) * 1j), InvalidProblem, "the argument 'x' is of torch.complex64"),
        (lambda: made()(1j), InvalidProblem, "the argument 'x' is of torch.complex64"),
        (
            lambda: gradc.torch.Module(lambda self, w: self * w, w=torch.ones(2))(self=torch.ones(2)),
            InvalidProblem,
            "'self' is given by position",
        ),
    ],
)
def test_misuse(attempt: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attempt()
