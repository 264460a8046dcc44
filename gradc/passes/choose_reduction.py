"""choose_reduction: every combine across rows gets a strategy.

``regular``: the index is affine in the rows, so each result row has one owner.  ``segmented``: rows are visited in the order of a stable sort of
their index.  ``privatized``: each fixed chunk of rows has a partial result, folded in chunk order.  All give the same bits for any number
of threads.  The choice depends on shapes alone; where a symbolic size decides, both variants are kept and a predicate picks at the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import Unsupported
from ..ir.dims import Assumption, Size, floordiv, known_nonnegative, maximum, minimum, product
from ..ir.kernel import Kernel, Program, Select, Step, alternatives, taken
from ..ir.types import Type
from .cost import CHUNK_LEAST, CHUNK_MOST, Combine, Device, combines, estimates, strategies

STRATEGIES = ("privatized", "regular", "segmented")
PER_ROW = int(Device().sort * Device().bandwidth / 8)


def sort_pays(kernel: Kernel) -> Size:
    """Elements of a result from which sorting rows beats a partial result per chunk: 10 ns per row against 8 bytes x elements per chunk at 20 GB/s."""
    return PER_ROW * maximum(CHUNK_LEAST, minimum(floordiv(kernel.row_count, 256), CHUNK_MOST)) + 1


def choose_reduction(program: Program, *, force: Mapping[str, str] | None = None) -> Program:
    """accum g[%t, d]  ->  order(g) strategy(g: segmented)"""
    types = {b.name: b.type for b in program.buffers}
    force = {program.root(dict(program.outputs).get(name, name)) if name in (*types, *dict(program.outputs)) else name: how for name, how in (force or {}).items()}
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Kernel) and step.accums:
            steps.append(_decide(step, types, force))
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def _decide(kernel: Kernel, types: Mapping[str, Type], force: Mapping[str, str]) -> Step:
    parts = combines(kernel, types)
    picks: dict[str, str] = {}
    undecided: Assumption | None = None
    for part in parts:
        allowed = strategies(kernel, part)
        wanted = force.get(part.buffer) or force.get("*")
        if wanted is not None:
            if wanted not in STRATEGIES:
                raise Unsupported(f"the reduction {wanted!r}: there are {', '.join(STRATEGIES)}")
            if wanted not in allowed and part.buffer in force:
                raise Unsupported(f"the combine into {part.buffer} cannot be {wanted}: its index allows {', '.join(allowed)}")
        if wanted in allowed:
            picks[part.buffer] = str(wanted)
            continue
        size, enough = product(types[part.buffer].shape), sort_pays(kernel)
        if allowed == ["privatized", "segmented"]:
            if known_nonnegative(size - enough) or known_nonnegative(size - PER_ROW * CHUNK_MOST - 1):
                best = "segmented"
            elif known_nonnegative(enough - 1 - size) or known_nonnegative(PER_ROW * CHUNK_LEAST - size):
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


def _with(kernel: Kernel, parts: list[Combine], picks: Mapping[str, str], types: Mapping[str, Type]) -> Kernel:
    """At most one visiting order: a second accum that wants another one is privatized."""
    order: Combine | None = None
    final: dict[str, str] = {}
    for part in sorted(parts, key=lambda p: picks[p.buffer] == "privatized"):
        how = picks[part.buffer]
        if how != "privatized":
            if order is None:
                order = part
            elif (final[order.buffer], order.kept if how == "regular" else order.key) != (how, part.kept if how == "regular" else part.key):
                how = "privatized"
        final[part.buffer] = how
    strategy = tuple((p.buffer, final[p.buffer]) for p in parts)
    decided = replace(kernel, order=order.buffer if order else "", strategy=strategy)
    return decided.named_by_structure(kernel.name.rpartition("_")[0], types)  # the strategy is part of the structure


def decisions(program: Program, dims: Mapping[str, int] | None = None) -> list[tuple[str, str, str, list[object]]]:
    """For explain(): (kernel, buffer, strategy picked, estimates) of each accum."""
    types = {b.name: b.type for b in program.buffers}
    out: list[tuple[str, str, str, list[object]]] = []
    for step in program.steps:
        kernel = taken(step, dims) if dims is not None else next(alternatives(step))
        if not isinstance(kernel, Kernel):
            continue
        for part in combines(kernel, types):
            out.append((kernel.name, part.buffer, kernel.strategies.get(part.buffer, ""), list(estimates(kernel, part, types, dims))))
    return out
