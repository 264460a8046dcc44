"""The variants of the CUDA kernels that a GPU will be asked about: they fit the code, and what is wrong is said."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import gpu_variants
from benchmarks.edits import Edit
from benchmarks.gpu_cases import all_cases
from benchmarks.gpu_variants import TABLES, Table, Variant, compare, edited, measured

VARIANTS = [(name, variant) for name, table in TABLES.items() for variant in table.variants]


@pytest.mark.parametrize(("table", "variant"), VARIANTS, ids=[f"{t}-{v.name}" for t, v in VARIANTS])
def test_a_variant_can_be_applied(table: str, variant: Variant, tmp_path: Path) -> None:
    assert set(TABLES[table].cases) <= set(all_cases())
    for edit in variant.edits:
        target = tmp_path / edit.file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.write_text((gpu_variants.ROOT / edit.file).read_text(encoding="utf-8"), encoding="utf-8")
        edit.apply(tmp_path)
        if edit.file.endswith(".py"):
            ast.parse(target.read_text(encoding="utf-8"))


def test_names_of_a_table_are_different() -> None:
    for table in TABLES.values():
        assert len({v.name for v in table.variants} | {"default"}) == len(table.variants) + 1


def test_what_is_not_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("A = 1\nB = 1\n")
    Edit("a.py", "A = 1", "A = 2").apply(tmp_path)
    for old in ("A = 1", "= ", "A = 2\nB = 1\nC"):
        with pytest.raises(ValueError, match="once is needed"):
            Edit("a.py", old, "x").apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "A = 2\nB = 1\n"
    with pytest.raises(ValueError, match=r"there is no b\.py"):
        Edit("b.py", "A", "B").apply(tmp_path)


def test_the_variant_is_what_runs(tmp_path: Path) -> None:
    """The process that measures takes gradc from the copy: a variant without a template is not quietly the default."""
    pytest.importorskip("torch", reason="the benchmark's peer")
    broken = Variant(
        "broken",
        (Edit("templates/cuda/program.h", "#define GRADC_FINE", "#error this is the variant\n#define GRADC_FINE"),),
    )
    table = Table("?", ("B1",), (broken,))
    found = {"default": {"B1": {"right": True, "units": 0.0, "bits": {}}}}
    found["broken"] = measured(table, broken, ["--tiny", "--target", "cuda-sim"], False, 120.0)
    assert "this is the variant" in json.dumps(found["broken"])
    assert [line.partition(":")[0] for line in compare(table, found)] == ["broken, B1"]
    assert "templates" in {p.name for p in edited(tmp_path, None).iterdir()}


def test_what_is_wrong_is_said() -> None:
    same, loose = Variant("same", (), same_bits=True), Variant("loose", (), exact=False)
    table = Table("?", ("A",), (same, loose, Variant("other", ())))
    good = {"right": True, "units": 1.0, "bits": {"y": 1}, "us": 10.0}
    wrong = {"right": False, "units": 99.0, "bits": {"y": 2}, "us": 5.0}
    assert compare(table, {"default": {"A": dict(good)}, "same": {"A": dict(good)}, "loose": {"A": dict(wrong)}}) == []
    rows = {"default": {"A": dict(good)}, "same": {"A": dict(wrong)}, "other": {"A": dict(wrong)}}
    assert compare(table, rows) == [
        "same, A: an error of 99 units",
        "same, A: other bits than the default's",
        "other, A: an error of 99 units",
    ]
    assert rows["other"]["A"]["ratio"] == 0.5
