"""Safe reader of untrusted .npy and .npz files: sizes are checked before memory is allocated, nothing is executed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ..errors import InvalidProblem
from ..process import files
from ..process.forks import held_off

if TYPE_CHECKING:
    import zipfile

Array = np.ndarray[Any, Any]
MOST_INFLATED, FREE = 100, 1 << 26
"""Limits on decompression: MOST_INFLATED times the file's size, or FREE bytes if that is more."""
_PIECE = 1 << 24
_LOCAL_HEADER = 30  # bytes before the name and the extra field of a member


def read_arrays(path: Any, *, compressed: bool = True) -> Array | dict[str, Array]:
    """The array of an .npy file, or those of an .npz file by name: bools, integers and floats, in native byte order.

    Dtypes that NumPy cannot name in files (bf16, f8) are returned as it writes them: ``V2``, ``V1``.

    :param compressed: False rejects compressed members.
    :raises FileError: the file cannot be read.
    :raises InvalidProblem: it is neither, it is damaged, its members overlap or inflate beyond :data:`MOST_INFLATED`,
        or they do not hold numbers.
    """
    what = str(path)
    with files.opened(path) as (file, about):
        try:
            if file.read(4) == b"PK\x03\x04" or file.seek(0) or file.read(4) == b"PK\x05\x06":
                return _members(file, about.st_size, what, compressed)
            file.seek(0)
            return _array(file, about.st_size, what)
        except InvalidProblem:
            raise
        except MemoryError:
            raise InvalidProblem(f"{what}: there is no memory for its arrays") from None
        except Exception as error:  # zipfile, zlib and NumPy do not document what they raise for damaged data
            said = str(error) or type(error).__name__
            raise InvalidProblem(f"{what} is neither .npy nor .npz, or a damaged archive: {said[:200]}") from error


def _members(file: BinaryIO, size: int, what: str, compressed: bool) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    with held_off:
        import zipfile
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        _check_layout(members, archive.start_dir, size, what)
        for member in members:
            if not compressed and member.compress_type != zipfile.ZIP_STORED:
                raise InvalidProblem(f"{what}: {member.filename[:60]!r} is compressed")
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise InvalidProblem(f"{what} holds {name[:60]!r} twice")
            with archive.open(member) as stream:
                arrays[name] = _array(stream, member.file_size, f"{what}: {name[:60]!r}")  # type: ignore[arg-type]
    return arrays


def _check_layout(members: list[zipfile.ZipInfo], directory: int, size: int, what: str) -> None:
    """Checks that members do not overlap, precede the directory, and do not declare more bytes than the limit."""
    with held_off:
        import zipfile
    end = 0
    for member in sorted(members, key=lambda m: m.header_offset):
        name = member.filename[:60]
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
            raise InvalidProblem(f"{what}: {name!r} is encrypted, or compressed in a way that NumPy does not write")
        if member.header_offset < end:
            raise InvalidProblem(
                f"{what}: {name!r} begins at byte {member.header_offset}, inside the member that ends at {end}"
            )
        end = member.header_offset + _LOCAL_HEADER + len(member.orig_filename.encode()) + member.compress_size
        if end > directory:
            raise InvalidProblem(f"{what}: {name!r} ends at byte {end}, behind the archive's directory at {directory}")
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise InvalidProblem(
                f"{what}: {name!r} is not compressed, and says {member.file_size} bytes of {member.compress_size}"
            )
    declared, allowed = sum(member.file_size for member in members), max(MOST_INFLATED * size, FREE)
    if declared > allowed:
        raise InvalidProblem(f"{what}: {size} bytes would inflate to {declared}; {allowed} are allowed")


def _array(stream: BinaryIO, size: int, what: str) -> Array:
    """The array of a stream of ``size`` bytes, including the header."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise InvalidProblem(f"{what} is .npy of version {version}; 1.0 and 2.0 hold numbers")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or dtype.kind not in "biufV":
        raise InvalidProblem(f"{what} declares an array of {str(dtype)[:60]}, which does not hold numbers")
    if len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise InvalidProblem(f"{what} has the shape {str(shape)[:60]}")
    count = math.prod(shape) * dtype.itemsize
    if count > size:
        raise InvalidProblem(
            f"{what} declares {dtype}{list(shape)}, which has {count} bytes, and only {size} are there"
        )
    data = _bytes(stream, count, what)
    if dtype.kind == "b" and data.max(initial=0) > 1:
        raise InvalidProblem(f"{what} is of bools, and a byte of it is neither 0 nor 1")
    array = data.view(dtype) if dtype.itemsize and count else np.empty(0, dtype)
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    return array.reshape(shape, order="F" if fortran else "C")


def _bytes(stream: BinaryIO, count: int, what: str) -> Array:
    data = np.empty(count, np.uint8)
    at = 0
    while at < count:
        piece = stream.read(min(_PIECE, count - at))
        if not piece:
            raise InvalidProblem(f"{what} ends after {at} of {count} bytes")
        data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if stream.read(1):  # zipfile compares the checksum when the end of a member is read
        raise InvalidProblem(f"{what} goes on after its {count} bytes")
    return data


def as_dtype(array: Array, wanted: np.dtype[Any], what: str) -> Array:
    """An array of a file in the dtype ``wanted``: unchanged, or, for a dtype of ml_dtypes, which files store as ``V2``
    or ``u2``, with its bits reinterpreted.

    :raises InvalidProblem: it has another dtype.
    """
    if array.dtype == wanted:
        return array
    if wanted.num > 255 and array.dtype.kind in "uV" and array.dtype.itemsize == wanted.itemsize:
        return np.ascontiguousarray(array).view(wanted)
    raise InvalidProblem(f"{what} is an array of {array.dtype}, not of {wanted}")


def write_arrays(path: Path, arrays: dict[str, Array]) -> None:
    """Writes the arrays as an .npz file; those with a dtype of ml_dtypes as unsigned integers with the same bits.

    :raises FileError: it cannot be written.
    """
    with held_off:
        import zipfile
    with files.replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            plain = array.view(f"u{array.itemsize}") if array.dtype.num > 255 else array
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(plain), allow_pickle=False)
