"""Frame of an inspection: sections that run, reasons for omitted sections, and failing requests."""

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
from tiewise.inspection.sections import section_names
from tiewise.inspection.workspace import Effort, NotApplicable, Request, Section
from tiewise.report.inspection_page import inspection_page
from tiewise.report.views import inspection_view


def count_tensors(subject, workspace):
    report_progress("rows", 1, 1)
    tensors = len(subject.folder.tensors)
    return Measurement(f"{tensors} rows", (Quantity("rows", tensors),))


def refuse_folder(subject, workspace):
    raise CheckpointError(f"{subject.label} is refused", "take another")


def require_second_model(subject, workspace):
    raise NotApplicable("needs two models", "give a second one")


MEASURES = (
    Section("rows", "How many?", 1, count_tensors),
    Section("refused", "Why?", 2, refuse_folder),
    Section("two", "Which?", 3, require_second_model),
    Section("read", "What?", 4, count_tensors, text=True),
)


@pytest.fixture
def subjects(tmp_path):
    return open_models([write_model(tmp_path / "a"), write_model(tmp_path / "b", tied=False)])


def test_measure_sections_returns_every_measurement_or_the_reason(subjects):
    ticks = []
    with listen_to_progress(lambda *tick: ticks.append(tick)):
        found = measure_sections(subjects, Request(), MEASURES)
    assert {label: one["rows"].value for label, one in found.found("rows").items()} == {"a": 1, "b": 2}
    assert ticks == [("a: rows", 500, 8000), ("b: rows", 1500, 8000)]  # 1,000 for each of eight calls
    assert found.section("refused").left_out == {label: f"{label} is refused; take another" for label in ("a", "b")}
    assert found.section("two").left_out == dict.fromkeys(("a", "b"), "needs two models; give a second one")
    assert found.section("read").left_out == dict.fromkeys(("a", "b"), "needs a text; give --text")
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    (q,) = record["sections"]["rows"]["found"]["b"]["quantities"]
    assert (q["value"], q["low"], q["of"]) == (2, None, "b")
    assert list(record["subjects"]) == ["a", "b"]


def test_inspection_repr_is_a_summary(subjects):
    assert repr(measure_sections(subjects, Request(), MEASURES)) == (
        f"{inspection.NO_VERDICT[0].upper()}{inspection.NO_VERDICT[1:]}.\n"
        "Inspection of a, b\n"
        f"  evidence: {inspection.NO_VERDICT}\n"
        "  rows: a: 1 rows; b: 2 rows\n"
        "  refused: none: a is refused; take another; b is refused; take another\n"
        "  two: none: needs two models; give a second one\n"
        "  read: none: needs a text; give --text\n"
        "  .found(name): one section; .to_dict(): all, for JSON"
    )


def test_measure_sections_reports_overall_progress_that_never_decreases(subjects):
    def busy(subject, workspace):
        for what, total in (("first", 5), ("second", 0), ("third", 3), ("first", 2)):
            for done in range(total + 1):
                report_progress(what, done, total)
        return Measurement("busy")

    ticks = []
    measures = (Section("busy", "?", 1, busy), Section("two", "?", 2, require_second_model))
    with listen_to_progress(lambda *tick: ticks.append(tick)):
        measure_sections(subjects, Request(), measures)
    parts = [done for _, done, _ in ticks]
    assert parts == sorted(parts)
    assert {total for *_, total in ticks} == {4000}
    assert 1000 < max(parts) < 2000
    assert ticks[5] == ("a: first", 500, 4000)


def test_measure_sections_runs_text_sections_when_given_a_text(subjects, monkeypatch):
    monkeypatch.setattr("tiewise.inspection.workspace.Workspace.ids", lambda workspace, subject: None)
    assert set(measure_sections(subjects, Request(texts=("builtin",)), MEASURES).found("read")) == {"a", "b"}


@pytest.mark.parametrize(
    ("only", "said"),
    [(("refused",), "a is refused; take another"), (("two",), "needs two models; give a second one")],
)
def test_measure_sections_raises_if_a_requested_section_fails(subjects, only, said):
    with pytest.raises((CheckpointError, NotApplicable), match=said):
        measure_sections(subjects, Request(only=only), MEASURES)


def test_measure_sections_raises_if_no_section_can_run(subjects):
    with pytest.raises(RunError, match="nothing to measure; give --text, or a second model"):
        measure_sections(subjects, Request(), MEASURES[2:])


def test_request_selects_sections_by_name_and_keeps_their_order(subjects):
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
def test_labels_use_the_parts_that_distinguish_folders(places, named):
    assert labels([Path(place) for place in places]) == named


@pytest.mark.parametrize(
    ("text", "pairs"),
    [("New, York", (("New", "York"),)), ("New,York; San , Diego", (("New", "York"), ("San", "Diego")))],
)
def test_parse_pairs_reads_pairs_of_tokens(text, pairs):
    assert parse_pairs(text) == pairs


@pytest.mark.parametrize("text", ["New", "New, York, City", "New, ; a, b", ""])
def test_parse_pairs_refuses_text_that_is_not_pairs(text):
    with pytest.raises(DataError, match='is no pair; write two tokens: "New, York"'):
        parse_pairs(text)


@pytest.mark.parametrize(("name", "value"), [("windows", 7), ("length", 1), ("samples", 1), ("lens_steps", 19)])
def test_check_request_refuses_too_little_effort(name, value):
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
        (
            "adapter_config.json",
            1,
            CheckpointError,
            "an adapter, which has no tables of its own; merge it into its base first: tiewise adapter merge",
        ),
    ],
)
def test_open_models_refuses_folders_that_are_not_models_and_names_their_kind(tmp_path, files, times, error, said):
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


def test_every_file_in_sections_defines_one_section_with_question_and_order():
    found = inspection.sections()
    assert {one.name for one in found} == set(inspection.SECTIONS) == set(section_names())
    assert all(one.question.endswith("?") for one in found)
    assert [one.order for one in found] == sorted({one.order for one in found})


def test_inspect_runs_a_section_added_as_one_file(monkeypatch, tmp_path):
    (tmp_path / "squareness.py").write_text(SOURCE)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    monkeypatch.setitem(inspection.SECTIONS, "squareness", None)  # the file sets this entry; monkeypatch restores it
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
    assert '"error_x"' in page  # the figure has an interval
    assert "Is the table square?" in page.partition("</nav>")[0]
