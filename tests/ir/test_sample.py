"""The numbers of a sample of an index: Python that counts pairs one by one, NumPy and C say the same, and what a module
does follows from them on every target.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis.combine import combines, index_buffer
from gradc.errors import IRFormatError, TypeRuleError
from gradc.interp import run_program
from gradc.ir.dims import Assumption, Predicate, nonnegative, symbol
from gradc.ir.kernel import Buffer, Program, Select, possible, taken
from gradc.ir.program_text import parse_program
from gradc.ir.sample import FEWEST, MOST, SIDE, Sample, sampled
from gradc.ir.verify import verify_program
from gradc.runtime.host import pool
from gradc.runtime.host.toolchain import compile_c, load_library
from gradc.targets.devices import CPU, calibration_text

Array = np.ndarray[Any, Any]
SOURCE = """
#include "math.h"
#include "index_sample.h"
__attribute__((visibility("default"))) void look(const void *index, i64 bytes, i64 count, i64 *out) {
  gradc_sample s = { index, bytes, count, 0, 0, 0 };
  out[1] = gradc_locality(&s);
  out[0] = gradc_skew(&s);
}
"""
RNG = np.random.default_rng(0)
INDICES = {
    "any of few": RNG.integers(0, 300, FEWEST),
    "any of many": RNG.integers(0, 1 << 40, FEWEST + 1),
    "in order": np.sort(RNG.integers(0, 1 << 20, 200_003)),
    "skewed": RNG.zipf(1.2, FEWEST + 12_345) % 5000,
    "one": np.full(FEWEST, 7),
    "runs that come again": np.repeat(RNG.integers(0, 50, FEWEST // 4), 8),
    "falling": np.arange(FEWEST)[::-1],
    "too few": np.zeros(FEWEST - 1, np.int64),
    "the ends of int64": RNG.integers(-(2**63), 2**63 - 1, FEWEST),
}


def one_by_one(index: list[int]) -> tuple[int, int]:
    """As the record of a sample says it, of whole numbers; a distance has as many bits as NumPy's have."""
    if len(index) < FEWEST:
        return 0, 0
    blocks = [
        [index[block * (len(index) - SIDE) // (SIDE - 1) + place] for place in range(SIDE)] for block in range(SIDE)
    ]
    skew = sum(blocks[b][p] in [blocks[before][p] for before in range(b)] for b in range(SIDE) for p in range(SIDE))

    def apart(one: int, other: int) -> int:
        wrapped = (one - other + 2**63) % 2**64 - 2**63
        return abs(wrapped) if wrapped != -(2**63) else wrapped

    nearer = 0
    for stride in (8, 16, 24):
        for b in range(SIDE):
            for p in range(SIDE):
                within = apart(blocks[b][(p + stride) % SIDE], blocks[b][p])
                across = apart(blocks[(b + stride) % SIDE][p], blocks[b][p])
                nearer += (within < across) - (within > across)
    return skew, max(nearer, 0) // 3


@pytest.fixture(scope="module")
def look() -> Any:
    return load_library(compile_c(SOURCE), "look").look


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_every_way_to_count_says_the_same(index: Array, look: Any) -> None:
    wanted = one_by_one(index.tolist())
    assert all(0 <= number <= MOST for number in wanted)
    for dtype in (np.int64, np.int32) if abs(index).max() < 2**31 else (np.int64,):
        own = np.ascontiguousarray(index, dtype)
        assert sampled(own) == sampled(own.reshape(1, -1)) == wanted
        out = np.empty(2, np.int64)
        look(
            ctypes.c_void_p(own.ctypes.data),
            *map(ctypes.c_int64, (own.itemsize, own.size)),
            ctypes.c_void_p(out.ctypes.data),
        )
        assert tuple(out) == wanted


def test_what_the_numbers_tell_apart() -> None:
    few, many, order, skewed, one, *_ = map(sampled, INDICES.values())
    assert few[0] < MOST / 10 and many[0] == 0 and skewed[0] > MOST / 10 and one == (MOST - SIDE, 0)
    assert max(few[1], many[1], skewed[1]) < MOST / 10 and order[1] > 0.9 * MOST


# -- what modules do ---------------------------------------------------------------------------------------------------

ROWS, KEYS, WIDTH = FEWEST + 100, 40_000, 8
BY_DATA = calibration_text(
    CPU, {"sort": 45e-9, "gathered": 0.0, "partial": 1e-9, "missed": 0.0, "skew": 1e-6, "locality": 60e-9}
)
"""By which rows nearly in order are sorted, and others are not, at these sizes."""
STREAMS = {
    "segmented": np.sort(RNG.integers(0, KEYS, ROWS)) ^ RNG.integers(0, 8, ROWS),
    "privatized": RNG.integers(0, KEYS, ROWS),
}
VALUES = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)


def scattered(keys: str = "V", dtype: str = "i64", rows: str = "N", **options: Any) -> gradc.Module:
    graph = gradc.trace(
        lambda i, u: ops.scatter_add(i, u, axis=0, size=symbol("V") if keys == "V" else int(keys)),
        i=f"{dtype}[{rows}]",
        u=f"f32[{rows},{WIDTH}]",
    )
    return gradc.compile(graph, **{"target": "cpu", "calibration": BY_DATA, **options})


def select_of(program: Program) -> Select:
    (step,) = [s for s in program.steps if isinstance(s, Select)]
    return step


def ways(items: Any) -> list[str]:
    return [how for kernel in items for _, how in kernel.strategy]


def added(module: gradc.Module, index: Array) -> Array:
    return np.asarray(module(i=index, u=VALUES, dims={"V": KEYS + 8}))


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_the_same_input_takes_the_same_way_everywhere(dtype: str, tmp_path: Path) -> None:
    """Sums in another order have other bits; those of the way that the interpreter takes are C's, by any number of
    threads, and of a module that was saved.
    """
    module, before = scattered(dtype=dtype), pool.num_threads()
    module.save(tmp_path / "module")
    modules = [module, gradc.load_module(tmp_path / "module")]
    forced = {way: scattered(dtype=dtype, reductions={"*": way}) for way in STREAMS}
    step = select_of(module.forward.program)
    assert step.sample == Sample("skew", "locality", "i")
    try:
        for way, index in STREAMS.items():
            own = index.astype(dtype.replace("i", "int"))
            bits = {how: added(m, own).tobytes() for how, m in forced.items()}
            assert len(set(bits.values())) == 2
            for threads in (1, 2, 5):
                pool.set_num_threads(threads)
                assert all(added(each, own).tobytes() == bits[way] for each in modules)
            dims = {"N": ROWS, "V": KEYS + 8}
            assert ways([taken(step, dims, step.sample.of(own))]) == [way]
    finally:
        pool.set_num_threads(before)


def test_the_interpreter_looks_where_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    program, found = scattered().forward.program, []
    monkeypatch.setattr("gradc.interp.taken", lambda *given: found.append(taken(*given)) or found[-1])
    for way, index in STREAMS.items():
        found.clear()
        result = run_program(program, {"i": index, "u": VALUES}, {"V": KEYS + 8})
        wanted = np.zeros((KEYS + 8, WIDTH))
        np.add.at(wanted, index, VALUES.astype(np.float64))
        assert ways(found[1:]) == [way] and np.allclose(*result.values(), wanted, atol=1e-4)


def test_memory_is_for_whatever_the_data_say() -> None:
    """Bytes are those of the way that needs more where data decide, elsewhere of the one that is taken."""
    module, step = scattered(), select_of(scattered().forward.program)
    forced = {way: scattered(reductions={"*": way}).forward for way in STREAMS}
    several = set()
    for dims in ({"N": ROWS, "V": KEYS}, {"N": 1000, "V": 1 << 20}, {"N": 1 << 20, "V": 9}, {"N": 10, "V": 9}):
        may = ways(possible(step, dims))
        several.add(len(may))
        assert module.forward.workspace_size(**dims) == max(forced[way].workspace_size(**dims) for way in may)
    assert several == {1, 2}


@pytest.mark.parametrize(
    ("keys", "rows", "looks"),
    [
        ("V", "N", True),
        ("40000", str(ROWS), True),
        ("40000", "1000", False),
        ("9", str(ROWS), False),
        ("V", "1000", False),
    ],
)
def test_what_sizes_decide_is_not_looked_at(keys: str, rows: str, looks: bool) -> None:
    program = scattered(keys, rows=rows).forward.program
    assert any(isinstance(s, Select) and s.sample is not None for s in program.steps) is looks
    plain = scattered(keys, rows=rows, calibration=calibration_text(CPU, {"sort": 45e-9, "gathered": 0.0}))
    assert "skew" not in str(plain.forward.program)


def test_names_that_the_program_has_are_left_to_it() -> None:
    graph = gradc.trace(
        lambda i, u: ops.scatter_add(i, u, axis=0, size=symbol("locality")), i="i64[skew]", u=f"f32[skew,{WIDTH}]"
    )
    program = gradc.compile(graph, target="cpu", calibration=BY_DATA).forward.program
    assert select_of(program).sample == Sample("skew_1", "locality_1", "i")
    assert parse_program(str(program)) == program


def test_an_index_that_is_computed_before_is_looked_at_itself() -> None:
    graph = gradc.trace(
        lambda i, j, u: ops.scatter_add(i + j, u, axis=0, size=symbol("V")), i="i64[N]", j="i64[N]", u=f"f32[N,{WIDTH}]"
    )
    program = gradc.compile(graph, target="cpu", calibration=BY_DATA).forward.program
    sample = select_of(program).sample
    assert sample is not None and program.buffer[sample.buffer].kind == "temp"


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        ("%0 = load i[n] : i64", "i"),
        ("%9 = load i[n] : i64\n  %8 = index 3 : i64\n  %0 = add %9, %8 : i64", "i"),
        ("%9 = load i[n] : i64\n  %8 = load j[n] : i64\n  %0 = add %9, %8 : i64", ""),
        ("%9 = load i[n] : i64\n  %8 = index n : i64\n  %0 = add %9, %8 : i64", ""),
        ("%0 = load i[n + 1] : i64", ""),
        ("%0 = load long[n] : i64", ""),
        ("%0 = load small[n] : i16", ""),
    ],
)
def test_which_buffer_says_where_rows_go(index: str, wanted: str) -> None:
    program = parse_program(f"""program @p {{
  input i: i64[N]
  input j: i64[N]
  input long: i64[N + 1]
  input small: i16[N]
  input u: f32[N,{WIDTH}]
  output y: f32[V,{WIDTH}]
  kernel @k rows(n: N) cols(c: {WIDTH}) {{
    {index}
    phase
    %1 = load u[n, c] : f32
    accum y[%0, c] <- %1 : f32
  }}
  return y=y
}}
""")
    (kernel,) = program.kernels
    assert index_buffer(kernel, combines(kernel, program.types)[0], program.types) == wanted


def test_a_dim_of_another_program_is_no_number_of_a_sample() -> None:
    """Names are those that a program's own dims leave: explain() has those of forward and backward."""
    graph = gradc.trace(
        lambda e, i, x: ops.sum(ops.gather(e, i, axis=0) ** 2.0) + ops.sum(x),
        e=f"f32[V,{WIDTH}]",
        i="i64[N]",
        x="f32[locality]",
    )
    module = gradc.compile(graph, wrt=["e"], target="cpu", calibration=BY_DATA)
    assert select_of(module.backward.program).sample == Sample("skew", "locality", "i")
    said = [module.explain(N=ROWS, V=KEYS, locality=size) for size in (1, MOST)]
    assert all("d.e: privatized unless" in text for text in said)


def test_explain_says_that_data_decide() -> None:
    module = scattered()
    said = module.explain(N=ROWS, V=KEYS)
    assert "skew and locality of i decide: segmented or privatized; without them" in said
    assert "decide:" not in module.explain(N=10, V=9)


# -- the text and the verifier -----------------------------------------------------------------------------------------


def with_select(program: Program, **changes: Any) -> Program:
    step = select_of(program)
    return replace(program, steps=tuple(replace(s, **changes) if s is step else s for s in program.steps))


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (Sample("skew", "locality", "u"), "a sample of u, which is no buffer of i32 or i64"),
        (Sample("skew", "locality", "y"), "a sample of y, which is no buffer"),
        (Sample("skew", "locality", "x"), "a sample of x, which is no buffer"),
        (Sample("skew", "locality", "j"), "a sample of j, which not every kernel of the select reads"),
        (Sample("N", "locality", "i"), "a sample's N, which is taken"),
        (Sample("skew", "skew", "i"), "a sample's skew, which is taken"),
        (None, "no buffer or kernel has the dim"),
    ],
)
def test_a_sample_is_of_an_index_under_names_of_its_own(sample: Sample | None, said: str) -> None:
    program = scattered().forward.program
    unread = Buffer("j", program.types["i"], "input")  # memory may be another's where no kernel reads it
    program = replace(program, buffers=(*program.buffers, unread))
    verify_program(program)
    with pytest.raises(TypeRuleError, match=said):
        verify_program(with_select(program, sample=sample))


@pytest.mark.parametrize(
    "when",
    [
        Predicate(((Assumption(symbol("skew"), "==", 3),),)),
        Predicate(((Assumption(9 - symbol("skew"), ">=", symbol("N")),),)),
        Predicate(((Assumption(symbol("skew") // 2, ">=", symbol("N")),),)),
    ],
    ids=str,
)
def test_a_comparison_says_where_a_number_reaches_it(when: Predicate) -> None:
    """What may run at some sizes is found from the ends of what the numbers may be."""
    program = scattered().forward.program
    kernels = [kernel for _, kernel in select_of(program).cases]
    with pytest.raises(TypeRuleError, match="does not say where a sample's numbers reach it"):
        verify_program(with_select(program, cases=((when, kernels[0]), (None, kernels[1]))))


def test_what_may_run_is_what_some_numbers_take() -> None:
    """Against every number that there may be."""
    skew, locality, n = symbol("skew"), symbol("locality"), symbol("N")
    program = scattered().forward.program
    kernels = [kernel for _, kernel in select_of(program).cases]
    when = nonnegative([n + locality - 3 * skew], [2 * locality - n - 500])
    step = Select(((when, kernels[0]), (None, kernels[1])), Sample("skew", "locality", "i"))
    ends = (0, 1, 250, MOST - 1, MOST)
    for size in (0, 1, 1547, 1548, 1549, 3 * MOST - 1, 3 * MOST, 9000):
        reached = {taken(step, {"N": size}, {"skew": a, "locality": b}).name for a in ends for b in ends}
        assert {item.name for item in possible(step, {"N": size})} == reached, size


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("select skew of i {", "expected ','"),
        ("select skew, of i {", "expected 'of'"),
        ("select skew, locality i {", "expected 'of'"),
        ("select 9, locality of i {", "the name of a number of a sample"),
    ],
)
def test_text_that_is_no_sample(line: str, said: str) -> None:
    text = str(scattered().forward.program).replace("select skew, locality of i {", line)
    with pytest.raises(IRFormatError, match=said):
        parse_program(text)
