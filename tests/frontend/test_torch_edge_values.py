"""What torch means where gradc's own op of the name means something else, or takes no such operand: NaN, infinity,
kinks, integers that wrap around, tensors without axes or elements.  By the backend and by ``from_torch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch_compiled import agree, compiled, fresh, rand  # noqa: E402, F401

import gradc.torch  # noqa: E402

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 2.5, -3.0], dtype=torch.float64)
Program = Callable[..., Any]


class Exported(torch.nn.Module):
    """A program as a module."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program

    def forward(self, *args: Any) -> Any:
        return self.program(*args)


def check(program: Program, *inputs: torch.Tensor, exported: bool = True) -> None:
    agree(program, *inputs, equal_nan=True, smallest_region=1)
    if exported:
        given = [x.detach() for x in inputs]
        graph = gradc.from_torch(Exported(program), tuple(given))
        names = [name for name in graph.input_names if name not in graph.defaults]
        values, _ = gradc.compile(graph, target="numpy").forward(dict(zip(names, given, strict=True)))
        found = [values[name] for name in graph.output_names] if len(graph.output_names) > 1 else [values]
        wanted = program(*inputs)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        torch.testing.assert_close(
            [torch.as_tensor(y) for y in found], [y.detach() for y in wanted], rtol=1e-9, atol=1e-11, equal_nan=True
        )


def test_the_sign_of_nan_is_0() -> None:
    def program(x: Any, half: Any, i: Any) -> Any:
        return torch.sign(x), torch.sgn(x.t()), x.nan_to_num().sign() * x.nan_to_num(), half.sign(), i.sign(), i.sgn()

    check(program, SPECIAL.clone().requires_grad_(), SPECIAL.bfloat16(), torch.tensor([-3, 0, 2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_powers_by_numbers(dtype: torch.dtype) -> None:
    """A root is a square root, of -inf and -0, too, but in f16; a cube and a square are products; True is 1."""

    def program(x: Any) -> Any:
        return tuple(x**n for n in (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, True)), torch.float_power(x, 0.5)

    x = torch.cat([SPECIAL, rand(20, grad=False) * 9, torch.tensor([9.0, 1e-6, 4e4])]).to(dtype)
    values, wanted = compiled(program)(x), program(x)
    for found, each in zip((*values[0], values[1]), (*wanted[0], wanted[1]), strict=True):
        torch.testing.assert_close(found, each, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() & (found == 0), each.signbit() & (each == 0))


def test_powers_of_masks_by_masks_are_masks() -> None:
    """Also where torch's own rule for what a graph holds says that they are integers: the region leaves them out."""
    x = torch.tensor([True, False])
    for n in (True, False, 1, 2):
        torch._dynamo.reset()
        found, wanted = compiled(lambda x, n=n: x**n)(x), x**n
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_nansum_of_what_has_no_axis() -> None:
    def program(x: Any, y: Any) -> Any:
        return torch.nansum(x, 0), torch.nansum(x, -1, True), torch.nansum(x), torch.nansum(y, -1, True)

    check(program, torch.tensor(NAN, dtype=torch.float64), SPECIAL)
    check(program, rand(), rand(3, 4))


def test_distances_of_integers_wrap_around() -> None:
    """As the difference does in eager mode; of floats of two widths the distance is of the wider one."""
    pairs = torch.tensor([[1, 200, 3]], dtype=torch.uint8), torch.tensor([[5, 1, 250]], dtype=torch.uint8)
    check(lambda x, y: F.pairwise_distance(x, y), *pairs, exported=False)
    with pytest.raises(gradc.errors.Unsupported, match="pairwise_distance of integers"):
        gradc.from_torch(Exported(F.pairwise_distance), pairs)
    check(lambda x, y: F.pairwise_distance(x, y, keepdim=True), rand(2, 3), rand(2, 3).detach().float())


@pytest.mark.parametrize("name", ["int64", "int32", "uint8", "float64"])
def test_linspace(name: str) -> None:
    """Integers are cut off, their ends before the steps between."""
    spans = [(4.3, 0, 50), (0, 7, 50), (0, 100, 7), (5, 5, 3), (1.5, 9, 1), (0, 1, 0), (2, 9, 2), (9.9, 0.5, 12)]

    def program(x: Any) -> Any:
        lines = [torch.linspace(start, end, steps, dtype=getattr(torch, name)) for start, end, steps in spans]
        return x * 1, *lines

    check(program, rand(2))


def test_a_factor_that_no_unsigned_integer_is() -> None:
    """Refused before anything runs, so that torch runs the op."""
    x, i = torch.ones(5, 2, dtype=torch.uint8), torch.tensor([0, 3, 1])
    check(lambda x, i: x.index_add(0, i, x[:3] * 3, alpha=-1), x, i, exported=False)


def test_margins_of_nan() -> None:
    """A NaN exceeds no margin, and at the margin there is no gradient."""

    def program(x: Any, target: Any, several: Any) -> Any:
        return (
            F.multi_margin_loss(x, target, reduction="none"),
            F.multi_margin_loss(x, target, p=2, margin=0.5, weight=torch.ones(5, dtype=x.dtype) * 2),
            F.multilabel_margin_loss(x, several, reduction="none"),
        )

    x = rand(4, 5, grad=False)
    x[0, 1], x[1, 2], x[2, 0], x[3, 3] = NAN, INF, -INF, NAN
    target, several = torch.tensor([0, 2, 0, 3]), torch.tensor([[0, 2, -1, 0, 0]] * 2 + [[3, -1, 0, 0, 0]] * 2)
    check(program, x, target, several)
    kink = torch.tensor([[1.0, 0.0, 2.0, 0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    check(program, kink, target[:1], several[:1])


def test_logits_of_infinity() -> None:
    def program(x: Any, t: Any) -> Any:
        return F.binary_cross_entropy_with_logits(x, t, reduction="none")

    logits = torch.tensor([INF, INF, INF, -INF, NAN, 700.0, -700.0, 0.0], dtype=torch.float64)
    check(program, logits, torch.tensor([0.0, 0.25, 1.0, 0.0, 0.5, 0.0, 1.0, 0.5], dtype=torch.float64))
    check(program, rand(9), torch.linspace(0, 1, 9, dtype=torch.float64).requires_grad_())


def test_nothing_is_read_of_nothing() -> None:
    """An index that is repeated no times is not looked at."""

    def program(x: Any, y: Any, i: Any) -> Any:
        nothing = torch.zeros(0, dtype=torch.int64)
        return x.index_select(0, nothing), x[nothing], y[i.expand(0)], F.embedding(i.expand(0), y)

    check(program, rand(0, 3), rand(2, 3), torch.tensor(7))


def test_an_element_of_each_row_of_as_many_rows_as_there_are() -> None:
    """Torch's own decomposition asks for a size by an op that only TorchScript has."""

    def program(x: Any, i: Any) -> Any:
        return torch.take_along_dim(x, i[1:, None], 1)

    found = agree(program, rand(4, 3), torch.tensor([0, 2, 1, 0, 1]), dynamic=True, smallest_region=1)
    assert found[0].shape == (4, 1) and gradc.torch.report().graphs[-1].reason == ""


def test_shrinking() -> None:
    """What torch decomposes while it traces, and gradc takes whole."""

    def program(x: Any) -> Any:
        return F.softshrink(x, 0.5), F.hardshrink(x, 0.5)

    check(program, SPECIAL)
    check(program, torch.tensor([0.5, -0.5, 0.7, 0.0, -2.0], dtype=torch.float64, requires_grad=True))


def the_same_tensor(x: Any) -> Any:
    y = x * 1
    torch._foreach_add_([y, y], 1.0)
    return y * x


def views_that_overlap(x: Any) -> Any:
    y = x * 1
    torch._foreach_mul_([y, y[1:]], 3.0)
    return y * x


def the_same_row(x: Any) -> Any:
    y = x.detach() * 1
    torch._foreach_copy_([y[0], y[0]], [y[1], y[2]])
    return y * x


def columns(x: Any) -> Any:
    y = x * 1
    torch._foreach_mul_([y[:, 0], y[:, 2], y[::2, 1], y[1::2, 1]], [2.0, 3.0, 5.0, 7.0])
    return y * x


def what_was_written_before(x: Any) -> Any:
    y, z = x * 1, x.sin()
    torch._foreach_add_([y, z], [z, y], alpha=2)
    torch._foreach_sub_([y[0], y[1], y[2]], [y[1], y[0], z[2]])
    return y * z


def one_after_another(x: Any) -> Any:
    y, z = x * 1, x.sin()
    y.add_(z, alpha=2)
    z.add_(y, alpha=2)
    for each, other in ((y[0], y[1]), (y[1], y[0]), (y[2], z[2])):
        each.sub_(other)
    return y * z


def an_input(x: Any) -> Any:
    with torch.no_grad():
        torch._foreach_add_([x, x[:2]], [x * 1, x[1:] * 2])
    return x.cos()


def rows(x: Any) -> Any:
    y = x * 1
    torch._foreach_mul_([y[0], y[1], y[2]], 2.0)
    torch._foreach_add_([y[:1], y[1:]], 1.0)
    return y * x


LISTS = [the_same_tensor, views_that_overlap, the_same_row, columns, rows]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", LISTS)
def test_lists_are_written_from_the_first_to_the_last(program: Program, dynamic: bool) -> None:
    agree(program, rand(3, 4), dynamic=dynamic, smallest_region=1)
    assert gradc.torch.report().graphs[-1].reason == ""


def test_lists_that_read_what_they_have_written() -> None:
    """Torch's own gradient of such a list is that of reading all of it first."""
    agree(what_was_written_before, rand(3, 4, grad=False), whole=True)
    x = rand(3, 4)
    found, wanted = compiled(what_was_written_before)(x), one_after_another(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, wanted)))


def test_lists_of_inputs() -> None:
    agree(an_input, rand(3, 4, grad=False), whole=True)


def test_the_slope_of_sinc_in_f32() -> None:
    """Near 0, where its two terms cancel, and on both sides of where the series ends; long double is the oracle."""
    size = np.geomspace(1e-12, 30, 4001).astype("f4")
    x = np.concatenate([size, -size, [np.float32(0.0)]])
    a = x.astype(np.longdouble) * np.longdouble("3.14159265358979323846")
    near = abs(a) < 1e-2
    apart = np.where(near, 1, a)
    slope = np.where(near, -a / 3 + a**3 / 30 - a**5 / 840, (np.cos(apart) - np.sin(apart) / apart) / apart) * np.pi
    given = torch.tensor(x, requires_grad=True)
    compiled(torch.sinc)(given).sum().backward()
    assert np.all(abs(given.grad.numpy() - slope) <= 2.0**-21 * np.maximum(abs(slope), np.minimum(1, abs(a))))
