"""What of a CUDA text a cache knows it by: everything that decides code, and nothing else."""

from __future__ import annotations

import pytest

import gradc
from gradc import ops
from gradc.codegen.cuda.cached_text import anonymous


def text_of(x: str, w: str, n: str, arguments: tuple[str, str] = ("x", "w")) -> str:
    graph = gradc.trace(lambda x, w: ops.sum(ops.softmax(x * w, 1), axis=0), x="f32[N,64]", w="f32[64]")
    text = str(graph).replace("%x", f"%{x}").replace("%w", f"%{w}").replace("N", n)
    return gradc.compile(gradc.parse(text), wrt=[x], target="cuda", arch="sm_90").source()


def test_names_and_places_of_the_user_decide_no_code() -> None:
    plain, other = text_of("x", "w", "N"), text_of("tokens", "scale", "rows")
    assert plain != other and "tokens" in other and "tokens" not in anonymous(other)
    assert anonymous(plain) == anonymous(other)
    assert anonymous(plain).count("\n") == plain.count("\n"), "lines keep their numbers"


@pytest.mark.parametrize(
    "changed", [("+ 1", "+ 2"), ("// b /* c", "// b"), ("a[i]", "b[i]"), ('"/* 5 */"', '"/* 6 */"')]
)
def test_code_decides(changed: tuple[str, str]) -> None:
    """Comments are told from strings, and what stands between two of them counts."""
    before, after = changed
    text = 'k(int *a, int *b) {\n  a[i] = a[i] + 1; // b /* c\n  f("/* 5 */");\n  a[0] += 0; /* d */\n}\n'
    assert before in text
    new = text.replace(before, after, 1)
    assert (anonymous(new) == anonymous(text)) is before.startswith("//")
