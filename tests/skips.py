"""Marks of tests for which a machine needs more than a C compiler."""

from __future__ import annotations

import functools
import sys

import pytest

from gradc.errors import CompilerError, GradcError
from gradc.runtime.cuda.nvdisasm import find_nvdisasm
from gradc.runtime.cuda.nvrtc import find_nvrtc
from gradc.runtime.host.toolchain import compile_object


def _no_simulator() -> str:
    """Why there is no cuda-sim on this machine, or ""."""
    if sys.platform != "linux":
        return "cuda-sim reads what an ELF library says of itself"
    try:
        compile_object("int x;")
    except CompilerError:
        return "the C compiler has no C++ part (g++)"
    return ""


@functools.cache
def simulated() -> pytest.MarkDecorator:
    """Of what runs CUDA text by cuda-sim."""
    reason = _no_simulator()
    return pytest.mark.skipif(bool(reason), reason=reason)


@functools.cache
def compiled() -> pytest.MarkDecorator:
    """Of what NVRTC compiles: that of gradc[nvrtc], of a torch for CUDA or of a toolkit."""
    try:
        find_nvrtc()
    except GradcError:
        return pytest.mark.skipif(True, reason="needs gradc[nvrtc]")
    return pytest.mark.skipif(False, reason="")


@functools.cache
def disassembled(arch: str) -> pytest.MarkDecorator:
    """Of what compiles for an architecture by NVRTC and reads the machine code back."""
    try:
        find_nvrtc(arch)
        find_nvdisasm()
    except GradcError:
        return pytest.mark.skipif(True, reason="needs gradc[nvrtc,nvdisasm]")
    return pytest.mark.skipif(False, reason="")
