"""The page of a comparison: figures hold the measured numbers, nothing is from outside, what a user wrote is text."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.report.comparison_sample import ALBERT_ARMS, ARMS, UNIGRAM, albert_comparison, sample_comparison
from tests.report.opened_page import EVIL, Page

from tiewise.core.measurement import signed
from tiewise.report import comparison_measurement as told
from tiewise.report import comparison_panels as page_of
from tiewise.report.comparison_measurement import DEMO, SHARES
from tiewise.report.comparison_page import asymmetry, render, write_report
from tiewise.report.comparison_panels import training_panels
from tiewise.report.drawing import style
from tiewise.report.training_curves import AHEAD, COSINE, OUTPUT_SHARE, TRAINING, VALIDATION
from tiewise.training.results import ArmDirectPath, CurvePoint, complete


@pytest.fixture(scope="module")
def sample():
    return sample_comparison()


@pytest.fixture(scope="module")
def alberts():
    return albert_comparison()


@pytest.fixture(scope="module")
def page(sample):
    return Page(render(sample))


def line_panel(comparison, measured):
    (panel,) = training_panels(comparison, measured)
    return panel


def by_arm(panel):
    """The thick line or the points of every arm."""
    return {trace.name: trace for trace in panel.figure.data if trace.name}


def losses(run):
    return [p.heldout_nll for p in run.curve if p.heldout_nll is not None]


def test_loss_curves_are_the_mean_over_seeds(sample):
    panel = line_panel(sample, VALIDATION)
    for arm in ARMS:
        runs = sample.of(arm)
        assert list(by_arm(panel)[arm].x) == [p.step for p in runs[0].curve if p.heldout_nll is not None]
        assert by_arm(panel)[arm].y == pytest.approx(np.mean(list(map(losses, runs)), axis=0))
    thin = [trace for trace in panel.figure.data if not trace.name]
    assert len(thin) == 3 * len(ARMS)
    assert {trace.legendgroup for trace in thin} == set(ARMS)


def test_a_step_that_one_seed_lacks_is_not_averaged(sample):
    short = replace(sample.runs[0], curve=[p for p in sample.runs[0].curve if p.step <= 400])
    drawn = by_arm(line_panel(replace(sample, runs=[short, *sample.runs[1:]]), VALIDATION))
    assert (max(drawn["tied"].x), max(drawn["untied"].x)) == (400, 800)


def test_difference_curve_is_paired_by_seed(sample):
    one = replace(sample, runs=[r for r in sample.runs if (r.arm, r.seed) not in {("tied", 0), ("untied", 1)}])
    drawn = by_arm(line_panel(one, AHEAD))
    assert [run.seed for run in one.of("untied")] == [0, 2]
    assert drawn["untied"].y == pytest.approx(np.subtract(*(losses(one.of(arm)[1]) for arm in ("untied", "tied"))))
    assert "tied" not in drawn


def test_path_share_is_the_share_of_norms_where_they_were_measured(sample):
    paths = [
        CurvePoint(1, 10, path_a=1.0, path_b=3.0),
        CurvePoint(2, 20, path_a=2.0),
        CurvePoint(3, 30, 0, 0, 0.0, 0.0),
    ]
    one = replace(sample, runs=[replace(sample.runs[0], curve=paths)])
    trace = by_arm(line_panel(one, OUTPUT_SHARE))["tied"]
    assert (list(trace.x), list(trace.y)) == ([1], [0.75])
    assert set(by_arm(line_panel(sample, COSINE))) == {"tied", "factored:64"}


def test_a_diverged_seed_draws_the_finite_part(sample):
    curve = [CurvePoint(1, 1, heldout_nll=5.0), CurvePoint(2, 2, heldout_nll=math.inf), CurvePoint(3, 3, math.nan)]
    one = replace(sample, runs=[replace(sample.runs[0], curve=curve)])
    assert list(by_arm(line_panel(one, VALIDATION))["tied"].x) == [1]


def reach(trace, i):
    """The ends of a dot's interval."""
    return trace.x[i] - trace.error_x.arrayminus[i], trace.x[i] + trace.error_x.array[i]


def test_forest_bars_reach_the_interval(sample):
    (panel,) = page_of.paired_differences(sample)
    rows = ["untied · validation", "factored:64 · validation", "untied · training", "factored:64 · training"]
    assert list(panel.figure.layout.yaxis.ticktext) == rows
    trace, d = by_arm(panel)["factored:64"], sample.difference("factored:64", "train_nll")
    assert (list(trace.y), trace.x[1]) == ([1, 3], d.mean)
    assert reach(trace, 1) == pytest.approx((d.low, d.high))
    for trace in page_of.paired_differences(sample_comparison(seeds=(0,)))[0].figure.data:
        assert not trace.error_x.visible  # one seed has no interval


@pytest.mark.parametrize("reference", ["tied", "untied"])
def test_the_caption_subtracts_as_the_figure_does(reference):
    (panel,) = page_of.paired_differences(sample_comparison((reference, *(arm for arm in ARMS if arm != reference))))
    other = {"tied": "untied", "untied": "tied"}[reference]
    assert f"{other} − {reference}: " in panel.caption
    assert f", {signed(by_arm(panel)[other].x[0])} in validation" in panel.caption


def test_frequency_leaves_out_empty_bins_and_keeps_the_order(sample):
    (panel,) = page_of.frequency_panels(sample)
    bins, trace = ["1–9", "10–99", "100–999", "1000–9999", "≥10000"], by_arm(panel)["untied"]
    assert (list(panel.figure.layout.xaxis.ticktext), list(trace.x)) == (bins, [0, 1, 2, 3, 4])
    differences = [sample.difference("untied", f"frequency:{name}") for name in bins]
    assert list(trace.y) == [d.mean for d in differences]
    band = next(t for t in panel.figure.data if t.fill and t.legendgroup == "untied")
    assert list(band.y) == [d.high for d in differences] + [d.low for d in reversed(differences)]


def test_bars_add_up_to_what_was_counted(sample, alberts):
    def totals(panel):
        return np.sum([trace.x for trace in panel.figure.data], axis=0).tolist()

    (panel,) = page_of.parameter_panels(sample)
    assert totals(panel) == [sample.of(arm)[0].total_parameters for arm in ARMS]
    assert panel.figure.data[0].name == "body"
    _, memory = page_of.parameter_panels(alberts)
    assert totals(memory) == [16 * alberts.of(arm)[0].total_parameters for arm in ALBERT_ARMS]


def test_shares_hold_their_intervals(alberts):
    drawn = by_arm(page_of.share_panels(alberts)[1])
    for arm in ALBERT_ARMS:
        q = told.share(alberts.of(arm), "sop")
        assert reach(drawn[arm], 0) == pytest.approx((q.low, q.high))


def test_an_arm_keeps_its_style_in_every_figure(sample):
    drawn = [line_panel(sample, measured) for measured in (VALIDATION, TRAINING, AHEAD, OUTPUT_SHARE)]
    own = {(t.line.color, t.line.dash) for panel in drawn for t in panel.figure.data if t.name == "untied"}
    assert own == {(style(1).colour, style(1).dash)}
    assert by_arm(*page_of.frequency_panels(sample))["untied"].marker.color == style(1).colour


# --- the direct path


def test_all_arms_share_a_scale_set_off_the_diagonal(sample):
    maps = [panel.figure for panel in page_of.direct_path_panels(sample)]
    ((low, high),) = {(m.layout.coloraxis.cmin, m.layout.coloraxis.cmax) for m in maps}
    z = [np.array(m.data[0].z) for m in maps]
    np.testing.assert_allclose(z[0], z[0].T, atol=1e-9)  # a tied path
    assert high == pytest.approx(max(np.abs(v[~np.eye(len(v), dtype=bool)]).max() for v in z), abs=1e-3)
    assert low == -high
    assert max(np.abs(v).max() for v in z) > 1.5 * high  # the diagonal would have drowned the rest


def test_asymmetry_is_forward_minus_backward():
    path = ArmDirectPath("untied", ["a", "b"], [[0.0, 3.0], [1.0, 0.0]])
    assert [asymmetry(path, *pair) for pair in ("ab", "ba", "ac")] == [2.0, -2.0, None]


# --- the page


def test_size_and_nothing_from_outside(sample, page):
    text = render(sample)
    assert len(text.encode()) <= 6_000_000
    assert text.count("plotly.js v") == 1
    assert not page.all("link") + page.all("iframe") + page.all("img")
    assert not [a for _, a in page.elements if a.keys() & {"src", "href", "action", "background"}]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_finding_comes_first_then_results_then_figures(page):
    said = ("What was found", "no difference detected", "Results", "Paired diff", "Loss", "How it was made")
    places = [page.words.index(word) for word in said]
    assert places == sorted(places)


def test_what_the_comparison_measured_is_on_the_page(sample, page):
    for row in told.results(sample).rows:
        assert " ".join(row) in page.words
    for fact in (sample.command, sample.data["sha256"], "521,416", "2.13.0", "All tuning trials", "␣of → ␣the"):
        assert fact in page.words
    assert "Masked tokens" not in page.words
    assert DEMO.capitalize() in page.words
    assert DEMO.capitalize() not in Page(render(sample_comparison(demo=False))).words


def test_the_page_of_alberts_shows_shares_bytes_and_orders(alberts):
    words = Page(render(alberts)).words
    for said in ("Masked tokens right", "Pairs right (sop)", "Pairs right (nsp)", "Memory of training", "Table 4"):
        assert said in words
    assert f"nll by frequencies alone: {UNIGRAM:.4f}." in words
    for name in SHARES:
        q, d = told.share(alberts.of(ALBERT_ARMS[5]), name), alberts.difference(ALBERT_ARMS[5], f"share:{name}")
        assert f"{100 * q.value:.1f} % [{100 * q.low:.1f}, {100 * q.high:.1f}]" in words
        assert f"{100 * d.mean:.2f} [{100 * d.low:.2f}, {100 * d.high:.2f}]".replace("-", "−") in words


def test_every_figure_is_named_and_has_its_numbers(page):
    plots = [a for a in page.all("div") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == 11
    assert all(len(a["aria-label"]) > 40 for a in plots)
    assert len(page.all("details")) == len(plots) + 3  # and bigrams, and the tuning trials within what was set and read
    assert len(page.all("h3")) >= len(plots)
    assert len(page.all("h1")) == 1


def test_what_a_user_wrote_is_text(sample):
    evil = replace(
        sample,
        command=EVIL,
        arms=[EVIL, *ARMS[1:]],
        reference=EVIL,
        runs=[replace(run, arm=EVIL) if run.arm == "tied" else run for run in sample.runs],
        direct_path=[ArmDirectPath(EVIL, [EVIL, "<script>", "b"], [[0.0, 1, 2], [1, 0, 3], [2, 3, 0]])],
        bigrams=[{"left": EVIL, "right": "<script>", "forward": 0.5, "backward": 0.1, "count": 3}],
        setting={EVIL: EVIL},
        data={"sources": [EVIL]},
    )
    page = Page(render(complete(evil)))
    assert len(page.scripts) == 3  # figures, plotly, ours
    assert page.all("img") == []
    assert EVIL in page.text  # the command, character for character
    json.loads(page.scripts[0])
    assert "<" not in page.scripts[0]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


@pytest.mark.parametrize(
    "comparison",
    [
        sample_comparison(arms=("tied",), seeds=(0,)),
        replace(sample_comparison(seeds=(0,)), tuning=[], direct_path=[], bigrams=[]),
        complete(replace(sample_comparison(), runs=[replace(r, curve=[]) for r in sample_comparison().runs])),
        complete(replace(sample_comparison(), runs=[])),
    ],
    ids=["one arm", "one seed", "no curves", "no run finished"],
)
def test_less_data_gives_a_shorter_page(comparison):
    page = Page(render(comparison))
    assert len([a for a in page.all("div") if a.get("role") == "img"]) < 11
    assert comparison.finding.split(" %")[0].splitlines()[0] in page.words


def test_a_diverged_run_is_said_and_the_page_still_made(sample):
    bad = replace(sample.runs[3], heldout_nll=math.nan, train_nll=math.inf, perplexity=math.inf)
    words = Page(render(complete(replace(sample, runs=[*sample.runs[:3], bad, *sample.runs[4:]])))).words
    assert "untied against tied: one of them diverged" in words
    assert "diverged" in words[words.index("Results") :]


def test_the_file_is_the_page(sample, tmp_path):
    path = write_report(sample, tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == render(sample)
    assert path.stat().st_mode & 0o444 == 0o444
