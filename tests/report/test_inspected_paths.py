"""The direct path in words, tables and figures: every number is the result's own."""

import pytest
from inspected_path_samples import direct
from tests.report.opened_page import page_of

from tiewise.report.inspected import direct_path as direct_words
from tiewise.report.inspected import direct_path_figures
from tiewise.report.sheet import Section

DIRECT = {"tied": direct(), "<un>tied": direct(False)}
PARTS = [(direct_words, direct_path_figures, DIRECT)]


@pytest.mark.parametrize(("words", "figures", "found"), PARTS)
def test_lines_tables_and_panels_fit_together(words, figures, found):
    for chosen in (found, dict([next(iter(found.items()))])):
        said = words.lines(chosen)
        assert said
        assert all(line.endswith(".") and "nan" not in line and "None" not in line for line in said)
        for caption, table in words.tables(chosen):
            assert caption
            assert {len(row) for row in table.rows} == {len(table.header)}
        panels = figures.panels(chosen)
        for panel in panels:
            assert panel.title
            assert panel.caption
            assert panel.figure.layout.height
            assert {len(row) for row in panel.table.rows} == {len(panel.table.header)}
        page = page_of(Section(words.TITLE, panels))
        assert "<York>" not in page.replace("\\u003cYork", "")
        assert "<un>" not in page


def test_sentences_carry_the_numbers():
    lines = "\n".join(direct_words.lines(DIRECT))
    assert "tied holds one table at both ends" in lines
    assert "‖M − Mᵀ‖²/‖M‖² = 1.990" in lines
    assert "40.0% [38.0%, 42.0%] of 2,000 sampled" in lines
    assert "“New” → “<York>” the probability 0.02 (logit 1.25, rank 5)" in lines
    assert "none is applied" in lines


def test_pairs_as_bars_and_points():
    panels = {panel.title: panel for panel in direct_path_figures.panels(DIRECT)}
    bars = panels["Requested pairs: logits"].figure.data
    assert [bar.name for bar in bars] == ["tied", "&lt;un&gt;tied"]
    assert list(bars[0].y) == ["New → &lt;York&gt;", "&lt;York&gt; → New"]
    assert list(bars[0].x) == [1.25, 1.25]
    points = panels["Requested pairs: probabilities"].figure.data
    assert list(points[0].x) == [0.02, 1e-12]  # what is smaller still is drawn at the end
    assert points[0].customdata[1] == 1e-20


def test_without_pairs_only_the_asymmetry_is_left():
    assert len(direct_path_figures.panels({"tied": direct(pairs=())})) == 1
