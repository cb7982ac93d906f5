"""The frame of an inspection: what is measured, what is left out and why, what ends it."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.inspection.tiny_folders import write_model

from tiewise.core.errors import CheckpointError, DataError, RunError
from tiewise.core.measurement import ONE, Measurement, Quantity
from tiewise.core.progress import listen_to_progress, report_progress
from tiewise.inspection import inspection, sections
from tiewise.inspection.inspection import check_request, inspect, labels, measure_sections, open_models, parse_pairs
from tiewise.inspection.workspace import Effort, NotApplicable, Request, Section
from tiewise.report.inspection_page import inspection_page
from tiewise.report.views import inspection_view


def counted(subject, workspace):
    report_progress("rows", 1, 1)
    tensors = len(subject.folder.tensors)
    return Measurement(f"{tensors} rows", (Quantity("rows", tensors),))


def refused(subject, workspace):
    raise CheckpointError(f"{subject.label} is refused", "take another")


def absent(subject, workspace):
    raise NotApplicable("needs two models", "give a second one")


MEASURES = (
    Section("rows", "How many?", 1, counted),
    Section("refused", "Why?", 2, refused),
    Section("two", "Which?", 3, absent),
    Section("read", "What?", 4, counted, text=True),
)


@pytest.fixture
def subjects(tmp_path):
    return open_models([write_model(tmp_path / "a"), write_model(tmp_path / "b", tied=False)])


def test_every_measure_of_every_subject_or_the_reason(subjects):
    ticks = []
    with listen_to_progress(lambda *tick: ticks.append(tick)):
        found = measure_sections(subjects, Request(), MEASURES)
    assert {label: one["rows"].value for label, one in found.found("rows").items()} == {"a": 1, "b": 2}
    assert ticks == [("a: rows", 500, 8000), ("b: rows", 1500, 8000)]  # of eight calls
    assert found.section("refused").left_out == {label: f"{label} is refused; take another" for label in ("a", "b")}
    assert found.section("two").left_out == dict.fromkeys(("a", "b"), "needs two models; give a second one")
    assert found.section("read").left_out == dict.fromkeys(("a", "b"), "needs a text; give --text")
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    (q,) = record["sections"]["rows"]["found"]["b"]["quantities"]
    assert (q["value"], q["low"], q["of"]) == (2, None, "b")
    assert list(record["subjects"]) == ["a", "b"]


def test_its_repr_is_a_summary(subjects):
    assert repr(measure_sections(subjects, Request(), MEASURES)) == (
        "Inspection of a, b\n"
        f"  evidence: {inspection.NO_VERDICT}\n"
        "  rows: a: 1 rows; b: 2 rows\n"
        "  refused: none: a is refused; take another; b is refused; take another\n"
        "  two: none: needs two models; give a second one\n"
        "  read: none: needs a text; give --text\n"
        "  .found(name): one section; .record(): all, for JSON"
    )


def test_progress_is_of_the_whole_and_only_grows(subjects):
    def busy(subject, workspace):
        for what, total in (("first", 5), ("second", 0), ("third", 3), ("first", 2)):
            for done in range(total + 1):
                report_progress(what, done, total)
        return Measurement("busy")

    ticks = []
    measures = (Section("busy", "?", 1, busy), Section("two", "?", 2, absent))
    with listen_to_progress(lambda *tick: ticks.append(tick)):
        measure_sections(subjects, Request(), measures)
    parts = [done for _, done, _ in ticks]
    assert parts == sorted(parts)
    assert {total for *_, total in ticks} == {4000}
    assert 1000 < max(parts) < 2000
    assert ticks[5] == ("a: first", 500, 4000)


def test_a_text_lets_the_measures_of_text_run(subjects, monkeypatch):
    monkeypatch.setattr("tiewise.inspection.workspace.Workspace.ids", lambda workspace, subject: None)
    assert set(measure_sections(subjects, Request(texts=("builtin",)), MEASURES).found("read")) == {"a", "b"}


@pytest.mark.parametrize(
    ("only", "said"),
    [(("refused",), "a is refused; take another"), (("two",), "needs two models; give a second one")],
)
def test_what_was_asked_for_and_cannot_be_had_ends_it(subjects, only, said):
    with pytest.raises((CheckpointError, NotApplicable), match=said):
        measure_sections(subjects, Request(only=only), MEASURES)


def test_nothing_to_measure_ends_it(subjects):
    with pytest.raises(RunError, match="nothing to measure; give --text, or a second model"):
        measure_sections(subjects, Request(), MEASURES[2:])


def test_sections_are_chosen_by_name_and_keep_their_order(subjects):
    every = (*MEASURES[:3], replace(MEASURES[3], text=False))
    found = measure_sections(subjects, Request(only=("read", "rows")), every)
    assert [one.name for one in found.sections] == ["evidence", "rows", "read"]


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (["/m/a", "/m/b"], ["a", "b"]),
        (["/m/x/a", "/m/y/a"], ["x/a", "y/a"]),
        (["/r/tied/final", "/r/untied/final"], ["tied/final", "untied/final"]),
        (["/r/tied/seed-1/final"], ["seed-1/final"]),
        (["/m/a", "/m/a"], ["/m/a (1)", "/m/a (2)"]),
    ],
)
def test_folders_are_named_by_what_tells_them_apart(places, named):
    assert labels([Path(place) for place in places]) == named


@pytest.mark.parametrize(
    ("text", "pairs"),
    [("New, York", (("New", "York"),)), ("New,York; San , Diego", (("New", "York"), ("San", "Diego")))],
)
def test_pairs_are_read(text, pairs):
    assert parse_pairs(text) == pairs


@pytest.mark.parametrize("text", ["New", "New, York, City", "New, ; a, b", ""])
def test_what_is_no_pair_is_refused(text):
    with pytest.raises(DataError, match='is no pair; write two tokens: "New, York"'):
        parse_pairs(text)


@pytest.mark.parametrize(("name", "value"), [("windows", 7), ("length", 1), ("samples", 1), ("lens_steps", 19)])
def test_too_little_effort_is_refused(name, value):
    option = name.replace("_", "-")
    with pytest.raises(DataError, match=f"--{option} {value}; use {value + 1} or more"):
        check_request(Request(effort=Effort(**{name: value})))


@pytest.mark.parametrize(
    ("files", "times", "error", "said"),
    [
        ("config.json", 1, CheckpointError, "no safetensors that can be read"),
        ("run.yaml results.json", 1, RunError, r"results\.json has schema None"),
        ("run.yaml results.json", 2, RunError, "is a comparison of several models; inspect it alone"),
        ("run.yaml", 1, RunError, "a comparison that is not finished; finish it with `tiewise compare --resume`"),
        ("adapter_config.json", 1, CheckpointError, "an adapter, which has no tables of its own; `tiewise merge` it"),
    ],
)
def test_a_folder_that_is_no_subject_says_what_it_is(tmp_path, files, times, error, said):
    for name in files.split():
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=said):
        open_models([tmp_path] * times)


SOURCE = """
from tiewise.core.measurement import ONE, Measurement, Quantity
from tiewise.inspection.workspace import section

@section(question="Is the table square?", order=1)
def squareness(model, workspace):
    asked = {"chance": 0.0, "unit": "ratio", "question": "Is it square?", "above": ONE}
    sides = Quantity("ratio of its sides", 0.5, 0.4, 0.6, 9, **asked)
    return Measurement("hardly", (sides, Quantity("rows", 40, main=False)), notes=("a note",))
"""


def test_every_file_of_the_folder_is_one_section_with_a_question_and_a_place():
    found = inspection.sections()
    assert {one.name for one in found} == set(inspection.SECTIONS) == set(inspection.section_names())
    assert all(one.question.endswith("?") for one in found)
    assert [one.order for one in found] == sorted({one.order for one in found})


def test_a_section_is_one_file(monkeypatch, tmp_path):
    (tmp_path / "squareness.py").write_text(SOURCE)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    monkeypatch.setitem(inspection.SECTIONS, "squareness", None)  # which the file sets, and the test takes back
    found = inspect(write_model(tmp_path / "tiny"), only=["squareness"])
    record = json.loads(json.dumps(found.record(), allow_nan=False))["sections"]
    assert record["squareness"]["found"]["tiny"]["quantities"][0]["value"] == 0.5
    (row,) = record["evidence"]["found"][""]["rows"]
    assert (row["question"], row["speaks"], row["section"]) == ("Is it square?", ONE, "squareness")
    said = io.StringIO()
    Console(file=said, width=80).print(inspection_view(found, full=True))
    page = inspection_page(found, "tiewise inspect")
    for text in ("Is the table square?", "Hardly.", "ratio of its sides", "0.500", "Is it square?", "a note"):
        assert text in said.getvalue()
        assert text in page
    assert '"error_x"' in page  # a figure with its interval
    assert "Is the table square?" in page.partition("</nav>")[0]
