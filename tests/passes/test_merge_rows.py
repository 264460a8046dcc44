"""merge_rows and push_slices: the logits [B, S, V] of a language model's loss are in memory neither whole nor cut."""

import itertools

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.dims import evaluate, product
from gradc.passes.graph.push_slices import push_slices
from gradc.passes.row_blocking.merge_rows import merge_rows
from gradc.runtime.host import pool

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, S, K, V = 3, 50, 16, 4000


def _shifted(logits, t):
    rows = product(logits[:, :-1].shape[:-1])
    return ops.cross_entropy(ops.reshape(logits[:, :-1], (rows, logits.shape[-1])), ops.reshape(t[:, 1:], (rows,)))


def _taken(logits, t):
    at = ops.reshape(t, (*t.shape, 1))
    return -ops.mean(ops.take_along_axis(ops.log_softmax(logits, 2), at, 2))


CASES = {
    "log-softmax": (
        lambda x, w, t, c: _taken(x @ w, t),
        lambda x, w, t, c: F.cross_entropy((x @ w).flatten(0, 1), t.flatten()),
    ),
    "classes second": (
        lambda x, w, t, c: ops.cross_entropy(ops.transpose(x @ w, (0, 2, 1)), t),
        lambda x, w, t, c: F.cross_entropy((x @ w).mT, t),
    ),
    "weights": (
        lambda x, w, t, c: ops.cross_entropy(
            ops.transpose(x @ w, (0, 2, 1)), t, c, ignore_index=3, label_smoothing=0.1
        ),
        lambda x, w, t, c: F.cross_entropy((x @ w).mT, t, c, ignore_index=3, label_smoothing=0.1),
    ),
    "nll": (
        lambda x, w, t, c: ops.nll_loss(ops.transpose(ops.log_softmax(x @ w, -1), (0, 2, 1)), t, c),
        lambda x, w, t, c: F.nll_loss(torch.log_softmax(x @ w, -1).mT, t, c),
    ),
    "each token's": (
        lambda x, w, t, c: ops.sum(
            ops.cross_entropy(ops.transpose(x @ w, (0, 2, 1)), t, reduction="none") * ops.cast(t, "f32")
        ),
        lambda x, w, t, c: (F.cross_entropy((x @ w).mT, t, reduction="none") * t).sum(),
    ),
    "z loss": (
        lambda x, w, t, c: ops.mean(ops.logsumexp(ops.tanh(x @ w / 30) * 30 + c, 2) ** 2),
        lambda x, w, t, c: (torch.logsumexp(torch.tanh(x @ w / 30) * 30 + c, 2) ** 2).mean(),
    ),
    "next token": (
        lambda x, w, t, c: _shifted(x @ w, t),
        lambda x, w, t, c: F.cross_entropy((x @ w)[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    ),
    "next token of a linear layer": (
        lambda x, w, t, c: _shifted(ops.linear(x, ops.transpose(w, (1, 0)), c), t),
        lambda x, w, t, c: F.cross_entropy(F.linear(x, w.T, c)[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    ),
    "every second token": (
        lambda x, w, t, c: _taken((x @ w)[:, 1::2], t[:, 1::2]),
        lambda x, w, t, c: F.cross_entropy((x @ w)[:, 1::2].flatten(0, 1), t[:, 1::2].flatten()),
    ),
}
LARGE = {"B": 8, "S": 512, "V": 8000}


def _wrt(name):
    return ["x", "w"] if name in ("weights", "nll") else ["x", "w", "c"]  # of weights of classes, torch has no gradient


def _types(symbolic):
    b, s, v = "BSV" if symbolic else (B, S, V)
    return {"x": f"f32[{b},{s},{K}]", "w": f"f32[{K},{v}]", "t": f"i64[{b},{s}]", "c": f"f32[{v}]"}


@pytest.fixture(scope="module")
def module():
    made = {}

    def of(name, symbolic):
        if (name, symbolic) not in made:
            graph = gradc.trace(CASES[name][0], **_types(symbolic))
            made[name, symbolic] = gradc.compile(graph, wrt=_wrt(name), target="cpu", unused="zeros")
        return made[name, symbolic]

    return of


def _arrays(b=B, s=S, v=V):
    rng = np.random.default_rng(0)
    floats = {"x": (b, s, K), "w": (K, v), "c": (v,)}
    arrays = {n: rng.uniform(0.2, 0.8, shape).astype("f4") for n, shape in floats.items()}
    return {**arrays, "t": rng.integers(0, v, (b, s))}


def _wanted(name, arrays):
    leaves = {n: torch.tensor(a).double().requires_grad_(n in _wrt(name)) for n, a in arrays.items() if n != "t"}
    y = CASES[name][1](**leaves, t=torch.tensor(arrays["t"]))
    y.backward()
    return y.item(), {
        n: np.zeros(a.shape) if a.grad is None else a.grad.numpy() for n, a in leaves.items() if n in _wrt(name)
    }


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_logits_are_in_memory(module, name, symbolic):
    made = module(name, symbolic)
    assert sum(len(e.program.loops) for e in made.executables.values())
    for executable in made.executables.values():
        program = executable.program
        sizes = {n: LARGE.get(n, 0) for n in program.dims}
        rows = LARGE["B"] * LARGE["S"] * LARGE["V"] if symbolic else B * S * V
        for buffer in program.buffers:
            if buffer.kind == "temp" or buffer.name.startswith("r."):
                count = np.prod([evaluate(n, sizes) for n in buffer.type.shape])
                assert count <= rows // 4, buffer


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(module, name, symbolic):
    made = module(name, symbolic)
    for sizes in [(B, S, V), (1, 2, 7), (5, 3, 1), (2, 31, 513)] if symbolic else [(B, S, V)]:
        arrays = _arrays(*sizes)
        value, gradients = _wanted(name, arrays)
        y, residuals = made.forward(**arrays)
        got = made.backward(residuals, np.float32(1))
        np.testing.assert_allclose(y, value, rtol=4e-6)
        for key, wanted in gradients.items():
            scale = max(abs(wanted).max(initial=0), 1e-3)
            np.testing.assert_allclose(got[key], wanted, rtol=0, atol=4e-6 * scale, err_msg=f"d.{key} {sizes}")


@pytest.mark.parametrize("name", ["weights", "next token"])
def test_any_number_of_threads_gives_the_same_bits(module, name):
    arrays = _arrays()
    made = module(name, False)
    before, seen = pool.num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = made.forward(**arrays)
            seen.append([y, *made.backward(residuals, np.float32(1)).values()])
    finally:
        pool.set_num_threads(before)
    for one, other in itertools.pairwise(seen):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_tokens():
    graph = gradc.trace(lambda x, w: ops.sum(ops.logsumexp(x @ w, 2)), x="f32[B,S,4]", w="f32[4,300]")
    module = gradc.compile(graph, wrt=["x", "w"], target="cpu")
    y, residuals = module.forward(x=np.zeros((2, 0, 4), "f4"), w=np.ones((4, 300), "f4"))
    gradients = module.backward(residuals, np.float32(1))
    assert y == 0 and gradients["x"].shape == (2, 0, 4) and not gradients["w"].any()


def test_a_target_out_of_range_is_refused(module):
    for name in ("log-softmax", "next token"):
        arrays = _arrays()
        arrays["t"][1, 7] = V
        with pytest.raises(gradc.errors.IndexOutOfRange):
            module(name, False).forward(**arrays)


# -- the passes --------------------------------------------------------------------------------------------------------


def _same_values(before, after, **inputs):
    one, other = (interp.run(graph, inputs) for graph in (before, after))
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


REDUCTIONS = ("amax", "sum", "argmax", "argmin")
X, W = (np.random.default_rng(n).standard_normal(shape) for n, shape in enumerate(((2, 3, 4), (4, 20))))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ops.amax(x @ w, 2),
        lambda x, w: ops.amax(ops.transpose(x @ w, (0, 2, 1)), 1),
        lambda x, w: ops.sum(ops.transpose(x @ w, (2, 0, 1))) + ops.sum(ops.amax(x @ w, 2)),
        lambda x, w: ops.sum(x @ w, 2) + ops.amax(ops.exp(ops.reshape(x @ w, (2, 3, 5, 4))), (2, 3)),
        lambda x, w: ops.sum((x @ w) * ops.exp(ops.sum(x, 2, keepdims=True)), 2),
        lambda x, w: ops.sum((x @ w) + ops.exp(w[0]), 2),
        lambda x, w: ops.sum(ops.sin(x @ w) * ops.reshape(ops.sin(x), (2, 3, 2, 2))[:, :, :1, 1], 2),
        lambda x, w: ops.argmax(ops.transpose(x @ w, (0, 2, 1)), 1),
        lambda x, w: ops.argmin(x @ w, (0, 1, 2)),
        lambda x, w: ops.argmax(ops.reshape(ops.exp(x @ w), (2, 3, 5, 4)), (2, 3)),
    ],
)
def test_rows_are_merged(function):
    graph = gradc.trace(function, x="f64[2,3,4]", w="f64[4,20]")
    merged = merge_rows(graph)
    reduced = [n.operands[0].shape for n in merged.nodes if n.op.name in REDUCTIONS and 120 == n.operands[0].type.count]
    assert reduced and all(shape[0] == 6 for shape in reduced)
    _same_values(graph, merged, x=X, w=W)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ops.sum(x @ w, 1),
        lambda x, w: ops.exp(x @ w),
        lambda x, w: ops.amax((x @ w) * w[:3], 2),
        lambda x, w: ops.amax((x @ w) * ops.sum(x, (1, 2), keepdims=True), 2),
        lambda x, w: ops.amax(ops.transpose(x @ w, (1, 0, 2)), 2),
        lambda x, w: ops.amax((x @ w)[:, ::-1], 2),
        lambda x, w: ops.argmax(ops.transpose(x @ w, (0, 2, 1)), (0, 1, 2)),
        lambda x, w: ops.amax(x @ w[:, :5], 2),
    ],
)
def test_other_rows_are_not(function):
    """Sums over some of them, values that vary along some, other orders, numbers in another order; and narrow ones."""
    graph = gradc.trace(function, x="f64[2,3,4]", w="f64[4,20]")
    assert merge_rows(graph) is graph


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda x, w: (x @ w)[:, :-1], 2 * 2),
        (lambda x, w: (x @ w)[:, -1], 2),
        (lambda x, w: (x @ w)[1:, ::2, 5:15:3], 1 * 2 * 4 / 20),
        (lambda x, w: ops.tanh((x @ w) / 3 + w[1])[:, 1:, :10], 2 * 2 / 2),
        (lambda x, w: ops.linear(x, ops.transpose(w, (1, 0)), w[0])[..., 3:4], 6 / 20),
        (lambda x, w: (x @ ops.transpose(x, (0, 2, 1)))[1, :2, 1:], 2 * 2 / 20),
        (lambda x, w: (x[0] @ w)[1:], 2),
    ],
)
def test_slices_are_of_what_is_multiplied(function, flops):
    """:param flops: the elements of the product, in lines of 20."""
    graph = gradc.trace(function, x="f64[2,3,4]", w="f64[4,20]")
    pushed = push_slices(graph)
    (made,) = (node for node in pushed.nodes if node.op.name == "matmul")
    assert made.type.count == round(flops * 20)
    _same_values(graph, pushed, x=X, w=W)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: {"y": (x @ w)[:, 1:], "all": x @ w},
        lambda x, w: (x @ w)[:, 1:] + (x @ w)[:, :-1],
        lambda x, w: ops.softmax(x @ w, 2)[:, :1],
        lambda x, w: ops.reshape(x @ w, (2, 60))[:, :30],
        lambda x, w: ops.exp(x)[:, 1:] @ w,
    ],
)
def test_a_product_that_is_read_elsewhere_stays(function):
    graph = gradc.trace(function, x="f64[2,3,4]", w="f64[4,20]")
    shapes = [[n.shape for n in g.nodes if n.op.name == "matmul"] for g in (graph, push_slices(graph))]
    assert shapes[0] == shapes[1]


def test_slices_of_symbolic_sizes():
    """Of no rows, too."""
    graph = gradc.trace(lambda x, w: (x @ w)[:, :-1, 2:], x="f64[B,S,4]", w="f64[4,V]")
    pushed = push_slices(graph)
    assert not any(node.op.name == "slice" and node.operands[0].op.name != "input" for node in pushed.nodes)
    for s, v in ((3, 20), (1, 20), (3, 1)):
        _same_values(graph, pushed, x=np.ones((2, s, 4)), w=np.ones((4, v)))
