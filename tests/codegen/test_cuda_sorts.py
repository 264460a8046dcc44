"""The stable sort of rows by key on the simulator, against NumPy's stable argsort and searchsorted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradc
from gradc import knobs, ops
from gradc.analysis.strategies import passes
from gradc.codegen.cuda.actions import ALIGN, FLAG, U32, U64, WORKSPACE, Launch, Part
from gradc.codegen.cuda.render import prelude
from gradc.codegen.cuda.row_sort import BOUNDS, FEW_TILES, ONE_BLOCK, TILE, RowSort
from gradc.codegen.text import standalone
from gradc.errors import IndexOutOfRange, NotAscending
from gradc.runtime.cuda.device import Span
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import device_for

pytestmark = pytest.mark.optimised

FINE = 2**64 - 1


@pytest.fixture(scope="module", params=[None, 3], ids=["checked", "shuffled"])
def device(request: pytest.FixtureRequest) -> Simulator:
    """Of the sort alone: with races, unwritten values and bounds looked for, or with blocks in a random order."""
    text = prelude() + standalone("cuda/sort.cu")
    return Simulator(text, check=request.param is None, seed=request.param)


def launched(device: Simulator, sort: RowSort, key: np.ndarray, flag: int = FINE) -> list[np.ndarray]:
    """The arrays of a sort after its launches."""
    size = sort.bytes + 4 * sort.counts + ALIGN
    memory = {WORKSPACE: device.memory(size), FLAG: device.memory(64)}
    device.upload(memory[FLAG].address, np.full(8, flag, np.uint64))

    def span(part: Part) -> Span:
        return Span(memory[part.root].address + part.start, part.count, part.dtype)

    counts, bad = Part(WORKSPACE, sort.bytes, sort.counts, U32), Part(FLAG, 0, 8, U64)
    starts = np.cumsum([0, *(-(-4 * count // ALIGN) * ALIGN for count in sort.arrays)])
    arrays = [Part(WORKSPACE, int(start), count, U32) for start, count in zip(starts, sort.arrays, strict=False)]
    device.upload(span(arrays[2 if sort.moves % 2 else 0]).address, key)
    for launch in sort.launches(lambda start, count: Part(WORKSPACE, start, count, U32), counts, (bad, 1)):
        args = [span(a) if isinstance(a, Part) else a for a in launch.args]
        device.launch(launch.function, launch.blocks, launch.threads, args, launch.written)
    return [device.read(span(a)) if a.count else np.empty(0, np.uint32) for a in arrays]


def check(device: Simulator, key: np.ndarray, keys: int, masked: bool = False) -> None:
    key = key.astype(np.uint32)
    sort = RowSort(len(key), keys, masked=masked)
    made, order, *_, start = launched(device, sort, key)
    wanted = np.argsort(key, kind="stable")
    np.testing.assert_array_equal(order, wanted)
    np.testing.assert_array_equal(made, key[wanted])
    np.testing.assert_array_equal(start, np.searchsorted(key[wanted], np.arange(keys + 2)))


def drawn(rows: int, keys: int, masked: bool = False) -> np.ndarray:
    return np.random.default_rng(rows + keys).integers(0, keys + masked, rows)


EDGES = (4095, 4096, 4097, ONE_BLOCK - 1, ONE_BLOCK, ONE_BLOCK + 1, 2 * TILE + 33)


@pytest.mark.parametrize("rows", [0, 1, 31, 1000, *EDGES])
def test_any_number_of_rows(device: Simulator, rows: int) -> None:
    for keys in (1, 1000) if rows <= 4096 else (1000,):
        check(device, drawn(rows, keys), keys)


@pytest.mark.parametrize("keys", [1, 2, 511, 512, 513, BOUNDS - 2, BOUNDS - 1, BOUNDS, 2**18 - 1, 2**18, 2**18 + 1])
def test_any_number_of_keys(device: Simulator, keys: int) -> None:
    for masked in (False, True):
        check(device, drawn(300, keys, masked), keys, masked)


def test_keys_of_every_width_in_passes(device: Simulator) -> None:
    for keys in (1, 513, 2**18 + 1):
        check(device, drawn(ONE_BLOCK + 100, keys, True), keys, True)


def test_many_tiles_are_scanned(device: Simulator) -> None:
    if device.check:
        pytest.skip("300 thousand rows")
    rows = FEW_TILES * TILE + 100
    check(device, drawn(rows, 70_000), 70_000)
    sort = RowSort(rows, 70_000)
    made = [launch.function for launch in launches(sort)]
    assert made.count("gradc_sort_scan") == 2


def test_skewed_keys(device: Simulator) -> None:
    """Nearly all rows have one key; or one is alone at either end of many that none has."""
    rows, rng = ONE_BLOCK + 5000, np.random.default_rng(0)
    for keys in (3, 5000):
        check(device, np.where(rng.random(rows) < 0.95, keys // 2, rng.integers(0, keys, rows)), keys)
    for key in (0, 99_999):
        check(device, np.full(700, key), 100_000)


def test_the_widest_keys(device: Simulator) -> None:
    """Sorted by all bits; starts of so many keys would be too much to look at."""
    key = np.random.default_rng(0).integers(0, 2**32 - 1, 5000).astype(np.uint32)
    sort = RowSort(len(key), 2**32 - 1, masked=True)
    assert sort.digits == (4, 8)
    block = launches(sort)[0]
    memory = [device.memory(4 * len(key)) for _ in range(2)] + [device.memory(64)]
    device.upload(memory[0].address, key)
    device.upload(memory[2].address, np.full(8, FINE, np.uint64))
    spans = [Span(memory[i].address, len(key), U32) for i in range(2)]
    numbers = [a for a in block.args[2:] if isinstance(a, int)]
    device.launch(block.function, 1, block.threads, [*spans, *numbers[:3], Span(memory[2].address, 8, U64), 0], (0, 1))
    np.testing.assert_array_equal(device.read(spans[1]), np.argsort(key, kind="stable"))


def test_rows_in_groups_are_sorted_once(device: Simulator) -> None:
    """As if all of them were."""
    for rows, keys, groups, masked in ((0, 4, 2, False), (50, 7, 3, True), (3000, 600, 2, False)):
        key = drawn(rows, keys, masked).astype(np.uint32)
        sort = RowSort(rows * groups, keys * groups, groups, masked)
        *_, made, order, start = launched(device, sort, key)
        all_ = np.where(key[:, None] < keys, key[:, None] * groups + np.arange(groups), keys * groups).reshape(-1)
        wanted = np.argsort(all_, kind="stable")
        np.testing.assert_array_equal(made, all_[wanted])
        real = all_[wanted] < keys * groups
        np.testing.assert_array_equal(order[real], wanted[real])
        np.testing.assert_array_equal(np.sort(order), np.arange(rows * groups))
        np.testing.assert_array_equal(start, np.searchsorted(all_[wanted], np.arange(keys * groups + 2)))


def test_a_call_that_has_failed_sorts_nothing(device: Simulator) -> None:
    key = drawn(500, 20).astype(np.uint32)
    for rows in (500, ONE_BLOCK + 500):
        key = drawn(rows, 20).astype(np.uint32)
        sort = RowSort(rows, 20)
        first = launched(device, sort, key, flag=5)
        np.testing.assert_array_equal(first[2 if sort.moves % 2 else 0], key)


# -- launches ----------------------------------------------------------------------------------------------------------


def launches(sort: RowSort) -> list[Launch]:
    none = Part(WORKSPACE, 0, 1, U32)
    return sort.launches(lambda start, count: Part(WORKSPACE, start, count, U32), none, (none, 0))


def counted(rows: int, keys: int, groups: int = 1) -> int:
    return len(launches(RowSort(rows, keys, groups)))


def test_launches() -> None:
    """One block to 8192 rows, two passes to 2^18 keys; a scan of its own where there are more tiles than a block
    looks at; one for where keys start.
    """
    assert counted(8192, 32_000) == counted(8192, 2**31) == 2
    assert counted(8193, 128_256) == counted(16_384, 128_256) == 5
    assert counted(65_536, 512) == 3 and counted(65_536, 128_256) == counted(65_536, 2**18) == 5
    assert counted(1_000_000, 1_000_000) == 3 * 3 + 1 and counted(2**24, 128_256) == 2 * 3 + 1
    assert counted(65_536, 32_000) + 1 == counted(8 * 65_536, 8 * 32_000, groups=8)


def test_the_cost_model_counts_the_same() -> None:
    device = device_for("sm_90")
    assert device.one_block == ONE_BLOCK  # type: ignore[attr-defined]
    for keys in (1, 2, 512, 513, 2**18, 2**18 + 1, 2**27 + 1):
        assert RowSort(10**6, keys).digits[0] == max(1, passes(keys - 1))


# -- in a module -------------------------------------------------------------------------------------------------------


def test_scales_of_groups_are_sorted_by_row() -> None:
    """The gradient of a quantized table's scales, one for each group of columns: rows are sorted once, not once for
    each group; and the rows of the result, which are one element wide, are finished by a thread each.
    """

    graph = gradc.trace(
        lambda tokens, weight, scale: ops.embedding(
            tokens, ops.dequantize(weight, scale, block=(1, 64)), padding_idx=2
        ),
        tokens="i64[N]",
        weight="i8[V,192]",
        scale="f32[V,3]",
    )
    module = gradc.compile(graph, wrt=["scale"], target="cuda-sim", reductions={"*": "segmented"})
    rng = np.random.default_rng(0)
    for n, v in ((400, 7), (5, 3000), (0, 4)):
        tokens, weight = rng.integers(0, v, n), rng.integers(-127, 128, (v, 192)).astype(np.int8)
        dy = rng.standard_normal((n, 192)).astype(np.float32)
        wanted = np.zeros((v, 3))
        products = (dy.astype(np.float64) * weight[tokens]).reshape(n, 3, 64).sum(2)
        np.add.at(wanted, tokens, products * (tokens != 2)[:, None])
        _, residuals = module.forward(tokens=tokens, weight=weight, scale=np.ones((v, 3), np.float32))
        got = np.asarray(module.backward(residuals, dy)["scale"])
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(initial=1))
    actions = module.backward.native.bind({"N": 65_536, "V": 32_000}).actions
    made = [a for each in actions for a in each if isinstance(a, Launch)]
    (move, *_) = [a for a in made if a.function == "gradc_sort_move"]
    (finish,) = [a for a in made if a.function.endswith("_finish")]
    assert move.blocks == FEW_TILES and finish.blocks * finish.threads < 3 * 32_000 + finish.threads


def functions(module: gradc.Module, **dims: int) -> set[str]:
    actions = module.forward.native.bind(dims).actions
    return {a.function for each in actions for a in each if isinstance(a, Launch)}


@pytest.fixture
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


@functools.cache
def sums_of_segments(oob: Any) -> gradc.Module:
    def summed(o: Any, x: Any) -> Any:
        return ops.scatter_add(ops.segment_ids(o, size=x.shape[0], oob=oob), x, size=o.shape[0], oob="skip")

    graph = gradc.trace(summed, o="i64[B]", x="f32[N,8]")
    return gradc.compile(graph, target="cuda-sim", reductions={"*": "segmented"})


@pytest.mark.usefixtures("checked")
@settings(max_examples=20, deadline=None)
@given(
    n=st.sampled_from((0, 1, 31, 255, 256, 257, 1025)),
    b=st.sampled_from((1, 2, 33, 300, 1030)),
    seed=st.integers(0, 99),
)
@example(n=600, b=600, seed=-1)
def test_rows_in_the_order_of_their_keys_are_not_sorted(n: int, b: int, seed: int) -> None:
    """Empty segments, one of all rows, one for each row (seed -1)."""
    rng = np.random.default_rng(max(seed, 0))
    offsets = np.arange(n) if seed < 0 else np.sort(rng.integers(0, n + 1, b)) // (1 + seed % 3)
    offsets[0] = 0
    x = rng.standard_normal((n, 8)).astype(np.float32)
    wanted = np.zeros((b, 8))
    np.add.at(wanted, np.searchsorted(offsets, np.arange(n), side="right") - 1, x.astype(np.float64))
    for oob in ("error", "ascending"):
        found = sums_of_segments(oob)(o=offsets, x=x)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max(initial=1))


@pytest.mark.usefixtures("checked")
def test_which_rows_are_sorted() -> None:
    """Those before the first segment have no key, and come first; offsets that decrease are found before."""
    for oob in ("error", "ascending", "skip"):
        made = functions(sums_of_segments(oob), N=20_000, B=300)
        assert "gradc_sort_bounds" in made and ("gradc_sort_move" in made) == (oob == "skip")
    x = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    offsets = np.array([5, 5, 17])
    wanted = np.add.reduceat(x.astype(np.float64), [5, 17])
    found = sums_of_segments("skip")(o=offsets, x=x)
    np.testing.assert_allclose(found, [0 * wanted[0], *wanted], rtol=1e-6, atol=1e-6)
    for bad in ([0, 9, 3], [1, 2, 3], [0, 3, 41], [0, -(2**40), 2**40]):
        with pytest.raises((IndexOutOfRange, NotAscending)):
            sums_of_segments("error")(o=np.array(bad), x=x)


def test_a_scan_with_more_rows_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grid has a limit; threads go on to further rows, and the largest value is found wherever it is."""
    monkeypatch.setattr("gradc.codegen.cuda.launch.SCAN_BLOCKS", 2)
    graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, size=4), i="i64[N]", u="f32[N]")
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": "atomic_fixed"})
    u = np.ones(2000, np.float32)
    for at in (0, 700, 1999):
        values = u.copy()
        values[at] = 2.0**60  # an overflow, if its scale is made from less
        (got,) = module.forward.run(i=np.full(2000, 3), u=values).values()
        np.testing.assert_array_equal(got, np.float32([0, 0, 0, 2.0**60]))
    (scan,) = [a for each in module.forward.native.bind({"N": 2000}).actions for a in each if "_scan" in a.function]
    assert scan.blocks == 2
