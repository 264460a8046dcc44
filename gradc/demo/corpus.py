"""English text that every CPython carries, as word numbers: the reference's topics and the library's docstrings.

The text is read, never imported: ``pydoc_data/topics.py`` and each module's source go through ``ast``.  Which text
it is depends on the Python version alone: what some systems package apart from the library is left out everywhere.

>>> corpus = load()
>>> contexts, targets = corpus.examples("train", context=6)    # i64[M, 6], i64[M]
>>> " ".join(corpus.words[i] for i in contexts[0])
"""

from __future__ import annotations

import ast
import hashlib
import os
import pkgutil
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradc.errors import Unsupported

UNKNOWN, END = "<unk>", "<end>"
HELD_OUT_SHARE = 0.1
LEAST_COUNT = 2  # a word seen less often is <unk>
LEAST_TOKENS = 50_000  # a Python with less text than this was stripped of its sources

# Left out because some systems ship them in packages of their own, and the text would then depend on the machine.
_PACKAGED_APART = frozenset(
    {"distutils", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtle", "turtledemo", "venv"}
)
# An identifier or a word with its apostrophe, a number, or a run of one punctuation mark (kept as a single mark).
_TOKEN = re.compile(r"[a-z_][a-z0-9_]*(?:'[a-z]+)?|[0-9]+|([!-/:-@\[-`{-~])\1*")


@dataclass(frozen=True)
class Corpus:
    """Text as numbers.

    :param words: the vocabulary: ``<unk>``, ``<end>`` (after each text), then the words by falling frequency.
    :param train: i64[T], indices into ``words``.
    :param held_out: i64[H]: whole documents, about a tenth of the text, that had no part in choosing the words.
    """

    words: tuple[str, ...]
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]

    def examples(
        self, part: Literal["train", "held_out"], context: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every run of ``context`` words with the word that follows it: i64[M, context] and i64[M]."""
        tokens = self.train if part == "train" else self.held_out
        windows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, -1])


def load() -> Corpus:
    """Read the text of the running Python, in a second or two; the same on every machine with this version."""
    documents = {name: [tokenise(text) for text in texts] for name, texts in read_documents().items()}
    total = sum(len(tokens) for texts in documents.values() for tokens in texts)
    if total < LEAST_TOKENS:
        raise Unsupported(
            f"the demo's text: this Python carries only {total} words of documentation in its library's source "
            f"(looked in {', '.join(_library_paths())}); a Python installed with its .py files has about 400000"
        )
    held_out_names = _choose_held_out({name: sum(map(len, texts)) for name, texts in documents.items()})
    train = [tokens for name, texts in documents.items() if name not in held_out_names for tokens in texts]
    held_out = [tokens for name, texts in documents.items() if name in held_out_names for tokens in texts]

    counts = Counter(word for tokens in train for word in tokens)
    kept = sorted((word for word, count in counts.items() if count >= LEAST_COUNT), key=lambda w: (-counts[w], w))
    words = (UNKNOWN, END, *kept)
    number = {word: i for i, word in enumerate(words)}
    return Corpus(words, _numbers(train, number), _numbers(held_out, number))


def tokenise(text: str) -> list[str]:
    """Lower-case words and identifiers, numbers, and punctuation marks; a run of one mark (``----``) counts once."""
    return [match[1] or match[0] for match in _TOKEN.finditer(text.lower())]


def read_documents() -> dict[str, list[str]]:
    """Document -> its texts, in order of the name; a text that stood in an earlier document is left out."""
    documents: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, texts in sorted(_all_documents()):
        fresh = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(fresh)
        if fresh:
            documents[name] = fresh
    return documents


def _all_documents() -> Iterator[tuple[str, list[str]]]:
    for name, source in _library_sources():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a file someone changed: the rest of the library is still text
            continue
        if name == "pydoc_data.topics":
            yield from ((f"topic {topic}", [text]) for topic, text in _topics(tree).items())
        else:
            yield f"module {name}", list(_docstrings(tree))


def _topics(tree: ast.Module) -> dict[str, str]:
    """The dictionary of ``topics = {...}``."""
    for statement in tree.body:
        match statement:
            case ast.Assign(value=ast.Dict() as table) | ast.AnnAssign(value=ast.Dict() as table):
                return dict(ast.literal_eval(table))
    return {}


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module in source order, nested definitions included."""
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        blocks = (getattr(node, name, ()) for name in ("body", "handlers", "orelse", "finalbody"))
        pending += reversed([inner for block in blocks for inner in block if not isinstance(inner, ast.Expr)])


def _library_sources() -> Iterator[tuple[str, str]]:
    """(module name, source) of the standard library, on disk or in a zip file; what has no source is passed over."""
    pending = [("", _library_paths())]
    while pending:
        package, paths = pending.pop()
        for info in pkgutil.iter_modules(paths):
            if not package and (info.name not in sys.stdlib_module_names or info.name in _PACKAGED_APART):
                continue
            if info.name in ("test", "tests"):
                continue
            name = package + info.name
            source, inside = _source(info)
            if inside:
                pending.append((f"{name}.", inside))
            if source:
                yield name, source


def _source(info: pkgutil.ModuleInfo) -> tuple[str, list[str]]:
    """A module's source ("" where it has none that can be read) and the folders of its submodules."""
    finder: Any = info.module_finder
    try:
        spec: ModuleSpec | None = finder.find_spec(info.name, None)
        get_source = getattr(spec and spec.loader, "get_source", None)
        source = get_source(info.name) if get_source else None
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):  # a zip file's finder compiles what it finds
        return "", []
    return source or "", list((spec and spec.submodule_search_locations) or ())


def _library_paths() -> list[str]:
    return list(dict.fromkeys([sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)]))


def _choose_held_out(sizes: dict[str, int]) -> set[str]:
    """Whole documents in the order of a hash of their names, until they hold their share of the tokens."""
    wanted = HELD_OUT_SHARE * sum(sizes.values())
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        # A document that would overshoot by more than a tenth of the share stays in the training part.
        if held + sizes[name] <= 1.1 * wanted:
            chosen.add(name)
            held += sizes[name]
        if held >= wanted:
            break
    return chosen


def _numbers(texts: list[list[str]], number: dict[str, int]) -> NDArray[np.int64]:
    unknown, end = number[UNKNOWN], number[END]
    return np.array([i for text in texts for i in (*(number.get(word, unknown) for word in text), end)], np.int64)
