"""Ops of a user's own and the cache: a graph has an op's name, and a record of the user's may be another next time."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.node import REGISTRY
from gradc.ir.op import Composite, Op
from gradc.runtime.cache import default_cache

RUN = """
import numpy as np
import gradc
from gradc import ops
from gradc.ir.op import Composite
from helper import factor

inner = Composite("inner_of_own", infer=lambda x: x, decompose=lambda x: x * INNER)
own = Composite("own", infer=lambda x: x, decompose=lambda x: ops.inner_of_own(x) * factor() * TABLE("k"))
module = gradc.compile(gradc.trace(lambda x: own(x) + 1.0, x="f32[N]"), target="cpu")
print(*module(x=np.ones(1, np.float32)))
"""
HELPER = "import helpers_helper\n\n\ndef factor():\n    return helpers_helper.FACTOR\n"


@pytest.mark.parametrize("changed", ["an inner op", "a bound method of a table", "a helper's helper"])
def test_what_has_changed_since_is_seen(changed: str, tmp_path: Path) -> None:
    def run(inner: float = 2.0, table: float = 3.0, factor: float = 5.0) -> float:
        (tmp_path / "own.py").write_text(RUN.replace("INNER", f"{inner}").replace("TABLE", f"{{'k': {table}}}.get"))
        (tmp_path / "helper.py").write_text(HELPER)
        (tmp_path / "helpers_helper.py").write_text(f"FACTOR = {factor}\n")
        done = subprocess.run(
            [sys.executable, "-B", str(tmp_path / "own.py")],
            env={**os.environ, "GRADC_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    assert run() == 31.0
    match changed:
        case "an inner op":
            assert run(inner=4.0) == 61.0
        case "a bound method of a table":
            assert run(table=6.0) == 61.0
        case _:
            assert run(factor=10.0) == 61.0


def test_an_op_is_the_packages_or_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [op for name in dir(ops) if isinstance(op := getattr(ops, name), Op)]
    assert len(records) > 300 and all(op.is_builtin for op in records)
    monkeypatch.setitem(REGISTRY, "own", None)
    monkeypatch.setitem(REGISTRY, "tanh", REGISTRY["tanh"])
    assert not Composite("own", infer=lambda x: x, decompose=lambda x: x).is_builtin
    assert not dataclasses.replace(REGISTRY["tanh"]).is_builtin


def test_modules_of_the_packages_ops_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "own", None)
    own = Composite("own", infer=lambda x: x, decompose=lambda x: x * 2.0)
    for function, kept in ((lambda x: ops.tanh(x) * 17.0, 1), (lambda x: own(x) * 19.0, 0)):
        graph = gradc.trace(function, x="f32[N]")
        before = default_cache().counters.hits
        for _ in range(2):
            gradc.compile(graph, target="cpu")(x=np.ones(2, np.float32))
        assert (default_cache().counters.hits - before >= 1) == bool(kept)
