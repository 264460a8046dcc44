"""choose_reduction: selects a strategy for every combine across rows.

The strategies are described in :mod:`strategies`.  All but ``atomic`` give the same bits in every run; ``atomic`` is
chosen only if determinism is not required, and ``atomic_fixed`` only if rows cannot be sorted.

The choice depends on shapes and the device's constants, so that it never waits for the device; on a CPU, where its
constants say so and sizes leave it open, also on a sample of the index (:mod:`gradc.ir.sample`).  If symbolic sizes
decide, the alternatives are kept in a select whose predicates are evaluated at the call: on a GPU ``N >= crossover`` if
one symbol decides, else comparisons of cost terms (:mod:`gpu_choice`).  ``python -m benchmarks.streams`` says how good
the choice is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from ...analysis.chunks import MOST_PARTIALS, chunk_rows
from ...analysis.combine import Combine, ascends, combines, index_buffer
from ...analysis.cost import Estimate, estimates, ways
from ...analysis.strategies import (
    DEFAULT,
    MISSED,
    ON_HOST,
    PRIVATIZED,
    SCATTERED_KEYS,
    SEGMENTED,
    SHARES,
    STRATEGIES,
    sorted_row,
)
from ...errors import InvalidProblem, TypeRuleError, Unsupported
from ...ir.dims import Dim, Predicate, Size, evaluate, nominal, nonnegative, product, symbol, symbols, total
from ...ir.kernel import Kernel, Program, Select, Step, alternatives, taken
from ...ir.sample import FEWEST, MOST, Sample
from ...ir.types import Type
from ...targets.devices import CPU, Cpu, Device, Gpu
from ..manager import program_pass
from .gpu_choice import Case, cases, decided, fallback


def host_cases(
    rows: Size,
    cols: Size,
    size: Size,
    device: Cpu = CPU,
    ordered: bool = False,
    width: Size | None = None,
    sample: Sample | None = None,
) -> tuple[Case, ...]:
    """The cases for sorting rows or using a partial result per chunk on the CPU; the first that holds is taken.

    Rows are sorted where that takes less time than their chunks' partial results, :func:`sorted_row` elements of them
    for each row.  All partial results together have ``MOST_PARTIALS`` elements at most, for which chunks are longer, or
    there is one.  One and two are counted; three and more are taken to have as many as they may, of which they have
    three quarters at least.  Where caches do not hold one, a row waits for a share of its elements, and a sort takes so
    much less beside it.

    :param cols: elements that a row reads, :param size: that the results have.
    :param ordered: whether the rows are in the order of their index.  :param width: elements that a row adds, or
        ``cols``.
    :param sample: numbers of the index, by which a sorted row takes longer, or less long: they decide where sizes do
        not, whatever they are.
    """
    width = cols if width is None else width

    def sorts(unit: int, more: Size, fewest: Size) -> Iterator[list[Size]]:
        """When rows are sorted that take ``more`` besides, of results of so many elements or more; an element of a
        partial result is ``unit`` times ``SHARES`` there.
        """
        shares = SHARES * unit
        for times, missed in reversed(MISSED):
            if missed and not device.missed:
                continue
            each = unit * sorted_row(width, ordered, device, missed) + more
            least = times * device.cached
            pays = [shares * size - each * chunk_rows(rows, cols) - 1, size - least]
            if isinstance(fewest, Dim) or fewest > least:
                pays.append(size - fewest)
            yield [*pays, shares * MOST_PARTIALS - each * rows - 1, MOST_PARTIALS // 3 - size]
            yield [*pays, shares * 2 * size - each * rows - 1, MOST_PARTIALS // 2 - size]
            yield [*pays, shares * size - each * rows - 1]

    when = None
    if sample is not None and not ordered and (device.skew or device.locality):
        with contextlib.suppress(TypeRuleError):  # sizes alone decide, as below
            when = _by_data(sorts, sample, rows, width, device)
    try:
        when = when or nonnegative(*sorts(1, 0, 0))
    except TypeRuleError:  # the sizes have more terms than a size may have
        return ((None, PRIVATIZED.name),)
    return decided([(when, SEGMENTED.name), (nonnegative([]), PRIVATIZED.name)])


def _by_data(
    sorts: Callable[[int, Size, Size], Iterator[list[Size]]], sample: Sample, rows: Size, width: Size, device: Cpu
) -> Predicate | None:
    """The condition for sorting rows by sizes and a sample of their index, or None where the sample changes nothing.

    :param sorts: (unit, shares of it that a sorted row takes longer, elements of a result at least) -> conjunctions.
    """
    if isinstance(rows, int) and rows < FEWEST:
        return None
    longer, less = (
        round(constant / device.partial * SHARES) * symbol(name)
        for constant, name in zip((device.skew, device.locality), sample.names, strict=True)
    )
    nearby = sorts(MOST, longer - less, SCATTERED_KEYS * width) if device.locality else ()
    when = nonnegative(*sorts(MOST, longer, 0), *nearby, reduced=False)
    may, must = when.within(sample.names, MOST)
    sizes = frozenset().union(*(symbols(c.left) | symbols(c.right) for c in when.comparisons)) - {*sample.names}
    return when if sizes or may.holds({}) != must.holds({}) else None


@program_pass("BITS")
def choose_reduction(
    program: Program,
    *,
    force: Mapping[str, str] | None = None,
    device: Device = CPU,
    determinism: Literal["run", "none"] = "run",
    available: Collection[str] = ON_HOST,
) -> Program:
    """accum g[%t, d]  ->  order(g) strategy(g: segmented)

    :param force: output, or "*", -> strategy, which is used even if it is not deterministic.
    :param determinism: ``"run"``: every run gives the same bits; ``"none"`` allows a GPU to add in any order if that is
        faster by 10 %.
    :param available: the strategies for which the target has kernels.
    """
    if determinism not in ("run", "none"):
        raise InvalidProblem(f"determinism={determinism!r}; there are 'run' and 'none'")
    types, outputs = {b.name: b.type for b in program.buffers}, dict(program.outputs)
    force = {
        program.root(outputs.get(name, name)) if name in (*types, *outputs) else name: strategy
        for name, strategy in (force or {}).items()
    }
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Kernel) and step.accums:
            steps.append(
                _on_gpu(step, types, force, device, determinism, available)
                if isinstance(device, Gpu)
                else _decide(step, types, force, device, program.dims)
            )
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def _forced(part: Combine, force: Mapping[str, str], allowed: Collection[str], known: Collection[str]) -> str:
    """The forced strategy if it is applicable, else ""."""
    wanted = force.get(part.buffer) or force.get("*")
    if wanted is not None:
        if wanted not in known:
            raise Unsupported(f"the reduction {wanted!r}: there are {', '.join(known)}")
        if wanted not in allowed and part.buffer in force:
            raise Unsupported(
                f"the combine into {part.buffer} cannot be {wanted}: its index allows {', '.join(allowed)}"
            )
    return str(wanted) if wanted in allowed else ""


def _on_gpu(
    kernel: Kernel,
    types: Mapping[str, Type],
    force: Mapping[str, str],
    device: Gpu,
    determinism: str,
    available: Collection[str],
) -> Step:
    parts = combines(kernel, types)
    picks: dict[str, str] = {}
    undecided: tuple[Combine, tuple[Case, ...]] | None = None

    def allowed_ways(part: Combine) -> list[str]:
        every = ways(part, types, device)
        allowed = [way for way in every if way in available]
        if not allowed:
            raise Unsupported(
                f"the combine into {part.buffer} needs one of {', '.join(every)}; there are kernels"
                f" for {', '.join(available) or 'none'} on {device.name}"
            )
        return allowed

    for part in parts:
        allowed = allowed_ways(part)
        forced = _forced(part, force, allowed, available)
        options: tuple[Case, ...] = (
            ((None, forced),) if forced else cases(kernel, part, types, device, determinism, allowed)
        )
        if len(options) > 1 and undecided is None:
            undecided = part, options
        picks[part.buffer] = options[-1][1] if len(options) == 1 else ""
    for part in parts:
        # a kernel has one select: the other combines get the choice for sizes of 1024
        if not picks[part.buffer] and undecided is not None and part is not undecided[0]:
            picks[part.buffer] = fallback(kernel, part, types, device, determinism, allowed_ways(part))

    def instead(part: Combine) -> str:
        allowed = [way for way in allowed_ways(part) if not STRATEGIES[way].visits]
        if not allowed:
            raise Unsupported(
                f"{kernel.name} adds into {part.buffer} in another order than its other results, and no kernel of this"
                " target does without an order"
            )
        return fallback(kernel, part, types, device, determinism, allowed)

    if undecided is None:
        return _with(kernel, parts, picks, types, instead)
    part, options = undecided
    same = [
        p.buffer for p in parts if not force.get(p.buffer) and p.gathered and p.key == part.key and p.tail == part.tail
    ]
    made: list[tuple[Predicate | None, Kernel]] = []
    for when, strategy in options:
        chosen = {**picks, part.buffer: strategy}
        # rows in that order serve every result with these keys; without it none is worth the sort alone
        if STRATEGIES[strategy].visits == "by key" or STRATEGIES[strategy].partials:
            chosen |= dict.fromkeys(same, strategy)
        made.append((when, _with(kernel, parts, chosen, types, instead)))
    return Select(tuple(made))


def _decide(
    kernel: Kernel, types: Mapping[str, Type], force: Mapping[str, str], device: Device, dims: Collection[str]
) -> Step:
    assert isinstance(device, Cpu)
    parts = combines(kernel, types)
    picks: dict[str, str] = {}
    # accums with the same key share a row order, so they are segmented, or privatized, together
    by_key: dict[object, list[Combine]] = {}
    for part in parts:
        allowed = ways(part, types)
        forced = _forced(part, force, allowed, ON_HOST)
        orders = {STRATEGIES[name].visits for name in allowed}
        if not forced and "by key" in orders and "by owner" not in orders:  # whether to sort depends on the sizes
            by_key.setdefault(part.key, []).append(part)
        else:
            picks[part.buffer] = forced or min(estimates(kernel, part, types, device=device), key=_rank).strategy

    def elements(group: list[Combine]) -> Size:
        return total(product(types[part.buffer].shape) for part in group)

    def pick(group: list[Combine], strategy: str) -> None:
        picks.update({part.buffer: strategy for part in group})

    undecided: list[tuple[list[Combine], tuple[Case, ...]]] = []
    samples = {key: _sample_of(kernel, group[0], types, dims) for key, group in by_key.items()}
    for key, group in by_key.items():
        in_order = all(ascends(kernel, part) for part in group)
        width = total(product(types[part.buffer].shape[part.leading :]) for part in group)
        options = host_cases(kernel.row_count, kernel.col_count, elements(group), device, in_order, width, samples[key])
        picked = [picks[part.buffer] for part in parts if part.key == key and part.buffer in picks]
        sorts = [strategy for strategy in picked if STRATEGIES[strategy].visits == "by key"]
        if sorts:
            pick(group, sorts[0])
        elif len(options) == 1:
            pick(group, options[0][1])
        else:
            undecided.append((group, options))
    if undecided and any(STRATEGIES[strategy].visits for strategy in picks.values()):  # the row order is taken
        for group, _ in undecided:
            pick(group, DEFAULT.name)
        undecided = []
    if not undecided:
        return _with(kernel, parts, picks, types)
    sizes = [elements(group) for group, _ in undecided]
    largest = max(range(len(sizes)), key=lambda i: evaluate(sizes[i], nominal([sizes[i]])))
    for i, (group, _) in enumerate(undecided):
        if i != largest:
            pick(group, DEFAULT.name)
    made: list[tuple[Predicate | None, Kernel]] = []
    for when, strategy in undecided[largest][1]:
        pick(undecided[largest][0], strategy)
        made.append((when, _with(kernel, parts, picks, types)))
    sample = samples[undecided[largest][0][0].key]
    sides = [side for when, _ in made if when for c in when.comparisons for side in (c.left, c.right)]
    looks = sample is not None and not frozenset().union(*map(symbols, sides)).isdisjoint(sample.names)
    return Select(tuple(made), sample if looks else None)


def _sample_of(kernel: Kernel, part: Combine, types: Mapping[str, Type], dims: Collection[str]) -> Sample | None:
    """A sample of the index of a combine, under names that no dim has; None where it has none of its own, or rows have
    a width that is not known: their conditions are long as they are.
    """

    def unused(word: str) -> str:
        return next(name for name in (word, *(f"{word}_{i}" for i in range(1, len(dims) + 2))) if name not in dims)

    buffer = index_buffer(kernel, part, types) if isinstance(kernel.col_count, int) else ""
    return Sample(unused("skew"), unused("locality"), buffer) if buffer else None


def _rank(estimate: Estimate) -> tuple[float, int]:
    """The fastest first; of equals the first of STRATEGIES."""
    return estimate.seconds, list(STRATEGIES).index(estimate.strategy)


def _with(
    kernel: Kernel,
    parts: list[Combine],
    picks: Mapping[str, str],
    types: Mapping[str, Type],
    instead: Callable[[Combine], str] = lambda part: DEFAULT.name,
) -> Kernel:
    """The kernel with its strategies.  A kernel has at most one row order: an accum that needs another one gets a
    strategy that needs none.
    """
    order: Combine | None = None
    final: dict[str, str] = {}
    for part in sorted(parts, key=lambda p: not STRATEGIES[picks[p.buffer]].visits):
        chosen = picks[part.buffer]
        if STRATEGIES[chosen].visits:
            if order is None:
                order = part
            elif (final[order.buffer], _visited(order, chosen)) != (chosen, _visited(part, chosen)):
                chosen = instead(part)
        final[part.buffer] = chosen
    strategy = tuple((p.buffer, final[p.buffer]) for p in parts)
    decided = replace(kernel, order=order.buffer if order else "", strategy=strategy)
    return decided.rehashed(types)  # the strategy is part of the structure


def _visited(part: Combine, strategy: str) -> object:
    """A key of the row order that a strategy needs: equal keys mean the same order."""
    return part.key if STRATEGIES[strategy].visits == "by key" else part.kept


def decisions(
    program: Program, dims: Mapping[str, int] | None = None, device: Device = CPU
) -> list[tuple[str, str, str, list[Estimate]]]:
    """For explain(): (kernel, buffer, chosen strategy, estimates) of each accum."""
    types = {b.name: b.type for b in program.buffers}
    out: list[tuple[str, str, str, list[Estimate]]] = []
    for step in program.steps:
        kernel = taken(step, dims) if dims is not None else next(alternatives(step))
        if not isinstance(kernel, Kernel):
            continue
        for part in combines(kernel, types):
            out.append(
                (
                    kernel.name,
                    part.buffer,
                    kernel.strategies.get(part.buffer, ""),
                    estimates(kernel, part, types, dims, device),
                )
            )
    return out
