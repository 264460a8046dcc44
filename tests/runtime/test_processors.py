"""The tests of matrix products and layouts as for other processors: the compiler told of another one, NumPy's OpenBLAS
(the oracle's sums) too.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import long_tests
import pytest

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "runtime/test_runtime_cpu.py",
    "passes/test_layouts.py",
    "passes/test_fusions.py",
    "codegen/test_determinism.py",
)
WHICH = (
    "matmul or integer_products or neighbours or products_have or outputs_name or groups_of_batched"
    " or (reads_scales_per_group and blocks)"
)
PROCESSORS = {"x86-64": ("Prescott", 16, "sse2"), "haswell": ("Haswell", 32, "avx2")}
"""Beside the processor itself, for which every other test compiles: what gcc is told -> what OpenBLAS is told, bytes of
our vectors, and what this processor must have to run that.
"""

RUN = f"""
import sys, pytest
files = [f"tests/{{name}}" for name in {FILES!r}]
status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", {WHICH!r}, *files])
from gradc.runtime.host import pool
assert pool.vector_bytes() == int(sys.argv[1])
raise SystemExit(status)
"""


def features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.long(*long_tests.COMPILER, "gradc/module", "gradc/runtime", *(f"tests/{name}" for name in FILES))
@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="gcc's processors of x86-64")
@pytest.mark.parametrize("machine", PROCESSORS)
def test_products_and_layouts(machine: str) -> None:
    core, width, needed = PROCESSORS[machine]
    if needed not in features():
        pytest.skip(f"this processor has no {needed}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GRADC_CACHE"))}
    environment |= {
        "CC": f"gcc -march={machine}",
        "OPENBLAS_CORETYPE": core,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(width)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
