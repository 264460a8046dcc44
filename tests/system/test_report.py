"""The report: what it says is what the compiler did, and it works in a browser, and without scripts."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.cli import main
from gradc.errors import FileError, InvalidProblem
from gradc.inspect.report import SCRIPTS, as_json, content, page
from gradc.inspect.trace_events import chrome_trace
from gradc.ir.graph import Graph
from gradc.ir.kernel import Kernel, taken
from gradc.passes.manager import changes

IN_A_BROWSER = pytest.mark.skipif(browser.BROWSER is None, reason=browser.NO_BROWSER)


def loss(tokens: Any, table: Any, scale: Any, w: Any, targets: Any) -> Any:
    with gradc.scope("embed"):
        rows = ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 16)))
    hidden = ops.gelu(ops.linear(rows, w))  # </script><script>window.broken = 1</script> &amp; <!--
    return ops.cross_entropy(hidden, targets)


TYPES = {"tokens": "i64[N]", "table": "i8[V,16]", "scale": "f32[V,1]", "w": "f32[10,16]", "targets": "i64[N]"}
SIZES = {"N": 4096, "V": 50_000}


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(loss, **TYPES), wrt=["scale", "w"])


@pytest.fixture(scope="module")
def file(module: gradc.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "loss.html"
    module.report(path, **SIZES)
    return path


@pytest.fixture(scope="module")
def short_file(module: gradc.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same page with differences for texts, as of a large graph."""
    path = tmp_path_factory.mktemp("report") / "short.html"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradc.inspect.report.MOST_TEXT", 0)
        module.report(path, **SIZES)
    return path


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_every_text_is_there_for_who_has_no_scripts(module: gradc.Module, file: Path) -> None:
    found = [html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", file.read_text(), re.DOTALL)]
    assert found[0] == module.explain(**SIZES)
    assert found[1 : 1 + len(module.stages)] == [str(stage) for stage in module.stages]
    assert {kernel.source for kernel in module.kernels.values()} <= set(found)


def test_it_asks_for_nothing_and_holds_what_users_wrote_as_text(file: Path) -> None:
    text = file.read_text()
    assert "default-src 'none'" in text and not re.search(r"(src|href)\s*=|@import|url\(|\bfetch\(|\bimport\(", text)
    assert text.count("<script") == text.count("</script>") == 2
    assert "window.broken = 1" in text, "the line of the user's program is shown"
    assert len(text) < 400_000


def test_numbers_are_the_compilers(module: gradc.Module) -> None:
    found = content(module, SIZES)
    assert [stage.name for stage in found.stages] == list(module.stages.names())
    for at, stage in enumerate(found.stages[1:], 1):
        expected = changes(module.stages.stages[at - 1], module.stages.stages[at])
        assert stage.changes == (None if expected is None else (expected.added, expected.removed, expected.rewritten))
    opened = next(stage.changes for stage in found.stages if stage.name == "decompose")
    assert opened is not None and opened[0] > 10  # decompose opens composites
    for kernel in found.kernels:
        if not kernel.call:
            name = kernel.name if kernel.name in module.kernels else f"{kernel.direction}.{kernel.name}"
            assert kernel.bytes == module.kernels[name].bytes(**SIZES) and kernel.source == module.kernels[name].source
            assert len(kernel.of) == len(module.kernels[name].kernel.body)
    memory = module.memory(**SIZES)
    backward = found.programs[1]
    assert sum(b.bytes for b in backward.buffers if b.kind == "output") == memory.gradients
    assert sum(r.bytes for r in found.residuals) == memory.residuals
    assert found.code[f"test_report.py:{loss.__code__.co_firstlineno + 3}"].startswith("hidden = ops.gelu(")


def test_writing_schedules_nothing_and_renders_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(x: Any, w: Any, v: Any) -> Any:
        return ops.layer_norm(x, (8,), w), ops.layer_norm(x * 2.0, (8,), v)

    module = gradc.compile(gradc.trace(ends, x="f32[N,8]", w="f32[8]", v="f32[8]"))
    assert len(module.stages) > 3
    rendered = []
    kernel_source = type(module.forward.backend).kernel_source
    monkeypatch.setattr(
        type(module.forward.backend),
        "kernel_source",
        lambda self, kernel, types: rendered.append((self, kernel.name)) or kernel_source(self, kernel, types),
    )
    monkeypatch.delattr("gradc.passes.schedule.scheduler.Scheduler.run")
    module.report(tmp_path / "r.html", N=64)
    assert rendered and len(rendered) == len(set(rendered))


def test_changes_count_values() -> None:
    graph = gradc.trace(lambda x: ops.exp(x) * 1.0 + ops.neg(ops.neg(x)), x="f32[N]")
    module = gradc.compile(graph, target="numpy")
    stages = module.stages.stages
    before, after = stages[module.stages.names().index("simplify") - 1], module.stages["simplify"]
    assert isinstance(after.result, Graph)
    found = changes(before, after)
    assert found is not None and (found.added, found.removed, found.rewritten) == (0, 5, 1)
    assert changes(stages[0], module.stages["forward.schedule"]) is None


@pytest.mark.parametrize("target", ["numpy", "cuda-sim"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    graph = gradc.trace(lambda x, w: ops.softmax(ops.linear(x, w)), x="f32[N,8]", w="f32[8,8]")
    gradc.compile(graph, wrt=["w"], target=target).report(tmp_path / "r.html", N=64)
    assert "softmax" in (tmp_path / "r.html").read_text()


def test_a_module_without_gradients_a_saved_one_and_an_empty_one(tmp_path: Path, module: gradc.Module) -> None:
    gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[0,3]"), target="numpy").report(tmp_path / "a.html")
    module.save(tmp_path / "m.gradc")
    gradc.load_module(tmp_path / "m.gradc").report(tmp_path / "b.html", **SIZES)
    assert (tmp_path / "a.html").stat().st_size > 0 and (tmp_path / "b.html").stat().st_size > 0


def test_a_module_from_the_cache_knows_what_its_kernels_compute(module: gradc.Module) -> None:
    again = gradc.compile(module.graph, wrt=module.wrt)
    assert all(s.of is None for k in again.forward.program.kernels for s in k.body), "it comes from the cache, as text"
    assert [k.of for k in content(again, {}).kernels] == [k.of for k in content(module, {}).kernels]
    assert any(number is not None for k in content(again, {}).kernels for number in k.of)


def test_timed(module: gradc.Module) -> None:
    found = content(module, {"N": 64, "V": 100}, timed=1)
    assert all((k.measured is None) == k.call or k.when or k.name.startswith("check") for k in found.kernels)


def test_bad_arguments(module: gradc.Module, tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="has no dim 'n'; did you mean N"):
        module.report(tmp_path / "r.html", n=3)
    with pytest.raises(InvalidProblem, match="has no dim 'v'; did you mean V"):
        module.explain(v=3)
    with pytest.raises(FileError):
        module.report(tmp_path / "none" / "r.html")
    with pytest.raises(InvalidProblem, match="timed"):
        module.report(tmp_path / "r.html", timed=-1)
    assert not list(tmp_path.iterdir())


# -- the command, and the dump -----------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "g.gir"
    gradc.trace(loss, **TYPES).save(graph)
    out = tmp_path / "out.html"
    assert main(["report", str(graph), "--wrt", "scale", "--dims", "N=64,V=100", "-o", str(out)]) == 0
    assert f"wrote {out}, 0." in capsys.readouterr().out and "N=64" in out.read_text()


def test_as_data(module: gradc.Module) -> None:
    """docs/report.md names every key."""
    data = json.loads(as_json(content(module, {}), indent=1))
    words = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs" / "report.md").read_text()))
    lists = [entry for value in data.values() if isinstance(value, list) for entry in value if isinstance(entry, dict)]
    keys = {
        *data,
        *(key for entry in lists for key in entry),
        *(k for c in data["combines"] for k in c["estimates"][0]),
    }
    assert keys >= {"kernels", "pick", "why"} and keys <= words, keys - words


def test_a_trace_has_the_passes_and_the_kernels(module: gradc.Module) -> None:
    """By the fields that the format's description requires of complete events and of metadata."""
    found = content(module, {}, timed=1)
    trace = json.loads(json.dumps(chrome_trace(found), allow_nan=False))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [e["name"] for e in events if tracks[e["tid"]] == "passes"] == [s.name for s in found.stages]
    for direction in module.executables:
        kernels = [e for e in events if tracks[e["tid"]].startswith(f"{direction} on ")]
        assert [e["name"] for e in kernels] == [k.name for k in found.kernels if k.direction == direction]
    for tid in tracks:
        times = [(e["ts"], e["dur"]) for e in events if e["tid"] == tid]
        assert times and all(dur >= 0 for _, dur in times)
        assert all(a + dur == pytest.approx(b) for (a, dur), (b, _) in itertools.pairwise(times))
    assert {e["args"]["time"] for e in events if "time" in e["args"]} <= {"measured", "predicted"}


def test_each_compilation_is_dumped_into_a_folder_of_its_own(tmp_path: Path) -> None:
    with knobs.DUMP.set(str(tmp_path)):
        for name in ("first", "second", "first"):
            gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]", name=name), wrt=["x"], target="numpy")
    folders = ["000-first", "001-second", "002-first"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*folders, "index.html"]
    for folder in folders:
        assert (tmp_path / folder / "00-forward.gir").exists() and (tmp_path / folder / "explain.txt").exists()
        assert folder[4:] in (tmp_path / folder / "index.html").read_text()
        assert f'href="{folder}/index.html"' in (tmp_path / "index.html").read_text()


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_differences_make_the_texts_of_large_graphs(module: gradc.Module, short_file: Path, tmp_path: Path) -> None:
    """As patch applies them, which knows nothing of gradc."""
    found = re.findall(r'<pre data-stage="(\d+)"(?: data-base="(\d+)")?>(.*?)</pre>', short_file.read_text(), re.DOTALL)
    texts: list[str] = []
    for _, base, written in found:
        text = html.unescape(written)
        if base:
            file = tmp_path / "text"
            file.write_text(texts[int(base)] + "\n")
            given = f"--- a\n+++ b\n{text}\n" if text else ""
            subprocess.run(["patch", "-s", file], input=given, text=True, check=True)
            text = file.read_text()[:-1]
        texts.append(text)
    assert texts == [str(stage) for stage in module.stages]
    assert sum(bool(base) for _, base, _ in found) > len(found) / 3


@IN_A_BROWSER
@pytest.mark.parametrize("stage", ["joint", "tidy.fold", "backward.plan_buffers"])
def test_a_page_with_differences_shows_the_same(file: Path, short_file: Path, stage: str) -> None:
    shown = [
        browser.asked(p, "return document.getElementById('view').textContent", f"tab=graph&stage={stage}")
        for p in (file, short_file)
    ]
    assert shown[0] == shown[1] and len(shown[0]) > 1000


# -- in a browser ------------------------------------------------------------------------------------------------------


@IN_A_BROWSER
def test_the_differences_that_it_draws_are_the_compilers(module: gradc.Module, file: Path) -> None:
    found = browser.asked(
        file,
        """
        const counts = {};
        for (let at = 0; at < document.querySelectorAll(".stage").length; at++) {
          const button = document.querySelectorAll(".stage")[at];
          button.click();
          const number = (id) => Number(document.getElementById(id)?.textContent.split(" ")[0] ?? 0);
          const drawn = (kind) => document.querySelectorAll(`.node.${kind}`).length;
          const said = ["added", "removed", "rewritten"].map(number);
          const listed = (kind) => document.querySelectorAll(`h2.${kind} + pre .l`).length;
          const lists = ["added", "removed", "rewritten"].map(listed);
          counts[button.firstChild.textContent] = [...said, drawn("added"), drawn("rewritten"), ...lists];
        }
        return counts;
        """,
    )
    stages = module.stages.stages
    assert list(found) == [stage.name for stage in stages]
    for before, stage in itertools.pairwise(stages):
        expected = changes(before, stage)
        numbers = [0, 0, 0] if expected is None else [expected.added, expected.removed, expected.rewritten]
        assert found[stage.name][:3] == numbers, stage.name
        if (
            isinstance(stage.result, Graph)
            and isinstance(before.result, Graph)
            and not stage.name.endswith("partition")
        ):
            added, removed, rewritten = numbers
            assert found[stage.name][3:5] == [added, rewritten], stage.name
            assert found[stage.name][5:] == [added, removed, 2 * rewritten], (
                "a rewritten value: as it was, and as it is"
            )


@IN_A_BROWSER
def test_search_and_what_a_value_says(module: gradc.Module, file: Path) -> None:
    found = browser.asked(
        file,
        """
        const search = document.getElementById("search");
        search.value = "normal_cdf";
        search.dispatchEvent(new Event("input"));
        const first = document.querySelector(".results a");
        const name = first.dataset.value;
        first.click();
        return { name, nodes: document.querySelectorAll(".node").length, broken: window.broken ?? null };
        """,
        "tab=graph&stage=tidy.fold",
    )
    assert found["broken"] is None and found["nodes"] > 50
    tidy = module.stages["tidy.fold"].result
    (cdf,) = (name for node, name in tidy.value_names.items() if node.op.name == "normal_cdf")
    assert found["name"] == cdf


@IN_A_BROWSER
def test_labels_are_written_where_they_are_in_view(file: Path) -> None:
    count = """
        const labelled = () => document.querySelectorAll(".node text.sub").length;
        const first = labelled();
        document.querySelector(".canvas svg").dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
        return [first, labelled(), document.querySelectorAll(".node").length];
    """
    first, all_in_view, nodes = browser.asked(file, count, "tab=graph&stage=joint", (1000, 400))
    assert 0 < first < nodes and first <= all_in_view
    first, all_in_view, nodes = browser.asked(file, count, "tab=graph&stage=input")
    assert all_in_view == nodes


@IN_A_BROWSER
def test_a_value_from_the_address(module: gradc.Module, file: Path) -> None:
    tidy = module.stages["tidy.fold"].result
    ((cdf, name),) = ((node, name) for node, name in tidy.value_names.items() if node.op.name == "normal_cdf")
    said = browser.asked(
        file,
        'return [document.querySelector(".details").textContent, document.querySelectorAll(".node.chosen").length];',
        f"tab=graph&stage=tidy.fold&value={name.replace('%', '%25')}",
    )
    assert said[1] == 1
    for words in (
        name,
        str(cdf.type),
        "gelu",
        tidy.notes[cdf].where,
        "hidden = ops.gelu(",
        "made by",
        "Through the passes",
    ):
        assert words in said[0], words
    assert any(k.name in said[0] for k in module.forward.program.kernels)


@IN_A_BROWSER
def test_sliders_move_the_predicates(module: gradc.Module, file: Path) -> None:
    found = browser.asked(
        file,
        """
        const said = [];
        for (const n of [3, 9.5, 17, 22])
          for (const v of [2, 11.5, 12, 20, 23.25]) {
            [n, v].forEach((value, at) => {
              const slider = document.querySelectorAll(".sliders input")[at];
              slider.value = value;
              slider.dispatchEvent(new Event("input"));
            });
            const words = (part, tag) => part.querySelector(tag).textContent;
            const parts = [...document.querySelectorAll("section:not(#texts)")];
            said.push(parts.map((part) => [words(part, "h2"), words(part, "strong")]));
          }
        return said;
        """,
        "tab=reductions",
    )
    expected = []
    for n in (3, 9.5, 17, 22):
        for v in (2, 11.5, 12, 20, 23.25):
            sizes = {"N": round(2**n), "V": round(2**v)}
            picks = []
            for direction, executable in module.executables.items():
                for step in executable.program.steps:
                    kernel = taken(step, SIZES)
                    if isinstance(kernel, Kernel):
                        now = taken(step, sizes)
                        assert isinstance(now, Kernel)
                        picks += [[f"{b} by {kernel.name} ({direction})", now.strategies[b]] for b in kernel.strategies]
            expected.append(picks)
    assert found == expected
    assert len({json.dumps([way for _, way in each]) for each in found}) > 1, "some size changes the choice"


@IN_A_BROWSER
def test_kernels_and_memory(module: gradc.Module, file: Path) -> None:
    found = browser.asked(
        file,
        """
        const names = [...document.querySelectorAll("tbody tr")].map((row) => row.firstChild.textContent);
        const value = [...document.querySelectorAll(".panes .v")].find((each) => each.textContent === "v2");
        value.dispatchEvent(new Event("mouseenter"));
        const hot = [...document.querySelectorAll(".hot")].map((each) => each.textContent);
        document.querySelector('[data-tab="memory"]').click();
        const charts = document.querySelectorAll("svg.chart").length;
        return { names, hot, charts, residuals: document.getElementById("view").textContent };
        """,
        "tab=kernels",
    )
    steps = [k.name for e in module.executables.values() for step in e.program.steps for k in gradc_alternatives(step)]
    assert found["names"] == steps and found["charts"] == 2
    assert "v2" in found["hot"] and any(line.strip().startswith("%2 = ") for line in found["hot"])
    assert all(r.name in found["residuals"] for r in module.residuals)


def gradc_alternatives(step: Any) -> list[Any]:
    from gradc.ir.kernel import alternatives

    return list(alternatives(step))


@IN_A_BROWSER
def test_a_large_graph_is_folded(tmp_path: Path) -> None:
    def deep(x: Any) -> Any:
        for layer in range(60):
            with gradc.scope(f"layer{layer}"):
                x = ops.gelu(ops.gelu(ops.gelu(x * 2.0))) + x
        return x

    module = gradc.compile(gradc.trace(deep, x="f32[N,8]"), wrt=["x"], target="numpy")
    module.report(tmp_path / "deep.html")
    found = browser.asked(
        tmp_path / "deep.html",
        """
        const count = () => document.querySelectorAll(".node").length;
        const folded = count();
        [...document.querySelectorAll(".tools button")].find((each) => each.textContent === "unfold").click();
        return [folded, count()];
        """,
        "tab=graph&stage=tidy.fold",
        (400, 800),
    )
    assert found[0] < 150 < 900 < found[1]
    assert found[1] == len(module.stages["tidy.fold"].result.nodes) + len(module.stages["tidy.fold"].result.outputs)


def test_scripts_are_the_ones_that_are_there() -> None:
    folder = Path(__file__).resolve().parents[2] / "templates" / "report"
    assert sorted(p.name for p in folder.glob("*.js")) == sorted(SCRIPTS)
    assert np.isfinite(len(page(gradc.compile(gradc.trace(lambda x: x + 1.0, x="f32[N]"), target="numpy"), {})))
