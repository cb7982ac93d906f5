"""The page as text: whole or not at all, nothing from outside, and what a user wrote is text."""

import json
import math
import os
from dataclasses import replace

import pytest
from tests.report.comparison_sample import ARMS, sample_comparison
from tests.report.opened_page import EVIL, Page

from tiewise.core.errors import RunError
from tiewise.report.comparison_found import DEMO
from tiewise.report.comparison_page import render, write_report
from tiewise.training.results import ArmDirectPath, complete


@pytest.fixture(scope="module")
def text():
    return render(sample_comparison())


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_size_and_nothing_from_outside(text, page):
    assert len(text.encode()) <= 6_000_000
    assert text.count("plotly.js v") == 1
    assert not page.all("link") + page.all("iframe") + page.all("img")
    assert not [a for _, a in page.elements if a.keys() & {"src", "href", "action", "background"}]
    (style,) = (text[text.index("<style>") : text.index("</style>")],)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_finding_comes_first_then_results_then_figures(page):
    said = ("What was found", "no difference detected", "Results", "Paired diff", "smallest detectable", "Loss")
    places = [page.words.index(word) for word in said]
    assert places == sorted(places)
    assert page.words.index("Paired diff") < page.words.index("How it was made")


def test_what_the_comparison_measured_is_on_the_page(page):
    comparison = sample_comparison()
    for arm in ARMS:
        runs = comparison.of(arm)
        mean = sum(run.heldout_nll for run in runs) / len(runs)
        assert f"{mean:.4f} ±" in page.words
        assert f"{math.exp(mean):.2f}" in page.words
        assert f"{runs[0].total_parameters:,}" in page.words
    d = comparison.difference("untied", "heldout_nll")
    assert f"{d.mean:.4f} [{d.low:.4f}, {d.high:.4f}]".replace("-", "−") in page.words
    for fact in (comparison.command, comparison.data["sha256"], "521,416", "2.13.0", "All tuning trials", "␣of → ␣the"):
        assert fact in page.words


def test_only_a_demo_is_called_one():
    assert DEMO.capitalize() in Page(render(sample_comparison())).words
    assert "evidence for your model" not in Page(render(sample_comparison(demo=False))).words


def test_every_figure_is_named_and_has_its_numbers(page):
    plots = [a for a in page.all("div") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == 11
    assert all(len(a["aria-label"]) > 40 for a in plots)
    assert len(page.all("details")) == len(plots) + 3  # and bigrams, and the tuning trials within what was set and read
    assert len(page.all("h3")) >= len(plots)
    assert len(page.all("h1")) == 1


def test_what_a_user_wrote_is_text():
    sample = sample_comparison()
    evil = complete(
        replace(
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
    )
    text = render(evil)
    page = Page(text)
    assert len(page.scripts) == 3  # figures, plotly, ours
    assert page.all("img") == []
    assert EVIL in page.text  # the command, character for character
    json.loads(page.scripts[0])
    assert "<" not in page.scripts[0]
    assert "<script>" not in page.scripts[0]
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


def test_a_diverged_run_is_said_and_the_page_still_made():
    sample = sample_comparison()
    bad = replace(sample.runs[3], heldout_nll=math.nan, train_nll=math.inf, perplexity=math.inf)
    words = Page(render(complete(replace(sample, runs=[*sample.runs[:3], bad, *sample.runs[4:]])))).words
    assert "untied against tied: one of them diverged" in words
    assert "diverged" in words[words.index("Results") :]


def test_written_whole_and_readable(tmp_path, text):
    path = write_report(sample_comparison(), tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == text
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o444 == 0o444


def test_a_failing_write_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_report(sample_comparison(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path):
    for place in (tmp_path / "missing" / "report.html", tmp_path):
        with pytest.raises(RunError) as caught:
            write_report(sample_comparison(), place)
        assert str(place) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
