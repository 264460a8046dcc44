"""The machine parameters of the cost model.

Every constant of a GPU is marked with its source:

- ``measured``: on this device;  ``fitted``: to measurements of another device, and reused;
- ``published``: the vendor's specification (SMs, L2, shared memory per block; bandwidth if no copy was measured);
- ``estimate``: scaled from the H100 by SMs (atomics) or by bandwidth (the sort), or derived from a specification;
  meaningful as a ratio at best.

A calibration file replaces constants by measurements of the actual device.  It is JSON::

    {"format": "gradc-device 1", "device": "H100", "constants": {"bandwidth": 3.05e12, "sort_pass": 7e-06}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InvalidProblem, Unsupported
from ..formats.json_text import read_json

FORMAT = "gradc-device 1"
_LONGEST_FILE = 65536


@dataclass(frozen=True)
class Device:
    """The parameters common to all machines.

    :param bandwidth: of a copy, in bytes/s.
    """

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Cpu(Device):
    """A CPU, times in seconds of one thread.  :mod:`gradc.calibration.host` measures ``sort`` to ``cached``; by default
    they are those with the least mean regret over the processors of ``benchmarks/results`` that have no file of their
    own (:data:`~gradc.targets.calibration.MEASURED`).

    :param sort: of a row that is sorted, more than of one that is added to a partial result.
    :param gathered: the same of each element that it adds; below 0 where sums in registers take less time than reading
        rows in another order.
    :param ordered: of a row that is in order already, as ``sort``.
    :param partial: of an element of a partial result, which is set and folded.
    :param missed: of an element that is added to a partial result of far more than ``cached`` elements, more than to
        one of fewer.
    :param cached: elements of a partial result that caches hold.
    :param skew: of a row that is sorted, how much longer it takes where all others have its index
        (:mod:`gradc.ir.sample`), :param locality: and how much less where those near it have indices near its own; 0
        does not look at the data.
    :param workers: the assumed number of cores.
    :param sources: constant -> ``calibrated``.
    """

    name: str = "cpu"
    bandwidth: float = 20e9
    sort: float = 11e-9
    gathered: float = -0.15e-9
    ordered: float = 1e-9
    partial: float = 1e-9
    missed: float = 0.0
    cached: int = 1 << 20
    skew: float = 0.0
    locality: float = 0.0
    workers: int = 4
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor (published: CUDA C++ Programming Guide, technical specifications and arithmetic
    throughput per compute capability); it has 65536 registers and four schedulers.

    :param warps: resident at most.  :param blocks: resident at most.  :param shared: bytes of shared memory.
    :param block_shared: of which a block may have.  :param f64: f64 operations per clock.
    """

    warps: int
    blocks: int
    shared: int
    block_shared: int
    f64: int


_KB = 1024
ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_70": Architecture(64, 32, 96 * _KB, 96 * _KB, 32),
    "sm_75": Architecture(32, 16, 64 * _KB, 64 * _KB, 2),
    "sm_80": Architecture(64, 32, 164 * _KB, 163 * _KB, 32),
    "sm_86": Architecture(48, 16, 100 * _KB, 99 * _KB, 2),
    "sm_89": Architecture(48, 24, 100 * _KB, 99 * _KB, 2),
    "sm_90": Architecture(64, 32, 228 * _KB, 227 * _KB, 64),
    "sm_100": Architecture(64, 32, 228 * _KB, 227 * _KB, 64),
    "sm_120": Architecture(48, 24, 100 * _KB, 99 * _KB, 2),
}


@dataclass(frozen=True)
class Gpu(Device):
    """A GPU; times in seconds, sizes in bytes, rates per second.

    :param arch: the architecture to compile for, ``sm_90``.  :param sms: the number of multiprocessors.
    :param l2: size of the L2 cache.  :param shared: maximum shared memory of a block.
    :param peak: bandwidth of its memory; shares of the floor are of it.
    :param clock: clocks per second of the multiprocessors.
    :param coalesced: rate of 4-byte atomic adds by adjacent threads to adjacent elements.
    :param scattered: rate of 128-byte lines accessed by atomics.
    :param resident: rate of bytes moved by 16-byte atomics or plain accesses that hit L2.
    :param copied: rate of bytes that asynchronous copies bring from L2 to shared memory.
    :param vector: whether the device has 16-byte atomic adds of f32.
    :param hot: time per add to one contended row of up to 512 bytes; wider rows take twice that.
    :param launch: fixed time of a kernel launch, small and dependent on the one before.
    :param issue_share: of the schedulers' clocks in which an instruction is issued.
    :param barrier_share: the same of blocks of 16 warps and more that have barriers.
    :param latency: of a load from memory.  :param cache_latency: of one from a cache.
    :param special: operations of MUFU per clock of a multiprocessor.
    :param matrix: products of 16-bit floats that ``mma.sync`` adds up in f32, per clock of a multiprocessor.
    :param attention_forward: products and sums of torch's attention in 16 bits, of 64 features, per second.
    :param attention_backward: the same of its gradient, which has five products where that has two.
    :param convolution: the same of torch's convolution in 16 bits, channels last.
    :param sort_base: fixed time of a sort.  :param sort_pass: minimum time of a radix pass.
    :param sort_rate: rows per second in a radix pass.
    :param one_block: the most rows that the single-block sort, one launch of ``sort_base``, sorts; 0 if there is none.
    :param sources: constant -> ``measured``, ``fitted``, ``published``, ``estimate`` or ``calibrated``.
    """

    arch: str
    sms: int
    l2: int
    shared: int
    peak: float
    clock: float
    coalesced: float
    scattered: float
    resident: float
    copied: float
    vector: bool
    hot: float
    launch: float
    issue_share: float
    barrier_share: float
    latency: float
    cache_latency: float
    special: int
    matrix: float
    attention_forward: float
    attention_backward: float
    convolution: float
    sort_base: float
    sort_pass: float
    sort_rate: float
    one_block: int = 8192
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def issue(self) -> float:
        """Instructions of warps that its schedulers can issue per second."""
        return self.sms * 4 * self.clock

    @property
    def room(self) -> int:
        """Bytes that stay resident in L2 while other data streams through it."""
        return self.l2 * 6 // 10


CPU = Cpu()
MEASURED, FITTED, PUBLISHED, ESTIMATE = "measured", "fitted", "published", "estimate"
_COMMON: Mapping[str, tuple[float, str]] = {
    "launch": (2.5e-6, ESTIMATE),
    "issue_share": (0.8, ESTIMATE),
    "barrier_share": (0.6, ESTIMATE),
    "latency": (0.5e-6, ESTIMATE),
    "cache_latency": (0.15e-6, ESTIMATE),
    "special": (16, PUBLISHED),
    "sort_base": (12e-6, FITTED),
    "sort_pass": (8e-6, FITTED),
}
_MB = 1_000_000
_OF_TORCH: Mapping[str, float] = {"attention_forward": 345e12, "attention_backward": 300e12, "convolution": 370e12}
"""What torch's libraries took an H200 (torch 2.11, cuDNN 9.19): attention 101 us and 294 of 4 x 16 heads of 2048 x 64,
causal, in bf16 (``sdpa``, default, of ``gpu-nvidia-h200-2026-11-28-tiles.json``), and 47 and 121 of 8 x 12 of 1024; a
convolution by 3 x 3 of 32 x 64 x 56 x 56 some 24 for each of its three products (``conv_block`` and ``gpt_block`` of
``gpu-nvidia-h200-2026-11-28.json``); less a launch.  Of other devices by their tensor cores.
"""


def _per_h200(matrix: float, sms: float, clock: float) -> float:
    """Products on tensor cores per second, by those of an H200."""
    return matrix * sms * clock / (4 * 2048 / 6 * 132 * 1.8e9)


def tensor_share(gpu: Gpu) -> float:
    """How fast a GPU's tensor cores are, by an H200's."""
    return _per_h200(gpu.matrix, gpu.sms, gpu.clock)


def _gpu(name: str, arch: str, **constants: tuple[float, str]) -> Gpu:
    """A Gpu from (value, source) pairs."""
    resident, _ = constants["resident"]
    copied = 2.4 * resident, ESTIMATE  # as on an H200
    share = _per_h200(*(constants[each][0] for each in ("matrix", "sms", "clock")))
    libraries = {each: (rate * share, MEASURED if share == 1 else ESTIMATE) for each, rate in _OF_TORCH.items()}
    shared = ARCHITECTURES[arch].block_shared, PUBLISHED
    given = {**_COMMON, **libraries, "shared": shared, "copied": copied, **constants}
    sources = {key: source for key, (_, source) in given.items()}
    return Gpu(
        name=name,
        arch=arch,
        vector=int(arch[3:]) >= 90,
        sources=sources,
        **{key: value for key, (value, _) in given.items()},  # type: ignore[arg-type]
    )


GPUS: tuple[Gpu, ...] = (
    # The first device of an architecture is its default.  Published `matrix`: the dense rate of f16 with sums in f32
    # over 2 * sms * clock.  H200: a product of 16 x 8 x 16 by mma.sync takes each of four units 6 clocks (0.6666 a
    # clock in gpu-nvidia-h200-2026-11-28-tiles.json), where wgmma is published to take 4; B200, whose fast products are
    # another instruction's: as an A100.
    _gpu(
        "V100",
        "sm_70",
        bandwidth=(0.9e12, PUBLISHED),
        peak=(0.9e12, PUBLISHED),
        sms=(80, PUBLISHED),
        l2=(6 * _MB, PUBLISHED),
        clock=(1.53e9, PUBLISHED),
        matrix=(512, PUBLISHED),
        coalesced=(319e9, ESTIMATE),
        scattered=(50e9, ESTIMATE),
        resident=(2.2e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(24e9, ESTIMATE),
    ),
    _gpu(
        "T4",
        "sm_75",
        bandwidth=(0.3e12, ESTIMATE),
        peak=(0.32e12, PUBLISHED),
        sms=(40, PUBLISHED),
        l2=(4 * _MB, PUBLISHED),
        clock=(1.59e9, PUBLISHED),
        matrix=(512, PUBLISHED),
        coalesced=(159e9, ESTIMATE),
        scattered=(25e9, ESTIMATE),
        resident=(1.1e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(8e9, ESTIMATE),
    ),
    _gpu(
        "A100",
        "sm_80",
        bandwidth=(1.56e12, PUBLISHED),
        peak=(1.56e12, PUBLISHED),
        sms=(108, PUBLISHED),
        l2=(40 * _MB, PUBLISHED),
        clock=(1.41e9, PUBLISHED),
        matrix=(1024, PUBLISHED),
        coalesced=(430e9, ESTIMATE),
        scattered=(68e9, ESTIMATE),
        resident=(3.0e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(42e9, ESTIMATE),
    ),
    _gpu(
        "A100-80GB",
        "sm_80",
        bandwidth=(2.04e12, PUBLISHED),
        peak=(2.04e12, PUBLISHED),
        sms=(108, PUBLISHED),
        l2=(40 * _MB, PUBLISHED),
        clock=(1.41e9, PUBLISHED),
        matrix=(1024, PUBLISHED),
        coalesced=(430e9, ESTIMATE),
        scattered=(68e9, ESTIMATE),
        resident=(3.0e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(54e9, ESTIMATE),
    ),
    _gpu(
        "L4",
        "sm_89",
        bandwidth=(0.27e12, ESTIMATE),
        peak=(0.3e12, PUBLISHED),
        sms=(58, PUBLISHED),
        l2=(48 * _MB, PUBLISHED),
        clock=(2.04e9, PUBLISHED),
        matrix=(512, PUBLISHED),
        coalesced=(231e9, ESTIMATE),
        scattered=(36e9, ESTIMATE),
        resident=(1.6e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(7.2e9, ESTIMATE),
    ),
    _gpu(
        "RTX 4090",
        "sm_89",
        bandwidth=(0.9e12, ESTIMATE),
        peak=(1.01e12, PUBLISHED),
        sms=(128, PUBLISHED),
        l2=(72 * _MB, PUBLISHED),
        clock=(2.52e9, PUBLISHED),
        matrix=(256, PUBLISHED),
        coalesced=(510e9, ESTIMATE),
        scattered=(80e9, ESTIMATE),
        resident=(3.6e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(24e9, ESTIMATE),
    ),
    _gpu(
        "H100",
        "sm_90",
        bandwidth=(3.0e12, MEASURED),
        peak=(3.35e12, PUBLISHED),
        sms=(132, PUBLISHED),
        l2=(50 * _MB, PUBLISHED),
        clock=(1.8e9, ESTIMATE),
        matrix=(4 * 2048 / 6, FITTED),
        coalesced=(526e9, MEASURED),
        scattered=(83e9, MEASURED),
        resident=(3.7e12, MEASURED),
        copied=(8.9e12, FITTED),
        hot=(5e-9, MEASURED),
        sort_rate=(80e9, FITTED),
    ),
    _gpu(
        "H200",
        "sm_90",
        bandwidth=(4.3e12, MEASURED),
        peak=(4.8e12, PUBLISHED),
        sms=(132, PUBLISHED),
        l2=(60 * _MB, PUBLISHED),
        clock=(1.8e9, ESTIMATE),
        matrix=(4 * 2048 / 6, MEASURED),
        coalesced=(526e9, ESTIMATE),
        scattered=(83e9, ESTIMATE),
        resident=(3.7e12, ESTIMATE),
        copied=(8.9e12, MEASURED),
        hot=(5e-9, ESTIMATE),
        sort_rate=(80e9, FITTED),
    ),
    _gpu(
        "B200",
        "sm_100",
        bandwidth=(7.0e12, ESTIMATE),
        peak=(8e12, PUBLISHED),
        sms=(148, PUBLISHED),
        l2=(126 * _MB, PUBLISHED),
        clock=(1.85e9, ESTIMATE),
        matrix=(1024, ESTIMATE),
        coalesced=(590e9, ESTIMATE),
        scattered=(93e9, ESTIMATE),
        resident=(4.1e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(80e9, MEASURED),
        sort_base=(12e-6, MEASURED),
        sort_pass=(8e-6, MEASURED),
    ),
    _gpu(
        "RTX PRO 6000",
        "sm_120",
        bandwidth=(1.6e12, ESTIMATE),
        peak=(1.79e12, PUBLISHED),
        sms=(188, PUBLISHED),
        l2=(128 * _MB, PUBLISHED),
        clock=(2.6e9, PUBLISHED),
        matrix=(512, PUBLISHED),
        coalesced=(750e9, ESTIMATE),
        scattered=(118e9, ESTIMATE),
        resident=(5.2e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(43e9, ESTIMATE),
    ),
    _gpu(
        "RTX 5090",
        "sm_120",
        bandwidth=(1.6e12, ESTIMATE),
        peak=(1.79e12, PUBLISHED),
        sms=(170, PUBLISHED),
        l2=(96 * _MB, PUBLISHED),
        clock=(2.41e9, PUBLISHED),
        matrix=(256, PUBLISHED),
        coalesced=(677e9, ESTIMATE),
        scattered=(107e9, ESTIMATE),
        resident=(4.8e12, ESTIMATE),
        hot=(5e-9, ESTIMATE),
        sort_rate=(43e9, ESTIMATE),
    ),
)
_RATE, _TIME, _BYTES = (1e6, 1e16), (0, 1), (1, 2**40)
CONSTANTS: Mapping[str, tuple[float, float]] = {
    "bandwidth": _RATE,
    "coalesced": _RATE,
    "scattered": _RATE,
    "resident": _RATE,
    "sort_rate": _RATE,
    "hot": _TIME,
    "launch": _TIME,
    "sort_base": _TIME,
    "sort_pass": _TIME,
    "sms": (1, 65536),
    "l2": _BYTES,
    "shared": _BYTES,
    "clock": _RATE,
    "issue_share": (0.01, 1),
    "barrier_share": (0.01, 1),
    "latency": _TIME,
    "cache_latency": _TIME,
    "peak": _RATE,
    "special": (1, 4096),
    "copied": _RATE,
    "matrix": (1, 65536),
    "attention_forward": _RATE,
    "attention_backward": _RATE,
    "convolution": _RATE,
    "one_block": (0, 2**31),
}
"""The constants that a calibration file of a GPU may have, and between which values they lie,"""
CPU_CONSTANTS: Mapping[str, tuple[float, float]] = {
    "bandwidth": _RATE,
    "sort": (0, 1e-6),
    "gathered": (-1e-8, 1e-8),
    "ordered": (0, 1e-6),
    "partial": (1e-11, 1e-7),
    "missed": (0, 1e-7),
    "cached": (1, 2**40),
    "skew": (0, 1e-6),
    "locality": (0, 1e-6),
}
"""and those of a CPU."""
OF_INSTRUCTIONS = (
    "clock",
    "issue_share",
    "barrier_share",
    "latency",
    "cache_latency",
    "peak",
    "special",
    "matrix",
    "copied",
)
"""Those of machine code's time: no choice of a reduction looks at them,"""
OF_TORCH = tuple(_OF_TORCH)
"""nor at those of torch's libraries."""
_WHOLE = ("sms", "l2", "shared", "special", "one_block", "cached")


def device_for(arch_or_name: str, calibration: str | Path | None = None) -> Cpu | Gpu:
    """The device of an architecture (``sm_90``, ``sm_90a``; ``sm_86`` is treated as ``sm_80``), a name (``H200``), or a
    driver's name (``NVIDIA H100 80GB HBM3``); or ``cpu``.

    :param calibration: a file whose constants replace the built-in ones.
    :raises Unsupported: the device is not known.  :raises InvalidProblem: the file is invalid.
    """
    device = _find(arch_or_name)
    return device if calibration is None else calibrated(device, calibration)


def gpu_of(arch_or_name: str | None, calibration: str | None = None) -> Gpu:
    """The GPU for an architecture or a name (None: sm_90), with constants replaced by those of a calibration text."""
    device = device_for(arch_or_name or "sm_90")
    if not isinstance(device, Gpu):
        raise Unsupported(f"{arch_or_name!r} is no GPU")
    return device if calibration is None else calibrated_by(device, calibration)


def cpu_of(calibration: str | None = None) -> Cpu:
    """The CPU, with constants replaced by those of a calibration text."""
    return CPU if calibration is None else calibrated_by(CPU, calibration)


def listed_device(name: str, arch: str) -> Gpu:
    """The known GPU for an actual device: the one with the driver's name, else the default of its architecture.

    :raises Unsupported: the cost model knows neither.
    """
    for asked in (name, arch):
        try:
            device = _find(asked)
        except Unsupported:
            continue
        if isinstance(device, Gpu) and (asked == arch or device.arch == arch):
            return device
    raise Unsupported(f"the cost model knows neither a device {name[:80]!r} nor the architecture {arch}")


def _find(asked: str) -> Cpu | Gpu:
    if not isinstance(asked, str):
        raise InvalidProblem(f"a device is named by a text, not by {asked!r}")
    words = re.findall(r"[a-z0-9_]+", asked.lower())
    if words == ["cpu"]:
        return CPU
    if len(words) == 1 and (match := re.fullmatch(r"sm_(\d+)[af]?", words[0])):
        number = int(match[1])  # if it is not listed, the nearest older one of its generation: sm_86 as sm_80
        older = [d for d in GPUS if int(d.arch[3:]) <= number and int(d.arch[3:]) // 10 == number // 10]
        same = sorted(older, key=lambda d: -int(d.arch[3:]))
    else:
        same = [d for d in GPUS if set(re.findall(r"[a-z0-9_]+", d.name.lower())) <= set(words)]
        same.sort(key=lambda d: -len(d.name))  # prefer the more specific name: A100-80GB to A100
    if not same:
        known = ", ".join(f"{d.name} ({d.arch})" for d in GPUS)
        raise Unsupported(f"the cost model knows no device {asked[:80]!r}; there are cpu, {known}")
    return same[0]


# -- calibration -------------------------------------------------------------------------------------------------------


M = TypeVar("M", bound="Cpu | Gpu")


def calibrated(device: M, path: str | Path) -> M:
    """The device with constants replaced by those of a calibration file.

    :raises InvalidProblem: the file is missing, no JSON, or of another device, or has an unknown constant or an
        implausible number.
    """
    return calibrated_by(device, read_calibration(path), path)


def read_calibration(path: str | Path) -> str:
    """The text of a calibration file; InvalidProblem if it cannot be read, is too long or no text."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise InvalidProblem(f"{path}: the calibration cannot be read: {error.strerror or error}") from error
    if len(raw) > _LONGEST_FILE:
        raise InvalidProblem(f"{path}: a calibration has at most {_LONGEST_FILE} bytes")
    try:
        return raw.decode("utf-8")
    except ValueError as error:
        raise InvalidProblem(f"{path}: this is not the JSON of a calibration: {error}") from error


def calibrated_by(device: M, text: str, where: str | Path = "calibration") -> M:
    """:func:`calibrated` with the text of a file; ``where`` is its name in errors."""
    try:
        calibration = read_json(text, _once)
    except ValueError as error:
        raise InvalidProblem(f"{where}: this is not the JSON of a calibration: {error}") from error
    try:
        return _replaced(device, calibration)
    except InvalidProblem as error:
        raise InvalidProblem(f"{where}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return dict(pairs)


def _replaced(device: M, calibration: Any) -> M:
    if not isinstance(calibration, dict) or calibration.get("format") != FORMAT:
        raise InvalidProblem(f'a calibration begins with "format": "{FORMAT}"')
    unknown = calibration.keys() - {"format", "device", "constants"}
    if unknown:
        raise InvalidProblem(f"a calibration has no key {min(unknown)!r}; it has format, device, constants")
    if calibration.get("device") != device.name:
        raise InvalidProblem(f"the calibration is of {calibration.get('device')!r}, not of {device.name}")
    constants = calibration.get("constants")
    if not isinstance(constants, dict):
        raise InvalidProblem('a calibration\'s "constants" maps names to numbers')
    ranges = CONSTANTS if isinstance(device, Gpu) else CPU_CONSTANTS
    for name, value in constants.items():
        if name not in ranges:
            raise InvalidProblem(f"there is no constant {name!r}; there are {', '.join(ranges)}")
        _check(name, value, ranges[name])
    return replace(device, sources={**device.sources, **dict.fromkeys(constants, "calibrated")}, **constants)


def _check(name: str, value: Any, between: tuple[float, float]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidProblem(f"{name} is {value!r}: a number is wanted")
    low, high = between
    if not low <= value <= high:  # also true for NaN
        raise InvalidProblem(f"{name} is {str(value)[:40]}: it lies between {low:g} and {high:g}")
    if name in _WHOLE and not isinstance(value, int):
        raise InvalidProblem(f"{name} is {value}: a whole number is wanted")


def calibration_text(device: M, constants: Mapping[str, float]) -> str:
    """The text of a calibration file with constants measured on a device.

    :raises InvalidProblem: :func:`calibrated` would reject it.
    """
    content = {"format": FORMAT, "device": device.name, "constants": dict(constants)}
    _replaced(device, content)
    return json.dumps(content, indent=2) + "\n"
