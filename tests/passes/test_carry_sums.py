"""Sums over columns that are carried along a maximum: against NumPy in long double, over sizes of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from column_blocking import ATTENTION, CASES, Case, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from gradc import knobs
from gradc.cli import main
from gradc.errors import InternalError
from gradc.interp import run_program
from gradc.ir.kernel import Kernel, Loop, Tile
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.column_blocking import carried
from gradc.passes.column_blocking.carry_sums import carry_sums
from gradc.passes.column_blocking.split_loops import split_loops
from gradc.passes.manager import Pipeline

SIZES = st.fixed_dictionaries({d: st.integers(0, 6) for d in "STNV"} | {d: st.integers(1, 2) for d in "BH"})
WIDE = {"f64": np.float64, "longdouble": np.longdouble}


def _blocked(program, rows, columns):
    blocked = carry_sums(program, rows=rows, columns=columns)
    verify_program(blocked)
    assert parse_program(str(blocked)) == blocked
    return blocked


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(
    dims=SIZES,
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    precision=st.sampled_from(list(WIDE)),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_numpy(name, dims, rows, columns, precision, seed):
    case = CASES[name]
    if "t" in case.types:  # none of no classes is a target
        dims = {**dims, "V": max(dims["V"], 1)}
    blocked = _blocked(case.program(), rows, columns)
    assert blocked != case.program() and any(loop.sweeps for loop in blocked.loops)
    arrays = drawn(case, dims, seed)
    if "t" in arrays and not (arrays["t"] != -100).any():
        return
    wide = {k: a.astype(WIDE[precision]) if a.dtype == np.float32 else a for k, a in arrays.items()}
    known = {d: dims[d] for d in blocked.dims}
    with np.errstate(invalid="ignore"):
        wanted = case.oracle(**wide)
    (got,) = run_program(blocked, arrays, known, precision=precision).values()
    close = 256 * np.finfo(WIDE[precision]).eps
    assert got.dtype == WIDE[precision]
    np.testing.assert_allclose(got, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3)
@given(seed=st.integers(0, 99), rows=st.integers(1, 6), columns=st.integers(1, 5))
def test_values_are_those_of_the_program_before(name, seed, rows, columns):
    """In its own precision, at sizes with one block and many; exponents of hundreds would overflow out of order."""
    case, dims = CASES[name], {"B": 2, "H": 1, "S": 6, "T": 5, "N": 5, "V": 7}
    arrays = drawn(case, dims, seed, scale=1000.0 if "q" not in case.types else 20.0)
    before = run_program(case.program(), arrays, {d: dims[d] for d in case.program().dims})
    blocked = _blocked(case.program(), rows, columns)
    got = run_program(blocked, arrays, {d: dims[d] for d in blocked.dims})
    for output, wanted in before.items():
        np.testing.assert_allclose(got[output], wanted, rtol=2e-4, atol=2e-5)


SPECIAL = (-np.inf, np.inf, np.nan, 0.0, 1.0, -1e30, 1e30, -800.0, 800.0)


@pytest.mark.parametrize("name", ("softmax", "logsumexp", "cross entropy"))
@settings(max_examples=25)
@given(
    x=st.lists(st.lists(st.sampled_from(SPECIAL), min_size=5, max_size=5), min_size=1, max_size=3),
    columns=st.integers(1, 5),
)
def test_infinities_and_nan_are_where_they_were(name, x, columns):
    program = CASES[name].program()
    arrays = {"x": np.array(x, np.float32)} | ({"t": np.arange(len(x))} if name == "cross entropy" else {})
    wanted = run_program(program, arrays, precision="f64")["y"]
    got = run_program(_blocked(program, 2, columns), arrays, precision="f64")["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ATTENTION)
@settings(max_examples=12)
@given(seed=st.integers(0, 999), columns=st.integers(1, 4))
def test_infinities_and_nan_of_attention_are_where_they_were(name, seed, columns):
    case, dims = CASES[name], {"B": 2, "H": 1, "S": 4, "T": 4}
    arrays, rng = drawn(case, dims, seed), np.random.default_rng(seed)
    for array in (arrays["q"], arrays["k"], arrays.get("bias", arrays["q"])):
        array[rng.random(array.shape) < 0.05] = rng.choice(SPECIAL)
    known = {d: dims[d] for d in case.program().dims}
    wanted = run_program(case.program(), arrays, known, precision="f64")["y"]
    got = run_program(_blocked(case.program(), 2, columns), arrays, known, precision="f64")["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", (1, 64, 65, 130))
def test_blocks_of_64(size):
    case, dims = CASES["causal"], {"B": 1, "H": 2, "S": size}
    arrays = drawn(case, dims, 0)
    got = run_program(_blocked(case.program(), 64, 64), arrays, dims, precision="f64")["y"]
    wanted = case.oracle(**{k: a.astype(np.longdouble) for k, a in arrays.items()})
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


# -- the rule ----------------------------------------------------------------------------------------------------------

ROW = """program @rule {{
  input x: f32[N,V]
  input g: f32[N,V]
  input r: f32[N]
  output y: f32[N]
  kernel @rule rows(i: N) cols(j: V) {{
    %x = load x[i, j] : f32
    %g = load g[i, j] : f32
    %r = load r[i] : f32
    %lowest = const {{value=-inf}} : f32
    %highest = const {{value=inf}} : f32
    %zero = const {{value=0x0p+0}} : f32
    %one = const {{value=0x1p+0}} : f32
    %m = max_cols %x : f32
    %low = eq %m, %lowest : bool
    %b = where %low, %zero, %m : f32
    %d = sub %x, %b : f32
    %e = exp %d : f32
    %p = gt %g, %zero : bool
{lines}
    store y[i] <- %out : f32
  }}
  return y=y
}}"""
CARRIED = {
    "the exponential": "%out = sum_cols %e : f32",
    "times what is free of m": "%t = mul %e, %g : f32\n%out = sum_cols %t : f32",
    "a sum of two such terms": "%t = mul %e, %g : f32\n%u = add %t, %e : f32\n%out = sum_cols %u : f32",
    "where, and 0": "%t = where %p, %e, %zero : f32\n%out = sum_cols %t : f32",
    "divided by what is free of m": "%t = div %e, %g : f32\n%out = sum_cols %t : f32",
    "negated": "%t = neg %e : f32\n%out = sum_cols %t : f32",
    "a factor of the row": "%t = mul %e, %r : f32\n%out = sum_cols %t : f32",
    "a factor m": "%t = mul %m, %e : f32\n%out = sum_cols %t : f32",
    "divided by another sum": "%s = sum_cols %g : f32\n%t = div %e, %s : f32\n%out = sum_cols %t : f32",
    "divided by its own sum": "%s = sum_cols %e : f32\n%t = div %e, %s : f32\n%u = mul %t, %g : f32\n"
    "%out = sum_cols %u : f32",
    "one factor of two in the denominator": "%t = mul %e, %e : f32\n%u = div %t, %e : f32\n%out = sum_cols %u : f32",
}
NOT_CARRIED = {
    "two factors": "%t = mul %e, %e : f32\n%out = sum_cols %t : f32",
    "a factor in the denominator": "%t = div %g, %e : f32\n%out = sum_cols %t : f32",
    "none is left": "%t = div %e, %e : f32\n%u = add %t, %d : f32\n%out = sum_cols %u : f32",
    "another factor depends on m": "%t = gt %x, %m : bool\n%c = where %t, %one, %g : f32\n%h = add %c, %b : f32\n"
    "%k = mul %h, %g : f32\n%u = mul %e, %k : f32\n%out = sum_cols %u : f32",
    "the condition depends on m": "%t = ge %x, %m : bool\n%u = where %t, %e, %zero : f32\n%out = sum_cols %u : f32",
    "where, and something else": "%t = where %p, %e, %one : f32\n%out = sum_cols %t : f32",
    "a term without one": "%t = add %e, %g : f32\n%out = sum_cols %t : f32",
    "another value than x in the exponent": "%c = sub %g, %b : f32\n%t = exp %c : f32\n%out = sum_cols %t : f32",
    "a multiple in the exponent": "%c = add %d, %d : f32\n%t = exp %c : f32\n%out = sum_cols %t : f32",
    "a function of it": "%t = sqrt %e : f32\n%out = sum_cols %t : f32",
    "the maximum of it": "%out = max_cols %e : f32",
    "a mean before the sum": "%s = sum_cols %x : f32\n%c = sub %x, %s : f32\n%t = mul %c, %c : f32\n"
    "%u = sum_cols %e : f32\n%v = sum_cols %t : f32\n%out = add %u, %v : f32",
    "masked, shifted by m": "%c = sub %x, %m : f32\n%h = exp %c : f32\n%t = where %p, %h, %zero : f32\n"
    "%out = sum_cols %t : f32",
}


def _rule(lines):
    text = ROW.format(lines="\n".join(f"    {line}" for line in lines.split("\n")))
    program = parse_program(text)
    (kernel,) = program.steps
    program = parse_program(str(program).replace("kernel @rule", f"kernel @{kernel.name}"))
    verify_program(program)
    return program


def _forced(monkeypatch):
    """Kernels alone become loops, whether that pays or not."""
    from gradc.passes.column_blocking import carry_sums as module

    monkeypatch.setattr(module, "_has_carried", lambda body: True)


def _same_values(program, blocked):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((5, 7)).astype(np.float32),
        "g": rng.uniform(-2, 2, (5, 7)).astype(np.float32),
        "r": rng.standard_normal(5).astype(np.float32),
    }
    arrays["x"][1, :3] = -np.inf
    arrays["x"][2] += np.arange(7) * 40
    wanted = run_program(program, arrays, precision="f64")["y"]
    np.testing.assert_allclose(run_program(blocked, arrays, precision="f64")["y"], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("columns", (1, 2, 7))
def test_one_factor_is_carried(name, columns):
    program = _rule(CARRIED[name])
    blocked = _blocked(program, 2, columns)
    (loop,) = blocked.loops
    assert len(loop.sweeps) == 1 and any(c.by for c in loop.sweeps[0].carries)
    _same_values(program, blocked)


@pytest.mark.parametrize("name", NOT_CARRIED)
@pytest.mark.parametrize("columns", (1, 2, 7))
def test_what_is_no_factor_gets_another_sweep(name, columns, monkeypatch):
    _forced(monkeypatch)
    program = _rule(NOT_CARRIED[name])
    blocked = _blocked(program, 2, columns)
    (loop,) = blocked.loops
    assert len(loop.sweeps) == 2
    final = loop.sweeps[1].carries
    assert final and not any(c.by for c in final)
    _same_values(program, blocked)


@pytest.mark.parametrize("columns", (0, 1, 3))
def test_a_sum_relative_to_a_maximum_that_is_minus_infinity(columns):
    """NaN where m itself is subtracted, 0 of no columns."""
    program = _rule("%c = sub %x, %m : f32\n%h = exp %c : f32\n%t = mul %h, %g : f32\n%out = sum_cols %t : f32")
    x = np.full((2, columns), -np.inf, np.float32)
    x[1] = 3
    arrays = {"x": x, "g": np.full((2, columns), 2, np.float32), "r": np.zeros(2, np.float32)}
    wanted = np.array([np.nan if columns else 0.0, 2.0 * columns])
    np.testing.assert_array_equal(run_program(program, arrays, precision="f64")["y"], wanted)
    blocked = _blocked(program, 2, 2)
    assert len(blocked.loops[0].sweeps) == 1
    np.testing.assert_array_equal(run_program(blocked, arrays, precision="f64")["y"], wanted)


# What a mask leaves is relative to an infinite maximum: only where these rows are is the difference seen.
def test_a_mask_over_an_infinite_maximum(monkeypatch):
    _forced(monkeypatch)
    for shift in ("%m", "%b"):
        program = _rule(
            f"%c = sub %x, {shift} : f32\n%h = exp %c : f32\n%t = where %p, %h, %zero : f32\n%out = sum_cols %t : f32"
        )
        x = np.full((3, 4), -np.inf, np.float32)
        x[1, 1], x[2] = np.inf, 1
        g = np.full((3, 4), -1, np.float32)
        g[1, 0] = g[2, 2] = 1
        x[1, 0] = 2
        arrays = {"x": x, "g": g, "r": g[:, 0]}
        wanted = run_program(program, arrays, precision="f64")["y"]
        got = run_program(_blocked(program, 2, 1), arrays, precision="f64")["y"]
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "lines",
    (
        "%t = scan %e {combine=\"sum\", reverse=false} : f32\n%out = sum_cols %t : f32",
        "%t = argmax_cols %x : i64\n%out = cast %t {dtype=f32} : f32",
    ),
)  # fmt: skip
def test_kernels_with_other_statements_stay(lines, monkeypatch):
    _forced(monkeypatch)
    program = _rule(lines)
    assert carry_sums(program) == program


def test_a_kernel_alone_stays_where_nothing_is_carried():
    program = _rule("%out = sum_cols %g : f32")
    assert carry_sums(program) == program and isinstance(program.steps[0], Kernel)


def test_programs_with_sweeps_stay():
    blocked = carry_sums(CASES["causal"].program())
    assert carry_sums(blocked) == blocked


def test_the_sizes_and_the_tile_are_what_was_asked_for():
    tile = Tile("mma", 4, 2)
    (loop,) = carry_sums(CASES["causal"].program(), rows=32, columns=128, tile=tile).loops
    assert isinstance(loop, Loop) and loop.by == 32 and loop.tile == tile and not loop.blocks and not loop.cols
    (sweep,) = loop.sweeps
    assert sweep.by == 128 and str(sweep.to) == "row+rows"
    assert [str(c).partition(": ")[2] for c in sweep.carries] == [
        "f32[rows] max",
        "f32[rows] sum by exp(top)",
        "f32[rows,4] sum by exp(top)",
    ]
    verify_program(carry_sums(CASES["causal"].program(), tile=tile))


PRODUCTS = """program @products {
  input q: f16[N,4]
  input k: f16[M,4]
  input v: f16[M,4]
  input x: f32[N,5]
  output y: f32[N,4]
  output z: OUTSIDE
  loop rows(r: N) by(4) count(c)COLUMNS {
    block s: f32[c,WIDE]
    block e: f16[c,WIDE]
    call @scores axes(m: c, n: WIDE, k: 4) s[m, n] <- matmul q[m + (r), k], k[n, k]
    kernel @softmax rows(i: c) cols(j: WIDE) {
      %0 = load s[i, j] : f32
      %1 = max_cols %0 : f32
      %2 = sub %0, %1 : f32
      %3 = exp %2 : f32
LINES
    }
    call @sums axes(m: c, n: 4, k: WIDE) y[m + (r), n] <- matmul e[m, k], v[k, n]
  }
  return y=y, z=z
}"""
WEIGHTS = """%4 = sum_cols %3 : f32
%5 = div %3, %4 : f32
%6 = cast %5 {dtype=f16} : f16
store e[i, j] <- %6 : f16
"""


def _products(lines, outside, wide="M", columns=""):
    text = PRODUCTS.replace("LINES", lines.rstrip("\n").replace("}\nkernel", "    }\n    kernel"))
    text = text.replace("OUTSIDE", outside).replace("WIDE", wide).replace("COLUMNS", columns)
    program = parse_program(text)
    verify_program(program)
    return program


def _arrays_of_products(size):
    rng = np.random.default_rng(0)
    shapes = {"q": (5, 4), "k": (size, 4), "v": (size, 4), "x": (5, 5)}
    arrays = {name: 20 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: a.astype(np.float32 if name == "x" else np.float16) for name, a in arrays.items()}


@pytest.mark.parametrize("power", (0, 1))
def test_no_factor_leaves_a_cast_that_needs_it(power):
    """Squares of scores do not fit f16, their shares do; exponentials that are at most 1 do."""
    term = ("%7 = mul %0, %0 : f32", "%7 = mul %3, %3 : f32")[power]
    program = _products(
        f"{term}\n%8 = sum_cols %7 : f32\n%9 = div %7, %8 : f32\n%10 = cast %9 {{dtype=f16}} : f16\n"
        "store e[i, j] <- %10 : f16\n%11 = sum_cols %3 : f32\nstore z[i + (r)] <- %11 : f32",
        "f32[N]",
    )
    arrays = _arrays_of_products(6)
    wanted, blocked = run_program(program, arrays), _blocked(program, 2, 2)
    assert len(blocked.loops[0].sweeps) == 2
    got = run_program(blocked, arrays)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-2, atol=2e-2)


def test_a_factor_leaves_the_cast_of_an_exponential():
    """A cast of the weights is no reason for another sweep."""
    program = _products(WEIGHTS + "store z[i + (r)] <- %4 : f32", "f32[N]")
    blocked, arrays = _blocked(program, 2, 2), _arrays_of_products(6)
    assert len(blocked.loops[0].sweeps) == 1
    np.testing.assert_allclose(run_program(blocked, arrays)["y"], run_program(program, arrays)["y"], rtol=1e-2)


@pytest.mark.parametrize("sums", (False, True))
def test_loops_with_a_kernel_of_other_columns_stay(sums):
    """It is no kernel of the product's columns."""
    other = "%1 = sum_cols %0 : f32\nstore z[i + (r)] <- %1" if sums else "store z[i + (r), j] <- %0"
    lines = f"{WEIGHTS}}}\nkernel @other rows(i: c) cols(j: 5) {{\n%0 = load x[i + (r), j] : f32\n{other} : f32"
    program = _products(lines, "f32[N]" if sums else "f32[N,5]")
    assert carry_sums(program) == program


def test_what_a_loop_stores_of_its_columns_is_stored_of_all():
    """Blocks of columns that a loop leaves out would leave it unwritten."""
    program = _products(WEIGHTS + "store z[i + (r), j] <- %5 : f32", "f32[N,M]", "w", " cols(w: M) to(r + c)")
    blocked = _blocked(program, 2, 2)
    assert [sweep.to is None for sweep in blocked.loops[0].sweeps] == [False, True]


# -- GRADC_VALIDATE ----------------------------------------------------------------------------------------------------

VALIDATED = ("softmax", "logsumexp", "linear cross entropy", "attention", "causal", "bias of heads")


def _validated(case: Case, wrt: tuple[str, ...] = ()):
    program = case.program("forward", wrt)
    graph = case.forward_graph(wrt) if wrt else case.graph
    pipeline = Pipeline()
    with knobs.VALIDATE.set(True):
        pipeline.keep("forward.schedule", graph, lambda: program)
        return pipeline.run(carry_sums, program, of="forward", rows=3, columns=2)


@pytest.mark.parametrize("name", VALIDATED)
def test_the_pass_is_validated(name):
    assert any(loop.sweeps for loop in _validated(CASES[name]).loops)
    assert carry_sums.licence == "REAL"


@pytest.mark.parametrize("fault", ("no rescaling", "no factor", "two factors"))
def test_a_fault_is_found(fault, monkeypatch):
    """Each makes the pass wrong, and its name is in the error."""
    if fault == "no rescaling":
        from gradc.passes.column_blocking import carry_sums as module

        plain = module.Carry
        monkeypatch.setattr(module, "Carry", lambda name, type_, combine, by: plain(name, type_, combine))
    elif fault == "no factor":
        monkeypatch.setattr(carried, "split", _without_factors(carried.split))
    else:  # two factors exp(x - m) are taken for one
        monkeypatch.setattr(carried._Term, "is_relative", lambda self, value: self.power(value) is not None)
    squares = Case(lambda q, k, v: _squared(q, k) @ v, CASES["causal"].types, None)
    case = squares if fault == "two factors" else CASES["causal"]
    wrt = ("q",) if fault == "no factor" else ()  # where the sum is a residual, it divides the weights in the loop
    with pytest.raises(InternalError, match=r"^forward.carry_sums: .* no longer means the same"):
        _validated(case, wrt)


def _without_factors(split):
    """What leaves a sum is lost: 1 multiplies it."""

    def made(body, value):
        core, factors = split(body, value)
        return core, tuple(body.constant(1.0, body.stmts[f].dtype) for f in factors)

    return made


def _squared(q, k):
    from gradc import ops

    s = q @ k.T
    e = ops.exp(s - ops.broadcast_to(ops.amax(s, axis=-1, keepdims=True), s.shape))
    return e * e


def test_gradc_opt_runs_the_passes(tmp_path, capsys):
    program = CASES["causal"].program("backward", ("q", "k", "v"))
    (tmp_path / "backward.gir").write_text(str(program))
    assert main(["opt", str(tmp_path / "backward.gir"), "-p", "split_loops,carry_sums"]) == 0
    assert parse_program(capsys.readouterr().out) == carry_sums(split_loops(program))
    (tmp_path / "forward.gir").write_text(str(CASES["causal"].graph))
    order = "decompose,upcast,simplify,fold,schedule,block_rows,carry_sums"
    assert main(["opt", str(tmp_path / "forward.gir"), "-p", order]) == 0
    (sweep,) = parse_program(capsys.readouterr().out).loops[0].sweeps
    assert [c.combine for c in sweep.carries] == ["max", "sum", "sum"]
