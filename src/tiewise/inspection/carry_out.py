"""`inspect`: every section that a request can have, of every model, and the reason where there is none.

    subjects × sections → found, or why not → evidence

What the user gave and cannot be used (a text too short, a token that is none) ends the inspection before anything is
measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

from tiewise.core.errors import RunError, TiewiseError
from tiewise.core.found import Found
from tiewise.core.long_work import heard
from tiewise.inspection.evidence import with_evidence
from tiewise.inspection.request import Effort, Request, Subject, subjects_of
from tiewise.inspection.section import Bench, Inspection, NotHere, Section, SectionFound, sections

try:
    from tiewise.inspection.workbench import Workbench
except ModuleNotFoundError as error:  # a light install: tables alone
    if (error.name or "tiewise").startswith("tiewise"):
        raise
    Workbench = Bench  # type: ignore[assignment,misc]

PARTS = 1000  # that progress counts for each call of a section of weight 1


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
    bench = Workbench(request, subjects)
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
                if one.text and not request.texts and not any(each.run for each in subjects):
                    raise NotHere("needs a text", "give --text")
                with _part(subject.label, *place, sum(weights)):
                    found[subject.label] = one.measure(subject, bench).about(subject.label)
            except TiewiseError as error:
                if not isinstance(error, NotHere) or request.only:
                    faults.append(error)
                left_out[subject.label] = str(error)
        made.append(SectionFound(one.name, found, left_out))
    if not any(section.found for section in made):
        raise faults[0] if faults else RunError("nothing to measure", "give --text, or a second model")
    return with_evidence(Inspection(subjects, request, tuple(made)))


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
