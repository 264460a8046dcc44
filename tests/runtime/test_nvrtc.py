"""NVRTC: found without help, its log understood, its failures named, its work kept."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradc import knobs
from gradc.errors import CompilerError, CompilerMissing, InvalidProblem, RegistersSpilled
from gradc.runtime.cache import default_cache
from gradc.runtime.cuda import nvrtc
from gradc.runtime.cuda.nvrtc import CudaBinary, KernelResources, Nvrtc, compile_cuda, find_nvrtc

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
try:
    FOUND: Nvrtc | None = find_nvrtc()
except CompilerMissing:
    FOUND = None
needs_nvrtc = pytest.mark.skipif(FOUND is None, reason="NVRTC is not installed: nothing to compile CUDA with")

SAXPY = """extern "C" __global__ void saxpy(float *y, const float *x, float a, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""
REDUCE = """extern "C" __global__ __launch_bounds__(256) void reduce(float *y, const float *x) {
  __shared__ float part[256];
  part[threadIdx.x] = sqrtf(x[threadIdx.x]) / x[0];
  __syncthreads();
  if (threadIdx.x == 0) {
    float s = 0.0f;
    for (int i = 0; i < 256; i++) s += part[i];
    y[blockIdx.x] = s;
  }
}
"""


def many_values(name: str, bounds: str = "", rounds: int = 2) -> str:
    """A kernel that holds 96 values at once."""
    return f"""extern "C" __global__ {bounds} void {name}(float *y, const float *x, int n) {{
  float t[96];
#pragma unroll
  for (int i = 0; i < 96; i++) t[i] = x[threadIdx.x + i * n];
#pragma unroll
  for (int k = 0; k < {rounds}; k++)
#pragma unroll
    for (int i = 0; i < 96; i++) t[i] = t[i] * t[(i * 7 + k) % 96] + t[(i + 31) % 96];
#pragma unroll
  for (int i = 0; i < 96; i++) y[threadIdx.x + i * n] = t[i];
}}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[Path]:
    with knobs.CACHE_DIR.set(str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever NVRTC compiles."""
    made: list[str] = []
    run = nvrtc._run
    monkeypatch.setattr(nvrtc, "_run", lambda *a: (made.append(a[2]), run(*a))[1])
    return made


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For tests that change where NVRTC is looked for."""
    nvrtc._find.cache_clear()
    monkeypatch.delenv("GRADC_NVRTC", raising=False)
    yield monkeypatch
    nvrtc._find.cache_clear()


# -- compiling ---------------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_a_cubin_without_a_gpu(arch: str):
    if lack := FOUND.lacks(arch):
        pytest.skip(lack)
    made = compile_cuda(SAXPY + REDUCE, arch=arch, spills="error")
    assert made.arch == arch and made.cubin.startswith(b"\x7fELF") and made.cubin[18] == 190, "EM_CUDA"
    assert f".target {arch}\n" in made.ptx and made.ptx.count(".entry") == 2 and "\0" not in made.ptx
    assert list(made.kernels) == ["reduce", "saxpy"]
    reduce, saxpy = made.kernels.values()
    assert 4 < saxpy.registers < 32 and 4 < reduce.registers < 64
    assert (saxpy.shared, reduce.shared) == (0, 1024) and (saxpy.barriers, reduce.barriers) in ((0, 1), (0, 0))
    assert not any((k.spill_stores, k.spill_loads, k.stack) != (0, 0, 0) for k in made.kernels.values())
    assert "registers" in made.log and "Compile time" not in made.log


@needs_nvrtc
def test_arithmetic_is_ieee():
    ptx = compile_cuda(SAXPY + REDUCE, arch="sm_80").ptx
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert not re.search(r"\bfma\b|\.ftz|\.approx|\.f64", ptx)


@needs_nvrtc
def test_only_what_is_wanted():
    ptx = compile_cuda(SAXPY, arch="sm_80", emit=("ptx",))
    assert ptx.cubin == b"" and ".target sm_80" in ptx.ptx and ptx.kernels == {}
    cubin = compile_cuda(SAXPY, arch="sm_80", emit=("cubin",))
    assert cubin.cubin and cubin.ptx == "" and cubin.kernels["saxpy"].registers


@needs_nvrtc
def test_the_same_text_gives_the_same_bytes(tmp_path: Path, compiles: list[str]):
    text = "".join(SAXPY.replace("saxpy", f"saxpy{i}") for i in range(4))
    made = []
    for i in range(3):
        with knobs.CACHE_DIR.set(str(tmp_path / str(i))):
            made.append(compile_cuda(text, arch="sm_90"))
    assert len(compiles) == 3 and made[0] == made[1] == made[2]


@needs_nvrtc
def test_lines_for_a_profiler():
    plain, lines = (compile_cuda(SAXPY, arch="sm_80", line_info=wanted) for wanted in (False, True))
    assert b"debug_line" in lines.cubin and b"debug_line" not in plain.cubin


# -- spills ------------------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("how", ["launch_bounds", "max_registers"])
def test_spills_are_errors_where_asked(arch: str, how: str, compiles: list[str]):
    if lack := FOUND.lacks(arch):
        pytest.skip(lack)
    bounds, limit = ("__launch_bounds__(1024, 2)", 0) if how == "launch_bounds" else ("", 32)
    source = SAXPY + many_values("greedy", bounds)
    with pytest.raises(
        RegistersSpilled, match=rf"registers are spilled on {arch}: greedy: \d+ bytes stored, \d+ loaded"
    ) as caught:
        compile_cuda(source, arch=arch, spills="error", max_registers=limit)
    stores, loads = caught.value.kernels.pop("greedy")
    assert stores > 0 and loads > 0 and not caught.value.kernels
    assert f"{stores} bytes spill stores" in caught.value.log and "    1  extern" in caught.value.source
    assert isinstance(caught.value, CompilerError)
    made = compile_cuda(source, arch=arch, max_registers=limit)
    assert made.kernels["greedy"].spill_stores == stores and made.kernels["greedy"].stack > 0 and len(compiles) == 1
    assert made.kernels["saxpy"].spill_stores == 0
    with pytest.raises(RegistersSpilled):  # what the cache holds is checked as well
        compile_cuda(source, arch=arch, spills="error", max_registers=limit)
    assert len(compiles) == 1


@needs_nvrtc
def test_enough_registers_do_not_spill():
    made = compile_cuda(many_values("fits", "__launch_bounds__(256)"), arch="sm_90", spills="error")
    assert made.kernels["fits"].registers > 96


LOG = """\
ptxas warning : Registers are spilled to local memory in function 'b', 12 bytes spill stores, 16 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
ptxas         .     40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 2432 bytes cumulative stack size, 4224 bytes smem, \
372 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for _Z6helperPKfi
    8 bytes stack frame, 288 bytes spill stores, 292 bytes spill loads
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, 384 bytes cmem[0]
"""


def test_the_log_is_read():
    assert nvrtc._resources(LOG) == {
        "a": KernelResources("a", 10, constant=384),
        "b": KernelResources(
            "b", 32, spill_stores=300, spill_loads=308, shared=4224, stack=48, constant=380, barriers=1
        ),
    }
    assert nvrtc._resources("") == nvrtc._resources("a log of another kind: Used 3 registers") == {}


def test_a_log_that_says_nothing_is_not_free_of_spills():
    made = CudaBinary("sm_80", b"", ".visible .entry a(\n.visible .entry c(\n", LOG, nvrtc._resources(LOG))
    with pytest.raises(CompilerError, match=r"does not say what c needs"):
        nvrtc._refuse_spills(Nvrtc("there", (12, 9), (80,), ""), made, "")


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch",
    [
        "",
        "90",
        "sm90",
        "SM_90",
        "sm_9",
        "sm_90b",
        "sm_80a",
        "sm_90f",
        "compute_90",
        "sm_90 ",
        "sm_90\n",
        "sm_٩٠",
        "sm_90 -ftz=true",
        "sm_1000",
    ],
)
def test_what_is_no_architecture(arch: str):
    with pytest.raises(InvalidProblem, match="arch="):
        compile_cuda(SAXPY, arch=arch)


@pytest.mark.parametrize(
    "options", [{"emit": ()}, {"emit": ("exe",)}, {"spills": "warn"}, {"max_registers": 256}, {"max_registers": -1}]
)
def test_what_is_no_option(options: dict[str, Any]):
    with pytest.raises(InvalidProblem, match="spills is 'allow' or 'error'"):
        compile_cuda(SAXPY, arch="sm_90", **options)


@needs_nvrtc
def test_an_architecture_that_it_lacks():
    with pytest.raises(
        CompilerMissing,
        match=(
            r"no NVRTC for sm_13: NVRTC \d+\.\d+ \(.*libnvrtc.*compiles for sm_.*sm_90, .*not for sm_13; .*(pip"
            r" install|GRADC_NVRTC)"
        ),
    ) as caught:
        compile_cuda(SAXPY, arch="sm_13")
    assert all(f"sm_{n}" in str(caught.value) for n in FOUND.architectures)


@pytest.mark.parametrize(
    ("arch", "taken"),
    [
        ("sm_90", "12"),
        ("sm_70", "12"),
        ("sm_110", "13"),
        ("sm_100f", "13"),
        ("sm_101", "sm_101 needs NVRTC 12.8 or later.*the last for sm_101 are those of CUDA 12"),
        ("sm_35", "not for sm_35"),
    ],
)
def test_the_first_that_has_the_architecture(search: pytest.MonkeyPatch, arch: str, taken: str):
    known = {"12": Nvrtc("12", (12, 4), (70, 80, 90), "a"), "13": Nvrtc("13", (13, 0), (75, 80, 90, 100, 110), "b")}
    search.setattr(nvrtc, "_candidates", lambda homes: iter(["/a/12", "/b/13"]))
    search.setattr(nvrtc, "_ask", lambda path: known[Path(path).name])
    if taken in known:
        assert find_nvrtc(arch) is known[taken]
        return
    with pytest.raises(CompilerMissing, match=f"(?s)no NVRTC for {arch}.*{taken}"):
        find_nvrtc(arch)


def test_families_need_12_9():
    assert "sm_100f needs NVRTC 12.9" in Nvrtc("x", (12, 8), (90, 100), "").lacks("sm_100f")
    assert "sm_100 needs NVRTC 12.8" in Nvrtc("x", (12, 6), (90,), "").lacks("sm_100a")
    assert "the last for sm_70 are those of CUDA 12" in Nvrtc("x", (13, 0), (75, 90), "").lacks("sm_70")


# -- finding it --------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_it_is_found():
    assert (
        FOUND.version >= (12, 0)
        and 90 in FOUND.architectures
        and Path(FOUND.path).is_file()
        and len(FOUND.identity) == 64
    )
    assert str(FOUND) == f"NVRTC {FOUND.version[0]}.{FOUND.version[1]} ({FOUND.path})"
    with knobs.NVRTC.set(FOUND.path):
        assert find_nvrtc() == FOUND


def test_none_at_all(search: pytest.MonkeyPatch):
    search.setattr(nvrtc, "_candidates", lambda homes: iter(["libnvrtc-nowhere.so.12"]))
    with pytest.raises(
        CompilerMissing,
        match=(
            r"no NVRTC: GRADC_NVRTC is not set.*nvidia-cuda-nvrtc-cu12.*CUDA_HOME.*libnvrtc\.so\.12.*pip install"
            r" gradc\[nvrtc\]"
        ),
    ):
        compile_cuda(SAXPY, arch="sm_90")


def test_a_path_that_names_nothing_is_not_replaced():
    with (
        knobs.NVRTC.set("/nowhere/libnvrtc.so"),
        pytest.raises(CompilerMissing, match=r"GRADC_NVRTC='/nowhere/libnvrtc\.so' names no file"),
    ):
        compile_cuda(SAXPY, arch="sm_90")


def test_a_path_that_names_something_else(tmp_path: Path):
    import _ctypes

    text = tmp_path / "libnvrtc.so.12"
    text.write_text("not a library\n")
    for path in (str(text), _ctypes.__file__):
        with (
            knobs.NVRTC.set(path),
            pytest.raises(CompilerError, match=f"{re.escape(os.path.realpath(path))} is not an NVRTC that works: "),
        ):
            compile_cuda(SAXPY, arch="sm_90")


@needs_nvrtc
def test_without_its_builtins_it_is_passed_over(search: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "lib64" / "libnvrtc.so.12"
    path.parent.mkdir()
    try:
        os.link(FOUND.path, path)
    except OSError:
        shutil.copyfile(FOUND.path, path)
    wanted = "libnvrtc-builtins.so.{}.{}".format(*FOUND.version)
    with knobs.NVRTC.set(str(path)), pytest.raises(CompilerError, match=rf"has no {wanted} beside it"):
        find_nvrtc()
    search.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    candidates = nvrtc._candidates
    search.setattr(nvrtc, "_candidates", lambda homes: (c for c in candidates(homes) if os.path.isabs(c)))
    with (
        knobs.CUDA_HOME.set(str(tmp_path)),
        pytest.raises(CompilerMissing, match=rf"no NVRTC that works: .*{wanted}.*pip install"),
    ):
        find_nvrtc()
    with knobs.CUDA_HOME.set(str(tmp_path)), knobs.CUDA_PATH.set(str(tmp_path / "b")):
        for name in (Path(FOUND.path).name, wanted):  # a toolkit that is whole, after one that is not
            (tmp_path / "b" / "lib").mkdir(parents=True, exist_ok=True)
            (tmp_path / "b" / "lib" / name).symlink_to(Path(FOUND.path).parent / name)
        assert find_nvrtc() == FOUND


def test_where_it_is_looked_for(search: pytest.MonkeyPatch, tmp_path: Path):
    files = [
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "kit/targets/x/lib/libnvrtc.so.12.4.1",
        "kit/lib64/libnvrtc.so.11",
    ]
    strange = [
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
        "kit/lib64/libnvrtc_static.a",
        "kit/lib64/libnvrtc.so.txt",
    ]
    for file in (*files, *strange):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    search.syspath_prepend(str(tmp_path))
    found = [c for c in nvrtc._candidates((str(tmp_path / "kit"), "")) if c.startswith(str(tmp_path)) or "/" not in c]
    wanted = [files[1], files[0], files[3], files[2]]
    assert found == [*(str(tmp_path / file) for file in wanted), "libnvrtc.so.12", "libnvrtc.so.13"]


@needs_nvrtc
def test_what_the_loader_knows(search: pytest.MonkeyPatch):
    """A library that is in the process already, as one in the loader's path is, is found by its name."""
    nvrtc._library(FOUND.path)
    assert os.path.realpath(nvrtc._loaded_path(Path(FOUND.path).name)) == FOUND.path


@needs_nvrtc
def test_the_builtins_are_loaded_with_the_library():
    """Those of CUDA 13's wheels lie where the loader does not look."""
    script = f"""
from gradc.runtime.cuda import nvrtc
nvrtc._library({FOUND.path!r})
print(*{{line.split("/")[-1].strip() for line in open("/proc/self/maps") if "libnvrtc-builtins" in line}})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert told.stdout.startswith("libnvrtc-builtins.so.{}.{}".format(*FOUND.version))


def test_nothing_heavy_is_imported():
    script = """
import sys
from gradc.runtime.cuda.nvrtc import compile_cuda
try:
    compile_cuda("", arch="sm_90")
except Exception as error:
    print(type(error).__name__)
print([m for m in ("cupy", "cuda", "torch", "numba", "jinja2", "networkx", "nvidia") if m in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split("\n")[-2] == "[]", done.stdout


# -- text that does not compile ----------------------------------------------------------------------------------------


@needs_nvrtc
def test_an_error_shows_the_source_and_the_log():
    with pytest.raises(
        CompilerError, match=r"NVRTC \d+\.\d+ .* failed \(NVRTC_ERROR_COMPILATION\) on our CUDA source for sm_90"
    ) as caught:
        compile_cuda(SAXPY.replace("a * x", "b * x"), arch="sm_90")
    assert 'gradc.cu(3): error: identifier "b" is undefined' in caught.value.log and caught.value.log in str(
        caught.value
    )
    assert "    3    if (i < n) y[i] = b * x[i] + y[i];" in caught.value.source
    assert compile_cuda(SAXPY, arch="sm_90").cubin, "and it goes on"


@needs_nvrtc
def test_an_error_is_not_kept(own_cache: Path, compiles: list[str]):
    find_nvrtc()
    before = sorted(own_cache.glob("*")) if own_cache.exists() else []
    for _ in range(2):
        with pytest.raises(CompilerError):
            compile_cuda("nonsense", arch="sm_90")
    assert len(compiles) == 2 and sorted(own_cache.glob("*")) == before


@needs_nvrtc
@pytest.mark.parametrize("line", ["#include <math.h>", '  #  include "x"', "%:include </etc/passwd>", "#import <x>"])
def test_the_text_stands_alone(line: str):
    with pytest.raises(CompilerError, match="includes something in line 2; it must stand alone") as caught:
        compile_cuda(f"// text\n{line}\n{SAXPY}", arch="sm_90")
    assert f"    2  {line}" in caught.value.source


@needs_nvrtc
def test_a_nul_hides_nothing():
    with pytest.raises(CompilerError, match="a NUL in line 5") as caught:
        compile_cuda(SAXPY + "\0 nonsense", arch="sm_90")
    assert "    1  extern" in caught.value.source


@needs_nvrtc
@pytest.mark.parametrize(
    "text", ["", "// nothing but words\n", "// \udc80 \u202e ünïcode\n" + SAXPY], ids=["empty", "comment", "strange"]
)
def test_strange_text_compiles(text: str):
    made = compile_cuda(text, arch="sm_90", spills="error")
    assert made.cubin and list(made.kernels) == (["saxpy"] if "saxpy" in text else [])


@needs_nvrtc
def test_a_megabyte():
    assert compile_cuda(SAXPY + "// words " * 120_000, arch="sm_90").kernels


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "int x = " + "-" * 100_000 + "1;",
        "int x = 1" + "+ y" * 100_000 + ";",
        "{" * 100_000,
        "nonsense;\n" * 100_000,
    ],
)
def test_hostile_text_does_not_end_the_process(text: str):
    with pytest.raises(CompilerError) as caught:
        compile_cuda(text, arch="sm_90")
    assert len(caught.value.log) < 30_000


# -- the cache ---------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_hit_makes_no_compile(compiles: list[str]):
    first = compile_cuda(SAXPY, arch="sm_90")
    assert compile_cuda(SAXPY, arch="sm_90") == first and len(compiles) == 1
    compile_cuda(SAXPY, arch="sm_90", emit=("cubin",))
    assert len(compiles) == 1, "one entry holds both"
    for n, options in enumerate(
        (
            {"arch": "sm_80"},
            {"arch": "sm_90", "max_registers": 64},
            {"arch": "sm_90", "line_info": True},
            {"arch": "sm_90a"},
        ),
        2,
    ):
        compile_cuda(SAXPY, **options)
        assert len(compiles) == n
    compile_cuda(SAXPY + "\n", arch="sm_90")
    assert len(compiles) == 6


@needs_nvrtc
@pytest.mark.parametrize("what", ["version", "nvrtc"])
def test_another_gradc_or_nvrtc_is_another_entry(what: str, compiles: list[str], monkeypatch: pytest.MonkeyPatch):
    compile_cuda(SAXPY, arch="sm_90")
    if what == "version":
        monkeypatch.setattr(nvrtc, "VERSION", "0.0.0")
    else:
        other = Nvrtc(FOUND.path, FOUND.version, FOUND.architectures, "another")
        monkeypatch.setattr(nvrtc, "find_nvrtc", lambda arch: other)
    compile_cuda(SAXPY, arch="sm_90")
    assert len(compiles) == 2


@needs_nvrtc
def test_a_hit_in_another_process_does_not_load_the_library():
    script = f"""
from gradc.runtime.cuda import nvrtc
made = nvrtc.compile_cuda({SAXPY!r}, arch="sm_90")
print(len(made.cubin), any("libnvrtc" in line for line in open("/proc/self/maps")))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": knobs.CACHE_DIR.get()}
    told = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert told[0][0] == told[1][0] and [t[1] for t in told] == ["True", "False"], told


@needs_nvrtc
@pytest.mark.parametrize("how", ["truncated", "flipped", "emptied"])
def test_a_damaged_entry_is_dropped_and_made_again(own_cache: Path, compiles: list[str], how: str):
    find_nvrtc()
    before = set(own_cache.glob("*.entry"))
    first = compile_cuda(SAXPY, arch="sm_90")
    (entry,) = set(own_cache.glob("*.entry")) - before
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes({"truncated": bytes(data[:-7]), "flipped": bytes(data), "emptied": b""}[how])
    dropped = default_cache().counters.dropped
    assert compile_cuda(SAXPY, arch="sm_90") == first and len(compiles) == 2
    assert default_cache().counters.dropped == dropped + 1
    assert compile_cuda(SAXPY, arch="sm_90") == first and len(compiles) == 2


@needs_nvrtc
@pytest.mark.parametrize("payload", [b"", b"garbage", b"{}\0x", b"[]\0x", b'{"ptx": "", "log": ""}', b"\xff\0"])
def test_an_entry_of_a_broken_build_is_made_again(monkeypatch: pytest.MonkeyPatch, compiles: list[str], payload: bytes):
    put: list[bytes] = []

    class Strange:
        def get(self, key: str) -> bytes:
            return payload

        def put(self, key: str, payload: bytes) -> None:
            put.append(payload)

    find_nvrtc("sm_90")
    monkeypatch.setattr(nvrtc, "default_cache", Strange)
    made = compile_cuda(SAXPY, arch="sm_90")
    assert len(compiles) == 1 and nvrtc._unpack(put[-1], "sm_90") == made


@needs_nvrtc
def test_a_cache_that_cannot_be_used_is_no_failure(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        knobs.CACHE_DIR.set(str(tmp_path / "file")),
        pytest.warns(RuntimeWarning, match="the kernel cache cannot be used"),
    ):
        assert compile_cuda(SAXPY, arch="sm_90").cubin
    with knobs.CACHE.set(False):
        assert compile_cuda(SAXPY, arch="sm_90").cubin


# -- threads, Ctrl-C, the clock ----------------------------------------------------------------------------------------


@needs_nvrtc
def test_threads_at_once():
    texts = [
        SAXPY,
        SAXPY,
        REDUCE,
        many_values("many", "__launch_bounds__(256)"),
        "nonsense",
        SAXPY.replace("saxpy", "other"),
    ]
    expected = [compile_cuda(t, arch="sm_80") if t != "nonsense" else None for t in texts]
    got: list[Any] = [None] * len(texts)

    def work(i: int) -> None:
        with knobs.CACHE_DIR.set(f"{knobs.CACHE_DIR.get()}-{i}"):
            try:
                got[i] = compile_cuda(texts[i], arch="sm_80")
            except CompilerError as error:
                got[i] = error.source

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected[4] = "    1  nonsense"  # type: ignore[call-overload]
    assert got == expected


@needs_nvrtc
def test_a_busy_interpreter_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch):
    """NVRTC asks a thousand times whether to go on; none of it waits for Python: it asks the C library."""
    library, asked = nvrtc._library(FOUND.path), []
    if not hasattr(library, "nvrtcSetFlowCallback"):
        pytest.skip(f"{FOUND} cannot be stopped")
    set_callback = library.nvrtcSetFlowCallback

    def seen(program: Any, callback: ctypes.c_void_p, payload: int) -> int:
        asked.append(callback.value)
        return int(set_callback(program, callback, payload))

    monkeypatch.setattr(library, "nvrtcSetFlowCallback", seen)
    compile_cuda(REDUCE.replace("reduce", "busy"), arch="sm_90")
    assert asked == [ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p).value]


# Seconds of work.
LONG = "".join(many_values(f"long{i}", "__launch_bounds__(1024, 2)", 12) for i in range(16))


@needs_nvrtc
def test_the_clock_stops_it(own_cache: Path, compiles: list[str]):
    if FOUND.version < (12, 8):
        pytest.skip(f"{FOUND} cannot be stopped")
    compile_cuda(SAXPY, arch="sm_90")
    before = set(own_cache.glob("*"))
    with pytest.raises(CompilerError, match=r"took too long and was stopped on our CUDA source for sm_90") as caught:
        compile_cuda(LONG, arch="sm_90", timeout=0.1)
    assert "    1  extern" in caught.value.source
    assert set(own_cache.glob("*")) == before and threading.active_count() == 1
    assert compile_cuda(REDUCE, arch="sm_90").cubin


@needs_nvrtc
def test_ctrl_c_stops_it():
    if FOUND.version < (12, 8):
        pytest.skip(f"{FOUND} cannot be stopped")
    script = f"""
import threading, time
from gradc.runtime.cuda import nvrtc
nvrtc.compile_cuda({SAXPY!r}, arch="sm_80")
print("started", flush=True)
try:
    nvrtc.compile_cuda({LONG!r}, arch="sm_90")
    print("finished")
except KeyboardInterrupt:
    print("interrupted", threading.active_count(), len(nvrtc.compile_cuda({REDUCE!r}, arch="sm_90").kernels))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": knobs.CACHE_DIR.get()}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and out == "interrupted 1 1\n", out


# -- doctor ------------------------------------------------------------------------------------------------------------


def doctor(**environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "gradc", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, next(line for line in done.stdout.splitlines() if " NVRTC " in line)


def test_doctor_names_it(tmp_path: Path):
    line = doctor()[1]
    if FOUND is None:
        assert line.startswith("  --") and ("pip install gradc[nvrtc]" in line or "GRADC_NVRTC" in line)
    else:
        assert (
            line.startswith("  ok")
            and FOUND.path in line
            and "sm_90" in line
            and "{}.{}".format(*FOUND.version) in line
        )
    assert "names no file" in doctor(GRADC_NVRTC="/nowhere/libnvrtc.so")[1]
    (tmp_path / "text").write_text("not a library")
    code, line = doctor(GRADC_NVRTC=str(tmp_path / "text"))
    assert code == 1 and line.startswith("  !!") and "is not an NVRTC that works" in line


@needs_nvrtc
def test_its_identity_is_what_it_is_and_not_where(tmp_path: Path) -> None:
    """So that what it compiled on one machine is found in a cache that was carried to another."""
    for file in Path(FOUND.path).parent.glob("libnvrtc*.so*"):
        (tmp_path / file.name).symlink_to(file)
    moved = nvrtc._ask(str(tmp_path / Path(FOUND.path).name))
    assert moved.path != FOUND.path and moved.identity == FOUND.identity
