"""The device of a dry run: the constants that ``gradc calibrate`` would measure, with its kernels run on the simulator.

    python -m benchmarks.gpu_dry --out FILE

Every kernel that is timed on a GPU runs, at small sizes; what a clock would show is reckoned from :data:`CONSTANTS`,
which the fit has to find again.  The file is of the same form, and compile reads it as it reads a device's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradc.calibration.measure import Bench, Scale, fitted, measure, text
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import Gpu, calibration_text, gpu_of

CONSTANTS: Mapping[str, float] = {
    "bandwidth": 2.5e12,
    "coalesced": 4e11,
    "scattered": 7e10,
    "resident": 3.3e12,
    "hot": 6e-9,
    "launch": 1.9e-6,
    "sort_base": 3e-6,
    "sort_pass": 5e-7,
    "sort_rate": 5e10,
}
"""None is the one that the device is listed with; a pass of a sort of so few rows takes longer than its least."""
SCALE = Scale(
    launches=(2, 4, 8),
    copied=(2, 3, 4),
    adds=(512, 1024, 2048),
    lines=(256, 512, 1024),
    moved=(1 << 13, 1 << 14, 1 << 15),
    hits=(8, 16, 32),
    rows=(16_385, 30_000, 40_000),
)
LISTED = gpu_of("sm_90")
SMALL: Gpu = replace(LISTED, sms=2, l2=1 << 13, sort_pass=CONSTANTS["sort_pass"])


class ReckonedBench(Bench):
    """Runs everything on the simulator; its clock shows what :data:`CONSTANTS` make of the arguments of launches.

    :param check: detect races and accesses out of bounds.
    """

    def __init__(self, check: bool = False):
        super().__init__(Simulator(text(), check=check))
        self.launched: list[tuple[str, list[Any]]] = []

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        self.launched.append((function, list(args)))
        super().launch(function, blocks, threads, args, written)

    def seconds(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        if before is not None:
            before()
        self.launched.clear()
        work()
        return 3e-6 + sum(cost(*each) for each in self.launched)


def cost(function: str, args: Sequence[Any]) -> float:
    """Seconds of a launch."""
    name = function.removeprefix("gradc_calibrate_")
    if name == "copy":  # of 16 bytes each
        return 32 * args[2] * args[3] / CONSTANTS["bandwidth" if 16 * args[2] > SMALL.l2 else "resident"]
    rates = {
        "coalesced": lambda: args[-1] / CONSTANTS["coalesced"],
        "scattered": lambda: args[-1] / CONSTANTS["scattered"],
        "vectors": lambda: args[-1] * 16 / CONSTANTS["resident"],
        "hot": lambda: args[-1] * CONSTANTS["hot"],
        "nothing": lambda: CONSTANTS["launch"],
        "gradc_sort_move": lambda: max(CONSTANTS["sort_pass"], args[5] / CONSTANTS["sort_rate"]),  # a pass
    }
    return rates[name]() if name in rates else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = fitted(list(measure(ReckonedBench(), SMALL, SCALE)), SMALL)
    options.out.write_text(calibration_text(LISTED, {n: float(f"{v:.4g}") for n, v in found.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
