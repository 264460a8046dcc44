"""The predicted time of kernels: known passes of loops, known bytes, and what a model must not say."""

from __future__ import annotations

from collections.abc import Callable

import long_tests
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from skips import disassembled

import gradc
from benchmarks import cuda_static
from gradc import ops
from gradc.codegen.cuda.cached_text import anonymous
from gradc.codegen.cuda.library_time import product_time
from gradc.errors import InvalidProblem
from gradc.inspect.machine import Launched, Machine
from gradc.inspect.sass import Function, parse
from gradc.inspect.semantics import ARRAY
from gradc.inspect.static import Direction, directions
from gradc.runtime.cuda import nvdisasm
from gradc.runtime.cuda.nvrtc import compile_cuda
from gradc.targets.devices import ARCHITECTURES, GPUS, gpu_of
from gradc.targets.gpu import HOST_CALL, HOST_LAUNCH, HOST_RESULT

LISTING = """
	.section	.text.nested,"ax",@progbits
.text.nested:
        /*0000*/                   IMAD.MOV.U32 R0, RZ, RZ, RZ ;
.L_x_0:
        /*0010*/                   MOV R2, RZ ;
.L_x_1:
        /*0020*/                   VIADD R2, R2, 0x4 ;
        /*0030*/                   ISETP.GE.AND P1, PT, R2, 0x28, PT ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   IADD3 R0, R0, 0x3, RZ ;
        /*0060*/                   ISETP.GE.AND P0, PT, R0, c[0x0][0x210], PT ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   FSETP.GT.AND P2, PT, R4, RZ, PT ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""


def test_passes_of_nested_loops() -> None:
    """A million passes of ten passes each are counted exactly, in a few steps; a loop that depends on data ends."""
    (function,) = parse(LISTING)
    launched = Launched({0x210: 3_000_000}, lambda array, at, nbytes: None, lambda array: 500)
    trace = Machine(function, launched).run(0, 0)
    assert trace.finished and trace.unknown == 1 and trace.walked < 5000
    assert trace.instructions == 1 + 1_000_000 * (1 + 10 * 3 + 3) + 3
    assert trace.counts["f32"] == 1


def test_a_loop_without_an_end_is_given_up() -> None:
    (function,) = parse(LISTING.replace("0x3, RZ", "0x0, RZ"))
    launched = Launched({0x210: 8}, lambda array, at, nbytes: None, lambda array: 500)
    assert not Machine(function, launched).run(0, 0).finished


def test_a_loop_that_asks_whether_it_is_there() -> None:
    """Counted exactly, although what is skipped may jump over its end."""
    text = LISTING.replace("ISETP.GE.AND P1, PT, R2", "ISETP.NE.AND P1, PT, R2").replace("@!P1", "@P1")
    (function,) = parse(text)
    launched = Launched({0x210: 300}, lambda array, at, nbytes: None, lambda array: 500)
    trace = Machine(function, launched).run(0, 0)
    assert trace.finished and trace.instructions == 1 + 100 * (1 + 10 * 3 + 3) + 3


def test_a_number_of_passes_at_a_place_that_a_register_says() -> None:
    """Of a batch's parameter: words of the member that a block has found."""
    load = """        /*0000*/                   S2R R6, SR_CTAID.X ;
        /*0000*/                   IMAD.SHL.U32 R6, R6, 0x8, RZ ;
        /*0000*/                   LDC.64 R8, c[0x0][R6+0x210] ;
.L_x_0:"""
    (function,) = parse(LISTING.replace(".L_x_0:", load).replace("R0, c[0x0][0x210]", "R0, R9"))
    launched = Launched({0x214: 30, 0x21C: 300}, lambda array, at, nbytes: None, lambda array: 500)
    for block, passes in enumerate((10, 100)):
        trace = Machine(function, launched).run(block, 0)
        assert trace.finished and trace.instructions == 1 + 3 + passes * (1 + 10 * 3 + 3) + 3


def test_a_loop_until_a_sum_that_nothing_keeps_is_nothing() -> None:
    """Counted exactly: its register holds something else when the loop begins anew."""
    ends = """        /*0050*/                   IADD3 R0, R0, 0x3, RZ ;
        /*0050*/                   IADD3 R7, P3, R0, R8, RZ ;
        /*0060*/                   ISETP.NE.U32.AND P0, PT, R7, RZ, PT ;
        /*0060*/                   SEL R7, RZ, 0x1, !P1 ;
        /*0070*/               @P0 BRA `(.L_x_0) ;"""
    lines = LISTING.replace(
        "MOV.U32 R0, RZ, RZ, RZ ;", "MOV.U32 R0, RZ, RZ, RZ ;\n        /*0000*/    LDC R8, c[0x0][0x210] ;"
    )
    start, end = lines.index("        /*0050*/"), lines.index("        /*0080*/")
    (function,) = parse(f"{lines[:start]}{ends}\n{lines[end:]}")
    launched = Launched({0x210: 2**32 - 300}, lambda array, at, nbytes: None, lambda array: 500)
    trace = Machine(function, launched).run(0, 0)
    assert trace.finished and trace.instructions == 2 + 100 * (1 + 10 * 3 + 5) + 3


COUNTED = """
	.section	.text.counted,"ax",@progbits
.text.counted:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   MOV R1, RZ ;
        /*0020*/                   ISETP.LT.AND P0, PT, R0, c[0x0][0x210], PT ;
        /*0030*/                   BAR.RED.POPC.DEFER_BLOCKING 0x0, P0 ;
        /*0040*/                   B2R.RESULT R5 ;
        /*0050*/                   ISETP.GE.AND P0, PT, R0, R5, PT ;
        /*0060*/                   BAR.RED.POPC.DEFER_BLOCKING 0x0, !P0 ;
        /*0070*/                   B2R.RESULT R5 ;
.L_x_0:
        /*0080*/                   VIADD R1, R1, 0x1 ;
        /*0090*/                   ISETP.GE.AND P1, PT, R1, R5, PT ;
        /*00a0*/              @!P1 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(("bound", "passes"), [(1, 1), (100, 100), (255, 255), (300, 256)])
def test_a_barrier_counts_the_threads_of_a_block(bound: int, passes: int) -> None:
    """Those before a bound, found by halving; the second barrier's condition follows from the first one's count."""
    (function,) = parse(COUNTED)
    launched = Launched({0x210: bound}, lambda array, at, nbytes: None, lambda array: 500, threads=256)
    machine = Machine(function, launched)
    for thread in (0, 128, 0):
        trace = machine.run(0, thread)
        assert trace.finished and trace.unknown == 0 and trace.instructions == 8 + 3 * passes + 1


REPORTED = """
	.section	.text.reported,"ax",@progbits
.text.reported:
        /*0000*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0010*/                   LDG.E.64 R8, desc[UR4][R2.64] ;
        /*0020*/                   LDC.64 R4, c[0x0][0x218] ;
        /*0030*/                   ISETP.GE.U32.AND P0, PT, R8, 0x10, PT ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
        /*0050*/                   REDG.E.MIN.64.STRONG.GPU desc[UR4][R4.64+0x20], R6 ;
.L_x_0:
        /*0060*/                   ISETP.GE.U32.AND P0, PT, R9, 0x10, PT ;
        /*0070*/              @!P0 EXIT ;
        /*0080*/                   REDG.E.MIN.64.STRONG.GPU desc[UR4][R4.64+0x28], R6 ;
        /*0090*/                   EXIT ;
"""


@pytest.mark.parametrize("flag, adds", [(2, 0), (1, 2), (0, 2)])
def test_a_report_of_what_went_wrong_is_rare(flag: int, adds: int) -> None:
    """What data guard is executed, behind a branch and behind an exit, unless it writes to the flag alone."""
    (function,) = parse(REPORTED)
    words = {0x210: 0, 0x214: ARRAY | 1 << 8, 0x218: 0, 0x21C: ARRAY | 2 << 8}
    launched = Launched(words, lambda array, at, nbytes: None, lambda array: 500, flag=flag)
    trace = Machine(function, launched).run(0, 0)
    assert trace.finished and trace.unknown == 2 and trace.counts.get("atomics", 0) == adds
    assert sum(a.executed for a in trace.accesses) == 1 + adds


def test_every_device_has_an_architecture() -> None:
    """A block gets no more shared memory than its multiprocessor has, and no copy is faster than the memory."""
    for gpu in GPUS:
        limits = ARCHITECTURES[gpu.arch]
        assert gpu.shared <= limits.block_shared <= limits.shared and gpu.bandwidth <= gpu.peak


# -- with NVRTC and nvdisasm -------------------------------------------------------------------------------------------


tools = disassembled("sm_90")


STRIDED = """extern "C" __global__ void strided(int *to, long long count, long long step) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += step) to[i] = 1;
}"""


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def strided(request: pytest.FixtureRequest) -> tuple[Function, int]:
    """A loop that is unrolled, so that a quotient of 64 bits says how many passes it has; and where its parameters are.
    For sm_80 the divisor is read from the constant bank, for sm_90 from registers.
    """
    (function,) = parse(nvdisasm.disassemble(compile_cuda(STRIDED, arch=request.param).cubin))
    return function, {"sm_80": 0x160, "sm_90": 0x210}[request.param]


@tools
@settings(max_examples=25)
@given(
    count=st.one_of(st.integers(0, 5000), st.integers(0, 2**40)),
    step=st.one_of(st.integers(1, 100), st.integers(1, 2**33), st.sampled_from([2**16, 2**24, 2**28, 2**32])),
    block=st.sampled_from([0, 1, 65535]),
    thread=st.sampled_from([0, 32, 255]),
)
@example(count=64_000_000, step=2**24, block=0, thread=32)  # three terms carry 2
@example(count=2**40, step=2**24, block=1, thread=0)  # low words of offsets come again each 256 passes
def test_passes_of_a_loop_over_64_bits(
    strided: tuple[Function, int], count: int, step: int, block: int, thread: int
) -> None:
    """As many as the range has numbers; a loop over more than memory holds is given up, or right."""
    function, base = strided
    sizes = {base + 8: count, base + 16: step}
    words = {base: 0, base + 4: ARRAY | 1 << 8}
    words |= {at + 4 * n: size >> 32 * n & 2**32 - 1 for at, size in sizes.items() for n in (0, 1)}
    trace = Machine(function, Launched(words, lambda array, at, nbytes: None, lambda array: 500)).run(block, thread)
    passes = len(range(block * 256 + thread, count, step))
    assert trace.finished or count > 2**36
    assert not trace.finished or (trace.unknown == 0 and sum(a.executed for a in trace.accesses) == passes)


DIVIDED = """extern "C" __global__ void divided(int *to, long long a, long long b, long long c) {
  const long long i = blockIdx.x * 256ll + threadIdx.x + a;
  to[i / b & 0xffffff] = 1, to[i % b & 0xffffff] = 2, to[i % b / c & 0xffffff] = 3, to[i / b % c & 0xffffff] = 4;
}"""


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def divided(request: pytest.FixtureRequest) -> tuple[Function, int]:
    """Quotients and remainders, each by a subroutine or not; and where its parameters are."""
    (function,) = parse(nvdisasm.disassemble(compile_cuda(DIVIDED, arch=request.param).cubin))
    return function, {"sm_80": 0x160, "sm_90": 0x210}[request.param]


@tools
@settings(max_examples=40)
@given(
    a=st.one_of(st.integers(-(2**62), 2**62), st.integers(-1000, 1000)),
    b=st.one_of(st.integers(1, 2**62), st.integers(-(2**40), -1), st.integers(1, 100)),
    c=st.one_of(st.integers(1, 2**62), st.integers(-100, -1)),
)
def test_quotients_and_remainders_of_64_bits_with_a_sign(divided: tuple[Function, int], a: int, b: int, c: int) -> None:
    """Where a thread stores is what C says of them: rounded towards 0."""
    function, base = divided
    words = {base: 0, base + 4: ARRAY | 1 << 8}
    words |= {base + 8 * k + 4 * n: v >> 32 * n & 2**32 - 1 for k, v in ((1, a), (2, b), (3, c)) for n in (0, 1)}
    trace = Machine(function, Launched(words, lambda array, at, nbytes: None, lambda array: 500)).run(1, 32)

    def quotient(x: int, y: int) -> int:
        return abs(x) // abs(y) * (1 if x * y >= 0 else -1)

    whole = quotient(288 + a, b)
    rest = 288 + a - whole * b
    places = [whole, rest, quotient(rest, c), whole - quotient(whole, c) * c]
    assert trace.finished and trace.unknown == 0
    assert [access.first for access in trace.accesses] == [4 * (place & 0xFFFFFF) for place in places]


@tools
def test_a_pointer_in_the_constant_bank_keeps_its_array() -> None:
    """For sm_80 an address is a product and a pointer of the constant bank, both words of it."""
    text = "__global__ void copied(int *to, const int *from) { to[threadIdx.x] = from[threadIdx.x]; }"
    (function,) = parse(nvdisasm.disassemble(compile_cuda(f'extern "C" {text}', arch="sm_80").cubin))
    words = {0x160: 0, 0x164: ARRAY | 1 << 8, 0x168: 0, 0x16C: ARRAY | 2 << 8}
    trace = Machine(function, Launched(words, lambda array, at, nbytes: None, lambda array: 500)).run(0, 3)
    assert [(a.array, a.first) for a in trace.accesses] == [(2, 12), (1, 12)]


@tools
def test_rows_put_into_a_table_take_the_time_of_their_bytes() -> None:
    types = {"x": "f32[1000000,64]", "rows": "i64[32768]", "values": "f32[32768,64]"}
    graph = gradc.trace(lambda x, rows, values: ops.put_rows.plain(x, rows, values), **types)
    forward = directions(gradc.compile(graph, target="cuda", arch="sm_90"), {})["forward"]
    assert all(p.finished and p.load_width == p.store_width == 16 for _, p in forward.launches)
    assert forward.floor / forward.gpu.peak < forward.seconds < 1.2 * forward.floor / forward.gpu.bandwidth


@tools
def test_bytes_and_times() -> None:
    """A copy and the sums of rows move what they must, as the machine code's accesses have it; twice the rows are twice
    the instructions; nothing is faster than memory; the same numbers come twice.
    """
    graph = gradc.trace(lambda x: ops.sum(x, axes=(1,)), x="f32[N,8192]")
    module = gradc.compile(graph, wrt=["x"], target="cuda", arch="sm_90")
    one, two, again = (_forward(module, rows) for rows in (4096, 8192, 4096))
    ((_, sums),), ((_, doubled),) = one.launches, two.launches
    assert one == again and sums.finished and sums.load_width == 16
    assert sums.bytes == pytest.approx(4096 * 8192 * 4 + 4096 * 4, rel=0.01)
    assert doubled.instructions == pytest.approx(2 * sums.instructions, rel=0.01)
    for direction in directions(module, {"N": 4096}).values():
        assert direction.share is not None and 0.3 < direction.share <= 1
    ((_, spread),) = directions(module, {"N": 4096})["backward"].launches
    assert spread.bytes == pytest.approx(4096 * 8192 * 4 + 4096 * 4, rel=0.01) and spread.store_width == 16
    with pytest.raises(InvalidProblem, match="size for N: N=4096"):
        directions(module, {})


def _forward(module: gradc.Module, rows: int) -> Direction:
    return directions(module, {"N": rows})["forward"]


@tools
def test_products_by_a_library_are_part_of_the_time() -> None:
    """Steps add up to the whole, by the device that the module is for; so does what they take the host."""
    graph = gradc.trace(lambda x, w: ops.relu(x @ w), x="bf16[4096,512]", w="bf16[512,1024]")
    module = gradc.compile(graph, wrt=["x", "w"], target="cuda", arch="sm_90")
    forward = directions(module, {})["forward"]
    ((library, product),), ((_, relu),) = forward.products, forward.launches
    assert product == product_time(library, gpu_of("H100")) and product.bound == "flops"
    assert forward.seconds == sum(step.seconds for step in forward.steps) == product.seconds + relu.seconds
    assert [(step.launches, step.calls) for step in forward.steps] == [(0, 1), (1, 0)]
    outputs = len(module.forward.program.outputs)
    assert forward.host_seconds == pytest.approx(HOST_CALL + HOST_LAUNCH + HOST_RESULT * outputs)
    assert forward.share is not None and 0 < forward.share < 1
    text = module.explain_static()
    assert "1 launches of kernels and 1 calls of a library" in text
    assert f"{product.seconds * 1e6:.1f} us {product.seconds / forward.seconds:4.0%}  matmul" in text
    h200 = gradc.compile(graph, wrt=["x", "w"], target="cuda", arch="sm_90", device="H200")
    assert directions(h200, {})["forward"].gpu.name == "H200"
    assert directions(h200, {})["forward"].seconds < forward.seconds


@tools
def test_nothing_but_a_product_and_nothing_at_all() -> None:
    alone = gradc.compile(gradc.trace(lambda x: x @ x, x="f32[64,64]"), target="cuda", arch="sm_90")
    only = directions(alone, {})["forward"]
    assert only.launches == () and only.calls == 1 and only.bound == "launches"
    assert only.seconds == only.product_seconds and "100% of it in products" in alone.explain_static()
    nothing = gradc.compile(gradc.trace(lambda x: x * 2, x="f32[N]"), target="cuda", arch="sm_90")
    empty = directions(nothing, {"N": 0})["forward"]
    assert (empty.seconds, empty.share, empty.bound) == (0, None, None)
    assert "nothing is executed" in nothing.explain_static(N=0)


# What the model makes of a text is the same until the model or the text changes.
long = pytest.mark.long(*long_tests.COMPILER, "gradc/inspect", "gradc/module", "gradc/runtime", "gradc/targets")


def sources(module: gradc.Module) -> list[str]:
    return [anonymous(each.source) for each in module.executables.values()]


@long
@tools
def test_sorted_rows_are_read_once(judged: Callable[..., None]) -> None:
    """The kernel behind a sort reads each row of the cotangent once: the model knows where sorted keys lie."""
    graph = gradc.trace(lambda w, i: ops.embedding(i, w), w="bf16[128256,1024]", i="i64[16384]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_90", reductions={"*": "segmented"})
    judged(*sources(module))
    launches = directions(module, {})["backward"].launches
    rows = [p for launch, p in launches if launch.function.endswith("_rows") and launch.blocks > 100]
    assert any(p.finished and p.unknown == 0 and p.bytes > 16384 * 1024 * 2 for p in rows)


@long
@tools
def test_rows_sorted_in_groups_are_read_once(judged: Callable[..., None]) -> None:
    """Where rows are sorted in groups, whose keys and rows another launch spreads, the model follows all of them."""
    types = {"tokens": "i64[32768]", "q": "i8[128256,512]", "scale": "f32[128256,8]"}
    function = lambda tokens, q, scale: ops.embedding(tokens, ops.dequantize(q, scale, block=(1, 64)))
    module = gradc.compile(gradc.trace(function, **types), wrt=["scale"], target="cuda", arch="sm_90")
    judged(*sources(module))
    launches = directions(module, {})["backward"].launches
    assert any(launch.function == "gradc_sort_spread" for launch, _ in launches)
    (rows,) = (p for launch, p in launches if launch.function.endswith("_rows") and "check" not in launch.function)
    assert rows.finished and 1 < rows.bytes / (32768 * 512 * (4 + 1)) < 1.1


@long
@tools
def test_a_sort_of_few_rows_is_followed_to_its_end(judged: Callable[..., None]) -> None:
    """Its search for where keys begin, too."""
    graph = gradc.trace(lambda w, i: ops.embedding(i, w), w="f32[512,768]", i="i64[512]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_90", reductions={"*": "segmented"})
    judged(*sources(module))
    launches = directions(module, {})["backward"].launches
    assert {"gradc_sort_block", "gradc_sort_bounds"} <= {launch.function for launch, _ in launches}
    assert all(p.finished for _, p in launches)


@tools
def test_random_places_take_longer_than_neighbours() -> None:
    """Each lane has a sector of its own to read, and adds to sums that no neighbour shares."""
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g), x="f32[2,3,224,224]", g="f32[2,224,224,2]")
    module = gradc.compile(graph, wrt=["x"], target="cuda", arch="sm_90")
    smooth, random = (directions(module, {}, coherent) for coherent in (True, False))
    assert random["forward"].seconds > 2 * smooth["forward"].seconds
    assert random["backward"].seconds > smooth["backward"].seconds
    added = [sum(p.instructions for _, p in each["backward"].launches) for each in (smooth, random)]
    assert added[1] > 1.05 * added[0]


@tools
def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_static.main(["SUM4"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("| SUM4 | column sums | forward |") and line.endswith("| 1 % |")
    with pytest.raises(SystemExit):
        cuda_static.main(["SUM5"])
