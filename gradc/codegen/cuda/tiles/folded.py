"""A kernel of a tile with fewer operations for each element: constant factors and what a row adds meet in one FMA.

    exp(x * c - m)             ->  2^(x * (c log2 e) - m log2 e)         where m is a maximum that rises, c = 2^k
    exp(x * c - m) * r         ->  2^(x * (c log2e) - m log2 e) * (r d)  where m and r are other values of the row, and
                                                                         d is what the product m log2 e is rounded by
    exp(x * c - m)             ->  2^((x * c - m) * log2 e)              elsewhere, and where they are a column's
    max_cols(x * c)            ->  max_cols(x) * c                       c = 2^k: the same bits
    (p * (x - y)) * c          ->  p * (x * c - y * c)                   where y and c are of a row or a column
    (e * r) * (x - y)          ->  e * (x * r - y * r)                   where y and r are
    (x * p) * c                ->  x * (p * c)                           where p and c are

A ``where`` whose other side is -inf, or 0 of a product, stands between them as before.  These are equal over the reals,
which is the licence of :mod:`gradc.passes.column_blocking`.  The product of a maximum with log2 e is rounded, in all
weights of a row alike; tiles.h takes that out of their sums after the sweep, so that any other kernel may compute the
weights again of the maximum and the sum.  Where a maximum is 2^26 and more, scores that differ do so
by 8 and more: their weights, almost 0, are powers of 2 rather than of e.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from ....analysis.tiles import SweepForm, TileForm
from ....ir.kernel import Kernel
from ....ir.statement import Stmt
from ....ir.types import BOOL, F32, DType
from ....ir.walk import backward_slice
from .canonical import COLUMN, ROW

_EXACT = 2.0**26
"""Below it a maximum's product with log2 e is rounded by at most 4 (tiles.h rescales sums by the same product).
Beyond it a product by a power of two is exact: no weight leaves the range of its dtype.
"""
_FAR = 2.0**30
"""The same of a value of a row whose rounding, by 64 at most, another factor of the row takes out before anything else
reads the weight.  From it on two scores are equal or 64 apart and more: weights relative to a maximum are 1, or nearly
0 to either base.  Before that factor a weight is up to 2^64 times itself, so that one above 2^64 may become infinite,
of a row beside 2^30 whose value is no maximum.
"""
_FAR_IN_C = f"0x1p{math.log2(_FAR):.0f}f"
EXPRESSIONS: Mapping[str, str] = {
    **{"mad": "mad_f32({0}, {1}, {2})", "power": "exp2_approx({0})"},
    **{"base": "gradc_base({0})", "exponent": "gradc_exponent({0})"},
    **{f"{name}_of_row": f"gradc_{name}({{0}}, {_FAR_IN_C})" for name in ("exponent", "rounding")},
    "whole": "gradc_whole({0})",
}
"""The operations that only kernels of tiles have: a * b + c rounded once, 2^x within 2 units in the last place, and an
integer of 8 bits as f32.
"""
_LOG2E = math.log2(math.e)
_TINY = 2.0**-20
_EXTREMES = ("max_cols", "min_cols")


def folded(form: TileForm) -> TileForm:
    """The form with the rewrites of this module in the kernels of its sweeps."""

    def of(sweep: SweepForm) -> SweepForm:
        if not sweep.divides:  # the product of a maximum and log2 e is rounded, which a loss near 0 would show
            return masked_once(sweep)
        rising = frozenset(c.by for c in sweep.sweep.carries if c.by)
        steps = (_Folder(step, rising).kernel() if isinstance(step, Kernel) else step for step in sweep.steps)
        return masked_once(replace(sweep, steps=tuple(steps)))

    return replace(form, sweeps=tuple(map(of, form.sweeps)))


def masked_once(sweep: SweepForm) -> SweepForm:
    """where(mask, s, -inf) in several kernels  ->  s <- where(mask, s, -inf) in the first of them, for a block s that
    nothing reads but such masks: at an edge they are not compared twice, nor are s and what is masked kept both.
    """
    for block in {p.block for p in sweep.scores} - {p.block for p in sweep.added}:
        readers = [k for k in sweep.kernels if block in k.reads]
        masks = [_mask_of(k, block) for k in readers]
        if len(readers) < 2 or None in masks or len({_text(k, m) for k, m in zip(readers, masks, strict=True)}) > 1:
            continue
        for kernel, mask in zip(readers, masks, strict=True):
            assert mask is not None
            load = kernel.stmts[mask.args[1]]
            if kernel is readers[0]:
                after = kernel.body.index(mask) + 1
                store = Stmt("", "store", (mask.name,), load.dtype, block, load.index)
                body = (*kernel.body[:after], store, *kernel.body[after:])
            else:
                body = tuple(load.altered(name=mask.name) if s is mask else s for s in kernel.body)
            made = replace(kernel, body=body).live
            sweep = replace(sweep, steps=tuple(made if step is kernel else step for step in sweep.steps))
    return sweep


def _mask_of(kernel: Kernel, block: str) -> Stmt | None:
    """The only statement that uses a block's elements, if it hides some."""
    loads = [s for s in kernel.body if s.op == "load" and s.buffer == block]
    users = [s for s in kernel.body if len(loads) == 1 and loads[0].name in s.uses]
    if len(users) != 1 or users[0].op != "where" or users[0].args[1] != loads[0].name:
        return None
    other = kernel.stmts[users[0].args[2]]
    return users[0] if other.op == "const" and not any(s.buffer == block for s in kernel.body if not s.name) else None


def _text(kernel: Kernel, value: Stmt | None) -> object:
    """What a value is computed of, with no names of values in it."""
    assert value is not None
    args = (_text(kernel, kernel.stmts[u]) for u in value.uses)
    return (value.op, value.dtype, value.buffer, value.index, value.attrs, *args)


class _Folder:
    """Rewrites one kernel, statement after statement.

    :param rising: carries that sums are relative to.
    :ivar now: the statements so far, by name.  :ivar readers: how many statements use a value.
    """

    def __init__(self, kernel: Kernel, rising: Collection[str]):
        self.rising = rising
        self.before, self.names = kernel, kernel.fresh_names()
        self.now: dict[str, Stmt] = {}
        self.body: list[Stmt] = []
        self.readers = Counter(u for s in kernel.body for u in s.uses)
        self.known: dict[object, str] = {}
        self.levels = dict(kernel.levels)

    def kernel(self) -> Kernel:
        rewrites = {"exp": self.power, "mul": self.product, **dict.fromkeys(_EXTREMES, self.extreme)}
        for s in self.before.body:
            rewrite = rewrites.get(s.op) if s.dtype is F32 else None
            self.append((rewrite and rewrite(s)) or s)
        return replace(self.before, body=tuple(self.body)).live

    # -- statements ----------------------------------------------------------------------------------------------------

    def append(self, s: Stmt) -> None:
        self.body.append(s)
        if s.name:
            self.now[s.name] = s
            self.levels.setdefault(s.name, frozenset[str]().union(*(self.levels[u] for u in s.uses)))

    def add(self, op: str, *args: str, dtype: DType = F32, **attrs: float) -> str:
        """The name of a value, computed once."""
        key = (op, args, *attrs.items())
        if key not in self.known:
            self.known[key] = next(self.names)
            while self.known[key] in self.now:
                self.known[key] = next(self.names)
            self.append(Stmt(self.known[key], op, args, dtype, attrs=tuple(attrs.items())))
        return self.known[key]

    def constant(self, value: float) -> str:
        return self.add("const", value=float(value))

    def times(self, value: str, factor: float) -> str:
        return value if factor == 1 else self.add("mul", value, self.constant(factor))

    def value(self, name: str) -> float | None:
        """A constant's."""
        s = self.now[name]
        return float(s.attr("value")) if s.op == "const" and s.dtype is F32 else None

    def is_element(self, name: str) -> bool:
        """Whether a value is another one in each element."""
        return {ROW, COLUMN} <= self.levels[name]

    # -- rewrites ------------------------------------------------------------------------------------------------------

    def unscaled(self, name: str) -> tuple[str, float]:
        """A value as another one times a factor, a power of two, which rounds nothing."""
        s = self.now[name]
        if s.dtype is F32 and s.op == "mul":
            for x, c in (s.args, s.args[::-1]):
                if (factor := self.value(c)) is not None and math.frexp(factor)[0] == 0.5:
                    inner, more = self.unscaled(x)
                    if _TINY < factor * more < 1 / _TINY:
                        return inner, factor * more
        if s.dtype is F32 and s.op == "where" and self.value(s.args[2]) == -math.inf:
            inner, factor = self.unscaled(s.args[1])
            if factor != 1:
                return self.add("where", s.args[0], inner, s.args[2]), factor
        return name, 1.0

    def power(self, s: Stmt) -> Stmt | None:
        """exp(x - m) of an element."""
        argument = self.now[s.args[0]]
        if not self.is_element(argument.name):
            return None
        if argument.op != "sub" or self.is_element(argument.args[1]):
            x, factor = self.unscaled(argument.name)
            return s.altered(op="power", args=(self.times(x, factor * _LOG2E),))
        x, factor = self.unscaled(argument.args[0])
        base = argument.args[1]
        if not any(own.op == "load" and own.buffer in self.rising for own in backward_slice(self.body, [base])):
            if COLUMN not in self.levels[base] and self.multiplies(s.name):
                power = self.add("power", self.exponent(x, factor, base, _FAR, "exponent_of_row"))
                return s.altered(op="mul", args=(power, self.add("rounding_of_row", base)))
            beside = self.add("mad", x, self.constant(factor), self.add("neg", base)) if factor != 1 else argument.name
            return s.altered(op="power", args=(self.times(beside, _LOG2E),))
        power = self.exponent(x, factor, self.add("base", self.unmasked(base)), _EXACT, "exponent")
        return s.altered(op="power", args=(power,))

    def exponent(self, x: str, factor: float, base: str, most: float, of: str) -> str:
        """The power of two that x * factor - base is of e, but for the rounding of the base's product with log2 e."""
        small = self.add("lt", self.add("abs", base), self.constant(most), dtype=BOOL)
        scale = self.add("where", small, self.constant(factor * _LOG2E), self.constant(factor))
        return self.add("mad", x, scale, self.add("neg", self.add(of, base)))

    def multiplies(self, name: str) -> bool:
        """Whether all that reads an element is one product with a value of its row."""
        readers = [s for s in self.before.body if name in s.uses]
        return len(readers) == 1 and readers[0].op == "mul" and any(not self.is_element(a) for a in readers[0].args)

    def unmasked(self, base: str) -> str:
        """A maximum m of where(m == -inf, 0, m)."""
        s = self.now[base]
        if s.op != "where" or self.value(s.args[1]) != 0:
            return base
        hidden = self.now[s.args[0]]
        sides = {*hidden.args} if hidden.op == "eq" else set()
        others = sides - {s.args[2]}
        is_least = s.args[2] in sides and len(others) == 1 and self.value(others.pop()) == -math.inf
        return s.args[2] if is_least else base

    def extreme(self, s: Stmt) -> Stmt | None:
        """max(x * c)."""
        x, factor = self.unscaled(s.args[0])
        if factor == 1:
            return None
        found = next(self.names)
        self.levels[found] = self.levels[s.name]
        self.append(s.altered(name=found, args=(x,)))
        return s.altered(op="mul", args=(found, self.constant(factor)))

    def product(self, s: Stmt) -> Stmt | None:
        """(p * (x - y)) * c, and (e * r) * (x - y)."""
        found = ""
        for x, other in (s.args, s.args[::-1]):
            inner = self.now[other]
            if not self.is_element(other):
                found = found or self.scaled(x, other)
            elif inner.op == "mul" and self.readers[other] == 1 and not found:
                for e, r in (inner.args, inner.args[::-1]):
                    scaled = "" if found or self.is_element(r) else self.scaled(x, r)
                    found = found or (scaled and self.add("mul", e, scaled))
        return self.now[found].altered(name=s.name, of=s.of) if found else None

    def scaled(self, name: str, factor: str) -> str:
        """A value that nothing else reads, times a factor, for no further operation; "" where it takes one."""
        s = self.now[name]
        if self.readers[name] > 1 or s.dtype is not F32 or not self.is_element(name):
            return ""
        if s.op == "where" and self.value(s.args[2]) == 0 and math.isfinite(self.value(factor) or 0):
            inner = self.scaled(s.args[1], factor)
            return inner and self.add("where", s.args[0], inner, s.args[2])
        if s.op == "mul":
            for x, p in (s.args, s.args[::-1]):
                if self.is_element(x) and (inner := self.scaled(x, factor)):
                    return self.add("mul", p, inner)
            for x, p in (s.args, s.args[::-1]):
                if self.is_element(x) and not self.is_element(p):
                    return self.add("mul", x, self.add("mul", p, factor))
        if s.op == "sub" and not self.is_element(s.args[1]):
            return self.add("mad", s.args[0], factor, self.add("neg", self.add("mul", s.args[1], factor)))
        if s.op == "mad" and not self.is_element(s.args[1]):
            factors = (self.add("mul", x, factor) for x in s.args[1:])
            return self.add("mad", s.args[0], *factors)
        return ""
