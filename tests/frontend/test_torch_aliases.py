"""What shares memory, is written in place, or is detached, through the backend gradc and ``from_torch``: values,
gradients, and which outputs are views of which, as in eager mode.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import long_tests
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten  # noqa: E402
from torch_compiled import agree, compiled, fresh, rand  # noqa: E402, F401
from torch_samples import CALLS  # noqa: E402

import gradc.torch  # noqa: E402
from benchmarks.opinfo import op_db  # noqa: E402
from gradc.errors import Unsupported  # noqa: E402
from gradc.runtime.torch_private import private  # noqa: E402
from gradc.torch import table  # noqa: E402
from gradc.torch.normal_form import normal_form  # noqa: E402

Program = Callable[..., Any]
Groups = dict[str, list[Program]]
WHOLE: Groups = {}
LEFT: Groups = {}


def whole(program: Program) -> Program:
    """A program that gradc takes whole."""
    WHOLE[program.__name__] = [program]
    return program


def left(reason: str) -> Callable[[Program], Program]:
    """A program that is left to torch."""

    def register(program: Program) -> Program:
        LEFT.setdefault(reason, []).append(program)
        return program

    return register


# -- detached ----------------------------------------------------------------------------------------------------------


@whole
def detached_and_its_base_written(x: Any) -> Any:
    y = x * 2
    t = y.detach()
    y.mul_(3)
    return y * t


@whole
def data_and_its_base_written(x: Any) -> Any:
    y = x * 2
    t = y.data
    y.mul_(x)
    return y * t


@whole
def detached_and_another_view_written(x: Any) -> Any:
    y = x * 2
    t = y.t().detach()[1:3]
    y.view(-1)[1:7].mul_(3)
    return y[:, 1:3].t() * t, t * x[:, 1:3].t()


@whole
def a_detached_constant_whose_base_gets_a_gradient(x: Any) -> Any:
    z = torch.zeros(3, 4, dtype=x.dtype)
    t = z.detach()
    z.add_(x)
    return t * x, z * t


@whole
def a_detached_constant_that_is_written(x: Any) -> Any:
    z = torch.ones(3, 4, dtype=x.dtype)
    z.detach().mul_(4)
    return z * x


@whole
def detached_outputs(x: Any) -> Any:
    y = x * 2
    return y, y.detach(), x.detach(), x.detach()[0], x


@whole
def detached_in_place(x: Any) -> Any:
    y = x * 2
    y.detach_()
    return y + x, y + 1


@whole
def detached_in_place_by_a_function(x: Any) -> Any:
    y = x * 2
    return torch.detach_(y) * x + y


@whole
def detached_in_place_after_a_use_and_before_a_write(x: Any) -> Any:
    y = x * 2
    z = y * 3
    y.detach_()
    y.add_(x)
    return z + y, y


@whole
def views_under_no_grad(x: Any) -> Any:
    y = x * 2
    with torch.no_grad():
        v, w = y.view(-1), torch.einsum("ij->ji", y)
        z = torch.zeros(3, 4, dtype=x.dtype)
        z[0].add_(y[0])
    return y, v * x.view(-1), w * x.t(), z * x


@left("another tensor shares memory")
def detached_in_place_beside_a_view(x: Any) -> Any:
    y = x * 2
    v = y.view(-1)
    y.detach_()
    return y.sum() + v.sum() + x.sum()


@left("detach() or no_grad cut off")
def data_written(x: Any) -> Any:
    y = x * 2
    y.data.mul_(2)
    return y * x


@left("detach() or no_grad cut off")
def detached_written_among_several(x: Any) -> Any:
    y = x * 2
    torch._foreach_mul_([y.detach()], 2.0)
    return y * x


@left("detach() or no_grad cut off")
def bits_written(x: Any) -> Any:
    y = x * 2
    y.view(torch.int64).bitwise_and_(-(2**52))
    return y * x


@left("detach() or no_grad cut off")
def a_gradient_written_to_a_detached_constant(x: Any) -> Any:
    z = torch.ones(3, 4, dtype=x.dtype)
    t = z.detach()
    t.mul_(x)
    return z * x, t


@whole
def constants_over_what_has_a_gradient(x: Any) -> Any:
    a, b, c, d, e = (x * n for n in range(1, 6))
    a.zero_()
    b.fill_(2)
    c[:] = 1
    d.copy_(torch.ones(4, dtype=x.dtype))
    e.t().view(4, 3).fill_(torch.tensor(3.0, dtype=x.dtype))
    return a, b, c, d, e, a * x, e.exp(), x.exp()


@whole
def comparisons_over_what_has_a_gradient(x: Any) -> Any:
    compared = [x * n for n in range(1, 8)]
    for y, name in zip(compared, ("eq", "ne", "lt", "le", "gt", "ge"), strict=False):
        getattr(y, f"{name}_")(x.detach() if name in ("eq", "lt") else 1.0)
    compared[6].ge_(x)
    return *compared, compared[3] * x


@whole
def constants_over_constants_and_parts(x: Any) -> Any:
    z, y = torch.ones(3, 4, dtype=x.dtype), x * 2
    z.zero_()
    y[1:].zero_()
    y[0].mul_(x[0])
    u = x * 3
    u.zero_()
    u.add_(z)
    with torch.no_grad():
        v = x * 2
        v.zero_()
    return z, y, u, v, z + x


@whole
def what_no_gradient_reaches_over_what_has_one(x: Any) -> Any:
    a, b, c, d, e = (x * n for n in range(1, 6))
    a.copy_(x > 0)
    b.copy_((x > 0).to(torch.int64).t().reshape(3, 4))
    c[:] = torch.zeros_like(c)
    d.copy_(torch.full_like(x, 3.0))
    e.t().copy_(x.new_ones(4, 3))
    return a, b, c, d, e, b * x, e.exp(), x.exp()


@whole
def constants_made_before_other_writes(x: Any) -> Any:
    k, m, y, z, u = torch.ones(3, 4, dtype=x.dtype), torch.ones(4, dtype=x.dtype), x * 2, x * 3, x * 4
    y.mul_(x)
    z.copy_(k)
    k.zero_()
    u.fill_(m[0])
    return y, z, k, u, m * x, x.exp()


# -- views that torch does not write back from -------------------------------------------------------------------------

NOT_BACK = "does not write back"


@left(NOT_BACK)
def windows_with_gaps_written(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 1, 3).mul_(2)
    return y


@left(NOT_BACK)
def a_part_of_overlapping_windows_written(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 2, 1)[:, 1].mul_(2)
    return y


@left(NOT_BACK)
def windows_of_an_argument_written(x: Any) -> Any:
    y = x.detach().clone()
    u = y.unfold(0, 2, 2)
    y.add_(1)
    u.add_(1)
    return y * x


@left(NOT_BACK)
def a_row_of_an_expanded_one_written(x: Any) -> Any:
    y = x[:1] * 1
    v = y.expand_as(x)
    v[0].mul_(x[1])
    return y, v


@left(NOT_BACK)
def a_row_of_a_broadcast_one_written(x: Any) -> Any:
    y = x[:1] * 1
    v, _ = torch.broadcast_tensors(y, x)
    v[2].add_(1)
    return y * x


@left(NOT_BACK)
def strides_of_its_own_written(x: Any) -> Any:
    y = x * 1
    y.as_strided((2, 2), (3, 1)).mul_(2)
    return y


@left(NOT_BACK)
def strides_set_in_place_and_written(x: Any) -> Any:
    y = x * 1
    y.as_strided_((2, 2), (3, 1))
    y.mul_(2)
    return y


@left(NOT_BACK)
def memory_shared_without_a_view(x: Any) -> Any:
    y = x * 1
    a, b = torch.unsafe_chunk(y, 2, 1)
    a.mul_(2)
    return a * b, y


@whole
def an_expanded_view_whose_base_is_written(x: Any) -> Any:
    y = x[:1] * 1
    v, w = y.expand_as(x), torch.broadcast_tensors(y, x)[0]
    y.mul_(3)
    return y, v * x, w.sum()


# -- views that are none in the schema, or under a condition -----------------------------------------------------------


@whole
def einsum_written(x: Any) -> Any:
    y = x * 1
    z = torch.einsum("ij->ji", y)
    z += 1
    return z, y


@whole
def einsum_of_a_diagonal_and_its_base_written(x: Any) -> Any:
    y = x[:, :3] * 1
    z, total = torch.einsum("ii->i", y), torch.einsum("ij->", y)
    y.mul_(x[:, 1:])
    return z * 2, y, total, torch.einsum("ij,jk->ik", y, x)


@whole
def type_as_written(x: Any) -> Any:
    y = x * 1
    y.type_as(x).mul_(3)
    return y, y.type_as(x), y.type_as(torch.ones(1))


@whole
def broadcast_tensors_written(x: Any) -> Any:
    a, b = x[:1] * 1, x * 1
    v, w = torch.broadcast_tensors(a, b)
    w.mul_(3)
    a.add_(x[1:2])
    return a, b * v, w


@whole
def conditional_copies(x: Any) -> Any:
    y = x * 1
    y.contiguous().mul_(2)
    y.to(x.dtype).add_(1)
    y.reshape(2, 6).mul_(2)
    y.flatten().add_(1)
    y.sum_to_size(3, 4).mul_(2)
    torch.atleast_2d(y).add_(1)
    torch.cartesian_prod(y[0]).mul_(2)
    torch.meshgrid(y[1], indexing="ij")[0].mul_(2)
    y.t().contiguous().mul_(7)
    y.t().reshape(2, 6).mul_(7)
    return y, y.to(x.dtype, copy=True), y.ravel()


@whole
def dropouts_that_drop_nothing(x: Any) -> Any:
    y = x * 1
    F.dropout(y, 0.5, False).mul_(2)
    F.dropout(y, 0.0, True).add_(x)
    F.dropout1d(y, 0.5, False).mul_(2)
    F.alpha_dropout(y, 0.0, True).add_(1)
    F.feature_alpha_dropout(y, 0.3, False).mul_(x)
    return y, torch.dropout(y, 0.0, True), F.dropout(x, training=False)


@whole
def a_view_as_a_dtype_which_passes_no_gradient_on(x: Any) -> Any:
    y = x * 2
    v = y.view(x.dtype)
    y.mul_(3)
    return y * v


@whole
def parts_beside_what_they_are_of(x: Any) -> Any:
    y = x * 2
    a, b = y.chunk(2, 1)
    c, d, e = y.unbind(0)
    return y, a, (b * 3).exp(), c.exp() + 1, d, e[1:], x.split(2, 1)[1]


@whole
def views_that_are_read_and_returned(x: Any) -> Any:
    y = x * 2
    v = y.view(-1)[1:]
    a, b = y.chunk(2, 1)
    p = x[1:]
    return y, v, v * 2, a, a.exp() + b, p, p.sin()


@whole
def a_view_of_what_only_it_returns(x: Any) -> Any:
    v = (x * 2)[1:]
    w = v.t()
    return v, v.sin(), w, w.cos()


@whole
def copies_that_are_equal(x: Any) -> Any:
    y = x.exp() * 2
    return y, y.clone(), x.exp() * 2, x.clone(), x.clone(), x * 1


@whole
def diagonals_written(x: Any) -> Any:
    y = x * 2
    d = y.diagonal(1)
    y.diagonal(-1).mul_(3)
    d.copy_(x[:, 1])
    y[:, 1:].diagonal().fill_(2)
    torch.stack([y, x]).movedim(0, -1).diagonal(0, -2, 0).sub_(1)
    return y * x, d, d * 3, torch.diagonal_scatter(y, x[0, :2], -1)


@whole
def windows_of_what_is_written(x: Any) -> Any:
    y = x * 2
    u, v = y.unfold(-1, 2, 2), y.unfold(0, 2, 1)
    y[:, 1].zero_()
    y.add_(x)
    return u, u * 3, v[1] * x[1:, 0].sum(), y * x


# -- in place, out= ----------------------------------------------------------------------------------------------------


@whole
def metadata_written(x: Any) -> Any:
    y, z = (x * 2)[None], x * 3
    v, w = y[0], z.view(-1)
    y.squeeze_(0)
    z.t_()
    y.mul_(2)
    z.add_(1)
    return v, y, w, z


@left("other ways than an op")
def an_out_that_no_op_writes(x: Any) -> Any:
    rank = torch.empty((), dtype=torch.int64)
    torch.linalg.matrix_rank(x, out=rank)
    return rank * x


@left("torch mixes them up")
def operands_written_beside_an_out(x: Any) -> Any:
    out = [torch.empty(*shape, dtype=x.dtype) for shape in ((3, 4), (4,), (4,))]
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    torch._native_batch_norm_legit(x.detach(), None, None, mean, var, True, 0.1, 1e-5, out=tuple(out))
    return out[0] * x, out[1] * x, mean * x


@long_tests.values
@pytest.mark.parametrize("name", WHOLE)
def test_programs_that_gradc_takes_whole(name: str) -> None:
    """Values, gradients, and what shares memory with what; the same of their exports."""
    (program,) = WHOLE[name]
    agree(program, rand(3, 4), whole=True)
    x = rand(3, 4)
    assert sharing(compiled(program), x) == sharing(program, x)
    if ".data" not in inspect.getsource(program):  # which torch.export does not take
        check_export(program, rand(3, 4))


def nodes_of(monkeypatch: pytest.MonkeyPatch, program: Program, *inputs: Any) -> list[Any]:
    """The targets of the nodes of a program's normal form."""
    found = []

    def kept(*args: Any, **kwargs: Any) -> Any:
        found.append(normal_form(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(gradc.torch.dynamo, "normal_form", kept)
    compiled(program, fallback="error")(*inputs)
    return [node.target for form in found for node in form.module.graph.nodes]


def test_what_needs_no_gradient_is_overwritten_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is read by nobody: a cache after another tensor was written to, numbers, all of it where nothing
    is recorded.
    """

    def program(x: Any, cache: Any) -> Any:
        y, numbers, bools = x * 2, torch.zeros(3, dtype=torch.int64), x > 0
        y.mul_(x)
        cache.zero_()
        cache.copy_(y.detach())
        numbers.copy_(bools[:, 0])
        bools.fill_(True)
        return y * cache, numbers, bools

    def overwritten(x: Any) -> Any:
        y = x * 2
        y.zero_()
        return y + 1

    where = torch.ops.aten.where.self
    cache = rand(3, 4, grad=False)
    targets = nodes_of(monkeypatch, program, rand(3, 4), cache)
    assert torch.ops.aten.mul.Tensor in targets and where not in targets
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            targets = nodes_of(monkeypatch, overwritten, rand(3, 4))
        assert targets and where not in targets
    assert where not in nodes_of(monkeypatch, overwritten, rand(3, 4, grad=False))
    assert where in nodes_of(monkeypatch, overwritten, rand(3, 4))


def test_constants_over_what_is_not_finite() -> None:
    """Values are the constants; a gradient of zeros times what is infinite is NaN, as in eager mode."""

    def program(x: Any) -> Any:
        a, b = x / 0, x * torch.inf
        a.zero_()
        b.copy_(x > 0)
        return a, b, a * x, b + x

    outputs = agree(program, rand(3, 4), whole=True, equal_nan=True)
    assert all(y.isfinite().all() for y in outputs)


def test_indices_over_what_has_a_gradient() -> None:
    """Torch runs ``argmax`` of what has a gradient where floats are made of it."""

    def program(x: Any) -> Any:
        a, b, c = x * 1, x * 2, x * 3
        a.copy_(x.argmax(-1, keepdim=True))
        b.fill_(x.argmax())
        c.copy_(F.one_hot(x.argmax(-1), 4))
        return a, b, c, a * x, x.exp()

    agree(program, rand(3, 4))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_is_overwritten_is_not_computed(target: str) -> None:
    """Forward kernels are those of the program without the writes; backward ones, too, of what writes what has a
    gradient itself.
    """

    def copied(x: Any) -> Any:
        y = x.sin()
        y.copy_(x.tanh())
        return y * x

    def uncopied(x: Any) -> Any:
        return x.tanh() * x

    def constants(x: Any) -> Any:
        y, z = x.sin(), x.sin() * x
        y.zero_()
        z.copy_(x > 0)
        return y + x, z

    def unwritten(x: Any) -> Any:
        return torch.zeros_like(x) + x, (x > 0).to(x.dtype)

    for written, plain, recorded in ((copied, uncopied, True), (constants, unwritten, False)):
        modules = []
        for program in (written, plain):
            graph = gradc.from_torch(Exported(program), (rand(3, 4, grad=False),), name="f")
            modules.append(gradc.compile(graph, graph.input_names if recorded else (), target, unused="zeros"))
        sources = [re.sub(r"\w+\.py:\d+", "", module.source()) for module in modules]
        assert sources[0] == sources[1]


def written_by_the_caller(program: Program, at: int) -> list[Any]:
    """What a write to one output changes: outputs, the argument, its gradient."""
    torch.manual_seed(0)
    leaf = rand(3, 4)
    x = leaf * 1
    outputs = program(x)
    outputs[at].mul_(5)
    values = [y.detach().clone() for y in (*outputs, x)]
    return [*values, *torch.autograd.grad(sum(y.sum() for y in (*outputs, x)), leaf)]


@pytest.mark.parametrize("at", range(4))
def test_a_caller_writes_to_a_view_that_was_read(at: int) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        v, p = y.view(-1)[1:], x[1:]
        return y, v, p, p.t()[1:], v * 3, p + 1, p.t()[1:] * 2

    got, want = (written_by_the_caller(f, at) for f in (compiled(program, fallback="error"), program))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reason", LEFT)
def test_programs_that_are_left_to_torch(reason: str) -> None:
    for program in LEFT[reason]:
        gradc.torch.report().clear()
        agree(program, rand(3, 4))
        assert any(reason in graph.reason for graph in gradc.torch.report().graphs), program.__name__
        if ".data" not in inspect.getsource(program):
            with pytest.raises(Unsupported) as caught:
                gradc.from_torch(Exported(program), (rand(3, 4, grad=False),))
            assert reason in str(caught.value), program.__name__


DRAWING = (
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "random_"),
    *("geometric_", "bernoulli_", "dropout_", "rrelu_"),
)


@pytest.mark.parametrize("name", DRAWING)
def test_what_draws_in_place(name: str) -> None:
    """The numbers of eager mode, and its gradients."""
    known = {
        "geometric_": lambda y: y.geometric_(0.5),
        "bernoulli_": lambda y: y.bernoulli_(0.5),
        "dropout_": lambda y: F.dropout(y, 0.5, True, inplace=True),
        "rrelu_": lambda y: F.rrelu(y, training=True, inplace=True),
    }

    def function(x: Any) -> Any:
        y = x * 2
        z = y.view(-1)
        known.get(name, lambda y: getattr(y, name)())(y)
        return y * x + z.view(3, 4), y * 3

    agree(function, rand(3, 4))


def test_a_buffer_and_what_is_detached_from_it() -> None:
    """What the caller writes to an output afterwards is written to the argument or buffer that it is a view of."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            before = self.seen.detach()
            self.seen.add_(x.detach())
            return self.seen.type_as(x), before * x, torch.einsum("i->i", self.seen), x.detach()

    ours, theirs = Counting(), Counting()
    for call, model in ((compiled(ours, fallback="error"), ours), (theirs, theirs)):
        x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            seen, product, view, argument = call(x)
            product.sum().backward()
            seen.mul_(3)
            view.add_(1)
            argument.add_(1)
        model.results = [model.seen, x.detach(), x.grad, product.detach(), seen, view]
    torch.testing.assert_close(ours.results, theirs.results)


def memory(x: Any) -> int:
    return x.untyped_storage().data_ptr()  # type: ignore[no-any-return]


def sharing(call: Program, *inputs: Any) -> list[list[bool]]:
    """Which of inputs and outputs lie in the same memory."""
    outputs = call(*inputs)
    every = [*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,))]
    return [[memory(a) == memory(b) for a in every] for b in every]


class Exported(torch.nn.Module):
    """A program as a module."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program

    def forward(self, x: Any) -> Any:
        return self.program(x)


def check_export(program: Program, x: Any) -> None:
    """Values and the gradient of the sum of what has one, through ``gradc.from_torch``."""
    graph = gradc.from_torch(Exported(program), (x.detach(),))
    (given,) = [name for name in graph.input_names if name not in graph.defaults]
    given_x = x.detach().clone().requires_grad_()
    wanted = program(given_x)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    names = graph.output_names[: len(wanted)]
    module = gradc.compile(graph, wrt=[given], target="numpy", unused="zeros")
    values, residuals = module.forward({given: x.detach()})
    found = [values[name] for name in names] if len(graph.output_names) > 1 else [values]
    torch.testing.assert_close([torch.as_tensor(y) for y in found], [y.detach() for y in wanted])
    recorded = [y.requires_grad for y in wanted]
    cotangents = {n: torch.ones_like(y) if r else None for n, y, r in zip(names, wanted, recorded, strict=True)}
    grads = module.backward(residuals, **cotangents)
    (want,) = torch.autograd.grad([y.sum() for y, r in zip(wanted, recorded, strict=True) if r], [given_x])
    torch.testing.assert_close(torch.as_tensor(grads[given]), want)


# -- every op of which torch has samples -------------------------------------------------------------------------------


class OnCopies:
    """A call whose tensors are copied first, as a leaf is not written to.

    :ivar flat, spec: its arguments.  :ivar places: of the tensors among them.
    """

    flat: list[Any]
    spec: Any
    places: list[int]

    def copied(self, tensors: Sequence[Any]) -> tuple[list[Any], Any, Any]:
        """The copies, and the arguments with them."""
        copies = [x * 1 if x.is_floating_point() else x.clone() for x in tensors]
        flat = list(self.flat)
        for i, x in zip(self.places, copies, strict=True):
            flat[i] = x
        return copies, *tree_unflatten(flat, self.spec)


class Case(OnCopies):
    """A sample of an op as a function of its tensors, which are copied first: what it gives, and what it wrote to."""

    def __init__(self, op: Any, sample: Any, kind: str):
        self.name, self.op, self.kind = f"{title(op)}, {kind}", op, kind
        self.flat, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.places = [i for i, x in enumerate(self.flat) if isinstance(x, torch.Tensor)]
        self.tensors = [self.flat[i].detach() for i in self.places]
        for x in self.tensors:  # out= has no gradient
            x.requires_grad_(x.is_floating_point() and kind != "out")
        self.__name__, self.__module__ = "case", __name__

    def __call__(self, *tensors: Any, out: Any = None) -> list[Any]:
        copies, args, kwargs = self.copied(tensors)
        if self.kind == "in place":
            self.op.inplace_variant(*args, **kwargs)
            return [args[0], args[0] * tensors[0]]
        if out is not None:
            self.op(*args, **kwargs, out=out)
            return [x * 1 for x in tree_leaves(out)]
        results = [y for y in tree_leaves(self.op(*args, **kwargs)) if isinstance(y, torch.Tensor)]
        written = (
            results if self.kind == "a result is written" else copies if self.kind == "the base is written" else []
        )
        for x in written:
            if x.is_floating_point():
                x.mul_(3)
        return [*results, *copies]


def title(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples(op: Any, count: int) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), count))
        except Exception:  # of ops that this build of torch lacks
            return []


def gradients(outputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    leaves = [x for x in tensors if x.requires_grad]
    recorded = [y for y in outputs if y.grad_fn is not None]
    halves = [torch.full_like(y, 0.5) for y in recorded]
    return list(torch.autograd.grad(recorded, leaves, halves, True, allow_unused=True)) if recorded and leaves else []


def matrix(tensors: Sequence[Any]) -> list[list[bool]]:
    return [[a.numel() > 0 and memory(a) == memory(b) for a in tensors] for b in tensors]


class Bare(torch.nn.Module):
    """A graph of cases, which no code could name."""

    def __init__(self, graph: Any):
        super().__init__()
        self.graph = graph

    def forward(self, *args: Any) -> Any:
        return torch.fx.Interpreter(self, garbage_collect_values=False).run(*args)


def check_cases(cases: Sequence[Case], whole: bool = True) -> None:
    """All cases as one graph through the backend against eager mode, which takes each of them.

    :param whole: whether the graph must have a normal form.
    """
    graph, arguments, counts, expected = torch.fx.Graph(), [], [], []
    for i, case in enumerate(cases):
        outs: Any = None
        if case.kind == "out":
            outs = tree_map_only(torch.Tensor, torch.empty_like, case.like)
        outputs = case(*case.tensors, **({} if outs is None else {"out": outs}))
        recorded = [y.requires_grad for y in outputs]
        expected.append(([y.detach() for y in outputs], recorded, gradients(outputs, case.tensors), matrix(outputs)))
        given = [graph.placeholder(f"x{i}_{j}") for j in range(len(case.tensors))]
        arguments += case.tensors
        options = {}
        if outs is not None:
            flat, spec = tree_flatten(outs)
            nodes = [graph.placeholder(f"out{i}_{j}") for j in range(len(flat))]
            arguments += [torch.empty_like(x) for x in flat]
            options["out"] = tree_unflatten(nodes, spec)
        called = graph.call_function(case, tuple(given), options)
        counts.append([graph.call_function(lambda all, at: all[at], (called, j)) for j in range(len(outputs))])
    graph.output(tuple(itertools.chain(*counts)))
    gradc.torch.report().clear()
    found = iter(gradc.torch.backend(Bare(graph), arguments, options={"target": "numpy"})(*arguments))
    reasons = [g.reason for g in gradc.torch.report().graphs if g.reason]
    assert bool(reasons) != whole, ([case.name for case in cases], reasons)
    wrong = {}
    for case, nodes, (values, recorded, grads, shared) in zip(cases, counts, expected, strict=True):
        ours = [next(found) for _ in nodes]
        try:
            torch.testing.assert_close([y.detach() for y in ours], values, equal_nan=True)
            for got, want in zip(gradients(ours, case.tensors) or [None] * len(grads), grads, strict=True):
                if got is None and want is None:
                    continue
                zeros = torch.zeros_like(want if got is None else got) if want is None or got is None else None
                torch.testing.assert_close(*(zeros if x is None else x for x in (got, want)), equal_nan=True)
            assert matrix(ours) == shared, "what shares memory"
            assert [y.requires_grad for y in ours] == recorded, "which outputs require grad"
        except AssertionError as error:
            wrong[case.name] = str(error)
    assert not wrong, wrong


def in_eager(case: Case) -> bool:
    """Whether eager mode takes a case."""
    try:
        if case.kind == "out":
            args, kwargs = tree_unflatten(case.flat, case.spec)
            case.like = case.op(*args, **kwargs)
            flat = tree_leaves(case.like)
            if not all(isinstance(y, torch.Tensor) and y.layout is torch.strided for y in flat):
                return False
            case.like = case.like if isinstance(case.like, torch.Tensor) else tuple(case.like)
            case(*case.tensors, out=tree_map_only(torch.Tensor, torch.empty_like, case.like))
        else:
            gradients(case(*case.tensors), case.tensors)
    except Exception:  # views of several, overlapping writes, no derivative
        return False
    return True


def shares(op: Any, sample: Any) -> bool:
    """Whether an op gives memory of an operand, or one memory twice."""
    operands = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    try:
        results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    except Exception:  # samples that need another device
        return False
    dense = [[x for x in xs if isinstance(x, torch.Tensor) and x.layout is torch.strided] for xs in (operands, results)]
    own, given = ([memory(x) for x in xs if x.numel()] for xs in dense)
    return bool(set(own) & set(given)) or len(set(given)) < len(given)


SEEDED = (
    "bernoulli cauchy exponential geometric log_normal multinomial normal normal.in_place uniform"
    " nn.functional.dropout nn.functional.rrelu"
).split()
"""Ops whose samples set torch's seed themselves, within the call; :data:`DRAWING` has them."""

VIEWS = """
broadcast_to broadcast_tensors cartesian_prod chunk unsafe_chunk contiguous sum_to_size positive conj conj_physical
resolve_conj resolve_neg expand expand_as diagonal meshgrid.variadic_tensors meshgrid.list_of_tensors as_strided
as_strided.partial_views to narrow permute real split split.list_args unsafe_split split_with_sizes select slice hsplit
vsplit dsplit ravel reshape reshape_as view view_as atleast_1d atleast_2d atleast_3d flatten unflatten __getitem__
double unbind unfold movedim squeeze squeeze.multiple unsqueeze transpose T H mT mH t nn.functional.alpha_dropout
nn.functional.feature_alpha_dropout.without_train linalg.diagonal masked.prod
""".split()
"""What gives memory of an operand, or one memory twice, for a sample of torch's."""

NO_FORM = {
    "a result is written": "as_strided as_strided.partial_views unfold unsafe_chunk unsafe_split",
    "the base is written": "unsafe_chunk unsafe_split",
    "in place": " ".join(
        [f"polygamma.polygamma_n_{n}" for n in range(5)] + [f"logical_{n}" for n in ("not", "and", "or", "xor")]
    ),
    "out": "linalg.matrix_rank linalg.matrix_rank.hermitian",
}
"""What is left to torch, of each kind of case."""

BATCH = 16


def cases_of(kind: str) -> list[Case]:
    """A case of each op of torch's samples that there is one of."""
    found = []
    for op in op_db():
        if title(op) in (*SEEDED, "tensor_split"):  # whose sizes are data
            continue
        if (kind == "in place" and op.inplace_variant is None) or (kind == "out" and not writes_by_other_ops(op)):
            continue
        if "written" in kind and title(op) not in VIEWS:
            continue
        drawn = samples(op, 12 if "written" in kind else 1)
        chosen = next((s for s in drawn if shares(op, s)), None) if "written" in kind else next(iter(drawn), None)
        if chosen is not None and (case := Case(op, chosen, kind)).places and in_eager(case):
            found.append(case)
    return found


def writes_by_other_ops(op: Any) -> bool:
    """Whether its out= is written by the ops that it is made of, not by one of which torch knows a functional form."""
    packet = getattr(torch.ops.aten, op.aten_name or "", None) if op.supports_out else None
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return any("out" in o._overloadname and o.has_kernel_for_dispatch_key(COMPOSITE) for o in overloads)


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@long_tests.values
@pytest.mark.parametrize("kind", NO_FORM)
def test_ops_that_share_memory_or_write(kind: str) -> None:
    """A sample of each op of which eager mode gives memory of an operand, of each in-place form and of each out= that
    is made of other ops: right, or left to torch where :data:`NO_FORM` says so.
    """
    cases = cases_of(kind)
    apart = NO_FORM[kind].split()
    taken = [case for case in cases if title(case.op) not in apart]
    assert len(taken) > 20
    for start in range(0, len(taken), BATCH):
        check_cases(taken[start : start + BATCH])
    names = {title(case.op) for case in cases}
    for case in cases:
        if title(case.op) in apart:
            check_cases([case], whole=False)
    assert names.issuperset(apart)


# -- every in-place and out= form of every overload of the table -------------------------------------------------------


class Form(OnCopies):
    """An overload that writes in place, or to what is given as out, on the arguments of a call of the one that writes
    nowhere; what it leaves in its tensors.
    """

    def __init__(self, overload: Any, functional: Any, args: Any, kwargs: Any):
        self.name, self.overload = str(overload), overload
        self.outs = [a.name for a in overload._schema.arguments if a.is_out]
        self.kind = "out" if self.outs else "in place"
        self.flat, self.spec = tree_flatten((args, kwargs))
        self.places = [i for i, x in enumerate(self.flat) if isinstance(x, torch.Tensor)]
        self.tensors = [self.flat[i].detach().clone() for i in self.places]
        if self.outs:
            like = [y.detach() for y in tree_leaves(functional(*args, **kwargs))]
            self.like = tuple(like) if len(like) > 1 else like[0]
        for x in self.tensors:
            x.requires_grad_(x.is_floating_point() and not self.outs)
        self.__name__, self.__module__ = "form", __name__

    def __call__(self, *tensors: Any, out: Any = None) -> list[Any]:
        copies, args, kwargs = self.copied(tensors)
        self.overload(*args, **kwargs, **dict(zip(self.outs, tree_leaves(out), strict=bool(self.outs))))
        return [x * 1 for x in (*tree_leaves(out), *copies)] if self.outs else copies


def overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, each) for each in packet.overloads()] if packet is not None else []


def arguments_of(overload: Any) -> list[str]:
    return [str(a.type) for a in overload._schema.arguments if not a.is_out]


class Calls(private("TorchDispatchMode")):  # type: ignore[misc]
    """Keeps the arguments of two calls of each overload that is asked for."""

    def __init__(self, found: dict[Any, list[Any]]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.found.get(function, "two")) < 2:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if all(x.layout is torch.strided and not x.is_complex() for x in tensors):
                self.found[function].append(tree_map_only(torch.Tensor, torch.clone, (args, kwargs or {})))
        return function(*args, **(kwargs or {}))


def forms() -> list[Form]:
    """One for each overload that a line's op has in place or with out=, where samples of torch's, or the arguments of
    :data:`CALLS`, call the functional one, and eager mode takes it.
    """
    names = sorted({key.split(".")[1] for key in table.lines() if key.startswith("aten.")})
    functional = {name: [o for o in overloads(name) if not o._schema.is_mutable] for name in names}
    found: dict[Any, list[Any]] = {o: [] for each in functional.values() for o in each}
    for op in op_db():
        torch.manual_seed(0)
        for sample in samples(op, 4):
            with contextlib.suppress(Exception), Calls(found):  # samples that need another device, or are refused
                op(sample.input, *sample.args, **sample.kwargs)
    for key in CALLS:
        overload = table.lines()[key].overload
        if overload in found and not found[overload]:
            found[overload].append(CALLS[key]())
    made = []
    for name in names:
        for overload in (
            *overloads(f"{name}_"),
            *(o for o in overloads(name) if any(a.is_out for a in o._schema.arguments)),
        ):
            twins = [o for o in functional[name] if arguments_of(o) == arguments_of(overload)]
            calls = [(twin, *call) for twin in twins for call in found[twin]]
            for twin, args, kwargs in calls:
                with contextlib.suppress(Exception), warnings.catch_warnings():  # of what eager mode does not take
                    warnings.simplefilter("ignore")
                    form = Form(overload, twin, args, kwargs)
                    outs = tree_map_only(torch.Tensor, torch.empty_like, form.like) if form.outs else None
                    gradients(form(*form.tensors, out=outs), form.tensors)
                    made.append(form)
                    break
    return made


WITHOUT_FORM = {
    *(f"aten.logical_{name}_.default" for name in ("not", "and", "or", "xor")),
    "aten.repeat_interleave.Tensor_out",
}
"""What is left to torch as a graph: a gradient of what was overwritten, sizes that are data."""


@long_tests.values
def test_every_form_that_writes() -> None:
    """Values, gradients, which outputs require grad; ``detach_`` is no op to a tracer, and its programs stand above."""
    found = [form for form in forms() if form.name != "aten.detach_.default"]
    assert len(found) > 440
    taken = [form for form in found if form.name not in WITHOUT_FORM]
    for start in range(0, len(taken), BATCH):
        check_cases(taken[start : start + BATCH])
    for form in found:
        if form.name in WITHOUT_FORM:
            check_cases([form], whole=False)
