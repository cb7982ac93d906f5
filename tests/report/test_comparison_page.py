"""Test the page of a comparison: its figures against the measured runs, and its safety with hostile text."""

import base64
import json
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
from tests.report.comparison_sample import ALBERT_ARMS, ARMS, UNIGRAM, albert_comparison, sample_comparison
from tests.report.opened_page import EVIL, Page

from tiewise.core.measurement import signed
from tiewise.report import comparison_measurement as measurement
from tiewise.report import comparison_panels as panels
from tiewise.report.comparison_measurement import DEMO, SHARES
from tiewise.report.comparison_page import asymmetry, render, write_report
from tiewise.report.comparison_panels import training_panels
from tiewise.report.drawing import style
from tiewise.report.training_curves import AHEAD, COSINE, OUTPUT_SHARE, TRAINING, TUNING
from tiewise.training.finding import complete
from tiewise.training.results import ArmDirectPath, CurvePoint


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


def traces_by_arm(panel):
    """Return {arm: trace} of the thick lines or points."""
    return {trace.name: trace for trace in panel.figure.data if trace.name}


def heldout_losses(run):
    return [p.tune_nll for p in run.curve if p.tune_nll is not None]


def test_loss_curves_show_the_mean_over_seeds(sample):
    panel = line_panel(sample, TUNING)
    for arm in ARMS:
        runs = sample.of(arm)
        assert list(traces_by_arm(panel)[arm].x) == [p.step for p in runs[0].curve if p.tune_nll is not None]
        assert traces_by_arm(panel)[arm].y == pytest.approx(np.mean(list(map(heldout_losses, runs)), axis=0))
    thin = [trace for trace in panel.figure.data if not trace.name]
    assert len(thin) == 3 * len(ARMS)
    assert {trace.legendgroup for trace in thin} == set(ARMS)


def test_mean_curve_omits_steps_that_one_seed_lacks(sample):
    short = replace(sample.runs[0], curve=[p for p in sample.runs[0].curve if p.step <= 400])
    drawn = traces_by_arm(line_panel(replace(sample, runs=[short, *sample.runs[1:]]), TUNING))
    assert (max(drawn["tied"].x), max(drawn["untied"].x)) == (400, 800)


def test_difference_curve_pairs_runs_by_seed(sample):
    one = replace(sample, runs=[r for r in sample.runs if (r.arm, r.seed) not in {("tied", 0), ("untied", 1)}])
    drawn = traces_by_arm(line_panel(one, AHEAD))
    assert [run.seed for run in one.of("untied")] == [0, 2]
    assert drawn["untied"].y == pytest.approx(
        np.subtract(*(heldout_losses(one.of(arm)[1]) for arm in ("untied", "tied")))
    )
    assert "tied" not in drawn


def test_path_share_is_the_share_of_norms_at_steps_with_both(sample):
    paths = [
        CurvePoint(1, 10, path_a=1.0, path_b=3.0),
        CurvePoint(2, 20, path_a=2.0),
        CurvePoint(3, 30, 0, 0, 0.0, 0.0),
    ]
    one = replace(sample, runs=[replace(sample.runs[0], curve=paths)])
    trace = traces_by_arm(line_panel(one, OUTPUT_SHARE))["tied"]
    assert (list(trace.x), list(trace.y)) == ([1], [0.75])
    assert set(traces_by_arm(line_panel(sample, COSINE))) == {"tied", "factored:64"}


def test_diverged_seed_draws_only_its_finite_points(sample):
    curve = [CurvePoint(1, 1, tune_nll=5.0), CurvePoint(2, 2, tune_nll=math.inf), CurvePoint(3, 3, math.nan)]
    one = replace(sample, runs=[replace(sample.runs[0], curve=curve)])
    assert list(traces_by_arm(line_panel(one, TUNING))["tied"].x) == [1]


def interval_ends(trace, i):
    """Return (low, high) of the interval of point `i`."""
    return trace.x[i] - trace.error_x.arrayminus[i], trace.x[i] + trace.error_x.array[i]


def test_forest_plot_bars_span_the_confidence_interval(sample):
    (panel,) = panels.paired_differences(sample)
    rows = ["untied · validation", "factored:64 · validation", "untied · training", "factored:64 · training"]
    assert list(panel.figure.layout.yaxis.ticktext) == rows
    trace, d = traces_by_arm(panel)["factored:64"], sample.difference("factored:64", "train_nll")
    assert (list(trace.y), trace.x[1]) == ([1, 3], d.mean)
    assert interval_ends(trace, 1) == pytest.approx((d.low, d.high))
    for trace in panels.paired_differences(sample_comparison(seeds=(0,)))[0].figure.data:
        assert not trace.error_x.visible  # one seed has no interval


@pytest.mark.parametrize("reference", ["tied", "untied"])
def test_caption_subtracts_the_reference_like_the_figure(reference):
    (panel,) = panels.paired_differences(sample_comparison((reference, *(arm for arm in ARMS if arm != reference))))
    other = {"tied": "untied", "untied": "tied"}[reference]
    assert f"{other} − {reference}: " in panel.caption
    assert f", {signed(traces_by_arm(panel)[other].x[0])} in validation" in panel.caption


def test_frequency_panel_omits_empty_bins_and_keeps_their_order(sample):
    (panel,) = panels.frequency_panels(sample)
    bins, trace = ["1–9", "10–99", "100–999", "1000–9999", "≥10000"], traces_by_arm(panel)["untied"]
    assert (list(panel.figure.layout.xaxis.ticktext), list(trace.x)) == (bins, [0, 1, 2, 3, 4])
    differences = [sample.difference("untied", f"frequency:{name}") for name in bins]
    assert list(trace.y) == [d.mean for d in differences]
    band = next(t for t in panel.figure.data if t.fill and t.legendgroup == "untied")
    assert list(band.y) == [d.high for d in differences] + [d.low for d in reversed(differences)]


def test_parameter_and_memory_bars_sum_to_the_counted_totals(sample, alberts):
    def totals(panel):
        return np.sum([trace.x for trace in panel.figure.data], axis=0).tolist()

    (panel,) = panels.parameter_panels(sample)
    assert totals(panel) == [sample.of(arm)[0].total_parameters for arm in ARMS]
    assert panel.figure.data[0].name == "body"
    _, memory = panels.parameter_panels(alberts)
    assert totals(memory) == [16 * alberts.of(arm)[0].total_parameters for arm in ALBERT_ARMS]


def test_share_panels_draw_the_confidence_intervals(alberts):
    drawn = traces_by_arm(panels.share_panels(alberts)[1])
    for arm in ALBERT_ARMS:
        q = measurement.share(alberts.of(arm), "sop")
        assert interval_ends(drawn[arm], 0) == pytest.approx((q.low, q.high))


def test_an_arm_keeps_its_style_in_every_figure(sample):
    drawn = [line_panel(sample, measured) for measured in (TUNING, TRAINING, AHEAD, OUTPUT_SHARE)]
    own = {(t.line.color, t.line.dash) for panel in drawn for t in panel.figure.data if t.name == "untied"}
    assert own == {(style(1).colour, style(1).dash)}
    assert traces_by_arm(*panels.frequency_panels(sample))["untied"].marker.color == style(1).colour


# --- the direct path


def test_direct_path_maps_share_the_colour_scale_of_off_diagonal_logits(sample):
    maps = [panel.figure for panel in panels.direct_path_panels(sample)]
    ((low, high),) = {(m.layout.coloraxis.cmin, m.layout.coloraxis.cmax) for m in maps}
    z = [np.array(m.data[0].z) for m in maps]
    np.testing.assert_allclose(z[0], z[0].T, atol=1e-9)  # the path of the tied arm is symmetric
    assert high == pytest.approx(max(np.abs(v[~np.eye(len(v), dtype=bool)]).max() for v in z), abs=1e-3)
    assert low == -high
    assert max(np.abs(v).max() for v in z) > 1.5 * high  # a scale with the diagonal would hide the other logits


def test_asymmetry_is_forward_minus_backward():
    path = ArmDirectPath("untied", ["a", "b"], [[0.0, 3.0], [1.0, 0.0]])
    assert [asymmetry(path, *pair) for pair in ("ab", "ba", "ac")] == [2.0, -2.0, None]


# --- the page


def test_page_is_under_3_mb_and_loads_nothing_external(sample, page):
    text = render(sample)
    assert len(text.encode()) <= 3_000_000
    assert [attributes.get("type") for attributes in page.all("script")] == ["application/json", "text/plain", None]
    assert zlib.decompress(base64.b64decode(page.scripts[1])).startswith(b"/**\n* plotly.js v")
    assert not page.all("link") + page.all("iframe") + page.all("img")
    assert not [a for _, a in page.elements if a.keys() & {"src", "action", "background"}]
    assert all(a["href"].startswith("#") for _, a in page.elements if "href" in a)  # markers of the same page
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_page_shows_the_finding_then_results_then_figures(page):
    headings = ("Which choice is better", "Undecided: no", "Results", "Paired diff", "Loss", "How it was made")
    places = [page.words.index(word) for word in headings]
    assert places == sorted(places)


def test_page_shows_every_result_and_setting_of_the_comparison(sample, page):
    for row in measurement.results(sample).rows:
        assert " ".join(row) in page.words
    for fact in (sample.command, sample.data["sha256"], "521,416", "2.13.0", "All tuning trials", "␣of → ␣the"):
        assert fact in page.words
    assert "Masked tokens" not in page.words
    assert DEMO in page.words
    assert DEMO not in Page(render(sample_comparison(demo=False))).words


def test_albert_page_shows_shares_memory_and_table_4(alberts):
    words = Page(render(alberts)).words
    for text in ("Masked tokens right", "Pairs right (sop)", "Pairs right (nsp)", "Memory of training", "Table 4"):
        assert text in words
    assert f"nll by frequencies alone: {UNIGRAM:.4f}." in words
    for name in SHARES:
        q, d = measurement.share(alberts.of(ALBERT_ARMS[5]), name), alberts.difference(ALBERT_ARMS[5], f"share:{name}")
        assert f"{100 * q.value:.1f} % [{100 * q.low:.1f}, {100 * q.high:.1f}]" in words
        assert f"{100 * d.mean:.2f} [{100 * d.low:.2f}, {100 * d.high:.2f}]".replace("-", "−") in words


def test_every_figure_has_a_label_and_a_data_table(page):
    plots = [a for a in page.all("svg") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == 11
    assert all(len(a["aria-label"]) > 40 for a in plots)
    assert len(page.all("details")) == len(plots) + 3  # bigrams, settings, and the tuning trials inside them
    assert len(page.all("h3")) >= len(plots)
    assert len(page.all("h1")) == 1


def test_comparison_page_shows_markup_in_user_text_as_text(sample):
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
    assert len(page.scripts) == 3  # figures, plotly, the page's own script
    assert page.all("img") == []
    assert EVIL in page.text  # the command, unchanged
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
def test_page_of_less_data_has_fewer_figures(comparison):
    page = Page(render(comparison))
    assert len([a for a in page.all("svg") if a.get("role") == "img"]) < 11
    assert comparison.finding.split(" %")[0].splitlines()[0] in page.words


def test_page_reports_a_diverged_run(sample):
    bad = replace(sample.runs[3], heldout_nll=math.nan, train_nll=math.inf, perplexity=math.inf)
    words = Page(render(complete(replace(sample, runs=[*sample.runs[:3], bad, *sample.runs[4:]])))).words
    assert "untied diverged, so untied cannot be compared with tied" in words
    assert "diverged" in words[words.index("Results") :]


def test_write_report_writes_the_rendered_page(sample, tmp_path):
    path = write_report(sample, tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == render(sample)
    assert path.stat().st_mode & 0o444 == 0o444
