"""What a test that does not end tells of itself."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path

import pytest
from watchdog import Watchdog

HANGING = """
import time
from watchdog import Watchdog

def hangs():
    time.sleep(0.5)

watchdog = Watchdog(2, seconds=0.1, slack=0.0)
watchdog.begin()
hangs()
watchdog.cancel()
hangs()
"""


def test_stacks_of_a_test_that_hangs() -> None:
    folder = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", HANGING], cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stderr.count("in hangs") == 1


def test_a_minute_of_tests_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them that hangs is found: after 540 to 600 seconds."""
    armed: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, file: armed.append((seconds, file)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append("cancelled"))
    times = iter((0.0, 1.0, 59.0, 60.0, 61.0, 700.0, 701.0))
    watchdog = Watchdog(7, seconds=600.0, slack=60.0, clock=lambda: next(times))
    new = []
    for _ in range(6):
        before = len(armed)
        watchdog.begin()
        new.append(armed[before:])
    arm = [(600.0, 7)]
    assert new == [arm, [], [], arm, [], arm]
    watchdog.cancel()
    watchdog.begin()
    assert armed[-2:] == ["cancelled", *arm]
