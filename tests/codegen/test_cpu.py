"""Every op's samples through the compiled CPU target, fusion on and off, against the interpreter."""

from __future__ import annotations

import pytest
from agreement import NAMES, agree_with_numpy, in_turns
from registry import SIZES


@pytest.mark.parametrize("name", NAMES)
def test_cpu_is_numpy(name: str) -> None:
    agree_with_numpy(in_turns(name, 0), SIZES, target="cpu")


@pytest.mark.parametrize("name", NAMES[::2])
def test_cpu_is_numpy_without_fusion(name: str) -> None:
    agree_with_numpy(in_turns(name, 1), SIZES, target="cpu", fuse=False)
