"""The published claims of `claims.yaml`.

A claim is registered by its *rule*: grid, measure, expected range and required text. The rule was written before any
run. Each result has the hash of its rule, so a result from another rule is recognised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError, similar_names
from tiewise.lab.claims.expected import Expected
from tiewise.training.settings import read_yaml
from tiewise.training.study.grid import StudyGrid

CPU_MINUTES, CPU_HOURS, GPU_MINUTES = PRICES = ("10 CPU minutes", "2 CPU hours", "15 GPU minutes")
_FILE = Path(__file__).with_name("claims.yaml")


@dataclass(frozen=True)
class ClaimGrid:
    """Settings and axes of the runs that test a claim."""

    name: str
    settings: Mapping[str, Any]
    axes: Mapping[str, list[Any]]
    make: str = ""  # text of `texts` that is written before the runs; "" for none

    def study(self, asks: str, text: Path | None = None) -> StudyGrid:
        """Return the grid of the sweep; `text` is the file of a written text."""
        settings = dict(self.settings)
        if text is not None:
            settings["text"] = [str(text)]
        return StudyGrid.of({"asks": asks, "settings": settings, "axes": dict(self.axes)}, self.name)


@dataclass(frozen=True)
class PublishedClaim:
    """One published claim, its test and its rule."""

    name: str
    paper: str  # arXiv id, or repository#thread
    year: int
    where: str  # figure, table or section
    says: str  # the claim as we understand it
    their: str  # their setting
    published: str  # their figure, or "direction only"
    grid: ClaimGrid
    measure: Mapping[str, Any]
    expects: Expected
    unit: str
    price: str
    text: str = ""  # name of the text that the figure belongs to, as `report.papers.TEXTS` has it; "" for any

    @property
    def rule_hash(self) -> str:
        """First twelve digits of the SHA-256 of the rule."""
        grid = [self.grid.settings, self.grid.axes, self.grid.make]
        rule = [grid, self.measure, [self.expects.above, self.expects.below], self.text]
        return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def rule_text(self) -> str:
        """The rule in a sentence."""
        inside = f"reproduced if the whole 95 % interval is {self.expects.spelled()} ({self.unit})"
        rule = f"{inside}, contradicted if all of it is outside, else undecided"
        if self.text:
            rule += f"; on another text than {self.text}: not the same text"
        return rule


@cache
def published_claims() -> Mapping[str, PublishedClaim]:
    """Return all claims by name, in the order of the file."""
    record = read_yaml(_FILE)
    grids = {name: ClaimGrid(name, **grid) for name, grid in record["grids"].items()}
    return {name: _read_claim(name, entry, grids) for name, entry in record["claims"].items()}


def _read_claim(name: str, entry: Mapping[str, Any], grids: Mapping[str, ClaimGrid]) -> PublishedClaim:
    """Return a claim of the file."""
    grid, expects = grids[entry["grid"]], Expected(**entry["expects"])
    return PublishedClaim(name=name, **{**entry, "grid": grid, "expects": expects})


def find_claim(name: str) -> PublishedClaim:
    """Return the claim of this name.

    RunError: there is none; the message has the nearest names.
    """
    claims = published_claims()
    if name in claims:
        return claims[name]
    near = similar_names(name, claims)
    remedy = "tiewise sweep --claims lists them"
    if near:
        remedy = f"did you mean {', '.join(near)}? {remedy}"
    raise RunError(f"no claim {name!r}", remedy)
