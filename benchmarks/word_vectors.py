"""Word vectors of a text's words: `python -m benchmarks.word_vectors wikitext-2 valid.txt@0-90 … --width 50 300`.

It writes them to `vectors/WIDTH.txt` in word2vec's text format, for `+vectors=vectors/50.txt`. The vectors are rows of
U √Σ from a truncated singular value decomposition. The matrix is the positive pointwise mutual information of words at
most five apart in a line, with the neighbours' frequencies raised to 0.75 (Levy, Goldberg & Dagan 2015, Transactions of
the ACL 3, §3). One factor scales all vectors to the root mean square of a table that starts uniform in ± 0.1, so that
they differ from a random start only in their directions.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import svds

from tiewise.training.data.word_corpus import read_words, word_files

WINDOW, SMOOTH, START, LEAST = 5, 0.75, 0.1, 2  # LEAST: a word that occurs once has no vector


def compute_information(text: list[list[str]], words: dict[str, int]) -> scipy.sparse.csr_matrix:
    """Return the positive pointwise mutual information of words and neighbours, in nats.

    Shape [words, words]: a row is a word, a column is a neighbour.
    """
    ids = [np.array([words.get(word, -1) for word in line]) for line in text]
    pairs = np.concatenate([np.stack([line[:-d], line[d:]]) for line in ids for d in range(1, WINDOW + 1)], axis=1)
    pairs = pairs[:, (pairs >= 0).all(0)]
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    counts = scipy.sparse.coo_matrix((np.ones(both.shape[1]), both), shape=(len(words),) * 2).tocsr()
    frequencies = np.asarray(counts.sum(1)).ravel()
    neighbour_weights = frequencies**SMOOTH / (frequencies**SMOOTH).sum()
    counts = counts.tocoo()
    values = np.log(counts.data / (frequencies[counts.row] * neighbour_weights[counts.col]))
    return scipy.sparse.csr_matrix((np.maximum(values, 0), (counts.row, counts.col)), shape=counts.shape)


def compute_vectors(matrix: scipy.sparse.csr_matrix, width: int) -> np.ndarray:
    """Return U √Σ [words, width] of a matrix, scaled as a random start."""
    u, s, _ = svds(matrix, width, v0=np.ones(matrix.shape[0]), solver="arpack")
    rows = u * np.sqrt(s)
    return rows * (START / np.sqrt(3) / np.sqrt(np.mean(rows**2)))


def main() -> None:
    """Read the text, compute the vectors of each width, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("files", nargs="+", help="parts of its files, none of which a model is judged on")
    parser.add_argument("--width", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--out", type=Path, default=Path("vectors"))
    options = parser.parse_args()
    files = [word_files(options.corpus, [name] * 3)[0] for name in options.files]
    text = [line for part in files for line in read_words(part)]
    frequencies = Counter(word for line in text for word in line)
    words = {word: i for i, (word, n) in enumerate(frequencies.most_common()) if n >= LEAST}
    if max(options.width) >= len(words):
        parser.error(f"--width {max(options.width)}: the text has {len(words):,} words that come {LEAST} times or more")
    matrix = compute_information(text, words)
    options.out.mkdir(exist_ok=True)
    for width in options.width:
        rows = compute_vectors(matrix, width)
        path = options.out / f"{width}.txt"
        with path.open("w", encoding="utf-8") as file:
            print(len(words), width, file=file)
            for word, row in zip(words, rows, strict=True):
                print(word, *(f"{value:.5f}" for value in row), file=file)
        print(f"{path}: {len(words):,} words of {sum(frequencies.values()):,} in the text")


if __name__ == "__main__":
    main()
