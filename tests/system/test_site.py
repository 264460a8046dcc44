"""The documentation site builds without a warning, and what the tutorials tell people to run runs."""

from __future__ import annotations

import html.parser
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradc.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NEEDS = {"from_torch": "torch", "from_onnx": "onnx"}


@pytest.mark.parametrize("page", PAGES, ids=[p.stem for p in PAGES])
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    """All of its Python, in order, in an empty folder."""
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    (tmp_path / "tutorial.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "tutorial.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_a_tutorials_shell_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each as it is typed, in the folder with the file that the tutorial has one write."""
    text = (ROOT / "docs" / "tutorials" / "reading_a_kernel.md").read_text()
    (model,) = re.findall(r"^```python\n# model\.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"^```\n(gradc .*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    said = ""
    for line in commands.splitlines():
        if "KERNEL" in line:
            line = line.replace("KERNEL", re.findall(r"^  forward  (\w+)", said, re.MULTILINE)[0])
        assert main(shlex.split(line)[1:]) == 0, line
        out, _ = capsys.readouterr()
        assert out and "changed nothing" not in out, line
        said += out
    assert {path.name for path in tmp_path.iterdir()} >= {"joint.dot", "steps.json", "report.html", "folder"}


class _Links(html.parser.HTMLParser):
    """What a page refers to, and the places that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the site needs gradc[site]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {p: _Links(p.read_text()) for p in tmp_path.rglob("*.html")}
    assert {p.stem for p in PAGES} <= {p.stem for p in pages} and "ops" in {p.stem for p in pages}
    lost = []
    for page, found in pages.items():
        for link in found.links:
            if re.match(r"[a-z]+:|//", link) or page.name == "404.html":
                continue
            path, _, place = link.partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                lost.append(f"{page.relative_to(tmp_path)}: {link}")
    assert not lost, "\n".join(lost[:20])
