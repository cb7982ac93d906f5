"""What `of_run` finds: how the tables of a comparison's models align, over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiewise.analysis.align_tables import NEITHER
from tiewise.analysis.row_products import CURVE, LINE
from tiewise.training.results import to_record

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
    """One measure of an arm's one table against both tables of the untied arm."""

    arm: str  # the arm with one table
    # a map (centred, held-out rows), `neighbours`, `CKA` (less its chance level), CKA_CURVE or CKA_LINE (the same of
    # what is left when a curve, or a line, in log frequency is taken out of every column)
    measure: str
    seeds: str  # `other seed` or `same seed`: which untied model each tied one stands beside
    input: OverSeeds  # score against the input table
    output: OverSeeds  # score against the output table
    difference: OverSeeds  # output − input, paired
    # `output` or `input` where the interval of the difference leaves out 0, `neither` where it does not, `not known`
    # without one
    toward: str
    # `input` corrected for attenuation; of CKA between different seeds only, and only where training again gives more
    # than 0. None elsewhere
    corrected_input: OverSeeds | None
    corrected_output: OverSeeds | None  # the same of `output`
    corrected_difference: OverSeeds | None  # the second less the first, paired
    # (seed of the arm, seed of the untied model, input score, output score)
    pairs: tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True)
class Again:
    """How well tables of one arm align: the same table of two seeds, or both ends of one model."""

    what: str  # AGAIN of an arm and its `input`, `output` or `table`; ONE_MODEL of an arm
    measure: str  # as of `Leaning`
    score: OverSeeds  # over models, or over all pairs of seeds
    pairs: tuple[tuple[int, int, float], ...]  # (seed, other seed, score); of one model twice the same


@dataclass(frozen=True)
class FrequencyShare:
    """How much of a table's variance over tokens, Σ‖row − mean‖², is a curve in log frequency; `what`: arm and end."""

    what: str
    share: OverSeeds


@dataclass(frozen=True)
class RunAlignment:
    """What a comparison says of the question."""

    untied: str  # the arm with two tables that others are held against
    arms: tuple[str, ...]  # arms with one table
    seeds: tuple[int, ...]  # finished seeds of the untied arm
    tokens: int  # rows that were compared
    chance: dict[str, float]  # measure → score of unrelated tables
    leanings: tuple[Leaning, ...]  # by arm, measure and kind of pair
    again: tuple[Again, ...]  # the same thing trained again
    left_out: tuple[str, ...]  # what could not be compared, and why
    counted: int | None  # tokens of the training text by which frequency was taken out; None where it is not there
    frequency: tuple[FrequencyShare, ...]  # what that took out of each stored table; by chance CURVE / (tokens − 1)

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one of them; None where it was not measured."""
        return next((x for x in self.leanings if (x.arm, x.measure, x.seeds) == (arm, measure, seeds)), None)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return to_record(self)
