"""gradc.from_torch: names, sizes, tied weights, and one error for all that is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch_models as models  # noqa: E402
from torch import nn  # noqa: E402

import gradc  # noqa: E402
from gradc.errors import InvalidProblem, Unsupported  # noqa: E402

AUTO = torch.export.Dim.AUTO


def gradients(graph: gradc.Graph, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients by gradc; a name that only gradc has is left out of a model's."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    module = gradc.compile(graph, wrt=list(parameters), target="numpy", unused="zeros")
    loss, grads = module.value_and_grad({**parameters, **batch})
    return {"loss": loss, **grads}


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_with_symbolic_sizes(name: str) -> None:
    """Traced at one size, run at another."""
    kind = models.MODELS[name]
    model = models.seeded(kind)
    example, batch = (models.to(torch.float64, kind.batch(rows)) for rows in (4, 6))
    arguments = [n for n in kind.forward.__code__.co_varnames[1 : 1 + len(example)]]
    free = {n: {0: AUTO} if n != "edges" else None for n in arguments}
    graph = gradc.from_torch(model, example, dynamic_shapes=free)
    given = [n for n in graph.input_names if n not in graph.defaults]
    assert given == [*dict(model.named_parameters()), *arguments]
    assert graph.dims and graph.output_names == ("y",)
    wanted = models.step(model, model, batch)
    got = gradients(graph, model, dict(zip(arguments, batch, strict=True)))
    assert models.error({n: g for n, g in got.items() if n in wanted}, wanted) < 1e-8


def test_an_exported_program_and_text() -> None:
    model = models.seeded(models.BERT)
    batch = models.BERT.batch()
    program = torch.export.export(model, batch)
    graph = gradc.from_torch(program, name="bert")
    assert graph.name == "bert" and gradc.parse(str(graph)) == graph
    decomposed = gradc.from_torch(program.run_decompositions())
    for each in (graph, decomposed):
        got = gradients(each, model, dict(zip(("tokens", "kinds", "labels"), batch, strict=True)))
        assert models.error(got, models.step(model, model, batch)) < 1e-8
    scopes = {note.scope for note in graph.notes.values()}
    assert "block/attention/qkv" in scopes


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, a: Any, b: Any, more: dict[str, Any]) -> Any:
        return a * 2 + b * self.weight - more["c"]


@pytest.mark.parametrize("given", ["a tensor", "a tensor of free sizes", "the parameter"])
def test_a_tensor_that_is_given_twice_is_two_inputs(given: str) -> None:
    """torch.export itself makes a program of them that reads one."""
    model = Both()
    x = model.weight if given == "the parameter" else torch.ones(2)
    free = ({0: AUTO}, {0: AUTO}, {"c": {0: AUTO}}) if given == "a tensor of free sizes" else None
    graph = gradc.from_torch(model, (x, x, {"c": x}), dynamic_shapes=free)
    a, b, c = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    got = gradc.interp.run(graph, dict(zip(graph.input_names, (model.weight.detach(), a, b, c), strict=True)))["y"]
    torch.testing.assert_close(torch.as_tensor(got), (a * 2 + b * model.weight - c).detach())


class Named(nn.Module):
    """Names that gradc keeps for itself, an argument called as a parameter, a buffer that is written, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.weight = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.table = torch.arange(300.0).reshape(100, 3)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.d(x) * self.weight
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0))
        return {"scores": y * weight + self.table[:3].sum(0), "fixed": y.detach() * y, "ints": y.argmax(-1)}


def test_names_of_inputs_and_outputs() -> None:
    graph = gradc.from_torch(Named(), (torch.randn(5, 4), torch.randn(3)), dynamic_shapes=({0: AUTO}, None))
    assert graph.input_names[:6] == ("weight", "d.weight", "d.bias", "mean", "x", "weight_2")
    assert graph.output_names == ("scores", "fixed", "ints", "mean")
    assert len(graph.defaults) == 1
    module = gradc.compile(graph, wrt=["d.weight"], target="numpy")
    model = Named()
    x, weight = torch.randn(6, 4), torch.randn(3)
    given = {n: p.detach() for n, p in model.named_parameters()}
    given |= {"mean": model.mean.clone(), "x": x, "weight_2": weight}
    values, residuals = module.forward(given)
    wanted = model(x, weight)
    for name, value in {**wanted, "mean": model.mean}.items():
        torch.testing.assert_close(values[name], value.detach(), rtol=1e-4, atol=1e-3)
    grads = module.backward(residuals, fixed=torch.ones(6, 3), scores=None, mean=torch.ones(3))
    (want,) = torch.autograd.grad(wanted["fixed"].sum(), model.d.weight)
    torch.testing.assert_close(grads["d.weight"], want, rtol=1e-4, atol=1e-5)


class Ours(nn.Module):
    """Arguments called as what gradc's calls take, and as what its joint graphs call theirs."""

    def forward(
        self, d: torch.Tensor, r: torch.Tensor, out: torch.Tensor, dims: torch.Tensor, workspace: torch.Tensor
    ) -> torch.Tensor:
        return d * r + out * dims - workspace.exp()


@pytest.mark.parametrize("way", ["from_torch", "torch.compile"])
def test_arguments_called_as_gradcs_own(way: str) -> None:
    names = ("d", "r", "out", "dims", "workspace")
    given = [torch.randn(3, requires_grad=True) for _ in names]
    wanted = Ours()(*given)
    slopes = torch.autograd.grad(wanted.sum(), given)
    if way == "torch.compile":
        value = torch.compile(Ours(), backend="gradc")(*given)
        found = torch.autograd.grad(value.sum(), given)
    else:
        graph = gradc.from_torch(Ours(), tuple(given))
        assert graph.input_names == names
        module = gradc.compile(graph, wrt=names, target="numpy")
        value, residuals = module.forward(dict(zip(names, (x.detach() for x in given), strict=True)))
        found = tuple(module.backward(residuals, torch.ones(3))[name] for name in names)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(found, slopes)


class Spelled(nn.Module):
    """Arguments of every kind, one of which is written; torch.export writes their names in small letters."""

    def forward(
        self, threadIdx: Any, x: Any, *Rest: Any, M_PI: Any, X: Any, λ: Any = None, **more: Any
    ) -> torch.Tensor:
        more["Out"].add_(1)
        return threadIdx * x["Key"][0] + Rest[0] / Rest[1] - M_PI * X + more["Out"].exp() + λ


@pytest.mark.parametrize("exported", [False, True])
def test_arguments_are_called_as_the_module_calls_them(exported: bool) -> None:
    a, b, c, d, e, f, g, h = torch.rand(8, 3).unbind()
    args, kwargs = (a, {"Key": (b,)}, c, d), {"X": e, "M_PI": f, "Out": g.clone(), "λ": h}
    model = Spelled()
    given = torch.export.export(model, args, kwargs, strict=False) if exported else model
    graph = gradc.from_torch(given) if exported else gradc.from_torch(model, args, kwargs)
    assert graph.input_names == ("threadIdx", "x_Key_0", "Rest_0", "Rest_1", "X", "M_PI", "Out", "_")
    assert graph.output_names == ("y", "Out")
    found = gradc.compile(graph, target="numpy")(dict(zip(graph.input_names, (a, b, c, d, e, f, g, h), strict=True)))
    torch.testing.assert_close(found["y"], model(*args, **{**kwargs, "Out": g.clone()}))
    torch.testing.assert_close(found["Out"], g + 1)


class Numbers(nn.Module):
    """Results that are constants, tensors, numbers and sizes; arguments in a dict."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        y = x[::2] * more["y"] + more["z"].sum()
        sizes = {"count": x.shape[0] * 3 + 1, "columns": x.shape[1]}
        return {"y": y, "steps": torch.arange(3), "n": 3, "x": x, "rate": 0.5, "flag": True, "none": None, **sizes}


def test_results_that_are_constants_and_dims_by_their_names() -> None:
    rows, length = torch.export.Dim("rows", min=2), torch.export.Dim("length")
    example = torch.randn(10, 4), {"y": torch.randn(5, 4), "z": torch.randn(7)}
    free = {"more": {"y": {0: rows}, "z": (length,)}, "x": {0: 2 * rows, 1: None}}
    graph = gradc.from_torch(Numbers(), example, dynamic_shapes=free)
    assert graph.output_names == ("y", "steps", "n", "x", "rate", "flag", "count", "columns")
    types = {name: str(graph.input(name).type) for name in graph.input_names}
    assert types == {"x": "f32[2*rows,4]", "more_y": "f32[rows,4]", "more_z": "f32[length]"}
    assert "assume(rows >= 2)" in str(graph) and gradc.parse(str(graph)) == graph
    got = gradc.compile(graph, target="numpy")(x=example[0], more_y=example[1]["y"], more_z=example[1]["z"])
    for name, value in Numbers()(*example).items():
        if value is not None:
            torch.testing.assert_close(got[name], torch.as_tensor(value))
    free = ({0: 2 * rows}, {"y": {0: rows}, "z": None})
    assert gradc.from_torch(Numbers(), example, dynamic_shapes=free).dims == ("rows",)


def test_a_multiple_of_a_dim_that_no_other_axis_has() -> None:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 2).sum(1)

    graph = gradc.from_torch(Pairs(), (torch.randn(6),), dynamic_shapes=({0: 2 * torch.export.Dim("n")},))
    module, x = gradc.compile(graph, target="numpy"), torch.randn(10)
    torch.testing.assert_close(torch.as_tensor(module(x=x)), Pairs()(x))


def test_a_recurrent_layer_and_its_batch() -> None:
    """Whole, with a symbolic batch."""
    layer = nn.LSTM(3, 4, batch_first=True)
    graph = gradc.from_torch(layer, (torch.randn(2, 5, 3),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(3, 5, 3)
    got = gradc.compile(graph, target="numpy")({**parameters, graph.input_names[-1]: x})
    y, (h, c) = layer(x)
    for name, want in zip(graph.output_names, (y, h, c), strict=True):
        torch.testing.assert_close(got[name], want.detach())


class Moves(nn.Module):
    """Rows of x moved and written over; of small integers, so that nothing is rounded."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x.shape[0] // 2
        written = [x.clone() for _ in range(4)]
        written[0][half:] = x[:1]
        written[1][::2] = x[::2] * 2
        written[2][-1] = x[0]
        written[3][1:-1] = 4
        return (
            *(torch.roll(x, by, 0) for by in (1, -2, 7, -11, 0)),
            torch.roll(x, 4),
            torch.roll(x, (3, -1), (0, 1)),
            torch.fft.fftshift(x, 0),
            torch.fft.ifftshift(x),
            torch.select_scatter(x, x[1], 0, -2),
            torch.slice_scatter(x, x[half:] * 2, 0, half),
            torch.slice_scatter(x, x[1::3] * 2, 0, 1, None, 3),
            *written,
        )


class Weighed(Moves):
    """The sum of all moves, each element of each by a weight of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
        return torch.stack([(y * (weights + at)).sum() for at, y in enumerate(super().forward(x))]).sum()


def test_rows_of_a_symbolic_axis_are_rolled_and_written() -> None:
    moves, weighed = (
        gradc.from_torch(m, torch.ones(8, 3, dtype=torch.float64), dynamic_shapes=({0: AUTO},))
        for m in (Moves(), Weighed())
    )
    values, gradient = gradc.compile(moves, target="cpu"), gradc.compile(weighed, wrt=["x"], target="cpu")
    for rows in (3, 4, 5, 8, 13):
        x = torch.arange(3.0 * rows, dtype=torch.float64).reshape(rows, 3).requires_grad_()
        for name, want in zip(moves.output_names, Moves()(x), strict=True):
            assert torch.equal(torch.as_tensor(values(x=x.detach())[name]), want), (rows, name)
        loss = Weighed()(x)
        got, grads = gradient.value_and_grad(x=x.detach())
        assert float(got) == loss.item(), rows
        assert torch.equal(torch.as_tensor(grads["x"]), torch.autograd.grad(loss, x)[0]), rows


class Missing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.inner(x)).abs() @ torch.linalg.inv(x)


def test_all_that_is_missing_is_one_error() -> None:
    with pytest.raises(Unsupported, match="of the ops of Missing") as caught:
        gradc.from_torch(Missing(), torch.randn(4, 4))
    for line in (r"_fft_r2c", r"linalg_inv_ex", r"native_dropout\S* \(\S+ in inner\.1\)"):
        assert re.search(line, str(caught.value)), caught.value
    with pytest.raises(Unsupported, match=r"complex64|_fft_r2c"):
        gradc.from_torch(Missing().eval(), torch.randn(4, 4))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).real


@pytest.mark.parametrize(
    ("attempt", "kind", "message"),
    [
        (lambda: gradc.from_torch(Branch(), torch.ones(3)), InvalidProblem, r"torch\.export refuses Branch"),
        (lambda: gradc.from_torch(Chosen(), torch.ones(3)), Unsupported, r"aten\.(index|nonzero)"),
        (lambda: gradc.from_torch(Complex(), torch.ones(3, dtype=torch.complex64)), Unsupported, "complex64"),
        (lambda: gradc.from_torch(torch.sin, torch.ones(3)), InvalidProblem, r"a torch\.nn\.Module"),
        (lambda: gradc.from_torch(Chosen(), 3), InvalidProblem, "a tuple of example arguments"),
    ],
)
def test_what_cannot_be_imported(attempt: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attempt()
