"""New seeds on eight rows of the atlas: `python -m benchmarks.new_seeds FOLDER`.

Does a row of the atlas say the same with other seeds? The rows were drawn once, before any run, from the 132 rows of
the atlas sorted by study, cell and contrast: `random.Random(0).sample(rows, 8)`. Each contrast has as many new seeds as
its study, numbered after those. Texts, settings and tokenizer are those of the study.

Fixed before any run: a row agrees if old and new difference are closer than √(h² + h'²), where h and h' are half of
their 95 % intervals. At least seven of eight must agree. Both intervals cover the same held-out documents, so this
bound is generous; the column `seed_bound` has the bound from the spread over seeds alone, t·√2·error of the new seeds.

The rows of `sharing-deep` need `numbered.jsonl` (docs/albert.md), those of `recurrent` the folder `wikitext-2`. All
runs take about an hour of one core; a second call continues. The result is printed and written to
`benchmarks/results/new_seeds.csv`.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.atlas import ATLAS
from benchmarks.study_runs import later_seeds, train_comparison
from benchmarks.tables import write_table
from tiewise.core.estimates import critical_t
from tiewise.training.folder import folder_name
from tiewise.training.results import Difference, differences
from tiewise.training.settings import Settings
from tiewise.training.study.grid import StudyGrid

CSV_FILE = Path(__file__).parent / "results" / "new_seeds.csv"


class AtlasKey(NamedTuple):
    """Identity of a row of the atlas."""

    study: str
    cell: str
    arm: str
    reference: str


DRAWN = (
    AtlasKey("sharing-deep", "layers=24", "factored:32+share=attention", "factored:32+share=none"),
    AtlasKey("size-text-vocabulary", "width=128-train_tokens=400000-tokenizer=bpe-512", "tied", "untied"),
    AtlasKey("free-rows", "train_tokens=100000", "tied+free=256", "tied"),
    AtlasKey("rank", "tokenizer=bpe-8192", "factored:4", "untied"),
    AtlasKey("untie-late", "train_tokens=400000", "tied+untie_at=400", "tied"),
    AtlasKey("untie-late", "train_tokens=100000", "tied+untie_at=200", "tied"),
    AtlasKey("size-text-matched", "width=32-train_tokens=400000", "tied", "untied"),
    AtlasKey(
        "recurrent",
        "files=--valid.txt-0-10----valid.txt-90-100----test.txt-0-20---8ada93f0",
        "projected:300",
        "untied",
    ),
)


def old_row(key: AtlasKey) -> dict[str, str]:
    """Return the row of the atlas."""
    with ATLAS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if key == tuple(row[name] for name in AtlasKey._fields)]
    [row] = rows
    return row


def settings_of(key: AtlasKey) -> Settings:
    """Return the settings of a row's cell, with its two arms."""
    cells = StudyGrid.named(key.study).cells()
    return replace(cells[key.cell], arms=(key.reference, key.arm))


def new_difference(key: AtlasKey, folder: Path) -> Difference:
    """Train the two arms of a row with new seeds, and return their difference in held-out loss."""
    settings = settings_of(key)
    with later_seeds(settings.seeds):
        comparison = train_comparison(settings, folder / folder_name("_".join(key)), "benchmarks.new_seeds")
    return differences(comparison, key.reference, key.arm)["heldout_nll"]


def compare_row(key: AtlasKey, old: Mapping[str, str], new: Difference) -> dict[str, str]:
    """Return old and new difference with their intervals, and whether they agree."""
    interval = new.estimated
    assert interval is not None, "several seeds have an interval"
    assert new.seed_error is not None, "and a spread"
    old_mean, old_low, old_high = (float(old[name]) for name in ("heldout", "heldout_low", "heldout_high"))
    bound = math.hypot((old_high - old_low) / 2, interval.half_width)
    seed_bound = critical_t(2 * (new.n - 1)) * math.sqrt(2) * new.seed_error
    moved = new.mean - old_mean
    numbers = {"old": old_mean, "old_low": old_low, "old_high": old_high}
    numbers |= {"new": new.mean, "new_low": new.mean - interval.half_width, "new_high": new.mean + interval.half_width}
    numbers |= {"moved": moved, "bound": bound, "seed_bound": seed_bound}
    row = key._asdict() | {name: f"{value:.5f}" for name, value in numbers.items()}
    return row | {"agrees": "yes" if abs(moved) < bound else "no"}


def main(folder: Path) -> None:
    """Train what is missing, and write the table."""
    rows = [compare_row(key, old_row(key), new_difference(key, folder)) for key in DRAWN]
    write_table(CSV_FILE, rows)
    print(CSV_FILE.read_text(encoding="utf-8"))
    agreeing = [row for row in rows if row["agrees"] == "yes"]
    print(f"{len(agreeing)} of {len(rows)} rows agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
