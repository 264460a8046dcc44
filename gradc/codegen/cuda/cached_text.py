"""CUDA text as a cache should know it: what decides code, and nothing else."""

from __future__ import annotations

import re

_COMMENTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_FUNCTION = re.compile(
    r"^(?:extern \"C\" __global__ void [^(]*\(\d+, \d+\)|GRADC_FN void) \w+\(\n((?:  [^\n]*\b\w+,\n)+)", re.MULTILINE
)
_DIM = re.compile(r"^  const ix (\w+) = \(ix\)dim\d+;$", re.MULTILINE)
"""How templates/cuda/kernel/function.cu.j2 begins a function and :mod:`.rows` declares a dim."""


def anonymous(text: str) -> str:
    """A CUDA text as a cache should know it: without comments, in which the user's places stand, and with the names of
    buffers and dims, which are the user's, in the order of a kernel's parameters; lines keep their numbers.
    """
    bare = _COMMENTS.sub(lambda part: part[0] if part[0][0] == '"' else "\n" * part[0].count("\n"), text)
    pieces, end = [], 0
    for head in _FUNCTION.finditer(bare):
        pieces.append(bare[end : head.start()])
        end = bare.index("\n}\n", head.end()) + 3
        pieces.append(_over_places(bare[head.start() : end]))
    return "".join([*pieces, bare[end:]])


def _over_places(function: str) -> str:
    """A generated kernel with its buffers and dims called by their places."""
    head = _FUNCTION.match(function)
    assert head is not None
    names = [line.rstrip(",").rsplit(" ", 1)[-1] for line in head[1].splitlines()] + _DIM.findall(function)
    places = {name: f"gradc_at{i}" for i, name in enumerate(names)}
    return re.sub(r"(?<![\w.>])[A-Za-z_]\w*", lambda word: places.get(word[0], word[0]), function)
