"""Graphs whose values lie on a GPU, compiled where there is none: traced on the CPU, their values said to lie on one.

What runs them is the CPU or the simulator, by the option ``target``; what would is what their functions say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

import gradc.torch  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.errors import InvalidProblem  # noqa: E402
from gradc.torch import dynamo  # noqa: E402
from gradc.torch import function as functions  # noqa: E402
from gradc.torch.draws import is_draw  # noqa: E402
from gradc.torch.importer import tensors_of  # noqa: E402
from gradc.torch.normal_form import NormalForm  # noqa: E402

CUDA = torch.device("cuda:0")


@dataclass
class Compiler:
    """The backend, for which the values of a graph lie where a rule says.

    :ivar made: the functions of its regions.
    """

    rule: Callable[[torch.fx.Node], str] = lambda node: "cuda"
    made: list[functions.Function] = field(default_factory=list)

    def normal_form(self, *args: Any, **kwargs: Any) -> NormalForm:
        form = _normal_form(*args, **kwargs)
        nodes = [n for n in form.module.graph.nodes if "val" in n.meta]
        mode = next(v.fake_mode for n in nodes if isinstance(v := n.meta["val"], FakeTensor))
        for node in nodes:
            where = self.rule(node)

            def moved(x: torch.Tensor, where: str = where) -> torch.Tensor:
                with mode:
                    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=where)

            if where != "cpu":
                node.meta["val"] = tree_map_only(torch.Tensor, moved, node.meta["val"])
        return form

    def function(self, *args: Any, **kwargs: Any) -> functions.Function:
        self.made.append(functions.Function(*args, **kwargs))
        return self.made[-1]


_normal_form = dynamo.normal_form


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(dynamo, "normal_form", made.normal_form)
    monkeypatch.setattr(dynamo, "Function", made.function)
    torch._dynamo.reset()
    gradc.torch.report().clear()
    yield made
    gradc.torch.report().clear()


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="gradc", fullgraph=True, options={"target": "cpu", **options})


def rows() -> set[tuple[str, str]]:
    return {(row.op, row.reason) for row in gradc.torch.report().rows}


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(6)
    return at * at + 1, at[:, None] >= at


def test_a_region_without_inputs_runs_where_its_values_lie(compiler: Compiler) -> None:
    torch.testing.assert_close(compiled(positions)(), positions())
    (made,) = compiler.made
    assert made.names == () and made.device == CUDA
    with knobs.TARGET.set(""):
        alone = functions.Function(made.graph, device=made.device).wrt(())
    assert (alone.target, alone.device) == ("cuda", CUDA)


def test_results_that_no_operand_places_are_given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = gradc.trace(lambda: {"at": ops.iota(shape=(3,), axis=0), "twice": ops.iota(shape=(2,), axis=0) * 2})
    given: list[dict[str, torch.Tensor]] = []

    def module(inputs: Any, dims: Any, out: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given.append(out)
        return out

    monkeypatch.setattr(functions, "compile", lambda *args, **options: module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with knobs.TARGET.set(""), FakeTensorMode():
        found = functions.Function(graph, device=CUDA)({})
    assert [(x.device, x.dtype, tuple(x.shape)) for x in found] == [
        (CUDA, torch.int64, (3,)),
        (CUDA, torch.int64, (2,)),
    ]
    assert list(given[0]) == ["at", "twice"]


def two_devices(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = (x.sin() * 2).cos()
    b = (y.exp() + 1).log()
    return a + a.tanh(), b * b.sqrt()


def test_a_region_holds_the_values_of_one_device(compiler: Compiler) -> None:
    """Each has a region of its own, and where one reads the other's number, it runs after it."""
    other = {"arg1_1", "exp", "add", "log", "sqrt", "mul_1"}
    compiler.rule = lambda node: "cuda:0" if node.name not in other else "cuda:1"
    x, y = torch.randn(5, requires_grad=True), torch.rand(7, requires_grad=True)
    wanted = two_devices(x, y)
    found = compiled(two_devices)(x, y)
    names = {str(f.device): [n.op.name for n in f.graph.nodes] for f in compiler.made}
    assert "sin" in names["cuda:0"] and "exp" not in names["cuda:0"]
    assert "exp" in names["cuda:1"] and "sin" not in names["cuda:1"]
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad([y.sum() for y in each], [x, y]) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def number_of_another(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = (y.exp() + 1).log().sum()
    return (x.sin() * scale).cos() + 1


def test_a_number_on_the_cpu_is_read_by_another_devices_region(compiler: Compiler) -> None:
    """With the gradient that it has, where it lies."""
    compiler.rule = lambda node: "cpu" if node.name in {"arg1_1", "exp", "add", "log", "sum_1"} else "cuda"
    x, y = torch.randn(5, requires_grad=True), torch.rand(7, requires_grad=True)
    wanted, found = number_of_another(x, y), compiled(number_of_another)(x, y)
    assert [str(f.device) for f in compiler.made] == ["cpu", "cuda:0"]
    assert [f.wrt(()).target for f in compiler.made] == ["cpu", "cpu"], "what the option says"
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(each.sum(), [x, y]) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def back_to_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).sum().to(torch.float64) + 1


def test_a_number_that_is_moved_is_moved_by_torch(compiler: Compiler) -> None:
    compiler.rule = lambda node: "cuda" if node.name in {"arg0_1", "sin", "mul", "sum_1"} else "cpu"
    x = torch.arange(5.0) / 3
    torch.testing.assert_close(compiled(back_to_the_cpu)(x), back_to_the_cpu(x))
    assert ("aten._to_copy.default", "its tensors lie on cpu and cuda:0") in rows()


def masked(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x.exp(), torch.tensor(-3.0)) + torch.tensor(2.0)


def test_a_number_that_the_graph_writes_out_is_the_regions_that_reads_it(compiler: Compiler) -> None:
    """torch keeps it on the CPU; a region of its own would copy it there."""
    compiler.rule = lambda node: "cpu" if node.name.startswith(("_tensor", "lift", "scalar")) else "cuda"
    x = torch.randn(5)
    torch.testing.assert_close(compiled(masked)(x), masked(x))
    assert [str(f.device) for f in compiler.made] == ["cuda:0"] and gradc.torch.report().share == 1


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.second = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)
        q, k, v = self.first(F.layer_norm(y, (4,)).tanh()).unflatten(-1, (3, 1, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.gelu(self.second(y)).square().sum()


ATTENTION, CONVOLUTION = "aten.scaled_dot_product_attention.default", "aten.convolution.default"


@pytest.mark.parametrize("fallback", ["torch", "error"])
def test_what_torch_runs_faster_on_a_gpu_is_left_to_it(compiler: Compiler, fallback: str) -> None:
    """With its gradient; ``fallback="error"`` is about what gradc cannot take."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 3, 4, 4)
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(compiled(model, fallback=fallback)(x), list(model.parameters()))
    torch.testing.assert_close(found, wanted)
    assert {ATTENTION, CONVOLUTION} <= {op for op, _ in rows()}
    assert (ATTENTION, "flash attention is faster on CUDA (take='all' has gradc run it)") in rows()
    assert not {"convolution", "scaled_dot_product_attention"} & {
        n.op.name for f in compiler.made for n in f.graph.nodes
    }


@pytest.mark.parametrize(("where", "take"), [("cuda", "all"), ("cpu", "faster")])
def test_gradc_takes_all_where_it_is_told_to_and_on_the_cpu(compiler: Compiler, where: str, take: str) -> None:
    compiler.rule = lambda node: where
    model, x = Block(), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(compiled(model, take=take, fallback="error")(x), model(x))
    assert gradc.torch.report().share == 1 and len(compiler.made) == 1


def test_a_wrong_option() -> None:
    with pytest.raises(InvalidProblem, match="take='some': 'faster' or 'all'"):
        dynamo.backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)], options={"take": "some"})


class ChannelsLast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.Conv2d(6, 5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return self.second(y + y.sin() * y.cos()), y.detach().exp() * 2 + 1


def test_values_cross_the_borders_of_regions_as_they_lie(compiler: Compiler) -> None:
    """What torch gives channels last is read so, and what it reads was chosen by its strides; nothing is copied."""
    torch.manual_seed(0)
    model = ChannelsLast().double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5).double().to(memory_format=torch.channels_last)
    wanted, found = model(x), compiled(model)(x)
    torch.testing.assert_close(found, wanted)
    assert [y.stride() for y in found] == [y.stride() for y in wanted] == [(100, 1, 25, 5), (120, 1, 30, 6)]
    gradients = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y, _ in (found, wanted)]
    torch.testing.assert_close(*gradients)
    modules = [m.module for f in compiler.made for m in f._variants.values()]
    assert modules and not any(m.forward.copied or (m.wrt and m.backward.copied) for m in modules)


@pytest.mark.parametrize("written", [False, True])
def test_what_a_program_is_given_enters_as_it_lies(compiler: Compiler, written: bool) -> None:
    """Channels last, and a matrix that is given transposed; what the program writes to stays as it is."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * 2).mean((0, 2, 3)) + (w.exp() + 1).sum(0)
        if written:
            x.mul_(2)
        return y

    x = torch.randn(2, 3, 4, 5).double().to(memory_format=torch.channels_last)
    w = torch.randn(3, 6).double().t()
    others = [x.clone(), w.clone()]
    assert others[0].stride() == x.stride()
    wanted, found = function(*others), compiled(function)(x, w)
    torch.testing.assert_close((found, x), (wanted, others[0]))
    assert x.stride() == (60, 1, 15, 3)
    shapes = {n: tuple(made.graph.input(n).shape) for made in compiler.made for n in made.names}
    assert shapes == {"x": (2, 3, 4, 5) if written else (2, 4, 5, 3), "w": (3, 6)}


class Detached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 6, 3), torch.nn.Conv2d(6, 6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return (y.detach().sin().exp() * self.second.weight.sum()).sum(), y.sum()


def test_what_is_read_detached_across_a_border_keeps_its_own_backward(compiler: Compiler) -> None:
    """No ``retain_graph``: the losses share a detached value alone."""
    torch.manual_seed(0)
    model = Detached().double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5).double().to(memory_format=torch.channels_last)
    gradients = []
    for call in (model, compiled(model, smallest_region=1)):
        model.zero_grad()
        first, second = call(x)
        first.backward()
        second.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)
    assert len(gradients[0]) == 3, "the second convolution's bias is not read"


class Tied(torch.nn.Module):
    """A weight on both sides of what torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = F.linear(x.tanh() * 2, self.weight)[:, None]
        y = F.scaled_dot_product_attention(q, q, q)[:, 0]
        return (F.linear(y.sin().cos(), self.weight) + F.linear(y, self.weight)).float().sum()


def test_autocast_casts_a_weight_once(compiler: Compiler) -> None:
    """Where several regions read it, too; forward and backward read that one cast."""
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(4, 8, 16)
    call = compiled(model, numerics="strict")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = call(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        torch.autograd.grad(found, model.weight), torch.autograd.grad(wanted, model.weight), rtol=2e-2, atol=2e-2
    )
    assert ("aten._to_copy.default", "several regions read what it gives") in rows()
    assert len(compiler.made) == 2 and all("weight" not in name for f in compiler.made for name in f.names)
    assert [str(n.operands[0].type) for f in compiler.made for n in f.graph.nodes if n.op.name == "cast"].count(
        "f32[16,16]"
    ) == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_convolution_is_traced_with_the_callers_libraries(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """Which library runs it decides in which order its result lies; all else is traced without them."""
    seen: list[tuple[bool, bool]] = []
    select = torch._C._select_conv_backend

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append((torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled))
        return select(*args, **kwargs)

    monkeypatch.setattr(torch._C, "_select_conv_backend", spied)
    x, w = torch.randn(2, 3, 7, 5 + enabled), torch.randn(4, 3, 3, 3)
    with torch.backends.cudnn.flags(enabled=enabled), torch.backends.mkldnn.flags(enabled=enabled):
        form = _normal_form(torch.fx.symbolic_trace(Convolved()), [x, w], dynamo.is_kept)
        assert (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled) == (enabled, enabled)
    assert seen and set(seen) == {(enabled, enabled)}
    assert any(n.target is torch.ops.aten.convolution.default for n in form.module.graph.nodes)


class Convolved(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.conv2d(x, w),)


def lasting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sin().cos().exp()


@pytest.mark.parametrize("options", [{}, {"residuals": "borrow"}], ids=["keep", "borrow"])
def test_what_is_returned_in_another_memory_order_is_no_view(options: dict[str, str]) -> None:
    """It has eager mode's strides, and is detached and written to as eager mode's result is; its second derivative
    stays.
    """
    x = torch.randn(2, 3, 4, 5).double().to(memory_format=torch.channels_last)
    w = torch.randn(1, 3, 1, 1).double().requires_grad_()
    call = compiled(lasting, **options)
    y, wanted = call(x, w), lasting(x, w)
    assert y.stride() == wanted.stride() == (60, 1, 15, 3) and not y._is_view()
    gradients = [torch.autograd.grad(z.square().sum(), w, create_graph=True)[0] for z in (y, wanted)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*[torch.autograd.grad(g.square().sum(), w)[0] for g in gradients])
    y = call(x, w)
    y.mul_(2)
    try:
        found = torch.autograd.grad(y.sum(), w)[0]
    except RuntimeError as error:  # eager mode keeps the result, and says so
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(found, torch.autograd.grad((2 * lasting(x, w)).sum(), w)[0])
    assert not call(x, w).detach_().requires_grad
    with torch.no_grad():
        y = call(x, w)
    assert y.add_(torch.ones(1, requires_grad=True)).requires_grad


def test_a_channels_last_buffer_that_is_written_keeps_its_memory() -> None:
    """What is written does not lie in rows, so that a region gives its new value in memory of its own."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    b = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)

    def function(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.mul_(x.sin()).add_(1)
        return (b * x).cos().exp()

    other, address = b.clone(), b.data_ptr()
    with torch.no_grad():
        wanted, found = function(x, other), compiled(function)(x, b)
    torch.testing.assert_close((found, b), (wanted, other))
    assert b.data_ptr() == address and found.stride() == wanted.stride() and b.stride() == other.stride()


@pytest.mark.parametrize("random", ["torch", "gradc"])
def test_a_gpu_draws_there_and_no_region_is_cut(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, random: str
) -> None:
    """Eager mode's masks are drawn by the kernel of its dropout, on an empty tensor; gradc's from a key on the GPU."""
    plans = []
    plan = dynamo.plan

    def kept(graph: torch.fx.Graph, *options: Any) -> Any:
        plans.append((graph, plan(graph, *options)))
        return plans[-1][1]

    monkeypatch.setattr(dynamo, "plan", kept)
    call = compiled(lambda x: F.dropout(F.dropout(x.exp(), 0.3).sin(), 0.2).cos(), random=random)
    with contextlib.suppress(AssertionError, RuntimeError):  # there is no GPU to draw on
        call(torch.ones(3, 4))
    ((graph, found),) = plans
    drawn = [n for n in graph.nodes if is_draw(n)]
    names = {"torch": ["aten.native_dropout.default"] * 2, "gradc": ["aten.randint.low"]}[random]
    assert [str(n.target) for n in drawn] == names
    assert all(o.target is torch.ops.aten.empty_permuted.default for n in drawn for o in n.all_input_nodes)
    assert all(v.device.type == "cuda" for n in drawn for v in tensors_of(n))
    assert len(found.regions) == 1 and all(found.levels[n] == -1 for n in drawn)
