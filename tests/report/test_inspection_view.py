"""The terminal's view of an inspection: a first minute on one screen, every table for whoever asks."""

import io
import json

import pytest
from rich.console import Console
from tests.inspection.test_tables_over_seeds import planted, write_run

from tiewise.core.found import ONE, Found, Listing, Quantity
from tiewise.inspection.evidence import with_evidence
from tiewise.inspection.request import Request
from tiewise.inspection.section import Inspection, SectionFound, sections
from tiewise.inspection.subject import subjects_of
from tiewise.report.inspection_view import MORE, inspection_view

HOSTILE = "[red]x[/red]"


def one(label, place):
    question = {"question": "Do the two uses of the table pull the same way?", "above": ONE} if place < 3 else {}
    every = (
        Quantity("first", 0.5, 0.4, 0.6, 9, chance=0.0, unit="cosine", **question),
        Quantity("second", 0.25, main=False, unit="cosine"),
    )
    return Found(f"it is so, for once, {HOSTILE}", every, listings=(Listing("Rows", ("row",), (("listed",),)),)).about(
        label
    )


@pytest.fixture
def inspection(tmp_path):
    """Of a comparison of two arms over three seeds: all sections but one measured."""
    run = write_run(tmp_path / "run", planted((1, 2, 3)))
    assert json.loads((run / "results.json").read_text())["seeds"] == [1, 2, 3]
    subjects = subjects_of([run])
    names = [section.name for section in sections()]
    made = [SectionFound(n, {s.label: one(s.label, i) for s in subjects}, {}) for i, n in enumerate(names[:-1])]
    made.append(SectionFound(names[-1], {}, {s.label: "it repeats no block" for s in subjects}))
    return with_evidence(Inspection(subjects, Request(), tuple(made)))


def printed(inspection, **options):
    said = io.StringIO()
    Console(file=said, width=80).print(inspection_view(inspection, **options))
    return said.getvalue().splitlines()


def test_the_first_minute_fits_one_screen(inspection):
    lines = printed(inspection)
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert text.index("Tie or not?") < text.index("Which has the lower held-out") < text.index(HOSTILE)
    assert (
        sum(HOSTILE in line for line in lines) == len(inspection.sections) - 2
    )  # one sentence for each section, not each model
    assert "→ one table" in text
    assert f"{inspection.sections[-1].name}: it repeats no block" in text
    assert MORE in text
    assert not any(word in text for word in ("second", "listed", "0.250"))


def test_full_prints_every_table(inspection):
    text, count = "\n".join(printed(inspection, full=True)), (len(inspection.sections) - 2) * len(inspection.subjects)
    assert MORE not in text
    assert text.count("listed") == count
    assert text.count("0.250") == count
