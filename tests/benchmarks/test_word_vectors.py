"""Compare word vectors of a small text with counts by hand, and read them back as rows of a table."""

import math
import random
import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks import word_vectors
from tiewise.boundary.vectors import load_vectors

TEXT = [random.Random(line).choices("abcdefg", [9, 6, 4, 3, 2, 2, 1], k=12) for line in range(8)]
WORDS = {word: i for i, word in enumerate("abcdefg")}


def test_information_matches_pairs_counted_one_by_one():
    pairs = Counter((line[i], line[j]) for line in TEXT for i in range(12) for j in range(12) if 1 <= abs(i - j) <= 5)
    often = Counter()
    for (word, _), n in pairs.items():
        often[word] += n
    smooth = sum(n**0.75 for n in often.values())
    matrix = word_vectors.compute_information(TEXT, WORDS).toarray()
    for word, i in WORDS.items():
        for near, j in WORDS.items():
            n = pairs[word, near]
            expected = math.log(n / (often[word] * often[near] ** 0.75 / smooth)) if n else 0.0
            assert matrix[i, j] == pytest.approx(max(expected, 0.0), abs=1e-12)


def test_main_writes_vectors_at_scale_of_random_initialisation(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("\n".join(" ".join(line) for line in TEXT))
    out = tmp_path / "vectors"
    monkeypatch.setattr(
        sys, "argv", ["", str(tmp_path), "text.txt@0-50", "text.txt@50-100", "--width", "3", "--out", str(out)]
    )
    word_vectors.main()
    rows = load_vectors(out / "3.txt", ["a", "<eos>", "g"]).numpy()
    all_rows = np.loadtxt((out / "3.txt").read_text().splitlines()[1:], usecols=(1, 2, 3))
    assert len(all_rows) == 7
    assert np.isfinite(rows[:2]).all()
    assert np.isnan(rows[2]).all()  # the text has this word once
    assert np.sqrt(np.mean(all_rows**2)) == pytest.approx(0.1 / math.sqrt(3), abs=1e-4)
