"""module.export: C that needs no Python builds without a warning and gives the bits that Python gives."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest
from codegen.test_order_of_sums import NAMED

import gradc
from gradc import knobs, ops
from gradc.cli import main
from gradc.demo.model import VARIANTS
from gradc.errors import FileError, IndexOutOfRange, Unsupported
from gradc.ir.dims import symbol
from gradc.process import files
from gradc.targets.devices import CPU, calibration_text

pytestmark = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("make")), reason="an export is built by gcc and make"
)
ADDRESS = ctypes.c_void_p


def build(folder: Path, *more: str) -> None:
    """Builds an export; no compiler says a word of it."""
    done = subprocess.run(
        ["make", "-s", "-j2", "CC=gcc", *more], cwd=folder, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr


def bag(tokens: Any, table: Any, scale: Any) -> Any:
    return ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 8)))


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 2, 1))), 2)
    return {"y": ops.matmul(scores, v), "top": ops.amax(scores, axis=1)}


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> tuple[gradc.Module, Path]:
    graph = gradc.trace(bag, tokens="i64[N]", table="i8[V,8]", scale="f32[V,1]")
    module = gradc.compile(graph, wrt=["scale"], target="cpu")
    folder = module.export(tmp_path_factory.mktemp("export") / "bag", dims={"N": 40, "V": 11})
    build(folder, "CFLAGS=-fPIC")
    return module, folder


@pytest.fixture(scope="module")
def attentions(tmp_path_factory: pytest.TempPathFactory) -> tuple[gradc.Module, Path]:
    graph = gradc.trace(attention, q="f32[B,S,16]", k="f32[B,T,16]", v="f32[B,T,16]")
    module = gradc.compile(graph, wrt=["q", "k", "v"], target="cpu")
    folder = module.export(tmp_path_factory.mktemp("export") / "attention", dims={"B": 3, "S": 70, "T": 33})
    build(folder, "CFLAGS=-fPIC")
    return module, folder


def checked(folder: Path, program: str, error: str = "", sample: Path | None = None) -> tuple[int, str]:
    """:param error: that is allowed; without it the bits must be equal.
    :param sample: of the same inputs; the export's own where none is given.
    """
    more = [str(sample or "sample"), error] if error else []
    done = subprocess.run([f"./{program}_main", *more], cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


ZIG = [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else []
# zig first builds the C library of another architecture, which takes minutes: only where no compiler has it.
CROSSING = shutil.which("aarch64-linux-gnu-gcc")
CROSS = [CROSSING, "-static"] if CROSSING else [*ZIG, "-target", "aarch64-linux-musl"] if ZIG else []
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


BUILT = (*long_tests.COMPILER, "gradc/module", "gradc/runtime")
"""What an export is made of."""


@pytest.mark.long(*BUILT)
@pytest.mark.parametrize("compiler", ["clang", "zig"])
def test_other_compilers_build_it(compiler: str, bags: tuple[gradc.Module, Path], tmp_path: Path) -> None:
    command = (ZIG or [""]) if compiler == "zig" else [shutil.which("clang") or ""]
    if not all(command):
        pytest.skip(f"needs {compiler}")
    with knobs.CC.set(shlex.join(command)):
        module = gradc.compile(bags[0].graph, wrt=["scale"], target="cpu")
        folder = module.export(tmp_path / "bag", dims={"N": 40, "V": 11})
    build(folder, f"CC={shlex.join(command)}")
    code, out = checked(folder, "bag")
    assert code == 0 and out.count("the same bits") == len(out.splitlines()) == 2, out
    code, out = checked(folder, "bag", "1e-6", bags[1] / "sample")  # what gcc's module in Python gives
    assert code == 0, out


@pytest.mark.long(*BUILT)
def test_it_crosses_to_another_architecture(attentions: tuple[gradc.Module, Path], tmp_path: Path) -> None:
    if not CROSS:
        pytest.skip("needs aarch64-linux-gnu-gcc, or zig: the wheel ziglang")
    folder = attentions[0].export(tmp_path / "attention", dims={"B": 3, "S": 70, "T": 33})
    build(folder, f"CC={shlex.join(CROSS)}", "ARCH=")
    program = (folder / "attention_main").read_bytes()
    assert program[:4] == b"\x7fELF" and program[18:20] == b"\xb7\0"  # EM_AARCH64
    if QEMU is None:
        pytest.skip("it was built; to run it needs qemu-aarch64 (qemu-user)")
    done = subprocess.run([QEMU, "./attention_main", "sample", "1e-5"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long(*BUILT)
def test_products_of_integers_are_the_same_on_another_architecture(tmp_path: Path) -> None:
    """There a panel of rows is wider than one of columns; rows that fill no panel, steps that fill no vector."""
    if not CROSSING or QEMU is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 (qemu-user)")

    def products(x: Any, y: Any, u: Any) -> Any:
        return {"like": ops.integer_matmul(x, y), "unlike": ops.integer_matmul(u, y), "u8": ops.integer_matmul(u, u.T)}

    module = gradc.compile(gradc.trace(products, x="i8[M,K]", y="i8[K,N]", u="u8[M,K]"), target="cpu")
    folder = module.export(tmp_path / "products", dims={"M": 61, "K": 1101, "N": 67})
    build(folder, f"CC={shlex.join(CROSS)}", "ARCH=")
    done = subprocess.run([QEMU, "./products_main"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("the same bits") == 3, done.stdout + done.stderr


EARLY = """
#include <stdio.h>
#include <unistd.h>
int sample_main(int count, char **arguments);
__attribute__((constructor(101))) static void early(void) {
  char *arguments[] = {"early", "sample", "1e-5", NULL};
  const int status = sample_main(3, arguments);
  fflush(stdout);
  _exit(status);
}
int main(void) { return 3; }
"""


@pytest.mark.long(*BUILT)
@pytest.mark.parametrize("compiler", [["gcc"], ["clang"], CROSS], ids=["gcc", "clang", "aarch64"])
def test_products_of_all_types_are_one_program_that_runs_before_its_main(compiler: list[str], tmp_path: Path) -> None:
    """As the constructor of a global of C++ may, which may come before those of a library."""
    runs = [QEMU] if compiler == CROSS else []
    if not compiler or None in runs or not shutil.which(compiler[0]):
        pytest.skip("needs that compiler, and qemu-aarch64 (qemu-user)")

    def products(a: Any, b: Any, c: Any, x: Any) -> Any:
        return {"f32": a @ a.T, "f64": b @ b.T, "bf16": c @ c.T, "i32": ops.integer_matmul(x, x.T)}

    graph = gradc.trace(products, a="f32[N,K]", b="f64[N,K]", c="bf16[N,K]", x="i8[N,K]")
    folder = gradc.compile(graph, wrt=[], target="cpu").export(tmp_path / "products", dims={"N": 61, "K": 301})
    arch = ["ARCH="] if runs else []
    build(folder, f"CC={shlex.join(compiler)}", *arch, "CFLAGS=-Dmain=sample_main", "main.o", "libproducts.a")
    (folder / "early.c").write_text(EARLY)
    linked = [*compiler, "-o", "early", "early.c", "main.o", "libproducts.a", "-pthread", "-lm"]
    subprocess.run(linked, cwd=folder, check=True)
    done = subprocess.run([*runs, "./early"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stdout + done.stderr


@pytest.mark.long(*BUILT, "tests/codegen/test_order_of_sums.py")
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sums_have_the_same_bits_on_another_architecture(dtype: str, tmp_path: Path) -> None:
    """Vectors are shorter there, and the order of a sum is not theirs."""
    if not CROSSING or QEMU is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 (qemu-user)")
    graph = gradc.trace(lambda x: {name: f(x) for name, f in NAMED.items()}, x=f"{dtype}[N,D]")
    module = gradc.compile(graph, target="cpu")
    folder = module.export(tmp_path / "sums", dims={"N": 3, "D": 2047})
    build(folder, f"CC={shlex.join(CROSS)}", "ARCH=")
    done = subprocess.run([QEMU, "./graph_main"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("the same bits") == len(NAMED), done.stdout + done.stderr


@pytest.mark.long(*BUILT)
def test_the_library_alone(bags: tuple[gradc.Module, Path], tmp_path: Path) -> None:
    bags[0].graph.save(tmp_path / "bag.gir")
    arguments = ["--wrt", "scale", "--dims", "N=40,V=11", "-o", str(tmp_path / "out"), "--library"]
    assert main(["export", str(tmp_path / "bag.gir"), *arguments]) == 0
    folder = tmp_path / "out"
    assert not (folder / "bag_main").exists()
    subprocess.run(["gcc", "-o", "one", "main.c", "libbag.a", "-pthread", "-lm"], cwd=folder, check=True)
    done = subprocess.run(["./one"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "the same bits" in done.stdout


class Exported:
    """An exported module in this process.

    :param sizes, groups: the members of its structs, in order.
    """

    def __init__(self, folder: Path, name: str):
        objects = [path.relative_to(folder) for path in folder.rglob("*.o") if path.name != "main.o"]
        library = folder / f"lib{name}.so"
        subprocess.run(["gcc", "-shared", "-o", library, *objects, "-pthread", "-lm"], cwd=folder, check=True)
        self.library, self.name, self.module = ctypes.CDLL(str(library)), name, ADDRESS()

    def call(self, function: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        entry = getattr(self.library, f"{self.name}_{function}")
        entry.restype = result
        return entry(*arguments)

    def create(self, *sizes: int) -> int:
        self.call("destroy", self.module, result=None)
        self.module = ADDRESS()
        return int(self.call("create", ctypes.byref(self.module), (ctypes.c_int64 * len(sizes))(*sizes)))

    @property
    def error(self) -> str:
        return self.call("error", self.module, result=ctypes.c_char_p).decode()

    @property
    def workspace(self) -> int:
        return int(self.call("workspace_bytes", self.module, result=ctypes.c_int64))

    def run(self, function: str, *groups: list[np.ndarray | None]) -> int:
        tables = [(ADDRESS * len(g))(*(None if a is None else a.ctypes.data for a in g)) for g in groups]
        return int(self.call(function, self.module, *tables))


@pytest.mark.long(*BUILT, "gradc/demo")
def test_the_demos_model_gives_the_same_bits(tmp_path: Path) -> None:
    variant = VARIANTS[-1]
    graph = variant.graph(300)
    module = gradc.compile(graph, wrt=variant.learns(graph), target="cpu")
    folder = module.export(tmp_path / "model", dims={"B": 37})
    build(folder)
    code, text = checked(folder, "frozen_codes")
    assert code == 0 and text.count("the same bits") == len(text.splitlines()) == 8, text
    wanted = folder / "sample" / "gradient_w2.bin"
    array = np.fromfile(wanted, np.float32)
    array[7] += np.float32(0.5) * np.abs(array).max()
    array.tofile(wanted)
    code, text = checked(folder, "frozen_codes")
    assert code == 1 and "1 elements differ, at most " in text and text.count("WRONG") == 1


@pytest.mark.long(*BUILT)
def test_one_build_serves_every_size(attentions: tuple[gradc.Module, Path]) -> None:
    module, folder = attentions
    assert checked(folder, "attention")[0] == 0
    exported, random = Exported(folder, "attention"), np.random.default_rng(0)
    for b, s, t in ((1, 1, 1), (2, 300, 130), (5, 17, 64)):
        assert exported.create(b, s, t) == 0
        assert exported.workspace == module.workspace_size(B=b, S=s, T=t)
        q, k, v = (random.standard_normal((b, n, 16)).astype(np.float32) for n in (s, t, t))
        value, residuals = module.forward(q=q, k=k, v=v)
        out, top = (np.full_like(value[name], np.nan) for name in ("y", "top"))
        cotangents = {name: random.standard_normal(value[name].shape).astype(np.float32) for name in ("y", "top")}
        want = module.backward(residuals, **cotangents)
        for threads in (1, 3):
            exported.call("set_threads", threads)
            assert exported.call("threads") == threads
            assert exported.run("forward", [q, k, v], [out, top]) == 0, exported.error
            got = [np.full_like(a, np.nan) for a in (q, k, v)]
            assert exported.run("backward", [cotangents["y"], cotangents["top"]], got) == 0, exported.error
            assert out.tobytes() == value["y"].tobytes() and top.tobytes() == value["top"].tobytes()
            assert all(a.tobytes() == want[name].tobytes() for name, a in zip(("q", "k", "v"), got, strict=True))


def test_errors_are_codes_and_texts(bags: tuple[gradc.Module, Path]) -> None:
    module, folder = bags
    assert checked(folder, "bag")[0] == 0
    exported = Exported(folder, "bag")
    assert exported.create(4, -1) == 16
    assert exported.error == "bag: a size is negative, or larger than 2^40, N=4, V=-1"
    assert exported.create(2**40, 2**20) == 0  # nothing is allocated yet
    assert exported.workspace == module.workspace_size(N=2**40, V=2**20)
    assert exported.create(2**40 + 1, 1) == 16 and "2^40" in exported.error
    with pytest.raises(Unsupported, match="a segmented sum over 1099511627776 rows"):
        module.workspace_size(N=4, V=2**40)
    assert exported.create(4, 2**40) == 16 and "would sort more than 2147483645 rows of its result" in exported.error
    assert exported.create(4, 3) == 0
    tokens, table = np.array([0, 1, 5, 2]), np.ones((3, 8), np.int8)
    scale, y = np.ones((3, 1), np.float32), np.zeros((4, 8), np.float32)
    d_scale = np.zeros_like(scale)
    assert exported.run("backward", [y], [d_scale]) == 19 and "no forward has succeeded" in exported.error
    with pytest.raises(IndexOutOfRange) as raised:
        module.forward(tokens=tokens, table=table, scale=scale)
    assert exported.run("forward", [tokens, table, scale], [y]) == 1
    assert exported.error == str(raised.value) and not y.any()
    assert exported.run("backward", [y], [d_scale]) == 19
    tokens[2] = 2
    assert exported.run("forward", [tokens, None, scale], [y]) == 17 and exported.error == "forward: table is NULL"
    assert exported.run("forward", [tokens, table, scale], [scale]) == 17
    assert exported.error == "forward: y shares memory with scale"
    odd = np.zeros(33 * 4 + 1, np.uint8)[1:]
    assert exported.run("forward", [tokens, table, scale], [odd]) == 17
    assert exported.error == "forward: y is not at a multiple of 4 bytes"
    assert exported.run("forward", [tokens, table, scale], [y]) == 0 and (y == 1).all()
    assert exported.run("backward", [y], [d_scale]) == 0 and d_scale.ravel().tolist() == [8, 8, 16]
    assert [exported.call("bytes", exported.module, i, result=ctypes.c_int64) for i in range(-1, 7)] == [
        -1, 32, 24, 12, 128, 128, 12, -1,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_segments_that_32_bits_do_not_count_are_an_error(dtype: str, tmp_path: Path) -> None:
    module = gradc.compile(gradc.trace(lambda k: ops.sort_segments(k), k=f"{dtype}[N]"), target="cpu")
    folder = module.export(tmp_path / "segments", dims={"N": 40})
    build(folder, "CFLAGS=-fPIC")
    exported = Exported(folder, "graph")
    assert exported.create(2**31 - 3) == 0
    assert exported.create(2**31 - 2) == 16 and "would sort more than 2147483645 elements" in exported.error


@pytest.mark.long(*BUILT)
def test_no_sizes_are_too_large_to_be_refused(tmp_path: Path) -> None:
    """Four of 2^40 each are 2^160 elements, more than any integer of C counts."""
    product = lambda x, y: ops.exp(x) * ops.reshape(y, x.shape)
    graph = gradc.trace(product, name="product", x="f32[A,B,C,D]", y="f32[A*B,C*D]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    folder = module.export(tmp_path / "product")
    build(folder, "CFLAGS=-fPIC")
    exported = Exported(folder, "product")
    for bits in (32, 33, 35, 40):
        assert exported.create(*(1 << bits,) * 4) == 16 and "2^63 bytes or more" in exported.error, bits
    assert exported.create(1 << 40, 0, 1 << 40, 1 << 40) == 0
    assert exported.call("create", ctypes.byref(ADDRESS()), None) == 17 and exported.create(2, 3, 5, 7) == 0


def test_memory_is_the_callers(attentions: tuple[gradc.Module, Path], tmp_path: Path) -> None:
    _, folder = attentions
    exported = Exported(folder, "attention")
    held: dict[int, Any] = {}

    @ctypes.CFUNCTYPE(ADDRESS, ADDRESS, ctypes.c_size_t, ctypes.c_size_t)
    def allocate(context: Any, alignment: int, count: int) -> int:
        memory = ctypes.create_string_buffer(count + alignment)
        address = -(-ctypes.addressof(memory) // alignment) * alignment
        held[address] = memory
        return address

    @ctypes.CFUNCTYPE(None, ADDRESS, ADDRESS)
    def release(context: Any, address: int) -> None:
        del held[address]

    exported.call("set_allocator", (ADDRESS * 3)(*(ctypes.cast(f, ADDRESS) for f in (allocate, release)), None))
    exported.call("set_threads", 1)
    assert exported.create(2, 40, 20) == 0 and held
    needed = exported.workspace
    small = np.zeros(needed, np.uint8)
    assert exported.call("set_workspace", exported.module, ADDRESS(small.ctypes.data), ctypes.c_int64(needed - 1)) == 18
    assert exported.error == f"workspace needs {needed} bytes, got {needed - 1}"
    assert exported.call("set_workspace", exported.module, ADDRESS(small.ctypes.data), ctypes.c_int64(needed)) == 0
    q, k = np.ones((2, 40, 16), np.float32), np.ones((2, 20, 16), np.float32)
    out, top = np.zeros_like(q), np.zeros((2, 20), np.float32)
    assert exported.run("forward", [q, k, k], [out, top]) == 0
    assert np.allclose(out, 1) and small.any()
    before = len(held)
    exported.create(1, 1, 1)
    exported.call("destroy", exported.module, result=None)
    assert len(held) < before


def test_two_modules_are_no_concern_of_each_other(
    bags: tuple[gradc.Module, Path], attentions: tuple[gradc.Module, Path], tmp_path: Path
) -> None:
    """Nothing but names that begin with a module's own is visible to the linker."""
    for name, (_, folder) in (("bag", bags), ("attention", attentions)):
        objects = [str(p) for p in folder.rglob("*.o") if p.name != "main.o"]
        shown = subprocess.run(["nm", "-g", "--defined-only", *objects], capture_output=True, text=True, check=True)
        symbols = [line.split()[-1] for line in shown.stdout.splitlines() if len(line.split()) == 3]
        assert f"{name}_forward" in symbols and all(s.startswith(f"{name}_") for s in symbols), symbols


def test_only_what_multiplies_has_the_kernels_of_products(
    bags: tuple[gradc.Module, Path], attentions: tuple[gradc.Module, Path]
) -> None:
    """They are nine tenths of the runtime's code, and of the time that a compiler takes for it."""
    for (_, folder), has in ((bags, False), (attentions, True)):
        (own,) = folder.glob(f"{folder.name}.o")
        shown = subprocess.run(["nm", str(own)], capture_output=True, text=True, check=True)
        assert ("gemm_" in shown.stdout) == has, shown.stdout


@pytest.mark.parametrize("wrt", [[], ["weight"]], ids=["grouped_matmul", "grouped_outer"])
def test_products_of_groups_are_products(wrt: list[str], tmp_path: Path) -> None:
    types = {"x": "f32[N,8]", "weight": "f32[G,8,4]", "offsets": "i32[G+1]"}
    module = gradc.compile(gradc.trace(ops.grouped_matmul, name="made", **types), wrt=wrt, target="cpu")
    folder = module.export(tmp_path / "made", dims={"N": 6, "G": 3})
    assert "#define HOST_MATMUL gradc_matmul\n" in (folder / "made.c").read_text()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = gradc.trace(lambda x: ops.exp(x), x="f32[N]")
    with pytest.raises(Unsupported, match="target 'numpy'"):
        gradc.compile(graph, target="numpy").export(tmp_path / "out")
    with pytest.raises(Unsupported, match="language 'rust'"):
        gradc.compile(graph, target="cpu").export(tmp_path / "out", lang="rust")
    module = gradc.compile(graph, target="cpu")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for here in ("", "."):  # the current folder cannot be replaced
        with pytest.raises(FileError, match="cannot be written"):
            module.export(here)
    assert not [*(tmp_path / "here").iterdir()]
    (tmp_path / "here").rmdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.c").write_text("")
    with pytest.raises(FileError, match="no empty folder"):
        module.export(tmp_path / "full")
    write: Callable[..., None] = files.write

    def failing(path: Path, *parts: Any) -> None:
        if path.name == "runtime.c":
            raise FileError(path, "written", OSError(28, "No space left on device"))
        write(path, *parts)

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(FileError, match="No space left"):
        module.export(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_names_of_users_are_no_c(tmp_path: Path) -> None:
    """A name may be a keyword, a header, or no identifier; what is written still compiles."""
    product = lambda **a: {"int": a["default"] * a["short.x"], "double": a["default"] + 1}
    graph = gradc.trace(product, name="math", **{"default": "f32[N]", "short.x": "f32[N]"})
    folder = gradc.compile(graph, wrt=["default"], target="cpu").export(tmp_path / "names")
    header = (folder / "math_.h").read_text()
    assert "const float *default_;" in header and "float *int_;" in header
    words = ["gcc", "-std=gnu11", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    for name in ("math_.c", "main.c"):
        subprocess.run([*words, name], cwd=folder, check=True)


@pytest.mark.long(*BUILT)
def test_names_of_users_are_no_macros(tmp_path: Path) -> None:
    """Neither those of the headers that a user's own file includes, nor those of the runtime."""
    names = ("BUFSIZ", "SEEK_SET", "EXPORT", "INT_MAX", "SIGINT", "sa_handler", "PUBLIC", "MAP_SHARED", "K")
    types = {name: f"f32[{name}]" for name in names}
    graph = gradc.trace(lambda **a: {name: x * x for name, x in a.items()}, name="squares", **types)
    folder = gradc.compile(graph, wrt=names, target="cpu").export(tmp_path / "names")
    build(folder)
    code, text = checked(folder, "squares")
    assert code == 0 and text.count("the same bits") == 2 * len(names), text


@pytest.mark.long(*BUILT)
def test_the_program_that_checks_reads_truth_values_as_one_byte(tmp_path: Path) -> None:
    graph = gradc.trace(lambda x: x > 0, name="above", x="f32[N]")
    folder = gradc.compile(graph, target="cpu").export(tmp_path / "above", dims={"N": 100})
    wanted = folder / "sample" / "output_y.bin"
    array = np.fromfile(wanted, np.uint8)
    array[[7, 11]] ^= 1
    array.tofile(wanted)
    build(folder)
    code, text = checked(folder, "above")
    assert code == 1 and "2 elements differ, at most 1.00e+00 of the largest" in text, text


def test_no_inputs_no_sizes_and_a_buffer_that_nothing_touches(tmp_path: Path) -> None:
    counted = gradc.trace(lambda: ops.iota((4,)) * 2, name="counted")
    look = lambda q, s: ops.dequantize_nf4(q, s, block=(1, 4))
    looked_up = gradc.trace(look, name="looked", q="u8[N,4]", s="f32[N,2]")
    for graph in (counted, looked_up):
        folder = gradc.compile(graph, target="cpu").export(tmp_path / graph.name)
        words = ["gcc", "-std=gnu11", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        subprocess.run([*words, f"{graph.name}.c", "main.c"], cwd=folder, check=True)
    assert (
        "int counted_forward(counted_module *module, const counted_outputs *outputs);"
        in (tmp_path / "counted" / "counted.h").read_text()
    )
    assert "HOST_UNUSED" in (tmp_path / "looked" / "looked.c").read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = gradc.trace(lambda x, w: (x @ w).sum(), name="loss", x="f32[N,4]", w="f32[4]")
    graph.save(tmp_path / "loss.gir")
    out = tmp_path / "made" / "loss"
    assert main(["export", str(tmp_path / "loss.gir"), "--wrt", "w", "--dims", "N=9", "-o", str(out)]) == 0
    assert "CMakeLists.txt, Makefile, common, cpu, host.h, loss.c, loss.h, main.c, sample" in capsys.readouterr().out
    assert (out / "sample" / "input_x.bin").stat().st_size == 9 * 4 * 4
    assert main(["export", str(tmp_path / "loss.gir"), "-o", str(out)]) == 2
    assert "no empty folder" in capsys.readouterr().err


def test_an_export_takes_the_way_that_the_data_say(tmp_path: Path) -> None:
    """Sums of rows sorted by their index have other bits than sums of partial results."""
    constants = {"sort": 45e-9, "gathered": 0.0, "partial": 1e-9, "skew": 1e-6, "locality": 60e-9}
    graph = gradc.trace(
        lambda i, u: ops.scatter_add(i, u, axis=0, size=symbol("V")), i="i64[N]", u="f32[N,8]", name="added"
    )
    compiled = lambda **how: gradc.compile(graph, target="cpu", calibration=calibration_text(CPU, constants), **how)
    module, rows, keys = compiled(), 140_000, 40_000
    folder = module.export(tmp_path / "added", dims={"N": rows, "V": keys})
    build(folder, "CFLAGS=-fPIC")
    rng = np.random.default_rng(0)
    u = rng.standard_normal((rows, 8)).astype(np.float32)
    for way, i in (("segmented", np.sort(rng.integers(0, keys, rows))), ("privatized", rng.integers(0, keys, rows))):
        by_way = {
            how: compiled(reductions={"*": how})(i=i, u=u, dims={"V": keys}) for how in ("segmented", "privatized")
        }
        assert len({np.asarray(y).tobytes() for y in by_way.values()}) == 2
        for name, array in (("input_i", i), ("input_u", u), ("output_y", by_way[way])):
            path = next((folder / "sample").glob(f"{name}*"))
            path.write_bytes(np.asarray(array).tobytes())
        assert checked(folder, "added")[0] == 0
