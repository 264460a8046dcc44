"""A Graph as torch's own calls: the peers that gradc bench times are held against gradc's meaning of every op."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from registry import Case, cases, for_cases  # noqa: E402

import gradc  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.errors import Unsupported  # noqa: E402
from gradc.ir.node import REGISTRY  # noqa: E402
from gradc.torch.eager import CALLS, to_torch  # noqa: E402

OTHERWISE = {
    "cast": "a float that leaves the range of an integer is any number in torch",
    "cross_entropy": "torch does not differentiate by the classes' weights",
    "fmod": "torch raises where an integer is divided by 0",
    "mod": "torch raises where an integer is divided by 0",
}
"""Ops that are something else in torch where their samples ask for it, and the samples that agree are few."""
CASES = [
    case
    for case in cases(["f64"])
    if case.coarsest == "f64"
    and case.op.name not in OTHERWISE
    and all(n.dtype.np.isbuiltin == 1 for n in (*case.graph.inputs, *(node for _, node in case.graph.outputs)))
]
"""Of dtypes that are NumPy's own, so that arrays and tensors are one memory."""


def close(got: torch.Tensor, want: np.ndarray, what: str) -> None:
    found = got.detach().numpy()
    assert found.shape == want.shape, what
    if want.dtype.kind == "f":
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9, err_msg=what)
    else:
        assert np.array_equal(found, want), what


def test_table_names_ops() -> None:
    assert CALLS.keys() <= REGISTRY.keys()


def test_most_ops_have_a_counterpart() -> None:
    """What has none is left out of a table of times, and named there."""
    known, unknown = set(), set()
    for case in CASES:
        try:
            to_torch(case.graph, next(iter(case.bindings())))
            known.add(case.op.name)
        except Unsupported as error:
            assert str(error)
            unknown.add(case.op.name)
    assert len(known) >= 200
    assert not {"matmul", "softmax", "layer_norm", "embedding", "convolution", "dequantize", "cross_entropy"} & unknown


def test_one_call_for_an_op_and_constants_once() -> None:
    graph = gradc.trace(lambda x, w: ops.softmax(ops.gelu(x @ w) * 2 + 1), x="f32[N,4]", w="f32[4,3]")
    module = to_torch(graph, {"N": 5})
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.matmul) == calls.count(torch.nn.functional.gelu) == 1 and len(calls) == 5
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    want = torch.softmax(torch.nn.functional.gelu(x @ w) * 2 + 1, -1)
    torch.testing.assert_close(module(x, w)[0], want)
    with pytest.raises(Unsupported, match="torch has no call for segment_ids"):
        to_torch(gradc.trace(lambda o: ops.segment_ids(o, 7), o="i64[3]"), {})


@for_cases(CASES)
def test_values_and_gradients(case: Case) -> None:
    dims = next(iter(case.bindings()))
    arrays = case.arrays(dims)
    tensors = [torch.from_numpy(np.array(a, order="C")) for a in arrays.values()]
    tensors = [t.requires_grad_() if name in case.floats else t for name, t in zip(arrays, tensors, strict=True)]
    try:
        results = to_torch(case.graph, dims)(*tensors)
    except Unsupported:
        return
    want = interp.run(case.graph, arrays, dims=dims)
    (y,) = results
    close(y, want["y"], f"{case}")
    if not (case.differentiable and y.requires_grad and case.op.surrogate is None):
        return
    dy = np.random.default_rng(0).standard_normal(y.shape)
    both = differentiate(case.smooth, case.floats, unused="zeros")
    theirs = torch.autograd.grad(y, [t for t in tensors if t.requires_grad], torch.from_numpy(dy), allow_unused=True)
    ours = interp.run(both, {**arrays, "d.y": dy}, dims=dims)
    for name, gradient in zip(case.floats, theirs, strict=True):
        mine = ours[f"d.{name}"]
        close(torch.zeros(mine.shape, dtype=torch.float64) if gradient is None else gradient, mine, f"{case} d.{name}")
