"""`inspect`: every section of every model, the reason where there is none, and what of it speaks for tying.

What was measured with a question that can favour a side is evidence for one table or for two. It speaks only where its
interval leaves out all that no effect would give, and still does with Holm's correction for all that could speak: they
are read side by side. What could favour neither side, because every natural text, any map or any end of training gives
it as well, is none. The loss alone decides, so there is a verdict only where a comparison has trained both on several
seeds.
"""

from __future__ import annotations

import math
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, ClassVar

from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, open_folder
from tiewise.core.errors import (
    CheckpointError,
    DataError,
    RunError,
    TiewiseError,
    choices,
    heard,
    printable,
    refuse_live_model,
)
from tiewise.core.estimates import Estimate, holm, p_value
from tiewise.core.files import strict
from tiewise.core.found import NATS, NEITHER, ONE, TWO, Found, Quantity
from tiewise.inspection import sections as sections_folder
from tiewise.inspection.bench import LACKS, SECTIONS, Bench, Effort, NotHere, Request, Section, Subject, comparison_of
from tiewise.inspection.tables.token_texts import find_tokens
from tiewise.training.folder import FINAL, RESULTS, seed_folder
from tiewise.training.results import ALPHA, gaps
from tiewise.training.settings import FILE as RUN

SCHEMA = 1
ALL = ""  # the label of what is said of all subjects together
EVIDENCE = "evidence"  # the section that is drawn from all others
PARTS = 1000  # that progress counts for each call of a section of weight 1
NO_VERDICT = "one model cannot tell: `tiewise compare` trains tied and untied side by side"
FINISH = "finish it with `tiewise compare --resume`"
NO_INTERVAL = "no verdict: the losses' difference has no interval; train more seeds"


def section_names() -> list[str]:
    """Return the names of all sections: those of the files, since to import some of them needs torch."""
    return sorted(module.name for module in pkgutil.iter_modules(sections_folder.__path__))


def sections() -> tuple[Section, ...]:
    """Every section of the folder, in order; last those that a light install cannot run, which say what they lack."""

    def lacks(subject: Subject, bench: Bench) -> Found:
        raise NotHere(LACKS)

    lacking = []
    for name in section_names():
        try:
            import_module(f"tiewise.inspection.sections.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "tiewise").startswith("tiewise"):
                raise
            lacking.append(Section(name, name, 0, lacks))
    return (*sorted(SECTIONS.values(), key=lambda one: one.place), *lacking)


# what is asked, of which models


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
    for each in (model, other):
        refuse_live_model("inspect", each)
    effort = Effort(windows, length, tokens, samples, lens_steps, held_out)
    texts = (text,) if isinstance(text, str | os.PathLike) else text
    sources = tuple(os.fspath(source) for source in texts)
    request = checked(Request(sources, tuple(pairs), tuple(only), seed, effort))
    return inspected(subjects_of([model] if other is None else [model, other]), request)


def checked(request: Request) -> Request:
    """Return a request that names sections that there are, and efforts that suffice."""
    names = section_names()
    for name in request.only:
        if name not in names:
            fix = f"{choices(name, names, 'sections are')}; evidence is drawn from them"
            raise DataError(f"there is no section {name!r}", fix)
    effort = request.effort
    for name, least in {"windows": 8, "length": 2, "tokens": 2, "samples": 2, "lens_steps": 20}.items():
        if getattr(effort, name) < least:
            raise DataError(f"--{name.replace('_', '-')} {getattr(effort, name)}", f"use {least} or more")
    if not 0 <= effort.held_out <= 0.5:
        raise DataError(f"--held-out {effort.held_out}", "use a share from 0 to 0.5")
    return request


def pairs_of(tokens: str) -> tuple[tuple[str, str], ...]:
    """Read "New, York" or "New, York; San, Francisco": the pairs that are asked for."""
    pairs = [tuple(word.strip() for word in pair.split(",")) for pair in tokens.split(";")]
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise DataError(f"--tokens {tokens!r}: {', '.join(pair)!r} is no pair", 'write two tokens: "New, York"')
    return tuple((first, second) for first, second in pairs)


def subjects_of(paths: Sequence[str | os.PathLike[str]]) -> tuple[Subject, ...]:
    """Open one or two checkpoints, or each arm's first finished model of one comparison, in its order."""
    places = [Path(path) for path in paths]
    run = next((place for place in places if (place / RESULTS).is_file() and (place / RUN).is_file()), None)
    if run is None:
        opened = [open_folder(place) for place in places]
        for place, folder in zip(places, opened, strict=True):
            if (place / RUN).is_file():
                raise RunError(f"{place}: a comparison that is not finished", FINISH)
            if not folder.tensors:
                if (place / ADAPTER_CONFIG).is_file():
                    fix = "`tiewise merge` it into its base first"
                    raise CheckpointError(f"{place}: an adapter, which has no tables of its own", fix)
                reason = f" ({folder.faults[0].what})" if folder.faults else ""
                what = f"{place}: no safetensors that can be read{reason}"
                raise CheckpointError(what, "`tiewise check` says what is there")
        return tuple(map(Subject, labels([place.resolve() for place in places]), opened))
    if len(places) > 1:
        raise RunError(f"{run} is a comparison of several models", "inspect it alone, or give two of its models")
    found, comparison = dict[str, Path](), comparison_of(run)
    for arm, seed in product(comparison.arms, comparison.seeds):
        if (final := seed_folder(run, arm, seed) / FINAL).is_dir():
            found.setdefault(arm, final)
    if not found:
        raise RunError(f"{run} holds no finished model", FINISH)
    return tuple(Subject(arm, open_folder(final), run) for arm, final in found.items())


def labels(places: Sequence[Path]) -> list[str]:
    """Name folders by as few last parts of their paths as tell them apart."""
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        made = ["/".join(place.parts[-parts:]) for place in places]
        if len(set(made)) == len(made) and not (parts == 1 and set(made) & {FINAL, "model", "checkpoint"}):
            return made
    return [f"{place} ({number})" for number, place in enumerate(places, 1)]


# what was found


@dataclass(frozen=True)
class SectionFound:
    """What one section gave."""

    name: str
    found: Mapping[str, Any]  # label of the subject → `Found`
    left_out: Mapping[str, str]  # label → why there is none

    def record(self) -> dict[str, Any]:
        """Everything as strict JSON takes it: what is not a number, as an interval of one value, is None."""
        found = {label: strict(found.record()) for label, found in self.found.items()}
        return {"found": found, "left_out": dict(self.left_out)}


@dataclass(frozen=True)
class TieOrNot:
    """All evidence of one inspection."""

    rows: tuple[tuple[str, Quantity], ...]  # (section, what it measured of which models), `p` adjusted over all rows
    verdict: str  # what a comparison of losses says, or that there is none

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        rows = [
            {"question": q.question, "measure": measure(q), "about": q.of}
            | {"value": q.value, "low": q.low, "high": q.high, "level": q.chance or 0.0, "p": q.p}
            | {"speaks": q.speaks, "why": q.why, "section": section}
            for section, q in self.rows
        ]
        return {"rows": rows, "verdict": self.verdict}


def measure(q: Quantity) -> str:
    """What was measured, with its unit."""
    return q.name if not q.unit or q.unit in q.name else f"{q.name}, {q.unit}"


@dataclass(frozen=True, repr=False)
class Inspection:
    """All sections, in their order. In a notebook it shows what the command prints; its `repr` is the answers alone."""

    html_view: ClassVar[Callable[[Inspection], str] | None] = None  # `tiewise.report.faces` sets it when it is imported

    subjects: tuple[Subject, ...]
    request: Request
    sections: tuple[SectionFound, ...]

    def __repr__(self) -> str:
        lines = [f"Inspection of {', '.join(subject.label for subject in self.subjects)}"]
        for section in self.sections:
            answers: dict[str, list[str]] = {}
            for label, found in section.found.items():
                answers.setdefault(getattr(found, "verdict", None) or found.answer, []).append(label)
            said = [f"{', '.join(of)}: {answer}".removeprefix(": ") for answer, of in answers.items()]
            said = said or [f"none: {'; '.join(dict.fromkeys(section.left_out.values()))}"]
            lines.append(f"  {section.name}: {'; '.join(said)}")
        return "\n".join([*lines, "  .found(name): one section; .record(): all, for JSON"])

    def _repr_html_(self) -> str | None:
        """Return the view that `tiewise.report` registered; None makes a notebook print `repr`."""
        return None if Inspection.html_view is None else Inspection.html_view(self)

    def section(self, name: str) -> SectionFound | None:
        """Return one section, or None where it is not part of this inspection."""
        return next((section for section in self.sections if section.name == name), None)

    def found(self, name: str) -> Mapping[str, Any]:
        """Return what a section found by label; nothing where it is not part of this inspection."""
        section = self.section(name)
        return section.found if section is not None else {}

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return {
            "schema": SCHEMA,
            "subjects": {subject.label: str(subject.folder.path) for subject in self.subjects},
            "request": asdict(self.request),
            "sections": {section.name: section.record() for section in self.sections},
        }


# how it is found


def inspected(subjects: tuple[Subject, ...], request: Request, every: Sequence[Section] | None = None) -> Inspection:
    """Measure every section that is asked for; its progress is (what is done, parts done, parts of the whole).

    Raises:
        TiewiseError: what was given cannot be used, which ends it before anything is measured; or nothing could be.
    """
    bench = Bench(request, subjects)
    for subject in subjects:
        for pair in request.pairs:
            find_tokens(subject.folder, pair)
        if request.texts and bench.reads(subject):
            bench.ids(subject)
    wanted = [one for one in every or sections() if not request.only or one.name in request.only]
    weights = [one.weight * PARTS for one in wanted for _ in subjects]
    parts = pairwise(accumulate(weights, initial=0))
    made, faults = [], []
    for one in wanted:
        found: dict[str, Found] = {}
        left_out: dict[str, str] = {}
        for subject, place in zip(subjects, parts, strict=False):
            try:
                if one.text:
                    bench.require_text(subject)
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
            names, -gap.mean, low, high, gap.n, chance=0.0, unit=NATS,
            question="Which has the lower validation loss?", below=TWO, above=ONE,
            why=f"below zero two tables predict better, over {gap.n} seed{'' if gap.n == 1 else 's'}",
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
    tested = {place: q.p for place, (_, q) in enumerate(rows) if q.p is not None}
    for place, p in zip(tested, holm(list(tested.values())), strict=True):
        name, q = rows[place]
        rows[place] = name, replace(q, p=p) if p < ALPHA else replace(q, p=p, below=NEITHER, above=NEITHER)
    verdict = NO_VERDICT
    if found is not None:
        (_, loss), *_ = rows
        lower = f"{loss.speaks} had the lower validation loss"
        said = "no difference of validation loss was detected" if loss.speaks == NEITHER else lower
        verdict = NO_INTERVAL if math.isnan(loss.low) else f"{said}, at this size and on this text"
    return TieOrNot(tuple(rows), verdict)
