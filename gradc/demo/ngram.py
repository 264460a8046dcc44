"""Two n-gram baselines: a unigram, and a trigram that backs off to bigram and unigram (Kneser-Ney).

Both are probability distributions over the whole vocabulary, so that perplexities can be compared with a trained
model's.
Source: Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1999, section 2.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
Reals = NDArray[np.float64]


def perplexity(probabilities: Reals) -> float:
    """exp(mean(-log p)): the equivalent number of equally likely words."""
    return float(np.exp(-np.mean(np.log(probabilities))))


class Unigram:
    """p(w) = (count(w) + 1) / (tokens + V)."""

    def __init__(self, tokens: Words, vocabulary: int):
        self._p = (np.bincount(tokens, minlength=vocabulary) + 1) / (len(tokens) + vocabulary)

    def probability(self, word: Words) -> Reals:
        return self._p[word]


class Trigram:
    """p(w | u, v) by interpolated Kneser-Ney: seen trigrams are discounted, the remaining mass is distributed by
    p(w | v), and so on down to 1/V.

    p(w | u v) = max(count(u v w) - D, 0) / count(u v .)  +  D * kinds(u v .) / count(u v .) * p(w | v)

    and likewise one word shorter, where a word counts once for each *different* word that precedes it.
    """

    def __init__(self, tokens: Words, vocabulary: int):
        self._v = v = vocabulary
        trigrams = (tokens[:-2] * v + tokens[1:-1]) * v + tokens[2:]
        self._three = _Level.of(trigrams, v)
        self._two = _Level.of(
            self._three.keys % (v * v), v
        )  # each distinct trigram once: the number of words before v w
        self._one = _Level.of(self._two.keys % v, v)

    def probability(self, first: Words, second: Words, word: Words) -> Reals:
        """p(word | first, second), elementwise over arrays of one shape."""
        v = self._v
        p = self._one.refine(np.zeros_like(word), word, np.full(np.shape(word), 1.0 / v))
        p = self._two.refine(second, second * v + word, p)
        return self._three.refine(first * v + second, (first * v + second) * v + word, p)


@dataclass(frozen=True)
class _Level:
    """Counts of the n-grams of one length; a key has the words as digits in base V, its history lacks the last one."""

    keys: Words
    counts: Words
    histories: Words
    history_counts: Words
    history_kinds: Words
    discount: float

    @staticmethod
    def of(occurrences: Words, vocabulary: int) -> _Level:
        keys, counts = np.unique(occurrences, return_counts=True)
        histories, start, kinds = np.unique(keys // vocabulary, return_index=True, return_counts=True)
        once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
        discount = once / (once + 2 * twice) if once else 0.0
        return _Level(keys, counts, histories, np.add.reduceat(counts, start), kinds, discount)

    def refine(self, history: Words, key: Words, shorter: Reals) -> Reals:
        """The probability with this length of history, given that with a history shorter by one word."""
        total = _look_up(self.histories, self.history_counts, history)
        kinds = _look_up(self.histories, self.history_kinds, history)
        count = _look_up(self.keys, self.counts, key)
        known = total > 0
        total = np.where(known, total, 1)
        refined = (np.maximum(count - self.discount, 0) + self.discount * kinds * shorter) / total
        return np.where(known, refined, shorter)


def _look_up(keys: Words, values: Words, wanted: Words) -> Words:
    """values[i] with keys[i] == wanted, or 0 if there is none; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
