"""What each test takes, and which of an op's tests ``pytest -k NAME`` has time for.

``build/durations.json`` has the CPU seconds of each test that passed in this checkout, those of its processes and of
compilers among them, and those that such a run takes before its first test (:data:`START`).  CPU time, for what else
the machine does is to choose no other tests.  A test that had to wait for a compiler takes less the next time, and one
may meet a busy processor: what is kept is the last figure, but at most twice the one before.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from long_tests import function_of

WANTED = 8.0
"""Seconds for the start and the tests of a run, that all of it takes less than ten."""
LEAST = 1.0
"""Seconds for tests in any case."""
UNKNOWN = 0.13
"""Seconds of a test, where none of its function is known: more on average makes a function a slow one (conftest)."""
START, USUAL_START = "start", 5.0


def cpu_seconds() -> float:
    """Of this process so far, and of those it has waited for."""
    return time.process_time() + sum(os.times()[2:4])


def known(path: Path) -> dict[str, float]:
    """Test -> seconds; nothing where there is no file, or a damaged one."""
    try:
        read = json.loads(path.read_text("utf-8"))
        return {test: float(s) for test, s in read.items() if type(s) in (int, float) and 0 <= s < math.inf}
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError):
        return {}


def updated(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The seconds before, and those of now."""
    return {**before, **{test: round(min(s, 2 * (before.get(test) or s)), 2) for test, s in now.items()}}


def budget(seconds: Mapping[str, float]) -> float:
    """Of the tests of an op, in seconds."""
    return max(LEAST, WANTED - seconds.get(START, USUAL_START))


def chosen(tests: Iterable[str], seconds: Mapping[str, float], limit: float) -> set[str]:
    """As many of the tests as take ``limit`` seconds, and at least one: one of each function before a second one of
    any, and cheap ones first.

    :param seconds: of a test; unknown ones take what is usual of their function.
    """
    tests, of = set(tests), defaultdict(list)
    functions = set(map(function_of, tests))
    for test, each in seconds.items():
        if function_of(test) in functions:
            of[function_of(test)].append(each)
    usual = {function: statistics.median(each) for function, each in of.items()}
    cost = {test: seconds.get(test, usual.get(function_of(test), UNKNOWN)) for test in tests}
    before: Counter[str] = Counter()
    ranks = {}
    for test in sorted(tests, key=lambda test: (cost[test], test)):
        ranks[test] = before[function_of(test)]
        before[function_of(test)] += 1
    kept: set[str] = set()
    total = 0.0
    for test in sorted(tests, key=lambda test: (ranks[test], cost[test], test)):
        if not kept or total + cost[test] <= limit:
            kept.add(test)
            total += cost[test]
    return kept
