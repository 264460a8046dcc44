"""Lines as a picture: losses over steps, times over sizes, estimates that cross.

As SVG by this file alone, always the same text for the same points; as PNG or PDF, and to change it, by matplotlib
(the extra ``plot``).
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidProblem, Unsupported
from ..process import files

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5609a", "#dc9a18", "#56a5d8")
"""Told apart by people who do not see all colours, and on white and black."""
DASHES = {"solid": "", "dashed": "6 4", "dotted": "1 3"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 450, 340, 66, 200, 40, 50
"""Of the frame, and beside it."""
BAND, LINE_OF_TEXT = 13, 14
"""Pixels of a row of bars above the frame, and of a line of text."""
MOST_TICKS = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line through points, cut where it leaves the frame.

    :param like: the name of another line, whose colour it has.
    """

    name: str
    points: Points
    dash: str = "solid"
    like: str = ""
    grey: bool = False


@dataclass(frozen=True)
class Axis:
    """How an axis is divided.

    :param base: 0 for equal steps; else powers of it lie equally far apart.
    :param unit: ``s`` writes ticks as µs, ms and s.
    :param limits: the first and last value; those of the points, to round numbers, by default.
    """

    label: str = ""
    base: float = 0
    unit: str = ""
    limits: tuple[float, float] | None = None

    def place(self, value: float) -> float:
        return math.log(value, self.base) if self.base else value

    def ticks(self, values: Iterable[float]) -> list[float]:
        """Values with a label; the frame goes from the first to the last, or from limit to limit."""
        found = [*values, *(self.limits or ())] or [1.0]
        low, high = self.limits or (min(found), max(found))
        if not self.base:
            return steps(low, high)
        first, last = math.floor(self.place(low) + 1e-9), math.ceil(self.place(high) - 1e-9)
        stride = max(1, math.ceil((last - first) / MOST_TICKS))
        powers = range(first, max(last, first + 1) + stride, stride)  # the last one is not before the last value
        if self.limits:
            powers = range(math.ceil(self.place(low) - 1e-9), math.floor(self.place(high) + 1e-9) + 1, stride)
        return [float(self.base) ** power for power in powers]

    def ends(self, ticks: Sequence[float]) -> tuple[float, float]:
        low, high = self.limits or (ticks[0], ticks[-1])
        return self.place(low), self.place(high)

    def written(self, value: float) -> str:
        if self.unit == "s":
            units = ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))
            factor, unit = next(((f, u) for f, u in units if value * f >= 0.9995), units[-1])
            return f"{value * factor:.4g} {unit}"
        if self.base == 2 and value >= 1024:
            power = min(int(math.log2(value)) // 10, 3)
            return f"{value / 1024**power:.4g}{' KMG'[power]}"
        return f"{value:,.0f}" if self.base and value >= 1 else f"{value:.4g}"


@dataclass(frozen=True)
class Plot:
    """Lines in a frame.

    :param levels: dashed horizontal lines, by name.
    :param bands: rows of bars above the frame, by name: (from, to, the line whose colour it has).
    """

    lines: Sequence[Line]
    across: Axis = field(default_factory=Axis)
    up: Axis = field(default_factory=Axis)
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    bands: Mapping[str, Sequence[tuple[float, float, str]]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        return LEFT + WIDTH + RIGHT, TOP + BAND * len(self.bands) + HEIGHT + BOTTOM

    @property
    def colours(self) -> dict[str, str]:
        """Each line's, by its name."""
        own = [line.name for line in self.lines if not line.like and not line.grey]
        found = dict(zip(own, itertools.cycle(COLOURS), strict=False))
        return {line.name: "#888" if line.grey else found.get(line.like or line.name, "#555") for line in self.lines}

    @property
    def drawn(self) -> list[tuple[Line, list[tuple[float, float]]]]:
        """Each line with the points that have a place: finite, and above 0 where only that has one."""
        return [
            (line, [(x, y) for x, y in line.points if _has_place(x, self.across) and _has_place(y, self.up)])
            for line in self.lines
        ]

    def svg(self) -> str:
        width, height = self.size
        return _document(width, height, [self.panel()])

    def panel(self) -> str:
        """The picture as a part of one."""
        return "\n".join(_Panel(self).parts())

    def save(self, path: Any) -> Path:
        """Writes a file: ``.svg``, or what matplotlib writes.

        :raises Unsupported: it is to be another format, and matplotlib is not installed.
        """
        where = files.as_path(path, "written")
        if where.suffix.lower() == ".svg":
            files.write(where, self.svg())
        else:
            with files.replacing(where) as file:
                try:
                    self.figure().savefig(file, format=where.suffix.removeprefix(".").lower() or "png")
                except ValueError as error:
                    raise InvalidProblem(f"{where.name}: {str(error).splitlines()[0]}") from error
        return where

    def figure(self) -> Any:
        """A ``matplotlib.figure.Figure``.

        :raises Unsupported: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise Unsupported("without matplotlib a plot is an .svg; pip install 'gradc[plot]' for others") from error
        figure = Figure(figsize=(self.size[0] / 90, self.size[1] / 90), layout="constrained")
        axes = figure.add_subplot()
        colours = self.colours
        for line, points in self.drawn:
            xs, ys = zip(*points, strict=True) if points else ((), ())
            dash = {"solid": "-", "dashed": "--", "dotted": ":"}[line.dash]
            axes.plot(xs, ys, dash, color=colours[line.name], label=line.name, linewidth=1.5)
        for name, level in self.levels.items():
            axes.axhline(level, color="#777", linestyle="--", linewidth=1)
            axes.annotate(name, (1, level), xycoords=("axes fraction", "data"), fontsize=8)
        for axis, scale, limit in (
            (self.across, axes.set_xscale, axes.set_xlim),
            (self.up, axes.set_yscale, axes.set_ylim),
        ):
            if axis.base:
                scale("log", base=axis.base)
            if axis.limits:
                limit(*axis.limits)
        axes.set(xlabel=self.across.label, ylabel=self.up.label, title=self.title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        return self.svg()


def plot(
    lines: Mapping[str, Points] | Sequence[Line],
    across: str | Axis = "",
    up: str | Axis = "",
    *,
    title: str = "",
    levels: Mapping[str, float] | None = None,
    bands: Mapping[str, Sequence[tuple[float, float, str]]] | None = None,
) -> Plot:
    """A plot of lines through points (x, y), by name; what is not finite is left out.

    >>> plot({"loss": [(0, 2.3), (100, 1.7)]}, "step", "nats").save("losses.svg")

    :param across, up: the axes, or their labels.
    """
    every = [Line(name, points) for name, points in lines.items()] if isinstance(lines, Mapping) else list(lines)
    axes = [Axis(axis) if isinstance(axis, str) else axis for axis in (across, up)]
    return Plot(every, axes[0], axes[1], title, dict(levels or {}), dict(bands or {}))


def side_by_side(plots: Sequence[Plot], title: str = "") -> str:
    """Several plots as one SVG."""
    below = 24 if title else 0
    parts = [_text(LEFT, 20, title, 'font-size="14"')] if title else []
    x = 0
    for each in plots:
        parts.append(f'<g transform="translate({x},{below})">\n{each.panel()}\n</g>')
        x += each.size[0]
    return _document(x, below + max((each.size[1] for each in plots), default=0), parts)


def steps(low: float, high: float) -> list[float]:
    """Round numbers about a fifth of the range apart, from at most ``low`` to at least ``high``."""
    rough = (high - low or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def _has_place(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.base)


def _document(width: int, height: int, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' style="max-width:100%;height:auto" font-family="sans-serif" font-size="12" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" {more}" if more else ""}>{html.escape(words)}</text>'


class _Panel:
    """The parts of one plot's picture."""

    def __init__(self, plot: Plot):
        self.plot, self.drawn, self.colours = plot, plot.drawn, plot.colours
        self.width, self.height = WIDTH, HEIGHT
        self.top = TOP + BAND * len(plot.bands)
        points = [point for _, line in self.drawn for point in line]
        self.across = plot.across.ticks(x for x, _ in points)
        self.up = plot.up.ticks([*(y for _, y in points), *plot.levels.values()])
        self.x = self._scale(plot.across, self.across, LEFT, LEFT + self.width)
        self.y = self._scale(plot.up, self.up, self.top + self.height, self.top)

    @staticmethod
    def _scale(axis: Axis, ticks: Sequence[float], first: float, last: float) -> Callable[[float], float]:
        low, high = axis.ends(ticks)
        return lambda value: first + (axis.place(value) - low) / (high - low) * (last - first)

    def parts(self) -> list[str]:
        plot = self.plot
        bottom = self.top + self.height
        out = [
            f'<rect x="{LEFT}" y="{self.top}" width="{self.width}" height="{self.height}" fill="none" stroke="#999"/>',
            _text(LEFT, 16, plot.title, 'font-weight="bold" font-size="13"'),
            _text(LEFT + self.width / 2, bottom + 36, plot.across.label, 'text-anchor="middle"'),
            _text(4, self.top - BAND * len(plot.bands) - 8, plot.up.label),
        ]
        for y in self.up:
            out += [
                f'<path d="M{LEFT} {self.y(y):.1f}H{LEFT + self.width}" stroke="#e4e4e0"/>',
                _text(LEFT - 7, self.y(y) + 4, plot.up.written(y), 'text-anchor="end"'),
            ]
        for x in self.across:
            out += [
                f'<path d="M{self.x(x):.1f} {self.top}V{bottom}" stroke="#f0f0ec"/>',
                _text(self.x(x), bottom + 18, plot.across.written(x), 'text-anchor="middle"'),
            ]
        return [*out, *self._bands(), *self._lines()]

    def _bands(self) -> Iterable[str]:
        for number, (name, bars) in enumerate(self.plot.bands.items()):
            y = self.top - BAND * (len(self.plot.bands) - number)
            yield _text(LEFT + self.width + 6, y + 9, name)
            for low, high, line in bars:
                yield (
                    f'<rect x="{self.x(low):.1f}" y="{y}" width="{self.x(high) - self.x(low):.1f}" height="9"'
                    f' fill="{self.colours.get(line, "#555")}"><title>{html.escape(f"{name}: {line}")} from'
                    f" {html.escape(self.plot.across.written(low))}</title></rect>"
                )

    def _lines(self) -> Iterable[str]:
        right, names = LEFT + self.width, []
        for name, level in self.plot.levels.items():
            yield f'<path d="M{LEFT} {self.y(level):.1f}H{right}" stroke="#777" stroke-dasharray="5 4"/>'
            names.append((self.y(level), name, "#555"))
        for line, points in self.drawn:
            places = [(self.x(x), self.y(y)) for x, y in points]
            inside = [(x, y) for x, y in places if self.top - 0.5 <= y <= self.top + self.height + 0.5]
            if inside:
                colour, dash = self.colours[line.name], DASHES[line.dash]
                dashed = f' stroke-dasharray="{dash}"' if dash else ""
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
                yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>'
                names.append((inside[-1][1], line.name, colour))
        names.sort()
        free = float(self.top + 10)
        lowest = self.top + self.height - LINE_OF_TEXT * (len(names) - 1)
        for number, (y, name, colour) in enumerate(names):  # beside its line's end, and on no other
            free = max(min(y + 4, lowest + LINE_OF_TEXT * number), free)
            yield _text(right + 6, free, name, f'fill="{colour}"')
            free += LINE_OF_TEXT
