"""The demo's report: printed to the terminal as it is produced, and written as ``report.md`` and ``report.html``."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import files

TERMINAL = 116
COLOURS = ("#3366cc", "#dc7a18", "#2a9134", "#9b3fb5")
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0"
    " 1em;color:#222;background:#fff}pre{font:12px/1.4"
    " ui-monospace,monospace;overflow-x:auto;background:#f5f5f2;padding:.8em;border-radius:4px}td,th{padding:.15em"
    " .8em;text-align:right;border-bottom:1px solid"
    " #ddd}td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}svg{max-width:100%;height:auto}"
)


@dataclass
class Report:
    """Headings, paragraphs, code, tables and a picture, printed immediately and collected for the files.

    :param quiet: print nothing.
    """

    title: str
    quiet: bool = False
    _markdown: list[str] = field(default_factory=list)
    _html: list[str] = field(default_factory=list)
    _pictures: dict[str, str] = field(default_factory=dict)

    def _show(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)

    def progress(self, text: str) -> None:
        """Prints a progress message, in the terminal only."""
        self._show(text)

    def heading(self, text: str) -> None:
        self._show(f"\n== {text} {'=' * max(0, TERMINAL - 5 - len(text))}")
        self._markdown.append(f"## {text}")
        self._html.append(f"<h2>{html.escape(text)}</h2>")

    def say(self, text: str) -> None:
        """A paragraph."""
        self._show(textwrap.fill(text, TERMINAL, break_long_words=False, break_on_hyphens=False))
        self._markdown.append(text)
        self._html.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        """Verbatim lines; long ones are folded in the terminal."""
        text = text.strip("\n")
        self._show("\n".join(fold(line) for line in text.splitlines()))
        self._markdown.append(f"```\n{text}\n```")
        self._html.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, *columns: str) -> Table:
        """A table whose rows are printed as they are added; in the files it is placed where it was begun."""
        table = Table(self, columns)
        self._show(table.line(columns))
        table.place = len(self._html)
        self._markdown.append("")
        self._html.append("")
        return table

    def picture(self, name: str, svg: str) -> None:
        """A picture: the file ``name`` next to ``report.md``, inline in ``report.html``."""
        self._pictures[name] = svg
        self._markdown.append(f"![{Path(name).stem}]({name})")
        self._html.append(svg)

    def write(self, folder: Path) -> None:
        files.write(folder / "report.md", "\n\n".join([f"# {self.title}", *self._markdown]) + "\n")
        head = (
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport"
            f' content="width=device-width"><title>{html.escape(self.title)}</title>'
        )
        files.write(
            folder / "report.html",
            "\n".join([f"{head}<style>{STYLE}</style><h1>{html.escape(self.title)}</h1>", *self._html]) + "\n",
        )
        for name, svg in self._pictures.items():
            files.write(folder / name, svg)


@dataclass
class Table:
    """A table; the first column is text, the others are numbers."""

    report: Report
    columns: Sequence[str]
    place: int = 0
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def line(self, cells: Sequence[str]) -> str:
        first = max(16, len(self.columns[0]))
        return f"{cells[0]:<{first}}" + "".join(
            f"  {cell:>{max(14, len(name))}}" for cell, name in zip(cells[1:], self.columns[1:], strict=True)
        )

    def add(self, *cells: str) -> None:
        self.rows.append(cells)
        self.report._show(self.line(cells))
        grid = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        self.report._markdown[self.place] = "\n".join(f"| {' | '.join(row)} |" for row in grid)
        each = lambda row, tag: "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        self.report._html[self.place] = (
            f"<table>{each(self.columns, 'th')}{''.join(each(row, 'td') for row in self.rows)}</table>"
        )


def fold(line: str) -> str:
    """A line folded to the terminal's width, with continuation lines indented."""
    if len(line) <= TERMINAL:
        return line
    inner = " " * (len(line) - len(line.lstrip()) + 6)
    return "\n".join(
        textwrap.wrap(
            line,
            TERMINAL,
            subsequent_indent=inner,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            initial_indent="",
        )
    )


# -- the picture -------------------------------------------------------------------------------------------------------


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], levels: Mapping[str, float], across: str, up: str
) -> str:
    """An SVG plot of lines through points (x, y), with x from 0, and of dashed horizontal lines.

    :param across, up: the axes' labels.
    """
    width, height, left, right, top, bottom = 780, 420, 48, 150, 40, 44
    drawn = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    points = [point for line in drawn.values() for point in line]
    ticks_x = ticks(0, max((x for x, _ in points), default=1.0))
    heights = [*(y for _, y in points), *levels.values()] or [0.0, 1.0]
    ticks_y = ticks(min(heights), max(heights))
    across_by, up_by = (
        (width - left - right) / (ticks_x[-1] - ticks_x[0]),
        (height - top - bottom) / (ticks_y[-1] - ticks_y[0]),
    )
    at_x, at_y = lambda x: left + (x - ticks_x[0]) * across_by, lambda y: height - bottom - (y - ticks_y[0]) * up_by
    text = lambda x, y, words, anchor="start", colour="#222": (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(words)}</text>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for y in ticks_y:
        parts += [
            f'<path d="M{left} {at_y(y):.1f}H{width - right}" stroke="#e4e4e0"/>',
            text(left - 8, at_y(y) + 4, f"{y:.4g}", "end"),
        ]
    parts += [text(at_x(x), height - bottom + 18, f"{x:.4g}", "middle") for x in ticks_x]
    parts += [text((left + width - right) / 2, height - 8, across, "middle"), text(4, 18, up)]
    names: list[tuple[float, str, str]] = []
    for name, level in levels.items():
        parts.append(f'<path d="M{left} {at_y(level):.1f}H{width - right}" stroke="#777" stroke-dasharray="5 4"/>')
        names.append((at_y(level), name, "#555"))
    for (name, line), colour in zip(drawn.items(), COLOURS, strict=False):
        if line:
            path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            names.append((at_y(line[-1][1]), name, colour))
    free = 0.0
    for height_of, name, colour in sorted(names):  # labels must not overlap
        free = max(height_of + 4, free)
        parts.append(text(width - right + 6, free, name, colour=colour))
        free += 14
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers about a fifth of the range apart, from at most ``low`` to at least ``high``."""
    rough = (high - low or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]
