"""The predicted time of launches on a GPU, from their machine code and arguments: a model, nothing measured.

A launch takes as long as the slowest of

- three units of a multiprocessor, for which its warps take turns (:func:`in_turn`); those without a block do nothing:
  - *instructions*: those that its warps issue, at the share of the schedulers' clocks that the device's record has.
    Those of f64 and MUFU have rates of their own;
  - *matrix*: products of tensor cores, at the rate of ``mma.sync`` that the device's record has;
  - *shared memory*: 128 bytes a clock of a multiprocessor, without conflicts of banks (cuda-sim counts those);
- *bytes*: of DRAM, at the bandwidth of a copy.  What a launch accesses again counts again only where the rows that are
  resident at once are larger than the room in L2;
- *L2*: sectors of 32 bytes, so that lanes which lie apart count for what is transferred, at the rate of L2;
- *atomics*: lanes, lines or bytes at the rates of the device's record, and adds to one address one after another;
- *latency*: the chain of dependent instructions of a warp, once for each time that all resident blocks are replaced;

and the fixed time of a launch.  The threads that are followed are the first lanes of two warps of three or 24 blocks,
and two lanes more of one of these for the distance between lanes.  Indices are taken to be spread evenly over their
bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis.combine import OWN_BATCH
from ..analysis.in_turn import in_turn
from ..codegen.cuda.actions import FLAG, WORKSPACE, Launch, Part
from ..codegen.cuda.launch import LaunchPlan
from ..ir.dims import evaluate
from ..ir.kernel import Kernel
from ..runtime.cuda.nvrtc import KernelResources
from ..targets.devices import ARCHITECTURES, Gpu
from ..targets.gpu import SECTOR_BYTES, SHARED_RATE, WARP
from .machine import Access, Launched, Machine, Trace
from .occupancy import resident_blocks
from .operands import MASK
from .sass import LOADS, Function
from .semantics import ARRAY

MANY_WARPS = 16
"""Warps of a block from which on its barriers cost issue slots."""
FEW_BLOCKS, MORE_BLOCKS, SHORT, UNEVEN = 3, 24, 1200, 1.2
"""Blocks that are followed; more where they run fewer basic blocks than the third number, or one of them so many times
as many instructions as another.
"""
FEW_WARPS = 4
"""Warps of a block that are all followed where they do not multiply equally often, as below a diagonal."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly and with no period: they are the places of the blocks that are followed,
each in its part of the grid, so that rows of a triangle, whose work grows from block to block and begins anew with each
head, count as they should.
"""
SMALL = 1 << 16
"""Bytes of an array that is taken to be in a cache."""
_UNITS = ("instructions", "matrix", "shared memory")
_SPREAD = 2654435761
_PARAMETERS = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}
"""Where a kernel's parameters begin in constant bank 0, by the architecture's generation."""
_BLOCK_SIZE = {7: 0, 8: 0, 9: 0, 10: 0x360, 12: 0x360}
"""Where its block's and grid's sizes do."""


@dataclass(frozen=True)
class Setting:
    """What launches of a module share.

    :param gpu: the device.  :param indices: the least bound of an index that the module checks.
    :param rows: of the iteration space of the kernel that each function is of, and the threads of a row.
    :param ends: of each function whose blocks sort their rows, the share of the rows at which a key's end: what is done
        there is done so often.
    :param sorts: of each sort: where its keys and their first positions end up, its rows and keys.
    :param coherent: whether places that follow from data, as a grid's, are neighbours for neighbouring lanes; else each
        has a sector and a sum of its own.
    """

    gpu: Gpu
    indices: int
    rows: Mapping[str, tuple[int, int]]
    ends: Mapping[str, float] = field(default_factory=dict)
    sorts: tuple[tuple[Part, Part, int, int], ...] = ()
    coherent: bool = True

    def content(self, part: Part, at: int, nbytes: int) -> int | None:
        """The integer at a byte of an array: no check has found anything, indices are spread over their bound, and so
        are the keys of a sort; None for data.
        """
        if part.root == FLAG:
            return (1 << 8 * nbytes) - 1
        size = part.dtype.itemsize
        if part.root != WORKSPACE:
            if part.dtype.kind not in "iu" or size < 4:
                return None
            count = max(nbytes // size, 1)
            return sum((at // size + n) * _SPREAD % self.indices << 8 * size * n for n in range(count))
        for keys, starts, rows, bound in self.sorts:
            place = part.start + at - keys.start
            if 0 <= place < keys.nbytes and nbytes == 4:
                return place // 4 * bound // rows
            place = part.start + at - starts.start
            if 0 <= place < starts.nbytes and nbytes == 4:
                return min(-(-place // 4 * rows // bound), rows) if bound else 0
        return None


def setting_of(gpu: Gpu, plan: LaunchPlan, coherent: bool = True) -> Setting:
    """What the launches of a plan share."""
    rows: dict[str, tuple[int, int]] = {}
    ends: dict[str, float] = {}
    bounds = [1 << 20]
    for run in plan.runs:
        if isinstance(run.step, Kernel):
            kernel = plan.kernel(run.step)
            sizes = plan.sizes(kernel, run.dims)
            count = sizes.rows
            if kernel.chunk_keys and count:
                batch = min(sizes.chunk, OWN_BATCH, count)
                ends |= {
                    stage.name: min(1.0, kernel.chunk_keys / batch) for stage in kernel.stages if stage.kind == "rows"
                }
            rows |= {stage.name: (max(count, rows.get(stage.name, (0, 0))[0]), stage.width) for stage in kernel.stages}
            bounds += [evaluate(dict(s.attrs)["bound"], run.dims) for s in run.step.body if s.op == "check"]
    launches = [a for a in plan.unbatched() if isinstance(a, Launch)]
    sorts = [a.args[:4] for a in launches if a.function == "gradc_sort_bounds"]
    sorts += [(a.args[3], *a.args[5:8]) for a in launches if a.function == "gradc_sort_spread"]
    return Setting(gpu, max(min(bounds), 1), rows, ends, tuple(dict.fromkeys(sorts)), coherent)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Predicted:
    """A launch.

    :param seconds: in all.  :param bounds: seconds by what bounds it.
    :param bytes: of DRAM.  :param instructions: of its threads, so that 32 make one of a warp.
    :param load_width, store_width: bytes per thread of the accesses that move most.
    :param resident: blocks of a multiprocessor.
    :param unknown: branches of the followed threads that depended on data.
    :param finished: whether each of these came to its end within the model's limit.
    """

    seconds: float
    bounds: Mapping[str, float]
    bytes: float
    instructions: float
    load_width: int
    store_width: int
    resident: int
    unknown: int
    finished: bool

    @property
    def bound(self) -> str:
        """What takes longest; launches if their own time does."""
        return max(self.bounds, key=self.bounds.__getitem__)


def predict(setting: Setting, function: Function, resources: KernelResources, launch: Launch) -> Predicted:
    """The predicted time of one launch."""
    gpu, parts = setting.gpu, _parts(launch)
    often = setting.ends.get(launch.function, 1.0)
    sides = [(often, _machine(setting, function, launch, parts))]
    if often < 1:
        sides.append((1 - often, _machine(setting, function, launch, parts, guarded=False)))
    follow = sides[0][1].run
    samples = [(share, _sample(launch, side.run)) for share, side in sides]
    traces = [(trace, weight * share) for share, blocks in samples for block in blocks for trace, weight in block]
    resident = max(resident_blocks(gpu.arch, launch.threads, resources.registers, resources.shared + launch.shared), 1)
    moved = _Moved(setting, launch, parts, resident, resources.shared + launch.shared)
    spread = _spread(launch, follow, setting.coherent)
    kinds: Counter[str] = Counter()
    for trace, weight in traces:
        kinds.update({kind: count * weight for kind, count in trace.counts.items()})  # type: ignore[arg-type]
        for access in trace.accesses:
            moved.add(access, weight, spread.get(access.instruction.address, (WARP, float(access.instruction.width))))
    issued = sum(t.instructions * w for t, w in traces)
    barriers = launch.threads >= MANY_WARPS * WARP and kinds["barrier"] > 0
    share = gpu.barrier_share if barriers else gpu.issue_share
    replaced = launch.blocks / (resident * gpu.sms)
    chain = sum(share * _chain(blocks, replaced) for share, blocks in samples)
    clocks = gpu.sms * gpu.clock * min(1.0, launch.blocks / gpu.sms)  # per second, of those that have a block
    bounds = {
        "instructions": max(issued / (4 * clocks * share), *(n / clocks for n in _pipes(gpu, kinds))),
        "matrix": sum(t.products * w for t, w in traces) / (gpu.matrix * clocks),
        "shared memory": sum(t.shared * w for t, w in traces) * WARP / (SHARED_RATE * clocks),
        "bytes": moved.dram / gpu.bandwidth,
        "L2": moved.l2,
        "atomics": moved.atomics,
        "latency": chain / gpu.clock,
        "launches": gpu.launch,
    }
    warps = round(min(resident, launch.blocks / gpu.sms) * -(-launch.threads // WARP) / 4)
    units = in_turn([bounds[unit] for unit in _UNITS], max(warps, 1))
    return Predicted(
        max(units, *(seconds for bound, seconds in bounds.items() if bound != "launches")) + gpu.launch,
        bounds,
        moved.dram,
        issued * WARP,
        moved.width(False),
        moved.width(True),
        resident,
        sum(t.unknown for t, _ in traces),
        all(t.finished for t, _ in traces),
    )


def _sample(launch: Launch, follow: Callable[[int, int], Trace]) -> list[list[tuple[Trace, float]]]:
    """Of some blocks: traces of first lanes with the warps that each stands for, whose weights are all warps."""
    warps = -(-launch.threads // WARP)
    chosen = [(0, 1.0)] if warps == 1 else [(0, 1.0), (warps // 2, warps - 1.0)]
    count = FEW_BLOCKS
    while True:
        blocks = sorted({int(launch.blocks * (i + (i + 0.5) * GOLDEN % 1) / count) for i in range(count)})
        scale = launch.blocks / len(blocks)
        traces = [[(follow(block, warp * WARP), weight * scale) for warp, weight in chosen] for block in blocks]
        if 2 < warps <= FEW_WARPS and any(len({t.products for t, _ in block}) > 1 for block in traces):
            chosen = [(warp, 1.0) for warp in range(warps)]
            traces = [[(follow(block, warp * WARP), weight * scale) for warp, weight in chosen] for block in blocks]
        short = sum(t.walked for block in traces for t, _ in block) < SHORT
        work = [sum(t.instructions for t, _ in block) for block in traces]
        if (not short and max(work) < UNEVEN * min(work)) or count == MORE_BLOCKS or launch.blocks <= count:
            return traces
        count = MORE_BLOCKS


def _chain(followed: Sequence[Sequence[tuple[Trace, float]]], replaced: float) -> float:
    """Clocks of the chains of some blocks, where the resident blocks are replaced so many times."""
    chains = [max(t.clocks for t, _ in block) for block in followed]
    return max(chains) if replaced <= 1 else replaced * sum(chains) / len(chains)


def _pipes(gpu: Gpu, kinds: Mapping[str, float]) -> list[float]:
    """Clocks of the instructions whose units are fewer than the lanes that the schedulers can start."""
    units = {"special": gpu.special, "f64": ARCHITECTURES[gpu.arch].f64}
    return [kinds.get(kind, 0) * WARP / count for kind, count in units.items()]


# -- a thread's surroundings -------------------------------------------------------------------------------------------


def _parts(launch: Launch) -> list[Part]:
    """The arrays of a launch, each once; the first has number 1."""
    return list(dict.fromkeys(arg for arg in launch.args if isinstance(arg, Part)))


def _words(arch: str, launch: Launch, parts: Sequence[Part]) -> dict[int, int]:
    generation = int(arch[3:]) // 10
    words = {_BLOCK_SIZE[generation] + 4 * i: n for i, n in enumerate((launch.threads, 1, 1))}
    words[_BLOCK_SIZE[generation] + (16 if generation >= 10 else 12)] = launch.blocks
    for i, arg in enumerate(launch.args):
        at = _PARAMETERS[generation] + 8 * i
        value = (ARRAY | (parts.index(arg) + 1) << 8) << 32 if isinstance(arg, Part) else arg
        words[at], words[at + 4] = value & MASK, value >> 32 & MASK
    return words


def _machine(
    setting: Setting, function: Function, launch: Launch, parts: Sequence[Part], guarded: bool = True
) -> Machine:
    gpu = setting.gpu
    far, near = round(gpu.latency * gpu.clock), round(gpu.cache_latency * gpu.clock)

    def load(array: int, at: int, nbytes: int) -> int | None:
        return setting.content(parts[array - 1], at, nbytes)

    def latency(array: int) -> int:
        return near if array and parts[array - 1].nbytes <= SMALL else far

    flag = next((n for n, part in enumerate(parts, 1) if part.root == FLAG), 0)
    words = _words(gpu.arch, launch, parts)
    return Machine(function, Launched(words, load, latency, setting.coherent, launch.threads, flag), guarded)


def _spread(launch: Launch, follow: Callable[[int, int], Trace], coherent: bool) -> dict[int, tuple[int, float]]:
    """Of each access of a warp in the middle: how many lanes have it, and bytes from one lane's to the next."""
    first = launch.threads // (2 * WARP) * WARP
    lanes = [first + lane for lane in (0, 1, WARP - 1) if first + lane < launch.threads]
    own, *others = [{a.instruction.address: a for a in follow(launch.blocks // 2, thread).accesses} for thread in lanes]
    answer: dict[int, tuple[int, float]] = {}
    for at, access in own.items():
        if not others or at not in others[0]:
            answer[at] = (1, 0.0)
            continue
        here, there = access.first, others[0][at].first
        of_data = max(access.instruction.width, 0 if coherent else SECTOR_BYTES)
        step = float(of_data if here is None or there is None else abs(there - here))
        answer[at] = (WARP if len(others) > 1 and at in others[1] else WARP // 2, step)
    return answer


# -- bytes -------------------------------------------------------------------------------------------------------------


class _Moved:
    """What the accesses of a launch transfer."""

    def __init__(self, setting: Setting, launch: Launch, parts: Sequence[Part], resident: int, shared: int):
        self.setting, self.launch, self.parts = setting, launch, parts
        limits = ARCHITECTURES[setting.gpu.arch]
        self.l1 = (limits.shared - resident * shared) // 2
        rows, width = setting.rows.get(launch.function, (0, 1))
        self.rows, self.rows_per_sm = rows, resident * max(launch.threads // width, 1)
        self.asked: Counter[tuple[int, str]] = Counter()
        self.lines: Counter[tuple[int, str]] = Counter()
        self.widths: Counter[tuple[int, bool]] = Counter()
        self.atomics = 0.0

    def add(self, access: Access, weight: float, spread: tuple[int, float]) -> None:
        """An access of a warp's first lane, which stands for ``weight`` warps."""
        lanes, step = spread
        width, gpu, opcode = access.instruction.width, self.setting.gpu, access.instruction.opcode
        key = access.array, opcode if opcode in LOADS else "STG"
        times = access.executed * weight
        nbytes = times * width * (lanes if step else 1)
        self.asked[key] += nbytes  # type: ignore[assignment]
        self.widths[width, opcode not in LOADS] += nbytes  # type: ignore[assignment]
        if 0 < step <= width:
            sectors = nbytes / SECTOR_BYTES
        else:  # lanes apart: each transfers what it does not find in the sector of its access before
            sectors = access.sectors * weight * (lanes * min(1.0, step / SECTOR_BYTES) if step else 1)
        self.lines[key] += sectors  # type: ignore[assignment]
        if opcode not in (*LOADS, "STG"):
            same = not step and access.first is not None and access.executed <= 1 and self.launch.blocks > 1
            rate = gpu.resident / width if width == 16 else gpu.coalesced if 0 < step <= width else gpu.scattered
            self.atomics += times * gpu.hot if same else times * lanes / rate

    def width(self, stored: bool) -> int:
        """Bytes per thread of the loads, or stores and atomics, that move most; 0 without any."""
        found = {width: nbytes for (width, is_stored), nbytes in self.widths.items() if is_stored == stored}
        return max(found, key=found.__getitem__, default=0)

    @property
    def dram(self) -> float:
        """Bytes that come from and go to DRAM."""
        return sum(self._once(array, asked, self.setting.gpu.room) for (array, _), asked in self.asked.items())

    @property
    def l2(self) -> float:
        """Seconds of what comes from and goes to L2: what a multiprocessor reads again is in its L1 if it has room."""
        rates = {"LDGSTS": self.setting.gpu.copied}
        return sum(
            self._sectors(array, opcode, count) / rates.get(opcode, self.setting.gpu.resident)
            for (array, opcode), count in self.lines.items()
        )

    def _sectors(self, array: int, opcode: str, count: float) -> float:
        nbytes, whole = count * SECTOR_BYTES, self._whole(array)
        if opcode not in LOADS or not whole:
            return nbytes
        if whole <= self.l1:
            return min(nbytes, whole * self.setting.gpu.sms)
        row_bytes = whole / self.rows if self.rows else whole
        return min(nbytes, whole) if self.rows_per_sm * row_bytes <= self.l1 else nbytes

    def _whole(self, array: int) -> float:
        return float(self.parts[array - 1].nbytes) if array else 0.0

    def _once(self, array: int, asked: float, room: int) -> float:
        """Of the bytes that are asked for, those that are not in a cache yet."""
        whole = self._whole(array)
        at_once = min(self.rows, self.rows_per_sm * self.setting.gpu.sms)
        resident = whole * at_once / self.rows if self.rows else 0
        return asked if not whole or (asked > 1.5 * whole and resident > room) else min(asked, whole)
