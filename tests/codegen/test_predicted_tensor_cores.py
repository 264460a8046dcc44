"""The static model of tensor cores: what instructions multiply and move, when copies arrive, warps that take turns, and
attention's predicted times against those that an H200 took.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_tiles import attention, entries, shared_bytes

from gradc.codegen.cuda.actions import Launch, Part
from gradc.errors import GradcError
from gradc.inspect.machine import Launched, Machine
from gradc.inspect.predicted import Predicted, Setting, in_turn, predict
from gradc.inspect.sass import OTHER, Function, Instruction, parse
from gradc.runtime.cuda import nvdisasm
from gradc.runtime.cuda.nvrtc import CudaBinary, compile_cuda, find_nvrtc
from gradc.targets.devices import GPUS, gpu_of

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-nvidia-h200-2026-11-28-tiles.json"


@pytest.mark.parametrize(
    ("opcode", "modifiers", "products", "shared"),
    [
        ("HMMA", ".16816.F32.BF16", 16 * 8 * 16, 0),
        ("HMMA", ".1688.F32", 16 * 8 * 8, 0),
        ("HMMA", ".1688.F32.TF32", 2 * 16 * 8 * 8, 0),
        ("IMMA", ".16832.S8.S8", 16 * 8 * 32 // 2, 0),
        ("LDSM", ".16.M88.4", 0, 16),
        ("LDSM", ".16.MT88.2", 0, 8),
        ("LDSM", ".16.M88", 0, 4),
        ("LDGSTS", ".E.BYPASS.LTC128B.128", 0, 16),
        ("LDS", ".U.128", 0, 16),
        ("LDS", ".U8", 0, 4),  # lanes of one bank get it in one clock
        ("STS", "", 0, 4),
        ("LDG", ".E.128", 0, 0),
    ],
)
def test_what_an_instruction_multiplies_and_moves(opcode: str, modifiers: str, products: int, shared: int) -> None:
    instruction = Instruction(0, "", opcode, modifiers)
    assert (instruction.products, instruction.shared_width) == (products, shared)


def listing(*lines: str) -> Function:
    """A function of these instructions, 16 bytes each; a line that ends with a colon is a label."""
    text, at = ['\t.section\t.text.f,"ax",@progbits', ".text.f:"], 0
    for line in lines:
        text.append(line if line.endswith(":") else f"        /*{at:04x}*/                   {line} ;")
        at += 0 if line.endswith(":") else 16
    (function,) = parse("\n".join(text))
    return function


def follow(function: Function, words: dict[int, int] | None = None) -> Any:
    return Machine(function, Launched(words or {}, lambda array, at, nbytes: None, lambda array: 500)).run(0, 0)


@pytest.mark.parametrize(("left", "waits"), [(0, True), (1, True), (2, False)])
def test_a_wait_is_for_the_groups_before_the_last_ones(left: int, waits: bool) -> None:
    """Two groups, of which the second is empty."""
    copies = ("LDGSTS.E.128 [R3], desc[UR4][R2.64]", "LDGDEPBAR", "LDGDEPBAR")
    trace = follow(listing(*copies, f"DEPBAR.LE SB0, {left:#x}", "IADD3 R1, R1, 0x1, RZ", "EXIT"))
    assert (trace.clocks > 500) == waits and trace.shared == 16
    assert [a.instruction.opcode for a in trace.accesses] == ["LDGSTS"]


@pytest.mark.parametrize(
    "stage",
    [
        ("LOP3.LUT R1, R1, 0x4000, RZ, 0x3c, !PT",),  # of two: they alternate
        ("LOP3.LUT R2, R0, 0x3, RZ, 0xc0, !PT", "IMAD.SHL.U32 R1, R2, 0x4000, RZ"),  # of four: it counts up in between
    ],
)
def test_a_pipeline_of_stages_is_counted_without_following_it(stage: tuple[str, ...]) -> None:
    """A register has the same value every second or fourth pass only."""
    function = listing(
        "IMAD.MOV.U32 R0, RZ, RZ, RZ",
        "IMAD.MOV.U32 R1, RZ, RZ, RZ",
        ".L_x_0:",
        "HMMA.16816.F32.BF16 R8, R4, R6, R8",
        *stage,
        "LDSM.16.M88.4 R4, [R1]",
        "IADD3 R0, R0, 0x1, RZ",
        "ISETP.GE.AND P0, PT, R0, c[0x0][0x210], PT",
        "@!P0 BRA `(.L_x_0)",
        "EXIT",
    )
    trace = follow(function, {0x210: 1_000_001})
    assert trace.finished and trace.walked < 1000
    assert (trace.products, trace.shared) == (1_000_001 * 2048, 1_000_001 * 16)


def test_registers_of_fragments_are_data() -> None:
    """A load of fragments or a product leaves no register as it was."""
    for line, count in (
        ("LDSM.16.M88.4 R4, [R1]", 4),
        ("LDSM.16.MT88.2 R4, [R1]", 2),
        ("HMMA.16816.F32 R4, R8, R12, R4", 4),
    ):
        function = listing(*(f"IMAD.MOV.U32 R{n}, RZ, RZ, RZ" for n in (1, 4, 5, 6, 7, 8)), line, "EXIT")
        machine = Machine(function, Launched({}, lambda array, at, nbytes: None, lambda array: 500))
        machine.run(0, 0)
        assert [n for n in (1, 4, 5, 6, 7, 8) if machine.r.get(f"R{n}") is None] == list(range(4, 4 + count))


def test_warps_take_turns() -> None:
    """One waits for all it does; n at two equal units take (n + 1) / n of one; many are as fast as the slowest unit."""
    assert in_turn([3.0, 2.0, 1.0], 1) == 6
    for n in (1, 2, 5, 64):
        assert in_turn([1.0, 1.0], n) == pytest.approx((n + 1) / n)
    assert in_turn([3.0, 2.0, 1.0], 64) == pytest.approx(3, rel=1e-6)
    assert in_turn([0.0, 0.0], 4) == 0


def test_every_device_has_tensor_cores_with_a_source() -> None:
    for gpu in GPUS:
        assert gpu.matrix >= 256 and gpu.copied > gpu.resident and {"matrix", "copied"} <= gpu.sources.keys()


# -- with NVRTC and nvdisasm -------------------------------------------------------------------------------------------

ARCHES = ("sm_80", "sm_90", "sm_100")


def _ready(arch: str) -> bool:
    try:
        find_nvrtc(arch)
        nvdisasm.find_nvdisasm()
    except GradcError:
        return False
    return True


tools = pytest.mark.skipif(not _ready("sm_90"), reason="needs gradc[nvrtc,nvdisasm]")
# The texts are of tests/attention_tiles.py and of the headers.
long = pytest.mark.long(
    *("gradc/codegen/text.py", "gradc/inspect", "gradc/runtime/cuda/nvdisasm.py", "gradc/runtime/cuda/nvrtc.py"),
    *("gradc/targets", "templates/common", "templates/cuda", "tests/attention_tiles.cu", "tests/attention_tiles.py"),
)
Compiled = tuple[CudaBinary, dict[str, Function]]


@functools.cache
def compiled(arch: str, d: int, causal: bool, bn: int, rows: int, resident: int) -> Compiled:
    text = attention(entries(64, bn, d, causal, rows=rows, resident=resident))
    binary = compile_cuda(text, arch=arch, emit=("cubin",))
    return binary, {f.name: f for f in parse(nvdisasm.disassemble(binary.cubin))}


def predicted(
    device: str, name: str, heads: int, S: int, d: int, causal: bool, bn: int = 64, rows: int = 64, resident: int = 0
) -> Predicted:
    """Of one of the kernels with blocks of 64 rows, or of 64 columns, on a device."""
    gpu = gpu_of(device)
    binary, functions = compiled(gpu.arch, d, causal, bn, rows, resident)
    wide = [Part(x, 0, heads * S * d, np.dtype(np.uint16)) for x in ("q", "k", "v", "dy", "out", "other")]
    row = [Part(x, 0, heads * S, np.dtype(np.float32)) for x in ("lse", "delta")]
    args = {
        "forward": (*wide[:3], wide[4], row[0]),
        "columns": (*wide[:4], *row, *wide[4:]),
        "rows": (*wide[:4], *row, wide[4]),
    }
    launch = Launch(name, heads * -(-S // 64), 128, (*args[name], S, 0), (), shared=shared_bytes(name, 64, bn, d, rows))
    return predict(Setting(gpu, 1 << 20, {}), functions[name], binary.kernels[name], launch)


@long
@tools
@pytest.mark.parametrize("arch", ARCHES)
def test_no_instruction_of_attention_is_unknown(arch: str) -> None:
    """Every opcode has a class; products and bytes of copies are exactly those of the tiles."""
    if not _ready(arch):
        pytest.skip(f"no NVRTC for {arch}")
    device = gpu_of(arch)
    heads, S, d = 2 * device.sms, 256, 64
    _, functions = compiled(arch, d, False, 64, 64, 0)
    for function in functions.values():
        assert {i.opcode for i in function.instructions if i.kind == OTHER} == set()
    tile = 64 * d * 2
    for name, factors, tiles in (("forward", 2, 1 + 2 * 4), ("columns", 4, 2 + 2 * 4), ("rows", 3, 2 + 2 * 4)):
        p = predicted(arch, name, heads, S, d, False)
        assert p.finished
        assert p.bounds["matrix"] * device.matrix * device.sms * device.clock == pytest.approx(
            factors * heads * S * S * d
        )
        least = heads * 4 * tiles * tile / (128 * device.sms * device.clock)
        assert p.bounds["shared memory"] > least
        assert p.bounds["L2"] >= heads * 4 * tiles * tile / device.copied


@long
@tools
def test_uneven_blocks_are_sampled_evenly() -> None:
    """Of a triangle: 32 blocks of rows a head, with 1 to 32 blocks of columns."""
    gpu = gpu_of("H200")
    p = predicted("H200", "forward", 64, 2048, 64, True, resident=3)
    exact = 64 * sum(range(1, 33)) * 2 * 64 * 64 * 64
    assert p.bounds["matrix"] * gpu.matrix * gpu.sms * gpu.clock == pytest.approx(exact, rel=0.05)


@long
@tools
@pytest.mark.parametrize(
    ("name", "d", "bn", "resident", "variant"),
    [
        ("forward", 64, 64, 3, "p2_forward_d64_64x64_b3"),
        ("columns", 64, 64, 3, "p1_columns_d64_64x64_b2"),
        ("rows", 64, 64, 3, "p1_rows_d64_64x64_b2"),
        ("forward", 128, 64, 2, "p2_forward_d128_64x64_b2"),
        ("columns", 128, 64, 2, "p1_columns_d128_32x64_b2"),
        ("rows", 128, 64, 2, "p1_rows_d128_64x64_b2"),
    ],
)
def test_predictions_against_what_an_h200_took(name: str, d: int, bn: int, resident: int, variant: str) -> None:
    """Texts of the same tiles, not the same text: within a fifth."""
    took = json.loads(MEASURED.read_text())["tiles"][variant]["us"] * 1e-6
    p = predicted("H200", name, 4096 // d, 2048, d, True, bn, 32 if d == 128 else 64, resident)
    assert p.finished and 0.8 < took / p.seconds < 1.2
