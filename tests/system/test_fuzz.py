"""Every fuzzer on a small budget, and the driver that runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fuzz import NAMES, campaign, driver, sanitize
from fuzz.campaign import Campaign, Options, Outcome

import gradc
from gradc import ops


def _campaign(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long(*campaign(name).tries, "tests/fuzz"))


@pytest.mark.parametrize("name", map(_campaign, NAMES))
def test_a_small_budget_finds_nothing(name: str, tmp_path: Path) -> None:
    chosen = campaign(name)
    for package in chosen.needs:
        pytest.importorskip(package)
    if chosen.missing():
        pytest.skip(chosen.missing())
    tally = driver.run(chosen, 0, chosen.ci, None, chosen.options, tmp_path)
    assert not tally.failed, "\n".join([driver.table([tally]), *(p.read_text() for p in tmp_path.iterdir())])
    assert tally.tried == chosen.ci


pytestmark = pytest.mark.compiles


def _ends(seed: int, options: Options) -> Outcome:
    if seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 4:
        time.sleep(600)
    if seed == 5:
        raise KeyError("x")
    return Outcome("wrong", f"seed {seed}", "same") if seed in (6, 7) else Outcome("right", counts={"seen": 1})


def _dies() -> NoReturn:
    os.abort()


def test_the_driver_attributes_every_end_to_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Campaign(
        "ends",
        _ends,
        limit=3,
        ci=9,
        shrink=lambda seed, outcome, options: Outcome(
            outcome.verdict, f"small {driver.isolated(_dies, 60).verdict}", outcome.kind
        ),
    )
    monkeypatch.setattr("fuzz.campaign", lambda name: chosen)
    tally = driver.run(chosen, 0, 9, None, {}, tmp_path)
    assert tally.verdicts == {"right": 4, "crash": 1, "hang": 1, "untyped": 1, "wrong": 2} and tally.counts == {
        "seen": 4
    }
    assert tally.seeds == {
        "crash SIGSEGV": [2],
        "hang": [4],
        "untyped KeyError at test_fuzz.py:_ends": [5],
        "wrong same": [6, 7],
    }
    assert {p.name: p.read_text().splitlines()[-1] for p in tmp_path.iterdir()} == dict.fromkeys(
        ("ends-2.txt", "ends-4.txt", "ends-5.txt", "ends-6.txt", "ends-7.txt"), "small crash"
    )
    assert "--seed 6 --count 1" in (tmp_path / "ends-6.txt").read_text()


@pytest.mark.long("tests/fuzz")
def test_graphs_are_tried_where_torch_differentiates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does in no fork of a process with threads of autograd: 2.14.1, after the tests of its frontends."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.autograd, "grad", _dies)  # what a fork inherits
    graphs = campaign("graphs")
    tally = driver.run(graphs, 1, 1, None, graphs.options, tmp_path)
    assert tally.verdicts == {"right": 1} and tally.counts["elements held against torch"]


OVERRUN = """
import ctypes
import numpy as np
from gradc.runtime.host.toolchain import compile_c, load_library
source = "__attribute__((visibility(\\"default\\"))) void gradc_past(double *x, long n) { x[n] = 1.0; }"
library = load_library(compile_c(source), "past")
library.gradc_past(ctypes.c_void_p(np.zeros(5).ctypes.data), ctypes.c_long(5))
"""


def test_the_sanitizer_sees_a_kernel_write_past_an_array() -> None:
    graphs = campaign("graphs")
    if sanitize.missing():
        pytest.skip(sanitize.missing())
    variables = graphs.environment({**graphs.options, "sanitize": "1"})
    ended = subprocess.run(
        [sys.executable, "-c", OVERRUN],
        env={**os.environ, **variables, "PYTHONPATH": str(Path(gradc.__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode and "heap-buffer-overflow" in ended.stderr and "WRITE of size 8" in ended.stderr, (
        ended.stderr[-2000:]
    )


# -- what random graphs have found -------------------------------------------------------------------------------------

SIZES = ({"N": 7, "M": 5}, {"N": 0, "M": 7}, {"N": 1, "M": 1}, {"N": 64, "M": 3}, {"N": 7, "M": 0}, {"N": 3, "M": 64})
FOUND: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "a scatter of constants counts every column": (
        lambda x, i: ops.gather(x, i, scale_grad_by_freq=True),
        {"x": "f64[1,N]", "i": "i32[2,N]"},
    ),
    "a matrix product reads no strides out of positions": (
        lambda x, w, i: ops.take_along_axis(x, i, axis=1) @ ops.gather(w, ops.reshape(i[:1], (-1,))),
        {"x": "f32[3,N]", "w": "f32[N,4]", "i": "i64[3,2]"},
    ),
    "a border around nothing has its value": (lambda x: ops.pad(x, ((1, 2), (0, 1)), 1.5) * 2.0, {"x": "f32[N,M]"}),
    "the gradient of a slice has the operand's shape": (lambda x: x[:-1] * x[1:], {"x": "bf16[N]"}),
    "the gradient of a slice that starts behind the end": (lambda x: ops.sum(x[3:]) + ops.sum(x[::3]), {"x": "f32[N]"}),
    "sizes of 0 in a reshape": (
        lambda x, y: ops.pad(ops.reshape(x, (1, 0)), ((0, 0), (1, 1)), 1.0) + y,
        {"x": "f32[1,0,2]", "y": "f32[1,2]"},
    ),
    "rows of a softmax without columns": (
        lambda x: ops.softmax(x) + ops.reshape(ops.logsumexp(x, axis=1), (-1, 1)),
        {"x": "f32[N,M]"},
    ),
    "an empty table": (
        lambda x, i: ops.gather(x, i, oob="clamp") + ops.gather(x, i, oob="wrap") + ops.gather(x, i, oob="skip"),
        {"x": "f32[N,3]", "i": "i64[M]"},
    ),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", list(FOUND))
def test_found_before(name: str, fuse: bool) -> None:
    pytest.importorskip("torch")
    from fuzz.graphs import Problem, judge

    function, types = FOUND[name]
    graph = gradc.trace(function, **types)
    floats = tuple(n for n in graph.input_names if graph.input(n).dtype.is_float)
    for target in ("numpy", "cpu"):
        outcome = judge(
            Problem(
                str(graph),
                floats,
                target,
                {"fuse": fuse},
                tuple({d: s[d] for d in graph.dims} for s in SIZES),
                validate=target == "numpy",
            )
        )
        assert outcome.verdict == "right", outcome.text
