"""What a comparison measured, as plain dataclasses: the one thing that passes between training and the report.

    run (arm × seed) → RunResult ┐
    tuning, direct path, data …  ├→ Comparison → record → results.json → from_dict → report, table, notebook

JSON has no infinity and no nan, so a diverged run's numbers are written as null and read back as nan. Losses are in
nats per token unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from tiewise.analysis.estimates import wilson
from tiewise.core.errors import RunError
from tiewise.core.records import from_record, to_record
from tiewise.training.folder import DENSE, FINAL

SCHEMA = 1
MASKED = "masked"  # tokens, among the shares of an ALBERT's result; the others are named by how pairs are judged
AGAIN = "run the comparison again"  # the way out of results that cannot be read


@dataclass(frozen=True)
class BinNll:
    """Held-out nll of the tokens whose count in the training text falls into one bin."""

    label: str
    tokens: int  # held-out tokens in the bin
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
        return cls(right / count, *wilson(right / count, count), count, nll)


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
    bits_per_byte: float  # of the held-out text
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
    shares: dict[str, Share] = field(default_factory=dict)  # of ALBERTs, held-out: masked tokens; pairs as sop, as nsp
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
        return _html([self.result.arm], [[self.result]], f"model: {self.model}")


@dataclass(frozen=True)
class ArmDirectPath:
    """Logits of the lookup followed at once by the output projection, on a few tokens."""

    arm: str
    tokens: list[str]
    logits: list[list[float]]  # [current token, next token]


@dataclass(frozen=True)
class Difference:
    """Arm minus reference, paired over seeds. Made by `tiewise.training.statistics.paired`."""

    arm: str
    metric: str  # a field of RunResult, "frequency:LABEL", or "share:NAME"
    n: int  # pairs
    mean: float
    low: float | None  # 95 % interval; None for fewer than two pairs
    high: float | None
    detectable: float | None  # smallest true difference found with 80 % probability
    detected: bool  # p < 0.05: the interval excludes zero, of held-out losses also with Holm's correction
    p: float | None = None  # two-sided, of the interval's t; of held-out losses adjusted by Holm over the arms


@dataclass(frozen=True)
class Comparison:
    """A whole comparison. The differences and the finding are filled by `tiewise.training.statistics.complete`."""

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
        return _html(self.arms, [self.of(arm) for arm in self.arms], self.finding)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Read what `record` returned.

        Raises:
            RunError: on another schema, a missing field or a value of the wrong type, naming the field.
        """
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise RunError(f"results.json has schema {schema!r}, this version reads {SCHEMA}", AGAIN)
        return from_record(cls, record, "results.json", AGAIN)


def _html(arms: list[str], runs: list[list[RunResult]], said: str) -> str:
    """Return a notebook's view: a row of means for each arm, and what is said under it."""
    names = ("arm", "parameters", "validation nll", "training nll", "seeds")
    rows = [
        (
            arm,
            f"{of[0].total_parameters:,}",
            f"{fmean(r.heldout_nll for r in of):.4f}",
            f"{fmean(r.train_nll for r in of):.4f}",
            len(of),
        )
        for arm, of in zip(arms, runs, strict=True)
        if of
    ]
    cells = (
        "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) + "</tr>"
        for tag, table in (("th", [names]), ("td", rows))
        for row in table
    )
    return f"<table>{''.join(cells)}</table><p>{escape(said)}</p>"
