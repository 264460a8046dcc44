"""Caches that a test has for itself, and what tests make once for all runs."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradc.runtime.cache import default_cache, digest, object_cache
from gradc.runtime.host import pool
from gradc.runtime.host.toolchain import cpu_identity


def with_runtime(folder: Path) -> str:
    """Makes ``folder`` a cache that holds nothing but the runtime, on which a compiler works for six seconds, and gives
    its path as ``GRADC_CACHE_DIR`` takes it.
    """
    pool.packed(pool.KERNELS)  # from the cache of all tests, or compiled into it
    folder.mkdir(mode=0o700, exist_ok=True)
    for library in (pool.RUNTIME, *pool.KERNELS):
        entry = default_cache().path(pool.key(library))
        assert entry is not None
        shutil.copy(entry, folder)
    return str(folder)


def once(make: Callable[[], Any], *made_of: str | bytes) -> Any:
    """What ``make`` gives, kept from run to run beside the machine code (``GRADC_OBJECTS``).

    :param made_of: all that it depends on.
    """
    cache = object_cache()
    if cache is None:
        return make()
    key = digest("of tests", *made_of)
    payload = cache.get(key)
    if payload is None:
        payload = pickle.dumps(make())
        cache.put(key, payload)
    return pickle.loads(payload)


def compiled(command: Sequence[str], source: Path, headers: Path | None = None) -> tuple[bytes, str]:
    """(the shared object that a compiler makes of a source, what it said).

    :param command: its words but for the source and ``-o``.  :param headers: the folder of what the source includes.
    """
    library = source.with_suffix(".so")

    def make() -> tuple[bytes, str]:
        done = subprocess.run([*command, str(source), "-o", str(library), "-lm"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return library.read_bytes(), done.stderr

    about = os.stat(shutil.which(command[0]) or command[0])
    texts = [path.read_bytes() for path in sorted(headers.parent.rglob("*.h"))] if headers else []
    stamp = f"{about.st_size} {about.st_mtime_ns}"
    return once(make, *command, stamp, cpu_identity(), source.name, source.read_bytes(), *texts)  # type: ignore[no-any-return]
