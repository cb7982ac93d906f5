"""Test what every result offers: it prints its answer, and turns into a dict, a data frame and figures."""

import json
import sys

import pytest

import tiewise
from tiewise.core.errors import UnsupportedError
from tiewise.core.measurement import Curve, Measurement, Quantity
from tiewise.core.result import MOST_PRINTED, PrintedResult, html_table, text_table


class Counted(PrintedResult):
    def __init__(self, count):
        self.count = count

    def answer_text(self):
        return f"{self.count} <rows>."

    def rows(self):
        return [{"name": f"row {number}", "half": number / 2, "count": 1000 * number} for number in range(self.count)]

    def record(self):
        return {"count": self.count}


def test_result_prints_answer_then_aligned_table():
    table = "name     half  count\nrow 0  0.0000      0\nrow 1  0.5000  1,000"
    assert str(Counted(2)) == repr(Counted(2)) == f"2 <rows>.\n\n{table}"
    assert str(Counted(0)) == "0 <rows>."


def test_long_table_names_the_rows_that_are_not_printed():
    lines = text_table(Counted(MOST_PRINTED + 3).rows()).splitlines()
    assert len(lines) == MOST_PRINTED + 2
    assert lines[-1] == "… 3 more rows: to_pandas()"
    page = html_table(Counted(MOST_PRINTED + 3).rows())
    assert page.count("<tr>") == MOST_PRINTED + 2
    assert page.endswith('<tr><td colspan="3">… 3 more rows</td></tr></table>')
    assert "more rows" not in html_table(Counted(MOST_PRINTED).rows())


def test_notebook_view_escapes_text():
    assert Counted(1)._repr_html_().startswith("<p>1 &lt;rows&gt;.</p><table><tr><th>name</th>")
    assert html_table([{"a<b": "<i>"}]) == "<table><tr><th>a&lt;b</th></tr><tr><td>&lt;i&gt;</td></tr></table>"


def test_to_pandas_has_all_rows_and_names_the_package_that_is_missing(monkeypatch):
    frame = Counted(50).to_pandas()
    assert (list(frame.columns), len(frame)) == (["name", "half", "count"], 50)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas: pip install pandas"):
        Counted(1).to_pandas()


def test_result_without_figures_names_the_numbers():
    assert Counted(1).figures() == []
    with pytest.raises(UnsupportedError, match=r"Counted has no figures; to_pandas\(\) returns its numbers"):
        Counted(1).figure("curves")


def test_plan_has_figures_and_suggests_the_nearest_name():
    plan = tiewise.plan("gpt2", "tied,untied")
    assert plan.figures()[:2] == ["shares", "memory"]
    assert plan.figure("memory").data
    with pytest.raises(UnsupportedError, match="no figure 'memry'; did you mean memory"):
        plan.figure("memry")
    frame = plan.to_pandas()
    assert list(frame["total"]) == [124_439_808, 163_037_184]
    assert plan.to_dict() == plan.record()
    assert plan._repr_html_().startswith("<p>Tie: saves 38.6 M of 163 M parameters")


def test_measurement_has_rows_and_figures():
    curve = Curve("loss", (1.0, 2.0), (3.0, 2.5))
    measurement = Measurement("it falls", (Quantity("loss", 2.5, 2.4, 2.6, unit="nats per token"),), (curve,))
    assert str(measurement).splitlines()[0] == "it falls"
    assert measurement.rows()[0]["low"] == 2.4
    assert measurement.figures() == ["figure"]
    assert json.dumps(measurement.to_dict())
