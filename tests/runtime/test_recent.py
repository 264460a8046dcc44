"""The cache that drops what was asked for least recently."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

from gradc.runtime.recent import Recent


def test_what_was_asked_for_least_recently_goes_first() -> None:
    kept: Recent[int, str] = Recent(3)
    for key in (1, 2, 3):
        kept[key] = f"of {key}"
    assert kept.get(1) == "of 1" and kept.get(9) is None and kept.get(9, "none") == "none"
    kept[4] = "of 4"
    kept[3] = "of 3 again"
    kept[5] = "of 5"
    assert kept == {4: "of 4", 3: "of 3 again", 5: "of 5"} and list(kept) == [4, 3, 5]
    for again in (copy.deepcopy(Recent(3)), pickle.loads(pickle.dumps(Recent(3)))):
        assert again == {} and again.room == 3


def test_threads_that_use_it_at_once() -> None:
    kept: Recent[int, int] = Recent(8)

    def ask(seed: int) -> int:
        wrong = 0
        for i in range(2000):
            key = (seed * 7919 + i * 31) % 12
            found = kept.get(key)
            if found is None:
                found = kept[key] = key * key
            wrong += found != key * key
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(ask, range(4))) == 0
    assert len(kept) <= 8
