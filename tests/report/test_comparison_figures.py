"""Figures hold the numbers of the comparison, and no arm is told apart by colour alone."""

import math
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from tests.report.comparison_sample import ARMS, sample_comparison

from tiewise.core.numerals import signed
from tiewise.planning.plan import plan
from tiewise.report import comparison_figures as figures
from tiewise.report import plan_page, theme
from tiewise.report.comparison_figures import AHEAD, COSINE, HELD_OUT, OUTPUT_SHARE, TRAINING, line_panel
from tiewise.training.results import CurvePoint


@pytest.fixture(scope="module")
def sample():
    return sample_comparison()


def by_arm(figure):
    """The thick line or the points of every arm."""
    return {trace.name: trace for trace in figure.data if trace.name}


def test_loss_curves_are_the_mean_over_seeds(sample):
    figure = line_panel(sample, HELD_OUT).figure
    for arm in ARMS:
        runs = sample.of(arm)
        steps = [p.step for p in runs[0].curve if p.heldout_nll is not None]
        expected = np.mean([[p.heldout_nll for p in run.curve if p.heldout_nll is not None] for run in runs], axis=0)
        assert list(by_arm(figure)[arm].x) == steps
        assert by_arm(figure)[arm].y == pytest.approx(expected)
    thin = [trace for trace in figure.data if not trace.name]
    assert len(thin) == 3 * len(ARMS)
    assert {trace.legendgroup for trace in thin} == set(ARMS)


def test_a_step_that_one_seed_lacks_is_not_averaged(sample):
    short = replace(sample.runs[0], curve=[p for p in sample.runs[0].curve if p.step <= 400])
    figure = line_panel(replace(sample, runs=[short, *sample.runs[1:]]), HELD_OUT).figure
    assert max(by_arm(figure)["tied"].x) == 400
    assert max(by_arm(figure)["untied"].x) == 800


def test_difference_curve_is_paired_by_seed(sample):
    one = replace(sample, runs=[r for r in sample.runs if (r.arm, r.seed) not in {("tied", 0), ("untied", 1)}])
    figure = line_panel(one, AHEAD).figure
    expected = one.of("untied")[1].heldout_nll, one.of("tied")[1].heldout_nll  # seed 2 is the only one in common
    points = [[p.heldout_nll for p in one.of(arm)[1].curve if p.heldout_nll is not None] for arm in ("untied", "tied")]
    assert [run.seed for run in one.of("untied")] == [0, 2]
    assert by_arm(figure)["untied"].y == pytest.approx(np.subtract(*points))
    assert expected[0] != expected[1]
    assert "tied" not in by_arm(figure)


def test_path_share_is_the_share_of_norms(sample):
    curve = [
        CurvePoint(1, 10, path_a=1.0, path_b=3.0),
        CurvePoint(2, 20, path_a=2.0),
        CurvePoint(3, 30, 0, 0, 0.0, 0.0),
    ]
    one = replace(sample, runs=[replace(sample.runs[0], curve=curve)])
    trace = by_arm(line_panel(one, OUTPUT_SHARE).figure)["tied"]
    assert (list(trace.x), list(trace.y)) == ([1], [0.75])  # unmeasured and 0/0 points are left out
    assert line_panel(one, OUTPUT_SHARE).figure.layout.yaxis.title.text == "‖B‖ / (‖A‖ + ‖B‖)"


def test_cosine_leaves_out_an_arm_without_one(sample):
    assert set(by_arm(line_panel(sample, COSINE).figure)) == {"tied", "factored:64"}


def test_forest_bars_reach_the_interval(sample):
    figure = figures.paired_differences(sample).figure
    rows = {trace.y[0]: trace for trace in figure.data}
    assert list(rows) == ["untied · held-out", "factored:64 · held-out", "untied · training", "factored:64 · training"]
    d = sample.difference("factored:64", "train_nll")
    trace = rows["factored:64 · training"]
    assert trace.x[0] == d.mean
    reach = trace.x[0] - trace.error_x.arrayminus[0], trace.x[0] + trace.error_x.array[0]
    assert reach == pytest.approx((d.low, d.high))


def test_one_seed_draws_points_without_bars():
    figure = figures.paired_differences(sample_comparison(seeds=(0,))).figure
    assert all(trace.error_x.array[0] == 0 for trace in figure.data)
    assert all("no interval" in trace.customdata[0] for trace in figure.data)


def test_frequency_leaves_out_empty_bins_and_keeps_the_order(sample):
    trace = by_arm(figures.frequency_panel(sample).figure)["untied"]
    assert list(trace.x) == ["1–9", "10–99", "100–999", "1000–9999", "≥10000"]
    assert trace.y[0] == sample.difference("untied", "frequency:1–9").mean


def test_parameter_bars_add_up_to_the_total(sample):
    figure = figures.parameter_panel(sample).figure
    totals = np.sum([trace.x for trace in figure.data], axis=0)
    assert totals.tolist() == [sample.of(arm)[0].total_parameters for arm in ARMS]
    assert figure.data[0].name == "body"
    assert len({(t.marker.color, t.marker.pattern.shape) for t in figure.data}) == len(figure.data)


def test_arms_differ_in_colour_dash_and_marker():
    styles = [theme.style(i) for i in range(6)]
    for field in ("colour", "dash", "marker"):
        assert len({getattr(style, field) for style in styles}) == 6
    assert len({theme.style(i) for i in range(168)}) == 168


def test_an_arm_keeps_its_style_in_every_figure(sample):
    drawn = [line_panel(sample, measured).figure for measured in (HELD_OUT, TRAINING, AHEAD, OUTPUT_SHARE)]
    lines = {(t.line.color, t.line.dash) for figure in drawn for t in figure.data if t.name == "untied"}
    assert lines == {(theme.style(1).colour, theme.style(1).dash)}
    assert by_arm(figures.frequency_panel(sample).figure)["untied"].marker.color == theme.style(1).colour


def luminance(colour):
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_itself_against_known_values():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colour", theme.COLOURS)
@pytest.mark.parametrize("mode", theme.BACKGROUNDS)
def test_arm_colours_stand_out_in_both_themes(colour, mode):
    assert contrast(colour, theme.BACKGROUNDS[mode]) >= 3


@pytest.mark.parametrize(("mode", "template"), [("light", theme.LIGHT), ("dark", theme.DARK)])
def test_text_in_figures_is_readable(mode, template):
    assert contrast(template.layout.font.color, theme.BACKGROUNDS[mode]) >= 7
    assert contrast(template.layout.xaxis.tickfont.color, theme.BACKGROUNDS[mode]) >= 4.5


def test_the_page_has_the_backgrounds_that_the_colours_were_chosen_for():
    css = (files("tiewise.report") / "templates" / "report.css").read_text()
    assert set(re.findall(r"--page: (#\w+)", css)) == set(theme.BACKGROUNDS.values())


def test_a_diverged_seed_draws_the_finite_part(sample):
    curve = [CurvePoint(1, 1, heldout_nll=5.0), CurvePoint(2, 2, heldout_nll=math.inf), CurvePoint(3, 3, math.nan)]
    one = replace(sample, runs=[replace(sample.runs[0], curve=curve)])
    assert list(by_arm(line_panel(one, HELD_OUT).figure)["tied"].x) == [1]


def test_a_boundary_has_one_colour_in_every_figure():
    """Of a comparison, a plan and an inspection, whatever stands beside it and in whatever order."""
    blue, orange = theme.COLOURS[:2]

    def colours(*names):
        return [theme.style(place).colour for place in theme.places(names)]

    assert colours("tied", "untied") == colours("untied", "tied")[::-1] == [blue, orange]
    assert colours("factored:64", "tied") == [*colours("tied", "untied", "factored:128")[2:], blue]
    assert colours("runs/untied/seed-1", "runs/tied/seed-1") == colours("untied, output", "tied, both ends")
    assert colours("untied, input")[0] == orange
    for names in (("a model", "another"), ("tied-up", "untied+bias", "untied+softcap=3"), tuple("abcdefgh")):
        found = colours(*names)
        others = [c for name, c in zip(names, found, strict=True) if "tied" not in name]
        assert not {blue, orange} & set(others)
    assert len(set(theme.places(["tied", *(f"tied+share={n}" for n in range(40))]))) == 41
    of_plan = by_arm(next(iter(plan_page._growing(plan("gpt2")))).figure)
    assert {name: of_plan[name].line.color for name in ("tied", "untied")} == {"tied": blue, "untied": orange}
    of_comparison = by_arm(line_panel(sample_comparison(), HELD_OUT).figure)
    assert {name: of_comparison[name].line.color for name in ("tied", "untied")} == {"tied": blue, "untied": orange}


@pytest.mark.parametrize("reference", ["tied", "untied"])
def test_the_caption_subtracts_as_the_figure_does(reference):
    sample = sample_comparison((reference, *(arm for arm in ARMS if arm != reference)))
    other = {"tied": "untied", "untied": "tied"}[reference]
    panel = figures.paired_differences(sample)
    drawn = next(t for t in panel.figure.data if t.name == other and "open" not in t.marker.symbol)
    assert f"{other} − {reference} is " in panel.caption
    assert f" and {signed(drawn.x[0])} on held-out text" in panel.caption
