"""Translation units: kernels of costly functions get vectors of 512 bits, the others what the compiler prefers."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.codegen.cpu.program import PER_UNIT, STEPS_APART, even, render_program
from gradc.codegen.text import template_dirs
from gradc.runtime.host.toolchain import FLAGS, find_compiler


def units(*functions: object) -> tuple[str, ...]:
    graph = gradc.trace(lambda x, w: tuple(f(x, w) for f in functions), x="f32[N,C]", w="f32[C]")
    return render_program(gradc.compile(graph, target="cpu", fuse=False).forward.program).units


def names(text: str) -> set[str]:
    return set(re.findall(r"^static void (\w+)_rows", text, re.MULTILINE))


def test_costly_kernels_stand_apart() -> None:
    found = units(
        lambda x, w: ops.exp(x),
        lambda x, w: x + w,
        lambda x, w: ops.tanh(x),
        lambda x, w: ops.sum(x, axis=0),
        lambda x, w: ops.sqrt(x),
    )
    assert ['#include "wide_vectors.h"\n' in text for text in found] == [True, False]
    assert {n.split("_")[0] for n in names(found[0])} == {"exp", "tanh"} and {
        n.split("_")[0] for n in names(found[1])
    } >= {"add", "sum", "sqrt"}


def test_every_kernel_is_in_one_unit() -> None:
    found = units(*(lambda x, w, k=k: ops.exp(x * (k + 2.5)) for k in range(PER_UNIT + 1)))
    together = [name for text in found for name in names(text)]
    assert len(together) == len(set(together)) and sum("gradc_run(" in text for text in found) == 1
    assert all(len(names(text)) <= PER_UNIT for text in found)


@pytest.mark.parametrize("steps", [STEPS_APART - 1, STEPS_APART])
def test_an_entry_that_a_compiler_takes_long_for_is_no_kernels_unit(steps: int) -> None:
    """It is begun first, and what it computes is right: here a chain of maps of one text."""
    graph = gradc.trace(lambda x: functools.reduce(lambda y, _: ops.sin(y), range(steps), x), x="f32[N]")
    module = gradc.compile(graph, target="cpu", fuse=False)
    found = render_program(module.forward.program).units
    apart = steps >= STEPS_APART
    assert len(module.forward.program.steps) == steps and len(found) == 1 + apart
    assert "gradc_run(" in found[0] and bool(names(found[0])) is not apart
    x = np.linspace(-2, 2, 9)
    wanted = functools.reduce(lambda y, _: np.sin(y), range(steps), x)
    np.testing.assert_allclose(module(x=x.astype(np.float32)), wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("what", "function", "together"),
    [
        ("counts", lambda x, n: (x + x / n) * (n - 1), True),
        ("fractions", lambda x, n: x * (n + 0.5), False),
        ("powers", lambda x, n: x**n, False),
        ("bounds", lambda x, n: ops.clamp(x, 0.0, n), False),
        ("a place", lambda x, n: x * 0.0 + n, True),
        ("quotients by powers of two", lambda x, n: x / 2.0**n, False),
        ("quotients of rows by powers of two", lambda x, n: x - ops.sum(x, axis=1, keepdims=True) / 2.0**n, True),
    ],
)
def test_kernels_that_differ_in_counts_share_a_text(
    what: str, function: Callable[[gradc.Graph, float], gradc.Graph], together: bool
) -> None:
    """And values are those of the interpreter in f64."""
    numbers = (3.0, 7.0, 9.0)
    graph = gradc.trace(lambda x, y, z: tuple(map(function, (x, y, z), numbers)), **dict.fromkeys("xyz", "f32[N,9]"))
    module = gradc.compile(graph, target="cpu")
    texts = {k.text for k in render_program(module.forward.program).kernels.values()}
    assert (len(texts) == 1) is together, what
    x = {name: np.random.default_rng(n).uniform(0.5, 2, (5, 9)).astype(np.float32) for n, name in enumerate("xyz")}
    wanted = interp.run(graph, x, precision="f64")
    for name, value in module.forward.run(**x).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5)


def test_units_that_are_compiled_side_by_side_are_as_long() -> None:
    """Up to eight kernels are one unit, up to two of the most are two, and none waits for a longer one."""
    lengths = {n: [len(part) for part in even([str(k) for k in range(n)])] for n in (0, 1, 8, 9, 16, 20, 32, 33, 50)}
    assert lengths == {
        0: [],
        1: [1],
        8: [8],
        9: [4, 5],
        16: [8, 8],
        20: [10, 10],
        32: [16, 16],
        33: [11, 11, 11],
        50: [12, 13, 12, 13],
    }


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="vectors of x86")
def test_vectors_are_wide_where_it_pays(tmp_path: Path) -> None:
    """With a processor for which gcc prefers 256 bits; nothing is run."""
    compiler = find_compiler()
    if "gcc" not in subprocess.run([*compiler.argv, "-v"], capture_output=True, text=True, check=False).stderr:
        pytest.skip("the compiler is no gcc")
    flags = [f for f in FLAGS if f != "-march=native"] + ["-march=skylake-avx512"]
    include = [word for path in template_dirs() for word in ("-iquote", str(path / "cpu"))]
    widths = []
    for i, text in enumerate(units(lambda x, w: ops.exp(x), lambda x, w: x + w)):
        (tmp_path / f"{i}.c").write_text(text)
        subprocess.run([*compiler.argv, *flags, *include, "-S", "-o", f"{i}.s", f"{i}.c"], cwd=tmp_path, check=True)
        rows = "".join(
            re.findall(r"^\w+_rows:\n(.*?)\.cfi_endproc", (tmp_path / f"{i}.s").read_text(), re.MULTILINE | re.DOTALL)
        )
        widths.append({width for width in ("zmm", "ymm") if re.search(rf"v(add|mul)ps\t.*%{width}", rows)})
    assert "zmm" in widths[0] and widths[1] == {"ymm"}
