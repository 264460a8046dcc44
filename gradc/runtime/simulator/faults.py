"""Faults detected by cuda-sim: the structures shared with ``templates/cuda/sim.cpp``, and the error messages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FILE = "kernel.cu"  # the source's file name in messages
_OURS = ("sim.h", "sim.cpp", "sim_check.h", "sim_tensor_cores.h", "tensor_cores.h", "entries", "??")
NO_MEMORY = 17
_KINDS = (
    "",
    "out of bounds",
    "write to a constant",
    "uninitialised read",
    "race",
    "misaligned access",
    "signed overflow",
    "shift",
    "division",
    "array bounds",
    "divergent barrier",
    "skipped barrier",
    "lane outside its mask",
    "missing lane",
    "foreign lane",
    "trap",
    "too large",
    "no memory",
    "copy in flight",
    "wrong memory",
    "copy size",
)
_VERBS = {1: "reads", 2: "writes", 3: "updates"}
_PAST = {1: "read", 2: "wrote", 3: "updated atomically"}
_COPIES = {1: "copies from", 2: "copies to"}
_RETURNED, _ABSENT, _AT_BARRIER, _AT_COLLECTIVE = 4, 5, 6, 7
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "divrem": "/"}


class Party(ctypes.Structure):
    """``struct party``: a thread, its access, and the program location."""

    _fields_ = (
        ("block", ctypes.c_int64),
        ("thread", ctypes.c_int64),
        ("pc", ctypes.c_size_t),
        ("doing", ctypes.c_int64),
    )


class Fault(ctypes.Structure):
    """``struct fault``."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("who", Party),
        ("other", Party),
        *((name, ctypes.c_int64) for name in ("region", "offset", "size", "a", "b")),
        ("text", ctypes.c_char_p),
    )


class Region(ctypes.Structure):
    """``struct region``: an array of the launch, or a variable of shared memory."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "granule", "writable")),
        ("ready", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
    )


class Launch(ctypes.Structure):
    """``struct launch``."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_int64),
        ("parameters", ctypes.c_int64),
        ("parameter_sizes", ctypes.c_void_p),
        ("check", ctypes.c_int64),
        ("shuffle", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int64),
        ("variables", ctypes.c_void_p),
        ("variable_count", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("counts", ctypes.c_int64),
        ("transactions", ctypes.c_int64),
        ("least", ctypes.c_int64),
        ("stacks", ctypes.c_void_p),
        ("guarded", ctypes.c_int64),
        ("found", Fault),
    )


@dataclass(frozen=True)
class Shape:
    """The information about a launch that messages need.

    :param variables: descriptions of the shared memory variables, in the order of ``variables``.
    :param name: (region, byte offset) -> (description of the array, item size, byte offset in the array).
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    source: str
    variables: Sequence[str]
    name: Callable[[int, int], tuple[str, int, int]]


def unnamed(region: int, offset: int) -> tuple[str, int, int]:
    return "memory", 1, offset


Frames = Callable[[int], Sequence[str]]
Place = tuple[int, int, int]


def describe(fault: Fault, shape: Shape, frames: Frames) -> tuple[str, str, str, Place, Place, str]:
    """The arguments of a SimulationFault: kind, kernel, source location, block, thread, message."""
    kind = _KINDS[fault.kind]
    where = _where(frames, fault.who.pc)
    if kind == "divergent barrier" and where.endswith(":?"):  # two calls merged by the compiler
        where = f"{where[:-1]}{fault.a}"
    message = f"{shape.kernel}: {kind}: {_party(fault.who, shape)} {_what(kind, fault, shape, frames)}"
    if where:
        message += f", at {where}{_excerpt(where, shape.source)}"
    return (
        kind,
        shape.kernel,
        where,
        _unflatten(fault.who.block, shape.grid),
        _unflatten(fault.who.thread, shape.block),
        message,
    )


def _what(kind: str, fault: Fault, shape: Shape, frames: Frames) -> str:
    """The description of the access and the fault, without the location."""
    verb, text = _VERBS.get(fault.who.doing, ""), (fault.text or b"").decode("utf-8", "replace")
    what, mask = "", f"mask 0x{fault.a & 0xFFFFFFFF:08x}"
    if kind in (
        *("out of bounds", "write to a constant", "uninitialised read", "race"),
        *("copy in flight", "wrong memory"),
    ):
        what = f"{verb} {fault.size} bytes {_target(fault, shape)}"
    match kind:
        case "out of bounds":
            return what
        case "write to a constant":
            return f"{what}, which the launch may not write"
        case "uninitialised read":
            return f"{what}, which has no value yet"
        case "race":
            seen = _where(frames, fault.other.pc)
            return (
                f"{what}, which {_party(fault.other, shape)} {_PAST[fault.other.doing]}{f' at {seen}' if seen else ''};"
                " nothing orders the two"
            )
        case "copy in flight":
            return (
                f"{what}, which {_party(fault.other, shape)} {_COPIES[fault.other.doing]} asynchronously"
                f"{_at(frames, fault.other.pc)} and has not waited for"
            )
        case "wrong memory":
            return f"{what}, where the instruction takes {'global' if fault.region < 0 else 'shared'} memory"
        case "copy size":
            return f"copies {fault.a} valid bytes of {fault.b}"
        case "misaligned access":
            kind_of = f" of {text}" if text else ""
            return f"accesses address {fault.a:#x}{kind_of}, which is no multiple of {fault.b}"
        case "signed overflow":
            operator = next((sign for name, sign in _OPERATORS.items() if name in text), text)
            return f"computes {fault.a} {operator} {fault.b}, which its type does not hold"
        case "division":
            return f"computes {fault.a} / {fault.b}"
        case "shift":
            return f"shifts {fault.a}, of type {text}, by {fault.b}"
        case "array bounds":
            return f"uses index {fault.a} of an array of type {text}"
        case "divergent barrier":
            return f"is at another barrier than {_party(fault.other, shape)}{_at(frames, fault.other.pc)}".replace(
                ":?", f":{fault.b}"
            )
        case "skipped barrier":
            return f"is at a barrier without {_party(fault.other, shape)}, which has returned"
        case "lane outside its mask":
            return f"is lane {fault.b} and calls with {mask}"
        case "foreign lane":
            return f"takes the value of lane {fault.b}, which is not in {mask}"
        case "missing lane":
            return (
                f"waits with {mask} for lane {fault.b}, {_party(fault.other, shape)}, which"
                f" {_instead(fault.other, frames)}"
            )
    return "stops the launch"


def _instead(other: Party, frames: Frames) -> str:
    if other.doing == _ABSENT:
        return "does not exist"
    if other.doing == _RETURNED:
        return "has returned"
    return f"is at {'a barrier' if other.doing == _AT_BARRIER else 'another collective or mask'}{_at(frames, other.pc)}"


def _target(fault: Fault, shape: Shape) -> str:
    """``at element 3 of argument 1 (float32[8])``."""
    if fault.region == -1:
        return f"at address {fault.a:#x}, near no array"
    if fault.region < -1:
        name, item, offset = f"{shape.variables[-2 - fault.region]} ({fault.b} bytes)", 1, fault.offset
    else:
        name, item, offset = shape.name(fault.region, fault.offset)
    unit = f"element {offset // item}" if item > 1 and offset % item == 0 else f"byte {offset}"
    return f"at {unit} of {name}"


def _unflatten(number: int, shape: Place) -> Place:
    return number % shape[0], number // shape[0] % shape[1], number // shape[0] // shape[1]


def _party(party: Party, shape: Shape) -> str:
    block, thread = _unflatten(party.block, shape.grid), _unflatten(party.thread, shape.block)
    return f"block {block} thread {thread}".replace(", ", ",")


def _at(frames: Frames, pc: int) -> str:
    where = _where(frames, pc)
    return f" at {where}" if where else ""


def _where(frames: Frames, pc: int) -> str:
    """The innermost source location outside the simulator's header, with the location in the kernel that led to it."""
    found = [frame for frame in (frames(pc) if pc else ()) if not frame.startswith(_OURS)]
    if not found:
        return ""
    text = next((frame for frame in found if frame.startswith(FILE)), found[0])
    return found[0] if found[0] == text else f"{text} (in {found[0]})"


def _excerpt(where: str, source: str) -> str:
    name, _, rest = where.partition(":")
    digits = rest.split(" ")[0]
    lines = source.splitlines()
    if name != FILE or not digits.isdigit() or not 0 < int(digits) <= len(lines):
        return ""
    return f"\n    {digits} | {lines[int(digits) - 1].strip()}"
