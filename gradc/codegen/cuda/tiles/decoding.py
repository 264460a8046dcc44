"""Codes of a few bits as numbers of 16 or 32 bits, by their bits: without conversions, of which a multiprocessor does a
quarter as many as of sums.

    cast(q)                  ->  whole(q)        f32: an integer of 8 bits behind those of 2^23, less 2^23
    cast(q), cast(q) - z     ->  digit(q, z)     of 4 bits: two at once in a register, each in 16 bits, exactly
    table[q], cast(q: f4)    ->  entry(q)        of 4 bits: bytes of a codebook of 16 numbers, by permutations
    store cast(digit * s)    ->  store digit, s  s multiplies what a product has summed of the columns that share it
    store cast(code * s[j])  ->  store code, s   s multiplies the product's other operand, where a warp's rows share it

A digit of bf16 has the unit 2^-6: an integer of at most 8 bits less another one of as many then is one FMA, and exact.
Such a block is stored times its unit, and the sum divided by it, a power of two.  Where columns of a product share a
scale it multiplies their sum in f32, and no weight is rounded; else each weight is, once, as in the graph.  A product
of no weight by an infinite scale is NaN, and another infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ....analysis.tiles import Strip, SweepForm, TileForm
from ....ir.dims import substitute
from ....ir.kernel import Kernel
from ....ir.node import REGISTRY
from ....ir.statement import Stmt
from ....ir.types import BF16, F32, DType, Type, read
from .canonical import COLUMN, ROW
from .lanes import PAIRED, Lanes, is_byte, shared_values

WHOLE = 2**8
"""The largest integer up to which bf16 has all, and f16 more."""


def decoded(form: TileForm, lanes: Lanes, types: Mapping[str, Type]) -> TileForm:
    """The form with the rewrites of this module in the kernels that decode."""

    def of(sweep: SweepForm) -> SweepForm:
        right = form.scales_right(lanes.tiles)
        made = {c.kernel: _Decoder(c.kernel, sweep, lanes, types, form.dtype, right).kernel() for c in sweep.codes}
        steps = tuple(made.get(s, s) if isinstance(s, Kernel) else s for s in sweep.steps)
        return replace(sweep, steps=steps, codes=tuple(replace(c, kernel=made[c.kernel]) for c in sweep.codes))

    return replace(form, sweeps=tuple(map(of, form.sweeps)))


def paired(kernel: Kernel) -> Stmt | None:
    """The statement of a kernel that decodes two neighbours at once."""
    return next((s for s in kernel.body if s.op in PAIRED), None)


def scaled_columns(sweep: SweepForm, block: str, lanes: Lanes) -> int:
    """How many neighbouring columns of a warp share what their products are multiplied by: those of a lane's run and
    its neighbours', or a power of two times as many.

    :param block: that is stored with a scale of its products.
    """
    kernel, store = next((k, s) for k in sweep.kernels for s in k.body if s.op == "store" and s.buffer == block)
    strips = {c.load.name: c.strip for c in sweep.codes if c.kernel is kernel}
    count = 4 * lanes.run
    while lanes.columns % (2 * count) == 0 and _is_shared(kernel, store.args[1], strips, lanes, 2 * count):
        count *= 2
    return count


def _is_shared(kernel: Kernel, name: str, strips: Mapping[str, Strip], lanes: Lanes, columns: int) -> bool:
    """Whether so many neighbouring columns share a value."""
    return not kernel.is_column(kernel.stmts[name]) or name in shared_values(kernel, strips, (), lanes, columns)


@dataclass
class _Decoder:
    """Rewrites one kernel; the loads stay as they are.

    :param right: whether scales of columns multiply the product's other operand.
    """

    before: Kernel
    sweep: SweepForm
    lanes: Lanes
    types: Mapping[str, Type]
    dtype: DType
    right: bool
    body: list[Stmt] = field(default_factory=list)

    def kernel(self) -> Kernel:
        self.strips = {c.load.name: c.strip for c in self.sweep.codes if c.kernel is self.before}
        self.shared = shared_values(self.before, self.strips, (), self.lanes)
        self.names, self.now = self.before.fresh_names(), dict(self.before.stmts)
        *self.body, last = self.before.body
        made = self.paired(last) if last.op == "store" and all(s.name for s in self.body) else None
        if made is not None:
            self.body.append(made)
        else:
            self.body = []
            for s in (*self.before.body[:-1], *self.apart(last)):
                self.body.append(self.whole(s) or s)
        used = {u for s in self.body if not s.name for u in s.uses}
        for s in reversed(self.body):
            used |= {*s.uses} if s.name in used else set()
        return replace(self.before, body=tuple(s for s in self.body if not s.name or s.name in used))

    def add(self, s: Stmt) -> str:
        """The name of a new value."""
        made = s.altered(name=next(self.names))
        self.now[made.name] = made
        self.body.append(made)
        return made.name

    def is_element(self, name: str) -> bool:
        return name not in self.shared and self.before.is_column(self.now[name])

    def whole(self, s: Stmt) -> Stmt | None:
        """A cast of an integer of at most 8 bits to a float that holds it."""
        if s.op != "cast" or s.dtype is None or s.dtype.name not in ("f32", "bf16", "f16"):
            return None
        code = self.now[s.args[0]]
        if code.dtype is None or not code.dtype.is_integer or code.dtype.bits > 8 or not self.is_element(s.name):
            return None
        whole = s.altered(op="whole", attrs=(), dtype=F32)
        return whole if s.dtype is F32 else s.altered(args=(self.add(whole),))

    def apart(self, last: Stmt) -> tuple[Stmt, ...]:
        """The last statement, the store of a code times a scale of its column as that of both, of which the code is
        exact.
        """
        cast = self.now[last.args[0]] if last.op == "store" else last
        inner = self.now[cast.args[0]] if cast.op == "cast" and cast.dtype is self.dtype else last
        for x, scale in (inner.args, inner.args[::-1]) if inner.op == "mul" and inner.dtype is F32 else ():
            code = self.now[self.now[x].args[0]] if self.now[x].op == "cast" else None
            exact = code is not None and code.dtype is not None and code.dtype.bits <= 8 and code.dtype.name != "e8m0"
            if exact and self.is_of_columns(scale):
                only = cast.altered(name=next(self.names), args=(x,))
                self.now[only.name] = only
                return only, last.altered(args=(only.name, scale))
        return (last,)

    def is_of_columns(self, name: str) -> bool:
        """Whether a scale is the same for all rows of a warp, and multiplies the right operand."""
        if not self.right or not self.before.is_column(self.now[name]):
            return False
        return self.is_of_rows_alike(name)

    def is_of_rows_alike(self, name: str) -> bool:
        s = self.now[name]
        if not self.before.is_column(s):
            return True
        if name in self.strips:
            return not self.strips[name].is_codes
        staged = s.op == "load" and s.dtype is F32 and not s.uses and ROW not in self.before.levels[name]
        return staged or (s.op not in ("load", "index") and all(map(self.is_of_rows_alike, s.uses)))

    # -- codes of 4 bits -----------------------------------------------------------------------------------------------

    def paired(self, store: Stmt) -> Stmt | None:
        """The store of a digit or an entry times a scale, whose product is divided by the digit's unit.

        A scale that all columns of a product share is an operand of the store; one of a run multiplies each element.
        """
        rounded = self.now[store.args[0]]
        if rounded.op != "cast" or rounded.dtype is not self.dtype:
            return None
        inner = self.now[rounded.args[0]]
        if inner.op != "mul" or inner.dtype is not F32:
            made = self.of_codes(inner)
            return None if made is None else store.altered(args=(self.add(made),))
        for x, scale in (inner.args, inner.args[::-1]):
            if self.is_element(x) and (made := self.of_codes(self.now[x])) is not None:
                code = self.add(made)
                if self.is_of_columns(scale) or (not self.lanes.together and self.is_of_product(scale)):
                    return store.altered(args=(code, scale))
                return store.altered(
                    args=(self.add(rounded.altered(args=(self.add(inner.altered(args=(code, scale))),))),)
                )
        return None

    def is_of_product(self, scale: str) -> bool:
        """Whether the columns of each product share a value."""
        return _is_shared(self.before, scale, self.strips, self.lanes, 4 * self.lanes.run)

    def of_codes(self, s: Stmt) -> Stmt | None:
        """A value of one code of 4 bits, or of that and a zero point: as a digit or an entry."""
        zero: tuple[str, ...] = ()
        if s.op == "sub" and s.dtype is F32 and not self.is_element(s.args[1]):
            zero, s = s.args[1:], self.now[s.args[0]]
        if s.op == "cast" and (byte := self.nibble(s.args[0])):
            dtype = self.now[s.args[0]].dtype
            assert dtype is not None
            values = read(np.arange(16, dtype=np.uint8).view(dtype.np), dtype).astype(np.float32)
            for flip in (0, 8):
                if (values[np.arange(16) ^ flip] == np.arange(16) - flip).all() and self.fits(flip, *zero):
                    return Stmt("", "digit", (byte, *map(self.as_byte, zero)), F32, attrs=(("flip", flip),))
            return None if zero else Stmt("", "entry", (byte,), F32, attrs=(("codebook", tuple(map(float, values))),))
        index = s.index[0] if s.op == "load" and len(s.index) == 1 else None
        if index is None or zero or self.dtype is not BF16:  # of any range: bf16 has it
            return None
        (term,) = index.terms if len(index.terms) == 1 else (("", 0),)
        byte = self.nibble(term[0]) if term[1] == 1 and index.const == 0 and not s.where else ""
        known = byte and s.dtype is F32 and self.types[s.buffer].count == 16
        return Stmt("", "entry", (byte,), F32, buffer=s.buffer) if known else None

    def as_byte(self, zero: str) -> str:
        """The byte that a zero point is a cast of, if it is one; else the zero point."""
        cast = self.now[zero]
        return cast.args[0] if cast.op == "cast" and is_byte(self.now[cast.args[0]].dtype) else zero

    def fits(self, flip: int, zero: str = "") -> bool:
        """Whether 16 bits hold a zero point plus ``flip``, and its differences to codes."""
        if not zero:
            return True
        s = self.now[zero]
        given = self.now[s.args[0]].dtype if s.op == "cast" else None
        if given is not None and given.is_integer:
            low, high = given.range
        elif s.op == "const" and float(s.attr("value")).is_integer():
            low = high = int(s.attr("value"))
        else:
            return False
        return all(abs(z + code) <= WHOLE for z in (low, high) for code in (flip, flip - 15))

    def nibble(self, name: str) -> str:
        """The loaded byte of which a value is the 4 bits of its place among two neighbours; "" of others."""
        s = self.now.get(name)
        shift = self.now[s.args[0]] if s is not None and s.op == "bitcast" and s.dtype and s.dtype.bits == 4 else None
        if shift is None or shift.op != "right_shift":
            return ""
        strip = self.strips.get(shift.args[0])
        places = self.places(shift.args[1])
        fits = strip is not None and strip.is_codes and strip.per == 2 and places is not None
        return shift.args[0] if fits and list(places or ()) == [0, 4] else ""

    def places(self, name: str) -> list[int] | None:
        """The values of an integer for two neighbours, where a block begins; None of what is read from memory."""
        near = ROW if self.lanes.together else COLUMN
        s = self.now[name]
        if s.op == "index":
            first = substitute(s.index[0].const, dict.fromkeys(self.lanes.first, 0))
            steps = dict(s.index[0].terms)
            known = steps.keys() <= {near} and isinstance(first, int) and isinstance(steps.get(near, 0), int)
            return [int(first) + n * int(steps.get(near, 0)) for n in (0, 1)] if known else None
        if s.op == "const":
            return [int(s.attr("value"))] * 2
        if s.op not in REGISTRY or not s.args or s.index or s.dtype is None or not s.dtype.is_integer:
            return None
        typed = []
        for name in s.args:
            dtype, given = self.now[name].dtype, self.places(name)
            if dtype is None or given is None:
                return None
            typed.append(np.asarray(given).astype(dtype.np))
        return [int(x) for x in np.asarray(REGISTRY[s.op].reference(*typed, **dict(s.attrs))).astype(s.dtype.np)]
