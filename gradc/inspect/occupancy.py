"""How many blocks of a kernel a multiprocessor holds at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidProblem

_WARP = 32
_REGISTERS = 65536
_REGISTER_UNIT = 256  # registers are given to warps in units of this many
_SHARED_UNIT = 128  # bytes
_RESERVED = 1024  # bytes of shared memory that the system takes per block, from sm_80 on


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, technical specifications per compute capability).

    :param warps: resident at most.  :param blocks: resident at most.  :param shared: bytes of shared memory.
    """

    warps: int
    blocks: int
    shared: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_86": Multiprocessor(48, 16, 100 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90": Multiprocessor(64, 32, 228 * 1024),
    "sm_100": Multiprocessor(64, 32, 228 * 1024),
    "sm_120": Multiprocessor(48, 24, 100 * 1024),
}


def multiprocessor_of(arch: str) -> Multiprocessor:
    """The limits for ``sm_90``, ``sm_90a``, ``sm_100f``.

    :raises InvalidProblem: the table has none.
    """
    found = MULTIPROCESSORS.get(re.sub(r"[af]$", "", arch))
    if found is None:
        raise InvalidProblem(
            f"arch={arch!r}: the limits of a multiprocessor are known for {', '.join(MULTIPROCESSORS)}"
        )
    return found


def resident_blocks(arch: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds; 0 if it holds none.

    :param threads: per block.  :param registers: per thread.
    :param shared: bytes per block, static and dynamic.
    """
    limits = multiprocessor_of(arch)
    warps = -(-threads // _WARP)
    per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    # A quarter of the register file belongs to each of the four schedulers, and a warp stays with one.
    by_registers = 4 * (_REGISTERS // 4 // per_warp) // warps if per_warp else limits.blocks
    taken = -(-shared // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED
    return min(limits.blocks, limits.warps // warps, by_registers, limits.shared // taken)
