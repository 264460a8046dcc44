"""Operands of SASS instructions: how a thread's registers, predicates, constants and addresses are read.

A register's value is an unsigned 32-bit integer, a predicate's a bool; None is a value that is not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Value = Any
"""int, bool or None."""
Registers = dict[str, Any]
Get = Callable[[Registers], Value]
MASK = 0xFFFFFFFF
ZEROS = ("RZ", "URZ", "SRZ")
_MODIFIER = re.compile(r"\.(reuse|H[01]_H[01]|F32|INV|64|U32|S32|X\d+|B[0-3])\b")
_REGISTER = re.compile(r"U?R\d+|U?P\d")
_ADDRESS = re.compile(r"(?:desc\[\w+\])?\[([^\]]*)\]$")
_PAIR = re.compile(r"(U?R)(\d+)")
_CONSTANT = re.compile(r"(c\[0x\w+\])\[(0x\w+)\]")


def split(operands: str) -> tuple[str, ...]:
    """The operands of an instruction, without marks of the register cache."""
    return tuple(part.strip() for part in operands.replace(".reuse", "").split(",") if part.strip())


def following(name: str, by: int = 1) -> str:
    """The word after one: ``R4`` -> ``R5``, ``c[0x0][0x170]`` -> ``c[0x0][0x174]``; the zero registers stay."""
    if constant := _CONSTANT.fullmatch(name):
        return f"{constant[1]}[{int(constant[2], 16) + 4 * by:#x}]"
    match = _PAIR.fullmatch(name)
    return f"{match[1]}{int(match[2]) + by}" if match else name


def plain(text: str) -> str:
    """The register's name in an operand, or ""."""
    match = re.fullmatch(r"[-~!|]*(U?R(?:\d+|Z)|U?P(?:\d|T))[|]?(?:\.\w+)*", text)
    return match[1] if match else ""


def is_predicate(name: str) -> bool:
    return bool(re.fullmatch(r"U?P(\d|T)", name))


def get(text: str, constants: Callable[[int], int | None]) -> Get:
    """The value of a 32-bit operand.

    :param constants: the word at a byte of constant bank 0.
    """
    bare = _MODIFIER.sub("", text)
    if bare.startswith("-") and not re.match(r"-(0x|\d|QNAN|INF)", bare):
        inner = get(bare[1:], constants)
        return lambda r: None if (v := inner(r)) is None else -v & MASK
    if bare.startswith("~"):
        inner = get(bare[1:], constants)
        return lambda r: None if (v := inner(r)) is None else ~v & MASK
    if bare.startswith("|"):
        inner = get(bare.strip("|"), constants)
        return lambda r: None if (v := inner(r)) is None else abs(signed(v)) & MASK
    if bare in ZEROS:
        return lambda r: 0
    if _REGISTER.fullmatch(bare) or plain(bare):
        return lambda r: r.get(bare)
    if match := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+|U?RZ)\]", bare):
        word = constants(0 if match[1].endswith("Z") else int(match[1], 16))
        return lambda r: word
    try:
        number = int(bare, 0) & MASK
    except ValueError:
        return lambda r: None
    return lambda r: number


def predicate(text: str) -> Get:
    """The value of a predicate operand: ``!P0``, ``PT``, ``!UPT``."""
    negated, name = text.startswith("!"), text.lstrip("!")
    if name in ("PT", "UPT", ""):
        return lambda r: not negated
    if not negated:
        return lambda r: r.get(name)
    return lambda r: None if (v := r.get(name)) is None else not v


def address(text: str) -> Callable[[Registers], tuple[Value, Value]]:
    """(low, high) words of an access's address: ``desc[UR8][R34.64+UR4+0x18]``.  A high word that is known together
    with a low one that is not still says which array the access is in.
    """
    match = _ADDRESS.search(text)
    parts = match[1].split("+") if match else []
    offset = sum(int(p, 0) for p in parts if re.match(r"-?\d", p))
    names = [re.sub(r"\..*", "", p) for p in parts if _PAIR.match(p)]
    pairs = [following(n) if ".64" in p or n.startswith("U") else "" for n, p in zip(names, parts, strict=False)]

    def read(r: Registers) -> tuple[Value, Value]:
        low: Value = offset
        high = 0
        for name, pair in zip(names, pairs, strict=True):
            more = r.get(name)
            low = None if low is None or more is None else low + more
            high += (r.get(pair) or 0) if pair else 0
        if low is None or 0 <= low <= MASK:
            return low, high
        return low & MASK, high + (low >> 32)

    return read


def signed(v: int) -> int:
    return v - (1 << 32) if v >> 31 else v
