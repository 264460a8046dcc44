"""Machine code read back: instructions, loops and widths of a listing written by hand, and of kernels of our own."""

from __future__ import annotations

import re
from collections import Counter

import long_tests
import pytest
from click.testing import CliRunner
from skips import disassembled

import gradc
from gradc import ops
from gradc.cli import commands
from gradc.errors import CompilerMissing, InvalidProblem
from gradc.inspect.occupancy import resident_blocks
from gradc.inspect.sass import OTHER, classes, parse, widths
from gradc.inspect.semantics import Decoder
from gradc.runtime.cuda import nvdisasm

LISTING = """
	.section	.text.nested,"ax",@progbits
nested:
.text.nested:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   FADD R4, R4, R5 ;
        /*0030*/               @P2 BRA `(.L_x_2) ;
        /*0040*/                   MOV R9, 0x60 ;
        /*0050*/                   CALL.REL.NOINC `(nested) ;
.L_x_2:
        /*0060*/                   FLY R4, R4 ;
        /*0070*/              @!P1 BRA `(.L_x_1) ;
        /*0078*/                   REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR8][R2.64], R4 ;
        /*0080*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0090*/                   BRA.U UP0, `(.L_x_0) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
        /*00c0*/                   NOP;
"""


def test_a_listing() -> None:
    """Two nested loops; what calls a subroutine behind a branch is a slow path; the branch to itself behind the end of
    the function is no loop; an opcode that no table has is counted as such.
    """
    (function,) = parse(LISTING)
    assert function.name == "nested" and len(function.instructions) == 14
    outer, inner = function.loops
    assert (outer.start, outer.depth, inner.start, inner.depth) == (0x10, 0, 0x20, 1)
    assert widths(outer.body) == {("LDG", 16): 1, ("REDG", 16): 1, ("STG", 2): 1}
    assert classes(outer.body) == {"global load": 1, "atomics": 1, "global store": 1, "branch": 1}
    assert classes(inner.body) == {"f32": 1, "branch": 2, OTHER: 1} and inner.slow == 2


def test_resident_blocks() -> None:
    """Each of the four limits: blocks, warps, registers, shared memory."""
    assert resident_blocks("sm_90", 32, 16, 0) == 32
    assert resident_blocks("sm_90a", 1024, 32, 0) == 2
    assert resident_blocks("sm_90", 512, 128, 512) == 1
    assert resident_blocks("sm_90", 32, 16, 100 * 1024) == 2
    with pytest.raises(InvalidProblem, match=r"sm_33.*sm_90"):
        resident_blocks("sm_33", 32, 16, 0)


def test_errors(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    graph = gradc.trace(lambda x: -x, x="f32[N]")
    with pytest.raises(InvalidProblem, match="target cuda"):
        gradc.compile(graph).explain_static(N=8)
    module = gradc.compile(graph, target="cuda", arch="sm_90")
    with pytest.raises(InvalidProblem, match="size for N: N=4096"):
        module.explain_static()
    monkeypatch.setattr(nvdisasm.importlib.util, "find_spec", lambda name: None)
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"gradc\[nvdisasm\]"):
        nvdisasm.find_nvdisasm()


# -- with NVRTC and nvdisasm -------------------------------------------------------------------------------------------


tools = disassembled("sm_90")


@tools
def test_a_copys_accesses_have_16_bytes() -> None:
    """A pointwise f32 kernel loads and stores 16 bytes per thread, moves twice its array, and reads the same again."""
    graph = gradc.trace(lambda x: -x, x="f32[N]")
    texts = [gradc.compile(graph, target="cuda", arch="sm_90").explain_static(N=1 << 20) for _ in range(2)]
    assert texts[0] == texts[1]
    assert f"kernels move {8 << 20} bytes, the floor is {8 << 20}, 1.00x" in texts[0]
    assert "1 LDG of 16 B, 1 STG of 16 B" in texts[0] and "0 B spilled" in texts[0]


KERNELS = {
    "layer norm": (
        lambda x, w, b: ops.layer_norm(x, (1024,), w, b),
        {"x": "bf16[N,1024]", "w": "bf16[1024]", "b": "bf16[1024]"},
    ),
    "embedding": (lambda w, i: ops.embedding(i, w), {"w": "f32[V,64]", "i": "i64[N]"}),
    "gelu": (lambda x: ops.gelu(x), {"x": "bf16[N]"}),
    "grid_sample": (lambda x, g: ops.grid_sample(x, g), {"x": "f32[N,3,8,8]", "g": "f32[N,8,8,2]"}),
}


@tools
@pytest.mark.long(*long_tests.COMPILER, "gradc/inspect", "gradc/runtime/cuda")
@pytest.mark.parametrize("name", KERNELS)
def test_opcodes_are_known(name: str) -> None:
    """Fewer than one instruction in twenty is of an unknown class, and each kernel accesses global memory."""
    function, types = KERNELS[name]
    wrt = () if name == "grid_sample" else [next(iter(types))]
    module = gradc.compile(gradc.trace(function, **types), wrt=wrt, target="cuda", arch="sm_90")
    for executable in module.executables.values():
        binary = executable.binary
        functions = parse(nvdisasm.disassemble(binary.cubin)) if binary.cubin else ()
        assert {f.name for f in functions} >= binary.kernels.keys()
        for f in functions:
            counts = Counter(classes(f.instructions))
            assert counts[OTHER] * 20 < counts.total(), {i.opcode for i in f.instructions if i.kind == OTHER}
            assert widths(f.instructions) or f.name not in binary.kernels
    sizes = {d: 4096 for e in module.executables.values() for d in e.program.dims}
    assert all(k in module.explain_static(**sizes) for k in module.forward.binary.kernels)


@tools
def test_the_command(tmp_path) -> None:
    path = tmp_path / "negation.gir"
    gradc.trace(lambda x: -x, x="f32[N]").save(path)
    flags = ["--target", "cuda", "--arch", "sm_90", "--static", "--dims", "N=4096"]
    result = CliRunner().invoke(commands.explain, [str(path), *flags])
    assert result.exit_code == 0, result.output
    assert "nothing is measured" in result.output
    assert re.search(r"\d+ blocks of \d+ threads, 0 B dynamic shared; [1-9]\d* blocks per", result.output)


@pytest.mark.parametrize(
    ("opcode", "modifiers", "count"), [("F2I", ".F64.TRUNC", 1), ("F2I", ".S64", 2), ("F2F", ".F64.F32", 2)]
)
def test_a_conversion_writes_as_many_registers_as_its_result_has(opcode: str, modifiers: str, count: int) -> None:
    _, written, _ = Decoder(lambda at: None, lambda name: None).step(opcode, modifiers, "R44, R34")
    assert written == tuple(f"R{44 + i}" for i in range(count))


@pytest.mark.parametrize(
    ("modifiers", "operands", "wanted"),
    [
        (".IDX", "PT, R5, R4, RZ, 0x1f", 7),
        (".IDX", "R5, R4, RZ, 0x1f", 7),
        (".IDX", "PT, R5, R4, 0x1, 0x1f", None),
        (".BFLY", "PT, R5, R4, 0x2, 0x1f", None),
    ],
)
def test_a_value_of_lane_0_is_known_and_those_of_others_are_not(
    modifiers: str, operands: str, wanted: int | None
) -> None:
    step, written, reads = Decoder(lambda at: None, lambda name: None).step("SHFL", modifiers, operands)
    registers = {"R4": 7, "R5": 1}
    step(registers)
    assert registers["R5"] == wanted
    assert written == ("R5",) and "R4" in reads


@pytest.mark.parametrize("of_which", ["", "PT, PT, ", "P1, PT, "])
@pytest.mark.parametrize(("which", "wanted"), [("PT", -3), ("!PT", 0x800)])
def test_the_least_of_two_is_that_where_predicates_say_which_too(of_which: str, which: str, wanted: int) -> None:
    """VIMNMX of sm_90, and of sm_100, where predicates stand before its operands."""
    operands = f"R5, {of_which}R4, 0x800, {which}"
    step, written, _ = Decoder(lambda at: None, lambda name: None).step("VIMNMX", "", operands)
    registers = {"R4": -3 & 0xFFFFFFFF, "P1": True}
    step(registers)
    assert registers["R5"] == wanted & 0xFFFFFFFF and written[0] == "R5"
    assert registers["P1"] is (None if "P1" in of_which else True)
