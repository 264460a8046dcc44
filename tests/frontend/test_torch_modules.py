"""Every module of torch's own database (``module_db``) by the backend gradc: against eager mode.

An input of each, and in the long test all inputs but of those that have hundreds. Of each two steps in f64, in training
and in evaluation where these differ: outputs with their strides and whether they require grad,
gradients of the first and of the second order of inputs and parameters, buffers, what the inputs hold afterwards, and
the state of the random numbers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import long_tests  # noqa: E402
from torch.nn.utils.rnn import PackedSequence  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402
from torch_compiled import compiled, fresh  # noqa: E402, F401

from benchmarks.opinfo import op_db  # noqa: E402

# The database takes seconds to import; test_these_are_all_modules holds the names to it.
NAMES = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d
AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d CELU Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
ConvTranspose3d CosineEmbeddingLoss ELU FractionalMaxPool2d FractionalMaxPool3d L1Loss SmoothL1Loss LazyConv1d
LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d Linear Bilinear LPPool1d LPPool2d
LPPool3d MaxPool1d MaxPool2d MaxPool3d KLDivLoss MSELoss MarginRankingLoss MultiLabelMarginLoss MultiMarginLoss
SoftMarginLoss MultiLabelSoftMarginLoss NLLLoss GaussianNLLLoss PoissonNLLLoss HingeEmbeddingLoss HuberLoss BCELoss
BCEWithLogitsLoss CrossEntropyLoss LinearCrossEntropyLoss CTCLoss GELU GLU GroupNorm Hardshrink Hardswish Hardtanh
InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm LayerNorm RMSNorm TransformerEncoder
TransformerEncoderLayer TransformerDecoderLayer Transformer MultiheadAttention Embedding ReLU LeakyReLU ReLU6 PReLU
RNNCell GRUCell LSTMCell Sigmoid LogSigmoid SiLU Softmax Softmax2d LogSoftmax Softmin Softplus Softshrink Softsign
Tanh Tanhshrink Threshold Mish RNN GRU LSTM ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d
ReplicationPad2d ReplicationPad3d SELU ZeroPad1d ZeroPad2d ZeroPad3d CircularPad1d CircularPad2d CircularPad3d
ConstantPad1d ConstantPad2d ConstantPad3d
""".split()
LARGE = {"GRU", "LSTM", "RNN", "Transformer", "TransformerEncoder", "TransformerEncoderLayer"}
LARGE |= {"MultiheadAttention", "TransformerDecoderLayer"}
"""Those that the long test alone tries."""
MOST = 24
"""Inputs of a module that the long test takes, spread over those there are (hundreds of some losses)."""


@cache
def database() -> Mapping[str, Any]:
    op_db()  # with what stands for a package that torch's tests need
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.name.removeprefix("nn."): info for info in module_db}


def test_these_are_all_modules() -> None:
    """A later release has more: they are tried where the tests' own is the one at hand."""
    assert set(NAMES) <= database().keys()
    if torch.__version__.startswith("2.13."):
        assert set(NAMES) == database().keys()


def tensors(value: Any) -> list[Any]:
    if isinstance(value, PackedSequence):  # a leaf to pytrees
        return [x for x in value if x is not None]
    leaves = tree_flatten(value, is_leaf=lambda x: isinstance(x, PackedSequence))[0]
    return [x for leaf in leaves for x in (tensors(leaf) if isinstance(leaf, PackedSequence) else [leaf])]


def own(value: Any) -> Any:
    """Arguments with tensors of their own."""

    def copied(x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return x._replace(data=copied(x.data))
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree_map(copied, value, is_leaf=lambda x: isinstance(x, PackedSequence))


Found = dict[str, Any]


def step(call: Callable[..., Any], module: Any, given: Any, order: int) -> Found:
    """What a step gives and leaves behind, by name."""
    args, kwargs = own(given)
    outputs = [y for y in tensors(call(*args, **kwargs)) if isinstance(y, torch.Tensor)]
    inputs = [x for x in tensors((args, kwargs)) if isinstance(x, torch.Tensor)]
    leaves = {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    found: Found = {}
    for i, y in enumerate(outputs):
        found[f"output {i}"] = y.detach().clone()
        # one without elements has none of eager mode's strides where NumPy runs it
        found[f"kind of output {i}"] = y.requires_grad, y.numel() and y.stride()
    upstream = torch.Generator().manual_seed(1)
    values = [y for y in outputs if y.requires_grad]
    for depth in range(1, order + 1):
        if not values or not leaves:
            break
        given_back = [torch.randn(y.shape, dtype=y.dtype, generator=upstream) for y in values]
        grads = torch.autograd.grad(
            values, list(leaves.values()), given_back, create_graph=depth < order, allow_unused=True
        )
        for name, grad in zip(leaves, grads, strict=True):
            found[f"gradient {depth} of {name}"] = None if grad is None else grad.detach().clone()
        # a gradient that another one reads with the derivative 0 need not be recorded
        values = [g for g in grads if g is not None and g.requires_grad]
    found |= {f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()}
    found |= {f"input {i} afterwards": x.detach().clone() for i, x in enumerate(inputs)}
    found["random numbers"] = torch.rand(2)
    return found


def steps(call: Callable[..., Any], module: Any, given: Any, order: int) -> list[Found]:
    torch.manual_seed(2)
    return [step(call, module, given, order) for _ in range(2)]


def eager(module: Any, given: Any) -> tuple[list[Found] | Exception, int]:
    """(what eager mode gives, the order of the gradients that it has); or its error."""
    error: Exception = AssertionError()
    for order in (2, 1, 0):
        twin = copy.deepcopy(module)
        try:
            return steps(twin, twin, given, order), order
        except (NotImplementedError, RuntimeError) as caught:
            error = caught
    return error, 0


def compare(got: Found, want: Found) -> None:
    for name in want.keys() | got.keys():
        there, here = want.get(name), got.get(name)
        if name.startswith("gradient 2") and (there is None or here is None):  # zeros, or nothing recorded
            assert all(x is None or not x.any() for x in (there, here)), name
        elif isinstance(there, torch.Tensor):
            torch.testing.assert_close(
                here, there, rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert here == there, name


def spread(several: Sequence[Any], most: int) -> Sequence[Any]:
    """At most so many of them."""
    every = max(1, -(-len(several) // most))
    return several[every // 2 :: every]


def agree(name: str, most: int) -> None:
    info = database()[name]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
            for each in spread([i for i in inputs if i.forward_input is not None], most):
                made, given = each.constructor_input, (each.forward_input.args, each.forward_input.kwargs)
                module = info.module_cls(*made.args, **made.kwargs).double().train(training)
                want, order = eager(module, given)
                torch._dynamo.reset()
                call = compiled(module)
                if isinstance(want, Exception):
                    with pytest.raises(type(want)):
                        steps(call, module, given, order)
                else:
                    for got, wanted in zip(steps(call, module, given, order), want, strict=True):
                        compare(got, wanted)


@pytest.fixture(autouse=True)
def recurrent_layers() -> Iterator[None]:
    """Dynamo leaves them out of its graphs otherwise."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LARGE])
def test_a_module_is_eagers(name: str) -> None:
    agree(name, 1)


@long_tests.values
@pytest.mark.parametrize("name", NAMES)
def test_all_inputs_of_a_module(name: str) -> None:
    agree(name, MOST)
