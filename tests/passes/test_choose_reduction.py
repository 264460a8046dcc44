"""Which strategy a combine gets, that the pick follows the shape, and that every strategy is right."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gradc
from benchmarks.streams import STREAMS
from gradc import ops
from gradc.analysis.chunks import MOST_PARTIALS
from gradc.analysis.combine import HostScatter, combines
from gradc.analysis.cost import MOST_SORTED, check_sorts, estimates
from gradc.analysis.strategies import ON_GPU, STRATEGIES
from gradc.codegen.cpu.program import condition
from gradc.errors import Unsupported
from gradc.ir.dims import symbol
from gradc.ir.kernel import Select
from gradc.ir.program_text import parse_program
from gradc.ir.sample import Sample, sampled
from gradc.passes.program.choose_reduction import choose_reduction, decisions, host_cases
from gradc.runtime.host.toolchain import compile_c, load_library
from gradc.targets.calibration import measured_file
from gradc.targets.devices import CPU, Cpu, calibrated, calibration_text, device_for


def embedding_gradient(size: str) -> gradc.Module:
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table=f"f32[{size},8]")
    return gradc.compile(graph, wrt=["table"])


def pick(module: gradc.Module, **dims: int) -> list[str]:
    return [how for _, _, how, _ in decisions(module.backward.program, dims or None)]


def test_the_pick_follows_the_shape_and_the_c_differs() -> None:
    small, large = embedding_gradient("19"), embedding_gradient("32000")
    assert (
        pick(small) == ["privatized"]
        and pick(large, N=8192) == ["segmented"]
        and pick(large, N=500_000) == ["privatized"]
    )
    assert "gradc_sort" not in "".join(k.source for k in small.backward.kernels.values())
    assert "gradc_sort" in "".join(k.source for k in large.backward.kernels.values())


def test_a_symbolic_table_keeps_both_and_chooses_at_the_call() -> None:
    module = embedding_gradient("V")
    (select,) = [s for s in module.backward.program.steps if isinstance(s, Select)]
    found = [(str(when), *(how for _, how in kernel.strategy)) for when, kernel in select.cases]
    few = "V >= 157 and N <= 427956 and V <= 174762"
    sorts = f"{few} or V >= 157 and 4096*V >= 2509*N+1 and V <= 262144 or V >= 157 and 2048*V >= 2509*N+1"
    assert found == [(sorts, "segmented"), ("None", "privatized")]
    assert len({kernel.name for _, kernel in select.cases}) == 2
    rng = np.random.default_rng(0)
    for size in (5, 4000):
        tokens = rng.integers(0, size, 300)
        table = rng.standard_normal((size, 8)).astype(np.float32)
        y, residuals = module.forward(tokens=tokens, table=table)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        want = np.zeros(table.shape)
        np.add.at(want, tokens, dy.astype(np.float64))
        np.testing.assert_allclose(module.backward(residuals, dy)["table"], want, atol=2e-5)


@pytest.mark.parametrize("strategy", ["privatized", "segmented"])
@pytest.mark.parametrize("rows", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("hot", [False, True])
def test_forced_strategies_agree(strategy: str, rows: int, hot: bool) -> None:
    graph = gradc.trace(
        lambda tokens, table: ops.embedding(tokens, table, padding_idx=3), tokens="i64[N]", table="f64[50,5]"
    )
    module = gradc.compile(graph, wrt=["table"], reductions={"*": strategy})
    assert pick(module) == [strategy]
    rng = np.random.default_rng(1)
    tokens = np.where(rng.random(rows) < 0.5, 7, rng.integers(0, 50, rows)) if hot else rng.integers(0, 50, rows)
    table = rng.standard_normal((50, 5))
    _, residuals = module.forward(tokens=tokens, table=table)
    dy = rng.standard_normal((rows, 5))
    want = np.zeros((50, 5))
    np.add.at(want, tokens[tokens != 3], dy[tokens != 3])
    out = {"table": np.full((50, 5), np.nan)}
    np.testing.assert_allclose(module.backward(residuals, dy, out=out)["table"], want, atol=1e-12)


@pytest.mark.parametrize("strategy", ["privatized", "regular"])
def test_a_broadcast_gradient_is_regular_or_privatized(strategy: str) -> None:
    graph = gradc.trace(lambda x, b: x * b[:, None, :], x="f32[A,B,3]", b="f32[A,3]")
    module = gradc.compile(graph, wrt=["b"], reductions={"*": strategy})
    assert pick(module) == [strategy]
    rng = np.random.default_rng(2)
    x, b, dy = (
        rng.standard_normal((9, 40, 3)).astype("f4"),
        rng.standard_normal((9, 3)).astype("f4"),
        rng.standard_normal((9, 40, 3)).astype("f4"),
    )
    _, residuals = module.forward(x=x, b=b)
    np.testing.assert_allclose(module.backward(residuals, dy)["b"], (x * dy).sum(1), rtol=1e-5, atol=1e-5)


def test_a_strategy_that_cannot_be_is_refused_by_name() -> None:
    graph = gradc.trace(lambda x, b: x * b, x="f32[N,3]", b="f32[3]")
    with pytest.raises(Unsupported, match=r"the combine into d\.b cannot be segmented: its index allows privatized"):
        gradc.compile(graph, wrt=["b"], reductions={"d.b": "segmented"})
    with pytest.raises(Unsupported, match="the reduction 'atomic'"):
        gradc.compile(graph, wrt=["b"], reductions={"*": "atomic"})


def test_explain_shows_the_table() -> None:
    text = embedding_gradient("32000").explain(N=8192)
    assert (
        "combine into d.table" in text
        and "-> segmented" in text
        and "8192 rows sorted by index, each result row written once" in text
    )


def test_a_sort_beyond_32_bits_is_refused_before_it_runs() -> None:
    """The same error from every way to ask, and none where the sizes pick a kernel that sorts nothing."""
    program = embedding_gradient("V").backward.program
    check_sorts(program, {"N": MOST_SORTED, "V": MOST_SORTED})
    check_sorts(program, {"N": MOST_SORTED + 1, "V": 10})  # which is privatized
    sorting = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,8]")
    for target in ("cpu", "cuda-sim", "numpy"):
        backward = gradc.compile(sorting, wrt=["table"], target=target, reductions={"*": "segmented"}).backward
        for sizes, what in (
            ({"N": MOST_SORTED + 1, "V": 10}, f"{MOST_SORTED + 1} rows;"),
            ({"N": 10, "V": 2**31}, "2147483648 rows of its result;"),
        ):
            with pytest.raises(Unsupported, match=what):
                backward.workspace_size(**sizes)
            with pytest.raises(Unsupported, match=what):
                check_sorts(backward.program, sizes)


TWO_KEYS = """program @p {
  input s: i64[N]
  input t: i64[N]
  input x: f32[N,5]
  output a: f32[9,5]
  output b: f32[9,5]
  CHECKS
  kernel @k rows(n: N) cols(d: 5) {
    %0 = load s[n] : i64
    %1 = load t[n] : i64
    phase
    %2 = load x[n, d] : f32
    accum a[%0, d] <- %2 : f32
    accum b[%1, d] <- %2 : f32
  }
  return a=a, b=b
}"""


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
@pytest.mark.parametrize("keys", [("s", "t"), ("s", "s")])
def test_rows_are_visited_in_one_order(keys: tuple[str, str], target: str) -> None:
    """Two sums by different keys in one kernel: the rows are sorted by one of them, and the other sum does without an
    order.
    """
    checks = "\n".join(
        f'kernel @c{k} rows() cols(n: N) {{\n %0 = load {k}[n] : i64\n check %0 {{bound=9, op="gather",'
        f' source="{k}"}}\n}}'
        for k in "st"
    )
    text = TWO_KEYS.replace("CHECKS", checks).replace("accum b[%1", "accum b[%1" if keys[1] == "t" else "accum b[%0")
    on = {"device": device_for("sm_90"), "available": ON_GPU} if target == "cuda-sim" else {}
    program = choose_reduction(parse_program(text), force={"*": "segmented"}, **on)  # type: ignore[arg-type]
    (kernel,) = (k for k in program.kernels if k.accums)
    assert sorted(how == "segmented" for how in dict(kernel.strategy).values()) == [keys[0] == keys[1], True]
    rng = np.random.default_rng(3)
    s, t, x = rng.integers(0, 9, 200), rng.integers(0, 9, 200), rng.integers(-9, 9, (200, 5)).astype(np.float32)
    got = gradc.Executable(program, target).run(s=s, t=t, x=x)
    for name, index in (("a", s), ("b", {"s": s, "t": t}[keys[1]])):
        want = np.zeros((9, 5), np.float32)
        np.add.at(want, index, x)
        np.testing.assert_array_equal(np.asarray(got[name]), want)


def test_the_estimate_has_the_partial_results_that_the_c_makes() -> None:
    """Rows per task are one formula: explain counts what a kernel takes memory for."""
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,D]")
    backward = gradc.compile(graph, wrt=["table"], target="cpu", reductions={"*": "privatized"}).backward
    types = {b.name: b.type for b in backward.program.buffers}
    (kernel,) = (k for k in backward.program.kernels if k.accums)
    for dims in (
        {"N": n, "V": v, "D": d}
        for n in (1, 100, 255, 4096, 65_536, 1_000_000)
        for v, d in ((3, 1), (25, 16), (1000, 16), (25, 100), (7, 5000), (60_000, 80))
    ):
        (private,) = (
            e for e in estimates(kernel, combines(kernel, types)[0], types, dims) if e.strategy == "privatized"
        )
        chunks = int(private.why.split()[0])
        values = (ctypes.c_int64 * 3)(*(dims[name] for name in backward.program.dims))
        partials = chunks * dims["V"] * dims["D"] * 8
        assert partials <= backward.native.library.gradc_scratch(values) < partials + 4096, dims
        assert f"{chunks} partials" in gradc.compile(graph, wrt=["table"], target="cpu").explain(**dims)
        assert dims != {"N": 4096, "V": 25, "D": 16} or chunks == 32


@pytest.mark.parametrize(("columns", "enough"), [(16, 1101), (64, 90)])
def test_sorting_pays_from_where_partial_results_cost_more(columns: int, enough: int) -> None:
    """11 ns a row, less 0.15 an element of it, against 1 ns per element and chunk: 8.6 elements and 1.4 per row of a
    chunk, of which 4096 rows of so many columns have 128 and 64.
    """
    for rows, how in (((enough - 1) // columns, "privatized"), (-(-enough // columns), "segmented")):
        graph = gradc.trace(
            lambda i, u, rows=rows: ops.scatter_add(i, u, axis=0, size=rows), i="i64[4096]", u=f"f32[4096,{columns}]"
        )
        assert [picked for _, _, picked, _ in decisions(gradc.compile(graph, target="numpy").forward.program)] == [how]


@pytest.mark.parametrize(
    ("dtype", "strategy", "deterministic"),
    [("f32", "atomic_fixed", True), ("f32", "atomic", False), ("i32", "atomic", True), ("f32", "segmented", True)],
)
def test_what_is_deterministic_is_said_alike(dtype: str, strategy: str, deterministic: bool) -> None:
    """The cost model and the precision of an executable read one record."""
    graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, axis=0, size=9), i="i64[N]", u=f"{dtype}[N,4]")
    forward = gradc.compile(graph, target="cuda-sim", reductions={"*": strategy}).forward
    assert forward.precision.deterministic is deterministic and forward.precision.bit_stable is deterministic
    (picked,) = (
        e
        for _, _, _, table in decisions(forward.program, device=device_for("sm_90"))
        for e in table
        if e.strategy == strategy
    )
    assert picked.deterministic is deterministic


ANOTHER = Cpu(sort=7e-9, gathered=-0.1e-9, partial=0.7e-9, missed=0.3e-9, cached=1 << 20)
"""A CPU whose sums in registers are worth more than a sort, of wide rows."""


@pytest.mark.parametrize("cols", [1, 8, 64, 128, 5000])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("device", [CPU, ANOTHER], ids=["listed", "another"])
def test_the_cases_pick_what_the_estimates_say(device: Cpu, ordered: bool, cols: int, static: bool) -> None:
    """For rows of several chunks, where the two costs are more than a third apart; of results of a few elements, and of
    more than all partial results may have.
    """
    found = functools.cache(lambda size: host_cases(symbol("N"), cols, size, device, ordered))
    sizes_of_results = [int(2 ** (s / 5)) for s in range(5, 130)]
    assert sizes_of_results[-1] > 8 * MOST_PARTIALS
    for rows, size in itertools.product((int(2 ** (n / 2)) for n in range(22, 50)), sizes_of_results):
        cases = found(size if static else symbol("S"))
        how = next(how for when, how in cases if when is None or when.holds({"N": rows, "S": size}))
        sizes = HostScatter(rows, cols, size, 4, 4 * rows * cols, 1, ordered=ordered)
        costs = {
            name: (s.host or pytest.fail)(sizes, device)[1] - (size + rows * cols) * 4 / device.bandwidth
            for name, s in STRATEGIES.items()
            if name in ("segmented", "privatized")
        }
        costs["segmented"] -= 8 * rows / device.bandwidth  # the sort's own reading and writing is in its time
        best = min(costs, key=costs.__getitem__)
        assert how == best or max(costs.values()) < 1.34 * min(costs.values()), (rows, cols, size, costs, how)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("streams-*.json")), ids=lambda path: path.stem)
def test_regret_over_streams_that_were_measured(path: Path) -> None:
    """What is picked by a processor's constants and a sample of each stream, held against the times that
    ``benchmarks.streams`` took there.
    """
    content = json.loads(path.read_text())
    constants = measured_file(CPU, content["machine"]["cpu"])
    device = calibrated(CPU, constants) if constants.is_file() else CPU
    sample = Sample("skew", "locality", "i")
    select = functools.cache(lambda width: host_cases(symbol("N"), width, width * symbol("V"), device, sample=sample))
    regrets = []
    for r in content["streams"]:
        if r["threads"] == 1 and len(r["us"]) > 1:
            sizes = {"N": r["count"], "V": r["table"], "skew": r["skew"], "locality": r["locality"]}
            how = next(how for when, how in select(r["width"]) if when is None or when.holds(sizes))
            regrets.append(r["us"][how] / min(r["us"].values()) - 1)
    assert sum(regrets) / len(regrets) <= 0.02
    assert max(regrets) <= 0.10


def test_rows_that_a_sample_alone_weighs() -> None:
    """Where sorted rows take no longer by themselves, and the result's sizes are numbers, the number of rows is in a
    condition only as a factor of what the sample says: it is a size, still.
    """
    device = replace(CPU, gathered=-1e-9, skew=1e-8)
    found = host_cases(symbol("N"), 128, 9 * 128, device, sample=Sample("skew", "locality", "i"))
    picks = lambda rows, skew: next(
        how for when, how in found if when is None or when.holds({"N": rows, "skew": skew, "locality": 0})
    )
    assert [picks(1 << 20, skew) for skew in (0, 1024)] == ["segmented", "privatized"]


@pytest.mark.parametrize("name", ["criteo 290", "grid smooth 256 x 256"])
def test_files_of_streams_say_what_their_indices_do(name: str) -> None:
    for path in RESULTS.glob("streams-*.json"):
        for r in json.loads(path.read_text())["streams"]:
            if (r["stream"], r["width"]) == (name, 64):
                index = STREAMS[name].draw(np.random.default_rng(0), r["count"])
                assert sampled(index) == (r["skew"], r["locality"]), (path, r["count"])


def test_a_calibration_decides_and_the_same_one_decides_alike(tmp_path: Path) -> None:
    """The select of a program follows from shapes and constants: it is the text's, whatever was compiled before."""
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens="i64[N]", table="f32[V,64]")
    path = tmp_path / "cpu.json"
    path.write_text(calibration_text(CPU, {"sort": 50e-9, "gathered": 0.0, "partial": 0.7e-9}))
    plain = gradc.compile(graph, wrt=["table"])
    slow, again = (gradc.compile(graph, wrt=["table"], calibration=path) for _ in range(2))
    dims = {"N": 1 << 20, "V": 290}
    assert pick(plain, **dims) == ["segmented"] and pick(slow, **dims) == ["privatized"]
    assert str(slow.backward.program) == str(again.backward.program) != str(plain.backward.program)
    assert slow.options.calibration == path.read_text() and "-> privatized" in slow.explain(**dims)
    slow.save(tmp_path / "module")
    loaded = gradc.load_module(tmp_path / "module")
    assert loaded.options.calibration == path.read_text() and pick(loaded, **dims) == ["privatized"]


def test_c_takes_what_the_predicate_says() -> None:
    """On both sides of every bound of a condition with ``and`` and ``or``."""
    (when, _), _ = host_cases(symbol("N"), 16, 8 * symbol("V"))
    assert when is not None and len(when.conjunctions) == 3
    visible = '__attribute__((visibility("default")))'
    text = f"{visible} int taken(const long long *n) {{ return {condition(when, {'N': 'n[0]', 'V': 'n[1]'})}; }}"
    taken = load_library(compile_c(text), "taken").taken
    for rows, size in itertools.product(
        (0, 128, 487_621, 487_622), (0, 137, 138, 174_762, 174_763, 262_144, 262_145, 524_288)
    ):
        for more in (size, 1101 * rows // 2048, 1101 * rows // 2048 + 1, 1101 * rows // 1024, 1101 * rows // 1024 + 1):
            sizes = np.array([rows, more], np.int64)
            assert taken(ctypes.c_void_p(sizes.ctypes.data)) == when.holds({"N": rows, "V": more}), (rows, more)


@pytest.mark.parametrize("wrt", [["w", "s"], ["s", "w"]])
def test_results_of_one_order_are_sorted_together(wrt: list[str]) -> None:
    """A small result beside a large one: neither decides for the other alone, whatever comes first."""
    graph = gradc.trace(
        lambda i, w, s: ops.embedding(i, ops.fake_quantize(w, s, block=(1, 64))),
        i="i64[N]",
        w="f32[V,64]",
        s="f32[V,1]",
    )
    backward = gradc.compile(graph, wrt=wrt, target="cpu").backward
    assert backward.workspace_size(N=200_000, V=1_000_000) < 10e6
    two = gradc.trace(
        lambda i, a, b: {
            "y": ops.scatter_add(i, a, axis=0, size=100_000),
            "z": ops.scatter_add(i, b, axis=0, size=100_000),
        },
        i="i64[N]",
        a="f32[N,1]",
        b="f32[N,64]",
    )
    forward = gradc.compile(two, target="cpu").forward
    assert forward.workspace_size(N=200_000) < 10e6
    rng = np.random.default_rng(0)
    i, b = rng.integers(0, 100_000, 5000), rng.integers(-9, 9, (5000, 64)).astype(np.float32)
    got = forward.run(i=i, a=b[:, :1].copy(), b=b)
    want = np.zeros((100_000, 64), np.float32)
    np.add.at(want, i, b)
    np.testing.assert_array_equal(got["z"], want)
    np.testing.assert_array_equal(got["y"], want[:, :1])


def test_every_result_of_a_kernel_has_the_partial_results_that_are_estimated() -> None:
    text = TWO_KEYS.replace("CHECKS", "")
    text = text.replace("%0 = load s[n] : i64", "%0 = index n : i64").replace(
        "%1 = load t[n] : i64", "%1 = index n : i64"
    )
    text = text.replace("[9,5]", "[N,16]").replace("[N,5]", "[N,16]").replace("cols(d: 5)", "cols(d: 16)")
    program = choose_reduction(parse_program(text), force={"*": "privatized"})
    executable = gradc.Executable(program, "cpu")
    for rows in (1000, 10_000, 100_000):
        table = decisions(program, {"N": rows})
        counts = {int(e.why.split()[0]) for _, _, how, found in table for e in found if e.strategy == how}
        (chunks,) = counts
        partials = chunks * rows * 16 * 8 * 2
        assert len(table) == 2 and partials <= executable.workspace_size(N=rows) < partials + 8192


def test_sizes_that_are_long_already_have_a_chunk() -> None:
    """What is made of a size for a kernel's tasks is no longer than the size allows."""

    def halved(x):  # type: ignore[no-untyped-def]
        for _ in range(36):
            x = x[::2]
        return ops.softmax(ops.exp(x), axis=0)

    forward = gradc.compile(gradc.trace(halved, x="f32[N,3]"), target="cpu").forward
    assert np.asarray(forward.run(x=np.ones((5, 3), np.float32))["y"]).tolist() == [[1, 1, 1]]


def test_names_of_strategies_need_no_pass() -> None:
    code = (
        "from gradc.ir.program_text import parse_program; from gradc.ir.verify import verify_program\n"
        f"verify_program(parse_program({TWO_KEYS.replace('CHECKS', '')!r}))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "nothing before says" in said.stderr and "no strategy" not in said.stderr
