"""The demo's text and its counting baselines."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from gradc.demo import corpus, ngram


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load()


def test_sizes_are_those_of_a_small_language_model(text):
    tokens = len(text.train) + len(text.held_out)
    assert 80_000 < tokens < 150_000
    assert 2_000 < len(text.words) < 3_000
    assert 0.08 < len(text.held_out) / tokens < 0.12


def test_vocabulary_is_the_words_seen_twice(text):
    counts = np.bincount(text.train, minlength=len(text.words))
    assert text.words[:2] == ("<unk>", "<end>")
    assert len(set(text.words)) == len(text.words)
    assert counts[2:].min() == 2
    assert (np.diff(counts[2:]) <= 0).all(), "by falling frequency"
    assert np.mean(text.held_out == 0) < 0.08, "few unknown words"


def test_nothing_of_a_document_is_on_both_sides():
    documents = corpus.read_documents()
    texts = [t for group in documents.values() for t in group]
    assert len(set(texts)) == len(texts)
    sizes = {name: len(group) for name, group in documents.items()}
    assert corpus._choose_held_out(sizes) == corpus._choose_held_out(dict(reversed(sizes.items())))


def test_tokens():
    assert corpus.tokenise("Don't use ``x_1 += 10``...\n-----\nÉt tu?") == [
        "don't",
        "use",
        "`",
        "x_1",
        "+",
        "=",
        "10",
        "`",
        ".",
        "-",
        "t",
        "tu",
        "?",
    ]


def test_examples_are_every_context_with_its_next_word(text):
    contexts, targets = text.examples("held_out", context=6)
    assert contexts.shape == (len(text.held_out) - 6, 6)
    assert contexts.flags.c_contiguous and contexts.dtype == np.int64
    assert (contexts[10] == text.held_out[10:16]).all() and targets[10] == text.held_out[16]


def test_it_is_the_text_that_was_collected(text):
    """The same words in the same order under every Python and on every system: the demo's figures depend on nothing
    else.
    """
    words = hashlib.sha256("\n".join(text.words).encode()).hexdigest()
    tokens = hashlib.sha256(text.train.astype("<i8").tobytes() + text.held_out.astype("<i8").tobytes()).hexdigest()
    assert (words[:16], tokens[:16]) == ("f5a0b29ee8400ba5", "382436cf4bd0e227")
    assert corpus.FILE.stat().st_size < 420_000 and corpus.FILE.read_bytes().isascii()


def test_baselines_are_probability_distributions(text):
    size = len(text.words)
    words = np.arange(size)
    assert math.isclose(ngram.Unigram(text.train, size).probability(words).sum(), 1, rel_tol=1e-12)
    model = ngram.Trigram(text.train, size)
    seen = np.random.default_rng(0).integers(2, len(text.held_out), 20)
    contexts = [(text.held_out[i - 2], text.held_out[i - 1]) for i in seen]
    contexts += [(size - 1, size - 2), (text.train[-2], text.train[-1])]  # a context never seen, and the last one
    for first, second in contexts:
        p = model.probability(np.full(size, first), np.full(size, second), words)
        assert p.min() > 0
        assert math.isclose(p.sum(), 1, rel_tol=1e-9)


def test_trigram_on_a_text_counted_by_hand():
    a, b, c, d = range(4)
    model = ngram.Trigram(np.array([a, b, c, a, b, d, a, b, c]), vocabulary=4)
    # Kinds of trigram: abc (twice), bca, cab, abd, bda, dab.  D3 = 5 / (5 + 2*1).  Bigram kinds by their first words:
    # bc 1, ca 1, ab 2, bd 1, da 1: D2 = 4 / (4 + 2*1).  Words by the words before them: a 2, b 1, c 1, d 1: D1 = 3 / 5.
    d3, d2, d1 = 5 / 7, 4 / 6, 3 / 5
    p1 = (1 - d1 + d1 * 4 / 4) / 5
    p2 = (1 - d2 + d2 * 2 * p1) / 2
    p3 = (2 - d3 + d3 * 2 * p2) / 3
    assert math.isclose(model.probability(np.array(a), np.array(b), np.array(c)), p3, rel_tol=1e-12)


def test_words_in_context_are_easier_than_words_alone(text):
    contexts, targets = text.examples("held_out", context=6)
    size = len(text.words)
    alone = ngram.perplexity(ngram.Unigram(text.train, size).probability(targets))
    model = ngram.Trigram(text.train, size)
    in_context = ngram.perplexity(model.probability(contexts[:, -2], contexts[:, -1], targets))
    assert 1 < in_context < alone / 2 < size
    assert ngram.perplexity(np.full(5, 1 / size)) == pytest.approx(size)
