"""What bigrams cost a direct path, as figures."""

from __future__ import annotations

from collections.abc import Mapping

from tiewise.analysis.bigrams_found import BigramsFound
from tiewise.numerals import plain
from tiewise.report.bars import stacked
from tiewise.report.grid import Table
from tiewise.report.inspected.bigrams import parts
from tiewise.report.inspected.figures_of_heat import heat_panels
from tiewise.report.sheet import Panel

CAPTION = (
    "On the most frequent tokens, all others as one state. Irreversibility is what no symmetric logits of any width "
    "can avoid, definiteness what W Wᵀ pays beyond, rank what the width costs. A model's own path was trained for more "
    "than bigrams."
)


def panels(found: Mapping[str, BigramsFound]) -> list[Panel]:
    """Return what direct paths pay, and the text beside each model's path as heat maps."""
    values = parts(found)
    figure = stacked(values, "What a direct path pays", "nats per token", lambda value: plain(value, 4), "entropy")
    names = list(dict.fromkeys(part for one in values.values() for part in one))
    rows = [[bar, *(plain(one.get(part)) for part in names)] for bar, one in values.items()]
    maps = [(f"Direct path of {label}", one.heat) for label, one in found.items()]
    return [
        Panel(figure, CAPTION, Table(["path", *names], rows)),
        *heat_panels({label: one.target for label, one in found.items()}, maps),
    ]
