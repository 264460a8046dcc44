"""What gradc means to have and does not have yet: each raises Unsupported naming it.  This list can only shrink."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import gradc
from gradc.errors import Unsupported


def _run_with_stream() -> object:
    return gradc.compile(gradc.trace(lambda x: x + 1, x="f32[4]")).forward.run(
        x=np.zeros(4, np.float32), stream=object()
    )


NOT_YET: dict[str, tuple[Callable[[], object], str]] = {
    "float atomics on the cpu": (
        lambda: gradc.compile(
            gradc.trace(lambda x, b: x + b, x="f32[N,3]", b="f32[3]"), wrt=["b"], reductions={"*": "atomic"}
        ),
        "the reduction 'atomic'",
    ),
    "streams on the cpu": (_run_with_stream, "the CPU has no streams"),
}


@pytest.mark.parametrize("name", NOT_YET)
def test_it_says_so(name: str) -> None:
    attempt, message = NOT_YET[name]
    with pytest.raises(Unsupported, match=message):
        attempt()
