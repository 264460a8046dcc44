"""docs/tiles.md derives attention by passes: the IR on it is what they make, kept as goldens.

``pytest tests/passes/test_tiles_page.py --update-golden`` writes the goldens and the page's listings anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradc
from gradc import ops
from gradc.compiler import run_passes
from gradc.ir.kernel import Tile
from gradc.ir.verify import verify_program
from gradc.module.options import Options
from gradc.passes.column_blocking.carry_sums import carry_sums
from gradc.passes.column_blocking.split_loops import split_loops

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiles.md"
LISTING = "<!-- {name} -->\n```\n{text}\n```"
TILE = Tile("mma", 4, 2)


@pytest.fixture(scope="module")
def programs():
    heads = "f32[B,H,S,64]"

    def attention(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, is_causal=True)

    graph = gradc.trace(attention, q=heads, k=heads, v=heads)
    forward, backward = run_passes(graph, ("q", "k", "v"), Options(), "cpu")[2].values()
    split = split_loops(backward, tile=TILE)
    return {
        "forward": forward,
        "forward.carry_sums": carry_sums(forward, tile=TILE),
        "backward": backward,
        "backward.split_loops": split,
        "backward.carry_sums": carry_sums(split, tile=TILE),
    }


@pytest.mark.parametrize(
    "name", ("forward", "forward.carry_sums", "backward", "backward.split_loops", "backward.carry_sums")
)
def test_the_ir_after_each_pass(name, programs, golden, request):
    program = programs[name]
    verify_program(program)
    text = "\n".join(re.sub(r"  # .*$", "", line) for line in str(program).split("\n"))
    golden(f"tiles/{name}.gir", text)
    page = PAGE.read_text(encoding="utf-8")
    listing = LISTING.format(name=name, text=text)
    if request.config.getoption("--update-golden"):
        old = re.compile(LISTING.format(name=re.escape(name), text=r"(?:.*\n)*?.*"))
        page = old.sub(lambda _: listing, page, count=1)
        PAGE.write_text(page, encoding="utf-8")
    assert listing in page, f"the listing {name} of docs/tiles.md is stale: pytest --update-golden writes it"
