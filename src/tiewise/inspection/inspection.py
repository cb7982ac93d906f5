"""`inspect`: every section of every model, the reason where there is none, and what of it speaks for tying.

A measurement whose question can favour a side is evidence for one table or for two. It speaks only where its interval
leaves out all that no effect would give, and still does with Holm's correction for all that could speak: they are
read side by side. Measures that look the same under both choices are not counted as evidence: every natural text, any
map or any end of training gives them as well. The loss alone decides, so there is a verdict only where a comparison has
trained both on several seeds.
"""

from __future__ import annotations

import math
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Folder, open_folder
from tiewise.core.errors import (
    CheckpointError,
    DataError,
    RunError,
    TiewiseError,
    refuse_live_model,
    suggest_choices,
    to_printable,
)
from tiewise.core.estimates import Estimate, holm_adjusted, p_value
from tiewise.core.measurement import NATS, NEITHER, ONE, TWO, Measurement, Quantity
from tiewise.core.progress import ProgressListener, listen_to_progress
from tiewise.core.records import to_strict_json
from tiewise.inspection import sections as sections_folder
from tiewise.inspection.tables.token_texts import find_tokens
from tiewise.inspection.workspace import (
    LACKS,
    SECTIONS,
    Effort,
    InspectedModel,
    NotApplicable,
    Request,
    Section,
    Workspace,
    comparison_of,
)
from tiewise.training.folder import RESULTS, seed_folder
from tiewise.training.results import ALPHA, FINAL, gaps
from tiewise.training.settings import FILE as RUN

SCHEMA = 1
ALL = ""  # the label of what is said of all subjects together
EVIDENCE = "evidence"  # the section that is drawn from all others
LEAST_EFFORT = {"windows": 8, "length": 2, "tokens": 2, "samples": 2, "lens_steps": 20}
GENERIC = frozenset({FINAL, "model", "checkpoint"})  # names of folders that say nothing of a model
PARTS = 1000  # that progress counts for each call of a section of weight 1
NO_VERDICT = "one model cannot tell: `tiewise compare` trains tied and untied side by side"
FINISH = "finish it with `tiewise compare --resume`"
NO_INTERVAL = "no verdict: the losses' difference has no interval; train more seeds"


def section_names() -> list[str]:
    """Return the names of all sections: those of the files, since to import some of them needs torch."""
    return sorted(module.name for module in pkgutil.iter_modules(sections_folder.__path__))


def sections() -> tuple[Section, ...]:
    """Return every section of the folder, in order; last those that a light install cannot run."""
    lacking = []
    for name in section_names():
        try:
            import_module(f"tiewise.inspection.sections.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "tiewise").startswith("tiewise"):
                raise
            lacking.append(Section(name, name, 0, _lacks))
    return (*sorted(SECTIONS.values(), key=lambda section: section.order), *lacking)


def _lacks(subject: InspectedModel, workspace: Workspace) -> Measurement:
    """Raise NotApplicable: the section needs packages that are not installed."""
    raise NotApplicable(LACKS)


# the request and its models


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
    """Return a request after checking that its sections exist and its efforts suffice."""
    names = section_names()
    for name in request.only:
        if name not in names:
            fix = f"{suggest_choices(name, names, 'sections are')}; evidence is drawn from them"
            raise DataError(f"there is no section {name!r}", fix)
    effort = request.effort
    for name, least in LEAST_EFFORT.items():
        if getattr(effort, name) < least:
            raise DataError(f"--{name.replace('_', '-')} {getattr(effort, name)}", f"use {least} or more")
    if not 0 <= effort.held_out <= 0.5:
        raise DataError(f"--held-out {effort.held_out}", "use a share from 0 to 0.5")
    return request


def pairs_of(tokens: str) -> tuple[tuple[str, str], ...]:
    """Read "New, York" or "New, York; San, Francisco" as pairs of tokens."""
    pairs = []
    for text in tokens.split(";"):
        words = [word.strip() for word in text.split(",")]
        if len(words) != 2 or not all(words):
            raise DataError(f"--tokens {tokens!r}: {', '.join(words)!r} is no pair", 'write two tokens: "New, York"')
        first, second = words
        pairs.append((first, second))
    return tuple(pairs)


def subjects_of(paths: Sequence[str | os.PathLike[str]]) -> tuple[InspectedModel, ...]:
    """Open one or two checkpoints, or each arm's first finished model of one comparison, in its order."""
    places = [Path(path) for path in paths]
    comparisons = [place for place in places if _is_comparison(place)]
    if comparisons and len(places) > 1:
        what = f"{comparisons[0]} is a comparison of several models"
        raise RunError(what, "inspect it alone, or give two of its models")
    if comparisons:
        return _arms_of(comparisons[0])
    opened = [open_folder(place) for place in places]
    names = labels([place.resolve() for place in places])
    subjects = []
    for name, place, folder in zip(names, places, opened, strict=True):
        _require_tensors(place, folder)
        subjects.append(InspectedModel(name, folder))
    return tuple(subjects)


def _is_comparison(place: Path) -> bool:
    """Return True for the folder of a comparison that has results."""
    return (place / RESULTS).is_file() and (place / RUN).is_file()


def _require_tensors(place: Path, folder: Folder) -> None:
    """Refuse an unfinished comparison, an adapter, and a folder without tensors that can be read."""
    if (place / RUN).is_file():
        raise RunError(f"{place}: a comparison that is not finished", FINISH)
    if folder.tensors:
        return
    if (place / ADAPTER_CONFIG).is_file():
        fix = "`tiewise merge` it into its base first"
        raise CheckpointError(f"{place}: an adapter, which has no tables of its own", fix)
    reason = f" ({folder.faults[0].problem})" if folder.faults else ""
    what = f"{place}: no safetensors that can be read{reason}"
    raise CheckpointError(what, "`tiewise check` says what is there")


def _arms_of(run: Path) -> tuple[InspectedModel, ...]:
    """Open the first finished model of each arm of a comparison."""
    comparison = comparison_of(run)
    models: dict[str, Path] = {}
    for arm, seed in product(comparison.arms, comparison.seeds):
        final = seed_folder(run, arm, seed) / FINAL
        if final.is_dir():
            models.setdefault(arm, final)
    if not models:
        raise RunError(f"{run} holds no finished model", FINISH)
    return tuple(InspectedModel(arm, open_folder(final), run) for arm, final in models.items())


def labels(places: Sequence[Path]) -> list[str]:
    """Name folders by as few last parts of their paths as distinguish them."""
    longest = max(len(place.parts) for place in places)
    for parts in range(1, longest + 1):
        names = ["/".join(place.parts[-parts:]) for place in places]
        is_generic = parts == 1 and not GENERIC.isdisjoint(names)
        if len(set(names)) == len(names) and not is_generic:
            return names
    return [f"{place} ({number})" for number, place in enumerate(places, 1)]


# the results


@dataclass(frozen=True)
class SectionMeasurement:
    """What one section gave."""

    name: str
    found: Mapping[str, Measurement | TieOrNot]  # label of the subject → its findings; of evidence, `ALL` → all of it
    left_out: Mapping[str, str]  # label → why there is none

    @property
    def measured(self) -> dict[str, Measurement]:
        """Return what was measured of each subject; nothing of the evidence, which is drawn from other sections."""
        return {label: result for label, result in self.found.items() if isinstance(result, Measurement)}

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it: a value that is no number is None."""
        records = {label: to_strict_json(result.record()) for label, result in self.found.items()}
        return {"found": records, "left_out": dict(self.left_out)}


@dataclass(frozen=True)
class TieOrNot:
    """All evidence of one inspection."""

    rows: tuple[tuple[str, Quantity], ...]  # (section, what it measured of which models), `p` adjusted over all rows
    verdict: str  # what a comparison of losses says, or that there is none

    def record(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        rows = [_evidence_record(section, quantity) for section, quantity in self.rows]
        return {"rows": rows, "verdict": self.verdict}


def _evidence_record(section: str, quantity: Quantity) -> dict[str, Any]:
    """Return one row of the evidence as JSON takes it."""
    return {
        "question": quantity.question,
        "measure": measure(quantity),
        "about": quantity.of,
        "value": quantity.value,
        "low": quantity.low,
        "high": quantity.high,
        "level": quantity.chance or 0.0,
        "p": quantity.p,
        "speaks": quantity.speaks,
        "why": quantity.why,
        "section": section,
    }


def measure(q: Quantity) -> str:
    """Name what was measured, with its unit."""
    if not q.unit or q.unit in q.name:
        return q.name
    return f"{q.name}, {q.unit}"


@dataclass(frozen=True, repr=False)
class Inspection:
    """All sections, in their order. In a notebook it shows what the command prints; its `repr` is the answers alone."""

    html_view: ClassVar[Callable[[Inspection], str] | None] = None  # `tiewise.report.views` sets it when it is imported

    subjects: tuple[InspectedModel, ...]
    request: Request
    sections: tuple[SectionMeasurement, ...]

    def __repr__(self) -> str:
        labels_of_all = ", ".join(subject.label for subject in self.subjects)
        lines = [f"Inspection of {labels_of_all}"]
        for section in self.sections:
            lines.append(f"  {section.name}: {_answers(section)}")
        lines.append("  .found(name): one section; .record(): all, for JSON")
        return "\n".join(lines)

    def _repr_html_(self) -> str | None:
        """Return the view that `tiewise.report` registered; None makes a notebook print `repr`."""
        if Inspection.html_view is None:
            return None
        return Inspection.html_view(self)

    @property
    def evidence(self) -> TieOrNot:
        """Return the evidence of all sections together."""
        evidence = self.found(EVIDENCE)[ALL]
        assert isinstance(evidence, TieOrNot), "the evidence is drawn from all sections"
        return evidence

    def section(self, name: str) -> SectionMeasurement | None:
        """Return one section, or None where it is not part of this inspection."""
        return next((section for section in self.sections if section.name == name), None)

    def found(self, name: str) -> Mapping[str, Measurement | TieOrNot]:
        """Return the results of a section by label; nothing where it is not part of this inspection."""
        section = self.section(name)
        if section is None:
            return {}
        return section.found

    def record(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {
            "schema": SCHEMA,
            "subjects": {subject.label: str(subject.folder.path) for subject in self.subjects},
            "request": asdict(self.request),
            "sections": {section.name: section.record() for section in self.sections},
        }


def _answers(section: SectionMeasurement) -> str:
    """Return the answers of a section, each with its models, or why it has none."""
    models: dict[str, list[str]] = {}
    for label, result in section.found.items():
        answer = result.verdict if isinstance(result, TieOrNot) else result.answer
        models.setdefault(answer, []).append(label)
    if not models:
        return f"none: {'; '.join(dict.fromkeys(section.left_out.values()))}"
    return "; ".join(f"{', '.join(of)}: {answer}".removeprefix(": ") for answer, of in models.items())


# measuring


def inspected(
    subjects: tuple[InspectedModel, ...], request: Request, every: Sequence[Section] | None = None
) -> Inspection:
    """Measure every section of a request; its progress is (what is done, parts done, parts of the whole).

    Raises:
        TiewiseError: what was given cannot be used, which ends it before anything is measured; or nothing could be.
    """
    workspace = Workspace(request, subjects)
    _check_pairs_and_texts(workspace)
    measuring = _Measuring(workspace, _requested(every or sections(), request.only))
    results = measuring.all()
    if not any(result.found for result in results):
        if measuring.faults:
            raise measuring.faults[0]
        raise RunError("nothing to measure", "give --text, or a second model")
    evidence = SectionMeasurement(EVIDENCE, {ALL: tie_or_not(subjects, results)}, {})
    return Inspection(subjects, request, (evidence, *results))


def _check_pairs_and_texts(workspace: Workspace) -> None:
    """Find the requested tokens and read the given text for every model.

    Their errors come before anything is measured.
    """
    request = workspace.request
    for subject in workspace.subjects:
        for pair in request.pairs:
            find_tokens(subject.folder, pair)
        if request.texts and workspace.reads(subject):
            workspace.ids(subject)


def _requested(every: Sequence[Section], only: Sequence[str]) -> list[Section]:
    """Return the sections of these names, in their order; all of them without names."""
    if not only:
        return list(every)
    return [section for section in every if section.name in only]


class _Measuring:
    """All chosen sections of all models, measured one after the other."""

    def __init__(self, workspace: Workspace, chosen: Sequence[Section]) -> None:
        """Take the sections; nothing is measured yet."""
        self.workspace, self.chosen = workspace, chosen
        self.faults: list[TiewiseError] = []  # that a reader must see if nothing could be measured
        weight = sum(section.weight for section in chosen)
        self._total = PARTS * weight * len(workspace.subjects)
        self._done = 0

    def all(self) -> list[SectionMeasurement]:
        """Measure every section of every model."""
        return [self._section(section) for section in self.chosen]

    def _section(self, section: Section) -> SectionMeasurement:
        """Measure one section of every model.

        A model to which it does not apply, or that fails, is left out with the reason.
        """
        measured: dict[str, Measurement] = {}
        left_out: dict[str, str] = {}
        for subject in self.workspace.subjects:
            try:
                measured[subject.label] = self._of_one_model(section, subject)
            except TiewiseError as error:
                left_out[subject.label] = str(error)
                # a section that does not apply is a fault only if it was requested by its name
                if self.workspace.request.only or not isinstance(error, NotApplicable):
                    self.faults.append(error)
        return SectionMeasurement(section.name, measured, left_out)

    def _of_one_model(self, section: Section, subject: InspectedModel) -> Measurement:
        """Return what one section measures of one model.

        Its progress counts as a part of the whole.
        """
        part = _PartOfProgress(subject.label, self._done, self._done + PARTS * section.weight, self._total)
        self._done = part.end
        if section.text:
            self.workspace.require_text(subject)
        with listen_to_progress(part.listen) as outer:
            part.outer = outer
            return section.measure(subject, self.workspace).about(subject.label)


class _PartOfProgress:
    """Progress inside one call as a part of the whole; a call does not know how many things it will do.

    So each is given half of what is left of the part, and the whole only ever grows.
    """

    outer: ProgressListener

    def __init__(self, label: str, start: int, end: int, total: int) -> None:
        """Take the part from `start` to `end` of `total`, under the label of a model."""
        self.label, self.end, self.total = label, end, total
        self.start = self.now = start
        self.doing = ""

    def listen(self, what: str, done: float, total: float) -> None:
        """Report that `done` of `total` of something is done, in parts of the whole."""
        if what != self.doing:
            self.start, self.doing = self.now, what
        half = (self.end - self.start) // 2
        reached = int(self.start + half * min(done, total) // max(total, 1))
        self.now = max(self.now, reached)
        self.outer(f"{self.label}: {what}", self.now, self.total)


# the evidence


def tie_or_not(subjects: Sequence[InspectedModel], results: Sequence[SectionMeasurement]) -> TieOrNot:
    """Collect the evidence for one table or two: the losses of a comparison first, then what sections measured."""
    loss = _loss(subjects[0])
    tested = []
    if loss is not None:
        tested.append(("comparison", _with_p(loss, loss.name)))
    for (name, quantity), models in _deciding(results).items():
        tested.append((name, _with_p(quantity, ", ".join(models))))
    rows = _corrected(tested)
    if loss is None:
        return TieOrNot(tuple(rows), NO_VERDICT)
    _, tested_loss = rows[0]
    return TieOrNot(tuple(rows), _verdict(tested_loss))


def _deciding(results: Sequence[SectionMeasurement]) -> dict[tuple[str, Quantity], list[str]]:
    """Return (section, quantity that can favour a side) → models of which it is true.

    A quantity of the text alone is true of all models with one tokenizer.
    """
    models: dict[tuple[str, Quantity], list[str]] = {}
    for section in results:
        for label, report in section.measured.items():
            for quantity in filter(_can_decide, report.quantities):
                about = to_printable(quantity.of or label)
                models.setdefault((section.name, replace(quantity, of="")), []).append(about)
    return models


def _loss(subject: InspectedModel) -> Quantity | None:
    """Return untied − tied in validation loss; None without a comparison that has both arms."""
    if subject.run is None:
        return None
    both = gaps(comparison_of(subject.run))
    if both is None:
        return None
    _, gap = both  # tied − untied
    low = high = math.nan
    if gap.low is not None and gap.high is not None:
        low, high = -gap.high, -gap.low
    seeds = "1 seed" if gap.n == 1 else f"{gap.n} seeds"
    return Quantity(
        "untied − tied", -gap.mean, low, high, gap.n, chance=0.0, unit=NATS,
        question="Which has the lower validation loss?", below=TWO, above=ONE,
        why=f"below zero two tables predict better, over {seeds}",
    )  # fmt: skip


def _can_decide(quantity: Quantity) -> bool:
    """Return True for a number whose question can favour a side."""
    if not quantity.question or not math.isfinite(quantity.value):
        return False
    return {quantity.below, quantity.above} != {NEITHER}


def _with_p(quantity: Quantity, of: str) -> Quantity:
    """Return a quantity of these models with its p: that of Student's t behind the interval unless it has another.

    Without an interval there is no p.
    """
    p = quantity.p
    if p is None or math.isnan(quantity.low):
        estimate = Estimate(quantity.value, quantity.low, quantity.high, quantity.n)
        no_effect = (quantity.chance or 0.0, *quantity.null)
        p = p_value(estimate, no_effect)
    if math.isnan(p):
        p = None
    return replace(quantity, of=of, p=p)


def _corrected(rows: list[tuple[str, Quantity]]) -> list[tuple[str, Quantity]]:
    """Adjust p by Holm over all rows that have one; a row that is no longer significant favours no side."""
    adjusted = iter(holm_adjusted([quantity.p for _, quantity in rows if quantity.p is not None]))
    corrected = []
    for name, quantity in rows:
        if quantity.p is not None:
            p = next(adjusted)
            quantity = replace(quantity, p=p)
            if p >= ALPHA:
                quantity = replace(quantity, below=NEITHER, above=NEITHER)
        corrected.append((name, quantity))
    return corrected


def _verdict(loss: Quantity) -> str:
    """Say what the difference of the losses shows."""
    if math.isnan(loss.low):
        return NO_INTERVAL
    finding = f"{loss.speaks} had the lower validation loss"
    if loss.speaks == NEITHER:
        finding = "no difference of validation loss was detected"
    return f"{finding}, at this size and on this text"
