"""The cost model: predicted bytes and time of each reduction strategy, from shapes only, and the bytes that kernels and
programs must move.

The strategies' formulas are in :mod:`strategies`, the machine parameters in :mod:`devices`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Unsupported
from ..ir.dims import Size, evaluate, nominal, product
from ..ir.kernel import Call, Kernel, Loop, Program, Step, alternatives, possible
from ..ir.node import REGISTRY
from ..ir.types import Type
from ..process.forks import once_each
from ..targets.devices import CPU, Cpu, Device, Gpu
from .combine import (
    Combine,
    Hits,
    HostScatter,
    Scatter,
    ascends,
    combines,
    exact,
    expected_hits,
    numbers,
    scatter_of,
    scatter_sizes,
)
from .strategies import DEFAULT, ON_GPU, ON_HOST, STRATEGIES, floor

MARGIN = 1.1
"""The factor by which a nondeterministic strategy must be faster to be chosen."""
MOST_SORTED = 2**31 - 3
"""The maximum number of rows, and of distinct keys, of a sort: positions and keys have 32 bits."""


@dataclass(frozen=True)
class Estimate:
    """A strategy's predicted cost.

    :param bytes: moved by the kernel's accum with this strategy.  :param seconds: predicted time.
    :param why: the explanation that ``explain()`` prints.
    :param floor: bytes that every strategy must move; 0 if not known.
    :param deterministic: whether every run gives the same bits.
    """

    strategy: str
    bytes: int
    seconds: float
    why: str
    floor: int = 0
    deterministic: bool = True


def ways(combine: Combine, types: Mapping[str, Type], device: Device = CPU) -> list[str]:
    """The names of the strategies that are correct for an accum on a device."""
    dtype, whole = types[combine.buffer].dtype, exact(combine, types)
    return [
        name
        for name in (ON_GPU if isinstance(device, Gpu) else ON_HOST)
        if STRATEGIES[name].right(combine, dtype, whole)
    ]


def deterministic(strategy: str, combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether an accum with this strategy gives the same bits in every run."""
    return STRATEGIES[strategy].deterministic or exact(combine, types)


def estimates(
    kernel: Kernel,
    combine: Combine,
    types: Mapping[str, Type],
    dims: Mapping[str, int] | None = None,
    device: Device = CPU,
    *,
    unique: int | None = None,
    hits: int | None = None,
) -> list[Estimate]:
    """The table of choose_reduction: the estimate of each correct strategy.

    :param unique: the number of distinct rows of the result that are updated; by default the expected number for
        uniformly random indices.
    :param hits: the largest number of updates of one row; by default the smallest possible.
    """
    names = ways(combine, types, device)
    if isinstance(device, Cpu):
        return _on_host(_host_scatter(kernel, combine, types, dims), device, names)
    assert isinstance(device, Gpu)
    sizes = scatter_of(kernel, combine, types)
    bound = numbers(sizes, nominal(scatter_sizes(sizes), dims))
    return predict(bound, device, names, expected_hits(bound, unique, hits))


def _host_scatter(
    kernel: Kernel, combine: Combine, types: Mapping[str, Type], dims: Mapping[str, int] | None
) -> HostScatter:
    type_ = types[combine.buffer]
    others = [b for b, strategy in kernel.strategy if STRATEGIES[strategy].partials and b != combine.buffer]
    shapes = [types[b].shape for b in (combine.buffer, *others)]
    bound = nominal([s for _, s in (*kernel.rows, *kernel.cols)] + [n for shape in shapes for n in shape], dims)
    rows, cols, out = (evaluate(size, bound) for size in (kernel.row_count, kernel.col_count, product(type_.shape)))
    owners = evaluate(product(size for axis, size in kernel.rows if axis in combine.kept), bound)
    added = rows * (cols if kernel.stmt_level(combine.stmt) & {a for a, _ in kernel.cols} else 1)
    other_results = tuple(evaluate(product(shape), bound) for shape in shapes[1:])
    item = type_.dtype.itemsize
    return HostScatter(rows, cols, out, item, added * item, owners, other_results, ascends(kernel, combine))


def _on_host(s: HostScatter, device: Cpu, names: Sequence[str]) -> list[Estimate]:
    answer = []
    for name in names:
        cost = STRATEGIES[name].host
        assert cost is not None
        answer.append(Estimate(name, *cost(s, device)))
    return answer


def predict(
    s: Scatter[int], device: Gpu, names: Sequence[str] = tuple(STRATEGIES), hits: Hits | None = None
) -> list[Estimate]:
    """The estimates of the strategies ``names`` on a GPU."""
    hits = hits or expected_hits(s)
    return [
        Estimate(
            way.name,
            *way.gpu.cost(s, hits, device),
            way.gpu.words(s, hits, device),
            floor(s),
            s.exact or way.deterministic,
        )
        for way in STRATEGIES.values()
        if way.name in names and way.gpu is not None
    ]


def cheapest(s: Scatter[int], device: Gpu, names: Sequence[str]) -> str:
    """The fastest strategy on a GPU; a nondeterministic one must be faster than the deterministic ones by MARGIN."""
    hits = expected_hits(s)
    seconds = {
        way.name: way.gpu.cost(s, hits, device)[1] * (1 if s.exact or way.deterministic else MARGIN)
        for way in STRATEGIES.values()
        if way.name in names and way.gpu is not None
    }
    return min(seconds, key=seconds.__getitem__)


def check_sorts(program: Program, dims: Mapping[str, int]) -> None:
    """Checks the limits of sorts, whose positions and keys have 32 bits.

    :raises Unsupported: a kernel or call that runs at these sizes would sort more than ``MOST_SORTED`` rows, distinct
        keys or elements of a row.
    """
    for step, item, size, what in _sorts(program):
        if (count := evaluate(size, dims)) > MOST_SORTED and any(item is each for each in possible(step, dims)):
            raise Unsupported(f"{item.name}: {what.format(count)}")


@once_each
def _sorts(program: Program) -> Sequence[tuple[Step, Kernel | Call, Size, str]]:
    """Program -> each number that one of its sorts counts to, with the step, what runs in it, and an error's text."""
    found: list[tuple[Step, Kernel | Call, Size, str]] = []
    for step in program.steps:
        for item in alternatives(step):
            if isinstance(item, Call) and (operand := REGISTRY[item.op].sorts) is not None:
                size = dict(item.axes)[item.views[operand][-1]]
                found.append((step, item, size, f"a sort of {{}} elements; it counts to {MOST_SORTED}"))
            if isinstance(item, Kernel) and item.row_order == "by key":
                part = next(c for c in combines(item, program.types) if c.buffer == item.order)
                results = product(program.types[item.order].shape[: part.leading])
                for counted, size in (("rows", item.row_count), ("rows of its result", results)):
                    further = f"reductions={{{{'*': {DEFAULT.name!r}}}}} further"
                    text = f"a segmented sum over {{}} {counted}; it counts to {MOST_SORTED}, {further}"
                    found.append((step, item, size, text))
    return found


def kernel_bytes(
    kernel: Kernel, types: Mapping[str, Type], dims: Mapping[str, int], forwarded: Collection[str] = ()
) -> int:
    """The bytes a kernel must move: each buffer it reads or writes once; of gathered and of updated buffers only
    the rows that it reads and stores.

    :param forwarded: buffers that have no memory.
    """
    return sum(_buffer_bytes(kernel, name, types, dims) for name in kernel.buffers if name not in forwarded)


def kernel_seconds(kernel: Kernel, types: Mapping[str, Type], dims: Mapping[str, int], gpu: Gpu) -> float:
    """Of a kernel that its bytes bound."""
    return gpu.launch + kernel_bytes(kernel, types, dims) / gpu.bandwidth


def _buffer_bytes(kernel: Kernel, name: str, types: Mapping[str, Type], dims: Mapping[str, int]) -> int:
    count = evaluate(types[name].count, dims)
    uses = [s for s in kernel.body if s.buffer == name]
    own = {axis for axis, _ in (*kernel.rows, *kernel.cols)}
    finished = kernel.handed_on and any(  # rows of an axis that is none of its own, all of which are finished
        not v.startswith("%") and v not in own for s in uses for i in s.index for v, _ in i.terms
    )
    if not finished and all(s.op == "load" or (s.op == "store" and s.where) for s in uses):
        count = min(count, evaluate(kernel.row_count, dims) * evaluate(kernel.col_count, dims) * len(uses))
    return count * types[name].dtype.itemsize


def floor_bytes(program: Program, dims: Mapping[str, int]) -> int:
    """A lower bound of the bytes that a program moves: every input read once (only the rows read of gathered ones) and
    every output written once.
    """
    types = program.types
    most = {b.name: 0 for b in program.buffers if not b.alias and b.kind in ("input", "output")}
    for step in program.steps:
        for item in alternatives(step):
            if isinstance(item, Kernel) and program.begins_update(item):
                continue
            for name in {*item.reads, *item.writes}:
                root = program.root(name)
                if root in most:
                    moved = (
                        _buffer_bytes(item, name, types, dims)
                        if isinstance(item, Kernel) and not isinstance(step, Loop)
                        else evaluate(types[root].nbytes, dims)
                    )
                    most[root] = max(most[root], moved)
    return sum(most.values())
