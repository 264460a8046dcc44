"""Rows that gather: what is asked for ahead changes no bit; bags add up a few rows in f32 at a time; packed values are
unpacked a block at a time.
"""

from typing import Any

import long_tests
import numpy as np
import pytest
from agreement import merged

import gradc
from gradc import interp, knobs, ops
from gradc.analysis.chunks import chunk_rows
from gradc.codegen.cpu.certain_masks import without_certain_masks
from gradc.ir.kernel import Kernel
from gradc.ir.types import DTYPES
from gradc.ops.elementwise.bits import PACKED
from gradc.runtime.host import pool


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def source_of(module: gradc.Module) -> str:
    return "".join(k.source for k in module.kernels.values())


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place, certain",
    [
        (lambda i, x: ops.gather(x, i, axis=0, oob="clamp"), True),
        (lambda i, x: ops.gather(x, ops.sum(i, axis=1), axis=0, oob="clamp"), False),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 5])
def test_clamped_places_need_no_masks_where_their_axis_has_elements(place: Any, certain: bool, size: int) -> None:
    """Along columns as many as the axis has elements; a sum over none of them is still a place."""
    module = gradc.compile(gradc.trace(place, i="i64[M,V]", x="f32[V]"), target="cpu")
    (kernel,) = (step for step in module.forward.program.steps if isinstance(step, Kernel))
    masked = [any(s.op == "in_bounds" for s in k.body) for k in (kernel, without_certain_masks(kernel))]
    assert masked == [True, not certain]
    i, x = np.arange(-3, 4 * size - 3).reshape(4, size), np.arange(1, size + 1, dtype=np.float32)
    at = np.clip(i if certain else i.sum(1), 0, size - 1)
    np.testing.assert_array_equal(module(i=i, x=x), x[at] if size else np.zeros(at.shape, np.float32))


# -- asked for ahead ---------------------------------------------------------------------------------------------------


def test_what_is_asked_for_ahead() -> None:
    def compiled(function: Any, wrt: str | tuple[()] = (), **types: str) -> str:
        return source_of(gradc.compile(gradc.trace(function, **types), wrt=wrt, target="cpu"))

    gather, ahead = (lambda i, w: ops.embedding(i, w)), "__builtin_prefetch(w + (i64)v0"
    # a line each, and the one in which a row ends that begins within a line
    lines = compiled(gather, i="i64[N]", w="f32[V,64]")
    assert lines.count(ahead) == 5
    assert "if ((u64)(w + (i64)v0 * 64) % 64) __builtin_prefetch(w + (i64)v0 * 64 + 63, 0, 2);" in lines
    assert "% 64)" not in compiled(gather, i="i64[N]", w="f32[V,65]")  # its rows begin anywhere
    assert compiled(gather, i="i64[N]", w="f32[V,2000]").count(ahead) == 9  # no more of a long row
    assert compiled(gather, i="i64[N]", w="f32[V,D]").count(ahead) == 2
    assert ahead not in compiled(gather, i="i64[N]", w="f32[40,64]")  # a small table is near
    assert ahead not in compiled(gather, i="i64[N]", w="f32[V,3]")  # of short rows several are under way
    assert "prefetch" not in compiled(lambda x: ops.exp(x), x="f32[N,64]")
    of_upstream = compiled(gather, "w", i="i64[N]", w="f32[V,64]")
    assert "order[q + GRADC_AHEAD]" in of_upstream
    by_offsets = compiled(lambda i, w, o: ops.embedding_bag(i, w, o), "w", i="i64[N]", w="f32[V,64]", o="i64[B]")
    for block in by_offsets.split("GRADC_AHEAD")[1:]:
        assert "search_" not in block.split("phase")[0]  # a search is not done twice
    with knobs.BOUNDS.set(True):
        assert ahead not in compiled(gather, i="i64[N]", w="f32[V,64]")
    # a row's windows follow from its number: they lie beside those of the row before
    pooled = compiled(lambda x: ops.max_pool2d(x, 3, 2, 1), "x", x="f32[N,64,112,112]")
    assert "GRADC_AHEAD" not in pooled


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    """Against f64, with the same bits for any number of threads and with every access checked."""
    table, width, before = 5000, 37, pool.num_threads()
    graph = gradc.trace(lambda i, w: ops.embedding_bag(i, w, mode=mode), i="i64[B,L]", w="f32[V,37]")
    module = gradc.compile(graph, wrt="w", target="cpu")
    with knobs.BOUNDS.set(True):
        checked = gradc.compile(graph, wrt="w", target="cpu")
    for bags, length in ((0, 3), (1, 1), (1, 40), (3, 0), (5, 2), (40, 7), (9, 16), (300, 17), (6, 65)):
        random, what = rng(bags, length), f"{bags} bags of {length}"
        given = {
            "i": random.integers(0, table, (bags, length)),
            "w": random.standard_normal((table, width)).astype(np.float32),
        }
        rows = given["w"].astype(np.float64)[given["i"]]
        wanted = np.zeros((bags, width)) if not length else getattr(rows, mode)(axis=1)
        y, residuals = module.forward(**given)
        np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=2e-6 * max(1, length) ** 0.5, err_msg=what)
        upstream = random.standard_normal((bags, width)).astype(np.float32)
        gradient = module.backward(residuals, upstream)["w"]
        try:
            for threads in (1, 2, 5):
                pool.set_num_threads(threads)
                again, residuals = module.forward(**given)
                assert again.tobytes() == y.tobytes(), (what, threads)
                assert module.backward(residuals, upstream)["w"].tobytes() == gradient.tobytes(), (what, threads)
        finally:
            pool.set_num_threads(before)
        assert checked(**given).tobytes() == y.tobytes(), what


def test_many_members_are_added_in_f64() -> None:
    """2^24 + 1 + 1 + ... loses every 1 in f32, and 16 of them at most where they are added up first."""
    given = {"i": np.r_[0, np.ones(4096, np.int64)][None], "w": np.repeat([[2.0**24], [1.0]], 16, 1).astype(np.float32)}
    given["w"] = np.concatenate([given["w"], np.zeros((5000, 16), np.float32)])
    module = gradc.compile(gradc.trace(lambda i, w: ops.embedding_bag(i, w, mode="sum"), i="i64[B,L]", w="f32[V,16]"))
    assert "several" in source_of(module)
    assert np.all(np.abs(module(**given) - (2.0**24 + 4096)) <= 16)


# -- packed values -----------------------------------------------------------------------------------------------------


@long_tests.values
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("low_first", [True, False])
def test_packed_rows(dtype: str, low_first: bool) -> None:
    """Against the interpreter: maps, gathers, sums of a row, softmax (several passes), short rows and long."""
    counts = [1, 3, 32, 129, 4500]

    def values(q: Any) -> Any:
        return ops.cast(ops.unpack(q, dtype=dtype, low_nibble_first=low_first), "f32")

    functions = {
        "map": lambda q, i, scale: values(q) * scale,
        "gather": lambda q, i, scale: ops.embedding(i, values(q)),
        "row": lambda q, i, scale: ops.amax(values(q) * scale, axis=1),
        "passes": lambda q, i, scale: values(q) - ops.amax(values(q), axis=1, keepdims=True),
        "column": lambda q, i, scale: ops.amin(values(q) * scale, axis=0),
    }
    types = {"C": {"q": "u8[V,C]", "scale": "f32[V,1]"}}
    types |= {str(count): {"q": f"u8[7,{count}]", "scale": "f32[7,1]"} for count in counts}
    parts = {(n, k): gradc.trace(f, i="i64[B,L]", **t) for n, f in functions.items() for k, t in types.items()}
    module = gradc.compile(merged("packed", ((f"{n}_{k}", graph) for (n, k), graph in parts.items())), target="cpu")
    sources = {buffer: k.source for k in module.kernels.values() for buffer in k.kernel.buffers}
    for symbolic in counts:
        given = {count: packed(count, low_first) for count in counts}
        of = {(n, k): given[symbolic if k == "C" else int(k)] for n, k in parts}
        found = module.forward.run(
            {f"{n}_{k}.{name}": of[n, k][name] for (n, k), graph in parts.items() for name in graph.input_names}
        )
        for (n, k), graph in parts.items():
            if symbolic != counts[0] and k != "C":  # as before
                continue
            wanted = interp.run(graph, {name: of[n, k][name] for name in graph.input_names})["y"]
            np.testing.assert_array_equal(found[f"{n}_{k}.y"], wanted, err_msg=f"{n} {k} {symbolic}")
            assert n == "column" or k == "1" or "unpacked" in sources[f"{n}_{k}.q"], (n, k)


def packed(count: int, low_first: bool) -> dict[str, np.ndarray]:
    """Seven rows of bytes, of which five bags of three are looked up."""
    random = rng(count, low_first)
    q = random.integers(0, 256, (7, count)).astype(np.uint8)
    i = random.integers(0, 7, (5, 3))
    return {"q": q, "i": i, "scale": random.standard_normal((7, 1)).astype(np.float32)}


@pytest.mark.parametrize("dtype", ["u4", "u2"])
def test_columns_that_end_within_a_byte(dtype: str) -> None:
    """A slice of the unpacked row, its sum, and the row from its end on."""
    per = {"u4": 2, "u2": 4}[dtype]

    def write(q: gradc.Node, s: gradc.Node) -> tuple[gradc.Node, ...]:
        row = ops.cast(ops.unpack(q, dtype=dtype, axis=1), "f32") * s
        last = 7 * per - 1
        return row[:, :last], ops.sum(row[:, :last], axis=1), row[:, 1:], ops.flip(row, axis=(1,))

    graph = gradc.trace(write, q="u8[V,7]", s="f32[V,1]")
    draw = np.random.default_rng(0)
    given = {"q": draw.integers(0, 256, (50, 7)).astype("u1"), "s": draw.uniform(0.5, 1, (50, 1)).astype("f4")}
    wanted = interp.run(graph, given)
    for name, value in gradc.compile(graph, wrt=[], target="cpu")(**given).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)


def test_a_bag_of_packed_rows() -> None:
    random = rng(1)
    q, i = random.integers(0, 256, (900, 20)).astype(np.uint8), random.integers(0, 900, (33, 19))
    scale = random.standard_normal((900, 1)).astype(np.float32)

    def bag(q: Any, i: Any, s: Any) -> Any:
        return ops.embedding_bag(i, ops.dequantize(ops.unpack(q, dtype="i4"), s, block=(1, 40)), mode="sum")

    module = gradc.compile(gradc.trace(bag, q="u8[V,20]", i="i64[B,L]", s="f32[V,1]"), target="cpu")
    codes = np.stack([q & 15, q >> 4], -1).reshape(900, 40).astype(np.int64)
    codes -= 16 * (codes > 7)
    wanted = (codes * scale.astype(np.float64))[i].sum(1)
    np.testing.assert_allclose(module(q=q, i=i, s=scale), wanted, rtol=1e-5, atol=1e-4)
    assert "unpacked" in source_of(module)


# -- rows of one segment -----------------------------------------------------------------------------------------------


def _by_offsets(
    lengths: np.ndarray, first: int, indices: np.ndarray, table: np.ndarray, weights: Any = 1
) -> np.ndarray:
    """The sum of each bag in f64."""
    sums = np.zeros((lengths.size, table.shape[1]))
    np.add.at(sums, np.repeat(np.arange(lengths.size), lengths), (table[indices[first:]].T * weights).T)
    return sums


@long_tests.values
@pytest.mark.parametrize("width", [1, 3, 8, 37, 64, 130])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_rows_of_a_segment_are_added_together(width: int, mode: str, dtype: str) -> None:
    """Bags of 0 to 300 rows, with padding and without: against f64, the same bits for any number of threads, and with
    every access checked, which adds one row after another.
    """
    random = rng(width, 7)
    lengths = np.concatenate([random.integers(0, 12, 90), [0, 300, 0, 1, 4, 5, 64, 0], random.integers(0, 3, 40), [0]])
    offsets, count = np.cumsum(lengths) - lengths, int(lengths.sum())
    table = random.standard_normal((500, width)).astype(DTYPES[dtype].np)
    indices = random.integers(0, 500, count)
    indices[::9] = 3
    graphs = {
        f"padding{padding}": gradc.trace(
            lambda i, w, o, padding=padding: ops.embedding_bag(i, w, o, mode=mode, padding_idx=padding),
            i="i64[N]",
            w=f"{dtype}[V,{width}]" if width != 37 else f"{dtype}[V,D]",
            o="i64[B]",
        )
        for padding in (None, 3)
    }
    graph = merged("bags", graphs.items())
    arrays = {f"{part}.{name}": a for part in graphs for name, a in (("i", indices), ("w", table), ("o", offsets))}
    module = gradc.compile(graph, target="cpu", reductions={"*": "segmented"})
    results = []
    before = pool.num_threads()
    for threads in (1, 3):
        pool.set_num_threads(threads)
        results.append(module.forward.run(arrays))
    pool.set_num_threads(before)
    with knobs.BOUNDS.set(True):
        results.append(gradc.compile(graph, target="cpu", reductions={"*": "segmented"}).forward.run(arrays))
    for padding in (None, 3):
        found = [np.asarray(result[f"padding{padding}.y"]) for result in results]
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        wide = table.astype(np.float64)
        if padding is not None:
            wide[padding] = 0
        want = _by_offsets(lengths, 0, indices, wide)
        if mode == "mean":
            members = _by_offsets(
                lengths, 0, indices, np.ones((500, 1)) if padding is None else np.arange(500)[:, None] != 3
            )
            want /= np.maximum(members, 1)
        unit = {"f32": 2.0**-24, "f64": 2.0**-53, "bf16": 2.0**-8}[dtype]
        scale = _by_offsets(lengths, 0, indices, np.abs(wide))
        assert np.all(
            np.abs(found[0].astype(np.float64) - want) <= 64 * min(unit, 2.0**-24) * scale + unit * np.abs(want)
        )


@pytest.mark.parametrize("kind", ["i32", "i64", "u8"])
@pytest.mark.parametrize("bags", ["some", "most empty", "unsorted", "late"])
def test_a_search_goes_on_where_the_last_one_ended(kind: str, bags: str) -> None:
    """Also where offsets do not ascend, or begin behind the first rows: as a search for each position by itself."""
    random, most = rng(5), 250 if kind == "u8" else 9000
    offsets = np.sort(random.integers(0, most, 60_000 if bags == "most empty" else 200))
    if bags == "unsorted":
        offsets = random.permutation(offsets)
        offsets[::3] = 100
    elif bags != "late":
        offsets[0] = 0
    x = random.integers(-9, 9, (9100, 5)).astype(np.float32)  # exact in any order
    graph = gradc.trace(
        lambda x, o: ops.scatter_add(
            ops.segment_ids(o, size=x.shape[0], oob="skip"), x, axis=0, size=o.shape[0], oob="skip"
        ),
        x="f32[N,5]",
        o=f"{kind}[B]",
    )
    arrays = {"x": x, "o": offsets.astype(DTYPES[kind].np)}
    module = gradc.compile(graph, target="cpu", reductions={"*": "segmented"})
    assert "gradc_found_" in source_of(module)
    (want,) = interp.run(graph, arrays).values()
    np.testing.assert_array_equal(module(**arrays), want)


def test_a_row_is_added_by_vectors() -> None:
    """Nothing in the loop over a row's columns asks whether the row has a key, where none without one is visited."""
    graph = gradc.trace(lambda i, w: ops.embedding(i, w), i="i64[N]", w="f32[V,64]")
    source = source_of(gradc.compile(graph, wrt="w", target="cpu"))
    assert "target0" in source and "if (valid)" not in source
    by_offsets = gradc.trace(lambda i, w, o: ops.embedding_bag(i, w, o), i="i64[N]", w="f32[V,64]", o="i64[B]")
    module = gradc.compile(by_offsets, target="cpu", reductions={"*": "segmented"})
    (kernel,) = (k for k in module.kernels.values() if k.name.startswith("embedding_bag"))  # no other counts members
    assert "sum0[e] = " in kernel.source and "search_" not in kernel.source.split("_rows(const void")[1]


LENGTHS = {
    "some": lambda random: random.integers(0, 9, 300),
    "none": lambda random: np.zeros(50, int),
    "few rows": lambda random: np.r_[np.zeros(5, int), 5000, np.zeros(7, int), 3, 0],
    "one": lambda random: np.array([70_000]),
    "short": lambda random: random.integers(0, 3, 20_000),
}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("bags", LENGTHS)
def test_bags_by_offsets_need_no_order(bags: str, kind: str, mode: str) -> None:
    """Checked offsets say where a bag's rows lie: nothing is sorted, and no row is searched for."""
    random = rng(7)
    lengths = LENGTHS[bags](random)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(DTYPES[kind].np)
    indices = random.integers(0, 1000, lengths.sum()).astype(DTYPES[kind].np)
    table = random.standard_normal((1000, 136), np.float32)  # a block of 128 columns, or two, and one of 8
    graph = gradc.trace(
        lambda i, w, o: ops.embedding_bag(i, w, o, mode=mode), i=f"{kind}[N]", w="f32[V,136]", o=f"{kind}[B]"
    )
    module = gradc.compile(graph, target="cpu", reductions={"*": "segmented"})
    assert "gradc_key_of" in source_of(module) and "gradc_sort(" not in source_of(module)
    found, before = [], pool.num_threads()
    for threads in (1, 3):
        pool.set_num_threads(threads)
        found.append(np.asarray(module(i=indices, w=table, o=offsets)))
    pool.set_num_threads(before)
    np.testing.assert_array_equal(*found)
    want = np.zeros((len(lengths), 136))
    np.add.at(want, np.repeat(np.arange(len(lengths)), lengths), table[indices].astype(np.float64))
    want /= np.maximum(lengths, 1)[:, None] if mode == "mean" else 1
    np.testing.assert_allclose(found[0], want, rtol=0, atol=64 * 2.0**-24 * np.abs(want).max(initial=1))


@pytest.mark.parametrize("width", [64, 200])
def test_segments_as_long_as_a_chunk_and_longer(width: int) -> None:
    """A segment of a chunk's length at most is whole in the task where it begins, whatever chunks it lies in: rows are
    neither left out nor added twice.  Of small whole numbers every order gives the same sums.
    """
    random, forced = rng(width), {"*": "segmented"}
    chunk = chunk_rows(4096, width)
    around = [chunk * k + more for k in (1, 2, 3) for more in (-1, 0, 1)]
    lengths = [1, *around, 0, chunk, chunk, 0, 5 * chunk + 3, chunk - 2, 1, 1, chunk + 2, 2 * chunk, chunk - 1, 3]
    types = {"i": "i64[N]", "w": f"f32[V,{width}]"}
    scaled = gradc.trace(lambda i, w, g: ops.embedding(i, w) * g, **types, g=f"f32[{width}]")
    rows = gradc.compile(scaled, wrt=("w", "g"), target="cpu", reductions=forced)
    assert "gradc_first_of(start" in source_of(rows)  # one row after another, for they are added up elsewhere, too
    summed = gradc.trace(lambda i, w, o: ops.embedding_bag(i, w, o, mode="sum"), **types, o="i64[B]")
    bags = gradc.compile(summed, wrt=("w",), target="cpu", reductions=forced)
    for shift in range(0, 2 * chunk, max(1, chunk // 7)):  # where chunks cut them
        counts = np.array([shift, *lengths])
        offsets, keys = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
        table, dy, scale = (
            random.integers(-4, 5, shape).astype(np.float32)
            for shape in ((len(counts), width), (len(keys), width), width)
        )
        indices, want = random.permutation(keys), np.zeros((3, len(counts), width))
        np.add.at(want[0], indices, dy * scale)
        np.add.at(want[1], keys, table[indices])
        np.add.at(want[2], indices, dy[: len(counts)][keys])
        _, residuals = rows.forward(i=indices, w=table, g=scale)
        gradients = rows.backward(residuals, dy)
        np.testing.assert_array_equal(gradients["w"], want[0])
        np.testing.assert_array_equal(gradients["g"], (dy * table[indices]).sum(0, dtype=np.float64))
        y, residuals = bags.forward(i=indices, w=table, o=offsets)
        np.testing.assert_array_equal(y, want[1])
        np.testing.assert_array_equal(bags.backward(residuals, dy[: len(counts)])["w"], want[2])


def test_bags_in_order_are_segments() -> None:
    """Rows in the order of their keys cost little to sort: 50 to a bag are no reason for partial results."""
    graph = gradc.trace(
        lambda i, w, o: ops.embedding_bag(i, w, o, mode="sum"), i="i64[204800]", w="f32[V,64]", o="i64[4096]"
    )
    text = str(gradc.compile(graph, target="cpu").forward.program)
    assert "strategy(y: segmented)" in text and "privatized" not in text


# -- tables of bytes ---------------------------------------------------------------------------------------------------


@long_tests.values
@pytest.mark.parametrize("kind", ["u8", "i8", "u4", "i4"])
@pytest.mark.parametrize("width", [8, 36, 64, 106, "D"])
def test_bags_of_bytes(kind: str, width: Any) -> None:
    """Scales and biases for each row: against f64, by offsets and without, empty bags, bags of more than one run, with
    the same bits for any number of threads and with every access checked.
    """
    random, per, columns = rng(8), 2 if kind[1:] == "4" else 1, 106 if width == "D" else width
    lengths = np.concatenate([random.integers(0, 9, 30), [0, 16, 17, 70, 0]])
    count, offsets = int(lengths.sum()), np.cumsum(lengths) - lengths
    stored = random.integers(0, 256, (300, columns // per)).astype(np.uint8)
    codes = stored.astype(np.int64) if per == 1 else np.stack([stored & 15, stored >> 4], -1).reshape(300, columns)
    codes = codes.astype(np.int64) - (
        (256 if per == 1 else 16) * (codes > (127 if per == 1 else 7)) if kind[0] == "i" else 0
    )
    scale, bias = random.standard_normal((2, 300, 1)).astype(np.float32)
    table = codes * scale.astype(np.float64) + bias
    of = f"{'u8' if per == 2 else kind}[V,{'C' if width == 'D' else columns // per}]"

    def bag(q: Any, s: Any, b: Any, i: Any, o: Any = None) -> Any:
        values = ops.unpack(q, dtype=kind) if per == 2 else q
        return ops.embedding_bag(i, ops.cast(values, "f32") * s + b, o, mode="sum")

    indices = random.integers(0, 300, count)
    shared = {"q": stored.view(np.int8) if kind == "i8" else stored, "s": scale, "b": bias}
    types = {"q": of, "s": "f32[V,1]", "b": "f32[V,1]"}
    square = indices[: count // 21 * 21].reshape(-1, 21)
    for given, more, wanted in (
        ({"i": indices, "o": offsets}, {"i": "i64[N]", "o": "i64[B]"}, _by_offsets(lengths, 0, indices, table)),
        ({"i": square}, {"i": "i64[B,L]"}, table[square].sum(1)),
        ({"i": square[:, :0]}, {"i": "i64[B,L]"}, np.zeros((len(square), columns))),
    ):
        graph = gradc.trace(bag, **types, **more)
        reductions = {"*": "segmented"} if "o" in given else {}
        module = gradc.compile(graph, target="cpu", reductions=reductions)
        found, before = [], pool.num_threads()
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            found.append(np.asarray(module(**shared, **given)))
        pool.set_num_threads(before)
        with knobs.BOUNDS.set(True):
            found.append(np.asarray(gradc.compile(graph, target="cpu", reductions=reductions)(**shared, **given)))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-3)
        assert width == 8 or "gradc_floats_" in source_of(module)  # short rows are several under way by themselves


def test_a_gradient_by_offsets_searches_once_for_each_row() -> None:
    """Rows in the order of their keys read what was found along with these."""
    graph = gradc.trace(lambda i, w, o: ops.embedding_bag(i, w, o, mode="sum"), i="i64[N]", w="f32[V,64]", o="i64[B]")
    module = gradc.compile(graph, wrt="w", target="cpu", reductions={"*": "segmented"})
    (kernel,) = (k for k in module.backward.kernels.values() if "grad" in k.name)
    assert "gradc_found_i64" in kernel.source and "search_i64(" not in kernel.source


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("more", [-2, 0, 3])
def test_fewer_and_more_keys_than_segments(target: str, more: int) -> None:
    """Of segments that ascend: those behind the last key are left out, keys behind the last segment have no rows."""
    offsets = np.array([0, 0, 4, 9, 9, 30, 31])

    def summed(o: Any, x: Any) -> Any:
        segment = ops.segment_ids(o, size=x.shape[0], oob="ascending")
        return ops.scatter_add(segment, x, size=o.shape[0] + more, oob="skip")

    module = gradc.compile(gradc.trace(summed, o="i64[B]", x="f64[N,8]"), target=target, reductions={"*": "segmented"})
    x = rng(more + 2, 3).standard_normal((40, 8))
    exact = np.zeros((len(offsets) + 3, 8), np.longdouble)
    np.add.at(exact, np.searchsorted(offsets, np.arange(40), side="right") - 1, x)
    wanted = exact[: len(offsets) + more].astype(np.float64)
    np.testing.assert_allclose(module(o=offsets, x=x), wanted, 1e-13, 1e-13)
