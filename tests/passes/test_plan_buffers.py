"""Temps in one workspace: who shares memory, and how much there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis.lifetimes import lifetimes, offsets
from gradc.errors import IndexOutOfRange
from gradc.ir.dims import evaluate
from gradc.ir.kernel import Program, alternatives
from gradc.ir.program_text import parse_program
from gradc.passes.program.plan_buffers import plan_buffers
from gradc.runtime.executable import Executable
from gradc.targets.cpu import PRIVATE_BYTES


def attention(x: Any, w: Any, v: Any) -> Any:
    q = ops.tanh(x @ w)
    k = ops.sin(x @ v)
    h = ops.softmax(q @ ops.transpose(k)) @ x
    return ops.softmax(h @ w) @ ops.transpose(w)


def programs() -> list[Program]:
    graph = gradc.trace(attention, x="f32[N,24]", w="f32[24,M]", v="f32[24,M]")
    return [e.program for e in gradc.compile(graph, wrt=["x", "w", "v"], target="numpy").executables.values()]


@pytest.mark.parametrize(
    "dims",
    [{"N": 300, "M": 7}, {"N": 5, "M": 1000}, {"N": 64, "M": 64}, {"N": 0, "M": 1}, {"N": 800, "M": 30_000}],
    ids=str,
)
def test_what_is_alive_together_lies_apart_and_as_close_as_can_be(dims: dict[str, int]) -> None:
    for program in programs():
        span, outputs = lifetimes(program), [b for _, b in program.outputs]
        size = {n: -(-evaluate(program.buffer[n].type.nbytes, dims) // 64) * 64 for n in span}
        at, total = offsets(program, dims, 64, outputs)
        assert at.keys() == span.keys() and (at, total) == offsets(program, dims, 64, outputs)
        for a, b in itertools.combinations(span, 2):
            if at[a][0] == at[b][0] and span[a][0] <= span[b][1] and span[b][0] <= span[a][1]:
                assert at[a][1] + size[a] <= at[b][1] or at[b][1] + size[b] <= at[a][1]
        lent = {n for n in span if at[n][0]}
        alive = [sum(size[n] for n in span if span[n][0] <= i <= span[n][1]) for i in range(len(program.steps))]
        assert total <= max(alive, default=0) and (lent or total == max(alive, default=0))  # nothing could be smaller
        for name in lent:
            output = at[name][0]
            used = [
                i
                for i, step in enumerate(program.steps)
                for item in alternatives(step)
                if output in {program.root(n) for n in (*item.reads, *item.writes)}
            ]
            in_place = program.types[name] == program.types[output] and at[name][1] == 0
            assert program.buffer[output].kind == "output" and size[name] >= PRIVATE_BYTES
            assert span[name][1] < min(used) + in_place
            assert at[name][1] + size[name] <= evaluate(program.buffer[output].type.nbytes, dims)
        assert not any(output for output, _ in offsets(program, dims, 64)[0].values())


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
    assert offsets(program, {"N": 16}, 64) == ({"a": ("", 0), "b": ("", 0), "c": ("", 64)}, 128)
    read = plan_buffers(parse_program(STEPS))  # k1 reads a while it writes b and c
    assert offsets(read, {"N": 16}, 64) == ({"a": ("", 0), "b": ("", 128), "c": ("", 192)}, 256)


LENT = """program @p {
  input x: f32[N]
  output small: f32[N]
  output y: f32[4,N]
  temp a: f32[2,N]
  temp b: f32[2,N]
  temp c: f32[4,N]
  kernel @k0 rows(i0: 2) cols(i1: N) {
    phase
    %0 = load x[i1] : f32
    store a[i0, i1] <- %0 : f32
  }
  kernel @k1 rows(i0: 2) cols(i1: N) {
    phase
    %0 = load a[i0, i1] : f32
    %1 = add %0, %0 : f32
    store b[i0, i1] <- %1 : f32
  }
  kernel @k2 rows(i0: 4) cols(i1: N) {
    phase
    %0 = load b[0, i1] : f32
    store c[i0, i1] <- %0 : f32
    store small[i1] <- %0 : f32
  }
  kernel @k3 rows(i0: 4) cols(i1: N) {
    phase
    %0 = load c[i0, i1] : f32
    %1 = add %0, %0 : f32
    store y[i0, i1] <- %1 : f32
  }
  return small=small, y=y
}
"""


def lending() -> Executable:
    return Executable(parse_program(LENT), "cpu")


def test_large_temps_lie_where_outputs_are_written_later() -> None:
    """c where y is written of it, and a and b, which are read before; alive together, they lie apart."""
    n = 1 << 18
    program = lending().program
    at, total = offsets(program, {"N": n}, 64, ["y"])
    assert at == {"c": ("y", 0), "a": ("y", 0), "b": ("", 0)} and total == 8 * n
    assert offsets(program, {"N": n}, 64, ["y", "small"]) == (at, total)  # which has room for none
    assert offsets(program, {"N": n}, 64)[1] == 24 * n
    assert offsets(program, {"N": n // 32}, 64, ["y"])[1] == 24 * n // 32  # small enough for a cache
    read_elsewhere = parse_program(LENT.replace("load c[i0, i1]", "load c[0, i1]"))
    assert offsets(read_elsewhere, {"N": n}, 64, ["y"])[0]["c"] == ("", 0)


def test_memory_says_what_is_lent_and_workspace_size_what_may_not_be() -> None:
    n = 1 << 18
    executable = lending()
    assert executable.own_workspace(N=n) < executable.workspace_size(N=n)
    workspace = np.empty(executable.workspace_size(N=n), np.uint8)
    x, y = np.ones(n, np.float32), np.zeros((4, n), np.float32)
    assert (executable(x=x, out={"y": y}, workspace=workspace)["y"] == 4).all()


@pytest.mark.parametrize("how", ["new", "given", "added to"])
@pytest.mark.parametrize("n", [1 << 18, (1 << 18) + 3])
def test_results_are_right_where_temps_lie_in_them(how: str, n: int) -> None:
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    want = {"small": 2 * x, "y": np.tile(4 * x, (4, 1))}
    given = {} if how == "new" else {"y": np.zeros((4, n), np.float32)}
    got = lending()(x=x, out=given, accumulate=["y"] if how == "added to" else [])
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_no_temp_lies_in_an_array_of_the_callers() -> None:
    """Which an error in the middle of a call leaves as it was, and a donated input is still to be read."""
    n = 1 << 18
    reads = "%1 = load c[i0, i1] : f32\n    %2 = load z[i0, i1] : f32\n    %0 = add %1, %2 : f32\n"
    text = LENT.replace("input x: f32[N]", "input x: f32[N]\n  input z: f32[4,N]").replace(
        "%0 = load c[i0, i1] : f32\n    %1 = add %0, %0 : f32\n    store y[i0, i1] <- %1",
        reads + "    store y[i0, i1] <- %0",
    )
    donating = Executable(parse_program(text), "cpu", donate=["z"])
    x, z = np.ones(n, np.float32), np.arange(4 * n, dtype=np.float32).reshape(4, n)
    want = z + 2
    got = donating(x=x, z=z)
    np.testing.assert_array_equal(got["y"], want)
    assert np.shares_memory(got["y"], z)


def test_an_index_out_of_range_leaves_large_outputs_as_they_were() -> None:
    """One that is known only after temporaries were written, which lie in results that nobody gave."""

    def picked(x: Any, w: Any, more: Any) -> Any:
        h = ops.sin(ops.tanh(x @ w) @ w) @ w
        return ops.index_select(h, 0, ops.argmax(h, 1) + more)

    n = 20_000
    module = gradc.compile(gradc.trace(picked, x="f32[N,64]", w="f32[64,64]", more="i64[N]"), target="cpu")
    x, w, more = np.ones((n, 64), np.float32), np.eye(64, dtype=np.float32), np.arange(n) // 2
    assert module.forward.own_workspace(N=n) < module.forward.workspace_size(N=n)
    y = np.full((n, 64), 7, np.float32)
    more[-1] = n
    with pytest.raises(IndexOutOfRange):
        module.forward(x=x, w=w, more=more, out={"y": y})
    assert (y == 7).all()
