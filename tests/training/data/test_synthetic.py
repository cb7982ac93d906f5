"""Made languages have what was asked for: counted in their text, by means that know nothing of how it was drawn."""

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


def words(text):
    return [document.text.split(" ")[1:] for document in open_sources(text)]


@pytest.mark.parametrize("asked", [0, 0.1, 0.3, 0.46])
@pytest.mark.parametrize("more", ["", ",scripts=2,zipf=0.5"])
def test_irreversibility_of_consecutive_words(asked, more):
    made = words(f"synthetic:irreversibility={asked},types=24,words=200000{more}")
    pairs = Counter(pair for document in made for pair in pairwise(document))
    n = pairs.total()
    counted = sum(c * np.log(2 * c / (c + pairs[b, a])) for (a, b), c in pairs.items()) / n
    bias = len(pairs) / 4 / n  # of counts: half a degree of freedom for every two orders of a pair
    assert counted - bias == pytest.approx(asked, abs=0.004)


def test_a_class_says_nothing_else_of_the_next_one():
    made = words("synthetic:irreversibility=0,types=24,words=200000")
    names = {word: i for i, word in enumerate(sorted({word for document in made for word in document}))}
    tokens = np.array([names[word] for document in made for word in document])
    q = Chain.of(tokens, len(names)).dense()
    alone = q.sum(1)
    told = float((q * np.log(q / np.outer(alone, alone))).sum())
    assert told == pytest.approx((len(names) - 1) ** 2 / 2 / len(tokens), abs=5e-4)  # what counts of chance pairs give


@pytest.mark.parametrize("zipf", [0.5, 1.0, 1.5])
def test_exponent_of_the_frequencies(zipf):
    counts = Counter(word for document in words(f"synthetic:zipf={zipf},types=300") for word in document)
    common = np.array([n for _, n in counts.most_common(150)], float).reshape(-1, 3).mean(1)
    slope, _ = np.polyfit(np.log(np.arange(1, 51)), np.log(common), 1)
    assert slope == pytest.approx(-zipf, abs=0.02)


@pytest.mark.parametrize("scripts", range(1, SCRIPTS + 1))
def test_scripts_share_the_text_alike(scripts):
    made = words(f"synthetic:scripts={scripts},types=1200,words=200000")
    found = Counter(unicodedata.name(word[0]).split()[0] for document in made for word in document)
    assert len(found) == scripts
    assert all(n / found.total() == pytest.approx(1 / scripts, abs=0.02) for n in found.values())
    assert len({word for document in made for word in document}) == pytest.approx(1200, rel=0.01)
    assert all(len({unicodedata.name(letter).split()[0] for letter in word}) == 1 for word in made[0])


def test_every_word_becomes_one_token():
    made = [document.text for document in open_sources("synthetic:scripts=2,types=300,words=60000")]
    tokenizer = make_tokenizer("bpe:1024", lambda: iter(made))
    assert all(len(tokenizer.encode(text)) == len(text.split()) for text in made)


def test_equal_options_give_equal_text():
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
def test_what_no_language_has_is_refused(text, says):
    with pytest.raises(DataError) as refused:
        open_sources(text)
    assert says in str(refused.value)
