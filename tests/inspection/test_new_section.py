"""A section that is added as one file is in words, table, figure, JSON and evidence, and no other line changes."""

import io
import json

import pytest
from rich.console import Console
from tests.inspection.tiny_folders import write_model

from tiewise.core.found import ONE
from tiewise.inspection import request, section, sections
from tiewise.inspection.inspect import inspect
from tiewise.report.inspection_page import render
from tiewise.report.inspection_view import inspection_view

SOURCE = """
from tiewise.core.found import ONE, Found, Quantity
from tiewise.inspection.section import section

@section(asks="Is the table square?", place=1)
def squareness(subject, bench):
    asked = {"chance": 0.0, "unit": "ratio", "question": "Is it square?", "above": ONE}
    sides = Quantity("ratio of its sides", 0.5, 0.4, 0.6, 9, **asked)
    return Found("hardly", (sides, Quantity("rows", 40, main=False)), notes=("a note",))
"""


@pytest.fixture
def added(tmp_path, monkeypatch):
    """The folder of sections, with one more file."""
    (tmp_path / "sections").mkdir()
    (tmp_path / "sections/squareness.py").write_text(SOURCE)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path / "sections")])
    for module, name in ((request, "SECTIONS"), (section, "NAMES")):
        monkeypatch.setattr(module, name, (*getattr(module, name), "squareness"))
    yield
    section.SECTIONS.pop("squareness", None)


def test_a_section_is_one_file(added, tmp_path):
    found = inspect(write_model(tmp_path / "tiny"), only=["squareness"])
    record = json.loads(json.dumps(found.record(), allow_nan=False))["sections"]
    assert record["squareness"]["found"]["tiny"]["quantities"][0]["value"] == 0.5
    (row,) = record["evidence"]["found"][""]["rows"]
    assert (row["question"], row["speaks"], row["section"]) == ("Is it square?", ONE, "squareness")
    said = io.StringIO()
    Console(file=said, width=80).print(inspection_view(found, full=True))
    page = render(found, "tiewise inspect")
    for text in ("Is the table square?", "Hardly.", "ratio of its sides", "0.500", "Is it square?", "a note"):
        assert text in said.getvalue()
        assert text in page
    assert '"error_x"' in page  # a figure with its interval
    assert "Is the table square?" in page.partition("</nav>")[0]
