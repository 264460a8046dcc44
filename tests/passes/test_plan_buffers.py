"""Temps in one workspace: who shares memory, and how much there is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import gradc
from gradc import ops
from gradc.ir.dims import evaluate
from gradc.ir.kernel import Program
from gradc.ir.program_text import parse_program
from gradc.passes.program.plan_buffers import lifetimes, offsets, plan_buffers


def attention(x: Any, w: Any, v: Any) -> Any:
    q = ops.tanh(x @ w)
    k = ops.sin(x @ v)
    h = ops.softmax(q @ ops.transpose(k)) @ x
    return ops.softmax(h @ w) @ ops.transpose(w)


def programs() -> list[Program]:
    graph = gradc.trace(attention, x="f32[N,24]", w="f32[24,M]", v="f32[24,M]")
    return [e.program for e in gradc.compile(graph, wrt=["x", "w", "v"], target="numpy").executables.values()]


@pytest.mark.parametrize(
    "dims", [{"N": 300, "M": 7}, {"N": 5, "M": 1000}, {"N": 64, "M": 64}, {"N": 0, "M": 1}], ids=str
)
def test_what_is_alive_together_lies_apart_and_as_close_as_can_be(dims: dict[str, int]) -> None:
    for program in programs():
        span = lifetimes(program)
        size = {n: -(-evaluate(program.buffer[n].type.nbytes, dims) // 64) * 64 for n in span}
        at, total = offsets(program, dims, 64)
        assert at.keys() == span.keys() and (at, total) == offsets(program, dims, 64)
        for a, b in itertools.combinations(span, 2):
            if span[a][0] <= span[b][1] and span[b][0] <= span[a][1]:
                assert at[a] + size[a] <= at[b] or at[b] + size[b] <= at[a]
        alive = [sum(size[n] for n in span if span[n][0] <= i <= span[n][1]) for i in range(len(program.steps))]
        assert total == max(alive, default=0)  # nothing could be smaller


STEPS = """program @p {
  input x: f32[N]
  output y: f32[N]
  temp a: f32[2*N]
  temp b: f32[N]
  temp c: f32[N]
  kernel @k0 rows() cols(i0: N) {
    phase
    %0 = load x[i0] : f32
    store a[i0] <- %0 : f32
  }
  kernel @k1 rows() cols(i0: N) {
    phase
    %0 = load a[i0] : f32
    store b[i0] <- %0 : f32
    store c[i0] <- %0 : f32
  }
  kernel @k2 rows() cols(i0: N) {
    phase
    %0 = load b[i0] : f32
    %1 = load c[i0] : f32
    store y[i0] <- %0 : f32
  }
  return y=y
}
"""


def test_two_small_temps_take_the_place_of_a_large_one() -> None:
    """Which a slot, whose size is that of one temp, cannot: here b and c are read after a."""
    program = plan_buffers(parse_program(STEPS.replace("%0 = load a[i0]", "%0 = load x[i0]")))
    assert len({b.slot for b in program.buffers if b.kind == "temp"}) == 2
    assert offsets(program, {"N": 16}, 64) == ({"a": 0, "b": 0, "c": 64}, 128)
    read = plan_buffers(parse_program(STEPS))  # k1 reads a while it writes b and c
    assert offsets(read, {"N": 16}, 64) == ({"a": 0, "b": 128, "c": 192}, 256)
