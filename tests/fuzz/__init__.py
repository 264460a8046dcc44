"""Fuzzers that stay: ``python -m tests.fuzz [NAME ...]``, or ``make fuzz MINUTES=10``.

A campaign is one module of this package that defines ``CAMPAIGN``, a :class:`~.campaign.Campaign`; :data:`NAMES` lists
them. ``tests/system/test_fuzz.py`` gives each a small budget in CI.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from .campaign import Campaign

TESTS = Path(__file__).resolve().parent.parent
for folder in (TESTS, TESTS.parent):  # the campaigns read registry.py and oracles.py, which stand beside this package
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

NAMES: tuple[str, ...] = (
    "text",
    "graphs",
    "survivors",
    "indices",
    "kills",
    "containers",
    "processes",
    "onnx_graphs",
    "onnx_files",
)
"""Every campaign: the name of its module."""


def campaign(name: str) -> Campaign:
    found = import_module(f".{name}", __package__).CAMPAIGN
    assert isinstance(found, Campaign)
    return found
