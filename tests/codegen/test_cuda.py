"""The CUDA target where there is no GPU: the text that a GPU gets, run by the simulator in its checking mode, and
compiled for each architecture.

Races, reads of what nobody wrote, addresses outside arrays and barriers that not all threads reach end a run, whatever
its numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import long_tests
import numpy as np
import pytest
from agreement import (
    COMPOSITES,
    NAMES,
    OTHERS,
    POINTWISE,
    TURNS,
    agree_with_numpy,
    compiled,
    in_turns,
    joint,
    merged,
    simulated,
)
from registry import cases

import gradc
from benchmarks import resources
from benchmarks.network_cases import block_case
from benchmarks.resources import ARCHITECTURES
from gradc import interp, knobs, ops
from gradc.autodiff import differentiate
from gradc.codegen.cuda.cached_text import anonymous
from gradc.codegen.cuda.render import render_cuda
from gradc.codegen.identifiers import identifier, identifiers
from gradc.errors import CompilerMissing, DeviceError, IndexOutOfRange, InvalidProblem, Unsupported


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


@long_tests.values
@pytest.mark.parametrize("name", [*compiled(OTHERS, turn=1), *POINTWISE[::2]])  # NVRTC has the others
def test_cuda_is_numpy(name: str, judged: Callable[..., None]) -> None:
    """All samples of a primitive, every second one of a composite: the CPU has those too."""
    every = in_turns(name, 2)
    chosen = every[NAMES.index(name) % 2 :: 2] or every if name in COMPOSITES else every
    agree_with_numpy(chosen, (0, 7), judged=judged, target="cuda-sim")


# -- combines ----------------------------------------------------------------------------------------------------------


def run(module: gradc.Module, given: dict[str, np.ndarray], seed: int | None = None) -> dict[str, np.ndarray]:
    """The module's outputs, blocks and warps in an order drawn from the seed."""
    module.forward.native.device.seed = seed
    return {name: np.asarray(a) for name, a in module.forward.run(**given).items()}


INDICES = {
    "uniform": lambda rng, n, v: rng.integers(0, v, n),
    "half on one row": lambda rng, n, v: np.where(rng.random(n) < 0.5, min(3, v - 1), rng.integers(0, v, n)),
    "one row": lambda rng, n, v: np.full(n, v - 1),
    "sorted": lambda rng, n, v: np.sort(rng.integers(0, v, n)),
}


@long_tests.values
@pytest.mark.parametrize("how", ["segmented", "privatized", "atomic", "atomic_fixed"])
@pytest.mark.parametrize(("hits", "dtype"), [(hits, ("f32", "bf16")[k % 2]) for k, hits in enumerate(INDICES)])
def test_scatter(how: str, hits: str, dtype: str) -> None:
    """Each strategy sums the same rows, and all but atomic give the same bits whatever the order of blocks and warps;
    rows that nobody hits are 0.
    """
    graph = differentiate(
        gradc.trace(lambda t, w: ops.embedding(t, w, padding_idx=1), t="i64[N]", w=f"{dtype}[V,D]"), ["w"]
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": how})
    assert how in str(module.forward.program)
    for n, v, d in ((1000, 60, 40), (1, 2, 1), (300, 3, 5), (40, 5000, 2), (0, 5, 3)):
        rng = np.random.default_rng(n)
        given = {
            "t": INDICES[hits](rng, n, v),
            "w": np.zeros((v, d), graph.input("w").dtype.np),
            "d.y": rng.standard_normal((n, d)).astype(graph.input("w").dtype.np),
        }
        if how == "privatized" and v * d > 10_000:
            continue
        first = run(module, given)
        exact = interp.run(graph, given, precision="f64")
        unit, most = (
            2.0**-24 if dtype == "f32" else 2.0**-8,
            (np.bincount(given["t"], minlength=1).max() if how == "atomic" else 0),
        )
        for name, value in first.items():  # atomics add one after another: as many roundings as hits
            assert np.abs(value.astype(np.float64) - exact[name]).max(initial=0) <= max(
                4 * unit, most * 2.0**-24
            ) * np.abs(exact[name]).max(initial=0)
        for seed in (1, 2):
            again = run(module, given, seed)
            assert how == "atomic" or all(
                np.array_equal(a.view(np.uint8), first[name].view(np.uint8)) for name, a in again.items()
            )


FIXED = {
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-42,
    "huge": lambda rng, n: rng.choice([-3e38, 3e38], n),
    "one": lambda rng, n: np.ones(n),
    "mixed": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-9, 9, n),
    "cancels": lambda rng, n: np.concatenate([a := rng.standard_normal(n // 2), -a[::-1]]),
    "zero": lambda rng, n: np.zeros(n),
    "not finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf, 1.0, 2.0], n, p=[0.01, 0.02, 0.02, 0.9, 0.05]),
}


@pytest.mark.parametrize("values", FIXED)
def test_fixed_point_sums(values: str) -> None:
    """Each element is right to f32 and to 2^-(62 - log2 additions) of the largest value; what is not finite is what
    IEEE addition gives.
    """
    module = gradc.compile(
        gradc.trace(lambda i, u: ops.scatter_add(i, u, size=20), i="i64[N]", u="f32[N]"),
        target="cuda-sim",
        reductions={"*": "atomic_fixed"},
    )
    assert "atomic_fixed" in str(module.forward.program)
    rng = np.random.default_rng(0)
    for n in (1000, 64, 2):
        i, u = rng.integers(0, 19, n), FIXED[values](rng, n).astype(np.float32)
        exact = np.zeros(20)
        with np.errstate(invalid="ignore"):
            np.add.at(exact, i, u.astype(np.float64))
        (name,) = module.graph.output_names
        first = run(module, {"i": i, "u": u})[name]
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float32)
        odd = ~np.isfinite(rounded)
        np.testing.assert_array_equal(first[odd], rounded[odd])
        bound = (
            np.abs(rounded).astype(np.float64) * 2.0**-24
            + n * np.abs(u[np.isfinite(u)], dtype=np.float64).max(initial=0) * 2.0 ** -(60 - n.bit_length())
            + 2.0**-149
        )
        assert (np.abs(first[~odd] - exact[~odd]) <= bound[~odd]).all()
        assert np.array_equal(first.view(np.uint32), run(module, {"i": i, "u": u}, seed=5)[name].view(np.uint32))


@pytest.mark.parametrize("combine", ["sum", "amax", "prod"])
@pytest.mark.parametrize("how", ["segmented", "privatized"])
def test_scatter_reduce(combine: str, how: str) -> None:
    graph = gradc.trace(
        lambda x, i, u: ops.scatter_reduce(x, 0, i, u, reduce=combine, include_self=False),
        x="f32[50,4]",
        i="i64[N,4]",
        u="f32[N,4]",
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": how})
    rng = np.random.default_rng(0)
    given = {
        "x": np.ones((50, 4), np.float32),
        "i": rng.integers(0, 40, (60, 4)),
        "u": rng.uniform(0.5, 1.5, (60, 4)).astype(np.float32),
    }
    (name,) = module.graph.output_names
    np.testing.assert_allclose(run(module, given)[name], interp.run(graph, given, precision="f64")[name], rtol=1e-6)


@long_tests.values
@pytest.mark.parametrize(("rows", "columns"), [(1, 100_000), (1000, 3), (300, 70), (5, 513), (1, 1), (2, 1500)])
def test_a_norm_and_its_column_sums(rows: int, columns: int, judged: Callable[..., None]) -> None:
    """Rows of every length: less than a warp, a warp, a block, many rounds of a block."""
    graph = differentiate(
        gradc.trace(lambda x, g, b: ops.layer_norm(x, (x.shape[-1],), g, b), x="f32[N,D]", g="f32[D]", b="f32[D]"),
        ["x", "g", "b"],
    )
    module = gradc.compile(graph, target="cuda-sim")
    fixed = gradc.compile(gradc.parse(str(graph)), target="cuda-sim", dims={"D": columns})
    dims = {"N": rows, "D": columns}
    judged(*simulated(module, dims), *simulated(fixed, dims))
    rng = np.random.default_rng(0)
    given = {
        n: rng.standard_normal((rows, columns) if n in ("x", "d.y") else columns).astype(np.float32)
        for n in graph.input_names
    }
    exact, plain = interp.run(graph, given, precision="f64"), interp.run(graph, given)
    for made in (module, fixed):
        got = run(made, given, seed=rows)
        for name, value in got.items():
            bound = max(16 * 2.0**-24 * np.abs(exact[name]).max(), 2 * np.abs(plain[name] - exact[name]).max())
            assert np.abs(value - exact[name]).max() <= bound, name


def test_a_sum_of_a_million_keeps_its_bits() -> None:
    """Sums are pairs: 2^20 terms lose nothing that one rounding would keep."""
    graph = gradc.trace(lambda x: ops.sum(x), x="f32[N]")
    with knobs.SIM_CHECK.set(False):
        module = gradc.compile(graph, target="cuda-sim")
        x = np.random.default_rng(0).uniform(0, 1, 1 << 20).astype(np.float32)
        (value,) = module.forward.run(x=x).values()
        assert abs(float(value) - x.astype(np.float64).sum()) <= np.spacing(np.float32(value)) / 2
        # ones beside 2^30 are lost in f32 additions; eight neighbours may be, for they are rounded together
        ones = np.ones(1 << 16, np.float32)
        ones[:16], ones[-16:] = 0, 0
        ones[[0, -1]] = 2.0**30, -(2.0**30)
        (value,) = module.forward.run(x=ones).values()
        assert float(value) == ones.sum(dtype=np.float64)
        rng = np.random.default_rng(1)
        mixed = (rng.choice([-1, 1], 1 << 16) * np.exp2(rng.uniform(-10, 24, 1 << 16))).astype(np.float32)
        (value,) = module.forward.run(x=mixed).values()
    exact, unit = mixed.astype(np.float64).sum(), 2.0**-24
    assert abs(float(value) - exact) <= unit * abs(exact) + 3 * unit * np.abs(mixed.astype(np.float64)).sum()


def test_fixed_point_beside_a_regular_order() -> None:
    """The largest value is looked for in every row, whatever order the other sum asks for."""
    graph = differentiate(
        gradc.trace(lambda x, g, p: x * ops.reshape(g, (1, 3, 1)) + p, x="f32[B,3,S]", g="f32[3]", p="f32[S]"),
        ["x", "g", "p"],
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"d.g": "regular", "d.p": "atomic_fixed"})
    rng = np.random.default_rng(0)
    given = {
        n: rng.standard_normal(graph.input(n).type.concrete({"B": 70, "S": 40})).astype(np.float32)
        for n in graph.input_names
    }
    given["d.y"][-1] *= 1e6
    exact = interp.run(graph, given, precision="f64")
    for name, value in run(module, given).items():
        assert np.abs(value - exact[name]).max() <= 16 * 2.0**-24 * np.abs(exact[name]).max(), name


def test_donated_memory() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N,C]"), target="cuda-sim", donate=["x"])
    x = np.zeros((3, 40), np.float32)
    (y,) = module.forward.run(x=x).values()
    assert np.shares_memory(x, y) and (y == 1).all()


@pytest.mark.parametrize(
    ("columns", "function"),
    [
        (64, lambda x, c, total: (total(x * c) + c, x)),
        (64, lambda x, c, total: (c * 0.5 + total(x), (x + total(x)) * c)),
        (3, lambda x, c, total: (c + total(x), ops.cumsum(x * c, axis=1))),
    ],
    ids=["read alone", "read for columns", "read before a scan"],
)
def test_donated_memory_that_all_threads_of_a_row_read(columns: int, function: Any) -> None:
    """None of them reads what one has stored there for the row: exchanges between lanes order no memory."""
    total = functools.partial(ops.sum, axis=1, keepdims=True)
    graph = gradc.trace(lambda x, c: function(x, c, total), x=f"f32[N,{columns}]", c="f32[N,1]")
    module = gradc.compile(graph, target="cuda-sim", donate=["c"])
    rng = np.random.default_rng(0)
    x, c = rng.standard_normal((6, columns)).astype("f4"), rng.standard_normal((6, 1)).astype("f4")
    wanted = gradc.compile(graph, target="numpy")(x=x, c=c.copy())
    found = module(x=x, c=c)
    assert np.shares_memory(found["y0"], c)
    for got, want in zip(found.values(), wanted.values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_bad_index_before_a_sort() -> None:
    module = gradc.compile(
        gradc.trace(lambda i, u: ops.scatter_add(i, u, size=30), i="i64[N]", u="f32[N,3]"),
        target="cuda-sim",
        reductions={"*": "segmented"},
    )
    with pytest.raises(IndexOutOfRange, match="index -1 at position 1"):
        module.forward.run(i=np.array([1, -1, 3]), u=np.ones((3, 3), np.float32))


# -- bad indices -------------------------------------------------------------------------------------------------------


def test_the_lowest_bad_index_is_named_and_nothing_is_written() -> None:
    module = gradc.compile(
        gradc.trace(lambda i, t: ops.embedding(i, t) * 2.0, i="i64[N]", t="f32[V,4]"), target="cuda-sim"
    )
    t, i, out = np.ones((10, 4), np.float32), np.arange(3000) % 10, np.full((3000, 4), 7, np.float32)
    i[2500], i[1777] = -1, 10
    for seed in (None, 1, 2, 3):
        module.forward.native.device.seed = seed
        with pytest.raises(IndexOutOfRange, match=r"index 10 at position 1777 of 'i' is out of range \[0, 10\)"):
            module.forward.run(i=i, t=t, out={"y": out})
    assert (out == 7).all()
    np.testing.assert_array_equal(module(i=i % 10, t=t), np.full((3000, 4), 2))  # and goes on


def test_offsets_that_decrease() -> None:
    graph = gradc.trace(lambda i, o, t: ops.embedding_bag(i, t, o, mode="sum"), i="i64[N]", o="i64[B]", t="f32[V,4]")
    given = {"i": np.zeros(9, np.int64), "o": np.array([0, 5, 3]), "t": np.ones((4, 4), np.float32)}
    with pytest.raises(gradc.errors.GradcError) as wanted:
        gradc.compile(graph)(**given)
    with pytest.raises(type(wanted.value)) as got:
        gradc.compile(graph, target="cuda-sim")(**given)
    assert str(got.value) == str(wanted.value)


# -- without a GPU -----------------------------------------------------------------------------------------------------

NVRTC = ("gradc/runtime/cuda/nvrtc.py", "gradc/runtime/host/toolchain.py")
"""What compiles a text, where nothing runs it."""


def program_of(name: str) -> Any:
    """Every second sample of an op with its gradients as one program for CUDA, in the op's own turn of the dtypes:
    samples of one dtype share kernels.
    """
    graphs = [joint(case) for case in list(cases([TURNS[NAMES.index(name) % 4]], names=[name]))[::2]]
    return gradc.compile(merged(name, [(f"s{k}", g) for k, g in enumerate(graphs)]), target="cuda").forward


@pytest.mark.long(*long_tests.COMPILER, *NVRTC, "tests/registry.py")
@pytest.mark.parametrize("name", [*compiled(OTHERS, turn=3), *POINTWISE[1::2]])
def test_nvrtc_takes_it_without_spills(name: str, judged: Callable[..., None]) -> None:
    """Every op's kernels; ops take turns in four dtypes and three architectures (the standard cases go through all).
    What computes in f32 has no f64 instruction.
    """
    pytest.importorskip("nvidia.cuda_nvrtc")
    from gradc.runtime.cuda.nvrtc import compile_cuda

    made = program_of(name)
    if not made.program.kernels:
        return
    arch = ARCHITECTURES[NAMES.index(name) % 3]
    judged(arch, str(made.program), anonymous(made.source))
    binary = compile_cuda(made.source, arch=arch, spills="error")
    assert binary.cubin[:4] == b"\x7fELF"
    types = {b.name: b.type for b in made.program.buffers}
    parts = dict(re.findall(r"\.entry (\w+)\((.*?)\n}\n", binary.ptx, re.DOTALL))
    for kernel in made.program.kernels:
        wide = any(types[b].dtype.name == "f64" for b in kernel.buffers) or any(
            s.dtype is not None and s.dtype.name == "f64" for s in kernel.body
        )
        for function in (f for f in parts if f.startswith(kernel.name)):
            assert wide or ".f64" not in parts[function], f"{function}\n{kernel}"


@pytest.mark.long(*long_tests.COMPILER, *NVRTC, "benchmarks/resources.py")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", resources.CASES)
def test_standard_cases_do_not_spill(name: str, arch: str, judged: Callable[..., None]) -> None:
    """Each for all architectures, the two dtypes in turns: docs/cuda.md has every pair."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    dtype = resources.DTYPES[(list(resources.CASES).index(name) + ARCHITECTURES.index(arch)) % 2]
    from gradc.runtime.cuda.nvrtc import compile_cuda

    sources = [executable.source for executable in resources.module(name, dtype, arch).executables.values()]
    judged(*map(anonymous, sources))
    for source in sources:
        found = compile_cuda(source, arch=arch, spills="error").kernels
        assert found and all(r.registers <= 128 for r in found.values())


@pytest.mark.long(*long_tests.COMPILER, "gradc/runtime/cuda", "benchmarks/network_cases.py")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_block_of_gpt2_does_not_spill(arch: str, judged: Callable[..., None]) -> None:
    """Gradients of its norms read and write twenty arrays: a thread has 168 registers, a multiprocessor 384 threads."""
    pytest.importorskip("nvidia.cuda_nvrtc")
    block = block_case("", "bf16", 8, 1024)
    module = gradc.compile(gradc.trace(block.ours, **block.types), wrt=block.wrt, target="cuda", arch=arch)
    judged(anonymous(module.backward.source))
    kernels = module.backward.binary.kernels
    assert not {name: r for name, r in kernels.items() if r.spill_stores or r.spill_loads}
    crowded = [r.registers for name, r in kernels.items() if "layer_norm" in name and r.registers > 128]
    assert len(crowded) == 2 and max(crowded) <= 168


def test_a_module_for_cuda_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    graph = gradc.trace(lambda i, w: ops.embedding(i, w), i="i64[N]", w="f32[V,64]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_80")
    assert (
        module.backward.binary.arch == "sm_80" and "__global__" in module.source() and "registers" in module.explain()
    )
    with pytest.raises(DeviceError):  # there is no GPU, or these are arrays of the host
        module(i=np.zeros(3, np.int64), w=np.zeros((4, 64), np.float32))
    with pytest.raises(Unsupported, match="target='cuda' has one"):
        _ = gradc.compile(graph).forward.binary
    with pytest.raises(InvalidProblem, match="arch='sm_90' is for the target 'cuda', not 'cpu'"):
        gradc.compile(graph, arch="sm_90")
    with pytest.raises((InvalidProblem, Unsupported), match="sm_12"):
        gradc.compile(graph, target="cuda", arch="sm_12")


def test_no_nvrtc(tmp_path: Path) -> None:
    module = gradc.compile(gradc.trace(lambda x: x * 2.0, x="f32[N]"), target="cuda")
    with knobs.NVRTC.set(str(tmp_path / "none.so")), pytest.raises(CompilerMissing):
        _ = module.forward.binary
    assert "__global__" in module.source()


def test_user_names_reach_the_text_as_identifiers() -> None:
    """Equal kernels differ in these alone, and a name that means something in CUDA is another word there."""
    plain = gradc.compile(
        gradc.trace(lambda pear, plum: ops.softmax(pear * plum), pear="f32[Rows,4]", plum="f32[4]"),
        wrt=["pear"],
        target="cuda",
    )
    other = gradc.compile(
        gradc.trace(lambda zebra, float: ops.softmax(zebra * float), zebra="f32[threadIdx,4]", float="f32[4]"),
        wrt=["zebra"],
        target="cuda",
    )
    assert list(plain.forward.kernels) == list(other.forward.kernels)
    words = {"zebra": "pear", "d_zebra": "d_pear", "float_": "plum", "threadIdx_": "Rows"}
    source = re.sub(r"\w+", lambda word: words.get(word[0], word[0]), other.source())
    place = re.compile(r"test_cuda\.py:\d+")
    assert place.sub("", source) == place.sub("", plain.source())
    assert set(words) <= set(re.findall(r"\w+", other.source()))
    assert render_cuda(plain.forward.program)[0] == plain.forward.source


@pytest.mark.parametrize("how", ["segmented", "privatized", "atomic_fixed", "atomic"])
def test_no_user_s_name_is_a_word_of_the_text(how: str) -> None:
    """What a kernel declares or calls, a buffer or dim of that name is renamed from."""
    graph = differentiate(
        gradc.trace(
            lambda tokens, weight: ops.layer_norm(ops.embedding(tokens, weight), (weight.shape[1],)),
            tokens="i64[Rows]",
            weight="bf16[Keys,Columns]",
        ),
        ["weight"],
    )
    program = gradc.compile(graph, target="cuda", reductions={"*": how}).forward.program
    for kernel in render_cuda(program)[1].values():
        text = re.sub(r"/\*.*?\*/", " ", kernel.text, flags=re.DOTALL)
        user = {*identifiers(kernel.buffers).values(), *identifiers(kernel.dims).values()}
        words = {w for w in re.findall(r"(?<![\w.])[A-Za-z_]\w*", text) if not w.startswith(kernel.name)}
        assert user <= words
        assert not {w for w in words - user if identifier(w) == w}


def test_names_that_mean_something_elsewhere() -> None:
    """Macros of C headers, words of CUDA and of the templates: a kernel over them compiles and adds them up."""
    names = (
        "NULL INFINITY NAN EOF errno assert stdout INT64_MAX M_PI HUGE_VAL RAND_MAX WNOHANG SIZE_MAX FE_INVALID"
        " alloca size_t threadIdx main signbit isnan x W c col shared even_cols sat_i32_f32 exp_f32 workspace"
        " dim0 v0 x0 for_"
    ).split()
    graph = gradc.trace(
        lambda **each: functools.reduce(lambda a, b: a + b, each.values()), **dict.fromkeys(names, "f32[threadIdx]")
    )
    module = gradc.compile(graph, target="cuda-sim")
    values = {name: np.full(3, i, np.float32) for i, name in enumerate(names)}
    (total,) = module.forward.run(values).values()
    np.testing.assert_array_equal(total, np.full(3, sum(range(len(names)))))
