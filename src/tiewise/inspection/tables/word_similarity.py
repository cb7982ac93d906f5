"""Cosines of words' rows, compared with ratings of the words' similarity.

The comparison is Spearman's rank correlation, as for word vectors (Press & Wolf 2017, arXiv:1608.05859). The interval
resamples pairs (Efron 1979). Pairs count as independent, although many lists use a word in several pairs.

The rows of an embedding and those of a head belong to the same words. So each draw gives one correlation for either
table, and the interval of their difference is paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError, non_finite_error
from tiewise.core.estimates import ALPHA, Estimate, rank_correlation
from tiewise.core.progress import advance_progress, progress_of
from tiewise.inspection.tables.model_tables import Array, TokenTable
from tiewise.inspection.tables.rated_pairs import RatedPair
from tiewise.inspection.tables.token_texts import tokens_of_words

RESAMPLES = 1000  # draws of pairs; their quantiles are the interval's limits
FEWEST = 5  # pairs, of which 5⁵ draws exist
Words = Mapping[str, tuple[int, ...]]  # word → its tokens


@dataclass(frozen=True)
class WordSimilarity:
    """Rated pairs and the cosines of their rows, in each table."""

    ratings: Array  # [n], of the pairs that are used
    cosines: Mapping[str, Array]  # end → cosine of the rows of each pair [n]
    several: int  # pairs that are used and have a word of several tokens
    skipped: tuple[RatedPair, ...]  # pairs with a word that the vocabulary lacks, or whose row is zero


@dataclass(frozen=True)
class EndCorrelations:
    """Rank correlations of ratings and cosines, with intervals over pairs."""

    ends: Mapping[str, Estimate]  # end → its correlation
    difference: Estimate | None  # output − input, paired; None for one table


def word_similarity(folder: Folder, tables: Mapping[str, TokenTable], pairs: Sequence[RatedPair]) -> WordSimilarity:
    """Return the cosines of rated pairs in each of a model's tables [V, E].

    The row of a word of several tokens is the mean of their rows.

    Raises:
        DataError: no tokenizer.json, fewer than 5 usable pairs, or rows with values that are no numbers.
        CheckpointError: the tokenizer.json cannot be read.
    """
    rows = min(table.rows for table in tables.values())
    tokens = _tokens(folder, pairs, rows)
    with_tokens = [pair for pair in pairs if pair.first in tokens and pair.second in tokens]
    cosines = np.array([_cosines(table, with_tokens, tokens) for table in tables.values()])
    is_usable = np.isfinite(cosines).all(axis=0)
    used = list(compress(with_tokens, is_usable))
    _require_enough(folder, used, len(pairs))
    remaining = set(used)
    return WordSimilarity(
        ratings=np.array([pair.rating for pair in used]),
        cosines=dict(zip(tables, cosines[:, is_usable], strict=True)),
        several=sum(_has_several_tokens(pair, tokens) for pair in used),
        skipped=tuple(pair for pair in pairs if pair not in remaining),
    )


def _tokens(folder: Folder, pairs: Sequence[RatedPair], rows: int) -> Words:
    """Return the tokens of the words that the vocabulary has, all below `rows`."""
    words: list[str] = []
    for pair in pairs:
        words += [pair.first, pair.second]
    tokens = tokens_of_words(folder, words)
    return {word: ids for word, ids in tokens.items() if ids and max(ids) < rows}


def _has_several_tokens(pair: RatedPair, tokens: Words) -> bool:
    """Return True if a word of a pair is not one token."""
    return max(len(tokens[pair.first]), len(tokens[pair.second])) > 1


def _require_enough(folder: Folder, used: Sequence[RatedPair], total: int) -> None:
    """Refuse too few pairs for an interval, and pairs with one rating."""
    count = f"{len(used) or 'none'} of {total:,} pairs"
    if len(used) < FEWEST:
        problem = f"{folder.path}: {count} can be used: the vocabulary lacks the words of the others"
        raise DataError(problem, f"give {FEWEST} or more pairs of words that it has")
    if len({pair.rating for pair in used}) < 2:
        raise DataError(f"{folder.path}: {count} can be used, and their ratings are equal", "give other pairs")


def _cosines(table: TokenTable, pairs: Sequence[RatedPair], tokens: Words) -> Array:
    """Return the cosine of the rows of each pair [n]; NaN if a row is zero."""
    rows: dict[str, Array] = {}
    with progress_of(f"words of {table.name}", len(tokens)):
        for number, (word, ids) in enumerate(tokens.items(), 1):
            rows[word] = _unit_row(table, ids)
            advance_progress(number)
    return np.array([float(rows[pair.first] @ rows[pair.second]) for pair in pairs])


def _unit_row(table: TokenTable, ids: tuple[int, ...]) -> Array:
    """Return the mean row of some tokens at length 1 [E], or NaN for zeros."""
    row: Array = table.take(ids).mean(axis=0)
    length = float(np.linalg.norm(row))
    if not np.isfinite(length):
        raise non_finite_error("a table")
    if not length:
        return np.full_like(row, np.nan)
    unit: Array = row / length
    return unit


def correlations(similarity: WordSimilarity, seed: int = 0) -> EndCorrelations:
    """Return the rank correlation of ratings and cosines in each table, with 95 % intervals.

    The limits are percentiles over 1,000 draws of pairs with replacement. A draw whose ratings are all equal has no
    correlation and is left out.

    >>> ratings = np.arange(8.0)
    >>> similarity = WordSimilarity(ratings, {"table": ratings / 8}, several=0, skipped=())
    >>> correlations(similarity).ends["table"].value
    1.0
    """
    ratings, cosines = similarity.ratings, similarity.cosines
    generator, pairs = np.random.default_rng(seed), len(ratings)
    values = {end: rank_correlation(ratings, of_table) for end, of_table in cosines.items()}
    resampled: dict[str, Array] = {end: np.empty(RESAMPLES) for end in cosines}
    for draw in range(RESAMPLES):
        chosen = generator.integers(0, pairs, pairs)
        for end, of_table in cosines.items():
            resampled[end][draw] = rank_correlation(ratings[chosen], of_table[chosen])
    ends = {end: _estimate(values[end], resampled[end], pairs) for end in cosines}
    if len(ends) < 2:
        return EndCorrelations(ends, None)
    first, second = cosines
    difference = _estimate(values[second] - values[first], resampled[second] - resampled[first], pairs)
    return EndCorrelations(ends, difference)


def _estimate(value: float, resampled: Array, pairs: int) -> Estimate:
    """Return a value with the percentiles of its resampled values."""
    low, high = np.nanquantile(resampled, [ALPHA / 2, 1 - ALPHA / 2]).tolist()
    return Estimate(value, low, high, pairs)
