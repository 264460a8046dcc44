"""What integer and predicate instructions of SASS compute, as far as a thread's control flow and addresses need it.

Floating-point results, and whatever follows from data, are not known (None).  A 64-bit address keeps its high word,
which says what array it is in, where only an index added to it is not known.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .operands import MASK, Registers, Value, following, get, is_predicate, plain, predicate, signed, split

ARRAY = 0x5A000000
"""High words of addresses of arrays begin with this byte; the next two number the array."""
Step = Callable[[Registers], None]


def array_of(high: Value) -> int:
    """The array that a high word is of, from 1; 0: none."""
    return (high >> 8) & 0xFFFF if high is not None and high >> 24 == ARRAY >> 24 else 0


def _high_only(values: Sequence[Value]) -> Value:
    """A sum of which a part is not known: the high word of an array's address if one is among its terms."""
    return next((v for v in values if v is not None and v >> 24 == ARRAY >> 24), None)


class Decoder:
    """Makes a step of each instruction.

    :param constants: the word at a byte of constant bank 0.
    :param special: the value of a special register.
    """

    def __init__(self, constants: Callable[[int], Value], special: Callable[[str], Value]):
        self.constants, self.special = constants, special

    def step(self, opcode: str, modifiers: str, operands: str) -> tuple[Step, tuple[str, ...], tuple[str, ...]]:
        """(what it does, registers that it writes, registers that it reads)."""
        parts, mods = split(operands), modifiers.split(".")[1:]
        targets, sources = self._targets(opcode, parts, mods)
        base = opcode[1:] if opcode.startswith("U") and opcode[1:] in _INTEGERS else opcode
        compute = _INTEGERS.get(base)
        reads = tuple(dict.fromkeys(re.findall(r"\bU?R\d+\b|\bU?P\d\b", ",".join(sources))))
        written = tuple(t for t in targets if t not in ("RZ", "URZ", "PT", "UPT"))
        if opcode in ("S2R", "S2UR", "CS2R"):
            name = sources[0]
            return _setter(targets, lambda r: [0 if name == "SRZ" else self.special(name)] * len(targets)), written, ()
        if opcode in ("LDC", "ULDC", "LDCU"):
            gets = self._constant(parts[-1], len(targets))
            return _setter(targets, lambda r: [g(r) for g in gets]), written, reads
        if opcode == "SHFL" and "IDX" in mods and sources[1:2] == ("RZ",):  # from lane 0, the one that is followed
            value = get(sources[0], self.constants)
            return _setter(targets, lambda r: [True, value(r)][-len(targets) :]), written, reads
        if compute is None:
            return _setter(targets, lambda r: [None] * len(targets)), written, reads
        step = compute(self, mods, targets, sources)
        return (step or _setter(targets, lambda r: [None] * len(targets))), written, reads

    def _constant(self, text: str, count: int) -> list[Any]:
        """Words of bank 0 one behind another, from a place that a register may be part of: c[0x0][R4+0x210]."""
        bank, _, inside = text.rstrip("]").partition("][")
        register, _, offset = inside.rpartition("+") if "0x" in inside else (inside, "", "0x0")
        base, start = get(register or "RZ", self.constants), int(offset, 16)

        def word(r: Registers, i: int) -> Value:
            first = base(r) if bank == "c[0x0" else None
            return None if first is None else self.constants(first + start + 4 * i)

        return [functools.partial(word, i=i) for i in range(count)]

    @staticmethod
    def _targets(opcode: str, parts: tuple[str, ...], mods: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """Registers and predicates that are written, and the operands behind them."""
        if opcode in _NO_RESULT or not parts or not (first := plain(parts[0])):
            return [], parts
        if opcode in ("SHFL", "ATOMG", "ATOM") and is_predicate(first):
            return [first, plain(parts[1])], parts[2:]
        if is_predicate(first):
            second = len(parts) > 2 and is_predicate(parts[1])
            return [first, *([parts[1]] if second else [])], parts[1 + second :]
        long = "64" in mods or "WIDE" in mods or opcode in _DOUBLES or (opcode == "CS2R" and "32" not in mods)
        # The first modifier is the result's type, of I2F.S64 (into f32) and F2I.F64 (into i32) the operand's.
        long = long or (opcode in ("F2F", "FRND", "I2F") and mods[:1] == ["F64"])
        long = long or (opcode == "F2I" and mods[:1] in (["S64"], ["U64"]))
        count = _count_of(opcode, mods) or (4 if "128" in mods else 2 if long else 1)
        targets = [following(first, i) for i in range(count)]
        rest = 1
        while opcode in _CARRIES and rest < len(parts) - 2 and is_predicate(parts[rest]):
            targets.append(parts[rest])
            rest += 1
        return targets, parts[rest:]

    def gets(self, sources: Sequence[str], count: int) -> list[Any]:
        padded = [*sources, *["RZ"] * count][:count]
        return [predicate(s) if is_predicate(s.lstrip("!")) else get(s, self.constants) for s in padded]


def _setter(targets: Sequence[str], values: Callable[[Registers], Sequence[Value]]) -> Step:
    names = list(targets)

    def step(r: Registers) -> None:
        for name, value in zip(names, values(r), strict=False):
            if name[-1] not in "ZT":
                r[name] = value

    return step


def _move(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    (a,) = d.gets(sources, 1)
    return _setter(targets, lambda r: [a(r)])


def _iadd3(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    terms = d.gets(sources, 3)
    carries = [predicate(s) for s in sources[3:5]] if "X" in mods else []
    negated = [s.startswith("-") and not s[1:2].isdigit() for s in sources[:3]]

    def values(r: Registers) -> list[Value]:
        found = [t(r) for t in terms]
        if None in found:
            return [_high_only(found), *[None] * (len(targets) - 1)]
        carried = [c(r) for c in carries]
        if None in carried and (high := _high_only(found)) is not None:
            return [high, None, None]
        # ~x with a carry is -x - 1 + carry, and -x is ~x + 1, which carries where x is 0.  An unknown carry is taken
        # for none.  Three terms may carry 2: 1 in each of two predicates.
        zeros = sum(minus and value == 0 for minus, value in zip(negated, found, strict=False))
        total = sum(found) + sum(bool(c) for c in carried) + (zeros << 32)
        return [total & MASK, total >> 32 > 0, total >> 32 > 1]

    return _setter(targets, values)


def _viadd(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, b = d.gets(sources, 2)

    def values(r: Registers) -> list[Value]:
        x, y = a(r), b(r)
        return [_high_only((x, y)) if x is None or y is None else (x + y) & MASK]

    return _setter(targets, values)


def _imad(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, b = d.gets(sources, 2)
    wide, unsigned, high = "WIDE" in mods, "U32" in mods, "HI" in mods
    third = sources[2] if len(sources) > 2 else "RZ"
    upper = following(third)  # a number has none above it
    c, above = d.gets([third, upper if upper != third else "RZ"], 2)
    carry = predicate(sources[3]) if "X" in mods and len(sources) > 3 else None

    def values(r: Registers) -> list[Value]:
        x, y, z = a(r), b(r), c(r)
        top = above(r) if wide or high else 0
        if 0 in (x, y):
            x = y = 0
        if x is None or y is None or z is None:
            return [None, top, None] if wide else [None if high else _high_only((z,)), None]
        product = x * y if unsigned or not (wide or high) else signed(x) * signed(y)
        total = product + z + ((top or 0) << 32) + (0 if carry is None else int(bool(carry(r))))
        words = [total & MASK, total >> 32 & MASK]
        return [*(words if wide else words[1:] if high else words[:1]), total >> 64 > 0]

    return _setter(targets, values)


def _lea(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    operands = [s for s in sources if not is_predicate(s.lstrip("!"))]
    carries = [predicate(s) for s in sources if is_predicate(s.lstrip("!"))]
    shift_at = 3 if "HI" in mods and "SX32" not in mods else 2
    gets = d.gets(operands, shift_at)
    shift = int(operands[shift_at], 0) & 31 if len(operands) > shift_at else 0

    def values(r: Registers) -> list[Value]:
        found = [g(r) for g in gets]
        carried = [c(r) for c in carries]
        if None in found:
            base = found[1]
            return [_high_only((base,)), None]
        if "HI" not in mods:
            total = (found[0] << shift & MASK) + found[1]
        else:
            low, high = (found[0], found[2]) if shift_at == 3 else (found[0], MASK if found[0] >> 31 else 0)
            shifted = ((high << 32 | low) << shift) >> 32 & MASK
            total = shifted + found[1] + sum(bool(c) for c in carried)
        return [total & MASK, total > MASK]

    return _setter(targets, values)


def _isetp(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, b = d.gets(sources, 2)
    gate = predicate(sources[2]) if len(sources) > 2 else predicate("PT")
    low = predicate(sources[3]) if "EX" in mods and len(sources) > 3 else None
    unsigned, compare, join = "U32" in mods, _COMPARE[mods[0]], _JOIN[mods[2] if mods[1] == "U32" else mods[1]]

    def values(r: Registers) -> list[Value]:
        x, y = a(r), b(r)
        result: Value = None
        if x is not None and y is not None:
            if not unsigned:
                x, y = signed(x), signed(y)
            if low is None:
                result = compare(x, y)
            else:
                below = low(r)
                strict, equal = compare(x, y) and x != y, x == y
                # Of the low words: where the high ones are equal these decide; NE holds if either differs.
                result = (x != y or below) if mods[0] == "NE" else (below if equal else strict)
                result = (equal and below) if mods[0] == "EQ" else result
        return [join(result, gate(r)), None if result is None else join(not result, gate(r))]

    return _setter(targets, values)


def _known_and(a: Value, b: Value) -> Value:
    return False if a is False or b is False else None if a is None or b is None else a and b


def _known_or(a: Value, b: Value) -> Value:
    return True if a is True or b is True else None if a is None or b is None else a or b


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda x, y: x < y,
    "LE": lambda x, y: x <= y,
    "GT": lambda x, y: x > y,
    "GE": lambda x, y: x >= y,
    "EQ": lambda x, y: x == y,
    "NE": lambda x, y: x != y,
    "F": lambda x, y: False,
    "T": lambda x, y: True,
}
_JOIN: dict[str, Callable[[Value, Value], Value]] = {
    "AND": _known_and,
    "OR": _known_or,
    "XOR": lambda a, b: None if a is None or b is None else bool(a) != bool(b),
}


def _table(lut: int, x: int, y: int, z: int) -> int:
    """Bitwise function of three words by its truth table."""
    result = 0
    for bit in range(8):
        if lut >> bit & 1:
            result |= (x if bit & 4 else ~x) & (y if bit & 2 else ~y) & (z if bit & 1 else ~z)
    return result & MASK


def _lop3(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    # LOP3 P1, RZ, a, b, c, lut, !PT: the predicate says whether the result is not 0.
    into = [s for s in sources[:1] if is_predicate(targets[0])]
    names = [*into, *targets] if into else targets
    rest = sources[1:] if into else sources
    a, b, c = d.gets(rest, 3)
    lut = int(rest[3], 0)

    def values(r: Registers) -> list[Value]:
        x, y, z = a(r), b(r), c(r)
        result: Value
        if None not in (x, y, z):
            result = _table(lut, x, y, z)
        else:
            settled = _table(lut, 0 if x is None else x, 0 if y is None else y, 0 if z is None else z)
            other = _table(lut, MASK if x is None else x, MASK if y is None else y, MASK if z is None else z)
            result = settled if settled == other and [x, y, z].count(None) == 1 else None
        return [result, None if result is None else result != 0]

    return _setter(names, values)


def _plop3(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, b, c = (predicate(s) for s in sources[:3])
    lut = int(sources[3], 0)

    def values(r: Registers) -> list[Value]:
        found = (a(r), b(r), c(r))
        results = {bool(lut >> (4 * x + 2 * y + z) & 1) for x, y, z in _possible(found)}
        return [results.pop() if len(results) == 1 else None, None]

    return _setter(targets, values)


def _possible(found: Sequence[Value]) -> list[tuple[int, int, int]]:
    choices = [(0, 1) if v is None else (int(bool(v)),) for v in found]
    return [(x, y, z) for x in choices[0] for y in choices[1] for z in choices[2]]


def _shf(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    low, by, high = d.gets(sources, 3)
    left, upper, wide = mods[0] == "L", "HI" in mods, "U64" in mods or "S64" in mods
    arithmetic = "S32" in mods

    def values(r: Registers) -> list[Value]:
        x, n, y = low(r), by(r), high(r)
        if n is None or (x is None and (left or sources[0] not in ("RZ", "URZ"))) or y is None:
            return [None]
        n &= 63 if wide else 31
        both = y << 32 | x
        if left:
            moved = both << n
            return [(moved >> 32 if upper else moved) & MASK]
        if upper:
            return [((signed(y) if arithmetic else y) >> n) & MASK]
        return [both >> n & MASK]

    return _setter(targets, values)


def _sel(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, b = d.gets(sources, 2)
    which = predicate(sources[2])

    def values(r: Registers) -> list[Value]:
        chosen, x, y = which(r), a(r), b(r)
        return [(x if x == y else None) if chosen is None else x if chosen else y]

    return _setter(targets, values)


def _prmt(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    a, selector, b = d.gets(sources, 3)

    def values(r: Registers) -> list[Value]:
        x, s, y = a(r), selector(r), b(r)
        if s is None or any((y if s >> 4 * i & 4 else x) is None for i in range(2)):
            return [None]
        # Of a half word that is kept in a register the upper half means nothing, and may never have been written.
        x, y = x or 0, y or 0
        both, result = y << 32 | x, 0
        for i in range(4):
            nibble = s >> 4 * i & 15
            byte = both >> 8 * (nibble & 7) & 255
            result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
        return [result]

    return _setter(targets, values)


def _minmax(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    """VIMNMX a, b, p and VIADDMNMX a, b, c, p: the least where p is true; from sm_100 on two predicates say which."""
    *terms, which = d.gets(sources, len(sources))
    read = signed if "U32" not in mods else lambda v: v

    def values(r: Registers) -> list[Value]:
        found, least = [t(r) for t in terms], which(r)
        if None in found or least is None:
            return [None] * len(targets)
        if len(found) == 3:
            found = [(found[0] + found[1]) & MASK, found[2]]
        x, y = (read(v) for v in found[:2])
        return [(min(x, y) if least else max(x, y)) & MASK, None, None]

    return _setter(targets, values)


def _iabs(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    (a,) = d.gets(sources, 1)
    return _setter(targets, lambda r: [None if (v := a(r)) is None else abs(signed(v)) & MASK])


def _popc(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    (a,) = d.gets(sources, 1)
    return _setter(targets, lambda r: [None if (v := a(r)) is None else v.bit_count()])


def _vote(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step:
    which = predicate(sources[-1])
    if targets and is_predicate(targets[0]):  # VOTE.ALL P0, P1
        return _setter(targets, lambda r: [which(r)])
    return _setter(targets, lambda r: [None if (v := which(r)) is None else MASK if v else 0, which(r)])


def _float(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def _value_of(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def _i2f(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    """With MUFU.RCP and F2I the first guess of a quotient of integers, which the instructions behind them correct."""
    if {"F64", "S64"} & set(mods) or len(targets) > 1:
        return None
    low, high = d.gets([sources[0], following(sources[0])], 2)
    wide, unsigned = "U64" in mods, "U32" in mods

    def values(r: Registers) -> list[Value]:
        x, top = low(r), high(r) if wide else 0
        if x is None or top is None:
            return [None]
        return [_float(float(top << 32 | x if wide or unsigned else signed(x)))]

    return _setter(targets, values)


def _mufu(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    if mods != ["RCP"]:
        return None
    (a,) = d.gets(sources, 1)
    return _setter(targets, lambda r: [None if not (v := a(r)) else _float(1 / (_value_of(v) or 1.0))])


def _f2i(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    if "F64" in mods or not {"U32", "U64"} & set(mods):
        return None
    (a,) = d.gets(sources, 1)
    most = (1 << 32 * len(targets)) - 1

    def values(r: Registers) -> list[Value]:
        if (v := a(r)) is None:
            return [None] * len(targets)
        whole = min(max(int(_value_of(v)), 0), most)
        return [whole >> 32 * n & MASK for n in range(len(targets))]

    return _setter(targets, values)


def _hfma2(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    """-0 * 0 + (a, b): a constant of two halves."""
    if list(sources[:2]) != ["-RZ", "RZ"] or len(sources) < 4:
        return None
    high, low = (int.from_bytes(struct.pack("<e", float(s)), "little") for s in sources[2:4])
    word = high << 16 | low
    return _setter(targets, lambda r: [word])


def _p2r(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    """The predicates of a mask as bits."""
    mask = int(sources[-1], 0)
    names = [(i, f"P{i}") for i in range(7) if mask >> i & 1]

    def values(r: Registers) -> list[Value]:
        found = [r.get(name) for _, name in names]
        return [None if None in found else sum(bool(v) << i for (i, _), v in zip(names, found, strict=True))]

    return _setter(targets, values)


def _r2p(d: Decoder, mods: list[str], targets: list[str], sources: Sequence[str]) -> Step | None:
    mask = int(sources[-1], 0)
    (a,) = d.gets(sources[1:], 1)
    names = [(i, f"P{i}") for i in range(7) if mask >> i & 1]

    def values(r: Registers) -> list[Value]:
        v = a(r)
        return [None if v is None else bool(v >> i & 1) for i, _ in names]

    return _setter([name for _, name in names], values)


_INTEGERS: dict[str, Callable[..., Step | None]] = {
    "MOV": _move,
    "MOV32I": _move,
    "R2UR": _move,
    "UR2R": _move,
    "IADD3": _iadd3,
    "VIADD": _viadd,
    "IMAD": _imad,
    "LEA": _lea,
    "ISETP": _isetp,
    "LOP3": _lop3,
    "PLOP3": _plop3,
    "SHF": _shf,
    "SEL": _sel,
    "PRMT": _prmt,
    "IMNMX": _minmax,
    "VIMNMX": _minmax,
    "VIADDMNMX": _minmax,
    "IABS": _iabs,
    "POPC": _popc,
    "VOTE": _vote,
    "I2F": _i2f,
    "I2FP": _i2f,
    "MUFU": _mufu,
    "F2I": _f2i,
    "HFMA2": _hfma2,
    "P2R": _p2r,
    "R2P": _r2p,
}


def _count_of(opcode: str, mods: Sequence[str]) -> int:
    """Registers that a product of matrices or a load of them writes; 0: it is none."""
    if opcode == "LDSM":
        return int(mods[-1]) if mods and mods[-1] in ("2", "4") else 1
    if opcode in ("HMMA", "IMMA", "QMMA"):  # 16 x 8 results, or 8 x 8, in f16 or 32 bits
        half = 2 if mods and mods[0].startswith("8") else 1
        return (2 if opcode == "HMMA" and "F16" in mods[1:2] else 4) // half
    return 0


_DOUBLES = ("DADD", "DMUL", "DFMA")
_CARRIES = ("IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VOTE", "VOTEU", "VIMNMX", "VIADDMNMX")
_NO_RESULT = (
    *("STG", "STS", "STL", "ST", "RED", "REDG", "BAR", "BRA", "EXIT", "CALL", "RET", "BSSY", "BSYNC", "BREAK", "NOP"),
    *("WARPSYNC", "MEMBAR", "R2P", "LDGSTS", "LDGDEPBAR", "DEPBAR", "STSM"),
)
