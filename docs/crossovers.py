"""What the cost model predicts for ways to combine rows on an H100, as a picture: python docs/crossovers.py writes
crossovers.svg beside itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gradc.analysis.combine import Hits, Scatter, expected_hits, row_scatter
from gradc.analysis.cost import cheapest, predict
from gradc.analysis.strategies import floor
from gradc.inspect.plot import Axis, Line, Plot, plot, side_by_side
from gradc.targets.devices import Gpu, device_for

TABLES = ((2500, 128), (32000, 512))
"""V, D of f32 tables."""
STRATEGIES = ("segmented", "atomic", "privatized", "atomic_fixed")
POWERS = (8, 22)
HALF = "half to one row"


def changes(s: Scatter[int], device: Gpu, names: Sequence[str]) -> list[tuple[int, str]]:
    """(N, pick) where the pick changes, from the smallest N in the frame on."""
    out: list[tuple[int, str]] = []
    for step in range(POWERS[0] * 64, POWERS[1] * 64 + 1):
        rows = round(2 ** (step / 64))
        pick = cheapest(at(s, rows), device, names)
        if not out or out[-1][1] != pick:
            out.append((rows, pick))
    return out


def at(s: Scatter[int], rows: int) -> Scatter[int]:
    return row_scatter(rows, s.keys, s.width)


def of_table(keys: int, width: int, device: Gpu) -> Plot:
    s = row_scatter(1, keys, width)
    grid = [at(s, round(2 ** (step / 8))) for step in range(POWERS[0] * 8, POWERS[1] * 8 + 1)]
    lines = []
    for hot in (False, True):
        points: dict[str, list[tuple[float, float]]] = {name: [] for name in STRATEGIES}
        for p in grid:
            hits = expected_hits(p)
            if hot:
                half = expected_hits(at(s, p.rows // 2))
                hits = Hits(half.unique, p.rows // 2)
            for e in predict(p, device, list(STRATEGIES), hits):
                points[e.strategy].append((p.rows, e.seconds))
        for name in STRATEGIES:
            if not hot:
                lines.append(Line(name, points[name]))
            elif name.startswith("atomic"):  # the others do not see it
                lines.append(Line(f"{name}, {HALF}", points[name], "dashed", like=name))
    lines.append(Line("floor", [(p.rows, floor(p) / device.bandwidth) for p in grid], "dotted", grey=True))
    bands = {}
    for says, names in (("same bits", STRATEGIES[::2]), ("any order", STRATEGIES[:3])):
        picks = changes(s, device, names)
        ends = [rows for rows, _ in picks[1:]] + [2 ** POWERS[1]]
        bands[f"picked, {says}"] = [(rows, end, name) for (rows, name), end in zip(picks, ends, strict=True)]
    where = "more than" if keys * width * 4 > device.l2 else "within"
    return plot(
        lines,
        Axis("N, rows that are added", base=2, limits=(2.0 ** POWERS[0], 2.0 ** POWERS[1])),
        Axis(base=10, unit="s", limits=(5e-6, 2e-2)),
        title=f"V = {keys}, D = {width}: {keys * width * 4 / 1e6:.1f} MB, {where} L2",
        bands=bands,
    )


def picture() -> str:
    device = device_for("H100")
    assert isinstance(device, Gpu)
    return side_by_side(
        [of_table(keys, width, device) for keys, width in TABLES],
        "Predicted time to add N rows of f32 into a table on an H100, and what is picked (bars)",
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(picture(), encoding="utf-8")
    print(target)
