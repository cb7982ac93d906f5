"""Results of a comparison as dataclasses, with the significance of their differences.

    run (arm × seed) → RunResult ┐
    tuning, direct path, data …  ├→ Comparison → complete → results.json → from_dict → report, table, notebook

The report reads nothing else of a training. JSON has no infinity and no nan, so a diverged run's numbers are written as
null and read back as nan. Losses are in nats per token unless the name says otherwise.

Arms of one seed share their data order and the initialization of their body, so seeds are pairs. The 95 % interval of
a validation loss covers seeds and held-out documents (`core.crossed_effects`), each difference alone. That of any other
figure, and of results without losses by document, covers seeds only: Student's t of n − 1 degrees of freedom. The
finding uses as many differences as there are arms, and all their frequency bins. A difference therefore counts as
detected only if its p is below 0.05 with Holm's correction over the arms, or over all bins of all arms. The sign is
always arm − reference. For arms `untied` and `tied`, tied − untied in training nll is the *tying gap*, and in
validation nll the *generalisation gap*; see `gaps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from tiewise.core import estimates
from tiewise.core.crossed_effects import DifferenceInterval, crossed_interval, seed_interval
from tiewise.core.errors import RunError
from tiewise.core.measurement import NONE, Quantity, signed
from tiewise.core.records import from_record, to_record
from tiewise.core.result import PrintedResult, Row
from tiewise.training.document_losses import DocumentDifferences, DocumentLosses, document_differences

SCHEMA, RUN_SCHEMA = 2, 1  # of results.json, and of one run
READABLE = (1, SCHEMA)  # schema 1 had one more key, `expectation`
FINAL, DENSE = "final", "dense"  # folder of a run's model; of its plain copy for tools that lack its boundary
AT_LAST = "last:"  # beginning of the metrics of differences at the last step
MASKED = "masked"  # key of a result's share of masked or hidden tokens; the other keys are objectives on pairs
ALPHA = estimates.ALPHA
RUN_AGAIN = "run the comparison again"  # remedy for results that cannot be read


@dataclass(frozen=True)
class BinNll:
    """Validation nll of the tokens with a training count in one range."""

    label: str
    tokens: int  # validation tokens in the bin
    nll: float | None  # None for a bin without tokens


@dataclass(frozen=True)
class Share:
    """A share of right predictions, with its interval and their mean nll.

    The interval is the 95 % interval of Wilson 1927; `count` is the number of pairs or tokens.
    """

    share: float
    low: float
    high: float
    count: int
    nll: float

    @classmethod
    def of(cls, right: int, count: int, nll: float) -> Share:
        """Return the share of `right` among `count`, with its interval."""
        return cls(right / count, *estimates.wilson_interval(right / count, count), count, nll)


@dataclass(frozen=True)
class CurvePoint:
    """One point of a training curve; a value that was not measured is None."""

    step: int
    tokens: int  # training tokens seen so far
    train_nll: float | None = None
    tune_nll: float | None = None
    heldout_nll: float | None = None  # of older versions, which had no `tune_nll`
    path_a: float | None = None  # L2 norm of the table's gradient through the input embedding
    path_b: float | None = None  # L2 norm of the table's gradient through the output head
    cosine: float | None = None  # cosine between the two gradients


@dataclass(frozen=True)
class LastStep:
    """Losses of a run after its last step, in nats per token."""

    tune_nll: float | None  # on the tuning tokens of a point of the curve
    train_nll: float
    heldout_nll: float
    bits_per_byte: float
    document_nats: list[float] | None = None  # as `RunResult.documents`; None: those of the selected step


@dataclass(frozen=True)
class RunResult:
    """Figures of one arm trained with one seed.

    Losses, shares and the saved model are those of `selected_step`; `last` has the losses of the last step.
    """

    arm: str
    seed: int
    steps: int
    train_nll: float
    heldout_nll: float
    perplexity: float  # exp(heldout_nll)
    bits_per_byte: float  # loss on the validation text; nan for masked tokens
    frequency: list[BinNll]
    parameters: dict[str, int]  # component → its parameters, each counted once; they sum to the total
    total_parameters: int
    bytes: int  # size of the stored parameters
    tokens_per_second: float  # speed of the training steps; other load of the machine lowers it
    seconds: float
    init_std: float
    learning_rate: float
    predicted_initial_nll: float
    initial_nll: float
    curve: list[CurvePoint] = field(default_factory=list)
    trainable_parameters: int | None = None
    shares: dict[str, Share] = field(default_factory=dict)  # right predictions: masked tokens, pairs by objective
    training_bytes: int | None = None  # weights, gradients and moments, counted; None in older results
    unigram_nll: float | None = None  # nll of the masked tokens under a unigram model of the training text
    selected_step: int | None = None  # step of all losses and of the model; None in older results: the last step
    tune_nll: float | None = None  # of the selected step, on the tuning tokens of a point of the curve
    lowest_tuning_step: int | None = None  # step with the lowest tuning loss
    last: LastStep | None = None  # None in older results, whose losses are those of the last step
    documents: DocumentLosses | None = None  # held-out loss by document; None in older results, and of masked tokens
    table_rate: float | None = None  # peak learning rate of tables and head; None: that of all parameters

    @property
    def is_before_end(self) -> bool:
        """True if the run keeps the model of an earlier step than the last one."""
        return self.selected_step is not None and self.selected_step < self.steps


@dataclass(frozen=True)
class Descent:
    """Fall of an arm's tuning loss over its last evaluations, along a fitted line.

    Older results have no tuning losses; there it is the validation loss.

    `tiewise.training.descent` makes it.
    """

    arm: str
    steps: int  # between the first of these evaluations and the last
    fall: float  # nats per token over these steps; negative if the loss rises
    low: float  # lower end of the 95 % interval
    high: float
    detected: bool  # the loss still falls: p < 0.05 with Holm's correction over the arms


@dataclass(frozen=True, repr=False)
class SingleRun(PrintedResult):
    """A run that is not part of a comparison.

    `.result` has its losses in nats per token, `.model` is the folder of the trained model, `.folder` that of the run.

    Attributes:
        result: losses of the run.
        folder: folder of the run.
        setting: settings of the model, as a comparison's results.json has them.
        data: facts about the text.
        note: a sentence if the loss still fell at the end; "" otherwise.
        descents: that fall, if the run has enough evaluations.

    >>> import tiewise
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes"}
    >>> run = tiewise.train("synthetic:words=4000", out="one-run", quiet=True, **small)
    >>> run.result.arm, run.folder.name
    ('tied', 'seed-1')
    """

    result: RunResult
    folder: Path
    setting: dict[str, Any]
    data: dict[str, Any]
    note: str = ""
    descents: list[Descent] = field(default_factory=list)

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.folder / FINAL

    def record(self) -> dict[str, Any]:
        """Return the result as JSON types, with the folders of the model and its dense form.

        `dense` is None if the model needs no dense form.
        """
        dense = self.folder / DENSE
        files = {"model": str(self.model), "dense": str(dense) if dense.is_dir() else None}
        return (
            to_record(self.result)
            | files
            | {"descents": [to_record(each) for each in self.descents], "note": self.note}
        )

    def answer_text(self) -> str:
        """Return the losses and the folder of the model."""
        result = self.result
        losses = f"validation loss {result.heldout_nll:.4f}, training loss {result.train_nll:.4f} nats per token"
        answer = f"{result.arm}, seed {result.seed}: {losses} after {step_in_words(result)}."
        return "\n".join(line for line in (answer, self.note, f"model: {self.model}") if line)

    def rows(self) -> list[Row]:
        """Return one row: the figures of the run."""
        return [_flat_run(self.result)]

    def summary_rows(self) -> list[Row]:
        """Return one row: size and losses."""
        return [_mean_of([self.result])]


@dataclass(frozen=True)
class ArmDirectPath:
    """Logits of the direct path W_E W_U of an arm, on a few tokens."""

    arm: str
    tokens: list[str]
    logits: list[list[float]]  # [current token, next token]


@dataclass(frozen=True)
class Difference:
    """Difference of two arms (arm − reference), paired over seeds and documents; made by `paired`."""

    arm: str
    metric: str  # a field of RunResult, "last:FIELD" for one of LastStep, "frequency:LABEL", or "share:NAME"
    n: int  # number of pairs
    mean: float
    low: float | None  # lower end of the 95 % interval; None for fewer than two pairs
    high: float | None
    # true difference that a repetition detects with 80 % probability, by the rule of `detected`
    detectable: float | None
    detected: bool  # p < 0.05: the interval excludes zero; for validation losses also with Holm's correction
    p: float | None = None  # two-sided, from the interval's t; for validation losses adjusted by Holm over the arms
    margin: float | None = None  # largest difference in nats per token that does not matter; validation losses only
    p_equivalence: float | None = None  # of a true difference outside ± margin, adjusted by Holm over the arms
    verdict: str | None = None  # better, worse, equivalent (within the margin) or undecided; see `verdicts`
    error: float | None = None  # standard error of the mean; this field and the next two are None in older results
    df: float | None = None  # degrees of freedom of that error
    seed_error: float | None = None  # standard error over the seeds alone
    documents: int = 0  # held-out documents, or other units, that the interval covers; 0: it covers seeds only
    unit: str = ""  # as `DocumentLosses.unit`

    @property
    def estimated(self) -> DifferenceInterval | None:
        """The mean with its interval and standard error; None for fewer than two pairs."""
        if self.low is None or self.high is None:
            return None
        df = self.n - 1 if self.df is None else self.df
        half = (self.high - self.low) / 2
        error = half / estimates.critical_t(df) if self.error is None else self.error
        return DifferenceInterval(self.mean, half, error, df)

    @property
    def sample(self) -> str:
        """The sample that the interval covers, as text: "3 seeds and 39 documents", or "3 seeds"."""
        if not self.documents:
            return f"{self.n} seeds"
        return f"{self.n} seeds and {self.documents} {self.unit}"


@dataclass(frozen=True, repr=False)
class Comparison(PrintedResult):
    """Results of all runs of a comparison.

    `.finding` states the result in a sentence, and `.differences` has each arm's differences to the reference.
    `finding.complete` fills both. Losses are nats per token.

    Attributes:
        version: version of tiewise.
        command: as typed.
        demo: the text is a demo corpus.
        arms: specs of the compared boundaries, as text.
        seeds: seeds of each arm.
        reference: the first arm, with which the others are compared.
        setting: settings of all runs.
        data: facts about the text.
        env: versions, machine and chosen kernels.
        runs: one result per arm and seed.
        tuning: trials: arm, learning_rate, table_rate if tables have one, nll on the tuning split, chosen.
        direct_path: direct path of each arm on a few tokens.
        bigrams: keys: left, right (tokens), forward = p(right | left), backward = p(left | right), count of left-
            then-right.
        differences: each arm's differences to the reference.
        descents: fall of each arm's tuning loss at the end of training.
        finding: the result for each arm in one sentence, the answer first.
        schema: version of the JSON format.
        folder: run folder of the comparison.

    >>> import tiewise
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "seeds": 1, "tokenizer": "bytes"}
    >>> comparison = tiewise.compare("synthetic:words=4000", arms="tied,untied", out="run", quiet=True, **small)
    >>> comparison.arms, len(comparison.runs)
    (['tied', 'untied'], 2)
    """

    version: str
    command: str
    demo: bool
    arms: list[str]
    seeds: list[int]
    reference: str
    setting: dict[str, Any]
    data: dict[str, Any]
    env: dict[str, Any]
    runs: list[RunResult]
    tuning: list[dict[str, Any]] = field(default_factory=list)
    direct_path: list[ArmDirectPath] = field(default_factory=list)
    bigrams: list[dict[str, Any]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    descents: list[Descent] = field(default_factory=list)
    finding: str = ""
    schema: int = SCHEMA
    folder: Path | None = field(default=None, compare=False)

    @property
    def others(self) -> list[str]:
        """Arms other than the reference."""
        return [arm for arm in self.arms if arm != self.reference]

    def of(self, arm: str) -> list[RunResult]:
        """Return the runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def difference(self, arm: str, metric: str) -> Difference | None:
        """Return one arm's difference to the reference; None if it was not computed."""
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def record(self) -> dict[str, Any]:
        """Return the content of results.json as JSON types.

        These are dicts, lists, strings, finite numbers, booleans and None.
        """
        record = to_record(replace(self, folder=None))
        del record["folder"]
        return record

    def answer_text(self) -> str:
        """Return the finding."""
        return self.finding

    def rows(self) -> list[Row]:
        """Return a row for every run, with its figures."""
        return [_flat_run(run) for run in self.runs]

    def summary_rows(self) -> list[Row]:
        """Return a row for every arm: size, and losses as means over seeds."""
        return [_mean_of(self.of(arm)) for arm in self.arms if self.of(arm)]

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `record` wrote.

        Raises:
            RunError: a field cannot be read; the message names it.
        """
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema not in READABLE:
            raise RunError(f"results.json has schema {schema!r}, this version reads up to {SCHEMA}", RUN_AGAIN)
        return replace(from_record(cls, record, "results.json", RUN_AGAIN), schema=SCHEMA)


def has_earlier_steps(comparison: Comparison) -> bool:
    """Return whether any run keeps the model of an earlier step than its last one."""
    return any(run.is_before_end for run in comparison.runs)


def step_in_words(run: RunResult) -> str:
    """Return the step of a run's model as text, "600 steps" or "180 of 600 steps"."""
    if run.is_before_end:
        return f"{run.selected_step:,} of {run.steps:,} steps"
    return f"{run.steps:,} steps"


def _flat_run(run: RunResult) -> Row:
    """Return the figures of a run that are one number or text each.

    Those of the last step have names that begin with `last_`.
    """
    record = to_record(run)
    row = {name: value for name, value in record.items() if not isinstance(value, dict | list)}
    row.pop("last", None)  # None in older results
    if run.last is not None:
        record["last"].pop("document_nats")
        row |= {f"last_{name}": value for name, value in record["last"].items()}
    return row


def _mean_of(runs: list[RunResult]) -> Row:
    """Return an arm's name, size, mean losses and number of runs."""
    return {
        "arm": runs[0].arm,
        "parameters": runs[0].total_parameters,
        "validation nll": fmean(run.heldout_nll for run in runs),
        "training nll": fmean(run.train_nll for run in runs),
        "seeds": len(runs),
    }


def over_seeds(name: str, values: Iterable[float], unit: str, digits: int = 4) -> Quantity:
    """Return mean and standard deviation over seeds.

    The quantity is infinite, or nan without a unit, if a value of one seed is not finite.
    """
    numbers = list(values)
    if not _all_finite(numbers):
        return Quantity(name, math.inf if unit else math.nan, unit=unit)
    deviation = math.nan
    if len(numbers) > 1:
        deviation = stdev(numbers)
    return Quantity(name, fmean(numbers), deviation=deviation, n=len(numbers), unit=unit, digits=digits)


def _all_finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(number) for number in numbers)


def paired(
    reference: Sequence[float],
    other: Sequence[float],
    *,
    arm: str = "",
    metric: str = "",
    documents: DocumentDifferences | None = None,
) -> Difference:
    """Compare two arms over the seeds they share: other − reference.

    Without `documents`, the interval covers the n seeds: mean ± t·s/√n, with s the standard deviation of the n
    differences and Student's t of n − 1 degrees of freedom (Student, Biometrika 1908). With `documents`, whose rows
    are the same seeds, it covers seeds and held-out documents (`core.crossed_effects`). One pair has no interval. If a
    value is not finite, the mean is nan. `detectable` is the true difference that a repetition with as many finds with
    80 % probability by that two-sided 5 % test, where the error is an estimate (`estimates.detectable_difference`).

    Raises:
        ValueError: no values, or unequal numbers of values.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"pairs need equally many values, at least one: got {len(reference)} and {len(other)}")
    d = [b - a for a, b in zip(reference, other, strict=True)]
    n = len(d)
    if not _all_finite(d):
        return _without_interval(arm, metric, n, math.nan)
    if n == 1:
        return _without_interval(arm, metric, n, d[0])
    over_seeds_alone = seed_interval(d)
    mean, size, unit = over_seeds_alone, 0, ""
    if documents is not None:
        mean = crossed_interval(documents.nats, documents.tokens)
        size, unit = len(documents.tokens), documents.unit
    mean = replace(mean, estimate=fmean(d))  # sums by document are rounded
    return Difference(
        arm,
        metric,
        n,
        mean.estimate,
        mean.low,
        mean.high,
        detectable=estimates.detectable_difference(mean.degrees_of_freedom) * mean.standard_error,
        detected=mean.low > 0 or mean.high < 0,
        p=mean.p,
        error=mean.standard_error,
        df=mean.degrees_of_freedom,
        seed_error=over_seeds_alone.standard_error,
        documents=size,
        unit=unit,
    )


def _without_interval(arm: str, metric: str, n: int, mean: float) -> Difference:
    return Difference(arm, metric, n, mean, low=None, high=None, detectable=None, detected=False)


def correct_by_holm(family: Sequence[Difference]) -> list[Difference]:
    """Return differences of one family with p, `detected` and `detectable` by Holm.

    Differences without a p are not tested and stay as they are.
    """
    p = [d.p for d in family if d.p is not None]
    adjusted = iter(zip(estimates.holm_adjusted(p), estimates.holm_levels(p), strict=True))
    corrected = []
    for d in family:
        if d.p is not None:
            d = _at_level(d, *next(adjusted))
        corrected.append(d)
    return corrected


def _at_level(d: Difference, p: float, level: float) -> Difference:
    """Return a difference with the p adjusted by Holm.

    `level` is the level at which Holm tests this p while the other p stay as they are.
    """
    mean = d.estimated
    assert mean is not None
    detectable = estimates.detectable_difference(mean.degrees_of_freedom, level) * mean.standard_error
    return replace(d, p=p, detected=p < ALPHA, detectable=detectable)


class _Compared(NamedTuple):
    """Value of a run that is compared over seeds."""

    value: float
    documents: DocumentLosses | None  # behind the value; None if it is not of held-out text


def differences(comparison: Comparison, reference: str, arm: str) -> dict[str, Difference]:
    """Return arm − reference by metric, over the seeds that both finished."""
    measures: dict[str, dict[int, dict[str, _Compared]]] = {}  # metric → seed → arm → value
    for run in (*comparison.of(reference), *comparison.of(arm)):
        for metric, value in _compared_values(run).items():
            compared = _Compared(value, _documents_of(run, metric))
            measures.setdefault(metric, {}).setdefault(run.seed, {})[run.arm] = compared
    by_metric = {}
    for metric, by_seed in measures.items():
        # seeds that both arms finished
        pairs = [(by_arm[reference], by_arm[arm]) for by_arm in by_seed.values() if len(by_arm) == 2]
        if pairs:
            documents = document_differences([(a.documents, b.documents) for a, b in pairs])
            of_reference, of_arm = [a.value for a, _ in pairs], [b.value for _, b in pairs]
            by_metric[metric] = paired(of_reference, of_arm, arm=arm, metric=metric, documents=documents)
    return by_metric


def _documents_of(run: RunResult, metric: str) -> DocumentLosses | None:
    """Return the losses by document behind a metric; None if it is not of held-out text."""
    documents = run.documents
    if documents is None:
        return None
    if metric == f"{AT_LAST}heldout_nll" and run.last is not None:
        return replace(documents, nats=run.last.document_nats or documents.nats)
    if metric == "bits_per_byte":  # the loss times a number that all runs on a text share
        bits = run.bits_per_byte / run.heldout_nll
        return replace(documents, nats=[bits * nats for nats in documents.nats])
    return documents if metric == "heldout_nll" else None


def _compared_values(run: RunResult) -> dict[str, float]:
    """Return the values of a run that are compared over seeds, by metric."""
    values = {"heldout_nll": run.heldout_nll, "train_nll": run.train_nll}
    if run.last is not None:
        values |= {f"{AT_LAST}heldout_nll": run.last.heldout_nll, f"{AT_LAST}train_nll": run.last.train_nll}
    if not run.shares:  # masked tokens are not a text
        values["bits_per_byte"] = run.bits_per_byte
    values |= {f"share:{name}": share.share for name, share in run.shares.items()}
    for bin_ in run.frequency:
        if bin_.nll is not None:
            values[f"frequency:{bin_.label}"] = bin_.nll
    return values


def gaps(comparison: Comparison) -> tuple[Difference, Difference] | None:
    """Return (tying gap, generalisation gap): tied − untied in training and validation nll.

    They are those of the selected steps. None: one of the two arms is missing.
    """
    if not {"tied", "untied"} <= set(comparison.arms):
        return None
    by_metric = differences(comparison, "untied", "tied")
    if not by_metric:
        return None
    return by_metric["train_nll"], by_metric["heldout_nll"]


def interval(difference: Difference) -> str:
    """Return an interval as text, "−0.0123 to +0.0040"; a dash for one pair."""
    if difference.low is None:
        return NONE
    return f"{signed(difference.low)} to {signed(difference.high)}"
