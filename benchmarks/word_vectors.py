"""Word vectors of a text's words: `python -m benchmarks.word_vectors wikitext-2 valid.txt@0-90 … --width 50 300`.

Written to `vectors/WIDTH.txt` as word2vec's text, for `+vectors=vectors/50.txt`. Rows of U √Σ, the truncated singular
value decomposition of the positive pointwise mutual information of words at most five apart in a line, the neighbours'
frequencies raised to 0.75 (Levy, Goldberg & Dagan 2015, Transactions of the ACL 3, §3). All are scaled by one number
to the root mean square of a table that starts uniform in ± 0.1: what differs from a random start is their directions.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import svds

from tiewise.training.data.word_corpus import read_words, word_files

WINDOW, SMOOTH, START, LEAST = 5, 0.75, 0.1, 2  # a word that stands once has no vector


def information(text: list[list[str]], words: dict[str, int]) -> scipy.sparse.csr_matrix:
    """Positive pointwise mutual information [words, words], in nats, of a word (row) with a neighbour (column)."""
    ids = [np.array([words.get(word, -1) for word in line]) for line in text]
    pairs = np.concatenate([np.stack([line[:-d], line[d:]]) for line in ids for d in range(1, WINDOW + 1)], axis=1)
    pairs = pairs[:, (pairs >= 0).all(0)]
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    counts = scipy.sparse.coo_matrix((np.ones(both.shape[1]), both), shape=(len(words),) * 2).tocsr()
    often = np.asarray(counts.sum(1)).ravel()
    near = often**SMOOTH / (often**SMOOTH).sum()
    counts = counts.tocoo()
    values = np.log(counts.data / (often[counts.row] * near[counts.col]))
    return scipy.sparse.csr_matrix((np.maximum(values, 0), (counts.row, counts.col)), shape=counts.shape)


def vectors(matrix: scipy.sparse.csr_matrix, width: int) -> np.ndarray:
    """U √Σ [words, width] of a matrix, at the root mean square of a random start."""
    u, s, _ = svds(matrix, width, v0=np.ones(matrix.shape[0]), solver="arpack")
    rows = u * np.sqrt(s)
    return rows * (START / np.sqrt(3) / np.sqrt(np.mean(rows**2)))


def main() -> None:
    """Read, count, decompose, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("files", nargs="+", help="parts of its files, none of which a model is judged on")
    parser.add_argument("--width", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--out", type=Path, default=Path("vectors"))
    chosen = parser.parse_args()
    parts = [word_files(chosen.corpus, [name] * 3)[0] for name in chosen.files]
    text = [line for part in parts for line in read_words(part)]
    often = Counter(word for line in text for word in line)
    words = {word: i for i, (word, n) in enumerate(often.most_common()) if n >= LEAST}
    if max(chosen.width) >= len(words):
        parser.error(f"--width {max(chosen.width)}: the text has {len(words):,} words that come {LEAST} times or more")
    matrix = information(text, words)
    chosen.out.mkdir(exist_ok=True)
    for width in chosen.width:
        rows = vectors(matrix, width)
        path = chosen.out / f"{width}.txt"
        with path.open("w", encoding="utf-8") as file:
            print(len(words), width, file=file)
            for word, row in zip(words, rows, strict=True):
                print(word, *(f"{value:.5f}" for value in row), file=file)
        print(f"{path}: {len(words):,} words of {sum(often.values()):,} in the text")


if __name__ == "__main__":
    main()
