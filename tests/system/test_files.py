"""No file is ever lost, no file is ever believed: writers that are killed, containers that lie."""

from __future__ import annotations

import ast
import errno
import gc
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import with_runtime

import gradc
from gradc import api, knobs, ops
from gradc.cli import main
from gradc.errors import CompilerMissing, FileError, GradcError, InvalidProblem, IRFormatError, TypeRuleError
from gradc.formats import npz
from gradc.ir import envelope
from gradc.module import saved
from gradc.process import files
from gradc.runtime.cache import Cache
from gradc.runtime.host import pool, toolchain

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
f32 = np.float32


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(files.TEMPORARY)]


# -- the writer --------------------------------------------------------------------------------------------------------


def test_nothing_of_gradc_writes_a_file_but_the_writer() -> None:
    """The class, not the example: no other code opens a file for writing, outside the compilers' own temporary
    folders.
    """
    direct = {"write_text", "write_bytes", "savez", "savez_compressed", "mkstemp", "rename", "replace"}
    allowed = {
        "process/files.py",
        "runtime/host/toolchain.py",
        "runtime/cuda/nvdisasm.py",
    }  # what a tool reads lies in a folder that goes with the call
    found = []
    for path in (ROOT / "gradc").rglob("*.py"):
        name = path.relative_to(ROOT / "gradc").as_posix()
        if name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else node.func.id
                if isinstance(node.func, ast.Name)
                else ""
            )
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if (
                called in direct - {"replace", "rename"}
                or (called in ("replace", "rename") and owner == "os")
                or (called == "save" and owner in ("np", "numpy"))
            ):
                found.append(f"{name}:{node.lineno}: {called}")
            mode = (
                node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "mode"), None)
            )
            if called == "open" and not owner and isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+"):
                found.append(f"{name}:{node.lineno}: open for writing")
    assert not found, found


def test_an_old_file_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    files.write(path, b"old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as context:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            context.setattr(os, name, full)
            with pytest.raises(FileError, match=f"{path} cannot be written: No space left on device") as caught:
                files.write(path, b"new")
            assert caught.value.errno == errno.ENOSPC and isinstance(caught.value, OSError)
        assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power there is the old file or the whole new one, and the new one once writing has returned."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        about = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(about.st_mode) else f"{about.st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    files.write(tmp_path / "f", b"x" * 100_000)
    assert done == ["100000 bytes", "rename", *(["folder"] if hasattr(os, "O_DIRECTORY") else [])]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_names_the_path() -> None:
    with pytest.raises(FileError, match="/dev/full cannot be written: No space left on device"):
        files.write("/dev/full", b"x" * 100_000)


def test_links_permissions_and_devices(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    files.write(link, b"mine")
    assert victim.read_bytes() == b"precious" and link.read_bytes() == b"mine" and not link.is_symlink()
    victim.chmod(0o600)
    files.write(victim, b"again")
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    files.write("/dev/null", b"gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    done = subprocess.run(
        [sys.executable, "-c", "from gradc.process import files; files.write('/dev/stdout', b'said')"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"said"
    for wrong in (tmp_path, tmp_path / "no" / "f", "a\0b", "\ud800", 5, None, tmp_path / ("n" * 300)):
        with pytest.raises(FileError, match="cannot be written"):
            files.write(wrong, b"x")
        with pytest.raises(FileError, match="cannot be read"):
            files.read(wrong, 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="no regular file"):
        files.read(tmp_path / "pipe", 10)
    with pytest.raises(FileError, match="it has 5 bytes, 4 are the most"):
        files.read(victim, 4)
    assert not leftovers(tmp_path)


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{files.TEMPORARY}{n}" for n in "12")
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (time.time() - 2 * files.STALE_SECONDS,) * 2)
    files.write(tmp_path / "f", b"x")
    assert not old.exists() and young.exists()


def test_a_folder_that_a_killed_process_left_goes(tmp_path: Path) -> None:
    script = """
    import os, signal, sys
    from gradc.process import files
    write = files.write
    def killed(path, *parts, **more):
        write(path, *parts, **more)
        if path.name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
    files.write = killed
    files.write_folder(sys.argv[1], {"first": b"1", "inner/second": b"2", "third": b"3"})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "made")]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    (left,) = leftovers(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    link = tmp_path / f"{files.TEMPORARY}link"
    link.symlink_to(outside)  # is removed itself, never what it leads to
    for path in (tmp_path / left, link):
        os.utime(path, (time.time() - 2 * files.STALE_SECONDS,) * 2, follow_symlinks=False)
    files.write_folder(tmp_path / "made", {"first": b"1"})
    assert not leftovers(tmp_path) and (outside / "kept").exists()
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["first"]


def test_a_folder_of_files_is_written_whole_where_it_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"first": b"1", "inner/second": b"2", "third": b"3"}
    write = files.write

    def full(path: Path, *parts: Any, **more: Any) -> None:
        if path.name == "third":
            raise FileError(path, "written", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        write(path, *parts, **more)

    new, there = tmp_path / "new", tmp_path / "there"
    there.mkdir()
    (there / "kept").write_bytes(b"k")
    with monkeypatch.context() as patched:
        patched.setattr(files, "write", full)
        with pytest.raises(FileError, match=rf"^{re.escape(str(new))} cannot be written: No space left on device$"):
            files.write_into(new, contents)
        assert [p.name for p in tmp_path.iterdir()] == ["there"]
        with pytest.raises(FileError, match="there/third cannot be written: No space left on device"):
            files.write_into(there, contents)
    files.write_into(new, contents)
    files.write_into(there, contents)
    for folder, names in ((new, contents), (there, {**contents, "kept": b"k"})):
        found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert found == names


def test_threads_that_save_over_each_other(tmp_path: Path) -> None:
    graphs = [gradc.trace(lambda x, k=k: x @ np.full((40, 3), k, f32), x="f32[N,40]") for k in range(8)]
    path, problems = tmp_path / "g.gir", []

    def work(graph: Any) -> None:
        try:
            for _ in range(10):
                graph.save(path)
                array = gradc.load(path).defaults["captured0"]
                assert (array == array[0, 0]).all()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(g,)) for g in graphs]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not problems and os.listdir(tmp_path) == ["g.gir"]


# Python and gradc are started once: each victim is a fork that saves one of the files again and again, its two contents
# by turns; the parent says the victim's number, and says so again when it has buried it.
VICTIMS = """
import itertools, os, sys
from pathlib import Path
import numpy as np, gradc
from gradc import ops
from gradc.formats import npz
from gradc.process import files
from gradc.runtime.cache import Cache
from gradc.runtime.host import pool
folder = Path(sys.argv[1])
graphs = [gradc.trace(lambda x, k=k: ops.tanh(x @ np.full((400, 40), k, np.float32)), x="f32[N,400]") for k in (1, 2)]
modules = [gradc.compile(g, wrt=["x"], target="numpy") for g in graphs]
cache = Cache(folder / "cache")
writers = [
    lambda i: modules[i].save(folder / "module"),
    lambda i: graphs[i].save(folder / "graph.gir"),
    lambda i: cache.put("key", bytes([i + 1]) * 2_000_000),
    lambda i: npz.write_arrays(folder / "a.npz", {"x": np.full(200_000, i + 1.0)}),
    lambda i: files.write(folder / "text", f"{i + 1}" * 1_000_000),
]
for write in writers:
    write(0)
parent = os.getpid()
for write in itertools.cycle(writers):
    pid = os.fork()
    if not pid:
        for n in itertools.count():
            write(n % 2)
            if os.getppid() != parent:
                os._exit(1)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


@pytest.mark.long("gradc/process/files.py", "gradc/ir/envelope.py", "gradc/runtime/cache.py", "gradc/module/saved.py")
def test_a_writer_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """kill -9 at random moments; every file of every writer is whole after each."""
    draw = random.Random(5)
    parent = subprocess.Popen(
        [sys.executable, "-c", VICTIMS, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    try:
        for _ in range(40):
            victim = int(parent.stdout.readline())
            time.sleep(draw.uniform(0, 0.04))
            os.kill(victim, signal.SIGKILL)
            assert parent.stdout.readline() == b"gone\n"
            found = whole(tmp_path)
            assert found.keys() == {"module", "graph.gir", "cache", "a.npz", "text"} and set(found.values()) <= {1, 2}
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def whole(folder: Path) -> dict[str, Any]:
    """What each file that is there says, each of its elements the same."""
    out: dict[str, Any] = {}
    if (folder / "module").exists():
        out["module"] = same(gradc.load_module(folder / "module").graph.defaults["captured0"])
    if (folder / "graph.gir").exists():
        out["graph.gir"] = same(gradc.load(folder / "graph.gir").defaults["captured0"])
    cache = Cache(folder / "cache")
    payload = cache.get("key")
    assert cache.counters.dropped == 0
    if payload is not None:
        out["cache"] = same(np.frombuffer(payload, np.uint8))
    if (folder / "a.npz").exists():
        out["a.npz"] = same(npz.read_arrays(folder / "a.npz")["x"])  # type: ignore[call-overload]
    if (folder / "text").exists():
        text = (folder / "text").read_text()
        assert len(text) == 1_000_000 and len(set(text)) == 1
        out["text"] = int(text[0])
    return out


def same(array: Any) -> int:
    assert (array == array.reshape(-1)[0]).all()
    return int(array.reshape(-1)[0])


# -- envelopes ---------------------------------------------------------------------------------------------------------

ARRAYS = {
    "x": np.arange(6, dtype=f32).reshape(2, 3),
    "b": np.array([True, False]),
    "h": np.arange(3).astype(ml_dtypes.bfloat16),
    "none": np.zeros((0, 4)),
    "one": np.array(5),
}


def test_envelopes_round_trip() -> None:
    for order in (lambda a: a, np.asfortranarray, lambda a: a[::-1] if a.ndim else a):
        arrays = {name: order(a) for name, a in ARRAYS.items()}
        found = envelope.unsealed(
            envelope.sealed_bytes("test", 3, {"x": b"a part may have an array's name", "": b""}, arrays), "test", 3
        )
        assert found.parts == {"x": b"a part may have an array's name", "": b""}
        for name, array in arrays.items():
            got = found.arrays[name]
            assert (
                got.dtype == array.dtype
                and got.shape == array.shape
                and got.tobytes() == np.ascontiguousarray(array).tobytes()
            )
            assert not got.flags.writeable and got.flags.aligned


def test_damaged_envelopes_are_refused() -> None:
    data = envelope.sealed_bytes("test", 3, {"p": b"part"}, ARRAYS)
    for at in range(len(data)):
        if data[at : at + 1] != b" " or at >= 128:
            with pytest.raises(IRFormatError):
                envelope.unsealed(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], "test", 3)
            with pytest.raises(IRFormatError):
                envelope.unsealed(data[:at], "test", 3)
    for kind, version, message in (
        ("graph", 3, "holds a test of gradc, not a graph"),
        ("test", 4, "format 3 of a test; this gradc reads 4"),
    ):
        with pytest.raises(IRFormatError, match=message):
            envelope.unsealed(data, kind, version)


def forged(table: Any, body: bytes = b"\0" * 64, sizes: tuple[int, int] | None = None) -> bytes:
    """An envelope that says what it wants, under the right digest."""
    import hashlib

    described = table if isinstance(table, bytes) else json.dumps(table).encode()
    sizes = sizes or (len(described), len(body))
    start = f"gradc-test 1 {sizes[0]} {sizes[1]} ".encode()
    return (start + hashlib.sha256(start + described + body).hexdigest().encode()).ljust(127) + b"\n" + described + body


@pytest.mark.parametrize(
    "table",
    [
        b"\xff",
        b"{",
        b"[" * 100_000,
        b"null",
        b"5",
        [5],
        [[]],
        [["a"]],
        [["a", -1]],
        [["a", 1.5]],
        [["a", True]],
        [["a", "1"]],
        [["a", 10**30]],
        [[5, 1]],
        [["a", 65]],
        [["a", 1], ["b", 1]],
        [["a", 4], ["a", 4]],
        [["a", 64, "f32", [4]]],
        [["a", 64, "f33", [16]]],
        [["a", 64, "f32", [-16]]],
        [["a", 64, "f32", [16.0]]],
        [["a", 64, "f32", [2**62, 4]]],
        [["a", 64, "f32", 16]],
        [["a", 64, ["f32"], [16]]],
        [["a", 0, "f32", [0, 2**62, 2**62]], ["b", 64]],
        [["a", 64, "f32", [1] * 40]],
        [["a", 64, "object", [8]]],
    ],
    ids=str,
)
def test_forged_tables(table: Any) -> None:
    with pytest.raises(IRFormatError):
        envelope.unsealed(forged(table), "test", 1)


def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path) -> None:
    for sizes in ((10**17, 64), (0, 10**17), (2**26 + 1, 0)):
        path = tmp_path / "e"
        path.write_bytes(forged([["a", 64]], sizes=sizes))
        with pytest.raises(IRFormatError, match="bytes, its first line says"):
            envelope.load(path, "test", 1)
    with pytest.raises(IRFormatError, match="neither 0 nor 1"):
        envelope.unsealed(forged([["a", 64, "bool", [64]]], b"\x02" * 64), "test", 1)


# -- graphs ------------------------------------------------------------------------------------------------------------


def with_array(k: float) -> Any:
    return gradc.trace(lambda x: x @ np.full((40, 3), k, f32), x="f32[N,40]")


def test_an_old_graph_with_new_arrays_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g.gir"
    with_array(1).save(path)
    old = path.read_bytes()
    with_array(2).save(path)
    new = path.read_bytes()
    at = old.index(np.full(3, 1, f32).tobytes())
    path.write_bytes(old[:at] + new[at:])
    with pytest.raises(IRFormatError, match="another SHA-256"):
        gradc.load(path)


def test_arrays_that_are_not_the_inputs(tmp_path: Path) -> None:
    text = "graph @g(%x: f32[3]) {\n  return y=%x\n}"
    path = tmp_path / "g.gir"
    for arrays in (
        {"y": np.zeros(3, f32)},
        {"x": np.zeros(4, f32)},
        {"x": np.zeros(3, np.int32)},
        {"x": np.zeros(3)},
        {"x": np.zeros((3, 1), f32)},
    ):
        path.write_bytes(envelope.sealed_bytes("graph", 1, {"graph": text.encode()}, arrays))
        with pytest.raises(IRFormatError):
            gradc.load(path)
    path.write_bytes(envelope.sealed_bytes("graph", 1, {"graph": b"\xff\xfe"}))
    with pytest.raises(IRFormatError):
        gradc.load(path)
    path.write_bytes(envelope.sealed_bytes("graph", 1, {}))
    with pytest.raises(IRFormatError):
        gradc.load(path)


def test_a_text_that_was_saved_takes_nothing_from_beside_it(tmp_path: Path) -> None:
    graph = gradc.parse("graph @g(%x: f32[3]) {\n  return y=%x\n}")
    np.savez(tmp_path / "g.gir.npz", x=np.ones(3, f32))
    graph.save(tmp_path / "g.gir")
    assert gradc.load(tmp_path / "g.gir").defaults == {} and (tmp_path / "g.gir.npz").exists()
    (tmp_path / "g.gir").write_text(str(graph))  # as an editor or an older gradc leaves it
    np.testing.assert_array_equal(gradc.load(tmp_path / "g.gir").defaults["x"], 1)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 2, 3], "i4"),
        np.array(["a", "b", "c"]),
        np.zeros(3, [("a", "f4")]),
        np.zeros(3, "V4"),
        np.zeros(3, "u4"),
        np.zeros(3, "M8[s]"),
        np.zeros(3, "f8"),
    ],
    ids=str,
)
def test_other_types_of_one_size_are_not_reinterpreted(array: Any, tmp_path: Path) -> None:
    (tmp_path / "g.gir").write_text("graph @g(%x: f32[3]) {\n  return y=%x\n}")
    np.savez(tmp_path / "g.gir.npz", x=array)
    with pytest.raises(IRFormatError):
        gradc.load(tmp_path / "g.gir")


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    graph, module = with_array(1), gradc.compile(with_array(1), target="numpy")
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "no" / "f", tmp_path / "file" / "f", "a\0", None):
        for call in (graph.save, module.save, gradc.load, gradc.load_module):
            with pytest.raises(FileError):
                call(wrong)
    with pytest.raises(FileError, match="it is a folder"):
        gradc.load(tmp_path)


# -- npz ---------------------------------------------------------------------------------------------------------------


def test_npz_in_any_order_of_bytes_and_axes(tmp_path: Path) -> None:
    arrays = {
        "big": np.array([1, 2, 3], ">f4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "bool": np.array([True, False]),
        "none": np.zeros((0, 3), ">i8"),
        "scalar": np.array(7, ">i2"),
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = npz.read_arrays(tmp_path / "a.npz")
        assert isinstance(found, dict)
        for name, array in arrays.items():
            want = array if name != "half" else array.view("V2")
            assert found[name].shape == array.shape and found[name].dtype.isnative
            np.testing.assert_array_equal(found[name], want)
    np.save(tmp_path / "a.npy", arrays["big"])
    np.testing.assert_array_equal(npz.read_arrays(tmp_path / "a.npy"), [1, 2, 3])
    npz.write_arrays(tmp_path / "b.npz", {"half": arrays["half"], "strided": np.arange(10)[::2]})
    with np.load(tmp_path / "b.npz") as stored:
        np.testing.assert_array_equal(stored["half"].view(ml_dtypes.bfloat16), arrays["half"])
        np.testing.assert_array_equal(stored["strided"], np.arange(10)[::2])


def overlapping(path: Path, compress: int) -> None:
    """Two members over the same bytes."""
    inner = io.BytesIO()
    np.save(inner, np.zeros(200_000))
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("x.npy", inner.getvalue())
        archive.filelist.append(clone := zipfile.ZipInfo("x.npy"))
        for field in ("compress_type", "CRC", "compress_size", "file_size", "header_offset", "flag_bits"):
            setattr(clone, field, getattr(archive.filelist[0], field))
        clone.filename = "y.npy"
        archive._didModify = True  # type: ignore[attr-defined]


def test_npz_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"

    def refused(match: str) -> None:
        with pytest.raises(InvalidProblem, match=match):
            npz.read_arrays(path)

    for compress in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        overlapping(path, compress)
        refused("inside the member that ends at")
    np.savez_compressed(path, x=np.zeros(20_000_000))
    refused("would inflate to")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", b"x")
    refused("compressed in a way")
    for array in (
        np.array([object()]),
        np.array(["a"]),
        np.zeros(3, [("a", "f4")]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, complex),
    ):
        np.savez(path, x=array)
        refused("does not hold numbers")
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", npy("(1,)"))
        archive.writestr("x.npy", npy("(1,)"))
    refused("twice")
    for shape in (
        "(10**9,)",
        "(1000000000,)",
        "(-1,)",
        "(1.5,)",
        "(True,)",
        "1",
        "(1,)*99",
        "(" * 90 + "1" + ")" * 90,
        "(2,)",
    ):
        path.write_bytes(npy(shape))
        refused("declares|damaged|shape|goes on|ends after")


def npy(shape: str) -> bytes:
    """An .npy of one f64, with a shape of one's own."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 8


def test_damaged_npz_give_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    draw = random.Random(3)
    for save in (np.savez, np.savez_compressed):
        save(path, x=np.arange(20.0), y=np.arange(5, dtype=">i4"))
        data = path.read_bytes()
        for _ in range(400):
            damaged = bytearray(data)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(damaged[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
            try:
                npz.read_arrays(path)
            except InvalidProblem as error:
                assert str(path) in str(error)


# -- modules -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    def loss(tokens: Any, table: Any, w: Any) -> Any:
        return ops.sum(ops.tanh(ops.embedding(tokens, table) @ w))

    return gradc.compile(gradc.trace(loss, tokens="i64[N]", table="f32[V,4]", w="f32[4,3]"), wrt=["table", "w"])


def given() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "tokens": np.array([1, 0, 3]),
        "table": draw.standard_normal((5, 4)).astype(f32),
        "w": draw.standard_normal((4, 3)).astype(f32),
    }


def test_a_module_as_bytes_and_compiled_anew(module: gradc.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    data = api.module_bytes(module)
    y, residuals = module.forward(**given())
    grads = module.backward(residuals, np.ones((), f32))
    compiled: list[Any] = []
    add = toolchain.Build.add
    monkeypatch.setattr(toolchain.Build, "add", lambda build, units: compiled.append(units) or add(build, units))
    for native in (True, False):
        with knobs.CACHE.set(False):
            again = api.module_from_bytes(data, native=native)
            value, kept = again.forward(**given())
            back = again.backward(kept, np.ones((), f32))
        assert len(compiled) == (0 if native else 2)  # without the cache
        np.testing.assert_array_equal(value, y)
        for name in module.wrt:
            np.testing.assert_array_equal(back[name], grads[name])


def test_a_file_runs_where_there_is_no_compiler(module: gradc.Module, tmp_path: Path) -> None:
    """The thread pool comes with it; what has to be compiled says what is missing."""
    module.save(tmp_path / "m")
    text = f"""
import sys
import numpy as np
import gradc
from gradc import ops
from gradc.errors import CompilerMissing
module = gradc.load_module({str(tmp_path / "m")!r})
given = np.load({str(tmp_path / "given.npz")!r})
y, residuals = module.forward(**given)
grads = module.backward(residuals, np.ones((), "f4"))
np.savez({str(tmp_path / "found.npz")!r}, y=y, **grads)
try:
    gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"))(x=np.ones(3, "f4"))
except CompilerMissing as error:
    print(error)
"""
    np.savez(tmp_path / "given.npz", **given())
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GRADC_") and k != "CC"}
    alone = {**kept, "CC": "no-such-compiler", "GRADC_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "no-such-compiler" in done.stdout, done.stderr
    y, residuals = module.forward(**given())
    found = dict(np.load(tmp_path / "found.npz"))
    assert found.pop("y") == y
    for name, gradient in module.backward(residuals, np.ones((), f32)).items():
        np.testing.assert_array_equal(found.pop(name), gradient)
    assert not found


def test_a_runtime_that_is_none_is_refused(module: gradc.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_offered", {})
    monkeypatch.setattr(pool, "find_compiler", lambda: (_ for _ in ()).throw(CompilerMissing("none")))
    with pytest.raises(CompilerMissing):
        pool._machine_code()
    pool.offer({pool.part_of(pool.RUNTIME): b"no machine code"})
    with pytest.raises(InvalidProblem, match="no machine code of gradc's"):
        pool._machine_code()


def test_native_code_of_a_file_is_never_mapped_where_that_is_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's machine code is another program's, of the same buffers: loading runs it, native=False does not."""
    honest, other = (
        api.module_bytes(gradc.compile(gradc.trace(lambda x, k=k: ops.sum(x * k), x="f32[N]"))) for k in (3.0, 2.0)
    )
    parts, evil = (envelope.unsealed(data, "module", saved.MODULE_FORMAT).parts for data in (honest, other))
    path, x = tmp_path / "m", np.arange(4, dtype=f32)
    path.write_bytes(
        envelope.sealed_bytes(
            "module", saved.MODULE_FORMAT, {**parts, "forward.so": evil["forward.so"], "forward": evil["forward"]}
        )
    )
    assert gradc.load_module(path)(x=x) == 12.0
    assert gradc.load_module(path, native=False)(x=x) == 18.0
    np.save(tmp_path / "x.npy", x)
    for arguments, value in ((["--no-native"], 18), ([], 12)):
        assert main(["run", str(path), "--input", f"x={tmp_path / 'x.npy'}", *arguments]) == 0
        assert f"= {value}\n" in capsys.readouterr().out


def test_an_input_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    graph = gradc.parse(
        "graph @g(%graph: f32[2], %module: f32[2], %forward: f32[2]) {\n  %0: f32[2] = add %graph, %module\n  %1:"
        " f32[2] = add %0, %forward\n  return y=%1\n}"
    )
    graph = gradc.Graph(
        graph.name,
        graph.inputs,
        graph.outputs,
        defaults={name: np.full(2, k, f32) for k, name in enumerate(("graph", "module", "forward"))},
    )
    gradc.compile(graph).save(tmp_path)
    assert os.listdir(tmp_path) == ["module.gradc"]
    np.testing.assert_array_equal(gradc.load_module(tmp_path)(), 3)


@pytest.mark.parametrize("here", ("", ".", ".."))
def test_a_folder_is_no_place_for_a_file(here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises(FileError, match="cannot be written"):
        files.write(here, "text")
    assert os.listdir(tmp_path) == ["inside"] and not os.listdir(tmp_path / "inside")


def test_a_folder_of_the_first_format(tmp_path: Path) -> None:
    (tmp_path / "module.json").write_text("{}")
    with pytest.raises(
        InvalidProblem,
        match=rf"format 1, a folder; this gradc reads {saved.MODULE_FORMAT}: compile the graph in its graph\.gir again",
    ):
        gradc.load_module(tmp_path)


def change(key: str, value: Any) -> Callable[[dict[str, bytes]], None]:
    def apply(parts: dict[str, bytes]) -> None:
        parts["module"] = json.dumps({**json.loads(parts["module"]), key: value}).encode()

    return apply


def option(key: str, value: Any) -> Callable[[dict[str, bytes]], None]:
    def apply(parts: dict[str, bytes]) -> None:
        description = json.loads(parts["module"])
        parts["module"] = json.dumps({**description, "options": {**description["options"], key: value}}).encode()

    return apply


def part(name: str, value: Any) -> Callable[[dict[str, bytes]], None]:
    def apply(parts: dict[str, bytes]) -> None:
        found = value(parts[name]) if callable(value) else value
        if found is None:
            del parts[name]
        else:
            parts[name] = found

    return apply


FORGERIES = {
    **{f"no {key}": change(key, None) for key in ("wrt", "target", "options", "machine", "gradc")},
    **{
        f"wrt {value!r}": change("wrt", value)
        for value in ("table", ["x"], [5], [["table"]], ["table", "table"], {}, ["w", "tokens"])
    },
    **{f"target {value!r}": change("target", value) for value in ("tpu", 5, [], "cuda")},
    **{
        f"module {value[:9]!r}": part("module", value)
        for value in (b"", b"\xff", b"[]", b"5", b"{", b"[" * 100_000, b'{"wrt": ' + b"1" * 5000 + b"}")
    },
    **{
        f"option {key}={str(value)[:20]!r}": option(key, value)
        for key, value in (
            ("numerics", "exact"),
            ("numerics", 5),
            ("numerics", []),
            ("fuse", "yes"),
            ("save", {"a": 1}),
            ("save", 5),
            ("save", [[]]),
            ("memory_budget", -1),
            ("memory_budget", float("nan")),
            ("memory_budget", "1"),
            ("dims", {"N": -1}),
            ("dims", {"N": 10**30}),
            ("dims", {"K": 1}),
            ("dims", [5]),
            ("hints", "N"),
            ("donate", {"w": 1}),
            ("donate", ["nothing"]),
            ("donate", [5]),
            ("sparse", 5),
            ("sparse", ["tokens"]),
            ("reductions", ["a"]),
            ("reductions", {"*": "none"}),
            ("reductions", {"*": []}),
            ("errors", 5),
            ("errors", "never"),
            ("arch", []),
            ("device", {}),
            ("calibration", 5),
            ("unheard", 1),
            ("unused", []),
            ("determinism", {}),
        )
    },
    **{
        f"no part {name}": part(name, None)
        for name in ("module", "graph", "forward", "backward", "residuals", "forward.sites", "backward.sites")
    },
    **{
        f"{name} {value[:12]!r}": part(name, value)
        for name in ("graph", "forward", "backward")
        for value in (b"", b"\xff\xfe", b"program @p {\nreturn\n}", b"graph @g() {\nreturn\n}", b"(" * 100_000)
    },
    "the backward as forward": lambda parts: parts.update(forward=parts["backward"]),
    "the forward as backward": lambda parts: parts.update(backward=parts["forward"]),
    **{
        f"residuals {value[:16]!r}": part("residuals", value)
        for value in (
            b"",
            b"{}",
            b"5",
            b"[5]",
            b"[[]]",
            b'[["a", "f32[N]"]]',
            b'[["a", "f32[N]", "input"]]',
            b'[["a b", "f32[N]", "x"]]',
            b'[["a", "f99", "x"]]',
            b"[[1, 2, 3]]",
            b"[]",
            b"\xff",
            b'[["table", "f32[V,4]", "input"], ["table", "f32[V,4]", "input"]]',
            b'[["w", "f64[4,3]", "input"]]',
        )
    },
    **{
        f"sites {value[:16]!r}": part("forward.sites", value)
        for value in (
            b"",
            b"[]",
            b"5",
            b'{"a": ["x", "y"]}',
            b'{"1": 5}',
            b'{"1": ["x"]}',
            b'{"1": [1, 2]}',
            b'{"' + b"1" * 5000 + b'": ["x", "y"]}',
            b"\xff",
            b'{"\\u00b2": ["x", "y"]}',
        )
    },
    **{
        f"undecided {value[:16]!r}": part("forward.undecided", value)
        for value in (b"", b"{}", b"5", b"[5]", b"[[]]", b"\xff")
    },
    "alias of itself": part("forward", lambda text: text.replace(b"return", b"temp a: f32[4] of a\n  return", 1)),
    "aliases in a circle": part(
        "forward",
        lambda text: text.replace(
            b"  input tokens", b"  temp a: f32[4] of b\n  temp b: f32[4] of a\n  input tokens", 1
        ),
    ),
    "a slot of its own size": part(
        "forward", lambda text: text.replace(b"  kernel", b"  temp huge: f32[4] slot 4611686018427387904\n  kernel", 1)
    ),
    "another type of an input": part("forward", lambda text: text.replace(b"input w: f32[4,3]", b"input w: f64[4,3]")),
    "a smaller table": part("forward", lambda text: text.replace(b"input table: f32[V,4]", b"input table: f32[V,2]")),
    "a value before its definition": part("forward", lambda text: text.replace(b"%0 = load", b"%9 = load", 1)),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=[name[:60] for name in FORGERIES])
def test_forged_modules_are_refused(
    forgery: Any, native: bool, module: gradc.Module, pristine: dict[str, bytes]
) -> None:
    """Whatever the parts say, under the right digest: one typed error, before anything runs."""
    parts = dict(pristine)
    forgery(parts)
    assert parts != pristine
    data = envelope.sealed_bytes("module", saved.MODULE_FORMAT, parts)
    if not native and all(parts.get(name) == pristine[name] for name in ("module", "graph")):
        again = api.module_from_bytes(
            data, native=False
        )  # it does not look at the programs, nor at what belongs to the machine code
        np.testing.assert_array_equal(again(**given()), module(**given()))
        return
    with pytest.raises(InvalidProblem, match="no module of gradc"):
        api.module_from_bytes(data, native=native)


@pytest.mark.parametrize("known", (True, False))
def test_a_module_whose_code_is_at_hand_checks_sizes_as_a_new_one(known: bool) -> None:
    """From the cache and from a file, too: what only the sizes of a call say is inside is refused where it is not."""
    mirror = lambda x: ops.pad(x, ((2, 0), (1, 3)), mode="reflect")
    graph = gradc.trace(mirror, name=f"mirror_{known}", x="f32[N,5]")
    made = gradc.compile(graph, wrt=["x"], target="cpu")
    parts = dict(envelope.unsealed(api.module_bytes(made), "module", saved.MODULE_FORMAT).parts)
    if not known:  # a file of an earlier version
        del parts["forward.undecided"], parts["backward.undecided"]
    read = api.module_from_bytes(envelope.sealed_bytes("module", saved.MODULE_FORMAT, parts))
    for module in (made, gradc.compile(graph, wrt=["x"], target="cpu"), read):
        for rows in (0, 2):
            with pytest.raises(TypeRuleError, match=f"axis 0 of x has {rows}"):
                module.forward(x=np.ones((rows, 5), np.float32))
        y, _ = module.forward(x=np.arange(15, dtype=np.float32).reshape(3, 5))
        assert y[:, 1].tolist() == [10, 5, 0, 5, 10]


@pytest.fixture(scope="module")
def pristine(module: gradc.Module) -> dict[str, bytes]:
    return envelope.unsealed(api.module_bytes(module), "module", saved.MODULE_FORMAT).parts


def test_a_forged_record_of_cuda_is_refused() -> None:
    gpu = gradc.compile(gradc.trace(lambda x: ops.tanh(x), x="f32[N]"), target="cuda", arch="sm_90")
    parts = envelope.unsealed(api.module_bytes(gpu), "module", saved.MODULE_FORMAT).parts
    inner = envelope.unsealed(parts["forward.so"], "parts", 1).parts
    for rendered in (b"", b"{}", b"[]", b'{"text": "", "kernels": {"k": {}}}', b'{"text": 5, "kernels": []}', b"\xff"):
        forged_parts = {**parts, "forward.so": envelope.sealed_bytes("parts", 1, {**inner, "rendered": rendered})}
        with pytest.raises(GradcError):
            _ = api.module_from_bytes(envelope.sealed_bytes("module", saved.MODULE_FORMAT, forged_parts)).forward.source
    _ = api.module_from_bytes(
        envelope.sealed_bytes("module", saved.MODULE_FORMAT, {**parts, "forward.so": b"junk"}), native=False
    ).forward.source


def test_saving_while_python_ends(tmp_path: Path) -> None:
    code = f"""
        import atexit, gradc
        from gradc import ops
        graph = gradc.trace(lambda x, w: ops.sum(ops.tanh(x @ w)), x="f32[N,4]", w="f32[4,3]")
        module = gradc.compile(graph, wrt=["w"])
        def late():
            module.save({str(tmp_path / "m")!r})
            graph = gradc.trace(lambda x: ops.sum(ops.exp(x) * 3.25), x="f32[N]")
            gradc.compile(graph, wrt=["x"]).save({str(tmp_path / "n")!r})
            print("saved")
        atexit.register(late)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "GRADC_CACHE_DIR": with_runtime(tmp_path / "cache")},
        check=False,
    )
    assert done.stdout == "saved\n" and not done.stderr, done.stderr
    for name in ("m", "n"):
        assert gradc.load_module(tmp_path / name).wrt


def test_machine_code_for_another_runtime_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that the runtime gives a kernel are another structure: their header says so, whatever the
    version.
    """
    before = api._identity("cpu")
    real = pool.read_template
    monkeypatch.setattr(
        pool, "read_template", lambda name: real(name) + ("\nchanged" if name == "cpu/runtime.h" else "")
    )
    assert api._identity("cpu") != before


def test_a_scratch_folder_is_gone_wherever_ctrl_c_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()  # Python forgets what is raised in the callback of a weak reference that a collection happens to run
    gc.disable()
    request.addfinalizer(gc.enable)

    def interrupted_at(moment: int) -> bool:
        """Whether there is such a moment: an event of the interpreter's trace, in our functions and those they call."""
        passed = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == moment:
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with files.scratch() as folder:
                (folder / "unit0.c").write_text("int x;")
                (folder / "made").mkdir()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    moment = 1
    while interrupted_at(moment):
        assert not list(tmp_path.iterdir()), moment
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        moment += 1
    assert moment > 100 and not list(tmp_path.iterdir())


def test_a_scratch_folder_into_which_a_dying_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    real = shutil.rmtree

    def late(path: Path, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        real(path, **options)
        path.mkdir()
        (path / "unit0.s").write_text("late")

    monkeypatch.setattr(shutil, "rmtree", late)
    with files.scratch() as folder:
        (folder / "unit0.c").write_text("int x;")
    assert shutil.rmtree is real and not list(tmp_path.iterdir())
