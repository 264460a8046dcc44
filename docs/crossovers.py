"""What the cost model predicts for ways to combine rows on an H100, as a picture: python docs/crossovers.py writes
crossovers.svg beside itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gradc.passes.reductions.combine import Hits, Scatter, expected_hits, row_scatter
from gradc.passes.reductions.cost import cheapest, predict
from gradc.passes.reductions.devices import Gpu, device_for
from gradc.passes.reductions.strategies import floor

TABLES = ((2500, 128), (32000, 512))
"""V, D of f32 tables."""
COLOURS = {"segmented": "#0072b2", "privatized": "#009e73", "atomic": "#d55e00", "atomic_fixed": "#b5609a"}
POWERS = (8, 22)
SECONDS = (5e-6, 2e-2)
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 400, 330, 76, 86, 24
Points = list[tuple[float, float]]


def x_of(rows: float) -> float:
    return WIDTH * (math.log2(rows) - POWERS[0]) / (POWERS[1] - POWERS[0])


def y_of(seconds: float) -> float:
    low, high = (math.log10(s) for s in SECONDS)
    return HEIGHT * (1 - (math.log10(seconds) - low) / (high - low))


def curve(points: Points, style: str) -> str:
    """A line through points, cut where it leaves the frame."""
    inside = [(x, y) for x, y in points if 0 <= y <= HEIGHT]
    return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in inside)}"/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def frame() -> list[str]:
    """Axes and grid."""
    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white" stroke="#888"/>']
    for power in range(POWERS[0], POWERS[1] + 1, 2):
        x = x_of(2**power)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="#eee"/>')
        label = str(2**power) if power < 10 else f"{2 ** (power - 10)}K" if power < 20 else f"{2 ** (power - 20)}M"
        out.append(text(x, HEIGHT + 16, label, 'text-anchor="middle"'))
    for seconds, label in ((1e-5, "10 µs"), (1e-4, "100 µs"), (1e-3, "1 ms"), (1e-2, "10 ms")):
        y = y_of(seconds)
        out += [
            f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>',
            text(-7, y + 4, label, 'text-anchor="end"'),
        ]
    return [*out, text(WIDTH / 2, HEIGHT + 36, "N, rows that are added", 'text-anchor="middle"')]


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


def panel(keys: int, width: int, device: Gpu) -> list[str]:
    s = row_scatter(1, keys, width)
    grid = [at(s, round(2 ** (step / 8))) for step in range(POWERS[0] * 8, POWERS[1] * 8 + 1)]
    out = [
        *frame(),
        curve(
            [(x_of(p.rows), y_of(floor(p) / device.bandwidth)) for p in grid if floor(p)],
            'stroke="#999" stroke-width="1.5" stroke-dasharray="1 3"',
        ),
    ]
    for hot in (False, True):
        lines: dict[str, Points] = {name: [] for name in COLOURS}
        for p in grid:
            hits = expected_hits(p)
            if hot:
                half = expected_hits(at(s, p.rows // 2))
                hits = Hits(half.unique, p.rows // 2)
            for e in predict(p, device, list(COLOURS), hits):
                lines[e.strategy].append((x_of(p.rows), y_of(e.seconds)))
        for name, points in lines.items():
            if not hot or name.startswith("atomic"):  # the others do not see it
                out.append(
                    curve(
                        points,
                        f'stroke="{COLOURS[name]}" stroke-width="2"' + (' stroke-dasharray="6 4"' if hot else ""),
                    )
                )
    where = "more than" if keys * width * 4 > device.l2 else "within"
    out.append(
        text(
            0,
            -38,
            f"V = {keys}, D = {width}: {keys * width * 4 / 1e6:.1f} MB, {where} L2",
            'font-weight="bold" font-size="13"',
        )
    )
    for line, (says, names) in enumerate(
        (("same bits", ("segmented", "privatized")), ("any order", ("segmented", "privatized", "atomic")))
    ):
        y = -24 + 13 * line
        picks = changes(s, device, names)
        for (rows, name), (end, _) in zip(picks, [*picks[1:], (2 ** POWERS[1], "")], strict=True):
            out.append(
                f'<rect x="{x_of(rows):.1f}" y="{y}" width="{x_of(end) - x_of(rows):.1f}" height="9"'
                f' fill="{COLOURS[name]}"><title>{says}: {name} from N = {rows}</title></rect>'
            )
        out.append(text(-7, y + 8, says, 'text-anchor="end"'))
    return out


def legend() -> list[str]:
    out: list[str] = []
    x = 0
    entries = [
        *((name, f'stroke="{colour}" stroke-width="2"', 100) for name, colour in COLOURS.items()),
        ("half of the rows go to one", 'stroke="#555" stroke-width="2" stroke-dasharray="6 4"', 190),
        ("floor", 'stroke="#999" stroke-width="1.5" stroke-dasharray="1 3"', 60),
    ]
    for name, style, room in entries:
        out += [f'<line x1="{x}" x2="{x + 24}" y1="-4" y2="-4" {style}/>', text(x + 29, 0, name)]
        x += room + 18
    return out


def picture() -> str:
    device = device_for("H100")
    assert isinstance(device, Gpu)
    total = len(TABLES) * (LEFT + WIDTH) + RIGHT
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{TOP + HEIGHT + 76}"'
            ' font-family="sans-serif" font-size="11" fill="#222">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        text(
            LEFT,
            22,
            "Predicted time to add N rows of f32 into a table on an H100, and what is picked (bars)",
            'font-size="14"',
        ),
    ]
    for number, (keys, width) in enumerate(TABLES):
        parts += [
            f'<g transform="translate({LEFT + number * (LEFT + WIDTH)},{TOP})">',
            *panel(keys, width, device),
            "</g>",
        ]
    parts += [f'<g transform="translate({LEFT},{TOP + HEIGHT + 62})">', *legend(), "</g>", "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(picture(), encoding="utf-8")
    print(target)
