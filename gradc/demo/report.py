"""The demo's report: printed to the terminal as it is produced, and written as ``report.md`` and ``report.html``."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..process import files

NARROW, TERMINAL = 60, 116
"""Columns: what text is folded to at least, and at most."""
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
    :param width: columns that printed lines are folded to; by default the terminal's, or of ``COLUMNS``.
    """

    title: str
    quiet: bool = False
    width: int = field(default_factory=lambda: columns())
    _markdown: list[str] = field(default_factory=list)
    _html: list[str] = field(default_factory=list)
    _pictures: dict[str, str] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sections.append(Section(self.title))

    def _show(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)

    def progress(self, text: str) -> None:
        """Prints a progress message, in the terminal only."""
        self._show(text)

    def heading(self, text: str) -> None:
        self._show(f"\n== {text} {'=' * max(0, self.width - 5 - len(text))}")
        self.sections.append(Section(text))
        self._markdown.append(f"## {text}")
        self._html.append(f"<h2>{html.escape(text)}</h2>")

    def say(self, text: str) -> None:
        """A paragraph."""
        self._show(textwrap.fill(text, self.width, break_long_words=False, break_on_hyphens=False))
        self.sections[-1].texts.append(text)
        self._markdown.append(text)
        self._html.append(f"<p>{html.escape(text)}</p>")

    def link(self, text: str, folder: Path, file: str) -> None:
        """A paragraph that ends with a file; in the files it is a link, from beside them in ``folder``."""
        told = f"{text} {folder / file}"
        self._show(textwrap.fill(told, self.width, break_long_words=False, break_on_hyphens=False))
        self.sections[-1].texts.append(told)
        self._markdown.append(f"{text} [{file}]({file})")
        self._html.append(f'<p>{html.escape(text)} <a href="{html.escape(file)}">{html.escape(file)}</a></p>')

    def code(self, text: str) -> None:
        """Verbatim lines; long ones are folded in the terminal."""
        text = text.strip("\n")
        self._show("\n".join(fold(line, self.width) for line in text.splitlines()))
        self.sections[-1].texts.append(text)
        self._markdown.append(f"```\n{text}\n```")
        self._html.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, *columns: str) -> Table:
        """A table whose rows are printed as they are added; in the files it is placed where it was begun."""
        table = Table(self, columns)
        self.sections[-1].tables.append(table)
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

    def data(self) -> list[dict[str, Any]]:
        """Its sections: ``heading``, ``texts`` and ``tables``, each with ``columns`` and ``rows`` of text."""
        return [
            {
                "heading": section.heading,
                "texts": section.texts,
                "tables": [{"columns": [*t.columns], "rows": [[*row] for row in t.rows]} for t in section.tables],
            }
            for section in self.sections
        ]


@dataclass
class Section:
    """What stands under a heading."""

    heading: str
    texts: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


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


def columns() -> int:
    """The terminal's, within what is readable; where there is none, the most."""
    return max(NARROW, min(TERMINAL, shutil.get_terminal_size((TERMINAL, 24)).columns))


def fold(line: str, width: int = TERMINAL) -> str:
    """A line folded to a width, with continuation lines indented."""
    if len(line) <= width:
        return line
    inner = " " * (len(line) - len(line.lstrip()) + 6)
    return "\n".join(
        textwrap.wrap(
            line,
            width,
            subsequent_indent=inner,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            initial_indent="",
        )
    )
