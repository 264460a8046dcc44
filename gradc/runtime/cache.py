"""A directory of compiled things that nothing can make us trust wrongly.

An entry is one file, an envelope (:mod:`gradc.ir.envelope`) of key and payload.  All of it is verified at every load;
what does not fit is deleted, counted and reported as a miss.  Entries appear by rename (:mod:`gradc.files`), so two
processes may write at once and a process may die at any point.  A cache that cannot be used costs time, never a result.
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

from gradc import files, knobs
from gradc.errors import FileError
from gradc.ir.envelope import load_opened, sealed, sealed_bytes, unsealed
from gradc.process.forks import held_off, lock

_FORMAT = 1
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Errors of a read that say nothing of the entry."""
_lock = lock()  # of every cache's counters


def digest(*parts: bytes | str) -> str:
    """The SHA-256 of the parts, each preceded by its length: ("ab", "c") and ("a", "bc") differ; 64 hex digits."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def pack(parts: Mapping[str, bytes]) -> bytes:
    """Named parts as one block."""
    return sealed_bytes("parts", _FORMAT, parts)


def unpack(payload: bytes) -> dict[str, bytes]:
    """What :func:`pack` made; IRFormatError (a ValueError) of anything else."""
    return unsealed(payload, "parts", _FORMAT).parts


@dataclass
class Counters:
    """What a cache did since it was made: ``dropped`` entries were damaged, and are counted as misses too."""

    hits: int = 0
    misses: int = 0
    dropped: int = 0
    write_failures: int = 0


class Cache:
    """A map from key to bytes that survives the process.

    :param directory: created with mode 0700; one that belongs to someone else, that others may write, or that cannot
        be written is not used: entries then live in this process only, after one warning.  None: so without warning.
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
        """The file of an entry, present or not; None if this cache has no directory."""
        name = key if re.fullmatch(r"[0-9a-f]{64}", key) else digest(key)
        return None if self.directory is None else self.directory / f"{name}.entry"

    def get(self, key: str) -> bytes | None:
        """The payload that was put under the key, or None; never raises."""
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
        """Keep the payload; a failure to write is counted, warned of once, and keeps it for this process only."""
        path = self.path(key)
        if path is None:
            self._memory[key] = payload
            return
        try:
            files.write(path, *sealed("entry", _FORMAT, {"key": _encoded(key), "payload": payload}), mode=0o600)
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
    """Why a directory must not be used, or ""; makes it if it is not there."""
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
    """The payload of a file; ValueError or OSError if anything about it is not as :meth:`Cache.put` wrote it."""
    with files.opened(path, follow=False) as (file, about):
        if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
            raise ValueError("others may have written it")
        parts = load_opened(file, about.st_size, "entry", _FORMAT, path.name).parts
    if parts.keys() != {"key", "payload"} or parts["key"] != _encoded(key):
        raise ValueError("another key")
    return parts["payload"]


def default_cache() -> Cache:
    """The cache that ``GRADC_CACHE`` and ``GRADC_CACHE_DIR`` ask for; the same object as long as they say the same."""
    if not knobs.CACHE.get():
        return _cache("")
    directory = knobs.CACHE_DIR.get()
    if not directory:
        directory = user_directory()
    return _cache(directory)


@functools.cache
def user_directory(kind: str = "cache") -> str:
    """The user's own directory of gradc for its ``cache`` or ``config``, where platformdirs puts it; without that
    package where XDG does.
    """
    try:
        with held_off:
            import platformdirs
    except ModuleNotFoundError:
        root = os.environ.get(f"XDG_{kind.upper()}_HOME") or os.path.join("~", f".{kind}")
        return os.path.join(os.path.expanduser(root), "gradc")
    return platformdirs.user_cache_dir("gradc") if kind == "cache" else platformdirs.user_config_dir("gradc")


@functools.cache
def _cache(directory: str) -> Cache:
    return Cache(Path(os.path.expanduser(directory)) if directory else None)
