"""Tests of synthetic languages against statistics that are counted in the generated text."""

import hashlib
import unicodedata
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tiewise.core.errors import DataError
from tiewise.inspection.tables.bigram_counts import Chain
from tiewise.training.data.sources import open_sources
from tiewise.training.data.synthetic import SCRIPTS, Language
from tiewise.training.data.tokenizer import make_tokenizer


def read_words(text):
    return [document.text.split(" ")[1:] for document in open_sources(text)]


@pytest.mark.parametrize("asked", [0, 0.1, 0.3, 0.46])
@pytest.mark.parametrize("more", ["", ",scripts=2,zipf=0.5"])
def test_synthetic_text_has_requested_irreversibility(asked, more):
    made = read_words(f"synthetic:irreversibility={asked},types=24,words=200000{more}")
    pairs = Counter(pair for document in made for pair in pairwise(document))
    n = pairs.total()
    counted = sum(c * np.log(2 * c / (c + pairs[b, a])) for (a, b), c in pairs.items()) / n
    bias = len(pairs) / 4 / n  # bias of counts: half a degree of freedom for the two orders of each pair
    assert counted - bias == pytest.approx(asked, abs=0.004)


def test_consecutive_synthetic_words_are_independent_without_irreversibility():
    made = read_words("synthetic:irreversibility=0,types=24,words=200000")
    names = {word: i for i, word in enumerate(sorted({word for document in made for word in document}))}
    tokens = np.array([names[word] for document in made for word in document])
    q = Chain.of(tokens, len(names)).dense()
    alone = q.sum(1)
    told = float((q * np.log(q / np.outer(alone, alone))).sum())
    # expected value for independent pairs
    assert told == pytest.approx((len(names) - 1) ** 2 / 2 / len(tokens), abs=5e-4)


@pytest.mark.parametrize("zipf", [0.5, 1.0, 1.5])
def test_synthetic_word_frequencies_follow_requested_zipf_exponent(zipf):
    counts = Counter(word for document in read_words(f"synthetic:zipf={zipf},types=300") for word in document)
    common = np.array([n for _, n in counts.most_common(150)], float).reshape(-1, 3).mean(1)
    slope, _ = np.polyfit(np.log(np.arange(1, 51)), np.log(common), 1)
    assert slope == pytest.approx(-zipf, abs=0.02)


@pytest.mark.parametrize("scripts", range(1, SCRIPTS + 1))
def test_synthetic_scripts_share_text_equally(scripts):
    made = read_words(f"synthetic:scripts={scripts},types=1200,words=200000")
    found = Counter(unicodedata.name(word[0]).split()[0] for document in made for word in document)
    assert len(found) == scripts
    assert all(n / found.total() == pytest.approx(1 / scripts, abs=0.02) for n in found.values())
    assert len({word for document in made for word in document}) == pytest.approx(1200, rel=0.01)
    assert all(len({unicodedata.name(letter).split()[0] for letter in word}) == 1 for word in made[0])


def test_trained_tokenizer_encodes_every_synthetic_word_as_one_token():
    made = [document.text for document in open_sources("synthetic:scripts=2,types=300,words=60000")]
    tokenizer = make_tokenizer("bpe:1024", lambda: iter(made))
    assert all(len(tokenizer.encode(text)) == len(text.split()) for text in made)


def test_equal_language_options_give_equal_text():
    text = "".join(Language.parse("synthetic:irreversibility=0.2,scripts=4,words=5000").documents())
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "02675a55643e67d957b96d8c97b48086ea8417ad4366eda8159a44ff1fa995f7"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("synthetic:irreversibility=0.7", "irreversibility = 0.7; use nats from 0 to 0.46"),
        ("synthetic:scripts=5", "scripts = 5; use 1 to 4"),
        ("synthetic:scripts=2,types=5", "types = 5; use 6 (a word for each class) to 100000"),
        ("synthetic:words=many", "words in 'synthetic:words=many' must be a whole number"),
        ("synthetic:speakers=2", "has no 'speakers'; known, with their defaults: irreversibility=0.3, zipf=1.0"),
        ("synthetic:zipf=nan", "zipf = nan; use an exponent from 0 to 4"),
        ("synthetic:zipf", "zipf in 'synthetic:zipf' must be a number"),
    ],
)
def test_open_sources_refuses_invalid_synthetic_options(text, says):
    with pytest.raises(DataError) as refused:
        open_sources(text)
    assert says in str(refused.value)
