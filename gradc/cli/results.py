"""Results as lines of text, or as JSON."""

from __future__ import annotations

import json
from typing import Any

import click
import numpy as np

from ..json_text import finite
from ..runtime.host.arrays import Arguments

FEW = 16
"""Elements that are printed one by one."""


def say_json(value: Any) -> None:
    """Prints a value, instead of a table; null stands for what is not finite."""
    click.echo(json.dumps(finite(value), indent=1))


def lines_of(results: Arguments, values: bool = False) -> list[str]:
    """A line for each array: dtype, shape, and statistics of its finite elements.

    :param values: print the elements themselves where they are few.
    """
    width = max((len(n) for n in results), default=0)
    lines = []
    for name, value in results.items():
        array = np.asarray(value)
        text = f"  {name:<{width}}  {array.dtype}[{','.join(map(str, array.shape))}]"
        numbers = array.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        if array.size == 1:
            text += f" = {numbers.reshape(-1)[0]:.9g}"
        elif values and 0 < array.size <= FEW:
            text += f" = {', '.join(f'{x:.9g}' for x in numbers.reshape(-1))}"
        elif finite.size:
            text += (
                f"  min {finite.min():.6g}  mean {finite.mean():.6g}  max {finite.max():.6g}  std {finite.std():.6g}"
            )
        if finite.size < array.size:
            text += f"  ({array.size - finite.size} not finite)"
        lines.append(text)
    return lines
