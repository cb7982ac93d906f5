"""Tables of docs/dev/atlas.md about runs: the learning rates that trials chose, and the worth of the best step."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tiewise.core.measurement import count

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TUNED_STUDIES = (
    "causes",
    "gain-by-text",
    "rank",
    "rank-matched",
    "scripts",
    "size-text-matched",
    "size-text-vocabulary",
    "table-rate-by-text",
    "table-rate-options",
    "three-way",
    "vocabulary",
)
CURVES_STUDY = "gain-by-text"
# begins a setting in the name of a cell
AXIS = re.compile(r"(?:^|[-,])(layers|match|text|tokenizer|train_tokens|vocabulary|width)=")


def tables() -> Iterator[tuple[str, str]]:
    """Yield the name and the Markdown of each table."""
    for study in TUNED_STUDIES:
        yield f"chosen rates of {study}", chosen_rates(study)
    yield f"best steps of {CURVES_STUDY}", best_steps(CURVES_STUDY)


def chosen_rates(study: str) -> str:
    """Return the learning rate of each arm by the cells of a study; an asterisk marks the edge of those tried."""
    with (RESULTS / "tuned_rates.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == study]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    by_cell: dict[str, dict[str, str]] = {}
    for row in rows:
        by_cell.setdefault(row["cell"], {})[row["arm"]] = _rate_text(row)
    lines = [["cell", *arms], ["---", *["---:"] * len(arms)]]
    for cell in sorted(by_cell, key=_numbers):
        lines.append([cell_in_words(cell), *(by_cell[cell].get(arm, "") for arm in arms)])
    return markdown(lines)


def _rate_text(row: dict[str, str]) -> str:
    """Return the chosen rate, and that of tables which have their own; an asterisk marks the edge."""
    rate = row["learning_rate"]
    text = rate + "*" * (rate in {row["smallest"], row["largest"]})
    table_rate = row.get("table_rate")
    if not table_rate:
        return text
    return f"{text}, tables {table_rate}" + "*" * (table_rate in {row["table_smallest"], row["table_largest"]})


def cell_in_words(cell: str) -> str:
    """Return the folder name of a cell as text: "train tokens 12,500, V 512".

    Raises ValueError for an axis that `AXIS` lacks.
    """
    before, *parts = AXIS.split(cell)  # name, value, name, value …
    if before or any("=" in value and not value.startswith("synthetic-") for value in parts[1::2]):
        raise ValueError(f"{cell}: add its axis to AXIS")
    return ", ".join(_axis_in_words(name, value) for name, value in zip(parts[::2], parts[1::2], strict=True))


def _axis_in_words(name: str, value: str) -> str:
    """Return one setting of a cell as text; a text stands for itself."""
    words = value.removeprefix("bpe-").removeprefix("synthetic-").replace("=", " ")
    if words.isdecimal():
        words = count(int(words))
    if name in ("match", "text"):
        return words
    names = {"tokenizer": "V", "vocabulary": "V"}
    return f"{names.get(name, name.replace('_', ' '))} {words}"


def _numbers(cell: str) -> list[float]:
    """Return the numbers in the name of a cell, by which cells are sorted."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]


@dataclass(frozen=True)
class Stop:
    """Best step of one run."""

    step: int
    gain: float  # loss at the last step less loss at the best step, on the tuning split


def best_steps(study: str) -> str:
    """Return, by amount of text and arm, which step is best and by how much the last step is worse."""
    stops: dict[float, dict[str, list[Stop]]] = {}
    for run in _runs(RESULTS / "curves" / f"{study}.jsonl"):
        stop = Stop(run["selected"], run["tune_nll"][-1] - min(run["tune_nll"]))
        [tokens] = _numbers(run["cell"])
        stops.setdefault(tokens, {}).setdefault(run["arm"], []).append(stop)
    arms = list(next(iter(stops.values())))
    header = [f"{arm}: {words}" for arm in arms for words in ("best step", "last − best")]
    lines = [["train tokens", *header], ["---:"] * (1 + len(header))]
    for tokens, by_arm in sorted(stops.items()):
        cells = [text for arm in arms for text in _arm_cells(by_arm[arm])]
        lines.append([count(int(tokens)), *cells])
    return markdown(lines)


def _arm_cells(stops: list[Stop]) -> tuple[str, str]:
    """Return the range of the best steps over seeds, and the mean gain of stopping there."""
    first, last = (choose(stop.step for stop in stops) for choose in (min, max))
    steps = f"{first}" if first == last else f"{first} to {last}"
    return steps, f"{fmean(stop.gain for stop in stops):.2f}"


def _runs(path: Path) -> Iterator[dict]:
    """Yield the runs of a file of curves."""
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "cell" in record:
            yield record


def markdown(lines: list[list[str]]) -> str:
    """Return lines of cells as a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
