"""Files from strangers: saved graphs, saved modules, cache entries and NumPy's archives, mutated, and forged with right
digests.

Bytes that were changed without their digest must be refused, or mean what they meant.  Forged ones (the table, sizes
and digest of the envelope made right again) are refused or hold what their types say; a forged module is loaded with
``native=False`` and run under sanitizers: its machine code is whoever's wrote it, its text must not reach beyond its
buffers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import random
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import sanitize
from .campaign import Campaign, Options, Outcome

HOSTILE = (
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    -(2**63),
    10**30,
    1e308,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "d.y",
    "f32",
    "cpu",
    "cuda",
    None,
    True,
    [],
    {},
    [[]],
    "\0",
    "é" * 300,
)
HEAD = re.compile(rb"gradc-([a-z]{1,12}) ([0-9]+) ([0-9]+) ([0-9]+) ([0-9a-f]{64}) *\n")
LINE, ALIGN = 128, 64


def attempt(seed: int, options: Options) -> Outcome:
    sanitize.install()
    kind = KINDS[seed % len(KINDS)]
    choose = random.Random(seed)
    sanitize.announce(f"container {kind.__name__} seed {seed}", kind.__name__)
    with tempfile.TemporaryDirectory(prefix="gradc-container-") as name, sanitize.uncached():
        return kind(choose, Path(name))


def _judged(kind: str, how: str, use: Callable[[], str]) -> Outcome:
    """``use`` gives what is wrong with a value that was accepted, or ""."""
    import click

    from gradc.errors import GradcError

    try:
        with np.errstate(all="ignore"):
            wrong = use()
    except (GradcError, click.ClickException):
        return Outcome("typed", counts={kind: 1})
    except Exception as error:
        error.add_note(f"{kind}: {how}")
        raise
    return (
        Outcome("wrong", f"{kind}: {how}\n{wrong}", f"{kind}: {wrong.splitlines()[0][:60]}", {kind: 1})
        if wrong
        else Outcome("right", counts={kind: 1})
    )


# -- what is saved -----------------------------------------------------------------------------------------------------


@functools.cache
def graph() -> Any:
    import gradc
    from gradc import ops

    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.standard_normal((33, 20)).astype(np.float32),
        "b": rng.standard_normal((70, 2)).astype(ml_dtypes.bfloat16),
        "q": rng.integers(-128, 128, (80, 3)).astype(np.int8),
        "t": rng.integers(0, 33, 70),
        "m": rng.random((2, 40)) < 0.5,
    }

    def fn(x: Any) -> Any:
        table = ops.gather(arrays["w"], arrays["t"], axis=0)
        scaled = ops.cast(ops.sum(ops.cast(arrays["b"], "f32"), axis=(0, 1)), "f32")
        counts = ops.cast(ops.sum(ops.cast(arrays["q"], "i64"), axis=(0, 1)), "f32")
        chosen = ops.cast(ops.sum(ops.cast(arrays["m"], "i64"), axis=(0, 1)), "f32")
        return ops.sum(ops.matmul(x, ops.transpose(table, (1, 0))) * scaled + counts + chosen, axis=1)

    return gradc.trace(fn, x="f32[N,20]")


X = np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 20)


@functools.cache
def module() -> Any:
    import gradc

    return gradc.compile(graph(), wrt=["x"], target="cpu")


@functools.cache
def saved(what: str) -> dict[str, bytes]:
    """The files of a saved graph or module, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph().save(folder / "saved") if what == "graph" else module().save(folder / "saved")
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _put(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / "saved"


def _seen(loaded: Any) -> Any:
    return str(loaded), {
        name: (array.dtype.str, array.shape, array.tobytes()) for name, array in loaded.defaults.items()
    }


def _consistent(loaded: Any) -> str:
    for name, array in loaded.defaults.items():
        type_ = loaded.input(name).type
        if array.dtype != type_.dtype.np or any(
            isinstance(n, int) and n != got for n, got in zip(type_.shape, array.shape, strict=True)
        ):
            return f"an array of {array.dtype}{array.shape} for {name}: {type_}"
        if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
            return "a bool that is neither 0 nor 1"
    return ""


# -- bytes -------------------------------------------------------------------------------------------------------------


def changed(choose: random.Random, data: bytes) -> tuple[bytes, str]:
    """Bytes flipped, cut, repeated, moved, zeroed or filled; and what was done."""
    out = bytearray(data)
    said = []
    for _ in range(choose.choice((1, 1, 2, 4))):
        at = choose.randrange(len(out) + 1)
        if choose.random() < 0.4:  # the beginning says what the rest is
            at = min(at, choose.randrange(256))
        size = choose.choice((1, 1, 2, 8, 64, 1000))
        how = choose.choice(("flip", "cut", "drop", "repeat", "zero", "fill", "insert"))
        said.append(f"{how} {size} at {at} of {len(out)}")
        match how:
            case "flip" if at < len(out):
                out[at] ^= 1 << choose.randrange(8)
            case "cut":
                del out[at:]
            case "drop":
                del out[at : at + size]
            case "repeat":
                out[at:at] = out[at : at + size]
            case "zero":
                out[at : at + size] = bytes(len(out[at : at + size]))
            case "fill":
                out[at : at + size] = choose.randbytes(len(out[at : at + size]))
            case "insert":
                out[at:at] = choose.randbytes(size)
    return bytes(out), "; ".join(said)


def _one_changed(choose: random.Random, files: dict[str, bytes]) -> tuple[dict[str, bytes], str]:
    name = choose.choice(sorted(files))
    if choose.random() < 0.02:
        return {n: d for n, d in files.items() if n != name}, f"no {name}"
    data, how = changed(choose, files[name])
    return {**files, name: data}, f"{name}: {how}"


def opened_envelope(data: bytes) -> tuple[str, str, list[Any], list[bytes]] | None:
    """(kind, format, table, a body for each row), or None: another format."""
    head = HEAD.fullmatch(data[:LINE])
    if head is None:
        return None
    size = int(head[3])
    at, bodies = LINE + size, []
    try:
        table = json.loads(data[LINE : LINE + size])
        for row in table:
            bodies.append(data[at : at + row[1]])
            at += row[1] + -row[1] % ALIGN
    except (ValueError, TypeError, LookupError):
        return None
    return head[1].decode(), head[2].decode(), table, bodies


def sealed_envelope(kind: str, version: str, table: Any, bodies: list[bytes], raw_table: bytes | None = None) -> bytes:
    """With sizes and digest made right."""
    body = b"".join(b + bytes(-len(b) % ALIGN) for b in bodies)
    text = json.dumps(table).encode() if raw_table is None else raw_table
    text += b" " * (-len(text) % ALIGN)
    start = f"gradc-{kind} {version} {len(text)} {len(body)} ".encode()
    digest = hashlib.sha256(start + text + body).hexdigest().encode()
    return (start + digest).ljust(LINE - 1) + b"\n" + text + body


def forged(choose: random.Random, data: bytes) -> tuple[bytes, str]:
    """An envelope with something changed inside, its sizes and digest right again; machine code stays as it is."""
    found = opened_envelope(data)
    if found is None:
        return changed(choose, data)
    kind, version, table, bodies = found
    table = [list(row) for row in table]
    plain = [i for i, row in enumerate(table) if not str(row[0]).endswith(".so")]
    i = choose.choice(plain)
    name = table[i][0]
    match choose.randrange(6):
        case 0:  # a cell of the table
            row = choose.choice(table)
            at = choose.randrange(len(row))
            row[at] = choose.choice((*HOSTILE, *(r[at] for r in table if at < len(r))))
            return sealed_envelope(kind, version, table, bodies), f"table: {name}: {row}"
        case 1:  # rows and bodies swapped, dropped or repeated
            j = choose.randrange(len(table))
            how = choose.choice(("swap rows", "swap bodies", "drop", "repeat"))
            if how == "swap rows":
                table[i], table[j] = table[j], table[i]
            elif how == "swap bodies":
                bodies[i], bodies[j] = bodies[j], bodies[i]
            elif how == "drop":
                del table[i], bodies[i]
            else:
                table.append(list(table[i]))
                bodies.append(bodies[i])
            return sealed_envelope(kind, version, table, bodies), f"{how} {name}"
        case 2:
            raw, how = changed(choose, json.dumps(table).encode())
            return sealed_envelope(kind, version, table, bodies, raw), f"text of the table: {how}"
        case _:
            bodies[i], how = _changed_part(choose, name, bodies[i])
            table[i][1] = len(bodies[i]) if choose.random() < 0.95 else choose.choice(HOSTILE)
            return sealed_envelope(kind, version, table, bodies), f"{name}: {how}"


def _changed_part(choose: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    from .text import mutated

    if name in ("graph", "forward", "backward") and choose.random() < 0.8:
        text = mutated(choose, data.decode("utf-8", "replace"), str(graph()))
        return text.encode("utf-8", "surrogatepass"), f"as text:\n{text[:4000]}"
    try:
        value = json.loads(data)
    except ValueError:
        return changed(choose, data)
    value = _hostile(choose, value)
    text = json.dumps(value)
    return text.encode(), f"as JSON: {text[:1000]}"


def _hostile(choose: random.Random, value: Any) -> Any:
    """JSON with one leaf, key or item changed."""
    if isinstance(value, dict) and value and choose.random() < 0.9:
        key = choose.choice(sorted(value))
        if choose.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if choose.random() < 0.1:
            return {**value, str(choose.choice(HOSTILE)): value[key]}
        return {**value, key: _hostile(choose, value[key])}
    if isinstance(value, list) and value and choose.random() < 0.9:
        at = choose.randrange(len(value))
        return [*value[:at], *([] if choose.random() < 0.1 else [_hostile(choose, value[at])]), *value[at + 1 :]]
    return choose.choice(HOSTILE)


# -- the kinds ---------------------------------------------------------------------------------------------------------


def a_graph_with_changed_bytes(choose: random.Random, folder: Path) -> Outcome:
    import gradc

    files, how = _one_changed(choose, saved("graph"))
    path = _put(files, folder)

    def use() -> str:
        loaded = gradc.load(path)
        return "" if _seen(loaded) == _seen(graph()) else "changed bytes load as another graph"

    if opened_envelope(saved("graph").get("saved", b"")) is None:  # a text without a digest may be another graph
        return _judged("graph bytes", how, lambda: _consistent(gradc.load(path)))
    return _judged("graph bytes", how, use)


def a_forged_graph(choose: random.Random, folder: Path) -> Outcome:
    import gradc

    files = dict(saved("graph"))
    name = choose.choice(sorted(files))
    files[name], how = forged(choose, files[name])
    path = _put(files, folder)
    return _judged("graph forged", how, lambda: _consistent(gradc.load(path)))


def a_module_with_changed_bytes(choose: random.Random, folder: Path) -> Outcome:
    import gradc

    files, how = _one_changed(choose, saved("module"))
    path = _put(files, folder)
    want = module()(x=X)

    def use() -> str:
        loaded = gradc.load_module(path)
        return "" if np.array_equal(loaded(x=X), want) else "changed bytes load as another module"

    return _judged("module bytes", how, use)


def a_forged_module(choose: random.Random, folder: Path) -> Outcome:
    import gradc

    if "native" not in inspect.signature(gradc.load_module).parameters:
        return Outcome("right", counts={"forged modules not tried: load_module has no native=False": 1})
    files = dict(saved("module"))
    name = choose.choice(sorted(files))
    files[name], how = forged(choose, files[name])
    path = _put(files, folder)
    sanitize.announce(f"forged module: {how}", "module forged")

    def use() -> str:
        loaded = gradc.load_module(path, native=False)
        if loaded.target != "cpu":
            return ""
        given = {
            n: (
                X
                if n == "x"
                else np.zeros(
                    loaded.graph.input(n).type.concrete(dict.fromkeys(loaded.graph.dims, 3)),
                    loaded.graph.input(n).dtype.np,
                )
            )
            for n in loaded.graph.input_names
            if n not in loaded.graph.defaults
        }
        values, residuals = loaded.forward(given)
        if loaded.wrt and not isinstance(values, dict):
            loaded.backward(residuals, np.ones_like(values))
        return _consistent(loaded.graph)

    return _judged("module forged", how, use)


def an_entry_of_the_cache(choose: random.Random, folder: Path) -> Outcome:
    from gradc.runtime.cache import Cache

    payload = choose.randbytes(choose.choice((0, 1, 1000, 100_000)))
    cache = Cache(folder / "cache")
    cache.put("key", payload)
    path = cache.path("key")
    assert path is not None
    data, how = changed(choose, path.read_bytes())
    path.write_bytes(data)
    found = Cache(folder / "cache").get("key")
    wrong = "" if found in (None, payload) else "a damaged entry was taken"
    return _judged("cache entry", how, lambda: wrong)


def a_forged_entry(choose: random.Random, folder: Path) -> Outcome:
    """A payload that no build of gradc writes: the module is built again."""
    import gradc
    from gradc import knobs
    from gradc.runtime.cache import default_cache

    own = gradc.trace(lambda x: x * 2.0 + float(choose.randrange(3)), x="f32[N,20]")
    with knobs.CACHE.set(True), knobs.CACHE_DIR.set(str(folder / "cache")):
        want = gradc.compile(own, target="cpu")(x=X)
        cache = default_cache()
        assert cache.directory is not None
        entry = max(cache.directory.iterdir(), key=lambda p: p.stat().st_size)
        data = entry.read_bytes()
        found = opened_envelope(data)
        how = "another format"
        if found is not None:
            kind, version, table, bodies = found
            places = [i for i, row in enumerate(table) if row[0] == "payload"]
            if places:
                bodies[places[0]], how = forged(choose, bodies[places[0]])
                if choose.random() < 0.3:
                    bodies[places[0]], how = choose.randbytes(200), "random bytes"
                if _native_with_other_text(bodies[places[0]]):
                    return Outcome("right", counts={"cache forged: machine code with another text": 1})
                table[places[0]][1] = len(bodies[places[0]])
                entry.write_bytes(sealed_envelope(kind, version, table, bodies))

        def use() -> str:
            return "" if np.array_equal(gradc.compile(own, target="cpu")(x=X), want) else "another result"

        return _judged("cache forged", how, use)


def _native_with_other_text(payload: bytes) -> bool:
    """Whether machine code would run for a program that it was not made from: the cache's folder is its user's own."""
    found = opened_envelope(payload)
    return found is not None


NPZ_TYPES = (
    ">f4",
    "<f4",
    "<i4",
    "<f8",
    ">i8",
    "<U1",
    "|S4",
    "|V4",
    "|O",
    "[('a', '<f4')]",
    "('<f4', (1,))",
    "<c8",
    "<M8[s]",
    "|b1",
    "<f2",
    "|u1",
    ">u4",
    "=f4",
    "float32",
    "bogus",
)
NPZ_SHAPES = (
    "(3,)",
    "(3,)",
    "(3,)",
    "(1, 3)",
    "()",
    "(10**15,)",
    "(-1,)",
    "(2**63,)",
    "(3, 0)",
    "(3,)*40",
    "(1,)*33 + (3,)",
    "(True,)",
    "(3.0,)",
    "(" * 3000,
)


def npz(choose: random.Random, folder: Path) -> Outcome:
    """An archive or array file for ``gradc run --input``."""
    import gradc
    from gradc.cli.model import input_types, read_arrays

    own = gradc.trace(lambda x: x * 2.0, x="f32[N]")
    values = np.array([1, 2, 3])
    type_, shape, order = choose.choice(NPZ_TYPES), choose.choice(NPZ_SHAPES), choose.choice(("False", "False", "True"))
    try:
        body = (
            values.astype(np.dtype(type_)).tobytes()
            if not type_.startswith(("[", "(", "|O", "bogus"))
            else values.astype(np.float32).tobytes()
        )
    except (TypeError, ValueError):
        body = values.astype(np.float32).tobytes()
    shape_text = shape if shape.startswith("((") else str(eval(shape)) if "*" in shape else shape
    header = choose.choice(
        (
            (
                f"{{'descr': {type_ if type_[0] in '[(' else repr(type_)}, 'fortran_order': {order}, 'shape':"
                f" {shape_text}, }}"
            ),
        )
        * 6
        + ("__import__('os').getpid()", "{}", "[" * 3000, "{'descr': '<f4'}")
    )
    array = _npy(header, body, choose.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9))))
    name = choose.choice(("x", "x", "x", "y", "../x", "/x", "x.npy", ""))
    data, how = _zipped(choose, name, array)
    if choose.random() < 0.3:
        data, more = changed(choose, data)
        how += f"; {more}"
    path = folder / "a.npz"
    path.write_bytes(data)
    how = f"{header[:200]} as {name!r}: {how}"
    exact = how.endswith(("plain", "deflated", "npy")) and type_[0] not in "[(|b"

    def use() -> str:
        found = read_arrays([str(path)], input_types(own), own.name)
        if "x" not in found:
            return ""
        got = np.asarray(gradc.compile(own, target="numpy")(x=found["x"]))
        if how.endswith("bomb"):
            return "an archive that inflates a thousand times was taken"
        return "" if not exact or np.array_equal(got, [2, 4, 6]) else f"{found['x']!r} for {values}"

    return _judged("npz", how, use)


def _npy(header: str, body: bytes, version: tuple[int, int]) -> bytes:
    text = header.encode("latin-1", "replace") + b"\n"
    size = struct.pack("<H", len(text) & 0xFFFF) if version == (1, 0) else struct.pack("<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + body


def _zipped(choose: random.Random, name: str, array: bytes) -> tuple[bytes, str]:
    how = choose.choice(("plain", "plain", "deflated", "bomb", "overlapping", "twice", "sizes", "encrypted", "npy"))
    if how == "npy":
        return array, how
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", zipfile.ZIP_DEFLATED if how in ("deflated", "bomb") else zipfile.ZIP_STORED
    ) as archive:
        if how == "bomb":
            array = _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (25000000,), }", bytes(100_000_000), (1, 0))
        archive.writestr(f"{name}.npy", array)
        if how == "twice":
            archive.writestr("x.npy", array)
    data = bytearray(file.getvalue())
    directory = data.rfind(b"PK\x01\x02")
    end = data.rfind(b"PK\x05\x06")
    if how == "overlapping":  # many entries of the directory for one member
        record = bytes(data[directory:end])
        entries = b"".join(
            (
                record.replace(f"{name}.npy".encode(), f"{chr(97 + k % 26) if k else name}.npy".encode())
                if len(name) == 1
                else record
            )
            for k in range(20)
        )
        tail = bytearray(data[end:])
        struct.pack_into("<HHI", tail, 8, 20, 20, len(entries))
        data = data[:directory] + entries + tail
    elif how == "sizes":
        struct.pack_into(
            "<I", data, directory + choose.choice((20, 24, 42)), choose.choice((0, 1, 2**31, 2**32 - 1, len(data)))
        )
    elif how == "encrypted":
        data[directory + 8] |= 1
        data[6] |= 1
    return bytes(data), how


KINDS: tuple[Callable[[random.Random, Path], Outcome], ...] = (
    a_graph_with_changed_bytes,
    a_forged_graph,
    a_module_with_changed_bytes,
    a_forged_module,
    a_forged_module,
    an_entry_of_the_cache,
    npz,
    npz,
    a_forged_entry,
)

CAMPAIGN = Campaign(
    "containers",
    attempt,
    limit=120.0,
    ci=20,
    tries=("gradc/api.py", "gradc/formats", "gradc/ir", "gradc/module", "gradc/process", "gradc/runtime/cache.py"),
    environment=sanitize.environment,
    missing=sanitize.missing,
)
