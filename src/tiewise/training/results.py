"""What a comparison measured, as plain dataclasses: the one thing that passes between training and the report.

    run (arm × seed) → RunResult ┐
    tuning, direct path, data …  ├→ Comparison → to_dict → results.json → from_dict → report, table, notebook

JSON has no infinity and no nan, so a diverged run's numbers are written as null and read back as nan. Losses are in
nats per token unless the name says otherwise.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiewise.core.errors import RunError

SCHEMA = 1
MASKED = "masked"  # tokens, among the shares of an ALBERT's result; the others are named by how pairs are judged
_SURE = 1.959963984540054  # standard errors of a 95 % interval
T = TypeVar("T")


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
        p, z = right / count, _SURE
        middle, spread = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
        scale = 1 + z * z / count
        return cls(p, (middle - spread) / scale, (middle + spread) / scale, count, nll)


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
class DirectPath:
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
    direct_path: list[DirectPath] = field(default_factory=list)
    # left, right (tokens), forward = p(right | left), backward = p(left | right), count of left-then-right
    bigrams: list[dict[str, Any]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    finding: str = ""
    schema: int = SCHEMA

    def of(self, arm: str) -> list[RunResult]:
        """Return the runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def difference(self, arm: str, metric: str) -> Difference | None:
        """Return one arm's difference to the reference, or None where it was not computed."""
        return next((d for d in self.differences if (d.arm, d.metric) == (arm, metric)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return what results.json holds: only dicts, lists, strings, finite numbers, booleans and None."""
        return to_record(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Comparison:
        """Read what `to_dict` returned.

        Raises:
            RunError: on another schema, a missing field or a value of the wrong type, naming the field.
        """
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise RunError(
                f"results.json has schema {schema!r}, this version reads {SCHEMA}", "run the comparison again"
            )
        return from_record(cls, record, "results.json")


def to_record(measured: Any) -> dict[str, Any]:
    """Return any of these dataclasses as strict JSON takes it: infinities and nan become None."""
    return strict(asdict(measured))


def from_record(cls: type[T], record: Any, where: str) -> T:
    """Read what `to_record` returned; a None where a number is meant is nan.

    Raises:
        RunError: on a missing field or a value of the wrong type, naming the field.
    """
    return _build(cls, record, where)


def strict(value: Any) -> Any:
    """Return plain values as strict JSON takes them: infinities and nan become None."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _build(cls: Any, record: Any, where: str) -> Any:
    if not isinstance(record, Mapping):
        raise _wrong(where, "an object")
    hints = get_type_hints(cls)
    values = {}
    for item in fields(cls):
        if item.name in record:
            values[item.name] = _read(hints[item.name], record[item.name], f"{where}: {item.name}")
        elif item.default is NO_DEFAULT and item.default_factory is NO_DEFAULT:
            raise RunError(f"{where}: {item.name} is missing", "run the comparison again")
    return cls(**values)


def _read(hint: Any, value: Any, where: str) -> Any:
    inner = get_args(hint)
    if hint is Any:
        return value
    if get_origin(hint) in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, where)
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise _wrong(where, "a list")
        return [_read(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object")
        return {key: _read(inner[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and value is None:
        return math.nan
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(where, {float: "a number", int: "a whole number", str: "text", bool: "true or false"}[hint])
    return float(value) if hint is float else value


def _wrong(where: str, wanted: str) -> RunError:
    return RunError(f"{where} must be {wanted}", "run the comparison again")
