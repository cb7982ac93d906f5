"""What a comparison measured, as plain dataclasses, and whether it differs: all that training tells the report.

    run (arm × seed) → RunResult ┐
    tuning, direct path, data …  ├→ Comparison → complete → results.json → from_dict → report, table, notebook

JSON has no infinity and no nan, so a diverged run's numbers are written as null and read back as nan. Losses are in
nats per token unless the name says otherwise.

Arms of one seed share their data order and the initialisation of their body, so seeds are pairs: the interval is that
of the mean of the differences, with Student's t of n − 1 degrees of freedom. Every interval stands on its own (95 %
each); the finding is drawn from as many as there are arms, and from all their bins of frequency, so that a difference
counts as detected only where its p is below 0.05 with Holm's correction over the arms, or over all bins of all arms.
Sign: always arm − reference. For arms `untied` and `tied`, tied − untied in training nll is the *tying gap* and in
validation nll the *generalisation gap*; see `gaps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tiewise.core import estimates
from tiewise.core.errors import RunError
from tiewise.core.files import from_record, to_record
from tiewise.core.measurement import NONE, Quantity, count, plain, signed
from tiewise.planning.evidence import Expectation

SCHEMA = 1
FINAL, DENSE = "final", "dense"  # a run's model; the same for tools that do not know its boundary, where it needs it
MASKED = "masked"  # or hidden tokens, among a result's shares; the others are named by how an ALBERT's pairs are judged
ALPHA = estimates.ALPHA
UNEQUAL = 0.05  # of the reference's parameters: what a comparison by width lets arms differ in
RUN_AGAIN = "run the comparison again"  # the way out of results that cannot be read


@dataclass(frozen=True)
class BinNll:
    """Validation nll of the tokens whose count in the training text falls into one bin."""

    label: str
    tokens: int  # validation tokens in the bin
    nll: float | None  # None where the bin holds no token


@dataclass(frozen=True)
class Share:
    """A share of so many pairs or tokens, with its 95 % interval (Wilson 1927), and the mean nll behind it."""

    share: float
    low: float
    high: float
    count: int
    nll: float

    @classmethod
    def of(cls, right: int, count: int, nll: float) -> Share:
        """Return the share of `right` among `count`, with its interval."""
        return cls(right / count, *estimates.wilson(right / count, count), count, nll)


@dataclass(frozen=True)
class CurvePoint:
    """One moment of training; whatever was not measured at it is None."""

    step: int
    tokens: int  # training tokens seen so far
    train_nll: float | None = None
    heldout_nll: float | None = None
    path_a: float | None = None  # L2 norm of the table's gradient through the lookup
    path_b: float | None = None  # the same through the output projection
    cosine: float | None = None  # between the two


@dataclass(frozen=True)
class RunResult:
    """One arm trained with one seed."""

    arm: str
    seed: int
    steps: int
    train_nll: float
    heldout_nll: float
    perplexity: float  # exp(heldout_nll)
    bits_per_byte: float  # of the validation text
    frequency: list[BinNll]
    parameters: dict[str, int]  # component → parameters counted once however often used; they sum to the total
    total_parameters: int
    bytes: int  # of the parameters as stored
    tokens_per_second: float  # of the training steps; what else the machine did is in it
    seconds: float
    init_std: float
    learning_rate: float
    predicted_initial_nll: float
    initial_nll: float
    curve: list[CurvePoint] = field(default_factory=list)
    trainable_parameters: int | None = None
    shares: dict[str, Share] = field(default_factory=dict)  # right, of masked or hidden tokens; of pairs as sop, as nsp
    training_bytes: int | None = None  # counted: weights, gradients, the optimizer's moments; earlier results lack it
    unigram_nll: float | None = None  # of the same masked tokens, by the training text's frequencies alone


@dataclass(frozen=True)
class SingleRun:
    """One run by itself."""

    result: RunResult
    folder: Path  # of the run
    setting: dict[str, Any]  # what results.json of a comparison says of its models
    data: dict[str, Any]  # facts of the text

    @property
    def model(self) -> Path:
        """Folder of the trained model."""
        return self.folder / FINAL

    def record(self) -> dict[str, Any]:
        """Return the result, and where the model and its dense form lie, as JSON takes it."""
        dense = self.folder / DENSE
        return to_record(self.result) | {"model": str(self.model), "dense": str(dense) if dense.is_dir() else None}

    def _repr_html_(self) -> str:
        return _html([[self.result]], f"model: {self.model}")


@dataclass(frozen=True)
class ArmDirectPath:
    """Logits of the lookup followed at once by the output projection, on a few tokens."""

    arm: str
    tokens: list[str]
    logits: list[list[float]]  # [current token, next token]


@dataclass(frozen=True)
class Difference:
    """Arm minus reference, paired over seeds. Made by `paired`."""

    arm: str
    metric: str  # a field of RunResult, "frequency:LABEL", or "share:NAME"
    n: int  # pairs
    mean: float
    low: float | None  # 95 % interval; None for fewer than two pairs
    high: float | None
    # true difference that a repetition detects with 80 % probability, by the rule of `detected`
    detectable: float | None
    detected: bool  # p < 0.05: the interval excludes zero, of validation losses also with Holm's correction
    p: float | None = None  # two-sided, of the interval's t; of validation losses adjusted by Holm over the arms


@dataclass(frozen=True)
class Comparison:
    """A whole comparison. The differences and the finding are filled by `complete`."""

    version: str  # of tiewise
    command: str  # as typed
    demo: bool  # the text is a demo corpus
    arms: list[str]
    seeds: list[int]
    reference: str  # the arm that the others are compared with: the first
    setting: dict[str, Any]
    data: dict[str, Any]
    env: dict[str, Any]
    runs: list[RunResult]
    tuning: list[dict[str, Any]] = field(default_factory=list)  # arm, init, learning_rate, nll, chosen
    direct_path: list[ArmDirectPath] = field(default_factory=list)
    # left, right (tokens), forward = p(right | left), backward = p(left | right), count of left-then-right
    bigrams: list[dict[str, Any]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    finding: str = ""
    expectation: Expectation | None = None  # what the atlas expected of tied − untied; None without these two
    schema: int = SCHEMA
    folder: Path | None = field(default=None, compare=False)  # that it was run in

    def of(self, arm: str) -> list[RunResult]:
        """Return the runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def difference(self, arm: str, metric: str) -> Difference | None:
        """Return one arm's difference to the reference, or None where it was not computed."""
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def record(self) -> dict[str, Any]:
        """Return the content of results.json: only dicts, lists, strings, finite numbers, booleans and None."""
        record = to_record(replace(self, folder=None))
        del record["folder"]
        return record

    def _repr_html_(self) -> str:
        return _html([self.of(arm) for arm in self.arms], self.finding)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Read what `record` returned. Raises RunError for what cannot be read, naming the field."""
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise RunError(f"results.json has schema {schema!r}, this version reads {SCHEMA}", RUN_AGAIN)
        return from_record(cls, record, "results.json", RUN_AGAIN)


def _html(runs: list[list[RunResult]], note: str) -> str:
    """Return a notebook's view: a row of means for each arm, and a note under it."""
    header = "".join(f"<th>{name}</th>" for name in ("arm", "parameters", "validation nll", "training nll", "seeds"))
    rows = "".join(f"</tr><tr>{_html_cells(arm_runs)}" for arm_runs in runs if arm_runs)
    return f"<table><tr>{header}{rows}</tr></table><p>{escape(note)}</p>"


def _html_cells(runs: list[RunResult]) -> str:
    """Return the cells of an arm: its name and size, the means of its losses, and how many runs it has."""
    validation = fmean(run.heldout_nll for run in runs)
    training = fmean(run.train_nll for run in runs)
    size = f"{runs[0].total_parameters:,}"
    cells = (escape(runs[0].arm), size, f"{validation:.4f}", f"{training:.4f}", len(runs))
    return "".join(f"<td>{cell}</td>" for cell in cells)


def over_seeds(name: str, values: Iterable[float], unit: str, digits: int = 4) -> Quantity:
    """Return mean and standard deviation over seeds; infinite where a loss of one of them is no number any more."""
    numbers = list(values)
    if not _all_finite(numbers):
        return Quantity(name, math.inf if unit else math.nan, unit=unit)
    deviation = math.nan
    if len(numbers) > 1:
        deviation = stdev(numbers)
    return Quantity(name, fmean(numbers), deviation=deviation, n=len(numbers), unit=unit, digits=digits)


def _all_finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(number) for number in numbers)


def paired(reference: Sequence[float], other: Sequence[float], *, arm: str = "", metric: str = "") -> Difference:
    """Compare two arms over the seeds they share: other − reference.

    With d the n differences, s their standard deviation (n − 1) and t the 97.5 % quantile of Student's t with n − 1
    degrees of freedom: interval = mean(d) ± t·s/√n (Student, Biometrika 1908). `detectable` is the true difference that
    a repetition with n pairs finds with 80 % probability by that two-sided 5 % test, s being an estimate
    (`estimates.detectable`). One pair has no interval, and a value that is not finite leaves only a mean of nan.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"pairs need equally many values, at least one: got {len(reference)} and {len(other)}")
    d = [b - a for a, b in zip(reference, other, strict=True)]
    n = len(d)
    if not _all_finite(d):
        return _without_interval(arm, metric, n, math.nan)
    mean = fmean(d)
    if n == 1:
        return _without_interval(arm, metric, n, mean)
    error = stdev(d) / math.sqrt(n)
    half = estimates.critical(n - 1) * error
    low, high = mean - half, mean + half
    if error:
        p = estimates.two_sided(mean / error, n - 1)
    else:
        p = float(mean == 0)  # all pairs differ by the same: certain, or no difference at all
    return Difference(arm, metric, n, mean, low, high, estimates.detectable(n - 1) * error, low > 0 or high < 0, p)


def _without_interval(arm: str, metric: str, n: int, mean: float) -> Difference:
    return Difference(arm, metric, n, mean, low=None, high=None, detectable=None, detected=False)


def correct_by_holm(family: Sequence[Difference]) -> list[Difference]:
    """Return differences that are read side by side with Holm's p, and what is detected and detectable by it.

    Those without a p are not tested and stay as they are.
    """
    p = [d.p for d in family if d.p is not None]
    adjusted = iter(zip(estimates.holm(p), estimates.levels(p), strict=True))
    corrected = []
    for d in family:
        if d.p is not None:
            d = _at_level(d, *next(adjusted))
        corrected.append(d)
    return corrected


def _at_level(d: Difference, p: float, level: float) -> Difference:
    """Return a difference with Holm's p; `level` is where Holm reads its own p while the others are as they are."""
    assert d.low is not None
    assert d.high is not None
    error = (d.high - d.low) / 2 / estimates.critical(d.n - 1)
    return replace(d, p=p, detected=p < ALPHA, detectable=estimates.detectable(d.n - 1, level) * error)


def complete(comparison: Comparison) -> Comparison:
    """Fill the differences (every arm but the reference, every metric, every frequency bin) and the finding."""
    others = [arm for arm in comparison.arms if arm != comparison.reference]
    measured: list[Difference] = []
    for arm in others:
        measured += differences(comparison, comparison.reference, arm).values()
    for family in ("heldout_nll", "frequency:"):  # the finding is about arms and, by frequency, about their tokens
        measured = _corrected_family(measured, family)
    comparison = replace(comparison, differences=measured)
    if not others:
        finding = f"{comparison.reference} is the only arm, so there is nothing to compare it with."
    else:
        finding = "\n".join(_finding_sentence(comparison, arm) for arm in others)
    return replace(comparison, finding=finding)


def _corrected_family(measured: Sequence[Difference], family: str) -> list[Difference]:
    """Return differences in the same order, with Holm's correction over those whose metric begins with `family`."""
    corrected = iter(correct_by_holm([d for d in measured if d.metric.startswith(family)]))
    return [next(corrected) if d.metric.startswith(family) else d for d in measured]


def differences(comparison: Comparison, reference: str, arm: str) -> dict[str, Difference]:
    """Return arm − reference by metric, over the seeds that both finished."""
    measures: dict[str, dict[int, dict[str, float]]] = {}  # metric → seed → arm → its value
    for run in (*comparison.of(reference), *comparison.of(arm)):
        for metric, value in _compared_values(run).items():
            measures.setdefault(metric, {}).setdefault(run.seed, {})[run.arm] = value
    by_metric = {}
    for metric, by_seed in measures.items():
        pairs = [by_arm for by_arm in by_seed.values() if len(by_arm) == 2]  # seeds that both arms finished
        if pairs:
            reference_values = [by_arm[reference] for by_arm in pairs]
            arm_values = [by_arm[arm] for by_arm in pairs]
            by_metric[metric] = paired(reference_values, arm_values, arm=arm, metric=metric)
    return by_metric


def _compared_values(run: RunResult) -> dict[str, float]:
    """Return the values of a run that are compared over seeds, by metric."""
    values = {"heldout_nll": run.heldout_nll, "train_nll": run.train_nll}
    if not run.shares:  # masked tokens are not a text
        values["bits_per_byte"] = run.bits_per_byte
    values |= {f"share:{name}": share.share for name, share in run.shares.items()}
    for bin_ in run.frequency:
        if bin_.nll is not None:
            values[f"frequency:{bin_.label}"] = bin_.nll
    return values


def gaps(comparison: Comparison) -> tuple[Difference, Difference] | None:
    """Return (tying gap, generalisation gap), tied − untied in training and validation nll; None without both arms."""
    if not {"tied", "untied"} <= set(comparison.arms):
        return None
    by_metric = differences(comparison, "untied", "tied")
    return (by_metric["train_nll"], by_metric["heldout_nll"]) if by_metric else None


def interval(difference: Difference) -> str:
    """Return −0.0123 to +0.0040, or a dash where one pair gives no interval."""
    if difference.low is None:
        return NONE
    return f"{signed(difference.low)} to {signed(difference.high)}"


def _finding_sentence(comparison: Comparison, arm: str) -> str:
    """Say what the validation losses of an arm show, and no more."""
    d = comparison.difference(arm, "heldout_nll")
    arms_text = f"{arm} against {comparison.reference}:"
    if d is None:
        return f"{arms_text} no seed finished with both, so nothing is known yet."
    cost = _size_clause(comparison, arm)
    if not math.isfinite(d.mean):
        return f"{arms_text} one of them diverged, so no difference can be stated; {cost}."
    if d.low is None:
        loss = f"validation loss {signed(d.mean)} nats/token"
        return f"{arms_text} {loss} from one seed, which cannot tell a difference from chance; {cost}."
    verdict = _verdict(d, len(comparison.arms) - 1)
    return f"{arms_text} {verdict}, with {cost}.{_token_clause(comparison, arm)}"


def _size_clause(comparison: Comparison, arm: str) -> str:
    """Say how many parameters an arm has more or fewer than the reference."""
    run, base = comparison.of(arm)[0], comparison.of(comparison.reference)[0]
    more = run.total_parameters - base.total_parameters
    if not more:
        return "equally many parameters"
    part = more / base.total_parameters
    can_be_matched = comparison.setting.get("match") == "width" and not run.shares  # ALBERTs cannot
    advice = ""
    if can_be_matched and abs(part) >= UNEQUAL:
        advice = "; --match parameters compares equal sizes"
    word = "more" if more > 0 else "fewer"
    return f"{count(abs(more))} {word} parameters ({signed(100 * part, 1)} %{advice})"


def _verdict(d: Difference, arms: int) -> str:
    """Say whether a validation loss differs; `arms` are compared with the reference."""
    assert d.low is not None, "one seed has no interval and no verdict"
    assert d.high is not None, "an interval has both ends"
    evidence = f"95 % interval {interval(d)}, {d.n} seeds"
    if d.detected:
        side = "lower (better)" if d.mean < 0 else "higher (worse)"
        return f"validation loss is {side} by {plain(abs(d.mean))} nats/token ({evidence})"
    if d.low > 0 or d.high < 0:  # the interval excludes zero, and the correction for several arms does not confirm it
        evidence += f", p = {plain(d.p, 3)} with {arms} arms (Holm)"
    smallest = f"{d.n} seeds detect {plain(d.detectable)} in 80 of 100 repetitions, more seeds less"
    loss = f"validation loss {signed(d.mean)} nats/token"
    return f"no difference detected at this budget ({loss}, {evidence}; {smallest})"


def _token_clause(comparison: Comparison, arm: str) -> str:
    """Say which tokens, by frequency, an arm predicts better and worse; "" if no bin's difference is detected."""
    better: list[str] = []
    worse: list[str] = []
    for d in comparison.differences:
        if d.arm == arm and d.detected and d.metric.startswith("frequency:"):
            side = better if d.mean < 0 else worse
            side.append(d.metric.removeprefix("frequency:"))
    clauses = []
    for word, bins in (("better", better), ("worse", worse)):
        if bins:
            clauses.append(f"{word} the tokens that the training text has {_join_by_or(bins)} times")
    if not clauses:
        return ""
    return f" It predicts {', and '.join(clauses)} (p < 0.05 over all bins, Holm)."


def _join_by_or(words: Sequence[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"
