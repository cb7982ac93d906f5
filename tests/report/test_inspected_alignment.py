"""Alignment, closer and run alignment in words, tables and figures: the numbers are those of the results."""

from dataclasses import replace

import numpy as np
import pytest

from tiewise.analysis.align_tables import Settings, align
from tiewise.analysis.align_tables import closer as lean_of
from tiewise.analysis.end_alignment import AcrossFound, AlignmentFound, EndPair
from tiewise.analysis.row_pairs import one_vocabulary
from tiewise.inspection.run_alignment import (
    AGAIN,
    CKA,
    CKA_CURVE,
    CKA_LINE,
    NOT_KNOWN,
    OTHER_SEED,
    SAME_SEED,
    Again,
    FrequencyShare,
    Leaning,
    OverSeeds,
    RunAlignment,
)
from tiewise.report.inspected import (
    alignment,
    alignment_figures,
    closer,
    closer_figures,
    run_alignment,
    run_alignment_figures,
)

ROWS, WIDTH = 400, 8
QUICK = Settings(permutations=2, sampled=200, subspaces=(4,))
NAMES = ("embed", "head")


def gaussian(seed):
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH))


@pytest.fixture(scope="module")
def unlike():
    return align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK)


@pytest.fixture(scope="module")
def across(unlike):
    pairs = one_vocabulary(ROWS, ROWS)
    like = align(gaussian(1) + 0.3 * gaussian(2), gaussian(1), pairs, QUICK)
    found = lean_of(gaussian(1) + 0.3 * gaussian(2), gaussian(0), gaussian(1), pairs, QUICK)
    ends = EndPair("table", "input", unlike), EndPair("table", "output", like)
    return AcrossFound(("<one>", "two"), (True, False), (ROWS, ROWS), ROWS, 3, ends, 0, found, ("<one>: a note",))


def over(value, half=0.01):
    return OverSeeds(value, value - half, value + half, 3)


def one_measure(measure, first, second, seeds=OTHER_SEED, corrected=(None, None, None)):
    toward = "output" if second > first else "input"
    pairs = ((1, 2, first, second),)
    return Leaning("tied", measure, seeds, over(first), over(second), over(second - first), toward, *corrected, pairs)


@pytest.fixture
def run():
    leanings = (
        one_measure("identity", 0.01, 0.02),
        one_measure("orthogonal", 0.024, 0.192),
        one_measure(CKA, 0.01, 0.78, corrected=(over(0.06), over(0.97), over(0.91))),
        one_measure(CKA_LINE, 0.01, 0.31, corrected=(over(0.36), over(0.92), over(0.56))),
        one_measure(CKA_CURVE, 0.01, 0.09, corrected=(over(0.45), over(0.9), over(0.45))),
        one_measure("identity", 0.66, 0.02, SAME_SEED),
        one_measure("orthogonal", 0.65, 0.24, SAME_SEED),
    )
    again = tuple(
        Again(AGAIN.format(arm, end), measure, over(value), ((1, 2, value), (1, 3, value), (2, 3, value)))
        for measure in ("orthogonal", CKA_CURVE)
        for arm, end, value in (("untied", "input", 0.025), ("untied", "output", 0.213), ("tied", "table", 0.197))
    )
    chance = {"identity": 0.0, "orthogonal": 0.0, **dict.fromkeys((CKA, CKA_LINE, CKA_CURVE), 0.0)}
    shares = {"untied input": 0.001, "untied output": 0.48, "tied table": 0.46}
    frequency = tuple(FrequencyShare(what, over(value)) for what, value in shares.items())
    gone = ("tied, seed 4: diverged",)
    return RunAlignment("untied", ("tied",), (1, 2, 3), 4096, chance, leanings, again, gone, 571_206, frequency)


def test_the_sentence_of_a_map_has_its_score_its_interval_and_its_null(unlike):
    one = AlignmentFound(False, NAMES, (ROWS, ROWS), (WIDTH, WIDTH), 7, unlike, ("a note",))
    said = alignment.lines({"m": one})
    score = unlike.score("orthogonal")
    assert "after the best rotation" in said[0]
    assert (
        f"{score.estimate.value:.3f} [{score.estimate.low:.3f}, {score.estimate.high:.3f}]".replace("-", "−") in said[0]
    )
    assert f"0 ± {1.96 / np.sqrt(80 * WIDTH):.3f}" in said[0]
    assert f"2 permutations of the rows at most {max(score.null.values):.3f}".replace("-", "−") in said[0]
    assert any("Left out of m: 7 of its tokens" in line for line in said)
    assert said[-1] == "m: a note."
    ((caption, table),) = alignment.tables({"m": one})
    assert "400 tokens" in caption
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_a_tied_model_says_so_and_draws_nothing():
    one = AlignmentFound(True, NAMES, (ROWS, ROWS), (WIDTH, WIDTH), 0, None, ())
    assert alignment.lines({"m": one}) == [
        "m is tied: input and output are one table (embed), so there is nothing to align."
    ]
    assert alignment.tables({"m": one}) == []
    assert alignment_figures.panels({"m": one}) == []


def test_the_answer_names_both_scores_and_the_side(across):
    said = closer.lines({"": across})
    rotated = next(line for line in said if line.startswith("After the best rotation"))
    assert "the table of <one> is closer to the output table of two" in rotated
    lean = next(x for x in across.closer.leans if (x.measure, x.view) == ("orthogonal", "centred"))
    assert f"difference +{lean.difference.value:.3f}" in rotated
    assert "3 of them are left out" in " ".join(said)
    assert said[-1] == "<one>: a note."


def test_tables_of_one_start_are_named_before_everything_else(across):
    said = closer.lines({"": across})
    assert said[0].startswith("<one> table – two output: as they stand, without any map")
    assert not any(line.startswith("<one> table – two input: as they stand") for line in said)


def test_two_tied_models_ask_no_question(across):
    both = replace(across, tied=(True, True), one=None, closer=None)
    assert any(line.startswith("Both models are tied") for line in closer.lines({"": both}))
    assert len(closer_figures.panels({"": both})) == 2


def test_the_run_is_told_by_pairs_of_different_seeds(run):
    said = run_alignment.lines({"": run})
    told = " ".join(said)
    assert "After the best rotation, the table of tied leans to the output table of untied: 0.192" in told
    assert "difference +0.168 [+0.158, +0.178] over 3 pairs of models" in told
    assert "cosine of 0.66 as they stand" in told
    assert "0.669 against 0.420 (OLMo-1B)" in told
    assert said[-1] == "Left out: tied, seed 4: diverged."


def test_the_answer_says_what_is_left_without_frequency(run):
    first, shares, second, third, *rest = run_alignment.lines({"": run})
    assert first.startswith(
        "The table of tied leans to the output table of untied; with frequency taken out, it still leans to the output "
        "table of untied. As a share"
    )
    assert "it has 0.970 [0.960, 0.980] in common with the output table and 0.060 [0.050, 0.070]" in first
    assert (
        "difference +0.910 [+0.900, +0.920]; with frequency taken out (three powers of log frequency), 0.900" in first
    )
    assert "is 48.0 % [47.0, 49.0] of the variance of untied output, 0.1 % [−0.9, 1.1] of the" in shares
    assert shares.endswith("46.0 % [45.0, 47.0] of the variance of tied table; by chance 0.07 %.")
    assert "0.213 [0.203, 0.223] (output of untied), 0.025 [0.015, 0.035] (its input) and 0.197" in second
    assert "Taking out only a straight line in log frequency leaves the table of tied 0.920" in third
    assert not any("frequency taken out" in line for line in rest)


def without(run, *measures):
    return tuple(x for x in run.leanings if x.measure not in measures)


def test_a_lean_that_frequency_explains_is_not_told_alone(run):
    spread = OverSeeds(0.1, -0.2, 0.4, 3)
    gone = tuple(replace(x, corrected_difference=spread) if x.measure == CKA_CURVE else x for x in run.leanings)
    first, *_ = run_alignment.lines({"": replace(run, leanings=gone)})
    assert "leans to the output table of untied; with frequency taken out, it shows no lean to either table" in first
    none = tuple(
        replace(x, corrected_input=None, corrected_output=None, corrected_difference=None)
        if x.measure == CKA_CURVE
        else x
        for x in run.leanings
    )
    first, *_ = run_alignment.lines({"": replace(run, leanings=none)})
    assert "with frequency taken out, training again finds too little of the tables to say" in first
    unknown = replace(run, leanings=without(run, CKA_CURVE, CKA_LINE), counted=None, frequency=())
    first, *_ = run_alignment.lines({"": unknown})
    assert "how much of that is frequency is not known, as the training text is not there" in first
    assert "share can be given" in first


def test_one_seed_says_that_it_cannot_tell(run):
    alone = [replace(x, toward=NOT_KNOWN, difference=OverSeeds(0.1, None, None, 1)) for x in run.leanings]
    said = run_alignment.lines({"": replace(run, leanings=tuple(x for x in alone if x.seeds == SAME_SEED), again=())})
    assert "cannot be told from one pair of models" in said[0]
    assert "of its own seed, difference +0.100 over 1 pair of models" in said[0]


def test_published_scores_are_those_of_the_paper():
    assert ("OLMo-1B", "orthogonal", 0.42, 0.669) in run_alignment.published()
    assert ("Qwen3-4B", "neighbours", 0.366, 0.71) in run_alignment.published()
    assert len(run_alignment.published()) == 7


def test_every_figure_has_its_title_height_caption_and_numbers(unlike, across, run):
    one = AlignmentFound(False, NAMES, (ROWS, ROWS), (WIDTH, WIDTH), 0, unlike, ())
    panels = [
        *alignment_figures.panels({"<m>": one}),
        *closer_figures.panels({"": across}),
        *run_alignment_figures.panels({"": run}),
    ]
    assert len(panels) == 2 + 4 + 4
    for panel in panels:
        assert panel.title
        assert panel.figure.layout.height > 100
        assert panel.caption.endswith(".")
        assert panel.table.rows
        assert "<m>" not in panel.figure.to_json().replace("\\u003c", "<")
        assert "<one>" not in panel.figure.to_json().replace("\\u003c", "<")


def test_dots_and_bars_are_the_estimates(run):
    shares, first, *_ = run_alignment_figures.panels({"": run})
    trace = next(t for t in shares.figure.data if t.name == "tied – untied output")
    assert list(trace.x) == [0.97, 0.92, 0.9]
    assert [row[0] for row in shares.table.rows] == ["as it stands", "a line in log frequency out", "frequency out"]
    trace = next(t for t in first.figure.data if t.name == "tied – untied output")
    assert list(trace.x) == [0.192, 0.02, 0.78, 0.31, 0.09]
    assert list(trace.error_x.array) == pytest.approx([0.01] * 5)
    rows = list(first.figure.layout.yaxis.ticktext)
    assert rows == ["orthogonal", "identity", CKA, CKA_LINE, CKA_CURVE]
    ceiling = next(t for t in first.figure.data if t.name == "untied output – output, trained again")
    assert list(ceiling.x) == [0.213, 0.213]
    assert ceiling.marker.symbol.endswith("-open")
