"""Tests of verdicts with a margin against scipy's one-sided t tests, and against the printed interval."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.training.test_results import comparison, runs_of

from tiewise.core.crossed_effects import seed_interval
from tiewise.training.finding import explanations, sentences
from tiewise.training.results import paired
from tiewise.training.verdicts import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    VERDICTS,
    WORSE,
    equivalence_p,
    sign_of,
    verdict_of,
    with_verdicts,
)

MARGIN = 0.02


def judged(*samples, margin=MARGIN):
    """Return the differences of several arms, each with the verdict in their family."""
    return with_verdicts([replace(paired([0.0] * len(d), list(d)), margin=margin) for d in samples])


values = st.lists(st.floats(-0.05, 0.05).map(lambda x: round(x, 4)), min_size=2, max_size=6)


@given(values)
def test_equivalence_is_two_one_sided_t_tests_of_scipy(sample):
    error = stats.sem(sample)
    if error < 1e-9:
        return
    ends = (("greater", -MARGIN), ("less", MARGIN))
    one_sided = [stats.ttest_1samp(sample, end, alternative=side).pvalue for side, end in ends]
    p = equivalence_p(seed_interval(sample), MARGIN)
    assert p == pytest.approx(min(1.0, 2 * max(one_sided)), rel=1e-6, abs=1e-12)


@given(st.lists(values, min_size=1, max_size=4))
def test_no_verdict_contradicts_the_printed_interval(samples):
    for d in judged(*samples):
        excludes_zero = d.low > 0 or d.high < 0
        within = d.low > -MARGIN and d.high < MARGIN
        assert d.verdict in VERDICTS
        if d.verdict in (BETTER, WORSE):
            assert excludes_zero
            assert (d.mean < 0) == (d.verdict == BETTER)
        if d.verdict == EQUIVALENT:
            assert within
        if len(samples) == 1:  # no correction: the interval decides
            assert (d.verdict == EQUIVALENT) == within
            assert (d.verdict == UNDECIDED) == (not within and not excludes_zero)


def test_margin_decides_between_equivalent_and_undecided():
    noisy, tight = (-0.03, 0.0, 0.03), (0.0, 0.001, -0.001)
    assert [d.verdict for d in judged(noisy, tight)] == [UNDECIDED, EQUIVALENT]
    assert [d.verdict for d in judged(noisy, tight, margin=0.0)] == [UNDECIDED, UNDECIDED]


def test_detected_difference_below_the_margin_is_equivalent():
    (d,) = judged((0.008, 0.009, 0.010))
    assert (d.detected, d.verdict, sign_of(d)) == (True, EQUIVALENT, 0)
    (narrow,) = judged((0.008, 0.009, 0.010), margin=0.005)
    assert (narrow.verdict, sign_of(narrow)) == (WORSE, 1)


def test_holm_withholds_equivalence_of_several_arms():
    half = stats.t.ppf(0.975, 2)
    sample = [0.0185 / half * math.sqrt(3) * x for x in (-1, 0, 1)]  # its interval is ± 0.0185
    alone, several = judged(sample), judged(sample, sample, sample)
    assert [d.verdict for d in (*alone, *several)] == [EQUIVALENT, *[UNDECIDED] * 3]
    assert several[0].p_equivalence == pytest.approx(3 * alone[0].p_equivalence)
    assert (several[0].low, several[0].high) == (alone[0].low, alone[0].high)


def test_difference_without_margin_or_interval():
    single, equal, unequal = paired([1.0], [2.0]), paired([1.0, 2.0], [1.0, 2.0]), paired([1.0, 2.0], [2.0, 3.0])
    assert with_verdicts([single])[0].verdict is None
    assert [verdict_of(d) for d in (equal, unequal)] == [UNDECIDED, WORSE]
    assert [d.verdict for d in with_verdicts([equal, unequal])] == [UNDECIDED, WORSE]


def test_finding_states_equivalence_within_the_margin():
    runs = runs_of("tied", (5.0, 5.1, 5.2)) + runs_of("untied", (5.001, 5.1, 5.199), parameters=150)
    done = comparison(runs)
    assert done.finding == (
        "untied and tied are equivalent within 0.02 nats/token on this text: validation loss untied − tied is "
        "0.00000 nats/token (95 % CI −0.00248 to +0.00248, 3 seeds), with 50 % more parameters."
    )
    assert not any("80 of 100" in line for line in explanations(done))
    d = done.difference("untied", "heldout_nll")
    assert (d.verdict, d.margin) == (EQUIVALENT, MARGIN)
    assert done.difference("untied", "train_nll").verdict is None
    without = comparison(runs, margin=0.0)
    assert without.finding.startswith("No difference detected: validation loss untied − tied is 0.00000")


def test_sentence_names_the_p_that_withholds_equivalence():
    half = stats.t.ppf(0.975, 2)
    step = 0.0185 / half * math.sqrt(3)
    runs = runs_of("tied", (5.0, 5.0, 5.0))
    for arm in ("untied", "spd", "factored:64"):
        runs += runs_of(arm, (5.0 - step, 5.0, 5.0 + step))
    done = comparison(runs, ("tied", "untied", "spd", "factored:64"))
    p = done.difference("untied", "heldout_nll").p_equivalence
    assert f"; p = {p:.3f} corrected for 3 arms)" in sentences(done)[0]
