"""Are input and output table alike?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiewise.analysis.align_tables import FITTED, HELD_OUT, Alignment, AlignSettings, Score, align
from tiewise.analysis.model_ends import ends_of
from tiewise.analysis.row_pairs import one_vocabulary
from tiewise.analysis.table_maps import CENTRED, IDENTITY
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.found import ONE, TWO, Curve, Found, Quantity
from tiewise.core.numerals import plain
from tiewise.inspection.request import Subject
from tiewise.inspection.section import Bench, section

LARGE = 2e11  # rows × d²: from here on `sized` permutes once
MAPS = {
    "identity": "as they stand",
    "orthogonal": "after the best rotation",
    "linear": "after the best linear map",
    "neighbours": "by nearest neighbours in common",
    "CKA": "by CKA above chance",
    "CKA, frequency out": "by CKA above chance, frequency taken out",
    "CKA, frequency out (line)": "by CKA above chance, a line in log frequency taken out",
}


@dataclass(frozen=True)
class AlignmentFound:
    """Input and output table of one model."""

    tied: bool  # whether both ends are one table; there is then nothing to align
    names: tuple[str, str]  # stored names of the input and the output table
    rows: tuple[int, int]
    widths: tuple[int, int]  # as the model meets them
    unusable: int  # tokens left out because a row of theirs is zero, repeated or not finite
    alignment: Alignment | None  # None where the model is tied
    notes: tuple[str, ...]  # what a reader must know of these tables


@section(asks="Are input and output table alike?", place=40)
def alignment(subject: Subject, bench: Bench) -> Found:
    """Align the input table of a model with its output table."""
    request = bench.request
    return found_of(alignment_of(subject.folder, seed=request.seed, held_out=request.effort.held_out))


def alignment_of(
    folder: Folder, settings: AlignSettings | None = None, seed: int = 0, held_out: float = AlignSettings.held_out
) -> AlignmentFound:
    """Align the input table of one model with its output table; a tied model has one table and nothing to align.

    Args:
        folder: an opened checkpoint.
        settings: what to measure; by default `sized`.
        seed: of the default settings.
        held_out: of the default settings; 0 fits maps on all rows and scores all.

    Raises:
        CheckpointError: no output head, quantised tables, or as `align`.
    """
    ends = ends_of(folder)
    rows, widths = (ends.input.rows, ends.output.rows), (ends.input.width, ends.output.width)
    if ends.tied:
        return AlignmentFound(True, ends.names, rows, widths, 0, None, ends.notes)
    every = one_vocabulary(*rows)
    mask = ends.unusable()
    pairs = every.without(mask, mask)
    found = align(ends.input, ends.output, pairs, settings or sized(len(pairs), max(widths), seed, held_out))
    return AlignmentFound(False, ends.names, rows, widths, len(every) - len(pairs), found, ends.notes)


def sized(pairs: int, width: int, seed: int = 0, held_out: float = AlignSettings.held_out) -> AlignSettings:
    """Return settings for tables of this size: the usual ones; one permutation in place of three for large tables."""
    permutations = 1 if pairs * width**2 > LARGE else AlignSettings.permutations
    return AlignSettings(seed=seed, permutations=permutations, held_out=held_out)


def found_of(found: AlignmentFound) -> Found:
    """Say how alike the two tables are by every measure, and what unrelated tables would give."""
    one = found.alignment
    if one is None:
        return Found("they are one table", notes=(f"input and output are {found.names[0]}", *found.notes))
    decides = len(set(found.names)) == 2  # one stored table behind two maps is no choice of two
    quantities = tuple(measures(one, decides=decides))
    return Found(
        answer=_answer(quantities),
        quantities=(
            *quantities,
            Quantity("tokens left out", found.unusable, main=False, why="a row is zero, repeated or not finite"),
        ),
        curves=tuple(_spectra(one)),
        notes=(*left_out(one), *found.notes),
    )


def _answer(quantities: tuple[Quantity, ...]) -> str:
    above = [q.name for q in quantities if q.main and q.unit == "cosine" and q.low > max(q.chance or 0.0, *q.null)]
    return f"more than by chance {', and '.join(above)}" if above else "no more than by chance"


def spelled(measure: str) -> str:
    """A measure in words: "after the best rotation"."""
    return MAPS.get(measure, f"after the best map of {measure}")


def measures(found: Alignment, of: str = "", decides: bool = False) -> Iterator[Quantity]:
    """Every measure of two tables: maps on rows that they have not seen first.

    Args:
        found: the measured alignment.
        of: whose two tables they are, where the section's model does not say it.
        decides: whether the two could as well have been one table.
    """
    title = f"The two tables of {of}" if of else "Input against output"
    unseen = HELD_OUT if found.fitted_rows < found.pairs else FITTED
    first = [s for s in found.scores if (s.rows, s.view) == (unseen, CENTRED)]
    for score in (*first, *(s for s in found.scores if s not in first)):
        main = score in first
        asked = decides and (score.map, score.rows, score.view) == (IDENTITY, HELD_OUT, CENTRED)
        yield Quantity.of_estimate(
            _name(score, main), score.estimate, chance=score.chance, null=score.null.values if score.null else (),
            unit="cosine", of=of, main=main and not of, figure=title if main else "", why=_why(score, asked),
            question="Are input and output table alike?" if asked else "", below=TWO, above=ONE,
        )  # fmt: skip
    near, alike, norms = found.neighbours, found.similarity, found.norms
    if near is not None:
        yield Quantity.of_estimate(
            f"nearest {near.k} in common", near.estimate, chance=near.chance, null=near.permuted, unit="%", of=of,
            main=not of, figure=title, why="tokens that are nearest neighbours in both tables",
        )  # fmt: skip
    yield Quantity(
        "CKA", alike.cka.value, n=alike.cka.rows, chance=alike.cka.chance, unit="CKA", of=of, main=not of, figure=title
    )
    around = f"0 ± {plain(1.96 * norms.chance, 3)} by chance"
    for name, value in (("norms, by rank", norms.spearman), ("norms", norms.pearson)):
        main = value is norms.spearman
        yield Quantity.of_estimate(
            name, value, chance=0.0, unit="correlation", of=of, main=main and not of, figure=title if main else "",
            why=around,
        )  # fmt: skip
    small: dict[str, Any] = {"of": of, "main": False}
    for shared in alike.subspaces:
        over = "tokens" if shared.side == "left" else "coordinates"
        name = f"{shared.k} leading directions over {over}"
        yield Quantity(name, shared.value, chance=shared.chance, unit="mean squared cosine", **small)
    for end, spectrum in (("first", alike.spectrum_a), ("second", alike.spectrum_b)):
        yield Quantity(f"directions that the {end} table fills", spectrum.participation, unit="(Σs²)²/Σs⁴", **small)
        yield Quantity(f"mean row's energy, {end} table", spectrum.mean_share, unit="%", **small)
    yield Quantity("tokens compared", found.pairs, **small, why=found.matched)
    yield Quantity("tokens that maps were fitted on", found.fitted_rows, **small)
    yield Quantity("tokens with a row of zeros", found.zero_rows, **small, why="their cosine counts as 0")
    yield Quantity("error of products", found.error, unit="relative", **small, why=f"in {found.precision}")


def _name(score: Score, main: bool) -> str:
    said = spelled(score.map) if score.view == CENTRED else f"{spelled(score.map)}, not centred"
    return said if main else f"{said}, on rows {'held out' if score.rows == HELD_OUT else 'it was fitted on'}"


def _why(score: Score, asked: bool) -> str:
    if asked:
        return "above chance the two stored tables point the same way row by row, whether trained or started so"
    seen = "tokens that the map has not seen" if score.rows == HELD_OUT else "tokens that the map was fitted on"
    return f"{seen}; unrelated tables give {plain(score.chance, 3)} ± {plain(1.96 * score.chance_deviation, 3)}"


def left_out(found: Alignment) -> Iterator[str]:
    """Say which maps do not apply, and why."""
    return (f"no {name} map: {why}" for name, why in found.left_out)


def _spectra(found: Alignment) -> Iterator[Curve]:
    for end, spectrum in (("input", found.similarity.spectrum_a), ("output", found.similarity.spectrum_b)):
        kept = [value for value in spectrum.values if value > 0]
        yield Curve(
            "Spectra of both tables", tuple(range(1, len(kept) + 1)), tuple(kept), which=end, along="direction",
            unit="singular value", log=True, log_x=True,
            why="Of each table less its mean row. A level line fills all directions evenly, a steep one few.",
        )  # fmt: skip
    for shared in found.similarity.subspaces:
        over = "tokens" if shared.side == "left" else "coordinates"
        yield Curve(
            "Do the leading directions agree?", tuple(range(1, shared.k + 1)), shared.cosines, along="direction",
            which=f"{shared.k} over {over}", unit="cosine of the principal angle",
            why="Cosines of the angles between the leading directions of both tables: 1 is the same direction.",
        )  # fmt: skip
