"""Programs written by hand that would read or write outside their arrays: each is refused before it runs."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc.errors import TypeRuleError
from gradc.ir.program_text import parse_program

BIG = 10**6
CHECK = (
    'kernel @c rows() cols(n: N) {{\n %0 = load t[n] : i64\n check %0 {{bound={bound}, op="gather", source="t"}}\n}}'
)
ONES = "kernel @ones rows() cols(n: N) {\n %0 = const {value=1} : i64\n store u[n] <- %0 : i64\n}"
READ = "kernel @read rows() cols(n: N) {\n %0 = load u[n] : i64\n %1 = load x[%0] : f32\n store y[n] <- %1 : f32\n}"
VIA = (
    CHECK
    + "\nkernel @r rows() cols(n: N) {{\n %0 = load t[n] : i64\n %1 = cast %0 {{dtype={via}}} : {via}\n %2 = cast %1"
    " {{dtype=i64}} : i64\n %3 = load x[%2] : f32\n store y[n] <- %3 : f32\n}}"
)
ANOTHER = f"%1 = const {{value={BIG}}} : i64"

STORED = {
    "one element only": "kernel @a rows() cols() {\n %0 = const {value=1} : i64\n store u[0] <- %0 : i64\n}",
    "added to": (
        f"kernel @a rows(n: N) cols() {{\n %0 = const {{value=1}} : i64\n store u[n] <- %0 : i64\n {ANOTHER}\n accum"
        " u[n] <- %1 : i64\n}"
    ),
    "overwritten as another type": (
        "kernel @a rows() cols(n: N) {\n %0 = const {value=1} : i64\n store u[n] <- %0 : i64\n %1 = const {value=1e300}"
        " : f64\n store w[n] <- %1 : f64\n}"
    ),
    "by one of two": (
        f"select {{\n when N >= 9: {ONES}\n else: kernel @a rows(n: N) cols() {{\n {ANOTHER}\n accum u[n] <- %1 : i64\n"
        " }\n}"
    ),
    "checked, then overwritten": (
        f'{ONES}\nkernel @a rows(n: N) cols() {{\n %0 = load u[n] : i64\n check %0 {{bound=5, op="g", source="u"}}\n'
        f" {ANOTHER}\n store u[n] <- %1 : i64\n}}"
    ),
    "of a slot that another takes": f"{ONES}\nkernel @a rows() cols(n: N) {{\n {ANOTHER}\n store v[n] <- %1 : i64\n}}",
    "checked for each of no rows": (
        "kernel @o rows() cols(n: N) {\n %0 = load t[n] : i64\n store u[n] <- %0 : i64\n}\nkernel @a rows(m: M) cols(n:"
        ' N) {\n %0 = load u[n] : i64\n check %0 {bound=5, op="g", source="u"}\n}'
    ),
}
HEAD = (
    "input t: i64[N]\ninput z: f32[M]\ninput x: f32[{size}]\noutput y: f32[N]\ntemp u: i64[N] slot 0\ntemp v: i64[N]"
    " slot 0\ntemp w: f64[N] of u\n"
)
STEPS = {
    **{f"stored: {name}": (5, f"{steps}\n{READ}") for name, steps in STORED.items()},
    "read while it is written": (
        5,
        (
            f"{ONES}\nkernel @a rows(n: N) cols() {{\n {ANOTHER}\n store u[n] <- %1 : i64\n %0 = load u[n] : i64\n %2 ="
            " load x[%0] : f32\n store y[n] <- %2 : f32\n}"
        ),
    ),
    "rounded up": (260, VIA.format(bound=260, via="bf16")),
    "rounded to infinity": (70000, VIA.format(bound=70000, via="f16")),
    "rounded up in a byte": (20, VIA.format(bound=20, via="f8e4m3")),
    "a factor that wraps": (
        5,
        (
            "kernel @a rows() cols(n: N) {\n %0 = load t[n] : i64\n %1 = const {value=0} : i64\n %2 = ge %0, %1 :"
            " bool\n %3 = where %2, %0, %1 : i64\n %4 = index %3*4611686018427387904 : i64\n %5 = const {value=4} :"
            " i64\n %6 = le %4, %5 : bool\n %7 = load x[%4] where %6 : f32\n store y[n] <- %7 : f32\n}"
        ),
    ),
    "a place that wraps, divided": (
        5,
        (
            "kernel @a rows() cols(n: N) {\n %0 = load t[n] : i64\n %1 = index n : i64\n %2 = const {value=1} : i64\n"
            " %3 = right_shift %1, %2 : i64\n %4 = in_bounds %0*2 + n {lo=0, hi=8} : bool\n %7 = load x[%0 + %3]"
            " where %4 : f32\n store y[n] <- %7 : f32\n}"
        ),
    ),
    "a constant that its type wraps": (
        201,
        (
            "kernel @a rows() cols(n: N) {\n %0 = const {value=200} : i8\n %1 = load x[%0] : f32\n store y[n] <- %1 :"
            " f32\n}"
        ),
    ),
    "checked where a mask is": (
        5,
        (
            "kernel @c rows() cols(n: N) {\n %1 = in_bounds n {lo=0, hi=1} : bool\n %0 = load t[n] where %1 : i64\n"
            ' check %0 {bound=5, op="gather", source="t"}\n}\nkernel @r rows() cols(n: N) {\n %0 = load t[n] : i64\n %1'
            " = load x[%0] : f32\n store y[n] <- %1 : f32\n}"
        ),
    ),
    "a store with a mask into what holds nothing": (
        5,
        (
            "kernel @a rows() cols(n: N) {\n %0 = load t[n] : i64\n %1 = in_bounds %0 {lo=0, hi=5} : bool\n %2 = load"
            " x[0] : f32\n store y[n] <- %2 where %1 : f32\n}"
        ),
    ),
    "two kernels of one name": (
        5,
        (
            "kernel @a rows() cols(n: N) {\n %0 = load t[n] : i64\n store u[n] <- %0 : i64\n}\nkernel @a rows() cols(n:"
            " N) {\n %0 = load x[0] : f32\n store y[n] <- %0 : f32\n}"
        ),
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_is_not_known_to_be_inside_is_refused(case: str) -> None:
    size, steps = STEPS[case]
    program = parse_program(f"program @p {{\n{HEAD.format(size=size)}{steps}\nreturn y=y\n}}")
    with pytest.raises(TypeRuleError, match=r"nothing before says|a mask leaves elements of y as they are|they differ"):
        gradc.Executable(program, "cpu")


def test_what_is_known_to_be_inside_runs() -> None:
    """The same, with nothing wrong: written whole, by either of two, in a type that holds it."""
    either = ONES.replace("@ones", "@two").replace("value=1", "value=2")
    for size, steps in (
        (5, f"{ONES}\n{READ}"),
        (5, f"select {{\n when N >= 9: {ONES}\n else: {either}\n}}\n{READ}"),
        (256, VIA.format(bound=256, via="bf16")),
    ):
        program = parse_program(
            f"program @p {{\n{HEAD.format(size=size)}{steps}\nreturn y=y\n}}".replace("temp v: i64[N] slot 0\n", "")
        )
        run = gradc.Executable(program, "numpy").run
        assert run(t=np.ones(3, np.int64), z=np.zeros(0, np.float32), x=np.arange(size, dtype=np.float32))["y"][0] in (
            1,
            2,
        )


@pytest.mark.parametrize("rows", ["2000", "N"])
def test_a_product_of_more_rows_than_there_are(rows: str) -> None:
    program = parse_program(
        "program @p {\ninput a: f32[2,3]\ninput b: f32[3,2]\ninput c: f32[N]\noutput y: f32[2,2]\ncall @m axes(m:"
        f" {rows}, n: 2, k: 3) y[m, n] <- matmul a[m, k], b[k, n]\nreturn y=y\n}}"
    )
    executable = gradc.Executable(program, "cpu")
    inputs = {"a": np.ones((2, 3), np.float32), "b": np.ones((3, 2), np.float32)}
    with pytest.raises(TypeRuleError, match="axis 0 of a has 2, and m is not inside"):
        executable.run(**inputs, c=np.zeros(2000, np.float32))
    if rows == "N":
        assert (executable.run(**inputs, c=np.zeros(2, np.float32))["y"] == 3).all()


TWO_TEMPS = """program @p {
  input x: f32[N]
  temp a: f32[N]SLOT
  temp b: f32[N]SLOT
  output y: f32[N]
  kernel @k1 rows() cols(i0: N) {
    phase
    %0 = load x[i0] : f32
    store a[i0] <- %0 : f32
  }
  kernel @k2 rows() cols(i0: N) {
    phase
    %0 = load a[i0] : f32
    %1 = neg %0 : f32
    store b[i0] <- %1 : f32
  }
  kernel @k3 rows() cols(i0: N) {
    phase
    %0 = load a[i0] : f32
    %1 = load b[i0] : f32
    %2 = sub %0, %1 : f32
    store y[i0] <- %2 : f32
  }
  return y=y
}"""


@pytest.mark.parametrize("slot", ["", " slot 0"], ids=["no slot", "one slot for both"])
@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_slots_of_a_text_are_not_believed(slot: str, target: str) -> None:
    """Without a slot a temp has no memory; in one slot two temps that are in use at once overwrite each other."""
    x = np.arange(5, dtype=np.float32)
    run = gradc.Executable(parse_program(TWO_TEMPS.replace("SLOT", slot)), target).run
    np.testing.assert_array_equal(run(x=x)["y"], 2 * x)
