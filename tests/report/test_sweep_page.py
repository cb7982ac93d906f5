"""Test the page of a study against planted differences: its answer, sign maps, curves and tables."""

import math
from dataclasses import replace

import pytest
from tests.report.opened_page import EVIL, Page, Visit, browser, pytestmark  # noqa: F401 - a fixture, and the skip
from tests.training.study.planted_study import AXES, gain, planted

from tiewise.core.measurement import NONE
from tiewise.report.sweep_answer import answer, turns
from tiewise.report.sweep_page import by_rank, curves, render, sign_maps, table, write_sweep
from tiewise.training.results import paired
from tiewise.training.study.grid import StudyGrid

RANKS = ("untied", "tied", "factored:8", "factored:16")


@pytest.fixture(scope="module")
def study():
    return planted()


def test_answer_names_where_the_sign_changes():
    planted_study = planted(
        axes={"train_tokens": [20000, 80000, 320000], "tokenizer": ["bpe:1024"]}, between=0, noise=1e-4
    )
    first, of = answer(planted_study)
    crossing = "from better to worse between train tokens 20,000 and 80,000"
    middle = next(row for row in planted_study.results if row.tokens == 80000)
    assert gain(128, 20000, 1024) < 0 < gain(128, 80000, 1024)  # the planted signs at this width
    assert middle.sign == 1
    assert first == f"tied against untied turns {crossing}."
    assert of == "The models have 131,072 to 262,144 parameters; larger ones were not measured."


@pytest.mark.parametrize(
    ("everywhere", "says"),
    [
        (0.03, ", of 24 settings: worse in 24 by 0.0"),
        (-0.03, ", of 24 settings: better in 24 by 0.0"),
        (0.0, ", of 24 settings: undecided in 24; the most sensitive detects"),
    ],
)
def test_answer_counts_verdicts_if_no_sign_changes(everywhere, says):
    planted_study = planted(true_gain=lambda *at: everywhere, between=0, noise=1e-3, seeds=6)
    assert answer(planted_study)[0].startswith(f"tied against untied{says}")


def test_turns_skips_an_undetected_setting_between_two_signs(study):
    line = [row for row in study.results if row.at["width"] == 64 and row.vocab == 4096]
    signs = [replace(line[0], heldout=replace(line[0].heldout, mean=-1.0, detected=True)),
             replace(line[1], heldout=replace(line[1].heldout, detected=False)),
             replace(line[2], heldout=replace(line[2].heldout, mean=1.0, detected=True))]  # fmt: skip
    grid = StudyGrid("", {"arms": ["untied", "tied"]}, {"train_tokens": AXES["train_tokens"]})
    (only,) = turns(replace(study, grid=grid, results=tuple(signs)), "tied − untied")
    assert only == "from better to worse between train tokens 20,000 and 320,000"


def test_answer_names_two_sign_changes_and_counts_the_others(study):
    first = answer(study)[0]
    assert first.count("from better to worse") == 2
    assert len(turns(study, "tied − untied")) == 5
    assert first.endswith(", and at 3 other places.")


def test_sign_maps_colour_detected_signs_and_print_every_number(study):
    maps = list(sign_maps(study))
    assert [one.name for one in maps] == ["tied − untied, tokenizer bpe:512", "tied − untied, tokenizer bpe:4096"]
    assert len({one.top for one in maps}) == 1  # all maps share one scale
    for one in maps:
        rows = {(f"{r.tokens:,}", str(r.at["width"])): r for r in study.results if one.name.endswith(str(r.vocab))}
        for i, down in enumerate(one.rows):
            for j, across in enumerate(one.columns):
                row = rows[down, across]
                assert one.values[i][j] == pytest.approx(row.heldout.mean if row.sign else math.nan, nan_ok=True)
                assert float(one.texts[i][j].replace("−", "-")) == pytest.approx(row.heldout.mean, abs=5e-5)


def test_table_names_the_arms_of_a_study_with_several():
    planted_study = planted(axes={"train_tokens": [20000, 80000]}, arms=RANKS)
    assert [row[1] for row in table(planted_study).rows] == ["tied", "factored:8", "factored:16"] * 2
    assert "arm" not in table(planted(axes={"width": [32, 64]})).header
    titles = [f"loss − untied, train tokens {tokens}" for tokens in ("20,000", "80,000")]
    assert [panel.title for panel in by_rank(planted_study)] == titles
    (panel,) = curves(planted_study)
    assert len(panel.table.header) == 4
    assert list(by_rank(planted(axes={"width": [32, 64]}))) == []


def test_table_has_bits_per_byte_where_vocabularies_differ():
    of_one = table(planted(axes={"width": [32, 64]}))
    assert "bits per byte" not in of_one.header
    made = planted(axes={"tokenizer": ["bpe:1024", "bpe:4096"]})
    bits = paired([1.5, 1.4], [1.52, 1.41], metric="bits_per_byte")
    first, second = made.results
    listing = table(replace(made, results=(replace(first, bits=bits), second)))
    assert listing.header[-2:] == ["bits per byte", "±"]
    half = (bits.high - bits.low) / 2
    assert listing.rows[0][-2:] == ["+0.0150", f"{half:.4f}"]
    assert listing.rows[1][-2:] == [NONE, NONE]


def test_axis_of_learning_rates_keeps_every_digit(study):
    rates = [0.001, 0.004, 0.016]
    rows = [
        replace(row, cell=f"{row.cell}-{rate}", at={"learning_rate": rate, "width": row.at["width"]})
        for rate, row in zip(rates * 4, study.results, strict=False)
    ]
    grid = replace(study.grid, axes={"learning_rate": rates, "width": AXES["width"]})
    rate_study = replace(study, grid=grid, results=tuple(rows))
    assert next(curves(rate_study)).figure.layout.xaxis.ticktext == ("0.001", "0.004", "0.016")


def test_sweep_page_leaves_diverged_and_unfinished_settings_blank(study):
    lost = replace(
        study.results[0].heldout, mean=math.nan, low=None, high=None, p=None, detectable=None, detected=False
    )
    partial_study = replace(study, results=(replace(study.results[0], heldout=lost), *study.results[1:-1]), left=1)
    assert answer(partial_study)[-1] == "Not finished: 1 of the grid’s cells; --resume trains the rest."
    assert "–" in Page(render(partial_study, "c")).words


def test_sweep_page_shows_markup_in_a_grid_as_text():
    planted_study = planted(axes={"train_tokens": [20000, 80000]})
    page = Page(render(replace(planted_study, grid=replace(planted_study.grid, asks=EVIL)), EVIL))
    assert EVIL in page.words
    assert not page.all("img")


@pytest.mark.parametrize("width", [1200, 390])
def test_sweep_page_fits_the_browser_window(browser, tmp_path, width):  # noqa: F811
    path = write_sweep(planted(tmp_path, arms=RANKS), "tiewise sweep g.yaml")
    with Visit(browser, path, width=width) as visit:
        assert (visit.said, visit.asked[1:]) == ([], [])
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        assert visit.page.locator(".plot .chart").count() > 0
