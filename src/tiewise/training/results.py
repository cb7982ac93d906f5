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
from tiewise.core.found import NONE, Quantity, count, plain, signed
from tiewise.planning.evidence import Expectation

SCHEMA = 1
FINAL, DENSE = "final", "dense"  # a run's model; the same for tools that do not know its boundary, where it needs it
MASKED = "masked"  # or hidden tokens, among a result's shares; the others are named by how an ALBERT's pairs are judged
ALPHA = estimates.ALPHA
UNEQUAL = 0.05  # of the reference's parameters: what a comparison by width lets arms differ in
AGAIN = "run the comparison again"  # the way out of results that cannot be read


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
        """Make one of a count."""
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
        """Return what results.json holds: only dicts, lists, strings, finite numbers, booleans and None."""
        found = to_record(replace(self, folder=None))
        del found["folder"]
        return found

    def _repr_html_(self) -> str:
        return _html([self.of(arm) for arm in self.arms], self.finding)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Read what `record` returned. Raises RunError for what cannot be read, naming the field."""
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise RunError(f"results.json has schema {schema!r}, this version reads {SCHEMA}", AGAIN)
        return from_record(cls, record, "results.json", AGAIN)


def _html(runs: list[list[RunResult]], said: str) -> str:
    """Return a notebook's view: a row of means for each arm, and what is said under it."""
    html = "".join(f"<th>{name}</th>" for name in ("arm", "parameters", "validation nll", "training nll", "seeds"))
    for of in filter(None, runs):
        nlls = (f"{fmean(getattr(run, name) for run in of):.4f}" for name in ("heldout_nll", "train_nll"))
        cells = (escape(of[0].arm), f"{of[0].total_parameters:,}", *nlls, len(of))
        html += "</tr><tr>" + "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<table><tr>{html}</tr></table><p>{escape(said)}</p>"


def over_seeds(name: str, values: Iterable[float], unit: str, digits: int = 4) -> Quantity:
    """Mean and standard deviation over seeds; infinite where a loss of one of them is no number any more."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return Quantity(name, math.inf if unit else math.nan, unit=unit)
    deviation = stdev(numbers) if len(numbers) > 1 else math.nan
    return Quantity(name, fmean(numbers), deviation=deviation, n=len(numbers), unit=unit, digits=digits)


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
    mean = fmean(d) if all(map(math.isfinite, d)) else math.nan
    if n == 1 or math.isnan(mean):
        return Difference(arm, metric, n, mean, None, None, None, False)
    error = stdev(d) / math.sqrt(n)
    half = estimates.critical(n - 1) * error
    low, high = mean - half, mean + half
    p = estimates.two_sided(mean / error, n - 1) if error else float(not mean)
    return Difference(arm, metric, n, mean, low, high, estimates.detectable(n - 1) * error, low > 0 or high < 0, p)


def by_holm(family: Sequence[Difference]) -> list[Difference]:
    """Return differences that are read side by side with Holm's p, and what is detected and detectable by it.

    Those without a p are not tested and stay as they are.
    """
    p = [d.p for d in family if d.p is not None]
    adjusted = iter(zip(estimates.holm(p), estimates.levels(p), strict=True))
    return [d if d.p is None else _at_level(d, *next(adjusted)) for d in family]


def _at_level(d: Difference, p: float, level: float) -> Difference:
    """Return a difference with Holm's p; `level` is where Holm reads its own p while the others are as they are."""
    assert d.low is not None
    assert d.high is not None
    error = (d.high - d.low) / 2 / estimates.critical(d.n - 1)
    return replace(d, p=p, detected=p < ALPHA, detectable=estimates.detectable(d.n - 1, level) * error)


def complete(comparison: Comparison) -> Comparison:
    """Fill the differences (every arm but the reference, every metric, every frequency bin) and the finding."""
    others = [arm for arm in comparison.arms if arm != comparison.reference]
    found = [d for arm in others for d in differences(comparison, comparison.reference, arm).values()]
    for family in ("heldout_nll", "frequency:"):  # what the finding says of arms, and of their tokens
        places = [i for i, d in enumerate(found) if d.metric.startswith(family)]
        for i, d in zip(places, by_holm([found[i] for i in places]), strict=True):
            found[i] = d
    comparison = replace(comparison, differences=found)
    nothing = f"{comparison.reference} is the only arm, so there is nothing to compare it with."
    return replace(comparison, finding="\n".join(_sentence(comparison, arm) for arm in others) or nothing)


def differences(comparison: Comparison, reference: str, arm: str) -> dict[str, Difference]:
    """Differences of an arm to another by metric, over the seeds that both finished."""
    measures: dict[str, dict[int, dict[str, float]]] = {}  # metric → seed → arm → its value
    for run in (*comparison.of(reference), *comparison.of(arm)):
        found = {"heldout_nll": run.heldout_nll, "train_nll": run.train_nll}
        if not run.shares:  # masked tokens are not a text
            found["bits_per_byte"] = run.bits_per_byte
        found |= {f"share:{name}": share.share for name, share in run.shares.items()}
        found |= {f"frequency:{bin_.label}": bin_.nll for bin_ in run.frequency if bin_.nll is not None}
        for metric, value in found.items():
            measures.setdefault(metric, {}).setdefault(run.seed, {})[run.arm] = value
    made = {}
    for metric, by_seed in measures.items():
        pairs = [(of[reference], of[arm]) for of in by_seed.values() if len(of) == 2]
        if pairs:
            made[metric] = paired(*zip(*pairs, strict=True), arm=arm, metric=metric)
    return made


def gaps(comparison: Comparison) -> tuple[Difference, Difference] | None:
    """(tying gap, generalisation gap): tied − untied in training and in validation nll; None without both arms."""
    found = differences(comparison, "untied", "tied") if {"tied", "untied"} <= set(comparison.arms) else {}
    return (found["train_nll"], found["heldout_nll"]) if found else None


def interval(difference: Difference) -> str:
    """−0.0123 to +0.0040, or a dash where one pair gives no interval."""
    return NONE if difference.low is None else f"{signed(difference.low)} to {signed(difference.high)}"


def _sentence(comparison: Comparison, arm: str) -> str:
    """What the validation losses of an arm show, and no more."""
    d = comparison.difference(arm, "heldout_nll")
    who = f"{arm} against {comparison.reference}:"
    if d is None:
        return f"{who} no seed finished with both, so nothing is known yet."
    own, base = (comparison.of(name)[0] for name in (arm, comparison.reference))
    more, cost = own.total_parameters - base.total_parameters, "equally many parameters"
    if more:
        part = more / base.total_parameters
        could = comparison.setting.get("match") == "width" and not own.shares  # ALBERTs cannot
        advice = "; --match parameters compares equal sizes" if could and abs(part) >= UNEQUAL else ""
        cost = f"{count(abs(more))} {'more' if more > 0 else 'fewer'} parameters ({signed(100 * part, 1)} %{advice})"
    if not math.isfinite(d.mean):
        return f"{who} one of them diverged, so no difference can be stated; {cost}."
    measured = f"{signed(d.mean)} nats/token"
    if d.low is None or d.high is None:
        return f"{who} validation loss {measured} from one seed, which cannot tell a difference from chance; {cost}."
    evidence = f"95 % interval {interval(d)}, {d.n} seeds"
    if d.detected:
        side = "lower (better)" if d.mean < 0 else "higher (worse)"
        said = f"validation loss is {side} by {plain(abs(d.mean))} nats/token ({evidence})"
    else:
        if d.low > 0 or d.high < 0:
            evidence += f", p = {plain(d.p, 3)} with {len(comparison.arms) - 1} arms (Holm)"
        smallest = f"{d.n} seeds detect {plain(d.detectable)} in 80 of 100 repetitions, more seeds less"
        said = f"no difference detected at this budget (validation loss {measured}, {evidence}; {smallest})"
    tokens = []  # which of them the arm predicts better and worse: bins whose difference is detected
    for word, sign in (("better", -1), ("worse", 1)):
        found = [one for one in comparison.differences if one.arm == arm and one.detected and sign * one.mean > 0]
        bins = [one.metric.removeprefix("frequency:") for one in found if one.metric.startswith("frequency:")]
        if bins:
            listed = " or ".join(filter(None, (", ".join(bins[:-1]), bins[-1])))
            tokens.append(f"{word} the tokens that the training text has {listed} times")
    predicts = f" It predicts {', and '.join(tokens)} (p < 0.05 over all bins, Holm)." if tokens else ""
    return f"{who} {said}, with {cost}.{predicts}"
