"""Steps that give memory back run early: what the plan says, and that results are the same in every order."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis.lifetimes import offsets
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.passes.program.order_steps import order_steps

DEEP = 6


def _layers(x, **w):
    for i in range(DEEP):
        x = ops.relu(ops.linear(x, w[f"w{i}"]))
    return (x * x).sum()


TYPES = {"x": "f32[64,32]"} | {f"w{i}": "f32[32,32]" for i in range(DEEP)}


def _bytes(program):
    return offsets(program, {}, 64)[1]


def _backward(module):
    return module.backward.program


def test_the_gradients_of_weights_do_not_wait():
    module = gradc.compile(gradc.trace(_layers, **TYPES), wrt=[n for n in TYPES], target="cpu")
    steps = [step for step in _backward(module).steps if hasattr(step, "op")]
    written = [step.out.buffer for step in steps]
    # the gradient of layer k's weight is made before that of layer k - 2's input
    assert [name for name in written if name.startswith("d.w")] == [f"d.w{i}" for i in reversed(range(DEEP))]
    layer = 64 * 32 * 4
    assert _bytes(_backward(module)) <= 3 * layer


TEXT = """
program @p {{
  input x: f32[8,64]
  temp a: f32[8,64]
  temp b: f32[8,64]
  output y: f32[8]
  output z: f32[8]
  kernel @k0 rows(i: 8) cols(j: 64) {{
    %0 = load x[i, j] : f32
    %1 = exp %0 : f32
    store a[i, j] <- %1 : f32
  }}
  kernel @k1 rows(i: 8) cols(j: 64) {{
    %0 = load x[i, j] : f32
    %1 = neg %0 : f32
    store b[i, j] <- %1 : f32
  }}
  {check}
  kernel @k2 rows(i: 8) cols(j: 64) {{
    %0 = load b[i, j] : f32
    %1 = sum_cols %0 : f32
    store y[i] <- %1 : f32
  }}
  kernel @k3 rows(i: 8) cols(j: 64) {{
    %0 = load a[i, j] : f32
    %1 = sum_cols %0 : f32
    store z[i] <- %1 : f32
  }}
  return y=y, z=z
}}
"""
CHECK = """kernel @check rows() cols(i: 8) {
    %0 = index i : i64
    check %0 {bound=8, op="o", source="s"}
  }
"""


@pytest.mark.parametrize(
    ("check", "names"), (("", ["k0", "k3", "k1", "k2"]), (CHECK, ["k0", "k1", "check", "k2", "k3"]))
)
def test_what_frees_more_than_it_takes_runs_first_but_not_before_a_check(check, names):
    program = parse_program(TEXT.format(check=check))
    ordered = order_steps(program)
    assert [step.name for step in ordered.steps] == names
    assert order_steps(ordered) == ordered
    x = {"x": np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)}
    for before, after in zip(run_program(program, x).values(), run_program(ordered, x).values(), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize(("rows", "names"), ((8192, ["k1", "k2", "k0", "k3"]), (8, ["k0", "k1", "k2", "k3"])))
def test_what_inputs_alone_decide_is_made_where_it_is_read(rows, names):
    """Where it is large; ``a`` is read by a step that waits for all others."""
    text = TEXT.format(check="").replace(
        "store z[i] <- %1", "%2 = load y[i] : f32\n    %3 = add %1, %2 : f32\n    store z[i] <- %3"
    )
    program = parse_program(text.replace("[8", f"[{rows}").replace("i: 8", f"i: {rows}"))
    ordered = order_steps(program)
    assert [step.name for step in ordered.steps] == names
    assert order_steps(ordered) == ordered
    x = {"x": np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)}
    for before, after in zip(run_program(program, x).values(), run_program(ordered, x).values(), strict=True):
        assert np.array_equal(before, after)


def test_what_another_step_still_reads_is_not_given_back():
    kernel = "  kernel @k4 rows(i: 8) cols(j: 64) {\n    %0 = load a[i, j] : f32\n    store w[i, j] <- %0 : f32\n  }\n"
    text = TEXT.format(check="").replace("  return", f"{kernel}  return").replace("z=z", "z=z, w=w")
    text = text.replace("  output y", "  output w: f32[8,64]\n  output y")
    assert [step.name for step in order_steps(parse_program(text)).steps] == ["k0", "k1", "k2", "k3", "k4"]


def test_an_alternating_program_keeps_its_dependences():
    """Every step after those whose results it reads, and before those that overwrite what it reads."""
    module = gradc.compile(gradc.trace(_layers, **TYPES), wrt=[n for n in TYPES], target="numpy")
    program = _backward(module)
    written = {program.root(b.name) for b in program.buffers if b.kind == "input"}
    for step in program.steps:
        assert {program.root(b) for b in step.reads} <= written | {program.root(b) for b in step.writes}
        written |= {program.root(b) for b in step.writes}
