"""What an op's record means, in cache keys: a module of an op that has changed does not come from the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradc.ir.definition import _PROCESS, definition
from gradc.ir.node import REGISTRY
from gradc.ir.op import Composite, Op

OWN = """
import functools
import numpy as np
import helpers
from gradc import ops
from gradc.ir.op import Composite
from gradc.ir.types import Type

FACTOR, TABLE = 2.0, np.arange(3.0)


class Rule:
    power = 2

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def helper(x, times=1):
    return x * times


def made(by):
    return lambda x: x + by


rule, closed, part = Rule(3), made(4), functools.partial(helper, times=5)


def meaning(x):
    inner = lambda y: y + 6
    return inner(part(closed(rule(helper(x))))) * FACTOR + helpers.shift(x) + float(TABLE[2]) + Rule.power


own = Composite(
    "own_for_definitions",
    infer=lambda x: x,
    decompose=lambda x: meaning(x),
    vjp=lambda g, y, x: (g * 7.0,),
    doc="says nothing",
)
"""
HELPERS = "def shift(x):\n    return x - 8\n"
CHANGES = {
    "a constant in a function that the record's names": ("y + 6", "y + 7"),
    "a global": ("FACTOR, TABLE = 2.0", "FACTOR, TABLE = 2.5"),
    "an array": ("np.arange(3.0)", "np.arange(3.0) * 2"),
    "what an object holds": ("Rule(3)", "Rule(4)"),
    "a method": ("return x * self.by", "return x / self.by"),
    "an attribute of a class": ("power = 2", "power = 3"),
    "a cell": ("made(4)", "made(5)"),
    "an argument of a partial": ("times=5", "times=6"),
    "a default": ("times=1", "times=2"),
    "the derivative alone": ("g * 7.0", "g * 8.0"),
    "a name that code uses": ("return x * times", "return x - times"),
    "the sign of a zero": ("FACTOR, TABLE = 2.0", "FACTOR, TABLE = -0.0"),
}
FIXED = {"a comment": ("import functools\n", "import functools  # here\n\n"), "its text": ("says nothing", "says more")}


def record(folder: Path, source: str, helpers: str, monkeypatch: pytest.MonkeyPatch) -> Op:
    """The record that a file of the user's makes."""
    folder.mkdir()
    (folder / "helpers.py").write_text(helpers)
    (folder / "mine.py").write_text(source)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(folder))
        patched.delitem(sys.modules, "helpers", raising=False)
        spec = importlib.util.spec_from_file_location("mine", folder / "mine.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        patched.delitem(sys.modules, "helpers")
        found: Op = module.own
        definition(found)  # while the files of helpers are those of this version
    return found


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "own_for_definitions", None)


@pytest.mark.parametrize("change", [*CHANGES, *FIXED, "a helper's file", "nothing"])
def test_it_changes_with_what_the_record_does(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (CHANGES | FIXED).get(change, ("", ""))
    assert old in OWN
    changed = OWN.replace(old, new, 1) if old else OWN
    helpers = HELPERS.replace("8", "9") if change == "a helper's file" else HELPERS
    before = definition(record(tmp_path / "before", OWN, HELPERS, monkeypatch))
    after = definition(record(tmp_path / "after", changed, helpers, monkeypatch))
    assert _PROCESS not in before
    assert (before == after) == (change in FIXED or change == "nothing")


def test_a_function_that_is_given_another_meaning_is_seen_at_once() -> None:
    namespace: dict[str, Any] = {"by": 2.0}
    own = Composite("own_for_definitions", infer=lambda x: x, decompose=eval("lambda x: x * by", namespace))
    before = definition(own)
    assert definition(own) == before
    namespace["by"] = 3.0
    assert definition(own) != before


def test_what_cannot_be_known_belongs_to_this_process(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w") as file:
        own = Composite("own_for_definitions", infer=lambda x: x, decompose=lambda x: print(x, file=file))
        assert _PROCESS in definition(own)


ALL = """
import hashlib
from gradc import ops
import gradc.compiler
from gradc.ir.definition import definition
from gradc.ir.node import REGISTRY
from gradc.ir.op import Op
found = "".join(definition(op) for _, op in sorted(REGISTRY.items()) if isinstance(op, Op))
print(len(REGISTRY), hashlib.sha256(found.encode()).hexdigest())
"""


def test_ops_of_the_package_mean_the_same_in_every_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", ALL],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and int(said.pop().split()[0]) > 300


RUN = """
import sys
import numpy as np
import gradc
from gradc.runtime.cache import default_cache
from gradc.ir.op import Composite

own = Composite(
    "own_for_definitions", infer=lambda x: x, decompose=lambda x: x * FACTOR
)
module = gradc.compile(gradc.trace(lambda x: own(x) + 1.0, x="f32[N]"), target="cpu")
counters = default_cache().counters
print(module(x=np.ones(2, np.float32)).tolist(), counters.hits > 0)
"""


def test_a_changed_op_does_not_come_from_the_cache(tmp_path: Path) -> None:
    """One name, one type, another meaning: as one has it who writes an op and tries it."""

    def run(factor: str) -> str:
        (tmp_path / "own.py").write_text(textwrap.dedent(RUN).replace("FACTOR", factor))
        done = subprocess.run(
            [sys.executable, str(tmp_path / "own.py")],
            env={**os.environ, "GRADC_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert run("2.0").startswith("[3.0, 3.0]")
    assert run("2.0") == "[3.0, 3.0] True"
    assert run("5.0").startswith("[6.0, 6.0]")
    assert run("5.0") == "[6.0, 6.0] True"


def test_it_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that refers to itself, and to much, ends."""
    many = [np.float32(k) for k in range(20_000)]
    own = Composite("own_for_definitions", infer=lambda x: x, decompose=lambda x: many[own is not None])
    assert len(hashlib.sha256(definition(own).encode()).hexdigest()) == 64
