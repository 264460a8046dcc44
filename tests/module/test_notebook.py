"""What a notebook shows of graphs, modules, kernels, gradients, explanations: their texts, and no tag of a user's."""

from __future__ import annotations

import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.formats.html_text import MOST_LINES, MOST_ROWS, Sections, pre, table

TAGS = {"b", "details", "div", "pre", "summary", "table", "tbody", "td", "th", "thead", "tr"}


class Page(HTMLParser):
    """The texts of well-formed HTML, by the tag they stand in."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in TAGS and {name for name, _ in attrs} <= {"style"}, (tag, attrs)
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def bag(tokens: Any, table: Any, scale: Any) -> Any:
    with gradc.scope("lookup"):
        rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 8)))
    return (rows * rows).sum()  # </pre><b onclick="broken"> &amp;


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    graph = gradc.trace(bag, tokens="i64[N]", table="i8[V,8]", scale="f32[V,1]")
    return gradc.compile(graph, wrt=["scale"], target="cpu")


def test_a_graph_is_its_text(module: gradc.Module) -> None:
    found = Page(module.graph._repr_html_()).texts
    assert found["b"] == ["graph bag"] and found["pre"] == [str(module.graph)]


def test_a_module_is_a_line_for_each_kernel(module: gradc.Module) -> None:
    found = Page(module._repr_html_()).texts
    steps = [k for e in module.executables.values() for k in e.program.kernels]
    assert [s for s in found["summary"] if s not in ("source", "memory", "graph", "3 residuals", "2 residuals")] == [
        k.name for k in steps
    ]
    texts = found["pre"]
    assert str(module.graph) in texts and all(str(k) in texts and k.strategy is not None for k in steps)
    assert sum("_rows(const void *args, i64 task)" in text for text in texts) >= 2
    assert any("d.scale: " in cell for cell in found["td"]) and "tokens" in found["td"]


def test_kernels_have_statements_and_source(module: gradc.Module) -> None:
    found = Page(module.kernels._repr_html_()).texts
    assert [s for s in found["summary"] if s != "source"] == [*module.kernels]
    name, kernel = next(iter(module.kernels.items()))
    one = Page(kernel._repr_html_()).texts
    assert one["b"] == [name] and one["pre"] == [kernel.ir, kernel.source.rstrip("\n")]
    interpreted = gradc.compile(module.graph, target="numpy").kernels
    assert [s for s in Page(interpreted._repr_html_()).texts["summary"] if s != "source"] == [*interpreted]


def test_gradients_are_names_types_and_sizes(module: gradc.Module) -> None:
    _, residuals = module.forward(
        tokens=np.array([0, 1, 1]), table=np.full((3, 8), 2, np.int8), scale=np.ones((3, 1), np.float32)
    )
    # d (scale*q)^2 is 2 scale q^2 = 8: of 8 elements, of 2 rows
    found = Page(module.backward(residuals, np.float32(1))._repr_html_()).texts
    assert found["td"] == [
        "scale",
        "float32[3,1]",
        "numpy.ndarray",
        "128",
    ]
    rows = gradc.compile(gradc.trace(lambda t, i: ops.embedding(i, t), t="f32[V,4]", i="i64[N]"), ["t"], sparse=["t"])
    _, residuals = rows.forward(t=np.ones((3, 4), np.float32), i=np.array([2, 2]))
    cells = Page(rows.backward(residuals, np.ones((2, 4), np.float32))._repr_html_()).texts["td"]
    assert cells[0] == "t" and "SparseRows" in cells[2]


def test_an_explanation_is_a_text_in_sections(module: gradc.Module) -> None:
    text = module.explain(N=32, V=1000)
    assert isinstance(text, str) and text.startswith("module bag on cpu")
    found = Page(text._repr_html_()).texts
    assert {"residuals:", "passes:"} <= set(found["summary"])
    shown = "\n".join(found["pre"] + found["summary"])
    assert all(line in shown for line in text.splitlines() if line)


def test_long_texts_and_tables_are_cut() -> None:
    assert Page(pre("x\n" * (MOST_LINES + 7))).texts["pre"][0].endswith("x\n... 7 more lines; print() shows them")
    found = Page(table(("a",), [(i,) for i in range(MOST_ROWS + 3)])).texts
    assert len(found["td"]) == MOST_ROWS and found["div"] == ["... and 3 more"]
    assert Page(Sections("one line")._repr_html_()).texts == {"pre": ["one line"]}


def test_show_opens_the_report(module: gradc.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = module.show(N=64)
    assert opened == [path.as_uri()] and path.name == "bag.html" and tmp_path in path.parents
    assert path.read_text().startswith("<!doctype html>")
