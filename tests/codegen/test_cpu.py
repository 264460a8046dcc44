"""Every op's samples through the compiled CPU target, fusion on and off, against the interpreter."""

from __future__ import annotations

import pytest
from agreement import NAMES, OTHERS, agrees_with_numpy, compiled
from registry import SIZES


@pytest.mark.parametrize("name", compiled(NAMES, turn=0))
def test_cpu_is_numpy(name: str) -> None:
    """f32, and for every second op another."""
    turn = NAMES.index(name)
    agrees_with_numpy(name, ("f32", *([OTHERS[turn // 2 % 3]] if turn % 2 else [])), SIZES, target="cpu")


@pytest.mark.parametrize("name", compiled(NAMES[::2], turn=1))
def test_cpu_is_numpy_without_fusion(name: str) -> None:
    agrees_with_numpy(name, [OTHERS[NAMES.index(name) // 2 % 3]], SIZES, target="cpu", fuse=False)
