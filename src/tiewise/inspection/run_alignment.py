"""What `of_run` finds: how the tables of a comparison's models align, over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiewise.analysis.align_tables import NEITHER
from tiewise.analysis.row_products import CURVE, LINE
from tiewise.core.records import to_record

CKA_LINE, CKA_CURVE = "CKA, frequency out (line)", "CKA, frequency out"
WITHOUT = {LINE: CKA_LINE, CURVE: CKA_CURVE}  # powers of log frequency taken out → measure
NEIGHBOURS, CKA, NOT_KNOWN = "neighbours", "CKA", "not known"
OTHER_SEED, SAME_SEED = "other seed", "same seed"
AGAIN, ONE_MODEL = "{} {}, two seeds", "{} input and output, one model"


@dataclass(frozen=True)
class OverSeeds:
    """Mean over n models, or pairs of them, with its 95 % interval over seeds; None where too few give none."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def toward(self) -> str:
        """Of a difference output − input: the side that its interval speaks for, NEITHER, or NOT_KNOWN without one."""
        if self.low is None or self.high is None:
            return NOT_KNOWN
        return "output" if self.low > 0 else "input" if self.high < 0 else NEITHER


@dataclass(frozen=True)
class Leaning:
    """One measure of an arm's one table against both tables of the untied arm.

    Args:
        arm: the arm with one table.
        measure: a map (centred, held-out rows), `neighbours`, `CKA` (less its chance level), CKA_CURVE or CKA_LINE
            (the same of what is left when a curve, or a line, in log frequency is taken out of every column).
        seeds: `other seed` or `same seed`: which untied model each tied one stands beside.
        input: score against the input table.
        output: score against the output table.
        difference: output − input, paired.
        toward: `output` or `input` where the interval of the difference leaves out 0, `neither` where it does not,
            `not known` without one.
        corrected_input: `input` corrected for attenuation; of CKA between different seeds only, and only where
            training again gives more than 0. None elsewhere.
        corrected_output: the same of `output`.
        corrected_difference: the second less the first, paired.
        pairs: (seed of the arm, seed of the untied model, input score, output score).
    """

    arm: str
    measure: str
    seeds: str
    input: OverSeeds
    output: OverSeeds
    difference: OverSeeds
    toward: str
    corrected_input: OverSeeds | None
    corrected_output: OverSeeds | None
    corrected_difference: OverSeeds | None
    pairs: tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True)
class Again:
    """How well tables of one arm align: the same table of two seeds, or both ends of one model.

    Args:
        what: AGAIN of an arm and its `input`, `output` or `table`; ONE_MODEL of an arm.
        measure: as of `Leaning`.
        score: over models, or over all pairs of seeds.
        pairs: (seed, other seed, score); of one model twice the same.
    """

    what: str
    measure: str
    score: OverSeeds
    pairs: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class FrequencyShare:
    """How much of a table's variance over tokens, Σ‖row − mean‖², is a curve in log frequency; `what`: arm and end."""

    what: str
    share: OverSeeds


@dataclass(frozen=True)
class RunAlignment:
    """What a comparison says of the question.

    Args:
        untied: the arm with two tables that others are held against.
        arms: arms with one table.
        seeds: finished seeds of the untied arm.
        tokens: rows that were compared.
        chance: measure → score of unrelated tables.
        leanings: by arm, measure and kind of pair.
        again: the same thing trained again.
        left_out: what could not be compared, and why.
        counted: tokens of the training text by which frequency was taken out; None where it is not there.
        frequency: what that took out of each stored table; by chance CURVE / (tokens − 1).
    """

    untied: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    tokens: int
    chance: dict[str, float]
    leanings: tuple[Leaning, ...]
    again: tuple[Again, ...]
    left_out: tuple[str, ...]
    counted: int | None
    frequency: tuple[FrequencyShare, ...]

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one of them; None where it was not measured."""
        return next((x for x in self.leanings if (x.arm, x.measure, x.seeds) == (arm, measure, seeds)), None)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return to_record(self)
