"""Tests of the exact losses of made languages, against counts of a long text."""

from collections import Counter
from itertools import pairwise
from math import log

import pytest

from benchmarks import language_floors
from tiewise.training.data.synthetic import Language


def tokens_of(language):
    """Return the tokens of a text, with an end behind each document."""
    return [token for text in language.documents() for token in (*(f"Ġ{word}" for word in text.split()), "<eos>")]


@pytest.mark.parametrize("irreversibility", [0.0, 0.3])
def test_floors_are_losses_by_counts_of_a_long_text(irreversibility):
    language = Language(irreversibility=irreversibility, types=12, words=256_000)
    tokens = tokens_of(language)
    exact = language_floors.floors(language, tokens, len(tokens))  # one block predicts every token but the first
    pairs, singles = Counter(pairwise(tokens)), Counter(tokens)
    total = sum(pairs.values())
    by_pairs = -sum(n * log(n / singles[before]) for (before, _), n in pairs.items()) / total
    alone = -sum(n * log(n / len(tokens)) for n in singles.values()) / len(tokens)
    assert exact.pairs == pytest.approx(by_pairs, abs=0.002)
    assert exact.alone == pytest.approx(alone, abs=0.002)
    words_behind_words = 127 / 129
    assert exact.alone - exact.pairs == pytest.approx(irreversibility * words_behind_words, abs=0.003)


def test_first_token_of_each_block_is_not_predicted():
    language = Language(types=3, words=256)
    tokens = tokens_of(language)
    halves = [language_floors.floors(language, part, 129) for part in (tokens[:129], tokens[129:])]
    whole = language_floors.floors(language, tokens, 129)
    assert whole.pairs == pytest.approx(sum(half.pairs for half in halves) / 2)


def test_language_of_several_scripts_is_refused():
    with pytest.raises(ValueError, match="one script"):
        language_floors.floors(Language(scripts=2), [], 64)
