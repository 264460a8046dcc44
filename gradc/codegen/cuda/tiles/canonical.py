"""Loops over canonical names: buffers b0, b1..., sizes n0, n1..., axes i0 (rows) and i1 (columns)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ....ir.dims import Size, substitute, symbol, symbols
from ....ir.kernel import Buffer, Call, Kernel, Loop
from ....ir.statement import Axis, Operand
from ....ir.types import Type
from ...identifiers import identifiers

ROW, COLUMN = "i0", "i1"
"""The axes of all kernels of a loop."""
OF_MAXIMUM = ("exponent", "factor")
"""What a kernel keeps beside a carried maximum to which sums are relative: its power of two, and what a sum that was
relative to the maximum before is multiplied with.
"""


@dataclass(frozen=True)
class Canonical:
    """A loop over canonical names.

    :param types: of its buffers.  :param buffers: those outside, by their own names, in the order of the parameters,
    :param dims: and so the sizes that it is given.
    :param words: the identifier for each canonical name.
    """

    loop: Loop
    types: Mapping[str, Type]
    buffers: tuple[str, ...]
    dims: tuple[str, ...]
    words: Mapping[str, str]

    @property
    def name(self) -> str:
        """``MEANING_tile_hash``: loops that differ only in names of the user's share it."""
        plain = self.loop.with_items(lambda item: replace(item, name="k"))
        text = f"{plain};{';'.join(map(str, self.types.values()))}"
        meaning = next((k.name for k in self.loop.items if isinstance(k, Kernel)), "product_0").rpartition("_")[0]
        return f"{meaning}_tile_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def canonical(loop: Loop, types: Mapping[str, Type]) -> Canonical:
    """The loop over canonical names."""
    inside = [b.name for b in loop.buffers]
    outside = [b for b in dict.fromkeys(_accessed(loop)) if b not in inside]
    given = [d for d in dict.fromkeys(_dims(loop, types)) if d not in loop.symbols]
    names = {b: f"b{i}" for i, b in enumerate((*outside, *inside))}
    dims = {d: f"n{i}" for i, d in enumerate((*given, *loop.symbols))}
    maxima = dict.fromkeys(c.by for sweep in loop.sweeps for c in sweep.carries if c.by)
    beside = {f"{names[b]}_{what}": f"{b} {what}" for b in maxima for what in OF_MAXIMUM}
    spelled = identifiers([*names, *(f"{d} " for d in dims), *beside.values()])
    words = {own: spelled[b] for b, own in names.items()} | {own: spelled[f"{d} "] for d, own in dims.items()}
    words |= {own: spelled[word] for own, word in beside.items()}
    renamed = _Renamer(names, dims, types).loop(loop)
    own = {names[b]: types[b].substitute({d: symbol(n) for d, n in dims.items()}) for b in names}
    return Canonical(renamed, own, tuple(outside), tuple(given), words)


def _accessed(loop: Loop) -> Iterator[str]:
    for item in loop.items:
        yield from item.buffers if isinstance(item, Kernel) else (o.buffer for o in item.accesses)


def _dims(loop: Loop, types: Mapping[str, Type]) -> Iterator[str]:
    """The symbols of its text, in order of first appearance."""
    for size in loop.sizes:
        yield from sorted(symbols(size))
    for sweep in loop.sweeps:
        for bound in (sweep.since, sweep.to):
            yield from sorted(symbols(bound)) if bound is not None else ()
    for item in loop.items:
        if isinstance(item, Kernel):
            yield from item.dims(types)
            continue
        sizes = [size for _, size in item.axes]
        for operand in item.accesses:
            sizes += types[operand.buffer].shape
            sizes += (size for i in operand.index for size in (i.const, *(c for _, c in i.terms)))
        for size in sizes:
            yield from sorted(symbols(size))


@dataclass(frozen=True)
class _Renamer:
    buffers: Mapping[str, str]
    dims: Mapping[str, str]
    types: Mapping[str, Type]

    def size(self, value: Size) -> Size:
        return substitute(value, {name: symbol(other) for name, other in self.dims.items()})

    def axis(self, axis: Axis) -> Axis:
        """An axis that is named by a symbol."""
        return self.dims[axis[0]], self.size(axis[1])

    def item(self, item: Kernel | Call) -> Kernel | Call:
        if isinstance(item, Kernel):
            axes = {item.rows[0][0]: ROW, **({item.cols[0][0]: COLUMN} if item.cols else {})}
            return item.renamed(self.types, self.buffers, self.dims)[0].with_axes(axes)
        plain = item.substitute({name: symbol(other) for name, other in self.dims.items()})

        def of(operand: Operand) -> Operand:
            return replace(operand, buffer=self.buffers[operand.buffer])

        return replace(plain, out=of(plain.out), args=tuple(map(of, plain.args)), note=type(plain.note)())

    def loop(self, loop: Loop) -> Loop:
        sweeps = tuple(
            replace(
                s,
                cols=self.axis(s.cols),
                by=self.size(s.by),
                count=self.dims[s.count],
                carries=tuple(
                    replace(
                        c,
                        name=self.buffers[c.name],
                        type=self.type(c.type),
                        by=self.buffers[c.by] if c.by else "",
                    )
                    for c in s.carries
                ),
                blocks=self.blocks(s.blocks),
                steps=tuple(map(self.item, s.steps)),
                since=self.size(s.since),
                to=None if s.to is None else self.size(s.to),
            )
            for s in loop.sweeps
        )
        return replace(
            loop,
            over=tuple(map(self.axis, loop.over)),
            rows=self.axis(loop.rows),
            by=self.size(loop.by),
            count=self.dims[loop.count],
            blocks=self.blocks(loop.blocks),
            steps=tuple(map(self.item, loop.steps)),
            sweeps=sweeps,
        )

    def blocks(self, blocks: Iterable[Buffer]) -> tuple[Buffer, ...]:
        return tuple(replace(b, name=self.buffers[b.name], type=self.type(b.type)) for b in blocks)

    def type(self, type_: Type) -> Type:
        return type_.substitute({name: symbol(other) for name, other in self.dims.items()})
