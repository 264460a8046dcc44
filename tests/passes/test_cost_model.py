"""The cost model of GPUs: its worked examples, its rules, what choose_reduction makes of it, and the devices'
constants.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import gradc
from gradc import ops
from gradc.analysis.combine import Scatter, combines, expected_hits, numbers, row_scatter, scatter_of
from gradc.analysis.cost import cheapest, estimates, predict
from gradc.analysis.strategies import ON_GPU, STRATEGIES, floor, partials, passes, sort_seconds
from gradc.codegen.cuda.launch import sizes_of
from gradc.codegen.cuda.render import render_cuda
from gradc.codegen.cuda.row_sort import ONE_BLOCK
from gradc.errors import GradcError, InvalidProblem, Unsupported
from gradc.inspect.explain import reduction_table
from gradc.ir.accesses import check_of
from gradc.ir.kernel import Kernel, Program, Select, taken
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.choose_reduction import choose_reduction, decisions
from gradc.targets.devices import CONSTANTS, CPU, GPUS, Cpu, Gpu, calibration_text, device_for

ALL = tuple(STRATEGIES)
DETERMINISTIC = tuple(s.name for s in STRATEGIES.values() if s.deterministic)


def gpu(name: str) -> Gpu:
    found = device_for(name)
    assert isinstance(found, Gpu)
    return found


H100 = gpu("H100")


def microseconds(
    s: Scatter[int], device: Gpu = H100, unique: int | None = None, most: int | None = None
) -> dict[str, float]:
    return {e.strategy: e.seconds * 1e6 for e in predict(s, device, hits=expected_hits(s, unique, most))}


def zipf(rows: int, keys: int, exponent: float) -> tuple[int, int]:
    """How many rows are hit, and how often the first, as expected."""
    weights = [k**-exponent for k in range(1, keys + 1)]
    total = sum(weights)
    return round(sum(-math.expm1(rows * math.log1p(-w / total)) for w in weights)), round(rows * weights[0] / total)


@functools.cache
def embedding(tokens: str, table: str) -> Program:
    """The scheduled gradient of a table."""
    graph = gradc.trace(lambda tokens, table: ops.embedding(tokens, table), tokens=f"i32[{tokens}]", table=table)
    found: Program = gradc.compile(graph, wrt=["table"], target="numpy").stages["backward.schedule"].result
    return found


@functools.cache
def scheduled(what: str) -> Program:
    if what == "broadcast":
        graph, wrt = gradc.trace(lambda x, b: x * b[:, None, :], x="f32[A,B,3]", b="f32[A,3]"), "b"
    elif what == "bias":
        graph, wrt = gradc.trace(lambda x, b: x * b, x="f32[N,4096]", b="f32[4096]"), "b"
    else:
        graph, wrt = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[4,3,256,256]", g="f32[4,Q,Q,2]"), "x"
    found: Program = gradc.compile(graph, wrt=[wrt], target="numpy").stages["backward.schedule"].result
    return found


def combining(program: Program) -> list[Kernel]:
    return [k for k in program.kernels if k.accums]


def picks(program: Program, dims: dict[str, int], **options: Any) -> list[str]:
    """The strategies that run at these sizes."""
    chosen = choose_reduction(program, **{"available": ALL, "device": H100, **options})
    kernels = [taken(step, dims) for step in chosen.steps]
    return [how for k in kernels if isinstance(k, Kernel) for _, how in k.strategy]


# -- the worked examples -----------------------------------------------------------------------------------------------


EXAMPLES = {
    # case: sizes, (U, R) where known, floor, atomic, segmented in us as the table has them
    "N16384 V128256 D4096 bf16 -> bf16": (row_scatter(16384, 128256, 4096, 2, 2), (None, None), 395, 1999, 431),
    "same, fp32 out": (row_scatter(16384, 128256, 4096, 2, 4), (None, None), 745, 946, 781),
    "N65536 V128256 D4096 zipf, bf16": (
        row_scatter(65536, 128256, 4096, 2, 2),
        zipf(65536, 128256, 1.05),
        529,
        2225,
        565,
    ),
    "V155 N65536 D128 fp32 uniform": (row_scatter(65536, 155, 128, own=True), (None, None), 11, 16, 39),
    "same, half on one row": (row_scatter(65536, 155, 128, own=True), (None, 32768), 11, 169, 39),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_the_worked_examples_come_out_to_the_microsecond(case: str) -> None:
    s, hits, least, atomic, segmented = EXAMPLES[case]
    found = microseconds(s, H100, *hits)
    assert round(floor(s) / H100.bandwidth * 1e6) == least
    assert round(found["atomic"]) == atomic and round(found["segmented"]) == segmented


def test_the_largest_example_has_rounder_numbers() -> None:
    """N7.77M V1.72M D128 fp32, half on row 0: 1630-1850, ~20300, ~1960; the formulas give 1630, 20249 and 1962."""
    s = row_scatter(7_770_000, 1_720_000, 128)
    unique = expected_hits(replace(s, rows=s.rows // 2)).unique + 1
    found = microseconds(s, H100, unique, s.rows // 2)
    assert round(floor(s) / H100.bandwidth * 1e6) == 1630
    assert found["atomic"] == pytest.approx(20300, rel=0.005) and found["segmented"] == pytest.approx(1960, rel=0.005)
    carries = s.rows // 2 // 128 * 2 * 128 * 4  # two rows per chunk of the hot one
    assert found["segmented"] - microseconds(s, H100, unique, 1)["segmented"] == pytest.approx(
        carries / H100.bandwidth * 1e6
    )


def test_the_privatized_example_is_its_bytes_and_its_partial_results() -> None:
    """18 us in which it is read and 128 blocks' partial results are written, beside 5 in which 132 multiprocessors sort
    and add 65,536 rows; the fold reads the partial results through L2 in 5.5; 5 of two launches come on top.
    """
    s = row_scatter(65536, 155, 128, own=True)
    found = microseconds(s)
    assert s.own and partials(s) == 128
    written = 128 * s.out * 8
    read, apart = (s.read + s.index + written) / H100.bandwidth * 1e6, written / H100.resident * 1e6
    assert read > 65536 / 128 * 10e-3
    assert found["privatized"] == pytest.approx(read + apart + 5) and round(found["privatized"]) == 29
    assert cheapest(s, H100, DETERMINISTIC) == "privatized" and found["privatized"] < found["segmented"]
    assert microseconds(s, H100, None, 32768)["privatized"] == found["privatized"], "a hot row is shared out"
    bags = replace(s, rows=10 * s.rows)
    added = microseconds(bags)["privatized"] - apart - 5
    assert added == pytest.approx(655360 / 128 * 10e-3), "ten rows have one value"
    narrow = replace(bags, width=32, out=155 * 32, read=s.read // 4)
    assert microseconds(narrow)["privatized"] == pytest.approx(12.8 + apart / 4 + 5)


def test_partial_results_in_memory_lose_to_a_sort() -> None:
    """Where a block cannot have them: 1024 of them, more than L2 keeps. Hot rows cost nothing."""
    s = row_scatter(65536, 155, 128)
    found = microseconds(s)
    assert partials(s) == 1024 and found["privatized"] > found["segmented"]
    moved = 2 * 1024 * s.out * 8 + 2 * 65536 * 128 * 8
    assert found["privatized"] == pytest.approx(65536 / 1024 * 0.25 + moved / H100.bandwidth * 1e6 + 5)
    assert microseconds(s, H100, None, 32768)["privatized"] == found["privatized"]


@pytest.mark.parametrize(
    ("case", "table"), [("same, fp32 out", "bf16[128256,4096]"), ("V155 N65536 D128 fp32 uniform", "f32[155,128]")]
)
def test_kernels_give_the_examples_sizes(case: str, table: str) -> None:
    """What is read off a kernel is what the example says; a bf16 table is an f32 one and a cast, which is no part of
    the combine.
    """
    s = EXAMPLES[case][0]
    program = embedding(str(s.rows), table)
    types = {b.name: b.type for b in program.buffers}
    (kernel,) = combining(program)
    (part,) = combines(kernel, types)
    assert numbers(scatter_of(kernel, part, types), {}) == s
    assert {e.strategy: e.seconds * 1e6 for e in estimates(kernel, part, types, {}, H100)} == {
        k: v for k, v in microseconds(s).items() if k != "regular"
    }
    hot = {e.strategy: e for e in estimates(kernel, part, types, {}, H100, unique=2, hits=s.rows - 1)}
    assert (
        hot["atomic"].seconds > 5e-9 * (s.rows - 1)
        and "2 rows" in hot["atomic"].why
        and hot["atomic"].floor == floor(s)
    )


NARROW = """program @p {
  input t: i32[N]
  input dy: bf16[N,4096]
  output g: bf16[V,4096]
  kernel @k rows(n: N) cols(d: 4096) {
    %0 = load t[n] : i32
    phase
    %1 = load dy[n, d] : bf16
    accum g[%0, d] <- %1 : bf16
  }
  return g=g
}
"""


def test_16_bit_outputs_cost_atomics_a_scratch() -> None:
    program = parse_program(NARROW)
    types = {b.name: b.type for b in program.buffers}
    (kernel,) = combining(program)
    (part,) = combines(kernel, types)
    found = {e.strategy: e for e in estimates(kernel, part, types, {"N": 16384, "V": 128256}, H100)}
    assert round(found["atomic"].seconds * 1e6) == 1999 and round(found["segmented"].seconds * 1e6) == 431
    assert "rounded to 2 bytes" in found["atomic"].why
    for V in (10, 1000, 100_000):
        wide, narrow = row_scatter(4096, V, 512, 2, 4), row_scatter(4096, V, 512, 2, 2)
        assert microseconds(narrow)["atomic"] > microseconds(wide)["atomic"]  # zeroed, read and written apart
        assert microseconds(narrow)["segmented"] < microseconds(wide)["segmented"]  # written once


# -- the formulas and the rules, one by one ----------------------------------------------------------------------------


def test_the_sort_takes_passes_of_9_bits() -> None:
    assert [passes(v) for v in (0, 1, 511, 512, 2**18 - 1, 2**18, 2**27 - 1, 2**27)] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert all(passes(v) == math.ceil(math.log2(v + 1) / 9) for v in range(70_000))
    assert sort_seconds(row_scatter(20_000, 2**18, 1), H100) == pytest.approx(28e-6)
    assert sort_seconds(row_scatter(8_000_000, 2**18 + 1, 1), H100) == pytest.approx(12e-6 + 3 * 100e-6)


def test_a_small_sort_is_one_block_where_there_is_one() -> None:
    device, s = replace(H100, one_block=0), row_scatter(ONE_BLOCK, 100_000, 64)
    assert sort_seconds(s, H100) == H100.sort_base < sort_seconds(s, device) and H100.one_block == ONE_BLOCK
    assert sort_seconds(replace(s, rows=ONE_BLOCK + 1), device) == sort_seconds(replace(s, rows=ONE_BLOCK + 1), H100)


def test_each_strategy_has_its_launches() -> None:
    idle = replace(H100, launch=0.0)
    for item, atomic in ((2, 3), (4, 2)):
        s = replace(row_scatter(1000, 1000, 64, 4, item), owners=1000)
        count = {name: round((time - microseconds(s, idle)[name]) / 2.5) for name, time in microseconds(s).items()}
        assert count == {"segmented": 3, "regular": 1, "privatized": 2, "atomic_fixed": 4, "atomic": atomic}


def test_16_bit_output_with_a_table_beyond_l2_is_segmented() -> None:
    for V in (20_000, 128_256, 1_000_000):
        for N in (1024, 16384, 262_144):
            s = row_scatter(N, V, 2048, 2, 2)
            assert s.out * 4 > H100.l2 and cheapest(s, H100, ALL[:1] + ALL[2:]) == "segmented"


def test_fp32_beyond_l2_with_few_duplicates_is_segmented_iff_the_rows_cost_more_than_the_sort() -> None:
    for N in (1000, 4000, 8000, 12_000, 16_000, 20_000, 24_000, 40_000, 64_000):
        s = row_scatter(N, 1_000_000, 1024)
        unique = expected_hits(s).unique
        rows, sort = unique * 1024 * 8 / H100.bandwidth, sort_seconds(s, H100)
        found = microseconds(s)
        if (
            unique * 1024 * 4 > H100.room and abs(rows - sort) > 6e-6
        ):  # a launch, the indices and the rate of atomics lie between
            assert (found["segmented"] < found["atomic"]) == (rows > sort), N


def test_a_table_inside_l2_is_atomic_until_a_row_is_hot() -> None:
    s = row_scatter(65536, 16_000, 128)  # 8 MB
    assert s.out * 4 < H100.room
    assert cheapest(s, H100, ("atomic", "segmented")) == "atomic"
    limit = (sort_seconds(s, H100) + s.read / H100.bandwidth) / H100.hot
    colder, hotter = (microseconds(s, H100, None, round(limit * share)) for share in (0.9, 1.2))
    assert colder["atomic"] < colder["segmented"] and hotter["atomic"] > hotter["segmented"]
    wider = microseconds(replace(s, width=256, keys=8000), H100, None, 10_000)  # rows above 512 bytes: 10 ns a hit
    assert wider["atomic"] - 5 - s.out * 4 / H100.bandwidth * 1e6 == pytest.approx(100)


@pytest.mark.parametrize("D", [32, 128, 4096])
def test_few_rows_into_a_small_result_are_privatized(D: int) -> None:
    """Partial results are as many as the template makes; a sort costs its launches whatever it sorts."""
    own, apart = (lambda n: partials(row_scatter(n, 2, D, own=True))), (lambda n: partials(row_scatter(n, 2, D)))
    assert [apart(n) for n in (1, 8, 9, 800)] == [1, 1, 2, 100] and apart(10**7) == min((1 << 17) // (D // 4), 1024)
    assert [own(n) for n in (1, 64, 65)] == [1, 1, 2] and own(10**7) == 128 // max(D // 128, 1)
    for N, V, wanted in (
        (64, 2, "privatized"),
        (8, 155, "privatized"),
        (65_536, 155, "privatized"),
        (1_048_576, 2, "privatized"),
        (65_536, 1550, "segmented"),
    ):
        assert picks(embedding(str(N), f"f32[{V},{D}]"), {}) == [wanted], (N, V)
    assert picks(embedding("65536", f"f32[V,{D}]"), {"V": 155}) == [
        "segmented"
    ]  # nobody knows how many rows when the kernel is made


@pytest.mark.parametrize("D", [32, 128, 4096])
def test_a_block_s_own_partial_results_are_as_many_as_the_model_has(D: int) -> None:
    program = gradc.compile(
        gradc.trace(lambda t, w: ops.embedding(t, w), t="i32[N]", w=f"f32[155,{D}]"),
        wrt=["w"],
        target="cuda",
        reductions={"*": "privatized"},
    ).backward.program
    (made,) = [k for k in render_cuda(program)[1].values() if k.chunk_keys]
    for rows in (1, 64, 65, 5000, 65536, 10**6):
        assert -(-rows // sizes_of(made, {"n0": rows}).chunk) == pytest.approx(
            partials(row_scatter(rows, 155, D, own=True)), rel=0.1
        )


def test_what_the_model_takes_for_granted_is_what_a_launch_does() -> None:
    """The number of partial results and the rows that one block sorts."""
    graph = gradc.trace(lambda x: ops.sum(x, 0), x="f32[N,512]")
    program = gradc.compile(graph, target="cuda", reductions={"*": "privatized"}).forward.program
    (kernel,) = render_cuda(program)[1].values()
    for rows in (1, 8, 1000, 100_000, 10**7):
        sizes = sizes_of(kernel, {"n0": rows})
        made, modelled = -(-rows // sizes.chunk), partials(row_scatter(rows, 1, 512))
        assert modelled / 2 <= made <= 2 * modelled


def test_an_owner_adds_what_is_gathered_one_row_after_another() -> None:
    """The planes of 64 images have 192 owners, which would add 200704 elements each: atomics are sooner, unless planes
    are small and many.
    """
    s = replace(row_scatter(64 * 3 * 4 * 224 * 224, 64 * 3 * 224 * 224, 1), owners=192)
    found = microseconds(s)
    assert (
        found["regular"] == pytest.approx(4 * 224 * 224 * 0.25 + 2.5) and found["regular"] > 50 * found["atomic_fixed"]
    )
    assert microseconds(replace(s, gathered=False, owners=192))["regular"] < found["regular"] / 100
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[64,3,224,224]", g="f32[64,Q,Q,2]")
    program: Program = gradc.compile(graph, wrt=["x"], target="numpy").stages["backward.schedule"].result
    assert picks(program, {"Q": 224}) == ["atomic_fixed"]
    many = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[4096,64,8,8]", g="f32[4096,Q,Q,2]")
    assert picks(gradc.compile(many, wrt=["x"], target="numpy").stages["backward.schedule"].result, {"Q": 8}) == [
        "regular"
    ]


def test_atomics_cost_per_line_and_go_by_vectors_on_sm_90() -> None:
    scalar = replace(H100, vector=False)
    s = replace(row_scatter(10**6, 1000, 128), read=0, index=0)
    assert microseconds(s, scalar)["atomic"] > microseconds(s)["atomic"]
    lone = replace(row_scatter(10**7, 10_000, 1), read=0, index=0)
    assert microseconds(lone)["atomic"] == pytest.approx(1e7 / 83e9 * 1e6 + 5, rel=1e-3)
    assert microseconds(replace(s, contiguous=False))["atomic"] == pytest.approx(128e6 / 83e9 * 1e6 + 5, rel=1e-3)
    assert not gpu("sm_89").vector and gpu("sm_100").vector


def test_fixed_point_atomics_cost_more_than_atomics_and_are_for_what_cannot_be_sorted() -> None:
    for V in (100, 10_000, 1_000_000):
        found = microseconds(row_scatter(100_000, V, 64))
        assert found["atomic_fixed"] > found["atomic"]
    assert picks(embedding("4096", "f32[20000,64]"), {}) == ["segmented"]  # though the model has atomic_fixed below it
    assert (
        microseconds(row_scatter(4096, 20_000, 64))["atomic_fixed"]
        < microseconds(row_scatter(4096, 20_000, 64))["segmented"]
    )
    assert picks(scheduled("grid"), {"Q": 64}) == ["atomic_fixed"]
    assert picks(scheduled("grid"), {"Q": 64}, available=("privatized", "regular")) != ["atomic_fixed"]


def test_every_estimate_is_at_least_the_floor() -> None:
    rng = random.Random(0)
    for device in GPUS:
        for _ in range(300):
            N, V, D = (int(2 ** rng.uniform(0, top)) for top in (24, 22, 12))
            s = row_scatter(N, V, D, rng.choice((1, 2, 4)), rng.choice((2, 4)), rng.choice((4, 8)))
            for e in predict(s, device):
                assert (
                    e.bytes >= e.floor - s.index
                    and e.seconds >= (e.floor - s.index) / device.bandwidth
                    and math.isfinite(e.seconds)
                )


def test_empty_sizes_have_estimates() -> None:
    for sizes in ((0, 0, 0), (0, 5, 4), (5, 0, 4), (5, 5, 0), (1, 1, 1)):
        for own in (False, True):
            found = predict(replace(row_scatter(*sizes), own=own), H100)
            assert all(e.seconds >= 0 and e.bytes >= 0 for e in found)


# -- choices -----------------------------------------------------------------------------------------------------------


def test_the_choice_changes_with_the_shape_and_with_the_device() -> None:
    assert picks(embedding("256", "f32[256,128]"), {}) == ["privatized"] and picks(
        embedding("2048", "f32[64,128]"), {}, device=gpu("V100")
    ) == ["privatized"]
    assert picks(embedding("65536", "f32[32000,128]"), {}) == ["segmented"]
    assert picks(embedding("256", "f32[512,128]"), {}, device=gpu("V100")) == [
        "segmented"
    ]  # whose L2 has 6 MB for the partials
    assert picks(embedding("16384", "f32[32000,512]"), {}, determinism="none") == ["atomic"]
    assert picks(embedding("16384", "f32[32000,512]"), {}, determinism="none", device=gpu("V100")) == [
        "segmented"
    ]  # 6 MB of L2


def test_only_determinism_none_picks_atomics_and_where_they_are_worth_it() -> None:
    inside, beyond = embedding("65536", "f32[16000,128]"), embedding("65536", "f32[128256,4096]")
    assert picks(inside, {}) == ["segmented"] and picks(inside, {}, determinism="none") == ["atomic"]
    assert picks(beyond, {}) == ["segmented"] and picks(beyond, {}, determinism="none") == ["segmented"]
    s = row_scatter(20_000, 131_072, 512)  # faster by less than 10 %
    found = microseconds(s)
    assert (
        found["atomic"] < found["segmented"] < 1.1 * found["atomic"]
        and cheapest(s, H100, ("atomic", "segmented")) == "segmented"
    )
    assert picks(scheduled("bias"), {"N": 65536}, determinism="none") == ["privatized"]  # one row, hit 65536 times
    with pytest.raises(InvalidProblem, match="determinism='some'"):
        choose_reduction(inside, device=H100, determinism="some")  # type: ignore[arg-type]


def test_integers_add_in_any_order() -> None:
    program = NARROW.replace("4096", "128")
    assert picks(parse_program(program.replace("bf16", "i32")), {"N": 10**5, "V": 16_000}) == ["atomic"]
    assert picks(parse_program(program.replace("bf16", "i8")), {"N": 10**5, "V": 16_000}) == [
        "segmented"
    ]  # no such atomics


def test_only_what_is_available_is_picked_or_forced() -> None:
    program = embedding("4096", "f32[20000,64]")
    assert picks(program, {}, available=("privatized",)) == ["privatized"]
    assert picks(program, {}, available=("atomic_fixed",)) == ["atomic_fixed"]
    with pytest.raises(
        Unsupported, match=r"the combine into d\.table can only be atomic here.*determinism=\"none\" allows it"
    ):
        picks(program, {}, available=("atomic",))
    assert picks(program, {}, available=("atomic",), determinism="none") == ["atomic"]
    right = ", ".join(name for name in ON_GPU if name != "regular")
    with pytest.raises(
        Unsupported, match=rf"the combine into d\.table needs one of {right}; there are kernels for regular"
    ):
        picks(program, {}, available=("regular",))
    for how in ("privatized", "segmented", "atomic", "atomic_fixed"):
        assert picks(program, {}, force={"*": how}) == [how] and picks(program, {}, force={"d.table": how}) == [how]
    with pytest.raises(Unsupported, match="the reduction 'atomic': there are privatized, segmented"):
        picks(program, {}, force={"*": "atomic"}, available=("privatized", "segmented"))
    with pytest.raises(
        Unsupported,
        match=(
            r"the combine into d\.table cannot be regular: its index allows privatized, segmented, atomic, atomic_fixed"
        ),
    ):
        picks(program, {}, force={"d.table": "regular"})


def test_a_broadcast_gradient_has_owners_or_partials() -> None:
    assert picks(scheduled("broadcast"), {"A": 131, "B": 4096}) == ["privatized"]
    assert picks(scheduled("broadcast"), {"A": 132, "B": 4096}) == ["regular"]
    assert picks(scheduled("bias"), {"N": 65536}) == ["privatized"]


@pytest.mark.parametrize("batch", [32, "N"])
def test_sums_of_channels_have_partials(batch: int | str) -> None:
    """A row of an image is reduced in a chain of instructions: few channels that own many rows each would take a
    thousand times what the bytes take.
    """
    shape = f"f32[{batch},64,56,56]"
    graph = gradc.trace(lambda x: ops.sum(x, (0, 2, 3)), x=shape)
    program: Program = gradc.compile(graph, target="numpy").stages["forward.schedule"].result
    dims = {"N": 32} if batch == "N" else {}
    assert picks(program, dims) == ["privatized"]
    ((_, _, _, table),) = decisions(choose_reduction(program, available=ALL, device=H100), {"N": 32}, H100)
    seconds = {each.strategy: each.seconds for each in table}
    assert seconds["regular"] > 20 * seconds["privatized"]
    many = gradc.trace(lambda x: ops.sum(x, (0, 2, 3)), x="f32[2,4096,14,14]")
    assert picks(gradc.compile(many, target="numpy").stages["forward.schedule"].result, {}) == ["regular"]


TWO = """program @p {
  input t: i32[N]
  input u: i32[N]
  input dy: f32[N,64]
  output g: f32[50000,64]
  output h: f32[60000,64]
  kernel @k rows(n: N) cols(d: 64) {
    %0 = load t[n] : i32
    %1 = load u[n] : i32
    phase
    %2 = load dy[n, d] : f32
    accum g[%0, d] <- %2 : f32
    accum h[%1, d] <- %2 : f32
  }
  return g=g, h=h
}
"""


def test_a_second_index_goes_without_an_order() -> None:
    program = parse_program(TWO)
    assert picks(program, {"N": 10**5}) == ["segmented", "atomic_fixed"]
    assert picks(program, {"N": 10**5}, available=("segmented", "privatized")) == ["segmented", "privatized"]
    assert picks(program, {"N": 10**5}, available=("segmented", "privatized", "atomic"), determinism="none") == [
        "atomic",
        "atomic",
    ]
    with pytest.raises(Unsupported, match="adds into h in another order"):
        picks(program, {"N": 10**5}, available=("segmented",))
    checks = [
        check_of(name, program.buffer[name].type, size, "scatter_add", name)
        for name, size in (("t", 50000), ("u", 60000))
    ]
    verify_program(choose_reduction(replace(program, steps=(*checks, *program.steps)), device=H100, available=ALL))


def test_results_with_the_same_keys_are_segmented_together() -> None:
    same = parse_program(TWO.replace("accum h[%1", "accum h[%0").replace("50000", "2500").replace("60000", "2500"))
    assert picks(same, {"N": 64}) == ["privatized", "privatized"]
    assert picks(same, {"N": 10**6}) == ["segmented", "segmented"]


# -- symbolic sizes ----------------------------------------------------------------------------------------------------


def chosen(program: Program, **options: Any) -> Select | Kernel:
    found = choose_reduction(program, **{"available": ALL, "device": H100, **options})
    assert str(parse_program(str(found))) == str(found)
    (step,) = [s for s in found.steps if isinstance(s, Select) or (isinstance(s, Kernel) and s.accums)]
    return step


def branches(step: Select | Kernel) -> Iterator[tuple[int, str, str]]:
    """(least value of the symbol, strategy from there on, strategy below), from the largest down."""
    assert isinstance(step, Select)
    for (when, kernel), (_, below) in zip(step.cases, step.cases[1:], strict=False):
        assert when is not None
        ((least,),) = when.conjunctions
        assert isinstance(least.right, int)
        yield least.right, kernel.strategy[0][1], below.strategy[0][1]


@pytest.mark.parametrize("determinism", ["run", "none"])
@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.name)
def test_one_symbol_changes_where_the_model_does(device: Gpu, determinism: Any) -> None:
    names = [n for n in ("segmented", "privatized", "atomic") if n in DETERMINISTIC or determinism == "none"]
    found = 0
    for tokens, table in (
        ("N", "f32[32000,512]"),
        ("N", "f32[2500,128]"),
        ("4096", "f32[V,128]"),
        ("65536", "f32[V,64]"),
    ):
        step = chosen(embedding(tokens, table), device=device, determinism=determinism)
        if isinstance(step, Kernel):
            continue
        values = []
        for least, above, below in branches(step):
            for value, how in ((least, above), (least - 1, below)):
                s = (
                    row_scatter(value, *map(int, table[4:-1].split(",")))
                    if tokens == "N"
                    else row_scatter(int(tokens), value, int(table[6:-1]))
                )
                assert cheapest(s, device, names) == how, (table, value)
            values.append(least)
            found += 1
        assert values == sorted(values, reverse=True)
    assert found


def test_crossovers_move_with_the_constants() -> None:
    """A slower sort is taken later, a larger L2 keeps atomics longer."""

    def crossover(device: Gpu) -> int:
        return next(
            least
            for least, above, _ in branches(chosen(embedding("N", "f32[32000,512]"), device=device, determinism="none"))
            if above == "segmented"
        )

    by_sort = [crossover(replace(H100, sort_base=base * 1e-6)) for base in (6, 12, 24, 48)]
    assert by_sort == sorted(by_sort) and len(set(by_sort)) == 4
    by_room = [crossover(replace(H100, l2=size * 10**6)) for size in (6, 20, 40, 60)]
    assert by_room == sorted(by_room)
    by_width = [next(branches(chosen(embedding("4096", f"f32[V,{D}]"))))[0] for D in (32, 64, 128, 256)]
    assert by_width == sorted(by_width, reverse=True)  # wider rows make more of partials


@pytest.mark.parametrize(("determinism", "mean", "most"), [("run", 1.02, 2.4), ("none", 1.1, 4.0)])
@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.name)
def test_several_symbols_choose_near_the_model(device: Gpu, determinism: Any, mean: float, most: float) -> None:
    """Thresholds of products of sizes stand for the model: how far the pick's time is from the best, over sizes drawn
    by their logarithms.

    What is far are partials that just fit a block, against atomics with no hot row: on purpose.
    """
    rng = random.Random(1)
    names = [n for n in ("segmented", "privatized", "atomic") if n in DETERMINISTIC or determinism == "none"]
    for table in ("f32[V,128]", "f32[V,D]"):
        step = chosen(embedding("N", table), device=device, determinism=determinism)
        ratios = []
        for _ in range(400):
            dims = {
                "N": int(2 ** rng.uniform(0, 24)),
                "V": int(2 ** rng.uniform(0, 22)),
                "D": 128 if table == "f32[V,128]" else int(2 ** rng.uniform(5, 13)),
            }
            kernel = taken(step, dims)
            assert isinstance(kernel, Kernel)
            found = microseconds(row_scatter(dims["N"], dims["V"], dims["D"]), device)
            ratios.append(found[kernel.strategy[0][1]] / min(found[n] for n in names))
        assert sum(ratios) / len(ratios) < mean and max(ratios) < most


def test_predicates_are_short_and_need_no_host_synchronisation() -> None:
    step = chosen(embedding("N", "f32[V,D]"))
    assert isinstance(step, Select)
    assert (
        str(step.cases[0][0]).startswith("D*N*V+")
        and len(str(step.cases[0][0])) < 80
        and str(step.cases[1][0]).startswith("N >= ")
        and step.cases[2][0] is None
    )
    assert all(set("NVD") >= {c for c in str(when) if c.isupper()} for when, _ in step.cases if when)


def test_a_size_that_is_divided_by_zero_somewhere_is_no_obstacle() -> None:
    program = parse_program(NARROW.replace("[V,4096]", "[1000//N,4096]"))
    assert isinstance(chosen(program), Select | Kernel)


def test_the_cpu_is_as_it_was() -> None:
    program = embedding("N", "f32[V,8]")
    assert choose_reduction(program) == choose_reduction(program, device=CPU, determinism="none", available=ALL)
    (select,) = [s for s in choose_reduction(program).steps if isinstance(s, Select)]
    few = "V >= 157 and N <= 427956 and V <= 174762"
    sorts = f"{few} or V >= 157 and 4096*V >= 2509*N+1 and V <= 262144 or V >= 157 and 2048*V >= 2509*N+1"
    assert [str(when) for when, _ in select.cases] == [sorts, "None"]
    assert (CPU.bandwidth, CPU.sort, CPU.workers) == (20e9, 11e-9, 4) and Cpu() == CPU


# -- in words ----------------------------------------------------------------------------------------------------------


def test_the_table_says_why() -> None:
    program = embedding("N", "f32[16000,128]")
    dims = {"N": 65536}
    text = "\n".join(reduction_table(choose_reduction(program, device=H100, available=ALL), dims, H100))
    assert "on H100 (1 of 12 constants are estimates) the floor is 42.0 MB, 14.0 us; segmented" in text
    assert (
        "-> segmented" in text
        and "65536 rows sorted by index in 28.0 us" in text
        and "other bits in each run" in text
        and "% of the floor" in text
    )
    large = {"N": 16384}
    text = "\n".join(
        reduction_table(choose_reduction(embedding("N", "f32[128256,4096]"), device=H100, available=ALL), large, H100)
    )
    assert "segmented is the fastest" in text and "more than L2 keeps" in text and "1024 partials of" not in text
    text = "\n".join(
        reduction_table(
            choose_reduction(program, device=H100, available=("segmented", "privatized", "atomic")), dims, H100
        )
    )
    assert "was forced, is what there are kernels for" in text or "is the fastest that gives the same bits" in text
    assert "floor" not in "\n".join(reduction_table(choose_reduction(program), dims))


def test_the_picture_is_what_its_script_draws() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    drawn, kept = (
        runpy.run_path(str(docs / "crossovers.py"))["picture"](),
        (docs / "crossovers.svg").read_text(encoding="utf-8"),
    )
    ElementTree.fromstring(drawn)
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("#", drawn) == number.sub("#", kept), "python docs/crossovers.py draws it again"
    assert [float(x) for x in number.findall(drawn)] == pytest.approx([float(x) for x in number.findall(kept)], abs=0.2)


# -- devices and calibration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("sm_70", "V100"),
        ("sm_75", "T4"),
        ("sm_80", "A100"),
        ("sm_89", "L4"),
        ("sm_90", "H100"),
        ("sm_90a", "H100"),
        ("sm_100", "B200"),
        ("sm_120", "RTX PRO 6000"),
        ("h200", "H200"),
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_found_by_arch_or_name(asked: str, name: str) -> None:
    assert device_for(asked).name == name


@pytest.mark.parametrize("asked", ["sm_50", "sm_9", "sm_90x", "L40S", "", "RTX", "NVIDIA", "x" * 10_000])
def test_an_unknown_device_is_refused_with_those_there_are(asked: str) -> None:
    with pytest.raises(
        Unsupported, match=r"knows no device .*; there are cpu, V100 \(sm_70\).*RTX 5090 \(sm_120\)"
    ) as caught:
        device_for(asked)
    assert len(str(caught.value)) < 500


def test_every_constant_has_a_source() -> None:
    for device in GPUS:
        assert set(device.sources) == set(CONSTANTS) - {"one_block"}
        assert set(device.sources.values()) <= {"measured", "fitted", "published", "estimate"}
        assert device.hot < device.launch < device.sort_pass < device.sort_base and device.scattered < device.coalesced
        assert device.vector == (int(device.arch[3:]) >= 90)
        # partials that fit a block cost less than a sort: the first threshold of several symbols stands on it
        most = device.sms * device.shared
        assert (
            2 * most / (device.resident if most <= device.room else device.bandwidth)
            < device.sort_base + device.sort_pass + device.launch
        )


def written(folder: Path, content: Any) -> Path:
    path = folder / "device.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_calibration_goes_before_the_data(tmp_path: Path) -> None:
    path = written(tmp_path, calibration_text(H100, {"bandwidth": 2.5e12, "sort_pass": 4e-6, "one_block": 2048}))
    found = device_for("sm_90", calibration=path)
    assert isinstance(found, Gpu)
    assert (found.bandwidth, found.sort_pass, found.one_block, found.hot, found.name) == (
        2.5e12,
        4e-6,
        2048,
        H100.hot,
        "H100",
    )
    assert (
        found.sources["bandwidth"] == "calibrated"
        and found.sources["hot"] == "measured"
        and H100.sources["bandwidth"] == "measured"
    )
    s = row_scatter(16384, 128_256, 4096)
    assert microseconds(s, found)["segmented"] != microseconds(s)["segmented"]
    empty = device_for("H100", calibration=written(tmp_path, calibration_text(H100, {})))
    assert empty == H100


BASE = {"format": "gradc-device 1", "device": "H100", "constants": {"bandwidth": 3e12}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**BASE, "constants": {"bandwith": 3e12}}, "there is no constant 'bandwith'; there are bandwidth"),
        ({**BASE, "constants": {"name": 3}}, "there is no constant 'name'"),
        ({**BASE, "more": 1}, "no key 'more'; it has format, device, constants"),
        ({**BASE, "constants": {"bandwidth": -1.0}}, "bandwidth is -1.0: it lies between 1e.06 and 1e.16"),
        ({**BASE, "constants": {"bandwidth": 0}}, "bandwidth is 0: it lies between"),
        ({**BASE, "constants": {"hot": -1e-9}}, "hot is -1e-09: it lies between 0 and 1"),
        ('{"format": "gradc-device 1", "device": "H100", "constants": {"launch": NaN}}', "launch is nan"),
        ('{"format": "gradc-device 1", "device": "H100", "constants": {"launch": 1e999}}', "launch is inf"),
        ('{"format": "gradc-device 1", "device": "H100", "constants": {"sms": -Infinity}}', "sms is -inf"),
        ({**BASE, "constants": {"sms": 10**400}}, "sms is 1000"),
        ({**BASE, "constants": {"sms": 132.5}}, "sms is 132.5: a whole number is wanted"),
        ({**BASE, "constants": {"bandwidth": True}}, "bandwidth is True: a number is wanted"),
        ({**BASE, "constants": {"bandwidth": "3e12"}}, "bandwidth is '3e12': a number is wanted"),
        ({**BASE, "constants": []}, "maps names to numbers"),
        ({**BASE, "device": "H200"}, "of 'H200', not of H100"),
        ({**BASE, "format": "gradc-device 2"}, "begins with"),
        ([], "begins with"),
        ('{"format": "gradc-device 1", "format": "gradc-device 1"}', "'format' stands there twice"),
        ("{", "not the JSON of a calibration"),
        ("[" * 60_000, "not the JSON of a calibration"),
        ("9" * 60_000, "not the JSON of a calibration"),
        (" " * 70_000, "at most 65536 bytes"),
    ],
)
def test_a_bad_calibration_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InvalidProblem, match=message) as caught:
        device_for("H100", calibration=path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_a_calibration_that_is_not_there_or_not_for_this(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="cannot be read"):
        device_for("H100", calibration=tmp_path / "none.json")
    with pytest.raises(InvalidProblem, match="cannot be read"):
        device_for("H100", calibration=tmp_path)
    with pytest.raises(InvalidProblem, match="of 'H100', not of cpu"):
        device_for("cpu", calibration=written(tmp_path, BASE))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidProblem, match="not the JSON"):
        device_for("H100", calibration=tmp_path / "bytes.json")
    with pytest.raises(GradcError, match="there is no constant"):
        calibration_text(H100, {"speed": 1.0})


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("sm_86", "sm_80"),
        ("sm_72", "sm_70"),
        ("sm_75", "sm_75"),
        ("sm_103", "sm_100"),
        ("sm_121a", "sm_120"),
        ("sm_90a", "sm_90"),
        ("sm_89", "sm_89"),
    ],
)
def test_an_arch_that_is_not_listed_is_the_older_one_of_its_generation(asked: str, found: str) -> None:
    assert device_for(asked).arch == found
    assert device_for(found).name == device_for(asked).name


def test_rows_in_groups_are_sorted_as_one() -> None:
    """A scale for each group of columns: as many rows are sorted as there are indices."""
    graph = gradc.trace(
        lambda i, w, s: ops.embedding(i, ops.dequantize(w, s, block=(1, 64))),
        i="i64[N]",
        w="i8[V,512]",
        s="f32[V,8]",
    )
    program = gradc.compile(graph, wrt=["s"], target="numpy").stages["backward.schedule"].result
    types = {b.name: b.type for b in program.buffers}
    (kernel,) = combining(program)
    (part,) = combines(kernel, types)
    sizes = numbers(scatter_of(kernel, part, types), {"N": 40_000, "V": 300})
    assert (sizes.rows, sizes.keys, sizes.groups) == (320_000, 2400, 8)
    assert sort_seconds(sizes, H100) == sort_seconds(row_scatter(40_000, 300, 1), H100)
    single = replace(sizes, groups=1)
    assert sort_seconds(sizes, H100) < sort_seconds(single, H100)
    assert microseconds(sizes)["segmented"] < microseconds(single)["segmented"]
