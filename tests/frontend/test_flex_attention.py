"""torch.nn.attention.flex_attention through torch.compile(backend="gradc"): one region, with gradients.

torch refuses gradients of it on a CPU, so Dynamo's graph is taken once, without any, and compiled for inputs that
require them.  The oracle is attention written out in torch, in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import long_tests
import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import gradc  # noqa: E402
import gradc.torch  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.ir.kernel import Call  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.torch import dynamo, importer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

HEADS, ROWS = 4, 70
torch.manual_seed(0)
SLOPES, TABLE = torch.rand(HEADS) / 8, torch.randn(HEADS, 3 * ROWS)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 31 + [2] * 400)
LENGTHS = torch.tensor([9, 300])


@dataclass(frozen=True)
class Form:
    """A score_mod and a mask_mod, which the oracle calls on whole tensors.

    :param written: the score_mod for whole tensors, if that is another text.
    """

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    written: Callable[..., Any] | None = None


def _capped(s, b, h, i, j):
    return 2 * torch.tanh(s / 2)


def _row_of(s, b, h, i, j):
    return s + TABLE[h][i] - TABLE[h, j + 1]


FORMS = {
    "plain": Form(),
    "causal": Form(mask=lambda b, h, i, j: i >= j),
    "window": Form(mask=lambda b, h, i, j: (i >= j) & (i - j < 16)),
    "documents": Form(mask=lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (j <= i)),
    "lengths": Form(mask=lambda b, h, i, j: j < LENGTHS[b]),
    "dead rows": Form(mask=lambda b, h, i, j: (i > 3) & (i >= j)),
    "alibi": Form(lambda s, b, h, i, j: s + SLOPES[h] * (j - i), lambda b, h, i, j: i >= j),
    "relative": Form(lambda s, b, h, i, j: s + TABLE[h, i - j + ROWS]),
    "from the end": Form(lambda s, b, h, i, j: s * TABLE[h, j - 200]),
    "an axis at a time": Form(_row_of, written=lambda s, b, h, i, j: s + TABLE[h, i] - TABLE[h, j + 1]),
    "capped": Form(_capped, lambda b, h, i, j: i >= j),
    "hidden by the score": Form(lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf)),
}


def drawn(dtype, heads=HEADS, shared=2, rows=ROWS, columns=ROWS, batch=2, features=16, beside=False):
    shapes = [(batch, heads, rows), (batch, shared, columns), (batch, shared, columns)]
    if beside:  # [B, S, H, D], as a projection gives it
        return [torch.randn(b, s, h, features).to(dtype).transpose(1, 2) for b, h, s in shapes]
    return [torch.randn(*shape, features).to(dtype) for shape in shapes]


def program(form: Form, lse: bool = False, scale: float | None = None):
    def run(q, k, v, blocks):
        grouped = q.shape[1] != k.shape[1]
        return flex.flex_attention(q, k, v, form.score, blocks, scale, enable_gqa=grouped, return_lse=lse)

    return run


def blocks_of(form: Form, q, k):
    batch = q.shape[0] if form is FORMS["lengths"] else None
    if form.mask is None:
        return None
    return flex.create_block_mask(form.mask, batch, None, q.shape[2], k.shape[2], device="cpu")


def written(form: Form, q, k, v, scale: float | None = None):
    """Attention over whole tensors, and the logsumexp of each row."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = [torch.arange(n).reshape([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(s.shape)]
    if form.score:
        s = (form.written or form.score)(s, *at)
    if form.mask:
        s = torch.where(form.mask(*at), s, -math.inf)
    return torch.ops.aten._safe_softmax(s, -1) @ v, torch.logsumexp(s, -1)


def taken(run, *inputs, **options):
    """Dynamo's graph of a call, and its inputs."""
    graphs: list[Any] = []

    def take(gm, examples):
        graphs.append((gm, list(examples)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(run, backend=take, **options)(*inputs)
    return graphs[0]


def with_gradients(run, *inputs):
    """What gradc gives for inputs that require gradients, and the gradient of each, by the identity of the input."""
    gm, examples = taken(run, *inputs)
    own = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in examples]
    results = dynamo.backend(gm, own, options={"fallback": "error"})(*own)
    given = {id(e): x for e, x in zip(examples, own, strict=True)}
    return results, [given[id(x)] for x in inputs if torch.is_tensor(x)]


def compiled(run, *inputs, **options):
    torch._dynamo.reset()
    return torch.compile(run, backend="gradc", options={"fallback": "error"}, fullgraph=True, **options)(*inputs)


BOTH = ("plain", "causal", "relative")


@long_tests.values
@pytest.mark.parametrize(("name", "shared"), [*((name, 2) for name in FORMS), *((name, HEADS) for name in BOTH)])
def test_values_and_gradients_are_those_of_attention_written_out(name, shared):
    form = FORMS[name]
    q, k, v = drawn(torch.float32, shared=shared)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    reference, sums = written(form, *exact)
    (y, found_sums), own = with_gradients(program(form, lse=True), q, k, v, blocks_of(form, q, k))
    torch.testing.assert_close(y.double(), reference, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(found_sums.double(), sums, atol=4e-6, rtol=4e-6)
    cotangent, of_sums = torch.randn_like(y), torch.randn_like(found_sums) * (sums > -math.inf)
    found = torch.autograd.grad((y, found_sums), own, (cotangent, of_sums))
    expected = torch.autograd.grad((reference, sums), exact, (cotangent.double(), of_sums.double()))
    for gradient, reference_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beside", [False, True], ids=["heads", "beside features"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_memory_orders_are_those_of_eager_mode(dtype, beside):
    form = FORMS["alibi"]
    q, k, v = drawn(dtype, rows=37, beside=beside)
    blocks, run = blocks_of(form, q, k), program(form, lse=True, scale=0.3)
    y, sums = compiled(run, q, k, v, blocks)
    theirs, their_sums = run(q, k, v, blocks)
    assert (y.dtype, y.stride(), sums.dtype) == (theirs.dtype, theirs.stride(), their_sums.dtype)
    exact, exact_sums = written(form, *(x.double() for x in (q, k, v)), scale=0.3)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(y.double(), exact, atol=limit, rtol=limit)
    limit = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sums.double(), exact_sums, atol=limit, rtol=limit)


@long_tests.values
@pytest.mark.parametrize("shared", [1, 2, HEADS])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (5, 1), (3, 40), (0, 4), (4, 0), (150, 7)])
def test_rows_and_columns_differ(rows, columns, shared):
    """Few rows, too, as a decoder asks of all that was said, whether or not heads share their keys."""
    form = Form(lambda s, b, h, i, j: s - (i - j).abs() / 16)
    q, k, v = drawn(torch.float32, rows=rows, columns=columns, shared=shared)
    y, sums = compiled(program(form, lse=True), q, k, v, None)
    exact, exact_sums = written(form, *(x.double() for x in (q, k, v)))
    torch.testing.assert_close(y.double(), exact, atol=4e-6, rtol=4e-6)
    if rows:  # of none torch itself gives no sums
        torch.testing.assert_close(sums.double(), exact_sums, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("shared", [2, HEADS])
@pytest.mark.parametrize("rows", [3, 40])
def test_all_queries_of_a_batch_read_one_set_of_keys(rows, shared):
    form = FORMS["causal"]
    q, k, v = drawn(torch.float32, rows=rows, columns=40, shared=shared)
    k, v = k[:1], v[:1]
    blocks = flex.create_block_mask(form.mask, q.shape[0], None, rows, 40, device="cpu")
    y = compiled(program(form), q, k, v, blocks)
    exact, _ = written(form, *(x.double() for x in (q, k, v)))
    torch.testing.assert_close(y.double(), exact, atol=4e-6, rtol=4e-6)


def test_sizes_that_change_share_one_program():
    form = FORMS["relative"]
    run = torch.compile(program(form), backend="gradc", options={"fallback": "error"}, dynamic=True, fullgraph=True)
    before = len(gradc.torch.report().graphs)
    for rows in (33, 47, 64):
        q, k, v = drawn(torch.float32, rows=rows, columns=rows)
        exact, _ = written(form, *(x.double() for x in (q, k, v)))
        torch.testing.assert_close(run(q, k, v, None).double(), exact, atol=4e-6, rtol=4e-6)
    assert len(gradc.torch.report().graphs) == before + 1


SIZED = {
    "a quotient": lambda q, k: lambda s, b, h, i, j: s * (i - q.shape[2]) / k.shape[2],
    "from the size": lambda q, k: lambda s, b, h, i, j: s + (k.shape[2] - 1 - j) % 7,
    "a choice of numbers": lambda q, k: lambda s, b, h, i, j: torch.where(j < k.shape[2] - 3, s, 0.5),
    "aligned at the end": lambda q, k: (
        lambda s, b, h, i, j: torch.where(i + k.shape[2] - q.shape[2] >= j, s, -math.inf)
    ),
    "a size chosen": lambda q, k: lambda s, b, h, i, j: s / torch.where(i > j, k.shape[2], 16),
}


@long_tests.values
@pytest.mark.parametrize("name", SIZED)
def test_functions_read_sizes_that_change(name):
    def attention(q, k, v):
        return flex.flex_attention(q, k, v, SIZED[name](q, k))

    torch._dynamo.reset()
    run = torch.compile(attention, backend="gradc", options={"fallback": "error"}, dynamic=True, fullgraph=True)
    before = len(gradc.torch.report().graphs)
    for rows, columns in ((33, 40), (50, 64), (20, 90)):
        q, k, v = drawn(torch.float32, rows=rows, columns=columns, shared=HEADS)
        exact, _ = written(Form(SIZED[name](q, k)), *(x.double() for x in (q, k, v)))
        torch.testing.assert_close(run(q, k, v).double(), exact, atol=4e-6, rtol=4e-6)
    assert len(gradc.torch.report().graphs) == before + 1


def test_blocks_alone_are_a_mask():
    """Which torch's kernels read, and its eager mode does not."""
    rows = 70
    asked = [1, 2, 0], [[0, 1, 1], [0, 2, 1], [0, 0, 0]]  # how many, and which; what follows them is not read
    whole = [0, 0, 1], [[0, 0, 0], [0, 0, 0], [1, 0, 2]]
    tensors = [torch.tensor(x, dtype=torch.int32)[None, None] for x in (*asked, *whole)]
    blocks = flex.BlockMask.from_kv_blocks(*tensors, BLOCK_SIZE=32, seq_lengths=(rows, rows))
    q, k, v = drawn(torch.float32, rows=rows, columns=rows)
    y = compiled(program(Form()), q, k, v, blocks)
    read = torch.tensor([[True, False, False], [True, False, True], [False, True, False]])
    mask = read.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :rows]
    exact, _ = written(Form(mask=lambda b, h, i, j: mask[i, j]), *(x.double() for x in (q, k, v)))
    torch.testing.assert_close(y.double(), exact, atol=4e-6, rtol=4e-6)


def test_autocast_casts_what_is_multiplied():
    form = FORMS["alibi"]
    q, k, v = drawn(torch.float32)

    def run(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flex.flex_attention(q, k, v, form.score, enable_gqa=True)

    y = compiled(run, q, k, v)
    assert y.dtype == run(q, k, v).dtype == torch.bfloat16
    rounded = (x.bfloat16() for x in (q, k, v))
    exact, _ = written(Form(form.score), *(x.double() for x in rounded))
    torch.testing.assert_close(y.double(), exact, atol=2e-2, rtol=2e-2)


def test_what_a_score_reads_has_a_gradient():
    """A learned bias and its head's slope: written out they are [B, H, S, T], and their gradients sums of that."""
    table, slopes = torch.randn(HEADS, 3 * ROWS), torch.randn(HEADS)
    q, k, v = drawn(torch.float32)

    def score(table, slopes):
        return lambda s, b, h, i, j: s + table[h, i - j + ROWS] * torch.sigmoid(slopes[h])

    def run(q, k, v, table, slopes):
        return flex.flex_attention(q, k, v, score(table, slopes), enable_gqa=True)

    (y,), own = with_gradients(run, q, k, v, table, slopes)
    exact = [x.double().requires_grad_() for x in (q, k, v, table, slopes)]
    reference, _ = written(Form(score(*exact[3:])), *exact[:3])
    cotangent = torch.randn_like(y)
    expected = torch.autograd.grad(reference, exact, cotangent.double())
    for found, wanted in zip(torch.autograd.grad(y, own, cotangent), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("name", "shared"), [("alibi", HEADS), ("documents", 2), ("relative", 2)])
def test_all_scores_are_in_no_memory(name, shared, monkeypatch):
    """Of what is read there are blocks, in registers: a kernel forward and two backward, beside small ones."""
    made: list[gradc.Graph] = []

    def graph_of(*args):
        result = importer.graph_of(*args)
        made.append(result[0])
        return result

    monkeypatch.setattr(dynamo, "graph_of", graph_of)
    q, k, v = drawn(torch.bfloat16, shared=shared, features=64)
    compiled(program(FORMS[name]), q, k, v, blocks_of(FORMS[name], q, k))
    (graph,) = made
    wrt = [n for n, node in zip(graph.input_names, graph.inputs, strict=True) if node.rank == 4]
    programs = run_passes(graph, wrt, Options(), "cuda")[2]
    assert [len(programs[part].loops) for part in ("forward", "backward")] == [1, 2]
    assert all(loop.tile for each in programs.values() for loop in each.loops)
    assert not any(isinstance(step, Call) for each in programs.values() for step in each.steps)
    assert len(programs["forward"].steps) == 1
