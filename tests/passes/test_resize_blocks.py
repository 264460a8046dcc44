"""resize_blocks: gathers of blocks are taken first where others can be computed in place of them, and memory says how
many rows a block has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis.lifetimes import may_overwrite
from gradc.compiler import run_passes
from gradc.interp import run_program
from gradc.ir.kernel import Call, Kernel
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.module.options import Options
from gradc.passes.manager import program_pass
from gradc.passes.row_blocking import wide_products
from gradc.passes.row_blocking.resize_blocks import resize_blocks


def before(dtype, rows=8192, classes=50257, features=768):
    """The program as the pass is given it."""
    types = {"x": f"{dtype}[{rows},{features}]", "w": f"{dtype}[{classes},{features}]", "t": f"i64[{rows}]"}
    graph = gradc.trace(lambda x, w, t: ops.linear_cross_entropy(x, w, t), **types)
    given = []

    @program_pass("REAL")
    def kept(program):
        given.append(program)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradc.compiler.resize_blocks", kept)
        run_passes(graph, ("x", "w"), Options(), "cuda")
    return given[0]


@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 2176), ("f32", 1152)])
def test_a_block_has_as_many_rows_as_memory_has_room_for(dtype, rows):
    program = before(dtype)
    (loop,), made = program.loops, resize_blocks(program)
    verify_program(made)
    assert parse_program(str(made)) == made
    (own,) = made.loops
    assert (loop.by, own.by) == (768, rows)
    first, second = (step for step in own.steps if isinstance(step, Kernel))
    logits, slopes, at = own.blocks
    assert not first.cols and first.writes == (at.name,)
    assert may_overwrite(made, second, logits.name, slopes.name)


@pytest.mark.parametrize("rows", [300, 513])
def test_values_are_the_same(rows, monkeypatch):
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)
    program = before("bf16", rows, 200, 16)
    made = resize_blocks(program)
    assert [b.name for loop in made.loops for b in loop.blocks if b.name.endswith(".at")]
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((rows, 16)),
        "w": rng.standard_normal((200, 16)),
        "t": rng.integers(0, 200, rows),
    }
    wanted, got = (run_program(p, arrays, precision="f64") for p in (program, made))
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, atol=1e-15)


def test_a_gather_stays_where_nothing_lies_in_place_of_what_it_reads():
    """The logits are read once more, behind the kernel that computes their gradient."""
    program = before("bf16")
    (loop,) = program.loops
    logits, slopes = (b.name for b in loop.blocks)
    number = next(n for n, step in enumerate(loop.steps) if isinstance(step, Call) and step.add)
    call = loop.steps[number]
    args = tuple(replace(o, buffer=logits if o.buffer == slopes else o.buffer) for o in call.args)
    steps = (*loop.steps[:number], replace(call, args=args), *loop.steps[number + 1 :])
    whole = replace(program, steps=tuple(replace(loop, steps=steps) if s is loop else s for s in program.steps))
    (own,) = resize_blocks(whole).loops
    assert len(own.blocks) == 2 and own.steps == steps and own.by == 1152
