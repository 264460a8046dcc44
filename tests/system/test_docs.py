"""docs/ops.md is what the records say; README shows what its program prints, and links to what exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradc import ops
from gradc.ir.op import DISCRETE, Expr, Primitive, Sample
from gradc.ops.rules import unary_float

ROOT = Path(__file__).resolve().parents[2]
docs = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "write.py"), run_name="docs"))
NAMES = sorted(name for name in ops.REGISTRY if name not in ("input", "getitem"))


PAGE = (ROOT / "docs" / "ops.md").read_text()


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    """Written in a process of its own: other tests register ops."""
    path = tmp_path / "ops.md"
    subprocess.run([sys.executable, "docs/write.py", str(path)], cwd=ROOT, check=True)
    fresh = path.read_text() == PAGE
    assert fresh, "docs/ops.md is stale: make docs writes it anew; commit it"


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_an_entry(name: str) -> None:
    op = ops.REGISTRY[name]
    text = PAGE[PAGE.index(f"### {name}\n") :].partition("\n### ")[0]  # which is docs.entry(op): the test above
    assert text.startswith(f"### {name}\n\n`{name}(") and op.doc in text and docs.home(op).startswith("gradc.ops.")
    assert docs.targets(op) == ("numpy", "cpu", "cuda")
    for attribute in op.parameters:
        assert f"`{attribute}`: " in text
    if any(s.operands for s in op.samples):
        assert "- dtypes: `" in text
    assert (
        "- gradient: " in text and " at 0x" not in text and "<class" not in text and "writes it" not in text
    )  # each vjp has a text, or words


def test_gradients_are_the_text_of_the_vjp() -> None:
    assert docs.gradient(ops.REGISTRY["exp"]) == "`x`: `g * y`"
    assert docs.gradient(ops.REGISTRY["mul"]) == "with `a`, `b` for `x`, `y`: `a`: `g * b`; `b`: `g * a`"
    assert docs.gradient(ops.REGISTRY["embedding"]) == "by its decomposition"
    assert docs.gradient(ops.REGISTRY["argmax"]).startswith("none")
    back = "`take_along_axis.plain(g, indices, axis=axis, oob=oob)`"
    assert docs.gradient(ops.REGISTRY["scatter_add_along_axis"]) == f"`indices`: `DISCRETE`; `updates`: {back}"


def test_an_op_of_ones_own() -> None:
    before = dict(ops.REGISTRY)
    try:
        record = dict(infer=unary_float, reference=abs, lower=Expr("f({0})"), samples=(Sample(("F[N]",)),), doc="mine")

        def spoken(g: object, y: object, x: object) -> tuple[object]:
            """Words of its own.

            And more.
            """
            return (g,)

        def commented(g: object, y: object, x: object) -> tuple[object]:
            # the first
            # and the second line
            return (g,)  # not this

        def late(g: object, y: object, x: object) -> tuple[object]:
            return (g,)  # only this

        def silent(g: object, y: object, x: object) -> tuple[object]:
            return (g,)

        for vjp, words in (
            (spoken, "Words of its own. (`spoken`)"),
            (commented, "the first and the second line (`commented`)"),
            (late, "only this (`late`)"),
            (silent, "as `silent` writes it"),
        ):
            assert docs.gradient(Primitive("mine", vjp=vjp, **record)) == words
        two = (lambda g, y, x: (DISCRETE,), lambda g, y, x: (g * 2,))  # on one line: each is found by its place
        assert [docs.gradient(Primitive("mine", vjp=f, **record)) for f in two] == ["`x`: `DISCRETE`", "`x`: `g * 2`"]
        assert docs.dtypes(Primitive("mine", vjp=silent, **record))["x"][0][:4] == ("f16", "bf16", "f32", "f64")
        assert (
            docs.signature(ops.REGISTRY["dequantize"])
            == "dequantize(q, scale, zero_point=None, block=None, out_dtype=f32)"
        )
    finally:
        ops.REGISTRY.clear()
        ops.REGISTRY.update(before)


def test_writing_and_checking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(docs.main.__globals__, "text", lambda: PAGE)
    path = tmp_path / "docs" / "ops.md"
    assert docs.main([str(path), "--check"]) == 1 and "stale" in capsys.readouterr().out
    assert docs.main([str(path)]) == 0 and path.read_text().startswith("# Ops\n")
    assert docs.main([str(path), "--check"]) == 0
    path.write_text(path.read_text().replace("`g * y`", "`g`"))
    assert docs.main([str(path), "--check"]) == 1


def test_readme_shows_what_its_program_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one block of Python runs, and the graph and every line of the kernels shown are among what is printed."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.encode()) <= 8000
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    graph, program = re.findall(r"^```\n(graph .*?|  select .*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "first.py"
    path.write_text(block)
    names = runpy.run_path(str(path))
    assert str(names["graph"]) == graph.rstrip("\n")
    printed = str(names["module"].backward.program)
    for line in program.splitlines():
        assert all(part in printed for part in line.split(" ... ")), line
    assert names["grads"]["scale"].shape == (1000, 1)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_links_and_paths_exist(page: str) -> None:
    """Links, from the page's own folder, and paths in back quotes, from the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\(([^)#]+)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:gradc|docs|benchmarks|examples|tests)/[\w./*]*)`", text)]
    assert links and not [str(path) for path in links + paths if not path.exists()]
