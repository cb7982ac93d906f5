"""Input and output table of one model, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.align_tables import FITTED, HELD_OUT, Alignment, Score
from tiewise.analysis.end_alignment import AlignmentFound
from tiewise.analysis.estimates import Estimate
from tiewise.analysis.table_maps import CENTRED, IDENTITY, ORTHOGONAL
from tiewise.core.numerals import NONE, count, plain
from tiewise.report.grid import Table

TITLE = "Alignment of input and output"
MAPS = {
    "identity": "as they stand",
    "orthogonal": "after the best rotation",
    "linear": "after the best linear map",
    "neighbours": "by nearest neighbours in common",
    "CKA": "by CKA above chance",
    "CKA, frequency out": "by CKA above chance with frequency taken out",
    "CKA, frequency out (line)": "by CKA above chance with a line in log frequency taken out",
}


def lines(found: Mapping[str, AlignmentFound]) -> list[str]:
    """Say how alike the two tables of each model are, and what unrelated tables would give."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, AlignmentFound]) -> list[tuple[str, Table]]:
    """Every measure of every model with two tables."""
    return [
        (f"Input and output of {label}, {count(one.alignment.pairs)} tokens", measures(one.alignment))
        for label, one in found.items()
        if one.alignment is not None
    ]


def spelled(measure: str) -> str:
    """A measure in words: "after the best rotation"."""
    return MAPS.get(measure, f"after the best map of {measure}")


def interval(value: Estimate) -> str:
    """0.192 [0.184, 0.199]."""
    return f"{plain(value.value, 3)} [{plain(value.low, 3)}, {plain(value.high, 3)}]"


def held_out(found: Alignment) -> list[Score]:
    """Scores of centred rows that no map was fitted on; where none were held out, of all."""
    rows = HELD_OUT if found.fitted_rows < found.pairs else FITTED
    return [score for score in found.scores if (score.rows, score.view) == (rows, CENTRED)]


def against_null(score: Score) -> str:
    """Half a sentence: what unrelated tables give, and what the same rows permuted gave."""
    level = plain(score.chance, 3) if score.chance else "0"
    chance = f"unrelated Gaussian tables give {level} ± {plain(1.96 * score.chance_deviation, 3)}"
    if score.null is None:
        return chance
    runs = len(score.null.values)
    times = "one permutation" if runs == 1 else f"{runs} permutations"
    return f"{chance}, {times} of the rows at most {plain(max(score.null.values), 3)}"


def measures(found: Alignment) -> Table:
    """One row for each measure: value, interval, chance, permuted."""
    rows = [_score_row(score) for score in found.scores]
    near, alike, norms = found.neighbours, found.similarity, found.norms
    if near is not None:
        permuted = _all(near.permuted)
        rows.append([f"nearest {near.k} in common", interval(near.estimate), plain(near.chance, 4), permuted])
    rows.append(["CKA", plain(alike.cka.value, 3), plain(alike.cka.chance, 3), NONE])
    for shared in alike.subspaces:
        side = "tokens" if shared.side == "left" else "coordinates"
        name = f"{shared.k} leading directions over {side}"
        rows.append([name, plain(shared.value, 3), plain(shared.chance, 3), NONE])
    around = f"0 ± {plain(norms.chance, 3)}"
    rows.append(["norms, Pearson", interval(norms.pearson), around, NONE])
    rows.append(["norms, Spearman", interval(norms.spearman), around, NONE])
    for name, spectrum in (("first", alike.spectrum_a), ("second", alike.spectrum_b)):
        rows.append([f"directions that the {name} table fills evenly", plain(spectrum.participation, 1), NONE, NONE])
    return Table(["measure", "value [95 %]", "by chance", "permuted"], rows)


def _score_row(score: Score) -> list[str]:
    raw = "" if score.view == CENTRED else ", not centred"
    null = _all(score.null.values) if score.null else NONE
    return [f"{score.map}, {score.rows} rows{raw}", interval(score.estimate), plain(score.chance, 3), null]


def _all(values: tuple[float, ...]) -> str:
    """The permutations' range where there are several."""
    low, high = plain(min(values), 4), plain(max(values), 4)
    return low if len(values) == 1 else f"{low} to {high}"


def _lines(label: str, one: AlignmentFound) -> Iterator[str]:
    if one.alignment is None:
        yield f"{label} is tied: input and output are one table ({one.names[0]}), so there is nothing to align."
    else:
        yield from _aligned(label, one.alignment)
    if one.unusable:
        yield f"Left out of {label}: {count(one.unusable)} of its tokens, whose rows are zero, repeated or not finite."
    yield from (f"{label}: {note}." for note in one.notes)


def _seen(score: Score) -> str:
    if score.map == IDENTITY:
        return "tokens"
    return "tokens that the map has not seen" if score.rows == HELD_OUT else "tokens that the map was fitted on"


def _aligned(label: str, found: Alignment) -> Iterator[str]:
    scores = held_out(found)
    for score in sorted(scores, key=lambda score: score.map != ORTHOGONAL):
        yield (
            f"{label}, {spelled(score.map)}: a token's input row and output row have a mean cosine of "
            f"{interval(score.estimate)} on {count(score.estimate.rows)} "
            f"{_seen(score)}; {against_null(score)}."
        )
    near, alike, norms = found.neighbours, found.similarity, found.norms
    if near is not None:
        yield (
            f"{label}: {near.estimate.value:.1%} [{near.estimate.low:.1%}, {near.estimate.high:.1%}] of a token's "
            f"{near.k} nearest neighbours are the same in both tables; chance is {near.chance:.2%}."
        )
    yield (
        f"{label}: the two tables' CKA is {plain(alike.cka.value, 3)} (permuted rows {plain(alike.cka.chance, 3)}), "
        f"and their rows' norms correlate by {interval(norms.spearman)} in rank "
        f"(0 ± {plain(1.96 * norms.chance, 3)} by chance)."
    )
    fitted = next((s for s in found.scores if (s.map, s.rows, s.view) == (ORTHOGONAL, FITTED, CENTRED)), None)
    if fitted is not None and fitted not in scores:
        yield (
            f"{label}: on the rows that the rotation was fitted on the cosine is {plain(fitted.estimate.value, 3)}, "
            f"where noise alone gives {plain(fitted.chance, 3)}; published scores are of this kind."
        )
    yield from (f"{label}: no {name} map, because {why}." for name, why in found.left_out)
