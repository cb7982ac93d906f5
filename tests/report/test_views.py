"""Test the sentences and tables of inspection views, and that the terminal summary fits one screen."""

import html
import io
import math
import re

import numpy as np
import pytest
from rich.console import Console
from tests.inspection.running.one_layer_models import one_layer
from tests.inspection.sections.test_first_mlp import opened
from tests.inspection.sections.test_gradients import paths
from tests.inspection.sections.test_gradients_over_training import arm
from tests.inspection.sections.test_path_sections import checkpoint, text
from tests.inspection.sections.test_refinement import trajectory
from tests.inspection.sections.test_table_sections import over_seeds
from tests.inspection.test_tables_over_seeds import planted, write_run

from tiewise.core.measurement import NEITHER, ONE, TWO, Listing, Measurement, Quantity
from tiewise.inspection.inspection import (
    Inspection,
    SectionMeasurement,
    TieOrNot,
    as_sentence,
    joint_answer,
    open_models,
    sections,
    tie_or_not,
)
from tiewise.inspection.sections import gradients, gradients_over_training, refinement
from tiewise.inspection.sections.alignment import alignment_of
from tiewise.inspection.sections.bigrams import Fits, bigrams_of
from tiewise.inspection.sections.bottleneck import bottleneck_of
from tiewise.inspection.sections.direct_path import direct_path_of
from tiewise.inspection.sections.first_mlp import first_mlp_of
from tiewise.inspection.sections.precision import precision_of
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.inspection.sections.which_end import measurement_over_seeds
from tiewise.inspection.workspace import Request
from tiewise.report import views
from tiewise.report.views import MORE, inspection_view

HOSTILE = "[red]<b>x</b>[/red]"


def cosine_quantity(value=0.5, **more):
    return Quantity("cosine of rows", value, value - 0.1, value + 0.1, 40, 0.0, (-0.02, 0.03), unit="cosine", **more)


def make_measurement(answer="yes: they do", quantities=(), **more):
    return Measurement(answer, tuple(quantities), **more)


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Quantity("x", 0.19249, 0.1844, 0.1996, unit="cosine"), "0.192 [0.184, 0.200]"),
        (Quantity("x", 0.6181, 0.6012, 0.6299, unit="%"), "61.8 % [60.1, 63.0]"),
        (Quantity("x", -0.00234, -0.0199, 0.0123, unit="nats"), "−0.002 [−0.020, 0.012]"),
        (Quantity("x", -0.001234, unit="nats"), "−0.00123"),
        (Quantity("x", 3e-7, unit="of the norm"), "0.00000030"),
        (Quantity("x", 1_234_567), "1,234,567"),
        (Quantity("x", 5.28512, unit="nats per token", digits=4, deviation=0.00418), "5.2851 ± 0.0042"),
        (Quantity("x", -0.0123, -0.03, 0.01, unit="points", digits=2), "−1.23 [−3.00, 1.00]"),
        (Quantity("x", 15.8e6, unit="bytes"), "15.8 MB"),
        (Quantity("x", math.inf, unit="nats per token"), "diverged"),
        (Quantity("x", math.nan, unit="nats"), "–"),
        (Quantity("x", 0.0, unit="nats"), "0.000"),
        (Quantity("x", 2e-6, unit="relative"), "0.00000200"),
        (Quantity("x", -3.42e-9, unit="relative"), "−3.4e−09"),
    ],
)
def test_quantity_prints_its_value_interval_and_unit(quantity, text):
    assert str(quantity) == text


@pytest.mark.parametrize(
    ("value", "null", "speaks"),
    [
        (0.5, (), ONE),
        (-0.5, (), TWO),
        (0.05, (), NEITHER),  # the interval contains 0
        (0.5, (0.45,), NEITHER),  # the interval contains a value of permuted data
        (0.5, (0.39,), ONE),
    ],
)
def test_quantity_is_evidence_only_if_its_interval_excludes_no_effect(value, null, speaks):
    assert Quantity("q", value, value - 0.1, value + 0.1, 9, 0.0, null, below=TWO, above=ONE).speaks == speaks


def test_joint_answer_merges_equal_answers_of_all_models():
    assert joint_answer({"a": make_measurement(), "b": make_measurement()}) == "Yes: they do."
    assert joint_answer({"a": make_measurement(), "b": make_measurement("no")}) == "a: yes: they do; b: no."


def test_summary_has_a_row_for_each_model_and_a_column_for_each_main_quantity():
    both = {
        "a": make_measurement(quantities=[cosine_quantity(), cosine_quantity(0.25, main=False)]),
        "b": make_measurement(),
    }
    table = views.summary(both)
    assert table.header == ["model", "cosine of rows"]
    assert table.rows == [["a", "0.500 [0.400, 0.600]"], ["b", "–"]]
    assert not views.summary({"a": make_measurement()}).rows


def test_every_listing_shows_each_number_with_its_chance_and_explanation():
    listed_measurement = make_measurement(
        quantities=[cosine_quantity(main=False, why="of rows")], listings=(Listing("Rows", ("row",), (("x",),)),)
    )
    every, listed = views.every_listing({"a": listed_measurement.about("a")})
    assert every.rows == [
        ["cosine of rows", "a", "0.500 [0.400, 0.600]", "cosine", "0.000, permuted up to 0.030", "of rows"]
    ]
    assert (listed.name, listed.rows) == ("Rows, a", (("x",),))


def test_notes_prints_a_note_shared_by_all_models_once():
    both = {"a": make_measurement(notes=("of all", "of a")), "b": make_measurement(notes=("of all",))}
    assert views.notes(SectionMeasurement("x", both, {})) == ["of all", "a: of a"]
    assert views.notes(SectionMeasurement("x", {"a": make_measurement()}, {"b": "why", "c": "why"})) == [
        "left out of b, c: why"
    ]


def test_absent_names_empty_sections_with_their_reason():
    none = [SectionMeasurement(name, {}, {"a": "no text", "b": "no text"}) for name in ("lens", "tokens")]
    assert views.absent([*none, SectionMeasurement("x", {"a": make_measurement()}, {})]) == ["lens, tokens: no text"]


def test_numbers_lists_the_quantities_that_the_summary_omits():
    both = {
        "a": make_measurement(quantities=[cosine_quantity(), cosine_quantity(0.25, main=False)]),
        "b": make_measurement(),
    }
    assert views.numbers(both).rows == [["cosine of rows", "0.250 [0.150, 0.350]", "–"]]
    assert not views.numbers({"b": make_measurement()}).rows


def evidence_row(about, speaks, question="Alike?"):
    return "alignment", cosine_quantity(of=about, question=question, above=speaks)


def test_deciding_has_a_row_for_each_question_and_a_column_for_each_model():
    loss = evidence_row("untied − tied", NEITHER, "Lower loss?")
    table = views.deciding(
        TieOrNot((loss, evidence_row("tied, other", ONE)), "no verdict"), ["tied", "untied", "other"]
    )
    assert table.header == ["", "tied", "untied", "other"]
    value = "0.500 [0.400, 0.600]"
    assert table.rows == [
        ["Lower loss? (untied − tied)", "–", value, "–"],
        ["Alike?", f"{value} → one table", "–", f"{value} → one table"],
    ]
    assert not views.deciding(TieOrNot((), "no verdict"), ["tied"]).rows


# --- the terminal


def section_measurement(label, place):
    question = {"question": "Do the two uses of the table pull the same way?", "above": ONE} if place < 3 else {}
    every = (
        Quantity("first", 0.5, 0.4, 0.6, 9, chance=0.0, unit="cosine", **question),
        Quantity("second", 0.25, main=False, unit="cosine"),
    )
    listed = Listing("Rows", ("row",), (("listed",),))
    return Measurement(f"it is so, for once, {HOSTILE}", every, listings=(listed,)).about(label)


@pytest.fixture
def inspection(tmp_path):
    """Return an inspection of two arms over three seeds, with all sections but one measured."""
    run = write_run(tmp_path / "run", planted((1, 2, 3)))
    subjects = open_models([run])
    names = [section.name for section in sections()]
    measurements = [
        SectionMeasurement(n, {s.label: section_measurement(s.label, i) for s in subjects}, {})
        for i, n in enumerate(names[:-1])
    ]
    measurements.append(SectionMeasurement(names[-1], {}, {s.label: "it repeats no block" for s in subjects}))
    return inspection_of(subjects, measurements)


def inspection_of(subjects, measurements):
    first = SectionMeasurement("evidence", {"": tie_or_not(subjects, measurements)}, {})
    return Inspection(subjects, Request(), (first, *measurements))


def print_inspection(inspection, **options):
    output = io.StringIO()
    Console(file=output, width=80).print(inspection_view(inspection, **options))
    return output.getvalue().splitlines()


def test_terminal_shows_the_verdict_and_one_sentence_for_each_section(inspection):
    lines = print_inspection(inspection)
    text = "\n".join(lines)
    assert " ".join(text.split()).startswith(as_sentence(inspection.evidence.verdict))
    # one sentence for each section, not each model
    assert sum(HOSTILE in line for line in lines) == len(inspection.sections) - 2
    assert "→ one table" not in text
    assert f"{inspection.sections[-1].name}: it repeats no block" in text
    assert MORE in text
    assert not any(word in text for word in ("second", "listed", "0.250"))


def test_view_and_text_of_named_sections_open_with_their_answers_and_repeat_none(inspection):
    asked = [section for section in inspection.sections if section.name in ("alignment", "tokens")]
    subjects, answer = inspection.models, f"It is so, for once, {HOSTILE}."
    one = Inspection(subjects, Request(only=("alignment",)), (inspection.sections[0], asked[0]))
    assert print_inspection(one)[0] == str(one).splitlines()[0] == answer
    assert sum(HOSTILE in line for line in print_inspection(one)) == 1
    both = Inspection(subjects, Request(only=("alignment", "tokens")), (inspection.sections[0], *asked))
    assert print_inspection(both)[:2] == both.answer_text().splitlines() == [answer, answer]
    assert not any("which choice is better" in line for line in print_inspection(both))


def test_inspection_of_three_arms_and_every_section_fits_one_screen(tmp_path):
    models = planted((1, 2, 3))
    subjects = open_models([write_run(tmp_path / "run", models | {"factored:4": models["untied"]})])
    folders = {label: checkpoint(tmp_path / label, label == "tied")[0] for label in ("tied", "untied")}
    never, soon = map(
        Measurement,
        ("no earlier layer gives the final first choice", "the first choice can be read after layer 1 of 2"),
    )
    pulling = {"untied": paths(null=(math.nan,) * 2, cosine=math.nan), "tied": paths()}
    same = {
        "bigrams": bigrams_of(text(), folders["untied"], fits=Fits(frequent_count=5, steps=5)),
        "which_end": measurement_over_seeds(over_seeds(), "tied"),
        "gradients_over_training": gradients_over_training.measurement_of(arm((0.5,) * 10)),
        "tokens": tokens_of(folders["untied"], text()),
        "refinement": refinement.measurement_of(trajectory(), None, 2),
        "first_mlp": first_mlp_of(model := opened(one_layer("llama"), tmp_path / "model")),
        "precision": precision_of(model, windows := np.arange(96).reshape(8, 12) % model.vocab),
        "bottleneck": bottleneck_of(model, windows),
    }

    def measure_sections(label):
        own = folders.get(label, folders["untied"])
        pulled = gradients.measurement_of(pulling.get(label) or paths(cosine=-0.5))
        read = soon if label == "tied" else never
        tables = {"direct_path": direct_path_of(own), "alignment": alignment_of(own)}
        return {**tables, "gradients": pulled, "lens": read, **same}

    by_label = {subject.label: measure_sections(subject.label) for subject in subjects}
    reason = "one layer, applied once; give a model that repeats whole layers"
    *names, last = (section.name for section in sections())
    known = [name for name in names if name in by_label["tied"]]
    measurements = [
        SectionMeasurement(name, {label: own[name].about(label) for label, own in by_label.items()}, {})
        for name in known
    ]
    brief = {label: Measurement("a section that this test does not know").about(label) for label in by_label}
    measurements += [SectionMeasurement(name, brief, {}) for name in names if name not in known]
    measurements.append(SectionMeasurement(last, {}, dict.fromkeys(by_label, reason)))
    lines = print_inspection(inspection_of(subjects, measurements))
    # a section unknown to this test may add a question and an answer
    assert len(lines) <= 48 + 2 * (len(names) - len(known))
    assert max(map(len, lines)) <= 80


def test_notebook_shows_what_the_terminal_shows(inspection):
    page = inspection._repr_html_()
    shown = html.unescape(re.sub("<[^>]*>", "", page))
    assert all(text in shown for text in (HOSTILE, "→ one table", "Not measured"))
    assert MORE not in shown
    assert "<b>" not in page


def test_full_view_prints_every_table(inspection):
    text, count = (
        "\n".join(print_inspection(inspection, full=True)),
        (len(inspection.sections) - 2) * len(inspection.models),
    )
    assert MORE not in text
    assert text.index("Which has the lower validation") < text.index("→ one table") < text.index(HOSTILE)
    assert text.count("listed") == count
    assert text.count("0.250") == count
