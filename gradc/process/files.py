"""Atomic writing and safe reading of files; everything in gradc that reads or writes lasting files uses it.

A file is written under a temporary name in the same directory, synced to disk and renamed, so that at any moment, even
after a crash, the path holds the complete old or the complete new file (``durable=False``, for the cache, does not wait
for the disk).  Only regular files are read: a pipe or a
device cannot block or flood a reader.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FileError
from .forks import held_off
from .interrupts import interrupts_wait

TEMPORARY = ".tmp-gradc-"
"""The prefix of the names of unfinished files and folders."""
STALE_SECONDS = 3600.0
_swept: set[str] = set()

Buffer = bytes | bytearray | memoryview


def as_path(path: Any, doing: str) -> Path:
    """The argument as a Path; FileError if it cannot be one."""
    try:
        found = Path(path)
        os.fsencode(found)
    except (TypeError, ValueError) as error:
        raise FileError(repr(path)[:200], doing, OSError(errno.EINVAL, f"this is no path: {error}")) from error
    if "\0" in str(found):
        raise FileError(repr(path)[:200], doing, OSError(errno.EINVAL, "a path has no NUL"))
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Any, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """A context manager with a new file that replaces ``path`` at the end of the block; if the block raises, the new
    file is deleted.

    A symbolic link at ``path`` is replaced, not followed; an old file's permissions are kept.  A path that is no
    regular file (``/dev/null``, ``/dev/stdout``, a pipe) is written directly.

    :param mode: permissions of a new file, before the umask.
    :param durable: after a loss of power there is the old file or the whole new one, which takes some 10 ms; without,
        also a part of the new one, for readers that notice.
    :raises FileError: it cannot be written; the old file is unchanged.
    """
    path = as_path(path, "written")
    try:
        if _is_device(path):
            with open(path, "wb") as file:
                yield file
            return
        temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with open(_created(temporary, path, mode), "wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # also KeyboardInterrupt
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            _sync_folder(path.parent)
        sweep(path.parent)
    except FileError:
        raise
    except OSError as error:
        raise FileError(path, "written", error) from error


def write(path: Any, *parts: Buffer | str, mode: int = 0o666, durable: bool = True) -> None:
    """Writes the concatenation of ``parts`` to ``path`` (:func:`replacing`); text is encoded in UTF-8."""
    with replacing(path, mode=mode, durable=durable) as file:
        for part in parts:
            file.write(part.encode("utf-8") if isinstance(part, str) else part)


def write_folder(path: Any, contents: Mapping[str, Buffer]) -> None:
    """Writes a folder of files, by their paths in it, all or none: they are written into a folder beside it, which is
    then renamed.

    :raises FileError: it cannot be written, or is there already and not empty.
    """
    path = as_path(path, "written")
    make_folder(path.parent)
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        for name, data in contents.items():
            file = temporary / name
            make_folder(file.parent)
            write(file, data)
        os.replace(temporary, path)  # an empty folder may stand there
        sweep(path.parent)
    except OSError as error:  # a FileError, too, whose path is that of the temporary folder
        raise FileError(path, "written", error) from error
    finally:
        _remove(temporary)


def write_into(path: Any, contents: Mapping[str, Buffer]) -> None:
    """Writes files, by their paths in a folder: all or none where it is new, else one after another into what is
    there, each whole.

    :raises FileError: one cannot be written.
    """
    folder = as_path(path, "written")
    if not os.path.lexists(folder):
        write_folder(folder, contents)
        return
    for name, data in contents.items():
        file = folder / name
        write(make_folder(file.parent) / file.name, data)


class scratch:
    """``with scratch() as folder:`` a private folder for temporary files, deleted however the block ends.

    :raises OSError: it cannot be created.

    ``tempfile.TemporaryDirectory`` leaves its folder behind where Ctrl-C comes while it is created or deleted, or where
    a process that was killed writes a last file meanwhile.
    """

    def __enter__(self) -> Path:
        with held_off:
            import shutil  # noqa: F401  (what deletes the folder, and may have to at any moment)
            import tempfile

            place = tempfile.gettempdir()  # looked for once, under a lock of that module's
        self._folder = Path(place) / f"gradc-{os.getpid()}-{secrets.token_hex(8)}"
        # Before there is anything to delete, and until it is: who is interrupted in between drops this object.
        self._owner = os.getpid()
        self._undone = weakref.finalize(self, _delete, self._folder, self._owner)
        self._folder.mkdir(0o700)
        return self._folder

    def __exit__(self, *error: object) -> None:
        with interrupts_wait():  # shutil.rmtree, interrupted, may close a descriptor twice
            _delete(self._folder, self._owner)
            self._undone.detach()


def _remove(folder: str | Path) -> None:
    """A folder and what is in it, as far as that can be removed."""
    with held_off:
        import shutil  # here, for modules from the cache need neither it nor the compressors that it imports
    shutil.rmtree(folder, ignore_errors=True)


def _delete(folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a child that was forked meanwhile ends
    for pause in (0.001, 0.01, 0.1, 0.5):
        _remove(folder)
        if not os.path.lexists(folder):
            return
        time.sleep(pause)  # a process that is about to die wrote into it


def make_folder(path: Any) -> Path:
    """Creates a directory and its parents if they do not exist.

    :raises FileError: it cannot be created, or the path is no directory.
    """
    folder = as_path(path, "written")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(folder, "written", error) from error
    return folder


def sweep(folder: Path) -> None:
    """Deletes temporary files and folders left by killed processes, once per process and directory; recent ones are
    kept, because they may be in use.
    """
    key = os.path.abspath(folder)
    if key in _swept:
        return
    _swept.add(key)
    with contextlib.suppress(OSError):
        for entry in os.scandir(key):
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(TEMPORARY)
                    and entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_SECONDS
                ):
                    if entry.is_dir(follow_symlinks=False):
                        _remove(entry.path)
                    else:
                        os.unlink(entry.path)


def _created(temporary: Path, path: Path, mode: int) -> int:
    """The descriptor of a newly created file with the permissions of the file that it will replace."""
    descriptor = os.open(
        temporary,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0),
        mode,
    )
    try:
        old = os.lstat(path)
        if stat.S_ISREG(old.st_mode) and hasattr(os, "fchmod"):
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & 0o777)
    except OSError:
        pass  # there is no old file, or the file system has no permissions
    return descriptor


def _is_device(path: Path) -> bool:
    """Whether a path is a device, a pipe or a process's descriptor, which cannot be replaced by renaming."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
            return True
        link = os.readlink(path) if path.is_symlink() else ""
        return link.startswith(("/proc/", "/dev/fd/")) or os.path.realpath(path.parent).startswith("/proc/")
    except OSError:
        return False  # it does not exist yet


def _sync_folder(folder: Path) -> None:
    """Syncs a rename to disk, on systems where a directory can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # the directory may be writable but not readable
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


# -- reading -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Any, *, follow: bool = True) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A context manager with (a regular file open for reading, its ``stat``).

    :raises FileError: it does not exist, is not readable, or is a directory, a pipe or a device.
    """
    links = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    path = as_path(path, "read")
    try:
        descriptor = os.open(
            path,
            os.O_RDONLY
            | links
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_CLOEXEC", 0)
            | getattr(os, "O_BINARY", 0),
        )
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(about.st_mode) else "it is no regular file")
        with open(descriptor, "rb") as file:
            yield file, about
    except FileError:
        raise
    except OSError as error:
        raise FileError(path, "read", error) from error


def read(path: Any, most: int) -> bytes:
    """The contents of a regular file.

    :param most: the largest allowed size in bytes, which is checked before anything is read.
    :raises FileError: it cannot be read, or is larger.
    """
    with opened(path) as (file, about):
        if about.st_size > most:
            raise FileError(path, "read", OSError(errno.EFBIG, f"it has {about.st_size} bytes, {most} are the most"))
        data = file.read(most + 1)
    if len(data) > most:  # the file grew while it was read
        raise FileError(path, "read", OSError(errno.EFBIG, f"it has more than {most} bytes"))
    return data


@functools.cache
def user_directory(kind: str = "cache") -> str:
    """The user's ``cache`` or ``config`` directory of gradc, according to platformdirs, or to XDG if that package is
    not installed.
    """
    try:
        with held_off:
            import platformdirs
    except ModuleNotFoundError:
        root = os.environ.get(f"XDG_{kind.upper()}_HOME") or os.path.join("~", f".{kind}")
        return os.path.join(os.path.expanduser(root), "gradc")
    return platformdirs.user_cache_dir("gradc") if kind == "cache" else platformdirs.user_config_dir("gradc")
