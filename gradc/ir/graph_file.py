"""The file of a graph: its text, or an envelope (:mod:`gradc.ir.envelope`) of the text and the arrays bound to its
inputs.  It is read by :func:`gradc.ir.text.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import files
from .envelope import sealed
from .scan import FORMAT

GRAPH_FORMAT = 1
NO_ARRAYS = "# no arrays"
"""The second line of a graph that is saved as text: nothing beside the file belongs to it."""


def save_graph(path: Any, text: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """One file: the text, or, where there are arrays, an envelope of the text and the arrays, bit for bit.

    At any moment ``path`` is the old file or the whole new one.

    :raises FileError: it cannot be written; the old file is as it was.
    """
    if arrays:
        files.write(path, *sealed("graph", GRAPH_FORMAT, {"graph": file_text(text)}, arrays))
    else:
        files.write(path, f"{FORMAT}\n{NO_ARRAYS}\n{text}\n")


def file_text(text: str) -> bytes:
    """A graph's text as it stands in files."""
    return f"{FORMAT}\n{text}\n".encode()
