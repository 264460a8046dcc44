"""Calls timed by turns, on a machine that is never quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["least"]


def least(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float, together: int = 1) -> dict[str, float]:
    """Seconds of processor time per call of each, the least of several rounds in which they take turns.

    :param seconds: of each in a round, in which it is called twice at least.
    :param together: calls between two looks at the clock.
    """
    for call in calls.values():
        for _ in range(min(together, 5)):
            call()
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            count, began = 0, time.process_time()
            while (taken := time.process_time() - began) < seconds or count < 2:
                for _ in range(together):
                    call()
                count += together
            found[name] = min(found[name], taken / count)
    return found
