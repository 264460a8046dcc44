"""ONNX's own node tests, made once for all runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from caches import once

from benchmarks import onnx_nodes


@functools.cache
def cases() -> dict[str, list[Any]]:
    """:func:`.onnx_nodes.cases`, whose wanted values onnx computes by the element in Python, in seven seconds."""
    made_of = ("node tests", onnx.__version__, np.__version__, Path(onnx_nodes.__file__).read_bytes())
    return once(onnx_nodes.cases, *made_of)  # type: ignore[no-any-return]
