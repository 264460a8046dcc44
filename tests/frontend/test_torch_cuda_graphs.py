"""``mode="reduce-overhead"`` where there is no GPU: what torch captures is recorded by a stand-in whose replays compute
anew in memory of their own, as a graph's do.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import contextlib  # noqa: E402

from test_torch_devices import Compiler, compiled, compiler  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc.errors import InvalidProblem  # noqa: E402
from gradc.torch import cuda_graphs  # noqa: E402


class Recorder:
    """``torch.cuda.make_graphed_callables``: inputs, results and gradients in memory that each replay writes.

    :ivar copied: how many inputs replays copied into the graph's memory.
    :ivar takes: how many seconds a replay takes.
    :ivar before_backward: called where the backward of a replay begins.
    """

    def __init__(self) -> None:
        self.graphs = self.copied = 0
        self.takes = 0.0
        self.before_backward: Callable[[], Any] = lambda: None

    def __call__(self, call: Callable[..., Any], samples: Any, num_warmup_iters: int, allow_unused_input: bool) -> Any:
        assert num_warmup_iters == 0 and allow_unused_input and all(x.is_leaf for x in samples)
        self.graphs += 1
        recorder, memory = self, _Memory(call, samples)

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                for held, x in zip(samples, inputs, strict=True):
                    if held.data_ptr() != x.data_ptr():
                        recorder.copied += 1
                        held.detach().copy_(x)
                time.sleep(recorder.takes)
                memory.replay()
                return tuple(y.detach() for y in memory.results)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *cotangents: Any) -> Any:
                recorder.before_backward()
                memory.replay_backward(cotangents)
                return tuple(g if g is None else g.detach() for g in memory.gradients)

        return lambda *inputs: Graphed.apply(*inputs)


class _Memory:
    def __init__(self, call: Callable[..., Any], samples: Sequence[Any]):
        self.call, self.samples, self.mode = call, samples, torch.is_grad_enabled()
        state = [x.detach().clone() for x in samples]
        self.made = call(*samples)
        for x, was in zip(samples, state, strict=True):
            x.detach().copy_(was)  # a capture runs nothing
        self.results = [torch.full_like(y, 77, requires_grad=False) for y in self.made]
        self.gradients: list[Any] = [None] * len(samples)

    def replay(self) -> None:
        with torch.set_grad_enabled(self.mode):
            self.made = self.call(*self.samples)
        for held, y in zip(self.results, self.made, strict=True):
            held.copy_(y.detach())

    def replay_backward(self, cotangents: Sequence[Any]) -> None:
        pairs = [(y, g) for y, g in zip(self.made, cotangents, strict=True) if y.requires_grad]
        wanted = [i for i, x in enumerate(self.samples) if x.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [self.samples[i] for i in wanted],
            [g for _, g in pairs],
            allow_unused=True,
            retain_graph=True,
        )
        for i, g in zip(wanted, found, strict=True):
            if g is not None:
                self.gradients[i] = g.clone() if self.gradients[i] is None else self.gradients[i].copy_(g)


class Stream:
    """A stream of torch's, and what it was told to wait for."""

    def __init__(self, device: Any = None):
        self.device, self.after = torch.device(device or "cuda:0"), list[Stream]()

    def wait_stream(self, other: Any) -> None:
        self.after.append(other)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> Iterator[Recorder]:  # noqa: F811
    made = Recorder()
    monkeypatch.setattr(cuda_graphs, "on_gpu", lambda x: True)
    stream = Stream()
    monkeypatch.setattr(cuda_graphs, "current_stream", lambda device: stream)
    monkeypatch.setattr(cuda_graphs, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "capturing", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graphs, "warming", lambda device: contextlib.nullcontext(lambda results: None))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    yield made


def counts() -> tuple[int, int]:
    """Captured, replayed."""
    found = [g.captures for g in gradc.torch.report().graphs if g.captures is not None]
    return sum(c.captured for c in found), sum(c.replayed for c in found)


def reason() -> str:
    return gradc.torch.report().graphs[-1].captures.reason


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 5)

    def forward(self, x: Any) -> tuple[Any, Any]:
        y = self.body(self.norm(x)).tanh()
        return y.square().sum(), y.detach() * 2


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def test_training_is_eagers(recorder: Recorder) -> None:
    """Losses, running statistics and weights over steps whose batches are each another tensor; results and gradients
    of steps before stay as they were.
    """
    model, twin = net(), net()
    call = compiled(model, cuda_graphs=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (model, twin)]
    found: list[Any] = []
    for step in range(7):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        for kept, function, each in ((True, call, optimizers[0]), (False, twin, optimizers[1])):
            each.zero_grad()
            loss, values = function(batch.clone())
            assert not values.requires_grad
            loss.backward()
            gradients = [p.grad for p in each.param_groups[0]["params"]]
            if kept:
                found.append((loss, values, gradients))
            else:
                torch.testing.assert_close(found[-1], (loss, values, gradients))
                found[-1] = (*found[-1], [copy.deepcopy(x.detach()) for x in (loss, values, *gradients)])
            each.step()
    for loss, values, gradients, then in found:
        torch.testing.assert_close([loss.detach(), values, *gradients], then)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert counts() == (1, 5) and recorder.graphs == 1
    assert recorder.copied == 5, "the batch alone: parameters and buffers are read where they lie"
    assert "1 CUDA graphs captured, 5 calls replayed" in str(gradc.torch.report())


def test_gradients_add_up(recorder: Recorder) -> None:
    model, twin, x = net().eval(), net().eval(), torch.randn(4, 6).double()
    call = compiled(model, cuda_graphs=True)
    for _ in range(5):
        call(x)[0].backward()
        twin(x)[0].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert counts() == (1, 3)


def test_a_call_before_the_backward_of_another_runs_without_a_graph(recorder: Recorder) -> None:
    """Each call's backward is its own."""
    model, twin = net().eval(), net().eval()
    call = compiled(model, cuda_graphs=True)
    xs = [torch.randn(4, 6).double() for _ in range(3)]
    for x in xs:
        call(x)[0].backward()
    model.zero_grad()
    losses = [call(x)[0] for x in xs]
    for loss, x in zip(losses, xs, strict=True):
        loss.backward()
        twin(x)[0].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert counts() == (1, 2) and "before the backward" in reason()


def test_a_second_backward_after_another_call_is_refused(recorder: Recorder) -> None:
    model, x = net().eval(), torch.randn(4, 6).double()
    call = compiled(model, cuda_graphs=True)
    for _ in range(3):
        loss, _ = call(x)
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)  # nothing was called since
    call(x)
    with pytest.raises(InvalidProblem, match="a second backward of a call after a later call"):
        loss.backward()


def test_sizes_that_change_have_graphs_of_their_own(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPHS", 2)
    model, twin = net().eval(), net().eval()
    call = compiled(model, cuda_graphs=True)
    with torch.no_grad():
        for n in (4, 5, 6) * 4:
            x = torch.randn(n, 6).double()
            torch.testing.assert_close(call(x), twin(x))
    assert recorder.graphs >= 3 and counts()[0] == recorder.graphs
    programs = [g for g in gradc.torch.report().graphs if g.captures is not None]
    assert len(programs) == 2, "the second size is compiled with symbols"


def test_an_input_that_moves_is_copied_from_then_on(recorder: Recorder) -> None:
    model, twin, x = net().eval(), net().eval(), torch.randn(4, 6).double()
    call = compiled(model, cuda_graphs=True)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(call(x), twin(x))
        assert recorder.graphs == 1 and recorder.copied == 0
        for _ in range(3):
            x = torch.randn(4, 6).double()
            torch.testing.assert_close(call(x), twin(x))
        assert recorder.graphs == 2 and recorder.copied == 3
        model.body.weight.data = twin.body.weight.data = torch.randn(5, 6).double()
        for _ in range(2):
            x = torch.randn(4, 6).double()
            torch.testing.assert_close(call(x), twin(x))
    assert recorder.graphs == 3


def test_threads_replay_a_graph_one_after_another(recorder: Recorder) -> None:
    """Each has the results of its own inputs, which lie in the same memory."""
    model, twin = net().eval(), net().eval()
    call = compiled(model, cuda_graphs=True)
    xs = [torch.randn(4, 6).double() for _ in range(16)]

    @torch.no_grad()
    def called(x: Any) -> Any:
        return call(x)

    for x in xs[:3]:
        called(x)
    recorder.takes = 0.01
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(called, xs))
    with torch.no_grad():
        torch.testing.assert_close(found, [twin(x) for x in xs])
    assert recorder.graphs == 1 and counts() == (1, 17)


def test_a_call_of_another_thread_in_the_middle_of_a_backward_runs_without_a_graph(recorder: Recorder) -> None:
    """It would write over what that backward reads."""
    model, twin = net().eval(), net().eval()
    call = compiled(model, cuda_graphs=True)
    x, *others = (torch.randn(4, 6).double() for _ in range(4))
    for each in others:
        call(each)[0].backward()
    model.zero_grad()
    loss, _ = call(x)
    with ThreadPoolExecutor(1) as thread:
        recorder.before_backward = lambda: found.append(thread.submit(call, others[0]).result())
        found: list[Any] = []
        loss.backward()
    twin(x)[0].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    torch.testing.assert_close(found, [twin(others[0])])
    assert counts() == (1, 2) and "before the backward" in reason()
    recorder.before_backward = lambda: None
    call(x)[0].backward()
    assert counts() == (1, 3)


def test_a_replay_on_another_stream_waits_for_the_one_before_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose results are copied from the memory that it writes."""
    call = compiled(net().eval(), cuda_graphs=True)
    first, second = Stream(), Stream()
    for stream in (first, first, first, first, second, second, first):
        monkeypatch.setattr(cuda_graphs, "current_stream", lambda device, stream=stream: stream)
        with torch.no_grad():
            call(torch.randn(4, 6).double())
    assert counts() == (1, 5)
    assert (first.after, second.after) == ([second], [first])


def test_each_gpu_captures_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on which its calls were warm; the stream that torch captures on is left as it was."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def within(what: Any) -> Iterator[None]:
        entered.append(what)
        yield
        entered.remove(what)

    current = {torch.device("cuda", i): Stream(f"cuda:{i}") for i in range(2)}
    for name, value in (
        ("Stream", Stream),
        ("stream", within),
        ("device", within),
        ("current_stream", current.__getitem__),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "_streams", {})
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", theirs := Stream())
    captured = []
    for device in (*current, *current):
        with cuda_graphs.warming(device):
            (warm,) = entered
        with cuda_graphs.capturing(device):
            assert entered == [device] and torch.cuda.graph.default_capture_stream is warm
        assert warm.device == device and warm.after[-1] is current[device] and current[device].after[-1] is warm
        assert not entered and torch.cuda.graph.default_capture_stream is theirs
        captured.append(warm)
    assert captured[:2] == captured[2:] and captured[0] is not captured[1]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.exp() + torch.rand(3, dtype=torch.float64), "draws its numbers on the CPU"),
        (lambda x: x.unsqueeze(0), "shares memory with another or with an input"),
        (lambda x: (y := x.exp(), y.t())[:2], "shares memory with another or with an input"),
    ],
)
def test_what_has_no_graph_runs_without(recorder: Recorder, compiler: Compiler, function: Any, why: str) -> None:  # noqa: F811
    compiler.rule = lambda node: "cpu" if node.name == "rand" else "cuda"
    call = compiled(function, cuda_graphs=True)
    for _ in range(4):
        x = torch.randn(3, 3).double()
        torch.manual_seed(1)
        found = call(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, function(x))
    assert counts()[0] == 0 and why in reason() and why in str(gradc.torch.report())


def test_a_capture_that_fails_is_told(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    model, x = net().eval(), torch.randn(4, 6).double()
    call = compiled(model, cuda_graphs=True)
    for _ in range(4):
        torch.testing.assert_close(call(x), model(x))
    assert counts() == (0, 0)
    assert reason() == "its capture failed: operation not permitted when stream is capturing"


def test_on_the_cpu_the_mode_does_nothing() -> None:
    gradc.torch.report().clear()
    torch._dynamo.reset()
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(torch.sin, backend="gradc", mode="reduce-overhead")(x), x.sin())
    assert gradc.torch.report().graphs[-1].captures is None
    gradc.torch.report().clear()


@pytest.mark.parametrize(
    ("mode", "options", "match"),
    [
        ("max-autotune", {}, "the modes 'default' and 'reduce-overhead'"),
        (None, {"cuda_graphs": 1}, "cuda_graphs=1: True or False"),
        (None, {"cuda_graphs": True, "timed": True}, "a replay has no steps to measure"),
    ],
)
def test_wrong_modes(mode: Any, options: Any, match: str) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(InvalidProblem, match=match):
        gradc.torch.dynamo.backend(graph, [torch.ones(2)], mode=mode, options=options)
