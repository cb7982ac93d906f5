"""Answers, quantities, curves, views and lists of the sections about tables, against the functions they call."""

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.linalg
from scipy import stats
from tests.inspection.tables.tiny_tables import factored, llama

from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.estimates import Estimate, correlation_interval
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.inspection import inspect
from tiewise.inspection.sections import tokens
from tiewise.inspection.sections.alignment import alignment_of
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.inspection.sections.which_end import _answer, across, measurement_over_seeds
from tiewise.inspection.tables.align_tables import CKA, CKA_CURVE, IDENTITY, ORTHOGONAL, Lean, Score, align, nearer_end
from tiewise.inspection.tables.bigram_counts import contexts
from tiewise.inspection.tables.model_tables import ArrayTable, one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings
from tiewise.inspection.tables.token_rows import directions, mean_cosine, moments, norms_by_count, plane
from tiewise.inspection.tables_over_seeds import AGAIN, OTHER_SEED, SAME_SEED, Leaning, OverSeeds
from tiewise.report.figures import panels
from tiewise.report.views import notes

ROWS, WIDTH = 400, 8
QUICK = AlignSettings(permutations=2, sampled=200, subspaces=(4,))


def gaussian(seed, rows=ROWS, width=WIDTH):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def make_estimate(value, half=0.01, n=3):
    return Estimate(value, value - half, value + half, n)


# --- alignment


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("two") / "two", gaussian(0), gaussian(1), WORDS)


def test_alignment_of_reports_every_score_with_its_chance_level(untied_model):
    found, unlike = (
        alignment_of(untied_model, QUICK),
        align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK),
    )
    for name, words in (("identity", "as they stand"), ("orthogonal", "after the best rotation")):
        score, q = unlike.score(name), found[words]
        assert (q.value, q.low, q.high, q.n) == pytest.approx(tuple(vars(score.estimate).values()))
        assert (q.chance, q.null) == (0.0, pytest.approx(score.null))
        fitted, chance = found[f"{words}, on rows it was fitted on"], unlike.score(name, "fitted").chance
        assert (fitted.value, fitted.chance) == pytest.approx((unlike.score(name, "fitted").estimate.value, chance))
    assert found["after the best rotation, on rows it was fitted on"].chance > 0.1
    for name, score in (("nearest 10 in common", "neighbours"), ("CKA", "CKA"), ("norms, by rank", "norms, by rank")):
        own = unlike.score(score)
        assert (found[name].value, found[name].chance) == pytest.approx((own.estimate.value, own.chance))
    assert (found["tokens left out"].value, found["tokens compared"].value) == (0, ROWS)
    assert found.answer == "no similarity of the two tables above chance was detected"
    curves = {(curve.name, curve.which): curve for curve in found.curves}
    assert curves["Spectra of both tables", "input"].y == pytest.approx(unlike.spectra[0].values)
    assert curves["Do the leading directions agree?", "4 over tokens"].y == pytest.approx(unlike.subspaces[0].cosines)


def test_alignment_of_leaves_out_unusable_rows_and_skips_a_tied_model(tmp_path):
    table, turned = gaussian(0), gaussian(0) @ scipy.linalg.qr(gaussian(1, WIDTH).astype(float))[0].astype(np.float32)
    table[5], table[[7, 9]], turned[13] = 0, table[11], np.nan
    found = alignment_of(llama(tmp_path / "two", table, turned), QUICK)
    assert (found["tokens left out"].value, found["tokens compared"].value) == (5, ROWS - 5)
    assert found["after the best rotation"].value > 0.9999
    assert found.answer.startswith("the two tables are more alike than chance after the best rotation")
    found = alignment_of(llama(tmp_path / "one", gaussian(0)))
    assert (found.answer, found.quantities) == ("the model has one table", ())
    assert found.notes == ("input and output are model.embed_tokens.weight",)


def test_alignment_of_asks_the_tying_question_only_for_two_stored_tables(untied_model, tmp_path):
    assert [q.name for q in alignment_of(untied_model, QUICK).quantities if q.question] == ["as they stand"]
    one = factored(tmp_path / "m", gaussian(0, width=4), gaussian(1, 8, 4), gaussian(2, 4, 8))
    assert not any(q.question for q in alignment_of(one, QUICK).quantities)


def test_alignment_of_reports_fitted_scores_if_no_rows_are_held_out(untied_model):
    found = alignment_of(untied_model, held_out=0)
    both = align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), AlignSettings(held_out=0))
    rotated = found["after the best rotation"]
    assert rotated.value == pytest.approx(both.score("orthogonal", "fitted").estimate.value)
    assert rotated.chance > 0.1
    assert "fitted on" in rotated.why
    assert not any(q.question for q in found.quantities)


# --- which end


@pytest.mark.parametrize("tied_first", [True, False])
def test_across_finds_the_end_of_a_tied_table_by_token_text(untied_model, tied_first, tmp_path):
    """The tied table is the other model's output table, rotated, with fewer rows in another order."""
    order = np.random.default_rng(2).permutation(ROWS)[:300]
    turned = gaussian(1)[order] @ scipy.linalg.qr(gaussian(3, WIDTH).astype(float))[0]
    made = (turned + 0.5 * gaussian(4, 300)).astype(np.float32)
    planted = (turned * made).sum(1) / np.linalg.norm(turned, axis=1) / np.linalg.norm(made, axis=1)
    one = llama(tmp_path / "one", made, words=[WORDS[row] for row in order])
    models, labels = ((one, untied_model), ("a", "b")) if tied_first else ((untied_model, one), ("b", "a"))
    found = across(*models, labels, QUICK)
    assert found.answer.startswith("the tied table is closest to the output table of b after the best rotation")
    assert found["tokens in both vocabularies"].value == 300
    apart = ("after the best rotation", "after the best linear map", "by nearest neighbours in common")
    assert all(found[f"output − input, {name}"].low > 0 for name in apart)
    scores = {q.of: q.value for q in found.quantities if q.name == apart[0]}
    first, second = (f"a table – b {end}" if tied_first else f"b {end} – a table" for end in ("input", "output"))
    assert abs(scores[first]) < 0.2
    assert scores[second] == pytest.approx(planted.mean(), abs=0.05)


def test_across_matches_nearer_end_and_notes_a_shared_initialization(untied_model, tmp_path):
    made = gaussian(1) + 0.3 * gaussian(2)
    found = across(llama(tmp_path / "one", made, made, WORDS), untied_model, ("<one>", "two"), QUICK)
    assert found.answer.startswith(
        "the tied table is closest to the output table of two after the best rotation, and by 3 of the 3 other measures"
    )
    leans = nearer_end(made, gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK)
    (lean,) = (lean for lean in leans if (lean.measure, lean.view) == ("orthogonal", "centred"))
    scores = {q.of: q for q in found.quantities if q.name == "after the best rotation" and "–" not in q.of}
    expected = pytest.approx([lean.input.value, lean.output.value])
    assert [scores[f"{end} of two"].value for end in ("input", "output")] == expected
    assert found["output − input, after the best rotation"].value == pytest.approx(lean.difference.value)
    assert found.notes[0].startswith("<one> table – two output: cosine 0.9")
    titles = [panel.title for panel in panels({"<one>": found.about("<one>")})]
    assert titles[:2] == ["The table of <one> against both of two", "Output less input, for <one>"]


def test_across_asks_no_question_for_two_models_of_the_same_kind(untied_model, tmp_path):
    for model, tables, kind in (
        (untied_model, 4, "two tables"),
        (llama(tmp_path, gaussian(2), words=WORDS), 1, "one table"),
    ):
        found = across(model, model, ("a", "b"), QUICK)
        assert found.answer == f"nothing to compare: both models have {kind}"
        same = {q.of: q.value for q in found.quantities if q.name == "as they stand"}
        assert len(same) == tables
        assert max(same.values()) == pytest.approx(1)
        assert not any(q.name.startswith("output − input") for q in found.quantities)


def test_across_notes_the_maps_left_out_for_tables_of_different_width(untied_model, tmp_path):
    found = across(untied_model, llama(tmp_path, gaussian(1, width=7), words=WORDS), settings=QUICK)
    assert "as they stand" not in {q.name for q in found.quantities}
    assert f"no identity map: widths {WIDTH} and 7 differ" in found.notes


def test_across_and_alignment_of_refuse_models_they_cannot_compare(untied_model, tmp_path):
    far = llama(tmp_path / "far", gaussian(1), words=[*WORDS[-9:], *(f"x{row}" for row in range(ROWS - 9))])
    unnamed = llama(tmp_path / "unnamed", gaussian(1))
    headless = llama(tmp_path / "a", gaussian(0), architectures=["LlamaForSequenceClassification"])
    lost = llama(tmp_path / "b", gaussian(0), tie_word_embeddings=False)
    for ask, said in (
        (lambda: across(untied_model, far, settings=QUICK), "400 and 400 rows share 9 usable tokens; at least 16"),
        (lambda: across(untied_model, unnamed, settings=QUICK), r"no tokenizer\.json"),
        (lambda: alignment_of(headless), "without an output head; give one with a token head"),
        (lambda: alignment_of(lost), "says untied and stores no head"),
    ):
        with pytest.raises(CheckpointError, match=said):
            ask()


def over_seeds(difference=0.3, without=0.02, seeds=OTHER_SEED, counted=1000):
    low = [make_estimate(0.2), make_estimate(0.5), make_estimate(0.3)]

    def corrected(x):
        found = {"input": make_estimate(0.4), "output": make_estimate(0.4 + x), "difference": make_estimate(x, 0.1)}
        return {"arm": "tied", "seeds": seeds, "pairs": pairs, "corrected": found if seeds == OTHER_SEED else {}}

    pairs = ((1, 2, 0.2, 0.5), (2, 1, 0.2, 0.5))
    leanings = (
        Leaning(
            "identity",
            make_estimate(0.9),
            make_estimate(0.1),
            make_estimate(-0.8),
            arm="tied",
            seeds=SAME_SEED,
            pairs=pairs,
        ),
        Leaning(CKA, *low, **corrected(difference)),
        Leaning("orthogonal", *low, arm="tied", seeds=seeds, pairs=pairs),
        *((Leaning(CKA_CURVE, *low, **corrected(without)),) if counted else ()),
    )
    again = {(AGAIN.format("untied", "output"), "orthogonal"): ((1, 2, 0.7),)}
    share = {"untied output": make_estimate(0.48)} if counted else {}
    left_out = ("tied, seed 3: diverged",)
    return OverSeeds("untied", ("tied",), (1, 2, 3), 4000, leanings, again, left_out, counted, share)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({}, "to the output table of untied; without word frequency no lean to either table of untied was detected"),
        ({"without": 0.3}, "to the output table of untied, also without word frequency"),
        ({"counted": None}, "to the output table of untied; removing word frequency needs the training text"),
        ({"seeds": SAME_SEED}, "to the output table of untied after the best rotation"),
    ],
)
def test_measurement_over_seeds_states_the_lean_with_frequency_taken_out(given, answer):
    assert measurement_over_seeds(over_seeds(**given), "tied").answer == f"the tied table is closer {answer}"


def test_measurement_over_seeds_reports_all_quantities_and_retraining_scores():
    found = measurement_over_seeds(over_seeds(), "tied")
    named = {(q.name, q.of): q.value for q in found.quantities}
    assert named["after the best rotation", "tied – untied output"] == 0.5
    assert named["after the best rotation", "untied output, trained again"] == 0.7
    assert named["corrected output − input, by CKA above chance", ""] == 0.3
    assert named["variance that is a curve in log frequency", "untied output"] == 0.48
    assert found["variance that is a curve in log frequency"].chance == 3 / 3999
    assert any("share a start: cosine 0.90" in note for note in found.notes)
    assert found.notes[-1] == "left out: tied, seed 3: diverged"
    assert found.listings[0].rows[2] == ("tied 1, untied 2", CKA, "0.200000", "0.500000")
    titles = {panel.title for panel in panels({"tied": found.about("tied")})}
    assert titles == {
        "Which end does the table of tied resemble?",
        "Output less input, for tied",
        "What tied has in common with either table",
    }


# --- tokens

V = 60
WORDS = ["<unk>", *(f"w{chr(97 + row // 26)}{chr(97 + row % 26)}" for row in range(39)), *"0123456789", *"абвгд"]
WORDS += [f"<reserved_{row}>" for row in range(ROWS - len(WORDS))]


def text(length=3000, vocabulary=V - 5):
    return np.random.default_rng(0).zipf(1.3, length) % vocabulary


COUNTS = np.bincount(text(), minlength=V)


def scaled(*signs):
    """Return tables whose row norms follow the text's counts, with one exponent each."""
    long = (1 + np.log1p(COUNTS))[:, None]
    return [(np.roll(gaussian(1, V), k, axis=1) * long**sign).astype(np.float32) for k, sign in enumerate(signs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("tokens") / "m", *scaled(-1.0, -1.0), WORDS[:V])


@pytest.fixture(scope="module")
def tokens_measurement(folder):
    return tokens_of(folder, text(), samples=20, seed=1)


def test_tokens_of_answers_how_norms_follow_frequency(tokens_measurement, tmp_path):
    assert tokens_measurement.answer == "frequent tokens have shorter rows (input, output)"
    apart = tokens_of(llama(tmp_path / "m", *scaled(1.0, -1.0)), text())
    assert apart.answer == "frequent tokens have longer rows (input) and shorter rows (output)"
    (q,) = [q for q in apart.quantities if q.question]
    assert (q.speaks, q.below, q.chance) == ("two tables", "neither", 0.0)
    assert q.p < 0.01
    (same,) = [q for q in tokens_measurement.quantities if q.question]
    assert (same.speaks, same.value) == ("neither", pytest.approx(0.0, abs=1e-12))
    weak = tokens_of(llama(tmp_path / "weak", gaussian(3, V), gaussian(4, V)), text())
    assert "no effect of frequency" in weak.answer


def test_apart_returns_the_p_value_at_which_two_intervals_touch():
    by_count = {
        name: Score("norms", correlation_interval(r, 100), 0.0) for name, r in (("input", 0.1), ("output", 0.5))
    }
    (found,) = tokens._apart(by_count)
    z = stats.norm.isf(found.p / 2) / math.sqrt(97)
    assert math.tanh(math.atanh(0.1) + z) == pytest.approx(math.tanh(math.atanh(0.5) - z))


def test_tokens_of_reports_the_measured_quantities(tokens_measurement):
    table = ArrayTable(scaled(-1.0)[0])
    sums, around = moments(table), contexts(text(), V)
    filled = next(q for q in directions("x", table, sums, 1, main=True) if q.name == "directions filled, x")
    decades = [sums.norms[COUNTS == 0], *(sums.norms[(10**d <= COUNTS) & (10 ** (d + 1) > COUNTS)] for d in range(5))]
    expected = {
        "norm by frequency, input": norms_by_count(sums.norms, COUNTS)[1].estimate.value,
        "mean cosine, input": mean_cosine(sums).value,
        "directions filled, input": filled.value,
        "mean norm, input, tokens of count 10–99": decades[2].mean(),
        "rows of no token": 5,
        "tokens of the text": 3000,
        "different tokens in it": len(set(text())),
        "left and right contexts differ by": around.by_part.mean(),
    }
    assert {name: tokens_measurement[name].value for name in expected} == pytest.approx(expected)
    curves = {(curve.name, curve.which): curve for curve in tokens_measurement.curves}
    lengths = curves["Length of rows by token frequency", "input"]
    quartiles = np.array([np.quantile(norms, [0.25, 0.5, 0.75]) for norms in decades if len(norms)])
    assert pytest.approx(quartiles) == np.array([lengths.low, lengths.y, lengths.high]).T
    assert lengths.ticks == ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")
    assert curves["How many directions a table fills", "input"].y[-1] == pytest.approx(1)
    assert ("How many directions a table fills", f"Gaussian, {V} × {WIDTH}") in curves
    assert set(curves["Left and right contexts by script", "guessed"].ticks) == {"Latin", "digits", "Cyrillic"}
    by_script = next(listing for listing in tokens_measurement.listings if listing.name == "Row norms by script")
    assert {("input: Latin", "39"), ("input: special tokens", "6")} <= {row[:2] for row in by_script.rows}


def test_tokens_of_draws_both_tables_in_one_plane_with_frequent_tokens(tokens_measurement):
    first, second = tokens_measurement.points
    shown = [WORDS.index(label) for label in first.labels]
    assert len(set(shown)) == 20
    assert set(np.argsort(-COUNTS, kind="stable")[:10]) <= set(shown)
    table = ArrayTable(scaled(-1.0)[0])
    assert np.array(first.xy) == pytest.approx(plane(table, moments(table), np.array(shown)))
    assert first.named == second.named
    share = tokens_measurement["variance along the first axis, output"].value
    assert second.axes[0] == f"first axis, {share:.1%} of the variance"
    drawn = {panel.title: panel for panel in panels({"<m>": tokens_measurement.about("<m>")})}
    view, _ = (drawn[f"Rows in two dimensions: {end}: <m>"].figure for end in ("input", "output"))
    assert sum(len(trace.x) for trace in view.data if trace.mode == "markers") == 20
    texts = [text for trace in view.data for text in trace.text or ()]
    assert not any("<unk>" in text for text in texts)  # text from an untrusted folder is escaped


def test_tokens_of_answers_with_directions_without_a_text(tmp_path):
    found = tokens_of(llama(tmp_path / "m", gaussian(0, V), gaussian(1, V)))
    assert found.answer.startswith("without a text")
    assert {curve.name for curve in found.curves} == {"How many directions a table fills"}
    assert found.points[0].legend == ("tokens",)
    assert found.points[0].labels[:2] == ("#0", "#1")
    assert not any(math.isnan(q.value) for q in found.quantities)
    assert not {"rows of no token", "rows whose token the text lacks, input"} & {q.name for q in found.quantities}
    assert any("no tokenizer.json" in note for note in found.notes)


def test_tokens_of_lists_rows_near_unused_rows_as_maybe_untrained(tmp_path):
    table = gaussian(0, V)
    table[-5:] = 5 + 0.1 * gaussian(1, 5)
    table[3], table[9] = 0, 5.01
    found = tokens_of(llama(tmp_path / "m", table, gaussian(2, V), WORDS[:V]))
    assert found["rows in use near unused ones, input"].value == 1
    assert "maybe untrained" in found["rows in use near unused ones, input"].why
    (little,) = (listing for listing in found.listings if listing.name == "Rows that say little")
    assert [row[:2] for row in little.rows[:2]] == [("input", "zero"), ("input", "near unused ones")]
    assert little.rows[1][2] == "#9 (cosine 1.000)"


def test_tokens_of_shows_a_factored_table_before_and_after_its_maps(tmp_path):
    made = factored(tmp_path / "m", gaussian(0, V, 4), gaussian(1, 10, 4), gaussian(2, 4, 10), WORDS[:V])
    found = tokens_of(made, text())
    filled = {curve.which: curve.y for curve in found.curves if curve.name == "How many directions a table fills"}
    assert [len(y) for y in filled.values()] == [4, 10, 10, 4, 10]
    assert filled["input after its map"][3] == pytest.approx(1)
    assert [q.name for q in found.quantities if "of zeros" in q.name] == ["rows of zeros, both ends"]


def test_tokens_of_compares_the_variance_of_leading_directions_before_and_after_a_map(tmp_path):
    """The oracle is numpy's singular values of the centred rows."""
    table, into, out = gaussian(0, V, 8), gaussian(1, 10, 8), gaussian(2, 8, 10)
    into[:, 2:] *= 0.1  # the input's map keeps two directions
    report = tokens_of(factored(tmp_path / "m", table, into, out, WORDS[:V]))

    def of_leading(rows):
        squares = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
        return squares[:2].sum() / squares.sum()

    before = of_leading(table)
    for end, rows in (("input", table @ into.T), ("output", table @ out)):
        after = of_leading(rows)
        assert report[f"variance in 2 of 8 directions, before the {end}'s map"].value == pytest.approx(before, rel=1e-5)
        assert report[f"variance in 2 of 8 directions, after the {end}'s map"].value == pytest.approx(after, rel=1e-5)
        sentence = f"{end}: the 2 leading of 8 directions have {before:.1%} of the rows' variance before the map"
        assert f"{sentence}, {after:.1%} after it" in report.notes
    assert of_leading(table @ into.T) > 0.9


def test_tokens_of_counts_reserved_tokens_as_unused_unless_the_text_has_them(tmp_path):
    words = ["<unk>", "reserved", "dummy", "<reserved_1>", "<reserved_2>", *(f"w{row}" for row in range(V - 7))]
    made = llama(tmp_path / "m", gaussian(0, V), gaussian(1, V), words)
    assert tokens_of(made)["rows of no token"].value == 4  # two reserved names, and two rows without a token
    assert tokens_of(made, text() % 4)["rows of no token"].value == 3


def test_tokens_of_is_deterministic_for_a_seed_and_reports_progress(folder):
    told = []
    with listen_to_progress(lambda *said: told.append(said)):
        once, again, other = (tokens_of(folder, text(), samples=30, seed=seed).points for seed in (3, 3, 4))
    assert once == again
    assert once[0].labels != other[0].labels
    assert told
    assert all(done <= total for _, done, total in told)


def test_tokens_of_refuses_tokens_outside_the_vocabulary(tmp_path):
    made = llama(tmp_path / "m", gaussian(0, V), gaussian(1, V))
    with pytest.raises(DataError, match="outside a vocabulary of 60"):
        tokens_of(made, np.full(200, V))


MEMORY = """
import sys, tracemalloc
import numpy as np
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.checkpoint.hf_folder import open_folder
assert not {"torch", "transformers", "plotly"} & set(sys.modules)
folder = open_folder(sys.argv[1])
ids = np.random.default_rng(0).integers(0, 60_000, 100_000)
tracemalloc.start()
found = tokens_of(folder, ids)
print(tracemalloc.get_traced_memory()[1], len(found.points[0].xy))
"""


@pytest.mark.slow
def test_tokens_of_streams_a_large_table_without_torch(tmp_path):
    """Memory has one chunk, an E × E matrix and a sample.

    60,000 × 512 values take 61 MB in fp16 and 246 MB in fp64.
    """
    generator = np.random.default_rng(0)
    table = generator.standard_normal((60_000, 512), np.float32).astype(np.float16)
    llama(tmp_path / "m", table, table[::-1].copy())
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, points = map(int, done.stdout.split())
    assert points == 2000
    assert peak < 105 * 2**20  # a copy of the table in fp16 would exceed it


def test_notes_name_their_model_only_once(tmp_path):
    made = factored(tmp_path / "factored:4", gaussian(0, V, 4), gaussian(1, 10, 4), gaussian(2, 4, 10), WORDS[:V])
    other = llama(tmp_path / "other", gaussian(0, V, 10))
    found = inspect(made.path, other.path, only=["direct_path", "alignment"], samples=V)
    said = [line for section in found.sections[1:] for line in notes(section) if "behind its map" in line]
    assert said
    assert all(line.count("factored:4") == 1 for line in said)


def test_answer_names_no_table_that_is_not_clearly_closer():
    half = make_estimate(0.5)
    unclear, output = make_estimate(0.005), make_estimate(0.2)
    leans = (Lean(ORTHOGONAL, half, half, unclear), Lean(CKA, half, half, unclear), Lean(IDENTITY, half, half, output))
    answer = "the tied table is not clearly closer to either table of b after the best rotation"
    assert _answer(leans, "b").startswith(f"{answer}, and by 1 of the 2 other measures; closer to the output table ")
    leans = (Lean(ORTHOGONAL, half, half, output), Lean(CKA, half, half, Estimate(0.1, math.nan, math.nan, 1)))
    answer = "the tied table is closest to the output table of b after the best rotation; not clearly closer to either "
    assert _answer(leans, "b").startswith(answer)
