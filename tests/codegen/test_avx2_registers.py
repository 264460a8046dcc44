"""What gcc keeps in registers of 256 bits, in loops whose time is that of what they load."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import gradc
from gradc import ops
from gradc.codegen.text import template_dirs
from gradc.runtime.host.toolchain import FLAGS, find_compiler


def assembly(module: gradc.Module, tmp_path: Path) -> str:
    """A module's forward, compiled for AVX2."""
    compiler = find_compiler()
    if "clang" in compiler.version or not compiler.target.startswith("x86_64"):
        pytest.skip("gcc's code for x86-64")
    source = tmp_path / "forward.c"
    source.write_text(module.forward.backend.source, encoding="utf-8")
    include = [f"-I{path / part}" for path in template_dirs() for part in ("cpu", "common")]
    flags = [flag for flag in FLAGS if flag != "-march=native"]
    command = [*compiler.argv, *flags, "-march=haswell", *include, "-S", "-o", "-", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def blocks(module: gradc.Module, needed: str, tmp_path: Path) -> list[str]:
    """The basic blocks of :func:`assembly` that have an instruction several times."""
    text = assembly(module, tmp_path)
    return [block for block in re.split(r"^\.L\d+:$", text, flags=re.M) if block.count(needed) > 1]


@pytest.mark.parametrize("width", [64, 128])
def test_sums_of_looked_up_rows(width: int, tmp_path: Path) -> None:
    """Each addition reads a vector of a row; the sums, of 128 columns all 16 registers, are in none of memory."""
    graph = gradc.trace(
        lambda table, i: ops.embedding_bag(i, table, mode="sum"), table=f"f32[V,{width}]", i="i64[N,20]"
    )
    added = [b for b in blocks(gradc.compile(graph, target="cpu"), "vaddps", tmp_path) if "vaddps\t" in b]
    lines = [line for b in added for line in b.splitlines() if "vaddps" in line]
    assert len(lines) == width // 8
    assert not any(re.search(r"ymm\d+.*\(%r[sb]p\)", line) for b in added for line in b.splitlines())


def test_codes_of_a_code_book(tmp_path: Path) -> None:
    """Eight codes come into a register as they are loaded, not by way of half a vector on the stack."""
    graph = gradc.trace(
        lambda codes, scale: ops.dequantize_nf4(codes, scale, block=(1, 64)), codes="u8[N,32]", scale="f32[N,1]"
    )
    looked_up = blocks(gradc.compile(graph, target="cpu"), "vpermps", tmp_path)
    assert looked_up and not any("(%rsp)" in b for b in looked_up)


def test_a_fill_is_a_memset(tmp_path: Path) -> None:
    """The C library fills large arrays without reading their lines: registers of sums cost other loops no such call."""
    module = gradc.compile(gradc.trace(lambda x: ops.where(x != x, 0.0, 0.0), x="f64[N]"), target="cpu")
    assert "memset" in assembly(module, tmp_path)
