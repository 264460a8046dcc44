"""``python -m benchmarks.report_sizes``: the report of the demo's model, of resnet50 and of transformers of 12 and 96
layers: its size, seconds to write it, and seconds until a headless browser has loaded and laid it out.

Prints a table; nothing here is a test.  resnet50 needs ``gradc[torch]`` and timm, the times of opening chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradc.ir.graph import Graph

from .compile_time import transformer

OPENED = 5
PROBE = """<script>addEventListener("load", () => {
  document.body.getBoundingClientRect();
  document.documentElement.dataset.opened = performance.now();
});</script>"""
"""Registered first, run last of what is loaded; asking for a place lays the page out."""

Built = tuple[Graph, list[str]]


def demo() -> Built:
    """The model with the learned scales."""
    from gradc.demo.model import VARIANTS

    graph = VARIANTS[-1].graph(4096)
    return graph, VARIANTS[-1].learns(graph)


def resnet50() -> Built:
    import torch

    import gradc.torch

    from .model_list import MODELS

    torch.manual_seed(0)
    model, batch = MODELS["resnet50"].build()
    graph: Graph = gradc.torch.from_torch(model.eval(), batch)
    trained = {name for name, _ in model.named_parameters()}
    return graph, [name for name in graph.input_names if name in trained]


MODELS: dict[str, Callable[[], Built]] = {
    "demo": demo,
    "resnet50": resnet50,
    "transformer-12": lambda: transformer(12),
    "transformer-96": lambda: transformer(96),
}


def opened(page: Path) -> float | None:
    """The median of the seconds until the page is loaded and laid out; None without a browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return None
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text("utf-8").replace("<head>", f"<head>{PROBE}", 1), "utf-8")
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}")
    command: list[Any] = [browser, *flags, "--window-size=1400,1000", "--dump-dom", probed.resolve().as_uri()]
    times = []
    for _ in range(OPENED):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        found = re.search(r'data-opened="([\d.]+)"', done.stdout)
        assert found, done.stderr[-1000:]
        times.append(float(found[1]) / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    given = parser.parse_args()
    if unknown := set(given.names) - MODELS.keys():
        parser.error(f"no model {min(unknown)!r}; there are {', '.join(MODELS)}")
    import gradc

    print(
        "| model | nodes | nodes with gradients | MB | seconds to write | seconds to open |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            graph, wrt = MODELS[name]()
            module = gradc.compile(graph, wrt)
            page = (given.keep or Path(folder)) / f"{name}.html"
            began = time.perf_counter()
            module.report(page)
            took, loaded = time.perf_counter() - began, opened(page)
            size, joint = page.stat().st_size / 1e6, module.stages["joint"].size
            print(
                f"| {name} | {len(graph.nodes)} | {joint} | {size:.1f} | {took:.1f} |"
                f" {'-' if loaded is None else f'{loaded:.2f}'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
