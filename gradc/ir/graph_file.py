"""The file format of graphs: the text, or an envelope (:mod:`gradc.ir.envelope`) of the text and the arrays bound to
inputs.  :func:`gradc.ir.text.load` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..process import files
from .envelope import sealed
from .lexer import FORMAT

GRAPH_FORMAT = 1
NO_ARRAYS = "# no arrays"
"""The second line of a graph saved as text: no ``.npz`` file beside it is to be read."""


def save_graph(path: Any, text: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes one file: the text, or, if there are arrays, an envelope of the text and the arrays, bit for bit.

    The file is replaced atomically.

    :raises FileError: it cannot be written; the old file is unchanged.
    """
    if arrays:
        files.write(path, *sealed("graph", GRAPH_FORMAT, {"graph": file_text(text)}, arrays))
    else:
        files.write(path, f"{FORMAT}\n{NO_ARRAYS}\n{text}\n")


def file_text(text: str) -> bytes:
    """A graph's text as it is stored in files."""
    return f"{FORMAT}\n{text}\n".encode()
