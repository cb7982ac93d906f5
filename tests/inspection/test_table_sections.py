"""What the sections of tables say: answers, numbers beside their chance, curves, views, lists."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tiewise.analysis.align_tables import AlignSettings, align, closer
from tiewise.analysis.estimates import Estimate, correlation_interval
from tiewise.analysis.row_directions import anisotropy, moments, plane
from tiewise.analysis.row_pairs import one_vocabulary
from tiewise.analysis.single_rows import NearUnused, RowState, Suspect, norms_of
from tiewise.analysis.token_contexts import contexts, grouped
from tiewise.analysis.token_table import HeldTable
from tiewise.analysis.token_texts import Groups, by_frequency
from tiewise.inspection.sections import alignment, tokens, which_end
from tiewise.inspection.tables_over_seeds import (
    AGAIN,
    CKA,
    CKA_CURVE,
    OTHER_SEED,
    SAME_SEED,
    Again,
    Leaning,
    OverSeeds,
)
from tiewise.report.figures import panels

ROWS, WIDTH = 400, 8
QUICK = AlignSettings(permutations=2, sampled=200, subspaces=(4,))
NAMES = ("embed", "head")


def gaussian(seed):
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH))


@pytest.fixture(scope="module")
def unlike():
    return align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK)


def one_model(found, names=NAMES):
    return alignment.AlignmentFound(found is None, names, (ROWS, ROWS), (WIDTH, WIDTH), 3, found, ("a note",))


def about(value, half=0.01, n=3):
    return Estimate(value, value - half, value + half, n)


# --- alignment


def test_every_score_stands_beside_what_chance_gives(unlike):
    found = alignment.found_of(one_model(unlike))
    for name, words in (("identity", "as they stand"), ("orthogonal", "after the best rotation")):
        score, q = unlike.score(name), found[words]
        assert (q.value, q.low, q.high, q.n) == (*vars(score.estimate).values(),)
        assert (q.chance, q.null) == (0.0, score.null.values)
        fitted = found[f"{words}, on rows it was fitted on"]
        assert (fitted.value, fitted.chance) == (unlike.score(name, "fitted").estimate.value, fitted.chance)
    assert found["after the best rotation, on rows it was fitted on"].chance > 0.1
    near = unlike.neighbours
    assert (found["nearest 10 in common"].value, found["nearest 10 in common"].chance) == (
        near.estimate.value,
        near.chance,
    )
    assert found["CKA"].chance == unlike.similarity.cka.chance
    assert found["norms, by rank"].value == unlike.norms.spearman.value
    assert (found["tokens left out"].value, found["tokens compared"].value) == (3, ROWS)
    assert found.answer == "no more than by chance"
    assert found.notes == ("a note",)


def test_only_two_stored_tables_as_they_stand_ask_whether_one_would_do(unlike):
    asked = [q.name for q in alignment.found_of(one_model(unlike)).quantities if q.question]
    assert asked == ["as they stand"]
    assert not any(q.question for q in alignment.found_of(one_model(unlike, ("embed", "embed"))).quantities)


def test_a_tied_model_has_nothing_to_align():
    found = alignment.found_of(one_model(None))
    assert (found.answer, found.quantities) == ("they are one table", ())


def test_where_nothing_was_held_out_fitted_scores_are_told_with_their_own_chance():
    both = align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), replace(QUICK, held_out=0))
    found = alignment.found_of(one_model(both))
    assert found["after the best rotation"].value == both.score("orthogonal", "fitted").estimate.value
    assert found["after the best rotation"].chance > 0.1
    assert "fitted on" in found["after the best rotation"].why
    assert not any(q.question for q in found.quantities)


def test_spectra_and_principal_angles_are_curves(unlike):
    curves = {(curve.name, curve.which): curve for curve in alignment.found_of(one_model(unlike)).curves}
    assert curves["Spectra of both tables", "input"].y == unlike.similarity.spectrum_a.values
    assert curves["Do the leading directions agree?", "4 over tokens"].y == unlike.similarity.subspaces[0].cosines


# --- which end


@pytest.fixture(scope="module")
def across(unlike):
    pairs = one_vocabulary(ROWS, ROWS)
    like = align(gaussian(1) + 0.3 * gaussian(2), gaussian(1), pairs, QUICK)
    found = closer(gaussian(1) + 0.3 * gaussian(2), gaussian(0), gaussian(1), pairs, QUICK)
    ends = which_end.EndPair("table", "input", unlike), which_end.EndPair("table", "output", like)
    return which_end.AcrossFound(
        ("<one>", "two"), (True, False), (ROWS, ROWS), ROWS, 3, ends, 0, found, ("<one>: a note",)
    )


def test_one_table_is_held_against_both_of_the_other(across):
    found = which_end.found_of(across)
    assert found.answer.startswith("the output of two after the best rotation; as they stand the output")
    lean = {lean.measure: lean for lean in across.closer.leans if lean.view == "centred"}["orthogonal"]
    scores = {q.of: q for q in found.quantities if q.name == "after the best rotation" and "–" not in q.of}
    assert [scores[f"{end} of two"].value for end in ("input", "output")] == [lean.input.value, lean.output.value]
    assert found["output − input, after the best rotation"].value == lean.difference.value
    (kin, note) = found.notes
    assert kin.startswith("<one> table – two output: a cosine of 0.9")
    assert note == "<one>: a note"
    assert found["tokens in both vocabularies"].value == ROWS
    titles = [panel.title for panel in panels({"<one>": found.about("<one>")})]
    assert titles[:2] == ["The table of <one> against both of two", "Output less input, for <one>"]


@pytest.mark.parametrize(("tied", "said"), [((True, True), "one table"), ((False, False), "two tables")])
def test_two_models_of_one_kind_ask_no_question(across, tied, said):
    found = which_end.found_of(replace(across, tied=tied, one=None, closer=None))
    assert found.answer == f"no question here: both models have {said}"


def over_seeds(difference=0.3, without=0.02, seeds=OTHER_SEED, counted=1000):
    low = [about(0.2), about(0.5), about(0.3)]
    corrected = lambda x: (about(0.4), about(0.4 + x), about(x, 0.1)) if seeds == OTHER_SEED else ()  # noqa: E731
    pairs = ((1, 2, 0.2, 0.5), (2, 1, 0.2, 0.5))
    leanings = (
        Leaning("tied", "identity", SAME_SEED, about(0.9), about(0.1), about(-0.8), pairs),
        Leaning("tied", CKA, seeds, *low, pairs, *corrected(difference)),
        Leaning("tied", "orthogonal", seeds, *low, pairs),
        *((Leaning("tied", CKA_CURVE, seeds, *low, pairs, *corrected(without)),) if counted else ()),
    )
    again = (Again(AGAIN.format("untied", "output"), "orthogonal", about(0.7), ((1, 2, 0.7),)),)
    chance = {"identity": 0.0, "orthogonal": 0.0, CKA: 0.0, CKA_CURVE: 0.0}
    share = {"untied output": about(0.48)} if counted else {}
    left_out = ("tied, seed 3: diverged",)
    return OverSeeds("untied", ("tied",), (1, 2, 3), 4000, chance, leanings, again, left_out, counted, share)


def test_a_lean_is_never_told_without_what_is_left_of_it_when_frequency_is_taken_out():
    found = which_end.found_over_seeds(over_seeds(), "tied")
    assert found.answer == (
        "it leans to its output table; with frequency taken out it shows no lean to either table of untied"
    )
    missing = which_end.found_over_seeds(over_seeds(counted=None), "tied")
    assert missing.answer.endswith("not known, as the training text is not there")
    assert which_end.found_over_seeds(over_seeds(seeds=SAME_SEED), "tied").answer == (
        "it leans to its output table after the best rotation"
    )


def test_over_seeds_every_number_is_there_beside_training_again():
    found = which_end.found_over_seeds(over_seeds(), "tied")
    named = {(q.name, q.of): q.value for q in found.quantities}
    assert named["after the best rotation", "tied – untied output"] == 0.5
    assert named["after the best rotation", "untied output, trained again"] == 0.7
    assert named["corrected output − input, by CKA above chance", ""] == 0.3
    assert named["variance that is a curve in log frequency", "untied output"] == 0.48
    assert found["variance that is a curve in log frequency"].chance == 3 / 3999
    assert any("rows still have a cosine of 0.90" in note for note in found.notes)
    assert found.notes[-1] == "left out: tied, seed 3: diverged"
    assert found.listings[0].rows[2] == ("tied 1, untied 2", CKA, "0.200000", "0.500000")
    titles = {panel.title for panel in panels({"tied": found.about("tied")})}
    assert titles == {
        "Which end does the table of tied resemble?",
        "Output less input, for tied",
        "What tied has in common with either table",
    }


# --- tokens

V = 200
TEXT = np.random.default_rng(0).permutation(np.repeat(np.arange(150), np.arange(150) + 1))
COUNTS = np.bincount(TEXT, minlength=V)
HALVES = Groups(("Latin", "Han"), np.arange(V) // 100)


def table_found(name, values, near):
    table = HeldTable(values)
    sums = moments(table)
    norms = norms_of(sums.norms, COUNTS, by_frequency(COUNTS), HALVES)
    state = RowState((3,), ((5, 6),), 1, 2, 50, near)
    in_plane = plane(table, sums, np.arange(40))
    return tokens.TableTokens(name, False, *values.shape, norms, anisotropy(table, sums), in_plane, state)


def contexts_found(text):
    around = contexts(text, V)
    named = (tokens.Notable(7, "<b>x</b>", 101, 0.6, 0.1),)
    levels = around.weighted(around.plug_in), around.weighted(around.coin), around.guessed
    return tokens.ContextsFound(*levels, grouped(around, by_frequency(COUNTS)), grouped(around, HALVES), named)


def tokens_found(signs=(-1.0, -1.0), near=None, text=TEXT):
    made = tuple(
        table_found(
            name, np.random.default_rng(1).standard_normal((V, 6)) * (1 + np.log1p(COUNTS))[:, None] ** sign, near
        )
        for name, sign in zip(("input", "output"), signs, strict=True)
    )
    labels, counts = tuple(["the", "<b>", "café", "$x$"] * 10), tuple(map(int, COUNTS[:40]))
    around = contexts_found(text)
    return tokens.TokensFound(made, len(text), 150, around, tuple(range(40)), labels, counts, 12, 0, ())


@pytest.fixture(scope="module")
def shorter():
    return tokens_found()


def test_tokens_answer_how_norms_follow_frequency(shorter):
    assert tokens.found_of(shorter).answer == "frequent tokens have shorter rows (input, output) than rare ones"
    apart = tokens.found_of(tokens_found((1.0, -1.0)))
    assert apart.answer == "frequent tokens have longer rows (input) and shorter rows (output) than rare ones"
    norms = shorter.tables[0].norms
    weak = replace(norms.frequency, spearman=replace(norms.frequency.spearman, value=1.9 * norms.frequency.chance))
    table = replace(shorter.tables[0], norms=replace(norms, frequency=weak))
    assert "not shown to be longer or shorter" in tokens.found_of(replace(shorter, tables=(table,))).answer


def test_both_ends_norms_are_evidence_with_the_p_at_which_their_intervals_part(shorter):
    (q,) = [q for q in tokens.found_of(tokens_found((1.0, -1.0))).quantities if q.question]
    assert (q.speaks, q.below, q.chance) == ("two tables", "neither", 0.0)
    assert q.p < 1e-6
    (same,) = [q for q in tokens.found_of(shorter).quantities if q.question]
    assert (same.speaks, same.value) == ("neither", 0.0)
    one = replace(shorter, tables=shorter.tables[:1])
    assert not any(q.question for q in tokens.found_of(one).quantities)


def test_tokens_carry_the_measured_numbers(shorter):
    found, table = tokens.found_of(shorter), shorter.tables[1]
    assert found["norm by frequency, output"].value == table.norms.frequency.spearman.value
    assert found["mean cosine, output"].value == table.anisotropy.mean_cosine.value
    assert found["directions filled, input"].chance == shorter.tables[0].anisotropy.participation_chance
    assert [found[f"{name}, input"].value for name in ("rows of zeros", "rows equal to another")] == [1, 2]
    assert found["rows of no token"].value == 12
    assert found["left and right contexts differ by"].value == shorter.contexts.held_out.value
    curves = {(curve.name, curve.which): curve for curve in found.curves}
    lengths = curves["Length of rows by token frequency", "input"]
    assert lengths.y == tuple(group.median for group in shorter.tables[0].norms.bins)
    assert lengths.ticks == ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")
    assert curves["How many directions a table fills", "input"].y[-1] == pytest.approx(1)
    assert ("How many directions a table fills", "Gaussian, 200 × 6") in curves
    assert curves["Left and right contexts by script", "guessed"].ticks == ("Latin", "Han")
    assert {listing.name for listing in found.listings} >= {"Rows that say little", "Row norms by script"}


def test_rows_near_unused_ones_are_candidates():
    near = NearUnused(12, 0.5, 3, 0.016, (Suspect(9, 0.1, 0.99),))
    found = tokens.found_of(tokens_found(near=near))
    assert found["rows in use near unused ones, input"].value == 3
    assert "maybe untrained" in found["rows in use near unused ones, input"].why
    rows = {row[1]: row[2] for listing in found.listings if "little" in listing.name for row in listing.rows}
    assert rows == {"zero": "#3", "equal": "#5, #6", "near unused ones": "#9 (cosine 0.990)"}


def test_every_table_is_drawn_in_a_plane_and_strangers_text_is_escaped(shorter):
    found = tokens.found_of(shorter)
    assert [points.name for points in found.points] == [f"Rows in two dimensions: {end}" for end in ("input", "output")]
    assert found.points[0].xy == shorter.tables[0].plane.points
    share = shorter.tables[1].plane.shares[0]
    assert f"{share:.1%} of the variance" in found.points[1].axes[0]
    drawn = {panel.title: panel for panel in panels({"<m>": found.about("<m>")})}
    view = drawn["Rows in two dimensions: input: <m>"].figure
    assert sum(len(trace.x) for trace in view.data if trace.mode == "markers") == 40
    texts = [text for trace in view.data for text in trace.text or ()]
    assert "&lt;b&gt;" in texts
    assert not any("<b>" in text for text in texts)


def test_without_a_text_tokens_answer_with_directions(shorter):
    tables = tuple(replace(t, norms=replace(t.norms, frequency=None, bins=())) for t in shorter.tables)
    found = tokens.found_of(replace(shorter, tables=tables, contexts=None, counts=(), text=0, seen=0))
    assert found.answer.startswith("without a text")
    assert {curve.name for curve in found.curves} == {"How many directions a table fills"}
    assert found.points[0].legend == ("tokens",)
    assert not any(math.isnan(q.value) for q in found.quantities)


def test_correlations_part_at_the_p_where_their_intervals_meet(shorter):
    low, high = correlation_interval(0.1, 100), correlation_interval(0.5, 100)
    tables = [
        replace(t, norms=replace(t.norms, frequency=replace(t.norms.frequency, spearman=e)))
        for t, e in zip(shorter.tables, (low, high), strict=True)
    ]
    found = tokens.found_of(replace(shorter, tables=tuple(tables)))["difference of both ends' correlations"]
    z = stats.norm.isf(found.p / 2) / math.sqrt(97)
    assert math.tanh(math.atanh(0.1) + z) == pytest.approx(math.tanh(math.atanh(0.5) - z))
