"""What every test run shares: a cache of its own, the same random examples, and a word on what was not tested."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

OPTIONAL = {
    "torch": "gradients against torch",
    "onnx": "the ONNX frontend",
    "cupy": "CUDA kernels on a GPU",
    "nvidia.cuda_nvrtc": "compiling CUDA kernels",
    "ziglang": "the zig compiler",
}
_cache = pytest.StashKey[str]()

# The same examples on every machine, and no verdict on a slow one.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the environment
        config.stash[_cache] = os.environ["GRADC_CACHE_DIR"] = tempfile.mkdtemp(prefix="gradc-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache in config.stash:
        shutil.rmtree(config.stash[_cache], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    absent = [f"{name} ({what})" for name, what in OPTIONAL.items() if not _installed(name)]
    if absent:
        terminalreporter.write_line(f"not installed, so not tested: {', '.join(absent)}")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False
