"""Direct path, first MLP and bigrams in words, tables and figures: every number is the result's own."""

import json

import pytest
from inspected_path_samples import TARGET, bigrams, direct, mlp

from tiewise.report.inspected import bigrams as bigram_words
from tiewise.report.inspected import (
    bigrams_figures,
    direct_path_figures,
    first_mlp_figures,
)
from tiewise.report.inspected import direct_path as direct_words
from tiewise.report.inspected import first_mlp as mlp_words
from tiewise.report.sheet import Section, Sheet

DIRECT = {"tied": direct(), "<un>tied": direct(False)}
MLP = {"tied": mlp(), "<un>tied": mlp()}
BIGRAMS = {"tied": bigrams(), "<un>tied": bigrams(4.76)}
PARTS = [
    (direct_words, direct_path_figures, DIRECT),
    (mlp_words, first_mlp_figures, MLP),
    (bigram_words, bigrams_figures, BIGRAMS),
]


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
        page = Sheet("x", "x", "x", "x", "", "", "", [Section(words.TITLE, panels)], "x").render()
        assert "<York>" not in page.replace("\\u003cYork", "")
        assert "<un>" not in page


def test_sentences_carry_the_numbers():
    lines = "\n".join(direct_words.lines(DIRECT))
    assert "tied holds one table at both ends" in lines
    assert "‖M − Mᵀ‖²/‖M‖² = 1.990" in lines
    assert "40.0% [38.0%, 42.0%] of 2,000 sampled" in lines
    assert "“New” → “<York>” the probability 0.02 (logit 1.25, rank 5)" in lines
    assert "none is applied" in lines
    lines = "\n".join(mlp_words.lines(MLP))
    assert "goes from 0.160 [0.150, 0.180] to 1.020 [1.010, 1.040] on the same 4,000 tokens" in lines
    assert "132,224 parameters: 25% of one table, 14% of the model" in lines
    assert "pays 9.50" in lines
    lines = "\n".join(bigram_words.lines(BIGRAMS))
    assert "between 0.364 [0.348, 0.380] (guessed from other parts, too low on average) and 0.583" in lines
    assert "entropy 2.824 + irreversibility 0.214 + definiteness 0.202 + rank 0.000" in lines
    assert lines.count("The text has 623,322 tokens") == 1  # said once for both models
    assert "8.18 on the frequent tokens" in lines
    assert "4.76 on the frequent tokens" in lines


def test_the_stack_adds_up_to_each_path():
    parts = bigram_words.parts(BIGRAMS)
    assert list(parts) == ["best untied, width 128", "best tied, width 128", "tied, its own", "<un>tied, its own"]
    assert sum(parts["best tied, width 128"].values()) == pytest.approx(3.24)
    assert sum(parts["tied, its own"].values()) == pytest.approx(8.18)
    assert min(value for one in parts.values() for value in one.values()) >= 0


def test_pairs_as_bars_and_points():
    panels = {panel.title: panel for panel in first_mlp_figures.panels(MLP)}
    bars = panels["Requested pairs: logits"].figure.data
    assert [bar.name for bar in bars] == ["tied", "tied, with MLP₀", "&lt;un&gt;tied", "&lt;un&gt;tied, with MLP₀"]
    assert list(bars[0].y) == ["New → &lt;York&gt;", "&lt;York&gt; → New"]
    assert list(bars[1].x) == [1.25, 1.02]
    points = panels["Requested pairs: probabilities"].figure.data
    assert list(points[0].x) == [0.02, 1e-12]  # what is smaller still is drawn at the end
    assert points[0].customdata[1] == 1e-20
    assert (points[-1].name, list(points[-1].x)) == ("text", [0.02])
    assert panels["Requested pairs: probabilities"].table.rows[1][-1] == "0"


def test_heat_maps_share_a_scale_and_mark_unseen_pairs():
    panels = first_mlp_figures.panels(MLP)
    maps = [panel.figure for panel in panels if panel.figure.data[0].type == "heatmap"]
    assert [figure.layout.title.text for figure in maps] == [
        "Bigrams of the text",
        "Direct path of tied",
        "tied with its first MLP",
        "Direct path of &lt;un&gt;tied",
        "&lt;un&gt;tied with its first MLP",
    ]
    assert len({figure.layout.coloraxis.cmax for figure in maps}) == 1
    unseen = sum(value is None for row in TARGET.values for value in row)
    assert len(maps[0].data[1].x) == unseen == 3
    assert len(maps[1].data) == 1
    assert maps[0].layout.xaxis.ticktext[1] == '&lt;b&gt;"'
    values = json.loads(maps[0].to_json())["data"][0]["z"]
    assert values[0][1] is None


def test_without_text_and_pairs_only_the_asymmetry_is_left():
    found = {"tied": mlp(text=False, asked=False)}
    assert len(first_mlp_figures.panels(found)) == 1
    assert len(mlp_words.tables(found)) == 1
    assert len(mlp_words.lines(found)) == 3
    assert len(direct_path_figures.panels({"tied": direct(pairs=())})) == 1
