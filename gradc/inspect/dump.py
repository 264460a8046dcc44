"""The dump of a module as files, a folder for each compilation."""

from __future__ import annotations

import html
import re
from collections import Counter
from pathlib import Path

from ..process import files
from ..process.forks import lock
from .explain import Explained, explain
from .report import write_report

_written: Counter[str] = Counter()
_counting = lock()


def folder_of(name: str, folder: Path) -> Path:
    """A folder in ``folder`` for the next compilation of this process, ``003-loss``, without an earlier run's files."""
    with _counting:
        number = _written[str(folder)]
        _written[str(folder)] += 1
    own = files.make_folder(folder / f"{number:03d}-{re.sub('[^A-Za-z0-9_.]', '_', name)[:80]}")
    for stale in (*own.glob("*.gir"), *(own / "kernels").glob("*.c")):
        stale.unlink()
    return own


def dump_module(module: Explained, folder: Path) -> None:
    """Writes ``kernels/*.c``, ``explain.txt`` and ``index.html``, the report, next to the stages written by the pass
    manager; and a list of all such folders as ``index.html`` of the folder around it.
    """
    kernels = files.make_folder(folder / "kernels")
    for name, kernel in module.kernels.items():
        files.write(kernels / f"{name}.c", kernel.source)
    files.write(folder / "explain.txt", explain(module, {}), "\n")
    write_report(module, folder / "index.html", {})
    reports = sorted(path.parent.name for path in folder.parent.glob("*/index.html"))
    links = "".join(f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a></li>' for name in reports)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    files.write(folder.parent / "index.html", f"{head}<title>compilations</title><ul>{links}</ul></html>\n")
