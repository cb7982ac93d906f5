"""`inspect`: the results of all sections for all models, and the evidence for tying.

A section that does not apply to a model has a reason instead of a result.

A quantity whose question can favour a side is evidence for one table or for two. It counts only if its interval
excludes every value that no effect would give, also after Holm's correction over all such quantities, because a reader
sees them together. Measures that look the same under both choices are not counted as evidence: every natural text, any
map or any end of training gives them as well. Only the loss decides, so there is a verdict only if a comparison has
trained both on several seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Folder, HubReading, open_folder
from tiewise.checkpoint.hub_names import checkpoint_path, is_hub_path
from tiewise.core.errors import (
    CheckpointError,
    DataError,
    RunError,
    TiewiseError,
    require_path,
    suggest_choices,
    to_printable,
)
from tiewise.core.estimates import Estimate, holm_adjusted, p_value
from tiewise.core.measurement import (
    NATS,
    NEITHER,
    ONE,
    TWO,
    Measurement,
    Quantity,
    loss_digits,
    magnitudes,
    plain,
    signed,
)
from tiewise.core.progress import ProgressListener, listen_to_progress
from tiewise.core.records import to_strict_json
from tiewise.core.result import PrintedResult, Row
from tiewise.inspection.sections import section_names
from tiewise.inspection.tables.rated_pairs import read_pairs
from tiewise.inspection.tables.token_texts import find_tokens
from tiewise.inspection.workspace import (
    MISSING_PACKAGES,
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
ALL = ""  # the label of a result that covers all models together
EVIDENCE = "evidence"  # name of the section that combines all others
LEAST_EFFORT = {"windows": 8, "length": 2, "tokens": 2, "samples": 2, "lens_steps": 20}
GENERIC = frozenset({FINAL, "model", "checkpoint"})  # folder names that do not identify a model
PARTS = 1000  # progress units of a section of weight 1
NO_VERDICT = "a finished model cannot show which choice is better; `tiewise compare` trains both on your text"
NO_PAIR = "this comparison has no losses of both tied and untied; `tiewise compare --arms tied,untied` trains both"
FINISH = "finish it with `tiewise compare --resume`"
NO_INTERVAL = "one seed cannot show which choice is better; train three or more with `tiewise compare --seeds 3`"


def sections() -> tuple[Section, ...]:
    """Return every section of the folder, in order.

    Sections whose packages are not installed come last.
    """
    lacking = []
    for name in section_names():
        try:
            import_module(f"tiewise.inspection.sections.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "tiewise").startswith("tiewise"):
                raise
            lacking.append(Section(name, name, 0, _refuse))
    return (*sorted(SECTIONS.values(), key=lambda section: section.order), *lacking)


def _refuse(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Raise NotApplicable: the section needs packages that are not installed."""
    raise NotApplicable(MISSING_PACKAGES)


# the request and its models


def inspect(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    pairs: Sequence[tuple[str, str]] = (),
    word_pairs: str | os.PathLike[str] | None = None,
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
        text: the text to run the models on; one source or several, as `--text` takes them. Without it, sections that
            need a text are left out.
        pairs: token texts (before, after) whose transitions are reported.
        word_pairs: file of word pairs with ratings of their similarity, for the section `word_pairs`. A line has two
            words and a rating, separated by tabs, commas or spaces.
        only: names of sections; if empty, all that the models and the text allow.
        seed: of all random draws.
        windows: windows of text that models run on; a quarter as many more are held out for the lenses.
        length: tokens per window, at most the number of positions of the model.
        tokens: largest number of text tokens that are read for bigrams and frequencies.
        samples: rows of a table that are compared pair by pair.
        lens_steps: training steps of each tuned lens.
        held_out: share of the rows that maps between two tables are not fitted on; 0 fits on all and scores all.

    Returns:
        An `Inspection`. `.found("lens")` returns one section's results by model, `.record()` everything for JSON.

    Raises:
        TiewiseError: a path, text, pair or file of word pairs cannot be used, or no section could be measured.

    >>> import pathlib, tempfile, numpy, safetensors.numpy
    >>> from tiewise import inspect
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name, "tiny")
    >>> path.mkdir()
    >>> _ = (path / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    >>> table = numpy.eye(4, 3, dtype="float32")
    >>> safetensors.numpy.save_file({"model.embed_tokens.weight": table}, path / "model.safetensors")
    >>> print(inspect(path, only=["alignment"]).found("alignment")["tiny"].answer)
    the model has one table
    """
    require_path("inspect(FOLDER)", model)
    if other is not None:
        require_path("inspect(FOLDER, FOLDER)", other)
    effort = Effort(windows, length, tokens, samples, lens_steps, held_out)
    texts = (text,) if isinstance(text, str | os.PathLike) else text
    sources = tuple(os.fspath(source) for source in texts)
    rated = None if word_pairs is None else os.fspath(word_pairs)
    request = check_request(Request(sources, tuple(pairs), tuple(only), seed, effort, rated))
    return measure_sections(open_models([model] if other is None else [model, other]), request)


def check_request(request: Request) -> Request:
    """Return a request after checking its sections and efforts.

    Raises:
        DataError: a section does not exist, or an effort is too small.
    """
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


def parse_pairs(tokens: str) -> tuple[tuple[str, str], ...]:
    """Parse "New, York" or "New, York; San, Francisco" as pairs of tokens."""
    pairs = []
    for text in tokens.split(";"):
        words = [word.strip() for word in text.split(",")]
        if len(words) != 2 or not all(words):
            raise DataError(f"--tokens {tokens!r}: {', '.join(words)!r} is no pair", 'write two tokens: "New, York"')
        first, second = words
        pairs.append((first, second))
    return tuple(pairs)


def open_models(paths: Sequence[str | os.PathLike[str]]) -> tuple[InspectedModel, ...]:
    """Open one or two checkpoints, or the models of one comparison.

    Of a comparison, this is each arm's first finished model, in the order of the arms.
    """
    folder_paths = [checkpoint_path(path) for path in paths]
    comparisons = [folder_path for folder_path in folder_paths if _is_comparison(folder_path)]
    if comparisons and len(folder_paths) > 1:
        problem = f"{comparisons[0]} is a comparison of several models"
        raise RunError(problem, "inspect it alone, or give two of its models")
    if comparisons:
        return _arms_of(comparisons[0])
    reading = HubReading(all_headers=True, all_rows=True)
    opened = [open_folder(folder_path, reading) for folder_path in folder_paths]
    names = labels([path if is_hub_path(path) else path.resolve() for path in folder_paths])
    models = []
    for name, folder_path, folder in zip(names, folder_paths, opened, strict=True):
        _require_tensors(folder_path, folder)
        models.append(InspectedModel(name, folder))
    return tuple(models)


def _is_comparison(folder_path: Path) -> bool:
    """Return True for the folder of a comparison that has results."""
    return (folder_path / RESULTS).is_file() and (folder_path / RUN).is_file()


def _require_tensors(folder_path: Path, folder: Folder) -> None:
    """Refuse an unfinished comparison, an adapter, and a folder without readable tensors."""
    if (folder_path / RUN).is_file():
        raise RunError(f"{folder_path}: a comparison that is not finished", FINISH)
    if folder.tensors:
        return
    if (folder_path / ADAPTER_CONFIG).is_file():
        fix = "merge it into its base first: tiewise adapter merge"
        raise CheckpointError(f"{folder_path}: an adapter, which has no tables of its own", fix)
    reason = f" ({folder.faults[0].problem})" if folder.faults else ""
    problem = f"{folder_path}: no safetensors that can be read{reason}"
    raise CheckpointError(problem, "`tiewise check` says what is there")


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


def labels(folder_paths: Sequence[Path]) -> list[str]:
    """Name folders by the fewest last parts of their paths that are distinct."""
    longest = max(len(folder_path.parts) for folder_path in folder_paths)
    for parts in range(1, longest + 1):
        names = ["/".join(folder_path.parts[-parts:]) for folder_path in folder_paths]
        is_generic = parts == 1 and not GENERIC.isdisjoint(names)
        if len(set(names)) == len(names) and not is_generic:
            return names
    return [f"{folder_path} ({number})" for number, folder_path in enumerate(folder_paths, 1)]


# the results


@dataclass(frozen=True)
class SectionMeasurement:
    """Results of one section for all models."""

    name: str
    results: Mapping[str, Measurement | TieOrNot]  # label of the model, or `ALL`, → its result
    left_out: Mapping[str, str]  # label of the model → why there is no result

    @property
    def measured(self) -> dict[str, Measurement]:
        """Return the measurements by model; empty for the evidence, which combines other sections."""
        return {label: result for label, result in self.results.items() if isinstance(result, Measurement)}

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it: NaN and infinity become None."""
        records = {label: to_strict_json(result.record()) for label, result in self.results.items()}
        return {"found": records, "left_out": dict(self.left_out)}


@dataclass(frozen=True)
class TieOrNot:
    """Evidence of one inspection for one table or for two."""

    rows: tuple[tuple[str, Quantity], ...]  # (section, quantity and its models); `p` is adjusted over all rows
    verdict: str  # a sentence about a comparison's losses, or that there is no verdict

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
    """Return the name of a quantity, with its unit."""
    if not q.unit or q.unit in q.name:
        return q.name
    return f"{q.name}, {q.unit}"


@dataclass(frozen=True, repr=False)
class Inspection(PrintedResult):
    """Results of all sections, in their order.

    A notebook displays the same view that the command prints. `repr` has the answers alone.

    Attributes:
        models: the inspected models.
        request: the arguments of `inspect`.
        sections: one result for each section.

    >>> import tiewise  # `tied` is a folder with one table for both ends
    >>> inspection = tiewise.inspect("tied", only=["direct_path"])
    >>> [section.name for section in inspection.sections]
    ['evidence', 'direct_path']
    """

    html_view: ClassVar[Callable[[Inspection], str] | None] = None  # `tiewise.report.views` sets it when it is imported

    models: tuple[InspectedModel, ...]
    request: Request
    sections: tuple[SectionMeasurement, ...]

    def __str__(self) -> str:
        lines = [self.answer_text(), f"Inspection of {', '.join(model.label for model in self.models)}"]
        if not self.request.only:
            lines += [f"  {section.name}: {_answers(section)}" for section in self.sections]
        lines.append("  .found(name): one section; .to_dict(): all, for JSON")
        return "\n".join(lines)

    def answer_text(self) -> str:
        """Return the answers of the requested sections, else the verdict: one table or two."""
        if self.request.only:
            return "\n".join(joint_answer(section.measured) for section in self.sections if section.measured)
        return as_sentence(self.evidence.verdict)

    def rows(self) -> list[Row]:
        """Return a row for every number of every section and model."""
        rows: list[Row] = []
        for section in self.sections:
            for result in section.measured.values():
                rows += [{"section": section.name, **row} for row in result.rows()]
        return rows

    def _repr_html_(self) -> str:
        """Return the view that `tiewise.report` registered, else `repr`."""
        if Inspection.html_view is None:
            return super()._repr_html_()
        return Inspection.html_view(self)

    @property
    def evidence(self) -> TieOrNot:
        """Return the evidence of all sections together."""
        evidence = self.found(EVIDENCE)[ALL]
        assert isinstance(evidence, TieOrNot), "the evidence is drawn from all sections"
        return evidence

    def section(self, name: str) -> SectionMeasurement | None:
        """Return one section, or None if it is not part of this inspection."""
        return next((section for section in self.sections if section.name == name), None)

    def found(self, name: str) -> Mapping[str, Measurement | TieOrNot]:
        """Return the results of a section by model; empty if the section was not requested."""
        section = self.section(name)
        if section is None:
            return {}
        return section.results

    def record(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {
            "schema": SCHEMA,
            "subjects": {model.label: str(model.folder.path) for model in self.models},
            "request": asdict(self.request),
            "sections": {section.name: section.record() for section in self.sections},
        }


def as_sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def joint_answer(by_model: Mapping[str, Measurement]) -> str:
    """Return the answer of a section once if all models give the same, else by model."""
    models_by_answer: dict[str, list[str]] = {}
    for label, one in by_model.items():
        models_by_answer.setdefault(one.answer, []).append(label)
    if len(models_by_answer) == 1:
        (answer,) = models_by_answer
        return as_sentence(answer)
    answers = [f"{', '.join(models)}: {answer}" for answer, models in models_by_answer.items()]
    return f"{'; '.join(answers)}."


def _answers(section: SectionMeasurement) -> str:
    """Return a section's answers with their models, or the reasons why it has none."""
    models: dict[str, list[str]] = {}
    for label, result in section.results.items():
        answer = result.verdict if isinstance(result, TieOrNot) else result.answer
        models.setdefault(answer, []).append(label)
    if not models:
        return f"none: {'; '.join(dict.fromkeys(section.left_out.values()))}"
    return "; ".join(f"{', '.join(of)}: {answer}".removeprefix(": ") for answer, of in models.items())


# measuring


def measure_sections(
    models: tuple[InspectedModel, ...], request: Request, available: Sequence[Section] | None = None
) -> Inspection:
    """Measure every section of a request on every model.

    Its progress is (current task, parts done, total parts). `available` are the sections to choose from.

    Raises:
        TiewiseError: a text or pair cannot be used, which is reported before anything is measured; or no section could
            be measured.
    """
    workspace = Workspace(request, models)
    _check_pairs_and_texts(workspace)
    runner = _SectionRunner(workspace, _requested(available or sections(), request.only))
    results = runner.measure_all()
    if not any(section.results for section in results):
        if runner.errors:
            raise runner.errors[0]
        raise RunError("nothing to measure", "give --text, or a second model")
    evidence = SectionMeasurement(EVIDENCE, {ALL: tie_or_not(models, results)}, {})
    return Inspection(models, request, (evidence, *results))


def _check_pairs_and_texts(workspace: Workspace) -> None:
    """Find the requested tokens, and read the requested text and the rated pairs.

    Their errors are raised before anything is measured.
    """
    request = workspace.request
    if request.word_pairs is not None:
        read_pairs(request.word_pairs)
    for model in workspace.models:
        for pair in request.pairs:
            find_tokens(model.folder, pair)
        if request.texts and workspace.has_text(model):
            workspace.ids(model)


def _requested(every: Sequence[Section], only: Sequence[str]) -> list[Section]:
    """Return the sections of these names, in their order; without names, all of them."""
    if not only:
        return list(every)
    return [section for section in every if section.name in only]


class _SectionRunner:
    """Runner of the chosen sections on all models, one after the other."""

    def __init__(self, workspace: Workspace, chosen: Sequence[Section]) -> None:
        """Store the sections and count their weights; nothing is measured yet."""
        self.workspace, self.chosen = workspace, chosen
        self.errors: list[TiewiseError] = []  # the first is raised if nothing could be measured
        weight = sum(section.weight for section in chosen)
        self._total = PARTS * weight * len(workspace.models)
        self._done = 0

    def measure_all(self) -> list[SectionMeasurement]:
        """Measure every section of every model."""
        return [self._measure_section(section) for section in self.chosen]

    def _measure_section(self, section: Section) -> SectionMeasurement:
        """Measure one section of every model.

        A model to which it does not apply, or that fails, is left out with the reason.
        """
        measured: dict[str, Measurement] = {}
        left_out: dict[str, str] = {}
        for model in self.workspace.models:
            try:
                measured[model.label] = self._measure_model(section, model)
            except TiewiseError as error:
                left_out[model.label] = str(error)
                # a section that does not apply is a fault only if it was requested by its name
                if self.workspace.request.only or not isinstance(error, NotApplicable):
                    self.errors.append(error)
        return SectionMeasurement(section.name, measured, left_out)

    def _measure_model(self, section: Section, model: InspectedModel) -> Measurement:
        """Return the result of one section for one model.

        Its progress is a part of the total progress.
        """
        part = _PartOfProgress(model.label, self._done, self._done + PARTS * section.weight, self._total)
        self._done = part.end
        if section.text:
            self.workspace.require_text(model)
        with listen_to_progress(part.listen) as outer:
            part.outer = outer
            return section.measure(model, self.workspace).about(model.label)


class _PartOfProgress:
    """Progress of one call, as a part of the total.

    A call does not know how many tasks it will have. So each new task gets half of the rest of the part, and the total
    progress never falls.
    """

    outer: ProgressListener

    def __init__(self, label: str, start: int, end: int, total: int) -> None:
        """Store the part from `start` to `end` of `total`, and the label of a model."""
        self.label, self.end, self.total = label, end, total
        self.start = self.now = start
        self.task = ""

    def listen(self, task: str, done: float, total: float) -> None:
        """Report that `done` of `total` steps of a task are done, as parts of the total."""
        if task != self.task:
            self.start, self.task = self.now, task
        half = (self.end - self.start) // 2
        reached = int(self.start + half * min(done, total) // max(total, 1))
        self.now = max(self.now, reached)
        self.outer(f"{self.label}: {task}", self.now, self.total)


# the evidence


def tie_or_not(models: Sequence[InspectedModel], results: Sequence[SectionMeasurement]) -> TieOrNot:
    """Collect the evidence for one table or two.

    The losses of a comparison come first, then the quantities of sections.
    """
    loss = _loss(models[0])
    tested = []
    if loss is not None:
        tested.append(("comparison", _with_p(loss, loss.name)))
    for (name, quantity), labels_of_quantity in _deciding(results).items():
        tested.append((name, _with_p(quantity, ", ".join(labels_of_quantity))))
    rows = _corrected(tested)
    if loss is None:
        return TieOrNot(tuple(rows), NO_VERDICT if models[0].run is None else NO_PAIR)
    _, tested_loss = rows[0]
    return TieOrNot(tuple(rows), _verdict(tested_loss))


def _deciding(results: Sequence[SectionMeasurement]) -> dict[tuple[str, Quantity], list[str]]:
    """Return (section, quantity that can favour a side) → labels of the models that have it.

    All models with one tokenizer have the same quantities of the text.
    """
    models: dict[tuple[str, Quantity], list[str]] = {}
    for section in results:
        for label, report in section.measured.items():
            for quantity in filter(_can_decide, report.quantities):
                about = to_printable(quantity.of or label)
                models.setdefault((section.name, replace(quantity, of="")), []).append(about)
    return models


def _loss(model: InspectedModel) -> Quantity | None:
    """Return untied − tied in validation loss; None without a comparison of both arms."""
    if model.run is None:
        return None
    both = gaps(comparison_of(model.run))
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
    """Return a quantity with its models and its p.

    Without a p, it is that of Student's t for the interval. Without an interval, p is None.
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
    """Adjust p by Holm over all rows that have one.

    A row that is no longer significant favours neither side.
    """
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
    """Return a sentence about the difference of the losses."""
    if math.isnan(loss.low):
        return NO_INTERVAL
    digits = loss_digits(loss.value, loss.low, loss.high)
    if loss.speaks == NEITHER:
        evidence = f"95 % CI {signed(loss.low, digits)} to {signed(loss.high, digits)}, {loss.n} seeds"
        value = f"untied − tied is {signed(loss.value, digits)} nats/token ({evidence})"
        return f"no difference detected on this text: validation loss {value}"
    evidence = f"95 % CI {magnitudes(loss.low, loss.high, digits)}, {loss.n} seeds"
    size = f"{plain(abs(loss.value), digits)} nats/token lower ({evidence})"
    if loss.speaks == ONE:
        return f"one table predicts better on this text: its validation loss is {size}"
    return f"two tables predict better on this text: their validation loss is {size}"
