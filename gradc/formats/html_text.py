"""Pieces of HTML for notebooks: no script, styles inline, every text escaped, long ones cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_LINES = 400
"""Lines of a text that are shown."""
MOST_ROWS = 100
"""Rows of a table that are shown."""
_PRE = "margin:.3em 0;max-height:30em;overflow:auto;font-size:12px;line-height:1.35;text-align:left"
_CELL = "text-align:left;vertical-align:top;padding:1px 10px 1px 0"


def _escape(text: str) -> str:
    import html  # here: its tables of entities take longer to import than a module from the cache

    return html.escape(text)


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


def escaped(text: object) -> Html:
    return text if isinstance(text, Html) else Html(_escape(str(text)))


def joined(*parts: object) -> Html:
    return Html("".join(map(escaped, parts)))


def pre(text: str) -> Html:
    """A text as it is, in a type of one width."""
    lines = text.splitlines()
    more = f"\n... {len(lines) - MOST_LINES} more lines; print() shows them" if len(lines) > MOST_LINES else ""
    return Html(f'<pre style="{_PRE}">{_escape(chr(10).join(lines[:MOST_LINES]) + more)}</pre>')


def details(title: object, *parts: object) -> Html:
    """What is shown on a click at its title."""
    return Html(f"<details><summary>{escaped(title)}</summary>{joined(*parts)}</details>")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table; of many rows the first."""
    every = list(rows)
    cells = lambda tag, row: "".join(f'<{tag} style="{_CELL}">{escaped(each)}</{tag}>' for each in row)
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in every[:MOST_ROWS])
    more = f"<div>... and {len(every) - MOST_ROWS} more</div>" if len(every) > MOST_ROWS else ""
    return Html(f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>{more}")


class Sections(str):
    """A text in sections, which empty lines part; in a notebook the first is shown, the others on a click."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        first, *others = self.split("\n\n")
        parts = [pre(first)]
        for each in others:
            title, _, rest = each.partition("\n")
            parts.append(details(title, pre(rest)) if rest else pre(title))
        return joined(*parts)
