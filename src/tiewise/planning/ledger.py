"""Published results, with what each was read in: the figures that a run or a plan is printed beside.

`data/ledger.json` has one result a line. `parameters_printed` is what the source prints, which is rounded and may
count other things than tiewise does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tiewise.core.files import read_packaged_json

ALBERT_AVERAGE = "Avg"  # over SQuAD 1.1 and 2.0, MNLI, SST-2 and RACE: not a GLUE average


@dataclass(frozen=True)
class Result:
    """One figure of one model."""

    model: str
    choice: str
    parameters_printed: int | None  # None where the source prints none
    layers: int
    width: int
    metric: str
    value: float
    source: str
    checked: str
    recipe: str = ""  # of ours, whose run prints it beside its own figure
    arm: str = ""  # the boundary of that run
    setting: str = ""  # what must be set besides, as `name=value`, parted by spaces
    # or reproduced: by others than the authors; or open: published, at a setting of which we know a part only
    status: str = "published"

    @property
    def per_million(self) -> float:
        """Points per million parameters; it says something of metrics that grow with quality only."""
        assert self.parameters_printed is not None
        return self.value / (self.parameters_printed / 1e6)


@cache
def results(metric: str | None = None) -> tuple[Result, ...]:
    """All results of one metric, or all, in the ledger's order."""
    rows = read_packaged_json("planning/data/ledger.json")
    return tuple(Result(**row) for row in rows if metric in (None, row["metric"]))
