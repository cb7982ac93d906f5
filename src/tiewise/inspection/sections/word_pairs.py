"""Do the cosines of rows follow ratings of words' similarity?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.estimates import Estimate
from tiewise.core.measurement import Listing, Measurement, Quantity, count, visible
from tiewise.inspection.tables.model_tables import ends_of
from tiewise.inspection.tables.rated_pairs import RatedPair, read_pairs
from tiewise.inspection.tables.word_similarity import EndCorrelations, WordSimilarity, correlations, word_similarity
from tiewise.inspection.workspace import InspectedModel, NotApplicable, Workspace, section

UNIT = "rank correlation"
FIGURE = "Rank correlation of cosines with ratings"
MOST_LISTED = 20  # skipped pairs that are listed


@section(question="Are rows of similar words similar?", order=92)
def word_pairs(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Correlate the cosines of rows with the ratings of a file of word pairs."""
    file = workspace.request.word_pairs
    if file is None:
        raise NotApplicable("needs rated pairs of words", "give --word-pairs")
    return word_pairs_of(
        model.folder, workspace.once(("pairs", file), lambda: read_pairs(file)), workspace.request.seed
    )


def word_pairs_of(folder: Folder, pairs: Sequence[RatedPair], seed: int = 0) -> Measurement:
    """Measure Spearman's correlation of rated pairs with the cosines of rows at each end.

    `seed` draws the pairs of the bootstrap.

    Raises:
        CheckpointError: no input table, no output head, quantised tables, or a tokenizer.json that cannot be read.
        DataError: as `word_similarity`.
    """
    ends = ends_of(folder)
    similarity = word_similarity(folder, dict(ends.tables), pairs)
    measured = correlations(similarity, seed)
    return Measurement(
        answer=_answer(measured),
        quantities=(*_correlation_quantities(measured), *_pair_counts(similarity)),
        listings=tuple(_listings(similarity)),
        notes=(*_notes(similarity), *ends.notes),
    )


def _answer(measured: EndCorrelations) -> str:
    """Return which rows follow the ratings, and whether one end does so more than the other."""
    if measured.difference is None:
        (only,) = measured.ends.values()
        return _agreement(only)
    parts = " and ".join(f"{end} {_correlation(estimate)}" for end, estimate in measured.ends.items())
    if measured.difference.low > 0:
        return f"output rows follow the ratings more closely than input rows: {parts}"
    if measured.difference.high < 0:
        return f"input rows follow the ratings more closely than output rows: {parts}"
    return f"no difference between input and output rows was detected: {parts}"


def _agreement(estimate: Estimate) -> str:
    """Return how closely the cosines of one table follow the ratings."""
    value = _correlation(estimate)
    if estimate.low > 0:
        return f"cosines of rows follow the ratings: rank correlation {value}"
    if estimate.high < 0:
        return f"cosines of rows run against the ratings: rank correlation {value}"
    return f"no relation of cosines and ratings was detected: rank correlation {value}"


def _correlation(estimate: Estimate) -> Quantity:
    """Return a correlation with its interval, as a sentence shows it."""
    return Quantity.of_estimate("", estimate, unit=UNIT)


def _correlation_quantities(measured: EndCorrelations) -> Iterator[Quantity]:
    """Yield the correlation of each end, then their difference."""
    why = "1: cosines order the pairs as the ratings do"
    for end, estimate in measured.ends.items():
        yield Quantity.of_estimate(f"cosine and rating, {end}", estimate, chance=0.0, unit=UNIT, figure=FIGURE, why=why)
    if measured.difference is not None:
        why = "over the same draws of pairs"
        yield Quantity.of_estimate("output − input", measured.difference, chance=0.0, unit=UNIT, figure=FIGURE, why=why)


def _pair_counts(similarity: WordSimilarity) -> Iterator[Quantity]:
    """Yield the numbers of pairs that are used, averaged over tokens, and skipped."""
    yield Quantity("pairs used", len(similarity.ratings))
    yield Quantity("pairs skipped", len(similarity.skipped), why="the vocabulary lacks a word, or its row is zero")
    yield Quantity("pairs with a word of several tokens", similarity.several, main=False, why="their mean row is used")


def _listings(similarity: WordSimilarity) -> Iterator[Listing]:
    """Yield the list of skipped pairs, if there are any."""
    if not similarity.skipped:
        return
    rows = []
    for pair in similarity.skipped[:MOST_LISTED]:
        rows.append((f"{visible(pair.first)}, {visible(pair.second)}", f"{pair.rating:g}"))
    yield Listing("Pairs skipped", ("pair", "rating"), tuple(rows))


def _notes(similarity: WordSimilarity) -> Iterator[str]:
    """Yield what a reader needs to know about the pairs."""
    used, several, skipped = len(similarity.ratings), similarity.several, len(similarity.skipped)
    yield f"{count(used)} pairs used, {count(several)} of them with a word of several tokens; {count(skipped)} skipped"
    yield "intervals resample pairs as if they were independent; a word in several pairs makes them too narrow"
