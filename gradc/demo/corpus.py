"""The demo's training text: English documentation that comes with gradc, as word indices.

``corpus.txt`` has the documentation, docstrings, comments and error texts of gradc 0.1.0, under gradc's own licence,
one document per source file. It is not updated, so that the demo trains on the same text with every version.

>>> corpus = load()
>>> contexts, targets = corpus.examples("train", context=6)    # i64[M, 6], i64[M]
>>> " ".join(corpus.words[i] for i in contexts[0])
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

UNKNOWN, END = "<unk>", "<end>"
HELD_OUT_SHARE = 0.1
LEAST_COUNT = 2  # less frequent words become <unk>
FILE = Path(__file__).with_name("corpus.txt")

# An identifier or a word with its apostrophe, a number, or a run of one punctuation mark (kept as a single mark).
_TOKEN = re.compile(r"[a-z_][a-z0-9_]*(?:'[a-z]+)?|[0-9]+|([!-/:-@\[-`{-~])\1*")


@dataclass(frozen=True)
class Corpus:
    """Tokenised text.

    :param words: the vocabulary: ``<unk>``, ``<end>`` (after each text), then the words by descending frequency.
    :param train: i64[T], indices into ``words``.
    :param held_out: i64[H]: whole documents, about a tenth of the text, which do not contribute to the vocabulary.
    """

    words: tuple[str, ...]
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]

    def examples(self, part: Literal["train", "held_out"], context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every sequence of ``context`` words and the word that follows it: (i64[M, context], i64[M])."""
        tokens = self.train if part == "train" else self.held_out
        windows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, -1])


def load() -> Corpus:
    """Reads and tokenises the text."""
    documents = {name: [tokenise(text) for text in texts] for name, texts in read_documents().items()}
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
    """Document -> its texts.  In the file, a line ``=== name`` begins a document and an empty line ends a text."""
    documents: dict[str, list[str]] = {}
    for part in FILE.read_text(encoding="ascii").split("=== ")[1:]:
        name, _, texts = part.partition("\n")
        documents[name] = [text for text in texts.strip().split("\n\n") if text]
    return documents


def _choose_held_out(sizes: dict[str, int]) -> set[str]:
    """Whole documents in the order of a hash of their names, until they have the required share of the tokens."""
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
