"""Planted streams of sentences whose tokens say where they are from."""

import numpy as np

from tiewise.data.sentence_pairs import Sentences, Vocabulary


def planted(documents=30, most=12, longest=9, seed=0, least=1):
    """Sentences of documents: every token is the number of its sentence plus 10, each sentence of random length."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(least, most + 1, documents)
    lengths = draw.integers(1, longest + 1, counts.sum())
    tokens = np.repeat(np.arange(len(lengths)) + 10, lengths)
    ends = np.cumsum(lengths)
    return Sentences(words(len(lengths) + 10), tokens, ends - lengths, ends, np.concatenate([[0], np.cumsum(counts)]))


def words(vocab):
    """Marks 0 … 3, tokens from 4 on, each a word of its own."""
    pieces = tuple(b"" if i < 4 else b" t%d" % i for i in range(vocab))
    flags = np.zeros(vocab, bool)
    return Vocabulary(pieces, flags, flags, np.arange(vocab), (0, 1, 2, 3))
