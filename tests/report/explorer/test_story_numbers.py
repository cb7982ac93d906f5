"""Test the numbers of a user's comparison in the story, and the links to its report."""

import json
import re
from dataclasses import replace
from urllib.parse import unquote

from tests.report.comparison_sample import sample_comparison
from tests.report.explorer.test_compared_runs import SMALL, write_run, write_unfinished

from tiewise.core.measurement import visible
from tiewise.report.comparison_measurement import verdict
from tiewise.report.comparison_page import render
from tiewise.report.explorer.page import explore
from tiewise.report.explorer.story_numbers import story_numbers


def sentences(comparison, step):
    return [each["sentence"] for each in story_numbers(comparison) if each["step"] == step]


def test_every_step_has_numbers_of_a_finished_comparison():
    assert {each["step"] for each in story_numbers(SMALL)} == {1, 2, 3, 4, 5}


def test_share_of_tables_is_that_of_the_parameters():
    for arm, sentence in zip(SMALL.arms, sentences(SMALL, 1), strict=True):
        run = SMALL.of(arm)[0]
        tables = sum(number for name, number in run.parameters.items() if name.endswith("table"))
        assert sentence.startswith(f"{arm}: tables have {tables:,} of {run.total_parameters:,} parameters ")
        assert f"({100 * tables / run.total_parameters:.1f} %)" in sentence


def test_logits_of_both_orders_are_those_of_the_direct_path():
    pair = SMALL.bigrams[0]
    left, right = visible(pair["left"]), visible(pair["right"])
    for path, one_way, both in zip(SMALL.direct_path, sentences(SMALL, 2), sentences(SMALL, 3), strict=True):
        i, j = path.tokens.index(pair["left"]), path.tokens.index(pair["right"])
        there, back = (f"{path.logits[a][b]:.2f}".replace("-", "−") for a, b in ((i, j), (j, i)))
        assert one_way == f"{path.arm}: the direct path gives {right} after {left} the logit {there}."
        assert both == f"{path.arm}: logit {there} for {right} after {left}, {back} for {left} after {right}."


def test_last_steps_repeat_the_verdict_and_the_probabilities_of_the_text():
    pair = SMALL.bigrams[0]
    assert sentences(SMALL, 4) == [verdict(SMALL)]
    (chances,) = sentences(SMALL, 5)
    assert f"probability {pair['forward']:.3f}, " in chances
    assert chances.endswith(f"with {pair['backward']:.3f}.")


def test_comparison_without_direct_path_has_sizes_and_verdict_alone():
    bare = replace(SMALL, direct_path=[], bigrams=[])
    assert {each["step"] for each in story_numbers(bare)} == {1, 4}


def test_every_step_links_to_the_section_of_the_report(visit, tmp_path):
    run = write_run(tmp_path / "a run", SMALL)
    (run / "report.html").write_text(render(SMALL), encoding="utf-8")
    (tmp_path / "pages").mkdir()
    path = explore(run).write(tmp_path / "pages" / "page.html")
    page = visit("at=symmetry", path=path).page
    for step in range(1, 6):
        page.locator(".steps button").nth(step - 1).click()
        shown = page.locator(".own li").all_inner_texts()
        assert shown == sentences(SMALL, step)
        address = page.locator(".own a").get_attribute("href")
        file, _, section = address.partition("#:~:text=")
        assert (path.parent / unquote(file)).resolve() == run / "report.html"
        report = (run / "report.html").read_text(encoding="utf-8")
        assert f">{unquote(section)}</h2>" in report


def test_page_without_a_report_opens_the_runs_instead(visit, tmp_path):
    path = explore(write_run(tmp_path / "run", sample_comparison())).write(tmp_path / "page.html")
    page = visit("at=symmetry", path=path).page
    page.get_by_role("button", name="Open the tab Runs").click()
    assert page.locator("#runs").count() == 1


def test_unfinished_run_adds_nothing_to_the_story(visit, tmp_path):
    path = explore(write_unfinished(tmp_path / "begun")).write(tmp_path / "page.html")
    assert visit("at=symmetry", path=path).page.locator(".own").count() == 0
    assert json.loads(re.search(r'"story":(\[\])', path.read_text(encoding="utf-8"))[1]) == []
