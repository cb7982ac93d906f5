"""The terminal's view of an inspection: a first minute on one screen, every table for whoever asks."""

import html
import io
import json
import math
import re

import pytest
from rich.console import Console
from tests.inspection import test_sections as samples
from tests.inspection.test_gradients import paths
from tests.inspection.test_gradients_over_training import arm
from tests.inspection.test_table_sections import QUICK, ROWS, gaussian, one_model, over_seeds, tokens_found
from tests.inspection.test_tables_over_seeds import planted, write_run

from tiewise.analysis.align_tables import align
from tiewise.analysis.row_pairs import one_vocabulary
from tiewise.core.found import ONE, Found, Listing, Quantity
from tiewise.inspection.evidence import with_evidence
from tiewise.inspection.request import Request
from tiewise.inspection.section import Inspection, SectionFound, sections
from tiewise.inspection.sections import alignment, gradients, gradients_over_training, tokens
from tiewise.inspection.sections.which_end import found_over_seeds
from tiewise.inspection.subject import subjects_of
from tiewise.report.inspection_view import MORE, inspection_view

HOSTILE = "[red]<b>x</b>[/red]"


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


def test_the_first_minute_is_the_verdict_and_one_sentence_for_each_section(inspection):
    lines = printed(inspection)
    text = "\n".join(lines)
    assert text.index("Tie or not?") < text.index("Which has the lower held-out") < text.index(HOSTILE)
    assert (
        sum(HOSTILE in line for line in lines) == len(inspection.sections) - 2
    )  # one sentence for each section, not each model
    assert "→ one table" in text
    assert f"{inspection.sections[-1].name}: it repeats no block" in text
    assert MORE in text
    assert not any(word in text for word in ("second", "listed", "0.250"))


def test_three_arms_over_three_seeds_with_every_section_fit_one_screen(tmp_path):
    models = planted((1, 2, 3))
    subjects = subjects_of([write_run(tmp_path / "run", models | {"factored:4": models["untied"]})])
    unlike = align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK)
    late, early = ((samples.layer(depth, 7.0, 0.5) for depth in depths) for depths in ((0,), (0, 1)))
    two = Found("by two different ends"), alignment.found_of(one_model(unlike))
    one = Found("by row lengths alone"), alignment.found_of(one_model(None))
    never, soon = (samples.lens(samples.lenses(*layers)) for layers in (late, early))
    pulling = {"untied": paths(one_table=False, null=(math.nan,) * 2, cosine=math.nan), "tied": paths()}
    same = {
        "bigrams": samples.bigrams(samples.text_and_path()),
        "which_end": found_over_seeds(over_seeds(), "tied"),
        "gradients_over_training": gradients_over_training.found_of(arm((0.5,) * 10)),
        "tokens": tokens.found_of(tokens_found()),
        "refinement": samples.refinement(samples.unshared()),
        "first_mlp": samples.first_mlp(samples.mlp()),
    }

    def of(label):
        path, likeness = one if label == "tied" else two
        pulled = gradients.found_of(pulling.get(label) or paths(cosine=-0.5))
        lens = soon if label == "tied" else never
        return {"direct_path": path, "alignment": likeness, "gradients": pulled, "lens": lens, **same}

    found = {subject.label: of(subject.label) for subject in subjects}
    reason = "one layer, applied once; give a model that repeats whole layers"
    made = [
        SectionFound(name, {label: own[name].about(label) for label, own in found.items()}, {})
        if name != "applications"
        else SectionFound(name, {}, dict.fromkeys(found, reason))
        for name in (section.name for section in sections())
    ]
    lines = printed(with_evidence(Inspection(subjects, Request(), tuple(made))))
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80


def test_a_notebook_shows_what_the_terminal_does(inspection):
    page = inspection._repr_html_()
    shown = html.unescape(re.sub("<[^>]*>", "", page))
    assert all(said in shown for said in (HOSTILE, "Tie or not?", "→ one table", "Not measured", MORE))
    assert "<b>" not in page


def test_full_prints_every_table(inspection):
    text, count = "\n".join(printed(inspection, full=True)), (len(inspection.sections) - 2) * len(inspection.subjects)
    assert MORE not in text
    assert text.count("listed") == count
    assert text.count("0.250") == count
