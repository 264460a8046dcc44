"""Every op's samples through the compiled CPU target, fusion on and off, against the interpreter."""

from __future__ import annotations

import pytest
from agreement import COMPOSITES, NAMES, OTHERS, POINTWISE, agree_with_numpy, compiled, in_turns
from registry import SIZES


@pytest.mark.parametrize("name", compiled(NAMES, turn=0, turns=2))
def test_cpu_is_numpy(name: str) -> None:
    agree_with_numpy(in_turns(name, 0), SIZES, target="cpu")


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in COMPOSITES][::2] + POINTWISE[::4])
def test_cpu_is_numpy_without_fusion(name: str) -> None:
    agree_with_numpy(in_turns(name, 1), SIZES, target="cpu", fuse=False)


@pytest.mark.parametrize("name", compiled(COMPOSITES, turn=1, turns=2))
def test_programs_without_fusion(name: str) -> None:
    """By the interpreter: without fusion the kernels of a composite are those of the ops that it is made of."""
    agree_with_numpy(in_turns(name, 1), SIZES[:1], target="numpy", fuse=False)
