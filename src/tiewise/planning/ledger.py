"""Published results, for comparison with a run or a plan.

`data/ledger.json` has one result a line, with the source from which it was read. `parameters_printed` is the figure in
the source, which is rounded and may count other parameters than tiewise does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tiewise.core.files import read_packaged_json

ALBERT_AVERAGE = "Avg"  # over SQuAD 1.1 and 2.0, MNLI, SST-2 and RACE: not a GLUE average


@dataclass(frozen=True)
class Result:
    """One published figure of one model."""

    model: str
    choice: str
    parameters_printed: int | None  # None where the source prints none
    layers: int
    width: int
    metric: str
    value: float
    source: str
    checked: str
    recipe: str = ""  # recipe of tiewise whose run prints this result next to its figure
    arm: str = ""  # boundary of that run
    setting: str = ""  # further settings of that run, `name=value` separated by spaces
    # published; reproduced: by others than the authors; or open: published, with settings that are known in part
    status: str = "published"

    @property
    def per_million(self) -> float:
        """Points per million parameters; meaningful only for metrics that grow with quality."""
        assert self.parameters_printed is not None
        return self.value / (self.parameters_printed / 1e6)


@cache
def results(metric: str | None = None) -> tuple[Result, ...]:
    """Return all results of one metric, or all, in the ledger's order."""
    records = read_packaged_json("planning/data/ledger.json")
    return tuple(Result(**record) for record in records if metric in (None, record["metric"]))
