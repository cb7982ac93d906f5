"""Gradient by path and its course on a page: true sentences, tables that agree with the measure, whole figures."""

import json

import numpy as np
import pytest
from tests.boundary.tiny_models import V, build

from tiewise.analysis.estimates import Estimate
from tiewise.boundary.locate import locate
from tiewise.checkpoint.folder import open_folder
from tiewise.internals.course import Arm, Course, Point, Range, published
from tiewise.internals.loaded import Opened
from tiewise.internals.path_gradients import path_gradients
from tiewise.report.inspected import course, course_figures, gradients, gradients_figures
from tiewise.report.sheet import Section, Sheet

HOSTILE = "<b>model</b>"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    words = {f"<i>{i}": i for i in range(V)}
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": words, "unk_token": "w"}}))
    made = {}
    for label, tied in ((HOSTILE, True), ("untied", False)):
        model = build("gpt2", tied=tied).eval()
        windows = np.random.default_rng(0).integers(3, V - 7, (24, 12))
        made[label] = path_gradients(Opened(open_folder(path), model, locate(model)), windows, batch=4)
    return made


def estimate(value, spread=0.01, n=2):
    return Estimate(value, value - spread, value + spread, n)


def sample(seeds=2):
    """Path B falls from 90 % to 60 % in one arm."""
    shares = np.linspace(0.9, 0.6, 10)
    points = tuple(
        Point(10 * k + 1, 10 * k + 10, (1 - s,) * seeds, (s,) * seeds, (s,) * seeds, (0.1,) * seeds)
        for k, s in enumerate(shares)
    )
    tenths = tuple(Range(p.first, p.step, estimate(p.share_b[0])) for p in points)
    whole = Range(1, 100, estimate(0.75))
    return Course(100, 512, (Arm(HOSTILE, (1, 2)[:seeds], points, whole, tenths, (whole,)),), published())


def page(*sections):
    text = {"command_name": "inspect", "title": "t", "subject": "s", "heading": "h", "lead": "", "results": ""}
    return Sheet(**text, note="", sections=sections, command="c").render()


def test_lines_say_what_was_measured(found):
    lines = gradients.lines(found)
    one = found[HOSTILE]
    share = gradients.percent(one.per_batch.share_b.value)
    assert any(share in line and "Path B" in line for line in lines)
    assert sum("cosine of" in line for line in lines) == 2  # of the tied model alone: gradient and step
    assert any(f"{one.rows.absent} of {V} tokens" in line for line in lines)
    assert sum("not commensurable" in line for line in lines) == 2
    assert all(line.endswith(".") and "nan" not in line for line in lines)
    assert all(any(label in line for label in found) for line in lines)  # each is true on its own


def test_tables_hold_the_measure(found):
    tables = dict(gradients.tables(found))
    whole = tables["Path A (lookup) and Path B (output) of the whole table"]
    assert [row[0].rpartition(": ")[0] for row in whole.rows] == [HOSTILE] * 4 + ["untied"] * 4
    assert whole.rows[0][5] == gradients.percent(found[HOSTILE].whole.share_b)
    assert whole.rows[4][4] == "–"  # two tables have no cosine
    for caption, table in tables.items():
        assert all(len(row) == len(table.header) for row in table.rows), caption
        assert not any("nan" in cell for row in table.rows for cell in row), caption


def test_panels_draw_every_model_and_escape_its_name(found):
    panels = gradients_figures.panels(found)
    assert len(panels) == 4
    for panel in panels:
        names = [trace.name for trace in panel.figure.data]
        assert any("&lt;b&gt;model" in name for name in names)
        assert any("untied" in name for name in names)
        assert panel.figure.layout.height
        assert all(len(row) == len(panel.table.header) for row in panel.table.rows)
    bars = next(t for t in panels[0].figure.data if t.name.endswith("model&lt;/b&gt;, gradient"))
    assert list(bars.y) == [part.gradient.share_b for part in found[HOSTILE].bins if part.tokens]
    assert sum(panels[2].figure.data[0].y) == pytest.approx(1)
    text = page(Section(gradients.TITLE, panels))
    assert "<b>model" not in text


def test_a_single_batch_leaves_out_what_needs_several(found):
    path = next(iter(found))
    one = found[path]
    alone = {path: type(one)(**{**vars(one), "by_batch": ()})}
    assert len(gradients_figures.panels(alone)) == 3
    assert len(gradients.tables(alone)) == 4


def test_the_course_in_words_and_tables():
    found = {"": sample()}
    lines = course.lines(found)
    assert "falls from 90.0 % (steps 1–10) to 60.0 % (steps 91–100): −30.0 points" in " ".join(lines)
    assert "90.2 % over steps 1–100, 70.3 % over steps 1–1,000, 63.6 % over steps 1–10,000" in lines[-1]
    assert "not commensurable" in lines[-1]
    tenths, beside = (table for _, table in course.tables(found))
    assert len(tenths.rows) == 11
    assert beside.rows[0] == ["1–100", "75.0 % [74.0 %, 76.0 %]", "90.2 %"]
    assert beside.rows[1] == ["1–1,000", "–", "70.3 %"]


def test_the_course_in_figures():
    share, norms, cosine = course_figures.panels({"": sample()})
    assert [len(panel.figure.data) for panel in (share, norms, cosine)] == [3, 6, 3]  # two seeds and their mean
    assert list(share.figure.data[2].y) == pytest.approx(np.linspace(0.9, 0.6, 10))
    levels = {shape.y0 for shape in share.figure.layout.shapes}
    assert levels == {result.value for _, result in published()}
    labels = [note.text for note in share.figure.layout.annotations]
    assert all("activation norms" in text for text in labels)
    assert "<b>model" not in page(Section(course.TITLE, [share, norms, cosine]))
    assert len(course_figures.panels({"": sample(1)})[0].figure.data) == 1
