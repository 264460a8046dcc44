"""Caches that a test has for itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from gradc.runtime.cache import default_cache
from gradc.runtime.host import pool


def with_runtime(folder: Path) -> str:
    """Makes ``folder`` a cache that holds nothing but the runtime, on which a compiler works for six seconds, and gives
    its path as ``GRADC_CACHE_DIR`` takes it.
    """
    pool.packed()  # from the cache of all tests, or compiled into it
    entry = default_cache().path(pool.key())
    assert entry is not None
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(entry, folder)
    return str(folder)
