"""Test the runs page against the reports of its comparisons, with several folders side by side."""

import json
import statistics
from dataclasses import replace

import pytest
from tests.report.comparison_sample import albert_comparison, sample_comparison
from tests.report.opened_page import EVIL

from tiewise.core.errors import CheckpointError, RunError
from tiewise.core.measurement import plain
from tiewise.report.comparison_measurement import difference, results, verdict
from tiewise.report.explorer.compared import compared
from tiewise.report.explorer.page import explore
from tiewise.training.finding import complete
from tiewise.training.folder import METRICS, RESULT, RESULTS, folder_name
from tiewise.training.results import CurvePoint

SMALL, LARGE = sample_comparison(demo=False), sample_comparison(arms=("tied", "untied"), seeds=(0, 1, 2, 3), steps=1600)


def write_run(folder, comparison):
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(json.dumps(comparison.record()))
    (folder / "run.yaml").write_text(json.dumps({"arms": comparison.arms, "seeds": len(comparison.seeds)}))
    return folder


def write_unfinished(folder, arms=("tied", "factored:64"), *, seeds=2, **more):
    """Write a comparison with one finished run, one cut off in the middle of a line, and the others unstarted."""
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps({"arms": arms, "seeds": seeds, **more}))
    for seed, steps in ((1, 5), (2, 3)):
        own = folder / folder_name(arms[0]) / f"seed-{seed}"
        own.mkdir(parents=True)
        lines = [json.dumps({"step": 10 * i, "train_nll": 9 - i, "tune_nll": 9.5 - i}) for i in range(1, steps + 1)]
        (own / METRICS).write_text("\n".join([*lines, '{"step": 9']))
    (own / RESULT).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def page_of_three(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    folders = write_run(root / "small", SMALL), write_run(root / "large", LARGE), write_unfinished(root / "begun")
    return explore(*folders).write(root / "page.html")


def test_page_shows_verdicts_first_and_the_tables_of_the_report(visit, page_of_three):
    page = visit(path=page_of_three).page  # the page opens on the tab of the runs
    texts = page.locator("#runs > .finding").all_inner_texts()
    assert texts[:2] == [f"small: {verdict(SMALL)}", f"large: {verdict(LARGE)}"]
    assert texts[2] == "begun: Not finished: 1 of 4 runs have ended, so there is no result yet."
    for name, comparison in (("small", SMALL), ("large", LARGE)):
        rows = page.get_by_role("region", name=f"Results of {name}").locator("tr").all()
        shown = [row.locator("th, td").all_inner_texts() for row in rows]
        table = results(comparison)
        assert shown == [list(table.header), *map(list, table.rows)]
    wanted = [d for c in (SMALL, LARGE) for arm in c.arms if (d := c.difference(arm, "heldout_nll"))]
    texts = page.locator(".intervals > div > :last-child").all_inner_texts()
    assert texts == [str(difference(d)) for d in wanted]
    assert page.locator(".about pre").last.inner_text().endswith("begun --resume")


def test_curves_show_the_mean_over_seeds_on_a_shared_or_separate_scale(visit, page_of_three):
    page = visit("at=runs", path=page_of_three).page
    ticks = "[...e.querySelectorAll('text[text-anchor=end]')].map(t => t.textContent).join()"
    scales = f"[...document.querySelectorAll('svg.curves')].map(e => {ticks})"
    assert len(set(one := page.evaluate(scales))) == 1 < len(one) == 3
    page.get_by_role("button", name="A scale for each").click()
    assert len(set(page.evaluate(scales))) > 1
    for measure, value in (("Loss on tuning text", "tune_nll"), ("Training loss", "train_nll"), ("Cosine", "cosine")):
        page.get_by_role("button", name=measure).click()
        legend = page.locator("figure", has_text="small").locator(".legend").first.locator("b").all_inner_texts()
        last = [[getattr(run.curve[-1], value) for run in SMALL.of(arm)] for arm in SMALL.arms]
        assert legend == [plain(statistics.fmean(of), 4) for of in last if of[0] is not None]
    page.get_by_role("button", name="Minus the reference").click()
    tied, untied = (statistics.fmean(run.curve[-1].tune_nll for run in SMALL.of(arm)) for arm in ("tied", "untied"))
    assert page.locator(".legend b").first.inner_text() == plain(untied - tied, 4)
    assert "r.measure=ahead" in page.url


def test_arm_has_one_colour_in_every_run_and_page_shows_markup_as_text(visit, tmp_path):
    runs = [replace(run, arm=EVIL) if run.arm != "tied" else run for run in SMALL.runs[:6]]
    evil = complete(replace(SMALL, arms=["tied", EVIL], runs=runs))
    paths = write_run(tmp_path / EVIL.replace("/", "_")[:40], evil), write_run(tmp_path / "large", LARGE)
    page = visit(path=explore(*paths).write(tmp_path / "page.html")).page
    assert EVIL in page.locator(".legend").first.inner_text()
    strokes = "[...document.querySelectorAll('.legend')].map(e => e.querySelector('path').getAttribute('stroke'))"
    assert page.evaluate(strokes) == ["#2f7fd1", "#2f7fd1"]


def test_page_shows_the_verdict_of_runs_with_missing_or_diverged_curves(visit, tmp_path):
    bare = complete(replace(SMALL, runs=[replace(run, curve=[]) for run in SMALL.runs]))
    lost = [CurvePoint(1, 1, tune_nll=5.0), CurvePoint(2, 2, tune_nll=float("nan"))]
    nan = complete(replace(LARGE, runs=[replace(run, heldout_nll=float("nan"), curve=lost) for run in LARGE.runs]))
    for name, comparison in (("bare", bare), ("nan", nan), ("albert", albert_comparison())):
        page = visit(path=explore(write_run(tmp_path / name, comparison)).write(tmp_path / f"{name}.html")).page
        assert page.locator("#runs .finding").inner_text() == verdict(comparison)
        assert not {"undefined", "false", "null"} & set(page.locator("#runs").inner_text().split())
    alone = write_unfinished(tmp_path / "alone", ("tied",), seed=1)
    page = visit(path=explore(alone).write(tmp_path / "alone.html")).page
    assert "nothing to compare it with" in page.locator("#runs .finding").inner_text()
    assert page.locator(".about pre").inner_text() == f"tiewise train --out {alone} --resume"


def test_compared_counts_unstarted_runs_without_searching_their_folders(tmp_path):
    (run,) = compared([write_unfinished(tmp_path / "many", seeds=10**15)])["runs"]
    assert run["verdict"].startswith("Not finished: 1 of 2000000000000000 runs have ended")


def test_compared_thins_long_curves_and_keeps_their_last_point(tmp_path):
    run = replace(LARGE.runs[0], curve=[CurvePoint(i, i, train_nll=5.0) for i in range(4_000)])
    record = compared([write_run(tmp_path / "long", complete(replace(LARGE, runs=[run, *LARGE.runs[4:5]])))])
    points = record["runs"][0]["measures"]["training"]["lines"][0]["points"]
    assert 300 < len(points) <= 401
    assert points[-1][0] == 3_999


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (RESULTS, "{", "cannot be read"),
        (RESULTS, '{"schema": 99}', "this version reads"),
        ("run.yaml", "arms: 3", "names no arms and seeds"),
        ("run.yaml", "[", "is not YAML"),
    ],
)
def test_explore_refuses_an_unreadable_run_with_a_remedy(tmp_path, name, text, said):
    (tmp_path / "run.yaml").write_text("arms: [tied]")
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=said) as error:
        explore(tmp_path)
    assert error.value.remedy


def test_explore_refuses_a_folder_that_is_neither_run_nor_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no file of tensors") as error:
        explore(tmp_path)
    assert "tiewise compare" in error.value.remedy
    with pytest.raises(RunError, match="one checkpoint, not 2"):
        explore(tmp_path, tmp_path / "other")
