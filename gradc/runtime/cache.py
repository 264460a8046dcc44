"""A directory of compiled things that nothing can make us trust wrongly.

An entry is one file: header (magic and version, lengths, SHA-256), key, payload.  All of it is verified at every load;
what does not fit is deleted, counted and reported as a miss.  Entries appear by rename, so two processes may write at
once and a process may die at any point.  A cache that cannot be used costs time, never a result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import stat
import struct
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradc import knobs
from gradc.process.forks import held_off, lock

_MAGIC = b"gradc\x00\x01\n"  # the sixth and seventh byte are the version of this format
_HEADER = struct.Struct("<8sIQ32s")  # magic, bytes of the key, bytes of the payload, SHA-256 of key and payload
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600.0
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
    """Named parts as one block: a line of JSON with their lengths, then their bytes."""
    head = json.dumps({name: len(data) for name, data in parts.items()}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts.values())


def unpack(payload: bytes) -> dict[str, bytes]:
    """What :func:`pack` made; ValueError if lengths do not add up."""
    size = int.from_bytes(payload[:8], "little")
    lengths = json.loads(payload[8 : 8 + size])
    at, out = 8 + size, {}
    if at + sum(lengths.values()) != len(payload) or any(n < 0 for n in lengths.values()):
        raise ValueError("the parts do not fill the block")
    for name, length in lengths.items():
        out[name] = payload[at : at + length]
        at += length
    return out


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
        self._swept = False
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
            except FileNotFoundError:
                pass
            except (OSError, ValueError, MemoryError):
                dropped = True
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
            self._sweep()
            _store(path, key, payload)
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

    def _sweep(self) -> None:
        """Delete the temporaries of processes that died in the middle of a put."""
        with _lock:
            done, self._swept = self._swept, True
        if done or self.directory is None:
            return
        for entry in os.scandir(self.directory):
            # Young ones may belong to a live process.
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(_TEMPORARY)
                    and entry.stat(follow_symlinks=False).st_mtime < time.time() - _STALE_SECONDS
                ):
                    os.unlink(entry.path)


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


def _load(path: Path, key: str) -> bytes:
    """The payload of a file; ValueError or OSError if anything about it is not as :func:`_store` wrote it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("not a regular file")
        if hasattr(os, "geteuid") and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
            raise ValueError("others may have written it")
        head = file.read(_HEADER.size)
        if len(head) != _HEADER.size:
            raise ValueError("truncated")
        magic, key_size, payload_size, checksum = _HEADER.unpack(head)
        expected = key.encode("utf-8", "surrogatepass")
        # The size is compared before anything is read: a flipped length must not make us allocate it.
        if magic != _MAGIC or key_size != len(expected) or about.st_size != _HEADER.size + key_size + payload_size:
            raise ValueError("another format, another key or another size")
        body = file.read(key_size + payload_size)
    if len(body) != key_size + payload_size or body[:key_size] != expected or hashlib.sha256(body).digest() != checksum:
        raise ValueError("another key or damaged")
    return body[key_size:]


def _store(path: Path, key: str, payload: bytes) -> None:
    """Write an entry so that at any moment the path holds the old file, none, or the whole new one."""
    body = key.encode("utf-8", "surrogatepass") + payload
    head = _HEADER.pack(_MAGIC, len(body) - len(payload), len(payload), hashlib.sha256(body).digest())
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(descriptor, "wb") as file:
            file.write(head)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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
    """The user's own directory of gradc for its ``cache`` or ``config``, where platformdirs puts it; without that package where XDG does."""
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
