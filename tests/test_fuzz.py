"""Every fuzzer on a small budget, and the driver that runs them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest
from fuzz import NAMES, campaign, driver
from fuzz.campaign import Campaign, Options, Outcome


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_finds_nothing(name: str, tmp_path: Path) -> None:
    chosen = campaign(name)
    for package in chosen.needs:
        pytest.importorskip(package)
    tally = driver.run(chosen, 0, chosen.ci, None, chosen.options, tmp_path)
    assert not tally.failed, "\n".join([driver.table([tally]), *(p.read_text() for p in tmp_path.iterdir())])
    assert tally.tried == chosen.ci


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
    chosen = Campaign("ends", _ends, limit=3, ci=9, shrink=lambda seed, outcome, options: Outcome(outcome.verdict, f"small {driver.isolated(_dies, 60).verdict}", outcome.kind))
    monkeypatch.setattr("fuzz.campaign", lambda name: chosen)
    tally = driver.run(chosen, 0, 9, None, {}, tmp_path)
    assert tally.verdicts == {"right": 4, "crash": 1, "hang": 1, "untyped": 1, "wrong": 2} and tally.counts == {"seen": 4}
    assert tally.seeds == {"crash SIGSEGV": [2], "hang": [4], "untyped KeyError at test_fuzz.py:_ends": [5], "wrong same": [6, 7]}
    assert {p.name: p.read_text().splitlines()[-1] for p in tmp_path.iterdir()} == dict.fromkeys(("ends-2.txt", "ends-4.txt", "ends-5.txt", "ends-6.txt"), "small crash")
    assert "--seed 6 --count 1" in (tmp_path / "ends-6.txt").read_text()
