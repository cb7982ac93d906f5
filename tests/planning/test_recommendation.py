"""Test the recommendation of a plan against evidence that is written down by hand."""

import pytest

from tiewise.planning import catalogue
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes
from tiewise.planning.recommendation import (
    DECIDES,
    MIXED,
    TIE,
    UNMEASURED,
    UNTIE,
    Agreement,
    ParametersSaved,
    choice_of_neighbours,
    neighbours_in_words,
    recommend,
    saving_in_words,
    score_neighbours,
)

SAVING = ParametersSaved(131_072_000, 463_000_000)
FAR = {"within": False, "rows": []}


def neighbours(ties, unties, unknown=0):
    """Return records of nearest models by their choices."""
    return [{"tied": tied} for tied in [True] * ties + [False] * unties + [None] * unknown]


def measured(*signs):
    """Return a record of measured settings at this size, one for each sign of tied − untied."""
    rows = [
        {"width": 64, "layers": 2, "vocab": 2048, "tokens": 1000 * (i + 1), "sign": sign, "step": "last"}
        | {"difference": 0.25 * sign, "low": 0.25 * sign - 0.1, "high": 0.25 * sign + 0.1}
        for i, sign in enumerate(signs)
    ]
    return {"within": True, "rows": rows}


def test_plan_of_sizes_begins_with_the_saving_and_the_neighbours():
    lines = repr(plan(Sizes(128_000, 1024, 16, heads=16))).splitlines()
    first = "Tie: saves 131 M of 463 M parameters (28 %). 5 of the 6 nearest public models tie."
    assert lines[:2] == [first, UNMEASURED]


@pytest.mark.parametrize(
    ("ties", "unties", "unknown", "choice", "words"),
    [
        (6, 0, 0, TIE, "The 6 nearest public models all tie."),
        (5, 1, 0, TIE, "5 of the 6 nearest public models tie."),
        (4, 2, 0, MIXED, "4 of the 6 nearest public models tie."),
        (1, 5, 0, UNTIE, "1 of the 6 nearest public models ties."),
        (0, 6, 0, UNTIE, "None of the 6 nearest public models ties."),
        (4, 1, 1, TIE, "4 of the 5 nearest public models whose choice is known tie."),
        (1, 1, 4, MIXED, "1 of the 2 nearest public models whose choice is known ties."),
    ],
)
def test_neighbours_decide_if_at_most_one_differs(ties, unties, unknown, choice, words):
    result = recommend(SAVING, True, neighbours(ties, unties, unknown), FAR)
    assert result["choice"] == choice
    assert result["sentences"][0].endswith(words)
    assert result["sentences"][1:] == [UNMEASURED]


@pytest.mark.parametrize(
    ("signs", "ties", "choice"),
    [
        ((-1, -1), 6, TIE),
        ((1, 0), 0, UNTIE),
        ((1, 1), 6, MIXED),  # the measurement contradicts the neighbours
        ((-1, 1), 6, MIXED),  # the effect depends on the amount of text
        ((0, 0), 6, TIE),  # nothing was detected, so the neighbours decide
        ((-1, 0), 3, TIE),  # the measurement decides between divided neighbours
    ],
)
def test_measurements_at_this_size_count_as_evidence(signs, ties, choice):
    result = recommend(SAVING, True, neighbours(ties, 6 - ties), measured(*signs))
    assert result["choice"] == choice
    assert (DECIDES in result["sentences"]) is (choice == MIXED)


def test_measured_sentence_states_effect_interval_and_text():
    result = recommend(SAVING, True, neighbours(6, 0), measured(-1, 0, 1))
    assert result["sentences"][1] == (
        "At the nearest measured sizes (width 64, 2 layers, V 2,048; demo corpus), tying changed the loss of the last "
        "step by −0.250 nats/token [−0.350, −0.150] on 1,000 tokens, "
        "by +0.250 nats/token [+0.150, +0.350] on 3,000 tokens (2 of 3 rows significant)."
    )
    undetected = recommend(SAVING, True, neighbours(6, 0), measured(0))["sentences"][1]
    assert undetected.endswith("by 0.000 nats/token [−0.100, +0.100] on 1,000 tokens (0 of 1 rows significant).")


def test_saving_names_the_total_only_if_it_is_counted():
    assert saving_in_words(SAVING) == "131 M of 463 M parameters (28 %)"
    assert saving_in_words(ParametersSaved(926_679_040, 671_026_404_352)) == "927 M of 671 B parameters (0.14 %)"
    assert saving_in_words(ParametersSaved(1_174_405_120, 1.026e12)) == "1.17 B of 1.03 T parameters (0.11 %)"
    assert saving_in_words(ParametersSaved(5_000_000, None)) == "5 M parameters (the total is not counted)"


def test_agreeing_neighbours_predict_a_public_model_better_than_divided_ones():
    """Count by hand what `DISSENT` rests on: each model against its neighbours, itself left out."""
    right, untied, sizes = {True: [], False: []}, {True: 0, False: 0}, set()
    for model in catalogue.models():
        choice = (model.vocab, model.width, model.layers, model.tied)
        if None in choice or choice in sizes:
            continue
        sizes.add(choice)
        choices = [row.tied for row in catalogue.neighbours(model.vocab, model.width, model.layers, but=(model.name,))]
        ties, unties = choices.count(True), choices.count(False)
        if ties != unties:
            right[min(ties, unties) <= 1].append(model.tied == (ties > unties))
            untied[min(ties, unties) <= 1] += not model.tied
        assert (choice_of_neighbours(choices) != MIXED) == (min(ties, unties) <= 1 < max(ties, unties))
    assert (len(right[True]), sum(right[True])) == (62, 47)
    assert (len(right[False]), sum(right[False])) == (44, 31)
    assert untied == {True: 36, False: 26}
    assert score_neighbours() == Agreement(62, 47, 36, 44, 31, 26)


def test_sentence_about_neighbours_names_an_unknown_choice():
    assert neighbours_in_words([]) == "No public model can be compared with it."
    assert neighbours_in_words([None] * 6) == "The choice of the 6 nearest public models is not known."
    assert neighbours_in_words([True, None]) == "The only near public model whose choice is known ties."
