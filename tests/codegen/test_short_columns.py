"""Short columns under rows of symbolic sizes, for every op: the cpu against NumPy, with every access in C looked at
(GRADC_BOUNDS).

The registry's samples have one symbol, or none, beside their short axes, and random graphs bound all symbols to one
size: a kernel whose columns are joined with the rows around them names its sizes in another order, which shows only
where two symbols have two sizes, and a value is read by part of the rows.  So each case has symbols for its sizes, and
every second one of an op has its operands repeated along their first axis besides.  Half of an op's samples are taken.
"""

from __future__ import annotations

import long_tests
import numpy as np
import pytest
from agreement import NAMES, OTHERS, POINTWISE, agree_with_numpy, compiled
from registry import Case, cases, repeated, symbolic_rows

import gradc
from gradc import knobs
from gradc.errors import InternalError
from gradc.ir.dims import symbol
from gradc.ir.kernel import Buffer, Call, Kernel, Program
from gradc.ir.statement import Index, Operand, Stmt
from gradc.ir.types import F32, parse_type
from gradc.runtime.host.cpu import CpuProgram

FLOATS = ("f32", "f64")


def derived(name: str) -> list[Case]:
    """The op's samples with symbols for their sizes; none where it wants numbers."""
    chosen = (case for case in cases(FLOATS, names=[name]) if case.dtype in ("", FLOATS[case.number % 2]))
    return [new for case in chosen if (new := symbolic_rows(case))]


def test_most_ops_have_such_a_case() -> None:
    assert sum(bool(derived(name)) for name in NAMES) >= 90


@long_tests.values
@pytest.mark.parametrize("name", [*compiled(OTHERS, turn=2), *POINTWISE[::3]])
def test_cpu_is_numpy(name: str) -> None:
    every = derived(name)
    found = every[NAMES.index(name) % 2 :: 2] or every
    in_turns = [repeated(case) or case if k % 2 else case for k, case in enumerate(found)]
    if len(found) == 1 and (other := repeated(found[0])):
        in_turns.append(other)
    with knobs.BOUNDS.set(True):
        agree_with_numpy(in_turns, (), target="cpu")


@pytest.mark.parametrize("op", ["load", "store"])
def test_an_access_outside_is_reported(op: str) -> None:
    """A program that no verifier has seen."""
    here, there = (Index.of("i0"),), (Index.of("i0") + 2,)
    body = (
        Stmt("%0", "load", (), F32, "x", there if op == "load" else here),
        Stmt("", "store", ("%0",), F32, "y", there if op == "store" else here),
    )
    buffers = (Buffer("x", parse_type("f32[N]"), "input"), Buffer("y", parse_type("f32[N]"), "output"))
    program = Program("p", buffers, (Kernel("k", (), (("i0", symbol("N")),), body),), (), (("y", "y"),))
    x, y = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    with knobs.BOUNDS.set(True):
        compiled = CpuProgram(program)
        with pytest.raises(InternalError, match=r"k touches element [34] of an array of 3"):
            compiled.run({"x": x, "y": y}, compiled.bind({"N": 3}))


PRODUCT = {"a": "f32[B,M,K]", "b": "i8[K,4]", "scale": "f32[4]", "out": "f32[B,M,4]"}
SHORTER = {"": "f32[]", "a": "f32[B,M - 1,K]", "b": "i8[K - 1,4]", "scale": "f32[3]", "out": "f32[B,M - 1,4]"}


@pytest.mark.parametrize("name", SHORTER)
def test_a_product_that_reaches_outside_is_reported(name: str) -> None:
    """Operand ``name`` is a row too short; at a size of 0 nothing is touched."""
    buffers = tuple(
        Buffer(n, parse_type(SHORTER[n] if n == name else text), "output" if n == "out" else "input")
        for n, text in PRODUCT.items()
    )
    e, m, k, n = (Index.of(axis) for axis in "emkn")
    axes = (("e", symbol("B")), ("m", symbol("M")), ("k", symbol("K")), ("n", 4))
    call = Call(
        "product",
        "matmul",
        axes,
        Operand("out", (e, m, n)),
        (Operand("a", (e, m, k)), Operand("b", (k, n), Operand("scale", (n,)))),
    )
    with knobs.BOUNDS.set(True):
        compiled = CpuProgram(Program("p", buffers, (call,), (), (("out", "out"),)))

    def out(**sizes: int) -> np.ndarray:
        arrays = {b.name: np.ones(b.type.concrete(sizes), b.type.dtype.np) for b in buffers}
        compiled.run(arrays, compiled.bind(sizes))
        return arrays["out"]

    assert out(B=0, M=1, K=1).size == 0
    if name:
        with pytest.raises(InternalError, match=r"product touches element \d+ of an array of \d+"):
            out(B=2, M=3, K=5)
    else:
        assert np.array_equal(out(B=2, M=3, K=5), np.full((2, 3, 4), 5.0))


def test_modules_with_and_without_guards_are_two() -> None:
    graph = gradc.trace(lambda x: x + 1.0, x="f32[N]")
    with knobs.BOUNDS.set(True):
        guarded = gradc.compile(graph, target="cpu")
        assert "gradc_guarded(" in guarded.source()
    plain = gradc.compile(graph, target="cpu")
    assert "gradc_guarded(" not in plain.source()
    assert guarded.forward.native.payload != plain.forward.native.payload
