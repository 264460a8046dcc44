"""What the CUDA kernels do with neighbouring columns, long rows, hot rows and sorts: in the simulator's checking mode,
against the NumPy meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.analysis.strategies import ON_GPU
from gradc.autodiff import differentiate
from gradc.codegen.cuda.launch import TREE, Launch, LaunchPlan
from gradc.codegen.cuda.render import render_cuda
from gradc.codegen.cuda.row_sort import ONE_BLOCK
from gradc.errors import Unsupported
from gradc.ir.program_text import parse_program
from gradc.passes.program.choose_reduction import choose_reduction
from gradc.runtime.executable import Executable
from gradc.targets.devices import device_for

FLOATS = ("f64", "f32", "bf16", "f16")
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
SIZES = (0, 1, 7, 33, 40)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """The same elements at an address that is off by so many."""
    room = np.zeros(array.size + by, array.dtype)
    room[by:] = array.reshape(-1)
    return room[by:].reshape(array.shape)


def agree(
    module: gradc.Module, graph: gradc.Graph, given: dict[str, np.ndarray], unit: float, seeds: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """The outputs, which are those of the graph in long double up to a few roundings, whatever the order of blocks."""
    got = {name: np.asarray(a) for name, a in module.forward.run(**given).items()}
    exact, plain = interp.run(graph, given, precision="longdouble"), interp.run(graph, given)
    for name, value in got.items():
        wanted = np.asarray(exact[name], np.longdouble)
        bound = max(
            8 * unit * np.abs(wanted).max(initial=0),
            2 * np.abs(np.asarray(plain[name], np.longdouble) - wanted).max(initial=0),
        )
        assert np.abs(value.astype(np.longdouble) - wanted).max(initial=0) <= bound, name
    for seed in seeds:
        module.forward.native.device.seed = seed
        again = {name: np.asarray(a) for name, a in module.forward.run(**given).items()}
        assert all(again[name].tobytes() == value.tobytes() for name, value in got.items())
    return got


def launches(module: gradc.Module, dims: dict[str, int]) -> list[Launch]:
    return [a for actions in module.forward.native.bind(dims).actions for a in actions if isinstance(a, Launch)]


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", ["C", 40, 33])
def test_rows_of_every_alignment(dtype: str, columns: Any) -> None:
    """A map, a softmax and a norm with its column sums: odd tails, odd offsets, nothing at all; and the bits do not
    depend on the address.
    """
    graph = differentiate(
        gradc.trace(
            lambda x, g: ops.softmax(ops.layer_norm(x, (x.shape[-1],), g, g)) * x,
            x=f"{dtype}[N,{columns}]",
            g=f"{dtype}[{columns}]",
        ),
        ["x", "g"],
    )
    module = gradc.compile(graph, target="cuda-sim")
    assert ("VEC = 1 " in module.forward.source) == (columns == 33) or dtype == "f64"
    rng = np.random.default_rng(0)
    for n in (0, 1, 7):
        for c in SIZES if columns == "C" else (columns,):
            if c == 0 and n > 0:
                continue
            given = {
                k: rng.standard_normal(graph.input(k).type.concrete({"N": n, "C": c})).astype(graph.input(k).dtype.np)
                for k in graph.input_names
            }
            first = agree(module, graph, given, 4 * UNIT[dtype])  # some twenty roundings, which nearly cancel
            moved = agree(
                module, graph, {k: shifted(a, i + 1) for i, (k, a) in enumerate(given.items())}, 4 * UNIT[dtype]
            )
            assert all(moved[k].tobytes() == a.tobytes() for k, a in first.items())


@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "i64", "bool", "bf16", "f64"])
def test_every_width_moves_whole(dtype: str) -> None:
    """Sixteen bytes at a time, or as many as eight elements have; the elements between are kept."""
    module = gradc.compile(
        gradc.trace(lambda x, y, p: ops.where(p, x, y), x=f"{dtype}[N,C]", y=f"{dtype}[N,C]", p="bool[N,C]"),
        target="cuda-sim",
    )
    assert int(re.findall(r"VEC = (\d+)", module.forward.source)[-1]) == (
        8 if module.graph.input("x").dtype.itemsize < 8 else 4
    )  # bool's, if registers are enough
    rng = np.random.default_rng(0)
    for n, c in ((3, 16), (3, 24), (2, 7), (1, 1), (5, 33), (0, 8)):
        for by in (0, 1):
            x, y, p = (
                rng.integers(0, 2, (n, c)).astype(t)
                for t in (module.graph.input("x").dtype.np, module.graph.input("x").dtype.np, bool)
            )
            out = shifted(np.zeros_like(x), by)
            module.forward.run(
                x=shifted(x, by), y=shifted(y, by), p=shifted(p, by), out={module.graph.output_names[0]: out}
            )
            np.testing.assert_array_equal(out, np.where(p, x, y))


def test_a_slice_is_read_where_it_lies() -> None:
    """Columns from an odd place on are no words; those from an even one are."""
    for first in (1, 8):
        graph = gradc.trace(lambda x, first=first: x[:, first : first + 16] * 2.0, x="f32[N,32]")
        module = gradc.compile(graph, target="cuda-sim")
        agree(module, graph, {"x": np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)}, UNIT["f32"])


def test_in_place_memory_is_not_declared_alone() -> None:
    """What a donated input shares with an output is not __restrict__; what nothing can be stored over is."""
    source = gradc.compile(gradc.trace(lambda x, g: ops.exp(x) * g, x="f32[N,C]", g="f32[C]"), target="cuda").source()
    (parameters,) = re.findall(r"_rows\(\n(.*?)const i64 dim0", source, re.DOTALL)
    assert re.findall(r"\*(__restrict__ )?const (\w+)", parameters) == [("", "x"), ("__restrict__ ", "g"), ("", "y")]


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", ["D", 40, 600])
def test_segments_are_held(dtype: str, columns: Any) -> None:
    """Rows scattered in sorted order, sums in registers, for every alignment; a hot row and rows that nobody hits."""
    graph = differentiate(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w=f"{dtype}[V,{columns}]"), ["w"])
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "segmented"})
    assert "gradc_get" in module.forward.source and "accum d.w" in str(module.forward.program)
    rng = np.random.default_rng(0)
    for n, v, d in ((0, 3, 40), (1, 1, 1), (7, 5, 7), (33, 4, 33), (150, 9, 40)):
        d = d if columns == "D" else columns
        given = {
            "t": np.where(rng.random(n) < 0.5, v - 1, rng.integers(0, v, n)),
            "w": np.zeros((v, d)),
            "d.y": rng.standard_normal((n, d)),
        }
        given = {k: a.astype(graph.input(k).dtype.np) for k, a in given.items()}
        first = agree(module, graph, given, UNIT[dtype], (1,))
        moved = agree(module, graph, {k: shifted(a, 1) for k, a in given.items()}, UNIT[dtype])
        assert all(moved[k].tobytes() == a.tobytes() for k, a in first.items())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_scattered_into_a_table(dtype: str) -> None:
    """Rows are normalised whole and added by segment: both in one kernel, held where the columns are known and few,
    else in memory.
    """
    for columns in ("D", 64):
        graph = differentiate(
            gradc.trace(
                lambda t, w, g: ops.layer_norm(ops.embedding(t, w), (w.shape[-1],), g, g),
                t="i64[N]",
                w=f"{dtype}[V,{columns}]",
                g=f"{dtype}[{columns}]",
            ),
            ["w", "g"],
        )
        module = gradc.compile(graph, target="cuda-sim", reductions={"d.w": "segmented"})
        rng = np.random.default_rng(0)
        for n, v, d in ((7, 5, 7), (40, 4, 33), (0, 2, 3)):
            d = 64 if columns == 64 else d
            given = {
                k: rng.standard_normal(graph.input(k).type.concrete({"N": n, "V": v, "D": d}))
                for k in graph.input_names
                if k != "t"
            } | {"t": rng.integers(0, v, n)}
            agree(
                module, graph, {k: a.astype(graph.input(k).dtype.np) for k, a in given.items()}, 4 * UNIT[dtype], (1,)
            )


@pytest.mark.parametrize("how", ["segmented", "privatized", "atomic_fixed", "atomic"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sums_of_16_bits_are_rounded_once(how: str, dtype: str) -> None:
    """No f32 result goes to memory and back, and each element is the f32 sum rounded."""
    graph = differentiate(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w=f"{dtype}[V,D]"), ["w"])
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": how})
    assert not module.forward.program.of_kind("temp") and "cast" not in [
        s.op for k in module.forward.program.kernels for s in k.accums
    ]
    rng, np_dtype = np.random.default_rng(0), graph.input("w").dtype.np
    given = {
        "t": rng.integers(0, 6, 300),
        "w": np.zeros((7, 12), np_dtype),
        "d.y": rng.integers(-64, 64, (300, 12)).astype(np_dtype),
    }
    total = np.zeros((7, 12), np.float32)
    np.add.at(total, given["t"], given["d.y"].astype(np.float32))  # whole numbers: exact in any order
    np.testing.assert_array_equal(np.asarray(module.forward.run(**given)["d.w"]), total.astype(np_dtype))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "i8", "i32", "i64"])
@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_single_elements_by_segment(dtype: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane has an element: pieces of segments meet in a warp, at a group's end, at a chunk's end; with few workers a
    chunk has several groups.
    """
    graph = gradc.trace(
        lambda x, i, u: ops.scatter_reduce(x, 0, i, u, reduce=reduce, include_self=False),
        x=f"{dtype}[V]",
        i="i64[N]",
        u=f"{dtype}[N]",
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "segmented"})
    assert "gradc_shuffle_up(value" in module.forward.source
    rng, np_dtype = np.random.default_rng(0), graph.input("u").dtype.np
    for n, v, workers in (
        (0, 5, 0),
        (1, 1, 0),
        (7, 3, 0),
        (33, 40, 0),
        (300, 7, 0),
        (2000, 900, 0),
        (700, 7, 2),
        (2000, 900, 3),
    ):
        if workers:
            monkeypatch.setattr("gradc.codegen.cuda.launch.GPU_WORKERS", workers)
        i = np.where(rng.random(n) < 0.5, min(2, v - 1), rng.integers(0, v, n))
        u = rng.integers(-9, 9, n).astype(np_dtype)  # whole numbers: sums are exact
        agree(module, graph, {"x": np.ones(v, np_dtype), "i": i, "u": u}, UNIT.get(dtype, 0.0), (1,))


def test_a_hot_row_is_added_up_as_a_tree() -> None:
    """Half of all positions on one row: its pieces are added up in groups of chunks, in an order that no launch
    changes.
    """
    graph = differentiate(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,4]"), ["w"])
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "segmented"})
    rng = np.random.default_rng(0)
    n, v = 3 * TREE * 8 + 5, 6
    for t in (np.full(n, 2), np.where(rng.random(n) < 0.8, 3, rng.integers(0, v, n))):
        given = {"t": t, "w": np.zeros((v, 4), np.float32), "d.y": rng.standard_normal((n, 4)).astype(np.float32)}
        agree(module, graph, given, UNIT["f32"], (1, 2))
    assert any(launch.function.endswith("_tree") for launch in launches(module, {"N": n, "V": v}))
    assert not any(launch.function.endswith("_tree") for launch in launches(module, {"N": 40, "V": v}))


# -- sorts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "keys", "checks"),
    [
        (2, 3, True),
        (1000, 5, True),
        (ONE_BLOCK, 300, False),
        (ONE_BLOCK + 1, 300, False),
        (17_000, 70_000, True),
        (70_000, 9, False),
    ],
)
def test_sorts_of_every_length_are_stable(rows: int, keys: int, checks: bool) -> None:
    """One block or passes of 9 bits: rows of one place are added in their order, which a sum of f32 in one chunk
    shows.
    """
    graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, size=keys), i="i64[N]", u="i64[N]")
    with knobs.SIM_CHECK.set(checks):
        module = gradc.compile(graph, target="cuda-sim", reductions={"*": "segmented"})
        rng = np.random.default_rng(rows)
        i, u = rng.integers(0, keys, rows), rng.integers(-(2**40), 2**40, rows)
        wanted = np.zeros(keys, np.int64)
        np.add.at(wanted, i, u)
        (got,) = module.forward.run(i=i, u=u).values()
    np.testing.assert_array_equal(got, wanted)
    made = [launch.function for launch in launches(module, {"N": rows})]
    assert ("gradc_sort_block" in made) == (rows <= ONE_BLOCK) and made.count("gradc_sort_move") == (
        0 if rows <= ONE_BLOCK else -(-(keys - 1).bit_length() // 9)
    )


# -- long rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "softmax", "argmax", "layer_norm"])
@pytest.mark.parametrize("of", ["f32[N]", "f64[N]", "bf16[N]", "f32[R,20000]"])
def test_few_long_rows_are_cut_up(op: str, of: str) -> None:
    """Each pass is a function over strips; short rows, or many, stay whole. Nothing of it depends on the order of
    blocks.
    """
    graph = gradc.trace(
        lambda x: ops.layer_norm(x, (x.shape[-1],)) if op == "layer_norm" else getattr(ops, op)(x), x=of
    )
    module = gradc.compile(graph, target="cuda-sim")
    rng = np.random.default_rng(0)
    for n, cut in ((1, False), (40, False), (16384, False), (20001, True)) if "N" in of else ((1, True), (3, True)):
        shape = (n,) if "N" in of else (n, 20000)
        cut = cut and not (op == "sum" and "R" in of)  # which flattens it
        if n == 16384 and op != "sum":
            continue
        x = rng.uniform(0.5, 1.5, shape).astype(graph.input("x").dtype.np)  # sums that lose nothing
        agree(module, graph, {"x": x}, 4 * UNIT[of.partition("[")[0]], (1,))
        made = [launch.function for launch in launches(module, {"N": n, "R": n})]
        assert any("_part" in name for name in made) == cut or (op, of) == ("sum", "f32[R,20000]"), made


# -- limits ------------------------------------------------------------------------------------------------------------


DIAGONAL = """program @p {
  input x: f32[B,N]
  output g: f32[N,N]
  kernel @k_0 rows(b: B, n: N) cols() {
    %0 = load x[b, n] : f32
    accum g[n, n] <- %0 : f32
  }
  return g=g
}
"""


@pytest.mark.parametrize("rows", [3, 50])
def test_a_diagonal_is_cleared_beside_itself(rows: int) -> None:
    program = choose_reduction(
        parse_program(DIAGONAL.replace("B,N", f"{rows},N").replace("b: B", f"b: {rows}")),
        device=device_for("sm_90"),
        force={"*": "regular"},
        available=ON_GPU,
    )
    assert "strategy(g: regular)" in str(program)
    x = np.random.default_rng(0).integers(-9, 9, (rows, 5)).astype(np.float32)
    for target in ("cuda-sim", "cpu"):
        g = np.full((5, 5), 7, np.float32)
        with knobs.SIM_CHECK.set(True):
            Executable(program, target).run(x=x, out={"g": g})
        np.testing.assert_array_equal(g, np.diag(x.sum(0)))


def test_owned_sums_in_memory_wait_only_for_wider_ones() -> None:
    """Rows that meet in an owner's elements, whose columns each belong to one thread: a barrier between rows is for
    sums in wider rows beside the result, which other threads round.
    """
    types = {f"x{dtype}": f"{dtype}[B,6,D]" for dtype in ("f64", "f32", "bf16")}
    graph = gradc.trace(lambda **x: {f"y{n}": ops.sum(ops.softmax(a) * a, axis=1) for n, a in x.items()}, **types)
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "regular"})
    assert {how for k in module.forward.program.kernels for _, how in k.strategy} == {"regular"}
    waits = {name: "the next row may add" in k.source for name, k in module.kernels.items() if "softmax" in name}
    assert sorted(waits.values()) == [False, False, True], waits
    for columns in (7, 40, 600):
        rng = np.random.default_rng(columns)
        given = {
            name: rng.standard_normal((3, 6, columns)).astype(type_.dtype.np)
            for name, type_ in ((n.attrs["name"], n.type) for n in graph.inputs)
        }
        agree(module, graph, given, UNIT["bf16"], seeds=(1,))


def test_what_a_sort_cannot_count_is_refused() -> None:
    graph = differentiate(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,4]"), ["w"])
    module = gradc.compile(graph, target="cuda", reductions={"*": "segmented"})
    LaunchPlan(module.forward.program, render_cuda(module.forward.program)[1], {"N": 2**31 - 3, "V": 2**31 - 3})
    for n, v in ((2**31 - 2, 5), (5, 2**32)):
        with pytest.raises(Unsupported, match=rf"a segmented sum over {max(n, v)} rows.*it counts to 2147483645"):
            module.forward.workspace_size(N=n, V=v)


def test_more_blocks_than_a_grid_has_are_several_launches() -> None:
    """Each launch is told its first block, so that every block of all of them has a number of its own."""
    module = gradc.compile(gradc.trace(lambda x: ops.softmax(x), x="f32[N,4096]"), target="cuda")
    rows = 2**32 + 5
    found = [
        a
        for actions in LaunchPlan(module.forward.program, render_cuda(module.forward.program)[1], {"N": rows}).actions
        for a in actions
        if isinstance(a, Launch)
    ]
    assert [(a.blocks, a.args[-1]) for a in found] == [
        (2**31 - 1, 0),
        (2**31 - 1, 2**31 - 1),
        (rows - 2 * (2**31 - 1), 2 * (2**31 - 1)),
    ]


def test_rows_side_by_side_add_four_columns_before_they_meet_a_sum() -> None:
    """Any number of columns, against long double: at most u |sum| + 3 u (sum of all |terms|), the same bits again."""
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x, axes=(1,)), x="f32[B,C,N]"), target="cuda-sim")
    (kernel,) = module.kernels.values()
    assert "gradc_pairwise" in kernel.source
    rng = np.random.default_rng(0)
    for columns in (0, 1, 3, 4, 5, 33, 130):
        shape = (2, columns, 40)
        x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
        wide, got = x.astype(np.longdouble), np.asarray(module(x=x))
        exact = wide.sum(1)
        bound = UNIT["f32"] * (np.abs(exact) + 3 * np.abs(wide).sum(1)) * (1 + 2.0**-20)
        assert (np.abs(got - exact) <= bound).all(), columns
        assert got.tobytes() == np.asarray(module(x=x)).tobytes()
