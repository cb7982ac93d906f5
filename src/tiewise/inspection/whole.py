"""Every measure of an inspection, in the order in which it is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tiewise.analysis.alignment import Settings
from tiewise.analysis.bigrams import Chain
from tiewise.analysis.bigrams_found import BigramsFound, bigrams_of
from tiewise.analysis.tokens import tokens_of
from tiewise.checkpoint.facts import silent
from tiewise.data.blocks import token_counts
from tiewise.data.windows import Ids
from tiewise.inspection import tables
from tiewise.inspection.evidence import with_evidence
from tiewise.inspection.inspect import Inspection, Measure, NotHere, carry_out
from tiewise.inspection.of_run import run_alignment
from tiewise.inspection.request import Progress, Request
from tiewise.inspection.subject import Subject, subjects_of
from tiewise.inspection.workbench import Workbench
from tiewise.internals.application_sweep import application_sweep
from tiewise.internals.course import course
from tiewise.internals.first_mlp import first_mlp_of
from tiewise.internals.lens import lenses
from tiewise.internals.path_gradients import path_gradients
from tiewise.internals.refinement import refinement


def inspect(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    request: Request | None = None,
    progress: Progress = silent,
) -> Inspection:
    """Inspect one model, two, or the models of one comparison.

    Args:
        model: a Hugging Face folder, or the folder of a comparison.
        other: a second Hugging Face folder.
        request: text, pairs, sections and effort; by default everything that needs no text.
        progress: hears (what is done, parts done, parts of the whole).

    Returns:
        an `Inspection`; `.found("lens")` gives one section's results by model, `.record()` everything for JSON.

    Raises:
        TiewiseError: a path, text or pair that cannot be used, or nothing that could be measured.
    """
    request = (request or Request()).checked()
    subjects = subjects_of([model] if other is None else [model, other])
    return with_evidence(carry_out(subjects, measures(subjects, request), request, progress))


def measures(subjects: tuple[Subject, ...], request: Request) -> tuple[Measure, ...]:
    """Return all measures, over texts and models that are read once.

    Raises:
        DataError: the text or the pairs that were given cannot be used.
    """
    bench = Workbench(request)
    bench.check(subjects)
    fitted: list[tuple[Ids, BigramsFound]] = []

    def first_mlp(subject: Subject, request: Request, progress: Progress) -> Any:
        opened = bench.opened(subject)
        chain = Chain.of([bench.ids(subject)], opened.vocab) if bench.reads(subject) else None
        return first_mlp_of(opened, request.pairs, request.effort.samples, request.seed, progress, chain)

    def bigrams(subject: Subject, request: Request, progress: Progress) -> Any:
        ids = bench.ids(subject)
        like = next((found for other, found in fitted if len(other) == len(ids) and (other == ids).all()), None)
        found = bigrams_of(ids, subject.folder, request.pairs, None, request.seed, progress, like)
        fitted.append((ids, found))
        return found

    def tokens(subject: Subject, request: Request, progress: Progress) -> Any:
        ids = bench.ids(subject) if bench.reads(subject) else None
        return tokens_of(subject.folder, ids, request.effort.samples, request.seed, progress)

    def gradients(subject: Subject, request: Request, progress: Progress) -> Any:
        opened = bench.opened(subject)
        counts = token_counts(bench.ids(subject), opened.vocab)
        return path_gradients(opened, bench.windows(subject)[0], seed=request.seed, progress=progress, counts=counts)

    def lens(subject: Subject, request: Request, progress: Progress) -> Any:
        run_on, held_out = bench.windows(subject)
        steps = request.effort.lens_steps
        return lenses(bench.opened(subject), run_on, held_out, steps, request.seed, progress)

    def refined(subject: Subject, request: Request, progress: Progress) -> Any:
        return refinement(bench.opened(subject), bench.windows(subject)[1], request.seed, progress)

    def applications(subject: Subject, request: Request, progress: Progress) -> Any:
        effort = request.effort
        ids = bench.ids(subject)
        return application_sweep(bench.opened(subject), ids, effort.length, effort.windows, request.seed, progress)

    return (
        Measure("direct_path", each=tables.direct_path),
        Measure("first_mlp", each=first_mlp),
        Measure("bigrams", each=bigrams, text=True),
        Measure("alignment", each=tables.alignment),
        Measure("closer", together=tables.closer),
        Measure("run_alignment", together=over_seeds),
        Measure("gradients", each=gradients, text=True),
        Measure("course", together=over_training),
        Measure("tokens", each=tokens),
        Measure("lens", each=lens, text=True, weight=20),
        Measure("refinement", each=refined, text=True),
        Measure("applications", each=applications, text=True),
    )


def over_seeds(subjects: tuple[Subject, ...], request: Request, progress: Progress) -> Any:
    """Which end of the untied arm each tied arm resembles, seed by seed."""
    return run_alignment(_run(subjects), Settings(seed=request.seed, sampled=2048), progress)


def over_training(subjects: tuple[Subject, ...], request: Request, progress: Progress) -> Any:
    """Both paths' gradients over the training of a comparison."""
    return course(_run(subjects))


def _run(subjects: tuple[Subject, ...]) -> Path:
    run = subjects[0].run
    if run is None:
        raise NotHere("needs a comparison of several seeds", "give the folder of `tiewise compare`")
    return run
