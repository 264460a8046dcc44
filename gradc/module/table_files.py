"""Tables in files: arrays that a training step writes where they lie, in steps of which each is whole or has not been.

Before a step the rows that it may write are copied into a journal, which gets its name once it is complete; after it
the number of steps is replaced, which is the moment from which the step counts, and the journal goes.  A process that
ends anywhere between leaves a folder that the next one opens: a journal of a step that does not count is written back.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import operator
import os
import re
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidProblem
from ..ir.types import Type, parse_type, typeof
from ..optim.optimizer import parameter_of
from ..process import files
from ..runtime.host.arrays import to_numpy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Array = np.ndarray[Any, Any]
_MANIFEST, _NUMBER, _JOURNAL, _LOCK = "tables.json", "step", "journal", "lock"
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


@dataclass(frozen=True)
class _Kept:
    """Of an array what it was before a step: some rows, or all of it where ``rows`` is None."""

    name: str
    rows: Array | None
    values: Array


class TableFiles:
    """Arrays in the files of a folder (``NAME.npy``), larger than memory if need be, that survive the end of a process
    at any moment: :meth:`open` gives them as the last whole step left them.

    >>> types = {"users": "f32[1000000,64]", "state.sum.users": "f32[1000000]", "state.step": "i64[]"}
    >>> tables = gradc.TableFiles.create(folder, types, rows_of=["users"])
    >>> with tables.step({"users": indices}):
    ...     module(**tables.arrays, indices=indices)

    :ivar arrays: by name; what is written in them outside of :meth:`step` is not protected.
    """

    arrays: dict[str, Array]

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        arrays: Mapping[str, Any],
        rows_of: Collection[str],
        *,
        follows: Mapping[str, str | None] | None = None,
        durable: bool = False,
    ) -> TableFiles:
        """A folder of new files.

        :param arrays: each name's array, which is copied, or its type ``"f32[1000,64]"``: zeros, which take no space
            before they are written.
        :param rows_of: tables, of which a step names the rows that it may write.  What a training step calls the state
            of one, ``state.sum.users`` of ``users``, follows it: of it the same rows are written.  All others are
            small, and copied whole in each step.
        :param follows: ``{"mean_of_users": "users"}``: of arrays of other names, the table that each follows; None: it
            follows none, whatever it is called.
        :param durable: whether a step is also to survive a loss of power: it waits for the disk twice.
        :raises InvalidProblem: a name that is none, a table that is missing or has no rows, an array of other rows than
            the table that it follows, or a folder that has tables already, or is open; names that differ in the case of
            letters alone, in a folder that does not tell them apart.  No file of an array was written.
        """
        given = {name: None if isinstance(x, str) else to_numpy(x)[0] for name, x in arrays.items()}
        types = {name: parse_type(x) if isinstance(x, str) else typeof(given[name]) for name, x in arrays.items()}
        table_of = _tables_of(types, rows_of, {} if follows is None else follows)
        _check(types, tables := sorted(rows_of), table_of)
        place = Path(folder)
        _check_new(place)
        _make_folder(place, durable)
        with _locked(place) or contextlib.nullcontext():
            _check_new(place)  # another process may have made some
            _check_case(place, types)
            (place / _JOURNAL).unlink(missing_ok=True)  # of tables that were here
            for name, type_ in types.items():
                shape = tuple(int(n) for n in type_.shape)
                new = place / f"{name}.npy.new"  # what is given may be the file that it replaces
                made = np.lib.format.open_memmap(new, "w+", _stored(type_), shape)  # type: ignore[no-untyped-call]
                if (array := given[name]) is not None:
                    made[...] = array.view(made.dtype)
                if durable:
                    made.flush()
                del made  # Windows renames no file that is mapped
                new.replace(_file(place, name))
            files.write(place / _NUMBER, "0", durable=durable)
            texts = {name: str(t) for name, t in types.items()}
            manifest = {"arrays": texts, "rows_of": tables, "follows": table_of}
            files.write(place / _MANIFEST, json.dumps(manifest, indent=1), durable=durable)  # last: it has all, or none
        return cls.open(place, durable=durable)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, durable: bool = False) -> TableFiles:
        """The arrays of a folder as its last whole step left them.

        :raises InvalidProblem: there are no tables, another process has them open, or a file is not what it was.
        """
        return cls(Path(folder), durable)

    def __init__(self, folder: Path, durable: bool):
        self._folder, self._durable = folder.absolute(), durable
        self._process, self._current = os.getpid(), dict[str, object]()
        manifest = _read_manifest(self._folder)
        self._lock = _locked(self._folder)
        try:
            self._rows_of: list[str] = manifest["rows_of"]
            with _damage(self._folder / _MANIFEST):
                types = {name: parse_type(text) for name, text in manifest["arrays"].items()}
                _check(types, self._rows_of, manifest["follows"])
            self._files = {name: _mapped(self._folder, name, type_) for name, type_ in types.items()}
            self.arrays = {name: self._files[name].view(type_.dtype.np) for name, type_ in types.items()}
            self._table: dict[str, str | None] = manifest["follows"]
            self._recover()
        except BaseException:
            self.close()  # a traceback keeps this object
            raise

    @property
    def number(self) -> int:
        """How many steps are whole."""
        path = self._folder / _NUMBER
        with _damage(path):
            number = int(path.read_bytes())
            if number < 0:
                raise ValueError(f"the number of steps is {number}")
            return number

    @contextlib.contextmanager
    def step(self, rows: Mapping[str, Any]) -> Iterator[None]:
        """A block that may write the named rows of tables, and what follows them; and arrays that are no tables.

        An error in the block writes all of them back, and the step does not count.

        :param rows: of each table that the block may write, integers of any shape, each as often as it may be.
        :raises InvalidProblem: what is no table, or no integers, or a row that the table has not; a step in a step, of
            this thread or another; a process that did not open the folder, or closed it.  Nothing was written.
        """
        mine = object()
        try:
            if self._current.setdefault("step", mine) is not mine:
                raise InvalidProblem("a step in a step of the same tables")
            self._check_open()
            if not isinstance(rows, Mapping):
                raise InvalidProblem(f"a step names the rows of each table by its name, a mapping, not {rows!r}")
            checked = {name: self._checked(name, x) for name, x in rows.items()}
            before = self._recover()  # what an error in a roll back left
            try:
                self._write_journal(before + 1, self._kept(checked))
                yield
                self._flush()
                self._count(before + 1)
            except BaseException:
                if self._process == os.getpid():  # in a fork the step is its parent's
                    if self.number > before:
                        self._count(before)  # first, in case that the process ends here
                    self._recover()
                raise
            self._drop_journal()
        finally:
            if self._current.get("step") is mine:
                del self._current["step"]

    def close(self) -> None:
        """Lets another process open the folder; the arrays stay as long as they are held.

        :raises InvalidProblem: in a step.
        """
        if self._current:
            raise InvalidProblem("tables are closed after a step, not in it")
        self.arrays, self._files = {}, {}
        if self._lock is not None:
            if self._process == os.getpid():
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # which forks have, too
            self._lock.close()
            self._lock = None
        self._process = 0

    def _check_open(self) -> None:
        if self._process != os.getpid():
            state = "is open in the process that this one is a fork of" if self._process else "was closed"
            raise InvalidProblem(f"{self._folder} {state}: TableFiles.open gives its tables")

    # -- before a step, and back to it ---------------------------------------------------------------------------------

    def _checked(self, table: str, given: Any) -> Array:
        """The distinct rows of a table that a step names."""
        if table not in self._rows_of:
            there = ", ".join(self._rows_of) or "none"
            raise InvalidProblem(f"{table!r} is no table of {self._folder}; it has {there}")
        try:
            rows = np.unique(np.asarray(given))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidProblem(f"rows of {table} are integers, and these no array: {error}") from None
        count = len(self.arrays[table])
        if rows.size and rows.dtype.kind not in "iu":
            raise InvalidProblem(f"rows of {table} are integers, not {rows.dtype}")
        if rows.size and not (0 <= rows[0] and rows[-1] < count):
            raise InvalidProblem(f"{table} has {count} rows, not row {rows[0] if rows[0] < 0 else rows[-1]}")
        return rows.astype(np.int64)

    def _kept(self, rows: Mapping[str, Array]) -> list[_Kept]:
        none = np.zeros(0, np.int64)
        found = []
        for name, array in self.arrays.items():
            table = self._table[name]
            of_it = None if table is None else rows.get(table, none)
            found.append(_Kept(name, of_it, np.array(array) if of_it is None else array[of_it]))
        return [kept for kept in found if kept.values.size]

    def _recover(self) -> int:
        """Writes back what a step that does not count has a journal of; the number of those that do."""
        whole = self.number
        if (self._folder / _JOURNAL).exists():
            number, kept = self._read_journal()
            if number > whole:
                for each in kept:
                    self.arrays[each.name][... if each.rows is None else each.rows] = each.values
                self._flush()
            self._drop_journal()
        return whole

    def _flush(self) -> None:
        for file in self._files.values() if self._durable else ():
            file.flush()

    def _count(self, number: int) -> None:
        files.write(self._folder / _NUMBER, str(number), durable=self._durable)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _write_journal(self, number: int, kept: Collection[_Kept]) -> None:
        """A line of JSON, then of each array its rows as i64, and what they have."""
        entries = [[each.name, None if each.rows is None else len(each.rows)] for each in kept]
        head = json.dumps({"step": number, "kept": entries}).encode() + b"\n"
        with files.replacing(self._folder / _JOURNAL, durable=self._durable) as file:
            file.write(head)
            for part in (part for each in kept for part in (each.rows, each.values) if part is not None):
                file.write(part.tobytes())

    def _read_journal(self) -> tuple[int, list[_Kept]]:
        path = self._folder / _JOURNAL
        with _damage(path), path.open("rb") as file:
            head = json.loads(file.readline())
            kept = []
            for name, count in head["kept"]:
                array = self.arrays[name]
                rows = None if count is None else _read(file, np.dtype(np.int64), (count,))
                shape = array.shape if count is None else (count, *array.shape[1:])
                kept.append(_Kept(name, rows, _read(file, array.dtype, shape)))
                if rows is not None and rows.size and not (0 <= rows.min() and rows.max() < len(array)):
                    raise ValueError(f"{name} has not all of its rows")
            return operator.index(head["step"]), kept

    def _drop_journal(self) -> None:
        (self._folder / _JOURNAL).unlink()


# -- names -------------------------------------------------------------------------------------------------------------


def _tables_of(
    names: Collection[str], tables: Collection[str], follows: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The table whose rows each array has; None: it is copied whole."""
    if isinstance(tables, str) or not isinstance(tables, Collection) or not all(isinstance(x, str) for x in tables):
        raise InvalidProblem(f"rows_of are names of arrays, a list of strings, not {tables!r}")
    if not isinstance(follows, Mapping):
        raise InvalidProblem(f"follows are names and the tables that they follow, a mapping, not {follows!r}")
    for name in follows:
        if name not in names or name in tables:
            raise InvalidProblem(f"follows names {name!r}, which is {'a table' if name in tables else 'missing'}")
    own = {name: name if name in tables else parameter_of(name) for name in names}
    return {name: follows.get(name, table if table in tables else None) for name, table in own.items()}


def _check(types: Mapping[str, Type], tables: Collection[str], table_of: Mapping[str, str | None]) -> None:
    for name, type_ in types.items():
        if not _NAME.fullmatch(name):
            raise InvalidProblem(f"{name!r} is no name of an array in a file: letters, digits, _ and .")
        if type_.symbols:
            raise InvalidProblem(f"{name} is {type_}: a file has sizes that are numbers")
    for table in tables:
        if table not in types or not types[table].rank:
            raise InvalidProblem(f"rows_of names {table!r}, which is {types.get(table, 'missing')}, and has no rows")
    for name, followed in table_of.items():
        if followed is not None and followed not in tables:
            raise InvalidProblem(f"follows: {name!r} follows {followed!r}, which rows_of does not name")
        if name in tables and followed != name:
            raise InvalidProblem(f"follows names {name!r}, which is a table")
        if followed is not None and types[name].shape[:1] != types[followed].shape[:1]:
            raise InvalidProblem(
                f"{name} is {types[name]}, and follows {followed}, which is {types[followed]};"
                f" follows={{{name!r}: None}} says that it does not"
            )


def _check_case(place: Path, names: Collection[str]) -> None:
    """That the folder has a file for each name."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(name.casefold(), name)
        if other != name and _ignores_case(place):
            raise InvalidProblem(f"{other} and {name} are one file of {place}, which takes A and a for one letter")


def _ignores_case(place: Path) -> bool:
    """Whether a folder finds a file by its name in letters of the other case."""
    probe = place / f"{_LOCK}.case"
    probe.touch()
    try:
        return probe.with_name(probe.name.upper()).exists()
    finally:
        probe.unlink()


# -- files -------------------------------------------------------------------------------------------------------------


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _stored(type_: Type) -> np.dtype[Any]:
    """How NumPy's format says a dtype: one that it does not know as bytes."""
    own = type_.dtype.np
    return own if own.isbuiltin == 1 else np.dtype(f"V{own.itemsize}")


def _mapped(folder: Path, name: str, type_: Type) -> np.memmap[Any, Any]:
    try:
        with _file(folder, name).open("rb") as file:
            _check_length(file)
        made: np.memmap[Any, Any] = np.lib.format.open_memmap(_file(folder, name), "r+")  # type: ignore[no-untyped-call]
    except _UNREADABLE as error:
        raise InvalidProblem(f"{_file(folder, name)} is not the file of {type_}: {error}") from error
    if made.size and hasattr(mmap, "MADV_RANDOM"):
        # else a row that is read brings its neighbours, 128 KiB of them
        made._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    if made.dtype != _stored(type_) or made.shape != type_.shape or not made.flags.c_contiguous:
        order = "" if made.flags.c_contiguous else " in Fortran order"
        raise InvalidProblem(f"{_file(folder, name)} has {made.dtype} {made.shape}{order}, and not {type_}")
    return made


def _check_length(file: BufferedReader) -> None:
    """ValueError for a file of NumPy's that ends before its array does; to map it for writing would append zeros."""
    form: Any = np.lib.format
    header = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = header(file)
    missing = math.prod(shape) * dtype.itemsize - (os.fstat(file.fileno()).st_size - file.tell())
    if missing > 0:
        raise ValueError(f"it ends {missing} bytes early")


def _read_manifest(folder: Path) -> Any:
    path = folder / _MANIFEST
    with _damage(path):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise InvalidProblem(f"{folder} has no tables: TableFiles.create makes them") from None
        manifest = json.loads(text)
        arrays, tables = dict(manifest["arrays"]), list(manifest["rows_of"])
        return {"arrays": arrays, "rows_of": tables, "follows": {name: manifest["follows"][name] for name in arrays}}


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, tokenize.TokenError)
"""What parsers of damaged text raise: NumPy reads a header with Python's own tokenizer."""


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What cannot be read there, as one error."""
    try:
        yield
    except InvalidProblem:
        raise
    except _UNREADABLE as error:
        raise InvalidProblem(f"{path} is damaged: {error}") from None


def _read(file: BufferedReader, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    missing = math.prod(shape) * dtype.itemsize - (os.fstat(file.fileno()).st_size - file.tell())
    if missing > 0:  # before memory is taken for what damage may say
        raise InvalidProblem(f"{file.name} is damaged: it ends {missing} bytes early")
    made = np.empty(shape, dtype)
    if made.size:
        file.readinto(made.reshape(-1).view(np.uint8).data)
    return made


def _check_new(place: Path) -> None:
    if (place / _MANIFEST).exists():
        raise InvalidProblem(f"{place} has tables already: TableFiles.open gives them")


def _make_folder(place: Path, durable: bool) -> None:
    place = place.absolute()
    missing = [each for each in (place, *place.parents) if not each.exists()]
    place.mkdir(parents=True, exist_ok=True)
    for each in missing if durable else ():
        _sync(each.parent)


def _sync(place: Path) -> None:
    """Waits until a folder's names are on the disk."""
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked(folder: Path) -> BufferedWriter | None:
    """A file that no other process has locked; None where a system has no locks of files."""
    if fcntl is None:
        return None
    try:
        file = (folder / _LOCK).open("wb")
    except OSError as error:
        raise InvalidProblem(f"{folder} cannot be locked, and its tables not be written: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InvalidProblem(f"{folder} is open already, here or in another process") from None
    return file
