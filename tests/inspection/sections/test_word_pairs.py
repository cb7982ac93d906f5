"""Word similarity against scipy's Spearman correlation, on tables whose similarities are known."""

import numpy as np
import pytest
from scipy import stats
from tests.inspection.tables.tiny_tables import factored, gaussian, llama

from tiewise.core.errors import CheckpointError, DataError, TiewiseError
from tiewise.core.estimates import mean_ranks, rank_correlation
from tiewise.inspection.inspection import inspect
from tiewise.inspection.sections.word_pairs import word_pairs_of
from tiewise.inspection.tables.rated_pairs import RatedPair, read_pairs
from tiewise.inspection.tables.word_similarity import WordSimilarity, correlations

ROWS, WIDTH, PAIRS = 60, 8, 40
WORDS = ["<unk>", *(f"w{row}" for row in range(1, ROWS))]
INPUT, OUTPUT = "cosine and rating, input", "cosine and rating, output"


def cosine(table, first, second):
    """Return the cosine of two rows, each given by its token or by the tokens of its mean."""
    a, b = (np.asarray(table, np.float64)[np.atleast_1d(ids)].mean(0) for ids in (first, second))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def drawn_pairs(seed=0, table=None, noise=0.1):
    """Return (pairs of rows, rated pairs); ratings follow the cosines of a table if one is given."""
    draw = np.random.default_rng(seed)
    rows = [tuple(draw.choice(np.arange(1, ROWS), 2, replace=False)) for _ in range(PAIRS)]
    ratings = draw.normal(size=PAIRS)
    if table is not None:
        ratings = np.array([cosine(table, *pair) for pair in rows]) + noise * ratings
    rated = [RatedPair(WORDS[a], WORDS[b], float(rating)) for (a, b), rating in zip(rows, ratings, strict=True)]
    return rows, rated


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_that_of_scipy_with_and_without_ties(seed):
    draw = np.random.default_rng(seed)
    for first, second in (draw.normal(size=(2, 30)), draw.integers(0, 5, (2, 30))):
        assert mean_ranks(first) == pytest.approx(stats.rankdata(first))
        assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert np.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


def test_correlations_of_an_untied_model_are_those_of_scipy(tmp_path):
    table, head = gaussian(ROWS, WIDTH), gaussian(ROWS, WIDTH, seed=1)
    rows, rated = drawn_pairs(table=table)
    report = word_pairs_of(llama(tmp_path / "untied", table, head, WORDS), rated)
    ratings = [pair.rating for pair in rated]
    expected = {}
    for name, weights in ((INPUT, table), (OUTPUT, head)):
        expected[name] = stats.spearmanr(ratings, [cosine(weights, *pair) for pair in rows]).statistic
        assert report[name].value == pytest.approx(expected[name])
        assert report[name].low < report[name].value < report[name].high
    difference = report["output − input"]
    assert difference.value == pytest.approx(expected[OUTPUT] - expected[INPUT])
    assert difference.high < 0
    assert report.answer.startswith("input rows follow the ratings more closely than output rows: input 0.9")
    assert (report["pairs used"].value, report["pairs skipped"].value) == (PAIRS, 0)


def test_a_tied_model_has_one_correlation_and_no_difference(tmp_path):
    table = gaussian(ROWS, WIDTH)
    folder = llama(tmp_path / "tied", table, words=WORDS)
    _, follows = drawn_pairs(table=table)
    report = word_pairs_of(folder, follows)
    assert [quantity.name for quantity in report.quantities if quantity.unit] == ["cosine and rating, table"]
    assert report.answer.startswith("cosines of rows follow the ratings: rank correlation 0.9")
    _, unrelated = drawn_pairs(seed=3)
    assert "no relation of cosines and ratings was detected" in word_pairs_of(folder, unrelated).answer


def test_a_factored_table_is_compared_behind_its_map(tmp_path):
    table, into, out = gaussian(ROWS, 4), gaussian(WIDTH, 4, seed=1), gaussian(4, WIDTH, seed=2)
    rows, rated = drawn_pairs(seed=1)
    report = word_pairs_of(factored(tmp_path / "narrow", table, into, out, WORDS), rated)
    ratings = [pair.rating for pair in rated]
    for name, weights in ((INPUT, table @ into.T), (OUTPUT, table @ out)):
        expected = stats.spearmanr(ratings, [cosine(weights, *pair) for pair in rows]).statistic
        assert report[name].value == pytest.approx(expected)


def test_words_of_several_tokens_are_their_mean_row_and_unknown_words_are_skipped(tmp_path):
    table = gaussian(ROWS, WIDTH)
    table[50] = 0
    rows, rated = drawn_pairs()
    rows = [(a, b) for a, b in rows if 50 not in (a, b)]
    rated = [pair for pair in rated if "w50" not in (pair.first, pair.second)]
    added = [RatedPair("w1 w2", "w3", 0.5), RatedPair("w1", "elsewhere", 9.0), RatedPair("w50", "w1", 2.0)]
    report = word_pairs_of(llama(tmp_path / "tied", table, words=WORDS), [*rated, *added])
    cosines = [cosine(table, *pair) for pair in [*rows, ([1, 2], 3)]]
    expected = stats.spearmanr([*(pair.rating for pair in rated), 0.5], cosines).statistic
    assert report["cosine and rating, table"].value == pytest.approx(expected)
    counts = [report[name].value for name in ("pairs used", "pairs skipped", "pairs with a word of several tokens")]
    assert counts == [len(rated) + 1, 2, 1]
    assert report.listings[0].rows == (("w1, elsewhere", "9"), ("w50, w1", "2"))
    assert f"{len(rated) + 1} pairs used, 1 of them with a word of several tokens; 2 skipped" in report.notes


def test_the_interval_covers_the_true_correlation_of_normal_values():
    """For normal values of correlation r, Spearman's is 6/π · arcsin(r/2) (Pearson 1907)."""
    draw, r, covered = np.random.default_rng(0), 0.6, 0
    truth = 6 / np.pi * np.arcsin(r / 2)
    for seed in range(60):
        first, other = draw.normal(size=(2, 80))
        second = r * first + np.sqrt(1 - r * r) * other
        estimate = correlations(WordSimilarity(first, {"table": second}, 0, ()), seed).ends["table"]
        covered += estimate.low <= truth <= estimate.high
    assert covered >= 51  # of 60; 57 are expected


def test_inspect_reads_the_file_and_says_what_is_missing_in_one_line(tmp_path):
    model = llama(tmp_path / "tied", gaussian(ROWS, WIDTH), words=WORDS).path
    file = tmp_path / "pairs.csv"
    _, rated = drawn_pairs()
    file.write_text("\n".join(f"{pair.first},{pair.second},{pair.rating}" for pair in rated))
    found = inspect(model, word_pairs=file, only=["word_pairs"]).found("word_pairs")["tied"]
    assert found.quantities[:1] == word_pairs_of_file(model, file)
    with pytest.raises(TiewiseError, match="needs rated pairs of words; give --word-pairs"):
        inspect(model, only=["word_pairs"])
    file.write_text("a,b,1\nc,d,2\n")
    with pytest.raises(DataError, match="none of 2 pairs can be used: the vocabulary lacks the words") as error:
        inspect(model, word_pairs=file, only=["word_pairs"])
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="no such file"):
        inspect(model, word_pairs=tmp_path / "absent", only=["tokens"])


def word_pairs_of_file(model, file):
    """Return the first quantity of the section's function, named after the model."""
    from tiewise.checkpoint.hf_folder import open_folder

    return word_pairs_of(open_folder(model), read_pairs(file)).about("tied").quantities[:1]
