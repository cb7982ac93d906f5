"""Is this tied table more like the input or the output table of another model? Paired over the same tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.alignment import AnyTable, Settings, neighbours_of, sample
from tiewise.analysis.alignment_maps import CENTRED, Fitter, choose, score, split, sums
from tiewise.analysis.estimates import Estimate, mean_interval, paired_bootstrap
from tiewise.analysis.neighbours_overlap import shared
from tiewise.analysis.paired_rows import Paired
from tiewise.analysis.tables import as_table
from tiewise.analysis.token_match import Pairs

NEITHER = "neither"


@dataclass(frozen=True)
class Lean:
    """One measure of the table against the other model's two tables.

    Args:
        measure: a map, or `neighbours`.
        view: `centred` or `raw`.
        input: mean over held-out rows (sampled rows for neighbours) against the input table.
        output: the same rows against the output table.
        difference: output − input, with the interval of the bootstrap over rows, for the maps as they were fitted.
        toward: `input` or `output` where that interval leaves out 0, else `neither`.
    """

    measure: str
    view: str
    input: Estimate
    output: Estimate
    difference: Estimate
    toward: str


@dataclass(frozen=True)
class Closer:
    """The answer, measure by measure.

    Args:
        pairs: tokens in both vocabularies.
        fitted_rows: pairs that the maps were fitted on.
        leans: one for each map and view, and for neighbours. By chance a mean over held-out rows is 0.
        left_out: (map, why) of maps that do not apply.
        neighbour_chance: k/(n−1).
        seed: of the split, the sample and the bootstrap.
    """

    pairs: int
    fitted_rows: int
    leans: tuple[Lean, ...]
    left_out: tuple[tuple[str, str], ...]
    neighbour_chance: float
    seed: int

    def record(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return asdict(self)


def closer(
    table: AnyTable,
    input_other: AnyTable,
    output_other: AnyTable,
    pairs: Pairs,
    settings: Settings | None = None,
) -> Closer:
    """Compare how well the other model's input and its output table map onto `table`, on the same held-out tokens.

    Where `settings.held_out` is 0, they are all tokens, and maps were fitted on them.

    Args:
        table: the tied table, [V, d].
        input_other: the other model's input table, [V', d'].
        output_other: its output table, [V', d'].
        pairs: row of `table` (a) and row of the other's tables (b) of each token in both.
        settings: as for `align`; permutations are not used.

    Raises:
        CheckpointError: as `align` does.
    """
    settings = settings or Settings()
    turned = Pairs(pairs.b, pairs.a, pairs.how)
    tied, first, second = as_table(table), as_table(input_other), as_table(output_other)
    found, left_out, fitted_rows = {}, [], 0
    for end, other in (("input", first), ("output", second)):
        dtype = settings.dtype(len(pairs), (other.width, tied.width))
        paired = Paired(other, tied, turned, dtype)
        found[end], why, fitted_rows = _cosines(paired, settings)
        left_out += [entry for entry in why if entry not in left_out]
    leans = [
        _lean(measure, view, found["input"][measure, view], output, settings.seed)
        for (measure, view), output in found["output"].items()
        if (measure, view) in found["input"]
    ]
    which = sample(len(pairs), settings.sampled, settings.seed)
    k = min(settings.neighbours, len(which) - 1)
    if k:
        ids = neighbours_of(tied, pairs.a[which], k, np.float32)
        with_input, with_output = (
            shared(ids, neighbours_of(other, pairs.b[which], k, np.float32)) for other in (first, second)
        )
        leans.append(_lean("neighbours", CENTRED, with_input, with_output, settings.seed))
    return Closer(len(pairs), fitted_rows, tuple(leans), tuple(left_out), k / (len(which) - 1), settings.seed)


def _cosines(paired: Paired, settings: Settings) -> tuple[dict[tuple[str, str], NDArray], list[tuple[str, str]], int]:
    fit, held = split(len(paired.pairs), settings.held_out, settings.scored, settings.seed)
    names, left_out = choose(settings.maps, settings.ranks, paired.widths, len(fit))
    products, _, _, error = sums(paired, fit)
    fitter = Fitter(products, names, settings.raw, error)
    maps = fitter.fit(fitter.cross)
    seen = held if len(held) else fit
    values = score(paired, maps, seen, seen)
    return {(m.name, m.view): v for m, v in zip(maps, values, strict=True)}, left_out, len(fit)


def _lean(measure: str, view: str, first: NDArray, second: NDArray, seed: int) -> Lean:
    difference = paired_bootstrap(first, second, seed)
    toward = "output" if difference.low > 0 else "input" if difference.high < 0 else NEITHER
    return Lean(measure, view, mean_interval(first), mean_interval(second), difference, toward)
