"""The table of seeded faults fits the code; that the tests catch them is for ``make mutants`` to show."""

from __future__ import annotations

import ast

import pytest
from mutants import ROOT, Mutant, mutants

TABLE = mutants()


def test_there_are_a_hundred_of_different_names() -> None:
    assert len(TABLE) >= 100
    assert len({m.name for m in TABLE}) == len(TABLE)


@pytest.mark.parametrize("mutant", TABLE, ids=[m.name for m in TABLE])
def test_it_can_be_applied(mutant: Mutant) -> None:
    """Its text is found once, and Python that was Python is Python still: a fault that no module imports with would
    show nothing.
    """
    assert not mutant.problem()
    if mutant.file.endswith(".py"):
        ast.parse((ROOT / mutant.file).read_text(encoding="utf-8").replace(mutant.old, mutant.new))
