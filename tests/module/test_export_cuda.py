"""Export for a GPU on a machine that has none: it builds without a warning, says that there is no driver, and behind a
driver of the tests, whose launches go to the simulator, gives what the programs mean in NumPy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.cli import main
from gradc.errors import CompilerMissing, InvalidProblem, Unsupported
from gradc.runtime.cuda.nvrtc import find_nvrtc

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_80"


def _nvrtc() -> bool:
    try:
        find_nvrtc(ARCH)
    except CompilerMissing:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("make")), reason="an export is built by gcc and make"),
    pytest.mark.skipif(not _nvrtc(), reason="needs NVRTC: gradc[nvrtc]"),
]

DRIVER = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int (*launcher)(const char *, unsigned, unsigned, unsigned, void **);
static launcher launch;
static void *context, *current;
static int alive;
void stub_set(launcher f) { launch = f; }
int stub_alive(void) { return alive; }
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int number) { *device = number; return number ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = context = &context; alive++; return device; }
int cuDevicePrimaryCtxRelease_v2(int device) { alive--; return device; }
int cuCtxGetCurrent(void **found) { *found = current; return 0; }
int cuCtxSetCurrent(void *wanted) { current = wanted; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 101 ? "invalid device ordinal" : "?"; return 0; }
int cuModuleLoadData(void **made, const void *image) { *made = (void *)image; alive++; return current ? 0 : 201; }
int cuModuleUnload(void *module) { alive -= module != NULL; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  char entry[256] = ".entry ";
  *function = (void *)name;
  return strstr(module, strncat(entry, name, 200)) ? 0 : 500;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return function && attribute == 8 && value ? 0 : 1; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || stream || extra || !current) return 1;
  return launch(f, gx, bx, shared, arguments);
}
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) {
  void *found = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(found, 0xa5, bytes);
  *memory = (uint64_t)found;
  alive++;
  return current ? 0 : 201;
}
int cuMemFree_v2(uint64_t memory) { free((void *)memory); alive--; return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
  memset((void *)to, value, bytes);
  return stream != NULL;
}
int cuStreamSynchronize(void *stream) { return stream != NULL; }
"""
"""A driver whose memory is the host's; it refuses calls outside a context and functions that the PTX does not have."""
RUNNER = """
import ctypes, sys
from pathlib import Path
import numpy as np
from gradc.runtime.simulator.compile import compile_sim

library, stub, folder = sys.argv[1:4]
simulated = [compile_sim(path.read_text()) for path in sorted(Path(folder).glob("*.cu"))]
kernels = {name: each for each in simulated for name in each.kernels}
KIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p))

@KIND
def launch(name, blocks, threads, shared, places):
    try:
        name = name.decode()
        signature = kernels[name].signature(name)
        values = []
        for place, (code, size) in zip(places, signature):
            raw = ctypes.c_int64.from_address(place).value
            pointer = code in "PC"
            memory = np.ctypeslib.as_array((ctypes.c_ubyte * 1).from_address(raw)) if pointer and raw else None
            values.append(memory if pointer else raw)
        written = [i for i, (code, _) in enumerate(signature) if code == "P" and values[i] is not None]
        shape = ((blocks, 1, 1), (threads, 1, 1))
        kernels[name].launch(name, *shape, shared, values, written=written)
        return 0
    except Exception as error:
        print("launch of", name, "failed:", error, file=sys.stderr)
        return 999

driver = ctypes.CDLL(stub)
driver.stub_set(launch)
exported = ctypes.CDLL(library)
words = (ctypes.c_char_p * 3)(b"main", folder.encode() + b"/sample", None)
code = exported.exported_main(2, words)
ctypes.CDLL(None).fflush(None)
assert driver.stub_alive() == 0, f"{driver.stub_alive()} things were not given back"
sys.exit(code)
"""


def build(folder: Path, *more: str) -> None:
    command = ["make", "-s", "-j2", "CC=gcc", *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(["gcc", *flags], cwd=folder, check=True)
    return folder / "libcuda.so.1"


def run(folder: Path, name: str, stub: Path) -> tuple[int, str, str]:
    """The export's own main program, in a process that has the driver of the tests."""
    sources = [f"{name}.c", "main.c"]
    library = folder / "exported.so"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-Dmain=exported_main", "-o", str(library)]
    subprocess.run(["gcc", *flags, *sources, "-ldl", "-pthread", "-lm"], cwd=folder, check=True)
    command = [sys.executable, "-c", RUNNER, str(library), str(stub), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout, done.stderr


def bag(tokens: Any, table: Any, scale: Any, w: Any) -> Any:
    rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 8)))
    return ops.gelu(ops.linear(rows, w))


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 2, 1))), 2)
    return {"y": ops.matmul(scores, v), "top": ops.amax(scores, axis=1)}


def norms(x: Any, w: Any, b: Any, t: Any) -> Any:
    y = ops.layer_norm(x, (24,), w, b) + ops.cumsum(x, 1)
    return ops.cross_entropy(y, t) + (ops.sort(x, 1)[0] * x).sum()


MODELS: dict[str, tuple[Callable[..., Any], dict[str, str], list[str], dict[str, int]]] = {
    "bag": (
        bag,
        {"tokens": "i64[N]", "table": "i8[V,8]", "scale": "f32[V,1]", "w": "f32[5,8]"},
        ["scale", "w"],
        {"N": 40, "V": 11},
    ),
    "attention": (
        attention,
        {"q": "f32[B,S,16]", "k": "f32[B,T,16]", "v": "f32[B,T,16]"},
        ["q", "k", "v"],
        {"B": 2, "S": 20, "T": 13},
    ),
    "norms": (
        norms,
        {"x": "f32[N,24]", "w": "f32[24]", "b": "f32[24]", "t": "i64[N]"},
        ["x", "w", "b"],
        {"N": 9},
    ),
}


def export(name: str, folder: Path) -> Path:
    function, types, wrt, dims = MODELS[name]
    module = gradc.compile(gradc.trace(function, **types), wrt=wrt, target="cuda", arch=ARCH)
    return module.export(folder / name, dims=dims)


@pytest.mark.long(*long_tests.COMPILER, "gradc/module", "gradc/runtime")
@pytest.mark.parametrize("name", MODELS)
def test_it_gives_what_the_programs_mean(name: str, stub: Path, tmp_path: Path) -> None:
    folder = export(name, tmp_path)
    code, out, err = run(folder, name, stub)
    assert (code, err) == (0, ""), out + err
    assert len(out.splitlines()) == len([p for p in (folder / "sample").iterdir() if p.name[0] in "og"])
    assert "WRONG" not in out


def test_an_index_out_of_range_is_an_error_with_its_position(stub: Path, tmp_path: Path) -> None:
    folder = export("bag", tmp_path)
    tokens = np.fromfile(folder / "sample" / "input_tokens.bin", np.int64)
    tokens[[7, 30]] = (11, -1)
    tokens.tofile(folder / "sample" / "input_tokens.bin")
    code, _, err = run(folder, "bag", stub)
    assert code == 2
    assert "error 1: embedding: index 11 at position 7 of 'tokens' is out of range [0, 11)" in err


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    folder = export("attention", tmp_path)
    build(folder)
    build(folder, "libattention.a")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    done = subprocess.run(["./attention_main"], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error 32: attention: no NVIDIA driver: ") and "libcuda.so.1" in done.stderr


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    function, types, wrt, dims = MODELS["bag"]
    graph = gradc.trace(function, **types)
    module = gradc.compile(graph, wrt=wrt, target="cuda", arch=ARCH)
    with pytest.raises(InvalidProblem, match="give dims for V"):
        module.export(tmp_path / "x", dims={"N": 40})
    donated = gradc.compile(graph, wrt=wrt, target="cuda", arch=ARCH, donate=["scale"], dims=dims)
    if any(executable.donated for executable in donated.executables.values()):
        with pytest.raises(Unsupported, match="donated"):
            donated.export(tmp_path / "x")
    with pytest.raises(Unsupported, match="cuda-sim"):
        gradc.compile(graph, target="cuda-sim").export(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gradc.trace(attention, **MODELS["attention"][1]).save(tmp_path / "attention.gir")
    arguments = ["--target", "cuda", "--arch", ARCH, "--dims", "B=2,S=20,T=13", "--wrt", "q"]
    assert main(["export", str(tmp_path / "attention.gir"), *arguments, "-o", str(tmp_path / "out")]) == 0
    assert "backward.ptx" in capsys.readouterr().out
    assert ".target sm_80" in (tmp_path / "out" / "forward.ptx").read_text()
