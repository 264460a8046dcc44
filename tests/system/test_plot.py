"""Pictures of lines: what is drawn is read back from the SVG, and from matplotlib where that is."""

from __future__ import annotations

import importlib.util
import itertools
import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradc.errors import InvalidProblem, Unsupported
from gradc.inspect.plot import Axis, Line, Plot, plot, side_by_side

LOSSES = {"a & b": [(0, 3.0), (2, float("nan")), (10, 1.0)], "<nothing>": [(1, float("inf"))]}


def texts(svg: str) -> dict[str, tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    return {e.text or "": (float(e.get("x", 0)), float(e.get("y", 0))) for e in root.iter() if e.tag.endswith("}text")}


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline points="([^"]*)"', svg)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in each.split())] for each in found]


def test_points_lie_where_the_ticks_say() -> None:
    svg = plot({"loss": [(0, 3.0), (10, 1.0)]}, "step", "nats").svg()
    places = texts(svg)
    ((x0, y0), (x1, y1)) = lines(svg)[0]
    assert abs(x0 - places["0"][0]) < 0.2 and abs(x1 - places["10"][0]) < 0.2
    assert abs(y0 - (places["3"][1] - 4)) < 0.2 and abs(y1 - (places["1"][1] - 4)) < 0.2
    assert {"step", "nats", "loss"} <= places.keys()


def test_powers_lie_equally_far_apart() -> None:
    points = [(2**k, 1e-9 * 10**k) for k in range(8, 14)]
    svg = plot({"t": points}, Axis("N", base=2), Axis(base=10, unit="s")).svg()
    xs = [x for x, _ in lines(svg)[0]]
    steps = [b - a for a, b in itertools.pairwise(xs)]
    assert max(steps) - min(steps) < 0.3
    assert {"256", "1K", "8K", "100 ms", "1 s", "10 s"} <= texts(svg).keys()


@pytest.mark.parametrize("base", [2, 10])
def test_every_point_is_in_the_frame_however_far_its_ticks_are_apart(base: int) -> None:
    for power in range(1, 40):
        low, high = Axis(base=base).ends(Axis(base=base).ticks([1.0, float(base) ** power]))
        assert low == 0 and power - 1e-9 <= high < power + 1 + power / 8


def test_what_is_not_finite_and_names_of_users() -> None:
    svg = plot(LOSSES, "x", "y", levels={"level": 1.5}, title="<script>").svg()
    ElementTree.fromstring(svg)
    assert "nan" not in svg and "inf" not in svg and "<script>" not in svg
    assert {"a & b", "level", "<script>"} <= texts(svg).keys() and len(lines(svg)[0]) == 2
    assert ElementTree.fromstring(plot({}, "x", "y").svg()) is not None
    assert ElementTree.fromstring(plot({"0": [(0, 0.0)]}, Axis(base=2), Axis(base=10)).svg()) is not None


def test_labels_do_not_lie_on_one_another() -> None:
    svg = plot({f"line {k}": [(0, 1.0), (1, 1.0 + k / 1000)] for k in range(12)}).svg()
    heights = sorted(y for name, (_, y) in texts(svg).items() if name.startswith("line"))
    assert all(b - a >= 13.9 for a, b in itertools.pairwise(heights))


def test_colours_and_what_leaves_the_frame() -> None:
    drawn = plot(
        [Line("a", [(1, 1.0), (2, 50.0)]), Line("b", [(1, 2.0)], "dashed", like="a"), Line("c", [(1, 3.0)], grey=True)],
        up=Axis(limits=(0.0, 10.0)),
        bands={"picked": [(1, 2, "a")]},
    )
    assert drawn.colours["b"] == drawn.colours["a"] != drawn.colours["c"]
    assert [len(each) for each in lines(drawn.svg())] == [1, 1, 1]
    assert f'fill="{drawn.colours["a"]}"><title>picked: a from 1</title>' in drawn.svg()
    both = side_by_side([drawn, drawn], "two")
    assert ElementTree.fromstring(both).get("width") == str(2 * drawn.size[0])


def test_files(tmp_path: Path) -> None:
    drawn = plot({"loss": [(0, 3.0), (10, 1.0)]}, "step", Axis("nats", base=10), levels={"before": 3.5})
    assert drawn.save(tmp_path / "p.svg").read_text("utf-8") == drawn.svg() == drawn._repr_html_()
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(Unsupported, match=r"gradc\[plot\]"):
            drawn.save(tmp_path / "p.png")
        assert not (tmp_path / "p.png").exists()
        return
    data = drawn.save(tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) > (300, 200)
    with pytest.raises(InvalidProblem, match="nonsense"):
        drawn.save(tmp_path / "p.nonsense")


def test_matplotlib_has_the_same_lines() -> None:
    pytest.importorskip("matplotlib")
    drawn: Plot = plot(LOSSES, "step", "nats", levels={"level": 2.0})
    (axes,) = drawn.figure().axes
    assert [list(map(float, each.get_ydata())) for each in axes.lines] == [[3.0, 1.0], [], [2.0, 2.0]]
    assert axes.get_xlabel() == "step" and axes.get_legend_handles_labels()[1][0] == "a & b"
