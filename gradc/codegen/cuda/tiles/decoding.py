"""Codes of a few bits as f32, by their bits: without conversions, of which a multiprocessor does a quarter as many as
of sums, and with one FMA for a zero point and a scale.

    cast(q)              ->  whole(q)                        an integer of 8 bits behind those of 2^23, less 2^23
    cast(q) * s          ->  fraction(q) * (16 s) - 16 s     1 + q / 16, whose bits are those of q behind those of 1
    (cast(q) - z) * s    ->  fraction(q) * (16 s) - (z + 16) s

where q has 4 bits, and several elements share z and s.  The first is the same bits, and so is the second where 16 s is
finite; of the third ``z + 16`` and its product with s are rounded, by a unit in the last place each.  Where the offset
overflows, as for an s that is infinite or 2^124 and more, an element is NaN.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ....analysis.tiles import SweepForm, TileForm
from ....ir.kernel import Kernel
from ....ir.statement import Stmt
from ....ir.types import DTYPES, F32, DType
from .lanes import Lanes, shared_values

I4, U4 = DTYPES["i4"], DTYPES["u4"]


def decoded(form: TileForm, lanes: Lanes) -> TileForm:
    """The form with the rewrites of this module in the kernels that decode."""

    def of(sweep: SweepForm) -> SweepForm:
        made = {c.kernel: _Decoder(c.kernel, sweep, lanes).kernel() for c in sweep.codes}
        steps = tuple(made.get(s, s) if isinstance(s, Kernel) else s for s in sweep.steps)
        return replace(sweep, steps=steps, codes=tuple(replace(c, kernel=made[c.kernel]) for c in sweep.codes))

    return replace(form, sweeps=tuple(map(of, form.sweeps)))


@dataclass
class _Decoder:
    """Rewrites one kernel; the loads stay as they are."""

    before: Kernel
    sweep: SweepForm
    lanes: Lanes
    body: list[Stmt] = field(default_factory=list)

    def kernel(self) -> Kernel:
        strips = {c.load.name: c.strip for c in self.sweep.codes if c.kernel is self.before}
        self.shared = shared_values(self.before, strips, (), self.lanes)
        self.readers = Counter(u for s in self.before.body for u in s.uses)
        self.names, self.known = self.before.fresh_names(), dict[object, str]()
        self.now = self.before.stmts
        for s in self.before.body:
            self.body.append((self.scaled(s) if s.op == "mul" and s.dtype is F32 else self.whole(s)) or s)
        effects = [u for s in self.body if not s.name for u in s.uses]
        used = set(effects)
        for s in reversed(self.body):
            used |= {*s.uses} if s.name in used else set()
        return replace(self.before, body=tuple(s for s in self.body if not s.name or s.name in used))

    def add(self, op: str, *args: str, dtype: DType = F32, value: float | None = None) -> str:
        """The name of a value, computed once."""
        key = (op, args, value)
        if key not in self.known:
            self.known[key] = next(self.names)
            attrs = () if value is None else (("value", value),)
            self.body.append(Stmt(self.known[key], op, args, dtype, attrs=attrs))
        return self.known[key]

    def is_element(self, name: str) -> bool:
        return name not in self.shared and self.before.is_column(self.now[name])

    def code(self, name: str, bits: int) -> str | None:
        """The integer of at most so many bits that a value is cast from, an element."""
        s = self.now[name]
        dtype = self.now[s.args[0]].dtype if s.op == "cast" else None
        fits = dtype is not None and dtype.is_integer and dtype.bits <= bits and self.is_element(name)
        return s.args[0] if fits else None

    def whole(self, s: Stmt) -> Stmt | None:
        """A cast of a code to a float that holds it."""
        code = (
            self.code(s.name, 8) if s.name and s.dtype is not None and s.dtype.name in ("f32", "bf16", "f16") else None
        )
        if code is None:
            return None
        return (
            s.altered(op="whole", args=(code,), attrs=())
            if s.dtype is F32
            else s.altered(args=(self.add("whole", code),))
        )

    def scaled(self, s: Stmt) -> Stmt | None:
        """A code, less a zero point or not, times a scale."""
        for x, scale in (s.args, s.args[::-1]):
            if self.is_element(scale) or not self.is_element(x):
                continue
            inner, zero = self.now[x], ""
            if inner.op == "sub" and self.readers[x] == 1 and not self.is_element(inner.args[1]):
                x, zero = inner.args
            code = self.nibble(self.code(x, 4))
            if code is None:
                continue
            offset = self.add("const", value=24.0 if code.dtype is I4 else 16.0)
            base = self.add("add", zero, offset) if zero else offset
            sixteen = self.add("mul", scale, self.add("const", value=16.0))
            below = self.add("neg", self.add("mul", base, scale))
            return s.altered(op="mad", args=(self.fraction(code), sixteen, below))
        return None

    def nibble(self, name: str | None) -> Stmt | None:
        """The 4 bits of a loaded byte that a value is: ``bitcast(byte >> place)``."""
        s = self.now[name] if name else None
        shift = self.now[s.args[0]] if s is not None and s.op == "bitcast" and s.dtype in (U4, I4) else None
        loads = {c.load.name for c in self.sweep.codes if c.kernel is self.before and c.strip.is_codes}
        return s if shift is not None and shift.op == "right_shift" and shift.args[0] in loads else None

    def fraction(self, code: Stmt) -> str:
        """1 + q / 16 of a nibble q, or 1 + (q + 8) / 16 of a signed one."""
        byte, place = self.now[code.args[0]].args
        return self.add("signed_fraction" if code.dtype is I4 else "fraction", byte, place)
