"""Steps of a batch that are one launch on a GPU: what is started, and that it gives the bits of steps one by one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import gradc
from gradc import knobs, ops
from gradc.codegen.cuda.actions import FLAG, U8, U64, WORKSPACE, Launch, Part
from gradc.codegen.cuda.batches import HEAD, WORDS, together
from gradc.codegen.cuda.launch import LaunchPlan
from gradc.codegen.cuda.render import render_cuda
from gradc.errors import IndexOutOfRange


def functions(module: gradc.Module, **dims: int) -> Counter[str]:
    plan = module.forward.native.bind(dims)
    return Counter(a.function for actions in plan.actions for a in actions)


def one_by_one(module: gradc.Module, given: dict[str, Any]) -> dict[str, Any]:
    plain = gradc.Executable(replace(module.forward.program, batches=()), "cuda-sim")
    return dict(plain(**copy.deepcopy(given)))


def moved(x: Sequence[Any], g: Sequence[Any]) -> dict[str, Any]:
    return {f"x.{k}": a * 0.9 - 0.1 * b / (abs(a) + 1.0) for k, (a, b) in enumerate(zip(x, g, strict=True))}


SHAPES = [(3, 5), (7,), (0, 4), (1, 1, 9), (4096,), (5, 2049), (2, 3), (2, 5)]


def test_updates_of_any_shapes_are_one_launch() -> None:
    """Of arrays of no, of few and of many elements, and with symbols; the simulator checks every access."""
    types = [*(f"f32[{','.join(map(str, shape))}]" for shape in SHAPES[:-2]), "f32[N,3]", "f32[2,M]"]
    names = [f"x.{k}" for k in range(len(SHAPES))]
    rng = np.random.default_rng(0)
    given = {f"{side}.{k}": rng.standard_normal(s).astype(np.float32) for side in "xg" for k, s in enumerate(SHAPES)}
    with knobs.SIM_CHECK.set(True):
        module = gradc.compile(gradc.trace(moved, x=types, g=types), (), "cuda-sim", donate=names)
        found = dict(module(**copy.deepcopy(given)))
    alone = one_by_one(module, given)
    assert sorted(functions(module, N=2, M=5).values()) == [1, 1, 1]  # of numbers, and of each symbol
    for k, name in enumerate(names):
        a, b = given[name].astype(np.float64), given[f"g.{k}"].astype(np.float64)
        np.testing.assert_allclose(found[name], a * 0.9 - 0.1 * b / (abs(a) + 1.0), rtol=1e-5, atol=1e-6)
        assert found[name].tobytes() == np.asarray(alone[name]).tobytes()


@pytest.mark.parametrize("names", [("K", "A"), ("A", "K")])
def test_sizes_of_arrays_as_one_axis_stand_in_their_own_order(names: tuple[str, str]) -> None:
    """K * (A + 1) elements: the symbols of [K,A+1] in the order of its axes, and those of the product by name."""
    k, a = names
    shapes = [f"{k},{a}+1", f"{a}+1,{k}", f"1,{k},{a}+1", f"{k},1,{a}+1"]
    graph = gradc.trace(
        lambda x, u: {f"y.{n}": each * 2.0 + 1.0 for n, each in enumerate(x)} | {"u": u * u},
        x=[f"f32[{shape}]" for shape in shapes],
        u=f"f32[{a}]",
    )
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 6), (6, 2), (1, 2, 6), (2, 1, 6))]
    with knobs.SIM_CHECK.set(True):
        module = gradc.compile(graph, (), "cuda-sim")
        found = module(**{f"x.{n}": each for n, each in enumerate(given)}, u=np.zeros(5, np.float32))
    assert len({module.forward.native.kernels[kernel.name].text for kernel in module.forward.program.kernels[:4]}) == 1
    for n, each in enumerate(given):
        np.testing.assert_array_equal(found[f"y.{n}"], each * np.float32(2) + np.float32(1))


def test_a_parameter_has_room_for_so_many() -> None:
    types = [f"f32[{k + 40}]" for k in range(60)]
    graph = gradc.trace(moved, x=types, g=types)
    program = gradc.compile(graph, (), "cuda", arch="sm_90", donate=[f"x.{k}" for k in range(60)]).forward.program
    plan = LaunchPlan(program, render_cuda(program)[1], {})
    launches = [a for actions in plan.actions for a in actions if isinstance(a, Launch)]
    each = 1 + 3 + 1 + 5  # first block, arrays, size, and workspace, checks, chunk, aux, first block of a large grid
    room = (WORDS - HEAD - 1) // each
    assert [a.args[0] for a in launches] == [room, 60 - room]
    assert all(len(a.args) == WORDS + 1 and a.batch == WORDS for a in launches)


def gradients(tables: Sequence[Any], i: Any, g: Any) -> dict[str, Any]:
    """Table k is read at column k of the indices, as the bags of a recommender are."""
    read = [ops.embedding(ops.reshape(i[:, k : k + 1], i.shape[0]), table) for k, table in enumerate(tables)]
    return {"y": sum(ops.sum(rows * g[:, 4 * k : 4 * k + 4]) for k, rows in enumerate(read))}


ROWS = [40, 41, 300, 70000]


@pytest.fixture(scope="module")
def scattered() -> gradc.Module:
    graph = gradc.trace(gradients, tables=[f"f32[{n},4]" for n in ROWS], i="i64[N,4]", g="f32[N,16]")
    return gradc.compile(graph, ["tables"], "cuda-sim", reductions={"*": "segmented"})


def scatter_inputs(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    given: dict[str, Any] = {f"tables.{k}": np.ones((rows, 4), np.float32) for k, rows in enumerate(ROWS)}
    given["i"] = np.stack([rng.integers(0, rows, n) for rows in ROWS], axis=1)
    given["g"] = rng.integers(-8, 9, (n, 16)).astype(np.float32)
    return given


@pytest.mark.parametrize("n", [0, 1, 700])
def test_scatters_of_other_slices_into_tables_of_other_sizes(scattered: gradc.Module, n: int) -> None:
    """Their keys, sorts, sums and clears; sums of integers are exact in any order."""
    given = scatter_inputs(n)
    _, residuals = scattered.forward(**given)
    found = scattered.backward(residuals, np.float32(1))
    for k, rows in enumerate(ROWS):
        wanted = np.zeros((rows, 4))
        np.add.at(wanted, given["i"][:, k], given["g"][:, 4 * k : 4 * k + 4])
        np.testing.assert_array_equal(found[f"tables.{k}"], wanted)
    plan = scattered.backward.native.bind({"N": 700})
    counted = Counter(a.function for actions in plan.actions for a in actions)
    assert set(counted.values()) == {1} and "gradc_sort_block" in counted and plan.kernel


def test_an_index_out_of_range(scattered: gradc.Module) -> None:
    """Of several in one launch the error is of the first step's."""
    given = scatter_inputs(9)
    given["i"][5, 2], given["i"][3, 1] = 999, -1
    with pytest.raises(IndexOutOfRange, match="-1 at position 3"):
        scattered.forward(**given)


def launch(function: str, member: int, number: int) -> Launch:
    flag = Part(FLAG, 0, 5, U64)
    return Launch(function, 1 + member, 32, (Part(WORKSPACE, 8 * member, 1, U8), flag, number), (0, 1))


@hypothesis.given(
    strategies.lists(strategies.lists(strategies.sampled_from("abc"), max_size=6), min_size=1, max_size=5)
)
@hypothesis.example([[*"key", *"cmcm", "b"], [*"key", "s", "b"]])
@hypothesis.settings(max_examples=60)
def test_each_member_starts_what_it_would_in_its_order(members: list[list[str]]) -> None:
    given = [[launch(name, m, n) for n, name in enumerate(names)] for m, names in enumerate(members)]
    seen: list[list[str]] = [[] for _ in members]
    for joined in together(given):
        count, each, args = joined.args[0], 3, joined.args[HEAD:]
        assert isinstance(count, int) and joined.args[WORDS] == Part(FLAG, 0, 5, U64) and WORDS in joined.written
        blocks = 0
        for k in range(count):
            first, part, number = args[each * k : each * (k + 1)]
            assert isinstance(part, Part) and HEAD + each * k + 1 in joined.written and first == blocks
            member = part.start // 8
            assert number == len(seen[member])
            seen[member].append(joined.function)
            blocks += 1 + member
        assert args[each * count] == joined.blocks == blocks
    assert seen == members
    if len({*map(tuple, members)}) == 1:
        assert len(together(given)) == len(members[0])


def test_a_cpu_compiles_their_text_once() -> None:
    """The same graph: one function for the scatters of all slices, given what differs."""
    graph = gradc.trace(gradients, tables=["f32[300,4]"] * 4, i="i64[N,4]", g="f32[N,16]")
    module = gradc.compile(graph, ["tables"], "cpu", reductions={"*": "segmented"})
    scatters = [k for k in module.backward.program.kernels if k.accums]
    assert (
        len({k.name for k in scatters}) == 4
        and len({id(module.backward.native.kernels[k.name]) for k in scatters}) == 1
    )
    given = scatter_inputs(700) | {f"tables.{k}": np.ones((300, 4), np.float32) for k in range(4)}
    given["i"] %= 300
    found = module.backward(module.forward(**given)[1], np.float32(1))
    for k in range(4):
        wanted = np.zeros((300, 4))
        np.add.at(wanted, given["i"][:, k], given["g"][:, 4 * k : 4 * k + 4])
        np.testing.assert_array_equal(found[f"tables.{k}"], wanted)


@pytest.mark.parametrize(
    ("target", "rows", "width"),
    [("cpu", (5, 6, 7, 9), 1), ("cpu", (100, 255, 256, 300), 1), ("cuda-sim", (3, 4, 5), 5)],
)
def test_each_adds_up_as_it_would_alone(target: str, rows: Sequence[int], width: int) -> None:
    """A few rows in one type, more in another first: how many there are decides, whatever else is in the module."""
    rng = np.random.default_rng(1)
    given = [rng.standard_normal((n, 6, width)).astype(np.float32) for n in rows]

    def sums(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        graph = gradc.trace(
            lambda x: tuple(ops.sum(a * a, axis=(0, 2)) for a in x), x=[f"f32[{a.shape[0]},6,{width}]" for a in arrays]
        )
        found = gradc.compile(graph, (), target)(**{f"x.{k}": a for k, a in enumerate(arrays)})
        return list(found.values()) if len(arrays) > 1 else [found]

    for found, a in zip(sums(given), given, strict=True):
        np.testing.assert_array_equal(found, sums([a])[0])


def channel_sums(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[gradc.Module, list[Any]]:
    """A CPU's module of the sums of squares of each channel of each array, and these."""
    types = [f"f32[{','.join(map(str, a.shape))}]" for a in arrays]
    graph = gradc.trace(lambda x: tuple(ops.sum(a * a, axis=(0, 2, 3)) for a in x), x=types)
    module = gradc.compile(graph, (), "cpu")
    found = module(**{f"x.{k}": a for k, a in enumerate(arrays)})
    return module, list(found.values()) if len(arrays) > 1 else [found]


def texts_of_channel_sums(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many texts the sums of arrays of these shapes have, which are right, and to the bit what each has alone."""
    rng = np.random.default_rng(2)
    given = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    module, found = channel_sums(given)
    sums = [k for k in module.forward.program.kernels if k.row_order == "by owner"]
    assert len({k.name for k in sums}) == len(shapes)
    for value, a in zip(found, given, strict=True):
        np.testing.assert_array_equal(value, channel_sums([a])[1][0])
        np.testing.assert_allclose(value, (a.astype(np.float64) ** 2).sum((0, 2, 3)), rtol=1e-6)
    return len({id(module.forward.native.kernels[k.name]) for k in sums})


@pytest.mark.parametrize("width", [4, 16])
def test_a_cpu_compiles_sums_by_owner_once_for_any_number_of_owners(width: int) -> None:
    """The statistics of channels: one text, and the bits of a module that has but one of them."""
    assert texts_of_channel_sums([(2, channels, width, width) for channels in (24, 32, 40)]) == 1


def test_sums_share_a_text_where_they_are_added_up_in_the_same_order() -> None:
    """Up to four images are taken innermost, more outermost."""
    assert texts_of_channel_sums([(images, 24, 99, 16) for images in (2, 9, 11)]) == 2


def test_sizes_that_the_number_of_a_row_is_divided_by_are_in_the_text() -> None:
    """Rows of channels times images: a scale per channel, which no flat loop has."""
    shapes = [(2, channels, 60) for channels in (24, 32, 40)]
    types = {f"{side}.{k}": s if side == "x" else s[1:2] for k, s in enumerate(shapes) for side in "xs"}
    graph = gradc.trace(
        lambda x, s: tuple(ops.exp(a) * ops.reshape(b, (1, -1, 1)) for a, b in zip(x, s, strict=True)),
        x=[f"f32[{','.join(map(str, s))}]" for s in shapes],
        s=[f"f32[{s[1]}]" for s in shapes],
    )
    module = gradc.compile(graph, (), "cpu")
    maps = module.forward.program.kernels
    assert len({id(module.forward.native.kernels[k.name]) for k in maps}) == len({k.name for k in maps}) == 3
    rng = np.random.default_rng(3)
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in types.items()}
    for k, value in enumerate(module(**given).values()):
        wanted = np.exp(given[f"x.{k}"].astype(np.float64)) * given[f"s.{k}"][:, None]
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
