"""choose_reduction: every combine across rows gets a strategy.

``regular``: the index is affine in the rows, so each result row has one owner.  ``segmented``: rows are visited in the order of a stable sort of
their index.  ``privatized``: each fixed chunk of rows has a partial result, folded in chunk order.  All give the same bits for any number
of threads.  A GPU also has ``atomic`` (floats in any order: only where determinism is not asked for) and ``atomic_fixed`` (integers, order-free;
small values lose digits: only where rows cannot be sorted, for what scatters single elements).

The choice depends on shapes alone, so nothing waits for the device; where a symbolic size decides, the variants are kept and predicates pick at
the call.  On a GPU these say ``N >= crossover`` where one symbol decides, else they compare the costs themselves: see :mod:`gpu_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Literal

from ..errors import InvalidProblem, Unsupported
from ..ir.dims import Assumption, Size, known_nonnegative, product
from ..ir.kernel import Kernel, Program, Select, Step, alternatives, taken
from ..ir.types import Type
from .chunks import FEWEST_ROWS, MOST_PARTIALS, private_chunk_rows
from .cost import Combine, combines, estimates, strategies, ways
from .devices import CPU, Device, Gpu
from .gpu_choice import Case, cases, fallback
from .gpu_cost import Estimate

STRATEGIES = ("privatized", "regular", "segmented")
"""Those of the CPU, and what is available where nothing is said."""
ORDERED = ("segmented", "regular")
"""Those that decide in which order rows are visited."""
PER_ROW = int(CPU.sort * CPU.bandwidth / 8)


def sort_pays(kernel: Kernel, size: Size) -> Size:
    """Elements of a result from which sorting rows beats a partial result per chunk: 10 ns per row against 8 bytes x elements per chunk at 20 GB/s."""
    return PER_ROW * private_chunk_rows(kernel.row_count, kernel.col_count, size) + 1


def choose_reduction(
    program: Program,
    *,
    force: Mapping[str, str] | None = None,
    device: Device = CPU,
    determinism: Literal["run", "none"] = "run",
    available: Collection[str] = STRATEGIES,
) -> Program:
    """accum g[%t, d]  ->  order(g) strategy(g: segmented)

    :param force: output, or "*", -> strategy; what is forced is done, deterministic or not.
    :param determinism: ``"run"``: the same bits in every run; ``"none"`` lets a GPU add in any order where that is faster by 10 %.
    :param available: the strategies that the target has kernels for.
    """
    if determinism not in ("run", "none"):
        raise InvalidProblem(f"determinism={determinism!r}; there are 'run' and 'none'")
    types = {b.name: b.type for b in program.buffers}
    force = {program.root(dict(program.outputs).get(name, name)) if name in (*types, *dict(program.outputs)) else name: how for name, how in (force or {}).items()}
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Kernel) and step.accums:
            steps.append(_on_gpu(step, types, force, device, determinism, available) if isinstance(device, Gpu) else _decide(step, types, force))
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def _forced(part: Combine, force: Mapping[str, str], allowed: Collection[str], known: Collection[str]) -> str:
    """The strategy that is asked for and can be, else ""."""
    wanted = force.get(part.buffer) or force.get("*")
    if wanted is not None:
        if wanted not in known:
            raise Unsupported(f"the reduction {wanted!r}: there are {', '.join(known)}")
        if wanted not in allowed and part.buffer in force:
            raise Unsupported(f"the combine into {part.buffer} cannot be {wanted}: its index allows {', '.join(allowed)}")
    return str(wanted) if wanted in allowed else ""


def _on_gpu(kernel: Kernel, types: Mapping[str, Type], force: Mapping[str, str], device: Gpu, determinism: str, available: Collection[str]) -> Step:
    parts = combines(kernel, types)
    picks: dict[str, str] = {}
    undecided: tuple[Combine, tuple[Case, ...]] | None = None
    for part in parts:
        allowed = [way for way in ways(kernel, part, types, device) if way in available]
        if not allowed:
            raise Unsupported(f"the combine into {part.buffer} needs one of {', '.join(ways(kernel, part, types, device))}; there are kernels for {', '.join(available) or 'none'}")
        forced = _forced(part, force, allowed, available)
        found: tuple[Case, ...] = ((None, forced),) if forced else cases(kernel, part, types, device, determinism, allowed)
        if len(found) > 1 and undecided is None:
            undecided = part, found
        picks[part.buffer] = found[-1][1] if len(found) == 1 else ""
    for part in parts:
        if not picks[part.buffer] and undecided is not None and part is not undecided[0]:  # one select: others go at sizes of 1024
            allowed = [way for way in ways(kernel, part, types, device) if way in available]
            picks[part.buffer] = fallback(kernel, part, types, device, determinism, allowed)

    def instead(part: Combine) -> str:
        allowed = [way for way in ways(kernel, part, types, device) if way in available and way not in ("segmented", "regular")]
        if not allowed:
            raise Unsupported(f"{kernel.name} adds into {part.buffer} in another order than its other results, and no kernel of this target does without an order")
        return fallback(kernel, part, types, device, determinism, allowed)

    if undecided is None:
        return _with(kernel, parts, picks, types, instead)
    part, found = undecided
    same = [p.buffer for p in parts if not force.get(p.buffer) and p.gathered and p.key == part.key and p.tail == part.tail]
    made: list[tuple[Assumption | None, Kernel]] = []
    for when, how in found:
        chosen = {**picks, part.buffer: how}
        if how in ("segmented", "privatized"):  # rows in that order serve every result with these keys; without it none is worth the sort alone
            chosen |= dict.fromkeys(same, how)
        made.append((when, _with(kernel, parts, chosen, types, instead)))
    return Select(tuple(made))


def _decide(kernel: Kernel, types: Mapping[str, Type], force: Mapping[str, str]) -> Step:
    parts = combines(kernel, types)
    picks: dict[str, str] = {}
    undecided: Assumption | None = None
    for part in parts:
        allowed = strategies(kernel, part)
        forced = _forced(part, force, allowed, STRATEGIES)
        if forced:
            picks[part.buffer] = forced
            continue
        size = product(types[part.buffer].shape)
        enough = sort_pays(kernel, size)
        if allowed == ["privatized", "segmented"]:
            if known_nonnegative(size - enough) or known_nonnegative(size - MOST_PARTIALS):  # one chunk, and no second task
                best = "segmented"
            elif known_nonnegative(enough - 1 - size) or known_nonnegative(PER_ROW * FEWEST_ROWS - size):
                best = "privatized"
            else:  # a symbol decides: keep both, and let its value pick at the call
                undecided, best = Assumption(size, ">=", enough), "segmented"
        else:
            best = min(estimates(kernel, part, types), key=lambda e: e.seconds).strategy
        picks[part.buffer] = best
    chosen = _with(kernel, parts, picks, types)
    if undecided is None:
        return chosen
    other = _with(kernel, parts, {b: "privatized" if s == "segmented" else s for b, s in picks.items()}, types)
    return Select(((undecided, chosen), (None, other)))


def _with(kernel: Kernel, parts: list[Combine], picks: Mapping[str, str], types: Mapping[str, Type], instead: Callable[[Combine], str] = lambda part: "privatized") -> Kernel:
    """At most one visiting order: a second accum that wants another one goes without."""
    order: Combine | None = None
    final: dict[str, str] = {}
    for part in sorted(parts, key=lambda p: picks[p.buffer] not in ORDERED):
        how = picks[part.buffer]
        if how in ORDERED:
            if order is None:
                order = part
            elif (final[order.buffer], order.kept if how == "regular" else order.key) != (how, part.kept if how == "regular" else part.key):
                how = instead(part)
        final[part.buffer] = how
    strategy = tuple((p.buffer, final[p.buffer]) for p in parts)
    decided = replace(kernel, order=order.buffer if order else "", strategy=strategy)
    return decided.named_by_structure(kernel.name.rpartition("_")[0], types)  # the strategy is part of the structure


def decisions(program: Program, dims: Mapping[str, int] | None = None, device: Device = CPU) -> list[tuple[str, str, str, list[Estimate]]]:
    """For explain(): (kernel, buffer, strategy picked, estimates) of each accum."""
    types = {b.name: b.type for b in program.buffers}
    out: list[tuple[str, str, str, list[Estimate]]] = []
    for step in program.steps:
        kernel = taken(step, dims) if dims is not None else next(alternatives(step))
        if not isinstance(kernel, Kernel):
            continue
        for part in combines(kernel, types):
            out.append((kernel.name, part.buffer, kernel.strategies.get(part.buffer, ""), estimates(kernel, part, types, dims, device)))
    return out
