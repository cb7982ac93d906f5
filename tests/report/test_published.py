"""Published figures beside a run's own: of its recipe, boundary, settings and text, and no others."""

import pytest

from tiewise.core.ledger import results
from tiewise.core.spec import BoundarySpec
from tiewise.report.published import TEXTS, Beside, lines, table


def beside(recipe="pytorch-200", changed=(), own=None, text="PTB"):
    words, vocab = TEXTS.get(text, (1000, 50))
    data = {"splits": {"train": {"tokens": words}}, "tokenizer": {"vocab": vocab}}
    return Beside(recipe, changed, own or {"untied": [117.0, 118.0], "tied": [110.5]}, data)


def test_published_and_own_side_by_side():
    found = table(beside())
    assert found.header[2:] == ["published", "reproduced", "this run"]
    assert found.rows == [["untied", "PTB", "117.61", "–", "117.50 ± 0.71"], ["tied", "PTB", "110.44", "–", "110.50"]]
    assert len(lines(beside())) == 1


def test_reproductions_stand_beside_what_they_repeat():
    (row,) = table(beside("press-wolf-small", own={"tied": [111.0]})).rows
    assert row == ["tied", "PTB", "112.40", "110.27, 110.25", "111.00"]


def test_settings_must_match():
    assert table(beside(changed=["epochs=40"])).rows == [["tied", "PTB", "87.17", "–", "110.50"]]
    assert table(beside(changed=["width=20"])) is None
    assert "No published figure" in lines(beside(changed=["width=20"]))[0]


def test_the_text_chooses_the_figures():
    other = beside("press-wolf-small", own={"tied": [99.0]}, text="elsewhere")
    assert [r[1] for r in table(other).rows] == ["PTB"]
    assert "do not repeat the published ones" in lines(other)[1]
    assert table(beside(text="WikiText-2")) is None


@pytest.mark.parametrize(("text", "figures"), [("PTB", ["82.70 (PTB)"]), ("WikiText-2", ["98.90 (WikiText-2)"])])
def test_figures_of_a_setting_known_in_part_are_named_and_match_no_run(text, figures):
    found = beside("inan-200", own={"tied": [99.0]}, text=text)
    assert table(found) is None
    (said,) = lines(found)
    assert "no repetition" in said
    assert all(figure in said for figure in figures)
    assert said.count("(PTB)") + said.count("(WikiText-2)") == 1
    assert all(r.status == "open" for r in results() if r.recipe.startswith("inan-"))


def test_a_run_that_diverged():
    assert table(beside(own={"tied": [float("nan")]})).rows[0][-1] == "diverged"


@pytest.mark.parametrize("result", [r for r in results() if r.recipe], ids=lambda r: f"{r.recipe}-{r.arm}-{r.value}")
def test_every_figure_belongs_to_an_arm(result):
    assert str(BoundarySpec.parse(result.arm)) == result.arm
    assert result.status in ("published", "reproduced", "open")
