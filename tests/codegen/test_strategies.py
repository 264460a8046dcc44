"""What the writers of C and CUDA ask of a reduction strategy is in its record."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradc.analysis.strategies import ON_GPU, ON_HOST, PRIVATIZED, STRATEGIES
from gradc.codegen.cpu.program import render_program
from gradc.codegen.cuda.render import render_cuda
from gradc.errors import InternalError
from gradc.ir.kernel import ROW_ORDERS, Program
from gradc.ir.program_text import parse_program

ROOT = Path(__file__).resolve().parents[2]
SUM = """
program @sum {
  input x: f32[N,D]
  output y: f32[D]
  kernel @sum_0 rows(n: N) cols(d: D) strategy(y: STRATEGY) {
    %0 = load x[n, d] : f32
    accum y[d] <- %0 : f32
  }
  return y=y
}
"""


def program(strategy: str) -> Program:
    return parse_program(SUM.replace("STRATEGY", strategy))


def test_a_name_stands_in_its_record_alone() -> None:
    names = re.compile("|".join(f"\"{name}\"|'{name}'" for name in STRATEGIES))
    files = [
        path
        for folder in ("gradc", "templates", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".j2") and path.name != "strategies.py"
    ]
    assert len(files) > 200
    found = [f"{path}: {name}" for path in files for name in names.findall(path.read_text(encoding="utf-8"))]
    assert not found, "ask the record of STRATEGIES for a property instead:\n" + "\n".join(found)


def test_a_strategy_without_text_is_refused() -> None:
    """Not written as something else, which would be wrong in silence."""
    assert "sum_0_fold0" in render_program(program(PRIVATIZED.name)).text
    for render, there in ((render_program, ON_HOST), (render_cuda, ON_GPU)):
        for name in STRATEGIES.keys() - set(there):
            with pytest.raises(InternalError, match=f"sum_0 combines into y by {name}; there is text for"):
                render(program(name))
    for render in (render_program, render_cuda):
        with pytest.raises(InternalError, match="by a_new_one; there is text for"):
            render(program("a_new_one"))
    assert set(ON_GPU) | set(ON_HOST) == set(STRATEGIES)


def test_a_fold_without_a_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROW_ORDERS, "a_new_one", "")  # as the record enters itself; taken out again at the end
    new = replace(PRIVATIZED, name="a_new_one", fold="fold_otherwise")
    monkeypatch.setitem(STRATEGIES, new.name, new)
    monkeypatch.setattr("gradc.codegen.cpu.facts.ON_HOST", (new.name,))
    monkeypatch.setattr("gradc.codegen.cuda.facts.ON_GPU", (new.name,))
    for render, path in (
        (render_program, "cpu/kernel/fold_otherwise.c.j2"),
        (render_cuda, "cuda/kernel/fold_otherwise.cu.j2"),
    ):
        with pytest.raises(InternalError, match=f"there is no template {path}"):
            render(program(new.name))


@pytest.mark.parametrize("change", [{"fold": ""}, {"visits": "by key"}, {"atomics": "values"}])
def test_a_record_says_once_where_a_task_combines(change: dict[str, str]) -> None:
    with pytest.raises(InternalError, match="exactly one of visits, fold and atomics"):
        replace(PRIVATIZED, **change)  # type: ignore[arg-type]


def test_the_kernel_language_knows_every_strategy() -> None:
    assert {name: strategy.visits for name, strategy in STRATEGIES.items()} == ROW_ORDERS
