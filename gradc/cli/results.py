"""Results as lines of text, or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np

from ..formats.json_text import finite
from ..formats.npz import write_arrays
from ..ir.kernel import Kernel
from ..runtime.host.arrays import Arguments, Results


@dataclass(frozen=True)
class Ran:
    """What a call of a model or a program was, and gave.

    :param drawn: the inputs that were random.  :param values: whether elements of small arrays are printed.
    """

    name: str
    target: str
    dims: Mapping[str, int]
    seed: int
    drawn: Sequence[str]
    seconds: float
    results: Results
    values: bool = False

    def say(self, out: Path | None, as_json: bool) -> None:
        """Prints it, and writes the arrays to a file."""
        if out is not None:
            write_arrays(out, {name: np.asarray(array) for name, array in self.results.items()})
        if as_json:
            facts = {name: getattr(self, name) for name in ("name", "target", "dims", "seed", "drawn", "seconds")}
            told = statistics_of(self.results, FEW if self.values else 1)
            say_json({**facts, "results": [asdict(each) for each in told]})
            return
        at = f" at {', '.join(f'{k}={v}' for k, v in self.dims.items())}" if self.dims else ""
        random = f"; random (seed {self.seed}): {', '.join(self.drawn)}" if self.drawn else ""
        click.echo(f"{self.name} on {self.target}{at}{random}")
        for line in lines_of(self.results, self.values):
            click.echo(line)
        click.echo(f"in {self.seconds * 1e3:.2f} ms (a first call)")
        if out is not None:
            click.echo(f"wrote {', '.join(self.results)} to {out}")


def way_of(kernel: Kernel) -> str:
    """How a kernel combines rows, by result."""
    return ", ".join(f"{buffer} {strategy}" for buffer, strategy in kernel.strategy)


FEW = 16
"""Elements that are printed one by one."""


DIGITS = 9
"""Significant ones of what is printed as JSON: of f32 all."""


def say_json(value: Any) -> None:
    """Prints a value, instead of a table; null stands for what is not finite."""
    click.echo(json.dumps(finite(value, DIGITS), indent=1))


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """A text in a colour where that is shown: on a terminal that has colours, unless NO_COLOR is set.

    :param stream: where it is printed, standard output by default.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not _terminal(stream or sys.stdout) else click.style(text, fg=colour)


def _terminal(stream: TextIO) -> bool:
    return stream.isatty()


@dataclass(frozen=True)
class Statistics:
    """What is told of an array.

    :ivar min, mean, max, std: of its finite elements, None where there are none.
    :ivar values: its elements, if there is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    not_finite: int
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    std: float | None = None
    values: list[float] | None = None


def statistics_of(results: Arguments, most: int = 1) -> list[Statistics]:
    """Of each array.  :param most: elements up to which its values are told, too."""
    found = []
    for name, value in results.items():
        array = np.asarray(value)
        numbers = array.astype(np.float64)
        inside = numbers[np.isfinite(numbers)]
        made = Statistics(name, str(array.dtype), array.shape, array.size - inside.size)
        if inside.size:
            low, mean, high, std = (float(x) for x in (inside.min(), inside.mean(), inside.max(), inside.std()))
            made = replace(made, min=low, mean=mean, max=high, std=std)
        found.append(replace(made, values=numbers.reshape(-1).tolist()) if 0 < array.size <= most else made)
    return found


def lines_of(results: Arguments, values: bool = False) -> list[str]:
    """A line for each array: dtype, shape, and statistics of its finite elements.

    :param values: print the elements themselves where they are few.
    """
    width = max((len(n) for n in results), default=0)
    lines = []
    for each in statistics_of(results, FEW if values else 1):
        text = f"  {each.name:<{width}}  {each.dtype}[{','.join(map(str, each.shape))}]"
        if each.values is not None:
            text += f" = {', '.join(f'{x:.9g}' for x in each.values)}"
        elif each.min is not None:
            text += f"  min {each.min:.6g}  mean {each.mean:.6g}  max {each.max:.6g}  std {each.std:.6g}"
        if each.not_finite:
            text += f"  ({each.not_finite} not finite)"
        lines.append(text)
    return lines
