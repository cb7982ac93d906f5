"""`inspect`: every section that a request can have, of every model, and the reason where there is none.

    subjects × sections → found, or why not → tie or not?

What the user gave and cannot be used (a text too short, a token that is none) ends the inspection before anything is
measured.

What was measured with a question that can favour a side is evidence for one table or for two. It speaks only where its
interval leaves out all that no effect would give, and still does with Holm's correction for all that could speak: they
are read side by side. What could favour neither side, because every natural text, any map or any end of training gives
it as well, is none. The loss alone decides, so there is a verdict only where a comparison has trained both on several
seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

from tiewise.core.errors import RunError, TiewiseError, printable
from tiewise.core.estimates import Estimate, holm, p_value
from tiewise.core.found import NEITHER, ONE, TWO, Found, Quantity
from tiewise.core.long_work import heard
from tiewise.inspection.request import FULL, LACKS, Bench, Effort, Request, Subject, comparison_of, subjects_of
from tiewise.inspection.section import ALL, Inspection, NotHere, Section, SectionFound, TieOrNot, sections
from tiewise.training.results import ALPHA, gaps

PARTS = 1000  # that progress counts for each call of a section of weight 1
EVIDENCE = "evidence"  # the section that is drawn from all others
NO_VERDICT = "no verdict: `tiewise compare` trains a tied and an untied model side by side"
NO_INTERVAL = "no verdict: the losses' difference has no interval; train more seeds"


def inspect(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    pairs: Sequence[tuple[str, str]] = (),
    only: Sequence[str] = (),
    seed: int = 0,
    windows: int = Effort.windows,
    length: int = Effort.length,
    tokens: int = Effort.tokens,
    samples: int = Effort.samples,
    lens_steps: int = Effort.lens_steps,
    held_out: float = Effort.held_out,
) -> Inspection:
    """Inspect one model, two, or the models of one comparison.

    Args:
        model: a Hugging Face folder, or the folder of a comparison.
        other: a second Hugging Face folder.
        text: what to run the models on; one source or several, as `--text` takes them. None leaves out what needs one.
        pairs: token texts (before, after) whose transitions are asked for.
        only: names of sections; none for all that the models and the text allow.
        seed: of every draw.
        windows: pieces of text that models are run on; a quarter as many more are held out for the lenses.
        length: tokens of each, or as many as the model has positions.
        tokens: most tokens of the text that are read for bigrams and frequencies.
        samples: rows of a table that are compared pair by pair.
        lens_steps: steps that every tuned lens is trained for.
        held_out: share of the rows that maps between two tables are not fitted on; 0 fits on all and scores all.

    Returns:
        an `Inspection`; `.found("lens")` gives one section's results by model, `.record()` everything for JSON.

    Raises:
        TiewiseError: a path, text or pair that cannot be used, or nothing that could be measured.
    """
    effort = Effort(windows, length, tokens, samples, lens_steps, held_out)
    texts = (text,) if isinstance(text, str | os.PathLike) else text
    sources = tuple(os.fspath(source) for source in texts)
    request = Request(sources, tuple(pairs), tuple(only), seed, effort).checked()
    return inspected(subjects_of([model] if other is None else [model, other]), request)


def inspected(subjects: tuple[Subject, ...], request: Request, every: Sequence[Section] | None = None) -> Inspection:
    """Measure every section that is asked for; its progress is (what is done, parts done, parts of the whole).

    Raises:
        TiewiseError: what was given cannot be used, or nothing could be measured.
    """
    bench = Bench(request, subjects)
    bench.check()
    wanted = [one for one in every or sections() if not request.only or one.name in request.only]
    weights = [one.weight * PARTS for one in wanted for _ in subjects]
    parts = pairwise(accumulate(weights, initial=0))
    made, faults = [], []
    for one in wanted:
        found: dict[str, Found] = {}
        left_out: dict[str, str] = {}
        for subject, place in zip(subjects, parts, strict=False):
            try:
                if one.text and not bench.reads(subject):
                    raise NotHere("needs a text", "give --text") if FULL else NotHere(LACKS)
                with _part(subject.label, *place, sum(weights)):
                    found[subject.label] = one.measure(subject, bench).about(subject.label)
            except TiewiseError as error:
                if not isinstance(error, NotHere) or request.only:
                    faults.append(error)
                left_out[subject.label] = str(error)
        made.append(SectionFound(one.name, found, left_out))
    if not any(section.found for section in made):
        raise faults[0] if faults else RunError("nothing to measure", "give --text, or a second model")
    first = SectionFound(EVIDENCE, {ALL: tie_or_not(subjects, made)}, {})
    return Inspection(subjects, request, (first, *made))


@contextmanager
def _part(label: str, begun: int, end: int, whole: int) -> Iterator[None]:
    """Have progress inside count as this part of the whole; a call does not know how many things it will do.

    So each is given half of what is left of the part, and the whole only ever grows.
    """
    now, doing = begun, ""

    def listen(what: str, done: float, total: float) -> None:
        nonlocal begun, now, doing
        if what != doing:
            begun, doing = now, what
        now = max(now, int(begun + (end - begun) // 2 * min(done, total) // max(total, 1)))
        outer(f"{label}: {what}", now, whole)

    with heard(listen) as outer:
        yield


def tie_or_not(subjects: Sequence[Subject], made: Sequence[SectionFound]) -> TieOrNot:
    """Collect what speaks for one table or for two: the losses of a comparison first, then what sections measured."""
    groups: dict[tuple[str, Quantity], list[str]] = {}  # what says one thing of several models, as what a text says
    found = gaps(comparison_of(subjects[0].run)) if subjects[0].run is not None else None
    if found is not None:
        gap, names = found[1], "untied − tied"  # the gap is tied − untied
        low, high = (math.nan, math.nan) if gap.low is None or gap.high is None else (-gap.high, -gap.low)
        loss = Quantity(
            names, -gap.mean, low, high, gap.n, chance=0.0, unit="nats per token",
            question="Which has the lower validation loss?", below=TWO, above=ONE,
            why=f"below zero two tables predict validation text better, over {gap.n} seed{'' if gap.n == 1 else 's'}",
        )  # fmt: skip
        groups["comparison", loss] = [names]
    for section in made:
        for label, one in section.found.items():
            for q in one.quantities:
                if q.question and {q.below, q.above} != {NEITHER} and math.isfinite(q.value):
                    groups.setdefault((section.name, replace(q, of="")), []).append(printable(q.of or label))
    rows = []
    for (name, q), of in groups.items():
        p = q.p
        if p is None or math.isnan(q.low):  # that of Student's t behind the interval; nan where there is none
            p = p_value(Estimate(q.value, q.low, q.high, q.n), (q.chance or 0.0, *q.null))
        rows.append((name, replace(q, of=", ".join(of), p=None if math.isnan(p) else p)))
    adjusted = iter(holm([q.p for _, q in rows if q.p is not None]))
    for place, (name, q) in enumerate(rows):
        if q.p is not None:
            q = replace(q, p=(p := next(adjusted)))
            rows[place] = name, q if p < ALPHA else replace(q, below=NEITHER, above=NEITHER)
    verdict = NO_VERDICT
    if found is not None:
        (_, loss), *_ = rows
        verdict = f"{loss.speaks} had the lower validation loss, at this size and on this text"
        if math.isnan(loss.low):
            verdict = NO_INTERVAL
        elif loss.speaks == NEITHER:
            verdict = "no difference of validation loss was detected, at this size and on this text"
    return TieOrNot(tuple(rows), verdict)
