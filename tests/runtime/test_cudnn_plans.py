"""Plans that cuDNN itself makes for sm_80, sm_90 and sm_100, where no device is: a device's properties stand for it.

They need the extra ``gradc[cudnn]`` and cuDNN's wheel.  Where there is no driver, a library whose functions all fail
takes its place, which cuDNN links with and calls none of to make a plan.  That is a process of its own.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradc.runtime.cuda.cudnn_version import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"cuDNN makes no plans: {missing()}")

ARCHITECTURES: dict[int, dict[str, int]] = {
    80: {
        "multiProcessorCount": 108, "maxSharedMemoryPerBlockOptin": 166912, "smClockRateKHz": 1410000,
        "memClockRateKHz": 1512000, "memoryBusWidth": 5120, "l2CacheSize": 41943040,
    },
    90: {
        "multiProcessorCount": 132, "maxSharedMemoryPerBlockOptin": 232448, "smClockRateKHz": 1980000,
        "memClockRateKHz": 2619000, "memoryBusWidth": 5120, "l2CacheSize": 52428800,
    },
    100: {
        "multiProcessorCount": 148, "maxSharedMemoryPerBlockOptin": 232448, "smClockRateKHz": 1965000,
        "memClockRateKHz": 3996000, "memoryBusWidth": 8192, "l2CacheSize": 132644864,
    },
}  # fmt: skip
"""An A100's, H100's and B200's properties (published)."""
COMMON: dict[str, Any] = {
    "deviceName": "GPU", "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536, "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "cudaDeviceId": 0, "driverVer": 13000, "totalGlobalMem": 80 << 30,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "of a ResNet": {"x": "[32,64,56,56]", "w": "[64,64,3,3]", "padding": 1},
    "with strides": {"x": "[32,128,56,56]", "w": "[128,128,3,3]", "padding": 1, "stride": 2},
    "of a stem": {"x": "[32,3,224,224]", "w": "[64,3,7,7]", "padding": 3, "stride": 2},
    "with a remainder": {"x": "[2,8,12,11]", "w": "[8,8,3,2]", "stride": 3},
    "dilated": {"x": "[2,16,20,20]", "w": "[16,16,3,3]", "padding": 2, "dilation": 2},
    "in groups": {"x": "[4,32,14,14]", "w": "[32,8,3,3]", "padding": 1, "groups": 4},
    "odd channels": {"x": "[3,5,9,9]", "w": "[7,5,3,3]", "padding": "same"},
    "even filter": {"x": "[3,8,9,9]", "w": "[8,8,4,4]", "padding": "same"},
    "along one axis": {"x": "[8,16,100]", "w": "[32,16,5]", "padding": 2},
    "along three": {"x": "[2,8,9,10,11]", "w": "[16,8,3,3,3]", "padding": 1, "stride": 2},
}
SCRIPT = """
import ctypes, json, sys
given = json.load(sys.stdin)
if given["driver"]:
    ctypes.CDLL(given["driver"], ctypes.RTLD_GLOBAL)
import gradc
from gradc import ops
from gradc.codegen.cuda.actions import Convolution
from gradc.errors import DeviceError
from gradc.runtime.cuda import cudnn

library = cudnn.library()
for name, case in given["cases"].items():
    x, w = case.pop("x"), case.pop("w")
    spatial = w.count(",") - 1
    back, there = (0, *range(2, spatial + 2), 1), (0, spatial + 1, *range(1, spatial + 1))
    last = lambda t: "[" + ",".join(t[1:-1].split(",")[i] for i in back) + "]"
    conv = getattr(ops, f"conv{spatial}d")
    for dtype in ("f16", "bf16", "f32", "f64"):
        for channels_last in (False, True):
            def function(x, w):
                if not channels_last:
                    return conv(x, w, **case)
                y = conv(ops.transpose(x, there), ops.transpose(w, there), **case)
                return ops.transpose(y, back)
            types = {n: dtype + (last(t) if channels_last else t) for n, t in (("x", x), ("w", w))}
            module = gradc.compile(gradc.trace(function, **types), wrt=["x", "w"], target="cuda", convolutions="cudnn")
            plans = [e.native.bind({}) for e in module.executables.values()]
            asked = [a for p in plans for each in p.actions for a in each if isinstance(a, Convolution)]
            assert sorted(a.computes for a in asked) == ["filter", "image", "response"]
            for of in asked:
                for arch, properties in given["architectures"].items():
                    device = library.create_device_properties(json.dumps(properties))
                    try:
                        plan = cudnn.planned(library, of, device_property=device, sm_version=int(arch))
                        print(json.dumps([name, dtype, of.computes, arch, plan.get_workspace_size(), of.workspace]))
                    except DeviceError as error:
                        print(json.dumps([name, dtype, of.computes, arch, str(error), 0]))
"""


def driver(folder: Path) -> str:
    """A library in the place of the driver's, where there is none: every function that cuDNN names fails."""
    if ctypes.util.find_library("cuda"):
        return ""
    found = importlib.util.find_spec("nvidia.cudnn")
    assert found is not None and found.submodule_search_locations is not None
    (linked,) = Path(next(iter(found.submodule_search_locations))).glob("lib/libcudnn_engines_runtime_compiled.so.9")
    names = sorted({m[1].decode() for m in re.finditer(rb"\0(cu[A-Z]\w*)(?=\0)", linked.read_bytes())})
    text = "\n".join(f"int {name}(void) {{ return 100; }}" for name in names)
    made = folder / "libcuda.so.1"
    command = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(made)]
    subprocess.run(command, input=text, text=True, check=True)
    return str(made)


@pytest.mark.parametrize("name", CASES)
def test_cudnn_has_plans(name: str, tmp_path: Path) -> None:
    """Deterministic ones, for all three maps of every dtype and layout, in the workspace that a call has."""
    properties = {arch: {**COMMON, **own, "deviceVer": 10 * arch} for arch, own in ARCHITECTURES.items()}
    given = {"driver": driver(tmp_path), "architectures": properties, "cases": {name: CASES[name]}}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4 * 2 * 3 * len(ARCHITECTURES)
    failed = [row for row in rows if not (isinstance(row[4], int) and row[4] <= row[5])]
    assert not failed
