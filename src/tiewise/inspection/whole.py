"""Every measure of an inspection, in the order in which it is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tiewise.analysis.align_tables import Settings
from tiewise.analysis.tokens import tokens_of
from tiewise.core.found import Found
from tiewise.inspection import tables
from tiewise.inspection.evidence import with_evidence
from tiewise.inspection.inspect import Inspection, Measure, NotHere, carry_out
from tiewise.inspection.of_run import run_alignment
from tiewise.inspection.request import Request
from tiewise.inspection.section import Section, sections
from tiewise.inspection.subject import Subject, subjects_of
from tiewise.inspection.workbench import Workbench


def inspect(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    request: Request | None = None,
) -> Inspection:
    """Inspect one model, two, or the models of one comparison.

    Args:
        model: a Hugging Face folder, or the folder of a comparison.
        other: a second Hugging Face folder.
        request: text, pairs, sections and effort; by default everything that needs no text.

    Returns:
        an `Inspection`; `.found("lens")` gives one section's results by model, `.record()` everything for JSON.

    Raises:
        TiewiseError: a path, text or pair that cannot be used, or nothing that could be measured.
    """
    request = (request or Request()).checked()
    subjects = subjects_of([model] if other is None else [model, other])
    return with_evidence(carry_out(subjects, measures(subjects, request), request))


def measures(subjects: tuple[Subject, ...], request: Request) -> tuple[Measure, ...]:
    """Return all measures, over texts and models that are read once.

    Raises:
        DataError: the text or the pairs that were given cannot be used.
    """
    bench = Workbench(request)
    bench.check(subjects)

    def tokens(subject: Subject, request: Request) -> Any:
        ids = bench.ids(subject) if bench.reads(subject) else None
        return tokens_of(subject.folder, ids, request.effort.samples, request.seed)

    found = {
        10: Measure("direct_path", each=tables.direct_path),
        40: Measure("alignment", each=tables.alignment),
        50: Measure("closer", together=tables.closer),
        60: Measure("run_alignment", together=over_seeds),
        90: Measure("tokens", each=tokens),
    }
    found |= {one.place: _measure(one, bench) for one in sections()}
    return tuple(found[place] for place in sorted(found))


def _measure(section: Section, bench: Workbench) -> Measure:
    def each(subject: Subject, request: Request) -> Found:
        return section.measure(subject, bench).about(subject.label)

    return Measure(section.name, each=each, text=section.text, weight=section.weight)


def over_seeds(subjects: tuple[Subject, ...], request: Request) -> Any:
    """Which end of the untied arm each tied arm resembles, seed by seed."""
    return run_alignment(_run(subjects), Settings(seed=request.seed, sampled=2048))


def _run(subjects: tuple[Subject, ...]) -> Path:
    run = subjects[0].run
    if run is None:
        raise NotHere("needs a comparison of several seeds", "give the folder of `tiewise compare`")
    return run
