"""Beside torch: torch.compile around calls, gradients that would be lost, residuals that no longer hold, tensors
without memory, docs/torch.md.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.errors import DeviceError, GradcError, InvalidProblem, NotDifferentiable

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    """tanh(x * w + b): every input is borrowed for the backward."""
    return gradc.compile(
        gradc.trace(lambda x, w, b: ops.tanh(x * w + b), x="f32[N,4]", w="f32[4]", b="f32[4]"), wrt=["w", "b"]
    )


def tensors(rows: int = 3, **grad: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, 4), "w": (4,), "b": (4,)}
    return {
        name: torch.randn(shape, generator=generator).requires_grad_(grad.get(name, False))
        for name, shape in shapes.items()
    }


def test_the_page_on_torch_runs() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "torch.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "docs/torch.md", "exec"), names)


# -- torch.compile: in a child, whose heap the C library checks --------------------------------------------------------

CHILD = """
import sys
{imports}
import gradc
from gradc import ops

layers = lambda x, w, v: ops.linear(ops.gelu(ops.linear(x, w)), v)
module = gradc.compile(gradc.trace(layers, x="f32[N,8]", w="f32[H,8]", v="f32[C,H]"), wrt=["x", "w", "v"])
import torch

F = torch.nn.functional
net = lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v)
plan = gradc.plans.embedding_backward(D=4)
value_and_grad = gradc.value_and_grad(lambda w, x: ops.mean((x @ w) ** 2))


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, v):
        y, ctx.residuals = module.forward(x=x, w=w, v=v)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        grads = module.backward(ctx.residuals, dy)
        return grads["x"], grads["w"], grads["v"]


def value(x, w, v):
    return module(x=x * 2, w=w, v=v) + 1


def both(x, w, v):
    y, residuals = module.forward(x=x, w=w, v=v)
    grads = module.backward(residuals, torch.ones_like(y) * 2)
    grads.accumulate(dict(w=grads["w"]))
    return y + 1, grads["w"] * 0.5


def traced(x, w, v):
    loss, grads = value_and_grad(w.T.contiguous(), x)
    return loss + 1, grads["w"] * 2


def executable(x, w, v):
    y, residuals = module.forward(x=x, w=w, v=v)
    return module.backward.run({{**residuals.arrays, "d.y": y}}, dims=residuals.dims)["d.w"] + 1


def kernel(x, w, v):
    handle = next(iter(module.kernels.values()))
    inputs = handle.executable.inputs
    given = {{name: torch.ones(t.concrete(dict(N=2, H=3, C=4, rows=2))) for name, t in inputs.items()}}
    return [out.sum() for out in handle.run(**given).values()][0] + x.sum()


def planned(x, w, v):
    return plan.run(indices=torch.arange(3), dy=x[:3, :4].contiguous(), dims=dict(V=5))["weight"] + 1


for function in ({functions}):
    compiled = torch.compile(function, backend="{backend}")
    for call in range(50 if function is value else 4):
        x, w, v = torch.randn(3 + call % 3, 8), torch.randn(16, 8), torch.randn(3, 16)
        torch.testing.assert_close(compiled(x, w, v), function(x, w, v))
if "{backend}" == "eager":
    compiled = torch.compile(module, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(x=x, w=w, v=v), net(x, w, v), atol=1e-4, rtol=1e-4)
compiled = torch.compile(lambda *leaves: Recorded.apply(*leaves).square().sum(), backend="{backend}")
for call in range(3):
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((3 + call, 8), (16, 8), (3, 16))]
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    compiled(*leaves).backward()
    net(*twins).square().sum().backward()
    for leaf, twin in zip(leaves, twins):
        torch.testing.assert_close(leaf.grad, twin.grad, atol=1e-3, rtol=1e-4)
torch._dynamo.reset()
try:
    torch.compile(value, backend="{backend}", fullgraph=True)(x, w, v)
except torch._dynamo.exc.Unsupported as error:
    assert "Module.__call__" in str(error), error
else:
    raise AssertionError("fullgraph=True, and the graph is not whole")
rules = sys.modules["torch._dynamo.trace_rules"]  # whoever waited for them is gone, and their loader is as it was
assert not any(type(finder).__module__.startswith("gradc") for finder in sys.meta_path)
assert "exec_module" not in vars(rules.__loader__) and rules.__spec__.loader is rules.__loader__
assert rules.check_file(gradc.__file__).skipped and not rules.check_file("/opt/gradc_user/model.py").skipped
sys.stdout.write("whole")
"""


@pytest.mark.parametrize(
    ("imports", "backend", "functions"),
    [
        ("", "eager", "value, both, traced, executable, kernel, planned"),
        ("import torch, torch._dynamo", "aot_eager", "value,"),
    ],
)
def test_torch_compile_leaves_calls_alone(imports: str, backend: str, functions: str) -> None:
    """Traced through, a call gave stand-ins' addresses to machine code, and the C library ended the process."""
    text = CHILD.format(imports=imports, backend=backend, functions=functions)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MALLOC_PERTURB_": "85"},
    )
    assert done.returncode == 0 and done.stdout == "whole", f"{done.returncode}\n{done.stdout}{done.stderr[-3000:]}"


# -- tensors without memory --------------------------------------------------------------------------------------------


def in_fake_mode(call: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        call(torch.ones(3, 4))


def real_in_fake_mode(call: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(3, 4)
    with FakeTensorMode():
        call(x)


def in_make_fx(call: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: call(x) or x, tracing_mode="symbolic")(torch.ones(3, 4))


def freed(call: Any) -> None:
    x = torch.ones(3, 4)
    x.untyped_storage().resize_(0)
    call(x)


STAND_INS: dict[str, Any] = {
    "fake": in_fake_mode,
    "real among fakes": real_in_fake_mode,
    "make_fx": in_make_fx,
    "vmap": lambda call: torch.func.vmap(lambda x: call(x) or x)(torch.ones(2, 3, 4)),
    "grad": lambda call: torch.func.grad(lambda x: call(x) or x.sum())(torch.ones(3, 4)),
    "jvp": lambda call: torch.func.jvp(lambda x: call(x) or x, (torch.ones(3, 4),), (torch.ones(3, 4),)),
    "functionalize": lambda call: torch.func.functionalize(lambda x: call(x) or x)(torch.ones(3, 4)),
    "meta": lambda call: call(torch.ones(3, 4, device="meta")),
    "sparse": lambda call: call(torch.ones(3, 4).to_sparse()),
    "csr": lambda call: call(torch.ones(3, 4).to_sparse_csr()),
    "quantized": lambda call: call(torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8)),
    "nested": lambda call: call(torch.nested.nested_tensor([torch.ones(4), torch.ones(4)])),
    "zero": lambda call: call(torch._efficientzerotensor((3, 4))),
    "uninitialised": lambda call: call(torch.nn.parameter.UninitializedParameter()),
    "freed": freed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("what", ["x", "out"])
def test_a_tensor_without_memory_is_one_error(module: gradc.Module, name: str, what: str) -> None:
    caught: list[BaseException] = []

    def call(x: Any) -> None:
        arrays = {n: np.ones(s, np.float32) for n, s in (("x", (3, 4)), ("w", 4), ("b", 4))}
        try:
            module({**arrays, "x": x}) if what == "x" else module(arrays, out={"y": x})
        except Exception as error:
            caught.append(error)

    STAND_INS[name](call)
    (error,) = caught
    assert isinstance(error, DeviceError | InvalidProblem | NotDifferentiable) and (
        "the input x" if what == "x" else "out['y']"
    ) in str(error), error


@pytest.mark.filterwarnings("ignore")
def test_lazy_signs_are_resolved(module: gradc.Module) -> None:
    """A tensor whose minus sign is a bit beside its memory is read with its sign."""
    plain = tensors()
    x = torch.complex(torch.zeros(3, 4), -plain["x"]).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(module({**plain, "x": x}), module(plain))


# -- gradients that would be lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w"])  # not in wrt, and in it
@pytest.mark.parametrize("entry", ["module", "forward", "run", "can_implement", "variant"])
def test_an_input_that_requires_grad_is_refused(module: gradc.Module, name: str, entry: str) -> None:
    given = tensors(**{name: True})
    if entry == "variant":
        given["x"] = torch.randn(4, 200_000).t().requires_grad_(name == "x")
    with pytest.raises(
        NotDifferentiable,
        match=rf"the input {name} is a tensor that requires grad.*detach\(\).*no_grad\(\).*autograd\.Function",
    ):
        if entry == "can_implement":
            refused = module.can_implement(given)
            assert refused is not None
            raise refused
        {"module": module, "forward": module.forward, "run": module.forward.run, "variant": module}[entry](given)
    with torch.no_grad():
        y, residuals = module.forward(given)
    grads = module.backward(residuals, torch.ones_like(y))  # forward said what it wanted: nothing is asked again
    torch.testing.assert_close(grads["w"], ((1 - y**2) * given["x"].detach()).sum(0), rtol=1e-3, atol=1e-3)
    assert not y.requires_grad and residuals.inner(name) is given[name]


def test_cotangents_and_results_that_require_grad_are_refused(module: gradc.Module) -> None:
    given = tensors()
    _y, residuals = module.forward(given)
    with pytest.raises(NotDifferentiable, match=r"the input d\.y is a tensor that requires grad"):
        module.backward(residuals, torch.ones(3, 4, requires_grad=True))
    with pytest.raises(NotDifferentiable, match=r"out\['y'\] is a tensor that requires grad"):
        module(given, out={"y": torch.ones(3, 4, requires_grad=True)})
    with torch.no_grad():
        assert module.backward(residuals, torch.ones(3, 4, requires_grad=True)).keys() == {"w", "b"}


def test_value_and_grad_returns_the_gradients_of_parameters() -> None:
    """None is lost of what is in wrt; of the others one would be."""
    function = gradc.value_and_grad(lambda w, x: ops.mean(ops.tanh(x * w)))
    w, x = torch.nn.Parameter(torch.ones(4)), torch.randn(3, 4)
    _value, grads = function(w, x)
    torch.tanh(x * w).mean().backward()
    torch.testing.assert_close(grads["w"], w.grad)
    with pytest.raises(NotDifferentiable, match="the input x is a tensor that requires grad"):
        function(w, x.requires_grad_())


def test_a_function_whose_gradient_is_differentiated_again_says_so(module: gradc.Module) -> None:
    """Without once_differentiable, too: in a second derivative the cotangent requires grad and grad mode is on."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, b: Any) -> Any:
            y, ctx.residuals = module.forward(x=x, w=w, b=b)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:  # type: ignore[override]
            grads = module.backward(ctx.residuals, dy)
            return None, grads["w"], grads["b"]

    given = tensors(w=True, b=True)
    loss = Recorded.apply(*given.values()).square().sum()
    with pytest.raises(NotDifferentiable, match="requires grad"):
        torch.autograd.grad(loss, given["w"], create_graph=True)


# -- residuals that no longer hold -------------------------------------------------------------------------------------

CHANGES = {
    "mul_": lambda w: w.mul_(100),
    "index": lambda w: w.__setitem__(0, 7.0),
    "detached": lambda w: w.detach().add_(1),
    "view": lambda w: w.view(2, 2)[0].zero_(),
    "optimizer": lambda w: (setattr(w, "grad", torch.ones(4)), torch.optim.SGD([w], lr=0.1).step()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("parameter", [False, True])
def test_an_input_changed_in_place_since_forward_is_refused(module: gradc.Module, change: str, parameter: bool) -> None:
    given = tensors()
    given["w"] = torch.nn.Parameter(given["w"]) if parameter or change == "optimizer" else given["w"]
    with torch.no_grad():
        y, residuals = module.forward(given)
        module.backward(residuals, torch.ones_like(y))
        CHANGES[change](given["w"])
        with pytest.raises(InvalidProblem, match="the input 'w' was changed in place between forward and backward"):
            module.backward(residuals, torch.ones_like(y))
        y, residuals = module.forward(given)
        module.backward(residuals, torch.ones_like(y))


def test_what_backward_does_not_read_may_change(module: gradc.Module) -> None:
    given = tensors()
    y, _residuals = module.forward(given)
    keep = y.clone()
    y.mul_(0)  # no residual
    other = gradc.compile(gradc.trace(lambda x, w, b: x * w + b, x="f32[N,4]", w="f32[4]", b="f32[4]"), wrt=["w"])
    z, kept = other.forward(given)
    given["b"].mul_(0)
    torch.testing.assert_close(other.backward(kept, torch.ones_like(z))["w"], given["x"].sum(0))
    assert keep is not None


def test_a_result_that_is_a_residual_and_was_changed_is_refused() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), wrt=["x"], save="all")
    x = torch.randn(5)
    _y, residuals = module.forward(x=x)
    torch.testing.assert_close(module.backward(residuals, torch.ones(5))["x"], x.exp())
    for array in residuals.arrays.values():
        array.mul_(2)
    with pytest.raises(InvalidProblem, match="was changed in place"):
        module.backward(residuals, torch.ones(5))


def test_what_gradc_writes_counts_as_a_change(module: gradc.Module) -> None:
    """So torch's backward and ours refuse what was overwritten through ``out=`` and ``donate=``."""
    given = tensors()
    y, residuals = module.forward(given)
    module(tensors(), out={"y": given["x"]})
    with pytest.raises(InvalidProblem, match="the input 'x' was changed in place"):
        module.backward(residuals, torch.ones_like(y))
    leaf, buffer = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
    loss = (leaf * buffer).sum()
    module(tensors(), out={"y": buffer})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    step = gradc.compile(gradc.trace(lambda p, g: p - 0.1 * g, p="f32[N]", g="f32[N]"), donate=["p"])
    p = torch.ones(40_000)
    before = p._version
    step(p=p, g=torch.ones(40_000))
    assert p._version > before


def test_inference_tensors_have_no_count(module: gradc.Module) -> None:
    with torch.inference_mode():
        given = tensors()
        y, residuals = module.forward(given, out={"y": torch.empty(3, 4)})
        assert module.backward(residuals, torch.ones_like(y)).keys() == {"w", "b"}


def test_numpy_arrays_and_inference_tensors_are_compared_by_digest_under_the_knob(module: gradc.Module) -> None:
    with torch.inference_mode():
        tensor = tensors()
        for given in ({n: t.clone().numpy() for n, t in tensor.items()}, tensor):
            with knobs.CHECK_RESIDUALS.set(True):
                _y, residuals = module.forward(given)
            given["w"][0] += 1
            with pytest.raises(InvalidProblem, match="the input 'w' was changed"):
                module.backward(residuals, np.ones((3, 4), np.float32))


def test_residuals_of_another_module_are_refused(module: gradc.Module) -> None:
    """The same names and types, another function; a copy of the module is no other."""
    other = gradc.compile(
        gradc.trace(lambda x, w, b: ops.sigmoid(x * w + b), x="f32[N,4]", w="f32[4]", b="f32[4]", name="other"),
        wrt=["w", "b"],
    )
    given = tensors()
    y, residuals = module.forward(given)
    _, strange = other.forward(given)
    with pytest.raises(
        InvalidProblem,
        match=r"these residuals are of another module: other\(x: f32\[N,4\].*kept them, and this is the backward of",
    ):
        module.backward(strange, torch.ones_like(y))
    again = gradc.compile(module.graph, wrt=module.wrt)
    for name, grad in again.backward(residuals, torch.ones_like(y)).items():
        torch.testing.assert_close(grad, module.backward(residuals, torch.ones_like(y))[name])
    strict = gradc.compile(module.graph, wrt=module.wrt, fuse=False)
    with pytest.raises(InvalidProblem, match=r"another module: .*\(fuse=True there and False here\)"):
        strict.backward(residuals, torch.ones_like(y))
    fewer = gradc.compile(module.graph, wrt=["w"])
    with pytest.raises(InvalidProblem, match="another module"):
        fewer.backward(residuals, torch.ones_like(y))


def test_residuals_of_other_sizes_are_refused(module: gradc.Module) -> None:
    _, residuals = module.forward(tensors(rows=3))
    with pytest.raises(
        InvalidProblem,
        match=(
            r"the cotangent of y has the shape \(5, 4\), and forward gave y: f32\[N,4\] of the shape \(3, 4\) \(N=3 in"
            r" that call\)"
        ),
    ):
        module.backward(residuals, torch.ones(5, 4))
    with pytest.raises(InvalidProblem, match="dims= says N=5, and these residuals are of a call with N=3"):
        module.backward(residuals, torch.ones(5, 4), dims={"N": 5})
    assert isinstance(copy.copy(residuals), type(residuals)) and issubclass(InvalidProblem, GradcError)


def test_out_of_a_backward_whose_arrays_lie_in_another_order() -> None:
    """What is not written by the kernels: torch counts the change, and flush-to-zero changes no bits."""
    module = gradc.compile(
        gradc.trace(lambda x, w: ops.sum(ops.tanh(x) * w), x="f32[N,M]", w="f32[N,M]"), wrt=["x", "w"], target="cpu"
    )
    x, w, one = torch.zeros(512, 700).t(), torch.full((700, 512), 1e-41), torch.ones(())
    _, residuals = module.forward(x=x, w=w)
    assert residuals.module is not module
    found = []
    for flush in (False, True):
        total = torch.full((700, 512), 3e-41)
        torch.set_flush_denormal(flush)
        try:
            module.backward(residuals, one, out={"x": total}, accumulate=True)
        finally:
            torch.set_flush_denormal(False)
        assert total._version == 1
        found.append(total.view(torch.int32))
    assert torch.equal(*found) and bool((found[0] > 0).all())


def test_tangents_and_traces_are_refused() -> None:
    """Forward mode would lose its tangent, a trace would keep this call's result for every other input."""
    module = gradc.compile(gradc.trace(lambda x: ops.sin(x), x="f32[N]"), wrt=["x"], target="cpu")
    x = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotDifferentiable, match="the input x has a tangent"):
            module(x=torch.autograd.forward_ad.make_dual(x, torch.ones(2)))
        assert torch.allclose(module(x=x), torch.sin(x))
    with pytest.raises(NotDifferentiable, match="the input x is traced"):
        torch.jit.trace(lambda x: module(x=x), x)
    assert torch.allclose(module(x=x), torch.sin(x))
