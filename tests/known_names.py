"""``pytest -k NAME`` reads the files that have a test of that name: reading all of them takes longer than most tests.

``build/names.json`` has the names of each file's tests, as they were when all of the file was last collected, beside a
digest of the file.  What else parametrises tests (the records of ops, say) may have changed since, so that a name which
no file is known to have, or a file which is not known as it is, is looked for as ever; ``make test`` reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ROOT / "build" / "names.json"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def known() -> dict[str, tuple[str, str]]:
    """File -> its digest, and the names of its tests in lower case, as ``-k`` compares them."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged
        return {path: (digest, names) for path, (digest, names) in json.loads(NAMES.read_text()).items()}
    return {}


def without(expression: str, names: Mapping[str, tuple[str, str]]) -> set[str]:
    """The files that have no test for an expression of ``-k``."""
    words = {word.lower() for word in re.findall(r"[^\s()]+", expression)} - {"or", "and"}
    if not words or "not" in words:
        return set()
    absent = {path for path, (_, text) in names.items() if not any(word in text for word in words)}
    new = any(not any(word in text for _, text in names.values()) for word in words)
    return (
        set() if new else {path for path in absent if (ROOT / path).exists() and _digest(ROOT / path) == names[path][0]}
    )


def keep(items: Iterable[pytest.Item]) -> None:
    """Writes down the names of files of which all tests were collected."""
    found: dict[Path, set[str]] = {}
    for item in items:
        marks, attributes = (mark.name for mark in item.iter_markers()), vars(getattr(item, "function", keep))
        names_of = item.nodeid, *item.listnames(), *item.listextrakeywords(), *marks, *attributes
        found.setdefault(item.path, set()).update(names_of)
    names = known()
    for path, of_file in found.items():
        with contextlib.suppress(OSError, ValueError):
            names[str(path.relative_to(ROOT))] = _digest(path), "\n".join(sorted(of_file)).lower()
    with contextlib.suppress(OSError):
        NAMES.parent.mkdir(exist_ok=True)
        part = NAMES.with_suffix(".part")
        part.write_text(json.dumps(names), encoding="utf-8")
        part.replace(NAMES)
