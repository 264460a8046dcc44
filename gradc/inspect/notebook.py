"""A module as a notebook shows it: a line per kernel with its statements and its text behind a click."""

from __future__ import annotations

from ..formats.html_text import Html, details, joined, pre, table
from .explain import Explained, _bindings, _human, memory_lines
from .report import KernelEntry, kernel_entries, residual_entries

MOST_TEXTS = 60
"""Kernels that are shown with their statements and text."""


def module_html(module: Explained) -> str:
    """HTML: kernels with bytes, strategies and lines, what is kept for the backward, memory, the graph."""
    bound = _bindings(module, {})
    kernels = kernel_entries(module, {})
    total = sum(each.bytes for each in kernels) or 1
    wrt = f", wrt {', '.join(module.wrt)}" if module.wrt else ""
    at = f"; bytes at {', '.join(f'{k}={v}' for k, v in bound.items())}" if bound else ""
    rows = [
        (
            each.direction,
            _kernel(each) if number < MOST_TEXTS else each.name,
            _human(each.bytes),
            f"{100 * each.bytes / total:.0f} %",
            f"{each.strategy}{f' when {each.when}' if each.when else ''}",
            each.where,
        )
        for number, each in enumerate(kernels)
    ]
    residuals = [(r.name, r.type, _human(r.bytes), r.why) for r in residual_entries(module, {})]
    return joined(
        Html("<div><b>"),
        f"module {module.graph.name}",
        Html("</b>"),
        f" on {module.target}{wrt}{at}",
        Html("</div>"),
        table(("", "kernel", "bytes", "", "combines rows", "line"), rows),
        details(f"{len(residuals)} residuals", table(("name", "type", "bytes", "why"), residuals)) if residuals else "",
        details("memory", pre("\n".join(memory_lines(module, bound)))),
        details("graph", pre(str(module.graph))),
    )


def _kernel(entry: KernelEntry) -> Html:
    return details(entry.name, pre(entry.ir), *([details("source", pre(entry.source))] if entry.source else []))
