"""The on-disk cache of compiled code.

An entry is one file, an envelope (:mod:`gradc.ir.envelope`) of key and payload.  It is verified completely at every
load; an invalid entry is deleted, counted and treated as a miss.  Entries are created by renaming
(:mod:`gradc.process.files`), so that processes may write concurrently and may be killed at any time.  An unusable cache
costs time, but is no error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradc import knobs
from gradc.errors import FileError
from gradc.ir.envelope import load_opened, sealed, sealed_bytes, unsealed
from gradc.process import files
from gradc.process.forks import lock

_FORMAT = 1
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Transient errors of a read, after which the entry is kept."""
_lock = lock()  # protects the counters of all caches


def digest(*parts: bytes | str) -> str:
    """The SHA-256 of the parts, each preceded by its length: ("ab", "c") and ("a", "bc") differ; 64 hex digits."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def pack(parts: Mapping[str, bytes]) -> bytes:
    """Named parts as one byte string, for :func:`unpack`."""
    return sealed_bytes("parts", _FORMAT, parts)


def unpack(payload: bytes) -> dict[str, bytes]:
    """The inverse of :func:`pack`; IRFormatError (a ValueError) if the data is malformed."""
    return unsealed(payload, "parts", _FORMAT).parts


@dataclass
class Counters:
    """The statistics of a cache; ``dropped`` counts damaged entries, which are also counted as misses."""

    hits: int = 0
    misses: int = 0
    dropped: int = 0
    write_failures: int = 0


class Cache:
    """A persistent map from key to bytes.

    :param directory: created with mode 0700.  If it belongs to another user, is writable by others, or cannot be
        written, it is not used, with one warning, and entries are kept in memory only.  None keeps them in memory
        without a warning.
    """

    def __init__(self, directory: Path | None = None):
        self.directory = directory
        self.counters = Counters()
        self._memory: dict[str, bytes] = {}
        self._warned = False
        if directory is not None:
            try:
                refusal = _refusal(directory)
            except OSError as error:
                refusal = str(error)
            if refusal:
                self._warn(refusal)
                self.directory = None

    def path(self, key: str) -> Path | None:
        """The path of an entry, whether it exists or not; None if the cache has no directory."""
        name = key if re.fullmatch(r"[0-9a-f]{64}", key) else digest(key)
        return None if self.directory is None else self.directory / f"{name}.entry"

    def get(self, key: str) -> bytes | None:
        """The payload stored under the key, or None; never raises."""
        payload = self._memory.get(key)
        path = self.path(key)
        dropped = False
        if payload is None and path is not None:
            try:
                payload = _load(path, key)
            except (OSError, ValueError, MemoryError) as error:
                if not isinstance(error, MemoryError) and getattr(error, "errno", None) not in _TRANSIENT:
                    dropped = not (isinstance(error, FileError) and error.errno == errno.ENOENT)
                    with contextlib.suppress(OSError):
                        path.unlink()
        with _lock:
            self.counters.hits += payload is not None
            self.counters.misses += payload is None
            self.counters.dropped += dropped
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Stores the payload; if it cannot be written, that is counted, warned about once, and it is kept in memory."""
        path = self.path(key)
        if path is None:
            self._memory[key] = payload
            return
        parts = sealed("entry", _FORMAT, {"key": _encoded(key), "payload": payload})
        try:
            files.write(path, *parts, mode=0o600, durable=False)  # a torn entry has another digest, and is made again
        except OSError as error:
            with _lock:
                self.counters.write_failures += 1
            self._memory[key] = payload
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        with _lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"the kernel cache cannot be used, entries are kept in this process only: {reason}",
                RuntimeWarning,
                stacklevel=3,
            )


def _refusal(directory: Path) -> str:
    """Why a directory must not be used, or ""; creates it if it does not exist."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    about = directory.stat()
    if not stat.S_ISDIR(about.st_mode):
        return f"{directory} is not a directory"
    if hasattr(os, "geteuid"):
        if about.st_uid != os.geteuid():
            return f"{directory} belongs to user {about.st_uid}, not to {os.geteuid()}"
        if about.st_mode & 0o022:
            return f"{directory} may be written by others (mode {stat.S_IMODE(about.st_mode):04o})"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    return ""


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _load(path: Path, key: str) -> bytes:
    """The payload of an entry's file; ValueError or OSError unless it is exactly as :meth:`Cache.put` wrote it."""
    with files.opened(path, follow=False) as (file, about):
        if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
            raise ValueError("others may have written it")
        parts = load_opened(file, about.st_size, "entry", _FORMAT, path.name).parts
    if parts.keys() != {"key", "payload"} or parts["key"] != _encoded(key):
        raise ValueError("another key")
    return parts["payload"]


def default_cache() -> Cache:
    """The cache selected by ``GRADC_CACHE`` and ``GRADC_CACHE_DIR``; the same object as long as they do not change."""
    if not knobs.CACHE.get():
        return _cache("")
    directory = knobs.CACHE_DIR.get()
    if not directory:
        directory = files.user_directory()
    return _cache(directory)


def object_cache() -> Cache | None:
    """The cache of machine code by its source, selected by ``GRADC_OBJECTS``; None if it is not set."""
    directory = knobs.OBJECTS.get()
    return _cache(directory) if directory else None


@functools.cache
def _cache(directory: str) -> Cache:
    return Cache(Path(os.path.expanduser(directory)) if directory else None)
