"""The table of ATen overloads: every line on samples of torch, values and gradients in f64; what lines name exists."""

from __future__ import annotations

import ast
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402
from torch_samples import CALLS, DECOMPOSED, ELSEWHERE, FIRST_RESULT, REACHED_BY, TAKEN, TOLERANCES, real  # noqa: E402

import gradc  # noqa: E402
from benchmarks.opinfo import op_db  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.errors import Unsupported  # noqa: E402
from gradc.runtime.torch_private import release  # noqa: E402
from gradc.torch import normal_form, table  # noqa: E402
from gradc.torch.importer import graph_of  # noqa: E402

ATEN = Path(table.__file__).parent / "aten"


def test_lines_name_what_exists() -> None:
    """Each line's overload is one of torch's, each op that a line calls one of gradc's."""
    missing = [key for key, line in table.lines().items() if key.startswith("aten.") and line.overload is None]
    for path in ATEN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ops":
                missing += [f"{path.name}: ops.{node.attr}"] if node.attr not in ops.REGISTRY else []
    assert not missing


# -- torch's samples ---------------------------------------------------------------------------------------------------


def title(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


class Case:
    """One sample of an op: a function of its tensors."""

    def __init__(self, op: Any, sample: Any):
        self.op, self.name = op, title(op)
        flat, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        self.flat = [None if isinstance(x, torch.Tensor) else x for x in flat]
        self.tensors = [flat[i].detach().requires_grad_(flat[i].requires_grad) for i in self.places]

    def __call__(self, *tensors: Any) -> list[Any]:
        flat = list(self.flat)
        for i, x in zip(self.places, tensors, strict=True):
            flat[i] = x
        args, kwargs = tree_unflatten(flat, self.spec)
        return [y for y in tree_flatten(self.op(*args, **kwargs))[0] if isinstance(y, torch.Tensor)]


def program(cases: Sequence[Case]) -> tuple[torch.nn.Module, list[Any]]:
    """All cases as one graph, which is traced once."""
    graph, arguments, results = torch.fx.Graph(), [], []
    for i, case in enumerate(cases):
        given = [graph.placeholder(f"x{i}_{j}") for j in range(len(case.tensors))]
        arguments += case.tensors
        case.__name__, case.__module__ = f"case{i}", __name__  # type: ignore[attr-defined]
        called = graph.call_function(case, tuple(given))
        results += [graph.call_function(lambda all, at: all[at], (called, j)) for j in range(len(case(*case.tensors)))]
    graph.output(tuple(results))
    return _Bare(graph), arguments


class _Bare(torch.nn.Module):
    """A graph to be interpreted; generated code could not name the cases."""

    def __init__(self, graph: Any):
        super().__init__()
        self.graph = graph


class Refused(AssertionError):
    """gradc leaves a call to torch."""


@dataclass
class Form:
    """The normal form of some cases.

    :ivar given: inputs by name.  :ivar names: of what the cases give.
    """

    graph: Any
    inputs: dict[Any, str]
    given: dict[str, Any]
    results: list[Any]
    names: list[str]

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Form:
        module, arguments = program(cases)
        form = normal_form.normal_form(module, arguments, table.is_kept)
        graph = form.module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        inputs = {n: f"x{i}" for i, n in enumerate(placeholders)}
        given = {f"x{i}": x for i, x in enumerate(arguments)}
        for node in graph.nodes:
            if node.op == "get_attr":
                inputs[node] = f"c{len(inputs)}"
                given[inputs[node]] = getattr(form.module, node.target)
        results = list(graph.output_node().args[0])[len(form.mutated) :]
        return cls(graph, inputs, given, results, [f"y{i}" for i in range(len(results))])

    @property
    def calls(self) -> list[Any]:
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def imported(self) -> gradc.Graph:
        outputs = list(zip(self.names, self.results, strict=True))
        made, refused = graph_of(self.calls, self.inputs, outputs, "samples")
        if refused:
            raise Refused("\n".join(map(str, refused)))
        return made


def line_of(node: Any) -> str | None:
    """The line of the table that a call takes."""
    line = table.line_of(node.target)
    return line.key if line else None


def imported(cases: Sequence[Case]) -> tuple[gradc.Graph, dict[str, Any], list[str], set[str]]:
    """The cases as one graph, its inputs' values, the names of their outputs, and the lines that were taken for it."""
    form = Form.of(cases)
    lines = {key for node in form.calls if (key := line_of(node))}
    return form.imported(), {n: x.detach().numpy() for n, x in form.given.items()}, form.names, lines


def batches() -> Iterator[tuple[str, ...]]:
    """Names of cases whose samples are traced together, which takes a fifth of the time of one by one."""
    for names in (iter(TAKEN.split()), iter(CALLS)):
        while batch := tuple(itertools.islice(names, 24)):
            yield batch


BATCH = {name: batch for batch in batches() for name in batch}


def cases_in(batch: tuple[str, ...], wanted: Callable[[Any], bool] | None = None) -> list[Case]:
    """Two samples of each op, or two that are wanted, and the calls."""
    cases = []
    for op in op_db():
        if title(op) in batch:
            torch.manual_seed(0)
            samples = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
            cases += [Case(op, sample) for sample in itertools.islice(filter(wanted, samples), 2)]
    for name in batch:
        if name in CALLS:
            torch.manual_seed(0)
            cases.append(called(name))
    assert {case.name for case in cases} == set(batch) or wanted
    return cases


@functools.cache
def differences(batch: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    """What of the batch's values and gradients in f64 differs from torch, and the lines of the table that it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compared(cases_in(batch))


def cases_of(key: str) -> list[str]:
    """The cases for a line of the table: the call of it, else the samples of torch's op of its name."""
    if key in CALLS or key in REACHED_BY:
        return [REACHED_BY.get(key, key)]
    namespace, *_, name, _ = key.split(".")
    if namespace == "gradc":  # what no program of torch's calls
        return []
    return [case for case, parts in PARTS.items() if name in parts]


PARTS = {case: case.split(".") for case in TAKEN.split()}
CASES = {key: cases_of(key) for key in table.lines()}
LINES = {batch: [key for key, cases in CASES.items() if cases[:1] and cases[0] in batch] for batch in batches()}


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> frozenset[str]:
    """The cases of all lines and batches that this run tries."""
    items = (item for item in request.session.items if item.path == request.path)
    functions = (item for item in items if isinstance(item, pytest.Function) and item.function is test_a_line)
    keys = [item.callspec.params["key"] for item in functions]
    return frozenset(case for key in keys for case in (CASES[key] if isinstance(key, str) else key))


@pytest.mark.parametrize(  # a process that has traced a batch tries all its lines, and whatever else is in it
    "key",
    [key for batch, keys in LINES.items() for key in (*sorted(keys), batch)],
    ids=lambda key: key if isinstance(key, str) else f"all with {key[0]}",
)
def test_a_line(key: str | tuple[str, ...], asked: frozenset[str]) -> None:
    """The cases of one line, for `pytest -k NAME`, values and gradients in f64: traced with others of this run as one
    graph, which the interpreter runs.
    """
    if isinstance(key, tuple):
        assert not differences(key)[0]
        return
    lines = set[str]()
    for case in CASES[key]:
        wrong, taken = differences(tuple(name for name in BATCH[case] if name in asked))
        assert not {what: text for what, text in wrong.items() if what.startswith(f"{case}: ")}
        lines |= taken
    assert (key in lines) == (key not in DECOMPOSED) or release() != (2, 13, 0)


def test_every_line_has_a_case() -> None:
    """But for those that other tests of the front-end try."""
    assert {key for key, cases in CASES.items() if not cases} == ELSEWHERE
    assert sorted(key for keys in LINES.values() for key in keys) == sorted(
        key for key, cases in CASES.items() if cases
    )


# -- what counts from the end ------------------------------------------------------------------------------------------

AXES = frozenset("dim dims dim0 dim1 dim2 axis axis0 axis1 source destination dimension start_dim end_dim".split())
"""What torch's schemas call an axis, ..."""
PLACES = {"index": "dim", "start": "dim", "end": "dim", "padding_idx": ""}
"""... and a place along one, with the argument that says which; else the first."""
ELSEWHERE_COUNTED = frozenset(
    f"aten.{name}"
    for name in (
        *("argmax.default", "argmin.default", "count_nonzero.default", "linalg_vector_norm.default"),
        *("quantile.default", "nanquantile.default", "embedding.default"),
    )
)
"""Lines whose samples have no axis, and one whose negative place torch has counted before it (-1 is none there): they
are in test_torch_from_the_end.
"""
OF_RESULT = ("unsqueeze", "stack", "diag_embed")
"""Ops whose axes are those of what they give."""


def from_the_other_end(node: Any) -> tuple[list[Any], dict[str, Any], set[str]]:
    """A call's arguments with each axis and place counted from the other end, and the names of these."""
    schema = node.target._schema
    args, kwargs, turned = list(node.args), dict(node.kwargs), set[str]()
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    tensor = (node if node.target._opname in OF_RESULT else next(iter(node.all_input_nodes), node)).meta["val"]

    def turn(name: str, value: int) -> int:
        count = tensor.ndim if name in AXES else tensor.shape[given.get(PLACES[name], 0) if PLACES[name] else 0]
        if not -count <= value < count or not isinstance(count, int):
            return value  # as an end beyond the last
        turned.add(name)
        return value - count if value >= 0 else value + count

    for at, argument in enumerate(schema.arguments):
        name = argument.name
        value = given.get(name, argument.default_value)
        if not is_counted(argument) or value is None or not tensor.ndim:
            continue
        new = [turn(name, v) for v in value] if isinstance(value, list | tuple) else value
        new = turn(name, value) if isinstance(value, int) and not isinstance(value, bool) else new
        if name in kwargs or (argument.kwarg_only and new != value):
            kwargs[name] = new
        elif new != value:
            args += [each.default_value for each in schema.arguments[len(args) : at + 1]]
            args[at] = new
    return args, kwargs, turned


def turned_in(case: Case) -> set[str]:
    """The lines of a case that have anything to count, which counted from the other end is the same graph."""
    form, lines = Form.of([case]), set[str]()
    try:
        before = str(form.imported())
    except Refused:
        return lines
    for node in form.calls:
        if isinstance(node.target, torch._ops.OpOverload) and (key := line_of(node)):
            args, node.kwargs, turned = from_the_other_end(node)
            node.args = tuple(args)
            lines |= {key} if turned else set()
    assert before == str(form.imported())
    return lines


def is_counted(argument: Any) -> bool:
    """Whether a schema's argument is an axis, or a place along one."""
    return argument.name in AXES | PLACES.keys() and "int" in str(argument.type).lower()


def has_counted(sample: Any) -> bool:
    """Whether a sample of two axes or more is given an integer."""
    given = tree_flatten((sample.args, sample.kwargs))[0]
    tensors = [x for x in tree_flatten(sample.input)[0] if isinstance(x, torch.Tensor)]
    return any(x.ndim > 1 for x in tensors) and any(isinstance(x, int) and not isinstance(x, bool) for x in given)


def counts(key: str) -> bool:
    """Whether a line's overload has an axis, or a place along one."""
    overload = table.lines()[key].overload
    arguments = overload._schema.arguments if overload is not None else ()
    return any(map(is_counted, arguments))


@pytest.mark.parametrize(
    "key", sorted(key for keys in LINES.values() for key in keys if counts(key) and key not in ELSEWHERE_COUNTED)
)
def test_what_counts_from_the_end(key: str) -> None:
    """The negative form of each axis and place is the same graph, for all lines whose overloads have any."""
    lines = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in CASES[key]:
            for case in (*cases_in((name,)), *cases_in((name,), has_counted)):
                lines |= turned_in(case)
    assert key in lines or key in DECOMPOSED or release() != (2, 13, 0)


def check(cases: Sequence[Case]) -> None:
    """Values and gradients of all cases against torch's in f64."""
    wrong, _ = compared(cases)
    assert not wrong


def compared(cases: Sequence[Case]) -> tuple[dict[str, str], set[str]]:
    """What differs from torch's values and gradients in f64, and the lines of the table that are taken."""
    graph, given, outputs, lines = imported(cases)
    wanted = [case(*case.tensors) for case in cases]
    owners = [case.name for case, each in zip(cases, wanted, strict=True) for _ in each]
    flat = [y for each in wanted for y in each]
    sources = [name for case in cases for name in [case.name] * len(case.tensors)]
    leaves = [x for case in cases for x in case.tensors]
    recorded = [(n, y) for n, y in zip(outputs, flat, strict=True) if y.requires_grad]
    wrt = [f"x{i}" for i, x in enumerate(leaves) if x.requires_grad and recorded]
    cotangents = {f"d.{n}": np.random.default_rng(i).standard_normal(y.shape) for i, (n, y) in enumerate(recorded)}
    joint = gradc.differentiate(graph, wrt, unused="zeros") if recorded else graph
    zeros = {n: np.zeros(joint.input(n).shape) for n in joint.input_names if n.startswith("d.")}
    found = interp.run(joint, {**given, **zeros, **cotangents})
    theirs = [None] * len(wrt)
    if wrt:
        theirs = torch.autograd.grad(
            [y for _, y in recorded],
            [leaves[int(n[1:])] for n in wrt],
            [torch.from_numpy(cotangents[f"d.{n}"]) for n, _ in recorded],
            allow_unused=True,
        )
    wrong = {}
    for owner, name, want in zip(owners, outputs, flat, strict=True):
        wrong |= differing(f"{owner}: value", found[name], want.detach())
    for name, grad in zip(wrt, theirs, strict=True):
        want = torch.zeros_like(leaves[int(name[1:])]) if grad is None else grad
        wrong |= differing(f"{sources[int(name[1:])]}: gradient", found[f"d.{name}"], want)
    return wrong, lines


# -- what torch has no samples of --------------------------------------------------------------------------------------


class Call:
    """A function of tensors under a name, as an entry of op_db."""

    variant_test_name = ""

    def __init__(self, name: str, function: Any):
        self.name, self.function = name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Arguments:
    """A sample: its first argument, the others, and those by name."""

    input: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def made(name: str, function: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(Call(name, function), Arguments(args[0], args[1:], kwargs))


def called(key: str) -> Case:
    """A line's overload on the arguments that it is tried on."""
    args, kwargs = CALLS[key]()
    overload = table.lines()[key].overload
    first = key in FIRST_RESULT
    return made(key, (lambda *args, **kwargs: overload(*args, **kwargs)[0]) if first else overload, *args, **kwargs)


def recurrent(kind: Any, *states: Any, x: Any = None, **options: Any) -> Case:
    """A layer of torch.nn with its parameters as operands."""
    module = kind(3, 4, dtype=torch.float64, **options)
    names = [name for name, _ in module.named_parameters()]

    def run(x: Any, states: Any, *weights: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, *states))

    given = real(5, 2, 3) if x is None else x
    return made(f"{kind.__name__}({options})", run, given, states, *(p.detach() for p in module.parameters()))


def test_recurrent_layers() -> None:
    """Whole in the normal form: layers, directions, biases, projections, the batch in front, none, and cells."""
    torch.manual_seed(0)
    nn, state = torch.nn, real(2, 2, 4)
    cases = [
        recurrent(nn.LSTM, (real(4, 2, 4), real(4, 2, 4)), num_layers=2, bidirectional=True),
        recurrent(nn.LSTM, (real(1, 2, 2), real(1, 2, 4)), proj_size=2, bias=False),
        recurrent(nn.GRU, state, num_layers=2, batch_first=True, x=real(2, 5, 3)),
        recurrent(nn.GRU, real(1, 4), x=real(5, 3)),
        recurrent(nn.RNN, state, bidirectional=True),
        recurrent(nn.RNN, nonlinearity="relu"),
        recurrent(nn.LSTMCell, (real(2, 4), real(2, 4)), x=real(2, 3)),
        recurrent(nn.GRUCell, real(2, 4), x=real(2, 3), bias=False),
        recurrent(nn.RNNCell, real(2, 4), x=real(2, 3)),
    ]
    check(cases)


def grouped_by_loop(x: Any, weight: Any, ends: Any) -> Any:
    parts = x.tensor_split(ends.tolist())
    return torch.cat([*(p @ w for p, w in zip(parts, weight, strict=False)), parts[-1] @ torch.zeros_like(weight[0])])


def test_grouped_products() -> None:
    """Rows by groups whose sizes are data, one of them empty, and rows of none; against a loop over the groups."""
    torch.manual_seed(0)
    x, weight, ends = real(7, 3), real(4, 3, 5), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    line = table.lines()["transformers.grouped_mm_fallback.default"]
    graph = gradc.trace(line.function, x="f64[S,3]", weight="f64[4,3,5]", ends="i32[4]")
    joint = gradc.differentiate(graph, ["x", "weight"])
    wanted = grouped_by_loop(x, weight, ends)
    cotangent = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, [x, weight], cotangent)
    given = {"x": x, "weight": weight, "ends": ends, "d.y": cotangent}
    found = interp.run(joint, {name: value.detach().numpy() for name, value in given.items()})
    for name, want in (("y", wanted.detach()), ("d.x", grads[0]), ("d.weight", grads[1])):
        assert not differing(name, found[name], want)


@pytest.mark.parametrize("along", ["rows", "columns", "what is summed", "no ends"])
def test_grouped_products_are_eagers(along: str) -> None:
    """Every form that ``_grouped_mm`` takes, value and gradients, as one region; torch compiles it in bf16 alone."""
    torch.manual_seed(0)
    shapes = {
        "rows": ((24, 16), (4, 16, 8)),
        "columns": ((4, 16, 8), (8, 24)),
        "what is summed": ((16, 24), (24, 8)),
        "no ends": ((4, 16, 8), (4, 8, 24)),
    }
    ends = None if along == "no ends" else torch.tensor([8, 8, 16, 24], dtype=torch.int32)
    x, y = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes[along])
    eager = torch._grouped_mm(x, y, offs=ends)
    cotangent = torch.randn_like(eager)
    wanted = torch.autograd.grad(eager, [x, y], cotangent)
    compiled = torch.compile(torch._grouped_mm, backend="gradc", fullgraph=True)
    found = compiled(x, y, offs=ends)
    for one, other in zip((found, *torch.autograd.grad(found, [x, y], cotangent)), (eager, *wanted), strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= 2.0**-7 * other.abs().max()


def test_counts_and_searches() -> None:
    """histc, scalars in searches, sums of other dtypes."""
    torch.manual_seed(0)
    x, line = torch.randn(300, dtype=torch.float64), torch.tensor([1.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    x[:4] = torch.tensor([-1.5, 2.5, float("nan"), float("inf")])  # both ends of a range, and what lies in none
    whole = torch.tensor([[3, 1, 2], [1, 1, 0]])
    edges = torch.arange(8.0, dtype=torch.float64).remainder(4)
    cases = [
        made("histc", torch.histc, x, bins=7, min=-1.5, max=2.5),
        made("histc of integers", torch.histc, edges, 4, 0, 3),
        made("histc of f32", lambda x: torch.histc(x.float() * 3, bins=10, min=-1, max=1).double(), x),
        *(
            made("searchsorted", torch.searchsorted, line, v, right=r)
            for v, r in ((2.0, True), (2.0, False), (9, True))
        ),
        made("bucketize", lambda line: torch.bucketize(4, line), line),
        made("isin", torch.isin, whole, 1),
        made("isin inverted", torch.isin, whole, 1, invert=True),
        made("isin of a number", lambda x: torch.isin(2, x), whole),
        made("isin of a number inverted", lambda x: torch.isin(2, x, invert=True), whole),
        *(made("i32", f, whole, 1, dtype=torch.int32) for f in (torch.cumsum, torch.cumprod, torch.sum, torch.prod)),
        made("i32 of all", torch.sum, whole, dtype=torch.int32),
    ]
    check(cases)


def test_histc_over_what_no_float_holds() -> None:
    """An infinite length, and one beyond the dtype, are left to torch."""
    line = table.lines()["aten.histc.default"].function
    for low, high in ((0.0, np.inf), (-np.inf, np.inf), (-3e38, 3e38), (np.nan, 1.0)):
        with pytest.raises(Unsupported, match="histc"):
            gradc.trace(lambda x, low=low, high=high: line(x, 4, low, high), x="f32[3]")


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8, torch.int32, torch.int64))
def test_shifts(dtype: Any) -> None:
    """By arrays and numbers, also negative ones and those from the width on, which torch wraps to the dtype."""
    x = torch.tensor([[100, 5, 3], [77, 0, 1]]).to(dtype) * (1 if dtype is torch.uint8 else -1)
    by = torch.tensor([1, 7, 0]).to(dtype)
    left, right = torch.bitwise_left_shift, torch.bitwise_right_shift
    cases = [made("arrays", f, x, by) for f in (left, right, torch.Tensor.__lshift__, torch.Tensor.__rshift__)]
    for number in (0, 3, 7, 8, 31, 64, -1, 256 + 2):
        cases += [made(f"by {number}", f, x, number) for f in (left, right, torch.Tensor.__lshift__)]
    cases += [made("of a number", lambda by, f=f: f(77, by), by) for f in (left, right)]
    cases.append(made("a float, which a graph's gradient needs", torch.neg, real(2)))
    check(cases)


class Sums(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x.add(y, alpha=0.3), x.sub(y, alpha=0.3), torch.rsub(x, y, alpha=0.7), torch.add(x, 0.37, alpha=0.3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sums_with_a_factor_are_rounded_once(dtype: Any) -> None:
    """The bits of eager's vector loops, under numerics that keep every rounding of the graph."""
    torch.manual_seed(0)
    x, y = torch.rand(4096).to(dtype) + 0.1, torch.randn(4096).to(dtype)
    module = gradc.compile(gradc.from_torch(Sums(), (x, y)), target="cpu", numerics="strict")
    for found, wanted in zip(module(x=x, y=y).values(), Sums()(x, y), strict=True):
        assert torch.equal(found, wanted)


def test_index_of_uint8_is_no_position() -> None:
    """torch reads it as a mask."""
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    case = made("mask", lambda x, m: torch.ops.aten.index_put(x, [m], x[:2]), real(3), mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AssertionError, match="an index of uint8, which torch reads as a mask"):
            imported([case])


def differing(what: str, got: Any, want: Any) -> dict[str, str]:
    try:
        off = TOLERANCES.get(what.partition(":")[0], 1e-10)
        torch.testing.assert_close(torch.as_tensor(np.array(got)), want, rtol=off, atol=off, equal_nan=True)
    except AssertionError as error:
        return {what: str(error)}
    return {}
