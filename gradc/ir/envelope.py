"""The container format of gradc's files and cache entries: named byte strings and typed arrays, with declared sizes and
a digest.

::

    gradc-module 2 231 40960 6f5902ac...                     128 bytes: kind, format, sizes of table and body, SHA-256
    [["graph", 310], ["weight", 24, "bf16", [3, 4]], ...]    the table: JSON, padded with spaces
    ...                                                      the body: the parts in order, each aligned to 64 bytes

A reader checks kind, format and sizes before it allocates memory, the digest (of everything but itself) before it
parses the table, and the table before it creates arrays; arrays are little-endian.  Reading an envelope executes
nothing.  The digest detects damage and mixed-up parts; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ..errors import IRFormatError, OutOfMemory
from ..formats.json_text import read_json
from ..process import files
from .types import DTYPES, dtype

Array = np.ndarray[Any, Any]
_LINE, _ALIGN, _LONGEST_TABLE = 128, 64, 1 << 26
_HEAD = re.compile(rb"gradc-([a-z]{1,12}) ([0-9]{1,9}) ([0-9]{1,18}) ([0-9]{1,18}) ([0-9a-f]{64}) *\n")


@dataclass(frozen=True)
class Envelope:
    """The contents of an envelope.

    :param parts: bytes by name.  :param arrays: read-only arrays by name, views of the bytes that were read.
    """

    parts: dict[str, bytes]
    arrays: dict[str, Array]


def kind_of(start: bytes) -> str:
    """The kind of the envelope that begins with these bytes, or "" if they begin none."""
    matched = re.match(rb"gradc-([a-z]{1,12}) [0-9]", start[:_LINE])
    return matched[1].decode() if matched and matched[1] != b"ir" else ""


def sealed(
    kind: str, version: int, parts: Mapping[str, bytes], arrays: Mapping[str, Array] | None = None
) -> list[bytes | memoryview]:
    """An envelope, as consecutive pieces to write.

    :param kind: a word of lower-case letters.  :param version: of the format of this kind.
    """
    table: list[list[Any]] = [[name, len(data)] for name, data in parts.items()]
    body: list[bytes | memoryview] = []
    for data in parts.values():
        body += [data, bytes(-len(data) % _ALIGN)]
    for name, array in (arrays or {}).items():
        flat = _stored(array)
        table.append([name, flat.nbytes, str(dtype(array.dtype)), list(array.shape)])
        body += [flat.data, bytes(-flat.nbytes % _ALIGN)]
    described = json.dumps(table, separators=(",", ":")).encode()
    described += b" " * (-len(described) % _ALIGN)
    size = sum(len(piece) for piece in body)
    start = f"gradc-{kind} {version} {len(described)} {size} "
    digest = hashlib.sha256(start.encode() + described)
    for piece in body:
        digest.update(piece)
    return [f"{start}{digest.hexdigest()}".ljust(_LINE - 1).encode() + b"\n", described, *body]


def sealed_bytes(
    kind: str, version: int, parts: Mapping[str, bytes], arrays: Mapping[str, Array] | None = None
) -> bytes:
    """:func:`sealed`, in one piece."""
    return b"".join(sealed(kind, version, parts, arrays))


def unsealed(data: bytes | memoryview, kind: str, version: int, source: str = "this") -> Envelope:
    """The contents of an envelope.

    :param source: the name of the data, for errors.
    :raises IRFormatError: it is no envelope, has another kind or format, or is truncated, damaged or inconsistent.
    """
    view = memoryview(data)
    table, body, digest, start = _head(bytes(view[:_LINE]), len(view), kind, version, source)
    hashed = hashlib.sha256(start)
    hashed.update(view[_LINE:])
    if hashed.hexdigest() != digest:
        raise IRFormatError(f"{source} is damaged: its bytes have another SHA-256 than its first line says")
    return _contents(view[_LINE : _LINE + table], view[_LINE + table :], body, source)


def load(path: Any, kind: str, version: int) -> Envelope:
    """The contents of a file that holds an envelope.

    :raises FileError: it cannot be read.
    :raises IRFormatError: as :func:`unsealed`.
    :raises OutOfMemory: it does not fit in memory.
    """
    with files.opened(path) as (file, about):
        return load_opened(file, about.st_size, kind, version, str(path))


def load_opened(file: BinaryIO, size: int, kind: str, version: int, source: str) -> Envelope:
    """:func:`load` of an open file of ``size`` bytes."""
    line = file.read(_LINE)
    _head(line, size, kind, version, source)  # checked before its sizes are used to allocate memory
    try:
        data = line + file.read(size - len(line))
    except MemoryError:
        raise OutOfMemory(f"{source} has {size} bytes: there is no memory for as many") from None
    return unsealed(data, kind, version, source)


def _head(line: bytes, size: int, kind: str, version: int, source: str) -> tuple[int, int, str, bytes]:
    """(size of the table, size of the body, digest, the part of the header line that is digested)."""
    matched = _HEAD.fullmatch(line)
    if not matched or matched[1] == b"ir":
        raise IRFormatError(f"{source} is no {kind} of gradc: it does not begin with the line of one")
    if matched[1].decode() != kind:
        raise IRFormatError(f"{source} holds a {matched[1].decode()} of gradc, not a {kind}")
    if int(matched[2]) != version:
        raise IRFormatError(f"{source} has the format {int(matched[2])} of a {kind}; this gradc reads {version}")
    table, body = int(matched[3]), int(matched[4])
    if table > _LONGEST_TABLE or _LINE + table + body != size:
        raise IRFormatError(f"{source} has {size} bytes, its first line says {_LINE + table + body}")
    return table, body, matched[5].decode(), line[: matched.start(5)]


def _contents(table: memoryview, body: memoryview, size: int, source: str) -> Envelope:
    parts: dict[str, bytes] = {}
    arrays: dict[str, Array] = {}
    at = 0
    for name, count, *typed in _entries(table, source):
        if name in (arrays if typed else parts):
            raise IRFormatError(f"{source} holds {name[:60]!r} twice")
        if count > size - at:
            raise IRFormatError(f"{source}: the part {name[:60]!r} of {count} bytes begins at {at} of {size}")
        if typed:
            arrays[name] = _array(body[at : at + count], typed[0], typed[1], f"{source}: the array {name[:60]!r}")
        else:
            parts[name] = bytes(body[at : at + count])
        at += count + -count % _ALIGN
    if at != size:
        raise IRFormatError(f"{source}: its parts take {at} bytes, its first line says {size}")
    return Envelope(parts, arrays)


def _entries(table: memoryview, source: str) -> Iterator[list[Any]]:
    try:
        entries = read_json(bytes(table).decode("utf-8"))
    except ValueError as error:
        raise IRFormatError(f"{source}: its table is no JSON: {error}") from None
    if not isinstance(entries, list):
        raise IRFormatError(f"{source}: its table is no list")
    for entry in entries:
        right = isinstance(entry, list) and len(entry) in (2, 4) and isinstance(entry[0], str) and _is_size(entry[1])
        if right and len(entry) == 4:
            right = (
                isinstance(entry[2], str)
                and entry[2] in DTYPES
                and isinstance(entry[3], list)
                and len(entry[3]) <= 32
                and all(map(_is_size, entry[3]))
            )
        if not right:
            raise IRFormatError(f"{source}: {str(entry)[:80]} is no line of a table")
        yield entry


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _array(data: memoryview, name: str, shape: list[int], subject: str) -> Array:
    kind = DTYPES[name]
    if math.prod(shape) * kind.itemsize != len(data):
        raise IRFormatError(f"{subject} is {name}[{','.join(map(str, shape))}] in {len(data)} bytes")
    if kind.kind == "b" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise IRFormatError(f"{subject} is bool, and a byte of it is neither 0 nor 1")
    try:
        array = np.frombuffer(data, kind.np).reshape(shape)
    except ValueError as error:  # an empty array whose other sizes overflow NumPy's count
        raise IRFormatError(f"{subject} has a shape that no array has: {error}") from None
    if sys.byteorder == "big":
        array = array.byteswap()
    array.flags.writeable = False
    return array


def _stored(array: Array) -> Array:
    """The bytes of an array, in row-major order and little-endian."""
    plain = np.ascontiguousarray(array)
    if sys.byteorder == "big" and plain.itemsize > 1:
        plain = plain.byteswap()
    return plain.reshape(-1).view(np.uint8) if plain.size else np.empty(0, np.uint8)
