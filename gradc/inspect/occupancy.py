"""How many blocks of a kernel a multiprocessor holds at once."""

from __future__ import annotations

import re

from ..errors import InvalidProblem
from ..targets.devices import ARCHITECTURES, Architecture
from ..targets.gpu import REGISTER_UNIT, REGISTERS, SHARED_UNIT, WARP


def multiprocessor_of(arch: str) -> Architecture:
    """The limits for ``sm_90``, ``sm_90a``, ``sm_100f``.

    :raises InvalidProblem: the table has none.
    """
    found = ARCHITECTURES.get(re.sub(r"[af]$", "", arch))
    if found is None:
        raise InvalidProblem(f"arch={arch!r}: the limits of a multiprocessor are known for {', '.join(ARCHITECTURES)}")
    return found


def resident_blocks(arch: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds; 0 if it holds none.

    :param threads: per block.  :param registers: per thread.
    :param shared: bytes per block, static and dynamic.
    """
    limits = multiprocessor_of(arch)
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    # A quarter of the register file belongs to each of the four schedulers, and a warp stays with one.
    by_registers = 4 * (REGISTERS // 4 // per_warp) // warps if per_warp else limits.blocks
    # What a block may not have is what the system takes per block, from sm_80 on.
    taken = -(-shared // SHARED_UNIT) * SHARED_UNIT + limits.shared - limits.block_shared
    return min(limits.blocks, limits.warps // warps, by_registers, limits.shared // taken if taken else limits.blocks)
