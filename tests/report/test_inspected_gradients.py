"""Gradient by path on a page: true sentences, tables that agree with the measure, whole figures."""

import json

import numpy as np
import pytest
from tests.boundary.tiny_models import V, build

from tiewise.boundary.locate import locate
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.internals.loaded import Opened
from tiewise.internals.path_gradients import path_gradients
from tiewise.report.inspected import gradients, gradients_figures
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
